//! A directory of the local file system.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use impresario_base::machine::is_in_memory;
use impresario_base::page_cache;
use impresario_base::presence::Presence;
use impresario_device::device_limits;
use rustix::fs::{
    Advice, AtFlags, Dir, FallocateFlags, FileType, FlockOperation, Mode, OFlags, ResolveFlags, SeekFrom, Timespec,
    Timestamps,
};
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::StoreError;
use crate::filesystem::{FileState, FileSystem, FileSystemId, SpaceState};
use crate::folder::{self, FolderState};

/// A directory of the local file system, locked against other servers while this value lives.
///
/// Paths are resolved beneath it and follow no symbolic link, so that nothing planted in the directory leads out of it.
#[derive(Debug)]
pub struct Real {
    root: OwnedFd,
    presence: Presence,
    file_system: Option<FileSystemId>,
    in_memory: bool,
    /// The kernel cuts longer advice.
    advice_max_bytes: u64,
    /// The kernel has `openat2` (Linux 5.6).
    confined: AtomicBool,
    _lock: Option<Claim>,
}

/// The file in a server's directory that it keeps locked.
pub const LOCK: &str = "lock";
/// Buffers of one system call: `IOV_MAX` of Linux.
const SLICES_MAX: usize = 1024;

impl Real {
    /// Opens and locks a directory that was made for a server; leaves any other as it is.
    pub fn open(dir: &Path) -> Result<Real, StoreError> {
        if !dir.exists() {
            return Err(StoreError::Blank { dir: dir.into() });
        }
        let real = Real::look(dir)?;
        match folder::state_of(&real, dir)? {
            FolderState::Blank => Err(StoreError::Blank { dir: dir.into() }),
            FolderState::Older | FolderState::Made(_) => real.locked(dir),
        }
    }

    /// Opens and locks a directory that is to become a server's; creates it if missing.
    pub fn make(dir: &Path) -> Result<Real, StoreError> {
        make_directory(dir).map_err(|source| StoreError::Open { dir: dir.into(), source })?;
        Real::look(dir)?.locked(dir)
    }

    fn locked(self, dir: &Path) -> Result<Real, StoreError> {
        let lock = lock(&self.root, dir)?;
        Ok(Real { _lock: Some(lock), ..self })
    }

    /// Opens a directory without a claim to it.
    pub(crate) fn look(dir: &Path) -> Result<Real, StoreError> {
        let failed = |source: io::Error| StoreError::Open { dir: dir.into(), source };
        let root = rustix::fs::open(dir, DIR_FLAGS, Mode::empty()).map_err(|e| failed(e.into()))?;
        let kind = rustix::fs::fstatfs(&root).map_err(|e| failed(e.into()))?.f_type as u64;
        let in_memory = is_in_memory(kind);
        let device = rustix::fs::fstat(&root).map_err(|e| failed(e.into()))?.st_dev;
        let file_system = impresario_base::machine::boot().ok().map(|boot| FileSystemId { boot, device });
        let advice_max_bytes = device_limits(Path::new("/sys"), device).call_bytes;
        let presence = Presence::of(&root);
        Ok(Real {
            root,
            presence,
            file_system,
            in_memory,
            advice_max_bytes,
            confined: AtomicBool::new(true),
            _lock: None,
        })
    }

    fn open_at(&self, path: &str, flags: OFlags) -> io::Result<OwnedFd> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let mode = if flags.contains(OFlags::CREATE) { Mode::from_raw_mode(0o600) } else { Mode::empty() };
        if self.confined.load(Ordering::Relaxed) {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            match rustix::fs::openat2(&self.root, path, flags, mode, resolve) {
                // Some containers refuse the call with EPERM; if the file system refused, the open below fails too.
                Err(Errno::NOSYS | Errno::PERM) => self.confined.store(false, Ordering::Relaxed),
                opened => return Ok(opened?),
            }
        }
        Ok(rustix::fs::openat(&self.root, path, flags, mode)?)
    }

    fn is_removed(&self) -> bool {
        self.presence.is_over(&self.root)
    }

    /// What is open in a store that was removed can be written and synced, and is lost with it.
    fn still_there(&self) -> io::Result<()> {
        if self.is_removed() { Err(Errno::IO.into()) } else { Ok(()) }
    }
}

const DIR_FLAGS: OFlags = OFlags::DIRECTORY.union(OFlags::RDONLY).union(OFlags::CLOEXEC);

/// Creates the directory and its parents, and makes its name durable.
fn make_directory(dir: &Path) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(dir)?;
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).map_or(PathBuf::from("."), Path::to_path_buf);
    fs::File::open(parent)?.sync_all()
}

/// How long a claim waits for its holder to end: a service manager starts a server when the last one is just ending.
const CLAIM_MAX: Duration = Duration::from_secs(2);

/// The lock of a file for one holder alone, until this value is dropped.
#[derive(Debug)]
pub struct Claim(OwnedFd);

