//! `to` and `to-agg`: time order (AGIOS, public library version 2).
//!
//! `to` serves all requests in strict order of arrival, one per batch. `to-agg` is the same with aggregation: the
//! oldest request takes along the requests that touch it, in offset order.
//!
//! The sources do not cover several lanes. Here the oldest request whose lane has room goes next, whatever its lane; a
//! full lane holds back only its own requests. (`fifo` serves the lanes in turn.) On one lane `to` is `fifo` and
//! `to-agg` is `fifo merge=on`; all four share their implementation.
//!
//! Wait: at most the older requests of its lane. Work-conserving.

use super::fifo::Fifo;
use super::params::{BATCH_BYTES, BATCH_REQUESTS};
use super::{Conduct, ParamInfo, PolicyInfo};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "to",
    summary: "Time order: strict order of arrival over all lanes, one request a batch.",
    source: "AGIOS, public library version 2 (TO)",
    conduct: Conduct::conserving("what arrived earlier on the lane"),
    params: &[],
    build: |params, setup| Ok(Fifo::boxed(params, setup, false, None)),
};

pub(super) const AGGREGATING: PolicyInfo = PolicyInfo {
    name: "to-agg",
    summary: "Time order; the oldest request takes along what touches it.",
    source: "AGIOS, public library version 2 (TO-agg)",
    conduct: Conduct::conserving("what arrived earlier on the lane"),
    params: &[
        ParamInfo { doc: "Requests per batch at most.", ..BATCH_REQUESTS },
        ParamInfo { doc: "Bytes per batch at most.", ..BATCH_BYTES },
    ],
    build: |params, setup| Ok(Fifo::boxed(params, setup, true, None)),
};
