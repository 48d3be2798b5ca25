//! Whether gaps between the pieces that a program reads are read along, tried before it is done.
//!
//! Few long requests cost less than many short ones where requests are late or rationed, and more where bytes are: then most of
//! what comes is for nothing and keeps the device from what is read. What the device costs is not known without a plan. So of the
//! first forecast with gaps one extent of two rounds is brought in, and how long that took is compared with the reads that it
//! stands for. When the two are near, a longer extent tells, of which the beginning counts for less. Where long pieces do not pay,
//! the pieces alone are brought in.

use std::ops::Range;

use impresario_foresight::Forecast;

/// Shorter gaps are read along without a trial.
pub(super) const SHORT_GAP_BYTES: u64 = 32 << 10;
/// Rounds in the extent that is tried, in the first and the second one.
const ROUNDS: [u64; 2] = [2, 4];
/// Its length.
const EXTENT_BYTES: (u64, u64) = (64 << 10, 4 << 20);
/// Of the time that the reads take from one to the next, what the extent may take of it, percent.
const BEARABLE_PERCENT: u64 = 90;
/// Reads until a trial is given up whose end was not told.
const READS_MAX: u32 = 256;

#[derive(Clone, PartialEq, Eq, Debug)]
enum State {
    /// The next extent is to be tried: the first or the second one.
    Untried(usize),
    Trying {
        attempt: usize,
        extent: Range<u64>,
        /// What the extent may take.
        bearable_ns: u64,
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
    /// Reads that were not brought in, their bytes and time, and when the first and the last one of them were seen.
    reads: u64,
    bytes: u64,
    ns: u64,
    seen_ns: Option<(u64, u64)>,
}

impl Gaps {
    /// Where nothing is to be tried, forecasts are followed.
    pub(super) fn new(tries: bool) -> Gaps {
        let state = if tries { State::Untried(0) } else { State::Settled };
        Gaps { state, reads: 0, bytes: 0, ns: 0, seen_ns: None }
    }

    /// A read of `bytes` that was not brought in. A duration of 0 is unknown, and then nothing can be compared.
    pub(super) fn read(&mut self, bytes: u64, duration_ns: u64, now_ns: u64) {
        if duration_ns == 0 {
            self.state = State::Settled;
        }
        self.reads += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        self.ns = self.ns.saturating_add(duration_ns);
        self.seen_ns = Some((self.seen_ns.map_or(now_ns, |(first_ns, _)| first_ns), now_ns));
    }

    /// What to do about a forecast after a read of a file of `size_bytes`.
    pub(super) fn advise(&mut self, forecast: &Forecast, read: &Range<u64>, size_bytes: u64) -> Advice {
        let stride = forecast.stride_bytes().unsigned_abs();
        let gap = stride.saturating_sub(forecast.round_bytes());
        if !forecast.is_dense() || gap <= SHORT_GAP_BYTES {
            return Advice::Follow;
        }
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
            State::Untried(attempt) => {
                let attempt = *attempt;
                let len = stride.saturating_mul(ROUNDS[attempt]).clamp(EXTENT_BYTES.0, EXTENT_BYTES.1);
                // From the next round on.
                let extent = if forecast.stride_bytes() > 0 {
                    let start = read.start.saturating_add(stride);
                    start..start.saturating_add(len).min(size_bytes)
                } else {
                    let end = read.end.saturating_sub(stride);
                    end.saturating_sub(len)..end
                };
                if extent.end.saturating_sub(extent.start) < len {
                    return Advice::Wait; // near the end nothing can be won any more
                }
                let round_ns = self.round_ns(forecast.round_bytes());
                let bearable_ns = round_ns.saturating_mul(len) / stride.max(1) * BEARABLE_PERCENT / 100;
                self.state = State::Trying { attempt, extent: extent.clone(), bearable_ns, since: 0 };
                Advice::Try(extent)
            }
        }
    }

    /// From one round to the next, as long as nothing is brought in.
    fn round_ns(&self, round_bytes: u64) -> u64 {
        let each_ns = self.ns / self.reads.max(1);
        let (first_ns, last_ns) = self.seen_ns.unwrap_or_default();
        let read_to_read_ns = each_ns.max(last_ns.saturating_sub(first_ns) / self.reads.saturating_sub(1).max(1));
        let each_bytes = (self.bytes / self.reads.max(1)).max(1);
        read_to_read_ns.saturating_mul((round_bytes / each_bytes).max(1))
    }

    /// How long it took to bring in what was to be tried. False where gaps are not worth reading.
    pub(super) fn tried(&mut self, bytes: &Range<u64>, took_ns: u64) -> bool {
        let State::Trying { attempt, extent, bearable_ns, .. } = &self.state else { return true };
        if extent != bytes {
            return true;
        }
        let (pays, hopeless) = (took_ns <= *bearable_ns, took_ns / 2 > *bearable_ns);
        let next = attempt + 1;
        let again = !pays && !hopeless && next < ROUNDS.len();
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
            match gaps.advise(forecast, &read, 1 << 30) {
                Advice::Follow => return (extents, Some(true)),
                Advice::Wait => {}
                Advice::Try(extent) => {
                    extents.push(extent.clone());
                    if !gaps.tried(&extent, extent_ms(extent.end - extent.start) * MS) {
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
        }
        // As long as the reads is too long.
        let (extents, pays) = tried(250 * KIB, 1 << 20, 5, |bytes| (bytes * 6) >> 20);
        assert_eq!((extents.len(), pays), (2, Some(false)), "{extents:?}");
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
        assert!(matches!(gaps.advise(&forecast, &read, 1 << 30), Advice::Try(_)));
        let waited = (0..2 * READS_MAX).take_while(|_| gaps.advise(&forecast, &read, 1 << 30) == Advice::Wait);
        assert_eq!(waited.count() as u32, READS_MAX - 1, "its end was not told");
    }
}
