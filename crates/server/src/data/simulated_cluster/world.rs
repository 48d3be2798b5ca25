//! Clients, I/O nodes, links and servers in virtual time. What servers and clients decide is decided by the rules of the real
//! ones; everything happens in one thread, in the order of a calendar.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use std::time::Duration;

use impresario_base::random::mix;
use impresario_client::testing::Unsynced;
use impresario_layout::Layout;
use impresario_node::session::{Call, Epoch, Fence, Rights, Step as Repeat};
use impresario_sched::Nanos;
use impresario_wire::{Answer, ClientKey, Fault as Refusal, FileKey, MetaCall, Who};

use super::history::{Checked, History, Wrong};
use super::jobs::Job;
use super::plan::{DATA_SERVERS, META, Op, Plan, SLOTS, What};
use super::servers::{Ask, LateCut, MetaServer, MetaTrouble, Reached, Sabotage, Told};
use crate::meta::SessionId;

/// How long a call may take, as a mount has it.
const TIMEOUT_NS: u64 = 10_000_000_000;
/// After this time without an answer a client goes to its next I/O node.
const PATIENCE_NS: u64 = 2_500_000_000;
/// Between attempts to connect.
const AGAIN_NS: u64 = 100_000_000;
/// Clients whose epochs an I/O node knows.
const FENCED_CLIENTS: usize = 64;

pub(super) struct Client {
    key: u64,
    pub(super) epoch: Epoch,
    sequence: u64,
    way: usize,
    pub(super) connection: Option<usize>,
    is_connecting: bool,
    pub(super) unsynced: Unsynced,
}

pub(super) struct Connection {
    client: usize,
    way: usize,
    /// The run of the metadata server that its session is with.
    run: u64,
    session: SessionId,
    is_open: bool,
}

/// An open file of a thread.
#[derive(Clone, Copy)]
pub(super) struct Slot {
    pub(super) path: &'static str,
    pub(super) file: FileKey,
    pub(super) layout: Layout,
    pub(super) handle: u64,
    /// The connection in whose session the handle is.
    pub(super) on: usize,
    /// The client's last loss that it was told of.
    pub(super) told: u64,
    pub(super) has_written: bool,
}

/// One call of a client.
#[derive(Clone, Debug)]
pub(super) enum Query {
    /// Bound to a connection if it has a handle.
    Meta {
        call: MetaCall,
        is_bound: bool,
    },
    Data {
        server: usize,
        file: FileKey,
        ask: Ask,
    },
}

impl Query {
    fn changes(&self) -> bool {
        match self {
            Query::Meta { call, .. } => call.is_change(),
            Query::Data { ask, .. } => matches!(ask, Ask::Write { .. }),
        }
    }

    fn server(&self) -> usize {
        match self {
            Query::Meta { .. } => META,
            Query::Data { server, .. } => *server,
        }
    }
}

/// What became of a call.
#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Meta(Box<Answer>),
    Data(Told),
    Unknown,
}

/// How often a call was sent, and whether its data server ran all the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copies {
    pub(super) sent: u64,
    pub(super) one_run: bool,
}

pub(super) struct Operation {
    id: u64,
    thread: usize,
    part: usize,
    pub(super) client: usize,
    query: Query,
    call: Call,
    sequence: u64,
    copies: u64,
    /// How often the data server that it is for had been started when the first copy was sent.
    runs: u64,
    /// The connection on which its last copy is outstanding, and since when.
    on: Option<(usize, Nanos)>,
    has_ended: bool,
}

enum Event {
    Next {
        thread: usize,
    },
    Send {
        operation: usize,
    },
    Connect {
        client: usize,
    },
    Request {
        operation: usize,
        connection: usize,
        who: Who,
        copy: u64,
    },
    Answer {
        operation: usize,
        connection: usize,
        outcome: Outcome,
    },
    Tick {
        operation: usize,
        copy: u64,
    },
    /// The server learns that the client has closed the connection, or the client that it is broken.
    Hangup {
        connection: usize,
    },
    Broken {
        connection: usize,
    },
    Fault {
        fault: usize,
    },
    Start {
        server: usize,
    },
    Meet {
        server: usize,
    },
    Cut(LateCut),
}

