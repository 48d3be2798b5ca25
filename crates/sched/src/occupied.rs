//! Which of many places have something, and the next such places round from one: a decision must not cost a look at each
//! of a thousand data servers that have nothing.

/// How much each place has.
#[derive(Clone, Debug)]
pub(crate) struct Occupied {
    counts: Vec<u32>,
    /// A bit for each place that has something.
    words: Vec<u64>,
}

impl Occupied {
    pub(crate) fn new(places: usize) -> Occupied {
        Occupied { counts: vec![0; places], words: vec![0; places.div_ceil(64)] }
    }

    /// A place has one more.
    pub(crate) fn add(&mut self, place: usize) {
        self.counts[place] += 1;
        self.words[place / 64] |= 1 << (place % 64);
    }

    /// A place has so many fewer.
    pub(crate) fn take(&mut self, place: usize, count: usize) {
        self.counts[place] -= count as u32;
        if self.counts[place] == 0 {
            self.words[place / 64] &= !(1 << (place % 64));
        }
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
            let (mut occupied, mut counts) = (Occupied::new(places), vec![0; places]);
            for (add, place) in changes.into_iter().map(|(add, place)| (add, place % places)) {
                if add {
                    occupied.add(place);
                    counts[place] += 1;
                } else if counts[place] > 0 {
                    occupied.take(place, 1);
                    counts[place] -= 1;
                }
            }
            let first = first % places;
            let want: Vec<usize> = (first..places).chain(0..first).filter(|p| counts[*p] > 0).collect();
            prop_assert_eq!(occupied.round_from(first).collect::<Vec<_>>(), want);
        }
    }
}
