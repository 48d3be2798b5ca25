//! A file system in memory that forgets everything unsynced at a crash, for tests of durability.
//!
//! It is as strict as POSIX allows. `sync` of a file makes its content and length durable but not its name. Only
//! `sync_dir` makes names durable: created, removed and changed ones. A directory itself is a name in its parent.
//!
//! A failed `sync` is as on Linux: what should have been written counts as written, so that the next `sync` succeeds and a
//! crash still loses it; and every open file is told of the failure once, one opened later only if no other was. The file system as a
//! whole tells of failures once ([`FileSystem::has_lost`]), whatever it has told of single files.
//!
//! [`Forgetful::crash`] forgets all that is not durable; [`Forgetful::crash_partly`] lets any part of it survive, since
//! a file system may write out data at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use impresario_base::lock::{Mutex, MutexGuard};
use impresario_base::random::Random;

use rustix::io::Errno;

use crate::filesystem::{FileState, FileSystem, SpaceState};

/// The file system. Clones share one state, so that a test can crash the one that a store has.
#[derive(Clone)]
pub struct Forgetful {
    state: Arc<Mutex<State>>,
    before_unlink: Arc<Mutex<Option<(String, Hook)>>>,
}

type Hook = Box<dyn FnOnce() + Send>;

/// A place in the code that syncs: file, line and column.
pub type SyncSite = (&'static str, u32, u32);

/// An open file; after a crash every operation on it fails.
#[derive(Debug)]
pub struct ForgetfulFile {
    inode: usize,
    crashes: u64,
    /// The failures of the inode that it has been told of.
    told: AtomicU64,
}

#[derive(Clone)]
struct State {
    inodes: Vec<Inode>,
    now: Names,
    durable: Names,
    crashes: u64,
    capacity_bytes: u64,
    fail_syncs: bool,
    sites: BTreeSet<SyncSite>,
    ignored: Option<SyncSite>,
    trouble: Option<Trouble>,
    troubles: u64,
    /// Pages of inodes that cannot be read.
    broken: BTreeSet<(usize, u64)>,
    /// The failures of all inodes when [`FileSystem::has_lost`] was asked last.
    told_of_all: u64,
    ticks: i64,
}

/// What is to fail.
#[derive(Clone, Copy)]
struct Trouble {
    /// After so many more changes and syncs.
    left: u64,
    errno: Errno,
    /// All of them from then on, until a crash; otherwise one.
    lasts: bool,
}

#[derive(Clone, Default)]
struct Names {
    files: BTreeMap<String, usize>,
    /// Shared as long as they are the same: a store has hundreds, and a copy is made at every crash.
    dirs: Arc<BTreeSet<String>>,
}

#[derive(Clone, Default)]
struct Inode {
    now: Vec<u8>,
    durable: Vec<u8>,
    /// Blocks that a sync has to write.
    dirty: BTreeSet<usize>,
    /// Blocks that have storage, also behind the end; the others are holes.
    stored: BTreeSet<usize>,
    /// Failed syncs, and how many some open file has been told of.
    failures: u64,
    seen: u64,
    mtime_secs: i64,
}

impl Inode {
    /// A sync that works: what is dirty, and the length, become durable.
    fn write_back(&mut self) {
        self.durable.resize(self.now.len(), 0);
        for block in std::mem::take(&mut self.dirty) {
            let start = (block * BLOCK_BYTES).min(self.now.len());
            let end = (start + BLOCK_BYTES).min(self.now.len());
            self.durable[start..end].copy_from_slice(&self.now[start..end]);
        }
    }

    fn soil(&mut self, start: usize, end: usize) {
        if start < end {
            self.dirty.extend(start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES));
        }
    }

    fn store(&mut self, start: usize, end: usize) {
        if start < end {
            self.stored.extend(start / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES));
        }
    }

    /// The first byte from `offset` on whose block has storage, or has none.
    fn next(&self, offset: u64, stored: bool) -> Option<u64> {
        let blocks = self.now.len().div_ceil(BLOCK_BYTES);
        let first = usize::try_from(offset).ok().filter(|offset| *offset < self.now.len())? / BLOCK_BYTES;
        let found = (first..blocks).find(|block| self.stored.contains(block) == stored)?;
        Some(offset.max((found * BLOCK_BYTES) as u64))
    }
}

