//! A file system in memory: it forgets what is not on stable storage when it is told to crash, and fails, falls short or
//! hangs as a test wishes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use impresario_backend::{
    Attr, Backend, Caller, DirEntry, Errno, Found, Handle, Kind, Lost, Make, Placement, Result, SetAttr, SetTime,
    Space, SpaceChange,
};
use impresario_base::lock::{Condvar, Mutex};

use super::pages::Pages;

const ROOT: u64 = 1;
/// Of everything in it.
const CAPACITY_BYTES: u64 = 1 << 30;
const NAME_MAX_BYTES: usize = 255;
/// Number of the file system, unless it is to be another one.
const FSID: u64 = 77;

/// Offsets and lengths of calls, bytes.
pub type Calls = Vec<(u64, usize)>;

/// What goes wrong.
#[derive(Default, Clone, Debug)]
pub struct Faults {
    /// Reads that touch this byte of any file fail with `EIO`.
    pub bad_byte: Option<u64>,
    /// Writes fail with this number.
    pub write_errno: Option<i32>,
    /// Syncs fail with this number.
    pub sync_errno: Option<i32>,
    /// Calls on this node's bytes, attributes and names wait until that is over.
    pub hung: Option<Handle>,
    /// Reads and writes wait until that is over, so that a queue forms.
    pub data_hung: bool,
    /// Syncs wait until that is over.
    pub syncs_hung: bool,
    /// Whoever asks for attributes waits until that is over.
    pub attrs_hung: bool,
    /// Syncs of this node wait.
    pub sync_hung: Option<Handle>,
}

#[derive(Clone)]
struct Node {
    attr: Attr,
    bytes: Vec<u8>,
    stable: Vec<u8>,
    /// By cookie.
    entries: BTreeMap<u64, (Vec<u8>, u64)>,
    names: BTreeMap<Vec<u8>, u64>,
    parent: u64,
    verifier: Option<[u8; 8]>,
    removed: bool,
    held: u32,
}

struct State {
    nodes: BTreeMap<u64, Node>,
    fsid: u64,
    next: u64,
    next_cookie: u64,
    faults: Faults,
    reads: Vec<(u64, usize)>,
    writes: Vec<(u64, usize)>,
    waiting: usize,
    /// What of the files is cached, if there is a page cache in front.
    pages: Option<Pages>,
}

/// The file system.
pub struct MemoryTree {
    state: Mutex<State>,
    changed: Condvar,
}

type Guard<'a> = impresario_base::lock::MutexGuard<'a, State>;

fn handle(id: u64) -> Handle {
    Handle::new(&id.to_be_bytes()).unwrap_or_else(|| unreachable!("eight bytes are a handle"))
}

fn err<T>(errno: i32) -> Result<T> {
    Err(Errno(errno))
}

fn may(caller: &Caller, attr: &Attr, wanted: u32) -> bool {
    if caller.uid == 0 {
        return true;
    }
    let shift = match () {
        () if caller.uid == attr.uid => 6,
        () if caller.gid == attr.gid || caller.groups.contains(&attr.gid) => 3,
        () => 0,
    };
    attr.mode >> shift & wanted == wanted
}

impl MemoryTree {
    /// Empty: a root that everyone may write to.
    pub fn new() -> Arc<MemoryTree> {
        let state = State {
            nodes: BTreeMap::new(),
            fsid: FSID,
            next: ROOT,
            next_cookie: 3,
            faults: Faults::default(),
            reads: Vec::new(),
            writes: Vec::new(),
            waiting: 0,
            pages: None,
        };
        let tree = MemoryTree { state: Mutex::new(state), changed: Condvar::new() };
        let root = Caller { uid: 0, gid: 0, groups: Vec::new() };
        let mut state = tree.state.lock();
        let id = state.add(&root, Kind::Directory, ROOT, &SetAttr { mode: Some(0o777), ..SetAttr::default() });
        debug_assert_eq!(id, ROOT);
        drop(state);
        Arc::new(tree)
    }

