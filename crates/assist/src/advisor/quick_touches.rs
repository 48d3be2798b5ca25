//! Touches of a map that do not wait any more, since what they touch was brought in before.
//!
//! They bring nothing into memory, so the page cache does not show them. But a page that was touched is in the program's page
//! table. So of what was brought in the program's page table is asked about, first as soon as it is there: what was touched by
//! then has waited, or was in memory by itself, and does not count. What is found in the page table later was touched
//! without waiting. Touches of neighbouring parts between two answers count as one, since the kernel, too, would have brought in
//! one part with the other, and there are never more than it would have taken faults.

use std::collections::BTreeMap;
use std::ops::Range;

/// Parts that are looked after, and those asked about at once, at most.
const PARTS_MAX: usize = 8192;
const ASKED_MAX: usize = 1024;
/// From one question to the next: at first, and when no touch is found for long.
const ASK_EVERY_NS: (u64, u64) = (2_000_000, 64_000_000);

/// Of one file.
#[derive(Debug, Default)]
pub(super) struct QuickTouches {
    /// Pieces on their way by their beginnings: what of them nobody has touched yet.
    coming: BTreeMap<u64, Vec<Range<u64>>>,
    /// Parts that are there, by their beginnings: their ends, and whether the program had not touched them when they were.
    there: BTreeMap<u64, (u64, bool)>,
    /// Where the next question goes on.
    cursor: u64,
    ask_ns: u64,
    every_ns: u64,
    /// A question waits for its answer.
    is_asking: bool,
    /// The program's page table cannot be asked.
    is_blind: bool,
}

impl QuickTouches {
    /// A piece is brought in; of it these parts were in memory nowhere.
    pub(super) fn give(&mut self, piece_start: u64, parts: Vec<Range<u64>>) {
        if !self.is_blind {
            self.coming.insert(piece_start, parts);
        }
    }

    /// A piece is there, or does not come.
    pub(super) fn arrived(&mut self, piece_start: u64, came: bool) {
        let Some(parts) = self.coming.remove(&piece_start).filter(|_| came) else { return };
        let room = PARTS_MAX.saturating_sub(self.there.len());
        (self.every_ns, self.ask_ns) = (0, 0);
        self.there.extend(parts.into_iter().take(room).map(|part| (part.start, (part.end, false))));
    }

    /// What to ask the page table about, if anything; to be answered by [`QuickTouches::told`] or [`QuickTouches::blind`].
    pub(super) fn question(&mut self, now_ns: u64) -> Option<Vec<Range<u64>>> {
        if self.is_asking || self.there.is_empty() || now_ns < self.ask_ns {
            return None;
        }
        let parts = self.there.range(self.cursor..).chain(self.there.range(..self.cursor));
        let asked: Vec<Range<u64>> = parts.take(ASKED_MAX).map(|(start, (end, _))| *start..*end).collect();
        self.cursor = asked.last().map_or(0, |last| last.end);
        self.is_asking = true;
        self.every_ns = (self.every_ns * 2).clamp(ASK_EVERY_NS.0, ASK_EVERY_NS.1);
        self.ask_ns = now_ns.saturating_add(self.every_ns);
        Some(asked)
    }

    /// Of the parts that were asked about, whether each has a page in the page table. The number of touches that did not wait.
    pub(super) fn told(&mut self, asked: &[(Range<u64>, bool)]) -> u64 {
        self.is_asking = false;
        let (mut touches, mut counted_to) = (0, None);
        for (part, is_touched) in asked {
            let Some((_, untouched)) = self.there.get_mut(&part.start) else { continue };
            if !is_touched {
                *untouched = true;
                continue;
            }
            let counts = *untouched;
            self.there.remove(&part.start);
            if counts {
                touches += u64::from(counted_to != Some(part.start));
                counted_to = Some(part.end);
            }
        }
        if touches > 0 {
            self.every_ns = 0;
        }
        touches
    }

    /// The page table cannot be asked.
    pub(super) fn blind(&mut self) {
        *self = QuickTouches { is_blind: true, ..QuickTouches::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However soon it is asked again.
    fn question(touches: &mut QuickTouches) -> Option<Vec<Range<u64>>> {
        touches.question(touches.ask_ns)
    }

    #[test]
    fn only_what_was_touched_after_it_had_come_counts() {
        let mut touches = QuickTouches::default();
        assert_eq!(question(&mut touches), None);
        touches.give(0, vec![0..10, 10..20, 20..30, 40..50, 50..60]);
        assert_eq!(question(&mut touches), None, "it is on its way");
        touches.arrived(0, true);
        let ask = |touches: &mut QuickTouches, touched: &[u64]| {
            let asked = question(touches).unwrap();
            assert_eq!(question(touches), None, "one at a time");
            let told: Vec<_> = asked.into_iter().map(|part| (part.clone(), touched.contains(&part.start))).collect();
            touches.told(&told)
        };
        assert_eq!(ask(&mut touches, &[10]), 0, "it waited, or would not have");
        assert_eq!(ask(&mut touches, &[0]), 1);
        assert_eq!(ask(&mut touches, &[20, 40, 50]), 2, "neighbours come together");
        assert_eq!(question(&mut touches), None, "each counts once");
        touches.give(100, vec![100..110, 120..130]);
        touches.arrived(100, false);
        assert_eq!(question(&mut touches), None, "it did not come");
    }

    #[test]
    fn questions_become_seldom_where_nothing_is_found() {
        let mut touches = QuickTouches::default();
        touches.give(0, vec![0..10, 20..30]);
        touches.arrived(0, true);
        let asked = |touches: &mut QuickTouches| {
            let times = (0..1000).filter(|ms| {
                let asked = touches.question(ms * 1_000_000);
                asked.map(|parts| touches.told(&parts.into_iter().map(|p| (p, false)).collect::<Vec<_>>())).is_some()
            });
            times.count()
        };
        assert!((15..25).contains(&asked(&mut touches)));
    }

    #[test]
    fn it_is_bounded_and_ends_where_nothing_can_be_seen() {
        let mut touches = QuickTouches::default();
        let parts = |from: u64| (from..from + 10_000).map(|i| i * 10..i * 10 + 10).collect();
        touches.give(0, parts(0));
        touches.arrived(0, true);
        assert_eq!(touches.there.len(), PARTS_MAX);
        let mut asked = BTreeMap::new();
        for _ in 0..PARTS_MAX / ASKED_MAX {
            let question = question(&mut touches).unwrap();
            assert_eq!(question.len(), ASKED_MAX);
            touches.told(&question.iter().map(|part| (part.clone(), false)).collect::<Vec<_>>());
            asked.extend(question.into_iter().map(|part| (part.start, part.end)));
        }
        assert_eq!(asked.len(), PARTS_MAX, "each has its turn");
        touches.blind();
        touches.give(0, parts(0));
        touches.arrived(0, true);
        assert_eq!(question(&mut touches), None);
    }
}