/// What cannot be read when a byte of it cannot.
const PAGE_BYTES: u64 = 4096;
/// The unit that a device writes atomically: a part of a write may survive in units of this.
const BLOCK_BYTES: usize = 512;

impl Default for Forgetful {
    fn default() -> Self {
        Forgetful::new(64 << 20)
    }
}

impl Forgetful {
    /// An empty directory on a device of `capacity_bytes`, all kept in memory: keep it small. If that is whole blocks of 512 bytes,
    /// a write that finds too little space ends with one.
    pub fn new(capacity_bytes: u64) -> Forgetful {
        let (now, durable) = (Names::default(), Names::default());
        let state = State {
            inodes: Vec::new(),
            now,
            durable,
            crashes: 0,
            capacity_bytes,
            fail_syncs: false,
            sites: BTreeSet::new(),
            ignored: None,
            trouble: None,
            troubles: 0,
            broken: BTreeSet::new(),
            told_of_all: 0,
            ticks: 0,
        };
        Forgetful::of(state)
    }

    fn of(state: State) -> Forgetful {
        Forgetful { state: Arc::new(Mutex::new(state)), before_unlink: Arc::default() }
    }

    /// Runs `hook` once, before the next removal of this path: what happens between two steps of the code under test.
    pub fn before_unlink(&self, path: &str, hook: impl FnOnce() + Send + 'static) {
        *self.before_unlink.lock() = Some((path.into(), Box::new(hook)));
    }

    /// A power failure: forgets everything that is not durable.
    pub fn crash(&self) {
        self.lock().crash(|| false);
    }

    /// A power failure: of what is not durable, each name, length and block survives or not as a random draw from
    /// `seed` decides.
    pub fn crash_partly(&self, seed: u64) {
        let mut random = Random::new(seed);
        self.lock().crash(|| random.below(2) == 1);
    }

    /// Makes every sync of a file with something to write fail with EIO, and every sync of a directory, or ends that.
    pub fn fail_syncs(&self, fail: bool) {
        self.lock().fail_syncs = fail;
    }

    /// Where the code has synced anything since the beginning.
    pub fn sync_sites(&self) -> BTreeSet<SyncSite> {
        self.lock().sites.clone()
    }

    /// From now on the syncs of one place in the code do nothing, as if they were not there.
    pub fn ignore_syncs_of(&self, site: Option<SyncSite>) {
        self.lock().ignored = site;
    }

    /// After this many more changes and syncs every one fails with EIO until the next crash: to stop a server at any
    /// point.
    pub fn stop_after(&self, changes: u64) {
        self.lock().trouble = Some(Trouble { left: changes, errno: Errno::IO, lasts: true });
    }

    /// After this many more changes and syncs one fails with `errno` and does nothing, or, if `lasts`, every one until the next
    /// crash or [`Forgetful::mend`]: a file system that has become read-only, say.
    pub fn fail_after(&self, changes: u64, errno: i32, lasts: bool) {
        self.lock().trouble = Some(Trouble { left: changes, errno: Errno::from_raw_os_error(errno), lasts });
    }

    /// Ends what [`Forgetful::stop_after`] or [`Forgetful::fail_after`] began: the next server finds what the last one left.
    pub fn mend(&self) {
        self.lock().trouble = None;
    }

    /// How often something has failed that should not: changes, syncs, and blocks written in the background.
    pub fn troubles(&self) -> u64 {
        self.lock().troubles
    }

    /// The system writes some of what is dirty by itself, as a random draw from `seed` decides. If it `fails`, these blocks count
    /// as written, as on Linux, and the next sync by each open file says so.
    pub fn write_back(&self, seed: u64, fails: bool) {
        let (mut random, mut state) = (Random::new(seed), self.lock());
        let mut troubles = 0;
        for inode in &mut state.inodes {
            let chosen: Vec<usize> = inode.dirty.iter().copied().filter(|_| random.below(2) == 0).collect();
            for block in &chosen {
                inode.dirty.remove(block);
                let start = (block * BLOCK_BYTES).min(inode.now.len());
                let end = (start + BLOCK_BYTES).min(inode.now.len());
                if !fails && start < end {
                    inode.durable.resize(inode.durable.len().max(end), 0);
                    inode.durable[start..end].copy_from_slice(&inode.now[start..end]);
                }
            }
            if fails && !chosen.is_empty() {
                inode.failures += 1;
                troubles += 1;
            }
        }
        state.troubles += troubles;
    }

