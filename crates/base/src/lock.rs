//! Locks that ignore poison.
//!
//! A thread that panics while holding a standard-library lock makes every later `lock` an error. Here the state behind
//! a lock is consistent between statements or rebuilt from outside, so later threads continue; the panic is reported
//! where it happens. Otherwise these are the standard library's locks.

use std::sync::{self, PoisonError, TryLockError, TryLockResult};
pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// A mutual exclusion lock.
#[derive(Default, Debug)]
pub struct Mutex<T: ?Sized>(sync::Mutex<T>);

impl<T> Mutex<T> {
    /// A lock around a value.
    pub const fn new(value: T) -> Mutex<T> {
        Mutex(sync::Mutex::new(value))
    }

    /// The value, without the lock.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the lock, spinning for the first few microseconds: for locks held for less than a microsecond.
    /// Sleeping and waking costs ten, and once a thread sleeps on a standard-library lock, later ones do too.
    #[inline]
    pub fn lock_spinning(&self) -> MutexGuard<'_, T> {
        const ROUNDS: u32 = 12;
        for round in 0..ROUNDS {
            if let Some(guard) = self.try_lock() {
                return guard;
            }
            (0..1 << round.min(5)).for_each(|_| std::hint::spin_loop());
        }
        self.lock()
    }

    /// The lock if no other thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        tried(self.0.try_lock())
    }

    /// The value through the only reference to the lock.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

fn tried<G>(lock: TryLockResult<G>) -> Option<G> {
    match lock {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A lock held by many readers or one writer.
#[derive(Default, Debug)]
pub struct RwLock<T: ?Sized>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// A lock around a value.
    pub const fn new(value: T) -> RwLock<T> {
        RwLock(sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits until no writer holds the lock.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` while a writer holds the lock, or waits for it.
    #[inline]
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        tried(self.0.try_read())
    }

    /// `None` while another thread holds the lock.
    #[inline]
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        tried(self.0.try_write())
    }

    /// Waits until no other thread holds the lock.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition that threads wait for with a [`Mutex`].
#[derive(Default, Debug)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// A condition.
    pub const fn new() -> Condvar {
        Condvar(sync::Condvar::new())
    }

    /// Releases the lock and waits for a notification; spurious wake-ups are possible.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for at most the given time; true on timeout.
    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, most: Duration) -> (MutexGuard<'a, T>, bool) {
        let (guard, waited) = self.0.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }

    /// Waits while the condition is true.
    pub fn wait_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        self.0.wait_while(guard, condition).unwrap_or_else(PoisonError::into_inner)
    }

    /// The same for at most the given time; true if the condition still holds then.
    pub fn wait_timeout_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        most: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, bool) {
        let (guard, waited) = self.0.wait_timeout_while(guard, most, condition).unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Aligned to two cache lines, since processors prefetch lines in pairs: values that different threads write do not share one.
#[repr(align(128))]
#[derive(Default, Debug)]
pub struct Apart<T>(pub T);

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panic_under_the_lock_does_not_stop_later_threads() {
        let (mutex, shared) = (Mutex::new(1), RwLock::new(1));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let (mut a, mut b) = (mutex.lock(), shared.write());
            (*a, *b) = (2, 2);
            panic!("on purpose");
        }));
        assert!(panicked.is_err());
        assert_eq!(*mutex.lock(), 2);
        assert_eq!(mutex.try_lock().map(|value| *value), Some(2));
        assert_eq!(*shared.read(), 2);
        *shared.write() = 3;
        assert_eq!(*shared.read(), 3);
        let condition = Condvar::new();
        let (guard, timed_out) = condition.wait_timeout(mutex.lock(), Duration::from_millis(1));
        assert!(timed_out);
        drop(guard);
        assert_eq!(mutex.into_inner(), 2);
    }

    #[test]
    fn a_held_lock_cannot_be_taken_twice() {
        let mutex = Mutex::new(());
        let held = mutex.lock();
        assert!(mutex.try_lock().is_none());
        drop(held);
        assert!(mutex.try_lock().is_some());
    }

    #[test]
    fn a_spinning_thread_gets_a_lock_that_is_held_for_long() {
        let mutex = Mutex::new(0);
        std::thread::scope(|scope| {
            let held = mutex.lock();
            let waiting = scope.spawn(|| *mutex.lock_spinning() += 1);
            std::thread::sleep(Duration::from_millis(5));
            assert!(!waiting.is_finished());
            drop(held);
        });
        assert_eq!(*mutex.lock_spinning(), 1);
    }
}
