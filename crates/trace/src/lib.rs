//! Request traces as files: reading and writing them, what they say of a program's I/O, several made one, and other
//! programs' formats. The bytes themselves are defined in [`impresario_sched::trace`] and doc/TRACES.md.

pub mod combine;
pub mod convert;
mod error;
mod ordered;
mod reader;
pub mod stats;
mod whole;
mod writer;

pub use error::TraceError;
pub use impresario_sched::trace::{Ending, FileInfo, Header, Origin, OriginId, Outcome, Record, Space, TraceOp};
pub use ordered::Ordered;
pub use reader::Reader;
pub use stats::Stats;
pub use whole::{Builder, RECORDS_MAX, Trace};
pub use writer::Writer;

#[cfg(test)]
mod testing;
