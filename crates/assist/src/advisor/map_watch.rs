//! A file that a program has mapped: which parts it touches is seen in the page cache.
//!
//! Nothing tells of a touch, but a page fault brings pages in. What comes into memory without our doing is a touch. Where
//! touches go forward, a window ahead of them is brought in but for a hole in its middle: when the hole fills, the program has
//! come so far, and the next window, twice as long, is brought in. So each window costs the program one fault, and nothing is
//! brought in for a program that has stopped. Of the first windows the hole is at the end: one in the middle is asked for after what lies
//! behind it, and a disk goes back for it, which must not be paid before windows are known to be of use. Where the program does not get on faster by the first windows than it did before
//! them, as on flash that the kernel's own read-ahead keeps busy, there are no more, and where it is fast by itself there are
//! none. Looking costs a system call for each part asked about, so it is done less often
//! when nothing is found, and ends when all is in memory.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

/// What is told apart: as much as the kernel brings in around a fault.
const GRANULE_BYTES: u64 = 128 << 10;
/// Windows: the first, and the longest.
const WINDOW_BYTES: (u64, u64) = (2 << 20, 64 << 20);
/// Touches that must go forward, and the gap between them that is read along.
const FORWARD: usize = 3;
const GAP_BYTES: u64 = 512 << 10;
/// Windows after which it is judged whether the program gets on faster by them, in percent of its pace before.
const JUDGED_WINDOWS: u32 = 3;
const FASTER_PERCENT: u64 = 110;
/// A program that goes through its map as fast as this without us waits for little, bytes a second.
const FAST_BYTES_PER_S: u64 = 400_000_000;
/// No question is about more than this: an answer takes the longer the more is in memory.
const QUESTION_BYTES: u64 = 16 << 20;
/// Questions to the page cache in one look.
const QUESTIONS: u32 = 64;
/// From look to look: at first, and when nothing is found for some time.
const LOOK_EVERY_NS: (u64, u64) = (1_000_000, 64_000_000);
/// When nothing is found for long, the part of that time, one over this, and at most.
const IDLE_SHARE: u64 = 32;
const IDLE_EVERY_NS_MAX: u64 = 4_000_000_000;
/// Reads from this length on take so long that what they read is seen while they do.
const LONG_READ_BYTES: u64 = 1 << 20;
/// A fault is not held to have cost more than this.
const FAULT_NS_MAX: u64 = 20_000_000;

/// How many of some bytes are in memory; `None` where that cannot be asked, or not any more now.
pub type Cached<'a> = dyn FnMut(Range<u64>) -> Option<u64> + 'a;

/// A touch that brought something into memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fault {
    /// So much.
    pub(super) bytes: u64,
    /// Since the touch before, what the program computed included.
    pub(super) took_ns: u64,
}

impl Fault {
    /// What it is held to have waited.
    pub(super) fn waited_ns(self) -> u64 {
        self.took_ns.min(FAULT_NS_MAX.saturating_mul(self.bytes.div_ceil(GRANULE_BYTES)))
    }
}

/// What a look found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Seen {
    /// Bring exactly these in, and nothing beside them.
    pub(super) bring: Vec<Range<u64>>,
    /// Touches that nothing foretold.
    pub(super) faults: Vec<Fault>,
    /// Since when: the touch before them.
    pub(super) since_ns: u64,
}

#[derive(Debug)]
struct Run {
    hole: Range<u64>,
    end: u64,
    window_bytes: u64,
    /// Where the program was, and when.
    since: (u64, u64),
}

/// How fast a program goes through its map.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    bytes: u64,
    ns: u64,
}

impl Pace {
    fn add(&mut self, bytes: u64, ns: u64) {
        (self.bytes, self.ns) = (self.bytes.saturating_add(bytes), self.ns.saturating_add(ns));
    }

    /// It is so many percent of another.
    fn is(&self, percent: u64, of: Pace) -> bool {
        let product = |a: u64, b: u64| u128::from(a) * u128::from(b);
        product(self.bytes, of.ns) * 100 >= product(of.bytes, self.ns) * u128::from(percent)
    }
}

