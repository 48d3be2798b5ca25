//! The data server: calls become scheduled requests on one lane, batches become reads and writes of objects.

mod callers;
mod departure;
mod disk;
mod durability;
mod ledger;
mod losses;
mod modelled;
mod once;
#[cfg(test)]
mod simulated;
#[cfg(test)]
mod simulated_cluster;

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use impresario_engine::{Engine, EngineConfig, Passing, Refused, Submission};
use impresario_foresight::{ALONE_MAX, Prediction};
use impresario_sched::{ConnId, Does, LaneId, Naming, Op, PolicySpec, PredictedQueues, policy};
use impresario_wire::{Answer, Call, Extents, Fault, FileKey, HeldKeys, SpaceChange, Who};

use crate::connection::{Connection, Reply};
use crate::earlier_runs::EarlierRuns;
use crate::grants::Limits;
use crate::listener::{Incoming, Service, Vitals};
use crate::outbox::{Bulk, HELD_FRAME_BYTES, let_own_replies_go};
use crate::owed::{Came, Owed, Run, Shared, send_parts};
use crate::payload::{Buffer, Slice};
use crate::peers::{Exchange, Peers};
use crate::readiness::MindsConnections;
use crate::request_trace::{RequestTrace, TraceSettings};
use crate::withheld::{Bell, GivenUp, Teller};
use callers::Callers;
pub(crate) use departure::Departure;
pub(crate) use disk::{Disk, SYNCS_MAX};
use ledger::Ledger;
pub(crate) use ledger::stale;
use once::Origin;

/// How long the engine's last batches may take when the server stops.
const DRAIN_MAX: Duration = Duration::from_secs(5);
/// The part of their timeout for which clients wait for the end of a move: less than after which they give up a silent server.
const HOLD_PART: u32 = 3;

/// A request on its way through the engine.
pub(crate) struct Item {
    pub(crate) file: FileKey,
    pub(crate) payload: Option<Slice>,
    /// Of an [`Op::Truncate`] that leaves the bytes behind its range alone.
    change: Option<SpaceChange>,
    origin: Origin,
    owed: Owed,
}

/// The data server's service.
pub struct DataServer {
    vitals: Vitals,
    engine: Arc<Engine<Item>>,
    disk: Arc<Disk>,
    ledger: Ledger,
    callers: Callers,
    asked: Arc<MindsConnections>,
    /// The policy lets predicted extents be read ahead.
    foresees: AtomicBool,
    trace: Arc<RequestTrace<Item>>,
    runs: Arc<EarlierRuns>,
    limits: Exchange<Limits>,
    departure: Arc<Departure>,
    teller: Teller,
}

/// What became of a request that might pass scheduling by.
enum Passed<'a> {
    /// It was answered.
    Whole,
    /// So many bytes of it were; the rest is still owed.
    Part(Passing<'a, Item>, u64, Item),
    /// It was not.
    Not(Item),
}

