//! The stop flag: set by Ctrl-C or by the first thread that fails, checked between requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Shared by all threads of one run.
#[derive(Clone, Default, Debug)]
pub struct Stop(Arc<AtomicBool>);

/// The run was stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("stopped before the end")]
pub struct Stopped;

impl Stop {
    /// A flag that is not set.
    pub fn new() -> Stop {
        Stop::default()
    }

    /// Sets the flag.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// The run was stopped.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error when the flag is set.
    pub fn check(&self) -> Result<(), Stopped> {
        if self.is_set() { Err(Stopped) } else { Ok(()) }
    }

    /// Sleeps until an instant, or ends within 20 ms when the flag is set.
    pub fn sleep_until(&self, end: Instant) -> Result<(), Stopped> {
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_ends_a_sleep() {
        let stop = Stop::new();
        assert_eq!(stop.sleep_until(Instant::now() + Duration::from_millis(5)), Ok(()));
        let clone = stop.clone();
        let start = Instant::now();
        let sleeper = std::thread::spawn(move || clone.sleep_until(start + Duration::from_secs(60)));
        stop.set();
        assert_eq!(sleeper.join().unwrap(), Err(Stopped));
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}
