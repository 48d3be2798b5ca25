//! Memory for calls and answers: bounded in total, taken when bytes come and given back when answers have left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::{Mutex, MutexGuard};
use impresario_node::credits::{Credit, Credits};

/// After a call that found none, memory is short for so long.
const SHORT_FOR: Duration = Duration::from_secs(1);

/// All of it. One call at a time may exceed it, so that of many that wait for memory one can always finish.
#[derive(Debug)]
pub struct Budget {
    credits: Mutex<Credits>,
    /// When a call found none last.
    refused: Mutex<Option<Instant>>,
}

impl Budget {
    /// What is held of it.
    pub fn lock(&self) -> MutexGuard<'_, Credits> {
        self.credits.lock()
    }

    /// Others wait for memory: nobody may hold any without progress.
    pub fn is_short(&self) -> bool {
        self.refused.lock().is_some_and(|refused| refused.elapsed() < SHORT_FOR)
    }
}

/// A budget with a limit.
pub fn budget(limit_bytes: u64) -> Arc<Budget> {
    Arc::new(Budget { credits: Mutex::new(Credits::new(limit_bytes, 0)), refused: Mutex::default() })
}

/// The part of a budget that one call holds; goes back when dropped.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<Budget>,
    /// With the headroom it may exceed the limit.
    credit: Credit,
}

impl Reservation {
    /// Nothing yet.
    pub fn nothing(budget: Arc<Budget>) -> Reservation {
        Reservation { budget, credit: Credit::default() }
    }

    /// Takes more; false where there is none.
    pub fn grow(&mut self, bytes: u64) -> bool {
        let mut credits = self.budget.lock();
        let credit = match credits.grow(bytes, &self.credit) {
            Ok(credit) => credit,
            Err(ticket) => {
                let Some(grant) = credits.next_grant() else {
                    credits.give_up(ticket);
                    *self.budget.refused.lock() = Some(Instant::now());
                    return false;
                };
                grant.credit
            }
        };
        self.credit.add(credit);
        true
    }

    /// How much it is, bytes.
    pub fn bytes(&self) -> u64 {
        self.credit.bytes()
    }

    /// Takes the whole out; this is empty then.
    pub fn take(&mut self) -> Reservation {
        std::mem::replace(self, Reservation::nothing(self.budget.clone()))
    }

    /// Gives back all beyond so many bytes.
    pub fn shrink_to(&mut self, bytes: u64) {
        self.budget.lock().give_back(self.credit.beyond(bytes));
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.lock().give_back(std::mem::take(&mut self.credit));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_may_exceed_the_limit_and_all_goes_back() {
        let budget = budget(100);
        let mut first = Reservation::nothing(budget.clone());
        assert!(first.grow(90));
        let mut second = Reservation::nothing(budget.clone());
        assert!(second.grow(20));
        // The second overdraws: nobody else does until it is done, it may go on.
        assert!(!first.grow(1) && !Reservation::nothing(budget.clone()).grow(1));
        assert!(second.grow(30));
        assert_eq!(budget.lock().usage_bytes(), (140, 140, 100));
        second.shrink_to(10);
        assert_eq!(budget.lock().usage_bytes().0, 100);
        drop(second);
        assert!(first.grow(10) && first.take().bytes() == 100);
        assert_eq!((first.bytes(), budget.lock().usage_bytes()), (0, (0, 140, 100)));
    }
}
