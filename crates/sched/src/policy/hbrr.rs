//! `hbrr`: handle-based round robin (twins-2017, III, after IOFSL).
//!
//! One queue per file and operation, served in turn. A turn takes up to `quantum_requests` requests: each
//! time the run (touching requests) that holds the queue's oldest request, in offset order, one batch a run.
//! A queue whose quantum is spent goes to the end of the ring; an empty one is dropped. A new queue
//! joins at the end.
//!
//! Where the source is silent: which run of a queue comes first is not said; the one with the oldest request
//! does, so that nothing starves. Wait: (older requests of its queue + 1) turns of every queue there may be.
//! Work-conserving.

use std::collections::VecDeque;

use rustc_hash::FxHashMap;

use super::params::Range;
use super::runs::{RunQueue, Runs};
use super::{Choice, ParamInfo, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{FileId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "hbrr",
    summary: "Round robin over files, a few aggregated requests a turn.",
    source: "twins-2017, III (HBRR of IOFSL)",
    params: &[
        ParamInfo {
            name: "quantum_requests",
            default: "8",
            range: Range::Integer(1, 1024),
            doc: "Requests that a file's queue may send in its turn.",
        },
        ParamInfo {
            name: "batch_bytes",
            default: "1048576",
            range: Range::Integer(512, 1 << 30),
            doc: "Bytes per batch at most.",
        },
    ],
    build: |params, setup| {
        let quantum = params.integer("quantum_requests");
        Ok(Box::new(Hbrr {
            runs: Runs::new(quantum, params.integer("batch_bytes"), setup.capacity),
            quantum,
            params: params.clone(),
            capacity: u64::from(setup.capacity),
            queues: FxHashMap::default(),
            rings: (0..setup.lanes).map(|_| Ring::default()).collect(),
            next_ring: 0,
        }))
    },
};

type Key = (usize, FileId, Op);

#[derive(Default)]
struct Ring {
    /// Each queue once; the front one has the turn. Queues emptied by cancelling are skipped.
    order: VecDeque<Key>,
    spent: u64,
}

struct Hbrr {
    params: Params,
    quantum: u64,
    capacity: u64,
    runs: Runs,
    queues: FxHashMap<Key, RunQueue>,
    /// One per lane group.
    rings: Vec<Ring>,
    next_ring: usize,
}

fn key_of(view: &View<'_>, slot: Slot) -> Key {
    (view.group(slot), view.table.file(slot), view.table.op(slot))
}

impl Policy for Hbrr {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let key = key_of(view, slot);
        let ring = &mut self.rings[key.0];
        let queue = self.queues.entry(key).or_insert_with(|| {
            ring.order.push_back(key);
            RunQueue::default()
        });
        self.runs.insert(queue, view.table, slot, 0, |_| 0);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let key = key_of(view, slot);
        let Some(queue) = self.queues.get_mut(&key) else { return };
        self.runs.remove(queue, view.table, slot, |_| 0);
        if queue.is_empty() {
            self.queues.remove(&key);
            let ring = &mut self.rings[key.0];
            if ring.order.front() == Some(&key) {
                ring.spent = 0;
            }
            ring.order.retain(|k| *k != key);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut reason = WaitReason::Empty;
        for turn in 0..view.groups() {
            let group = (self.next_ring + turn) % view.groups();
            let ring = &mut self.rings[group];
            let Some(&key) = ring.order.front() else { continue };
            let Some((queue, oldest)) = self.queues.get_mut(&key).and_then(|q| q.oldest().map(|o| (q, o))) else {
                continue;
            };
            let run = self.runs.run_of(oldest);
            if !view.open(view.table.lane(run)) {
                reason = WaitReason::LanesBusy;
                continue;
            }
            let left = self.quantum - ring.spent;
            self.runs.take(queue, view.table, run, left as usize, batch, |_| 0);
            ring.spent += batch.len() as u64;
            let empty = queue.is_empty();
            if empty {
                self.queues.remove(&key);
            }
            if empty || ring.spent >= self.quantum {
                ring.spent = 0;
                ring.order.pop_front();
                if !empty {
                    ring.order.push_back(key);
                }
            }
            self.next_ring = (group + 1) % view.groups();
            return Choice::Serve;
        }
        Choice::until_event(reason)
    }

    fn wait_bound(&self, _: &View<'_>, _: Slot) -> WaitBound {
        // Its queue serves its oldest run first: at most `capacity` turns until this one is the oldest, in
        // each of which every other queue (at most `capacity`) has its quantum.
        WaitBound {
            batches: self.capacity.saturating_mul(self.capacity).saturating_mul(self.quantum),
            idle: Nanos::ZERO,
        }
    }
}
