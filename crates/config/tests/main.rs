//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod documented;
mod messages;
