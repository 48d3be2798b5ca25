//! What is said about misbehaving peers, or objects that fail: once a minute for each, so that none can fill the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use impresario_base::lock::Mutex;

/// So long nothing more is said about the same.
pub(crate) const QUIET: Duration = Duration::from_secs(60);
/// Peers remembered; with more of them within a minute, further ones are not logged but counted.
const PEERS_MAX: usize = 1024;

/// Remembers whom the log has complained about lately.
#[derive(Default)]
pub(crate) struct Complaints {
    last: Mutex<FxHashMap<String, Instant>>,
    count: AtomicU64,
}

impl Complaints {
    /// Counts a complaint; calls `log` unless there was one about the same in the last minute.
    pub(crate) fn about(&self, whom: &str, log: impl FnOnce()) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if self.is_due(whom, Instant::now()) {
            log();
        }
    }

    /// Complaints in all, logged or not.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether it is time for a line about this; it counts as written.
    pub(crate) fn is_due(&self, whom: &str, now: Instant) -> bool {
        let mut last = self.last.lock();
        if last.get(whom).is_some_and(|at| now.duration_since(*at) < QUIET) {
            return false;
        }
        if last.len() >= PEERS_MAX {
            last.retain(|_, at| now.duration_since(*at) < QUIET);
        }
        let known = last.len() < PEERS_MAX;
        if known {
            last.insert(whom.into(), now);
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_a_minute_per_peer_in_bounded_memory() {
        let complaints = Complaints::default();
        let now = Instant::now();
        assert!(complaints.is_due("a", now) && complaints.is_due("b", now));
        assert!(!complaints.is_due("a", now + Duration::from_secs(59)));
        assert!(complaints.is_due("a", now + Duration::from_secs(61)));
        let due = (0..5000).filter(|n| complaints.is_due(&n.to_string(), now)).count();
        assert_eq!(due, PEERS_MAX - 2);
        assert!(complaints.last.lock().len() <= PEERS_MAX);
        assert!(complaints.is_due("later", now + Duration::from_secs(122)));
    }
}
