//! A bit set over lanes or groups, iterated cyclically: a decision must not visit each of a thousand idle data servers.

use smallvec::{SmallVec, smallvec};

/// One bit per place.
#[derive(Clone, Debug)]
pub(crate) struct Occupied {
    words: SmallVec<[u64; 2]>,
}

impl Occupied {
    pub(crate) fn new(places: usize) -> Occupied {
        Occupied { words: smallvec![0; places.div_ceil(64)] }
    }

    /// Marks a place as occupied or empty.
    pub(crate) fn set(&mut self, place: usize, something: bool) {
        let (word, bit) = (&mut self.words[place / 64], 1 << (place % 64));
        *word = if something { *word | bit } else { *word & !bit };
    }

    /// True if no place is occupied.
    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The occupied places: ascending from `first`, then from 0 up to it.
    pub(crate) fn round_from(&self, first: usize) -> Round<'_> {
        Round::of(&self.words, first)
    }
}

/// Iterates over occupied places, see [`Occupied::round_from`].
pub(crate) struct Round<'a> {
    words: &'a [u64],
    /// The current word and its remaining bits.
    at: usize,
    bits: u64,
    /// The bits of the first word that come first; the others come last.
    from_first: u64,
    words_left: usize,
}

impl Round<'_> {
    /// No place.
    pub(crate) const fn of_none() -> Round<'static> {
        Round { words: &[], at: 0, bits: 0, from_first: !0, words_left: 0 }
    }

    /// Only place 0.
    pub(crate) const fn of_one() -> Round<'static> {
        Round { words: &[1], at: 0, bits: 1, from_first: !0, words_left: 0 }
    }

    fn of(words: &[u64], first: usize) -> Round<'_> {
        let (at, from_first) = (first / 64, !0 << (first % 64));
        let bits = words.get(at).map_or(0, |word| word & from_first);
        Round { words, at, bits, from_first, words_left: words.len() }
    }
}

impl Iterator for Round<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.bits == 0 {
            self.words_left = self.words_left.checked_sub(1)?;
            self.at = if self.at + 1 < self.words.len() { self.at + 1 } else { 0 };
            let asked = if self.words_left == 0 { !self.from_first } else { !0 };
            self.bits = self.words[self.at] & asked;
        }
        let bit = self.bits.trailing_zeros() as usize;
        self.bits &= self.bits - 1;
        Some(self.at * 64 + bit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn round_equals_a_full_scan(
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
            prop_assert_eq!(occupied.is_empty(), want.is_empty());
            prop_assert_eq!(occupied.round_from(first).collect::<Vec<_>>(), want);
        }
    }
}
