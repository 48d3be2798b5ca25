//! Reads that no client has requested yet: predicted extents, scheduled beside the real requests.
//!
//! Speculations are a separate class. Policies do not see them and accounts are not charged for them, so they neither
//! win nor cost an application its turn. One starts in one of two ways:
//! - *along with* a read that ends where it begins, or within it: the device then moves both in one piece, positioning
//!   once. A stream that has caught up with its predictions thus gets large pieces under load.
//! - *alone*, in ascending order from the end of the last one, while the policy has nothing to start on the lane and
//!   fewer than [`CoreConfig::lane_speculations`](crate::CoreConfig::lane_speculations) are in flight there: a real
//!   request waits for at most that many.
//!
//! A file that was read ahead much gives way to reads of others ([`overtaking`](crate::overtaking)): it starts neither.
//! Where the layer below decides the order, its own reads of what is queued here wait as well, else they would take its
//! place before the others.
//!
//! It is dropped when a write, truncate or unlink covers any of it, or a read covers all of it. No reply contains its
//! bytes, hence it conflicts with nothing while in flight: the destination (the page cache) orders reads and writes
//! itself.

use std::collections::BTreeMap;

use crate::names::Names;
use crate::overtaking::Overtaking;
use crate::table::{Slot, State, Table};
use crate::types::{FileId, LaneId, Nanos, RequestId};

/// A place in the order of speculations: lane, file, first byte.
type Position = (LaneId, FileId, u64);

/// The speculations of a core.
pub(crate) struct Speculations {
    /// By lane, file and first byte; those of one file do not overlap.
    queued: BTreeMap<Position, Slot>,
    lanes: Vec<Lane>,
    overtaking: Overtaking,
    /// When one that gives way may start at the latest, as of the last search; `MAX`: none gives way.
    barred_until: Nanos,
    /// Maximum in flight on their own per lane.
    limit: u32,
    given_up: Vec<RequestId>,
    started_bytes: u64,
}

#[derive(Clone, Copy, Default)]
struct Lane {
    in_flight: u32,
    /// End of the last one that started alone.
    head: (FileId, u64),
}

impl Speculations {
    pub(crate) fn new(lanes: usize, limit: u32) -> Speculations {
        let overtaking = Overtaking::new(if limit > 0 { lanes } else { 0 });
        let lanes = vec![Lane::default(); lanes];
        let barred_until = Nanos::MAX;
        let queued = BTreeMap::new();
        Speculations { queued, lanes, overtaking, barred_until, limit, given_up: Vec::new(), started_bytes: 0 }
    }

    /// True if speculations are accepted.
    pub(crate) fn enabled(&self) -> bool {
        self.limit > 0
    }

    /// True if none is queued.
    pub(crate) fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Bytes of all speculations started so far.
    pub(crate) fn started_bytes(&self) -> u64 {
        self.started_bytes
    }

    /// Queued speculations that overlap `start..end`, ascending.
    fn overlapping(&self, table: &Table, lane: LaneId, file: FileId, start: u64, end: u64) -> Vec<Slot> {
        let before = self.queued.range((lane, file, 0)..(lane, file, start)).next_back();
        let before = before.filter(|(_, slot)| table.end(**slot) > start);
        let within = self.queued.range((lane, file, start)..(lane, file, end));
        before.into_iter().chain(within).map(|(_, slot)| *slot).collect()
    }

    /// Whether any queued speculation overlaps `start..end`. Those of a file do not overlap, so only the last one that
    /// begins before the end can.
    fn overlaps(&self, table: &Table, (lane, file, start): Position, end: u64) -> bool {
        let last = self.queued.range((lane, file, 0)..(lane, file, end)).next_back();
        last.is_some_and(|(_, slot)| table.end(*slot) > start)
    }

    /// Queues a speculation; false if it overlaps a queued one.
    pub(crate) fn insert(&mut self, table: &mut Table, slot: Slot) -> bool {
        let (lane, file, start, end) = (table.lane(slot), table.file(slot), table.start(slot), table.end(slot));
        if !self.overlapping(table, lane, file, start, end).is_empty() {
            return false;
        }
        table.set_state(slot, State::Speculative);
        self.queued.insert((lane, file, start), slot);
        true
    }

