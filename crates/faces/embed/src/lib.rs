//! What a program needs around the engine to embed a scheduler: options, dispatcher threads, polling, and batches by
//! number. The C interfaces (`capi`, `agios`) are thin layers over [`Scheduler`]; Rust programs use it directly:
//! ```
//! use impresario_embed::{Options, Receiver, Scheduler, Submit};
//! let scheduler = Scheduler::new(Options::default(), Receiver::Poll).unwrap();
//! scheduler.submit(&Submit { file: 1, offset: 0, len: 4096, token: 42, ..Submit::default() }).unwrap();
//! let delivery = scheduler.next(std::time::Duration::from_secs(1)).unwrap().expect("a lone request goes at once");
//! assert_eq!(delivery.members()[0].token, 42);
//! scheduler.complete(delivery.batch().id, 0, delivery.batch().len).unwrap();
//! ```

mod batch;
mod flights;
mod foresight;
pub mod guard;
mod options;
mod ready;
mod traced;

use std::cell::RefCell;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
use impresario_base::time::wait_while;
use impresario_engine::{Engine, EngineConfig, Executor, Outcome, Refused, Started, Submission, Work, now};
use impresario_sched::{ConnId, LaneId, Naming, Nanos, Op, PolicySpec, RequestId, Status, policy};
use impresario_trace::live::FINISH_PATIENCE;

pub use batch::{Batch, Delivery, Identity, Member, SPECULATIVE, op_code, op_of};
use flights::Flights;
pub use foresight::Ahead;
use foresight::Foresight;
use impresario_foresight::Totals;
pub use impresario_trace::TraceError;
pub use options::{Dispatch, Options, parse_policy};
use ready::{Ready, Taken, Wait};
pub use traced::{Foretold, Traces};

/// A request of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Submit {
    /// Operation.
    pub op: Op,
    /// Stable key of the file.
    pub file: u64,
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Offset in the lane's own space, bytes; `None`: the same as `offset`.
    pub lane_offset: Option<u64>,
    /// Length, bytes; 1 to [`Scheduler::LEN_MAX`] for reads and writes. On barriers `u64::MAX` means "to the end".
    pub len: u64,
    /// The program's own value; returned unchanged.
    pub token: u64,
    /// Stable key of the client.
    pub client: u64,
    /// Application.
    pub job: u64,
    /// Connection.
    pub connection: u32,
    /// User.
    pub user: u32,
    /// Device or data server, below [`Options::lanes`].
    pub lane: u16,
}

impl Default for Submit {
    fn default() -> Self {
        Submit {
            op: Op::Read,
            file: 0,
            offset: 0,
            lane_offset: None,
            len: 0,
            token: 0,
            client: 0,
            job: 0,
            connection: 0,
            user: 0,
            lane: 0,
        }
    }
}

/// A refused call, with the remedy in one line. A refused call changes nothing.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Misuse {
    /// The scheduler was shut down.
    #[error("the scheduler was shut down")]
    Closed,
    /// The scheduler stayed full for the whole of its submit timeout.
    #[error("the scheduler is full ({0} requests); complete some, or raise queue_requests or the submit timeout")]
    Full(u32),
    /// A field of a request is out of range.
    #[error("{0}")]
    Request(String),
    /// No such batch is with the program.
    #[error("batch {batch:#x} is not with the program: it was completed before, or never delivered")]
    NoBatch {
        /// Its number.
        batch: u64,
    },
    /// The batch has no such member.
    #[error("batch {batch:#x} has {count} requests, so number {member} does not exist")]
    NoMember {
        /// Its number.
        batch: u64,
        /// The requested member.
        member: u32,
        /// Its number of members.
        count: usize,
    },
    /// A member was completed before.
    #[error("request {member} of batch {batch:#x} was completed before")]
    Twice {
        /// The batch.
        batch: u64,
        /// The member.
        member: u32,
    },
    /// Some members were completed one by one already.
    #[error("requests of batch {batch:#x} were completed one by one; complete the others like that too")]
    Mixed {
        /// The batch.
        batch: u64,
    },
    /// The scheduler has callbacks and cannot be polled.
    #[error("this scheduler has callbacks; polling needs one without")]
    NotPolled,
    /// The scheduler was made without what reading ahead needs.
    #[error("this scheduler does not read ahead; it needs the functions that accept and take back speculations")]
    NoAhead,
    /// A shutdown from a callback would wait for itself.
    #[error("a callback of this scheduler is running on this thread; shut it down from another thread")]
    InCallback,
}

