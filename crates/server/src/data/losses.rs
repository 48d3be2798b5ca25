//! Which objects have lost data: a sync of them failed, and the system will not try again to write what it had.
//!
//! Each loss has a number. Answers about an object carry that of its last one, so that every client with unsynced data
//! learns of it, whichever client's sync failed. The numbers are noted, and thus the same after a restart.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use impresario_base::complaints::Complaints;
use impresario_base::lock::{Mutex, RwLock};
use impresario_store::{FileSystem, Note, ObjectStore};
use rustc_hash::{FxHashMap, FxHashSet};

/// Objects remembered; beyond it all are taken for objects that have lost data anew.
const OBJECTS_MAX: usize = 1 << 16;
/// Kind of a note: an object's last loss. Of object 0: the last loss of all those that were forgotten.
pub(super) const LOSS: u32 = 3;

/// The losses.
#[derive(Default)]
pub(super) struct Losses {
    any: AtomicBool,
    state: Mutex<State>,
    in_doubt: AtomicBool,
    /// Objects of which an earlier run was killed in a sync: it may have been told of a loss that it has not noted.
    doubtful: RwLock<FxHashSet<u64>>,
    /// Held while it is found out.
    settling: Mutex<()>,
    /// A device that fails every sync must not fill the log.
    pub(super) complaints: Complaints,
}

#[derive(Default)]
struct State {
    last: u32,
    forgotten: u32,
    objects: FxHashMap<u64, u32>,
}

impl Losses {
    /// The last loss of an object; 0: none.
    pub(super) fn of(&self, key: u64) -> u32 {
        if !self.any.load(Ordering::Acquire) {
            return 0;
        }
        let state = self.state.lock();
        state.objects.get(&key).copied().unwrap_or(state.forgotten)
    }

    /// Notes that an object has lost data; gives the number of the loss.
    pub(super) fn lost<F: FileSystem>(&self, store: &ObjectStore<F>, key: u64) -> u32 {
        let mut state = self.state.lock();
        let loss = state.last + 1;
        match store.note(Note { kind: LOSS, key, value: loss }) {
            Ok(()) => store.no_doubt(key),
            Err(error) => self.complaints.counted("notes", |losses| {
                tracing::error!(key, losses, %error, "a loss of data could not be noted; a restart has to find it again");
            }),
        }
        state.restore(key, loss);
        self.any.store(true, Ordering::Release);
        loss
    }

    /// Takes up the syncs that an earlier run began, and did not see ending.
    pub(super) fn doubt(&self, keys: Vec<u64>) {
        let mut doubtful = self.doubtful.write();
        doubtful.extend(keys);
        self.in_doubt.store(!doubtful.is_empty(), Ordering::Release);
    }

    /// Before a sync of an object is answered: finds out whether it lost data in a sync in which an earlier run was killed.
    pub(super) fn settle_doubt<F: FileSystem>(&self, store: &ObjectStore<F>, key: u64) -> io::Result<()> {
        let is_doubtful = self.in_doubt.load(Ordering::Acquire) && self.doubtful.read().contains(&key);
        if is_doubtful { self.settle_doubts(store) } else { Ok(()) }
    }

    /// The same for all such objects: when anything was lost, all of them have lost data, as far as anybody knows. May take as long
    /// as to sync everything that is in memory, but only once.
    pub(super) fn settle_doubts<F: FileSystem>(&self, store: &ObjectStore<F>) -> io::Result<()> {
        let _settling = self.settling.lock();
        let all: Vec<u64> = self.doubtful.read().iter().copied().collect();
        if all.is_empty() {
            return Ok(());
        }
        let has_lost = store.has_lost()?;
        for key in all {
            if has_lost {
                tracing::error!(key, "the server was killed in a sync of an object, and its file system has lost data");
                store.distrust(key).unwrap_or_else(|error| tracing::error!(key, %error, "its checksums are of no use"));
                self.lost(store, key);
            } else {
                store.nothing_was_lost(key);
            }
        }
        self.doubtful.write().clear();
        self.in_doubt.store(false, Ordering::Release);
        Ok(())
    }

    /// Takes up a note.
    pub(super) fn restore(&self, key: u64, loss: u32) {
        self.state.lock().restore(key, loss);
        self.any.store(true, Ordering::Release);
    }

    /// Does something with the notes that it comes to, while no other loss is noted.
    pub(super) fn while_none<T>(&self, act: impl FnOnce(Vec<Note>) -> T) -> T {
        let state = self.state.lock();
        let forgotten = (state.forgotten > 0).then_some((&0, &state.forgotten));
        let all = forgotten.into_iter().chain(&state.objects);
        act(all.map(|(key, loss)| Note { kind: LOSS, key: *key, value: *loss }).collect())
    }
}

impl State {
    fn restore(&mut self, key: u64, loss: u32) {
        self.last = self.last.max(loss);
        if self.objects.len() >= OBJECTS_MAX {
            self.objects.clear();
            self.forgotten = self.last;
        }
        match key {
            0 => self.forgotten = self.forgotten.max(loss),
            _ => drop(self.objects.insert(key, loss)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::path::Path;

    use impresario_store::testing::Forgetful;
    use impresario_store::{FolderIdentity, StoreOptions, make_over};

    use super::*;
    use crate::data::durability;

    #[test]
    fn a_device_that_fails_every_sync_does_not_fill_the_log() {
        let (fs, dir) = (Forgetful::default(), Path::new("forgetful"));
        make_over(&fs, dir, &FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }).unwrap();
        let store = ObjectStore::over(fs.clone(), dir, "data.0", StoreOptions::default()).unwrap();
        let losses = Losses::default();
        store.write_vectored(5, 0, &[IoSlice::new(b"bytes")]).unwrap();
        fs.fail_syncs(true);
        fs.fail_after(0, libc::EIO, true);
        let lines = impresario_testing::logged(|| (0..1000).for_each(|_| drop(durability::sync(&store, &losses, 5))));
        assert!((1..=3).contains(&lines.len()), "{} lines: {:?}", lines.len(), lines.first());
        assert_eq!(losses.of(5), 1000, "each is a loss");
    }
}
