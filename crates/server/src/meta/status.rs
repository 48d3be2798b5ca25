//! What the metadata server tells about itself.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use impresario_wire::message::MetaCall;
use serde_json::{Map, Value, json};

use super::service::Meta;

const KINDS: [&str; 19] = [
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
];
/// Latencies are counted by powers of two of a microsecond; the last class is open.
const CLASSES: usize = 26;

/// What kind of operation a call is: its place in [`Operations`].
pub(super) fn kind_of(call: &MetaCall) -> usize {
    match call {
        MetaCall::GetAttr { .. } => 0,
        MetaCall::SetAttr { .. } => 1,
        MetaCall::Create { .. } => 2,
        MetaCall::Open { .. } => 3,
        MetaCall::Reopen { .. } => 4,
        MetaCall::Close { .. } => 5,
        MetaCall::Fsync { .. } => 6,
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
    }
}

/// The place of the start of a session in [`Operations`].
pub(super) const SESSION_START: usize = 17;
/// The place of the end of a session in [`Operations`].
pub(super) const SESSION_END: usize = 18;

/// Operations done, by kind.
#[derive(Default)]
pub(super) struct Operations([Operation; KINDS.len()]);

#[derive(Default)]
struct Operation {
    count: AtomicU64,
    faults: AtomicU64,
    total_ns: AtomicU64,
    max_ns: AtomicU64,
    classes: [AtomicU64; CLASSES],
}

impl Operations {
    pub(super) fn note(&self, kind: usize, took: Duration, fault: bool) {
        let Some(operation) = self.0.get(kind) else { return };
        let ns = took.as_nanos() as u64;
        operation.count.fetch_add(1, Relaxed);
        operation.faults.fetch_add(fault.into(), Relaxed);
        operation.total_ns.fetch_add(ns, Relaxed);
        operation.max_ns.fetch_max(ns, Relaxed);
        let class = (u64::BITS - (ns / 1000).leading_zeros()) as usize;
        if let Some(count) = operation.classes.get(class.min(CLASSES - 1)) {
            count.fetch_add(1, Relaxed);
        }
    }

    /// Kinds that occurred. Quantiles are upper ends of their class.
    fn as_json(&self) -> Value {
        let mut kinds = Map::new();
        for (name, operation) in KINDS.iter().zip(&self.0) {
            let count = operation.count.load(Relaxed);
            if count == 0 {
                continue;
            }
            kinds.insert(
                (*name).into(),
                json!({
                    "count": count,
                    "faults": operation.faults.load(Relaxed),
                    "mean_us": operation.total_ns.load(Relaxed) as f64 / count as f64 / 1000.0,
                    "p50_us": operation.quantile_us(count.div_ceil(2)),
                    "p99_us": operation.quantile_us(count - count / 100),
                    "max_us": operation.max_ns.load(Relaxed) as f64 / 1000.0,
                }),
            );
        }
        Value::Object(kinds)
    }
}

impl Operation {
    fn quantile_us(&self, rank: u64) -> u64 {
        let mut below = 0;
        let class = self.classes.iter().position(|count| {
            below += count.load(Relaxed);
            below >= rank
        });
        1 << class.unwrap_or(CLASSES - 1)
    }
}

impl Meta {
    /// The state as JSON.
    pub(super) fn status(&self) -> Value {
        const ORPHANS_COUNTED_MAX: usize = 10_000;
        let opens = self.opens.counts();
        let (queued, overflowed, paused) = self.care.state();
        json!({
            "role": "meta",
            "dir": self.home.dir,
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
        let told = operations.as_json();
        assert_eq!(told["getattr"]["count"], 100);
        assert_eq!(told["getattr"]["faults"], 1);
        assert_eq!(told["getattr"]["p50_us"], 4);
        assert_eq!(told["getattr"]["p99_us"], 4);
        assert_eq!(told["getattr"]["max_us"], 2000.0);
        assert_eq!(told.as_object().unwrap().len(), 1);
    }
}
