//! The event loop: clients, I/O nodes and data servers in virtual time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use impresario_device::{DeviceQueue, Disk, Io, Op as IoOp, Placement};
use impresario_node::{DispatchQueue, Entry, pieces_of};
use impresario_sched::{
    Batch, Completion, Core, CoreConfig, CostModel, Event, Extent, FileId, LaneId, LinearCost, Nanos, Next, Op,
    PolicyError, Request, RequestId,
};

use crate::random::Random;
use crate::scenario::{Application, Outcome, Pattern, Scenario};

/// Who waits for a part to be done: an index into `Cluster::parents`.
type ParentId = u32;

enum Happening {
    /// A process sends its next request.
    Issue {
        process: u32,
    },
    /// A piece of a process's request arrives at its I/O node.
    AtIoNode {
        node: u16,
        file: u64,
        op: Op,
        offset: u64,
        len: u64,
        parent: ParentId,
    },
    /// A lane range arrives at a data server.
    AtData {
        server: u16,
        file: u64,
        op: Op,
        lane_offset: u64,
        len: u64,
        parent: ParentId,
    },
    /// A data server's disk is done with what it has.
    DiskDone {
        server: u16,
    },
    /// The core of an I/O node (or data server) asked to be asked again.
    IoTimer {
        node: u16,
    },
    DataTimer {
        server: u16,
    },
    /// A part of a parent is answered.
    Answered {
        parent: ParentId,
    },
}

/// What waits for parts, and who is told when all are there.
struct Parent {
    left: u32,
    then: Then,
}

#[derive(Clone, Copy)]
enum Then {
    /// A process goes on.
    Process(u32),
    /// A forwarded request of an I/O node is complete.
    Forwarded { node: u16, forward: u32 },
}

struct Process {
    application: usize,
    rank: u32,
    next: u64,
    finished: Option<Nanos>,
}

struct DataServer {
    core: Core,
    waiters: Vec<ParentId>,
    queue: DeviceQueue<u32>,
    batches: Vec<Option<Running>>,
    disk: Disk,
    /// What the disk works on: batches and the end.
    on_disk: Vec<u32>,
    busy: bool,
    alarm: Nanos,
    access_ns: u64,
    accesses: u64,
}

/// A batch below the scheduler.
struct Running {
    batch: Batch,
    left: usize,
    started: Nanos,
}

struct IoNode {
    core: Core,
    waiters: Vec<ParentId>,
    dispatch: DispatchQueue<Released>,
    /// Forwarded requests: the batches that they answer.
    forwards: Vec<Vec<Entry<Released>>>,
    free: Vec<u32>,
    alarm: Nanos,
}

/// A batch that the policy of an I/O node released.
#[derive(Clone)]
struct Released {
    batch: Batch,
}

struct Cluster<'a> {
    scenario: &'a Scenario,
    heap: BinaryHeap<Reverse<(Nanos, u64)>>,
    happenings: Vec<Option<Happening>>,
    free: Vec<u32>,
    order: u64,
    now: Nanos,
    random: Random,
    processes: Vec<Process>,
    parents: Vec<Parent>,
    free_parents: Vec<ParentId>,
    io: Vec<IoNode>,
    data: Vec<DataServer>,
    placement: Placement,
    forwarded: (u64, u64),
}

/// The cost model that a configured disk gives to the policies above it.
fn cost_of(params: &impresario_device::DeviceParams) -> CostModel {
    let of = |op| {
        let fit = impresario_device::LinearCost::of(params, op);
        LinearCost { fixed: Nanos(fit.fixed_ns), ps_per_byte: fit.ns_per_kib * 1000 / 1024 }
    };
    CostModel::new(of(IoOp::Read), of(IoOp::Write)).from_source("disk model")
}

