//! `hbrr`: handle-based round robin (twins-2017, III, after IOFSL).
//!
//! One queue per file and operation, served in turn. A turn sends up to `quantum_requests` requests: each batch is the
//! run (touching requests, in offset order) that holds the queue's oldest request. A queue that has spent its quantum
//! goes to the end of the ring; an empty one is dropped; a new one joins at the end.
//!
//! The source does not say which run of a queue comes first; here it is the one with the oldest request, so nothing
//! starves. Wait: (older requests of its queue + 1) turns of every possible queue. Work-conserving.

use super::params::{BATCH_BYTES, Range};
use super::parts::file_turns::{FileTurns, Order};
use super::parts::runs::Runs;
use super::{Conduct, ParamInfo, PolicyInfo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "hbrr",
    summary: "Round robin over files, a few aggregated requests a turn.",
    source: "twins-2017, III (HBRR of IOFSL)",
    conduct: Conduct::conserving("(older requests of the same queue + 1) turns of every queue"),
    params: &[
        ParamInfo {
            name: "quantum_requests",
            default: "8",
            range: Range::Integer(1, 1024),
            doc: "Requests that a file's queue may send in its turn.",
        },
        ParamInfo { doc: "Bytes per batch at most.", ..BATCH_BYTES },
    ],
    build: |params, setup| {
        let runs = Runs::new(params.integer("quantum_requests"), params.integer("batch_bytes"));
        Ok(Box::new(FileTurns::new(params, setup, runs, Order::Oldest)))
    },
};
