//! The metadata server: one name space, kept as a folder tree of a local file system.
//!
//! | file | question |
//! |---|---|
//! | `service` | what comes in and goes out |
//! | `home` | what lies in the server's folder, and how it is claimed |
//! | `disk` | what is ever changed there |
//! | `tree` | how a path becomes a place |
//! | `record` | what is kept in extended attributes |
//! | `making` | how names come into being |
//! | `changing` | how attributes are changed |
//! | `sizes` | who knows a file's size |
//! | `removal` | how names and files go |
//! | `listing` | how folders are read |
//! | `opens` | who has what open |
//! | `care` | what is done behind the clients' backs |
//! | `objects` | what is asked of the data servers |
//! | `status`, `fault` | what is told |
//!
//! **Atomic and crash-safe by the local file system.** Every operation becomes visible by one system call
//! (`linkat`, `renameat2`, `unlinkat`, …), and what has to go with it can be told from what lies on disk if the
//! server stops between any two steps: a file's second names in `writers/` and `orphans/` say what is left to do.
//! Nothing in memory is needed to continue.
//!
//! **What later features will find.** *Locks* belong beside the opens: a session and a handle name their owner, and
//! they end with it; they are not kept on disk, clients claim them again after a restart as they do opens. *Hard
//! links*: key, layout and times are the inode's, not the name's; the last name is told by the number of links less
//! the ones that are ours (`OpenFile::links` guards that sum), so `linkat` under the name locks is all that is
//! missing. *User extended attributes* go beside ours under a prefix of their own (`user.impresario.x.`), so that no
//! name of a user's can hide a record. *Failover*: all state is in one folder; a second server that opens it
//! elsewhere does what a restart does, and clients come back with `Reopen`.
//!
//! **Without root's rights** the server works on files that its user owns: owners asked for are not kept, and where
//! permission bits hold up the owner (opening a file of mode 0444 for writing) they are widened for the moment of
//! that system call; a crash exactly then leaves them widened. Folders without `w` or `x` for their owner hold up
//! the server as they would hold up the owner.
//!
//! **Power failures.** What must not be overtaken is made durable first: a mark before its file's objects change, a
//! removal before the objects go. What only has to keep its order relies on the journals of ext4 and XFS, which keep
//! it; on other file systems an fsync does. As everywhere, names are durable after `Fsync` or `FsyncDir` only. An
//! ext4 made without a journal keeps no order and is not to be used.
//!
//! **Bounds.** Sessions 65,536; opens of one session 65,536 and of all 2^20 (and one descriptor per file in use);
//! files waiting to be settled 2^20; background jobs 65,536, the rest found again on disk; listings 32 MiB.

mod care;
mod changing;
mod disk;
mod fault;
mod home;
mod listing;
mod making;
mod objects;
mod opens;
mod record;
mod removal;
mod service;
mod sizes;
mod status;
mod tree;

use std::sync::{Mutex, MutexGuard, PoisonError};

use impresario_wire::message::Fault;

pub use disk::StepHook;
pub use home::StartError;
pub use objects::{MemoryObjects, Objects};
pub use opens::SessionId;
pub use service::{MetaOptions, MetaService};

/// Locks, whatever happened to an earlier holder: what these locks guard is consistent at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
