//! Nodes that were used lately: their descriptors, bounded in number and closed when they are idle.
//!
//! Every node in use has one descriptor that only names it; a file that is read or written has further ones, opened as
//! the callers on whose behalf they are used, so that the file system itself has checked their rights.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::Durable;
use impresario_base::lock::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use crate::losses::{Closing, Losses, is_loss};
use crate::{Errno, Handle, Kind, Lost, Result, SYNC_ALL_WAIT};

const SHARDS: usize = 32;
/// Descriptors of one node at most: callers with other identities take the places of those that were idle longest.
const OPENS_MAX: usize = 64;
/// How often it looks at a sync that it waits for.
const SYNC_ALL_LOOK_EVERY: Duration = Duration::from_millis(2);
/// How long a removal, which is done, waits for closes of the file: well below the time in which a client must be answered.
const REMOVAL_WAIT: Duration = Duration::from_secs(3);
/// [`Open::ticket`] of a descriptor that has not left.
const STAYS: u64 = u64::MAX;

/// The descriptors of a file system.
pub(crate) trait Descriptors: 'static {
    /// Names a node; cannot read or write it.
    type Name: Send + Sync;
    /// A file or a directory that is open.
    type Open: Send + Sync;

    /// Puts what was written through a descriptor on stable storage.
    fn sync(open: &Self::Open) -> Result<()>;

    /// Says before a descriptor is closed whether bytes that were written through it are lost, where closing it forgets that. What
    /// it leaves to be synced a sync of all files must cover in another way.
    fn settle(open: &Self::Open) -> Result<()> {
        Self::sync(open)
    }

    /// Whether a file that is removed while it is open keeps a name until it is closed, as `.nfs…`: then its removal is over when
    /// it is closed.
    const KEEPS_NAMES: bool = false;

    /// Whether the node is known to have no name any more, so that nobody can read what was written once it is closed everywhere.
    fn is_removed(_fd: &Self::Name) -> bool {
        false
    }
}

/// A node in use.
pub(crate) struct Node<D: Descriptors> {
    /// Its handle.
    pub(crate) handle: Handle,
    /// Names it.
    pub(crate) fd: D::Name,
    /// Number within the file system.
    pub(crate) fileid: u64,
    /// Kind; never changes.
    pub(crate) kind: Kind,
    /// Its last name was removed through this tree.
    gone: AtomicBool,
    /// It was taken out of the table; changed with `opens` locked.
    is_out: AtomicBool,
    /// Users for whom it stays when its last name is removed.
    pub(crate) holds: AtomicU32,
    opens: Mutex<Vec<Arc<Open<D>>>>,
    /// Those that were taken out while calls used them: they are closed when these end.
    left: Mutex<Vec<Weak<Open<D>>>>,
    /// Changes of the rights to it; counted with `opens` locked.
    rights: AtomicU64,
    /// Held over a sync and the record of what it said: the kernel says it only once for each descriptor.
    pub(crate) syncing: Mutex<()>,
    /// Calls that ask for a sync.
    asked: Durable,
    /// When its way in the table of names was last confirmed, milliseconds of the cache's clock.
    pub(crate) confirmed_ms: AtomicU64,
    _counted: Counted,
}

/// What a descriptor may be used for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Use {
    Read,
    Write,
    /// Listing a directory.
    List,
}

/// A descriptor of a node, opened on a caller's behalf.
pub(crate) struct Open<D: Descriptors> {
    pub(crate) fd: D::Open,
    caller: u64,
    reads: bool,
    writes: bool,
    /// Of a directory: where its listing stands; held while it is read.
    pub(crate) position: Mutex<u64>,
    used_ms: AtomicU64,
    /// Written through since the last sync.
    unsynced: AtomicBool,
    /// The stable writes through it.
    stable: Durable,
    /// By which the losses know that it has left; changed with the `opens` of its node locked.
    ticket: AtomicU64,
    handle: Handle,
    losses: Arc<Losses>,
    _counted: Counted,
}

/// A change in progress through a descriptor. The descriptor is marked unsynced before the first byte, so that a sync covers it,
/// and again at the end: a sync in between may have missed some of its bytes.
pub(crate) struct Changing<'a>(&'a AtomicBool);