impl Claim {
    /// Locks the file within 2 s; else the error is EWOULDBLOCK.
    pub fn take(file: OwnedFd) -> Result<Claim, Errno> {
        lock_soon(&file).map(|()| Claim(file))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Closing the descriptor is not enough: a process that was forked meanwhile has it too until it executes a program.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

fn lock_soon(file: &OwnedFd) -> Result<(), Errno> {
    let began = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if began.elapsed() < CLAIM_MAX => std::thread::sleep(Duration::from_millis(10)),
            locked => return locked,
        }
    }
}

/// Takes the lock file, or reports its holder.
fn lock(root: &OwnedFd, dir: &Path) -> Result<Claim, StoreError> {
    let not_writable = |e: Errno| StoreError::NotWritable { dir: dir.into(), source: e.into() };
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::openat(root, LOCK, flags, Mode::from_raw_mode(0o600)).map_err(not_writable)?;
    match lock_soon(&file) {
        Err(Errno::WOULDBLOCK) => {
            let mut pid = [0; 20];
            let len = rustix::io::pread(&file, &mut pid, 0).unwrap_or(0);
            let pid: String = pid.iter().take(len).map(|&b| b as char).filter(char::is_ascii_digit).collect();
            let holder = if pid.is_empty() { String::new() } else { format!(" (process {pid})") };
            return Err(StoreError::InUse { dir: dir.into(), holder });
        }
        locked => locked.map_err(not_writable)?,
    }
    // For people and for the message above only: the lock is what counts, and it ends with the process.
    rustix::fs::ftruncate(&file, 0).map_err(not_writable)?;
    rustix::io::pwrite(&file, format!("{}\n", std::process::id()).as_bytes(), 0).map_err(not_writable)?;
    Ok(Claim(file))
}

impl FileSystem for Real {
    type File = OwnedFd;

    fn open(&self, path: &str, create: bool) -> io::Result<OwnedFd> {
        self.open_at(path, if create { OFlags::RDWR | OFlags::CREATE } else { OFlags::RDWR }).map_err(|error| {
            let is_missing = error.kind() == io::ErrorKind::NotFound;
            // The folders are there as long as the store is.
            if is_missing && (create || self.is_removed()) { Errno::IO.into() } else { error }
        })
    }

    fn read(&self, file: &OwnedFd, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        retry(|| match bufs {
            [buf] => rustix::io::pread(file, &mut **buf, offset),
            _ => rustix::io::preadv(file, cut_mut(bufs), offset),
        })
    }

    fn read_cached(&self, file: &OwnedFd, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        if self.in_memory {
            return self.read(file, offset, bufs).map(Some);
        }
        match retry(|| rustix::io::preadv2(file, cut_mut(bufs), offset, ReadWriteFlags::NOWAIT)) {
            Ok(len) => Ok(Some(len)),
            Err(e) if matches!(Errno::from_io_error(&e), Some(Errno::AGAIN | Errno::OPNOTSUPP)) => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn is_missing(&self, file: &OwnedFd, range: Range<u64>) -> bool {
        !self.in_memory && page_cache::is_missing(file.as_fd(), range)
    }

    fn will_read(&self, file: &OwnedFd, range: Range<u64>) {
        for at in range.clone().step_by(self.advice_max_bytes as usize) {
            let len = NonZeroU64::new((range.end - at).min(self.advice_max_bytes));
            let _ = rustix::fs::fadvise(file, at, len, Advice::WillNeed);
        }
    }

    fn write(&self, file: &OwnedFd, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        retry(|| match bufs {
            [buf] => rustix::io::pwrite(file, buf, offset),
            _ => rustix::io::pwritev(file, &bufs[..bufs.len().min(SLICES_MAX)], offset),
        })
    }

    fn set_len(&self, file: &OwnedFd, len: u64) -> io::Result<()> {
        retry(|| rustix::fs::ftruncate(file, len))
    }

    fn allocate(&self, file: &OwnedFd, range: Range<u64>, keep_size: bool) -> io::Result<()> {
        let flags = if keep_size { FallocateFlags::KEEP_SIZE } else { FallocateFlags::empty() };
        change_space(file, flags, range)
    }

    fn punch(&self, file: &OwnedFd, range: Range<u64>) -> io::Result<()> {
        change_space(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, range)
    }

    fn sync(&self, file: &OwnedFd) -> io::Result<()> {
        self.still_there()?;
        // Not fdatasync: an object's modification time is reported as its file's.
        retry(|| rustix::fs::fsync(file))
    }

    fn sync_data(&self, file: &OwnedFd) -> io::Result<()> {
        self.still_there()?;
        retry(|| rustix::fs::fdatasync(file))
    }

    fn set_mtime(&self, file: &OwnedFd, secs: i64, nanos: u32) -> io::Result<()> {
        let time = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
        let times =
            Timestamps { last_access: time(0, rustix::fs::UTIME_OMIT), last_modification: time(secs, nanos.into()) };
        retry(|| rustix::fs::futimens(file, &times))
    }

    fn forget(&self, file: &OwnedFd, range: Range<u64>) {
        if let Some(len) = NonZeroU64::new(range.end.saturating_sub(range.start)) {
            let _ = rustix::fs::fadvise(file, range.start, Some(len), Advice::DontNeed);
        }
    }

    fn next_data(&self, file: &OwnedFd, offset: u64) -> io::Result<Option<u64>> {
        match rustix::fs::seek(file, SeekFrom::Data(offset)) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            // The file system knows of no holes.
            Err(_) => Ok((offset < self.stat(file)?.size).then_some(offset)),
        }
    }

    fn next_hole(&self, file: &OwnedFd, offset: u64) -> io::Result<u64> {
        match rustix::fs::seek(file, SeekFrom::Hole(offset)) {
            Ok(at) => Ok(at),
            // The file system knows of no holes, or the file has become shorter.
            Err(_) => Ok(self.stat(file)?.size.max(offset)),
        }
    }

    fn stat(&self, file: &OwnedFd) -> io::Result<FileState> {
        Ok(state_of(&rustix::fs::fstat(file)?))
    }

    fn stat_name(&self, path: &str) -> io::Result<FileState> {
        let stat = rustix::fs::statat(&self.root, path, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(state_of(&stat)),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn unlink(&self, path: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.root, path, AtFlags::empty())?)
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.root, from, &self.root, to)?)
    }

    fn make_dir(&self, path: &str) -> io::Result<()> {
        match rustix::fs::mkdirat(&self.root, path, Mode::from_raw_mode(0o700)) {
            Err(Errno::EXIST) => Ok(()),
            made => Ok(made?),
        }
    }

    fn sync_dir(&self, path: &str) -> io::Result<()> {
        let dir = self.open_at(if path.is_empty() { "." } else { path }, DIR_FLAGS)?;
        retry(|| rustix::fs::fsync(&dir))
    }

    fn names(&self, dir: &str) -> io::Result<Vec<String>> {
        let dir = self.open_at(if dir.is_empty() { "." } else { dir }, DIR_FLAGS)?;
        let mut names = Vec::new();
        for entry in Dir::read_from(&dir)? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn space(&self) -> io::Result<SpaceState> {
        let stat = rustix::fs::fstatvfs(&self.root)?;
        Ok(SpaceState {
            file_system: self.file_system,
            total_bytes: stat.f_blocks.saturating_mul(stat.f_frsize),
            free_bytes: stat.f_bavail.saturating_mul(stat.f_frsize),
            files: stat.f_files,
            files_free: stat.f_favail,
        })
    }

    fn may_lose(&self) -> bool {
        !self.in_memory
    }

    fn has_lost(&self) -> bool {
        // Of all failures that no such call was told of before the directory was opened, too: from Linux 5.8 on.
        retry(|| rustix::fs::syncfs(&self.root)).is_err()
    }

    fn boot(&self) -> u64 {
        impresario_base::machine::boot().unwrap_or(1).max(1)
    }

    fn in_memory(&self) -> bool {
        self.in_memory
    }
}

