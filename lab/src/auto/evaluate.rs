//! Evaluates the choice outside its training set: against every fixed policy, in other situations and over a schedule
//! of phases.

use std::fmt::Write;

use anyhow::{Result, anyhow};
use impresario_sched::policy::{self, POLICIES};
use impresario_sched::{Core, CoreConfig, PolicySpec};
use impresario_sim::sweep::side_by_side;
use impresario_sim::{Budget, Simulation};
use serde::{Serialize, Serializer};

use super::situation::{PHASE_S, Situation, schedule};
use super::train::DATA;
use super::trial::{self, costs};

/// Every policy that serves one lane, with defaults. Policies that need rules have none.
pub fn fixed() -> Vec<PolicySpec> {
    let all = POLICIES.iter().filter(|p| p.name != "auto").map(|p| PolicySpec::named(p.name));
    all.filter(|spec| policy::check(spec, 1).is_ok()).collect()
}

/// Times of several systems in several cases, s, and how often `auto` switched.
#[derive(Serialize)]
pub struct Times {
    /// The systems; the first is `auto`.
    #[serde(serialize_with = "names")]
    pub systems: Vec<PolicySpec>,
    /// So many of them after `auto` compete; the others are candidates of the table, to explain.
    #[serde(skip)]
    pub fixed: usize,
    /// The cases.
    pub cases: Vec<String>,
    /// By case and system, mean over the seeds.
    pub times_s: Vec<Vec<f64>>,
}

impl Times {
    /// The best fixed system of a case and its time.
    fn best(&self, case: usize) -> (usize, f64) {
        let all = self.times_s[case].iter().copied().enumerate().skip(1).take(self.fixed);
        all.reduce(|a, b| if b.1 < a.1 { b } else { a }).unwrap_or((0, f64::NAN))
    }

    /// Time of the best fixed system relative to that of a system.
    fn ratio(&self, case: usize, system: usize) -> f64 {
        self.best(case).1 / self.times_s[case][system]
    }

    /// Sum over the cases, s.
    fn whole_s(&self, system: usize) -> f64 {
        self.times_s.iter().map(|times| times[system]).sum()
    }

    /// Geometric mean over the cases of the ratio to the best, and the lowest ratio.
    fn mean_and_least(&self, system: usize) -> (f64, f64) {
        let ratios: Vec<f64> = (0..self.cases.len()).map(|case| self.ratio(case, system)).collect();
        let mean = (ratios.iter().map(|r| r.ln()).sum::<f64>() / ratios.len() as f64).exp();
        (mean, ratios.into_iter().fold(f64::INFINITY, f64::min))
    }

    /// The systems by their time over the whole, or by their mean ratio.
    fn order(&self, by: impl Fn(usize) -> f64) -> Vec<usize> {
        let mut order: Vec<usize> = (0..=self.fixed).collect();
        order.sort_by(|a, b| by(*a).total_cmp(&by(*b)));
        order
    }

