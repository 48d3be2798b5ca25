//! `twins`: server time windows (twins-2017, IV, Algorithm 1).
//!
//! One queue per data server, in order of arrival. Time is cut into windows of `window_us`; in each, only one
//! server's queue is served, and when it is empty the scheduler waits for requests to that server until
//! the window ends, even if others have work. Node N goes through the servers in its own order: the
//! rotation by N by default (lexicographic permutations, which the paper's wording suggests, start the first (n-1)!
//! nodes at the same server; `order=permutation` gives them). Windows are computed from the clock that nodes
//! share, never ticked, so that nodes stay in step.
//!
//! A request belongs to the server of its first byte, unsplit, as in the paper; an I/O node's `split` option
//! is ours. Refused where there is one lane only: there is nothing to coordinate.
//!
//! Wait: not work-conserving; a lane idles outside its window, at most (n-1) windows of every n. With nothing
//! queued no timer runs. Of its own server's requests only older ones go before it; how many of other servers' do
//! meanwhile depends on them, so that bound is one of time. The first request of a queue leaves within n windows if its server has room then; the k-th
//! within k times that.

use std::collections::VecDeque;

use super::params::Range;
use super::{Choice, ParamInfo, Params, Policy, PolicyError, PolicyInfo, View, WaitBound, WaitReason};
use crate::spec::PolicySpec;
use crate::table::Slot;
use crate::types::{LaneId, Nanos};

pub(super) const INFO: PolicyInfo = PolicyInfo {
    name: "twins",
    summary: "Coordinated time windows: each I/O node serves one data server at a time.",
    source: "twins-2017, IV, Algorithm 1",
    params: &[
        ParamInfo {
            name: "window_us",
            default: "2000",
            range: Range::Integer(10, 2_000_000),
            doc: "Length of a window, microseconds.",
        },
        ParamInfo {
            name: "order",
            default: "rotation",
            range: Range::Choice(&["rotation", "permutation"]),
            doc: "Each node's order of servers: the rotation by its rank, or the rank-th lexicographic permutation.",
        },
    ],
    build: |params, setup| {
        if setup.lanes < 2 {
            return Err(PolicyError::Unsuitable {
                policy: "twins",
                why: "it takes turns between data servers and this server has one lane only; use it on an I/O node \
                      in front of at least two data servers"
                    .into(),
            });
        }
        let order = match params.text("order") {
            "permutation" => permutation(setup.lanes, setup.node_rank),
            _ => (0..setup.lanes)
                .map(|i| LaneId(((u32::from(i) + setup.node_rank) % u32::from(setup.lanes)) as u16))
                .collect(),
        };
        Ok(Box::new(Twins {
            window: Nanos::from_micros(params.integer("window_us")),
            order,
            queues: vec![VecDeque::new(); usize::from(setup.lanes)],
            queued: 0,
            params: params.clone(),
        }))
    },
};

struct Twins {
    params: Params,
    window: Nanos,
    /// The servers in this node's order.
    order: Vec<LaneId>,
    queues: Vec<VecDeque<Slot>>,
    queued: usize,
}

/// The `rank`-th permutation of `0..n` in lexicographic order, counting from 0 and wrapping.
fn permutation(n: u16, rank: u32) -> Vec<LaneId> {
    let mut left: Vec<LaneId> = (0..n).map(LaneId).collect();
    let mut rank = u128::from(rank);
    let mut order = Vec::with_capacity(left.len());
    while !left.is_empty() {
        // (n-1)! beyond 34! does not fit; a 32-bit rank never reaches into those places anyway.
        let step = (1..left.len() as u128).try_fold(1u128, |f, i| f.checked_mul(i)).unwrap_or(u128::MAX);
        order.push(left.remove(((rank / step) % left.len() as u128) as usize));
        rank %= step;
    }
    order
}

impl Twins {
    /// The server whose window it is, and when that window ends on the local clock.
    fn current(&self, view: &View<'_>) -> (LaneId, Nanos) {
        let window = view.shared_now.0 / self.window.0;
        let lane = self.order[(window % self.order.len() as u64) as usize];
        let left = self.window.0 - view.shared_now.0 % self.window.0;
        (lane, view.now + Nanos(left))
    }
}

impl Policy for Twins {
    fn spec(&self) -> PolicySpec {
        self.params.spec()
    }

    fn enqueue(&mut self, view: &View<'_>, slot: Slot) {
        self.queued += 1;
        self.queues[view.table.lane(slot).index()].push_back(slot);
    }

    fn dequeue(&mut self, view: &View<'_>, slot: Slot) {
        let queue = &mut self.queues[view.table.lane(slot).index()];
        let before = queue.len();
        queue.retain(|s| *s != slot);
        self.queued -= before - queue.len();
    }

    fn select(&mut self, view: &View<'_>, batch: &mut Vec<Slot>) -> Choice {
        if self.queued == 0 {
            return Choice::until_event(WaitReason::Empty);
        }
        let (lane, end) = self.current(view);
        if !view.open(lane) {
            return Choice::Wait { until: end, reason: WaitReason::LanesBusy };
        }
        match self.queues[lane.index()].pop_front() {
            Some(head) => {
                self.queued -= 1;
                batch.push(head);
                Choice::Serve
            }
            None => Choice::Wait { until: end, reason: WaitReason::Window },
        }
    }

    fn wait_bound(&self, view: &View<'_>, slot: Slot) -> WaitBound {
        let ahead = view.table.older_than(slot, false);
        let round = self.window.0.saturating_mul(self.order.len() as u64);
        let batches = if view.groups() == 1 { u64::MAX } else { ahead };
        WaitBound { batches, idle: Nanos(round.saturating_mul(ahead + 1)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lanes(ids: &[u16]) -> Vec<LaneId> {
        ids.iter().copied().map(LaneId).collect()
    }

    #[test]
    fn permutations_in_lexicographic_order() {
        let want = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 1, 2]];
        for (rank, want) in want.iter().enumerate() {
            assert_eq!(permutation(3, rank as u32), lanes(want), "rank {rank}");
        }
        assert_eq!(permutation(200, u32::MAX).len(), 200);
    }

    /// The example of IV-B: with two servers, N0 goes S0, S1 and N1 goes S1, S0.
    #[test]
    fn two_nodes_start_at_different_servers() {
        for order in ["rotation", "permutation"] {
            let spec = PolicySpec::named("twins").with("order", order);
            for (rank, first) in [(0, 0), (1, 1)] {
                let setup = super::super::Setup { lanes: 2, node_rank: rank, capacity: 4 };
                let params = Params::new("twins", INFO.params, &spec.params).unwrap();
                let order = match params.text("order") {
                    "permutation" => permutation(2, rank),
                    _ => lanes(&[rank as u16, 1 - rank as u16]),
                };
                assert_eq!(order[0], LaneId(first));
                assert!((INFO.build)(&params, &setup).is_ok());
            }
        }
    }
}
