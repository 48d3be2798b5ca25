//! Runs the simulations of a study in parallel; the results do not depend on the number of threads.
//!
//! [`summary`] summarises the results, [`table`] shows them as text, [`csv`] and JSON are for programs, and [`page`]
//! has plots. [`import`] reads traces that scenarios name.

pub mod csv;
pub mod import;
pub mod page;
pub mod plots;
pub use plots::{byte_axis, time_line};
pub mod summary;
pub mod table;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use impresario_base::lock::Mutex;
use impresario_sim::file::Study;
use impresario_sim::model::Scenario;
use impresario_sim::outcome::{Outcome, Series};
use impresario_sim::{Budget, Simulation, sweep};
use serde::Serialize;

use crate::stop::Stop;

/// Points whose first repetition keeps its curves and picture: as many as a page can show.
pub const DETAILED_POINTS: usize = 24;

/// Events between two checks of the stop flag.
const EVENTS_PER_STEP: u64 = 100_000;

/// How a study is run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Parallel simulations (at least 1).
    pub threads: usize,
    /// Run each application alone as well, for interference factors.
    pub interference: bool,
    /// Assert the complete set of laws, which takes longer.
    pub checks: bool,
}

/// One simulation.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Run {
    /// Which repetition, from 0.
    pub repetition: u32,
    /// The measurements; curves and picture only for the first repetition of the first points.
    pub outcome: Outcome,
    /// Times of the applications when each runs alone, s, in the order of the outcome; empty unless requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub alone_s: Vec<f64>,
}

/// One point of a sweep.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct PointResult {
    /// The values of the swept keys.
    pub values: Vec<String>,
    /// Its completed repetitions.
    pub runs: Vec<Run>,
}

/// The results of a study.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Results {
    /// The scenario's, or the name of its file.
    pub title: String,
    /// The scenario's.
    pub assumptions: Vec<String>,
    /// The swept keys.
    pub keys: Vec<String>,
    /// Repetitions asked for.
    pub repetitions: u32,
    /// All points, also those without a complete run.
    pub points: Vec<PointResult>,
}

impl Results {
    /// Complete runs.
    pub fn complete(&self) -> usize {
        self.points.iter().map(|p| p.runs.len()).sum()
    }

    /// Runs asked for.
    pub fn asked(&self) -> usize {
        self.points.len() * self.repetitions as usize
    }

    /// All violations of the laws, each with the point and the seed.
    pub fn violations(&self) -> Vec<String> {
        let mut all = Vec::new();
        for point in &self.points {
            for run in &point.runs {
                let at = sweep::label(&self.keys, &point.values);
                let seed = run.outcome.seed;
                all.extend(run.outcome.violations.iter().map(|v| format!("{at}{}seed {seed}: {v}", gap(&at))));
            }
        }
        all
    }
}

fn gap(text: &str) -> &'static str {
    if text.is_empty() { "" } else { ", " }
}

/// Progress of a study.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Progress {
    /// Runs that are complete.
    pub done: usize,
    /// Runs in all.
    pub runs: usize,
    /// Part of all the work that is done, 0 to 1, as far as it is known.
    pub part: f64,
}

