//! How a program reads files of one kind, whatever their size: learnt from several files, applied to one never read before.
//!
//! A [`Sample`] says what was read of one file. [`Shape::learn`] finds what several have in common: steps whose places are
//! fixed to the beginning of a file, to its end, or to a share of its size, and that repeat up to such a place. What the
//! samples disagree about is left out, so that a shape says less rather than something wrong. [`held_out`] says how much of
//! each file the others predict.

mod anchor;
mod sample;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use anchor::Anchor;
use anchor::{Fit, Known, fit, fit_loosely};
pub use sample::{Sample, Series};

use crate::pages;

/// Pieces that a shape predicts of a file, at most.
pub const PREDICTED_MAX: usize = 1 << 14;
/// Steps of a shape at most.
const STEPS_MAX: usize = 1024;
/// Pieces of a group that repeats, at most. What a user keeps may say anything, and must not take long to read.
const GROUP_MAX: usize = 8;
/// How often a group without a stride is repeated, at most.
const TIMES_MAX: u64 = 64;
/// A header or a footer may be so much longer in one file than in another.
const SLACK_BYTES: u64 = 64 << 10;
/// A part of which so much is read is taken to be read as a whole.
const DENSE_PERCENT: u64 = 90;

/// A piece of a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShapePiece {
    /// Where it begins, from the group's beginning.
    pub at: Anchor,
    /// Its length.
    pub len: Anchor,
}

/// How often a group is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Repeat {
    /// The number of repetitions.
    Times(u64),
    /// As long as its pieces begin before this place, or going backward at or behind it.
    Until(Anchor),
}

/// A step: a group of pieces, once or repeated.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShapeStep {
    /// Where the first group begins.
    pub start: Anchor,
    /// The pieces of a group.
    pub group: Vec<ShapePiece>,
    /// From group to group.
    pub stride: Anchor,
    /// How often.
    pub repeat: Repeat,
}

/// How files of one kind are read.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// In the order of reading.
    pub steps: Vec<ShapeStep>,
    /// Bytes of the only size that was seen, where other sizes might be read otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub only_size_bytes: Option<u64>,
}

/// How much of what was predicted is read, and the other way round. In whole pages: a device reads no less.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Score {
    /// Files that were predicted; one of which there are several runs counts as often.
    pub files: u64,
    /// Bytes predicted.
    pub predicted_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes predicted and read.
    pub right_bytes: u64,
}

impl Score {
    /// The part of what was predicted that is read, 0 to 1; 0 when nothing was predicted.
    pub fn precision(&self) -> f64 {
        share(self.right_bytes, self.predicted_bytes)
    }

    /// The part of what is read that was predicted, 0 to 1.
    pub fn recall(&self) -> f64 {
        share(self.right_bytes, self.read_bytes)
    }

    /// Both in one number: their harmonic mean.
    pub fn both(&self) -> f64 {
        share(self.right_bytes.saturating_mul(2), self.predicted_bytes.saturating_add(self.read_bytes))
    }

    /// The sum of this and another one.
    pub fn and(self, other: Score) -> Score {
        Score {
            files: self.files.saturating_add(other.files),
            predicted_bytes: self.predicted_bytes.saturating_add(other.predicted_bytes),
            read_bytes: self.read_bytes.saturating_add(other.read_bytes),
            right_bytes: self.right_bytes.saturating_add(other.right_bytes),
        }
    }
}

fn share(part: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { part as f64 / of as f64 }
}

impl Shape {
    /// What these have in common; a shape without steps when that is nothing.
    pub fn learn(samples: &[&Sample]) -> Shape {
        let exact = in_common(samples);
        let all = Shape { steps: vec![ShapeStep::once(Anchor::START, Anchor::END)], only_size_bytes: None };
        // Where nearly all of each file is read in an order of its own, that is what they have in common.
        [exact, all]
            .into_iter()
            .map(|shape| (shape.score_all(samples), shape))
            .filter(|(score, _)| score.precision() * 100.0 >= DENSE_PERCENT as f64)
            .reduce(|best, other| if other.0.both() > best.0.both() { other } else { best })
            .map(|(_, shape)| shape)
            .unwrap_or_default()
    }

