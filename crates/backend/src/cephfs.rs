//! A CephFS file system, or a folder of one, reached through Ceph's own client library (libcephfs) without a mount of the
//! kernel's.
//!
//! Every call carries its caller's user and groups; the library checks them by mode and, where `client_acl_type` is set, by
//! lists of access control. Handles are inode numbers with the time of birth, because a number may be used again after its
//! node is gone; they outlive restarts of the server and mean the same to every I/O node.
//!
//! What is special here:
//! - The library's cache of file data is off: what is written is with the OSDs when the call returns, and what other clients
//!   changed is seen. What is known of names and attributes is kept as long as the metadata servers vouch for it.
//! - A file that a caller has opened stays open for that caller until it is idle for [`Options::idle`]; rights that are
//!   withdrawn through this backend count at once, others' changes by then.
//! - A name can be replaced but not given only where there is none: [`rename_new`](crate::Backend::rename_new) is `EINVAL`.
//! - Set-user-id and set-group-id of a file go when it is opened for a user to write; others' changes of them while it is open stay.
//! - Snapshots are not shown: their name (`.snap`) is `ENOENT`, and `EPERM` to give.
//! - An OSD that is away is `EIO` after [`Options::timeout`]. Calls that wait for a metadata server that is away go on when
//!   one is back; while [`HUNG_MAX`] of them have waited for longer than the timeout, further ones are `EIO` at once. Such are all
//!   calls but reads of open files and writes within them, which go on (unless another client uses the file, too: then they
//!   may wait for the metadata server, and are not counted).
//! - When the session is lost (the client was evicted), the file system is mounted anew. Files that were written and not
//!   synced until then are lost for all that is known: their syncs say so until the server restarts.

mod api;
mod calls;
mod data;
mod mount;
mod placement;
mod watch;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use impresario_base::lock::{Mutex, RwLock};
use impresario_base::siphash::siphash;

use crate::callers::Callers;
use crate::idle::IdleThread;
use crate::losses::Losses;
use crate::nodes::{self, Descriptors};
use crate::{Attr, Caller, Errno, Handle, Kind, Result};
use api::Statx;
pub use mount::Source;
use mount::{Descriptor, Inode, Mount, is_lost};
pub use placement::Striping;
use watch::Watch;

/// First byte of a handle, which no other backend uses.
const HANDLE: u8 = 4;
/// Numbers below are the metadata servers' own, except for the root's.
const OWN_MAX: u64 = 0x1000;
const ROOT: u64 = 1;
/// Calls that may hang at a time: half of the threads that an I/O node has for them.
pub const HUNG_MAX: usize = 8;
/// A mount that could not be had is tried again after so long.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Tries to find two nodes in the same mount.
const BOTH_TRIES: u32 = 4;

/// How a file system is served.
#[derive(Debug, Clone)]
pub struct Options {
    /// Nodes and open files that are kept at a time, about.
    pub descriptors_max: usize,
    /// They are let go of when they were not used for that long.
    pub idle: Duration,
    /// OSDs, monitors and the answer to a mount are waited for so long, in whole seconds.
    pub timeout: Duration,
    /// How new files are striped; `None`: as their directories say.
    pub striping: Option<Striping>,
    /// The session's name, which nothing else in the cluster has: a session of this name that an earlier run has left is
    /// ended.
    pub identity: Option<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            descriptors_max: 65_536,
            idle: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            striping: None,
            identity: None,
        }
    }
}

/// Why a file system cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The library, or the file system, cannot be had.
    #[error("cannot open CephFS{} as client.{}: {reason}", of(.wanted), .wanted.user.as_deref().unwrap_or("admin"))]
    Mount {
        /// What was asked for.
        wanted: Source,
        /// Why, and the remedy.
        reason: String,
    },
    /// No thread that closes idle descriptors.
    #[error("cannot start a thread: {0}; raise the limit (ulimit -u)")]
    Thread(std::io::Error),
}

