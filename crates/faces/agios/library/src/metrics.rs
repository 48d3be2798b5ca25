//! Metrics of the requests, for `agios_get_metrics_and_reset`.

use std::fmt;

/// Metrics of the reads or the writes of one file.
#[derive(Default, Clone, Copy)]
pub struct Pattern {
    /// [`Metrics::epoch`] of the figures; others are over.
    epoch: u32,
    begun: bool,
    last_end: u64,
    distance_sum: u64,
    distances: u32,
    served_bytes: u64,
}

impl Pattern {
    /// The figures since the last reset.
    pub fn of(self, epoch: u32) -> Pattern {
        if self.epoch == epoch { self } else { Pattern { epoch, ..Pattern::default() } }
    }

    /// Counts an arrival: the distance is from the end of the previous one.
    pub fn arrived(&mut self, epoch: u32, offset: u64, len: u64) {
        *self = self.of(epoch);
        if self.begun {
            self.distance_sum = self.distance_sum.saturating_add(self.last_end.abs_diff(offset));
            self.distances = self.distances.saturating_add(1);
        }
        (self.begun, self.last_end) = (true, offset.saturating_add(len));
    }

    /// Counts a release.
    pub fn released(&mut self, epoch: u32, len: u64) {
        *self = self.of(epoch);
        self.served_bytes = self.served_bytes.saturating_add(len);
    }
}

/// Metrics since the start or the last reset.
#[derive(Default, Clone)]
pub struct Metrics {
    epoch: u32,
    reads: u64,
    writes: u64,
    bytes: u64,
    largest: u64,
    /// From the first arrival to the last, nanoseconds.
    pub span_ns: u64,
    files: u64,
    distance_means: u128,
    patterns: u64,
    served_bytes: u64,
}

/// The figures, in the order of `struct agios_metrics_t`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct MetricsC {
    /// Requests added.
    pub total_reqnb: i64,
    /// Reads.
    pub reads: i64,
    /// Writes.
    pub writes: i64,
    /// Nanoseconds.
    pub avg_time_between_requests: i64,
    /// Bytes.
    pub avg_request_size: i64,
    /// Bytes.
    pub max_request_size: i64,
    /// Files.
    pub filenb: i64,
    /// Bytes.
    pub avg_offset_distance: i64,
    /// Bytes.
    pub served_bytes: i64,
}

impl Metrics {
    /// Counts the resets.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Counts an arrival.
    pub fn arrived(&mut self, write: bool, len: u64) {
        *(if write { &mut self.writes } else { &mut self.reads }) += 1;
        self.bytes = self.bytes.saturating_add(len);
        self.largest = self.largest.max(len);
    }

    /// Adds the metrics of a file, its reads and its writes. A file that is forgotten and returns counts twice.
    pub fn keep(&mut self, patterns: &[Pattern; 2]) {
        let patterns = patterns.map(|p| p.of(self.epoch));
        self.files += u64::from(patterns.iter().any(|p| p.begun || p.served_bytes > 0));
        for p in patterns {
            self.served_bytes = self.served_bytes.saturating_add(p.served_bytes);
            if p.distances > 0 {
                self.distance_means += u128::from(p.distance_sum / u64::from(p.distances));
                self.patterns += 1;
            }
        }
    }

    /// Adds those of other files.
    pub fn add(&mut self, other: &Metrics) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.largest = self.largest.max(other.largest);
        self.files += other.files;
        self.distance_means += other.distance_means;
        self.patterns += other.patterns;
        self.served_bytes = self.served_bytes.saturating_add(other.served_bytes);
    }

    /// Resets everything.
    pub fn reset(&mut self) {
        *self = Metrics { epoch: self.epoch.wrapping_add(1), ..Metrics::default() };
    }

    /// The figures.
    pub fn figures(&self) -> MetricsC {
        let number = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
        let total = self.reads + self.writes;
        MetricsC {
            total_reqnb: number(total),
            reads: number(self.reads),
            writes: number(self.writes),
            avg_time_between_requests: number(self.span_ns / total.saturating_sub(1).max(1)),
            avg_request_size: number(self.bytes / total.max(1)),
            max_request_size: number(self.largest),
            filenb: number(self.files),
            avg_offset_distance: number((self.distance_means / u128::from(self.patterns.max(1))) as u64),
            served_bytes: number(self.served_bytes),
        }
    }
}

impl fmt::Display for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.figures();
        writeln!(f, "requests\t{}\nreads\t{}\nwrites\t{}", m.total_reqnb, m.reads, m.writes)?;
        writeln!(f, "mean time between requests (ns)\t{}", m.avg_time_between_requests)?;
        writeln!(f, "mean request size (bytes)\t{}", m.avg_request_size)?;
        writeln!(f, "largest request (bytes)\t{}", m.max_request_size)?;
        writeln!(f, "files\t{}\nmean offset distance (bytes)\t{}", m.filenb, m.avg_offset_distance)?;
        writeln!(f, "bytes released\t{}", m.served_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_requests() {
        let mut m = Metrics::default();
        assert_eq!(m.figures(), MetricsC::default());
        let mut files = [[Pattern::default(); 2]; 2];
        for (file, write, offset, len) in
            [(0, false, 0, 10), (0, false, 10, 10), (0, false, 50, 40), (1, true, 0, 100), (1, true, 0, 40)]
        {
            m.arrived(write, len);
            files[file][usize::from(write)].arrived(m.epoch(), offset, len);
        }
        files[1][1].released(m.epoch(), 140);
        let mut sum = m.clone();
        sum.span_ns = 400;
        files.iter().for_each(|file| sum.keep(file));
        let figures = sum.figures();
        assert_eq!((figures.total_reqnb, figures.reads, figures.writes), (5, 3, 2));
        assert_eq!(
            (figures.avg_time_between_requests, figures.avg_request_size, figures.max_request_size),
            (100, 40, 100)
        );
        // File 1: 0 and 30, so 15; file 2: 100.
        assert_eq!((figures.filenb, figures.avg_offset_distance, figures.served_bytes), (2, 57, 140));
        assert!(sum.to_string().contains("files\t2"));
        // A reset begins anew, in files too.
        m.reset();
        files[0][0].released(m.epoch(), 7);
        files.iter().for_each(|file| m.keep(file));
        assert_eq!(m.figures(), MetricsC { filenb: 1, served_bytes: 7, ..MetricsC::default() });
    }
}
