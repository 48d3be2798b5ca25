//! A file system of ours that hangs when told to: it takes requests and answers none of them until it goes on.

use std::ffi::OsStr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyStatfs, Request, SessionACL,
};
use impresario_base::lock::Mutex;

/// Length of each file, all zeros.
pub const FILE_BYTES: u64 = 4 << 20;
/// What lies before this is always read: the kernel reads ahead of a first read.
const ANSWERED_BYTES: u64 = 256 << 10;
/// The files are `0`, `1` and so on; this is the inode number of the first.
const FIRST: u64 = 1000;

/// What is asked for while it hangs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    Read,
    Flush,
    Statfs,
    Getattr,
    Lookup,
}

/// Requests without an answer. A reply that is dropped answers with EIO.
#[derive(Default)]
struct Held {
    asked: Vec<Asked>,
    data: Vec<ReplyData>,
    empty: Vec<ReplyEmpty>,
    statfs: Vec<ReplyStatfs>,
    attr: Vec<ReplyAttr>,
    entry: Vec<ReplyEntry>,
}

#[derive(Default)]
struct State {
    hangs: AtomicBool,
    hides: AtomicBool,
    held: Mutex<Held>,
}

/// The mount, for all users; it goes on and is unmounted when dropped.
pub struct HungMount {
    state: Arc<State>,
    session: Option<BackgroundSession>,
}

impl HungMount {
    /// Mounts it. The kernel takes attributes and names for `known_for`; read-only unless that is 0.
    pub fn new(at: &Path, known_for: Duration) -> HungMount {
        let state = Arc::<State>::default();
        let mut config = Config::default();
        // Read-only, the kernel does not ask who may write, nor for times of access.
        let rights = if known_for.is_zero() { MountOption::RW } else { MountOption::RO };
        config.mount_options =
            vec![MountOption::FSName("impresario-hung".into()), MountOption::DefaultPermissions, rights];
        config.acl = SessionACL::All;
        let session = fuser::spawn_mount(Files { state: state.clone(), known_for }, at, &config).unwrap();
        HungMount { state, session: Some(session) }
    }

    /// From now on it answers none of these requests.
    pub fn hang(&self) {
        self.state.hangs.store(true, SeqCst);
    }

    /// Nor does it answer from now on what it has under a name.
    pub fn hang_names(&self) {
        self.state.hides.store(true, SeqCst);
        self.hang();
    }

    /// How many requests of a kind wait.
    pub fn waiting(&self, of: Asked) -> usize {
        self.state.held.lock().asked.iter().filter(|asked| **asked == of).count()
    }

    /// What waits fails, and what comes is answered.
    pub fn go_on(&self) {
        self.state.hangs.store(false, SeqCst);
        self.state.hides.store(false, SeqCst);
        let held = std::mem::take(&mut *self.state.held.lock());
        drop(held);
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        self.go_on();
        drop(self.session.take());
    }
}

struct Files {
    state: Arc<State>,
    known_for: Duration,
}

impl Files {
    /// Keeps a reply, if it hangs.
    fn hold<R>(&self, asked: Asked, reply: R, keep: impl FnOnce(&mut Held, R)) -> Option<R> {
        let mut held = self.state.held.lock();
        if !self.state.hangs.load(SeqCst) {
            return Some(reply);
        }
        held.asked.push(asked);
        keep(&mut held, reply);
        None
    }

    fn attr(&self, ino: u64) -> FileAttr {
        let (kind, perm, size) = match ino {
            1 => (FileType::Directory, 0o755, 0),
            // Then everyone may ask what of it is in memory.
            _ => (FileType::RegularFile, 0o666, FILE_BYTES),
        };
        impresario_testing::fuse::attr(ino, kind, perm, size)
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let held = |reply| self.hold(Asked::Lookup, reply, |held, reply| held.entry.push(reply));
        let Some(reply) = (if self.state.hides.load(SeqCst) { held(reply) } else { Some(reply) }) else { return };
        match name.to_str().and_then(|name| name.parse::<u64>().ok()) {
            Some(n) => reply.entry(&self.known_for, &self.attr(FIRST + n), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let held = |reply| self.hold(Asked::Getattr, reply, |held, reply| held.attr.push(reply));
        if let Some(reply) = if ino == INodeNo::ROOT { Some(reply) } else { held(reply) } {
            reply.attr(&self.known_for, &self.attr(ino.0));
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: fuser::ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        len_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let answered = offset < ANSWERED_BYTES;
        let held = |reply| self.hold(Asked::Read, reply, |held, reply| held.data.push(reply));
        if let Some(reply) = if answered { Some(reply) } else { held(reply) } {
            let len = FILE_BYTES.saturating_sub(offset).min(len_bytes.into());
            reply.data(&vec![0; len as usize]);
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        if let Some(reply) = self.hold(Asked::Flush, reply, |held, reply| held.empty.push(reply)) {
            reply.ok();
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        if let Some(reply) = self.hold(Asked::Statfs, reply, |held, reply| held.statfs.push(reply)) {
            reply.statfs(0, 0, 0, 0, 0, 4096, 255, 4096);
        }
    }
}
