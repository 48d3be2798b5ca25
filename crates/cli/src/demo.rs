//! `impresario demo`: in three minutes, what scheduling is for.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::compare::{Experiment, Outcome, compare};
use impresario_workload::demonstration as demo;
use impresario_workload::stop::Stop;
use impresario_workload::storage::Storage;

use crate::print;
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json, write_text};

/// Show in about three minutes what scheduling is for
///
/// Lets four applications share two data servers on modelled disks below this kernel's own page cache and I/O scheduler
/// (needs root; left out without), without a scheduler and with the default; then four data servers on bare
/// modelled disks and two I/O nodes, without a scheduler and with each one. Verifies every byte, prints a table, writes a
/// page with plots, and takes everything away again, also at Ctrl-C. Each figure is one run: `impresario bench`
/// repeats runs and says how sure a difference is.
#[derive(clap::Args)]
pub struct Args {
    /// The page with plots
    #[arg(long, default_value = "demo-report.html", value_name = "FILE")]
    html: PathBuf,
    /// Write the runs to a file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Move a fraction of the data: for trying out, the times then say little
    #[arg(long)]
    quick: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[Some(args.html.as_path()), args.json.as_deref()])?;
    let stop = catch_signals()?;
    let plan = Plan {
        data_servers: demo::KERNEL_DATA_SERVERS,
        io_nodes: 0,
        kernel_disk: Some(Default::default()),
        ..Plan::default()
    };
    tell!("Starting {} data servers on modelled disks below this kernel …", demo::KERNEL_DATA_SERVERS);
    let kernel = match OwnCluster::start(&plan, &stop) {
        Ok(cluster) => Some(measure(cluster, &demo::kernel_experiment(args.quick), &stop)?),
        Err(error) if stop.is_set() => return Err(error),
        Err(error) => {
            tell!("Left out: {error:#}");
            None
        }
    };
    tell!("Starting {} data servers on bare modelled disks and {} I/O nodes …", demo::DATA_SERVERS, demo::IO_NODES);
    let plan = Plan {
        data_servers: demo::DATA_SERVERS,
        io_nodes: demo::IO_NODES,
        device: Some(Default::default()),
        // The papers' servers, which reorder and merge but do not read ahead.
        read_ahead_bytes: 0,
        ..Plan::default()
    };
    let bare = measure(OwnCluster::start(&plan, &stop)?, &demo::experiment(args.quick), &stop)?;
    let shown = demo::Shown { kernel, bare };
    all_written([
        print(demo::table(&shown)).map(drop),
        write_text(Some(&args.html), || Ok(demo::page(&shown))),
        write_json(args.json.as_deref(), &demo::runs(&shown)),
    ])?;
    tell!("The page with plots is {}.", args.html.display());
    Ok(ExitCode::SUCCESS)
}

/// Runs an experiment on a cluster, which is taken away afterwards.
fn measure(cluster: OwnCluster, experiment: &Experiment, stop: &Stop) -> Result<Outcome> {
    let mut line = Progress::new();
    let outcome = compare(&Storage::of(&cluster), experiment, stop, &mut |p| line.experiment(&p))?;
    line.end();
    Ok(outcome)
}