    /// Another file system with the same in memory and on its device.
    pub fn copied(&self) -> Forgetful {
        Forgetful::of(self.lock().clone())
    }

    /// Reads that touch a byte of a file fail with EIO from now on: its device cannot read the page there.
    pub fn break_page(&self, path: &str, at: u64) {
        let mut state = self.lock();
        let inode = state.now.files.get(path).copied();
        state.broken.extend(inode.map(|inode| (inode, at / PAGE_BYTES)));
    }

    /// A bit rots: inverts bits of a byte, in memory and on the device, and no sync has to write it. False if there is no
    /// such byte.
    pub fn rot(&self, path: &str, at: u64, mask: u8) -> bool {
        let mut state = self.lock();
        let Some(&inode) = state.now.files.get(path) else { return false };
        let Some(inode) = state.inodes.get_mut(inode) else { return false };
        let at = at as usize;
        let Some(byte) = inode.now.get_mut(at) else { return false };
        *byte ^= mask;
        inode.durable.get_mut(at).into_iter().for_each(|byte| *byte ^= mask);
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Counts a change or a sync; an error if it may not happen any more.
    fn change(&mut self) -> io::Result<()> {
        self.ticks += 1;
        match &mut self.trouble {
            None => return Ok(()),
            Some(trouble) if trouble.left > 0 => {
                trouble.left -= 1;
                return Ok(());
            }
            Some(_) => {}
        }
        let errno = self.trouble.map_or(Errno::IO, |trouble| trouble.errno);
        self.trouble = self.trouble.filter(|trouble| trouble.lasts);
        self.troubles += 1;
        Err(errno.into())
    }

    /// Notes a sync of this place in the code; true if it is to do nothing.
    fn ignores(&mut self, site: &Location<'static>) -> bool {
        let site = (site.file(), site.line(), site.column());
        self.sites.insert(site);
        self.ignored == Some(site)
    }

    fn inode(&mut self, file: &ForgetfulFile) -> io::Result<&mut Inode> {
        if file.crashes != self.crashes {
            return Err(Errno::IO.into());
        }
        self.inodes.get_mut(file.inode).ok_or_else(|| Errno::BADF.into())
    }

    /// Fails as the name's directory would.
    fn check_parent(&self, path: &str) -> io::Result<()> {
        let there = parent(path).is_empty() || self.now.dirs.contains(parent(path));
        if there { Ok(()) } else { Err(Errno::NOENT.into()) }
    }

    fn used_bytes(&self) -> u64 {
        self.now.files.values().map(|&inode| self.inodes[inode].now.len() as u64).sum()
    }

    /// Bytes by which the files together may still grow.
    fn room(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.used_bytes())
    }

