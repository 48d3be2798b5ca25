//! The value of waiting for predicted requests in virtual time: the experiments of agios-2013 with prediction, over
//! hand-off depths and arrival jitters.
//!
//! The scenario is that of the paper's Fig. 6 (`lab/papers/agios-2013-fig6.toml`): four applications, four data
//! servers, client requests of 8 KiB, four access patterns. Policies with a trace get the mean of some earlier runs,
//! which had other delays. Gains are 1 − T/T(base) of the makespan, paired by seed, arithmetic means over the cases; the
//! 95 % intervals are over the seeds. *Losses* are cases whose whole interval is below zero.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use impresario_sched::PolicySpec;
use impresario_sim::Scenario;
use impresario_sim::model::{Operation, Pattern};
use impresario_sim::outcome::Outcome;
use impresario_sim::sweep::side_by_side;
use impresario_workload::stats::{self, Interval, mean, side};

use crate::reproduce::papers::figure;
use crate::usage;

/// Measure in virtual time what waiting for predicted requests is worth over mlf and over no scheduler
#[derive(clap::Args)]
pub struct Args {
    /// Seeds of each case
    #[arg(long, default_value_t = 2, value_name = "N")]
    seeds: u64,
    /// The first seed; tune on some and show the result on others
    #[arg(long, default_value_t = 0, value_name = "N")]
    first_seed: u64,
    /// Processes of each of the four applications
    #[arg(long, value_delimiter = ',', default_values_t = [8, 32], value_name = "N")]
    processes: Vec<u32>,
    /// Hand-off depths below the scheduler; 0: without limit
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4, 32, 0], value_name = "N")]
    depths: Vec<u32>,
    /// Random delay before each request, microseconds
    #[arg(long, value_delimiter = ',', default_values_t = [100.0, 500.0], value_name = "US")]
    jitters_us: Vec<f64>,
    /// Earlier runs that make the mean trace
    #[arg(long, default_value_t = 3, value_name = "N")]
    earlier_runs: u32,
    /// Policies beside `none`; "+" before one: it knows the earlier runs
    #[arg(long, value_delimiter = ';', default_values_t = POLICIES.map(String::from), value_name = "POLICY")]
    policies: Vec<String>,
    /// The policy that gains are over
    #[arg(long, default_value = "mlf")]
    base: String,
    /// The servers have the page cache and read-ahead of the paper's Fig. 6; else bare disks
    #[arg(long)]
    page_cache: bool,
    /// Each policy with all requests queued: clients send them at once, in place of each after the reply to the one before
    #[arg(long)]
    at_once: bool,
    /// Print each case
    #[arg(long)]
    cases: bool,
}

const POLICIES: [&str; 5] = [
    "mlf",
    "mlf window_us=0 guard_batches=0 pass_us=900",
    "+agios guard_batches=0 pass_us=900",
    "+agios-causal",
    "agios-causal",
];

/// The four patterns: name, pattern, request, requests per process. The paper expects no effect for the first.
const PATTERNS: [(&str, Pattern, u64, u64); 4] = [
    ("contiguous small", Pattern::Contiguous, 16 << 10, 128),
    ("strided small", Pattern::Strided, 16 << 10, 128),
    ("contiguous large", Pattern::Contiguous, 256 << 10, 8),
    ("strided large", Pattern::Strided, 256 << 10, 8),
];

/// Depth, jitter in µs, pattern, write, processes, policy.
type Key = (u32, u64, usize, bool, u32, usize);

struct Case {
    depth: u32,
    jitter_us: f64,
    pattern: usize,
    write: bool,
    processes: u32,
    policy: usize,
    seed: u64,
}

impl Case {
    fn key(&self) -> Key {
        (self.depth, self.jitter_us as u64, self.pattern, self.write, self.processes, self.policy)
    }
}

