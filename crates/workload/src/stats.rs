//! When a claim about a paired comparison holds.

use std::cmp::Ordering;

pub use impresario_base::statistics::{Interval, jain, mean, median, variance};
use serde::{Deserialize, Serialize};

/// What a comparison says about a claim; of several the worst is the greatest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The whole interval is on the claim's side.
    Holds,
    /// The interval contains the limit: more pairs are needed. Never counts as passed.
    Unresolved,
    /// The whole interval is on the other side.
    DoesNotHold,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Verdict::Holds => "holds",
            Verdict::Unresolved => "unresolved",
            Verdict::DoesNotHold => "does not hold",
        })
    }
}

impl Verdict {
    /// What it says of "at least as good as the other", in a table.
    pub fn place(self) -> &'static str {
        match self {
            Verdict::Holds => "ahead",
            Verdict::DoesNotHold => "behind",
            Verdict::Unresolved => "unresolved",
        }
    }

    /// Of what is known exactly.
    pub fn of(holds: bool) -> Verdict {
        if holds { Verdict::Holds } else { Verdict::DoesNotHold }
    }

    /// That all of these claims hold.
    pub fn of_all(verdicts: impl IntoIterator<Item = Verdict>) -> Verdict {
        verdicts.into_iter().max().unwrap_or(Verdict::Holds)
    }

    /// Whether a quantity with this interval lies between two limits, both included.
    pub fn between(interval: Interval, low: f64, high: f64) -> Verdict {
        if interval.low >= low && interval.high <= high {
            Verdict::Holds
        } else if interval.high < low || interval.low > high {
            Verdict::DoesNotHold
        } else {
            Verdict::Unresolved
        }
    }
}

/// When a growing series of pairs is judged, and with which confidence.
///
/// Who looks at a 95 % interval after every pair, and stops when it lies on one side of a limit, is wrong far more often than
/// in 5 % of the cases: each look is another chance to be. So a series is looked at after n, 2n, 4n … pairs and at its end only, and
/// the error of 5 % is divided by the number of these looks (Bonferroni's inequality). A wrong verdict is then as rare as with
/// a fixed number of pairs, whichever look is the last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Looks {
    first: u32,
    last: u32,
}

/// The error of all looks together, both sides.
const ERROR: f64 = 0.05;

impl Looks {
    /// The looks of a series of `pairs` at least and `pairs_max` at most.
    pub fn new(pairs: u32, pairs_max: u32) -> Looks {
        let first = pairs.max(1);
        Looks { first, last: pairs_max.max(first) }
    }

    /// Pairs at the first look after `done` pairs; `None`: the last one was.
    pub fn next(&self, done: u32) -> Option<u32> {
        let mut at = self.first;
        while at <= done && at < self.last {
            at = at.saturating_mul(2).min(self.last);
        }
        (at > done).then_some(at)
    }

    /// Whether a series of so many pairs is looked at.
    pub fn is_at(&self, done: u32) -> bool {
        done > 0 && self.next(done - 1) == Some(done)
    }

    /// How many looks there are at most.
    pub fn count(&self) -> u32 {
        std::iter::successors(self.next(0), |at| self.next(*at)).count() as u32
    }

    /// Confidence of the interval that each look judges by.
    pub fn confidence(&self) -> f64 {
        1.0 - ERROR / f64::from(self.count())
    }

    /// The interval that a verdict was judged by, for people.
    pub fn show(&self, interval: &Interval, end: impl Fn(f64) -> String) -> String {
        let percent = (self.confidence() * 1000.0).round() / 10.0;
        format!("[{}, {}] at {percent} % for {} looks", end(interval.low), end(interval.high), self.count())
    }

    /// That interval.
    pub fn interval(&self, values: &[f64]) -> Interval {
        Interval::with_confidence(values, self.confidence())
    }
}

/// What paired times gain over others, 1 − T_new / T_base in each pair.
pub fn gains(new: &[f64], base: &[f64]) -> Vec<f64> {
    new.iter().zip(base).map(|(new, base)| 1.0 - new / base).collect()
}

/// An interval in a table: `1.02 [0.98, 1.06] n=5`, with the unit behind the mean; of one pair the mean, of none a dash.
pub fn show(interval: &Interval, unit: &str, number: impl Fn(f64) -> String) -> String {
    let Interval { mean, low, high, n } = interval;
    let mean = number(*mean) + unit;
    match n {
        0 => "–".into(),
        1 => format!("{mean} (one pair)"),
        n => format!("{mean} [{}, {}] n={n}", number(*low), number(*high)),
    }
}

/// "The gain is at least `limit`".
pub fn at_least(gain: Interval, limit: f64) -> Verdict {
    Verdict::between(gain, limit, f64::INFINITY)
}

/// "No worse than `limit`": the loss, the gain with its sign turned, is at most `limit`.
pub fn no_worse_than(gain: Interval, limit: f64) -> Verdict {
    at_least(gain, -limit)
}