/// How the program receives batches.
pub enum Receiver {
    /// By polling, with [`Scheduler::next`].
    Poll,
    /// By a callback, without any lock held, on the threads that [`Options::dispatch`] selects.
    Call(Box<dyn Fn(&Delivery) + Send + Sync>),
}

/// The remainder after a shutdown.
#[derive(Debug, Default)]
pub struct Left {
    /// Requests that were never delivered.
    pub dropped: Vec<Identity>,
    /// Callbacks that still ran when `patience` expired; their threads end when they return.
    pub running: usize,
}

/// The engine's executor: passes work to dispatcher threads or pollers.
struct Hands {
    ready: Ready,
    flights: Flights,
    receiver: Receiver,
    inline: bool,
    foresight: Option<Foresight>,
    /// Dispatched at the instant of closing.
    late: Mutex<Vec<Identity>>,
}

/// Batches that a thread of the program runs before it leaves the rest to the dispatchers.
const INLINE_BATCHES: usize = 64;
const EIO: i32 = 5;

thread_local! {
    /// Schedulers (by address) with a call or a callback active on this thread.
    static INSIDE: RefCell<Vec<(*const Hands, Inside)>> = const { RefCell::new(Vec::new()) };
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Inside {
    Call,
    Callback,
}

/// Marks an active call or callback on this thread while it lives.
struct Mark;

impl Mark {
    fn new(hands: *const Hands, what: Inside) -> Mark {
        let _ = INSIDE.try_with(|inside| inside.borrow_mut().push((hands, what)));
        Mark
    }

    fn there(hands: *const Hands, what: Inside) -> bool {
        INSIDE.try_with(|inside| inside.borrow().contains(&(hands, what))).unwrap_or(false)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.borrow_mut().pop());
    }
}

impl Executor<Identity> for Hands {
    fn only_hands_on(&self) -> bool {
        true
    }

    fn given_up(&self, identity: Identity) {
        if let Some(foresight) = &self.foresight {
            foresight.give_up(identity.token);
        }
    }

    fn start(&self, work: Work<Identity>) -> Started<Identity> {
        // In inline mode a thread inside a call looks for work after the call; other threads leave it to the
        // dispatcher.
        let wake = !(self.inline && Mark::there(self, Inside::Call));
        match self.ready.push(work, wake) {
            None => Started::Pending,
            Some(work) => {
                let asked = self.without_speculations(work.parts.iter().map(|(_, identity)| *identity));
                self.late.lock().extend(asked);
                let at = now();
                Started::Finished(work.ticket, Outcome { errno: EIO, bytes_done: 0, started: at, finished: at })
            }
        }
    }
}

impl Hands {
    /// Enters a batch that is to be delivered; `None` if it need not be.
    fn enter(&self, mut work: Work<Identity>) -> Option<Arc<Delivery>> {
        self.foresight.iter().for_each(|foresight| foresight.leave_out_what_is_there(&mut work));
        let delivery = self.flights.enter(work);
        if self.foresight.as_ref().is_none_or(|foresight| foresight.deliver(&delivery)) {
            return Some(delivery);
        }
        let (at, bytes_done) = (now(), delivery.batch().len);
        let there = Outcome { errno: 0, bytes_done, started: at, finished: at };
        let _ = self.flights.complete(delivery.batch().id, there, None);
        None
    }

    /// Those of requests; the speculations among them are given up.
    fn without_speculations(&self, identities: impl Iterator<Item = Identity>) -> Vec<Identity> {
        let (ahead, asked): (Vec<_>, Vec<_>) = identities.partition(|identity| identity.speculative);
        ahead.into_iter().for_each(|identity| self.given_up(identity));
        asked
    }

    fn hand_back(&self) {
        self.foresight.iter().for_each(Foresight::hand_back);
    }

