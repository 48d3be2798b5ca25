//! Runs the cells of figures: every distinct simulation once, in random order, in parallel on all cores.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_sim::model::{Pattern, Scenario};
use impresario_sim::outcome::{Outcome, Series};
use impresario_sim::sweep::side_by_side;
use serde::{Deserialize, Serialize};

use super::figure::{Cell, Figure};
use impresario_base::Random;
use impresario_workload::stop::Stop;

/// The effort.
#[derive(Clone, Debug)]
pub struct Effort {
    /// The volume of every application and the caches are divided by this (1: the paper's).
    pub divide: u64,
    /// Overrides the figures' own repetitions.
    pub repetitions: Option<u32>,
    /// Parallel simulations; 0: one per core.
    pub threads: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Effort { divide: 1, repetitions: None, threads: 0 }
    }
}

impl Effort {
    /// Reduces the volume of all applications and the caches.
    pub fn thin(&self, scenario: &mut Scenario) {
        if self.divide <= 1 {
            return;
        }
        for a in &mut scenario.application {
            // So that applications overlap as at full volume.
            a.start_s /= self.divide as f64;
            if a.requests >= 2 * self.divide || a.pattern == Pattern::Random {
                a.requests = (a.requests / self.divide).max(2);
            } else {
                a.request_bytes = (a.request_bytes / self.divide).max(4096);
            }
        }
        scenario.servers.cache_bytes /= self.divide;
        scenario.clients.cache_bytes /= self.divide;
    }
}

/// One repetition of a cell.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Run {
    /// What the simulation measured, without its series and picture.
    pub outcome: Outcome,
    /// Time of each application alone under the same system, s; empty unless requested.
    pub alone_s: Vec<f64>,
}

impl Run {
    /// Time until the last process ended, s.
    pub fn makespan_s(&self) -> f64 {
        self.outcome.makespan_s
    }

    /// Mean time of a task over all applications, s.
    pub fn task_mean_s(&self) -> f64 {
        self.over_applications(|a| a.task_mean_s)
    }

    /// Mean over the applications of the variance of their tasks' times, s².
    pub fn task_variance_s2(&self) -> f64 {
        self.over_applications(|a| a.task_variance_s2)
    }

    /// Lowest instantaneous throughput of any application, bytes a second.
    pub fn least_throughput(&self) -> f64 {
        self.outcome.applications.iter().map(|a| a.least_throughput).fold(f64::INFINITY, f64::min)
    }

    /// Time of an application, s; infinite if it does not exist.
    pub fn time_s(&self, application: usize) -> f64 {
        self.outcome.applications.get(application).map_or(f64::INFINITY, |a| a.time_s)
    }

    /// Mean over the applications of time under contention by time alone; `None` if they did not run alone.
    pub fn interference(&self) -> Option<f64> {
        let n = self.alone_s.len();
        (n > 0).then(|| (0..n).map(|a| self.time_s(a) / self.alone_s[a]).sum::<f64>() / n as f64)
    }

    fn over_applications(&self, of: impl Fn(&impresario_sim::outcome::ApplicationOutcome) -> f64) -> f64 {
        let all = &self.outcome.applications;
        all.iter().map(of).sum::<f64>() / all.len().max(1) as f64
    }
}

/// All runs of some figures.
#[derive(Default, Debug)]
pub struct Campaign {
    /// Figure, cell, runs in the order of the repetitions.
    pub figures: BTreeMap<&'static str, BTreeMap<String, Vec<Run>>>,
    /// Distinct simulations.
    pub simulations: usize,
    /// Requests of applications simulated.
    pub operations: u64,
    /// Real time, s: the only machine-dependent value here; no report shows it.
    pub took_s: f64,
    /// Failed operations and violated laws, by cell; empty if there are none.
    pub complaints: Vec<String>,
}

/// Progress of a campaign.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    /// Simulations done.
    pub done: usize,
    /// Simulations in all.
    pub of: usize,
    /// Estimated time left; none at the start.
    pub left: Option<Duration>,
}

/// The alone scenario of each application of a scenario, a copy one after the other.
fn alone(scenario: &Scenario) -> Vec<Scenario> {
    let mut all = Vec::new();
    for a in &scenario.application {
        let one = impresario_sim::model::Application { copies: 1, start_s: 0.0, ..a.clone() };
        let lone = Scenario { application: vec![one], ..scenario.clone() };
        all.extend(std::iter::repeat_n(lone, a.copies as usize));
    }
    all
}