    /// What will be read of a file of this size, in order: not empty and within the file, at most [`PREDICTED_MAX`] pieces.
    pub fn predict(&self, size_bytes: u64) -> Vec<Range<u64>> {
        let mut pieces = Vec::new();
        if self.only_size_bytes.is_some_and(|only| only != size_bytes) {
            return pieces;
        }
        for step in self.steps.iter().take(STEPS_MAX) {
            step.predict(size_bytes, &mut pieces);
        }
        pieces
    }

    /// How much of a file this predicts.
    pub fn score(&self, sample: &Sample) -> Score {
        let predicted = in_pages(self.predict(sample.size_bytes));
        let read = in_pages(sample.pieces().collect());
        Score {
            files: 1,
            predicted_bytes: bytes(&predicted),
            read_bytes: bytes(&read),
            right_bytes: common_bytes(&predicted, &read),
        }
    }

    fn score_all(&self, samples: &[&Sample]) -> Score {
        samples.iter().fold(Score::default(), |sum, sample| sum.and(self.score(sample)))
    }
}

/// How much of each run the shape of the other files predicts; `None` when there is no other file. Of a file may be several runs: what
/// another one did with the same file says nothing of new ones.
pub fn held_out(files: &[Vec<&Sample>]) -> Option<Score> {
    if files.len() < 2 {
        return None;
    }
    let each = files.iter().enumerate().map(|(out, runs)| {
        let others = files.iter().enumerate().filter(|(i, _)| *i != out).flat_map(|(_, runs)| runs.iter().copied());
        of_others(&others.collect::<Vec<_>>()).score_all(runs)
    });
    Some(each.fold(Score::default(), Score::and))
}

/// What these have in common, for a file that is none of them: a single size is all that a shape of one file knows, and it must stand
/// for other sizes.
pub fn of_others(others: &[&Sample]) -> Shape {
    Shape { only_size_bytes: None, ..Shape::learn(others) }
}

impl ShapeStep {
    fn once(start: Anchor, len: Anchor) -> ShapeStep {
        let group = vec![ShapePiece { at: Anchor::START, len }];
        ShapeStep { start, group, stride: Anchor::START, repeat: Repeat::Times(1) }
    }

    fn predict(&self, size_bytes: u64, pieces: &mut Vec<Range<u64>>) {
        let (start, stride) = (self.start.at(size_bytes), self.stride.at(size_bytes));
        let size = i64::try_from(size_bytes).unwrap_or(i64::MAX);
        let group: Vec<(i64, i64)> = self
            .group
            .iter()
            .take(GROUP_MAX)
            .map(|piece| (piece.at.at(size_bytes), piece.len.at(size_bytes)))
            .collect();
        let (times, until) = match self.repeat {
            Repeat::Times(times) => (times.min(TIMES_MAX), None),
            Repeat::Until(_) if stride == 0 => (1, None),
            Repeat::Until(until) => (PREDICTED_MAX as u64, Some(until.at(size_bytes))),
        };
        for number in 0..times {
            let base = start.saturating_add(stride.saturating_mul(number as i64));
            let mut is_outside = true;
            for &(at, len) in &group {
                let begin = base.saturating_add(at);
                let is_over = until.is_some_and(|until| if stride > 0 { begin >= until } else { begin < until });
                if is_over || pieces.len() >= PREDICTED_MAX {
                    return;
                }
                let range = begin.max(0)..begin.saturating_add(len).min(size);
                if range.start < range.end {
                    is_outside = false;
                    pieces.push(range.start as u64..range.end as u64);
                }
            }
            if is_outside {
                return;
            }
        }
    }
}

/// Steps that all samples begin with, then what lies between as one part, then those that all end with.
fn in_common(samples: &[&Sample]) -> Shape {
    let least = samples.iter().map(|sample| sample.series.len()).min().unwrap_or(0);
    let series = |place: &dyn Fn(usize) -> usize| -> Option<Learnt> {
        let of = |s: &&Sample| Some((s.size_bytes, s.series.get(place(s.series.len()))?.clone()));
        step_of(&samples.iter().map(of).collect::<Option<Vec<_>>>()?)
    };
    let front: Vec<Learnt> = (0..least).map_while(|i| series(&|_| i)).collect();
    let back = (1..=least - front.len()).map_while(|i| series(&|len| len - i));
    let mut back: Vec<Learnt> = back.collect();
    back.reverse();
    let between = |s: &&Sample| {
        let of = s.series.get(front.len()..s.series.len() - back.len()).unwrap_or_default();
        (s.size_bytes, of.iter().flat_map(|series| series.pieces(s.size_bytes)).collect::<Vec<_>>())
    };
    let between = part_of(&samples.iter().map(between).collect::<Vec<_>>());
    let steps: Vec<Learnt> = front.into_iter().chain(between).chain(back).collect();
    let first = samples.first().map(|sample| sample.size_bytes);
    let one_size = first.filter(|first| samples.iter().all(|sample| sample.size_bytes == *first));
    let is_certain = steps.iter().all(|step| step.is_certain);
    Shape {
        steps: steps.into_iter().map(|step| step.step).take(STEPS_MAX).collect(),
        only_size_bytes: one_size.filter(|_| !is_certain),
    }
}

