//! `crr`: batched round robin over clients (CRR-N of the Lustre network request scheduler).
//!
//! One queue per client, in order of arrival. Clients take turns of up to `quantum_requests` requests. A client that
//! has spent its quantum goes to the end of the ring, an idle one leaves it, a new one joins at the end.
//!
//! Source: Lustre operations manual, "Network request scheduler tuning" (client round robin over NIDs, CRR-N). Where it
//! is silent: clients are identified by stable key, so a client that reconnects keeps its place; the unused rest of a
//! quantum is lost when a client runs dry; `merge=on` (not in the original) also sends a request's queued neighbours of
//! the same client, so the last batch of a turn may exceed the quantum.
//!
//! Wait: (older requests of its client + 1) turns of every possible client. Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, MERGE_OFF, Range};
use super::parts::flows::Flows;
use super::parts::ring::Rings;
use super::parts::turns::Turns;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "crr",
    summary: "Batched round robin over clients.",
    source: "Lustre network request scheduler, CRR-N",
    conduct: Conduct::conserving("(older requests of the same client + 1) turns of every client"),
    params: &[
        ParamInfo {
            name: "quantum_requests",
            default: "8",
            range: Range::Integer(1, 65_535),
            doc: "Requests that a client may send in its turn.",
        },
        MERGE_OFF,
        BATCH_REQUESTS,
        BATCH_BYTES,
    ],
    build: |params, setup| {
        Ok(Box::new(Crr {
            quantum: params.integer("quantum_requests"),
            longest: if params.on("merge") { params.integer("batch_requests") } else { 1 },
            capacity: u64::from(setup.capacity),
            flows: Flows::new(params, setup, 0),
            rings: Rings::new(usize::from(setup.lanes)),
            turns: Turns::default(),
            params: params.clone(),
        }))
    },
};

struct Crr {
    params: Params,
    quantum: u64,
    /// Most requests in a batch so far.
    longest: u64,
    capacity: u64,
    /// By lane group and client.
    flows: Flows<u64, (), ()>,
    rings: Rings,
    turns: Turns,
}

impl Crr {
    fn close(&mut self, group: usize, flow: u32) {
        self.rings.leave(group, flow);
        self.flows.close(flow);
    }
}

impl Policy for Crr {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let client = view.names.client(view.table.client(slot));
        let (flow, new) = self.flows.push(view, client, slot, false);
        if new {
            self.rings.join(view.group(slot), flow);
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let Some(flow) = self.flows.remove(view, slot) else { return };
        if self.flows.is_empty(flow) {
            self.close(self.flows.key(flow).0, flow);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let flow = self.rings.turn(group)?;
            let first = self.flows.first(view, flow)?;
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            self.flows.take(view, first, batch);
            if self.flows.is_empty(flow) {
                self.close(group, flow);
            } else {
                self.rings.spend(group, batch.len() as u64, self.quantum);
            }
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn wait_bound(&self, _: &View<'_>, _: Slot) -> WaitBound {
        // At most `capacity` requests of its client precede it, at worst each in its own turn, and between two turns
        // every other client spends its quantum.
        let turn = self.quantum.saturating_add(self.longest);
        WaitBound::of_batches(self.capacity.saturating_mul(self.capacity).saturating_mul(turn))
    }
}
