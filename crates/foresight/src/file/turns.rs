//! Readers that take a file apart in turns, each every n-th block.
//!
//! What a [run](super::runs) shows of them depends on the order in which their requests come, and that order is the disk's: it
//! serves what is near, so some readers get far ahead of others, and the range read without gaps stands still though all of it
//! will be read. Here readers are known by their steps: of those that go on by the same step, the blocks of all are predicted
//! together and in order, with what the slower ones have left. Where these make up the whole step, everything on
//! their way is. That a file was read so is remembered: who begins to read it again in blocks of that length is taken for one of
//! them.

use std::ops::Range;

use super::FileStreams;
use super::interleaved::OfAny;
use crate::predictor::Shared;

/// Readers that must have made the same step to show turns where the blocks of all with such blocks make up the whole step; and
/// that must have made it twice in a row where they do not.
const WITNESSES: (usize, usize) = (2, 4);
/// Blocks that make up so many eighths of a step make it up: what they leave out is read for nothing. Fewer than so many
/// blocks must make up all of it.
const WHOLE: (u64, usize) = (7, 8);
/// Blocks of a step at most.
const PHASES_MAX: usize = 64;
/// Readers farther from one another than this, and than so many steps, are not on one way, bytes.
const APART: (u64, u64) = (32 << 20, 16);
/// Ways of one file on which readers take turns; one more replaces the one that was used longest ago, if that was not among so
/// many of the file's last requests.
const TURNS_MAX: usize = 16;
const IN_USE_REQUESTS: u64 = 1024;
/// Sequences without readers are looked at with one of so many requests.
const LOOKS: u64 = 4;
/// Steps that the readers have made when their turns are seen, at most.
const STEPS_BEFORE: u64 = 3;
/// Steps that are predicted beyond the foremost reader, at least, and pieces that are at a time.
const STEPS_AHEAD: u64 = 2;
const PIECES_MAX: usize = 256;

/// A reader's last request, and how far it was from the one before; 0: backwards, or of another length.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    start: u64,
    len: u64,
    step: u64,
    /// The step before was the same.
    again: bool,
}

impl Turn {
    /// One of a sequence that goes on by this step, bytes; 0: not known.
    pub(super) fn at(start: u64, len: u64, step: u64) -> Turn {
        Turn { start, len, step, again: step > 0 }
    }

    /// The last step was as the one before, or both were backwards.
    pub(super) fn goes_on(&self) -> bool {
        self.again
    }

    /// Blocks that its step is long.
    pub(super) fn step_blocks(&self) -> u64 {
        self.step.checked_div(self.len).unwrap_or(0)
    }

    /// The reader's next request.
    pub(super) fn next(&mut self, extent: &Range<u64>) {
        let len = extent.end - extent.start;
        let step = if self.len == len { extent.start.saturating_sub(self.start) } else { 0 };
        *self = Turn { start: extent.start, len, step, again: step == self.step };
    }
}

/// How far readers of one way may be apart, bytes.
fn apart(step: u64) -> u64 {
    APART.0.max(step.saturating_mul(APART.1))
}

/// The turns in which a file is read.
#[derive(Clone, Debug)]
pub(super) struct Turns {
    step: u64,
    len: u64,
    /// Where in a step its blocks begin, in order.
    phases: Vec<u64>,
    stream: u32,
    /// They began here.
    from: u64,
    /// The foremost reader has come here.
    front: u64,
    /// All of theirs is read or predicted up to here, but for what budgets left out.
    predicted_to: u64,
    /// The file's requests until the last one that was theirs.
    used: u64,
}

impl Turns {
    /// Whether a request is one of theirs.
    fn has(&self, turn: Turn) -> bool {
        let way = self.from..=self.predicted_to.max(self.front).saturating_add(apart(self.step));
        turn.len == self.len
            && (turn.step == self.step
                || turn.step == 0 && self.phases.binary_search(&(turn.start % self.step)).is_ok())
            && turn.start % self.len == self.front % self.len
            && way.contains(&turn.start)
    }

