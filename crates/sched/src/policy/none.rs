//! `none`: no scheduling. Every request is handed over at once, in order of arrival, alone.
//!
//! The baseline of every comparison: the layer below (a device, a kernel, a file system) sees the requests as they
//! arrive. Lane limits do not apply; the wait bound is the length of the queue. Work-conserving.

use std::collections::VecDeque;

use super::{Choice, Conduct, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::LaneId;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "none",
    summary: "Hand every request over at once, in order of arrival.",
    source: "the papers' baseline without a scheduler",
    conduct: Conduct { unlimited: true, speculates: false, ..Conduct::conserving("what arrived earlier on the lane") },
    params: &[],
    build: |params, setup| {
        Ok(Box::new(Unscheduled { params: params.clone(), lanes: vec![VecDeque::new(); usize::from(setup.lanes)] }))
    },
};

struct Unscheduled {
    params: Params,
    /// Emptied by the next decision, unless a lane is held.
    lanes: Vec<VecDeque<Slot>>,
}

impl Policy for Unscheduled {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.lanes[view.table.lane(slot).index()].push_back(slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.lanes[view.table.lane(slot).index()].retain(|s| *s != slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut reason = WaitReason::Empty;
        let open = view.startable.round_from(0).filter(|lane| {
            let open = view.open(LaneId(*lane as u16));
            if !open {
                reason = WaitReason::Hold;
            }
            open
        });
        let oldest = open.min_by_key(|lane| self.lanes[*lane].front().map(|head| view.table.seq(*head)));
        match oldest.and_then(|lane| self.lanes[lane].pop_front()) {
            Some(head) => {
                batch.push(head);
                Choice::Serve
            }
            None => Choice::until_event(reason),
        }
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        // A request delayed by a conflict is handed over late; older ones may still follow it.
        WaitBound::of_batches(view.table.older_than(slot, view.groups() == 1) + self.queued())
    }
}

impl Unscheduled {
    fn queued(&self) -> u64 {
        self.lanes.iter().map(|l| l.len() as u64).sum()
    }
}
