//! Reads of processes that each read a part of a file of their own: which go first, so that the drive's memory serves
//! most of them.
//!
//! After a read a drive reads on while nothing else moves its head, and keeps what it read of some streams. Requests
//! that go round many processes leave it no time for that: each costs a seek. So a lane *dwells* after a batch of such
//! a part, while the drive reads what the recorded run says that the process reads next; then requests that should be in
//! the drive's memory go first. Where a seek must be paid, all servers choose alike without a message, so that the
//! processes which one server favours do not wait at another: by file, whose turn follows from the shared clock, then from
//! the lowest offset. Every [`MLF_TURN`]th seek, every [`MLF_BATCHES`]th batch, the first batch of each turn and what a
//! guard asks for go where `mlf` sends the head, so that nobody stands still.
//!
//! Dwelling must pay: an account for each lane has what hits saved that a dwell brought, and what dwelling cost.

use std::collections::VecDeque;

use super::levels::Levels;
use super::matched::AGAIN_AFTER;
use crate::policy::View;
use crate::sorted::SortedSet;
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// The drive is taken to keep so many streams, so much of each, and to read on so far.
const KEPT_MAX: usize = 12;
const KEPT_BYTES: u64 = 2 << 20;
const AHEAD_BYTES: u64 = 1 << 20;
/// How long a file is the first one.
const TURN: Nanos = Nanos(1_000_000_000);
/// One of so many seeks, and one of so many batches, goes where `mlf` sends the head.
const MLF_TURN: u64 = 16;
const MLF_BATCHES: u64 = 4 * MLF_TURN;
/// What a lane may lose by dwelling, in longest waits: at first and at most; and the part of the device time.
const FREE_WAITS: i64 = 8;
const LOSS_PART: u64 = 50;
/// Seeks of which the time is known before anything is dwelt on.
const SEEKS_MIN: u32 = 4;
/// A new seek has at least this weight in their mean.
const MEMORY: u32 = 16;
/// Mixes a file's key.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A place in the order of files, and an offset.
type Position = (u64, u64, u32);

/// When something happens, and how fast the drive reads.
#[derive(Clone, Copy)]
pub(super) struct Present {
    now: Nanos,
    shared_now: Nanos,
    /// The time of a transfer.
    ns_per_byte: f64,
}

impl Present {
    /// As a policy sees it.
    pub fn of(view: &View<'_>) -> Present {
        const BYTES: u64 = 1 << 20;
        let ns = view.cost.ttp(Op::Read, BYTES).0.saturating_sub(view.cost.ttp(Op::Read, 0).0);
        Present { now: view.now, shared_now: view.shared_now, ns_per_byte: (ns as f64 / BYTES as f64).max(1e-3) }
    }

    fn turn(&self) -> u64 {
        self.shared_now.0 / TURN.0
    }
}

/// What the drive should have in its memory.
#[derive(Clone, Copy)]
struct Kept {
    file: u64,
    from: u64,
    until: u64,
    /// A dwell brought what begins and ends here.
    dwelt: (u64, u64),
    used: Nanos,
}

impl Kept {
    /// Drives keep the latest part of a stream.
    fn trimmed(self) -> Kept {
        Kept { from: self.from.max(self.until.saturating_sub(KEPT_BYTES)), ..self }
    }

    fn has(&self, file: u64, start: u64) -> bool {
        self.file == file && (self.from..=self.until).contains(&start)
    }

    fn owes_to_dwell(&self, start: u64, end: u64) -> bool {
        start < self.dwelt.1 && end > self.dwelt.0
    }
}

/// Where the drive reads on.
#[derive(Clone, Copy)]
struct Reading {
    kept: Kept,
    /// The part of the process ends here.
    own_end: u64,
    /// Since when; `None`: its batch is in flight.
    since: Option<Nanos>,
}

impl Reading {
    /// Where it is after so long, of which no more than the longest dwell counts.
    fn after(&self, time: Nanos, present: &Present, longest: Nanos) -> u64 {
        let bytes = (time.min(longest).0 as f64 / present.ns_per_byte) as u64;
        let until = self.kept.until;
        until.saturating_add(bytes.min(AHEAD_BYTES)).min(self.own_end.max(until))
    }

    fn reached(&self, present: &Present, longest: Nanos) -> u64 {
        self.after(self.since.map_or(Nanos::ZERO, |since| present.now.since(since)), present, longest)
    }
}

