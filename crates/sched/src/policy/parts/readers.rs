//! Processes that each read a part of a file of their own, recognised while they read: without a recorded run.
//!
//! A process that has gone on where it ended [`IN_ROW`] times in a row is taken to go on, unless others continue its
//! requests as well, as where they go through a file together. Its reads go by what the drive has read on (`segments.rs`),
//! which dwells behind them only where that pays. How far a process goes on is not known:
//! what a dwell brings for nothing at the end of a part is in the account too.

use super::anticipation::Stream;
use super::levels::Levels;
use super::remembered::Remembered;
use super::segments::{Present, Segments};
use crate::policy::{Done, View};
use crate::table::Slot;
use crate::types::{ClientId, LaneId, Nanos, Op};

/// Maximum readers and files remembered.
const READERS_MAX: usize = 4096;
const FILES_MAX: usize = 256;
/// Reads in a row that began where the one before had ended.
const IN_ROW: u32 = 2;

/// Recent ends of reads of a file that are remembered.
const ENDS: usize = 32;
/// Of how many recent reads of a file one at most may continue another process's.
const JOINED_PART: u32 = 8;

#[derive(Clone, Copy, Default)]
struct Reader {
    end: u64,
    in_row: u32,
}

impl Reader {
    /// The process reads; whether it has gone on often enough.
    fn goes_on(&mut self, (start, end): (u64, u64)) -> bool {
        let len = end - start;
        // What is sent at once arrives in any order.
        let near = start.saturating_sub(self.end) <= len && self.end.saturating_sub(end) <= len;
        self.in_row = if near { (self.in_row + 1).min(IN_ROW) } else { 0 };
        self.end = if near { self.end.max(end) } else { end };
        self.in_row >= IN_ROW
    }
}

/// How the processes read a file.
struct Reading {
    ends: [(u64, ClientId); ENDS],
    reads: u32,
    /// Of them, those that began where another process's had ended.
    joined: u32,
}

impl Reading {
    fn new() -> Reading {
        Reading { ends: [(0, ClientId(u32::MAX)); ENDS], reads: 0, joined: 0 }
    }

    /// A process reads; whether processes keep to parts of their own.
    fn in_parts(&mut self, client: ClientId, (start, end): (u64, u64)) -> bool {
        self.joined += u32::from(start > 0 && self.ends.iter().any(|(end, of)| *end == start && *of != client));
        self.ends[self.reads as usize % ENDS] = (end, client);
        self.reads += 1;
        if self.reads as usize >= 2 * ENDS {
            (self.reads, self.joined) = (self.reads / 2, self.joined / 2);
        }
        self.joined * JOINED_PART <= self.reads
    }
}

/// Of all lanes.
pub(in crate::policy) struct Readers {
    longest: Nanos,
    segments: Segments,
    readers: Remembered<(LaneId, u64, ClientId), Reader>,
    files: Remembered<(LaneId, u64), Reading>,
    /// By slot: the read of a process that goes on.
    goes_on: Vec<bool>,
    /// By lane: since when it dwells, and whether its last batch was such a read.
    lanes: Vec<(Option<Nanos>, bool)>,
}

impl Readers {
    /// Dwells for at most `longest` before a batch.
    pub fn new(longest: Nanos, lanes: usize) -> Readers {
        Readers {
            longest,
            segments: Segments::new(longest, lanes),
            readers: Remembered::new(READERS_MAX),
            files: Remembered::new(FILES_MAX),
            goes_on: Vec::new(),
            lanes: vec![(None, false); lanes],
        }
    }

    /// Longest dwell before a batch.
    pub fn longest(&self) -> Nanos {
        self.longest
    }

    /// Whether the last batch of a lane went by what the drive reads on, so that no other wait is due.
    pub fn went_by_parts(&self, lane: usize) -> bool {
        self.lanes[lane].1
    }

