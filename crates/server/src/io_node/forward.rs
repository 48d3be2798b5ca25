//! What the I/O node's policy has released: waits in the dispatch queue, is merged with neighbours, is forwarded.
//!
//! A data server that hangs holds no thread, no place in the dispatch queue and none of the engine's limits (see
//! [`super::hung`]). While all places are taken, a thread looks every [`WATCH_EVERY`] whether a server hangs.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use impresario_base::complaints::Complaints;
use impresario_base::lock::Mutex;
use impresario_base::slab::{Key, Slab};
use impresario_client::{Identity, Task, TrafficCount};
use impresario_engine::{Engine, Executor, Outcome, Started, Ticket, Work, now};
use impresario_node::{DispatchQueue, Entry, Party};
use impresario_sched::{Extent, LaneId, Nanos, Op, Request};
use impresario_wire::{Answer, Fault, LaneState, SpaceChange, Who};

use super::family::{Complete, Short};
use super::hung::{Hung, Lanes, SILENCE, add_lanes};
use super::reading::Reading;
use super::storage::{Storage, Target};
use super::tree::Foreseen;
use super::{Answering, IoSettings, Item};
use crate::connection::Reply;
use crate::listener::{Vitals, before_waiting};
use crate::outbox::{Bulk, STACK_BYTES, hand_over_own_replies};
use crate::owed::Came;
use crate::payload::{Buffer, Slice};
use crate::workers::{PATIENCE, STUCK_MAX, Workers, stop_all, waiting_elsewhere};

/// How often it is looked for servers that hang, while that matters.
const WATCH_EVERY: Duration = Duration::from_millis(50);
/// The polling thread ends after it made no difference this many times.
const CALM_MAX: u32 = 20;

/// Syncs of files on a lane that are forwarded at a time. Each holds a thread and no place in the dispatch queue, so that reads and
/// writes need not wait for one of them. As many as threads may be stuck: a sync is on the lane of its first byte, and the server that
/// hangs may be another one, which must not hold up syncs that do not need it.
pub(crate) const SYNCS_MAX: u32 = STUCK_MAX as u32;
/// Threads for the syncs of a lane that are not stuck, at least.
const LANE_SYNC_THREADS_MIN: usize = 16;
/// Reads up to this length are forwarded without a thread that waits, bytes.
const UNATTENDED_MAX_BYTES: u64 = 4 << 20;

/// A failure that came sooner is the device's answer, and no server that hangs.
const ANSWERED_IN: Nanos = Nanos::from_millis(1000);

/// A batch that the policy released.
pub(super) struct Load {
    parts: Vec<(Request, Item)>,
    ticket: Ticket<Item>,
    /// What continues it and nobody has asked for.
    along: Option<Foreseen>,
}

impl Load {
    /// The lanes of the data servers that it needs.
    fn needs(&self, split: bool) -> Lanes {
        let mut lanes = Lanes::new();
        self.parts.iter().for_each(|(request, item)| add_lanes(&mut lanes, request, item, split));
        lanes
    }

    /// The lane that it was scheduled on.
    fn lane(&self) -> u16 {
        self.parts.first().map_or(0, |(request, _)| request.extent.lane.0)
    }
}

/// The dispatch queue, and what has left it.
struct Dispatch {
    queue: DispatchQueue<Load>,
    hung: Hung,
    /// What is read ahead by itself, past the queue: its lanes, and since when.
    alone: Slab<(LaneId, Nanos)>,
    /// Threads that were called and found nothing that could go.
    owed: usize,
    is_watched: bool,
}

impl Dispatch {
    /// How many threads are to be called again.
    fn calls(&mut self) -> usize {
        let calls = self.owed.min(self.queue.ready());
        self.owed -= calls;
        calls
    }
}

/// The dispatch queue and the threads that forward from it.
pub(super) struct Forwarder {
    this: Weak<Forwarder>,
    vitals: Vitals,
    storage: Arc<dyn Storage>,
    split: bool,
    in_flight_max: usize,
    /// The engine has no more than this in flight.
    dispatch_max: usize,
    lanes: u16,
    engine: OnceLock<Weak<Engine<Item>>>,
    dispatch: Mutex<Dispatch>,
    /// Entries of the queue that no thread was called for yet.
    uncalled: AtomicUsize,
    threads: Workers,
    sync_threads: Workers,
    counts: Counts,
    /// About lanes that hang.
    complaints: Complaints,
    /// Whose traffic is what leaves this node.
    identity: Arc<Identity>,
    /// That traffic at the last reset.
    before: Mutex<TrafficCount>,
}

/// Since the start or the last reset.
#[derive(Default)]
struct Counts {
    requests_in: AtomicU64,
    bytes_in: AtomicU64,
    forwarded: AtomicU64,
    forwarded_bytes: AtomicU64,
    failed: AtomicU64,
}

