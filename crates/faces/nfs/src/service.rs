//! From a record to the call it is: head, identity, repetition; then to the scheduler, or to a thread that serves it.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use impresario_backend::{Caller, Handle, SetAttr};
use impresario_base::folders;
use impresario_base::lock::Mutex;
use impresario_engine::workers::{Workers, waiting_elsewhere};
use impresario_engine::{Engine, Refused, Submission};
use impresario_foresight::Prediction;
use impresario_sched::{ConnId, LaneId, Naming, Op};
use rustc_hash::FxHashMap;

use crate::budget::Budget;
use crate::changes::Changes;
use crate::connection::{Connection, Receiver};
use crate::data::{Ahead, Item, Queued, What};
use crate::exports::{Export, Exports};
use crate::gather::Gathering;
use crate::handles::HandleKey;
use crate::mount::Mounts;
use crate::procedures::{self, fail};
use crate::protocol::{
    Answer, Change, HANDLE_MAX_BYTES, MOUNT_PROGRAM, NFS_PROGRAM, PROCEDURES, Stability, Status, VERSION, procedure,
    read_set, read_time,
};
use crate::records::Record;
use crate::replay::{Key, Replay, Seen};
use crate::reply::{Again, Reply};
use crate::rpc::{Acceptance, CallHead, Credential};
use crate::statistics::{MOUNT_PROCEDURES, Statistics};
use crate::verifier::Verifier;
use crate::xdr::{Garbage, Reader};

/// Space that the answers of calls without file data take at most, bytes; listings aside.
const ANSWER_BYTES: u64 = 5 << 10;
/// Space of the answer to a WRITE at most, bytes.
const WRITTEN_BYTES: u64 = 256;
/// A peer is complained of once in this time.
pub(crate) const QUIET: Duration = Duration::from_secs(60);
/// Peers remembered for that.
const PEERS_MAX: usize = 1024;

/// Everything that calls need.
pub struct Service {
    pub(crate) this: Weak<Service>,
    pub(crate) exports: Exports,
    pub(crate) key: HandleKey,
    pub(crate) verifier: Verifier,
    pub(crate) changes: Changes,
    pub(crate) gathering: Gathering,
    pub(crate) replay: Replay<Again>,
    pub(crate) mounts: Mounts,
    pub(crate) statistics: Statistics,
    pub(crate) budget: Arc<Budget>,
    /// Largest READ and WRITE, bytes.
    pub(crate) transfer_bytes: u32,
    /// Threads for names and attributes.
    pub(crate) names: Workers,
    /// Threads for what the scheduler has released; each lane has its own.
    pub(crate) data: Workers,
    pub(crate) engine: OnceLock<Arc<Engine<Queued>>>,
    /// Reads ahead of the clients, if it is to.
    pub(crate) ahead: Option<Ahead>,
    /// The policy lets predicted extents be read ahead.
    pub(crate) foresees: AtomicBool,
    /// Reads that the page cache has need not be scheduled, where that may be.
    pub(crate) cached_pass: bool,
    pub(crate) stopping: AtomicBool,
    pub(crate) complaints: AtomicU64,
    pub(crate) complained: Mutex<FxHashMap<IpAddr, Instant>>,
}

/// On whose behalf a call is looked at.
pub struct Asker<'a> {
    /// The server.
    pub service: &'a Service,
    /// The client's address and port.
    pub peer: std::net::SocketAddr,
    /// The user.
    pub credential: &'a Credential,
}

/// A node that a call names, and as whom it is used.
#[derive(Clone, Debug)]
pub struct Node {
    /// The export that it is of.
    pub export: Arc<Export>,
    /// The node.
    pub handle: Handle,
    /// As whom.
    pub caller: Caller,
}

/// A stable number of a client.
pub fn client_key(client: IpAddr) -> u64 {
    match client.to_canonical() {
        IpAddr::V4(address) => u64::from(address.to_bits()),
        IpAddr::V6(address) => {
            let bits = address.to_bits();
            (bits >> 64) as u64 ^ (bits as u64).rotate_left(17) | 1 << 63
        }
    }
}

