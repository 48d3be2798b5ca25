//! What travels between clients, I/O nodes, data servers and the metadata server: frames
//! ([`frame`]) around messages ([`message`]). Encoding and decoding only; sockets are elsewhere.

pub mod exercise;
pub mod frame;
mod hello;
pub mod list;
pub mod locks;
pub mod message;
pub mod moving;
mod names;
pub mod relay;
pub mod rights;
pub mod space;

pub use frame::{FrameError, FrameHeader, HEADER_BYTES, Kind, Limits, decode_body, encode_frame};
pub use list::{BadList, Extents, LIST_EXTENTS_MAX};
pub use locks::{FileLock, LockAnswer, LockCall, LockSaid, LockWish};
pub use message::*;
pub use moving::{MoveAnswer, MoveCall};
pub use relay::{Relaid, RelayCall};
pub use rights::{Right, may_send};
pub use space::{SeekTo, Sought, SpaceChange};
