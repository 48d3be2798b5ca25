//! Decides whether our result agrees with a paper's figure, from our runs and the paper's figures alone.

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use impresario_workload::stats::{Interval, Verdict, side};

/// A paper's statement about a quantity.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Says {
    /// A gain, 1 − T_new / T_base; a loss is negative.
    Gain(f64),
    /// A ratio of two times between these ends.
    Ratio(f64, f64),
    /// Something is better, by an unstated amount; ours is then positive.
    Better,
    /// Something is worse, by an unstated amount; ours is then negative.
    Worse,
    /// Two things do not differ: a relative difference up to this counts as none.
    Same(f64),
    /// Something is not worse: a loss up to this counts as none.
    NotWorse(f64),
    /// Something holds in at least this share of the cases.
    Share(f64),
    /// A time, s.
    Seconds(f64),
    /// A time, µs.
    Micros(f64),
    /// A size, bytes.
    Bytes(f64),
}

/// The result of the comparison.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Agreement {
    /// Same sign, and the whole interval within a third of the paper's figure; without a sign: within a third.
    Agrees,
    /// The gain agrees, but the times behind it differ from the paper's by more than a factor of [`TIMES_OFF_MAX`].
    TimesDiffer,
    /// The same sign for certain, but not certainly within a third.
    SameSign,
    /// The sign agrees, but ours orders the systems differently from the paper.
    OrderInverted,
    /// The opposite sign for certain.
    OppositeSign,
    /// Without a sign: certainly more than a third away; or a difference where the paper saw none.
    Differs,
    /// The interval contains the limit.
    Unresolved,
    /// Our runs are evidence neither for nor against the claim.
    NotTested,
}

impl Agreement {
    /// All verdicts, in the order of reports.
    pub const ALL: [Agreement; 8] = [
        Agreement::Agrees,
        Agreement::TimesDiffer,
        Agreement::SameSign,
        Agreement::OrderInverted,
        Agreement::OppositeSign,
        Agreement::Differs,
        Agreement::Unresolved,
        Agreement::NotTested,
    ];
}

impl std::fmt::Display for Agreement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Agreement::Agrees => "agrees",
            Agreement::TimesDiffer => "gain agrees, times differ",
            Agreement::SameSign => "same sign",
            Agreement::OrderInverted => "order inverted",
            Agreement::OppositeSign => "opposite sign",
            Agreement::Differs => "differs",
            Agreement::Unresolved => "unresolved",
            Agreement::NotTested => "not tested",
        })
    }
}

/// The basis of a verdict.
#[derive(Clone, Default, Debug)]
pub struct Evidence<'a> {
    /// Our interval; `None` if it was not run.
    pub ours: Option<Interval>,
    /// Our mean times of base and new, s.
    pub times: Option<[f64; 2]>,
    /// The paper's times, if it gives them.
    pub paper_times: Option<[f64; 2]>,
    /// Base and new were bit-identical in every run: no decision of either can have differed.
    pub identical: bool,
    /// The level found is the first or last of those tried.
    pub at_edge: bool,
    /// How our order of the systems differs from the paper's.
    pub inverted: Option<String>,
    /// Why the claim cannot be tested.
    pub untested: Option<&'a str>,
}

/// If times differ by more than this factor, the verdict on their gain says so.
pub const TIMES_OFF_MAX: f64 = 3.0;

/// The verdict, and its reason if the interval alone does not give it.
pub fn judge(says: Says, evidence: &Evidence<'_>) -> (Agreement, String) {
    if let Some(why) = evidence.untested {
        return (Agreement::NotTested, why.into());
    }
    let Some(ours) = &evidence.ours else { return (Agreement::Unresolved, String::new()) };
    if evidence.identical && matches!(says, Says::Same(_) | Says::NotWorse(_)) {
        return (
            Agreement::NotTested,
            "both systems made the same decisions in every run, so they could not differ".into(),
        );
    }
    let verdict = by_interval(says, ours);
    if evidence.at_edge && verdict == Agreement::Agrees {
        return (Agreement::NotTested, "ours lies at the end of the range that was tried".into());
    }
    let signed = matches!(verdict, Agreement::Agrees | Agreement::SameSign);
    if let Some(order) = evidence.inverted.as_ref().filter(|_| signed) {
        return (Agreement::OrderInverted, order.clone());
    }
    let off = evidence.times.zip(evidence.paper_times).map(|(ours, paper)| {
        let off = |i: usize| (ours[i] / paper[i]).max(paper[i] / ours[i]);
        off(0).max(off(1))
    });
    match off.filter(|off| *off > TIMES_OFF_MAX) {
        None => (verdict, String::new()),
        Some(off) => {
            let verdict = if verdict == Agreement::Agrees { Agreement::TimesDiffer } else { verdict };
            (verdict, format!("a time behind it is {off:.0} × off"))
        }
    }
}

/// How far from the paper's figure ours may be to agree, relative to the figure.
pub const THIRD: f64 = 1.0 / 3.0;

