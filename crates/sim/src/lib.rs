//! Virtual time around the scheduling core: the same `Core`, `node`, `layout` and `device` code as the servers
//! run, driven by an event heap instead of threads. Thin: clients in closed loops, constant network
//! latency, I/O nodes, data servers on modelled disks. Deterministic under a seed.

mod cluster;
mod random;
pub mod scenario;

pub use cluster::run;
pub use random::Random;
pub use scenario::{Application, IoNodes, Outcome, Pattern, Scenario};
