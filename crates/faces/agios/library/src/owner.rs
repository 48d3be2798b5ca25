//! The library's thread: it drains the inbox, asks the core, and calls back, without holding a lock.
//!
//! Its state is on the *desk*. The desk has a lock only for the rare call that another thread must make itself: a
//! cancellation is answered at once, even while a callback runs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use impresario_base::slab::{Rows, extend};
use impresario_engine::{Mail, SharedTime, SystemClocks, now};
use impresario_sched::{
    Batch, BatchId, Cancelled, Completion, Core, Ended, Event, Extent, JobId, LaneId, Nanos, Next, Observer, Op,
    PredictedQueues, Request,
};

use crate::files::{FileName, Files};
use crate::library::Shared;
use crate::metrics::Metrics;
use crate::requests::Identity;
use crate::sink::Sink;

/// Messages from other threads.
pub enum Message {
    /// A request was added.
    Request(NewRequest),
    /// A request of a batch was released, if that ends batches.
    Released(u32),
    /// A request was released, if releases are counted.
    Counted(Identity),
    /// A prediction from recorded runs.
    Foretold(Option<Arc<PredictedQueues>>),
    /// Sets the observer of requests that end.
    Observe(Arc<dyn Observer>),
    /// Nothing more will be added: deliver what is queued, and end.
    Stop,
}

/// A request that was added.
pub struct NewRequest {
    /// The request.
    pub identity: Identity,
    /// Its identifier from the program.
    pub identifier: i64,
    /// Arrival; zero: when the message is read.
    pub arrival: Nanos,
    /// Server or application.
    pub queue: u32,
    /// Its own callbacks, if any.
    pub sink: Option<Sink>,
}

/// How long the thread polls for messages before it sleeps, if earlier messages arrived that fast: sleeping and waking
/// cost as much.
const SPIN: Nanos = Nanos(20_000);

/// Batches between two checks for messages, unless their callbacks took [`LOOK_AFTER`]: each check costs the senders.
const SERVED_PER_LOOK: u32 = 64;
const LOOK_AFTER: Nanos = Nanos(30_000);

/// Batches between two looks at the clock, where only the order of arrival counts.
const SERVED_PER_CLOCK: u32 = 4;

/// Maximum age of a shared-time sample.
const CLOCK_REFRESH: Nanos = Nanos(100_000_000);

/// Processed messages before their room is free for senders.
const RETIRED_MAX: u64 = 512;

/// Served requests before they are counted where other threads count, too.
const SERVED_MAX: u32 = 512;

/// A batch that the program holds until its requests are released.
#[derive(Clone, Copy)]
struct Flight {
    completion: Completion,
    left: u32,
}

/// The state of the thread.
pub struct Desk {
    core: Core,
    files: Files,
    /// By slot of the core: the request's identifier and its own callbacks.
    identifiers: Vec<i64>,
    /// The same table, grown as needed.
    sinks: Vec<Option<Sink>>,
    flights: Rows<Option<Flight>>,
    observer: Option<Arc<dyn Observer>>,
    metrics: Metrics,
    first_arrival: Nanos,
    last_arrival: Nanos,
    lane_per_queue: bool,
    /// The program requests metrics of files.
    counts: bool,
    stopping: bool,
    /// Processed messages whose room is not yet free for senders.
    retired: u64,
    mail: Mail<Message>,
}

impl Desk {
    /// A desk around a core without requests.
    pub fn new(core: Core, lane_per_queue: bool, counts: bool) -> Desk {
        Desk {
            core,
            files: Files::default(),
            identifiers: Vec::new(),
            sinks: Vec::new(),
            flights: Rows::default(),
            observer: None,
            metrics: Metrics::default(),
            first_arrival: Nanos::ZERO,
            last_arrival: Nanos::ZERO,
            lane_per_queue,
            counts,
            stopping: false,
            retired: 0,
            mail: Mail::default(),
        }
    }

    /// Processes the messages of other threads; not `patient`: later, if one of them is interrupted while it sends.
    fn read(&mut self, shared: &Shared, at: Nanos, patient: bool) {
        let mut mail = std::mem::take(&mut self.mail);
        shared.inbox.read(&mut mail, patient, |message| self.take(message, at));
        self.mail = mail;
    }

