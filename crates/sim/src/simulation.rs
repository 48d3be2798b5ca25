//! The simulation: its state, its clock, and the dispatch of events.

use std::sync::Arc;

use impresario_device::{DeviceQueue, Disk, Flash, Op as IoOp, PageCache, Placement};
use impresario_foresight::{ALONE_MAX, PredictedQueues};
use impresario_layout::{Layout, Skipped};
use impresario_node::session::{Fence, Routes};
use impresario_sched::laws::VIOLATIONS_MAX;
use impresario_sched::policy::Chosen;
use impresario_sched::{CoreConfig, CostModel, Ended, LinearCost, Nanos, PolicyError, Table, policy};
use impresario_toml::KeyPath;

use crate::access;
use crate::client::{Application, Call, ClientNode, Op, Population, Process};
use crate::events::Calendar;
use crate::faults::ActiveFault;
use crate::io_node::{Forward, IoNode, dispatch_queue};
use crate::measure::{Distance, Picture, Recorder};
use crate::members::Acquaintance;
use crate::memory::{Memory, longest_write_bytes};
use crate::model::{Device, Scenario};
use crate::network::{Message, Network};
use crate::outcome::{Flow, Outcome};
use crate::patience::{Parked, Timeouts};
use crate::server::{Job, Server, Storage};
use crate::station::Station;
use impresario_base::random::{Random, mix};
use impresario_base::slab::{Key, Slab};
use rustc_hash::FxHashMap;

/// Why a scenario cannot be run.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
pub enum SimError {
    /// Keys and what is wrong with their values.
    #[error("{}", .0.iter().map(|(key, what)| format!("{key}: {what}")).collect::<Vec<_>>().join("; "))]
    Scenario(Vec<(KeyPath, String)>),
    /// A policy was refused.
    #[error(transparent)]
    Policy(#[from] PolicyError),
}

/// How far to advance.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Budget {
    /// For this many events.
    Events(u64),
    /// Until this virtual time, s.
    VirtualS(f64),
}

/// The progress of a simulation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Progress {
    /// Fraction of the applications' requests that have ended, 0 to 1.
    pub fraction: f64,
    /// Virtual time, s.
    pub virtual_s: f64,
    /// Requests of applications that have ended.
    pub operations: u64,
    /// Nothing is left to simulate.
    pub done: bool,
}

/// An event.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Event {
    /// A process sends its next request.
    Issue(u32),
    /// A client's processor has handled a call, which is sent.
    CallLeaves(Key),
    /// A call begins to arrive at its target; has arrived and is taken by the processor.
    CallArrives(Key),
    CallIsIn(Key),
    /// A node's processor has handled the reply to a call; the reply begins to arrive; it has arrived.
    AnswerLeaves(Key),
    AnswerArrives(Key),
    AnswerIsIn(Key),
    /// The next quantum of a message may be sent; one begins to arrive; it has arrived.
    MessageContinues(Key),
    MessageArrives {
        message: Key,
        bytes: u32,
    },
    MessageIsIn {
        message: Key,
        bytes: u32,
    },
    /// The sender of a message that was lost in part has waited.
    MessageTimesOut(Key),
    /// A server's disk has finished its command.
    DiskDone {
        server: u16,
        incarnation: u32,
    },
    /// A flash drive has finished a part of a job.
    FlashDone(Key),
    /// The core of an I/O node (or server) must be asked for batches.
    IoAlarm(u16),
    /// A forwarding thread of an I/O node starts to run.
    ThreadAwake(u16),
    ServerAlarm(u16),
    /// The oldest call may have timed out.
    Timeouts,
    Resume(Key),
    /// The next round of an application's collective operation.
    Round(u32),
    FaultBegins(u32),
    FaultEnds(u32),
    RandomFault,
    /// I/O nodes ask one another who takes turns.
    Members,
    /// A call may have waited for its node's memory for too long.
    MemoryPatience(u32, Key),
}

