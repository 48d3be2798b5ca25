//! Counts of non-negative numbers by size, in bounded memory, with quantiles.

use serde::Serialize;

/// A histogram with 2^`STEPS_LOG2` steps for each power of two: a quantile is off by at most one step, which is
/// 2^−`STEPS_LOG2` of the value (25 % with 2, 3 % with 5). Values below 2^(`STEPS_LOG2` + 1) are counted exactly. Memory is
/// 8 bytes for each step up to the largest value.
#[derive(Clone, PartialEq)]
pub struct Histogram<const STEPS_LOG2: u32> {
    counts: Vec<u64>,
    count: u64,
    sum: u128,
    min: u64,
    max: u64,
}

impl<const STEPS_LOG2: u32> Default for Histogram<STEPS_LOG2> {
    fn default() -> Self {
        Histogram { counts: Vec::new(), count: 0, sum: 0, min: u64::MAX, max: 0 }
    }
}

impl<const STEPS_LOG2: u32> std::fmt::Debug for Histogram<STEPS_LOG2> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.summary().fmt(f)
    }
}

impl<const STEPS_LOG2: u32> Histogram<STEPS_LOG2> {
    #[inline]
    fn bucket(value: u64) -> usize {
        let shift = (63 - (value | 1).leading_zeros()).saturating_sub(STEPS_LOG2);
        ((shift as usize) << STEPS_LOG2) + (value >> shift) as usize
    }

    /// The lowest value of a bucket and of the next one (the largest value for the last one).
    fn bounds(bucket: usize) -> (u64, u64) {
        let shift = (bucket >> STEPS_LOG2).saturating_sub(1);
        let low = ((bucket - (shift << STEPS_LOG2)) as u64) << shift;
        (low, low.saturating_add(1 << shift))
    }

    /// Counts one value.
    #[inline]
    pub fn record(&mut self, value: u64) {
        self.record_times(value, 1);
    }

    /// Adds another histogram's counts.
    pub fn merge(&mut self, other: &Histogram<STEPS_LOG2>) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
        (self.count, self.sum) = (self.count + other.count, self.sum + other.sum);
        (self.min, self.max) = (self.min.min(other.min), self.max.max(other.max));
    }

    /// Counts a value several times.
    #[inline]
    pub fn record_times(&mut self, value: u64, times: u64) {
        let bucket = Self::bucket(value);
        if bucket >= self.counts.len() {
            self.grow(bucket);
        }
        self.counts[bucket] += times;
        self.count += times;
        self.sum += u128::from(value) * u128::from(times);
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    #[cold]
    fn grow(&mut self, bucket: usize) {
        self.counts.resize(bucket + 1, 0);
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Arithmetic mean, exact; 0 if empty.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The largest value; 0 if empty.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// The smallest and the largest value, if there are any.
    pub fn range(&self) -> Option<(u64, u64)> {
        (self.count > 0).then_some((self.min, self.max))
    }

    /// The value below which a share `q` (0 to 1) of the values lies, interpolated within its step; 0 if empty.
    pub fn quantile(&self, q: f64) -> u64 {
        let target = q.clamp(0.0, 1.0) * self.count as f64;
        let mut below = 0.0;
        for (bucket, &n) in self.counts.iter().enumerate().filter(|(_, n)| **n > 0) {
            let n = n as f64;
            if below + n >= target {
                let (low, high) = Self::bounds(bucket);
                let value = low + ((high - low) as f64 * ((target - below) / n)) as u64;
                return value.clamp(self.min, self.max);
            }
            below += n;
        }
        self.max
    }

    /// The non-empty steps: each step's lowest value and its count.
    pub fn steps(&self) -> impl Iterator<Item = (u64, u64)> {
        self.counts.iter().enumerate().filter(|(_, n)| **n > 0).map(|(bucket, n)| (Self::bounds(bucket).0, *n))
    }

    /// How many values are below each power of two from 2^`from_log2` to 2^`to_log2`. Exact: steps end at powers of two.
    pub fn cumulative(&self, from_log2: u32, to_log2: u32) -> Cumulative {
        let mut steps = self.steps().peekable();
        let mut below = 0;
        let mut under = |limit: u64| {
            while let Some((_, n)) = steps.next_if(|(low, _)| *low < limit) {
                below += n;
            }
            below
        };
        let limits = from_log2..=to_log2.min(u64::BITS - 1);
        let under = limits.map(|log2| (1 << log2, under(1 << log2))).collect();
        Cumulative { under, count: self.count, sum: self.sum as f64 }
    }

    /// Count, mean and quantiles.
    pub fn summary(&self) -> Summary {
        Summary {
            count: self.count,
            mean: self.mean(),
            p50: self.quantile(0.5),
            p90: self.quantile(0.9),
            p99: self.quantile(0.99),
            max: self.max,
        }
    }
}

/// The reported figures of a histogram. The name of the field that holds it has the unit.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Summary {
    /// Values counted.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 90th percentile.
    pub p90: u64,
    /// 99th percentile.
    pub p99: u64,
    /// Largest value.
    pub max: u64,
}

