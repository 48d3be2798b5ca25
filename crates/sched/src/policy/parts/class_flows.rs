//! Flows of classes, by lane: what `tbf` and `mclock` have in common. A policy keeps an account with each class, and
//! decides which flow sends.

use super::classes::{Class, Classes};
use super::flows::{Flows, hull_bytes};
use crate::policy::{Done, Params, Setup, View};
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// A batch of a class, in flight.
#[derive(Clone, Copy)]
pub(in crate::policy) struct Flight {
    pub class: u32,
    /// It went on an account: of a bucket, of a reservation.
    pub on_account: bool,
    /// What it was thought to take.
    pub estimate: Nanos,
}

/// What was taken out of a flow to be sent.
pub(in crate::policy) struct Taken {
    pub requests: u64,
    pub bytes: u64,
    /// What it is thought to take.
    pub estimate: Nanos,
}

/// The classes with accounts `A`, and their flows with data `D`.
pub(in crate::policy) struct ClassFlows<A, D> {
    pub classes: Classes<A>,
    pub flows: Flows<u32, D, Flight>,
    lanes: u64,
    /// Requests and bytes of a batch at most, as far as has been seen: a single request may be longer than the limit.
    pub longest: (u64, u64),
}

impl<A: Default, D: Default> ClassFlows<A, D> {
    /// Of these classes; where accounts are `corrected` by completions, the flows of a class can be asked for.
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

    /// The class of a request that is about to be queued; `as_new`: see [`Classes::of`].
    #[inline]
    pub fn class_of(&mut self, view: &View<'_>, slot: Slot, as_new: impl Fn(&Class<A>) -> bool) -> u32 {
        self.longest.1 = self.longest.1.max(view.table.len_bytes(slot));
        let class = self.classes.of(&view.who(slot), as_new);
        self.classes.get_mut(class).held += 1;
        class
    }

    /// Queues a request of a class, under the guard or not; its flow, if that is to be filed anew.
    #[inline]
    pub fn push(&mut self, view: &View<'_>, class: u32, slot: Slot, guarded: bool) -> Option<u32> {
        let (flow, _) = self.flows.push(view, class, slot, guarded);
        // A late request may be older than what the flow was filed by.
        (self.flows.oldest(view, flow) == Some(slot)).then_some(flow)
    }

    /// Forgets a cancelled request; its flow, which is to be filed anew.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) -> Option<u32> {
        let flow = self.flows.remove(view, slot)?;
        self.classes.get_mut(self.flows.key(flow).1).held -= 1;
        Some(flow)
    }

    /// The class of a queued request.
    pub fn class(&self, slot: Slot) -> Option<u32> {
        self.flows.of(slot).map(|flow| self.flows.key(flow).1)
    }

    /// Moves what begins with the first request of a flow into the batch.
    #[inline]
    pub fn take(&mut self, view: &View<'_>, first: Slot, batch: &mut Vec<Slot>) -> Taken {
        self.flows.take(view, first, batch);
        Taken {
            requests: batch.len() as u64,
            bytes: batch.iter().map(|s| view.table.len_bytes(*s)).fold(0, u64::saturating_add),
            estimate: view.cost.ttp(view.table.op(first), hull_bytes(view, batch)),
        }
    }

    /// A batch came back.
    #[inline]
    pub fn returned(&mut self, done: &Done<'_>) -> Option<Flight> {
        let flight = self.flows.returned(done)?;
        let held = &mut self.classes.get_mut(flight.class).held;
        *held = held.saturating_sub(done.slots.len() as u32);
        Some(flight)
    }

    /// Device time of a batch at most.
    pub fn longest_device(&self, view: &View<'_>) -> Nanos {
        view.cost.ttp(Op::Read, self.longest.1).max(view.cost.ttp(Op::Write, self.longest.1))
    }

    /// Batches of its class that may pay before a request has paid: while its older ones do, on each lane one.
    pub fn paying(&self, view: &View<'_>, slot: Slot) -> u64 {
        (self.flows.older_of_party(view, slot) + 1).saturating_mul(self.lanes)
    }
}
