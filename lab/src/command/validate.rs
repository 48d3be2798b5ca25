//! `impresario-lab validate`: live runs compared with their simulation.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::validate::{self, Cluster, Side, Swapped, Waits};
use anyhow::{Context, Result};
use impresario_client::{Client, ClientOptions, Via};
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::compare::{Experiment, Outcome, compare};
use impresario_workload::dataset::DataSet;
use impresario_workload::demonstration as demo;
use impresario_workload::result::RunResult;
use impresario_workload::runner::{RunOptions, run as run_once};
use impresario_workload::stats::{Verdict, median};
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;
use impresario_workload::system::Switch;
use serde::{Deserialize, Serialize};

use crate::{impresario, print, usage};
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json};

/// Compare the simulator with the real thing: the demonstration live, and its simulation beside it
///
/// Runs the demonstration's cases on a cluster of this machine with modelled disks, simulates each with the same
/// parameters and files at the same places, and shows both with the errors. Makespans within 15 %, requests at the
/// disk within 10 % and the same order of the policies are asked; a run that does not count is left out.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario-lab validate
  impresario-lab validate --pairs 9 --markdown --json validation.json
  impresario-lab validate --pairs 40 --case 'small strided reads' --system twins")]
pub struct Args {
    /// Live runs of each case and system
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pairs: u32,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    case: String,
    /// Only systems whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    system: String,
    /// Tell the table as Markdown
    #[arg(long)]
    markdown: bool,
    /// Write all figures to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Take the live runs of a file that `--json` wrote before, and only simulate
    #[arg(long, value_name = "FILE", conflicts_with_all = ["pairs", "case", "system", "quick"])]
    live: Option<PathBuf>,
    /// Move a fraction of the data: for trying out
    #[arg(long)]
    quick: bool,
}

/// Two systems whose live runs differ by less have no order.
const ORDER_SHARE: f64 = 0.05;

/// What `--json` writes and `--live` reads.
#[derive(Serialize, Deserialize)]
struct Told {
    waits: Waits,
    sides: Vec<Side>,
    swapped: Vec<Swapped>,
    /// Every live run.
    live: Outcome,
}

/// Those whose name contains a text.
fn named<T: Clone>(what: &str, all: &[T], name: fn(&T) -> &str, text: &str) -> Result<Vec<T>> {
    let found: Vec<T> = all.iter().filter(|one| name(one).contains(text)).cloned().collect();
    if found.is_empty() {
        let there = all.iter().map(name).collect::<Vec<_>>().join("; ");
        return Err(usage(format!("the name of no {what} contains {text:?}; there are: {there}")));
    }
    Ok(found)
}

/// The demonstration's cases on a cluster of this machine.
fn live(args: &Args) -> Result<(Outcome, Waits)> {
    let stop = catch_signals()?;
    let all = demo::experiment(args.quick);
    let cases = named("case", &all.cases, |c| &c.name, &args.case)?;
    let systems = named("system", &all.systems, |s| &s.name, &args.system)?;
    let experiment = Experiment {
        // The error is that of each system alone.
        baselines: Vec::new(),
        cases,
        systems,
        pairs: args.pairs,
        pairs_max: args.pairs,
        tries: 2,
        shuffle: true,
        ..all
    };
    let live = OwnCluster::start(&plan()?, &stop)?;
    let one_way_us = one_way(&live)?.as_secs_f64() * 1e6;
    let handover_us = validate::handover_us(&run_alone(&live, &stop)?, one_way_us);
    let waits = Waits { one_way_us, handover_us, timer_spread_us: validate::timer_spread_us() };
    let mut line = Progress::new();
    let outcome = compare(&Storage::of(&live), &experiment, &stop, &mut |p| line.experiment(&p))?;
    line.end();
    Ok((outcome, waits))
}