impl Forwarder {
    pub(super) fn new(
        vitals: Vitals,
        storage: Arc<dyn Storage>,
        identity: Arc<Identity>,
        settings: &IoSettings,
    ) -> io::Result<Arc<Forwarder>> {
        let in_flight = settings.in_flight_requests.max(1);
        let lanes = settings.engine.lanes;
        let queue = DispatchQueue::new(in_flight, settings.merge_requests, settings.merge_bytes);
        // Kept: a job that is dropped leaves its batch in the queue.
        let threads = Workers::new("forward", in_flight).kept()?;
        let sync_threads = Workers::new("forward sync", sync_threads(in_flight, lanes)).kept()?;
        Ok(Arc::new_cyclic(|this| Forwarder {
            this: this.clone(),
            vitals,
            storage,
            identity,
            before: Mutex::default(),
            split: settings.split,
            in_flight_max: in_flight,
            dispatch_max: settings.engine.total_requests as usize,
            lanes,
            engine: OnceLock::new(),
            dispatch: Mutex::new(Dispatch {
                queue,
                hung: Hung::new(lanes),
                alone: Slab::default(),
                owed: 0,
                is_watched: false,
            }),
            uncalled: AtomicUsize::new(0),
            threads,
            sync_threads,
            counts: Counts::default(),
            complaints: Complaints::default(),
        }))
    }

    /// The engine that this is the executor of.
    pub(super) fn serve(&self, engine: &Arc<Engine<Item>>) {
        let _ = self.engine.set(Arc::downgrade(engine)); // once
    }

    pub(super) fn stop(&self) {
        stop_all([&self.threads, &self.sync_threads], PATIENCE);
        // Dropped unreported, they complete as EIO.
        let left = self.dispatch.lock().queue.drain();
        drop(left);
    }

    pub(super) fn reset_statistics(&self) {
        let Counts { requests_in, bytes_in, forwarded, forwarded_bytes, failed } = &self.counts;
        for count in [requests_in, bytes_in, forwarded, forwarded_bytes, failed] {
            count.store(0, Ordering::Relaxed);
        }
        *self.before.lock() = self.identity.traffic.now();
    }

    /// The sizes of requests on their way (twins-2017, Table I): `request` as clients sent them, `forwarded` as
    /// merged in the dispatch queue, `sent` as they left for single data servers.
    pub(super) fn status(&self) -> serde_json::Value {
        let read = |n: &AtomicU64| n.load(Ordering::Relaxed);
        let mean = |bytes: u64, count: u64| if count == 0 { 0.0 } else { bytes as f64 / count as f64 };
        let (requests, bytes) = (read(&self.counts.requests_in), read(&self.counts.bytes_in));
        let (out, out_bytes) = (read(&self.counts.forwarded), read(&self.counts.forwarded_bytes));
        let (waiting, in_flight, stuck, hung) = {
            let Dispatch { queue, hung, .. } = &*self.dispatch.lock();
            (queue.len(), queue.in_flight(), hung.stuck(), hung.lanes().collect::<Vec<_>>())
        };
        let (traffic, before) = (self.identity.traffic.now(), *self.before.lock());
        let sent = traffic.requests() - before.requests();
        let sent_bytes = traffic.read_bytes + traffic.written_bytes - before.read_bytes - before.written_bytes;
        serde_json::json!({
            "waiting": waiting,
            "in_flight": in_flight,
            "stuck": stuck,
            "hung_lanes": hung,
            "requests": requests,
            "mean_request_bytes": mean(bytes, requests),
            "forwarded": out,
            "forwarded_bytes": out_bytes,
            "mean_forwarded_bytes": mean(out_bytes, out),
            "sent": sent,
            "sent_bytes": sent_bytes,
            "mean_sent_bytes": mean(sent_bytes, sent),
            "failed": read(&self.counts.failed),
        })
    }

    /// Forwards what was taken out of the queue, and waits for the answers.
    fn forward(&self, load: Joined, begun: Begun) {
        let Joined { tickets, mut parts, along } = load;
        let has_begun = self.begin_ahead(&parts, &along);
        let mut forwarded = Forwarded::default();
        while let Some(first) = parts.first() {
            let same = parts.iter().take_while(|part| goes_with(part, first)).count();
            let rest = parts.split_off(same);
            self.forward_group(std::mem::replace(&mut parts, rest), &mut forwarded);
        }
        complete(tickets, forwarded.errno, begun.started);
        forwarded.shorts.into_iter().for_each(|(target, short)| self.resolve(&target, short));
        begun.end(forwarded.errno != libc::EIO);
        if let Some(ahead) = self.storage.ahead() {
            ahead.go_on(along, has_begun);
        }
    }

    /// Reads are about to be forwarded, and `along` continues them: see [`Ahead::begin`](super::tree::Ahead::begin).
    fn begin_ahead(&self, parts: &[(Request, Item)], along: &[Foreseen]) -> bool {
        match (self.storage.ahead(), parts.first()) {
            (Some(ahead), Some((Request { op: Op::Read, .. }, item))) => {
                ahead.begin(item.file, &range_of(parts), along)
            }
            _ => false,
        }
    }

    /// Reads ahead by itself, past the queue. What hangs there takes nothing of the engine's limits.
    fn read_alone(&self, of: Foreseen, lane: LaneId, ticket: Ticket<Item>) -> Started<Item> {
        let (Some(ahead), Some(this)) = (self.storage.ahead(), self.this.upgrade()) else {
            return Started::Finished(ticket, done(0));
        };
        let mut dispatch = self.dispatch.lock();
        let key = dispatch.alone.insert((lane, now()));
        let watches = self.must_watch(&mut dispatch);
        drop(dispatch);
        if watches {
            self.watch();
        }
        ahead.read_alone(of, ticket, Alone { forwarder: this, key });
        Started::Pending
    }

    /// It matters whether a server hangs, and no thread looks yet: one is to be started.
    fn must_watch(&self, dispatch: &mut Dispatch) -> bool {
        let watches = !dispatch.is_watched && self.matters(dispatch);
        dispatch.is_watched |= watches;
        watches
    }