/// Runs a scenario to its end. Refused when a policy is.
pub fn run(scenario: &Scenario) -> Result<Outcome, PolicyError> {
    let mut cluster = Cluster::new(scenario)?;
    for process in 0..cluster.processes.len() as u32 {
        let start = scenario.applications[cluster.processes[process as usize].application].start;
        cluster.think(process, start);
    }
    while let Some(Reverse((at, id))) = cluster.heap.pop() {
        cluster.now = at;
        let slot = id as u32 & 0x00ff_ffff;
        if let Some(happening) = cluster.happenings[slot as usize].take() {
            cluster.free.push(slot);
            cluster.happen(happening);
        }
    }
    Ok(cluster.outcome())
}

impl<'a> Cluster<'a> {
    fn new(scenario: &'a Scenario) -> Result<Cluster<'a>, PolicyError> {
        let cost = cost_of(&scenario.device);
        let servers = scenario.layout.servers;
        let mut data = Vec::new();
        for _ in 0..servers {
            let config = CoreConfig {
                lane_requests: scenario.data_in_flight,
                cost: cost.clone(),
                ..CoreConfig::single_lane(impresario_sched::Table::CAPACITY_MAX)
            };
            data.push(DataServer {
                core: Core::new(config, &scenario.data_policy)?,
                waiters: Vec::new(),
                queue: DeviceQueue::new(&scenario.device),
                batches: Vec::new(),
                disk: Disk::new(&scenario.device),
                on_disk: Vec::new(),
                busy: false,
                alarm: Nanos::MAX,
                access_ns: 0,
                accesses: 0,
            });
        }
        let mut io = Vec::new();
        if let Some(nodes) = &scenario.io_nodes {
            for rank in 0..nodes.count {
                let config = CoreConfig {
                    lanes: servers,
                    shared_space: !nodes.split,
                    lane_requests: u32::MAX,
                    total_requests: nodes.dispatch_requests,
                    node_rank: u32::from(rank),
                    cost: cost.clone(),
                    ..CoreConfig::single_lane(impresario_sched::Table::CAPACITY_MAX)
                };
                io.push(IoNode {
                    core: Core::new(config, &nodes.policy)?,
                    waiters: Vec::new(),
                    dispatch: DispatchQueue::new(nodes.in_flight as usize, nodes.merge_requests as usize, 4 << 20),
                    forwards: Vec::new(),
                    free: Vec::new(),
                    alarm: Nanos::MAX,
                });
            }
        }
        let mut processes = Vec::new();
        for (application, a) in scenario.applications.iter().enumerate() {
            processes.extend((0..a.processes).map(|rank| Process { application, rank, next: 0, finished: None }));
        }
        Ok(Cluster {
            scenario,
            heap: BinaryHeap::new(),
            happenings: Vec::new(),
            free: Vec::new(),
            order: 0,
            now: Nanos::ZERO,
            random: Random::new(scenario.seed),
            processes,
            parents: Vec::new(),
            free_parents: Vec::new(),
            io,
            data,
            placement: Placement::new(&scenario.device),
            forwarded: (0, 0),
        })
    }

    fn at(&mut self, when: Nanos, what: Happening) {
        let slot = match self.free.pop() {
            Some(slot) => {
                self.happenings[slot as usize] = Some(what);
                slot
            }
            None => {
                self.happenings.push(Some(what));
                self.happenings.len() as u32 - 1
            }
        };
        assert!(slot < 1 << 24, "more than 16 million events pending");
        self.order += 1;
        self.heap.push(Reverse((when, self.order << 24 | u64::from(slot))));
    }

    fn parent(&mut self, left: u32, then: Then) -> ParentId {
        let parent = Parent { left, then };
        match self.free_parents.pop() {
            Some(id) => {
                self.parents[id as usize] = parent;
                id
            }
            None => {
                self.parents.push(parent);
                self.parents.len() as u32 - 1
            }
        }
    }

    /// A process sends its next request after its jitter.
    fn think(&mut self, process: u32, from: Nanos) {
        let delay = Nanos(self.random.below(self.scenario.jitter.0 + 1));
        self.at(from + delay, Happening::Issue { process });
    }

    /// When a message sent now arrives.
    fn arrival(&mut self) -> Nanos {
        self.now + self.scenario.latency + Nanos(self.random.below(self.scenario.message_jitter.0 + 1))
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Issue { process } => self.issue(process),
            Happening::AtIoNode { node, file, op, offset, len, parent } => {
                self.arrive_at_io_node(node, file, op, offset, len, parent);
            }
            Happening::AtData { server, file, op, lane_offset, len, parent } => {
                let extent =
                    Extent { file: FileId(file as u32), lane: LaneId(0), file_offset: lane_offset, lane_offset, len };
                let s = &mut self.data[usize::from(server)];
                push(&mut s.core, &mut s.waiters, self.now, op, extent, parent);
                self.pump_data(server);
            }
            Happening::DiskDone { server } => self.disk_done(server),
            Happening::IoTimer { node } => {
                self.io[usize::from(node)].alarm = Nanos::MAX;
                self.pump_io(node);
            }
            Happening::DataTimer { server } => {
                self.data[usize::from(server)].alarm = Nanos::MAX;
                self.pump_data(server);
            }
            Happening::Answered { parent } => self.answered(parent),
        }
    }

