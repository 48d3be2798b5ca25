//! Request scheduling as one pure state machine: no thread, no clock, no I/O.
//!
//! [`Core`] is driven by `engine` (threads and a clock) and by `sim` (virtual time). [`policy`] holds the
//! policies, one file each.

mod conflicts;
mod contract;
pub mod core;
pub mod correction;
pub mod cost;
mod device_time;
mod ended;
pub mod laws;
pub mod limited;
pub mod loads;
mod members;
mod names;
mod occupied;
mod overtaking;
pub mod policy;
pub mod sorted;
pub mod spec;
mod speculation;
mod stats;
mod stranded;
mod table;
mod throughput;
pub mod types;

pub use crate::core::Core;
pub use contract::{
    Cancelled, Completion, CoreConfig, Event, Full, LaneStatus, Linked, Next, PredictionStatus, Status,
};
pub use correction::{Corrector, CostStatus};
pub use cost::{CostCurve, CostModel, CurveError, LinearCost, OpCost};
pub use ended::{Ended, Observer};
pub use impresario_foresight::PredictedQueues;
pub use members::Members;
pub use names::{Does, NameOp, Names, Naming, Who};
pub use policy::{PolicyError, WaitBound, WaitReason};
pub use spec::{PolicySpec, SpecError};
pub use table::{Slot, Table};
pub use types::*;
