//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod calls;
mod data;
mod gather;
mod past_the_cache;
mod peers;
mod read_ahead;
mod stable;
mod support;
