//! Notes: what a data server must still know after a restart beside its objects, 16 bytes each, in the file `notes`.
//!
//! A note outlives the process as soon as [`ObjectStore::note`] returns, and a power failure as soon as any object was
//! synced after it: what a sync promises may rest on the notes before it. The meaning of kinds is the server's.
//!
//! The file is made longer than its notes, so that a full device still takes the next ones, and is replaced as a whole
//! when it has grown and when the store is opened, where there is space for that.

use std::io;

use impresario_base::Durable;
use impresario_base::lock::Mutex;

use crate::filesystem::FileSystem;
use crate::grown::{self, Grown};
use crate::objects::ObjectStore;
use crate::replace::{read_all, replace_file};

const NOTES: &str = "notes";
const NOTES_NEW: &str = "notes.new";
const NOTE_BYTES: usize = 16;
/// Space for this many more notes is allocated ahead of them.
const SPARE: usize = 8192;

/// A note.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Note {
    /// What it is about; the server's own numbers, not 0.
    pub kind: u32,
    /// Whom or what it is about.
    pub key: u64,
    /// What is noted.
    pub value: u32,
}

impl Note {
    fn encode(self) -> [u8; NOTE_BYTES] {
        let mut bytes = [0; NOTE_BYTES];
        bytes[..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.value.to_le_bytes());
        bytes[12..].copy_from_slice(&self.kind.to_le_bytes());
        bytes
    }

    /// `None` behind the last note.
    fn decode(bytes: &[u8]) -> Option<Note> {
        let (key, rest) = bytes.split_first_chunk()?;
        let (value, rest) = rest.split_first_chunk()?;
        let kind = u32::from_le_bytes(*rest.first_chunk()?);
        (kind != 0).then_some(Note { kind, key: u64::from_le_bytes(*key), value: u32::from_le_bytes(*value) })
    }
}

/// The open file of notes.
pub(crate) struct Notes<H> {
    file: Mutex<Option<Grown<H>>>,
    durable: Durable,
}

impl<H> Default for Notes<H> {
    fn default() -> Self {
        Notes { file: Mutex::new(None), durable: Durable::default() }
    }
}

impl<F: FileSystem> ObjectStore<F> {
    /// Opens the notes; gives what earlier runs noted, oldest first.
    pub fn open_notes(&self) -> io::Result<Vec<Note>> {
        let bytes = read_all(&self.fs, NOTES)?.unwrap_or_default();
        let found: Vec<Note> = bytes.chunks_exact(NOTE_BYTES).map_while(Note::decode).collect();
        match self.replace_notes(found.iter().copied()) {
            // A full device: what is there is as good. The first sync makes it durable.
            Err(error) if is_full(&error) && !bytes.is_empty() => {
                let entries: Vec<u8> = found.iter().copied().flat_map(Note::encode).collect();
                let file = self.fs.open(NOTES, false)?;
                *self.notes.file.lock() = Some(Grown::new(file, entries.len(), entries));
            }
            replaced => replaced?,
        }
        Ok(found)
    }

    /// All notes so far, oldest first.
    pub fn all_notes(&self) -> io::Result<Vec<Note>> {
        let _open = self.notes.file.lock();
        let bytes = read_all(&self.fs, NOTES)?.unwrap_or_default();
        Ok(bytes.chunks_exact(NOTE_BYTES).map_while(Note::decode).collect())
    }

    /// Takes a note. On an error nothing was noted.
    pub fn note(&self, note: Note) -> io::Result<()> {
        let mut open = self.notes.file.lock();
        open.as_mut().ok_or(io::ErrorKind::NotFound)?.append(&self.fs, &note.encode())?;
        self.notes.durable.changed();
        Ok(())
    }

    /// Number of notes in the file.
    pub fn notes_len(&self) -> usize {
        self.notes.file.lock().as_ref().map_or(0, |open| open.len_bytes() / NOTE_BYTES)
    }

    /// Replaces all notes by these, at once.
    pub fn replace_notes(&self, notes: impl Iterator<Item = Note>) -> io::Result<()> {
        let mut bytes: Vec<u8> = notes.flat_map(Note::encode).collect();
        let len_bytes = bytes.len();
        bytes.resize(bytes.len() + SPARE * NOTE_BYTES, 0);
        let mut open = self.notes.file.lock();
        let file = replace_file(&self.fs, NOTES, NOTES_NEW, &bytes)?;
        *open = Some(Grown::new(file, len_bytes, Vec::new()));
        Ok(())
    }

    /// Makes the notes taken so far durable.
    pub(crate) fn sync_notes(&self) -> io::Result<()> {
        self.notes.durable.sync(|| grown::sync(&self.fs, &self.notes.file, Option::as_mut))
    }
}

