//! When a claim about a paired comparison holds.

pub use impresario_base::statistics::{Interval, jain, mean, median, variance};
use serde::{Deserialize, Serialize};

/// What a comparison says about a claim.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
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

/// "The gain is at least `limit`".
pub fn at_least(gain: Interval, limit: f64) -> Verdict {
    Verdict::between(gain, limit, f64::INFINITY)
}

/// "No worse than `limit`": the loss, the gain with its sign turned, is at most `limit`.
pub fn no_worse_than(gain: Interval, limit: f64) -> Verdict {
    at_least(gain, -limit)
}

/// Whether a difference is at most `limit` either way.
pub fn within(difference: Interval, limit: f64) -> Verdict {
    Verdict::between(difference, -limit, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    }
}
