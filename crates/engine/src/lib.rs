//! Threads and a clock around the scheduling core: submission with back-pressure, dispatch, timers.
//!
//! The engine owns one thread, its timer, which sleeps unless a policy waits for an instant. Everything
//! else runs on the threads that submit and complete: whoever changes the core asks it for the next batches and
//! starts them, outside the lock. A request that may go at once therefore costs no hand-over
//! between threads.

mod intern;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use impresario_sched::{
    Batch, BatchId, Cancelled, ClientId, Completion, ConnId, Core, CoreConfig, CostModel, Event, Extent, FileId, JobId,
    LaneId, Nanos, Next, Op, PolicyError, PolicySpec, Request, RequestId, Status, UserId, Who,
};

use intern::Interner;

/// How a batch ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// 0, or a Linux errno.
    pub errno: i32,
    /// Bytes moved, from the start of the batch.
    pub bytes_done: u64,
    /// When the device took it up, on the engine's clock.
    pub started: Nanos,
    /// When the device was done with it; may lie a little before "now" on a modelled device.
    pub finished: Nanos,
}

/// A dispatched batch with the submitters' contexts.
pub struct Work<T: Send + 'static> {
    /// The virtual request.
    pub batch: Batch,
    /// One per `batch.parts`, in the same order: the request and what came with it.
    pub parts: Vec<(Request, T)>,
    /// To be completed exactly once.
    pub ticket: Ticket<T>,
    /// When it was dispatched, on the engine's clock.
    pub dispatched: Nanos,
}

/// The duty to report a batch's end. Dropping it unreported completes the batch as EIO.
pub struct Ticket<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    batch: BatchId,
    names: Vec<Names>,
    reported: bool,
}

impl<T: Send + 'static> Ticket<T> {
    /// Reports the end; from any thread. May start further batches on this thread.
    pub fn complete(mut self, outcome: Outcome) {
        self.report(outcome);
    }

    fn report(&mut self, outcome: Outcome) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let at = now();
        self.record(&mut state, outcome, at);
        shared.pump(state, at);
    }

    fn record(&mut self, state: &mut State<T>, outcome: Outcome, at: Nanos) {
        self.reported = true;
        let Outcome { errno, bytes_done, started, finished } = outcome;
        let completion = Completion { batch: self.batch, errno, bytes_done, started, finished };
        state.core.event(at, Event::Completed(completion));
        let mut names = std::mem::take(&mut self.names);
        for n in names.drain(..) {
            state.release(n);
        }
        state.spare.push(names);
        state.in_flight -= 1;
        self.shared.make_room(state);
    }
}

impl<T: Send + 'static> Drop for Ticket<T> {
    fn drop(&mut self) {
        if !self.reported {
            let at = now();
            self.report(Outcome { errno: EIO, bytes_done: 0, started: at, finished: at });
        }
    }
}

const EIO: i32 = 5;

/// What became of a started batch.
pub enum Started<T: Send + 'static> {
    /// The executor completes it later.
    Pending,
    /// It is done already; the engine records it without recursion.
    Finished(Ticket<T>, Outcome),
}

/// What serves batches.
pub trait Executor<T: Send + 'static>: Send + Sync + 'static {
    /// Begins a batch. Called without any lock of the engine held, on the thread of a submitter, of a
    /// completer or of the timer; it must not block for long: it finishes at once or hands on.
    fn start(&self, work: Work<T>) -> Started<T>;

    /// Called after one or more [`Executor::start`] when nothing more can start at present: what was begun together is
    /// known to be complete. Without any lock of the engine held; others may start batches meanwhile.
    fn all_started(&self) {}

    /// True when `start` only hands on, within a microsecond or so: the engine then looks at the clock less often.
    fn only_hands_on(&self) -> bool {
        false
    }

    /// Divides a context: gives one for the bytes `from .. from + len` of its request, which are dispatched as a request of
    /// their own; `last` when none follow. Called with the engine's lock held, and only with
    /// [`EngineConfig::pieces`].
    fn piece(&self, _context: &mut T, _from: u64, _len: u64, _last: bool) -> T {
        unreachable!("EngineConfig::pieces is for executors that divide contexts")
    }
}

