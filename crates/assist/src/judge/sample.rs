//! How long reads took, and whether one kind clearly takes less time than another.

/// Reads that take no more than this many times what memory takes need no hints, and no better ones.
const MEMORY_FACTOR: u64 = 3;

#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Sample {
    pub(super) reads: u64,
    pub(super) bytes: u64,
    pub(super) ns: u64,
    /// Sum of the squares of the durations.
    pub(super) ns_squared: f64,
}

impl Sample {
    /// A single read.
    pub(super) fn one(bytes: u64, ns: u64) -> Sample {
        let mut one = Sample::default();
        one.add(bytes, ns);
        one
    }

    /// The variance of the mean duration, in ns².
    fn mean_variance(&self) -> f64 {
        let n = self.reads.max(1) as f64;
        let mean = self.ns as f64 / n;
        (self.ns_squared / n - mean * mean).max(0.0) / n
    }

    /// What they take from memory, ns: 20 µs and 4 GB/s.
    fn memory_ns(&self) -> u64 {
        self.reads.saturating_mul(20_000).saturating_add(self.bytes / 4)
    }

    /// Whether reads take about as long as from memory.
    pub(super) fn as_fast_as_memory(&self) -> bool {
        self.ns <= self.memory_ns().saturating_mul(MEMORY_FACTOR)
    }

    /// How much longer they took than from memory, ns.
    pub(super) fn waited_ns(&self) -> u64 {
        self.ns.saturating_sub(self.memory_ns())
    }

    pub(super) fn add(&mut self, bytes: u64, ns: u64) {
        if self.reads >= 512 {
            // Older reads count less and less.
            let ns_squared = self.ns_squared / 2.0;
            *self = Sample { reads: self.reads / 2, bytes: self.bytes / 2, ns: self.ns / 2, ns_squared };
        }
        let ns_squared = self.ns_squared + ns as f64 * ns as f64;
        let (bytes, ns) = (self.bytes.saturating_add(bytes), self.ns.saturating_add(ns));
        *self = Sample { reads: self.reads + 1, bytes, ns, ns_squared };
    }
}

/// Time saved by hints in percent of the time without them. Reads are compared one with one when they are about as
/// long, else byte with byte.
pub(super) fn gain_percent(with: &Sample, without: &Sample) -> Option<i64> {
    let mean = |s: &Sample| s.bytes.checked_div(s.reads);
    let (a, b) = (mean(with)?, mean(without)?);
    let alike = a <= b.saturating_mul(2) && b <= a.saturating_mul(2);
    let units = |s: &Sample| u128::from(if alike { s.reads } else { s.bytes }).max(1);
    // ns a unit of both, as one fraction.
    let with_cost = u128::from(with.ns).saturating_mul(units(without));
    let without_cost = u128::from(without.ns).saturating_mul(units(with)).max(1);
    let percent = (with_cost.saturating_mul(100) / without_cost).min(100_000);
    Some(100 - percent as i64)
}

/// Whether reads with hints clearly do not save `wanted_percent` of the time of reads without: by three standard errors,
/// since durations vary much, above all where several programs wait for one another's data.
pub(super) fn clearly_less(wanted_percent: u64, with: &Sample, without: &Sample) -> bool {
    let (Some(gain), true) = (gain_percent(with, without), without.ns > 0) else { return true };
    let mean = |s: &Sample| s.ns as f64 / s.reads.max(1) as f64;
    let relative = |s: &Sample| s.mean_variance() / (mean(s) * mean(s)).max(1.0);
    // The error of a ratio of two means, in percent of the time without hints.
    let ratio = (100 - gain) as f64;
    let error = ratio * (relative(with) + relative(without)).sqrt();
    (gain as f64) + 3.0 * error < wanted_percent as f64
}
