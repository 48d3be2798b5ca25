//! Request traces as files: reading and writing them, what they say of a program's I/O, several made one, and other
//! programs' formats. The bytes are defined in [`codec`] and doc/TRACES.md.

pub mod codec;
pub mod combine;
pub mod convert;
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
