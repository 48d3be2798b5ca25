//! Paths in use and directories that move: a path that was built before a move must not be looked up after it.
//!
//! The metadata server works by path. While a call uses one, no directory on it moves, and while a directory moves, no path
//! through it is built. Calls elsewhere go on: one that waits for a server that hangs holds up only moves of the directories
//! above what it is about, and then what comes later below those.
//!
//! Everybody waits only for those who came earlier, so nobody waits in a circle, and a move is not starved by a stream of calls.

use impresario_base::lock::{Condvar, Mutex};

/// What a call or a move is about, as numbers of inodes.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct About {
    /// What is on its paths. Sorted.
    pub on: Vec<u64>,
    /// The directories that it moves.
    pub moves: Vec<u64>,
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

    fn remove(&mut self, turn: u64) {
        if let Some(at) = self.uses.iter().position(|(of, _)| *of == turn) {
            let (_, about) = self.uses.swap_remove(at);
            self.moves -= usize::from(!about.moves.is_empty());
        }
    }

    /// Whether somebody who came earlier is in the way.
    fn must_wait(&self, turn: u64) -> bool {
        let excludes = |about: &About| self.uses.iter().any(|(of, other)| *of < turn && other.excludes(about));
        self.moves > 0 && self.of(turn).is_some_and(excludes)
    }
}

/// Paths that stay as they are until this is dropped.
#[derive(Debug)]
pub(crate) struct InUse<'a> {
    paths: &'a Paths,
    turn: u64,
}

impl Paths {
    /// Waits until nothing moves on these paths any more. `look` tells what the call is about as the tree is then; whoever moves
    /// something changes the tree before it drops its own use.
    pub(crate) fn enter(&self, look: impl Fn() -> About) -> InUse<'_> {
        let mut state = self.state.lock();
        let mut turn = state.add(look());
        while state.must_wait(turn) {
            state.waiting += 1;
            state = self.fewer.wait(state);
            state.waiting -= 1;
            let now = look();
            if state.of(turn) != Some(&now) {
                // What came later has not minded the directories that are on the path now.
                state.remove(turn);
                turn = state.add(now);
                self.fewer.notify_all();
            }
        }
        InUse { paths: self, turn }
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        let mut state = self.paths.state.lock();
        state.remove(self.turn);
        if state.waiting > 0 {
            self.paths.fewer.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use impresario_testing::until;

    use super::*;

    /// The parents of directories: `(directory, parent)`.
    type Tree = Mutex<Vec<(u64, u64)>>;

    fn above(tree: &Tree, of: &[u64]) -> Vec<u64> {
        let tree = tree.lock();
        let mut on = Vec::new();
        for number in of {
            let mut at = Some(*number);
            while let Some(number) = at {
                on.push(number);
                at = tree.iter().find(|(of, _)| *of == number).map(|(_, parent)| *parent);
            }
        }
        on.sort_unstable();
        on.dedup();
        on
    }

    fn calls<'a>(paths: &'a Paths, on: &[u64]) -> InUse<'a> {
        paths.enter(|| About { on: on.to_vec(), moves: vec![] })
    }

    fn moves<'a>(paths: &'a Paths, on: &[u64], moves: u64) -> InUse<'a> {
        paths.enter(|| About { on: on.to_vec(), moves: vec![moves] })
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

    /// Threads move directories and use paths at random: the paths in use stay as they are, and all end.
    #[test]
    fn paths_in_use_stay_as_they_are() {
        const DIRECTORIES: u64 = 7;
        let tree: Tree = Mutex::new((2..2 + DIRECTORIES).map(|number| (number, number / 2)).collect());
        let paths = Paths::default();
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                let (tree, paths) = (&tree, &paths);
                scope.spawn(move || {
                    let mut random = thread * 7919 + 1;
                    let mut draw = move || {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        random >> 33
                    };
                    for _ in 0..3000 {
                        let (number, to) = (2 + draw() % DIRECTORIES, 1 + draw() % (DIRECTORIES + 1));
                        if draw() % 3 == 0 {
                            let parent = || above(tree, &[number]).into_iter().filter(|on| *on != number).collect();
                            let on = || -> Vec<u64> {
                                let mut on: Vec<u64> = parent();
                                on.extend(above(tree, &[to]));
                                on.sort_unstable();
                                on.dedup();
                                on
                            };
                            // As the kernel, which moves no directory below itself.
                            if above(tree, &[to]).contains(&number) {
                                continue;
                            }
                            let _moving = paths.enter(|| About { on: on(), moves: vec![number] });
                            if above(tree, &[to]).contains(&number) {
                                continue;
                            }
                            std::thread::yield_now();
                            if let Some(entry) = tree.lock().iter_mut().find(|(of, _)| *of == number) {
                                entry.1 = to;
                            }
                        } else {
                            let look = || above(tree, &[number, to]);
                            let _used = paths.enter(|| About { on: look(), moves: vec![] });
                            let before = look();
                            std::thread::yield_now();
                            assert_eq!(look(), before);
                        }
                    }
                });
            }
        });
    }
}