/// The maps of one file.
#[derive(Debug)]
pub(super) struct MapWatch {
    /// What is mapped and was not seen in memory, start to end.
    unknown: BTreeMap<u64, u64>,
    /// The end of the last map.
    end: u64,
    /// Where the next look goes on.
    cursor: u64,
    touched: VecDeque<Range<u64>>,
    run: Option<Run>,
    /// What was in memory before has been passed over.
    is_settled: bool,
    touched_ns: u64,
    look_ns: u64,
    every_ns: u64,
    held_bytes: u64,
    /// The longest window.
    window_bytes_max: u64,
    /// The program's pace before the first window, and by windows; of how many it has come to the hole.
    before: Pace,
    by_windows: Pace,
    windows: u32,
}

impl MapWatch {
    pub(super) fn new(now_ns: u64) -> MapWatch {
        MapWatch {
            unknown: BTreeMap::new(),
            end: 0,
            cursor: 0,
            touched: VecDeque::new(),
            run: None,
            is_settled: false,
            touched_ns: now_ns,
            look_ns: now_ns,
            every_ns: LOOK_EVERY_NS.0,
            held_bytes: 0,
            window_bytes_max: WINDOW_BYTES.1,
            before: Pace::default(),
            by_windows: Pace::default(),
            windows: 0,
        }
    }

    /// These bytes are mapped, too. What is known of them already is forgotten.
    pub(super) fn add(&mut self, bytes: Range<u64>) {
        self.take(&bytes);
        let mut at = bytes.start;
        while at < bytes.end {
            let end = (at / QUESTION_BYTES + 1).saturating_mul(QUESTION_BYTES).min(bytes.end);
            self.unknown.insert(at, end);
            at = end;
        }
        self.end = self.end.max(bytes.end);
        self.every_ns = LOOK_EVERY_NS.0;
    }

    /// Whether there is anything to look at.
    pub(super) fn is_done(&self) -> bool {
        self.unknown.is_empty() && self.run.is_none()
    }

    /// A read has ended that was watched. Whether it was a long one on the way that windows are brought in for, so that the next one
    /// is likely to go on there. From then on no window is longer than two such reads: the program may stop after each.
    pub(super) fn goes_on(&mut self, read: &Range<u64>) -> bool {
        let len = read.end.saturating_sub(read.start);
        let on_the_way = |run: &Run| read.start <= run.end && (run.since.0..=run.end + GAP_BYTES).contains(&read.end);
        let goes_on = len >= LONG_READ_BYTES && self.run.as_ref().is_some_and(on_the_way);
        if goes_on {
            self.window_bytes_max = len.saturating_mul(2).clamp(WINDOW_BYTES.0, WINDOW_BYTES.1);
        }
        goes_on
    }

    /// When to look again.
    pub(super) fn look_ns(&self) -> u64 {
        self.look_ns
    }