fn by_interval(says: Says, ours: &Interval) -> Agreement {
    match says {
        Says::Gain(paper) => signed(paper, 0.0, (paper - paper.abs() * THIRD, paper + paper.abs() * THIRD), ours),
        Says::Ratio(low, high) => signed(low, 1.0, (low * (1.0 - THIRD), high * (1.0 + THIRD)), ours),
        Says::Better => signed(1.0, 0.0, (0.0, f64::INFINITY), ours),
        Says::Worse => signed(-1.0, 0.0, (f64::NEG_INFINITY, 0.0), ours),
        Says::Same(within) => unsigned((-within, within), ours),
        Says::NotWorse(within) => unsigned((-within, f64::INFINITY), ours),
        Says::Share(least) => unsigned((least, f64::INFINITY), ours),
        Says::Seconds(v) | Says::Micros(v) | Says::Bytes(v) => unsigned((v * (1.0 - THIRD), v * (1.0 + THIRD)), ours),
    }
}

/// For a signed quantity: on which side of `zero` ours is, and whether within the band.
fn signed(paper: f64, zero: f64, band: (f64, f64), ours: &Interval) -> Agreement {
    let Some(side) = side(*ours, zero) else { return Agreement::Unresolved };
    if (side == Ordering::Greater) != (paper > zero) {
        Agreement::OppositeSign
    } else if Verdict::between(*ours, band.0, band.1) == Verdict::Holds {
        Agreement::Agrees
    } else {
        Agreement::SameSign
    }
}

fn unsigned(band: (f64, f64), ours: &Interval) -> Agreement {
    match Verdict::between(*ours, band.0, band.1) {
        Verdict::Holds => Agreement::Agrees,
        Verdict::DoesNotHold => Agreement::Differs,
        Verdict::Unresolved => Agreement::Unresolved,
    }
}

impl Says {
    /// The paper's statement, for people.
    pub fn show(&self) -> String {
        match *self {
            Says::Better => "better".into(),
            Says::Worse => "worse".into(),
            Says::Same(_) => "no difference".into(),
            Says::NotWorse(_) => "no loss".into(),
            Says::Ratio(low, high) if low == high => format!("{low} ×"),
            Says::Ratio(low, high) => format!("{low} to {high} ×"),
            Says::Share(v) => format!("at least {:.0} % of the cases", v * 100.0),
            Says::Gain(v) => percent(v),
            _ => self.value(self.figure()),
        }
    }

    /// A value in the unit of the claim, for people.
    pub fn value(&self, v: f64) -> String {
        match self {
            Says::Gain(_) | Says::Better | Says::Worse | Says::Same(_) | Says::NotWorse(_) => percent(v),
            Says::Share(_) => format!("{:.0} %", v * 100.0),
            Says::Ratio(..) => format!("{v:.1} ×"),
            Says::Seconds(_) if v.abs() < 10.0 => format!("{v:.1} s"),
            Says::Seconds(_) => format!("{v:.0} s"),
            Says::Micros(_) => format!("{v:.1} µs"),
            Says::Bytes(_) if v >= 1e6 => format!("{:.2} MB", v / 1e6),
            Says::Bytes(_) => format!("{:.1} KiB", v / 1024.0),
        }
    }

