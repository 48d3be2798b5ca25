//! Quantiles of times in a fixed amount of memory, to within one part in sixteen.

/// Counts by size: sixteen steps for each power of two.
#[derive(Clone)]
pub(crate) struct Histogram {
    counts: Vec<u64>,
    total: u64,
    max: u64,
}

const STEPS: u64 = 16;
/// Up to 2^40: for nanoseconds, 18 minutes; what is larger counts there.
const BUCKETS: usize = (37 * STEPS) as usize;

impl Histogram {
    pub(crate) fn new() -> Histogram {
        Histogram { counts: vec![0; BUCKETS], total: 0, max: 0 }
    }

    pub(crate) fn add(&mut self, value: u64) {
        self.counts[Histogram::bucket(value)] += 1;
        self.total += 1;
        self.max = self.max.max(value);
    }

    pub(crate) fn max(&self) -> u64 {
        self.max
    }

    /// The value that a share `q` of those added does not exceed, rounded up to the bucket's end; 0 when none was.
    pub(crate) fn quantile(&self, q: f64) -> u64 {
        let rank = ((self.total as f64 * q).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Histogram::last_of(bucket).min(self.max);
            }
        }
        self.max
    }

    fn bucket(value: u64) -> usize {
        if value < STEPS {
            return value as usize;
        }
        let shift = u64::from(value.ilog2()) - 4;
        ((shift * STEPS + (value >> shift)) as usize).min(BUCKETS - 1)
    }

    fn last_of(bucket: usize) -> u64 {
        let bucket = bucket as u64;
        if bucket < STEPS {
            return bucket;
        }
        let shift = bucket / STEPS - 1;
        ((bucket - shift * STEPS + 1) << shift) - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_sixteenth() {
        let mut h = Histogram::new();
        assert_eq!((h.quantile(0.99), h.max()), (0, 0));
        (1..=100_000).for_each(|v| h.add(v));
        for (q, exact) in [(0.5, 50_000.0), (0.99, 99_000.0), (0.001, 100.0)] {
            let found = h.quantile(q) as f64;
            assert!((exact..=exact * 1.0625).contains(&found), "{q}: {found}");
        }
        assert_eq!((h.quantile(1.0), h.max()), (100_000, 100_000));
    }

    #[test]
    fn every_value_has_its_bucket() {
        let mut last = 0;
        for value in (0..100_000).chain([1 << 20, (1 << 30) + 1, 1 << 39, 1 << 40, u64::MAX]) {
            let bucket = Histogram::bucket(value);
            assert!(bucket >= last && bucket < BUCKETS);
            assert!(Histogram::last_of(bucket) >= value.min((1 << 40) - 1), "{value}");
            last = bucket;
        }
    }
}
