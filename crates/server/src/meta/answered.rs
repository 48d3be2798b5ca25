//! Which data servers have answered since this start, and above which keys new files are safe.
//!
//! The metadata folder may be an older copy that was put back. Then it knows nothing of the files that were made after the copy,
//! of which the data servers still have objects, and the keys that it would give next are theirs. So a new file is striped only
//! over data servers that have said, in the welcome to this server, below which keys they have had objects, and gets a key above
//! all that was said.
//!
//! **Why this is enough.** A data server notes durably that it has a key before it makes an object of it
//! (`store::keys`). So what a data server that has answered holds under a key lies below those that files get from then on, and
//! of one that has not answered new files use nothing. While this server runs, no other gives keys of its folder. What it costs: a
//! comparison for each new file, and where a data server is away when the metadata server starts, new files do without it
//! until it comes; they could not be written there anyway.
//!
//! Servers that start together are not told apart from those that are away: for [`PATIENCE`] new files wait for all.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_layout::Skipped;
use impresario_wire::Welcome;

use super::directory::COUNT_BITS;

/// After a start, new files wait so long for all data servers.
const PATIENCE: Duration = Duration::from_secs(3);
/// No data server has objects of more files than this: what it says is wrong.
const COUNT_MAX: u64 = 1 << (COUNT_BITS - 1);

/// What the data servers have said.
#[derive(Debug)]
pub struct Answered {
    prefix: u64,
    /// By number.
    names: Vec<String>,
    started: Instant,
    /// How long a new file waits while none has answered.
    wait_max: Duration,
    /// All have.
    are_all: AtomicBool,
    /// The least count of keys that none of them has had.
    keys_from: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    has_answered: Vec<bool>,
    is_stopped: bool,
}

