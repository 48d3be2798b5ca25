//! Whether a history of concurrent operations is linearizable: whether each operation can have taken effect at one instant
//! between its call and its end, so that all answers are those of an object that does one thing at a time.
//!
//! The search is that of Wing and Gong ("Testing and verifying concurrent objects", 1993), which remembers the
//! configurations that it has been in. An operation whose outcome nobody was told may have taken effect or not.

use std::collections::HashSet;
use std::hash::Hash;

/// An object that does one thing at a time.
pub trait Model {
    /// What it holds.
    type State: Clone + Eq + Hash;
    /// An operation with its answer.
    type Operation;
    /// What it holds after the operation; `None` if it could not have answered so.
    fn apply(&self, state: &Self::State, operation: &Self::Operation) -> Option<Self::State>;
}

/// An operation of a history. Times count from anywhere, in any unit.
#[derive(Clone, Debug)]
pub struct Event<O> {
    /// The operation with its answer.
    pub operation: O,
    /// It took effect then or later.
    pub called: u64,
    /// It took effect then or before, if at all; `None`: at any time.
    pub ended: Option<u64>,
    /// It has taken effect; otherwise it may have not.
    pub is_certain: bool,
}

/// What a check of a history says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The operations can have taken effect in this order; those that are missing have not.
    Linearizable(Vec<usize>),
    /// There is no such order. The longest that comes to nothing, and the operations of which one would have to be next.
    Broken {
        /// As far as it goes.
        order: Vec<usize>,
        /// What cannot be next, although it would have to.
        next: Vec<usize>,
    },
    /// Not found out within the bound.
    Undecided,
}

struct Search<'a, M: Model> {
    model: &'a M,
    events: &'a [Event<M::Operation>],
    seen: HashSet<(Vec<u64>, M::State)>,
    order: Vec<usize>,
    longest: Vec<usize>,
    configurations_max: usize,
}

impl<M: Model> Search<'_, M> {
    fn is_placed(placed: &[u64], at: usize) -> bool {
        placed.get(at / 64).is_some_and(|word| word >> (at % 64) & 1 == 1)
    }

    /// What may be next, what ends first before the rest, and what may be missing last; `None` if nothing is left to place.
    fn candidates(&self, placed: &[u64], latest: u64) -> Option<Vec<usize>> {
        let left = || self.events.iter().enumerate().filter(|(at, _)| !Self::is_placed(placed, *at));
        let first_end = left().filter(|(_, event)| event.is_certain).map(|(_, event)| event.ended.unwrap_or(u64::MAX));
        let first_end = first_end.min()?;
        let may_be =
            left().filter(|(_, event)| event.called <= first_end && event.ended.is_none_or(|end| end >= latest));
        let mut found: Vec<usize> = may_be.map(|(at, _)| at).collect();
        found.sort_by_key(|at| self.events.get(*at).map(|event| (!event.is_certain, event.ended.unwrap_or(u64::MAX))));
        Some(found)
    }

    /// Whether everything that is left can be placed; `None`: unknown.
    fn place(&mut self, state: &M::State, placed: &[u64], latest: u64) -> Option<bool> {
        let Some(candidates) = self.candidates(placed, latest) else { return Some(true) };
        for at in candidates {
            let Some(event) = self.events.get(at) else { continue };
            let Some(next) = self.model.apply(state, &event.operation) else { continue };
            let mut with = placed.to_vec();
            if let Some(word) = with.get_mut(at / 64) {
                *word |= 1 << (at % 64);
            }
            if !self.seen.insert((with.clone(), next.clone())) {
                continue;
            }
            if self.seen.len() > self.configurations_max {
                return None;
            }
            self.order.push(at);
            if self.order.len() > self.longest.len() {
                self.longest.clone_from(&self.order);
            }
            let rest = self.place(&next, &with, latest.max(event.called));
            if rest != Some(false) {
                return rest;
            }
            self.order.pop();
        }
        Some(false)
    }
}

