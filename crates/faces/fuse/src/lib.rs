//! The file system that unmodified programs see, through FUSE.
//!
//! [`mount`] mounts a cluster, reached through an [`impresario_client::Client`], on a directory. This crate is thin: it
//! turns the kernel's requests by inode number into the client's calls by path or open file (`inodes`), keeps the
//! kernel's caches coherent (`freshness`) and replies. `doc/SEMANTICS.md` says what a program may rely on.

mod attr;
mod data;
mod device;
mod directory;
mod face;
mod freshness;
mod handles;
mod inodes;
mod kernel;
mod locks;
mod mount;
mod mountpoint;
mod names;
mod options;
mod paths;
mod sharing;
mod signals;
mod space;
mod striping;
mod turns;

pub use mount::{MountError, Mounted, mount, mount_file_system};
pub use options::MountOptions;