    /// The phases of a schedule, each compared with the best fixed policy, and the whole.
    pub fn schedule_text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        _ = writeln!(
            out,
            "| phase | auto, s | best fixed policy | its time, s | auto by it |\n|---|---:|---|---:|---:|"
        );
        for (case, name) in self.cases.iter().enumerate() {
            let (best, time_s) = self.best(case);
            let (auto_s, percent) = (self.times_s[case][0], 100.0 * self.ratio(case, 0));
            _ = writeln!(
                out,
                "| {name} | {auto_s:.2} | `{}` | {time_s:.2} | {percent:.1} % |",
                self.systems[best].name
            );
        }
        _ = writeln!(out, "\n| system | whole schedule, s | by auto |\n|---|---:|---:|");
        for system in self.order(|system| self.whole_s(system)) {
            let whole_s = self.whole_s(system);
            _ = writeln!(
                out,
                "| `{}` | {whole_s:.2} | × {:.2} |",
                name(&self.systems[system]),
                whole_s / self.whole_s(0)
            );
        }
        out
    }

    /// Where `auto` lost time in each phase: its own time by that of its last choice alone is what recognising, switching
    /// and trying cost; that by the best fixed policy's is the wrong choice. `last`: the first data server's last choices.
    fn losses(&self, last: &[PolicySpec]) -> String {
        let mut out = String::new();
        for (case, last) in last.iter().enumerate() {
            let (best, best_s) = self.best(case);
            let least = |a: (usize, f64), b: (usize, f64)| if b.1 < a.1 { b } else { a };
            let all = self.times_s[case].iter().copied().enumerate().skip(1).reduce(least);
            let alone = self
                .systems
                .iter()
                .position(|system| written_out(system).as_ref() == Some(last))
                .map(|at| self.times_s[case][at]);
            let percent = |part: f64| format!("{:.1} %", 100.0 * part);
            // Writing to a string cannot fail.
            _ = writeln!(
                out,
                "- {}: {} of `{}`; last choice {last}: {} of it alone, which is {} of the best; best candidate {}",
                self.cases[case],
                percent(self.ratio(case, 0)),
                self.systems[best].name,
                alone.map_or("?".into(), |alone_s| percent(alone_s / self.times_s[case][0])),
                alone.map_or("?".into(), |alone_s| percent(best_s / alone_s)),
                all.map_or("?".into(), |(at, s)| format!("{}: {}", self.systems[at], percent(best_s / s))),
            );
        }
        out
    }

    /// Situations: how close each system comes to the best fixed policy.
    pub fn situations_text(&self) -> String {
        let mut out = String::new();
        _ = writeln!(out, "| system | of the best fixed policy's speed, mean | least |\n|---|---:|---:|");
        for system in self.order(|system| -self.mean_and_least(system).0) {
            let (mean, least) = self.mean_and_least(system);
            _ = writeln!(out, "| `{}` | {:.1} % | {:.1} % |", name(&self.systems[system]), 100.0 * mean, 100.0 * least);
        }
        let worst = {
            let mut order: Vec<usize> = (0..self.cases.len()).collect();
            order.sort_by(|a, b| self.ratio(*a, 0).total_cmp(&self.ratio(*b, 0)));
            order
        };
        _ = writeln!(out, "\n`auto` is farthest from the best in:");
        for case in worst.into_iter().take(6) {
            let best = name(&self.systems[self.best(case).0]);
            _ = writeln!(out, "- {}: {:.1} % of `{best}`", self.cases[case], 100.0 * self.ratio(case, 0));
        }
        out
    }
}

/// A policy with all its parameters, as `auto` tells it.
fn written_out(spec: &PolicySpec) -> Option<PolicySpec> {
    Core::new(CoreConfig::single_lane(1), spec).ok().map(|core| core.acting().0)
}

fn names<S: Serializer>(systems: &[PolicySpec], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(systems.iter().map(name))
}

fn name(spec: &PolicySpec) -> String {
    // The text of a table is long.
    if spec.name == "auto" { spec.name.clone() } else { spec.to_string() }
}

/// The goal in each phase: this part of the speed of the best fixed policy.
const GOAL: f64 = 0.95;

/// Several schedules: how close each system comes to the best fixed policy of each phase, and how often `auto` meets its
/// goals.
pub fn drawn_text(schedules: Vec<Times>) -> String {
    let count = schedules.len();
    // Over each whole: the time of the best fixed policy by that of `auto`.
    let whole = |times: &Times| {
        let fixed = (1..=times.fixed).map(|system| times.whole_s(system));
        fixed.fold(f64::INFINITY, f64::min) / times.whole_s(0)
    };
    let wholes: Vec<f64> = schedules.iter().map(whole).collect();
    let ahead = wholes.iter().filter(|ratio| **ratio > 1.0).count();
    let mean = (wholes.iter().map(|ratio| ratio.ln()).sum::<f64>() / count.max(1) as f64).exp();
    let Some(all) = schedules.into_iter().reduce(|mut all, more| {
        all.cases.extend(more.cases);
        all.times_s.extend(more.times_s);
        all
    }) else {
        return String::new();
    };
    let reached = (0..all.cases.len()).filter(|case| all.ratio(*case, 0) >= GOAL).count();
    let mut out = all.situations_text();
    // Writing to a string cannot fail.
    _ = writeln!(
        out,
        "\n`auto` reaches {:.0} % in {reached} of {} phases, and is ahead of every fixed policy over {ahead} of {count} \
         schedules ({:.1} % of the best one's speed on average).",
        100.0 * GOAL,
        all.cases.len(),
        100.0 * mean
    );
    out
}

/// Every change of policy within a phase, in words: runs the simulation until `until_s`.
fn changes(simulation: &mut Simulation, begun_s: f64, until_s: f64, out: &mut String) {
    let now = |simulation: &Simulation| simulation.chosen().into_iter().map(|(_, chosen)| chosen.switches).collect();
    let mut switches: Vec<u64> = now(simulation);
    loop {
        let progress = simulation.step_until(Budget::Events(100));
        if progress.done || progress.virtual_s >= until_s {
            return;
        }
        for (at, (server, chosen)) in simulation.chosen().into_iter().enumerate() {
            if switches.get(at).is_some_and(|switches| *switches != chosen.switches) {
                let after_s = progress.virtual_s - begun_s;
                // Writing to a string cannot fail.
                _ = writeln!(
                    out,
                    "  - {after_s:.3} s, {server}: {}, {} (undone: {}), {:?}",
                    chosen.policy.name,
                    chosen.rule,
                    chosen.undone.join(", "),
                    chosen.observed
                );
            }
        }
        switches = now(simulation);
    }
}

