//! A file system in memory, correct or with one defect, mounted through FUSE past the page cache.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyWrite, Request, TimeOrNow, WriteFlags,
};

/// What a server may do wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Defect {
    None,
    /// Some writes are acknowledged and forgotten.
    LostWrite,
    /// Some reads return what was there before the last write.
    StaleRead,
    /// A write lands over a later one that overlaps it.
    ReorderedWrites,
    /// Some writes go to another file.
    Misattributed,
    /// Fsync is acknowledged before the data are below.
    FsyncDoesNotWait,
    /// A write lands behind the truncation that came after it.
    LateTruncate,
    /// Some appends start before the end.
    AppendOverlaps,
    /// Requests on open files go to the file that has the name now.
    ByName,
    /// Files belong to root, whoever makes them.
    WrongUser,
    /// After a failed request another one gets an error.
    WrongError,
    /// Closing drops the last write of the descriptor.
    DropAtClose,
    /// A read is never answered.
    Hang,
    /// A restart loses what was synced.
    LoseAtRestart,
    /// An fsync overtakes the last write, which a restart then loses.
    SyncOvertakes,
    /// A request that is in flight when the server stops is never answered.
    HangAtRestart,
    /// One file cannot be written, and a restart loses what was synced of the others.
    RefuseOne,
    /// A write of a process that was killed lands once more, over a later one.
    LateAfterKill,
    /// Some reads get the bytes of another file.
    SwappedReads,
    /// What one user closed to the others stays open.
    OthersMayOpen,
}

/// A folder of this name in the mount's root stands for a restart of the server.
pub const RESTART: &str = "restart-now";
const SIZE_MAX: u64 = 64 << 20;
const ROOT: u64 = 1;

struct Node {
    is_folder: bool,
    children: BTreeMap<OsString, u64>,
    parent: u64,
    name: OsString,
    data: Vec<u8>,
    /// The data before the last write.
    previous: Vec<u8>,
    /// What a restart leaves, with defects of fsync.
    synced: Vec<u8>,
    perm: u16,
    uid: u32,
    gid: u32,
}

/// A write, and what was at its place before.
#[derive(Clone)]
struct Last {
    ino: u64,
    offset: usize,
    bytes: Vec<u8>,
    before: Vec<u8>,
}

#[derive(Default)]
struct State {
    nodes: HashMap<u64, Node>,
    /// By handle: parent and name at the time of opening, and the last write.
    handles: HashMap<u64, (u64, OsString, Option<Last>)>,
    last: Option<Last>,
    /// Writes of descriptors that are closed, to be made again.
    late: Vec<Last>,
    next: u64,
    reads: u64,
    writes: u64,
    wrong_error: bool,
    unanswered: Vec<ReplyData>,
    unanswered_writes: Vec<ReplyWrite>,
    /// The answer to who restarts the server, which waits for a request to be lost.
    restarting: Option<(ReplyEntry, FileAttr)>,
}

pub struct Fake {
    defect: Defect,
    below: Option<PathBuf>,
    state: Mutex<State>,
}

