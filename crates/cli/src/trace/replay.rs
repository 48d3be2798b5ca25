//! `impresario trace replay`: the requests of a trace, made again on a folder or a cluster.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, anyhow};
use impresario_base::units::{parse_bytes, show_bytes, show_seconds};
use impresario_trace::Trace;
use impresario_workload::access::Target;
use impresario_workload::folder::Folder;
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_json};
use impresario_workload::replay::{Options, Plan, Replayed, Timing, replay};
use impresario_workload::result::Latency;
use impresario_workload::storage::Storage;

use super::From;
use crate::{load, print, usage};

/// Make the requests of a trace again, on a folder or a cluster
///
/// Each process of the trace becomes a client, with as many threads as it had requests under way at once (256 threads in all);
/// reads, writes and syncs have the recorded order, offsets and sizes. Files of the needed size are made first, in a new
/// folder that is removed in the end; files that were there before are never touched. What is read is compared with what
/// must be there. Several traces, such as those of the servers of a cluster, are replayed together by their wall clocks. What servers
/// recorded in offsets of their own is replayed on one file for each server and file.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario trace replay run.imt --folder /mnt/impresario
  impresario trace replay run.imt --config cluster/impresario.toml --timing scaled:0.5
  impresario trace replay job.txt --folder /scratch --timing fast --json result.json
  impresario trace replay run.imt --config cluster/impresario.toml --into again --keep
  impresario trace replay run.imt --config cluster/impresario.toml --into again --overwrite    the same files again")]
pub struct Args {
    /// The traces, in any readable format
    #[arg(required = true)]
    files: Vec<PathBuf>,
    #[command(flatten)]
    from: From,
    /// Replay in this folder: of a mount, or of any file system
    #[arg(long, value_name = "DIR", required_unless_present = "config")]
    folder: Option<PathBuf>,
    /// Replay on the cluster that this file describes, without a mount
    #[arg(long, value_name = "FILE", conflicts_with = "folder")]
    config: Option<PathBuf>,
    /// Past the cluster's I/O nodes
    #[arg(long, requires = "config")]
    direct: bool,
    /// When requests are made: original (at the recorded instants), scaled:FACTOR (intervals multiplied by FACTOR), think (as
    /// long after the request before as in the trace), fast (as soon as the request before has ended)
    #[arg(long, default_value = "original", value_name = "HOW")]
    timing: Timing,
    /// Folder of the files, within --folder or at the root of the cluster [default: a new one, replay-NUMBER]
    #[arg(long, value_name = "NAME")]
    into: Option<String>,
    /// Use the folder of --into though it is there, with the files of an earlier replay with --keep
    #[arg(long, requires = "into")]
    overwrite: bool,
    /// Leave the files there
    #[arg(long)]
    keep: bool,
    /// Refuse traces whose files have more bytes in all
    #[arg(long, default_value = "16g", value_parser = parse_bytes, value_name = "SIZE")]
    size_max: u64,
    /// Write the result to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref()])?;
    let into = match &args.into {
        Some(name) if name.is_empty() || name.contains('/') || name == "." || name == ".." => {
            return Err(usage(format!("{name:?} is no name of a folder: give one without /, such as --into again")));
        }
        Some(name) => name.clone(),
        None => format!("replay-{}", SystemTime::now().duration_since(UNIX_EPOCH)?.as_millis()),
    };
    let traces = args.files.iter().map(|f| Ok(args.from.read(f)?.trace)).collect::<Result<Vec<Trace>>>()?;
    let plan = Plan::new(&traces).map_err(|why| anyhow!("{}: {why}", args.files[0].display()))?;
    drop(traces);
    let target: Box<dyn Target> = match (&args.folder, &args.config) {
        (Some(folder), _) => Box::new(Folder::new(folder).map_err(|e| usage(e.to_string()))?),
        (None, Some(config)) => {
            let storage = Storage::new(load(config)?);
            Box::new(if args.direct { storage.direct() } else { storage })
        }
        (None, None) => return Err(usage("name where to replay: --folder DIR or --config FILE")),
    };
    let stop = catch_signals()?;
    let options = Options {
        timing: args.timing,
        folder: into,
        overwrite: args.overwrite,
        keep: args.keep,
        bytes_max: args.size_max,
    };
    let mut line = Progress::new();
    let done = replay(target.as_ref(), &plan, &options, &stop, |text| line.show_now_and_then(text));
    line.end();
    let done = done?;
    all_written([write_json(args.json.as_deref(), &done), print(show(&done, &options)).map(drop)])?;
    Ok(ExitCode::from(u8::from(done.failed > 0 || done.verification.mismatches > 0)))
}

fn show(done: &Replayed, options: &Options) -> String {
    let mut out = String::new();
    let mut row = |name: &str, value: String| _ = writeln!(out, "{name:<12}{value}");
    let Replayed { requests, reads, writes, syncs, files, clients, threads, .. } = done;
    row(
        "requests",
        format!("{requests}: {reads} reads, {writes} writes, {syncs} syncs; {}", show_bytes(done.bytes as f64)),
    );
    row("from", format!("{clients} clients with {threads} threads, on {files} files"));
    row("time", format!("{} (recorded: {})", show_seconds(done.time_s), show_seconds(done.recorded_s)));
    let latency = |l: &Latency| {
        let show = |us: f64| show_seconds(us / 1e6);
        format!(
            "mean {}, median {}, p99 {}, longest {}",
            show(l.mean_us),
            show(l.p50_us),
            show(l.p99_us),
            show(l.max_us)
        )
    };
    done.latency.iter().for_each(|l| row("latency", latency(l)));
    done.recorded_latency.iter().for_each(|l| row("recorded", latency(l)));
    done.lateness.iter().for_each(|l| row("lateness", latency(l)));
    if done.left_out > 0 {
        row("left out", format!("{} records, of opening, truncating and such", done.left_out));
    }
    if done.failed > 0 {
        row("failed", format!("{}, such as: {}", done.failed, done.failure.as_deref().unwrap_or("?")));
    }
    if let Some(first) = done.verification.first.first() {
        row("wrong", format!("{} reads brought other bytes than were written: {first}", done.verification.mismatches));
    }
    if options.keep {
        row("kept", options.folder.clone());
    }
    out
}
