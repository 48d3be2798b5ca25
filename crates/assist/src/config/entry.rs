//! One entry of the hints file: a path and the hints for what it names.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::number;
use super::region::{Movement, ReadAhead, Region};

/// The smallest `BlockSize`, a page.
pub const BLOCK_SIZE_BYTES_MIN: u64 = 4096;
/// The largest `BlockSize`.
pub const BLOCK_SIZE_BYTES_MAX: u64 = 1 << 30;
/// The largest `CacheSize` and `ReadAheadSize`.
pub const CACHE_BLOCKS_MAX: u64 = 1 << 16;

/// Hints for one file, for the files of a directory, or for those that a pattern matches.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase")]
pub struct Entry {
    /// Absolute path; in `Glob`, a pattern: `*` and `?` within a name, `**` over names, `[a-z]`.
    pub path: PathBuf,
    /// In `Directory` only: also the files of the directories below. Default: false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub recursive: bool,
    /// Bytes prefetched and released at a time, 4096 to 1 GiB. Default: 4 MiB.
    #[serde(default = "block_size", deserialize_with = "number::block_bytes")]
    #[cfg_attr(test, schemars(range(min = 4096, max = 1073741824)))]
    pub block_size: u64,
    /// Blocks kept for each program that reads the file, 1 to 65,536; it bounds how far back jumps cost nothing.
    /// Default: 8.
    #[serde(default = "cache_size", deserialize_with = "number::cache_blocks")]
    #[cfg_attr(test, schemars(range(min = 1, max = 65536)))]
    pub cache_size: u64,
    /// Blocks prefetched, beginning with the one being read; at most `CacheSize`. Default: 4.
    #[serde(default = "read_ahead_size", deserialize_with = "number::read_ahead_blocks")]
    #[cfg_attr(test, schemars(range(max = 65536)))]
    pub read_ahead_size: u64,
    /// Regions that are brought in ahead of the program, a window of `ReadAheadSize` blocks at a time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub will_need: Vec<Region>,
    /// Regions that are never brought in, and released once read.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub dont_need: Vec<Region>,
    /// Regions that are read once: released as soon as the program has left a block.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_reuse: Vec<Region>,
    /// Regions read in order: the kernel reads ahead twice as far there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sequential: Vec<Region>,
    /// Regions read in no order: the kernel does not read ahead there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub random: Vec<Region>,
    /// Regions where the kernel reads ahead as always.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub normal: Vec<Region>,
    /// Pieces in the order in which the program reads them, wherever they lie: after one is read, the next ones are
    /// brought in, `BlockSize` × `ReadAheadSize` bytes of them. For programs whose order a recorded run has shown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sequence: Vec<Region>,
    /// No plan: strides are detected while the program runs, and what follows is brought in. For files without `WillNeed`,
    /// `DontNeed`, `NoReuse` and `Sequence`. Default: false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub online: bool,
    /// Whether blocks that leave the cache are released from memory, too. Default: true.
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub release: bool,
    /// How hints are given. Default: `Auto`, by the file system that the file lies on.
    #[serde(default, skip_serializing_if = "is_auto")]
    pub backend: BackendChoice,
    /// Why these hints, for the reader.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

fn block_size() -> u64 {
    4 << 20
}

fn cache_size() -> u64 {
    8
}

fn read_ahead_size() -> u64 {
    4
}

fn yes() -> bool {
    true
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_true(value: &bool) -> bool {
    *value
}

fn is_auto(value: &BackendChoice) -> bool {
    *value == BackendChoice::Auto
}

/// How hints are given to the file system.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub enum BackendChoice {
    /// By the kind of file system, and by trying whether the kernel's advice brings anything.
    #[default]
    Auto,
    /// `posix_fadvise`.
    Fadvise,
    /// Reads by the manager, for file systems that ignore advice.
    ForcedRead,
    /// Reads by the manager and server-side advice of Lustre.
    Lustre,
    /// Hints of GPFS: by the library inside the program where it can, else by the manager.
    Gpfs,
    /// Reads by the library inside the program, so that memory and I/O are charged to the program's control group; none
    /// where it cannot.
    Program,
}

impl Entry {
    /// The defaults for a path: no hint at all.
    pub fn new(path: impl Into<PathBuf>) -> Entry {
        Entry {
            path: path.into(),
            recursive: false,
            block_size: block_size(),
            cache_size: cache_size(),
            read_ahead_size: read_ahead_size(),
            will_need: Vec::new(),
            dont_need: Vec::new(),
            no_reuse: Vec::new(),
            sequential: Vec::new(),
            random: Vec::new(),
            normal: Vec::new(),
            sequence: Vec::new(),
            online: false,
            release: true,
            backend: BackendChoice::Auto,
            why: None,
        }
    }

    /// Whether it says what is to be done for files, instead of having that found out while they are read, or left.
    pub fn is_plan(&self) -> bool {
        let regions = [&self.will_need, &self.dont_need, &self.no_reuse, &self.sequential, &self.random, &self.normal];
        !self.online && (regions.into_iter().chain([&self.sequence]).any(|regions| !regions.is_empty()))
    }

    /// How the kernel is to read ahead at a byte.
    pub fn read_ahead_at(&self, offset: u64) -> ReadAhead {
        shortest(
            offset,
            [
                (&self.random, ReadAhead::Random),
                (&self.sequential, ReadAhead::Sequential),
                (&self.normal, ReadAhead::Normal),
            ],
        )
        .unwrap_or_default()
    }

    /// Whether data moves at a byte.
    pub fn movement_at(&self, offset: u64) -> Movement {
        shortest(offset, [(&self.dont_need, Movement::DontNeed), (&self.will_need, Movement::WillNeed)])
            .unwrap_or_default()
    }

    /// Whether a byte is read once.
    pub fn once_at(&self, offset: u64) -> bool {
        self.no_reuse.iter().any(|r| r.bytes().contains(&offset))
    }
}

/// What the shortest region over a byte says; of equally short ones the side named first.
fn shortest<'a, T: Copy>(offset: u64, sides: impl IntoIterator<Item = (&'a Vec<Region>, T)>) -> Option<T> {
    let mut best: Option<(u64, T)> = None;
    for (regions, said) in sides {
        for bytes in regions.iter().map(Region::bytes).filter(|b| b.contains(&offset)) {
            let len = bytes.end - bytes.start;
            if best.is_none_or(|(shortest, _)| len < shortest) {
                best = Some((len, said));
            }
        }
    }
    best.map(|(_, said)| said)
}
