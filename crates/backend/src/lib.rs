//! What lies behind a server that forwards: file systems under one contract.
//!
//! A [`Backend`] serves calls on nodes (files, directories, links, devices) by their [`Handle`]. Handles are what a
//! client may keep for months: they stay valid over restarts of the server and name no other node later. Calls block
//! the thread that makes them and may be made from many threads at once; who schedules requests decides which thread
//! that is. Every call says on whose behalf it is made; the backend checks that user's rights, not the server's.

mod callers;
pub mod cephfs;
pub mod gluster;
mod idle;
mod loader;
mod losses;
mod nodes;
pub mod posix;
mod rules;
pub mod suite;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

pub use cephfs::CephTree;
pub use gluster::GlusterVolume;
pub use impresario_layout::Layout;
use impresario_layout::Skipped;
pub use posix::PosixTree;

/// Longest handle, bytes: a handle of NFSv3 has 64 (RFC 1813, 2.4), of which servers need some for themselves.
pub const HANDLE_MAX_BYTES: usize = 48;

/// A node's permanent name. Opaque to everyone but the backend that made it; untrusted when it comes from a client.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    len_bytes: u8,
    bytes: [u8; HANDLE_MAX_BYTES],
}

impl Handle {
    /// A handle of these bytes; `None` when they are too many.
    pub fn new(bytes: &[u8]) -> Option<Handle> {
        let mut all = [0; HANDLE_MAX_BYTES];
        all.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(Handle { len_bytes: bytes.len() as u8, bytes: all })
    }

    /// A handle of these bytes, which are few enough.
    pub(crate) fn of<const N: usize>(bytes: &[u8; N]) -> Handle {
        const { assert!(N <= HANDLE_MAX_BYTES) };
        let mut all = [0; HANDLE_MAX_BYTES];
        all[..N].copy_from_slice(bytes);
        Handle { len_bytes: N as u8, bytes: all }
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len_bytes)]
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handle({:02x?})", self.as_bytes())
    }
}

/// On whose behalf a call is made, after squashing.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Caller {
    /// User.
    pub uid: u32,
    /// Group; new files get it unless their directory says otherwise.
    pub gid: u32,
    /// Further groups; at most 16 come with a call of NFSv3 (RFC 5531, appendix A).
    pub groups: Vec<u32>,
}

/// What is done to the space of a range; all of it leaves the bytes around the range alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpaceChange {
    /// Every byte gets storage; the end moves to that of the range if it lies before it, unless `keep_size`.
    Allocate {
        /// The end stays.
        keep_size: bool,
    },
    /// The bytes become zeros without storage; the end stays.
    Punch,
    /// The bytes become zeros and keep or get storage; the end as with `Allocate`.
    Zero {
        /// The end stays.
        keep_size: bool,
    },
}

/// Why a call failed: the number that POSIX gives for it (`ENOENT`, `ESTALE` for a node that is gone, …).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{}", std::io::Error::from_raw_os_error(*.0))]
pub struct Errno(pub i32);

impl From<rustix::io::Errno> for Errno {
    fn from(error: rustix::io::Errno) -> Errno {
        Errno(error.raw_os_error())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// What a call gives, or why it failed.
pub type Result<T> = std::result::Result<T, Errno>;

/// Kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link.
    Symlink,
    /// Block device.
    Block,
    /// Character device.
    Character,
    /// Named pipe.
    Fifo,
    /// Socket.
    Socket,
}

/// What is known of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attr {
    /// Kind.
    pub kind: Kind,
    /// Permissions, with the bits for set-user, set-group and sticky: 0 to 0o7777.
    pub mode: u32,
    /// Hard links.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Length, bytes.
    pub size_bytes: u64,
    /// Space that it takes, bytes.
    pub used_bytes: u64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// File system that it is on: nodes with the same `fsid` and `fileid` are the same node.
    pub fsid: u64,
    /// Number within the file system.
    pub fileid: u64,
    /// Last read, by the backend's clock, as all times here.
    pub atime: SystemTime,
    /// Last change of its contents.
    pub mtime: SystemTime,
    /// Last change of anything.
    pub ctime: SystemTime,
}

/// A node and its attributes.
pub type Found = (Handle, Attr);

/// A time to set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetTime {
    /// The backend's own time.
    Now,
    /// This one.
    To(SystemTime),
}

/// What to change of a node; what is `None` stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permissions, 0 to 0o7777.
    pub mode: Option<u32>,
    /// Permissions that are taken off those that a regular file has; 0: none. `EINVAL` beside `mode` and for other nodes; of no
    /// meaning for what is made.
    pub takes: u32,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length, bytes.
    pub size_bytes: Option<u64>,
    /// Last read.
    pub atime: Option<SetTime>,
    /// Last change of contents.
    pub mtime: Option<SetTime>,
}