/// Runs all points and repetitions. After an early stop, completed runs are returned. `tick` is called often, from any
/// thread.
pub fn run(
    title: &str,
    study: &Study,
    options: &Options,
    stop: &Stop,
    tick: &(dyn Fn(Progress) + Sync),
) -> Result<Results> {
    let (points, repetitions) = (study.points.len(), study.repetitions as usize);
    let runs = points * repetitions;
    let parts: Vec<AtomicU64> = (0..options.threads.max(1)).map(|_| AtomicU64::new(0)).collect();
    let (free, done) = (Mutex::new((0..parts.len()).collect::<Vec<usize>>()), AtomicUsize::new(0));
    let failed: Mutex<Option<anyhow::Error>> = Mutex::new(None);
    let show = || {
        let begun: u64 = parts.iter().map(|p| p.load(Ordering::Relaxed)).sum();
        let complete = done.load(Ordering::Relaxed);
        let part = (complete as f64 + begun as f64 / 1e6) / runs.max(1) as f64;
        tick(Progress { done: complete, runs, part: part.min(1.0) });
    };
    // Never more pieces of work than threads, so a slot is always free.
    let work = |nth: usize| -> Option<Run> {
        let place = free.lock().pop()?;
        let part = |part: f64| {
            parts[place].store((part.clamp(0.0, 1.0) * 1e6) as u64, Ordering::Relaxed);
            show();
        };
        let result = one(study, nth, options, stop, &part);
        parts[place].store(0, Ordering::Relaxed);
        free.lock().push(place);
        match result {
            Ok(run) => {
                done.fetch_add(usize::from(run.is_some()), Ordering::Relaxed);
                show();
                run
            }
            Err(error) => {
                failed.lock().get_or_insert(error);
                None
            }
        }
    };
    let values = study.points.iter().map(|p| PointResult { values: p.values.clone(), runs: Vec::new() });
    let mut results = Results {
        title: Some(study.first().title.clone()).filter(|t| !t.is_empty()).unwrap_or_else(|| title.to_string()),
        assumptions: study.first().assumptions.clone(),
        keys: study.keys.clone(),
        repetitions: study.repetitions,
        points: values.collect(),
    };
    sweep::side_by_side(runs, options.threads, work, |nth, run| results.points[nth / repetitions].runs.push(run));
    match failed.into_inner() {
        None => Ok(results),
        Some(error) => Err(error),
    }
}

/// Run `nth` of a study; `None` when stopped.
fn one(study: &Study, nth: usize, options: &Options, stop: &Stop, part: &dyn Fn(f64)) -> Result<Option<Run>> {
    let (point, repetition) = (nth / study.repetitions as usize, (nth % study.repetitions as usize) as u32);
    let scenario = study.scenario(point, repetition);
    let at = || {
        let label = sweep::label(&study.keys, &study.points[point].values);
        format!("{label}{}seed {}", gap(&label), scenario.seed)
    };
    let alone = if options.interference { scenario.application.len() } else { 0 };
    let steps = (alone + 1) as f64;
    let together = simulate(&scenario, options.checks, stop, &|p| part(p / steps)).with_context(at)?;
    let Some(mut outcome) = together else { return Ok(None) };
    let mut alone_s = Vec::new();
    for (i, application) in scenario.application.iter().enumerate().take(alone) {
        let mut single = application.clone();
        single.copies = 1;
        let scenario = Scenario { application: vec![single], ..scenario.clone() };
        let step = |p: f64| part((i as f64 + 1.0 + p) / steps);
        let Some(lone) = simulate(&scenario, options.checks, stop, &step).with_context(at)? else { return Ok(None) };
        let time_s = lone.applications.first().map_or(0.0, |a| a.time_s);
        alone_s.extend(std::iter::repeat_n(time_s, application.copies as usize));
        outcome.violations.extend(lone.violations.into_iter().map(|v| format!("{} alone: {v}", application.name)));
    }
    if repetition > 0 || point >= DETAILED_POINTS {
        outcome.series = Series::default();
        outcome.picture = Vec::new();
    }
    Ok(Some(Run { repetition, outcome, alone_s }))
}

/// One simulation from start to end; `None` when stopped.
pub fn simulate(scenario: &Scenario, checks: bool, stop: &Stop, part: &dyn Fn(f64)) -> Result<Option<Outcome>> {
    let mut simulation = Simulation::new(scenario)?.with_checks(checks);
    loop {
        if stop.is_set() {
            return Ok(None);
        }
        let progress = simulation.step_until(Budget::Events(EVENTS_PER_STEP));
        part(progress.fraction);
        if progress.done {
            return Ok(Some(simulation.finish()));
        }
    }
}

#[cfg(test)]
mod tests;