/// On which side of `limit` a quantity lies; `None`: its interval contains the limit, as that of two equal things does.
pub fn side(quantity: Interval, limit: f64) -> Option<Ordering> {
    if quantity.low > limit {
        Some(Ordering::Greater)
    } else if quantity.high < limit {
        Some(Ordering::Less)
    } else {
        None
    }
}

/// Whether a difference is at most `limit` either way.
pub fn within(difference: Interval, limit: f64) -> Verdict {
    Verdict::between(difference, -limit, limit)
}

#[cfg(test)]
mod tests {
    use impresario_base::Random;

    use super::*;

    #[test]
    fn several_claims_hold_together_as_the_worst_of_them() {
        use Verdict::{DoesNotHold, Holds, Unresolved};
        assert_eq!(Verdict::of_all([Holds, Unresolved, Holds]), Unresolved);
        assert_eq!(Verdict::of_all([DoesNotHold, Unresolved]), DoesNotHold);
        assert_eq!([true, false].map(Verdict::of), [Holds, DoesNotHold]);
    }

    #[test]
    fn looks_are_doubled_and_share_the_error() {
        let at = |pairs, most| {
            let looks = Looks::new(pairs, most);
            std::iter::successors(looks.next(0), |at| looks.next(*at)).collect::<Vec<_>>()
        };
        assert_eq!((at(3, 12), at(10, 80)), (vec![3, 6, 12], vec![10, 20, 40, 80]));
        assert_eq!((at(3, 9), at(5, 5), at(0, 0), at(4, 3)), (vec![3, 6, 9], vec![5], vec![1], vec![4]));
        assert_eq!(Looks::new(3, 12).next(7), Some(12), "stopped between two looks");
        assert_eq!((Looks::new(5, 5).confidence(), Looks::new(10, 80).confidence()), (0.95, 0.9875));
        assert!(at(1, u32::MAX).len() == 33);
    }

    /// The share of wrong verdicts, "holds" and "does not hold", of series whose mean is the very limit.
    fn wrong(pairs: u32, pairs_max: u32, random: &mut Random) -> [f64; 2] {
        const SERIES: u32 = 2000;
        let looks = Looks::new(pairs, pairs_max);
        let mut count = [0u32; 2];
        for _ in 0..SERIES {
            let mut gains = Vec::new();
            while let Some(next) = looks.next(gains.len() as u32) {
                // Of the normal distribution, after Box and Muller.
                gains.resize_with(next as usize, || {
                    (2.0 * random.exponential(1.0)).sqrt() * (std::f64::consts::TAU * random.unit()).cos()
                });
                match at_least(looks.interval(&gains), 0.0) {
                    Verdict::Holds => count[0] += 1,
                    Verdict::DoesNotHold => count[1] += 1,
                    Verdict::Unresolved => continue,
                }
                break;
            }
        }
        count.map(|n| f64::from(n) / f64::from(SERIES))
    }

    /// 2.5 % are promised for each side.
    #[test]
    fn a_verdict_is_wrong_no_more_often_than_it_says() {
        let mut random = Random::new(1);
        for (pairs, most) in [(3, 12), (10, 80), (5, 5)] {
            let wrong = wrong(pairs, most, &mut random);
            assert!(wrong.iter().all(|share| *share <= 0.03), "{pairs} to {most} pairs: {wrong:?}");
        }
    }

    #[test]
    fn an_interval_is_shown_as_far_as_there_is_one() {
        let show = |values: &[f64]| show(&Interval::of(values), " ×", |v| format!("{v:.1}"));
        assert_eq!(show(&[1.0, 2.0, 3.0]), "2.0 × [-0.5, 4.5] n=3");
        assert_eq!((show(&[2.0]).as_str(), show(&[]).as_str()), ("2.0 × (one pair)", "–"));
    }

    #[test]
    fn verdicts_need_the_whole_interval() {
        let i = |low, high| Interval { mean: (low + high) / 2.0, low, high, n: 5 };
        assert_eq!(at_least(i(0.41, 0.5), 0.4), Verdict::Holds);
        assert_eq!(at_least(i(0.39, 0.5), 0.4), Verdict::Unresolved);
        assert_eq!(at_least(i(0.2, 0.39), 0.4), Verdict::DoesNotHold);
        assert_eq!(no_worse_than(i(-0.02, 0.1), 0.03), Verdict::Holds);
        assert_eq!(no_worse_than(i(-0.04, 0.1), 0.03), Verdict::Unresolved);
        assert_eq!(no_worse_than(i(-0.2, -0.04), 0.03), Verdict::DoesNotHold);
        assert_eq!(at_least(Interval::of(&[0.9]), 0.4), Verdict::Unresolved);
        let sides = [i(0.1, 0.2), i(-0.2, -0.1), i(-0.1, 0.2), i(0.0, 0.0), Interval::of(&[0.9])].map(|i| side(i, 0.0));
        assert_eq!(sides, [Some(Ordering::Greater), Some(Ordering::Less), None, None, None]);
    }
}
