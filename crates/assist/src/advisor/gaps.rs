//! Whether gaps between the pieces that a program reads are read along, tried before it is done.
//!
//! Few long requests cost less than many short ones where requests are late or rationed, and more where bytes are: then most of
//! what comes is for nothing and keeps the device from what is read. What the device costs is not known without a plan. So of the
//! first forecast with gaps one extent is brought in, from the next round to the end of the one after that, and how long that took
//! is compared with the reads that it stands for. When the two are near, a longer extent tells, of which the beginning counts for
//! less; but not where each byte of the first one, beside what a read costs, took too long already. A program that goes on elsewhere
//! pays for the first extent only; another one is tried when reads have waited many times as long since. Only reads that waited for
//! no hint are compared, and only bytes that were not in memory. Where long pieces do not pay, the pieces alone are brought in.

use std::ops::Range;

use impresario_foresight::Forecast;

/// Shorter gaps are read along without a trial.
pub(super) const SHORT_GAP_BYTES: u64 = 32 << 10;
/// Rounds in the extent that is tried, in the first and the second one, the last without its gap.
const ROUNDS: [u64; 2] = [2, 4];
/// Its length.
const EXTENT_BYTES: (u64, u64) = (64 << 10, 4 << 20);
/// Of the time that the reads take from one to the next, what the extent may take of it, percent.
const BEARABLE_PERCENT: u64 = 90;
/// Reads that waited for no hint, as many as show a pattern.
const READS_MIN: u64 = 4;
/// Reads until a trial is given up whose end was not told.
const READS_MAX: u32 = 256;
/// An extent that the program does not come to costs a hundredth of what reads wait until the next one is tried at most; less each
/// time.
const UNREACHED_SHARE: u64 = 100;

#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    /// The next extent is to be tried: the first or the second one.
    Untried(usize),
    Trying {
        attempt: usize,
        extent: Range<u64>,
        /// What the extent may take, and each of its bytes if there were many of them, in 2⁻¹⁰ ns.
        bearable_ns: u64,
        bearable_byte: u64,
        /// Reads since.
        since: u32,
    },
    /// It is known whether it pays, or nothing is tried.
    Settled,
}

/// What to do about a forecast.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Advice {
    /// Follow it.
    Follow,
    /// Bring this in, tell how long it took, and do nothing else.
    Try(Range<u64>),
    /// Nothing, until that is told.
    Wait,
}

/// Of one file.
#[derive(Debug)]
pub(super) struct Gaps {
    state: State,
    /// Reads that waited for no hint, their bytes and time.
    reads: u64,
    bytes: u64,
    ns: u64,
    /// Steps from one of them to the next, and their time.
    steps: u64,
    steps_ns: u64,
    last_seen_ns: Option<u64>,
    /// How long a read took is not known of all of them.
    is_untimed: bool,
    /// What was tried before, and whether the program came there.
    tried: Option<Range<u64>>,
    is_reached: bool,
    /// Other hints were given before.
    comes_after_others: bool,
    /// Extents that the program had not come to when the next one was tried, and what reads must have waited in all until then.
    unreached: u32,
    again_ns: u64,
}

impl Gaps {
    /// Where nothing is to be tried, forecasts are followed.
    pub(super) fn new(tries: bool) -> Gaps {
        let state = if tries { State::Untried(0) } else { State::Settled };
        Gaps {
            state,
            reads: 0,
            bytes: 0,
            ns: 0,
            steps: 0,
            steps_ns: 0,
            last_seen_ns: None,
            is_untimed: false,
            tried: None,
            is_reached: true,
            comes_after_others: false,
            unreached: 0,
            again_ns: 0,
        }
    }

    /// A read of `bytes` that was not brought in and waited for no hint. A duration of 0 is unknown: then the time from one to the
    /// next is compared, which has what the program computes as well.
    pub(super) fn read(&mut self, bytes: u64, duration_ns: u64, now_ns: u64) {
        self.is_untimed |= duration_ns == 0;
        self.reads += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.ns = self.ns.saturating_add(duration_ns);
        if let Some(last_ns) = self.last_seen_ns.replace(now_ns) {
            (self.steps, self.steps_ns) = (self.steps + 1, self.steps_ns + now_ns.saturating_sub(last_ns));
        }
    }

