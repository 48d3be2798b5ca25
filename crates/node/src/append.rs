//! Where appended bytes go: each append to a file gets a range of its own behind all bytes and all ranges before it.
//!
//! The server that owns the file's name assigns the ranges, under the file's lock; the data are written there by the client
//! itself. Ranges never overlap, whoever writes when. A client whose answer was lost asks again with the same number and
//! gets the same range, so a repetition leaves no gap.

use std::collections::VecDeque;

/// Longest file, bytes.
const FILE_MAX_BYTES: u64 = i64::MAX as u64;
/// Ranges of one file that are remembered for repetitions.
const REMEMBERED_MAX: usize = 64;

/// The ranges of a file assigned lately.
#[derive(Clone, Default, Debug)]
pub struct Appends {
    lately: VecDeque<Range>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    client: u64,
    sequence: u64,
    offset: u64,
    len_bytes: u64,
}

impl Appends {
    /// The offset that a copy of this append got before.
    pub fn repeated(&self, client: u64, sequence: u64, len_bytes: u64) -> Option<u64> {
        let is_it = |range: &&Range| (range.client, range.sequence, range.len_bytes) == (client, sequence, len_bytes);
        self.lately.iter().find(is_it).map(|range| range.offset)
    }

    /// Assigns the range behind `end`, which is the end of the file and of all ranges that are assigned. `None`: the file
    /// would become too long.
    pub fn assign(&mut self, client: u64, sequence: u64, end: u64, len_bytes: u64) -> Option<u64> {
        end.checked_add(len_bytes).filter(|end| *end <= FILE_MAX_BYTES)?;
        if self.lately.len() >= REMEMBERED_MAX {
            self.lately.pop_front();
        }
        self.lately.push_back(Range { client, sequence, offset: end, len_bytes });
        Some(end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_repetition_gets_the_same_range() {
        let mut appends = Appends::default();
        assert_eq!(appends.assign(1, 7, 100, 10), Some(100));
        assert_eq!(appends.repeated(1, 7, 10), Some(100));
        assert_eq!(appends.repeated(1, 7, 11), None, "another append");
        assert_eq!(appends.repeated(2, 7, 10), None, "another client");
        for sequence in 0..1000 {
            assert!(appends.assign(2, sequence, 200, 1).is_some());
        }
        assert_eq!(appends.repeated(1, 7, 10), None, "long ago");
        assert_eq!(appends.lately.len(), REMEMBERED_MAX);
    }

    #[test]
    fn a_file_does_not_become_too_long() {
        let mut appends = Appends::default();
        assert_eq!(appends.assign(1, 1, FILE_MAX_BYTES - 5, 5), Some(FILE_MAX_BYTES - 5));
        assert_eq!(appends.assign(1, 2, FILE_MAX_BYTES - 5, 6), None);
        assert_eq!(appends.assign(1, 3, 5, u64::MAX), None);
    }

    proptest! {
        /// Calls arrive with copies and in any order; each append has one range, and no two overlap.
        #[test]
        fn ranges_do_not_overlap(calls in prop::collection::vec((0u64..3, 0u64..20, 1u64..100), 1..60)) {
            let (mut appends, mut end, mut ranges) = (Appends::default(), 0, std::collections::BTreeMap::new());
            for (client, sequence, len) in calls {
                let known = appends.repeated(client, sequence, len);
                let offset = match known {
                    Some(offset) => offset,
                    None => {
                        let offset = appends.assign(client, sequence, end, len).unwrap();
                        end = offset + len;
                        offset
                    }
                };
                let before = ranges.insert((client, sequence, len), offset);
                prop_assert!(before.is_none_or(|before| before == offset));
            }
            let mut sorted: Vec<_> = ranges.into_iter().map(|((_, _, len), offset)| (offset, len)).collect();
            sorted.sort_unstable();
            prop_assert!(sorted.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
        }
    }
}
