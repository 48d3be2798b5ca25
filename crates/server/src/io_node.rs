//! The I/O node: clients' file ranges become scheduled requests, which are forwarded to the data servers, or to a folder
//! of a file system; metadata passes through unscheduled.

mod below;
mod family;
mod forward;
mod hung;
mod meta_proxy;
mod reading;
mod storage;
mod tree;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_client::Identity;
use impresario_engine::{Engine, EngineConfig, Refused, Submission};
use impresario_foresight::ALONE_MAX;
use impresario_layout::Piece;
use impresario_node::session::Fence;
use impresario_node::{Merging, core_requests, whole_request};
use impresario_sched::{ConnId, LaneId, Naming, Op, PolicySpec, PredictedQueues};
use impresario_wire::{Answer, Call, Fault, FileKey, SpaceChange, Who};

use crate::connection::{Connection, Reply};
use crate::data::check_range;
use crate::data_servers::DataServers;
use crate::earlier_runs::EarlierRuns;
use crate::grants::Limits;
use crate::listener::{Incoming, Service, Vitals, before_waiting};
use crate::members::{self, Turns};
use crate::outbox::Bulk;
use crate::owed::{Came, Owed};
use crate::payload::{Buffer, Slice};
use crate::peers::{Exchange, Peers};
use crate::readiness::MindsConnections;
use crate::request_trace::{RequestTrace, TraceSettings};
use crate::withheld::{Bell, GivenUp, Teller};
use crate::workers::{PATIENCE, Workers, waiting_elsewhere};
use family::Family;
use forward::Forwarder;
pub(crate) use forward::SYNCS_MAX;
use meta_proxy::MetaProxy;
pub(crate) use meta_proxy::Upstream;
use storage::{Cluster, Storage, Striping};
use tree::{Foreseen, OpenFile, TreeSession};
pub(crate) use tree::{Tree, TreeSettings};

/// How long the engine's last batches may take when the node stops.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// Clients that have raised their epochs and are remembered at least; of others the data servers know.
const FENCED_CLIENTS: usize = 4096;
/// Threads for what is not scheduled and has to ask data servers.
const UNSCHEDULED_THREADS: usize = 4;
/// Threads for clients' hints, so that hints take no threads from other requests.
const HINT_THREADS: usize = 2;
/// Hints that wait for such a thread at most; more are dropped.
const HINTS_MAX: usize = 64;
/// Reads up to this length are forwarded by a thread that receives for several clients, bytes.
const AT_ONCE_MAX_BYTES: u32 = 64 << 10;

/// A request, or its part on one data server, on its way through the engine.
pub(crate) struct Item {
    who: Who,
    file: FileKey,
    striping: Striping,
    /// The data server of its first byte, by its number in the layout.
    server: u16,
    /// The objects that the file is known to have.
    made: u64,
    /// Of an [`Op::Truncate`], which is all that an I/O node has of these: what is done to the space of (offset, length) of the
    /// file; of a part, to what of that is on its data server.
    change: Option<(SpaceChange, (u64, u64))>,
    /// Of a write: the bytes, in the order of the lane.
    payload: Bulk,
    answer: Answering,
}

/// Who is answered when it is done.
enum Answering {
    /// The client, of a read that needs one data server, or is not cut.
    Read(Owed),
    /// The client, of anything else.
    Whole(Reply),
    /// The request that this is the part number `.1` of.
    Part(Arc<Family>, usize),
    /// Nobody: no client has requested this read of the file yet.
    Nobody(Arc<OpenFile>),
}

/// How an I/O node is made.
pub(crate) struct IoSettings {
    /// The engine's limits; one lane per data server.
    pub(crate) engine: EngineConfig,
    /// Forwarded requests in flight at once.
    pub(crate) in_flight_requests: usize,
    /// What is merged into one forwarded request.
    pub(crate) merging: Merging,
    /// Requests merged into one at most.
    pub(crate) merge_requests: usize,
    /// Length of a merged request at most, bytes.
    pub(crate) merge_bytes: u64,
    /// Cut requests at the boundaries of data servers before they are scheduled.
    pub(crate) split: bool,
    /// Its traces.
    pub(crate) trace: TraceSettings,
    /// Traces of earlier runs.
    pub(crate) earlier_runs: Vec<PathBuf>,
    /// The I/O nodes that limits over all of them are shared with, and that take turns with this one.
    pub(crate) peers: Peers,
    /// After which a call without an answer fails.
    pub(crate) timeout: Duration,
}

