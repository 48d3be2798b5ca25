//! Which nodes and lanes there are, from an instant on: what policies that take turns with other nodes follow.

use smallvec::SmallVec;

use crate::types::{LaneId, Nanos};

/// Which nodes of this one's kind and which of its lanes there are.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Members {
    /// From this instant of shared time on. All nodes that take turns agree on it.
    pub from_shared: Nanos,
    /// The rank of this node among those that are there, from 0.
    pub rank: u32,
    /// Lanes that are gone or hang: no node takes turns at them. When these are all lanes, none counts as absent.
    pub absent: Vec<LaneId>,
}

/// What is in force, and what will be.
#[derive(Clone, Default, Debug)]
pub(crate) struct Agreed(SmallVec<[Members; 2]>);

impl Agreed {
    /// Something else was agreed on. It replaces what is not in force yet.
    pub(crate) fn add(&mut self, shared_now: Nanos, members: Members) {
        let in_force = self.0.iter().rposition(|known| known.from_shared <= shared_now);
        let kept = in_force.and_then(|at| self.0.get(at).cloned());
        self.0 = kept.into_iter().chain([members]).collect();
    }

    /// In the order in which they come into force; at most two.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Members> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_in_force_is_kept_until_the_next_is() {
        let mut agreed = Agreed::default();
        let from = |ms: u64| Members { from_shared: Nanos::from_millis(ms), rank: ms as u32, ..Members::default() };
        let ranks = |agreed: &Agreed| agreed.iter().map(|members| members.rank).collect::<Vec<_>>();
        agreed.add(Nanos::from_millis(0), from(10));
        agreed.add(Nanos::from_millis(5), from(20));
        assert_eq!(ranks(&agreed), [20], "the first was not in force yet");
        agreed.add(Nanos::from_millis(20), from(30));
        assert_eq!(ranks(&agreed), [20, 30]);
        agreed.add(Nanos::from_millis(25), from(40));
        assert_eq!(ranks(&agreed), [20, 40]);
        agreed.add(Nanos::from_millis(90), from(50));
        assert_eq!(ranks(&agreed), [40, 50]);
    }
}