impl DataServer {
    /// A server of `store`, scheduled as `engine` says; with a device model, `disk` has it in front. Clients wait for
    /// `timeout` at most for an answer.
    pub(crate) fn new(
        vitals: Vitals,
        disk: Arc<Disk>,
        engine: EngineConfig,
        trace: TraceSettings,
        earlier_runs: Vec<PathBuf>,
        peers: Peers,
        timeout: Duration,
    ) -> Result<Arc<DataServer>, String> {
        let asked = MindsConnections::new(&engine.policy);
        let lane_speculations = if disk.reads_ahead() { ALONE_MAX } else { 0 };
        let foresees = AtomicBool::new(policy::speculates(&engine.policy));
        let engine = EngineConfig { pieces: true, lane_speculations, ..engine };
        let policy = engine.policy.clone();
        let ledger = Ledger::open(disk.store(), disk.losses().clone());
        let ledger =
            ledger.map_err(|error| format!("the files `notes` and `syncing` in its folder cannot be used: {error}"))?;
        let engine = Engine::new(engine, disk.clone()).map_err(|e| e.to_string())?;
        let holds = Box::new({
            let disk = disk.clone();
            move |file| disk.holds(file)
        });
        let foretell = Box::new({
            let (engine, disk) = (engine.clone(), disk.clone());
            move |queues: Option<Arc<PredictedQueues>>| {
                disk.foretell(queues.as_deref());
                engine.foresee(queues);
            }
        });
        let runs = EarlierRuns::new(vitals.name(), trace.space, earlier_runs, holds, foretell);
        let trace = RequestTrace::new(vitals.name(), trace, engine.clone());
        let callers = Callers::default();
        let limits = Exchange::of_limits(vitals.name(), peers, &engine, &policy).map_err(|e| e.to_string())?;
        let departure = Arc::new(Departure::new(timeout / HOLD_PART));
        let teller = Teller::start(Bell::default(), timeout, {
            let engine = engine.clone();
            move |waiting| {
                engine.for_each_withheld(&|_| false, |item| {
                    item.owed.reply().into_iter().for_each(|reply| waiting.add(reply))
                });
            }
        })?;
        Ok(Arc::new(DataServer {
            vitals,
            engine,
            disk,
            ledger,
            callers,
            asked,
            foresees,
            trace,
            runs,
            limits,
            departure,
            teller,
        }))
    }

    /// Ends what is under way, for a bounded time; what is still queued is answered with EIO.
    pub(crate) fn stop(&self) {
        self.limits.stop();
        self.teller.stop();
        drop(self.engine.shutdown(DRAIN_MAX));
        self.trace.end();
        self.runs.stop();
        self.disk.stop();
    }

    fn submit(&self, conn: ConnId, who: Who, op: Op, range: (u64, u64), item: Item) {
        let ahead = self.foresee(op, item.file, range, who);
        let submission = submission(conn, who, op, item.file, range);
        let ahead = ahead.into_iter().map(|prediction| speculation(&submission, prediction.extent));
        match self.pass(&submission, item, &mut Run::default()) {
            Passed::Whole if ahead.len() == 0 => {}
            Passed::Whole => self.refuse(self.engine.submit_all(ahead)),
            Passed::Part(passing, bytes, item) => self.refuse(passing.schedule_rest(bytes, item, ahead)),
            Passed::Not(item) if ahead.len() == 0 => self.refuse(self.engine.submit(submission, item).err()),
            Passed::Not(item) => {
                self.refuse(self.engine.submit_all(std::iter::once((submission, item)).chain(ahead)));
            }
        }
        self.may_withhold();
    }

    /// A client does not want requests any more that a rule withholds.
    fn give_up(&self, given_up: &GivenUp, reply: Reply) {
        let is_given_up = |item: &Item| item.owed.reply().is_some_and(|reply| given_up.has(reply));
        for mut item in self.engine.cancel_where(is_given_up) {
            // Before the reply, with which the permission to hold it goes.
            item.payload = None;
            item.owed.fulfil(Came::Failed(GivenUp::fault()));
        }
        reply.send(&Answer::Done);
    }

    /// Requests were queued, which a rule may withhold.
    fn may_withhold(&self) {
        if self.engine.may_withhold() {
            self.teller.ask();
        }
    }

