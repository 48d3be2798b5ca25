//! The claims of a paper, and how to compute them from our runs.
//!
//! A claim of a file (`[[metadata.claims]]`) has
//! - `id`, which documents refer to; `text`, the sentence in our words; `paper`, its figure (see [`Says`]);
//! - `ours`, a [`Measure`]: `gain = [base, new]` (1 − new / base), `ratio = [slow, fast]`, `value = key`, `spread = [keys]`
//!   (largest less smallest, relative to the mean), `least`/`most = key` (the number of the level with the least or most), or
//!   `knee = key` (where the metric by the level's number leaves its first value); `of` a [`Metric`]; over several cases
//!   `take` says which: `average` (the default), `largest`, `smallest`, `largest-difference`, or `share` (of the cases
//!   that are better); `less` subtracts another measure;
//! - `times = [base, new]`, the paper's own times, s, where it gives them;
//! - `order`, keys with the fastest first, where the paper orders the systems behind the claim;
//! - `untested`, why the claim cannot be tested here: its figure is an input, or it cannot come out otherwise.

use std::collections::BTreeMap;

use impresario_base::statistics::mean;
use serde::Deserialize;

use super::agreement::Says;
use super::campaign::Run;
use super::figure::{Metadata, Segment};
use super::metric::Metric;

/// A statement of a paper.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Its short name; stable, because documents refer to it.
    pub id: String,
    /// The statement in our words.
    pub text: String,
    /// The paper's value of the quantity.
    pub paper: Says,
    /// The same from our runs.
    #[serde(default)]
    pub ours: Measure,
    /// The paper's times of base and new, s.
    pub times: Option<[f64; 2]>,
    /// The paper's order of systems, fastest first.
    #[serde(default)]
    pub order: Vec<String>,
    /// Why it is not tested.
    pub untested: Option<String>,
}

/// A quantity computed from our runs.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measure {
    gain: Option<[String; 2]>,
    ratio: Option<[String; 2]>,
    value: Option<String>,
    spread: Option<Vec<String>>,
    least: Option<String>,
    most: Option<String>,
    knee: Option<String>,
    #[serde(default)]
    of: Metric,
    #[serde(default)]
    take: Take,
    /// What is subtracted.
    pub less: Option<Box<Measure>>,
}

/// Which of several cases.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Take {
    #[default]
    Average,
    Largest,
    Smallest,
    LargestDifference,
    Share,
}

/// Our result: a value per repetition, and context for the verdict.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Ours {
    /// A value per repetition.
    pub values: Vec<f64>,
    /// The case, if the paper says "up to"; absolute figures behind a gain or ratio.
    pub note: String,
    /// Mean times of base and new, s.
    pub times: Option<[f64; 2]>,
    /// Base and new were bit-identical in every run.
    pub identical: bool,
    /// The level found is the first or last of those tried.
    pub at_edge: bool,
}

/// Losses beyond tenfold are truncated; variances near zero give meaningless ratios.
const LOSS_MAX: f64 = 10.0;

impl Ours {
    fn of(values: Vec<f64>) -> Ours {
        Ours { values, ..Ours::default() }
    }

    fn mean(&self) -> f64 {
        mean(&self.values)
    }
}

/// The runs of a figure by cell.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    /// Runs of each cell, in the order of the repetitions.
    pub runs: &'a BTreeMap<String, Vec<Run>>,
}

impl Table<'_> {
    /// A value of each run of a cell; `None` if it was not run.
    pub fn values(&self, key: &str, metric: impl Fn(&Run) -> f64) -> Option<Vec<f64>> {
        let runs = self.runs.get(key)?;
        Some(runs.iter().map(metric).collect())
    }

    /// Mean of a value over the runs of a cell.
    pub fn mean(&self, key: &str, metric: impl Fn(&Run) -> f64) -> Option<f64> {
        self.values(key, metric).map(|v| mean(&v))
    }

    /// Gain of one cell over another in a quantity to be minimised, paired by repetition.
    pub fn gain(&self, base: &str, new: &str, metric: impl Fn(&Run) -> f64 + Copy) -> Option<Vec<f64>> {
        Some(gains(&self.values(base, metric)?, &self.values(new, metric)?))
    }
}