impl<D: Descriptors> Open<D> {
    pub(crate) fn changing(&self) -> Changing<'_> {
        self.unsynced.store(true, Ordering::Release);
        Changing(&self.unsynced)
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Counts a descriptor as long as it lives.
struct Counted(Arc<AtomicUsize>);

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Counted {
        count.fetch_add(1, Ordering::Relaxed);
        Counted(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What became of bytes that were written through a descriptor is only certain to be told to that descriptor: it is
/// asked before it is closed.
impl<D: Descriptors> Drop for Open<D> {
    fn drop(&mut self) {
        if self.unsynced.load(Ordering::Acquire) {
            self.losses.settle(&self.handle, || D::settle(&self.fd));
        }
        self.stay();
    }
}

impl<D: Descriptors> Open<D> {
    /// It is taken out and closed when its users are done: a sync of all files, which does not find it any more, waits for that.
    fn leave(&self) {
        if self.writes && self.ticket.load(Ordering::Relaxed) == STAYS {
            self.ticket.store(self.losses.leave(), Ordering::Relaxed);
        }
    }

    /// Nobody need wait for it.
    fn stay(&self) {
        match self.ticket.swap(STAYS, Ordering::Relaxed) {
            STAYS => {}
            ticket => self.losses.left(ticket),
        }
    }
}

impl<D: Descriptors> Node<D> {
    /// True when its last name is gone and nothing holds it.
    pub(crate) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire) && self.holds.load(Ordering::Acquire) == 0
    }

    /// Whether neither a call uses it nor anything holds it. To be asked with the shard locked, so that no call begins. A node
    /// that is in use stays in the table: what its calls are ordered by is in it.
    fn is_idle(self: &Arc<Node<D>>) -> bool {
        Arc::strong_count(self) == 1 && self.holds.load(Ordering::Acquire) == 0
    }

    /// The descriptor for a use on a caller's behalf, if there is one.
    pub(crate) fn open_for(&self, caller: u64, what: Use, now_ms: u64) -> Option<Arc<Open<D>>> {
        let opens = self.opens.lock();
        let open = opens.iter().find(|open| open.caller == caller && open.serves(what))?;
        open.used_ms.store(now_ms, Ordering::Relaxed);
        Some(open.clone())
    }

    /// Changes of the rights to the node so far: what [`Nodes::add_open`] is told of a descriptor that is opened from now on.
    pub(crate) fn rights(&self) -> u64 {
        self.rights.load(Ordering::Acquire)
    }

    /// Any descriptor that the file can be synced through.
    pub(crate) fn any_open(&self) -> Option<Arc<Open<D>>> {
        self.opens.lock().first().cloned()
    }

    /// Any descriptor that may read.
    pub(crate) fn any_reading(&self) -> Option<Arc<Open<D>>> {
        self.opens.lock().iter().find(|open| open.reads).cloned()
    }

    /// Refuses a use that nodes of this kind do not have.
    pub(crate) fn check_use(&self, what: Use) -> Result<()> {
        match (what, self.kind) {
            (Use::List, Kind::Directory) | (Use::Read | Use::Write, Kind::File) => Ok(()),
            (Use::List, _) => Err(Errno(libc::ENOTDIR)),
            (_, Kind::Directory) => Err(Errno(libc::EISDIR)),
            // Devices, pipes and sockets are the client's own machine's matter.
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Syncs the descriptors with writes that were not synced; whether there are any. `syncing` must be held.
    pub(crate) fn sync_written(&self, losses: &Losses) -> Result<bool> {
        losses.check(&self.handle)?;
        let has_synced = self.sync_opens(losses, true)?;
        // A descriptor that was taken out before anybody looked for it may have been told of a loss, and these not.
        losses.check(&self.handle)?;
        Ok(has_synced)
    }

    /// As [`Node::sync_written`]; those that were taken out only if they are to be.
    fn sync_opens(&self, losses: &Losses, with_left: bool) -> Result<bool> {
        let mut unsynced = self.opens.lock().clone();
        if with_left {
            // Last: what is taken out meanwhile is among them.
            unsynced.extend(self.left.lock().iter().filter_map(Weak::upgrade));
        }
        unsynced.retain(|open| open.unsynced.load(Ordering::Acquire));
        for open in &unsynced {
            // Before the sync: a write that comes meanwhile needs another.
            open.unsynced.store(false, Ordering::Release);
        }
        let mut synced = Ok(!unsynced.is_empty());
        for open in &unsynced {
            let done = losses.observe(&self.handle, D::sync(&open.fd));
            synced = done.inspect_err(|_| open.unsynced.store(true, Ordering::Release)).and(synced);
        }
        synced
    }

    /// Syncs what was written through no descriptor that is still there, or by others. `syncing` must be held.
    pub(crate) fn sync_others(&self, losses: &Losses, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        losses.observe(&self.handle, sync())?;
        // As in `sync_written`.
        losses.check(&self.handle)
    }

    /// Does a sync for all who ask for one while it has not begun.
    pub(crate) fn share_sync(&self, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        self.asked.changed();
        self.asked.sync(sync)
    }

    /// Syncs a stable write through a descriptor, with all those through it that ended before the sync begins. It stays marked: what
    /// others wrote through it meanwhile may need another sync.
    pub(crate) fn sync_stable(&self, open: &Open<D>, losses: &Losses, sync: impl FnOnce() -> Result<()>) -> Result<()> {
        open.stable.changed();
        open.stable.sync(|| {
            let _syncing = self.syncing.lock();
            losses.check(&self.handle)?;
            losses.observe(&self.handle, sync())
        })
    }

    /// Takes out all descriptors for data. Whoever finds them gone finds that they are being closed.
    fn take_opens(&self, losses: &Arc<Losses>) -> Closing<Vec<Arc<Open<D>>>> {
        let mut opens = self.opens.lock();
        self.rights.fetch_add(1, Ordering::Release);
        opens.iter().for_each(|open| self.take(open));
        losses.closing(self.handle, std::mem::take(&mut *opens))
    }

    /// This is taken out of the descriptors, which are locked.
    fn take(&self, open: &Arc<Open<D>>) {
        open.leave();
        if Arc::strong_count(open) > 1 {
            let mut left = self.left.lock();
            left.retain(|open| open.strong_count() > 0);
            left.push(Arc::downgrade(open));
        }
    }

    /// It is taken out of the table, which is locked.
    fn leave(&self) {
        let opens = self.opens.lock();
        self.is_out.store(true, Ordering::Relaxed);
        opens.iter().for_each(|open| open.leave());
    }

    /// It is in the table, which is locked.
    fn stay(&self) {
        let opens = self.opens.lock();
        self.is_out.store(false, Ordering::Relaxed);
        opens.iter().for_each(|open| open.stay());
    }

    /// Syncs what was written, after a sync that others have begun; `None`: that one has not ended by then.
    fn sync_behind_others(&self, losses: &Losses, until: Instant) -> Option<Result<()>> {
        let _syncing = loop {
            // First, as a descriptor that is being synced does not count as unsynced.
            if let Some(syncing) = self.syncing.try_lock() {
                break syncing;
            }
            if Instant::now() >= until {
                return None;
            }
            std::thread::sleep(SYNC_ALL_LOOK_EVERY);
        };
        // What was taken out is waited for at the end, with that of all files.
        Some(self.sync_opens(losses, false).map(drop))
    }

    /// Takes out the descriptors that are idle, to be closed.
    fn take_idle(&self, losses: &Arc<Losses>, before_ms: u64) -> Vec<Closing<Arc<Open<D>>>> {
        let (mut idle, mut opens) = (Vec::new(), self.opens.lock());
        opens.retain(|open| {
            let keep = open.used_ms.load(Ordering::Relaxed) >= before_ms || Arc::strong_count(open) > 1;
            if !keep {
                open.leave();
                idle.push(losses.closing(self.handle, open.clone()));
            }
            keep
        });
        idle
    }

    /// Whether closing it asks first what became of what was written.
    fn is_written(&self) -> bool {
        self.opens.lock().iter().any(|open| open.unsynced.load(Ordering::Acquire))
    }
}

impl<D: Descriptors> Open<D> {
    fn serves(&self, what: Use) -> bool {
        match what {
            Use::Read | Use::List => self.reads,
            Use::Write => self.writes,
        }
    }
}

/// The nodes in use.
pub(crate) struct Nodes<D: Descriptors> {
    shards: Vec<Mutex<Shard<D>>>,
    /// Handles of the nodes in use by their numbers in the file system.
    by_fileid: Mutex<FxHashMap<u64, Handle>>,
    start: Instant,
    /// Descriptors that are open now.
    count: Arc<AtomicUsize>,
    max: usize,
    losses: Arc<Losses>,
}

struct Shard<D: Descriptors> {
    by_handle: FxHashMap<Handle, (Arc<Node<D>>, u64)>,
}

impl<D: Descriptors> Shard<D> {
    /// Takes a node out, to be let go when nothing is locked any more. Whoever finds it gone finds that it is being closed.
    fn take(&mut self, handle: &Handle, losses: &Arc<Losses>) -> Option<Closing<Arc<Node<D>>>> {
        let (node, _) = self.by_handle.remove(handle)?;
        node.leave();
        Some(losses.closing(*handle, node))
    }
}

impl<D: Descriptors> Default for Shard<D> {
    fn default() -> Shard<D> {
        Shard { by_handle: FxHashMap::default() }
    }
}

impl<D: Descriptors> Nodes<D> {
    /// Keeps about `max` descriptors open at most.
    pub(crate) fn new(max: usize, losses: Arc<Losses>) -> Nodes<D> {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Nodes { shards, by_fileid: Mutex::default(), start: Instant::now(), count: Arc::default(), max, losses }
    }

    /// Milliseconds since the cache was made.
    pub(crate) fn now_ms(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    /// The node, if it is in use.
    pub(crate) fn get(&self, handle: &Handle) -> Option<Arc<Node<D>>> {
        let now_ms = self.now_ms();
        let mut shard = self.shard(handle);
        let (node, used_ms) = shard.by_handle.get_mut(handle)?;
        *used_ms = now_ms;
        Some(node.clone())
    }

    /// A node that was just opened; the one in use already, if there is one.
    pub(crate) fn insert(&self, handle: Handle, fd: D::Name, fileid: u64, kind: Kind) -> Arc<Node<D>> {
        let now_ms = self.now_ms();
        if let Some(known) = self.get(&handle) {
            // A handle names a node as long as that exists; a gone one may be held by name-less use only.
            return known;
        }
        let node = Arc::new(Node {
            handle,
            fd,
            fileid,
            kind,
            gone: AtomicBool::new(false),
            is_out: AtomicBool::new(false),
            holds: AtomicU32::new(0),
            opens: Mutex::default(),
            left: Mutex::default(),
            rights: AtomicU64::new(0),
            syncing: Mutex::default(),
            asked: Durable::default(),
            confirmed_ms: AtomicU64::new(now_ms),
            _counted: Counted::new(&self.count),
        });
        let mut shard = self.shard(&handle);
        let entry = shard.by_handle.entry(handle).or_insert_with(|| (node.clone(), now_ms));
        let node = entry.0.clone();
        let evicted = self.evict(&mut shard, &handle);
        drop(shard);
        self.by_fileid.lock().insert(fileid, handle);
        self.close(evicted);
        node
    }

    /// Adds a descriptor to a node. `checked`: what [`Node::rights`] was before it was opened; 0 where that made the node. If they have
    /// changed meanwhile, the descriptor is given to this caller only.
    pub(crate) fn add_open(
        &self,
        node: &Node<D>,
        fd: D::Open,
        caller: u64,
        (reads, writes): (bool, bool),
        checked: u64,
    ) -> Arc<Open<D>> {
        let now_ms = self.now_ms();
        let open = Arc::new(Open {
            fd,
            caller,
            reads,
            writes,
            position: Mutex::new(0),
            used_ms: AtomicU64::new(now_ms),
            unsynced: AtomicBool::new(false),
            stable: Durable::default(),
            ticket: AtomicU64::new(STAYS),
            handle: node.handle,
            losses: self.losses.clone(),
            _counted: Counted::new(&self.count),
        });
        let mut opens = node.opens.lock();
        if node.rights() != checked {
            open.leave();
            return open;
        }
        let idle_longest = || (0..opens.len()).min_by_key(|&n| opens[n].used_ms.load(Ordering::Relaxed));
        let closed = if opens.len() >= OPENS_MAX { idle_longest() } else { None }.map(|n| {
            let open = opens.swap_remove(n);
            node.take(&open);
            self.losses.closing(node.handle, vec![open])
        });
        if node.is_out.load(Ordering::Relaxed) {
            open.leave();
        }
        opens.push(open.clone());
        drop(opens);
        closed.into_iter().for_each(|closed| self.retire(closed));
        if self.count.load(Ordering::Relaxed) > self.max {
            let evicted = self.evict(&mut self.shard(&node.handle), &node.handle);
            self.close(evicted);
        }
        open
    }

    /// Closes all descriptors for data once their present users are done, so that rights are checked anew. One that is being opened
    /// serves whoever opens it, and nobody after that.
    pub(crate) fn close_opens(&self, node: &Node<D>) {
        self.retire(node.take_opens(&self.losses));
    }

    /// Lets go of descriptors that were taken out.
    fn retire(&self, opens: Closing<Vec<Arc<Open<D>>>>) {
        if opens.iter().any(|open| open.unsynced.load(Ordering::Acquire)) {
            self.close_soon(opens);
        }
    }

    /// Says that the last name of the node with this number is removed, if the node is in use.
    pub(crate) fn set_gone(&self, fileid: u64) {
        let handle = self.by_fileid.lock().get(&fileid).copied();
        handle.into_iter().for_each(|handle| self.set_gone_if(&handle, |_| true));
    }

    /// The same of this node, and of no other that has its handle by now.
    pub(crate) fn set_node_gone(&self, gone: &Arc<Node<D>>) {
        self.set_gone_if(&gone.handle, |node| Arc::ptr_eq(node, gone));
    }

    fn set_gone_if(&self, handle: &Handle, is_it: impl Fn(&Arc<Node<D>>) -> bool) {
        let shard = self.shard(handle);
        let Some((node, _)) = shard.by_handle.get(handle).filter(|(node, _)| is_it(node)) else { return };
        node.gone.store(true, Ordering::Release);
        self.close_removed(shard, handle);
    }

    /// Holds a node and gives the one that is held: it is one in use again, should it just have been taken out.
    pub(crate) fn hold(&self, node: &Arc<Node<D>>) -> Arc<Node<D>> {
        let now_ms = self.now_ms();
        let mut shard = self.shard(&node.handle);
        // Another thread may have opened it anew meanwhile: what is in use is what must be held.
        let (used, _) = shard.by_handle.entry(node.handle).or_insert_with(|| (node.clone(), now_ms));
        used.holds.fetch_add(1, Ordering::AcqRel);
        let held = used.clone();
        held.stay();
        drop(shard);
        self.by_fileid.lock().insert(node.fileid, node.handle);
        held
    }

    /// Ends one hold of a node.
    pub(crate) fn release(&self, handle: &Handle) {
        let shard = self.shard(handle);
        let Some((node, _)) = shard.by_handle.get(handle) else { return };
        let fewer = |holds: u32| holds.checked_sub(1);
        let _ = node.holds.fetch_update(Ordering::AcqRel, Ordering::Acquire, fewer); // held by nothing: nothing ends
        self.close_removed(shard, handle);
    }

    /// Lets go of a node of this shard whose last name is removed, if nothing holds it.
    fn close_removed(&self, mut shard: MutexGuard<'_, Shard<D>>, handle: &Handle) {
        let is_closing = D::KEEPS_NAMES && self.losses.is_closing(handle);
        let is_gone = shard.by_handle.get(handle).is_some_and(|(node, _)| node.is_gone());
        let Some(node) = (if is_gone { shard.take(handle, &self.losses) } else { None }) else { return };
        drop(shard);
        self.forget_number(&node);
        let mut waits = D::KEEPS_NAMES;
        if (is_closing || node.is_written()) && D::is_removed(&node.fd) {
            // What nobody can read need not reach the device before it is closed.
            node.opens.lock().iter().for_each(|open| open.unsynced.store(false, Ordering::Release));
            waits = false;
        }
        match node.is_written() {
            false => drop(node),
            true if D::KEEPS_NAMES => self.losses.close_aside(node),
            true => self.close_soon(node),
        }
        if waits {
            // One that hangs may leave a name in the folder; the removal has succeeded nevertheless.
            self.losses.await_closes(handle, Instant::now() + REMOVAL_WAIT);
        }
    }

    /// Closes nodes that were taken out of their shards because too much is open. No shard may be locked: closing may sync.
    fn close(&self, nodes: Vec<Closing<Arc<Node<D>>>>) {
        if nodes.is_empty() {
            return;
        }
        nodes.iter().for_each(|node| self.forget_number(node));
        self.losses.close_here(nodes);
    }

    /// Forgets the number of a node that was taken out, unless it is in use again. No shard may be locked.
    fn forget_number(&self, node: &Node<D>) {
        let shard = self.shard(&node.handle);
        if shard.by_handle.contains_key(&node.handle) {
            return;
        }
        let mut by_fileid = self.by_fileid.lock();
        if by_fileid.get(&node.fileid) == Some(&node.handle) {
            by_fileid.remove(&node.fileid);
        }
    }

    /// Closes what a file has open by another thread, as that waits for what was written. Where more is open than may be, the one
    /// who closes waits: there is never much more.
    fn close_soon(&self, closing: Closing<impl Send + 'static>) {
        if self.count() <= self.max {
            self.losses.close_aside(closing);
        }
    }

    /// Has what was not used for that long closed by other threads.
    pub(crate) fn close_idle(&self, idle: Duration) {
        let before_ms = self.now_ms().saturating_sub(idle.as_millis() as u64);
        for shard in &self.shards {
            let (mut unused, mut used) = (Vec::new(), Vec::new());
            shard.lock().by_handle.retain(|_, (node, used_ms)| {
                let keep = *used_ms >= before_ms || !node.is_idle();
                if keep {
                    used.push(node.clone());
                    return true;
                }
                node.leave();
                unused.push(self.losses.closing(node.handle, node.clone()));
                false
            });
            self.close_unused(unused);
            used.iter()
                .flat_map(|node| node.take_idle(&self.losses, before_ms))
                .for_each(|open| self.losses.close_aside(open));
        }
    }

    fn close_unused(&self, nodes: Vec<Closing<Arc<Node<D>>>>) {
        for node in nodes {
            self.forget_number(&node);
            self.losses.close_aside(node);
        }
    }

    /// Begins to close everything that is not held or in use, in other threads.
    pub(crate) fn close_all(&self) {
        self.close_idle(Duration::ZERO);
        for shard in &self.shards {
            let all: Vec<_> = {
                let mut shard = shard.lock();
                let closed = shard.by_handle.iter().filter(|(_, (node, _))| node.is_idle());
                let closed: Vec<Handle> = closed.map(|(handle, _)| *handle).collect();
                closed.iter().filter_map(|handle| shard.take(handle, &self.losses)).collect()
            };
            self.close_unused(all);
        }
    }

    /// Syncs all files with writes that were not synced, whatever becomes of one, and waits for what others sync or close.
    pub(crate) fn sync_all(&self) -> Result<Lost> {
        self.sync_all_until(Instant::now() + SYNC_ALL_WAIT)
    }

    /// `ETIMEDOUT`: a sync or a close that others had begun has not ended by then.
    fn sync_all_until(&self, until: Instant) -> Result<Lost> {
        let mut synced = Ok(());
        for shard in &self.shards {
            let files = |(node, _): &&(Arc<Node<D>>, u64)| node.kind == Kind::File;
            let nodes: Vec<_> = shard.lock().by_handle.values().filter(files).map(|(node, _)| node.clone()).collect();
            for node in nodes {
                match node.sync_behind_others(&self.losses, until) {
                    // It is noted which file that is.
                    Some(Err(error)) if is_loss(error) => {}
                    Some(done) => synced = synced.and(done),
                    None => synced = synced.and(Err(Errno(libc::ETIMEDOUT))),
                }
            }
        }
        // What was taken out before the loop came to it has left by now.
        synced.and_then(|()| self.losses.after_closes(until))
    }

    /// Descriptors that are open now.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Takes nodes out of a shard until the number of descriptors is within its limit, those idle longest first.
    fn evict(&self, shard: &mut Shard<D>, keep: &Handle) -> Vec<Closing<Arc<Node<D>>>> {
        let mut evicted = Vec::new();
        let mut over = self.count.load(Ordering::Relaxed).saturating_sub(self.max);
        while over > 0 {
            let free = |(handle, (node, _)): &(&Handle, &(Arc<Node<D>>, u64))| *handle != keep && node.is_idle();
            let oldest = shard.by_handle.iter().filter(free).min_by_key(|(_, (_, used_ms))| *used_ms);
            let Some(oldest) = oldest.map(|(handle, _)| *handle) else { break };
            let Some(node) = shard.take(&oldest, &self.losses) else { break };
            over = over.saturating_sub(1 + node.opens.lock().len());
            evicted.push(node);
        }
        evicted
    }

    fn shard(&self, handle: &Handle) -> MutexGuard<'_, Shard<D>> {
        use std::hash::BuildHasher;
        let hash = rustc_hash::FxBuildHasher.hash_one(handle);
        self.shards[hash as usize % SHARDS].lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl Descriptors for Nothing {
        type Name = ();
        type Open = ();

        fn sync((): &()) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_node_in_use_stays_in_the_table() {
        let nodes = Nodes::<Nothing>::new(16, Arc::default());
        let handle = |n: u64| Handle::new(&n.to_le_bytes()).unwrap();
        let used = nodes.insert(handle(0), (), 0, Kind::File);
        let is_there = || nodes.get(&handle(0)).is_some_and(|node| Arc::ptr_eq(&node, &used));
        for n in 1..2000 {
            drop(nodes.insert(handle(n), (), n, Kind::File));
        }
        assert!(nodes.count() < 100 && is_there(), "{}", nodes.count());
        std::thread::sleep(Duration::from_millis(5));
        nodes.close_idle(Duration::ZERO);
        impresario_testing::until("the others are closed", || nodes.count() == 1);
        assert!(is_there());
        nodes.close_all();
        assert!(is_there());
        drop(used);
        nodes.close_all();
        impresario_testing::until("all are closed", || nodes.count() == 0);
    }

    #[test]
    fn of_two_who_find_a_node_gone_the_later_leaves_the_next_one() {
        let nodes = Nodes::<Nothing>::new(16, Arc::default());
        let handle = Handle::new(b"node").unwrap();
        let old = nodes.insert(handle, (), 7, Kind::File);
        nodes.set_node_gone(&old);
        let fresh = nodes.insert(handle, (), 7, Kind::File);
        assert!(old.is_gone() && !Arc::ptr_eq(&old, &fresh));
        nodes.set_node_gone(&old);
        assert!(!fresh.is_gone() && nodes.get(&handle).is_some_and(|node| Arc::ptr_eq(&node, &fresh)));
        nodes.set_gone(7);
        assert!(fresh.is_gone() && nodes.get(&handle).is_none());
    }

    /// Its syncs end when they may, and fail if they are to.
    struct Slow;

    #[derive(Default)]
    struct SlowSync {
        begun: AtomicBool,
        ends: AtomicBool,
        fails: bool,
    }

    impl Descriptors for Slow {
        type Name = ();
        type Open = Arc<SlowSync>;

        fn sync(open: &Arc<SlowSync>) -> Result<()> {
            open.begun.store(true, Ordering::Release);
            impresario_testing::until("the sync may end", || open.ends.load(Ordering::Acquire));
            if open.fails { Err(Errno(libc::EIO)) } else { Ok(()) }
        }
    }

    /// The same where a removed file keeps a name until it is closed.
    struct SlowNamed;

    impl Descriptors for SlowNamed {
        type Name = ();
        type Open = Arc<SlowSync>;

        const KEEPS_NAMES: bool = true;

        fn sync(open: &Arc<SlowSync>) -> Result<()> {
            Slow::sync(open)
        }
    }

    /// A file that was written; its sync does not end before it may.
    fn written<D>(nodes: &Nodes<D>, fails: bool) -> (Arc<Node<D>>, Arc<SlowSync>)
    where
        D: Descriptors<Name = (), Open = Arc<SlowSync>>,
    {
        written_file(nodes, 7, fails)
    }

    fn written_file<D>(nodes: &Nodes<D>, fileid: u64, fails: bool) -> (Arc<Node<D>>, Arc<SlowSync>)
    where
        D: Descriptors<Name = (), Open = Arc<SlowSync>>,
    {
        let node = nodes.insert(Handle::new(&fileid.to_le_bytes()).unwrap(), (), fileid, Kind::File);
        let sync = Arc::new(SlowSync { fails, ..SlowSync::default() });
        drop(nodes.add_open(&node, sync.clone(), 0, (true, true), 0).changing());
        (node, sync)
    }

    /// Gives every thread that closes files one that hangs until its sync may end.
    fn hang_closers<D>(nodes: &Nodes<D>) -> Vec<Arc<SlowSync>>
    where
        D: Descriptors<Name = (), Open = Arc<SlowSync>>,
    {
        let hang = |n| {
            let (node, sync) = written_file(nodes, 100 + n, false);
            nodes.close_opens(&node);
            sync
        };
        let syncs: Vec<_> = (0..crate::idle::CLOSERS_MAX as u64).map(hang).collect();
        let begun = |sync: &Arc<SlowSync>| sync.begun.load(Ordering::Acquire);
        impresario_testing::until("all closers hang", || syncs.iter().all(begun));
        syncs
    }

    /// Whether the thread ends beside files that hang, which may end then.
    fn ends_beside<T>(hanging: &[Arc<SlowSync>], thread: &std::thread::ScopedJoinHandle<'_, T>) -> bool {
        let ends = impresario_base::time::wait_while(&|| !thread.is_finished(), Duration::from_secs(10));
        hanging.iter().for_each(|sync| sync.ends.store(true, Ordering::Release));
        ends
    }

    #[test]
    fn a_sync_closes_what_of_its_file_waits_behind_files_that_hang() {
        type TakeOut = fn(&Nodes<Slow>, Arc<Node<Slow>>);
        let ways: [(&str, TakeOut); 2] = [
            ("rights are checked anew", |nodes, node| nodes.close_opens(&node)),
            ("the node is idle", |nodes, node| {
                drop(node);
                std::thread::sleep(Duration::from_millis(2));
                nodes.close_idle(Duration::ZERO);
            }),
        ];
        for (way, take_out) in ways {
            for fails in [false, true] {
                let losses = Arc::<Losses>::default();
                let nodes = Nodes::<Slow>::new(1000, losses.clone());
                let hanging = hang_closers(&nodes);
                let (node, sync) = written(&nodes, fails);
                let handle = node.handle;
                sync.ends.store(true, Ordering::Release);
                take_out(&nodes, node);
                assert!(!sync.begun.load(Ordering::Acquire), "{way}: it does not wait for its turn");
                let node = nodes.insert(handle, (), 7, Kind::File);
                std::thread::scope(|scope| {
                    let synced = scope.spawn(|| {
                        let _syncing = node.syncing.lock();
                        node.sync_written(&losses)
                    });
                    assert!(ends_beside(&hanging, &synced), "{way}: a sync waits for other files");
                    assert_eq!(synced.join().unwrap().is_err(), fails, "{way}");
                });
            }
        }
    }

    #[test]
    fn a_removal_ends_with_the_closes_of_a_file_that_keeps_a_name() {
        let nodes = Nodes::<SlowNamed>::new(1000, Arc::default());
        // One that another thread is closing.
        let (node, sync) = written(&nodes, false);
        nodes.close_opens(&node);
        drop(node);
        impresario_testing::until("it is being closed", || sync.begun.load(Ordering::Acquire));
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| nodes.set_gone(7));
            std::thread::sleep(Duration::from_millis(20));
            let is_early = removed.is_finished();
            sync.ends.store(true, Ordering::Release);
            assert!(ends_beside(&[], &removed) && !is_early);
        });
        assert_eq!(Arc::strong_count(&sync), 1, "it is open");

        // One that waits for its turn.
        let hanging = hang_closers(&nodes);
        let (node, sync) = written(&nodes, false);
        sync.ends.store(true, Ordering::Release);
        nodes.close_opens(&node);
        drop(node);
        assert_eq!(Arc::strong_count(&sync), 2, "it does not wait for its turn");
        std::thread::scope(|scope| {
            let removed = scope.spawn(|| {
                nodes.set_gone(7);
                Arc::strong_count(&sync)
            });
            assert!(ends_beside(&hanging, &removed));
            assert_eq!(removed.join().unwrap(), 1, "it is open");
        });
    }

    #[test]
    fn a_removal_does_not_wait_long_for_closes_that_hang() {
        let nodes = Nodes::<SlowNamed>::new(1000, Arc::default());
        let mut hanging = hang_closers(&nodes);
        // One that waits for its turn, and one that has not been closed before.
        let (queued, sync) = written_file(&nodes, 7, false);
        nodes.close_opens(&queued);
        drop(queued);
        hanging.push(sync);
        hanging.push(written_file(&nodes, 8, false).1);
        std::thread::scope(|scope| {
            let removals = [7, 8].map(|fileid| {
                let nodes = &nodes;
                scope.spawn(move || nodes.set_gone(fileid))
            });
            let last = || removals.iter().any(|removal| !removal.is_finished());
            let end = impresario_base::time::wait_while(&last, REMOVAL_WAIT + Duration::from_secs(4));
            let begun = hanging.iter().all(|sync| sync.begun.load(Ordering::Acquire));
            hanging.iter().for_each(|sync| sync.ends.store(true, Ordering::Release));
            assert!(end && begun, "{end} {begun}");
        });
        impresario_testing::until("all are closed", || nodes.count() == crate::idle::CLOSERS_MAX);
    }

    /// The file is opened anew while it waits to be closed.
    #[test]
    fn what_is_evicted_behind_a_file_that_hangs_is_being_closed() {
        for fails in [false, true] {
            let losses = Arc::<Losses>::default();
            let nodes = Nodes::<Slow>::new(1, losses.clone());
            let place = |fileid: &u64| {
                let _locked = nodes.shard(&Handle::new(&fileid.to_le_bytes()).unwrap());
                nodes.shards.iter().position(|shard| shard.try_lock().is_none())
            };
            let together: Vec<u64> = (0..).filter(|fileid| place(fileid) == place(&0)).take(3).collect();
            let (first, first_sync) = written_file(&nodes, together[0], false);
            std::thread::sleep(Duration::from_millis(2));
            let (second, sync) = written_file(&nodes, together[1], fails);
            let (handle, fileid, nodes) = (second.handle, second.fileid, &nodes);
            drop((first, second));
            std::thread::scope(|scope| {
                let number = together[2];
                let third = Handle::new(&number.to_le_bytes()).unwrap();
                let evicting = scope.spawn(move || drop(nodes.insert(third, (), number, Kind::File)));
                impresario_testing::until("the first is closed", || first_sync.begun.load(Ordering::Acquire));
                let node = nodes.insert(handle, (), fileid, Kind::File);
                let (again, losses) = (node.clone(), &losses);
                let synced = scope.spawn(move || {
                    let _syncing = again.syncing.lock();
                    again.sync_written(losses)
                });
                std::thread::sleep(Duration::from_millis(20));
                let is_early = synced.is_finished();
                sync.ends.store(true, Ordering::Release);
                // The first still hangs.
                assert!(ends_beside(&[first_sync], &synced), "a sync waits for another file");
                assert_eq!(synced.join().unwrap().is_err(), fails);
                assert!(!is_early, "a sync does not wait for what is evicted");
                evicting.join().unwrap();
                nodes.set_gone(fileid);
                assert!(node.is_gone(), "the number of a file that is in use again is forgotten");
            });
        }
    }

    #[test]
    fn what_is_taken_out_counts_as_being_closed_at_once() {
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Slow>::new(1000, losses.clone());
        let (node, sync) = written(&nodes, true);
        sync.ends.store(true, Ordering::Release);
        let taken = node.take_opens(&losses);
        std::thread::scope(|scope| {
            let synced = scope.spawn(|| {
                let _syncing = node.syncing.lock();
                node.sync_written(&losses)
            });
            std::thread::sleep(Duration::from_millis(20));
            let is_early = synced.is_finished();
            let hanging = hang_closers(&nodes);
            // The sync has begun to wait before it has a place among those that wait for their turn.
            nodes.retire(taken);
            assert!(ends_beside(&hanging, &synced) && !is_early);
            assert_eq!(synced.join().unwrap(), Err(Errno(libc::EIO)));
        });
    }

    #[test]
    fn an_idle_file_whose_sync_hangs_holds_up_no_other() {
        let nodes = Nodes::<Slow>::new(1000, Arc::default());
        let hanging = |n: u64| {
            let node = nodes.insert(Handle::new(&n.to_le_bytes()).unwrap(), (), n, Kind::File);
            let sync = Arc::<SlowSync>::default();
            drop(nodes.add_open(&node, sync.clone(), 0, (true, true), 0).changing());
            sync
        };
        let held = nodes.insert(Handle::new(b"held").unwrap(), (), 100, Kind::File);
        nodes.hold(&held);
        let first = Arc::<SlowSync>::default();
        drop(nodes.add_open(&held, first.clone(), 0, (true, true), 0).changing());
        let syncs: Vec<_> = (0..8).map(hanging).chain([first]).collect();
        std::thread::sleep(Duration::from_millis(2));
        std::thread::scope(|scope| {
            let idle = scope.spawn(|| nodes.close_idle(Duration::ZERO));
            let mut ends = 0;
            impresario_testing::until("all are closed, of which one does not end", || {
                let begun = |sync: &&Arc<SlowSync>| sync.begun.load(Ordering::Acquire);
                let ended = |sync: &&Arc<SlowSync>| sync.ends.load(Ordering::Acquire);
                for sync in syncs.iter().filter(begun).filter(|sync| !ended(sync)).skip(1) {
                    sync.ends.store(true, Ordering::Release);
                    ends += 1;
                }
                ends == syncs.len() - 1
            });
            impresario_testing::until("the next files have their turn", || idle.is_finished());
            syncs.iter().for_each(|sync| sync.ends.store(true, Ordering::Release));
        });
        drop(held);
        impresario_testing::until("all are closed", || nodes.count() == 1);
    }

    const TIMED_OUT: Result<Lost> = Err(Errno(libc::ETIMEDOUT));

    #[test]
    fn a_sync_of_all_waits_for_one_that_is_running() {
        for fails in [false, true] {
            let losses = Arc::<Losses>::default();
            let nodes = Nodes::<Slow>::new(16, losses.clone());
            let (node, sync) = written(&nodes, fails);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let _syncing = node.syncing.lock();
                    let _ = node.sync_written(&losses); // told below
                });
                impresario_testing::until("it is running", || sync.begun.load(Ordering::Acquire));
                assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT, "it has not ended");
                sync.ends.store(true, Ordering::Release);
                let lost = fails.then_some(node.handle).into_iter().collect();
                assert_eq!(nodes.sync_all(), Ok(Lost { files: Some(lost), any: 0 }));
            });
        }
    }

    #[test]
    fn what_a_call_takes_out_is_closed_by_others_and_syncs_wait_for_that() {
        // They give the node that is in use from then on.
        type TakeOut = fn(&Nodes<Slow>, Arc<Node<Slow>>) -> Arc<Node<Slow>>;
        let ways: [(&str, TakeOut); 3] = [
            ("rights are checked anew", |nodes, node| {
                nodes.close_opens(&node);
                node
            }),
            ("another caller needs its place", |nodes, node| {
                for caller in 1..=OPENS_MAX as u64 {
                    nodes.add_open(&node, Arc::default(), caller, (true, true), 0);
                }
                node
            }),
            ("it is removed", |nodes, node| {
                let (handle, fileid) = (node.handle, node.fileid);
                drop(node);
                nodes.set_gone(fileid);
                nodes.insert(handle, (), fileid, Kind::File)
            }),
        ];
        for (way, take_out) in ways {
            for fails in [false, true] {
                let losses = Arc::<Losses>::default();
                let nodes = Nodes::<Slow>::new(1000, losses.clone());
                let (node, sync) = written(&nodes, fails);
                let node = take_out(&nodes, node);
                impresario_testing::until("it is being closed", || sync.begun.load(Ordering::Acquire));
                assert!(!sync.ends.load(Ordering::Acquire), "{way}: the call has waited");
                assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT, "{way}");
                std::thread::scope(|scope| {
                    let synced = scope.spawn(|| {
                        let _syncing = node.syncing.lock();
                        node.sync_written(&losses)
                    });
                    std::thread::sleep(Duration::from_millis(20));
                    assert!(!synced.is_finished(), "{way}: a sync of the file has not waited");
                    sync.ends.store(true, Ordering::Release);
                    assert_eq!(synced.join().unwrap().is_err(), fails, "{way}");
                });
                let lost = fails.then_some(node.handle).into_iter().collect();
                assert_eq!(nodes.sync_all(), Ok(Lost { files: Some(lost), any: 0 }), "{way}");
            }
        }
    }

    #[test]
    fn where_more_is_open_than_may_be_who_closes_waits() {
        let nodes = Nodes::<Slow>::new(1, Arc::default());
        let (node, sync) = written(&nodes, false);
        sync.ends.store(true, Ordering::Release);
        nodes.close_opens(&node);
        assert!(sync.begun.load(Ordering::Acquire) && nodes.count() == 1);
    }

    #[test]
    fn a_sync_of_all_waits_for_what_was_taken_out_and_is_not_closed() {
        type TakeOut = fn(&Nodes<Slow>, Arc<Node<Slow>>);
        let ways: [(&str, TakeOut); 6] = [
            ("rights are checked anew", |nodes, node| nodes.close_opens(&node)),
            ("another caller needs its place", |nodes, node| {
                for caller in 1..=OPENS_MAX as u64 {
                    nodes.add_open(&node, Arc::default(), caller, (true, true), 0);
                }
            }),
            ("the node is idle", |nodes, node| {
                drop(node);
                std::thread::sleep(Duration::from_millis(2));
                nodes.close_idle(Duration::ZERO);
            }),
            ("all are closed", |nodes, node| {
                drop(node);
                nodes.close_all();
            }),
            ("others need its descriptors", |nodes, node| {
                drop(node);
                for n in 0..2000_u64 {
                    nodes.insert(Handle::new(&n.to_le_bytes()).unwrap(), (), 100 + n, Kind::File);
                }
            }),
            ("it is removed", |nodes, node| {
                nodes.hold(&node);
                nodes.set_gone(node.fileid);
                nodes.release(&node.handle);
            }),
        ];
        for (way, take_out) in ways {
            let nodes = Nodes::<Slow>::new(1, Arc::default());
            let (node, sync) = written(&nodes, true);
            let handle = node.handle;
            sync.ends.store(true, Ordering::Release);
            // Whoever closes it has not come to that yet.
            let closing = node.any_open();
            take_out(&nodes, node);
            assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT, "{way}");
            assert!(!sync.begun.load(Ordering::Acquire), "{way}: it was not out");
            drop(closing);
            assert_eq!(nodes.sync_all(), Ok(Lost { files: Some(vec![handle]), any: 0 }), "{way}");
        }
    }

    #[test]
    fn a_node_that_is_held_again_is_not_waited_for() {
        let nodes = Nodes::<Slow>::new(16, Arc::default());
        let (node, sync) = written(&nodes, false);
        nodes.set_gone(node.fileid);
        sync.ends.store(true, Ordering::Release);
        assert_eq!(nodes.sync_all_until(Instant::now()), TIMED_OUT);
        nodes.hold(&node);
        assert_eq!(nodes.sync_all_until(Instant::now()), Ok(Lost { files: Some(Vec::new()), any: 0 }));
        assert!(sync.begun.load(Ordering::Acquire));
    }

    #[test]
    fn a_write_that_a_sync_overtakes_is_synced_by_the_next() {
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Nothing>::new(16, losses.clone());
        let node = nodes.insert(Handle::new(b"node").unwrap(), (), 0, Kind::File);
        let open = nodes.add_open(&node, (), 0, (true, true), 0);
        let writing = open.changing();
        assert_eq!(node.sync_written(&losses), Ok(true));
        drop(writing);
        assert_eq!(node.sync_written(&losses), Ok(true));
        assert_eq!(node.sync_written(&losses), Ok(false));
    }

    #[test]
    fn a_sync_tells_what_a_descriptor_that_left_before_it_was_told() {
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Slow>::new(16, losses.clone());
        let node = nodes.insert(Handle::new(b"node").unwrap(), (), 7, Kind::File);
        let sync = Arc::new(SlowSync { ends: true.into(), fails: true, ..SlowSync::default() });
        let checked = node.rights();
        nodes.close_opens(&node);
        let closing = nodes.add_open(&node, sync, 0, (true, true), checked);
        drop(closing.changing());
        let _syncing = node.syncing.lock();
        assert_eq!(node.sync_written(&losses), Ok(false), "it is its caller's only");
        // The kernel tells the loss to that one, and not to one that is opened after it was told.
        let others = || {
            drop(closing);
            Ok(())
        };
        assert_eq!(node.sync_others(&losses, others), Err(Errno(libc::EIO)));
    }

    #[test]
    fn a_sync_covers_what_was_taken_out_while_calls_use_it() {
        type TakeOut = fn(&Nodes<Slow>, &Node<Slow>);
        let ways: [(&str, TakeOut); 2] = [
            ("rights are checked anew", |nodes, node| nodes.close_opens(node)),
            ("another caller needs its place", |nodes, node| {
                for caller in 1..=OPENS_MAX as u64 {
                    nodes.add_open(node, Arc::default(), caller, (true, true), 0);
                }
            }),
        ];
        for (way, take_out) in ways {
            for synced in [Ok(true), Err(Errno(libc::EIO))] {
                let losses = Arc::<Losses>::default();
                let nodes = Nodes::<Slow>::new(1000, losses.clone());
                let (node, sync) = written(&nodes, synced.is_err());
                sync.ends.store(true, Ordering::Release);
                let in_use = node.any_open();
                take_out(&nodes, &node);
                impresario_testing::until("nobody else closes it", || !losses.is_closing(&node.handle));
                let _syncing = node.syncing.lock();
                assert_eq!(node.sync_written(&losses), synced, "{way}");
                assert!(in_use.is_some());
            }
        }
    }

    #[test]
    fn a_sync_covers_what_is_taken_out_while_it_looks() {
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Slow>::new(1000, losses.clone());
        let (node, sync) = written(&nodes, false);
        sync.ends.store(true, Ordering::Release);
        let in_use = node.any_open();
        std::thread::scope(|scope| {
            let mut opens = node.opens.lock();
            let synced = scope.spawn(|| {
                let _syncing = node.syncing.lock();
                node.sync_written(&losses)
            });
            std::thread::sleep(Duration::from_millis(20));
            // As `take_opens`, before the sync has seen what is open.
            opens.iter().for_each(|open| node.take(open));
            let taken = losses.closing(node.handle, std::mem::take(&mut *opens));
            drop(opens);
            drop(taken);
            assert_eq!(synced.join().unwrap(), Ok(true));
        });
        assert!(in_use.is_some());
    }

    #[test]
    fn a_descriptor_that_was_opened_before_rights_changed_serves_nobody_else() {
        let nodes = Nodes::<Nothing>::new(16, Arc::default());
        let node = nodes.insert(Handle::new(b"node").unwrap(), (), 0, Kind::File);
        let checked = node.rights();
        nodes.close_opens(&node);
        drop(nodes.add_open(&node, (), 3, (true, true), checked));
        assert!(node.open_for(3, Use::Read, 0).is_none());
        drop(nodes.add_open(&node, (), 3, (true, true), node.rights()));
        assert!(node.open_for(3, Use::Read, 0).is_some());
    }

    #[test]
    fn stable_writes_of_one_descriptor_share_a_sync() {
        const WRITES: u64 = 8;
        let losses = Arc::<Losses>::default();
        let nodes = Nodes::<Nothing>::new(16, losses.clone());
        let node = nodes.insert(Handle::new(b"node").unwrap(), (), 0, Kind::File);
        let open = nodes.add_open(&node, (), 0, (true, true), 0);
        let (begun, syncs) = (open.stable.made(), AtomicUsize::new(0));
        let sync = || {
            impresario_testing::until("all have written", || open.stable.made() == begun + WRITES);
            syncs.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        std::thread::scope(|scope| {
            (0..WRITES).for_each(|_| drop(scope.spawn(|| node.sync_stable(&open, &losses, sync).unwrap())));
        });
        // Those that wrote after the first sync had begun need another.
        assert!((1..=2).contains(&syncs.load(Ordering::Relaxed)), "{syncs:?}");
    }

    /// Whose files have no names.
    struct Removed;

    impl Descriptors for Removed {
        type Name = ();
        type Open = Arc<AtomicUsize>;

        fn sync(syncs: &Arc<AtomicUsize>) -> Result<()> {
            syncs.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn is_removed((): &()) -> bool {
            true
        }
    }

    #[test]
    fn what_nobody_can_read_any_more_is_not_synced() {
        let nodes = Nodes::<Removed>::new(16, Arc::default());
        let node = nodes.insert(Handle::new(b"node").unwrap(), (), 7, Kind::File);
        let syncs = Arc::<AtomicUsize>::default();
        drop(nodes.add_open(&node, syncs.clone(), 0, (true, true), 0).changing());
        nodes.hold(&node);
        nodes.set_gone(7);
        nodes.close_opens(&node);
        // It is held: somebody may ask what became of it.
        impresario_testing::until("it is synced", || syncs.load(Ordering::Relaxed) == 1);
        impresario_testing::until("it is closed", || nodes.count() == 1);
        drop(nodes.add_open(&node, syncs.clone(), 0, (true, true), node.rights()).changing());
        nodes.release(&node.handle);
        drop(node);
        assert_eq!((syncs.load(Ordering::Relaxed), nodes.count()), (1, 0));
    }
}
