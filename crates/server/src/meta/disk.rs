//! Every change that the metadata server makes to its local file system, one method each.
//!
//! All changes pass through this file, so that a test can stop the server before any of them, have it fail, or leave out a
//! sync ([`StepHook`]), and a reader sees the full list.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, RwLockReadGuard, RwLockWriteGuard};

use impresario_base::lock::{Mutex, RwLock};
use impresario_base::machine::{EXT4_MAGIC, TMPFS_MAGIC, XFS_MAGIC, path_of};
use impresario_wire::message::{SetTime, Time};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, UTIME_NOW,
    UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::{Errno, Result};
use rustix::path::Arg;

use super::synced::Synced;

/// Called with the name of a step before the step changes anything; tests stop the server there, or say what becomes of it.
pub type StepHook = Arc<dyn Fn(&'static str) -> Fate + Send + Sync>;

/// What becomes of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It is done.
    Done,
    /// Of a sync: it is left out.
    LeftOut,
    /// It fails with this number and changes nothing.
    Fails(i32),
}

/// The local file system, for writing.
pub(super) struct Disk {
    hook: Option<StepHook>,
    /// The server runs as root: it may change owners, and permission bits do not block it.
    pub(super) root: bool,
    /// The file system makes metadata changes durable in the order in which they were made, so that ordering needs no
    /// fsync. True of the journals of ext4 and XFS, and (trivially) of tmpfs.
    pub(super) ordered: bool,
    /// Held while permission bits, owners or access control lists are set, or looked at and changed.
    pub(super) modes: Mutex<()>,
    /// Held while permission bits are temporarily widened.
    widening: Mutex<()>,
    /// See [`Disk::without_specials`].
    specials: RwLock<()>,
    synced: Synced,
}

/// Flags for opening the file `changes`.
const CHANGES_FLAGS: OFlags = OFlags::WRONLY.union(OFlags::APPEND).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);

/// Flags for opening a file of the name space: never through a symbolic link, never waiting for the other end of a
/// pipe.
const FILE_FLAGS: OFlags = OFlags::RDWR.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

impl Disk {
    pub(super) fn new(directory: impl AsFd, hook: Option<StepHook>) -> Result<Disk> {
        #[allow(clippy::unnecessary_cast, reason = "its width differs between architectures")]
        let magic = rustix::fs::fstatfs(directory)?.f_type as u64;
        let ordered = [EXT4_MAGIC, XFS_MAGIC, TMPFS_MAGIC].contains(&magic);
        Ok(Disk {
            hook,
            root: rustix::process::geteuid().is_root(),
            ordered,
            modes: Mutex::new(()),
            widening: Mutex::new(()),
            specials: RwLock::new(()),
            synced: Synced::new(),
        })
    }

