//! Queues in offset order with aggregation: the machinery of `mlf`, `hbrr` and merging `fifo`.
//!
//! A [`RunQueue`] holds the requests of one file, operation and lane as *runs*: virtual requests of touching
//! ranges, built as requests arrive and never larger than a batch may be. A run is *ready* from a
//! given pass on (policies without quanta say: from pass 0); ready and waiting runs are kept in offset
//! order each, so that the first ready one is found at once and neighbours are found in both.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::sorted::SortedSet;
use crate::table::{BySlot, Numbered, Slot, Table};

/// A virtual request, as the rule for readiness sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// Its requests.
    pub count: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Sum over its requests of the pass in which each arrived.
    pub pass_sum: u64,
}

/// Per request, 32 bytes. A run's figures stand at its first request, its head.
#[derive(Clone, Copy)]
struct Node {
    /// Next request of the run, in offset order.
    next: Slot,
    /// Neighbours in the queue's order of arrival.
    older: Slot,
    newer: Slot,
    /// Of a head: the run's last request. Of others: towards the head.
    link: Slot,
    pass_sum: u64,
    len: u32,
    /// Requests in the run; 0 for all but heads.
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

/// (start, head)
type Key = (u64, u32);

/// The runs of one file, operation and lane.
#[derive(Default)]
pub(crate) struct RunQueue {
    ready: SortedSet<Key>,
    waiting: SortedSet<Key>,
    /// The passes from which waiting runs are ready, and their heads; entries that were overtaken by a change are stale.
    pending: BinaryHeap<Reverse<Numbered>>,
    oldest: Option<Slot>,
    newest: Option<Slot>,
    len: u32,
    waiting_len: u32,
}

impl RunQueue {
    /// An empty queue with the memory of one that became empty, if there is one.
    pub fn renewed(old: Option<&mut RunQueue>) -> RunQueue {
        let mut queue = old.map(std::mem::take).unwrap_or_default();
        queue.pending.clear();
        queue
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The request that arrived first.
    pub fn oldest(&self) -> Option<Slot> {
        self.oldest
    }

    /// The request that arrived last.
    pub fn newest(&self) -> Option<Slot> {
        self.newest
    }

    /// Head of the first ready run in offset order from `offset` on, or else of the first of all.
    pub fn next_ready(&self, offset: u64) -> Option<Slot> {
        self.ready.at_or_after(&(offset, 0)).or_else(|| self.ready.first()).map(|k| Slot(k.1))
    }
}

/// The nodes of all queues of a policy, and the limits of a batch.
pub(crate) struct Runs {
    nodes: BySlot<Node>,
    max_requests: u16,
    max_bytes: u64,
    /// Empty between calls; kept for its memory.
    scratch: Vec<Slot>,
}

impl Runs {
    /// For at most `capacity` requests outstanding.
    pub fn new(max_requests: u64, max_bytes: u64, capacity: u32) -> Runs {
        Runs {
            nodes: BySlot::new(capacity, EMPTY),
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

    /// Queues a request that arrived in `pass`, aggregating it with the runs that it touches.
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

    /// Aggregates a one-request run with its neighbours and files the result.
    fn place(&mut self, q: &mut RunQueue, table: &Table, slot: Slot, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        let start = table.start(slot);
        let below = (start.saturating_add(1), 0);
        let (ready, waiting) = (q.ready.around(&below), q.waiting.around(&below));
        let first_of = |keys: [Option<Key>; 2]| keys.into_iter().flatten().min().map(|k| Slot(k.1));
        let left = ready.0.max(waiting.0).map(|k| Slot(k.1));
        let mut right = first_of([ready.1, waiting.1]);
        let left = left.filter(|l| self.may_join(table, *l, slot));
        if let Some(left) = left {
            self.add(table, left, slot);
        }
        let head = left.unwrap_or(slot);
        // A long read may close several gaps at once.
        while let Some(next) = right {
            let tail = self.nodes[head].link;
            // An overlapping read may reach past its neighbour's start; the parts must stay in offset order.
            if !self.may_join(table, head, next) || table.start(tail) > table.start(next) {
                break;
            }
            self.unfile(q, table, next);
            self.append(table, head, next);
            let from = (table.start(next).saturating_add(1), 0);
            right = first_of([q.ready.at_or_after(&from), q.waiting.at_or_after(&from)]);
        }
        self.file(q, table, (head, left.is_some()), pass, ready_at);
    }

    /// True when run `b`, which starts no earlier than `a`, touches it and both fit a batch.
    fn may_join(&self, table: &Table, a: Slot, b: Slot) -> bool {
        let (na, nb) = (&self.nodes[a], &self.nodes[b]);
        let (start, end_a) = (table.start(a), table.start(a).saturating_add(u64::from(na.len)));
        let end_b = table.start(b).saturating_add(u64::from(nb.len));
        end_a >= table.start(b)
            && na.count.saturating_add(nb.count) <= self.max_requests
            && end_a.max(end_b) - start <= self.max_bytes
    }

    /// Adds a single request into run `a`, which starts no later, at its place in offset order.
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

    /// Appends run `b` to run `a`; `a` may end inside or right before `b`.
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

    /// Files a run in the offset order where it belongs, be it filed already or not.
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
            order.insert((table.start(head), head.0));
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
        let key = (table.start(head), head.0);
        if self.nodes[head].ready {
            q.ready.remove(&key);
        } else if q.waiting.remove(&key) {
            q.waiting_len -= 1;
        }
    }

    /// Moves the runs that are ready in `pass` from the waiting to the ready.
    pub fn promote(&mut self, q: &mut RunQueue, table: &Table, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        while let Some(&Reverse(due)) = q.pending.peek().filter(|e| e.0.number() <= pass) {
            q.pending.pop();
            let head = Slot(due.whose());
            let n = self.nodes[head];
            if n.count == 0 || n.ready || !q.waiting.remove(&(table.start(head), head.0)) {
                continue; // stale
            }
            let ready_pass = ready_at(&self.run(head));
            if ready_pass <= pass {
                self.nodes[head].ready = true;
                q.ready.insert((table.start(head), head.0));
                q.waiting_len -= 1;
            } else {
                q.waiting.insert((table.start(head), head.0));
                q.pending.push(Reverse(Numbered::new(ready_pass, head.0)));
            }
        }
    }

    /// The pass from which on something of the queue is ready; the present one when something is ready now.
    pub fn ready_from(&self, q: &RunQueue, pass: u64) -> Option<u64> {
        if !q.ready.is_empty() {
            return Some(pass);
        }
        q.pending.peek().map(|e| e.0.number().max(pass))
    }

    /// Shows the requests of a queue in order of arrival, each with the pass in which it arrived (of a virtual request,
    /// the mean).
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

    /// Takes the first `limit` requests of a run out of the queue, in offset order; what is left stays queued.
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

    /// Takes a request and what follows it in its run without a gap out of the queue, in offset order.
    pub fn take_from(
        &mut self,
        q: &mut RunQueue,
        table: &Table,
        first: Slot,
        out: &mut Vec<Slot>,
        ready_at: impl Fn(&Run) -> u64 + Copy,
    ) {
        let head = self.run_of(first);
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

    /// Takes one request out of the middle of things (it was cancelled).
    pub fn remove(&mut self, q: &mut RunQueue, table: &Table, slot: Slot, ready_at: impl Fn(&Run) -> u64 + Copy) {
        let head = self.run_of(slot);
        let (mut parts, pass) = self.dissolve(q, table, head, Vec::new());
        self.forget(q, slot);
        parts.retain(|p| *p != slot);
        self.place_again(q, table, &parts, pass, ready_at);
    }

    /// Takes a run out of the offset orders: its requests, and the mean of the passes in which they arrived.
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

    /// Builds runs anew from what is left of one; without what was taken they may not touch any more.
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

    /// Takes a request out of the order of arrival.
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Extent, FileId, LaneId, Op, Request};

    /// What was due of the queue before is not due of the next.
    #[test]
    fn a_renewed_queue_has_nothing_due() {
        let (mut table, mut runs, mut q) = (Table::new(4), Runs::new(8, 1 << 20, 4), RunQueue::default());
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 1 };
        let slot = table.insert(&Request::new(Op::Read, extent)).unwrap();
        runs.insert(&mut q, &table, slot, 0, |_| 7);
        assert_eq!(runs.ready_from(&q, 0), Some(7));
        runs.remove(&mut q, &table, slot, |_| 7);
        assert!(q.is_empty());
        assert_eq!(runs.ready_from(&RunQueue::renewed(Some(&mut q)), 0), None);
    }
}
