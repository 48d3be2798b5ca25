//! `impresario-lab guided`: the measurements of guided I/O.

use std::path::PathBuf;
use std::process::ExitCode;

use crate::guided::page;
use crate::guided::suite::{EXPERIMENTS, Options, run as run_suite};
use anyhow::{Context, Result};
use impresario_workload::stats::Verdict;

use crate::print;
use impresario_workload::progress::{catch_signals, write_json};

/// Measure guided I/O: unmodified programs with planned hints and without, from a cold cache
///
/// Each experiment records a program once, plans hints from that run, and then runs the program with and without
/// them in pairs. Disks of limited speed are loop devices of our own; the program, the advice manager and everything
/// they start share the limits. Requests are counted by the kernel. Needs root, and mkfs.ext4 and losetup.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  sudo impresario-lab guided strided
  sudo impresario-lab guided --python venv/bin/python --html guided.html")]
pub struct Args {
    /// Experiments by name [default: all]
    #[arg(value_name = "EXPERIMENT")]
    only: Vec<String>,
    /// Pairs of runs of each experiment
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pairs: u32,
    /// A Python with uproot and h5py, for the experiments that read ROOT and HDF5 files
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
    /// Where the disks are made; needs 4 GB
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// Write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write every run and verdict to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Tell the names of the experiments and end
    #[arg(long)]
    list: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    if args.list {
        let lines: String = EXPERIMENTS.iter().map(|(name, what)| format!("{name:<14} {what}\n")).collect();
        return print(lines.as_bytes());
    }
    let stop = catch_signals()?;
    let options = Options { only: args.only, pairs: args.pairs, python: args.python, folder: args.dir };
    let (rows, missing) = run_suite(&options, &stop, &mut |line| eprintln!("{line}"))?;
    print(page::table(&rows).as_bytes())?;
    if let Some(file) = &args.html {
        std::fs::write(file, page::page(&rows)).with_context(|| format!("writing {}", file.display()))?;
    }
    write_json(args.json.as_deref(), &rows)?;
    let failed = rows.iter().flat_map(|r| &r.claims).any(|(_, verdict)| *verdict == Verdict::DoesNotHold);
    if missing > 0 {
        eprintln!("{missing} of the rows are missing: their programs did not get through; see above");
    }
    Ok(if failed || missing > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
