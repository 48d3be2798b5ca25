//! Round robin over files for `hbrr` and `orr`: a queue per file and operation, turns limited by a quantum of requests.

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

use super::ring::Rings;
use super::runs::{RunQueue, Runs};
use super::turns::Turns;
use crate::policy::{Choice, Params, Policy, Setup, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{FileId, Op};

/// Which run a queue sends next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) enum Order {
    /// The run that holds the oldest request.
    Oldest,
    /// Ascending from the end of the last batch, wrapping; but the run with the oldest request once `guard_batches`
    /// batches passed it over (0: any number).
    Sweep { guard_batches: u64 },
}

type Key = (usize, FileId, Op);

struct Queue {
    key: Key,
    runs: RunQueue,
    /// End of its last batch.
    offset: u64,
    /// Batches that passed over its current oldest request.
    left_out: u64,
}

/// The policy.
pub(in crate::policy) struct FileTurns {
    params: Params,
    order: Order,
    quantum: u64,
    capacity: u64,
    runs: Runs,
    by_key: FxHashMap<Key, u32>,
    queues: Rows<Queue>,
    rings: Rings,
    turns: Turns,
}

fn key_of(view: &View<'_>, slot: Slot) -> Key {
    (view.group(slot), view.table.file(slot), view.table.op(slot))
}

impl FileTurns {
    /// With turns of `quantum_requests`.
    pub fn new(params: &Params, setup: &Setup, runs: Runs, order: Order) -> FileTurns {
        FileTurns {
            order,
            quantum: params.integer("quantum_requests"),
            capacity: u64::from(setup.capacity),
            runs,
            by_key: FxHashMap::default(),
            queues: Rows::default(),
            rings: Rings::new(usize::from(setup.lanes)),
            turns: Turns::default(),
            params: params.clone(),
        }
    }

    fn open(&mut self, key: Key) -> u32 {
        let q = self.queues.insert_over(|old| {
            let runs = RunQueue::renewed(old.map(|old| &mut old.runs));
            Queue { key, runs, offset: 0, left_out: 0 }
        });
        self.by_key.insert(key, q);
        self.rings.join(key.0, q);
        q
    }

    fn close(&mut self, q: u32) {
        let key = self.queues[q].key;
        self.by_key.remove(&key);
        self.rings.leave(key.0, q);
        self.queues.release(q);
    }
}

impl Policy for FileTurns {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let key = key_of(view, slot);
        let q = self.by_key.get(&key).copied().unwrap_or_else(|| self.open(key));
        self.runs.insert(&mut self.queues[q].runs, view.table, slot, 0, |_| 0);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(&q) = self.by_key.get(&key_of(view, slot)) else { return };
        let queue = &mut self.queues[q];
        self.runs.remove(&mut queue.runs, view.table, slot, |_| 0);
        if queue.runs.is_empty() {
            self.close(q);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let (q, spent) = self.rings.turn_and_spent(group)?;
            let queue = &mut self.queues[q];
            let oldest = queue.runs.oldest()?;
            let (head, guarded) = match self.order {
                Order::Oldest => (self.runs.run_of(oldest), false),
                Order::Sweep { guard_batches } if guard_batches > 0 && queue.left_out >= guard_batches => {
                    (self.runs.run_of(oldest), true)
                }
                Order::Sweep { .. } => (queue.runs.next_ready(queue.offset)?, false),
            };
            if !view.open(view.table.lane(head)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            // A guarded run must include the oldest request, so the end of the turn does not cut it.
            let limit = if guarded { u64::MAX } else { self.quantum - spent };
            self.runs.take(&mut queue.runs, view.table, head, limit as usize, batch, |_| 0);
            queue.offset = batch.last().map_or(0, |last| view.table.end(*last));
            queue.left_out = if queue.runs.oldest() == Some(oldest) { queue.left_out + 1 } else { 0 };
            if queue.runs.is_empty() {
                self.close(q);
            } else {
                self.rings.spend(group, batch.len() as u64, self.quantum);
            }
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        let Some(&q) = self.by_key.get(&key_of(view, oldest)) else { return Choice::until_event(WaitReason::Empty) };
        let queue = &mut self.queues[q];
        self.runs.take_from(&mut queue.runs, view.table, oldest, batch, |_| 0);
        if queue.runs.is_empty() {
            self.close(q);
        }
        Choice::Serve
    }

    fn wait_bound(&self, _: &View<'_>, _: Slot) -> WaitBound {
        // Turns of its queue until it is the oldest and goes; at most `capacity` older requests precede it.
        let turns = match self.order {
            Order::Oldest => self.capacity,
            Order::Sweep { guard_batches: 0 } => u64::MAX,
            Order::Sweep { guard_batches } => self.capacity.saturating_mul(guard_batches + 1),
        };
        // Between two of its turns, every other queue (at most `capacity`) spends its quantum.
        let batches = turns.saturating_mul(self.capacity).saturating_mul(self.quantum);
        WaitBound::of_batches(batches)
    }
}
