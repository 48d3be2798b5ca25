//! The I/O node: clients' file ranges become scheduled requests, which are forwarded to the data servers;
//! metadata passes through unscheduled.

mod family;
mod forward;
mod meta_proxy;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use impresario_client::Striped;
use impresario_engine::{Engine, EngineConfig, Refused, Submission};
use impresario_layout::Layout;
use impresario_node::Fence;
use impresario_sched::{ConnId, LaneId, Op};
use impresario_wire::{Answer, Call, Fault, FileKey, Who};

use crate::connection::{Connection, Reply};
use crate::data::{FENCED_CLIENTS, check_range};
use crate::data_servers::DataServers;
use crate::listener::{Incoming, Service, Vitals};
use crate::outbox::Bulk;
use crate::payload::{Buffer, Slice, lock};
use crate::workers::{PATIENCE, Workers};
use family::Family;
use forward::Forwarder;
use meta_proxy::MetaProxy;
pub(crate) use meta_proxy::Upstream;

/// How long the engine's last batches may take when the node stops.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// Threads for what is not scheduled and has to ask data servers.
const UNSCHEDULED_THREADS: usize = 4;

/// A request, or its part on one data server, on its way through the engine.
pub(crate) struct Item {
    who: Who,
    file: FileKey,
    layout: Layout,
    /// Of a write: the bytes, in the order of the lane.
    payload: Bulk,
    answer: Answering,
}

/// Who is answered when it is done.
enum Answering {
    /// The client.
    Whole(Reply),
    /// The request that this is the part number `.1` of.
    Part(Arc<Family>, usize),
}

/// How an I/O node is made.
pub(crate) struct IoSettings {
    /// The engine's limits; one lane per data server.
    pub(crate) engine: EngineConfig,
    /// Forwarded requests in flight at once.
    pub(crate) in_flight_requests: usize,
    /// Neighbours merged into one forwarded request at most.
    pub(crate) merge_requests: usize,
    /// Length of a merged request at most, bytes.
    pub(crate) merge_bytes: u64,
    /// Cut requests at the boundaries of data servers before they are scheduled.
    pub(crate) split: bool,
    /// The metadata server.
    pub(crate) upstream: Upstream,
}

/// The I/O node's service.
pub struct IoNode {
    vitals: Vitals,
    engine: Arc<Engine<Item>>,
    forwarder: Arc<Forwarder>,
    striped: Arc<Striped>,
    servers: u16,
    split: bool,
    upstream: Arc<Upstream>,
    fence: Mutex<Fence>,
    unscheduled: Workers,
}

/// What is kept for a client.
pub struct Session {
    connection: Arc<Connection>,
    /// Made with the first metadata call.
    meta: Option<MetaProxy>,
}

/// A request as it is taken apart from its call.
struct Asked {
    conn: ConnId,
    who: Who,
    file: FileKey,
    layout: Layout,
    op: Op,
    offset: u64,
    len: u64,
}

impl IoNode {
    pub(crate) fn new(vitals: Vitals, data: DataServers, settings: IoSettings) -> Result<Arc<IoNode>, String> {
        let servers = settings.engine.lanes;
        let forwarder = Forwarder::new(vitals.clone(), &data, &settings);
        let engine = Engine::new(settings.engine, forwarder.clone()).map_err(|e| e.to_string())?;
        Ok(Arc::new(IoNode {
            vitals,
            engine,
            forwarder,
            striped: data.striped,
            servers,
            split: settings.split,
            upstream: Arc::new(settings.upstream),
            fence: Mutex::new(Fence::new(FENCED_CLIENTS)),
            unscheduled: Workers::new("unscheduled", UNSCHEDULED_THREADS),
        }))
    }

    /// Ends what is under way, for a bounded time; what is still queued is answered with EIO.
    pub(crate) fn stop(&self) {
        drop(self.engine.shutdown(DRAIN_MAX));
        self.forwarder.stop();
        self.unscheduled.stop(PATIENCE);
    }

    /// Checks and schedules a request.
    fn take(&self, asked: Asked, payload: Option<Buffer>, reply: Reply) {
        if let Err(fault) = self.check(&asked) {
            return reply.send(&Answer::Fault(fault));
        }
        match (asked.op, self.split) {
            (Op::Read, _) if asked.len == 0 => reply.send_data(Bulk::None),
            (Op::Write, _) if asked.len == 0 => reply.send(&Answer::Written(0)),
            (_, false) => self.submit_whole(&asked, payload, reply),
            (Op::Read | Op::Write, true) => self.submit_pieces(&asked, payload, reply),
            (_, true) => self.submit_barriers(&asked, reply),
        }
    }

    fn check(&self, asked: &Asked) -> Result<(), Fault> {
        let fault = |errno, message| Fault { errno, message };
        asked.layout.check().map_err(|e| fault(libc::EINVAL, format!("the file's layout is damaged: {e}")))?;
        if asked.layout.servers != self.servers {
            let (theirs, ours) = (asked.layout.servers, self.servers);
            let message = format!(
                "the file is striped in a cluster of {theirs} data servers, {} knows {ours}; \
                 use the same configuration everywhere",
                self.vitals.name()
            );
            return Err(fault(libc::EINVAL, message));
        }
        if asked.op.is_data() {
            check_range(asked.offset, asked.len)?;
        }
        match lock(&self.fence).admit(asked.who.client.0, asked.who.epoch) {
            true => Ok(()),
            false => Err(crate::data::stale(asked.who)),
        }
    }

