//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod fuzz;
mod members;
mod models;
mod random;
mod simulation;
