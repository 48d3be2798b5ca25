//! A recorded run again, with and without hints: how long it would take on a device of known costs.
//!
//! Each thread of the trace reads what it read, and computes between a read's end and the next one's beginning as long as
//! it did. A read waits for what is not in memory. The kernel's read-ahead, the page cache and the device are
//! modelled; the hints are those of the very [`Advisor`] that runs in the manager. A thread begins when the read that
//! ended last before its first one has ended again, so that programs that run one after the other still do.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::sync::Arc;

use impresario_trace::{Trace, TraceOp};
use rustc_hash::FxHashMap;

use super::device::Device;
use super::memory::{Memory, pages};
use super::read_ahead::{Fetch, Window};
use crate::advice::OpenFile;
use crate::advisor::{Advisor, Read, Reader};
use crate::cache::Action;
use crate::config::{Budget, Entry, Monitored, ReadAhead, StandDown};
use crate::regions::RegionMap;

/// From the end of a read to its hints: the ring, a wake-up, the calls.
const HINT_DELAY_NS: u64 = 60_000;
/// A read of data in memory: a call, and copying at 8 GB/s.
const CALL_NS: u64 = 1_000;

/// One read.
#[derive(Clone)]
pub struct Access {
    pub file: usize,
    pub bytes: Range<u64>,
    /// Computed before it, since the end of the thread's read before.
    pub compute_ns: u64,
    /// When it arrived in the trace, since the first one of all.
    pub arrival_ns: u64,
    /// What it took in the trace, if that is known.
    pub took_ns: Option<u64>,
}

/// One thread's reads in order.
pub struct Thread {
    pub process: u64,
    pub thread: u16,
    pub reads: Vec<Access>,
    /// It begins when that read of that thread has ended, and its first compute time is over.
    after: Option<(usize, usize)>,
}

/// The reads of a trace.
pub struct Run {
    pub threads: Vec<Thread>,
    /// Bytes of each file, as far as they are known.
    pub sizes: Vec<u64>,
    pub reads: u64,
}

impl Run {
    /// The reads of the files that `wanted` names; at most `reads_max` of them, the first ones.
    pub fn of(trace: &Trace, device: &Device, wanted: impl Fn(usize) -> bool, reads_max: usize) -> Run {
        let mut sizes: Vec<u64> = trace.files.iter().map(|f| f.size_bytes.unwrap_or(0)).collect();
        let mut index: FxHashMap<u32, usize> = FxHashMap::default();
        let mut threads: Vec<Thread> = Vec::new();
        // Completions in the trace: of each thread, and the latest of all so far.
        let mut last_end: Vec<u64> = Vec::new();
        let mut ended: BinaryHeap<Reverse<(u64, usize, usize)>> = BinaryHeap::new();
        let mut latest: Option<(u64, usize, usize)> = None;
        let (mut zero, mut count) = (None, 0);
        for r in &trace.records {
            let file = r.file.0 as usize;
            let len = r.moved_bytes();
            if r.op != TraceOp::Read || len == 0 || file >= sizes.len() || !wanted(file) {
                continue;
            }
            if count == reads_max {
                break;
            }
            count += 1;
            let arrival = r.arrival.0.saturating_sub(*zero.get_or_insert(r.arrival.0));
            let bytes = r.offset..r.offset.saturating_add(len);
            sizes[file] = sizes[file].max(bytes.end);
            while let Some(Reverse(end)) = ended.peek().copied().filter(|Reverse(e)| e.0 <= arrival) {
                ended.pop();
                latest = Some(latest.map_or(end, |l| l.max(end)));
            }
            let at = *index.entry(r.origin.0).or_insert_with(|| {
                let origin = trace.origin(r.origin);
                // Processes of several hosts may have the same number.
                let host = trace.origins.iter().position(|o| o.host == origin.host).unwrap_or(0) as u64;
                let process = (host << 32 | u64::from(origin.process)) & ((1 << 47) - 1);
                let after = latest.map(|(_, thread, read)| (thread, read));
                threads.push(Thread { process, thread: origin.thread as u16, reads: Vec::new(), after });
                last_end.push(latest.map_or(0, |l| l.0));
                threads.len() - 1
            });
            // Where ends are unknown, a read is taken to cost what the device would take.
            let took = r.duration.map(|d| d.0);
            let assumed = took.unwrap_or_else(|| device.random.ttp(len).0);
            let compute_ns = arrival.saturating_sub(last_end[at]);
            let end = arrival.saturating_add(assumed);
            last_end[at] = last_end[at].max(end);
            ended.push(Reverse((end, at, threads[at].reads.len())));
            threads[at].reads.push(Access { file, bytes, compute_ns, arrival_ns: arrival, took_ns: took });
        }
        Run { threads, sizes, reads: count as u64 }
    }