    fn take(&mut self, message: Message, at: Nanos) {
        // A request's room is free when it has been served.
        self.retired += u64::from(!matches!(message, Message::Request(_)));
        match message {
            Message::Request(request) => self.queue(request, at),
            Message::Released(flight) => self.released(flight),
            Message::Counted(identity) => self.count_release(&identity),
            Message::Foretold(queues) => drop(self.core.foresee(queues)),
            Message::Observe(observer) => {
                self.core.watch(true);
                self.observer = Some(observer);
            }
            Message::Stop => self.stopping = true,
        }
    }

    fn queue(&mut self, new: NewRequest, at: Nanos) {
        let Identity { file: name, offset, len, write } = new.identity;
        let lane = LaneId(if self.lane_per_queue { new.queue as u16 } else { 0 });
        let file = self.file(name);
        let extent = Extent { file, lane, file_offset: offset, lane_offset: offset, len };
        let arrival = if new.arrival == Nanos::ZERO { at } else { new.arrival.min(at) };
        let op = if write { Op::Write } else { Op::Read };
        let request = Request { arrival, job: JobId(new.queue), ..Request::new(op, extent) };
        self.count_arrival(&new.identity, arrival);
        // There is room: the inbox has the core's capacity.
        let Ok(id) = self.core.push(at, &request) else { return };
        self.files.enter(file);
        let slot = id.0 as u32 as usize;
        if self.identifiers.len() <= slot {
            extend(&mut self.identifiers, slot + 1, || 0);
        }
        self.identifiers[slot] = new.identifier;
        if let Some(sink) = new.sink {
            if self.sinks.len() <= slot {
                extend(&mut self.sinks, slot + 1, || None);
            }
            self.sinks[slot] = Some(sink);
        }
    }

    fn file(&mut self, name: FileName) -> impresario_sched::FileId {
        let (file, new) = self.files.number(name);
        if new {
            self.core.names_mut().name_file(file, name.key);
            if self.files.are_many() {
                // Reuse the memory for the next messages.
                self.files.enter(file);
                let metrics = &mut self.metrics;
                self.files.forget_idle(|patterns| metrics.keep(patterns));
                self.files.leave(file);
            }
        }
        file
    }

    /// Counts an arrival.
    pub fn count_arrival(&mut self, identity: &Identity, arrival: Nanos) {
        if self.first_arrival == Nanos::ZERO {
            self.first_arrival = arrival;
        }
        self.last_arrival = arrival;
        self.metrics.arrived(identity.write, identity.len);
        if self.counts {
            let (file, epoch) = (self.file(identity.file), self.metrics.epoch());
            if let Some(file) = self.files.file(file) {
                file.patterns[usize::from(identity.write)].arrived(epoch, identity.offset, identity.len);
            }
        }
    }

    /// Counts a release.
    pub fn count_release(&mut self, identity: &Identity) {
        let (file, epoch) = (self.file(identity.file), self.metrics.epoch());
        if let Some(file) = self.files.file(file) {
            file.patterns[usize::from(identity.write)].released(epoch, identity.len);
        }
    }

    /// Metrics since the start or the last reset; a reset starts new ones.
    pub fn metrics(&mut self, shared: &Shared, reset: bool) -> Metrics {
        self.read(shared, now(), true);
        let mut metrics = self.metrics.clone();
        self.files.all().for_each(|file| metrics.keep(&file.patterns));
        metrics.span_ns = self.last_arrival.since(self.first_arrival).0;
        if reset {
            self.metrics.reset();
            (self.first_arrival, self.last_arrival) = (Nanos::ZERO, Nanos::ZERO);
        }
        metrics
    }

    /// Cancels the youngest queued request with an identity; false if there is none.
    pub fn cancel(&mut self, shared: &Shared, identity: &Identity) -> bool {
        let at = now();
        self.read(shared, at, true);
        let Identity { offset, len, write, .. } = *identity;
        let (file, op) = (self.file(identity.file), if write { Op::Write } else { Op::Read });
        let found = self.core.youngest_queued(file, op, offset, len);
        let cancelled = found.is_some_and(|id| {
            self.drop_sink(id.0 as u32 as usize);
            self.core.cancel(at, id) == Cancelled::Removed
        });
        if cancelled {
            self.files.leave(file);
            self.retired += 1;
        }
        self.retire(shared);
        cancelled
    }

