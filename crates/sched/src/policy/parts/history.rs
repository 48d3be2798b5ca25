//! What `mlf` remembers of a file beyond its queued requests: the size of its runs, whether holds paid, its quantum.

use rustc_hash::FxHashMap;

use crate::types::Op;

/// Files remembered at most; when there are more, those that nobody held a run for are forgotten.
const FILES_MAX: usize = 16 << 10;

/// Holds that did not pay until holding stops, and batches until it is tried again.
const PATIENCE: i8 = 2;
const RETRY_BATCHES: i8 = 32;

/// One file and operation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(in crate::policy) struct History {
    /// Requests of its runs as of late: a larger one counts at once, smaller ones by a quarter each.
    expected: u32,
    /// Requests of the run that is being held; 0: none is.
    held: u32,
    /// Holds left before holding stops; below 0 so many batches until it is tried again.
    credit: i8,
    /// Its quantum relative to the configured one.
    pub quantum_factor: f64,
}

impl Default for History {
    fn default() -> Self {
        History { expected: 0, held: 0, credit: PATIENCE, quantum_factor: 1.0 }
    }
}

impl History {
    /// True when a run of so many requests is smaller than the file's usual ones, and holding it has paid.
    pub fn is_short(&self, requests: u64) -> bool {
        self.credit > 0 && requests < u64::from(self.expected)
    }

    /// The run is being held at this size.
    pub fn hold(&mut self, requests: u64) {
        if self.held == 0 {
            self.held = requests.max(1) as u32;
        }
    }

    /// A run was sent.
    pub fn sent(&mut self, requests: u64) {
        let n = requests.min(u64::from(u32::MAX)) as u32;
        self.expected = if n >= self.expected { n } else { self.expected - (self.expected - n).div_ceil(4) };
        match std::mem::take(&mut self.held) {
            0 if self.credit <= 0 => {
                self.credit += 1;
                if self.credit > 0 {
                    self.credit = 1;
                }
            }
            0 => {}
            held if n > held => self.credit = PATIENCE,
            _ => {
                self.credit -= 1;
                if self.credit == 0 {
                    self.credit = -RETRY_BATCHES;
                }
            }
        }
    }

    /// Adapts the next quantum to how much of the present one a batch used: of 175 % and more twice, of 125 % half
    /// as much again, below 75 % half (the public library's steps; facts from its code).
    pub fn adapt(&mut self, batch_bytes: u64, quantum_bytes: u64, limits: (f64, f64)) {
        let used = batch_bytes as f64 / (quantum_bytes as f64 * self.quantum_factor);
        let step = match used {
            u if u >= 1.75 => 2.0,
            u if u >= 1.25 => 1.5,
            u if u >= 0.75 => 1.0,
            _ => 0.5,
        };
        self.quantum_factor = (self.quantum_factor * step).clamp(limits.0, limits.1);
    }
}

/// All files, by stable key and operation.
#[derive(Default)]
pub(in crate::policy) struct Histories {
    files: FxHashMap<(u64, Op), History>,
}

impl Histories {
    /// Of a file; begun when it has none.
    pub fn of(&mut self, file: u64, op: Op) -> &mut History {
        if self.files.len() >= FILES_MAX && !self.files.contains_key(&(file, op)) {
            self.files.retain(|_, h| h.held > 0);
        }
        self.files.entry((file, op)).or_default()
    }

    /// Its quantum factor, without beginning a history.
    pub fn quantum_factor(&self, file: u64, op: Op) -> f64 {
        self.files.get(&(file, op)).map_or(1.0, |h| h.quantum_factor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holding_stops_when_it_does_not_pay_and_is_tried_again() {
        let mut h = History::default();
        h.sent(4);
        assert!(h.is_short(3) && !h.is_short(4));
        h.hold(3);
        h.sent(4);
        for _ in 0..PATIENCE {
            assert!(h.is_short(1), "still patient");
            h.hold(1);
            h.sent(1);
        }
        assert!(!h.is_short(0), "two holds in vain");
        for _ in 0..=RETRY_BATCHES {
            h.sent(4);
        }
        assert!(h.is_short(3), "tried again");
    }

    #[test]
    fn the_quantum_follows_use() {
        let mut h = History::default();
        let limits = (0.25, 8.0);
        for (bytes, factor) in [(65_536, 2.0), (65_536, 4.0), (65_536, 8.0), (65_536, 8.0), (4_096, 4.0), (40_960, 6.0)]
        {
            h.adapt(bytes, 8192, limits);
            assert_eq!(h.quantum_factor, factor);
        }
        (0..9).for_each(|_| h.adapt(1, 8192, limits));
        assert_eq!(h.quantum_factor, 0.25);
    }

    #[test]
    fn memory_is_bounded() {
        let mut all = Histories::default();
        all.of(0, Op::Read).hold(1);
        for file in 0..3 * FILES_MAX as u64 {
            all.of(file, Op::Read);
        }
        assert!(all.files.len() <= FILES_MAX && all.files.contains_key(&(0, Op::Read)));
    }
}
