//! Which outstanding requests must keep their order of arrival.
//!
//! Two requests conflict when their ranges of one file overlap and one of them changes the bytes. Sync is
//! ordered against changes only; truncate and unlink count as changes of all they cover. A policy sees
//! a request only when nothing older that conflicts is outstanding, queued or in flight.
//!
//! Per file, three groups of ranges (reads, changes, syncs), each ordered by start and divided into
//! classes of similar length: a range of class `c` that reaches into `start..end` begins after
//! `start - longest(c)`, so a search looks at few ranges that do not overlap. A blocked request hangs
//! on one older request at a time and looks again when that one has gone: a chain of n writes of the
//! same block costs n log n, not n².

use rustc_hash::FxHashMap;

use crate::sorted::SortedSet;
use crate::table::{Arrival, Slot, State, Table};
use crate::types::{FileId, LaneId, Op};

/// (start of the range, arrival): at one start, older ranges come first.
type Key = (u64, Arrival);

#[derive(Default)]
struct Group {
    /// (class of lengths, its ranges), unordered and few.
    classes: Vec<(u8, SortedSet<Key>)>,
}

#[derive(Default)]
struct FileIndex {
    reads: Group,
    changes: Group,
    syncs: Group,
    len: u32,
}

/// The ranges of all outstanding requests.
#[derive(Default)]
pub(crate) struct Conflicts {
    /// All lanes address one space: a file's requests on different lanes may conflict.
    shared_space: bool,
    files: FxHashMap<(FileId, LaneId), FileIndex>,
    /// blocked requests (slot, sequence) by the older request that they hang on.
    waiters: FxHashMap<Slot, Vec<(Slot, u64)>>,
}

fn class_of(len: u64) -> u8 {
    ((64 - (len | 1).leading_zeros()) / 2) as u8
}

fn longest(class: u8) -> u64 {
    1u64.checked_shl(2 * u32::from(class) + 1).map_or(u64::MAX, |n| n - 1)
}

fn key_of(table: &Table, slot: Slot) -> Key {
    (table.start(slot), table.arrival_order(slot))
}

impl Group {
    fn insert(&mut self, class: u8, key: Key) {
        match self.classes.iter_mut().find(|c| c.0 == class) {
            Some((_, set)) => {
                set.insert(key);
            }
            None => {
                let mut set = SortedSet::default();
                set.insert(key);
                self.classes.push((class, set));
            }
        }
    }

    fn remove(&mut self, class: u8, key: Key) {
        if let Some((_, set)) = self.classes.iter_mut().find(|c| c.0 == class) {
            set.remove(&key);
        }
    }

    /// Some range that overlaps `start..end` and is older than `seq`: of those with one start, the youngest.
    fn older_overlap(&self, table: &Table, start: u64, end: u64, seq: u64) -> Option<Slot> {
        let matches = |key: Key| {
            let slot = key.1.slot();
            table.end(slot) > start && table.seq(slot) < seq
        };
        for (class, set) in &self.classes {
            let mut from = (start.saturating_sub(longest(*class)), Arrival::MIN);
            while let Some(key) = set.at_or_after(&from).filter(|k| k.0 < end) {
                if matches(key) {
                    let last = set.before(&(key.0, Arrival::MAX)).filter(|k| matches(*k));
                    return Some(last.unwrap_or(key).1.slot());
                }
                let younger = table.seq(key.1.slot()) >= seq;
                from = if younger { (key.0 + 1, Arrival::MIN) } else { (key.0, key.1.next()) };
            }
        }
        None
    }
}

impl Conflicts {
    pub(crate) fn new(shared_space: bool) -> Conflicts {
        Conflicts { shared_space, ..Conflicts::default() }
    }

    fn file_key(&self, table: &Table, slot: Slot) -> (FileId, LaneId) {
        (table.file(slot), if self.shared_space { LaneId(0) } else { table.lane(slot) })
    }

    /// Enters a request; true when something older blocks it.
    pub(crate) fn enter(&mut self, table: &Table, slot: Slot) -> bool {
        let file = self.file_key(table, slot);
        let blocker = self.blocker(table, slot);
        let (class, key) = (class_of(table.len_bytes(slot)), key_of(table, slot));
        let index = self.files.entry(file).or_default();
        index.len += 1;
        index.group(table.op(slot)).insert(class, key);
        if let Some(blocker) = blocker {
            self.waiters.entry(blocker).or_default().push((slot, table.seq(slot)));
        }
        blocker.is_some()
    }

    /// Takes out a request that completed or was cancelled, before its slot is freed; appends to `released` those that
    /// nothing blocks any more.
    pub(crate) fn leave(&mut self, table: &Table, slot: Slot, released: &mut Vec<Slot>) {
        let file = self.file_key(table, slot);
        if let Some(index) = self.files.get_mut(&file) {
            index.len -= 1;
            if index.len == 0 {
                self.files.remove(&file);
            } else {
                let (class, key) = (class_of(table.len_bytes(slot)), key_of(table, slot));
                index.group(table.op(slot)).remove(class, key);
            }
        }
        if self.waiters.is_empty() {
            return;
        }
        for (waiter, seq) in self.waiters.remove(&slot).unwrap_or_default() {
            // A cancelled waiter's slot may be free or hold another request by now.
            if table.state(waiter) != State::Blocked || table.seq(waiter) != seq {
                continue;
            }
            match self.blocker(table, waiter) {
                Some(next) => self.waiters.entry(next).or_default().push((waiter, seq)),
                None => released.push(waiter),
            }
        }
    }

    fn blocker(&self, table: &Table, slot: Slot) -> Option<Slot> {
        let index = self.files.get(&self.file_key(table, slot))?;
        let (start, end, seq) = (table.start(slot), table.end(slot), table.seq(slot));
        let against: &[&Group] = match table.op(slot) {
            Op::Read | Op::Sync => &[&index.changes],
            Op::Write | Op::Truncate | Op::Unlink => &[&index.changes, &index.reads, &index.syncs],
        };
        against.iter().find_map(|group| group.older_overlap(table, start, end, seq))
    }
}

impl FileIndex {
    fn group(&mut self, op: Op) -> &mut Group {
        match op {
            Op::Read => &mut self.reads,
            Op::Write | Op::Truncate | Op::Unlink => &mut self.changes,
            Op::Sync => &mut self.syncs,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_cover_all_lengths() {
        for len in [0, 1, 2, 3, 4, 7, 8, 4096, 65536, 1 << 40, u64::MAX / 2, u64::MAX] {
            assert!(longest(class_of(len)) >= len, "{len}");
        }
    }
}
