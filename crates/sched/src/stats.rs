//! What a scheduler has done: counts, histograms, and the access-pattern figures of twins-2017, VI.

use serde::Serialize;

use crate::throughput::Throughputs;
use crate::types::{FileId, Nanos, Op};

/// Jain's fairness index of the given shares: 1 when all are equal or there is nothing to compare, 1/n when one has
/// everything.
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|s| s * s).sum();
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

/// A histogram of non-negative numbers with 4 steps per power of two (at most 19 % wide), in constant memory.
#[derive(Clone)]
pub struct Histogram {
    counts: [u64; Self::BUCKETS],
    count: u64,
    sum: u128,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { counts: [0; Self::BUCKETS], count: 0, sum: 0, max: 0 }
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.summary().fmt(f)
    }
}

impl Histogram {
    const BUCKETS: usize = 252;

    fn bucket(value: u64) -> usize {
        if value < 4 {
            return value as usize;
        }
        let octave = 63 - value.leading_zeros();
        (((octave - 1) << 2) as u64 + (value >> (octave - 2) & 3)) as usize
    }

    fn lower_bound(bucket: usize) -> u64 {
        match bucket {
            0..4 => bucket as u64,
            _ => (4 + (bucket as u64 & 3)) << (bucket / 4 - 1),
        }
    }

    /// Counts one value.
    pub fn record(&mut self, value: u64) {
        self.record_times(value, 1);
    }

    /// Counts a value so many times.
    pub fn record_times(&mut self, value: u64, times: u64) {
        self.counts[Self::bucket(value)] += times;
        self.count += times;
        self.sum += u128::from(value) * u128::from(times);
        self.max = self.max.max(value);
    }

    /// Values counted.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Arithmetic mean, exact; 0 of nothing.
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    /// The value below which a share `q` (0 to 1) of the values lies, interpolated within its step; 0 of nothing.
    pub fn quantile(&self, q: f64) -> u64 {
        let target = q.clamp(0.0, 1.0) * self.count as f64;
        let mut below = 0.0;
        for (b, &n) in self.counts.iter().enumerate() {
            let n = n as f64;
            if n > 0.0 && below + n >= target {
                let low = Self::lower_bound(b);
                let high = if b + 1 < Self::BUCKETS { Self::lower_bound(b + 1) } else { u64::MAX };
                return (low + ((high - low) as f64 * ((target - below) / n)) as u64).min(self.max);
            }
            below += n;
        }
        self.max
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

/// What is told of a histogram. The unit is in the name of the field that holds it.
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

/// Collected by the core.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    pub(crate) accepted: u64,
    pub(crate) cancelled: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    pub(crate) blocked: u64,
    pub(crate) request_bytes: Histogram,
    pub(crate) batch_requests: Histogram,
    pub(crate) batch_bytes: Histogram,
    pub(crate) queue_ns: Histogram,
    pub(crate) service_ns: Histogram,
    pub(crate) inter_arrival_ns: Histogram,
    pub(crate) offset_distance_bytes: Histogram,
    pub(crate) file_switches: u64,
    pub(crate) throughputs: Throughputs,
    last_arrival: Option<Nanos>,
    last_dispatch: Option<(FileId, u64)>,
}

impl Statistics {
    pub(crate) fn arrived(&mut self, now: Nanos, len: u64) {
        self.accepted += 1;
        self.request_bytes.record(len);
        if let Some(last) = self.last_arrival.replace(now) {
            self.inter_arrival_ns.record(now.since(last).0);
        }
    }

    pub(crate) fn dispatched(&mut self, file: FileId, file_offset: u64, requests: usize, bytes: u64) {
        self.batch_requests.record(requests as u64);
        self.batch_bytes.record(bytes);
        match self.last_dispatch.replace((file, file_offset)) {
            Some((last, offset)) if last == file => self.offset_distance_bytes.record(offset.abs_diff(file_offset)),
            Some(_) => self.file_switches += 1,
            None => {}
        }
    }

