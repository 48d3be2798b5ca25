//! Which data a server may have lost: acknowledged writes since the last sync, by the state of the data server.
//!
//! An acknowledged write lies in the memory of its data server's machine until a sync. When the machine restarts
//! meanwhile, or a sync by whomever fails, the next sync of the file must fail instead of promising what is gone, whichever
//! way it goes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use impresario_base::lock::Mutex;
use impresario_wire::{FileKey, LaneState};

use crate::error::{ClientError, Peer};
use rustc_hash::{FxHashMap, FxHashSet};

/// Entries of a generation; twice as many are kept at most. What is older is forgotten: a file that was written
/// and not synced before tens of thousands of others were written.
const GENERATION_MAX: usize = 1 << 15;
/// Runs of I/O nodes whose losses are remembered as told. What a run says whose losses are forgotten is told again.
const TOLD_MAX: usize = 64;

/// Writes without a sync since, per data server and file.
#[derive(Default)]
pub struct Unsynced {
    generations: Mutex<[FxHashMap<(u16, FileKey), u64>; 2]>,
    /// Some writes were forgotten.
    has_forgotten: AtomicBool,
    /// Writes that were noted.
    writes: AtomicU64,
    /// The runs of I/O nodes that have synced everything, the latest last, and how often any file may have lost something then.
    told: Mutex<Vec<(u64, u64)>>,
}

/// What an I/O node of a folder says when it has synced all files: [`impresario_wire::Answer::AllSynced`].
pub(crate) struct AllSynced<'a> {
    pub(crate) lane: LaneState,
    pub(crate) run: u64,
    pub(crate) lost: Option<&'a [FileKey]>,
    pub(crate) any_lost: u64,
}

impl Unsynced {
    /// A write was acknowledged by a server in this state.
    pub fn note_write(&self, file: FileKey, LaneState { server, state }: LaneState) {
        let mut generations = self.generations.lock();
        self.writes.fetch_add(1, Ordering::Relaxed);
        let [young, old] = &mut *generations;
        if young.contains_key(&(server, file)) {
            return;
        }
        let first = old.remove(&(server, file)).unwrap_or(state);
        if young.len() >= GENERATION_MAX {
            if !old.is_empty() {
                self.has_forgotten.store(true, Ordering::Relaxed);
            }
            *old = std::mem::take(young);
        }
        young.insert((server, file), first);
    }

    /// How many writes were noted so far.
    pub(crate) fn writes(&self) -> u64 {
        let _generations = self.generations.lock();
        self.writes.load(Ordering::Relaxed)
    }

    /// All that was written through an I/O node of a folder, but for what is lost, was synced since `writes` were noted. False if more was
    /// written meanwhile, or if files of which something is lost may be among those that were forgotten: that says too little to
    /// leave the node.
    pub(crate) fn note_sync_of_all(&self, writes: u64, synced: &AllSynced<'_>) -> bool {
        let mut generations = self.generations.lock();
        if self.writes.load(Ordering::Relaxed) != writes {
            return false;
        }
        // What any file may have lost during a run of the node that the client has not been told of: all of its own.
        let mut told = self.told.lock();
        let known = told.iter().find(|(run, _)| *run == synced.run).map_or(0, |(_, any)| *any);
        let all_lost = synced.any_lost > known || synced.lost.is_none();
        let some_lost = all_lost || synced.lost.is_some_and(|lost| !lost.is_empty());
        if some_lost && self.has_forgotten.load(Ordering::Relaxed) {
            return false;
        }
        told.retain(|(run, _)| *run != synced.run);
        if told.len() >= TOLD_MAX {
            told.remove(0);
        }
        told.push((synced.run, synced.any_lost));
        let lost: FxHashSet<FileKey> = synced.lost.unwrap_or_default().iter().copied().collect();
        for generation in generations.iter_mut() {
            generation.retain(|(server, file), state| {
                let is_lost = all_lost || lost.contains(file);
                // What was first written through another node is judged by that one's state, unless it was written here too and lost.
                let stays = is_lost || synced.lane != (LaneState { server: *server, state: *state });
                if is_lost {
                    *state = LaneState::unknown(*server).state;
                }
                stays
            });
        }
        self.has_forgotten.store(false, Ordering::Relaxed);
        true
    }

