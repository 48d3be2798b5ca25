//! The value of waiting for predicted requests in virtual time: the experiments of agios-2013 with prediction, over
//! hand-off depths and arrival jitters.
//!
//! The scenario is that of the paper's Fig. 6 (`lab/papers/agios-2013-fig6.toml`): four applications, four data
//! servers, client requests of 8 KiB, four access patterns. Policies with a trace get the mean of some earlier runs,
//! which had other delays. Gains are 1 − T/T(base) of the makespan, arithmetic means over the cases.

use std::collections::BTreeMap;
use std::process::ExitCode;

use anyhow::Result;
use impresario_sched::PolicySpec;
use impresario_sim::Scenario;
use impresario_sim::model::{Operation, Pattern};
use impresario_sim::sweep::side_by_side;

use crate::reproduce::papers::figure;

/// Measure in virtual time what waiting for predicted requests is worth over mlf and over no scheduler
#[derive(clap::Args)]
pub struct Args {
    /// Seeds of each case
    #[arg(long, default_value_t = 2, value_name = "N")]
    seeds: u64,
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

#[derive(Clone)]
struct Case {
    depth: u32,
    jitter_us: f64,
    pattern: usize,
    write: bool,
    processes: u32,
    policy: usize,
    seed: u64,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let base_scenario = figure("agios-2013-fig6")?.base;
    let policies: Vec<(PolicySpec, bool)> = std::iter::once("none")
        .chain(args.policies.iter().map(String::as_str))
        .map(|text| Ok((text.trim_start_matches('+').parse::<PolicySpec>()?, text.starts_with('+'))))
        .collect::<Result<_>>()?;
    let base = 1 + args.policies.iter().position(|p| *p == args.base).unwrap_or(0);
    let mut cases = Vec::new();
    for &depth in &args.depths {
        for &jitter_us in &args.jitters_us {
            for pattern in 0..PATTERNS.len() {
                for write in [true, false] {
                    for &processes in &args.processes {
                        for policy in 0..policies.len() {
                            let of = |seed| Case { depth, jitter_us, pattern, write, processes, policy, seed };
                            cases.extend((0..args.seeds).map(of));
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
        (a.op, a.jitter_us) = (if case.write { Operation::Write } else { Operation::Read }, case.jitter_us);
        scenario
    };
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut times: Vec<Result<f64>> = Vec::new();
    times.resize_with(cases.len(), || Ok(0.0));
    let one = |nth: usize| Some(impresario_sim::run(&make(&cases[nth])).map(|o| o.makespan_s));
    side_by_side(cases.len(), threads, one, |nth, time| times[nth] = time.map_err(Into::into));
    // Means over the seeds, by everything else.
    let mut sums: BTreeMap<(u32, u64, usize, bool, u32, usize), f64> = BTreeMap::new();
    for (case, time) in cases.iter().zip(times) {
        let Case { depth, jitter_us, pattern, write, processes, policy, .. } = *case;
        *sums.entry((depth, jitter_us as u64, pattern, write, processes, policy)).or_default() += time?;
    }
    for &depth in &args.depths {
        for &jitter_us in &args.jitters_us {
            let shown = if depth == 0 { "unbounded".into() } else { depth.to_string() };
            println!("\nhand-off {shown}, jitter {} ms ({} seeds)", jitter_us / 1000.0, args.seeds);
            println!(
                "{:<48} {:>9} {:>9} {:>9} {:>9} {:>9}",
                "gain, %", "over base", "3 pattern", "worst", "over none", "worst"
            );
            for policy in 1..policies.len() {
                let (mut over, mut three, mut none, mut lines) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
                for pattern in 0..PATTERNS.len() {
                    for write in [true, false] {
                        for &processes in &args.processes {
                            let of = |policy| sums[&(depth, jitter_us as u64, pattern, write, processes, policy)];
                            let (gain, total) = (1.0 - of(policy) / of(base), 1.0 - of(policy) / of(0));
                            over.push(gain);
                            none.push(total);
                            if pattern > 0 {
                                three.push(gain);
                            }
                            let op = if write { "write" } else { "read" };
                            lines.push(format!(
                                "    {:<18} {op:<5} {processes:>3}: {:>8.3} s {:>+7.1} % over base {:>+7.1} % over none",
                                PATTERNS[pattern].0,
                                of(policy) / args.seeds as f64,
                                gain * 100.0,
                                total * 100.0
                            ));
                        }
                    }
                }
                let mean = |v: &[f64]| 100.0 * v.iter().sum::<f64>() / v.len().max(1) as f64;
                let worst = |v: &[f64]| 100.0 * v.iter().copied().fold(f64::INFINITY, f64::min);
                println!(
                    "{:<48} {:>+9.1} {:>+9.1} {:>+9.1} {:>+9.1} {:>+9.1}",
                    args.policies[policy - 1],
                    mean(&over),
                    mean(&three),
                    worst(&over),
                    mean(&none),
                    worst(&none)
                );
                if args.cases {
                    lines.iter().for_each(|line| println!("{line}"));
                }
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