/// What is shown of a run.
#[derive(Default)]
struct Run {
    makespan_s: f64,
    batch_kib: f64,
    access_ms: f64,
    busy: f64,
}

impl Run {
    fn of(outcome: &Outcome) -> Run {
        let layers = &outcome.layers;
        Run {
            makespan_s: outcome.makespan_s,
            batch_kib: layers.batches.mean_bytes() / 1024.0,
            access_ms: layers.access_mean_ms,
            busy: layers.device_busy,
        }
    }
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let base_scenario = figure("agios-2013-fig6")?.base;
    let policies: Vec<(PolicySpec, bool)> = std::iter::once("none")
        .chain(args.policies.iter().map(String::as_str))
        .map(|text| Ok((text.trim_start_matches('+').parse::<PolicySpec>()?, text.starts_with('+'))))
        .collect::<Result<_>>()?;
    let base = base(&args.base, &args.policies)?;
    let mut cases = Vec::new();
    for &depth in &args.depths {
        for &jitter_us in &args.jitters_us {
            for pattern in 0..PATTERNS.len() {
                for write in [true, false] {
                    for &processes in &args.processes {
                        for policy in 0..policies.len() {
                            let of = |seed| Case { depth, jitter_us, pattern, write, processes, policy, seed };
                            cases.extend((args.first_seed..args.first_seed + args.seeds).map(of));
                        }
                    }
                }
            }
        }
    }
    let make = |case: &Case| {
        let (_, pattern, request_bytes, requests) = PATTERNS[case.pattern];
        let mut scenario: Scenario = base_scenario.clone();
        scenario.seed += case.seed;
        scenario.servers.in_flight = case.depth;
        if !args.page_cache {
            scenario.servers.cache_bytes = 0;
        }
        scenario.servers.policy = policies[case.policy].0.clone();
        scenario.servers.earlier_runs = if policies[case.policy].1 { args.earlier_runs } else { 0 };
        scenario.clients.processes_per_node = (case.processes / 8).max(1);
        let a = &mut scenario.application[0];
        (a.pattern, a.request_bytes, a.requests, a.processes) = (pattern, request_bytes, requests, case.processes);
        if args.at_once {
            a.queue_depth = requests as u32;
        }
        (a.op, a.jitter_us) = (if case.write { Operation::Write } else { Operation::Read }, case.jitter_us);
        scenario
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut runs: Vec<Result<Run>> = Vec::new();
    runs.resize_with(cases.len(), || Ok(Run::default()));
    let one = |nth: usize| Some(impresario_sim::run(&make(&cases[nth])).map(|o| Run::of(&o)));
    side_by_side(cases.len(), threads, one, |nth, run| runs[nth] = run.map_err(Into::into));
    // The runs of each case, in order of seeds.
    let mut by_case: BTreeMap<Key, Vec<Run>> = BTreeMap::new();
    for (case, run) in cases.iter().zip(runs) {
        by_case.entry(case.key()).or_default().push(run?);
    }
    for &depth in &args.depths {
        for &jitter_us in &args.jitters_us {
            let shown = if depth == 0 { "unbounded".into() } else { depth.to_string() };
            println!("\nhand-off {shown}, jitter {} ms ({} seeds)", jitter_us / 1000.0, args.seeds);
            println!(
                "{:<48} {:>15} {:>15} {:>15} {:>9} {:>15} {:>9}",
                "gain, % (± half of the 95 % interval)",
                "over base",
                "3 patterns",
                "worst case",
                "losses",
                "over none",
                "worst"
            );
            for policy in 1..policies.len() {
                let of = |(pattern, write, processes), policy| {
                    &by_case[&(depth, jitter_us as u64, pattern, write, processes, policy)][..]
                };
                let all = || {
                    let ops = (0..PATTERNS.len()).flat_map(|pattern| [(pattern, true), (pattern, false)]);
                    ops.flat_map(|(pattern, write)| args.processes.iter().map(move |&p| (pattern, write, p)))
                };
                let over: Vec<Vec<f64>> = all().map(|case| gains(of(case, policy), of(case, base))).collect();
                let none: Vec<Vec<f64>> = all().map(|case| gains(of(case, policy), of(case, 0))).collect();
                let helped = over.iter().zip(all()).filter(|(_, case)| case.0 > 0).map(|(gains, _)| gains);
                let each: Vec<Interval> = over.iter().map(|gains| Interval::of(gains)).collect();
                let worst = each.iter().copied().min_by(|a, b| a.mean.total_cmp(&b.mean));
                let worst_none = none.iter().map(|gains| mean(gains)).fold(f64::INFINITY, f64::min);
                println!(
                    "{:<48} {:>15} {:>15} {:>15} {:>9} {:>15} {:>+9.1}",
                    args.policies[policy - 1],
                    percent(&mean_of_cases(over.iter())),
                    percent(&mean_of_cases(helped)),
                    worst.as_ref().map_or_else(String::new, percent),
                    each.iter().filter(|gain| side(**gain, 0.0) == Some(Ordering::Less)).count(),
                    percent(&mean_of_cases(none.iter())),
                    100.0 * worst_none,
                );
                if args.cases {
                    for ((case, over), none) in all().zip(&each).zip(&none) {
                        let runs = of(case, policy);
                        let of_runs = |what: fn(&Run) -> f64| mean(&runs.iter().map(what).collect::<Vec<_>>());
                        println!(
                            "    {:<18} {:<5} {:>3}: {:>8.3} s {:>15} over base {:>+6.1} over none; batches of {:>5.1} KiB, \
                             device accesses of {:>5.2} ms, busy {:>3.0} %",
                            PATTERNS[case.0].0,
                            if case.1 { "write" } else { "read" },
                            case.2,
                            of_runs(|run| run.makespan_s),
                            percent(over),
                            100.0 * mean(none),
                            of_runs(|run| run.batch_kib),
                            of_runs(|run| run.access_ms),
                            of_runs(|run| 100.0 * run.busy),
                        );
                    }
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The column of the policy that gains are over: `none` is the first, before the others.
fn base(name: &str, policies: &[String]) -> Result<usize> {
    let mut all = std::iter::once("none").chain(policies.iter().map(String::as_str));
    all.position(|policy| policy == name).ok_or_else(|| {
        usage(format!("--base {name}: it is none of the policies that are compared: none; {}", policies.join("; ")))
    })
}

/// Gains of runs over others of the same seeds.
fn gains(runs: &[Run], base: &[Run]) -> Vec<f64> {
    let [runs, base] = [runs, base].map(|runs| runs.iter().map(|run| run.makespan_s).collect::<Vec<_>>());
    stats::gains(&runs, &base)
}

/// The mean over cases, with the interval over seeds.
fn mean_of_cases<'a>(cases: impl Iterator<Item = &'a Vec<f64>> + Clone) -> Interval {
    let seeds = cases.clone().map(Vec::len).min().unwrap_or(0);
    let of_seed = |seed: usize| mean(&cases.clone().map(|gains| gains[seed]).collect::<Vec<_>>());
    Interval::of(&(0..seeds).map(of_seed).collect::<Vec<_>>())
}

fn percent(gain: &Interval) -> String {
    format!("{:+.1} ± {:.1}", 100.0 * gain.mean, 100.0 * (gain.high - gain.mean))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_is_one_of_the_policies_or_a_mistake() {
        let policies = ["mlf", "+agios"].map(String::from);
        let base = |name| base(name, &policies);
        assert_eq!((base("none").unwrap(), base("mlf").unwrap(), base("+agios").unwrap()), (0, 1, 2));
        let error = base("ml").unwrap_err();
        assert!(
            error.is::<impresario_workload::usage::Usage>() && error.to_string().contains("none; mlf; +agios"),
            "{error}"
        );
    }
}