/// Totals over the run.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) operations: u64,
    pub(crate) ended: u64,
    pub(crate) failed: u64,
    pub(crate) expected: u64,
    pub(crate) events: u64,
    pub(crate) clients: Flow,
    pub(crate) io_nodes: Flow,
    pub(crate) servers: Flow,
    pub(crate) batches: Flow,
    pub(crate) device: Flow,
    pub(crate) device_ns: f64,
    pub(crate) busy_ns: f64,
    pub(crate) read_bytes: u64,
    pub(crate) hit_bytes: u64,
    pub(crate) distance: Distance,
    pub(crate) device_distance: Distance,
    /// Longest time from a call's start, or its last reply, to its end.
    pub(crate) silence_max: u64,
}

/// A file of an application.
pub(crate) struct File {
    pub(crate) layout: Layout,
    pub(crate) len: u64,
    /// Determines its addresses on the disks.
    pub(crate) key: u64,
    /// The application that owns it.
    pub(crate) application: u32,
}

/// A cluster at an instant of virtual time.
pub struct Simulation {
    pub(crate) scenario: Scenario,
    pub(crate) now: u64,
    pub(crate) calendar: Calendar<Event>,
    pub(crate) random: Random,
    pub(crate) network: Network,
    /// Nodes are numbered: compute nodes, I/O nodes, data servers.
    pub(crate) first_io: u32,
    pub(crate) first_server: u32,
    /// How many faults currently partition each I/O node or data server.
    pub(crate) cut: Vec<u16>,
    pub(crate) files: Vec<File>,
    pub(crate) applications: Vec<Application>,
    pub(crate) processes: Vec<Process>,
    pub(crate) client_nodes: Vec<ClientNode>,
    pub(crate) ops: Slab<Op>,
    pub(crate) calls: Slab<Call>,
    pub(crate) timeouts: Timeouts,
    /// Calls waiting to be sent again.
    pub(crate) parked: Slab<Parked>,
    /// The routes to a service, by its first node, of processes that lost a connection.
    pub(crate) routes: FxHashMap<(u32, u32), Routes>,
    pub(crate) messages: Slab<Message>,
    pub(crate) io: Vec<IoNode>,
    pub(crate) forwards: Slab<Forward>,
    pub(crate) servers: Vec<Server>,
    pub(crate) jobs: Slab<Job>,
    pub(crate) placement: Placement,
    pub(crate) faults: Vec<ActiveFault>,
    pub(crate) fault_random: Random,
    pub(crate) random_faults_left: u32,
    /// A client has raised its epoch: from now on fences apply.
    pub(crate) fencing: bool,
    /// Some node's memory is limited.
    pub(crate) has_memory_limits: bool,
    pub(crate) recorder: Recorder,
    pub(crate) picture: Picture,
    pub(crate) totals: Totals,
    /// Gaps between the arrivals of processes' first requests, ns.
    pub(crate) first_gaps: Vec<u64>,
    pub(crate) fault_log: Vec<String>,
    pub(crate) violations: Vec<String>,
    /// Applications that have not ended.
    pub(crate) running: u32,
    pub(crate) makespan: u64,
    /// The prediction from earlier runs for each data server; empty without earlier runs.
    foretold: Vec<Arc<PredictedQueues>>,
    time_limit: u64,
    pub(crate) checks: bool,
    started: bool,
    closed: bool,
}

pub(crate) fn micros(us: f64) -> u64 {
    (us * 1e3) as u64
}

/// The cost model of a device, for the policies above it.
fn cost_of(device: &Device) -> CostModel {
    let of = |op| {
        let fit = match device {
            Device::Disk(params) => impresario_device::LinearCost::of(params, op),
            Device::Flash(params) => params.cost(op),
        };
        LinearCost { fixed: Nanos(fit.fixed_ns), ps_per_byte: fit.ns_per_kib * 1000 / 1024 }
    };
    CostModel::new(of(IoOp::Read), of(IoOp::Write)).from_source("device model")
}