/// What a batch in flight should be.
#[derive(Clone, Copy)]
enum Flight {
    Seek,
    /// Of where the drive reads on; whether a dwell brought it.
    Hit(bool),
    /// Of what the drive keeps; and where it reads on if it has that no more.
    Kept(bool, Reading),
}

#[derive(Default)]
struct Lane {
    queued: SortedSet<Position>,
    /// The one used last is the last.
    kept: VecDeque<Kept>,
    reading: Option<Reading>,
    dwells_since: Option<Nanos>,
    flight: Option<Flight>,
    /// Mean time of a seek, ns, and of how many.
    seek_ns: f64,
    seeks: u32,
    credit_ns: i64,
    /// Seeks and batches since `mlf` chose, and the turn in which it did.
    since_mlf: (u64, u64),
    turn: u64,
}

/// Of all lanes.
pub(super) struct Segments {
    longest: Nanos,
    lanes: Vec<Lane>,
}

/// What goes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Next {
    /// The virtual request that contains this one.
    Send(Slot),
    /// Nothing before this instant.
    Dwell(Nanos),
    /// What the caller likes.
    Any,
}

fn order_of(file: u64) -> u64 {
    file.wrapping_mul(SPREAD)
}

impl Segments {
    /// Dwells for at most `longest`; zero: it never acts.
    pub fn new(longest: Nanos, lanes: usize) -> Segments {
        let credit_ns = longest.0 as i64 * FREE_WAITS;
        let lane = || Lane { credit_ns, ..Lane::default() };
        Segments { longest, lanes: (0..lanes).map(|_| lane()).collect() }
    }

    /// Whether a lane goes by this.
    pub fn acts(&self, at: usize) -> bool {
        let lane = &self.lanes[at];
        lane.credit_ns > 0 && lane.seeks >= SEEKS_MIN
    }

    /// A request was queued.
    pub fn arrived(&mut self, lane: usize, file: u64, start: u64, slot: Slot) {
        self.lanes[lane].queued.insert((order_of(file), start, slot.0));
    }

    /// It left the queue.
    pub fn left(&mut self, lane: usize, file: u64, start: u64, slot: Slot) {
        self.lanes[lane].queued.remove(&(order_of(file), start, slot.0));
    }

    /// What a lane sends next, whose device is idle and whose turn is that of such a read; `guarded`: a guard asks for
    /// what the caller would send.
    fn next(&mut self, present: &Present, at: usize, guarded: bool) -> Next {
        if !self.acts(at) {
            return Next::Any;
        }
        let longest = self.longest;
        let lane = &mut self.lanes[at];
        lane.forget_old(present.now);
        if guarded || lane.is_mlf_due(present) {
            return Next::Any;
        }
        if let Some(reading) = lane.reading {
            let reached = reading.reached(present, longest);
            // What begins where the drive has come to is read on.
            if let Some(slot) = lane.within(reading.kept.file, (reading.kept.from, reached)) {
                return Next::Send(slot);
            }
            let far = reading.after(longest, present, longest);
            if let Some(since) = reading.since.filter(|_| reached < far) {
                let lasts = Nanos(((far - reading.kept.until) as f64 * present.ns_per_byte) as u64);
                let until = since + lasts.min(longest);
                if until > present.now {
                    lane.dwells_since.get_or_insert(present.now);
                    return Next::Dwell(until);
                }
            }
        }
        // Of an empty read nothing is kept.
        let kept = lane.kept.iter().rev().filter_map(|kept| Some((kept.file, (kept.from, kept.until.checked_sub(1)?))));
        if let Some(slot) = kept.into_iter().find_map(|(file, range)| lane.within(file, range)) {
            return Next::Send(slot);
        }
        let first = present.turn().wrapping_mul(SPREAD);
        let lowest = lane.queued.at_or_after(&(first, 0, 0)).or_else(|| lane.queued.first());
        lowest.map_or(Next::Any, |(.., slot)| Next::Send(Slot(slot)))
    }

    /// What a lane, which idles since an instant if it does, sends in place of the virtual request that begins at `head`, or until
    /// when it dwells, no longer than the longest dwell after that instant.
    pub fn choose(
        &mut self,
        view: &View<'_>,
        levels: &mut Levels,
        lane: usize,
        (head, guarded): (Slot, bool),
        idle_since: &mut Option<Nanos>,
    ) -> Result<Slot, Nanos> {
        match self.next(&Present::of(view), lane, guarded) {
            Next::Send(slot) => Ok(levels.head_of(slot)),
            Next::Any => Ok(head),
            Next::Dwell(until) => {
                let until = until.min(*idle_since.get_or_insert(view.now) + self.longest);
                if until > view.now { Err(until) } else { Ok(head) }
            }
        }
    }

