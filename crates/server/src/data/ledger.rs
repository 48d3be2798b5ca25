//! What a data server must still know after a restart, noted beside its objects: which epochs its clients have left, and
//! which objects have lost data.

use std::io;
use std::sync::Arc;

use impresario_base::lock::{Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use impresario_node::session::{Fence, Passage};
use impresario_store::{FileSystem, Note, ObjectStore};
use impresario_wire::{ClientKey, Fault, Sender, Who};
use smallvec::SmallVec;

use super::losses::{LOSS, Losses};
use crate::listener::before_waiting;

/// Clients that have raised their epochs and are remembered at least.
const RAISED_CLIENTS: usize = 1 << 16;
/// The notes are replaced by what they come to when there are this many more.
const NOTES_OVER: usize = 4096;

/// Clients are held up by others only where they share one of these.
const GATES: usize = 256;

/// The base epoch of the fence.
const BASE: u32 = 1;
/// The epoch of a client.
const EPOCH: u32 = 2;

/// The fence, and its notes in the store.
pub(super) struct Ledger {
    /// Never locked while something may wait.
    fence: RwLock<Fence>,
    /// By client: shared by what passes, taken alone to raise an epoch. Several are locked in their order.
    gates: Box<[RwLock<()>]>,
    /// Locked after a gate. Number of notes from which on they are replaced.
    notes_due: Mutex<usize>,
    losses: Arc<Losses>,
}

/// While this lives, the client does not raise its epoch: what was admitted is on its way to the scheduler, and must be there
/// before what its client sends in a newer epoch. That may take long, so other clients raise theirs meanwhile.
pub(super) struct Passing<'a>(#[allow(dead_code, reason = "held for its drop")] SmallVec<[RwLockReadGuard<'a, ()>; 1]>);

impl Ledger {
    /// Takes up what earlier runs noted.
    pub(super) fn open<F: FileSystem>(store: &ObjectStore<F>, losses: Arc<Losses>) -> io::Result<Ledger> {
        let mut fence = Fence::new(RAISED_CLIENTS);
        for note in store.open_notes()? {
            match note.kind {
                BASE => fence.raise_base(note.value),
                EPOCH => fence.remember(note.key, note.value),
                LOSS => losses.restore(note.key, note.value),
                _ => {}
            }
        }
        losses.doubt(store.open_doubts()?);
        let gates = (0..GATES).map(|_| RwLock::default()).collect();
        Ok(Ledger { fence: RwLock::new(fence), gates, notes_due: Mutex::new(NOTES_OVER), losses })
    }

    /// Lets a request pass, or refuses it; its epoch is noted before it passes.
    pub(super) fn admit<F: FileSystem>(&self, store: &ObjectStore<F>, who: Who) -> Result<Passing<'_>, Fault> {
        self.admit_all(store, who, &[])
    }

    /// The same for a request of several clients. Every epoch is learnt, whatever the others are.
    pub(super) fn admit_all<F: FileSystem>(
        &self,
        store: &ObjectStore<F>,
        who: Who,
        others: &[Sender],
    ) -> Result<Passing<'_>, Fault> {
        let senders = || others.iter().map(|other| (other.client, other.epoch)).chain([(who.client, who.epoch)]);
        let mut gates: SmallVec<[usize; 1]> = senders().map(|(client, _)| gate_of(client)).collect();
        gates.sort_unstable();
        gates.dedup();
        loop {
            let passing = Passing(gates.iter().map(|gate| self.gates[*gate].read()).collect());
            let fence = self.fence.read();
            let passages = || senders().map(|(client, epoch)| fence.passage(client.0, epoch));
            if !passages().any(|passage| passage == Passage::Raised) {
                let is_stale = passages().any(|passage| passage == Passage::Closed);
                return if is_stale { Err(stale(who)) } else { Ok(passing) };
            }
            drop(fence);
            drop(passing);
            // A note may wait for the device.
            before_waiting();
            senders().try_for_each(|(client, epoch)| self.raise(store, client, epoch))?;
        }
    }

    /// Returns when all that was admitted before is with the scheduler.
    pub(super) fn barrier(&self) {
        self.gates.iter().for_each(|gate| drop(gate.write()));
    }

    fn raise<F: FileSystem>(&self, store: &ObjectStore<F>, client: ClientKey, epoch: u32) -> Result<(), Fault> {
        let own = gate_of(client);
        let mut gates = own..own + 1;
        loop {
            let alone: Vec<RwLockWriteGuard<'_, ()>> = self.gates[gates.clone()].iter().map(RwLock::write).collect();
            // Until it is remembered: notes that are replaced meanwhile would lack it.
            let mut due = self.notes_due.lock();
            let (passage, rotates) = {
                let fence = self.fence.read();
                (fence.passage(client.0, epoch), fence.rotates(client.0))
            };
            if passage != Passage::Raised {
                return Ok(());
            }
            if rotates && alone.len() < self.gates.len() {
                // The base may rise, which is the epoch of clients with any gate: what they have sent must be with the scheduler
                // first. All wait for that, once in as many raised clients as are remembered. Nothing is held while it begins anew.
                gates = 0..self.gates.len();
                continue;
            }
            self.replace_notes(store, &mut due);
            store.note(Note { kind: EPOCH, key: client.0, value: epoch }).map_err(|error| Fault {
                errno: error.raw_os_error().unwrap_or(libc::EIO),
                message: format!("the epoch of a client cannot be noted in the data server's folder: {error}"),
            })?;
            self.fence.write().remember(client.0, epoch);
            return Ok(());
        }
    }

    /// Replaces the notes if there are too many: a device that fails every sync has losses noted without end.
    pub(super) fn tidy<F: FileSystem>(&self, store: &ObjectStore<F>) {
        let notes = store.notes_len();
        if notes < NOTES_OVER || self.notes_due.try_lock().is_none_or(|due| notes < *due) {
            return;
        }
        // It waits for the device.
        before_waiting();
        if let Some(mut due) = self.notes_due.try_lock() {
            self.replace_notes(store, &mut due);
        }
    }

    fn replace_notes<F: FileSystem>(&self, store: &ObjectStore<F>, due: &mut usize) {
        if store.notes_len() < *due {
            return;
        }
        let kept: Vec<Note> = {
            let fence = self.fence.read();
            let base = Note { kind: BASE, key: 0, value: fence.base() };
            let epochs = fence.remembered().map(|(key, value)| Note { kind: EPOCH, key, value });
            std::iter::once(base).chain(epochs).collect()
        };
        // A full device has room for more in the old file.
        if let Err(error) = self.losses.while_none(|losses| store.replace_notes(kept.into_iter().chain(losses))) {
            tracing::warn!(%error, "the notes in the data server's folder cannot be replaced; they grow");
        }
        *due = store.notes_len() + NOTES_OVER;
    }
}

