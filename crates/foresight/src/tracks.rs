//! A file whose own index tells which extents belong together: the chunks of a column, a variable or a data set.
//!
//! The extents of one *track* stand in the order of the data, wherever they lie in the file. A program that has read extent
//! i of a track is predicted to read the next one, and after two equal steps the ones a step further: a column of a table of
//! chunks, a data set read backward. Each track is followed on its own, so the columns that a program wants are found by
//! themselves. The prediction begins with one extent and doubles with each step that was right.
//!
//! A program that reads a table of chunks column by column, or a part of each plane of an array, makes *runs*: as many equal
//! steps each, and the same jump from one to the next. A run that begins like the one before is predicted as far as that
//! went, and after two equal runs the next ones are predicted beyond their ends.
//!
//! Tracks that a reader goes along together, a read in each in turn, are predicted together and in that turn: a disk that
//! serves requests in the order of their arrival would else go back and forth between what is predicted of one column and
//! of another.

mod reader;
#[cfg(test)]
mod tests;

use std::ops::Range;

use rustc_hash::FxHashMap;

use reader::{Ahead, Cursor, Moved, Reader, cut};

/// Extents of one file at most; what an index lists beyond them is left out.
pub const EXTENTS_MAX: usize = 1 << 16;
/// Extents that one read may touch and still count as steps along tracks: longer reads need no prediction.
const TOUCHED_MAX: usize = 256;
/// Steps predicted at most.
const STEPS_MAX: u32 = 64;
/// Extents that one read may look ahead at, over all its tracks.
const LOOKED_AT_MAX: usize = 1024;
/// An extent that is longer is read in pieces, which other predictions follow better.
const EXTENT_BYTES_MAX: u64 = 16 << 20;
/// First reads in a track that may be followed by a prediction, before any such prediction was right.
const UNPROVEN_MAX: u64 = 4;
/// A sum of the data may stand at the end of an extent; not every reader reads it.
const SUM_BYTES_MAX: u64 = 16;
/// Tracks that one reader is followed in; more are forgotten.
const FOLLOWED_MAX: usize = 4096;
/// Extents between two readers of a track at most, for what one has read to be in memory still for the other.
const NEAR_MAX: u64 = 256;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Unknown,
    /// Predicted and not read yet; `unproven` after a single read in its track.
    Predicted {
        unproven: bool,
        bytes: u32,
    },
    /// Read in this pass over its track, first by this reader; of an earlier pass it counts as unknown.
    Read {
        was_predicted: bool,
        pass: u16,
        reader: u32,
    },
}

/// 24 bytes: a file may have many.
#[derive(Clone, Debug)]
struct Extent {
    start: u64,
    len_bytes: u32,
    track: u32,
    state: State,
}

impl Extent {
    fn bytes(&self) -> Range<u64> {
        self.start..self.start + u64::from(self.len_bytes)
    }

    fn is_unknown(&self, pass: u16) -> bool {
        match self.state {
            State::Unknown => true,
            State::Predicted { .. } => false,
            State::Read { pass: of, .. } => of != pass,
        }
    }
}

/// What a read of a known extent means.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NextOnTrack {
    /// The bytes had been predicted.
    pub was_predicted: bool,
    /// Predicted now and not before, in the order of reading; neighbours joined.
    pub next: Vec<Range<u64>>,
    /// How many bytes of earlier predictions this read used for the first time.
    pub used_bytes: u64,
}

/// The tracks of one file, and where its readers are in them.
#[derive(Clone, Debug)]
pub struct Tracks {
    /// Track after track.
    extents: Vec<Extent>,
    /// The extents of each track.
    tracks: Vec<Range<usize>>,
    /// The pass over each track: it counts up when a reader begins the track again.
    passes: Vec<u16>,
    /// The number of each extent, by its first byte.
    by_start: Vec<u32>,
    /// By the low bits of the reader's number.
    readers: FxHashMap<u32, Reader>,
    unproven: u64,
    proven: u64,
    size_bytes: u64,
}