impl Asker<'_> {
    /// The node of a handle that the client sent.
    pub fn node(&self, sealed: &[u8]) -> Answer<Node> {
        let (number, handle) = self.service.key.open(sealed)?;
        let export = self.service.exports.by_number(number).ok_or(Status::STALE)?;
        if !export.rules.admits(self.peer.ip(), self.peer.port()) {
            return Err(Status::ACCES);
        }
        let caller = export.rules.caller(self.credential);
        Ok(Node { export, handle, caller })
    }

    /// The same for a node that the call will change.
    pub fn node_to_change(&self, sealed: &[u8]) -> Answer<Node> {
        let node = self.node(sealed)?;
        if node.export.rules.access.read_only { Err(Status::ROFS) } else { Ok(node) }
    }

    /// The client as the scheduler and the changes know it.
    pub fn client(&self) -> u64 {
        client_key(self.peer.ip())
    }
}

/// A handle in the arguments.
pub fn handle<'a>(args: &mut Reader<'a>) -> Result<&'a [u8], Garbage> {
    args.opaque(HANDLE_MAX_BYTES)
}

/// Calls whose repetition is answered from memory: a second time they would fail, or undo what came after the first.
fn is_replayed(number: u32) -> bool {
    use procedure::*;
    matches!(number, SETATTR | WRITE | CREATE | MKDIR | SYMLINK | MKNOD | REMOVE | RMDIR | RENAME | LINK)
}

/// What of a call goes through the scheduler.
struct Scheduled {
    sealed: Range<usize>,
    op: Op,
    offset: u64,
    len: u64,
    what: Wanted,
}

enum Wanted {
    Read,
    Write { bytes: Range<usize>, stability: Stability },
    Sync,
    Resize { set: SetAttr, guard: Option<std::time::SystemTime> },
}

impl Service {
    /// True once it takes no more calls.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Space that an answer may take, bytes: as the call asks for it, within limits.
    fn answer_bytes(&self, head: &CallHead, args: Reader<'_>) -> u64 {
        let mut args = args;
        let mut asked = || -> Result<u32, Garbage> {
            handle(&mut args)?;
            args.u64()?; // offset or cookie
            if head.procedure == procedure::READ {
                return args.u32();
            }
            args.u64()?;
            if head.procedure == procedure::READDIRPLUS {
                args.u32()?;
            }
            args.u32()
        };
        let most = match (head.program, head.procedure) {
            (NFS_PROGRAM, procedure::READ) => self.transfer_bytes,
            (NFS_PROGRAM, procedure::READDIR | procedure::READDIRPLUS) => procedures::LISTING_MAX_BYTES,
            _ => return ANSWER_BYTES,
        };
        ANSWER_BYTES + u64::from(asked().unwrap_or(0).min(most))
    }

    fn dispatch(self: Arc<Self>, head: CallHead, at: usize, bytes: Vec<u8>, reply: Reply) {
        let most = match head.program {
            _ if head.refusal().is_some() => return reply.refuse(head.refusal().unwrap_or(Acceptance::SystemError)),
            NFS_PROGRAM => PROCEDURES.len(),
            MOUNT_PROGRAM => MOUNT_PROCEDURES.len(),
            _ => return reply.refuse(Acceptance::NoProgram),
        };
        if head.version != VERSION {
            return reply.refuse(Acceptance::NoVersion(VERSION, VERSION));
        }
        if head.procedure as usize >= most {
            return reply.refuse(Acceptance::NoProcedure);
        }
        if head.program == NFS_PROGRAM {
            match self.scheduled(&head, &bytes, at) {
                Ok(Some(scheduled)) => return self.schedule(&head, scheduled, bytes, reply),
                Ok(None) => {}
                Err(Garbage) => return reply.refuse(Acceptance::BadArguments),
            }
        }
        let of = reply.connection.id;
        let service = self.clone();
        self.names.run_for(
            of.into(),
            Box::new(move || {
                let asker = Asker { service: &service, peer: reply.connection.peer, credential: &head.credential };
                let (mut args, mut out) = (Reader::new(bytes.get(at..).unwrap_or_default()), reply.writer());
                // Those that hang, of any number of clients, do not take the threads of all.
                let served = waiting_elsewhere(|| match head.program {
                    MOUNT_PROGRAM => crate::mount::serve(&asker, head.procedure, &mut args, &mut out),
                    _ => procedures::serve(&asker, head.procedure, &mut args, &mut out),
                });
                match served {
                    Ok(status) => reply.send(out, None, status),
                    Err(Garbage) => reply.refuse(Acceptance::BadArguments),
                }
            }),
        );
    }

