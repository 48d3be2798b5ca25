//! Queues with quanta (agios-2013, III): one per lane group, file and operation, in offset order.
//!
//! A virtual request may go once its quantum has grown to the time it takes; quanta grow with passes (`quanta.rs`), in
//! which queues take turns by their oldest arrival (`passes.rs`).

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

use super::anticipation::Stream;
use super::arrivals::guarded_wait;
use super::holds::FileOp;
use super::passes::{Passes, Turn};
use super::quanta::Quanta;
use super::runs::{Run, RunQueue, Runs};
use super::windows::Key;
use crate::policy::{Choice, Params, Setup, View};
use crate::table::Slot;
use crate::types::{LaneId, Nanos, Op};

pub(in crate::policy) struct Queue {
    pub key: Key,
    /// The stable key of its file.
    pub file: u64,
    /// The weight of the request that opened it.
    pub weight: f64,
    runs: RunQueue,
    /// The last pass in which it sent a batch.
    served_pass: Option<u64>,
    /// Batches that passed over its current oldest request.
    skipped: u64,
}

impl Queue {
    /// Its key for anticipation.
    pub fn stream(&self) -> Stream {
        (LaneId(self.key.0 as u16), self.file, self.key.2)
    }

    /// Its key for holds.
    pub fn file_op(&self) -> FileOp {
        (self.file, self.key.2)
    }
}

/// The queues of all lane groups.
pub(in crate::policy) struct Levels {
    quanta: Quanta,
    passes: Passes,
    runs: Runs,
    /// A write is ordered as if it had arrived this many requests later.
    reads_ahead: u64,
    /// Maximum batches of a queue that may pass over its oldest request; 0: any number.
    guard: u64,
    longest_bytes: u64,
    queues: Rows<Queue>,
    by_key: FxHashMap<Key, u32>,
    /// After a change of parameters, until requests are queued again: the passes each had waited, and when its queue
    /// sent last.
    earned: FxHashMap<Slot, (u64, Option<u64>)>,
}

pub(in crate::policy) fn key_of(view: &View<'_>, slot: Slot) -> Key {
    (view.group(slot), view.table.file(slot), view.table.op(slot))
}

impl Levels {
    /// From the parameters of `mlf`; the error says what is wrong with its weights.
    pub fn new(params: &Params, setup: &Setup) -> Result<Levels, String> {
        Ok(Levels {
            quanta: Quanta::new(params)?,
            passes: Passes::new(Nanos::from_micros(params.integer("pass_us")), setup.lanes.into()),
            runs: Runs::new(params.integer("batch_requests"), params.integer("batch_bytes")),
            reads_ahead: params.integer("reads_ahead_requests"),
            guard: params.integer("guard_batches"),
            longest_bytes: params.integer("batch_bytes"),
            queues: Rows::default(),
            by_key: FxHashMap::default(),
            earned: FxHashMap::default(),
        })
    }

    /// The queue of a key, if it has requests.
    #[inline]
    pub fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// A queue.
    #[inline]
    pub fn queue(&self, q: u32) -> &Queue {
        &self.queues[q]
    }

    /// The pass from which a virtual request may go.
    #[inline]
    fn ready_at<'a>(&self, view: &'a View<'_>, q: u32) -> impl Fn(&Run) -> u64 + Copy + use<'a> {
        let Queue { file, key: (_, _, op), weight, .. } = self.queues[q];
        let (growth, cost) = (self.quanta.growth(file, op, weight), view.cost);
        move |run| growth.ready_pass(cost, op, run)
    }

    /// Queues a request; returns its queue, and whether that is new.
    pub fn insert(&mut self, view: &View<'_>, slot: Slot) -> (u32, bool) {
        let key = key_of(view, slot);
        let known = self.find(&key);
        let q = known.unwrap_or_else(|| self.open(view, key, slot));
        let ready_at = self.ready_at(view, q);
        let (queue, mut pass) = (&mut self.queues[q], self.passes.now(view, key.0));
        if !self.earned.is_empty()
            && let Some((waited, served)) = self.earned.remove(&slot)
        {
            (pass, queue.served_pass) = (pass.saturating_sub(waited), queue.served_pass.or(served));
        }
        self.runs.insert(&mut queue.runs, view.table, slot, pass, ready_at);
        self.refile(view, q);
        (q, known.is_none())
    }

    fn open(&mut self, view: &View<'_>, key: Key, first: Slot) -> u32 {
        let (file, weight) = (view.names.file(key.1), self.quanta.weight(|| view.who(first)));
        let q = self.queues.insert_over(|old| {
            let runs = RunQueue::renewed(old.map(|old| &mut old.runs));
            Queue { key, file, weight, runs, served_pass: None, skipped: 0 }
        });
        self.by_key.insert(key, q);
        q
    }

    /// Removes a cancelled request; true if its queue is now empty.
    pub fn remove(&mut self, view: &View<'_>, q: u32, slot: Slot) -> bool {
        let ready_at = self.ready_at(view, q);
        let queue = &mut self.queues[q];
        self.runs.remove(&mut queue.runs, view.table, slot, ready_at);
        let is_empty = queue.runs.is_empty();
        self.refile(view, q);
        is_empty
    }

