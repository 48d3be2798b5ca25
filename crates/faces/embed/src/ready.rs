//! Dispatched batches that no thread has taken yet, and the lane to be served next.
//!
//! One queue per lane, served round robin, so that a lane with a blocking callback does not delay the others. At most
//! [`Ready::per_lane`] threads serve one lane at a time: with as many threads as lanes each lane has its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_engine::Work;

use crate::Identity;

/// Batches of one lane that a thread takes at a time when no other thread could serve that lane meanwhile.
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
    /// Lanes with work and a free thread slot, in order of service.
    turns: VecDeque<u16>,
    queued: usize,
    sleeping: usize,
    closed: bool,
}

/// The queue between the scheduler and the threads that run callbacks or poll.
pub(crate) struct Ready {
    state: Mutex<State>,
    work: Condvar,
    per_lane: u32,
    /// Length of `turns`, readable without the lock.
    turns: AtomicUsize,
    /// Threads between `take` and `served`: they run callbacks, or are about to.
    taken: AtomicUsize,
}

/// How long a thread waits.
#[derive(Clone, Copy)]
pub(crate) enum Wait {
    /// Not at all.
    No,
    /// Until this instant.
    Until(Instant),
    /// Until there is work or the scheduler closes.
    ForWork,
}

/// The result of `take`.
pub(crate) enum Taken {
    /// Batches of this lane; [`Ready::served`] frees the lane's slot.
    Some(u16),
    /// Nothing before the timeout.
    Nothing,
    /// The scheduler was closed.
    Closed,
}

impl Ready {
    /// A queue for `lanes` lanes, with at most `per_lane` threads on each.
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
        self.state.lock()
    }

    /// Adds a batch; returns it if the queue is closed. `wake` is false if the caller itself will take it.
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
        // Waking costs a system call: only if a thread sleeps and a lane is ready.
        if wake && list && s.sleeping > 0 {
            drop(s);
            self.work.notify_one();
        }
        None
    }

    /// Takes batches of the next lane.
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
                // Under the lock: a thread that closes the queue afterwards sees every earlier `take`.
                self.taken.fetch_add(1, Ordering::Relaxed);
                // Another sleeper may take the next lane; a thread that does not wait returns for it itself.
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
                None => self.work.wait(s),
                Some(left) => self.work.wait_timeout(s, left).0,
            };
            s.sleeping -= 1;
        }
    }

    /// The callbacks of the batches taken from a lane have returned.
    pub fn served(&self, n: u16) {
        self.taken.fetch_sub(1, Ordering::Release);
        let per_lane = self.per_lane;
        if per_lane == u32::MAX {
            return; // no batch waits for a slot
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

    /// Wakes a sleeping thread if a lane is ready.
    pub fn nudge(&self) {
        let s = self.lock();
        if !s.turns.is_empty() && s.sleeping > 0 {
            self.work.notify_one();
        }
    }

    /// Batches that no thread has taken.
    pub fn queued(&self) -> usize {
        self.lock().queued
    }

    /// Threads that have taken batches and not yet freed their slot.
    pub fn taken(&self) -> usize {
        self.taken.load(Ordering::Acquire)
    }

    /// Ends all waiting; returns the batches that no thread took.
    pub fn close(&self) -> Vec<Work<Identity>> {
        let mut s = self.lock();
        s.closed = true;
        s.turns.clear();
        // A reader without the lock must notice that the queue is closed.
        self.turns.store(1, Ordering::Release);
        s.queued = 0;
        let left = s.lanes.iter_mut().flat_map(|lane| std::mem::take(&mut lane.queue)).collect();
        drop(s);
        self.work.notify_all();
        left
    }
}