    /// Drops speculations that overlap `start..end`, which is about to change.
    pub(crate) fn changed(&mut self, table: &mut Table, lane: LaneId, file: FileId, start: u64, end: u64) {
        for slot in self.overlapping(table, lane, file, start, end) {
            self.give_up(table, slot);
        }
    }

    /// `start..end` is about to be read. Returns the speculation that continues it, removed from the queue and cut to
    /// begin at `end`; if its file gives way, cuts it and leaves it. Drops others that overlap the read.
    pub(crate) fn continues(
        &mut self,
        table: &mut Table,
        names: &Names,
        (lane, file, start): Position,
        end: u64,
        now: Nanos,
    ) -> Option<Slot> {
        let mut next = self.queued.get(&(lane, file, end)).copied();
        for slot in self.overlapping(table, lane, file, start, end) {
            if table.end(slot) > end && next.is_none() {
                next = Some(slot);
            } else {
                self.give_up(table, slot);
            }
        }
        let slot = next?;
        self.queued.remove(&(lane, file, table.start(slot)));
        let passed = end - table.start(slot);
        table.advance(slot, passed);
        if self.overtaking.bars(lane, names.file(file), now).is_some() {
            self.queued.insert((lane, file, end), slot);
            return None;
        }
        self.start(table, names, slot);
        Some(slot)
    }

    /// The next speculation that may start alone on a lane, removed from the queue.
    pub(crate) fn alone(&mut self, table: &mut Table, names: &Names, lane: LaneId, now: Nanos) -> Option<Slot> {
        let of = self.lanes[lane.index()];
        if of.in_flight >= self.limit {
            return None;
        }
        let (first, head) = ((lane, FileId(0), 0), (lane, of.head.0, of.head.1));
        let end = (LaneId(lane.0.saturating_add(1)), FileId(0), 0);
        let (key, slot) = self.may_start(names, head, end, now).or_else(|| self.may_start(names, first, head, now))?;
        self.queued.remove(&key);
        let end = table.end(slot);
        let of = &mut self.lanes[lane.index()];
        of.in_flight += 1;
        of.head = (key.1, end);
        self.start(table, names, slot);
        Some(slot)
    }

    /// The first from a place on, before another one on the same lane, whose file does not give way.
    fn may_start(&mut self, names: &Names, from: Position, to: Position, now: Nanos) -> Option<(Position, Slot)> {
        let mut at = from;
        while at < to {
            let (&key, &slot) = self.queued.range(at..to).next()?;
            let Some(until) = self.overtaking.bars(key.0, names.file(key.1), now) else { return Some((key, slot)) };
            self.barred_until = self.barred_until.min(until);
            at = (key.0, FileId(key.1.0.checked_add(1)?), 0);
        }
        None
    }

    /// A search for what may start begins.
    pub(crate) fn search(&mut self) {
        self.barred_until = Nanos::MAX;
    }

    /// When one that gave way in the last search may start at the latest; `MAX`: none did.
    pub(crate) fn barred_until(&self) -> Nanos {
        self.barred_until
    }

    /// Until when a read of `start..end` should wait at most because it is part of what gives way; `None`: it should not.
    pub(crate) fn holds(
        &self,
        table: &Table,
        names: &Names,
        (lane, file, start): Position,
        end: u64,
        now: Nanos,
    ) -> Option<Nanos> {
        let part = || self.overlaps(table, (lane, file, start), end);
        self.overtaking.bars_if(lane, names.file(file), now, part)
    }

    /// A read of a client starts: its number, for [`Speculations::read_ended`]; 0 if there are no speculations.
    pub(crate) fn read_started(&mut self, names: &Names, lane: LaneId, file: FileId, now: Nanos) -> u64 {
        if self.enabled() { self.overtaking.read_started(lane, names.file(file), now) } else { 0 }
    }

    /// It is answered.
    pub(crate) fn read_ended(&mut self, lane: LaneId, number: u64) {
        if number > 0 {
            self.overtaking.read_ended(lane, number);
        }
    }

    fn start(&mut self, table: &mut Table, names: &Names, slot: Slot) {
        table.set_state(slot, State::InFlight);
        let bytes = table.len_bytes(slot);
        self.overtaking.piece_started(table.lane(slot), names.file(table.file(slot)), bytes);
        self.started_bytes = self.started_bytes.saturating_add(bytes);
    }

