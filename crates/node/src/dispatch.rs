//! The dispatch queue of an I/O node (twins-2017, III): batches released by the policy wait here, in order, for one of
//! a limited number of forwarding threads; others of the same file, operation, job and user that wait are merged into one
//! forwarded request: those that touch, or as IOFSL and FORGE do it, any of them, as a list of ranges.

use std::collections::VecDeque;
use std::ops::Range;

use impresario_base::slab::{Key, Slab};
use impresario_sched::sorted::SortedSet;
use impresario_sched::{Batch, Op};
use rustc_hash::FxHashMap;

/// Which waiting entries are forwarded together.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Merging {
    /// Those whose ranges touch, as one range.
    #[default]
    Contiguous,
    /// Those of one data server and one time window of the policy, the oldest first, as a list of ranges that need not touch.
    /// What lies on several data servers goes alone: a list that crossed servers or windows would undo the windows of `twins`
    /// (twins-2017, VI-B.1).
    List,
}

/// An entry waiting to be forwarded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<T> {
    /// Operation; only reads and writes are merged.
    pub op: Op,
    /// Stable key of the file.
    pub file: u64,
    /// The data server if requests are split, else 0: entries of different spaces never touch.
    pub space: u16,
    /// Offset in that space, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// The data server of its first byte.
    pub lane: u16,
    /// It lies on others, too; only lists mind.
    pub spans: bool,
    /// The time window of the policy that released it; only lists mind.
    pub window: u64,
    /// For whom: a forwarded request goes under one name, and the data servers charge it to that.
    pub party: Party,
    /// Identifies what the entry answers.
    pub token: T,
}

impl<T> Entry<T> {
    /// An entry for a batch of an I/O node's core that lies on one data server; `file` is the stable key, `split` as for
    /// [`core_requests`](crate::core_requests).
    pub fn of(batch: &Batch, file: u64, split: bool, party: Party, token: T) -> Entry<T> {
        let (extent, lane) = (batch.extent, batch.extent.lane.0);
        let (space, offset, len) = (if split { lane } else { 0 }, extent.lane_offset, extent.len);
        Entry { op: batch.op, file, space, offset, len, lane, spans: false, window: batch.window, party, token }
    }

    /// The same entry with another token.
    pub fn with<U>(self, token: U) -> Entry<U> {
        let Entry { op, file, space, offset, len, lane, spans, window, party, token: _ } = self;
        Entry { op, file, space, offset, len, lane, spans, window, party, token }
    }

    fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// Job and user.
pub type Party = (u64, u32);

/// Only entries of the same group are merged: file, operation, space or, for lists, data server and window, and party.
type Group = (u64, Op, u16, u64, Party);

/// Place of an entry in its group: (offset, order of arrival, key); for lists the order of arrival comes first.
type Place = (u64, u64, Key);

/// The least key of all.
const FIRST: Key = Key { index: 0, generation: 0 };

/// The ranges that extents (offset, length) cover, in order; what touches or overlaps is one.
pub fn covered(extents: impl Iterator<Item = (u64, u64)>) -> Vec<Range<u64>> {
    let mut extents: Vec<_> = extents.collect();
    extents.sort_unstable();
    let mut ranges: Vec<Range<u64>> = Vec::with_capacity(1);
    for (start, len) in extents {
        let end = start.saturating_add(len);
        match ranges.last_mut().filter(|last| start <= last.end) {
            Some(last) => last.end = last.end.max(end),
            None => ranges.push(start..end),
        }
    }
    ranges
}

/// The queue. The in-flight limit of the core above bounds its length.
pub struct DispatchQueue<T> {
    in_flight_max: usize,
    merging: Merging,
    merge_requests: usize,
    merge_bytes: u64,
    in_flight: usize,
    /// Requests in flight that wait for a server that hangs and do not count against the limit.
    stuck: usize,
    next: u64,
    /// Order of arrival, including stale keys of merged entries.
    order: VecDeque<Key>,
    /// Skipped entries, older than those in `order`.
    passed_over: VecDeque<Key>,
    /// The waiting entries with their order of arrival.
    entries: Slab<(u64, Entry<T>)>,
    /// The entries of each group that may be merged.
    waiting: FxHashMap<Group, SortedSet<Place>>,
}

impl<T> DispatchQueue<T> {
    /// At most `in_flight_max` forwarded requests at once, each of at most `merge_requests` entries and (if several)
    /// `merge_bytes`.
    pub fn new(in_flight_max: usize, merging: Merging, merge_requests: usize, merge_bytes: u64) -> DispatchQueue<T> {
        DispatchQueue {
            in_flight_max: in_flight_max.max(1),
            merging,
            merge_requests: merge_requests.max(1),
            merge_bytes,
            in_flight: 0,
            stuck: 0,
            next: 0,
            order: VecDeque::new(),
            passed_over: VecDeque::new(),
            entries: Slab::default(),
            waiting: FxHashMap::default(),
        }
    }

