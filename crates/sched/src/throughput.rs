//! The lowest instantaneous throughput among applications, which aioli-2006 (part 2) maximises.
//!
//! Time is divided into intervals. An application active throughout an interval (with requests outstanding or arriving
//! in it and in both neighbours) has as its instantaneous throughput the bytes it received in the interval; the lowest
//! of those is recorded.

use impresario_base::Histogram;

use crate::stats::STEPS_LOG2;
use crate::table::Table;
use crate::types::{JobId, Nanos};

/// Length of an interval.
const INTERVAL: Nanos = Nanos::from_millis(100);

#[derive(Clone, Copy, Debug, Default)]
struct Load {
    outstanding: u32,
    /// Active in this interval, if only briefly.
    seen: bool,
    /// Whether it was active in the last two intervals; the lowest bit is the latest.
    history: u8,
    /// Bytes in this interval and in the last.
    bytes: [u64; 2],
}

/// What each application received.
#[derive(Clone, Debug, Default)]
pub(crate) struct Throughputs {
    jobs: Vec<Load>,
    /// The present interval, counted from the clock's zero.
    interval: u64,
    least: Histogram<STEPS_LOG2>,
}

impl Throughputs {
    /// Bytes per second of the worst-off application, one value per interval.
    pub fn least(&self) -> &Histogram<STEPS_LOG2> {
        &self.least
    }

    /// Clears the recorded values; outstanding requests stay known.
    pub fn reset(&mut self) {
        self.least = Histogram::default();
        self.jobs.iter_mut().for_each(|j| (j.history, j.bytes) = (0, [0; 2]));
    }

    /// A request of an application arrived.
    pub fn arrived(&mut self, now: Nanos, job: JobId) {
        if let Some(load) = self.at(now, job) {
            load.outstanding += 1;
            load.seen = true;
        }
    }

    /// A request ended, or was cancelled with 0 bytes.
    pub fn ended(&mut self, now: Nanos, job: JobId, bytes: u64) {
        if let Some(load) = self.at(now, job) {
            load.outstanding = load.outstanding.saturating_sub(1);
            load.bytes[0] += bytes;
        }
    }

    fn at(&mut self, now: Nanos, job: JobId) -> Option<&mut Load> {
        let interval = now.0 / INTERVAL.0;
        if interval > self.interval {
            self.roll(interval);
        }
        // Identities are small and reused; larger ones are not measured.
        let index = (job.0 < Table::CAPACITY_MAX).then_some(job.0 as usize)?;
        if self.jobs.len() <= index {
            self.jobs.resize(index + 1, Load::default());
        }
        self.jobs.get_mut(index)
    }

    /// Closes the current interval and any empty ones after it.
    fn roll(&mut self, interval: u64) {
        // Requests outstanding now were so throughout those intervals; after three of them nothing changes any more.
        let passed = interval - self.interval;
        for step in 0..passed.min(3) {
            let mut least = None;
            for j in &mut self.jobs {
                let at_work = u8::from(j.seen || j.outstanding > 0);
                j.history = j.history << 1 | at_work;
                if j.history & 0b111 == 0b111 {
                    least = Some(least.unwrap_or(u64::MAX).min(j.bytes[1]));
                }
                j.bytes = [0, j.bytes[0]];
                j.seen = false;
            }
            if let Some(bytes) = least {
                let times = if step == 2 { passed - 2 } else { 1 };
                self.least.record_times(bytes.saturating_mul(1_000_000_000 / INTERVAL.0), times);
            }
        }
        self.interval = interval;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    /// Two applications; the second gets a tenth of the first, and nothing at all in one interval.
    #[test]
    fn the_worst_off_application_is_recorded() {
        let mut t = Throughputs::default();
        (0..2).for_each(|job| t.arrived(ms(10), JobId(job)));
        for interval in 0..6 {
            t.ended(ms(interval * 100 + 50), JobId(0), 1_000_000);
            t.arrived(ms(interval * 100 + 50), JobId(0));
            if interval != 3 {
                t.ended(ms(interval * 100 + 60), JobId(1), 100_000);
                t.arrived(ms(interval * 100 + 60), JobId(1));
            }
        }
        t.ended(ms(650), JobId(0), 0);
        // Intervals 1 to 4 have active neighbours.
        let s = t.least().summary();
        assert_eq!((s.count, s.max, s.mean), (4, 1_000_000, 750_000.0));
    }

    /// Silence with a request outstanding counts as no throughput; silence without requests does not count.
    #[test]
    fn silence_counts_while_something_is_outstanding() {
        let mut t = Throughputs::default();
        t.arrived(ms(10), JobId(0));
        t.ended(ms(1_010), JobId(0), 5_000_000);
        t.arrived(ms(9_000), JobId(0));
        let s = t.least().summary();
        assert_eq!((s.count, s.max), (8, 0), "intervals 1 to 8: at work throughout, nothing got");
        t.ended(ms(9_010), JobId(0), 1);
        t.arrived(ms(90_000), JobId(0));
        assert_eq!(t.least().count(), 8);
    }
}
