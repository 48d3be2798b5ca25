//! `sjf`: shortest job first (AGIOS, public library version 2).
//!
//! One queue per file and operation. The queue with the fewest queued bytes goes next, with its lowest offset.
//!
//! Our choices where the source is silent: among queues with equal bytes, the one with the oldest request; requests
//! that touch the lowest offset go along, since that delays no other job (`merge=off`: each alone). The public library
//! searches every queue for each decision; here queues are kept in order, O(log n).
//!
//! Wait: the rule starves large queues while small ones keep coming, and the high offsets of a queue. So after
//! `guard_batches` batches of a lane that passed over its oldest request, that request goes next (0 disables the
//! guard). Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use super::parts::ranked::{ByRank, Contents, RankRule};
use super::{Conduct, ParamInfo, PolicyInfo, View};
use crate::table::{Arrival, Slot};
use crate::types::{FileId, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "sjf",
    summary: "Shortest job first: the file and operation with the fewest queued bytes, lowest offset first.",
    source: "AGIOS, public library version 2 (SJF)",
    conduct: Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches"),
    params: PARAMS,
    build: |params, setup| Ok(ByRank::boxed(params, setup, ShortestJob)),
};

/// Also used by `srtf`.
pub(super) const PARAMS: &[ParamInfo] = &[
    ParamInfo { name: "merge", default: "on", range: SWITCH, doc: "Take along what touches the lowest offset." },
    BATCH_REQUESTS,
    BATCH_BYTES,
    ParamInfo {
        name: "guard_batches",
        default: "64",
        range: Range::Integer(0, 1_000_000),
        doc: "Batches of a lane that may pass over its oldest request; 0: any number.",
    },
];

struct ShortestJob;

impl RankRule for ShortestJob {
    type Key = (FileId, Op);
    type Rank = (u64, Arrival);

    fn rank(_: Self::Key, queue: Contents) -> Self::Rank {
        (queue.bytes, queue.oldest)
    }

    fn queue(&mut self, view: &View<'_>, slot: Slot) -> (Self::Key, u64) {
        ((view.table.file(slot), view.table.op(slot)), 0)
    }
}
