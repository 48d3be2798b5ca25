//! Work on bytes at a bounded rate.

use std::time::{Duration, Instant};

/// The longest that work is put off by a rate, s.
const WAIT_MAX_S: f64 = 1e9;

/// A rate, and since when it holds.
pub(crate) struct Pace {
    /// Bytes in a second; 0: no limit.
    rate_bytes: u64,
    since: Instant,
    /// Bytes done then.
    before_bytes: u64,
}

impl Pace {
    /// A rate that holds from now on, when `done_bytes` are done.
    pub(crate) fn new(rate_bytes: u64, done_bytes: u64) -> Pace {
        Pace { rate_bytes, since: Instant::now(), before_bytes: done_bytes }
    }

    /// When work that has done so many bytes in all may go on.
    pub(crate) fn due(&self, done_bytes: u64) -> Instant {
        if self.rate_bytes == 0 {
            return self.since;
        }
        let due_s = done_bytes.saturating_sub(self.before_bytes) as f64 / self.rate_bytes as f64;
        self.since + Duration::from_secs_f64(due_s.min(WAIT_MAX_S))
    }

    /// Waits until then.
    pub(crate) fn wait(&self, done_bytes: u64) {
        std::thread::sleep(self.due(done_bytes).saturating_duration_since(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_goes_on_when_the_rate_allows_it() {
        let at = |rate, done| {
            let pace = Pace::new(rate, 1000);
            pace.due(done).duration_since(pace.since)
        };
        assert_eq!([at(0, u64::MAX), at(100, 1000), at(100, 10)], [Duration::ZERO; 3]);
        assert_eq!(at(100, 1250), Duration::from_millis(2500));
        assert_eq!(at(1, u64::MAX), Duration::from_secs(1_000_000_000));
    }
}
