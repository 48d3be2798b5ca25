//! The format of request traces: which requests storage received, from whom, when, and how they ended.
//!
//! Components that see requests write traces (a server, the interposed library's manager, a converter); components that
//! learn from them read traces (prediction, the hint planner, the simulator). Prediction needs file, offset, size and
//! arrival (agios-2013, IV.A), and also completions: a request that arrived after the reply to another may have been
//! caused by it, and then the two can never be merged.
//!
//! This module has the types and the bytes; the rest of the crate handles files. doc/TRACES.md describes the format.
//! [`Encoder`] and [`Decoder`] work on slices only.

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
/// The extension of trace files, without the dot.
pub const EXTENSION: &str = "imt";

/// Maximum bytes of a path.
pub const PATH_BYTES_MAX: usize = 32 * 1024;
/// Maximum bytes of a host, source, label or command.
pub const TEXT_BYTES_MAX: usize = 8 * 1024;
/// Maximum files of a trace.
pub const FILES_MAX: u32 = 1 << 22;
/// Maximum origins of a trace.
pub const ORIGINS_MAX: u32 = 1 << 20;

/// Maximum bytes of definitions of a trace: readers keep them.
const DEFINITIONS_BYTES_MAX: usize = 1 << 28;

/// What the definitions of a trace take at a reader.
#[derive(Default)]
struct DefinitionsSize {
    bytes: usize,
}

impl DefinitionsSize {
    /// Counts a definition of so many bytes; false if that is too much for any trace.
    fn add(&mut self, fields_bytes: usize) -> bool {
        self.bytes += fields_bytes + 64;
        self.bytes <= DEFINITIONS_BYTES_MAX
    }
}

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
/// Readers skip unknown kinds with this bit.
const BLOCK_OPTIONAL: u8 = 0x80;

/// Bits of the byte that begins a record.
mod tag {
    /// The stream differs from the previous record's; its index follows.
    pub const STREAM: u8 = 1;
    /// The operation differs from the stream's last; it follows.
    pub const OP: u8 = 1 << 1;
    /// The length differs from the stream's last; it follows.
    pub const LEN: u8 = 1 << 2;
    /// How the offset is coded; the constants below are the values of these two bits.
    pub const OFFSET: u8 = 3 << 3;
    pub const OFFSET_CONTIGUOUS: u8 = 0;
    pub const OFFSET_STRIDE: u8 = 1 << 3;
    pub const OFFSET_BYTES: u8 = 2 << 3;
    pub const OFFSET_SECTORS: u8 = 3 << 3;
    /// The request did not end as asked; the outcome follows.
    pub const OUTCOME: u8 = 1 << 5;
    /// The completion time is unknown.
    pub const OPEN: u8 = 1 << 6;
    /// Definitions instead of records.
    pub const FILE: u8 = 0x80;
    pub const ORIGIN: u8 = 0x81;
}

/// The operation of a record. Wider than [`Op`]: programs also open, seek, map and close.
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
    /// All operations, in the order of their codes.
    pub const ALL: [TraceOp; 9] = {
        use TraceOp::*;
        [Read, Write, Sync, Truncate, Unlink, Open, Close, Seek, Map]
    };

    /// The operation with this code.
    pub fn from_code(code: u8) -> Option<TraceOp> {
        TraceOp::ALL.get(usize::from(code)).copied()
    }

    /// Its name in texts.
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

    /// The operation with this name.
    pub fn from_name(name: &str) -> Option<TraceOp> {
        TraceOp::ALL.into_iter().find(|op| op.name() == name)
    }

    /// The scheduler's operation, if schedulers see it.
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

/// The number of an [`Origin`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Debug)]
pub struct OriginId(pub u32);

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Outcome {
    /// In full, or unknown.
    #[default]
    Whole,
    /// Only this many bytes were moved, for example at the end of the file.
    Short(u64),
    /// It failed with this errno.
    Failed(u32),
}

/// One request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Record {
    /// The operation.
    pub op: TraceOp,
    /// The file's number in the trace.
    pub file: FileId,
    /// The origin's number in the trace.
    pub origin: OriginId,
    /// The writer's device or data server; 0 if there is only one, or if unknown.
    pub lane: LaneId,
    /// First byte, in the space that the [`Header`] names.
    pub offset: u64,
    /// Bytes requested.
    pub len: u64,
    /// Arrival on the trace's clock.
    pub arrival: Nanos,
    /// Time to completion; `None` if the completion was not seen.
    pub duration: Option<Nanos>,
    /// How it ended.
    pub outcome: Outcome,
}

impl Record {
    /// A successful request without a completion time.
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

    /// Completion on the trace's clock.
    pub fn completion(&self) -> Option<Nanos> {
        self.duration.map(|d| self.arrival + d)
    }

    /// Bytes moved.
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
    /// Its path as the operating system knows it: bytes, usually absolute. Empty if only the key is known.
    pub path: Vec<u8>,
    /// Its permanent key: in our storage the file's key, elsewhere an inode or a hash; 0 if unknown.
    pub key: u64,
    /// Its size when first seen, bytes.
    pub size_bytes: Option<u64>,
}

/// The origin of requests: a thread of a process of a job on a host. Unknown fields are zero or empty.
#[derive(Clone, PartialEq, Eq, Hash, Default, Debug)]
pub struct Origin {
    /// Its host; empty: the [`Header`]'s.
    pub host: String,
    /// Its process: a process id, a client's number, or a rank.
    pub process: u32,
    /// Its thread.
    pub thread: u32,
    /// Its user.
    pub user: u32,
    /// Its job (application).
    pub job: String,
    /// A label for people, such as the program's name.
    pub label: String,
}

/// The address space of offsets.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Space {
    /// The file, as programs see it.
    #[default]
    File,
    /// The lane's part of the file, where neighbouring stripes of one server are contiguous.
    Lane,
}

/// The properties of a whole trace.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Header {
    /// The wall clock at the trace's time zero, ns since 1970; `None` when unknown.
    pub clock_unix_ns: Option<u64>,
    /// The host on which it was recorded.
    pub host: String,
    /// The program that wrote it.
    pub source: String,
    /// What was recorded: a command line, or the name of a server.
    pub command: String,
    /// The address space of offsets.
    pub space: Space,
}

/// How a trace file ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// Its writer closed it.
    Closed,
    /// After a whole block, but unclosed: its writer was killed or is still writing.
    Unclosed,
    /// Within a block. Only that block is lost.
    Torn {
        /// Bytes of the incomplete block.
        lost_bytes: u64,
    },
}

#[cfg(test)]
mod tests;
