//! The processes: when they issue requests, and how their file-system client turns these into calls.

use std::sync::Arc;

use impresario_base::Histogram;
use impresario_device::{CHUNK_BYTES, PageCache, ReadAhead};
use impresario_node::session::Epoch;
use impresario_node::{Parent, pieces_of};

use crate::access::{self, Access};
pub(crate) use crate::calls::Call;
use crate::calls::{CallContext, Owner};
use crate::collective::CollectiveCall;
use crate::model::{FileAt, Operation, Pattern, RankPlacement, Scenario};
use crate::simulation::{Event, Simulation, micros};
use impresario_base::slab::Key;

/// An errno: input or output failed.
pub(crate) const EIO: i32 = 5;

/// An application, or a copy of one.
pub(crate) struct Application {
    /// Its index in the scenario.
    pub(crate) index: usize,
    pub(crate) first_process: u32,
    pub(crate) processes: u32,
    pub(crate) first_file: u32,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Processes that have not ended, and those that wait at a barrier.
    left: u32,
    at_barrier: u32,
    pub(crate) requests_in_all: u64,
    pub(crate) latency_ns: Histogram<5>,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
    pub(crate) collective: Option<Box<CollectiveCall>>,
    /// For a trace: the accesses of each process.
    trace: Option<Arc<Vec<Vec<u32>>>>,
}

pub(crate) struct Process {
    pub(crate) application: u32,
    pub(crate) rank: u32,
    /// Its compute node.
    pub(crate) node: u32,
    /// Its I/O node, if there is one.
    pub(crate) io_node: u16,
    pub(crate) epoch: Epoch,
    pub(crate) next: u64,
    requests: u64,
    /// The request at which it waits for the others.
    limit: u64,
    pub(crate) outstanding: u32,
    /// Requests scheduled in the calendar.
    scheduled: u32,
    pub(crate) finished: u64,
    /// File + 1 and offset of the last request sent.
    last: (u32, u64),
    /// The file last read by the process, and the read-ahead state of that open file.
    pub(crate) read_ahead: (u32, ReadAhead),
}

/// A compute node.
pub(crate) struct ClientNode {
    busy_until: u64,
    /// The page cache for its processes' reads.
    pub(crate) cache: Option<Box<PageCache<Key>>>,
}

/// The kinds of operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Kind {
    /// A request of a process.
    Whole,
    /// A request of several regions, served range by range; true: the range just read is being written.
    Sieve { end: u64, writing: bool },
    /// The client fetches a range of a file into its cache.
    Fetch { start: u64, end: u64 },
    /// An aggregator's part of a collective round; true: it must still write what it reads.
    Aggregate { aggregator: u32, then_write: bool },
}

/// A client operation made of calls.
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) process: u32,
    /// Global index of the file.
    pub(crate) file: u32,
    pub(crate) access: Access,
    pub(crate) began: u64,
    parent: Parent,
    /// For a read through the cache: the current extent and the position in it.
    pub(crate) extent: u32,
    pub(crate) at: u64,
    first: bool,
}

/// The applications, processes and files of a scenario.
pub(crate) struct Population {
    pub(crate) applications: Vec<Application>,
    pub(crate) processes: Vec<Process>,
    /// Lengths of the files, and their given positions.
    pub(crate) files: Vec<(u64, Option<FileAt>)>,
    pub(crate) compute_nodes: usize,
}

