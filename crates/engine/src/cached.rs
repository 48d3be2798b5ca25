//! Decides whether to look in the page cache before a read is scheduled: if reads are rarely cached, looking wastes a
//! system call.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Misses in a row after which only each [`SELDOM`]-th read is tried.
const MISSES_MAX: u32 = 32;
const SELDOM: u32 = 16;

/// The results of recent tries.
#[derive(Default, Debug)]
pub struct CachedReads {
    misses: AtomicU32,
    /// Reads not tried since the last try.
    left_out: AtomicU32,
}

impl CachedReads {
    /// A read arrived that might be cached. True if it should be tried.
    pub fn are_worth_a_try(&self) -> bool {
        if self.misses.load(Relaxed) < MISSES_MAX {
            return true;
        }
        self.left_out.fetch_add(1, Relaxed) % SELDOM == SELDOM - 1
    }

    /// Records a try.
    pub fn came(&self, hit: bool) {
        match hit {
            true => self.misses.store(0, Relaxed),
            // Concurrent counts may exceed the bound, which is harmless.
            false if self.misses.load(Relaxed) < MISSES_MAX => drop(self.misses.fetch_add(1, Relaxed)),
            false => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_make_tries_rare_and_a_hit_makes_them_usual() {
        let cached = CachedReads::default();
        for _ in 0..MISSES_MAX {
            assert!(cached.are_worth_a_try());
            cached.came(false);
        }
        assert_eq!((0..160).filter(|_| cached.are_worth_a_try()).count(), 10);
        cached.came(true);
        assert!((0..10).all(|_| cached.are_worth_a_try()));
    }
}
