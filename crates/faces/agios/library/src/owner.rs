//! The library's thread. It alone has the scheduling core: what other threads want comes through the inbox, and
//! callbacks run here without a lock.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use impresario_base::slab::Rows;
use impresario_engine::{SharedTime, SystemClocks, now};
use impresario_sched::{
    Batch, BatchId, Completion, Core, Ended, Event, Extent, FileId, JobId, LaneId, Nanos, Next, Observer, Op,
    PredictedQueues, Request,
};
use rustc_hash::FxHashSet;

use crate::library::Shared;
use crate::requests::{Call, FileNumber, NewFile, Token};

/// What other threads tell the library's.
pub enum Message {
    /// A request was added.
    Request(NewRequest),
    /// A file has a number from now on.
    File(NewFile),
    /// A queued request was cancelled.
    Cancelled(Token),
    /// A request of a batch was released, where batches end by that.
    Released(u32),
    /// What recorded runs foretell.
    Foretold(Option<Arc<PredictedQueues>>),
    /// Requests that end are told to an observer from now on.
    Observe(Arc<dyn Observer>),
    /// Nothing is added any more: deliver what is queued, and end.
    Stop,
}

/// A request as it goes to the core.
#[derive(Clone, Copy)]
pub struct NewRequest {
    /// Bytes.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// Zero: when it is read.
    pub arrival: Nanos,
    /// Its place among the requests.
    pub token: Token,
    /// Its file.
    pub file: FileNumber,
    /// Server or application.
    pub queue: u32,
    /// Write or read.
    pub write: bool,
}

/// How long the thread looks for messages before it sleeps, where messages came that fast before: to sleep and be woken
/// costs as much.
const SPIN: Nanos = Nanos(20_000);

/// How old a sample of shared time may be.
const CLOCK_REFRESH: Nanos = Nanos(100_000_000);

/// Requests that are done before senders are told that there is room.
const RETIRED_MAX: u64 = 512;

/// A batch that is with the program until its requests are released.
#[derive(Clone, Copy)]
struct Flight {
    completion: Completion,
    left: u32,
}

/// The core and what belongs to its requests.
pub struct Owner {
    shared: Arc<Shared>,
    core: Core,
    /// By slot of the core.
    tokens: Vec<Token>,
    flights: Rows<Option<Flight>>,
    observer: Option<Arc<dyn Observer>>,
    shared_time: SharedTime,
    clock_due: Nanos,
    retired: u64,
    stopping: bool,
    spins: bool,
    batch: Vec<Token>,
    calls: Vec<Call>,
    identifiers: Vec<i64>,
    cancelled: FxHashSet<Token>,
}

/// No request.
const NONE: Token = Token::MAX;

impl Owner {
    /// For a core without requests.
    pub fn new(shared: Arc<Shared>, mut core: Core) -> Owner {
        let shared_time = SharedTime::sample(&SystemClocks);
        core.event(now(), Event::SharedClock { offset_ns: shared_time.offset_ns, error_ns: shared_time.error_ns });
        Owner {
            shared,
            core,
            tokens: Vec::new(),
            flights: Rows::default(),
            observer: None,
            shared_time,
            clock_due: Nanos::ZERO,
            retired: 0,
            stopping: false,
            spins: false,
            batch: Vec::new(),
            calls: Vec::new(),
            identifiers: Vec::new(),
            cancelled: FxHashSet::default(),
        }
    }

    /// Serves until it is told to stop.
    pub fn run(mut self) {
        self.shared.inbox.own();
        let mut mail = Vec::new();
        let mut at = now();
        loop {
            if self.shared.inbox.is_filled() {
                self.shared.inbox.read(&mut mail);
                mail.drain(..).for_each(|message| self.take(message, at));
                self.forget_cancelled(at);
            }
            if self.shared.abandon.load(Ordering::Relaxed) {
                break;
            }
            if at >= self.clock_due {
                self.keep_shared_time(at);
            }
            match self.core.next(at) {
                Next::Dispatch(batch) => at = self.serve(&batch, at),
                Next::Wait { .. } if self.stopping => {
                    self.deliver_rest(at);
                    break;
                }
                Next::Wait { until, .. } => at = self.idle(until),
            }
        }
        let left = self.core.drain(at).len();
        if left > 0 {
            self.shared
                .complain(&format!("agios_exit: {left} queued requests are dropped, as callbacks take too long"));
        }
    }

    fn take(&mut self, message: Message, at: Nanos) {
        match message {
            Message::Request(request) => self.queue(&request, at),
            Message::File(NewFile { number, key }) => self.core.names_mut().name_file(FileId(number), key),
            Message::Cancelled(token) => drop(self.cancelled.insert(token)),
            Message::Released(flight) => self.released(flight),
            Message::Foretold(queues) => drop(self.core.foresee(queues)),
            Message::Observe(observer) => {
                self.core.watch(true);
                self.observer = Some(observer);
            }
            Message::Stop => self.stopping = true,
        }
    }

