//! The integration tests of this crate as one program, since each program links the whole crate anew.

mod glusterfs;
mod nfs;
mod peers;
mod reproduce;
