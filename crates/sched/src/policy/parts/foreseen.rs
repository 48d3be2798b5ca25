//! Waiting for the aggregations predicted from a recorded run, the rule of agios-2013, IV.C.
//!
//! A virtual request that is about to be served but smaller than the aggregation predicted for it is held, once, until
//! the predicted span, from the aggregation's first arrival to its last, has passed since its own first request arrived;
//! a mark on its requests survives its growth. α is measured: the part of such waits in which the lane served other
//! queues.

use std::sync::Arc;

use impresario_foresight::{Aggregations, Group, GroupLimits, PredictedQueues};
use rustc_hash::FxHashMap;

use super::anticipation::Stream;
use super::matched::Matched;
use super::runs::{Run, Runs};
use crate::contract::Linked;
use crate::policy::View;
use crate::table::Slot;
use crate::types::Nanos;

/// α changes in steps of this size, so that aggregations are rarely recomputed.
const OVERLAP_STEP: f64 = 0.125;

/// The aggregation predicted for a queued request.
#[derive(Clone, Copy, Default)]
struct Link {
    group: Option<Group>,
    /// Until when its virtual request is, or was, held; zero: never held.
    held_to: Nanos,
}

/// A hold in progress.
#[derive(Clone, Copy)]
struct Hold {
    since: Nanos,
    /// Device time of the lane when it began.
    busy_ns: u64,
}

pub(in crate::policy) struct Foreseen {
    /// Longest wait.
    wait: Nanos,
    limits: GroupLimits,
    matched: Matched,
    aggregations: Option<Aggregations>,
    /// By slot; absent for requests that never matched.
    links: Vec<Link>,
    /// Requests that belong to an aggregation; while there are none, runs need not be searched.
    grouped: usize,
    holds: FxHashMap<Stream, Hold>,
    /// Measured α.
    overlap: f64,
    busy_ns: Vec<u64>,
}

impl Foreseen {
    /// With an initial α.
    pub fn new(overlap: f64, wait: Nanos, limits: (u64, u64), bound_part: f64, groups: usize) -> Foreseen {
        Foreseen {
            wait,
            limits: GroupLimits { requests: limits.0 as u32, bytes: limits.1, span_ns: wait.0 },
            matched: Matched::new(bound_part),
            aggregations: None,
            links: Vec::new(),
            grouped: 0,
            holds: FxHashMap::default(),
            overlap,
            busy_ns: vec![0; groups],
        }
    }

    /// Longest hold before a batch.
    pub fn longest(&self) -> Nanos {
        self.wait
    }

    /// Sets or clears the recorded run. Setting the same run again changes nothing.
    pub fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        if self.matched.set(queues) {
            self.aggregate();
            self.links.clear();
            self.grouped = 0;
            self.holds.clear();
        }
    }

    fn aggregate(&mut self) {
        self.aggregations = self.matched.run().map(|run| Aggregations::new(run, self.overlap, self.limits));
    }

    /// Requests since the run was set, and how many of them matched it.
    pub fn linked(&self) -> Linked {
        self.matched.linked()
    }

    /// A request was queued.
    pub fn arrived(&mut self, view: &View<'_>, slot: Slot) {
        self.forget(slot);
        let (op, at) = (view.table.op(slot), slot.index());
        let Some((queue, id)) = self.matched.arrived(view, slot) else { return };
        let (Some(run), Some(aggregations)) = (self.matched.run(), &mut self.aggregations) else { return };
        let group = aggregations.group(run, queue, id, |bytes| view.cost.ttp(op, bytes).0);
        if group.requests < 2 {
            return;
        }
        if self.links.len() <= at {
            self.links.resize(at + 1, Link::default());
        }
        self.links[at].group = Some(group);
        self.grouped += 1;
    }

    /// A request left its queue.
    fn forget(&mut self, slot: Slot) -> Link {
        let link = self.links.get_mut(slot.index()).map(std::mem::take).unwrap_or_default();
        self.grouped -= usize::from(link.group.is_some());
        link
    }

    /// How long the virtual request that begins at `head` is held for predicted neighbours; `None`: not at all.
    pub fn hold(&mut self, view: &View<'_>, runs: &Runs, stream: Stream, head: Slot) -> Option<Nanos> {
        if self.grouped == 0 {
            return None;
        }
        let Run { count, len, .. } = runs.run(head);
        let (mut first, mut held_to, mut best): (_, _, Option<Group>) = (Nanos::MAX, Nanos::ZERO, None);
        for slot in runs.members(head) {
            first = first.min(view.table.arrival(slot));
            let link = self.links.get(slot.index()).copied().unwrap_or_default();
            held_to = held_to.max(link.held_to);
            best = match (best, link.group) {
                (Some(a), Some(b)) if a.bytes >= b.bytes => Some(a),
                (a, b) => b.or(a),
            };
        }
        let group = best?;
        if len >= group.bytes || count >= u64::from(group.requests) {
            return None;
        }
        if held_to > Nanos::ZERO {
            return (view.now < held_to).then_some(held_to);
        }
        let until = first + Nanos(group.span_ns());
        if until <= view.now {
            return None;
        }
        let busy_ns = self.busy_ns[stream.0.index()];
        self.holds.insert(stream, Hold { since: view.now, busy_ns });
        self.mark(runs, head, until);
        Some(until)
    }

    fn mark(&mut self, runs: &Runs, head: Slot, until: Nanos) {
        for slot in runs.members(head) {
            if self.links.len() <= slot.index() {
                self.links.resize(slot.index() + 1, Link::default());
            }
            self.links[slot.index()].held_to = until;
        }
    }

    /// Requests of a queue were sent, which ends their hold.
    pub fn sent(&mut self, view: &View<'_>, stream: Stream, batch: &[Slot]) {
        if self.aggregations.is_none() {
            return;
        }
        let mut held = false;
        for slot in batch {
            held |= self.forget(*slot).held_to > Nanos::ZERO;
        }
        if held && let Some(hold) = self.holds.remove(&stream) {
            self.measure(view, stream, hold);
        }
    }

    /// Measures α, the part of a wait in which other queues were served.
    fn measure(&mut self, view: &View<'_>, stream: Stream, hold: Hold) {
        let waited = view.now.since(hold.since).0;
        if waited == 0 {
            return;
        }
        let busy = self.busy_ns[stream.0.index()].saturating_sub(hold.busy_ns);
        let used = (busy as f64 / waited as f64).min(1.0);
        self.overlap += (used - self.overlap) / 16.0;
        let Some(aggregations) = &mut self.aggregations else { return };
        if (aggregations.overlap() - self.overlap).abs() > OVERLAP_STEP {
            aggregations.set_overlap((self.overlap / OVERLAP_STEP).round() * OVERLAP_STEP);
        }
    }

    /// A queued request was cancelled.
    pub fn cancelled(&mut self, slot: Slot) {
        self.forget(slot);
    }

    /// A batch of a queue ended after `service`.
    pub fn completed(&mut self, stream: Stream, service: Nanos) {
        if self.aggregations.is_some() {
            let busy = &mut self.busy_ns[stream.0.index()];
            *busy = busy.saturating_add(service.0);
        }
    }

    /// Takes over the measurements of another instance after a change of parameters.
    pub fn take_over(&mut self, other: Foreseen) {
        if self.busy_ns.len() == other.busy_ns.len() {
            self.matched.take_over(other.matched);
            self.overlap = other.overlap;
            self.aggregate();
        }
    }
}
