//! The papers' experiments in the simulator: every published result compared with ours, with a verdict.
//!
//! A [`Figure`] is one file of `lab/papers`: a scenario, the systems that the paper compares in it (cells) and the
//! paper's statements (claims). [`campaign`] runs the cells, one seed per repetition and the same seeds for all
//! systems; [`claim`] computes the quantity of each claim from the runs; [`report`] judges it by the rules of
//! [`agreement`]. Machines are fixed in `lab/papers/devices.toml`.

pub mod agreement;
pub mod campaign;
pub mod claim;
pub mod figure;
pub mod map;
mod map_text;
mod metric;
pub mod page;
pub mod papers;
pub mod report;
pub mod studies;
pub mod summary;
pub mod sweep;
pub mod text;
pub mod why;

pub use campaign::{Effort, Step};
pub use figure::Figure;
pub use report::Report;
