//! The data servers: calls become requests scheduled on one lane, batches become accesses of the page cache and the
//! device.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use impresario_device::{CHUNK_BYTES, DeviceQueue, Disk, Flash, Io, Op as IoOp, PageCache, ReadAhead};
use impresario_foresight::{EarlierReads, PredictedQueues, Prediction, ReadingAhead, Source};
use impresario_node::session::Fence;
use impresario_sched::{
    Batch, BatchId, ClientId, Completion, ConnId, Extent, FileId, JobId, LaneId, Naming, Nanos, Op, Part, Request,
    RequestId, UserId,
};
use rustc_hash::FxHashMap;

use crate::calls::FENCED;
use crate::client::EIO;
use crate::contents::Contents;
use crate::memory::Memory;
use crate::outcome::Served;
use crate::simulation::{Event, FENCED_CLIENTS, Simulation};
use crate::station::{Decision, Station};
use impresario_base::slab::Key;

/// Bytes that may be read ahead in vain before that is detected.
const WASTE_FREE_BYTES: u64 = 32 << 20;

pub(crate) enum Storage {
    Disk { disk: Box<Disk>, queue: DeviceQueue<Key>, busy: bool, serving: Vec<Key> },
    Flash(Flash),
}

/// A job of the device.
pub(crate) struct Job {
    pub(crate) server: u16,
    pub(crate) incarnation: u32,
    pub(crate) application: u32,
    pub(crate) work: Work,
    /// Accesses that have not ended.
    pub(crate) accesses: u32,
}

pub(crate) enum Work {
    /// A batch; with a cache, the position of a read and its end.
    Batch { batch: Batch, started: u64, at: u64, end: u64 },
    /// A speculation with this many fetches in progress. If it goes `along` with requests, or behind them, it is not a
    /// batch.
    Ahead { batch: Option<BatchId>, along: bool, started: u64, fetches: u32, file: u32, extent: Range<u64> },
    /// Pages of a file to be read into the cache, for a speculation or for requests.
    Fetch { file: u32, start: u64, end: u64, ahead: Key },
    /// Dirty pages to be written.
    Flush,
}

pub(crate) struct Server {
    pub(crate) station: Station,
    pub(crate) fence: Fence,
    storage: Storage,
    pub(crate) cache: Option<Box<PageCache<Key>>>,
    /// The kernel's read-ahead state, one per object: a data server reads an object through one open file.
    pub(crate) read_ahead: FxHashMap<u32, ReadAhead>,
    /// The server's own read-ahead and its limit.
    pub(crate) foresight: Option<ReadingAhead>,
    /// Reads of earlier runs.
    earlier: Option<Arc<EarlierReads>>,
    foresight_bytes: u64,
    /// The ends of truncated objects, bytes; the others are whole.
    pub(crate) cut: FxHashMap<u32, u64>,
    /// Its contents, while the laws are checked.
    pub(crate) contents: Option<Box<Contents>>,
    /// Writes that wait for dirty pages to be flushed.
    pub(crate) throttled: VecDeque<Key>,
    pub(crate) flushing: bool,
    pub(crate) flushed_to: u64,
    /// The factor by which the device is slower.
    slowness: f64,
    busy_until: u64,
    /// When the processor will have started each waiting call.
    taken_up: VecDeque<u64>,
    /// When the device will be idle, as far as is known.
    device_until: u64,
    /// File + 1 and local offset of the last access.
    last: (u32, u64),
    pub(crate) first_arrival: Option<u64>,
    /// Requests outstanding by connection.
    peers: FxHashMap<u32, u32>,
    pub(crate) memory: Option<Box<Memory>>,
}

impl Server {
    pub(crate) fn new(
        station: Station,
        storage: Storage,
        cache: Option<Box<PageCache<Key>>>,
        foresight_bytes: u64,
        checked: bool,
    ) -> Server {
        Server {
            station,
            fence: Fence::new(FENCED_CLIENTS),
            storage,
            cache,
            read_ahead: FxHashMap::default(),
            foresight: (foresight_bytes > 0).then(|| ReadingAhead::new(foresight_bytes)),
            foresight_bytes,
            earlier: None,
            cut: FxHashMap::default(),
            contents: checked.then(Box::default),
            throttled: VecDeque::new(),
            flushing: false,
            flushed_to: 0,
            slowness: 1.0,
            busy_until: 0,
            taken_up: VecDeque::new(),
            device_until: 0,
            last: (0, 0),
            first_arrival: None,
            peers: FxHashMap::default(),
            memory: None,
        }
    }

