//! The order of `tbf`'s flows on each lane: by when their bucket lets their oldest request go, and, for those that borrow,
//! by virtual time.

use smallvec::{SmallVec, smallvec};

use super::flows::refile;
use crate::sorted::SortedSet;
use crate::types::Nanos;

/// A flow's position: (when its bucket lets, or will let, its oldest request go; that request's order of arrival).
pub(in crate::policy) type Turn = (Nanos, u64);

const NO_TURN: Turn = (Nanos::MAX, u64::MAX);
const NO_BORROWER: u128 = u128::MAX;

/// Where a flow is filed.
pub(in crate::policy) struct Filed {
    pub turn: Turn,
    /// Virtual time from which it may borrow.
    pub borrow: u128,
    /// See [`Limit::parent`](super::limits::Limit::parent); a flow keeps it.
    pub parent: usize,
}

impl Default for Filed {
    fn default() -> Self {
        Filed { turn: NO_TURN, borrow: NO_BORROWER, parent: 0 }
    }
}

#[derive(Clone, Default)]
struct Group {
    /// One set per rule above, index 0 for none; usually only that one.
    turns: SmallVec<[SortedSet<(Turn, u32)>; 1]>,
    borrowers: SortedSet<(u128, u32)>,
    /// Virtual time of borrowing.
    virtual_now: u128,
}

/// The flows of all lanes in order.
pub(in crate::policy) struct BucketOrder {
    groups: Vec<Group>,
}

impl BucketOrder {
    /// For lanes, and rules that have others under them.
    pub fn new(lanes: u16, parents: usize) -> BucketOrder {
        let group = Group { turns: smallvec![SortedSet::default(); parents + 1], ..Group::default() };
        BucketOrder { groups: vec![group; usize::from(lanes)] }
    }

    /// Moves a flow from where it is filed.
    pub fn refile(&mut self, group: usize, flow: u32, filed: &mut Filed, fresh: Filed) {
        let group = &mut self.groups[group];
        refile(&mut group.turns[fresh.parent], flow, filed.turn, fresh.turn, NO_TURN);
        refile(&mut group.borrowers, flow, filed.borrow, fresh.borrow, NO_BORROWER);
        *filed = fresh;
    }

    /// The first flow below a rule.
    pub fn first(&self, group: usize, parent: usize) -> Option<(Turn, u32)> {
        self.groups[group].turns[parent].first()
    }

    /// The first flow that may borrow.
    pub fn first_borrower(&self, group: usize) -> Option<(u128, u32)> {
        self.groups[group].borrowers.first()
    }

    /// The virtual time of borrowing on a lane.
    pub fn virtual_now(&self, group: usize) -> u128 {
        self.groups[group].virtual_now
    }

    /// Lends a span to a class that has borrowed up to a virtual time; up to which it has then.
    pub fn borrow(&mut self, group: usize, borrowed: u128, span: Nanos) -> u128 {
        let virtual_now = &mut self.groups[group].virtual_now;
        *virtual_now = borrowed.max(*virtual_now);
        *virtual_now + u128::from(span.0)
    }
}
