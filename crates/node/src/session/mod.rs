//! Sessions: how a call is applied once although connections break, servers fall silent and clients retry.
//!
//! Every request carries its client's key, epoch and sequence. A repetition keeps the sequence and is sent under a
//! newer epoch, which revokes copies of the older one at every server that has seen the newer.
//!
//! Everything here is a state machine without clock, thread or socket: time is an argument. The machines are small, so
//! that a client with many threads can guard each with a lock it needs anyway; the simulator drives the same ones.
//!
//! - [`Epoch`]: the epoch of a client.
//! - [`Call`]: one call from its first copy to its answer: what may be repeated, when, and when it has failed.
//! - [`Routes`]: a service that several servers can reach: which to try next, and after what pause.
//! - [`Silence`]: whether a silent peer is slow or dead.
//! - [`Fence`]: the server's side for operations that may be repeated in order: which epochs it accepts.
//! - [`Recent`]: the server's side for changes of bytes, a copy of which may be cut into other pieces: what was done of it.
//! - [`Replies`]: the server's side for operations that must be done once: which were done, with what reply.

mod call;
mod epoch;
mod fence;
mod recent;
mod replies;
mod routes;
mod silence;

pub use call::{Call, Failure, Rights, Step, Verdict};
pub use epoch::Epoch;
pub use fence::{Fence, Passage};
pub use recent::{Change, Did, Recent, Rest};
pub use replies::{Admission, Kept, Replies, Stamp};
pub use routes::{Next, Routes, pause};
pub use silence::{Patience, SIGN_EVERY, SILENCE_MAX, Sign, Silence};
