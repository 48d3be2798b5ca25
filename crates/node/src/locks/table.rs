//! The table of locks: who holds which bytes of which file, and who waits for them.
//!
//! The rules are those of POSIX: a lock of a holder replaces what the holder had on those bytes, never conflicts with the
//! holder's own, and may be split and joined. Who waits is served in the order of arrival, with one exception: who holds a
//! lock of any file passes those who wait without being in its way, because they may be waiting for it. So a stream of
//! shared locks cannot starve an exclusive one, and the order itself deadlocks nothing. Attempts that do not wait get what
//! no holder forbids.
//!
//! Each file has a *version* for each client: it changes when another client has given up an exclusive lock of the file,
//! that is, may have changed bytes that the client has cached.

use std::collections::VecDeque;

use rustc_hash::{FxHashMap, FxHashSet};

use super::ranges::{Holder, Lock, Range, carve, put, splits};

/// Bounds of a table.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Locks of one client.
    pub of_client: usize,
    /// Locks of one file.
    pub of_file: usize,
    /// Locks in all.
    pub in_all: usize,
    /// Waiting requests of one client.
    pub waiting_of_client: usize,
    /// Files without locks whose versions are remembered.
    pub idle_files: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { of_client: 16_384, of_file: 8192, in_all: 1 << 18, waiting_of_client: 1024, idle_files: 4096 }
    }
}

/// Steps of a search for a deadlock.
const SEARCH_MAX: usize = 10_000;

/// What became of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// The holder has it.
    Granted,
    /// Another holder has this lock, which excludes it.
    Held(Lock),
    /// It waits. The same request again asks what became of it, and keeps its place.
    Waiting,
    /// It would wait for a holder that waits for this one.
    Deadlock,
    /// A limit is reached.
    Full,
}

/// A request that waits.
struct Waiting {
    lock: Lock,
    /// The changes of its file's locks when it was found to wait for no holder that waits for it; `None`: that is not known.
    searched: Option<u64>,
}

#[derive(Default)]
struct FileLocks {
    held: Vec<Lock>,
    /// Counts changes of `held`.
    changes: u64,
    waiting: VecDeque<Waiting>,
    /// The client that gave up an exclusive lock last, and when another one did before it, in the table's count.
    last: (u64, u64),
    before: u64,
    is_idle: bool,
}

#[derive(Default)]
struct Count {
    locks: usize,
    waiting: usize,
}

/// The table.
pub struct LockTable {
    limits: Limits,
    files: FxHashMap<u64, FileLocks>,
    clients: FxHashMap<u64, Count>,
    holders: FxHashMap<Holder, usize>,
    /// The files that a holder waits for.
    waits: FxHashMap<Holder, Vec<u64>>,
    locks: usize,
    waiting: usize,
    /// Counts exclusive locks that were given up.
    given_up: u64,
    /// The latest of a file that is not remembered.
    forgotten: u64,
    idle: VecDeque<u64>,
}

impl LockTable {
    /// An empty table. Versions begin at `first`, which must differ from those of an earlier table.
    pub fn new(limits: Limits, first: u64) -> LockTable {
        LockTable {
            limits,
            files: FxHashMap::default(),
            clients: FxHashMap::default(),
            holders: FxHashMap::default(),
            waits: FxHashMap::default(),
            locks: 0,
            waiting: 0,
            given_up: first,
            forgotten: first,
            idle: VecDeque::new(),
        }
    }

    /// Locks, and requests that wait.
    pub fn counts(&self) -> (usize, usize) {
        (self.locks, self.waiting)
    }

    /// Whether a client has locks or waits for some.
    pub fn has_any(&self, client: u64) -> bool {
        self.clients.contains_key(&client)
    }

    /// The version of a file for a client.
    pub fn version(&self, file: u64, client: u64) -> u64 {
        match self.files.get(&file) {
            None => self.forgotten,
            Some(locks) if locks.last.0 == client => locks.before,
            Some(locks) => locks.last.1,
        }
    }

    /// The lock of another holder that excludes this one.
    pub fn test(&self, file: u64, wanted: &Lock) -> Option<Lock> {
        self.files.get(&file)?.held.iter().filter(|held| held.conflicts(wanted)).min_by_key(|held| held.range).copied()
    }

