//! Ranges of a file that were read lately without gaps, and what their readers have already read beyond the first gap.
//!
//! Processes that read a file in turns keep no order: while the block at the end of the range is missing, others have
//! read theirs beyond it. A run that keeps meeting such *islands* takes those within its reach for its own: they are no
//! streams, and the run is predicted to go on beyond the last of them.

use std::collections::BTreeMap;
use std::ops::Range;

/// A run that was not extended for this long is over: what is read again of it begins a new one wherever it is, and its
/// bytes may be predicted again, ns.
const OVER_AFTER_NS: u64 = 1_000_000_000;
/// What is read again so far behind a run's end, or farther, begins a new one; of the old one this much is left, in
/// case its own reader goes on.
const AGAIN: (u64, u64) = (1 << 20, 64 << 10);
/// A run has islands after it has met so many parts that were read before its end came there: a few neighbours meet by
/// chance.
const MET_MIN: u32 = 3;
/// Islands are so far from the run's end at most: in requests, and in bytes at least and at most. Readers in turns get
/// several turns apart where their requests are answered in any order.
const REACH_REQUESTS: u64 = 256;
const REACH_BYTES: (u64, u64) = (4 << 20, 32 << 20);
/// Islands must take up one of so many bytes.
const DENSE_PART: u64 = 3;
/// Requests after which an end that has not moved will not: readers would have come there.
const STOOD_MAX: u32 = 192;
/// Islands of a run; one more, and the first gap is taken for read.
const ISLANDS_MAX: usize = 256;

/// A range read lately without gaps; it begins at its key in the map of runs.
#[derive(Clone, Debug, Default)]
pub(super) struct Run {
    pub(super) end: u64,
    pub(super) stream: u32,
    /// Times that it has grown.
    pub(super) grown: u32,
    /// When a request touched it last, and when one gave it bytes that it had not.
    pub(super) touched_ns: u64,
    pub(super) grown_ns: u64,
    /// Predicted up to here.
    pub(super) predicted_to: u64,
    /// The run that was read here before ended here: no farther is predicted before this one is read farther.
    pub(super) ended: Option<u64>,
    /// What was read beyond the end: ends by first bytes, disjoint, none begins at the end of another.
    islands: BTreeMap<u64, u64>,
    island_bytes: u64,
    /// Parts that it met.
    met: u32,
    /// Requests since its end moved.
    stood: u32,
    /// How far its islands may be from its end, bytes.
    reach: u64,
}

impl Run {
    /// One of no bytes, at `start`.
    pub(super) fn new(start: u64, stream: u32, at_ns: u64) -> Run {
        Run { end: start, stream, touched_ns: at_ns, grown_ns: at_ns, ..Run::default() }
    }

    pub(super) fn is_over(&self, at_ns: u64) -> bool {
        at_ns.saturating_sub(self.touched_ns) >= OVER_AFTER_NS
    }

    /// It was read so lately that its bytes are not predicted again at `at_ns`: where readers have begun again, since then. What is
    /// read again within a run says nothing of the rest of it.
    pub(super) fn is_fresh(&self, (at_ns, since_ns): (u64, u64)) -> bool {
        !self.is_over(at_ns) && self.grown_ns >= since_ns
    }

    /// The ranges that it consists of.
    pub(super) fn ranges(&self) -> usize {
        1 + self.islands.len()
    }

    /// Where the last of its ranges ends.
    pub(super) fn front(&self) -> u64 {
        self.islands.last_key_value().map_or(self.end, |(_, end)| *end)
    }

    /// Where prediction goes on: beyond the islands, if they are as dense as those of readers on one way.
    pub(super) fn predicts_from(&self) -> u64 {
        if self.island_bytes * DENSE_PART >= self.front() - self.end { self.front() } else { self.end }
    }

    /// What begins up to here is its own.
    pub(super) fn reaches(&self) -> u64 {
        if self.has_front() { self.front().max(self.end.saturating_add(self.reach)) } else { self.end }
    }

    /// Where the rest of it begins of which a request is a new pass; its end: there is no rest.
    pub(super) fn left_of(&self, extent: &Range<u64>, at_ns: u64) -> Option<u64> {
        match extent.end <= self.end {
            true if self.is_over(at_ns) => Some(self.end),
            true => (extent.end + AGAIN.0 <= self.end).then(|| self.end - AGAIN.1),
            false => None,
        }
    }

