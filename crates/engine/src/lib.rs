//! Threads and a clock around the scheduling core: submission with back-pressure, dispatch, timers.
//!
//! The engine has one thread of its own, the timer, which sleeps unless a policy waits for an instant. Everything else
//! runs on the threads that submit and complete: the thread that changes the core takes the next batches from it and
//! starts them outside the lock. A request that can start at once therefore costs no thread switch.
//!
//! File servers share two more parts: [`ReadAhead`] gives foresight a lock and the clock, [`CachedReads`] tells whether
//! it pays to look for reads in the page cache before scheduling them; and [`workers`] are the threads for what may wait.

mod cached;
mod clock;
mod inbox;
mod interface;
mod intern;
mod read_ahead;
pub mod workers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_sched::limited::{Limited, Portions};
use impresario_sched::loads::WhoLoads;
use impresario_sched::{
    Batch, BatchId, Cancelled, ClientId, Completion, ConnId, Core, CoreConfig, Ended, Event, Extent, FileId, JobId,
    LaneId, Nanos, Next, Observer, PolicyError, PolicySpec, PredictedQueues, Request, RequestId, Status, UserId, Who,
};

pub use cached::CachedReads;
pub use clock::{Clocks, SharedTime, SystemClocks};
pub use inbox::{Inbox, NotSent};
pub use interface::{EngineConfig, Executor, Outcome, Refused, Started, Submission, Work};
use intern::Interner;
pub use read_ahead::{PagedFile, ReadAhead};

/// Reports the completion of a batch, exactly once. Dropping it without a report completes the batch with EIO.
pub struct Ticket<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    batch: BatchId,
    names: Vec<Names>,
    reported: bool,
}

impl<T: Send + 'static> Ticket<T> {
    /// Reports the completion, from any thread. May start further batches on this thread.
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
        state.tell_ended();
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

/// The interned identities of an outstanding request.
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
    /// Indexed by the slot in the request's identity.
    held: Vec<Option<Held<T>>>,
    files: Interner,
    clients: Interner,
    jobs: Interner,
    users: Interner,
    spare: Vec<Vec<Names>>,
    in_flight: usize,
    /// Threads waiting for room.
    waiting: usize,
    closed: bool,
    /// When the timer wakes; `Nanos::MAX`: never.
    alarm: Nanos,
    /// A pumping thread left work to the timer.
    handed_over: bool,
    shared_time: SharedTime,
    /// When the next pump reads the clocks again and checks the planned change.
    clock_due: Nanos,
    /// A planned change of policy and its instant in shared time, nanoseconds since 1970.
    planned: Option<(PolicySpec, i64)>,
    /// Receives requests that end.
    observer: Option<Arc<dyn Observer>>,
}

struct Shared<T: Send + 'static> {
    state: Mutex<State<T>>,
    /// A slot became free, or a batch ended.
    room: Condvar,
    /// The alarm moved forward, work was left to the timer, or the engine closes.
    timer: Condvar,
    executor: Arc<dyn Executor<T>>,
    clocks: Box<dyn Clocks>,
    stopped: AtomicBool,
    /// The last value of [`Core::allows_bypass`]: under most policies it saves the lock.
    allows_bypass: AtomicBool,
}

/// The engine. It owns one timer thread and otherwise runs on the threads of submitters and completers.
pub struct Engine<T: Send + 'static> {
    shared: Arc<Shared<T>>,
    submit_timeout: Duration,
    timer: Mutex<Option<std::thread::JoinHandle<()>>>,
}

