//! Room 3: frames over sockets, once, for clients and servers. What the frames mean is the business of their users.
//!
//! - [`Stream`] is a connected socket with bounded waits, [`Listening`] a bound address that accepts them.
//! - [`FrameReader`] cuts a stream into frames; [`Unsent`] and [`send_frame`] send one without copying its payload.
//! - [`say_hello`] and [`receive_hello`] are the two sides of the hand-shake.

mod error;
mod frames;
mod handshake;
mod listen;
mod stream;

pub use error::TransportError;
pub use frames::{FrameReader, Pace, Unsent, send_frame};
pub use handshake::{HandshakeError, HelloError, Host, Membership, new_incarnation, receive_hello, say_hello};
pub use listen::{BindError, Listening};
pub use stream::{PIECES_MAX, Stream};
