//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod fake;
mod fake_nbd;
mod mount;
mod nbd;
mod support;