fn gains(base: &[f64], new: &[f64]) -> Vec<f64> {
    let gain = |(b, n): (&f64, &f64)| if b == n { 0.0 } else { (1.0 - n / b).max(-LOSS_MAX) };
    base.iter().zip(new).map(gain).collect()
}

/// A key with its cases filled in.
struct Resolved {
    values: Vec<f64>,
    /// The level that `best` or `worst` chose.
    chosen: Option<String>,
}

/// Evaluates measures on the runs of a figure.
pub struct Evaluator<'a> {
    /// Levels and sets.
    pub metadata: &'a Metadata,
    /// The runs.
    pub table: Table<'a>,
}

impl Measure {
    /// All keys of it, without those of `less`.
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        let pairs = self.gain.iter().chain(&self.ratio).flatten();
        let single = [&self.value, &self.least, &self.most, &self.knee].into_iter().flatten();
        pairs.chain(single).chain(self.spread.iter().flatten())
    }
}

/// All cases of the segments: a list of levels for the case segments in order.
pub fn cases(segments: &[Segment]) -> Vec<Vec<String>> {
    let mut all = vec![Vec::new()];
    for segment in segments {
        if let Segment::Cases(levels) = segment {
            all = all.iter().flat_map(|c| levels.iter().map(|l| [&c[..], std::slice::from_ref(l)].concat())).collect();
        }
    }
    all
}

