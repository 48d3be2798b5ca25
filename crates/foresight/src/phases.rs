//! Phases: programs that compute and do I/O in turn, at regular intervals.
//!
//! A phase begins after a gap much longer than those between requests. When the intervals between the last beginnings
//! agree, the next one is predicted; and so is its first byte, when those lie at equal distances.

use std::collections::VecDeque;

use crate::majority::majority;

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

/// The next phase, as far as it can be known.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NextPhase {
    /// When it begins.
    pub expected_at_ns: u64,
    /// From one beginning to the next.
    pub period_ns: u64,
    /// The first byte that it will ask for, when the last phases began at equal distances.
    pub offset: Option<u64>,
    /// The share of the last intervals that agree with the period, above 0.5 and at most 1.
    pub confidence: f64,
}

/// The phases of one file or program.
#[derive(Clone, Debug, Default)]
pub struct Phases {
    last_ns: Option<u64>,
    /// A moving average of gaps within phases.
    gap_ns: u64,
    /// When phases began, and at which byte.
    begun: VecDeque<(u64, u64)>,
}

impl Phases {
    /// A request at `at_ns` that begins at the byte `offset`; whether a phase begins with it.
    pub fn observe(&mut self, offset: u64, at_ns: u64) -> bool {
        let gap = self.last_ns.map(|last| at_ns.saturating_sub(last));
        self.last_ns = Some(self.last_ns.map_or(at_ns, |last| last.max(at_ns)));
        let begins = gap.is_none_or(|gap| gap > GAP_NS_MIN.max(self.gap_ns.saturating_mul(GAP_TIMES)));
        if begins {
            if self.begun.len() == REMEMBERED {
                self.begun.pop_front();
            }
            self.begun.push_back((at_ns, offset));
        } else if let Some(gap) = gap {
            self.gap_ns = (self.gap_ns * 7 + gap) / 8;
        }
        begins
    }

    /// The next phase; `None` while no period is known.
    pub fn next(&self) -> Option<NextPhase> {
        let begun = || self.begun.iter().zip(self.begun.iter().skip(1));
        let mut intervals: Vec<u64> = begun().map(|(a, b)| b.0.saturating_sub(a.0)).collect();
        if intervals.len() < INTERVALS_MIN {
            return None;
        }
        intervals.sort_unstable();
        let period_ns = intervals[intervals.len() / 2];
        let agree = intervals.iter().filter(|i| i.abs_diff(period_ns) <= period_ns / TOLERANCE).count();
        let confidence = agree as f64 / intervals.len() as f64;
        let (last_ns, last) = *self.begun.back()?;
        let distances: Vec<i64> = begun().map(|(a, b)| b.1.wrapping_sub(a.1) as i64).collect();
        let offset = majority(distances.into_iter()).and_then(|d| last.checked_add_signed(d));
        let expected_at_ns = last_ns.saturating_add(period_ns);
        (confidence > 0.5).then_some(NextPhase { expected_at_ns, period_ns, offset, confidence })
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
                begun += u32::from(phases.observe(round * 1000 + i, round * 1000 * MS + jitter + i * MS / 2));
            }
            assert_eq!(phases.next().is_some(), round >= 3);
        }
        let next = phases.next().unwrap();
        assert_eq!((begun, next.offset), (6, Some(6000)));
        assert!(next.period_ns.abs_diff(1000 * MS) < 5 * MS && next.confidence == 1.0);
        assert!(next.expected_at_ns.abs_diff(6000 * MS) < 10 * MS);
    }

    #[test]
    fn no_period_no_prediction() {
        let mut phases = Phases::default();
        let mut at = 0;
        for i in 1..200u64 {
            at += (i * i * 7919 % 1009) * 10 * MS;
            phases.observe(i * i % 77, at);
        }
        assert_eq!(phases.next(), None);
        // A steady stream is one phase.
        let mut steady = Phases::default();
        assert_eq!((0..1000).filter(|i| steady.observe(i * 10, i * MS)).count(), 1);
    }
}
