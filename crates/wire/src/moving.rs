//! What a data server is asked while it moves to another folder or machine. All of it comes from the program that copies it.

use serde::{Deserialize, Serialize};

use crate::message::FileKey;

/// A step of a move. `number` is that of the move, drawn by who copies; with another one than that of the move under way a
/// step fails.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MoveCall {
    /// Note from now on which objects change, or go on with that. Ends another move. Answer: [`MoveAnswer::Begun`].
    Begin {
        /// Number of the move; not 0.
        number: u64,
    },
    /// What has changed: the batch that was given last again, or the next one. Answer: [`MoveAnswer::Changed`].
    Changes {
        /// Number of the move.
        number: u64,
        /// Number of the batch.
        batch: u64,
        /// Ranges of the batch to leave out.
        skip: u32,
    },
    /// Let all clients wait, for a bounded time. The answer comes when nothing changes any more: [`MoveAnswer::Held`].
    Hold {
        /// Number of the move.
        number: u64,
    },
    /// Let clients go on. Answer: [`MoveAnswer::Done`].
    Release {
        /// Number of the move.
        number: u64,
    },
    /// What the server must know after a restart, beside its objects. Only while clients wait. Answer: [`MoveAnswer::State`].
    State {
        /// Number of the move.
        number: u64,
        /// Entries to leave out.
        skip: u32,
    },
    /// Never serve again. Only while clients wait; later it fails, and clients have gone on. Answer: [`MoveAnswer::Done`].
    Leave {
        /// Number of the move.
        number: u64,
        /// The address at which the server will be found.
        address: String,
    },
    /// The move is given up. Answer: [`MoveAnswer::Done`].
    End {
        /// Number of the move.
        number: u64,
    },
}

/// The answer to a [`MoveCall`].
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum MoveAnswer {
    /// Done; nothing to say.
    Done,
    /// The move has begun.
    Begun {
        /// The last batch of changes, if this move was under way already.
        batch: Option<u64>,
    },
    /// Clients wait.
    Held {
        /// At most so long, milliseconds.
        for_ms: u32,
    },
    /// A part of a batch of changes.
    Changed {
        /// Object, first byte, and end. An end of `u64::MAX`: it was cut off there, or removed.
        ranges: Vec<(FileKey, u64, u64)>,
        /// Too much has changed: begin anew.
        is_all: bool,
        /// There is more of it.
        has_more: bool,
    },
    /// A part of what the server must know.
    State {
        /// Notes: kind, key, value.
        notes: Vec<(u32, u64, u32)>,
        /// Objects that were removed for ever.
        removed: Vec<u64>,
        /// There is more of it.
        has_more: bool,
    },
}
