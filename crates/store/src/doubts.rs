//! Syncs under way, in the file `syncing`, so that a server that is killed in the middle of one knows of it afterwards.
//!
//! The kernel tells of data of a file that it could not write once, to who syncs then. A server that is killed before it has
//! noted what it was told would take the object for whole. So it marks an object before each sync, and removes the mark when the
//! sync has succeeded or its loss is noted. A mark is a write of 8 bytes, which outlives the process; it need not outlive
//! the machine, of whose restart all clients learn.
//!
//! Nearly always nothing was lost. Whether something was, the file system can say as a whole
//! ([`FileSystem::has_lost`]): it remembers for itself what it has told of single files. It tells that once, too, of all that was lost
//! until then, also of objects whose syncs are yet to be told of it. So that it was asked is marked before, and stays
//! marked unless nothing was lost: from then until the machine is started again, every sync that a kill interrupted counts as
//! one that lost data.
//!
//! The file has words of 8 bytes: the boot in which the file system was asked, 0 if it was not or nothing was lost; then keys of
//! objects, 0 where there is none.

use std::io;
use std::sync::Arc;

use impresario_base::lock::Mutex;
use rustc_hash::FxHashMap;

use crate::filesystem::FileSystem;
use crate::notes::is_full;
use crate::objects::ObjectStore;
use crate::replace::{read_all, write_all};

pub(crate) const SYNCING: &str = "syncing";
const WORD_BYTES: u64 = 8;
/// Marks there is room for: more than the threads that sync. An object beyond that is synced without one.
const MARKS: u64 = 504;

/// The marks.
pub(crate) struct Doubts<H>(Mutex<State<H>>);

struct State<H> {
    /// `None`: none are made.
    file: Option<Arc<H>>,
    free: Vec<u64>,
    /// Of objects of which nobody has noted yet what became of their syncs.
    kept: FxHashMap<u64, u64>,
    /// In this boot of the machine the file system has told of a loss, or was asked and what it said is not known.
    has_told: bool,
}

impl<H> Default for Doubts<H> {
    fn default() -> Self {
        let (file, free, kept) = Default::default();
        Doubts(Mutex::new(State { file, free, kept, has_told: false }))
    }
}

