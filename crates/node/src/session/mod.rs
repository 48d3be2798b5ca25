//! Sessions: how a call is applied once although connections break, servers fall silent and clients try again.
//!
//! Every request carries its client's key, epoch and sequence. A repetition keeps the sequence and goes out under a newer
//! epoch, which revokes what is still under way of the older one at every server that has seen the newer.
//!
//! Everything here is a machine without a clock, a thread or a socket: time is an argument. The machines are small so
//! that a client with many threads can hold each under the lock that it needs anyway; the simulator drives the same
//! ones.
//!
//! - [`Epoch`]: the epoch of a client.
//! - [`Call`]: one call from its first copy to its answer: what may be repeated, when, and when it has failed.
//! - [`Routes`]: the way to a service that is reached through any of several servers: which one next, and after what pause.
//! - [`Silence`]: whether a peer that says nothing is slow or dead.
//! - [`Fence`]: the server's side for what may be done twice in order: which epochs it still takes.
//! - [`Replies`]: the server's side for what must not be done twice: what was done, and answered.

mod call;
mod epoch;
mod fence;
mod replies;
mod routes;
mod silence;

pub use call::{Call, Failure, Rights, Step, Verdict};
pub use epoch::Epoch;
pub use fence::{Fence, Passage};
pub use replies::{Admission, Kept, Replies, Stamp};
pub use routes::{Next, Routes, pause};
pub use silence::{Patience, Sign, Silence};
