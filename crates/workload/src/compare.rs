//! Compares systems in one experiment: interleaved in random order, paired, with intervals and verdicts.
//!
//! A *pair* is one run of every system over the same files, one after the other in random order. The gain of a system
//! over another in a pair is 1 − T_new / T_base on makespan; the result is the mean over the pairs with its t interval,
//! per case and for the mean over the cases.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::access::{FilePlace, Moved};
use crate::dataset::DataSet;
use crate::plan::Workload;
use crate::progress::Progress as Line;
use crate::result::{AppResult, RunResult};
use crate::rounds::{shuffled, tried};
use crate::runner::{RunOptions, run, run_verified};
use crate::stats::{self, Interval, Looks, Verdict, at_least, mean, no_worse_than};
use crate::stop::Stop;
use crate::system::{Switch, System};
use impresario_base::Random;
use impresario_base::units::show_bytes;

/// One workload of an experiment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Case {
    /// Short name for tables.
    pub name: String,
    /// The workload.
    pub workload: Workload,
}

/// A claim about two systems, by name.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Claim {
    /// The system claimed to be better.
    pub new: String,
    /// The baseline.
    pub base: String,
    /// How much better.
    pub bound: Bound,
}

/// The bound of a claim, as a fraction of the base's time.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Bound {
    /// The mean gain over the cases is at least this.
    AverageAtLeast(f64),
    /// Every case's gain is at least this.
    EachAtLeast(f64),
    /// No case is slower by more than this.
    NoCaseWorseThan(f64),
}

/// An experiment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Experiment {
    /// For people.
    pub title: String,
    /// The workloads.
    pub cases: Vec<Case>,
    /// The systems; names are unique.
    pub systems: Vec<System>,
    /// Names of the systems that gains are relative to.
    pub baselines: Vec<String>,
    /// What is claimed.
    pub claims: Vec<Claim>,
    /// Minimum pairs.
    pub pairs: u32,
    /// Maximum pairs, while a claim is unresolved.
    pub pairs_max: u32,
    /// No further pair starts after this time, s.
    pub time_max_s: f64,
    /// Attempts at a run that does not count; after the last one its pair is left out.
    pub tries: u32,
    /// Cases and systems in random order within each pair; otherwise as listed, for demonstrations only.
    pub shuffle: bool,
    /// Seed of the random order.
    pub seed: u64,
}

impl Experiment {
    /// When its claims are judged, and with which confidence.
    fn looks(&self) -> Looks {
        Looks::new(self.pairs, self.pairs_max)
    }
}

/// One run of an experiment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Trial {
    /// Index of the case.
    pub case: usize,
    /// Index of the system.
    pub system: usize,
    /// Number of the pair, from 0.
    pub pair: u32,
    /// Runs started before it.
    pub position: u32,
    /// Batches handed to a disk at once; absent: no limit.
    pub depth: Option<u32>,
    /// Its result.
    pub result: RunResult,
}

/// A system's gain over another.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Gain {
    /// Name of the case; absent: the mean over the cases.
    pub case: Option<String>,
    /// The system.
    pub new: String,
    /// Over which.
    pub base: String,
    /// As a share of the base's time, and its interval over the pairs.
    pub gain: Interval,
}

/// A claim and its result.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Judged {
    /// In words.
    pub text: String,
    /// The verdict.
    pub verdict: Verdict,
}

/// The results of an experiment.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The experiment.
    pub experiment: Experiment,
    /// Every run, those that do not count included.
    pub trials: Vec<Trial>,
    /// Gains over the baselines.
    pub gains: Vec<Gain>,
    /// The claims.
    pub claims: Vec<Judged>,
    /// The placement of each application's files, by case; empty if the storage does not report it.
    pub places: Vec<Vec<Vec<FilePlace>>>,
    /// Pairs completed.
    pub pairs: u32,
    /// The times were made on modelled disks.
    pub modelled: bool,
    /// It was stopped; the unfinished pair is left out.
    pub stopped: bool,
    /// What could not be removed or set back in the end, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left: Vec<String>,
}