    /// Bytes that were brought in.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Looks at what has come into memory; `may` grants bytes to bring in.
    pub(super) fn look(&mut self, now_ns: u64, cached: &mut Cached<'_>, may: &mut dyn FnMut(u64) -> bool) -> Seen {
        let mut seen = Seen::default();
        let mut found = false;
        if let Some(run) = &self.run
            && cached(run.hole.clone()).is_some_and(|bytes| bytes > 0)
        {
            let (end, window_bytes) = (run.end, (run.window_bytes * 2).min(self.window_bytes_max));
            let at = (run.hole.start, now_ns);
            self.by_windows.add(at.0 - run.since.0, now_ns.saturating_sub(run.since.1));
            self.windows += 1;
            (self.run, found) = (None, true);
            if self.windows == JUDGED_WINDOWS && !self.by_windows.is(FASTER_PERCENT, self.before) {
                self.unknown.clear();
                return seen;
            }
            self.window((end, at), window_bytes, &mut seen, may);
        }
        let (touches, all_looked_at) = self.touches(cached);
        let granules = |touch: &Range<u64>| (touch.end - touch.start).div_ceil(GRANULE_BYTES);
        let of_all = touches.iter().map(granules).sum::<u64>().max(1);
        seen.since_ns = self.touched_ns;
        let since_ns = now_ns.saturating_sub(self.touched_ns);
        found |= !touches.is_empty();
        for touch in touches {
            if !self.is_settled {
                continue;
            }
            // Which came when is not known: each of them has its share of the time.
            let took_ns = since_ns / of_all * granules(&touch);
            seen.faults.push(Fault { bytes: touch.end - touch.start, took_ns });
            self.touched_ns = now_ns;
            // What was before the first is not known.
            if self.held_bytes == 0 && !self.touched.is_empty() {
                self.before.add(touch.end - touch.start, took_ns);
            }
            // One that passes over parts may have passed over the hole, too.
            let after = |run: &mut Run| (run.end..=run.end.saturating_add(GAP_BYTES)).contains(&touch.start);
            if let Some(run) = self.run.take_if(after) {
                self.touched.clear();
                self.window(
                    (touch.end, (touch.end, now_ns)),
                    (run.window_bytes * 2).min(self.window_bytes_max),
                    &mut seen,
                    may,
                );
                continue;
            }
            self.touched.push_back(touch.clone());
            if self.touched.len() > FORWARD {
                self.touched.pop_front();
            }
            let forward = |(a, b): (&Range<u64>, &Range<u64>)| a.end <= b.start && b.start - a.end <= GAP_BYTES;
            let goes_on = self.touched.iter().zip(self.touched.iter().skip(1)).all(forward);
            if self.touched.len() == FORWARD && goes_on {
                self.touched.clear();
                if self.before.is(100, Pace { bytes: FAST_BYTES_PER_S, ns: 1_000_000_000 }) {
                    self.unknown.clear();
                    return seen;
                }
                self.window((touch.end, (touch.end, now_ns)), WINDOW_BYTES.0, &mut seen, may);
            }
        }
        self.every_ns = match found {
            true => LOOK_EVERY_NS.0,
            // What was not looked at may have been touched.
            false if !all_looked_at => self.every_ns,
            false => {
                let idle_ns = now_ns.saturating_sub(self.touched_ns) / IDLE_SHARE;
                (self.every_ns * 2).min(idle_ns.clamp(LOOK_EVERY_NS.1, IDLE_EVERY_NS_MAX))
            }
        };
        // While a run goes on it must not get ahead of us.
        if self.run.is_some() {
            self.every_ns = self.every_ns.min(LOOK_EVERY_NS.0 * 4);
        }
        self.look_ns = now_ns.saturating_add(self.every_ns);
        seen
    }

    /// Brings in a window from `start` on, but for a hole: in the middle once windows have been of use, so that the next one is asked for
    /// in time. `since`: where the program is, and when.
    fn window(
        &mut self,
        (start, since): (u64, (u64, u64)),
        window_bytes: u64,
        seen: &mut Seen,
        may: &mut dyn FnMut(u64) -> bool,
    ) {
        // Not beyond what is mapped, nor into what is in memory.
        let parts = self.unknown.range(..start.saturating_add(window_bytes)).skip_while(|(_, end)| **end <= start);
        let mapped_end = parts.fold(start, |at, (from, end)| if *from <= at { at.max(*end) } else { at });
        let window = start..mapped_end.min(start.saturating_add(window_bytes));
        let len = window.end - window.start;
        if len == 0 || !may(len) {
            return;
        }
        let hole = if self.windows >= JUDGED_WINDOWS {
            let middle = (window.start + len / 2).next_multiple_of(GRANULE_BYTES);
            middle..(middle + GRANULE_BYTES).min(window.end)
        } else {
            let end = window.end / GRANULE_BYTES * GRANULE_BYTES;
            end.saturating_sub(GRANULE_BYTES).max(window.start)..end
        };
        self.take(&window);
        self.held_bytes += len;
        if hole.start < hole.end && hole != window && window.end < self.end {
            seen.bring.extend([window.start..hole.start, hole.end..window.end].into_iter().filter(|r| r.start < r.end));
            self.run = Some(Run { hole, end: window.end, window_bytes, since });
        } else {
            seen.bring.push(window);
            self.run = None;
        }
    }

