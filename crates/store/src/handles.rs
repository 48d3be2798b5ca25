//! Open objects: a bounded cache of file handles, safe against removal and re-creation.
//!
//! Each shard has two locks. `opening` is held over "open the file and cache the handle" and over "remove the name and
//! drop the handle", so that a handle opened before a removal can never be cached after it. `handles` is held only for
//! look-ups and never over a system call: an open that waits for a device does not delay cache hits.

use std::io;
use std::sync::Arc;

use impresario_base::lock::{Mutex, MutexGuard};

use rustc_hash::FxHashMap;

/// Handles by file key, the least recently used closed first.
pub(crate) struct Handles<H> {
    shards: Vec<Shard<H>>,
    /// Capacity of a shard.
    shard_max: usize,
}

struct Shard<H> {
    opening: Mutex<()>,
    handles: Mutex<Recent<H>>,
}

/// The handles of a shard with the time of their last use, counted in uses.
struct Recent<H> {
    by_key: FxHashMap<u64, (Arc<H>, u64)>,
    uses: u64,
}

const SHARDS_MAX: usize = 16;

impl<H> Handles<H> {
    /// Keeps at most `limit` handles (at least one), plus those in use at the moment.
    pub(crate) fn new(limit: usize) -> Handles<H> {
        let count = limit.clamp(1, SHARDS_MAX);
        let shard =
            || Shard { opening: Mutex::new(()), handles: Mutex::new(Recent { by_key: FxHashMap::default(), uses: 0 }) };
        Handles { shards: (0..count).map(|_| shard()).collect(), shard_max: (limit / count).max(1) }
    }

    /// The handle, if it is open.
    pub(crate) fn get(&self, key: u64) -> Option<Arc<H>> {
        self.shard(key).recent().get(key)
    }

    /// The handle; if it is not open, `open` opens it or reports that the object does not exist.
    pub(crate) fn get_or_open(
        &self,
        key: u64,
        open: impl FnOnce() -> io::Result<Option<H>>,
    ) -> io::Result<Option<Arc<H>>> {
        let shard = self.shard(key);
        if let Some(handle) = shard.recent().get(key) {
            return Ok(Some(handle));
        }
        let _opening = shard.opening.lock();
        if let Some(handle) = shard.recent().get(key) {
            return Ok(Some(handle));
        }
        let Some(handle) = open()? else { return Ok(None) };
        let handle = Arc::new(handle);
        let closed = shard.recent().insert(key, Arc::clone(&handle), self.shard_max);
        // Closing may take time; not under the lock.
        drop(closed);
        Ok(Some(handle))
    }

    /// Runs `remove` and drops the handle, with no open of the same key in between.
    pub(crate) fn remove<T>(&self, key: u64, remove: impl FnOnce() -> T) -> T {
        let shard = self.shard(key);
        let _opening = shard.opening.lock();
        let removed = remove();
        let closed = shard.recent().by_key.remove(&key);
        drop(closed);
        removed
    }

    /// Number of cached handles.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.recent().by_key.len()).sum()
    }

    fn shard(&self, key: u64) -> &Shard<H> {
        // Keys may be numbered in steps: take the high bits of a multiplicative hash.
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.shards[hash as usize % self.shards.len()]
    }
}

impl<H> Shard<H> {
    fn recent(&self) -> MutexGuard<'_, Recent<H>> {
        self.handles.lock()
    }
}

impl<H> Recent<H> {
    fn get(&mut self, key: u64) -> Option<Arc<H>> {
        self.uses += 1;
        let (handle, used) = self.by_key.get_mut(&key)?;
        *used = self.uses;
        Some(Arc::clone(handle))
    }

    /// Adds a handle; returns the evicted one. The scan covers one shard and is cheap beside the system call.
    fn insert(&mut self, key: u64, handle: Arc<H>, max: usize) -> Option<Arc<H>> {
        let oldest = || self.by_key.iter().min_by_key(|(_, (_, used))| *used).map(|(&key, _)| key);
        let oldest = if self.by_key.len() >= max { oldest() } else { None };
        let closed = oldest.and_then(|key| self.by_key.remove(&key)).map(|(handle, _)| handle);
        self.uses += 1;
        self.by_key.insert(key, (handle, self.uses));
        closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_handles_is_bounded_and_the_least_used_goes() {
        let handles = Handles::new(2);
        let open = |key: u64| handles.get_or_open(key, || Ok(Some(key))).unwrap().unwrap();
        (0..1000).for_each(|key| assert_eq!(*open(key), key));
        assert!(handles.len() <= 2);
        let one = Handles { shards: Handles::new(1).shards, shard_max: 3 };
        for key in [1, 2, 3, 1, 4] {
            one.get_or_open(key, || Ok(Some(key))).unwrap();
        }
        assert!(one.get(1).is_some() && one.get(2).is_none() && one.get(3).is_some() && one.get(4).is_some());
    }

    #[test]
    fn what_is_not_there_is_not_remembered() {
        let handles: Handles<u8> = Handles::new(8);
        assert!(handles.get_or_open(1, || Ok(None)).unwrap().is_none());
        assert!(handles.get_or_open(1, || Err(io::Error::other("no"))).is_err());
        assert_eq!(*handles.get_or_open(1, || Ok(Some(7))).unwrap().unwrap(), 7);
        handles.remove(1, || ());
        assert!(handles.get(1).is_none());
    }
}
