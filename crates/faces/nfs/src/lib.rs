//! An NFSv3 server with MOUNTv3 over a [`Backend`](impresario_backend::Backend): the way in for machines that have nothing
//! but the client of their kernel.
//!
//! READ, WRITE and COMMIT go through the scheduling core, like the requests of every other server here; calls on names and
//! attributes go past it, on threads of their own. `doc/NFS.md` says what is promised.

mod budget;
mod changes;
mod connection;
mod data;
pub mod exports;
mod gather;
pub mod handles;
mod mount;
mod portmap;
mod procedures;
pub mod protocol;
mod records;
mod replay;
mod reply;
pub mod rpc;
mod server;
mod service;
mod statistics;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod verifier;
pub mod xdr;

pub use exports::{AccessRules, ExportSettings, Network, Reopen, Rules, Squash};
pub use handles::{HandleKey, KeyError};
pub use server::{Listening, Running, Settings, start};
