//! What a store needs of a file system.

use std::io::{self, IoSlice, IoSliceMut};

/// A folder of a file system. Paths are relative to it, separated by `/`, and made by this crate, never by a user.
///
/// Every method may be called from any thread; each call is one operation of the file system, so transfers
/// may be short (also because there are more buffers than the system takes at once). Errors are those of the system, with their errno.
pub trait FileSystem: Send + Sync + 'static {
    /// An open file; closed when dropped.
    type File: Send + Sync + 'static;

    /// Opens a file for reading and writing; with `create` an absent one is made.
    fn open(&self, path: &str, create: bool) -> io::Result<Self::File>;

    /// Reads at an offset; 0 at the end of the file.
    fn read(&self, file: &Self::File, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize>;

    /// Reads like [`FileSystem::read`] as far as no device has to be asked; `None` when nothing can be read so.
    fn read_cached(&self, file: &Self::File, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>>;

    /// Writes at an offset; what lies between the end of the file and the offset becomes zeros.
    fn write(&self, file: &Self::File, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Cuts or extends a file; what is added is zeros.
    fn set_len(&self, file: &Self::File, len: u64) -> io::Result<()>;

    /// Returns when the content and length of the file are durable. Its name is not: see [`FileSystem::sync_dir`].
    fn sync(&self, file: &Self::File) -> io::Result<()>;

    /// Length, time and use of a file.
    fn stat(&self, file: &Self::File) -> io::Result<FileState>;

    /// Removes a name.
    fn unlink(&self, path: &str) -> io::Result<()>;

    /// Gives a file another name, atomically replacing what had it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Makes a folder; it may exist.
    fn make_dir(&self, path: &str) -> io::Result<()>;

    /// Returns when the names made and removed in a folder (`""`: this one) are durable.
    fn sync_dir(&self, path: &str) -> io::Result<()>;

    /// The names in this folder itself.
    fn names(&self) -> io::Result<Vec<String>>;

    /// Room on the device.
    fn space(&self) -> io::Result<SpaceState>;

    /// True when files live in memory alone, so that no read or write of them waits for a device.
    fn in_memory(&self) -> bool;
}

/// The state of a file; all zero when there is none.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FileState {
    /// Length, bytes.
    pub size: u64,
    /// Last modification, seconds since 1970-01-01 UTC.
    pub mtime_secs: i64,
    /// And nanoseconds, 0 to 999,999,999.
    pub mtime_nanos: u32,
    /// Bytes of storage used.
    pub used_bytes: u64,
}

/// Room on a device.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SpaceState {
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that a server without privileges can still use.
    pub free_bytes: u64,
    /// Files in all.
    pub files: u64,
    /// Files that can still be made.
    pub files_free: u64,
}
