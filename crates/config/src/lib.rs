//! The one file that describes a cluster, `impresario.toml`: its keys, and how it is read, checked and written.
//!
//! [`Config::load`] reads a file and reports all its mistakes at once, each with position and remedy. [`Config::check`]
//! makes the same checks for a configuration built by a program.

mod address;
mod allocation;
pub mod calibration;
mod check;
mod export;
mod load;
mod model;
mod nfs;
mod policies;
mod seen;
mod table;
mod write;

pub use address::Address;
pub use allocation::{Allocation, AllocationRule, Placed, Spread};
pub use calibration::Calibration;
pub use check::{device_key, missing_device, policy_complaint};
pub use export::{AccessRules, Export, Network, Squash, Users};
pub use model::{
    Cluster, Config, Data, DataState, Io, META_NAME, Merge, Meta, MovesTo, Protect, Security, Server, Tls, Tree,
    TreeBackend, TreeIo,
};
pub use nfs::{Nfs, NfsExport};
pub use policies::policies;
pub use seen::FileSeen;
pub use table::{read_table, table_file};