impl<F: FileSystem> ObjectStore<F> {
    /// Begins to mark syncs. Gives the objects whose syncs an earlier run has begun, and not seen ending: they may have lost
    /// data.
    pub fn open_doubts(&self) -> io::Result<Vec<u64>> {
        if !self.fs.may_lose() {
            return Ok(Vec::new());
        }
        let found = read_all(&self.fs, SYNCING)?.unwrap_or_default();
        let file = self.fs.open(SYNCING, true)?;
        let have = found.len() as u64 / WORD_BYTES;
        let missing = vec![0; ((MARKS + 1 - have.min(MARKS + 1)) * WORD_BYTES) as usize];
        match write_all(&self.fs, &file, have * WORD_BYTES, &missing) {
            Err(error) if is_full(&error) => {
                tracing::warn!("the device is full: until the next start it is not noted what is being synced");
                return Ok(Vec::new());
            }
            made => made?,
        }
        let words = found.chunks_exact(8).filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)));
        let words: Vec<u64> = words.collect();
        let (mut free, mut kept) = (Vec::new(), FxHashMap::default());
        for at in (1..=MARKS).rev() {
            match words.get(at as usize).copied().unwrap_or(0) {
                0 => free.push(at),
                // Threads were syncing one object at the same time.
                key => kept.insert(key, at).map_or(Ok(()), |again| {
                    free.push(again);
                    self.mark(&file, again, 0)
                })?,
            }
        }
        let has_told = words.first() == Some(&self.fs.boot());
        let keys: Vec<u64> = kept.keys().copied().collect();
        keys.iter().try_for_each(|key| self.suspect(*key, true))?;
        *self.doubts.0.lock() = State { file: Some(Arc::new(file)), free, kept, has_told };
        Ok(keys)
    }

    /// Syncs an object's file. When it fails, the object is in doubt until [`no_doubt`](Self::no_doubt) is told of it.
    pub(crate) fn sync_object(&self, key: u64, object: &F::File) -> io::Result<()> {
        let (file, mark) = {
            let mut state = self.doubts.0.lock();
            let mark = if state.file.is_some() { state.free.pop() } else { None };
            (state.file.clone(), mark)
        };
        let marked = file.zip(mark);
        if let Some((file, at)) = &marked
            && let Err(error) = self.mark(file, *at, key)
        {
            // It is not synced then: the next one is told of what was lost.
            self.doubts.0.lock().free.push(*at);
            return Err(error);
        }
        let synced = self.fs.sync(object);
        if let Some((file, at)) = marked {
            let over = match synced {
                Ok(()) => Some(at),
                Err(_) => self.doubts.0.lock().kept.insert(key, at),
            };
            over.into_iter().for_each(|at| self.unmark(&file, at));
        }
        synced
    }

    /// What became of an object's syncs is noted, unless its checksums do not have it: then a restart has to find out again.
    pub fn no_doubt(&self, key: u64) {
        if self.must_note_distrust(key) {
            return;
        }
        let (file, mark) = {
            let mut state = self.doubts.0.lock();
            (state.file.clone(), state.kept.remove(&key))
        };
        let (Some(file), Some(at)) = (file, mark) else { return };
        self.unmark(&file, at);
    }

    /// The same where nothing was lost.
    pub fn nothing_was_lost(&self, key: u64) {
        if let Err(error) = self.suspect(key, false) {
            tracing::debug!(key, %error, "an object's checksums are not learnt from what is found in it");
        }
        self.no_doubt(key);
    }

    /// Whether anything of this file system was lost that an earlier run may have been told of. Waits until all that is in
    /// memory is on the device. When it was, this says so until the machine is started again.
    pub fn has_lost(&self) -> io::Result<bool> {
        let mut state = self.doubts.0.lock();
        let Some(file) = state.file.clone().filter(|_| !state.has_told) else { return Ok(state.has_told) };
        self.mark(&file, 0, self.fs.boot())?;
        state.has_told = true;
        drop(state);
        let has_lost = self.fs.has_lost();
        // If the mark stays, a loss is assumed later on: nobody is told too little.
        if !has_lost && self.mark(&file, 0, 0).is_ok() {
            self.doubts.0.lock().has_told = false;
        }
        Ok(has_lost)
    }

    fn mark(&self, file: &F::File, at: u64, word: u64) -> io::Result<()> {
        write_all(&self.fs, file, at * WORD_BYTES, &word.to_le_bytes())
    }

    fn unmark(&self, file: &F::File, at: u64) {
        if let Err(error) = self.mark(file, at, 0) {
            tracing::debug!(%error, "the mark of a sync could not be removed");
        }
        self.doubts.0.lock().free.push(at);
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::path::Path;

    use super::*;
    use crate::folder::{FORMAT_FILE, FolderIdentity, make_over};
    use crate::objects::StoreOptions;
    use crate::testing::Forgetful;

    type Store = ObjectStore<Forgetful>;

    fn start(fs: &Forgetful) -> (Store, Vec<u64>) {
        let (dir, options) = (Path::new("forgetful"), StoreOptions::default());
        if fs.open(FORMAT_FILE, false).is_err() {
            make_over(fs, dir, &FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }).unwrap();
        }
        let store = ObjectStore::over(fs.clone(), dir, "data.0", options).unwrap();
        let doubtful = store.open_doubts().unwrap();
        (store, doubtful)
    }

    fn write(store: &Store, key: u64) {
        store.write_vectored(key, 0, &[IoSlice::new(b"bytes")]).unwrap();
    }

    /// A sync of this object is told that data were lost.
    fn fails(fs: &Forgetful, store: &Store, key: u64) {
        write(store, key);
        fs.fail_syncs(true);
        store.sync(key).unwrap_err();
        fs.fail_syncs(false);
    }

    #[test]
    fn a_sync_that_was_told_of_a_loss_is_in_doubt_until_that_is_noted() {
        let fs = Forgetful::default();
        let (store, doubtful) = start(&fs);
        assert!(doubtful.is_empty());
        write(&store, 5);
        store.sync(5).unwrap();
        fails(&fs, &store, 7);
        fails(&fs, &store, 7);
        // Killed.
        let (store, doubtful) = start(&fs);
        assert_eq!(doubtful, [7]);
        store.sync(7).expect("the kernel tells it to no descriptor that is opened later");
        assert!(store.has_lost().unwrap());
        store.no_doubt(7);
        assert_eq!(start(&fs).1, [0; 0]);
        fails(&fs, &store, 8);
        store.no_doubt(8);
        assert_eq!(start(&fs).1, [0; 0]);
    }

    #[test]
    fn a_server_that_is_killed_in_a_sync_that_lost_nothing_finds_that_out() {
        let fs = Forgetful::default();
        let (store, _) = start(&fs);
        for key in [5, 6] {
            write(&store, key);
        }
        // The mark is made, and the sync comes to no end.
        fs.stop_after(1);
        store.sync(5).unwrap_err();
        fs.mend();
        let (store, doubtful) = start(&fs);
        assert_eq!(doubtful, [5]);
        assert!(!store.has_lost().unwrap());
        store.no_doubt(5);
        assert_eq!(start(&fs).1, [0; 0]);
    }

    /// The file system says it once.
    #[test]
    fn what_was_lost_is_known_also_to_a_server_whose_predecessor_asked_and_was_killed_then() {
        let fs = Forgetful::default();
        fails(&fs, &start(&fs).0, 7);
        assert!(start(&fs).0.has_lost().unwrap());
        let (store, doubtful) = start(&fs);
        assert_eq!(doubtful, [7]);
        assert!(!fs.has_lost() && store.has_lost().unwrap());
        store.no_doubt(7);
        assert!(start(&fs).1.is_empty());
        // Not after a restart of the machine, of which all clients learn.
        fs.crash();
        assert!(!start(&fs).0.has_lost().unwrap());
    }

    /// What the file system tells at once may be of several objects.
    #[test]
    fn a_loss_is_known_for_an_object_whose_sync_is_told_of_it_after_the_file_system_was_asked() {
        let fs = Forgetful::default();
        let (store, _) = start(&fs);
        write(&store, 7);
        write(&store, 8);
        fs.write_back(1, true);
        fails(&fs, &store, 7);
        // Killed, and again in the sync of the other object.
        let (store, _) = start(&fs);
        assert!(store.has_lost().unwrap());
        store.no_doubt(7);
        fs.stop_after(1);
        store.sync(8).unwrap_err();
        fs.mend();
        let (store, doubtful) = start(&fs);
        assert_eq!(doubtful, [8]);
        assert!(store.has_lost().unwrap());
    }

    #[test]
    fn marks_are_bounded_and_a_full_device_has_none() {
        let fs = Forgetful::default();
        let (store, _) = start(&fs);
        for key in 1..=MARKS + 10 {
            fails(&fs, &store, key);
        }
        assert_eq!(start(&fs).1.len() as u64, MARKS);
        let fs = Forgetful::new(20_000);
        make_over(&fs, Path::new("forgetful"), &FolderIdentity { cluster: 1, store: 2, server: "data.0".into() })
            .unwrap();
        let store = ObjectStore::over(fs.clone(), Path::new("forgetful"), "data.0", StoreOptions::default()).unwrap();
        store.write_vectored(5, 0, &[IoSlice::new(&[1; 20_000])]).unwrap_err();
        assert!(store.open_doubts().unwrap().is_empty());
        store.sync(5).unwrap();
    }
}