/// Progress of an experiment.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Runs made, including this one once it has a result; repetitions of runs that do not count are excluded.
    pub done: u32,
    /// Minimum runs.
    pub wanted: u32,
    /// Pair, from 1.
    pub pair: u32,
    /// The case.
    pub case: &'a str,
    /// The system.
    pub system: &'a str,
    /// The run's result; absent before it.
    pub result: Option<&'a RunResult>,
    /// Estimated time left, if known.
    pub left: Option<Duration>,
}

/// Runs an experiment; `progress` is called before and after every run. The stop flag ends it with the pairs completed
/// so far; it is an error only before the first is complete. However it ends, the servers get back the
/// policies that they had, and its files are removed.
pub fn compare(
    target: &dyn Switch,
    experiment: &Experiment,
    stop: &Stop,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome> {
    let mut sets = Vec::new();
    for case in &experiment.cases {
        case.workload.check().map_err(|e| anyhow::anyhow!("case {}: {e}", case.name))?;
        sets.push(DataSet::new(&case.workload)?);
    }
    let before = target.settings().context("asking for the servers' policies")?;
    let mut line = Line::new();
    let mut not_set_back = None;
    let measure = |sets: &mut [DataSet]| {
        let result = measure(target, experiment, sets, stop, progress);
        if stop.is_set() {
            line.show("stopping: setting policies back and removing files");
        }
        // Before the files are removed: the wrong policies are worse than files, should that be ended early, too.
        not_set_back = target.set_back(&before).err();
        result
    };
    let (result, mut left) = DataSet::measured(target, &mut sets, measure);
    line.end();
    left.extend(not_set_back.map(|e| format!("the servers did not get back all policies that they had: {e:#}")));
    match result {
        Ok(outcome) => Ok(Outcome { left, ..outcome }),
        Err(error) if left.is_empty() => Err(error),
        Err(error) => Err(error.context(left.join("; "))),
    }
}

/// What the experiment is, between reading the policies and setting them back.
fn measure(
    target: &dyn Switch,
    experiment: &Experiment,
    sets: &mut [DataSet],
    stop: &Stop,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Outcome> {
    let began = Instant::now();
    for (case, set) in experiment.cases.iter().zip(&mut *sets) {
        set.prepare(target, stop).with_context(|| format!("preparing the files of case {}", case.name))?;
    }
    let mut outcome = Outcome {
        experiment: experiment.clone(),
        trials: Vec::new(),
        gains: Vec::new(),
        claims: Vec::new(),
        places: Vec::new(),
        pairs: 0,
        modelled: false,
        stopped: false,
        left: Vec::new(),
    };
    for set in &*sets {
        outcome.places.push(set.places(target)?);
    }
    // By case: traces of a run of it.
    let mut traces: Vec<Vec<PathBuf>> = vec![Vec::new(); sets.len()];
    if let Some(system) = experiment.systems.iter().find(|s| s.recorded) {
        for ((case, set), traces) in experiment.cases.iter().zip(&mut *sets).zip(&mut traces) {
            *traces = recorded_run(target, system, case, set, stop)?;
        }
    }
    let per_pair = (experiment.cases.len() * experiment.systems.len()) as u32;
    let running = Instant::now();
    let mut random = Random::new(experiment.seed);
    let mut done = 0;
    'pairs: while outcome.wants_more(began.elapsed()) {
        let pair = outcome.pairs;
        let mut order = |count: usize| match experiment.shuffle {
            true => shuffled(count, &mut random),
            false => (0..count).collect(),
        };
        for case in order(experiment.cases.len()) {
            for system in order(experiment.systems.len()) {
                let left = (done > 0).then(|| {
                    let rest = (per_pair * experiment.pairs.max(pair + 1)).saturating_sub(done);
                    running.elapsed() / done * rest
                });
                let mut report = Progress {
                    done,
                    wanted: per_pair * experiment.pairs.max(pair + 1),
                    pair: pair + 1,
                    case: &experiment.cases[case].name,
                    system: &experiment.systems[system].name,
                    result: None,
                    left,
                };
                progress(report);
                let mut position = outcome.trials.len() as u32;
                let made = tried(
                    experiment.tries,
                    |trial: &Trial| trial.result.counts(),
                    || {
                        let (of_case, place) = ((&mut sets[case], traces[case].as_slice()), (case, system, pair));
                        let trial = one_trial(target, experiment, of_case, place, position, stop)?;
                        position += 1;
                        Ok(trial)
                    },
                );
                match made {
                    Err(_) if stop.is_set() && pair > 0 => {
                        outcome.trials.retain(|t| t.pair < pair);
                        outcome.stopped = true;
                        break 'pairs;
                    }
                    made => outcome.trials.extend(made?),
                }
                done += 1;
                report.done = done;
                report.result = outcome.trials.last().map(|t| &t.result);
                progress(report);
            }
        }
        outcome.pairs += 1;
        outcome.judge();
    }
    outcome.modelled = outcome.trials.iter().any(|t| t.result.modelled());
    Ok(outcome)
}

/// Runs a case while the servers record it; returns the traces' paths.
fn recorded_run(
    target: &dyn Switch,
    system: &System,
    case: &Case,
    set: &mut DataSet,
    stop: &Stop,
) -> Result<Vec<PathBuf>> {
    let what = || format!("recording a run of {} under {}", case.name, system.name);
    target.switch(system).with_context(what)?;
    target.begin_recording().with_context(what)?;
    run(target, set, &case.workload, &RunOptions::default(), stop).with_context(what)?;
    target.end_recording().with_context(what)
}

/// Runs one system on one case.
fn one_trial(
    target: &dyn Switch,
    experiment: &Experiment,
    (set, traces): (&mut DataSet, &[PathBuf]),
    (case, system, pair): (usize, usize, u32),
    position: u32,
    stop: &Stop,
) -> Result<Trial> {
    let (c, s) = (&experiment.cases[case], &experiment.systems[system]);
    let what = || format!("{} under {}, pair {}", c.name, s.name, pair + 1);
    target.switch(s).with_context(what)?;
    if experiment.systems.iter().any(|s| s.recorded) {
        target.foretell(if s.recorded { traces } else { &[] }).with_context(what)?;
    }
    let depth = target.depth()?;
    let options = RunOptions { pair, ..RunOptions::default() };
    let result = run_verified(target, set, &c.workload, &options, stop).with_context(what)?;
    Ok(Trial { case, system, pair, position, depth, result })
}

impl Outcome {
    /// Whether another pair is needed: the minimum is not reached, or there is time, and this is no time to look at claims or one
    /// is unresolved.
    fn wants_more(&self, spent: Duration) -> bool {
        let e = &self.experiment;
        if self.pairs < e.pairs.max(1) {
            return true;
        }
        let unresolved = || self.claims.iter().any(|c| c.verdict == Verdict::Unresolved);
        let looks = e.looks();
        let is_over = spent.as_secs_f64() >= e.time_max_s || looks.next(self.pairs).is_none() || e.claims.is_empty();
        !is_over && (!looks.is_at(self.pairs) || unresolved())
    }

    fn index(&self, system: &str) -> Option<usize> {
        self.experiment.systems.iter().position(|s| s.name == system)
    }

    /// The makespan of a pair's counting run, s.
    pub fn makespan(&self, case: usize, system: usize, pair: u32) -> Option<f64> {
        let own = |t: &&Trial| (t.case, t.system, t.pair) == (case, system, pair) && t.result.counts();
        self.trials.iter().find(own).map(|t| t.result.makespan_s)
    }

    /// Gain per pair; `None` where one of the two runs does not count.
    fn pair_gains(&self, case: usize, new: usize, base: usize) -> Vec<Option<f64>> {
        let gain = |pair| Some(1.0 - self.makespan(case, new, pair)? / self.makespan(case, base, pair)?);
        (0..self.pairs).map(gain).collect()
    }

    /// A system's gain over another in one case, of the pairs that count.
    fn case_gains(&self, case: usize, new: usize, base: usize) -> Vec<f64> {
        self.pair_gains(case, new, base).into_iter().flatten().collect()
    }

    /// The mean gain over the cases: one value per pair in which all of them count.
    fn average_gains(&self, new: usize, base: usize) -> Vec<f64> {
        let by_case: Vec<_> = (0..self.experiment.cases.len()).map(|c| self.pair_gains(c, new, base)).collect();
        let whole = |pair: usize| by_case.iter().map(|gains| gains[pair]).collect::<Option<Vec<f64>>>();
        (0..self.pairs as usize).filter_map(|p| whole(p).map(|g| mean(&g))).collect()
    }

    /// A system's gain over another in one case.
    pub fn case_gain(&self, case: usize, new: usize, base: usize) -> Interval {
        Interval::of(&self.case_gains(case, new, base))
    }

    /// The mean gain over the cases.
    pub fn average_gain(&self, new: usize, base: usize) -> Interval {
        Interval::of(&self.average_gains(new, base))
    }

    /// Counting runs of a system on a case.
    pub fn counted(&self, case: usize, system: usize) -> Vec<&Trial> {
        self.trials.iter().filter(|t| t.case == case && t.system == system && t.result.counts()).collect()
    }

    /// Computes gains and verdicts from the trials.
    pub fn judge(&mut self) {
        let e = &self.experiment;
        let mut gains = Vec::new();
        for base in e.baselines.iter().filter_map(|b| self.index(b)) {
            for new in (0..e.systems.len()).filter(|s| *s != base) {
                let names = (e.systems[new].name.clone(), e.systems[base].name.clone());
                let gain =
                    |case: Option<String>, gain| Gain { case, new: names.0.clone(), base: names.1.clone(), gain };
                for (c, case) in e.cases.iter().enumerate() {
                    gains.push(gain(Some(case.name.clone()), self.case_gain(c, new, base)));
                }
                if e.cases.len() > 1 {
                    gains.push(gain(None, self.average_gain(new, base)));
                }
            }
        }
        let judged = e.claims.iter().flat_map(|claim| self.judge_claim(claim)).collect();
        (self.gains, self.claims) = (gains, judged);
    }

    fn judge_claim(&self, claim: &Claim) -> Vec<Judged> {
        let Some((new, base)) = self.index(&claim.new).zip(self.index(&claim.base)) else {
            let text = format!("{} over {}: not compared", claim.new, claim.base);
            return vec![Judged { text, verdict: Verdict::Unresolved }];
        };
        let cases = || self.experiment.cases.iter().enumerate();
        let looks = self.experiment.looks();
        let judged = |what: &str, gains: &[f64], judge: fn(Interval, f64) -> Verdict, limit| {
            let judged_by = looks.interval(gains);
            let mut text = format!("{} over {}, {what}: {}", claim.new, claim.base, show_gain(&Interval::of(gains)));
            if looks.count() > 1 && judged_by.n > 1 {
                text += &format!("; by {}", looks.show(&judged_by, |gain| format!("{:+.1}", gain * 100.0)));
            }
            Judged { text, verdict: judge(judged_by, limit) }
        };
        match claim.bound {
            Bound::AverageAtLeast(limit) => {
                let what = format!("at least {} on average", percent(limit));
                vec![judged(&what, &self.average_gains(new, base), at_least, limit)]
            }
            Bound::EachAtLeast(limit) => cases()
                .map(|(c, case)| {
                    let what = format!("at least {} in {}", percent(limit), case.name);
                    judged(&what, &self.case_gains(c, new, base), at_least, limit)
                })
                .collect(),
            Bound::NoCaseWorseThan(limit) => cases()
                .map(|(c, case)| {
                    let what = format!("no worse than {} in {}", percent(limit), case.name);
                    judged(&what, &self.case_gains(c, new, base), no_worse_than, limit)
                })
                .collect(),
        }
    }

    /// One application's gain per pair of a system over another, by one of its figures; smaller is better.
    pub fn application_gain(
        &self,
        (case, application): (usize, usize),
        (new, base): (usize, usize),
        figure: impl Fn(&AppResult) -> Option<f64>,
    ) -> Interval {
        let of = |system, pair| {
            let own = |t: &&Trial| (t.case, t.system, t.pair) == (case, system, pair) && t.result.counts();
            figure(self.trials.iter().find(own)?.result.applications.get(application)?)
        };
        let gain = |pair| Some(1.0 - of(new, pair)? / of(base, pair)?);
        Interval::of(&(0..self.pairs).filter_map(gain).collect::<Vec<_>>())
    }

    /// The result of each application, if they differ.
    fn show_applications(&self, c: usize, case: &Case) -> String {
        let e = &self.experiment;
        let p99_us = |a: &AppResult| a.latency.map(|l| l.p99_us);
        let mut out = String::new();
        for (a, application) in case.workload.applications.iter().enumerate() {
            out += &format!("  application {a}: {}\n", application.describe());
            for (s, system) in e.systems.iter().enumerate() {
                let runs = self.counted(c, s);
                let own: Vec<&AppResult> = runs.iter().filter_map(|t| t.result.applications.get(a)).collect();
                if own.is_empty() {
                    continue;
                }
                let times: Vec<f64> = own.iter().map(|a| a.time_s).collect();
                let p99s: Vec<f64> = own.iter().filter_map(|a| p99_us(a)).collect();
                out += &format!("    {:<24} {:>7.2} s", system.name, mean(&times));
                if !p99s.is_empty() {
                    out += &format!(", 99 % of requests within {:.1} ms", mean(&p99s) / 1e3);
                }
                for base in e.baselines.iter().filter_map(|b| self.index(b)).filter(|base| *base != s) {
                    let name = &e.systems[base].name;
                    let time = self.application_gain((c, a), (s, base), |a| Some(a.time_s));
                    out += &format!("; over {name}: time {}", show_gain(&time));
                    let p99 = self.application_gain((c, a), (s, base), p99_us);
                    if p99.n > 0 {
                        out += &format!(", 99 % {}", show_gain(&p99));
                    }
                }
                out.push('\n');
            }
        }
        out
    }

    /// Tables for people.
    pub fn show(&self) -> String {
        let e = &self.experiment;
        let place = if self.modelled { " — times on the MODELLED disk" } else { "" };
        let discarded = self.trials.iter().filter(|t| !t.result.counts()).count();
        let stopped = if self.stopped { ", then stopped" } else { "" };
        let mut out = format!("{}: {} pairs{stopped}{place}\n", e.title, self.pairs);
        for (c, case) in e.cases.iter().enumerate() {
            out += &format!("\n{} — {}\n", case.name, case.workload.describe());
            out += &format!("  {:<26} {:>9} {:>9} {:>18}", "", "time", "MiB/s", "at the disk");
            e.baselines.iter().for_each(|b| out += &format!("  {:>26}", format!("gain over {b}")));
            out.push('\n');
            for (s, system) in e.systems.iter().enumerate() {
                let runs = self.counted(c, s);
                let over = |f: &dyn Fn(&RunResult) -> Option<f64>, show: &dyn Fn(f64) -> String| {
                    let values: Vec<f64> = runs.iter().filter_map(|t| f(&t.result)).collect();
                    if values.is_empty() { "–".into() } else { show(mean(&values)) }
                };
                out += &format!(
                    "  {:<26} {:>9} {:>9} {:>18}",
                    system.name,
                    over(&|r| Some(r.makespan_s), &|s| format!("{s:.2} s")),
                    over(&|r| Some(r.bandwidth_mib_s), &|b| format!("{b:.1}")),
                    Moved::mean(&runs.iter().map(|t| t.result.servers.at_disk).collect::<Vec<_>>()),
                );
                for base in e.baselines.iter().filter_map(|b| self.index(b)) {
                    let text = if base == s { "–".into() } else { show_gain(&self.case_gain(c, s, base)) };
                    out += &format!("  {text:>26}");
                }
                out.push('\n');
            }
            if case.workload.is_mixed() {
                out += &self.show_applications(c, case);
            }
        }
        if e.cases.len() > 1 {
            out += "\nmean over the cases\n";
            for g in self.gains.iter().filter(|g| g.case.is_none()) {
                out += &format!("  {} over {}: {}\n", g.new, g.base, show_gain(&g.gain));
            }
        }
        if !self.claims.is_empty() {
            out.push('\n');
        }
        for claim in &self.claims {
            out += &format!("{} — {}\n", claim.text, claim.verdict);
        }
        let counted: Vec<&RunResult> = self.trials.iter().map(|t| &t.result).filter(|r| r.counts()).collect();
        let idle = counted.iter().filter_map(|r| r.idle_cpu).fold(1.0, f64::min);
        let late = counted.iter().filter_map(|r| r.servers.device.as_ref());
        let late = late.map(|d| d.lateness_p99_us / d.mean_service_us.max(1e-9)).fold(0.0, f64::max);
        if self.modelled {
            out += &format!(
                "\nof the runs that count: idle CPU at least {:.0} %, lateness of the modelled disk (99 %) at most {:.1} % \
                 of the mean service time; runs that do not count: {discarded}\n",
                idle * 100.0,
                late * 100.0
            );
        }
        let memory: Vec<_> = self.trials.iter().filter_map(|t| t.result.servers.memory).collect();
        if let Some(limit) = memory.first().map(|memory| show_bytes(memory.limit_bytes as f64)) {
            let short = memory.iter().filter(|memory| memory.reclaims > 0).count();
            out += &format!(
                "memory of each data server: {limit}, which was too little for all pages in {short} of {} runs\n",
                memory.len()
            );
        }
        out += &format!("all data of all {} runs verified\n", self.trials.len());
        self.left.iter().for_each(|left| out += &format!("NOT AS BEFORE: {left}\n"));
        out
    }
}

/// `40 %`, without meaningless decimals.
fn percent(share: f64) -> String {
    format!("{} %", (share * 1000.0).round() / 10.0)
}

/// `+41.2 % [38.0, 44.4] n=5`.
pub fn show_gain(gain: &Interval) -> String {
    match gain.n {
        0 => "no pair counts".into(),
        _ => stats::show(gain, " %", |share| format!("{:+.1}", share * 100.0)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::access::{DeviceObservation, Observation};
    use crate::memory::Memory;
    use crate::pattern::{Pattern, Shape};
    use crate::plan::Operation;
    use crate::system::{Layer, Settings};
    use impresario_sched::PolicySpec;

    impl Switch for Memory {
        fn set_back(&self, _: &[Settings]) -> Result<()> {
            self.files_at_set_back.store(self.files.lock().len(), Ordering::Relaxed);
            Ok(())
        }
        fn switch(&self, system: &System) -> Result<()> {
            let ms = if system.data_policy.as_ref().is_some_and(|p| p.name == "none") { 15 } else { 1 };
            *self.delay.lock() = Duration::from_millis(ms);
            Ok(())
        }
        fn begin_recording(&self) -> Result<()> {
            self.recordings.lock().push(Vec::new());
            Ok(())
        }
        fn end_recording(&self) -> Result<Vec<PathBuf>> {
            Ok(vec![format!("run {}", self.recordings.lock().len()).into()])
        }
        fn foretell(&self, traces: &[PathBuf]) -> Result<()> {
            self.recordings.lock().push(traces.to_vec());
            Ok(())
        }
        fn depth(&self) -> Result<Option<u32>> {
            Ok(Some(1))
        }
    }

    pub fn experiment() -> Experiment {
        let case = |shape: Shape, operation| Case {
            name: format!("{shape} {operation}"),
            workload: Workload::uniform(
                2,
                Pattern { shape, request_bytes: 1024, process_bytes: 4096, processes: 2, seed: 1 },
                operation,
            ),
        };
        let fifo = PolicySpec::named("fifo");
        let claim = |bound| Claim { new: "mlf".into(), base: "none".into(), bound };
        Experiment {
            title: "a test".into(),
            cases: vec![case(Shape::Strided, Operation::Write), case(Shape::Contiguous, Operation::Read)],
            systems: ["none", "mlf"].map(|s| System::parse(s, Layer::Data, &fifo).unwrap()).into(),
            baselines: vec!["none".into()],
            claims: vec![
                claim(Bound::AverageAtLeast(0.3)),
                claim(Bound::NoCaseWorseThan(0.03)),
                claim(Bound::EachAtLeast(0.999)),
            ],
            pairs: 3,
            pairs_max: 6,
            time_max_s: 60.0,
            tries: 3,
            shuffle: true,
            seed: 1,
        }
    }

    #[test]
    fn pairs_are_whole_verified_and_judged() {
        let mut heard = 0;
        let outcome = compare(&Memory::default(), &experiment(), &Stop::new(), &mut |_| heard += 1).unwrap();
        assert!((3..=6).contains(&outcome.pairs));
        let runs: HashSet<_> = outcome.trials.iter().map(|t| (t.case, t.system, t.pair)).collect();
        assert_eq!(runs.len() as u32, outcome.pairs * 4);
        assert_eq!(heard, 2 * runs.len());
        let average = outcome.average_gain(1, 0);
        assert!((0.4..0.99).contains(&average.mean), "15 ms become 1: {average:?}");
        let verdicts: Vec<_> = outcome.claims.iter().map(|c| c.verdict).collect();
        assert_eq!(verdicts[..3], [Verdict::Holds; 3]);
        assert_ne!(verdicts[3], Verdict::Holds);
        let text = outcome.show();
        assert!(text.contains("at least 30 % on average") && text.contains("holds"), "{text}");
        assert!(!text.contains("MODELLED"));
        let json = serde_json::to_string(&outcome).unwrap();
        assert_eq!(serde_json::from_str::<Outcome>(&json).unwrap().claims, outcome.claims);
    }

    /// Ctrl-C does not discard minutes of measuring: complete pairs are evaluated.
    #[test]
    fn what_was_measured_before_a_stop_is_told() {
        let stop = Stop::new();
        let outcome = compare(&Memory::default(), &experiment(), &stop, &mut |p| {
            if p.pair == 3 {
                stop.set();
            }
        })
        .unwrap();
        assert_eq!((outcome.pairs, outcome.stopped, outcome.trials.len()), (2, true, 8));
        assert!(outcome.show().contains("2 pairs, then stopped") && !outcome.claims.is_empty());
        assert!(compare(&Memory::default(), &experiment(), &stop, &mut |_| {}).is_err(), "nothing to report");
    }

    /// A full disk, a wrong reply and Ctrl-C end an experiment early; its files go then, too.
    #[test]
    fn files_are_removed_however_it_ends() {
        let full = Memory { write_bytes_max: Some(1000), ..Memory::default() };
        let error = compare(&full, &experiment(), &Stop::new(), &mut |_| {}).unwrap_err();
        assert!(format!("{error:#}").contains("only 1000 of"), "{error:#}");
        assert!(full.files.lock().is_empty());
        let (memory, stop) = (Memory::default(), Stop::new());
        compare(&memory, &experiment(), &stop, &mut |_| stop.set()).unwrap_err();
        assert!(memory.files.lock().is_empty());
        let memory = Memory::default();
        assert_eq!(compare(&memory, &experiment(), &Stop::new(), &mut |_| {}).unwrap().left, [] as [String; 0]);
        assert!(memory.files.lock().is_empty());
        assert!(memory.files_at_set_back.load(Ordering::Relaxed) > 0, "the policies are set back before");
    }

    /// Each call of a storage that is away takes its patience.
    #[test]
    fn of_a_storage_that_does_not_answer_the_directories_are_named_at_once() {
        let memory = Memory::default();
        let goes_away = &mut |_: Progress<'_>| memory.is_away.store(true, Ordering::Relaxed);
        let error = format!("{:#}", compare(&memory, &experiment(), &Stop::new(), goes_away).unwrap_err());
        assert_eq!(error.matches("files are left in bench-").count(), 2, "{error}");
        let refused = memory.refused.lock();
        assert_eq!(refused.iter().filter(|name| name.contains("remove")).count(), 1, "{refused:?}");
    }

    #[test]
    fn claims_end_an_experiment_at_looks_only() {
        let mut outcome = compare(&Memory::default(), &experiment(), &Stop::new(), &mut |_| {}).unwrap();
        let soon = Duration::from_secs(1);
        let mut wants = |pairs, verdict, spent| {
            outcome.pairs = pairs;
            outcome.claims.iter_mut().for_each(|claim| claim.verdict = verdict);
            outcome.wants_more(spent)
        };
        assert!(wants(2, Verdict::Holds, Duration::MAX), "the pairs that are asked for");
        assert!(!wants(3, Verdict::Holds, soon) && wants(3, Verdict::Unresolved, soon));
        assert!(wants(4, Verdict::Holds, soon) && wants(5, Verdict::DoesNotHold, soon), "between 3 and 6");
        assert!(!wants(4, Verdict::Unresolved, Duration::from_secs(61)) && !wants(6, Verdict::Unresolved, soon));
        outcome.judge();
        assert!(outcome.claims[0].text.contains(" at 97.5 % for 2 looks"), "{}", outcome.claims[0].text);
    }

    /// A run under bad conditions is repeated; after that its pair is left out.
    #[test]
    fn runs_that_do_not_count_prove_nothing() {
        let memory = Memory::default();
        let device = DeviceObservation { requests: 1, mean_service_us: 100.0, lateness_p99_us: 90.0 };
        *memory.observation.lock() = Observation { device: Some(device), ..Observation::default() };
        let mut e = experiment();
        (e.pairs, e.pairs_max) = (2, 2);
        let outcome = compare(&memory, &e, &Stop::new(), &mut |_| {}).unwrap();
        assert_eq!(outcome.trials.len() as u32, 2 * 4 * 3);
        assert!(outcome.claims.iter().all(|c| c.verdict == Verdict::Unresolved));
        assert!(outcome.show().contains("no pair counts") && outcome.show().contains("MODELLED"));
    }

    /// Gains are computed within a pair: a drift that affects both systems does not matter.
    #[test]
    fn gains_are_paired() {
        let mut outcome = compare(&Memory::default(), &experiment(), &Stop::new(), &mut |_| {}).unwrap();
        for t in &mut outcome.trials {
            t.result.makespan_s = f64::from(1 + t.pair) * if t.system == 0 { 10.0 } else { 5.0 };
        }
        outcome.judge();
        let gain = outcome.case_gain(0, 1, 0);
        assert_eq!((gain.mean, gain.low, gain.high), (0.5, 0.5, 0.5));
        assert_eq!(outcome.average_gain(1, 0).mean, 0.5);
    }

    /// A recording of a case is given only to the system that uses it, and only for that case.
    #[test]
    fn a_system_may_go_by_a_recorded_run_of_each_case() {
        let fifo = PolicySpec::named("fifo");
        let mut e = experiment();
        e.systems = ["none", "mlf@recorded"].map(|s| System::parse(s, Layer::Data, &fifo).unwrap()).into();
        (e.claims, e.pairs, e.shuffle) = (Vec::new(), 1, false);
        let memory = Memory::default();
        compare(&memory, &e, &Stop::new(), &mut |_| {}).unwrap();
        let none: &[&str] = &[];
        let told = [none, none, none, &["run 1"], none, &["run 2"]];
        let gone_by = memory.recordings.lock();
        let gone_by: Vec<Vec<&str>> =
            gone_by.iter().map(|traces| traces.iter().filter_map(|t| t.to_str()).collect()).collect();
        assert_eq!(gone_by, told, "two recordings, and for each case none and its own");
    }

    /// A writer beside a reader: each is reported separately, with the latencies of its own requests.
    #[test]
    fn applications_that_differ_are_told_one_by_one() {
        let mut e = experiment();
        (e.pairs, e.pairs_max) = (2, 2);
        e.cases.truncate(1);
        e.cases[0].workload.applications[1].operation = Operation::Read;
        let mut outcome = compare(&Memory::default(), &e, &Stop::new(), &mut |_| {}).unwrap();
        for t in &mut outcome.trials {
            let of_reader = &mut t.result.applications[1];
            of_reader.time_s = if t.system == 0 { 4.0 } else { 3.0 };
            of_reader.latency.as_mut().unwrap().p99_us = if t.system == 0 { 20e3 } else { 5e3 };
        }
        let gain = outcome.application_gain((0, 1), (1, 0), |a| Some(a.time_s));
        assert_eq!((gain.mean, gain.n), (0.25, 2));
        let text = outcome.show();
        let told = "3.00 s, 99 % of requests within 5.0 ms; over none: time +25.0 % [+25.0, +25.0] n=2, 99 % +75.0 %";
        assert!(text.contains("application 1: 2 processes, strided read") && text.contains(told), "{text}");
    }
}