    /// Answers a read that the page cache has and that need not be scheduled, an extent of a list with the next ones, or a
    /// write that only goes there; else gives back what is to be scheduled.
    fn pass(&self, submission: &Submission, mut item: Item, run: &mut Run) -> Passed<'_> {
        if submission.op == Op::Write {
            return self.pass_write(submission, item);
        }
        if submission.op != Op::Read || !self.engine.lets_pass() || !self.disk.may_have() {
            return Passed::Not(item);
        }
        let Some(passing) = self.engine.pass(submission) else { return Passed::Not(item) };
        let (range, file) = ((submission.lane_offset, submission.len), item.file);
        let (passed, moved_bytes) = send_parts(range, &mut item.owed, run, |part| self.disk.read_at_once(file, part));
        match passed {
            0 => Passed::Not(item),
            _ if passed < submission.len => Passed::Part(passing, passed, item),
            _ => {
                passing.served(moved_bytes);
                Passed::Whole
            }
        }
    }

    fn pass_write(&self, submission: &Submission, mut item: Item) -> Passed<'_> {
        let range = (submission.lane_offset, submission.len);
        let Some(payload) = &item.payload else { return Passed::Not(item) };
        if !self.engine.lets_pass() || !self.disk.may_dirty(item.file, range) {
            return Passed::Not(item);
        }
        let Some(passing) = self.engine.pass(submission) else { return Passed::Not(item) };
        match self.disk.write_at_once(item.file, range.0, (&item.origin, payload)) {
            Some(loss) => {
                passing.served(range.1);
                // Before the reply, with which the permission to hold it goes.
                item.payload = None;
                item.owed.fulfil(Came::Written(range.1, loss));
                Passed::Whole
            }
            None => Passed::Not(item),
        }
    }

    fn foresee(&self, op: Op, file: FileKey, range: (u64, u64), who: Who) -> Vec<Prediction> {
        if !self.foresees.load(Relaxed) {
            return Vec::new();
        }
        self.disk.foresee(op, file, range, who.client.0)
    }

    /// Each extent of a list becomes a request; their answers are parts of one.
    fn submit_list(&self, conn: ConnId, who: Who, file: FileKey, extents: &Extents, reply: Reply) {
        let len = extents.iter().map(|extent| u64::from(extent.1)).sum();
        let shared = Shared::new(reply, len, true);
        let (mut at, mut passed, mut requests) = (0, Run::default(), Vec::new());
        for (offset, len) in extents.iter() {
            let len = u64::from(len);
            let owed = Owed::Part { shared: shared.clone(), at, len };
            at += len;
            let submission = submission(conn, who, Op::Read, file, (offset, len));
            let ahead = self.foresee(Op::Read, file, (offset, len), who);
            let ahead = ahead.into_iter().map(|prediction| speculation(&submission, prediction.extent));
            let item = Item { file, payload: None, change: None, origin: Origin::default(), owed };
            match self.pass(&submission, item, &mut passed) {
                Passed::Whole => requests.extend(ahead),
                Passed::Part(passing, bytes, item) => self.refuse(passing.schedule_rest(bytes, item, ahead)),
                Passed::Not(item) => requests.extend(std::iter::once((submission, item)).chain(ahead)),
            }
        }
        passed.send();
        if !requests.is_empty() {
            self.refuse(self.engine.submit_all(requests));
            self.may_withhold();
        }
    }

    /// The same of a write, whose bytes are back to back in the payload: answered once, when all extents are written.
    fn submit_written_list(
        &self,
        conn: ConnId,
        who: Who,
        (file, extents): (FileKey, &Extents),
        payload: Arc<Buffer>,
        origin: &Origin,
        reply: Reply,
    ) {
        let shared = Shared::new(reply, payload.len() as u64, false);
        let mut at = 0;
        let mut requests = Vec::with_capacity(extents.count() as usize);
        for (offset, len) in extents.iter() {
            let (from, len) = (at, u64::from(len));
            at += len;
            let owed = Owed::Part { shared: shared.clone(), at: from, len };
            let payload = Some(Slice::new(payload.clone(), from as usize..at as usize));
            let submission = submission(conn, who, Op::Write, file, (offset, len));
            let ahead = self.foresee(Op::Write, file, (offset, len), who);
            let ahead = ahead.into_iter().map(|prediction| speculation(&submission, prediction.extent));
            let item = Item { file, payload, change: None, origin: origin.clone(), owed };
            // None passes one before it, which it may overlap.
            let passed = if requests.is_empty() { self.pass_write(&submission, item) } else { Passed::Not(item) };
            match passed {
                Passed::Not(item) => requests.extend(std::iter::once((submission, item)).chain(ahead)),
                Passed::Whole | Passed::Part(..) => requests.extend(ahead),
            }
        }
        if !requests.is_empty() {
            self.refuse(self.engine.submit_all(requests));
            self.may_withhold();
        }
    }

    /// A client says what it will read: new to the server, that becomes speculations.
    fn take_hint(&self, conn: ConnId, who: Who, file: FileKey, extents: &Extents, reply: Reply) {
        if let Err(bad) = extents.check(u64::MAX) {
            return reply.fault(libc::EINVAL, bad.to_string());
        }
        if let Err(fault) = self.ledger.admit(self.disk.store(), who).map(drop) {
            return reply.send(&Answer::Fault(fault));
        }
        if !self.foresees.load(Relaxed) {
            return reply.send(&Answer::Accepted(0));
        }
        let (accepted, fresh) = self.disk.hinted(file, extents, who.client.0);
        reply.send(&Answer::Accepted(accepted));
        let hint = submission(conn, who, Op::Read, file, (0, 0));
        self.refuse(self.engine.submit_all(fresh.into_iter().map(|extent| speculation(&hint, extent))));
    }

    fn refuse(&self, refused: impl IntoIterator<Item = Refused<Item>>) {
        for refused in refused {
            let (item, errno, why) = match refused {
                Refused::Busy(item) => (item, libc::EBUSY, "has a queue that stayed full; raise queue_requests"),
                Refused::Closed(item) => (item, libc::ESHUTDOWN, "is stopping"),
            };
            let message = format!("{} {why}", self.vitals.name());
            item.owed.fulfil(Came::Failed(Fault { errno, message }));
        }
    }

    fn serve_unscheduled(&self, conn: ConnId, call: Call, reply: Reply) {
        match call {
            Call::Move(step) => reply.send(&self.step_of_move(conn, step)),
            Call::GiveUp { calls } => self.give_up(&GivenUp { conn, calls }, reply),
            Call::ObjectStat { file } => self.disk.stat(file, reply),
            Call::ObjectSeek { file, from, to } => self.disk.seek(file, from, to, reply),
            Call::ListObjects { from, max } => self.disk.list(from, max, reply),
            Call::Scrub { file, offset, max_bytes } => self.disk.scrub(file, offset, max_bytes, reply),
            Call::SetAside { who, file } => match self.ledger.admit(self.disk.store(), who) {
                Ok(_passing) if self.departure.holds(conn) => {
                    reply.fault(libc::EBUSY, format!("{} is moving; try again", self.vitals.name()));
                }
                Ok(_passing) => self.disk.set_aside(file, reply),
                Err(fault) => reply.send(&Answer::Fault(fault)),
            },
            Call::Grants => reply.send(&self.limits.report()),
            Call::Status => reply.send(&Answer::Text(self.status().to_string())),
            call @ Call::Explain { .. } => explain(&self.engine, &call, reply),
            Call::SetPolicy { name, params, at_shared_ns } => {
                let spec = PolicySpec { name, params: params.into_iter().collect() };
                if set_policy(&self.engine, &self.asked, &spec, at_shared_ns, reply) {
                    let foresees = policy::speculates(&spec);
                    self.foresees.store(foresees, Relaxed);
                    if !foresees {
                        self.disk.rest();
                    }
                    self.limits.follow(&spec);
                    // Of those that wait already.
                    self.teller.ask();
                }
            }
            Call::SetDiskOrder { order } => self.disk.set_order(&order, reply),
            Call::Trace { on } => self.trace.serve(on, reply),
            Call::EarlierRuns { runs } => self.runs.serve(runs, reply),
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
}

impl Service for DataServer {
    type Session = ConnId;

    const ANSWERS_TOGETHER: bool = true;

    fn serves_at_once(&self, call: &Call) -> bool {
        matches!(call, Call::Read { len, .. } if *len as usize <= HELD_FRAME_BYTES)
    }

    fn held_keys(&self) -> HeldKeys {
        let marks = self.disk.store().key_marks();
        // A prefix has as many bits as a key has above its count.
        HeldKeys {
            by_prefix: marks.by_prefix.iter().map(|(prefix, below)| (*prefix as u32, *below)).collect(),
            others: marks.others,
        }
    }

    fn open(&self, connection: &Arc<Connection>) -> Result<ConnId, Fault> {
        if let Some(fault) = self.departure.refusal(self.vitals.name()) {
            return Err(fault);
        }
        connection.report_readiness(&self.engine, &self.asked);
        self.callers.add(connection, self.disk.store().removals().0);
        Ok(connection.id())
    }

    fn serve(&self, conn: &mut ConnId, request: Incoming, reply: Reply) {
        let Incoming { call, payload } = request;
        if !matches!(call, Call::Read { .. }) {
            let_own_replies_go();
        }
        let is_apart = matches!(call, Call::Move(_) | Call::Status);
        if !is_apart && self.departure.holds(*conn) && !self.departure.wait(*conn) {
            return reply.forget();
        }
        let payload_bytes = payload.as_ref().map_or(0, |p| p.len() as u64);
        let (mut others, mut change, mut list) = (Vec::new(), None, None);
        let (who, file, op, range) = match call {
            Call::ReadList { who, file, extents } => {
                // Reads change nothing: they need not be with the scheduler before their client's next epoch.
                if let Err(fault) = self.ledger.admit(self.disk.store(), who).map(drop) {
                    return reply.send(&Answer::Fault(fault));
                }
                return self.submit_list(*conn, who, file, &extents, reply);
            }
            Call::Prefetch { who, file, extents } => return self.take_hint(*conn, who, file, &extents, reply),
            Call::Read { who, file, lane_offset, len } => (who, file, Op::Read, (lane_offset, u64::from(len))),
            Call::Write { who, file, lane_offset } => (who, file, Op::Write, (lane_offset, payload_bytes)),
            Call::WriteMerged { who, others: with, file, lane_offset } => {
                others = with;
                (who, file, Op::Write, (lane_offset, payload_bytes))
            }
            Call::WriteList { who, others: with, file, extents } => {
                match extents.check(u64::MAX) {
                    Ok(bytes) if bytes == payload_bytes => {}
                    Ok(bytes) => {
                        let what = format!("the extents of the list have {bytes} bytes, its payload {payload_bytes}");
                        return reply.fault(libc::EINVAL, what);
                    }
                    Err(bad) => return reply.fault(libc::EINVAL, bad.to_string()),
                }
                (others, list) = (with, Some(extents));
                (who, file, Op::Write, (0, payload_bytes))
            }
            Call::Sync { who, file } => (who, file, Op::Sync, (0, u64::MAX)),
            Call::Truncate { who, file, len } => (who, file, Op::Truncate, (len, u64::MAX)),
            // Conflicts with what it covers, as every change does, and passes policies by: it moves no data.
            Call::ChangeSpace { who, file, change: how, lane_offset, len } => {
                change = Some(how);
                (who, file, Op::Truncate, (lane_offset, len))
            }
            Call::Unlink { who, file } => {
                self.callers.removed(self.disk.store().removals());
                (who, file, Op::Unlink, (0, u64::MAX))
            }
            call => return self.serve_unscheduled(*conn, call, reply),
        };
        let checked = match op {
            Op::Read | Op::Write => check_range(range.0, range.1),
            Op::Truncate => check_range(range.0, if change.is_some() { range.1 } else { 0 }),
            Op::Sync | Op::Unlink => Ok(()),
        };
        if let Err(fault) = checked {
            return reply.send(&Answer::Fault(fault));
        }
        let passing = loop {
            let passing = match self.ledger.admit_all(self.disk.store(), who, &others) {
                Ok(passing) => (op != Op::Read).then_some(passing),
                Err(fault) => return reply.send(&Answer::Fault(fault)),
            };
            // Again: a hold counts on all that it does not see here being with the scheduler.
            if !self.departure.holds(*conn) {
                break passing;
            }
            drop(passing);
            if !self.departure.wait(*conn) {
                return reply.forget();
            }
        };
        match (op, range.1) {
            // Nothing to schedule, and a batch is never empty.
            (Op::Read, 0) => reply.send_data(Bulk::None),
            (Op::Write | Op::Truncate, 0) => reply.send(&Answer::Written(0)),
            _ => {
                if op == Op::Sync {
                    self.ledger.tidy(self.disk.store());
                }
                let payload = payload.map(Arc::new);
                let origin = Origin::new(who, &others);
                if let (Some(extents), Some(payload)) = (list, &payload) {
                    let payload = payload.clone();
                    return self.submit_written_list(*conn, who, (file, &extents), payload, &origin, reply);
                }
                let payload = payload.map(|buffer| Slice::new(buffer, 0..payload_bytes as usize));
                let owed = Owed::Whole { reply, len: range.1, reads: op == Op::Read };
                self.submit(*conn, who, op, range, Item { file, payload, change, origin, owed });
            }
        }
        drop(passing);
    }

    fn close(&self, conn: ConnId) {
        // Dropping their contexts sends no answer: the connection has ended.
        drop(self.engine.cancel_connection(conn));
    }

    fn status(&self) -> serde_json::Value {
        let mut status = self.vitals.status();
        status.insert("engine".into(), crate::json(&self.engine.status()));
        status.insert("loads".into(), crate::json(&self.engine.who_loads()));
        status.insert("limits".into(), self.limits.status());
        status.insert("move".into(), self.departure.describe().into());
        status.insert("trace".into(), self.trace.status());
        status.insert("earlier_runs".into(), self.runs.status());
        self.disk.describe(&mut status);
        serde_json::Value::Object(status)
    }
}

fn submission(conn: ConnId, who: Who, op: Op, file: FileKey, (offset, len): (u64, u64)) -> Submission {
    Submission {
        op,
        file: file.0,
        lane: LaneId(0),
        file_offset: offset,
        lane_offset: offset,
        len,
        client: who.client.0,
        conn,
        job: who.job,
        user: who.user,
        naming: Naming { call: None, folders: who.folders },
        speculative: false,
    }
}

/// The read of a predicted extent, on the heels of a request or hint.
fn speculation(after: &Submission, extent: Range<u64>) -> (Submission, Item) {
    let item =
        Item { file: FileKey(after.file), payload: None, change: None, origin: Origin::default(), owed: Owed::Nothing };
    (after.ahead(extent), item)
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
    let Call::Explain { job, user, client, file, ref op, folders } = *call else { return };
    let Some(does) = Does::named(op) else {
        return reply.fault(libc::EINVAL, format!("there is no operation {op:?} in rules"));
    };
    let (op, call) = does.parts();
    let who = impresario_sched::Who { job, user: u64::from(user), client, file, op, naming: Naming { call, folders } };
    let told = engine
        .explain(&who)
        .unwrap_or_else(|| format!("{} treats all applications, users and clients alike", engine.status().policy.name));
    reply.send(&Answer::Text(told));
}

/// Switches an engine's policy, now or at an instant of shared time, and answers; whether it was accepted.
pub(crate) fn set_policy<T: Send>(
    engine: &Engine<T>,
    asked: &MindsConnections,
    spec: &PolicySpec,
    at_shared_ns: i64,
    reply: Reply,
) -> bool {
    match engine.set_policy_at(spec, at_shared_ns) {
        Ok(()) => {
            // Before the instant this only limits, or no longer limits, what waits to be sent.
            asked.follow(spec);
            tracing::info!(policy = %spec, at_shared_ns, "switch accepted");
            reply.send(&Answer::Done);
            true
        }
        Err(refusal) => {
            reply.fault(libc::EINVAL, refusal.to_string());
            false
        }
    }
}