    /// What the scheduler is asked, if this is a call for it.
    fn scheduled(&self, head: &CallHead, bytes: &[u8], at: usize) -> Result<Option<Scheduled>, Garbage> {
        let mut args = Reader::new(bytes.get(at..).unwrap_or_default());
        // Where something lies that was just read.
        let place = |args: &Reader<'_>, len: usize| {
            let end = bytes.len() - args.rest().len() - crate::xdr::filling(len).len();
            end - len..end
        };
        if !matches!(head.procedure, procedure::READ | procedure::WRITE | procedure::COMMIT | procedure::SETATTR) {
            return Ok(None);
        }
        let len = handle(&mut args)?.len();
        let sealed = place(&args, len);
        let scheduled = match head.procedure {
            procedure::READ => {
                let (offset, count) = (args.u64()?, args.u32()?);
                Scheduled {
                    sealed,
                    op: Op::Read,
                    offset,
                    len: count.min(self.transfer_bytes).into(),
                    what: Wanted::Read,
                }
            }
            procedure::WRITE => {
                let (offset, count, stability) = (args.u64()?, args.u32()? as usize, Stability::read(&mut args)?);
                let len = args.opaque(bytes.len())?.len();
                let data = place(&args, len);
                if count > len {
                    return Err(Garbage);
                }
                let bytes = data.start..data.start + count;
                Scheduled { sealed, op: Op::Write, offset, len: count as u64, what: Wanted::Write { bytes, stability } }
            }
            procedure::COMMIT => {
                // The whole file: what is synced is synced.
                let _ = (args.u64()?, args.u32()?);
                Scheduled { sealed, op: Op::Sync, offset: 0, len: u64::MAX, what: Wanted::Sync }
            }
            _ => {
                let set = read_set(&mut args)?;
                let guard = args.optional(read_time)?;
                let Some(size) = set.size_bytes else { return Ok(None) };
                Scheduled { sealed, op: Op::Truncate, offset: size, len: u64::MAX, what: Wanted::Resize { set, guard } }
            }
        };
        args.end()?;
        Ok(Some(scheduled))
    }

    fn schedule(self: Arc<Self>, head: &CallHead, scheduled: Scheduled, bytes: Vec<u8>, reply: Reply) {
        let Scheduled { sealed, op, offset, len, what } = scheduled;
        let asker = Asker { service: &self, peer: reply.connection.peer, credential: &head.credential };
        let sealed = bytes.get(sealed).unwrap_or_default();
        let node = if op == Op::Read { asker.node(sealed) } else { asker.node_to_change(sealed) };
        let refuse = |reply: Reply, status| {
            let mut out = reply.writer();
            fail(&mut out, head.procedure, status);
            reply.send(out, None, status);
        };
        let node = match node {
            Ok(node) => node,
            Err(status) => return refuse(reply, status),
        };
        let beyond = offset.checked_add(if op.is_data() { len } else { 0 }).is_none_or(|end| end > i64::MAX as u64);
        if beyond && op != Op::Read {
            return refuse(reply, Status::FBIG);
        }
        let client = asker.client();
        let what = match what {
            Wanted::Read => What::Read,
            Wanted::Write { bytes: range, stability } => {
                What::Write { record: bytes, range, stability, gathered: None }
            }
            Wanted::Sync => What::Sync,
            Wanted::Resize { set, guard } => What::Resize { set, guard },
        };
        let submission = Submission {
            op,
            file: node.key(),
            lane: LaneId(node.export.lane),
            file_offset: offset,
            lane_offset: offset,
            len,
            client,
            conn: ConnId(reply.connection.id),
            job: client,
            user: node.caller.uid,
            naming: Naming { call: None, folders: folders::of(node.export.name.as_bytes()) },
            speculative: false,
        };
        let item = Item { node, file: submission.file, client, what, reply };
        if op.is_data() && len == 0 || beyond {
            // Nothing to schedule: a batch is never empty, and no file reaches so far.
            let (service, of) = (self.clone(), item.reply.connection.id);
            return self.names.run_for(of.into(), Box::new(move || crate::data::answer_empty(&service, offset, item)));
        }
        let Some(engine) = self.engine.get() else { return };
        let predictions = self.foresee(&submission, &item.node);
        let node = item.node.clone();
        let ahead = predictions.into_iter().map(|p| (submission.ahead(p.extent), Queued::Ahead(node.clone())));
        let Some(mut item) = self.pass(engine, &submission, item) else {
            // Speculations are not refused, they are dropped.
            drop(engine.submit_all(ahead));
            return;
        };
        // Of bytes that are lost from here on the client learns by another verifier.
        let verifier = self.verifier.get();
        let early = self.gather(&submission, &mut item);
        match engine.try_submit_ahead(submission, Queued::Call(item), ahead) {
            Ok(_) => {
                // Not before it is in line: the client's next call may be its COMMIT.
                if let Some(reply) = early {
                    let change = Change { before: None, after: None };
                    crate::data::answer_write(reply, submission.len, &change, Stability::Unstable, &verifier);
                }
            }
            Err(Refused::Busy(Queued::Ahead(_)) | Refused::Closed(Queued::Ahead(_))) => {}
            Err(Refused::Busy(Queued::Call(mut item))) => {
                if let Some(gathered) = crate::data::gathered_of(&mut item) {
                    gathered.over();
                }
                let reply = early.unwrap_or(item.reply);
                let mut out = reply.writer();
                fail(&mut out, head.procedure, Status::JUKEBOX);
                reply.send(out, None, Status::JUKEBOX);
            }
            // Dropped: its client asks the next server.
            Err(Refused::Closed(Queued::Call(item))) => drop(item),
        }
    }

    /// Gathers a write, if it may be; gives the answer that is to be sent once it is in line.
    fn gather(self: &Arc<Self>, write: &Submission, item: &mut Item) -> Option<Reply> {
        let What::Write { stability: Stability::Unstable, gathered, .. } = &mut item.what else { return None };
        if !self.gathering.is_on() || item.node.export.backend.has_page_cache() {
            return None;
        }
        let end = write.lane_offset.checked_add(write.len)?;
        let gathers = self.gathering.gather(self, item.file, &item.node.caller, write.len, end)?;
        match item.reply.take_answer(WRITTEN_BYTES) {
            Some(reply) => {
                *gathered = Some(gathers);
                Some(reply)
            }
            None => {
                gathers.over();
                None
            }
        }
    }

    /// A request came that will be scheduled. What should be read before it is asked for.
    fn foresee(&self, request: &Submission, node: &Node) -> Vec<Prediction> {
        let Some(ahead) = self.ahead.as_ref().filter(|_| self.foresees.load(Ordering::Relaxed)) else {
            return Vec::new();
        };
        if !node.export.backend.has_page_cache() {
            return Vec::new();
        }
        let extent = request.lane_offset..request.lane_offset.saturating_add(request.len);
        // A connection's requests are a process's or a mount's; their strides are looked for in each by itself.
        ahead.reading.observe(request.op, (request.file, node), extent, request.conn.0.into())
    }

    /// Whether memory is worth a look for what a read asks for.
    pub(crate) fn may_have(&self, read: &Item) -> bool {
        let has_cache = self.cached_pass && read.node.export.backend.has_page_cache();
        has_cache && read.reply.connection.cached.are_worth_a_try()
    }

    /// Answers a read that the page cache has and that need not be scheduled; else gives it back.
    fn pass(&self, engine: &Engine<Queued>, read: &Submission, item: Item) -> Option<Item> {
        if read.op != Op::Read || !self.may_have(&item) {
            return Some(item);
        }
        let Some(passing) = engine.pass(read) else { return Some(item) };
        let mut bytes = vec![0; read.len as usize];
        let got = item.node.read_cached(read.lane_offset, &mut bytes);
        item.reply.connection.cached.came(got.is_some());
        let Some(got) = got else { return Some(item) };
        bytes.truncate(got);
        passing.served(got as u64);
        let attr = item.node.known_attr();
        crate::data::answer_read((read.lane_offset, read.len), item, attr.as_ref(), &Arc::new(bytes), 0..got);
        None
    }

    pub(crate) fn complain_of(&self, client: IpAddr, log: impl FnOnce()) {
        self.complaints.fetch_add(1, Ordering::Relaxed);
        let (mut complained, now) = (self.complained.lock(), Instant::now());
        if complained.get(&client).is_some_and(|at| now.duration_since(*at) < QUIET) {
            return;
        }
        if complained.len() >= PEERS_MAX {
            complained.retain(|_, at| now.duration_since(*at) < QUIET);
        }
        if complained.len() < PEERS_MAX {
            complained.insert(client, now);
            drop(complained);
            log();
        }
    }
}

