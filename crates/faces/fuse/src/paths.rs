//! Paths in use and directories that move: a path that was built before a move must not be looked up after it.
//!
//! The metadata server works by path. While a call uses one, no directory on it moves, and while a directory moves, no path
//! through it is built. Calls elsewhere go on: one that waits for a server that hangs holds up only moves of the directories
//! above what it is about, and then what comes later below those.
//!
//! That is all that waits here, each on a thread of the mount. More waits in the kernel: it hands on a move with both its
//! directories locked, so while the move waits, names that are not cached are not looked up in these two, and nothing is made or
//! listed there; and if they are two, with the lock that all moves between directories of the mount take.
//!
//! Everybody waits only for those who came earlier, so nobody waits in a circle, and a move is not starved by a stream of calls.

use impresario_base::lock::{Condvar, Mutex};

use crate::inodes::{Inodes, Target, Ways};

/// What a call or a move is about, as numbers of inodes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
struct About {
    /// What is on its paths. Sorted.
    on: Vec<u64>,
    /// The directories that it moves.
    moves: Vec<u64>,
}

impl About {
    fn excludes(&self, other: &About) -> bool {
        let is_on = |on: &About, moved: &u64| on.on.binary_search(moved).is_ok();
        self.moves.iter().any(|moved| is_on(other, moved) || other.moves.contains(moved))
            || other.moves.iter().any(|moved| is_on(self, moved))
    }
}

/// The paths that are in use.
#[derive(Default, Debug)]
pub(crate) struct Paths {
    state: Mutex<State>,
    fewer: Condvar,
}

#[derive(Default, Debug)]
struct State {
    /// By the turn in which they came: as many as there are threads.
    uses: Vec<(u64, About)>,
    next_turn: u64,
    /// Of those, the ones that move something.
    moves: usize,
    /// Threads that wait for their turn.
    waiting: usize,
}

impl State {
    fn add(&mut self, about: About) -> u64 {
        self.next_turn += 1;
        self.moves += usize::from(!about.moves.is_empty());
        self.uses.push((self.next_turn, about));
        self.next_turn
    }

    fn of(&self, turn: u64) -> Option<&About> {
        self.uses.iter().find(|(of, _)| *of == turn).map(|(_, about)| about)
    }

    /// Whether somebody who came later had to wait for it.
    fn remove(&mut self, turn: u64) -> bool {
        let Some(at) = self.uses.iter().position(|(of, _)| *of == turn) else { return false };
        let (_, about) = self.uses.swap_remove(at);
        self.moves -= usize::from(!about.moves.is_empty());
        self.waiting > 0 && self.uses.iter().any(|(of, other)| *of > turn && about.excludes(other))
    }

    /// Whether somebody who came earlier is in the way.
    fn must_wait(&self, turn: u64) -> bool {
        let excludes = |about: &About| self.uses.iter().any(|(of, other)| *of < turn && other.excludes(about));
        self.moves > 0 && self.of(turn).is_some_and(excludes)
    }
}

/// Paths that stay as they are until this is dropped.
#[derive(Debug)]
pub(crate) struct InUse<'a, const N: usize> {
    uses: &'a Paths,
    turn: u64,
    paths: Option<[Vec<u8>; N]>,
}

impl<const N: usize> InUse<'_, N> {
    /// `None` if one of the places has none.
    pub(crate) fn paths(&self) -> Option<&[Vec<u8>; N]> {
        self.paths.as_ref()
    }
}

impl Paths {
    /// Waits until nothing moves on the paths of these places any more, and has them as they are then. Whoever moves something
    /// changes the table before it drops its own use.
    pub(crate) fn still<const N: usize>(&self, inodes: &Inodes, places: [Target<'_>; N]) -> InUse<'_, N> {
        // The path that is used must be the very one whose directories are noted: other names than those of directories change
        // at any moment, and with them the path of a number.
        self.enter(|| match inodes.ways(places) {
            Some(Ways { paths, on, moved }) => (About { on, moves: moved }, Some(paths)),
            None => (About::default(), None),
        })
    }

    /// `look` tells what the call is about and its paths, as the tree is at that moment.
    fn enter<const N: usize>(&self, look: impl Fn() -> (About, Option<[Vec<u8>; N]>)) -> InUse<'_, N> {
        let mut state = self.state.lock();
        let (about, mut paths) = look();
        let mut turn = state.add(about);
        while state.must_wait(turn) {
            state.waiting += 1;
            state = self.fewer.wait(state);
            state.waiting -= 1;
            let (now, new_paths) = look();
            paths = new_paths;
            if state.of(turn) != Some(&now) {
                // What came later has not minded the directories that are on the path now.
                if state.remove(turn) {
                    self.fewer.notify_all();
                }
                turn = state.add(now);
            }
        }
        InUse { uses: self, turn, paths }
    }
}

impl<const N: usize> Drop for InUse<'_, N> {
    fn drop(&mut self) {
        if self.uses.state.lock().remove(self.turn) {
            self.uses.fewer.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use impresario_testing::until;
    use impresario_wire::{Attr, NodeKind};

    use super::*;
    use crate::inodes::ROOT;

    fn calls<'a>(paths: &'a Paths, on: &[u64]) -> InUse<'a, 0> {
        paths.enter(|| (About { on: on.to_vec(), moves: vec![] }, None))
    }

