//! `fifo`: order of arrival per lane, with a limited number in flight (the baseline of twins-2017, III).
//!
//! With `merge=on`, the request whose turn it is takes along the queued requests of its file and operation
//! that touch it: the control that only limits depth and merges, against which a reordering policy
//! must show what its order is worth.
//!
//! Wait: at most the requests that arrived earlier on its lane. Work-conserving.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use rustc_hash::FxHashMap;

use super::params::{Range, SWITCH};
use super::runs::{RunQueue, Runs};
use super::{Choice, ParamInfo, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::{Arrival, Slot, State};
use crate::types::{FileId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "fifo",
    summary: "Order of arrival; optionally merging queued neighbours.",
    source: "twins-2017, III (FIFO of IOFSL)",
    params: &[
        ParamInfo { name: "merge", default: "off", range: SWITCH, doc: "Take queued neighbours along." },
        ParamInfo {
            name: "batch_requests",
            default: "64",
            range: Range::Integer(1, 1024),
            doc: "Requests per batch at most, with merge=on.",
        },
        ParamInfo {
            name: "batch_bytes",
            default: "1048576",
            range: Range::Integer(512, 1 << 30),
            doc: "Bytes per batch at most, with merge=on.",
        },
    ],
    build: |params, setup| {
        let runs = Runs::new(params.integer("batch_requests"), params.integer("batch_bytes"), setup.capacity);
        Ok(Box::new(Fifo {
            merge: params.on("merge").then(|| Merging { runs, queues: FxHashMap::default() }),
            params: params.clone(),
            lanes: vec![BinaryHeap::new(); usize::from(setup.lanes)],
            stale_limit: 2 * setup.capacity as usize + 64,
            next_lane: 0,
        }))
    },
};

struct Merging {
    runs: Runs,
    queues: FxHashMap<(usize, FileId, Op), RunQueue>,
}

struct Fifo {
    params: Params,
    /// Per lane group, so that a request that a conflict held back takes its place by arrival.
    /// An entry whose request was cancelled or went along with another is stale.
    lanes: Vec<BinaryHeap<Reverse<Arrival>>>,
    stale_limit: usize,
    next_lane: usize,
    merge: Option<Merging>,
}

impl Fifo {
    fn queued(view: &View<'_>, Reverse(arrival): &Reverse<Arrival>) -> bool {
        view.table.state(arrival.slot()) == State::Queued && view.table.arrival_order(arrival.slot()) == *arrival
    }
}

impl Policy for Fifo {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let lane = &mut self.lanes[view.group(slot)];
        if lane.len() > self.stale_limit {
            lane.retain(|e| Self::queued(view, e));
        }
        lane.push(Reverse(view.table.arrival_order(slot)));
        if let Some(m) = &mut self.merge {
            let key = (view.group(slot), view.table.file(slot), view.table.op(slot));
            m.runs.insert(m.queues.entry(key).or_default(), view.table, slot, 0, |_| 0);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        if let Some(m) = &mut self.merge {
            let key = (view.group(slot), view.table.file(slot), view.table.op(slot));
            if let Some(queue) = m.queues.get_mut(&key) {
                m.runs.remove(queue, view.table, slot, |_| 0);
                if queue.is_empty() {
                    m.queues.remove(&key);
                }
            }
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut reason = WaitReason::Empty;
        for turn in 0..view.groups() {
            let group = (self.next_lane + turn) % view.groups();
            let lane = &mut self.lanes[group];
            while lane.peek().is_some_and(|e| !Self::queued(view, e)) {
                lane.pop();
            }
            let Some(head) = lane.peek().map(|e| e.0.slot()) else { continue };
            // What goes is the run around it; where requests are not split, that may begin at another server.
            let first = self.merge.as_mut().map_or(head, |m| m.runs.run_of(head));
            if !view.open(view.table.lane(first)) {
                reason = WaitReason::LanesBusy;
                continue;
            }
            lane.pop();
            match &mut self.merge {
                Some(m) => {
                    let key = (group, view.table.file(head), view.table.op(head));
                    if let Some(queue) = m.queues.get_mut(&key) {
                        m.runs.take(queue, view.table, first, usize::MAX, batch, |_| 0);
                        if queue.is_empty() {
                            m.queues.remove(&key);
                        }
                    }
                }
                None => batch.push(head),
            }
            self.next_lane = (group + 1) % view.groups();
            return Choice::Serve;
        }
        Choice::until_event(reason)
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let ahead = view.table.older_than(slot, view.groups() == 1);
        WaitBound { batches: ahead, idle: Nanos::ZERO }
    }
}
