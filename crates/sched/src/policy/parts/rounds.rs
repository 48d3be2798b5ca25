//! Time windows that cycle through the data servers (twins-2017, IV): which server has the current one, computed from
//! the shared clock, or from a timer of the node's own.
//!
//! Servers that are gone or hang have no window: the others share the time. Who has one changes for all nodes at the same
//! instant of shared time ([`Members`]), which is compared with the present whenever something is decided, like a window's end.

use crate::members::Members;
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

/// The order of a number of servers at the node of some rank, as indices below that number.
pub(in crate::policy) type OrderOf = fn(u16, u32) -> Vec<LaneId>;

/// Who has windows, in which order.
struct Turns {
    /// The servers in this node's order, those without a window behind the others.
    order: Vec<LaneId>,
    /// How many have one.
    windows: usize,
    /// Each server's position in that order.
    place_of: Vec<u16>,
}

impl Turns {
    fn new(servers: u16, rank: u32, absent: &[LaneId], order_of: OrderOf) -> Turns {
        let mut is_absent = vec![false; servers.into()];
        for server in absent {
            if let Some(is_absent) = is_absent.get_mut(server.index()) {
                *is_absent = true;
            }
        }
        let (away, there): (Vec<LaneId>, Vec<LaneId>) =
            (0..servers).map(LaneId).partition(|server| is_absent[server.index()]);
        let (away, there) = if there.is_empty() { (there, away) } else { (away, there) };
        let turns = order_of(there.len() as u16, rank).into_iter().map(|nth| there[nth.index()]);
        let order: Vec<LaneId> = turns.chain(away).collect();
        let mut place_of = vec![0; order.len()];
        (0..).zip(&order).for_each(|(place, server)| place_of[server.index()] = place);
        Turns { order, windows: there.len(), place_of }
    }

    fn place(&self, server: LaneId) -> usize {
        self.place_of[server.index()].into()
    }
}

/// The windows of one node.
pub(in crate::policy) struct Rounds {
    window: Nanos,
    timer: Timer,
    order_of: OrderOf,
    turns: Turns,
    /// Those from an instant of shared time on.
    next: Option<(Nanos, Turns)>,
    /// Positions of servers with queued requests.
    occupied: Occupied,
}

impl Rounds {
    /// Windows of a given length over so many servers, at the node of this rank.
    pub fn new(window: Nanos, timer: Timer, (servers, rank): (u16, u32), order_of: OrderOf) -> Rounds {
        let turns = Turns::new(servers, rank, &[], order_of);
        Rounds { window, timer, order_of, turns, next: None, occupied: Occupied::new(servers.into()) }
    }

    /// Nodes or servers have come or gone.
    pub fn members(&mut self, view: &View<'_>, members: &Members) {
        self.look(view);
        let turns = Turns::new(self.turns.order.len() as u16, members.rank, &members.absent, self.order_of);
        self.next = Some((members.from_shared, turns));
        self.look(view);
    }

    /// Changes who has windows if the instant for that has come.
    fn look(&mut self, view: &View<'_>) {
        let Some((_, turns)) = self.next.take_if(|(from, _)| *from <= view.shared_now) else { return };
        let mut occupied = Occupied::new(turns.order.len());
        self.occupied.round_from(0).for_each(|place| occupied.set(turns.place(self.turns.order[place]), true));
        (self.turns, self.occupied) = (turns, occupied);
    }

    /// The server of the current window, and the window's end on the local clock.
    pub fn current(&mut self, view: &View<'_>) -> (LaneId, Nanos) {
        self.look(view);
        let time = self.time(view);
        let (window, left) = (time / self.window.0, self.window.0 - time % self.window.0);
        let end = (view.now + Nanos(left)).min(self.changes_at(view));
        (self.turns.order[(window % self.turns.windows as u64) as usize], end)
    }

    /// The number of the current window.
    pub fn number(&self, view: &View<'_>) -> u64 {
        self.time(view) / self.window.0
    }

    /// When who has windows changes, on the local clock; [`Nanos::MAX`]: not as far as is known.
    pub fn changes_at(&self, view: &View<'_>) -> Nanos {
        self.next.as_ref().map_or(Nanos::MAX, |(from, _)| view.now + from.since(view.shared_now))
    }

    /// The present on the clock that the windows follow.
    fn time(&self, view: &View<'_>) -> u64 {
        match self.timer {
            Timer::Shared => view.shared_now.0,
            // A node that started later than now is one that started some rounds earlier.
            Timer::Own(started) => {
                let round = self.windows(self.turns.windows as u64).0;
                view.now.0.saturating_add(round - started.0 % round)
            }
        }
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
        self.occupied.round_from(self.place(server)).map(|place| self.turns.order[place])
    }

    /// The servers with queued requests that have no window.
    pub fn occupied_without_window(&self) -> impl Iterator<Item = LaneId> {
        let (windows, order) = (self.turns.windows, &self.turns.order);
        let places = (windows < order.len()).then(|| self.occupied.round_from(windows));
        places.into_iter().flatten().take_while(move |place| *place >= windows).map(move |place| order[place])
    }

    /// When the window of the next server with queued requests begins, after that of `server`, which ends at `end`;
    /// [`Nanos::MAX`] if no such server has a window.
    pub fn next_after(&self, server: LaneId, end: Nanos) -> Nanos {
        let (after, windows) = (self.place(server) + 1, self.turns.windows);
        let next = self.occupied.round_from(after % windows).find(|place| *place < windows);
        next.map_or(Nanos::MAX, |next| end + self.windows(((next + windows - after) % windows) as u64))
    }

    fn place(&self, server: LaneId) -> usize {
        self.turns.place(server)
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

    /// Of four servers the third is gone: the others have windows in the node's order.
    #[test]
    fn who_is_gone_has_no_window() {
        let turns = Turns::new(4, 1, &[LaneId(2)], rotation);
        assert_eq!((turns.windows, turns.order), (3, [1, 3, 0, 2].map(LaneId).to_vec()));
        assert_eq!([0, 1, 2, 3].map(|lane| turns.place_of[lane]), [2, 0, 3, 1]);
        let all = Turns::new(2, 0, &[LaneId(0), LaneId(1)], rotation);
        assert_eq!((all.windows, all.order), (2, [0, 1].map(LaneId).to_vec()), "none is gone rather than all");
    }

    /// The example of IV-B: with two servers, N0 visits S0, S1 and N1 visits S1, S0.
    #[test]
    fn two_nodes_start_at_different_servers() {
        for order in [rotation, permutation] {
            assert_eq!([order(2, 0), order(2, 1)], [[0, 1], [1, 0]].map(|o| o.map(LaneId).to_vec()));
        }
    }
}