    /// Whether the step is to be done.
    fn step(&self, name: &'static str) -> Result<bool> {
        match self.hook.as_ref().map_or(Fate::Done, |hook| hook(name)) {
            Fate::Done => Ok(true),
            Fate::LeftOut => Ok(false),
            Fate::Fails(errno) => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// Changes names in a directory, or attributes of a node.
    fn changes<T>(&self, node: impl AsFd, change: impl FnOnce() -> Result<T>) -> Result<T> {
        let done = change();
        self.synced.changed(node);
        done
    }

    /// Changes names in two directories.
    fn moves<A: AsFd, B: AsFd>(&self, from: A, to: B, change: impl FnOnce(&A, &B) -> Result<()>) -> Result<()> {
        self.changes(&from, || self.changes(&to, || change(&from, &to)))
    }

    /// Replaces a small file as a whole and makes it durable.
    pub(super) fn write_durably(&self, top: impl AsFd, name: &str, text: &str) -> Result<()> {
        self.step("write_small_file")?;
        let new = format!("{name}.new");
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::openat(&top, &new, flags, Mode::RUSR | Mode::WUSR)?;
        if rustix::io::write(&file, text.as_bytes())? != text.len() {
            return Err(Errno::NOSPC);
        }
        self.sync("sync_small_file", &file)?;
        rustix::fs::renameat(&top, &new, &top, name)?;
        self.sync("sync_place_of_small_file", top)
    }

    /// Makes a successor of the file `changes`, open for appending, with room for more up to `room_bytes` if there is any.
    pub(super) fn prepare_changes(&self, top: impl AsFd, notes: &[u8], room_bytes: u64) -> Result<OwnedFd> {
        let prepare = || {
            self.step("prepare_changes")?;
            let file = new_changes(&top, room_bytes)?;
            write_all(&file, notes)?;
            if self.step("sync_new_changes")? {
                rustix::fs::fdatasync(&file)?;
            }
            Ok(file)
        };
        prepare().inspect_err(|_| {
            let _ = rustix::fs::unlinkat(&top, "changes.new", AtFlags::empty()); // it takes space that is wanted
        })
    }

    /// Puts the successor of the file `changes` in its place.
    pub(super) fn replace_changes(&self, top: impl AsFd) -> Result<()> {
        self.step("replace_changes")?;
        rustix::fs::renameat(&top, "changes.new", &top, "changes")?;
        if self.step("sync_place_of_changes")? { rustix::fs::fsync(top) } else { Ok(()) }
    }

    /// Allocates the space of the next successor of the file `changes`, if there is any.
    pub(super) fn reserve_changes(&self, top: impl AsFd, room_bytes: u64) {
        if let Err(error) = new_changes(top, room_bytes) {
            tracing::debug!(%error, "no space is kept for the file `changes`");
        }
    }

    /// Opens the file `changes` as it is.
    pub(super) fn open_changes(&self, top: impl AsFd) -> Result<OwnedFd> {
        rustix::fs::openat(top, "changes", CHANGES_FLAGS, Mode::empty())
    }

    /// Appends to the file `changes`.
    pub(super) fn append_change(&self, file: impl AsFd, note: &[u8]) -> Result<()> {
        self.step("append_change")?;
        write_all(file, note)
    }

    /// Makes what was appended to the file `changes` durable.
    pub(super) fn sync_changes(&self, file: impl AsFd) -> Result<()> {
        if self.step("sync_changes")? { rustix::fs::fdatasync(file) } else { Ok(()) }
    }

    /// Creates an empty file, private to the server, open for reading and writing.
    pub(super) fn make_file(&self, directory: impl AsFd, name: &str) -> Result<OwnedFd> {
        self.step("make_file")?;
        let flags = FILE_FLAGS | OFlags::CREATE | OFlags::EXCL;
        self.changes(&directory, || rustix::fs::openat(&directory, name, flags, Mode::RUSR | Mode::WUSR))
    }

    pub(super) fn make_dir(&self, directory: impl AsFd, name: &str) -> Result<()> {
        self.step("make_dir")?;
        self.changes(&directory, || rustix::fs::mkdirat(&directory, name, Mode::RWXU))?;
        // It may have the inode number of one that is gone.
        match rustix::fs::openat(&directory, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
            Ok(made) => self.synced.changed(made),
            Err(_) => self.synced.forget_all(),
        }
        Ok(())
    }

    pub(super) fn make_symlink(&self, target: &[u8], directory: impl AsFd, name: &str) -> Result<()> {
        self.step("make_symlink")?;
        self.changes(&directory, || rustix::fs::symlinkat(target, &directory, name))
    }

    /// Creates a pipe, a socket or a device.
    pub(super) fn make_node(&self, directory: impl AsFd, name: &str, node: (FileType, u64)) -> Result<()> {
        self.step("make_node")?;
        self.changes(&directory, || rustix::fs::mknodat(&directory, name, node.0, Mode::RUSR | Mode::WUSR, node.1))
    }

    /// Gives the node behind a name a second name.
    pub(super) fn link(&self, from: impl AsFd, name: &[u8], to: impl AsFd, new_name: &[u8]) -> Result<()> {
        self.step("link")?;
        self.changes(&to, || rustix::fs::linkat(from, name, &to, new_name, AtFlags::empty()))
    }

    /// Gives an open file another name.
    pub(super) fn link_open(&self, file: impl AsFd, to: impl AsFd, new_name: &str) -> Result<()> {
        self.step("link_open")?;
        self.changes(&to, || rustix::fs::linkat(CWD, path_of(file), &to, new_name, AtFlags::SYMLINK_FOLLOW))
    }

    pub(super) fn unlink(&self, directory: impl AsFd, name: &[u8]) -> Result<()> {
        self.step("unlink")?;
        self.changes(&directory, || rustix::fs::unlinkat(&directory, name, AtFlags::empty()))
    }

    pub(super) fn remove_dir(&self, directory: impl AsFd, name: &[u8]) -> Result<()> {
        self.step("remove_dir")?;
        self.changes(&directory, || rustix::fs::unlinkat(&directory, name, AtFlags::REMOVEDIR))
    }

    pub(super) fn rename(
        &self,
        from: impl AsFd,
        name: &[u8],
        to: impl AsFd,
        new_name: &[u8],
        no_replace: bool,
    ) -> Result<()> {
        self.step("rename")?;
        let flags = if no_replace { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        self.moves(from, to, |from, to| rustix::fs::renameat_with(from, name, to, new_name, flags))
    }

    /// The same; what had the old name is followed there by a device 0/0, in one step.
    pub(super) fn rename_leaving_whiteout(
        &self,
        from: impl AsFd,
        name: &[u8],
        to: impl AsFd,
        new_name: &[u8],
        no_replace: bool,
    ) -> Result<()> {
        self.step("rename_leaving_whiteout")?;
        let flags = if no_replace { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        let flags = flags | RenameFlags::WHITEOUT;
        self.moves(from, to, |from, to| rustix::fs::renameat_with(from, name, to, new_name, flags))
    }

    pub(super) fn exchange(&self, from: impl AsFd, name: &[u8], to: impl AsFd, other_name: &[u8]) -> Result<()> {
        self.step("exchange")?;
        self.moves(from, to, |from, to| rustix::fs::renameat_with(from, name, to, other_name, RenameFlags::EXCHANGE))
    }

    pub(super) fn set_attribute(&self, node: impl AsFd, name: &str, value: &[u8]) -> Result<()> {
        self.step("set_attribute")?;
        let set = || rustix::fs::fsetxattr(node.as_fd(), name, value, XattrFlags::empty());
        // The kernel checks attribute writes against the current permission bits, not those at open time.
        self.changes(&node, || match set() {
            Err(Errno::ACCESS) if !self.root => self.widened(node.as_fd(), 0o600, set),
            other => other,
        })
    }

    /// Sets an attribute of a user, of a node that may be open with `O_PATH` only.
    pub(super) fn set_xattr(&self, node: impl AsFd, name: &[u8], value: &[u8], flags: XattrFlags) -> Result<()> {
        self.step("set_xattr")?;
        let path = path_of(&node);
        let set = || rustix::fs::setxattr(&path, name, value, flags);
        self.changes(&node, || match set() {
            Err(Errno::ACCESS) if !self.root => self.widened(node.as_fd(), 0o600, set),
            other => other,
        })
    }

    /// Removes an attribute of a user, likewise.
    pub(super) fn remove_xattr(&self, node: impl AsFd, name: &[u8]) -> Result<()> {
        self.step("remove_xattr")?;
        let path = path_of(&node);
        let remove = || rustix::fs::removexattr(&path, name);
        self.changes(&node, || match remove() {
            Err(Errno::ACCESS) if !self.root => self.widened(node.as_fd(), 0o600, remove),
            other => other,
        })
    }

    pub(super) fn remove_attribute(&self, node: impl AsFd, name: &str) -> Result<()> {
        self.step("remove_attribute")?;
        match self.changes(&node, || rustix::fs::fremovexattr(&node, name)) {
            Err(Errno::NODATA) => Ok(()),
            other => other,
        }
    }

    pub(super) fn set_len(&self, file: impl AsFd, len_bytes: u64) -> Result<()> {
        self.step("set_len")?;
        rustix::fs::ftruncate(file, len_bytes)
    }

    /// Gives a file a block of its own, whatever its length, or takes it away; see [`super::tree::has_used_bytes`].
    pub(super) fn set_block(&self, file: impl AsFd, has: bool) -> Result<()> {
        self.step("set_block")?;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let flags = if has { FallocateFlags::KEEP_SIZE } else { punch };
        rustix::fs::fallocate(file, flags, 0, if has { 1 } else { 4096 })
    }

    /// Sets the times of a node, which may be open with `O_PATH` only.
    pub(super) fn set_times(&self, node: impl AsFd, atime: Option<SetTime>, mtime: Option<SetTime>) -> Result<()> {
        self.step("set_times")?;
        let times = Timestamps { last_access: timespec(atime)?, last_modification: timespec(mtime)? };
        self.changes(&node, || rustix::fs::utimensat(&node, "", &times, AtFlags::EMPTY_PATH))
    }

    /// Sets the owner of a node, which may be open with `O_PATH` only.
    pub(super) fn set_owner(&self, node: impl AsFd, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        // The kernel reads this number as "leave it".
        if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
            return Err(Errno::INVAL);
        }
        self.step("set_owner")?;
        let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
        self.changes(&node, || rustix::fs::chownat(&node, "", uid, gid, AtFlags::EMPTY_PATH))
    }

    /// Sets the permission bits of a node, which may be open with `O_PATH` only.
    pub(super) fn set_mode(&self, node: impl AsFd, mode: u32) -> Result<()> {
        self.step("set_mode")?;
        let _alone = (!self.root).then(|| self.widening.lock());
        let mode = Mode::from_raw_mode(mode & 0o7777);
        self.changes(&node, || match rustix::fs::fchmod(&node, mode) {
            Err(Errno::BADF) => rustix::fs::chmod(path_of(&node), mode),
            other => other,
        })
    }

    /// Makes a file, or the names in a directory, durable; `name` is that of the step.
    pub(super) fn sync(&self, name: &'static str, node: impl AsFd) -> Result<()> {
        if self.step(name)? { rustix::fs::fsync(node) } else { Ok(()) }
    }

    /// Makes a directory durable, unless it is: its names, and its attributes.
    pub(super) fn sync_directory(&self, directory: impl AsFd) -> Result<()> {
        self.synced.sync(&directory, || self.sync("sync_directory", &directory))
    }

    pub(super) fn sync_file_system(&self, name: &'static str, node: impl AsFd) -> Result<()> {
        if self.step(name)? { rustix::fs::syncfs(node) } else { Ok(()) }
    }

    /// While the result is held, no pipe, socket or device gets a name: a name that has none keeps away from them. To open
    /// a device would be to open one of this machine.
    pub(super) fn without_specials(&self) -> RwLockReadGuard<'_, ()> {
        self.specials.read()
    }

    /// To be held while a pipe, socket or device gets a name.
    pub(super) fn with_specials(&self) -> RwLockWriteGuard<'_, ()> {
        self.specials.write()
    }

    /// Opens a file for reading and writing, whatever its permission bits say. Opens nothing else.
    pub(super) fn open_file(&self, directory: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
        let still = self.without_specials();
        let stat = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        self.open_known(&still, directory, name, &stat)
    }

    /// The same, of a name that was that of such a node since no pipe, socket or device gets one.
    pub(super) fn open_known(
        &self,
        _still: &RwLockReadGuard<'_, ()>,
        directory: impl AsFd,
        name: &[u8],
        stat: &Stat,
    ) -> Result<OwnedFd> {
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::OPNOTSUPP),
        }
        match rustix::fs::openat(directory.as_fd(), name, FILE_FLAGS, Mode::empty()) {
            Err(Errno::ACCESS) if !self.root => {
                let place = rustix::fs::openat(directory, name, PATH_FLAGS, Mode::empty())?;
                let path = path_of(&place);
                // Through the symbolic link in /proc, the one link to follow.
                let open = || rustix::fs::openat(CWD, &path, FILE_FLAGS.difference(OFlags::NOFOLLOW), Mode::empty());
                self.widened(&place, 0o600, open)
            }
            other => other,
        }
    }

    /// Opens one of the server's own directories by name.
    pub(super) fn open_dir_in(&self, directory: impl AsFd, name: &str) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(directory, name, flags, Mode::empty())
    }

    /// The names of all attributes of a node, which may be open with `O_PATH` only, each with a NUL byte behind it.
    pub(super) fn attributes(&self, node: impl AsFd) -> Result<Vec<u8>> {
        let path = path_of(&node);
        for _ in 0..100 {
            let mut names = vec![0; rustix::fs::listxattr_query(&path)?];
            if names.is_empty() {
                return Ok(names);
            }
            match rustix::fs::listxattr(&path, &mut names) {
                // One was added between the two.
                Err(Errno::RANGE) => {}
                len => {
                    names.truncate(len?);
                    return Ok(names);
                }
            }
        }
        Err(Errno::BUSY)
    }

    /// Reads an attribute of a node, which may be open with `O_PATH` only; returns its length.
    pub(super) fn attribute(&self, node: impl AsFd, name: impl Arg + Copy, value: &mut [u8]) -> Result<usize> {
        let path = path_of(&node);
        let mut get = || match rustix::fs::fgetxattr(node.as_fd(), name, &mut *value) {
            Err(Errno::BADF) => rustix::fs::getxattr(&path, name, &mut *value),
            other => other,
        };
        match get() {
            Err(Errno::ACCESS) if !self.root => self.widened(node.as_fd(), 0o400, get),
            other => other,
        }
    }

    /// Opens for reading a directory given by an `O_PATH` descriptor, whatever its permission bits say.
    pub(super) fn open_dir(&self, place: impl AsFd) -> Result<OwnedFd> {
        let open = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::openat(place.as_fd(), ".", flags, Mode::empty())
        };
        match open() {
            Err(Errno::ACCESS) if !self.root => self.widened(place.as_fd(), 0o500, open),
            other => other,
        }
    }

    /// Without root, permission bits block the owner too. They are widened for one system call. A crash at that instant
    /// leaves them widened, so this is the exception, not the rule.
    fn widened<T>(&self, node: impl AsFd, bits: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let _alone = self.widening.lock();
        let path = path_of(&node);
        let mode = rustix::fs::fstat(node)?.st_mode & 0o7777;
        self.step("widen")?;
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode | bits))?;
        let result = act();
        self.step("narrow")?;
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
        result
    }
}

