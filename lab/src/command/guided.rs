//! `impresario-lab guided`: the measurements of guided I/O.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use crate::guided::beds::Device;
use crate::guided::held_out;
use crate::guided::slow_mount::Slowness;
use crate::guided::suite::{EXPERIMENTS, Options, PAIRS, run as run_suite};
use crate::guided::{maps, page, table};
use anyhow::Result;
use impresario_workload::stats::Verdict;

use crate::{print, usage};
use impresario_workload::progress::{all_written, catch_signals, check_outputs, write_json, write_text};

/// Measure guided I/O: unmodified programs with planned hints and without, from a cold cache
///
/// Each experiment records a program once, plans hints from that run, and then runs the program with and without
/// them in pairs. Disks of limited speed are loop devices of our own; the program, the advice manager and everything
/// they start share the limits. Requests are counted by the kernel. Needs root, and mkfs.ext4 and losetup.
///
/// "sizes" is the paper's sweep of files shorter and longer than memory; it takes less than ten minutes.
///
/// With --held-out programs run that guided I/O was not developed with, without a plan and with a plan from another file of
/// the same kind, on a mount where each read request takes 5 ms and on the machine's own disk. With --maps one program adds up a
/// mapped file, from memory and guided from that mount, and its page table is filled in different ways.
///
/// With --table the same programs run on five devices, without guided I/O, with "assist run --learn" for the first time, and with
/// what was learnt: whether any is slower by more than 1 % and 20 ms. With --json each cell is kept as it is measured, and the
/// same command goes on where it was stopped.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  sudo impresario-lab guided strided
  sudo impresario-lab guided sizes --html sizes.html
  sudo impresario-lab guided --python venv/bin/python --html guided.html
  sudo impresario-lab guided --held-out tar sql-scan --pairs 5
  sudo impresario-lab guided --table --python venv/bin/python --json table.json
  sudo impresario-lab guided --table --on mount,disk --json table.json tar cp
  sudo impresario-lab guided --table --node --json node.json
  sudo HELD_OUT_MODEL_MB=2048 impresario-lab guided --held-out --on mount --pairs 5 model")]