/// What an I/O node stands in front of.
pub(crate) enum Below {
    /// The data servers of its cluster, and the metadata server.
    Cluster(DataServers, Upstream),
    /// A folder of a file system.
    Tree(Arc<Tree>, Arc<Identity>),
}

/// Who answers metadata calls.
enum Names {
    MetadataServer(Arc<Upstream>),
    Tree(Arc<Tree>),
}

/// The I/O node's service.
pub struct IoNode {
    vitals: Vitals,
    engine: Arc<Engine<Item>>,
    forwarder: Arc<Forwarder>,
    storage: Arc<dyn Storage>,
    split: bool,
    names: Names,
    fence: Mutex<Fence>,
    asked: Arc<MindsConnections>,
    unscheduled: Workers,
    hints: Workers,
    trace: Arc<RequestTrace<Item>>,
    runs: Arc<EarlierRuns>,
    limits: Exchange<Limits>,
    turns: Exchange<Turns>,
    teller: Teller,
}

/// What is kept for a client.
pub struct Session {
    connection: Arc<Connection>,
    /// Made with the first metadata call.
    meta: Option<NamesSession>,
}

/// What serves a client's metadata calls.
enum NamesSession {
    Proxy(MetaProxy),
    Tree(Arc<TreeSession>),
}

/// A request as it is taken apart from its call.
struct FileRequest {
    conn: ConnId,
    who: Who,
    file: FileKey,
    striping: Striping,
    made: u64,
    op: Op,
    change: Option<SpaceChange>,
    offset: u64,
    len: u64,
}

impl IoNode {
    pub(crate) fn new(vitals: Vitals, below: Below, settings: IoSettings) -> Result<Arc<IoNode>, String> {
        let asked = MindsConnections::new(&settings.engine.policy);
        let (lanes, is_sorted) = (settings.engine.lanes, settings.engine.sorted_below);
        let (storage, identity, names, states): (Arc<dyn Storage>, _, _, _) = match below {
            Below::Cluster(DataServers { striped, identity, states, .. }, upstream) => {
                let name = vitals.name().to_string();
                let cluster = Cluster { name, striped, servers: lanes, pool: vitals.pool().clone() };
                (Arc::new(cluster), identity, Names::MetadataServer(Arc::new(upstream)), Some(states))
            }
            Below::Tree(tree, identity) => (tree.clone(), identity, Names::Tree(tree), None),
        };
        let bell = Bell::default();
        let forwarder = Forwarder::new(vitals.clone(), storage.clone(), identity, &settings, &bell)
            .map_err(|error| format!("the system starts no thread: {error}"))?;
        let policy = settings.engine.policy.clone();
        storage.ahead().into_iter().for_each(|ahead| ahead.follow_policy(&policy));
        let lane_speculations = if storage.ahead().is_some() { ALONE_MAX } else { 0 };
        let engine = EngineConfig { lane_speculations, ..settings.engine };
        let engine = Engine::new(engine, forwarder.clone()).map_err(|e| e.to_string())?;
        forwarder.serve(&engine);
        // What the data servers hold of a file is not known here.
        let (space, holds) = (settings.trace.space, Box::new(|_| true));
        let foretell = Box::new({
            let (engine, storage) = (engine.clone(), storage.clone());
            move |queues: Option<Arc<PredictedQueues>>| {
                storage.ahead().into_iter().for_each(|ahead| ahead.foretell(queues.as_deref()));
                engine.foresee(queues);
            }
        });
        let runs = EarlierRuns::new(vitals.name(), space, settings.earlier_runs, holds, foretell);
        let trace = RequestTrace::new(vitals.name(), settings.trace, engine.clone());
        let limits = Exchange::of_limits(vitals.name(), settings.peers.clone(), &engine, &policy);
        let hung = Box::new({
            let forwarder = forwarder.clone();
            move || forwarder.hung_lanes()
        });
        let below = members::Below { lanes, hung, states, is_sorted };
        let turns = Exchange::of_turns(vitals.name(), settings.peers, &engine, below, &policy);
        let teller = Teller::start(bell, settings.timeout, {
            let (engine, forwarder) = (engine.clone(), forwarder.clone());
            move |waiting| {
                let below = forwarder.find_withheld(waiting);
                if !below.is_empty() || engine.may_withhold() {
                    let add = |item: &Item| {
                        let call = item.answer.call();
                        call.into_iter().for_each(|(connection, number)| waiting.add_call(connection, number));
                    };
                    engine.for_each_withheld(&|id| below.contains(&id), add);
                }
            }
        })?;
        Ok(Arc::new(IoNode {
            vitals,
            engine,
            forwarder,
            storage,
            split: settings.split,
            names,
            fence: Mutex::new(Fence::new(FENCED_CLIENTS)),
            asked,
            unscheduled: Workers::new("unscheduled", UNSCHEDULED_THREADS),
            hints: Workers::new("hints", HINT_THREADS),
            trace,
            runs,
            limits: limits.map_err(|e| e.to_string())?,
            turns: turns.map_err(|e| e.to_string())?,
            teller,
        }))
    }

