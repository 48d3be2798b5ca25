//! The numbers that stand for open files and directories between the kernel and us.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use rustc_hash::FxHashMap;

/// Numbers are never used twice, not even by a file and a directory, so a late message finds nothing
/// rather than somebody else's file.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What is open, by number. Its size is what the kernel has open.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    open: RwLock<FxHashMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    pub(crate) fn new() -> Handles<T> {
        Handles { open: RwLock::default() }
    }

    /// A number nobody has.
    pub(crate) fn draw() -> u64 {
        NEXT.fetch_add(1, Relaxed)
    }

    /// Puts `value` under a number from [`Handles::draw`].
    pub(crate) fn put(&self, handle: u64, value: T) {
        self.open.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(value));
    }

    /// What is open under a number.
    pub(crate) fn get(&self, handle: u64) -> Option<Arc<T>> {
        self.open.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    /// Ends a number. The value goes when the last request that uses it ends.
    pub(crate) fn take(&self, handle: u64) -> Option<Arc<T>> {
        self.open.write().unwrap_or_else(PoisonError::into_inner).remove(&handle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_used_twice() {
        let files = Handles::<&str>::new();
        let first = Handles::<&str>::draw();
        files.put(first, "a");
        assert_eq!(files.get(first).as_deref(), Some(&"a"));
        assert_eq!(files.take(first).as_deref(), Some(&"a"));
        assert!(files.get(first).is_none() && files.take(first).is_none());
        assert_ne!(Handles::<&str>::draw(), first);
        assert_ne!(Handles::<u8>::draw(), Handles::<&str>::draw());
    }
}
