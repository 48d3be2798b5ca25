//! Time windows that cycle through the data servers (twins-2017, IV): which server has the current one, computed from
//! the shared clock, or from a timer of the node's own.

use crate::occupied::Occupied;
use crate::policy::View;
use crate::types::{LaneId, Nanos};

/// What the windows follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::policy) enum Timer {
    /// The clock that the nodes share: their windows begin at the same instants.
    Shared,
    /// The node's own: the first window begins at this instant of its clock, whatever other nodes do.
    Own(Nanos),
}

/// The windows of one node.
pub(in crate::policy) struct Rounds {
    window: Nanos,
    timer: Timer,
    /// The servers in this node's order.
    order: Vec<LaneId>,
    /// Each server's position in that order.
    place_of: Vec<u16>,
    /// Positions of servers with queued requests.
    occupied: Occupied,
}

impl Rounds {
    /// Windows of a given length in a given order of servers.
    pub fn new(window: Nanos, timer: Timer, order: Vec<LaneId>) -> Rounds {
        let mut place_of = vec![0; order.len()];
        (0..).zip(&order).for_each(|(place, server)| place_of[server.index()] = place);
        Rounds { window, timer, occupied: Occupied::new(order.len()), order, place_of }
    }

    /// The server of the current window, and the window's end on the local clock.
    pub fn current(&self, view: &View<'_>) -> (LaneId, Nanos) {
        let time = match self.timer {
            Timer::Shared => view.shared_now.0,
            // A node that started later than now is one that started some rounds earlier.
            Timer::Own(started) => {
                let round = self.windows(self.order.len() as u64).0;
                view.now.0.saturating_add(round - started.0 % round)
            }
        };
        let (window, left) = (time / self.window.0, self.window.0 - time % self.window.0);
        (self.order[(window % self.order.len() as u64) as usize], view.now + Nanos(left))
    }

    /// The length of several windows.
    pub fn windows(&self, windows: u64) -> Nanos {
        Nanos(self.window.0.saturating_mul(windows))
    }

    /// Records whether a server has queued requests.
    pub fn set_occupied(&mut self, server: LaneId, something: bool) {
        self.occupied.set(self.place(server), something);
    }

    /// True if no server has any.
    pub fn is_empty(&self) -> bool {
        self.occupied.is_empty()
    }

    /// The servers with queued requests, in order, starting at one of them.
    pub fn occupied_from(&self, server: LaneId) -> impl Iterator<Item = LaneId> {
        self.occupied.round_from(self.place(server)).map(|place| self.order[place])
    }

    /// Windows between a server's and that of the next server with queued requests.
    pub fn skipped_after(&self, server: LaneId) -> u64 {
        let (after, places) = (self.place(server) + 1, self.order.len());
        let next = self.occupied.round_from(after % places).next().unwrap_or(after);
        ((next + places - after) % places) as u64
    }

    fn place(&self, server: LaneId) -> usize {
        self.place_of[server.index()].into()
    }
}

/// The order of the node with this rank: the servers rotated by the rank.
pub(in crate::policy) fn rotation(n: u16, rank: u32) -> Vec<LaneId> {
    (0..n).map(|i| LaneId(((u32::from(i) + rank % u32::from(n)) % u32::from(n)) as u16)).collect()
}

/// The `rank`-th permutation of `0..n` in lexicographic order, counting from 0 and wrapping.
pub(in crate::policy) fn permutation(n: u16, rank: u32) -> Vec<LaneId> {
    let mut left: Vec<LaneId> = (0..n).map(LaneId).collect();
    let mut rank = u128::from(rank);
    let mut order = Vec::with_capacity(left.len());
    while !left.is_empty() {
        // (n-1)! beyond 34! does not fit; a 32-bit rank never reaches those positions.
        let step = (1..left.len() as u128).try_fold(1u128, |f, i| f.checked_mul(i)).unwrap_or(u128::MAX);
        order.push(left.remove(((rank / step) % left.len() as u128) as usize));
        rank %= step;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutations_in_lexicographic_order() {
        let want = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0], [0, 1, 2]];
        for (rank, want) in want.iter().enumerate() {
            assert_eq!(permutation(3, rank as u32), want.map(LaneId), "rank {rank}");
        }
        assert_eq!(permutation(200, u32::MAX).len(), 200);
    }

    /// The example of IV-B: with two servers, N0 visits S0, S1 and N1 visits S1, S0.
    #[test]
    fn two_nodes_start_at_different_servers() {
        for order in [rotation, permutation] {
            assert_eq!([order(2, 0), order(2, 1)], [[0, 1], [1, 0]].map(|o| o.map(LaneId).to_vec()));
        }
    }
}
