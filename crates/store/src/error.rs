//! What can go wrong with a store, in one line each: what failed, on what, and the remedy.

use std::io;
use std::path::PathBuf;

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder is missing and cannot be made, or cannot be opened.
    #[error("cannot open the folder {}: {source}; make it, or change `dir` in the configuration", dir.display())]
    Open {
        /// The folder.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nothing can be written in the folder.
    #[error("cannot write in the folder {}: {source}; it must be writable by this user and have free space", dir.display())]
    NotWritable {
        /// The folder.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another server has it open.
    #[error("the folder {} is in use by another server{holder}; stop that one or give this one a folder of its own", dir.display())]
    InUse {
        /// The folder.
        dir: PathBuf,
        /// ` (process 1234)`, or nothing when unknown.
        holder: String,
    },
    /// The folder holds files that are not a data server's.
    #[error("the folder {} holds other files, such as {found}; a data server needs an empty folder or its own", dir.display())]
    Foreign {
        /// The folder.
        dir: PathBuf,
        /// One of them.
        found: String,
    },
    /// The folder was made by a version whose format is another.
    #[error("the folder {} was made by another version: its file `format` says {found:?}, this version reads {known:?}", dir.display())]
    Version {
        /// The folder.
        dir: PathBuf,
        /// What the file says.
        found: String,
        /// What it should say.
        known: &'static str,
    },
    /// Anything else.
    #[error("cannot prepare the folder {}: {source}", dir.display())]
    Io {
        /// The folder.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A write that failed, perhaps after some of it was done.
#[derive(Debug, thiserror::Error)]
#[error("{source} after {written} bytes")]
pub struct WriteError {
    /// Bytes written, from the start of the range.
    pub written: usize,
    /// Why the rest was not, e.g. no space left on the device.
    pub source: io::Error,
}

impl From<WriteError> for io::Error {
    fn from(error: WriteError) -> io::Error {
        error.source
    }
}