struct Learnt {
    step: ShapeStep,
    is_certain: bool,
}

/// The step that the same series of each file is, with the files' sizes.
fn step_of(of: &[(u64, Series)]) -> Option<Learnt> {
    let (_, first) = of.first()?;
    if of.iter().any(|(_, series)| series.group.len() != first.group.len()) {
        return None;
    }
    if of.iter().all(|(_, series)| series.count == 1) {
        return piece_of(
            &of.iter().map(|(size, s)| (*size, s.pieces(*size).next().unwrap_or(0..0))).collect::<Vec<_>>(),
        );
    }
    let mut is_certain = true;
    let mut exactly = |value: &dyn Fn(&Series) -> Option<i64>| -> Option<Anchor> {
        let known = of.iter().map(|(size, series)| Some(Known::exactly(*size, value(series)?)));
        let fit = fit(&known.collect::<Option<Vec<_>>>()?)?;
        is_certain &= fit.is_certain;
        Some(fit.anchor)
    };
    let start = exactly(&|s| i64::try_from(s.start).ok())?;
    let mut group = Vec::new();
    for place in 0..first.group.len() {
        let at = exactly(&|s| s.group.get(place).map(|piece| piece.0))?;
        let len = exactly(&|s| i64::try_from(s.group.get(place)?.1).ok())?;
        group.push(ShapePiece { at, len });
    }
    let stride = exactly(&|s| Some(s.stride))?;
    let repeat = if of.iter().all(|(_, s)| s.stride > 0) || of.iter().all(|(_, s)| s.stride < 0) {
        let until = fit(&of.iter().map(|(size, series)| end_of(*size, series)).collect::<Vec<_>>())?;
        is_certain &= until.is_certain;
        Repeat::Until(until.anchor)
    } else if of.iter().all(|(_, s)| s.stride == 0 && s.count == first.count) {
        Repeat::Times(first.count.div_ceil(first.group.len().max(1) as u64))
    } else {
        return None;
    };
    Some(Learnt { step: ShapeStep { start, group, stride, repeat }, is_certain })
}

/// Where a series ended: behind its last piece, not behind the one that would have been the next.
fn end_of(size_bytes: u64, series: &Series) -> Known {
    let group = series.group.len().max(1) as u64;
    let last = (series.count.saturating_sub(group)..series.count).map(|n| series.begin_of(n));
    let next = series.begin_of(series.count);
    match series.stride > 0 {
        true => Known { size_bytes, low: last.max().unwrap_or(0).saturating_add(1), high: next },
        false => Known { size_bytes, low: next.saturating_add(1), high: last.min().unwrap_or(0) },
    }
}

/// The step that one piece of each file is.
fn piece_of(of: &[(u64, Range<u64>)]) -> Option<Learnt> {
    let known = |value: &dyn Fn(&Range<u64>) -> u64| -> Option<Vec<Known>> {
        of.iter().map(|(size, piece)| Some(Known::exactly(*size, i64::try_from(value(piece)).ok()?))).collect()
    };
    let start: Fit = fit_loosely(&known(&|piece| piece.start)?, SLACK_BYTES, false)?;
    // Its length or its end: whichever the files agree on exactly.
    let len = fit(&known(&|piece| piece.end - piece.start)?);
    let end = fit_loosely(&known(&|piece| piece.end)?, SLACK_BYTES, true);
    let same = |a: Anchor, b: Anchor| (a.num, a.den.max(1)) == (b.num, b.den.max(1));
    let by_end = end.filter(|end| same(end.anchor, start.anchor)).map(|end| {
        let bytes = end.anchor.bytes.saturating_sub(start.anchor.bytes);
        Fit { anchor: Anchor { bytes, ..Anchor::START }, is_certain: end.is_certain }
    });
    // From a fixed place to the end of the file.
    let to_end = end.filter(|end| end.anchor == Anchor::END && start.anchor.num == 0).map(|end| {
        let bytes = start.anchor.bytes.saturating_neg();
        Fit { anchor: Anchor { bytes, ..Anchor::END }, is_certain: end.is_certain }
    });
    let len = to_end.or(len).or(by_end)?;
    Some(Learnt { step: ShapeStep::once(start.anchor, len.anchor), is_certain: start.is_certain && len.is_certain })
}