    /// Other hints were given: what reads take without has still to be seen.
    pub(super) fn after_others(&mut self) {
        self.comes_after_others = true;
    }

    /// A read that waited for a hint: the time from the last read to the next tells nothing.
    pub(super) fn interrupted(&mut self) {
        self.last_seen_ns = None;
    }

    /// What to do about a forecast after a read of a file of `size_bytes`; `affords` says whether so many bytes may be tried for
    /// one that is not sure.
    pub(super) fn advise(
        &mut self,
        forecast: &Forecast,
        read: &Range<u64>,
        size_bytes: u64,
        affords: impl Fn(u64) -> bool,
    ) -> Advice {
        let stride = forecast.stride_bytes().unsigned_abs();
        let gap = stride.saturating_sub(forecast.round_bytes());
        if !forecast.is_dense() || gap <= SHORT_GAP_BYTES {
            return Advice::Follow;
        }
        self.is_reached |= self.tried.as_ref().is_some_and(|tried| tried.contains(&read.start));
        let spent_ns = self.spent_ns();
        match &mut self.state {
            State::Settled => Advice::Follow,
            State::Trying { since, .. } => {
                *since += 1;
                if *since < READS_MAX {
                    return Advice::Wait;
                }
                self.state = State::Settled;
                Advice::Follow
            }
            State::Untried(_) if self.comes_after_others && self.reads < READS_MIN => Advice::Wait,
            // Nothing can be compared.
            State::Untried(_) if self.is_untimed && self.steps_ns == 0 => {
                self.state = State::Settled;
                Advice::Follow
            }
            State::Untried(_) if !self.is_reached && spent_ns < self.again_ns => Advice::Wait,
            State::Untried(attempt) => {
                let attempt = *attempt;
                let rounds = stride.saturating_mul(ROUNDS[attempt] - 1).saturating_add(forecast.round_bytes());
                let len = rounds.clamp(EXTENT_BYTES.0, EXTENT_BYTES.1);
                // What has no pattern may go one way for a few reads.
                if !forecast.is_regular() && !affords(len) {
                    return Advice::Wait;
                }
                let forward = forecast.stride_bytes() > 0;
                // The next rounds, or the next ones beyond what was tried before.
                let next = |rounds: u64| {
                    let skipped = stride.saturating_mul(rounds);
                    if forward {
                        let start = read.start.saturating_add(skipped);
                        start..start.saturating_add(len).min(size_bytes)
                    } else {
                        let end = read.end.saturating_sub(skipped);
                        end.saturating_sub(len)..end
                    }
                };
                let mut extent = next(1);
                if let Some(tried) = self.tried.as_ref().filter(|t| t.start < extent.end && extent.start < t.end) {
                    let passed = if forward { tried.end - read.start } else { read.end - tried.start };
                    extent = next(passed.div_ceil(stride.max(1)));
                }
                if extent.end.saturating_sub(extent.start) < len {
                    return Advice::Wait; // near the end nothing can be won any more
                }
                let round_ns = self.round_ns(forecast.round_bytes()) * BEARABLE_PERCENT / 100;
                let bearable = |bytes: u64| u128::from(round_ns) * u128::from(bytes) / u128::from(stride.max(1));
                self.state = State::Trying {
                    attempt,
                    extent: extent.clone(),
                    bearable_ns: bearable(len) as u64,
                    bearable_byte: bearable(1 << 10) as u64,
                    since: 0,
                };
                self.unreached += u32::from(!self.is_reached);
                (self.tried, self.is_reached) = (Some(extent.clone()), false);
                Advice::Try(extent)
            }
        }
    }

