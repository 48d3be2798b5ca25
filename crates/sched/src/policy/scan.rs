//! `scan`: the ready jobs by the offset of their next access, ascending from the last offset and wrapping (Opt 2).
//!
//! Jobs, pieces, turns and guards: see `jobs.rs`. The order is fixed when a round begins: ascending from the last
//! offset (inclusive) to the largest, then from the lowest.

use std::collections::VecDeque;

use super::PolicyInfo;
use super::parts::jobs::{self, GUARD, JOB_ORDER, JobId, JobQueue, JobRule, Jobs, PIECE, Position, SIEVE, TURN};
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "scan",
    summary: "Ready connections by offset from the last one, wrapping.",
    source: "server-side-scheduling-2002, 4, Opt 2",
    conduct: jobs::CONDUCT,
    params: &[PIECE, TURN, GUARD, JOB_ORDER, SIEVE],
    build: |params, setup| Ok(Jobs::boxed(params, setup, Scan, Nanos::ZERO)),
};

struct Scan;

impl JobRule for Scan {
    const WAITS: bool = false;
    const ONE_ACCESS: bool = false;

    fn round(&self, queue: &JobQueue, round: &mut VecDeque<JobId>) {
        let last = queue.last;
        let smaller = queue.ascending(Position::default()).take_while(|(p, _)| *p < last);
        round.extend(queue.ascending(last).chain(smaller).map(|(_, id)| id));
    }
}