fn plan() -> Result<Plan> {
    Ok(Plan {
        data_servers: demo::DATA_SERVERS,
        io_nodes: demo::IO_NODES,
        device: Some(impresario_device::DeviceParams::default()),
        read_ahead_bytes: 0,
        program: Some(impresario()?),
        ..Plan::default()
    })
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let (outcome, waits) = match &args.live {
        Some(file) => {
            let text = std::fs::read(file).with_context(|| format!("reading {}", file.display()))?;
            let told: Told = serde_json::from_slice(&text)
                .with_context(|| format!("{} is not what “impresario-lab validate --json” writes", file.display()))?;
            (told.live, told.waits)
        }
        None => live(&args)?,
    };
    let plan = Plan { device: Some(Default::default()), ..Plan::default() };
    let cluster = Cluster {
        io_nodes: demo::IO_NODES as u16,
        data_servers: demo::DATA_SERVERS as u16,
        stripe_bytes: plan.stripe_bytes,
        device: plan.device.unwrap_or_default(),
        waits,
    };
    let sides = validate::sides(&outcome, &cluster)?;
    print(validate::table(&sides, args.markdown).as_bytes())?;
    let wrong = validate::swapped(&sides, ORDER_SHARE);
    let counted = sides.iter().filter(|s| s.live_runs > 0).count();
    let of = |verdict| sides.iter().filter(|s| s.verdict() == verdict).count();
    let (holding, failing) = (of(Verdict::Holds), of(Verdict::DoesNotHold));
    let Waits { one_way_us, handover_us, timer_spread_us } = waits;
    let mut text = format!(
        "\nMeasured before: one way between two processes {one_way_us:.0} µs; hand-over within an I/O node {handover_us:.0} \
         µs; timers differ by {timer_spread_us:.0} µs.\nWithin 15 % (time) and 10 % (requests at the disk): {holding} of {} hold, \
         {failing} do not, {} are unresolved: their live runs differ too much.\n",
        sides.len(),
        sides.len() - holding - failing
    );
    for w in &wrong {
        text += &format!("Order: {}: live {} is faster, simulated {} is.\n", w.case, w.faster_live, w.faster_simulated);
    }
    if counted < sides.len() {
        let left = sides.len() - counted;
        text += &format!("Unresolved: of {left} cases no live run counts; the machine was too busy.\n");
    }
    if wrong.is_empty() && counted == sides.len() {
        text += &format!("The order of systems that differ by more than {:.0} % is the same.\n", ORDER_SHARE * 100.0);
    }
    let complete = holding == sides.len() && wrong.is_empty();
    let told = Told { waits, sides, swapped: wrong, live: outcome };
    all_written([print(text.as_bytes()).map(drop), write_json(args.json.as_deref(), &told)])?;
    Ok(if complete { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Half of the median time of a request to a data server that does not involve its disk.
fn one_way(cluster: &OwnCluster) -> Result<Duration> {
    let options = ClientOptions { name: "bench validate".into(), via: Via::Direct, ..ClientOptions::default() };
    let client = std::sync::Arc::new(Client::connect(&cluster.config, options)?);
    let file = client.create("one-way", Default::default()).context("making a file to ask about")?;
    let mut times = Vec::new();
    for _ in 0..500 {
        let begin = Instant::now();
        client.stat_data(file.key(), &file.layout())?;
        times.push(begin.elapsed().as_secs_f64());
    }
    drop(file);
    client.unlink("one-way")?;
    Ok(Duration::from_secs_f64(median(&times) / 2.0))
}

/// One process alone on the cluster, without any policy.
fn run_alone(cluster: &OwnCluster, stop: &Stop) -> Result<RunResult> {
    let (target, workload) = (Storage::of(cluster), validate::alone());
    let none = demo::experiment(false).systems.into_iter().next().context("the demonstration has no systems")?;
    target.switch(&none)?;
    let mut set = DataSet::new(&workload)?;
    set.prepare(&target, stop)?;
    let result = run_once(&target, &mut set, &workload, &RunOptions::default(), stop)?;
    set.remove(&target)?;
    Ok(result)
}
