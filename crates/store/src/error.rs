//! Errors of a store, one line each: what failed, on what, and the remedy.

use std::io;
use std::path::PathBuf;

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The directory cannot be opened or created.
    #[error("cannot open the directory {}: {source}; mount its disk, or change `dir` in the configuration", dir.display())]
    Open {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The directory is not writable.
    #[error("cannot write in the directory {}: {source}; it must be writable by this user and have free space", dir.display())]
    NotWritable {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another server uses it.
    #[error("the directory {} is in use by another server{holder}; stop that one or give this one its own directory", dir.display())]
    InUse {
        /// The directory.
        dir: PathBuf,
        /// ` (process 1234)`, or nothing when unknown.
        holder: String,
    },
    /// The directory holds files that do not belong to a data server.
    #[error("the directory {} holds other files, such as {found}; a data server needs its own directory, which `impresario store init` makes of an empty one", dir.display())]
    Foreign {
        /// The directory.
        dir: PathBuf,
        /// One of them.
        found: String,
    },
    /// The directory is missing or holds nothing.
    #[error("the directory {} is empty: it was not made for a data server; mount its disk or correct `dir` in the configuration; for a new server make it with `impresario store init`", dir.display())]
    Blank {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory was made by a version without identities.
    #[error("the directory {} was made by an older version and does not say whose it is; if it is this server's, give it to it with `impresario store adopt`", dir.display())]
    Older {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory was made for a server already.
    #[error("the directory {} is that of {whose}; name another one", dir.display())]
    Made {
        /// The directory.
        dir: PathBuf,
        /// Server and cluster.
        whose: String,
    },
    /// The directory was made for another server.
    #[error("the directory {} is that of {whose}, not of {server}; correct `dir` in the configuration; if the server was renamed, `impresario store adopt`", dir.display())]
    Other {
        /// The directory.
        dir: PathBuf,
        /// Server and cluster.
        whose: String,
        /// The server that was to use it.
        server: String,
    },
    /// The directory is being filled with the objects of a server that moves.
    #[error("the directory {} is a copy that is not complete; finish it with `impresario store move`", dir.display())]
    Arriving {
        /// The directory.
        dir: PathBuf,
    },
    /// The directory's server has moved away.
    #[error("the server of the directory {} has moved to {address} (move {number:016x}) and must not serve from here again: its newer data are there; start it there, with a configuration that names the new place, and delete this directory when it is not needed", dir.display())]
    Departed {
        /// The directory.
        dir: PathBuf,
        /// Where the server is now.
        address: String,
        /// Number of the move.
        number: u64,
    },
    /// The directory was written by a version with another format.
    #[error("the directory {} was written by another version: its file `format` says {found:?}, this version reads {known:?}", dir.display())]
    Version {
        /// The directory.
        dir: PathBuf,
        /// The content of the file.
        found: String,
        /// The expected content.
        known: &'static str,
    },
    /// Any other error.
    #[error("cannot prepare the directory {}: {source}", dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A write that failed, possibly after a part of it was done.
#[derive(Debug, thiserror::Error)]
#[error("{source} after {written} bytes")]
pub struct WriteError {
    /// Bytes written, from the start of the range.
    pub written: usize,
    /// Why the rest failed, for example no space left on the device.
    pub source: io::Error,
}

impl From<WriteError> for io::Error {
    fn from(error: WriteError) -> io::Error {
        error.source
    }
}
