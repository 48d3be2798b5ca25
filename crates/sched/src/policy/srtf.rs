//! `srtf`: shortest remaining time first (AGIOS, public library version 1).
//!
//! One queue per file and operation. A recorded run predicts the bytes of each: the queue with the fewest predicted
//! bytes that are neither served nor queued goes next, with its lowest offset. A file that the program has nearly
//! finished is thus completed before one with much still to come.
//!
//! Our choices where the source is silent: among queues with equal remaining bytes, the one with the fewest queued
//! bytes, then the oldest request, which is `sjf`; that is also the whole rule without a recorded run, and for files
//! outside it: nothing remains of them. After [`AGAIN_AFTER`] without requests a file starts its run anew. Reads and
//! writes of a file have separate queues, and so do its parts on several lanes.
//!
//! Wait: as `sjf`: after `guard_batches` batches of a lane that passed over its oldest request, that request goes next
//! (0 disables the guard). Work-conserving.

use std::sync::Arc;

use impresario_foresight::{PredictedQueues, part_key};
use rustc_hash::FxHashMap;

use super::parts::ranked::{ByRank, Contents, RankRule};
use super::sjf::PARAMS;
use super::{Conduct, PolicyInfo, View};
use crate::contract::Linked;
use crate::table::{Arrival, Slot};
use crate::types::{FileId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "srtf",
    summary: "Shortest remaining time first: the file with the fewest bytes left of those that a recorded run predicts.",
    source: "AGIOS, public library version 1 (SRTF)",
    conduct: Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches"),
    params: PARAMS,
    build: |params, setup| Ok(ByRank::boxed(params, setup, ShortestRemaining::default())),
};

/// After this time without requests a file starts anew.
const AGAIN_AFTER: Nanos = Nanos(5_000_000_000);

#[derive(Default)]
struct ShortestRemaining {
    run: Option<Arc<PredictedQueues>>,
    /// By predicted queue: bytes that arrived, and when the last did.
    begun: FxHashMap<(u64, bool), (u64, Nanos)>,
    /// A request is linked if the run has its file.
    counted: Linked,
}

/// The predicted queue of a request.
fn queue_of(view: &View<'_>, slot: Slot) -> (u64, bool) {
    let file = view.names.file(view.table.file(slot));
    let lane = if view.shared_space { 0 } else { view.table.lane(slot).0 };
    (part_key(file, lane), view.table.op(slot) == Op::Write)
}

impl ShortestRemaining {
    /// Counts an arrival; returns the bytes that its queue still expects.
    fn expect(&mut self, view: &View<'_>, slot: Slot) -> u64 {
        let Some(run) = &self.run else { return 0 };
        self.counted.arrived += 1;
        let queue = queue_of(view, slot);
        let Some(foretold) = run.bytes(queue.0, queue.1) else { return 0 };
        self.counted.linked += 1;
        let arrival = view.table.arrival(slot);
        let (came, last) = self.begun.entry(queue).or_insert((0, arrival));
        if arrival.since(*last) > AGAIN_AFTER {
            *came = 0;
        }
        *came = came.saturating_add(view.table.len_bytes(slot));
        *last = arrival.max(*last);
        foretold.saturating_sub(*came)
    }
}

impl RankRule for ShortestRemaining {
    type Key = (FileId, Op);
    type Rank = (u64, u64, Arrival);

    fn rank(_: Self::Key, queue: Contents) -> Self::Rank {
        (queue.to_come_bytes, queue.bytes, queue.oldest)
    }

    fn queue(&mut self, view: &View<'_>, slot: Slot) -> (Self::Key, u64) {
        let to_come_bytes = self.expect(view, slot);
        ((view.table.file(slot), view.table.op(slot)), to_come_bytes)
    }

    fn cancelled(&mut self, view: &View<'_>, slot: Slot) {
        if self.run.is_some()
            && let Some((came, _)) = self.begun.get_mut(&queue_of(view, slot))
        {
            *came = came.saturating_sub(view.table.len_bytes(slot));
        }
    }

    fn foresee(&mut self, queues: Option<Arc<PredictedQueues>>) {
        self.run = queues.filter(|queues| !queues.is_empty());
        self.begun.clear();
        self.counted = Linked::default();
    }

    fn linked(&self) -> Option<Linked> {
        Some(self.counted)
    }
}
