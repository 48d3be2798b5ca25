//! Queues in offset order with aggregation: the common part of `mlf`, `hbrr` and merging `fifo`.
//!
//! A [`RunQueue`] holds the requests of one file, operation and lane as *runs*: virtual requests of touching ranges,
//! built as requests arrive and never larger than a batch may be. A run becomes *ready* in a given pass (policies
//! without quanta use pass 0). Ready and waiting runs are each kept in offset order, so that the first ready one is
//! found at once and neighbours are found in both.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use impresario_base::prefetch::fetch;

use crate::sorted::SortedSet;
use crate::table::{BySlot, Numbered, Slot, Table};

/// A virtual request as seen by the readiness rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// Its requests.
    pub count: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Sum of the passes in which its requests arrived.
    pub pass_sum: u64,
}

/// Per request, 32 bytes. The first request of a run, its head, holds the run's figures.
#[derive(Clone, Copy)]
struct Node {
    /// Next request of the run, in offset order.
    next: Slot,
    /// Neighbours in the queue's order of arrival.
    older: Slot,
    newer: Slot,
    /// For a head: the run's last request. For others: a link towards the head.
    link: Slot,
    pass_sum: u64,
    len: u32,
    /// Requests in the run; 0 except for heads.
    count: u16,
    ready: bool,
}

const EMPTY: Node = Node {
    next: Slot::NONE,
    older: Slot::NONE,
    newer: Slot::NONE,
    link: Slot::NONE,
    pass_sum: 0,
    len: 0,
    count: 0,
    ready: false,
};

/// Waiting runs for which a queue keeps memory.
const PENDING_SPARE: usize = 16;

/// A run in offset order: its start, in halves, so that a key takes 12 bytes and not 16; and its head.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key {
    start: [u32; 2],
    head: u32,
}

impl Key {
    #[inline]
    fn new(start: u64, head: u32) -> Key {
        Key { start: [(start >> 32) as u32, start as u32], head }
    }

    /// Below all keys behind the start of a request.
    fn behind(table: &Table, slot: Slot) -> Key {
        Key::new(table.start(slot).saturating_add(1), 0)
    }

    fn of(table: &Table, head: Slot) -> Key {
        Key::new(table.start(head), head.0)
    }

    fn head(self) -> Slot {
        Slot(self.head)
    }
}

impl Ord for Key {
    #[inline]
    fn cmp(&self, other: &Key) -> Ordering {
        let order = |key: &Key| (u64::from(key.start[0]) << 32 | u64::from(key.start[1]), key.head);
        order(self).cmp(&order(other))
    }
}

impl PartialOrd for Key {
    #[inline]
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The runs of one file, operation and lane.
#[derive(Default)]
pub(crate) struct RunQueue {
    ready: SortedSet<Key>,
    waiting: SortedSet<Key>,
    /// The passes in which waiting runs become ready, and their heads; a change makes older entries stale.
    pending: BinaryHeap<Reverse<Numbered>>,
    oldest: Option<Slot>,
    newest: Option<Slot>,
    len: u32,
    waiting_len: u32,
}

impl RunQueue {
    /// An empty queue that reuses the memory of `old`, if given.
    pub fn renewed(old: Option<&mut RunQueue>) -> RunQueue {
        old.map(std::mem::take).unwrap_or_default()
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The oldest request.
    pub fn oldest(&self) -> Option<Slot> {
        self.oldest
    }

    /// The newest request.
    pub fn newest(&self) -> Option<Slot> {
        self.newest
    }

    /// Head of the first ready run at or after `offset`, or else of the first ready run.
    pub fn next_ready(&self, offset: u64) -> Option<Slot> {
        self.ready.at_or_after(&Key::new(offset, 0)).or_else(|| self.ready.first()).map(Key::head)
    }
}

/// The nodes of all queues of a policy, and the limits of a batch.
pub(crate) struct Runs {
    nodes: BySlot<Node>,
    max_requests: u16,
    max_bytes: u64,
    /// Empty between calls; keeps its memory.
    scratch: Vec<Slot>,
}

impl Runs {
    /// Batches have at most `max_requests` requests and `max_bytes`.
    pub fn new(max_requests: u64, max_bytes: u64) -> Runs {
        Runs {
            nodes: BySlot::new(EMPTY),
            max_requests: max_requests.clamp(1, u64::from(u16::MAX)) as u16,
            max_bytes: max_bytes.min(u64::from(u32::MAX)),
            scratch: Vec::new(),
        }
    }