/// Creates the applications with their copies, their processes and files, and counts the compute nodes.
pub(crate) fn populate(scenario: &Scenario) -> Population {
    let (mut applications, mut processes, mut files) = (Vec::new(), Vec::new(), Vec::new());
    let mut nodes = 0;
    let lens = crate::simulation::file_lens(scenario);
    for (index, a) in scenario.application.iter().enumerate() {
        let trace = (a.pattern == Pattern::Trace).then(|| {
            let mut by_process = vec![Vec::new(); a.processes as usize];
            for (i, t) in a.trace.iter().enumerate() {
                by_process[t.process as usize].push(i as u32);
            }
            Arc::new(by_process)
        });
        for _ in 0..a.copies {
            let number = applications.len() as u32;
            let first_process = processes.len() as u32;
            for rank in 0..a.processes {
                let io = scenario.io_nodes.as_ref().map_or(1, |n| u64::from(n.count));
                let io_node = match scenario.clients.placement {
                    RankPlacement::Block => u64::from(rank) * io / u64::from(a.processes),
                    RankPlacement::Cyclic => (u64::from(rank) + u64::from(number)) % io,
                };
                let requests = trace.as_ref().map_or(a.requests, |t| t[rank as usize].len() as u64);
                let limit = if a.barrier_requests == 0 { requests } else { requests.min(a.barrier_requests) };
                processes.push(Process {
                    application: number,
                    rank,
                    node: nodes + rank / scenario.clients.processes_per_node,
                    io_node: io_node as u16,
                    epoch: Epoch::default(),
                    next: 0,
                    requests,
                    limit,
                    outstanding: 0,
                    scheduled: 0,
                    finished: u64::MAX,
                    last: (0, 0),
                    read_ahead: (0, ReadAhead::default()),
                });
            }
            nodes += a.processes.div_ceil(scenario.clients.processes_per_node);
            let requests_in_all = processes[first_process as usize..].iter().map(|p| p.requests).sum();
            applications.push(Application {
                index,
                first_process,
                processes: a.processes,
                first_file: files.len() as u32,
                start: (a.start_s * 1e9) as u64,
                end: 0,
                left: a.processes,
                at_barrier: 0,
                requests_in_all,
                latency_ns: Histogram::default(),
                bytes: 0,
                failed: 0,
                collective: a.collective.as_ref().map(|_| Box::default()),
                trace: trace.clone(),
            });
            // Copies use other files, for which the given positions do not hold.
            let at = |file: usize| a.files.get(file).copied().filter(|_| a.copies == 1);
            files.extend(lens[index].iter().enumerate().map(|(file, len)| (*len, at(file))));
        }
    }
    Population { applications, processes, files, compute_nodes: nodes as usize }
}

/// The compute nodes. Read-ahead needs cache space.
pub(crate) fn nodes(scenario: &Scenario, count: usize) -> Vec<ClientNode> {
    let c = &scenario.clients;
    // Two windows per process, each of which may overlap one more chunk.
    let room = if c.read_ahead_bytes > 0 { 2 * c.read_ahead_bytes + 2 * CHUNK_BYTES } else { 0 };
    let bytes = c.cache_bytes.max(room * u64::from(c.processes_per_node));
    let node = || ClientNode { busy_until: 0, cache: c.have_caches().then(|| Box::new(PageCache::new(bytes))) };
    (0..count).map(|_| node()).collect()
}

impl Simulation {
    pub(crate) fn start_applications(&mut self) {
        for process in 0..self.processes.len() as u32 {
            let p = &self.processes[process as usize];
            let (application, rank) = (p.application, p.rank as usize);
            let later = self.model_of(application).starts_us.get(rank).map_or(0, |us| micros(*us));
            self.advance(process, self.applications[application as usize].start.saturating_add(later), false);
        }
    }

    pub(crate) fn model_of(&self, application: u32) -> &crate::model::Application {
        &self.scenario.application[self.applications[application as usize].index]
    }

    /// A process schedules its next requests, waits for the others, or ends. `after` a request it computes first.
    pub(crate) fn advance(&mut self, process: u32, from: u64, after: bool) {
        let p = &self.processes[process as usize];
        let application = p.application;
        let a = &self.scenario.application[self.applications[application as usize].index];
        let (depth, jitter) = (a.queue_depth, micros(a.jitter_us));
        let think = if after { micros(a.think_us) } else { 0 };
        loop {
            let p = &self.processes[process as usize];
            let coming = p.next + u64::from(p.scheduled);
            if p.outstanding + p.scheduled >= depth || coming >= p.limit {
                break;
            }
            let traced = match &self.applications[application as usize].trace {
                Some(trace) => {
                    let access = trace[p.rank as usize][coming as usize];
                    self.model_of(application).trace[access as usize].think_ns
                }
                None => 0,
            };
            let delay = think + traced + self.random.below(jitter + 1);
            self.processes[process as usize].scheduled += 1;
            self.at(from.saturating_add(delay), Event::Issue(process));
        }
        let p = &self.processes[process as usize];
        if p.outstanding + p.scheduled > 0 || p.finished != u64::MAX {
            return;
        }
        if p.next >= p.requests {
            self.process_ends(process, from);
        } else {
            self.reach_barrier(application);
        }
    }

    fn process_ends(&mut self, process: u32, at: u64) {
        let p = &mut self.processes[process as usize];
        p.finished = at;
        let application = p.application;
        let a = &mut self.applications[application as usize];
        a.left -= 1;
        a.end = a.end.max(at);
        if a.left == 0 {
            self.running -= 1;
            self.makespan = self.makespan.max(a.end);
            if self.running == 0 {
                self.recorder.close(self.now);
            }
        } else if a.at_barrier > 0 && a.at_barrier == a.left {
            self.release_barrier(application);
        }
    }

