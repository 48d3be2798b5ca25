//! Which data a server may have lost: acknowledged writes since the last sync, by the state of the data server.
//!
//! An acknowledged write lies in the memory of its data server's machine until a sync. When the machine restarts
//! meanwhile, or a sync by whomever fails, the next sync of the file must fail instead of promising what is gone, whichever
//! way it goes.

use impresario_base::lock::Mutex;
use impresario_wire::{FileKey, LaneState};

use crate::error::{ClientError, Peer};
use crate::told::Told;
use rustc_hash::{FxHashMap, FxHashSet};

/// Entries of a generation, a full table of 16 MiB at most; twice as many are kept at most. What is older is forgotten: a file
/// that was written and not synced before a hundred thousand others were written.
const GENERATION_MAX: usize = 7 << 14;
/// State of a data server of which it is not known what it has lost: no state is the same.
const UNKNOWN: u64 = LaneState::unknown(0).state;
/// Runs of I/O nodes whose losses are remembered as told. What a run says whose losses are forgotten is told again.
const RUNS_MAX: usize = 64;

/// Writes without a sync since, per data server and file, and the losses that were found so.
#[derive(Default)]
pub struct Unsynced {
    state: Mutex<State>,
    losses: Told,
    /// The runs of I/O nodes that have synced everything, the latest last, and how often any file may have lost something then.
    runs: Mutex<Vec<(u64, u64)>>,
}

#[derive(Default)]
struct State {
    young: FxHashMap<(u16, FileKey), Entry>,
    old: FxHashMap<(u16, FileKey), Entry>,
    /// Some writes were forgotten.
    has_forgotten: bool,
    /// Writes that were noted: the number of the last.
    writes: u64,
}

/// Writes that a data server acknowledged in one state, by their numbers; both ends are 0: none.
#[derive(Clone, Copy, Default)]
struct Run {
    state: u64,
    first: u64,
    last: u64,
}

/// The unsynced writes of a file on one data server. A server never returns to a state that it has left, so of more than two
/// runs all but the last are lost unless they were synced: two are kept, and the second may stand for several.
#[derive(Clone, Copy, Default)]
struct Entry {
    run: Run,
    later: Run,
}

impl Run {
    fn is_none(&self) -> bool {
        self.last == 0
    }

    fn note(&mut self, number: u64, state: u64) {
        if self.is_none() {
            (self.state, self.first) = (state, number);
        } else if self.state != state {
            self.state = UNKNOWN;
        }
        self.last = number;
    }

    /// A sync was acknowledged in this state that was sent after write `mark`. True when it says that some of these writes may
    /// be lost. What was written since stays, to be judged by the next sync.
    fn settle(&mut self, mark: u64, state: u64) -> bool {
        if self.is_none() || self.first > mark {
            return false;
        }
        let is_lost = self.state != state;
        // The state of a lost run is over: what was written in it later is told of with the rest.
        if self.last <= mark || (is_lost && self.state != UNKNOWN) {
            *self = Run::default();
        } else {
            self.first = mark + 1;
        }
        is_lost
    }
}

impl Entry {
    fn note(&mut self, number: u64, state: u64) {
        let is_first = self.later.is_none() && (self.run.is_none() || self.run.state == state);
        let run = if is_first { &mut self.run } else { &mut self.later };
        run.note(number, state);
    }

    /// As [`Run::settle`].
    fn settle(&mut self, mark: u64, state: u64) -> bool {
        // Both, as each is to be told of once.
        let is_lost = self.run.settle(mark, state) | self.later.settle(mark, state);
        if self.run.is_none() {
            self.run = std::mem::take(&mut self.later);
        }
        is_lost
    }

    fn is_settled(&self) -> bool {
        self.run.is_none()
    }
}

/// What an I/O node of a folder says when it has synced all files: [`impresario_wire::Answer::AllSynced`].
pub(crate) struct AllSynced<'a> {
    pub(crate) lane: LaneState,
    pub(crate) run: u64,
    pub(crate) lost: Option<&'a [FileKey]>,
    pub(crate) any_lost: u64,
}

impl State {
    /// As [`Run::settle`], of a file on the server that was in this state.
    fn settle(&mut self, file: FileKey, mark: u64, LaneState { server, state }: LaneState) -> bool {
        let key = (server, file);
        for generation in [&mut self.young, &mut self.old] {
            if let Some(entry) = generation.get_mut(&key) {
                let is_lost = entry.settle(mark, state);
                if entry.is_settled() {
                    generation.remove(&key);
                }
                return is_lost;
            }
        }
        false
    }
}