fn of(source: &Source) -> String {
    let name = source.filesystem.as_ref().map(|name| format!(" {name}")).unwrap_or_default();
    match source.folder.as_os_str().is_empty() {
        true => name,
        false => format!("{name}, folder {}", source.folder.display()),
    }
}

/// A file system, or a folder of one, as a backend.
pub struct CephTree {
    /// Before the rest, which its thread uses.
    _idle: IdleThread,
    shared: Arc<Shared>,
}

/// The descriptors of the library.
struct Files;

type Node = nodes::Node<Files>;
type Open = nodes::Open<Files>;

/// What names a node.
struct Name {
    /// In the mount of now, or of when it was last used.
    inode: Mutex<Arc<Inode>>,
    /// The directory and the name that it was last found by.
    at: Mutex<Option<(Handle, Box<[u8]>)>>,
}

impl Descriptors for Files {
    type Name = Name;
    type Open = Descriptor;

    fn sync(open: &Descriptor) -> Result<()> {
        // What was written through a descriptor or a session that is lost may be lost too.
        let lost = |error: &Errno| is_lost(*error) || *error == Errno(libc::EBADF);
        open.sync().map_err(|error| if lost(&error) { Errno(libc::EIO) } else { error })
    }
}

/// What the calls share.
struct Shared {
    source: Source,
    options: Options,
    mount: RwLock<Arc<Mount>>,
    /// Held while mounting anew.
    mounting: Mutex<Mounting>,
    mounts: AtomicUsize,
    root: Handle,
    root_number: u64,
    fsid: u64,
    nodes: nodes::Nodes<Files>,
    losses: Arc<Losses>,
    callers: Callers,
    watch: Watch,
}

impl CephTree {
    /// Serves a file system.
    pub fn open(source: &Source, options: Options) -> std::result::Result<CephTree, OpenError> {
        let failed = |reason: String| OpenError::Mount { wanted: source.clone(), reason };
        if let Some(striping) = &options.striping {
            striping.check().map_err(failed)?;
        }
        let begun = begin_mount(source, &options).map_err(OpenError::Thread)?;
        let mount = begun.recv_timeout(mount_max(&options)).unwrap_or_else(|_| {
            Err(format!("no metadata server answers within {:?}; see `ceph status`", mount_max(&options)))
        });
        let mount = Arc::new(mount.map_err(failed)?);
        let unreadable = |error: Errno| failed(format!("its root cannot be read: {error}"));
        let root = Arc::new(mount.root().map_err(unreadable)?);
        let stat = root.stat().map_err(unreadable)?;
        if let Some(striping) = &options.striping {
            placement::try_striping(&root, striping).map_err(failed)?;
        }
        drop(root);
        let losses = Arc::new(Losses::default());
        let cluster = mount.setting(c"fsid").unwrap_or_default();
        let fsid = siphash(&[0; 16], &[&cluster[..], &mount.filesystem_number().to_be_bytes()].concat());
        let shared = Arc::new(Shared {
            source: source.clone(),
            mount: RwLock::new(mount),
            mounting: Mutex::default(),
            mounts: AtomicUsize::new(1),
            root: handle_of(&stat),
            root_number: stat.ino,
            fsid,
            nodes: nodes::Nodes::new(options.descriptors_max.max(16), losses.clone()),
            losses,
            callers: Callers::default(),
            watch: Watch::new(options.timeout, HUNG_MAX),
            options,
        });
        let idle = IdleThread::start("cephfs idle", shared.options.idle, {
            let (shared, asking) = (shared.clone(), Arc::new(AtomicBool::new(false)));
            move || {
                shared.nodes.close_idle(shared.options.idle);
                ask_for_session(&shared, &asking);
            }
        });
        Ok(CephTree { _idle: idle.map_err(OpenError::Thread)?, shared })
    }

    /// Nodes and open files that are kept now.
    pub fn descriptors(&self) -> usize {
        self.shared.nodes.count()
    }

    /// Files of which written bytes may be lost, since the server started.
    pub fn losses(&self) -> usize {
        self.shared.losses.count()
    }

