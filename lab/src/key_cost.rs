//! The cost of keys and certificates: throughput and processor time of data and metadata with each protection of frames, and
//! through TLS, compared with the same cluster without keys. Processor time is that of clients and servers together; on a busy machine it is
//! steadier than throughput.
//!
//! One cluster per protection, with one data server without a device model and a metadata server, in memory; clients
//! connect to both directly over loopback. All clusters run at once and one is measured at a time. The order is random
//! in each repetition, and ratios are taken within it.

use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use impresario_base::Random;
use impresario_client::{Client, ClientOptions, Via};
use impresario_config::{Protect, Security};
use impresario_sched::PolicySpec;
use impresario_wire::{MetaCall, Target};
use impresario_workload::access::Target as _;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::cpu::process_cpu;
use impresario_workload::dataset::DataSet;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::rounds::{Paired, Rounds};
use impresario_workload::runner::{RunOptions, run as run_load};
use impresario_workload::stats::{Interval, show};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use serde_json::json;

use crate::{datapath, impresario, report};

/// Measure what keys and certificates cost, in throughput of data and metadata
#[derive(clap::Args)]
pub struct Args {
    /// Repetitions, each with every protection once
    #[arg(long, default_value_t = 8, value_name = "N")]
    repetitions: u32,
    /// Length of a run: 1 is some gigabytes
    #[arg(long, default_value_t = 0.5, value_name = "FACTOR")]
    scale: f64,
    /// Only loads whose names contain this
    #[arg(long, value_name = "TEXT")]
    load: Option<String>,
    /// Start the clusters in the opposite order: one that is started earlier may be faster
    #[arg(long)]
    reverse: bool,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
}

/// Name, security and protection of each cluster.
const MODES: [(&str, Security, Protect); 5] = [
    ("none", Security::None, Protect::Handshake),
    ("handshake", Security::Key, Protect::Handshake),
    ("headers", Security::Key, Protect::Headers),
    ("all", Security::Key, Protect::All),
    ("tls", Security::Tls, Protect::Handshake),
];

/// Threads and rounds of the metadata loads; a round creates a file, stats it and removes it.
const META_LOADS: [(&str, usize, u32); 2] =
    [("create, stat, unlink, 1 thread", 1, 3000), ("create, stat, unlink, 8 threads", 8, 600)];

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let stop = catch_signals()?;
    let certificates = tempfile::tempdir()?;
    make_certificates(certificates.path())?;
    let start = |(_, security, protect): &(&str, Security, Protect)| {
        let plan = Plan {
            data_servers: 1,
            io_nodes: 0,
            data_policy: PolicySpec::named("auto"),
            security: *security,
            certificates: (*security == Security::Tls).then(|| certificates.path().join("tls")),
            protect: *protect,
            program: Some(impresario()?),
            ..Plan::default()
        };
        OwnCluster::start(&plan, &stop)
    };
    let mut clusters = match args.reverse {
        false => MODES.iter().map(start).collect::<Result<Vec<_>>>()?,
        true => MODES.iter().rev().map(start).collect::<Result<Vec<_>>>()?,
    };
    if args.reverse {
        clusters.reverse();
    }
    let wanted = |name: &str| args.load.as_ref().is_none_or(|text| name.contains(text.as_str()));
    let mut out = format!("{:<40} {:>12}", "load", "without/s");
    out += &format!(" {:>9}", "cpu us");
    for (name, ..) in MODES.iter().skip(1) {
        out += &format!(" {:>26} {:>26}", format!("{name}: throughput lost %"), "cpu more %");
    }
    out.push('\n');
    let (mut random, mut line, mut all) = (Random::new(1), Progress::new(), Vec::new());
    let mut table = |name: &str, samples: Paired<Sample>| {
        out += &format!("{name:<40} {:>12.0} {:>9.1}", samples.mean(0, |s| s.per_s), samples.mean(0, |s| s.cpu_us));
        for mode in 1..MODES.len() {
            let percent = |change: Interval| show(&change, "", |share| format!("{:.1}", 100.0 * share));
            let lost = percent(samples.less(mode, 0, |s| s.per_s));
            out += &format!(" {lost:>26} {:>26}", percent(samples.more(mode, 0, |s| s.cpu_us)));
        }
        out.push('\n');
        let each = |round: &Vec<Sample>| round.iter().map(|s| [s.per_s, s.cpu_us]).collect::<Vec<_>>();
        let rows = samples.rounds.iter().map(each).collect::<Vec<_>>();
        all.push(json!({ "load": name, "modes": MODES.map(|(name, ..)| name), "per_s_and_cpu_us": rows }));
    };
    let repetitions = Rounds::warmed_up(args.repetitions);
    for load in datapath::loads(args.scale).iter().filter(|load| wanted(&load.name)) {
        let targets: Vec<Storage> = clusters.iter().map(|cluster| Storage::of(cluster).direct()).collect();
        let mut sets = Vec::new();
        for target in &targets {
            let mut set = DataSet::new(&load.workload)?;
            set.prepare(target, &stop)?;
            sets.push(set);
        }
        let rates = repetitions.measure(MODES.len(), &mut random, &stop, |repetition, mode| {
            line.show(&format!("{}, repetition {repetition}, {}", load.name, MODES[mode].0));
            let options = RunOptions { verify: false, ..RunOptions::default() };
            let before = own_cpu_s();
            let result = run_load(&targets[mode], &mut sets[mode], &load.workload, &options, &stop)?;
            let cpu_s = result.server_cpu_s.unwrap_or_default() + own_cpu_s() - before;
            Ok(Sample { per_s: result.requests_per_s, cpu_us: 1e6 * cpu_s / result.requests as f64 })
        })?;
        table(&load.name, rates);
        targets.iter().zip(&sets).try_for_each(|(target, set)| set.remove(target))?;
    }
    for (name, threads, rounds) in META_LOADS.into_iter().filter(|(name, ..)| wanted(name)) {
        let rounds = ((f64::from(rounds) * args.scale) as u32).max(1);
        let rates = repetitions.measure(MODES.len(), &mut random, &stop, |repetition, mode| {
            line.show(&format!("{name}, repetition {repetition}, {}", MODES[mode].0));
            metadata(&clusters[mode], threads, rounds, &stop)
        })?;
        table(name, rates);
    }
    line.end();
    report(&out, args.json.as_deref(), &all)
}

