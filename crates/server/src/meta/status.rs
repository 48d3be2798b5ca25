//! Status and statistics of the metadata server.

use std::time::Duration;

use impresario_base::Histogram;
use impresario_base::lock::Mutex;
use impresario_wire::message::MetaCall;
use serde_json::{Map, Value, json};

use super::service::Meta;

const KINDS: [&str; 32] = [
    "getattr",
    "setattr",
    "create",
    "open",
    "reopen",
    "close",
    "fsync",
    "fsyncdir",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "symlink",
    "readlink",
    "readdir",
    "statfs",
    "setlayout",
    "session_start",
    "session_end",
    "examine",
    "mknod",
    "getxattr",
    "listxattr",
    "setxattr",
    "link",
    "exchange",
    "append",
    "lock",
    "cutback",
    "relay",
    "restrict",
    "prove",
];

/// The kind of a call, as an index of [`Operations`].
pub(super) fn kind_of(call: &MetaCall) -> usize {
    match call {
        MetaCall::GetAttr { .. } => 0,
        MetaCall::SetAttr { .. } => 1,
        MetaCall::Create { .. } => 2,
        MetaCall::Open { .. } => 3,
        MetaCall::Reopen { .. } => 4,
        MetaCall::Close { .. } => 5,
        // Of the second there are none that it does.
        MetaCall::Fsync { .. } | MetaCall::SyncAll => 6,
        MetaCall::FsyncDir { .. } => 7,
        MetaCall::Mkdir { .. } => 8,
        MetaCall::Rmdir { .. } => 9,
        MetaCall::Unlink { .. } => 10,
        MetaCall::Rename { .. } => 11,
        MetaCall::Symlink { .. } => 12,
        MetaCall::Readlink { .. } => 13,
        MetaCall::Readdir { .. } => 14,
        MetaCall::Statfs => 15,
        MetaCall::SetLayout { .. } => 16,
        MetaCall::Examine(_) => 19,
        MetaCall::Mknod { .. } => 20,
        MetaCall::GetXattr { .. } => 21,
        MetaCall::ListXattr { .. } => 22,
        MetaCall::SetXattr { .. } => 23,
        MetaCall::Link { .. } => 24,
        MetaCall::Exchange { .. } => 25,
        MetaCall::Append { .. } => 26,
        MetaCall::Lock(_) => 27,
        MetaCall::CutBack { .. } => 28,
        MetaCall::Relay(_) => 29,
        MetaCall::Restrict(_) => 30,
        MetaCall::Prove { .. } => 31,
    }
}

/// Index of session starts in [`Operations`].
pub(super) const SESSION_START: usize = 17;
/// Index of session ends in [`Operations`].
pub(super) const SESSION_END: usize = 18;

/// Completed operations, by kind.
#[derive(Default)]
pub(super) struct Operations([Mutex<Operation>; KINDS.len()]);

#[derive(Default)]
struct Operation {
    faults: u64,
    latency_ns: Histogram<5>,
}

impl Operations {
    pub(super) fn note(&self, kind: usize, took: Duration, fault: bool) {
        let Some(operation) = self.0.get(kind) else { return };
        let mut operation = operation.lock();
        operation.faults += u64::from(fault);
        operation.latency_ns.record(took.as_nanos() as u64);
    }

    /// The kinds that occurred.
    fn as_json(&self) -> Value {
        let mut kinds = Map::new();
        for (name, operation) in KINDS.iter().zip(&self.0) {
            let operation = operation.lock();
            let latency_ns = operation.latency_ns.summary();
            if latency_ns.count == 0 {
                continue;
            }
            kinds.insert(
                (*name).into(),
                json!({
                    "count": latency_ns.count,
                    "faults": operation.faults,
                    "mean_us": latency_ns.mean / 1e3,
                    "p50_us": latency_ns.p50 as f64 / 1e3,
                    "p99_us": latency_ns.p99 as f64 / 1e3,
                    "max_us": latency_ns.max as f64 / 1e3,
                    "histogram_ns": operation.latency_ns.cumulative(11, 36),
                }),
            );
        }
        Value::Object(kinds)
    }
}

impl Meta {
    /// The state as JSON.
    pub(super) fn status(&self) -> Value {
        const ORPHANS_COUNTED_MAX: usize = 10_000;
        let opens = self.opens.counts();
        let (queued, overflowed, paused) = self.background.state();
        let ((locks, waiting, leases), is_restoring) = self.locks.counts();
        json!({
            "role": "meta",
            "dir": self.dir.dir.display().to_string(),
            "uptime_s": self.started.elapsed().as_secs_f64(),
            "sessions": self.sessions.len(),
            "open_files": opens.files,
            "opens_read": opens.readers,
            "opens_write": opens.writers,
            "files_with_size_at_data_servers": opens.marked,
            "orphans_waiting": self.count_orphans(ORPHANS_COUNTED_MAX),
            "background_jobs": queued,
            "background_overflowed": overflowed,
            "data_servers_answer": !paused,
            "data_servers_without_new_files": (self.options.skipped)().servers(),
            "data_servers_not_heard": self.options.answered.as_ref().map_or_else(Vec::new, |answered| answered.silent()),
            "locks": { "held": locks, "waiting": waiting, "clients": leases, "restoring": is_restoring },
            "operations": self.operations.as_json(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_counted_by_kind() {
        let operations = Operations::default();
        for _ in 0..99 {
            operations.note(0, Duration::from_micros(3), false);
        }
        operations.note(0, Duration::from_millis(2), true);
        operations.note(usize::MAX, Duration::ZERO, false);
        let json = operations.as_json();
        assert_eq!(json["getattr"]["count"], 100);
        assert_eq!(json["getattr"]["faults"], 1);
        assert_eq!(json["getattr"]["p50_us"], 3.0);
        // Quantiles are exact to a step of the histogram.
        let p99_us = json["getattr"]["p99_us"].as_f64().unwrap();
        assert!((3.0..3.1).contains(&p99_us), "{p99_us}");
        assert_eq!(json["getattr"]["max_us"], 2000.0);
        assert_eq!(json.as_object().unwrap().len(), 1);
    }
}
