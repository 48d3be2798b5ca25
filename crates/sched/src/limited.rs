//! Limits as a policy states them, and the portion of a limit over several servers that one of them may grant.

use serde::Serialize;

/// What a limit counts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitUnit {
    /// Requests.
    Requests,
    /// Bytes.
    Bytes,
    /// Device time, nanoseconds.
    DeviceNs,
}

/// A class of requests with a limit that cannot be borrowed beyond, and what it did.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Limited {
    /// Name of the rule.
    pub rule: String,
    /// The job, user, client or file that the class is of; absent: the whole rule.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<u64>,
    /// Unit of the rate and of what was granted.
    pub unit: LimitUnit,
    /// The limit, units per second: over all servers if `over_all`, else of this one.
    pub rate: f64,
    /// It holds over all servers of this kind together.
    pub over_all: bool,
    /// The portion of the rate that this server may grant at present (0 to 1.25).
    pub fraction: f64,
    /// What this server granted, units; begins again at 0 when the class was idle for long.
    pub granted: u64,
    /// Requests that the limit withholds at present.
    pub waiting: u32,
}

impl Limited {
    /// Maximum classes in a report.
    pub const LISTED_MAX: usize = 1024;
}

/// The portions of limits over all servers that this server may grant.
#[derive(Clone, PartialEq, Debug)]
pub struct Portions {
    /// The portion of every class that is not listed (above 0, at most 1).
    pub others: f64,
    /// Rule, key, portion.
    pub listed: Vec<(String, Option<u64>, f64)>,
}

impl Default for Portions {
    /// All of every limit: there is no other server.
    fn default() -> Self {
        Portions { others: 1.0, listed: Vec::new() }
    }
}
