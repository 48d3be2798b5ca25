//! Room 4: everything a program needs to use a cluster: connections that heal, names, and striped data.
//!
//! - [`Client`] and [`File`] are what programs use; [`names`] its operations on the name space.
//! - [`Striped`] reads and writes files on the data servers directly; an I/O node forwards through it.
//! - [`Link`] is a connection to one service that many threads share and that is made anew when it is lost.

use impresario_base::lock;
pub use impresario_transport::Access;
pub use impresario_wire::KeyRole;

pub mod admin;
mod caller;
mod client;
mod clock;
mod connection;
mod cut;
mod error;
mod fallocate;
mod file;
mod identity;
mod landing;
mod leases;
mod length;
mod link;
mod locks;
pub mod names;
mod opens;
mod passes;
mod paths;
mod pending;
mod round;
mod slots;
mod striped;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;
mod told;
mod turn;
#[cfg(test)]
mod turn_model;
mod unattended;
mod unsynced;
mod watch;
mod way;
mod whereabouts;
mod will_need;

pub use caller::{Acting, Caller};
pub use client::{Client, ClientOptions, Via};
pub use error::{ClientError, Errno, Peer};
pub use fallocate::{seek_to, space_change};
pub use file::File;
pub use identity::{Identity, Traffic, TrafficCount, whoami};
pub use link::{Check, Link, LinkOptions, ServerPosition, Vet};
pub use locks::{LockAttempt, Locked, Other, Tried};
pub use names::CreateOptions;
pub use pending::{Buffers, Op, Pending, Reply, exchange, verdict};
pub use round::{begin_round, end_round};
pub use striped::Striped;
pub use unattended::{End, Job, Task};
pub use watch::{Attending, Watch};
pub use whereabouts::Whereabouts;
