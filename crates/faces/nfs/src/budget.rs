//! Memory for calls and answers: bounded in total, taken when bytes come and given back when answers have left.

use std::sync::Arc;

use impresario_base::lock::Mutex;

/// All of it.
#[derive(Debug)]
pub struct Budget {
    limit_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    used_bytes: u64,
    peak_bytes: u64,
    /// Holders that may exceed the limit: at most one, by its number.
    overdrawn: Option<u32>,
}

/// A part of a budget that somebody holds; goes back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    bytes: u64,
    overdraws: bool,
}

impl Budget {
    /// With a limit. One holder at a time may exceed it by what a call and its answer take, so that of many that wait for
    /// memory one can always finish.
    pub fn new(limit_bytes: u64) -> Arc<Budget> {
        Arc::new(Budget { limit_bytes, state: Mutex::default() })
    }

    /// Nothing yet.
    pub fn nothing(self: &Arc<Budget>) -> Reservation {
        Reservation { budget: self.clone(), bytes: 0, overdraws: false }
    }

    /// Used now, used at most since the start, and the limit; bytes.
    pub fn usage_bytes(&self) -> (u64, u64, u64) {
        let state = self.state.lock();
        (state.used_bytes, state.peak_bytes, self.limit_bytes)
    }
}

impl Reservation {
    /// Takes more for the holder with this number; false where there is none.
    pub fn grow(&mut self, holder: u32, bytes: u64) -> bool {
        let mut state = self.budget.state.lock();
        let fits = state.used_bytes + bytes <= self.budget.limit_bytes;
        if !fits && state.overdrawn.is_some_and(|who| who != holder) {
            return false;
        }
        if !fits {
            // One call of the holder overdraws.
            if state.overdrawn.is_some() && !self.overdraws {
                return false;
            }
            state.overdrawn = Some(holder);
            self.overdraws = true;
        }
        state.used_bytes += bytes;
        state.peak_bytes = state.peak_bytes.max(state.used_bytes);
        self.bytes += bytes;
        true
    }

    /// How much it is, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Takes the whole out; this is empty then.
    pub fn take(&mut self) -> Reservation {
        std::mem::replace(self, self.budget.nothing())
    }

    /// Gives back all beyond so many bytes.
    pub fn shrink_to(&mut self, bytes: u64) {
        let spare = self.bytes.saturating_sub(bytes);
        self.budget.state.lock().used_bytes -= spare;
        self.bytes -= spare;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.bytes == 0 && !self.overdraws {
            return;
        }
        let mut state = self.budget.state.lock();
        state.used_bytes -= self.bytes;
        if self.overdraws {
            state.overdrawn = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_may_exceed_the_limit_and_all_goes_back() {
        let budget = Budget::new(100);
        let mut first = budget.nothing();
        assert!(first.grow(1, 90));
        let mut second = budget.nothing();
        assert!(second.grow(2, 20));
        // The second overdraws: nobody else does until it is done, it may go on.
        assert!(!first.grow(1, 1) && !budget.nothing().grow(2, 1));
        assert!(second.grow(2, 30));
        assert_eq!(budget.usage_bytes(), (140, 140, 100));
        second.shrink_to(10);
        assert_eq!(budget.usage_bytes().0, 100);
        drop(second);
        assert!(first.grow(1, 10) && first.take().bytes() == 100);
        assert_eq!((first.bytes(), budget.usage_bytes()), (0, (0, 140, 100)));
    }
}
