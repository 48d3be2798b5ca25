//! Statistics of a program's I/O, in one pass and bounded memory: volume, sizes and strides, sequentiality, speed,
//! concurrency.

mod count;
mod show;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::codec::{FileInfo, OriginId, Outcome, Record, TraceOp};
use impresario_sched::FileId;
use rustc_hash::{FxHashMap, FxHashSet};
use serde::Serialize;

pub use count::{Common, Histogram};

/// Maximum pairs of file and thread followed; requests of further ones count as their first.
const STREAMS_MAX: usize = 1 << 20;
/// Maximum requests in flight that are counted.
const FLIGHT_MAX: usize = 1 << 20;

/// The figures of one file, or of all.
#[derive(Clone, Default, Debug, Serialize)]
pub struct Stats {
    /// Its path; empty for the whole trace.
    pub path: String,
    /// Requests by operation, in the order of [`TraceOp::ALL`].
    pub ops: [u64; 9],
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests that moved fewer bytes than asked.
    pub short: u64,
    /// Threads that read or wrote.
    pub threads: u64,
    /// Lengths of reads and writes, bytes.
    #[serde(serialize_with = "count::serialize")]
    pub sizes: Histogram,
    /// The most frequent lengths, bytes.
    pub common_sizes: Common,
    /// The most frequent distances between the starts of consecutive requests of a thread to a file, bytes.
    pub common_strides: Common,
    /// Requests that start where the thread's previous one in the file ended.
    pub sequential: u64,
    /// Requests that start before the thread's previous one in the file.
    pub backward: u64,
    /// Requests with a predecessor.
    pub followed: u64,
    /// Time between arrivals, ns.
    #[serde(serialize_with = "count::serialize")]
    pub gaps_ns: Histogram,
    /// Offset distance (twins-2017, Table II): the mean difference between the offsets of consecutive requests to a
    /// file, whatever their origin, bytes. `None` with fewer than two.
    pub offset_distance_bytes: Option<f64>,
    /// Maximum requests in flight, if completions are known.
    pub in_flight_max: u64,
    /// Its mean over the time from the first arrival to the last completion.
    pub in_flight_mean: f64,
    /// First arrival, ns.
    pub first_ns: u64,
    /// Last completion, or last arrival if completions are unknown, ns.
    pub last_ns: u64,
    /// Time with at least one request in flight, ns.
    pub busy_ns: u64,
    /// Sum of the durations, ns.
    pub waited_ns: u64,
    /// Requests whose completion is unknown.
    pub open_ended: u64,
}

impl Stats {
    /// Reads and writes.
    pub fn data_requests(&self) -> u64 {
        self.ops[TraceOp::Read as usize] + self.ops[TraceOp::Write as usize]
    }

    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.read_bytes.saturating_add(self.written_bytes)
    }

    /// From the first arrival to the last completion, s.
    pub fn span_s(&self) -> f64 {
        self.last_ns.saturating_sub(self.first_ns) as f64 / 1e9
    }

    /// Bytes a second over the whole span; `None` if that is zero.
    pub fn bandwidth(&self) -> Option<f64> {
        Some(self.bytes() as f64 / self.span_s()).filter(|b| b.is_finite())
    }

    /// Bytes a second while requests were in flight.
    pub fn busy_bandwidth(&self) -> Option<f64> {
        Some(self.bytes() as f64 / (self.busy_ns as f64 / 1e9)).filter(|b| b.is_finite())
    }

    /// The sequential share of the requests with a predecessor, 0 to 1.
    pub fn sequentiality(&self) -> Option<f64> {
        (self.followed > 0).then(|| self.sequential as f64 / self.followed as f64)
    }

    /// As text of several lines.
    pub fn text(&self) -> String {
        show::text(self)
    }
}

/// Collects statistics from records in order of arrival.
#[derive(Default)]
pub struct Collector {
    whole: Running,
    files: Vec<Running>,
    streams: FxHashMap<(FileId, OriginId), (u64, u64)>,
    threads: FxHashSet<OriginId>,
}

/// Partial statistics and the state to extend them.
#[derive(Default)]
struct Running {
    stats: Stats,
    seen: bool,
    last_arrival_ns: u64,
    last_offset: Option<u64>,
    distance: f64,
    distances: u64,
    busy_until_ns: u64,
    flight: BinaryHeap<Reverse<u64>>,
}

impl Collector {
    /// An empty collector.
    pub fn new() -> Collector {
        Collector::default()
    }