    fn drop_sink(&mut self, slot: usize) {
        self.sinks.get_mut(slot).map(Option::take);
    }

    /// Moves a request from the queued to the delivered ones.
    fn deliver(&mut self, shared: &Shared, calls: &mut Vec<Call>, (slot, request): (usize, &Request), flight: u32) {
        let Some(file) = self.files.file(request.extent.file) else { return };
        let Extent { file_offset: offset, len, .. } = request.extent;
        let write = request.op == Op::Write;
        shared.delivered.add(Identity { file: file.name, offset, len, write }, flight);
        let sink = self.sinks.get_mut(slot).and_then(Option::take);
        calls.push(Call { identifier: self.identifiers[slot], sink });
        self.files.leave(request.extent.file);
    }

    /// Takes a batch from the core; returns the callbacks to make.
    fn hand(&mut self, shared: &Shared, batch: &Batch, at: Nanos, calls: &mut Vec<Call>) {
        let flight = match shared.complete_on_return {
            true => 0,
            false => {
                let left = batch.parts.len() as u32;
                self.flights.insert(Some(Flight { completion: Completion::of(batch, at, at), left }))
            }
        };
        for part in &batch.parts {
            if let Some(request) = self.core.request(part.id) {
                self.deliver(shared, calls, (part.id.0 as u32 as usize, &request), flight);
            }
        }
    }

    fn complete(&mut self, completion: &Completion, at: Nanos) {
        self.core.event(at, Event::Completed(*completion));
        if let Some(observer) = &self.observer {
            self.core.take_ended().for_each(|request: Ended| observer.ended(&request));
        }
    }

    fn released(&mut self, flight: u32) {
        let Some(Some(of)) = self.flights.get_mut(flight) else { return };
        of.left = of.left.saturating_sub(1);
        self.retired += 1;
        if of.left > 0 {
            return;
        }
        let completion = of.completion;
        self.flights[flight] = None;
        self.flights.release(flight);
        let at = now();
        self.complete(&Completion { finished: at, ..completion }, at);
    }

    fn retire(&mut self, shared: &Shared) {
        if self.retired > 0 {
            shared.inbox.retire(std::mem::take(&mut self.retired));
        }
    }
}

/// A request to be delivered.
struct Call {
    identifier: i64,
    sink: Option<Sink>,
}

/// What the thread does next.
enum Step {
    /// Call back.
    Serve,
    /// Wait until an instant.
    Wait(Nanos),
    /// Deliver what is left, and end.
    End,
}

/// The thread.
pub struct Owner {
    shared: Arc<Shared>,
    shared_time: SharedTime,
    clock_due: Nanos,
    spins: bool,
    /// Decisions do not depend on the time.
    untimed: bool,
    /// There was nothing to serve.
    idled: bool,
    /// Served and not counted yet.
    served: u32,
    /// The batch that is being served, where it ends when its callbacks have returned.
    returned: Option<Completion>,
    calls: Vec<Call>,
    identifiers: Vec<i64>,
}

impl Owner {
    /// For a desk without requests; `untimed`: decisions do not depend on the time, nor does anything record it.
    pub fn new(shared: Arc<Shared>, untimed: bool) -> Owner {
        let shared_time = SharedTime::sample(&SystemClocks);
        shared.desk.0.lock().core.event(now(), clock_event(&shared_time));
        Owner {
            shared,
            shared_time,
            clock_due: Nanos::ZERO,
            spins: false,
            untimed,
            idled: true,
            served: 0,
            returned: None,
            calls: Vec::new(),
            identifiers: Vec::new(),
        }
    }

    /// Serves until it is told to stop.
    pub fn run(mut self) {
        self.shared.inbox.own();
        let mut at = now();
        let (mut looked, mut unread) = (at, SERVED_PER_LOOK);
        loop {
            unread += 1;
            let look = unread >= SERVED_PER_LOOK || at.since(looked) > LOOK_AFTER;
            if look {
                (unread, looked) = (0, at);
            }
            match self.step(at, look) {
                Step::Serve => {
                    self.call();
                    self.idled = false;
                    if !self.untimed || unread % SERVED_PER_CLOCK == 0 {
                        at = now();
                    }
                }
                Step::Wait(until) => {
                    (at, self.idled) = (self.idle(until), true);
                    unread = SERVED_PER_LOOK;
                }
                Step::End => break,
            }
        }
        self.deliver_rest();
    }

