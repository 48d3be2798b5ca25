//! Matches arriving requests with those of a recorded run: the same file, operation, offset and length, at about the
//! same time after the first request of its file (agios-2013, IV.C).

use std::sync::Arc;

use impresario_foresight::{PredictedId, PredictedQueues, part_key};
use rustc_hash::FxHashMap;

use crate::contract::Linked;
use crate::policy::View;
use crate::table::Slot;
use crate::types::{Nanos, Op};

/// A request may arrive this much earlier or later than predicted, in addition to the configured part of the predicted
/// time.
pub(super) const BOUND: Nanos = Nanos(1_000_000_000);
/// After this time without requests a file starts anew: its next request is its first.
pub(super) const AGAIN_AFTER: Nanos = Nanos(5_000_000_000);
/// After this many requests in a row without a match only every [`SAMPLE`]th is looked up, until one matches: a run
/// that does not match costs next to nothing.
const ASLEEP_AFTER: u32 = 512;
const SAMPLE: u32 = 32;

/// A file, as the recorded run knows it, and whether it is written.
pub(super) type PredictedQueue = (u64, bool);

/// A recorded run and the requests that matched it.
pub(super) struct Matched {
    /// How far from its predicted instant a request may arrive, as a fraction of the predicted time.
    bound_part: f64,
    run: Option<Arc<PredictedQueues>>,
    counted: Linked,
    /// Requests since the last match.
    missed: u32,
    /// First and last arrival of each predicted file.
    begun: FxHashMap<u64, (Nanos, Nanos)>,
}

impl Matched {
    /// Without a run.
    pub fn new(bound_part: f64) -> Matched {
        Matched { bound_part, run: None, counted: Linked::default(), missed: 0, begun: FxHashMap::default() }
    }

    /// Sets or clears the run; false if that changes nothing.
    pub fn set(&mut self, queues: Option<Arc<PredictedQueues>>) -> bool {
        if let (Some(new), Some(old)) = (&queues, &self.run)
            && Arc::ptr_eq(new, old)
        {
            return false;
        }
        self.run = queues.filter(|q| !q.is_empty());
        (self.counted, self.missed) = (Linked::default(), 0);
        self.begun.clear();
        true
    }

    /// The run.
    pub fn run(&self) -> Option<&PredictedQueues> {
        self.run.as_deref()
    }

    /// Requests since the run was set, and how many of them matched it.
    pub fn linked(&self) -> Linked {
        self.counted
    }

    /// A request was queued: its prediction, if it has one.
    pub fn arrived(&mut self, view: &View<'_>, slot: Slot) -> Option<(PredictedQueue, PredictedId)> {
        let queues = self.run.as_deref()?;
        self.counted.arrived += 1;
        self.missed = self.missed.wrapping_add(1).max(1);
        if self.missed > ASLEEP_AFTER && !self.missed.is_multiple_of(SAMPLE) {
            return None;
        }
        let table = view.table;
        let (mut file, op) = (view.names.file(table.file(slot)), table.op(slot));
        if !view.shared_space {
            file = part_key(file, table.lane(slot).0);
        }
        let queue = (file, op == Op::Write);
        if !queues.knows(queue.0, queue.1) {
            return None;
        }
        let arrival = table.arrival(slot);
        let (first, last) = self.begun.entry(file).or_insert((arrival, arrival));
        if arrival.since(*last) > AGAIN_AFTER {
            *first = arrival;
        }
        *last = arrival.max(*last);
        let since = arrival.since(*first).0;
        let place = (table.start(slot), table.len_bytes(slot));
        let id = queues.find(queue, place, since, (BOUND.0, self.bound_part))?;
        self.counted.linked += 1;
        self.missed = 0;
        Some((queue, id))
    }

    /// Takes over the run and the matches of another instance after a change of parameters.
    pub fn take_over(&mut self, other: Matched) {
        *self = Matched { bound_part: self.bound_part, ..other };
    }
}
