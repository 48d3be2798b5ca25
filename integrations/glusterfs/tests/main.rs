//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod ahead;
mod conformance;
mod content;
mod failures;
mod managed;
mod memory;
mod merging;
mod package;
mod shares;
mod support;
