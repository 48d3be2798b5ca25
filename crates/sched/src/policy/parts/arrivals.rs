//! The order of arrival within queues or lanes, and the starvation guard based on it.

use crate::sorted::SortedSet;
use crate::table::{Arrival, BySlot, Slot, Table};

/// Numbered lists of requests in order of arrival. A request is in at most one list.
pub(crate) struct Arrivals {
    lists: Vec<List>,
    links: BySlot<Links>,
    /// (list, arrival) of requests added after a younger one because a conflict delayed them; few.
    late: SortedSet<(u32, Arrival)>,
}

/// First and last of a list, except late requests.
#[derive(Clone, Copy)]
struct List {
    oldest: Slot,
    newest: Slot,
    /// The oldest late request.
    late: Slot,
}

/// The neighbours of a request in its list.
#[derive(Clone, Copy)]
struct Links {
    older: Slot,
    newer: Slot,
}

const EMPTY: List = List { oldest: Slot::NONE, newest: Slot::NONE, late: Slot::NONE };
/// Marks a late request.
const LATE: Slot = Slot(u32::MAX - 1);

impl Arrivals {
    /// `lists` empty lists.
    pub fn new(lists: usize) -> Arrivals {
        let links = BySlot::new(Links { older: Slot::NONE, newer: Slot::NONE });
        Arrivals { lists: vec![EMPTY; lists], links, late: SortedSet::default() }
    }

    /// Adds a list.
    pub fn add_list(&mut self) {
        self.lists.push(EMPTY);
    }

    /// Adds a request to a list, by its arrival even if a conflict delayed it.
    #[inline]
    pub fn insert(&mut self, table: &Table, list: usize, slot: Slot) {
        let ends = &mut self.lists[list];
        let older = ends.newest;
        if older == Slot::NONE {
            ends.oldest = slot;
        } else if table.seq(older) > table.seq(slot) {
            self.links.set(slot, Links { older: LATE, newer: LATE });
            return self.insert_late(list, table.arrival_order(slot), table);
        } else {
            self.links[older].newer = slot;
        }
        ends.newest = slot;
        self.links.set(slot, Links { older, newer: Slot::NONE });
    }

    /// Removes a request from its list.
    #[inline]
    pub fn remove(&mut self, table: &Table, list: usize, slot: Slot) {
        let Links { older, newer } = self.links[slot];
        if older == LATE {
            return self.remove_late(list, table.arrival_order(slot));
        }
        match older.some() {
            Some(older) => self.links[older].newer = newer,
            None => self.lists[list].oldest = newer,
        }
        match newer.some() {
            Some(newer) => self.links[newer].older = older,
            None => self.lists[list].newest = older,
        }
    }

    fn insert_late(&mut self, list: usize, late: Arrival, table: &Table) {
        self.late.insert((list as u32, late));
        let first = &mut self.lists[list].late;
        if first.some().is_none_or(|first| late < table.arrival_order(first)) {
            *first = late.slot();
        }
    }

    fn remove_late(&mut self, list: usize, late: Arrival) {
        self.late.remove(&(list as u32, late));
        if self.lists[list].late == late.slot() {
            let next = self.late.at_or_after(&(list as u32, late)).filter(|next| next.0 == list as u32);
            self.lists[list].late = next.map_or(Slot::NONE, |next| next.1.slot());
        }
    }

    /// True if the list is empty.
    #[inline]
    pub fn is_empty(&self, list: usize) -> bool {
        let List { oldest, late, .. } = self.lists[list];
        oldest == Slot::NONE && late == Slot::NONE
    }

    /// The oldest request of a list. Looks it up in the table only if there are late requests: in a long queue it is not
    /// cached.
    #[inline]
    pub fn oldest(&self, table: &Table, list: usize) -> Option<Slot> {
        let List { oldest, late, .. } = self.lists[list];
        match (oldest.some(), late.some()) {
            (Some(first), Some(late)) if table.seq(late) > table.seq(first) => Some(first),
            (first, late) => late.or(first),
        }
    }
}

/// The requests of each lane group, and how many batches passed over the oldest: after too many it goes next.
pub(crate) struct Guards {
    arrivals: Arrivals,
    left_out: Vec<u64>,
    batches: u64,
}

