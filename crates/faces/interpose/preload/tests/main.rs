//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod interception;
#[path = "support/library.rs"]
mod library;
mod portability;
mod support;
mod transparency;
