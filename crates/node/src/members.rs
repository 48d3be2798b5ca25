//! Who takes turns: the I/O nodes of a cluster agree on which of them, and which data servers, are there.
//!
//! Every node asks the others at short intervals which view they hold and which servers hang for them. The first node that is
//! there, by number, decides: when something has changed it writes a new view that counts from an instant to come, far enough
//! off for all to have heard of it. Who hears of a newer view takes it. So all change at the same instant, and nothing pauses.
//!
//! Nobody waits for a message, and nothing but turns depends on a view: nodes that cannot hear each other hold views of their
//! own and may meet at a server; when they hear each other again the newer one wins, and the first node mends it.

use std::cmp::Reverse;

use impresario_sched::{LaneId, Members as Turns, Nanos};

use crate::grants::SILENT_AFTER;

/// A server that has said nothing for so long while requests waited hangs.
pub const HANGS_AFTER: Nanos = Nanos::from_millis(100);
/// From a view's writing to the instant from which it counts: several rounds of questions.
const LEAD: Nanos = Nanos::from_millis(1000);
/// A server must hang, or answer again, for so long before that counts: a slow one does both now and then.
const SETTLED_AFTER: Nanos = Nanos::from_millis(1000);
/// A view that counts from an instant further off is of a machine whose clock differs.
pub const LEAD_MAX: Nanos = Nanos::from_millis(10_000);
/// What views are numbered up to: of a peer's word alone no number comes near the end.
const NUMBER_MAX: u64 = 1 << 48;

/// Which nodes and servers are there, from an instant on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct View {
    /// Views are numbered; the first, of the configuration, has 0.
    pub number: u64,
    /// From when on it counts, shared time.
    pub from_shared: Nanos,
    /// The nodes that are there, by number, ascending; the first wrote the view.
    pub nodes: Vec<u16>,
    /// The lanes of servers that are gone or hang, ascending.
    pub absent: Vec<u16>,
}

impl View {
    /// Newer, or of two with one number that of the earlier node.
    fn is_before(&self, other: &View) -> bool {
        let rank = |view: &View| (view.number, Reverse(view.nodes.first().copied()), view.from_shared);
        rank(self) < rank(other)
    }

    fn says_the_same(&self, nodes: &[u16], absent: &[u16]) -> bool {
        self.nodes == nodes && self.absent == absent
    }
}

#[derive(Clone, Default, Debug)]
struct Node {
    heard: Option<Nanos>,
    /// The lanes that hang for it.
    hung: Vec<u16>,
}

/// Whether a lane hangs, as it counts, and since when it seems otherwise.
#[derive(Clone, Copy, Default, Debug)]
struct Lane {
    hangs: bool,
    otherwise: Option<Nanos>,
}

/// The nodes and servers of a cluster as one of its I/O nodes knows them.
#[derive(Debug)]
pub struct Members {
    me: u16,
    nodes: Vec<Node>,
    lanes: Vec<Lane>,
    /// The first step: before, nobody could have been heard.
    begun: Option<Nanos>,
    view: View,
    /// The driver has not been given the view.
    is_new: bool,
}

impl Members {
    /// For the I/O node `me` of `nodes` (at least 1) in front of `lanes` data servers.
    pub fn new(me: u16, nodes: u16, lanes: u16) -> Members {
        let nodes = nodes.max(me.saturating_add(1));
        let view = View { number: 0, from_shared: Nanos::ZERO, nodes: (0..nodes).collect(), absent: Vec::new() };
        Members {
            me,
            nodes: vec![Node::default(); nodes.into()],
            lanes: vec![Lane::default(); lanes.into()],
            begun: None,
            view,
            is_new: false,
        }
    }

    /// What another node is told: the view held, and the lanes that hang for this one.
    pub fn report(&self) -> (View, Vec<u16>) {
        (self.view.clone(), self.hung())
    }

    /// The view held.
    pub fn view(&self) -> &View {
        &self.view
    }

    fn hung(&self) -> Vec<u16> {
        (0..).zip(&self.lanes).filter_map(|(lane, state)| state.hangs.then_some(lane)).collect()
    }