    /// The figures of a run.
    pub fn run(&self, head: Slot) -> Run {
        let n = &self.nodes[head];
        Run { count: u64::from(n.count), len: u64::from(n.len), pass_sum: n.pass_sum }
    }

    /// Prefetches the figures of a run into the CPU cache.
    pub fn fetch(&self, head: Slot) {
        fetch(&self.nodes[head]);
    }

    /// The requests of a run, in offset order.
    pub fn members(&self, head: Slot) -> impl Iterator<Item = Slot> + '_ {
        let after = |at: &Slot| Some(self.nodes[*at].next);
        std::iter::successors(Some(head), after).take(self.nodes[head].count.into())
    }

    /// The head of the run that holds a queued request.
    pub fn run_of(&mut self, slot: Slot) -> Slot {
        let mut at = slot;
        while self.nodes[at].count == 0 {
            let up = self.nodes[at].link;
            if self.nodes[up].count == 0 {
                self.nodes[at].link = self.nodes[up].link;
            }
            at = up;
        }
        at
    }

    /// Queues a request that arrived in `pass` and merges it with the runs it touches.
    pub fn insert(&mut self, q: &mut RunQueue, table: &Table, slot: Slot, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        let newest = q.newest.replace(slot);
        match newest {
            Some(newest) => self.nodes[newest].newer = slot,
            None => q.oldest = Some(slot),
        }
        q.len += 1;
        let len = u32::try_from(table.len_bytes(slot)).unwrap_or(u32::MAX);
        let older = newest.unwrap_or(Slot::NONE);
        self.nodes.set(slot, Node { older, link: slot, pass_sum: pass, len, count: 1, ..EMPTY });
        self.place(q, table, slot, pass, ready_at);
    }

    /// Merges a one-request run with its neighbours and files the result.
    fn place(&mut self, q: &mut RunQueue, table: &Table, slot: Slot, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        let below = Key::behind(table, slot);
        let (ready, waiting) = (q.ready.around(&below), q.waiting.around(&below));
        let first_of = |keys: [Option<Key>; 2]| keys.into_iter().flatten().min().map(Key::head);
        let left = ready.0.max(waiting.0).map(Key::head);
        let mut right = first_of([ready.1, waiting.1]);
        let left = left.filter(|l| self.may_join(table, *l, slot));
        if let Some(left) = left {
            self.add(table, left, slot);
        }
        let head = left.unwrap_or(slot);
        // A long read may close several gaps.
        while let Some(next) = right {
            let tail = self.nodes[head].link;
            // An overlapping read may reach past its neighbour's start; parts must stay in offset order.
            if !self.may_join(table, head, next) || table.start(tail) > table.start(next) {
                break;
            }
            self.unfile(q, table, next);
            self.append(table, head, next);
            let from = Key::behind(table, next);
            right = first_of([q.ready.at_or_after(&from), q.waiting.at_or_after(&from)]);
        }
        self.file(q, table, (head, left.is_some()), pass, ready_at);
    }

    /// True if run `b`, which starts no earlier than `a`, touches it and both fit a batch.
    fn may_join(&self, table: &Table, a: Slot, b: Slot) -> bool {
        let (na, nb) = (&self.nodes[a], &self.nodes[b]);
        let (start, end_a) = (table.start(a), table.start(a).saturating_add(u64::from(na.len)));
        let end_b = table.start(b).saturating_add(u64::from(nb.len));
        end_a >= table.start(b)
            && na.count.saturating_add(nb.count) <= self.max_requests
            && end_a.max(end_b) - start <= self.max_bytes
    }

