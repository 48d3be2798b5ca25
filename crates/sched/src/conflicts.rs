//! Which outstanding requests must keep their order of arrival.
//!
//! Two requests conflict if their ranges of one file overlap and one of them changes the bytes; truncate and unlink change
//! everything they cover. A sync waits for the changes before it. Of later requests only truncate and unlink wait for it:
//! whether a later write is durable with it is open, so writers need not stall while earlier data go to the device. A policy sees a
//! request only when no older conflicting request is outstanding, queued or in flight.
//!
//! The ranges of each kind of a file are ordered by start and divided into classes of similar
//! length: a range of class `c` that reaches into `start..end` begins after `start - longest(c)`, so a search visits
//! few ranges that do not overlap. A blocked request waits for one older request at a time and searches again when that
//! one is gone: a chain of n writes to one block costs n log n, not n².

use std::ops::Range;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use crate::sorted::SortedSet;
use crate::table::{Arrival, Slot, State, Table};
use crate::types::{FileId, LaneId, Op};

/// (start of the range, arrival): at one start, older ranges come first.
type Key = (u64, Arrival);

/// How a request affects others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    /// Truncate and unlink.
    Cut,
    Sync,
}

/// The ranges of one kind and class of lengths.
struct Group {
    kind: Kind,
    class: u8,
    ranges: SortedSet<Key>,
}

/// The groups of a file, unordered; most files have one.
#[derive(Default)]
struct FileIndex {
    groups: SmallVec<[Group; 1]>,
    len: u32,
}

/// The ranges of all outstanding requests.
#[derive(Default)]
pub(crate) struct Conflicts {
    /// All lanes address one space: requests of a file on different lanes may conflict.
    shared_space: bool,
    files: FxHashMap<(FileId, LaneId), FileIndex>,
    /// Blocked requests (slot, sequence) by the older request that they wait for.
    waiters: FxHashMap<Slot, Vec<(Slot, u64)>>,
}

fn class_of(len: u64) -> u8 {
    ((64 - (len | 1).leading_zeros()) / 2) as u8
}

fn longest(class: u8) -> u64 {
    1u64.checked_shl(2 * u32::from(class) + 1).map_or(u64::MAX, |n| n - 1)
}

fn file_key(shared_space: bool, table: &Table, slot: Slot) -> (FileId, LaneId) {
    (table.file(slot), if shared_space { LaneId(0) } else { table.lane(slot) })
}

fn key_of(table: &Table, slot: Slot) -> Key {
    (table.start(slot), table.arrival_order(slot))
}

impl Kind {
    fn of(op: Op) -> Kind {
        match op {
            Op::Read => Kind::Read,
            Op::Write => Kind::Write,
            Op::Truncate | Op::Unlink => Kind::Cut,
            Op::Sync => Kind::Sync,
        }
    }

    /// Whether a younger request must wait for one of this kind.
    fn holds_up(self, younger: Kind) -> bool {
        match (self, younger) {
            (Kind::Read | Kind::Sync, Kind::Read | Kind::Sync) | (Kind::Sync, Kind::Write) => false,
            (_, _) => true,
        }
    }
}

impl FileIndex {
    fn insert(&mut self, kind: Kind, class: u8, key: Key) {
        self.len += 1;
        let found = self.groups.iter_mut().find(|g| g.kind == kind && g.class == class);
        match found {
            Some(group) => {
                group.ranges.insert(key);
            }
            None => {
                let mut ranges = SortedSet::default();
                ranges.insert(key);
                self.groups.push(Group { kind, class, ranges });
            }
        }
    }

    fn remove(&mut self, kind: Kind, class: u8, key: Key) {
        self.len -= 1;
        if let Some(group) = self.groups.iter_mut().find(|g| g.kind == kind && g.class == class) {
            group.ranges.remove(&key);
        }
    }

