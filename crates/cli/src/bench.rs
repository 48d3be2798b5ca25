//! `impresario bench`: measures a cluster, compares schedulers, and says how sure it is.

mod args;
mod guided;
mod progress;
mod validate;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Subcommand;
use impresario_sched::{PolicySpec, policy};
use impresario_workload::cluster::{self, OwnCluster, Plan};
use impresario_workload::compare::{Outcome, compare};
use impresario_workload::cpu::{process_cpu, process_rss_bytes};
use impresario_workload::dataset::DataSet;
use impresario_workload::goals::{self, Asked};
use impresario_workload::result::RunResult;
use impresario_workload::runner::{RunOptions, run as run_once};
use impresario_workload::size::{parse_duration, show_bytes};
use impresario_workload::stats::Verdict;
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use impresario_workload::system::{Layer, Switch};
use impresario_workload::{core_bench, datapath, minimal};
use serde_json::json;

use crate::{print, usage};
use args::{ClusterArgs, EffortArgs, WorkloadArgs};
pub(crate) use progress::{Progress, catch_signals, write_json};

/// Measure a cluster, compare schedulers, and say how sure the answer is
///
/// Applications of several processes each read or write files in the access patterns of the papers, in one
/// process with a client of its own for every rank. All data are verified. Without --config a cluster is
/// started in a folder in memory, on modelled disks where --device disk says so, and taken away afterwards.
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
    Goals(GoalsArgs),
    Datapath(DatapathArgs),
    Core(CoreArgs),
    Idle(IdleArgs),
    Guided(guided::Args),
    Validate(validate::Args),
    MinimalServer(MinimalServerArgs),
}

/// Run one workload and tell times, bandwidth, request sizes and fairness
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
    /// Run every application alone first, and tell its interference factor
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
/// A system is `NAME[+KEY=VALUE…][@arrival|@elevator]`: a policy with parameters, and the order in which modelled
/// disks serve. `control` is fifo that merges neighbours and does nothing else. Gains are told over each
/// baseline; verdicts are holds, does not hold, or unresolved, and unresolved is never a pass.
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
    /// Claim a mean gain of at least so many percent
    #[arg(long, value_name = "PERCENT")]
    at_least: Option<f64>,
    /// Claim that no case is worse by more than so many percent
    #[arg(long, value_name = "PERCENT")]
    no_worse: Option<f64>,
    #[command(flatten)]
    workload: WorkloadArgs,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    effort: EffortArgs,
    /// Write every run, gain and verdict to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Judge what the schedulers must reach on modelled disks, with the parameters of the papers
///
/// mlf and mlf-8k: four applications of eight processes, 16 KiB strided and 256 KiB contiguous, read and write
/// (agios-2013, V), without and with client requests cut to 8 KiB, directly on four data servers. twins: shared
/// strided reads through two I/O nodes (twins-2017, V). Takes long: see --max-minutes.
#[derive(clap::Args)]
struct GoalsArgs {
    /// Which: mlf, mlf-8k, twins [default: all]
    #[arg(value_name = "GOAL")]
    goals: Vec<String>,
    #[command(flatten)]
    effort: EffortArgs,
    /// Write every run, gain and verdict to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with plots to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Measure the data path beside a minimal TCP server that does plain pread and pwrite
///
/// No device model, folders in memory, one request outstanding per client, one and four data servers, directly
/// and through an I/O node; the same clients, transport and verification for all.
#[derive(clap::Args)]
struct DatapathArgs {
    /// Repetitions of every load and way
    #[arg(long, default_value_t = 5, value_name = "N")]
    repetitions: u32,
    /// Numbers of data servers
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4], value_name = "N")]
    servers: Vec<usize>,
    /// Only loads whose name contains this
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Share of the full data volume
    #[arg(long, default_value_t = 1.0, value_name = "SHARE")]
    scale: f64,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measure what a scheduling decision costs: time per request and memory per queued request