impl Evaluator<'_> {
    /// Our result; `None` if a cell was not run.
    pub fn ours(&self, measure: &Measure) -> Option<Ours> {
        let mut ours = self.one(measure)?;
        if let Some(less) = &measure.less {
            let other = self.one(less)?;
            ours.values.iter_mut().zip(&other.values).for_each(|(v, o)| *v -= o);
            ours.note = format!("{} less {}", ours.note, other.note);
            ours.times = None;
        }
        Some(ours)
    }

    fn one(&self, m: &Measure) -> Option<Ours> {
        if let Some([base, new]) = m.gain.as_ref().or(m.ratio.as_ref()) {
            return self.taken(m, base, |case| self.pair(m, base, new, case));
        }
        if let Some(key) = &m.value {
            return self.taken(m, key, |case| Some(Ours::of(self.resolve(key, case, m.of)?.values)));
        }
        if let Some(keys) = &m.spread {
            return self.taken(m, keys.first()?, |case| self.spread(keys, case, m.of));
        }
        if let Some(key) = m.least.as_ref().or(m.most.as_ref()) {
            return self.extreme(key, m.of, m.most.is_some());
        }
        self.knee(m.knee.as_ref()?, m.of)
    }

    /// The values of a key in a case.
    fn resolve(&self, key: &str, case: &[String], of: Metric) -> Option<Resolved> {
        let mut case = case.iter();
        let (mut keys, mut choice) = (vec![Vec::new()], None);
        for segment in self.metadata.segments(key).ok()? {
            let levels = match segment {
                Segment::Level(level) => vec![level],
                Segment::Cases(_) => vec![case.next()?.clone()],
                Segment::Sum(levels) => levels,
                Segment::Best(levels) => {
                    choice = Some(1.0);
                    levels
                }
                Segment::Worst(levels) => {
                    choice = Some(-1.0);
                    levels
                }
            };
            keys =
                keys.iter().flat_map(|k| levels.iter().map(|l| [&k[..], std::slice::from_ref(l)].concat())).collect();
        }
        let values: Vec<Vec<f64>> =
            keys.iter().map(|k| self.table.values(&k.join("/"), |r| of.of(r))).collect::<Option<_>>()?;
        if let Some(sign) = choice {
            let at =
                (0..values.len()).min_by(|a, b| (sign * mean(&values[*a])).total_cmp(&(sign * mean(&values[*b]))))?;
            // The level that differs between the alternatives.
            let differs = (0..keys[at].len()).find(|i| keys.iter().any(|k| k[*i] != keys[at][*i]));
            let chosen = differs.map(|i| keys[at][i].clone());
            return Some(Resolved { values: values.into_iter().nth(at)?, chosen });
        }
        let n = values.iter().map(Vec::len).min()?;
        Some(Resolved { values: (0..n).map(|r| values.iter().map(|v| v[r]).sum()).collect(), chosen: None })
    }

    fn pair(&self, m: &Measure, base: &str, new: &str, case: &[String]) -> Option<Ours> {
        let (b, n) = (self.resolve(base, case, m.of)?, self.resolve(new, case, m.of)?);
        let values = match m.gain {
            Some(_) => gains(&b.values, &n.values),
            None => b.values.iter().zip(&n.values).map(|(s, f)| s / f).collect(),
        };
        let mut notes = Vec::new();
        match (&b.chosen, &n.chosen) {
            (Some(b), Some(n)) => notes.push(format!("{n} over {b}")),
            (Some(b), None) => notes.push(format!("over {b}")),
            (None, Some(n)) => notes.push(n.clone()),
            (None, None) => {}
        }
        let times = m.of.is_seconds().then(|| [mean(&b.values), mean(&n.values)]);
        if let Some([b, n]) = times {
            notes.push(format!("{} → {} s", super::text::short(b), super::text::short(n)));
        }
        let identical = b.values == n.values;
        Some(Ours { values, note: notes.join(", "), times, identical, at_edge: false })
    }

    fn spread(&self, keys: &[String], case: &[String], of: Metric) -> Option<Ours> {
        let all: Vec<Vec<f64>> = keys.iter().map(|k| Some(self.resolve(k, case, of)?.values)).collect::<Option<_>>()?;
        let spread = |r: usize| {
            let here: Vec<f64> = all.iter().map(|v| v[r]).collect();
            let (low, high) = here.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
            (high - low) / mean(&here)
        };
        Some(Ours::of((0..all.first()?.len()).map(spread).collect()))
    }

    /// A single case of a key, or the average of its cases.
    fn taken(&self, m: &Measure, key: &str, ours: impl Fn(&[String]) -> Option<Ours>) -> Option<Ours> {
        let cases = cases(&self.metadata.segments(key).ok()?);
        let all: Vec<(String, Ours)> =
            cases.iter().map(|case| Some((case.join(", "), ours(case)?))).collect::<Option<_>>()?;
        let by = |f: fn(f64) -> f64| all.iter().max_by(|a, b| f(a.1.mean()).total_cmp(&f(b.1.mean())));
        let one = match m.take {
            _ if all.len() == 1 => all.first(),
            Take::Average | Take::Share => {
                let over = |r: usize| {
                    let here = all.iter().map(|(_, o)| o.values[r]);
                    let better = |v: f64| if m.take == Take::Share { f64::from(u8::from(v > 0.0)) } else { v };
                    here.map(better).sum::<f64>() / all.len() as f64
                };
                let n = all.iter().map(|(_, o)| o.values.len()).min()?;
                let identical = all.iter().all(|(_, o)| o.identical);
                let note = format!("{} cases", all.len());
                return Some(Ours { note, identical, ..Ours::of((0..n).map(over).collect()) });
            }
            Take::Largest => by(|v| v),
            Take::Smallest => by(|v| -v),
            Take::LargestDifference => by(f64::abs),
        };
        let (case, ours) = one?;
        let note = [case.as_str(), &ours.note].into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join(": ");
        Some(Ours { note, ..ours.clone() })
    }

    /// The number of the level with the least (or most) of a metric in each repetition.
    fn extreme(&self, key: &str, of: Metric, most: bool) -> Option<Ours> {
        let (numbers, all) = self.by_level(key, of)?;
        let best = |r: usize| {
            let sign = if most { -1.0 } else { 1.0 };
            (0..all.len()).min_by(|a, b| (sign * all[*a][r]).total_cmp(&(sign * all[*b][r]))).unwrap_or(0)
        };
        let found: Vec<usize> = (0..all.first()?.len()).map(best).collect();
        let at_edge = found.iter().all(|at| *at == 0) || found.iter().all(|at| *at + 1 == all.len());
        Some(Ours { at_edge, ..Ours::of(found.iter().map(|at| numbers[*at]).collect()) })
    }

    /// Where a metric by the number of its level departs from its first value: the middle between the last level within
    /// half of it and the next.
    /// it and the next.
    fn knee(&self, key: &str, of: Metric) -> Option<Ours> {
        let (numbers, all) = self.by_level(key, of)?;
        let by = |i: usize, r: usize| all[i][r] / numbers[i];
        let at = (0..all.first()?.len()).map(|r| {
            let beyond = (1..all.len()).find(|&i| by(i, r) > 1.5 * by(0, r));
            beyond.map_or(f64::NAN, |i| (numbers[i - 1] + numbers[i]) / 2.0)
        });
        Some(Ours::of(at.collect()))
    }

    /// The numbers of the levels of a key's one case segment, and the values of each.
    fn by_level(&self, key: &str, of: Metric) -> Option<(Vec<f64>, Vec<Vec<f64>>)> {
        let cases = cases(&self.metadata.segments(key).ok()?);
        let numbers = cases.iter().map(|c| self.metadata.value(c.last()?)).collect::<Option<_>>()?;
        let values = cases.iter().map(|c| Some(self.resolve(key, c, of)?.values)).collect::<Option<_>>()?;
        Some((numbers, values))
    }

    /// The first two systems that ours orders differently from the paper: `a 3.1 s before b 2.5 s`.
    pub fn inverted(&self, order: &[String], of: &Measure) -> Option<String> {
        let means: Vec<(&String, f64)> =
            order.iter().filter_map(|key| Some((key, mean(&self.resolve(key, &[], of.of)?.values)))).collect();
        let wrong = means.windows(2).find(|pair| pair[0].1 > pair[1].1)?;
        let [(first, a), (second, b)] = [wrong[0], wrong[1]];
        let short = super::text::short;
        Some(format!("the paper has {first} faster than {second}, ours are {} and {} s", short(a), short(b)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two patterns and three systems; the windows stand for 1 and 2.
    const METADATA: &str = r#"
repetitions = 2
axes = [
  [{ name = "read" }, { name = "write" }],
  [{ name = "none" }, { name = "w 1", value = 1.0 }, { name = "w 2", value = 2.0 }],
]
claims = []
[sets]
both = ["read", "write"]
"#;

    /// Makespans of two repetitions of each cell.
    const RUNS: [(&str, [f64; 2]); 6] = [
        ("read/none", [10.0, 20.0]),
        ("read/w 1", [5.0, 10.0]),
        ("read/w 2", [8.0, 16.0]),
        ("write/none", [10.0, 10.0]),
        ("write/w 1", [10.0, 10.0]),
        ("write/w 2", [12.0, 14.0]),
    ];

    fn evaluate<T>(with: impl Fn(&Evaluator<'_>) -> T) -> T {
        let metadata: Metadata = toml::from_str(METADATA).unwrap();
        let run = |s: f64| Run {
            outcome: impresario_sim::outcome::Outcome { makespan_s: s, ..Default::default() },
            alone_s: Vec::new(),
        };
        let runs: BTreeMap<String, Vec<Run>> =
            RUNS.iter().map(|(key, values)| (key.to_string(), values.map(run).into())).collect();
        with(&Evaluator { metadata: &metadata, table: Table { runs: &runs } })
    }

    fn ours(measure: &str) -> Ours {
        let measure: Measure = toml::from_str(measure).unwrap();
        evaluate(|e| e.ours(&measure)).unwrap_or_else(|| panic!("no value"))
    }

    #[test]
    fn gains_and_ratios_are_paired_by_repetition() {
        let gain = ours(r#"gain = ["read/none", "read/w 2"]"#);
        assert_eq!((gain.values.len(), gain.times, gain.identical), (2, Some([15.0, 12.0]), false));
        assert!(gain.values.iter().all(|v| (v - 0.2).abs() < 1e-12) && gain.note.contains("15.0 → 12.0 s"), "{gain:?}");
        assert_eq!(ours(r#"ratio = ["read/none", "read/w 1"]"#).values, [2.0, 2.0]);
        assert!(ours(r#"gain = ["write/none", "write/w 1"]"#).identical);
        assert_eq!(ours(r#"value = "write/sum(w*)""#).values, [22.0, 24.0]);
    }

    #[test]
    fn best_and_worst_are_chosen_by_the_mean() {
        let best = ours(r#"gain = ["read/none", "read/best(w*)"]"#);
        assert_eq!((best.values, best.note.as_str()), (vec![0.5, 0.5], "w 1, 15.0 → 7.50 s"));
        let worst = ours(r#"gain = ["read/worst(w 1|w 2)", "read/none"]"#);
        assert_eq!(worst.values, [-0.25, -0.25], "the worst of the others can be better than the system itself");
    }

    #[test]
    fn several_cases_are_averaged_or_one_is_taken() {
        let of = |take: &str| ours(&format!("gain = [\"{{both}}/none\", \"{{both}}/w 2\"]\ntake = \"{take}\""));
        let average = of("average");
        assert!((average.values[0] - 0.0).abs() < 1e-12 && average.note == "2 cases", "{average:?}");
        assert!(of("largest").note.starts_with("read: "));
        assert!(of("smallest").note.starts_with("write: "));
        assert!(of("largest-difference").note.starts_with("write: "), "a loss of 30 % is larger than a gain of 20 %");
        assert_eq!(of("share").values, [0.5, 0.5]);
        let less = ours("gain = [\"read/none\", \"read/w 1\"]\n[less]\ngain = [\"write/none\", \"write/w 1\"]");
        assert_eq!(less.values, [0.5, 0.5]);
    }

    #[test]
    fn the_best_level_is_told_with_whether_it_is_the_last_tried() {
        let least = ours(r#"least = "read/{w*}""#);
        assert_eq!((least.values, least.at_edge), (vec![1.0, 1.0], true));
        assert_eq!(ours(r#"most = "write/{w*}""#).values, [2.0, 2.0]);
        let spread = ours(r#"spread = ["read/none", "read/w 1"]"#);
        assert!((spread.values[0] - 5.0 / 7.5).abs() < 1e-12);
    }

    #[test]
    fn an_order_other_than_the_papers_is_seen() {
        let order = |keys: &[&str]| {
            let keys: Vec<String> = keys.iter().map(|k| k.to_string()).collect();
            evaluate(|e| e.inverted(&keys, &Measure::default()))
        };
        assert_eq!(order(&["read/w 1", "read/w 2", "read/none"]), None);
        assert!(order(&["read/w 2", "read/w 1"]).unwrap().contains("12.0 and 7.50 s"));
        assert_eq!(order(&[]), None);
    }

    #[test]
    fn a_key_that_no_level_has_is_refused() {
        let metadata: Metadata = toml::from_str(METADATA).unwrap();
        for key in ["read", "read/x", "read/{w 3}", "reed/none"] {
            assert!(metadata.segments(key).is_err(), "{key}");
        }
    }
}
