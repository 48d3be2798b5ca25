//! The dispatch queue of an I/O node (twins-2017, III): what the policy has released waits here, in that order,
//! for one of a limited number of forwarding threads; neighbours of the same file and operation that are found
//! waiting are merged into one forwarded request.

use std::collections::{BTreeMap, VecDeque};

use impresario_sched::Op;

/// What waits to be forwarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<T> {
    /// Operation; only reads and writes are merged.
    pub op: Op,
    /// Stable key of the file.
    pub file: u64,
    /// The data server where requests are split, else 0: entries of different spaces never touch.
    pub space: u16,
    /// Offset in that space, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// What to answer.
    pub token: T,
}

/// (file, operation, space, offset, order of arrival)
type Place = (u64, u8, u16, u64, u64);

/// The queue. Its length is bounded by the core's in-flight limit above it.
pub struct DispatchQueue<T> {
    in_flight_max: usize,
    merge_requests: usize,
    merge_bytes: u64,
    in_flight: usize,
    next: u64,
    /// Order of arrival; entries that were merged away are found gone.
    order: VecDeque<Place>,
    waiting: BTreeMap<Place, Entry<T>>,
}

impl<T> DispatchQueue<T> {
    /// At most `in_flight_max` forwarded at once, each of at most `merge_requests` entries and (if several) `merge_bytes`.
    pub fn new(in_flight_max: usize, merge_requests: usize, merge_bytes: u64) -> DispatchQueue<T> {
        DispatchQueue {
            in_flight_max: in_flight_max.max(1),
            merge_requests: merge_requests.max(1),
            merge_bytes,
            in_flight: 0,
            next: 0,
            order: VecDeque::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: Entry<T>) {
        let place = (entry.file, entry.op as u8, entry.space, entry.offset, self.next);
        self.next += 1;
        self.order.push_back(place);
        self.waiting.insert(place, entry);
    }

    /// The oldest entry with its waiting neighbours, in offset order, their ranges touching; `None` when nothing
    /// waits or enough is in flight. Each `Some` must be followed by one [`DispatchQueue::done`].
    pub fn pop(&mut self) -> Option<Vec<Entry<T>>> {
        if self.in_flight >= self.in_flight_max {
            return None;
        }
        let (place, entry) = loop {
            let place = self.order.pop_front()?;
            if let Some(entry) = self.waiting.remove(&place) {
                break (place, entry);
            }
        };
        self.in_flight += 1;
        let (mut start, mut end) = (entry.offset, entry.offset.saturating_add(entry.len));
        let mergeable = entry.op.is_data();
        let mut before = VecDeque::from([entry]);
        let of = |offset, order| (place.0, place.1, place.2, offset, order);
        while mergeable && before.len() < self.merge_requests {
            // To the right first: what starts at or inside the range; then what ends at its start.
            let right = self.waiting.range(of(start, 0)..=of(end, u64::MAX)).next().map(|(p, e)| (*p, e.offset, e.len));
            let left = self.waiting.range(of(0, 0)..of(start, 0)).next_back().map(|(p, e)| (*p, e.offset, e.len));
            let left = left.filter(|(_, offset, len)| offset.saturating_add(*len) >= start);
            let fits = |candidate: &(Place, u64, u64)| {
                let (_, offset, len) = *candidate;
                end.max(offset.saturating_add(len)) - start.min(offset) <= self.merge_bytes
            };
            let Some((place, offset, len)) = right.filter(fits).or(left.filter(fits)) else { break };
            let Some(entry) = self.waiting.remove(&place) else { break };
            (start, end) = (start.min(offset), end.max(offset.saturating_add(len)));
            let at = before.partition_point(|e| e.offset <= entry.offset);
            before.insert(at, entry);
        }
        Some(before.into())
    }

    /// A forwarded request was answered: its place is free.
    pub fn done(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Entries that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// True when nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Forwarded and not yet answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Takes out all that waits, in order.
    pub fn drain(&mut self) -> Vec<Entry<T>> {
        let Self { order, waiting, .. } = self;
        order.drain(..).filter_map(|p| waiting.remove(&p)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(file: u64, offset: u64, token: u32) -> Entry<u32> {
        Entry { op: Op::Read, file, space: 0, offset, len: 10, token }
    }

    fn tokens(popped: Option<Vec<Entry<u32>>>) -> Vec<u32> {
        popped.unwrap_or_default().into_iter().map(|e| e.token).collect()
    }

    #[test]
    fn merges_neighbours_on_both_sides_in_offset_order() {
        let mut q = DispatchQueue::new(4, 16, 1 << 20);
        for (i, offset) in [20, 50, 0, 10, 30].into_iter().enumerate() {
            q.push(entry(1, offset, i as u32));
        }
        q.push(entry(2, 40, 9));
        assert_eq!(tokens(q.pop()), [2, 3, 0, 4]);
        assert_eq!(tokens(q.pop()), [1]);
        assert_eq!(tokens(q.pop()), [9]);
        assert_eq!(q.pop(), None);
    }

    #[test]
    fn keeps_its_limits() {
        let mut q = DispatchQueue::new(1, 2, 1 << 20);
        (0..3).for_each(|i| q.push(entry(1, u64::from(i) * 10, i)));
        assert_eq!(tokens(q.pop()), [0, 1]);
        assert_eq!(q.pop(), None, "one in flight is the limit");
        q.done();
        assert_eq!(tokens(q.pop()), [2]);
        let mut q = DispatchQueue::new(9, 16, 25);
        (0..3).for_each(|i| q.push(entry(1, u64::from(i) * 10, i)));
        assert_eq!(tokens(q.pop()), [0, 1], "25 bytes");
    }

    #[test]
    fn never_merges_operations_spaces_or_barriers() {
        let mut q = DispatchQueue::new(9, 16, 1 << 20);
        q.push(entry(1, 0, 0));
        q.push(Entry { op: Op::Write, ..entry(1, 10, 1) });
        q.push(Entry { space: 1, ..entry(1, 10, 2) });
        q.push(Entry { op: Op::Sync, ..entry(1, 0, 3) });
        q.push(Entry { op: Op::Sync, ..entry(1, 10, 4) });
        for i in 0..5 {
            assert_eq!(tokens(q.pop()), [i]);
        }
    }

    proptest! {
        #[test]
        fn every_entry_leaves_once(offsets in proptest::collection::vec((0u64..4, 0u64..40), 0..200), merge in 1usize..20) {
            let mut q = DispatchQueue::new(usize::MAX, merge, 1 << 20);
            for (i, (file, block)) in offsets.iter().enumerate() {
                q.push(entry(*file, block * 10, i as u32));
            }
            let mut seen = vec![false; offsets.len()];
            while let Some(batch) = q.pop() {
                prop_assert!(batch.len() <= merge);
                prop_assert!(batch.windows(2).all(|w| w[0].offset <= w[1].offset && w[1].offset <= w[0].offset + 10));
                for e in batch {
                    prop_assert!(!std::mem::replace(&mut seen[e.token as usize], true));
                }
            }
            prop_assert!(seen.into_iter().all(|s| s) && q.is_empty());
        }
    }
}
