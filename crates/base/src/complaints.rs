//! What is said about misbehaving peers, objects that fail, or a device below them: once a minute for each, so that none can fill
//! the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::lock::Mutex;

/// So long nothing more is said about the same.
pub const QUIET: Duration = Duration::from_secs(60);
/// Peers, and what else there are complaints about, remembered; with more of them within a minute, further ones are not logged but counted.
const PEERS_MAX: usize = 1024;

/// Remembers whom the log has complained about lately.
#[derive(Default, Debug)]
pub struct Complaints {
    /// When the last line came, and how many complaints have had none since.
    last: Mutex<FxHashMap<String, (Instant, u64)>>,
    count: AtomicU64,
}

impl Complaints {
    /// Counts a complaint; calls `log` unless there was one about the same in the last minute.
    pub fn about(&self, whom: &str, log: impl FnOnce()) {
        self.counted(whom, |_| log());
    }

    /// The same; `log` is told for how many complaints about the same the line stands, this one included.
    pub fn counted(&self, whom: &str, log: impl FnOnce(u64)) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(untold) = self.due(whom, Instant::now()) {
            log(untold + 1);
        }
    }

    /// Complaints in all, logged or not.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether it is time for a line about this; it counts as written.
    pub fn is_due(&self, whom: &str, now: Instant) -> bool {
        self.due(whom, now).is_some()
    }

    /// The same; how many complaints about this had no line since the one before.
    fn due(&self, whom: &str, now: Instant) -> Option<u64> {
        let mut last = self.last.lock();
        if let Some((at, untold)) = last.get_mut(whom) {
            if now.duration_since(*at) < QUIET {
                *untold += 1;
                return None;
            }
            *at = now;
            return Some(std::mem::take(untold));
        }
        if last.len() >= PEERS_MAX {
            last.retain(|_, (at, _)| now.duration_since(*at) < QUIET);
        }
        let known = last.len() < PEERS_MAX;
        if known {
            last.insert(whom.into(), (now, 0));
        }
        known.then_some(0)
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
        assert_eq!(complaints.due("a", now + Duration::from_secs(61)), Some(1), "which had no line");
        let due = (0..5000).filter(|n| complaints.is_due(&n.to_string(), now)).count();
        assert_eq!(due, PEERS_MAX - 2);
        assert!(complaints.last.lock().len() <= PEERS_MAX);
        assert!(complaints.is_due("later", now + Duration::from_secs(122)));
    }
}
