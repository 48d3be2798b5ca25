//! A region of a file, and what hints say of it.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::number;

/// A region of a file. The default, offset 0 and length 0, is the whole file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct Region {
    /// First byte.
    #[serde(deserialize_with = "number::file_bytes")]
    #[cfg_attr(test, schemars(range(max = 9223372036854775807u64)))]
    pub offset: u64,
    /// Bytes; 0 means to the end of the file, wherever that is by then.
    #[serde(deserialize_with = "number::file_bytes")]
    #[cfg_attr(test, schemars(range(max = 9223372036854775807u64)))]
    pub length: u64,
}

impl Region {
    /// The whole file.
    pub const WHOLE: Region = Region { offset: 0, length: 0 };

    /// The region of these bytes; an empty range gives an empty region only by the caller's care: a length of 0 would
    /// mean "to the end".
    pub fn of(bytes: Range<u64>) -> Region {
        debug_assert!(bytes.start < bytes.end, "a region of no bytes cannot be written down");
        Region { offset: bytes.start, length: bytes.end.saturating_sub(bytes.start).max(1) }
    }

    /// Its bytes; one that goes to the end of the file ends at `u64::MAX`.
    pub fn bytes(&self) -> Range<u64> {
        match self.length {
            0 => self.offset..u64::MAX,
            length => self.offset..self.offset.saturating_add(length),
        }
    }
}

/// How the kernel is to read ahead.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
pub enum ReadAhead {
    /// As the kernel does by itself (`POSIX_FADV_NORMAL`).
    #[default]
    Normal,
    /// Twice as far (`POSIX_FADV_SEQUENTIAL`).
    Sequential,
    /// Not at all (`POSIX_FADV_RANDOM`).
    Random,
}

/// Whether the manager moves a region's data.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Movement {
    /// Neither in nor out.
    #[default]
    None,
    /// Brought in before it is read.
    WillNeed,
    /// Not brought in, and released once read.
    DontNeed,
}