    /// Inserts a single request into run `a`, which starts no later, in offset order.
    fn add(&mut self, table: &Table, a: Slot, slot: Slot) {
        let tail = self.nodes[a].link;
        if table.start(tail) <= table.start(slot) {
            return self.append(table, a, slot);
        }
        // Only overlapping reads come here; a run is at most one batch long.
        let mut before = a;
        while table.start(self.nodes[before].next) <= table.start(slot) {
            before = self.nodes[before].next;
        }
        let (after, pass) = (self.nodes[before].next, self.nodes[slot].pass_sum);
        self.nodes[before].next = slot;
        let len = (table.end(slot) - table.start(a)) as u32;
        let n = &mut self.nodes[slot];
        (n.next, n.link, n.count) = (after, a, 0);
        let n = &mut self.nodes[a];
        (n.len, n.count, n.pass_sum) = (n.len.max(len), n.count + 1, n.pass_sum + pass);
    }

    /// Appends run `b` to run `a`; `a` may end inside `b` or right before it.
    fn append(&mut self, table: &Table, a: Slot, b: Slot) {
        let nb = self.nodes[b];
        let tail = self.nodes[a].link;
        self.nodes[tail].next = b;
        let len = (table.start(b).saturating_add(u64::from(nb.len)) - table.start(a)) as u32;
        let n = &mut self.nodes[a];
        (n.link, n.len, n.count, n.pass_sum) = (nb.link, n.len.max(len), n.count + nb.count, n.pass_sum + nb.pass_sum);
        let n = &mut self.nodes[b];
        (n.link, n.count) = (a, 0);
    }

    /// Files a run in the offset order to which it belongs, whether or not it is filed already.
    fn file(
        &mut self,
        q: &mut RunQueue,
        table: &Table,
        (head, filed): (Slot, bool),
        pass: u64,
        ready_at: impl Fn(&Run) -> u64,
    ) {
        let ready_pass = ready_at(&self.run(head));
        let ready = ready_pass <= pass;
        if !filed || self.nodes[head].ready != ready {
            if filed {
                self.unfile(q, table, head);
            }
            let order = if ready { &mut q.ready } else { &mut q.waiting };
            order.insert(Key::of(table, head));
            q.waiting_len += u32::from(!ready);
            self.nodes[head].ready = ready;
        }
        if !ready {
            if q.pending.len() > 2 * q.waiting_len as usize + 8 {
                // Mostly stale entries: keep one per waiting run.
                let nodes = &self.nodes;
                let mut entries: Vec<_> = std::mem::take(&mut q.pending).into_vec();
                entries.retain(|Reverse(d)| nodes[Slot(d.whose())].count > 0 && !nodes[Slot(d.whose())].ready);
                entries.sort_unstable_by_key(|Reverse(d)| (Slot(d.whose()), d.number()));
                entries.dedup_by_key(|Reverse(d)| Slot(d.whose()));
                q.pending = entries.into();
            }
            if q.pending.len() == q.pending.capacity() {
                q.pending.reserve_exact((q.pending.len() / 4).max(4));
            }
            q.pending.push(Reverse(Numbered::new(ready_pass, head.0)));
        }
    }

    fn unfile(&mut self, q: &mut RunQueue, table: &Table, head: Slot) {
        let key = Key::of(table, head);
        if self.nodes[head].ready {
            q.ready.remove(&key);
        } else if q.waiting.remove(&key) {
            q.waiting_len -= 1;
        }
    }