fn state_of(stat: &rustix::fs::Stat) -> FileState {
    FileState {
        size: stat.st_size as u64,
        mtime_secs: stat.st_mtime,
        mtime_nanos: stat.st_mtime_nsec as u32,
        used_bytes: stat.st_blocks as u64 * 512,
    }
}

/// The kernel's offsets are signed; an empty range is no error here.
fn change_space(file: &OwnedFd, flags: FallocateFlags, range: Range<u64>) -> io::Result<()> {
    match range.end.saturating_sub(range.start) {
        0 => Ok(()),
        len => retry(|| rustix::fs::fallocate(file, flags, range.start, len)),
    }
}

/// Repeats a call that a signal interrupted before it did anything.
fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return Ok(done?),
        }
    }
}

/// The buffers that the kernel takes at once.
fn cut_mut<'a, 'b>(bufs: &'a mut [IoSliceMut<'b>]) -> &'a mut [IoSliceMut<'b>] {
    let len = bufs.len().min(SLICES_MAX);
    &mut bufs[..len]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The caller's file is there: it is the store that is not.
    #[test]
    fn in_a_store_that_was_removed_nothing_can_be_made() {
        let dir = tempfile::tempdir().unwrap();
        let real = Real::make(dir.path()).unwrap();
        assert_eq!(real.open("file", false).unwrap_err().kind(), io::ErrorKind::NotFound);
        let open = real.open("open", true).unwrap();
        fs::remove_dir_all(dir.path()).unwrap();
        let errno = |error: io::Error| error.raw_os_error();
        assert_eq!(real.open("file", true).err().and_then(errno), Some(libc::EIO));
        assert_eq!(real.open("file", false).err().and_then(errno), Some(libc::EIO), "it was there, for all we know");
        real.write(&open, 0, &[IoSlice::new(b"x")]).unwrap();
        assert_eq!(real.sync(&open).err().and_then(errno), Some(libc::EIO));
        assert_eq!(real.sync_data(&open).err().and_then(errno), Some(libc::EIO));
    }

    #[test]
    fn nothing_leads_out_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), dir.path().join("file")).unwrap();
        let real = Real::make(dir.path()).unwrap();
        for path in ["file", "link/secret", "../secret", "/etc/passwd"] {
            assert!(real.open(path, false).is_err(), "{path}");
        }
    }
}
