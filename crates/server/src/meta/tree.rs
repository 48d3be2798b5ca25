//! Resolution of a path in the name space to a local directory entry, and translation of its attributes.
//!
//! A client's path is checked first, then walked by the kernel with `openat2`: beneath `names/`, through no symbolic
//! link. Operations on the last name are relative to its directory's descriptor.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use impresario_wire::message::{Attr, Device, NodeKind, Time};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::{Errno, Result};

use super::directory::{BENEATH, MetaDirectory};
use super::disk::{DIRECTORY_FLAGS, mtime_of};
use super::fault::{Outcome, fault, show};

/// The kernel takes paths of up to 4095 bytes; longer ones are walked in pieces.
const WALK_MAX_BYTES: usize = 4000;
const NAME_MAX_BYTES: usize = 255;

/// A name in a directory of the name space, which may or may not exist.
pub(super) struct EntryRef<'a> {
    directory: Directory<'a>,
    /// The last name of the path.
    pub(super) name: &'a [u8],
    /// The whole path, for messages and as a hint.
    pub(super) path: &'a [u8],
}

/// The directory of a name that was not there when it was looked for; `None`: the root.
pub struct Absent(Option<OwnedFd>);

impl Absent {
    pub(super) fn of(entry: EntryRef<'_>) -> Absent {
        match entry.directory {
            Directory::Walked(fd) => Absent(Some(fd)),
            Directory::Open(_) => Absent(None),
        }
    }
}

enum Directory<'a> {
    /// The root, or that of another entry.
    Open(BorrowedFd<'a>),
    Walked(OwnedFd),
}

impl EntryRef<'_> {
    /// The directory that holds the name.
    pub(super) fn directory(&self) -> BorrowedFd<'_> {
        match &self.directory {
            Directory::Open(fd) => *fd,
            Directory::Walked(fd) => fd.as_fd(),
        }
    }

    /// The node that the name refers to now.
    pub(super) fn stat(&self) -> Result<Stat> {
        rustix::fs::statat(self.directory(), self.name, AtFlags::SYMLINK_NOFOLLOW)
    }
}

/// Refuses invalid paths: with `.`, `..`, empty or overlong names, or NUL.
pub(super) fn check_path(path: &[u8]) -> Outcome<()> {
    if path.is_empty() {
        return Ok(());
    }
    for name in path.split(|byte| *byte == b'/') {
        let wrong = match name {
            b"" => "has an empty name (a leading, trailing or doubled slash)",
            b"." | b".." => "has a name `.` or `..`; resolve it on the client",
            _ if name.len() > NAME_MAX_BYTES => {
                return Err(fault(Errno::NAMETOOLONG, format!("path {} has a name longer than 255 bytes", show(path))));
            }
            _ if name.contains(&0) => "has a NUL byte",
            _ => continue,
        };
        return Err(fault(Errno::INVAL, format!("path {} {wrong}", show(path))));
    }
    Ok(())
}

/// Directory and last name of a checked path; `None` for the root.
pub(super) fn split(path: &[u8]) -> Option<(&[u8], &[u8])> {
    if path.is_empty() {
        return None;
    }
    Some(match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (path.get(..slash)?, path.get(slash + 1..)?),
        None => (&[], path),
    })
}

impl MetaDirectory {
    /// Walks a checked path and opens its node.
    pub(super) fn walk(&self, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        let mut at: Option<OwnedFd> = None;
        let mut rest = path;
        let names = self.names.as_fd();
        while let Some(slash) =
            rest.get(..WALK_MAX_BYTES).and_then(|piece| piece.iter().rposition(|byte| *byte == b'/'))
        {
            let (piece, beyond) = rest.split_at(slash);
            at = Some(self.step_into(at.as_ref().map_or(names, OwnedFd::as_fd), piece, DIRECTORY_FLAGS)?);
            rest = beyond.get(1..).unwrap_or_default();
        }
        self.step_into(at.as_ref().map_or(names, OwnedFd::as_fd), if rest.is_empty() { b"." } else { rest }, flags)
    }

