//! The strides of a file's readers.

use std::ops::Range;

use super::FileStreams;
use super::ledger::Ledger;
use super::turns::Turn;
use crate::detector::{Detector, STREAMS_MAX};
use crate::predictor::Shared;

/// Readers whose strides are looked for: of any file, and as long as all files together are below [`READERS_OF_ALL`].
pub(super) const READERS_MAX: (usize, usize) = (8, 64);
/// Readers of all files beyond which a file with more than its part gives one up for a new one. They take up to 8 KiB each.
pub(crate) const READERS_OF_ALL: usize = 4 << 10;
/// Rounds that a stride's forecast must reach: it was right at least once.
const ROUNDS_MIN: u64 = 8;
/// Rounds predicted at a time.
const ROUNDS_AHEAD_MAX: u64 = 64;
/// Gaps up to here are read along by strided streams where the file has several readers: they cost less than a request,
/// and others want them, bytes.
const GAP_BYTES: u64 = 128 << 10;
/// Where it has one reader, up to this part of its request.
const GAP_PART: u64 = 4;
/// How many more of a reader's requests went on with something than did not: at first, and at most.
const GOES_ON: (u8, u8) = (8, 16);
/// With fewer it is taken for several readers, until it is at the most again.
const SEVERAL_BELOW: u8 = 6;
/// With fewer it is taken for several where it may be a machine.
const MACHINE_BELOW: u8 = 12;
/// So few readers may be machines.
const MOUNTS_MAX: usize = 4;

/// One reader's strides.
#[derive(Debug)]
pub(super) struct Strides {
    reader: u64,
    detector: Detector,
    /// By the detector's numbers.
    streams: [Option<Stride>; STREAMS_MAX],
    used: u64,
    /// When it began to read again what was read lately; 0: it does not.
    again_ns: u64,
    pub(super) turn: Turn,
    /// See [`GOES_ON`].
    goes_on: u8,
    /// It is taken for several readers that are not told apart.
    is_several: bool,
}

/// A detected stride.
#[derive(Clone, Copy, Debug)]
struct Stride {
    stream: u32,
    /// Predicted up to here, in its direction.
    predicted_to: u64,
    /// First byte of its last request.
    last: u64,
}

/// What a reader's stride will read next.
#[derive(Default)]
pub(super) struct StrideAhead {
    /// The reader's place among those of the file.
    pub(super) reader: usize,
    /// By stream; none of it is predicted yet.
    pub(super) extents: Vec<(u32, Range<u64>)>,
    /// The stride is [nested](crate::forecast::Forecast::is_nested).
    pub(super) is_nested: bool,
    /// When the reader began to read again what was read lately; 0: it does not.
    pub(super) again_ns: u64,
    /// Its requests hardly go on with anything: it may be several that are not told apart.
    pub(super) is_several: bool,
}

