//! A lock whose wait is bounded: one sender at a time on a connection.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Locks without caring for a panic elsewhere: what the locks here guard is consistent at every step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns at something, which come with a value to work with.
#[derive(Default)]
pub(crate) struct Turn<T> {
    state: Mutex<State<T>>,
    free: Condvar,
}

#[derive(Default)]
struct State<T> {
    taken: bool,
    waiting: u32,
    value: T,
}

/// The present turn; ends when dropped.
pub(crate) struct Taken<'a, T: Default> {
    turn: &'a Turn<T>,
    /// What the turn is about.
    pub(crate) value: T,
}

impl<T: Default> Turn<T> {
    /// Takes the turn; `None` when it did not become free until the deadline.
    pub(crate) fn take(&self, deadline: Instant) -> Option<Taken<'_, T>> {
        let mut state = lock(&self.state);
        while state.taken {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state.waiting += 1;
            state = self.free.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting -= 1;
        }
        state.taken = true;
        Some(Taken { turn: self, value: std::mem::take(&mut state.value) })
    }
}

impl<T: Default> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        let mut state = lock(&self.turn.state);
        state.taken = false;
        state.value = std::mem::take(&mut self.value);
        let wake = state.waiting > 0;
        drop(state);
        if wake {
            self.turn.free.notify_one();
        }
    }
}
