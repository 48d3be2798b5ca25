//! The parameters of `mclock`.

use crate::policy::ParamInfo;
use crate::policy::params::{BATCH_BYTES, BATCH_REQUESTS, GUARD_BATCHES, MERGE_OFF, Range};

pub(super) const PARAMS: &[ParamInfo] = &[
    ParamInfo {
        name: "rules",
        default: "default: * {each=job}",
        range: Range::Text("rules such as \"db: job=17 {reservation=500, weight=4}; rest: * {limit=200, each=user}\""),
        doc: "Settings: reservation and limit per second (0: none; up to 1e9), weight (0.001 to 1e6, default 1), \
              each=rule|job|user|client|file.",
    },
    ParamInfo {
        name: "unit",
        default: "requests",
        range: Range::Choice(&["requests", "device"]),
        doc: "What reservations and limits count per second: requests, or seconds of device time.",
    },
    MERGE_OFF,
    BATCH_REQUESTS,
    BATCH_BYTES,
    ParamInfo {
        doc: "Batches of a lane that may pass over its oldest request without a limit; 0: any number.",
        ..GUARD_BATCHES
    },
];