pub(super) struct World<'a> {
    pub(super) plan: &'a Plan,
    sabotage: Sabotage,
    now: Nanos,
    calendar: BinaryHeap<Reverse<(u64, u64)>>,
    entries: BTreeMap<u64, Event>,
    entry: u64,
    data: Arc<Reached>,
    meta: MetaServer,
    pub(super) clients: Vec<Client>,
    connections: Vec<Connection>,
    pub(super) operations: Vec<Operation>,
    /// Of each I/O node.
    fences: Vec<Fence>,
    pub(super) slots: Vec<[Option<Slot>; SLOTS]>,
    pub(super) jobs: Vec<Option<Job>>,
    /// The next step of each thread.
    next: Vec<usize>,
    /// Until when nothing passes, by client and way.
    closed: BTreeMap<(usize, usize), Nanos>,
    /// Changes of names that were answered with an error: a second delivery of the same copy, which no connection makes, would be
    /// another try.
    failed: BTreeSet<(usize, u64)>,
    /// What is written is different each time.
    pub(super) value: u64,
    renumbered: u64,
    pub(super) history: History,
    draws: u64,
    restarts: u64,
}

/// What a run came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ran {
    pub(super) calls: u64,
    pub(super) copies: u64,
    pub(super) restarts: u64,
    pub(super) checked: Checked,
}

/// Runs a plan and checks what happened.
pub(super) fn run(plan: &Plan, sabotage: Sabotage) -> Result<Ran, Wrong> {
    let data = Arc::new(Reached::new(plan.checksums, sabotage));
    let client = |at: usize| Client {
        key: 7 + at as u64,
        epoch: Epoch::new(0),
        sequence: 0,
        way: at % plan.ways,
        connection: None,
        is_connecting: false,
        unsynced: Unsynced::default(),
    };
    let mut world = World {
        plan,
        sabotage,
        now: Nanos(0),
        calendar: BinaryHeap::new(),
        entries: BTreeMap::new(),
        entry: 0,
        meta: MetaServer::new(data.clone()),
        data,
        clients: (0..plan.clients).map(client).collect(),
        connections: Vec::new(),
        operations: Vec::new(),
        fences: (0..plan.ways).map(|_| Fence::new(FENCED_CLIENTS)).collect(),
        slots: vec![[None; SLOTS]; plan.threads.len()],
        jobs: (0..plan.threads.len()).map(|_| None).collect(),
        next: vec![0; plan.threads.len()],
        closed: BTreeMap::new(),
        failed: BTreeSet::new(),
        value: 0,
        renumbered: 0,
        history: History::default(),
        draws: 0,
        restarts: 0,
    };
    for (fault, what) in plan.faults.iter().enumerate() {
        world.schedule(what.at_us * 1000, Event::Fault { fault });
    }
    (0..plan.threads.len()).for_each(|thread| world.think(thread));
    while let Some(Reverse((at, entry))) = world.calendar.pop() {
        world.now = Nanos(at);
        if let Some(event) = world.entries.remove(&entry) {
            world.happen(event);
        }
    }
    world.end()
}

