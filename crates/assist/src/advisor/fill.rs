//! Reads without a pattern: when the whole file is brought in because the program has waited for so long already.
//!
//! An index, a table of chunks, or a tree is read in an order that nothing foretells. One may go on waiting for each read, or
//! pay once for the whole file. As with renting or buying, the file is brought in when the reads that were not foreseen have
//! cost as much time as that takes: whatever the program does then, at most twice the least is paid (Karlin, Manasse,
//! Rudolph & Sleator, *Competitive Snoopy Caching*, 1988, §2). What it takes is measured with one extent. While the file comes
//! in, reads must not become slower. It is not begun where so little can be left to read that it would take longer: a program that
//! reads each chunk of a table once has fewer chunks left with each read.

use std::collections::BTreeSet;
use std::ops::Range;

/// Reads slower than memory, and the time that they took, before an extent is tried.
const SLOW_READS: u64 = 8;
const WAITED_NS_MIN: u64 = 10_000_000;
/// Brought in at a time.
const PIECE_BYTES: u64 = 4 << 20;
/// Pieces on their way at once.
const PIECES_AHEAD: u64 = 16;
/// A file smaller than this is read by the kernel as soon as it is opened.
const FILE_BYTES_MIN: u64 = 256 << 10;
/// Slow reads while the file comes in before they are compared with those before, and how much slower they may be, percent.
const COMPARED_READS: u64 = 16;
const SLOWER_PERCENT: u64 = 125;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum State {
    #[default]
    Watching,
    /// The prefetch of an extent of this many bytes has begun.
    Trying(u64),
    /// The whole file takes so long.
    Known(u64),
    Filling,
    /// All is there, or it does not pay.
    Done,
}

/// Slow reads and their time.
#[derive(Clone, Copy, Debug, Default)]
struct Slow {
    reads: u64,
    ns: u64,
}

impl Slow {
    fn mean_ns(&self) -> u64 {
        self.ns / self.reads.max(1)
    }
}

/// Places remembered, at most.
const PLACES_MAX: usize = 4096;

/// Where reads began.
#[derive(Debug, Default)]
struct Places {
    starts: BTreeSet<u64>,
    /// The least distance between two of them, bytes.
    closest: Option<u64>,
}

impl Places {
    fn add(&mut self, start: u64) {
        if self.starts.len() >= PLACES_MAX {
            return;
        }
        let before = self.starts.range(..start).next_back().map(|before| start - before);
        let after = self.starts.range(start.saturating_add(1)..).next().map(|after| after - start);
        if self.starts.insert(start) {
            self.closest = [self.closest, before, after].into_iter().flatten().min();
        }
    }

    /// How many more there are in a file of `size_bytes` at most, if all are as far apart as those that are known.
    fn left(&self, size_bytes: u64) -> u64 {
        self.closest.map_or(u64::MAX, |closest| (size_bytes / closest + 1).saturating_sub(self.starts.len() as u64))
    }
}

/// What a step asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Bring it in and tell how long that took.
    Try(Range<u64>),
    /// Bring it in.
    Bring(Range<u64>),
}

/// Of one file.
#[derive(Debug, Default)]
pub(super) struct Fill {
    state: State,
    before: Slow,
    while_filling: Slow,
    places: Places,
    /// Everything before this was asked for.
    asked: u64,
    /// Pieces on their way.
    under_way: u64,
}