    /// Bytes that at least one read wants, each counted once.
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

    /// Computing that nothing can shorten: the longest chain of threads that wait for one another, ns.
    pub fn compute_ns(&self) -> u64 {
        let mut done: Vec<Vec<u64>> = Vec::with_capacity(self.threads.len());
        for t in &self.threads {
            let mut at = t.after.map_or(0, |(thread, read)| done[thread][read]);
            done.push(
                t.reads
                    .iter()
                    .map(|a| {
                        at += a.compute_ns;
                        at
                    })
                    .collect(),
            );
        }
        done.iter().filter_map(|d| d.last()).max().copied().unwrap_or(0)
    }

    /// The least time that any hints can bring the run to: all computing, or all bytes at the device's full speed.
    pub fn bound_ns(&self, device: &Device) -> u64 {
        // A hint follows a read, so the first read of all waits in any case; that is left out to be safe.
        self.compute_ns().max(device.streaming_ns(self.needed_bytes()))
    }

    /// What the reads took in the trace, ns, and how many of them are known.
    pub fn traced_wait(&self) -> (u64, u64) {
        let known = self.threads.iter().flat_map(|t| &t.reads).filter_map(|a| a.took_ns);
        known.fold((0, 0), |(sum, n), took| (sum + took, n + 1))
    }

    /// From the first read's beginning to the last one's end in the trace, ns.
    pub fn traced_span_ns(&self) -> u64 {
        let reads = self.threads.iter().flat_map(|t| &t.reads);
        reads.map(|a| a.arrival_ns + a.took_ns.unwrap_or(0)).max().unwrap_or(0)
    }
}

/// How a replay went.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Outcome {
    /// From the first read to the end of the last one, ns.
    pub run_ns: u64,
    /// Time that threads waited for reads, ns, summed.
    pub wait_ns: u64,
    /// Requests that reached the device.
    pub requests: u64,
    /// Bytes that they read.
    pub device_bytes: u64,
    /// Bytes that hints brought in and nobody read.
    pub wasted_bytes: u64,
}

/// Hints to replay with: an entry for some of the files.
pub type Entries<'a> = FxHashMap<usize, &'a Entry>;

/// Replays a run.
pub fn replay(run: &Run, device: &Device, memory_bytes: u64, entries: &Entries) -> Outcome {
    let guides: FxHashMap<usize, Guide> =
        entries.iter().map(|(file, entry)| (*file, Guide::new(entry, run.sizes[*file], device))).collect();
    let mut replay = Replay {
        run,
        device,
        memory: Memory::new(run.sizes.len(), memory_bytes),
        channels: vec![0; device.parallel.clamp(1, 1024) as usize],
        head: None,
        pieces: 0,
        windows: FxHashMap::default(),
        guides,
        events: BinaryHeap::new(),
        number: 0,
        followers: FxHashMap::default(),
        left: FxHashMap::default(),
        outcome: Outcome::default(),
    };
    replay.run();
    replay.outcome.wasted_bytes += replay.memory.unread();
    replay.outcome
}

/// One file's hints.
struct Guide {
    advisor: Advisor,
    regions: RegionMap,
    modes: FxHashMap<u64, OpenFile>,
}

impl Guide {
    fn new(entry: &Entry, size: u64, device: &Device) -> Guide {
        let regions = RegionMap::of(entry);
        let monitored = Monitored { key: "plan".into(), entry: entry.clone(), regions: regions.clone() };
        let never = StandDown { enabled: false, ..StandDown::default() };
        let advisor = Advisor::new(Arc::new(monitored), size, &Budget::default(), never, &device.cost());
        Guide { advisor, regions, modes: FxHashMap::default() }
    }
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A thread's read begins.
    Read { thread: usize, read: usize },
    /// The manager learns of it.
    Hint { thread: usize, read: usize },
}

struct Replay<'a> {
    run: &'a Run,
    device: &'a Device,
    memory: Memory,
    /// When each of the device's channels is free.
    channels: Vec<u64>,
    /// Where the last request ended.
    head: Option<(usize, u64)>,
    pieces: u64,
    windows: FxHashMap<(u64, usize), Window>,
    guides: FxHashMap<usize, Guide>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    number: u64,
    /// Threads that wait for a read to end.
    followers: FxHashMap<(usize, usize), Vec<usize>>,
    /// Reads of each process and file that are still to come; at none it closes the file.
    left: FxHashMap<(u64, usize), u64>,
    outcome: Outcome,
}