    /// Opens the node of an entry, or the root.
    pub(super) fn open_at(&self, entry: Option<&EntryRef<'_>>, flags: OFlags) -> Result<OwnedFd> {
        let (directory, name) = entry.map_or((self.names.as_fd(), &b"."[..]), |entry| (entry.directory(), entry.name));
        self.step_into(directory, name, flags)
    }

    fn step_into(&self, at: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd> {
        let open = || rustix::fs::openat2(at, path, flags, Mode::empty(), BENEATH);
        for _ in 0..100 {
            match open() {
                // A concurrent rename can make the kernel request another try, or move the node out of the name space
                // at that moment (to `orphans/`).
                Err(Errno::AGAIN | Errno::INTR | Errno::XDEV) => std::thread::yield_now(),
                other => return other,
            }
        }
        open()
    }

    /// The entry of a checked path; `None` for the root.
    pub(super) fn entry<'a>(&'a self, path: &'a [u8]) -> Result<Option<EntryRef<'a>>> {
        let Some((directory, name)) = split(path) else { return Ok(None) };
        let directory = match directory {
            b"" => Directory::Open(self.names.as_fd()),
            _ => Directory::Walked(self.walk(directory, DIRECTORY_FLAGS)?),
        };
        Ok(Some(EntryRef { directory, name, path }))
    }

    /// The same of a path whose directory was found before.
    pub(super) fn entry_in<'a>(&'a self, absent: &'a Absent, path: &'a [u8]) -> Option<EntryRef<'a>> {
        let (_, name) = split(path)?;
        let directory = Directory::Open(absent.0.as_ref().unwrap_or(&self.names).as_fd());
        Some(EntryRef { directory, name, path })
    }

    /// The same of another path, which often is in the same directory.
    pub(super) fn entry_beside<'a>(&'a self, one: &'a EntryRef<'_>, path: &'a [u8]) -> Result<Option<EntryRef<'a>>> {
        match (split(one.path), split(path)) {
            (Some((directory, _)), Some((same, name))) if directory == same => {
                Ok(Some(EntryRef { directory: Directory::Open(one.directory()), name, path }))
            }
            _ => self.entry(path),
        }
    }

    /// Opens a directory by path for reading, whatever its permission bits say.
    pub(super) fn open_dir_by_path(&self, path: &[u8]) -> Result<OwnedFd> {
        self.open_dir_by(|flags| self.walk(path, flags))
    }

    /// The same of an entry, or the root.
    pub(super) fn open_dir_at(&self, entry: Option<&EntryRef<'_>>) -> Result<OwnedFd> {
        self.open_dir_by(|flags| self.open_at(entry, flags))
    }

    fn open_dir_by(&self, open: impl Fn(OFlags) -> Result<OwnedFd>) -> Result<OwnedFd> {
        match open(OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC) {
            Err(Errno::ACCESS) if !self.disk.root => self.disk.open_dir(open(DIRECTORY_FLAGS)?),
            other => other,
        }
    }
}

/// The kind of a node; `None` for one that Linux does not know.
pub(super) fn kind_of(stat: &Stat) -> Option<NodeKind> {
    let device = || Device { major: rustix::fs::major(stat.st_rdev), minor: rustix::fs::minor(stat.st_rdev) };
    Some(match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => NodeKind::File,
        FileType::Directory => NodeKind::Dir,
        FileType::Symlink => NodeKind::Symlink,
        FileType::Fifo => NodeKind::Fifo,
        FileType::Socket => NodeKind::Socket,
        FileType::CharacterDevice => NodeKind::Character(device()),
        FileType::BlockDevice => NodeKind::Block(device()),
        FileType::Unknown => return None,
    })
}

/// Storage of a file that has no holes: what a file without a note of it is taken to use.
pub(super) fn full_bytes(size: u64) -> u64 {
    size.checked_next_multiple_of(4096).unwrap_or(u64::MAX)
}