    /// Takes a lock, or changes what the holder has on its bytes.
    pub fn set(&mut self, file: u64, wanted: Lock, wait: bool) -> Taken {
        if !wait {
            return match self.test(file, &wanted) {
                Some(held) => Taken::Held(held),
                None => self.grant(file, wanted),
            };
        }
        let place = self.place_of(file, &wanted);
        if self.is_next(file, &wanted, place.unwrap_or(usize::MAX)) {
            self.stop_waiting(file, place);
            return self.grant(file, wanted);
        }
        let changes = self.files.get(&file).map_or(0, |locks| locks.changes);
        let known = place.and_then(|place| self.files.get(&file)?.waiting.get(place)?.searched);
        let mut searched = Some(changes);
        if known != searched {
            match self.search(file, &wanted) {
                Search::Deadlock => {
                    self.stop_waiting(file, place);
                    self.pump(file);
                    return Taken::Deadlock;
                }
                Search::None => {}
                Search::TooLong => searched = None,
            }
        }
        if let Some(place) = place {
            if let Some(waiting) = self.files.get_mut(&file).and_then(|locks| locks.waiting.get_mut(place)) {
                waiting.searched = searched;
            }
            return Taken::Waiting;
        }
        let Holder { client, .. } = wanted.holder;
        if self.clients.get(&client).is_some_and(|count| count.waiting >= self.limits.waiting_of_client)
            || self.locks + self.waiting >= self.limits.in_all
        {
            return Taken::Full;
        }
        self.file(file).waiting.push_back(Waiting { lock: wanted, searched });
        self.waits.entry(wanted.holder).or_default().push(file);
        self.clients.entry(client).or_default().waiting += 1;
        self.waiting += 1;
        Taken::Waiting
    }

    /// Gives up a range; false when a limit forbids to split a lock.
    pub fn unlock(&mut self, file: u64, holder: Holder, range: Range) -> bool {
        let Some(locks) = self.files.get_mut(&file) else { return true };
        if splits(&locks.held, holder, range) && !self.has_room(file, holder.client, 1) {
            return false;
        }
        self.change(file, holder, |held| carve(held, holder, range));
        self.pump(file);
        true
    }

    /// The holder has exactly these locks of a file, and waits for none; false when another's exclude one of them, and then
    /// it has none.
    pub fn restore(&mut self, file: u64, holder: Holder, locks: &[Lock]) -> bool {
        while let Some(place) = self
            .files
            .get(&file)
            .and_then(|locks| locks.waiting.iter().position(|waiting| waiting.lock.holder == holder))
        {
            self.stop_waiting(file, Some(place));
        }
        let is_free = locks.iter().all(|lock| lock.holder == holder && self.test(file, lock).is_none());
        let is_taken = is_free && self.has_room(file, holder.client, locks.len());
        if is_taken || self.files.contains_key(&file) {
            self.file(file);
            self.change(file, holder, |held| {
                let had = held.iter().any(|lock| lock.holder == holder && lock.exclusive);
                held.retain(|lock| lock.holder != holder);
                if is_taken {
                    for lock in locks {
                        put(held, *lock);
                    }
                }
                had
            });
            self.pump(file);
        }
        is_taken
    }

    /// A client has no locks any more, and waits for none.
    pub fn remove_client(&mut self, client: u64) {
        let is_its = |lock: &Lock| lock.holder.client == client;
        let waits = |waiting: &Waiting| is_its(&waiting.lock);
        let of_it = |locks: &FileLocks| locks.held.iter().any(is_its) || locks.waiting.iter().any(waits);
        let files: Vec<u64> = self.files.iter().filter(|(_, locks)| of_it(locks)).map(|(file, _)| *file).collect();
        for file in files {
            while let Some(place) = self.files.get(&file).and_then(|locks| locks.waiting.iter().position(waits)) {
                self.stop_waiting(file, Some(place));
            }
            while let Some(lock) = self.files.get(&file).and_then(|locks| locks.held.iter().find(|lock| is_its(lock))) {
                let holder = lock.holder;
                self.change(file, holder, |held| carve(held, holder, Range::ALL));
            }
            self.pump(file);
        }
    }

    fn file(&mut self, file: u64) -> &mut FileLocks {
        let forgotten = self.forgotten;
        self.files.entry(file).or_insert_with(|| FileLocks {
            last: (0, forgotten),
            before: forgotten,
            ..FileLocks::default()
        })
    }

    fn has_room(&self, file: u64, client: u64, more: usize) -> bool {
        let of_client = self.clients.get(&client).map_or(0, |count| count.locks);
        let of_file = self.files.get(&file).map_or(0, |locks| locks.held.len());
        of_client + more <= self.limits.of_client
            && of_file + more <= self.limits.of_file
            && self.locks + self.waiting + more <= self.limits.in_all
    }

    fn grant(&mut self, file: u64, lock: Lock) -> Taken {
        // It may split another.
        if !self.has_room(file, lock.holder.client, 2) {
            return Taken::Full;
        }
        self.file(file);
        self.change(file, lock.holder, |held| put(held, lock));
        self.pump(file);
        Taken::Granted
    }

    /// Changes the locks of one holder of a file, and counts. `change` tells whether an exclusive one was given up.
    fn change(&mut self, file: u64, holder: Holder, change: impl FnOnce(&mut Vec<Lock>) -> bool) {
        let Some(locks) = self.files.get_mut(&file) else { return };
        let before = locks.held.len();
        if change(&mut locks.held) {
            self.given_up += 1;
            if locks.last.0 != holder.client {
                locks.before = locks.last.1;
            }
            locks.last = (holder.client, self.given_up);
        }
        locks.changes += 1;
        let after = locks.held.len();
        self.locks = self.locks + after - before;
        count(&mut self.holders, holder, |held| {
            *held = *held + after - before;
            *held == 0
        });
        count(&mut self.clients, holder.client, |count| {
            count.locks = count.locks + after - before;
            count.locks + count.waiting == 0
        });
    }

