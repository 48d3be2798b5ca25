//! Which bytes of a block have been read, each counted once.

use std::ops::Range;

/// Maximum ranges of one block; more are counted as if the smallest gap had been read, too.
const RANGES_MAX: usize = 64;

/// A set of bytes.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    /// Ordered, disjoint, not touching.
    ranges: Vec<Range<u64>>,
    /// Their bytes.
    covered: u64,
}

impl Coverage {
    pub(crate) fn covered_bytes(&self) -> u64 {
        self.covered
    }

    pub(crate) fn add(&mut self, new: Range<u64>) {
        let first = self.ranges.partition_point(|r| r.end < new.start);
        let last = self.ranges.partition_point(|r| r.start <= new.end);
        let joined = match self.ranges.get(first..last) {
            Some([only]) if only.start <= new.start && new.end <= only.end => return,
            Some([a, .., b]) => a.start.min(new.start)..b.end.max(new.end),
            Some([a]) => a.start.min(new.start)..a.end.max(new.end),
            _ => new,
        };
        let before: u64 = self.ranges[first..last].iter().map(|r| r.end - r.start).sum();
        self.covered += joined.end - joined.start - before;
        self.ranges.splice(first..last, [joined]);
        if self.ranges.len() > RANGES_MAX {
            self.close_smallest_gap();
        }
    }

    fn close_smallest_gap(&mut self) {
        let gap = |w: &[Range<u64>]| w[1].start - w[0].end;
        let Some((i, bytes)) = self.ranges.windows(2).map(gap).enumerate().min_by_key(|(_, bytes)| *bytes) else {
            return;
        };
        self.covered += bytes;
        let right = self.ranges.remove(i + 1);
        self.ranges[i].end = right.end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn counts_like_a_set(adds in prop::collection::vec((0u64..300, 1u64..40), 0..60)) {
            let mut coverage = Coverage::default();
            let mut set = std::collections::BTreeSet::new();
            for (start, len) in adds {
                coverage.add(start..start + len);
                set.extend(start..start + len);
                prop_assert_eq!(coverage.covered_bytes(), set.len() as u64);
                prop_assert!(coverage.ranges.windows(2).all(|w| w[0].end < w[1].start));
            }
        }
    }

    #[test]
    fn stays_small() {
        let mut coverage = Coverage::default();
        for i in 0..10_000u64 {
            coverage.add(i * 100..i * 100 + 10);
        }
        assert!(coverage.ranges.len() <= RANGES_MAX);
        assert!(coverage.covered_bytes() >= 100_000, "never less than was read");
    }
}
