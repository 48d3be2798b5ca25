//! Errors of streams of frames.

use std::io;

use impresario_wire::{Fault, FrameError};

/// Why a stream cannot receive or send a frame.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer closed between two frames.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed within a frame.
    #[error("the connection ended in the middle of a frame")]
    Truncated,
    /// Nothing was received or could be sent in time.
    #[error("nothing came in time")]
    TimedOut,
    /// The peer stalled within a frame, or took too long for it.
    #[error("the peer stalled in the middle of a frame: it may pause for {stall_s} s and take {frame_s} s in all")]
    Stalled {
        /// Maximum pause, seconds.
        stall_s: u64,
        /// Maximum time for a whole frame, seconds.
        frame_s: u64,
    },
    /// It is not a valid frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The bytes were not sealed by the peer at this position.
    #[error(
        "the data were altered or replayed in transit, or not sealed by the peer; the network may have been tampered with"
    )]
    Forged,
    /// The TLS connection failed, for this reason.
    #[error("{0}")]
    Tls(String),
    /// An answer to a call that was not made.
    #[error("it answered call {0}, which is not under way")]
    Unasked(u64),
    /// The peer's reason for closing the connection.
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
