//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod limits_over_all;
mod session;