    /// How often the file system was mounted: more than once where sessions were lost.
    pub fn mounts(&self) -> usize {
        self.shared.mounts.load(Ordering::Relaxed)
    }

    /// Calls that wait for the metadata servers for longer than the timeout.
    pub fn hung(&self) -> usize {
        self.shared.watch.hung(Instant::now())
    }

    /// Begins to let go of everything that is not in use or held, as idleness would.
    pub fn close_all(&self) {
        self.shared.nodes.close_all();
    }
}

/// Finds a session that is lost, and begins a new one, also when no call does: in a thread of its own, for metadata servers
/// that do not answer must not keep the tree from ending.
fn ask_for_session(shared: &Arc<Shared>, asking: &Arc<AtomicBool>) {
    if asking.swap(true, Ordering::AcqRel) {
        return;
    }
    let (shared, asks) = (shared.clone(), asking.clone());
    let thread = std::thread::Builder::new().name("cephfs session".into()).spawn(move || {
        let _ = shared.look(|| shared.mount()?.root()?.stat()); // what it finds is noted
        asks.store(false, Ordering::Release);
    });
    if thread.is_err() {
        asking.store(false, Ordering::Release);
    }
}

/// Mounting anew.
#[derive(Default)]
struct Mounting {
    /// When it last failed, or was not done in time.
    failed: Option<Instant>,
    /// What was begun and may still succeed.
    begun: Option<Begun>,
}

type Begun = mpsc::Receiver<std::result::Result<Mount, String>>;

/// Begins to mount, in a thread of its own: the library waits for some answers for ever.
fn begin_mount(source: &Source, options: &Options) -> std::io::Result<Begun> {
    let (send, begun) = mpsc::channel();
    let (source, options) = (source.clone(), options.clone());
    std::thread::Builder::new().name("cephfs mount".into()).spawn(move || {
        let _ = send.send(Mount::open(&source, &options, own())); // who waited may have given up: it is unmounted again
    })?;
    Ok(begun)
}

/// A mount is waited for so long: a monitor and a metadata server answer it.
fn mount_max(options: &Options) -> Duration {
    2 * options.timeout + Duration::from_secs(1)
}

/// Who this process is.
fn own() -> Caller {
    Caller {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        groups: rustix::process::getgroups().unwrap_or_default().into_iter().map(|group| group.as_raw()).collect(),
    }
}

/// A node's handle: its number and its time of birth.
fn handle_of(stat: &Statx) -> Handle {
    let mut bytes = [HANDLE; 21];
    bytes[1..9].copy_from_slice(&stat.ino.to_be_bytes());
    bytes[9..17].copy_from_slice(&stat.btime.tv_sec.to_be_bytes());
    bytes[17..].copy_from_slice(&(stat.btime.tv_nsec as u32).to_be_bytes());
    Handle::of(&bytes)
}

/// The number in a handle; `ESTALE` where it is none of this backend, or that of something of the metadata servers' own.
fn number_of(handle: &Handle, root: u64) -> Result<u64> {
    let number = match handle.as_bytes() {
        [HANDLE, number @ ..] if number.len() == 20 => number[..8].try_into().ok().map(u64::from_be_bytes),
        _ => None,
    };
    // The file system's own root is outside where a folder is served.
    let hidden = |number: &u64| *number < OWN_MAX && !(*number == ROOT && root == ROOT);
    number.filter(|number| !hidden(number)).ok_or(Errno(libc::ESTALE))
}

/// Why a call on a node that was found before failed: what is not there any more is gone.
fn stale(error: Errno) -> Errno {
    if error == Errno(libc::ENOENT) { Errno(libc::ESTALE) } else { error }
}

/// A number as callers may hear it.
fn outward(error: Errno) -> Errno {
    if is_lost(error) { Errno(libc::EIO) } else { error }
}

