//! The daemons: metadata server, data server, I/O node.
//!
//! [`listener`] is the front that all three share; each of [`data`], [`io_node`] and [`meta`] is what is behind
//! it; [`process`] starts one of them as a configuration says.

mod addresses;
pub mod connection;
pub mod data;
mod data_servers;
pub mod draining;
pub mod earlier_runs;
pub mod export;
mod failures;
pub mod file_system;
pub mod folders;
pub mod fsck;
mod grants;
mod io_node;
pub mod listener;
mod members;
pub mod meta;
mod meta_front;
pub mod moving;
mod name_limits;
pub mod outbox;
mod owed;
mod pace;
pub mod payload;
mod peers;
pub mod process;
mod readiness;
mod request_trace;
mod whereabouts;
mod withheld;

use impresario_engine::workers;
pub use impresario_transport::BindError;
pub use process::{StartError, Started, run, start, until_signal};

/// A value as JSON; what cannot be one (it can here) is null.
pub(crate) fn json(value: &impl serde::Serialize) -> serde_json::Value {
    serde_json::to_value(value).unwrap_or_default()
}