    /// Another node answered. False if its view cannot be: clocks that differ, or nodes that the configuration here lacks.
    pub fn heard(&mut self, now: Nanos, shared_now: Nanos, node: u16, view: View, hung: Vec<u16>) -> bool {
        let lanes = self.lanes.len();
        let me = self.me;
        let Some(from) = self.nodes.get_mut(usize::from(node)).filter(|_| node != me) else { return false };
        let hung = hung.into_iter().filter(|lane| usize::from(*lane) < lanes).take(lanes).collect();
        *from = Node { heard: Some(now), hung };
        let ascends = |all: &[u16], below: usize| {
            all.is_sorted_by(|a, b| a < b) && all.last().is_none_or(|last| usize::from(*last) < below)
        };
        let can_be = view.number < NUMBER_MAX
            && view.from_shared <= shared_now + LEAD_MAX
            && !view.nodes.is_empty()
            && ascends(&view.nodes, self.nodes.len())
            && ascends(&view.absent, lanes);
        if can_be && self.view.is_before(&view) {
            (self.view, self.is_new) = (view, true);
        }
        can_be
    }

    /// Takes which lanes hang for this node, and which are gone by its configuration; to be called at short intervals (50 to
    /// 250 ms). Gives what is to count if that is new.
    pub fn step(&mut self, now: Nanos, shared_now: Nanos, hung: &[u16], gone: &[u16]) -> Option<Turns> {
        let begun = *self.begun.get_or_insert(now);
        for (lane, state) in (0..).zip(&mut self.lanes) {
            match hung.contains(&lane) != state.hangs {
                false => state.otherwise = None,
                true if now.since(*state.otherwise.get_or_insert(now)) >= SETTLED_AFTER => {
                    *state = Lane { hangs: !state.hangs, otherwise: None };
                }
                true => {}
            }
        }
        let is_there =
            |(number, node): &(u16, &Node)| *number == self.me || now.since(node.heard.unwrap_or(begun)) < SILENT_AFTER;
        let there: Vec<(u16, &Node)> = (0..).zip(&self.nodes).filter(is_there).collect();
        // Who is heard of later may be there and decide: until then nothing is known that a view could say.
        let is_settled =
            now.since(begun) >= SILENT_AFTER || there.iter().all(|(n, node)| *n == self.me || node.heard.is_some());
        let decides = there.first().is_some_and(|(number, _)| *number == self.me);
        // A clock that was set back must not keep a view from being replaced.
        let from = self.view.from_shared;
        let is_in_force = from <= shared_now || from > shared_now + LEAD_MAX;
        if is_settled && decides && is_in_force {
            let nodes: Vec<u16> = there.iter().map(|(number, _)| *number).collect();
            let mut absent = self.hung();
            absent.extend(there.iter().filter(|(n, _)| *n != self.me).flat_map(|(_, node)| &node.hung));
            absent.extend(gone.iter().filter(|lane| usize::from(**lane) < self.lanes.len()));
            absent.sort_unstable();
            absent.dedup();
            if !self.view.says_the_same(&nodes, &absent) {
                let number = self.view.number.saturating_add(1);
                (self.view, self.is_new) = (View { number, from_shared: shared_now + LEAD, nodes, absent }, true);
            }
        }
        std::mem::take(&mut self.is_new).then(|| self.turns())
    }

