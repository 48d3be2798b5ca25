//! Looking at a descriptor that a program sent, without trusting it and without blocking.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use impresario_base::machine::path_of;
use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags};

use crate::backend::{FileId, is_cached};
use crate::learn::MAGIC_BYTES;

/// What the kernel writes behind the name of a file that was removed.
const REMOVED: &[u8] = b" (deleted)";

/// What a descriptor is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Examined {
    pub(super) id: FileId,
    pub(super) size_bytes: u64,
    pub(super) changed_unix_ns: u64,
    /// As the kernel names it in this process's mount name space; of a file that was removed, its last name.
    pub(super) path: PathBuf,
    /// Reads go through the page cache, and it is not all that there is of the file, as of one in shared memory.
    pub(super) cached: bool,
    /// Open for reading; not so a mere name of the file (`O_PATH`), of which a record can be kept all the same.
    pub(super) readable: bool,
}

/// Looks at a descriptor; `None` when it is no regular file. What the file system has in memory is enough: a remote or
/// user-space file system is not asked, so that one that does not answer cannot hold the manager up.
pub(super) fn examine(fd: BorrowedFd<'_>) -> Option<Examined> {
    let flags = rustix::fs::fcntl_getfl(fd).ok()?;
    let Stat { file_type, id, size_bytes, changed_unix_ns, is_removed } = stat(fd)?;
    if file_type != FileType::RegularFile {
        return None;
    }
    let path = rustix::fs::readlink(path_of(fd), Vec::new()).ok()?;
    let mut path = path.into_bytes();
    // A program may remove a file before its registration is taken, and read on.
    if is_removed && path.ends_with(REMOVED) {
        path.truncate(path.len() - REMOVED.len());
    }
    Some(Examined {
        id,
        size_bytes,
        changed_unix_ns,
        path: PathBuf::from(OsString::from_vec(path)),
        cached: !flags.contains(OFlags::DIRECT) && !is_memory(fd),
        readable: !flags.contains(OFlags::PATH) && matches!(flags & OFlags::ACCMODE, OFlags::RDONLY | OFlags::RDWR),
    })
}

