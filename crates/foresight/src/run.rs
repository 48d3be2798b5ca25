//! A recorded run: which thread read what, in what order, and how long it computed in between.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::pages;

/// A thread of a process; what the numbers mean is the caller's choice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Reader {
    /// Its process.
    pub process: u64,
    /// The thread within the process.
    pub thread: u16,
}

/// One read as a trace recorded it. The reads of a trace come in order of arrival.
#[derive(Clone, Debug)]
pub struct RecordedRead {
    /// Distinguishes the threads of all processes and hosts.
    pub origin: u32,
    /// Which of the run's files.
    pub file: usize,
    /// What it read, not empty.
    pub bytes: Range<u64>,
    /// When it arrived, on the trace's clock.
    pub arrival_ns: u64,
    /// How long it took, where the trace recorded that.
    pub took_ns: Option<u64>,
}

/// One read of a thread.
#[derive(Clone, Debug)]
pub struct Access {
    /// Which of the run's files.
    pub file: usize,
    /// What it reads.
    pub bytes: Range<u64>,
    /// Computing before it, since the end of the thread's previous read.
    pub compute_ns: u64,
    /// When it arrived, since the first read of the run.
    pub arrival_ns: u64,
    /// How long it took, where the trace recorded that.
    pub took_ns: Option<u64>,
}

/// One thread's reads in order.
#[derive(Clone, Debug)]
pub struct Thread {
    /// Who reads.
    pub reader: Reader,
    /// Its reads.
    pub reads: Vec<Access>,
    /// The thread begins when this read (thread, number of the read) has ended and its first computing is over.
    pub(crate) after: Option<(usize, usize)>,
}

/// The reads of a recorded run.
#[derive(Clone, Debug, Default)]
pub struct Run {
    /// Threads in order of their first reads.
    pub threads: Vec<Thread>,
    /// Length of each file, as far as it is known, bytes.
    pub sizes: Vec<u64>,
    /// Reads of all threads.
    pub reads: u64,
}

impl Run {
    /// The first `reads_max` of these reads. `reader` names the thread of an origin; `assumed_ns` is what a read of so
    /// many bytes took where the trace does not say. A thread begins when the read that ended last before its first one
    /// has ended, so that programs that ran one after the other still do.
    pub fn of(
        mut sizes: Vec<u64>,
        reads: impl Iterator<Item = RecordedRead>,
        reads_max: usize,
        reader: impl Fn(u32) -> Reader,
        assumed_ns: impl Fn(u64) -> u64,
    ) -> Run {
        let mut index: FxHashMap<u32, usize> = FxHashMap::default();
        let mut threads: Vec<Thread> = Vec::new();
        // Completions in the trace: of each thread, and the latest of all so far.
        let mut last_end: Vec<u64> = Vec::new();
        let mut ended: BinaryHeap<Reverse<(u64, usize, usize)>> = BinaryHeap::new();
        let mut latest: Option<(u64, usize, usize)> = None;
        let (mut zero, mut count) = (None, 0);
        for RecordedRead { origin, file, bytes, arrival_ns, took_ns } in reads.take(reads_max) {
            count += 1;
            let arrival_ns = arrival_ns.saturating_sub(*zero.get_or_insert(arrival_ns));
            if sizes.len() <= file {
                sizes.resize(file + 1, 0);
            }
            sizes[file] = sizes[file].max(bytes.end);
            while let Some(Reverse(end)) = ended.peek().copied().filter(|Reverse(e)| e.0 <= arrival_ns) {
                ended.pop();
                latest = Some(latest.map_or(end, |l| l.max(end)));
            }
            let at = *index.entry(origin).or_insert_with(|| {
                let after = latest.map(|(_, thread, read)| (thread, read));
                threads.push(Thread { reader: reader(origin), reads: Vec::new(), after });
                last_end.push(latest.map_or(0, |l| l.0));
                threads.len() - 1
            });
            let took = took_ns.unwrap_or_else(|| assumed_ns(bytes.end - bytes.start));
            let compute_ns = arrival_ns.saturating_sub(last_end[at]);
            let end = arrival_ns.saturating_add(took);
            last_end[at] = last_end[at].max(end);
            ended.push(Reverse((end, at, threads[at].reads.len())));
            threads[at].reads.push(Access { file, bytes, compute_ns, arrival_ns, took_ns });
        }
        Run { threads, sizes, reads: count }
    }

    /// Bytes of the pages that at least one read wants, each counted once.
    pub fn needed_bytes(&self) -> u64 {
        let mut ranges: Vec<(usize, Range<u64>)> =
            self.threads.iter().flat_map(|t| &t.reads).map(|a| (a.file, pages(&a.bytes))).collect();
        ranges.sort_by_key(|(file, r)| (*file, r.start));
        let (mut sum, mut at) = (0u64, (usize::MAX, 0));
        for (file, r) in ranges {
            let from = if file == at.0 { r.start.max(at.1) } else { r.start };
            sum += r.end.saturating_sub(from);
            at = (file, if file == at.0 { r.end.max(at.1) } else { r.end });
        }
        sum
    }

    /// Computing that no prediction can shorten: the longest chain of threads that wait for one another.
    pub fn compute_ns(&self) -> u64 {
        let mut done: Vec<Vec<u64>> = Vec::with_capacity(self.threads.len());
        for t in &self.threads {
            let mut at = t.after.map_or(0, |(thread, read)| done[thread][read]);
            let ends = t.reads.iter().map(|a| {
                at += a.compute_ns;
                at
            });
            done.push(ends.collect());
        }
        done.iter().filter_map(|d| d.last()).max().copied().unwrap_or(0)
    }

    /// The time that reads took in the trace, summed, and for how many of them the trace says it.
    pub fn traced_wait_ns(&self) -> (u64, u64) {
        let known = self.threads.iter().flat_map(|t| &t.reads).filter_map(|a| a.took_ns);
        known.fold((0, 0), |(sum, n), took| (sum + took, n + 1))
    }

    /// From the beginning of the first read to the end of the last one in the trace.
    pub fn traced_span_ns(&self) -> u64 {
        let reads = self.threads.iter().flat_map(|t| &t.reads);
        reads.map(|a| a.arrival_ns + a.took_ns.unwrap_or(0)).max().unwrap_or(0)
    }
}
