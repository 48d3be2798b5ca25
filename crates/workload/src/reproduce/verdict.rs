//! When ours agrees with a paper's figure: rules that look at the interval of our repetitions and at nothing else.

use serde::{Deserialize, Serialize};

use crate::stats::{Interval, mean, t_quantile, variance};

/// What a paper says of a quantity.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Says {
    /// A gain, 1 − T_new / T_base; a loss is negative.
    Gain(f64),
    /// A ratio of two times between these ends.
    Ratio(f64, f64),
    /// That something is better, without saying by how much; ours is positive when it is.
    Better,
    /// That something is worse, without saying by how much; ours is negative when it is.
    Worse,
    /// That two things do not differ: a relative difference of at most this counts as none.
    Same(f64),
    /// That something is not worse: a loss of at most this counts as none.
    NotWorse(f64),
    /// A time, s.
    Seconds(f64),
    /// A time, µs.
    Micros(f64),
    /// A size, bytes.
    Bytes(f64),
    /// Something that needs a part that does not exist yet.
    NeedsPrediction(f64),
}

/// What comes of comparing it with ours.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Same sign, and the whole interval within a third of the paper's figure; of what has no sign: within a third.
    Agrees,
    /// Same sign for certain, but not within a third for certain.
    SameSign,
    /// The other sign for certain.
    OppositeSign,
    /// Of what has no sign: more than a third away for certain; a difference where the paper saw none.
    Differs,
    /// The interval lies on both sides of the limit.
    Unresolved,
    /// Not to be compared before prediction exists.
    NotYet,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Verdict::Agrees => "agrees",
            Verdict::SameSign => "same sign",
            Verdict::OppositeSign => "opposite sign",
            Verdict::Differs => "differs",
            Verdict::Unresolved => "unresolved",
            Verdict::NotYet => "needs prediction: not yet",
        })
    }
}

/// How far from the paper's figure ours may be to agree, as a part of the figure.
pub const THIRD: f64 = 1.0 / 3.0;

/// Student's interval of the mean of independent values, with this confidence (0.95, 0.997).
pub fn interval(values: &[f64], confidence: f64) -> Interval {
    let (n, m) = (values.len(), mean(values));
    if n < 2 {
        return Interval { mean: m, low: f64::NEG_INFINITY, high: f64::INFINITY, n };
    }
    let half = t_quantile(0.5 + confidence / 2.0, (n - 1) as f64) * (variance(values) / n as f64).sqrt();
    Interval { mean: m, low: m - half, high: m + half, n }
}

/// The verdict on ours.
pub fn judge(says: Says, ours: &Interval) -> Verdict {
    match says {
        Says::Gain(paper) => signed(paper, 0.0, (paper - paper.abs() * THIRD, paper + paper.abs() * THIRD), ours),
        Says::Ratio(low, high) => signed(low, 1.0, (low * (1.0 - THIRD), high * (1.0 + THIRD)), ours),
        Says::Better => signed(1.0, 0.0, (0.0, f64::INFINITY), ours),
        Says::Worse => signed(-1.0, 0.0, (f64::NEG_INFINITY, 0.0), ours),
        Says::Same(within) => unsigned((-within, within), ours),
        Says::NotWorse(within) => unsigned((-within, f64::INFINITY), ours),
        Says::Seconds(v) | Says::Micros(v) | Says::Bytes(v) => unsigned((v * (1.0 - THIRD), v * (1.0 + THIRD)), ours),
        Says::NeedsPrediction(_) => Verdict::NotYet,
    }
}

/// Of what has a sign: on which side of `zero` ours lies, and whether within the band.
fn signed(paper: f64, zero: f64, band: (f64, f64), ours: &Interval) -> Verdict {
    if ours.low <= zero && ours.high >= zero {
        Verdict::Unresolved
    } else if (ours.low > zero) != (paper > zero) {
        Verdict::OppositeSign
    } else if inside(band, ours) {
        Verdict::Agrees
    } else {
        Verdict::SameSign
    }
}

