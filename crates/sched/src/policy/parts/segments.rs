//! Reads of processes that each read a part of a file of their own: which go first, so that the drive's memory serves
//! most of them.
//!
//! After a read a drive reads on while nothing else moves its head, and keeps what it read of some streams. Requests
//! that go round many processes leave it no time for that: each costs a seek. So a lane *dwells* after a seek, while the
//! drive reads what the recorded run says that the process reads next; then requests that should be in the drive's memory
//! go first. Where a seek must be paid, all servers choose alike without a message, so that the processes which one
//! server favours do not wait at another: by file, whose turn follows from the shared clock, then from the lowest offset.
//! Every [`MLF_TURN`]th seek goes where `mlf` would send the head, so that nobody stands still.
//!
//! Dwelling must pay: an account for each lane has what hits saved and what dwelling cost.

use std::collections::VecDeque;

use crate::policy::View;
use crate::sorted::SortedSet;
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// The drive is taken to keep so many streams.
const KEPT_MAX: usize = 12;
/// How long a file is the first one.
const TURN: Nanos = Nanos(1_000_000_000);
/// One of so many seeks goes where `mlf` would send the head.
const MLF_TURN: u64 = 16;
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
type Place = (u64, u64, u32);

/// What the drive should have in its memory.
#[derive(Clone, Copy)]
struct Kept {
    file: u64,
    from: u64,
    until: u64,
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
    fn reached(&self, now: Nanos, ns_per_byte: f64) -> u64 {
        let read = self.since.map_or(0.0, |since| now.since(since).0 as f64 / ns_per_byte);
        self.kept.until.saturating_add(read as u64)
    }
}

/// What a batch in flight should be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flight {
    Seek,
    Hit,
}

#[derive(Default)]
struct Lane {
    queued: SortedSet<Place>,
    kept: VecDeque<Kept>,
    reading: Option<Reading>,
    dwells_since: Option<Nanos>,
    flight: Option<Flight>,
    /// Mean time of a seek, ns, and of how many.
    seek_ns: f64,
    seeks: u32,
    credit_ns: i64,
    turns: u64,
}

/// Of all lanes.
pub(super) struct Segments {
    longest: Nanos,
    lanes: Vec<Lane>,
}

/// What goes next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
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