    /// What the reads took.
    fn spent_ns(&self) -> u64 {
        if self.is_untimed { self.ns.max(self.steps_ns) } else { self.ns }
    }

    /// From one round to the next, as long as nothing is brought in.
    fn round_ns(&self, round_bytes: u64) -> u64 {
        let each_ns = self.ns / self.reads.max(1);
        let read_to_read_ns = each_ns.max(self.steps_ns / self.steps.max(1));
        let each_bytes = (self.bytes / self.reads.max(1)).max(1);
        read_to_read_ns.saturating_mul((round_bytes / each_bytes).max(1))
    }

    /// How long it took to bring in what was to be tried, of which `found_bytes` were in memory already. False where gaps are
    /// not worth reading.
    pub(super) fn tried(&mut self, bytes: &Range<u64>, found_bytes: u64, took_ns: u64) -> bool {
        let State::Trying { attempt, extent, bearable_ns, bearable_byte, .. } = &self.state else { return true };
        if extent != bytes {
            return true;
        }
        let patience = UNREACHED_SHARE.saturating_mul(1 << self.unreached.min(32));
        self.again_ns = self.spent_ns().saturating_add(took_ns.saturating_mul(patience));
        let len = bytes.end - bytes.start;
        let came = len.saturating_sub(found_bytes);
        if came == 0 {
            self.state = State::Untried(*attempt); // nothing is known; what comes after it is tried
            return true;
        }
        let all_ns = u64::try_from(u128::from(took_ns) * u128::from(len) / u128::from(came)).unwrap_or(u64::MAX);
        let (each_ns, each_bytes) = (self.ns / self.reads.max(1), self.bytes / self.reads.max(1));
        // It may have waited behind a read.
        let (pays, hopeless) = (all_ns <= *bearable_ns, all_ns.saturating_sub(each_ns) / 2 > *bearable_ns);
        // What a longer one would cost in the best case.
        let more_ns = u128::from(all_ns.saturating_sub(2 * each_ns)) << 10;
        let byte = more_ns / u128::from(len.saturating_sub(each_bytes).max(1));
        let next = attempt + 1;
        let again = !pays && !hopeless && byte <= u128::from(*bearable_byte) && next < ROUNDS.len();
        self.state = if again { State::Untried(next) } else { State::Settled };
        pays || again
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_foresight::Detector;

    const KIB: u64 = 1024;
    const MS: u64 = 1_000_000;

    /// Reads of `len` bytes, `stride` apart, `read_ms` each, of a file of 1 GiB; an extent takes `extent_ms`. The extents that were
    /// tried, and whether gaps are read in the end.
    fn tried(len: u64, stride: i64, read_ms: u64, extent_ms: impl Fn(u64) -> u64) -> (Vec<Range<u64>>, Option<bool>) {
        let (mut detector, mut gaps, mut extents) = (Detector::default(), Gaps::new(true), Vec::new());
        for i in 0..100u64 {
            let start = (512 << 20) + stride * i as i64;
            let read = start as u64..start as u64 + len;
            gaps.read(len, read_ms * MS, i * read_ms * MS);
            let Some(forecast) = detector.observe(&read, 1 << 20).forecast else { continue };
            match gaps.advise(forecast, &read, 1 << 30, |_| true) {
                Advice::Follow => return (extents, Some(true)),
                Advice::Wait => {}
                Advice::Try(extent) => {
                    extents.push(extent.clone());
                    if !gaps.tried(&extent, 0, extent_ms(extent.end - extent.start) * MS) {
                        return (extents, Some(false));
                    }
                }
            }
        }
        (extents, None)
    }

    #[test]
    fn gaps_are_read_where_that_takes_no_longer() {
        // Requests are rationed: 5 ms for each mebibyte at most.
        let rationed = |bytes: u64| bytes.div_ceil(1 << 20) * 5;
        let (extents, pays) = tried(64 * KIB, 448 << 10, 5, rationed);
        assert_eq!((extents.len(), pays), (1, Some(true)), "{extents:?}");
        // Bytes are: 50 ms for each.
        let (extents, pays) = tried(64 * KIB, 448 << 10, 5, |bytes| (bytes * 50) >> 20);
        assert_eq!((extents.len(), pays), (1, Some(false)), "{extents:?}");
        // A disk takes its time before the first byte, so the longer one tells.
        for stride in [1 << 20, -(1 << 20)] {
            let (extents, pays) = tried(250 * KIB, stride, 15, |bytes| 14 + ((bytes * 8) >> 20));
            assert_eq!((extents.len(), pays), (2, Some(true)), "{extents:?}");
            assert!(extents.iter().all(|extent| (extent.start > 512 << 20) == (stride > 0)), "{extents:?}");
            let apart = extents[0].end <= extents[1].start || extents[1].end <= extents[0].start;
            assert!(apart, "what was tried is in memory: {extents:?}");
        }
        // Bytes take nearly all of the time of a read: a longer extent would not do better.
        let (extents, pays) = tried(250 * KIB, 500 << 10, 5, |bytes| (bytes * 24) >> 20);
        assert_eq!((extents.len(), pays), (1, Some(false)), "{extents:?}");
        // As long as the reads is too long.
        let (extents, pays) = tried(250 * KIB, 1 << 20, 5, |bytes| (bytes * 6) >> 20);
        assert_eq!((extents.len(), pays), (2, Some(false)), "{extents:?}");
    }

    /// Reads that waited for what is tried do not make it look cheap, nor does what was in memory.
    #[test]
    fn trials_do_not_justify_themselves() {
        let (mut detector, mut gaps) = (Detector::default(), Gaps::new(true));
        let (mut extents, mut now_ns) = (Vec::new(), 0);
        for i in 0..40u64 {
            let read = i * 500 * KIB..i * 500 * KIB + 250 * KIB;
            let waits = extents.last().is_some_and(|extent: &Range<u64>| extent.contains(&read.start));
            now_ns += if waits { 50 * MS } else { 5 * MS };
            match waits {
                true => gaps.interrupted(),
                false => gaps.read(250 * KIB, 5 * MS, now_ns),
            }
            let Some(forecast) = detector.observe(&read, 1 << 20).forecast else { continue };
            let Advice::Try(extent) = gaps.advise(forecast, &read, 1 << 30, |_| true) else { continue };
            // The first one was in memory but for a sixth, which took as long as two reads of its length.
            let (len, first) = (extent.end - extent.start, extents.is_empty());
            extents.push(extent.clone());
            if !gaps.tried(&extent, if first { len * 5 / 6 } else { 0 }, if first { 3 * MS / 2 } else { 17 * MS }) {
                break;
            }
        }
        assert_eq!((extents.len(), gaps.state.clone()), (2, State::Settled), "{extents:?}");
        let mut gaps = Gaps::new(true);
        let mut detector = Detector::default();
        let read = 5000 * KIB..5250 * KIB;
        let reads = (0..=10).map(|i| i * 500 * KIB..i * 500 * KIB + 250 * KIB);
        let forecast = reads.map(|read| detector.observe(&read, 1 << 20).forecast.cloned()).last().flatten().unwrap();
        let advice = |gaps: &mut Gaps| match gaps.advise(&forecast, &read, 1 << 30, |_| true) {
            Advice::Try(extent) => extent,
            other => panic!("{other:?}"),
        };
        let first = advice(&mut gaps);
        assert!(gaps.tried(&first, first.end - first.start, 1000), "all of it was in memory");
        assert_eq!(gaps.advise(&forecast, &read, 1 << 30, |_| true), Advice::Wait, "until the program comes there");
        gaps.is_reached = true;
        assert!(advice(&mut gaps).start >= first.end);
    }

    /// A program that goes on elsewhere whenever something was tried, on a disk. How many extents were tried, how long that and the
    /// reads took in ms, and whether gaps are read in the end. `is_known`: what is tried tells nothing, as it was in memory.
    fn jumping(is_known: bool) -> (usize, u64, u64, bool) {
        let (mut detector, mut gaps) = (Detector::default(), Gaps::new(true));
        let (mut extents, mut took_ms, mut at) = (0, 0, 0u64);
        for i in 1..=20_000u64 {
            let read = at..at + 250 * KIB;
            at += 1 << 20;
            gaps.read(250 * KIB, 15 * MS, i * 15 * MS);
            let Some(forecast) = detector.observe(&read, 1 << 20).forecast else { continue };
            match gaps.advise(forecast, &read, 1 << 50, |_| true) {
                Advice::Follow => return (extents, took_ms, i * 15, true),
                Advice::Wait => {}
                Advice::Try(extent) => {
                    let len = extent.end - extent.start;
                    let ms = 14 + ((len * 8) >> 20);
                    (extents, took_ms) = (extents + 1, took_ms + ms);
                    assert!(gaps.tried(&extent, if is_known { len } else { 0 }, ms * MS));
                    at += 1 << 34;
                }
            }
        }
        (extents, took_ms, 300_000, false)
    }

    #[test]
    fn an_extent_that_is_never_reached_is_followed_by_others_less_and_less_often() {
        let (extents, _, _, pays) = jumping(false);
        assert_eq!((extents, pays), (2, true));
        let (extents, took_ms, waited_ms, pays) = jumping(true);
        let is_bounded = took_ms <= waited_ms / 100 + 50;
        assert!((3..12).contains(&extents) && is_bounded && !pays, "{extents}: {took_ms} of {waited_ms}");
    }

    /// As io_uring's: two at a time, seen 4 ms later at most, and how long they took is not known.
    #[test]
    fn reads_of_unknown_duration_are_compared_by_their_distance() {
        let of = |extent_ms: fn(u64) -> u64| {
            let (mut detector, mut gaps) = (Detector::default(), Gaps::new(true));
            for i in 0..100u64 {
                let read = i * 256 * KIB..i * 256 * KIB + 64 * KIB;
                let now_ms = (i / 2 * 6).next_multiple_of(4);
                gaps.read(64 * KIB, 0, now_ms * MS);
                let Some(forecast) = detector.observe(&read, 1 << 20).forecast else { continue };
                match gaps.advise(forecast, &read, 1 << 30, |_| true) {
                    Advice::Follow => return Some(true),
                    Advice::Wait => {}
                    Advice::Try(extent) => {
                        if !gaps.tried(&extent, 0, extent_ms(extent.end - extent.start) * MS) {
                            return Some(false);
                        }
                    }
                }
            }
            None
        };
        assert_eq!(of(|bytes| 5 + ((bytes * 5) >> 20)), Some(false), "requests are served side by side");
        assert_eq!(of(|bytes| 1 + ((bytes * 5) >> 20)), Some(true), "they are not late");
    }

    #[test]
    fn what_cannot_be_compared_is_not_withheld() {
        assert_eq!(tried(64 * KIB, 80 << 10, 5, |_| unreachable!()), (Vec::new(), Some(true)), "short gaps");
        assert_eq!(tried(64 * KIB, 448 << 10, 0, |_| unreachable!()), (Vec::new(), Some(true)), "no durations");
        let mut detector = Detector::default();
        let forecasts = (0..9u64).map(|i| detector.observe(&(i << 20..(i << 20) + 4096), 2 << 20).forecast.cloned());
        let forecast = forecasts.last().flatten().unwrap();
        let mut gaps = Gaps::new(true);
        gaps.read(4096, MS, 0);
        let read = 8 << 20..(8 << 20) + 4096;
        assert!(matches!(gaps.advise(&forecast, &read, 1 << 30, |_| true), Advice::Try(_)));
        let waited =
            (0..2 * READS_MAX).take_while(|_| gaps.advise(&forecast, &read, 1 << 30, |_| true) == Advice::Wait);
        assert_eq!(waited.count() as u32, READS_MAX - 1, "its end was not told");
    }
}
