//! A figure or table of a paper: one file of `lab/papers` with the scenario, the systems that the paper compares and
//! its claims.
//!
//! The scenario is what `impresario sim run` reads. The rest is below `[metadata]`, which the simulator ignores:
//! - `repetitions`, `confidence` (0.95) and `alone` (each application also runs by itself, for interference factors);
//! - `axes`: lists of levels. A cell is a combination of one level of each axis, and its key is their names joined by
//!   `/`. A level may `set` keys of the scenario, `unset` sections, and `multiply` whole numbers after all sets; `value`
//!   is the number that it stands for;
//! - `sets`: names for lists of levels;
//! - `claims` (see [`super::claim`]) and `plots` (see [`Plot`]).

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use impresario_sched::PolicySpec;
use impresario_sim::file::{Overrides, Study};
use impresario_sim::model::Scenario;
use serde::Deserialize;
use toml::{Table, Value};

use super::campaign::Effort;
use super::claim::{Claim, Measure};
use super::metric::Metric;

/// One figure or table.
pub struct Figure {
    /// Name of its file without the ending, e.g. `twins-2017-fig3`.
    pub id: &'static str,
    /// The paper, e.g. `twins-2017`; [`STUDY`] for a study of ours.
    pub paper: &'static str,
    /// The scenario before any level is applied.
    pub base: Scenario,
    /// Everything else in the file.
    pub metadata: Metadata,
    values: Table,
    /// Set in every cell, after its levels.
    extra: Vec<(String, Value)>,
}

/// Stands for a paper where the file is in `lab/studies`.
pub const STUDY: &str = "study";

/// The rest of a file, besides its scenario.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Metadata {
    /// Runs of each cell.
    pub repetitions: u32,
    /// Of the intervals; the paper's, where it has one.
    #[serde(default = "usual")]
    pub confidence: f64,
    /// Each application is also run by itself.
    #[serde(default)]
    pub alone: bool,
    /// Axes with their levels.
    pub axes: Vec<Vec<Level>>,
    /// Named lists of levels, for the keys of claims and plots.
    #[serde(default)]
    pub sets: BTreeMap<String, Vec<String>>,
    /// The paper's claims; a study has none.
    #[serde(default)]
    pub claims: Vec<Claim>,
    /// The paper's plots.
    #[serde(default)]
    pub plots: Vec<Plot>,
}

fn usual() -> f64 {
    0.95
}

/// One level of an axis.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// Its name in keys.
    pub name: String,
    /// The number that it represents, in the unit of the claims about it.
    pub value: Option<f64>,
    #[serde(default)]
    set: Table,
    #[serde(default)]
    unset: Vec<String>,
    #[serde(default)]
    multiply: BTreeMap<String, i64>,
}

/// A plot in the paper's form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plot {
    /// Title with unit.
    pub what: String,
    /// Keys as in claims: a bar for each case.
    pub bars: Option<String>,
    /// Keys as in claims: the first case segment is the axis, the others name the curves.
    pub lines: Option<String>,
    /// What is shown.
    #[serde(default)]
    pub of: Metric,
    /// A logarithmic scale, for lines.
    #[serde(default)]
    pub log: bool,
}

/// One system in one situation.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Its name within the figure, e.g. `strided/fifo`.
    pub key: String,
    /// What is simulated; the seed is set for each repetition.
    pub scenario: Scenario,
    /// Each application is also run by itself, for the interference factor.
    pub alone: bool,
}

impl Figure {
    /// Reads a file; errors name it.
    pub fn read(id: &'static str, paper: &'static str, text: &str) -> Result<Figure> {
        let file = || path(id, paper);
        let mut values: Table = toml::from_str(text).with_context(file)?;
        let metadata = values.remove("metadata").with_context(|| format!("{}: there is no [metadata]", file()))?;
        let metadata: Metadata = metadata.try_into().with_context(file)?;
        let base = scenario(id, &values, Vec::new())?;
        metadata.check().with_context(file)?;
        Ok(Figure { id, paper, base, metadata, values, extra: Vec::new() })
    }

    /// Sets a key of the scenario in every cell, overriding its levels.
    pub fn set(&mut self, key: String, value: Value) {
        self.extra.push((key, value));
    }

    /// All cells with this effort; every scenario is checked.
    pub fn cells(&self, effort: &Effort) -> Result<Vec<Cell>> {
        let mut choices: Vec<Vec<&Level>> = vec![Vec::new()];
        for axis in &self.metadata.axes {
            choices = choices.iter().flat_map(|c| axis.iter().map(|l| [&c[..], &[l]].concat())).collect();
        }
        choices.iter().map(|levels| self.cell(levels, effort)).collect()
    }

    fn cell(&self, levels: &[&Level], effort: &Effort) -> Result<Cell> {
        let mut values = self.values.clone();
        let mut set: Vec<(String, Value)> = Vec::new();
        for level in levels {
            level.unset.iter().for_each(|key| drop(values.remove(key)));
            set.extend(level.set.iter().map(|(key, value)| (key.clone(), value.clone())));
        }
        set.extend(self.extra.iter().cloned());
        for (key, factor) in levels.iter().flat_map(|l| &l.multiply) {
            match set.iter_mut().rev().find(|(k, _)| k == key) {
                Some((_, Value::Integer(n))) => *n *= factor,
                _ => bail!("{}: no level sets {key} to a whole number to multiply", path(self.id, self.paper)),
            }
        }
        let mut scenario = scenario(self.id, &values, set)?;
        effort.thin(&mut scenario);
        let key = levels.iter().map(|l| l.name.as_str()).collect::<Vec<_>>().join("/");
        if let Some((at, message)) = scenario.check().into_iter().next() {
            bail!("{}, {key}: {at}: {message}", path(self.id, self.paper));
        }
        Ok(Cell { key, scenario, alone: self.metadata.alone })
    }
}

