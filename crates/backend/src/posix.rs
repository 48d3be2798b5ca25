//! A folder of any file system that this machine has mounted.
//!
//! Every call acts as its caller ([`identity`]), so that the file system itself checks the caller's rights, and no call
//! follows a symbolic link or leaves the folder: names are opened one at a time, below directories that are open.
//!
//! What is special here:
//! - Nodes on another file system that is mounted below the folder are `EXDEV`.
//! - A file that a caller has opened stays open for that caller until it is idle for [`Options::idle`]; rights that are
//!   withdrawn through the tree count at once, others' changes by then. The owner of a file reads and writes it whatever
//!   its mode, and who may execute it may read it, as a server that sees no opens must allow (RFC 1813, 4.4).
//! - A removed file is `ESTALE` at once when its last name is removed through this tree, unless it is
//!   [held](crate::Backend::hold); when another program removed it, by the time it is idle.

mod calls;
mod data;
mod handles;
mod identity;
mod io;
mod metadata;
mod paging;
mod placement;
mod region;
mod ring;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use impresario_base::lock::Mutex;
use impresario_base::machine::{EXT4_MAGIC, OVERLAY_MAGIC, XFS_MAGIC, is_in_memory, path_of};
use impresario_device::device_limits;
use impresario_layout::Layout;
use rustix::fs::{Mode, OFlags, ResolveFlags, Statx, StatxFlags};

use crate::callers::Callers;
use crate::idle::IdleThread;
use crate::losses::Losses;
use crate::nodes::{self, Descriptors};
use crate::{Attr, Errno, Handle, Result};
use handles::{Born, Found, Key, Table};
use identity::Identity;
pub use io::{Calls, IoStatus};
use io::{Io, OpenFile};
use paging::Paging;
pub use ring::RingStatus;

/// Opens a node without the right to read or write it.
const NAMING: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// How a folder is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// Descriptors open at a time, about; `None`: half of what the process may have.
    pub descriptors_max: Option<usize>,
    /// Descriptors are closed when they were not used for that long.
    pub idle: Duration,
    /// Nodes that are remembered by name where the file system gives no permanent handles.
    pub table_max: usize,
    /// How files are striped over data servers, where the file system does not tell.
    pub striping: Option<Layout>,
    /// Data servers, where the file system tells of stripes but not whose they are.
    pub data_servers: u16,
    /// Which calls move the bytes of files.
    pub calls: Calls,
    /// Files are read and written past the page cache, where the file system can.
    pub direct: bool,
    /// How long a read through io_uring may take; then it is `EIO`.
    pub patience: Duration,
    /// Use the table for handles even where the kernel gives permanent ones. For tests.
    pub table_only: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            descriptors_max: None,
            idle: Duration::from_secs(10),
            table_max: 262_144,
            striping: None,
            data_servers: 1,
            calls: Calls::Auto,
            direct: false,
            patience: Duration::from_secs(60),
            table_only: false,
        }
    }
}

/// Why a folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It cannot be opened.
    #[error("cannot open the folder {}: {source}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The process cannot reopen its descriptors.
    #[error("cannot use /proc/self/fd: {source}; mount /proc where the server runs")]
    Proc {
        /// Why.
        source: std::io::Error,
    },
    /// The process cannot learn who it is.
    #[error("cannot read the process's own groups and capabilities: {0}")]
    Identity(Errno),
    /// No thread that closes idle descriptors.
    #[error("cannot start a thread: {0}; raise the limit (ulimit -u)")]
    Thread(std::io::Error),
}

/// A folder as a backend.
pub struct PosixTree {
    /// Before the rest, which its thread uses.
    _idle: IdleThread,
    shared: Arc<Shared>,
}

/// The descriptors of the kernel; one that names a node is `O_PATH`.
struct Files;

type Node = nodes::Node<Files>;
type Open = nodes::Open<Files>;

impl Descriptors for Files {
    type Name = OwnedFd;
    type Open = OpenFile;

    const KEEPS_NAMES: bool = true;

    fn sync(open: &OpenFile) -> Result<()> {
        Ok(rustix::io::retry_on_intr(|| rustix::fs::fsync(open))?)
    }