impl Tracks {
    /// From the extents of each track, in the order of its data. Empty extents, those beyond `size_bytes` and those that
    /// are too many are left out, and so are tracks of a single extent.
    pub fn new(tracks: impl IntoIterator<Item = Vec<Range<u64>>>, size_bytes: u64) -> Tracks {
        let mut all = Tracks {
            extents: Vec::new(),
            tracks: Vec::new(),
            passes: Vec::new(),
            by_start: Vec::new(),
            readers: FxHashMap::default(),
            unproven: 0,
            proven: 0,
            size_bytes,
        };
        for mut track in tracks {
            track.retain(|r| r.start < r.end && r.end <= size_bytes && r.end - r.start <= EXTENT_BYTES_MAX);
            track.truncate(EXTENTS_MAX - all.extents.len());
            if track.len() < 2 {
                continue;
            }
            let (first, number) = (all.extents.len(), all.tracks.len() as u32);
            all.extents.extend(track.into_iter().map(|bytes| Extent {
                start: bytes.start,
                len_bytes: (bytes.end - bytes.start) as u32,
                track: number,
                state: State::Unknown,
            }));
            all.tracks.push(first..all.extents.len());
        }
        all.passes = vec![0; all.tracks.len()];
        all.by_start = (0..all.extents.len() as u32).collect();
        all.by_start.sort_unstable_by_key(|i| (all.extents[*i as usize].start, *i));
        all.extents.shrink_to_fit();
        all
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Whether some of these bytes lie in an extent.
    pub fn knows(&self, bytes: &Range<u64>) -> bool {
        self.touched(bytes).is_some()
    }

    /// How many extents are known.
    pub fn extents(&self) -> usize {
        self.extents.len()
    }

    /// A reader has read these bytes. `None` where the index does not know them, or the reader goes no known way through its
    /// track; `may` grants what is predicted, extent by extent.
    pub fn read(&mut self, reader: u64, bytes: &Range<u64>, may: &mut dyn FnMut(u64) -> bool) -> Option<NextOnTrack> {
        let touched = self.meant(bytes)?;
        let reader = reader as u32;
        let (mut result, mut is_followed) = (NextOnTrack { was_predicted: true, ..NextOnTrack::default() }, false);
        for i in touched.clone().map(|place| self.by_start[place] as usize).collect::<Vec<_>>() {
            let track = self.extents[i].track as usize;
            if self.is_again(reader, i) {
                // What was read in the pass before need not be in memory any more.
                self.passes[track] = self.passes[track].wrapping_add(1);
                if let Some(reader) = self.readers.get_mut(&reader) {
                    reader.places.remove(&(track as u32));
                }
            }
            let pass = self.passes[track];
            let state = &mut self.extents[i].state;
            match *state {
                State::Read { was_predicted, pass: of, .. } if of == pass => {
                    result.was_predicted &= was_predicted;
                    continue;
                }
                State::Predicted { unproven, bytes } => {
                    result.used_bytes += u64::from(bytes);
                    self.proven += u64::from(unproven);
                    *state = State::Read { was_predicted: true, pass, reader };
                }
                State::Unknown | State::Read { .. } => {
                    result.was_predicted = false;
                    *state = State::Read { was_predicted: false, pass, reader };
                }
            }
        }
        let steps_max = (LOOKED_AT_MAX / touched.len()).clamp(1, STEPS_MAX as usize) as u32;
        for (track, indices) in self.by_track(touched) {
            is_followed |= self.step(reader, track, (indices, bytes), steps_max, may, &mut result.next);
        }
        join(&mut result.next);
        (is_followed || result.was_predicted).then_some(result)
    }

    /// A reader is gone. With the last one all predictions are forgotten; how many bytes of them were never read.
    pub fn depart(&mut self, reader: u64) -> u64 {
        self.readers.remove(&(reader as u32));
        if self.readers.is_empty() { self.clear() } else { 0 }
    }

    /// All predictions are forgotten; how many bytes of them were never read.
    pub fn clear(&mut self) -> u64 {
        self.readers.clear();
        let mut unread = 0;
        for extent in &mut self.extents {
            if let State::Predicted { bytes, .. } = std::mem::replace(&mut extent.state, State::Unknown) {
                unread += u64::from(bytes);
            }
        }
        unread
    }

    /// Whether an extent was read in this pass already, and this read is neither a further piece of it nor that of another
    /// program that reads the track at the same time.
    fn is_again(&self, reader: u32, i: usize) -> bool {
        let (track, state) = (self.extents[i].track, self.extents[i].state);
        let State::Read { pass, reader: first_reader, .. } = state else { return false };
        let place = |reader: u32| self.readers.get(&reader).and_then(|reader| reader.places.get(&track));
        let is_piece = place(reader).is_some_and(|at| (at.first..at.end).contains(&(i as i64)));
        let is_shared =
            first_reader != reader && place(first_reader).is_some_and(|at| at.first.abs_diff(i as i64) <= NEAR_MAX);
        pass == self.passes[track as usize] && !is_piece && !is_shared
    }

    /// The places in `by_start` of the extents that hold some of these bytes; `None` for none, or too many.
    fn touched(&self, bytes: &Range<u64>) -> Option<Range<usize>> {
        let extent = |i: u32| &self.extents[i as usize];
        let after = self.by_start.partition_point(|i| extent(*i).start <= bytes.start);
        let before = after.checked_sub(1).filter(|at| extent(self.by_start[*at]).bytes().contains(&bytes.start));
        let first = before.unwrap_or(after);
        let end = self.by_start.partition_point(|i| extent(*i).start < bytes.end);
        (first < end && end - first <= TOUCHED_MAX).then_some(first..end)
    }

    /// Those of the touched extents that the reader asked for. A read that ends within an extent was not made for that one: a
    /// buffer is filled from where the reader wants to begin.
    fn meant(&self, bytes: &Range<u64>) -> Option<Range<usize>> {
        let touched = self.touched(bytes)?;
        let last = self.extents[self.by_start[touched.end - 1] as usize].bytes();
        let is_filled = bytes.end + SUM_BYTES_MAX < last.end;
        Some(if is_filled { touched.start..touched.start + 1 } else { touched })
    }

    /// The tracks of these extents, with the numbers touched in each, which must follow one another: neighbours in the file
    /// that are far apart in the data say nothing of what lies between.
    fn by_track(&self, touched: Range<usize>) -> Vec<(u32, Range<usize>)> {
        let mut numbers: Vec<usize> = self.by_start[touched].iter().map(|i| *i as usize).collect();
        numbers.sort_unstable();
        let track = |i: usize| self.extents[i].track;
        // Numbers go track after track.
        let of_one_track = numbers.chunk_by(|a, b| track(*a) == track(*b));
        let range = |numbers: &[usize]| Some(*numbers.first()?..*numbers.last()? + 1);
        of_one_track
            .filter_map(|numbers| range(numbers).filter(|range| range.len() == numbers.len()))
            .map(|range| (track(range.start), range))
            .collect()
    }

    /// One read in one track. Whether the reader is followed there.
    fn step(
        &mut self,
        reader: u32,
        track: u32,
        (indices, bytes): (Range<usize>, &Range<u64>),
        steps_max: u32,
        may: &mut dyn FnMut(u64) -> bool,
        next: &mut Vec<Range<u64>>,
    ) -> bool {
        let reader = self.readers.entry(reader).or_default();
        if reader.places.len() >= FOLLOWED_MAX {
            reader.places.clear();
        }
        reader.has_read_in(track);
        let (extents, group) = (indices.start as i64..indices.end as i64, indices.len() as i64);
        let here = self.extents[indices.start].bytes();
        let (whole, mut part) = (0..here.end - here.start, within(&here, bytes));
        if group == 1 {
            part.end = part.end.max(bytes.end - here.start);
        }
        if part.start == 0 && (part.end..=part.end + SUM_BYTES_MAX).contains(&whole.end) {
            part = whole.clone();
        }
        let Some(place) = reader.places.get_mut(&track) else {
            let place = Cursor::new(&extents, (whole.clone(), part.clone()));
            reader.places.insert(track, place.clone());
            let is_cut = group == 1 && (part.start > 0 || part.end < whole.end);
            if is_cut || self.unproven >= UNPROVEN_MAX + 2 * self.proven {
                return false;
            }
            self.predict(&mut [Ahead::new(track, &place, group, cut(group, whole, part))], 1, may, next);
            return true;
        };
        let (whole, part) = match place.read(&extents, (whole, part)) {
            Moved::Not => return place.right > 0,
            Moved::Elsewhere => return false,
            Moved::On { whole, part } => (whole, part),
        };
        let place = place.clone();
        // A read of many extents goes through its tracks by itself.
        let (mut ahead, more) = match steps_max == STEPS_MAX {
            true => reader.together(track, |track| self.tracks[track as usize].start as i64),
            false => Default::default(),
        };
        let steps = if more { 1 } else { place.steps((steps_max / (ahead.len() as u32 + 1)).max(1)) };
        ahead.push(Ahead::new(track, &place, group, cut(group, whole, part)));
        self.predict(&mut ahead, steps, may, next);
        true
    }

    /// Predicts so many steps along each of these tracks, one step of all of them after the other, until one is refused.
    fn predict(
        &mut self,
        ahead: &mut [Ahead],
        steps: u32,
        may: &mut dyn FnMut(u64) -> bool,
        next: &mut Vec<Range<u64>>,
    ) {
        for k in 1..=i64::from(steps) {
            for track in &mut *ahead {
                if !self.predict_step(track, k, may, next) {
                    return;
                }
            }
        }
    }

    /// Predicts the `k`-th step from where a reader is. False where that was refused.
    fn predict_step(
        &mut self,
        Ahead { track, place, group, part, left_bytes }: &mut Ahead,
        k: i64,
        may: &mut dyn FnMut(u64) -> bool,
        next: &mut Vec<Range<u64>>,
    ) -> bool {
        let unproven = place.right == 0;
        let range = self.tracks[*track as usize].clone();
        let pass = self.passes[*track as usize];
        let wanted = |extent: &Extent| match &part {
            None => Some(extent.bytes()),
            Some((len, part)) if part.end > *len => {
                let end = extent.bytes().end.max(extent.start + part.end);
                Some(extent.start..end.min(self.size_bytes))
            }
            Some((len, part)) if u64::from(extent.len_bytes) == *len => {
                Some(extent.start + part.start..extent.start + part.end)
            }
            Some(_) => None,
        };
        let overlaps = part.as_ref().is_some_and(|(len, part)| part.end > *len);
        let from = place.after(k);
        // A read takes a group of extents: they come together or not at all.
        let together = from.max(range.start as i64)..(from + *group).min(range.end as i64);
        if together.is_empty() {
            return true;
        }
        // Buffers overlap: what the one before brings in, or has read, comes once.
        let before = place.after(k - 1);
        let before = Some(before).filter(|before| overlaps && (range.start as i64..range.end as i64).contains(before));
        let before = before.map(|before| &self.extents[before as usize]).filter(|extent| !extent.is_unknown(pass));
        let there = before.and_then(wanted).unwrap_or_default();
        let wanted = |extent: &Extent| {
            let bytes = wanted(extent)?;
            let start = if there.contains(&bytes.start) { there.end } else { bytes.start };
            (start < bytes.end).then_some(start..bytes.end)
        };
        let together = &mut self.extents[together.start as usize..together.end as usize];
        let unknown = together.iter().filter(|extent| extent.is_unknown(pass));
        let bytes: u64 = unknown.filter_map(wanted).map(|r| r.end - r.start).sum();
        if bytes > *left_bytes {
            *left_bytes = 0; // what is further on does not come before this
            return true;
        }
        *left_bytes -= bytes;
        if bytes == 0 {
            return true;
        }
        if !may(bytes) {
            return false;
        }
        self.unproven += u64::from(unproven);
        for extent in together.iter_mut().filter(|extent| extent.is_unknown(pass)) {
            if let Some(bytes) = wanted(extent) {
                extent.state = State::Predicted { unproven, bytes: (bytes.end - bytes.start) as u32 };
                next.push(bytes);
            }
        }
        true
    }
}

/// The part of an extent that lies in these bytes, from its beginning.
fn within(extent: &Range<u64>, bytes: &Range<u64>) -> Range<u64> {
    bytes.start.max(extent.start) - extent.start..bytes.end.min(extent.end) - extent.start
}

/// Joins neighbours that follow one another.
fn join(ranges: &mut Vec<Range<u64>>) {
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges.drain(..) {
        match joined.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => joined.push(range),
        }
    }
    *ranges = joined;
}
