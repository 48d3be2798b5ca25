//! Objects: what a data server stores of each file.
//!
//! # The format of the directory, version 2
//! - `format`: the line `impresario objects 2`, then cluster, folder and server, a line each. A version that changes the
//!   format below writes another number; a server refuses a directory whose number it does not know. Additions that old
//!   servers may ignore keep the number. Version 1 had the first line only.
//! - `lock`: held by the server that has the directory open; its text is only for people.
//! - `keys`, `number`: below which keys there were objects, and the server's number; see `keys.rs`.
//! - `notes`, `notes.new`: what the server must know after a restart; see `notes.rs`.
//! - `syncing`: which objects are being synced; see `doubts.rs`.
//! - `removed`, `removed.old`: the keys of removed objects, which are never made again; see `removed.rs`.
//! - `arriving`, `arrived`, `departed`: marks of a move of the server; see `passage.rs`.
//! - `set-aside/<kkkkkkkkkkkkkkkk>`: objects that belonged to no file, moved there by a check of the cluster.
//! - `objects/<xx>/<kkkkkkkkkkkkkkkk>`: the object of the file with key k (16 hexadecimal digits, lower case), in the
//!   directory named by the lowest byte of the key. Byte n of the object is byte n of the server's lane of the file; a
//!   range never written is a hole. The file's length is the object's length. A missing object has length 0.
//! - `objects/<xx>/<kkkkkkkkkkkkkkkk>.sums`, `checksums`, `checksums.off`: the checksums of blocks, if the folder has any;
//!   see `checks.rs`.
//! - Nothing else is in `objects/<xx>`. Additions use names there that begin with the key, a dot and a word.
//!
//! # Durability
//! [`ObjectStore::sync`] returns when the object's name and all its writes and truncations that returned before are
//! durable. Until then a crash may undo them, wholly or in part. A removal is durable when [`ObjectStore::unlink`]
//! returns: what a crash brings back is removed again when the store is opened.
//!
//! # Concurrency
//! All calls may run at the same time. A read that overlaps a write may see parts of both; a write that overlaps a
//! removal counts as before it. A caller that needs more order, such as the scheduler, provides it.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use impresario_base::Durable;
use impresario_base::complaints::Complaints;
use impresario_base::lock::{Mutex, RwLock};

use crate::changes::Changes;
use crate::checks::{self, Checks, ChecksState, SUMS};
use crate::doubts::Doubts;
use crate::error::{StoreError, WriteError};
use crate::filesystem::{FileState, FileSystem, SpaceState};
use crate::folder::{self, FolderIdentity};
use crate::handles::Handles;
use crate::keys::{self, KeyMarks};
use crate::notes::Notes;
use crate::passage;
use crate::real::Real;
use crate::removed::{Removed, is_removed};

pub(crate) const OBJECTS: &str = "objects";
pub(crate) const FOLDERS: usize = 256;
/// Groups of objects whose syncs wait for one another's notes: many more than syncs at one time.
const SYNC_GROUPS: usize = 1024;
/// Longest object: the largest offset of Linux.
const OBJECT_MAX_BYTES: u64 = i64::MAX as u64;

/// Limits of a store.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Largest number of objects kept open (at least 1; default 512), plus those in use at the moment.
    pub open_files: usize,
    /// Removed objects that are remembered at least (at least 1; default 262,144: at most 10 MiB of memory).
    pub removed_keys: usize,
    /// Whether blocks have checksums; `None` (the default): if the folder has them. Without them for once, they are useless
    /// from then on, and a store that is to have them again begins anew.
    pub checksums: Option<bool>,
    /// Checksums in memory that no sync has settled, at most (default 1,048,576: of 4 GiB, in some 30 MiB of memory).
    pub unsettled_blocks: usize,
}

impl Default for StoreOptions {
    fn default() -> Self {
        StoreOptions { open_files: 512, removed_keys: 1 << 18, checksums: None, unsettled_blocks: 1 << 20 }
    }
}

