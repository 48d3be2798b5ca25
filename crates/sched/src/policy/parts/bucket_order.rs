//! The order of `tbf`'s flows on each lane: by when their bucket lets their oldest request go, and, for those that borrow,
//! by virtual time.

use smallvec::{SmallVec, smallvec};

use super::flows::refile;
use crate::sorted::SortedSet;
use crate::types::Nanos;

/// A flow's position: when its bucket lets, or will let, its oldest request go; below that, that request's order of arrival.
/// One number, since sets compare positions all the time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::policy) struct Turn(u128);

impl Turn {
    const NONE: Turn = Turn(u128::MAX);

    pub fn new(ready_at: Nanos, seq: u64) -> Turn {
        Turn(u128::from(ready_at.0) << 64 | u128::from(seq))
    }

    /// When it comes.
    pub fn ready_at(self) -> Nanos {
        Nanos((self.0 >> 64) as u64)
    }

    /// The same request, when its class must wait longer.
    fn no_earlier_than(self, ready_at: Nanos) -> Turn {
        Turn::new(self.ready_at().max(ready_at), self.0 as u64)
    }
}

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
        Filed { turn: Turn::NONE, borrow: NO_BORROWER, parent: 0 }
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
        refile(&mut group.turns[fresh.parent], flow, filed.turn, fresh.turn, Turn::NONE);
        refile(&mut group.borrowers, flow, filed.borrow, fresh.borrow, NO_BORROWER);
        *filed = fresh;
    }

    /// Moves a flow whose class has sent on another lane: it is ready at, and has borrowed up to, later times. Its oldest
    /// request is the same.
    pub fn settle(&mut self, group: usize, flow: u32, filed: &mut Filed, ready_at: Nanos, borrowed: u128) {
        let borrow = match filed.borrow {
            NO_BORROWER => NO_BORROWER,
            _ => borrowed.max(self.virtual_now(group)),
        };
        let turn = filed.turn.no_earlier_than(ready_at);
        let fresh = Filed { turn, borrow, ..*filed };
        self.refile(group, flow, filed, fresh);
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