    fn issue(&mut self, process: u32) {
        let p = &mut self.processes[process as usize];
        let a = &self.scenario.applications[p.application];
        if p.next == a.requests {
            p.finished = Some(self.now);
            return;
        }
        let (file, offset) = position(a, p.application, p.rank, p.next);
        p.next += 1;
        let (op, rank, application) = (a.op, p.rank, p.application);
        let pieces: Vec<_> = pieces_of(offset, a.request_bytes, self.scenario.wire_max_bytes).collect();
        let Some(nodes) = &self.scenario.io_nodes else {
            let layout = self.scenario.layout;
            let ranges: Vec<_> = pieces.iter().flat_map(|(o, l)| layout.lane_ranges(*o, *l)).collect();
            let parent = self.parent(ranges.len() as u32, Then::Process(process));
            self.send_ranges(file, op, &ranges, parent);
            return;
        };
        let node = if nodes.block_placement {
            (rank * u32::from(nodes.count) / self.scenario.applications[application].processes) as u16
        } else {
            ((rank as usize + application) % usize::from(nodes.count)) as u16
        };
        let parent = self.parent(pieces.len() as u32, Then::Process(process));
        for (offset, len) in pieces {
            let arrival = self.arrival();
            self.at(arrival, Happening::AtIoNode { node, file, op, offset, len, parent });
        }
    }

    fn send_ranges(&mut self, file: u64, op: Op, ranges: &[impresario_layout::Piece], parent: ParentId) {
        for r in ranges {
            let arrival = self.arrival();
            self.forwarded.0 += 1;
            self.forwarded.1 += r.len;
            let (server, lane_offset, len) = (r.server, r.lane_offset, r.len);
            self.at(arrival, Happening::AtData { server, file, op, lane_offset, len, parent });
        }
    }

    fn answered(&mut self, parent: ParentId) {
        let p = &mut self.parents[parent as usize];
        p.left -= 1;
        if p.left > 0 {
            return;
        }
        let then = p.then;
        self.free_parents.push(parent);
        match then {
            Then::Process(process) => self.think(process, self.now),
            Then::Forwarded { node, forward } => self.forward_done(node, forward),
        }
    }

    // I/O nodes

    fn arrive_at_io_node(&mut self, node: u16, file: u64, op: Op, offset: u64, len: u64, parent: ParentId) {
        let (layout, now) = (self.scenario.layout, self.now);
        let split = self.scenario.io_nodes.as_ref().is_some_and(|n| n.split);
        let pieces = if split { layout.lane_ranges(offset, len) } else { Vec::new() };
        self.parents[parent as usize].left += pieces.len().saturating_sub(1) as u32;
        let n = &mut self.io[usize::from(node)];
        for p in &pieces {
            let (lane, lane_offset) = (LaneId(p.server), p.lane_offset);
            let extent =
                Extent { file: FileId(file as u32), lane, file_offset: p.file_offset, lane_offset, len: p.len };
            push(&mut n.core, &mut n.waiters, now, op, extent, parent);
        }
        if !split {
            let lane = LaneId(layout.locate(offset).0);
            let extent = Extent { file: FileId(file as u32), lane, file_offset: offset, lane_offset: offset, len };
            push(&mut n.core, &mut n.waiters, now, op, extent, parent);
        }
        self.pump_io(node);
    }

