//! What is said about misbehaving peers, objects that fail, or a device below them: once a minute for each, so that none can fill
//! the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::lock::Mutex;

/// So long nothing more is said about the same.
pub const QUIET: Duration = Duration::from_secs(60);
/// Peers, objects and the like that have lines of their own of one kind of complaint. With more of them within a minute, the further
/// ones have one together.
const ONES_MAX: usize = 64;

/// Of one kind, when the last line came, and how many complaints have had none since. No name stands for those that have a line
/// together.
type Ones = FxHashMap<String, (Instant, u64)>;

/// Remembers whom the log has complained about lately.
#[derive(Default, Debug)]
pub struct Complaints {
    last: Mutex<FxHashMap<&'static str, Ones>>,
    count: AtomicU64,
}

impl Complaints {
    /// Counts a complaint; calls `log` unless there was one of this kind in the last minute. It is told for how many complaints the line
    /// stands, this one included.
    pub fn counted(&self, kind: &'static str, log: impl FnOnce(u64)) {
        self.about(kind, "", log);
    }

    /// The same of a kind of which each peer, object or the like has its own line a minute. However many there are, one kind hides
    /// no other, and there are at most 65 lines a minute of it.
    pub fn about(&self, kind: &'static str, whom: &str, log: impl FnOnce(u64)) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if let Some(untold) = self.due(kind, whom, Instant::now()) {
            log(untold + 1);
        }
    }

    /// Complaints in all, logged or not.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether it is time for a line of this kind; it counts as written.
    pub fn is_due(&self, kind: &'static str, now: Instant) -> bool {
        self.due(kind, "", now).is_some()
    }

    /// Whether it is time for a line, and how many complaints about the same had none since the one before.
    fn due(&self, kind: &'static str, whom: &str, now: Instant) -> Option<u64> {
        let mut last = self.last.lock();
        let ones = last.entry(kind).or_default();
        let mut whom = whom;
        if !ones.contains_key(whom) && ones.len() >= ONES_MAX {
            // That of all further ones stays, and what it counts.
            ones.retain(|one, (at, _)| one.is_empty() || now.duration_since(*at) < QUIET);
            if ones.len() >= ONES_MAX {
                whom = "";
            }
        }
        let Some((at, untold)) = ones.get_mut(whom) else {
            ones.insert(whom.into(), (now, 0));
            return Some(0);
        };
        if now.duration_since(*at) < QUIET {
            *untold += 1;
            return None;
        }
        *at = now;
        Some(std::mem::take(untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_a_minute_for_each_in_bounded_memory() {
        let complaints = Complaints::default();
        let now = Instant::now();
        let due = |whom: &str, after_s| complaints.due("peer", whom, now + Duration::from_secs(after_s));
        assert_eq!([due("a", 0), due("b", 0), due("a", 59)], [Some(0), Some(0), None]);
        assert_eq!(due("a", 61), Some(1), "which had no line");
        let many = |after_s| (0..5000).filter_map(|n| due(&n.to_string(), after_s)).collect::<Vec<u64>>();
        // 63 of them beside the one that is still quiet, and one line for all further ones, which are counted.
        assert_eq!(many(61), vec![0; ONES_MAX]);
        assert_eq!(due("further", 62), None);
        assert!(complaints.last.lock()["peer"].len() <= ONES_MAX + 1);
        assert!(complaints.is_due("accept", now), "one kind hides no other");
        assert_eq!(many(200).iter().sum::<u64>(), 5000 - ONES_MAX as u64 + 1, "which had no line");
    }
}
