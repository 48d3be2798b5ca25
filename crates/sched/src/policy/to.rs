//! `to` and `to-agg`: time order (AGIOS, public library version 2).
//!
//! `to` serves all requests in strict order of arrival, one per batch. `to-agg` is the same with aggregation: the
//! oldest request takes along the requests that touch it, in offset order.
//!
//! The sources do not cover several lanes. Here the oldest request whose lane has room goes next, whatever its lane; a
//! full lane holds back only its own requests. (`fifo` serves the lanes in turn.) On one lane `to` is `fifo` and
//! `to-agg` is `fifo merge=on`; all four share their implementation.
//!
//! Wait: at most the older requests of its lane. Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS};
use super::parts::backlog::Backlog;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "to",
    summary: "Time order: strict order of arrival over all lanes, one request a batch.",
    source: "AGIOS, public library version 2 (TO)",
    conduct: Conduct::conserving("what arrived earlier on the lane"),
    params: &[],
    build: |params, setup| build(false, params, setup),
};

pub(super) const AGGREGATING: PolicyInfo = PolicyInfo {
    name: "to-agg",
    summary: "Time order; the oldest request takes along what touches it.",
    source: "AGIOS, public library version 2 (TO-agg)",
    conduct: Conduct::conserving("what arrived earlier on the lane"),
    params: &[
        ParamInfo { doc: "Requests per batch at most.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per batch at most.", ..BATCH_BYTES },
    ],
    build: |params, setup| build(true, params, setup),
};

fn build(aggregate: bool, params: &Params, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
    let backlog = Backlog::new(usize::from(setup.lanes), aggregate, params);
    Ok(Box::new(TimeOrder { params: params.clone(), backlog }))
}

struct TimeOrder {
    params: Params,
    /// One queue per lane group.
    backlog: Backlog,
}

impl Policy for TimeOrder {
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
        let mut reason = WaitReason::Empty;
        let mut next = None;
        for group in view.startable_groups(0) {
            let Some(oldest) = self.backlog.oldest(view, group) else { continue };
            let Some(first) = self.backlog.first(view, group) else { continue };
            if view.open(view.table.lane(first)) {
                next = next.into_iter().chain([(oldest, group, first)]).min();
            } else {
                reason = WaitReason::LanesBusy;
            }
        }
        let Some((_, group, first)) = next else { return Choice::until_event(reason) };
        self.backlog.take(view, group, first, batch);
        Choice::Serve
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