/// A histogram as counts below limits, for programs that add up those of several servers or intervals.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Cumulative {
    /// Limits in ascending order, and the number of values below each.
    pub under: Vec<(u64, u64)>,
    /// Values counted.
    pub count: u64,
    /// Their sum.
    pub sum: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantiles_of<const STEPS_LOG2: u32>(allowed: f64) {
        let mut h = Histogram::<STEPS_LOG2>::default();
        assert_eq!((h.quantile(0.99), h.max(), h.range(), h.mean()), (0, 0, None, 0.0));
        (1..=100_000).for_each(|v| h.record(v));
        for (q, exact) in [(0.5, 50_000.0), (0.99, 99_000.0), (0.001, 100.0)] {
            let found = h.quantile(q) as f64;
            assert!((found / exact - 1.0).abs() <= allowed, "{STEPS_LOG2}, {q}: {found}");
        }
        assert_eq!((h.quantile(0.0), h.quantile(1.0), h.range()), (1, 100_000, Some((1, 100_000))));
        assert_eq!((h.count(), h.mean()), (100_000, 50_000.5));
        assert_eq!(h.steps().map(|(_, n)| n).sum::<u64>(), 100_000);
    }

    #[test]
    fn merging_equals_counting_together() {
        let (mut a, mut b, mut both) =
            (Histogram::<5>::default(), Histogram::<5>::default(), Histogram::<5>::default());
        for i in 0..1000u64 {
            let value = i * i * 37;
            if i % 3 == 0 {
                a.record(value)
            } else {
                b.record(value)
            }
            both.record(value);
        }
        a.merge(&b);
        assert!(a == both);
        a.merge(&Histogram::default());
        assert!(a == both);
    }

    #[test]
    fn quantiles_are_within_a_step() {
        quantiles_of::<0>(0.5);
        quantiles_of::<2>(0.05);
        quantiles_of::<5>(0.02);
    }

    #[test]
    fn one_value_is_every_quantile() {
        for value in [0, 3, 1_000_003, u64::MAX] {
            let mut h = Histogram::<2>::default();
            h.record_times(value, 3);
            assert_eq!((h.quantile(0.01), h.quantile(0.99), h.count()), (value, value, 3));
        }
    }

    fn every_value_of<const STEPS_LOG2: u32>() {
        let mut last = 0;
        for value in (0..100_000).chain((17..64).flat_map(|b| [(1 << b) - 1, 1 << b, (1 << b) + 1])).chain([u64::MAX]) {
            let bucket = Histogram::<STEPS_LOG2>::bucket(value);
            let (low, high) = Histogram::<STEPS_LOG2>::bounds(bucket);
            assert!(bucket >= last, "{value}");
            assert!(low <= value && (value < high || high == u64::MAX), "{value}: {low} to {high}");
            assert!(
                (high - low) as f64 <= (value as f64 / f64::from(1 << STEPS_LOG2)).max(1.0),
                "{value}: {low} to {high}"
            );
            last = bucket;
        }
    }

    #[test]
    fn every_value_has_its_step() {
        every_value_of::<0>();
        every_value_of::<2>();
        every_value_of::<5>();
    }

    #[test]
    fn values_below_powers_of_two_are_counted_exactly() {
        let mut histogram = Histogram::<2>::default();
        let values = [0, 1, 3, 4, 1023, 1024, 1025, 4096, u64::MAX];
        values.iter().for_each(|value| histogram.record(*value));
        let cumulative = histogram.cumulative(2, 12);
        for (limit, below) in &cumulative.under {
            assert_eq!(*below, values.iter().filter(|value| *value < limit).count() as u64, "below {limit}");
        }
        assert_eq!((cumulative.under[0], cumulative.under.len(), cumulative.count), ((4, 3), 11, 9));
        assert_eq!(histogram.cumulative(62, 99).under, [(1 << 62, 8), (1 << 63, 8)]);
        assert_eq!(Histogram::<2>::default().cumulative(3, 3).under, [(8, 0)]);
    }
}