/// Makes `tls` in a folder as administrators do.
fn make_certificates(folder: &Path) -> Result<()> {
    let blocks = include_str!("../../doc/SECURITY.md").split("```sh\n");
    let recipe = blocks.filter_map(|block| block.split("```").next()).find(|block| block.contains("openssl req -x509"));
    let mut shell = Command::new("sh");
    shell.args(["-ec", recipe.context("a recipe")?]).current_dir(folder).stdout(Stdio::null()).stderr(Stdio::null());
    let status = shell.status().context("starting a shell")?;
    ensure!(status.success(), "openssl made no certificates: install it (Debian: openssl)");
    Ok(())
}

/// Calls per second of threads that create, stat and remove their own files through one client.
fn metadata(cluster: &OwnCluster, threads: usize, rounds: u32, stop: &Stop) -> Result<Sample> {
    let options = ClientOptions { via: Via::Direct, ..ClientOptions::default() };
    let client = Client::connect(&cluster.config, options)?;
    let target = Storage::of(cluster);
    let servers_cpu_s = || cpu_of(&target);
    let (began, before) = (Instant::now(), own_cpu_s() + servers_cpu_s());
    let work = &|thread: usize| -> Result<()> {
        for round in 0..rounds {
            stop.check()?;
            let path = format!("f{thread}.{round}").into_bytes();
            let (mode, uid, gid) = (0o644, 0, 0);
            let made =
                client.meta(MetaCall::Create { path: path.clone(), mode, uid, gid, exclusive: true, layout: None })?;
            let impresario_wire::Answer::Opened(opened) = made else { anyhow::bail!("no file was made: {made:?}") };
            client.meta(MetaCall::Close { handle: opened.handle, wrote: false })?;
            client.meta(MetaCall::GetAttr { target: Target::Path(path.clone()) })?;
            client.meta(MetaCall::Unlink { path })?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|thread| scope.spawn(move || work(thread))).collect();
        let join =
            |thread: std::thread::ScopedJoinHandle<'_, Result<()>>| thread.join().ok().context("a thread panicked")?;
        started.into_iter().try_for_each(join)
    })?;
    let (calls, elapsed) = (f64::from(4 * rounds) * threads as f64, began.elapsed().max(Duration::from_nanos(1)));
    let cpu_s = own_cpu_s() + servers_cpu_s() - before;
    Ok(Sample { per_s: calls / elapsed.as_secs_f64(), cpu_us: 1e6 * cpu_s / calls })
}

/// The result of a run.
#[derive(Clone, Copy, Default)]
struct Sample {
    per_s: f64,
    /// Processor time per request, of clients and servers.
    cpu_us: f64,
}

/// Processor time that this process, the clients, has used.
fn own_cpu_s() -> f64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

/// Processor time that the servers have used.
fn cpu_of(target: &Storage) -> f64 {
    target.pids().into_iter().filter_map(process_cpu).map(|time| time.as_secs_f64()).sum()
}