impl Shared {
    /// The mount, anew where its session is lost.
    fn mount(&self) -> Result<Arc<Mount>> {
        let current = || Some(self.mount.read().clone()).filter(|mount| !mount.is_lost());
        if let Some(mount) = current() {
            return Ok(mount);
        }
        let mut mounting = self.mounting.lock();
        if let Some(mount) = current() {
            return Ok(mount);
        }
        if mounting.failed.is_some_and(|failed| failed.elapsed() < AGAIN_AFTER) {
            return Err(Errno(libc::EIO));
        }
        let (begun, wait) = match mounting.begun.take() {
            // The one who began it has waited.
            Some(begun) => (begun, Duration::ZERO),
            None => (begin_mount(&self.source, &self.options)?, mount_max(&self.options)),
        };
        let why = match begun.recv_timeout(wait) {
            Ok(Ok(mount)) => {
                let mount = Arc::new(mount);
                let old = std::mem::replace(&mut *self.mount.write(), mount.clone());
                drop(old); // nodes that were in use may keep it for a while
                *mounting = Mounting::default();
                self.mounts.fetch_add(1, Ordering::Relaxed);
                tracing::warn!("CephFS is mounted anew");
                return Ok(mount);
            }
            Ok(Err(why)) => why,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                mounting.begun = Some(begun);
                "no metadata server answers yet".into()
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => "its thread ended".into(),
        };
        mounting.failed = Some(Instant::now());
        tracing::warn!(why, "CephFS cannot be mounted anew");
        Err(Errno(libc::EIO))
    }

    /// Makes a call that asks metadata servers and changes nothing: a second time where the first found the session lost.
    fn look<T>(&self, mut call: impl FnMut() -> Result<T>) -> Result<T> {
        let _watched = self.watch.enter(Instant::now())?;
        let answer = match call() {
            Err(error) if is_lost(error) => call(),
            answer => answer,
        };
        answer.map_err(outward)
    }