    /// One more process of an application has reached its barrier; the last one releases all.
    fn reach_barrier(&mut self, application: u32) {
        let a = &mut self.applications[application as usize];
        a.at_barrier += 1;
        if a.at_barrier == a.left {
            self.release_barrier(application);
        }
    }

    fn release_barrier(&mut self, application: u32) {
        let step = self.model_of(application).barrier_requests;
        let a = &mut self.applications[application as usize];
        a.at_barrier = 0;
        for process in a.first_process..a.first_process + a.processes {
            let p = &mut self.processes[process as usize];
            if p.finished == u64::MAX {
                p.limit = p.requests.min(p.limit + step);
                self.advance(process, self.now, true);
            }
        }
    }

    fn access_of(&self, process: u32, i: u64) -> Access {
        let p = &self.processes[process as usize];
        let application = &self.applications[p.application as usize];
        let a = &self.scenario.application[application.index];
        match &application.trace {
            Some(trace) => {
                let t = &a.trace[trace[p.rank as usize][i as usize] as usize];
                Access { file: t.file, op: t.op, offset: t.offset, len: t.len, stride: t.len, count: 1 }
            }
            None => access::nth(a, p.rank, i, self.scenario.seed ^ u64::from(p.application)),
        }
    }

    /// A process sends its next request.
    pub(crate) fn issue(&mut self, process: u32) {
        let p = &mut self.processes[process as usize];
        let (i, application) = (p.next, p.application);
        (p.next, p.scheduled, p.outstanding) = (i + 1, p.scheduled - 1, p.outstanding + 1);
        self.totals.operations += 1;
        let access = self.access_of(process, i);
        if self.applications[application as usize].collective.is_some() {
            return self.join_collective(process, access);
        }
        let file = self.applications[application as usize].first_file + access.file;
        let sieve = self.model_of(application).sieve_bytes > 0 && access.count > 1;
        let kind = if sieve { Kind::Sieve { end: access.offset, writing: false } } else { Kind::Whole };
        let op = self.begin(kind, process, file, access, i == 0);
        if sieve {
            return self.sieve_next(op);
        }
        if access.op == Operation::Read && self.scenario.clients.have_caches() {
            self.read_ahead(process, file, &access);
            self.read_cached(op);
        } else {
            self.send_access(op);
        }
    }

    pub(crate) fn begin(&mut self, kind: Kind, process: u32, file: u32, access: Access, first: bool) -> Key {
        let (began, parent) = (self.now, Parent::new(1));
        self.ops.insert(Op { kind, process, file, access, began, parent, extent: 0, at: access.offset, first })
    }

    /// Makes the calls for all extents of an operation.
    pub(crate) fn send_access(&mut self, key: Key) {
        let Some(op) = self.ops.get(key) else { return };
        let (access, process, file, first) = (op.access, op.process, op.file, op.first);
        if access.count == 1 {
            return self.send_range(key, access.offset, access.len);
        }
        // A list goes as one request to each target, which streams its reply.
        let context = CallContext { owner: Owner::Op(key), process, file, write: access.op == Operation::Write };
        let mut calls = 0;
        self.note_leaving(process, file, access.offset);
        if self.io.is_empty() {
            let layout = self.files[file as usize].layout;
            let mut lists: Vec<Vec<(u64, u64)>> = vec![Vec::new(); usize::from(layout.pcount)];
            for (offset, len) in access.extents() {
                for range in layout.lane_ranges(offset, len) {
                    if let Some(k) = layout.position_of(range.server) {
                        lists[usize::from(k)].push((range.lane_offset, range.len));
                    }
                }
            }
            for (k, list) in lists.into_iter().enumerate().filter(|(_, list)| !list.is_empty()) {
                let target = self.first_server + u32::from(layout.server_at(k as u16));
                self.call_list(context, target, list, first && calls == 0);
                calls += 1;
            }
        } else {
            let target = self.first_io + u32::from(self.processes[process as usize].io_node);
            self.call_list(context, target, access.extents().collect(), first);
            calls = 1;
        }
        if let Some(op) = self.ops.get_mut(key) {
            op.parent = Parent::new(calls);
        }
    }

