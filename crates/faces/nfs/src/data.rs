//! What the scheduler has released: batches become reads and writes of the backend, and their parts are answered; what
//! no client has requested yet is read into the page cache.
//!
//! A batch touches one file in one piece. Its parts are read in one call and divided, or written in one call; where that
//! fails, each part is tried alone, so that an error meets only the call that it concerns. Parts of different users are
//! never put together: the backend checks each user's rights.

use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use impresario_backend::{Attr, Errno, SetAttr};
use impresario_engine::workers::Workers;
use impresario_engine::{Executor, Outcome, PagedFile, ReadAhead, Started, Work, now};
use impresario_foresight::ALONE_MAX;
use impresario_sched::{Extent, Op, Request};

use crate::gather::Gathered;
use crate::handles::file_key;
use crate::procedures::{fail, set_attr};
use crate::protocol::{Change, Stability, Status, procedure, write_after, write_change};
use crate::reply::Reply;
use crate::service::{Node, Service};

/// What is on its way through the engine.
#[expect(clippy::large_enum_variant, reason = "nearly all are calls")]
pub enum Queued {
    /// A call.
    Call(Item),
    /// A part of this file is to be read before it is asked for.
    Ahead(Node),
}

/// A call on its way through the engine.
pub struct Item {
    /// The file, and as whom.
    pub node: Node,
    /// The scheduler's key of it.
    pub file: u64,
    /// The client.
    pub client: u64,
    /// What is asked.
    pub what: What,
    /// The answer that is owed.
    pub reply: Reply,
}

/// What is asked.
pub enum What {
    /// Bytes.
    Read,
    /// These bytes are to be written.
    Write {
        /// The record that they came in.
        record: Vec<u8>,
        /// Where in it.
        range: Range<usize>,
        /// How stable.
        stability: Stability,
        /// It was answered before it is done.
        gathered: Option<Gathered>,
    },
    /// All written bytes are to be stable.
    Sync,
    /// The length, and perhaps other attributes, are to be set.
    Resize {
        /// To these.
        set: SetAttr,
        /// If the file was last changed at this time.
        guard: Option<SystemTime>,
    },
}

/// Starts batches on the service's threads.
pub struct Data(pub Weak<Service>);

impl Executor<Queued> for Data {
    fn start(&self, work: Work<Queued>) -> Started<Queued> {
        let Some(service) = self.0.upgrade() else {
            drop(work);
            return Started::Pending;
        };
        if let Some(bytes) = in_memory(&service, &work.parts) {
            return perform_at_once(&service, work, bytes);
        }
        let (here, lane) = (service.clone(), u32::from(work.batch.extent.lane.0));
        match &service.ahead {
            Some(ahead) if work.parts.iter().all(|(_, queued)| matches!(queued, Queued::Ahead(_))) => {
                ahead.threads.run_for(lane.into(), Box::new(move || read_ahead(&here, work)));
            }
            _ => {
                let party = lane * KINDS + kind(work.batch.op);
                service.data.run_for(party.into(), Box::new(move || perform(&here, work)));
            }
        }
        Started::Pending
    }
}

/// All of a read that memory has, so that it need not wait for a thread behind reads that wait for a device. Where reads may
/// pass scheduling by, that was tried before; and where nothing is read ahead, the readers of a file are left in the order in
/// which they came, from which the kernel tells what to read next.
fn in_memory(service: &Service, parts: &[(Request, Queued)]) -> Option<Vec<u8>> {
    let ([(request, Queued::Call(item))] | [(request, Queued::Call(item)), (_, Queued::Ahead(_))]) = parts else {
        return None;
    };
    let reads_ahead = service.ahead.is_some() && service.foresees.load(Ordering::Relaxed);
    let passes = service.engine.get().is_none_or(|engine| engine.lets_pass());
    if request.op != Op::Read || !reads_ahead || passes || !service.may_have(item) {
        return None;
    }
    let mut bytes = vec![0; request.extent.len as usize];
    let got = item.node.read_cached(request.extent.lane_offset, &mut bytes);
    item.reply.connection.cached.came(got.is_some());
    bytes.truncate(got?);
    Some(bytes)
}