/// Whether a file is nothing but memory (`/dev/shm`, `memfd_create`): only such files have seals. No file system is asked.
fn is_memory(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// Whether a file that is open here has been removed, by what is in memory of it: the last descriptor then keeps its space. On NFS it
/// has another name until that is closed.
pub(crate) fn is_removed(fd: BorrowedFd<'_>) -> bool {
    let is_nfs_leftover = || {
        let name = rustix::fs::readlink(path_of(fd), Vec::new());
        name.is_ok_and(|name| name.as_bytes().rsplit(|b| *b == b'/').next().is_some_and(|n| n.starts_with(b".nfs")))
    };
    stat(fd).is_some_and(|stat| stat.is_removed) || is_nfs_leftover()
}

/// The first bytes of a file, if they are in memory: a file system is not waited for.
pub(super) fn first_bytes_in_memory(fd: BorrowedFd<'_>) -> Option<Vec<u8>> {
    let mut bytes = [0; MAGIC_BYTES];
    if !is_cached(fd, 0..MAGIC_BYTES as u64)? {
        return None;
    }
    let mut places = [io::IoSliceMut::new(&mut bytes)];
    let read = rustix::io::preadv2(fd, &mut places, 0, rustix::io::ReadWriteFlags::NOWAIT).ok()?;
    bytes.get(..read).map(<[u8]>::to_vec)
}

/// The device of a regular file or a directory, by what is in memory of it; `None` of anything else.
pub(super) fn device_of_file(fd: BorrowedFd<'_>) -> Option<u64> {
    let stat = stat(fd).filter(|stat| matches!(stat.file_type, FileType::RegularFile | FileType::Directory))?;
    Some(stat.id.dev)
}

/// The file's length as the file system has it in memory.
pub(super) fn size_bytes(fd: BorrowedFd<'_>) -> Option<u64> {
    stat(fd).map(|stat| stat.size_bytes)
}

struct Stat {
    file_type: FileType,
    id: FileId,
    size_bytes: u64,
    changed_unix_ns: u64,
    /// It has no name any more.
    is_removed: bool,
}

fn stat(fd: BorrowedFd<'_>) -> Option<Stat> {
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let wanted = StatxFlags::TYPE
        | StatxFlags::INO
        | StatxFlags::SIZE
        | StatxFlags::NLINK
        | StatxFlags::MTIME
        | StatxFlags::CTIME;
    let stat = rustix::fs::statx(fd, c"", how, wanted).ok()?;
    let unix_ns = |time: rustix::fs::StatxTimestamp| {
        let s = u64::try_from(time.tv_sec).unwrap_or(0);
        s.saturating_mul(1_000_000_000).saturating_add(time.tv_nsec.into())
    };
    let dev = rustix::fs::makedev(stat.stx_dev_major, stat.stx_dev_minor);
    Some(Stat {
        file_type: FileType::from_raw_mode(stat.stx_mode.into()),
        id: FileId { dev, ino: stat.stx_ino },
        size_bytes: stat.stx_size,
        // Who unpacks or copies a file may set back the first time, and not the second.
        changed_unix_ns: unix_ns(stat.stx_mtime).max(unix_ns(stat.stx_ctime)),
        is_removed: stat.stx_nlink == 0,
    })
}

/// Whether a descriptor is an event descriptor. Anything else could be made to block, or to wake the manager for ever.
pub(super) fn is_eventfd(fd: impl AsFd) -> bool {
    let link = rustix::fs::readlink(path_of(fd), Vec::new());
    link.is_ok_and(|name| name.as_bytes() == b"anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

    #[test]
    fn only_regular_files_are_taken() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("f");
        std::fs::write(&path, [0; 100]).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        let open = |how: &mut std::fs::OpenOptions| how.open(&path).unwrap();
        let file = open(std::fs::File::options().read(true));
        let meta = file.metadata().unwrap();
        let id = FileId { dev: meta.dev(), ino: meta.ino() };
        let changed_unix_ns = meta.ctime() as u64 * 1_000_000_000 + meta.ctime_nsec() as u64;
        let expected =
            Examined { id, size_bytes: 100, changed_unix_ns, path: path.clone(), cached: true, readable: true };
        assert_eq!(examine(file.as_fd()), Some(expected.clone()));
        let written = open(std::fs::File::options().write(true));
        assert_eq!(examine(written.as_fd()), Some(Examined { readable: false, ..expected.clone() }));
        let named = open(std::fs::File::options().read(true).custom_flags(libc::O_PATH));
        assert_eq!(examine(named.as_fd()), Some(Examined { readable: false, ..expected.clone() }));
        let (pipe, _) = std::io::pipe().unwrap();
        for other in
            [pipe.as_fd(), std::fs::File::open("/dev/null").unwrap().as_fd(), std::fs::File::open("/").unwrap().as_fd()]
        {
            assert_eq!(examine(other), None);
        }
        let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(examine(memory.as_fd()).is_some_and(|memory| memory.readable && !memory.cached));
        let leftover = dir.path().join(".nfs000000000001");
        std::fs::rename(&path, &leftover).unwrap();
        assert!(is_removed(file.as_fd()), "as NFS names it");
        std::fs::rename(&leftover, &path).unwrap();
        assert!(!is_removed(file.as_fd()));
        std::fs::remove_file(&path).unwrap();
        assert!(is_removed(file.as_fd()));
        let removed = examine(file.as_fd()).map(|removed| Examined { changed_unix_ns, ..removed });
        assert_eq!(removed, Some(expected), "a removed file keeps its last name");
        let misleading = dir.path().canonicalize().unwrap().join("f (deleted)");
        let there = File::create_new(&misleading).unwrap();
        assert_eq!(examine(there.as_fd()).unwrap().path, misleading, "a name that only looks so");
        assert!(!is_eventfd(&file) && !is_eventfd(&pipe));
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        assert!(is_eventfd(&event) && examine(event.as_fd()).is_none());
    }
}
