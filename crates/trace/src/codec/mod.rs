//! The project's one format for request traces: what was asked of storage, by whom, when, and how it ended.
//!
//! A trace is written by whoever sees requests (a server, the interposed library's manager, a converter) and read by
//! whoever learns from them (prediction, the planner of hints, the simulator). Prediction needs file, offset, size and
//! arrival (agios-2013, IV.A), and also completions: a request that arrived after another one had been answered
//! may have been caused by it, so the two can never be merged.
//!
//! Here are the types and the bytes; files are the rest of the crate. The format is described in
//! doc/TRACES.md. [`Encoder`] makes bytes of records, [`Decoder`] records of bytes, both over slices only.

mod context;
mod decode;
mod encode;
pub mod exercise;
mod varint;

pub use decode::{DecodeError, Decoder, Step};
pub use encode::{EncodeError, Encoder};

use impresario_sched::{FileId, LaneId, Nanos, Op};

/// The first bytes of a trace; the version follows.
pub const MAGIC: [u8; 7] = *b"IMTRACE";
/// The version that is written and read.
pub const VERSION: u8 = 1;
/// What names of trace files end with, without the dot.
pub const EXTENSION: &str = "imt";

/// Bytes of a path at most.
pub const PATH_BYTES_MAX: usize = 32 * 1024;
/// Bytes of a host, source, label or command at most.
pub const TEXT_BYTES_MAX: usize = 8 * 1024;
/// Files of one trace at most.
pub const FILES_MAX: u32 = 1 << 22;
/// Origins of one trace at most.
pub const ORIGINS_MAX: u32 = 1 << 20;

/// Bytes of definitions that a reader keeps at most.
const DEFINITIONS_BYTES_MAX: usize = 1 << 28;
/// A block's payload, bytes: sealed when it reaches this …
const BLOCK_BYTES: usize = 64 * 1024;
/// … and refused by readers beyond this.
const BLOCK_BYTES_MAX: usize = 256 * 1024;
/// Kind, length and checksum before each payload, bytes.
const FRAME_BYTES: usize = 8;

/// Kinds of blocks.
const BLOCK_HEADER: u8 = 1;
const BLOCK_RECORDS: u8 = 2;
const BLOCK_END: u8 = 3;
/// Readers pass over blocks of such kinds that they do not know.
const BLOCK_OPTIONAL: u8 = 0x80;

/// Bits of the byte that begins a record.
mod tag {
    /// Of another stream than the record before; its index follows.
    pub const STREAM: u8 = 1;
    /// Another operation than the stream's last; it follows.
    pub const OP: u8 = 1 << 1;
    /// Another length than the stream's last; it follows.
    pub const LEN: u8 = 1 << 2;
    /// Where it begins; the rest are the values of these two bits.
    pub const OFFSET: u8 = 3 << 3;
    pub const OFFSET_CONTIGUOUS: u8 = 0;
    pub const OFFSET_STRIDE: u8 = 1 << 3;
    pub const OFFSET_BYTES: u8 = 2 << 3;
    pub const OFFSET_SECTORS: u8 = 3 << 3;
    /// It did not end as it was asked; how follows.
    pub const OUTCOME: u8 = 1 << 5;
    /// When it ended is not known.
    pub const OPEN: u8 = 1 << 6;
    /// Not records: definitions.
    pub const FILE: u8 = 0x80;
    pub const ORIGIN: u8 = 0x81;
}

/// What a record is about. Wider than [`Op`]: programs also open, seek, map and close.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum TraceOp {
    /// Reads `len` bytes from `offset` on.
    Read = 0,
    /// Writes `len` bytes from `offset` on.
    Write = 1,
    /// Makes the file durable.
    Sync = 2,
    /// Cuts or extends the file to `offset` bytes; `len` is 0.
    Truncate = 3,
    /// Removes the file.
    Unlink = 4,
    /// Opens the file.
    Open = 5,
    /// Closes it.
    Close = 6,
    /// Moves the file position to `offset`.
    Seek = 7,
    /// Maps `len` bytes from `offset` on into memory.
    Map = 8,
}

impl TraceOp {
    /// All, in the order of their codes.
    pub const ALL: [TraceOp; 9] = {
        use TraceOp::*;
        [Read, Write, Sync, Truncate, Unlink, Open, Close, Seek, Map]
    };

    /// The operation of a code.
    pub fn from_code(code: u8) -> Option<TraceOp> {
        TraceOp::ALL.get(usize::from(code)).copied()
    }