impl Replay<'_> {
    fn run(&mut self) {
        for (at, thread) in self.run.threads.iter().enumerate() {
            for access in &thread.reads {
                *self.left.entry((thread.process, access.file)).or_default() += 1;
            }
            match thread.after {
                Some(read) => self.followers.entry(read).or_default().push(at),
                None => self.begin(0, at, 0),
            }
        }
        while let Some(Reverse((now, _, event))) = self.events.pop() {
            match event {
                Event::Read { thread, read } => self.read(now, thread, read),
                Event::Hint { thread, read } => self.hint(now, thread, read),
            }
        }
    }

    fn begin(&mut self, now: u64, thread: usize, read: usize) {
        if let Some(access) = self.run.threads[thread].reads.get(read) {
            self.push(now.saturating_add(access.compute_ns), Event::Read { thread, read });
        }
    }

    fn push(&mut self, at: u64, event: Event) {
        self.number += 1;
        self.events.push(Reverse((at, self.number, event)));
    }

    fn read(&mut self, now: u64, thread: usize, read: usize) {
        let t = &self.run.threads[thread];
        let access = &t.reads[read];
        let (file, range, size) = (access.file, pages(&access.bytes), self.run.sizes[access.file]);
        let mode =
            self.guides.get(&file).and_then(|g| g.modes.get(&t.process)).map_or(ReadAhead::Normal, OpenFile::in_force);
        let missing = self.memory.missing(file, &range);
        let window = self.windows.entry((t.process, file)).or_default();
        let (ahead, largest) = (self.device.read_ahead_bytes, self.device.request_bytes_max);
        let fetches = window.read(&range, &missing, mode, ahead, largest, size);
        for fetch in fetches {
            match fetch {
                Fetch::Now(bytes) | Fetch::Ahead(bytes) => self.fetch(now, file, &bytes, false),
            }
        }
        // What the windows did not cover.
        self.fetch(now, file, &range, false);
        let len = access.bytes.end - access.bytes.start;
        let end = now.max(self.memory.read(file, &range)).saturating_add(CALL_NS + len / 8);
        self.outcome.wait_ns += end - now;
        self.outcome.run_ns = self.outcome.run_ns.max(end);
        if self.guides.contains_key(&file) {
            self.push(end.saturating_add(HINT_DELAY_NS), Event::Hint { thread, read });
        }
        self.begin(end, thread, read + 1);
        for follower in self.followers.remove(&(thread, read)).unwrap_or_default() {
            self.begin(end, follower, 0);
        }
    }

    /// Brings in what is missing of a range.
    fn fetch(&mut self, now: u64, file: usize, range: &Range<u64>, hint: bool) {
        for missing in self.memory.missing(file, range) {
            let mut at = missing.start;
            while at < missing.end {
                let end = missing.end.min(at.saturating_add(self.device.request_bytes_max.max(4096)));
                let ready = self.request(now, file, &(at..end));
                self.pieces += 1;
                self.outcome.wasted_bytes += self.memory.insert(file, at..end, ready, hint, self.pieces);
                at = end;
            }
        }
    }

    fn request(&mut self, now: u64, file: usize, range: &Range<u64>) -> u64 {
        let len = range.end - range.start;
        let goes_on = self.head == Some((file, range.start));
        let cost = if goes_on { self.device.sequential.ttp(len) } else { self.device.random.ttp(len) };
        self.head = Some((file, range.end));
        self.outcome.requests += 1;
        self.outcome.device_bytes += len;
        let Some(free) = self.channels.iter_mut().min() else { return now };
        *free = now.max(*free).saturating_add(cost.0);
        *free
    }

    fn hint(&mut self, now: u64, thread: usize, read: usize) {
        let t = &self.run.threads[thread];
        let access = &t.reads[read];
        let (file, size) = (access.file, self.run.sizes[access.file]);
        let Some(guide) = self.guides.get_mut(&file) else { return };
        guide.modes.entry(t.process).or_default().read(access.bytes.end, &guide.regions);
        let told = Read { bytes: access.bytes.clone(), duration_ns: 0, now_ns: now };
        let reader = Reader { program: t.process, thread: t.thread };
        let mut actions = guide.advisor.read(reader, &told, &mut |_| true);
        if let Some(left) = self.left.get_mut(&(t.process, file)) {
            *left -= 1;
            if *left == 0 {
                actions.extend(guide.advisor.depart(t.process));
            }
        }
        for action in actions {
            match action {
                Action::Prefetch(bytes) | Action::Renew(bytes) => {
                    let bytes = pages(&(bytes.start..bytes.end.min(size)));
                    if bytes.start < bytes.end {
                        self.fetch(now, file, &bytes, true);
                    }
                }
                Action::Release(bytes) => {
                    // Whole pages only.
                    let inner = bytes.start.div_ceil(4096) * 4096..bytes.end / 4096 * 4096;
                    if inner.start < inner.end {
                        self.outcome.wasted_bytes += self.memory.remove(file, &inner);
                    }
                }
            }
        }
    }
}