/// Answers the read of a batch, whose bytes these are.
fn perform_at_once(service: &Arc<Service>, work: Work<Queued>, bytes: Vec<u8>) -> Started<Queued> {
    let (started, bytes) = (now(), Arc::new(bytes));
    let bytes_done = bytes.len() as u64;
    for (request, queued) in work.parts {
        match queued {
            Queued::Call(item) => {
                let (attr, asked) = (item.node.known_attr(), (request.extent.lane_offset, request.extent.len));
                answer_read(asked, item, attr.as_ref(), &bytes, 0..bytes.len());
            }
            Queued::Ahead(node) => service.continue_reading(request, node, false),
        }
    }
    Started::Finished(work.ticket, Outcome { errno: 0, bytes_done, started, finished: now() })
}

/// Does a batch and answers its parts.
fn perform(service: &Arc<Service>, work: Work<Queued>) {
    let Work { batch, parts, ticket, .. } = work;
    let started = now();
    let mut outcome = Done::default();
    let (mut calls, mut along) = (Vec::with_capacity(parts.len()), None);
    for (request, queued) in parts {
        match queued {
            Queued::Call(item) => calls.push((request, item)),
            Queued::Ahead(node) => along = Some((request, node)),
        }
    }
    let mut reading =
        Reading { ahead: service.ahead.as_ref(), along: along.as_ref().map(|(r, _)| r.extent), begun: false };
    let mut parts = calls.into_iter().peekable();
    while let Some(first) = parts.next() {
        // What goes together: neighbours of one file and one user.
        let mut group = vec![first];
        let mut end = group[0].0.extent.end();
        while let Some(next) = parts.next_if(|(request, item)| {
            let of = &group[0].1.node;
            batch.op.is_data() && item.node.handle == of.handle && item.node.caller == of.caller
                // Writes touch; reads may also overlap.
                && (request.extent.lane_offset == end || batch.op == Op::Read && request.extent.lane_offset < end)
        }) {
            end = end.max(next.0.extent.end());
            group.push(next);
        }
        match batch.op {
            Op::Read => reading.read(group, end, &mut outcome),
            Op::Write => write(service, group, &mut outcome),
            Op::Sync => group.into_iter().for_each(|(_, item)| sync(service, item, &mut outcome)),
            Op::Truncate | Op::Unlink => group.into_iter().for_each(|(_, item)| resize(service, item, &mut outcome)),
        }
    }
    let (Done { errno, bytes_done }, reading_begun) = (outcome, reading.begun);
    ticket.complete(Outcome { errno, bytes_done, started, finished: now() });
    if let Some((request, node)) = along {
        service.continue_reading(request, node, reading_begun);
    }
}

/// Reads ahead into the page cache.
fn read_ahead(service: &Service, work: Work<Queued>) {
    let Work { parts, ticket, .. } = work;
    let (started, mut done) = (now(), Done::default());
    for (request, queued) in parts {
        let (Queued::Ahead(node), Some(ahead)) = (queued, &service.ahead) else { continue };
        let extent = request.extent.lane_offset..request.extent.end();
        match ahead.reading.fetch((node.key(), &node), extent) {
            Ok(()) => done.bytes_done += request.extent.len,
            // A request for these bytes will report an error itself.
            Err(error) => done.failed(error.into()),
        }
    }
    ticket.complete(Outcome { errno: done.errno, bytes_done: done.bytes_done, started, finished: now() });
}

impl Service {
    /// Has what is beyond a request read. What was asked for is answered; nothing waits for the rest.
    fn continue_reading(self: &Arc<Self>, request: Request, node: Node, begun: bool) {
        let Some(ahead) = &self.ahead else { return };
        let (here, extent) = (self.clone(), request.extent.lane_offset..request.extent.end());
        ahead.threads.run_for(request.extent.lane.0.into(), Box::new(move || here.read_along(&node, extent, begun)));
    }

    /// Reads what is beyond a request, unless that was begun with it, and takes note when it is there.
    fn read_along(&self, node: &Node, extent: Range<u64>, begun: bool) {
        let Some(ahead) = &self.ahead else { return };
        // A request for these bytes will report an error itself.
        drop(match begun {
            true => ahead.reading.follow((node.key(), node), &extent),
            false => ahead.reading.fetch((node.key(), node), extent),
        });
    }
}