/// The time of a transfer, ns for each byte.
fn ns_per_byte(view: &View<'_>) -> f64 {
    const BYTES: u64 = 1 << 20;
    let ns = view.cost.ttp(Op::Read, BYTES).0.saturating_sub(view.cost.ttp(Op::Read, 0).0);
    (ns as f64 / BYTES as f64).max(1e-3)
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

    /// What a lane sends next, whose device is idle and whose turn is that of such a read.
    pub fn next(&mut self, view: &View<'_>, at: usize) -> Next {
        let (longest, ns_per_byte) = (self.longest, ns_per_byte(view));
        if !self.acts(at) {
            return Next::Any;
        }
        let lane = &mut self.lanes[at];
        if let Some(reading) = lane.reading {
            let reached = reading.reached(view.now, ns_per_byte);
            if let Some(slot) = lane.within(Kept { until: reached, ..reading.kept }) {
                return Next::Send(slot);
            }
            let far = reading.kept.until.saturating_add((longest.0 as f64 / ns_per_byte) as u64);
            let far = reading.own_end.min(far);
            if let Some(since) = reading.since.filter(|_| reached < far) {
                let lasts = (far - reading.kept.until) as f64 * ns_per_byte;
                let until = (since + Nanos(lasts as u64)).min(since + longest);
                if until > view.now {
                    lane.dwells_since.get_or_insert(view.now);
                    return Next::Dwell(until);
                }
            }
        }
        if let Some(slot) = lane.kept.iter().rev().find_map(|kept| lane.within(*kept)) {
            return Next::Send(slot);
        }
        lane.turns += 1;
        if lane.turns.is_multiple_of(MLF_TURN) {
            return Next::Any;
        }
        let first = (view.shared_now.0 / TURN.0).wrapping_mul(SPREAD);
        let lowest = lane.queued.at_or_after(&(first, 0, 0)).or_else(|| lane.queued.first());
        lowest.map_or(Next::Any, |(.., slot)| Next::Send(Slot(slot)))
    }

    /// A batch of such reads was sent, of which the process reads so many bytes more; `alone`: nothing else is in flight.
    pub fn sent(
        &mut self,
        view: &View<'_>,
        at: usize,
        file: u64,
        (start, end): (u64, u64),
        own_bytes: u64,
        alone: bool,
    ) {
        let ns_per_byte = ns_per_byte(view);
        let lane = &mut self.lanes[at];
        lane.charge(view.now);
        lane.flight = None;
        if !alone {
            lane.reading = None;
            return;
        }
        if let Some(reading) = &mut lane.reading {
            let reached = reading.reached(view.now, ns_per_byte);
            if reading.kept.file == file && (reading.kept.from..=reached).contains(&start) {
                reading.kept.until = reached.max(end);
                (reading.own_end, reading.since) = (reading.own_end.max(end), None);
                lane.flight = Some(Flight::Hit);
                return;
            }
        }
        lane.moves(view.now, ns_per_byte);
        let known = lane.kept.iter().position(|kept| kept.file == file && (kept.from..=kept.until).contains(&start));
        let known = known.and_then(|at| lane.kept.remove(at));
        if let Some(kept) = known.filter(|kept| end <= kept.until) {
            lane.keep(kept);
            lane.flight = Some(Flight::Hit);
            return;
        }
        let from = known.map_or(start, |kept| kept.from);
        let kept = Kept { file, from, until: end };
        lane.reading = Some(Reading { kept, own_end: end.saturating_add(own_bytes), since: None });
        lane.flight = Some(Flight::Seek);
    }

    /// Another batch was sent.
    pub fn moved(&mut self, view: &View<'_>, at: usize) {
        let lane = &mut self.lanes[at];
        lane.charge(view.now);
        lane.flight = None;
        if lane.reading.is_some() {
            lane.moves(view.now, ns_per_byte(view));
        }
    }

    /// A batch ended.
    pub fn completed(&mut self, view: &View<'_>, at: usize, service: Nanos) {
        let most = self.longest.0 as i64 * FREE_WAITS;
        let lane = &mut self.lanes[at];
        // It fills the account only up to what it began with.
        lane.credit_ns += ((service.0 / LOSS_PART) as i64).min(most - lane.credit_ns).max(0);
        if let Some(reading) = &mut lane.reading {
            reading.since.get_or_insert(view.now);
        }
        match lane.flight.take() {
            Some(Flight::Seek) => {
                lane.seeks = (lane.seeks + 1).min(MEMORY);
                lane.seek_ns += (service.0 as f64 - lane.seek_ns) / f64::from(lane.seeks);
            }
            Some(Flight::Hit) => {
                lane.credit_ns = (lane.credit_ns + (lane.seek_ns - service.0 as f64) as i64).min(2 * most);
            }
            None => {}
        }
    }
}

impl Lane {
    /// The first queued request that begins in what is kept.
    fn within(&self, kept: Kept) -> Option<Slot> {
        let order = order_of(kept.file);
        let (file, start, slot) = self.queued.at_or_after(&(order, kept.from, 0))?;
        (file == order && start < kept.until).then_some(Slot(slot))
    }

    fn charge(&mut self, now: Nanos) {
        if let Some(since) = self.dwells_since.take() {
            self.credit_ns -= now.since(since).0 as i64;
        }
    }

    /// The head moves elsewhere.
    fn moves(&mut self, now: Nanos, ns_per_byte: f64) {
        if let Some(reading) = self.reading.take() {
            let until = reading.reached(now, ns_per_byte);
            self.keep(Kept { until, ..reading.kept });
        }
    }

    fn keep(&mut self, kept: Kept) {
        if self.kept.len() >= KEPT_MAX {
            self.kept.pop_front();
        }
        self.kept.push_back(kept);
    }
}
