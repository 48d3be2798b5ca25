//! The kernel's requests, one method each: decode, forward, reply.
//!
//! Requests by name are served in [`crate::names`], requests on open files in [`crate::data`]. A method that only
//! returns ENOSYS makes the kernel use its own fallback and stop sending that request.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, IoctlFlags,
    KernelConfig, LockOwner, Notifier, OpenAccMode, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags,
    ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};
use impresario_base::complaints::Complaints;
use impresario_client::{Acting, Caller, Client, ClientError};
use impresario_wire::{Attr, FileLock, SetAttr, XattrMode};

use crate::attr::{file_attr, set_time};
use crate::data::{Arrivals, OpenFile};
use crate::handles::Handles;
use crate::inodes::{Entered, Inodes};
use crate::locks::LockService;
use crate::mount::Connection;
use crate::names::{Maker, OpenDirectory, Setter};
use crate::paths::Paths;
use crate::sharing::Habits;
use crate::signals::{Interruptible, interruptible};
use crate::turns::Turns;
use crate::{MountOptions, kernel};

/// The result of an operation, or the error number for the kernel.
pub(crate) type Outcome<T> = Result<T, Errno>;

/// Block size of `statfs`, bytes.
const STATFS_BLOCK_BYTES: u32 = 4096;
/// Longest name, bytes.
const NAME_MAX_BYTES: u32 = 255;

/// The file system.
#[derive(Debug)]
pub(crate) struct Face {
    pub(crate) client: Arc<Client>,
    pub(crate) options: MountOptions,
    pub(crate) inodes: Inodes,
    pub(crate) files: Arc<Handles<OpenFile>>,
    pub(crate) directories: Handles<OpenDirectory>,
    /// A path that was built before a directory moved must not be looked up after it.
    pub(crate) paths: Paths,
    /// `None`: the kernel keeps locks.
    pub(crate) locks: Option<LockService>,
    /// Reads leave threads to other calls.
    pub(crate) reads: Turns<ReadRequest>,
    pub(crate) arrivals: Arrivals,
    pub(crate) habits: Habits,
    /// Files of which the kernel keeps no pages can be mapped.
    pub(crate) maps_direct: bool,
    connection: Arc<Connection>,
    /// Tells the kernel what it must ask for again. Set when the mount is served.
    pub(crate) notifier: Arc<OnceLock<Notifier>>,
}

/// A read that the kernel asks for.
#[derive(Debug)]
pub(crate) struct ReadRequest {
    thread: u32,
    handle: FileHandle,
    offset: u64,
    len_bytes: u32,
    reply: ReplyData,
}

impl Face {
    pub(crate) fn new(
        client: Arc<Client>,
        options: MountOptions,
        files: Arc<Handles<OpenFile>>,
        locks: Option<LockService>,
        notifier: Arc<OnceLock<Notifier>>,
        connection: Arc<Connection>,
    ) -> Face {
        let reads = Turns::new(options.thread_count());
        Face {
            client,
            options,
            inodes: Inodes::new(),
            files,
            directories: Handles::new(),
            paths: Paths::default(),
            locks,
            reads,
            arrivals: Arrivals::default(),
            habits: Habits::default(),
            maps_direct: false,
            connection,
            notifier,
        }
    }
}

/// Where a call fails, the calls of many programs do.
pub(crate) static COMPLAINTS: LazyLock<Complaints> = LazyLock::new(Complaints::default);

/// The error number for the kernel. The kernel passes on a number only, so uncommon errors go to the log with their
/// full text, of each sort one a minute.
pub(crate) fn fault(error: ClientError) -> Errno {
    let errno = error.errno();
    match errno {
        libc::ENOENT | libc::EEXIST | libc::ENOTEMPTY | libc::ENOTDIR | libc::EISDIR | libc::ENAMETOOLONG => {
            tracing::trace!(%error)
        }
        // Programs that copy files try what there may be.
        libc::ENODATA | libc::EOPNOTSUPP => tracing::trace!(%error),
        libc::EACCES | libc::EPERM | libc::EINVAL | libc::ELOOP | libc::ESTALE => tracing::debug!(%error),
        _ => COMPLAINTS.about("call", &error.sort(), |calls| tracing::warn!(calls, %error)),
    }
    Errno::from_i32(errno)
}

