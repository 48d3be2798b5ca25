//! The state that the core shares with its policy: requests, lanes and identities.

use rustc_hash::FxHashSet;

use crate::contract::CoreConfig;
use crate::names::Names;
use crate::occupied::Occupied;
use crate::policy::{self, Lane, Policy, Setup, View};
use crate::table::{Slot, Table};
use crate::types::{ConnId, LaneId, Nanos, Op};

/// State that policies read through a [`View`]; separate from the policy, which borrows it while it decides.
pub(super) struct SharedState {
    pub(super) config: CoreConfig,
    pub(super) table: Table,
    pub(super) lanes: Vec<Lane>,
    /// Lanes that have requests queued at the policy and room for a batch: the only ones worth a decision.
    pub(super) startable: Occupied,
    pub(super) names: Names,
    pub(super) not_ready: FxHashSet<ConnId>,
    pub(super) in_flight_batches: u32,
    /// Of them, those that are stuck, see [`Lane::stuck`].
    pub(super) stuck_batches: u32,
    pub(super) shared_offset_ns: i64,
    pub(super) unlimited: bool,
    pub(super) speculates: bool,
    /// The policy accounts for every request; see [`Conduct::shares`](crate::policy::Conduct::shares).
    pub(super) shares: bool,
    /// The policy that decides minds connections; see [`Conduct::minds_connections`](crate::policy::Conduct::minds_connections).
    pub(super) minds_connections: bool,
}

impl SharedState {
    pub(super) fn view(&self, now: Nanos) -> View<'_> {
        View {
            now,
            shared_now: Nanos(now.0.saturating_add_signed(self.shared_offset_ns)),
            table: &self.table,
            cost: &self.config.cost,
            names: &self.names,
            pieces: self.config.pieces,
            lanes: &self.lanes,
            startable: &self.startable,
            not_ready: &self.not_ready,
            total_open: self.unlimited
                || self.in_flight_batches - self.stuck_batches < self.config.total_requests.max(1),
            shared_space: self.config.shared_space,
        }
    }

    /// Changes the number of requests that the policy has queued for a lane.
    pub(super) fn queued(&mut self, lane: LaneId, change: i32) {
        let at = lane.index();
        self.lanes[at].queued = self.lanes[at].queued.saturating_add_signed(change);
        self.update_startable(at);
    }

    /// Batches of this kind have a limit of their own.
    pub(super) fn is_apart(&self, op: Op) -> bool {
        op == Op::Sync && self.config.lane_syncs > 0
    }

    /// The limit of syncs lets one start.
    pub(super) fn has_room_for_sync(&self, view: &View<'_>, slot: Slot) -> bool {
        let lane = &self.lanes[view.table.lane(slot).index()];
        lane.in_flight_syncs < self.config.lane_syncs && lane.hold_until <= view.now
    }

    /// Counts a batch of `bytes` on a lane as started or ended.
    pub(super) fn in_flight(&mut self, lane: LaneId, op: Op, goes: bool, bytes: u64) {
        let is_apart = self.is_apart(op);
        let l = &mut self.lanes[lane.index()];
        if is_apart {
            l.in_flight_syncs = if goes { l.in_flight_syncs + 1 } else { l.in_flight_syncs - 1 };
            return;
        }
        self.stuck_batches -= l.stuck();
        if goes {
            self.in_flight_batches += 1;
            l.in_flight_requests += 1;
            l.in_flight_bytes = l.in_flight_bytes.saturating_add(bytes);
        } else {
            self.in_flight_batches -= 1;
            l.in_flight_requests -= 1;
            l.in_flight_bytes = l.in_flight_bytes.saturating_sub(bytes);
        }
        self.stuck_batches += l.stuck();
        self.update_startable(lane.index());
    }

    /// Sets how many of the batches in flight on a lane do not count against the limits.
    pub(super) fn stuck(&mut self, lane: LaneId, batches: u32) {
        let Some(l) = self.lanes.get_mut(lane.index()) else { return };
        self.stuck_batches -= l.stuck();
        l.stuck_requests = batches;
        self.stuck_batches += l.stuck();
        self.update_startable(lane.index());
    }

    fn update_startable(&mut self, at: usize) {
        let lane = &self.lanes[at];
        self.startable.set(at, lane.queued > 0 && lane.has_room());
    }

    pub(super) fn setup(&self) -> Setup {
        Setup {
            lanes: self.lanes.len() as u16,
            shared_space: self.config.shared_space,
            node_rank: self.config.node_rank,
            started: self.config.started,
            capacity: self.table.capacity(),
            sorted_below: self.config.sorted_below,
            scheduled_below: self.config.scheduled_below,
        }
    }

    pub(super) fn apply_limits(&mut self, policy: &dyn Policy) {
        let unlimited = policy.unlimited();
        self.unlimited = unlimited;
        self.speculates = policy.speculates();
        self.shares = policy.shares();
        self.minds_connections = policy::minds_connections(&policy.acting());
        let requests = self.config.lane_requests.min(policy.lane_requests().unwrap_or(u32::MAX)).max(1);
        for lane in &mut self.lanes {
            lane.limit_requests = if unlimited { u32::MAX } else { requests };
            lane.limit_bytes = if unlimited { u64::MAX } else { self.config.lane_bytes.max(1) };
        }
        self.stuck_batches = self.lanes.iter().map(Lane::stuck).sum();
        (0..self.lanes.len()).for_each(|at| self.update_startable(at));
    }
}
