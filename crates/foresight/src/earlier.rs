//! Reads that an earlier run foretells: what comes next where no stride does, in the order that the run has shown.
//!
//! A file's reads are compared with those of the recorded run as they come. While they agree, what the run read next and
//! was not asked for yet is predicted, a window at a time: the reads of a window in offset order, and what lies in small
//! gaps between them and is read later in the run along with them, so that a device passes over the file instead of
//! seeking in it. A run that is made again with the same reads in another order (processes that take turns differently) agrees.

use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::predicted::PredictedQueues;

/// Gaps that are read along, bytes: passing over them costs a disk less than a seek.
const GAP_BYTES: u64 = 128 << 10;
/// Requests after which a file's reads may agree with the run's, and where other files did; of 32, those that must be in it.
const COMPARED_MIN: (u32, u32) = (4, 1);
const AGREEING_MIN: u32 = 24;
/// Of 32 requests, those of which all predictions had been asked for already, when the run has begun again.
const AGAIN_MIN: u32 = 12;
/// Reads before the last one asked for, in the run's order, that may still come.
const BEHIND: u32 = 512;
/// A prediction is late after `LATE_NS` and `LATE_TIMES` times the recorded time to it, at the present pace.
const LATE_NS: u64 = 4_000_000_000;
const LATE_TIMES: u64 = 4;
/// Runs at most this many times as slow as the recorded one are still waited for.
const SLOWER_MAX: u64 = 64;

/// The reads of an earlier run, by file.
#[derive(Debug, Default)]
pub struct EarlierReads {
    files: FxHashMap<u64, Arc<FileReads>>,
}

impl EarlierReads {
    /// The reads among the requests that a run foretells; takes some 30 bytes for each.
    pub fn of(queues: &PredictedQueues) -> EarlierReads {
        EarlierReads { files: queues.reads().map(|(file, reads)| (file, Arc::new(FileReads::new(reads)))).collect() }
    }

    /// The reads of one file.
    pub(crate) fn file(&self, file: u64) -> Option<&Arc<FileReads>> {
        self.files.get(&file)
    }
}

/// A recorded read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct EarlierRead {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Since the first request of its file, ns.
    pub(crate) at_ns: u64,
    /// Bytes of the reads before it.
    pub(crate) before_bytes: u64,
}

impl EarlierRead {
    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// The reads of one file.
#[derive(Debug)]
pub(crate) struct FileReads {
    /// In order of arrival.
    reads: Box<[EarlierRead]>,
    /// The same by offset and length, of one extent in order of arrival.
    by_offset: Box<[u32]>,
}

impl FileReads {
    fn new(mut reads: Vec<EarlierRead>) -> FileReads {
        reads.sort_by_key(|read| (read.at_ns, read.offset));
        let mut bytes = 0u64;
        for read in &mut reads {
            read.before_bytes = bytes;
            bytes = bytes.saturating_add(read.len);
        }
        let mut by_offset: Vec<u32> = (0..reads.len() as u32).collect();
        by_offset.sort_by_key(|at| (reads[*at as usize].offset, reads[*at as usize].len, *at));
        FileReads { reads: reads.into(), by_offset: by_offset.into() }
    }

    fn at(&self, at: u32) -> &EarlierRead {
        &self.reads[at as usize]
    }

    /// Places in `by_offset` from the first read at this offset or beyond.
    fn place_of(&self, offset: u64) -> usize {
        self.by_offset.partition_point(|at| self.at(*at).offset < offset)
    }

    /// The reads of this very extent, in order of arrival.
    fn of(&self, extent: &Range<u64>) -> &[u32] {
        let place = |at: &u32| (self.at(*at).offset, self.at(*at).end());
        let from = &self.by_offset[self.by_offset.partition_point(|at| place(at) < (extent.start, extent.end))..];
        &from[..from.partition_point(|at| place(at) == (extent.start, extent.end))]
    }
}

/// A set of the numbers below a bound.
#[derive(Debug)]
struct Bits(Box<[u64]>);

impl Bits {
    fn new(len: usize) -> Bits {
        Bits(vec![0; len.div_ceil(64)].into())
    }

    fn has(&self, at: u32) -> bool {
        self.0[at as usize / 64] >> (at % 64) & 1 == 1
    }

    fn set(&mut self, at: u32, is_in: bool) {
        let bit = 1 << (at % 64);
        let word = &mut self.0[at as usize / 64];
        *word = if is_in { *word | bit } else { *word & !bit };
    }

    fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// An extent that the run foretells, and when it would be late.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Foretold {
    pub(crate) extent: Range<u64>,
    pub(crate) late_ns: u64,
}

/// How one file's reads follow the recorded ones.
#[derive(Debug)]
pub(crate) struct Follower {
    reads: Arc<FileReads>,
    /// Reads of the run that were asked for.
    asked: Bits,
    /// Those that were predicted.
    ahead: Bits,
    /// All before it were asked for, predicted or passed over.
    front: u32,
    /// The last one that was asked for, and when.
    last: u32,
    last_ns: u64,
    /// The first one that was, and when.
    first: u32,
    begun_ns: u64,
    /// How many were.
    count: u32,
    /// By bit: whether each of the last requests is in the run; the last one is the lowest.
    agreed: u32,
    /// By bit: whether all that the run has of it had been asked for before; and of which reads that holds.
    again: u32,
    asked_again: Vec<u32>,
    /// The file is read again: what was read lately is no reason not to predict it.
    repeats: bool,
    compared: u32,
}

impl Follower {
    pub(crate) fn new(reads: Arc<FileReads>) -> Follower {
        let len = reads.reads.len();
        Follower {
            reads,
            asked: Bits::new(len),
            ahead: Bits::new(len),
            front: 0,
            last: 0,
            last_ns: 0,
            first: 0,
            begun_ns: 0,
            count: 0,
            agreed: 0,
            again: 0,
            asked_again: Vec::new(),
            repeats: false,
            compared: 0,
        }
    }

    /// A request came; `is_again`: its bytes had been read lately. Whether the file's reads are those of the run at present; sooner
    /// where the run is `trusted`.
    pub(crate) fn read(&mut self, extent: &Range<u64>, (at_ns, is_again): (u64, bool), trusted: bool) -> bool {
        let reads = Arc::clone(&self.reads);
        let same = reads.of(extent);
        // Each request counts as the first of these that was not asked for yet, so those that were come first.
        let asked = same.partition_point(|at| self.asked.has(*at));
        let (known, mut next) = (same.first().copied(), same.get(asked).copied());
        self.compared = self.compared.saturating_add(1);
        self.agreed = self.agreed << 1 | u32::from(known.is_some());
        let again = known.filter(|_| next.is_none());
        if self.again == 0 {
            self.asked_again.clear();
        } else if self.asked_again.len() == u32::BITS as usize {
            self.asked_again.remove(0);
        }
        self.asked_again.extend(again);
        self.again = self.again << 1 | u32::from(again.is_some());
        self.repeats |= is_again && self.compared <= u32::BITS;
        if self.again.count_ones() >= AGAIN_MIN {
            self.begin_again();
            next = known;
        }
        if let Some(at) = next {
            if self.count == 0 {
                (self.first, self.begun_ns) = (at, at_ns);
            }
            self.count += 1;
            self.asked.set(at, true);
            (self.last, self.last_ns) = (at, at_ns);
        }
        let of = self.compared.min(32);
        of >= if trusted { COMPARED_MIN.1 } else { COMPARED_MIN.0 }
            && self.agreed.count_ones() * 32 >= AGREEING_MIN * of
    }

    fn begin_again(&mut self) {
        self.asked.clear();
        self.ahead.clear();
        for at in std::mem::take(&mut self.asked_again) {
            self.asked.set(at, true);
        }
        (self.front, self.count, self.again, self.repeats) = (0, 0, 0, true);
    }

    /// The file is read again: what was read lately is no reason not to predict it.
    pub(crate) fn repeats(&self) -> bool {
        self.repeats
    }

