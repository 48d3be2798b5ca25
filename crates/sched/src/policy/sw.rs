//! `sw`: server-side coordination by windows (H. Song et al., SC 2011, as in the public AGIOS library).
//!
//! Data servers that all serve the same application at a time end its wait for all of them sooner. They agree without
//! communication by a common rule: requests are ordered by the *window* of `window_ms` in which they arrived, then by
//! application.
//!
//! Our choices where the sources are silent:
//! - Windows are cut on the servers' shared clock, and applications, then files, are ordered by stable key, so that all
//!   servers have the same order. A request keeps the window of its first arrival across a policy switch.
//! - Within an application: file by file, reads before writes, in offset order, touching requests aggregated
//!   (the papers note that Song's order leaves spatial locality unused: agios-2013, II).
//! - No request waits for a window to end: the order only ranks the queued requests.
//!
//! Wait: earlier windows go first, and within a window every lower key, even if it arrives later. So after
//! `guard_batches` batches of a lane that passed over its oldest request, that request goes next (0 disables the guard;
//! then the bound is what arrives within one window). Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use super::parts::ranked::{ByRank, Contents, RankRule};
use super::{Conduct, ParamInfo, PolicyInfo, View};
use crate::table::Slot;
use crate::types::{FileId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "sw",
    summary: "Server-side coordination: by arrival window, then application, then file and offset.",
    source: "H. Song et al., SC 2011 (AGIOS, public library: SW)",
    conduct: Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches"),
    params: &[
        ParamInfo {
            name: "window_ms",
            default: "1000",
            range: Range::Integer(1, 3_600_000),
            doc: "Length of an arrival window, milliseconds.",
        },
        ParamInfo { name: "merge", default: "on", range: SWITCH, doc: "Aggregate what touches." },
        BATCH_REQUESTS,
        BATCH_BYTES,
        ParamInfo {
            name: "guard_batches",
            default: "1024",
            range: Range::Integer(0, 1_000_000),
            doc: "Batches of a lane that may pass over its oldest request; 0: any number.",
        },
    ],
    build: |params, setup| {
        Ok(ByRank::boxed(params, setup, Windows { window: Nanos::from_millis(params.integer("window_ms")) }))
    },
};

/// In order of service: stable keys, then the file's interned identity for files without names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Key {
    window: u64,
    job: u64,
    file_key: u64,
    op: Op,
    file: FileId,
}

struct Windows {
    window: Nanos,
}

impl RankRule for Windows {
    type Key = Key;
    type Rank = Key;

    fn rank(key: Key, _: Contents) -> Key {
        key
    }

    fn queue(&mut self, view: &View<'_>, slot: Slot) -> (Key, u64) {
        let who = view.who(slot);
        let offset_ns = view.shared_now.0.wrapping_sub(view.now.0) as i64;
        let arrival = view.table.arrival(slot).0.saturating_add_signed(offset_ns);
        let window = arrival / self.window.0;
        (Key { window, job: who.job, file_key: who.file, op: who.op, file: view.table.file(slot) }, 0)
    }
}