    /// A batch of such reads was sent, of which the process reads so many bytes more; `alone`: nothing else is in flight.
    pub fn sent(
        &mut self,
        present: &Present,
        at: usize,
        file: u64,
        (start, end): (u64, u64),
        own_bytes: u64,
        alone: bool,
    ) {
        let longest = self.longest;
        let lane = &mut self.lanes[at];
        lane.charge(present, longest);
        lane.forget_old(present.now);
        lane.flight = None;
        if !alone {
            lane.reading = None;
            return;
        }
        let by_mlf = lane.is_mlf_due(present);
        if by_mlf {
            (lane.since_mlf, lane.turn) = ((0, 0), present.turn());
        } else {
            lane.since_mlf.1 += 1;
        }
        let used = present.now;
        if let Some(reading) = &mut lane.reading {
            let reached = reading.reached(present, longest);
            if (Kept { until: reached, ..reading.kept }).has(file, start) {
                lane.flight = Some(Flight::Hit(reading.kept.owes_to_dwell(start, end)));
                reading.kept = Kept { until: reached.max(end), used, ..reading.kept }.trimmed();
                (reading.own_end, reading.since) = (reading.own_end.max(end), None);
                return;
            }
        }
        lane.moves(present, longest);
        let known = lane.kept.iter().position(|kept| kept.has(file, start)).and_then(|at| lane.kept.remove(at));
        let own_end = end.saturating_add(own_bytes);
        let anew = Kept { file, from: start, until: end, dwelt: (0, 0), used }.trimmed();
        if let Some(kept) = known.filter(|kept| end <= kept.until) {
            lane.keep(Kept { used, ..kept });
            let otherwise = Reading { kept: anew, own_end, since: None };
            lane.flight = Some(Flight::Kept(kept.owes_to_dwell(start, end), otherwise));
            return;
        }
        let kept = known.map_or(anew, |kept| Kept { until: end, used, ..kept }.trimmed());
        lane.reading = Some(Reading { kept, own_end, since: None });
        lane.flight = Some(Flight::Seek);
        lane.since_mlf.0 += u64::from(!by_mlf);
    }

    /// Another batch was sent.
    pub fn moved(&mut self, present: &Present, at: usize) {
        let lane = &mut self.lanes[at];
        lane.charge(present, self.longest);
        lane.flight = None;
        lane.moves(present, self.longest);
    }

    /// A batch ended after `service`; `failed`: nothing is learnt from it.
    pub fn completed(&mut self, now: Nanos, at: usize, service: Nanos, failed: bool) {
        let most = self.longest.0 as i64 * FREE_WAITS;
        let lane = &mut self.lanes[at];
        let flight = lane.flight.take();
        if failed {
            lane.reading = None;
            return;
        }
        // It fills the account only up to what it began with.
        lane.credit_ns += ((service.0 / LOSS_PART) as i64).min(most - lane.credit_ns).max(0);
        let service_ns = service.0 as f64;
        let seeks = match flight {
            Some(Flight::Seek) => true,
            Some(Flight::Kept(_, otherwise)) if service_ns * 2.0 > lane.seek_ns => {
                // The drive had it no more.
                lane.kept.pop_back();
                lane.reading = Some(otherwise);
                true
            }
            Some(Flight::Hit(true) | Flight::Kept(true, _)) => {
                let saved = (lane.seek_ns - service_ns) as i64;
                // As long as a seek: the drive does not read on.
                let saved = if saved > 0 { saved } else { saved.saturating_sub(self.longest.0 as i64) };
                lane.credit_ns = lane.credit_ns.saturating_add(saved).clamp(-most, 2 * most);
                false
            }
            Some(Flight::Hit(false) | Flight::Kept(false, _)) | None => false,
        };
        if seeks {
            lane.seeks = (lane.seeks + 1).min(MEMORY);
            lane.seek_ns += (service_ns - lane.seek_ns) / f64::from(lane.seeks);
        }
        if let Some(reading) = &mut lane.reading {
            reading.since.get_or_insert(now);
        }
    }
}

impl Lane {
    /// The first queued request of a file that begins between two offsets, both included.
    fn within(&self, file: u64, (from, last): (u64, u64)) -> Option<Slot> {
        let order = order_of(file);
        let (file, start, slot) = self.queued.at_or_after(&(order, from, 0))?;
        (file == order && start <= last).then_some(Slot(slot))
    }