    /// A request was queued.
    pub fn arrived(&mut self, view: &View<'_>, stream: Stream, slot: Slot) {
        let (lane, file, op) = stream;
        if self.goes_on.len() <= slot.index() {
            self.goes_on.resize(slot.index() + 1, false);
        }
        self.goes_on[slot.index()] = false;
        if op != Op::Read {
            return;
        }
        let (start, end) = (view.table.start(slot), view.table.end(slot));
        let client = view.table.client(slot);
        let in_parts = self.files.of((lane, file), Reading::new).in_parts(client, (start, end));
        let reader = self.readers.of((lane, file, client), Reader::default);
        if reader.goes_on((start, end)) && in_parts {
            self.goes_on[slot.index()] = true;
            self.segments.arrived(lane.index(), file, start, slot);
        }
    }

    fn goes_on(&self, slot: Slot) -> bool {
        self.goes_on.get(slot.index()).copied().unwrap_or_default()
    }

    /// A request left the queue.
    pub fn left(&mut self, view: &View<'_>, stream: Stream, slot: Slot) {
        if self.goes_on(slot) {
            self.segments.left(stream.0.index(), stream.1, view.table.start(slot), slot);
        }
    }

    /// What goes in place of the virtual request that begins at `head`, or until when the lane dwells.
    pub fn choose(
        &mut self,
        view: &View<'_>,
        levels: &mut Levels,
        stream: Stream,
        (head, guarded): (Slot, bool),
    ) -> Result<Slot, Nanos> {
        let lane = stream.0.index();
        if !may_dwell(view, lane) || view.lanes[lane].in_flight_requests > 0 || !self.goes_on(head) {
            return Ok(head);
        }
        self.segments.choose(view, levels, lane, (head, guarded), &mut self.lanes[lane].0)
    }

    /// Requests of a stream were sent.
    pub fn sent(&mut self, view: &View<'_>, stream: Stream, batch: &[Slot]) {
        let lane = stream.0.index();
        batch.iter().for_each(|slot| self.left(view, stream, *slot));
        let alone = view.lanes[lane].in_flight_requests == 0;
        let ends = batch.first().zip(batch.last().filter(|last| may_dwell(view, lane) && self.goes_on(**last)));
        match ends {
            Some((first, last)) => {
                let range = (view.table.start(*first), view.table.end(*last));
                self.segments.sent(&Present::of(view), lane, stream.1, range, u64::MAX, alone);
            }
            None => self.segments.moved(&Present::of(view), lane),
        }
        self.lanes[lane] = (None, ends.is_some() && alone && self.segments.acts(lane));
    }

    /// A batch ended.
    pub fn completed(&mut self, view: &View<'_>, lane: usize, done: &Done<'_>) {
        self.segments.completed(view.now, lane, done.service, done.errno != 0);
    }
}

/// Whether the head of a lane's device is where its last batch ended: it has the device alone, and sends one batch at a time.
fn may_dwell(view: &View<'_>, lane: usize) -> bool {
    !view.shared_space && view.lanes[lane].limit_requests == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: u64 = 8 << 10;

    fn goes_on(offsets: impl IntoIterator<Item = u64>) -> bool {
        let mut reader = Reader::default();
        offsets.into_iter().fold(false, |_, at| reader.goes_on((at * LEN, (at + 1) * LEN)))
    }

    #[test]
    fn a_process_goes_on_from_its_third_read_in_a_row_in_whatever_order_they_come() {
        assert!(!goes_on([100, 101]) && goes_on([100, 101, 102]));
        assert!(goes_on([101, 100, 103, 102]), "sent by twos");
        assert!(!goes_on([100, 101, 102, 200]) && !goes_on([100, 103, 106, 109]));
        assert!(!goes_on([103, 102, 101, 100]), "backwards");
    }

    /// Processes side by side read for one another.
    #[test]
    fn who_goes_through_a_file_together_has_no_part_of_his_own() {
        let in_parts = |place: fn(u64, u64) -> u64| {
            let mut reading = Reading::new();
            let read = |i: u64| {
                let at = place(i % 4, i / 4);
                reading.in_parts(ClientId((i % 4) as u32), (at * LEN, (at + 1) * LEN))
            };
            (0..400).map(read).last()
        };
        assert_eq!(in_parts(|client, i| client * 1000 + i), Some(true));
        assert_eq!(in_parts(|client, i| client + 4 * i), Some(false));
    }
}
