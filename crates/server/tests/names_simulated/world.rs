//! Clients, links and the metadata server in virtual time. The server is the real one, in a folder; the clients decide by the
//! same machines of `node::session` as the real ones. Everything happens in one thread, in the order of a calendar.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_node::session::{Call, Epoch, Next, Patience, Rights, Routes, Sign, Silence, Step};
use impresario_sched::Nanos;
use impresario_server::meta::{Fate, MemoryObjects, MetaOptions, MetaService, SessionId, StepHook};
use impresario_testing::linear::Event;
use impresario_wire::message::{Answer, ClientKey, Entry, MetaCall, Who};

use crate::meta_support;
use crate::model::{Seen, Told, everything};
use crate::plan::{Fault, Op, Plan};

/// How long a call may take, as a mount has it.
const TIMEOUT: Nanos = Nanos(10_000_000_000);
const TICK: Nanos = Nanos(TIMEOUT.0 / 20);

/// What is broken on purpose, to see that it is found.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Sabotage {
    #[default]
    None,
    /// The server takes each copy of a change for another change.
    NoReplies,
    /// The server takes every call for one of its client's present epoch.
    NoFence,
    /// A restarted server has forgotten which changes were done.
    ForgetsChanges,
    /// A server that was killed in the middle of a change does not know that it had begun.
    ForgetsBegun,
    /// Some questions are answered from a memory that others do not change.
    StaleAnswers,
}

/// What happened, and what is to be checked.
pub struct History {
    pub events: Vec<Event<Told>>,
    /// The numbers of files, by the operation that alone can have made them.
    pub made_by: BTreeMap<u64, u64>,
    pub copies: u64,
    pub restarts: u64,
    /// The folder, with what is left when everything has ended.
    pub left: Result<(), String>,
}

impl History {
    pub fn new() -> History {
        History { events: Vec::new(), made_by: BTreeMap::new(), copies: 0, restarts: 0, left: Ok(()) }
    }

    /// What an answer says.
    pub fn note(&mut self, id: u64, op: Op, answer: Answer) -> Seen {
        match answer {
            Answer::Fault(refusal) => Seen::Failed(refusal.errno),
            Answer::Opened(opened) => {
                if matches!(op, Op::Create { exclusive: true, .. }) {
                    self.made_by.insert(opened.file.0, id);
                }
                Seen::File(opened.file.0)
            }
            Answer::Attr(attr) if matches!(op, Op::Look { .. }) => Seen::Node(attr.kind, attr.mode, attr.nlink),
            Answer::Entries(entries) => {
                let name = |entry: Entry| String::from_utf8_lossy(&entry.name).into_owned();
                Seen::Names(entries.into_iter().map(name).collect())
            }
            Answer::Xattr(value) => Seen::Tag(value),
            _ => Seen::Done,
        }
    }

    /// Looks at everything, one thing after the other, when nothing else happens any more.
    pub fn look_at_all(&mut self, service: &MetaService, end: u64) {
        let session = service.open_session(Who::default()).expect("a session");
        for (at, op) in everything().enumerate() {
            let (id, called) = (1_000_000 + at as u64, end + 2 * at as u64);
            let seen = self.note(id, op, service.call(session, op.call()));
            let operation = Told { id, op, seen };
            self.events.push(Event { operation, called, ended: Some(called + 1), is_certain: true });
        }
        service.close_session(session);
    }

    /// Looks at what is left when the server is started again without grace for clients that are gone.
    pub fn look_at_folder(&mut self, dir: &Path, objects: &Arc<MemoryObjects>) {
        let look = || {
            let server = meta_support::start_with(meta_support::options(dir), objects.clone());
            server.quiet();
            drop(server);
            meta_support::check_directory(dir, objects);
        };
        self.left = std::panic::catch_unwind(std::panic::AssertUnwindSafe(look)).map_err(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            text.or(panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
        });
    }
}

/// A folder in memory where that keeps extended attributes: a plan waits for nothing then.
pub fn folder() -> tempfile::TempDir {
    let in_memory = tempfile::tempdir_in("/dev/shm").ok();
    let takes = |dir: &tempfile::TempDir| {
        rustix::fs::setxattr(dir.path(), "user.a", b"", rustix::fs::XattrFlags::empty()).is_ok()
    };
    in_memory.filter(takes).unwrap_or_else(|| tempfile::tempdir().expect("a temporary folder"))
}

