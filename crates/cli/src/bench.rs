//! `impresario bench`: measures a cluster, compares schedulers, and says how sure it is.

mod args;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Subcommand;
use impresario_base::units::{parse_duration, show_bytes};
use impresario_sched::PolicySpec;
use impresario_workload::cluster::OwnCluster;
use impresario_workload::compare::compare;
use impresario_workload::compare_page;
use impresario_workload::comparison::{Comparison, Effort, experiment_of};
use impresario_workload::cpu::{process_cpu, process_rss_bytes};
use impresario_workload::dataset::DataSet;
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json, write_text};
use impresario_workload::result::RunResult;
use impresario_workload::runner::{RunOptions, run as run_once};
use impresario_workload::stats::Verdict;
use impresario_workload::system::Layer;
use serde_json::json;

use crate::{print, usage};
use args::{ClusterArgs, WorkloadArgs};

/// Measure a cluster, compare schedulers, and say how sure the answer is
///
/// Applications of several processes each read or write files in the access patterns of the papers, in one
/// process with a client of its own for every rank. All data are verified. Without --config a cluster is
/// started in a folder in memory, on modelled disks where --device disk says so, and taken away afterwards. With --config it
/// takes the admin key or certificate; files are made in a folder of their own and removed however it ends.
///
/// The measurements are explained in doc/BENCHMARKING.md.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Run(RunArgs),
    Compare(CompareArgs),
    Idle(IdleArgs),
}

/// Run one workload and show times, bandwidth, request sizes and fairness
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario bench run --pattern strided --op read --request-size 16k --device disk
  impresario bench run --config cluster/impresario.toml --pattern random --request-size 4k --queue-depth 4
  impresario bench run --apps 2 --start-every 1s --alone --json run.json")]
struct RunArgs {
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Run every application alone first, and show its interference factor
    #[arg(long)]
    alone: bool,
    /// Runs of every pattern and operation
    #[arg(long, default_value_t = 1, value_name = "N")]
    runs: u32,
    /// Do not compare the data with what they must be
    #[arg(long)]
    no_verify: bool,
    /// Put a fault into the writer (drop, swap or stale): verification must find it
    #[arg(long, hide = true, value_name = "FAULT")]
    inject: Option<impresario_workload::access::Fault>,
    /// Write everything that was measured to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Compare schedulers: interleaved in one run, in random order, with paired gains and 95 % intervals
///
/// A system is `NAME[+KEY=VALUE…][@arrival|@elevator][@recorded]`: a policy with parameters, the order in which modelled
/// disks serve, and whether the data servers go by a run that they recorded before. `control` is fifo that merges neighbours and does nothing else. Gains are shown over each
/// baseline; verdicts are holds, does not hold, or unresolved, and unresolved is never a pass. With --config the policies and orders of
/// disks that the servers had, and the earlier runs they went by, are set back in the end, also after an error and at Ctrl-C.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario bench compare none,none@elevator,control,mlf --device disk --baseline none --baseline none@elevator
  impresario bench compare fifo,hbrr,twins+window_us=8000 --on io --device disk --op read --at-least 20")]
struct CompareArgs {
    /// The systems, separated by commas
    #[arg(value_delimiter = ',', required = true, value_name = "SYSTEMS")]
    systems: Vec<String>,
    /// Compare over this system; may be given several times [default: the first system]
    #[arg(long = "baseline", value_name = "SYSTEM")]
    baselines: Vec<String>,
    /// Which servers the policies are for: data or io
    #[arg(long, default_value = "data")]
    on: Layer,
    /// Policy of the servers that are not compared [default: fifo on I/O nodes, none on data servers]
    #[arg(long, value_name = "POLICY")]
    other: Option<String>,
    /// Claim a mean gain of at least this many percent
    #[arg(long, value_name = "PERCENT")]
    at_least: Option<f64>,
    /// Claim that no case is worse by more than this many percent
    #[arg(long, value_name = "PERCENT")]
    no_worse: Option<f64>,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    effort: Effort,
    /// Write every run, gain and verdict to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Measure the CPU and the memory of an idle cluster
#[derive(clap::Args)]
struct IdleArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// How long to look
    #[arg(long = "for", default_value = "20s", value_parser = parse_duration, value_name = "TIME")]
    time: Duration,
    /// Write the figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    match args.what {
        What::Run(args) => run_workload(args),
        What::Compare(args) => run_compare(args),
        What::Idle(args) => run_idle(args),
    }
}

