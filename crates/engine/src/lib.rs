//! Threads and a clock around the scheduling core: submission with back-pressure, dispatch, timers.
//!
//! The engine has one thread of its own, the timer, which sleeps unless a policy waits for an instant. Everything else
//! runs on the threads that submit and complete: the thread that changes the core takes the next batches from it and
//! starts them outside the lock. A request that can start at once therefore costs no thread switch.
//!
//! File servers share three more parts: [`ReadAhead`] gives foresight a lock and the clock, [`CachedReads`] tells whether
//! it pays to look for reads in the page cache before scheduling them, and [`workers`] has the threads for work that may
//! wait.

mod cached;
mod clock;
mod control;
mod inbox;
mod interface;
mod intern;
mod passing;
mod pump;
mod read_ahead;
mod state;
pub mod workers;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_sched::{Cancelled, ConnId, Core, CoreConfig, Event, Nanos, PolicyError, RequestId};

pub use cached::CachedReads;
pub use clock::{Clocks, SharedTime, SystemClocks};
pub use inbox::{Inbox, Mail, NotSent};
pub use interface::{EngineConfig, Executor, Outcome, Refused, Started, Submission, Work};
use intern::Interner;
pub use passing::Passing;
pub use pump::Ticket;
use pump::{CLOCK_REFRESH, Shared};
pub use read_ahead::{PagedFile, ReadAhead};
use state::{Held, State};

/// How often a submitter that waits for queue room calls [`Executor::before_waiting`].
const STILL_WAITING_EVERY: Duration = Duration::from_millis(400);

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
            lane_syncs: config.lane_syncs,
            sorted_below: config.sorted_below,
            scheduled_below: config.scheduled_below,
            lane_speculations: config.lane_speculations,
            node_rank: config.node_rank,
            started: now(),
            capacity: config.queue_requests,
            cost: config.cost,
            pieces: config.pieces,
            statistics: true,
        };
        let mut core = Core::new(core_config, &config.policy)?;
        let lets_pass = AtomicBool::new(core.lets_pass());
        let may_withhold = AtomicBool::new(core.may_withhold());
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
            lets_pass,
            may_withhold,
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

    /// Accepts a request unless the queue is full, and speculations before it. May run `Executor::start` on this thread.
    pub fn try_submit_ahead(
        &self,
        submission: Submission,
        context: T,
        ahead: impl IntoIterator<Item = (Submission, T)>,
    ) -> Result<RequestId, Refused<T>> {
        // Fails with `Busy` if there is no room.
        self.take_in_ahead(self.shared.lock(), submission, context, ahead)
    }

    /// Accepts a request; waits while the queue is full. May run `Executor::start` on this thread.
    pub fn submit(&self, submission: Submission, context: T) -> Result<RequestId, Refused<T>> {
        self.submit_ahead(submission, context, [])
    }

    /// The same, with speculations that are accepted before the request starts.
    pub fn submit_ahead(
        &self,
        submission: Submission,
        context: T,
        ahead: impl IntoIterator<Item = (Submission, T)>,
    ) -> Result<RequestId, Refused<T>> {
        let mut state = self.shared.lock();
        let mut deadline = None;
        while !state.closed && state.core.room() == 0 {
            let left = self.patience(&mut deadline);
            if left.is_zero() {
                break;
            }
            state = self.wait_for_room(state, left);
        }
        self.take_in_ahead(state, submission, context, ahead)
    }

    fn take_in_ahead(
        &self,
        mut state: MutexGuard<'_, State<T>>,
        submission: Submission,
        context: T,
        ahead: impl IntoIterator<Item = (Submission, T)>,
    ) -> Result<RequestId, Refused<T>> {
        let at = now();
        let taken = state.take_in(at, &submission, context);
        if taken.is_err() {
            ahead.into_iter().for_each(|(_, context)| self.shared.executor.given_up(context));
            return taken;
        }
        state.take_in_ahead(at, ahead, &*self.shared.executor);
        self.shared.pump(state, at);
        taken
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
                state = self.wait_for_room(state, left);
            }
            match state.take_in(now(), &submission, context) {
                Ok(_) => {}
                Err(back) if submission.speculative => self.shared.executor.given_up(back.context()),
                Err(back) => refused.push(back),
            }
        }
        self.shared.pump(state, now());
        refused
    }

    /// Waits for room on a submitter's thread.
    fn wait_for_room<'a>(&'a self, state: MutexGuard<'a, State<T>>, left: Duration) -> MutexGuard<'a, State<T>> {
        drop(state);
        self.shared.executor.before_waiting();
        let state = self.shared.lock();
        if state.closed || state.core.room() > 0 {
            state
        } else {
            self.shared.wait_for_room(state, left.min(STILL_WAITING_EVERY))
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
        self.cancel_all(|state, at| state.core.cancel_connection(at, conn))
    }

    /// The same of the queued requests whose contexts `is_given_up` accepts. With the engine's lock held it must be quick.
    pub fn cancel_where(&self, is_given_up: impl Fn(&T) -> bool) -> Vec<T> {
        self.cancel_all(|State { core, held, .. }, at| {
            let context = |id: RequestId| held.get(id.0 as u32 as usize).and_then(Option::as_ref);
            core.cancel_where(at, |id| context(id).is_some_and(|held| is_given_up(&held.context)))
        })
    }

    fn cancel_all(&self, cancel: impl FnOnce(&mut State<T>, Nanos) -> Vec<RequestId>) -> Vec<T> {
        let mut state = self.shared.lock();
        let at = now();
        let ids = cancel(&mut state, at);
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

    /// Stops: refuses new requests, returns queued ones, waits for at most `patience` for batches in flight.
    pub fn shutdown(&self, patience: Duration) -> Vec<T> {
        let mut state = self.shared.lock();
        state.closed = true;
        let ids = state.core.drain(now()).into_iter().map(|r| r.id).collect();
        state.forget_given_up(&*self.shared.executor);
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
