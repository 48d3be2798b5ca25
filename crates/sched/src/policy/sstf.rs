//! `sstf`: all jobs by the offset of their next access, waiting for those that are not ready (Opt 4).
//!
//! The paper calls it shortest seek time first; what it does is continue at the next higher offset, wrapping, decided
//! anew after each offset; jobs at equal offsets go together. A job whose connection is not ready is waited for, since
//! the order on the disk is what matters. Jobs, pieces and guards: see `jobs.rs`; the guard serves the ready job with
//! the oldest access.
//!
//! Waiting: the lane idles while the connection whose turn it is cannot take data, for at most `patience_us` between
//! two batches; then unready jobs are skipped until they are ready. `patience_us=0` waits without limit, as the paper's
//! rule does: a connection that never takes data stops the lane for reads, and their idle time is unbounded.

use std::collections::VecDeque;

use super::params::{ParamInfo, Range};
use super::parts::jobs::{self, GUARD, JOB_ORDER, JobId, JobQueue, JobRule, Jobs, PIECE, Position, SIEVE};
use super::{Conduct, PolicyInfo};
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "sstf",
    summary: "Every connection by offset from the last one, waited for if need be.",
    source: "server-side-scheduling-2002, 4, Opt 4",
    conduct: Conduct { idles: |_| true, ..jobs::CONDUCT },
    params: &[
        ParamInfo {
            name: "patience_us",
            default: "50000",
            range: Range::Integer(0, 60_000_000),
            doc: "How long a lane idles for connections that take no data between two batches, microseconds; 0: without end.",
        },
        PIECE,
        GUARD,
        JOB_ORDER,
        SIEVE,
    ],
    build: |params, setup| {
        let patience = Nanos::from_micros(params.integer("patience_us"));
        Ok(Jobs::boxed(params, setup, ShortestSeek, patience))
    },
};

struct ShortestSeek;

impl JobRule for ShortestSeek {
    const WAITS: bool = true;
    const ONE_ACCESS: bool = true;

    fn round(&self, queue: &JobQueue, round: &mut VecDeque<JobId>) {
        let next = queue.at_or_after(queue.last).or_else(|| queue.at_or_after(Position::default()));
        if let Some((next, _)) = next {
            round.extend(queue.ascending(next).take_while(|(p, _)| *p == next).map(|(_, id)| id));
        }
    }
}