    /// It has met enough to have islands.
    pub(super) fn has_front(&self) -> bool {
        self.met >= MET_MIN
    }

    /// Forgets its islands, and that it may have any.
    pub(super) fn leave_islands(&mut self) {
        self.islands.clear();
        self.island_bytes = 0;
        (self.met, self.reach, self.stood) = (0, 0, 0);
    }

    /// A request of these bytes, which begin where it [reaches](Run::reaches) or before.
    pub(super) fn read(&mut self, extent: &Range<u64>, at_ns: u64) {
        let (before, islands) = (self.end, self.island_bytes);
        if extent.start <= self.end {
            self.end = self.end.max(extent.end);
        } else {
            self.put_island(extent.clone());
        }
        self.meet_islands(extent.end - extent.start);
        if self.end > before || self.island_bytes > islands {
            self.grown_ns = at_ns;
        }
        if self.end > before {
            self.grown = self.grown.saturating_add(1);
            self.stood = 0;
        } else {
            self.stood += 1;
            if self.stood > STOOD_MAX {
                self.leave_islands();
            }
        }
    }

    /// Another run that begins where this one [reaches](Run::reaches) or before becomes a part of it; `request_bytes`: of the
    /// request by which that was found.
    pub(super) fn take(&mut self, start: u64, other: &mut Run, request_bytes: u64) {
        if start <= self.end {
            self.end = self.end.max(other.end);
            self.met(request_bytes);
        } else {
            self.put_island(start..other.end);
        }
        for (start, end) in std::mem::take(&mut other.islands) {
            self.put_island(start..end);
        }
        self.meet_islands(request_bytes);
        self.predicted_to = self.predicted_to.max(other.predicted_to);
        self.grown = self.grown.max(other.grown);
        self.grown_ns = self.grown_ns.max(other.grown_ns);
        self.ended = self.ended.max(other.ended);
        self.met = self.met.max(other.met);
        self.reach = self.reach.max(other.reach);
    }

    fn met(&mut self, request_bytes: u64) {
        self.met = self.met.saturating_add(1);
        self.reach = self.reach.max(request_bytes.saturating_mul(REACH_REQUESTS)).clamp(REACH_BYTES.0, REACH_BYTES.1);
    }

    /// The end has come to islands.
    fn meet_islands(&mut self, request_bytes: u64) {
        while let Some(first) = self.islands.first_entry()
            && *first.key() <= self.end
        {
            let (start, end) = first.remove_entry();
            self.island_bytes -= end - start;
            self.end = self.end.max(end);
            self.met(request_bytes);
        }
    }

    fn put_island(&mut self, mut island: Range<u64>) {
        if island.end <= self.end {
            return;
        }
        while let Some((&start, &end)) = self.islands.range(..=island.end).next_back()
            && end >= island.start
        {
            self.islands.remove(&start);
            self.island_bytes -= end - start;
            island = island.start.min(start)..island.end.max(end);
        }
        self.island_bytes += island.end - island.start;
        self.islands.insert(island.start, island.end);
        if self.islands.len() > ISLANDS_MAX
            && let Some((start, end)) = self.islands.pop_first()
        {
            self.island_bytes -= end - start;
            self.end = self.end.max(end);
        }
    }

    /// Where the range ends that holds this byte, which is not before the run.
    pub(super) fn known_until(&self, byte: u64) -> Option<u64> {
        let island = self.islands.range(..=byte).next_back().map(|(_, end)| *end);
        Some(self.end).max(island).filter(|end| *end > byte)
    }

    /// The first byte of its first island within these bytes.
    pub(super) fn next_island(&self, within: Range<u64>) -> Option<u64> {
        self.islands.range(within).next().map(|(start, _)| *start)
    }

    /// Its ranges are apart and in order.
    #[cfg(test)]
    pub(super) fn check(&self) {
        let (mut at, mut bytes) = (self.end, 0);
        for (start, end) in &self.islands {
            assert!(*start > at && end > start, "{self:?}");
            (at, bytes) = (*end, bytes + end - start);
        }
        assert_eq!(bytes, self.island_bytes);
        assert!(self.islands.len() <= ISLANDS_MAX);
    }
}