/// Reads ahead of the clients, and the threads that wait for it.
pub struct Ahead {
    pub reading: ReadAhead,
    pub threads: Workers,
}

impl Ahead {
    /// At most so many bytes are read ahead and not yet asked for. Each lane has threads of its own.
    pub fn new(budget_bytes: u64, lanes: u16) -> Ahead {
        let threads = lane_threads("nfs-ahead", 2 * ALONE_MAX, lanes.into());
        Ahead { reading: ReadAhead::new(budget_bytes), threads }
    }
}

/// Threads for batches, `each` for every lane and kind of operation. A device that hangs takes no more than its own, and writes
/// to a page cache wait neither for reads of the device nor for syncs.
pub fn data_threads(each: u32, lanes: u16) -> Workers {
    lane_threads("nfs-data", each, u32::from(lanes) * KINDS)
}

fn lane_threads(name: &'static str, each: u32, parties: u32) -> Workers {
    let each = each as usize;
    Workers::fair(name, each * parties as usize, each)
}

/// Kinds of operations that do not wait for one another's threads.
const KINDS: u32 = 4;

fn kind(op: Op) -> u32 {
    match op {
        Op::Read => 0,
        Op::Write => 1,
        Op::Sync => 2,
        // Reads wait for the places that these take in their lane: they must not wait for syncs, which take none of them.
        Op::Truncate | Op::Unlink => 3,
    }
}

impl Node {
    /// What memory has of a read; nothing unless it has all of it.
    pub fn read_cached(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        self.export.backend.read_cached(&self.caller, &self.handle, offset, into)?.ok()
    }

    /// The scheduler's key of it.
    pub fn key(&self) -> u64 {
        file_key(self.export.number, &self.handle)
    }
}

impl PagedFile for Node {
    fn len_bytes(&self) -> u64 {
        self.known_attr().map_or(0, |attr| attr.size_bytes)
    }

    fn has(&self, at: u64) -> bool {
        self.export.backend.is_in_memory(&self.caller, &self.handle, at)
    }

    fn will_read(&self, range: Range<u64>) {
        self.export.backend.will_read(&self.handle, range.start, range.end.saturating_sub(range.start));
    }

    fn wait_for(&self, range: Range<u64>) -> io::Result<()> {
        let waited = self.export.backend.wait_for(&self.caller, &self.handle, range);
        waited.map_err(|error| io::Error::from_raw_os_error(error.0))
    }
}

/// What became of a batch.
#[derive(Default)]
struct Done {
    errno: i32,
    bytes_done: u64,
}

impl Done {
    fn failed(&mut self, error: Errno) {
        self.errno = if self.errno == 0 { error.0 } else { self.errno };
    }
}

/// The reads of a batch.
struct Reading<'a> {
    ahead: Option<&'a Ahead>,
    /// What nobody has asked for and that continues them.
    along: Option<Extent>,
    /// The kernel was told of it.
    begun: bool,
}

impl Reading<'_> {
    fn read(&mut self, group: Vec<(Request, Item)>, end: u64, done: &mut Done) {
        // Nobody waits for what clients asked that are gone.
        if group.iter().all(|(_, item)| item.reply.connection.is_closed()) {
            return;
        }
        let Some((first, item)) = group.first() else { return };
        let (start, node, file) = (first.extent.lane_offset, item.node.clone(), item.file);
        match self.bytes(&node, file, start..end) {
            Ok(bytes) => {
                let attr = node.attr();
                for (request, item) in group {
                    let from = ((request.extent.lane_offset - start) as usize).min(bytes.len());
                    let to = (from + request.extent.len as usize).min(bytes.len());
                    done.bytes_done += (to - from) as u64;
                    let range = (request.extent.lane_offset, request.extent.len);
                    answer_read(range, item, attr.as_ref(), &bytes, from..to);
                }
            }
            Err(error) if group.len() == 1 => {
                done.failed(error);
                let attr = node.attr();
                group.into_iter().for_each(|(_, item)| fail_read(item, attr.as_ref(), error.into()));
            }
            Err(_) => {
                for one in group {
                    let end = one.0.extent.end();
                    self.read(vec![one], end, done);
                }
            }
        }
    }

    /// From memory, else from the device; then together with what continues them.
    fn bytes(&mut self, node: &Node, file: u64, extent: Range<u64>) -> Result<Arc<Vec<u8>>, Errno> {
        let mut bytes = vec![0; (extent.end - extent.start) as usize];
        let mut cached = None;
        if let Some(ahead) = self.ahead.filter(|_| node.export.backend.has_page_cache()) {
            cached = node.read_cached(extent.start, &mut bytes);
            if cached.is_none() {
                ahead.reading.waited((file, node), &extent);
                if let Some(along) = self.along.filter(|along| along.lane_offset == extent.end) {
                    node.will_read(extent.start..along.end());
                    self.begun = true;
                }
            }
        }
        let backend = &node.export.backend;
        let got = match cached {
            Some(got) => got,
            None => backend.read(&node.caller, &node.handle, extent.start, &mut bytes)?,
        };
        bytes.truncate(got);
        Ok(Arc::new(bytes))
    }
}