    /// Ends the batch whose callbacks have returned, and makes the next decision.
    fn step(&mut self, at: Nanos, look: bool) -> Step {
        let Owner { shared, calls, .. } = self;
        let mut desk = shared.desk.0.lock_spinning();
        if let Some(completion) = self.returned.take() {
            desk.complete(&Completion { finished: at, ..completion }, at);
            desk.retired += calls.len() as u64;
            if desk.retired >= RETIRED_MAX {
                desk.retire(shared);
            }
            self.served += calls.len() as u32;
            if self.served >= SERVED_MAX {
                shared.delivered.served(std::mem::take(&mut self.served));
            }
        }
        if look {
            if shared.inbox.is_filled() {
                desk.read(shared, at, self.idled);
            }
            if at >= self.clock_due {
                let sample = SharedTime::sample(&SystemClocks);
                if self.shared_time.refresh(sample) {
                    desk.core.event(at, clock_event(&sample));
                }
                self.clock_due = at + CLOCK_REFRESH;
            }
            if shared.abandon.load(Ordering::Relaxed) {
                return Step::End;
            }
        }
        match desk.core.next(at) {
            Next::Dispatch(batch) => {
                calls.clear();
                desk.hand(shared, &batch, at, calls);
                self.returned = shared.complete_on_return.then(|| Completion::of(&batch, at, at));
                Step::Serve
            }
            Next::Wait { .. } if desk.stopping && !shared.inbox.is_filled() => Step::End,
            Next::Wait { until, .. } => {
                desk.retire(shared);
                Step::Wait(until)
            }
        }
    }

    /// Makes the callbacks for a batch.
    fn call(&mut self) {
        let Owner { shared, calls, identifiers, .. } = self;
        let default = &shared.default;
        let sink_of = |call: &Call| call.sink.unwrap_or(*default);
        if let [call] = &calls[..] {
            return sink_of(call).call_one(call.identifier);
        }
        let Some(sink) = calls.first().map(sink_of) else { return };
        if calls.iter().all(|call| sink.goes_with(&sink_of(call))) {
            identifiers.clear();
            identifiers.extend(calls.iter().map(|call| call.identifier));
            for some in identifiers.chunks_mut(shared.together_max) {
                match some {
                    [one] => sink.call_one(*one),
                    several => sink.call_many(several),
                }
            }
        } else {
            calls.iter().for_each(|call| sink_of(call).call_one(call.identifier));
        }
    }

    /// Delivers, in order of arrival, requests held back by a rule or by unreleased batches.
    fn deliver_rest(mut self) {
        let at = now();
        let left = self.shared.desk.0.lock().core.drain(at);
        let nothing = Completion { batch: BatchId(u64::MAX), errno: 0, bytes_done: 0, started: at, finished: at };
        for (done, request) in left.iter().enumerate() {
            if self.shared.abandon.load(Ordering::Relaxed) {
                let dropped = left.len() - done;
                let why = format!("agios_exit: {dropped} queued requests are dropped, as callbacks take too long");
                return self.shared.complain(&why);
            }
            self.calls.clear();
            let mut desk = self.shared.desk.0.lock();
            let flight = desk.flights.insert(Some(Flight { completion: nothing, left: u32::MAX }));
            desk.deliver(&self.shared, &mut self.calls, (request.id.0 as u32 as usize, request), flight);
            drop(desk);
            self.call();
        }
    }

    /// Waits for a message, or until an instant. Returns the time afterwards.
    fn idle(&mut self, until: Nanos) -> Nanos {
        let begun = now();
        let mut at = begun;
        while self.spins && at < (begun + SPIN).min(until) {
            (0..32).for_each(|_| std::hint::spin_loop());
            at = now();
            if self.shared.inbox.is_filled() {
                return at;
            }
        }
        let most = (until != Nanos::MAX).then(|| Duration::from_nanos(until.since(at).0));
        self.shared.inbox.sleep(most);
        let after = now();
        self.spins = after.since(begun) < SPIN && self.shared.inbox.is_filled();
        after
    }
}

fn clock_event(time: &SharedTime) -> Event {
    Event::SharedClock { offset_ns: time.offset_ns }
}