    fn add_phase(&mut self, phase: u64) {
        if let Err(at) = self.phases.binary_search(&phase)
            && self.phases.len() < PHASES_MAX
        {
            self.phases.insert(at, phase);
        }
    }

    /// Nothing, or hardly anything, is left out.
    fn is_whole(&self) -> bool {
        is_whole(self.phases.len(), self.len, self.step)
    }

    /// Their blocks within these bytes, those that touch as one; and where what was left out for their number begins.
    fn within(&self, bytes: Range<u64>) -> (Vec<Range<u64>>, u64) {
        if self.is_whole() {
            let end = bytes.end;
            return (vec![bytes], end);
        }
        let mut pieces: Vec<Range<u64>> = Vec::new();
        let mut base = bytes.start / self.step * self.step;
        while base < bytes.end {
            for phase in &self.phases {
                let start = base.saturating_add(*phase).max(bytes.start);
                let end = base.saturating_add(phase + self.len).min(bytes.end);
                if start >= end {
                    continue;
                }
                if let Some(last) = pieces.last_mut().filter(|last| last.end == start) {
                    last.end = end;
                    continue;
                }
                if pieces.len() == PIECES_MAX {
                    return (pieces, start);
                }
                pieces.push(start..end);
            }
            base = base.saturating_add(self.step);
        }
        (pieces, bytes.end)
    }
}

fn is_whole(phases: usize, len: u64, step: u64) -> bool {
    let eighths = if phases < WHOLE.1 { 8 } else { WHOLE.0 };
    (phases as u64).saturating_mul(len).saturating_mul(8) >= step.saturating_mul(eighths)
}

impl FileStreams {
    /// What comes of a request if its reader, the one `at` this place, takes turns with others, or if it is of a sequence that does,
    /// `any`, whoever reads it: the stream and what it will read next, in order; `None`: it does not, or that does not pay.
    pub(super) fn in_turns(
        &mut self,
        shared: &mut Shared,
        (at, any): (usize, Option<OfAny>),
        extent: &Range<u64>,
        at_ns: u64,
    ) -> Option<Vec<(u32, Range<u64>)>> {
        let own = self.readers.get(at)?.turn;
        // Of two whose ways meet, the one that began later.
        let with =
            |turn: Turn| (0..self.turns.len()).filter(|i| self.turns[*i].has(turn)).max_by_key(|i| self.turns[*i].from);
        let turn = any.map_or(own, |any| any.turn);
        let number = match (with(turn), any) {
            (Some(number), _) => number,
            (None, None) => {
                let of_readers = |file: &FileStreams| file.readers.iter().map(|reader| reader.turn).collect();
                self.find_turns(shared, own, of_readers)?
            }
            (None, Some(_)) if self.requests.is_multiple_of(LOOKS) => {
                let number = self.find_turns(shared, turn, |file| file.interleaved.fronts(turn))?;
                self.turns[number].from = self.turns[number].from.min(self.interleaved.began());
                number
            }
            _ => return None,
        };
        let turns = self.turns.get_mut(number)?;
        turns.add_phase(turn.start % turns.step);
        let was_read = any.is_none_or(|any| any.is_again || any.since > turns.used);
        let begins = turn.step == 0 && was_read && extent.end + turns.step <= turns.front;
        if begins {
            (turns.front, turns.predicted_to) = (extent.end, extent.end);
        }
        turns.front = turns.front.max(extent.end);
        turns.used = self.requests;
        let ledger = self.ledgers.get_mut(&turns.stream)?;
        shared.stream_lives(&mut ledger.lives, at_ns);
        ledger.account.demanded(turn.len);
        ledger.request(turn.len, at_ns);
        if !ledger.account.pays() {
            return None;
        }
        // Of a step, only their blocks count.
        let theirs = (turns.phases.len() as u64).saturating_mul(turns.len).clamp(1, turns.step);
        let wanted = ledger.window_bytes.max(theirs.saturating_mul(STEPS_AHEAD)).min(shared.part(self.growing));
        let window = (wanted / turn.len).max(1).saturating_mul(turn.len);
        let reach = (u128::from(window) * u128::from(turns.step) / u128::from(theirs)).min(1 << 62) as u64;
        let ahead = turns.predicted_to.saturating_sub(turns.front);
        let to = turns.front.saturating_add(reach).min(self.len_bytes.unwrap_or(u64::MAX)).min(i64::MAX as u64);
        if ahead > reach / 2 || turns.predicted_to >= to || !shared.has_room(window.min(shared.limits.piece_bytes)) {
            return Some(Vec::new());
        }
        let (pieces, predicted_to) = turns.within(turns.predicted_to..to);
        turns.predicted_to = predicted_to;
        Some(pieces.into_iter().map(|piece| (turns.stream, piece)).collect())
    }