impl World<'_> {
    fn schedule(&mut self, at: u64, event: Event) {
        self.entry += 1;
        self.entries.insert(self.entry, event);
        self.calendar.push(Reverse((at.max(self.now.0), self.entry)));
    }

    fn after(&mut self, ns: u64, event: Event) {
        self.schedule(self.now.0 + ns, event);
    }

    /// Something passes between a client and an I/O node.
    fn carry(&mut self, client: usize, way: usize, of: [u64; 3], event: Event) {
        let opens = self.closed.get(&(client, way)).map_or(self.now.0, |until| until.0.max(self.now.0));
        let transit = self.plan.links.transit_ns(of);
        self.schedule(opens + transit, event);
    }

    pub(super) fn think(&mut self, thread: usize) {
        self.jobs[thread] = None;
        if let Some(step) = self.plan.threads[thread].steps.get(self.next[thread]) {
            self.after(step.pause_us * 1000, Event::Next { thread });
        }
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Next { thread } => {
                let step = self.plan.threads[thread].steps[self.next[thread]];
                self.next[thread] += 1;
                self.begin(thread, step);
            }
            Event::Send { operation } => self.send(operation),
            Event::Connect { client } => self.connect(client),
            Event::Request { operation, connection, who, copy } => self.request(operation, connection, who, copy),
            Event::Answer { operation, connection, outcome } => self.answered(operation, connection, outcome),
            Event::Tick { operation, copy } => self.tick(operation, copy),
            Event::Hangup { connection } => {
                let Connection { run, session, .. } = self.connections[connection];
                if run == self.meta.runs && self.meta.service.is_some() {
                    let closed = self.meta.serve(|service| service.close_session(session));
                    self.meta_called(closed.err());
                }
            }
            Event::Broken { connection } => self.break_off(connection),
            Event::Fault { fault } => self.fault(self.plan.faults[fault].what),
            Event::Start { server: META } => {
                self.meta.start(None);
                self.meta_called(None);
                self.restarts += 1;
            }
            Event::Start { server } => {
                self.data.0.lock().servers[server].start();
                self.restarts += 1;
            }
            Event::Meet { server } => self.data.0.lock().servers[server].is_apart = false,
            Event::Cut(LateCut { server, who, file, len_bytes }) => {
                _ = self.ask(server, who, file, Ask::Cut { len_bytes });
            }
        }
    }

    fn fault(&mut self, what: What) {
        match what {
            What::Kill { server: META, after: Some(after), down_us } => {
                self.meta.trouble(after, MetaTrouble::Killed { down_us });
            }
            What::Kill { server: META, after: None, down_us } => {
                self.meta.kill();
                self.meta_called(Some(down_us));
            }
            What::Kill { server, after: Some(after), down_us } => {
                self.data.0.lock().servers[server].kill_after(after, down_us);
            }
            What::Kill { server, after: None, down_us } => {
                self.data.0.lock().servers[server].kill();
                self.after(down_us * 1000, Event::Start { server });
            }
            What::PowerFails { server, seed, down_us } => {
                let data = self.data.clone();
                let here = &mut data.0.lock().servers[server];
                here.power_fails(seed);
                self.history.power_failed(server, |file, at| here.value(file, at));
                self.after(down_us * 1000, Event::Start { server });
            }
            What::WriteBack { server, seed, fails } => {
                let disk = self.data.0.lock().servers[server].disk.clone();
                disk.write_back(seed, fails);
            }
            What::Fail { server: META, after, errno } => self.meta.trouble(after, MetaTrouble::Fails { errno }),
            What::Fail { server, after, errno } => {
                let disk = self.data.0.lock().servers[server].disk.clone();
                disk.fail_after(u64::from(after), errno, false);
            }
            What::Cut { client } => {
                if let Some(connection) = self.clients.get(client).and_then(|client| client.connection) {
                    self.break_off(connection);
                }
            }
            What::Partition { client, way, for_us } => {
                self.closed.insert((client, way), Nanos(self.now.0 + for_us * 1000));
            }
            What::Apart { server, for_us } => {
                self.data.0.lock().servers[server].is_apart = true;
                self.after(for_us * 1000, Event::Meet { server });
            }
        }
    }

    /// After a call of the metadata server, which may have been killed in it, and killed data servers.
    fn meta_called(&mut self, down_us: Option<u64>) {
        let (late, killed) = {
            let mut data = self.data.0.lock();
            (std::mem::take(&mut data.late), std::mem::take(&mut data.killed))
        };
        for cut in late {
            self.draws += 1;
            let takes = self.plan.links.transit_ns([self.draws, 0, 9]) * 40;
            self.after(takes, Event::Cut(cut));
        }
        for (server, down_us) in killed {
            self.after(down_us * 1000, Event::Start { server });
        }
        let Some(down_us) = down_us else { return };
        let run = self.meta.runs;
        for connection in 0..self.connections.len() {
            let Connection { client, way, .. } = self.connections[connection];
            if self.connections[connection].run == run {
                self.carry(client, way, [connection as u64, 0, 4], Event::Broken { connection });
            }
        }
        self.after(down_us * 1000, Event::Start { server: META });
    }

    pub(super) fn submit(&mut self, thread: usize, id: u64, part: usize, query: Query) {
        let client = self.plan.threads[thread].client;
        self.clients[client].sequence += 1;
        let is_bound = matches!(query, Query::Meta { is_bound: true, .. });
        let rights =
            Rights { repeat: !is_bound, ours: true, bound: is_bound, again_when_busy: true, changes: query.changes() };
        self.operations.push(Operation {
            id: id * 64 + part as u64,
            thread,
            part,
            client,
            query,
            call: Call::new(rights, Nanos(self.now.0 + TIMEOUT_NS)),
            sequence: self.clients[client].sequence,
            copies: 0,
            runs: 0,
            on: None,
            has_ended: false,
        });
        self.send(self.operations.len() - 1);
    }

    fn send(&mut self, operation: usize) {
        let here = &self.operations[operation];
        if here.has_ended || here.on.is_some() {
            return;
        }
        let (client, deadline) = (here.client, here.call.deadline());
        if self.now >= deadline {
            return self.finish(operation, Outcome::Unknown);
        }
        let Some(connection) = self.clients[client].connection else {
            self.reconnect(client, 0);
            return self.schedule(deadline.0, Event::Send { operation });
        };
        let Connection { way, .. } = self.connections[connection];
        let here = &mut self.operations[operation];
        let epoch = here.call.stamp(&self.clients[client].epoch);
        here.copies += 1;
        if let (1, Query::Data { server, .. }) = (here.copies, &here.query) {
            here.runs = self.data.0.lock().servers[*server].runs;
        }
        here.on = Some((connection, self.now));
        let (id, copy, since, sequence) = (here.id, here.copies, here.call.since(), here.sequence);
        let is_of_names = matches!(here.query, Query::Meta { .. });
        let who = Who { client: ClientKey(self.clients[client].key), epoch, since, sequence, ..Who::default() };
        self.carry(client, way, [id, copy, 1], Event::Request { operation, connection, who, copy });
        let doubled = self.plan.links.doubled_of;
        let draw = mix(self.plan.links.seed ^ mix(id) ^ mix(copy ^ 6));
        if is_of_names && doubled > 0 && draw.is_multiple_of(doubled) {
            self.carry(client, way, [id, copy, 2], Event::Request { operation, connection, who, copy });
        }
        let patience = if self.plan.ways > 1 { PATIENCE_NS } else { TIMEOUT_NS };
        self.schedule((self.now.0 + patience).min(deadline.0), Event::Tick { operation, copy });
    }

    fn reconnect(&mut self, client: usize, wait: u64) {
        let here = &mut self.clients[client];
        if here.connection.is_none() && !std::mem::replace(&mut here.is_connecting, true) {
            self.draws += 1;
            let takes = self.plan.links.transit_ns([self.draws, 0, 5]).min(AGAIN_NS);
            self.after(wait + takes, Event::Connect { client });
        }
    }

    fn connect(&mut self, client: usize) {
        let is_asked = self.operations.iter().any(|call| call.client == client && !call.has_ended && call.on.is_none());
        let here = &mut self.clients[client];
        here.is_connecting = false;
        if !is_asked || here.connection.is_some() {
            return;
        }
        let who = Who { client: ClientKey(here.key), epoch: here.epoch.now(), ..Who::default() };
        let way = here.way;
        let is_closed = self.closed.get(&(client, way)).is_some_and(|until| *until > self.now);
        let opened = match is_closed {
            true => None,
            false => {
                let was_up = self.meta.service.is_some();
                let opened = self.meta.serve(|service| service.open_session(who).ok());
                // One that was away is started again by who has ended it.
                self.meta_called(opened.as_ref().err().copied().filter(|_| was_up));
                opened.ok().flatten()
            }
        };
        let Some(session) = opened else {
            self.clients[client].way = (way + 1) % self.plan.ways;
            return self.reconnect(client, AGAIN_NS);
        };
        self.clients[client].connection = Some(self.connections.len());
        self.connections.push(Connection { client, way, run: self.meta.runs, session, is_open: true });
        for operation in 0..self.operations.len() {
            if self.operations[operation].client == client {
                self.send(operation);
            }
        }
    }

    /// Asks a data server; `None` if it does not answer.
    fn ask(&mut self, server: usize, who: Who, file: FileKey, ask: Ask) -> Option<Told> {
        let mut data = self.data.0.lock();
        let here = &mut data.servers[server];
        if !here.is_up() {
            return None;
        }
        let served = here.serve(who, file, ask);
        drop(data);
        match served {
            Ok(told) => {
                if matches!(told, Told::Synced(_, 0)) {
                    self.history.synced(server);
                }
                Some(told)
            }
            Err(down_us) => {
                self.after(down_us * 1000, Event::Start { server });
                None
            }
        }
    }

    fn request(&mut self, operation: usize, connection: usize, mut who: Who, copy: u64) {
        let Connection { client, way, run, session, .. } = self.connections[connection];
        let Operation { id, query, .. } = &self.operations[operation];
        let (id, query) = (*id, query.clone());
        let outcome = match query {
            Query::Data { server, file, ask } => {
                let refuse = |errno: i32| Told::Fault(Refusal { errno, message: String::new() });
                let is_fenced = self.sabotage != Sabotage::NoDataFence;
                let told = match self.fences[way].admit(who.client.0, who.epoch) || !is_fenced {
                    false => refuse(Refusal::FENCED),
                    true => self.ask(server, who, file, ask).unwrap_or_else(|| refuse(Refusal::PATH_LOST)),
                };
                Outcome::Data(told)
            }
            Query::Meta { call, .. } => {
                // It was on its way to a process that is no more.
                if run != self.meta.runs || self.meta.service.is_none() {
                    return self.carry(client, way, [connection as u64, copy, 4], Event::Broken { connection });
                }
                if self.failed.contains(&(operation, copy)) {
                    return;
                }
                match self.sabotage {
                    Sabotage::NoReplies => {
                        self.renumbered += 1;
                        who.sequence = (1 << 40) + self.renumbered;
                    }
                    Sabotage::NoMetaFence => (who.epoch, who.since) = (0, 0),
                    _ => {}
                }
                let told = self.meta.serve(|service| service.call_from(session, who, call));
                self.meta_called(told.as_ref().err().copied());
                let Ok(answer) = told else { return };
                if matches!(answer, Answer::Fault(_)) {
                    self.failed.insert((operation, copy));
                }
                Outcome::Meta(Box::new(answer))
            }
        };
        self.carry(client, way, [id, copy, 3], Event::Answer { operation, connection, outcome });
    }

    fn answered(&mut self, operation: usize, connection: usize, outcome: Outcome) {
        let Connection { client, is_open, .. } = self.connections[connection];
        let here = &mut self.operations[operation];
        if !is_open || here.has_ended || here.on.map(|on| on.0) != Some(connection) {
            return;
        }
        let refusal = match &outcome {
            Outcome::Meta(answer) => match &**answer {
                Answer::Fault(refusal) => Some(refusal),
                _ => None,
            },
            Outcome::Data(Told::Fault(refusal)) => Some(refusal),
            _ => None,
        };
        let Some(refusal) = refusal else { return self.finish(operation, outcome) };
        let verdict = impresario_client::verdict(refusal);
        match here.call.answered(self.now, verdict, &self.clients[client].epoch) {
            Repeat::Again { at, .. } => {
                here.on = None;
                self.schedule(at.0, Event::Send { operation });
            }
            Repeat::Answer => self.finish(operation, outcome),
            Repeat::Fail(_) => self.finish(operation, Outcome::Unknown),
        }
    }

    fn tick(&mut self, operation: usize, copy: u64) {
        let here = &self.operations[operation];
        let Some((connection, _)) = here.on.filter(|_| !here.has_ended && here.copies == copy) else { return };
        let (client, deadline) = (here.client, here.call.deadline());
        if self.now >= deadline {
            here.call.given_up(&self.clients[client].epoch);
            return self.finish(operation, Outcome::Unknown);
        }
        self.break_off(connection);
    }

    /// The client leaves a connection.
    fn break_off(&mut self, connection: usize) {
        if !std::mem::replace(&mut self.connections[connection].is_open, false) {
            return;
        }
        let Connection { client, way, .. } = self.connections[connection];
        let of_it = |call: &Operation| call.on.map(|on| on.0) == Some(connection) && !call.has_ended;
        let lost: Vec<usize> =
            (0..self.operations.len()).filter(|operation| of_it(&self.operations[*operation])).collect();
        let here = &mut self.clients[client];
        if !lost.is_empty() {
            here.epoch.give_up();
        }
        (here.connection, here.way) = (None, (way + 1) % self.plan.ways);
        self.carry(client, way, [connection as u64, 0, 8], Event::Hangup { connection });
        for operation in lost {
            let here = &mut self.operations[operation];
            here.on = None;
            match here.call.lost(self.now, false) {
                Repeat::Again { at, .. } => self.schedule(at.0, Event::Send { operation }),
                Repeat::Answer | Repeat::Fail(_) => self.finish(operation, Outcome::Unknown),
            }
        }
    }

    fn finish(&mut self, operation: usize, outcome: Outcome) {
        let here = &mut self.operations[operation];
        (here.has_ended, here.on) = (true, None);
        let (client, thread, part, epoch) = (here.client, here.thread, here.part, here.call.epoch());
        let (server, sent, runs) = (here.query.server(), here.copies, here.runs);
        let has_answered = match &outcome {
            Outcome::Unknown => false,
            // Nothing could be noted.
            Outcome::Meta(answer) => {
                !matches!(&**answer, Answer::Fault(refusal) if refusal.errno == libc::ENOSPC || refusal.errno == libc::EIO)
            }
            Outcome::Data(told) => !matches!(told, Told::Fault(_)),
        };
        if has_answered {
            self.history.revoked(client, epoch, server);
        }
        let outcome = if sent > 0 { outcome } else { Outcome::Unknown };
        let is_data = matches!(outcome, Outcome::Data(_));
        let copies = Copies { sent, one_run: is_data && self.data.0.lock().servers[server].runs == runs };
        self.part_ended(thread, part, outcome, (epoch, copies));
    }

    /// Everything has ended: who is away comes back, and what is left is looked at.
    fn end(mut self) -> Result<Ran, Wrong> {
        for server in 0..DATA_SERVERS {
            let mut data = self.data.0.lock();
            data.servers[server].is_apart = false;
            data.servers[server].disk.mend();
            data.servers[server].start();
        }
        self.meta.kill();
        self.meta.start(Some(Duration::ZERO));
        let named = self.look_at_names();
        let data = self.data.clone();
        let data = data.0.lock();
        for (file, layout) in self.history.files() {
            self.look_at_strips(file, layout, |server, at| data.servers[server].value(file, at));
        }
        if let Some(named) = named {
            self.history.judge_removed(&named, |server, file| data.servers[server].has(file));
        }
        let copies = self.operations.iter().map(|call| call.copies).sum();
        let may_fail = self.plan.faults.iter().any(|fault| matches!(fault.what, What::Fail { server: META, .. }));
        let checked = self.history.check(may_fail)?;
        Ok(Ran { calls: self.operations.len() as u64, copies, restarts: self.restarts, checked })
    }

    /// Opens every name, when nothing else happens any more; the files that have one, if that is told of all names.
    fn look_at_names(&mut self) -> Option<BTreeSet<FileKey>> {
        let (mut named, mut is_all_told) = (BTreeSet::new(), true);
        let session = self.meta.serve(|service| service.open_session(Who::default()).expect("a session"));
        let session = session.ok()?;
        for (at, path) in super::plan::NAMES.into_iter().enumerate() {
            let op = Op::Open { slot: 0, path, create: false };
            let called = self.history.tick();
            let call = MetaCall::Open { path: path.into(), write: false };
            let answer = self.meta.serve(|service| service.call(session, call));
            match &answer {
                Ok(Answer::Opened(opened)) => _ = named.insert(opened.file),
                Ok(Answer::Fault(fault)) if fault.errno == libc::ENOENT => {}
                // A power failure has taken an object that was not synced: which file has the name is not told.
                _ => is_all_told = false,
            }
            let answer = answer.map_or(Outcome::Unknown, |answer| Outcome::Meta(Box::new(answer)));
            self.named((1 << 32) + at as u64, op, &answer, called, (usize::MAX, 0, META));
        }
        _ = self.meta.serve(|service| service.close_session(session));
        is_all_told.then_some(named)
    }
}