/// Work of a simulation in arbitrary units, for the estimate of the time left.
fn weight(scenario: &Scenario) -> f64 {
    let wire = |bytes: u64| match scenario.clients.request_bytes_max {
        0 => 1.0,
        max => (bytes as f64 / max as f64).max(1.0),
    };
    let stripes = |bytes: u64| (bytes as f64 / f64::from(scenario.servers.stripe_bytes)).max(1.0);
    let requests = scenario.application.iter().map(|a| {
        let each = wire(a.request_bytes).max(stripes(a.request_bytes)) * f64::from(a.regions.max(1));
        f64::from(a.copies) * f64::from(a.processes) * a.requests as f64 * each
    });
    1000.0 + requests.sum::<f64>()
}

/// A simulation to be run.
struct Job {
    scenario: Scenario,
    name: String,
}

/// Runs simulations, each distinct one once.
#[derive(Default)]
struct Jobs {
    all: Vec<Job>,
    known: HashMap<String, usize>,
}

impl Jobs {
    fn add(&mut self, scenario: Scenario, name: &str) -> Result<usize> {
        // Titles and assumptions do not affect the result.
        let bare = Scenario { title: String::new(), assumptions: Vec::new(), ..scenario };
        let key = serde_json::to_string(&bare).context("writing a scenario")?;
        let next = self.all.len();
        let at = *self.known.entry(key).or_insert(next);
        if at == next {
            self.all.push(Job { scenario: bare, name: name.into() });
        }
        Ok(at)
    }
}