    /// Everything that was written is synced. False, once something was forgotten, until all is synced at once.
    pub(crate) fn is_empty(&self) -> bool {
        let generations = self.generations.lock();
        !self.has_forgotten.load(Ordering::Relaxed) && generations.iter().all(FxHashMap::is_empty)
    }

    /// A sync was acknowledged. False when writes from before may have been lost.
    pub fn note_sync(&self, file: FileKey, LaneState { server, state }: LaneState) -> bool {
        self.forget(server, file).is_none_or(|written| written == state)
    }

    /// Judges a sync of a file by the states of its data servers and by how one of them failed, or 0.
    pub fn judge(
        &self,
        file: FileKey,
        lanes: &[LaneState],
        errno: i32,
        peer: impl Fn(u16) -> Result<Peer, ClientError>,
    ) -> Result<(), ClientError> {
        // Each of them, so that each is told once.
        let lost = lanes.iter().filter(|lane| !self.note_sync(file, **lane)).fold(None, |_, lane| Some(lane.server));
        let server = match (lost, errno) {
            (None, 0) => return Ok(()),
            (Some(server), _) => server,
            (None, _) => lanes.first().map_or(0, |lane| lane.server),
        };
        Err(ClientError::UnsyncedLost { peer: peer(server)?, errno: if errno == 0 { libc::EIO } else { errno } })
    }

