//! Why a stream gives no further frame, or takes none.

use std::io;

use impresario_wire::{Fault, FrameError};

/// Why a stream gives no further frame, or takes none.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer closed between two frames.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed within a frame.
    #[error("the connection ended in the middle of a frame")]
    Truncated,
    /// Nothing came, or nothing could be sent, in time.
    #[error("nothing came in time")]
    TimedOut,
    /// The peer stopped within a frame, or took too long for one.
    #[error("the peer stalled in the middle of a frame: it may pause for {stall_s} s and take {frame_s} s in all")]
    Stalled {
        /// Longest pause that is allowed, seconds.
        stall_s: u64,
        /// Longest time for a whole frame, seconds.
        frame_s: u64,
    },
    /// Not a frame of ours.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// What came was not sealed by the peer in this place.
    #[error(
        "what came was altered or replayed on its way, or not sealed by the peer; somebody may be tampering with the network"
    )]
    Forged,
    /// An answer to a call that was not made.
    #[error("it answered call {0}, which is not under way")]
    Unasked(u64),
    /// The peer says why it ends the connection.
    #[error("{}", .0.message)]
    Farewell(Fault),
    /// The socket failed.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl From<rustix::io::Errno> for TransportError {
    fn from(errno: rustix::io::Errno) -> Self {
        TransportError::Io(errno.into())
    }
}
