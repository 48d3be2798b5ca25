//! Metrics of the requests, for `agios_get_metrics_and_reset`.

use std::fmt;
use std::time::Instant;

use rustc_hash::FxHashMap;

/// Largest number of files and types that are distinguished, so that memory does not grow with the number of files.
const PATTERNS_MAX: usize = 65_536;

/// Metrics of one file and type.
#[derive(Default, Clone, Copy)]
pub struct Pattern {
    last_end: Option<u64>,
    distance_sum: u128,
    distances: u64,
    /// Bytes released.
    pub served_bytes: u64,
}

impl Pattern {
    /// Counts an arrival: the distance is from the end of the previous one.
    pub fn arrived(&mut self, offset: u64, len: u64) {
        if let Some(end) = self.last_end.replace(offset.saturating_add(len)) {
            self.distance_sum += u128::from(end.abs_diff(offset));
            self.distances += 1;
        }
    }
}

/// Metrics since the start or the last reset.
#[derive(Default)]
pub struct Metrics {
    reads: u64,
    writes: u64,
    bytes: u128,
    largest: u64,
    first: Option<Instant>,
    last: Option<Instant>,
    patterns: FxHashMap<(u64, bool), Pattern>,
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
    /// Counts an arrival.
    pub fn arrived(&mut self, at: Instant, write: bool, len: u64) {
        *(if write { &mut self.writes } else { &mut self.reads }) += 1;
        self.bytes += u128::from(len);
        self.largest = self.largest.max(len);
        self.first.get_or_insert(at);
        self.last = Some(at);
    }

    /// Whether the file and type are counted.
    pub fn knows(&self, file: u64, write: bool) -> bool {
        self.patterns.contains_key(&(file, write))
    }

    /// Whether the limit of distinguished files and types is reached.
    pub fn is_full(&self) -> bool {
        self.patterns.len() >= PATTERNS_MAX
    }

    /// The metrics of a file and type.
    pub fn pattern(&mut self, file: u64, write: bool) -> &mut Pattern {
        self.patterns.entry((file, write)).or_default()
    }

    /// The counted files and types.
    pub fn files(&self) -> impl Iterator<Item = (u64, bool)> {
        self.patterns.keys().copied()
    }

    /// The figures.
    pub fn figures(&self) -> MetricsC {
        let number = |n: u128| i64::try_from(n).unwrap_or(i64::MAX);
        let total = self.reads + self.writes;
        let span = self.first.zip(self.last).map_or(0, |(first, last)| (last - first).as_nanos());
        let mut files: Vec<u64> = self.files().map(|(file, _)| file).collect();
        files.sort_unstable();
        files.dedup();
        let means =
            self.patterns.values().filter(|p| p.distances > 0).map(|p| p.distance_sum / u128::from(p.distances));
        let (sum, queues) = means.fold((0u128, 0u128), |(sum, n), mean| (sum + mean, n + 1));
        MetricsC {
            total_reqnb: number(total.into()),
            reads: number(self.reads.into()),
            writes: number(self.writes.into()),
            avg_time_between_requests: number(span / u128::from(total.saturating_sub(1).max(1))),
            avg_request_size: number(self.bytes / u128::from(total.max(1))),
            max_request_size: number(self.largest.into()),
            filenb: files.len() as i64,
            avg_offset_distance: number(sum / queues.max(1)),
            served_bytes: number(self.patterns.values().map(|p| u128::from(p.served_bytes)).sum()),
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_are_those_of_the_requests() {
        let mut m = Metrics::default();
        assert_eq!(m.figures(), MetricsC::default());
        let start = Instant::now();
        for (i, (file, write, offset, len)) in
            [(1, false, 0, 10), (1, false, 10, 10), (1, false, 50, 40), (2, true, 0, 100), (2, true, 0, 40)]
                .iter()
                .enumerate()
        {
            m.arrived(start + Duration::from_nanos(i as u64 * 100), *write, *len);
            m.pattern(*file, *write).arrived(*offset, *len);
        }
        m.pattern(2, true).served_bytes += 140;
        let figures = m.figures();
        assert_eq!((figures.total_reqnb, figures.reads, figures.writes), (5, 3, 2));
        assert_eq!(
            (figures.avg_time_between_requests, figures.avg_request_size, figures.max_request_size),
            (100, 40, 100)
        );
        // File 1: 0 and 30, so 15; file 2: 100.
        assert_eq!((figures.filenb, figures.avg_offset_distance, figures.served_bytes), (2, 57, 140));
        assert!(m.to_string().contains("files\t2"));
    }
}