    fn moves<'a>(paths: &'a Paths, on: &[u64], moves: u64) -> InUse<'a, 0> {
        paths.enter(|| (About { on: on.to_vec(), moves: vec![moves] }, None))
    }

    fn waits(paths: &Paths, count: usize) {
        until("they wait", || paths.state.lock().waiting == count);
    }

    #[test]
    fn a_move_waits_for_calls_below_it_and_for_no_others() {
        let paths = Paths::default();
        let below = calls(&paths, &[1, 10, 11]);
        drop(moves(&paths, &[1], 20));
        let moved = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _moving = moves(&paths, &[1], 10);
                moved.fetch_add(1, SeqCst);
            });
            waits(&paths, 1);
            scope.spawn(|| {
                // Later, below what is to be moved.
                let _call = calls(&paths, &[1, 10]);
                assert_eq!(moved.load(SeqCst), 1);
            });
            waits(&paths, 2);
            drop(calls(&paths, &[1, 20, 21]));
            drop(moves(&paths, &[1, 20], 21));
            assert_eq!(moved.load(SeqCst), 0, "a call below it is under way");
            drop(below);
        });
        let state = paths.state.lock();
        assert_eq!((state.uses.len(), state.moves, state.waiting), (0, 0, 0));
    }

    #[test]
    fn only_what_is_waited_for_wakes_those_who_wait() {
        let about = |on: &[u64], moves: &[u64]| About { on: on.to_vec(), moves: moves.to_vec() };
        let mut state = State::default();
        let (below, elsewhere) = (state.add(about(&[10, 11], &[])), state.add(about(&[20], &[])));
        let moved = state.add(about(&[], &[10]));
        state.waiting = 1;
        assert!(state.must_wait(moved) && !state.remove(elsewhere) && state.remove(below) && !state.must_wait(moved));
        // Nobody waits for what came later.
        let later = state.add(about(&[10], &[]));
        assert!(state.must_wait(later) && !state.remove(later) && !state.remove(moved));
        assert_eq!((state.uses.len(), state.moves), (0, 0));
    }

    const DIRECTORIES: std::ops::Range<u64> = 2..9;
    const FILES: std::ops::Range<u64> = 100..103;

    /// What is on a path: the latest place of each of its directories must be the one that it names.
    fn on(inodes: &Inodes, path: &[u8]) -> Option<Vec<u64>> {
        let mut at = ROOT;
        let directories = path.iter().rposition(|byte| *byte == b'/').map_or(&[][..], |slash| &path[..slash]);
        let names = directories.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        let step = |name: &[u8]| {
            let number = std::str::from_utf8(name).ok()?.parse().ok()?;
            let parent = std::mem::replace(&mut at, number);
            inodes.entries(number).first().is_some_and(|(of, _)| *of == parent).then_some(number)
        };
        names.map(step).collect()
    }

    /// Threads move directories and files, find further names of files, and use paths at random: the directories on paths in use
    /// stay where they are, and all end.
    #[test]
    fn paths_in_use_stay_as_they_are() {
        let (inodes, paths) = (Inodes::new(), Paths::default());
        let enter = |parent, name: &str, number, kind| {
            let nlink = if kind == NodeKind::Dir { 2 } else { 20 };
            let attr = Attr { ino: number, kind, nlink, ..crate::names::directory_attr() };
            inodes.enter(parent, name.as_bytes(), &attr, inodes.changes());
        };
        DIRECTORIES.for_each(|number| enter(number / 2, &number.to_string(), number, NodeKind::Dir));
        FILES.for_each(|number| enter(ROOT, &number.to_string(), number, NodeKind::File));
        // As the kernel, which makes one move of a file at a time.
        let files = Mutex::new(());
        let parent_of = |number| inodes.entries(number)[0].0;
        let is_below = |number, above| {
            let mut at = number;
            while at != above && at != ROOT {
                at = parent_of(at);
            }
            at == above
        };
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (inodes, paths, files, enter) = (&inodes, &paths, &files, &enter);
                let (parent_of, is_below) = (&parent_of, &is_below);
                scope.spawn(move || {
                    let mut random = thread * 7919 + 1;
                    let mut draw = move |of: std::ops::Range<u64>| {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        of.start + (random >> 33) % (of.end - of.start)
                    };
                    for _ in 0..3000 {
                        let (number, file, to) = (draw(DIRECTORIES), draw(FILES), draw(ROOT..DIRECTORIES.end));
                        match draw(0..5) {
                            0 => {
                                let (from, name) = (parent_of(number), number.to_string());
                                let (from, to) = ((from, name.as_bytes()), (to, name.as_bytes()));
                                // The kernel moves no directory below itself.
                                if is_below(to.0, number) {
                                    continue;
                                }
                                let places = [Target::Moved(from.0, from.1), Target::Moved(to.0, to.1)];
                                let moving = paths.still(inodes, places);
                                // Nor one that is elsewhere by now.
                                let is_noted = paths.state.lock().of(moving.turn).unwrap().moves.contains(&number);
                                if is_noted && parent_of(number) == from.0 && !is_below(to.0, number) {
                                    std::thread::yield_now();
                                    inodes.renamed(from, to, None);
                                }
                                drop(moving);
                            }
                            1 => {
                                let _one = files.lock();
                                let (from, name) = inodes.entries(file)[0].clone();
                                let places = [Target::Moved(from, &name), Target::Moved(to, &name)];
                                let _moving = paths.still(inodes, places);
                                inodes.renamed((from, &name), (to, &name), None);
                            }
                            2 => enter(to, &format!("{file}.other"), file, NodeKind::File),
                            _ => {
                                let still = paths.still(inodes, [Target::Node(file), Target::Name(to, b"x")]);
                                let used = still.paths().unwrap();
                                let before = used.each_ref().map(|path| on(inodes, path));
                                assert!(before.iter().all(Option::is_some), "{used:?}");
                                std::thread::yield_now();
                                assert_eq!(used.each_ref().map(|path| on(inodes, path)), before);
                            }
                        }
                    }
                });
            }
        });
    }
}
