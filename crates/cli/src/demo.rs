//! `impresario demo`: in two minutes, what scheduling is for.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_workload::cluster::{OwnCluster, Plan};
use impresario_workload::compare::compare;
use impresario_workload::demonstration as demo;
use impresario_workload::storage::Storage;

use crate::bench::{Progress, catch_signals, write_json};
use crate::print;

/// Show in about two minutes what scheduling is for
///
/// Starts four data servers on modelled disks and two I/O nodes in a folder in memory, lets four applications
/// share them under no scheduler and under each one, verifies every byte, prints a table, writes a page with
/// plots, and takes everything away again, also at Ctrl-C. Each figure is one run: `impresario bench` repeats
/// runs and says how sure a difference is.
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
    let stop = catch_signals()?;
    let experiment = demo::experiment(args.quick);
    eprintln!("Starting {} data servers on modelled disks and {} I/O nodes …", demo::DATA_SERVERS, demo::IO_NODES);
    let plan = Plan {
        data_servers: demo::DATA_SERVERS,
        io_nodes: demo::IO_NODES,
        device: Some(Default::default()),
        ..Plan::default()
    };
    let cluster = OwnCluster::start(&plan, &stop)?;
    let mut line = Progress::new();
    let outcome = compare(&Storage::of(&cluster), &experiment, &stop, &mut |p| line.experiment(&p))?;
    line.end();
    drop(cluster);
    print(demo::table(&outcome).as_bytes())?;
    std::fs::write(&args.html, demo::page(&outcome)).with_context(|| format!("writing {}", args.html.display()))?;
    eprintln!("The page with plots is {}.", args.html.display());
    write_json(args.json.as_deref(), &demo::runs(&outcome))?;
    Ok(ExitCode::SUCCESS)
}