impl Unsynced {
    /// A write was acknowledged by a server in this state.
    pub fn note_write(&self, file: FileKey, LaneState { server, state }: LaneState) {
        let mut table = self.state.lock();
        let State { young, old, has_forgotten, writes } = &mut *table;
        *writes += 1;
        if let Some(entry) = young.get_mut(&(server, file)) {
            return entry.note(*writes, state);
        }
        let mut entry = old.remove(&(server, file)).unwrap_or_default();
        entry.note(*writes, state);
        if young.len() >= GENERATION_MAX {
            *has_forgotten |= !old.is_empty();
            *old = std::mem::take(young);
        }
        young.insert((server, file), entry);
    }

    /// How many writes were noted so far. Who is about to send a sync asks, as the sync covers these and no later ones.
    pub fn writes(&self) -> u64 {
        self.state.lock().writes
    }

    /// The losses that syncs have found.
    pub fn losses(&self) -> &Told {
        &self.losses
    }

    /// All that was written through an I/O node of a folder, but for what is lost, was synced since `writes` were noted. False if more was
    /// written meanwhile, or if files of which something is lost may be among those that were forgotten: that says too little to
    /// leave the node.
    pub(crate) fn note_sync_of_all(&self, writes: u64, synced: &AllSynced<'_>) -> bool {
        let mut state = self.state.lock();
        if state.writes != writes {
            return false;
        }
        // What any file may have lost during a run of the node that the client has not been told of: all of its own.
        let mut runs = self.runs.lock();
        let known = runs.iter().find(|(run, _)| *run == synced.run).map_or(0, |(_, any)| *any);
        let all_lost = synced.any_lost > known || synced.lost.is_none();
        let some_lost = all_lost || synced.lost.is_some_and(|lost| !lost.is_empty());
        if some_lost && state.has_forgotten {
            return false;
        }
        runs.retain(|(run, _)| *run != synced.run);
        if runs.len() >= RUNS_MAX {
            runs.remove(0);
        }
        runs.push((synced.run, synced.any_lost));
        let lost: FxHashSet<FileKey> = synced.lost.unwrap_or_default().iter().copied().collect();
        let State { young, old, .. } = &mut *state;
        for generation in [young, old] {
            generation.retain(|(server, file), entry| {
                if all_lost || lost.contains(file) {
                    entry.run.state = UNKNOWN;
                    return true;
                }
                // What was written through another node is judged by that one's state, unless it was written here too and lost.
                let is_here = |run: &Run| synced.lane == LaneState { server: *server, state: run.state };
                !(is_here(&entry.run) && entry.later.is_none())
            });
        }
        state.has_forgotten = false;
        true
    }