    fn crash(&mut self, mut survives: impl FnMut() -> bool) {
        self.crashes += 1;
        (self.trouble, self.told_of_all) = (None, 0);
        let (now, old) = (std::mem::take(&mut self.now), std::mem::take(&mut self.durable));
        let mut files = BTreeMap::new();
        for name in now.files.keys().chain(old.files.keys()).collect::<BTreeSet<_>>() {
            let (new, old) = (now.files.get(name), old.files.get(name));
            let kept = if new != old && survives() { new } else { old };
            kept.map(|&inode| files.insert(name.clone(), inode));
        }
        let mut dirs = old.dirs;
        if !Arc::ptr_eq(&now.dirs, &dirs) {
            let made: Vec<String> = now.dirs.difference(&dirs).filter(|_| survives()).cloned().collect();
            Arc::make_mut(&mut dirs).extend(made);
        }
        // A name whose directory is lost is lost with it.
        let reachable = |path: &str| ancestors(path).all(|dir| dirs.contains(dir));
        files.retain(|path, _| reachable(path));
        if !Arc::ptr_eq(&now.dirs, &dirs) {
            dirs = Arc::new(dirs.iter().filter(|path| reachable(path)).cloned().collect());
        }
        self.now = Names { files, dirs };
        self.durable = self.now.clone();
        for inode in &mut self.inodes {
            let len = if survives() { inode.now.len() } else { inode.durable.len() };
            let mut content = inode.durable.clone();
            content.resize(len, 0);
            let dirty = std::mem::take(&mut inode.dirty);
            for (number, (block, new)) in content.chunks_mut(BLOCK_BYTES).zip(inode.now.chunks(BLOCK_BYTES)).enumerate()
            {
                let common = block.len().min(new.len());
                if dirty.contains(&number) && block[..common] != new[..common] && survives() {
                    block[..common].copy_from_slice(&new[..common]);
                }
            }
            (inode.now, inode.durable) = (content.clone(), content);
            // What was not told before is forgotten with the machine's memory.
            (inode.failures, inode.seen) = (0, 0);
            // A hole that did not survive, or came back, says nothing of what it holds.
            inode.stored = (0..inode.now.len().div_ceil(BLOCK_BYTES)).collect();
        }
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

/// The directories that contain a path, without the top.
fn ancestors(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('/').map(|(i, _)| &path[..i])
}

impl FileSystem for Forgetful {
    type File = ForgetfulFile;

    fn open(&self, path: &str, create: bool) -> io::Result<ForgetfulFile> {
        let mut state = self.lock();
        state.check_parent(path)?;
        let inode = match state.now.files.get(path) {
            Some(&inode) => inode,
            None if !create => return Err(Errno::NOENT.into()),
            None => {
                state.change()?;
                let inode = state.inodes.len();
                state.inodes.push(Inode::default());
                state.now.files.insert(path.into(), inode);
                inode
            }
        };
        let told = state.inodes.get(inode).map_or(0, |found| found.seen);
        Ok(ForgetfulFile { inode, crashes: state.crashes, told: AtomicU64::new(told) })
    }

    fn read(&self, file: &ForgetfulFile, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let mut state = self.lock();
        let wanted: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        let pages = offset / PAGE_BYTES..offset.saturating_add(wanted).div_ceil(PAGE_BYTES);
        if state.broken.iter().any(|(inode, page)| *inode == file.inode && pages.contains(page)) {
            return Err(Errno::IO.into());
        }
        let content = &state.inode(file)?.now;
        let mut at = usize::try_from(offset).map_or(content.len(), |offset| offset.min(content.len()));
        let start = at;
        for buf in bufs {
            let len = buf.len().min(content.len() - at);
            buf[..len].copy_from_slice(&content[at..at + len]);
            at += len;
        }
        Ok(at - start)
    }

    fn read_cached(&self, file: &ForgetfulFile, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        self.read(file, offset, bufs).map(Some)
    }

    /// Takes as much as there is space for, as a real one does: the call that follows a short one fails.
    fn write(&self, file: &ForgetfulFile, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut state = self.lock();
        state.change()?;
        let (room, ticks, capacity_bytes) = (state.room(), state.ticks, state.capacity_bytes);
        let inode = state.inode(file)?;
        let wanted: u64 = bufs.iter().map(|buf| buf.len() as u64).sum();
        // A device of whole blocks gives whole ones.
        let unit = if capacity_bytes.is_multiple_of(BLOCK_BYTES as u64) { BLOCK_BYTES as u64 } else { 1 };
        let most = ((inode.now.len() as u64 + room) / unit * unit).max(inode.now.len() as u64);
        if offset >= most && wanted > 0 {
            return Err(Errno::NOSPC.into());
        }
        let len = wanted.min(most - offset) as usize;
        let at = offset as usize;
        let before = inode.now.len();
        if before < at + len {
            inode.now.resize(at + len, 0);
        }
        // A hole below a write is zeros on the device too, whatever was there before the file was cut.
        inode.soil(before.min(at), at + len);
        inode.store(at, at + len);
        let mut rest = &mut inode.now[at..at + len];
        for buf in bufs {
            let (to, behind) = rest.split_at_mut(buf.len().min(rest.len()));
            to.copy_from_slice(&buf[..to.len()]);
            rest = behind;
        }
        inode.mtime_secs = ticks;
        Ok(len)
    }

    fn set_len(&self, file: &ForgetfulFile, len: u64) -> io::Result<()> {
        let mut state = self.lock();
        state.change()?;
        let (room, ticks) = (state.room(), state.ticks);
        let inode = state.inode(file)?;
        if len > inode.now.len() as u64 + room {
            return Err(Errno::NOSPC.into());
        }
        let before = inode.now.len();
        inode.now.resize(len as usize, 0);
        // The end of the last block that stays is zeroed, and what is added.
        inode.soil(before.min(len as usize) / BLOCK_BYTES * BLOCK_BYTES, len as usize);
        inode.stored.split_off(&(len as usize).div_ceil(BLOCK_BYTES));
        inode.mtime_secs = ticks;
        Ok(())
    }

    fn allocate(&self, file: &ForgetfulFile, range: Range<u64>, keep_size: bool) -> io::Result<()> {
        let mut state = self.lock();
        state.change()?;
        let (room, ticks) = (state.room(), state.ticks);
        let inode = state.inode(file)?;
        if range.end > inode.now.len() as u64 + room {
            return Err(Errno::NOSPC.into());
        }
        let (start, end, before) = (range.start as usize, range.end as usize, inode.now.len());
        inode.store(start, end);
        if !keep_size && end > before {
            inode.now.resize(end, 0);
            inode.soil(before, end);
        }
        inode.mtime_secs = ticks;
        Ok(())
    }

    /// Zeros, like those of a write, become durable in any order of blocks.
    fn punch(&self, file: &ForgetfulFile, range: Range<u64>) -> io::Result<()> {
        let mut state = self.lock();
        state.change()?;
        let ticks = state.ticks;
        let inode = state.inode(file)?;
        let len = inode.now.len();
        let within = |at: u64| usize::try_from(at).map_or(len, |at| at.min(len));
        let (start, end) = (within(range.start), within(range.end));
        inode.now.get_mut(start..end).into_iter().for_each(|bytes| bytes.fill(0));
        inode.soil(start, end);
        let whole = range.start.div_ceil(BLOCK_BYTES as u64)..range.end / BLOCK_BYTES as u64;
        inode.stored.retain(|block| !whole.contains(&(*block as u64)));
        inode.mtime_secs = ticks;
        Ok(())
    }

    fn next_data(&self, file: &ForgetfulFile, offset: u64) -> io::Result<Option<u64>> {
        Ok(self.lock().inode(file)?.next(offset, true))
    }

    fn next_hole(&self, file: &ForgetfulFile, offset: u64) -> io::Result<u64> {
        let mut state = self.lock();
        let inode = state.inode(file)?;
        Ok(inode.next(offset, false).unwrap_or((inode.now.len() as u64).max(offset)))
    }

    #[track_caller]
    fn sync(&self, file: &ForgetfulFile) -> io::Result<()> {
        let mut state = self.lock();
        state.change()?;
        if state.ignores(Location::caller()) {
            return Ok(());
        }
        let fails = state.fail_syncs;
        let inode = state.inode(file)?;
        let has_failed = fails && (!inode.dirty.is_empty() || inode.durable.len() != inode.now.len());
        if has_failed {
            // Marked as written all the same.
            inode.dirty.clear();
            inode.failures += 1;
        } else {
            inode.write_back();
        }
        let is_news = file.told.swap(inode.failures, Ordering::Relaxed) != inode.failures;
        if is_news {
            inode.seen = inode.failures;
        }
        state.troubles += u64::from(has_failed);
        if is_news { Err(Errno::IO.into()) } else { Ok(()) }
    }

    #[track_caller]
    fn sync_data(&self, file: &ForgetfulFile) -> io::Result<()> {
        self.sync(file)
    }

    fn stat(&self, file: &ForgetfulFile) -> io::Result<FileState> {
        let mut state = self.lock();
        let inode = state.inode(file)?;
        let size = inode.now.len() as u64;
        let used_bytes = (inode.stored.len() * BLOCK_BYTES) as u64;
        Ok(FileState { size, mtime_secs: inode.mtime_secs, mtime_nanos: 0, used_bytes })
    }

    fn unlink(&self, path: &str) -> io::Result<()> {
        let hook = self.before_unlink.lock().take_if(|(of, _)| of == path);
        if let Some((_, hook)) = hook {
            hook();
        }
        let mut state = self.lock();
        state.change()?;
        state.now.files.remove(path).map(drop).ok_or_else(|| Errno::NOENT.into())
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.lock();
        state.check_parent(to)?;
        state.change()?;
        let inode = state.now.files.remove(from).ok_or(Errno::NOENT)?;
        state.now.files.insert(to.into(), inode);
        Ok(())
    }

    fn make_dir(&self, path: &str) -> io::Result<()> {
        let mut state = self.lock();
        state.check_parent(path)?;
        state.change()?;
        if !state.now.dirs.contains(path) {
            Arc::make_mut(&mut state.now.dirs).insert(path.into());
        }
        Ok(())
    }

    #[track_caller]
    fn sync_dir(&self, path: &str) -> io::Result<()> {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.change()?;
        if state.ignores(Location::caller()) {
            return Ok(());
        }
        if state.fail_syncs {
            state.troubles += 1;
            return Err(Errno::IO.into());
        }
        let inside = |name: &str| parent(name) == path;
        state.durable.files.retain(|name, _| !inside(name));
        let files = state.now.files.iter().filter(|(name, _)| inside(name));
        state.durable.files.extend(files.map(|(name, &inode)| (name.clone(), inode)));
        if !Arc::ptr_eq(&state.now.dirs, &state.durable.dirs) {
            let dirs = Arc::make_mut(&mut state.durable.dirs);
            dirs.retain(|name| !inside(name));
            dirs.extend(state.now.dirs.iter().filter(|name| inside(name)).cloned());
            if *dirs == *state.now.dirs {
                state.durable.dirs = state.now.dirs.clone();
            }
        }
        Ok(())
    }

    fn names(&self, dir: &str) -> io::Result<Vec<String>> {
        let state = self.lock();
        let names = state.now.files.keys().chain(state.now.dirs.iter()).filter(|name| parent(name) == dir);
        Ok(names.map(|name| name.rsplit('/').next().unwrap_or(name).to_string()).collect())
    }

    fn stat_name(&self, path: &str) -> io::Result<FileState> {
        self.stat(&self.open(path, false)?)
    }

    fn space(&self) -> io::Result<SpaceState> {
        let state = self.lock();
        let files = state.now.files.len() as u64;
        Ok(SpaceState {
            file_system: None,
            total_bytes: state.capacity_bytes,
            free_bytes: state.room(),
            files,
            files_free: u64::MAX - files,
        })
    }

    fn may_lose(&self) -> bool {
        true
    }

    /// Weaker than a real one: it writes nothing.
    fn has_lost(&self) -> bool {
        let mut state = self.lock();
        let failures = state.inodes.iter().map(|inode| inode.failures).sum();
        std::mem::replace(&mut state.told_of_all, failures) != failures
    }

    fn boot(&self) -> u64 {
        self.lock().crashes + 1
    }

    fn in_memory(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(fs: &Forgetful, path: &str, text: &str) -> ForgetfulFile {
        let file = fs.open(path, true).unwrap();
        fs.set_len(&file, 0).unwrap();
        assert_eq!(fs.write(&file, 0, &[IoSlice::new(text.as_bytes())]).unwrap(), text.len());
        file
    }

    fn get(fs: &Forgetful, path: &str) -> Option<String> {
        let file = fs.open(path, false).ok()?;
        let mut buf = [0; 100];
        let len = fs.read(&file, 0, &mut [IoSliceMut::new(&mut buf)]).unwrap();
        Some(String::from_utf8_lossy(&buf[..len]).into_owned())
    }

    #[test]
    fn a_crash_keeps_what_was_synced_and_nothing_else() {
        let fs = Forgetful::default();
        fs.make_dir("d").unwrap();
        let file = put(&fs, "d/named", "content");
        fs.sync(&file).unwrap();
        put(&fs, "d/empty", "content");
        fs.sync_dir("d").unwrap();
        fs.sync(&put(&fs, "d/nameless", "content")).unwrap();
        put(&fs, "d/named", "newer");
        assert_eq!(get(&fs, "d/named").as_deref(), Some("newer"));
        let unsynced_dir = fs.clone();
        fs.sync_dir("").unwrap();
        fs.crash();
        assert_eq!(get(&fs, "d/named").as_deref(), Some("content"));
        assert_eq!(get(&fs, "d/empty").as_deref(), Some(""), "a name without its content");
        assert_eq!(get(&fs, "d/nameless"), None);
        assert!(unsynced_dir.sync(&file).is_err(), "open files do not outlive a crash");
    }

    #[test]
    fn every_open_file_is_told_of_a_failed_sync_once_and_the_data_are_lost() {
        let fs = Forgetful::default();
        let file = put(&fs, "a", "first");
        fs.sync(&file).unwrap();
        fs.sync_dir("").unwrap();
        let other = put(&fs, "a", "other");
        fs.fail_syncs(true);
        assert!(fs.sync(&file).is_err());
        fs.fail_syncs(false);
        fs.sync(&file).expect("told once");
        assert!(fs.sync(&other).is_err(), "it was open, too");
        fs.sync(&other).unwrap();
        fs.sync(&fs.open("a", false).unwrap()).expect("opened later, and others were told");
        assert_eq!(get(&fs, "a").as_deref(), Some("other"), "still in memory");
        fs.crash();
        assert_eq!(get(&fs, "a").as_deref(), Some("first"));
        let file = put(&fs, "a", "again");
        fs.fail_syncs(true);
        assert!(fs.sync(&file).is_err());
        fs.fail_syncs(false);
        fs.sync(&put(&fs, "a", "third")).unwrap();
        fs.crash();
        assert_eq!(get(&fs, "a").as_deref(), Some("third"), "written again");
    }

    #[test]
    fn what_the_system_could_not_write_counts_as_written_and_is_told_once() {
        let whole = |fs: &Forgetful| {
            let mut bytes = vec![0; 10_000];
            let file = fs.open("a", false).unwrap();
            assert_eq!(fs.read(&file, 0, &mut [IoSliceMut::new(&mut bytes)]).unwrap(), bytes.len());
            String::from_utf8(bytes).unwrap()
        };
        let fs = Forgetful::default();
        let file = put(&fs, "a", &"first".repeat(2000));
        fs.sync(&file).unwrap();
        fs.sync_dir("").unwrap();
        let other = put(&fs, "a", &"other".repeat(2000));
        fs.write_back(1, true);
        assert_eq!(fs.troubles(), 1);
        for file in [&file, &other] {
            assert!(fs.sync(file).is_err());
            fs.sync(file).expect("told once");
        }
        let lost = fs.copied();
        lost.crash();
        let found = whole(&lost);
        assert!(found.contains("first") && found.contains("other"), "some blocks were written, by the syncs");
        assert_eq!(whole(&fs), "other".repeat(2000), "still in memory");
        put(&fs, "a", &"third".repeat(2000));
        fs.write_back(2, false);
        fs.crash();
        assert!(whole(&fs).contains("third"), "written without a sync");
        fs.fail_after(1, libc::ENOSPC, false);
        let errno = |path| fs.open(path, true).err().and_then(|error| error.raw_os_error());
        assert_eq!((errno("b"), errno("c"), errno("c")), (None, Some(libc::ENOSPC), None));
        fs.fail_after(0, libc::EROFS, true);
        assert_eq!((errno("d"), errno("d"), errno("a")), (Some(libc::EROFS), Some(libc::EROFS), None));
        fs.mend();
        assert_eq!(errno("d"), None);
    }

    #[test]
    fn what_was_cut_off_does_not_come_back_below_a_later_write() {
        let fs = Forgetful::default();
        let file = put(&fs, "f", "older bytes");
        fs.sync(&file).unwrap();
        fs.sync_dir("").unwrap();
        fs.set_len(&file, 0).unwrap();
        fs.write(&file, 2000, &[IoSlice::new(b"x")]).unwrap();
        fs.sync(&file).unwrap();
        fs.crash();
        assert_eq!(get(&fs, "f").unwrap(), "\0".repeat(100));
    }

    #[test]
    fn a_punched_range_is_zeros_and_takes_nothing_and_is_durable_only_when_synced() {
        let fs = Forgetful::default();
        let file = put(&fs, "f", &"x".repeat(3000));
        fs.sync(&file).unwrap();
        fs.sync_dir("").unwrap();
        let punched = |fs: &Forgetful, file: &ForgetfulFile| {
            let mut back = vec![1; 3000];
            fs.read(file, 0, &mut [IoSliceMut::new(&mut back)]).unwrap();
            back.iter().enumerate().filter(|(_, byte)| **byte == 0).map(|(at, _)| at).collect::<Vec<_>>()
        };
        fs.punch(&file, 700..2000).unwrap();
        assert_eq!(punched(&fs, &file), (700..2000).collect::<Vec<_>>());
        assert_eq!(fs.stat(&file).unwrap().used_bytes, 5 * 512, "block 2 is gone");
        assert_eq!((fs.next_hole(&file, 0).unwrap(), fs.next_data(&file, 1100).unwrap()), (1024, Some(1536)));
        assert_eq!((fs.next_hole(&file, 1100).unwrap(), fs.next_hole(&file, 1600).unwrap()), (1100, 3000));
        fs.crash();
        let file = fs.open("f", false).unwrap();
        assert_eq!(punched(&fs, &file), [0; 0], "it was not synced");
        fs.punch(&file, 700..2000).unwrap();
        fs.sync(&file).unwrap();
        fs.crash();
        assert_eq!(punched(&fs, &fs.open("f", false).unwrap()), (700..2000).collect::<Vec<_>>());
    }

    #[test]
    fn storage_is_had_before_it_is_written() {
        let fs = Forgetful::new(4096);
        let file = put(&fs, "f", "x");
        fs.allocate(&file, 1024..2048, true).unwrap();
        assert_eq!((fs.stat(&file).unwrap().size, fs.stat(&file).unwrap().used_bytes), (1, 3 * 512));
        fs.allocate(&file, 0..2000, false).unwrap();
        assert_eq!((fs.stat(&file).unwrap().size, fs.stat(&file).unwrap().used_bytes), (2000, 4 * 512));
        assert_eq!(fs.allocate(&file, 0..5000, true).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    }

    #[test]
    fn a_directory_is_a_name_too() {
        let fs = Forgetful::default();
        fs.make_dir("d").unwrap();
        fs.sync(&put(&fs, "d/file", "content")).unwrap();
        fs.sync_dir("d").unwrap();
        fs.crash();
        assert!(fs.open("d/file", true).is_err());
    }

    #[test]
    fn removals_and_renames_come_back_unless_synced() {
        let fs = Forgetful::default();
        for name in ["a", "b"] {
            fs.sync(&put(&fs, name, name)).unwrap();
        }
        fs.sync_dir("").unwrap();
        fs.unlink("a").unwrap();
        fs.rename("b", "c").unwrap();
        fs.crash();
        assert_eq!((get(&fs, "a").as_deref(), get(&fs, "b").as_deref(), get(&fs, "c")), (Some("a"), Some("b"), None));
        fs.rename("b", "a").unwrap();
        fs.sync_dir("").unwrap();
        fs.crash();
        assert_eq!((get(&fs, "a").as_deref(), get(&fs, "b")), (Some("b"), None));
    }

    #[test]
    fn a_partial_crash_mixes_old_and_new() {
        let (mut old, mut new) = (0, 0);
        for seed in 0..64u64 {
            let fs = Forgetful::default();
            fs.sync(&put(&fs, "a", "old")).unwrap();
            fs.sync_dir("").unwrap();
            put(&fs, "a", "new");
            fs.crash_partly(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            match get(&fs, "a").as_deref() {
                Some("old") => old += 1,
                Some("new") => new += 1,
                other => panic!("{other:?}"),
            }
        }
        assert!(old > 5 && new > 5, "{old} {new}");
    }
}
