//! One stream of reads: where it was, and what it will read next.

use std::collections::VecDeque;
use std::ops::Range;

use crate::forecast::Forecast;
use crate::majority::majority;

/// Reads remembered: 16 strides to the 4th read before.
const REMEMBERED: usize = 20;
/// Streams interleaved within one at most.
pub(crate) const LAGS: usize = 4;
/// Windows of strides that may agree, shortest first.
const WINDOWS: [usize; 3] = [4, 8, 16];
/// Consecutive reads against the forecast that end it.
const SURPRISES: u32 = 3;
/// Consecutive reads backwards that do not count against the forecast.
const REVISITS: u32 = 8;
/// Rounds predicted: doubled from the first to the second as the forecast proves right.
const ROUNDS: (u64, u64) = (4, 1 << 12);
/// Rounds skipped that still follow the forecast, wherever they lead.
const SKIPPED: i64 = 4;
/// How far a read may be from the last one when it skips rounds that were foreseen, bytes: reads that came from memory are not
/// always told of.
const SKIPPED_BYTES: u64 = 16 << 20;

#[derive(Clone, Debug, Default)]
pub(crate) struct Stream {
    reads: VecDeque<Range<u64>>,
    forecast: Option<Forecast>,
    surprises: u32,
    revisits: u32,
    /// Lowest and highest byte seen, for reads backwards.
    low: u64,
    high: u64,
    last_read: u64,
}

impl Stream {
    pub(crate) fn forecast(&self) -> Option<&Forecast> {
        self.forecast.as_ref()
    }

    /// When it last took a read, counted in reads of the detector.
    pub(crate) fn last_read(&self) -> u64 {
        self.last_read
    }

    /// How far a read may be from the last one and still be near, in bytes.
    pub(crate) fn reach(&self) -> u64 {
        self.forecast.as_ref().map_or(0, |f| f.stride.unsigned_abs().saturating_mul(4))
    }

    pub(crate) fn distance(&self, start: u64) -> u64 {
        self.reads.back().map_or(u64::MAX, |last| last.start.abs_diff(start).min(last.end.abs_diff(start)))
    }

    /// Whether a read that begins here is one that was foreseen, or goes on where the last one ended.
    pub(crate) fn predicted(&self, start: u64) -> bool {
        self.reads.back().is_some_and(|last| last.end == start) || self.next_round(start, SKIPPED).is_some()
    }

    /// Rounds that a read of this stream may skip.
    fn skipped(&self) -> i64 {
        let Some(forecast) = self.forecast.as_ref().filter(|f| f.regular) else { return SKIPPED };
        // What comes first after all that was foreseen, and some more.
        let foreseen = i64::try_from(forecast.rounds).unwrap_or(i64::MAX).saturating_add(SKIPPED);
        let near = i64::try_from(SKIPPED_BYTES / forecast.stride.unsigned_abs().max(1)).unwrap_or(i64::MAX);
        foreseen.min(near).max(SKIPPED)
    }

    /// Which piece of the round a read continues, and how many rounds later.
    fn next_round(&self, start: u64, skipped: i64) -> Option<(usize, i64)> {
        let forecast = self.forecast.as_ref()?;
        forecast.round.iter().enumerate().find_map(|(i, piece)| {
            let apart = i128::from(start) - i128::from(piece.start);
            let stride = i128::from(forecast.stride);
            let rounds = (apart % stride == 0).then_some(apart / stride)?;
            (1..=i128::from(skipped)).contains(&rounds).then_some((i, rounds as i64))
        })
    }

    /// What comes next is not known any more.
    pub(crate) fn forget(&mut self) {
        self.forecast = None;
    }

    /// What comes next when gaps of more than `gap_bytes` are not read along.
    pub(crate) fn regard_gaps(&mut self, gap_bytes: u64) {
        if self.forecast.as_ref().is_some_and(Forecast::is_dense) {
            self.forecast = self.detect(gap_bytes);
        }
    }

    /// Takes a read that shows what comes next.
    pub(crate) fn nest(&mut self, forecast: Forecast, bytes: &Range<u64>, now: u64) {
        *self =
            Stream { forecast: Some(forecast), last_read: now, low: bytes.start, high: bytes.end, ..Stream::default() };
        self.remember(bytes);
    }

