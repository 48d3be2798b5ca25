//! Errors of traces, in one line that names the file, the position and the remedy.

use std::path::{Path, PathBuf};

use crate::codec::{DecodeError, EncodeError};

/// Why a trace could not be read, written or converted.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// An error of the operating system.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is not a trace, or is damaged.
    #[error("{}: at byte {at_byte}: {source}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Position of the damage; everything before it can be read.
        at_byte: u64,
        /// The error.
        source: DecodeError,
    },
    /// A line of a text is invalid.
    #[error("{}:{line}: {reason}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// The format cannot represent it.
    #[error("{}: {source}", path.display())]
    Encode {
        /// The file being written.
        path: PathBuf,
        /// Why.
        source: EncodeError,
    },
    /// The file reached its size limit.
    #[error("{}: the trace has reached its limit of {limit_bytes} bytes; it ends here", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit_bytes: u64,
    },
    /// Another error about a whole file, described by its text.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error and its remedy.
        reason: String,
    },
}

impl TraceError {
    /// The same error for another who hears of it.
    pub fn again(&self) -> TraceError {
        match self {
            TraceError::Io { path, source } => TraceError::Io {
                path: path.clone(),
                source: match source.raw_os_error() {
                    Some(errno) => std::io::Error::from_raw_os_error(errno),
                    None => std::io::Error::new(source.kind(), source.to_string()),
                },
            },
            TraceError::File { path, reason } => TraceError::File { path: path.clone(), reason: reason.clone() },
            TraceError::Encode { path, source } => TraceError::File { path: path.clone(), reason: source.to_string() },
            TraceError::Damaged { path, at_byte, source } => {
                TraceError::File { path: path.clone(), reason: format!("at byte {at_byte}: {source}") }
            }
            TraceError::Line { path, line, reason } => {
                TraceError::Line { path: path.clone(), line: *line, reason: reason.clone() }
            }
            TraceError::Full { path, limit_bytes } => {
                TraceError::Full { path: path.clone(), limit_bytes: *limit_bytes }
            }
        }
    }

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
