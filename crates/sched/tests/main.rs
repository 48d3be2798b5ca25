//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod aggregation;
mod correction;
mod documented;
mod golden;
mod golden_agios;
mod golden_aioli;
mod golden_jobs;
mod golden_prediction;
mod golden_production;
mod golden_twins;