#[derive(clap::Args)]
struct CoreArgs {
    /// Policies, with parameters as in fifo+merge=on [default: all]
    #[arg(value_delimiter = ',', value_name = "POLICIES")]
    policies: Vec<String>,
    /// Requests that stay queued
    #[arg(long, value_delimiter = ',', default_values_t = [1_000, 10_000, 100_000], value_name = "N")]
    queued: Vec<usize>,
    /// Longest time for one measurement
    #[arg(long, default_value = "5s", value_parser = parse_duration, value_name = "TIME")]
    patience: Duration,
    /// Write every measurement to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Measure the CPU and the memory of a cluster that nobody uses
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

/// The minimal server of the data path's yardstick
#[derive(clap::Args)]
#[command(hide = true)]
struct MinimalServerArgs {
    /// Folder of its files
    #[arg(long)]
    dir: PathBuf,
    /// File that it writes its address to once it listens
    #[arg(long)]
    address_file: PathBuf,
}

pub fn run(args: Args) -> Result<ExitCode> {
    match args.what {
        What::Run(args) => run_workload(args),
        What::Compare(args) => run_compare(args),
        What::Goals(args) => run_goals(args),
        What::Datapath(args) => run_datapath(args),
        What::Core(args) => run_core(args),
        What::Idle(args) => run_idle(args),
        What::Guided(args) => guided::run(args),
        What::Validate(args) => validate::run(args),
        What::MinimalServer(args) => minimal_server(&args),
    }
}

fn run_workload(args: RunArgs) -> Result<ExitCode> {
    let cases = args.workload.cases()?;
    let stop = catch_signals()?;
    let cluster = args.cluster.open(&stop)?;
    let options = RunOptions { fault: args.inject, verify: !args.no_verify, alone: args.alone, pair: 0 };
    let mut told = Vec::new();
    let mut wrong = false;
    for case in cases {
        let mut set = DataSet::new(&case.workload)?;
        set.prepare(cluster.storage(), &stop)?;
        let mut results: Vec<RunResult> = Vec::new();
        for _ in 0..args.runs.max(1) {
            let result = run_once(cluster.storage(), &mut set, &case.workload, &options, &stop)?;
            print(format!("{}\n{}\n", case.workload.describe(), result.show()).as_bytes())?;
            wrong |= options.verify && !result.verification.passed();
            results.push(result);
        }
        set.remove(cluster.storage())?;
        told.push(json!({ "name": case.name, "workload": case.workload, "results": results }));
    }
    write_json(args.json.as_deref(), &json!({ "cases": told }))?;
    if wrong {
        bail!("the data are not what was written");
    }
    Ok(ExitCode::SUCCESS)
}

fn run_compare(args: CompareArgs) -> Result<ExitCode> {
    let cases = args.workload.cases()?;
    let other = match (&args.other, args.on) {
        (Some(text), _) => impresario_workload::system::policy(text).map_err(usage)?,
        (None, Layer::Data) => PolicySpec::named("fifo"),
        (None, Layer::Io) => PolicySpec::named("none"),
    };
    let effort = args.effort.effort();
    let asked = Asked {
        systems: &args.systems,
        baselines: &args.baselines,
        on: args.on,
        other: &other,
        at_least: args.at_least.map(|p| p / 100.0),
        no_worse: args.no_worse.map(|p| p / 100.0),
    };
    let stop = catch_signals()?;
    let experiment = goals::asked(&asked, cases, args.cluster.data_servers()?, &effort).map_err(usage)?;
    let cluster = args.cluster.open(&stop)?;
    let outcome = compare_with_progress(cluster.storage(), &experiment, &stop)?;
    print(outcome.show().as_bytes())?;
    write_json(args.json.as_deref(), &outcome)?;
    write_page(args.html.as_deref(), "Comparison of schedulers", std::slice::from_ref(&outcome))?;
    Ok(verdict_code([&outcome]))
}

fn run_goals(args: GoalsArgs) -> Result<ExitCode> {
    let names = if args.goals.is_empty() { goals::NAMES.map(String::from).to_vec() } else { args.goals };
    let effort = args.effort.effort();
    let mut chosen = Vec::new();
    for name in &names {
        let unknown = || usage(format!("there is no goal {name}; there are {}", goals::NAMES.join(", ")));
        chosen.push(goals::goal(name, &effort).ok_or_else(unknown)?);
    }
    let stop = catch_signals()?;
    let mut outcomes = Vec::new();
    for goal in chosen {
        eprintln!("goal {}: {}", goal.name, goal.experiment.title);
        let plan = Plan { io_nodes: goal.io_nodes, device: Some(Default::default()), ..Plan::default() };
        let cluster = OwnCluster::start(&plan, &stop)?;
        let outcome = compare_with_progress(&Storage::of(&cluster), &goal.experiment, &stop)?;
        print(format!("{}\n", outcome.show()).as_bytes())?;
        outcomes.push(outcome);
        // Written after every goal: an hour of measuring must not be lost with the last one.
        write_json(args.json.as_deref(), &json!({ "goals": outcomes }))?;
        write_page(args.html.as_deref(), "What the schedulers reach", &outcomes)?;
        if stop.is_set() {
            break;
        }
    }
    Ok(verdict_code(&outcomes))
}

fn compare_with_progress(
    storage: &dyn Switch,
    experiment: &impresario_workload::compare::Experiment,
    stop: &Stop,
) -> Result<Outcome> {
    let mut line = Progress::new();
    compare(storage, experiment, stop, &mut |p| line.experiment(&p))
}

/// 0 when every claim holds; 1 when one does not, or is unresolved.
fn verdict_code<'a>(outcomes: impl IntoIterator<Item = &'a Outcome>) -> ExitCode {
    let mut claims = outcomes.into_iter().flat_map(|o| &o.claims);
    ExitCode::from(u8::from(claims.any(|c| c.verdict != Verdict::Holds)))
}