    /// Parts that came into memory since the last look, joined where they touch, and whether all of the map was looked at.
    fn touches(&mut self, cached: &mut Cached<'_>) -> (Vec<Range<u64>>, bool) {
        let (mut left, mut all_told) = (QUESTIONS, true);
        let cached = &mut |range: Range<u64>| {
            let told = cached(range);
            all_told &= told.is_some();
            told
        };
        let mut touched: Vec<Range<u64>> = Vec::new();
        let from = self.cursor;
        let order: Vec<(u64, u64)> = self
            .unknown
            .range(from..)
            .chain(self.unknown.range(..from))
            .take(QUESTIONS as usize)
            .map(|(start, end)| (*start, *end))
            .collect();
        for (start, end) in order {
            if left == 0 {
                break;
            }
            self.cursor = start + 1;
            narrow(start..end, &mut left, cached, &mut touched);
        }
        let all_looked_at = left > 0 && all_told;
        if all_looked_at && !self.is_settled {
            // What has been found so far was there before.
            touched.drain(..).for_each(|part| self.take(&part));
            self.is_settled = true;
        }
        touched.sort_unstable_by_key(|part| part.start);
        touched.iter().for_each(|part| self.take(part));
        let mut joined: Vec<Range<u64>> = Vec::new();
        for part in touched {
            match joined.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => joined.push(part),
            }
        }
        (joined, all_looked_at)
    }

    /// These bytes are brought in for another reason: they are no touch. The parts of them that were in memory nowhere.
    pub(super) fn give(&mut self, bytes: &Range<u64>) -> Vec<Range<u64>> {
        let first = bytes.start / GRANULE_BYTES * GRANULE_BYTES;
        let parts = (first..bytes.end).step_by(GRANULE_BYTES as usize).map(|start| start..start + GRANULE_BYTES);
        let within = parts.map(|part| part.start.max(bytes.start)..part.end.min(bytes.end));
        let unknown = |part: &Range<u64>| {
            let over = self.unknown.range(..=part.start).next_back();
            over.is_some_and(|(_, end)| *end >= part.end)
        };
        let untouched = within.filter(unknown).collect();
        self.take(bytes);
        untouched
    }

    /// These bytes are known.
    fn take(&mut self, bytes: &Range<u64>) {
        let over: Vec<(u64, u64)> = self
            .unknown
            .range(..bytes.end)
            .rev()
            .take_while(|(_, end)| **end > bytes.start)
            .map(|(s, e)| (*s, *e))
            .collect();
        for (start, end) in over {
            self.unknown.remove(&start);
            if start < bytes.start {
                self.unknown.insert(start, bytes.start);
            }
            if bytes.end < end {
                self.unknown.insert(bytes.end, end);
            }
        }
    }
}