    fn queue(&mut self, new: &NewRequest, at: Nanos) {
        let lane = LaneId(if self.shared.lane_per_queue { new.queue as u16 } else { 0 });
        let (file_offset, lane_offset) = (new.offset, new.offset);
        // The core knows no request without bytes.
        let extent = Extent { file: FileId(new.file), lane, file_offset, lane_offset, len: new.len.max(1) };
        let arrival = if new.arrival == Nanos::ZERO { at } else { new.arrival.min(at) };
        let op = if new.write { Op::Write } else { Op::Read };
        let request = Request { arrival, job: JobId(new.queue), ..Request::new(op, extent) };
        self.shared.arrived(arrival);
        // There is room: the inbox has that of the core.
        let Ok(id) = self.core.push(at, &request) else { return };
        let slot = id.0 as u32 as usize;
        if self.tokens.len() <= slot {
            let more = (slot + 1 + slot / 4).saturating_sub(self.tokens.len());
            self.tokens.reserve_exact(more);
            self.tokens.resize(slot + 1, NONE);
        }
        self.tokens[slot] = new.token;
    }

    /// Takes out of the core what was cancelled: one look at all that is queued, however many were.
    fn forget_cancelled(&mut self, at: Nanos) {
        if self.cancelled.is_empty() {
            return;
        }
        let found = |token: &Token| *token != NONE && self.cancelled.contains(token);
        let slots: Vec<usize> = (0..self.tokens.len()).filter(|slot| found(&self.tokens[*slot])).collect();
        for slot in slots {
            self.tokens[slot] = NONE;
            if let Some(id) = self.core.id_at(slot as u32) {
                self.core.cancel(at, id);
                self.retired += 1;
            }
        }
        self.cancelled.drain().for_each(|token| self.shared.requests.forget(token));
        self.retire();
    }

    /// Delivers a batch; the time after that.
    fn serve(&mut self, batch: &Batch, at: Nanos) -> Nanos {
        self.batch.clear();
        for part in &batch.parts {
            let token = self.tokens.get_mut(part.id.0 as u32 as usize);
            self.batch.extend(token.map(|token| std::mem::replace(token, NONE)).filter(|token| *token != NONE));
        }
        let mut completion = Completion::of(batch, at, at);
        if self.shared.complete_on_return {
            self.deliver(0);
            let after = now();
            completion.finished = after;
            self.complete(&completion, after);
            self.shared.requests.served(batch.parts.len() as u32);
            self.retired += batch.parts.len() as u64;
            if self.retired >= RETIRED_MAX {
                self.retire();
            }
            return after;
        }
        let left = self.batch.len() as u32;
        let flight = self.flights.insert(Some(Flight { completion, left }));
        let delivered = self.deliver(flight);
        // Those that were cancelled at the last moment are not released.
        (delivered..left).for_each(|_| self.released(flight));
        if left == 0 {
            self.end_flight(flight);
        }
        now()
    }

    /// Calls the program; how many requests it got.
    fn deliver(&mut self, flight: u32) -> u32 {
        let Owner { shared, calls, identifiers, .. } = self;
        calls.clear();
        shared.requests.deliver(&self.batch, flight, calls);
        if let [call] = calls[..] {
            call.sink.unwrap_or(shared.default).call_one(call.identifier);
            return 1;
        }
        let together = |call: &Call| call.sink.unwrap_or(shared.default).many;
        let many = calls.first().and_then(together);
        if many.is_some() && calls.iter().all(|call| together(call) == many) {
            identifiers.clear();
            identifiers.extend(calls.iter().map(|call| call.identifier));
            let sink = calls[0].sink.unwrap_or(shared.default);
            for some in identifiers.chunks_mut(shared.together_max) {
                match some {
                    [one] => sink.call_one(*one),
                    several => sink.call_many(several),
                }
            }
        } else {
            calls.iter().for_each(|call| call.sink.unwrap_or(shared.default).call_one(call.identifier));
        }
        calls.len() as u32
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
        if of.left == 0 {
            self.end_flight(flight);
        }
    }

    fn end_flight(&mut self, flight: u32) {
        let Some(of) = self.flights.get_mut(flight).and_then(Option::take) else { return };
        self.flights.release(flight);
        let at = now();
        self.complete(&Completion { finished: at, ..of.completion }, at);
        self.retire();
    }

    /// Delivers in order of arrival what a rule or unreleased batches keep back.
    fn deliver_rest(&mut self, at: Nanos) {
        for request in self.core.drain(at) {
            if self.shared.abandon.load(Ordering::Relaxed) {
                return;
            }
            let token = self.tokens.get(request.id.0 as u32 as usize).copied().filter(|token| *token != NONE);
            self.batch.clear();
            self.batch.extend(token);
            let nothing = Completion { batch: BatchId(u64::MAX), errno: 0, bytes_done: 0, started: at, finished: at };
            let flight = self.flights.insert(Some(Flight { completion: nothing, left: u32::MAX }));
            self.deliver(flight);
        }
    }

    /// Waits for a message, or until an instant. The time after that.
    fn idle(&mut self, until: Nanos) -> Nanos {
        self.retire();
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

    fn retire(&mut self) {
        if self.retired > 0 {
            self.shared.inbox.retire(std::mem::take(&mut self.retired));
        }
    }

    fn keep_shared_time(&mut self, at: Nanos) {
        let sample = SharedTime::sample(&SystemClocks);
        if self.shared_time.refresh(sample) {
            self.core.event(at, Event::SharedClock { offset_ns: sample.offset_ns, error_ns: sample.error_ns });
        }
        self.clock_due = at + CLOCK_REFRESH;
    }
}