    /// Makes a call that changes something. Where it finds the session lost it may have been done.
    fn change<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let _watched = self.watch.enter(Instant::now())?;
        call().map_err(outward)
    }

    /// The node of a handle.
    fn node(&self, handle: &Handle) -> Result<Arc<Node>> {
        if let Some(node) = self.nodes.get(handle) {
            return if node.is_gone() { Err(Errno(libc::ESTALE)) } else { Ok(node) };
        }
        let (inode, stat) = self.find(handle)?;
        Ok(self.enter(Arc::new(inode), &stat, None)?.0)
    }

    /// As [`Shared::node`], of a call that waits for metadata servers only where the node is not in use.
    fn node_in_use(&self, handle: &Handle) -> Result<Arc<Node>> {
        let _watched = if self.nodes.get(handle).is_none() { Some(self.watch.enter(Instant::now())?) } else { None };
        self.node(handle).map_err(outward)
    }

    /// Looks for the node of a handle in the mount of now.
    fn find(&self, handle: &Handle) -> Result<(Inode, Statx)> {
        let number = number_of(handle, self.root_number)?;
        let gone = |error: Errno| match error.0 {
            // What never was a number of a node is told as one of these.
            libc::ENOENT | libc::EINVAL => Errno(libc::ESTALE),
            _ => error,
        };
        let inode = self.mount()?.by_number(number).map_err(gone)?;
        let stat = inode.stat().map_err(gone)?;
        let is_it = handle_of(&stat) == *handle && stat.links > 0;
        if is_it { Ok((inode, stat)) } else { Err(Errno(libc::ESTALE)) }
    }

    /// A node in the mount of now, if it is known there.
    fn known_inode(&self, node: &Node) -> Option<Arc<Inode>> {
        let mount = self.mount.read().clone();
        let known = node.fd.inode.lock().clone();
        (!mount.is_lost() && Arc::ptr_eq(known.mount(), &mount)).then_some(known)
    }

    /// A node in the mount of now. What was opened in a mount that is lost is closed.
    fn inode(&self, node: &Node) -> Result<Arc<Inode>> {
        self.mount()?;
        if let Some(known) = self.known_inode(node) {
            return Ok(known);
        }
        self.nodes.close_opens(node);
        let (found, _) = self.find(&node.handle)?;
        let found = Arc::new(found);
        *node.fd.inode.lock() = found.clone();
        Ok(found)
    }

    /// Two nodes in the same mount, as the library's calls want them: between two looks at the mount there may be another one.
    fn both(&self, one: &Node, other: &Node) -> Result<(Arc<Inode>, Arc<Inode>)> {
        for _ in 0..BOTH_TRIES {
            let both = (self.inode(one)?, self.inode(other)?);
            if Arc::ptr_eq(both.0.mount(), both.1.mount()) {
                return Ok(both);
            }
        }
        Err(Errno(libc::EIO))
    }

    fn directory(&self, handle: &Handle) -> Result<(Arc<Node>, Arc<Inode>)> {
        let node = self.node(handle)?;
        if node.kind != Kind::Directory {
            return Err(Errno(libc::ENOTDIR));
        }
        let inode = self.inode(&node)?;
        Ok((node, inode))
    }

    /// Takes a node that was just found into use; `at` is where.
    fn enter(&self, inode: Arc<Inode>, stat: &Statx, at: Option<(&Node, &[u8])>) -> Result<(Arc<Node>, Attr)> {
        let (attr, handle) = (self.attr_of(stat)?, handle_of(stat));
        number_of(&handle, self.root_number)?;
        let name = Name { inode: Mutex::new(inode), at: Mutex::default() };
        let node = self.nodes.insert(handle, name, attr.fileid, attr.kind);
        if let Some((dir, name)) = at {
            let mut known = node.fd.at.lock();
            if known.as_ref().is_none_or(|(above, known)| *above != dir.handle || **known != *name) {
                *known = Some((dir.handle, name.into()));
            }
        }
        Ok((node, attr))
    }

    /// A node's attributes now.
    fn see(&self, node: &Node) -> Result<Attr> {
        self.attr_of(&self.inode(node)?.stat().map_err(stale)?)
    }

    fn attr_of(&self, stat: &Statx) -> Result<Attr> {
        let mode = u32::from(stat.mode);
        let time = |time: libc::timespec| crate::rules::time_of(time.tv_sec, time.tv_nsec);
        Ok(Attr {
            kind: crate::rules::kind_of(mode)?,
            mode: mode & 0o7777,
            links: stat.links,
            uid: stat.uid,
            gid: stat.gid,
            size_bytes: stat.size,
            used_bytes: stat.blocks.saturating_mul(512),
            device: (libc::major(stat.rdev), libc::minor(stat.rdev)),
            fsid: self.fsid,
            fileid: stat.ino,
            atime: time(stat.atime),
            mtime: time(stat.mtime),
            ctime: time(stat.ctime),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_numbers_with_a_birth_and_the_servers_own_are_refused() {
        // SAFETY: a structure of numbers, of which zero is one.
        let mut stat: Statx = unsafe { std::mem::zeroed() };
        stat.ino = 0x100_0000_0001;
        (stat.btime.tv_sec, stat.btime.tv_nsec) = (1_700_000_000, 999_999_999);
        let handle = handle_of(&stat);
        assert_eq!(number_of(&handle, ROOT), Ok(stat.ino));
        stat.btime.tv_nsec -= 1;
        assert_ne!(handle_of(&stat), handle, "a number that is used again");
        let refused = |handle: &Handle, root| assert_eq!(number_of(handle, root), Err(Errno(libc::ESTALE)));
        for n in 0..21 {
            refused(&Handle::new(&handle.as_bytes()[..n]).unwrap(), ROOT);
        }
        refused(&Handle::new(&[HANDLE; 22]).unwrap(), ROOT);
        refused(&Handle::new(&[3; 21]).unwrap(), ROOT);
        for number in [0, 2, 0x100, 0x600, OWN_MAX - 1] {
            stat.ino = number;
            refused(&handle_of(&stat), ROOT);
        }
        stat.ino = ROOT;
        assert_eq!(number_of(&handle_of(&stat), ROOT), Ok(ROOT));
        refused(&handle_of(&stat), 0x100_0000_0002);
    }
}
