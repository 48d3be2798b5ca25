//! The file system as programs see it: servers in this process, mounted on a directory, used through the kernel.
//!
//! Each sentence of `doc/SEMANTICS.md` names a test here. Without `/dev/fuse` they are skipped.

mod acls;
mod cluster;
mod files;
mod links;
mod locks;
mod mounting;
mod names;
mod nodes;
mod space;
mod suites;
mod tools;
mod tree;
mod users;
mod withheld;