/// The file's record tells what it uses ([`super::record::Seen::used_bytes`]). So that most records need not be read, the
/// local file of such a file has a block of its own, and others have none.
pub(super) fn has_used_bytes(stat: &Stat) -> bool {
    stat.st_blocks > 0 && FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

/// Attributes as the local file system has them; of a file with [`has_used_bytes`] it does not have the storage used.
pub(super) fn local_attr(stat: &Stat) -> Result<Attr> {
    let kind = kind_of(stat).ok_or(Errno::OPNOTSUPP)?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    Ok(Attr {
        ino: stat.st_ino,
        kind,
        mode: stat.st_mode & 0o7777,
        nlink: u32::try_from(stat.st_nlink).unwrap_or(u32::MAX),
        uid: stat.st_uid,
        gid: stat.st_gid,
        size,
        used_bytes: match kind {
            NodeKind::File => full_bytes(size),
            _ => u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        },
        atime: Time { secs: stat.st_atime, nanos: stat.st_atime_nsec as u32 },
        mtime: mtime_of(stat),
        ctime: Time { secs: stat.st_ctime, nanos: stat.st_ctime_nsec as u32 },
        // `labels` says otherwise where there may be any.
        labelled: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::meta::disk::PATH_FLAGS;

    #[test]
    fn paths_that_no_walk_may_take() {
        for good in [&b""[..], b"a", b"a/b c/\xff", &[b'x'; 255]] {
            check_path(good).unwrap();
        }
        for (bad, errno) in [
            (&b"/a"[..], 22),
            (b"a/", 22),
            (b"a//b", 22),
            (b"..", 22),
            (b"a/../b", 22),
            (b"a/.", 22),
            (b"a\0b", 22),
            (&[b'x'; 256], 36),
        ] {
            assert_eq!(check_path(bad).unwrap_err().errno, errno, "{}", show(bad));
        }
    }

    #[test]
    fn splitting() {
        assert_eq!(split(b""), None);
        assert_eq!(split(b"a"), Some((&b""[..], &b"a"[..])));
        assert_eq!(split(b"a/b/c"), Some((&b"a/b"[..], &b"c"[..])));
    }

    #[test]
    fn deep_paths_are_walked_in_pieces() {
        let tmp = tempfile::tempdir().unwrap();
        super::super::make(tmp.path(), impresario_wire::ClusterId(1), &Default::default()).unwrap();
        let dir = MetaDirectory::open(tmp.path(), None).unwrap();
        let name = [b'd'; 200];
        let mut path = Vec::new();
        for _ in 0..60 {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(name);
            let deeper = path.clone();
            let entry = dir.entry(&deeper).unwrap().unwrap();
            rustix::fs::mkdirat(entry.directory(), entry.name, Mode::RWXU).unwrap();
        }
        assert!(path.len() > 12_000);
        let found = dir.walk(&path, PATH_FLAGS).unwrap();
        assert_eq!(kind_of(&rustix::fs::fstat(found).unwrap()), Some(NodeKind::Dir));
        path.extend(b"/nothing");
        assert_eq!(dir.walk(&path, PATH_FLAGS).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn no_path_leaves_the_name_space() {
        let tmp = tempfile::tempdir().unwrap();
        super::super::make(tmp.path(), impresario_wire::ClusterId(1), &Default::default()).unwrap();
        let dir = MetaDirectory::open(tmp.path(), None).unwrap();
        std::os::unix::fs::symlink("/etc", tmp.path().join("names/out")).unwrap();
        std::os::unix::fs::symlink("..", tmp.path().join("names/up")).unwrap();
        for path in [&b"out/passwd"[..], b"up/keys"] {
            assert_eq!(dir.walk(path, PATH_FLAGS).unwrap_err(), Errno::LOOP);
            assert_eq!(dir.entry(path).err(), Some(Errno::LOOP));
        }
        assert_eq!(dir.entry(b"out").unwrap().unwrap().stat().map(|s| kind_of(&s)), Ok(Some(NodeKind::Symlink)));
        assert_eq!(dir.walk(b"../keys", PATH_FLAGS).unwrap_err(), Errno::XDEV, "the kernel refuses it by itself");
    }
}