/// Runs all cells of the figures. Reports progress to `step`; when `stop` is set, nothing new starts and the error says
/// that it was interrupted.
pub fn run(figures: &[&Figure], effort: &Effort, stop: &Stop, step: &mut dyn FnMut(Step)) -> Result<Campaign> {
    let cells: Vec<(&'static str, u32, Cell)> = figures
        .iter()
        .map(|f| {
            let n = effort.repetitions.unwrap_or(f.metadata.repetitions);
            Ok(f.cells(effort)?.into_iter().map(move |c| (f.id, n, c)))
        })
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect();
    run_cells(&cells, effort, stop, step)
}

/// Runs cells, each with its figure and repetitions.
pub fn run_cells(
    cells: &[(&'static str, u32, Cell)],
    effort: &Effort,
    stop: &Stop,
    step: &mut dyn FnMut(Step),
) -> Result<Campaign> {
    let began = Instant::now();
    let mut jobs = Jobs::default();
    let mut wanted: Vec<Vec<(usize, Vec<usize>)>> = Vec::new();
    for (figure, repetitions, cell) in cells {
        let name = format!("{figure}, {}", cell.key);
        let mut runs = Vec::new();
        for repetition in 0..u64::from(*repetitions) {
            let seeded = Scenario { seed: cell.scenario.seed + repetition, ..cell.scenario.clone() };
            let lone = if cell.alone { alone(&seeded) } else { Vec::new() };
            let lone = lone.into_iter().map(|s| jobs.add(s, &name)).collect::<Result<_>>()?;
            runs.push((jobs.add(seeded, &name)?, lone));
        }
        wanted.push(runs);
    }
    let outcomes = simulate(&jobs.all, effort.threads, stop, step)?;
    let mut campaign = Campaign { simulations: jobs.all.len(), ..Campaign::default() };
    campaign.operations = outcomes.iter().map(|o| o.operations).sum();
    for (job, outcome) in jobs.all.iter().zip(&outcomes) {
        if outcome.failed > 0 {
            campaign
                .complaints
                .push(format!("{} (seed {}): {} operations failed", job.name, outcome.seed, outcome.failed));
        }
        campaign
            .complaints
            .extend(outcome.violations.iter().map(|v| format!("{} (seed {}): {v}", job.name, outcome.seed)));
    }
    for ((figure, _, cell), runs) in cells.iter().zip(wanted) {
        let runs = runs.into_iter().map(|(at, lone)| Run {
            outcome: outcomes[at].clone(),
            alone_s: lone.iter().map(|l| outcomes[*l].applications.first().map_or(0.0, |a| a.time_s)).collect(),
        });
        campaign.figures.entry(figure).or_default().insert(cell.key.clone(), runs.collect());
    }
    campaign.took_s = began.elapsed().as_secs_f64();
    Ok(campaign)
}

fn simulate(jobs: &[Job], threads: usize, stop: &Stop, step: &mut dyn FnMut(Step)) -> Result<Vec<Outcome>> {
    // In random order, so that the estimate of the time left is based on a sample of all.
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    Random::new(1).shuffle(&mut order);
    let threads = if threads > 0 { threads } else { std::thread::available_parallelism().map_or(1, |n| n.get()) };
    let total: f64 = jobs.iter().map(|j| weight(&j.scenario)).sum();
    let (began, failed) = (Instant::now(), AtomicBool::new(false));
    let (mut results, mut done, mut share) = (Vec::new(), 0, 0.0);
    results.resize_with(jobs.len(), || None);
    let work = |nth: usize| {
        let go = !stop.is_set() && !failed.load(Ordering::Relaxed);
        go.then(|| one(&jobs[order[nth]]).inspect_err(|_| failed.store(true, Ordering::Relaxed)))
    };
    side_by_side(jobs.len(), threads, work, |nth, outcome| {
        (done, share) = (done + 1, share + weight(&jobs[order[nth]].scenario) / total);
        results[order[nth]] = Some(outcome);
        let left = (share > 0.01).then(|| began.elapsed().mul_f64((1.0 - share).max(0.0) / share));
        step(Step { done, of: jobs.len(), left });
    });
    // A failure is more informative than the interruption it caused.
    let found: Vec<Outcome> = results.into_iter().flatten().collect::<Result<_>>()?;
    if found.len() < jobs.len() {
        bail!("interrupted after {} of {} simulations", found.len(), jobs.len());
    }
    Ok(found)
}

fn one(job: &Job) -> Result<Outcome> {
    let outcome = impresario_sim::run(&job.scenario).with_context(|| job.name.clone())?;
    Ok(Outcome { series: Series::default(), picture: Vec::new(), ..outcome })
}

#[cfg(test)]
mod tests {
    use super::*;
    use impresario_sim::model::Application;

    fn small(processes: u32) -> Scenario {
        let a = Application { processes, copies: 2, requests: 3, ..Application::default() };
        Scenario { application: vec![a], ..Scenario::default() }
    }

    #[test]
    fn the_same_whatever_the_number_of_threads_and_equal_simulations_are_made_once() {
        let cells = [
            ("f", 2, Cell::and_alone("a", small(2))),
            ("f", 2, Cell::new("b", small(3))),
            ("g", 2, Cell::new("a again", small(2))),
        ];
        let of = |threads| {
            let effort = Effort { threads, ..Effort::default() };
            run_cells(&cells, &effort, &Stop::new(), &mut |_| {}).unwrap()
        };
        let (one, three) = (of(1), of(3));
        assert_eq!(one.figures, three.figures);
        // Two repetitions of: a, alone (once for both copies), b; "a again" is a.
        assert_eq!(one.simulations, 6);
        assert_eq!(one.complaints, Vec::<String>::new());
        let a = &one.figures["f"]["a"];
        assert_eq!(a[0].outcome, one.figures["g"]["a again"][0].outcome);
        assert_ne!(a[0].outcome.makespan_s, a[1].outcome.makespan_s, "another seed");
        assert_eq!(a[0].alone_s.len(), 2);
        assert!(a[0].interference().unwrap() > 1.0, "two applications share the disks");
        assert_eq!(one.figures["f"]["b"][0].interference(), None);
    }

    #[test]
    fn a_stopped_campaign_says_so() {
        let stop = Stop::new();
        stop.set();
        let cells = [("f", 1, Cell::new("a", small(1)))];
        let error = run_cells(&cells, &Effort::default(), &stop, &mut |_| {}).unwrap_err();
        assert!(error.to_string().starts_with("interrupted after 0 of 1"), "{error}");
    }

    #[test]
    fn less_volume_keeps_the_ratio_to_the_cache() {
        let mut s = small(1);
        s.application[0].requests = 1024;
        s.servers.cache_bytes = 64 << 20;
        Effort { divide: 16, ..Effort::default() }.thin(&mut s);
        assert_eq!((s.application[0].requests, s.servers.cache_bytes), (64, 4 << 20));
        let mut one = small(1);
        (one.application[0].requests, one.application[0].request_bytes) = (1, 1 << 20);
        Effort { divide: 16, ..Effort::default() }.thin(&mut one);
        assert_eq!((one.application[0].requests, one.application[0].request_bytes), (1, 64 << 10));
    }
}