    /// On a forwarding thread: forwards the oldest waiting batch with its neighbours.
    fn forward_next(&self) {
        if let Some((entries, begun)) = self.begin(now()) {
            self.forward(Joined::of(entries), begun);
        }
    }

    /// On a thread that must not wait: forwards the oldest waiting batch with its neighbours if that is a read of moderate length.
    /// Anything else is left to a forwarding thread, until whose turn it may meet further neighbours.
    fn forward_at_once(&self, this: &Arc<Forwarder>) {
        let is_moderate = |entry: &Entry<Load>| entry.op == Op::Read && entry.len <= UNATTENDED_MAX_BYTES;
        let needs_thread = {
            let mut dispatch = self.dispatch.lock();
            let Dispatch { queue, owed, .. } = &mut *dispatch;
            match queue.peek() {
                Some(entry) => !self.storage.takes_tasks() || !is_moderate(entry),
                // Taken by another thread; or all places are, and whoever gives one back comes for it.
                None => return *owed += usize::from(!queue.is_empty()),
            }
        };
        if needs_thread {
            let this = this.clone();
            return self.threads.run(Box::new(move || this.forward_next()));
        }
        // Another thread may have taken it, and this one get something else.
        let Some((entries, begun)) = self.begin(now()) else { return };
        let load = Joined::of(entries);
        let Some((target, range)) = self.moderate_read(&load) else {
            return self.forward_later(this, load, begun);
        };
        let (start, len) = (range.start, (range.end - range.start) as usize);
        let task: Box<dyn Task> = Box::new(Reading::new(this, load, begun, target, range));
        match self.storage.read_unattended(&target, start, len, task) {
            Ok(()) => self.counts.out(len as u64),
            Err(task) => task.ended(impresario_client::End::Lost),
        }
    }

    /// What is read, if it is not too much and goes as one.
    fn moderate_read(&self, load: &Joined) -> Option<(Target, Range<u64>)> {
        let first = load.parts.first()?;
        let is_one = first.0.op == Op::Read && load.parts.iter().all(|part| goes_with(part, first));
        let range = range_of(&load.parts);
        (is_one && range.end - range.start <= UNATTENDED_MAX_BYTES).then(|| (self.target(&first.1, &load.parts), range))
    }

    /// Where parts that [go together](goes_with) go, under the name of the first.
    fn target(&self, item: &Item, parts: &[(Request, Item)]) -> Target {
        Target {
            who: item.who,
            file: item.file,
            layout: item.striping.layout,
            made: parts.iter().fold(0, |made, (_, item)| made | item.made),
            server: self.split.then_some(item.server),
        }
    }

    pub(super) fn forward_later(&self, this: &Arc<Forwarder>, load: Joined, begun: Begun) {
        let this = this.clone();
        self.threads.run(Box::new(move || this.forward(load, begun)));
    }

    /// Takes the oldest batch that may go, with its neighbours, out of the queue.
    fn begin(&self, at: Nanos) -> Option<(Vec<Entry<Load>>, Begun)> {
        let forwarder = self.this.upgrade()?;
        let mut dispatch = self.dispatch.lock();
        let Dispatch { queue, hung, owed, .. } = &mut *dispatch;
        let entries = match hung.any() {
            false => queue.pop(),
            true if hung.stuck() < self.in_flight_max => queue.pop(),
            true => queue.pop_if(|entry| !hung.is_hopeless(&entry.token.needs(self.split))),
        };
        let Some(entries) = entries else {
            *owed += usize::from(!queue.is_empty());
            return None;
        };
        let (mut needs, mut batches) = (Lanes::new(), Lanes::new());
        for entry in &entries {
            needs.extend(entry.token.needs(self.split));
            batches.push(entry.token.lane());
        }
        let key = hung.begin(at, needs, batches);
        queue.set_stuck(hung.stuck());
        Some((entries, Begun { forwarder, key, started: at, is_answered: false }))
    }

    /// What [`Forwarder::begin`] gave is done.
    fn end(&self, key: Key, answered: bool) {
        let mut dispatch = self.dispatch.lock();
        let Dispatch { queue, hung, .. } = &mut *dispatch;
        queue.done();
        if hung.end(now(), key, answered) {
            queue.look_again();
        }
        queue.set_stuck(hung.stuck());
        let calls = dispatch.calls();
        drop(dispatch);
        self.call(calls);
    }

    /// Has this many entries forwarded.
    fn call(&self, entries: usize) {
        let Some(this) = self.this.upgrade().filter(|_| entries > 0) else { return };
        (0..entries).for_each(|_| self.forward_at_once(&this));
    }

    /// Starts the thread that looks for servers that hang; it is noted already.
    fn watch(&self) {
        let this = self.this.clone();
        let thread = std::thread::Builder::new().name("forward-watch".into()).stack_size(STACK_BYTES);
        let watching = move || {
            let mut calm = 0;
            while calm < CALM_MAX {
                std::thread::sleep(WATCH_EVERY);
                let Some(this) = this.upgrade() else { return };
                calm = if this.look_for_hung() { 0 } else { calm + 1 };
                if calm >= CALM_MAX && !this.rest() {
                    calm = 0;
                }
            }
        };
        if thread.spawn(watching).is_err() {
            // The next batch tries again.
            self.dispatch.lock().is_watched = false;
        }
    }

