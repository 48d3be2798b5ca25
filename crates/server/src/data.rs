//! The data server: calls become scheduled requests on one lane, batches become reads and writes of objects.

mod disk;
mod duty;
mod modelled;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use impresario_engine::{Engine, EngineConfig, Refused, Submission};
use impresario_node::Fence;
use impresario_sched::{ConnId, LaneId, Op, PolicySpec};
use impresario_wire::{Answer, Call, Fault, FileKey, Who};

use crate::connection::{Connection, Reply};
use crate::listener::{Incoming, Service, Vitals};
use crate::outbox::Bulk;
use crate::payload::{Slice, lock};
pub(crate) use disk::Disk;
use duty::{Came, Duty};

/// Clients whose epochs are remembered at least.
pub(crate) const FENCED_CLIENTS: usize = 4096;
/// How long the engine's last batches may take when the server stops.
const DRAIN_MAX: Duration = Duration::from_secs(5);

/// A request on its way through the engine.
pub(crate) struct Item {
    pub(crate) file: FileKey,
    pub(crate) payload: Option<Slice>,
    duty: Duty,
}

/// The data server's service.
pub struct DataServer {
    vitals: Vitals,
    engine: Arc<Engine<Item>>,
    disk: Arc<Disk>,
    fence: Mutex<Fence>,
}

impl DataServer {
    /// A server of `store`, scheduled as `engine` says; with a device model, `disk` has it in front.
    pub(crate) fn new(vitals: Vitals, disk: Arc<Disk>, engine: EngineConfig) -> Result<Arc<DataServer>, String> {
        let engine = EngineConfig { pieces: true, ..engine };
        let engine = Engine::new(engine, disk.clone()).map_err(|e| e.to_string())?;
        Ok(Arc::new(DataServer { vitals, engine, disk, fence: Mutex::new(Fence::new(FENCED_CLIENTS)) }))
    }

    /// Ends what is under way, for a bounded time; what is still queued is answered with EIO.
    pub(crate) fn stop(&self) {
        drop(self.engine.shutdown(DRAIN_MAX));
        self.disk.stop();
    }

    fn submit(&self, conn: ConnId, who: Who, op: Op, file: FileKey, range: (u64, u64), item: Item) {
        let (lane_offset, len) = range;
        let submission = Submission {
            op,
            file: file.0,
            lane: LaneId(0),
            file_offset: lane_offset,
            lane_offset,
            len,
            client: who.client.0,
            conn,
            job: who.job,
            user: who.user,
        };
        match self.engine.submit(submission, item) {
            Ok(_) => {}
            Err(Refused::Busy(item)) => {
                let message = format!("the queue of {} stayed full; raise queue_requests", self.vitals.name());
                item.duty.fulfil(Came::Failed(Fault { errno: libc::EBUSY, message }));
            }
            Err(Refused::Closed(item)) => {
                let message = format!("{} is stopping", self.vitals.name());
                item.duty.fulfil(Came::Failed(Fault { errno: libc::ESHUTDOWN, message }));
            }
        }
    }

    fn serve_unscheduled(&self, call: Call, reply: Reply) {
        match call {
            Call::ObjectStat { file } => self.disk.stat(file, reply),
            Call::Status => reply.send(&Answer::Text(self.status())),
            call @ Call::Explain { .. } => explain(&self.engine, &call, reply),
            Call::SetPolicy { name, params } => set_policy(&self.engine, name, params, reply),
            Call::SetDiskOrder { order } => self.disk.set_order(&order, reply),
            Call::ResetStatistics => {
                self.engine.reset_statistics();
                self.disk.reset_statistics();
                reply.send(&Answer::Done);
            }
            _ => {
                let message = format!("{} is a data server and does not take this call", self.vitals.name());
                reply.fault(libc::EOPNOTSUPP, message);
            }
        }
    }

    fn status(&self) -> String {
        let mut status = self.vitals.status();
        status.insert("engine".into(), crate::json(&self.engine.status()));
        self.disk.describe(&mut status);
        serde_json::Value::Object(status).to_string()
    }
}

