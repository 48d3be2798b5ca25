//! What a crowd takes from honest clients: their rate at a data server without and with 10,000 silent and 100 hostile
//! connections at its door, and the server's memory.
//!
//! One data server without a device model, in memory; honest clients connect over loopback. Each repetition measures both, in
//! random order, and ratios are taken within it. The crowd lives in this process, so what it costs itself, in processor time
//! of its threads and of the kernel, counts as lost too: on a machine with few processors that is the larger part.

use std::net::SocketAddrV4;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use impresario_base::Random;
use impresario_base::machine::raise_file_limit;
use impresario_sched::PolicySpec;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::cpu::process_rss_bytes;
use impresario_workload::crowd::Crowd;
use impresario_workload::dataset::DataSet;
use impresario_workload::progress::{Progress, catch_signals, check_outputs};
use impresario_workload::rounds::Rounds;
use impresario_workload::runner::{RunOptions, run as run_load};
use impresario_workload::stats::{Verdict, at_least, show};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use serde_json::json;

use crate::{datapath, impresario, named, report};

/// What share of their rate honest clients keep at least, and what a server may have resident, bytes.
const TARGET: (f64, u64) = (0.9, 200_000_000);
/// The subjects of a repetition.
const WITHOUT: usize = 0;
const WITH: usize = 1;
/// So long after its arrival a crowd's connections have been accepted, and refused or evicted.
const SETTLE: Duration = Duration::from_secs(5);
/// Longest wait until the crowd is there.
const GATHERING_MAX: Duration = Duration::from_secs(120);

/// Measure what a crowd of silent and hostile connections takes from honest clients
#[derive(clap::Args)]
pub struct Args {
    /// Repetitions, each without and with the crowd
    #[arg(long, default_value_t = 10, value_name = "N")]
    repetitions: u32,
    /// Length of a run: 20 is some tens of gigabytes. Clients connect at its beginning, which a crowd delays by seconds: a run
    /// should last much longer
    #[arg(long, default_value_t = 20.0, value_name = "FACTOR")]
    scale: f64,
    /// Only loads whose names contain this
    #[arg(long, value_name = "TEXT", default_value = "16 clients")]
    load: String,
    /// Silent connections
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    silent: usize,
    /// How many of them say hello first; the server holds these, and closes others after 5 s
    #[arg(long, default_value_t = 1000, value_name = "N")]
    greeted: usize,
    /// Hostile connections
    #[arg(long, default_value_t = 100, value_name = "N")]
    hostile: usize,
    /// Connections that the server has at once (`max_connections`); with more than the crowd has it holds all of it
    #[arg(long, default_value_t = 1024, value_name = "N")]
    max_connections: u32,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<std::path::PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let loads = named(datapath::loads(args.scale), |load| load.name.clone(), &[&args.load])?;
    let stop = catch_signals()?;
    // Servers that are started from here have it, too.
    let descriptors = raise_file_limit(4 * (args.silent + args.hostile) as u64 + 4096).now.unwrap_or(u64::MAX);
    // A server gives connections half of its descriptors.
    ensure!(
        descriptors >= 2 * u64::from(args.max_connections) && descriptors >= (args.silent + args.hostile + 500) as u64,
        "the limit of open files is {descriptors}: raise it (ulimit -n), or take a smaller crowd"
    );
    let plan = Plan {
        data_servers: 1,
        io_nodes: 0,
        data_policy: PolicySpec::named("auto"),
        max_connections: Some(args.max_connections),
        program: Some(impresario()?),
        ..Plan::default()
    };
    let cluster = OwnCluster::start(&plan, &stop)?;
    let pid = cluster.pids().into_iter().find(|(name, _)| name.starts_with("data")).context("a data server")?.1;
    let address: SocketAddrV4 = cluster.config.data.first().context("a data server")?.address.parse()?;
    let target = Storage::of(&cluster).direct();
    let (mut random, mut line, mut all) = (Random::new(1), Progress::new(), Vec::new());
    let (mut out, mut resident_max, mut verdicts) = (String::new(), 0, Vec::new());
    for load in loads {
        let mut set = DataSet::new(&load.workload)?;
        set.prepare(&target, &stop)?;
        let mut last = [f64::NAN; 2];
        let rates = Rounds::warmed_up(args.repetitions).measure(2, &mut random, &stop, |repetition, subject| {
            let with = subject == WITH;
            let with_text = if with { "with" } else { "without" };
            // What was measured stays on the screen when it is stopped.
            let so_far = match 100.0 * last[WITH] / last[WITHOUT] {
                kept if kept.is_finite() => format!("; last, {kept:.1} % were kept"),
                _ => String::new(),
            };
            line.show(&format!("{}, repetition {repetition}, {with_text} the crowd{so_far}", load.name));
            let crowd = if with { Some(gather(args, address, &stop)?) } else { None };
            let options = RunOptions { verify: false, ..RunOptions::default() };
            let rate = run_load(&target, &mut set, &load.workload, &options, &stop)?.requests_per_s;
            let resident = process_rss_bytes(pid).context("the data server has ended")?;
            (last[subject], resident_max) = (rate, resident.max(resident_max));
            drop(crowd);
            Ok(rate)
        })?;
        set.remove(&target)?;
        let (kept, without) = (rates.ratio(WITH, WITHOUT, |rate| *rate), rates.mean(WITHOUT, |rate| *rate));
        verdicts.push(at_least(kept, TARGET.0));
        out += &format!(
            "{:<40} {without:>10.0}/s without, with the crowd {} of that\n",
            load.name,
            show(&kept, " %", |kept| format!("{:.1}", 100.0 * kept))
        );
        all.push(json!({ "load": load.name, "per_s_without_and_with": rates.rounds }));
    }
    line.end();
    let (kept_min, resident_limit) = TARGET;
    out += &format!(
        "honest clients keep at least {:.0} %: {}; the server had at most {:.1} MB resident, less than {:.0} MB: {}\n",
        100.0 * kept_min,
        Verdict::of_all(verdicts),
        resident_max as f64 / 1e6,
        resident_limit as f64 / 1e6,
        Verdict::of(resident_max < resident_limit)
    );
    report(&out, args.json.as_deref(), &json!({ "loads": all, "resident_max_bytes": resident_max }))
}

/// A crowd that is all there.
fn gather(args: &Args, address: SocketAddrV4, stop: &Stop) -> Result<Crowd> {
    let crowd = Crowd::gather(address, args.silent, args.greeted, args.hostile)?;
    let began = Instant::now();
    while crowd.fates().silent_made.load(Relaxed) < args.silent as u64 {
        stop.check()?;
        if began.elapsed() > GATHERING_MAX {
            bail!("the crowd does not come: {:?}", crowd.fates());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(SETTLE);
    Ok(crowd)
}