pub struct Args {
    /// Experiments by name, or programs with --held-out and --table [default: all]
    #[arg(value_name = "EXPERIMENT")]
    only: Vec<String>,
    /// Pairs of runs of each experiment [default: 9, of "sizes" and --table 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pairs: Option<u32>,
    /// A Python with uproot and h5py, for the experiments that read ROOT and HDF5 files; with --held-out and --table it needs NumPy,
    /// too, and pyarrow for Parquet [there: /usr/bin/python3]
    #[arg(long, value_name = "PROGRAM")]
    python: Option<PathBuf>,
    /// Where the disks are made; needs 4 GB
    #[arg(long, default_value = "/var/tmp", value_name = "DIR")]
    dir: PathBuf,
    /// Write a page with plots
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write every run and verdict to a file; with --table cells that are in it already are kept
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Run programs and files that were not used in development
    #[arg(long, group = "programs")]
    held_out: bool,
    /// Run them on all devices, with everything switched on: is any slower?
    #[arg(long, group = "programs")]
    table: bool,
    /// With --table, also run each program under the manager of a node, which learns by itself, as "assist on" and "assist daemon" have it
    #[arg(long, requires = "table")]
    node: bool,
    /// With --table, pairs of a cell whose claims are unresolved, at most
    #[arg(long, default_value_t = 12, requires = "table", value_name = "N")]
    pairs_max: u32,
    /// Measure what it is worth to fill the page table of a program that maps its file
    #[arg(long, conflicts_with_all = ["programs", "only", "python", "html", "list"])]
    maps: bool,
    /// Where the programs run [default: all; with --held-out mount,disk]
    #[arg(long, value_enum, value_delimiter = ',', requires = "programs", value_name = "DEVICES")]
    on: Vec<Device>,
    /// What a read request on the mount takes before its first byte, ms
    #[arg(long, default_value_t = 5.0, requires = "programs", value_name = "MS")]
    request_ms: f64,
    /// Requests that the mount serves at once
    #[arg(long, default_value_t = 32, requires = "programs", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=256))]
    outstanding: u32,
    /// What all requests of the mount read together, MB/s
    #[arg(long, default_value_t = 200, requires = "programs", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    mb_per_s: u64,
    /// Tell the names of the experiments and end
    #[arg(long)]
    list: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref(), args.html.as_deref()])?;
    if args.held_out || args.table {
        return run_programs(args);
    }
    if args.maps {
        let pairs = args.pairs.unwrap_or(PAIRS[0]);
        let rows =
            maps::run(&args.dir, pairs, Slowness::default(), &catch_signals()?, &mut |line| eprintln!("{line}"))?;
        all_written([print(maps::table(&rows).as_bytes()).map(drop), write_json(args.json.as_deref(), &rows)])?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.list {
        let lines: String = EXPERIMENTS.iter().map(|(name, what)| format!("{name:<14} {what}\n")).collect();
        return print(lines.as_bytes());
    }
    let stop = catch_signals()?;
    let options = Options { only: args.only, pairs: args.pairs, python: args.python, folder: args.dir };
    let (rows, missing) = run_suite(&options, &stop, &mut |line| eprintln!("{line}"))?;
    all_written([
        print(page::table(&rows).as_bytes()).map(drop),
        write_text(args.html.as_deref(), || Ok(page::page(&rows))),
        write_json(args.json.as_deref(), &rows),
    ])?;
    let failed = rows.iter().flat_map(|r| &r.claims).any(|(_, verdict)| *verdict == Verdict::DoesNotHold);
    if missing > 0 {
        eprintln!("{missing} of the rows are missing: their programs did not get through; see above");
    }
    Ok(if failed || missing > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn run_programs(args: Args) -> Result<ExitCode> {
    if args.list {
        return print((held_out::names().join("\n") + "\n").as_bytes());
    }
    let request = Duration::try_from_secs_f64(args.request_ms / 1000.0);
    let slowness = Slowness {
        request: request.map_err(|_| usage(format!("--request-ms {} is no time", args.request_ms)))?,
        outstanding: args.outstanding as usize,
        bytes_per_s: args.mb_per_s * 1_000_000,
    };
    let python = args.python.unwrap_or_else(|| held_out::PYTHON.into());
    let usual = if args.table { Device::ALL.to_vec() } else { vec![Device::Mount, Device::Disk] };
    let devices = if args.on.is_empty() { usual } else { args.on };
    let stop = catch_signals()?;
    let (only, folder) = (args.only, args.dir);
    let say = &mut |line: &str| eprintln!("{line}");
    let (verdicts, missing): (Vec<Verdict>, _) = if args.table {
        let pairs = args.pairs.unwrap_or(PAIRS[1]);
        let settings = table::Settings { pairs, pairs_max: args.pairs_max.max(pairs), slowness, node: args.node };
        let options = table::Options { only, devices, folder, python, kept_in: args.json, settings };
        let (table, missing) = table::run(&options, &stop, say)?;
        print(table::text(&table, &missing).as_bytes())?;
        (table.cells.iter().map(table::Cell::verdict).collect(), missing)
    } else {
        let pairs = args.pairs.unwrap_or(PAIRS[0]);
        let options = held_out::Options { only, pairs, folder, python, slowness, devices };
        let (rows, missing) = held_out::run(&options, &stop, say)?;
        let table = held_out::table(&rows, &missing);
        all_written([print(table.as_bytes()).map(drop), write_json(args.json.as_deref(), &rows)])?;
        (rows.iter().flat_map(|r| &r.claims).map(|(_, verdict)| *verdict).collect(), missing)
    };
    let failed = verdicts.contains(&Verdict::DoesNotHold) || !missing.is_empty();
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
