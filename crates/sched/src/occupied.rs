//! Which of many places have something, and the next such places round from one: a decision must not cost a look at each
//! of a thousand data servers that have nothing.

use smallvec::{SmallVec, smallvec};

/// A bit for each place.
#[derive(Clone, Debug)]
pub(crate) struct Occupied {
    words: SmallVec<[u64; 2]>,
}

impl Occupied {
    pub(crate) fn new(places: usize) -> Occupied {
        Occupied { words: smallvec![0; places.div_ceil(64)] }
    }

    /// Whether a place has something from now on.
    pub(crate) fn set(&mut self, place: usize, something: bool) {
        let (word, bit) = (&mut self.words[place / 64], 1 << (place % 64));
        *word = if something { *word | bit } else { *word & !bit };
    }

    /// The places that have something: ascending from `first`, then from 0 up to it.
    pub(crate) fn round_from(&self, first: usize) -> impl Iterator<Item = usize> + '_ {
        let (start, from_first) = (first / 64, !0 << (first % 64));
        let words = self.words.len();
        (0..=words).flat_map(move |i| {
            let word = (start + i) % words.max(1);
            let asked = match i {
                0 => from_first,
                _ if i == words => !from_first,
                _ => !0,
            };
            let mut bits = self.words.get(word).map_or(0, |bits| bits & asked);
            std::iter::from_fn(move || {
                let bit = bits.trailing_zeros() as usize;
                bits &= bits.checked_sub(1)?;
                Some(word * 64 + bit)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_as_a_walk_over_all_would(
            places in 1usize..300,
            changes in proptest::collection::vec((any::<bool>(), 0usize..300), 0..200),
            first in 0usize..300,
        ) {
            let (mut occupied, mut have) = (Occupied::new(places), vec![false; places]);
            for (something, place) in changes.into_iter().map(|(something, place)| (something, place % places)) {
                occupied.set(place, something);
                have[place] = something;
            }
            let first = first % places;
            let want: Vec<usize> = (first..places).chain(0..first).filter(|p| have[*p]).collect();
            prop_assert_eq!(occupied.round_from(first).collect::<Vec<_>>(), want);
        }
    }
}
