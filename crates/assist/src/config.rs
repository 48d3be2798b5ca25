//! The hints file: which regions of which files a program reads, and how.
//!
//! The format is that of MERCURY (Congiu et al., 2014, Listing 2), accepted as it is, with our additions. A file:
//!
//! ```json
//! { "File":      [ { "Path": "/data/run7.root", "BlockSize": 4194304, "CacheSize": 8, "ReadAheadSize": 4,
//!                    "WillNeed": [ { "Offset": 0, "Length": 0 } ] } ],
//!   "Directory": [ { "Path": "/data/index", "Recursive": true, "Random": [ {} ] } ],
//!   "Glob":      [ { "Path": "/data/run*/hits.h5", "Online": true } ] }
//! ```
//!
//! # Which entry governs a file
//! The `File` entry with its path; else the first `Glob` entry that matches; else the `Directory` entry that lies
//! deepest. Of two entries with the same path the first counts. Symbolic links in paths are resolved.
//!
//! # Regions that overlap
//! A region has three independent sides, so that `Random` (no read-ahead by the kernel) and `WillNeed` (prefetching by
//! the manager) may cover the same bytes. Within one side, where regions overlap:
//! - *read-ahead*: of `Normal`, `Sequential` and `Random` the shortest region wins; of equally short ones `Random`,
//!   then `Sequential`;
//! - *prefetching*: of `WillNeed` and `DontNeed` the shortest region wins; of equally short ones `DontNeed`;
//! - *keeping*: `NoReuse` holds wherever one covers the byte: what was read there is released at once.

mod entry;
mod limits;
mod load;
mod lookup;
mod named;
mod number;
mod paths;
mod region;
#[cfg(test)]
mod tests;
mod warnings;

pub use entry::{BLOCK_SIZE_BYTES_MAX, BLOCK_SIZE_BYTES_MIN, BackendChoice, CACHE_BLOCKS_MAX, Entry};
pub use limits::{Budget, DeviceCost, Learn, Limits, StandDown};
pub use load::{ConfigError, Hints};
pub use lookup::{Lookup, Monitored};
pub use named::Named;
pub use paths::Paths;
pub(crate) use paths::{MountPoints, Questions};
pub use region::{Movement, ReadAhead, Region};
pub use warnings::Warning;
