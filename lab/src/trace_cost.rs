//! The cost of tracing in a data server: throughput, processor time and bytes per request, with and without.
//!
//! The paper's tracing cost 10.98 % of the execution time (agios-2013, IV.A). Here one data server without a device
//! model serves 16 clients of random 4 KiB reads and of strided 64 KiB reads; its trace is switched while it runs, so
//! that both halves of a pair use one cluster. The order within a pair is random.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use impresario_base::Random;
use impresario_client::{Access, KeyRole, admin};
use impresario_sched::PolicySpec;
use impresario_trace::Trace;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::dataset::DataSet;
use impresario_workload::pattern::{Pattern, Shape};
use impresario_workload::plan::{Operation, Workload};
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::rounds::Rounds;
use impresario_workload::runner::{RunOptions, run as run_load};
use impresario_workload::stats::{Interval, show};
use impresario_workload::storage::Storage;
use serde_json::json;

use crate::{impresario, report};

/// Measure what writing a trace costs a data server
#[derive(clap::Args)]
pub struct Args {
    /// Pairs of runs, with and without a trace
    #[arg(long, default_value_t = 10, value_name = "N")]
    pairs: u32,
    /// How often the clients read their data in a run
    #[arg(long, default_value_t = 6, value_name = "N")]
    loops: u32,
    /// Policy of the data server
    #[arg(long, default_value = "none")]
    policy: String,
    /// Where the cluster and the trace lie [default: in memory]
    #[arg(long, value_name = "FOLDER")]
    dir: Option<PathBuf>,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The subjects of a pair.
const WITHOUT: usize = 0;
const WITH: usize = 1;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A load: its name, shape and request size.
const LOADS: [(&str, Shape, u64); 2] = [
    ("4 KiB random read, 16 clients", Shape::Random, 4 << 10),
    ("64 KiB strided read, 16 clients", Shape::Strided, 64 << 10),
];

/// Data of each client, bytes.
const PROCESS_BYTES: u64 = 4 << 20;

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let stop = catch_signals()?;
    let plan = Plan {
        data_servers: 1,
        io_nodes: 0,
        data_policy: args.policy.parse::<PolicySpec>()?,
        program: Some(impresario()?),
        parent: args.dir.clone(),
        ..Plan::default()
    };
    let cluster = OwnCluster::start(&plan, &stop)?;
    let target = Storage::of(&cluster).direct();
    let address = cluster.config.data[0].address.clone();
    let access = Access::of(&cluster.config, KeyRole::Admin);
    let mut out = format!(
        "{:<34} {:>12} {:>12} {:>26} {:>26} {:>10} {:>10}\n",
        "load", "without /s", "with /s", "throughput lost %", "server time more %", "bytes each", "not traced"
    );
    let (mut random, mut line, mut all) = (Random::new(1), Progress::new(), Vec::new());
    for (name, shape, request_bytes) in LOADS {
        let pattern = Pattern { shape, request_bytes, process_bytes: PROCESS_BYTES, processes: 16, seed: 3 };
        let mut workload = Workload::uniform(1, pattern, Operation::Read);
        workload.applications[0].loops = args.loops.max(1) * if request_bytes > 4096 { 8 } else { 1 };
        let mut set = DataSet::new(&workload)?;
        set.prepare(&target, &stop)?;
        let (mut bytes, mut traced, mut lost) = (0, 0, 0);
        let runs = Rounds::warmed_up(args.pairs).measure(2, &mut random, &stop, |pair, subject| {
            let with = subject == WITH;
            if with {
                admin::trace(&access, &address, true, TIMEOUT).context("beginning the trace")?;
            }
            let options = RunOptions { verify: false, ..RunOptions::default() };
            let result = run_load(&target, &mut set, &workload, &options, &stop)?;
            if with {
                let status: serde_json::Value = serde_json::from_str(&admin::status(&access, &address, TIMEOUT)?)?;
                lost += status["trace"]["requests_not_traced"].as_u64().unwrap_or(0);
                let path = status["trace"]["path"].as_str().context("the path of the trace")?.to_string();
                admin::trace(&access, &address, false, TIMEOUT).context("ending the trace")?;
                let trace = Trace::load(&path)?;
                let whole = trace.records.iter().filter(|r| r.duration.is_some()).count() as u64;
                ensure!(whole + lost >= result.requests, "{whole} of {} requests are traced", result.requests);
                bytes += std::fs::metadata(&path)?.len();
                traced += trace.records.len() as u64;
                std::fs::remove_file(&path)?;
            }
            line.show(&format!("{name}, pair {pair}: {:.0} requests/s", result.requests_per_s));
            Ok(result)
        })?;
        set.remove(&target)?;
        let percent = |change: Interval| show(&change, "", |share| format!("{:.2}", 100.0 * share));
        out += &format!(
            "{name:<34} {:>12.0} {:>12.0} {:>26} {:>26} {:>10.1} {lost:>10}\n",
            runs.mean(WITHOUT, |r| r.requests_per_s),
            runs.mean(WITH, |r| r.requests_per_s),
            percent(runs.less(WITH, WITHOUT, |r| r.requests_per_s)),
            percent(runs.more(WITH, WITHOUT, |r| r.server_cpu_s.unwrap_or_default() / r.requests as f64)),
            bytes as f64 / traced.max(1) as f64,
        );
        all.push(json!({ "load": name, "pairs": runs.rounds }));
    }
    line.end();
    report(&out, args.json.as_deref(), &json!({ "policy": args.policy, "loads": all }))
}