/// A data server's objects in one directory.
pub struct ObjectStore<F: FileSystem = Real> {
    pub(crate) fs: F,
    pub(crate) notes: Notes<F::File>,
    pub(crate) doubts: Doubts<F::File>,
    pub(crate) removed: Removed<F::File>,
    pub(crate) checks: Option<Checks<F::File>>,
    pub(crate) changes: Changes,
    pub(crate) marks: Mutex<KeyMarks>,
    identity: FolderIdentity,
    handles: Handles<F::File>,
    directories: Vec<Directory>,
    /// See [`ObjectStore::sync_noting`].
    syncing: Vec<RwLock<()>>,
    /// A device that fails every call must not fill the log.
    pub(crate) complaints: Complaints,
}

/// A directory of objects.
struct Directory {
    path: String,
    /// Changes of its names.
    names: Durable,
}

impl ObjectStore<Real> {
    /// Opens the directory of the server of that name for this process alone. It must have been made
    /// ([`make`](crate::make)).
    pub fn open(dir: &Path, server: &str, options: StoreOptions) -> Result<ObjectStore<Real>, StoreError> {
        ObjectStore::over(Real::open(dir)?, dir, server, options)
    }
}

impl<F: FileSystem> ObjectStore<F> {
    /// Opens a store over a directory of any file system; `dir` is its name in messages.
    pub fn over(fs: F, dir: &Path, server: &str, options: StoreOptions) -> Result<ObjectStore<F>, StoreError> {
        let found = folder::state_of(&fs, dir)?;
        if let folder::FolderState::Made(_) = found {
            passage::check(&fs, dir)?;
        }
        ObjectStore::over_any(fs, dir, server, options)
    }

    /// The same of a folder that is being filled.
    pub(crate) fn over_any(
        fs: F,
        dir: &Path,
        server: &str,
        options: StoreOptions,
    ) -> Result<ObjectStore<F>, StoreError> {
        let identity = folder::open(&fs, dir, server)?;
        make_folders(&fs, dir)?;
        let failed = |source: io::Error| StoreError::Io { dir: dir.into(), source };
        let removed = Removed::open(&fs, options.removed_keys).map_err(failed)?;
        let era = checks::era(&fs, options.checksums).map_err(failed)?;
        let directory = |i| Directory { path: format!("{OBJECTS}/{i:02x}"), names: Durable::default() };
        let store = ObjectStore {
            fs,
            identity,
            notes: Notes::default(),
            doubts: Doubts::default(),
            removed,
            checks: era.map(|era| Checks::new(era, options.open_files, options.unsettled_blocks)),
            changes: Changes::default(),
            marks: Mutex::default(),
            handles: Handles::new(options.open_files),
            directories: (0..FOLDERS).map(directory).collect(),
            syncing: (0..SYNC_GROUPS).map(|_| RwLock::default()).collect(),
            complaints: Complaints::default(),
        };
        store.remove_again().map_err(failed)?;
        store.read_marks().map_err(failed)?;
        Ok(store)
    }

    /// Finds out below which keys there are, or were, objects.
    fn read_marks(&self) -> io::Result<()> {
        let found = match keys::read(&self.fs)? {
            Some(found) => found,
            None => {
                let listed = keys::list(&self.fs, self.removed_keys())?;
                // So that nothing need be listed at the next start.
                let written = if listed.is_empty() { Ok(()) } else { self.write_marks(&listed) };
                if let Err(error) = written {
                    tracing::warn!(%error, "the file `keys` of the store's folder cannot be written; the next start tries it again");
                }
                listed
            }
        };
        *self.marks.lock() = found;
        Ok(())
    }

