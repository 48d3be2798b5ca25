//! The measurements of a run: latencies, time series, queue lengths, a sampled picture, distances.

use crate::outcome::{Flow, Served};

/// Intervals have equal length; when there are more than this, pairs are merged.
pub(crate) const INTERVALS_MAX: usize = 512;

/// A quantity summed over intervals, or integrated over time.
#[derive(Clone, Default)]
pub(crate) struct Track {
    pub(crate) values: Vec<f64>,
}

impl Track {
    fn add(&mut self, interval: usize, value: f64) {
        if self.values.len() <= interval {
            self.values.resize(interval + 1, 0.0);
        }
        self.values[interval] += value;
    }

    fn halve(&mut self) {
        self.values = self.values.chunks(2).map(|pair| pair.iter().sum()).collect();
    }
}

/// A value that changes in steps, and its integral.
#[derive(Clone, Default)]
pub(crate) struct Gauge {
    value: f64,
    since: u64,
    pub(crate) integral: Track,
    total: f64,
}

impl Gauge {
    /// Value × nanoseconds up to the last change.
    pub(crate) fn total(&self) -> f64 {
        self.total
    }
}

/// One application's time series.
#[derive(Clone, Default)]
pub(crate) struct Progress {
    bytes: Track,
    /// Intervals in which it had a request outstanding.
    busy: Vec<bool>,
}

/// All quantities recorded per interval.
pub(crate) struct Recorder {
    interval_ns: u64,
    pub(crate) io_queue: Gauge,
    pub(crate) server_queue: Gauge,
    pub(crate) peers: Gauge,
    pub(crate) outstanding: Gauge,
    pub(crate) progress: Vec<Progress>,
    /// All applications have ended; later events do not count.
    closed: bool,
}

/// Initial interval length: 2^20 ns, about a millisecond.
const INTERVAL_NS: u64 = 1 << 20;

impl Recorder {
    pub(crate) fn new(applications: usize) -> Recorder {
        Recorder {
            interval_ns: INTERVAL_NS,
            io_queue: Gauge::default(),
            server_queue: Gauge::default(),
            peers: Gauge::default(),
            outstanding: Gauge::default(),
            progress: vec![Progress::default(); applications],
            closed: false,
        }
    }

    pub(crate) fn interval_ns(&self) -> u64 {
        self.interval_ns
    }

    #[inline]
    fn reach(&mut self, now: u64) {
        while now / self.interval_ns >= INTERVALS_MAX as u64 {
            self.interval_ns *= 2;
            for gauge in [&mut self.io_queue, &mut self.server_queue, &mut self.peers, &mut self.outstanding] {
                gauge.integral.halve();
            }
            for p in &mut self.progress {
                p.bytes.halve();
                p.busy = p.busy.chunks(2).map(|pair| pair.iter().any(|b| *b)).collect();
            }
        }
    }

    /// Changes a gauge.
    #[inline]
    pub(crate) fn change(&mut self, now: u64, which: impl Fn(&mut Recorder) -> &mut Gauge, by: f64) {
        if by == 0.0 || self.closed {
            return;
        }
        self.reach(now);
        let interval_ns = self.interval_ns;
        let gauge = which(self);
        let (value, mut since) = (gauge.value, gauge.since);
        gauge.total += value * (now - since) as f64;
        if value != 0.0 {
            while since < now {
                let interval = since / interval_ns;
                let until = now.min((interval + 1) * interval_ns);
                gauge.integral.add(interval as usize, value * (until - since) as f64);
                since = until;
            }
        }
        gauge.since = now;
        gauge.value = value + by;
    }

    /// Ends the measurement.
    pub(crate) fn close(&mut self, now: u64) {
        let gauges: [fn(&mut Recorder) -> &mut Gauge; 4] =
            [|r| &mut r.io_queue, |r| &mut r.server_queue, |r| &mut r.peers, |r| &mut r.outstanding];
        for gauge in gauges {
            self.change(now, gauge, 1.0);
            self.change(now, gauge, -1.0);
        }
        self.closed = true;
    }

    /// An application's operation, outstanding since `began`, ended and moved `bytes`.
    pub(crate) fn ended(&mut self, now: u64, application: usize, began: u64, bytes: u64) {
        self.reach(now);
        let (from, to) = ((began / self.interval_ns) as usize, (now / self.interval_ns) as usize);
        let p = &mut self.progress[application];
        p.bytes.add(to, bytes as f64);
        if p.busy.len() <= to {
            p.busy.resize(to + 1, false);
        }
        p.busy[from..=to].fill(true);
    }

    /// Bytes of an application in each interval.
    pub(crate) fn bytes(&self, application: usize) -> impl Iterator<Item = u64> {
        self.progress[application].bytes.values.iter().map(|b| *b as u64)
    }