fn run_workload(args: RunArgs) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let cases = args.workload.cases()?;
    let stop = catch_signals()?;
    let cluster = args.cluster.open(&stop)?;
    let options = RunOptions { fault: args.inject, verify: !args.no_verify, alone: args.alone, pair: 0 };
    let mut shown = Vec::new();
    let mut wrong = false;
    let mut all_left = Vec::new();
    for case in cases {
        let mut set = [DataSet::new(&case.workload)?];
        let (results, left) = DataSet::measured(cluster.storage(), &mut set, |sets| {
            let mut results: Vec<RunResult> = Vec::new();
            for set in sets {
                set.prepare(cluster.storage(), &stop)?;
                for _ in 0..args.runs.max(1) {
                    let result = run_once(cluster.storage(), set, &case.workload, &options, &stop)?;
                    print(format!("{}\n{}\n", case.workload.describe(), result.show()))?;
                    wrong |= options.verify && !result.verification.passed();
                    results.push(result);
                }
            }
            Ok(results)
        });
        all_left.extend(left);
        let results = cluster.told(results).map_err(|error| match all_left.is_empty() {
            true => error,
            false => error.context(all_left.join("; ")),
        })?;
        shown.push(json!({ "name": case.name, "workload": case.workload, "results": results }));
    }
    // None of these keeps another from being told.
    let unwritten =
        write_json(args.json.as_deref(), &json!({ "cases": shown })).err().map(|error| format!("{error:#}"));
    let wrong = wrong.then(|| "the data are not what was written".to_owned());
    let failed: Vec<String> = wrong.into_iter().chain(all_left).chain(unwritten).collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(ExitCode::SUCCESS)
}

fn run_compare(args: CompareArgs) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref(), args.html.as_deref()])?;
    let cases = args.workload.cases()?;
    let other = match (&args.other, args.on) {
        (Some(text), _) => impresario_workload::system::policy(text).map_err(usage)?,
        (None, Layer::Data) => PolicySpec::named("fifo"),
        (None, Layer::Io) => PolicySpec::named("none"),
    };
    let asked = Comparison {
        systems: &args.systems,
        baselines: &args.baselines,
        on: args.on,
        other: &other,
        at_least: args.at_least.map(|p| p / 100.0),
        no_worse: args.no_worse.map(|p| p / 100.0),
    };
    let stop = catch_signals()?;
    let experiment = experiment_of(&asked, cases, args.cluster.data_servers()?, &args.effort).map_err(usage)?;
    let cluster = args.cluster.open(&stop)?;
    let mut line = Progress::new();
    let outcome = cluster.told(compare(cluster.storage(), &experiment, &stop, &mut |p| line.experiment(&p)))?;
    line.end();
    all_written([
        print(outcome.show()).map(drop),
        write_json(args.json.as_deref(), &outcome),
        write_text(args.html.as_deref(), || {
            Ok(compare_page::page("Comparison of schedulers", std::slice::from_ref(&outcome)))
        }),
    ])?;
    // 0 when every claim holds and all is as before; 1 when a claim does not hold, or is unresolved.
    let all_hold = outcome.claims.iter().all(|c| c.verdict == Verdict::Holds);
    Ok(ExitCode::from(u8::from(!all_hold || !outcome.left.is_empty())))
}

/// An idle cluster may use this share of one core in all.
const IDLE_CORE_MAX: f64 = 0.01;
/// Largest memory of an idle data server, bytes.
const DATA_SERVER_BYTES_MAX: u64 = 50_000_000;

fn run_idle(args: IdleArgs) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let stop = catch_signals()?;
    let plan = args.cluster.own_plan("only the processes of a cluster that is started here are known")?;
    let cluster = OwnCluster::start(&plan, &stop)?;
    // What starting leaves behind is not idleness.
    stop.sleep_until(Instant::now() + Duration::from_secs(2))?;
    let cpu = || -> Vec<Option<Duration>> { cluster.pids().iter().map(|(_, pid)| process_cpu(*pid)).collect() };
    let (before, began) = (cpu(), Instant::now());
    stop.sleep_until(began + args.time)?;
    let (after, seconds) = (cpu(), began.elapsed().as_secs_f64());
    let mut out = format!("{:<10} {:>16} {:>12}\n", "server", "CPU, % of a core", "memory");
    let (mut total, mut largest, mut servers) = (0.0, 0, Vec::new());
    for (i, (name, pid)) in cluster.pids().iter().enumerate() {
        let used = before[i].zip(after[i]).map(|(b, a)| a.saturating_sub(b).as_secs_f64() / seconds);
        let (Some(share), Some(rss)) = (used, process_rss_bytes(*pid)) else { bail!("server {name} is gone") };
        total += share;
        if name.starts_with("data.") {
            largest = largest.max(rss);
        }
        out += &format!("{name:<10} {:>16.3} {:>12}\n", share * 100.0, show_bytes(rss as f64));
        servers.push(json!({ "server": name, "cpu_share": share, "rss_bytes": rss }));
    }
    let (cpu, memory) = (Verdict::of(total < IDLE_CORE_MAX), Verdict::of(largest < DATA_SERVER_BYTES_MAX));
    out += &format!("idle cluster below 1 % of a core: {:.3} % — {cpu}\n", total * 100.0);
    out += &format!("data server below 50 MB of memory: {:.1} MB — {memory}\n", largest as f64 / 1e6);
    let told = json!({ "seconds": seconds, "cpu_share": total, "servers": servers });
    all_written([print(&out).map(drop), write_json(args.json.as_deref(), &told)])?;
    Ok(ExitCode::from(u8::from(Verdict::of_all([cpu, memory]) != Verdict::Holds)))
}