impl FileStreams {
    /// Lets the reader's detector see a request, whose bytes were read lately if `is_again`; what its stride will read next. It
    /// `counts` as a stream unless a run is predicted in its place.
    pub(super) fn observe_stride(
        &mut self,
        shared: &mut Shared,
        reader: u64,
        extent: &Range<u64>,
        (at_ns, is_again): (u64, bool),
        counts: bool,
    ) -> StrideAhead {
        let at = match self.readers.iter().position(|r| r.reader == reader) {
            Some(at) => at,
            None => {
                let known = self.readers.len();
                if (known >= READERS_MAX.1 || known >= READERS_MAX.0 && shared.readers >= READERS_OF_ALL)
                    && let Some(oldest) = (0..known).min_by_key(|i| self.readers[*i].used)
                {
                    shared.readers -= 1;
                    let gone = self.readers.swap_remove(oldest);
                    gone.streams.iter().flatten().for_each(|stride| self.end_stream(shared, stride.stream));
                }
                shared.readers += 1;
                self.readers.push(Strides {
                    reader,
                    detector: Detector::default(),
                    streams: [None; STREAMS_MAX],
                    used: 0,
                    again_ns: 0,
                    turn: Turn::default(),
                    goes_on: GOES_ON.0,
                    is_several: false,
                });
                self.readers.len() - 1
            }
        };
        let gap_bytes = match self.readers.len() {
            1 => ((extent.end - extent.start) / GAP_PART).min(GAP_BYTES),
            _ => GAP_BYTES,
        };
        let readers = self.readers.len();
        let strides = &mut self.readers[at];
        strides.used = self.requests;
        strides.turn.next(extent);
        strides.again_ns = match (is_again, strides.again_ns) {
            (true, 0) => at_ns,
            (true, since) => since,
            (false, _) => 0,
        };
        let again_ns = strides.again_ns;
        let seen = strides.detector.observe(extent, gap_bytes);
        strides.goes_on = match strides.turn.goes_on() || readers > MOUNTS_MAX && seen.forecast.is_some() {
            true => (strides.goes_on + 1).min(GOES_ON.1),
            false => strides.goes_on.saturating_sub(1),
        };
        if strides.goes_on < SEVERAL_BELOW || strides.goes_on == GOES_ON.1 {
            strides.is_several = strides.goes_on < SEVERAL_BELOW;
        }
        // Where there are few, each may be a machine's mount.
        let is_several = match readers {
            1 => true,
            2..=MOUNTS_MAX => strides.goes_on < MACHINE_BELOW,
            _ => strides.is_several,
        };
        let none = StrideAhead { reader: at, again_ns, is_several, ..StrideAhead::default() };
        let number = seen.stream;
        if seen.fresh
            && let Some(gone) = strides.streams[number].take()
        {
            self.end_stream(shared, gone.stream);
            return none;
        }
        let Some(forecast) = seen.forecast.filter(|f| f.rounds() >= ROUNDS_MIN) else { return none };
        let is_nested = forecast.is_nested();
        let forward = forecast.stride_bytes() > 0;
        let stride_bytes = forecast.stride_bytes().unsigned_abs();
        let nothing = if forward { 0 } else { u64::MAX };
        let (stream, predicted_to) = match strides.streams[number] {
            Some(known) => {
                // Back by more than a round: the reader has begun again.
                let back = match forward {
                    true => known.last.saturating_sub(extent.start),
                    false => extent.start.saturating_sub(known.last),
                };
                (known.stream, if back > stride_bytes { nothing } else { known.predicted_to })
            }
            None => {
                self.next_stream = self.next_stream.wrapping_add(1);
                self.ledgers.insert(self.next_stream, Ledger::default());
                (self.next_stream, nothing)
            }
        };
        let Some(ledger) = self.ledgers.get_mut(&stream) else { return none };
        if counts {
            shared.stream_lives(&mut ledger.lives, at_ns);
        }
        ledger.account.demanded(extent.end - extent.start);
        ledger.request(extent.end - extent.start, at_ns);
        let window = ledger.window_bytes.min(shared.part(self.growing));
        let reach = match forecast.is_dense() {
            true => window,
            // No farther than the forecast goes: what is predicted up to somewhere is not predicted again.
            false => {
                let rounds = (window / forecast.round_bytes().max(1)).min(forecast.rounds());
                stride_bytes.saturating_mul(rounds.clamp(1, ROUNDS_AHEAD_MAX))
            }
        };
        let (ahead, to) = match forward {
            true => {
                let end = extent.end.saturating_add(reach).min(self.len_bytes.unwrap_or(u64::MAX)).min(i64::MAX as u64);
                (predicted_to.max(extent.end)..end, end)
            }
            false => {
                let start = extent.start.saturating_sub(reach);
                (start..predicted_to.min(extent.start), start)
            }
        };
        strides.streams[number] = Some(Stride { stream, predicted_to, last: extent.start });
        // Half of the reach at least, so that predictions are long and rare.
        if ahead.start >= ahead.end || (ahead.end - ahead.start) * 2 < reach {
            return StrideAhead { is_nested, ..none };
        }
        let pieces = forecast.within(ahead);
        if !pieces.is_empty() {
            strides.streams[number] = Some(Stride { stream, predicted_to: to, last: extent.start });
        }
        let extents = pieces.into_iter().map(|piece| (stream, piece)).collect();
        StrideAhead { extents, is_nested, ..none }
    }
}
