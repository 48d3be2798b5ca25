//! Every change that the metadata server makes to its local file system, one method each.
//!
//! They go through one place so that a test can stop the server before any of them ([`StepHook`]) and so
//! that it can be seen at a glance what is ever changed.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use impresario_wire::message::{SetTime, Time};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, RenameFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid, XattrFlags,
};
use rustix::io::{Errno, Result};

use super::lock;

/// Called with the name of a step before it changes anything; tests stop the server there.
pub type StepHook = Arc<dyn Fn(&'static str) + Send + Sync>;

/// The local file system, to write to.
pub(super) struct Disk {
    hook: Option<StepHook>,
    /// May change owners and is not held up by permission bits.
    pub(super) root: bool,
    /// Changes of metadata become durable in the order in which they were made, so that what must not be
    /// overtaken needs no fsync of its own. True of the journals of ext4 and XFS, and (trivially) of tmpfs.
    pub(super) ordered: bool,
    /// Held while permission bits are widened for a moment.
    widening: Mutex<()>,
}

const EXT4_MAGIC: i64 = 0xef53;
const XFS_MAGIC: i64 = 0x5846_5342;
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// How a file of the name space is opened: never through a link, never waiting for the other end of a pipe.
const FILE_FLAGS: OFlags = OFlags::RDWR.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

impl Disk {
    pub(super) fn new(folder: impl AsFd, hook: Option<StepHook>) -> Result<Disk> {
        #[allow(clippy::unnecessary_cast, reason = "its width differs between architectures")]
        let magic = rustix::fs::fstatfs(folder)?.f_type as i64;
        let ordered = [EXT4_MAGIC, XFS_MAGIC, TMPFS_MAGIC].contains(&magic);
        Ok(Disk { hook, root: rustix::process::geteuid().is_root(), ordered, widening: Mutex::new(()) })
    }

    fn step(&self, name: &'static str) {
        if let Some(hook) = &self.hook {
            hook(name);
        }
    }

    /// Makes an empty file, private to the server, open for reading and writing.
    pub(super) fn make_file(&self, folder: impl AsFd, name: &str) -> Result<OwnedFd> {
        self.step("make_file");
        rustix::fs::openat(folder, name, FILE_FLAGS | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)
    }

    pub(super) fn make_dir(&self, folder: impl AsFd, name: &str) -> Result<()> {
        self.step("make_dir");
        rustix::fs::mkdirat(folder, name, Mode::RWXU)
    }

    pub(super) fn make_symlink(&self, target: &[u8], folder: impl AsFd, name: &str) -> Result<()> {
        self.step("make_symlink");
        rustix::fs::symlinkat(target, folder, name)
    }

    /// Gives a name's node a second name.
    pub(super) fn link(&self, from: impl AsFd, name: &[u8], to: impl AsFd, new_name: &[u8]) -> Result<()> {
        self.step("link");
        rustix::fs::linkat(from, name, to, new_name, AtFlags::empty())
    }

    /// Gives an open file another name.
    pub(super) fn link_open(&self, file: impl AsFd, to: impl AsFd, new_name: &str) -> Result<()> {
        self.step("link_open");
        rustix::fs::linkat(CWD, proc_path(file), to, new_name, AtFlags::SYMLINK_FOLLOW)
    }

    pub(super) fn unlink(&self, folder: impl AsFd, name: &[u8]) -> Result<()> {
        self.step("unlink");
        rustix::fs::unlinkat(folder, name, AtFlags::empty())
    }

    pub(super) fn remove_dir(&self, folder: impl AsFd, name: &[u8]) -> Result<()> {
        self.step("remove_dir");
        rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR)
    }

    pub(super) fn rename(
        &self,
        from: impl AsFd,
        name: &[u8],
        to: impl AsFd,
        new_name: &[u8],
        no_replace: bool,
    ) -> Result<()> {
        self.step("rename");
        let flags = if no_replace { RenameFlags::NOREPLACE } else { RenameFlags::empty() };
        rustix::fs::renameat_with(from, name, to, new_name, flags)
    }

    pub(super) fn set_attribute(&self, node: impl AsFd, name: &str, value: &[u8]) -> Result<()> {
        self.step("set_attribute");
        let set = || rustix::fs::fsetxattr(node.as_fd(), name, value, XattrFlags::empty());
        // Attributes ask for the bits of the moment, not for those at the open.
        match set() {
            Err(Errno::ACCESS) if !self.root => self.widened(node.as_fd(), 0o600, set),
            other => other,
        }
    }

    pub(super) fn remove_attribute(&self, node: impl AsFd, name: &str) -> Result<()> {
        self.step("remove_attribute");
        match rustix::fs::fremovexattr(node, name) {
            Err(Errno::NODATA) => Ok(()),
            other => other,
        }
    }

    pub(super) fn set_len(&self, file: impl AsFd, len_bytes: u64) -> Result<()> {
        self.step("set_len");
        rustix::fs::ftruncate(file, len_bytes)
    }

    /// Sets the times of a node that may be open as a mere place (`O_PATH`).
    pub(super) fn set_times(&self, node: impl AsFd, atime: Option<SetTime>, mtime: Option<SetTime>) -> Result<()> {
        self.step("set_times");
        let times = Timestamps { last_access: timespec(atime)?, last_modification: timespec(mtime)? };
        rustix::fs::utimensat(node, "", &times, AtFlags::EMPTY_PATH)
    }

    /// Sets the owner of a node that may be open as a mere place.
    pub(super) fn set_owner(&self, node: impl AsFd, uid: Option<u32>, gid: Option<u32>) -> Result<()> {
        // The kernel takes this number for "leave it".
        if uid == Some(u32::MAX) || gid == Some(u32::MAX) {
            return Err(Errno::INVAL);
        }
        self.step("set_owner");
        let flags = AtFlags::EMPTY_PATH;
        rustix::fs::chownat(node, "", uid.map(Uid::from_raw), gid.map(Gid::from_raw), flags)
    }

    /// Sets the permission bits of a node that may be open as a mere place.
    pub(super) fn set_mode(&self, node: impl AsFd, mode: u32) -> Result<()> {
        self.step("set_mode");
        let _alone = (!self.root).then(|| lock(&self.widening));
        rustix::fs::chmod(proc_path(node), Mode::from_raw_mode(mode & 0o7777))
    }

    pub(super) fn sync(&self, node: impl AsFd) -> Result<()> {
        self.step("sync");
        rustix::fs::fsync(node)
    }

    pub(super) fn sync_file_system(&self, node: impl AsFd) -> Result<()> {
        self.step("sync_file_system");
        rustix::fs::syncfs(node)
    }

    /// Opens a file for reading and writing, whatever its permission bits say.
    pub(super) fn open_file(&self, folder: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
        match rustix::fs::openat(folder.as_fd(), name, FILE_FLAGS, Mode::empty()) {
            Err(Errno::ACCESS) if !self.root => {
                let place = rustix::fs::openat(folder, name, PLACE_FLAGS, Mode::empty())?;
                let path = proc_path(&place);
                // Through the link in /proc, which is the one to follow.
                let open = || rustix::fs::openat(CWD, &path, FILE_FLAGS.difference(OFlags::NOFOLLOW), Mode::empty());
                self.widened(&place, 0o600, open)
            }
            other => other,
        }
    }

    /// A folder of the server's own, by its name.
    pub(super) fn open_dir_in(&self, folder: impl AsFd, name: &str) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::openat(folder, name, flags, Mode::empty())
    }

    /// Reads an attribute of a node that may be open as a mere place; gives its length.
    pub(super) fn attribute(&self, node: impl AsFd, name: &str, value: &mut [u8]) -> Result<usize> {
        let path = proc_path(node.as_fd());
        let mut get = || match rustix::fs::fgetxattr(node.as_fd(), name, &mut *value) {
            Err(Errno::BADF) => rustix::fs::getxattr(&path, name, &mut *value),
            other => other,
        };
        match get() {
            Err(Errno::ACCESS) if !self.root => self.widened(node.as_fd(), 0o400, get),
            other => other,
        }
    }

    /// Opens a folder for reading, given as a place, whatever its permission bits say.
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

    /// Without root's rights, permission bits hold up the owner too. They are widened for one system call; a
    /// crash just then leaves them widened, which is why this is the exception.
    fn widened<T>(&self, node: impl AsFd, bits: u32, act: impl FnOnce() -> Result<T>) -> Result<T> {
        let _alone = lock(&self.widening);
        let path = proc_path(node.as_fd());
        let mode = rustix::fs::fstat(node)?.st_mode & 0o7777;
        self.step("widen");
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode | bits))?;
        let result = act();
        self.step("narrow");
        rustix::fs::chmod(&path, Mode::from_raw_mode(mode))?;
        result
    }
}

/// How a node is opened that is only to be looked at or to be named from.
pub(super) const PLACE_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// How a folder is opened that is only to be named from. Unlike with [`PLACE_FLAGS`], a symbolic link in its place is
/// told as one.
pub(super) const FOLDER_FLAGS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The path by which the kernel finds what a descriptor stands for.
fn proc_path(node: impl AsFd) -> String {
    format!("/proc/self/fd/{}", node.as_fd().as_raw_fd())
}

fn timespec(time: Option<SetTime>) -> Result<Timespec> {
    Ok(match time {
        None => Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: UTIME_NOW },
        Some(SetTime::At(Time { nanos: 1_000_000_000.., .. })) => return Err(Errno::INVAL),
        Some(SetTime::At(Time { secs, nanos })) => Timespec { tv_sec: secs, tv_nsec: nanos.into() },
    })
}

/// The last modification, as the local file system has it.
pub(super) fn mtime_of(stat: &Stat) -> Time {
    Time { secs: stat.st_mtime, nanos: stat.st_mtime_nsec as u32 }
}
