//! What the manager may use, when it stands down, and what the device costs.

use serde::{Deserialize, Serialize};

use super::number;

/// Bytes that may be prefetched and not yet released. 0 means: by the memory there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct Budget {
    /// Of one file. Default: a quarter of the node's.
    #[serde(deserialize_with = "number::file_bytes")]
    #[cfg_attr(test, schemars(range(max = 9223372036854775807u64)))]
    pub per_file: u64,
    /// Of one user's programs. Default: half of the node's.
    #[serde(deserialize_with = "number::file_bytes")]
    #[cfg_attr(test, schemars(range(max = 9223372036854775807u64)))]
    pub per_user: u64,
    /// Of all. Default: a quarter of the memory available to the manager, its memory control group included.
    #[serde(deserialize_with = "number::file_bytes")]
    #[cfg_attr(test, schemars(range(max = 9223372036854775807u64)))]
    pub per_node: u64,
}

/// What one user's programs, and all together, may hold in the manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct Limits {
    /// Programs of one user, 1 to 1,048,576. Default: 4096.
    #[serde(deserialize_with = "number::count")]
    #[cfg_attr(test, schemars(range(min = 1, max = 1048576)))]
    pub programs_per_user: u64,
    /// Open files of one user, 1 to 1,048,576. Default: 65,536.
    #[serde(deserialize_with = "number::count")]
    #[cfg_attr(test, schemars(range(min = 1, max = 1048576)))]
    pub files_per_user: u64,
    /// Open files of one program, 1 to 1,048,576. Default: 16,384.
    #[serde(deserialize_with = "number::count")]
    #[cfg_attr(test, schemars(range(min = 1, max = 1048576)))]
    pub files_per_program: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { programs_per_user: 4096, files_per_user: 65_536, files_per_program: 16_384 }
    }
}

/// When the manager stops giving hints for a file that gains nothing by them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct StandDown {
    /// Whether it does so at all. Default: true.
    pub enabled: bool,
    /// Whether blocks of `WillNeed` regions are first tried: the program's first reads of a file go without hints, then one
    /// extent is brought in, and hints are given if that cost no more than the reads in it. Default: true.
    pub trial: bool,
    /// Of the bytes prefetched and done with, the part that was never read, in percent (1 to 100), above which it
    /// stands down unless reads are plainly faster (30 %) than without. Default: 75.
    #[serde(deserialize_with = "number::percent")]
    #[cfg_attr(test, schemars(range(min = 1, max = 100)))]
    pub waste_percent: u64,
    /// Bytes prefetched and done with before waste is judged. Default: 32 MiB.
    #[serde(deserialize_with = "number::file_bytes")]
    #[cfg_attr(test, schemars(range(max = 9223372036854775807u64)))]
    pub judge_after_bytes: u64,
    /// Read time that hints must save, in percent (1 to 100) of the time of reads without them. Default: 5.
    #[serde(deserialize_with = "number::percent")]
    #[cfg_attr(test, schemars(range(min = 1, max = 100)))]
    pub gain_percent: u64,
    /// Seconds until it tries again, 1 to 86,400; doubled each time that it stands down again. Default: 5.
    #[serde(rename = "RetryAfterSeconds", deserialize_with = "number::seconds")]
    #[cfg_attr(test, schemars(range(min = 1, max = 86400)))]
    pub retry_after_s: u64,
    /// Where the doubling ends. Default: 600.
    #[serde(rename = "RetryMaxSeconds", deserialize_with = "number::seconds")]
    #[cfg_attr(test, schemars(range(min = 1, max = 86400)))]
    pub retry_max_s: u64,
}

impl Default for StandDown {
    fn default() -> StandDown {
        StandDown {
            enabled: true,
            trial: true,
            waste_percent: 75,
            judge_after_bytes: 32 << 20,
            gain_percent: 5,
            retry_after_s: 5,
            retry_max_s: 600,
        }
    }
}

/// Whether a node's manager learns from programs' runs, and how much it records of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct Learn {
    /// Whether it does so at all. Default: true.
    pub enabled: bool,
    /// Bytes of what is recorded of one run, in memory, 64 KiB to 256 MiB; of a longer run nothing is learnt. All runs that are recorded
    /// at a time have sixteen times as much. Default: 4 MiB.
    #[serde(deserialize_with = "number::trace_bytes")]
    #[cfg_attr(test, schemars(range(min = 65536, max = 268435456)))]
    pub trace_bytes: u64,
    /// Runs of one program, 1 to 1,048,576, after which no more are recorded that only show files of unknown kinds: those that
    /// were read otherwise than others of their kind are, still. Default: 8.
    #[serde(deserialize_with = "number::count")]
    #[cfg_attr(test, schemars(range(min = 1, max = 1048576)))]
    pub runs_per_program: u64,
    /// Runs of all programs that are learnt from in an hour, 1 to 1,048,576. Default: 120.
    #[serde(deserialize_with = "number::count")]
    #[cfg_attr(test, schemars(range(min = 1, max = 1048576)))]
    pub runs_per_hour: u64,
}

impl Default for Learn {
    fn default() -> Learn {
        Learn { enabled: true, trace_bytes: 4 << 20, runs_per_program: 8, runs_per_hour: 120 }
    }
}

/// What a read costs on the device: `request_us` + bytes ÷ `mib_per_s`. It decides whether gaps are read along.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, rename_all = "PascalCase", default)]
pub struct DeviceCost {
    /// Microseconds for each request, before the first byte. Default: 2000.
    #[serde(rename = "RequestMicroseconds", deserialize_with = "number::micros")]
    #[cfg_attr(test, schemars(range(max = 10000000)))]
    pub request_us: u64,
    /// MiB a second after that, at least 1. Default: 200.
    #[serde(rename = "MiBPerSecond", deserialize_with = "number::mib_per_s")]
    #[cfg_attr(test, schemars(range(min = 1, max = 1048576)))]
    pub mib_per_s: u64,
}

impl Default for DeviceCost {
    fn default() -> DeviceCost {
        DeviceCost { request_us: 2000, mib_per_s: 200 }
    }
}

impl DeviceCost {
    /// The gap that costs as much to read along as a request of its own, in bytes.
    pub fn gap_bytes(&self) -> u64 {
        // MiB/s × µs = 1.048576 bytes.
        (u128::from(self.request_us) * u128::from(self.mib_per_s) * (1 << 20) / 1_000_000) as u64
    }
}