/// A request as the server got it; keys are interned by the engine.
#[derive(Clone, Copy, Debug)]
pub struct Submission {
    /// Operation.
    pub op: Op,
    /// Stable key of the file.
    pub file: u64,
    /// Lane.
    pub lane: LaneId,
    /// Offset in the file, bytes.
    pub file_offset: u64,
    /// Offset in the lane's space, bytes (equal to `file_offset` where requests are not split).
    pub lane_offset: u64,
    /// Length, bytes; `u64::MAX` on barriers means "to the end".
    pub len: u64,
    /// Stable key of the client.
    pub client: u64,
    /// Connection.
    pub conn: ConnId,
    /// Application.
    pub job: u64,
    /// User.
    pub user: u32,
}

/// Why a submission was refused; the context comes back.
pub enum Refused<T> {
    /// The queue stayed full for the configured time.
    Busy(T),
    /// The engine is shutting down.
    Closed(T),
}

/// Limits of an engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// Number of lanes: 1 on a data server, the number of data servers on an I/O node.
    pub lanes: u16,
    /// Lanes address one space (an I/O node that does not split): conflicts are judged across lanes.
    pub shared_space: bool,
    /// The policy.
    pub policy: PolicySpec,
    /// In-flight limit of a lane in batches; 0: [`EngineConfig::LANE_REQUESTS`].
    pub lane_requests: u32,
    /// In-flight limit of a lane in bytes.
    pub lane_bytes: u64,
    /// In-flight limit over all lanes in batches.
    pub total_requests: u32,
    /// Position of this node among its like (which rotation of servers `twins` uses).
    pub node_rank: u32,
    /// Bound of the queue, requests (queued and in flight).
    pub queue_requests: u32,
    /// How long `submit` waits while the queue is full.
    pub submit_timeout: Duration,
    /// Time to process, for the policies that go by it.
    pub cost: CostModel,
    /// The executor takes requests piece by piece ([`Executor::piece`]).
    pub pieces: bool,
}

impl EngineConfig {
    /// Batches in flight per lane unless configured: enough for a device that serves many at once.
    pub const LANE_REQUESTS: u32 = 32;

    /// One lane, defaults everywhere.
    pub fn new(policy: PolicySpec) -> EngineConfig {
        EngineConfig {
            lanes: 1,
            shared_space: false,
            policy,
            lane_requests: 0,
            lane_bytes: u64::MAX,
            total_requests: u32::MAX,
            node_rank: 0,
            queue_requests: 10_000,
            submit_timeout: Duration::from_secs(10),
            cost: CostModel::default(),
            pieces: false,
        }
    }
}

/// The interned names of a request, held while it is outstanding.
#[derive(Clone, Copy)]
struct Names {
    file: u32,
    client: u32,
    job: u32,
    user: u32,
}

struct Held<T> {
    context: T,
    names: Names,
}

struct State<T> {
    core: Core,
    /// By slot of the request's identity.
    held: Vec<Option<Held<T>>>,
    files: Interner,
    clients: Interner,
    jobs: Interner,
    users: Interner,
    spare: Vec<Vec<Names>>,
    in_flight: usize,
    /// Threads that wait for room.
    waiting: usize,
    closed: bool,
    /// When the timer wakes; `Nanos::MAX`: not.
    alarm: Nanos,
    /// Work is left that a pumping thread handed to the timer.
    handed_over: bool,
}

struct Shared<T: Send + 'static> {
    state: Mutex<State<T>>,
    /// A slot became free, or a batch ended.
    room: Condvar,
    /// The alarm moved forward, work was handed over, or the engine closes.
    timer: Condvar,
    executor: Arc<dyn Executor<T>>,
    stopped: AtomicBool,
}

/// The engine. Threads: one timer; the rest is borrowed from submitters and completers.
pub struct Engine<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    submit_timeout: Duration,
    timer: Mutex<Option<std::thread::JoinHandle<()>>>,
}

/// The engine's clock: CLOCK_MONOTONIC in nanoseconds, so that instants of a device model on this machine mean the same.
pub fn now() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// What to add to [`now`] for the time that machines with synchronised clocks share, nanoseconds.
fn shared_clock_offset_ns() -> i64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (t.tv_sec * 1_000_000_000 + t.tv_nsec) - now().0 as i64
}

