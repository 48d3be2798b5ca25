//! Queues in offset order with aggregation: the machinery of `mlf`, `hbrr` and merging `fifo`.
//!
//! A [`RunQueue`] holds the requests of one file, operation and lane as *runs*: virtual requests of touching
//! ranges, built as requests arrive and never larger than a batch may be. A run is *ready* from a
//! given pass on (policies without quanta say: from pass 0); ready and waiting runs are kept in offset
//! order each, so that the first ready one is found at once and neighbours are found in both.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::sorted::SortedSet;
use crate::table::{Slot, Table};

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

/// The pass from which a waiting run is ready, and its head, in one word ordered by the pass.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Due(u64);

impl Due {
    fn new(pass: u64, head: Slot) -> Due {
        Due(pass.min(u64::MAX >> Table::SLOT_BITS) << Table::SLOT_BITS | u64::from(head.0))
    }

    fn pass(self) -> u64 {
        self.0 >> Table::SLOT_BITS
    }

    fn head(self) -> Slot {
        Slot((self.0 & ((1 << Table::SLOT_BITS) - 1)) as u32)
    }
}

/// The runs of one file, operation and lane.
#[derive(Default)]
pub(crate) struct RunQueue {
    ready: SortedSet<Key>,
    waiting: SortedSet<Key>,
    /// When waiting runs become ready; entries that were overtaken by a change are stale.
    pending: BinaryHeap<Reverse<Due>>,
    oldest: Option<Slot>,
    newest: Option<Slot>,
    len: u32,
    waiting_len: u32,
}

impl RunQueue {
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
    nodes: Vec<Node>,
    max_requests: u16,
    max_bytes: u64,
    capacity: usize,
    /// Empty between calls; kept for its memory.
    scratch: Vec<Slot>,
}

impl Runs {
    /// For at most `capacity` requests outstanding.
    pub fn new(max_requests: u64, max_bytes: u64, capacity: u32) -> Runs {
        Runs {
            nodes: Vec::new(),
            max_requests: max_requests.clamp(1, u64::from(u16::MAX)) as u16,
            max_bytes: max_bytes.min(u64::from(u32::MAX)),
            capacity: capacity as usize,
            scratch: Vec::new(),
        }
    }

    /// The figures of a run.
    pub fn run(&self, head: Slot) -> Run {
        let n = &self.nodes[head.index()];
        Run { count: u64::from(n.count), len: u64::from(n.len), pass_sum: n.pass_sum }
    }

    /// The head of the run that holds a queued request.
    pub fn run_of(&mut self, slot: Slot) -> Slot {
        let mut at = slot;
        while self.nodes[at.index()].count == 0 {
            let up = self.nodes[at.index()].link;
            if self.nodes[up.index()].count == 0 {
                self.nodes[at.index()].link = self.nodes[up.index()].link;
            }
            at = up;
        }
        at
    }

    /// Queues a request that arrived in `pass`, aggregating it with the runs that it touches.
    pub fn insert(&mut self, q: &mut RunQueue, table: &Table, slot: Slot, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        if self.nodes.len() <= slot.index() {
            let (have, want) = (self.nodes.len(), slot.index() + 1);
            if self.nodes.capacity() < want {
                let roomy = (want + want / 2).min(self.capacity).max(want);
                self.nodes.reserve_exact(roomy - have);
            }
            self.nodes.resize(want, EMPTY);
        }
        let newest = q.newest.replace(slot);
        match newest {
            Some(newest) => self.nodes[newest.index()].newer = slot,
            None => q.oldest = Some(slot),
        }
        q.len += 1;
        let len = u32::try_from(table.len_bytes(slot)).unwrap_or(u32::MAX);
        let older = newest.unwrap_or(Slot::NONE);
        self.nodes[slot.index()] = Node { older, link: slot, pass_sum: pass, len, count: 1, ..EMPTY };
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
        let mut head = slot;
        if let Some(left) = left.filter(|l| self.may_join(table, *l, slot)) {
            self.unfile(q, table, left);
            self.add(table, left, slot);
            head = left;
        }
        // A long read may close several gaps at once.
        while let Some(next) = right {
            let tail = self.nodes[head.index()].link;
            // An overlapping read may reach past its neighbour's start; the parts must stay in offset order.
            if !self.may_join(table, head, next) || table.start(tail) > table.start(next) {
                break;
            }
            self.unfile(q, table, next);
            self.append(table, head, next);
            let from = (table.start(next).saturating_add(1), 0);
            right = first_of([q.ready.at_or_after(&from), q.waiting.at_or_after(&from)]);
        }
        self.file(q, table, head, pass, ready_at);
    }

    /// True when run `b`, which starts no earlier than `a`, touches it and both fit a batch.
    fn may_join(&self, table: &Table, a: Slot, b: Slot) -> bool {
        let (na, nb) = (&self.nodes[a.index()], &self.nodes[b.index()]);
        let (start, end_a) = (table.start(a), table.start(a).saturating_add(u64::from(na.len)));
        let end_b = table.start(b).saturating_add(u64::from(nb.len));
        end_a >= table.start(b)
            && na.count.saturating_add(nb.count) <= self.max_requests
            && end_a.max(end_b) - start <= self.max_bytes
    }