/// The disk below the server: what becomes of its next changes.
struct Disk {
    main: ThreadId,
    is_dead: AtomicBool,
    /// What happens when so many more changes were made.
    trouble: Mutex<Option<(Trouble, u32)>>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    Killed { down: Nanos },
    Full,
}

impl Disk {
    fn fate(&self, step: &str) -> Fate {
        // Of a dead process: nothing of it reaches the disk any more.
        if self.is_dead.load(Ordering::SeqCst) {
            return Fate::Fails(libc::EIO);
        }
        if std::thread::current().id() == self.main {
            let mut trouble = self.trouble.lock();
            match &mut *trouble {
                Some((Trouble::Killed { .. }, 0)) => {
                    self.is_dead.store(true, Ordering::SeqCst);
                    return Fate::Fails(libc::EIO);
                }
                Some((Trouble::Full, 0)) => {
                    *trouble = None;
                    return Fate::Fails(libc::ENOSPC);
                }
                Some((_, left)) => *left -= 1,
                None => {}
            }
        }
        // The process is killed, not the machine.
        if step.starts_with("sync") { Fate::LeftOut } else { Fate::Done }
    }
}

struct Server {
    dir: tempfile::TempDir,
    objects: Arc<MemoryObjects>,
    disk: Arc<Disk>,
    service: Option<MetaService>,
    /// How often it was started.
    run: u64,
    /// What is to happen in one of the next calls.
    troubles: Vec<(Trouble, u32)>,
    sabotage: Sabotage,
    renumbered: u64,
    stale: BTreeMap<&'static str, Answer>,
}

impl Server {
    fn new(sabotage: Sabotage) -> Server {
        let dir = folder();
        let disk =
            Disk { main: std::thread::current().id(), is_dead: AtomicBool::default(), trouble: Mutex::default() };
        let objects = Arc::new(MemoryObjects::default());
        let (disk, stale) = (Arc::new(disk), BTreeMap::new());
        Server { dir, objects, disk, service: None, run: 0, troubles: Vec::new(), sabotage, renumbered: 0, stale }
    }

    fn start(&mut self) {
        self.disk.is_dead.store(false, Ordering::SeqCst);
        *self.disk.trouble.lock() = None;
        let forget = |is_kept: fn(u32) -> bool| {
            let file = self.dir.path().join("changes");
            let notes = std::fs::read(&file).unwrap_or_default();
            let kind = |note: &[u8]| u32::from_le_bytes(note[..4].try_into().unwrap());
            let kept = notes.chunks_exact(32).filter(|note| is_kept(kind(note)));
            std::fs::write(&file, kept.flatten().copied().collect::<Vec<u8>>()).unwrap();
        };
        match self.sabotage {
            // Only the epochs of clients are left.
            Sabotage::ForgetsChanges if self.run > 0 => forget(|kind| kind == 5),
            Sabotage::ForgetsBegun if self.run > 0 => forget(|kind| kind != 1 && kind != 8),
            _ => {}
        }
        let disk = self.disk.clone();
        let hook: StepHook = Arc::new(move |step| disk.fate(step));
        let options =
            MetaOptions { before_step: Some(hook), ..MetaOptions::new(self.dir.path(), meta_support::SERVERS) };
        if self.run == 0 {
            impresario_server::meta::make(&options.dir, impresario_wire::message::ClusterId(1), &BTreeMap::new())
                .unwrap();
        }
        self.service = Some(MetaService::open(options, self.objects.clone()).expect("the server starts"));
        self.run += 1;
        self.idle();
    }

    fn idle(&self) {
        let is_idle = self.service.as_ref().is_none_or(|service| service.wait_idle(Duration::from_secs(60)));
        assert!(is_idle, "background work does not end");
    }

    /// Serves a call; `None`: it was killed meanwhile, and is to be started again after a time.
    fn serve(&mut self, session: SessionId, mut who: Who, op: Op) -> Result<Answer, Nanos> {
        let Some(service) = &self.service else { return Err(Nanos(0)) };
        match self.sabotage {
            Sabotage::NoReplies => {
                self.renumbered += 1;
                who.sequence = self.renumbered;
            }
            Sabotage::NoFence => (who.epoch, who.since) = (0, 0),
            Sabotage::StaleAnswers => {
                if let Op::Look { path } = op
                    && let Some(answer) = self.stale.remove(path)
                {
                    return Ok(answer);
                }
            }
            _ => {}
        }
        *self.disk.trouble.lock() = self.troubles.first().copied();
        let answer = service.call_from(session, who, op.call());
        self.idle();
        let left = self.disk.trouble.lock().take();
        if self.disk.is_dead.load(Ordering::SeqCst) {
            self.troubles.remove(0);
            let down = match left {
                Some((Trouble::Killed { down }, _)) => down,
                _ => Nanos(0),
            };
            return Err(down);
        }
        if left.is_none() && !self.troubles.is_empty() {
            self.troubles.remove(0);
        }
        if self.sabotage == Sabotage::StaleAnswers
            && let Op::Look { path } = op
        {
            self.stale.insert(path, answer.clone());
        }
        Ok(answer)
    }
}