    /// The same on a device of its own, as far as its attributes tell.
    pub fn on_another_device() -> Arc<MemoryTree> {
        let tree = MemoryTree::new();
        let mut state = tree.state.lock();
        state.fsid = FSID + 1;
        state.nodes.values_mut().for_each(|node| node.attr.fsid = FSID + 1);
        drop(state);
        tree
    }

    /// The same behind a page cache, which is empty.
    pub fn with_page_cache() -> Arc<MemoryTree> {
        let tree = MemoryTree::new();
        tree.state.lock().pages = Some(Pages::default());
        tree
    }

    /// Empties the page cache.
    pub fn drop_caches(&self) {
        self.state.lock().pages.iter_mut().for_each(Pages::drop_all);
    }

    /// What was to be brought into the page cache since the last call, in order.
    pub fn take_advised(&self) -> Vec<Range<u64>> {
        self.state.lock().pages.as_mut().map(Pages::take_advised).unwrap_or_default()
    }

    /// Sets what goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
        self.changed.notify_all();
    }

    /// Forgets all bytes that are not on stable storage, as a machine that lost power.
    pub fn crash(&self) {
        for node in self.state.lock().nodes.values_mut() {
            node.bytes = node.stable.clone();
            node.attr.size_bytes = if node.attr.kind == Kind::File { node.bytes.len() as u64 } else { 0 };
        }
    }

    /// The reads and the writes since the last call, in order.
    pub fn take_calls(&self) -> (Calls, Calls) {
        let mut state = self.state.lock();
        (std::mem::take(&mut state.reads), std::mem::take(&mut state.writes))
    }

    /// Waits until so many calls hang.
    pub fn await_hung(&self, calls: usize) {
        drop(self.changed.wait_while(self.state.lock(), |state| state.waiting < calls));
    }

    /// The state, once `node` does not hang.
    fn on(&self, node: &Handle, data: bool) -> Guard<'_> {
        self.unless(|faults| faults.hung == Some(*node) || data && faults.data_hung)
    }

    /// The state, once it does not hang.
    fn unless(&self, hangs: impl Fn(&Faults) -> bool) -> Guard<'_> {
        let mut state = self.state.lock();
        if hangs(&state.faults) {
            state.waiting += 1;
            self.changed.notify_all();
            state = self.changed.wait_while(state, |state| hangs(&state.faults));
            state.waiting -= 1;
        }
        state
    }
}

impl State {
    fn add(&mut self, caller: &Caller, kind: Kind, parent: u64, set: &SetAttr) -> u64 {
        let (id, now) = (self.next, SystemTime::now());
        self.next += 1;
        let attr = Attr {
            kind,
            mode: set.mode.unwrap_or(if kind == Kind::Directory { 0o755 } else { 0o644 }),
            links: if kind == Kind::Directory { 2 } else { 1 },
            uid: set.uid.unwrap_or(caller.uid),
            gid: set.gid.unwrap_or(caller.gid),
            size_bytes: 0,
            used_bytes: 0,
            device: (0, 0),
            fsid: self.fsid,
            fileid: id,
            atime: now,
            mtime: now,
            ctime: now,
        };
        let node = Node {
            attr,
            bytes: Vec::new(),
            stable: Vec::new(),
            entries: BTreeMap::new(),
            names: BTreeMap::new(),
            parent,
            verifier: None,
            removed: false,
            held: 0,
        };
        self.nodes.insert(id, node);
        id
    }

    fn id(&self, node: &Handle) -> Result<u64> {
        let id = node.as_bytes().try_into().map(u64::from_be_bytes).map_err(|_| Errno(libc::ESTALE))?;
        match self.nodes.get(&id) {
            Some(node) if !node.removed || node.held > 0 => Ok(id),
            _ => err(libc::ESTALE),
        }
    }

