//! Strides of one reader in one file, detected while it reads.
//!
//! A thread may read a file in several streams at once, far from one another; a read belongs to the stream that predicted
//! it, else to the nearest one. Reads that are near none may be those of one stream with a large stride: they are also
//! looked at together. Within a stream the stride is what most of the last reads agree on (Boyer–Moore majority
//! over windows that grow from 4 to 16 strides, as Leap does for pages: Al Maruf & Chowdhury, 2020, §3.2), compared with
//! the previous read, and with the 2nd to 4th before it: then streams that are interleaved closely, such as columns of a
//! table read row by row, agree on the row's length. A few reads backwards do not end a stream. A forecast names single
//! pieces when the gaps between them are large, and everything when reading the gaps costs less than a request for each
//! piece.
//!
//! Strides of two levels, such as the rows of a part of an array, plane by plane, are *series* of reads that follow one
//! another. When a third one begins as far from the second as that was from the first, both of the same reads, what
//! comes is the rest of the series and then the next ones.

use std::ops::Range;

use crate::forecast::Forecast;
use crate::stream::{LAGS, Stream};

/// Streams of one reader in one file; one more replaces the one idle longest.
pub const STREAMS_MAX: usize = 8;

/// Reads of a series that others of the same length follow at equal distances, such as the rows of a part of an array;
/// fewer are found as [interleaved](crate::stream) streams.
const SERIES: std::ops::RangeInclusive<u64> = LAGS as u64 + 1..=128;

/// Series predicted at first.
const NESTED_ROUNDS: u64 = 8;

/// A read this near to a stream's last one may belong to it, whatever its stride, bytes.
const NEAR_BYTES: u64 = 16 << 20;

/// What a read showed.
#[derive(Debug)]
pub struct Seen<'a> {
    /// The stream it belongs to, below [`STREAMS_MAX`].
    pub stream: usize,
    /// The stream is a new one, in place of an older one of the same number.
    pub fresh: bool,
    /// The read changed the forecast.
    pub changed: bool,
    /// What the stream will read next, if that is known.
    pub forecast: Option<&'a Forecast>,
}

/// Reads of equal length at equal distances, each after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Series {
    start: u64,
    /// Of one read.
    bytes: u64,
    /// From one to the next; 0 while there is one only.
    stride: u64,
    count: u64,
}

impl Series {
    /// Whether a read continues it.
    fn goes_on(&mut self, read: &Range<u64>) -> bool {
        let last = self.start + self.stride * self.count.saturating_sub(1);
        if read.end - read.start != self.bytes || read.start <= last {
            return false;
        }
        if self.count == 1 {
            self.stride = read.start - last;
        }
        let goes_on = read.start - last == self.stride;
        self.count += u64::from(goes_on);
        goes_on
    }

    /// What comes when series follow one another: this one has ended, after one `before`, and a `read` begins the next.
    fn nested(&self, before: &Series, read: &Range<u64>) -> Option<Forecast> {
        if !SERIES.contains(&self.count) || (Series { start: self.start, ..*before }) != *self {
            return None;
        }
        let apart = self.start.checked_sub(before.start)?;
        let span = self.stride * (self.count - 1) + self.bytes;
        let begins_next = read.end - read.start == self.bytes && read.start.checked_sub(self.start) == Some(apart);
        if apart < span || !begins_next {
            return None;
        }
        // Of the reads before each is followed by one of the next series.
        let mut round: Vec<Range<u64>> =
            (1..self.count).map(|i| self.start + i * self.stride).map(|at| at..at + self.bytes).collect();
        round.push(read.clone());
        Some(Forecast { round, stride: i64::try_from(apart).ok()?, dense: false, regular: true, rounds: NESTED_ROUNDS })
    }
}

/// One reader's streams in one file. An observation costs at most [`STREAMS_MAX`] comparisons and, where the forecast
/// was wrong, a vote over 16 reads; memory is bounded.
#[derive(Clone, Debug, Default)]
pub struct Detector {
    streams: Vec<Stream>,
    /// Of the reads that were near no stream.
    wide: Stream,
    series: Series,
    before: Series,
    reads: u64,
}

impl Detector {
    /// Takes a read of these bytes, not empty. Gaps of at most `gap_bytes` are worth reading.
    pub fn observe(&mut self, bytes: &Range<u64>, gap_bytes: u64) -> Seen<'_> {
        self.reads += 1;
        let (stream, fresh) = self.stream_of(bytes);
        let changed = if let Some(nested) = self.nested(bytes) {
            // A reader has one such forecast, which is longer than others.
            self.streams.iter_mut().filter(|s| s.forecast().is_some_and(Forecast::is_nested)).for_each(Stream::forget);
            self.streams[stream].nest(nested, bytes, self.reads);
            true
        } else if fresh && self.wide.read(bytes, gap_bytes, self.reads) && self.wide.forecast().is_some() {
            self.streams[stream] = std::mem::take(&mut self.wide);
            true
        } else {
            self.streams[stream].read(bytes, gap_bytes, self.reads)
        };
        Seen { stream, fresh, changed, forecast: self.streams[stream].forecast() }
    }

    /// Gaps of more than `gap_bytes` are not worth reading after all: of what was foreseen with longer ones only the pieces stay.
    pub fn regard_gaps(&mut self, gap_bytes: u64) {
        self.streams.iter_mut().chain([&mut self.wide]).for_each(|stream| stream.regard_gaps(gap_bytes));
    }

    /// Takes a read into its series; what comes if it begins another one like those before.
    fn nested(&mut self, read: &Range<u64>) -> Option<Forecast> {
        if self.series.count > 0 && self.series.goes_on(read) {
            return None;
        }
        let next = Series { start: read.start, bytes: read.end - read.start, stride: 0, count: 1 };
        let ended = std::mem::replace(&mut self.series, next);
        let before = std::mem::replace(&mut self.before, ended);
        ended.nested(&before, read)
    }

    /// The stream of a read, and whether it is new.
    fn stream_of(&mut self, bytes: &Range<u64>) -> (usize, bool) {
        if let Some(i) = self.streams.iter().position(|s| s.predicted(bytes.start)) {
            return (i, false);
        }
        let near = self.streams.iter().enumerate().map(|(i, s)| (s.distance(bytes.start), i)).min();
        if let Some((distance, i)) = near
            && distance <= NEAR_BYTES.max(self.streams[i].reach())
        {
            return (i, false);
        }
        if self.streams.len() < STREAMS_MAX {
            self.streams.push(Stream::default());
            return (self.streams.len() - 1, true);
        }
        let oldest = self.streams.iter().enumerate().min_by_key(|(_, s)| s.last_read()).map_or(0, |(i, _)| i);
        self.streams[oldest] = Stream::default();
        (oldest, true)
    }
}

#[cfg(test)]
#[path = "detector_tests.rs"]
mod tests;
