//! Flows of classes, by lane. The policy keeps an account per class and decides which flow sends.

use super::classes::{Class, Classes};
use super::flows::{Flows, hull_bytes};
use super::limits::Cost;
use crate::policy::{Done, Params, Setup, View};
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// A batch in flight.
#[derive(Clone, Copy)]
pub(in crate::policy) struct Flight {
    pub class: u32,
    /// It was charged to an account: a bucket, a reservation.
    pub on_account: bool,
    /// Its estimated device time.
    pub estimate: Nanos,
}

/// Classes with accounts `A`, and their flows with policy data `D`.
pub(in crate::policy) struct ClassFlows<A, D> {
    pub classes: Classes<A>,
    pub flows: Flows<u32, D, Flight>,
    lanes: u64,
    /// The largest batch so far in requests and in bytes: a single request may exceed the limit.
    longest: (u64, u64),
}

impl<A: Default, D: Default> ClassFlows<A, D> {
    /// For these classes; with `corrected` (by completions) the flows of a class can be listed.
    pub fn new(params: &Params, setup: &Setup, classes: Classes<A>, corrected: bool) -> Self {
        let mut flows = Flows::new(params, setup, params.integer("guard_batches")).by_lane();
        if corrected {
            flows.list_parties(setup);
        }
        let longest = match params.on("merge") {
            true => (params.integer("batch_requests"), params.integer("batch_bytes")),
            false => (1, 1),
        };
        ClassFlows { classes, flows, lanes: setup.lanes.into(), longest }
    }

    /// The class of a request about to be queued; `as_new`: see [`Classes::of`].
    #[inline]
    pub fn class_of(&mut self, view: &View<'_>, slot: Slot, as_new: impl Fn(&Class<A>) -> bool) -> u32 {
        self.longest.1 = self.longest.1.max(view.table.len_bytes(slot));
        let class = self.classes.of(&view.who(slot), as_new);
        let counted = self.classes.get_mut(class);
        (counted.held, counted.queued) = (counted.held + 1, counted.queued + 1);
        class
    }

    /// Queues a request of a class, guarded or not; returns its flow if that must be refiled.
    #[inline]
    pub fn push(&mut self, view: &View<'_>, class: u32, slot: Slot, guarded: bool) -> Option<u32> {
        let (flow, _) = self.flows.push(view, class, slot, guarded);
        // A delayed request may be older than the one by which the flow was filed.
        (self.flows.oldest(view, flow) == Some(slot)).then_some(flow)
    }

    /// Removes a cancelled request; returns its flow, which must be refiled.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) -> Option<u32> {
        let flow = self.flows.remove(view, slot)?;
        let class = self.classes.get_mut(self.flows.key(flow).1);
        (class.held, class.queued) = (class.held - 1, class.queued - 1);
        Some(flow)
    }

    /// The class of a flow.
    pub fn class_of_flow(&self, flow: u32) -> &Class<A> {
        self.classes.get(self.flows.key(flow).1)
    }

    /// The class of a queued request.
    pub fn class(&self, slot: Slot) -> Option<u32> {
        self.flows.of(slot).map(|flow| self.flows.key(flow).1)
    }

    /// Moves the batch at the head of a flow of a class into `batch`; its cost, by estimated device time.
    #[inline]
    pub fn take(&mut self, view: &View<'_>, class: u32, first: Slot, batch: &mut Vec<Slot>) -> Cost {
        self.flows.take(view, first, batch);
        self.classes.get_mut(class).queued -= batch.len() as u32;
        Cost {
            requests: batch.len() as u64,
            bytes: batch.iter().map(|s| view.table.len_bytes(*s)).fold(0, u64::saturating_add),
            device: view.cost.ttp(view.table.op(first), hull_bytes(view, batch)),
        }
    }

    /// Records a completed batch.
    #[inline]
    pub fn returned(&mut self, done: &Done<'_>) -> Option<Flight> {
        let flight = self.flows.returned(done)?;
        let held = &mut self.classes.get_mut(flight.class).held;
        *held = held.saturating_sub(done.slots.len() as u32);
        Some(flight)
    }

    /// Upper bound of a batch's cost.
    pub fn longest(&self, view: &View<'_>) -> Cost {
        let (requests, bytes) = self.longest;
        Cost { requests, bytes, device: view.cost.ttp(Op::Read, bytes).max(view.cost.ttp(Op::Write, bytes)) }
    }

    /// How many batches of its class may pay before it: one per lane while each of its older requests does.
    pub fn paying(&self, view: &View<'_>, slot: Slot) -> u64 {
        (self.flows.older_of_party(view, slot) + 1).saturating_mul(self.lanes)
    }
}