    /// Appends an entry.
    pub fn push(&mut self, entry: Entry<T>) {
        let (group, offset, order) = (self.group(&entry), entry.offset, self.next);
        self.next += 1;
        let key = self.entries.insert((order, entry));
        self.order.push_back(key);
        if let Some(group) = group {
            let place = self.place(offset, order, key);
            self.waiting.entry(group).or_default().insert(place);
        }
    }

    /// The entries that one may be merged with, if any.
    fn group(&self, entry: &Entry<T>) -> Option<Group> {
        let Entry { op, file, space, lane, window, party, .. } = *entry;
        if self.merge_requests < 2 || !op.is_data() {
            return None;
        }
        match self.merging {
            Merging::Contiguous => Some((file, op, space, 0, party)),
            Merging::List => (!entry.spans).then_some((file, op, lane, window, party)),
        }
    }

    fn place(&self, offset: u64, order: u64, key: Key) -> Place {
        match self.merging {
            Merging::Contiguous => (offset, order, key),
            Merging::List => (order, offset, key),
        }
    }

    /// Removes a waiting entry.
    fn take(&mut self, key: Key) -> Option<Entry<T>> {
        let (order, entry) = self.entries.remove(key)?;
        let place = self.place(entry.offset, order, key);
        if let Some(group) = self.group(&entry)
            && let Some(places) = self.waiting.get_mut(&group)
        {
            places.remove(&place);
            if places.is_empty() {
                self.waiting.remove(&group);
            }
        }
        Some(entry)
    }

    /// The oldest entry, if it may be taken now.
    pub fn peek(&self) -> Option<&Entry<T>> {
        let oldest = self.order.iter().find_map(|key| self.entries.get(*key).map(|(_, entry)| entry));
        oldest.filter(|_| self.in_flight - self.stuck.min(self.in_flight) < self.in_flight_max)
    }

    /// The oldest entry with those that it is merged with, in offset order; `None` if nothing waits or enough is in flight.
    /// Each `Some` must be followed by one [`DispatchQueue::done`].
    pub fn pop(&mut self) -> Option<Vec<Entry<T>>> {
        self.pop_if(|_| true)
    }

    /// The same among entries that may go. The others keep their order, and are considered again after
    /// [`DispatchQueue::look_again`].
    pub fn pop_if(&mut self, may_go: impl Fn(&Entry<T>) -> bool) -> Option<Vec<Entry<T>>> {
        if self.in_flight - self.stuck.min(self.in_flight) >= self.in_flight_max {
            return None;
        }
        let oldest = loop {
            let oldest = self.order.pop_front()?;
            let Some((_, entry)) = self.entries.get(oldest) else { continue };
            if may_go(entry) {
                break self.take(oldest)?;
            }
            self.passed_over.push_back(oldest);
        };
        self.in_flight += 1;
        self.order.front().inspect(|next| self.entries.fetch(**next));
        let group = self.group(&oldest);
        let (mut start, mut end, mut bytes) = (oldest.offset, oldest.end(), oldest.len);
        let mut members = VecDeque::from([oldest]);
        while let Some(group) = group.filter(|_| members.len() < self.merge_requests) {
            let next = match self.merging {
                Merging::Contiguous => self.neighbour(group, start, end, &may_go),
                Merging::List => self.oldest_of(group, bytes, &may_go),
            };
            let Some(entry) = next.and_then(|key| self.take(key)) else { break };
            (start, end, bytes) = (start.min(entry.offset), end.max(entry.end()), bytes.saturating_add(entry.len));
            let at = members.partition_point(|e| e.offset <= entry.offset);
            members.insert(at, entry);
        }
        Some(members.into())
    }

