//! What the I/O node's policy has released: waits in the dispatch queue, is merged with others, is forwarded.
//!
//! A data server that hangs holds no thread, no place in the dispatch queue and none of the engine's limits (see
//! [`super::hung`]). While all places are taken, a thread looks every [`WATCH_EVERY`] whether a server hangs.

mod batches;
mod lookout;
mod transfer;

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
use impresario_node::{DispatchQueue, Entry, Merging};
use impresario_sched::{LaneId, Nanos, Op, Request, RequestId};
use impresario_wire::Fault;
use rustc_hash::FxHashSet;

use super::below::{Below, Watched};
use super::family::{Complete, Short};
use super::hung::{Hung, Lanes, Whose};
use super::reading::Reading;
use super::storage::{Storage, Target};
use super::tree::Foreseen;
use super::{Answering, IoSettings, Item};
use crate::listener::{Vitals, before_waiting};
use crate::outbox::hand_over_own_replies;
use crate::owed::Came;
use crate::payload::{Buffer, Slice};
use crate::withheld::{Bell, GivenUp, Waiting};
use crate::workers::{PATIENCE, STUCK_MAX, Workers, stop_all};
pub(super) use batches::{Forwarded, Joined, complete, fail_all, is_of_one};
use batches::{Load, goes_with, len_bytes, party, range_of, ranges_of, take_ahead};

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
    merging: Merging,
    in_flight_max: usize,
    /// The engine has no more than this in flight.
    dispatch_max: usize,
    lanes: u16,
    engine: OnceLock<Weak<Engine<Item>>>,
    dispatch: Mutex<Dispatch>,
    below: Arc<Below>,
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
    /// Of those forwarded: lists of several ranges, and these ranges.
    lists: AtomicU64,
    list_ranges: AtomicU64,
    failed: AtomicU64,
}

impl Forwarder {
    pub(super) fn new(
        vitals: Vitals,
        storage: Arc<dyn Storage>,
        identity: Arc<Identity>,
        settings: &IoSettings,
        bell: &Bell,
    ) -> io::Result<Arc<Forwarder>> {
        let in_flight = settings.in_flight_requests.max(1);
        let lanes = settings.engine.lanes;
        let queue = DispatchQueue::new(in_flight, settings.merging, settings.merge_requests, settings.merge_bytes);
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
            merging: settings.merging,
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
            below: Below::new(bell),
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
        let Counts { requests_in, bytes_in, forwarded, forwarded_bytes, lists, list_ranges, failed } = &self.counts;
        for count in [requests_in, bytes_in, forwarded, forwarded_bytes, lists, list_ranges, failed] {
            count.store(0, Ordering::Relaxed);
        }
        *self.before.lock() = self.identity.traffic.now();
    }

