//! Frames over sockets, shared by clients and servers; their meaning is up to the users.
//!
//! - [`Stream`] is a connected socket with bounded waits, [`Listening`] a bound address that accepts connections.
//! - [`FrameReader`] splits a stream into frames; [`Unsent`] and [`send_frame`] send one without copying its payload.
//! - [`say_hello`] and [`receive_hello`] are the two sides of the hand-shake, with keys or certificates if [`Access`] and
//!   [`Host`] have them.
//! - [`Munge`] says which user a process is, and checks what others say.
//! - [`Keys`] is a key file, [`Keyring`] a watched one; [`Certificates`] are watched too; [`Session`] protects a connection.

mod access;
mod certificates;
mod error;
mod frames;
mod handshake;
mod keyring;
mod keys;
mod listen;
mod munge;
mod noise;
mod opener;
mod polling;
mod revocation;
mod secret_file;
mod session;
mod shown;
mod stream;
mod tls;
mod watched;

pub use access::Access;
pub use certificates::{Certificates, PeerCertificate};
pub use error::TransportError;
pub use frames::{FrameReader, OnStream, Pace, Unsent, send_frame};
pub use handshake::{Guest, HandshakeError, HelloError, Host, Membership, new_incarnation, receive_hello, say_hello};
pub use keyring::Keyring;
pub use keys::{Generation, Keys, key_file_name};
pub use listen::{BindError, Listening};
pub use munge::{Munge, Proven};
pub use polling::{Side, polls};
pub use secret_file::KeyError;
pub use session::Session;
pub use shown::{ShownCertificate, show_certificates};
pub use stream::{PIECES_MAX, Stream};
