//! Phases: programs that compute and do I/O in turn, at regular intervals.
//!
//! A phase begins after a gap much longer than those between requests. When most intervals between the last beginnings
//! agree, theirs is the period.

use std::collections::VecDeque;

/// A gap this many times the usual one ends a phase.
const GAP_TIMES: u64 = 16;
/// A shorter gap never ends one, ns.
const GAP_NS_MIN: u64 = 5_000_000;
/// Beginnings of phases remembered.
const REMEMBERED: usize = 9;
/// Intervals that must be known.
const INTERVALS_MIN: usize = 3;
/// Intervals within a tenth of their median agree.
const TOLERANCE: u64 = 10;

/// The phases of one file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Phases {
    last_ns: Option<u64>,
    /// A moving average of gaps within phases.
    gap_ns: u64,
    /// When phases began.
    begun: VecDeque<u64>,
}

impl Phases {
    /// A request at `at_ns`; whether a phase begins with it.
    pub(crate) fn observe(&mut self, at_ns: u64) -> bool {
        let gap = self.last_ns.map(|last| at_ns.saturating_sub(last));
        self.last_ns = Some(self.last_ns.map_or(at_ns, |last| last.max(at_ns)));
        let begins = gap.is_none_or(|gap| gap > GAP_NS_MIN.max(self.gap_ns.saturating_mul(GAP_TIMES)));
        if begins {
            if self.begun.len() == REMEMBERED {
                self.begun.pop_front();
            }
            self.begun.push_back(at_ns);
        } else if let Some(gap) = gap {
            self.gap_ns = (self.gap_ns * 7 + gap) / 8;
        }
        begins
    }

    /// From one beginning to the next; `None` while that is not known.
    pub(crate) fn period_ns(&self) -> Option<u64> {
        let begun = self.begun.iter().zip(self.begun.iter().skip(1));
        let mut intervals: Vec<u64> = begun.map(|(a, b)| b.saturating_sub(*a)).collect();
        if intervals.len() < INTERVALS_MIN {
            return None;
        }
        intervals.sort_unstable();
        let period_ns = intervals[intervals.len() / 2];
        let agree = intervals.iter().filter(|i| i.abs_diff(period_ns) <= period_ns / TOLERANCE).count();
        (2 * agree > intervals.len()).then_some(period_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_program_that_reads_every_second() {
        let mut phases = Phases::default();
        let mut begun = 0;
        for round in 0..6u64 {
            for i in 0..50 {
                let jitter = round * 7 % 5 * MS;
                begun += u32::from(phases.observe(round * 1000 * MS + jitter + i * MS / 2));
            }
            assert_eq!(phases.period_ns().is_some(), round >= 3);
        }
        assert!(begun == 6 && phases.period_ns().unwrap().abs_diff(1000 * MS) < 5 * MS);
    }

    #[test]
    fn no_period_no_prediction() {
        let mut phases = Phases::default();
        let mut at = 0;
        for i in 1..200u64 {
            at += (i * i * 7919 % 1009) * 10 * MS;
            phases.observe(at);
        }
        assert_eq!(phases.period_ns(), None);
        // A steady stream is one phase.
        let mut steady = Phases::default();
        assert_eq!((0..1000).filter(|i| steady.observe(i * MS)).count(), 1);
    }
}