    /// Updates a queue's turn after a change, or drops the queue if it is empty.
    pub fn refile(&mut self, view: &View<'_>, q: u32) {
        let queue = &self.queues[q];
        let (lane, pass) = (queue.key.0, self.passes.now(view, queue.key.0));
        let later = if queue.key.2 == Op::Write { self.reads_ahead } else { 0 };
        let turn = queue.runs.oldest().zip(self.runs.ready_from(&queue.runs, pass)).map(|(oldest, ready)| Turn {
            pass: ready.max(queue.served_pass.map_or(0, |p| p + 1)),
            place: view.table.seq(oldest) + later,
        });
        self.passes.file(view, lane, q, turn);
        if queue.runs.is_empty() {
            self.by_key.remove(&queue.key);
            self.queues.release(q);
        }
    }

    /// Skips a queue until it is refiled.
    pub fn put_aside(&mut self, view: &View<'_>, q: u32) {
        self.passes.file(view, self.queues[q].key.0, q, None);
    }

    /// Ends a queue's turn in this pass.
    pub fn end_turn(&mut self, view: &View<'_>, q: u32) {
        let queue = &mut self.queues[q];
        queue.served_pass = Some(self.passes.now(view, queue.key.0));
        self.refile(view, q);
    }

    /// The next queue of a lane, or how long to wait for one.
    pub fn next(&mut self, view: &View<'_>, lane: usize) -> Result<u32, Choice> {
        self.passes.next(view, lane)
    }

    /// What a queue sends in its turn: what its quanta allow or, in its window, anything from an offset on; true if the
    /// guard makes it send its oldest request.
    pub fn head(&mut self, view: &View<'_>, q: u32, window: Option<u64>) -> Option<(Slot, bool)> {
        let (ready_at, pass) = (self.ready_at(view, q), self.passes.now(view, self.queues[q].key.0));
        let queue = &mut self.queues[q];
        match window {
            Some(_) => self.runs.promote(&mut queue.runs, view.table, u64::MAX, |_| 0),
            None => self.runs.promote(&mut queue.runs, view.table, pass, ready_at),
        }
        match queue.runs.oldest().filter(|_| self.guard > 0 && queue.skipped >= self.guard) {
            Some(oldest) => Some((self.runs.run_of(oldest), true)),
            None => queue.runs.next_ready(window.unwrap_or(0)).map(|head| (head, false)),
        }
    }

    /// The virtual requests.
    pub fn runs(&self) -> &Runs {
        &self.runs
    }

    /// The head of the virtual request that contains a request.
    pub fn head_of(&mut self, slot: Slot) -> Slot {
        self.runs.run_of(slot)
    }

    /// The virtual request that begins at `head`: its number of requests, the arrival of its head, and that of its
    /// queue's newest request.
    pub fn run(&self, view: &View<'_>, q: u32, head: Slot) -> (u64, Nanos, Nanos) {
        let newest = self.queues[q].runs.newest().map_or(Nanos::ZERO, |newest| view.table.arrival(newest));
        (self.runs.run(head).count, view.table.arrival(head), newest)
    }

    /// When a virtual request may go, if passes take time and that is in the future.
    pub fn waits_until(&self, view: &View<'_>, q: u32, head: Slot) -> Option<Nanos> {
        let due = self.ready_at(view, q)(&self.runs.run(head));
        let later = due > self.passes.now(view, self.queues[q].key.0) && self.passes.length() > Nanos::ZERO;
        later.then(|| self.passes.begins(due))
    }

    /// Moves the virtual request (or its rest) that begins at `first` into the batch. Returns its end; the queue must
    /// be refiled.
    pub fn take(&mut self, view: &View<'_>, q: u32, first: Slot, batch: &mut Vec<Slot>) -> u64 {
        let ready_at = self.ready_at(view, q);
        let queue = &mut self.queues[q];
        let oldest = queue.runs.oldest();
        self.runs.take_from(&mut queue.runs, view.table, first, batch, ready_at);
        queue.skipped = if queue.runs.oldest() == oldest { queue.skipped + 1 } else { 0 };
        let end = batch.last().map_or(0, |last| view.table.end(*last));
        self.quanta.used(queue.file, queue.key.2, end.saturating_sub(view.table.start(first)));
        end
    }

    /// How long quanta and passes may idle a lane before a request with `older` older ones goes.
    pub fn wait(&self, view: &View<'_>, slot: Slot, older: u64) -> Nanos {
        // At worst it joins the longest virtual request of the slowest queue; then each older request of its queue
        // exhausts the guard, one pass each.
        let (op, len) = (view.table.op(slot), view.table.len_bytes(slot).max(self.longest_bytes));
        let passes = self.quanta.slowest().ready_pass(view.cost, op, &Run { count: 1, len, pass_sum: 0 });
        self.passes.begins(passes.saturating_add(guarded_wait(older, self.guard)).saturating_add(1))
    }

    /// Keeps quanta and passes after a change of parameters; queued requests keep the passes they have waited.
    pub fn take_over(&mut self, view: &View<'_>, old: Levels) {
        for queue in old.by_key.values().map(|q| &old.queues[*q]) {
            let pass = old.passes.now(view, queue.key.0);
            old.runs.for_each(&queue.runs, |slot, arrived| {
                self.earned.insert(slot, (pass.saturating_sub(arrived), queue.served_pass));
            });
        }
        self.passes.take_over(view, &old.passes);
        self.quanta.take_over(old.quanta);
    }
}
