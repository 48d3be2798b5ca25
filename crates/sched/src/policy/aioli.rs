//! `aioli`: `mlf` with the parts of aIOLi that agios-2013 left out (aioli-2006, part 2), and the defaults of the public
//! library: adapted quanta (`adapt`, `parts/quanta.rs`) and, which is ours, short runs held for their neighbours
//! (`hold_us`, `parts/holds.rs`).
//!
//! Wait: as `mlf`.

use super::PolicyInfo;
use super::mlf::{self, params};
use super::parts::tenure::Foresight;

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "aioli",
    summary: "mlf with adapted quanta and short holds for synchronous parallel applications.",
    source: "aioli-2006, part 2; defaults of the public library",
    conduct: mlf::CONDUCT,
    params: &params("65536", "on", "900"),
    build: |params, setup| mlf::build(params, setup, Foresight::None),
};