struct Client {
    key: u64,
    epoch: Epoch,
    sequence: u64,
    routes: Routes,
    connection: Option<usize>,
}

struct Connection {
    client: usize,
    way: usize,
    /// The run of the server that it leads to, and its number there.
    run: u64,
    session: SessionId,
    is_open: bool,
    has_answered: bool,
    silence: Silence,
}

struct Operation {
    id: u64,
    op: Op,
    thread: usize,
    client: usize,
    call: Call,
    sequence: u64,
    called: Nanos,
    sent: Nanos,
    copies: u64,
    /// The connection on which its last copy is outstanding.
    on: Option<usize>,
    has_ended: bool,
}

#[derive(Clone, Debug)]
enum What {
    Next {
        thread: usize,
    },
    Send {
        operation: usize,
    },
    Connect {
        client: usize,
        way: usize,
    },
    Refused {
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
        answer: Answer,
    },
    Tick {
        operation: usize,
        copy: u64,
    },
    Pong {
        connection: usize,
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
    Start,
}

/// An operation of which nobody knows whether it was done: its event, client, and the epoch of its last copy.
struct GivenUp {
    event: usize,
    client: usize,
    epoch: u32,
}

pub struct World<'a> {
    plan: &'a Plan,
    now: Nanos,
    calendar: BinaryHeap<Reverse<(u64, u64, usize)>>,
    entries: Vec<Option<What>>,
    server: Server,
    clients: Vec<Client>,
    connections: Vec<Connection>,
    operations: Vec<Operation>,
    /// The next step of each thread.
    next: Vec<usize>,
    /// Until when nothing passes, by client and way.
    closed: BTreeMap<(usize, usize), Nanos>,
    given_up: Vec<GivenUp>,
    /// Copies that were answered with an error. A change that failed may be tried again under its number, so a second delivery
    /// of the same copy, which no connection makes, would be another try.
    failed: BTreeSet<(usize, u64)>,
    draws: u64,
    history: History,
}

/// Runs a plan.
pub fn run(plan: &Plan, sabotage: Sabotage) -> History {
    let client = |at: usize| Client {
        key: 7 + at as u64,
        epoch: Epoch::new(0),
        sequence: 0,
        routes: Routes::new(plan.ways, at),
        connection: None,
    };
    let mut world = World {
        plan,
        now: Nanos(0),
        calendar: BinaryHeap::new(),
        entries: Vec::new(),
        server: Server::new(sabotage),
        clients: (0..plan.clients).map(client).collect(),
        connections: Vec::new(),
        operations: Vec::new(),
        next: vec![0; plan.threads.len()],
        closed: BTreeMap::new(),
        given_up: Vec::new(),
        failed: BTreeSet::new(),
        draws: 0,
        history: History::new(),
    };
    world.server.start();
    for (fault, what) in plan.faults.iter().enumerate() {
        let (Fault::Kill { at_us, .. }
        | Fault::Cut { at_us, .. }
        | Fault::Partition { at_us, .. }
        | Fault::Full { at_us, .. }) = *what;
        world.schedule(Nanos(at_us * 1000), What::Fault { fault });
    }
    for thread in 0..plan.threads.len() {
        world.think(thread);
    }
    while let Some(Reverse((at, _, entry))) = world.calendar.pop() {
        world.now = Nanos(at);
        if let Some(what) = world.entries.get_mut(entry).and_then(Option::take) {
            world.happen(what);
        }
    }
    world.end()
}