    /// Ends what is under way, for a bounded time; what is still queued is answered with EIO.
    pub(crate) fn stop(&self) {
        self.limits.stop();
        self.turns.stop();
        self.teller.stop();
        drop(self.engine.shutdown(DRAIN_MAX));
        self.trace.end();
        self.runs.stop();
        self.forwarder.stop();
        if let Names::Tree(tree) = &self.names {
            tree.stop();
        }
        self.unscheduled.stop(PATIENCE);
        self.hints.stop(PATIENCE);
    }

    /// Checks and schedules a request.
    fn take(&self, request: FileRequest, payload: Option<Buffer>, reply: Reply) {
        if let Err(fault) = self.check(&request) {
            return reply.send(&Answer::Fault(fault));
        }
        match (request.op, self.split) {
            (Op::Read, _) if request.len == 0 => reply.send_data(Bulk::None),
            (Op::Write | Op::Truncate, _) if request.len == 0 => {
                reply.send(&Answer::FileWritten { bytes: 0, lanes: Vec::new() })
            }
            (_, false) => self.submit_whole(&request, payload, reply),
            (Op::Read | Op::Write, true) => self.submit_pieces(&request, payload, reply),
            (_, true) => {
                drop(self.foresee(&request));
                if let Some(change) = request.change.filter(|_| self.storage.splits_changes())
                    && change.changes_bytes()
                {
                    return self.submit_change(&request, change, reply);
                }
                self.submit_barriers(&request, reply);
            }
        }
    }

    /// A request came. What should be read before it is asked for.
    fn foresee(&self, request: &FileRequest) -> Vec<Foreseen> {
        let Some(ahead) = self.storage.ahead() else { return Vec::new() };
        let FileRequest { op, file, ref striping, offset, len, who, .. } = *request;
        ahead.observe(op, (file, &striping.layout), offset..offset.saturating_add(len), who.client.0)
    }

    /// Passes a hint on to the data servers, past the scheduler: it carries no data, and they order what comes of it. What comes
    /// of it here is scheduled.
    fn pass_hint(&self, request: FileRequest, reply: Reply) {
        if let Err(fault) = self.check(&request) {
            return reply.send(&Answer::Fault(fault));
        }
        if self.hints.waiting() >= HINTS_MAX {
            return reply.send(&Answer::Accepted(0));
        }
        let (storage, engine) = (self.storage.clone(), self.engine.clone());
        self.hints.run(Box::new(move || {
            let FileRequest { who, file, ref striping, offset, len, .. } = request;
            let taken = waiting_elsewhere(|| match storage.ahead() {
                Some(ahead) => Ok(ahead.hinted(file, offset..offset.saturating_add(len), who.client.0)),
                None => storage.prefetch(&who, file, &striping.layout, offset, len).map(|bytes| (bytes, Vec::new())),
            });
            let (bytes, fresh) = match taken {
                Ok(taken) => taken,
                Err(fault) => return reply.send(&Answer::Fault(fault)),
            };
            reply.send(&Answer::Accepted(bytes));
            let extent = whole_request(&striping.layout, offset, len);
            let hint = submission(&request, &extent);
            // Speculations are not refused, they are dropped.
            drop(engine.submit_all(fresh.into_iter().map(|of| speculation(&request, &hint, extent.server, of))));
        }));
    }

    fn check(&self, request: &FileRequest) -> Result<(), Fault> {
        if request.op != Op::Sync {
            check_range(request.offset, request.len)?;
        }
        match self.fence.lock().admit(request.who.client.0, request.who.epoch) {
            true => Ok(()),
            false => Err(crate::data::stale(request.who)),
        }
    }

