//! Flows: what one party (client, application, rule) has queued for one group of lanes, in order of arrival.
//!
//! A policy decides which flow sends; the flow's oldest request goes, and takes along what it touches where the policy
//! aggregates. The guard is for policies whose rule favours some flows: the oldest request of a group goes next when
//! `guard_batches` batches left it out.

use std::hash::Hash;

use rustc_hash::FxHashMap;

use super::arrivals::{Guard, LazyArrivals, guarded_wait};
use super::backlog::Backlog;
use crate::policy::{Params, Setup, View};
use crate::table::Slot;

const NOBODY: u32 = u32::MAX;

struct Flow<K, D> {
    key: K,
    data: D,
    queued: u32,
    guarded: bool,
}

/// The flows of a policy by key (which holds the group of lanes), each with data of the policy's. A flow is there
/// while it has requests; its number is small and used again.
pub(in crate::policy) struct Flows<K, D> {
    by_key: FxHashMap<K, u32>,
    flows: Vec<Flow<K, D>>,
    free: Vec<u32>,
    /// The flow of each queued request.
    of_slot: Vec<u32>,
    backlog: Backlog,
    guard_batches: u64,
    /// Per group, of the requests under the guard.
    guards: Vec<(LazyArrivals, Guard)>,
}

impl<K: Copy + Eq + Hash, D: Default> Flows<K, D> {
    /// With the aggregation that `merge`, `batch_requests` and `batch_bytes` ask for; `guard_batches` 0: no guard.
    pub fn new(params: &Params, setup: &Setup, guard_batches: u64) -> Flows<K, D> {
        let guards = if guard_batches == 0 { 0 } else { setup.lanes };
        Flows {
            by_key: FxHashMap::default(),
            flows: Vec::new(),
            free: Vec::new(),
            of_slot: Vec::new(),
            backlog: Backlog::new(0, params.on("merge"), params, setup),
            guard_batches,
            guards: (0..guards).map(|_| Default::default()).collect(),
        }
    }

    /// Queues a request, under the guard or not (as all of its flow); returns its flow, and whether the flow is new.
    pub fn push(&mut self, view: &View<'_>, key: K, slot: Slot, guarded: bool) -> (u32, bool) {
        let known = self.by_key.get(&key).copied();
        let flow = known.unwrap_or_else(|| self.open(key, guarded));
        if self.of_slot.len() <= slot.index() {
            let (have, want) = (self.of_slot.len(), slot.index() + 1);
            if self.of_slot.capacity() < want {
                self.of_slot.reserve_exact(want + want / 2 - have); // memory follows the queue closely
            }
            self.of_slot.resize(want, NOBODY);
        }
        self.of_slot[slot.index()] = flow;
        self.flows[flow as usize].queued += 1;
        self.backlog.insert(view, flow as usize, slot);
        if guarded && let Some((arrivals, _)) = self.guards.get_mut(view.group(slot)) {
            arrivals.insert(view, slot);
        }
        (flow, known.is_none())
    }

    fn open(&mut self, key: K, guarded: bool) -> u32 {
        let fresh = Flow { key, data: D::default(), queued: 0, guarded };
        let flow = match self.free.pop() {
            Some(flow) => {
                self.flows[flow as usize] = fresh;
                flow
            }
            None => {
                self.flows.push(fresh);
                self.backlog.add_queue() as u32
            }
        };
        self.by_key.insert(key, flow);
        flow
    }

    /// The flow of a queued request.
    pub fn of(&self, slot: Slot) -> Option<u32> {
        self.of_slot.get(slot.index()).copied().filter(|f| *f != NOBODY)
    }

    /// The flow of a key, if it has requests.
    pub fn find(&self, key: &K) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    /// The key of a flow.
    pub fn key(&self, flow: u32) -> K {
        self.flows[flow as usize].key
    }

    /// What the policy keeps with a flow.
    pub fn data(&mut self, flow: u32) -> &mut D {
        &mut self.flows[flow as usize].data
    }

    /// The flow has nothing left; it is to be closed.
    pub fn is_empty(&self, flow: u32) -> bool {
        self.flows[flow as usize].queued == 0
    }

    /// The flow's oldest request.
    pub fn oldest(&mut self, view: &View<'_>, flow: u32) -> Option<Slot> {
        self.backlog.oldest(view, flow as usize).map(|a| a.slot())
    }

    /// The first request of the batch that the flow would send.
    pub fn first(&mut self, view: &View<'_>, flow: u32) -> Option<Slot> {
        self.backlog.first(view, flow as usize)
    }

    /// Bytes of that batch, 1 at least.
    pub fn len_bytes(&self, view: &View<'_>, first: Slot) -> u64 {
        self.backlog.len_bytes(view, first)
    }

    /// The flow of a group's oldest request, when the guard says that it goes now.
    pub fn due(&mut self, view: &View<'_>, group: usize) -> Option<u32> {
        let (arrivals, guard) = self.guards.get_mut(group)?;
        let oldest = arrivals.oldest(view);
        // A flow sends its oldest first, so this is what goes.
        oldest.filter(|_| guard.is_due(oldest, self.guard_batches)).and_then(|a| self.of(a.slot()))
    }

    /// Moves the batch that begins with [`first`](Flows::first) out of its flow; returns the flow.
    pub fn take(&mut self, view: &View<'_>, first: Slot, batch: &mut Vec<Slot>) -> u32 {
        let flow = self.of_slot[first.index()];
        self.backlog.take(view, flow as usize, first, batch);
        self.flows[flow as usize].queued -= batch.len() as u32;
        if let Some((arrivals, guard)) = self.guards.get_mut(view.group(first)) {
            let oldest = arrivals.oldest(view);
            guard.count(oldest.is_none_or(|o| batch.contains(&o.slot())));
            if self.flows[flow as usize].guarded {
                arrivals.leave(batch.len());
            }
        }
        for slot in &*batch {
            self.of_slot[slot.index()] = NOBODY;
        }
        flow
    }

    /// Forgets a cancelled request; returns its flow.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) -> Option<u32> {
        let flow = self.of(slot)?;
        self.backlog.remove(view, flow as usize, slot);
        self.flows[flow as usize].queued -= 1;
        self.of_slot[slot.index()] = NOBODY;
        if self.flows[flow as usize].guarded
            && let Some((arrivals, _)) = self.guards.get_mut(view.group(slot))
        {
            arrivals.leave(1);
        }
        Some(flow)
    }

    /// Closes an empty flow.
    pub fn close(&mut self, flow: u32) {
        self.by_key.remove(&self.flows[flow as usize].key);
        self.free.push(flow);
    }

    /// Batches of its lane that may go before a request under the guard.
    pub fn guarded_wait(&self, view: &View<'_>, slot: Slot) -> u64 {
        guarded_wait(view.table.older_than(slot, view.groups() == 1), self.guard_batches)
    }
}

/// Bytes that a batch in offset order covers.
pub(in crate::policy) fn hull_bytes(view: &View<'_>, batch: &[Slot]) -> u64 {
    let end = batch.iter().map(|s| view.table.end(*s)).max().unwrap_or(0);
    end - batch.first().map_or(end, |s| view.table.start(*s))
}