/// The engine's clock: CLOCK_MONOTONIC in nanoseconds, the same as that of device models on this machine.
pub fn now() -> Nanos {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Maximum age of a shared-time sample while work is done, and maximum sleep of the timer while a policy or a change of
/// policy waits for an instant: the engine follows a clock change within this time.
const CLOCK_REFRESH: Nanos = Nanos(100_000_000);

/// How far ahead a change may be planned. An instant further off means that the clocks of two machines differ.
const AGREED_MAX: Nanos = Nanos(60_000_000_000);

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

    /// Queues a request with its context.
    fn take_in(&mut self, at: Nanos, submission: &Submission, context: T) -> Result<RequestId, Refused<T>> {
        if self.closed {
            return Err(Refused::Closed(context));
        }
        let names = self.intern(submission);
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
        let taken = match submission.speculative {
            true => self.core.speculate(&request),
            false => self.core.push(at, &request).ok(),
        };
        let Some(id) = taken else {
            self.release(names);
            return Err(Refused::Busy(context));
        };
        let slot = id.0 as u32 as usize;
        if self.held.len() <= slot {
            self.held.resize_with(slot + 1, || None);
        }
        self.held[slot] = Some(Held { context, names });
        Ok(id)
    }

    /// Reports ended requests to the observer, if there is one.
    fn tell_ended(&mut self) {
        if let Some(observer) = &self.observer {
            self.core.take_ended().for_each(|request| observer.ended(&request));
        }
    }

    /// Adds a reference to each.
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

    /// Drops the contexts of dropped speculations.
    fn forget_given_up(&mut self) {
        while let Some(id) = self.core.take_given_up() {
            if let Some(held) = self.take_held(id) {
                self.release(held.names);
            }
        }
    }

    fn take_held(&mut self, id: RequestId) -> Option<Held<T>> {
        self.held.get_mut(id.0 as u32 as usize)?.take()
    }

    /// Collects the contexts of a dispatched batch. Every part was submitted with a context.
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

/// Batches that a submitter starts on its own thread before it leaves the rest to the timer.
const PUMP_BATCHES: usize = 64;

impl<T: Send + 'static> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock_spinning()
    }

    /// Wakes threads that wait for room. A wake-up is a system call even if no thread waits, hence the count.
    fn make_room(&self, state: &State<T>) {
        if state.waiting > 0 {
            self.room.notify_all();
        }
    }

    fn wait_for_room<'a>(&'a self, mut state: MutexGuard<'a, State<T>>, left: Duration) -> MutexGuard<'a, State<T>> {
        state.waiting += 1;
        state = self.room.wait_timeout(state, left).0;
        state.waiting -= 1;
        state
    }

    /// Samples shared time again and makes the planned change when it is due.
    fn keep_shared_time(&self, state: &mut State<T>, at: Nanos) {
        let (before, sample) = (state.shared_time, SharedTime::sample(&*self.clocks));
        if state.shared_time.refresh(sample) {
            state.core.event(at, sample.event());
        }
        if before.contradicts(sample) {
            let step_ms = (sample.offset_ns - before.offset_ns) as f64 / 1e6;
            tracing::warn!(step_ms, error_ns = sample.error_ns, "the shared clock moved; windows follow it");
        }
        state.clock_due = at + CLOCK_REFRESH;
        let Some((spec, shared_ns)) = state.planned.take() else { return };
        if state.shared_time.at(at) >= shared_ns {
            // Validated when it was planned.
            match state.core.reconfigure(at, &spec) {
                Ok(()) => tracing::info!(policy = %spec, "switched at the agreed instant"),
                Err(refusal) => tracing::error!(policy = %spec, %refusal, "the planned change was refused"),
            }
            return;
        }
        state.clock_due = state.clock_due.min(state.shared_time.instant(shared_ns));
        state.alarm = state.alarm.min(state.clock_due);
        state.planned = Some((spec, shared_ns));
    }

    /// Starts all batches that can start, then sets the alarm. `at` is the present.
    fn pump<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State<T>>, mut at: Nanos) {
        if at >= state.clock_due {
            self.keep_shared_time(&mut state, at);
        } else if state.planned.is_some() {
            state.alarm = state.alarm.min(state.clock_due);
        }
        for started in 0..PUMP_BATCHES {
            let next = state.core.next(at);
            state.forget_given_up();
            let batch = match next {
                Next::Dispatch(batch) => batch,
                Next::Wait { until, .. } => {
                    // A clock change may bring an instant of shared time forward: read the clock again before then.
                    let until = if until == Nanos::MAX { until } else { until.min(state.clock_due.max(at)) };
                    if until < state.alarm {
                        state.alarm = until;
                        self.timer.notify_one();
                    }
                    self.note_policy(&state);
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

    /// Updates the cached properties of the policy, which may have changed.
    fn note_policy(&self, state: &State<T>) {
        let allows_bypass = state.core.allows_bypass();
        if self.allows_bypass.load(Ordering::Relaxed) != allows_bypass {
            self.allows_bypass.store(allows_bypass, Ordering::Relaxed);
        }
    }

    fn keep_time(self: Arc<Self>) {
        // Wake on time, not up to 50 µs late.
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
                state = self.timer.wait(state);
            } else {
                let left = Duration::from_nanos(state.alarm.since(at).0);
                state = self.timer.wait_timeout(state, left).0;
            }
        }
    }
}

impl<T: Send + 'static> Engine<T> {
    /// Starts an engine.
    pub fn new(config: EngineConfig, executor: Arc<dyn Executor<T>>) -> Result<Arc<Engine<T>>, PolicyError> {
        Engine::with_clocks(config, executor, Box::new(SystemClocks))
    }

    /// Starts an engine that computes shared time from these clocks. Timers still use the system's monotonic clock.
    pub fn with_clocks(
        config: EngineConfig,
        executor: Arc<dyn Executor<T>>,
        clocks: Box<dyn Clocks>,
    ) -> Result<Arc<Engine<T>>, PolicyError> {
        let core_config = CoreConfig {
            lanes: config.lanes,
            shared_space: config.shared_space,
            lane_requests: if config.lane_requests == 0 { EngineConfig::LANE_REQUESTS } else { config.lane_requests },
            lane_bytes: config.lane_bytes,
            total_requests: config.total_requests,
            sorted_below: config.sorted_below,
            lane_speculations: config.lane_speculations,
            node_rank: config.node_rank,
            capacity: config.queue_requests,
            cost: config.cost,
            pieces: config.pieces,
            statistics: true,
        };
        let mut core = Core::new(core_config, &config.policy)?;
        let allows_bypass = AtomicBool::new(core.allows_bypass());
        let shared_time = SharedTime::sample(&*clocks);
        let at = now();
        core.event(at, shared_time.event());
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
                shared_time,
                clock_due: at + CLOCK_REFRESH,
                planned: None,
                observer: None,
            }),
            room: Condvar::new(),
            timer: Condvar::new(),
            executor,
            clocks,
            allows_bypass,
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

    /// Accepts a request unless the queue is full. May run `Executor::start` on this thread.
    pub fn try_submit(&self, submission: Submission, context: T) -> Result<RequestId, Refused<T>> {
        self.try_submit_ahead(submission, context, [])
    }

    /// The same, with speculations that are accepted before the request starts.
    pub fn try_submit_ahead(
        &self,
        submission: Submission,
        context: T,
        ahead: impl IntoIterator<Item = (Submission, T)>,
    ) -> Result<RequestId, Refused<T>> {
        let mut state = self.shared.lock();
        let at = now();
        // Fails with `Busy` if there is no room.
        let id = state.take_in(at, &submission, context)?;
        for (speculation, context) in ahead {
            // No caller waits for a refused speculation.
            let _ = state.take_in(at, &speculation, context);
        }
        self.shared.pump(state, at);
        Ok(id)
    }

    /// Accepts a request; waits while the queue is full. May run `Executor::start` on this thread.
    pub fn submit(&self, submission: Submission, context: T) -> Result<RequestId, Refused<T>> {
        let mut state = self.shared.lock();
        let mut deadline = None;
        while !state.closed && state.core.room() == 0 {
            let left = self.patience(&mut deadline);
            if left.is_zero() {
                return Err(Refused::Busy(context));
            }
            self.shared.executor.before_waiting();
            state = self.shared.wait_for_room(state, left);
        }
        let at = now();
        let id = state.take_in(at, &submission, context)?;
        self.shared.pump(state, at);
        Ok(id)
    }

    /// Accepts several requests before any of them starts, as far as the queue has room; waits while it is full.
    /// Returns the refused ones. May run `Executor::start` on this thread.
    pub fn submit_all(&self, requests: impl IntoIterator<Item = (Submission, T)>) -> Vec<Refused<T>> {
        let mut refused = Vec::new();
        let mut state = self.shared.lock();
        let mut deadline = None;
        for (submission, context) in requests {
            let full = state.core.room() == 0 && !submission.speculative;
            if !state.closed && full {
                self.shared.pump(state, now());
                state = self.shared.lock();
            }
            while full && !state.closed && state.core.room() == 0 {
                let left = self.patience(&mut deadline);
                if left.is_zero() {
                    break;
                }
                self.shared.executor.before_waiting();
                state = self.shared.wait_for_room(state, left);
            }
            if let Err(back) = state.take_in(now(), &submission, context)
                && !submission.speculative
            {
                refused.push(back);
            }
        }
        self.shared.pump(state, now());
        refused
    }

    /// Whether a read that needs no device may be served at once, without being submitted; see [`Core::may_bypass`].
    pub fn may_bypass(&self, read: &Submission) -> bool {
        if !self.shared.allows_bypass.load(Ordering::Relaxed) {
            return false;
        }
        let state = self.shared.lock();
        let file = state.files.number(read.file).map(FileId);
        let end = read.lane_offset.saturating_add(read.len);
        !state.closed && state.core.may_bypass(file, read.lane, read.conn, read.lane_offset..end)
    }

    /// Records a read that was served without being submitted.
    pub fn bypassed(&self, read: &Submission, arrival: Nanos, moved_bytes: u64) {
        let mut state = self.shared.lock();
        state.core.bypassed();
        if let Some(observer) = &state.observer {
            observer.ended(&Ended {
                arrival,
                finished: now(),
                file: read.file,
                client: read.client,
                job: read.job,
                offset: read.lane_offset,
                len: read.len,
                moved_bytes,
                user: read.user,
                errno: 0,
                lane: read.lane,
                op: read.op,
            });
        }
    }

    /// The rest of the time that a submitter waits for room.
    fn patience(&self, deadline: &mut Option<Instant>) -> Duration {
        let until = *deadline.get_or_insert_with(|| Instant::now() + self.submit_timeout);
        until.saturating_duration_since(Instant::now())
    }

    /// Cancels a request: returns its context if (part of) it was still queued, `None` if it is in flight (drop its
    /// reply) or gone.
    pub fn cancel(&self, id: RequestId) -> Option<T> {
        let mut state = self.shared.lock();
        let at = now();
        if state.core.cancel(at, id) == Cancelled::Unknown {
            return None;
        }
        let held = state.take_held(id)?; // `None` if all of it is in flight
        state.release(held.names);
        self.shared.make_room(&state);
        self.shared.pump(state, at); // requests that it blocked may start now
        Some(held.context)
    }

    /// Cancels all queued requests of a connection (its client is gone); returns their contexts. Batches in flight stay
    /// and complete.
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

    /// Records whether a connection can take data, and starts what that allows. A connection is ready until reported
    /// otherwise.
    pub fn ready(&self, conn: ConnId, ready: bool) {
        self.note_readiness(conn, ready);
        if ready {
            self.go_on();
        }
    }

    /// Records whether a connection can take data, without starting anything: for callers that hold a lock.
    pub fn note_readiness(&self, conn: ConnId, ready: bool) {
        self.shared.lock().core.event(now(), Event::Ready { connection: conn, ready });
    }

    /// Starts all batches that can start. May run `Executor::start` on this thread.
    pub fn go_on(&self) {
        let state = self.shared.lock();
        self.shared.pump(state, now());
    }

    /// How the policy treats such requests, in words; `None` if it does not depend on the requester.
    pub fn explain(&self, who: &Who) -> Option<String> {
        self.shared.lock().core.explain(now(), who)
    }

    /// Switches the policy at once. An error changes nothing. Drops a planned change.
    pub fn set_policy(&self, spec: &PolicySpec) -> Result<(), PolicyError> {
        let mut state = self.shared.lock();
        let at = now();
        state.core.reconfigure(at, spec)?;
        state.planned = None;
        self.shared.pump(state, at);
        Ok(())
    }

    /// Switches the policy at an instant of shared time, nanoseconds since 1970, so that nodes configured one after the
    /// other switch together: windows that follow shared time stay coordinated. An instant in the past means now. An
    /// error is returned at once and changes nothing; a later change replaces this one.
    pub fn set_policy_at(&self, spec: &PolicySpec, shared_ns: i64) -> Result<(), PolicyError> {
        let mut state = self.shared.lock();
        state.core.check(spec)?;
        let at = now();
        state.clock_due = at;
        self.shared.keep_shared_time(&mut state, at);
        let ahead_ns = shared_ns.saturating_sub(state.shared_time.at(at));
        if ahead_ns > AGREED_MAX.0 as i64 {
            return Err(PolicyError::Unsuitable {
                policy: "switch",
                why: format!(
                    "the agreed instant is {} s ahead of this machine's clock; synchronise the clocks",
                    ahead_ns / 1_000_000_000
                ),
            });
        }
        state.planned = Some((spec.clone(), shared_ns));
        state.clock_due = at;
        self.shared.timer.notify_one();
        self.shared.pump(state, at);
        Ok(())
    }

    /// Dispatches nothing to a lane before an instant; an instant in the past ends a hold.
    pub fn hold(&self, lane: LaneId, until: Nanos) {
        let mut state = self.shared.lock();
        state.core.hold(lane, until);
        self.shared.pump(state, now()); // sets the alarm for the end of the hold, or starts batches now
    }

    /// Tells how many of the batches in flight on each of these lanes wait for a device that hangs: see
    /// [`Core::set_stuck`].
    pub fn set_stuck(&self, lanes: impl IntoIterator<Item = (LaneId, u32)>) {
        let mut state = self.shared.lock();
        lanes.into_iter().for_each(|(lane, batches)| state.core.set_stuck(lane, batches));
        self.shared.pump(state, now());
    }

    /// Changes the limits of batches and bytes in flight per lane; 0 keeps a limit.
    pub fn set_depth(&self, lane_requests: u32, lane_bytes: u64) {
        let mut state = self.shared.lock();
        state.core.set_depth(lane_requests, lane_bytes);
        self.shared.pump(state, now()); // starts what a higher limit allows
    }

    /// Sets the observer of requests that end, or none. Returns the previous one, which receives nothing more.
    pub fn observe(&self, observer: Option<Arc<dyn Observer>>) -> Option<Arc<dyn Observer>> {
        let mut state = self.shared.lock();
        state.core.watch(observer.is_some());
        std::mem::replace(&mut state.observer, observer)
    }

    /// Sets the prediction from a recorded run for policies that use one; `None` clears it.
    pub fn foresee(&self, queues: Option<Arc<PredictedQueues>>) {
        let mut state = self.shared.lock();
        // It may be large: drop it after releasing the lock.
        let before = state.core.foresee(queues);
        self.shared.pump(state, now());
        drop(before);
    }

    /// Policy, queue lengths, statistics.
    pub fn status(&self) -> Status {
        self.shared.lock().core.status()
    }

    /// The applications and users whose requests took most time recently.
    pub fn who_loads(&self) -> WhoLoads {
        let state = self.shared.lock();
        state.core.who_loads(now())
    }

    /// The classes of requests with limits, as far as they are in use, and whether these are all.
    pub fn limited(&self) -> (Vec<Limited>, bool) {
        let state = self.shared.lock();
        state.core.limited(now())
    }

    /// Sets the portions of limits over all servers that this one may grant, and starts what they allow.
    pub fn set_portions(&self, portions: Portions) {
        let mut state = self.shared.lock();
        state.core.set_portions(now(), portions);
        self.shared.pump(state, now());
    }

    /// Zeroes the statistics.
    pub fn reset_statistics(&self) {
        self.shared.lock().core.reset_statistics();
    }

    /// Stops: refuses new requests, returns queued ones, waits for at most `patience` for batches in flight.
    pub fn shutdown(&self, patience: Duration) -> Vec<T> {
        let mut state = self.shared.lock();
        state.closed = true;
        let ids = state.core.drain(now()).into_iter().map(|r| r.id).collect();
        state.forget_given_up();
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
        let timer = self.timer.lock().take();
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
