//! How the time of a device is shared among the batches that it has at once.
//!
//! What passes while a lane has batches in flight is shared among them in proportion to what each is expected to cost. A device that
//! serves one batch after the other so charges each with about its own service time, and not with its wait behind others; a long batch
//! with short ones beside it (reads of a disk beside what a cache serves) pays for most of its time. Whatever the order, the shares
//! of all batches add up to the time for which the lane was busy.

use crate::types::Nanos;

/// Fraction bits of time per weight.
const FRACTION_BITS: u32 = 24;
/// What weighs one: 2^10 ns. A division of 64 bits then is exact enough, and takes a fraction of the time of one of 128.
const UNIT_BITS: u32 = 10;
/// Bounds of a batch's weight, about 1 µs and 69 s: sums stay far below their types' limits.
const WEIGHTS: (u64, u64) = (1, 1 << 26);
/// Longest time that is shared at once, about 9 minutes.
const PASSED_MAX: u64 = 1 << 39;

/// The time of a lane's device so far.
#[derive(Clone, Default, Debug)]
pub(crate) struct DeviceTime {
    /// It is shared up to here.
    at: Nanos,
    /// Sum of the weights of the batches in flight.
    weights: u64,
    /// What a weight of one has had since the start, in 2^-[`FRACTION_BITS`] ns.
    per_weight: u128,
}

/// A batch's part in it.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Sharer {
    weight: u64,
    /// [`DeviceTime::per_weight`] when it started.
    since: u128,
}

impl DeviceTime {
    fn share_until(&mut self, now: Nanos) {
        let passed = now.since(self.at);
        self.at = self.at.max(now);
        let share = (passed.0.min(PASSED_MAX) << FRACTION_BITS).checked_div(self.weights);
        self.per_weight += u128::from(share.unwrap_or(0));
    }

    /// A batch of this expected cost goes to the device; `None`: it has no share, what it takes is charged to others.
    pub(crate) fn start(&mut self, now: Nanos, cost: Option<Nanos>) -> Sharer {
        let Some(cost) = cost else { return Sharer::default() };
        self.share_until(now);
        let weight = (cost.0 >> UNIT_BITS).clamp(WEIGHTS.0, WEIGHTS.1);
        self.weights += weight;
        Sharer { weight, since: self.per_weight }
    }

    /// It has ended; returns its share. The device may have begun after the batch was sent: if it had nothing else, it was idle.
    pub(crate) fn end(&mut self, sharer: Sharer, started: Nanos, finished: Nanos) -> Nanos {
        if sharer.weight == 0 {
            return Nanos::ZERO;
        }
        if self.weights == sharer.weight {
            self.at = self.at.max(started.min(finished));
        }
        self.share_until(finished);
        self.weights -= sharer.weight;
        let share = u128::from(sharer.weight) * (self.per_weight - sharer.since) + (1 << (FRACTION_BITS - 1));
        Nanos((share >> FRACTION_BITS) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    /// Batches of (start, end, expected cost) in 0.1 ms; what each is charged, in 0.01 ms.
    fn charged<const N: usize>(batches: [(u64, u64, u64); N]) -> [u64; N] {
        let at = |tenths: u64| Nanos(tenths * MS / 10);
        let mut events: Vec<_> =
            batches.iter().enumerate().flat_map(|(n, b)| [(b.0, true, n), (b.1, false, n)]).collect();
        events.sort_unstable();
        let mut device = DeviceTime::default();
        let (mut sharers, mut shares) = ([Sharer::default(); N], [Nanos::ZERO; N]);
        for (time, starts, n) in events {
            match starts {
                true => sharers[n] = device.start(at(time), Some(at(batches[n].2))),
                false => shares[n] = device.end(sharers[n], at(batches[n].0), at(time)),
            }
        }
        shares.map(|share| (share.0 + MS / 200) / (MS / 100))
    }

    #[test]
    fn all_shares_are_the_time_for_which_the_device_was_busy() {
        assert_eq!(
            charged([(0, 40, 7), (50, 60, 900)]),
            [400, 100],
            "alone each has its own time, whatever was expected"
        );
        assert_eq!(charged([(0, 100, 100), (89, 90, 100)]), [995, 5], "a short one within a long one");
        assert_eq!(charged([(0, 40, 40), (0, 80, 40), (0, 120, 40)]), [133, 333, 733], "one after the other");
        // A small one that waits behind a large one is charged for little of it.
        assert_eq!(charged([(0, 99, 99), (0, 100, 1)]), [980, 20]);
        // A steady stream of small ones beside a large one.
        let mut device = DeviceTime::default();
        let large = device.start(Nanos::ZERO, Some(Nanos(10 * MS)));
        let mut sum = 0;
        for n in 0..100 {
            let small = device.start(Nanos(n * MS / 10), Some(Nanos(MS / 10)));
            sum += device.end(small, Nanos(n * MS / 10), Nanos((n + 1) * MS / 10)).0;
        }
        let of_large = device.end(large, Nanos::ZERO, Nanos(10 * MS)).0;
        assert!(of_large > 9 * MS && (of_large + sum).abs_diff(10 * MS) < 100, "{of_large} + {sum}");
    }

    #[test]
    fn what_the_device_does_not_do_is_charged_to_none() {
        let mut device = DeviceTime::default();
        let late = device.start(Nanos(MS), Some(Nanos(MS)));
        assert_eq!(device.end(late, Nanos(3 * MS), Nanos(4 * MS)), Nanos(MS), "sent early to an idle device");
        let sync = device.start(Nanos(5 * MS), None);
        assert_eq!(device.end(sync, Nanos(5 * MS), Nanos(9 * MS)), Nanos::ZERO);
        // Clocks that disagree, and numbers beyond reason.
        let odd = device.start(Nanos(2 * MS), Some(Nanos::MAX));
        assert_eq!(device.end(odd, Nanos::MAX, Nanos(MS)), Nanos::ZERO);
        let all: Vec<_> = (0..1000).map(|_| device.start(Nanos(10 * MS), Some(Nanos::MAX))).collect();
        let shares = all.into_iter().map(|one| device.end(one, Nanos(10 * MS), Nanos::MAX).0);
        let sum: u64 = shares.sum();
        assert!(sum <= PASSED_MAX && sum > PASSED_MAX / 2, "{sum}");
    }
}