/// Checks a history of an object that began in `state`; gives up after so many configurations.
pub fn check<M: Model>(
    model: &M,
    state: &M::State,
    events: &[Event<M::Operation>],
    configurations_max: usize,
) -> Verdict {
    let (order, longest) = (Vec::new(), Vec::new());
    let mut search = Search { model, events, seen: HashSet::new(), order, longest, configurations_max };
    match search.place(state, &vec![0; events.len().div_ceil(64)], 0) {
        Some(true) => Verdict::Linearizable(search.order),
        None => Verdict::Undecided,
        Some(false) => {
            let order = search.longest.clone();
            let mut placed = vec![0; events.len().div_ceil(64)];
            for at in &order {
                placed[at / 64] |= 1 << (at % 64);
            }
            let latest = order.iter().map(|at| events[*at].called).max().unwrap_or(0);
            Verdict::Broken { next: search.candidates(&placed, latest).unwrap_or_default(), order }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A register of numbers.
    struct Register;

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Write(u32),
        Read(u32),
    }

    impl Model for Register {
        type State = u32;
        type Operation = Op;
        fn apply(&self, state: &u32, operation: &Op) -> Option<u32> {
            match operation {
                Op::Write(value) => Some(*value),
                Op::Read(value) => (value == state).then_some(*state),
            }
        }
    }

    fn event(operation: Op, called: u64, ended: u64) -> Event<Op> {
        Event { operation, called, ended: Some(ended), is_certain: true }
    }

    fn lost(operation: Op, called: u64, ended: Option<u64>) -> Event<Op> {
        Event { operation, called, ended, is_certain: false }
    }

    fn is_linearizable(events: &[Event<Op>]) -> bool {
        matches!(check(&Register, &0, events, 10_000), Verdict::Linearizable(_))
    }

    #[test]
    fn a_read_sees_the_last_write_or_one_at_the_same_time() {
        assert!(is_linearizable(&[event(Op::Write(1), 0, 10), event(Op::Read(1), 11, 12)]));
        assert!(!is_linearizable(&[event(Op::Write(1), 0, 10), event(Op::Read(0), 11, 12)]));
        let both = |seen| [event(Op::Write(1), 0, 10), event(Op::Read(seen), 5, 12)];
        assert!(is_linearizable(&both(0)) && is_linearizable(&both(1)) && !is_linearizable(&both(2)));
    }

    #[test]
    fn a_new_value_is_not_followed_by_the_old_one() {
        let reads =
            |first, then| [event(Op::Write(1), 0, 100), event(Op::Read(first), 10, 20), event(Op::Read(then), 30, 40)];
        assert!(is_linearizable(&reads(0, 1)) && !is_linearizable(&reads(1, 0)));
    }

    #[test]
    fn what_nobody_was_told_of_may_have_been_done_once_until_it_is_revoked() {
        let read = |seen, at| event(Op::Read(seen), at, at + 1);
        for first in [0, 1] {
            assert!(is_linearizable(&[lost(Op::Write(1), 0, None), read(first, 10), read(1, 20)]));
        }
        assert!(!is_linearizable(&[lost(Op::Write(1), 0, None), read(1, 10), read(0, 20)]));
        let revoked = |seen| [lost(Op::Write(1), 0, Some(12)), read(0, 20), read(seen, 30)];
        assert!(is_linearizable(&revoked(0)) && !is_linearizable(&revoked(1)), "it came after it was revoked");
        let again = [
            lost(Op::Write(1), 0, None),
            event(Op::Write(2), 5, 6),
            read(1, 10),
            event(Op::Write(2), 15, 16),
            read(1, 20),
        ];
        assert!(!is_linearizable(&again), "it was done twice");
    }

    #[test]
    fn what_breaks_a_history_is_said_and_large_ones_are_given_up() {
        let events = [event(Op::Write(1), 0, 1), event(Op::Write(2), 2, 3), event(Op::Read(1), 4, 5)];
        assert_eq!(check(&Register, &0, &events, 100), Verdict::Broken { order: vec![0, 1], next: vec![2] });
        let mut many: Vec<_> = (1..30).map(|value| event(Op::Write(value), 0, 100)).collect();
        many.push(event(Op::Read(77), 200, 201));
        assert_eq!(check(&Register, &0, &many, 1000), Verdict::Undecided);
    }
}