    /// What the view means for this node. One that it leaves out keeps the rank of its number.
    pub fn turns(&self) -> Turns {
        let rank = self.view.nodes.iter().position(|node| *node == self.me).unwrap_or(self.me.into());
        let absent = self.view.absent.iter().copied().map(LaneId).collect();
        Turns { from_shared: self.view.from_shared, rank: rank as u32, absent }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STEP: Nanos = Nanos::from_millis(100);

    /// Nodes that ask one another every 100 ms, as far as they reach each other.
    struct World {
        nodes: Vec<Members>,
        /// The clocks of the nodes differ by this, ns.
        skews: Vec<u64>,
        now: Nanos,
        /// By node: what it was last told to follow, and when.
        told: Vec<Option<(Nanos, Turns)>>,
    }

    impl World {
        fn new(nodes: u16, lanes: u16) -> World {
            World {
                nodes: (0..nodes).map(|me| Members::new(me, nodes, lanes)).collect(),
                skews: vec![0; nodes.into()],
                now: Nanos::from_millis(50_000),
                told: vec![None; nodes.into()],
            }
        }

        fn shared(&self, node: usize) -> Nanos {
            Nanos(self.now.0 + 1_000_000_000_000 + self.skews[node])
        }

        /// One round of questions, and a step of every node that is up.
        fn round(&mut self, reaches: &dyn Fn(usize, usize) -> bool, hung: &dyn Fn(usize) -> Vec<u16>) {
            self.now += STEP;
            for me in (0..self.nodes.len()).filter(|me| reaches(*me, *me)) {
                for other in (0..self.nodes.len()).filter(|other| *other != me && reaches(me, *other)) {
                    let (view, hangs) = self.nodes[other].report();
                    let shared = self.shared(me);
                    assert!(self.nodes[me].heard(self.now, shared, other as u16, view, hangs));
                }
                let shared = self.shared(me);
                if let Some(turns) = self.nodes[me].step(self.now, shared, &hung(me), &[]) {
                    self.told[me] = Some((shared, turns));
                }
            }
        }

        fn rounds(&mut self, count: u32, reaches: &dyn Fn(usize, usize) -> bool, hung: &dyn Fn(usize) -> Vec<u16>) {
            (0..count).for_each(|_| self.round(reaches, hung));
        }

        fn ranks(&self) -> Vec<u32> {
            self.nodes.iter().map(|node| node.turns().rank).collect()
        }
    }

    fn none(_: usize) -> Vec<u16> {
        Vec::new()
    }

    #[test]
    fn who_goes_and_comes_is_known_to_all_before_it_counts() {
        let mut world = World::new(4, 2);
        world.rounds(30, &|_, _| true, &none);
        assert!(world.told.iter().all(Option::is_none), "nothing differs from the configuration");
        let up = |a: usize, b: usize| ![1, 3].contains(&a) && ![1, 3].contains(&b);
        world.rounds(14, &up, &none);
        assert_eq!(world.ranks()[..3], [0, 1, 1], "of nodes 0 and 2");
        for node in [0, 2] {
            let (told, turns) = world.told[node].take().unwrap();
            assert!(told < turns.from_shared, "all hear of it before it counts");
            assert_eq!(turns.from_shared, world.nodes[0].view().from_shared);
        }
        world.rounds(30, &|_, _| true, &none);
        assert_eq!(world.ranks(), [0, 1, 2, 3]);
        assert!(world.nodes.iter().all(|node| node.view() == world.nodes[0].view()));
        // The first one restarts: it learns the view that it had written, and writes no other.
        world.nodes[0] = Members::new(0, 4, 2);
        let before = world.nodes[1].view().clone();
        world.rounds(30, &|_, _| true, &none);
        assert!(world.nodes.iter().all(|node| *node.view() == before));
    }

    #[test]
    fn a_server_is_absent_once_it_hangs_for_long_and_until_it_answers() {
        let mut world = World::new(3, 3);
        let all = |_: usize, _: usize| true;
        world.rounds(20, &all, &none);
        // It hangs now and then: that is slowness.
        (0..20).for_each(|n| world.rounds(1, &all, &|_| if n % 3 > 0 { vec![1] } else { vec![] }));
        assert_eq!(world.nodes[0].view().number, 0);
        // For one node only, not the one that decides.
        world.rounds(14, &all, &|me| if me == 2 { vec![1] } else { vec![] });
        let absent = |world: &World| world.nodes.iter().map(|n| n.turns().absent).collect::<Vec<_>>();
        assert_eq!(absent(&world), vec![vec![LaneId(1)]; 3]);
        world.rounds(30, &all, &none);
        assert_eq!(absent(&world), vec![vec![]; 3]);
        assert_eq!(world.nodes[0].view().number, 2, "a change each, no more");
        let mut alone = Members::new(0, 1, 4);
        let at = |ms: u64| Nanos::from_millis(ms);
        let turns = alone.step(at(0), at(7_000), &[], &[3, 9]).unwrap();
        assert_eq!(turns, Turns { from_shared: at(8_000), rank: 0, absent: vec![LaneId(3)] });
        assert_eq!(alone.step(at(100), at(7_100), &[], &[3]), None);
    }

    #[test]
    fn nodes_that_cannot_hear_each_other_agree_again() {
        let mut world = World::new(4, 2);
        world.rounds(20, &|_, _| true, &none);
        world.rounds(40, &|a, b| (a < 2) == (b < 2), &none);
        assert_eq!(world.ranks(), [0, 1, 0, 1]);
        // One side goes on changing and numbers further.
        for n in 0..4 {
            world.rounds(30, &|a, b| (a < 2) == (b < 2), &|me| if me == 3 && n % 2 == 0 { vec![0] } else { vec![] });
        }
        assert!(world.nodes[2].view().number > world.nodes[0].view().number + 2);
        world.rounds(40, &|_, _| true, &none);
        assert_eq!(world.ranks(), [0, 1, 2, 3]);
        assert!(world.nodes.iter().all(|node| node.view() == world.nodes[0].view()));
    }

    #[test]
    fn views_that_cannot_be_change_nothing() {
        let mut members = Members::new(1, 3, 4);
        let at = |ms: u64| Nanos::from_millis(ms);
        let good = View { number: 4, from_shared: at(900), nodes: vec![0, 1], absent: vec![2] };
        for view in [
            View { number: u64::MAX, ..good.clone() },
            View { from_shared: at(20_000), ..good.clone() },
            View { nodes: vec![], ..good.clone() },
            View { nodes: vec![1, 0], ..good.clone() },
            View { nodes: vec![0, 3], ..good.clone() },
            View { absent: vec![2, 2], ..good.clone() },
            View { absent: vec![4], ..good.clone() },
        ] {
            assert!(!members.heard(at(0), at(1000), 0, view.clone(), vec![7, 2]), "{view:?}");
            assert_eq!(members.view().number, 0);
        }
        assert!(!members.heard(at(0), at(1000), 1, good.clone(), vec![]), "that is this node");
        assert!(!members.heard(at(0), at(1000), 9, good.clone(), vec![]), "there is no such node");
        assert!(members.heard(at(0), at(1000), 0, good.clone(), vec![]));
        let older = View { number: 3, ..good };
        assert!(members.heard(at(0), at(1000), 0, older, vec![]), "an older one is no fault");
        assert_eq!(members.view().number, 4);
        assert_eq!(members.step(at(1), at(1001), &[], &[]).unwrap().absent, [LaneId(2)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Whatever reaches whom for a while: afterwards all hold one view, of all nodes and of no absent server, although their
        /// clocks differ by up to 300 ms.
        #[test]
        fn in_the_end_all_agree(
            nodes in 1u16..6,
            skews in proptest::collection::vec(0u64..300_000_000, 6),
            chaos in proptest::collection::vec((any::<u64>(), 0u16..8), 0..80),
        ) {
            let mut world = World::new(nodes, 3);
            world.skews = skews[..usize::from(nodes)].to_vec();
            for (links, hung) in chaos {
                let bit = |a: usize, b: usize| links >> (a * 8 + b) & 1 == 1 || a == b && links >> a & 3 != 0;
                let hangs = |me: usize| if me.is_multiple_of(2) { (0..3).filter(|lane| hung >> lane & 1 == 1).collect() } else { vec![] };
                world.rounds(3, &bit, &hangs);
            }
            world.rounds(60, &|_, _| true, &none);
            for node in &world.nodes {
                prop_assert_eq!(node.view(), world.nodes[0].view());
                prop_assert_eq!(node.turns().absent, vec![]);
            }
            prop_assert_eq!(world.ranks(), (0..u32::from(nodes)).collect::<Vec<_>>());
        }
    }
}