    /// When the processor will have handled something that arrives at `there`.
    pub(crate) fn processor(&mut self, there: u64, cpu_ns: u64) -> u64 {
        if cpu_ns == 0 {
            return there;
        }
        self.busy_until = there.max(self.busy_until) + cpu_ns;
        self.busy_until
    }

    /// When the processor will have handled a call that arrives at `there`; each outstanding request adds to its cost.
    pub(crate) fn take_up(&mut self, there: u64, cpu_ns: u64, concurrency_ns: u64) -> u64 {
        if concurrency_ns == 0 {
            return self.processor(there, cpu_ns);
        }
        while self.taken_up.front().is_some_and(|done| *done <= there) {
            self.taken_up.pop_front();
        }
        let others = self.taken_up.len() as u64 + self.outstanding();
        let done = self.processor(there, cpu_ns + concurrency_ns * others);
        self.taken_up.push_back(done);
        done
    }

    /// Requests started and not yet answered.
    fn outstanding(&self) -> u64 {
        self.peers.values().copied().map(u64::from).sum()
    }

    pub(crate) fn slow_down(&mut self, factor: f64) {
        self.slowness = factor;
        if let Storage::Flash(flash) = &mut self.storage {
            flash.slow_down(factor);
        }
    }

    /// A request is about to be scheduled. Returns what to read ahead of it, within the object's `end`.
    fn foresee(
        &mut self,
        op: Op,
        file: u32,
        extent: Range<u64>,
        process: u32,
        (now, end): (u64, u64),
    ) -> Vec<Prediction> {
        let Some(foresight) = &mut self.foresight else { return Vec::new() };
        let key = u64::from(file);
        let mut predictions = Vec::new();
        match op {
            Op::Read => {
                predictions = foresight.read(Source { file: key, reader: process.into() }, extent, now);
                foresight.within(&mut predictions, end);
            }
            Op::Write | Op::Truncate => foresight.changed(key, extent),
            Op::Unlink => foresight.removed(key),
            Op::Sync => {}
        }
        predictions
    }

    /// Sets the prediction from earlier runs.
    pub(crate) fn set_prediction(&mut self, foretold: &Arc<PredictedQueues>) {
        self.station.foresee(Some(Arc::clone(foretold)));
        if let Some(foresight) = &mut self.foresight {
            self.earlier = Some(Arc::new(EarlierReads::of(foretold)));
            foresight.foretell(self.earlier.clone());
        }
    }

    /// Law: reading ahead stays within its budget.
    pub(crate) fn ahead_over_budget(&self) -> Option<String> {
        let totals = self.foresight.as_ref()?.totals();
        let (bytes, budget) = (totals.outstanding_bytes, self.foresight_bytes);
        (bytes > budget).then(|| format!("law 8: {bytes} bytes are predicted and not yet read, the budget is {budget}"))
    }

    /// Law: bytes read ahead in vain are a small part of all bytes read, beyond what detection needs. If memory cannot
    /// hold everything, lost pages are read twice until the streams are stopped, and no bound is stated.
    pub(crate) fn wasted_too_much(&self) -> Option<String> {
        let (foresight, cache) = (self.foresight.as_ref()?, self.cache.as_ref()?);
        let totals = foresight.totals();
        let demand = totals.demand_bytes;
        if cache.capacity_bytes() < demand + self.foresight_bytes {
            return None;
        }
        let wasted = cache.wasted_bytes() + cache.unused_bytes();
        let bound = WASTE_FREE_BYTES + self.foresight_bytes + demand / 20;
        let what = || {
            let much = format!("{wasted} bytes were read ahead for nothing while {demand} were asked for");
            format!("law 9: {much}, the bound is {bound}; the account says {totals:?}")
        };
        (wasted > bound).then(what)
    }