    /// Its name, as texts have it.
    pub const fn name(self) -> &'static str {
        match self {
            TraceOp::Read => "read",
            TraceOp::Write => "write",
            TraceOp::Sync => "sync",
            TraceOp::Truncate => "truncate",
            TraceOp::Unlink => "unlink",
            TraceOp::Open => "open",
            TraceOp::Close => "close",
            TraceOp::Seek => "seek",
            TraceOp::Map => "map",
        }
    }

    /// The operation of a name.
    pub fn from_name(name: &str) -> Option<TraceOp> {
        TraceOp::ALL.into_iter().find(|op| op.name() == name)
    }

    /// What a scheduler calls it, if schedulers see it.
    pub const fn scheduled(self) -> Option<Op> {
        match self {
            TraceOp::Read => Some(Op::Read),
            TraceOp::Write => Some(Op::Write),
            TraceOp::Sync => Some(Op::Sync),
            TraceOp::Truncate => Some(Op::Truncate),
            TraceOp::Unlink => Some(Op::Unlink),
            TraceOp::Open | TraceOp::Close | TraceOp::Seek | TraceOp::Map => None,
        }
    }

    /// True for reads and writes.
    pub const fn is_data(self) -> bool {
        matches!(self, TraceOp::Read | TraceOp::Write)
    }
}

impl From<Op> for TraceOp {
    fn from(op: Op) -> TraceOp {
        match op {
            Op::Read => TraceOp::Read,
            Op::Write => TraceOp::Write,
            Op::Sync => TraceOp::Sync,
            Op::Truncate => TraceOp::Truncate,
            Op::Unlink => TraceOp::Unlink,
        }
    }
}

/// Who asked: an [`Origin`] of the trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct OriginId(pub u32);

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Outcome {
    /// As it was asked, or it is not known otherwise.
    #[default]
    Whole,
    /// Only so many bytes were moved: the end of the file, for instance.
    Short(u64),
    /// With this errno.
    Failed(u32),
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// What was asked.
    pub op: TraceOp,
    /// Of which file of the trace.
    pub file: FileId,
    /// By whom.
    pub origin: OriginId,
    /// At which device or data server of the writer; 0 where there is one, or none is known.
    pub lane: LaneId,
    /// First byte, in the space that the [`Header`] names.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u64,
    /// When it arrived, by the trace's clock.
    pub arrival: Nanos,
    /// How long until its completion; `None` when that was not seen.
    pub duration: Option<Nanos>,
    /// How it ended.
    pub outcome: Outcome,
}

impl Record {
    /// A request that ended well at an unknown time.
    pub fn new(op: TraceOp, file: FileId, offset: u64, len: u64, arrival: Nanos) -> Record {
        Record {
            op,
            file,
            origin: OriginId(0),
            lane: LaneId(0),
            offset,
            len,
            arrival,
            duration: None,
            outcome: Outcome::Whole,
        }
    }

    /// When it ended, by the trace's clock.
    pub fn completion(&self) -> Option<Nanos> {
        self.duration.map(|d| self.arrival + d)
    }

    /// Bytes that were moved.
    pub fn moved_bytes(&self) -> u64 {
        match self.outcome {
            _ if !self.op.is_data() => 0,
            Outcome::Whole => self.len,
            Outcome::Short(bytes) => bytes.min(self.len),
            Outcome::Failed(_) => 0,
        }
    }

    /// First byte after it; saturates.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.len)
    }
}

/// A file of a trace.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct FileInfo {
    /// Its path as the operating system knows it: bytes, usually absolute. Empty when only the key is known.
    pub path: Vec<u8>,
    /// Its key that never changes: of our own storage the file's key, elsewhere an inode or a hash; 0 when unknown.
    pub key: u64,
    /// Its size when it was seen first, bytes.
    pub size_bytes: Option<u64>,
}

/// Somebody who asks: a thread of a process of a job on a host. What is not known is zero or empty.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Origin {
    /// The host that it runs on; empty: the [`Header`]'s.
    pub host: String,
    /// Its process: a process id, a client's number, or a rank.
    pub process: u32,
    /// Its thread.
    pub thread: u32,
    /// Its user.
    pub user: u32,
    /// Its job (application).
    pub job: String,
    /// For people: the program's name, for instance.
    pub label: String,
}

/// What offsets are offsets in.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Space {
    /// The file, as programs see it.
    #[default]
    File,
    /// The part of the file that the lane holds: where neighbouring stripes of one server are contiguous.
    Lane,
}

/// What is true of a whole trace.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Header {
    /// The wall clock at the trace's time zero, ns since 1970; `None` when unknown.
    pub clock_unix_ns: Option<u64>,
    /// Where it was recorded.
    pub host: String,
    /// What wrote it.
    pub source: String,
    /// What was watched: a command line, the name of a server.
    pub command: String,
    /// What offsets are offsets in.
    pub space: Space,
}

/// How the bytes of a trace end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Its writer closed it.
    Closed,
    /// Behind a whole block, but its writer did not close it: it was killed, or still writes.
    Unclosed,
    /// In the middle of a block. That block is lost, nothing before it.
    Torn {
        /// Bytes of it that are there.
        lost_bytes: u64,
    },
}

#[cfg(test)]
mod tests;