    /// What is written back the next sync of the file, or of all, makes durable, and the kernel says here if some of it failed. An
    /// fsync of every file that was written would cost a flush of the device each, which nobody asked for.
    fn settle(open: &OpenFile) -> Result<()> {
        let sync = || {
            let synced = rustix::io::retry_on_intr(|| rustix::fs::fsync(open));
            synced.map_err(data::read_only_lost)
        };
        match rustix::fs::fstatfs(open).map(|fs| fs.f_type as u64) {
            // Others, as btrfs and ZFS, write back in other ways.
            Ok(EXT4_MAGIC | XFS_MAGIC) if syncfs_tells_all() => {}
            _ => return sync(),
        }
        let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: a descriptor that is open, and numbers.
        match unsafe { libc::sync_file_range(open.as_fd().as_raw_fd(), 0, 0, all) } {
            0 => Ok(()),
            _ => match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOSYS | libc::EPERM | libc::EINTR) => sync(),
                error => Err(data::read_only_lost(rustix::io::Errno::from_raw_os_error(error.unwrap_or(libc::EIO)))),
            },
        }
    }

    fn is_removed(fd: &OwnedFd) -> bool {
        rustix::fs::fstat(fd).is_ok_and(|stat| stat.st_nlink == 0)
    }
}

/// Whether syncfs fails where the file system could not sync: from Linux 5.17 on.
fn syncfs_tells_all() -> bool {
    static TELLS: LazyLock<bool> =
        LazyLock::new(|| is_from(&rustix::system::uname().release().to_string_lossy(), (5, 17)));
    *TELLS
}

/// Whether a release of Linux, as `6.1.0-18-amd64`, is this one or newer.
fn is_from(release: &str, least: (u32, u32)) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= least
}

/// What the calls share.
struct Shared {
    /// The folder, open for reading: handles are opened by it.
    folder: OwnedFd,
    root: Handle,
    root_id: u64,
    /// Device number of the file system and what tells it from others for good.
    device: (u32, u32),
    fsid: u64,
    identity: Identity,
    key: Option<Key>,
    table: Table,
    nodes: nodes::Nodes<Files>,
    losses: Arc<Losses>,
    callers: Callers,
    /// What the process's mask takes from the mode of new nodes.
    umask: u32,
    placements: placement::Source,
    /// Files live in memory alone: there is nothing to read them ahead from.
    in_memory: bool,
    /// Its files have the pages of others.
    is_overlay: bool,
    io: Io,
    paging: Paging,
    /// Numbers of the files that threads wait for others to give up their leases of.
    lease_waits: Mutex<Vec<u64>>,
    /// The kernel cuts longer advice.
    advice_max_bytes: u64,
    options: Options,
}

/// A node that was just opened or looked at.
struct Seen {
    attr: Attr,
    born: Born,
    device: (u32, u32),
}

impl PosixTree {
    /// Serves a folder.
    pub fn open(folder: &Path, options: Options) -> std::result::Result<PosixTree, OpenError> {
        let shared = Arc::new(Shared::open(folder, options)?);
        let idle = IdleThread::start("tree idle", shared.options.idle, {
            let shared = shared.clone();
            move || shared.nodes.close_idle(shared.options.idle)
        });
        Ok(PosixTree { _idle: idle.map_err(OpenError::Thread)?, shared })
    }

    /// Whether handles outlive a restart of the server; else they are `ESTALE` after it until they are looked up again.
    pub fn has_permanent_handles(&self) -> bool {
        self.shared.key.is_some()
    }

    /// Descriptors that are open now.
    pub fn descriptors(&self) -> usize {
        self.shared.nodes.count()
    }

    /// Files of which written bytes were lost since the server started.
    pub fn losses(&self) -> usize {
        self.shared.losses.count()
    }

    /// How the bytes of files are moved.
    pub fn io(&self) -> IoStatus {
        self.shared.io.status()
    }

    /// Begins to close every descriptor that is not in use or held, as idleness would; what was written and not synced, in other
    /// threads.
    pub fn close_all(&self) {
        self.shared.nodes.close_all();
    }
}