    /// Unsplit, as in twins-2017: the lane is the data server of the first byte, offsets are those of the file.
    fn submit_whole(&self, request: &FileRequest, payload: Option<Buffer>, reply: Reply) {
        let payload = payload.map_or(Bulk::None, |b| {
            let len = b.len();
            Bulk::One(Slice::new(Arc::new(b), 0..len))
        });
        let extent = whole_request(&request.striping.layout, request.offset, request.len);
        let answer = match request.op {
            Op::Read => Answering::Read(Owed::read(reply, request.len)),
            _ => Answering::Whole(reply),
        };
        self.submit(request, extent, payload, answer, self.foresee(request));
    }

    /// Cut into one request per data server; answered when all are done.
    fn submit_pieces(&self, request: &FileRequest, payload: Option<Buffer>, reply: Reply) {
        let (payload, ahead) = (payload.map(Arc::new), self.foresee(request));
        let ranges: Vec<Piece> = core_requests(&request.striping.layout, request.offset, request.len, true).collect();
        if let ([range], Op::Read) = (&ranges[..], request.op) {
            return self.submit(request, *range, Bulk::None, Answering::Read(Owed::read(reply, request.len)), ahead);
        }
        let family = Family::of_data(request.striping.layout, request.offset, request.len, ranges.clone(), reply);
        for (index, range) in ranges.iter().enumerate() {
            let part = payload.as_ref().map_or(Bulk::None, |buffer| family.payload_of(range, buffer));
            self.submit(request, *range, part, Answering::Part(family.clone(), index), Vec::new());
        }
    }

    /// A change of bytes is cut as a write is: each data server does its part in the order in which that came.
    fn submit_change(&self, request: &FileRequest, change: SpaceChange, reply: Reply) {
        let layout = request.striping.layout;
        let ranges: Vec<Piece> = core_requests(&layout, request.offset, request.len, true).collect();
        let family = Family::of_change(layout, ranges.clone(), change.extends(), reply);
        for (index, range) in ranges.iter().enumerate() {
            self.submit(request, *range, Bulk::None, Answering::Part(family.clone(), index), Vec::new());
        }
    }

    /// A barrier on every data server of the file; the last one to be reached does the work.
    fn submit_barriers(&self, request: &FileRequest, reply: Reply) {
        let family = Family::of_barriers(request.striping.layout, reply);
        let layout = request.striping.layout;
        for k in 0..layout.pcount {
            let extent = Piece { server: layout.server_at(k), file_offset: 0, lane_offset: 0, len: u64::MAX };
            self.submit(request, extent, Bulk::None, Answering::Part(family.clone(), usize::from(k)), Vec::new());
        }
    }

    fn submit(&self, request: &FileRequest, extent: Piece, payload: Bulk, answer: Answering, ahead: Vec<Foreseen>) {
        let submission = submission(request, &extent);
        let ahead = ahead.into_iter().map(|of| speculation(request, &submission, extent.server, of));
        let FileRequest { who, file, ref striping, made, .. } = *request;
        let (striping, server) = (striping.clone(), extent.server);
        let change = request.change.map(|change| (change, (request.offset, request.len)));
        let item = Item { who, file, striping, server, made, change, payload, answer };
        let (item, errno, why) = match self.engine.submit_ahead(submission, item, ahead) {
            Ok(_) if self.engine.may_withhold() => return self.teller.ask(),
            Ok(_) => return,
            Err(Refused::Busy(item)) => (item, libc::EBUSY, "has a queue that stayed full; raise queue_requests"),
            Err(Refused::Closed(item)) => (item, libc::ESHUTDOWN, "is stopping"),
        };
        let message = format!("{} {why}", self.vitals.name());
        item.answer.fail(&Fault { errno, message });
    }