impl Simulation {
    /// A scenario at time zero; an error if it cannot be run.
    pub fn new(scenario: &Scenario) -> Result<Simulation, SimError> {
        let complaints = scenario.check();
        if !complaints.is_empty() {
            return Err(SimError::Scenario(complaints));
        }
        let device = scenario.device_params();
        let mut random = Random::new(scenario.seed);
        let Population { applications, processes, files, compute_nodes } = crate::client::populate(scenario);
        let io_count = scenario.io_nodes.as_ref().map_or(0, |n| usize::from(n.count));
        let server_count = usize::from(scenario.servers.count);
        let expected = applications.iter().map(|a| a.requests_in_all).sum();
        let placement = match &device {
            Device::Disk(params) => Placement::new(params),
            Device::Flash(_) => Placement::new(&impresario_device::DeviceParams::default()),
        };
        let files = files
            .into_iter()
            .enumerate()
            .map(|(file, (len, at))| {
                let mut layout = layout_of(scenario, file as u32);
                // Other seeds give other addresses.
                let mut key = file as u64 | scenario.seed << 32;
                if let Some(at) = at {
                    (layout.base, key) = (at.server, at.key);
                }
                let application = applications.partition_point(|a| a.first_file as usize <= file) as u32 - 1;
                File { layout, len, key, application }
            })
            .collect();
        let random_faults_left = scenario.random_faults.as_ref().map_or(0, |r| r.count_max);
        let fault_random = Random::new(mix(scenario.seed ^ 0xfa17));
        let mut simulation = Simulation {
            now: 0,
            calendar: Calendar::new(),
            network: Network::new(&scenario.network, compute_nodes, io_count, server_count),
            first_io: compute_nodes as u32,
            first_server: (compute_nodes + io_count) as u32,
            cut: vec![0; io_count + server_count],
            files,
            recorder: Recorder::new(applications.len()),
            running: applications.len() as u32,
            applications,
            processes,
            client_nodes: crate::client::nodes(scenario, compute_nodes),
            ops: Slab::default(),
            calls: Slab::default(),
            timeouts: Timeouts::new(scenario.request_timeout_ms * 1_000_000),
            messages: Slab::default(),
            parked: Slab::default(),
            routes: FxHashMap::default(),
            io: Vec::new(),
            forwards: Slab::default(),
            servers: Vec::new(),
            jobs: Slab::default(),
            placement,
            faults: Vec::new(),
            fault_random,
            random_faults_left,
            fencing: false,
            has_memory_limits: scenario.servers.payload_bytes > 0
                || scenario.io_nodes.as_ref().is_some_and(|n| n.payload_bytes > 0),
            picture: Picture::default(),
            totals: Totals { expected, ..Totals::default() },
            first_gaps: Vec::new(),
            fault_log: Vec::new(),
            violations: Vec::new(),
            makespan: 0,
            time_limit: (scenario.time_limit_s * 1e9) as u64,
            foretold: crate::earlier::foretold(scenario)?,
            checks: false,
            started: false,
            closed: false,
            random: Random::new(0),
            scenario: scenario.clone(),
        };
        simulation.make_nodes(&device, &mut random)?;
        simulation.random = random;
        Ok(simulation)
    }

    /// Checks all laws of the cores' contract at every step, or (default) only the final balance. Call before the first
    /// step.
    pub fn with_checks(mut self, complete: bool) -> Simulation {
        if complete != self.checks && !self.started {
            self.checks = complete;
            (self.io, self.servers) = (Vec::new(), Vec::new());
            let device = self.scenario.device_params();
            let mut random = Random::new(self.scenario.seed);
            // Accepted before, hence accepted again.
            if let Err(refusal) = self.make_nodes(&device, &mut random) {
                self.violations.push(format!("a policy that had been accepted was refused: {refusal}"));
            }
            self.random = random;
        }
        self
    }

    /// Records what the data servers serve, with delays from another seed. Call before the first step.
    pub(crate) fn recording(mut self, seed: u64) -> Simulation {
        self.random = Random::new(seed);
        self.servers.iter_mut().for_each(|server| server.station.record());
        self
    }