fn gate_of(client: ClientKey) -> usize {
    client.0 as usize % GATES
}

/// What the fence says of an older epoch.
pub(crate) fn stale(who: Who) -> Fault {
    let message =
        format!("a request of epoch {} came after the client had begun a newer one; it was not applied", who.epoch);
    Fault { errno: Fault::FENCED, message }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_store::{FolderIdentity, StoreOptions};

    fn who(client: u64, epoch: u32) -> Who {
        Who { client: ClientKey(client), epoch, ..Who::default() }
    }

    fn other(client: u64, epoch: u32) -> Sender {
        Sender::from(&who(client, epoch))
    }

    fn made() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let identity = FolderIdentity { cluster: 1, store: 2, server: "data.0".into() };
        impresario_store::make(dir.path(), &identity).unwrap();
        dir
    }

    fn open(dir: &tempfile::TempDir) -> ObjectStore {
        ObjectStore::open(dir.path(), "data.0", StoreOptions::default()).unwrap()
    }

    #[test]
    fn epochs_outlive_restarts_and_their_notes_are_bounded() {
        let dir = made();
        let rounds = 3 * NOTES_OVER as u32;
        {
            let store = open(&dir);
            let ledger = Ledger::open(&store, Arc::default()).unwrap();
            (1..=rounds).for_each(|epoch| drop(ledger.admit(&store, who(7, epoch)).unwrap()));
            assert!(ledger.admit_all(&store, who(9, 0), &[other(7, rounds - 1), other(8, 5)]).is_err());
            assert!(store.notes_len() <= 2 * NOTES_OVER, "{}", store.notes_len());
        }
        let store = open(&dir);
        let ledger = Ledger::open(&store, Arc::default()).unwrap();
        assert_eq!(ledger.admit(&store, who(7, rounds - 1)).err().unwrap().errno, Fault::FENCED);
        assert_eq!(ledger.admit(&store, who(8, 4)).err().unwrap().errno, Fault::FENCED);
        drop(ledger.admit(&store, who(7, rounds)).unwrap());
        drop(ledger.admit(&store, who(9, 0)).unwrap());
    }

    #[test]
    fn losses_outlive_restarts_and_the_replacing_of_notes() {
        let dir = made();
        {
            let (store, losses) = (open(&dir), Arc::new(Losses::default()));
            let ledger = Ledger::open(&store, losses.clone()).unwrap();
            assert_eq!((losses.lost(&store, 5), losses.lost(&store, 6), losses.lost(&store, 5)), (1, 2, 3));
            (1..=3 * NOTES_OVER as u32).for_each(|epoch| drop(ledger.admit(&store, who(7, epoch)).unwrap()));
        }
        let (store, losses) = (open(&dir), Arc::new(Losses::default()));
        Ledger::open(&store, losses.clone()).unwrap();
        assert_eq!((losses.of(5), losses.of(6), losses.of(7)), (3, 2, 0));
        assert_eq!(losses.lost(&store, 7), 4, "a number is never used twice");
        (100..100 + (1 << 16)).for_each(|key| losses.restore(key, 5));
        assert!(losses.of(5) > 3, "forgotten: taken for lost anew");
    }

    #[test]
    fn an_epoch_is_raised_when_what_was_admitted_before_is_with_the_scheduler() {
        let dir = made();
        let store = open(&dir);
        let ledger = Ledger::open(&store, Arc::default()).unwrap();
        let older = ledger.admit(&store, who(7, 0)).unwrap();
        std::thread::scope(|scope| {
            let newer = scope.spawn(|| drop(ledger.admit(&store, who(7, 1)).unwrap()));
            // Were it not held up, it would nearly always have been noted by now.
            std::thread::yield_now();
            assert_eq!(ledger.fence.read().passage(7, 1), Passage::Raised);
            drop(older);
            newer.join().unwrap();
        });
        assert!(ledger.admit(&store, who(7, 0)).is_err());
    }

    #[test]
    fn the_base_is_raised_when_what_any_client_sent_before_is_with_the_scheduler() {
        let dir = made();
        let store = open(&dir);
        let ledger = Ledger::open(&store, Arc::default()).unwrap();
        *ledger.fence.write() = Fence::new(1);
        let raise = |client| drop(ledger.admit(&store, who(client, 1)).unwrap());
        // The first two are forgotten when the fourth is remembered.
        (8..11).for_each(raise);
        let unknown = ledger.admit(&store, who(7, 0)).unwrap();
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            scope.spawn(move || {
                raise(11);
                let _ = tell.send(()); // nobody may wait for it any more
            });
            let early = told.recv_timeout(std::time::Duration::from_millis(100));
            let base = ledger.fence.read().base();
            // Before a failure is reported, so that the thread ends.
            drop(unknown);
            assert!(early.is_err() && base == 0, "the base is {base}");
        });
        assert_eq!(ledger.fence.read().base(), 1);
        assert!(ledger.admit(&store, who(7, 0)).is_err());
    }

    #[test]
    fn many_that_raise_the_base_at_once_do_not_wait_for_each_other() {
        let dir = made();
        let store = open(&dir);
        let ledger = Arc::new(Ledger::open(&store, Arc::default()).unwrap());
        *ledger.fence.write() = Fence::new(1);
        let (store, (tell, told)) = (Arc::new(store), std::sync::mpsc::channel());
        // Not joined: they would wait for ever.
        for first in (0..4).map(|thread| 1000 * thread) {
            let (tell, ledger, store) = (tell.clone(), ledger.clone(), store.clone());
            std::thread::spawn(move || {
                let raise = |client| ledger.raise(&*store, ClientKey(client), u32::MAX >> 8).is_ok();
                tell.send((first..first + 50).all(raise))
            });
        }
        (0..4).for_each(|_| assert_eq!(told.recv_timeout(std::time::Duration::from_secs(60)), Ok(true)));
    }

    /// Requests wait for room on their way to the scheduler, for seconds.
    #[test]
    fn a_request_that_is_held_up_holds_up_no_other_client() {
        let dir = made();
        let store = open(&dir);
        let ledger = Ledger::open(&store, Arc::default()).unwrap();
        let held_up = ledger.admit(&store, who(7, 0)).unwrap();
        std::thread::scope(|scope| {
            let (tell, told) = std::sync::mpsc::channel();
            for others in [who(8, 1), who(9, 0), who(8, 1)] {
                let (tell, ledger, store) = (tell.clone(), &ledger, &store);
                scope.spawn(move || tell.send(ledger.admit(store, others).is_ok()));
            }
            let mut told = (0..3).map(|_| told.recv_timeout(std::time::Duration::from_secs(20)));
            let all = told.all(|admitted| admitted == Ok(true));
            // Before a failure is reported, so that the threads end.
            drop(held_up);
            assert!(all, "other clients wait");
        });
    }

    #[test]
    fn losses_without_end_do_not_fill_the_notes() {
        let dir = made();
        let (store, losses) = (open(&dir), Arc::new(Losses::default()));
        let ledger = Ledger::open(&store, losses.clone()).unwrap();
        drop(ledger.admit(&store, who(7, 3)).unwrap());
        for _ in 0..3 * NOTES_OVER {
            losses.lost(&store, 5);
            ledger.tidy(&store);
        }
        assert!(store.notes_len() <= 2 * NOTES_OVER, "{}", store.notes_len());
        drop((ledger, store));
        let (store, losses) = (open(&dir), Arc::new(Losses::default()));
        let ledger = Ledger::open(&store, losses.clone()).unwrap();
        assert_eq!(losses.of(5), 3 * NOTES_OVER as u32);
        assert!(ledger.admit(&store, who(7, 2)).is_err());
    }
}