impl Answered {
    /// Nothing was said yet by the data servers of these names, in the order of their numbers, to a metadata server whose keys
    /// begin with `prefix`. A new file waits for `wait_max` while none has answered.
    pub fn new(names: Vec<String>, prefix: u64, wait_max: Duration) -> Answered {
        let state = State { has_answered: vec![false; names.len()], is_stopped: false };
        Answered {
            prefix,
            names,
            started: Instant::now(),
            wait_max,
            are_all: AtomicBool::new(false),
            keys_from: AtomicU64::new(0),
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// A data server has welcomed this one. Only its first welcome counts: keys that it has had since are this server's own.
    pub fn note(&self, welcome: &Welcome) {
        let Some(number) = self.names.iter().position(|name| *name == welcome.name) else { return };
        let below = welcome.keys.below(self.prefix);
        let mut state = self.state.lock();
        if state.has_answered[number] {
            return;
        }
        if below > COUNT_MAX {
            let name = &welcome.name;
            tracing::error!(
                name,
                below,
                "it says that it has had objects of more files than there can be; new files do not use it. Stop it, remove the \
                 file `keys` from its folder, and start it again"
            );
            return;
        }
        // Before it counts as one that has answered.
        self.keys_from.fetch_max(below, Ordering::AcqRel);
        state.has_answered[number] = true;
        if state.has_answered.iter().all(|has| *has) {
            self.are_all.store(true, Ordering::Release);
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a new file may have to wait, which uses all but those `skipped`.
    pub(super) fn may_wait(&self, skipped: impl FnOnce() -> Skipped) -> bool {
        let is_any_there = || {
            let skipped = skipped();
            (0..).zip(&self.state.lock().has_answered).any(|(number, has)| *has && !skipped.contains(number))
        };
        !self.are_all.load(Ordering::Acquire) && (self.started.elapsed() < PATIENCE || !is_any_there())
    }

    /// The least count that the key of a new file may have. To be asked after its data servers were chosen.
    pub(super) fn keys_from(&self) -> u64 {
        self.keys_from.load(Ordering::Acquire)
    }

    /// Those that new files do not use: `skipped`, and those that have not answered. Waits for these where that may help; an
    /// error says which are missing.
    pub(super) fn skipped(&self, skipped: Skipped) -> Result<Skipped, String> {
        if self.are_all.load(Ordering::Acquire) {
            return Ok(skipped);
        }
        let begun = Instant::now();
        let mut state = self.state.lock();
        loop {
            let wanted = || (0..).zip(&state.has_answered).filter(|(number, _)| !skipped.contains(*number));
            let silent: Vec<u16> = wanted().filter(|(_, has)| !**has).map(|(number, _)| number).collect();
            if silent.is_empty() {
                return Ok(skipped);
            }
            let is_any_there = wanted().any(|(_, has)| *has);
            let until = if is_any_there {
                self.started + PATIENCE
            } else {
                (self.started + PATIENCE).max(begun + self.wait_max)
            };
            let now = Instant::now();
            if now >= until || state.is_stopped {
                let all = Skipped::of(skipped.servers().iter().chain(&silent).copied());
                return all.filter(|_| is_any_there).ok_or_else(|| self.missing(&silent));
            }
            state = self.changed.wait_timeout(state, until - now).0;
        }
    }

    fn missing(&self, silent: &[u16]) -> String {
        let names = silent.iter().filter_map(|number| self.names.get(usize::from(*number)));
        let names: Vec<&str> = names.take(20).map(String::as_str).collect();
        let more = if silent.len() > names.len() { ", …" } else { "" };
        format!(
            "these data servers have not answered since the metadata server started: {}{more}; start them, or see why they are \
             not reached",
            names.join(", ")
        )
    }

    /// The data servers that have not answered, for people.
    pub(super) fn silent(&self) -> Vec<&str> {
        let state = self.state.lock();
        let silent = self.names.iter().zip(&state.has_answered).filter(|(_, has)| !**has);
        silent.map(|(name, _)| name.as_str()).collect()
    }

    /// Whether a data server is still to be asked.
    pub(crate) fn awaits(&self, number: usize) -> bool {
        let state = self.state.lock();
        !state.is_stopped && state.has_answered.get(number).is_some_and(|has| !has)
    }

    /// Waits for the answer of a data server; says whether it is still to be asked.
    pub(crate) fn wait(&self, number: usize, longest: Duration) -> bool {
        let until = Instant::now() + longest;
        let mut state = self.state.lock();
        while !state.is_stopped && state.has_answered.get(number).is_some_and(|has| !has) {
            let now = Instant::now();
            if now >= until {
                return true;
            }
            state = self.changed.wait_timeout(state, until - now).0;
        }
        false
    }

    /// Nothing is waited for any more.
    pub(crate) fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_wire::{ClusterId, HeldKeys, PROTOCOL_VERSION};

    fn welcome(name: &str, below: u64) -> Welcome {
        Welcome {
            version: PROTOCOL_VERSION,
            name: name.into(),
            incarnation: 1,
            max_payload_bytes: 1,
            cluster: ClusterId(7),
            store: 1,
            number: None,
            keys: HeldKeys { by_prefix: vec![(9, below)], others: 5 },
        }
    }

    fn of(names: &[&str]) -> Answered {
        let names = names.iter().map(|name| name.to_string()).collect();
        let mut answered = Answered::new(names, 9, Duration::ZERO);
        answered.started = Instant::now().checked_sub(PATIENCE).unwrap();
        answered
    }

    #[test]
    fn new_files_use_what_has_answered_and_keys_above_what_was_said() {
        let answered = of(&["a", "b", "c"]);
        let refused = answered.skipped(Skipped::NONE).unwrap_err();
        assert!(refused.contains("a, b, c"), "{refused}");
        answered.note(&welcome("b", 700));
        answered.note(&welcome("unknown", 9000));
        assert_eq!(answered.skipped(Skipped::NONE).unwrap().servers(), [0, 2]);
        assert_eq!(answered.keys_from(), 700);
        assert_eq!(answered.skipped(Skipped::of([2]).unwrap()).unwrap().servers(), [0, 2]);
        assert!(answered.skipped(Skipped::of([1]).unwrap()).is_err(), "that one is not to be used");
        answered.note(&welcome("a", 300));
        answered.note(&welcome("b", 800));
        assert_eq!(answered.keys_from(), 700, "what b has had since are keys of this server");
        assert_eq!(answered.silent(), ["c"]);
        answered.note(&welcome("c", COUNT_MAX + 1));
        assert!(answered.awaits(2) && answered.keys_from() == 700, "that cannot be");
        answered.note(&welcome("c", 900));
        assert_eq!((answered.skipped(Skipped::NONE).unwrap(), answered.keys_from()), (Skipped::NONE, 900));
        assert!(!answered.may_wait(|| Skipped::NONE));
    }

    #[test]
    fn new_files_may_wait_while_none_of_their_servers_has_answered() {
        let answered = of(&["a", "b"]);
        let may_wait = |skipped: &[u16]| answered.may_wait(|| Skipped::of(skipped.iter().copied()).unwrap());
        assert!(may_wait(&[]), "however long ago the start is");
        answered.note(&welcome("b", 1));
        assert!(!may_wait(&[]) && may_wait(&[1]));
    }

    #[test]
    fn files_wait_for_servers_that_start_with_this_one() {
        let mut answered = of(&["a", "b"]);
        (answered.started, answered.wait_max) = (Instant::now(), Duration::from_secs(600));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| answered.skipped(Skipped::NONE));
            let wait = scope.spawn(|| answered.wait(1, Duration::from_secs(600)));
            answered.note(&welcome("b", 1));
            answered.note(&welcome("a", 1));
            assert_eq!(waiting.join().unwrap(), Ok(Skipped::NONE));
            assert!(!wait.join().unwrap());
        });
        let answered = of(&(0..17).map(|_| "x").collect::<Vec<_>>());
        answered.stop();
        assert!(answered.skipped(Skipped::NONE).is_err() && !answered.awaits(0));
    }
}
