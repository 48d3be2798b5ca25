//! `wscan`: like `scan`, but only jobs near the last offset; if there are none, the nearest one (Opt 3).
//!
//! Jobs, pieces, turns and guards: see `jobs.rs`. A round consists of the ready jobs whose next access lies within half
//! of `window_bytes` on either side of the last offset, inclusive, in ascending order; the window is fixed during a
//! round. If it is empty, only the nearest job is served: the nearest of the same file (the higher of two equally
//! near), or else the first of the next file. The paper's window was the size of the cache, 56 MB; the default is that
//! size in whole mebibytes and should be set to the size of the server's cache. The window starves jobs outside it,
//! which the guard prevents.

use std::collections::VecDeque;

use super::PolicyInfo;
use super::params::{ParamInfo, Range};
use super::parts::jobs::{self, GUARD, JOB_ORDER, JobId, JobQueue, JobRule, Jobs, PIECE, Position, SIEVE, TURN};
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "wscan",
    summary: "Ready connections within a window around the last offset, ascending; else the nearest.",
    source: "server-side-scheduling-2002, 4, Opt 3",
    conduct: jobs::CONDUCT,
    params: &[
        ParamInfo {
            name: "window_bytes",
            default: "58720256",
            range: Range::Integer(0, 1 << 50),
            doc: "Width of the window around the last offset, bytes; the size of the server's cache.",
        },
        PIECE,
        TURN,
        GUARD,
        JOB_ORDER,
        SIEVE,
    ],
    build: |params, setup| {
        Ok(Jobs::boxed(params, setup, WindowScan { half_bytes: params.integer("window_bytes") / 2 }, Nanos::ZERO))
    },
};

struct WindowScan {
    half_bytes: u64,
}

impl JobRule for WindowScan {
    const WAITS: bool = false;
    const ONE_ACCESS: bool = false;

    fn round(&self, queue: &JobQueue, round: &mut VecDeque<JobId>) {
        let last = queue.last;
        let low = Position { offset: last.offset.saturating_sub(self.half_bytes), ..last };
        let high = Position { offset: last.offset.saturating_add(self.half_bytes), ..last };
        round.extend(queue.ascending(low).take_while(|(p, _)| *p <= high).map(|(_, id)| id));
        if round.is_empty() {
            round.extend(nearest(queue));
        }
    }
}

/// The job nearest to the last offset.
fn nearest(queue: &JobQueue) -> Option<JobId> {
    let last = queue.last;
    let above = queue.at_or_after(last);
    let below = queue.before(last).filter(|(p, _)| p.file == last.file);
    let in_file = above.filter(|(p, _)| p.file == last.file);
    let chosen = match (in_file, below) {
        (Some((a, _)), Some(near)) if last.offset - near.0.offset < a.offset - last.offset => Some(near),
        (Some(near), _) | (None, Some(near)) => Some(near),
        (None, None) => above.or_else(|| queue.at_or_after(Position::default())),
    };
    // Among jobs at that position, the earliest.
    chosen.and_then(|(p, _)| queue.at_or_after(p)).map(|(_, id)| id)
}