/// What to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Make<'a> {
    /// A regular file that must not exist.
    File,
    /// A regular file that may exist and then stays as it is.
    FileIfNone,
    /// A regular file that must not exist, unless it was made with this very verifier: a repeated call then gives the
    /// same file (EXCLUSIVE of NFSv3; RFC 1813, 3.3.8). Attributes are not set.
    FileOnce([u8; 8]),
    /// A directory.
    Directory,
    /// A symbolic link to this text.
    Symlink(&'a [u8]),
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A block device with major and minor number.
    Block(u32, u32),
    /// A character device with major and minor number.
    Character(u32, u32),
}

/// So long [`Backend::sync_all`] waits for syncs and closes that others have begun, and who asks for it: half of what a client
/// waits for an answer, if nothing else is configured.
pub const SYNC_ALL_WAIT: Duration = Duration::from_secs(5);

/// What was lost of the bytes that were written through a server since it started.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lost {
    /// The files of which bytes were lost, in no order, [`Lost::FILES_MAX`] at most; `None`: there are more, so any may be one.
    pub files: Option<Vec<Handle>>,
    /// How often bytes of any file may have been lost, beside those.
    pub any: u64,
}

impl Lost {
    /// Files that are named.
    pub const FILES_MAX: usize = 4096;
}

/// A name in a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Name, without `/` and zero bytes.
    pub name: Vec<u8>,
    /// Number of the node, as in [`Attr::fileid`].
    pub fileid: u64,
    /// Where a listing goes on after this entry; never 0.
    pub cookie: u64,
}

/// Space and numbers of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Space {
    /// All of it, bytes.
    pub total_bytes: u64,
    /// Free, bytes.
    pub free_bytes: u64,
    /// Free for users without privilege, bytes.
    pub available_bytes: u64,
    /// Nodes that it can hold.
    pub total_files: u64,
    /// Nodes that it can still take.
    pub free_files: u64,
    /// Longest name, bytes.
    pub name_max_bytes: u32,
    /// Hard links that a node may have.
    pub links_max: u32,
}

/// Where the bytes of a file lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// How the file is striped over the data servers of [`Placement::servers`], which it counts from 0 in that order.
    pub layout: Layout,
    /// The data servers of the file by their numbers in the file system; [`Layout::servers`] of them, at least one.
    pub servers: Arc<[u32]>,
}

impl Placement {
    /// All on one data server.
    pub fn one(server: u32) -> Placement {
        let layout =
            Layout { base: 0, pcount: 1, ssize_bytes: Layout::SSIZE_MAX_BYTES, servers: 1, skipped: Skipped::NONE };
        Placement { layout, servers: Arc::new([server]) }
    }

    /// Striped over data servers that have the layout's numbers.
    pub fn striped(layout: Layout) -> Placement {
        Placement { layout, servers: (0..u32::from(layout.servers)).collect() }
    }
}

