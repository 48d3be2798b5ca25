//! `sw`: server-side coordination by windows (H. Song et al., SC 2011, as in the public AGIOS library).
//!
//! Data servers that all serve the same application at a time end its wait for all of them sooner. They agree without
//! communication by a common rule: requests are ordered by the *window* of `window_ms` in which they arrived, then by
//! application.
//!
//! Our choices where the sources are silent:
//! - Windows are cut on the servers' shared clock, and applications, then files, are ordered by stable key, so that all
//!   servers have the same order. A request keeps the window of its first arrival across a policy switch.
//! - Within an application (`order_within=offset`): file by file, reads before writes, in offset order, touching requests
//!   aggregated (the papers note that Song's order leaves spatial locality unused: agios-2013, II). The public library
//!   keeps the order of arrival: `order_within=arrival`.
//! - No request waits for a window to end: the order only ranks the queued requests.
//!
//! Wait: earlier windows go first, and within a window every lower key, even if it arrives later. So after
//! `guard_batches` batches of a lane that passed over its oldest request, that request goes next (0 disables the guard;
//! then the bound is what arrives within one window). Work-conserving.

use super::params::{BATCH_BYTES, BATCH_REQUESTS, Range, SWITCH};
use super::parts::flows::Flows;
use super::parts::ranked::{ByRank, Contents, RankRule};
use super::parts::turns::Turns;
use super::{Choice, Conduct, ParamInfo, Params, Policy, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::sorted::SortedSet;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{FileId, Nanos, Op};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "sw",
    summary: "Server-side coordination: by arrival window, then application; within it by file and offset, or by arrival.",
    source: "H. Song et al., SC 2011 (AGIOS, public library: SW)",
    conduct: Conduct::conserving("(older requests of the lane + 1) × (guard_batches + 1) batches"),
    params: &[
        ParamInfo {
            name: "window_ms",
            default: "1000",
            range: Range::Integer(1, 3_600_000),
            doc: "Length of an arrival window, milliseconds.",
        },
        ParamInfo {
            name: "order_within",
            default: "offset",
            range: Range::Choice(&["offset", "arrival"]),
            doc: "Order of an application's requests within a window: by file and offset, or of arrival.",
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
        let windows = Windows { window: Nanos::from_millis(params.integer("window_ms")) };
        Ok(match params.text("order_within") {
            "arrival" => ByArrival::boxed(params, setup, windows),
            _ => ByRank::boxed(params, setup, windows),
        })
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

impl Windows {
    /// The window of a request's arrival.
    fn of(&self, view: &View<'_>, slot: Slot) -> u64 {
        let offset_ns = view.shared_now.0.wrapping_sub(view.now.0) as i64;
        view.table.arrival(slot).0.saturating_add_signed(offset_ns) / self.window.0
    }
}

impl RankRule for Windows {
    type Key = Key;
    type Rank = Key;

    fn rank(key: Key, _: Contents) -> Key {
        key
    }

    fn queue(&mut self, view: &View<'_>, slot: Slot) -> (Key, u64) {
        let who = view.who(slot);
        let window = self.of(view, slot);
        (Key { window, job: who.job, file_key: who.file, op: who.op, file: view.table.file(slot) }, 0)
    }
}

/// Window and application.
type Turn = (u64, u64);

/// Keeps the order of arrival within an application.
struct ByArrival {
    params: Params,
    windows: Windows,
    flows: Flows<Turn, (), ()>,
    /// By lane group: the flows in order of service.
    orders: Vec<SortedSet<(Turn, u32)>>,
    turns: Turns,
}

impl ByArrival {
    fn boxed(params: &Params, setup: &Setup, windows: Windows) -> Box<dyn Policy> {
        Box::new(ByArrival {
            flows: Flows::new(params, setup, params.integer("guard_batches")),
            orders: vec![SortedSet::default(); setup.lanes.into()],
            turns: Turns::default(),
            params: params.clone(),
            windows,
        })
    }

    /// Drops a flow without requests.
    fn close_if_empty(&mut self, flow: u32) {
        if self.flows.is_empty(flow) {
            let (group, turn) = self.flows.key(flow);
            self.orders[group].remove(&(turn, flow));
            self.flows.close(flow);
        }
    }

    fn take(&mut self, view: &View<'_>, first: Slot, batch: &mut Vec<Slot>) {
        let flow = self.flows.take(view, first, batch);
        self.close_if_empty(flow);
    }
}

impl Policy for ByArrival {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        let turn = (self.windows.of(view, slot), view.who(slot).job);
        let (flow, new) = self.flows.push(view, turn, slot, true);
        if new {
            self.orders[self.flows.key(flow).0].insert((turn, flow));
        }
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        if let Some(flow) = self.flows.remove(view, slot) {
            self.close_if_empty(flow);
        }
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        let mut turns = std::mem::take(&mut self.turns);
        let choice = turns.round_robin(view, |group| {
            let flow = self.flows.due(view, group).or_else(|| self.orders[group].first().map(|next| next.1))?;
            let first = self.flows.first(view, flow)?;
            if !view.open(view.table.lane(first)) {
                return Some(Choice::until_event(WaitReason::LanesBusy));
            }
            self.take(view, first, batch);
            Some(Choice::Serve)
        });
        self.turns = turns;
        choice
    }

    fn serve_lane(&mut self, view: &View<'_>, oldest: Slot, batch: &mut Vec<Slot>) -> Choice {
        self.take(view, oldest, batch);
        Choice::Serve
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        WaitBound::of_batches(self.flows.guarded_wait(view, slot))
    }
}