    /// Loses everything that is only in memory.
    fn forget(&mut self) {
        // The fence stays: it is stored on the device.
        if let Some(cache) = &mut self.cache {
            cache.clear();
        }
        self.read_ahead.clear();
        if let Some(foresight) = &mut self.foresight {
            *foresight = ReadingAhead::new(self.foresight_bytes);
            foresight.foretell(self.earlier.clone());
        }
        if let Some(contents) = &mut self.contents {
            contents.restarted();
        }
        self.throttled.clear();
        self.flushing = false;
        self.peers.clear();
        self.memory.iter_mut().for_each(|memory| memory.forget());
    }
}

impl Simulation {
    /// Fills the caches as if the files had just been read from their starts, one after the other: the last bytes read
    /// are present.
    pub(crate) fn warm_caches(&mut self) {
        if !self.scenario.servers.warm {
            return;
        }
        for (number, server) in self.servers.iter_mut().enumerate() {
            let Some(cache) = &mut server.cache else { continue };
            let mut room = cache.capacity_bytes() / CHUNK_BYTES * CHUNK_BYTES;
            let mut kept = Vec::new();
            for (file, f) in self.files.iter().enumerate().rev() {
                let Some(k) = f.layout.position_of(number as u16) else { continue };
                let len = f.layout.lane_len(k, f.len);
                // Whole chunks, so that the end of one file does not evict the start of the next.
                let start = len.saturating_sub(room).next_multiple_of(CHUNK_BYTES);
                if start < len {
                    kept.push((file as u32, start, len));
                    room -= (len - start).next_multiple_of(CHUNK_BYTES).min(room);
                }
            }
            kept.into_iter().rev().for_each(|(file, start, len)| cache.write(file, start, len, false));
        }
    }

    pub(crate) fn server_takes(&mut self, server: u16, key: Key) {
        let Some(call) = self.calls.get_mut(key) else { return };
        let (process, epoch, file, write) = (call.process, call.session.epoch(), call.file, call.write);
        let (from, target, offset, len) = (call.from, call.target, call.offset, call.len);
        let list = call.list.take();
        if std::mem::take(&mut call.first) {
            self.note_first(target);
        }
        let conn = if from >= self.first_io { from - self.first_io } else { process };
        let lane_end = self.lane_end(server, file);
        let s = &mut self.servers[usize::from(server)];
        if self.fencing && !s.fence.admit(u64::from(process), epoch) {
            return self.refuse(key, FENCED);
        }
        let one = [(offset, len)];
        let extents = list.as_ref().map_or(&one[..], |list| list);
        let job = self.files[file as usize].application;
        let mut request = Request {
            id: RequestId(0),
            extent: Extent { file: FileId(file), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 0 },
            arrival: Nanos(self.now),
            client: ClientId(process),
            conn: ConnId(conn),
            job: JobId(job),
            user: UserId(job),
            op: if write { Op::Write } else { Op::Read },
            naming: Naming::default(),
        };
        let mut taken = true;
        let mut parts = 0;
        for &(offset, len) in extents {
            request.extent = Extent { file_offset: offset, lane_offset: offset, len, ..request.extent };
            let ahead = s.foresee(request.op, file, offset..offset + len, process, (self.now, lane_end));
            if s.station.push(self.now, &request, key, process) {
                parts += 1;
                self.totals.servers.add(len);
            } else {
                taken = false;
            }
            for Prediction { extent: Range { start, end }, .. } in ahead {
                let extent = Extent { file_offset: start, lane_offset: start, len: end - start, ..request.extent };
                s.station.speculate(self.now, &Request { extent, ..request });
            }
        }
        let too_far = s.ahead_over_budget();
        if parts > 0 {
            let peers = s.peers.len();
            *s.peers.entry(conn).or_insert(0) += parts;
            let more = (s.peers.len() - peers) as f64;
            self.recorder.change(self.now, |r| &mut r.peers, more);
            self.recorder.change(self.now, |r| &mut r.outstanding, f64::from(parts));
        }
        if let Some(call) = self.calls.get_mut(key) {
            call.list = list;
        }
        if !taken {
            self.refuse(key, EIO);
        }
        self.memory_is_for(target, key, parts);
        too_far.into_iter().for_each(|what| self.violated(what));
        self.pump_server(server);
    }

    /// The end of a file in a server's space, bytes.
    pub(crate) fn lane_end(&self, server: u16, file: u32) -> u64 {
        let whole = self.whole_lane(server, file);
        self.servers[usize::from(server)].cut.get(&file).map_or(whole, |end| whole.min(*end))
    }

