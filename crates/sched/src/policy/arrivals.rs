//! The order of arrival of what a queue or lane holds, and the guard against starvation that goes by it.

use super::View;
use crate::sorted::SortedSet;
use crate::table::{Arrival, Slot};

/// Requests in order of arrival. One that a conflict held back takes its place by its arrival too.
#[derive(Default)]
pub(crate) struct Arrivals {
    order: SortedSet<Arrival>,
}

impl Arrivals {
    /// Adds a request.
    pub fn insert(&mut self, view: &View<'_>, slot: Slot) {
        self.order.insert(view.table.arrival_order(slot));
    }

    /// Takes a request out, wherever it stands.
    pub fn remove(&mut self, view: &View<'_>, slot: Slot) {
        self.order.remove(&view.table.arrival_order(slot));
    }

    /// Nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// What arrived first.
    pub fn oldest(&self, _: &View<'_>) -> Option<Arrival> {
        self.order.first()
    }
}

/// Counts the batches that left out the oldest request.
#[derive(Default)]
pub(crate) struct Guard {
    left_out: u64,
}

impl Guard {
    /// True when `guard_batches` batches (0: any number) left out the oldest request, so that it goes next.
    pub fn is_due(&self, oldest: Option<Arrival>, guard_batches: u64) -> bool {
        oldest.is_some() && guard_batches > 0 && self.left_out >= guard_batches
    }

    /// A batch went, with the oldest request or without.
    pub fn count(&mut self, with_oldest: bool) {
        self.left_out = if with_oldest { 0 } else { self.left_out.saturating_add(1) };
    }
}

/// Batches that may go before a request when `older` requests are, under the guard.
pub(crate) fn guarded_wait(older: u64, guard_batches: u64) -> u64 {
    match guard_batches {
        0 => u64::MAX,
        batches => older.saturating_add(1).saturating_mul(batches.saturating_add(1)),
    }
}
