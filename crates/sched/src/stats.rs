//! Statistics of a scheduler: counts, histograms, and the access-pattern figures of twins-2017, VI.

use impresario_base::Histogram;
pub use impresario_base::histogram::{Cumulative, Summary};
use serde::Serialize;

use crate::loads::{Load, Loads, Party, WhoLoads};
use crate::throughput::Throughputs;
use crate::types::{FileId, Nanos, Op};

/// Histogram steps: four per power of two.
pub(crate) const STEPS_LOG2: u32 = 2;

/// Collected by the core.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    pub(crate) accepted: u64,
    pub(crate) cancelled: u64,
    pub(crate) passed: u64,
    pub(crate) completed: u64,
    pub(crate) failed: u64,
    pub(crate) read_bytes: u64,
    pub(crate) write_bytes: u64,
    pub(crate) blocked: u64,
    pub(crate) request_bytes: Histogram<STEPS_LOG2>,
    pub(crate) batch_requests: Histogram<STEPS_LOG2>,
    pub(crate) batch_bytes: Histogram<STEPS_LOG2>,
    pub(crate) queue_ns: Histogram<STEPS_LOG2>,
    pub(crate) service_ns: Histogram<STEPS_LOG2>,
    /// From arrival to completion: reads, writes, others.
    request_ns: [Histogram<STEPS_LOG2>; 3],
    jobs: Loads<u64>,
    users: Loads<u64>,
    pub(crate) inter_arrival_ns: Histogram<STEPS_LOG2>,
    pub(crate) offset_distance_bytes: Histogram<STEPS_LOG2>,
    pub(crate) file_switches: u64,
    pub(crate) throughputs: Throughputs,
    last_arrival: Option<Nanos>,
    last_dispatch: Option<(FileId, u64)>,
}

impl Statistics {
    /// Records an arrival; `len_bytes` of reads and writes.
    pub(crate) fn arrived(&mut self, now: Nanos, len_bytes: Option<u64>) {
        self.accepted += 1;
        if let Some(len_bytes) = len_bytes {
            self.request_bytes.record(len_bytes);
        }
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

    /// Records a completed batch: its service time and bytes.
    pub(crate) fn ended(&mut self, op: Op, service: Nanos, bytes: u64) {
        self.service_ns.record(service.0);
        match op {
            Op::Read => self.read_bytes = self.read_bytes.saturating_add(bytes),
            Op::Write => self.write_bytes = self.write_bytes.saturating_add(bytes),
            _ => {}
        }
    }

    /// Records a request of (job, user) that ended, failed ones included, `took` after its arrival.
    pub(crate) fn completed(&mut self, now: Nanos, (job, user): (u64, u64), op: Op, bytes: u64, took: Nanos) {
        self.completed += 1;
        let load = Load::of(op, bytes, took);
        self.jobs.count(job, now, &load);
        self.users.count(user, now, &load);
        let [reads, writes, others] = &mut self.request_ns;
        let kind = match op {
            Op::Read => reads,
            Op::Write => writes,
            Op::Sync | Op::Truncate | Op::Unlink => others,
        };
        kind.record(took.0);
    }

    /// The histograms for programs that add up those of several servers. Times from 2 µs to 69 s, sizes from 512 bytes
    /// to 64 MiB.
    pub fn histograms(&self) -> Histograms {
        let times = |h: &Histogram<STEPS_LOG2>| h.cumulative(11, 36);
        let sizes = |h: &Histogram<STEPS_LOG2>| h.cumulative(9, 26);
        let [reads, writes, others] = &self.request_ns;
        Histograms {
            request_ns: RequestTimes { read: times(reads), write: times(writes), other: times(others) },
            queue_ns: times(&self.queue_ns),
            service_ns: times(&self.service_ns),
            request_bytes: sizes(&self.request_bytes),
            batch_bytes: sizes(&self.batch_bytes),
        }
    }

    /// Who loads the scheduler most at `now`.
    pub fn who_loads(&mut self, now: Nanos) -> WhoLoads {
        WhoLoads { jobs: Party::list(&mut self.jobs, now), users: Party::list(&mut self.users, now) }
    }

    /// The statistics for people and programs.
    pub fn report(&self) -> Report {
        Report {
            accepted: self.accepted,
            cancelled: self.cancelled,
            passed: self.passed,
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

    /// Resets the statistics; outstanding requests stay known.
    pub(crate) fn reset(&mut self) {
        let mut throughputs = std::mem::take(&mut self.throughputs);
        throughputs.reset();
        *self = Statistics { throughputs, ..Statistics::default() };
    }
}

/// The statistics of a scheduler since its start or the last reset.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Report {
    /// Requests accepted.
    pub accepted: u64,
    /// Requests cancelled while queued.
    pub cancelled: u64,
    /// Reads that needed no device and bypassed scheduling; counted nowhere else.
    pub passed: u64,
    /// Requests completed, failed ones included.
    pub completed: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Requests that had to wait for an older conflicting one.
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
    /// Device time per batch.
    pub service_ns: Summary,
    /// Time between consecutive arrivals (twins-2017, VI-A).
    pub inter_arrival_ns: Summary,
    /// Difference of offsets between consecutive batches of one file (twins-2017, VI-A, Table II).
    pub offset_distance_bytes: Summary,
    /// Consecutive batches of different files.
    pub file_switches: u64,
    /// Throughput of the worst-off application per interval of 100 ms (aioli-2006, part 2).
    pub least_throughput_bytes_per_s: Summary,
}

/// The histograms of a scheduler since its start or the last reset.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Histograms {
    /// Time from arrival to completion, per request.
    pub request_ns: RequestTimes,
    /// Time from arrival to dispatch, per request.
    pub queue_ns: Cumulative,
    /// Device time per batch.
    pub service_ns: Cumulative,
    /// Sizes of data requests as they arrived.
    pub request_bytes: Cumulative,
    /// Sizes of batches as they were dispatched.
    pub batch_bytes: Cumulative,
}

/// Times of requests by operation.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct RequestTimes {
    /// Reads.
    pub read: Cumulative,
    /// Writes.
    pub write: Cumulative,
    /// Syncs, truncates, unlinks.
    pub other: Cumulative,
}

#[cfg(test)]
mod tests {
    use super::*;

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
