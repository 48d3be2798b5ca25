//! The file system as programs see it: servers in this process, mounted on a folder, used through the kernel.
//!
//! Each sentence of `doc/SEMANTICS.md` names a test here. Without `/dev/fuse` they skip and say so.

mod cluster;
mod files;
mod mounting;
mod names;
mod nodes;
mod tools;
