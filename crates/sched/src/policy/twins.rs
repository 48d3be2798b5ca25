//! `twins`: server time windows (twins-2017, IV, Algorithm 1), with optional improvements that are off by default.
//!
//! One queue per data server, in order of arrival. Time is divided into windows of `window_us`; in each, only one
//! server's queue is served, and when that is empty the scheduler waits for requests to that server until the window
//! ends, even if others have work. Node N visits the servers in its own order. Windows are computed, never ticked. Each of
//! n servers has every n-th window; every queue has a server.
//!
//! Two things differ from the paper by default, and `timer=local order=permutation` is the paper's rule:
//! - `timer`: by default windows follow the shared clock, so that nodes stay in step. The paper's nodes each reset a timer
//!   of their own at the end of a window (Algorithm 1, line 3), and the first one starts with the node (line 1): `local`.
//!   A switch of the policy does not start it anew.
//! - `order`: the rotation by N by default. The paper's "N-th permutation of the servers list" (IV-B) is taken to be the
//!   lexicographic one, counted from 0: `permutation`. It starts the first (n-1)! nodes at the same server.
//!
//! Nodes and servers that come or go change rank and windows at an instant on which the nodes agree (`parts/rounds.rs`,
//! `node::members`). A server that is gone or hangs has no window; requests for it are served whenever it has room.
//!
//! A request belongs to the server of its first byte, unsplit, as in the paper; an I/O node's `split` option is ours.
//! Refused with a single lane: there is nothing to coordinate.
//!
//! Our options, usable alone or together:
//! - `in_flight_per_server`: fewer batches at a server than configured. With one, all waiting requests can be ordered
//!   and merged until the server is free.
//! - `merge=on`: requests that touch are merged. Contiguity is judged in the server's own offsets: if requests are
//!   split, neighbouring stripes of one server are contiguous.
//! - `order_within=offset`: a server's requests are served by a scan: file by file (by stable key), reads before
//!   writes, ascending from the end of the last batch, wrapping. After `guard_batches` batches that passed over the
//!   server's oldest request, that request goes next (0 disables the guard).
//! - `work_conserving=on`: if the window's server has nothing queued or no room, the others are served in the order of
//!   their windows. The window then only decides who goes first. `work_conserving=idle` serves them only while the
//!   window's server has nothing queued and nothing in flight, so that nodes keep to their servers.
//! - `anticipation_us`: when the last batch at the window's server has completed and no queued request continues it,
//!   the server is held for at most this long, within its window, for the stream's next request: one of the same file
//!   and operation that starts at most `batch_bytes` behind the end of the batch. With `order_within=arrival` only an
//!   empty queue is held for. Other servers get nothing meanwhile. Streams for which holds do not pay get none
//!   (`parts/server_holds.rs`, `parts/anticipation.rs`).
//!
//! Wait: not work-conserving by default; a lane idles outside its window, at most (n-1) windows of every n. With
//! nothing queued no timer runs. Among its own server's requests only older ones precede it (in offset order: as many
//! as the guard allows); those of other servers in the meantime are not limited, so the bound is one of time. The first
//! request of a queue leaves within n windows if its server then has room; the k-th within k times that. A hold costs
//! at most `anticipation_us`, and never more than the rest of one window.

mod params;

use std::any::Any;

use super::parts::rounds::{OrderOf, Rounds, Timer, permutation, rotation};
use super::parts::server_holds::ServerHolds;
use super::parts::server_queues::ServerQueues;
use super::{Choice, Conduct, Done, Params, Policy, PolicyError, PolicyInfo, Setup, View, WaitBound, WaitReason};
use crate::members::Members;
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{LaneId, Nanos};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "twins",
    summary: "Coordinated time windows: each I/O node serves one data server at a time.",
    source: "twins-2017, IV, Algorithm 1",
    conduct: Conduct {
        idles: |params| params.text("work_conserving") != "on" || params.integer("anticipation_us") > 0,
        ..Conduct::conserving(
            "older requests of its server (in offset order: as the guard allows), a round of windows each",
        )
    },
    params: params::PARAMS,
    build,
};

