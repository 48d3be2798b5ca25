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

use std::ops::Range;

use rustc_hash::FxHashMap;

/// Extents of one file at most; what an index lists beyond them is left out.
pub const EXTENTS_MAX: usize = 1 << 16;
/// Extents that one read may touch and still count as steps along tracks: longer reads need no prediction.
const TOUCHED_MAX: usize = 256;
/// Steps predicted, and bytes in one track ahead of the reader, at most.
const STEPS_MAX: u32 = 64;
const AHEAD_BYTES_MAX: u64 = 16 << 20;
/// Steps predicted in a run that begins like the one before.
const LIKELY_MAX: u32 = 16;
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
/// Tracks that one reader goes along together, at most, so that each step looks at one extent of each.
const TOGETHER_MAX: usize = STEPS_MAX as usize;
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

/// Where a reader is in a track.
#[derive(Clone, Debug)]
struct Place {
    /// The extents that the last read touched.
    first: i64,
    end: i64,
    /// Which bytes of the extent there were read so far, and all of it.
    part: Range<u64>,
    whole: Range<u64>,
    step: i64,
    /// The step before, which becomes the step when it is seen again at once; 0 when there is none.
    seen: i64,
    right: u32,
    /// The equal steps that it is in the middle of, and those before them.
    run: Run,
    before: Option<Run>,
    /// From the beginning of a run to that of the next one, when two were alike.
    jump: Option<i64>,
}

/// Reads in equal steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    first: i64,
    reads: i64,
}

impl Place {
    /// The step has been seen twice: what was known of runs is of another one.
    fn steps_by(&mut self, step: i64) {
        (self.step, self.right) = (step, 1);
        (self.run, self.before, self.jump) = (Run { first: self.first - 2 * step, reads: 3 }, None, None);
    }

    /// A step that is not that of the run: where another run begins, if it is one. Whether that was foreseen.
    fn begins_run(&mut self) -> bool {
        let (ended, begun) = (self.run, Run { first: self.first, reads: 1 });
        let jump = begun.first - ended.first;
        let alike = |before: &Run| before.reads == ended.reads && ended.first - before.first == jump;
        let is_series = ended.reads >= 2 && self.before.as_ref().is_some_and(alike);
        (self.run, self.before, self.jump) = (begun, Some(ended), is_series.then_some(jump));
        is_series
    }

    /// How many steps to predict, given how many the reads so far allow.
    fn steps(&self, steps_max: u32) -> u32 {
        let doubled = 1u32.checked_shl(self.right).unwrap_or(steps_max).min(steps_max);
        let left = self.before.map(|before| before.reads - self.run.reads).filter(|left| *left > 0);
        match left.and_then(|left| u32::try_from(left).ok()) {
            Some(left) if self.jump.is_none() => left.min(steps_max).min(LIKELY_MAX),
            _ => doubled,
        }
    }

    /// Where the reader is after so many steps.
    fn after(&self, steps: i64) -> i64 {
        match (self.jump, self.before) {
            (Some(jump), Some(Run { reads, .. })) if self.run.reads <= reads => {
                let place = self.run.reads - 1 + steps;
                self.run.first + place / reads * jump + place % reads * self.step
            }
            _ => self.first + self.step * steps,
        }
    }
}

/// Where a reader is.
#[derive(Clone, Debug, Default)]
struct Reader {
    /// By track.
    places: FxHashMap<u32, Place>,
    /// The tracks that it read in last, the very last one at the end.
    recent: Vec<u32>,
}

impl Reader {
    fn has_read_in(&mut self, track: u32) {
        let at = self.recent.iter().position(|recent| *recent == track);
        if let Some(at) = at.or((self.recent.len() >= TOGETHER_MAX).then_some(0)) {
            self.recent.remove(at);
        }
        self.recent.push(track);
    }