/// Halves a range until the granules are found that are in memory.
fn narrow(range: Range<u64>, left: &mut u32, cached: &mut Cached<'_>, found: &mut Vec<Range<u64>>) {
    if *left == 0 {
        return;
    }
    *left -= 1;
    let len = range.end - range.start;
    match cached(range.clone()) {
        // Where it cannot be asked, nothing is ever found.
        None | Some(0) => {}
        Some(bytes) if bytes >= len || len <= GRANULE_BYTES => found.push(range),
        Some(_) => {
            let middle = (range.start + len / 2).next_multiple_of(GRANULE_BYTES).min(range.end);
            narrow(range.start..middle, left, cached, found);
            if middle < range.end {
                narrow(middle..range.end, left, cached, found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const SIZE: u64 = 64 << 20;

    /// A page cache in granules, and a program that touches some of them, one in each look: 5 ms if it is not there, else 0.1 ms.
    fn run(touches: impl IntoIterator<Item = u64>, warm: Range<u64>) -> (u64, u64, Vec<Range<u64>>, MapWatch) {
        paced(touches, warm, (5_000_000, 100_000))
    }

    fn paced(
        touches: impl IntoIterator<Item = u64>,
        warm: Range<u64>,
        (fault_ns, hit_ns): (u64, u64),
    ) -> (u64, u64, Vec<Range<u64>>, MapWatch) {
        let mut memory: BTreeSet<u64> = (warm.start / GRANULE_BYTES..warm.end / GRANULE_BYTES).collect();
        let (mut watch, mut brought) = (MapWatch::new(0), Vec::new());
        watch.add(0..SIZE);
        let (mut faults, mut questions, mut now_ns) = (0, 0, 0);
        for granule in touches {
            let mut cached = |r: Range<u64>| {
                questions += 1;
                let held = memory.range(r.start / GRANULE_BYTES..r.end.div_ceil(GRANULE_BYTES)).count() as u64;
                Some(held * GRANULE_BYTES)
            };
            let seen = watch.look(now_ns, &mut cached, &mut |_| true);
            let goes_back = seen.bring.len() > 1;
            assert!(!goes_back || watch.windows >= JUDGED_WINDOWS, "a disk goes back for a hole: {:?}", seen.bring);
            for range in seen.bring {
                assert!(range.end <= SIZE && range.start < range.end);
                memory.extend(range.start / GRANULE_BYTES..range.end.div_ceil(GRANULE_BYTES));
                brought.push(range);
            }
            let is_fault = memory.insert(granule);
            faults += u64::from(is_fault);
            now_ns += if is_fault { fault_ns } else { hit_ns };
        }
        (faults, questions, brought, watch)
    }

    #[test]
    fn a_way_through_the_map_is_brought_in_with_few_faults() {
        let granules = SIZE / GRANULE_BYTES;
        let (faults, questions, _, watch) = run(0..granules, 0..0);
        assert!(faults < 14, "of {granules}: {faults}");
        assert!(questions < 40 * granules, "{questions}");
        assert!(watch.held_bytes() <= SIZE);
        // Every other granule as well, and a program that begins in the middle.
        assert!(run((granules / 2..granules).step_by(2), 0..0).0 < 12);
    }

    #[test]
    fn windows_that_make_nothing_faster_end() {
        let (_, _, brought, watch) = paced(0..SIZE / GRANULE_BYTES, 0..0, (1_000_000, 1_000_000));
        let bytes: u64 = brought.iter().map(|r| r.end - r.start).sum();
        assert!(bytes <= 7 * WINDOW_BYTES.0 && watch.is_done(), "{brought:?}");
        let (faults, _, _, _) = paced(0..SIZE / GRANULE_BYTES, 0..0, (1_000_000, 700_000));
        assert!(faults < 14, "{faults}");
        let (_, _, brought, watch) = paced(0..SIZE / GRANULE_BYTES, 0..0, (300_000, 100_000));
        assert!(brought.is_empty() && watch.is_done(), "{brought:?}");
    }

    #[test]
    fn nothing_is_brought_in_for_one_that_stops_or_jumps() {
        let (_, _, brought, _) = run((0..5).chain(std::iter::repeat_n(4, 100)), 0..0);
        let bytes: u64 = brought.iter().map(|r| r.end - r.start).sum();
        assert!(bytes <= WINDOW_BYTES.0, "{brought:?}");
        let (faults, _, brought, _) = run((0..200u64).map(|i| i * 197 % 512), 0..0);
        assert!(brought.is_empty() && faults == 200, "{brought:?}");
    }

    /// Several faults between two looks, more and more of the map in pieces: none of their time is lost.
    #[test]
    fn faults_that_are_seen_late_count_by_their_time() {
        let mut memory = BTreeSet::new();
        let mut watch = MapWatch::new(0);
        watch.add(0..SIZE);
        let (mut now_ns, mut waited_ns, mut next_ns) = (0, 0, 0);
        for i in 0..300u64 {
            if now_ns >= next_ns {
                let mut cached = |r: Range<u64>| {
                    let held = memory.range(r.start / GRANULE_BYTES..r.end.div_ceil(GRANULE_BYTES)).count() as u64;
                    Some(held * GRANULE_BYTES)
                };
                let seen = watch.look(now_ns, &mut cached, &mut |_| true);
                waited_ns += seen.faults.iter().map(|fault| fault.waited_ns()).sum::<u64>();
                assert!(seen.bring.is_empty() && watch.look_ns() <= now_ns + 8_000_000, "{i}: {}", watch.look_ns());
                // The manager has other things to do, too.
                next_ns = watch.look_ns() + 50_000_000;
            }
            memory.insert(i * 197 % 512);
            now_ns += 5_000_000;
        }
        assert!(waited_ns >= now_ns * 8 / 10, "{waited_ns} of {now_ns}");
    }

    #[test]
    fn what_was_in_memory_is_no_touch_and_all_of_it_ends_the_watch() {
        let (_, _, brought, watch) = run(std::iter::repeat_n(511, 50), 0..SIZE);
        assert!(brought.is_empty() && watch.is_done());
        let (_, _, brought, _) = run(std::iter::repeat_n(0, 100), 0..SIZE / 2);
        assert!(brought.is_empty(), "{brought:?}");
    }

    #[test]
    fn a_program_that_rests_is_looked_at_less_and_less() {
        let mut watch = MapWatch::new(0);
        watch.add(0..SIZE);
        let looks = |watch: &mut MapWatch, from_ns: u64, until_ns: u64| {
            let mut looks = 0;
            while watch.look_ns() < until_ns {
                assert!(watch.look(watch.look_ns().max(from_ns), &mut |_| Some(0), &mut |_| true).bring.is_empty());
                looks += 1;
            }
            looks
        };
        let second_ns = 1_000_000_000;
        assert!((15..30).contains(&looks(&mut watch, 0, second_ns)), "it may go on");
        assert!(looks(&mut watch, second_ns, 3600 * second_ns) < 1200, "it rests");
        // It is seen soon all the same, beside the time that it rested.
        assert!(watch.look_ns() <= 3604 * second_ns);
        let mut there = |r: Range<u64>| Some(r.end.min(GRANULE_BYTES).saturating_sub(r.start));
        watch.look(watch.look_ns(), &mut there, &mut |_| true);
        assert!(watch.every_ns == LOOK_EVERY_NS.0);
    }

    /// One whose only granule would be its hole.
    #[test]
    fn a_short_window_is_brought_in_whole() {
        let mut watch = MapWatch::new(0);
        watch.add(0..SIZE);
        watch.take(&(0..4 * GRANULE_BYTES));
        watch.take(&(5 * GRANULE_BYTES..10 * GRANULE_BYTES));
        let mut seen = Seen::default();
        let start = 4 * GRANULE_BYTES;
        watch.window((start, (start, 0)), WINDOW_BYTES.0, &mut seen, &mut |_| true);
        assert_eq!((seen.bring.len(), watch.held_bytes()), (1, GRANULE_BYTES));
        assert_eq!(seen.bring[0], start..start + GRANULE_BYTES);
        assert!(watch.run.is_none());
    }

    #[test]
    fn parts_are_taken_out_exactly() {
        let mut watch = MapWatch::new(0);
        watch.add(0..100);
        watch.take(&(20..30));
        watch.take(&(25..60));
        watch.take(&(90..200));
        assert_eq!(watch.unknown.iter().map(|(s, e)| (*s, *e)).collect::<Vec<_>>(), [(0, 20), (60, 90)]);
        assert_eq!(watch.give(&(5..15)).first(), Some(&(5..15)));
        watch.add(10..70);
        assert_eq!(watch.give(&(8..12)), [], "not all of it");
        watch.add(0..20);
        assert_eq!(watch.unknown.iter().map(|(s, e)| (*s, *e)).collect::<Vec<_>>(), [(0, 20), (20, 70), (70, 90)]);
    }
}