impl Receiver for Service {
    fn record(&self, connection: &Arc<Connection>, record: Record, patient: bool) -> Option<Record> {
        let service = self.this.upgrade()?;
        let mut reader = Reader::new(&record.bytes);
        let Ok(head) = CallHead::read(&mut reader) else {
            self.complain(connection, "it sent something that is no call");
            connection.close();
            return None;
        };
        let at = record.bytes.len() - reader.rest().len();
        let answer_bytes = self.answer_bytes(&head, reader);
        let mut record = record;
        let room = record.held.grow(answer_bytes);
        if !room && patient {
            return Some(record);
        }
        let Record { bytes, held } = record;
        let is_nfs = head.program == NFS_PROGRAM && (head.procedure as usize) < PROCEDURES.len();
        let begun_bytes = held.bytes();
        connection.begin(begun_bytes);
        let mut reply = Reply {
            service: service.clone(),
            connection: connection.clone(),
            xid: head.xid,
            row: if is_nfs { head.procedure as usize } else { PROCEDURES.len() + head.procedure as usize },
            user: match head.credential {
                Credential::Sys { uid, .. } => Some(uid),
                _ => None,
            },
            began: Instant::now(),
            held,
            begun_bytes,
            replay: None,
            read_bytes: 0,
            written_bytes: 0,
            sent: false,
        };
        if !room {
            if is_nfs && head.refusal().is_none() {
                let mut out = reply.writer();
                fail(&mut out, head.procedure, Status::JUKEBOX);
                reply.send(out, None, Status::JUKEBOX);
            } else {
                reply.refuse(Acceptance::SystemError);
            }
            return None;
        }
        if is_nfs && is_replayed(head.procedure) {
            let key = Key::of(connection.peer.ip(), head.xid, head.procedure, &bytes);
            match self.replay.see(key, reply, Reply::again) {
                Seen::New(new) => reply = new,
                Seen::Before(answer) => {
                    if let Some((again, answer)) = answer {
                        again.send(answer);
                    }
                    return None;
                }
            }
            reply.replay = Some(key);
        }
        service.dispatch(head, at, bytes, reply);
        None
    }

    fn readiness(&self, connection: &Connection, ready: bool) {
        if let Some(engine) = self.engine.get() {
            engine.note_readiness(ConnId(connection.id), ready);
        }
    }

    fn go_on(&self) {
        if let Some(engine) = self.engine.get() {
            engine.go_on();
        }
    }

    fn complain(&self, connection: &Connection, what: &str) {
        let peer = connection.peer;
        self.complain_of(peer.ip(), || tracing::warn!(%peer, "a client misbehaves: {what}; its connection is closed"));
    }
}
