//! What travels between clients, I/O nodes, data servers and the metadata server: frames
//! ([`frame`]) around messages ([`message`]). Encoding and decoding only; sockets are elsewhere.

pub mod frame;
pub mod message;

pub use frame::{FrameError, FrameHeader, Kind};
pub use message::*;
