//! What a data server's batches do: one read or write of an object each, at once where the page cache has it,
//! else on one of a few threads; answered when the modelled device in front, if any, is done.

mod ahead;
mod answers;
mod dirtying;
mod objects;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use impresario_base::lock::Mutex;
use impresario_device as device;
use impresario_engine::{CachedReads, Executor, Outcome, ReadAhead, Started, Work, now};
use impresario_foresight::ALONE_MAX;
use impresario_sched::{Extent, Nanos, Op, Request};
use impresario_store::{FileSystemId, Job, ModelledDevice, ObjectStore, Timing};
use impresario_wire::{Answer, FileKey};
use serde_json::{Map, Value, json};
use smallvec::SmallVec;

use self::ahead::{Object, take_speculation};
pub(super) use self::answers::{Done, errno_of};
use self::answers::{answer, complete, complete_after, complete_modelled, outcome};
use self::dirtying::Dirtying;
use super::losses::Losses;
use super::modelled::{Memory, Rendezvous};
use super::once::{Once, Origin};
use super::{Item, durability};
use crate::connection::Reply;
use crate::listener::{Vitals, before_waiting};
use crate::outbox::{HELD_FRAME_BYTES, hand_over_own_drain, let_own_replies_go};
use crate::owed::{PART_MAX_BYTES, Run, send_parts};
use crate::payload::Slice;
use crate::workers::{PATIENCE, Workers, stop_all};

/// Threads for batches that wait for a real device, unless the hand-off depth asks for more, up to the second number.
const DEVICE_THREADS: (usize, usize) = (16, impresario_config::calibration::DEPTH_MAX as usize);
/// Syncs at a time, each on a thread of its own: reads need not wait for one of them.
pub(crate) const SYNCS_MAX: u32 = 16;

/// The folder of objects, and what is in front of it.
pub(crate) struct Disk {
    this: Weak<Disk>,
    vitals: Vitals,
    store: ObjectStore,
    losses: Arc<Losses>,
    once: Once,
    device: Option<Arc<ModelledDevice>>,
    threads: Workers,
    sync_threads: Workers,
    /// Whether reads that the page cache has are worth looking for before they are scheduled, where they may be.
    cached: Option<CachedReads>,
    /// Whether writes that only go to the page cache may be done before they are scheduled.
    dirtying: Option<Dirtying>,
    /// Reads ahead of the clients, if the configuration says so, and its threads.
    read_ahead: Option<(ReadAhead, Workers)>,
    /// What was read ahead from the modelled device.
    memory: Option<Memory>,
    /// Settles checksums that no client's sync settles; it ends when the sender does.
    settling: Mutex<Option<(Sender<()>, JoinHandle<()>)>>,
    /// Held while a piece of an object is scrubbed.
    scrubbing: Mutex<()>,
    /// Objects that are being set aside.
    setting_aside: Arc<AtomicU32>,
}

impl Disk {
    /// Up to `depth` batches are handed over at once; 0: no more than usual. `read_ahead_bytes` are read ahead of the clients
    /// at most; 0, or from a folder in memory, nothing is. `cached_pass`: what is in the page cache, only goes there, or was read
    /// ahead from a modelled device, need not be scheduled; from a folder in memory everything is.
    ///
    /// # Errors
    /// That of the system, which starts no thread.
    pub(crate) fn new(
        vitals: Vitals,
        store: ObjectStore,
        device: Option<Arc<ModelledDevice>>,
        depth: u32,
        read_ahead_bytes: u64,
        cached_pass: bool,
    ) -> io::Result<Arc<Disk>> {
        let at_once = (depth as usize).clamp(DEVICE_THREADS.0, DEVICE_THREADS.1);
        let threads = Workers::new("device", at_once).kept()?;
        let sync_threads = Workers::new("sync", SYNCS_MAX as usize).kept()?;
        let waits = device.is_some() || !store.in_memory();
        let ahead = || (ReadAhead::new(read_ahead_bytes), Workers::new("read-ahead", 2 * ALONE_MAX as usize));
        let read_ahead = (read_ahead_bytes > 0 && waits).then(ahead);
        let memory = (read_ahead_bytes > 0 && device.is_some()).then(|| Memory::new(read_ahead_bytes));
        let cached = (cached_pass && waits && (device.is_none() || memory.is_some())).then(CachedReads::default);
        let dirtying = (cached_pass && waits && device.is_none()).then(Dirtying::default);
        Ok(Arc::new_cyclic(|this| Disk {
            this: this.clone(),
            vitals,
            store,
            losses: Arc::default(),
            once: Once::default(),
            device,
            threads,
            sync_threads,
            cached,
            dirtying,
            read_ahead,
            memory,
            settling: Mutex::new(None),
            scrubbing: Mutex::new(()),
            setting_aside: Arc::default(),
        }))
    }

