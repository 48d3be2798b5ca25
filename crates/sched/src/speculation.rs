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
//! It is dropped when a write, truncate or unlink covers any of it, or a read covers all of it. No reply contains its
//! bytes, hence it conflicts with nothing while in flight: the destination (the page cache) orders reads and writes
//! itself.

use std::collections::BTreeMap;

use crate::table::{Slot, State, Table};
use crate::types::{FileId, LaneId, RequestId};

/// The speculations of a core.
pub(crate) struct Speculations {
    /// By lane, file and first byte; those of one file do not overlap.
    queued: BTreeMap<(LaneId, FileId, u64), Slot>,
    lanes: Vec<Lane>,
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
        let lanes = vec![Lane::default(); lanes];
        Speculations { queued: BTreeMap::new(), lanes, limit, given_up: Vec::new(), started_bytes: 0 }
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
    /// begin at `end`; drops others that overlap the read.
    pub(crate) fn continues(
        &mut self,
        table: &mut Table,
        lane: LaneId,
        file: FileId,
        start: u64,
        end: u64,
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
        self.start(table, slot);
        Some(slot)
    }

    /// The next speculation that may start alone on a lane, removed from the queue.
    pub(crate) fn alone(&mut self, table: &mut Table, lane: LaneId) -> Option<Slot> {
        let of = self.lanes[lane.index()];
        if of.in_flight >= self.limit {
            return None;
        }
        let from = (lane, of.head.0, of.head.1);
        let ahead = self.queued.range(from..).next().filter(|((of, ..), _)| *of == lane);
        let (key, slot) = ahead.or_else(|| self.queued.range((lane, FileId(0), 0)..from).next())?;
        let (key, slot) = (*key, *slot);
        self.queued.remove(&key);
        let end = table.end(slot);
        let of = &mut self.lanes[lane.index()];
        of.in_flight += 1;
        of.head = (key.1, end);
        self.start(table, slot);
        Some(slot)
    }

    fn start(&mut self, table: &mut Table, slot: Slot) {
        table.set_state(slot, State::InFlight);
        self.started_bytes = self.started_bytes.saturating_add(table.len_bytes(slot));
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
}