    fn place_of(&self, file: u64, wanted: &Lock) -> Option<usize> {
        let key = |lock: &Lock| (lock.holder, lock.range, lock.exclusive);
        let is_it = |waiting: &Waiting| key(&waiting.lock) == key(wanted);
        self.files.get(&file)?.waiting.iter().position(is_it)
    }

    /// Whether a request that waits at a place, or comes to wait, is to be granted.
    fn is_next(&self, file: u64, wanted: &Lock, place: usize) -> bool {
        let Some(locks) = self.files.get(&file) else { return true };
        let is_free = !locks.held.iter().any(|held| held.conflicts(wanted));
        is_free
            && (self.holders.contains_key(&wanted.holder)
                || !locks.waiting.iter().take(place).any(|earlier| earlier.lock.conflicts(wanted)))
    }

    fn stop_waiting(&mut self, file: u64, place: Option<usize>) {
        let Some(locks) = self.files.get_mut(&file) else { return };
        let Some(Waiting { lock, .. }) = place.and_then(|place| locks.waiting.remove(place)) else { return };
        self.waiting -= 1;
        count(&mut self.waits, lock.holder, |files| {
            if let Some(at) = files.iter().position(|other| *other == file) {
                files.swap_remove(at);
            }
            files.is_empty()
        });
        count(&mut self.clients, lock.holder.client, |count| {
            count.waiting -= 1;
            count.locks + count.waiting == 0
        });
    }

    /// Grants what waits and can be granted now.
    fn pump(&mut self, file: u64) {
        let mut place = 0;
        while let Some(wanted) = self.files.get(&file).and_then(|locks| locks.waiting.get(place)).map(|w| w.lock) {
            if !self.is_next(file, &wanted, place) || !self.has_room(file, wanted.holder.client, 2) {
                place += 1;
                continue;
            }
            self.stop_waiting(file, Some(place));
            self.change(file, wanted.holder, |held| put(held, wanted));
            // A shared lock in the place of an exclusive one lets others in.
            place = 0;
        }
        self.retire(file);
    }

    /// Of files without locks only the versions of the latest are remembered.
    fn retire(&mut self, file: u64) {
        let Some(locks) = self.files.get_mut(&file) else { return };
        if !locks.held.is_empty() || !locks.waiting.is_empty() || locks.is_idle {
            return;
        }
        locks.is_idle = true;
        self.idle.push_back(file);
        while self.idle.len() > self.limits.idle_files {
            let Some(oldest) = self.idle.pop_front() else { return };
            let Some(locks) = self.files.get_mut(&oldest) else { continue };
            locks.is_idle = false;
            if locks.held.is_empty() && locks.waiting.is_empty() {
                self.forgotten = self.forgotten.max(locks.last.1);
                self.files.remove(&oldest);
            }
        }
    }

    /// Whether a request would wait for its own holder, over any number of others. It may come to do so when it begins to wait,
    /// when another holder takes what it waits for, and when a holder of that begins to wait, which then searches itself.
    fn search(&self, file: u64, wanted: &Lock) -> Search {
        let mut steps = 0;
        let mut seen: FxHashSet<Holder> = FxHashSet::default();
        let mut next: Vec<(u64, Lock)> = vec![(file, *wanted)];
        while let Some((file, want)) = next.pop() {
            let Some(locks) = self.files.get(&file) else { continue };
            for held in &locks.held {
                steps += 1;
                if steps > SEARCH_MAX {
                    return Search::TooLong;
                }
                if !held.conflicts(&want) {
                    continue;
                }
                if held.holder == wanted.holder {
                    return Search::Deadlock;
                }
                if !seen.insert(held.holder) {
                    continue;
                }
                for other in self.waits.get(&held.holder).into_iter().flatten() {
                    let waiting = self.files.get(other).into_iter().flat_map(|locks| &locks.waiting);
                    let its = waiting.map(|waiting| waiting.lock).filter(|lock| lock.holder == held.holder);
                    next.extend(its.map(|lock| (*other, lock)));
                }
            }
        }
        Search::None
    }
}

/// What a search for a deadlock finds.
enum Search {
    None,
    Deadlock,
    /// Nothing in [`SEARCH_MAX`] steps.
    TooLong,
}

/// Changes an entry; one that says that it is empty goes.
fn count<K: std::hash::Hash + Eq, V: Default>(map: &mut FxHashMap<K, V>, key: K, change: impl FnOnce(&mut V) -> bool) {
    let mut value = map.remove(&key).unwrap_or_default();
    if !change(&mut value) {
        map.insert(key, value);
    }
}

#[cfg(test)]
impl LockTable {
    pub(super) fn held(&self, file: u64) -> Vec<Lock> {
        self.files.get(&file).map_or_else(Vec::new, |locks| locks.held.clone())
    }

    pub(super) fn waiting(&self, file: u64) -> Vec<Lock> {
        self.files.get(&file).map_or_else(Vec::new, |locks| locks.waiting.iter().map(|waiting| waiting.lock).collect())
    }
}