    /// Makes the calls for one contiguous range of an operation's file.
    pub(crate) fn send_range(&mut self, key: Key, offset: u64, len: u64) {
        let Some(op) = self.ops.get(key) else { return };
        let (process, file, mut first) = (op.process, op.file, op.first);
        let context = CallContext { owner: Owner::Op(key), process, file, write: op.access.op == Operation::Write };
        let max = self.scenario.clients.request_bytes_max;
        let mut calls = 0;
        let direct = self.io.is_empty();
        for (offset, len) in pieces_of(offset, len, if max == 0 { u64::MAX } else { max }) {
            if direct {
                self.note_leaving(process, file, offset);
                let layout = self.files[file as usize].layout;
                let one = layout.pieces(offset, len).next().filter(|piece| piece.len == len);
                let ranges = if one.is_some() { Vec::new() } else { layout.lane_ranges(offset, len) };
                for range in one.iter().chain(&ranges) {
                    let target = self.first_server + u32::from(range.server);
                    self.call(context, target, (range.lane_offset, range.len), first);
                    (first, calls) = (false, calls + 1);
                }
            } else {
                let target = self.first_io + u32::from(self.processes[process as usize].io_node);
                self.call(context, target, (offset, len), first);
                (first, calls) = (false, calls + 1);
            }
        }
        if let Some(op) = self.ops.get_mut(key) {
            op.first = false;
            op.parent = Parent::new(calls);
        }
    }

    /// Without I/O nodes, measures the offsets that leave the clients.
    fn note_leaving(&mut self, process: u32, file: u32, offset: u64) {
        if self.io.is_empty() {
            let last = &mut self.processes[process as usize].last;
            self.totals.distance.step(last, file, offset);
        }
    }

    /// When a compute node's processor has handled a call.
    pub(crate) fn client_processor(&mut self, node: u32) -> u64 {
        let cpu = micros(self.scenario.clients.cpu_us);
        if cpu == 0 {
            return self.now;
        }
        let node = &mut self.client_nodes[node as usize];
        node.busy_until = self.now.max(node.busy_until) + cpu;
        node.busy_until
    }

    /// A call of an operation ended.
    pub(crate) fn op_part_ended(&mut self, key: Key, errno: i32, bytes: u64) {
        let Some(op) = self.ops.get_mut(key) else { return };
        if let Some((errno, _)) = op.parent.part_done(errno, bytes) {
            self.op_step_ended(key, errno);
        }
    }

    fn op_step_ended(&mut self, key: Key, errno: i32) {
        let Some(op) = self.ops.get(key) else { return };
        match op.kind {
            Kind::Sieve { .. } if errno == 0 => return self.sieve_next(key),
            Kind::Aggregate { aggregator, then_write: true } if errno == 0 => {
                // Read and modified; now written.
                let Some(op) = self.ops.get_mut(key) else { return };
                op.kind = Kind::Aggregate { aggregator, then_write: false };
                op.access.op = Operation::Write;
                return self.send_access(key);
            }
            _ => {}
        }
        let Some(op) = self.ops.remove(key) else { return };
        match op.kind {
            Kind::Whole | Kind::Sieve { .. } => {
                self.request_ended(op.process, op.began, if errno == 0 { op.access.bytes() } else { 0 });
            }
            Kind::Fetch { start, end } => self.fetched(&op, start, end, errno),
            Kind::Aggregate { aggregator, .. } => {
                let application = self.processes[op.process as usize].application;
                self.aggregator_ended(application, aggregator, errno);
            }
        }
    }

    /// A process's request ended with `bytes`; 0: it failed.
    pub(crate) fn request_ended(&mut self, process: u32, began: u64, bytes: u64) {
        let p = &mut self.processes[process as usize];
        p.outstanding -= 1;
        let application = p.application as usize;
        let a = &mut self.applications[application];
        a.latency_ns.record(self.now - began);
        a.bytes += bytes;
        self.totals.ended += 1;
        if bytes == 0 {
            a.failed += 1;
            self.totals.failed += 1;
        }
        self.recorder.ended(self.now, application, began, bytes);
        self.advance(process, self.now, true);
    }

    /// Virtual time ended: outstanding requests fail.
    pub(crate) fn fail_outstanding(&mut self) {
        for process in 0..self.processes.len() {
            let p = &mut self.processes[process];
            if p.finished != u64::MAX {
                continue;
            }
            p.finished = self.now;
            let application = p.application as usize;
            let never_sent = p.requests - p.next;
            let left = never_sent + u64::from(p.outstanding);
            self.totals.operations += never_sent;
            let a = &mut self.applications[application];
            a.failed += left;
            a.end = self.now.max(a.start);
            self.totals.failed += left;
        }
        self.running = 0;
        self.makespan = self.now;
        self.recorder.close(self.now);
    }
}
