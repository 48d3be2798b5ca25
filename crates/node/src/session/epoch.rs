//! A client's epoch.

use std::sync::atomic::{AtomicU32, Ordering};

/// The epoch under which a client sends; shared by all its connections.
#[derive(Debug, Default)]
pub struct Epoch(AtomicU32);

impl Epoch {
    /// Begins with this epoch.
    pub fn new(epoch: u32) -> Epoch {
        Epoch(AtomicU32::new(epoch))
    }

    /// The present epoch.
    pub fn now(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Leaves the present epoch: a connection was given up with calls outstanding. Must come before any of them is
    /// repeated.
    pub fn give_up(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Leaves epoch `old`, unless another thread has done so already.
    pub fn leave(&self, old: u32) {
        let _ = self.0.compare_exchange(old, old.wrapping_add(1), Ordering::AcqRel, Ordering::Acquire);
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
    }
}
