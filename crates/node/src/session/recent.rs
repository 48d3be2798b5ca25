//! Which changes of bytes a data server has done lately: a copy of one that was done must not be done again, or it would undo what
//! others have written meanwhile.
//!
//! Requests carry their client's key and sequence, which all copies share; a copy may be cut into other pieces than the
//! first, on its way through an I/O node or past it. So ranges are remembered, and of a copy only what none of them covers is done.

use std::collections::VecDeque;
use std::ops::Range;

use smallvec::SmallVec;

/// What a change does with its range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Did {
    /// It fills the range with the request's bytes.
    Wrote,
    /// It makes a hole or zeros of it.
    Cleared,
    /// It makes the range's start the end of the object.
    Cut,
}

/// A change of a range of an object that was done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// Whose it is.
    pub client: u64,
    /// Its number within the client.
    pub sequence: u64,
    /// The object's key.
    pub object: u64,
    /// What was done.
    pub did: Did,
    /// With which bytes of the object.
    pub range: Range<u64>,
}

/// What there is to do of a copy.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Rest {
    /// In this order.
    pub ranges: SmallVec<[Range<u64>; 1]>,
    /// The least number that was noted of what was done, if anything was.
    pub least: Option<u32>,
}

/// The last changes, in the order in which they were done, each with a number that goes with its answer.
///
/// Memory is bounded; a copy of a change that was forgotten is done again.
#[derive(Debug)]
pub struct Recent {
    changes: VecDeque<(Change, u32)>,
    changes_max: usize,
}

impl Recent {
    /// Remembers the last `changes_max` changes.
    pub fn new(changes_max: usize) -> Recent {
        Recent { changes: VecDeque::new(), changes_max: changes_max.max(1) }
    }

    /// A change was done.
    pub fn note(&mut self, change: Change, number: u32) {
        if self.changes.len() >= self.changes_max {
            self.changes.pop_front();
        }
        self.changes.push_back((change, number));
    }

    /// What is to be done of a copy of `change`. Looks through all that is remembered: copies are few.
    pub fn rest(&self, change: &Change) -> Rest {
        let mut rest = Rest { ranges: SmallVec::from_elem(change.range.clone(), 1), least: None };
        let is_of_it = |(done, _): &&(Change, u32)| {
            (done.sequence, done.client, done.object, done.did)
                == (change.sequence, change.client, change.object, change.did)
        };
        for (done, number) in self.changes.iter().rev().filter(is_of_it) {
            let before = std::mem::take(&mut rest.ranges);
            for range in &before {
                let (start, end) = (range.end.min(done.range.start), range.start.max(done.range.end));
                let outside = [range.start..start, end..range.end];
                rest.ranges.extend(outside.into_iter().filter(|part| part.start < part.end));
            }
            if rest.ranges != before {
                rest.least = rest.least.into_iter().chain([*number]).min();
            }
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change(sequence: u64, range: Range<u64>) -> Change {
        Change { client: 7, sequence, object: 3, did: Did::Wrote, range }
    }

    #[test]
    fn of_a_copy_only_what_was_not_done_is_left() {
        let mut recent = Recent::new(10);
        recent.note(change(1, 10..20), 4);
        recent.note(change(1, 30..40), 2);
        recent.note(change(2, 0..100), 1);
        let rest = |range| recent.rest(&change(1, range));
        assert_eq!(rest(10..20), Rest { ranges: SmallVec::new(), least: Some(4) });
        assert_eq!(rest(0..50), Rest { ranges: [0..10, 20..30, 40..50].into_iter().collect(), least: Some(2) });
        assert_eq!(rest(15..18).ranges.len(), 0, "cut otherwise");
        assert_eq!(rest(20..30), Rest { ranges: SmallVec::from_elem(20..30, 1), least: None });
        for other in [
            Change { client: 8, ..change(1, 10..20) },
            Change { object: 4, ..change(1, 10..20) },
            Change { did: Did::Cleared, ..change(1, 10..20) },
            change(3, 10..20),
        ] {
            assert_eq!(recent.rest(&other).ranges.len(), 1, "{other:?}");
        }
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut recent = Recent::new(3);
        (1..=5).for_each(|sequence| recent.note(change(sequence, 0..10), 0));
        let is_known = |sequence| recent.rest(&change(sequence, 0..10)).ranges.is_empty();
        assert_eq!((1..=5).map(is_known).collect::<Vec<_>>(), [false, false, true, true, true]);
    }

    proptest! {
        /// Byte by byte: what was noted is not left, all else is, once, in order.
        #[test]
        fn ranges_are_subtracted(done in prop::collection::vec((0u64..40, 0u64..12), 0..6), from in 0u64..40, len in 0u64..30) {
            let mut recent = Recent::new(10);
            done.iter().for_each(|(at, len)| recent.note(change(1, *at..at + len), 0));
            let rest = recent.rest(&change(1, from..from + len));
            let left: Vec<u64> = rest.ranges.iter().cloned().flatten().collect();
            let is_done = |byte: u64| done.iter().any(|(at, len)| (*at..at + len).contains(&byte));
            prop_assert_eq!(left, (from..from + len).filter(|byte| !is_done(*byte)).collect::<Vec<_>>());
        }
    }
}