    /// What the data servers served, in order.
    pub(crate) fn recorded(&mut self) -> Vec<Vec<Ended>> {
        self.servers.iter_mut().map(|server| server.station.take_recorded()).collect()
    }

    fn make_nodes(&mut self, device: &Device, random: &mut Random) -> Result<(), PolicyError> {
        let cost = cost_of(device);
        let longest_write_bytes = longest_write_bytes(&self.scenario);
        let unlimited = |n: u32| if n == 0 { u32::MAX } else { n };
        if let Some(n) = &self.scenario.io_nodes {
            for rank in 0..n.count {
                let mut within = |us: f64| if us > 0.0 { random.below(micros(us) + 1) } else { 0 };
                let (skew, started) = (within(n.clock_skew_us), within(n.started_within_us));
                let config = CoreConfig {
                    lanes: self.scenario.servers.count,
                    started: Nanos(started),
                    shared_space: !n.split,
                    lane_requests: u32::MAX,
                    // As an I/O node finds it in its configuration.
                    sorted_below: self.scenario.servers.cache_bytes > 0,
                    scheduled_below: policy::orders(&self.scenario.servers.policy),
                    total_requests: n.dispatch_requests,
                    node_rank: u32::from(rank),
                    cost: cost.clone(),
                    statistics: false,
                    ..CoreConfig::single_lane(Table::CAPACITY_MAX)
                };
                self.io.push(IoNode {
                    station: Station::new(config, &n.policy, skew as i64, self.checks)?,
                    released: Slab::default(),
                    dispatch: dispatch_queue(n),
                    called: 0,
                    fence: Fence::new(FENCED_CLIENTS),
                    busy_until: 0,
                    last: (0, 0),
                    first_arrival: None,
                    acquaintance: n
                        .members
                        .then(|| Acquaintance::new(rank, n.count, self.scenario.servers.count).into()),
                    memory: Memory::new(n.payload_bytes, longest_write_bytes),
                });
            }
        }
        let s = &self.scenario.servers;
        let foresight_bytes = if policy::speculates(&s.policy) { s.foresight_bytes } else { 0 };
        for index in 0..s.count {
            let config = CoreConfig {
                lane_requests: unlimited(s.in_flight),
                cost: cost.clone(),
                pieces: s.pieces,
                // A kernel with a page cache and an I/O scheduler, as on a server without a device model.
                sorted_below: s.cache_bytes > 0,
                lane_speculations: if foresight_bytes > 0 { ALONE_MAX } else { 0 },
                statistics: false,
                ..CoreConfig::single_lane(Table::CAPACITY_MAX)
            };
            let storage = match device {
                Device::Disk(params) => Storage::Disk {
                    disk: Box::new(Disk::new(params)),
                    queue: DeviceQueue::new(params),
                    busy: false,
                    serving: Vec::new(),
                },
                Device::Flash(params) => Storage::Flash(Flash::new(params)),
            };
            let station = Station::new(config, &s.policy, 0, self.checks)?;
            let cache = (s.cache_bytes > 0).then(|| Box::new(PageCache::new(s.cache_bytes)));
            let mut server = Server::new(station, storage, cache, foresight_bytes, self.checks);
            server.memory = Memory::new(s.payload_bytes, longest_write_bytes);
            if let Some(foretold) = self.foretold.get(usize::from(index)) {
                server.set_prediction(foretold);
            }
            self.servers.push(server);
        }
        Ok(())
    }

    /// The current choices of policies that choose among others, by node name.
    pub fn chosen(&self) -> Vec<(String, Chosen)> {
        let io = self.io.iter().enumerate().map(|(at, node)| (format!("io.{at}"), &node.station));
        let data = self.servers.iter().enumerate().map(|(at, server)| (format!("data.{at}"), &server.station));
        io.chain(data).filter_map(|(name, station)| Some((name, station.core.chosen()?))).collect()
    }