    /// The object is gone, or its state known.
    pub fn forget(&self, server: u16, file: FileKey) -> Option<u64> {
        let mut generations = self.generations.lock();
        let [young, old] = &mut *generations;
        let (a, b) = (young.remove(&(server, file)), old.remove(&(server, file)));
        a.or(b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_restarted_machine_loses_writes() {
        let (file, a, b) = (FileKey(1), 1 << 32, 2 << 32);
        let lane = |server, incarnation, loss| LaneState::new(server, incarnation, loss);
        let unsynced = Unsynced::default();
        assert!(unsynced.note_sync(file, lane(0, b, 0)), "nothing was written");
        unsynced.note_write(file, lane(0, a | 1, 0));
        assert!(unsynced.note_sync(file, lane(0, a | 2, 0)), "the process restarted, the machine did not");
        unsynced.note_write(file, lane(0, a, 0));
        unsynced.note_write(file, lane(0, b, 0));
        unsynced.note_write(file, lane(1, b, 3));
        assert!(!unsynced.note_sync(file, lane(0, b, 0)), "the first write may be lost");
        assert!(unsynced.note_sync(file, lane(1, b, 3)), "another server");
        assert!(unsynced.note_sync(file, lane(0, b, 0)), "reported once");
        unsynced.note_write(file, lane(1, b, 3));
        assert!(!unsynced.note_sync(file, lane(1, b, 4)), "another client's sync failed");
    }

    #[test]
    fn a_sync_of_all_settles_what_was_written_before_it() {
        let (a, b) = (1 << 32, 2 << 32);
        let lane = |incarnation| LaneState::new(0, incarnation, 0);
        let unsynced = Unsynced::default();
        unsynced.note_write(FileKey(1), lane(a));
        unsynced.note_write(FileKey(2), lane(b));
        let writes = unsynced.writes();
        unsynced.note_write(FileKey(2), lane(b));
        let synced = AllSynced { lane: lane(b), run: b | 1, lost: Some(&[]), any_lost: 0 };
        assert!(!unsynced.note_sync_of_all(writes, &synced), "written meanwhile");
        assert!(unsynced.note_sync_of_all(unsynced.writes(), &synced) && !unsynced.is_empty());
        assert!(unsynced.note_sync(FileKey(2), lane(a)), "it is synced");
        assert!(!unsynced.note_sync(FileKey(1), lane(b)), "it was written through a node that was lost");
    }

    #[test]
    fn what_a_sync_of_all_says_is_lost_is_told_once_for_each_file_that_it_concerns() {
        let (here, run) = (LaneState::new(0, 5 << 32, 0), 5 << 32 | 9);
        let unsynced = Unsynced::default();
        let write = |file| unsynced.note_write(FileKey(file), here);
        let sync = |file| unsynced.note_sync(FileKey(file), here);
        let all = |run, lost: Option<&[FileKey]>, any_lost| {
            let synced = AllSynced { lane: here, run, lost, any_lost };
            assert!(unsynced.note_sync_of_all(unsynced.writes(), &synced));
        };
        (1..=3).for_each(write);
        all(run, Some(&[FileKey(2), FileKey(7)]), 0);
        write(2);
        assert_eq!([1, 2, 3].map(sync), [true, false, true], "another node of the same machine does not know it");
        assert_eq!([2, 7].map(sync), [true, true], "told once; what others wrote is theirs");
        write(1);
        all(run, Some(&[]), 1);
        assert_eq!([1, 2].map(sync), [false, true], "any file may have lost something");
        write(1);
        all(run, Some(&[]), 1);
        assert!(sync(1), "that was before");
        for (run, lost, any) in [(run, None, 1), (run + 1, Some(&[][..]), 1)] {
            write(1);
            all(run, lost, any);
            assert!(!sync(1), "too many to name, or another run");
        }
    }

    #[test]
    fn what_was_lost_at_a_node_is_lost_wherever_the_file_was_written_first() {
        let [first, second] = [1, 2].map(|machine| LaneState::new(0, machine << 32, 0));
        let unsynced = Unsynced::default();
        for (lost, any_lost) in [(Some(&[FileKey(1)][..]), 0), (None, 0), (Some(&[][..]), 1)] {
            unsynced.note_write(FileKey(1), first);
            unsynced.note_write(FileKey(1), second);
            let synced = AllSynced { lane: second, run: 2 << 32 | 1, lost, any_lost };
            assert!(unsynced.note_sync_of_all(unsynced.writes(), &synced));
            assert!(!unsynced.note_sync(FileKey(1), first), "{lost:?}");
            assert!(unsynced.note_sync(FileKey(1), first), "told once");
        }
    }

    #[test]
    fn each_run_of_a_node_tells_its_losses_once() {
        let here = LaneState::new(0, 5 << 32, 0);
        let unsynced = Unsynced::default();
        let is_told = |run, any_lost| {
            unsynced.note_write(FileKey(1), here);
            let synced = AllSynced { lane: here, run, lost: Some(&[]), any_lost };
            assert!(unsynced.note_sync_of_all(unsynced.writes(), &synced));
            !unsynced.note_sync(FileKey(1), here)
        };
        let told = [(1, 1), (2, 1), (1, 1), (2, 1), (1, 2)].map(|(run, any)| is_told(run, any));
        assert_eq!(told, [true, true, false, false, true]);
        (0..TOLD_MAX as u64).for_each(|run| assert!(is_told(100 + run, 1)));
        assert_eq!(unsynced.told.lock().len(), TOLD_MAX);
        assert!(!is_told(100, 1) && is_told(2, 1), "the runs that it has met last");
    }

    #[test]
    fn memory_is_bounded() {
        let unsynced = Unsynced::default();
        for key in 0..4 * GENERATION_MAX as u64 {
            unsynced.note_write(FileKey(key), LaneState::new(0, 7 << 32, 0));
        }
        let generations = unsynced.generations.lock();
        assert!(generations.iter().all(|g| g.len() <= GENERATION_MAX));
        assert!(generations[0].contains_key(&(0, FileKey(4 * GENERATION_MAX as u64 - 1))));
        drop(generations);
        (0..4 * GENERATION_MAX as u64).for_each(|key| _ = unsynced.forget(0, FileKey(key)));
        assert!(!unsynced.is_empty(), "what was forgotten is not synced");
        let mut synced =
            AllSynced { lane: LaneState::new(0, 7 << 32, 0), run: 1, lost: Some(&[FileKey(1)]), any_lost: 0 };
        assert!(!unsynced.note_sync_of_all(unsynced.writes(), &synced), "it may be the one that was forgotten");
        synced.lost = Some(&[]);
        assert!(unsynced.note_sync_of_all(unsynced.writes(), &synced) && unsynced.is_empty());
    }
}