    /// The lanes of the data servers that hang.
    pub(super) fn hung_lanes(&self) -> Vec<u16> {
        self.dispatch.lock().hung.lanes().collect()
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
            "lists": read(&self.counts.lists),
            "list_ranges": read(&self.counts.list_ranges),
            "sent": sent,
            "sent_bytes": sent_bytes,
            "mean_sent_bytes": mean(sent_bytes, sent),
            "failed": read(&self.counts.failed),
        })
    }

    /// Forwards what was taken out of the queue, and waits for the answers.
    fn forward(&self, load: Joined, begun: Begun) {
        let is_list = self.is_list(&load);
        let Joined { tickets, mut parts, along } = load;
        let has_begun = self.begin_ahead(&parts, &along);
        let mut forwarded = Forwarded { is_list, ..Forwarded::default() };
        begun.watched.attend(|| {
            while let Some(first) = parts.first() {
                let same = 1 + parts.iter().skip(1).take_while(|part| goes_with(part, first)).count();
                let rest = parts.split_off(same);
                self.forward_group(std::mem::replace(&mut parts, rest), &mut forwarded);
            }
        });
        complete(tickets, |requests| forwarded.errno_of(requests), begun.started);
        forwarded.shorts.into_iter().for_each(|(target, short)| self.resolve(&target, short));
        begun.end(forwarded.failed.iter().all(|(_, errno)| *errno != libc::EIO));
        if let Some(ahead) = self.storage.ahead() {
            ahead.go_on(along, has_begun);
        }
    }

    /// Batches that need not touch were merged.
    fn is_list(&self, load: &Joined) -> bool {
        self.merging == Merging::List && load.tickets.len() > 1
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
        let watch = begun.watched.watch.clone();
        let task: Box<dyn Task> = Box::new(Reading::new(this, load, begun, target, range));
        match watch.attend(|| self.storage.read_unattended(&target, start, len, task)) {
            Ok(()) => self.counts.out(len as u64),
            Err(task) => task.ended(impresario_client::End::Lost),
        }
    }

    /// What is read, if it is not too much and goes as one.
    fn moderate_read(&self, load: &Joined) -> Option<(Target, Range<u64>)> {
        let first = load.parts.first()?;
        let is_one = first.0.op == Op::Read
            && load.parts.iter().all(|part| goes_with(part, first))
            && !(self.is_list(load) && ranges_of(&load.parts, true).len() > 1);
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
        let entries = match hung.stuck() < self.in_flight_max {
            true => queue.pop(),
            false => queue.pop_if(|entry| !hung.is_hopeless(&entry.token.needs(self.split), entry.party)),
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
        let watched = self.below.watch(entries.iter().flat_map(|entry| &entry.token.parts));
        let party = entries.first().map_or((0, 0), |entry| entry.party);
        let key = hung.begin(at, needs, batches, Whose { party, watch: watched.watch.clone() });
        queue.set_stuck(hung.stuck());
        Some((entries, Begun { forwarder, key, watched, started: at, is_answered: false }))
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

    /// Adds the calls that data servers withhold; gives their requests.
    pub(super) fn find_withheld(&self, waiting: &mut Waiting) -> FxHashSet<RequestId> {
        let withheld = self.below.find(waiting);
        if !withheld.is_empty() {
            // They hold no place.
            let mut dispatch = self.dispatch.lock();
            let watches = !std::mem::replace(&mut dispatch.is_watched, true);
            drop(dispatch);
            if watches {
                self.watch();
            }
        }
        withheld
    }

    /// A client gives calls up that data servers withhold.
    pub(super) fn give_up(&self, given_up: &GivenUp) {
        self.below.give_up(given_up);
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
        let watched = self.below.watch_reply(short.owed.reply());
        let read = watched.attend(|| self.storage.read_file(target, short.offset, &mut buffer));
        short.owed.fulfil(match read {
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
        let load = Load { parts, ticket, along };
        let spans = self.merging == Merging::List && {
            let needs = load.needs(self.split);
            needs.iter().any(|lane| Some(lane) != needs.first())
        };
        let entry = Entry { spans, ..Entry::of(&batch, file, self.split, party, load) };
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
    pub(super) watched: Watched,
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

impl Counts {
    fn taken(&self, op: Op, parts: &[(Request, Item)]) {
        if op.is_data() {
            self.requests_in.fetch_add(parts.len() as u64, Ordering::Relaxed);
            self.bytes_in.fetch_add(parts.iter().map(|(r, _)| r.extent.len).sum(), Ordering::Relaxed);
        }
    }

    fn out_of(&self, ranges: &[Range<u64>]) {
        self.out(len_bytes(ranges));
        if ranges.len() > 1 {
            self.lists.fetch_add(1, Ordering::Relaxed);
            self.list_ranges.fetch_add(ranges.len() as u64, Ordering::Relaxed);
        }
    }

    fn out(&self, bytes: u64) {
        self.forwarded.fetch_add(1, Ordering::Relaxed);
        self.forwarded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Threads for syncs that are not stuck. They are started when they are needed.
fn sync_threads(in_flight_requests: usize, lanes: u16) -> usize {
    (in_flight_requests.max(LANE_SYNC_THREADS_MIN) * usize::from(lanes.max(1))).min(SYNCS_MAX as usize)
}

fn done(bytes_done: u64) -> Outcome {
    let at = now();
    Outcome { errno: 0, bytes_done, started: at, finished: at }
}

#[cfg(test)]
mod tests;
