//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod checksums;
mod modelled;
mod objects;
mod power;
mod syncs;