    /// The paper's figure, if it is one.
    pub fn figure(&self) -> f64 {
        match *self {
            Says::Gain(v) | Says::Seconds(v) | Says::Micros(v) | Says::Bytes(v) | Says::Share(v) => v,
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

    fn judge(says: Says, ours: &Interval) -> Agreement {
        super::judge(says, &Evidence { ours: Some(*ours), ..Evidence::default() }).0
    }

    fn evidence() -> Evidence<'static> {
        Evidence { ours: Some(of(0.28, 0.32)), ..Evidence::default() }
    }

    #[test]
    fn a_claim_without_evidence_is_not_tested() {
        let input = Evidence { untested: Some("the size is an input"), ..evidence() };
        assert_eq!(super::judge(Says::Gain(0.3), &input), (Agreement::NotTested, "the size is an input".into()));
        let same = Evidence { ours: Some(of(0.0, 0.0)), identical: true, ..evidence() };
        assert_eq!(super::judge(Says::Same(0.05), &same).0, Agreement::NotTested);
        assert_eq!(
            super::judge(Says::Better, &same).0,
            Agreement::Unresolved,
            "no gain where the paper saw one is evidence"
        );
        let edge = Evidence { ours: Some(of(8000.0, 8000.0)), at_edge: true, ..evidence() };
        assert_eq!(super::judge(Says::Micros(8000.0), &edge).0, Agreement::NotTested, "16 ms might be better still");
        assert_eq!(
            super::judge(Says::Micros(1000.0), &edge).0,
            Agreement::Differs,
            "elsewhere than the paper is evidence"
        );
    }

    #[test]
    fn a_gain_of_other_times_says_so() {
        let times = |ours, paper| Evidence { times: Some(ours), paper_times: Some(paper), ..evidence() };
        let judge = |e: &Evidence<'_>| super::judge(Says::Gain(0.3), e);
        assert_eq!(judge(&times([100.0, 70.0], [250.0, 180.0])).0, Agreement::Agrees);
        let (verdict, why) = judge(&times([300.0, 200.0], [9.0, 6.0]));
        assert_eq!((verdict, why.as_str()), (Agreement::TimesDiffer, "a time behind it is 33 × off"));
        assert_eq!(judge(&times([100.0, 10.0], [100.0, 70.0])).0, Agreement::TimesDiffer, "either of the two");
        let other = super::judge(Says::Gain(0.9), &times([300.0, 200.0], [9.0, 6.0]));
        assert_eq!((other.0, other.1.is_empty()), (Agreement::SameSign, false), "the reason stands beside any verdict");
    }

    #[test]
    fn an_inverted_order_does_not_agree() {
        let inverted = || Evidence { inverted: Some("MPI-IO is slower".into()), ..evidence() };
        assert_eq!(super::judge(Says::Gain(0.3), &inverted()), (Agreement::OrderInverted, "MPI-IO is slower".into()));
        assert_eq!(super::judge(Says::Gain(0.9), &inverted()).0, Agreement::OrderInverted);
        assert_eq!(super::judge(Says::Gain(-0.3), &inverted()).0, Agreement::OppositeSign);
    }

    #[test]
    fn a_gain_agrees_only_with_its_whole_interval_within_a_third() {
        let says = Says::Gain(0.30);
        assert_eq!(judge(says, &of(0.21, 0.39)), Agreement::Agrees);
        assert_eq!(judge(says, &of(0.19, 0.39)), Agreement::SameSign, "one end outside");
        assert_eq!(judge(says, &of(0.01, 0.02)), Agreement::SameSign);
        assert_eq!(judge(says, &of(-0.01, 0.5)), Agreement::Unresolved);
        assert_eq!(judge(says, &of(0.0, 0.5)), Agreement::Unresolved, "zero is on neither side");
        assert_eq!(judge(says, &of(-0.2, -0.1)), Agreement::OppositeSign);
    }

    #[test]
    fn a_loss_is_a_gain_with_the_other_sign() {
        assert_eq!(judge(Says::Gain(-0.30), &of(-0.39, -0.21)), Agreement::Agrees);
        assert_eq!(judge(Says::Gain(-0.30), &of(0.1, 0.2)), Agreement::OppositeSign);
        assert_eq!(judge(Says::Worse, &of(-0.9, -0.1)), Agreement::Agrees);
        assert_eq!(judge(Says::Worse, &of(0.1, 0.2)), Agreement::OppositeSign);
        assert_eq!(judge(Says::Better, &of(-0.1, 0.2)), Agreement::Unresolved);
        assert_eq!(judge(Says::Better, &of(0.001, 7.0)), Agreement::Agrees);
    }

    #[test]
    fn ratios_are_better_than_one_or_not() {
        let says = Says::Ratio(11.0, 50.0);
        assert_eq!(judge(says, &of(7.4, 66.0)), Agreement::Agrees, "the ends may be a third off");
        assert_eq!(judge(says, &of(7.0, 8.0)), Agreement::SameSign);
        assert_eq!(judge(says, &of(60.0, 90.0)), Agreement::SameSign);
        assert_eq!(judge(says, &of(0.9, 2.0)), Agreement::Unresolved);
        assert_eq!(judge(says, &of(0.5, 0.9)), Agreement::OppositeSign);
    }

    #[test]
    fn what_has_no_sign_agrees_differs_or_is_unresolved() {
        assert_eq!(judge(Says::Micros(30.0), &of(20.1, 39.9)), Agreement::Agrees);
        assert_eq!(judge(Says::Micros(30.0), &of(41.0, 50.0)), Agreement::Differs);
        assert_eq!(judge(Says::Micros(30.0), &of(39.0, 50.0)), Agreement::Unresolved);
        assert_eq!(judge(Says::Same(0.05), &of(-0.05, 0.04)), Agreement::Agrees);
        assert_eq!(judge(Says::Same(0.05), &of(-0.2, -0.06)), Agreement::Differs);
        assert_eq!(judge(Says::Same(0.05), &of(0.0, 0.06)), Agreement::Unresolved);
        assert_eq!(judge(Says::NotWorse(0.05), &of(-0.04, 0.9)), Agreement::Agrees);
        assert_eq!(judge(Says::NotWorse(0.05), &of(-0.06, 0.9)), Agreement::Unresolved);
        assert_eq!(judge(Says::NotWorse(0.05), &of(-0.5, -0.06)), Agreement::Differs);
        assert_eq!(judge(Says::Share(0.9), &of(0.9, 1.0)), Agreement::Agrees);
        assert_eq!(judge(Says::Share(0.9), &of(0.1, 0.2)), Agreement::Differs);
    }

    #[test]
    fn one_repetition_resolves_nothing() {
        for says in [Says::Gain(0.3), Says::Ratio(2.0, 3.0), Says::Better, Says::Same(0.1), Says::Seconds(3.0)] {
            assert_eq!(judge(says, &Interval::of(&[0.3])), Agreement::Unresolved);
            assert_eq!(judge(says, &Interval::of(&[])), Agreement::Unresolved);
        }
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
