//! Strides of one reader in one file, detected while it reads.
//!
//! A thread may read a file in several streams at once, far from one another; a read belongs to the stream that predicted
//! it, else to the nearest one. Within a stream the stride is what most of the last reads agree on (Boyer–Moore majority
//! over windows that grow from 4 to 16 strides, as Leap does for pages: Al Maruf & Chowdhury, 2020, §3.2), compared with
//! the previous read, and with the 2nd to 4th before it: then streams that are interleaved closely, such as columns of a
//! table read row by row, agree on the row's length. A few reads backwards do not end a stream. A forecast names single
//! pieces when the gaps between them are large, and everything when reading the gaps costs less than a request for each
//! piece.

use std::ops::Range;

use crate::forecast::Forecast;
use crate::stream::Stream;

/// Streams of one reader in one file; one more replaces the one idle longest.
pub const STREAMS_MAX: usize = 8;

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

/// One reader's streams in one file. An observation costs at most [`STREAMS_MAX`] comparisons and, where the forecast
/// was wrong, a vote over 16 reads; memory is bounded.
#[derive(Clone, Debug, Default)]
pub struct Detector {
    streams: Vec<Stream>,
    reads: u64,
}

impl Detector {
    /// Takes a read of these bytes, not empty. Gaps of at most `gap_bytes` are worth reading.
    pub fn observe(&mut self, bytes: &Range<u64>, gap_bytes: u64) -> Seen<'_> {
        self.reads += 1;
        let (stream, fresh) = self.stream_of(bytes);
        let changed = self.streams[stream].read(bytes, gap_bytes, self.reads);
        Seen { stream, fresh, changed, forecast: self.streams[stream].forecast() }
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
