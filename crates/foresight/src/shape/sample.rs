//! What a program read of one file, in few words: pieces that repeat at equal distances become one line.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::GROUP_MAX;

/// Lines of a sample at most. A file that takes more is read in no order that could be learnt.
const LINES_MAX: usize = 1024;
/// Pieces of a file that are looked at, at most.
const PIECES_MAX: usize = 1 << 20;
/// Repetitions that make a series; fewer are separate pieces.
const REPEATS_MIN: usize = 3;
/// Reads of what was read just before need no prefetch and are left out: in this much of the current piece, or in one of
/// this many pieces before are not longer than this.
const RECENT_BYTES: u64 = 4 << 20;
const RECENT_PIECES: usize = 8;
const RECENT_PIECE_BYTES_MAX: u64 = 1 << 20;

/// Pieces of a file that were read one after the other: a group that repeats every `stride` bytes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Where the first piece begins.
    pub start: u64,
    /// The pieces of a group: where each begins, from the first one's beginning, and its length.
    pub group: Vec<(i64, u64)>,
    /// From one group to the next, bytes; negative where the program goes backward.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub stride: i64,
    /// Pieces in all: the last group may be cut short.
    pub count: u64,
}

fn is_zero(stride: &i64) -> bool {
    *stride == 0
}

impl Series {
    /// Where piece `number` begins.
    pub(super) fn begin_of(&self, number: u64) -> i64 {
        let group = self.group.len().max(1) as u64;
        let at = self.group.get((number % group) as usize).map_or(0, |piece| piece.0);
        let groups = i64::try_from(number / group).unwrap_or(i64::MAX);
        let start = i64::try_from(self.start).unwrap_or(i64::MAX);
        start.saturating_add(at).saturating_add(self.stride.saturating_mul(groups))
    }

    /// Its pieces, as far as they lie in a file of `size_bytes`.
    pub fn pieces(&self, size_bytes: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        (0..self.count.min(PIECES_MAX as u64)).filter_map(move |number| {
            let len = self.group.get((number % self.group.len().max(1) as u64) as usize)?.1;
            let begin = u64::try_from(self.begin_of(number)).ok()?;
            let end = begin.saturating_add(len).min(size_bytes);
            (begin < end).then_some(begin..end)
        })
    }
}

/// What was read of one file.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The file's length.
    pub size_bytes: u64,
    /// What was read, in the order of reading.
    pub series: Vec<Series>,
}

impl Sample {
    /// Of the reads of one file in their order. `None` when nothing was read, or in no order.
    pub fn of(size_bytes: u64, reads: impl IntoIterator<Item = Range<u64>>) -> Option<Sample> {
        let mut pieces: Vec<Range<u64>> = Vec::new();
        let size_bytes = size_bytes.min(i64::MAX as u64);
        for read in reads {
            let read = read.start..read.end.min(size_bytes);
            if read.start >= read.end || is_recent(&pieces, &read) {
                continue;
            }
            match pieces.last_mut() {
                Some(last) if tail(last).start <= read.start && read.start <= last.end => {
                    last.end = last.end.max(read.end);
                }
                _ => pieces.push(read),
            }
            if pieces.len() > PIECES_MAX {
                return None;
            }
        }
        let series = series_of(&pieces, size_bytes)?;
        (!series.is_empty()).then_some(Sample { size_bytes, series })
    }

    /// What was read, in order.
    pub fn pieces(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.series.iter().flat_map(|series| series.pieces(self.size_bytes)).take(PIECES_MAX)
    }
}

/// The part of a piece that was read last.
fn tail(piece: &Range<u64>) -> Range<u64> {
    piece.end.saturating_sub(RECENT_BYTES).max(piece.start)..piece.end
}

fn is_recent(pieces: &[Range<u64>], read: &Range<u64>) -> bool {
    let Some((last, before)) = pieces.split_last() else { return false };
    let holds = |of: &Range<u64>| of.start <= read.start && read.end <= of.end;
    let short = |of: &&Range<u64>| of.end - of.start <= RECENT_PIECE_BYTES_MAX;
    holds(&tail(last)) || before.iter().rev().take(RECENT_PIECES).filter(short).any(holds)
}

/// The pieces as series; `None` when there are too many.
fn series_of(pieces: &[Range<u64>], size_bytes: u64) -> Option<Vec<Series>> {
    let mut series = Vec::new();
    let mut rest = pieces;
    while !rest.is_empty() {
        let found = (1..=GROUP_MAX).filter_map(|len| repeating(rest, len, size_bytes));
        // The shortest of the groups that go as far.
        let next = found.reduce(|best, other| if other.count > best.count { other } else { best });
        let next = next.unwrap_or_else(|| single(&rest[0]));
        rest = rest.get(next.count as usize..).unwrap_or_default();
        series.push(next);
        if series.len() > LINES_MAX {
            return None;
        }
    }
    Some(series)
}