impl Service for DataServer {
    type Session = ConnId;

    fn open(&self, connection: &Arc<Connection>) -> Result<ConnId, Fault> {
        connection.report_readiness(&self.engine);
        Ok(connection.id())
    }

    fn serve(&self, conn: &mut ConnId, request: Incoming, reply: Reply) {
        let Incoming { call, payload } = request;
        let payload_bytes = payload.as_ref().map_or(0, |p| p.len() as u64);
        let (who, file, op, range) = match call {
            Call::Read { who, file, lane_offset, len } => (who, file, Op::Read, (lane_offset, u64::from(len))),
            Call::Write { who, file, lane_offset } => (who, file, Op::Write, (lane_offset, payload_bytes)),
            Call::Sync { who, file } => (who, file, Op::Sync, (0, u64::MAX)),
            Call::Truncate { who, file, len } => (who, file, Op::Truncate, (len, u64::MAX)),
            Call::Unlink { who, file } => (who, file, Op::Unlink, (0, u64::MAX)),
            call => return self.serve_unscheduled(call, reply),
        };
        let checked = match op {
            Op::Read | Op::Write => check_range(range.0, range.1),
            Op::Truncate => check_range(range.0, 0),
            Op::Sync | Op::Unlink => Ok(()),
        };
        if let Err(fault) = checked {
            return reply.send(&Answer::Fault(fault));
        }
        if !lock(&self.fence).admit(who.client.0, who.epoch) {
            return reply.send(&Answer::Fault(stale(who)));
        }
        match (op, range.1) {
            // Nothing to schedule, and a batch is never empty.
            (Op::Read, 0) => reply.send_data(Bulk::None),
            (Op::Write, 0) => reply.send(&Answer::Written(0)),
            _ => {
                let payload = payload.map(|buffer| Slice::new(Arc::new(buffer), 0..payload_bytes as usize));
                self.submit(*conn, who, op, file, range, Item { file, payload, duty: Duty::Whole(reply) });
            }
        }
    }

    fn close(&self, conn: ConnId) {
        // Dropping their contexts answers nobody: the connection has ended.
        drop(self.engine.cancel_connection(conn));
    }
}

/// What the fence says of an older epoch.
pub(crate) fn stale(who: Who) -> Fault {
    let message =
        format!("a request of epoch {} came after the client had begun a newer one; it was not applied", who.epoch);
    Fault { errno: Fault::FENCED, message }
}

/// Refuses a range that no file can have.
pub(crate) fn check_range(offset: u64, len: u64) -> Result<(), Fault> {
    match offset.checked_add(len) {
        Some(end) if end <= i64::MAX as u64 => Ok(()),
        _ => {
            let message = format!("bytes {offset} and the {len} after it lie beyond the largest possible file");
            Err(Fault { errno: libc::EFBIG, message })
        }
    }
}

/// Tells what an engine's policy does with the requests that the call describes.
pub(crate) fn explain<T: Send>(engine: &Engine<T>, call: &Call, reply: Reply) {
    let Call::Explain { job, user, client, file, write } = *call else { return };
    let op = if write { Op::Write } else { Op::Read };
    let who = impresario_sched::Who { job, user: u64::from(user), client, file, op };
    let told = engine
        .explain(&who)
        .unwrap_or_else(|| format!("{} treats all applications, users and clients alike", engine.status().policy.name));
    reply.send(&Answer::Text(told));
}

/// Switches an engine's policy and answers.
pub(crate) fn set_policy<T: Send>(engine: &Engine<T>, name: String, params: Vec<(String, String)>, reply: Reply) {
    let spec = PolicySpec { name, params: params.into_iter().collect() };
    match engine.set_policy(&spec) {
        Ok(()) => {
            tracing::info!(policy = %spec, "switched");
            reply.send(&Answer::Done);
        }
        Err(refusal) => reply.fault(libc::EINVAL, refusal.to_string()),
    }
}
