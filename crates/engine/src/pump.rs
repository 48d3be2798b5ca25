//! How batches start: on the thread that changed the core, or on the timer's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_sched::{BatchId, Completion, Event, Nanos, Next};

use crate::clock::{Clocks, SharedTime};
use crate::control::AGREED_MAX;
use crate::interface::{Executor, Outcome, Started, Work};
use crate::now;
use crate::state::{Names, State};

pub(crate) struct Shared<T: Send + 'static> {
    pub(crate) state: Mutex<State<T>>,
    /// A slot became free, or a batch ended.
    pub(crate) room: Condvar,
    /// The alarm moved forward, work was left to the timer, or the engine closes.
    pub(crate) timer: Condvar,
    pub(crate) executor: Arc<dyn Executor<T>>,
    pub(crate) clocks: Box<dyn Clocks>,
    pub(crate) stopped: AtomicBool,
    /// The last value of [`impresario_sched::Core::lets_pass`]: under most policies it saves the lock.
    pub(crate) lets_pass: AtomicBool,
    /// The same of [`impresario_sched::Core::may_withhold`].
    pub(crate) may_withhold: AtomicBool,
}

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

/// Maximum age of a shared-time sample while work is done, and maximum sleep of the timer while a policy or a change of
/// policy waits for an instant: the engine follows a clock change within this time.
pub(crate) const CLOCK_REFRESH: Nanos = Nanos(100_000_000);

/// Batches that a submitter starts on its own thread before it leaves the rest to the timer.
const PUMP_BATCHES: usize = 64;

impl<T: Send + 'static> Shared<T> {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock_spinning()
    }

    /// Wakes threads that wait for room. A wake-up is a system call even if no thread waits, hence the count.
    pub(crate) fn make_room(&self, state: &State<T>) {
        if state.waiting > 0 {
            self.room.notify_all();
        }
    }

    pub(crate) fn wait_for_room<'a>(
        &'a self,
        mut state: MutexGuard<'a, State<T>>,
        left: Duration,
    ) -> MutexGuard<'a, State<T>> {
        state.waiting += 1;
        state = self.room.wait_timeout(state, left).0;
        state.waiting -= 1;
        state
    }

    /// Samples shared time again and makes the planned change when it is due.
    pub(crate) fn keep_shared_time(&self, state: &mut State<T>, at: Nanos) {
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
        let ahead_ns = shared_ns.saturating_sub(state.shared_time.at(at));
        // A clock that was set back after it was planned would delay it for as long.
        if ahead_ns <= 0 || ahead_ns > AGREED_MAX.0 as i64 {
            // Validated when it was planned.
            match state.core.reconfigure(at, &spec) {
                Ok(()) if ahead_ns <= 0 => tracing::info!(policy = %spec, "switched at the agreed instant"),
                Ok(()) => tracing::warn!(policy = %spec, "switched at once: the shared clock was set back"),
                Err(refusal) => tracing::error!(policy = %spec, %refusal, "the planned change was refused"),
            }
            return;
        }
        state.clock_due = state.clock_due.min(state.shared_time.instant(shared_ns));
        state.alarm = state.alarm.min(state.clock_due);
        state.planned = Some((spec, shared_ns));
    }

    /// Starts all batches that can start, then sets the alarm. `at` is the present.
    pub(crate) fn pump<'a>(self: &'a Arc<Self>, mut state: MutexGuard<'a, State<T>>, mut at: Nanos) {
        if at >= state.clock_due {
            self.keep_shared_time(&mut state, at);
        } else if state.planned.is_some() {
            state.alarm = state.alarm.min(state.clock_due);
        }
        for started in 0..PUMP_BATCHES {
            let next = state.core.next(at);
            state.forget_given_up(&*self.executor);
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
    pub(crate) fn note_policy(&self, state: &State<T>) {
        let lets_pass = state.core.lets_pass();
        if self.lets_pass.load(Ordering::Relaxed) != lets_pass {
            self.lets_pass.store(lets_pass, Ordering::Relaxed);
        }
        let may_withhold = state.core.may_withhold();
        if self.may_withhold.load(Ordering::Relaxed) != may_withhold {
            self.may_withhold.store(may_withhold, Ordering::Relaxed);
        }
    }

    pub(crate) fn keep_time(self: Arc<Self>) {
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
