//! Access patterns, verification, experiments and reports: everything behind `impresario bench` and `demo`.

pub mod access;
pub mod calibrate;
pub mod children;
pub mod cluster;
pub mod compare;
pub mod compare_page;
pub mod content;
pub mod core_bench;
pub mod cpu;
pub mod datapath;
pub mod dataset;
pub mod demonstration;
mod gate;
pub mod goals;
pub mod guided;
#[cfg(test)]
mod memory;
pub mod minimal;
pub mod pattern;
pub mod plan;
pub mod random;
pub mod report;
pub mod reproduce;
pub mod result;
pub mod runner;
pub mod simulated;
pub mod size;
pub mod stats;
pub mod stop;
pub mod storage;
pub mod system;
pub mod validate;
