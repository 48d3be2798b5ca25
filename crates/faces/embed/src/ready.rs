//! Batches that the scheduler dispatched and nobody has taken up yet, and whose turn it is to take one.
//!
//! One queue per lane, served in turn, so that a lane whose callback blocks holds nobody else up. At most
//! [`Ready::per_lane`] threads serve one lane at a time: with as many threads as lanes each lane has its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use impresario_engine::Work;

use crate::Identity;

/// Batches of one lane that a thread takes at a time where nobody else could serve that lane meanwhile.
const BURST: usize = 32;

#[derive(Default)]
struct Lane {
    queue: VecDeque<Work<Identity>>,
    serving: u32,
    /// In `turns`.
    listed: bool,
}

struct State {
    lanes: Vec<Lane>,
    /// Lanes with work and a free place, in turn.
    turns: VecDeque<u16>,
    queued: usize,
    sleeping: usize,
    closed: bool,
}

/// The hand-over between the scheduler and the threads that run callbacks or poll.
pub(crate) struct Ready {
    state: Mutex<State>,
    work: Condvar,
    per_lane: u32,
    /// Turns there are, for a look without the lock.
    turns: AtomicUsize,
    /// Threads between `take` and `served`: they run callbacks, or are about to.
    taken: AtomicUsize,
}

/// How long a thread is willing to wait.
#[derive(Clone, Copy)]
pub(crate) enum Wait {
    /// Not at all.
    No,
    /// Until then.
    Until(Instant),
    /// Until there is work or the end: closing ends it.
    ForWork,
}

/// What a thread got.
pub(crate) enum Taken {
    /// Batches of one lane; [`Ready::served`] gives the lane's place back.
    Some(u16),
    /// Nothing within the time.
    Nothing,
    /// The scheduler was closed.
    Closed,
}

impl Ready {
    /// For so many lanes, at most `per_lane` threads on each.
    pub fn new(lanes: u16, per_lane: u32) -> Ready {
        let mut all = Vec::new();
        all.resize_with(usize::from(lanes.max(1)), Lane::default);
        let state = State { lanes: all, turns: VecDeque::new(), queued: 0, sleeping: 0, closed: false };
        Ready {
            state: Mutex::new(state),
            work: Condvar::new(),
            per_lane: per_lane.max(1),
            turns: AtomicUsize::new(0),
            taken: AtomicUsize::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock can panic half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a batch; gives it back when closed. `wake` is false where the caller itself will look.
    pub fn push(&self, work: Work<Identity>, wake: bool) -> Option<Work<Identity>> {
        let mut s = self.lock();
        if s.closed {
            return Some(work);
        }
        let n = work.batch.extent.lane.0;
        let lane = &mut s.lanes[usize::from(n)];
        lane.queue.push_back(work);
        let list = !lane.listed && lane.serving < self.per_lane;
        lane.listed |= list;
        if list {
            s.turns.push_back(n);
            self.turns.store(s.turns.len(), Ordering::Release);
        }
        s.queued += 1;
        // Waking costs a system call: only when somebody sleeps and there is a turn to take.
        if wake && list && s.sleeping > 0 {
            drop(s);
            self.work.notify_one();
        }
        None
    }

    /// Takes batches of the lane whose turn it is.
    pub fn take(&self, wait: Wait, out: &mut Vec<Work<Identity>>, burst: bool) -> Taken {
        // A thread that does not wait sees all that it made ready itself.
        if matches!(wait, Wait::No) && self.turns.load(Ordering::Acquire) == 0 {
            return Taken::Nothing;
        }
        let mut s = self.lock();
        loop {
            if s.closed {
                return Taken::Closed;
            }
            if let Some(n) = s.turns.pop_front() {
                let lane = &mut s.lanes[usize::from(n)];
                lane.listed = false;
                lane.serving += u32::from(self.per_lane != u32::MAX);
                let count = if burst && self.per_lane == 1 { lane.queue.len().min(BURST) } else { 1 };
                out.extend(lane.queue.drain(..count.min(lane.queue.len())));
                if !lane.queue.is_empty() && lane.serving < self.per_lane {
                    lane.listed = true;
                    s.turns.push_back(n);
                }
                s.queued -= out.len();
                self.turns.store(s.turns.len(), Ordering::Release);
                // Under the lock: who has closed since sees everybody who took something before.
                self.taken.fetch_add(1, Ordering::Relaxed);
                // Another sleeper may take the next turn; who does not wait comes back for it himself.
                if !matches!(wait, Wait::No) && !s.turns.is_empty() && s.sleeping > 0 {
                    self.work.notify_one();
                }
                return Taken::Some(n);
            }
            let left = match wait {
                Wait::No => return Taken::Nothing,
                Wait::ForWork => None,
                Wait::Until(at) => Some(at.saturating_duration_since(Instant::now())),
            };
            if left.is_some_and(|left| left.is_zero()) {
                return Taken::Nothing;
            }
            s.sleeping += 1;
            s = match left {
                None => self.work.wait(s).unwrap_or_else(PoisonError::into_inner),
                Some(left) => self.work.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0,
            };
            s.sleeping -= 1;
        }
    }

    /// The callbacks of what was taken from a lane are over.
    pub fn served(&self, n: u16) {
        self.taken.fetch_sub(1, Ordering::Release);
        let per_lane = self.per_lane;
        if per_lane == u32::MAX {
            return; // nobody waits for a place
        }
        let mut s = self.lock();
        let lane = &mut s.lanes[usize::from(n)];
        lane.serving = lane.serving.saturating_sub(1);
        if !lane.queue.is_empty() && !lane.listed && lane.serving < per_lane {
            lane.listed = true;
            s.turns.push_back(n);
            self.turns.store(s.turns.len(), Ordering::Release);
        }
    }

    /// Wakes a sleeper if something can be taken.
    pub fn nudge(&self) {
        let s = self.lock();
        if !s.turns.is_empty() && s.sleeping > 0 {
            self.work.notify_one();
        }
    }

    /// Batches that nobody has taken up.
    pub fn queued(&self) -> usize {
        self.lock().queued
    }

    /// Threads that took something and have not given the place back.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    /// Ends all waiting; what nobody took up comes back.
    pub fn close(&self) -> Vec<Work<Identity>> {
        let mut s = self.lock();
        s.closed = true;
        s.turns.clear();
        // Who looks without the lock must come to see that it is closed.
        self.turns.store(1, Ordering::Release);
        s.queued = 0;
        let left = s.lanes.iter_mut().flat_map(|lane| std::mem::take(&mut lane.queue)).collect();
        drop(s);
        self.work.notify_all();
        left
    }
}
