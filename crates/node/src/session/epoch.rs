//! A client's epoch.

use std::sync::atomic::{AtomicU32, Ordering};

/// How far a server's base epoch may rise when clients are forgotten: far more than a client gives up in its lifetime.
/// Without this bound, a client that claims a huge epoch would have all other clients' requests refused.
const REACH: u32 = 1 << 20;
/// Refusals before a client starts to skip epochs: fewer can result from other threads beginning epochs.
const STEPS: u32 = 3;
/// Longest skip over epochs.
const LEAP_MAX: u32 = 1 << 16;

/// The base epoch after clients of these epochs were forgotten: their requests in flight must be refused. A client
/// further ahead than any honest one risks only its own delayed requests.
pub(super) fn base_after(base: u32, forgotten: impl Iterator<Item = u32>) -> u32 {
    let most = base.saturating_add(REACH);
    forgotten.fold(base, |base, epoch| base.max(epoch.min(most)))
}

/// The epoch under which a client sends, shared by its connections.
#[derive(Debug, Default)]
pub struct Epoch(AtomicU32);

impl Epoch {
    /// Starts in this epoch.
    pub fn new(epoch: u32) -> Epoch {
        Epoch(AtomicU32::new(epoch))
    }

    /// The present epoch.
    pub fn now(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Leaves the current epoch because a connection was given up with calls outstanding. Must precede the repetition
    /// of any of them.
    pub fn give_up(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Leaves epoch `old`, unless another thread has already done so.
    pub fn leave(&self, old: u32) {
        self.leap(old, 1);
    }

    /// The same after a server refused a call `refusals` times: in growing steps, so that a client that a server has
    /// forgotten soon reaches the base epoch.
    pub fn leave_after(&self, old: u32, refusals: u32) {
        self.leap(old, 1u32.checked_shl(refusals.saturating_sub(STEPS)).unwrap_or(LEAP_MAX).clamp(1, LEAP_MAX));
    }

    fn leap(&self, old: u32, epochs: u32) {
        let _ = self.0.compare_exchange(old, old.wrapping_add(epochs), Ordering::AcqRel, Ordering::Acquire);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_is_left_once() {
        let epoch = Epoch::new(3);
        epoch.leave(2);
        assert_eq!(epoch.now(), 3, "left already");
        epoch.leave(3);
        epoch.leave(3);
        assert_eq!(epoch.now(), 4);
        epoch.give_up();
        assert_eq!(epoch.now(), 5);
        epoch.leave_after(5, 0);
        epoch.leave_after(6, 6);
        epoch.leave_after(6, 6);
        assert_eq!(epoch.now(), 14);
        epoch.leave_after(14, 40);
        assert_eq!(epoch.now(), 14 + LEAP_MAX);
    }
}