    /// It matters whether a server hangs: requests wait for places, or for a server that does, or something is read ahead by itself,
    /// which takes a place of its lane, of which the policy may allow a single one.
    fn matters(&self, dispatch: &Dispatch) -> bool {
        let Dispatch { queue, hung, alone, .. } = dispatch;
        let (taken, waiting) = (queue.in_flight() - hung.stuck().min(queue.in_flight()), queue.len());
        (waiting > 0 && taken >= self.in_flight_max)
            || waiting + taken >= self.dispatch_max
            || !alone.is_empty()
            || (hung.any() && (waiting > 0 || queue.in_flight() > 0))
    }

    /// The watching thread ends, unless it matters again.
    fn rest(&self) -> bool {
        let mut dispatch = self.dispatch.lock();
        dispatch.is_watched = self.matters(&dispatch);
        !dispatch.is_watched
    }

    /// Looks for servers that hang and takes what is stuck at them out of the limits; whether that mattered.
    fn look_for_hung(&self) -> bool {
        let mut dispatch = self.dispatch.lock();
        let matters = self.matters(&dispatch);
        let Dispatch { queue, hung, alone, .. } = &mut *dispatch;
        let at = now();
        let told = hung.look(at);
        queue.set_stuck(hung.stuck());
        let mut batches = vec![0; self.lanes.into()];
        hung.count_batches(&mut batches);
        for (_, (lane, since)) in alone.iter() {
            if let Some(count) = batches.get_mut(lane.index()) {
                *count += u32::from(at.since(*since) >= SILENCE);
            }
        }
        if hung.any() {
            for entry in queue.waiting().filter(|entry| hung.hangs(&entry.token.needs(self.split))) {
                if let Some(count) = batches.get_mut(usize::from(entry.token.lane())) {
                    *count += 1;
                }
            }
        }
        let (stuck, calls) = (hung.stuck(), dispatch.calls());
        drop(dispatch);
        for lane in told {
            self.complaints.about(&lane.to_string(), || {
                tracing::warn!(lane, "a data server does not answer; requests for others go on")
            });
        }
        self.threads.allow(stuck);
        self.call(calls);
        if let Some(engine) = self.engine.get().and_then(Weak::upgrade) {
            engine.set_stuck((0..).map(LaneId).zip(batches));
        }
        matters
    }

    /// Forwards touching parts of one file and operation as one request, and answers them.
    ///
    /// It travels under the name of its first member; a write names the others too, so that the data servers' fence
    /// judges every client's epoch.
    fn forward_group(&self, mut parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        if !self.storage.is_fenced() {
            let before = parts.len();
            // A node that hung, with its clients gone on through another, must not undo what they have done there since.
            parts.retain(|(_, item)| !item.answer.client_is_gone());
            if parts.len() < before {
                // Those that are left may not touch any more.
                return self.forward_each(parts, forwarded);
            }
        }
        self.forward_touching(parts, forwarded);
    }

    /// Forwards each part alone. The client of each is looked for again: what was forwarded before may have taken its time.
    fn forward_each(&self, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        parts.into_iter().for_each(|part| self.forward_group(vec![part], forwarded));
    }

    fn forward_touching(&self, parts: Vec<(Request, Item)>, forwarded: &mut Forwarded) {
        let Some((request, item)) = parts.first() else { return };
        let Range { start, end } = range_of(&parts);
        let target = self.target(item, &parts);
        let failed = match request.op {
            Op::Read => self.read(&target, start, end, parts, forwarded),
            Op::Write => self.write(&target, start, end, parts, forwarded),
            Op::Truncate => self.change_space(&target, parts),
            _ => self.sync(&target, parts),
        };
        if let Some(errno) = failed {
            forwarded.errno = errno;
            self.has_failed();
        }
    }

