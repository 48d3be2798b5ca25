//! Handles of open files and directories between the kernel and the mount.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use impresario_base::lock::RwLock;

use rustc_hash::FxHashMap;

/// A number is never used twice, not even by a file and a directory, so a late message finds nothing rather than
/// another file.
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Open files or directories by number. Its size is the number that the kernel has open.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    open: RwLock<FxHashMap<u64, Arc<T>>>,
}

impl<T> Handles<T> {
    pub(crate) fn new() -> Handles<T> {
        Handles { open: RwLock::default() }
    }

    /// An unused number.
    pub(crate) fn draw() -> u64 {
        NEXT.fetch_add(1, Relaxed)
    }

    /// Stores `value` under a number from [`Handles::draw`].
    pub(crate) fn put(&self, handle: u64, value: T) {
        self.open.write().insert(handle, Arc::new(value));
    }

    /// The value under a number.
    pub(crate) fn get(&self, handle: u64) -> Option<Arc<T>> {
        self.open.read().get(&handle).cloned()
    }

    /// What `look` finds in the values. None of them is kept beyond that.
    pub(crate) fn find<R>(&self, look: impl Fn(&T) -> Option<R>) -> Vec<R> {
        self.open.read().values().filter_map(|value| look(value)).collect()
    }

    /// Removes a number. The value is dropped when the last request that uses it ends.
    pub(crate) fn take(&self, handle: u64) -> Option<Arc<T>> {
        self.open.write().remove(&handle)
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