    /// Adds a single request into run `a`, which starts no later, at its place in offset order.
    fn add(&mut self, table: &Table, a: Slot, slot: Slot) {
        let tail = self.nodes[a.index()].link;
        if table.start(tail) <= table.start(slot) {
            return self.append(table, a, slot);
        }
        // Only overlapping reads come here; a run is at most one batch long.
        let mut before = a;
        while table.start(self.nodes[before.index()].next) <= table.start(slot) {
            before = self.nodes[before.index()].next;
        }
        let (after, pass) = (self.nodes[before.index()].next, self.nodes[slot.index()].pass_sum);
        self.nodes[before.index()].next = slot;
        let len = (table.end(slot) - table.start(a)) as u32;
        let n = &mut self.nodes[slot.index()];
        (n.next, n.link, n.count) = (after, a, 0);
        let n = &mut self.nodes[a.index()];
        (n.len, n.count, n.pass_sum) = (n.len.max(len), n.count + 1, n.pass_sum + pass);
    }

    /// Appends run `b` to run `a`; `a` may end inside or right before `b`.
    fn append(&mut self, table: &Table, a: Slot, b: Slot) {
        let nb = self.nodes[b.index()];
        let tail = self.nodes[a.index()].link;
        self.nodes[tail.index()].next = b;
        let len = (table.start(b).saturating_add(u64::from(nb.len)) - table.start(a)) as u32;
        let n = &mut self.nodes[a.index()];
        (n.link, n.len, n.count, n.pass_sum) = (nb.link, n.len.max(len), n.count + nb.count, n.pass_sum + nb.pass_sum);
        let n = &mut self.nodes[b.index()];
        (n.link, n.count) = (a, 0);
    }

    fn file(&mut self, q: &mut RunQueue, table: &Table, head: Slot, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        let ready_pass = ready_at(&self.run(head));
        let key = (table.start(head), head.0);
        let ready = ready_pass <= pass;
        self.nodes[head.index()].ready = ready;
        if ready {
            q.ready.insert(key);
        } else {
            q.waiting.insert(key);
            q.waiting_len += 1;
            if q.pending.len() > 2 * q.waiting_len as usize + 8 {
                // Mostly stale entries: keep one per waiting run.
                let nodes = &self.nodes;
                let mut entries: Vec<_> = std::mem::take(&mut q.pending).into_vec();
                entries.retain(|Reverse(d)| nodes.get(d.head().index()).is_some_and(|n| n.count > 0 && !n.ready));
                entries.sort_unstable_by_key(|Reverse(d)| (d.head(), d.pass()));
                entries.dedup_by_key(|Reverse(d)| d.head());
                q.pending = entries.into();
            }
            if q.pending.len() == q.pending.capacity() {
                q.pending.reserve_exact((q.pending.len() / 4).max(4));
            }
            q.pending.push(Reverse(Due::new(ready_pass, head)));
        }
    }

    fn unfile(&mut self, q: &mut RunQueue, table: &Table, head: Slot) {
        let key = (table.start(head), head.0);
        if self.nodes[head.index()].ready {
            q.ready.remove(&key);
        } else if q.waiting.remove(&key) {
            q.waiting_len -= 1;
        }
    }

    /// Moves the runs that are ready in `pass` from the waiting to the ready.
    pub fn promote(&mut self, q: &mut RunQueue, table: &Table, pass: u64, ready_at: impl Fn(&Run) -> u64) {
        while let Some(&Reverse(due)) = q.pending.peek().filter(|e| e.0.pass() <= pass) {
            q.pending.pop();
            let head = due.head();
            let n = self.nodes[head.index()];
            if n.count == 0 || n.ready || !q.waiting.remove(&(table.start(head), head.0)) {
                continue; // stale
            }
            let ready_pass = ready_at(&self.run(head));
            if ready_pass <= pass {
                self.nodes[head.index()].ready = true;
                q.ready.insert((table.start(head), head.0));
                q.waiting_len -= 1;
            } else {
                q.waiting.insert((table.start(head), head.0));
                q.pending.push(Reverse(Due::new(ready_pass, head)));
            }
        }
    }

    /// The pass from which on something of the queue is ready; the present one when something is ready now.
    pub fn ready_from(&self, q: &RunQueue, pass: u64) -> Option<u64> {
        if !q.ready.is_empty() {
            return Some(pass);
        }
        q.pending.peek().map(|e| e.0.pass().max(pass))
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
        let run = self.nodes[head.index()];
        let mut at = head;
        for _ in 0..run.count {
            parts.push(at);
            at = self.nodes[at.index()].next;
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
            let n = &mut self.nodes[part.index()];
            (n.next, n.link, n.count, n.len, n.pass_sum) = (Slot::NONE, part, 1, len, pass);
        }
        for &part in parts {
            self.place(q, table, part, 0, ready_at);
        }
    }

    /// Takes a request out of the order of arrival.
    fn forget(&mut self, q: &mut RunQueue, slot: Slot) {
        let Node { older, newer, .. } = self.nodes[slot.index()];
        match older.some() {
            Some(o) => self.nodes[o.index()].newer = newer,
            None => q.oldest = newer.some(),
        }
        match newer.some() {
            Some(n) => self.nodes[n.index()].older = older,
            None => q.newest = older.some(),
        }
        self.nodes[slot.index()].count = 0;
        q.len -= 1;
    }
}