    fn pump_io(&mut self, node: u16) {
        let n = &mut self.io[usize::from(node)];
        let split = self.scenario.io_nodes.as_ref().is_some_and(|n| n.split);
        loop {
            match n.core.next(self.now) {
                Next::Dispatch(batch) => {
                    let Batch { extent, op, .. } = batch;
                    let space = if split { extent.lane.0 } else { 0 };
                    let file = u64::from(extent.file.0);
                    let token = Released { batch };
                    n.dispatch.push(Entry { op, file, space, offset: extent.lane_offset, len: extent.len, token });
                }
                Next::Wait { until, .. } => {
                    if until < n.alarm {
                        n.alarm = until;
                        self.at(until, Happening::IoTimer { node });
                    }
                    break;
                }
            }
        }
        while let Some(members) = self.io[usize::from(node)].dispatch.pop() {
            self.forward(node, members, split);
        }
    }

    fn forward(&mut self, node: u16, members: Vec<Entry<Released>>, split: bool) {
        let (file, op, space) = (members[0].file, members[0].op, members[0].space);
        let start = members[0].offset;
        let end = members.iter().map(|m| m.offset + m.len).max().unwrap_or(start);
        let ranges = if split {
            vec![impresario_layout::Piece { server: space, lane_offset: start, file_offset: start, len: end - start }]
        } else {
            self.scenario.layout.lane_ranges(start, end - start)
        };
        let n = &mut self.io[usize::from(node)];
        let forward = match n.free.pop() {
            Some(f) => {
                n.forwards[f as usize] = members;
                f
            }
            None => {
                n.forwards.push(members);
                n.forwards.len() as u32 - 1
            }
        };
        let parent = self.parent(ranges.len() as u32, Then::Forwarded { node, forward });
        self.send_ranges(file, op, &ranges, parent);
    }

    fn forward_done(&mut self, node: u16, forward: u32) {
        let now = self.now;
        let n = &mut self.io[usize::from(node)];
        let members = std::mem::take(&mut n.forwards[forward as usize]);
        n.free.push(forward);
        n.dispatch.done();
        let mut answers = Vec::new();
        for member in members {
            let batch = member.token.batch;
            n.core.event(now, Event::Completed(Completion::of(&batch, now, now)));
            answers.extend(batch.parts.iter().map(|p| n.waiters[p.id.0 as u32 as usize]));
        }
        for parent in answers {
            let back = self.arrival();
            self.at(back, Happening::Answered { parent });
        }
        self.pump_io(node);
    }

    // Data servers

    fn pump_data(&mut self, server: u16) {
        let s = &mut self.data[usize::from(server)];
        loop {
            match s.core.next(self.now) {
                Next::Dispatch(batch) => {
                    let op = if batch.op == Op::Read { IoOp::Read } else { IoOp::Write };
                    let key = u64::from(batch.extent.file.0) | self.scenario.seed << 32; // other seeds, other places
                    let placed = self.placement.place(op, key, batch.extent.lane_offset, batch.extent.len);
                    let ios: Vec<Io> = placed.collect();
                    let running = Running { batch, left: ios.len(), started: self.now };
                    let b = s.batches.iter().position(Option::is_none).unwrap_or_else(|| {
                        s.batches.push(None);
                        s.batches.len() - 1
                    });
                    s.batches[b] = Some(running);
                    for io in ios {
                        s.queue.push(io, b as u32);
                    }
                }
                Next::Wait { until, .. } => {
                    if until < s.alarm {
                        s.alarm = until;
                        self.at(until, Happening::DataTimer { server });
                    }
                    break;
                }
            }
        }
        self.start_disk(server);
    }