    fn node(&mut self, id: u64) -> Result<&mut Node> {
        self.nodes.get_mut(&id).ok_or(Errno(libc::ESTALE))
    }

    fn dir(&mut self, caller: &Caller, dir: &Handle, wanted: u32) -> Result<u64> {
        let id = self.id(dir)?;
        let attr = &self.node(id)?.attr;
        match attr.kind {
            Kind::Directory if may(caller, attr, wanted) => Ok(id),
            Kind::Directory => err(libc::EACCES),
            _ => err(libc::ENOTDIR),
        }
    }

    fn child(&mut self, dir: u64, name: &[u8]) -> Result<Option<u64>> {
        let node = self.node(dir)?;
        let cookie = node.names.get(name).copied();
        Ok(cookie.and_then(|cookie| node.entries.get(&cookie)).map(|(_, id)| *id))
    }

    fn put(&mut self, dir: u64, name: &[u8], id: u64) -> Result<()> {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let node = self.node(dir)?;
        node.entries.insert(cookie, (name.into(), id));
        node.names.insert(name.into(), cookie);
        node.touch();
        Ok(())
    }

    fn take_out(&mut self, dir: u64, name: &[u8]) -> Result<()> {
        let node = self.node(dir)?;
        if let Some(cookie) = node.names.remove(name) {
            node.entries.remove(&cookie);
        }
        node.touch();
        Ok(())
    }

    fn unlink(&mut self, id: u64) -> Result<()> {
        let node = self.node(id)?;
        node.attr.links = node.attr.links.saturating_sub(1);
        node.attr.ctime = SystemTime::now();
        node.removed = node.attr.links == 0 || node.attr.kind == Kind::Directory;
        Ok(())
    }
}

impl Node {
    fn touch(&mut self) {
        // A file that was used is not what an EXCLUSIVE call made.
        self.verifier = None;
        self.attr.mtime = SystemTime::now();
        self.attr.ctime = self.attr.mtime;
    }

    fn resize(&mut self, len: usize) {
        self.bytes.resize(len, 0);
        self.attr.size_bytes = len as u64;
        self.attr.used_bytes = len as u64;
        self.touch();
    }
}

fn check_name(name: &[u8]) -> Result<()> {
    match () {
        () if name.is_empty() || name.contains(&b'/') || name.contains(&0) => err(libc::EINVAL),
        () if name.len() > NAME_MAX_BYTES => err(libc::ENAMETOOLONG),
        () => Ok(()),
    }
}

/// Of a name that must be one that can be removed.
fn check_old(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if name == b"." || name == b".." { err(libc::EINVAL) } else { Ok(()) }
}

fn check_new(name: &[u8]) -> Result<()> {
    check_name(name)?;
    if name == b"." || name == b".." { err(libc::EEXIST) } else { Ok(()) }
}

impl Backend for MemoryTree {
    fn root(&self) -> Result<Handle> {
        Ok(handle(ROOT))
    }