    /// It is time for a batch that `mlf` chooses.
    fn is_mlf_due(&self, present: &Present) -> bool {
        let (seeks, batches) = self.since_mlf;
        seeks >= MLF_TURN - 1 || batches >= MLF_BATCHES - 1 || self.turn != present.turn()
    }

    /// A dwell ends, which the drive used to read on.
    fn charge(&mut self, present: &Present, longest: Nanos) {
        let Some(since) = self.dwells_since.take() else { return };
        self.credit_ns -= present.now.since(since).min(longest).0 as i64;
        if let Some(reading) = &mut self.reading {
            let before = reading.since.map_or(Nanos::ZERO, |began| since.since(began));
            let (from, reached) = (reading.after(before, present, longest), reading.reached(present, longest));
            let last = reading.kept.dwelt;
            reading.kept.dwelt = (if last.1 == from { last.0 } else { from }, reached);
        }
    }

    /// A file that was not read for so long begins anew: what the drive had of it is of no use.
    fn forget_old(&mut self, now: Nanos) {
        let is_new = |kept: &Kept| now.since(kept.used) <= AGAIN_AFTER;
        self.kept.retain(is_new);
        self.reading = self.reading.filter(|reading| is_new(&reading.kept));
    }

    /// The head moves elsewhere.
    fn moves(&mut self, present: &Present, longest: Nanos) {
        if let Some(reading) = self.reading.take() {
            let until = reading.reached(present, longest);
            self.keep(Kept { until, ..reading.kept });
        }
    }

    fn keep(&mut self, kept: Kept) {
        if self.kept.len() >= KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(kept.trimmed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: u64 = 1 << 10;
    const MIB: u64 = 1 << 20;
    const LONGEST: Nanos = Nanos(2_000_000);
    const MOST: i64 = LONGEST.0 as i64 * FREE_WAITS;
    const SEEK_US: u64 = 8_000;
    const HIT_US: u64 = 100;

    /// One lane of a drive that reads 100 bytes a microsecond.
    struct Bench {
        segments: Segments,
        now: Nanos,
        own_bytes: u64,
    }

    impl Bench {
        /// A lane that goes by parts, with nothing read yet, at the beginning of a turn.
        fn new() -> Bench {
            let (segments, now) = (Segments::new(LONGEST, 1), Nanos(100_000_000_000));
            let mut b = Bench { segments, now, own_bytes: 1 << 30 };
            (1..=u64::from(SEEKS_MIN)).for_each(|i| b.serve(9, i << 40, KIB, SEEK_US));
            assert!(b.segments.acts(0));
            let lane = b.lane();
            (lane.reading, lane.since_mlf) = (None, (0, 0));
            lane.kept.clear();
            b
        }

        fn lane(&mut self) -> &mut Lane {
            &mut self.segments.lanes[0]
        }

        fn present(&self) -> Present {
            Present { now: self.now, shared_now: self.now, ns_per_byte: 10.0 }
        }

        fn wait(&mut self, us: u64) {
            self.now += Nanos::from_micros(us);
        }

        fn queue(&mut self, file: u64, start: u64, slot: u32) {
            self.segments.arrived(0, file, start, Slot(slot));
        }

        fn next(&mut self) -> Next {
            self.segments.next(&self.present(), 0, false)
        }

        /// Sends a batch; whether it should be a hit.
        fn send(&mut self, file: u64, start: u64, len: u64) -> bool {
            self.segments.sent(&self.present(), 0, file, (start, start + len), self.own_bytes, true);
            !matches!(self.lane().flight, Some(Flight::Seek))
        }

        fn end(&mut self, service_us: u64, failed: bool) {
            self.wait(service_us);
            self.segments.completed(self.now, 0, Nanos::from_micros(service_us), failed);
        }

        fn serve(&mut self, file: u64, start: u64, len: u64, service_us: u64) {
            self.send(file, start, len);
            self.end(service_us, false);
        }

        /// Dwells to the end if it does.
        fn dwell(&mut self) {
            if let Next::Dwell(until) = self.next() {
                self.now = until;
            }
        }
    }

    #[test]
    fn what_is_read_on_goes_first_and_nothing_is_waited_for_behind_a_part() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.queue(2, 0, 7);
        let began = b.now;
        assert_eq!(b.next(), Next::Dwell(began + LONGEST));
        b.wait(1_000);
        b.queue(1, 64 * KIB, 8);
        assert_eq!(b.next(), Next::Send(Slot(8)));
        let mut b = Bench::new();
        b.own_bytes = 50_000;
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.queue(2, 0, 7);
        let half = Nanos::from_micros(500);
        assert_eq!(b.next(), Next::Dwell(b.now + half));
        b.wait(500);
        assert_eq!(b.next(), Next::Send(Slot(7)));
    }

    #[test]
    fn what_begins_just_where_the_drive_has_come_to_goes_first() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.queue(1, 64 * KIB, 8);
        assert_eq!(b.next(), Next::Send(Slot(8)), "at once");
        for (file, other) in [(1, 2), (2, 1)] {
            let mut b = Bench::new();
            b.serve(file, 0, 64 * KIB, SEEK_US);
            b.queue(other, 0, 7);
            b.dwell();
            b.queue(file, 64 * KIB + LONGEST.0 / 10, 8);
            assert_eq!(b.next(), Next::Send(Slot(8)), "after a whole dwell");
        }
    }

