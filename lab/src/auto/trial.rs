//! One simulation under one policy: its costs, and what `auto` observed.

use anyhow::{Context, Result};
use impresario_sched::PolicySpec;
use impresario_sched::policy::auto::Observation;
use impresario_sched::policy::auto::table::NodeRole;
use impresario_sim::{Budget, Outcome, Scenario, Simulation};

/// The four quantities that an objective may minimise.
pub type Costs = [f64; 4];

/// The result of one simulation.
#[derive(Clone, PartialEq, Debug)]
pub struct Trial {
    /// Makespan, mean time of a process, variance of their times, inverse of the lowest throughput of an application.
    pub costs: Costs,
    /// Windows of observations, of all servers.
    pub seen: Vec<Observation>,
}

/// Maximum observations kept of a run.
const SEEN_MAX: usize = 8;

/// An `auto` that always chooses one policy at a place, and observes.
pub fn forced(policy: &str, place: NodeRole) -> PolicySpec {
    let place = if place == NodeRole::IoNode { "io-node" } else { "data" };
    let rule = |name: &str, condition: &str, policy: &str| {
        format!("[[rule]]\nname = \"{name}\"\n{condition}choice = [{{ policy = '''{policy}''' }}]\n")
    };
    let at = format!("place = \"{place}\"\n");
    // A rule that never matches makes it observe; the last rule of a table is for every place.
    let never = rule("never", &format!("{at}reads = {{ from = 9.0 }}\n"), policy);
    let table = format!("version = 1\n{never}{}{}", rule("always", &at, policy), rule("elsewhere", "", "fifo"));
    PolicySpec::named("auto").with("table", table)
}

/// The costs of the applications from `first` on, as many as `count`.
pub fn costs(outcome: &Outcome, first: usize, count: usize) -> Costs {
    let all = &outcome.applications[first..first + count];
    let mean =
        |of: fn(&impresario_sim::outcome::ApplicationOutcome) -> f64| all.iter().map(of).sum::<f64>() / count as f64;
    let makespan = all.iter().map(|a| a.time_s).fold(0.0, f64::max);
    let least = all.iter().map(|a| a.least_throughput).fold(f64::INFINITY, f64::min);
    [makespan, mean(|a| a.task_mean_s), mean(|a| a.task_variance_s2), 1.0 / least.max(1.0)]
}

/// Runs a scenario, and reads the observations of the policies at `place` if given.
pub fn run(scenario: &Scenario, place: Option<NodeRole>) -> Result<Trial> {
    let mut simulation = Simulation::new(scenario).with_context(|| scenario.title.clone())?;
    let mut seen: Vec<Observation> = Vec::new();
    if let Some(place) = place {
        let mut next = 0.02;
        // The first windows decide for a while, and differ from later ones.
        let mut first = false;
        loop {
            let progress = simulation.step_until(Budget::Events(if first { 1_000 } else { 100 }));
            if progress.done {
                break;
            }
            if first && (progress.fraction < next || seen.len() >= SEEN_MAX) {
                continue;
            }
            let told = simulation.chosen().into_iter().filter(|(_, chosen)| chosen.place == place);
            let fresh: Vec<Observation> =
                told.filter_map(|(_, chosen)| chosen.observed).filter(|o| o.requests >= 24).take(2).collect();
            if first || !fresh.is_empty() {
                first = true;
                next = progress.fraction * 1.4 + 0.02;
                seen.extend(fresh);
            }
        }
    }
    let outcome = simulation.finish();
    anyhow::ensure!(outcome.failed == 0, "{}: {} operations failed", scenario.title, outcome.failed);
    anyhow::ensure!(outcome.violations.is_empty(), "{}: {:?}", scenario.title, outcome.violations);
    Ok(Trial { costs: costs(&outcome, 0, outcome.applications.len()), seen })
}