    fn read(
        &self,
        target: &Target,
        start: u64,
        end: u64,
        parts: Vec<(Request, Item)>,
        forwarded: &mut Forwarded,
    ) -> Option<i32> {
        let mut buffer = self.vitals.pool().buffer((end - start) as usize);
        self.counts.out(end - start);
        let began = now();
        let got = match self.storage.read(target, start, &mut buffer) {
            Ok(got) => got,
            Err(fault) if is_of_one(&fault, began, &parts) => {
                drop(buffer);
                self.forward_each(parts, forwarded);
                return None;
            }
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        self.answer_reads(target, start, parts, (buffer, got), forwarded);
        None
    }

    /// Answers reads with what came of `target` from `start` on.
    pub(super) fn answer_reads(
        &self,
        target: &Target,
        start: u64,
        parts: Vec<(Request, Item)>,
        (buffer, got): (Buffer, usize),
        forwarded: &mut Forwarded,
    ) {
        let buffer = Arc::new(buffer);
        for (request, item) in parts {
            let from = (request.extent.lane_offset - start) as usize;
            let slice = Slice::new(buffer.clone(), from.min(got)..(from + request.extent.len as usize).min(got));
            match item.answer {
                Answering::Read(owed) if self.split && slice.len() as u64 != request.extent.len => {
                    let Extent { file_offset: offset, len, .. } = request.extent;
                    let target = Target { who: item.who, made: item.made, ..*target };
                    forwarded.shorts.push((target, Short { offset, len, owed }));
                }
                Answering::Read(owed) => owed.fulfil(Came::Read(slice)),
                // Of no read.
                Answering::Whole(reply) => reply.send_data(Bulk::One(slice)),
                Answering::Nobody(_) => {}
                Answering::Part(ref family, index) => {
                    if let Complete::Short(short) = family.part_read(index, slice) {
                        let target = Target { who: item.who, made: item.made, ..*target };
                        forwarded.shorts.push((target, short));
                    }
                }
            }
        }
    }

    fn write(
        &self,
        target: &Target,
        start: u64,
        end: u64,
        parts: Vec<(Request, Item)>,
        forwarded: &mut Forwarded,
    ) -> Option<i32> {
        self.counts.out(end - start);
        let whos = senders(&parts);
        let pieces: Vec<&[u8]> =
            parts.iter().flat_map(|(_, item)| item.payload.slices()).map(|slice| &**slice).collect();
        let began = now();
        let written = self.storage.write(&whos, target, start, &pieces);
        drop(pieces);
        let lanes = match written {
            Ok(lanes) => lanes,
            Err(fault) if is_of_one(&fault, began, &parts) => {
                self.forward_each(parts, forwarded);
                return None;
            }
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        for (request, mut item) in parts {
            // Before the reply, with which the permission to hold it goes.
            item.payload = Bulk::None;
            match item.answer {
                Answering::Whole(reply) => {
                    reply.send(&Answer::FileWritten { bytes: request.extent.len as u32, lanes: lanes.clone() })
                }
                Answering::Part(family, _) => drop(family.part_written(request.extent.len, &lanes)),
                // Of no write.
                Answering::Read(_) | Answering::Nobody(_) => {}
            }
        }
        None
    }

    /// What moves no data is never merged: there is one part.
    fn change_space(&self, target: &Target, parts: Vec<(Request, Item)>) -> Option<i32> {
        let mut failed = None;
        let whole = Target { server: None, ..*target };
        for (request, item) in parts {
            let Some((change, range)) = item.change else { continue };
            let of_object = (request.extent.lane_offset, request.extent.len);
            let answered = match item.answer {
                Answering::Part(family, _) => match self.storage.change_space(target, change, of_object) {
                    Ok(lanes) => match family.part_written(0, &lanes) {
                        Complete::Extend(reply, lanes) => {
                            // The zeros are there; what others have written since stays.
                            let change = SpaceChange::Allocate { keep_size: false };
                            answer_change(reply, lanes, self.storage.change_space(&whole, change, range))
                        }
                        _ => 0,
                    },
                    Err(fault) => {
                        family.part_failed(&fault);
                        fault.errno
                    }
                },
                Answering::Whole(reply) => {
                    answer_change(reply, Vec::new(), self.storage.change_space(&whole, change, range))
                }
                // Of no change.
                Answering::Read(_) | Answering::Nobody(_) => 0,
            };
            failed = failed.or((answered != 0).then_some(answered));
        }
        failed
    }

    fn sync(&self, target: &Target, parts: Vec<(Request, Item)>) -> Option<i32> {
        let (lanes, errno) = match self.storage.sync(target) {
            Ok(synced) => synced,
            Err(fault) => return Some(fail_all(parts, &fault)),
        };
        for (_, item) in parts {
            if let Answering::Whole(reply) = item.answer {
                reply.send(&Answer::FileSynced { lanes: lanes.clone(), errno });
            }
        }
        (errno != 0).then_some(errno)
    }

    /// Forwards a sync, whose writes are done. A server that hangs holds no thread of the pool.
    fn sync_later(&self, parts: Vec<(Request, Item)>, ticket: Ticket<Item>) {
        let Some(this) = self.this.upgrade() else { return };
        self.sync_threads.run(Box::new(move || {
            let (started, mut forwarded) = (now(), Forwarded::default());
            waiting_elsewhere(|| this.forward_group(parts, &mut forwarded));
            complete(vec![(ticket, 0)], forwarded.errno, started);
        }));
    }

    /// Requests are cut at the boundaries of data servers.
    pub(super) fn splits(&self) -> bool {
        self.split
    }

    /// Storage for bytes on their way.
    pub(super) fn buffer(&self, len: usize) -> Buffer {
        self.vitals.pool().buffer(len)
    }

    /// See [`Storage::read_on`].
    pub(super) fn read_on(&self, target: &Target, start: u64, into: &mut [u8], got: usize) -> Result<usize, Fault> {
        self.storage.read_on(target, start, into, got)
    }

    /// Counts a forwarded request that failed.
    pub(super) fn has_failed(&self) {
        self.counts.failed.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs what may wait.
    pub(super) fn on_a_thread(&self, job: impl FnOnce() + Send + 'static) {
        self.threads.run(Box::new(job));
    }

    /// Answers such reads on a thread.
    pub(super) fn resolve_later(self: &Arc<Self>, shorts: Vec<(Target, Short)>) {
        let this = self.clone();
        self.on_a_thread(move || shorts.into_iter().for_each(|(target, short)| this.resolve(&target, short)));
    }

    /// Answers a read that met the end of an object: whether that is the end of the file or a hole in it, only
    /// a look at all objects can tell.
    fn resolve(&self, target: &Target, short: Short) {
        let mut buffer = self.vitals.pool().buffer(short.len as usize);
        short.owed.fulfil(match self.storage.read_file(target, short.offset, &mut buffer) {
            Ok(got) => Came::Read(Slice::new(Arc::new(buffer), 0..got)),
            Err(fault) => Came::Failed(fault),
        });
    }
}

impl Executor<Item> for Forwarder {
    fn start(&self, mut work: Work<Item>) -> Started<Item> {
        hand_over_own_replies();
        let along = take_ahead(&mut work);
        let Work { batch, mut parts, ticket, .. } = work;
        let Some((_, first)) = parts.first_mut() else {
            return match along {
                Some(of) => self.read_alone(of, batch.extent.lane, ticket),
                None => Started::Finished(ticket, done(0)),
            };
        };
        let file = first.file.0;
        if !batch.op.is_data()
            && let Answering::Part(family, _) = &first.answer
            && family.is_barrier()
        {
            // A barrier on one of several data servers is reached; with the last one all are.
            match family.part_completed(0) {
                Complete::Barrier(reply) => first.answer = Answering::Whole(reply),
                _ => return Started::Finished(ticket, done(0)),
            }
        }
        if batch.op == Op::Sync {
            self.sync_later(parts, ticket);
            return Started::Pending;
        }
        self.counts.taken(batch.op, &parts);
        let party = parts.first().map_or((0, 0), |(_, item)| party(item));
        let entry = Entry::of(&batch, file, self.split, party, Load { parts, ticket, along });
        let mut dispatch = self.dispatch.lock();
        dispatch.queue.push(entry);
        let watches = self.must_watch(&mut dispatch);
        drop(dispatch);
        if watches {
            self.watch();
        }
        self.uncalled.fetch_add(1, Ordering::Release);
        Started::Pending
    }

    fn before_waiting(&self) {
        before_waiting();
    }

    /// A window that opens releases many requests together: threads that were called for the first of them would take it
    /// away before its neighbours are there to be merged.
    fn all_started(&self) {
        self.call(self.uncalled.swap(0, Ordering::AcqRel));
    }
}

/// A place among what is under way. Dropped it is given back: also when its job panics, or is dropped undone.
pub(super) struct Begun {
    forwarder: Arc<Forwarder>,
    key: Key,
    /// Since when it is taken.
    pub(super) started: Nanos,
    is_answered: bool,
}

impl Begun {
    /// Gives it back; `answered`: by the servers, not for want of them.
    pub(super) fn end(mut self, answered: bool) {
        self.is_answered = answered;
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        self.forwarder.end(self.key, self.is_answered);
    }
}

/// What is read ahead by itself: noted until this is dropped, also with a job that is dropped undone.
struct Alone {
    forwarder: Arc<Forwarder>,
    key: Key,
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.forwarder.dispatch.lock().alone.remove(self.key);
    }
}

/// The batches of one forwarded request.
pub(super) struct Joined {
    /// The tickets of the batches, with their lengths.
    pub(super) tickets: Vec<(Ticket<Item>, u64)>,
    pub(super) parts: Vec<(Request, Item)>,
    along: Vec<Foreseen>,
}

impl Joined {
    fn of(entries: Vec<Entry<Load>>) -> Joined {
        let (mut tickets, mut parts, mut along) = (Vec::with_capacity(entries.len()), Vec::new(), Vec::new());
        for entry in entries {
            tickets.push((entry.token.ticket, entry.len));
            along.extend(entry.token.along);
            match parts.is_empty() {
                true => parts = entry.token.parts,
                false => parts.extend(entry.token.parts),
            }
        }
        Joined { tickets, parts, along }
    }
}

/// Takes what no client has requested out of a batch; it is the last part.
fn take_ahead(work: &mut Work<Item>) -> Option<Foreseen> {
    let (request, item) = work.parts.pop_if(|(_, item)| matches!(item.answer, Answering::Nobody(_)))?;
    let extent = request.extent.lane_offset..request.extent.end();
    work.batch.extent.len = extent.start.saturating_sub(work.batch.extent.lane_offset);
    match item.answer {
        Answering::Nobody(file) => Some(Foreseen { file, extent }),
        _ => None,
    }
}

/// Threads for syncs that are not stuck. They are started when they are needed.
fn sync_threads(in_flight_requests: usize, lanes: u16) -> usize {
    (in_flight_requests.max(LANE_SYNC_THREADS_MIN) * usize::from(lanes.max(1))).min(SYNCS_MAX as usize)
}

/// Whose an item is: the data servers schedule, count and charge by it.
fn party(item: &Item) -> Party {
    (item.who.job, item.who.user)
}

/// Whether a part may be forwarded in one request with another of its file and operation. A file has one layout; a client that says
/// otherwise is served apart. The request goes under one name, so what it is for is all of one user and one job: another's would be
/// paid for by the first. A batch of the policy may have parts of several.
fn goes_with((_, item): &(Request, Item), (_, other): &(Request, Item)) -> bool {
    item.striping.layout == other.striping.layout && party(item) == party(other)
}

/// Answers a change of space, which `lanes` have a part of; gives its errno, or 0.
fn answer_change(reply: Reply, mut lanes: Vec<LaneState>, changed: Result<Vec<LaneState>, Fault>) -> i32 {
    match changed {
        Ok(more) => {
            lanes.extend(more);
            reply.send(&Answer::FileWritten { bytes: 0, lanes });
            0
        }
        Err(fault) => {
            reply.send(&Answer::Fault(fault.clone()));
            fault.errno
        }
    }
}

/// What was taken out of the queue is answered.
pub(super) fn complete(tickets: Vec<(Ticket<Item>, u64)>, errno: i32, started: Nanos) {
    let finished = now();
    for (ticket, len) in tickets {
        ticket.complete(Outcome { errno, bytes_done: if errno == 0 { len } else { 0 }, started, finished });
    }
}

/// From the first byte of the parts to the last.
fn range_of(parts: &[(Request, Item)]) -> Range<u64> {
    let start = parts.iter().map(|(r, _)| r.extent.lane_offset).min().unwrap_or_default();
    start..parts.iter().map(|(r, _)| r.extent.end()).max().unwrap_or_default()
}

/// What became of a forwarded batch.
#[derive(Default)]
pub(super) struct Forwarded {
    errno: i32,
    /// Reads that met the end of an object.
    pub(super) shorts: Vec<(Target, Short)>,
}

impl Counts {
    fn taken(&self, op: Op, parts: &[(Request, Item)]) {
        if op.is_data() {
            self.requests_in.fetch_add(parts.len() as u64, Ordering::Relaxed);
            self.bytes_in.fetch_add(parts.iter().map(|(r, _)| r.extent.len).sum(), Ordering::Relaxed);
        }
    }

    fn out(&self, bytes: u64) {
        self.forwarded.fetch_add(1, Ordering::Relaxed);
        self.forwarded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

fn done(bytes_done: u64) -> Outcome {
    let at = now();
    Outcome { errno: 0, bytes_done, started: at, finished: at }
}

/// The clients whose bytes are sent together, each with every epoch that it sent some under.
fn senders(parts: &[(Request, Item)]) -> Vec<Who> {
    let mut whos: Vec<Who> = Vec::with_capacity(1);
    for (_, Item { who, .. }) in parts {
        if !whos.iter().any(|known| (known.client, known.epoch) == (who.client, who.epoch)) {
            whos.push(*who);
        }
    }
    whos
}

/// Whether a failure may be of one of several requests that were sent together, which are then sent alone: its client has
/// left the epoch that it was sent under, or its bytes cannot be read or written, or there is no space for them where others
/// only overwrite. A failure that took its time is of a server that does not answer, or of a node that hung: to ask again for each
/// would multiply the wait, and write bytes over those that clients have written through another node since.
pub(super) fn is_of_one(fault: &Fault, began: Nanos, parts: &[(Request, Item)]) -> bool {
    match fault.errno {
        Fault::FENCED => senders(parts).len() > 1,
        libc::EIO | libc::ENOSPC | libc::EDQUOT | libc::EFBIG => parts.len() > 1 && now().since(began) < ANSWERED_IN,
        _ => false,
    }
}

/// Answers all parts with the failure; gives its errno.
pub(super) fn fail_all(parts: Vec<(Request, Item)>, fault: &Fault) -> i32 {
    parts.into_iter().for_each(|(_, item)| item.answer.fail(fault));
    fault.errno
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::AtomicBool;
    use std::time::Instant;

    use impresario_engine::{EngineConfig, Submission};
    use impresario_layout::Layout;
    use impresario_sched::{ConnId, PolicySpec};
    use impresario_testing::until;
    use impresario_trace::Space;
    use impresario_wire::{FileKey, ObjectInfo, Role, SeekTo, Sought};

    use super::super::storage::Striping;
    use super::*;
    use crate::connection::Connection;
    use crate::grants::Peers;
    use crate::listener::{Server, Settings};
    use crate::outbox::Outbox;
    use crate::request_trace::TraceSettings;

    /// Writes are answered, or panic, and syncs are, of files from [`WAITS`] on when they may; there is nothing else.
    #[derive(Default)]
    struct Writes {
        panic: AtomicBool,
        written: AtomicUsize,
        syncs_wait: AtomicBool,
        syncs: AtomicUsize,
        synced: AtomicUsize,
    }

    /// Syncs of files with at least this key wait.
    const WAITS: u64 = 100;

    fn never<T>() -> Result<T, Fault> {
        Err(Fault { errno: libc::EOPNOTSUPP, message: "only writes".into() })
    }

    impl Storage for Writes {
        fn striping(&self, _: FileKey, layout: Layout) -> Result<Striping, Fault> {
            Ok(Striping { layout, lanes: None })
        }
        fn is_fenced(&self) -> bool {
            true
        }
        fn read(&self, _: &Target, _: u64, _: &mut [u8]) -> Result<usize, Fault> {
            never()
        }
        fn read_file(&self, _: &Target, _: u64, _: &mut [u8]) -> Result<usize, Fault> {
            never()
        }
        fn write(&self, _: &[Who], _: &Target, _: u64, _: &[&[u8]]) -> Result<Vec<LaneState>, Fault> {
            assert!(!self.panic.load(Ordering::SeqCst), "a deliberate panic");
            self.written.fetch_add(1, Ordering::SeqCst);
            Ok(Vec::new())
        }
        fn sync(&self, target: &Target) -> Result<(Vec<LaneState>, i32), Fault> {
            self.syncs.fetch_add(1, Ordering::SeqCst);
            until("syncs may end", || target.file.0 < WAITS || !self.syncs_wait.load(Ordering::SeqCst));
            self.synced.fetch_add(1, Ordering::SeqCst);
            Ok((Vec::new(), 0))
        }
        fn change_space(&self, _: &Target, _: SpaceChange, _: (u64, u64)) -> Result<Vec<LaneState>, Fault> {
            never()
        }
        fn seek(&self, _: FileKey, _: &Layout, _: u64, _: u64, _: SeekTo) -> Result<Sought, Fault> {
            never()
        }
        fn stat(&self, _: FileKey, _: &Layout) -> Result<ObjectInfo, Fault> {
            never()
        }
    }

    /// A forwarder that sends two requests at a time, with a client.
    struct Node {
        storage: Arc<Writes>,
        forwarder: Arc<Forwarder>,
        engine: Arc<Engine<Item>>,
        client: Arc<Connection>,
        _front: Server,
        _theirs: UnixStream,
    }

    impl Node {
        fn start() -> Node {
            let config = impresario_config::Config::default();
            let settings = Settings::new("io.0", Role::Io, &config.cluster, 1 << 20);
            let front = Server::bind("127.0.0.1:0", settings).unwrap();
            let settings = IoSettings {
                engine: EngineConfig { lane_syncs: SYNCS_MAX, ..EngineConfig::new(PolicySpec::named("fifo")) },
                in_flight_requests: 2,
                merge_requests: 1,
                merge_bytes: 1 << 20,
                split: false,
                trace: TraceSettings { folder: None, at_start: false, space: Space::File },
                earlier_runs: Vec::new(),
                peers: Peers::io(&config, 0, Arc::default()),
            };
            let (storage, identity) = (Arc::new(Writes::default()), Arc::new(Identity::of(Who::default())));
            let forwarder = Forwarder::new(front.vitals(), storage.clone(), identity, &settings).unwrap();
            let engine = Engine::new(settings.engine, forwarder.clone()).unwrap();
            forwarder.serve(&engine);
            let (ours, theirs) = UnixStream::pair().unwrap();
            let pool = front.vitals().pool().clone();
            let outbox = Outbox::new(Arc::new(ours), "unix".into(), pool.clone());
            let client = Connection::new(ConnId(1), "unix".into(), outbox, pool, 1 << 20, None);
            Node { storage, forwarder, engine, client, _front: front, _theirs: theirs }
        }

        fn write(&self, offset: u64) {
            self.submit(Op::Write, FileKey(1), (offset, 4096));
        }

        fn submit(&self, op: Op, file: FileKey, (offset, len): (u64, u64)) {
            let slot = self.client.admit(0, true, Duration::from_secs(1)).expect("room");
            let (who, layout) = (Who::default(), Layout::new(0, 1, 1 << 20, 1).unwrap());
            let striping = Striping { layout, lanes: None };
            let answer = Answering::Whole(Reply::new(offset, slot));
            let payload = Bulk::None;
            let item = Item { who, file, striping, server: 0, made: 0, change: None, payload, answer };
            let submission = Submission {
                op,
                file: file.0,
                lane: LaneId(0),
                file_offset: offset,
                lane_offset: offset,
                len,
                client: 1,
                conn: ConnId(1),
                job: 1,
                user: 0,
                speculative: false,
            };
            assert!(self.engine.submit(submission, item).is_ok());
        }

        /// All is answered, and nothing keeps a place.
        fn settles(&self) {
            assert!(self.client.settle(Instant::now() + Duration::from_secs(20)), "a write is never answered");
            let state = || {
                let dispatch = self.forwarder.dispatch.lock();
                (dispatch.queue.len(), dispatch.queue.in_flight())
            };
            until("all places are given back", || state() == (0, 0));
        }
    }

    #[test]
    fn writes_are_answered_though_no_thread_can_be_started() {
        let node = Node::start();
        node.forwarder.threads.refuse_threads(true);
        node.write(0);
        node.forwarder.threads.refuse_threads(false);
        node.settles();
    }

    #[test]
    fn syncs_that_take_long_hold_up_no_write_and_no_other_sync() {
        const WAITING: u64 = 64;
        let node = Node::start();
        node.storage.syncs_wait.store(true, Ordering::SeqCst);
        (0..WAITING).for_each(|n| node.submit(Op::Sync, FileKey(WAITS + n), (0, u64::MAX)));
        until("syncs are under way", || node.storage.syncs.load(Ordering::SeqCst) > 0);
        (0..4).for_each(|n| node.write(n << 20));
        until("writes are done", || node.storage.written.load(Ordering::SeqCst) == 4);
        node.submit(Op::Sync, FileKey(1), (0, u64::MAX));
        until("a sync that has not to wait is done", || node.storage.synced.load(Ordering::SeqCst) == 1);
        node.storage.syncs_wait.store(false, Ordering::SeqCst);
        node.settles();
        assert_eq!(node.storage.synced.load(Ordering::SeqCst), WAITING as usize + 1);
    }

    /// It may be all that its lane may have in flight, however much the node may.
    #[test]
    fn what_is_read_ahead_by_itself_is_watched() {
        let node = Node::start();
        let mut dispatch = node.forwarder.dispatch.lock();
        assert!(!node.forwarder.matters(&dispatch));
        let key = dispatch.alone.insert((LaneId(0), now()));
        assert!(node.forwarder.matters(&dispatch), "it would hang unnoticed");
        dispatch.alone.remove(key);
        assert!(!node.forwarder.matters(&dispatch));
    }

    #[test]
    fn a_lane_has_as_many_threads_for_syncs_as_requests_in_flight() {
        let threads = [(2, 1), (2, 3), (64, 1), (64, 4), (256, 1000), (1, 0)]
            .map(|(in_flight, lanes)| sync_threads(in_flight, lanes));
        assert_eq!(threads, [16, 48, 64, 256, 512, 16]);
    }

    #[test]
    fn requests_that_panic_keep_no_place() {
        let node = Node::start();
        node.storage.panic.store(true, Ordering::SeqCst);
        (0..4).for_each(|n| node.write(n << 20));
        node.settles();
        node.storage.panic.store(false, Ordering::SeqCst);
        node.write(9 << 20);
        node.settles();
    }
}