    /// Advances for a while.
    pub fn step_until(&mut self, budget: Budget) -> Progress {
        if !self.started {
            self.started = true;
            self.start();
        }
        let (events, until) = match budget {
            Budget::Events(n) => (n, u64::MAX),
            Budget::VirtualS(s) => (u64::MAX, (s * 1e9) as u64),
        };
        let mut left = events;
        while left > 0 && !self.closed {
            let Some(at) = self.calendar.peek() else {
                self.close();
                break;
            };
            if at > self.time_limit && self.running > 0 {
                self.run_out();
                break;
            }
            if at > until {
                break;
            }
            let Some((at, event)) = self.calendar.pop() else { break };
            self.now = at;
            self.totals.events += 1;
            left -= 1;
            self.handle(event);
        }
        let fraction = self.totals.ended as f64 / self.totals.expected.max(1) as f64;
        Progress {
            fraction: if self.closed { 1.0 } else { fraction.min(1.0) },
            virtual_s: self.now as f64 / 1e9,
            operations: self.totals.ended,
            done: self.closed,
        }
    }

    /// Runs to the end and returns the measurements.
    pub fn finish(mut self) -> Outcome {
        while !self.step_until(Budget::Events(u64::MAX)).done {}
        self.into_outcome()
    }

    /// Stops here, as if the time limit had been reached, and returns the measurements so far.
    pub fn stop(mut self) -> Outcome {
        if !self.closed {
            self.time_limit = self.now;
            self.run_out();
        }
        self.into_outcome()
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Issue(process) => self.issue(process),
            Event::CallLeaves(call) => self.call_leaves(call),
            Event::CallArrives(call) => self.call_arrives(call),
            Event::CallIsIn(call) => self.call_is_in(call),
            Event::AnswerLeaves(call) => self.answer_leaves(call),
            Event::AnswerArrives(call) => self.answer_arrives(call),
            Event::AnswerIsIn(call) => self.answer_arrived(call),
            Event::MessageContinues(message) => self.message_continues(message),
            Event::MessageArrives { message, bytes } => self.message_arrives(message, bytes),
            Event::MessageIsIn { message, bytes } => self.message_is_in(message, bytes),
            Event::MessageTimesOut(message) => self.message_times_out(message),
            Event::DiskDone { server, incarnation } => self.disk_done(server, incarnation),
            Event::FlashDone(job) => self.flash_done(job),
            Event::IoAlarm(node) => {
                self.io[usize::from(node)].station.alarm = u64::MAX;
                self.pump_io(node);
            }
            Event::ThreadAwake(node) => self.thread_awake(node),
            Event::ServerAlarm(server) => {
                self.servers[usize::from(server)].station.alarm = u64::MAX;
                self.pump_server(server);
            }
            Event::Timeouts => self.look_at_silent_calls(),
            Event::Resume(call) => self.resume(call),
            Event::Round(application) => self.collective_round(application),
            Event::FaultBegins(fault) => self.fault_begins(fault),
            Event::FaultEnds(fault) => self.fault_ends(fault),
            Event::RandomFault => self.random_fault(),
            Event::Members => self.members_step(),
            Event::MemoryPatience(node, call) => self.memory_patience(node, call),
        }
    }

    pub(crate) fn at(&mut self, when: u64, what: Event) {
        self.calendar.push(when.max(self.now), what);
    }

    /// The lateness of the next timer.
    pub(crate) fn late(&mut self, late_us: f64) -> u64 {
        match micros(late_us) {
            0 => 0,
            late => self.random.below(late + 1),
        }
    }

    /// Latency and jitter of a message.
    pub(crate) fn transit(&mut self) -> u64 {
        self.network.latency_ns + self.random.below(self.network.jitter_ns + 1)
    }

    pub(crate) fn violated(&mut self, what: String) {
        if self.violations.len() < VIOLATIONS_MAX {
            self.violations.push(format!("{:.9} s: {what}", self.now as f64 / 1e9));
        }
    }

    fn start(&mut self) {
        self.warm_caches();
        self.plan_faults();
        self.begin_members();
        self.start_applications();
    }

    /// The end of virtual time: unfinished work fails.
    fn run_out(&mut self) {
        self.now = self.time_limit;
        self.fail_outstanding();
        self.closed = true;
    }

    /// The calendar is empty: everything must have ended.
    fn close(&mut self) {
        self.closed = true;
        if self.running > 0 {
            let left: usize = self.processes.iter().filter(|p| p.finished == u64::MAX).count();
            self.violated(format!("{left} processes never end: nothing happens any more"));
            self.fail_outstanding();
        }
        for (what, left) in [
            ("operations", self.ops.len()),
            ("calls", self.calls.len()),
            ("messages", self.messages.len()),
            ("forwarded requests", self.forwards.len()),
            ("device jobs", self.jobs.len()),
        ] {
            if left > 0 {
                self.violated(format!("{left} {what} are left at the end"));
            }
        }
        let mut wrong = Vec::new();
        for (i, n) in self.io.iter().enumerate() {
            wrong.extend(n.station.balance().err().map(|e| format!("I/O node {i}: {e}")));
            if !n.dispatch.is_empty() || n.dispatch.in_flight() > 0 {
                wrong.push(format!("I/O node {i}: its dispatch queue is not empty"));
            }
            wrong.extend(n.memory.as_ref().and_then(|m| m.is_left()).map(|e| format!("I/O node {i}: {e}")));
        }
        for (i, s) in self.servers.iter().enumerate() {
            wrong.extend(s.station.balance().err().map(|e| format!("data server {i}: {e}")));
            wrong.extend(s.memory.as_ref().and_then(|m| m.is_left()).map(|e| format!("data server {i}: {e}")));
            wrong.extend(s.wasted_too_much().map(|e| format!("data server {i}: {e}")));
        }
        let (bound, silence) = (self.timeouts.silence_max_ns(), self.totals.silence_max);
        if silence > bound {
            wrong.push(format!("a call was not given up for {:.3} s", silence as f64 / 1e9));
        }
        wrong.into_iter().for_each(|what| self.violated(what));
    }

    /// Collects the violations of all nodes, with their names.
    pub(crate) fn all_violations(&mut self) -> Vec<String> {
        let mut all = std::mem::take(&mut self.violations);
        for (i, n) in self.io.iter_mut().enumerate() {
            all.extend(n.station.violations().into_iter().map(|v| format!("I/O node {i} at {v}")));
        }
        for (i, s) in self.servers.iter_mut().enumerate() {
            all.extend(s.station.violations().into_iter().map(|v| format!("data server {i} at {v}")));
        }
        all.truncate(VIOLATIONS_MAX);
        all
    }
}