    /// Everything that was written is synced. False, once something was forgotten, until all is synced at once.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock();
        !state.has_forgotten && state.young.is_empty() && state.old.is_empty()
    }

    /// Judges a sync of a file, which was sent when `mark` writes had been noted ([`writes`](Self::writes)), by the states of
    /// its data servers and by how one of them failed, or 0. What was written since then stays to be synced. A loss is recorded
    /// in the same step: no other sync of the file finds neither the writes nor their loss.
    pub fn judge(
        &self,
        file: FileKey,
        mark: u64,
        lanes: &[LaneState],
        errno: i32,
        peer: impl Fn(u16) -> Result<Peer, ClientError>,
    ) -> Result<(), ClientError> {
        let mut state = self.state.lock();
        // Each of them, so that each is told once.
        let lost = lanes.iter().filter(|lane| state.settle(file, mark, **lane)).fold(None, |_, lane| Some(lane.server));
        let server = match (lost, errno) {
            (None, 0) => return Ok(()),
            (Some(server), _) => server,
            (None, _) => lanes.first().map_or(0, |lane| lane.server),
        };
        let error =
            ClientError::UnsyncedLost { peer: peer(server)?, errno: if errno == 0 { libc::EIO } else { errno } };
        self.losses.lost(file, &error);
        Err(error)
    }

    /// The object is gone.
    pub(crate) fn forget(&self, server: u16, file: FileKey) {
        let mut state = self.state.lock();
        state.young.remove(&(server, file));
        state.old.remove(&(server, file));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Unsynced {
        /// A sync, of what was written before it, was acknowledged; false when some of that may be lost.
        fn note_sync(&self, file: FileKey, lane: LaneState) -> bool {
            self.note_sync_of(file, self.writes(), lane)
        }

        fn note_sync_of(&self, file: FileKey, mark: u64, lane: LaneState) -> bool {
            !self.state.lock().settle(file, mark, lane)
        }
    }

    /// Two boots of the machine of data server 0.
    fn boots() -> (LaneState, LaneState, LaneState) {
        (LaneState::new(0, 1 << 32, 0), LaneState::new(0, 2 << 32, 0), LaneState::new(0, 3 << 32, 0))
    }

    #[test]
    fn a_sync_says_nothing_of_what_was_written_after_it_was_sent() {
        let ((a, b, c), file) = (boots(), FileKey(1));
        let unsynced = Unsynced::default();
        let write = |lanes: &[LaneState]| lanes.iter().for_each(|lane| unsynced.note_write(file, *lane));
        // Written before a sync is sent and after it, the sync's state and whether it succeeds, the next sync's.
        let histories: [(&[_], &[_], _, _, _, _); 9] = [
            (&[a], &[a], a, true, b, false),
            (&[a], &[a], a, true, a, true),
            (&[a], &[b], a, true, b, true),
            (&[a], &[a, b], a, true, b, false),
            (&[a], &[b, c], a, true, c, false),
            (&[], &[b], a, true, b, true),
            (&[a], &[a], b, false, b, true),
            (&[a], &[b], b, false, b, true),
            (&[a], &[b], b, false, c, false),
        ];
        for (number, (before, after, first, is_kept, second, is_kept_too)) in histories.into_iter().enumerate() {
            write(before);
            let mark = unsynced.writes();
            write(after);
            assert_eq!(unsynced.note_sync_of(file, mark, first), is_kept, "history {number}");
            assert_eq!(unsynced.note_sync(file, second), is_kept_too, "history {number}, the next sync");
            assert!(unsynced.note_sync(file, c) && unsynced.is_empty(), "history {number}: told once");
        }
    }

    #[test]
    fn two_syncs_at_once_leave_what_neither_covers() {
        let ((a, b, _), file) = (boots(), FileKey(1));
        let unsynced = Unsynced::default();
        let marks = [1, 2].map(|_| {
            unsynced.note_write(file, a);
            unsynced.writes()
        });
        unsynced.note_write(file, a);
        for mark in marks.into_iter().rev() {
            assert!(unsynced.note_sync_of(file, mark, a));
        }
        assert!(!unsynced.note_sync(file, b));
    }

    #[test]
    fn whatever_order_the_answers_to_writes_come_in_none_is_forgotten() {
        let ((a, b, _), file) = (boots(), FileKey(1));
        let unsynced = Unsynced::default();
        unsynced.note_write(file, b);
        unsynced.note_write(file, a);
        assert!(!unsynced.note_sync(file, b), "the write that was answered before the power failure");
    }

    #[test]
    fn a_loss_is_recorded_when_the_writes_are_forgotten() {
        let ((a, b, _), file) = (boots(), FileKey(1));
        let unsynced = Unsynced::default();
        unsynced.note_write(file, a);
        let peer = |_| Ok(Peer { name: "data.0".into(), address: String::new() });
        assert!(unsynced.judge(file, unsynced.writes(), &[b], 0, peer).is_err());
        assert!(unsynced.losses().news(file, 0).is_some() && unsynced.is_empty());
    }

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
        (0..RUNS_MAX as u64).for_each(|run| assert!(is_told(100 + run, 1)));
        assert_eq!(unsynced.runs.lock().len(), RUNS_MAX);
        assert!(!is_told(100, 1) && is_told(2, 1), "the runs that it has met last");
    }

    #[test]
    fn the_last_files_are_remembered() {
        let unsynced = Unsynced::default();
        let (here, after) = (LaneState::new(0, 7 << 32, 0), LaneState::new(0, 8 << 32, 0));
        let keys = 0..5 * GENERATION_MAX as u64 / 2;
        keys.clone().for_each(|key| unsynced.note_write(FileKey(key), here));
        let last = keys.end - GENERATION_MAX as u64..keys.end;
        assert!(last.into_iter().all(|key| !unsynced.note_sync(FileKey(key), after)));
    }

    #[test]
    fn memory_is_bounded() {
        let unsynced = Unsynced::default();
        for key in 0..4 * GENERATION_MAX as u64 {
            unsynced.note_write(FileKey(key), LaneState::new(0, 7 << 32, 0));
        }
        let state = unsynced.state.lock();
        assert!([&state.young, &state.old].iter().all(|generation| generation.len() <= GENERATION_MAX));
        assert!(state.young.contains_key(&(0, FileKey(4 * GENERATION_MAX as u64 - 1))));
        drop(state);
        (0..4 * GENERATION_MAX as u64).for_each(|key| unsynced.forget(0, FileKey(key)));
        assert!(!unsynced.is_empty(), "what was forgotten is not synced");
        let mut synced =
            AllSynced { lane: LaneState::new(0, 7 << 32, 0), run: 1, lost: Some(&[FileKey(1)]), any_lost: 0 };
        assert!(!unsynced.note_sync_of_all(unsynced.writes(), &synced), "it may be the one that was forgotten");
        synced.lost = Some(&[]);
        assert!(unsynced.note_sync_of_all(unsynced.writes(), &synced) && unsynced.is_empty());
    }
}
