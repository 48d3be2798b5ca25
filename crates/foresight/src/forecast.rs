//! What a stream will read next.

use std::ops::Range;

use crate::stream::LAGS;

/// Of a block with more pieces all is wanted.
const PIECES_MAX: u64 = 4096;

/// What a stream will read next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Forecast {
    /// The last reads of one round, in the order of their first bytes.
    pub(crate) round: Vec<Range<u64>>,
    /// From one round to the next, in bytes; never 0.
    pub(crate) stride: i64,
    /// Gaps are read too: everything on the way is wanted.
    pub(crate) dense: bool,
    /// Most of the last reads agree on the stride.
    pub(crate) regular: bool,
    /// Rounds predicted from the last one on; more as the forecast proves right.
    pub(crate) rounds: u64,
}

impl Forecast {
    /// Bytes from one round to the next; negative for a program that reads backwards.
    pub fn stride_bytes(&self) -> i64 {
        self.stride
    }

    /// Whether gaps are read too.
    pub fn is_dense(&self) -> bool {
        self.dense
    }

    /// Whether a round is a whole series of reads.
    pub(crate) fn is_nested(&self) -> bool {
        self.round.len() > LAGS
    }

    /// Rounds predicted from the last one on: 4 at first, doubled each time the forecast proves right.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Whether most of the last reads agree on the stride; else they only went one way with small gaps.
    pub fn is_regular(&self) -> bool {
        self.regular
    }

    /// Bytes of one round without its gaps.
    pub fn round_bytes(&self) -> u64 {
        self.round.iter().map(|piece| piece.end - piece.start).sum()
    }

    /// The bytes that hold everything predicted.
    fn reach(&self) -> Range<u64> {
        let (Some(first), Some(last)) = (self.round.first(), self.round.last()) else { return 0..0 };
        let far = self.stride.unsigned_abs().saturating_mul(self.rounds);
        match self.stride > 0 {
            true => first.start..last.end.saturating_add(far),
            false => first.start.saturating_sub(far)..last.end,
        }
    }

    /// The parts of predicted pieces in some bytes, unordered.
    fn pieces_in<'a>(&'a self, bytes: &'a Range<u64>) -> impl Iterator<Item = Range<u64>> + 'a {
        self.whole_pieces_in(bytes, self.rounds).map(|p| p.start.max(bytes.start)..p.end.min(bytes.end))
    }

    /// The pieces of so many rounds that overlap some bytes, unordered.
    fn whole_pieces_in<'a>(&'a self, bytes: &'a Range<u64>, rounds: u64) -> impl Iterator<Item = Range<u64>> + 'a {
        let stride = i128::from(self.stride.unsigned_abs());
        self.round.iter().flat_map(move |piece| {
            let (start, len) = (i128::from(piece.start), i128::from(piece.end - piece.start));
            // The n with start ± n·stride overlapping the bytes, between 0 and `rounds`.
            let (low, high) = match self.stride > 0 {
                true => (i128::from(bytes.start) - start - len + 1, i128::from(bytes.end) - 1 - start),
                false => (start - i128::from(bytes.end) + 1, start + len - 1 - i128::from(bytes.start)),
            };
            let first = (low.max(0) + stride - 1) / stride;
            let last = high.div_euclid(stride).min(i128::from(rounds));
            (first..=last).map(move |n| {
                let at = if self.stride > 0 { start + n * stride } else { start - n * stride };
                let clip = |byte: i128| byte.clamp(0, i128::from(u64::MAX)) as u64;
                clip(at)..clip(at + len)
            })
        })
    }

    /// Whether any of these bytes is predicted.
    pub fn touches(&self, bytes: &Range<u64>) -> bool {
        let reach = self.reach();
        if reach.start >= bytes.end || bytes.start >= reach.end {
            return false;
        }
        self.dense || self.pieces_in(bytes).next().is_some()
    }

    /// The predicted parts of these bytes, in order and disjoint. Of a dense forecast that is all of them, so that one
    /// block that the forecast ends in is read once.
    pub fn within(&self, bytes: Range<u64>) -> Vec<Range<u64>> {
        if self.dense {
            return if self.touches(&bytes) { vec![bytes] } else { Vec::new() };
        }
        joined(self.pieces_in(&bytes).filter(|p| p.start < p.end).collect())
    }

    /// As [`within`](Forecast::within), but no predicted piece is cut: those that begin in these bytes are whole, those that
    /// began before are left out. Where the forecast ends in these bytes it is followed to their end, as a dense one is: they are
    /// not asked for a second time.
    pub fn beginning_within(&self, bytes: Range<u64>) -> Vec<Range<u64>> {
        if self.dense {
            return self.within(bytes);
        }
        if !self.touches(&bytes) {
            return Vec::new();
        }
        let rounds = (bytes.end - bytes.start) / self.stride.unsigned_abs();
        if rounds.saturating_mul(self.round.len() as u64) > PIECES_MAX {
            return vec![bytes]; // they overlap, or nearly
        }
        let pieces = self.whole_pieces_in(&bytes, u64::MAX).filter(|p| bytes.contains(&p.start));
        joined(pieces.collect())
    }

    /// The next blocks of `block_bytes` that hold predicted bytes beyond the blocks `touched` (first and last): at most
    /// `most`, nearest first, within a file of `size_bytes`.
    pub fn blocks_ahead(&self, touched: (u64, u64), most: u64, block_bytes: u64, size_bytes: u64) -> Vec<u64> {
        let (forward, reach) = (self.stride > 0, self.reach());
        let last = reach.end.min(size_bytes).saturating_sub(1) / block_bytes;
        let first = reach.start / block_bytes;
        if self.dense {
            let blocks: Box<dyn Iterator<Item = u64>> = match forward {
                true => Box::new(first.max(touched.1 + 1)..=last),
                false => Box::new((first..touched.0.min(last + 1)).rev()),
            };
            return blocks.take(most as usize).collect();
        }
        let mut blocks: Vec<u64> = Vec::new();
        for n in 0..=self.rounds {
            let shift = i128::from(self.stride) * i128::from(n);
            for i in 0..self.round.len() {
                let piece = &self.round[if forward { i } else { self.round.len() - 1 - i }];
                let (start, end) = (i128::from(piece.start) + shift, i128::from(piece.end) + shift);
                if end <= 0 || start >= i128::from(size_bytes) {
                    continue;
                }
                let of = |byte: i128| byte.clamp(0, i128::from(size_bytes) - 1) as u64 / block_bytes;
                for block in of(start)..=of(end - 1) {
                    let beyond = if forward { block > touched.1 } else { block < touched.0 };
                    if beyond && !blocks.contains(&block) {
                        blocks.push(block);
                    }
                }
            }
            if blocks.len() as u64 >= most {
                break;
            }
        }
        blocks.truncate(most as usize);
        blocks
    }
}

/// Pieces in order, those that overlap or touch as one.
fn joined(mut pieces: Vec<Range<u64>>) -> Vec<Range<u64>> {
    pieces.sort_unstable_by_key(|p| p.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match joined.last_mut() {
            Some(last) if piece.start <= last.end => last.end = last.end.max(piece.end),
            _ => joined.push(piece),
        }
    }
    joined
}
