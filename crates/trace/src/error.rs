//! What can go wrong with a trace, in one line that names the file, the place and the remedy.

use std::path::{Path, PathBuf};

use crate::codec::{DecodeError, EncodeError};

/// Why a trace was not read, written or converted.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no trace, or damaged.
    #[error("{}: at byte {at_byte}: {source}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where the trouble begins; everything before it can be read.
        at_byte: u64,
        /// What it is.
        source: DecodeError,
    },
    /// A line of a text is not what it must be.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// It cannot be told in the format.
    #[error("{}: {source}", path.display())]
    Encode {
        /// The file that is being written.
        path: PathBuf,
        /// Why.
        source: EncodeError,
    },
    /// The file reached the size that it may have.
    #[error("{}: the trace has reached its limit of {limit_bytes} bytes; it ends here", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit_bytes: u64,
    },
    /// Something else about a whole file; the text says it.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What, and what to do.
        reason: String,
    },
}

impl TraceError {
    pub(crate) fn io(path: &Path, source: std::io::Error) -> TraceError {
        TraceError::Io { path: path.into(), source }
    }

    pub(crate) fn line(path: &Path, line: u64, reason: impl Into<String>) -> TraceError {
        TraceError::Line { path: path.into(), line, reason: reason.into() }
    }

    pub(crate) fn file(path: &Path, reason: impl Into<String>) -> TraceError {
        TraceError::File { path: path.into(), reason: reason.into() }
    }
}
