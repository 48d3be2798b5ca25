//! Room 3: frames over sockets, once, for clients and servers. What the frames mean is the business of their users.
//!
//! - [`Stream`] is a connected socket with bounded waits, [`Listening`] a bound address that accepts them.
//! - [`FrameReader`] cuts a stream into frames; [`Unsent`] and [`send_frame`] send one without copying its payload.
//! - [`say_hello`] and [`receive_hello`] are the two sides of the hand-shake, with keys where [`Access`] and [`Host`] have them.
//! - [`Keys`] is a file of keys, [`Keyring`] one that is followed; [`Session`] protects a connection.

mod access;
mod error;
mod frames;
mod handshake;
mod keyring;
mod keys;
mod listen;
mod noise;
mod opener;
mod stream;

pub use access::Access;
pub use error::TransportError;
pub use frames::{FrameReader, OnStream, Pace, Unsent, send_frame};
pub use handshake::{Guest, HandshakeError, HelloError, Host, Membership, new_incarnation, receive_hello, say_hello};
pub use keyring::Keyring;
pub use keys::{Generation, KeyError, Keys, key_file_name};
pub use listen::{BindError, Listening};
pub use noise::Session;
pub use stream::{PIECES_MAX, Stream};