impl World<'_> {
    fn schedule(&mut self, at: Nanos, what: What) {
        let entry = self.entries.len();
        self.entries.push(Some(what));
        self.calendar.push(Reverse((at.0.max(self.now.0), entry as u64, entry)));
    }

    fn after(&mut self, wait: Nanos, what: What) {
        self.schedule(Nanos(self.now.0 + wait.0), what);
    }

    /// Something passes between a client and a way of its.
    fn carry(&mut self, client: usize, way: usize, of: [u64; 3], what: What) {
        let opens = self.closed.get(&(client, way)).map_or(self.now.0, |until| until.0.max(self.now.0));
        let transit = self.plan.links.transit_ns(of);
        self.schedule(Nanos(opens + transit), what);
    }

    fn is_closed(&self, client: usize, way: usize) -> bool {
        self.closed.get(&(client, way)).is_some_and(|until| *until > self.now)
    }

    fn think(&mut self, thread: usize) {
        if let Some(step) = self.plan.threads[thread].steps.get(self.next[thread]) {
            self.after(Nanos(step.pause_us * 1000), What::Next { thread });
        }
    }

    fn happen(&mut self, what: What) {
        match what {
            What::Next { thread } => self.begin(thread),
            What::Send { operation } => self.send(operation),
            What::Connect { client, way } => self.connect(client, way),
            What::Refused { client } => {
                self.clients[client].routes.refused(self.now);
                self.wake(client);
            }
            What::Request { operation, connection, who, copy } => self.request(operation, connection, who, copy),
            What::Answer { operation, connection, answer } => self.answered(operation, connection, answer),
            What::Tick { operation, copy } => self.tick(operation, copy),
            What::Pong { connection } => {
                let here = &mut self.connections[connection];
                if here.is_open && here.run == self.server.run && self.server.service.is_some() {
                    here.silence.heard(self.now);
                }
            }
            What::Hangup { connection } => {
                let Connection { run, session, .. } = self.connections[connection];
                if let Some(service) = self.server.service.as_ref().filter(|_| run == self.server.run) {
                    service.close_session(session);
                    self.server.idle();
                }
            }
            What::Broken { connection } => self.break_off(connection),
            What::Fault { fault } => self.fault(self.plan.faults[fault]),
            What::Start => {
                self.server.start();
                self.history.restarts += 1;
            }
        }
    }

    fn fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill { step: Some(step), down_us, .. } => {
                self.server.troubles.push((Trouble::Killed { down: Nanos(down_us * 1000) }, step));
            }
            Fault::Kill { step: None, down_us, .. } => self.kill(Nanos(down_us * 1000)),
            Fault::Cut { client, .. } => {
                if let Some(connection) = self.clients[client].connection {
                    self.after(Nanos(0), What::Broken { connection });
                }
            }
            Fault::Partition { for_us, client, way, .. } => {
                self.closed.insert((client, way), Nanos(self.now.0 + for_us * 1000));
            }
            Fault::Full { step, .. } => self.server.troubles.push((Trouble::Full, step)),
        }
    }

    fn kill(&mut self, down: Nanos) {
        if self.server.service.take().is_none() {
            return;
        }
        for connection in 0..self.connections.len() {
            let Connection { client, way, run, .. } = self.connections[connection];
            if run == self.server.run {
                self.carry(client, way, [connection as u64, 0, 4], What::Broken { connection });
            }
        }
        self.after(down, What::Start);
    }

    fn begin(&mut self, thread: usize) {
        let step = self.plan.threads[thread].steps[self.next[thread]];
        self.next[thread] += 1;
        let client = self.plan.threads[thread].client;
        self.clients[client].sequence += 1;
        let changes = step.op.call().is_change();
        let rights = Rights { repeat: true, ours: true, bound: false, again_when_busy: true, changes };
        self.operations.push(Operation {
            id: step.id,
            op: step.op,
            thread,
            client,
            call: Call::new(rights, Nanos(self.now.0 + TIMEOUT.0)),
            sequence: self.clients[client].sequence,
            called: self.now,
            sent: self.now,
            copies: 0,
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
            return self.finish(operation, Seen::Unknown);
        }
        let Some(connection) = self.clients[client].connection else {
            match self.clients[client].routes.next(self.now, deadline, TIMEOUT) {
                Next::Late => self.finish(operation, Seen::Unknown),
                Next::Wait { until } => self.schedule(until, What::Send { operation }),
                Next::Connect { route, until } => {
                    self.draws += 1;
                    let takes = Nanos(self.plan.links.transit_ns([self.draws, 0, 5]));
                    let is_in_vain = self.is_closed(client, route) || self.now.0 + takes.0 > until.0;
                    match is_in_vain {
                        true => self.schedule(until, What::Refused { client }),
                        false => self.after(takes, What::Connect { client, way: route }),
                    }
                    self.schedule(deadline, What::Send { operation });
                }
            }
            return;
        };
        let Connection { way, .. } = self.connections[connection];
        let here = &mut self.operations[operation];
        let epoch = here.call.stamp(&self.clients[client].epoch);
        here.copies += 1;
        (here.on, here.sent) = (Some(connection), self.now);
        let (id, copy, since) = (here.id, here.copies, here.call.since());
        let who = Who {
            client: ClientKey(self.clients[client].key),
            epoch,
            since,
            sequence: here.sequence,
            ..Who::default()
        };
        let request = What::Request { operation, connection, who, copy };
        self.carry(client, way, [id, copy, 1], request.clone());
        let doubled = self.plan.links.doubled_of;
        if doubled > 0 && self.plan.links.number_of([id, copy, 6]).is_multiple_of(doubled) {
            self.carry(client, way, [id, copy, 2], request);
        }
        self.schedule(Nanos((self.now.0 + TICK.0).min(deadline.0)), What::Tick { operation, copy });
    }

    fn connect(&mut self, client: usize, way: usize) {
        let key = self.clients[client].key;
        let who = Who { client: ClientKey(key), epoch: self.clients[client].epoch.now(), ..Who::default() };
        let session = match &self.server.service {
            Some(service) if !self.is_closed(client, way) => service.open_session(who).ok(),
            _ => None,
        };
        match session {
            None => self.clients[client].routes.refused(self.now),
            Some(session) => {
                self.clients[client].routes.opened();
                self.clients[client].connection = Some(self.connections.len());
                let silence = Silence::new(self.now);
                let (run, is_open, has_answered) = (self.server.run, true, false);
                self.connections.push(Connection { client, way, run, session, is_open, has_answered, silence });
            }
        }
        self.wake(client);
    }

    /// Has the calls that wait for a connection look again.
    fn wake(&mut self, client: usize) {
        for operation in 0..self.operations.len() {
            let here = &self.operations[operation];
            if here.client == client && !here.has_ended && here.on.is_none() {
                self.schedule(self.now, What::Send { operation });
            }
        }
    }

    fn request(&mut self, operation: usize, connection: usize, who: Who, copy: u64) {
        let Connection { client, way, run, session, .. } = self.connections[connection];
        // It was on its way to a process that is no more.
        if run != self.server.run || self.server.service.is_none() {
            return self.carry(client, way, [connection as u64, copy, 4], What::Broken { connection });
        }
        if self.failed.contains(&(operation, copy)) {
            return;
        }
        let Operation { id, op, .. } = self.operations[operation];
        self.history.copies += 1;
        match self.server.serve(session, who, op) {
            Ok(answer) => {
                if matches!(answer, Answer::Fault(_)) {
                    self.failed.insert((operation, copy));
                }
                let answer = What::Answer { operation, connection, answer };
                self.carry(client, way, [id, copy, 3], answer);
            }
            Err(down) => self.kill(down),
        }
    }

    fn answered(&mut self, operation: usize, connection: usize, answer: Answer) {
        let Connection { client, is_open, .. } = self.connections[connection];
        if !is_open {
            return;
        }
        self.connections[connection].has_answered = true;
        self.connections[connection].silence.heard(self.now);
        if self.operations[operation].on != Some(connection) {
            return;
        }
        let Answer::Fault(refusal) = answer else {
            let seen = self.seen(operation, connection, answer);
            return self.finish(operation, seen);
        };
        let verdict = impresario_client::verdict(&refusal);
        let epoch = &self.clients[client].epoch;
        match self.operations[operation].call.answered(self.now, verdict, epoch) {
            Step::Again { at, elsewhere } => {
                self.operations[operation].on = None;
                if elsewhere {
                    self.break_off(connection);
                }
                self.schedule(at, What::Send { operation });
            }
            Step::Answer | Step::Fail(_) => {
                let seen = match refusal.errno {
                    libc::EIO => Seen::Unknown,
                    // Done by a copy before, and the file is gone since.
                    libc::ESTALE if matches!(self.operations[operation].op, Op::Create { .. }) => Seen::Unknown,
                    errno => Seen::Failed(errno),
                };
                self.finish(operation, seen);
            }
        }
    }

    fn seen(&mut self, operation: usize, connection: usize, answer: Answer) -> Seen {
        let Operation { id, op, .. } = self.operations[operation];
        if let Answer::Opened(opened) = &answer {
            let Connection { run, session, .. } = self.connections[connection];
            if let Some(service) = self.server.service.as_ref().filter(|_| run == self.server.run && id % 3 > 0) {
                service.call(session, MetaCall::Close { handle: opened.handle, wrote: id % 2 > 0 });
                self.server.idle();
            }
        }
        self.history.note(id, op, answer)
    }

    fn tick(&mut self, operation: usize, copy: u64) {
        let here = &self.operations[operation];
        let Some(connection) = here.on.filter(|_| !here.has_ended && here.copies == copy) else { return };
        let (client, deadline, sent) = (here.client, here.call.deadline(), here.sent);
        let is_late = self.now >= deadline;
        let patience = Patience::new(TIMEOUT, self.plan.ways > 1);
        let sign = self.connections[connection].silence.judge(self.now, sent, is_late, &patience);
        match sign {
            Sign::GiveUp(_) => return self.break_off(connection),
            Sign::Ping => {
                let way = self.connections[connection].way;
                self.carry(client, way, [connection as u64, self.now.0, 7], What::Pong { connection });
            }
            Sign::Wait => {}
        }
        if is_late {
            self.operations[operation].call.given_up(&self.clients[client].epoch);
            return self.finish(operation, Seen::Unknown);
        }
        self.schedule(Nanos((self.now.0 + TICK.0).min(deadline.0)), What::Tick { operation, copy });
    }

    /// The client leaves a connection.
    fn break_off(&mut self, connection: usize) {
        let here = &mut self.connections[connection];
        if !std::mem::replace(&mut here.is_open, false) {
            return;
        }
        let (client, way, has_answered) = (here.client, here.way, here.has_answered);
        let of_it = |operation: &Operation| operation.on == Some(connection) && !operation.has_ended;
        let lost: Vec<usize> =
            self.operations.iter().enumerate().filter(|(_, operation)| of_it(operation)).map(|(at, _)| at).collect();
        if !lost.is_empty() {
            self.clients[client].epoch.give_up();
        }
        self.clients[client].connection = None;
        self.clients[client].routes.lost(self.now, has_answered);
        self.carry(client, way, [connection as u64, 0, 8], What::Hangup { connection });
        for operation in lost {
            self.operations[operation].on = None;
            match self.operations[operation].call.lost(self.now, false) {
                Step::Again { at, .. } => self.schedule(at, What::Send { operation }),
                Step::Answer | Step::Fail(_) => self.finish(operation, Seen::Unknown),
            }
        }
    }

    fn finish(&mut self, operation: usize, seen: Seen) {
        let here = &mut self.operations[operation];
        (here.has_ended, here.on) = (true, None);
        let (client, epoch, thread) = (here.client, here.call.epoch(), here.thread);
        let is_certain = seen != Seen::Unknown;
        let has_changed_nothing = here.copies == 0 || !here.op.call().is_change();
        let told = Told { id: here.id, op: here.op, seen };
        if is_certain {
            self.revoked(client, epoch, &told.seen);
        }
        if is_certain || !has_changed_nothing {
            let (called, ended) = (self.operations[operation].called.0, is_certain.then_some(self.now.0));
            if !is_certain {
                self.given_up.push(GivenUp { event: self.history.events.len(), client, epoch });
            }
            self.history.events.push(Event { operation: told, called, ended, is_certain });
        }
        self.think(thread);
    }

    /// The server has answered in an epoch: what was given up in older ones is done by now, or never.
    fn revoked(&mut self, client: usize, epoch: u32, seen: &Seen) {
        // Nothing could be noted.
        if *seen == Seen::Failed(libc::ENOSPC) {
            return;
        }
        let (now, events) = (self.now.0, &mut self.history.events);
        self.given_up.retain(|given_up| {
            let is_over = given_up.client == client && given_up.epoch < epoch;
            if is_over {
                events[given_up.event].ended = Some(now);
            }
            !is_over
        });
    }

    fn end(mut self) -> History {
        let end = self.now.0 + 1;
        for given_up in self.given_up {
            self.history.events[given_up.event].ended = Some(end);
        }
        let service = self.server.service.take().expect("a server");
        self.history.look_at_all(&service, end + 1);
        drop(service);
        self.history.look_at_folder(self.server.dir.path(), &self.server.objects);
        self.history
    }
}
