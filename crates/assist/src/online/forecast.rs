//! What a stream will read next, as a plan for the block cache.

use std::ops::Range;

use crate::cache::{Geometry, Plan};

/// What a stream will read next.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Forecast {
    /// The last reads of one round, in the order of their first bytes.
    pub(super) round: Vec<Range<u64>>,
    /// From one round to the next, in bytes; never 0.
    pub(super) stride: i64,
    /// Gaps are read along: everything on the way is wanted.
    pub(super) dense: bool,
    /// Rounds from the last one on that may be brought in; more as the forecast proves right.
    pub(super) rounds: u64,
}

impl Forecast {
    /// Bytes from one round to the next; negative for a program that reads backwards.
    pub fn stride_bytes(&self) -> i64 {
        self.stride
    }

    /// Whether gaps are read along.
    pub fn is_dense(&self) -> bool {
        self.dense
    }

    /// The bytes within which something is foreseen.
    fn reach(&self) -> Range<u64> {
        let (Some(first), Some(last)) = (self.round.first(), self.round.last()) else { return 0..0 };
        let far = self.stride.unsigned_abs().saturating_mul(self.rounds);
        match self.stride > 0 {
            true => first.start..last.end.saturating_add(far),
            false => first.start.saturating_sub(far)..last.end,
        }
    }

    /// The foreseen pieces in some bytes, unordered.
    fn pieces_in<'a>(&'a self, bytes: &'a Range<u64>) -> impl Iterator<Item = Range<u64>> + 'a {
        let stride = i128::from(self.stride.unsigned_abs());
        self.round.iter().flat_map(move |piece| {
            let (start, len) = (i128::from(piece.start), i128::from(piece.end - piece.start));
            // The n with start ± n·stride overlapping the bytes, between 0 and `rounds`.
            let (low, high) = match self.stride > 0 {
                true => (i128::from(bytes.start) - start - len + 1, i128::from(bytes.end) - 1 - start),
                false => (start - i128::from(bytes.end) + 1, start + len - 1 - i128::from(bytes.start)),
            };
            let first = (low.max(0) + stride - 1) / stride;
            let last = high.div_euclid(stride).min(i128::from(self.rounds));
            (first..=last).map(move |n| {
                let at = if self.stride > 0 { start + n * stride } else { start - n * stride };
                let clip = |byte: i128| byte.clamp(i128::from(bytes.start), i128::from(bytes.end)) as u64;
                clip(at)..clip(at + len)
            })
        })
    }
}

impl Plan for Forecast {
    fn moves_in(&self, bytes: Range<u64>) -> bool {
        let reach = self.reach();
        if reach.start >= bytes.end || bytes.start >= reach.end {
            return false;
        }
        self.dense || self.pieces_in(&bytes).next().is_some()
    }

    fn will_need_in(&self, bytes: Range<u64>) -> Vec<Range<u64>> {
        if self.dense {
            // Whole blocks, so that one that the forecast ends in need not be asked for twice.
            return if self.moves_in(bytes.clone()) { vec![bytes] } else { Vec::new() };
        }
        let mut pieces: Vec<Range<u64>> = self.pieces_in(&bytes).filter(|p| p.start < p.end).collect();
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

    fn ahead(&self, touched: (u64, u64), most: u64, geometry: Geometry, size_bytes: u64) -> Vec<u64> {
        let (size, forward, reach) = (geometry.block_bytes, self.stride > 0, self.reach());
        let last = reach.end.min(size_bytes).saturating_sub(1) / size;
        let first = reach.start / size;
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
                let of = |byte: i128| byte.clamp(0, i128::from(size_bytes) - 1) as u64 / size;
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

    fn once_in(&self, _: Range<u64>) -> bool {
        false
    }

    fn has_once(&self) -> bool {
        false
    }
}
