//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod adding;
mod bad_input;
mod bench;
mod calibrate;
mod conformance;
mod crowd;
mod draining;
mod faults;
mod fsck;
mod hung;
mod idle;
mod keys;
#[path = "../../faces/interpose/preload/tests/support/library.rs"]
mod library;
mod links;
mod locks;
mod mounting;
mod moving;
mod mpi;
mod nfs;
mod peers;
mod prefetch;
mod retiring;
mod run;
mod scrub;
mod shortage;
mod sim;
mod soak;
mod store;
mod support;
mod trace;
mod unattended_reads;
mod unheard;
mod up;
