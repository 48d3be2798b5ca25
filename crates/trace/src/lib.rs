//! Request traces as files: reading and writing them, statistics of a program's I/O, combining several, and other
//! programs' formats. [`codec`] and doc/TRACES.md define the bytes.

pub mod codec;
pub mod combine;
pub mod convert;
pub mod darshan;
mod error;
pub mod live;
mod ordered;
pub mod predict;
mod reader;
pub mod stats;
mod whole;
mod writer;

pub use codec::{Ending, FileInfo, Header, Origin, OriginId, Outcome, Record, Space, TraceOp};
pub use error::TraceError;
pub use live::{LiveOptions, LiveStatus, Recorder, key_of_name};
pub use ordered::Ordered;
pub use reader::Reader;
pub use stats::Stats;
pub use whole::{Builder, RECORDS_MAX, Trace};
pub use writer::Writer;

#[cfg(test)]
mod testing;
