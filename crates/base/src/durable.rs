//! Durable changes: how many were made, and how many are known to be synced.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::lock::Mutex;

/// Counts changes of one thing, such as a file, and shares its syncs among the threads that need one: a sync that began
/// after a change makes that change durable for every thread that waits for it.
#[derive(Debug)]
pub struct Durable {
    made: AtomicU64,
    durable: AtomicU64,
    syncing: Mutex<()>,
}

impl Default for Durable {
    /// Starts with one change: an earlier run that was killed may have left some.
    fn default() -> Self {
        Durable { made: AtomicU64::new(1), durable: AtomicU64::new(0), syncing: Mutex::new(()) }
    }
}

impl Durable {
    /// Counts a change that was made.
    pub fn changed(&self) {
        self.made.fetch_add(1, Ordering::AcqRel);
    }

    /// The changes made so far, for [`sync_to`](Durable::sync_to).
    pub fn made(&self) -> u64 {
        self.made.load(Ordering::Acquire)
    }

    /// The first `made` changes are durable: by a sync that began after them.
    pub fn synced(&self, made: u64) {
        self.durable.fetch_max(made, Ordering::AcqRel);
    }

    /// Makes the changes made so far durable.
    pub fn sync<E>(&self, sync: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        self.sync_to(self.made(), sync)
    }

    /// Makes the first `made` changes durable: by `sync`, unless another thread has done it.
    pub fn sync_to<E>(&self, made: u64, sync: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let is_durable = || self.durable.load(Ordering::Acquire) >= made;
        if is_durable() {
            return Ok(());
        }
        let _syncing = self.syncing.lock();
        if is_durable() {
            return Ok(());
        }
        // Changes made while this thread waited for another's sync become durable with this one.
        let made = self.made().max(made);
        sync()?;
        self.synced(made);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn a_sync_is_shared_and_a_failed_one_does_not_count() {
        let (durable, syncs) = (Durable::default(), AtomicUsize::new(0));
        let sync = |result: Result<(), ()>| {
            durable.sync(|| {
                syncs.fetch_add(1, Ordering::Relaxed);
                result
            })
        };
        assert!(sync(Err(())).is_err(), "what an earlier run left");
        assert!(sync(Ok(())).is_ok() && sync(Ok(())).is_ok());
        assert_eq!(syncs.load(Ordering::Relaxed), 2);
        let before = durable.made();
        durable.changed();
        assert!(durable.sync_to(before, || Err(())).is_ok(), "durable already");
        assert!(sync(Err(())).is_err());
        durable.synced(before);
        assert!(sync(Err(())).is_err(), "a change came after what that sync covered");
        std::thread::scope(|scope| {
            (0..8).for_each(|_| drop(scope.spawn(|| sync(Ok(())).unwrap())));
        });
        assert_eq!(syncs.load(Ordering::Relaxed), 5, "one for all");
    }
}