    fn serve_unscheduled(&self, call: Call, reply: Reply) {
        match call {
            Call::FileStat { file, layout } => {
                let storage = self.storage.clone();
                self.unscheduled.run(Box::new(move || match waiting_elsewhere(|| storage.stat(file, &layout)) {
                    Ok(info) => reply.send(&Answer::Object(info)),
                    Err(fault) => reply.send(&Answer::Fault(fault)),
                }));
            }
            Call::FileSeek { file, layout, made, from, to } => {
                let storage = self.storage.clone();
                let sought = move || waiting_elsewhere(|| storage.seek(file, &layout, made, from, to));
                self.unscheduled.run(Box::new(move || match sought() {
                    Ok(sought) => reply.send(&Answer::Sought(sought)),
                    Err(fault) => reply.send(&Answer::Fault(fault)),
                }));
            }
            Call::Grants => reply.send(&self.limits.report()),
            Call::Members => reply.send(&self.turns.report()),
            Call::Status => reply.send(&Answer::Text(self.status().to_string())),
            call @ Call::Explain { .. } => crate::data::explain(&self.engine, &call, reply),
            Call::SetPolicy { name, params, at_shared_ns } => {
                let spec = PolicySpec { name, params: params.into_iter().collect() };
                if crate::data::set_policy(&self.engine, &self.asked, &spec, at_shared_ns, reply) {
                    self.storage.ahead().into_iter().for_each(|ahead| ahead.follow_policy(&spec));
                    self.limits.follow(&spec);
                    self.turns.follow(&spec);
                    // Of those that wait already.
                    self.teller.ask();
                }
            }
            Call::Trace { on } => self.trace.serve(on, reply),
            Call::EarlierRuns { runs } => self.runs.serve(runs, reply),
            Call::ResetStatistics => {
                self.engine.reset_statistics();
                self.forwarder.reset_statistics();
                reply.send(&Answer::Done);
            }
            _ => reply
                .fault(libc::EOPNOTSUPP, format!("{} is an I/O node and does not take this call", self.vitals.name())),
        }
    }

    /// A client does not want calls any more that a limit withholds, here or behind this node.
    fn give_up(&self, session: &mut Session, calls: Vec<u64>, reply: Reply) {
        let given_up = GivenUp { conn: session.connection.id(), calls };
        if let Some(NamesSession::Proxy(proxy)) = &session.meta {
            proxy.give_up(&given_up);
        }
        let is_given_up =
            |item: &Item| item.answer.call().is_some_and(|(connection, number)| given_up.has_call(connection, number));
        for mut item in self.engine.cancel_where(is_given_up) {
            // Before the reply, with which the permission to hold it goes.
            item.payload = Bulk::None;
            item.answer.fail(&GivenUp::fault());
        }
        self.forwarder.give_up(&given_up);
        reply.send(&Answer::Done);
    }

    fn serve_names(&self, session: &mut Session, call: Call, reply: Reply) {
        let connection = &session.connection;
        let names = session.meta.get_or_insert_with(|| match &self.names {
            Names::MetadataServer(upstream) => NamesSession::Proxy(MetaProxy::new(upstream, connection)),
            Names::Tree(tree) => NamesSession::Tree(TreeSession::new(tree)),
        });
        match names {
            NamesSession::Proxy(proxy) => proxy.pass_on(&call, reply),
            NamesSession::Tree(tree) => tree.serve(call, reply),
        }
    }
}

/// A request, or its part `extent`, as the scheduler gets it.
fn submission(request: &FileRequest, extent: &Piece) -> Submission {
    Submission {
        op: request.op,
        file: request.file.0,
        lane: LaneId(request.striping.lane(extent.server)),
        file_offset: extent.file_offset,
        lane_offset: extent.lane_offset,
        len: extent.len,
        client: request.who.client.0,
        conn: request.conn,
        job: request.who.job,
        user: request.who.user,
        naming: Naming { call: None, folders: request.who.folders },
        speculative: false,
    }
}

/// The read of what a request or hint makes likely.
fn speculation(request: &FileRequest, after: &Submission, server: u16, of: Foreseen) -> (Submission, Item) {
    let FileRequest { who, file, ref striping, .. } = *request;
    let (striping, answer) = (striping.clone(), Answering::Nobody(of.file));
    let item = Item { who, file, striping, server, made: 0, change: None, payload: Bulk::None, answer };
    (after.ahead(of.extent), item)
}

impl Answering {
    /// Of anything but a read: the client has closed the connection, as far as this machine knows.
    fn client_is_gone(&self) -> bool {
        match self {
            Answering::Read(_) | Answering::Nobody(_) => false,
            Answering::Whole(reply) => reply.client_is_gone(),
            Answering::Part(family, _) => family.client_is_gone(),
        }
    }

    /// The call that it answers, by its connection and its number there.
    fn call(&self) -> Option<(&Arc<Connection>, u64)> {
        match self {
            Answering::Read(owed) => owed.reply().and_then(Reply::call),
            Answering::Whole(reply) => reply.call(),
            Answering::Part(family, _) => family.call(),
            Answering::Nobody(_) => None,
        }
    }