    /// The folder of objects.
    pub(super) fn store(&self) -> &ObjectStore {
        &self.store
    }

    /// An object is being set aside, which the scheduler does not know of.
    pub(super) fn is_setting_aside(&self) -> bool {
        self.setting_aside.load(Ordering::SeqCst) > 0
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
        let ahead: Option<&Workers> = self.read_ahead.as_ref().map(|(_, threads)| threads);
        stop_all([&self.threads, &self.sync_threads].into_iter().chain(ahead), PATIENCE);
        self.stop_settling();
    }

    /// There is something of this file.
    pub(super) fn holds(&self, file: u64) -> bool {
        self.store.stat(file).is_ok_and(|state| state.size > 0)
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
                "file_system": space.file_system.map(|FileSystemId { boot, device }| format!("{boot:016x}-{device:x}")),
                "total_bytes": space.total_bytes,
                "free_bytes": space.free_bytes,
                "files": space.files,
                "files_free": space.files_free,
                "in_memory": self.store.in_memory(),
            }),
            Err(error) => {
                self.note_failure(&error);
                json!({ "error": error.to_string() })
            }
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
        let result = self.perform_unnoted(work);
        self.note_failures(&result);
        result
    }

    fn perform_unnoted(&self, work: &Work<Item>) -> io::Result<Done> {
        let Some((_, first)) = work.parts.first() else { return Ok(Done::Barrier) };
        let (file, extent) = (first.file.0, &work.batch.extent);
        let alone = |parts: &[(Request, Item)]| {
            parts.iter().map(|part| self.transfer(file, part.0.extent, std::slice::from_ref(part))).collect()
        };
        match work.batch.op {
            Op::Write if work.parts.len() > 1 && work.parts.iter().any(|(_, item)| item.origin.is_copy) => {
                Ok(Done::Apart(alone(&work.parts)))
            }
            Op::Read | Op::Write => match self.transfer(file, *extent, &work.parts) {
                Err(_) if work.parts.len() > 1 => Ok(Done::Apart(alone(&work.parts))),
                Ok(Done::Written(0, Some(_), _)) if work.parts.len() > 1 => Ok(Done::Apart(alone(&work.parts))),
                done => done,
            },
            Op::Sync => Ok(durability::sync(&self.store, &self.losses, file)),
            Op::Truncate => match first.change {
                None => durability::truncate(&self.store, self.known(), file, extent.lane_offset, &first.origin),
                Some(change) => {
                    let range = extent.lane_offset..extent.end();
                    durability::change_space(&self.store, self.known(), file, change, range, &first.origin)
                }
            },
            Op::Unlink => self.store.unlink(file).map(|()| Done::Barrier),
        }
    }

    /// Notes what the file system has failed.
    fn note_failures(&self, result: &io::Result<Done>) {
        match result {
            Err(error) | Ok(Done::Written(_, Some(error), _)) => self.note_failure(error),
            Ok(Done::AfterLoss(_, errno)) if *errno != 0 => {
                self.note_failure(&io::Error::from_raw_os_error(*errno));
            }
            Ok(Done::Apart(parts)) => parts.iter().for_each(|part| self.note_failures(part)),
            Ok(_) => {}
        }
    }

    /// Damage that checksums show has no number of the system's.
    fn note_failure(&self, error: &io::Error) {
        error.raw_os_error().into_iter().for_each(|errno| self.vitals.failures().note(errno, error));
    }

    /// Reads or writes requests of one object that lie one behind the other from `extent` on.
    fn transfer(&self, file: u64, extent: Extent, parts: &[(Request, Item)]) -> io::Result<Done> {
        if parts.first().is_some_and(|(request, _)| request.op == Op::Read) {
            let mut buffer = self.vitals.pool().buffer(extent.len as usize);
            let got = self.store.read(file, extent.lane_offset, &mut buffer)?;
            return Ok(Done::Read(Slice::new(Arc::new(buffer), 0..got)));
        }
        let parts: SmallVec<[(&Origin, &[u8]); 4]> =
            parts.iter().filter_map(|(_, item)| Some((&item.origin, item.payload.as_deref()?))).collect();
        Ok(durability::write(&self.store, self.known(), file, extent.lane_offset, &parts))
    }

    /// What was lost, and what was done.
    fn known(&self) -> (&Losses, &Once) {
        (&self.losses, &self.once)
    }

    /// A sync has failed; gives the number of the loss.
    fn lost(&self, file: u64, error: &io::Error) -> u32 {
        durability::lost(&self.store, &self.losses, file, error)
    }

    /// Sends what the page cache has of the beginning of a long read, in parts; the rest remains to be done. Gives the bytes
    /// moved.
    fn send_at_once(&self, work: &mut Work<Item>) -> u64 {
        let [(request, item)] = &mut work.parts[..] else { return 0 };
        let extent = &mut work.batch.extent;
        if work.batch.op != Op::Read || extent.len <= PART_MAX_BYTES {
            return 0;
        }
        let (pool, file) = (self.vitals.pool(), item.file.0);
        let range = (extent.lane_offset, extent.len);
        let (answered, moved_bytes) = send_parts(range, &mut item.owed, &mut Run::default(), |(at, len)| {
            let mut buffer = pool.buffer(len as usize);
            let got = self.store.read_cached(file, at, &mut buffer)?.ok()?;
            Some(Slice::new(Arc::new(buffer), 0..got))
        });
        if 0 < answered && answered < range.1 {
            item.owed = item.owed.piece(answered, range.1 - answered);
        }
        [extent, &mut request.extent].into_iter().for_each(|extent| extent.advance(answered));
        moved_bytes
    }

    /// Does a batch if it need not wait: what is in the page cache, or goes there. Of a read that must wait, the device begins with what is
    /// missing if it may.
    fn perform_at_once(&self, work: &Work<Item>, may_begin: bool) -> Option<io::Result<Done>> {
        match work.batch.op {
            Op::Read => {
                let (_, first) = work.parts.first()?;
                let mut buffer = self.vitals.pool().buffer(work.batch.extent.len as usize);
                let (file, offset) = (first.file.0, work.batch.extent.lane_offset);
                let got = match may_begin {
                    true => self.store.read_or_begin(file, offset, &mut buffer)?,
                    false => self.store.read_cached(file, offset, &mut buffer)?,
                };
                if got.is_err() && work.parts.len() > 1 {
                    return None;
                }
                let result = got.map(|got| Done::Read(Slice::new(Arc::new(buffer), 0..got)));
                self.note_failures(&result);
                Some(result)
            }
            Op::Write => {
                let (extent, file) = (&work.batch.extent, work.parts.first()?.1.file.0);
                // With checksums a write may have to read, or to wait for a sync.
                let waits = self.store.write_waits(file, extent.lane_offset, extent.len);
                if waits {
                    return None;
                }
                let result = self.perform(work);
                if result.is_ok() {
                    self.look_for_pages(file, extent.lane_offset);
                }
                Some(result)
            }
            Op::Sync | Op::Truncate | Op::Unlink => None,
        }
    }
}

