//! Waiting for what another thread or process does: for an event, not for a time in which it should have happened.

use std::fmt::Display;
use std::time::{Duration, Instant};

/// How long an event is waited for. Only a test that fails takes so long, so it is ample: the machine may be busy with
/// other tests.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `look` gives something.
///
/// # Panics
/// With `what`, after [`PATIENCE`].
#[track_caller]
pub fn eventually<T>(what: impl Display, look: impl FnMut() -> Option<T>) -> T {
    within(PATIENCE, what, look)
}

/// Waits until something holds.
///
/// # Panics
/// With `what`, after [`PATIENCE`].
#[track_caller]
pub fn until(what: impl Display, mut holds: impl FnMut() -> bool) {
    within(PATIENCE, what, || holds().then_some(()));
}

/// [`eventually`] with a limit of its own, for what takes long by itself.
///
/// # Panics
/// With `what`, after `limit`.
#[track_caller]
pub fn within<T>(limit: Duration, what: impl Display, mut look: impl FnMut() -> Option<T>) -> T {
    const PAUSE_MAX: Duration = Duration::from_millis(20);
    let (end, mut pause) = (Instant::now() + limit, Duration::from_millis(1));
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "not within {limit:?}: {what}");
        std::thread::sleep(pause);
        pause = PAUSE_MAX.min(pause * 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_is_given_and_what_does_not_is_named() {
        let mut looks = 0;
        let third = eventually("a third look", || {
            looks += 1;
            (looks == 3).then_some(looks)
        });
        assert_eq!(third, 3);
        let late = std::panic::catch_unwind(|| within(Duration::ZERO, "the impossible", || None::<()>)).unwrap_err();
        assert_eq!(late.downcast_ref::<String>().unwrap(), "not within 0ns: the impossible");
    }
}