    /// The oldest entry of a group, if a list of so many bytes may take it.
    fn oldest_of(&self, group: Group, bytes: u64, may_go: impl Fn(&Entry<T>) -> bool) -> Option<Key> {
        let (.., key) = self.waiting.get(&group)?.at_or_after(&(0, 0, FIRST))?;
        let (_, entry) = self.entries.get(key)?;
        (bytes.saturating_add(entry.len) <= self.merge_bytes && may_go(entry)).then_some(key)
    }

    /// An entry that touches the range and may join it: first on the right, starting at its end or inside it; then on
    /// the left, ending at its start.
    fn neighbour(&self, group: Group, start: u64, end: u64, may_go: impl Fn(&Entry<T>) -> bool) -> Option<Key> {
        let (left, right) = self.waiting.get(&group)?.around(&(start, 0, FIRST));
        let touches = |place: &Place| {
            let (_, entry) = self.entries.get(place.2)?;
            let together = end.max(entry.end()) - start.min(entry.offset);
            let touches = entry.offset <= end && entry.end() >= start && together <= self.merge_bytes;
            (touches && may_go(entry)).then_some(place.2)
        };
        right.as_ref().and_then(touches).or_else(|| left.as_ref().and_then(touches))
    }

    /// A forwarded request was answered, which frees its slot.
    pub fn done(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }

    /// Entries that [`DispatchQueue::pop`] would return now without merging.
    pub fn ready(&self) -> usize {
        let places = self.in_flight_max.saturating_sub(self.in_flight - self.stuck.min(self.in_flight));
        self.order.len().min(places)
    }

    /// Returns skipped entries to the queue, after a change in which may go.
    pub fn look_again(&mut self) {
        while let Some(key) = self.passed_over.pop_back() {
            self.order.push_front(key);
        }
    }

    /// Sets how many requests in flight wait for a server that hangs: until the next call they do not count against
    /// the limit.
    pub fn set_stuck(&mut self, stuck: usize) {
        self.stuck = stuck;
    }

    /// All waiting entries.
    pub fn waiting(&self) -> impl Iterator<Item = &Entry<T>> {
        self.passed_over.iter().chain(&self.order).filter_map(|key| self.entries.get(*key).map(|(_, entry)| entry))
    }

