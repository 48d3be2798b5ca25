//! The table of the nodes in use: who is taken out when there are many, closed when idle, and what a sync of all covers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use impresario_base::Durable;
use impresario_base::lock::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use super::{Counted, Descriptors, Node, OPENS_MAX, Open, REMOVAL_WAIT, STAYS};
use crate::losses::{Closing, Losses, is_loss};
use crate::{Errno, Handle, Kind, Lost, Result, SYNC_ALL_WAIT};

const SHARDS: usize = 32;
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
mod tests;
