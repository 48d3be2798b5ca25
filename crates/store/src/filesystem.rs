//! The file-system interface of a store.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;

/// A directory of a file system. Paths are relative to it, separated by `/`, and built by this crate, never by a user.
///
/// Every method may be called from any thread. Each call is one operation of the file system, so transfers may be short
/// (also because there are more buffers than the system takes at once). Errors carry the errno of the system.
pub trait FileSystem: Send + Sync + 'static {
    /// An open file; closed when dropped.
    type File: Send + Sync + 'static;

    /// Opens a file for reading and writing; with `create`, creates a missing one.
    fn open(&self, path: &str, create: bool) -> io::Result<Self::File>;

    /// Reads at an offset; 0 at the end of the file.
    fn read(&self, file: &Self::File, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Reads like [`FileSystem::read`] from memory only; `None` if that would need the device, which may then begin with what is missing.
    fn read_cached(&self, file: &Self::File, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>>;

    /// Whether a read of a range would need the device, as far as that is known. The device does nothing for it.
    fn is_missing(&self, _file: &Self::File, _range: Range<u64>) -> bool {
        false
    }

    /// Begins to read a range into memory, and does not wait for it. A hint: it may do nothing.
    fn will_read(&self, _file: &Self::File, _range: Range<u64>) {}

    /// Writes at an offset; a gap between the end of the file and the offset is filled with zeros.
    fn write(&self, file: &Self::File, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Sets the length of a file; added bytes are zeros.
    fn set_len(&self, file: &Self::File, len: u64) -> io::Result<()>;

    /// Gives every byte of a range storage, so that writing it needs no more; ENOSPC if there is not enough. With
    /// `keep_size` the length stays, else it becomes at least the end of the range. What is added is zeros.
    fn allocate(&self, file: &Self::File, range: Range<u64>, keep_size: bool) -> io::Result<()>;

    /// Makes a range zeros and releases its storage as far as that is done in whole blocks. The length stays.
    fn punch(&self, file: &Self::File, range: Range<u64>) -> io::Result<()>;

    /// Returns when the content and length of the file are durable. Its name is not: see [`FileSystem::sync_dir`].
    fn sync(&self, file: &Self::File) -> io::Result<()>;

    /// The same without what only describes the file, such as its times.
    fn sync_data(&self, file: &Self::File) -> io::Result<()> {
        self.sync(file)
    }

    /// Lets go of what memory holds of a range, so that it is read from the device again. A hint: it may do nothing.
    fn forget(&self, _file: &Self::File, _range: Range<u64>) {}

    /// The first byte from `offset` on that is not in a hole, or is not known to be; `None` if there is none.
    fn next_data(&self, file: &Self::File, offset: u64) -> io::Result<Option<u64>> {
        Ok((offset < self.stat(file)?.size).then_some(offset))
    }

    /// The first byte from `offset` on, which lies before the end, that is in a hole, or the end if none is known to be.
    fn next_hole(&self, file: &Self::File, offset: u64) -> io::Result<u64>;

    /// Length, time and use of a file.
    fn stat(&self, file: &Self::File) -> io::Result<FileState>;

    /// Sets the time of the last modification. A file system whose times nothing depends on may leave it.
    fn set_mtime(&self, _file: &Self::File, _secs: i64, _nanos: u32) -> io::Result<()> {
        Ok(())
    }

    /// Removes a name.
    fn unlink(&self, path: &str) -> io::Result<()>;

    /// Renames a file, atomically replacing an existing target.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Creates a directory; it may exist.
    fn make_dir(&self, path: &str) -> io::Result<()>;

    /// Returns when all names created and removed in a directory (`""`: this one) are durable.
    fn sync_dir(&self, path: &str) -> io::Result<()>;

    /// The names in a directory (`""`: this one), in any order.
    fn names(&self, dir: &str) -> io::Result<Vec<String>>;

    /// Length, time and use of the file of that name, without following symbolic links; an error if it is no file.
    fn stat_name(&self, path: &str) -> io::Result<FileState>;

    /// Space on the device.
    fn space(&self) -> io::Result<SpaceState>;

    /// Whether the file system may fail to write what it has taken, because that goes to a device later.
    fn may_lose(&self) -> bool;

    /// Whether the file system as a whole has failed to write something, of any file, since anybody asked this last. Waits until all
    /// that is in memory is on the device.
    fn has_lost(&self) -> bool;

    /// A number that this boot of the machine has alone, as far as anybody knows; not 0.
    fn boot(&self) -> u64;

    /// True when files live in memory alone, so that no read or write of them waits for a device.
    fn in_memory(&self) -> bool;
}

/// The state of a file; all zero if it does not exist.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FileState {
    /// Length, bytes.
    pub size: u64,
    /// Last modification, seconds since 1970-01-01 UTC.
    pub mtime_secs: i64,
    /// Nanoseconds of the last modification, 0 to 999,999,999.
    pub mtime_nanos: u32,
    /// Bytes of storage used.
    pub used_bytes: u64,
}

/// Which file system it is, among those of all machines, until its machine is started again. Two are the same if these are. Where they
/// differ, the storage below may be the same: of subvolumes, of containers that have a boot of their own, of network file systems.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileSystemId {
    /// The boot of the machine that has it mounted. Two machines may have the same `machine-id`, but never this.
    pub boot: u64,
    /// Its number there (`st_dev`).
    pub device: u64,
}

/// Space on a device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SpaceState {
    /// Whose space it is.
    pub file_system: Option<FileSystemId>,
    /// Total bytes.
    pub total_bytes: u64,
    /// Bytes available to a server without privileges.
    pub free_bytes: u64,
    /// Total files.
    pub files: u64,
    /// Files that can still be created.
    pub files_free: u64,
}
