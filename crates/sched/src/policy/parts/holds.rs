//! Holding a run for its neighbours: our rule for the case of aioli-2006, part 2 ("n synchronous accesses sent in a
//! parallel way").
//!
//! A file's run that is shorter than its recent runs is held for `hold` after the file's newest request, at most four
//! times that after the run's first: the other processes of a synchronous parallel application are about to send their
//! requests. Two holds of a file that gathered nothing stop its holds for 32 batches.

use super::remembered::Remembered;
use crate::types::{Nanos, Op};

/// Maximum files remembered.
const FILES_MAX: usize = 16 << 10;
/// Holds without effect before holding stops, and batches until it is tried again.
const PATIENCE: i8 = 2;
const RETRY_BATCHES: i8 = 32;

/// A file by its stable key, and an operation.
pub(in crate::policy) type FileOp = (u64, Op);

#[derive(Clone, Copy, PartialEq, Debug)]
struct History {
    /// Recent requests per run: an increase applies at once, a decrease by a quarter per run.
    expected: u32,
    /// Requests of the run being held; 0: none.
    held: u32,
    /// Holds left before holding stops; if negative, batches until it is tried again.
    credit: i8,
}

const FRESH: History = History { expected: 0, held: 0, credit: PATIENCE };

impl History {
    fn sent(&mut self, requests: u32) {
        let less = self.expected.saturating_sub(requests);
        self.expected = if less == 0 { requests } else { self.expected - less.div_ceil(4) };
        match std::mem::take(&mut self.held) {
            0 if self.credit < 0 => self.credit += 1,
            0 if self.credit == 0 => self.credit = 1,
            0 => {}
            held if requests > held => self.credit = PATIENCE,
            _ if self.credit <= 1 => self.credit = -RETRY_BATCHES,
            _ => self.credit -= 1,
        }
    }
}

/// The holds of a policy.
pub(in crate::policy) struct Holds {
    hold: Nanos,
    files: Remembered<FileOp, History>,
}

impl Holds {
    /// Holds a run for `hold` after its newest request; zero disables holds.
    pub fn new(hold: Nanos) -> Holds {
        Holds { hold, files: Remembered::new(FILES_MAX) }
    }

    /// Whether holds are enabled.
    pub fn any(&self) -> bool {
        self.hold > Nanos::ZERO
    }

    /// Longest hold before one batch.
    pub fn longest(&self) -> Nanos {
        Nanos(self.hold.0.saturating_mul(4))
    }

    /// How long a run of `requests` requests is held; `None`: not at all. `first` is the arrival of its first request,
    /// `newest` that of the file's newest.
    pub fn until(&mut self, now: Nanos, file: FileOp, requests: u64, first: Nanos, newest: Nanos) -> Option<Nanos> {
        let until = (newest + self.hold).min(first + self.longest());
        if self.hold == Nanos::ZERO || until <= now {
            return None;
        }
        let history = self.files.get_mut(&file)?;
        if history.credit <= 0 || requests >= u64::from(history.expected) {
            return None;
        }
        if history.held == 0 {
            history.held = requests.max(1) as u32;
        }
        Some(until)
    }

    /// A run was sent.
    pub fn sent(&mut self, file: FileOp, requests: usize) {
        if self.hold > Nanos::ZERO {
            self.files.of(file, || FRESH).sent(u32::try_from(requests).unwrap_or(u32::MAX));
        }
    }

    /// The queued requests of a file were cancelled, which ends its hold.
    pub fn cancelled(&mut self, file: FileOp) {
        if let Some(history) = self.files.get_mut(&file) {
            history.held = 0;
        }
    }

    /// Takes over the history of another instance after a change of parameters.
    pub fn take_over(&mut self, other: Holds) {
        self.files = other.files;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: FileOp = (7, Op::Read);

    fn is_held(holds: &mut Holds, requests: u64) -> bool {
        holds.until(Nanos(5), FILE, requests, Nanos(5), Nanos(5)).is_some()
    }

    #[test]
    fn holding_stops_when_it_does_not_pay_and_is_tried_again() {
        let mut holds = Holds::new(Nanos(10));
        assert!(!is_held(&mut holds, 1), "no history of the file");
        holds.sent(FILE, 4);
        assert!(is_held(&mut holds, 3) && !is_held(&mut holds, 4));
        holds.sent(FILE, 4);
        for _ in 0..PATIENCE {
            assert!(is_held(&mut holds, 1), "still patient");
            holds.sent(FILE, 1);
        }
        assert!(!is_held(&mut holds, 0), "two holds without effect");
        (0..=RETRY_BATCHES).for_each(|_| holds.sent(FILE, 4));
        assert!(is_held(&mut holds, 3), "tried again");
    }

    /// Cancelling a hold does not count as a hold without effect.
    #[test]
    fn cancelling_a_held_run_clears_it() {
        let mut holds = Holds::new(Nanos(10));
        holds.sent(FILE, 4);
        for _ in 0..9 {
            assert!(is_held(&mut holds, 1));
            holds.cancelled(FILE);
            assert_eq!(holds.files.get(&FILE).map(|h| h.held), Some(0));
        }
        holds.sent(FILE, 4);
        assert!(is_held(&mut holds, 1));
    }

    /// Memory is bounded however many files are held at a time.
    #[test]
    fn memory_is_bounded() {
        let mut holds = Holds::new(Nanos(10));
        for file in 0..2 * FILES_MAX as u64 {
            holds.sent((file, Op::Read), 4);
            assert!(holds.until(Nanos(5), (file, Op::Read), 1, Nanos(5), Nanos(5)).is_some());
        }
        let known = (0..2 * FILES_MAX as u64).filter(|f| holds.files.get(&(*f, Op::Read)).is_some()).count();
        assert_eq!(known, FILES_MAX);
    }
}
