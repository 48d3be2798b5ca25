//! Locks of byte ranges, as the metadata server keeps them for all clients.
//!
//! Every call names the lease under which its client believes to hold locks, and every answer the one that it has. A client
//! may repeat a call, as long as it sends the next one that touches the same locks only after the answer.

use serde::{Deserialize, Serialize};

use crate::FileKey;

/// Locks of one owner in one call.
pub const RESTORED_MAX: usize = 16_384;

/// A call about locks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LockCall {
    /// Number of the lease that the client believes to have; 0: none, and it holds no lock.
    pub lease: u64,
    /// What it wants.
    pub wish: LockWish,
}

/// Bytes that are locked, or are to be, and by whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct FileLock {
    /// Of which owner of the client: in a mount a process, or an open file description.
    pub owner: u64,
    /// Number of the process on its machine, for people.
    pub pid: u32,
    /// Offset of the first byte.
    pub start: u64,
    /// Offset of the last byte.
    pub end: u64,
    /// It excludes all others; else it excludes exclusive ones.
    pub exclusive: bool,
}

/// What a client wants.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LockWish {
    /// Take a lock, or change what its owner has there. Said: [`LockSaid::Granted`], [`LockSaid::Held`]; with `wait`
    /// [`LockSaid::Waiting`] instead, and the same call again tells what became of it. EDEADLK: it would wait for itself.
    /// ENOLCK: too many locks.
    Set {
        /// File.
        file: FileKey,
        /// The lock.
        lock: FileLock,
        /// Wait for it.
        wait: bool,
    },
    /// Give up what an owner has in a range. Said: [`LockSaid::Done`]. ENOLCK: it would split a lock, and there are too many.
    Unlock {
        /// File.
        file: FileKey,
        /// Owner.
        owner: u64,
        /// Offset of the first byte.
        start: u64,
        /// Offset of the last byte.
        end: u64,
    },
    /// Ask which lock excludes this one. Said: [`LockSaid::Held`] or [`LockSaid::Free`].
    Test {
        /// File.
        file: FileKey,
        /// The lock.
        lock: FileLock,
    },
    /// An owner has exactly these locks of a file, and waits for none: after a restart of the server, or when the answer to
    /// a call was lost. Said: [`LockSaid::Done`].
    Restore {
        /// File.
        file: FileKey,
        /// Owner.
        owner: u64,
        /// All its locks, at most [`RESTORED_MAX`].
        locks: Vec<FileLock>,
    },
    /// Renew the lease. Said: [`LockSaid::Done`].
    Renew {
        /// All locks were restored after a restart of the server.
        whole: bool,
    },
    /// End the lease, and give up all locks. Said: [`LockSaid::Done`].
    End,
}

impl LockWish {
    /// The file that it is about.
    pub fn file(&self) -> Option<FileKey> {
        match self {
            LockWish::Set { file, .. }
            | LockWish::Unlock { file, .. }
            | LockWish::Test { file, .. }
            | LockWish::Restore { file, .. } => Some(*file),
            LockWish::Renew { .. } | LockWish::End => None,
        }
    }
}

/// Answer to a [`LockCall`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct LockAnswer {
    /// The lease of the client; 0: none.
    pub lease: u64,
    /// How long it lasts, counted from when the client sent the call, milliseconds.
    pub lease_ms: u32,
    /// The answer.
    pub said: LockSaid,
}

/// What is said of a call about locks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum LockSaid {
    /// The lock is held.
    Granted {
        /// Differs from the last one when another client may have changed the file under an exclusive lock since.
        version: u64,
    },
    /// This lock excludes it.
    Held {
        /// The lock.
        lock: FileLock,
        /// It is one of the asking client.
        own: bool,
    },
    /// Nothing excludes it.
    Free,
    /// It waits.
    Waiting,
    /// Done.
    Done,
    /// The server was started again: restore all locks.
    Restore,
    /// The lease has ended, and all locks under it went to others.
    Lost,
    /// Others restore their locks: ask again in a moment.
    Later,
}