fn write_page(path: Option<&Path>, title: &str, outcomes: &[Outcome]) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, impresario_workload::compare_page::page(title, outcomes))
        .with_context(|| format!("writing {}", path.display()))
}

fn run_datapath(args: DatapathArgs) -> Result<ExitCode> {
    let mut loads = datapath::loads(args.scale);
    loads.retain(|l| args.only.as_ref().is_none_or(|text| l.name.contains(text)));
    if loads.is_empty() {
        let names: Vec<String> = datapath::loads(1.0).into_iter().map(|l| l.name).collect();
        return Err(usage(format!("--only leaves no load; there are: {}", names.join("; "))));
    }
    let stop = catch_signals()?;
    let mut samples = Vec::new();
    let mut line = Progress::new();
    for &servers in &args.servers {
        // The same kind of folder and transport for all; whoever is not measured only waits.
        let dir = cluster::folder(None)?;
        let (_children, minimal) = minimal_cluster(servers, dir.path(), &stop)?;
        let none = PolicySpec::named("none");
        let plan =
            Plan { data_servers: servers, io_nodes: 1, data_policy: none.clone(), io_policy: none, ..Plan::default() };
        let ours = OwnCluster::start(&plan, &stop)?;
        let (direct, through) = (Storage::of(&ours).direct(), Storage::of(&ours));
        let paths = [
            datapath::Path { way: datapath::Way::Minimal, target: &minimal },
            datapath::Path { way: datapath::Way::Direct, target: &direct },
            datapath::Path { way: datapath::Way::IoNode, target: &through },
        ];
        let told = &mut |sample: &datapath::Sample, left| line.sample(sample, left);
        samples.extend(datapath::measure(&paths, servers, &loads, args.repetitions.max(1), &stop, told)?);
    }
    line.end();
    print(datapath::table(&samples).as_bytes())?;
    write_json(args.json.as_deref(), &json!({ "samples": samples }))?;
    Ok(ExitCode::SUCCESS)
}

