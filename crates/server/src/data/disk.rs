//! What a data server's batches do: one read or write of an object each, at once where the page cache has it,
//! else on one of a few threads; answered when the modelled device in front, if any, is done.

use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::atomic::Ordering::{AcqRel, Relaxed};
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use impresario_base::lock::Mutex;
use impresario_device as device;
use impresario_engine::{CachedReads, Executor, Outcome, PagedFile, ReadAhead, Started, Ticket, Work, now};
use impresario_foresight::{ALONE_MAX, Prediction};
use impresario_sched::{Extent, Nanos, Op, PredictedQueues, Request};
use impresario_store::{FileState, Job, ModelledDevice, ObjectPage, ObjectStore, Timing};
use impresario_wire::{Answer, Extents, Fault, FileKey, ObjectEntry, ObjectInfo, ScrubbedPiece, Time};
use serde_json::{Map, Value, json};

use super::Item;
use super::losses::Losses;
use super::modelled::{Memory, Performed, Rendezvous};
use super::owed::{Came, Owed, Run};
use crate::connection::Reply;
use crate::fsck::PIECE_BYTES;
use crate::listener::Vitals;
use crate::outbox::hand_over_own_replies;
use crate::payload::Slice;
use crate::workers::{PATIENCE, Workers};

/// Threads for batches that wait for a real device.
const DEVICE_THREADS: usize = 16;

/// How long checksums wait in memory for a client's sync.
const SETTLE_EVERY: Duration = Duration::from_secs(5);

/// Objects in one page of a listing.
const PAGE_OBJECTS_MAX: usize = 4096;

/// The folder of objects, and what is in front of it.
pub(crate) struct Disk {
    this: Weak<Disk>,
    vitals: Vitals,
    store: ObjectStore,
    losses: Arc<Losses>,
    device: Option<Arc<ModelledDevice>>,
    threads: Workers,
    /// Whether reads that the page cache has are worth looking for before they are scheduled, where they may be.
    cached: Option<CachedReads>,
    /// Reads ahead of the clients, if the configuration says so, and its threads.
    read_ahead: Option<(ReadAhead, Workers)>,
    /// What was read ahead from the modelled device.
    memory: Option<Memory>,
    /// Settles checksums that no client's sync settles; it ends when the sender does.
    settling: Mutex<Option<(Sender<()>, JoinHandle<()>)>>,
    /// Held while a piece of an object is scrubbed.
    scrubbing: Mutex<()>,
}

/// What a batch brought.
pub(super) enum Done {
    /// Bytes from the start of the batch; fewer than it asked for where the object ends.
    Read(Slice),
    /// The batch failed as a whole, so each of its parts was done alone.
    Apart(Vec<io::Result<Done>>),
    /// The bytes from the start of the batch; if not all, why; and the object's last loss.
    Written(u64, Option<io::Error>, u32),
    Barrier,
    /// A sync of an object that has lost data, and how it failed.
    AfterLoss(u32, i32),
}

impl Disk {
    /// `read_ahead_bytes` are read ahead of the clients at most; 0, or from a folder in memory, nothing is. `cached_pass`:
    /// what is in the page cache, or was read ahead from a modelled device, need not be scheduled; from a folder in memory
    /// everything is.
    pub(crate) fn new(
        vitals: Vitals,
        store: ObjectStore,
        device: Option<Arc<ModelledDevice>>,
        read_ahead_bytes: u64,
        cached_pass: bool,
    ) -> Arc<Disk> {
        let threads = Workers::new("device", DEVICE_THREADS);
        let waits = device.is_some() || !store.in_memory();
        let ahead = || (ReadAhead::new(read_ahead_bytes), Workers::new("read-ahead", 2 * ALONE_MAX as usize));
        let read_ahead = (read_ahead_bytes > 0 && waits).then(ahead);
        let memory = (read_ahead_bytes > 0 && device.is_some()).then(|| Memory::new(read_ahead_bytes));
        let cached = (cached_pass && waits && (device.is_none() || memory.is_some())).then(CachedReads::default);
        Arc::new_cyclic(|this| Disk {
            this: this.clone(),
            vitals,
            store,
            losses: Arc::default(),
            device,
            threads,
            cached,
            read_ahead,
            memory,
            settling: Mutex::new(None),
            scrubbing: Mutex::new(()),
        })
    }