    /// A speculation that started alone has ended.
    pub(crate) fn ended(&mut self, lane: LaneId) {
        self.lanes[lane.index()].in_flight -= 1;
    }

    fn give_up(&mut self, table: &mut Table, slot: Slot) {
        self.queued.remove(&(table.lane(slot), table.file(slot), table.start(slot)));
        self.given_up.push(table.id(slot));
        table.remove(slot);
    }

    /// Drops all queued speculations.
    pub(crate) fn give_up_all(&mut self, table: &mut Table) {
        while let Some((_, slot)) = self.queued.pop_first() {
            self.given_up.push(table.id(slot));
            table.remove(slot);
        }
    }

    /// Returns a dropped speculation for the driver to forget, or `None`.
    pub(crate) fn take_given_up(&mut self) -> Option<RequestId> {
        self.given_up.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Completion, Core, CoreConfig, Event, Extent, Nanos, Next, Op, PolicySpec, Request};

    const KIB: u64 = 1 << 10;

    fn core(policy: &str) -> Core {
        let config = CoreConfig { lane_speculations: 2, sorted_below: true, ..CoreConfig::single_lane(64) };
        Core::new(config, &PolicySpec::named(policy)).unwrap()
    }

    fn request(op: Op, offset: u64, len: u64) -> Request {
        let extent = Extent { file: FileId(1), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
        Request::new(op, extent)
    }

    fn next(core: &mut Core) -> crate::Batch {
        match core.next(Nanos(1)) {
            Next::Dispatch(batch) => batch,
            wait => panic!("{wait:?}"),
        }
    }

    fn complete(core: &mut Core, batch: &crate::Batch) {
        core.event(Nanos(2), Event::Completed(Completion::of(batch, Nanos(1), Nanos(2))));
    }

    #[test]
    fn a_read_includes_the_speculation_that_continues_it() {
        let mut core = core("mlf");
        let read = core.push(Nanos(0), &request(Op::Read, 0, 128 * KIB)).unwrap();
        let ahead = core.speculate(&request(Op::Read, 128 * KIB, 1024 * KIB)).unwrap();
        let batch = next(&mut core);
        assert_eq!(batch.parts.iter().map(|p| p.id).collect::<Vec<_>>(), [read, ahead]);
        assert_eq!(batch.extent.len, 1152 * KIB);
        complete(&mut core, &batch);
        assert!(core.is_empty() && core.take_given_up().is_none());
        assert_eq!(core.status().speculated_bytes, 1024 * KIB);
        assert_eq!(core.status().statistics.batch_bytes.max, 128 * KIB, "only what was asked for counts");
    }

    #[test]
    fn a_read_that_overtakes_a_speculation_includes_its_rest() {
        let mut core = core("auto");
        let ahead = core.speculate(&request(Op::Read, 64 * KIB, 256 * KIB)).unwrap();
        let passed = core.speculate(&request(Op::Read, 0, 32 * KIB)).unwrap();
        assert!(core.speculate(&request(Op::Read, 300 * KIB, 64 * KIB)).is_none(), "it shares bytes with one");
        core.push(Nanos(0), &request(Op::Read, 0, 128 * KIB)).unwrap();
        let batch = next(&mut core);
        let part = batch.parts[1];
        assert_eq!((part.id, part.from, part.lane_offset, part.len), (ahead, 0, 128 * KIB, 192 * KIB));
        assert_eq!((core.take_given_up(), core.take_given_up()), (Some(passed), None));
        complete(&mut core, &batch);
        assert!(core.is_empty());
    }

    #[test]
    fn alone_speculations_start_in_order_up_to_the_limit() {
        let mut core = core("auto");
        for at in [512, 0, 256] {
            core.speculate(&request(Op::Read, at * KIB, 64 * KIB)).unwrap();
        }
        let first = next(&mut core);
        let second = next(&mut core);
        assert_eq!([first.extent.lane_offset, second.extent.lane_offset], [0, 256 * KIB]);
        assert!(matches!(core.next(Nanos(1)), Next::Wait { .. }));
        // Speculations do not delay a request.
        core.push(Nanos(1), &request(Op::Read, 9 << 20, 4 * KIB)).unwrap();
        let real = next(&mut core);
        assert_eq!(real.extent.len, 4 * KIB);
        complete(&mut core, &first);
        let third = next(&mut core);
        assert_eq!(third.extent.lane_offset, 512 * KIB);
        for batch in [second, real, third] {
            complete(&mut core, &batch);
        }
        assert!(core.is_empty());
    }

    #[test]
    fn with_one_batch_at_a_time_speculations_wait_for_the_lane() {
        let mut core = core("mlf");
        core.push(Nanos(0), &request(Op::Read, 9 << 20, 4 * KIB)).unwrap();
        core.speculate(&request(Op::Read, 0, 64 * KIB)).unwrap();
        let real = next(&mut core);
        assert!(matches!(core.next(Nanos(1)), Next::Wait { .. }));
        complete(&mut core, &real);
        assert_eq!(next(&mut core).extent.lane_offset, 0);
    }

    #[test]
    fn a_speculation_on_a_held_lane_starts_when_the_hold_ends() {
        let mut core = core("mlf");
        core.hold(LaneId(0), Nanos(9));
        core.speculate(&request(Op::Read, 0, 64 * KIB)).unwrap();
        assert!(matches!(core.next(Nanos(1)), Next::Wait { until: Nanos(9), .. }), "no event would wake it");
        assert!(matches!(core.next(Nanos(9)), Next::Dispatch(_)));
    }

    #[test]
    fn a_change_drops_overlapping_speculations() {
        for (op, len) in [(Op::Write, KIB), (Op::Truncate, u64::MAX), (Op::Unlink, u64::MAX)] {
            let mut core = core("auto");
            let ahead = core.speculate(&request(Op::Read, 64 * KIB, 64 * KIB)).unwrap();
            let start = if op == Op::Unlink { 0 } else { 100 * KIB };
            core.push(Nanos(0), &request(op, start, len)).unwrap();
            assert_eq!(core.take_given_up(), Some(ahead), "{op:?}");
            let batch = next(&mut core);
            assert_eq!(batch.op, op);
            complete(&mut core, &batch);
            assert!(core.is_empty());
        }
    }

    #[test]
    fn speculations_leave_room_for_requests_and_are_dropped_on_drain() {
        let mut core = core("auto");
        let taken = (0..64).filter(|i| core.speculate(&request(Op::Read, i << 20, KIB)).is_some()).count();
        assert_eq!((taken, core.room()), (48, 16));
        core.drain(Nanos(0));
        assert_eq!(std::iter::from_fn(|| core.take_given_up()).count(), 48);
        assert!(core.is_empty());
        let mut off = Core::new(CoreConfig::single_lane(64), &PolicySpec::named("fifo")).unwrap();
        assert!(off.speculate(&request(Op::Read, 0, KIB)).is_none());
    }

    #[test]
    fn the_policy_none_starts_no_speculations() {
        let mut core = core("auto");
        let ahead = core.speculate(&request(Op::Read, 0, KIB)).unwrap();
        core.reconfigure(Nanos(1), &PolicySpec::named("none")).unwrap();
        assert_eq!(core.take_given_up(), Some(ahead));
        assert!(core.is_empty() && core.speculate(&request(Op::Read, 0, KIB)).is_none());
    }

    /// A file that is read ahead, another that is read beside it, and a device that always serves what it has of the first
    /// one, as an elevator does whose head is there.
    struct Beside {
        core: Core,
        now: u64,
        flying: Vec<crate::Batch>,
        /// Of the first file: in memory, asked for, predicted.
        cached: u64,
        asked: u64,
        predicted: u64,
    }

    const LARGE: u64 = 512 << 20;
    const PIECE: u64 = 2 << 20;

    impl Beside {
        fn new() -> Beside {
            let config = CoreConfig { lane_speculations: 16, sorted_below: true, ..CoreConfig::single_lane(64) };
            let core = Core::new(config, &PolicySpec::named("auto")).unwrap();
            Beside { core, now: 0, flying: Vec::new(), cached: 0, asked: 0, predicted: 0 }
        }

        /// After so much of the large file was read that it gives way.
        fn long_read() -> Beside {
            let mut beside = Beside::new();
            beside.ask();
            while beside.cached < 64 << 20 {
                beside.serve();
            }
            beside
        }

        /// A read of the other file.
        fn ask_for_other(&mut self, at: u64) {
            let mut read = request(Op::Read, at, 64 * KIB);
            read.extent.file = FileId(2);
            self.core.push(Nanos(self.now), &read).unwrap();
        }

        /// The reader of the large file asks for its next bytes, and what foresight makes of that is queued.
        fn ask(&mut self) {
            if self.asked == LARGE {
                return;
            }
            self.core.push(Nanos(self.now), &request(Op::Read, self.asked, 64 * KIB)).unwrap();
            self.asked += 64 * KIB;
            while self.predicted < LARGE && self.predicted < self.asked + PIECE {
                self.predicted = self.predicted.max(self.asked);
                self.core.speculate(&request(Op::Read, self.predicted, PIECE)).unwrap();
                self.predicted += PIECE;
            }
        }

        /// Hands over what may start, and completes what memory has.
        fn pump(&mut self) {
            while let Next::Dispatch(batch) = self.core.next(Nanos(self.now)) {
                self.flying.push(batch);
                self.answer();
            }
        }

        fn answer(&mut self) {
            let in_memory = |b: &crate::Batch, cached: u64| b.extent.file == FileId(1) && b.extent.end() <= cached;
            while let Some(at) = self.flying.iter().position(|b| in_memory(b, self.cached)) {
                let batch = self.flying.swap_remove(at);
                let is_read = batch.parts.len() == 2 || batch.extent.len == 64 * KIB;
                self.core.event(Nanos(self.now), Event::Completed(Completion::of(&batch, Nanos(0), Nanos(self.now))));
                if is_read {
                    self.ask();
                }
            }
        }

        /// The device serves a batch: of the large file, as long as it has any. Which file's, and how many bytes.
        fn serve(&mut self) -> (FileId, u64) {
            self.pump();
            let nearest = |at: &usize| (self.flying[*at].extent.file, self.flying[*at].extent.lane_offset);
            let at = (0..self.flying.len()).min_by_key(nearest).expect("something can always be served");
            let Extent { file, len, .. } = self.flying[at].extent;
            self.now += len * 8;
            if file == FileId(1) {
                self.cached = self.cached.max(self.flying[at].extent.end());
                self.answer();
            } else {
                let batch = self.flying.swap_remove(at);
                self.core.event(Nanos(self.now), Event::Completed(Completion::of(&batch, Nanos(0), Nanos(self.now))));
            }
            (file, len)
        }
    }

    #[test]
    fn a_read_beside_a_file_that_is_read_ahead_waits_for_what_is_in_flight_and_one_piece() {
        let mut beside = Beside::long_read();
        for other in 0..4 {
            beside.pump();
            let in_flight: u64 = beside.flying.iter().map(|batch| batch.extent.len).sum();
            beside.ask_for_other(other * 64 * KIB);
            let mut before = 0;
            loop {
                let (file, len) = beside.serve();
                if file == FileId(2) {
                    break;
                }
                before += len;
                assert!(before < LARGE / 2, "it is passed over until the large file has been read");
            }
            assert!(before <= in_flight + PIECE + 64 * KIB, "{before} bytes before it, {in_flight} were in flight");
        }
        while beside.cached < LARGE {
            beside.serve();
        }
        beside.pump();
        assert!(beside.core.is_empty(), "nothing is left waiting");
    }

    /// What gives way goes on at once when the read is answered, and after half a second if that hangs.
    #[test]
    fn giving_way_ends_with_the_read_or_after_half_a_second() {
        for hangs in [false, true] {
            let mut beside = Beside::long_read();
            beside.ask_for_other(0);
            let began = beside.now;
            beside.pump();
            while beside.flying.iter().any(|batch| batch.extent.file == FileId(1)) {
                beside.serve();
                beside.pump();
            }
            assert!(beside.core.held_back().count() == 1 && beside.flying.len() == 1);
            let Next::Wait { until, .. } = beside.core.next(Nanos(beside.now)) else { panic!("it does not give way") };
            assert_eq!(until, Nanos(began + crate::overtaking::PATIENCE.0));
            if hangs {
                beside.now = until.0;
            } else {
                beside.serve();
            }
            beside.pump();
            assert_eq!(beside.core.held_back().count(), 0);
            assert!(beside.flying.iter().any(|batch| batch.extent.file == FileId(1)));
        }
    }

    /// `cargo test --release -p impresario-sched --lib -- --ignored giving_way_costs --nocapture` prints it.
    #[test]
    #[ignore = "a measurement"]
    fn giving_way_costs_some_tens_of_nanoseconds() {
        // Reads of one file, while 200 reads of another wait below; of a third something is queued to be read ahead.
        let ns = |queued: bool, had_bytes: u64| {
            let config = CoreConfig { lane_speculations: 16, sorted_below: true, ..CoreConfig::single_lane(1024) };
            let config = CoreConfig { statistics: false, ..config };
            let mut core = Core::new(config, &PolicySpec::named("auto")).unwrap();
            let read = |file, offset, len| {
                let mut read = request(Op::Read, offset, len);
                read.extent.file = FileId(file);
                read
            };
            for i in 0..200 {
                core.push(Nanos(1), &read(2, i << 20, 4 * KIB)).unwrap();
                next(&mut core);
            }
            for i in 0..had_bytes / PIECE {
                core.speculate(&read(1, (1 << 40) + i * PIECE, PIECE)).unwrap();
                // Older reads of other files have been answered by then, or the file would give way.
                let Next::Dispatch(batch) = core.next(Nanos(1 + crate::overtaking::PATIENCE.0)) else {
                    panic!("it starts")
                };
                complete(&mut core, &batch);
            }
            if queued {
                // As many as start are in flight, so that one stays queued.
                (0..=16).for_each(|i| assert!(core.speculate(&read(3, i << 30, 4 * KIB)).is_some()));
                (0..16).for_each(|_| drop(next(&mut core)));
            }
            let (requests, start) = (2_000_000_u64, std::time::Instant::now());
            for n in 0..requests {
                core.push(Nanos(1), &read(1, n.wrapping_mul(0x9e37_79b9) % (1 << 20) * 4096, 4096)).unwrap();
                let batch = next(&mut core);
                complete(&mut core, &batch);
            }
            start.elapsed().as_secs_f64() * 1e9 / requests as f64
        };
        for _ in 0..3 {
            let [none, little, much] = [(false, 0), (true, 0), (true, 64 << 20)].map(|(queued, had)| ns(queued, had));
            println!(
                "{none:.1} ns a read with nothing queued to be read ahead, {little:.1} with something of another file, \
                 {much:.1} if the read's file had much"
            );
        }
    }

    /// Changes, cancelling and other policies do not leave behind what waits.
    #[test]
    fn reads_that_wait_with_their_speculation_can_be_withdrawn() {
        for how in 0..4 {
            let mut beside = Beside::long_read();
            beside.ask_for_other(0);
            while beside.core.held_back().next().is_none() {
                beside.serve();
            }
            let held = beside.core.held_back().next().unwrap();
            let now = Nanos(beside.now);
            match how {
                0 => assert_eq!(beside.core.cancel(now, held), crate::Cancelled::Removed),
                1 => assert_eq!(beside.core.drain(now).len(), 1),
                2 => beside.core.reconfigure(now, &PolicySpec::named("none")).unwrap(),
                _ => assert!(beside.core.push(now, &request(Op::Unlink, 0, u64::MAX)).is_ok()),
            }
            let mut dispatched = Vec::new();
            while let Next::Dispatch(batch) = beside.core.next(now) {
                dispatched.extend(batch.parts.iter().map(|part| part.id));
                beside.flying.push(batch);
            }
            assert_eq!((beside.core.held_back().count(), dispatched.contains(&held)), (0, how >= 2), "{how}");
            while let Some(batch) = beside.flying.pop() {
                complete(&mut beside.core, &batch);
                while let Next::Dispatch(batch) = beside.core.next(now) {
                    beside.flying.push(batch);
                }
            }
            while beside.core.take_given_up().is_some() {}
            assert!(beside.core.is_empty(), "{how}");
        }
    }
}
