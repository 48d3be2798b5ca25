//! The metadata server: one name space, stored as a directory tree on a local file system.
//!
//! | file | question |
//! |---|---|
//! | `service` | which calls arrive, and which answers leave |
//! | `directory` | what the server's directory contains, and how the server claims it |
//! | `disk` | every change to the local file system |
//! | `tree` | how a path resolves to a local directory entry |
//! | `record` | what the extended attributes hold |
//! | `create` | how names are created |
//! | `answered` | which data servers new files may use, and which keys |
//! | `attributes` | how attributes change |
//! | `xattrs` | how extended attributes are kept |
//! | `labels` | access control lists, and which nodes may have one |
//! | `sizes` | who knows a file's size |
//! | `links` | how a node gets another name, and how many it has |
//! | `exchange` | how two names change places |
//! | `append` | where the appends of several clients go |
//! | `removal` | how names and files are removed |
//! | `permissions` | what clients whose users act as others may do |
//! | `listing` | how directories are read |
//! | `examine` | what a check of the cluster asks |
//! | `opens` | which client has which file open |
//! | `locks` | which client has which bytes locked |
//! | `background` | tasks that run after the reply |
//! | `objects` | calls to the data servers |
//! | `stores` | which folders of data servers belong to the cluster |
//! | `status`, `fault` | what the server reports |
//!
//! **Atomic and crash-safe by the local file system.** Every operation becomes visible through one system call
//! (`linkat`, `renameat2`, `unlinkat`, …). If the server stops between any two steps, the state on disk says what is
//! left to do: a file's extra names in `writers/` and `orphans/`. Recovery needs nothing from memory.
//!
//! **Hooks for later features.** *Failover*: all state is in one directory. A second server that opens it elsewhere does what a restart does, and
//! clients come back with `Reopen`.
//!
//! **Without root** the server works on files that its user owns. Requested owners are not stored. Where permission
//! bits block the owner (opening a file of mode 0444 for writing), the server widens them for that one system call; a
//! crash at that instant leaves them widened. Directories without `w` or `x` for their owner block the server as they
//! would block the owner.
//!
//! **Power failures.** What must not be overtaken is made durable first: a mark before its file's objects change, a
//! removal before the objects are removed. What only has to keep its order relies on the journal of ext4 or XFS; on
//! other file systems an fsync keeps it. As everywhere, names are durable only after `Fsync` or `FsyncDir`. An ext4
//! without a journal keeps no order and must not be used.
//!
//! **Bounds.** Sessions 65,536; opens of one session 65,536 and of all 2^20 (and one descriptor per file in use); files
//! waiting for settling 2^20; background jobs 65,536, the rest found again on disk; listings 32 MiB,
//! and answers that have names or attributes, with those that are being made, 128 MiB;
//! locks 2^18, of one client 16,384, of one file 8,192; requests that wait for locks 1,024 of one client.

mod answered;
mod append;
mod attributes;
mod background;
mod changes;
mod create;
mod directory;
mod disk;
mod examine;
mod exchange;
mod fault;
mod labels;
mod links;
mod listing;
mod locks;
mod objects;
mod opens;
mod permissions;
mod record;
mod relay;
mod removal;
mod service;
mod sizes;
mod status;
mod stores;
mod synced;
mod tree;
mod xattrs;

use impresario_wire::message::Fault;

pub use answered::Answered;
pub use directory::{COUNT_BITS, Claimed, FolderState, StartError, adopt, examine, is_begun, key_prefix, make};
pub(crate) use directory::{KEYS_WITHOUT_OBJECTS, LOCK};
pub use disk::{Fate, StepHook};
pub use examine::IdleFolder;
pub(crate) use fault::{is_local, show};
pub(crate) use locks::NO_FILE;
pub use objects::{MemoryObjects, Objects};
pub use opens::SessionId;
pub(crate) use service::answer_bytes_max;
pub use service::{MetaOptions, MetaService};
pub use stores::Stores;
pub use tree::Absent;
