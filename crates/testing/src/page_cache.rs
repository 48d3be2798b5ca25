//! The machine's page cache, which some tests empty and others look at. Test programs run side by side, so either kind
//! says so here and waits for the other.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// Holds the page cache until dropped.
pub struct PageCache {
    _lock: Option<File>,
}

/// For a test that looks at what is cached: nobody empties the cache meanwhile. Waits for those that do.
pub fn watched() -> PageCache {
    hold(FlockOperation::LockShared)
}

/// For a test that empties the cache of the whole machine. Waits for those that look at it.
pub fn emptied() -> PageCache {
    hold(FlockOperation::LockExclusive)
}

fn hold(how: FlockOperation) -> PageCache {
    // Not in the temporary folder: each run of the tests may have its own, and all runs have one page cache.
    let path = Path::new("/tmp/impresario-tests.page-cache");
    PageCache { _lock: open(path).filter(|file| flock(file, how).is_ok()) }
}

/// Opened for reading where another user made it; without it a test runs as if alone.
fn open(path: &Path) -> Option<File> {
    File::options().create(true).truncate(false).write(true).open(path).or_else(|_| File::open(path)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_may_look_and_one_may_empty() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let lock = |how: FlockOperation| {
            let file = open(path.path()).unwrap();
            flock(&file, how).is_ok().then_some(file)
        };
        let (shared, alone) = (FlockOperation::NonBlockingLockShared, FlockOperation::NonBlockingLockExclusive);
        let (first, second) = (lock(shared), lock(shared));
        assert!(first.is_some() && second.is_some() && lock(alone).is_none());
        drop((first, second));
        let only = lock(alone);
        assert!(only.is_some() && lock(shared).is_none());
    }
}
