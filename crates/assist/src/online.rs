//! Strides detected while a program runs: no plan, no recorded run.
//!
//! Each thread of a program may read a file in several streams at once, far from one another; a read belongs to the
//! stream that foresaw it, else to the nearest one. Within a stream the stride is what most of the last reads agree on
//! (Boyer–Moore majority over windows that grow from 4 to 16 strides, as Leap does for pages: Al Maruf & Chowdhury,
//! 2020, §3.2), compared with the read before, and with the 2nd to 4th before: then streams that are interleaved
//! closely, such as columns of a table read row by row, agree on the row's length. A few reads backwards do not end a
//! stream. What is foreseen is brought in piece by piece when the gaps are large, and whole when reading the gaps along
//! costs less than asking for each piece ([`DeviceCost::gap_bytes`](crate::config::DeviceCost::gap_bytes)).

mod forecast;
mod majority;
mod stream;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use forecast::Forecast;
use stream::Stream;

/// Streams of one thread in one file; with more, the one idle longest is given up.
pub const STREAMS_MAX: usize = 8;

/// A read this near to a stream's last one may belong to it, whatever its stride, in bytes.
const NEAR_BYTES: u64 = 16 << 20;

/// What a read told.
#[derive(Debug)]
pub struct Seen<'a> {
    /// The stream it belongs to, below [`STREAMS_MAX`].
    pub stream: usize,
    /// The stream is a new one, in place of an older one of the same number.
    pub fresh: bool,
    /// The forecast became another one by this read.
    pub changed: bool,
    /// What the stream will read next, if it is known.
    pub forecast: Option<&'a Forecast>,
}

/// One thread's streams in one file.
#[derive(Debug, Default)]
pub struct Detector {
    streams: Vec<Stream>,
    reads: u64,
}

impl Detector {
    /// A read of these bytes, not empty. Gaps of at most `gap_bytes` are read along.
    pub fn read(&mut self, bytes: &Range<u64>, gap_bytes: u64) -> Seen<'_> {
        self.reads += 1;
        let (stream, fresh) = self.stream_of(bytes);
        let changed = self.streams[stream].read(bytes, gap_bytes, self.reads);
        Seen { stream, fresh, changed, forecast: self.streams[stream].forecast() }
    }

    /// The stream a read belongs to, and whether it had to be begun.
    fn stream_of(&mut self, bytes: &Range<u64>) -> (usize, bool) {
        if let Some(i) = self.streams.iter().position(|s| s.foresaw(bytes.start)) {
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
