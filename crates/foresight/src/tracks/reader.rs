//! Where a reader is in the tracks of a file, and where it will be some steps further.

use std::ops::Range;

use rustc_hash::FxHashMap;

use super::STEPS_MAX;

/// Bytes in one track ahead of the reader at most.
const AHEAD_BYTES_MAX: u64 = 16 << 20;
/// Steps predicted in a run that begins like the one before.
const LIKELY_MAX: u32 = 16;
/// Tracks that one reader goes along together, at most, so that each step looks at one extent of each.
const TOGETHER_MAX: usize = STEPS_MAX as usize;

/// Where a reader is in a track.
#[derive(Clone, Debug)]
pub struct Cursor {
    /// The extents that the last read touched.
    pub first: i64,
    pub end: i64,
    /// Which bytes of the extent there were read so far, and all of it.
    part: Range<u64>,
    whole: Range<u64>,
    step: i64,
    /// The step before, which becomes the step when it is seen again at once; 0 when there is none.
    seen: i64,
    /// Steps in a row that were foreseen.
    pub right: u32,
    /// The equal steps that it is in the middle of, and those before them.
    run: Run,
    before: Option<Run>,
    /// From the beginning of a run to that of the next one, when two were alike.
    jump: Option<i64>,
}

/// Where a read is from the one before.
pub enum Moved {
    /// In the same extents.
    Not,
    /// Where it was foreseen, or in another run. What was read of the extent before will be read of the next ones.
    On {
        whole: Range<u64>,
        part: Range<u64>,
    },
    Elsewhere,
}

/// Reads in equal steps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    first: i64,
    reads: i64,
}

impl Cursor {
    /// A reader of a track in which it was not yet.
    pub fn new(extents: &Range<i64>, (whole, part): (Range<u64>, Range<u64>)) -> Cursor {
        Cursor {
            first: extents.start,
            end: extents.end,
            part,
            whole,
            step: extents.end - extents.start,
            seen: 0,
            right: 0,
            run: Run { first: extents.start, reads: 1 },
            before: None,
            jump: None,
        }
    }

    /// A further read, of these extents and of this part of the first one.
    pub fn read(&mut self, extents: &Range<i64>, (whole, part): (Range<u64>, Range<u64>)) -> Moved {
        let moved = extents.start - self.first;
        if moved == 0 {
            self.end = self.end.max(extents.end);
            self.part = self.part.start.min(part.start)..self.part.end.max(part.end);
            return Moved::Not;
        }
        let (whole, part) = (std::mem::replace(&mut self.whole, whole), std::mem::replace(&mut self.part, part));
        (self.first, self.end) = (extents.start, extents.end);
        if moved == self.step {
            (self.right, self.seen) = (self.right + 1, 0);
            self.run.reads += 1;
        } else if moved == self.seen {
            self.steps_by(moved);
        } else if !self.begins_run() {
            (self.seen, self.right) = (moved, 0);
            return Moved::Elsewhere;
        }
        Moved::On { whole, part }
    }

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
    pub fn steps(&self, steps_max: u32) -> u32 {
        let doubled = 1u32.checked_shl(self.right).unwrap_or(steps_max).min(steps_max);
        let left = self.before.map(|before| before.reads - self.run.reads).filter(|left| *left > 0);
        match left.and_then(|left| u32::try_from(left).ok()) {
            Some(left) if self.jump.is_none() => left.min(steps_max).min(LIKELY_MAX),
            _ => doubled,
        }
    }

    /// Where the reader is after so many steps.
    pub fn after(&self, steps: i64) -> i64 {
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
pub struct Reader {
    /// By track.
    pub places: FxHashMap<u32, Cursor>,
    /// The tracks that it read in last, the very last one at the end.
    recent: Vec<u32>,
}

impl Reader {
    pub fn has_read_in(&mut self, track: u32) {
        let at = self.recent.iter().position(|recent| *recent == track);
        if let Some(at) = at.or((self.recent.len() >= TOGETHER_MAX).then_some(0)) {
            self.recent.remove(at);
        }
        self.recent.push(track);
    }

    /// The other tracks that it goes along with the one that it read in last, in the order in which it will read in them, and
    /// whether there may be more: in those the reader was once, and may not come back. It is as far along them, or one step behind
    /// and about to take it. `begin` tells the first extent of a track.
    pub fn together(&self, last: u32, begin: impl Fn(u32) -> i64) -> (Vec<Ahead>, bool) {
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
pub struct Ahead {
    pub track: u32,
    pub place: Cursor,
    /// Extents that it takes in one read.
    pub group: i64,
    /// With a part, that of extents of the same length is read, or of all if it goes beyond their ends, as buffers do; else
    /// all of each.
    pub part: Option<(u64, Range<u64>)>,
    pub left_bytes: u64,
}

impl Ahead {
    pub fn new(track: u32, place: &Cursor, group: i64, part: Option<(u64, Range<u64>)>) -> Ahead {
        Ahead { track, place: place.clone(), group, part, left_bytes: AHEAD_BYTES_MAX }
    }

    /// `None` while its last extent is not known to have been read as far as it will be.
    pub fn whole(track: u32, place: &Cursor) -> Option<Ahead> {
        let group = place.end - place.first;
        let part = cut(group, place.whole.clone(), place.part.clone());
        let is_whole = part.as_ref().is_none_or(|(len, part)| part.end > *len);
        is_whole.then(|| Ahead::new(track, place, group, part))
    }
}

/// The length of an extent and the part of it that is read, where that is not all of it. A read of several takes all of each.
pub fn cut(group: i64, whole: Range<u64>, part: Range<u64>) -> Option<(u64, Range<u64>)> {
    (group == 1 && part != whole).then_some((whole.end, part))
}
