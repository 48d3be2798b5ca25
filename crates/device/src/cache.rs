//! A drive's memory: the ranges it has read, and the data it has yet to write.

use std::collections::BTreeMap;

/// Ranges that the drive has read and still has; the least recently used is evicted first.
///
/// Scanned on every read that goes to the platter, so the comparisons are written without branches.
#[derive(Clone, Debug)]
pub(crate) struct ReadCache {
    segments: Vec<Segment>,
    /// Last use of each segment, counted in uses of the cache.
    used: Vec<u64>,
    uses: u64,
    segments_max: usize,
    segment_bytes: u64,
}

/// A cached range of addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl ReadCache {
    pub(crate) fn new(segments_max: usize, segment_bytes: u64) -> ReadCache {
        let (segments, used) = (Vec::with_capacity(segments_max), Vec::with_capacity(segments_max));
        ReadCache { segments, used, uses: 0, segments_max, segment_bytes }
    }

    /// Keeps a range that was read, evicting the least recently used segment if there are too many.
    pub(crate) fn keep(&mut self, segment: Segment) {
        // A segment has a limited size: keep its latest part.
        let start = segment.start.max(segment.end.saturating_sub(self.segment_bytes));
        if start >= segment.end || self.segments_max == 0 {
            return;
        }
        self.uses += 1;
        let kept = Segment { start, end: segment.end };
        if self.segments.len() < self.segments_max {
            self.segments.push(kept);
            self.used.push(self.uses);
        } else if let Some(oldest) = (0..self.used.len()).min_by_key(|&i| self.used[i]) {
            self.segments[oldest] = kept;
            self.used[oldest] = self.uses;
        }
    }

    /// True if the whole range is cached; counts as a use.
    pub(crate) fn hit(&mut self, start: u64, end: u64) -> bool {
        let Some(i) = self.segments.iter().position(|s| (s.start <= start) & (end <= s.end)) else { return false };
        self.uses += 1;
        self.used[i] = self.uses;
        true
    }

    /// Removes the segment in which the range begins, to be continued.
    pub(crate) fn take(&mut self, start: u64) -> Option<Segment> {
        let i = self.segments.iter().position(|s| (s.start <= start) & (start <= s.end))?;
        self.used.swap_remove(i);
        Some(self.segments.swap_remove(i))
    }

    /// Clears the cache.
    pub(crate) fn clear(&mut self) {
        self.segments.clear();
        self.used.clear();
    }

    /// Invalidates a range that was written.
    pub(crate) fn forget(&mut self, start: u64, end: u64) {
        for i in (0..self.segments.len()).rev() {
            let s = &mut self.segments[i];
            if (s.start < end) & (start < s.end) {
                s.end = start;
                if s.start >= s.end {
                    self.segments.swap_remove(i);
                    self.used.swap_remove(i);
                }
            }
        }
    }
}

/// Written data not yet on the platter, as disjoint ranges that do not touch.
#[derive(Clone, Default, Debug)]
pub(crate) struct WriteCache {
    /// Start to end.
    ranges: BTreeMap<u64, u64>,
    /// Memory in use.
    used_bytes: u64,
}

/// The minimum memory of a range, which bounds their number.
const GRAIN_BYTES: u64 = 4096;

impl WriteCache {
    fn cost(start: u64, end: u64) -> u64 {
        (end - start).max(GRAIN_BYTES)
    }

    /// Maximum memory for a write of `len` bytes.
    pub(crate) fn need(len: u64) -> u64 {
        len.max(GRAIN_BYTES)
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Adds a range and merges it with those it overlaps or touches.
    pub(crate) fn insert(&mut self, start: u64, end: u64) {
        let (mut from, mut to) = (start, end);
        while let Some((&s, &e)) = self.ranges.range(..=to).next_back()
            && e >= from
        {
            self.remove(s, e);
            (from, to) = (from.min(s), to.max(e));
        }
        self.ranges.insert(from, to);
        self.used_bytes += WriteCache::cost(from, to);
    }

    fn remove(&mut self, start: u64, end: u64) {
        self.ranges.remove(&start);
        self.used_bytes -= WriteCache::cost(start, end);
    }

    /// True if the whole range is waiting here.
    pub(crate) fn covers(&self, start: u64, end: u64) -> bool {
        self.ranges.range(..=start).next_back().is_some_and(|(_, &e)| end <= e)
    }

    /// Removes the range that the elevator writes next: the first at or after the head, else the lowest; at most
    /// `max_bytes` of it.
    pub(crate) fn take(&mut self, head: u64, max_bytes: u64) -> Option<(u64, u64)> {
        let (&start, &end) = self.ranges.range(head..).next().or_else(|| self.ranges.iter().next())?;
        self.remove(start, end);
        let cut = end.min(start + max_bytes);
        if cut < end {
            self.ranges.insert(cut, end);
            self.used_bytes += WriteCache::cost(cut, end);
        }
        Some((start, cut))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_read_cache_evicts_the_least_recently_used() {
        let mut cache = ReadCache::new(2, 1000);
        cache.keep(Segment { start: 0, end: 100 });
        cache.keep(Segment { start: 200, end: 300 });
        assert!(cache.hit(0, 100));
        cache.keep(Segment { start: 400, end: 5000 });
        assert!(cache.hit(10, 20) && !cache.hit(200, 210), "200..300 was used least recently");
        assert!(cache.hit(4000, 5000) && !cache.hit(3999, 4001), "a segment holds 1000 bytes");
        cache.forget(50, 60);
        assert!(cache.hit(0, 50) && !cache.hit(0, 51) && !cache.hit(60, 100));
        assert_eq!(cache.take(50), Some(Segment { start: 0, end: 50 }));
        assert_eq!(cache.take(50), None);
    }

    #[test]
    fn the_write_cache_merges_and_returns_ranges_in_elevator_order() {
        let mut cache = WriteCache::default();
        cache.insert(100_000, 104_096);
        cache.insert(10_000, 14_096);
        cache.insert(14_096, 20_000);
        cache.insert(9_000, 10_500);
        assert_eq!(cache.used_bytes(), 11_000 + 4096);
        assert!(cache.covers(9_000, 20_000) && !cache.covers(19_999, 20_001));
        assert_eq!(cache.take(50_000, 1 << 20), Some((100_000, 104_096)));
        assert_eq!(cache.take(50_000, 1_000), Some((9_000, 10_000)));
        assert_eq!(cache.take(10_000, 1 << 20), Some((10_000, 20_000)));
        assert!(cache.is_empty() && cache.used_bytes() == 0);
    }
}