fn unsigned(band: (f64, f64), ours: &Interval) -> Verdict {
    if inside(band, ours) {
        Verdict::Agrees
    } else if ours.high < band.0 || ours.low > band.1 {
        Verdict::Differs
    } else {
        Verdict::Unresolved
    }
}

fn inside(band: (f64, f64), ours: &Interval) -> bool {
    ours.low >= band.0 && ours.high <= band.1
}

impl Says {
    /// As the paper has it, for people.
    pub fn show(&self) -> String {
        match *self {
            Says::Better => "better".into(),
            Says::Worse => "worse".into(),
            Says::Same(_) => "no difference".into(),
            Says::NotWorse(_) => "no loss".into(),
            Says::Ratio(low, high) if low == high => format!("{low} ×"),
            Says::Ratio(low, high) => format!("{low} to {high} ×"),
            Says::NeedsPrediction(v) => percent(v),
            Says::Gain(v) => percent(v),
            _ => self.value(self.figure()),
        }
    }

    /// A value in the unit of the claim, for people.
    pub fn value(&self, v: f64) -> String {
        match self {
            Says::Gain(_)
            | Says::Better
            | Says::Worse
            | Says::Same(_)
            | Says::NotWorse(_)
            | Says::NeedsPrediction(_) => percent(v),
            Says::Ratio(..) => format!("{v:.1} ×"),
            Says::Seconds(_) if v.abs() < 10.0 => format!("{v:.1} s"),
            Says::Seconds(_) => format!("{v:.0} s"),
            Says::Micros(_) => format!("{v:.1} µs"),
            Says::Bytes(_) if v >= 1e6 => format!("{:.2} MB", v / 1e6),
            Says::Bytes(_) => format!("{:.1} KiB", v / 1024.0),
        }
    }

    /// The paper's figure, where it is one.
    pub fn figure(&self) -> f64 {
        match *self {
            Says::Gain(v) | Says::Seconds(v) | Says::Micros(v) | Says::Bytes(v) | Says::NeedsPrediction(v) => v,
            Says::Ratio(low, _) => low,
            Says::Better | Says::Worse | Says::Same(_) | Says::NotWorse(_) => f64::NAN,
        }
    }
}