/// Minimal servers as processes of their own.
fn minimal_cluster(
    servers: usize,
    dir: &Path,
    stop: &Stop,
) -> Result<(impresario_workload::children::Children, minimal::Minimal)> {
    let mut children = impresario_workload::children::Children::default();
    let file = |i: usize, end: &str| dir.join(format!("minimal.{i}.{end}"));
    for i in 0..servers {
        let folder = file(i, "dir");
        std::fs::create_dir(&folder)?;
        let arguments = [
            "bench".into(),
            "minimal-server".into(),
            "--dir".into(),
            folder.display().to_string(),
            "--address-file".into(),
            file(i, "address").display().to_string(),
        ];
        children.start(&format!("minimal.{i}"), &arguments, &file(i, "log"))?;
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut addresses = Vec::new();
    for i in 0..servers {
        let address = loop {
            stop.check()?;
            children.check()?;
            match std::fs::read_to_string(file(i, "address")).ok().and_then(|t| t.parse().ok()) {
                Some(address) => break address,
                None if Instant::now() > deadline => bail!("the minimal server {i} did not start within 20 s"),
                None => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        addresses.push(address);
    }
    let pids = children.pids().into_iter().map(|(_, pid)| pid).collect();
    Ok((children, minimal::Minimal { servers: addresses, pids }))
}

fn minimal_server(args: &MinimalServerArgs) -> Result<ExitCode> {
    let listener = TcpListener::bind("127.0.0.1:0").context("listening on 127.0.0.1")?;
    let new = args.address_file.with_extension("new");
    std::fs::write(&new, listener.local_addr()?.to_string())?;
    std::fs::rename(&new, &args.address_file)?;
    minimal::serve(&listener, &args.dir)?;
    Ok(ExitCode::SUCCESS)
}

fn run_core(args: CoreArgs) -> Result<ExitCode> {
    let mut policies = Vec::new();
    for text in &args.policies {
        policies.push(impresario_workload::system::policy(text).map_err(usage)?);
    }
    if policies.is_empty() {
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
    let results = core_bench::measure_all(&policies, &args.queued, args.patience, &stop, |r| {
        line.show(&format!("{} {:?} {}: {:.0} ns a request", r.policy, r.mix, r.queued, r.ns_per_request));
    })?;
    line.end();
    print(core_bench::table(&results).as_bytes())?;
    write_json(args.json.as_deref(), &json!({ "results": results }))?;
    Ok(ExitCode::SUCCESS)
}

/// An idle cluster may use this share of one core in all.
const IDLE_CORE_MAX: f64 = 0.01;
/// A data server may use so much memory, bytes.
const DATA_SERVER_BYTES_MAX: u64 = 50_000_000;

fn run_idle(args: IdleArgs) -> Result<ExitCode> {
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
    let (mut total, mut largest, mut told) = (0.0, 0, Vec::new());
    for (i, (name, pid)) in cluster.pids().iter().enumerate() {
        let used = before[i].zip(after[i]).map(|(b, a)| a.saturating_sub(b).as_secs_f64() / seconds);
        let (Some(share), Some(rss)) = (used, process_rss_bytes(*pid)) else { bail!("server {name} is gone") };
        total += share;
        if name.starts_with("data.") {
            largest = largest.max(rss);
        }
        out += &format!("{name:<10} {:>16.3} {:>12}\n", share * 100.0, show_bytes(rss as f64));
        told.push(json!({ "server": name, "cpu_share": share, "rss_bytes": rss }));
    }
    let verdict = |holds| if holds { "holds" } else { "does not hold" };
    out += &format!("idle cluster below 1 % of a core: {:.3} % — {}\n", total * 100.0, verdict(total < IDLE_CORE_MAX));
    out += &format!(
        "data server below 50 MB of memory: {:.1} MB — {}\n",
        largest as f64 / 1e6,
        verdict(largest < DATA_SERVER_BYTES_MAX)
    );
    print(out.as_bytes())?;
    write_json(args.json.as_deref(), &json!({ "seconds": seconds, "cpu_share": total, "servers": told }))?;
    Ok(ExitCode::from(u8::from(total >= IDLE_CORE_MAX || largest >= DATA_SERVER_BYTES_MAX)))
}
