//! A data server's local objects, and an optional modelled device in front of them.
//!
//! [`ObjectStore`] keeps the objects over a small [`FileSystem`]: the local one ([`Real`]) or, for tests, one that
//! forgets everything unsynced ([`testing::Forgetful`]). [`ModelledDevice`] makes requests take the time of a modelled
//! disk in real time; it runs the work it is given and knows nothing of objects.

mod changes;
mod checks;
mod doubts;
mod error;
mod examine;
mod filesystem;
mod folder;
mod grown;
mod handles;
mod keys;
mod modelled;
mod notes;
mod objects;
mod passage;
mod real;
mod removed;
mod replace;
mod space;
pub mod testing;
mod verify;

pub use changes::Changed;
pub use checks::{BLOCK_BYTES, ChecksState, Corrupt, piece_end};
pub use error::{StoreError, WriteError};
pub use examine::{ObjectPage, SET_ASIDE};
pub use filesystem::{FileState, FileSystem, FileSystemId, SpaceState};
pub use folder::{FolderIdentity, FolderState, adopt, any_key, examine, is_served, make, make_over, unmake};
pub use keys::{COUNT_BITS, KeyMarks};
pub use modelled::{DeviceStatus, Job, Lateness, ModelledDevice, Timing, monotonic_ns};
pub use notes::Note;
pub use objects::{ObjectStore, StoreOptions};
pub use passage::{
    Arrived, Arriving, Departed, abandon_arrival, arrived, arriving, begin_arrival, departed, unmark_over,
};
pub use real::{Claim, LOCK, Real};
pub use verify::Scrubbed;