/// A signed percentage.
pub fn percent(v: f64) -> String {
    let v = v * 100.0;
    if v.abs() < 0.05 { "0 %".into() } else { format!("{}{:.1} %", if v < 0.0 { "−" } else { "+" }, v.abs()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(low: f64, high: f64) -> Interval {
        Interval { mean: (low + high) / 2.0, low, high, n: 8 }
    }

    #[test]
    fn a_gain_agrees_only_with_its_whole_interval_within_a_third() {
        let says = Says::Gain(0.30);
        assert_eq!(judge(says, &of(0.21, 0.39)), Verdict::Agrees);
        assert_eq!(judge(says, &of(0.19, 0.39)), Verdict::SameSign, "one end outside");
        assert_eq!(judge(says, &of(0.01, 0.02)), Verdict::SameSign);
        assert_eq!(judge(says, &of(-0.01, 0.5)), Verdict::Unresolved);
        assert_eq!(judge(says, &of(0.0, 0.5)), Verdict::Unresolved, "zero is on neither side");
        assert_eq!(judge(says, &of(-0.2, -0.1)), Verdict::OppositeSign);
    }

    #[test]
    fn a_loss_is_a_gain_with_the_other_sign() {
        assert_eq!(judge(Says::Gain(-0.30), &of(-0.39, -0.21)), Verdict::Agrees);
        assert_eq!(judge(Says::Gain(-0.30), &of(0.1, 0.2)), Verdict::OppositeSign);
        assert_eq!(judge(Says::Worse, &of(-0.9, -0.1)), Verdict::Agrees);
        assert_eq!(judge(Says::Worse, &of(0.1, 0.2)), Verdict::OppositeSign);
        assert_eq!(judge(Says::Better, &of(-0.1, 0.2)), Verdict::Unresolved);
        assert_eq!(judge(Says::Better, &of(0.001, 7.0)), Verdict::Agrees);
    }

    #[test]
    fn ratios_are_better_than_one_or_not() {
        let says = Says::Ratio(11.0, 50.0);
        assert_eq!(judge(says, &of(7.4, 66.0)), Verdict::Agrees, "the ends may be a third off");
        assert_eq!(judge(says, &of(7.0, 8.0)), Verdict::SameSign);
        assert_eq!(judge(says, &of(60.0, 90.0)), Verdict::SameSign);
        assert_eq!(judge(says, &of(0.9, 2.0)), Verdict::Unresolved);
        assert_eq!(judge(says, &of(0.5, 0.9)), Verdict::OppositeSign);
    }

    #[test]
    fn what_has_no_sign_agrees_differs_or_is_unresolved() {
        assert_eq!(judge(Says::Micros(30.0), &of(20.1, 39.9)), Verdict::Agrees);
        assert_eq!(judge(Says::Micros(30.0), &of(41.0, 50.0)), Verdict::Differs);
        assert_eq!(judge(Says::Micros(30.0), &of(39.0, 50.0)), Verdict::Unresolved);
        assert_eq!(judge(Says::Same(0.05), &of(-0.05, 0.04)), Verdict::Agrees);
        assert_eq!(judge(Says::Same(0.05), &of(-0.2, -0.06)), Verdict::Differs);
        assert_eq!(judge(Says::Same(0.05), &of(0.0, 0.06)), Verdict::Unresolved);
        assert_eq!(judge(Says::NotWorse(0.05), &of(-0.04, 0.9)), Verdict::Agrees);
        assert_eq!(judge(Says::NotWorse(0.05), &of(-0.06, 0.9)), Verdict::Unresolved);
        assert_eq!(judge(Says::NotWorse(0.05), &of(-0.5, -0.06)), Verdict::Differs);
        assert_eq!(judge(Says::NeedsPrediction(0.251), &of(0.25, 0.26)), Verdict::NotYet);
    }

    #[test]
    fn one_repetition_resolves_nothing() {
        for says in [Says::Gain(0.3), Says::Ratio(2.0, 3.0), Says::Better, Says::Same(0.1), Says::Seconds(3.0)] {
            assert_eq!(judge(says, &interval(&[0.3], 0.95)), Verdict::Unresolved);
            assert_eq!(judge(says, &interval(&[], 0.95)), Verdict::Unresolved);
        }
    }

    #[test]
    fn wider_confidence_is_a_wider_interval() {
        let values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
        let (usual, papers) = (interval(&values, 0.95), interval(&values, 0.997));
        assert_eq!((usual.mean, usual.low, usual.high), {
            let known = Interval::of(&values);
            (known.mean, known.low, known.high)
        });
        // t(0.9985; 7) = 4.4424 (interpolated between the printed 0.999: 4.785 and 0.998: 4.207).
        assert!((4.3..4.6).contains(&((papers.high - papers.mean) / (6.0f64 / 8.0).sqrt())), "{papers:?}");
    }

    #[test]
    fn values_are_shown_in_the_unit_of_the_claim() {
        assert_eq!(Says::Gain(0.274).show(), "+27.4 %");
        assert_eq!(Says::Gain(-0.05).value(-0.05), "−5.0 %");
        assert_eq!(Says::Bytes(59392.0).show(), "58.0 KiB");
        assert_eq!(Says::Bytes(1.341e9).show(), "1341.00 MB");
        assert_eq!(Says::Ratio(11.0, 50.0).show(), "11 to 50 ×");
        assert_eq!(Says::Seconds(595.0).show(), "595 s");
    }
}
