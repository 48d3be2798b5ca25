//! A parallel file system in virtual time: the same `Core`, `node`, `layout` and `device` code as the servers run,
//! driven by a calendar of events instead of threads.
//!
//! Users write a [`model::Scenario`] and get an [`outcome::Outcome`]. The path of a request: process → compute node's
//! link → I/O node (processor, core, dispatch queue) → data server (processor, core, page cache) → device, and back.
//! Nothing depends on the machine: the same scenario and seed give the same bytes.

mod access;
mod calls;
mod check;
mod client;
mod client_reads;
mod collective;
mod congestion;
mod contents;
mod earlier;
mod events;
mod faults;
pub mod file;
pub mod fuzz;
mod io_node;
mod measure;
mod members;
mod memory;
pub mod model;
mod network;
pub mod outcome;
mod patience;
mod report;
mod server;
mod server_cache;
mod simulation;
mod station;
pub mod sweep;

pub use model::Scenario;
pub use outcome::Outcome;
pub use simulation::{Budget, Progress, SimError, Simulation, run};