fn build(params: &Params, setup: &Setup) -> Result<Box<dyn Policy>, PolicyError> {
    if setup.lanes < 2 {
        let why = "it takes turns between data servers and this server has one lane only; use it on an I/O node in \
                   front of at least two data servers";
        return Err(PolicyError::Unsuitable { policy: "twins", why: why.into() });
    }
    let by_offset = params.text("order_within") == "offset";
    if params.integer("anticipation_us") > 0 && !by_offset && params.text("work_conserving") == "off" {
        let remedy = "0: without order_within=offset or work_conserving there is nothing to hold a server from";
        return Err(params.refuse("anticipation_us", remedy));
    }
    let queues = ServerQueues::new(by_offset, params, setup);
    let order: OrderOf = match params.text("order") {
        "permutation" => permutation,
        _ => rotation,
    };
    let timer = match params.text("timer") {
        "local" => Timer::Own(setup.started),
        _ => Timer::Shared,
    };
    Ok(Box::new(Twins {
        rounds: Rounds::new(
            Nanos::from_micros(params.integer("window_us")),
            timer,
            (setup.lanes, setup.node_rank),
            order,
        ),
        queues,
        lane_requests: u32::try_from(params.integer("in_flight_per_server")).ok().filter(|n| *n > 0),
        holds: ServerHolds::new(params, setup),
        others: match params.text("work_conserving") {
            "on" => Others::Always,
            "idle" => Others::WhileIdle,
            _ => Others::Never,
        },
        params: params.clone(),
    }))
}

struct Twins {
    params: Params,
    rounds: Rounds,
    queues: ServerQueues,
    lane_requests: Option<u32>,
    holds: ServerHolds,
    others: Others,
}

/// When servers are served outside their windows.
#[derive(Clone, Copy)]
enum Others {
    Never,
    WhileIdle,
    Always,
}

impl Twins {
    /// True if the server has nothing queued and nothing in flight.
    fn is_idle(&self, view: &View<'_>, lane: LaneId) -> bool {
        self.queues.is_empty(lane) && view.lanes[lane.index()].in_flight_requests == 0
    }
}

impl Policy for Twins {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn lane_requests(&self) -> Option<u32> {
        self.lane_requests
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.rounds.set_occupied(view.table.lane(slot), true);
        self.queues.insert(view, view.table.lane(slot), slot);
        self.holds.arrived(view, slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        self.queues.remove(view, slot);
        let lane = view.table.lane(slot);
        self.rounds.set_occupied(lane, !self.queues.is_empty(lane));
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        if self.rounds.is_empty() {
            return Choice::until_event(WaitReason::Empty);
        }
        let (home, end) = self.rounds.current(view);
        if view.open(home)
            && let Some(until) = self.holds.until(view, &self.queues, home)
        {
            return Choice::Wait { until, reason: WaitReason::Hold };
        }
        let others = match self.others {
            Others::Always => true,
            Others::WhileIdle => self.is_idle(view, home),
            Others::Never => false,
        };
        let in_turn = self.rounds.occupied_from(home).take_while(|server| others || *server == home);
        let mut servers = in_turn.chain(self.rounds.occupied_without_window());
        if let Some(server) = servers.find(|server| view.open(*server))
            && self.queues.take(view, server, batch)
        {
            drop(servers);
            self.rounds.set_occupied(server, !self.queues.is_empty(server));
            return Choice::Serve;
        }
        let reason = if view.open(home) { WaitReason::Window } else { WaitReason::LanesBusy };
        let until = match self.others {
            // No wake-up is needed for windows of servers without requests.
            Others::Never => self.rounds.next_after(home, end).min(self.rounds.changes_at(view)),
            _ => end,
        };
        Choice::Wait { until, reason }
    }

    fn window(&self, view: &View<'_>) -> u64 {
        self.rounds.number(view).saturating_add(1)
    }

    fn completed(&mut self, view: &View<'_>, done: &Done<'_>) {
        self.holds.completed(view, self.rounds.current(view), done);
    }

    fn members(&mut self, view: &View<'_>, members: &Members) {
        self.rounds.members(view, members);
    }

    /// Keeps the accounts of streams and the positions of scans.
    fn take_over(&mut self, _: &View<'_>, old: Box<dyn Any>) {
        let Ok(old) = old.downcast::<Twins>() else { return };
        self.queues.take_over(old.queues);
        self.holds.take_over(old.holds);
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let batches = self.queues.wait_bound(view.table.older_than(slot, false));
        // A hold lasts at most to the end of a window, and there is one per completed batch.
        let in_flight = u64::from(view.lanes[view.table.lane(slot).index()].in_flight_requests);
        let windows = match self.holds.any() {
            true => batches.saturating_add(1).saturating_mul(2).saturating_add(in_flight),
            false => batches.saturating_add(1),
        };
        let round = self.rounds.windows(view.lanes.len() as u64);
        WaitBound { idle: Nanos(round.0.saturating_mul(windows)), ..WaitBound::of_batches(batches) }
    }
}