    fn lookup(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<Found> {
        let mut state = self.on(dir, false);
        let id = state.dir(caller, dir, 1)?;
        check_name(name)?;
        let found = match name {
            b"." => id,
            b".." => state.node(id)?.parent,
            _ => state.child(id, name)?.ok_or(Errno(libc::ENOENT))?,
        };
        Ok((handle(found), state.node(found)?.attr.clone()))
    }

    fn attr(&self, node: &Handle) -> Result<Attr> {
        let mut state = self.unless(|faults| faults.hung == Some(*node) || faults.attrs_hung);
        let id = state.id(node)?;
        Ok(state.node(id)?.attr.clone())
    }

    fn known_attr(&self, node: &Handle) -> Option<Attr> {
        let mut state = self.state.lock();
        let id = state.id(node).ok()?;
        Some(state.node(id).ok()?.attr.clone())
    }

    fn set_attr(&self, caller: &Caller, node: &Handle, set: &SetAttr) -> Result<Attr> {
        let mut state = self.on(node, false);
        let id = state.id(node)?;
        let node = state.node(id)?;
        let owner = caller.uid == 0 || caller.uid == node.attr.uid;
        if !owner && (set.mode.is_some() || set.uid.is_some() || set.gid.is_some())
            || set.uid.is_some_and(|uid| uid != node.attr.uid && caller.uid != 0)
        {
            return err(libc::EPERM);
        }
        if let Some(size) = set.size_bytes {
            if !owner && !may(caller, &node.attr, 2) {
                return err(libc::EACCES);
            }
            if node.attr.kind != Kind::File {
                return err(if node.attr.kind == Kind::Directory { libc::EISDIR } else { libc::EINVAL });
            }
            if size > CAPACITY_BYTES {
                return err(libc::EFBIG);
            }
            node.resize(size as usize);
            node.stable = node.bytes.clone();
        }
        let time = |time: SetTime| match time {
            SetTime::Now => SystemTime::now(),
            SetTime::To(time) => time,
        };
        let attr = &mut node.attr;
        attr.mode = set.mode.unwrap_or(attr.mode) & !set.takes;
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        attr.atime = set.atime.map_or(attr.atime, time);
        attr.mtime = set.mtime.map_or(attr.mtime, time);
        attr.ctime = SystemTime::now();
        let attr = attr.clone();
        node.verifier = None;
        Ok(attr)
    }

    fn access(&self, caller: &Caller, node: &Handle, wanted: u32) -> Result<u32> {
        let mut state = self.on(node, false);
        let id = state.id(node)?;
        let attr = &state.node(id)?.attr;
        Ok([1, 2, 4].into_iter().filter(|right| wanted & right != 0 && may(caller, attr, *right)).sum())
    }

    fn make(&self, caller: &Caller, dir: &Handle, name: &[u8], what: Make<'_>, set: &SetAttr) -> Result<Found> {
        let mut state = self.on(dir, false);
        let at = state.dir(caller, dir, 1)?;
        check_new(name)?;
        if let Some(there) = state.child(at, name)? {
            let node = state.node(there)?;
            let same = match what {
                Make::FileIfNone => node.attr.kind == Kind::File,
                Make::FileOnce(verifier) => node.verifier == Some(verifier),
                _ => false,
            };
            if what == Make::FileIfNone && node.attr.kind == Kind::Directory {
                return err(libc::EISDIR);
            }
            return if same { Ok((handle(there), node.attr.clone())) } else { err(libc::EEXIST) };
        }
        state.dir(caller, dir, 3)?;
        let (kind, device) = match what {
            Make::File | Make::FileIfNone | Make::FileOnce(_) => (Kind::File, (0, 0)),
            Make::Directory => (Kind::Directory, (0, 0)),
            Make::Symlink(_) => (Kind::Symlink, (0, 0)),
            Make::Fifo => (Kind::Fifo, (0, 0)),
            Make::Socket => (Kind::Socket, (0, 0)),
            Make::Block(major, minor) => (Kind::Block, (major, minor)),
            Make::Character(major, minor) => (Kind::Character, (major, minor)),
        };
        if matches!(kind, Kind::Block | Kind::Character) && caller.uid != 0 {
            return err(libc::EPERM);
        }
        let id = state.add(caller, kind, at, set);
        state.put(at, name, id)?;
        let node = state.node(id)?;
        node.attr.device = device;
        if let Make::Symlink(text) = what {
            node.bytes = text.to_vec();
            node.stable = text.to_vec();
            node.attr.size_bytes = text.len() as u64;
        }
        if let Make::FileOnce(verifier) = what {
            node.verifier = Some(verifier);
        }
        if let Some(size) = set.size_bytes.filter(|_| kind == Kind::File) {
            node.resize(size.min(CAPACITY_BYTES) as usize);
        }
        let attr = node.attr.clone();
        if kind == Kind::Directory {
            state.node(at)?.attr.links += 1;
        }
        Ok((handle(id), attr))
    }

    fn link(&self, caller: &Caller, node: &Handle, dir: &Handle, name: &[u8]) -> Result<Attr> {
        let mut state = self.on(dir, false);
        let (id, at) = (state.id(node)?, state.dir(caller, dir, 3)?);
        check_new(name)?;
        if state.child(at, name)?.is_some() {
            return err(libc::EEXIST);
        }
        if state.node(id)?.attr.kind == Kind::Directory {
            return err(libc::EPERM);
        }
        state.put(at, name, id)?;
        let node = state.node(id)?;
        node.attr.links += 1;
        node.attr.ctime = SystemTime::now();
        Ok(node.attr.clone())
    }

    fn remove(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        let mut state = self.on(dir, false);
        let at = state.dir(caller, dir, 3)?;
        check_old(name)?;
        let id = state.child(at, name)?.ok_or(Errno(libc::ENOENT))?;
        if state.node(id)?.attr.kind == Kind::Directory {
            return err(libc::EISDIR);
        }
        state.take_out(at, name)?;
        state.unlink(id)
    }

    fn remove_dir(&self, caller: &Caller, dir: &Handle, name: &[u8]) -> Result<()> {
        let mut state = self.on(dir, false);
        let at = state.dir(caller, dir, 3)?;
        check_old(name)?;
        let id = state.child(at, name)?.ok_or(Errno(libc::ENOENT))?;
        let node = state.node(id)?;
        match () {
            () if node.attr.kind != Kind::Directory => return err(libc::ENOTDIR),
            () if !node.names.is_empty() => return err(libc::ENOTEMPTY),
            () => {}
        }
        state.take_out(at, name)?;
        state.node(at)?.attr.links -= 1;
        state.unlink(id)
    }

    fn rename(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        let mut state = self.on(from.0, false);
        let (old, new) = (state.dir(caller, from.0, 3)?, state.dir(caller, to.0, 3)?);
        check_old(from.1)?;
        check_old(to.1)?;
        let id = state.child(old, from.1)?.ok_or(Errno(libc::ENOENT))?;
        let is_dir = state.node(id)?.attr.kind == Kind::Directory;
        let mut above = new;
        while is_dir && above != ROOT {
            if above == id {
                return err(libc::EINVAL);
            }
            above = state.node(above)?.parent;
        }
        if let Some(there) = state.child(new, to.1)? {
            if there == id {
                return Ok(());
            }
            let node = state.node(there)?;
            match (is_dir, node.attr.kind == Kind::Directory) {
                (true, false) => return err(libc::ENOTDIR),
                (false, true) => return err(libc::EISDIR),
                (true, true) if !node.names.is_empty() => return err(libc::ENOTEMPTY),
                _ => {}
            }
            state.take_out(new, to.1)?;
            state.unlink(there)?;
        }
        state.take_out(old, from.1)?;
        state.put(new, to.1, id)?;
        if is_dir {
            state.node(old)?.attr.links -= 1;
            state.node(new)?.attr.links += 1;
            state.node(id)?.parent = new;
        }
        Ok(())
    }

    fn rename_new(&self, caller: &Caller, from: (&Handle, &[u8]), to: (&Handle, &[u8])) -> Result<()> {
        match self.lookup(caller, to.0, to.1) {
            Ok(_) => err(libc::EEXIST),
            Err(Errno(libc::ENOENT)) => self.rename(caller, from, to),
            Err(error) => Err(error),
        }
    }

    fn hold(&self, node: &Handle) -> Result<()> {
        let mut state = self.on(node, false);
        let id = state.id(node)?;
        state.node(id)?.held += 1;
        Ok(())
    }

    fn release(&self, node: &Handle) {
        let mut state = self.state.lock();
        if let Some(node) = node.as_bytes().try_into().ok().and_then(|id| state.nodes.get_mut(&u64::from_be_bytes(id)))
        {
            node.held = node.held.saturating_sub(1);
        }
    }

    fn read_link(&self, _caller: &Caller, node: &Handle) -> Result<Vec<u8>> {
        let mut state = self.on(node, false);
        let id = state.id(node)?;
        let node = state.node(id)?;
        if node.attr.kind == Kind::Symlink { Ok(node.bytes.clone()) } else { err(libc::EINVAL) }
    }

    fn read_dir(&self, caller: &Caller, dir: &Handle, cookie: u64, most: usize) -> Result<(Vec<DirEntry>, bool)> {
        let mut state = self.on(dir, false);
        let id = state.dir(caller, dir, 4)?;
        let node = state.node(id)?;
        let own = [(1, b".".to_vec(), id), (2, b"..".to_vec(), node.parent)];
        let others = node.entries.range(cookie.max(2) + 1..).map(|(cookie, (name, id))| (*cookie, name.clone(), *id));
        let mut all = own.into_iter().filter(|(at, ..)| *at > cookie).chain(others);
        let entries = all.by_ref().take(most).map(|(cookie, name, fileid)| DirEntry { name, fileid, cookie }).collect();
        Ok((entries, all.next().is_none()))
    }

    fn read(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Result<usize> {
        let mut state = self.on(file, true);
        let id = state.id(file)?;
        state.reads.push((offset, into.len()));
        let bad = state.faults.bad_byte.is_some_and(|bad| (offset..offset + into.len() as u64).contains(&bad));
        state.pages.iter_mut().for_each(|pages| pages.bring(id, offset..offset + into.len() as u64));
        let node = state.node(id)?;
        match () {
            () if node.attr.kind == Kind::Directory => err(libc::EISDIR),
            () if node.attr.kind != Kind::File => err(libc::EINVAL),
            () if caller.uid != node.attr.uid && !may(caller, &node.attr, 4) => err(libc::EACCES),
            () if bad => err(libc::EIO),
            () => {
                let from = (offset as usize).min(node.bytes.len());
                let got = into.len().min(node.bytes.len() - from);
                into[..got].copy_from_slice(&node.bytes[from..from + got]);
                Ok(got)
            }
        }
    }

    fn write(&self, caller: &Caller, file: &Handle, offset: u64, bytes: &[u8], stable: bool) -> Result<()> {
        let mut state = self.on(file, true);
        let id = state.id(file)?;
        state.writes.push((offset, bytes.len()));
        if let Some(errno) = state.faults.write_errno {
            return err(errno);
        }
        let node = state.node(id)?;
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= CAPACITY_BYTES);
        match () {
            () if node.attr.kind == Kind::Directory => return err(libc::EISDIR),
            () if node.attr.kind != Kind::File => return err(libc::EINVAL),
            () if caller.uid != node.attr.uid && !may(caller, &node.attr, 2) => return err(libc::EACCES),
            () => {}
        }
        let end = end.ok_or(Errno(libc::EFBIG))? as usize;
        state.pages.iter_mut().for_each(|pages| pages.bring(id, offset..end as u64));
        let node = state.node(id)?;
        if end > node.bytes.len() {
            node.resize(end);
        }
        node.bytes[offset as usize..end].copy_from_slice(bytes);
        node.touch();
        if stable {
            if node.stable.len() < end {
                node.stable.resize(end, 0);
            }
            node.stable[offset as usize..end].copy_from_slice(bytes);
        }
        Ok(())
    }

    fn change_space(
        &self,
        caller: &Caller,
        file: &Handle,
        change: SpaceChange,
        offset: u64,
        len_bytes: u64,
    ) -> Result<()> {
        let end = offset.checked_add(len_bytes).filter(|end| *end <= CAPACITY_BYTES).ok_or(Errno(libc::EFBIG))?;
        let (zeros, keep_size) = match change {
            SpaceChange::Allocate { keep_size } => (false, keep_size),
            SpaceChange::Punch => (true, true),
            SpaceChange::Zero { keep_size } => (true, keep_size),
        };
        // An empty write checks the rights.
        self.write(caller, file, offset, &[], false)?;
        let mut state = self.on(file, true);
        let id = state.id(file)?;
        let node = state.node(id)?;
        let size = node.bytes.len();
        let within = size.min(offset as usize)..size.min(end as usize);
        if zeros {
            node.bytes[within].fill(0);
        }
        if !keep_size && size < end as usize {
            node.resize(end as usize);
        }
        node.touch();
        Ok(())
    }

    fn seek(&self, caller: &Caller, file: &Handle, from: u64, data: bool) -> Result<Option<u64>> {
        self.read(caller, file, 0, &mut [])?;
        let size = self.attr(file)?.size_bytes;
        Ok((from < size).then_some(if data { from } else { size }))
    }

    fn sync(&self, file: &Handle) -> Result<()> {
        let hangs = |faults: &Faults| {
            [faults.hung, faults.sync_hung].contains(&Some(*file)) || faults.data_hung || faults.syncs_hung
        };
        let mut state = self.unless(hangs);
        let id = state.id(file)?;
        if let Some(errno) = state.faults.sync_errno {
            return err(errno);
        }
        let node = state.node(id)?;
        node.stable = node.bytes.clone();
        Ok(())
    }

    fn sync_all(&self) -> Result<Lost> {
        let mut state = self.unless(|faults| faults.data_hung || faults.syncs_hung);
        if let Some(errno) = state.faults.sync_errno {
            return err(errno);
        }
        state.nodes.values_mut().for_each(|node| node.stable = node.bytes.clone());
        Ok(Lost { files: Some(Vec::new()), any: 0 })
    }

    fn space(&self, node: &Handle) -> Result<Space> {
        let state = self.on(node, false);
        state.id(node)?;
        let used: u64 = state.nodes.values().map(|node| node.bytes.len() as u64).sum();
        let free_bytes = CAPACITY_BYTES.saturating_sub(used);
        Ok(Space {
            total_bytes: CAPACITY_BYTES,
            free_bytes,
            available_bytes: free_bytes,
            total_files: 1 << 20,
            free_files: (1 << 20) - state.nodes.len() as u64,
            name_max_bytes: NAME_MAX_BYTES as u32,
            links_max: 1000,
        })
    }

    fn placement(&self, _file: &Handle) -> Result<Placement> {
        Ok(Placement::one(0))
    }

    /// Never hangs: nothing is waited for.
    fn read_cached(&self, caller: &Caller, file: &Handle, offset: u64, into: &mut [u8]) -> Option<Result<usize>> {
        let mut state = self.state.lock();
        let id = state.id(file).ok()?;
        let node = state.nodes.get(&id)?;
        let may = node.attr.kind == Kind::File && (caller.uid == node.attr.uid || may(caller, &node.attr, 4));
        let end = offset.saturating_add(into.len() as u64).min(node.bytes.len() as u64);
        let has = state.pages.as_ref()?.have(id, offset..end);
        let bytes = state.node(id).ok()?.bytes.get(offset as usize..end.max(offset) as usize).unwrap_or_default();
        into.get_mut(..bytes.len())?.copy_from_slice(bytes);
        (may && has).then_some(Ok(bytes.len()))
    }

    fn will_read(&self, file: &Handle, offset: u64, len_bytes: u64) {
        let mut state = self.state.lock();
        if let Ok(id) = state.id(file) {
            state.pages.iter_mut().for_each(|pages| pages.advise(id, offset..offset.saturating_add(len_bytes)));
        }
    }

    fn has_page_cache(&self) -> bool {
        self.state.lock().pages.is_some()
    }
}
