//! The parameters of `mlf` and of the policies that are `mlf` with more.

use crate::policy::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use crate::policy::{ParamInfo, Params};
use crate::types::Nanos;

/// The parameters, with the defaults in which `mlf` and `aioli` differ.
pub(in crate::policy) const fn params(
    quantum_bytes: &'static str,
    adapt: &'static str,
    hold_us: &'static str,
) -> [ParamInfo; 12] {
    [
        ParamInfo {
            name: "quantum_bytes",
            default: quantum_bytes,
            range: Range::Integer(512, 1 << 30),
            doc: "Each pass adds the time to process this many bytes.",
        },
        ParamInfo { doc: "Requests per virtual request at most.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per virtual request at most.", ..BATCH_BYTES },
        ParamInfo {
            name: "growth",
            default: "fixed",
            range: Range::Choice(&["fixed", "double"]),
            doc: "How quanta grow: a fixed step (paper) or doubling (public library).",
        },
        ParamInfo {
            name: "pass_us",
            default: "0",
            range: Range::Integer(0, 10_000_000),
            doc: "Time that a pass takes, microseconds; 0: none.",
        },
        ParamInfo {
            name: "window_us",
            default: "60000",
            range: Range::Integer(0, 10_000_000),
            doc: "Dedicated window: how long a queue whose turn it is keeps its lane while it has requests, \
                  microseconds; 0: one batch a pass.",
        },
        ParamInfo {
            name: "anticipation_us",
            default: "2000",
            range: Range::Integer(0, 1_000_000),
            doc: "How long a lane is held within a window for the next request of a synchronous process at most, \
                  microseconds; 0: not.",
        },
        ParamInfo {
            name: "guard_batches",
            default: "16",
            range: Range::Integer(0, 1_000_000),
            doc: "Batches of a queue that may pass over its oldest request; 0: any number.",
        },
        ParamInfo {
            name: "weights",
            default: "",
            range: Range::Text("rules such as \"a: job=17 {weight=4}; b: * {weight=1}\", weights from 0.01 to 100"),
            doc: "How fast quanta grow and how long windows last, by application; the first rule that fits counts.",
        },
        ParamInfo { name: "adapt", default: adapt, range: SWITCH, doc: "A file's next quantum follows its use." },
        ParamInfo {
            name: "hold_us",
            default: hold_us,
            range: Range::Integer(0, 1_000_000),
            doc: "How long a run shorter than the file's usual ones is held for its neighbours, microseconds; 0: not.",
        },
        ParamInfo {
            name: "reads_ahead_requests",
            default: "0",
            range: Range::Integer(0, 1 << 20),
            doc: "A write is ordered as if it had arrived this many requests later.",
        },
    ]
}

/// Those of `mlf` itself.
pub(super) const MLF_PARAMS: [ParamInfo; 13] = {
    let [a, b, c, d, e, f, g, h, i, j, k, l] = params("8192", "off", "0");
    [a, b, c, d, e, f, g, h, i, j, k, l, DWELL]
};

const DWELL: ParamInfo = ParamInfo {
    name: "dwell_us",
    default: "0",
    range: Range::Integer(0, 1_000_000),
    doc: "How long a lane that takes one batch at a time dwells where it has read for a process that goes on, so that the \
          drive reads on, microseconds; 0: not.",
};

/// How long a lane dwells; 0: it does not.
pub(super) fn dwell(params: &Params) -> Nanos {
    Nanos::from_micros(params.integer(DWELL.name))
}
