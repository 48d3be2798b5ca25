//! `none`: no scheduling. Every request is handed over at once, in order of arrival, alone.
//!
//! The baseline of every comparison: what stands below (a device, a kernel, a file system) sees the
//! requests as they came. Lane limits do not apply; the bound is the length of the queue. Work-conserving.

use std::collections::VecDeque;

use super::{Choice, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "none",
    summary: "Hand every request over at once, in order of arrival.",
    source: "the papers' baseline without a scheduler",
    params: &[],
    build: |params, _| Ok(Box::new(None { params: params.clone(), queue: VecDeque::new() })),
};

struct None {
    params: Params,
    /// Rarely more than one: emptied at the next decision.
    queue: VecDeque<Slot>,
}

impl Policy for None {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, _: &View<'_>, slot: Slot) {
        self.queue.push_back(slot);
    }

    fn dequeue(&mut self, _: &View<'_>, slot: Slot) {
        self.queue.retain(|s| *s != slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        match self.queue.front() {
            Some(&head) if !view.open(view.table.lane(head)) => Choice::until_event(WaitReason::LanesBusy),
            Some(&head) => {
                self.queue.pop_front();
                batch.push(head);
                Choice::Serve
            }
            Option::None => Choice::until_event(WaitReason::Empty),
        }
    }

    fn wait_bound(&self, _: &View<'_>, slot: Slot) -> WaitBound {
        let ahead = self.queue.iter().take_while(|s| **s != slot).count();
        WaitBound { batches: ahead as u64, idle: Nanos::ZERO }
    }

    fn unlimited(&self) -> bool {
        true
    }
}