impl Fake {
    pub fn new(defect: Defect, below: Option<PathBuf>) -> Fake {
        let mut state = State { next: ROOT + 1, ..State::default() };
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        state.nodes.insert(ROOT, Node::new(true, 0, OsStr::new(""), 0o777, uid, gid));
        Fake { defect, below, state: Mutex::new(state) }
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == defect
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn make(
        &self,
        request: &Request,
        parent: u64,
        name: &OsStr,
        mode: u32,
        is_folder: bool,
    ) -> Result<FileAttr, Errno> {
        let mut state = self.state();
        if name.len() > 255 {
            return Err(Errno::ENAMETOOLONG);
        }
        if state.child(parent, name).is_ok() {
            return Err(Errno::EEXIST);
        }
        let ino = state.next;
        state.next += 1;
        let uid = if self.is(Defect::WrongUser) { 0 } else { request.uid() };
        let node = Node::new(is_folder, parent, name, mode as u16 & 0o7777, uid, request.gid());
        state.nodes.insert(ino, node);
        state.nodes.get_mut(&parent).ok_or(Errno::ENOENT)?.children.insert(name.to_owned(), ino);
        if name == RESTART {
            match self.defect {
                Defect::LoseAtRestart | Defect::RefuseOne => {
                    state.nodes.values_mut().for_each(|node| node.data.clear());
                }
                Defect::SyncOvertakes => state.nodes.values_mut().for_each(|node| node.data = node.synced.clone()),
                _ => {}
            }
        }
        if let Some(below) = &self.below
            && is_folder
        {
            let _ = fs::create_dir_all(below.join(state.path(ino)));
        }
        state.attr(ino)
    }

    /// The file that a request on a handle is for.
    fn target(&self, state: &State, ino: u64, handle: u64) -> u64 {
        match state.handles.get(&handle) {
            Some((parent, name, _)) if self.is(Defect::ByName) => state.child(*parent, name).unwrap_or(ino),
            _ => ino,
        }
    }

    fn removed(&self, parent: u64, name: &OsStr, folder: bool) -> Result<(), Errno> {
        let mut state = self.state();
        let ino = state.child(parent, name)?;
        if folder && !state.nodes[&ino].children.is_empty() {
            state.wrong_error = self.is(Defect::WrongError);
            return Err(Errno::ENOTEMPTY);
        }
        state.nodes.get_mut(&parent).ok_or(Errno::ENOENT)?.children.remove(name);
        Ok(())
    }
}

impl Node {
    fn new(is_folder: bool, parent: u64, name: &OsStr, perm: u16, uid: u32, gid: u32) -> Node {
        let (children, name) = (BTreeMap::new(), name.to_owned());
        let [data, previous, synced] = Default::default();
        Node { is_folder, children, parent, name, data, previous, synced, perm, uid, gid }
    }

    /// Puts bytes at a place; what was there before.
    fn put(&mut self, offset: usize, bytes: &[u8]) -> Vec<u8> {
        let end = offset + bytes.len();
        self.data.resize(self.data.len().max(end), 0);
        let before = self.data[offset..end].to_vec();
        self.data[offset..end].copy_from_slice(bytes);
        before
    }
}

impl State {
    fn child(&self, parent: u64, name: &OsStr) -> Result<u64, Errno> {
        let parent = self.nodes.get(&parent).ok_or(Errno::ENOENT)?;
        if !parent.is_folder {
            return Err(Errno::ENOTDIR);
        }
        parent.children.get(name).copied().ok_or(Errno::ENOENT)
    }

    fn path(&self, ino: u64) -> PathBuf {
        match self.nodes.get(&ino) {
            Some(node) if ino != ROOT => self.path(node.parent).join(&node.name),
            _ => PathBuf::new(),
        }
    }

