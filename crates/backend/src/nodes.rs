//! Nodes that were used lately: their descriptors, bounded in number and closed when they are idle.
//!
//! Every node in use has one descriptor that only names it; a file that is read or written has further ones, opened as
//! the callers on whose behalf they are used, so that the file system itself has checked their rights.

mod table;

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::Durable;
use impresario_base::lock::Mutex;

use crate::losses::{Closing, Losses};
use crate::{Errno, Handle, Kind, Result};
pub(crate) use table::Nodes;

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
