//! `impresario run`'s agent: one process that acts for all programs of a run. It is the cluster's client and has their
//! open files; the library in the programs (`impresario-interpose::served`) sends it their calls.
//!
//! One client for all of them: an open file is shared by the processes that inherited it, its position with it, and lives
//! until the last of them has closed it, whatever they execute meanwhile. Programs hold no connection to the cluster, no
//! thread and no session of ours, so a fork or a kill harms nothing.

mod agent;
mod ahead;
mod calls;
mod connections;
mod left;
mod locks;
mod mirror;
mod open;
mod rights;
mod walk;

pub use agent::{Agent, AgentError};
pub use ahead::{Foresees, HasRead, Opened};