/// Answers a READ of an offset and length with a part of `bytes`.
pub fn answer_read(
    (offset, len): (u64, u64),
    mut item: Item,
    attr: Option<&Attr>,
    bytes: &Arc<Vec<u8>>,
    range: Range<usize>,
) {
    let got = range.len() as u64;
    let eof = attr.map_or(got < len, |attr| offset + got >= attr.size_bytes);
    item.reply.read_bytes = got;
    let mut out = item.reply.writer();
    out.u32(0);
    write_after(&mut out, attr);
    out.u32(got as u32).bool(eof).u32(got as u32);
    item.reply.send(out, Some((bytes.clone(), range)), Status::OK);
}

fn fail_read(item: Item, attr: Option<&Attr>, status: Status) {
    let mut out = item.reply.writer();
    out.u32(status.0);
    write_after(&mut out, attr);
    item.reply.send(out, None, status);
}

fn write(service: &Service, group: Vec<(Request, Item)>, done: &mut Done) {
    let Some((first, item)) = group.first() else { return };
    let (offset, node, file) = (first.extent.lane_offset, item.node.clone(), item.file);
    let backend = &node.export.backend;
    let client = Some(item.client).filter(|client| group.iter().all(|(_, other)| other.client == *client));
    let stability = group.iter().map(|(_, item)| stability_of(item)).max().unwrap_or(Stability::File);
    // Before the write: of bytes that are lost meanwhile the writer learns.
    let verifier = service.verifier.get();
    let began = service.changes.begin(&node.handle, client);
    let before = node.attr();
    let stable = stability > Stability::Unstable;
    let written = match group.as_slice() {
        [(_, item)] => backend.write(&node.caller, &node.handle, offset, payload(item), stable),
        parts => {
            let mut bytes = Vec::with_capacity(parts.iter().map(|(_, item)| payload(item).len()).sum());
            parts.iter().for_each(|(_, item)| bytes.extend_from_slice(payload(item)));
            backend.write(&node.caller, &node.handle, offset, &bytes, stable)
        }
    };
    let after = node.attr();
    let change = Change { before: before.filter(|_| began.end()), after };
    match written {
        Ok(()) => {
            // What the strictest asked for is true of all.
            let committed = if stable { Stability::File } else { Stability::Unstable };
            if let Some(attr) = &change.after {
                service.gathering.wrote(file, &node.caller, attr.size_bytes);
            }
            for (request, mut item) in group {
                done.bytes_done += request.extent.len;
                match gathered_of(&mut item) {
                    Some(gathered) => gathered.over(),
                    None => answer_write(item.reply, request.extent.len, &change, committed, &verifier),
                }
            }
        }
        Err(_) if group.len() > 1 => group.into_iter().for_each(|one| write(service, vec![one], done)),
        Err(error) => {
            done.failed(error);
            // Of a stable write that the device failed, what else was not stable yet may be lost too.
            if stable && error.0 == libc::EIO {
                service.verifier.failed(file, error);
            }
            for (_, mut item) in group {
                match gathered_of(&mut item) {
                    Some(gathered) => gathered.failed(error),
                    None => changed(item, &change, Err(error.into()), |_| ()),
                }
            }
        }
    }
}

