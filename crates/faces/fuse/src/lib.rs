//! The file system that unmodified programs see, through FUSE.
//!
//! [`mount`] puts a cluster, reached through an [`impresario_client::Client`], under a folder. This crate is
//! thin: it turns the kernel's questions by inode number into the client's calls by path or open file
//! (`inodes`), keeps the kernel's caches honest (`freshness`) and answers. What a program may rely on is
//! written in `doc/SEMANTICS.md`.

mod attr;
mod data;
mod device;
mod directory;
mod face;
mod freshness;
mod handles;
mod inodes;
mod kernel;
mod mount;
mod mountpoint;
mod names;
mod options;
mod striping;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use mount::{MountError, Mounted, mount};
pub use options::MountOptions;

/// Locks; a thread that panicked while it held the lock left at worst a half-made table entry, which must not
/// take the whole mount down.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