impl Shared {
    fn open(folder: &Path, options: Options) -> std::result::Result<Shared, OpenError> {
        let failed = |e: rustix::io::Errno| OpenError::Folder { folder: folder.into(), source: e.into() };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(folder, flags, Mode::empty()).map_err(failed)?;
        rustix::fs::open(path_of(fd.as_fd()), NAMING - OFlags::NOFOLLOW, Mode::empty())
            .map_err(|e| OpenError::Proc { source: e.into() })?;
        let identity = Identity::of_process().map_err(OpenError::Identity)?;
        let statfs = rustix::fs::fstatfs(&fd).map_err(failed)?;
        let stat = statx(fd.as_fd()).map_err(failed)?;
        let device = (stat.stx_dev_major, stat.stx_dev_minor);
        let key = (identity.may_open_by_handle() && !options.table_only).then(|| Key::of_folder(fd.as_fd())).flatten();
        let key = key.filter(|key| handles::kernel_opens(fd.as_fd(), key));
        if key.is_none() {
            tracing::info!(
                folder = %folder.display(),
                "this file system, or the server's rights, give no permanent handles: after a restart of the server \
                 clients that go by handles (NFS) must look their files up again"
            );
        }
        // A file that is open has two past the page cache.
        let each = if options.direct { 2 } else { 1 };
        let descriptors = (options.descriptors_max.unwrap_or_else(descriptors_default) / each).max(16);
        let losses = Arc::new(Losses::default());
        let mut shared = Shared {
            folder: fd,
            root: Handle::new(&[]).unwrap_or(Handle { len_bytes: 0, bytes: [0; crate::HANDLE_MAX_BYTES] }),
            root_id: stat.stx_ino,
            device,
            fsid: fsid_of(&statfs, device),
            identity,
            key,
            table: Table::new(options.table_max),
            nodes: nodes::Nodes::new(descriptors, losses.clone()),
            losses,
            callers: Callers::default(),
            umask: umask(),
            placements: placement::Source::new(statfs.f_type as u64, options.data_servers),
            in_memory: is_in_memory(statfs.f_type as u64),
            is_overlay: statfs.f_type as u64 & 0xffff_ffff == OVERLAY_MAGIC,
            io: Io::new(options.calls, options.direct, options.patience),
            paging: if options.direct { Paging::past() } else { Paging::default() },
            lease_waits: Mutex::default(),
            advice_max_bytes: device_limits(Path::new("/sys"), rustix::fs::makedev(device.0, device.1)).call_bytes,
            options,
        };
        shared.root = shared.handle_of(shared.folder.as_fd(), born(&stat));
        Ok(shared)
    }

    /// The handle of an open node.
    fn handle_of(&self, node: BorrowedFd<'_>, born: Born) -> Handle {
        let by_kernel = self.key.as_ref().and_then(|key| key.handle_of(node));
        by_kernel.unwrap_or_else(|| handles::table_handle(born))
    }

    /// The node of a handle.
    fn node(&self, handle: &Handle) -> Result<Arc<Node>> {
        self.node_below(handle, 0)
    }

    /// The node of a handle, or that it is gone, if it is in use.
    fn known(&self, handle: &Handle) -> Option<Result<Arc<Node>>> {
        const CONFIRMED_MS: u64 = 1000;
        let node = self.nodes.get(handle)?;
        if handles::born(handle).is_some() {
            let now_ms = self.nodes.now_ms();
            if now_ms.saturating_sub(node.confirmed_ms.load(Ordering::Relaxed)) > CONFIRMED_MS {
                node.confirmed_ms.store(now_ms, Ordering::Relaxed);
                self.table.touch(handle);
            }
        }
        Some(if node.is_gone() { Err(Errno(libc::ESTALE)) } else { Ok(node) })
    }

    fn node_below(&self, handle: &Handle, depth: usize) -> Result<Arc<Node>> {
        const DEPTH_MAX: usize = 512;
        if let Some(known) = self.known(handle) {
            return known;
        }
        if *handle == self.root {
            let fd = rustix::fs::open(path_of(self.folder.as_fd()), NAMING - OFlags::NOFOLLOW, Mode::empty())?;
            return Ok(self.nodes.insert(*handle, fd, self.root_id, crate::Kind::Directory));
        }
        let fd = match handles::read(self.key.as_ref(), handle)? {
            Found::ByKernel(kind, bytes) => handles::open(self.folder.as_fd(), kind, bytes)?,
            Found::ByName => {
                if depth > DEPTH_MAX {
                    return Err(Errno(libc::ENAMETOOLONG));
                }
                let (dir, name) = self.table.find(handle)?;
                let dir = self.node_below(&dir, depth + 1)?;
                self.open_name(&dir, &name)
                    .map_err(|e| if e == Errno(libc::ENOENT) { Errno(libc::ESTALE) } else { e })?
            }
        };
        let seen = self.see(fd.as_fd())?;
        if seen.attr.links == 0 || self.handle_of(fd.as_fd(), seen.born) != *handle {
            return Err(Errno(libc::ESTALE));
        }
        if seen.attr.kind == crate::Kind::Directory && !self.is_inside(fd.as_fd())? {
            return Err(Errno(libc::ESTALE));
        }
        Ok(self.nodes.insert(*handle, fd, seen.attr.fileid, seen.attr.kind))
    }

    /// Opens a name of a directory, without the right to read or write it.
    fn open_name(&self, dir: &Node, name: &[u8]) -> Result<OwnedFd> {
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        match rustix::fs::openat2(&dir.fd, name, NAMING, Mode::empty(), resolve) {
            // The kernel is older than 5.6, or a container refuses the call: a name without a slash leads nowhere else.
            Err(rustix::io::Errno::NOSYS | rustix::io::Errno::PERM) => {
                let fd = rustix::fs::openat(&dir.fd, name, NAMING, Mode::empty())?;
                if self.see(fd.as_fd())?.device == self.device { Ok(fd) } else { Err(Errno(libc::EXDEV)) }
            }
            opened => Ok(opened?),
        }
    }