/// Answers a WRITE of `len` bytes that succeeded, or was gathered.
pub fn answer_write(mut reply: Reply, len: u64, change: &Change, committed: Stability, verifier: &[u8; 8]) {
    reply.written_bytes = len;
    let mut out = reply.writer();
    out.u32(0);
    write_change(&mut out, change);
    out.u32(len as u32).u32(committed as u32).array(verifier);
    reply.send(out, None, Status::OK);
}

/// The mark of a gathered write, taken out.
pub fn gathered_of(item: &mut Item) -> Option<Gathered> {
    match &mut item.what {
        What::Write { gathered, .. } => gathered.take(),
        _ => None,
    }
}

fn stability_of(item: &Item) -> Stability {
    match &item.what {
        What::Write { stability, .. } => *stability,
        _ => Stability::Unstable,
    }
}

fn payload(item: &Item) -> &[u8] {
    match &item.what {
        What::Write { record, range, .. } => record.get(range.clone()).unwrap_or_default(),
        _ => &[],
    }
}

fn sync(service: &Service, item: Item, done: &mut Done) {
    let backend = &item.node.export.backend;
    let before = item.node.attr();
    let synced = backend.sync(&item.node.handle);
    if let Err(error) = synced {
        done.failed(error);
        service.verifier.failed(item.file, error);
    }
    // A commit changes nothing that clients keep.
    let change = Change { before: None, after: item.node.attr().or(before) };
    let verifier = service.verifier.get();
    changed(item, &change, synced.map_err(Status::from), |out| {
        out.array(&verifier);
    });
}

fn resize(service: &Service, item: Item, done: &mut Done) {
    let began = service.changes.begin(&item.node.handle, Some(item.client));
    let before = item.node.attr();
    let set = match &item.what {
        What::Resize { set, guard } => set_attr(&item.node, set, *guard),
        _ => Ok(()),
    };
    // The scheduler has ordered it among the writes; for those behind it the length is no longer known.
    service.gathering.forget(item.file);
    if set.is_err() {
        done.failed(Errno(libc::EIO));
    }
    let after = item.node.attr();
    let change = Change { before: before.filter(|_| began.end()), after };
    changed(item, &change, set, |_| ());
}

/// Answers with what became of the file, then with the results.
fn changed(item: Item, change: &Change, done: Result<(), Status>, results: impl FnOnce(&mut crate::xdr::Writer)) {
    let mut out = item.reply.writer();
    let status = done.err().unwrap_or(Status::OK);
    out.u32(status.0);
    write_change(&mut out, change);
    if status == Status::OK {
        results(&mut out);
    }
    item.reply.send(out, None, status);
}

/// Answers a READ or WRITE of no bytes, or a READ beyond where any file ends.
pub fn answer_empty(service: &Service, offset: u64, item: Item) {
    let backend = &item.node.export.backend;
    match item.what {
        What::Read => {
            // Says whether the user may read, and whether it is a file.
            match backend.read(&item.node.caller, &item.node.handle, 0, &mut []) {
                Ok(_) => {
                    let attr = item.node.attr();
                    let mut out = item.reply.writer();
                    out.u32(0);
                    write_after(&mut out, attr.as_ref());
                    out.u32(0).bool(attr.is_none_or(|attr| offset >= attr.size_bytes)).u32(0);
                    item.reply.send(out, None, Status::OK);
                }
                Err(error) => {
                    let attr = item.node.attr();
                    fail_read(item, attr.as_ref(), error.into());
                }
            }
        }
        What::Write { .. } => {
            let written = backend.write(&item.node.caller, &item.node.handle, 0, &[], false);
            let change = Change { before: None, after: item.node.attr() };
            let verifier = service.verifier.get();
            let results = |out: &mut crate::xdr::Writer| {
                out.u32(0).u32(Stability::File as u32).array(&verifier);
            };
            changed(item, &change, written.map_err(Status::from), results);
        }
        _ => {
            let mut out = item.reply.writer();
            fail(&mut out, procedure::COMMIT, Status::FBIG);
            item.reply.send(out, None, Status::FBIG);
        }
    }
}
