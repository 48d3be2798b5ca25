//! The order of arrival of what a queue or lane holds, and the guard against starvation that goes by it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::policy::View;
use crate::sorted::SortedSet;
use crate::table::{Arrival, Slot, State};

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

/// The same where most leave from the middle and only the oldest is asked for: those that left are dropped when they
/// come to the front, or when they are the most.
#[derive(Default)]
pub(crate) struct LazyArrivals {
    /// The least first.
    order: BinaryHeap<Reverse<Arrival>>,
    len: usize,
}

impl LazyArrivals {
    /// Adds a request.
    pub fn insert(&mut self, view: &View<'_>, slot: Slot) {
        if self.order.len() > 2 * self.len + 64 {
            self.order.retain(|a| is_queued(view, a.0));
        }
        if self.order.len() == self.order.capacity() {
            // By an eighth, not double: memory follows the queue more closely.
            self.order.reserve_exact((self.order.len() / 8).max(8));
        }
        self.order.push(Reverse(view.table.arrival_order(slot)));
        self.len += 1;
    }

    /// So many requests of it leave: they are dispatched or cancelled before anything else happens here.
    pub fn leave(&mut self, requests: usize) {
        self.len = self.len.saturating_sub(requests);
    }

    /// Nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What arrived first.
    pub fn oldest(&mut self, view: &View<'_>) -> Option<Arrival> {
        while let Some(Reverse(first)) = self.order.peek() {
            if is_queued(view, *first) {
                return Some(*first);
            }
            self.order.pop();
        }
        None
    }
}

/// The request is still the one that arrived then, and waits.
fn is_queued(view: &View<'_>, arrival: Arrival) -> bool {
    let slot = arrival.slot();
    view.table.state(slot) == State::Queued && view.table.arrival_order(slot) == arrival
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::CostModel;
    use crate::names::Names;
    use crate::occupied::Occupied;
    use crate::table::Table;
    use crate::types::{Extent, FileId, LaneId, Nanos, Op, Request};

    /// While the oldest stays, 10,000 younger ones come and go: what is remembered stays in proportion to what waits.
    #[test]
    fn those_that_left_are_forgotten() {
        let (cost, names, not_ready, lanes) = (CostModel::default(), Names::default(), Default::default(), []);
        let startable = Occupied::new(1);
        let (mut table, mut arrivals) = (Table::new(64), LazyArrivals::default());
        let extent = Extent { file: FileId(0), lane: LaneId(0), file_offset: 0, lane_offset: 0, len: 1 };
        let oldest = table.insert(&Request::new(Op::Read, extent)).unwrap();
        for i in 0..10_000 {
            let slot = if i == 0 { oldest } else { table.insert(&Request::new(Op::Read, extent)).unwrap() };
            let view = View {
                now: Nanos::ZERO,
                shared_now: Nanos::ZERO,
                table: &table,
                cost: &cost,
                names: &names,
                pieces: false,
                lanes: &lanes,
                startable: &startable,
                not_ready: &not_ready,
                total_open: true,
                shared_space: true,
            };
            arrivals.insert(&view, slot);
            assert_eq!(arrivals.oldest(&view).map(|a| a.slot()), Some(oldest));
            assert!(arrivals.order.len() <= 2 * arrivals.len + 65, "{} of {}", arrivals.order.len(), arrivals.len);
            if i > 0 {
                arrivals.leave(1);
                table.remove(slot);
            }
        }
        assert_eq!(arrivals.len, 1);
    }
}
