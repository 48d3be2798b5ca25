//! `sjf`: shortest job first (AGIOS, public library version 2).
//!
//! One queue per file and operation. The queue with the fewest queued bytes goes next, with its lowest offset.
//!
//! Our choices where the source is silent: among queues with equal bytes, the one with the oldest request; requests
//! that touch the lowest offset go along, since that delays no other job (`merge=off`: each alone). The public library
//! searches every queue for each decision; here queues are kept in order, O(log n).
//!
//! Wait: the rule starves large queues while small ones keep coming, and the high offsets of a queue. So after
//! `guard_batches` batches of a lane that passed over its oldest request, that request goes next (0 disables the
//! guard). Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use super::parts::ranked::Ranked;
use super::parts::turns::Turns;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyInfo, View, WaitBound};
use crate::spec::PolicySpec;
use crate::table::{Arrival, Slot};
use crate::types::{FileId, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "sjf",
    summary: "Shortest job first: the file and operation with the fewest queued bytes, lowest offset first.",
    source: "AGIOS, public library version 2 (SJF)",
    conduct: Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches"),
    params: PARAMS,
    build: |params, setup| {
        Ok(Box::new(Sjf {
            queues: Ranked::new(params, setup, |_, queue| (queue.bytes, queue.oldest)),
            params: params.clone(),
            turns: Turns::default(),
        }))
    },
};

/// Also used by `srtf`.
pub(super) const PARAMS: &[ParamInfo] = &[
    ParamInfo { name: "merge", default: "on", range: SWITCH, doc: "Take along what touches the lowest offset." },
    BATCH_REQUESTS,
    BATCH_BYTES,
    ParamInfo {
        name: "guard_batches",
        default: "64",
        range: Range::Integer(0, 1_000_000),
        doc: "Batches of a lane that may pass over its oldest request; 0: any number.",
    },
];

struct Sjf {
    params: Params,
    queues: Ranked<(FileId, Op), (u64, Arrival)>,
    turns: Turns,
}

impl Policy for Sjf {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.queues.insert(view, view.group(slot), (view.table.file(slot), view.table.op(slot)), slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.queues.remove(view, slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        self.turns.round_robin(view, |group| self.queues.serve(view, group, batch))
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.queues.take(view, oldest, batch);
        Choice::Serve
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let older = view.table.older_than(slot, view.groups() == 1);
        WaitBound::of_batches(self.queues.wait_bound(older))
    }
}