/// No space, for a reason that is no fault.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::path::Path;

    use super::*;
    use crate::folder::{FORMAT_FILE, FolderIdentity, make_over};
    use crate::objects::StoreOptions;
    use crate::testing::Forgetful;

    fn over(fs: &Forgetful) -> ObjectStore<Forgetful> {
        let (dir, options) = (Path::new("forgetful"), StoreOptions::default());
        if fs.open(FORMAT_FILE, false).is_err() {
            make_over(fs, dir, &FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }).unwrap();
        }
        ObjectStore::over(fs.clone(), dir, "data.0", options).unwrap()
    }

    fn note(key: u64) -> Note {
        Note { kind: 7, key, value: key as u32 }
    }

    #[test]
    fn notes_outlive_a_killed_server_and_with_the_next_sync_a_power_failure() {
        let fs = Forgetful::default();
        let store = over(&fs);
        assert!(store.open_notes().unwrap().is_empty());
        store.note(note(1)).unwrap();
        store.write_vectored(5, 0, &[IoSlice::new(b"x")]).unwrap();
        store.sync(5).unwrap();
        store.note(note(2)).unwrap();
        let killed = over(&fs);
        assert_eq!(killed.open_notes().unwrap(), [note(1), note(2)]);
        killed.note(note(3)).unwrap();
        fs.crash();
        assert_eq!(over(&fs).open_notes().unwrap(), [note(1), note(2)], "found at the start, and made durable by it");
    }

    #[test]
    fn a_sync_makes_the_notes_before_it_durable() {
        let fs = Forgetful::default();
        let store = over(&fs);
        store.open_notes().unwrap();
        store.note(note(1)).unwrap();
        store.sync(5).unwrap();
        fs.crash();
        assert_eq!(over(&fs).open_notes().unwrap(), [note(1)]);
    }

    #[test]
    fn a_failed_sync_is_not_made_good_by_one_that_has_nothing_to_write() {
        let fs = Forgetful::default();
        let store = over(&fs);
        store.open_notes().unwrap();
        store.note(note(1)).unwrap();
        store.sync(5).unwrap();
        (2..=3).for_each(|key| store.note(note(key)).unwrap());
        fs.fail_syncs(true);
        store.sync(5).unwrap_err();
        store.note(note(4)).unwrap();
        store.sync(5).unwrap_err();
        fs.fail_syncs(false);
        store.sync(5).unwrap();
        store.note(note(5)).unwrap();
        fs.crash();
        assert_eq!(over(&fs).open_notes().unwrap(), [1, 2, 3, 4].map(note));
    }

    /// On a full device the notes of an earlier run stay where they are.
    #[test]
    fn a_failed_sync_of_a_killed_server_is_not_made_good_by_one_that_has_nothing_to_write() {
        let fs = Forgetful::new(300_000);
        let store = over(&fs);
        store.open_notes().unwrap();
        store.write_vectored(5, 0, &[IoSlice::new(&[1; 300_000])]).unwrap_err();
        store.note(note(1)).unwrap();
        fs.fail_syncs(true);
        store.sync(5).unwrap_err();
        fs.fail_syncs(false);
        // Killed.
        let store = over(&fs);
        assert_eq!(store.open_notes().unwrap(), [note(1)]);
        store.sync(6).unwrap();
        fs.crash();
        assert_eq!(over(&fs).open_notes().unwrap(), [note(1)]);
    }

    #[test]
    fn notes_are_replaced_as_a_whole() {
        for stop in 0..8 {
            let fs = Forgetful::default();
            let store = over(&fs);
            store.open_notes().unwrap();
            (1..=3).for_each(|key| store.note(note(key)).unwrap());
            store.sync(5).unwrap();
            fs.stop_after(stop);
            let replaced = store.replace_notes([note(9)].into_iter());
            fs.crash();
            let found = over(&fs).open_notes().unwrap();
            match found.as_slice() {
                [one] => assert_eq!(*one, note(9)),
                all => assert!(replaced.is_err() && all == [note(1), note(2), note(3)], "{all:?}"),
            }
        }
    }

    #[test]
    fn a_full_device_still_takes_notes() {
        let fs = Forgetful::new(200_000);
        let store = over(&fs);
        store.open_notes().unwrap();
        let full = store.write_vectored(5, 0, &[IoSlice::new(&[1; 200_000])]).unwrap_err();
        assert!(full.written < 200_000);
        (0..100).for_each(|key| store.note(note(key)).unwrap());
        store.sync(5).unwrap();
        // It can be opened, and its notes are no fewer for that.
        let store = over(&fs);
        assert_eq!(store.open_notes().unwrap().len(), 100);
        (100..SPARE as u64).for_each(|key| store.note(note(key)).unwrap());
        assert_eq!(store.notes_len(), SPARE);
        store.sync(5).unwrap();
        fs.crash();
        assert_eq!(over(&fs).open_notes().unwrap(), (0..SPARE as u64).map(note).collect::<Vec<_>>());
    }
}