    /// The older request for which a request must wait, if there is one.
    fn blocker(&self, table: &Table, slot: Slot) -> Option<Slot> {
        let (start, end, seq) = (table.start(slot), table.end(slot), table.seq(slot));
        self.older_conflict(table, Kind::of(table.op(slot)), start, end, seq)
    }

    /// Some range older than `seq` that holds up `kind` on `start..end`: among those with one start, the
    /// youngest.
    fn older_conflict(&self, table: &Table, kind: Kind, start: u64, end: u64, seq: u64) -> Option<Slot> {
        let matches = |key: Key| {
            let slot = key.1.slot();
            table.end(slot) > start && table.seq(slot) < seq
        };
        for group in self.groups.iter().filter(|g| g.kind.holds_up(kind)) {
            let mut from = (start.saturating_sub(longest(group.class)), Arrival::MIN);
            while let Some(key) = group.ranges.at_or_after(&from).filter(|k| k.0 < end) {
                if matches(key) {
                    let last = group.ranges.before(&(key.0, Arrival::MAX)).filter(|k| matches(*k));
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

    /// Adds a request; true if an older one blocks it.
    pub(crate) fn enter(&mut self, table: &Table, slot: Slot) -> bool {
        let index = self.files.entry(file_key(self.shared_space, table, slot)).or_default();
        let blocker = index.blocker(table, slot);
        let (class, key) = (class_of(table.len_bytes(slot)), key_of(table, slot));
        index.insert(Kind::of(table.op(slot)), class, key);
        if let Some(blocker) = blocker {
            self.waiters.entry(blocker).or_default().push((slot, table.seq(slot)));
        }
        blocker.is_some()
    }

    /// An older outstanding request for which a request must wait, if there is one.
    pub(crate) fn blocker(&self, table: &Table, slot: Slot) -> Option<Slot> {
        self.files.get(&file_key(self.shared_space, table, slot))?.blocker(table, slot)
    }

    /// Removes a request that completed or was cancelled, before its slot is freed; appends the requests that nothing
    /// blocks any more to `released`.
    pub(crate) fn leave(&mut self, table: &Table, slot: Slot, released: &mut Vec<Slot>) {
        let file = file_key(self.shared_space, table, slot);
        if let Some(index) = self.files.get_mut(&file) {
            if index.len == 1 {
                self.files.remove(&file);
            } else {
                index.remove(Kind::of(table.op(slot)), class_of(table.len_bytes(slot)), key_of(table, slot));
            }
        }
        if self.waiters.is_empty() {
            return;
        }
        for (waiter, seq) in self.waiters.remove(&slot).unwrap_or_default() {
            // The slot of a cancelled waiter may be free or reused.
            if table.state(waiter) != State::Blocked || table.seq(waiter) != seq {
                continue;
            }
            match self.blocker(table, waiter) {
                Some(next) => self.waiters.entry(next).or_default().push((waiter, seq)),
                None => released.push(waiter),
            }
        }
    }

    /// The youngest request with exactly these bytes (start, length) and operation that `wanted` accepts; on lane 0.
    pub(crate) fn youngest(
        &self,
        table: &Table,
        file: FileId,
        op: Op,
        (start, len): (u64, u64),
        wanted: impl Fn(Slot) -> bool,
    ) -> Option<Slot> {
        let index = self.files.get(&(file, LaneId(0)))?;
        let group = index.groups.iter().find(|g| g.kind == Kind::of(op) && g.class == class_of(len))?;
        let mut to = (start, Arrival::MAX);
        while let Some(key) = group.ranges.before(&to).filter(|key| key.0 == start) {
            let slot = key.1.slot();
            if table.len_bytes(slot) == len && table.op(slot) == op && wanted(slot) {
                return Some(slot);
            }
            to = key;
        }
        None
    }

    /// Whether a request of this range would have to wait for an outstanding one.
    pub(crate) fn hold_up(&self, table: &Table, op: Op, (file, lane): (FileId, LaneId), range: Range<u64>) -> bool {
        let index = self.files.get(&(file, if self.shared_space { LaneId(0) } else { lane }));
        index.is_some_and(|i| i.older_conflict(table, Kind::of(op), range.start, range.end, u64::MAX).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Completion, Core, CoreConfig, Event, Extent, Nanos, Next, PolicySpec, Request};

    #[test]
    fn classes_cover_all_lengths() {
        for len in [0, 1, 2, 3, 4, 7, 8, 4096, 65536, 1 << 40, u64::MAX / 2, u64::MAX] {
            assert!(longest(class_of(len)) >= len, "{len}");
        }
    }

    /// What is dispatched one after the other, with nothing completed, of requests of one file.
    fn started(requests: &[(Op, Range<u64>)]) -> Vec<usize> {
        let config = CoreConfig { lane_requests: 16, ..CoreConfig::single_lane(16) };
        let mut core = Core::new(config, &PolicySpec::named("none")).unwrap();
        let push = |(op, range): &(Op, Range<u64>)| {
            let (offset, len) = (range.start, range.end - range.start);
            let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: offset, lane_offset: offset, len };
            core.push(Nanos::ZERO, &Request::new(*op, extent)).unwrap()
        };
        let ids: Vec<_> = requests.iter().map(push).collect();
        let mut started = Vec::new();
        while let Next::Dispatch(batch) = core.next(Nanos::ZERO) {
            started.extend(batch.parts.iter().filter_map(|part| ids.iter().position(|id| *id == part.id)));
        }
        started.sort_unstable();
        started
    }

    #[test]
    fn syncs_have_a_limit_of_their_own() {
        let config = CoreConfig { lane_requests: 2, total_requests: 2, lane_syncs: 2, ..CoreConfig::single_lane(16) };
        let mut core = Core::new(config, &PolicySpec::named("fifo")).unwrap();
        for (op, files, len) in [(Op::Sync, 0..4, u64::MAX), (Op::Read, 4..8, 10)] {
            for file in files {
                let extent = Extent { file: FileId(file), lane: LaneId(0), file_offset: 0, lane_offset: 0, len };
                core.push(Nanos::ZERO, &Request::new(op, extent)).unwrap();
            }
        }
        let start = |core: &mut Core| {
            let next = std::iter::from_fn(|| match core.next(Nanos::ZERO) {
                Next::Dispatch(batch) => Some(batch),
                Next::Wait { .. } => None,
            });
            next.collect::<Vec<_>>()
        };
        let started = start(&mut core);
        let ops: Vec<Op> = started.iter().map(|batch| batch.op).collect();
        assert_eq!(ops, [Op::Sync, Op::Sync, Op::Read, Op::Read]);
        assert_eq!(core.status().in_flight_batches, 4);
        // What ends makes room for its like.
        for batch in [&started[1], &started[2]] {
            let (batch, op, at) = (batch.id, batch.op, Nanos::ZERO);
            let completion = Completion { batch, errno: 0, bytes_done: 0, started: at, finished: at };
            core.event(at, Event::Completed(completion));
            assert_eq!(start(&mut core).iter().map(|batch| batch.op).collect::<Vec<_>>(), [op]);
        }
    }

    #[test]
    fn a_sync_waits_for_the_writes_before_it_and_holds_up_none_after_it() {
        let (sync, all) = (Op::Sync, 0..u64::MAX);
        // With the sync at work, and with the sync waiting.
        for first in [Op::Read, Op::Write] {
            let requests = [
                (first, 0..10),
                (sync, all.clone()),
                (Op::Write, 5..15),
                (Op::Write, 20..30),
                (Op::Read, 0..5),
                (Op::Truncate, 100..u64::MAX),
            ];
            let expected: &[usize] = if first == Op::Write { &[0, 3] } else { &[0, 1, 3, 4] };
            assert_eq!(started(&requests), expected, "{first:?}");
        }
    }
}