    /// Unsplit, as in twins-2017: the lane is the data server of the first byte, offsets are those of the file.
    fn submit_whole(&self, asked: &Asked, payload: Option<Buffer>, reply: Reply) {
        let payload = payload.map_or(Bulk::None, |b| {
            let len = b.len();
            Bulk::One(Slice::new(Arc::new(b), 0..len))
        });
        let lane = asked.layout.locate(asked.offset).0;
        let place = Place { lane, file_offset: asked.offset, lane_offset: asked.offset, len: asked.len };
        self.submit(asked, place, payload, Answering::Whole(reply));
    }

    /// Cut into one request per data server; answered when all are done.
    fn submit_pieces(&self, asked: &Asked, payload: Option<Buffer>, reply: Reply) {
        let payload = payload.map(Arc::new);
        let ranges = asked.layout.lane_ranges(asked.offset, asked.len);
        let family = Family::of_data(asked.layout, asked.offset, asked.len, ranges.clone(), reply);
        for (index, range) in ranges.iter().enumerate() {
            let part = payload.as_ref().map_or(Bulk::None, |buffer| family.payload_of(range, buffer));
            let place = Place {
                lane: range.server,
                file_offset: range.file_offset,
                lane_offset: range.lane_offset,
                len: range.len,
            };
            self.submit(asked, place, part, Answering::Part(family.clone(), index));
        }
    }

    /// A barrier on every data server of the file; the last one to be reached does the work.
    fn submit_barriers(&self, asked: &Asked, reply: Reply) {
        let family = Family::of_barriers(asked.layout, reply);
        for k in 0..asked.layout.pcount {
            let place = Place { lane: asked.layout.server_at(k), file_offset: 0, lane_offset: 0, len: u64::MAX };
            self.submit(asked, place, Bulk::None, Answering::Part(family.clone(), usize::from(k)));
        }
    }

    fn submit(&self, asked: &Asked, place: Place, payload: Bulk, answer: Answering) {
        let submission = Submission {
            op: asked.op,
            file: asked.file.0,
            lane: LaneId(place.lane),
            file_offset: place.file_offset,
            lane_offset: place.lane_offset,
            len: place.len,
            client: asked.who.client.0,
            conn: asked.conn,
            job: asked.who.job,
            user: asked.who.user,
        };
        let item = Item { who: asked.who, file: asked.file, layout: asked.layout, payload, answer };
        let (item, errno, why) = match self.engine.submit(submission, item) {
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
                let striped = self.striped.clone();
                self.unscheduled.run(Box::new(move || match striped.stat(file, &layout) {
                    Ok(info) => reply.send(&Answer::Object(info)),
                    Err(error) => reply.send(&Answer::Fault(error.to_fault())),
                }));
            }
            Call::Status => reply.send(&Answer::Text(self.status())),
            call @ Call::Explain { .. } => crate::data::explain(&self.engine, &call, reply),
            Call::SetPolicy { name, params } => crate::data::set_policy(&self.engine, name, params, reply),
            Call::ResetStatistics => {
                self.engine.reset_statistics();
                self.forwarder.reset_statistics();
                reply.send(&Answer::Done);
            }
            _ => reply
                .fault(libc::EOPNOTSUPP, format!("{} is an I/O node and does not take this call", self.vitals.name())),
        }
    }

    fn status(&self) -> String {
        let mut status = self.vitals.status();
        status.insert("engine".into(), crate::json(&self.engine.status()));
        status.insert("forward".into(), self.forwarder.status());
        status.insert("split".into(), self.split.into());
        serde_json::Value::Object(status).to_string()
    }
}

/// Where a request acts, as the engine sees it.
struct Place {
    lane: u16,
    file_offset: u64,
    lane_offset: u64,
    len: u64,
}

impl Answering {
    /// Reports a failure.
    fn fail(self, fault: &Fault) {
        match self {
            Answering::Whole(reply) => reply.send(&Answer::Fault(fault.clone())),
            Answering::Part(family, _) => family.part_failed(fault),
        }
    }
}

impl Service for IoNode {
    type Session = Session;

    fn open(&self, connection: &Arc<Connection>) -> Result<Session, Fault> {
        connection.report_readiness(&self.engine);
        Ok(Session { connection: connection.clone(), meta: None })
    }

    fn serve(&self, session: &mut Session, request: Incoming, reply: Reply) {
        let Incoming { call, payload } = request;
        let conn = session.connection.id();
        let asked = match call {
            Call::FileRead { who, file, layout, offset, len } => {
                Asked { conn, who, file, layout, op: Op::Read, offset, len: u64::from(len) }
            }
            Call::FileWrite { who, file, layout, offset } => {
                let len = payload.as_ref().map_or(0, |p| p.len() as u64);
                Asked { conn, who, file, layout, op: Op::Write, offset, len }
            }
            Call::FileSync { who, file, layout } => {
                Asked { conn, who, file, layout, op: Op::Sync, offset: 0, len: u64::MAX }
            }
            Call::Meta(call) => {
                let proxy = session.meta.get_or_insert_with(|| MetaProxy::new(&self.upstream, &session.connection));
                return proxy.pass_on(call, reply);
            }
            call => return self.serve_unscheduled(call, reply),
        };
        self.take(asked, payload, reply);
    }

    fn close(&self, session: Session) {
        // Dropping their contexts answers nobody: the connection has ended. The proxy ends with it.
        drop(self.engine.cancel_connection(session.connection.id()));
    }
}