    fn start_disk(&mut self, server: u16) {
        let s = &mut self.data[usize::from(server)];
        if s.busy {
            return;
        }
        let Some(taken) = s.queue.pop(s.disk.head_address()) else { return };
        let served = s.disk.serve(self.now.0, &taken.io);
        s.busy = true;
        s.access_ns += served.end_ns - self.now.0;
        s.accesses += 1;
        s.on_disk = taken.parts.into_iter().map(|(_, b)| b).collect();
        self.at(Nanos(served.end_ns), Happening::DiskDone { server });
    }

    fn disk_done(&mut self, server: u16) {
        let now = self.now;
        let s = &mut self.data[usize::from(server)];
        s.busy = false;
        let mut answers = Vec::new();
        for b in std::mem::take(&mut s.on_disk) {
            let Some(running) = &mut s.batches[b as usize] else { continue };
            running.left -= 1;
            if running.left > 0 {
                continue;
            }
            let Some(Running { batch, started, .. }) = s.batches[b as usize].take() else { continue };
            s.core.event(now, Event::Completed(Completion::of(&batch, started, now)));
            answers.extend(batch.parts.iter().map(|p| s.waiters[p.id.0 as u32 as usize]));
        }
        for parent in answers {
            let back = self.arrival();
            self.at(back, Happening::Answered { parent });
        }
        self.pump_data(server);
    }

    fn outcome(&self) -> Outcome {
        let ended = |a: usize| {
            let ends = self.processes.iter().filter(|p| p.application == a).map(|p| p.finished.unwrap_or(Nanos::MAX));
            ends.max().unwrap_or_default()
        };
        let apps = &self.scenario.applications;
        let stats: Vec<_> = self.data.iter().map(|d| d.core.status().statistics).collect();
        let batches: u64 = stats.iter().map(|s| s.batches).sum();
        let batch_bytes: f64 = stats.iter().map(|s| s.batch_bytes.mean * s.batches as f64).sum();
        let makespan = (0..apps.len()).map(ended).max().unwrap_or_default();
        let access_ns: u64 = self.data.iter().map(|d| d.access_ns).sum();
        let accesses: u64 = self.data.iter().map(|d| d.accesses).sum();
        Outcome {
            makespan,
            applications: apps.iter().enumerate().map(|(i, a)| ended(i) - a.start).collect(),
            bytes: apps.iter().map(|a| u64::from(a.processes) * a.requests * a.request_bytes).sum(),
            mean_batch_bytes: batch_bytes / (batches.max(1) as f64),
            mean_forwarded_bytes: self.forwarded.1 as f64 / self.forwarded.0.max(1) as f64,
            mean_access: Nanos(access_ns / accesses.max(1)),
            accesses,
            busy: access_ns as f64 / (makespan.0 * self.data.len() as u64).max(1) as f64,
            requests: stats.iter().map(|s| s.accepted).sum(),
        }
    }
}

/// Pushes a request and notes who waits for it. The table is as large as a core's can be, so there is room.
fn push(core: &mut Core, waiters: &mut Vec<ParentId>, now: Nanos, op: Op, extent: Extent, parent: ParentId) {
    let request = Request { arrival: now, ..Request::new(op, extent) };
    let RequestId(id) = core.push(now, &request).expect("a simulated queue holds a million requests");
    let slot = id as u32 as usize;
    if waiters.len() <= slot {
        waiters.resize(slot + 1, ParentId::MAX);
    }
    waiters[slot] = parent;
}

/// File and offset of a process's i-th request. Files are numbered by application and, if each has its own, by rank.
fn position(a: &Application, application: usize, rank: u32, i: u64) -> (u64, u64) {
    let shared = (application as u64) << 16;
    match a.pattern {
        Pattern::Contiguous => (shared, (u64::from(rank) * a.requests + i) * a.request_bytes),
        Pattern::Strided => (shared, (i * u64::from(a.processes) + u64::from(rank)) * a.request_bytes),
        Pattern::FilePerProcess => (shared | (u64::from(rank) + 1), i * a.request_bytes),
    }
}