    fn call(&self, work: Work<Identity>) {
        let Receiver::Call(callback) = &self.receiver else { return };
        let Some(delivery) = self.enter(work) else { return };
        let _mark = Mark::new(self, Inside::Callback);
        let called = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| callback(&delivery)));
        if called.is_err() {
            // The panic's text is on stderr; the scheduler continues without this batch.
            let at = Nanos::ZERO;
            let failed = Outcome { errno: EIO, bytes_done: 0, started: at, finished: at };
            let _ = self.flights.complete(delivery.batch().id, failed, self.foresight.as_ref());
        }
    }

    fn dispatch(&self) {
        let mut works = Vec::new();
        while let Taken::Some(lane) = self.ready.take(Wait::ForWork, &mut works, true) {
            for work in works.drain(..) {
                self.call(work);
            }
            self.ready.served(lane);
            self.hand_back();
        }
    }

    /// Runs a call of the program; in inline mode, then runs the pending callbacks.
    fn inside<R>(&self, call: impl FnOnce() -> R) -> R {
        // Within a callback, the outermost call runs the batches that this one releases: no recursion.
        if !self.inline || Mark::there(self, Inside::Call) {
            let answer = call();
            self.hand_back();
            return answer;
        }
        let mark = Mark::new(self, Inside::Call);
        let answer = call();
        self.run_some();
        drop(mark);
        self.hand_back();
        answer
    }

    /// Runs the callbacks that are pending, up to a number of batches.
    fn run_some(&self) {
        let mut works = Vec::new();
        for _ in 0..INLINE_BATCHES {
            let Taken::Some(lane) = self.ready.take(Wait::No, &mut works, false) else { return };
            for work in works.drain(..) {
                self.call(work);
            }
            self.ready.served(lane);
        }
        self.ready.nudge();
    }
}

/// A scheduler within the program. Any thread, including callbacks, may call its methods.
pub struct Scheduler {
    engine: Arc<Engine<Identity>>,
    hands: Arc<Hands>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The trace that is being written.
    trace: Mutex<Option<Arc<impresario_trace::Recorder>>>,
    /// One that its file system may keep, as it did not answer; held while a trace is started.
    started: Mutex<Option<Arc<impresario_trace::Recorder>>>,
    /// The recorded runs that predict.
    foretold: Mutex<Option<Foretold>>,
    /// Held during shutdown: a second caller waits for the outcome instead of returning early.
    closing: Mutex<()>,
    lanes: u16,
    queue_requests: u32,
}

impl Scheduler {
    /// Longest read or write, bytes (8 TiB): the sum of all outstanding lengths stays below 2^63.
    pub const LEN_MAX: u64 = 1 << 43;

    /// Creates a scheduler, or reports in one line what is wrong with the options.
    pub fn new(options: Options, receiver: Receiver) -> Result<Scheduler, String> {
        Scheduler::reading_ahead(options, receiver, None)
    }

    /// The same for a program that can read ahead, up to [`Options::read_ahead_bytes`].
    pub fn reading_ahead(
        options: Options,
        receiver: Receiver,
        ahead: Option<Box<dyn Ahead>>,
    ) -> Result<Scheduler, String> {
        options.check()?;
        if options.read_ahead_bytes > 0 && ahead.is_none() {
            return Err(format!("read_ahead_bytes = {}: {}", options.read_ahead_bytes, Misuse::NoAhead));
        }
        guard::watch_forks();
        let _quiet = guard::Quiet::new(); // until all threads are started: they inherit it
        let polled = matches!(receiver, Receiver::Poll);
        let threads = if polled { 0 } else { options.dispatch_threads() };
        let inline = !polled && options.dispatch == Dispatch::Inline;
        // The program itself limits its pollers and inline threads.
        let per_lane = if polled || inline { u32::MAX } else { threads / u32::from(options.lanes) };
        let lane_speculations = if ahead.is_some() { options.lane_speculations } else { 0 };
        let speculates = policy::speculates(&options.policy);
        let hands = Arc::new(Hands {
            ready: Ready::new(options.lanes, per_lane),
            flights: Flights::default(),
            receiver,
            inline,
            foresight: ahead.map(|ahead| Foresight::new(ahead, options.read_ahead_bytes, speculates)),
            late: Mutex::default(),
        });
        let config = EngineConfig {
            lanes: options.lanes,
            shared_space: options.shared_space,
            lane_requests: options.lane_requests,
            lane_bytes: options.lane_bytes,
            total_requests: options.total_requests,
            node_rank: options.node_rank,
            queue_requests: options.queue_requests,
            submit_timeout: options.submit_timeout,
            cost: options.cost,
            sorted_below: options.sorted_below,
            lane_speculations,
            ..EngineConfig::new(options.policy)
        };
        let engine =
            Engine::new(config, Arc::clone(&hands) as Arc<dyn Executor<Identity>>).map_err(|e| e.to_string())?;
        let (lanes, queue_requests) = (options.lanes, options.queue_requests);
        let scheduler = Scheduler {
            engine,
            hands,
            threads: Mutex::default(),
            trace: Mutex::default(),
            started: Mutex::default(),
            foretold: Mutex::default(),
            closing: Mutex::default(),
            lanes,
            queue_requests,
        };
        for n in 0..threads {
            let hands = Arc::clone(&scheduler.hands);
            let thread = std::thread::Builder::new().name(format!("dispatch-{n}")).spawn(move || hands.dispatch());
            let thread = thread.map_err(|e| {
                format!("dispatcher thread {n} cannot be started ({e}); raise the limit of threads or lower dispatch_threads")
            })?;
            scheduler.threads().push(thread);
        }
        Ok(scheduler)
    }