    /// A batch ended after so long with so many bytes.
    pub(crate) fn ended(&mut self, op: Op, service: Nanos, bytes: u64) {
        self.service_ns.record(service.0);
        match op {
            Op::Read => self.read_bytes = self.read_bytes.saturating_add(bytes),
            Op::Write => self.write_bytes = self.write_bytes.saturating_add(bytes),
            _ => {}
        }
    }

    /// What a person or a program is told.
    pub fn report(&self) -> Report {
        Report {
            accepted: self.accepted,
            cancelled: self.cancelled,
            completed: self.completed,
            failed: self.failed,
            read_bytes: self.read_bytes,
            write_bytes: self.write_bytes,
            blocked: self.blocked,
            batches: self.batch_bytes.count(),
            request_bytes: self.request_bytes.summary(),
            batch_requests: self.batch_requests.summary(),
            batch_bytes: self.batch_bytes.summary(),
            queue_ns: self.queue_ns.summary(),
            service_ns: self.service_ns.summary(),
            inter_arrival_ns: self.inter_arrival_ns.summary(),
            offset_distance_bytes: self.offset_distance_bytes.summary(),
            file_switches: self.file_switches,
            least_throughput_bytes_per_s: self.throughputs.least().summary(),
        }
    }

    /// Starts anew; what is outstanding stays known.
    pub(crate) fn reset(&mut self) {
        let mut throughputs = std::mem::take(&mut self.throughputs);
        throughputs.reset();
        *self = Statistics { throughputs, ..Statistics::default() };
    }
}

/// The statistics of a scheduler since its start or the last reset.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Report {
    /// Requests taken in.
    pub accepted: u64,
    /// Requests cancelled while queued.
    pub cancelled: u64,
    /// Requests completed, failed ones included.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Requests that had to wait for an older one that conflicted.
    pub blocked: u64,
    /// Batches dispatched.
    pub batches: u64,
    /// Sizes of data requests as they arrived.
    pub request_bytes: Summary,
    /// Requests per batch.
    pub batch_requests: Summary,
    /// Sizes of batches as they were dispatched.
    pub batch_bytes: Summary,
    /// Time from arrival to dispatch, per request.
    pub queue_ns: Summary,
    /// Time that the device took, per batch.
    pub service_ns: Summary,
    /// Time between consecutive arrivals (twins-2017, VI-A).
    pub inter_arrival_ns: Summary,
    /// Difference of offsets between consecutive batches of one file (twins-2017, VI-A, Table II).
    pub offset_distance_bytes: Summary,
    /// Consecutive batches of different files.
    pub file_switches: u64,
    /// Throughput of the application that was worst off, by intervals of 100 ms (aioli-2006, part 2).
    pub least_throughput_bytes_per_s: Summary,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_hold_their_values() {
        for v in (0..5000).chain((0..64).map(|b| 1u64 << b)).chain([u64::MAX]) {
            let b = Histogram::bucket(v);
            assert!(b < Histogram::BUCKETS, "{v}");
            assert!(Histogram::lower_bound(b) <= v, "{v}");
            assert!(b + 1 == Histogram::BUCKETS || v < Histogram::lower_bound(b + 1), "{v}");
        }
    }

    #[test]
    fn quantiles_and_mean() {
        let mut h = Histogram::default();
        (1..=1000).for_each(|v| h.record(v));
        assert_eq!(h.mean(), 500.5);
        for (q, want) in [(0.5, 500.0), (0.99, 990.0)] {
            let got = h.quantile(q) as f64;
            assert!((got / want - 1.0).abs() < 0.05, "{q}: {got}");
        }
        assert_eq!(h.quantile(1.0), 1000);
        assert_eq!(Histogram::default().quantile(0.5), 0);
    }

    /// Table II's metric: the difference between consecutive offsets of one file.
    #[test]
    fn offset_distance_counts_within_a_file() {
        let mut s = Statistics::default();
        for (file, offset) in [(1, 0), (1, 100), (1, 50), (2, 9), (2, 9)] {
            s.dispatched(FileId(file), offset, 1, 10);
        }
        let r = s.report();
        assert_eq!((r.offset_distance_bytes.count, r.offset_distance_bytes.mean), (3, 50.0));
        assert_eq!(r.file_switches, 1);
    }
}
