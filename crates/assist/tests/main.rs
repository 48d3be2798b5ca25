//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod backends;
mod formats;
mod hostile;
mod manager;
mod support;
mod watch;