impl Fill {
    /// A read that was not foreseen and took longer than from memory, of a file of `size_bytes`; where it began, if that is
    /// known. `may` grants bytes.
    pub(super) fn slow_read(
        &mut self,
        start: Option<u64>,
        duration_ns: u64,
        size_bytes: u64,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Vec<Step> {
        let slow = if self.state == State::Filling { &mut self.while_filling } else { &mut self.before };
        (slow.reads, slow.ns) = (slow.reads + 1, slow.ns.saturating_add(duration_ns));
        if let Some(start) = start {
            self.places.add(start);
        }
        match self.state {
            State::Watching
                if self.before.reads >= SLOW_READS
                    && self.before.ns >= WAITED_NS_MIN
                    && size_bytes >= FILE_BYTES_MIN =>
            {
                // A file that does not fit is not begun.
                if !may(size_bytes) {
                    self.state = State::Done;
                    return Vec::new();
                }
                let extent = 0..size_bytes.min(PIECE_BYTES);
                (self.asked, self.state) = (extent.end, State::Trying(extent.end));
                vec![Step::Try(extent)]
            }
            State::Known(all_ns)
                if self.before.ns >= all_ns
                    && self.places.left(size_bytes).saturating_mul(self.before.mean_ns()) > all_ns =>
            {
                self.state = State::Filling;
                self.more(size_bytes)
            }
            State::Filling if self.while_filling.reads == COMPARED_READS => {
                let slower = self.while_filling.mean_ns() > self.before.mean_ns().saturating_mul(SLOWER_PERCENT) / 100;
                if slower {
                    self.state = State::Done;
                }
                self.more(size_bytes)
            }
            _ => self.more(size_bytes),
        }
    }

    /// What is to be asked for next.
    pub(super) fn more(&mut self, size_bytes: u64) -> Vec<Step> {
        let mut steps = Vec::new();
        while self.state == State::Filling && self.under_way < PIECES_AHEAD {
            if self.asked >= size_bytes {
                self.state = State::Done;
                break;
            }
            let piece = self.asked..size_bytes.min(self.asked + PIECE_BYTES);
            (self.asked, self.under_way) = (piece.end, self.under_way + 1);
            steps.push(Step::Bring(piece));
        }
        steps
    }

    /// The extent took so long, for a file of `size_bytes`.
    pub(super) fn tried(&mut self, bytes: &Range<u64>, took_ns: u64, size_bytes: u64) {
        let len = bytes.end - bytes.start;
        if self.state == State::Trying(len) && bytes.start == 0 {
            let rest = u128::from(size_bytes.saturating_sub(len));
            let rest_ns = u128::from(took_ns) * rest / u128::from(len.max(1));
            self.state = State::Known(u64::try_from(rest_ns).unwrap_or(u64::MAX));
        }
    }

    /// A piece has been asked for from the system.
    pub(super) fn arrived(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// Bytes that were asked for.
    pub(super) fn held_bytes(&self) -> u64 {
        self.asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Reads of 5 ms each of a file of 64 MiB that comes in within 320 ms. After how many reads it is asked for.
    fn reads_until_asked(piece_ms: u64, place: impl Fn(u64) -> Option<u64>) -> Option<u64> {
        let mut fill = Fill::default();
        for read in 1..=1000 {
            for step in fill.slow_read(place(read), 5_000_000, 64 * MIB, &mut |_| true) {
                match step {
                    Step::Try(extent) => fill.tried(&extent, piece_ms * 1_000_000, 64 * MIB),
                    Step::Bring(piece) => {
                        assert_eq!(piece.start, 4 * MIB);
                        return Some(read);
                    }
                }
            }
        }
        None
    }

    #[test]
    fn the_file_is_brought_in_when_the_reads_have_cost_as_much() {
        assert_eq!(reads_until_asked(20, |_| None), Some(60), "300 ms for the other 60 MiB");
        assert_eq!(reads_until_asked(200, |_| None), Some(600));
        assert_eq!(reads_until_asked(2000, |_| None), None, "it would take longer than the reads");
    }

    #[test]
    fn it_is_not_begun_where_too_little_is_left() {
        let chunks = |bytes: u64| move |read: u64| Some(read * 205 % (64 * MIB / bytes) * bytes);
        assert_eq!(reads_until_asked(20, chunks(MIB / 4)), Some(60), "of 256 chunks");
        // Of 64 chunks four are left then, and none later.
        assert_eq!(reads_until_asked(20, chunks(MIB)), None);
        let mut places = Places::default();
        (0..1 << 20).for_each(|i| places.add(i * 4096));
        assert_eq!((places.starts.len(), places.left(1 << 40)), (PLACES_MAX, (1 << 28) + 1 - PLACES_MAX as u64));
    }

    #[test]
    fn all_of_it_comes_once_and_stops_where_reads_become_slower() {
        for slower in [false, true] {
            let (mut fill, mut asked) = (Fill::default(), 0);
            for _ in 0..2000 {
                let ns = if slower && fill.state == State::Filling { 9_000_000 } else { 5_000_000 };
                for step in fill.slow_read(None, ns, 402 * MIB, &mut |_| true) {
                    match step {
                        Step::Try(extent) => {
                            asked += extent.end - extent.start;
                            fill.tried(&extent, 20_000_000, 402 * MIB);
                        }
                        Step::Bring(piece) => {
                            assert_eq!(piece.start, asked);
                            asked = piece.end;
                            // One in four arrives at once.
                            (piece.start / PIECE_BYTES).is_multiple_of(4).then(|| fill.arrived());
                        }
                    }
                }
                fill.arrived();
            }
            assert_eq!(asked == 402 * MIB, !slower, "{asked}");
        }
    }

    #[test]
    fn a_file_that_does_not_fit_is_not_begun() {
        let mut fill = Fill::default();
        let steps: usize = (0..100).map(|_| fill.slow_read(None, 5_000_000, 64 * MIB, &mut |_| false).len()).sum();
        assert_eq!((steps, fill.state), (0, State::Done));
    }
}