    /// The other tracks that it goes along with the one that it read in last, in the order in which it will read in them, and
    /// whether there may be more: in those the reader was once, and may not come back. It is as far along them, or one step behind
    /// and about to take it. `begin` tells the first extent of a track.
    fn together(&self, last: u32, begin: impl Fn(u32) -> i64) -> (Vec<Ahead>, bool) {
        let Some(place) = self.places.get(&last) else { return Default::default() };
        let (step, at) = (place.step, place.first - begin(last));
        let others = self.recent.iter().filter(|track| **track != last);
        let others = others.filter_map(|track| Some((*track, self.places.get(track)?)));
        let beside = others.filter(|(track, place)| {
            let behind = at - (place.first - begin(*track));
            place.step == step && (behind == 0 || behind == step)
        });
        let (proven, unproven): (Vec<_>, Vec<_>) = beside.partition(|(_, place)| place.right > 0);
        (proven.into_iter().filter_map(|(track, place)| Ahead::whole(track, place)).collect(), !unproven.is_empty())
    }
}

/// A track with a reader who will go on in it.
#[derive(Clone, Debug)]
struct Ahead {
    track: u32,
    place: Place,
    /// Extents that it takes in one read.
    group: i64,
    /// With a part, that of extents of the same length is read, or of all if it goes beyond their ends, as buffers do; else
    /// all of each.
    part: Option<(u64, Range<u64>)>,
    left_bytes: u64,
}

impl Ahead {
    fn new(track: u32, place: &Place, group: i64, part: Option<(u64, Range<u64>)>) -> Ahead {
        Ahead { track, place: place.clone(), group, part, left_bytes: AHEAD_BYTES_MAX }
    }