    /// The number of waiting entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if nothing waits.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Forwarded requests not yet answered.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Removes all waiting entries, in order.
    pub fn drain(&mut self) -> Vec<Entry<T>> {
        self.look_again();
        let order = std::mem::take(&mut self.order);
        order.into_iter().filter_map(|at| self.take(at)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(file: u64, offset: u64, token: u32) -> Entry<u32> {
        Entry { op: Op::Read, file, space: 0, offset, len: 10, lane: 0, spans: false, window: 0, party: (1, 1), token }
    }

    fn queue(in_flight: usize, merge_requests: usize, merge_bytes: u64) -> DispatchQueue<u32> {
        DispatchQueue::new(in_flight, Merging::Contiguous, merge_requests, merge_bytes)
    }

    fn lists(merge_requests: usize, merge_bytes: u64) -> DispatchQueue<u32> {
        DispatchQueue::new(usize::MAX, Merging::List, merge_requests, merge_bytes)
    }

    fn tokens(popped: Option<Vec<Entry<u32>>>) -> Vec<u32> {
        popped.unwrap_or_default().into_iter().map(|e| e.token).collect()
    }

    #[test]
    fn merges_neighbours_on_both_sides_in_offset_order() {
        let mut q = queue(4, 16, 1 << 20);
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
        let mut q = queue(1, 2, 1 << 20);
        (0..3).for_each(|i| q.push(entry(1, u64::from(i) * 10, i)));
        assert_eq!(q.peek().map(|entry| entry.token), Some(0));
        assert_eq!(tokens(q.pop()), [0, 1]);
        assert_eq!(q.pop(), None, "one in flight is the limit");
        assert_eq!(q.peek(), None);
        q.done();
        assert_eq!(q.peek().map(|entry| entry.token), Some(2), "the second was taken with the first");
        assert_eq!(tokens(q.pop()), [2]);
        let mut q = queue(9, 16, 25);
        (0..3).for_each(|i| q.push(entry(1, u64::from(i) * 10, i)));
        assert_eq!(tokens(q.pop()), [0, 1], "25 bytes");
    }

    #[test]
    fn stuck_requests_hold_no_slot_and_skipped_entries_keep_their_order() {
        let mut q = queue(1, 4, 1 << 20);
        (0..4).for_each(|i| q.push(Entry { space: i as u16 % 2, ..entry(u64::from(i), 0, i) }));
        assert_eq!(tokens(q.pop()), [0]);
        assert_eq!(q.pop_if(|e| e.space == 1), None, "one in flight is the limit");
        q.set_stuck(1);
        assert_eq!(tokens(q.pop_if(|e| e.space == 1)), [1]);
        assert_eq!(q.pop_if(|e| e.space == 1), None, "and that is not stuck");
        q.done();
        assert_eq!((q.ready(), tokens(q.pop_if(|e| e.space == 1))), (1, vec![3]));
        q.done();
        assert_eq!((q.pop_if(|e| e.space == 1), q.len(), q.ready()), (None, 1, 0));
        assert_eq!(q.waiting().map(|e| e.token).collect::<Vec<_>>(), [2]);
        assert_eq!(q.pop(), None, "it was passed over");
        q.look_again();
        assert_eq!(tokens(q.pop()), [2]);
        q.push(Entry { space: 1, ..entry(5, 0, 5) });
        q.push(Entry { space: 1, ..entry(5, 10, 6) });
        assert_eq!(tokens(q.pop_if(|e| e.token != 6)), [] as [u32; 0], "two are in flight, one is stuck");
        q.done();
        assert_eq!(tokens(q.pop_if(|e| e.token != 6)), [5], "nor is it merged");
        assert_eq!(tokens(Some(q.drain())), [6]);
    }

    #[test]
    fn never_merges_operations_spaces_parties_or_barriers() {
        let mut q = queue(9, 16, 1 << 20);
        q.push(entry(1, 0, 0));
        q.push(Entry { op: Op::Write, ..entry(1, 10, 1) });
        q.push(Entry { space: 1, ..entry(1, 10, 2) });
        q.push(Entry { party: (2, 1), ..entry(1, 10, 3) });
        q.push(Entry { party: (1, 2), ..entry(1, 10, 4) });
        q.push(Entry { op: Op::Sync, ..entry(1, 0, 5) });
        q.push(Entry { op: Op::Sync, ..entry(1, 10, 6) });
        for i in 0..7 {
            assert_eq!(tokens(q.pop()), [i]);
        }
    }

    #[test]
    fn a_list_takes_what_waits_longest_whether_it_touches_or_not() {
        let mut q = lists(4, 1 << 20);
        for (token, offset) in (0..).zip([500, 20, 900, 0, 30]) {
            q.push(entry(1, offset, token));
            q.push(entry(2, offset, 10 + token));
        }
        assert_eq!(tokens(q.pop()), [3, 1, 0, 2], "the four oldest, in offset order");
        assert_eq!(tokens(q.pop()), [13, 11, 10, 12]);
        assert_eq!(tokens(q.pop()), [4]);
        let mut q = lists(16, 30);
        (0..4).for_each(|n| q.push(Entry { len: [10, 15, 10, 5][n], ..entry(1, 100 * n as u64, n as u32) }));
        assert_eq!(tokens(q.pop()), [0, 1], "30 bytes; none passes the one that does not fit");
        q.push(entry(1, 1000, 4));
        assert_eq!(tokens(q.pop_if(|e| e.token != 4)), [2, 3], "nor one that may not go");
    }

    #[test]
    fn a_list_is_of_one_server_window_operation_and_party() {
        let mut q = lists(16, 1 << 20);
        q.push(entry(1, 0, 0));
        q.push(Entry { lane: 1, ..entry(1, 10, 1) });
        q.push(Entry { window: 1, ..entry(1, 20, 2) });
        q.push(Entry { spans: true, ..entry(1, 30, 3) });
        q.push(Entry { op: Op::Write, ..entry(1, 40, 4) });
        q.push(Entry { party: (2, 1), ..entry(1, 50, 5) });
        q.push(Entry { op: Op::Sync, ..entry(1, 60, 6) });
        q.push(Entry { op: Op::Sync, ..entry(1, 70, 7) });
        q.push(Entry { spans: true, ..entry(1, 80, 8) });
        for i in 0..9 {
            assert_eq!(tokens(q.pop()), [i]);
        }
    }

    #[test]
    fn what_touches_is_one_range() {
        assert_eq!(covered([(50, 10), (0, 10), (10, 5), (52, 3)].into_iter()), [0..15, 50..60]);
        assert_eq!(covered([(7, 3), (u64::MAX - 1, u64::MAX)].into_iter()), [7..10, u64::MAX - 1..u64::MAX]);
        assert_eq!(covered(std::iter::empty()), []);
    }

    /// What a queue made of a plain list pops: the oldest entry and what touches it.
    fn pop_from_a_list(list: &mut Vec<Entry<u32>>, merge_requests: usize, merge_bytes: u64) -> Vec<u32> {
        if list.is_empty() {
            return Vec::new();
        }
        let mut members = vec![list.remove(0)];
        while members.len() < merge_requests {
            let (start, end) = (members[0].offset, members.iter().map(Entry::end).max().unwrap());
            let fits = |e: &&Entry<u32>| end.max(e.end()) - start.min(e.offset) <= merge_bytes;
            let group = || list.iter().filter(|e| e.file == members[0].file);
            let right = group().filter(|e| e.offset >= start).min_by_key(|e| e.offset);
            let left = group().filter(|e| e.offset < start).reduce(|a, b| if b.offset >= a.offset { b } else { a });
            let right = right.filter(|e| e.offset <= end).filter(fits);
            let Some(next) = right.or(left.filter(|e| e.end() >= start).filter(fits)).copied() else { break };
            list.retain(|e| e.token != next.token);
            members.insert(members.partition_point(|e| e.offset <= next.offset), next);
        }
        members.into_iter().map(|e| e.token).collect()
    }

    proptest! {
        #[test]
        fn as_a_plain_list(
            steps in proptest::collection::vec((0u8..3, 0u64..3, 0u64..30, 1u64..25), 1..150),
            merge_requests in 1usize..6,
        ) {
            let mut q = queue(usize::MAX, merge_requests, 60);
            let mut list = Vec::new();
            for (i, (what, file, offset, len)) in steps.into_iter().enumerate() {
                if what > 0 {
                    let entry = Entry { len, ..entry(file, offset * 5, i as u32) };
                    q.push(entry);
                    list.push(entry);
                } else {
                    prop_assert_eq!(tokens(q.pop()), pop_from_a_list(&mut list, merge_requests, 60));
                }
                prop_assert_eq!(q.len(), list.len());
            }
            prop_assert_eq!(tokens(Some(q.drain())), list.iter().map(|e| e.token).collect::<Vec<_>>());
        }

        #[test]
        fn every_entry_leaves_once(offsets in proptest::collection::vec((0u64..4, 0u64..40), 0..200), merge in 1usize..20) {
            for mut q in [queue(usize::MAX, merge, 1 << 20), lists(merge, 100)] {
                for (i, (file, block)) in offsets.iter().enumerate() {
                    q.push(entry(*file, block * 10, i as u32));
                }
                let mut seen = vec![false; offsets.len()];
                while let Some(batch) = q.pop() {
                    prop_assert!(batch.len() <= merge);
                    let gap = if q.merging == Merging::List { 400 } else { 10 };
                    prop_assert!(batch.windows(2).all(|w| (w[0].offset..=w[0].offset + gap).contains(&w[1].offset)));
                    prop_assert!(q.merging != Merging::List || batch.len() <= 10 && batch.iter().all(|e| e.file == batch[0].file));
                    for e in batch {
                        prop_assert!(!std::mem::replace(&mut seen[e.token as usize], true));
                    }
                }
                prop_assert!(seen.into_iter().all(|s| s) && q.is_empty() && q.waiting.is_empty());
            }
        }
    }
}