/// The step for parts that are read in an order of their own, if nearly all of them is read.
fn part_of(of: &[(u64, Vec<Range<u64>>)]) -> Option<Learnt> {
    let envelope = |(size, pieces): &(u64, Vec<Range<u64>>)| {
        let whole = pieces.iter().map(|p| p.start).min()?..pieces.iter().map(|p| p.end).max()?;
        let read = bytes(&in_pages(pieces.clone()));
        let is_dense = read.saturating_mul(100) >= (whole.end - whole.start).saturating_mul(DENSE_PERCENT);
        is_dense.then_some((*size, whole))
    };
    piece_of(&of.iter().map(envelope).collect::<Option<Vec<_>>>()?)
}

/// The pages of these, in order and disjoint.
fn in_pages(mut pieces: Vec<Range<u64>>) -> Vec<Range<u64>> {
    pieces.sort_by_key(|piece| piece.start);
    let mut joined: Vec<Range<u64>> = Vec::new();
    for piece in pieces.iter().map(pages) {
        match joined.last_mut() {
            Some(last) if piece.start <= last.end => last.end = last.end.max(piece.end),
            _ => joined.push(piece),
        }
    }
    joined
}

fn bytes(disjoint: &[Range<u64>]) -> u64 {
    disjoint.iter().map(|r| r.end - r.start).sum()
}

/// Bytes that both have; each is in order and disjoint.
fn common_bytes(a: &[Range<u64>], b: &[Range<u64>]) -> u64 {
    let (mut sum, mut i, mut j) = (0, 0, 0);
    while let (Some(x), Some(y)) = (a.get(i), b.get(j)) {
        sum += x.end.min(y.end).saturating_sub(x.start.max(y.start));
        match x.end <= y.end {
            true => i += 1,
            false => j += 1,
        }
    }
    sum
}

impl fmt::Display for Anchor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.num, self.den.max(1), self.bytes) {
            (0, _, bytes) => write!(f, "{bytes}"),
            (1, 1, 0) => write!(f, "the end"),
            (1, 1, bytes) => write!(f, "the end {bytes:+}"),
            (num, den, 0) => write!(f, "{num}/{den} of the size"),
            (num, den, bytes) => write!(f, "{num}/{den} of the size {bytes:+}"),
        }
    }
}

impl fmt::Display for ShapeStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [piece] = self.group.as_slice() else {
            write!(f, "{} pieces of every {} bytes from {}", self.group.len(), self.stride, self.start)?;
            return self.repeat(f);
        };
        match (self.repeat, self.start, piece.len) {
            (Repeat::Times(1), Anchor::START, Anchor::END) => write!(f, "all of it"),
            (Repeat::Times(1), start, Anchor { num: 0, bytes, .. }) => write!(f, "{bytes} bytes at {start}"),
            (Repeat::Times(1), start, Anchor { num: 1, .. }) if start.num == 0 => write!(f, "from {start} to the end"),
            (Repeat::Times(1), start, len) => write!(f, "{len} from {start}"),
            (_, start, len) => {
                write!(f, "{len} bytes of every {} from {start}", self.stride)?;
                self.repeat(f)
            }
        }
    }
}

impl ShapeStep {
    fn repeat(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.repeat {
            Repeat::Times(times) => write!(f, ", {times} times"),
            Repeat::Until(until) => write!(f, " to {until}"),
        }
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 4;
        for (i, step) in self.steps.iter().take(SHOWN).enumerate() {
            write!(f, "{}{step}", if i > 0 { ", then " } else { "" })?;
        }
        match self.steps.len() {
            0 => write!(f, "nothing in common"),
            n if n > SHOWN => write!(f, ", and {} more steps", n - SHOWN),
            _ => Ok(()),
        }
    }
}