    /// `None` while its last extent is not known to have been read as far as it will be.
    fn whole(track: u32, place: &Place) -> Option<Ahead> {
        let group = place.end - place.first;
        let part = cut(group, place.whole.clone(), place.part.clone());
        let is_whole = part.as_ref().is_none_or(|(len, part)| part.end > *len);
        is_whole.then(|| Ahead::new(track, place, group, part))
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
        let (first, end, group) = (indices.start as i64, indices.end as i64, indices.len() as i64);
        let here = self.extents[indices.start].bytes();
        let (whole, mut part) = (0..here.end - here.start, within(&here, bytes));
        if group == 1 {
            part.end = part.end.max(bytes.end - here.start);
        }
        if part.start == 0 && (part.end..=part.end + SUM_BYTES_MAX).contains(&whole.end) {
            part = whole.clone();
        }
        let Some(place) = reader.places.get_mut(&track) else {
            let place = Place {
                first,
                end,
                part: part.clone(),
                whole: whole.clone(),
                step: group,
                seen: 0,
                right: 0,
                run: Run { first, reads: 1 },
                before: None,
                jump: None,
            };
            reader.places.insert(track, place.clone());
            let is_cut = group == 1 && (part.start > 0 || part.end < whole.end);
            if is_cut || self.unproven >= UNPROVEN_MAX + 2 * self.proven {
                return false;
            }
            self.predict(&mut [Ahead::new(track, &place, group, cut(group, whole, part))], 1, may, next);
            return true;
        };
        let moved = first - place.first;
        place.end = if moved == 0 { place.end.max(end) } else { end };
        if moved == 0 {
            place.part = place.part.start.min(part.start)..place.part.end.max(part.end);
            return place.right > 0;
        }
        // What was read of the extent before will be read of the next ones.
        let before = (std::mem::replace(&mut place.whole, whole), std::mem::replace(&mut place.part, part));
        place.first = first;
        if moved == place.step {
            (place.right, place.seen) = (place.right + 1, 0);
            place.run.reads += 1;
        } else if moved == place.seen {
            place.steps_by(moved);
        } else if !place.begins_run() {
            (place.seen, place.right) = (moved, 0);
            return false;
        }
        let place = place.clone();
        // A read of many extents goes through its tracks by itself.
        let (mut ahead, more) = match steps_max == STEPS_MAX {
            true => reader.together(track, |track| self.tracks[track as usize].start as i64),
            false => Default::default(),
        };
        let steps = if more { 1 } else { place.steps((steps_max / (ahead.len() as u32 + 1)).max(1)) };
        ahead.push(Ahead::new(track, &place, group, cut(group, before.0, before.1)));
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

/// The length of an extent and the part of it that is read, where that is not all of it. A read of several takes all of each.
fn cut(group: i64, whole: Range<u64>, part: Range<u64>) -> Option<(u64, Range<u64>)> {
    (group == 1 && part != whole).then_some((whole.end, part))
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KIB: u64 = 1024;

    /// Row groups of eight columns of 64 KiB each, by column.
    fn columns(groups: u64) -> Vec<Vec<Range<u64>>> {
        let at = |g: u64, c: u64| (g * 8 + c) * 64 * KIB;
        (0..8).map(|c| (0..groups).map(|g| at(g, c)..at(g, c) + 64 * KIB).collect()).collect()
    }

    fn sum(ranges: &[Range<u64>]) -> u64 {
        ranges.iter().map(|r| r.end - r.start).sum()
    }

    #[test]
    fn the_wanted_columns_are_found_and_the_others_left_alone() {
        let mut tracks = Tracks::new(columns(40), 1 << 30);
        let (mut hits, mut predicted, mut used) = (0, 0, 0);
        for group in 0..40 {
            for column in [1, 4, 6] {
                let read = columns(40)[column][group].clone();
                let next = tracks.read(1, &read, &mut |_| true).unwrap();
                hits += u64::from(next.was_predicted);
                (predicted, used) = (predicted + sum(&next.next), used + next.used_bytes);
            }
        }
        assert_eq!((hits, predicted, used), (39 * 3, 39 * 3 * 64 * KIB, 39 * 3 * 64 * KIB));
        assert_eq!(tracks.depart(1), 0);
    }

    /// What is predicted is asked for in the order in which it will be read, whichever column shows it.
    #[test]
    fn columns_read_in_turn_come_in_turn() {
        let mut tracks = Tracks::new(columns(400), 1 << 30);
        let mut predicted = Vec::new();
        for group in 0..400 {
            for column in [1, 6, 4] {
                let read = columns(400)[column][group].clone();
                // As with a device that is not known yet, little is granted in the beginning.
                let mut left = (group as u64 + 1) * 3 * 64 * KIB;
                let mut may = |bytes| {
                    left = left.saturating_sub(bytes);
                    left > 0
                };
                predicted.extend(tracks.read(1, &read, &mut may).unwrap().next);
            }
        }
        let read = (0..400).flat_map(|group| [1, 6, 4].map(|column| columns(400)[column][group].clone()));
        let missed = read.filter(|read| !predicted.contains(read)).count();
        assert!(missed <= 3, "{missed}");
        let place = |range: &Range<u64>| {
            let (group, column) = (range.start / (8 * 64 * KIB), range.start / (64 * KIB) % 8);
            group * 3 + [1, 6, 4].iter().position(|c| *c == column).unwrap() as u64
        };
        let places: Vec<u64> = predicted.iter().map(place).collect();
        assert!(places.is_sorted(), "{places:?}");
    }

    /// Pages of different lengths, each with a sum that the reader passes over.
    #[test]
    fn a_sum_at_the_end_that_is_not_read_makes_no_difference() {
        let page = |i: u64| i * 64 * KIB..i * 64 * KIB + 20 * KIB + i * i % 1000;
        let mut tracks = Tracks::new([(0..40).map(page).collect()], 1 << 30);
        let reads = (0..40).map(|i| page(i).start..page(i).end - 8);
        let hits = reads.filter(|read| tracks.read(1, read, &mut |_| true).is_some_and(|next| next.was_predicted));
        assert_eq!(hits.count(), 39);
    }

    /// A reader fills a buffer that is longer than the columns of a group: what it reads for one column is not meant for the
    /// next ones, and comes as a whole, so that no second request fetches its rest.
    #[test]
    fn of_a_buffer_that_is_filled_all_is_predicted_and_other_columns_are_not() {
        let column = |c: u64, g: u64| {
            let at = g * 1000 * KIB + c * 46 * KIB;
            at..at + 45 * KIB + g * g % 1000
        };
        let buffer = 128 * KIB;
        let mut tracks = Tracks::new((0..8).map(|c| (0..40).map(|g| column(c, g)).collect()), 40_000 * KIB);
        let (mut hits, mut predicted): (u64, Vec<Range<u64>>) = (0, Vec::new());
        for group in 0..40 {
            for c in [1, 5] {
                let start = column(c, group).start;
                let read = start..start + buffer;
                let next = tracks.read(1, &read, &mut |_| true).unwrap();
                assert_eq!(next.was_predicted, predicted.iter().any(|r| r.start <= read.start && read.end <= r.end));
                hits += u64::from(next.was_predicted);
                predicted.extend(next.next);
            }
        }
        assert_eq!((hits, predicted.len() as u64), (39 * 2, 39 * 2));
        assert_eq!(tracks.depart(1), 0);
    }

    #[test]
    fn buffers_that_overlap_are_brought_in_once() {
        const LEN: u64 = 45 * KIB;
        let mut tracks = Tracks::new([(0..200).map(|i| i * LEN..(i + 1) * LEN).collect()], 200 * LEN);
        let (mut hits, mut predicted) = (0, 0);
        for i in 0..200 {
            let read = i * LEN..(i * LEN + 128 * KIB).min(200 * LEN);
            let next = tracks.read(1, &read, &mut |_| true).unwrap();
            hits += u64::from(next.was_predicted);
            predicted += sum(&next.next);
        }
        assert!(hits >= 197, "all but the first one, and the last ones, which come with those before: {hits}");
        assert_eq!(predicted, 200 * LEN - 128 * KIB, "all but what the first read had");
    }

    #[test]
    fn a_second_pass_is_predicted_like_the_first() {
        let mut tracks = Tracks::new(columns(40), 1 << 30);
        for pass in 0..3 {
            let (mut hits, mut predicted) = (0, 0);
            for read in &columns(40)[2] {
                let next = tracks.read(1, read, &mut |_| true).unwrap_or_default();
                hits += u64::from(next.was_predicted);
                predicted += sum(&next.next);
            }
            assert_eq!((hits, predicted), (39, 39 * 64 * KIB), "pass {pass}");
        }
        // Another program begins when the first one is at the end, whose pages may be gone.
        let longer: Vec<_> = (0..1000).map(|i| i * KIB..(i + 1) * KIB).collect();
        let mut tracks = Tracks::new([longer.clone()], 1 << 30);
        longer.iter().for_each(|read| drop(tracks.read(1, read, &mut |_| true)));
        let next = tracks.read(2, &longer[0], &mut |_| true).unwrap();
        assert!(!next.was_predicted && next.next.len() == 1, "{next:?}");
    }

    #[test]
    fn programs_that_read_the_same_at_the_same_time_bring_it_in_once() {
        let mut tracks = Tracks::new(columns(40), 1 << 30);
        let (mut hits, mut predicted) = (0, 0);
        for at in 0..40 + 5 {
            for (reader, group) in [(1, Some(at)), (2, usize::checked_sub(at, 5))] {
                let Some(read) = group.and_then(|group| columns(40)[2].get(group).cloned()) else { continue };
                let next = tracks.read(reader, &read, &mut |_| true).unwrap_or_default();
                hits += u64::from(next.was_predicted);
                predicted += sum(&next.next);
            }
        }
        assert_eq!((hits, predicted), (2 * 39, 39 * 64 * KIB));
    }

    #[test]
    fn extents_in_any_order_of_the_file_are_read_in_the_order_of_the_data() {
        // Chunks scattered over the file, of a table of 10 x 10; a column is read, upward and downward.
        let extents: Vec<_> = (0..100u64).map(|i| (i * 37 % 100) * 10_000).map(|at| at..at + 9_000).collect();
        for backward in [false, true] {
            let mut tracks = Tracks::new([extents.clone()], 1 << 30);
            let mut order: Vec<usize> = (0..10).map(|row| row * 10 + 3).collect();
            if backward {
                order.reverse();
            }
            let hits: Vec<bool> = order
                .iter()
                .map(|i| tracks.read(1, &extents[*i].clone(), &mut |_| true).is_some_and(|next| next.was_predicted))
                .collect();
            assert_eq!(hits.iter().filter(|hit| **hit).count(), 7, "{hits:?}");
            assert_eq!(tracks.depart(1), 9_000, "the first guess was wrong, and nothing beyond the table");
        }
    }

    #[test]
    fn what_is_read_at_once_comes_at_once() {
        let mut tracks = Tracks::new([(0..64).map(|i| i * KIB..(i + 1) * KIB).collect()], 1 << 20);
        let next = tracks.read(1, &(0..8 * KIB), &mut |_| true).unwrap();
        assert_eq!((next.next.len(), next.next[0].clone()), (1, 8 * KIB..16 * KIB));
        let next = tracks.read(1, &(8 * KIB..16 * KIB), &mut |_| true).unwrap();
        assert!(next.was_predicted && next.next.len() == 1 && next.next[0] == (16 * KIB..32 * KIB), "{next:?}");
    }

    #[test]
    fn neighbours_in_the_file_that_are_far_apart_in_the_data_predict_nothing() {
        // The first and the last extent of the data stand side by side.
        let mut extents: Vec<_> = (0..1000).map(|i| i * KIB..(i + 1) * KIB).collect();
        extents.insert(0, 1000 * KIB..1001 * KIB);
        let mut tracks = Tracks::new([extents], 1 << 30);
        assert_eq!(tracks.read(1, &(999 * KIB..1001 * KIB), &mut |_| true), None);
        assert_eq!(tracks.clear(), 0);
    }

    #[test]
    fn a_read_predicts_a_bounded_number_of_bytes_and_extents() {
        let long: Vec<_> = (0..64).map(|i| (i * 4) << 20..(i * 4 + 4) << 20).collect();
        let mut tracks = Tracks::new([long], 1 << 30);
        assert_eq!(tracks.read(1, &(0..128 << 20), &mut |_| true).map(|next| sum(&next.next)), Some(0));
        let short: Vec<_> = (0..60_000).map(|i| i * KIB..(i + 1) * KIB).collect();
        let mut tracks = Tracks::new([short], 1 << 30);
        for i in 0..10 {
            let read = i * 200 * KIB..(i + 1) * 200 * KIB;
            let mut asked = 0;
            let next = tracks
                .read(1, &read, &mut |_| {
                    asked += 1;
                    true
                })
                .unwrap();
            assert!(sum(&next.next) <= LOOKED_AT_MAX as u64 * KIB && asked <= 5, "{next:?}");
        }
    }

    /// A table of 16 x 32 chunks: of every fourth column the upper 12 rows, downward.
    #[test]
    fn columns_one_after_the_other_are_foreseen_beyond_their_ends() {
        let chunks: Vec<_> = (0..512u64).map(|i| i * 64 * KIB..(i + 1) * 64 * KIB).collect();
        let mut tracks = Tracks::new([chunks.clone()], 1 << 30);
        let (mut missed, mut predicted, mut used) = (Vec::new(), 0, 0);
        for column in (0..32).step_by(4) {
            let mut of_column = 0;
            for row in 0..12 {
                let read = &chunks[row * 32 + column];
                let next = tracks.read(1, read, &mut |_| true).unwrap_or_default();
                of_column += usize::from(!next.was_predicted);
                (predicted, used) = (predicted + sum(&next.next), used + next.used_bytes);
            }
            missed.push(of_column);
        }
        assert_eq!(missed, [3, 2, 1, 0, 0, 0, 0, 0], "after one column its length is known, after two the next one");
        // The first guess, four below the first column, and what would follow the last one.
        assert!((predicted - used) / (64 * KIB) <= 12, "{}", predicted - used);
        assert_eq!(tracks.depart(1), predicted - used);
    }

    #[test]
    fn of_rows_read_in_part_only_that_part_comes() {
        let rows: Vec<_> = (0..20u64).map(|i| i * 256 * KIB..(i + 1) * 256 * KIB).collect();
        let mut tracks = Tracks::new([rows], 1 << 30);
        let read = |i: u64| i * 256 * KIB + 64 * KIB..i * 256 * KIB + 192 * KIB;
        assert!(tracks.read(1, &read(0), &mut |_| true).is_none(), "what is read of it is not known before it is left");
        assert_eq!(tracks.read(1, &read(1), &mut |_| true).unwrap().next, [read(2), read(3)]);
        let next = tracks.read(1, &read(2), &mut |_| true).unwrap();
        assert!(next.was_predicted && next.used_bytes == 128 * KIB);
    }

    #[test]
    fn whole_extents_of_different_lengths_are_followed() {
        let extents: Vec<_> = (0..40u64).map(|i| i * 100 * KIB..i * 100 * KIB + (20 + i * 7 % 60) * KIB).collect();
        let mut tracks = Tracks::new([extents.clone()], 1 << 30);
        let mut reads = extents.iter().step_by(2);
        let hits = reads.by_ref().filter(|read| tracks.read(1, read, &mut |_| true).is_some_and(|n| n.was_predicted));
        assert_eq!(hits.count(), 17);
    }

    #[test]
    fn extents_read_in_pieces_come_as_a_whole() {
        let mut tracks = Tracks::new(columns(20), 1 << 30);
        let pieces = |group: usize| {
            let extent = columns(20)[2][group].clone();
            (0..8).map(move |i| extent.start + i * 8 * KIB..extent.start + (i + 1) * 8 * KIB)
        };
        let mut hits = 0;
        for read in (0..20).flat_map(pieces) {
            hits += u32::from(tracks.read(1, &read, &mut |_| true).is_some_and(|next| next.was_predicted));
        }
        assert_eq!(hits, 18 * 8);
        assert_eq!(tracks.depart(1), 0);
    }

    #[test]
    fn single_reads_in_many_tracks_cost_little() {
        let extent = |t: u64, i: u64| (t * 10 + i) * KIB..(t * 10 + i + 1) * KIB;
        let many: Vec<Vec<Range<u64>>> = (0..1000).map(|t| (0..10).map(|i| extent(t, i)).collect()).collect();
        let mut tracks = Tracks::new(many.clone(), 1 << 30);
        let predicted: u64 =
            many.iter().filter_map(|t| tracks.read(1, &t[0], &mut |_| true)).map(|n| sum(&n.next)).sum();
        assert_eq!(predicted, UNPROVEN_MAX * KIB);
        assert_eq!(tracks.depart(1), predicted);
    }

    #[test]
    fn an_extent_takes_little_memory() {
        assert_eq!(size_of::<Extent>(), 24);
    }

    #[test]
    fn nothing_is_predicted_without_leave_or_beyond_the_file() {
        let mut tracks = Tracks::new(columns(40), 1 << 30);
        assert_eq!(tracks.read(1, &(0..64 * KIB), &mut |_| false).unwrap().next, []);
        assert!(Tracks::new([vec![0..10, 90..101]], 100).is_empty(), "one extent has no successor");
        assert!(tracks.read(1, &(1 << 29..(1 << 29) + 1), &mut |_| true).is_none());
    }

    proptest! {
        /// Whatever the index says and the program reads, each extent is predicted at most once while it is not read, and
        /// what is predicted is used or unread.
        #[test]
        fn nothing_is_predicted_twice(
            tracks in prop::collection::vec(prop::collection::vec((0u64..5000, 0u64..300), 0..40), 0..6),
            reads in prop::collection::vec((0u64..3, 0u64..5000, 1u64..600), 0..200),
        ) {
            let tracks = tracks.into_iter().map(|t| t.into_iter().map(|(at, len)| at..at + len).collect::<Vec<_>>());
            let mut tracks = Tracks::new(tracks, 5000);
            let (mut predicted, mut used) = (0, 0);
            for (reader, at, len) in reads {
                if let Some(next) = tracks.read(reader, &(at..at + len), &mut |bytes| bytes < 1000) {
                    prop_assert!(next.next.iter().all(|r| r.start < r.end && r.end <= 5000));
                    (predicted, used) = (predicted + sum(&next.next), used + next.used_bytes);
                }
            }
            let unread = tracks.clear();
            prop_assert!(used + unread <= predicted, "{} {} {}", used, unread, predicted);
        }
    }
}