/// The file of a figure or a study, from the root of the tree.
fn path(id: &str, paper: &str) -> String {
    format!("lab/{}/{id}.toml", if paper == STUDY { "studies" } else { "papers" })
}

/// The scenario of these values with some keys set, read and validated as by the simulator.
fn scenario(id: &str, values: &Table, set: Vec<(String, Value)>) -> Result<Scenario> {
    let text = toml::to_string(values).with_context(|| format!("writing the scenario of {id}"))?;
    let overrides = Overrides { set, ..Overrides::default() };
    let study = Study::read(&text, Path::new(id), &overrides, &mut |_| Err("papers have no traces".into()))?;
    Ok(study.first().clone())
}

/// A segment of a key, one for each axis.
#[derive(Clone, PartialEq, Debug)]
pub enum Segment {
    /// One level.
    Level(String),
    /// `*` or `{a|b}`: a case for each.
    Cases(Vec<String>),
    /// `best(a|b)`: the level with the lowest mean.
    Best(Vec<String>),
    /// `worst(a|b)`: the level with the highest mean.
    Worst(Vec<String>),
    /// `sum(a|b)`: the sum over these.
    Sum(Vec<String>),
}

impl Metadata {
    /// Checks that every key of a claim or plot exists.
    fn check(&self) -> Result<()> {
        for claim in &self.claims {
            let measures = std::iter::successors(Some(&claim.ours), |m| m.less.as_deref());
            for key in measures.flat_map(Measure::keys).chain(&claim.order) {
                self.segments(key).with_context(|| claim.id.clone())?;
            }
        }
        for plot in &self.plots {
            for key in plot.bars.iter().chain(&plot.lines) {
                self.segments(key).with_context(|| format!("plot {}", plot.what))?;
            }
        }
        Ok(())
    }

    /// The segments of a key. Alternatives are levels, names of [`Metadata::sets`], or beginnings such as `twins*`.
    pub fn segments(&self, key: &str) -> Result<Vec<Segment>> {
        let parts: Vec<&str> = key.split('/').collect();
        if parts.len() != self.axes.len() {
            bail!("{key} has {} segments for {} axes", parts.len(), self.axes.len());
        }
        parts.into_iter().zip(&self.axes).map(|(part, axis)| self.segment(part, axis)).collect()
    }

    fn segment(&self, part: &str, axis: &[Level]) -> Result<Segment> {
        let inside = |open: &str, close: char| part.strip_prefix(open).and_then(|p| p.strip_suffix(close));
        Ok(if part == "*" {
            Segment::Cases(axis.iter().map(|l| l.name.clone()).collect())
        } else if let Some(list) = inside("{", '}') {
            Segment::Cases(self.alternatives(list, axis)?)
        } else if let Some(list) = inside("best(", ')') {
            Segment::Best(self.alternatives(list, axis)?)
        } else if let Some(list) = inside("worst(", ')') {
            Segment::Worst(self.alternatives(list, axis)?)
        } else if let Some(list) = inside("sum(", ')') {
            Segment::Sum(self.alternatives(list, axis)?)
        } else {
            Segment::Level(self.alternatives(part, axis)?.remove(0))
        })
    }

    fn alternatives(&self, list: &str, axis: &[Level]) -> Result<Vec<String>> {
        let mut found = Vec::new();
        for name in list.split('|') {
            let before = found.len();
            let names = self.sets.get(name).map_or(std::slice::from_ref(&name), |_| &[]).iter().map(|n| n.to_string());
            let names: Vec<String> = names.chain(self.sets.get(name).into_iter().flatten().cloned()).collect();
            for name in &names {
                let beginning = name.strip_suffix('*');
                let fits = |l: &&Level| beginning.map_or(l.name == *name, |b| l.name.starts_with(b));
                found.extend(axis.iter().filter(fits).map(|l| l.name.clone()));
            }
            if found.len() == before {
                let levels: Vec<&str> = axis.iter().map(|l| l.name.as_str()).collect();
                bail!("there is no level {name}; there are {}", levels.join(", "));
            }
        }
        Ok(found)
    }

    /// The number that a level of any axis represents.
    pub fn value(&self, level: &str) -> Option<f64> {
        self.axes.iter().flatten().find(|l| l.name == level)?.value
    }
}

impl Cell {
    /// A cell whose applications are alone anyway, or whose interference does not matter.
    pub fn new(key: impl Into<String>, scenario: Scenario) -> Cell {
        Cell { key: key.into(), scenario, alone: false }
    }

    /// A cell of several applications, each of which is also run alone.
    pub fn and_alone(key: impl Into<String>, scenario: Scenario) -> Cell {
        Cell { alone: true, ..Cell::new(key, scenario) }
    }
}

/// A policy from a line of ours such as `twins window_us=8000`.
///
/// # Panics
/// If the line names no policy.
pub fn policy(line: &str) -> PolicySpec {
    line.parse().unwrap_or_else(|e| panic!("{line}: {e}"))
}