fn single(piece: &Range<u64>) -> Series {
    Series { start: piece.start, group: vec![(0, piece.end - piece.start)], stride: 0, count: 1 }
}

/// The pieces at the front that repeat in groups of `len`.
fn repeating(pieces: &[Range<u64>], len: usize, size_bytes: u64) -> Option<Series> {
    let first = pieces.first()?.start;
    let group: Vec<(i64, u64)> =
        pieces.get(..len)?.iter().map(|p| (p.start as i64 - first as i64, p.end - p.start)).collect();
    let stride = pieces.get(len)?.start as i64 - first as i64;
    let mut series = Series { start: first, group, stride, count: len as u64 };
    for piece in &pieces[len..] {
        let full = series.group[(series.count % len as u64) as usize].1;
        // The end of the file cuts the last one short.
        let is_as_long = piece.end - piece.start == full || (piece.end == size_bytes && piece.end - piece.start < full);
        if series.begin_of(series.count) != piece.start as i64 || !is_as_long {
            break;
        }
        series.count += 1;
        if piece.end - piece.start < full {
            break;
        }
    }
    (series.count >= (REPEATS_MIN * len) as u64).then_some(series)
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_base::random::Random;
    use proptest::prelude::*;

    type Line = (u64, Vec<(i64, u64)>, i64, u64);

    fn lines(size: u64, reads: &[(u64, u64)]) -> Vec<Line> {
        let sample = Sample::of(size, reads.iter().map(|&(start, len)| start..start + len)).unwrap();
        sample.series.into_iter().map(|s| (s.start, s.group, s.stride, s.count)).collect()
    }

    #[test]
    fn reads_in_a_row_are_one_piece_and_equal_distances_one_series() {
        assert_eq!(lines(3000, &[(0, 1000), (1000, 1000), (2000, 1000)]), [(0, vec![(0, 3000)], 0, 1)]);
        let strided: Vec<_> = (0..10).map(|i| (100 + i * 50, 10)).collect();
        assert_eq!(lines(3000, &strided), [(100, vec![(0, 10)], 50, 10)]);
        let backward: Vec<_> = (0..10).map(|i| (900 - i * 50, 10)).collect();
        assert_eq!(lines(3000, &backward), [(900, vec![(0, 10)], -50, 10)]);
        // The last one is cut by the end of the file.
        assert_eq!(lines(1005, &[(0, 10), (500, 10), (1000, 5)]), [(0, vec![(0, 10)], 500, 3)]);
    }

    #[test]
    fn several_columns_are_one_series() {
        let mut reads = vec![(992, 8)];
        reads.extend((0..5).flat_map(|i| [(i * 100, 4), (i * 100 + 40, 8), (i * 100 + 60, 2)]));
        reads.pop();
        let found = lines(1000, &reads);
        assert_eq!(found, [(992, vec![(0, 8)], 0, 1), (0, vec![(0, 4), (40, 8), (60, 2)], 100, 14)]);
    }

    #[test]
    fn what_was_just_read_is_left_out_and_a_second_pass_is_not() {
        assert_eq!(lines(1 << 20, &[(0, 100), (50, 20), (500, 10), (0, 100), (600, 10)]).len(), 3);
        let pass = |_| (0..64u64).map(|i| (i << 20, 1 << 20));
        let twice: Vec<_> = (0..2).flat_map(pass).collect();
        assert_eq!(lines(64 << 20, &twice), [(0, vec![(0, 64 << 20)], 0, 1), (0, vec![(0, 64 << 20)], 0, 1)]);
    }

    #[test]
    fn nothing_and_disorder_are_no_sample() {
        assert_eq!(Sample::of(1000, []), None);
        assert_eq!(Sample::of(1000, std::iter::once(2000..3000)), None);
        let mut random = Random::new(1);
        let anywhere = (0..5000).map(|_| {
            let at = random.below(1 << 40);
            at..at + 7
        });
        assert_eq!(Sample::of(1 << 41, anywhere), None);
    }

    proptest! {
        /// What the series say was read is what was read, but for what was read again.
        #[test]
        fn the_series_hold_what_was_read(reads in prop::collection::vec((0u64..2000, 1u64..100), 1..60)) {
            let ranges = || reads.iter().map(|&(start, len)| start..start + len);
            let sample = Sample::of(1500, ranges());
            let bytes = |of: &mut dyn Iterator<Item = Range<u64>>| {
                let mut is_read = vec![false; 1500];
                of.for_each(|r| is_read[r.start.min(1500) as usize..r.end.min(1500) as usize].fill(true));
                is_read
            };
            let read = bytes(&mut ranges());
            match sample {
                Some(sample) => prop_assert_eq!(bytes(&mut sample.pieces()), read),
                None => prop_assert!(!read.contains(&true)),
            }
        }
    }
}
