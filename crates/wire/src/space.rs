//! Changes of the space that a range of a file takes, and the search for its holes.

use serde::{Deserialize, Serialize};

use crate::message::ObjectInfo;

/// What is done to a range of a file or object. None of it reads or moves the bytes around it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum SpaceChange {
    /// Every byte gets storage, so that no later write of it lacks space. Its bytes stay; the end moves to that of the
    /// range if it lies before it, unless `keep_size`.
    Allocate {
        /// The end stays.
        keep_size: bool,
    },
    /// The bytes become zeros and give up their storage. The end stays.
    Punch,
    /// The bytes become zeros and keep or get storage, as with `Allocate`.
    Zero {
        /// The end stays.
        keep_size: bool,
    },
}

impl SpaceChange {
    /// The end may move.
    pub fn extends(self) -> bool {
        match self {
            SpaceChange::Allocate { keep_size } | SpaceChange::Zero { keep_size } => !keep_size,
            SpaceChange::Punch => false,
        }
    }

    /// Bytes that were there before the end may become zeros.
    pub fn changes_bytes(self) -> bool {
        !matches!(self, SpaceChange::Allocate { .. })
    }

    /// The same without moving the end.
    pub fn keeping_size(self) -> SpaceChange {
        match self {
            SpaceChange::Allocate { .. } => SpaceChange::Allocate { keep_size: true },
            SpaceChange::Zero { .. } => SpaceChange::Zero { keep_size: true },
            SpaceChange::Punch => SpaceChange::Punch,
        }
    }
}

/// What is looked for from an offset on.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum SeekTo {
    /// A byte that may be other than zero.
    Data,
    /// A byte in a hole; behind the last byte there is one.
    Hole,
}

/// What a search found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Sought {
    /// Where; `None`: nowhere before the end.
    pub at: Option<u64>,
    /// The state of the object or file that was searched.
    pub object: ObjectInfo,
}