    /// Takes a read; whether it changed the forecast.
    pub(crate) fn read(&mut self, bytes: &Range<u64>, gap_bytes: u64, now: u64) -> bool {
        self.last_read = now;
        if self.reads.is_empty() {
            (self.low, self.high) = (bytes.start, bytes.end);
        }
        if let Some((piece, _)) = self.next_round(bytes.start, self.skipped()) {
            self.remember(bytes);
            (self.surprises, self.revisits) = (0, 0);
            let Some(forecast) = &mut self.forecast else { return false };
            forecast.round[piece] = bytes.clone();
            forecast.round.sort_unstable_by_key(|p| p.start);
            // Each read moves the forecast along; only a longer one is a change.
            let rounds = (forecast.rounds * 2).min(ROUNDS.1);
            let longer = rounds != forecast.rounds;
            forecast.rounds = rounds;
            return longer;
        }
        if self.is_revisit(bytes) {
            self.revisits += 1;
            return false;
        }
        self.remember(bytes);
        self.revisits = 0;
        self.surprises += 1;
        let found = self.detect(gap_bytes);
        match (found, &self.forecast) {
            (Some(new), Some(old)) if new.dense && old.dense && (new.stride > 0) == (old.stride > 0) => {
                // Uneven gaps that are read too: the stream goes on as predicted.
                self.surprises = 0;
                let (before, rounds) = (old.rounds, (old.rounds * 2).min(ROUNDS.1));
                self.forecast = Some(Forecast { rounds, ..new });
                rounds != before
            }
            (Some(new), _) => {
                self.surprises = 0;
                self.forecast = Some(new);
                true
            }
            (None, Some(_)) if self.surprises >= SURPRISES => {
                self.forecast = None;
                true
            }
            (None, _) => false,
        }
    }

    /// A read back into what was read already, against the stream's direction.
    fn is_revisit(&self, bytes: &Range<u64>) -> bool {
        let (Some(forecast), Some(last)) = (&self.forecast, self.reads.back()) else { return false };
        let back = match forecast.stride > 0 {
            true => bytes.start < last.start && bytes.start >= self.low,
            false => bytes.start > last.start && bytes.end <= self.high,
        };
        back && self.revisits < REVISITS
    }

    fn remember(&mut self, bytes: &Range<u64>) {
        (self.low, self.high) = (self.low.min(bytes.start), self.high.max(bytes.end));
        if self.reads.len() == REMEMBERED {
            self.reads.pop_front();
        }
        self.reads.push_back(bytes.clone());
    }

    /// Strides to the `lag`th read before, latest first.
    fn strides(&self, lag: usize) -> impl DoubleEndedIterator<Item = i64> + Clone + '_ {
        let n = self.reads.len();
        (lag..n).rev().map(move |i| (i128::from(self.reads[i].start) - i128::from(self.reads[i - lag].start)) as i64)
    }

    fn detect(&self, gap_bytes: u64) -> Option<Forecast> {
        for lag in 1..=LAGS {
            let known = self.reads.len().saturating_sub(lag);
            for window in WINDOWS.into_iter().take_while(|w| *w <= known) {
                let stride = majority(self.strides(lag).take(window));
                if let Some(stride) = stride.filter(|s| *s != 0) {
                    return Some(self.predict(lag, stride, gap_bytes));
                }
            }
        }
        self.drift(gap_bytes)
    }

    /// The last `lag` reads go on, each by `stride`.
    fn predict(&self, lag: usize, stride: i64, gap_bytes: u64) -> Forecast {
        let mut round: Vec<Range<u64>> = self.reads.iter().rev().take(lag).cloned().collect();
        round.sort_unstable_by_key(|p| p.start);
        let read: u64 = round.iter().map(|p| p.end - p.start).sum();
        let gap = stride.unsigned_abs().saturating_sub(read) / lag as u64;
        let span = round.last().map_or(0, |p| p.end) - round.first().map_or(0, |p| p.start);
        // Pieces further apart than a round are streams of their own, and nothing lies between them.
        let dense = gap <= gap_bytes && span <= stride.unsigned_abs();
        Forecast { round, stride, dense, regular: true, rounds: ROUNDS.0 }
    }

    /// No stride is agreed on, but the reads go one way with gaps small enough to be read along.
    fn drift(&self, gap_bytes: u64) -> Option<Forecast> {
        const READS: usize = 8;
        if self.reads.len() <= READS {
            return None;
        }
        let strides: Vec<i64> = self.strides(1).take(READS).collect();
        let forward = strides.iter().filter(|s| **s > 0).count();
        let last: Vec<&Range<u64>> = self.reads.iter().rev().take(READS).collect();
        let read: u64 = last.iter().map(|p| p.end - p.start).sum();
        let low = last.iter().map(|p| p.start).min()?;
        let high = last.iter().map(|p| p.end).max()?;
        let gap = (high - low).saturating_sub(read) / READS as u64;
        let backward = strides.iter().filter(|s| **s < 0).count();
        let one_way = forward.max(backward) >= READS - 2;
        let stride = ((high - low) / READS as u64).max(1) as i64;
        let stride = if forward > backward { stride } else { -stride };
        let round = vec![self.reads.back()?.clone()];
        (one_way && gap <= gap_bytes).then_some(Forecast {
            round,
            stride,
            dense: true,
            regular: false,
            rounds: ROUNDS.0,
        })
    }
}
