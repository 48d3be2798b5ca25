//! The papers' experiments in the simulator: every published result beside ours, with a verdict.
//!
//! A [`Figure`] is a scenario file of `scenarios/papers`, the systems that the paper compares in it ([`Cell`]s) and what
//! the paper says ([`Claim`]s). [`campaign`] runs the cells, a seed a repetition and the same seeds for all systems;
//! [`report`] judges the claims. Nothing here depends on the outcome: machines are fixed in
//! `scenarios/papers/devices.toml`, verdicts follow the rules of [`verdict`].

pub mod campaign;
pub mod claim;
pub mod figure;
pub mod map;
mod map_text;
pub mod page;
pub mod papers;
pub mod report;
pub mod sweep;
pub mod text;
pub mod verdict;
pub mod why;

pub use campaign::{Campaign, Effort, Run, Step};
pub use claim::{Claim, Ours, Table};
pub use figure::{Cell, Figure, Plot};
pub use report::{ClaimRow, FigureReport, Report};
pub use verdict::{Says, Verdict};