impl<T: Send + 'static> State<T> {
    fn intern(&mut self, s: &Submission) -> Names {
        let n = Names {
            file: self.files.take(s.file),
            client: self.clients.take(s.client),
            job: self.jobs.take(s.job),
            user: self.users.take(u64::from(s.user)),
        };
        let keys = self.core.names_mut();
        keys.name_file(FileId(n.file), s.file);
        keys.name_client(ClientId(n.client), s.client);
        keys.name_job(JobId(n.job), s.job);
        keys.name_user(UserId(n.user), u64::from(s.user));
        n
    }

    /// One more reference to each.
    fn again(&mut self, n: Names) {
        self.files.again(n.file);
        self.clients.again(n.client);
        self.jobs.again(n.job);
        self.users.again(n.user);
    }

    fn release(&mut self, n: Names) {
        self.files.release(n.file);
        self.clients.release(n.client);
        self.jobs.release(n.job);
        self.users.release(n.user);
    }

    fn take_held(&mut self, id: RequestId) -> Option<Held<T>> {
        self.held.get_mut(id.0 as u32 as usize)?.take()
    }

    /// Collects what belongs to a dispatched batch. Every part of it was submitted with a context.
    fn gather(&mut self, batch: &Batch, executor: &dyn Executor<T>) -> (Vec<(Request, T)>, Vec<Names>) {
        let mut names = self.spare.pop().unwrap_or_default();
        let mut parts = Vec::with_capacity(batch.parts.len());
        for part in &batch.parts {
            let Some(mut request) = self.core.request(part.id) else { continue };
            let (whole, last) = (request.extent.len, part.from.saturating_add(part.len) >= request.extent.len);
            if part.len == whole {
                let Some(held) = self.take_held(part.id) else { continue };
                names.push(held.names);
                parts.push((request, held.context));
                continue;
            }
            let Some(held) = self.held.get_mut(part.id.0 as u32 as usize).and_then(Option::as_mut) else { continue };
            let piece = executor.piece(&mut held.context, part.from, part.len, last);
            let of = held.names;
            if last {
                self.take_held(part.id);
            } else {
                self.again(of);
            }
            names.push(of);
            request.extent.lane_offset += part.from;
            request.extent.file_offset += part.from;
            request.extent.len = part.len;
            parts.push((request, piece));
        }
        debug_assert_eq!(parts.len(), batch.parts.len());
        (parts, names)
    }
}

/// Attempts to take the engine's lock before a thread sleeps for it: a few microseconds.
const SPIN_ROUNDS: u32 = 12;

/// Batches that a submitter starts on its own thread before it hands the rest to the timer's.
const PUMP_BATCHES: usize = 64;