    /// However long the processes compute, and however long a wait may be.
    #[test]
    fn the_drive_reads_on_only_so_far() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.wait(500_000);
        assert!(!b.send(1, 300 * KIB, KIB), "beyond the longest dwell");
        let mut b = Bench::new();
        b.own_bytes = 32 * KIB;
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.wait(1_500);
        assert!(!b.send(1, 97 * KIB, KIB), "beyond the part of the process");
        let mut b = Bench::new();
        b.segments.longest = Nanos::from_millis(900);
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.wait(800_000);
        assert!(!b.send(1, 2 * MIB, KIB), "beyond what drives read ahead");
    }

    #[test]
    fn a_second_pass_finds_only_the_end_of_a_part_and_learns_that_it_has_gone() {
        let mut b = Bench::new();
        b.serve(1, 0, 256 * KIB, SEEK_US);
        assert!((1..64).all(|i| {
            let hit = b.send(1, i * 256 * KIB, 256 * KIB);
            b.end(HIT_US, false);
            hit
        }));
        assert!(!b.send(1, 0, 256 * KIB), "while it was the last part read");
        b.end(SEEK_US, false);
        assert!(!b.send(1, 8 * MIB, 256 * KIB), "what is kept of it");
        b.end(SEEK_US, false);
        assert!(b.send(1, 15 * MIB, 256 * KIB));
        b.end(SEEK_US, false);
        b.queue(2, 0, 7);
        assert!(matches!(b.next(), Next::Dwell(_)), "that was a seek: the drive reads on");
        b.serve(3, 0, KIB, SEEK_US);
        assert!(!b.send(1, 15 * MIB + 512 * KIB, 256 * KIB));
    }

    #[test]
    fn nothing_is_kept_of_a_file_that_begins_anew() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.serve(2, 0, 64 * KIB, SEEK_US);
        b.wait(4_000_000);
        assert!(b.send(1, 0, KIB));
        b.end(HIT_US, false);
        b.wait(5_100_000);
        assert_eq!([b.send(2, 0, KIB), b.send(1, 0, KIB)], [false; 2]);
    }

    /// A process that always answers within the dwell does not keep the lane.
    #[test]
    fn hits_end_so_that_mlf_chooses() {
        let mut b = Bench::new();
        b.serve(1, 0, KIB, SEEK_US);
        b.queue(2, 0, 7);
        let (mut at, mut chosen) = (KIB, 0);
        for _ in 0..3 * MLF_BATCHES {
            b.queue(1, at, 8);
            b.wait(50);
            match b.next() {
                Next::Send(Slot(8)) => at += KIB,
                Next::Any => chosen += 1,
                other => panic!("{other:?}"),
            }
            b.segments.left(0, 1, at - KIB, Slot(8));
            b.serve(1, at - KIB, KIB, HIT_US);
        }
        assert_eq!(chosen, 3);
    }

    #[test]
    fn a_guard_and_each_turn_let_mlf_choose() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.queue(1, 32 * KIB, 7);
        assert_eq!(b.next(), Next::Send(Slot(7)));
        assert_eq!(b.segments.next(&b.present(), 0, true), Next::Any);
        b.wait(1_000_000);
        assert_eq!(b.next(), Next::Any, "a new turn");
        b.serve(1, 32 * KIB, KIB, HIT_US);
        assert_eq!(b.next(), Next::Send(Slot(7)), "once");
    }

    /// In the same order on each server, whatever came first.
    #[test]
    fn files_take_turns() {
        let mut firsts = [0, 0];
        for turn in 0..64 {
            let choice = |order: [u64; 2]| {
                let mut b = Bench::new();
                b.wait(1_000_000 * turn);
                b.serve(3, 0, KIB, SEEK_US);
                b.lane().reading = None;
                order.into_iter().for_each(|file| b.queue(file, 64 * KIB / file, file as u32));
                b.next()
            };
            let chosen = choice([1, 2]);
            assert_eq!(chosen, choice([2, 1]));
            let Next::Send(slot) = chosen else { panic!("{chosen:?}") };
            firsts[slot.index() - 1] += 1;
        }
        assert!(firsts.iter().all(|n| *n > 16), "{firsts:?}");
    }

    #[test]
    fn hits_without_a_dwell_fill_no_account() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        assert!(b.send(1, 64 * KIB, 64 * KIB));
        b.end(HIT_US, false);
        assert_eq!(b.lane().credit_ns, MOST);
        b.queue(2, 0, 7);
        b.dwell();
        assert!(b.send(1, 128 * KIB, 64 * KIB));
        b.end(HIT_US, false);
        assert!(b.lane().credit_ns > MOST, "the dwell brought it");
    }

    /// Processes think for longer than the lane dwells.
    #[test]
    fn the_account_runs_empty_and_fills_with_the_device_time() {
        let mut b = Bench::new();
        b.queue(2, 0, 7);
        let mut rounds = 0;
        while b.segments.acts(0) {
            rounds += 1;
            assert!(rounds <= 2 * FREE_WAITS as u64, "{}", b.lane().credit_ns);
            b.serve(1, rounds << 32, 64 * KIB, SEEK_US);
            b.serve(1, (rounds << 32) + 64 * KIB, 64 * KIB, HIT_US);
            b.dwell();
            b.serve(2, rounds << 32, 64 * KIB, SEEK_US);
        }
        assert_eq!(b.next(), Next::Any);
        assert!((1..=25).any(|i| {
            b.serve(3, i << 32, KIB, SEEK_US);
            b.segments.acts(0)
        }));
    }

    #[test]
    fn a_pause_of_the_lane_is_no_dwell() {
        let mut b = Bench::new();
        b.queue(2, 0, 7);
        b.serve(1, 0, 64 * KIB, SEEK_US);
        assert!(matches!(b.next(), Next::Dwell(_)));
        b.segments.left(0, 2, 0, Slot(7)); // cancelled
        b.wait(10_000_000);
        b.send(1, 1 << 40, KIB);
        assert_eq!(b.lane().credit_ns, MOST - LONGEST.0 as i64);
    }

    #[test]
    fn nothing_is_learnt_from_errors_and_one_slow_hit_costs_no_more_than_the_account() {
        let mut b = Bench::new();
        let seek_ns = b.lane().seek_ns;
        b.send(1, 0, 64 * KIB);
        b.end(10_000_000, true);
        assert_eq!((b.lane().seek_ns, b.lane().credit_ns), (seek_ns, MOST));
        assert!(b.lane().reading.is_none());
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.queue(2, 0, 7);
        b.dwell();
        assert!(b.send(1, 64 * KIB, 64 * KIB));
        b.end(60_000_000, false);
        assert_eq!(b.lane().credit_ns, -MOST);
    }

    #[test]
    fn a_request_that_is_cancelled_during_a_dwell_is_not_chosen() {
        let mut b = Bench::new();
        b.serve(1, 0, 64 * KIB, SEEK_US);
        b.queue(2, 0, 7);
        b.queue(2, KIB, 8);
        assert!(matches!(b.next(), Next::Dwell(_)));
        b.segments.left(0, 2, 0, Slot(7));
        b.dwell();
        assert_eq!(b.next(), Next::Send(Slot(8)));
        b.segments.left(0, 2, KIB, Slot(8));
        assert_eq!(b.next(), Next::Any);
    }

    #[test]
    fn the_end_of_the_offsets_is_no_harm() {
        let mut b = Bench::new();
        b.own_bytes = u64::MAX;
        let start = u64::MAX - 64 * KIB;
        b.serve(1, start, 64 * KIB - 10, SEEK_US);
        b.queue(1, u64::MAX - 1, 7);
        b.queue(2, 0, 8);
        b.dwell();
        assert_eq!(b.next(), Next::Send(Slot(7)));
        assert!(b.send(1, u64::MAX - 1, 1));
        b.end(HIT_US, false);
        assert_eq!(b.lane().reading.map(|reading| reading.kept.until), Some(u64::MAX));
    }
}
