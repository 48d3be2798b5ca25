//! Which directories are durable as they are, so that a sync of a file deep in the tree does not sync all directories above it
//! again: for each the device would have to empty its cache, though nothing in them was changed.

use std::os::fd::AsFd;

use impresario_base::lock::Mutex;
use rustc_hash::FxHashSet;
use rustix::io::Result;

/// Directories that are remembered, by inode number.
const KNOWN_MAX: usize = 4096;
/// Changes are counted by groups of directories.
const GROUPS: usize = 256;

/// The directories of one file system.
pub(super) struct Synced(Mutex<State>);

struct State {
    known: FxHashSet<u64>,
    changes: [u64; GROUPS],
}

impl Synced {
    /// Of no directory anything is known.
    pub(super) fn new() -> Synced {
        Synced(Mutex::new(State { known: FxHashSet::default(), changes: [0; GROUPS] }))
    }

    /// Names in a directory, or attributes of a node, were changed or may have been. To be called when the change is done and before
    /// it is answered: a sync that is asked for later must find it.
    pub(super) fn changed(&self, node: impl AsFd) {
        let Ok(stat) = rustix::fs::fstat(node) else { return self.forget_all() };
        let mut state = self.0.lock();
        state.known.remove(&stat.st_ino);
        state.changes[stat.st_ino as usize % GROUPS] += 1;
    }

    /// Any of them may have been changed.
    pub(super) fn forget_all(&self) {
        let mut state = self.0.lock();
        state.known.clear();
        state.changes.iter_mut().for_each(|changes| *changes += 1);
    }

    /// Makes a directory durable, by `sync` if need be.
    pub(super) fn sync(&self, directory: impl AsFd, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        let ino = rustix::fs::fstat(directory)?.st_ino;
        let group = ino as usize % GROUPS;
        let begun = {
            let state = self.0.lock();
            if state.known.contains(&ino) {
                return Ok(());
            }
            state.changes[group]
        };
        sync()?;
        let mut state = self.0.lock();
        // What was changed meanwhile may not be durable.
        if state.changes[group] == begun {
            if state.known.len() >= KNOWN_MAX {
                state.known.clear();
            }
            state.known.insert(ino);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_directory_is_synced_once_until_it_is_changed() {
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [a, b] = dirs.each_ref().map(|dir| std::fs::File::open(dir.path()).unwrap());
        let (synced, times) = (Synced::new(), Cell::new(0));
        let sync = |dir: &std::fs::File| {
            synced.sync(dir, || {
                times.set(times.get() + 1);
                Ok(())
            })
        };
        let syncs = |dir: &std::fs::File| {
            times.set(0);
            sync(dir).unwrap();
            times.get()
        };
        assert_eq!((syncs(&a), syncs(&a), syncs(&b), syncs(&b)), (1, 0, 1, 0));
        synced.changed(&a);
        assert_eq!((syncs(&a), syncs(&b), syncs(&a)), (1, 0, 0));
        // A change during the sync may have missed it.
        synced.changed(&a);
        let change = || {
            synced.changed(&a);
            Ok(())
        };
        synced.sync(&a, change).unwrap();
        assert_eq!((syncs(&a), syncs(&a)), (1, 0));
        // One that fails makes nothing durable.
        synced.changed(&a);
        assert!(synced.sync(&a, || Err(rustix::io::Errno::IO)).is_err());
        assert_eq!(syncs(&a), 1);
    }

    #[test]
    fn no_more_is_remembered_than_there_is_room_for() {
        let synced = Synced::new();
        let dir = tempfile::tempdir().unwrap();
        synced.0.lock().known.extend(0..KNOWN_MAX as u64 + 1);
        synced.changed(std::fs::File::open(dir.path()).unwrap());
        synced.sync(std::fs::File::open(dir.path()).unwrap(), || Ok(())).unwrap();
        assert_eq!(synced.0.lock().known.len(), 1);
    }
}
