//! `stream`: the ready jobs in order of arrival, each until its connection takes no more (Opt 1).
//!
//! Jobs, pieces, turns and guards: see `jobs.rs`. A job that becomes ready during a round waits for the next. It
//! ignores offsets; the network is kept busy and shared well.

use std::collections::VecDeque;

use super::PolicyInfo;
use super::parts::jobs::{self, GUARD, JOB_ORDER, JobId, JobQueue, JobRule, Jobs, PIECE, SIEVE, TURN};
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "stream",
    summary: "Ready connections in order of arrival, each while it takes data.",
    source: "server-side-scheduling-2002, 4, Opt 1",
    conduct: jobs::CONDUCT,
    params: &[PIECE, TURN, GUARD, JOB_ORDER, SIEVE],
    build: |params, setup| Ok(Jobs::boxed(params, setup, Stream, Nanos::ZERO)),
};

struct Stream;

impl JobRule for Stream {
    const WAITS: bool = false;
    const ONE_ACCESS: bool = false;

    fn round(&self, queue: &JobQueue, round: &mut VecDeque<JobId>) {
        round.extend(queue.by_arrival());
    }
}
