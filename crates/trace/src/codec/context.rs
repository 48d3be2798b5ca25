//! The state that encoder and decoder share within a block; each record is coded relative to it.
//!
//! Requests of one origin to one file (a *stream*) mostly repeat: the same operation and length, each starting where
//! the previous one ended or a constant stride further. What repeats costs one bit. The state is reset for each block,
//! so a block can be read without earlier ones, except for their definitions.

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
    /// Distance between the last two offsets, modulo 2^64.
    pub stride: u64,
}

impl Stream {
    pub fn new(key: StreamKey) -> Stream {
        Stream { key, op: TraceOp::Read, offset: 0, len: 0, stride: 0 }
    }

    /// The offset of a contiguous request.
    pub fn next(&self) -> u64 {
        self.offset.wrapping_add(self.len)
    }

    /// The offset of a strided request.
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