    /// The same without truncation.
    pub(crate) fn whole_lane(&self, server: u16, file: u32) -> u64 {
        let f = &self.files[file as usize];
        f.layout.position_of(server).map_or(0, |k| f.layout.lane_len(k, f.len))
    }

    /// A barrier from another client: truncates, extends or removes a file.
    pub(crate) fn barrier(&mut self, server: u16, file: u32, op: Op, offset: u64) {
        let (file_offset, len) = (offset, u64::MAX - offset);
        let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset, lane_offset: offset, len };
        let (conn, client) = (ConnId(u32::MAX), ClientId(u32::MAX));
        let request = Request { arrival: Nanos(self.now), conn, client, ..Request::new(op, extent) };
        let end = self.lane_end(server, file);
        let s = &mut self.servers[usize::from(server)];
        s.foresee(op, file, offset..i64::MAX as u64, u32::MAX, (self.now, end));
        if s.station.push(self.now, &request, Key::NONE, u32::MAX) {
            let peers = s.peers.len();
            *s.peers.entry(u32::MAX).or_insert(0) += 1;
            let more = (s.peers.len() - peers) as f64;
            self.recorder.change(self.now, |r| &mut r.peers, more);
            self.recorder.change(self.now, |r| &mut r.outstanding, 1.0);
        }
        self.pump_server(server);
    }

    pub(crate) fn pump_server(&mut self, server: u16) {
        let index = usize::from(server);
        loop {
            let s = &mut self.servers[index];
            match s.station.next(self.now) {
                Decision::Batch(batch, ahead) => self.start_batch(server, batch, ahead),
                Decision::Wait(until) => {
                    if until < s.station.alarm {
                        s.station.alarm = until;
                        let late = self.late(self.scenario.servers.timer_late_us);
                        self.calendar.push(until.max(self.now) + late, Event::ServerAlarm(server));
                    }
                    break;
                }
            }
        }
        let s = &mut self.servers[index];
        let queued = s.station.core.queued();
        let change = f64::from(queued) - f64::from(std::mem::replace(&mut s.station.queued, queued));
        self.recorder.change(self.now, |r| &mut r.server_queue, change);
        self.start_disk(server);
    }

    fn start_batch(&mut self, server: u16, batch: Batch, ahead: Option<Part>) {
        let (file, extent, op, started) = (batch.extent.file.0, batch.extent, batch.op, self.now);
        let ahead = ahead.map(|part| part.lane_offset..part.lane_offset + part.len);
        if batch.parts.is_empty() {
            return ahead.into_iter().for_each(|range| self.start_ahead(server, file, range, Some(batch.id)));
        }
        if !op.is_data() {
            self.cut_off(server, file, op, extent.lane_offset);
        }
        let s = &mut self.servers[usize::from(server)];
        let application = self.files[file as usize].application;
        // Truncated bytes are neither in the cache nor on the device.
        let mut end = extent.end();
        if let (Op::Read, Some(cut)) = (op, s.cut.get(&file)) {
            end = end.min(*cut).max(extent.lane_offset);
        }
        if op.is_data() {
            self.totals.batches.add(extent.len);
        }
        if op == Op::Read {
            self.totals.read_bytes += extent.len;
        }
        let work = Work::Batch { batch, started, at: extent.lane_offset, end };
        let incarnation = s.station.incarnation;
        let cached = s.cache.is_some();
        let key = self.jobs.insert(Job { server, incarnation, application, work, accesses: 0 });
        match op {
            Op::Read if cached => {
                let there = self.count_hits(server, file, extent.lane_offset, end) == end - extent.lane_offset;
                let s = &mut self.servers[usize::from(server)];
                if let (Some(foresight), Some(cache), false) = (&mut s.foresight, &s.cache, there) {
                    let asked = extent.lane_offset..end;
                    foresight.device_read(file.into(), &asked, |at| cache.has(file, at));
                }
                match ahead {
                    // The requested bytes are present; nothing waits for the rest.
                    Some(range) if there => self.start_ahead(server, file, range, None),
                    Some(range) => self.will_read(server, file, extent.lane_offset, range),
                    None => {}
                }
                self.read_ahead_of(server, application, file, extent.lane_offset, end);
                self.continue_read(key);
            }
            Op::Write if cached => self.write_cached(key),
            Op::Read if end > extent.lane_offset => self.access(key, file, IoOp::Read, extent.lane_offset, end),
            Op::Write => self.access(key, file, IoOp::Write, extent.lane_offset, end),
            Op::Read | Op::Sync | Op::Truncate | Op::Unlink => self.batch_ended(key),
        }
    }

    /// Gives the device the accesses of a job. A flash drive accepts them at once.
    pub(crate) fn access(&mut self, key: Key, file: u32, op: IoOp, start: u64, end: u64) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        let s = &mut self.servers[usize::from(job.server)];
        self.totals.device_distance.step(&mut s.last, file, start);
        match &mut s.storage {
            Storage::Disk { queue, .. } => {
                for io in self.placement.place(op, self.files[file as usize].key, start, end - start) {
                    queue.push(io, key);
                    job.accesses += 1;
                }
            }
            Storage::Flash(flash) => {
                let io = Io { op, address: start, len: end - start };
                let served = flash.serve(self.now, &io);
                job.accesses += 1;
                let (server, application) = (job.server, job.application);
                self.calendar.push(served.end_ns, Event::FlashDone(key));
                self.served(server, application, &io, served.end_ns);
            }
        }
    }

    /// Records an access from now to `end_ns`.
    fn served(&mut self, server: u16, application: u32, io: &Io, end_ns: u64) {
        let ns = (end_ns - self.now) as f64;
        self.totals.device.add(io.len);
        self.totals.device_ns += ns;
        if self.running == 0 {
            return; // after the last process has ended
        }
        let until = &mut self.servers[usize::from(server)].device_until;
        self.totals.busy_ns += end_ns.saturating_sub(self.now.max(*until)) as f64;
        *until = end_ns.max(*until);
        let at_s = self.now as f64 / 1e9;
        let (address, bytes) = (io.address, io.len);
        self.picture.see(|| Served { at_s, ms: ns / 1e6, server, application, address, bytes });
    }

    pub(crate) fn start_disk(&mut self, server: u16) {
        let s = &mut self.servers[usize::from(server)];
        let Storage::Disk { disk, queue, busy, serving } = &mut s.storage else { return };
        if *busy {
            return;
        }
        let Some(taken) = queue.pop(disk.head_address()) else { return };
        let start = self.now.max(disk.busy_until_ns());
        let end = disk.serve(self.now, &taken.io).end_ns;
        let end = if s.slowness == 1.0 { end } else { start + ((end - start) as f64 * s.slowness) as u64 };
        *busy = true;
        serving.clear();
        serving.extend(taken.parts.iter().map(|(_, key)| *key));
        let application = serving.first().and_then(|key| self.jobs.get(*key)).map_or(0, |job| job.application);
        let incarnation = s.station.incarnation;
        self.calendar.push(end, Event::DiskDone { server, incarnation });
        self.served(server, application, &taken.io, end);
    }

    pub(crate) fn disk_done(&mut self, server: u16, incarnation: u32) {
        let s = &mut self.servers[usize::from(server)];
        let Storage::Disk { busy, serving, .. } = &mut s.storage else { return };
        if s.station.incarnation != incarnation {
            return; // the job was dropped meanwhile
        }
        *busy = false;
        let mut done = std::mem::take(serving);
        for key in done.drain(..) {
            self.access_ended(key);
        }
        if let Storage::Disk { serving, .. } = &mut self.servers[usize::from(server)].storage
            && serving.capacity() == 0
        {
            *serving = done; // keep the capacity
        }
        self.pump_server(server);
    }

    pub(crate) fn flash_done(&mut self, key: Key) {
        let Some(job) = self.jobs.get(key) else { return };
        let server = job.server;
        self.access_ended(key);
        self.pump_server(server);
    }

    fn access_ended(&mut self, key: Key) {
        let Some(job) = self.jobs.get_mut(key) else { return };
        job.accesses -= 1;
        if job.accesses > 0 {
            return;
        }
        match job.work {
            Work::Batch { .. } => self.batch_ended(key),
            Work::Ahead { .. } => {} // its fetches have the accesses
            Work::Fetch { file, start, end, ahead } => {
                let server = job.server;
                self.jobs.remove(key);
                self.fetch_of_ahead_ended(ahead, start..end);
                let mut woken = Vec::new();
                let s = &mut self.servers[usize::from(server)];
                if let (Some(contents), Some(cache)) = (&mut s.contents, &s.cache) {
                    contents.filled(key, file, &cache.coming(file, start, end));
                }
                if let Some(cache) = &mut s.cache {
                    cache.arrive(file, start, end, &mut woken);
                }
                woken.into_iter().for_each(|job| self.continue_read(job));
            }
            Work::Flush => {
                let server = job.server;
                self.jobs.remove(key);
                self.servers[usize::from(server)].flushing = false;
                self.flush(server);
                let waiting = std::mem::take(&mut self.servers[usize::from(server)].throttled);
                waiting.into_iter().for_each(|job| self.write_cached(job));
            }
        }
    }

    /// Reports the completion to the core and sends the replies.
    pub(crate) fn batch_ended(&mut self, key: Key) {
        let Some(Job { server, work: Work::Batch { batch, started, .. }, .. }) = self.jobs.remove(key) else { return };
        let node = self.first_server + u32::from(server);
        let completion = Completion::of(&batch, Nanos(started), Nanos(self.now));
        let mut whole = 0;
        for part in &batch.parts {
            let len = if batch.op.is_data() { part.len } else { 0 };
            if self.part_completed(node, part.id, len, 0) {
                whole += 1;
                let conn = self.servers[usize::from(server)].station.waiter(part.id).conn;
                self.peer_has_less(server, conn, 1);
            }
        }
        self.recorder.change(self.now, |r| &mut r.outstanding, -f64::from(whole));
        self.servers[usize::from(server)].station.completed(self.now, completion);
    }

    fn peer_has_less(&mut self, server: u16, conn: u32, requests: u32) {
        let s = &mut self.servers[usize::from(server)];
        if let Some(count) = s.peers.get_mut(&conn) {
            *count = count.saturating_sub(requests);
            if *count == 0 {
                s.peers.remove(&conn);
                self.recorder.change(self.now, |r| &mut r.peers, -1.0);
            }
        }
    }

    // Faults

    /// A server fails with everything that it has not answered.
    pub(crate) fn restart_server(&mut self, server: u16) {
        let s = &mut self.servers[usize::from(server)];
        let peers = s.peers.len() as f64;
        let outstanding = s.outstanding() as f64;
        s.forget();
        if let Storage::Disk { queue, busy, serving, .. } = &mut s.storage {
            while queue.pop(0).is_some() {}
            *busy = false;
            serving.clear();
        }
        let result = s.station.restart(self.now);
        let queued = f64::from(std::mem::take(&mut s.station.queued));
        self.lose_copies_at(self.first_server + u32::from(server));
        self.recorder.change(self.now, |r| &mut r.peers, -peers);
        self.recorder.change(self.now, |r| &mut r.outstanding, -outstanding);
        self.recorder.change(self.now, |r| &mut r.server_queue, -queued);
        let old = self.servers[usize::from(server)].station.incarnation;
        let gone: Vec<Key> =
            self.jobs.iter().filter(|(_, j)| j.server == server && j.incarnation < old).map(|(key, _)| key).collect();
        gone.into_iter().for_each(|key| drop(self.jobs.remove(key)));
        if let Err(refusal) = result {
            self.violated(format!("a policy that had been accepted was refused: {refusal}"));
        }
    }

    /// An I/O node failed: the servers drop its queued requests.
    pub(crate) fn drop_connection(&mut self, conn: u32) {
        for server in 0..self.servers.len() as u16 {
            let s = &mut self.servers[usize::from(server)];
            let mut whole = 0;
            let mut gone = Vec::new();
            for id in s.station.cancel_connection(self.now, conn) {
                let waiter = s.station.waiter(id);
                gone.extend((waiter.undelivered == 0).then_some(waiter.call));
            }
            whole += gone.len() as u32;
            let node = self.first_server + u32::from(server);
            gone.into_iter().for_each(|call| self.memory_has_less(node, call));
            self.recorder.change(self.now, |r| &mut r.outstanding, -f64::from(whole));
            self.peer_has_less(server, conn, whole);
            self.pump_server(server);
        }
    }
}