    fn threads(&self) -> impresario_base::lock::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock()
    }

    fn check(&self, s: &Submit) -> Result<(), Misuse> {
        let wrong = |text: String| Err(Misuse::Request(text));
        if s.lane >= self.lanes {
            return wrong(format!("lane {} does not exist: there are {}, counted from 0", s.lane, self.lanes));
        }
        if s.op.is_data() {
            if s.len == 0 {
                return wrong("len is 0: a read or write has at least 1 byte".into());
            }
            if s.len > Self::LEN_MAX {
                return wrong(format!("len {} is more than {}: divide the request", s.len, Self::LEN_MAX));
            }
            let furthest = s.offset.max(s.lane_offset.unwrap_or(0));
            if furthest.checked_add(s.len).is_none_or(|end| end == u64::MAX) {
                return wrong(format!("offset {furthest} + len {} lies beyond 2^64 - 2", s.len));
            }
        }
        Ok(())
    }

    /// Accepts a request; waits at most the submit timeout while the scheduler is full. In a callback it does not wait:
    /// it might wait for the very thread that has to serve.
    pub fn submit(&self, s: &Submit) -> Result<u64, Misuse> {
        self.check(s)?;
        let submission = Submission {
            op: s.op,
            file: s.file,
            lane: LaneId(s.lane),
            file_offset: s.offset,
            lane_offset: s.lane_offset.unwrap_or(s.offset),
            len: s.len,
            client: s.client,
            conn: ConnId(s.connection),
            job: s.job,
            user: s.user,
            naming: Naming::default(),
            speculative: false,
        };
        let identity =
            Identity { token: s.token, file: s.file, client: s.client, job: s.job, user: s.user, speculative: false };
        let ahead = self.hands.foresight.as_ref().map_or(Vec::new(), |f| f.observe(s, &submission));
        let waits = !Mark::there(Arc::as_ptr(&self.hands), Inside::Callback);
        let submit = || match waits {
            true => self.engine.submit_ahead(submission, identity, ahead),
            false => self.engine.try_submit_ahead(submission, identity, ahead),
        };
        match self.hands.inside(submit) {
            Ok(id) => Ok(id.0),
            Err(Refused::Busy(_)) => Err(Misuse::Full(self.queue_requests)),
            Err(Refused::Closed(_)) => Err(Misuse::Closed),
        }
    }

    /// The next batch of a scheduler with [`Receiver::Poll`]; `None` if `patience` expires first. It stays with the
    /// program until it is completed.
    pub fn next(&self, patience: Duration) -> Result<Option<Arc<Delivery>>, Misuse> {
        if !matches!(self.hands.receiver, Receiver::Poll) {
            return Err(Misuse::NotPolled);
        }
        let wait = if patience.is_zero() {
            Wait::No
        } else {
            Instant::now().checked_add(patience).map_or(Wait::ForWork, Wait::Until)
        };
        let mut works = Vec::with_capacity(1);
        loop {
            match self.hands.ready.take(wait, &mut works, false) {
                Taken::Some(lane) => self.hands.ready.served(lane),
                Taken::Nothing => return Ok(None),
                Taken::Closed => return Err(Misuse::Closed),
            }
            let delivery = works.pop().and_then(|work| self.hands.enter(work));
            self.hands.hand_back();
            if delivery.is_some() {
                return Ok(delivery);
            }
        }
    }

    /// Completes a batch: 0 or an errno, and the bytes transferred from its start.
    pub fn complete(&self, batch: u64, errno: i32, bytes_done: u64) -> Result<(), Misuse> {
        self.complete_timed(batch, errno, bytes_done, Nanos::ZERO, Nanos::ZERO)
    }

    /// The same with the device's own times, on CLOCK_MONOTONIC; zero stands for the time of delivery and for now.
    pub fn complete_timed(
        &self,
        batch: u64,
        errno: i32,
        bytes_done: u64,
        started: Nanos,
        finished: Nanos,
    ) -> Result<(), Misuse> {
        let outcome = Outcome { errno, bytes_done, started, finished };
        self.hands.inside(|| self.hands.flights.complete(batch, outcome, self.hands.foresight.as_ref()))
    }

    /// Completes one request of a batch; the last one completes the batch.
    pub fn complete_member(&self, batch: u64, member: u32, errno: i32, bytes: u64) -> Result<(), Misuse> {
        let foresight = self.hands.foresight.as_ref();
        self.hands.inside(|| self.hands.flights.complete_member((batch, member), errno, bytes, foresight))
    }

    /// Cancels a request: returns its identity if it was still queued, `None` if it is with the program or gone.
    pub fn cancel(&self, id: u64) -> Option<Identity> {
        self.hands.inside(|| self.engine.cancel(RequestId(id)))
    }

    /// Cancels all queued requests of a connection.
    pub fn cancel_connection(&self, connection: u32) -> Vec<Identity> {
        self.hands.inside(|| self.engine.cancel_connection(ConnId(connection)))
    }

    /// Switches the policy, live. A refusal changes nothing.
    pub fn set_policy(&self, spec: &PolicySpec) -> Result<(), String> {
        self.hands.inside(|| self.engine.set_policy(spec)).map_err(|e| e.to_string())?;
        self.hands.foresight.iter().for_each(|foresight| foresight.set_speculates(policy::speculates(spec)));
        Ok(())
    }

    /// Bytes read ahead and not yet requested, at most, from now on; 0: nothing is read ahead. Out of range, or without
    /// what reading ahead needs, it is refused.
    pub fn set_read_ahead(&self, bytes: u64) -> Result<(), Misuse> {
        options::check_read_ahead(bytes).map_err(Misuse::Request)?;
        let foresight = self.hands.foresight.as_ref().ok_or(Misuse::NoAhead)?;
        foresight.set_budget(bytes);
        Ok(())
    }

    /// What was predicted and what became of it, and the bytes of the speculations that were delivered; `None` where
    /// nothing can be read ahead.
    pub fn read_ahead(&self) -> Option<(Totals, u64)> {
        self.hands.foresight.as_ref().map(|foresight| (foresight.totals(), foresight.delivered_bytes()))
    }

    /// The same in full.
    pub fn describe_read_ahead(&self) -> Option<serde_json::Value> {
        self.hands.foresight.as_ref().map(Foresight::describe)
    }

    /// Dispatches no batch to a lane for this time; zero ends a hold.
    pub fn hold(&self, lane: u16, span: Duration) -> Result<(), Misuse> {
        if lane >= self.lanes {
            let all = self.lanes;
            return Err(Misuse::Request(format!("lane {lane} does not exist: there are {all}, counted from 0")));
        }
        let span = Nanos(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
        self.hands.inside(|| self.engine.hold(LaneId(lane), now() + span));
        Ok(())
    }

    /// Changes the limits of batches and bytes with the program per lane, live; 0 keeps a limit.
    pub fn set_depth(&self, lane_requests: u32, lane_bytes: u64) {
        self.hands.inside(|| self.engine.set_depth(lane_requests, lane_bytes));
    }

    /// Reports whether a connection can take data, for the policies that depend on it; ready until reported otherwise.
    pub fn ready(&self, connection: u32, ready: bool) {
        self.hands.inside(|| self.engine.ready(ConnId(connection), ready));
    }

    /// Policy, queues and statistics.
    pub fn status(&self) -> Status {
        self.engine.status()
    }

    /// Batches that are with the program, and batches that wait for a thread.
    pub fn delivered(&self) -> (usize, usize) {
        (self.hands.flights.count(), self.hands.ready.queued())
    }

    /// Zeroes the statistics.
    pub fn reset_statistics(&self) {
        self.engine.reset_statistics();
    }

    /// Refuses new requests, waits at most `patience` for batches that are with the program, then at most as long (at
    /// least 1 s) for callbacks to return, and as long (at least 10 s) for a trace to be written, and ends the threads.
    pub fn shutdown(&self, patience: Duration) -> Result<Left, Misuse> {
        let hands: *const Hands = Arc::as_ptr(&self.hands);
        if Mark::there(hands, Inside::Callback) {
            return Err(Misuse::InCallback);
        }
        let _closing = self.closing.lock();
        let patience = patience.min(Duration::from_secs(3600));
        let mut dropped = self.engine.shutdown(patience);
        let untaken = self.hands.ready.close();
        let parts = untaken.iter().flat_map(|work| work.parts.iter().map(|(_, identity)| *identity));
        dropped.extend(self.hands.without_speculations(parts));
        drop(untaken); // reported as EIO
        // A batch may be between the engine and us; it arrives within microseconds, or was lost with its thread.
        let is_between = || self.engine.status().in_flight_batches as usize > self.hands.flights.count();
        wait_while(&is_between, Duration::from_secs(1));
        let mut threads = std::mem::take(&mut *self.threads());
        // A callback under way gets a second at least: without one, most calls would find one running.
        // In inline mode callbacks run on threads of the program, too.
        let runs = || threads.iter().any(|t| !t.is_finished()) || self.hands.ready.taken() > 0;
        wait_while(&runs, patience.max(Duration::from_secs(1)));
        let running: Vec<_> = threads.extract_if(.., |t| !t.is_finished()).collect();
        for thread in threads {
            let _ = thread.join();
        }
        let left = Left { dropped: Vec::new(), running: running.len().max(self.hands.ready.taken()) };
        self.threads().extend(running);
        self.hands.flights.abandon();
        dropped.append(&mut self.hands.late.lock());
        self.hands.hand_back();
        self.stop_trace_within(patience.max(FINISH_PATIENCE));
        Ok(Left { dropped, ..left })
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        let _ = self.shutdown(Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;
    use std::sync::mpsc::channel;

    use super::*;

    /// The only dispatcher would wait for itself.
    #[test]
    fn a_submit_from_a_callback_never_waits_for_room() {
        let (told, answers) = channel();
        let scheduler: Arc<OnceLock<Scheduler>> = Arc::default();
        let inner = Arc::clone(&scheduler);
        let submit = Submit { len: 10, ..Submit::default() };
        let receiver = Receiver::Call(Box::new(move |delivery| {
            let scheduler = inner.wait();
            let first = scheduler.submit(&Submit { offset: 100, ..submit });
            let second = scheduler.submit(&Submit { offset: 200, ..submit });
            // A callback waits for none of the others.
            if delivery.members()[0].offset == 0 {
                told.send((first.is_ok(), second)).unwrap();
            }
            scheduler.complete(delivery.batch().id, 0, 10).unwrap();
        }));
        let options = Options {
            queue_requests: 2,
            lane_requests: 1,
            dispatch: Dispatch::Threads(1),
            submit_timeout: Duration::from_secs(3600),
            ..Options::default()
        };
        scheduler.set(Scheduler::new(options, receiver).unwrap()).ok().unwrap();
        scheduler.wait().submit(&submit).unwrap();
        let answer = answers.recv_timeout(Duration::from_secs(60)).expect("it does not wait");
        assert_eq!(answer, (true, Err(Misuse::Full(2))));
        scheduler.wait().shutdown(Duration::from_secs(10)).unwrap();
    }
}