    /// Reports a failure.
    fn fail(self, fault: &Fault) {
        match self {
            Answering::Read(owed) => owed.fulfil(Came::Failed(fault.clone())),
            Answering::Whole(reply) => reply.send(&Answer::Fault(fault.clone())),
            Answering::Part(family, _) => family.part_failed(fault),
            Answering::Nobody(_) => {}
        }
    }
}

impl Service for IoNode {
    type Session = Session;

    fn serves_at_once(&self, call: &Call) -> bool {
        self.storage.takes_tasks() && matches!(call, Call::FileRead { len, .. } if *len <= AT_ONCE_MAX_BYTES)
    }

    /// Fewer forward more at a time; other threads receive the answers and send them on.
    fn watches(processors: usize) -> usize {
        processors / 2
    }

    fn begin_round(&self) {
        impresario_client::begin_round(before_waiting);
    }

    fn end_round(&self) {
        impresario_client::end_round();
    }

    fn open(&self, connection: &Arc<Connection>) -> Result<Session, Fault> {
        connection.report_readiness(&self.engine, &self.asked);
        Ok(Session { connection: connection.clone(), meta: None })
    }

    fn serve(&self, session: &mut Session, request: Incoming, reply: Reply) {
        let Incoming { call, payload } = request;
        let conn = session.connection.id();
        let striping = match &call {
            Call::FileRead { file, layout, .. }
            | Call::FileWrite { file, layout, .. }
            | Call::FileSync { file, layout, .. }
            | Call::FileChangeSpace { file, layout, .. }
            | Call::FilePrefetch { file, layout, .. } => self.storage.striping(*file, *layout),
            Call::Meta { .. } => return self.serve_names(session, call, reply),
            Call::GiveUp { calls } => return self.give_up(session, calls.clone(), reply),
            _ => return self.serve_unscheduled(call, reply),
        };
        let striping = match striping {
            Ok(striping) => striping,
            Err(fault) => return reply.send(&Answer::Fault(fault)),
        };
        let request = match call {
            Call::FileRead { who, file, made, offset, len, .. } => {
                FileRequest { conn, who, file, striping, made, op: Op::Read, change: None, offset, len: u64::from(len) }
            }
            Call::FileWrite { who, file, offset, .. } => {
                let len = payload.as_ref().map_or(0, |p| p.len() as u64);
                FileRequest { conn, who, file, striping, made: 0, op: Op::Write, change: None, offset, len }
            }
            Call::FileSync { who, file, .. } => {
                FileRequest { conn, who, file, striping, made: 0, op: Op::Sync, change: None, offset: 0, len: u64::MAX }
            }
            // A change that moves no data: it conflicts with what it covers, and passes the policy by.
            Call::FileChangeSpace { who, file, change, offset, len, .. } => {
                let change = Some(change);
                FileRequest { conn, who, file, striping, made: 0, op: Op::Truncate, change, offset, len }
            }
            Call::FilePrefetch { who, file, offset, len, .. } => {
                let len = len.min((i64::MAX as u64).saturating_sub(offset));
                let request =
                    FileRequest { conn, who, file, striping, made: 0, op: Op::Read, change: None, offset, len };
                return self.pass_hint(request, reply);
            }
            call => return self.serve_unscheduled(call, reply),
        };
        self.take(request, payload, reply);
    }

    fn close(&self, session: Session) {
        // Dropping their contexts sends no answer: the connection has ended. The proxy ends with it.
        drop(self.engine.cancel_connection(session.connection.id()));
        if let Some(NamesSession::Tree(tree)) = session.meta {
            tree.end();
        }
    }

    fn status(&self) -> serde_json::Value {
        let mut status = self.vitals.status();
        if let Names::Tree(tree) = &self.names {
            status.insert("tree".into(), tree.status());
        }
        status.insert("engine".into(), crate::json(&self.engine.status()));
        status.insert("loads".into(), crate::json(&self.engine.who_loads()));
        status.insert("limits".into(), self.limits.status());
        if let Some(turns) = self.turns.status() {
            status.insert("turns".into(), turns);
        }
        status.insert("forward".into(), self.forwarder.status());
        status.insert("split".into(), self.split.into());
        if let Some(ahead) = self.storage.ahead() {
            status.insert("read_ahead".into(), ahead.describe());
        }
        status.insert("trace".into(), self.trace.status());
        status.insert("earlier_runs".into(), self.runs.status());
        serde_json::Value::Object(status)
    }
}
