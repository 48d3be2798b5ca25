//! Which unsynced writes were forgotten, as there were too many: enough is kept to tell of each that may be lost.
//!
//! A Bloom filter (Bloom, "Space/time trade-offs in hash coding with allowable errors", CACM 1970) holds files with the states
//! that their data servers were in. It misses none. Of other files it takes about one in fifty for one that it holds when it holds
//! a million, and that matters only when the data server has lost something since: the file is then told of a loss, once.

use impresario_base::random::mix;
use impresario_wire::{FileKey, LaneState};

/// Bits of the filter: 1 MiB, which is there only when something was forgotten.
const BITS: u64 = 1 << 23;
/// Bits that stand for a file.
const HASHES: u64 = 4;
/// States that are told apart, of all data servers. What is forgotten beyond them counts as written in none of them.
const STATES_MAX: usize = 64;

/// Files that were written and not synced.
#[derive(Default)]
pub(crate) struct Forgotten {
    states: Vec<LaneState>,
    filter: Vec<u64>,
}

impl Forgotten {
    /// A file was written when its data server was in this state, and is to be forgotten.
    pub(crate) fn insert(&mut self, file: FileKey, lane: LaneState) {
        let known = self.states.contains(&lane) || self.states.len() < STATES_MAX;
        let lane = if known { lane } else { LaneState::unknown(lane.server) };
        // Those that stand for the rest come on top: one for each data server.
        if !self.states.contains(&lane) {
            self.states.push(lane);
        }
        if self.filter.is_empty() {
            self.filter = vec![0; (BITS / 64) as usize];
        }
        for (word, bit) in places(file, lane) {
            if let Some(word) = self.filter.get_mut(word) {
                *word |= bit;
            }
        }
    }

    /// The file may have been written when its data server was in another state than this one.
    pub(crate) fn may_be_lost(&self, file: FileKey, now: LaneState) -> bool {
        let others = self.states.iter().filter(|lane| lane.server == now.server && **lane != now);
        others.copied().any(|lane| self.may_hold(file, lane))
    }

    /// The file may have been written to this data server.
    pub(crate) fn may_be_written(&self, file: FileKey, server: u16) -> bool {
        self.states.iter().filter(|lane| lane.server == server).any(|lane| self.may_hold(file, *lane))
    }

    /// Something was written when its data server was in this state.
    pub(crate) fn has_state(&self, lane: LaneState) -> bool {
        self.states.contains(&lane)
    }

    /// What was written in this state is synced.
    pub(crate) fn synced(&mut self, lane: LaneState) {
        self.states.retain(|known| *known != lane);
        if self.states.is_empty() {
            *self = Forgotten::default();
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    fn may_hold(&self, file: FileKey, lane: LaneState) -> bool {
        places(file, lane).all(|(word, bit)| self.filter.get(word).is_some_and(|word| word & bit != 0))
    }
}

/// The bits that stand for a file: words of the filter and a bit in each.
fn places(file: FileKey, lane: LaneState) -> impl Iterator<Item = (usize, u64)> {
    let hash = mix(mix(mix(u64::from(lane.server)) ^ lane.state) ^ file.0);
    let step = mix(hash) | 1;
    (0..HASHES).map(move |n| {
        let place = hash.wrapping_add(n.wrapping_mul(step)) % BITS;
        ((place / 64) as usize, 1 << (place % 64))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_is_missed_and_few_others_are_taken_for_one() {
        let [a, b] = [1, 2].map(|boot| LaneState::new(3, boot << 32, 0));
        let mut forgotten = Forgotten::default();
        assert!(!forgotten.may_be_lost(FileKey(1), b));
        (0..100_000).for_each(|key| forgotten.insert(FileKey(key), a));
        assert!((0..100_000).all(|key| forgotten.may_be_lost(FileKey(key), b)));
        assert!((0..100_000).all(|key| !forgotten.may_be_lost(FileKey(key), a)), "the server has lost nothing");
        let others = (100_000..200_000).filter(|key| forgotten.may_be_lost(FileKey(*key), b)).count();
        assert!(others < 100, "{others}");
        assert!(!forgotten.may_be_lost(FileKey(1), LaneState::new(4, 2 << 32, 0)), "another server");
        forgotten.synced(a);
        assert!(forgotten.is_empty() && forgotten.filter.is_empty());
    }

    #[test]
    fn states_are_bounded_and_what_is_written_beyond_them_counts_as_lost() {
        let lane = |loss| LaneState::new(0, 1 << 32, loss);
        let mut forgotten = Forgotten::default();
        (0..1000).for_each(|loss| forgotten.insert(FileKey(loss.into()), lane(loss)));
        assert_eq!(forgotten.states.len(), STATES_MAX + 1);
        assert!(!forgotten.may_be_lost(FileKey(5), lane(5)) && forgotten.may_be_lost(FileKey(5), lane(6)));
        assert!(forgotten.may_be_lost(FileKey(900), lane(900)), "it is not known in which state");
    }
}