    /// The lowest throughput of an application in any of [`LEAST_PARTS`] or fewer parts of its time throughout which it
    /// had requests outstanding, bytes a second; `None` without such a part.
    pub(crate) fn least(&self, application: usize, start: u64, end: u64) -> Option<f64> {
        let p = &self.progress[application];
        let whole: Vec<usize> =
            (start.div_ceil(self.interval_ns) as usize..(end / self.interval_ns) as usize).collect();
        let together = whole.len().div_ceil(LEAST_PARTS).max(1);
        let throughput = |part: &[usize]| {
            let bytes: f64 = part.iter().map(|i| p.bytes.values.get(*i).copied().unwrap_or(0.0)).sum();
            bytes * 1e9 / (self.interval_ns as f64 * part.len() as f64)
        };
        let busy = |part: &&[usize]| part.iter().all(|i| p.busy.get(*i).copied().unwrap_or(false));
        whole.chunks_exact(together).filter(busy).map(throughput).min_by(f64::total_cmp)
    }
}

/// Maximum parts of an application's time for the lowest throughput: in shorter ones it would depend on which side a
/// single disk access falls.
const LEAST_PARTS: usize = 32;

/// The accesses kept for the picture: every n-th, where n doubles when there are too many.
#[derive(Default)]
pub(crate) struct Picture {
    kept: Vec<Served>,
    every: u64,
    seen: u64,
}

/// Maximum accesses in the picture.
pub(crate) const PICTURE_MAX: usize = 4096;

impl Picture {
    #[inline]
    pub(crate) fn see(&mut self, served: impl FnOnce() -> Served) {
        let every = self.every.max(1);
        if self.seen.is_multiple_of(every) {
            if self.kept.len() == PICTURE_MAX {
                let mut keep = false;
                self.kept.retain(|_| {
                    keep = !keep;
                    keep
                });
                self.every = every * 2;
            }
            if self.seen.is_multiple_of(self.every.max(1)) {
                self.kept.push(served());
            }
        }
        self.seen += 1;
    }

    pub(crate) fn into_kept(self) -> Vec<Served> {
        self.kept
    }
}

/// Mean distance between consecutive offsets within a file.
#[derive(Clone, Copy, Default)]
pub(crate) struct Distance {
    sum: f64,
    count: u64,
}

impl Distance {
    #[inline]
    pub(crate) fn step(&mut self, last: &mut (u32, u64), file: u32, offset: u64) {
        if last.0 == file + 1 {
            self.sum += last.1.abs_diff(offset) as f64;
            self.count += 1;
        }
        *last = (file + 1, offset);
    }

    pub(crate) fn mean(&self) -> f64 {
        self.sum / self.count.max(1) as f64
    }
}

impl Flow {
    #[inline]
    pub(crate) fn add(&mut self, bytes: u64) {
        self.requests += 1;
        self.bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_is_integrated_over_intervals_that_grow() {
        let mut r = Recorder::new(1);
        r.change(0, |r| &mut r.io_queue, 3.0);
        r.change(5 * INTERVAL_NS / 2, |r| &mut r.io_queue, -3.0);
        let expected: Vec<f64> = [3.0, 3.0, 1.5].iter().map(|v| v * INTERVAL_NS as f64).collect();
        assert_eq!(r.io_queue.integral.values, expected);
        r.close(INTERVAL_NS * 513);
        assert_eq!(r.interval_ns(), 2 * INTERVAL_NS);
        assert_eq!(r.io_queue.integral.values[..2], [6.0 * INTERVAL_NS as f64, 1.5 * INTERVAL_NS as f64]);
        assert_eq!(r.io_queue.total(), 7.5 * INTERVAL_NS as f64);
    }

    #[test]
    fn the_least_throughput_is_of_whole_busy_intervals() {
        let mut r = Recorder::new(2);
        let i = INTERVAL_NS;
        r.ended(i / 2, 0, 0, 1_000_000);
        r.ended(3 * i / 2, 0, i / 2, 100);
        r.ended(7 * i / 2, 0, 7 * i / 2, 5);
        r.ended(9 * i / 2, 0, 7 * i / 2, 7);
        let least = r.least(0, 0, 9 * i / 2).unwrap();
        assert_eq!(least, 5.0 * 1e9 / i as f64, "the third interval was idle, the last is not whole");
        assert_eq!(r.least(1, 0, 9 * i), None);
        assert_eq!(r.bytes(0).collect::<Vec<_>>(), [1_000_000, 100, 0, 5, 7]);
    }

    #[test]
    fn the_least_throughput_is_over_parts_of_sufficient_length() {
        let mut r = Recorder::new(1);
        // Something completes in every other interval; requests wait in all of them.
        for n in 0..160u64 {
            r.ended((2 * n + 1) * INTERVAL_NS + INTERVAL_NS / 2, 0, 2 * n * INTERVAL_NS, 100);
        }
        let least = r.least(0, 0, 320 * INTERVAL_NS).unwrap();
        assert_eq!(least, 500.0 * 1e9 / (10.0 * INTERVAL_NS as f64), "each of 32 parts has 10 intervals and 500 bytes");
    }

    #[test]
    fn the_picture_is_sampled_evenly() {
        let mut p = Picture::default();
        for n in 0..100_000u64 {
            p.see(|| Served { at_s: n as f64, ms: 0.0, server: 0, application: 0, address: 0, bytes: 0 });
        }
        let kept = p.into_kept();
        assert!((PICTURE_MAX / 2..=PICTURE_MAX).contains(&kept.len()));
        let gaps: Vec<f64> = kept.windows(2).map(|w| w[1].at_s - w[0].at_s).collect();
        assert!(gaps.iter().all(|g| *g == gaps[0]) && kept[0].at_s == 0.0);
    }
}