    /// Of what turns predict, no more than this is predicted now, the bytes before `predicted_to`.
    pub(super) fn turns_predicted_to(&mut self, stream: u32, predicted_to: u64) {
        if let Some(turns) = self.turns.iter_mut().find(|turns| turns.stream == stream) {
            turns.predicted_to = turns.predicted_to.min(predicted_to);
        }
    }

    /// The turns that a request shows together with the last ones of `all` readers: their number.
    fn find_turns(
        &mut self,
        shared: &mut Shared,
        turn: Turn,
        all: impl FnOnce(&FileStreams) -> Vec<Turn>,
    ) -> Option<usize> {
        let oldest =
            (0..self.turns.len()).min_by_key(|i| self.turns[*i].used).filter(|_| self.turns.len() >= TURNS_MAX);
        let in_use = |i: usize| self.turns[i].used + IN_USE_REQUESTS > self.requests;
        if turn.step <= turn.len || turn.len == 0 || oldest.is_some_and(in_use) {
            return None;
        }
        let all = all(self);
        // Readers without any order, which are many, end here.
        let steps = |other: &&Turn| (other.step, other.len) == (turn.step, turn.len);
        if all.iter().filter(steps).count() < WITNESSES.0 {
            return None;
        }
        let is_near = |other: &&Turn| {
            other.len == turn.len
                && other.start % turn.len == turn.start % turn.len
                && other.start.abs_diff(turn.start) <= apart(turn.step)
        };
        let near: Vec<Turn> = all.iter().filter(is_near).copied().collect();
        let phases_of = |which: &dyn Fn(&&Turn) -> bool| {
            let mut phases: Vec<u64> = near.iter().filter(which).map(|other| other.start % turn.step).collect();
            phases.sort_unstable();
            phases.dedup();
            phases
        };
        let goes_on = |other: &&Turn| other.step == turn.step;
        let twice = |other: &&Turn| goes_on(other) && other.again;
        // One that has begun only, and waits since, takes a turn as well.
        let takes_turns = |other: &&Turn| goes_on(other) || other.step == 0;
        let (sure, all) = (phases_of(&twice), phases_of(&takes_turns));
        let witnesses = near.iter().filter(goes_on).count();
        let phases = match is_whole(all.len(), turn.len, turn.step) {
            true if witnesses >= WITNESSES.0 && all.len() > 1 => all,
            _ if sure.len() >= WITNESSES.1 => sure,
            _ => return None,
        };
        let theirs = || near.iter().filter(|other| phases.binary_search(&(other.start % turn.step)).is_ok());
        let ends = |other: &Turn| other.start + turn.len;
        let front = theirs().filter(goes_on).map(ends).max()?;
        let last = theirs().filter(takes_turns).map(ends).min()?;
        if let Some(oldest) = oldest {
            let gone = self.turns.swap_remove(oldest);
            self.end_stream(shared, gone.stream);
        }
        let stream = self.new_stream();
        self.turns.push(Turns {
            step: turn.step,
            len: turn.len,
            phases,
            stream,
            // Whoever begins again does so some steps before.
            from: ((last - turn.len) / turn.step).saturating_sub(STEPS_BEFORE) * turn.step,
            front,
            predicted_to: last,
            used: self.requests,
        });
        Some(self.turns.len() - 1)
    }
}