    fn attr(&self, ino: u64) -> Result<FileAttr, Errno> {
        let node = self.nodes.get(&ino).ok_or(Errno::ENOENT)?;
        let at = SystemTime::UNIX_EPOCH;
        Ok(FileAttr {
            ino: INodeNo(ino),
            size: node.data.len() as u64,
            blocks: node.data.len().div_ceil(512) as u64,
            atime: at,
            mtime: at,
            ctime: at,
            crtime: at,
            kind: if node.is_folder { FileType::Directory } else { FileType::RegularFile },
            perm: node.perm,
            nlink: 1,
            uid: node.uid,
            gid: node.gid,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }

    fn open(&mut self, ino: u64) -> FileHandle {
        let node = &self.nodes[&ino];
        let (parent, name) = (node.parent, node.name.clone());
        self.next += 1;
        self.handles.insert(self.next, (parent, name, None));
        FileHandle(self.next)
    }

    fn another_file(&self, ino: u64) -> u64 {
        let others = self.nodes.iter().filter(|(other, node)| **other != ino && !node.is_folder);
        others.map(|(other, _)| *other).max().unwrap_or(ino)
    }
}

fn flags() -> FopenFlags {
    FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
}

fn entry(reply: ReplyEntry, attr: Result<FileAttr, Errno>) {
    match attr {
        Ok(attr) => reply.entry(&Duration::ZERO, &attr, Generation(0)),
        Err(errno) => reply.error(errno),
    }
}

fn empty(reply: ReplyEmpty, outcome: Result<(), Errno>) {
    match outcome {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}

impl Filesystem for Fake {
    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.state();
        let found = if name.len() > 255 { Err(Errno::ENAMETOOLONG) } else { state.child(parent.0, name) };
        entry(reply, found.and_then(|ino| state.attr(ino)));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.state().attr(ino.0) {
            Ok(attr) => reply.attr(&Duration::ZERO, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        handle: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut state = self.state();
        let target = handle.map_or(ino.0, |handle| self.target(&state, ino.0, handle.0));
        let last = state.last.clone().filter(|last| last.ino == target && self.is(Defect::LateTruncate));
        let Some(node) = state.nodes.get_mut(&target) else { return reply.error(Errno::ENOENT) };
        if size.is_some_and(|size| size > SIZE_MAX) {
            return reply.error(Errno::EFBIG);
        }
        node.perm = mode.map_or(node.perm, |mode| mode as u16 & 0o7777);
        if self.is(Defect::OthersMayOpen) {
            node.perm |= 0o666;
        }
        node.uid = uid.unwrap_or(node.uid);
        node.gid = gid.unwrap_or(node.gid);
        if let Some(size) = size {
            node.data.resize(size as usize, 0);
            if let Some(last) = last {
                node.put(last.offset, &last.bytes);
            }
        }
        match state.attr(ino.0) {
            Ok(attr) => reply.attr(&Duration::ZERO, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn mkdir(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, reply: ReplyEntry) {
        match self.make(request, parent.0, name, mode, true) {
            Ok(attr) if self.is(Defect::HangAtRestart) && name == RESTART => {
                self.state().restarting = Some((reply, attr));
            }
            made => entry(reply, made),
        }
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(reply, self.removed(parent.0, name, false));
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        empty(reply, self.removed(parent.0, name, true));
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut state = self.state();
        let moved = (|| {
            let ino = state.child(parent.0, name)?;
            if state.child(new_parent.0, new_name).is_ok_and(|over| !state.nodes[&over].children.is_empty()) {
                return Err(Errno::ENOTEMPTY);
            }
            state.nodes.get_mut(&parent.0).ok_or(Errno::ENOENT)?.children.remove(name);
            state.nodes.get_mut(&new_parent.0).ok_or(Errno::ENOENT)?.children.insert(new_name.to_owned(), ino);
            let node = state.nodes.get_mut(&ino).ok_or(Errno::ENOENT)?;
            (node.parent, node.name) = (new_parent.0, new_name.to_owned());
            Ok(())
        })();
        empty(reply, moved);
    }

    fn create(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32, _: u32, _: i32, reply: ReplyCreate) {
        match self.make(request, parent.0, name, mode, false) {
            Ok(attr) => {
                let handle = self.state().open(attr.ino.0);
                reply.created(&Duration::ZERO, &attr, Generation(0), handle, flags());
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut state = self.state();
        if !state.nodes.contains_key(&ino.0) {
            return reply.error(Errno::ENOENT);
        }
        reply.opened(state.open(ino.0), flags());
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        len: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let mut state = self.state();
        state.reads += 1;
        let count = state.reads;
        if self.is(Defect::Hang) && count == 50 {
            return state.unanswered.push(reply);
        }
        let mut target = self.target(&state, ino.0, handle.0);
        if self.is(Defect::SwappedReads) && count % 20 == 19 {
            target = state.another_file(target);
        }
        let Some(node) = state.nodes.get(&target) else { return reply.error(Errno::ESTALE) };
        let stale = self.is(Defect::StaleRead) && count % 20 == 19;
        let data = if stale { &node.previous } else { &node.data };
        let start = (offset as usize).min(data.len());
        reply.data(&data[start..(start + len as usize).min(data.len())]);
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        bytes: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let mut state = self.state();
        state.writes += 1;
        let count = state.writes;
        if std::mem::take(&mut state.wrong_error) {
            return reply.error(Errno::EIO);
        }
        if let Some((restarter, attr)) = state.restarting.take() {
            restarter.entry(&Duration::ZERO, &attr, Generation(0));
            return state.unanswered_writes.push(reply);
        }
        if self.is(Defect::RefuseOne) && state.nodes.get(&ino.0).is_some_and(|node| node.name == "file-0") {
            return reply.error(Errno::ENOSPC);
        }
        if offset + bytes.len() as u64 > SIZE_MAX {
            return reply.error(Errno::EFBIG);
        }
        let mut target = self.target(&state, ino.0, handle.0);
        if self.is(Defect::Misattributed) && count % 25 == 24 {
            target = state.another_file(target);
        }
        let earlier = state.last.take();
        let Some(node) = state.nodes.get_mut(&target) else { return reply.error(Errno::ESTALE) };
        let mut offset = offset as usize;
        if self.is(Defect::AppendOverlaps) && count % 10 == 9 && offset == node.data.len() && offset >= 32 {
            offset -= 32;
        }
        if self.is(Defect::StaleRead) || self.is(Defect::SyncOvertakes) {
            node.previous = node.data.clone();
        }
        if self.is(Defect::LostWrite) && count % 25 == 24 {
            return reply.written(bytes.len() as u32);
        }
        let before = node.put(offset, bytes);
        let last = Last { ino: target, offset, bytes: bytes.to_vec(), before };
        let overlaps = |earlier: &Last| {
            earlier.ino == target
                && earlier.offset < offset + bytes.len()
                && offset < earlier.offset + earlier.bytes.len()
        };
        if self.is(Defect::ReorderedWrites)
            && let Some(earlier) = earlier.filter(overlaps)
        {
            node.put(earlier.offset, &earlier.bytes);
        }
        let late = state.late.extract_if(.., |late| overlaps(late)).collect::<Vec<Last>>();
        if let Some(node) = state.nodes.get_mut(&target) {
            late.iter().for_each(|late| _ = node.put(late.offset, &late.bytes));
        }
        if let Some(handle) = state.handles.get_mut(&handle.0) {
            handle.2 = Some(last.clone());
        }
        state.last = Some(last);
        reply.written(bytes.len() as u32);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
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
        let mut state = self.state();
        if let Some((parent, name, Some(last))) = state.handles.remove(&handle.0) {
            // Who closes in peace has the only descriptor.
            let others = state.handles.values().any(|other| other.0 == parent && other.1 == name);
            if self.is(Defect::LateAfterKill) && others {
                state.late.push(last);
            } else if self.is(Defect::DropAtClose)
                && let Some(node) = state.nodes.get_mut(&last.ino)
            {
                node.put(last.offset, &last.before);
            }
        }
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        let mut state = self.state();
        if let Some(node) = state.nodes.get_mut(&ino.0).filter(|_| self.is(Defect::SyncOvertakes)) {
            node.synced = node.previous.clone();
        }
        let below = self.below.as_ref().filter(|_| !self.is(Defect::FsyncDoesNotWait));
        let written = below.is_none_or(|below| {
            let path = below.join(state.path(ino.0));
            path.parent().is_some_and(|folder| fs::create_dir_all(folder).is_ok())
                && fs::write(path, &state.nodes[&ino.0].data).is_ok()
        });
        empty(reply, if written { Ok(()) } else { Err(Errno::EIO) });
        // Too late, but not never.
        if let Some(below) = self.below.as_ref().filter(|_| self.is(Defect::FsyncDoesNotWait)) {
            let _ = fs::write(below.join(state.path(ino.0)), &state.nodes[&ino.0].previous);
        }
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let state = self.state();
        let Some(node) = state.nodes.get(&ino.0) else { return reply.error(Errno::ENOENT) };
        // A cookie is an inode number, so that names that vanish between two calls do not shift the others.
        let mut all: Vec<(u64, &OsString)> = node.children.iter().map(|(name, ino)| (*ino, name)).collect();
        all.sort_unstable();
        for (child, name) in all.into_iter().filter(|(child, _)| *child > offset) {
            let folder = state.nodes[&child].is_folder;
            let kind = if folder { FileType::Directory } else { FileType::RegularFile };
            if reply.add(INodeNo(child), child, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