    /// Adds a request.
    pub fn add(&mut self, record: &Record) {
        let at = record.file.0 as usize;
        if self.files.len() <= at {
            self.files.resize_with(at + 1, Running::default);
        }
        let (mut step, mut new_thread, mut new_in_file) = (None, false, false);
        if record.op.is_data() {
            let key = (record.file, record.origin);
            let now = (record.offset, record.end());
            if self.streams.len() < STREAMS_MAX || self.streams.contains_key(&key) {
                step = self.streams.insert(key, now);
                new_in_file = step.is_none();
            }
            new_thread = self.threads.len() < STREAMS_MAX && self.threads.insert(record.origin);
        }
        self.whole.add(record, step, new_thread, false);
        self.files[at].add(record, step, new_in_file, true);
    }

    /// The statistics of the whole trace and of each file used, those with most waiting time first.
    pub fn finish(self, files: &[FileInfo]) -> (Stats, Vec<Stats>) {
        // Offset distance is per file: for the whole trace, the mean over all files' requests.
        let (distance, distances) = self.files.iter().fold((0.0, 0), |(d, n), f| (d + f.distance, n + f.distances));
        let mut whole = self.whole.finish();
        whole.offset_distance_bytes = (distances > 0).then(|| distance / distances as f64);
        let mut each: Vec<Stats> = self
            .files
            .into_iter()
            .enumerate()
            .filter(|(_, f)| f.seen)
            .map(|(id, f)| {
                let path = files.get(id).map(name).unwrap_or_default();
                Stats { path, ..f.finish() }
            })
            .collect();
        each.sort_by_key(|s| Reverse((s.waited_ns, s.bytes())));
        (whole, each)
    }
}

/// A file's name for messages.
pub fn name(file: &FileInfo) -> String {
    if file.path.is_empty() { format!("key {:016x}", file.key) } else { String::from_utf8_lossy(&file.path).into() }
}

impl Running {
    fn add(&mut self, r: &Record, step: Option<(u64, u64)>, new_thread: bool, distances: bool) {
        let s = &mut self.stats;
        s.ops[r.op as usize] += 1;
        match r.outcome {
            Outcome::Whole => {}
            Outcome::Short(_) => s.short += 1,
            Outcome::Failed(_) => s.failed += 1,
        }
        let end = r.completion().map_or(r.arrival.0, |c| c.0);
        if !self.seen {
            (s.first_ns, self.busy_until_ns) = (r.arrival.0, r.arrival.0);
        } else {
            s.gaps_ns.record(r.arrival.0.saturating_sub(self.last_arrival_ns));
        }
        self.seen = true;
        s.first_ns = s.first_ns.min(r.arrival.0);
        s.last_ns = s.last_ns.max(end);
        self.last_arrival_ns = self.last_arrival_ns.max(r.arrival.0);
        match r.duration {
            None => s.open_ended += 1,
            Some(duration) => {
                s.waited_ns = s.waited_ns.saturating_add(duration.0);
                let from = self.busy_until_ns.max(r.arrival.0);
                s.busy_ns += end.saturating_sub(from);
                self.busy_until_ns = self.busy_until_ns.max(end);
                while self.flight.peek().is_some_and(|Reverse(done)| *done <= r.arrival.0) {
                    self.flight.pop();
                }
                if self.flight.len() < FLIGHT_MAX {
                    self.flight.push(Reverse(end));
                }
                s.in_flight_max = s.in_flight_max.max(self.flight.len() as u64);
            }
        }
        if !r.op.is_data() {
            return;
        }
        s.threads += u64::from(new_thread);
        let bytes = if r.op == TraceOp::Read { &mut s.read_bytes } else { &mut s.written_bytes };
        *bytes = bytes.saturating_add(r.moved_bytes());
        s.sizes.record(r.len);
        s.common_sizes.add(r.len as i64);
        if let Some((offset, end)) = step {
            s.followed += 1;
            s.sequential += u64::from(r.offset == end);
            s.backward += u64::from(r.offset < offset);
            s.common_strides.add(r.offset.wrapping_sub(offset) as i64);
        }
        if distances {
            if let Some(last) = self.last_offset {
                self.distance += r.offset.abs_diff(last) as f64;
                self.distances += 1;
            }
            self.last_offset = Some(r.offset);
        }
    }

    fn finish(self) -> Stats {
        let mut s = self.stats;
        let span = s.last_ns.saturating_sub(s.first_ns);
        s.in_flight_mean = if span == 0 { 0.0 } else { s.waited_ns as f64 / span as f64 };
        s.offset_distance_bytes = (self.distances > 0).then(|| self.distance / self.distances as f64);
        s
    }
}

#[cfg(test)]
mod tests;