impl<T: Send + 'static> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // The lock is held for less than a microsecond; to sleep and be woken costs ten. Once a thread sleeps for a
        // lock of the standard library, all others do too, so nobody goes to sleep before it has waited that long.
        for round in 0..SPIN_ROUNDS {
            match self.state.try_lock() {
                Ok(state) => return state,
                // Nothing that can panic runs between a change and the end of its consequences.
                Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => (0..1 << round.min(5)).for_each(|_| std::hint::spin_loop()),
            }
        }
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes those who wait for room. Waking costs a system call even when nobody listens, hence the count.
    fn make_room(&self, state: &State<T>) {
        if state.waiting > 0 {
            self.room.notify_all();
        }
    }

    fn wait_for_room<'a>(&'a self, mut state: MutexGuard<'a, State<T>>, left: Duration) -> MutexGuard<'a, State<T>> {
        state.waiting += 1;
        state = self.room.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        state.waiting -= 1;
        state
    }

    /// Starts what may start, then sets the alarm. `at` is the present.
    fn pump<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State<T>>, mut at: Nanos) {
        for started in 0..PUMP_BATCHES {
            let batch = match state.core.next(at) {
                Next::Dispatch(batch) => batch,
                Next::Wait { until, .. } => {
                    if until < state.alarm {
                        state.alarm = until;
                        self.timer.notify_one();
                    }
                    drop(state);
                    if started > 0 {
                        self.executor.all_started();
                    }
                    return;
                }
            };
            let (parts, names) = state.gather(&batch, &*self.executor);
            state.in_flight += 1;
            drop(state);
            let ticket = Ticket { shared: Arc::clone(self), batch: batch.id, names, reported: false };
            let started = self.executor.start(Work { batch, parts, ticket, dispatched: at });
            state = self.lock();
            if !self.executor.only_hands_on() {
                at = now();
            }
            if let Started::Finished(mut ticket, outcome) = started {
                ticket.record(&mut state, outcome, at);
            }
        }
        state.handed_over = true;
        self.timer.notify_one();
        drop(state);
        self.executor.all_started();
    }

    fn keep_time(self: Arc<Self>) {
        // Wake when asked to, not up to 50 µs later.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZero::new(1));
        let mut state = self.lock();
        while !self.stopped.load(Ordering::Acquire) {
            let at = now();
            if state.handed_over || state.alarm <= at {
                state.handed_over = false;
                state.alarm = Nanos::MAX;
                self.pump(state, at);
                state = self.lock();
            } else if state.alarm == Nanos::MAX {
                state = self.timer.wait(state).unwrap_or_else(PoisonError::into_inner);
            } else {
                let left = Duration::from_nanos(state.alarm.since(at).0);
                state = self.timer.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl<T: Send + 'static> Engine<T> {
    /// Starts an engine.
    pub fn new(config: EngineConfig, executor: Arc<dyn Executor<T>>) -> Result<Arc<Engine<T>>, PolicyError> {
        let core_config = CoreConfig {
            lanes: config.lanes,
            shared_space: config.shared_space,
            lane_requests: if config.lane_requests == 0 { EngineConfig::LANE_REQUESTS } else { config.lane_requests },
            lane_bytes: config.lane_bytes,
            total_requests: config.total_requests,
            node_rank: config.node_rank,
            capacity: config.queue_requests,
            cost: config.cost,
            pieces: config.pieces,
            statistics: true,
        };
        let mut core = Core::new(core_config, &config.policy)?;
        let clock = Event::SharedClock { offset_ns: shared_clock_offset_ns(), error_ns: 0 };
        core.event(now(), clock);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                core,
                held: Vec::new(),
                files: Interner::default(),
                clients: Interner::default(),
                jobs: Interner::default(),
                users: Interner::default(),
                spare: Vec::new(),
                in_flight: 0,
                waiting: 0,
                closed: false,
                alarm: Nanos::MAX,
                handed_over: false,
            }),
            room: Condvar::new(),
            timer: Condvar::new(),
            executor,
            stopped: AtomicBool::new(false),
        });
        let timer = std::thread::Builder::new().name("engine-timer".into()).stack_size(256 << 10).spawn({
            let shared = Arc::clone(&shared);
            move || shared.keep_time()
        });
        let timer = timer.map_err(|e| PolicyError::Unsuitable {
            policy: "engine",
            why: format!("its timer thread cannot be started ({e}); raise the limit of threads"),
        })?;
        Ok(Arc::new(Engine { shared, submit_timeout: config.submit_timeout, timer: Mutex::new(Some(timer)) }))
    }

    /// The engine's clock, see [`now`].
    pub fn now(&self) -> Nanos {
        now()
    }

    /// Takes a request in; waits while the queue is full. May run `Executor::start` on this thread.
    pub fn submit(&self, submission: Submission, context: T) -> Result<RequestId, Refused<T>> {
        let mut state = self.shared.lock();
        let mut deadline = None;
        while !state.closed && state.core.room() == 0 {
            let until = *deadline.get_or_insert_with(|| Instant::now() + self.submit_timeout);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refused::Busy(context));
            }
            state = self.shared.wait_for_room(state, left);
        }
        if state.closed {
            return Err(Refused::Closed(context));
        }
        let names = state.intern(&submission);
        let at = now();
        let request = Request {
            id: RequestId(0),
            extent: Extent {
                file: FileId(names.file),
                lane: submission.lane,
                file_offset: submission.file_offset,
                lane_offset: submission.lane_offset,
                len: submission.len,
            },
            arrival: at,
            client: ClientId(names.client),
            conn: submission.conn,
            job: JobId(names.job),
            user: UserId(names.user),
            op: submission.op,
        };
        let Ok(id) = state.core.push(at, &request) else {
            state.release(names);
            return Err(Refused::Busy(context));
        };
        let slot = id.0 as u32 as usize;
        if state.held.len() <= slot {
            state.held.resize_with(slot + 1, || None);
        }
        state.held[slot] = Some(Held { context, names });
        self.shared.pump(state, at);
        Ok(id)
    }

    /// Withdraws a request: its context if (some of) it was still queued, `None` when it is in flight (drop its reply) or
    /// gone.
    pub fn cancel(&self, id: RequestId) -> Option<T> {
        let mut state = self.shared.lock();
        let at = now();
        if state.core.cancel(at, id) == Cancelled::Unknown {
            return None;
        }
        let held = state.take_held(id)?; // nothing when all of it is in flight
        state.release(held.names);
        self.shared.make_room(&state);
        self.shared.pump(state, at); // what it blocked may go now
        Some(held.context)
    }

    /// Drops every queued request of a connection (its client is gone); returns their contexts.
    /// In-flight ones stay and complete.
    pub fn cancel_connection(&self, conn: ConnId) -> Vec<T> {
        let mut state = self.shared.lock();
        let at = now();
        let ids = state.core.cancel_connection(at, conn);
        let contexts = self.collect(&mut state, ids);
        self.shared.make_room(&state);
        self.shared.pump(state, at);
        contexts
    }

    fn collect(&self, state: &mut State<T>, ids: Vec<RequestId>) -> Vec<T> {
        let held: Vec<Held<T>> = ids.into_iter().filter_map(|id| state.take_held(id)).collect();
        held.into_iter()
            .map(|h| {
                state.release(h.names);
                h.context
            })
            .collect()
    }

    /// Tells whether a connection can take data. Those not heard of can.
    pub fn ready(&self, conn: ConnId, ready: bool) {
        let mut state = self.shared.lock();
        let at = now();
        state.core.event(at, Event::Ready { connection: conn, ready });
        if ready {
            self.shared.pump(state, at);
        }
    }

    /// What the policy does with such requests, in words; `None` where that does not depend on who asks.
    pub fn explain(&self, who: &Who) -> Option<String> {
        self.shared.lock().core.explain(now(), who)
    }

    /// Switches the policy, live. A refusal changes nothing.
    pub fn set_policy(&self, spec: &PolicySpec) -> Result<(), PolicyError> {
        let mut state = self.shared.lock();
        let at = now();
        state.core.reconfigure(at, spec)?;
        self.shared.pump(state, at);
        Ok(())
    }

    /// Lets no batch go to a lane before an instant; one in the past ends a hold.
    pub fn hold(&self, lane: LaneId, until: Nanos) {
        let mut state = self.shared.lock();
        state.core.hold(lane, until);
        self.shared.pump(state, now()); // sets the alarm for the end of the hold, or starts what may go now
    }

    /// Policy, queue lengths, statistics.
    pub fn status(&self) -> Status {
        self.shared.lock().core.status()
    }

    /// Zeroes the statistics.
    pub fn reset_statistics(&self) {
        self.shared.lock().core.reset_statistics();
    }

    /// Stops: refuses new requests, returns what was queued, waits at most `patience` for what is in flight.
    pub fn shutdown(&self, patience: Duration) -> Vec<T> {
        let mut state = self.shared.lock();
        state.closed = true;
        let ids = state.core.drain(now()).into_iter().map(|r| r.id).collect();
        let contexts = self.collect(&mut state, ids);
        self.shared.make_room(&state);
        let until = Instant::now() + patience;
        while state.in_flight > 0 {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.shared.wait_for_room(state, left);
        }
        drop(state);
        self.stop_timer();
        contexts
    }

    fn stop_timer(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        drop(self.shared.lock()); // the timer is either before its check or already waiting
        self.shared.timer.notify_all();
        let timer = self.timer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(timer) = timer.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = timer.join();
        }
    }
}

impl<T: Send + 'static> Drop for Engine<T> {
    fn drop(&mut self) {
        self.stop_timer();
    }
}