impl Face {
    /// How long the kernel may keep attributes and names. Not longer than the locks of this mount are certain: while it is
    /// stopped the kernel goes on answering programs by what it has.
    pub(crate) fn cache_time(&self) -> Duration {
        self.client.keeps(self.options.cache_time)
    }

    /// How long the kernel may keep a name.
    fn name_time(&self, parent: INodeNo, name: &[u8]) -> Duration {
        let is_beside = self.locks.as_ref().is_some_and(|locks| locks.beside.has(parent.0, name));
        if is_beside { Duration::ZERO } else { self.cache_time() }
    }

    fn reply_entry(&self, reply: ReplyEntry, outcome: Outcome<(Entered, Attr)>) {
        self.reply_entry_for(self.cache_time(), reply, outcome);
    }

    fn reply_entry_for(&self, valid: Duration, reply: ReplyEntry, outcome: Outcome<(Entered, Attr)>) {
        match outcome {
            Ok((entered, attr)) => {
                let shown = file_attr(entered.number, &attr);
                reply.entry(&valid, &shown, Generation(entered.generation));
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn reply_attr(&self, reply: ReplyAttr, number: u64, outcome: Outcome<(Attr, Duration)>) {
        match outcome {
            Ok((attr, valid)) => reply.attr(&valid, &file_attr(number, &attr)),
            Err(errno) => reply.error(errno),
        }
    }
}

fn reply_empty(reply: ReplyEmpty, outcome: Outcome<()>) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

fn reply_xattr(reply: ReplyXattr, room_bytes: u32, outcome: Outcome<Vec<u8>>) {
    match outcome {
        Ok(bytes) if room_bytes == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() > room_bytes as usize => reply.error(Errno::ERANGE),
        Ok(bytes) => reply.data(&bytes),
        Err(errno) => reply.error(errno),
    }
}

fn wanted(owner: LockOwner, start: u64, end: u64, kind: i32, pid: u32) -> FileLock {
    FileLock { owner: owner.0, pid, start, end, exclusive: kind == lock_kind(true) }
}

fn lock_kind(exclusive: bool) -> i32 {
    if exclusive { libc::F_WRLCK } else { libc::F_RDLCK }
}

fn maker(request: &Request, umask: u32) -> Maker {
    Maker { uid: request.uid(), gid: request.gid(), umask }
}

/// Until the guard is dropped, this thread asks the servers for the user whose request this is, and what a limit withholds of that
/// is given up when its process is to end.
fn act_for(request: &Request) -> (Acting, Option<Interruptible>) {
    (Caller { uid: request.uid(), gid: request.gid() }.enter(), interruptible(request.pid()))
}

fn setter(request: &Request) -> Setter {
    Setter { uid: request.uid(), gid: request.gid(), thread: request.pid() }
}

impl Filesystem for Face {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.maps_direct = kernel::agree(&self.options, self.locks.is_some(), config);
        Ok(())
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _acting = act_for(request);
        let valid = self.name_time(parent, name.as_bytes());
        self.reply_entry_for(valid, reply, self.look_up(parent.0, name.as_bytes(), request.pid()));
    }

    fn forget(&self, _: &Request, ino: INodeNo, lookups: u64) {
        self.inodes.forget(ino.0, lookups);
    }

    fn getattr(&self, request: &Request, ino: INodeNo, handle: Option<FileHandle>, reply: ReplyAttr) {
        let _acting = act_for(request);
        self.reply_attr(reply, ino.0, self.get_attr(ino.0, handle.map(|handle| handle.0)));
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _acting = act_for(request);
        let set = SetAttr {
            mode: mode.map(|mode| mode & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            ..SetAttr::default()
        };
        let outcome = self.set_attr(ino.0, handle.map(|handle| handle.0), set, setter(request));
        self.reply_attr(reply, ino.0, outcome.map(|attr| (attr, self.cache_time())));
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let _acting = act_for(request);
        match self.read_link(ino.0) {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(errno),
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        device: u32,
        reply: ReplyEntry,
    ) {
        let _acting = act_for(request);
        self.reply_entry(reply, self.make_node(parent.0, name.as_bytes(), mode, device, maker(request, umask)));
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let _acting = act_for(request);
        self.reply_entry(reply, self.make_directory(parent.0, name.as_bytes(), mode, maker(request, umask)));
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _acting = act_for(request);
        reply_empty(reply, self.remove(parent.0, name.as_bytes(), |client, path| client.remove_name(path)));
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _acting = act_for(request);
        let remove = |client: &Client, path: &[u8]| client.rmdir(path).map(|()| None);
        reply_empty(reply, self.remove(parent.0, name.as_bytes(), remove));
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let _acting = act_for(request);
        let target = target.as_os_str().as_bytes();
        self.reply_entry(reply, self.make_symlink(parent.0, name.as_bytes(), target, maker(request, 0)));
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _acting = act_for(request);
        let (from, to) = ((parent.0, name.as_bytes()), (new_parent.0, new_name.as_bytes()));
        reply_empty(reply, self.move_name(from, to, flags));
    }

    fn link(&self, request: &Request, ino: INodeNo, new_parent: INodeNo, new_name: &OsStr, reply: ReplyEntry) {
        let _acting = act_for(request);
        self.reply_entry(reply, self.make_link(ino.0, new_parent.0, new_name.as_bytes()));
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let _acting = act_for(request);
        let write = flags.acc_mode() != OpenAccMode::O_RDONLY;
        match self.open_file(ino.0, flags.0, write, setter(request)) {
            Ok((handle, flags)) => reply.opened(FileHandle(handle), flags),
            Err(errno) => reply.error(errno),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _acting = act_for(request);
        match self.create_file(parent.0, name.as_bytes(), mode, flags, maker(request, umask), request.pid()) {
            Ok((entered, attr, handle, flags)) => {
                let (shown, generation) = (file_attr(entered.number, &attr), Generation(entered.generation));
                reply.created(&self.name_time(parent, name.as_bytes()), &shown, generation, FileHandle(handle), flags);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        len_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let thread = request.pid();
        self.reads.take(ReadRequest { thread, handle, offset, len_bytes, reply }, |asked, has_waited| {
            let ReadRequest { thread, handle, offset, len_bytes, reply } = asked;
            let _interruptible = interruptible(thread);
            if has_waited && !self.connection.is_alive() {
                return reply.error(Errno::ENOTCONN);
            }
            self.read_file(handle.0, offset, len_bytes, |outcome| match outcome {
                Ok(bytes) => reply.data(bytes),
                Err(errno) => reply.error(errno),
            });
        });
    }

    fn write(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        bytes: &[u8],
        write_flags: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _acting = act_for(request);
        match self.write_file(handle.0, offset, bytes, (flags.0, write_flags), setter(request)) {
            Ok(written) => reply.written(written),
            Err(errno) => reply.error(errno),
        }
    }

    /// A process closes a descriptor, which ends its locks of the file. Writes are never buffered here. After ENOSYS the kernel
    /// writes back mapped pages itself and stops sending flush.
    fn flush(&self, _: &Request, _: INodeNo, handle: FileHandle, owner: LockOwner, reply: ReplyEmpty) {
        match self.locks {
            Some(_) => reply_empty(reply, self.drop_locks(handle.0, owner.0)),
            None => reply.error(Errno::ENOSYS),
        }
    }

    fn getlk(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        match self.test_lock(handle.0, wanted(owner, start, end, kind, pid)) {
            Ok(Some(held)) => reply.locked(held.start, held.end, lock_kind(held.exclusive), held.pid),
            Ok(None) => reply.locked(start, end, libc::F_UNLCK, 0),
            Err(errno) => reply.error(errno),
        }
    }

    fn setlk(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        owner: LockOwner,
        start: u64,
        end: u64,
        kind: i32,
        pid: u32,
        wait: bool,
        reply: ReplyEmpty,
    ) {
        let lock = wanted(owner, start, end, kind, pid);
        if kind == libc::F_UNLCK {
            return reply_empty(reply, self.unlock(handle.0, &lock));
        }
        match (&self.locks, self.open_by(handle.0)) {
            (Some(locks), Ok(open)) => {
                locks.beside.note(open.number(), || self.inodes.entries(open.number()));
                locks.set(open, lock, wait, request.pid(), reply);
            }
            (None, _) => reply.error(Errno::ENOSYS),
            (_, Err(errno)) => reply.error(errno),
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        // The kernel ignores the answer, and a late one may find the mount gone.
        reply.ok();
        self.close_file(handle.0);
    }

    fn fsync(&self, request: &Request, _: INodeNo, handle: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let _interruptible = interruptible(request.pid());
        reply_empty(reply, self.sync_file(handle.0, datasync));
    }

    fn opendir(&self, request: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let caller = Caller { uid: request.uid(), gid: request.gid() };
        let _acting = caller.enter();
        match self.must_be_there(ino.0) {
            Ok(()) => {
                let handle = Handles::<OpenDirectory>::draw();
                self.directories.put(handle, OpenDirectory::new(ino.0, caller));
                reply.opened(FileHandle(handle), FopenFlags::empty());
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn readdir(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let outcome = self.read_directory(handle.0, offset, &mut |name| {
            reply.add(INodeNo(name.number), name.offset, name.kind, OsStr::from_bytes(name.name))
        });
        match outcome {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn readdirplus(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: u64, mut reply: ReplyDirectoryPlus) {
        let parent = self.directories.get(handle.0).map_or(0, |directory| directory.number());
        let outcome = self.read_directory_plus(handle.0, offset, &mut |name, attr, generation| {
            let (number, shown) = (INodeNo(name.number), file_attr(name.number, attr));
            let valid = self.name_time(INodeNo(parent), name.name);
            reply.add(number, name.offset, OsStr::from_bytes(name.name), &valid, &shown, Generation(generation))
        });
        match outcome {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(errno),
        }
    }

    fn releasedir(&self, _: &Request, _: INodeNo, handle: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        self.directories.take(handle.0);
        reply.ok();
    }

    fn fsyncdir(&self, request: &Request, ino: INodeNo, _: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let _acting = act_for(request);
        reply_empty(reply, self.sync_directory(ino.0));
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        match self.client.statfs() {
            Ok(totals) => {
                let blocks = |bytes: u64| bytes / u64::from(STATFS_BLOCK_BYTES);
                reply.statfs(
                    blocks(totals.total_bytes),
                    blocks(totals.free_bytes),
                    blocks(totals.free_bytes),
                    totals.files,
                    totals.files_free,
                    STATFS_BLOCK_BYTES,
                    NAME_MAX_BYTES,
                    STATFS_BLOCK_BYTES,
                );
            }
            Err(error) => reply.error(fault(error)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        let _acting = act_for(request);
        let mode = match flags {
            libc::XATTR_CREATE => XattrMode::Create,
            libc::XATTR_REPLACE => XattrMode::Replace,
            _ => XattrMode::Any,
        };
        reply_empty(reply, self.set_extended(ino.0, name.as_bytes(), Some(value), mode, setter(request)));
    }

    fn getxattr(&self, request: &Request, ino: INodeNo, name: &OsStr, room_bytes: u32, reply: ReplyXattr) {
        let _acting = act_for(request);
        reply_xattr(reply, room_bytes, self.get_extended(ino.0, name.as_bytes()));
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, room_bytes: u32, reply: ReplyXattr) {
        let _acting = act_for(request);
        reply_xattr(reply, room_bytes, self.list_extended(ino.0));
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _acting = act_for(request);
        reply_empty(reply, self.set_extended(ino.0, name.as_bytes(), None, XattrMode::Any, setter(request)));
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn bmap(&self, _: &Request, _: INodeNo, _: u32, _: u64, reply: ReplyBmap) {
        reply.error(Errno::ENOSYS);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        request: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _acting = act_for(request);
        reply_empty(reply, self.change_space(handle.0, (offset, len), mode, setter(request)));
    }

    fn lseek(&self, _: &Request, _: INodeNo, handle: FileHandle, offset: i64, whence: i32, reply: ReplyLseek) {
        match self.seek(handle.0, offset, whence) {
            Ok(at) => reply.offset(at),
            Err(errno) => reply.error(errno),
        }
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::ENOSYS);
    }
}

#[cfg(test)]
mod tests {
    use impresario_client::Peer;
    use impresario_testing::logged;
    use impresario_wire::Fault;

    use super::*;

    #[test]
    fn calls_that_fail_alike_do_not_fill_the_log() {
        let failed = |errno| {
            let peer = Peer { name: "data.0".into(), address: "here:1".into() };
            fault(ClientError::Fault { peer, fault: Fault { errno, message: "is ill".into() } })
        };
        let lines = logged(|| {
            for _ in 0..1000 {
                assert_eq!(failed(libc::EL2HLT).code(), libc::EL2HLT);
                assert_eq!(failed(libc::ENOENT).code(), libc::ENOENT);
            }
            failed(libc::EL3HLT);
        });
        assert_eq!(lines.len(), 2, "{:?}", lines.first());
        assert!(lines[0].contains("is ill") && lines[0].contains("calls=1"), "{lines:?}");
    }
}
