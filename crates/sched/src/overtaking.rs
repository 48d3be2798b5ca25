//! Which reads wait below the scheduler, and which files may not be read ahead past them.
//!
//! A layer that sorts, such as a kernel above a disk, serves what lies near the head: a file that is read ahead piece after
//! piece keeps its queue filled there, and a read that lies elsewhere waits until the file has been read to its end. So the
//! files that were read ahead most give way: while a read waits, a file that had far more than the read's own file may
//! start a piece that the read does not come before, or small ones of [`PASSES_BYTES`] together, and then waits until the
//! read is answered, or has waited for [`PATIENCE`]. This is the rule of aIOLi and MLF, least served first, for reads that
//! no client has requested yet.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use crate::types::{LaneId, Nanos};

/// A read is waited for no longer than this: as long as Linux's deadline scheduler lets reads wait.
pub(crate) const PATIENCE: Nanos = Nanos::from_millis(500);
/// A file gives way to reads of files that had less: once it was read ahead by these bytes, and by so many times as much
/// as the other. Files that are read alike do not wait for one another: each change of place costs a disk a seek.
const MUCH_BYTES: u64 = 16 << 20;
const TIMES: u64 = 4;
/// What a file may start although a read waits; the last piece may be longer.
const PASSES_BYTES: u64 = 1 << 20;
/// Waiting reads that are looked at, oldest first.
const LOOKED_AT: usize = 256;
/// Files remembered: once and twice as many.
const FILES_MAX: usize = 1024;

/// A read that was handed over and is not answered.
struct Waiting {
    file: u64,
    since: Nanos,
}

/// What was read ahead of a file.
#[derive(Clone, Copy, Default)]
struct Served {
    bytes: u64,
    /// Its last pieces, of [`PASSES_BYTES`] together or fewer: the number of the first, and their bytes.
    first: u64,
    passes_bytes: u64,
}

/// The reads below the scheduler and the files that are read ahead. Files are known by their stable keys.
pub(crate) struct Overtaking {
    /// By lane, and by their numbers in the order in which they started.
    waiting: Vec<BTreeMap<u64, Waiting>>,
    /// Files that were read ahead lately, and those before: when the first are too many, they take the place of the second.
    served: [FxHashMap<(LaneId, u64), Served>; 2],
    last: u64,
}

impl Overtaking {
    pub(crate) fn new(lanes: usize) -> Overtaking {
        let waiting = std::iter::repeat_with(BTreeMap::new).take(lanes).collect();
        Overtaking { waiting, served: Default::default(), last: 0 }
    }

    /// A read of a client starts: its number, never 0.
    pub(crate) fn read_started(&mut self, lane: LaneId, file: u64, now: Nanos) -> u64 {
        self.last += 1;
        self.waiting[lane.index()].insert(self.last, Waiting { file, since: now });
        self.last
    }

    /// It is answered.
    pub(crate) fn read_ended(&mut self, lane: LaneId, number: u64) {
        self.waiting[lane.index()].remove(&number);
    }

    /// A piece of a file is read ahead.
    pub(crate) fn piece_started(&mut self, lane: LaneId, file: u64, bytes: u64) {
        self.last += 1;
        let mut served = self.served(lane, file);
        if served.passes_bytes >= PASSES_BYTES || served.bytes == 0 {
            (served.first, served.passes_bytes) = (self.last, 0);
        }
        served.passes_bytes = served.passes_bytes.saturating_add(bytes);
        served.bytes = served.bytes.saturating_add(bytes);
        let [now, earlier] = &mut self.served;
        if now.len() >= FILES_MAX {
            *earlier = std::mem::take(now);
        }
        now.insert((lane, file), served);
    }

    fn served(&self, lane: LaneId, file: u64) -> Served {
        self.served.iter().find_map(|files| files.get(&(lane, file))).copied().unwrap_or_default()
    }

    /// Until when a file may not be read ahead on a lane, at most; `None`: it may.
    pub(crate) fn bars(&self, lane: LaneId, file: u64, now: Nanos) -> Option<Nanos> {
        self.bars_if(lane, file, now, || true)
    }

    /// The same, for what gives way only if `asked` says so. That is called after the cheap test and before the dear one:
    /// most files had little, and which reads wait takes a look at many.
    pub(crate) fn bars_if(&self, lane: LaneId, file: u64, now: Nanos, asked: impl FnOnce() -> bool) -> Option<Nanos> {
        let waiting = &self.waiting[lane.index()];
        if waiting.is_empty() {
            return None;
        }
        let Served { bytes, first, passes_bytes } = self.served(lane, file);
        let much = bytes.checked_sub(MUCH_BYTES).filter(|_| passes_bytes >= PASSES_BYTES)?;
        if !asked() {
            return None;
        }
        let older = waiting.range(..first).take(LOOKED_AT).map(|(_, read)| read);
        let due = |read: &Waiting| Nanos(read.since.0.saturating_add(PATIENCE.0));
        // A file does not give way to its own reads: it had more than a quarter of what it had.
        let others = older.filter(|read| read.file != file && due(read) > now);
        let given_way = others.filter(|read| self.served(lane, read.file).bytes <= much / TIMES);
        given_way.map(due).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LANE: LaneId = LaneId(0);
    const MIB: u64 = 1 << 20;

    #[test]
    fn a_file_read_ahead_much_passes_a_waiting_read_once() {
        let mut reads = Overtaking::new(1);
        reads.piece_started(LANE, 1, 40 * MIB);
        let (early, late) = (Nanos(5), Nanos(5 + PATIENCE.0));
        let waiting = reads.read_started(LANE, 2, early);
        assert_eq!(reads.bars(LANE, 1, early), None, "a piece may be behind it");
        reads.piece_started(LANE, 1, MIB / 4);
        assert_eq!(reads.bars(LANE, 1, early), None, "a small one is not all");
        reads.piece_started(LANE, 1, 3 * MIB / 4);
        assert_eq!(reads.bars(LANE, 1, early), Some(late));
        assert_eq!(reads.bars(LANE, 1, late), None, "not for ever");
        assert_eq!(reads.bars(LANE, 2, early), None, "it does not wait for itself");
        reads.read_ended(LANE, waiting);
        assert_eq!(reads.bars(LANE, 1, early), None);
    }

    #[test]
    fn files_that_are_read_ahead_alike_do_not_wait_for_one_another() {
        let mut reads = Overtaking::new(1);
        reads.piece_started(LANE, 2, 5 * MIB);
        reads.read_started(LANE, 2, Nanos(5));
        reads.piece_started(LANE, 1, 35 * MIB);
        assert_eq!(reads.bars(LANE, 1, Nanos(5)), None, "less than four times as much and 16 MiB");
        reads.piece_started(LANE, 1, MIB);
        assert!(reads.bars(LANE, 1, Nanos(5)).is_some());
        reads.read_started(LANE, 4, Nanos(5));
        reads.piece_started(LANE, 3, MUCH_BYTES - 1);
        assert_eq!(reads.bars(LANE, 3, Nanos(5)), None, "it had little itself");
    }

    #[test]
    fn files_remembered_are_bounded_and_those_in_use_stay() {
        let mut reads = Overtaking::new(1);
        for other in 0..20 * FILES_MAX as u64 {
            reads.piece_started(LANE, 1, MIB);
            reads.piece_started(LANE, 2 + other, MIB);
        }
        assert_eq!(reads.served(LANE, 1).bytes, 20 * FILES_MAX as u64 * MIB);
        assert!(reads.served.iter().all(|files| files.len() <= FILES_MAX));
    }
}