    /// What the run reads next and is neither asked for nor predicted yet, by offset; its reads count as predicted from now on.
    /// Nothing while more than `left_bytes` of the next `window_bytes` is predicted; else up to all of these, as far as there is
    /// room for `room_bytes`, and of what lies in gaps between them for `gap_bytes`.
    pub(crate) fn next(
        &mut self,
        (window_bytes, left_bytes): (u64, u64),
        room_bytes: u64,
        gap_bytes: u64,
    ) -> Vec<Foretold> {
        let reads = Arc::clone(&self.reads);
        self.front = self.front.max(self.last.saturating_sub(BEHIND));
        let from = reads.at(self.last).before_bytes;
        let ahead_bytes =
            |front: u32| reads.reads.get(front as usize).map(|read| read.before_bytes.saturating_sub(from));
        if ahead_bytes(self.front).is_none_or(|bytes| bytes > left_bytes.max(reads.at(self.last).len)) {
            return Vec::new();
        }
        let (mut bytes, mut found) = (0, Vec::new());
        while ahead_bytes(self.front).is_some_and(|ahead| ahead < window_bytes) && bytes < room_bytes {
            if !self.asked.has(self.front) && !self.ahead.has(self.front) {
                self.ahead.set(self.front, true);
                found.push(self.front);
                bytes += reads.at(self.front).len;
            }
            self.front += 1;
        }
        let mut gap_bytes = gap_bytes.min(room_bytes.saturating_sub(bytes));
        found.sort_unstable_by_key(|at| reads.at(*at).offset);
        let mut next: Vec<Foretold> = Vec::new();
        for at in found {
            let read = *reads.at(at);
            let late_ns = self.late_ns(&read);
            let gap_late_ns = match next.last() {
                Some(last) if read.offset <= last.extent.end => Some(0),
                Some(last) => self.fill(last.extent.end..read.offset, &mut gap_bytes),
                None => None,
            };
            match (next.last_mut(), gap_late_ns) {
                (Some(last), Some(gap_late_ns)) => {
                    last.extent.end = last.extent.end.max(read.end());
                    last.late_ns = last.late_ns.max(late_ns).max(gap_late_ns);
                }
                _ => next.push(Foretold { extent: read.offset..read.end(), late_ns }),
            }
        }
        next
    }

    /// Whether a gap between two predicted reads is small, and all of it is read later in the run: then these reads count as
    /// predicted, too, and are late then. There is room for `room_bytes` of gaps.
    fn fill(&mut self, gap: Range<u64>, room_bytes: &mut u64) -> Option<u64> {
        let gap_bytes = gap.end - gap.start;
        if gap_bytes > GAP_BYTES.min(*room_bytes) {
            return None;
        }
        let reads = Arc::clone(&self.reads);
        let (mut covered, mut within, mut late_ns) = (gap.start, Vec::new(), 0);
        for &at in &reads.by_offset[reads.place_of(gap.start)..] {
            let read = reads.at(at);
            if read.offset > covered || covered >= gap.end {
                break;
            }
            if !self.asked.has(at) && !self.ahead.has(at) {
                covered = covered.max(read.end());
                late_ns = self.late_ns(read).max(late_ns);
                within.push(at);
            }
        }
        if covered < gap.end {
            return None;
        }
        within.into_iter().for_each(|at| self.ahead.set(at, true));
        *room_bytes -= gap_bytes;
        Some(late_ns)
    }

    /// Reads within an extent that was not predicted after all may be predicted another time.
    pub(crate) fn not_predicted(&mut self, extent: &Range<u64>) {
        let reads = Arc::clone(&self.reads);
        for &at in &reads.by_offset[reads.place_of(extent.start)..] {
            if reads.at(at).offset >= extent.end {
                return;
            }
            if self.ahead.has(at) && !self.asked.has(at) {
                self.ahead.set(at, false);
                self.front = self.front.min(at);
            }
        }
    }

    /// When a predicted read is late, at the pace up to the last read. The run may be slower than the recorded one: of that one,
    /// as many reads are looked at as were asked for now, since processes may take turns differently.
    fn late_ns(&self, read: &EarlierRead) -> u64 {
        let as_many = (self.first + self.count).min(self.reads.reads.len() as u32 - 1);
        let recorded_ns = self.reads.at(as_many).at_ns.saturating_sub(self.reads.at(self.first).at_ns);
        let took_ns = self.last_ns.saturating_sub(self.begun_ns);
        let to_come_ns = read.at_ns.saturating_sub(self.reads.at(self.last).at_ns);
        let slower = (took_ns / recorded_ns.max(1)).clamp(1, SLOWER_MAX);
        self.last_ns
            .saturating_add(LATE_NS)
            .saturating_add(to_come_ns.saturating_mul(slower).saturating_mul(LATE_TIMES))
    }

    /// When an extent that was predicted is late at the pace that is known now.
    pub(crate) fn late_again_ns(&self, extent: &Range<u64>) -> u64 {
        let reads =
            self.reads.by_offset[self.reads.place_of(extent.start)..].iter().map(|at| (*at, self.reads.at(*at)));
        let within = reads.take_while(|(_, read)| read.offset < extent.end);
        let to_come = within.filter(|(at, _)| self.ahead.has(*at) && !self.asked.has(*at));
        to_come.map(|(_, read)| self.late_ns(read)).max().unwrap_or(0)
    }
}

#[cfg(test)]
#[path = "earlier_tests.rs"]
mod tests;
