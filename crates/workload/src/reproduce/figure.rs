//! A figure or table of a paper: the scenario it stands on, the systems it compares, what it says, how it is drawn.

use std::path::Path;

use anyhow::{Context, Result, bail};
use impresario_sched::PolicySpec;
use impresario_sim::model::Scenario;

use super::campaign::{Effort, Run};
use super::claim::Claim;

/// One figure or table.
pub struct Figure {
    /// Short name, e.g. `twins-2017-fig3`.
    pub id: &'static str,
    /// The paper, e.g. `twins-2017`.
    pub paper: &'static str,
    /// For people.
    pub title: &'static str,
    /// Its scenario in `scenarios/papers`.
    pub file: &'static str,
    /// The text of that file.
    pub text: &'static str,
    /// Runs of each cell.
    pub repetitions: u32,
    /// Of the intervals: 0.95, or what the paper took.
    pub confidence: f64,
    /// What is run.
    pub cells: fn(&Scenario, &Effort) -> Vec<Cell>,
    /// What the paper says.
    pub claims: fn() -> Vec<Claim>,
    /// How the paper draws it.
    pub plots: fn() -> Vec<Plot>,
}

/// One system in one situation.
#[derive(Clone, Debug)]
pub struct Cell {
    /// Its name within the figure, e.g. `read/strided/fifo`.
    pub key: String,
    /// What is simulated; the seed is set for each repetition.
    pub scenario: Scenario,
    /// Each application is also run alone, for the interference factor.
    pub alone: bool,
}

/// What a plot takes from a run.
pub type Metric = fn(&Run) -> f64;

/// A plot in the paper's form. Keys that were not run are left out.
pub enum Plot {
    /// Bars, one a key.
    Bars {
        /// Title with unit.
        what: String,
        /// Label, key, and whether it is a baseline.
        bars: Vec<(String, String, bool)>,
        /// What the bar shows.
        metric: Metric,
    },
    /// Curves over a common axis.
    Lines {
        /// Title with unit.
        what: String,
        /// Labels of the axis, in order.
        axis: Vec<String>,
        /// Name and a key for each label.
        curves: Vec<(String, Vec<String>)>,
        /// What the curve shows.
        metric: Metric,
        /// A logarithmic scale.
        log: bool,
    },
}

impl Figure {
    /// The scenario of the file. An error names the file and what is wrong with it.
    pub fn base(&self) -> Result<Scenario> {
        scenario(self.file, self.text)
    }

    /// What is run with this effort; every scenario is checked.
    pub fn checked_cells(&self, effort: &Effort) -> Result<Vec<Cell>> {
        let base = self.base()?;
        let cells = (self.cells)(&base, effort);
        for cell in &cells {
            if let Some((key, message)) = cell.scenario.check().into_iter().next() {
                bail!("{}, {}: {key}: {message}", self.file, cell.key);
            }
        }
        Ok(cells)
    }
}

/// Reads a scenario that is part of the program.
pub fn scenario(file: &str, text: &str) -> Result<Scenario> {
    let scenario: Scenario = toml::from_str(text).with_context(|| format!("scenarios/papers/{file}"))?;
    if let Some((key, message)) = scenario.check().into_iter().next() {
        bail!("{}: {key}: {message}", Path::new("scenarios/papers").join(file).display());
    }
    Ok(scenario)
}

impl Cell {
    /// A cell whose applications are alone anyway, or whose interference is of no interest.
    pub fn new(key: impl Into<String>, scenario: Scenario) -> Cell {
        Cell { key: key.into(), scenario, alone: false }
    }

    /// A cell of several applications, each of which is also run alone.
    pub fn and_alone(key: impl Into<String>, scenario: Scenario) -> Cell {
        Cell { alone: true, ..Cell::new(key, scenario) }
    }
}

/// A policy from a line such as `twins window_us=8000`.
pub fn policy(line: &str) -> PolicySpec {
    let mut words = line.split_whitespace();
    let spec = PolicySpec::named(words.next().unwrap_or("none"));
    words.filter_map(|w| w.split_once('=')).fold(spec, |spec, (key, value)| spec.with(key, value))
}
