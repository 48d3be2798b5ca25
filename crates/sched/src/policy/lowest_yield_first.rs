//! `lowest-yield-first`: serves the application that has had the least of the device since its I/O phase began.
//!
//! The yield of an application is the device time (or bytes) it has had in its current phase, divided by the time since
//! the phase began. Whenever a lane has room, the application with the lowest yield sends its oldest request and the
//! requests that touch it. Bandwidth thus goes to the applications that sharing has slowed most.
//!
//! Source: Benoit, Herault, Perotin, Robert and Vivien, "Revisiting I/O bandwidth-sharing strategies for HPC
//! applications", INRIA RR-9502 (2023): GreedyYield. There the yield counts an application's whole run, computing
//! included, against its time alone; a server sees only requests, so ours counts the phase. A phase begins with a
//! request after `phase_gap_ms` without outstanding ones (`phases.rs`). Device time is debited by the cost model at
//! dispatch and corrected at completion, over all lanes of this server. Equal yields: the phase
//! that began first. Within an application: order of arrival, aggregated.
//!
//! Yields change with time, so the lowest is kept by a kinetic tournament (`tournament.rs`), not by a scan.
//!
//! Wait: new phases would starve older ones, so after `guard_batches` batches of a lane that passed over its oldest
//! request, that request goes next (0 disables the guard). Work-conserving.

use std::any::Any;

use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_ON, Range};
use super::parts::flows::{Flows, hull_bytes};
use super::parts::phases::{Application, Phases};
use super::parts::tournament::{Contender, Tournament};
use super::parts::turns::Turns;
use super::{Choice, Conduct, Done, ParamInfo, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::names::Who;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "lowest-yield-first",
    summary: "The application that has received the least since its I/O phase began goes first.",
    source: "Benoit et al., INRIA RR-9502 (GreedyYield)",
    conduct: Conduct {
        shares: true,
        ..Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches")
    },
    params: &[
        ParamInfo {
            name: "measure",
            default: "device",
            range: Range::Choice(&["device", "bytes"]),
            doc: "What an application gets: device time, or bytes.",
        },
        PHASE_GAP,
        MERGE_ON,
        BATCH_REQUESTS,
        BATCH_BYTES,
        GUARD_BATCHES,
    ],
    build: |params, setup| {
        let mut flows = Flows::new(params, setup, params.integer("guard_batches"));
        flows.list_parties(setup);
        Ok(Box::new(LowestYield {
            in_bytes: params.text("measure") == "bytes",
            phases: Phases::new(Nanos::from_millis(params.integer("phase_gap_ms"))),
            flows,
            groups: (0..setup.lanes).map(|_| Tournament::default()).collect(),
            turns: Turns::default(),
            params: params.clone(),
        }))
    },
};

/// Also used by `set10`.
pub(super) const PHASE_GAP: ParamInfo = ParamInfo {
    name: "phase_gap_ms",
    default: "100",
    range: Range::Integer(1, 3_600_000),
    doc: "A request after this time without outstanding ones of its application begins a new phase, milliseconds.",
};

struct LowestYield {
    params: Params,
    in_bytes: bool,
    phases: Phases,
    /// By application, each with its index in the tournament of its lane group.
    flows: Flows<u32, Option<u32>, Flight>,
    groups: Vec<Tournament>,
    turns: Turns,
}

/// A batch in flight.
#[derive(Clone, Copy)]
struct Flight {
    job: u32,
    estimate: Nanos,
}

impl LowestYield {
    /// Updates a flow in the tournament after its application's yield changed, or removes it when it is empty.
    fn refile(&mut self, view: &View<'_>, flow: u32) {
        let (group, job) = self.flows.key(flow);
        let Application { got, began, order, .. } = *self.phases.job(job);
        let place = *self.flows.data(flow);
        let contender = (!self.flows.is_empty(flow)).then_some(Contender { got, began, order, flow });
        *self.flows.data(flow) = self.groups[group].set(place, contender, view.now);
        if contender.is_none() {
            self.flows.close(flow);
        }
    }

    fn refile_all(&mut self, view: &View<'_>, job: u32) {
        for flow in self.flows.of_party(job) {
            self.refile(view, flow);
        }
    }
}

impl Policy for LowestYield {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let job = self.phases.arrived(view, slot);
        let (flow, new) = self.flows.push(view, job, slot, true);
        if new {
            self.refile(view, flow);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(flow) = self.flows.remove(view, slot) else { return };
        self.phases.left(self.flows.key(flow).1, 1, view.now);
        if self.flows.is_empty(flow) {
            self.refile(view, flow);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let flow = self.flows.due(view, group).or_else(|| self.groups[group].winner(view.now))?;
            let first = self.flows.first(view, flow)?;
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            let job = self.flows.key(flow).1;
            self.flows.take(view, first, batch);
            let bytes = hull_bytes(view, batch);
            let estimate = view.cost.ttp(view.table.op(first), bytes);
            let got = &mut self.phases.job_mut(job).got;
            *got = got.saturating_add(if self.in_bytes { bytes } else { estimate.0 });
            self.flows.depart(batch[0], Flight { job, estimate });
            self.refile(view, flow);
            if view.groups() > 1 {
                self.refile_all(view, job);
            }
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        WaitBound::of_batches(self.flows.guarded_wait(view, slot))
    }

    fn reads_device_time(&self) -> bool {
        true
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        let Some(flight) = self.flows.returned(done) else { return };
        if !self.in_bytes {
            let got = &mut self.phases.job_mut(flight.job).got;
            *got = got.saturating_add(done.device_time.0).saturating_sub(flight.estimate.0);
            self.refile_all(view, flight.job);
        }
        self.phases.left(flight.job, done.slots.len() as u32, view.now);
    }

    fn explain(&self, who: &Who, _: Nanos) -> Option<String> {
        Some(match self.phases.find(who.job) {
            None => format!("job {}: nothing seen of it yet; it would go first", who.job),
            Some(job) if self.in_bytes => format!("job {}: {} bytes in its present phase", job.key, job.got),
            Some(job) => format!("job {}: {} of device time in its present phase", job.key, Nanos(job.got)),
        })
    }

    fn take_over(&mut self, _: &View<'_>, old: Box<dyn Any>) {
        if let Ok(old) = old.downcast::<LowestYield>()
            && old.in_bytes == self.in_bytes
        {
            self.phases.import(old.phases.export());
        }
    }
}