/// What to tell of the choices of `auto`, beside the times.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Told {
    /// The choice at the end of each phase.
    Ends,
    /// Every change of policy.
    Changes,
    /// Where time is lost: every candidate of the table runs too.
    Losses,
}

/// Runs every system over the schedule of phases with every seed. Also returns what `auto` chose in each phase, in
/// words.
pub fn over_phases(auto: &PolicySpec, phases: &[Situation], seeds: &[u64], told: Told) -> Result<(Times, String)> {
    let mut systems: Vec<PolicySpec> = std::iter::once(auto.clone()).chain(fixed()).collect();
    let fixed = systems.len() - 1;
    if told == Told::Losses {
        let candidates = DATA.iter().filter_map(|text| text.parse::<PolicySpec>().ok());
        let more: Vec<PolicySpec> = candidates.filter(|spec| !systems.contains(spec)).collect();
        systems.extend(more);
    }
    let run = |system: usize, seed: u64| -> Result<(Vec<f64>, String, Vec<PolicySpec>)> {
        let mut simulation = Simulation::new(&schedule(phases, &systems[system], seed))?;
        let (mut chosen, mut last) = (String::new(), Vec::new());
        for (at, phase) in phases.iter().enumerate().filter(|_| system == 0) {
            let begun_s = at as f64 * PHASE_S;
            if told == Told::Changes {
                _ = writeln!(chosen, "- {}", phase.name);
                changes(&mut simulation, begun_s, begun_s + PHASE_S - 1.0, &mut chosen);
                continue;
            }
            // At the end of a phase.
            simulation.step_until(Budget::VirtualS(begun_s + PHASE_S - 1.0));
            let now = simulation.chosen();
            last.extend(now.first().map(|(_, chosen)| chosen.policy.clone()));
            let list: Vec<String> =
                now.iter().map(|(_, c)| format!("{} ({} switches)", c.policy.name, c.switches)).collect();
            _ = writeln!(chosen, "- {}: {}", phase.name, list.join(", "));
        }
        let outcome = simulation.finish();
        anyhow::ensure!(outcome.failed == 0, "{}: {} operations failed", systems[system], outcome.failed);
        let mut first = 0;
        let mut times = Vec::new();
        for phase in phases {
            let count = phase.load.copies as usize;
            times.push(costs(&outcome, first, count)[0]);
            anyhow::ensure!(
                times[times.len() - 1] < PHASE_S,
                "{}: a phase is longer than {PHASE_S} s",
                systems[system]
            );
            first += count;
        }
        Ok((times, chosen, last))
    };
    let results = all_of(systems.len() * seeds.len(), |nth| run(nth / seeds.len(), seeds[nth % seeds.len()]))?;
    let mut times_s = vec![vec![0.0; systems.len()]; phases.len()];
    for (nth, (times, ..)) in results.iter().enumerate() {
        for (phase, time_s) in times.iter().enumerate() {
            times_s[phase][nth / seeds.len()] += time_s / seeds.len() as f64;
        }
    }
    let (_, mut chosen, last) = results.into_iter().next().unwrap_or_default();
    let times = Times { systems, fixed, cases: phases.iter().map(|p| p.name.clone()).collect(), times_s };
    if told == Told::Losses {
        chosen = times.losses(&last);
    }
    Ok((times, chosen))
}

/// Runs every system in every situation with every seed.
pub fn over_situations(
    auto: &PolicySpec,
    fixed: &[PolicySpec],
    situations: &[Situation],
    seeds: &[u64],
) -> Result<Times> {
    let systems: Vec<PolicySpec> = std::iter::once(auto).chain(fixed).cloned().collect();
    let per = systems.len() * seeds.len();
    let run = |nth: usize| {
        let (situation, rest) = (&situations[nth / per], nth % per);
        let scenario = situation.scenario(&systems[rest / seeds.len()], seeds[rest % seeds.len()]);
        trial::run(&scenario, None).map(|trial| trial.costs[0])
    };
    let results = all_of(situations.len() * per, run)?;
    let mut times_s = vec![vec![0.0; systems.len()]; situations.len()];
    for (nth, time_s) in results.into_iter().enumerate() {
        times_s[nth / per][nth % per / seeds.len()] += time_s / seeds.len() as f64;
    }
    Ok(Times { fixed: fixed.len(), systems, cases: situations.iter().map(|s| s.name.clone()).collect(), times_s })
}

