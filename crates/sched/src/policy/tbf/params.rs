//! The parameters of `tbf`.

use crate::policy::ParamInfo;
use crate::policy::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_OFF, Range};

pub(super) const PARAMS: &[ParamInfo] = &[
    ParamInfo {
        name: "rules",
        default: "default: * {requests_per_s=10000, each=client, borrow=on}",
        range: Range::Text(
            "rules such as \"big: job=17|18 {bytes_per_s=1e8, burst=4e6, each=job}; rest: * {device=0.5}\"",
        ),
        doc: "Settings: one of requests_per_s (0.001 to 1e9), bytes_per_s (1 to 1e15), device (device seconds per \
              second, 1e-6 to 1e6); burst (requests, bytes or device seconds; default 3 requests or 0.1 s); \
              each=rule|job|user|client|file; borrow=on|off (default off); under=RULE; over=server|all \
              (default server).",
    },
    MERGE_OFF,
    BATCH_REQUESTS,
    BATCH_BYTES,
    ParamInfo {
        doc: "Batches of a lane that may pass over its oldest request without a hard limit; 0: any number.",
        ..GUARD_BATCHES
    },
];