/// Minimum clients whose epochs a node remembers, and the largest merged request: as on the servers.
pub(crate) const FENCED_CLIENTS: usize = 4;
pub(crate) const MERGE_BYTES: u64 = 4 << 20;

/// Files start at consecutive servers, the first at a random one.
fn layout_of(scenario: &Scenario, file: u32) -> Layout {
    let s = &scenario.servers;
    let pcount = if s.stripe_count == 0 { s.count } else { s.stripe_count };
    let first = mix(scenario.seed ^ 0x5741_9e0f) % u64::from(s.count);
    let base = ((u64::from(file) + first) % u64::from(s.count)) as u16;
    Layout { base, pcount, ssize_bytes: s.stripe_bytes, servers: s.count, skipped: Skipped::NONE }
}

/// Lengths of the files of each application.
pub(crate) fn file_lens(scenario: &Scenario) -> Vec<Vec<u64>> {
    let lens = |a: &crate::model::Application| {
        if a.pattern == crate::model::Pattern::Trace {
            let mut lens = vec![0; access::files(a) as usize];
            for t in &a.trace {
                let len = &mut lens[t.file as usize];
                *len = (t.offset + t.len).max(*len);
            }
            return lens;
        }
        (0..access::files(a)).map(|f| access::file_len(a, f)).collect()
    };
    scenario.application.iter().map(lens).collect()
}

/// Runs a scenario to its end; an error if it cannot be run.
pub fn run(scenario: &Scenario) -> Result<Outcome, SimError> {
    Ok(Simulation::new(scenario)?.finish())
}