    /// Moves the runs that become ready in `pass` to the ready ones.
    pub fn promote(&mut self, q: &mut RunQueue, table: &Table, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        while let Some(&Reverse(due)) = q.pending.peek().filter(|e| e.0.number() <= pass) {
            q.pending.pop();
            let head = Slot(due.whose());
            let n = self.nodes[head];
            if n.count == 0 || n.ready || !q.waiting.remove(&Key::of(table, head)) {
                continue; // stale
            }
            let ready_pass = ready_at(&self.run(head));
            if ready_pass <= pass {
                self.nodes[head].ready = true;
                q.ready.insert(Key::of(table, head));
                q.waiting_len -= 1;
            } else {
                q.waiting.insert(Key::of(table, head));
                q.pending.push(Reverse(Numbered::new(ready_pass, head.0)));
            }
        }
        // After a flood the heap would stay as large as the queue ever was.
        if q.pending.capacity() > 4 * (q.pending.len() + PENDING_SPARE) {
            q.pending.shrink_to(q.pending.len() + PENDING_SPARE);
        }
    }

    /// The pass in which the queue next has a ready run; the current one if it has one now.
    pub fn ready_from(&self, q: &RunQueue, pass: u64) -> Option<u64> {
        if !q.ready.is_empty() {
            return Some(pass);
        }
        q.pending.peek().map(|e| e.0.number().max(pass))
    }

    /// Visits a queue's requests in order of arrival, each with the pass in which it arrived (the mean, in a virtual
    /// request).
    pub fn for_each(&self, q: &RunQueue, mut show: impl FnMut(Slot, u64)) {
        let mut next = q.oldest;
        while let Some(slot) = next {
            let mut head = slot;
            while self.nodes[head].count == 0 {
                head = self.nodes[head].link;
            }
            let run = self.run(head);
            show(slot, run.pass_sum / run.count);
            next = self.nodes[slot].newer.some();
        }
    }

    /// Takes the first `limit` requests of a run out of the queue, in offset order; the rest stays queued.
    pub fn take(
        &mut self,
        q: &mut RunQueue,
        table: &Table,
        head: Slot,
        limit: usize,
        out: &mut Vec<Slot>,
        ready_at: impl Fn(&Run) -> u64 + Copy,
    ) {
        let scratch = std::mem::take(&mut self.scratch);
        let (mut parts, pass) = self.dissolve(q, table, head, scratch);
        let taken = parts.len().min(limit);
        for &slot in &parts[..taken] {
            self.forget(q, slot);
        }
        out.extend_from_slice(&parts[..taken]);
        self.place_again(q, table, &parts[taken..], pass, ready_at);
        parts.clear();
        self.scratch = parts;
    }

    /// Takes a request and the requests that follow it in its run without a gap, in offset order.
    pub fn take_from(
        &mut self,
        q: &mut RunQueue,
        table: &Table,
        first: Slot,
        out: &mut Vec<Slot>,
        ready_at: impl Fn(&Run) -> u64 + Copy,
    ) {
        let head = self.run_of(first);
        // It may be the oldest from now on, and is not cached in a long queue.
        if let Some(newer) = self.nodes[first].newer.some() {
            table.fetch(newer);
        }
        let scratch = std::mem::take(&mut self.scratch);
        let (mut parts, pass) = self.dissolve(q, table, head, scratch);
        let (mut begun, mut end) = (false, table.start(first));
        parts.retain(|slot| {
            begun |= *slot == first;
            let goes = begun && table.start(*slot) <= end;
            if goes {
                end = end.max(table.end(*slot));
                out.push(*slot);
            }
            !goes
        });
        for &slot in &*out {
            self.forget(q, slot);
        }
        self.place_again(q, table, &parts, pass, ready_at);
        parts.clear();
        self.scratch = parts;
    }

    /// Removes one (cancelled) request.
    pub fn remove(&mut self, q: &mut RunQueue, table: &Table, slot: Slot, ready_at: impl Fn(&Run) -> u64 + Copy) {
        let head = self.run_of(slot);
        let (mut parts, pass) = self.dissolve(q, table, head, Vec::new());
        self.forget(q, slot);
        parts.retain(|p| *p != slot);
        self.place_again(q, table, &parts, pass, ready_at);
    }

