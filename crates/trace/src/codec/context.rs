//! What a record is told relative to: the state that encoder and decoder carry through a block, alike on both sides.
//!
//! Requests of one origin to one file (a *stream*) mostly repeat themselves: the same operation and length, each where
//! the one before ended, or a constant stride further. What repeats costs one bit. The state begins anew with each
//! block, so that every block can be read without those before it, but for the definitions in them.

use super::{OriginId, Record, TraceOp};
use impresario_sched::{FileId, LaneId};

/// Requests of one origin to one file at one lane.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamKey {
    pub file: FileId,
    pub origin: OriginId,
    pub lane: LaneId,
}

/// Its last request.
#[derive(Clone, Copy)]
pub struct Stream {
    pub key: StreamKey,
    pub op: TraceOp,
    pub offset: u64,
    pub len: u64,
    /// Between the last two offsets; modulo 2^64.
    pub stride: u64,
}

impl Stream {
    pub fn new(key: StreamKey) -> Stream {
        Stream { key, op: TraceOp::Read, offset: 0, len: 0, stride: 0 }
    }

    /// Where a contiguous request begins.
    pub fn next(&self) -> u64 {
        self.offset.wrapping_add(self.len)
    }

    /// Where a strided request begins.
    pub fn strided(&self) -> u64 {
        self.offset.wrapping_add(self.stride)
    }

    pub fn moved(&mut self, record: &Record) {
        self.stride = record.offset.wrapping_sub(self.offset);
        (self.op, self.offset, self.len) = (record.op, record.offset, record.len);
    }
}

/// The state of a block.
#[derive(Default)]
pub struct Context {
    pub streams: Vec<Stream>,
    /// The stream of the last record.
    pub current: usize,
    /// The arrival of the last record.
    pub arrival: u64,
}

impl Context {
    pub fn clear(&mut self) {
        self.streams.clear();
        (self.current, self.arrival) = (0, 0);
    }
}
