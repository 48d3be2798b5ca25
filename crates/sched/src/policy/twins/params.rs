//! The parameters of `twins`.

use crate::policy::ParamInfo;
use crate::policy::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};

pub(super) const PARAMS: &[ParamInfo] = &[
    ParamInfo {
        name: "window_us",
        default: "2000",
        range: Range::Integer(10, 2_000_000),
        doc: "Length of a window, microseconds.",
    },
    ParamInfo {
        name: "timer",
        default: "shared",
        range: Range::Choice(&["shared", "local"]),
        doc: "What windows follow: the time of day, which nodes share, or each node's own timer from its start.",
    },
    ParamInfo {
        name: "order",
        default: "rotation",
        range: Range::Choice(&["rotation", "permutation"]),
        doc: "Each node's order of servers: the rotation by its rank, or the rank-th lexicographic permutation.",
    },
    ParamInfo {
        name: "in_flight_per_server",
        default: "0",
        range: Range::Integer(0, 4096),
        doc: "Batches in flight at a server at most; 0: as the server is configured.",
    },
    ParamInfo {
        name: "order_within",
        default: "arrival",
        range: Range::Choice(&["arrival", "offset"]),
        doc: "Order of a server's requests: of arrival, or a scan over files and offsets.",
    },
    ParamInfo { name: "merge", default: "off", range: SWITCH, doc: "Aggregate what touches at the server." },
    BATCH_REQUESTS,
    ParamInfo {
        doc: "Bytes per batch at most, with merge=on; longest hole in a stream that is anticipated.",
        ..BATCH_BYTES
    },
    ParamInfo {
        name: "guard_batches",
        default: "64",
        range: Range::Integer(0, 1_000_000),
        doc: "Batches of a server that may pass over its oldest request, with order_within=offset; 0: any number.",
    },
    ParamInfo {
        name: "work_conserving",
        default: "off",
        range: Range::Choice(&["on", "idle", "off"]),
        doc: "Serve others when the window's server has nothing or no room (on), or only while it is idle (idle).",
    },
    ParamInfo {
        name: "anticipation_us",
        default: "0",
        range: Range::Integer(0, 1_000_000),
        doc: "Longest time for which a server is held for the next request of its stream, microseconds; 0: none. \
              Needs order_within=offset or work_conserving.",
    },
];
