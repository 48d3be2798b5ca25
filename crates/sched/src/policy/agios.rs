//! `agios` and `agios-causal`: `mlf` that waits for requests predicted from a recorded run (agios-2013, IV).
//!
//! `agios` follows the paper: the `mlf` of agios-2013 (no windows), and before a virtual request is served, a check
//! whether it has reached the size predicted for it; if not it waits, once, for the predicted span minus the time since
//! its first request arrived (`parts/foreseen.rs`). The paper limits neither the wait nor how far from the predicted
//! instant a request still matches its prediction; `wait_us` and `bound_percent` do.
//!
//! `agios-causal` is ours, for shallow hand-offs below the scheduler, where the paper's rule waits for requests that
//! cannot arrive before others are served. It has the windows of `mlf` and waits only for requests that are due: what
//! they followed in the recorded run has just happened (`parts/due.rs`). It waits where the last batch ended, in place
//! of `mlf`'s anticipation, and for the neighbours of the virtual request that goes next; for `wait_us` at most before
//! each batch; and only where measurements show that this pays (`parts/worth.rs`). Where processes each read a part of a
//! file and lanes take one batch at a time, the drive reads on and that goes first (`parts/segments.rs`). Lanes that share one space wait for nothing.
//!
//! Without a recorded run, and for files and requests outside it, both equal `mlf` with these parameters.
//!
//! Wait: as `mlf`; before each batch the lane may idle `wait_us` longer.

use super::mlf::{self, params};
use super::params::Range;
use super::parts::due::Due;
use super::parts::foreseen::Foreseen;
use super::parts::tenure::Foresight;
use super::{Conduct, ParamInfo, Params, PolicyInfo};
use crate::types::Nanos;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "agios",
    summary: "mlf that waits once for the aggregation predicted from a recorded run.",
    source: "agios-2013, IV",
    conduct: CONDUCT,
    params: LITERAL_PARAMS,
    build: |given, setup| {
        let overlap = given.integer("overlap_percent") as f64 / 100.0;
        let limits = (given.integer("batch_requests"), given.integer("batch_bytes"));
        let foreseen = Foreseen::new(overlap, wait(given), limits, bound_part(given), setup.lanes.into());
        mlf::build(given, setup, Foresight::Aggregations(foreseen))
    },
};

pub(super) const CAUSAL: PolicyInfo = PolicyInfo {
    name: "agios-causal",
    summary: "mlf that waits briefly for predicted requests whose causes have happened, where that pays.",
    source: "ours, after agios-2013, IV",
    conduct: CONDUCT,
    params: CAUSAL_PARAMS,
    build: |given, setup| {
        // With passes that take time, quanta decide who goes.
        let in_parts = given.integer("pass_us") == 0;
        let batch = given.integer("batch_requests");
        let due = Due::new(wait(given), batch, bound_part(given), setup.lanes.into(), in_parts);
        mlf::build(given, setup, Foresight::Due(due))
    },
};

const CONDUCT: Conduct = Conduct {
    idles: |_| true,
    ..Conduct::conserving(
        "(older requests of the lane + 1) × (256 × guard_batches + 1) batches, and wait_us before each",
    )
};

const LITERAL_PARAMS: &[ParamInfo] = &literal_params();
const CAUSAL_PARAMS: &[ParamInfo] = &causal_params();

const BOUND: ParamInfo = ParamInfo {
    name: "bound_percent",
    default: "100",
    range: Range::Integer(0, 1_000_000),
    doc: "A request is the predicted one if it comes no further from the predicted time since its file's first than this \
          part of it and 1 s.",
};

const WAIT: ParamInfo = ParamInfo {
    name: "wait_us",
    default: "1000000",
    range: Range::Integer(1, 60_000_000),
    doc: "Longest wait for predicted neighbours, microseconds; no longer aggregation is predicted.",
};

const OVERLAP: ParamInfo = ParamInfo {
    name: "overlap_percent",
    default: "50",
    range: Range::Integer(0, 100),
    doc: "How much of a wait other queues are expected to use (the paper's factor alpha) until that is measured.",
};

const fn literal_params() -> [ParamInfo; 15] {
    let [a, b, c, d, e, mut window, mut anticipation, f, g, h, i, j] = params("8192", "off", "0");
    (window.default, anticipation.default) = ("0", "0");
    [a, b, c, d, e, window, anticipation, f, g, h, i, j, OVERLAP, WAIT, BOUND]
}

const fn causal_params() -> [ParamInfo; 14] {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = params("8192", "off", "0");
    [a, b, c, d, e, f, g, h, i, j, k, l, ParamInfo { default: "2000", ..WAIT }, BOUND]
}

fn wait(given: &Params) -> Nanos {
    Nanos::from_micros(given.integer("wait_us"))
}

fn bound_part(given: &Params) -> f64 {
    given.integer("bound_percent") as f64 / 100.0
}
