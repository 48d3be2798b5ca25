//! `impresario assist compare`: compares runs with and without hints.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use impresario_assist::config::Named;
use impresario_assist::report::Report;
use impresario_base::units::show_bytes;
use impresario_workload::programs::{BlockDevice, Files, Machine, TestBed, Trials, Variant, measure};
use impresario_workload::stats::{Verdict, at_least, no_worse_than};
use serde_json::json;

use super::launch::{Reach, by_shell, reach};
use crate::front::command_file;
use crate::{print, usage};
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json};

/// Compare a program with hints and without: paired runs from a cold cache
///
/// Reports time, requests at the device, bytes read for nothing, and the confidence of the difference. As root it drops
/// the page cache of the whole machine before every run; other users drop that of the files named in the hints. The
/// program must end by itself, print the same output each time and leave its input unchanged.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist compare hints.json -- python3 analysis.py data.root
  impresario assist compare hints.json --pairs 15 --instances 4 -- ./reader data.h5")]
pub struct Args {
    /// The hints file
    hints: PathBuf,
    /// Pairs of runs
    #[arg(long, default_value_t = 9, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=1000))]
    pairs: u32,
    /// Number of instances of the program to run at once
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    instances: u32,
    /// Time limit of a run, s; a longer run is ended, and the comparison with it
    #[arg(long, default_value_t = 3600.0, value_name = "SECONDS")]
    timeout: f64,
    /// Write every run to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Largest number of files of the hints that are dropped from the cache before each run.
const FILES_MAX: usize = 4096;

pub fn run(args: Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let (hints, paths) = super::hints(&args.hints)?;
    if let Reach::No(why) = reach(&args.program[0].to_string_lossy())? {
        return Err(usage(why));
    }
    let named = Named::new(&hints, &paths);
    let mut files: Vec<PathBuf> =
        named.places().flat_map(|place| named.files(place, FILES_MAX)).map(|(_, path)| path).collect();
    files.sort();
    files.dedup();
    files.truncate(FILES_MAX);
    let Some(first) = files.first() else {
        bail!(
            "{} names no existing file: there is nothing to compare (a plan without gain has no entries)",
            args.hints.display()
        );
    };
    let device = BlockDevice::under(first).ok();
    let (machine, own) = (Machine { device: device.clone() }, Files { paths: files.clone(), device: device.clone() });
    let root = rustix::process::geteuid().is_root();
    let bed: &dyn TestBed = if root { &machine } else { &own };
    let folder = tempfile::tempdir()?;
    let report = folder.path().join("report.json");
    let program = |words: &[OsString]| {
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        by_shell(&command).unwrap_or(command)
    };
    let own_program = command_file().context("finding this program's own file")?;
    let guided = || {
        let mut command = Command::new(&own_program);
        command.args(["assist", "run", "--quiet"]).arg(&args.hints).arg("--report").arg(&report);
        command.arg("--instances").arg(args.instances.to_string()).arg("--").args(&args.program);
        vec![command]
    };
    let plain = || (0..args.instances).map(|_| program(&args.program)).collect();
    let variants = [
        Variant { name: "without".into(), commands: Box::new(plain) },
        Variant { name: "guided".into(), commands: Box::new(guided) },
    ];
    let trials =
        Trials { pairs: args.pairs, bed, group: None, timeout_s: args.timeout, seed: u64::from(std::process::id()) };
    let stop = catch_signals()?;
    let mut line = Progress::new();
    let mut done = 0;
    let measured = measure(&trials, &variants, &stop, &mut |name, run| {
        done += 1;
        line.show(&format!("run {done} of {}: {name} {:.2} s", args.pairs * 2, run.wall_s));
    })?;
    line.end();
    if measured.runs.is_empty() {
        bail!("stopped before the first pair was complete");
    }
    let mut text = String::new();
    for (i, name) in measured.variants.iter().enumerate() {
        text += &format!("{name:<10} {:>9.3} s", measured.median_s(i));
        if device.is_some() {
            text += &format!(
                " {:>9.0} device reads {:>11}",
                measured.median_reads(i),
                show_bytes(measured.median_bytes(i))
            );
        }
        text.push('\n');
    }
    let gain = measured.gain(1, 0);
    text += &format!(
        "time saved {:+.1} % [{:.1}, {:.1}], {} pairs: {}\n",
        gain.mean * 100.0,
        gain.low * 100.0,
        gain.high * 100.0,
        gain.n,
        verdict(at_least(gain, 0.0), no_worse_than(gain, 0.0))
    );
    let report: Option<Report> = std::fs::read(&report).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    if let Some(report) = &report {
        let all = report.total();
        text += &format!(
            "last guided run: {} hints, {} prefetched, {} of them used, {} for nothing\n",
            all.hints,
            show_bytes(all.prefetched_bytes as f64),
            show_bytes(all.used_bytes as f64),
            show_bytes(all.wasted_bytes as f64)
        );
        if let Some(coverage) = &report.coverage {
            text += &format!("{coverage}\n");
        }
        for file in report.files.iter().filter(|f| f.why_stood_down.is_some()) {
            text +=
                &format!("{}: hints were stopped: {}\n", file.path, file.why_stood_down.as_deref().unwrap_or_default());
        }
    }
    if !root {
        text += "The cache was emptied of the files that the hints name; as root it is emptied of everything.\n";
    }
    if device.is_none() {
        text += "The files lie on no block device of this machine: its requests are not counted.\n";
    }
    let told = json!({ "measured": measured, "gain": gain, "report": report });
    all_written([print(&text).map(drop), write_json(args.json.as_deref(), &told)])?;
    Ok(ExitCode::SUCCESS)
}

fn verdict(faster: Verdict, no_slower: Verdict) -> &'static str {
    match (faster, no_slower) {
        (Verdict::Holds, _) => "faster with hints",
        (_, Verdict::DoesNotHold) => "slower with hints",
        _ => "unresolved; try more --pairs",
    }
}
