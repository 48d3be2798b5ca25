//! `impresario-lab core`: the cost of a scheduling decision.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use impresario_base::units::parse_duration;
use impresario_sched::{PolicySpec, policy};
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::stats::show;
use serde_json::json;

use crate::{core_bench, print, report, usage};

/// Measure what a scheduling decision costs: time per request and memory per queued request
#[derive(clap::Args)]
pub struct Args {
    /// Policies, with parameters as in fifo+merge=on [default: all]
    #[arg(value_delimiter = ',', value_name = "POLICIES")]
    policies: Vec<String>,
    /// Requests that stay queued
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000, 100_000], value_name = "N")]
    queued: Vec<usize>,
    /// Longest time for one measurement
    #[arg(long, default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    patience: Duration,
    /// Measure instead the cost of a recorded run that matches no request, in this many pairs of measurements
    /// [default policies: agios, agios-causal, srtf]
    #[arg(long, value_name = "PAIRS")]
    unrelated_run: Option<u32>,
    /// Write every measurement to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let mut policies = Vec::new();
    for text in &args.policies {
        policies.push(impresario_workload::system::policy(text).map_err(usage)?);
    }
    if policies.is_empty() && args.unrelated_run.is_some() {
        policies = ["agios", "agios-causal", "srtf"].map(PolicySpec::named).into();
    } else if policies.is_empty() {
        policies = policy::POLICIES.iter().map(|p| PolicySpec::named(p.name)).collect();
        policies.push(PolicySpec::named("fifo").with("merge", "on"));
    }
    for spec in &policies {
        policy::check(spec, 4).map_err(|e| usage(e.to_string()))?;
    }
    if cfg!(debug_assertions) {
        eprintln!("impresario: this program was built without optimisation; these times say little");
    }
    let stop = catch_signals()?;
    let mut line = Progress::new();
    if let Some(pairs) = args.unrelated_run {
        let mut out = String::new();
        for (spec, mix) in policies.iter().flat_map(|spec| core_bench::Mix::ALL.map(|mix| (spec, mix))) {
            for run in [core_bench::Unrelated::Files, core_bench::Unrelated::Offsets] {
                line.show(&format!("{spec} {mix:?}, a run of other {run:?}"));
                let i = core_bench::cost_of_unrelated(spec, (mix, run), pairs, args.patience, &stop)?;
                let more = show(&i, " %", |share| format!("{:+.2}", 100.0 * share));
                out += &format!("{spec} {mix:?}, a run of other {run:?}: {more}\n");
            }
        }
        line.end();
        return print(out.as_bytes());
    }
    let results = core_bench::measure_all(&policies, &args.queued, args.patience, &stop, |r| {
        line.show(&format!("{} {:?} {}: {:.0} ns a request", r.policy, r.mix, r.queued, r.ns_per_request));
    })?;
    line.end();
    report(&core_bench::table(&results), args.json.as_deref(), &json!({ "results": results }))
}