    /// Takes a node of a directory, opened by its name, into use.
    fn enter(&self, dir: &Handle, name: &[u8], fd: OwnedFd) -> Result<(Arc<Node>, Attr)> {
        let seen = self.see(fd.as_fd())?;
        let handle = self.handle_of(fd.as_fd(), seen.born);
        if handles::born(&handle).is_some() && handle != self.root {
            self.table.note(handle, *dir, name);
        }
        // Where a node's birth is not known, a new one may have the number, and so the handle, of one that others have removed. One that
        // is held stays what its handle names.
        if handles::born(&handle).is_some_and(|born| born.at_ns == 0)
            && let Some(known) = self.nodes.get(&handle)
            && statx(known.fd.as_fd()).map_or(0, |stat| stat.stx_nlink) == 0
        {
            self.nodes.set_node_gone(&known);
        }
        Ok((self.nodes.insert(handle, fd, seen.attr.fileid, seen.attr.kind), seen.attr))
    }

    /// What the file system says of an open node.
    fn see(&self, node: BorrowedFd<'_>) -> Result<Seen> {
        let stat = statx(node)?;
        let attr = metadata::attr_of(&stat, self.fsid)?;
        Ok(Seen { attr, born: born(&stat), device: (stat.stx_dev_major, stat.stx_dev_minor) })
    }

    /// Whether an open directory lies in the folder.
    fn is_inside(&self, dir: BorrowedFd<'_>) -> Result<bool> {
        let path = |fd| rustix::fs::readlink(path_of(fd), Vec::new()).map(std::ffi::CString::into_bytes);
        if let (Ok(folder), Ok(dir)) = (path(self.folder.as_fd()), path(dir)) {
            let rest = dir.strip_prefix(if folder == b"/" { [].as_slice() } else { folder.as_slice() });
            return Ok(rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/'));
        }
        // Too long a path for /proc: up step by step.
        let mut at = rustix::fs::openat(dir, "..", NAMING | OFlags::DIRECTORY, Mode::empty())?;
        let number = |fd: &OwnedFd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
        let folder = number(&self.folder)?;
        let mut last = None;
        loop {
            let here = number(&at)?;
            if here == folder || last == Some(here) {
                return Ok(here == folder);
            }
            last = Some(here);
            at = rustix::fs::openat(&at, "..", NAMING | OFlags::DIRECTORY, Mode::empty())?;
        }
    }
}

fn statx(node: BorrowedFd<'_>) -> rustix::io::Result<Statx> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    rustix::fs::statx(node, "", rustix::fs::AtFlags::EMPTY_PATH, wanted)
}

fn born(stat: &Statx) -> Born {
    let known = stat.stx_mask & StatxFlags::BTIME.bits() != 0;
    let ns = stat.stx_btime.tv_sec.wrapping_mul(1_000_000_000).wrapping_add(stat.stx_btime.tv_nsec.into());
    Born { fileid: stat.stx_ino, at_ns: if known { ns as u64 } else { 0 } }
}

/// What the file system calls itself, which survives restarts; its device number where it says nothing.
fn fsid_of(statfs: &rustix::fs::StatFs, device: (u32, u32)) -> u64 {
    // SAFETY: both are two 32-bit numbers; the C library hides them in a structure of its own.
    let parts: [i32; 2] = unsafe { std::mem::transmute(statfs.f_fsid) };
    let fsid = u64::from(parts[0] as u32) << 32 | u64::from(parts[1] as u32);
    if fsid != 0 { fsid } else { u64::from(device.0) << 32 | u64::from(device.1) }
}

/// The process's file mode creation mask; asked of /proc, because umask(2) can only be asked by changing it.
fn umask() -> u32 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("Umask:"));
    mask.and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok()).unwrap_or(0o022)
}

fn descriptors_default() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(65_536);
    (limit as usize / 2).clamp(64, 65_536)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_of_linux_are_told_apart() {
        let newer = ["5.17", "5.17.0-rc1", "5.100.1", "6.1.0-18-amd64"];
        assert!(newer.into_iter().all(|release| is_from(release, (5, 17))));
        let older = ["5.16.20", "5.4.0-216-generic", "4.18.0-553.el8", "3.10", "", "unknown"];
        assert!(!older.into_iter().any(|release| is_from(release, (5, 17))));
    }
}
