//! A file of entries that grows, and what a failed sync means for it.
//!
//! After a failed sync the kernel holds the pages that it lost for written, and the next sync succeeds without them. So the
//! entries of which it is not known that they are durable are kept, and written again before the next sync. So are those that
//! a run finds which did not write them: the one that did may have been killed after such a sync.

use std::io;
use std::sync::Arc;

use impresario_base::lock::Mutex;

use crate::filesystem::FileSystem;
use crate::replace::write_all;

/// The open file.
pub(crate) struct Grown<H> {
    file: Arc<H>,
    len_bytes: usize,
    /// The last entries, of which it is not known that they are durable.
    unsynced: Vec<u8>,
    /// A sync has failed since they were written, or may have in an earlier run.
    has_failed: bool,
}

impl<H> Grown<H> {
    /// A file with `len_bytes` of entries, of which the last, `found`, were found and may not be durable.
    pub(crate) fn new(file: H, len_bytes: usize, found: Vec<u8>) -> Grown<H> {
        Grown { file: Arc::new(file), len_bytes, has_failed: !found.is_empty(), unsynced: found }
    }

    /// The file itself.
    pub(crate) fn file(&self) -> &H {
        &self.file
    }

    /// Bytes of all entries.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Adds entries. On an error none was added.
    pub(crate) fn append<F: FileSystem<File = H>>(&mut self, fs: &F, entries: &[u8]) -> io::Result<()> {
        write_all(fs, &self.file, self.len_bytes as u64, entries)?;
        self.len_bytes += entries.len();
        self.unsynced.extend_from_slice(entries);
        Ok(())
    }

    /// Writes again what a failed sync may have lost.
    fn renew<F: FileSystem<File = H>>(&mut self, fs: &F) -> io::Result<()> {
        if self.has_failed {
            write_all(fs, &self.file, (self.len_bytes - self.unsynced.len()) as u64, &self.unsynced)?;
            self.has_failed = false;
        }
        Ok(())
    }

    /// A sync of the first `len_bytes` has ended so.
    fn note_synced(&mut self, synced: &io::Result<()>, len_bytes: usize) {
        if synced.is_err() {
            self.has_failed = true;
            return;
        }
        let younger = (self.len_bytes - len_bytes).min(self.unsynced.len());
        self.unsynced.drain(..self.unsynced.len() - younger);
    }

    /// Makes the entries durable while nobody adds any.
    pub(crate) fn sync_alone<F: FileSystem<File = H>>(&mut self, fs: &F) -> io::Result<()> {
        self.renew(fs)?;
        let synced = fs.sync(&self.file);
        self.note_synced(&synced, self.len_bytes);
        synced
    }
}

/// Makes the entries so far durable, if there is a file. Not under the lock: entries may be added meanwhile, or the file be
/// replaced.
pub(crate) fn sync<F: FileSystem, T>(
    fs: &F,
    lock: &Mutex<T>,
    of: impl Fn(&mut T) -> Option<&mut Grown<F::File>>,
) -> io::Result<()> {
    let (file, len_bytes) = {
        let mut held = lock.lock();
        let Some(grown) = of(&mut held) else { return Ok(()) };
        grown.renew(fs)?;
        (grown.file.clone(), grown.len_bytes)
    };
    let synced = fs.sync(&file);
    let mut held = lock.lock();
    if let Some(grown) = of(&mut held).filter(|grown| Arc::ptr_eq(&grown.file, &file)) {
        grown.note_synced(&synced, len_bytes);
    }
    synced
}
