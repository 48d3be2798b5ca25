//! What a paper claims, and how the same is computed from our runs.

use std::collections::BTreeMap;

use super::campaign::Run;
use super::verdict::Says;

/// One sentence of a paper.
pub struct Claim {
    /// Short name; stays as it is, for documents refer to it.
    pub id: String,
    /// The sentence in our words.
    pub text: String,
    /// What it says of the quantity.
    pub says: Says,
    /// The same from our runs; `None` when they were not made.
    pub ours: Box<FromRuns>,
}

/// Computes the same from our runs.
pub type FromRuns = dyn Fn(&Table<'_>) -> Option<Ours>;

/// Ours: a value a repetition.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Ours {
    /// A value a repetition.
    pub values: Vec<f64>,
    /// Which case it is, where the paper says "up to"; absolute figures behind a ratio.
    pub note: String,
}

impl Ours {
    /// Values without a note.
    pub fn of(values: Vec<f64>) -> Ours {
        Ours { values, note: String::new() }
    }

    /// With a note.
    pub fn noted(self, note: impl Into<String>) -> Ours {
        Ours { note: note.into(), ..self }
    }

    /// Mean of the values.
    pub fn mean(&self) -> f64 {
        crate::stats::mean(&self.values)
    }
}

impl Claim {
    /// A claim.
    pub fn new(
        id: impl Into<String>,
        text: impl Into<String>,
        says: Says,
        ours: impl Fn(&Table<'_>) -> Option<Ours> + 'static,
    ) -> Claim {
        Claim { id: id.into(), text: text.into(), says, ours: Box::new(ours) }
    }
}

/// The runs of a figure by cell.
#[derive(Clone, Copy)]
pub struct Table<'a> {
    /// Runs of each cell, in the order of the repetitions.
    pub runs: &'a BTreeMap<String, Vec<Run>>,
}

impl Table<'_> {
    /// A value of each run of a cell; `None` when it was not run.
    pub fn values(&self, key: &str, metric: impl Fn(&Run) -> f64) -> Option<Vec<f64>> {
        let runs = self.runs.get(key)?;
        Some(runs.iter().map(metric).collect())
    }

    /// Mean of a value over the runs of a cell.
    pub fn mean(&self, key: &str, metric: impl Fn(&Run) -> f64) -> Option<f64> {
        self.values(key, metric).map(|v| crate::stats::mean(&v))
    }

    /// Gain of one cell over another in something that should be small, paired by repetition.
    pub fn gain(&self, base: &str, new: &str, metric: impl Fn(&Run) -> f64 + Copy) -> Option<Ours> {
        let pairs = self.values(base, metric)?.into_iter().zip(self.values(new, metric)?);
        Some(Ours::of(pairs.map(|(b, n)| 1.0 - n / b).collect()))
    }

    /// How many times as long as another a cell takes, paired by repetition.
    pub fn ratio(&self, slow: &str, fast: &str, metric: impl Fn(&Run) -> f64 + Copy) -> Option<Ours> {
        let pairs = self.values(slow, metric)?.into_iter().zip(self.values(fast, metric)?);
        Some(Ours::of(pairs.map(|(s, f)| s / f).collect()))
    }

    /// The key with the least (or, of a negated metric, the most) on average.
    pub fn best<'k>(&self, keys: &[&'k str], metric: impl Fn(&Run) -> f64 + Copy) -> Option<&'k str> {
        let means = keys.iter().filter_map(|k| Some((*k, self.mean(k, metric)?)));
        means.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(k, _)| k)
    }

    /// A metric of the cell that has most of it on average.
    pub fn worst<'k>(&self, keys: &[&'k str], metric: impl Fn(&Run) -> f64 + Copy) -> Option<&'k str> {
        self.best(keys, move |r| -metric(r))
    }
}

/// "Up to": the case with the largest mean, as papers take it, with its name as the note.
pub fn largest(cases: impl IntoIterator<Item = (String, Option<Ours>)>) -> Option<Ours> {
    let known = cases.into_iter().filter_map(|(name, ours)| Some((name, ours?)));
    let (name, ours) = known.max_by(|a, b| a.1.mean().total_cmp(&b.1.mean()))?;
    let note = if ours.note.is_empty() { name } else { format!("{name}: {}", ours.note) };
    Some(ours.noted(note))
}

/// The case with the smallest mean, with its name as the note.
pub fn smallest(cases: impl IntoIterator<Item = (String, Option<Ours>)>) -> Option<Ours> {
    let known = cases.into_iter().filter_map(|(name, ours)| Some((name, ours?)));
    let (name, ours) = known.min_by(|a, b| a.1.mean().total_cmp(&b.1.mean()))?;
    Some(ours.noted(name))
}

/// "On average": the arithmetic mean over cases, a value a repetition.
pub fn average(cases: impl IntoIterator<Item = Option<Ours>>) -> Option<Ours> {
    let cases: Vec<Ours> = cases.into_iter().collect::<Option<_>>()?;
    let repetitions = cases.iter().map(|c| c.values.len()).min()?;
    let means = (0..repetitions).map(|r| cases.iter().map(|c| c.values[r]).sum::<f64>() / cases.len() as f64);
    Some(Ours::of(means.collect()).noted(format!("{} cases", cases.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ours(values: &[f64]) -> Option<Ours> {
        Some(Ours::of(values.to_vec()))
    }

    #[test]
    fn up_to_is_the_case_with_the_largest_mean_not_the_largest_value() {
        let cases = [("a".to_string(), ours(&[0.1, 0.9])), ("b".into(), ours(&[0.6, 0.6])), ("c".into(), None)];
        let largest = largest(cases.clone()).unwrap();
        assert_eq!((largest.values, largest.note.as_str()), (vec![0.6, 0.6], "b"));
        assert_eq!(smallest(cases).unwrap().note, "a");
        assert_eq!(super::largest([]), None);
    }

    #[test]
    fn an_average_needs_all_its_cases() {
        assert_eq!(average([ours(&[1.0, 3.0]), ours(&[2.0, 5.0])]).unwrap().values, [1.5, 4.0]);
        assert_eq!(average([ours(&[1.0]), None]), None);
        assert_eq!(average([]), None);
    }
}