    /// Begins to settle checksums in the background, if there are any.
    pub(crate) fn begin_settling(&self) -> io::Result<()> {
        if self.store.checks().is_none() {
            return Ok(());
        }
        let (stop, stopped) = channel();
        let this = self.this.clone();
        let settle = move || {
            loop {
                let goes_on = stopped.recv_timeout(SETTLE_EVERY) == Err(RecvTimeoutError::Timeout);
                let Some(disk) = this.upgrade() else { return };
                let age = if goes_on { SETTLE_EVERY } else { Duration::ZERO };
                disk.store.settle_older(age, |key, error| _ = disk.lost(key, &error));
                if !goes_on {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("checksums".into()).spawn(settle)?;
        *self.settling.lock() = Some((stop, thread));
        Ok(())
    }

    /// The folder of objects.
    pub(super) fn store(&self) -> &ObjectStore {
        &self.store
    }

    /// Which objects have lost data.
    pub(super) fn losses(&self) -> &Arc<Losses> {
        &self.losses
    }

    /// Something is read before it is asked for.
    pub(super) fn reads_ahead(&self) -> bool {
        self.read_ahead.is_some()
    }

    pub(crate) fn stop(&self) {
        self.device.iter().for_each(|device| device.stop());
        self.read_ahead.iter().for_each(|(_, threads)| threads.stop(PATIENCE));
        self.threads.stop(PATIENCE);
        if let Some((stop, thread)) = self.settling.lock().take() {
            drop(stop);
            // A device that hangs must not keep the server from ending; what is not settled is unchecked.
            let until = Instant::now() + PATIENCE;
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// There is something of this file.
    pub(super) fn holds(&self, file: u64) -> bool {
        self.store.stat(file).is_ok_and(|state| state.size > 0)
    }

    /// Answers with the state of an object.
    pub(crate) fn stat(&self, file: FileKey, reply: Reply) {
        match self.store.look(file.0) {
            Ok(state) => {
                let made = u64::from(state.is_some());
                let state = state.unwrap_or_default();
                let mtime = Time { secs: state.mtime_secs, nanos: state.mtime_nanos };
                let info = ObjectInfo { size: state.size, mtime, used_bytes: state.used_bytes, made };
                reply.send(&Answer::Object(info));
            }
            Err(error) => reply.send(&Answer::Fault(fault_of(&error))),
        }
    }

    /// Answers with a page of the objects.
    pub(crate) fn list(&self, from: FileKey, max: u32, reply: Reply) {
        self.on_a_thread(move |disk| {
            let max = (max as usize).clamp(1, PAGE_OBJECTS_MAX);
            let page = disk.store.page(from.0, max).and_then(|mut page| {
                if from.0 == 0 {
                    page.foreign.extend(disk.store.foreign_at_top()?);
                }
                Ok(page)
            });
            match page {
                Ok(ObjectPage { objects, foreign, next }) => {
                    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
                    let entry = |(key, state): &(u64, FileState)| ObjectEntry {
                        file: FileKey(*key),
                        size: state.size,
                        age_s: now.saturating_sub(u64::try_from(state.mtime_secs).unwrap_or(0)),
                    };
                    let objects = objects.iter().map(entry).collect();
                    reply.send(&Answer::Objects { objects, foreign, next: next.map(FileKey) });
                }
                Err(error) => reply.send(&Answer::Fault(fault_of(&error))),
            }
        });
    }

    /// Reads a piece of an object to find damage, on a thread of its own and one at a time, so that clients wait for one
    /// piece at most. A modelled device does not know of it.
    pub(crate) fn scrub(&self, file: FileKey, offset: u64, max_bytes: u32, reply: Reply) {
        self.on_a_thread(move |disk| {
            let Some(scrubbing) = disk.scrubbing.try_lock() else {
                let message = format!("{} is scrubbing for another caller; one at a time", disk.vitals.name());
                return reply.fault(libc::EBUSY, message);
            };
            let found = disk.store.scrub(file.0, offset, u64::from(max_bytes).min(PIECE_BYTES));
            disk.store.relieve(|key, error| _ = disk.lost(key, &error));
            // Before the reply: the caller's next call may come at once.
            drop(scrubbing);
            match found {
                Ok(found) => reply.send(&Answer::Scrubbed(found.map(|found| ScrubbedPiece {
                    read_bytes: found.read_bytes,
                    good_blocks: found.good_blocks,
                    learnt_blocks: found.learnt_blocks,
                    unknown_blocks: found.unknown_blocks,
                    corrupt: found.corrupt,
                    next: found.next,
                }))),
                Err(error) => reply.send(&Answer::Fault(fault_of(&error))),
            }
        });
    }

    /// Moves an object out of the way.
    pub(crate) fn set_aside(&self, file: FileKey, reply: Reply) {
        self.on_a_thread(move |disk| match disk.store.set_aside(file.0) {
            Ok(()) => {
                tracing::warn!(key = file.0, "an object that belongs to no file was set aside");
                reply.send(&Answer::Done);
            }
            Err(error) => reply.send(&Answer::Fault(fault_of(&error))),
        });
    }

    /// Changes the order in which the modelled device serves.
    pub(crate) fn set_order(&self, order: &str, reply: Reply) {
        let Some(device) = &self.device else {
            let message = format!("{} has no modelled device whose order could be set", self.vitals.name());
            return reply.fault(libc::EOPNOTSUPP, message);
        };
        match order.parse() {
            Ok(order) => {
                device.set_order(order);
                tracing::info!(%order, "the modelled device's order is set");
                reply.send(&Answer::Done);
            }
            Err(refusal) => reply.fault(libc::EINVAL, refusal),
        }
    }

    /// Zeroes the device's statistics, and clears the caches of a modelled device.
    pub(crate) fn reset_statistics(&self) {
        self.device.iter().for_each(|device| device.reset());
        self.memory.iter().for_each(Memory::clear);
    }

    /// Adds what the store and the device have to say to the server's status.
    pub(crate) fn describe(&self, status: &mut Map<String, Value>) {
        let store = match self.store.statfs() {
            Ok(space) => json!({
                "total_bytes": space.total_bytes,
                "free_bytes": space.free_bytes,
                "files": space.files,
                "files_free": space.files_free,
                "in_memory": self.store.in_memory(),
            }),
            Err(error) => json!({ "error": error.to_string() }),
        };
        status.insert("store".into(), store);
        if let Some(checks) = self.store.checks() {
            let told = json!({
                "corrupt_blocks": checks.corrupt_blocks,
                "unsettled_blocks": checks.unsettled_blocks,
                "failures": checks.failures,
            });
            status.insert("checksums".into(), told);
        }
        if let Some(device) = &self.device {
            let mut told = crate::json(&device.status());
            if let Value::Object(told) = &mut told {
                told.insert("kind".into(), "modelled disk: its times are computed, not measured".into());
                told.insert("modelled".into(), true.into());
                if let Some(memory) = &self.memory {
                    told.insert("read_ahead_held_bytes".into(), memory.held_bytes().into());
                }
            }
            status.insert("device".into(), told);
        }
        status.insert("device_threads_waiting".into(), self.threads.waiting().into());
        if let Some((read_ahead, _)) = &self.read_ahead {
            status.insert("read_ahead".into(), read_ahead.describe());
        }
    }

    /// Does a batch, waiting for the device if need be.
    ///
    /// A part that the device cannot give, or that is damaged, fails alone: the others are requests of their own, perhaps of
    /// other clients.
    fn perform(&self, work: &Work<Item>) -> io::Result<Done> {
        let Some((_, first)) = work.parts.first() else { return Ok(Done::Barrier) };
        let (file, extent) = (first.file.0, &work.batch.extent);
        let alone = |parts: &[(Request, Item)]| {
            parts.iter().map(|part| self.transfer(file, part.0.extent, std::slice::from_ref(part))).collect()
        };
        match work.batch.op {
            Op::Read | Op::Write => match self.transfer(file, *extent, &work.parts) {
                Err(_) if work.parts.len() > 1 => Ok(Done::Apart(alone(&work.parts))),
                Ok(Done::Written(0, Some(_), _)) if work.parts.len() > 1 => Ok(Done::Apart(alone(&work.parts))),
                done => done,
            },
            Op::Sync => Ok(match self.store.sync(file) {
                Ok(()) => match self.losses.of(file) {
                    0 => Done::Barrier,
                    loss => Done::AfterLoss(loss, 0),
                },
                Err(error) => Done::AfterLoss(self.lost(file, &error), errno_of(&error)),
            }),
            Op::Truncate => self.store.truncate(file, extent.lane_offset).map(|()| Done::Barrier),
            Op::Unlink => self.store.unlink(file).map(|()| Done::Barrier),
        }
    }

    /// Reads or writes requests of one object that lie one behind the other from `extent` on.
    fn transfer(&self, file: u64, extent: Extent, parts: &[(Request, Item)]) -> io::Result<Done> {
        if parts.first().is_some_and(|(request, _)| request.op == Op::Read) {
            let mut buffer = self.vitals.pool().buffer(extent.len as usize);
            let got = self.store.read(file, extent.lane_offset, &mut buffer)?;
            return Ok(Done::Read(Slice::new(Arc::new(buffer), 0..got)));
        }
        let pieces: Vec<IoSlice<'_>> =
            parts.iter().filter_map(|(_, item)| item.payload.as_deref()).map(IoSlice::new).collect();
        // Before the write: of a sync that fails meanwhile the writer learns.
        let loss = self.losses.of(file);
        let written = match self.store.write_vectored(file, extent.lane_offset, &pieces) {
            Ok(written) => Done::Written(written as u64, None, loss),
            Err(error) => Done::Written(error.written as u64, Some(error.source), loss),
        };
        self.store.relieve(|key, error| _ = self.lost(key, &error));
        Ok(written)
    }

    /// A sync has failed; gives the number of the loss.
    fn lost(&self, file: u64, error: &io::Error) -> u32 {
        tracing::error!(key = file, %error, "a sync failed; unsynced data of the object are lost");
        self.losses.lost(&self.store, file)
    }

    /// Does a batch if it need not wait: what is in the page cache, or goes there.
    fn perform_at_once(&self, work: &Work<Item>) -> Option<io::Result<Done>> {
        match work.batch.op {
            Op::Read => {
                let (_, first) = work.parts.first()?;
                let mut buffer = self.vitals.pool().buffer(work.batch.extent.len as usize);
                let got = self.store.read_cached(first.file.0, work.batch.extent.lane_offset, &mut buffer)?;
                if got.is_err() && work.parts.len() > 1 {
                    return None;
                }
                Some(got.map(|got| Done::Read(Slice::new(Arc::new(buffer), 0..got))))
            }
            Op::Write => {
                let (extent, file) = (&work.batch.extent, work.parts.first()?.1.file.0);
                // With checksums a write may have to read, or to wait for a sync.
                let waits = self.store.write_waits(file, extent.lane_offset, extent.len);
                (!waits).then(|| self.perform(work))
            }
            Op::Sync | Op::Truncate | Op::Unlink => None,
        }
    }
}

/// An object and its store.
struct Object<'a> {
    store: &'a ObjectStore,
    memory: Option<&'a Memory>,
    key: u64,
}

impl PagedFile for Object<'_> {
    fn len_bytes(&self) -> u64 {
        self.store.stat(self.key).map_or(0, |state| state.size)
    }

    fn has(&self, at: u64) -> bool {
        match self.memory {
            Some(memory) => memory.has(self.key, at),
            None => self.store.has_cached(self.key, at),
        }
    }

    fn will_read(&self, range: Range<u64>) {
        self.store.will_read(self.key, range);
    }

    fn wait_for(&self, range: Range<u64>) -> io::Result<()> {
        self.store.wait_for(self.key, range)
    }
}

impl Executor<Item> for Disk {
    fn start(&self, mut work: Work<Item>) -> Started<Item> {
        hand_over_own_replies();
        if let Some(device) = &self.device {
            return self.start_modelled(device, work);
        }
        let started = now();
        let along = take_speculation(&mut work);
        if work.parts.is_empty() {
            self.read_ahead(along, Some(work.ticket));
            return Started::Pending;
        }
        if let Some(result) = self.perform_at_once(&work) {
            let Work { batch, parts, ticket, .. } = work;
            let bytes = answer(batch.extent.lane_offset, parts, &result);
            // What was asked for is done; nothing waits for the rest.
            self.read_ahead(along, None);
            return Started::Finished(ticket, outcome(&result, bytes, started, now()));
        }
        if work.batch.op == Op::Read
            && let Some((read_ahead, _)) = &self.read_ahead
        {
            let extent = work.batch.extent;
            let file = work.parts.first().map_or(0, |(_, item)| item.file.0);
            read_ahead.waited((file, &self.object(file)), &(extent.lane_offset..extent.end()));
        }
        self.on_a_thread(move |disk| {
            let started = now();
            if let Some((file, extent)) = &along {
                disk.store.will_read(*file, work.batch.extent.lane_offset..extent.end);
            }
            let result = disk.perform(&work);
            complete((work, result), started, now);
            disk.await_along(along);
        });
        Started::Pending
    }

    /// Room in the queue may depend on this connection's own replies having left.
    fn before_waiting(&self) {
        hand_over_own_replies();
    }

    fn piece(&self, item: &mut Item, from: u64, len: u64, _last: bool) -> Item {
        let payload = item.payload.as_ref().map(|p| p.part(from as usize..(from + len) as usize));
        Item { file: item.file, payload, owed: item.owed.piece(from, len) }
    }
}

impl Disk {
    fn start_modelled(&self, device: &Arc<ModelledDevice>, mut work: Work<Item>) -> Started<Item> {
        let along = take_speculation(&mut work);
        if work.parts.is_empty() {
            return self.read_ahead_modelled(device, along, Some(work.ticket));
        }
        let (file, lane_extent) = (work.parts.first().map_or(0, |(_, item)| item.file.0), work.batch.extent);
        let extent = lane_extent.lane_offset..lane_extent.end();
        let data_op = match work.batch.op {
            Op::Read => device::Op::Read,
            Op::Write => device::Op::Write,
            op => {
                if op != Op::Sync {
                    self.memory.iter().for_each(|memory| memory.release(file, &(extent.start..u64::MAX)));
                }
                // A sync empties the drive's cache; what is done to names costs the model nothing.
                let this = self.this.clone();
                let run = move |timing: Timing| {
                    let Some(disk) = this.upgrade() else { return };
                    disk.on_a_thread(move |disk| {
                        let result = disk.perform(&work);
                        complete((work, result), Nanos(timing.started_ns), || Nanos(timing.finished_ns));
                    });
                };
                device.submit(Job { ios: Vec::new(), flush: op == Op::Sync, run: Box::new(run) });
                return Started::Pending;
            }
        };
        let batch = Rendezvous::new();
        let missing = match (&self.memory, data_op) {
            (Some(memory), device::Op::Read) => memory.read(file, &extent, &batch),
            (memory, _) => {
                memory.iter().for_each(|memory| memory.release(file, &extent));
                vec![extent.clone()]
            }
        };
        // First the model, so that its time begins now.
        if missing.is_empty() {
            // The work is not done yet, so nothing comes back.
            drop(batch.timed(None));
        } else {
            if let (Some((read_ahead, _)), device::Op::Read) = (&self.read_ahead, data_op) {
                read_ahead.waited((file, &self.object(file)), &extent);
            }
            let place = |part: &Range<u64>| device.placement().place(data_op, file, part.start, part.end - part.start);
            let ios = missing.iter().flat_map(place).collect();
            let joined = batch.clone();
            let run = Box::new(move |timing| joined.timed(Some(timing)).into_iter().for_each(complete_modelled));
            device.submit(Job { ios, flush: false, run });
        }
        self.read_ahead_modelled(device, along, None);
        match self.perform_at_once(&work) {
            Some(result) => {
                if let Some(((work, result), timing)) = batch.performed((work, result)) {
                    let Work { batch, parts, ticket, .. } = work;
                    let bytes = answer(batch.extent.lane_offset, parts, &result);
                    let (started, finished) = (Nanos(timing.started_ns), Nanos(timing.finished_ns));
                    return Started::Finished(ticket, outcome(&result, bytes, started, finished));
                }
            }
            None => self.on_a_thread(move |disk| {
                let result = disk.perform(&work);
                batch.performed((work, result)).into_iter().for_each(complete_modelled);
            }),
        }
        Started::Pending
    }

    /// Reads ahead from the modelled device into the memory in front of it; then ends its batch, if it is
    /// one.
    fn read_ahead_modelled(
        &self,
        device: &Arc<ModelledDevice>,
        speculation: Option<(u64, Range<u64>)>,
        ticket: Option<Ticket<Item>>,
    ) -> Started<Item> {
        let Some((file, extent)) = speculation else { return Started::Pending };
        let (Some((read_ahead, _)), Some(memory)) = (&self.read_ahead, &self.memory) else { return Started::Pending };
        let len = extent.end - extent.start;
        let steps = memory.begin(file, &extent);
        if steps.is_empty() {
            read_ahead.was_there(file, extent);
            let (started, finished) = (now(), now());
            let outcome = Outcome { errno: 0, bytes_done: len, started, finished };
            return ticket.map_or(Started::Pending, |ticket| Started::Finished(ticket, outcome));
        }
        let transfers = Arc::new((AtomicUsize::new(steps.len()), AtomicU64::new(u64::MAX), Mutex::new(ticket)));
        for step in steps {
            let (this, transfers, extent) = (self.this.clone(), transfers.clone(), extent.clone());
            let ios = device.placement().place(device::Op::Read, file, step.start, step.end - step.start).collect();
            let run = move |timing: Timing| {
                let Some(disk) = this.upgrade() else { return };
                let (Some((read_ahead, _)), Some(memory)) = (&disk.read_ahead, &disk.memory) else { return };
                read_ahead.arrived(file, &step);
                memory.arrived(file, &step, timing).into_iter().for_each(complete_modelled);
                let (left, started_ns, ticket) = &*transfers;
                let started_ns = started_ns.fetch_min(timing.started_ns, Relaxed).min(timing.started_ns);
                if left.fetch_sub(1, AcqRel) > 1 {
                    return;
                }
                let (started, finished) = (Nanos(started_ns), Nanos(timing.finished_ns));
                if let Some(ticket) = ticket.lock().take() {
                    read_ahead.fetched(file, extent, finished.since(started).0);
                    ticket.complete(Outcome { errno: 0, bytes_done: len, started, finished });
                }
            };
            device.submit(Job { ios, flush: false, run: Box::new(run) });
        }
        Started::Pending
    }

    /// Reads that the page cache has may be answered before they are scheduled, and one is worth a try.
    pub(super) fn may_have(&self) -> bool {
        self.cached.as_ref().is_some_and(CachedReads::are_worth_a_try)
    }

    /// What the page cache has of a read; nothing unless it has all of it.
    pub(super) fn read_at_once(&self, file: FileKey, (offset, len): (u64, u64)) -> Option<Slice> {
        let extent = offset..offset.saturating_add(len);
        let there = self.memory.as_ref().is_none_or(|memory| memory.has_all(file.0, &extent));
        let mut buffer = self.vitals.pool().buffer(if there { len as usize } else { 0 });
        let got = there.then(|| self.store.read_cached(file.0, offset, &mut buffer).and_then(Result::ok)).flatten();
        self.cached.iter().for_each(|cached| cached.came(got.is_some()));
        if got.is_some() {
            self.memory.iter().for_each(|memory| memory.release(file.0, &extent));
        }
        got.map(|got| Slice::new(Arc::new(buffer), 0..got))
    }

    /// A request came that will be scheduled. What should be read before it is asked for.
    pub(super) fn foresee(&self, op: Op, file: FileKey, (offset, len): (u64, u64), client: u64) -> Vec<Prediction> {
        let Some((read_ahead, _)) = &self.read_ahead else { return Vec::new() };
        let object = self.object(file.0);
        read_ahead.observe(op, (file.0, &object), offset..offset.saturating_add(len), client)
    }

    /// Requests are not told to foresight for a while.
    pub(super) fn rest(&self) {
        self.read_ahead.iter().for_each(|(read_ahead, _)| read_ahead.rest());
    }

    /// What earlier runs foretell of reads.
    pub(super) fn foretell(&self, queues: Option<&PredictedQueues>) {
        self.read_ahead.iter().for_each(|(read_ahead, _)| read_ahead.foretell(queues));
    }

    /// A client says what it will read. How many bytes are, or are to be, read ahead for it, and which of them are new.
    pub(super) fn hinted(&self, file: FileKey, extents: &Extents, client: u64) -> (u64, Vec<Range<u64>>) {
        let Some((read_ahead, _)) = &self.read_ahead else { return (0, Vec::new()) };
        let extents = extents.iter().map(|(start, len)| start..start.saturating_add(len.into()));
        read_ahead.hinted((file.0, &self.object(file.0)), extents, client)
    }

    /// Reads ahead into the page cache, on a thread of its own; then ends its batch, if it is one.
    fn read_ahead(&self, speculation: Option<(u64, Range<u64>)>, ticket: Option<Ticket<Item>>) {
        let (Some(this), Some((file, extent))) = (self.this.upgrade(), speculation) else { return };
        let Some((_, threads)) = &self.read_ahead else { return };
        threads.run(Box::new(move || {
            let Some((read_ahead, _)) = &this.read_ahead else { return };
            let (started, len) = (now(), extent.end - extent.start);
            let read = read_ahead.fetch((file, &this.object(file)), extent);
            // A request for these bytes will report an error itself.
            let (errno, bytes_done) = read.map_or_else(|error| (errno_of(&error), 0), |()| (0, len));
            if let Some(ticket) = ticket {
                ticket.complete(Outcome { errno, bytes_done, started, finished: now() });
            }
        }));
    }

    /// Takes note when what was read along with a request is there.
    fn await_along(&self, along: Option<(u64, Range<u64>)>) {
        let (Some(this), Some((file, extent))) = (self.this.upgrade(), along) else { return };
        let Some((_, threads)) = &self.read_ahead else { return };
        threads.run(Box::new(move || {
            let Some((read_ahead, _)) = &this.read_ahead else { return };
            // A request for these bytes will report an error itself.
            drop(read_ahead.follow((file, &this.object(file)), &extent));
        }));
    }

    fn object(&self, key: u64) -> Object<'_> {
        Object { store: &self.store, memory: self.memory.as_ref(), key }
    }

    fn on_a_thread(&self, job: impl FnOnce(&Disk) + Send + 'static) {
        if let Some(this) = self.this.upgrade() {
            self.threads.run(Box::new(move || job(&this)));
        }
    }
}

fn complete_modelled((performed, timing): (Performed, Timing)) {
    complete(performed, Nanos(timing.started_ns), || Nanos(timing.finished_ns));
}

/// Answers the parts of a batch, then reports its end. The clocks of engine and device are the same.
fn complete((work, result): Performed, started: Nanos, finished: impl FnOnce() -> Nanos) {
    let Work { batch, parts, ticket, .. } = work;
    let finished = finished();
    let bytes = answer(batch.extent.lane_offset, parts, &result);
    ticket.complete(outcome(&result, bytes, started, finished));
}

fn outcome(result: &io::Result<Done>, bytes_done: u64, started: Nanos, finished: Nanos) -> Outcome {
    Outcome { errno: failure_of(result), bytes_done, started, finished }
}

/// The errno of a batch that failed, or of its first part that did; or 0.
fn failure_of(result: &io::Result<Done>) -> i32 {
    match result {
        Ok(Done::Written(_, Some(error), _)) | Err(error) => errno_of(error),
        Ok(Done::AfterLoss(_, errno)) => *errno,
        Ok(Done::Apart(parts)) => parts.iter().map(failure_of).find(|errno| *errno != 0).unwrap_or(0),
        Ok(_) => 0,
    }
}

/// Takes the speculation out of a batch; it is the last part.
fn take_speculation(work: &mut Work<Item>) -> Option<(u64, Range<u64>)> {
    let along = work.parts.pop_if(|(_, item)| matches!(item.owed, Owed::Nothing));
    let (request, item) = along?;
    let extent = request.extent.lane_offset..request.extent.end();
    work.batch.extent.len = extent.start - work.batch.extent.lane_offset;
    Some((item.file.0, extent))
}

/// Answers every part of a batch that begins at `start`; gives the bytes moved.
fn answer(start: u64, parts: Vec<(Request, Item)>, result: &io::Result<Done>) -> u64 {
    let mut bytes = 0;
    let mut run = Run::default();
    for (nth, (request, item)) in parts.into_iter().enumerate() {
        let extent = request.extent;
        bytes += match result {
            Ok(Done::Apart(each)) => match each.get(nth) {
                Some(result) => answer_part((0, extent.len), item, result, &mut run),
                None => 0,
            },
            result => answer_part((extent.lane_offset - start, extent.len), item, result, &mut run),
        };
    }
    run.send();
    bytes
}

/// Answers a part that lies at these bytes of what was done together; gives the bytes moved.
fn answer_part((from, len): (u64, u64), mut item: Item, result: &io::Result<Done>, run: &mut Run) -> u64 {
    // Before the reply, with which the permission to hold it goes.
    item.payload = None;
    match result {
        Ok(Done::Read(slice)) => {
            let part = slice.part(from as usize..(from + len) as usize);
            let got = part.len() as u64;
            run.read(item.owed, part);
            return got;
        }
        // What was written before the device was full was written.
        Ok(Done::Written(written, error, loss)) => match error {
            Some(error) if from + len > *written => item.owed.fulfil(Came::Failed(fault_of(error))),
            _ => {
                item.owed.fulfil(Came::Written(len, *loss));
                return len;
            }
        },
        Ok(Done::AfterLoss(loss, errno)) => item.owed.fulfil(Came::AfterLoss(*loss, *errno)),
        Ok(Done::Barrier | Done::Apart(_)) => item.owed.fulfil(Came::Done),
        Err(error) => item.owed.fulfil(Came::Failed(fault_of(error))),
    }
    0
}

fn errno_of(error: &io::Error) -> i32 {
    error.raw_os_error().unwrap_or(libc::EIO)
}

fn fault_of(error: &io::Error) -> Fault {
    let remedy = match errno_of(error) {
        libc::ENOSPC | libc::EDQUOT => "; free space on the data server",
        libc::EMFILE | libc::ENFILE => "; raise its limit of open files",
        libc::EIDRM => {
            let message = "its file was removed; what came for it late was not done".into();
            return Fault { errno: libc::EIDRM, message };
        }
        _ => "",
    };
    Fault { errno: errno_of(error), message: format!("{error}{remedy}") }
}