/// Flags for a node that is only examined or linked from.
pub(super) const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Flags for a directory that only serves as the start of a path. Unlike [`PATH_FLAGS`], a symbolic link in its place
/// is reported as such.
pub(super) const DIRECTORY_FLAGS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The successor of the file `changes`, empty; of one that was reserved, the space stays its own.
fn new_changes(top: impl AsFd, room_bytes: u64) -> Result<OwnedFd> {
    let file = rustix::fs::openat(top, "changes.new", CHANGES_FLAGS | OFlags::CREATE, Mode::RUSR | Mode::WUSR)?;
    if rustix::fs::fstat(&file)?.st_size > 0 {
        rustix::fs::ftruncate(&file, 0)?;
    }
    let _ = rustix::fs::fallocate(&file, FallocateFlags::KEEP_SIZE, 0, room_bytes); // a full disk has none
    Ok(file)
}

fn write_all(file: impl AsFd, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        let written = rustix::io::write(&file, bytes)?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

fn timespec(time: Option<SetTime>) -> Result<Timespec> {
    Ok(match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::At(Time { nanos: 1_000_000_000.., .. })) => return Err(Errno::INVAL),
        Some(SetTime::At(Time { secs, nanos })) => Timespec { tv_sec: secs, tv_nsec: nanos.into() },
    })
}

/// Modification time on the local file system.
pub(super) fn mtime_of(stat: &Stat) -> Time {
    Time { secs: stat.st_mtime, nanos: stat.st_mtime_nsec as u32 }
}