impl Guards {
    /// For `groups` groups; `batches` batches (0: any number) may pass over a group's oldest request.
    pub fn new(batches: u64, groups: usize) -> Guards {
        Guards { arrivals: Arrivals::new(groups), left_out: vec![0; groups], batches }
    }

    /// Adds a queued request.
    #[inline]
    pub fn insert(&mut self, table: &Table, group: usize, slot: Slot) {
        self.arrivals.insert(table, group, slot);
    }

    /// Removes a cancelled request.
    pub fn remove(&mut self, table: &Table, group: usize, slot: Slot) {
        self.arrivals.remove(table, group, slot);
    }

    /// Counts a batch, which may contain the oldest request.
    #[inline]
    pub fn sent(&mut self, table: &Table, group: usize, batch: &[Slot]) {
        let oldest = self.arrivals.oldest(table, group);
        for &slot in batch {
            self.arrivals.remove(table, group, slot);
        }
        let with_oldest = self.arrivals.oldest(table, group) != oldest;
        self.left_out[group] = if with_oldest { 0 } else { self.left_out[group].saturating_add(1) };
    }

    /// Counts a batch of requests that are not guarded.
    #[inline]
    pub fn passed(&mut self, group: usize) {
        let waits = !self.is_empty(group);
        self.left_out[group] = if waits { self.left_out[group].saturating_add(1) } else { 0 };
    }

    /// The oldest request of a group if it must go next.
    #[inline]
    pub fn due(&self, table: &Table, group: usize) -> Option<Slot> {
        if self.batches == 0 || self.left_out[group] < self.batches {
            return None;
        }
        self.oldest(table, group)
    }

    /// The oldest request of a group.
    pub fn oldest(&self, table: &Table, group: usize) -> Option<Slot> {
        self.arrivals.oldest(table, group)
    }

    /// True if the group is empty.
    pub fn is_empty(&self, group: usize) -> bool {
        self.arrivals.is_empty(group)
    }

    /// Maximum batches before a request with `older` older ones.
    pub fn wait(&self, older: u64) -> u64 {
        guarded_wait(older, self.batches)
    }
}

/// Maximum batches before a request with `older` older ones under a guard.
pub(crate) fn guarded_wait(older: u64, guard_batches: u64) -> u64 {
    match guard_batches {
        0 => u64::MAX,
        batches => older.saturating_add(1).saturating_mul(batches.saturating_add(1)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::types::{Extent, FileId, LaneId, Op, Request};

    proptest! {
        /// Requests enter and leave in any order, some late: each list equals a sorted set.
        #[test]
        fn lists_are_in_order_of_arrival(steps in proptest::collection::vec((0usize..3, 0usize..4, 0usize..64), 0..300)) {
            let (mut table, mut arrivals) = (Table::new(1000), Arrivals::new(3));
            let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 1 };
            let mut held_back = Vec::new();
            let mut expected = vec![BTreeSet::new(); 3];
            for (list, what, which) in steps {
                match what {
                    0 | 1 => {
                        let slot = table.insert(&Request::new(Op::Read, extent)).unwrap();
                        if what == 0 {
                            held_back.push(slot);
                        } else {
                            arrivals.insert(&table, list, slot);
                            expected[list].insert(table.arrival_order(slot));
                        }
                    }
                    2 if !held_back.is_empty() => {
                        let slot = held_back.swap_remove(which % held_back.len());
                        arrivals.insert(&table, list, slot);
                        expected[list].insert(table.arrival_order(slot));
                    }
                    _ => {
                        let Some(gone) = expected[list].iter().nth(which % expected[list].len().max(1)).copied() else {
                            continue;
                        };
                        arrivals.remove(&table, list, gone.slot());
                        table.remove(gone.slot());
                        expected[list].remove(&gone);
                    }
                }
                for (list, expected) in expected.iter().enumerate() {
                    prop_assert_eq!(arrivals.oldest(&table, list), expected.first().map(|first| first.slot()));
                    prop_assert_eq!(arrivals.is_empty(list), expected.is_empty());
                }
            }
        }
    }
}