    /// Dissolves a run: returns its requests and the mean of the passes in which they arrived.
    fn dissolve(&mut self, q: &mut RunQueue, table: &Table, head: Slot, mut parts: Vec<Slot>) -> (Vec<Slot>, u64) {
        self.unfile(q, table, head);
        let run = self.nodes[head];
        let mut at = head;
        for _ in 0..run.count {
            parts.push(at);
            at = self.nodes[at].next;
        }
        (parts, run.pass_sum / u64::from(run.count.max(1)))
    }

    /// Rebuilds runs from the rest of one; its requests may no longer touch.
    fn place_again(
        &mut self,
        q: &mut RunQueue,
        table: &Table,
        parts: &[Slot],
        pass: u64,
        ready_at: impl Fn(&Run) -> u64 + Copy,
    ) {
        for &part in parts {
            let len = u32::try_from(table.len_bytes(part)).unwrap_or(u32::MAX);
            let n = &mut self.nodes[part];
            (n.next, n.link, n.count, n.len, n.pass_sum) = (Slot::NONE, part, 1, len, pass);
        }
        for &part in parts {
            self.place(q, table, part, 0, ready_at);
        }
    }

    /// Removes a request from the order of arrival.
    fn forget(&mut self, q: &mut RunQueue, slot: Slot) {
        let Node { older, newer, .. } = self.nodes[slot];
        match older.some() {
            Some(o) => self.nodes[o].newer = newer,
            None => q.oldest = newer.some(),
        }
        match newer.some() {
            Some(n) => self.nodes[n].older = older,
            None => q.newest = older.some(),
        }
        self.nodes[slot].count = 0;
        q.len -= 1;
        if q.len == 0 {
            // Policies keep empty queues for later ones.
            q.ready.give_back();
            q.waiting.give_back();
            q.pending.clear();
            q.pending.shrink_to(PENDING_SPARE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Extent, FileId, LaneId, Op, Request};

    /// Policies keep empty queues for later ones, so their memory counts for every pending request.
    #[test]
    fn an_emptied_queue_gives_its_memory_back() {
        let (mut table, mut runs, mut q) = (Table::new(1000), Runs::new(1, 1 << 20), RunQueue::default());
        for count in [20, 64, 500] {
            let slots: Vec<Slot> = (0..count)
                .map(|n| {
                    let extent =
                        Extent { file: FileId(0), lane: LaneId(0), file_offset: 9 * n, lane_offset: 9 * n, len: 1 };
                    table.insert(&Request::new(Op::Read, extent)).unwrap()
                })
                .collect();
            slots.iter().for_each(|slot| runs.insert(&mut q, &table, *slot, 0, |run| run.pass_sum + slot.0 as u64 % 2));
            let mut batch = Vec::new();
            for slot in slots {
                batch.clear();
                runs.take_from(&mut q, &table, slot, &mut batch, |_| 0);
                table.remove(slot);
            }
            assert!(q.is_empty() && q.ready.capacity() + q.waiting.capacity() <= 16, "{count}");
            assert!(q.pending.capacity() <= PENDING_SPARE, "{count}: {}", q.pending.capacity());
        }
    }

    /// A reused queue has no pending runs of its predecessor.
    #[test]
    fn a_renewed_queue_has_nothing_due() {
        let (mut table, mut runs, mut q) = (Table::new(4), Runs::new(8, 1 << 20), RunQueue::default());
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 1 };
        let slot = table.insert(&Request::new(Op::Read, extent)).unwrap();
        runs.insert(&mut q, &table, slot, 0, |_| 7);
        assert_eq!(runs.ready_from(&q, 0), Some(7));
        runs.remove(&mut q, &table, slot, |_| 7);
        assert!(q.is_empty());
        assert_eq!(runs.ready_from(&RunQueue::renewed(Some(&mut q)), 0), None);
    }
}