/// A file system that requests end at. See the module for what every call promises.
///
/// Errors: the number that POSIX gives; `ESTALE` for a handle whose node is gone or that this backend did not make,
/// `EACCES` or `EPERM` where the caller lacks the right, `ENAMETOOLONG`, `EXDEV` and the rest as in POSIX. Names with a
/// `/`, a zero byte or no byte at all are `EINVAL`; `.` and `..` are looked up, and not made (`EEXIST`) or removed
/// (`EINVAL`).
pub trait Backend: Send + Sync + 'static {
    /// The directory that everything is below of.
    fn root(&self) -> Result<Handle>;

    /// The node of a name in a directory. `..` of the root is the root.
    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found>;

    /// A node's attributes.
    fn attr(&self, node: &Handle) -> Result<Attr>;

    /// The same as far as this machine knows them; others may have changed them since. Waits for no file system: `None` where one would
    /// have to be asked.
    fn known_attr(&self, _node: &Handle) -> Option<Attr> {
        None
    }

    /// Changes attributes: all of them or, on an error, as few as can be. Gives those after the change.
    fn set_attr(&self, caller: &Caller, node: &Handle, set: &SetAttr) -> Result<Attr>;

    /// Which of the rights `wanted` (a sum of `R_OK`, `W_OK`, `X_OK`) the caller has.
    fn access(&self, caller: &Caller, node: &Handle, wanted: u32) -> Result<u32>;

    /// Makes a node with these attributes; without a mode it is 0o755 for a directory, else 0o644. An owner or a group
    /// that the node has anyway is no change.
    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found>;

    /// A second name for a node that is no directory. Gives the node's attributes.
    fn link(&self, caller: &Caller, node: &Handle, dir: &Handle, name: &[u8]) -> Result<Attr>;

    /// Removes a name of a node that is no directory (`EISDIR`).
    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()>;

    /// Removes an empty directory.
    fn remove_dir(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()>;

    /// Gives a node another name, in place of what has it, in one step.
    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()>;

    /// As [`Backend::rename`] where nothing has the new name; else `EEXIST`. `EINVAL` where the file system cannot do it
    /// in one step.
    fn rename_new(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()>;

    /// Exchanges what two names mean, in one step. `EINVAL` where the file system cannot.
    fn exchange(&self, _caller: &Caller, _one: (&Handle, &[u8]), _other: (&Handle, &[u8])) -> Result<()> {
        Err(Errno(libc::EINVAL))
    }

    /// The text of a symbolic link.
    fn read_link(&self, caller: &Caller, node: &Handle) -> Result<Vec<u8>>;

    /// Names of a directory after `cookie` (0: from its start, with `.` and `..`), at most `most`; and whether these
    /// were the last. What is there all the time is told once, whatever else is made or removed in between.
    fn read_dir(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)>;

    /// Reads into `into` from `offset` on; less than asked only at the file's end. The owner may always read an open
    /// file, whatever its mode says meanwhile.
    fn read(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Result<usize>;

    /// Reads like [`Backend::read`] what is in memory; `None` unless that needs neither the device nor opening the file.
    fn read_cached(&self, _caller: &Caller, _file: &Handle, _offset: u64, _into: &mut [u8]) -> Option<Result<usize>> {
        None
    }

    /// Writes all of `bytes` at `offset`, or fails; what a failed write left is undefined. With `stable` they and the
    /// metadata that reading them needs are on stable storage when the call returns.
    fn write(&self, caller: &Caller, file: &Handle, offset: u64, bytes: &[u8], stable: bool) -> Result<()>;

    /// Changes the space that `len_bytes` of a file from `offset` on take. `EOPNOTSUPP` where the file system cannot.
    fn change_space(
        &self,
        caller: &Caller,
        file: &Handle,
        change: SpaceChange,
        offset: u64,
        len_bytes: u64,
    ) -> Result<()>;

    /// The first byte of a file from `from` on that is data or, where `data` is false, in a hole, of which the end is one.
    /// `None`: there is none, or the file is not that long. A file system that knows of no holes has data up to the end.
    fn seek(&self, caller: &Caller, file: &Handle, from: u64, data: bool) -> Result<Option<u64>>;

    /// Puts what was written to a file, and its metadata, on stable storage; of a directory its names. An error of writing back is told by each
    /// call until the server restarts: bytes that may be lost are never called stable.
    fn sync(&self, file: &Handle) -> Result<()>;

    /// Puts all that was written through this server on stable storage, files that it has closed since too, but for what it says is
    /// lost. `ETIMEDOUT`: not all syncs and closes that were under way have ended. May take as long as the file system does.
    fn sync_all(&self) -> Result<Lost>;

    /// Keeps a node usable by its handle when its last name is removed, as an open does, until as many calls of
    /// [`Backend::release`]. The server's end ends it too. A node that is removed and not held is `ESTALE`, at the latest
    /// some seconds after its last use.
    fn hold(&self, node: &Handle) -> Result<()>;

    /// Ends a [`Backend::hold`].
    fn release(&self, node: &Handle);

    /// Space and limits of the file system that `node` is on.
    fn space(&self, node: &Handle) -> Result<Space>;

    /// Where the bytes of a file lie.
    fn placement(&self, file: &Handle) -> Result<Placement>;

    /// Whether memory has a byte, so that a read of it need not wait for the device.
    fn is_in_memory(&self, caller: &Caller, file: &Handle, at: u64) -> bool {
        matches!(self.read_cached(caller, file, at, &mut [0]), Some(Ok(1)))
    }

    /// Says that these bytes will be read soon, and does not wait for them. Without effect where that is not known to help.
    fn will_read(&self, _file: &Handle, _offset: u64, _len_bytes: u64) {}

    /// Waits until what [`Backend::will_read`] has begun with is in memory, as far as the file reaches.
    fn wait_for(&self, caller: &Caller, file: &Handle, range: Range<u64>) -> Result<()> {
        const STEP_BYTES: u64 = 512 << 10;
        // A byte is there when its page is; pages of one request of the device come together.
        let mut at = range.start;
        while at < range.end {
            at = at.saturating_add(STEP_BYTES).min(range.end);
            self.read(caller, file, at - 1, &mut [0])?;
        }
        Ok(())
    }

    /// Whether files are known to be read from a device through a cache of this machine, which [`Backend::will_read`] fills
    /// and [`Backend::read_cached`] looks into. A file system may be known only after a first read.
    fn has_page_cache(&self) -> bool {
        false
    }
}