    /// Removes what a power failure has brought back.
    fn remove_again(&self) -> io::Result<()> {
        let mut back = 0;
        for key in self.removed.recent() {
            match self.fs.unlink(&self.path(key)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                unlinked => {
                    unlinked?;
                    back += 1;
                }
            }
            match self.fs.unlink(&format!("{}{SUMS}", self.path(key))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        if back > 0 {
            tracing::info!(objects = back, "removed objects were there again, after a crash; removed again");
        }
        Ok(())
    }

    /// Whose objects these are.
    pub fn identity(&self) -> &FolderIdentity {
        &self.identity
    }

    /// Reads from an object until `buf` is full or the object ends; returns the bytes read, 0 if it does not exist. EIDRM if
    /// it was removed, as long as that is remembered: what was there is elsewhere, or gone, but no hole.
    pub fn read(&self, key: u64, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(key, offset, &mut [IoSliceMut::new(buf)])
    }

    /// What there is to tell of checksums; `None` without them.
    pub fn checks(&self) -> Option<ChecksState> {
        self.checks.as_ref().map(Checks::state)
    }

    /// The same into several buffers in turn. The slices are consumed: do not use them afterwards.
    pub fn read_vectored(&self, key: u64, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let Some(file) = self.unless_removed(key)? else { return Ok(0) };
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        let (mut bufs, mut done) = (bufs, 0);
        if let Some(checks) = &self.checks {
            for buf in bufs.iter_mut().filter(|_| offset_fits(offset, 0)) {
                let max = (OBJECT_MAX_BYTES - offset).saturating_sub(done as u64).min(buf.len() as u64);
                let buf = buf.get_mut(..max as usize).unwrap_or_default();
                let at = offset + done as u64;
                let len = self.read_checked(checks, (key, &file), at, buf, false)?.unwrap_or(0);
                done += len;
                if len < buf.len() {
                    break;
                }
            }
            return Ok(done);
        }
        while done < wanted && offset_fits(offset, done) {
            let len = self.fs.read(&file, offset + done as u64, bufs)?;
            if len == 0 {
                break;
            }
            done += len;
            if done < wanted {
                IoSliceMut::advance_slices(&mut bufs, len);
            }
        }
        Ok(done)
    }

    /// Reads like [`ObjectStore::read`] if that needs no device: the object is open and the range is in memory. `None`
    /// if it might wait: the device then does nothing.
    pub fn read_cached(&self, key: u64, offset: u64, buf: &mut [u8]) -> Option<io::Result<usize>> {
        let range = offset..offset.saturating_add(buf.len() as u64);
        self.read_if(key, offset, &mut [IoSliceMut::new(buf)], |file| !self.fs.is_missing(file, range))
    }

    /// The same, but the device may begin with what is missing: for a read whose turn it is.
    pub fn read_or_begin(&self, key: u64, offset: u64, buf: &mut [u8]) -> Option<io::Result<usize>> {
        self.read_vectored_cached(key, offset, &mut [IoSliceMut::new(buf)])
    }

    /// The same into several buffers in turn. The slices are left unchanged.
    pub fn read_vectored_cached(
        &self,
        key: u64,
        offset: u64,
        bufs: &mut [IoSliceMut<'_>],
    ) -> Option<io::Result<usize>> {
        self.read_if(key, offset, bufs, |_| true)
    }

    /// The same, unless `may_try` says no of the open object.
    fn read_if(
        &self,
        key: u64,
        offset: u64,
        bufs: &mut [IoSliceMut<'_>],
        may_try: impl FnOnce(&F::File) -> bool,
    ) -> Option<io::Result<usize>> {
        let file = match self.handles.get(key) {
            Some(file) if may_try(&file) => file,
            Some(_) => return None,
            None if !self.fs.in_memory() => return None,
            None => match self.unless_removed(key) {
                Ok(Some(file)) => file,
                Ok(None) => return Some(Ok(0)),
                Err(e) => return Some(Err(e)),
            },
        };
        if !offset_fits(offset, 0) {
            return Some(Ok(0));
        }
        match (&self.checks, bufs) {
            (None, bufs) => self.read_plain_cached(&file, offset, bufs).transpose(),
            (Some(checks), [buf]) if offset_fits(offset, buf.len()) => {
                self.read_checked(checks, (key, &file), offset, buf, true).transpose()
            }
            (Some(_), _) => None,
        }
    }

    /// What memory has of a file, unchecked; `None` unless it is all.
    pub(crate) fn read_plain_cached(
        &self,
        file: &F::File,
        offset: u64,
        bufs: &mut [IoSliceMut<'_>],
    ) -> io::Result<Option<usize>> {
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        match self.fs.read_cached(file, offset, bufs)? {
            // Short: because the object ends there, or because the rest is not in memory.
            Some(len) if len < wanted => {
                Ok((self.fs.stat(file)?.size <= offset.saturating_add(len as u64)).then_some(len))
            }
            read => Ok(read),
        }
    }

    /// Whether a byte of an object is in memory.
    pub fn has_cached(&self, key: u64, at: u64) -> bool {
        let Some(file) = self.handles.get(key) else { return false };
        !self.fs.is_missing(&file, at..at.saturating_add(1))
            && matches!(self.fs.read_cached(&file, at, &mut [IoSliceMut::new(&mut [0])]), Ok(Some(1)))
    }

    /// Begins to read a range of an object into memory, and does not wait for it. A hint: nothing tells whether it did.
    pub fn will_read(&self, key: u64, range: Range<u64>) {
        if let Ok(Some(file)) = self.existing(key) {
            self.fs.will_read(&file, range);
        }
    }

    /// Waits until a range that [`ObjectStore::will_read`] was asked for is in memory, as far as the object reaches.
    pub fn wait_for(&self, key: u64, range: Range<u64>) -> io::Result<()> {
        const STEP_BYTES: u64 = 512 << 10;
        let Some(file) = self.existing(key)? else { return Ok(()) };
        let mut byte = [0];
        // A byte is there when its page is; pages of one request of the device come together.
        let mut at = range.start;
        while at < range.end {
            at = (at + STEP_BYTES).min(range.end);
            self.fs.read(&file, at - 1, &mut [IoSliceMut::new(&mut byte)])?;
        }
        Ok(())
    }

    /// Writes the slices one after the other; the first write creates the object, unless it was removed. Returns the number of bytes written,
    /// which is all of them. An empty write creates no object.
    pub fn write_vectored(&self, key: u64, offset: u64, bufs: &[IoSlice<'_>]) -> Result<usize, WriteError> {
        let wanted: usize = bufs.iter().map(|buf| buf.len()).sum();
        if wanted == 0 {
            return Ok(0);
        }
        if offset.checked_add(wanted as u64).is_none_or(|end| end > OBJECT_MAX_BYTES) {
            return Err(WriteError { written: 0, source: too_large() });
        }
        let file = self.existing_or_new(key).map_err(|source| WriteError { written: 0, source })?;
        let written = match &self.checks {
            Some(checks) => self.write_checked(checks, (key, &file), offset, bufs, wanted),
            None => self.write_plain(&file, offset, bufs, wanted),
        };
        self.note_change(key, offset..offset + wanted as u64);
        written
    }

    pub(crate) fn write_plain(
        &self,
        file: &F::File,
        offset: u64,
        bufs: &[IoSlice<'_>],
        wanted: usize,
    ) -> Result<usize, WriteError> {
        // The file system nearly always takes everything at once; only otherwise are the slices copied.
        let first = self.write_some(file, offset, bufs, 0)?;
        if first == wanted {
            return Ok(wanted);
        }
        let mut slices = bufs.to_vec();
        let (mut rest, mut written) = (&mut slices[..], first);
        IoSlice::advance_slices(&mut rest, first);
        while written < wanted {
            let len = self.write_some(file, offset + written as u64, rest, written)?;
            written += len;
            IoSlice::advance_slices(&mut rest, len);
        }
        Ok(written)
    }

    /// Makes the object's current content and its name durable. For a missing object, makes its absence durable.
    pub fn sync(&self, key: u64) -> io::Result<()> {
        self.sync_notes()?;
        let directory = self.directory(key);
        // Read before the file is opened: the name by which it is opened is among these changes.
        let mut changes = directory.names.made();
        if let Some(file) = self.existing(key)? {
            match &self.checks {
                Some(checks) if self.settle(checks, key, &file)? => changes = directory.names.made(),
                Some(_) => {}
                None => self.sync_object(key, &file)?,
            }
        }
        directory.names.sync_to(changes, || self.fs.sync_dir(&directory.path))
    }

    /// The same; `failed` notes that data were lost. Of several syncs of an object at the same time the kernel tells one of
    /// the loss, and the others succeed: this returns success when what they were told is noted.
    pub fn sync_noting<T>(&self, key: u64, failed: impl FnOnce(io::Error) -> T) -> Result<(), T> {
        self.noting(key, || self.sync(key), failed)
    }

    pub(crate) fn noting<T>(
        &self,
        key: u64,
        sync: impl FnOnce() -> io::Result<()>,
        failed: impl FnOnce(io::Error) -> T,
    ) -> Result<(), T> {
        let group = &self.syncing[key as usize % SYNC_GROUPS];
        let under_way = group.read();
        sync().map_err(failed)?;
        drop(under_way);
        // When nobody else is between a sync and its note.
        drop(group.write());
        Ok(())
    }

    /// Makes all names of objects durable, and the absence of those that were removed.
    pub(crate) fn sync_names(&self) -> io::Result<()> {
        self.directories.iter().try_for_each(|directory| directory.names.sync(|| self.fs.sync_dir(&directory.path)))
    }

    /// Sets the length of the object; creates it if `len` is not 0, unless it was removed.
    pub fn truncate(&self, key: u64, len: u64) -> io::Result<()> {
        if len > OBJECT_MAX_BYTES {
            return Err(too_large());
        }
        let file = if len > 0 { Some(self.existing_or_new(key)?) } else { self.existing(key)? };
        let Some(file) = file else { return Ok(()) };
        let cut = match &self.checks {
            Some(checks) => self.change_checked(checks, (key, &file), len..u64::MAX, || self.fs.set_len(&file, len)),
            None => self.fs.set_len(&file, len),
        };
        self.note_change(key, len..u64::MAX);
        cut
    }

    /// Removes the object for ever, durably; succeeds if there is none. From now on reads, and what
    /// would change or make it, fail with EIDRM.
    pub fn unlink(&self, key: u64) -> io::Result<()> {
        // Nothing can be written under it any more, so no other file may get it.
        if let Err(error) = self.mark_key(key) {
            self.complaints.counted("keys", |removals| {
                tracing::warn!(removals, %error, "the key of a removed object could not be noted in the store's folder");
            });
        }
        let noted = self.remember_removed(key)?;
        match self.handles.remove(key, || self.fs.unlink(&self.path(key))) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            removed => {
                self.note_change(key, 0..u64::MAX);
                self.directory(key).names.changed();
                removed?;
            }
        }
        if let Some(checks) = &self.checks {
            self.forget_sums(checks, key);
        }
        if let Some(generation) = noted {
            self.sync_removed()?;
            if self.removed.is_young(generation) {
                return Ok(());
            }
        }
        let directory = self.directory(key);
        directory.names.sync(|| self.fs.sync_dir(&directory.path))
    }

    /// Renames an object to a path outside the objects.
    pub(crate) fn move_away(&self, key: u64, to: &str) -> io::Result<()> {
        let moved = self.handles.remove(key, || self.fs.rename(&self.path(key), to));
        self.note_change(key, 0..u64::MAX);
        moved?;
        self.directory(key).names.changed();
        Ok(())
    }

    /// The state of the object; zeros if there is none.
    pub fn stat(&self, key: u64) -> io::Result<FileState> {
        Ok(self.look(key)?.unwrap_or_default())
    }

    /// The same; EIDRM if it was removed.
    pub fn look_unless_removed(&self, key: u64) -> io::Result<Option<FileState>> {
        self.unless_removed(key)?.map(|file| self.fs.stat(&file)).transpose()
    }

    /// The state of the object, if there is one.
    pub fn look(&self, key: u64) -> io::Result<Option<FileState>> {
        self.existing(key)?.map(|file| self.fs.stat(&file)).transpose()
    }

    /// Sets the modification time of an object; nothing where there is none.
    pub fn set_mtime(&self, key: u64, secs: i64, nanos: u32) -> io::Result<()> {
        self.existing(key)?.map_or(Ok(()), |file| self.fs.set_mtime(&file, secs, nanos))
    }

    /// Space for objects.
    pub fn statfs(&self) -> io::Result<SpaceState> {
        self.fs.space()
    }

    /// Whether objects live in memory only: then no read or write waits for a device.
    pub fn in_memory(&self) -> bool {
        self.fs.in_memory()
    }

    fn write_some(
        &self,
        file: &F::File,
        offset: u64,
        bufs: &[IoSlice<'_>],
        written: usize,
    ) -> Result<usize, WriteError> {
        match self.fs.write(file, offset, bufs) {
            // A file system that takes nothing without an error would cause an endless loop.
            Ok(0) => Err(WriteError { written, source: io::ErrorKind::WriteZero.into() }),
            Ok(len) => Ok(len),
            Err(source) => Err(WriteError { written, source }),
        }
    }

    pub(crate) fn existing(&self, key: u64) -> io::Result<Option<Arc<F::File>>> {
        self.handles.get_or_open(key, || match self.fs.open(&self.path(key), false) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        })
    }

    /// The same; EIDRM if it was removed, as long as that is remembered.
    pub(crate) fn unless_removed(&self, key: u64) -> io::Result<Option<Arc<F::File>>> {
        match self.existing(key)? {
            None if self.removed.contains(key) => Err(is_removed()),
            file => Ok(file),
        }
    }

    pub(crate) fn existing_or_new(&self, key: u64) -> io::Result<Arc<F::File>> {
        let file = self.handles.get_or_open(key, || match self.fs.open(&self.path(key), false) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                // A removal is remembered before it takes the lock under which this runs.
                if self.removed.contains(key) {
                    return Err(is_removed());
                }
                if let Some(checks) = &self.checks {
                    self.forget_lost_sums(checks, key)?;
                }
                self.mark_key(key)?;
                let file = self.fs.open(&self.path(key), true)?;
                self.directory(key).names.changed();
                Ok(Some(file))
            }
            Err(e) => Err(e),
        })?;
        file.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    pub(crate) fn names_changed(&self, key: u64) {
        self.directory(key).names.changed();
    }

    fn directory(&self, key: u64) -> &Directory {
        &self.directories[key as usize % FOLDERS]
    }

    pub(crate) fn path(&self, key: u64) -> String {
        format!("{OBJECTS}/{:02x}/{key:016x}", key & 0xff)
    }
}

/// Makes the subdirectories that are missing.
fn make_folders<F: FileSystem>(fs: &F, dir: &Path) -> Result<(), StoreError> {
    let failed = |source: io::Error| StoreError::Io { dir: dir.into(), source };
    let not_writable = |source: io::Error| StoreError::NotWritable { dir: dir.into(), source };
    fs.make_dir(OBJECTS).map_err(not_writable)?;
    (0..FOLDERS).try_for_each(|i| fs.make_dir(&format!("{OBJECTS}/{i:02x}"))).map_err(not_writable)?;
    // The name of their folder is durable with the file `keys`, which is written before the first object is made.
    fs.sync_dir(OBJECTS).map_err(failed)
}

/// Whether a byte can lie at `offset + done`.
fn offset_fits(offset: u64, done: usize) -> bool {
    offset.checked_add(done as u64).is_some_and(|at| at < OBJECT_MAX_BYTES)
}

/// EFBIG, as the kernel reports it.
pub(crate) fn too_large() -> io::Error {
    rustix::io::Errno::FBIG.into()
}
