//! `orr`: round robin over objects, in offset order within each (ORR of the Lustre network request scheduler).
//!
//! One queue per object (file) and operation, in offset order, with touching requests aggregated. Queues take turns of
//! up to `quantum_requests` requests. A turn ascends from where the object's last turn ended and wraps, so a disk
//! sweeps over an object however many turns that takes. A queue that has spent its quantum goes to the end of the ring,
//! an empty one leaves it, a new one joins at the end.
//!
//! Source: Lustre operations manual, "Network request scheduler tuning" (ORR, quantum 256). The original schedules only
//! reads by default; here reads and writes have separate queues, because a batch has one operation. Where it is silent:
//! the order across turns of one object (above).
//!
//! Wait: a stream of ascending offsets never wraps, so after `guard_batches` batches of a queue that passed over its
//! oldest request, that request's batch goes next and the sweep continues there (0 disables the guard). Then (older
//! requests of its queue + 1) × `guard_batches` turns of every queue. Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, Range};
use super::parts::file_turns::{FileTurns, Order};
use super::parts::runs::Runs;
use super::{Conduct, ParamInfo, PolicyInfo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "orr",
    summary: "Round robin over files, in offset order within one.",
    source: "Lustre network request scheduler, ORR",
    conduct: Conduct::conserving("(older requests of the same queue + 1) × guard_batches turns of every queue"),
    params: &[
        ParamInfo {
            name: "quantum_requests",
            default: "256",
            range: Range::Integer(1, 65_535),
            doc: "Requests that a file's queue may send in its turn.",
        },
        ParamInfo { doc: "Requests per batch at most; 1: no aggregation.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per batch at most.", ..BATCH_BYTES },
        ParamInfo { doc: "Batches of a queue that may pass over its oldest request; 0: any number.", ..GUARD_BATCHES },
    ],
    build: |params, setup| {
        let runs = Runs::new(params.integer("batch_requests"), params.integer("batch_bytes"));
        let order = Order::Sweep { guard_batches: params.integer("guard_batches") };
        Ok(Box::new(FileTurns::new(params, setup, runs, order)))
    },
};