/// The results of pieces of work done in parallel.
fn all_of<T: Send>(count: usize, work: impl Fn(usize) -> Result<T> + Sync) -> Result<Vec<T>> {
    let mut results = Vec::new();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    side_by_side(count, threads, |nth| Some(work(nth)), |_, result| results.push(result));
    anyhow::ensure!(results.len() == count, "not everything was run");
    results.into_iter().collect::<Result<Vec<T>>>().map_err(|e| anyhow!("{e:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auto::OTHER_SEEDS;
    use crate::auto::situation::phases;
    use impresario_sched::policy::auto::table::DecisionTable;

    fn document() -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../doc/WHICH-POLICY.md");
        std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"))
    }

    fn cells(line: &str) -> Vec<&str> {
        line.trim_matches('|').split('|').map(str::trim).collect()
    }

    /// What the schedule of phases takes under `auto` is what the document says, to 2 %, and its other columns fit together.
    #[test]
    fn the_document_has_the_times_of_the_schedule_under_auto() {
        let (phases, text) = (phases(), document());
        let seeds: Vec<u64> = (0..3).map(|seed| OTHER_SEEDS + seed).collect();
        let times = |nth: usize| -> Result<Vec<f64>> {
            let outcome = Simulation::new(&schedule(&phases, &PolicySpec::named("auto"), seeds[nth]))?.finish();
            let first = |phase: usize| phases[..phase].iter().map(|p| p.load.copies as usize).sum();
            let time = |phase: usize| costs(&outcome, first(phase), phases[phase].load.copies as usize)[0];
            Ok((0..phases.len()).map(time).collect())
        };
        let times = all_of(seeds.len(), times).unwrap();
        let mut whole_s = 0.0;
        for (at, phase) in phases.iter().enumerate() {
            let name = phase.name.replace("fileperprocess", "file per process");
            let row = text.lines().map(cells).find(|row| row[0] == name);
            let row = row.unwrap_or_else(|| panic!("no row for {name}"));
            let number =
                |cell: &str| cell.trim_end_matches(" %").parse::<f64>().unwrap_or_else(|e| panic!("{row:?}: {e}"));
            let (told_s, best_s, percent) = (number(row[1]), number(row[3]), number(row[4]));
            let auto_s = times.iter().map(|times| times[at]).sum::<f64>() / seeds.len() as f64;
            assert!(
                (auto_s / told_s - 1.0).abs() < 0.02,
                "{}: {auto_s:.3} s, and the document says {told_s}",
                phase.name
            );
            // Rounding of both times.
            let slack = percent * (0.005 / told_s + 0.005 / best_s) + 0.1;
            assert!(
                (100.0 * best_s / told_s - percent).abs() < slack,
                "{row:?}: the ratio does not follow from the times"
            );
            let best = row[2].trim_matches('`');
            assert!(fixed().iter().any(|spec| spec.name == best), "{best} is no fixed policy");
            whole_s += told_s;
        }
        let told = text.split_once("over the whole (").and_then(|(_, rest)| rest.split_once(" s;"));
        let told_s: f64 = told.expect("the time of the whole").0.parse().unwrap();
        assert!((whole_s - told_s).abs() < 0.06, "the rows add up to {whole_s:.2} s, and the document says {told_s}");
    }

    /// The document is a summary, and what it says of the shipped table and of policies is so.
    #[test]
    fn the_document_fits_the_shipped_table() {
        let text = document();
        assert!(text.lines().count() <= 70, "a summary of a page; what was tried is in lab/README.md");
        let table = include_str!("../../../crates/sched/src/policy/auto/table.toml");
        let table = DecisionTable::parse(table).unwrap();
        let first = |name: &str| {
            let rule =
                table.rule.iter().find(|rule| rule.name.contains(name)).unwrap_or_else(|| panic!("no rule {name}"));
            rule.choice[0].policy.clone()
        };
        assert!(text.contains("or as `wscan`") && first("nothing observed yet, or nothing trained") == "wscan");
        assert!(text.contains("`mlf` with `dwell_us`") && first("distance bytes below").contains("mlf dwell_us="));
        assert!(text.contains("which acts as `none`") && first("order of its own below") == "none");
        assert!(text.contains("reads below 20 kB") && first("request bytes below 20000").starts_with("twins "));
        assert!(text.contains(&format!("under {} policies", DATA.len())), "{} candidates", DATA.len());
        let names =
            text.split('`').skip(1).step_by(2).filter(|n| n.chars().all(|c| c.is_ascii_lowercase() || c == '-'));
        let known = |name: &str| POLICIES.iter().any(|p| p.name == name);
        let unknown: Vec<&str> = names.filter(|name| !known(name)).collect();
        assert!(unknown.is_empty(), "no policies: {unknown:?}");
    }
}
