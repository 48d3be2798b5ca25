//! `fifo`: order of arrival per lane, with a limited number in flight (the baseline of twins-2017, III).
//!
//! With `merge=on`, the oldest request is sent together with the queued requests of its file and operation that touch
//! it. This is the control that only limits depth and merges: a reordering policy must beat it to show what its order
//! is worth.
//!
//! Wait: at most the older requests of its lane. Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, SWITCH};
use super::parts::backlog::Backlog;
use super::parts::turns::Turns;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "fifo",
    summary: "Order of arrival; optionally merging queued neighbours.",
    source: "twins-2017, III (FIFO of IOFSL)",
    conduct: Conduct::conserving("what arrived earlier on the lane"),
    params: &[
        ParamInfo { name: "merge", default: "off", range: SWITCH, doc: "Take queued neighbours along." },
        BATCH_REQUESTS,
        BATCH_BYTES,
    ],
    build: |params, setup| Ok(Fifo::boxed(params, setup, params.on("merge"), Some(Turns::default()))),
};

/// Order of arrival, on each lane or over all.
pub(super) struct Fifo {
    params: Params,
    /// One queue per lane group.
    backlog: Backlog,
    /// The lanes have turns; `None`: the oldest request whose lane has room goes next.
    turns: Option<Turns>,
}

impl Fifo {
    /// With merging, from the parameters `batch_requests` and `batch_bytes`.
    pub(super) fn boxed(params: &Params, setup: &Setup, merge: bool, turns: Option<Turns>) -> Box<dyn Policy> {
        let backlog = Backlog::new(usize::from(setup.lanes), merge, params);
        Box::new(Fifo { params: params.clone(), backlog, turns })
    }

    fn oldest_of_all(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut reason = WaitReason::Empty;
        let mut next = None;
        for group in view.startable_groups(0) {
            let Some(oldest) = self.backlog.oldest(view, group) else { continue };
            let Some(first) = self.backlog.first(view, group) else { continue };
            if view.open(view.table.lane(first)) {
                next = next.into_iter().chain([(view.table.seq(oldest), group, first)]).min();
            } else {
                reason = WaitReason::LanesBusy;
            }
        }
        let Some((_, group, first)) = next else { return Choice::until_event(reason) };
        self.backlog.take(view, group, first, batch);
        Choice::Serve
    }
}

impl Policy for Fifo {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.backlog.insert(view, view.group(slot), slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.backlog.remove(view, view.group(slot), slot);
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let Some(turns) = &mut self.turns else { return self.oldest_of_all(view, batch) };
        turns.round_robin(view, |group| {
            let first = self.backlog.first(view, group)?;
            // If requests are not split, the run around the oldest may begin on another server.
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            self.backlog.take(view, group, first, batch);
            Some(Choice::Serve)
        })
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.backlog.take(view, view.group(oldest), oldest, batch);
        Choice::Serve
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let ahead = view.table.older_than(slot, view.groups() == 1);
        WaitBound::of_batches(ahead)
    }
}