impl Executor<Item> for Disk {
    fn start(&self, mut work: Work<Item>) -> Started<Item> {
        if work.batch.op != Op::Read || work.batch.extent.len > HELD_FRAME_BYTES as u64 {
            let_own_replies_go();
        }
        hand_over_own_drain();
        if let Some(device) = &self.device {
            return self.start_modelled(device, work);
        }
        let started = now();
        let along = take_speculation(&mut work);
        if work.parts.is_empty() {
            self.read_ahead(along, Some(work.ticket));
            return Started::Pending;
        }
        let sent_bytes = self.send_at_once(&mut work);
        if work.batch.extent.len == 0 {
            self.read_ahead(along, None);
            let outcome = Outcome { errno: 0, bytes_done: sent_bytes, started, finished: now() };
            return Started::Finished(work.ticket, outcome);
        }
        if sent_bytes == 0
            // What is read along goes to the device in one piece with it.
            && let Some(result) = self.perform_at_once(&work, along.is_none())
        {
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
        let threads = if work.batch.op == Op::Sync { &self.sync_threads } else { &self.threads };
        self.on_one_of(threads, move |disk| {
            let started = now();
            if let Some((file, extent)) = &along {
                disk.store.will_read(*file, work.batch.extent.lane_offset..extent.end);
            }
            let result = disk.perform(&work);
            complete_after(sent_bytes, (work, result), started, now);
            disk.await_along(along);
        });
        Started::Pending
    }

    /// Room in the queue may depend on this connection's own replies having left.
    fn before_waiting(&self) {
        before_waiting();
    }

    fn piece(&self, item: &mut Item, from: u64, len: u64, _last: bool) -> Item {
        let payload = item.payload.as_ref().map(|p| p.part(from as usize..(from + len) as usize));
        let origin = item.origin.clone();
        Item { file: item.file, payload, change: item.change, origin, owed: item.owed.piece(from, len) }
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
                    self.memory.iter().for_each(|memory| memory.release(file, &extent));
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
        match self.perform_at_once(&work, true) {
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

    fn object(&self, key: u64) -> Object<'_> {
        Object { store: &self.store, memory: self.memory.as_ref(), key }
    }

    fn on_a_thread(&self, job: impl FnOnce(&Disk) + Send + 'static) {
        self.on_one_of(&self.threads, job);
    }

    fn on_one_of(&self, threads: &Workers, job: impl FnOnce(&Disk) + Send + 'static) {
        if let Some(this) = self.this.upgrade() {
            threads.run(Box::new(move || job(&this)));
        }
    }
}
