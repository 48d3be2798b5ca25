//! `impresario assist plan`: hints from a recorded run.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_assist::config::Hints;
use impresario_assist::plan::{Device, Options, plan, probe};
use impresario_base::replace::replace;
use impresario_base::units::parse_positive_bytes;
use impresario_config::calibration::Calibration;
use impresario_trace::combine::join;
use impresario_trace::convert::{ImportOptions, import};
use impresario_trace::{Trace, TraceOp};

use crate::{print, usage};

/// Plan hints from a recorded run, and report the reason and the expected gain of each
///
/// The device's cost comes from a calibration (`impresario calibrate`), a model, or a quick measurement on the files of
/// the trace. If no hint pays, none is written and the reason is reported; that is not a failure.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist plan trace.imt -o hints.json
  impresario assist plan trace.*.imt -o hints.json
  impresario assist plan job.dxt.txt -o hints.json --device disk
  impresario assist plan run.strace -o hints.json --calibration disk.toml")]
pub struct Args {
    /// The trace: from `assist record`, or Darshan DXT as text, strace, CSV or fio; several are those of one run's ranks
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// Write the hints file; where it is standard output, the plan is printed on standard error
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Replace an existing file also if it is not a hints file
    #[arg(short, long)]
    force: bool,
    /// The device that the next run reads from: auto (measured), disk, flash, or IOPS:MIB_PER_S of a limited volume
    #[arg(long, default_value = "auto", value_name = "DEVICE", conflicts_with = "calibration")]
    device: String,
    /// The device that the next run reads from, as `impresario calibrate` measured it
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Memory that the hints may fill for one file and program
    #[arg(long, default_value = "64m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    window: u64,
    /// Smallest saving for which hints are given, in percent of the run time
    #[arg(long, default_value_t = 3.0, value_name = "PERCENT")]
    least: f64,
    /// Plan for a cold cache even if the recorded run read from memory
    #[arg(long)]
    cold: bool,
    /// Print the plan as JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    make_room(&args)?;
    let mut traces = Vec::new();
    for path in &args.traces {
        let imported = import(path, &ImportOptions::default())?;
        imported.notes.iter().for_each(|note| tell!("impresario: {}: {note}", path.display()));
        traces.push(imported.trace);
    }
    let trace = match traces.len() {
        1 => traces.remove(0),
        // Side by side, as they ran.
        _ => join(&traces).map_err(anyhow::Error::msg)?,
    };
    let device = device(&args, &trace)?;
    let options = Options {
        window_bytes_max: args.window,
        gain_min: args.least / 100.0,
        assume_cold: args.cold,
        ..Options::new(device)
    };
    let plan = plan(&trace, &options);
    let text = plan.hints.to_json().context("the plan is not a valid hints file")?;
    let output = Output::of(&args.output);
    output.write(text.as_bytes()).with_context(|| format!("writing {}", args.output.display()))?;
    let told = if args.json { serde_json::to_string_pretty(&plan)? + "\n" } else { plan.text() };
    if output.is_standard_output() {
        // Who reads the hints there reads nothing else.
        tell!("{}", told.trim_end());
        return Ok(ExitCode::SUCCESS);
    }
    print(told)
}

/// Nothing is lost by mistake, as where the shell puts a trace in the place of the hints' name: hints replace hints.
fn make_room(args: &Args) -> Result<()> {
    let shown = args.output.display();
    // What else is wrong with it is told when it is written.
    let Ok(there) = args.output.metadata() else { return Ok(()) };
    if there.is_dir() {
        return Err(usage(format!("{shown} is a directory; name a file for the hints with -o")));
    }
    // A pipe or a device has nothing to lose.
    if !there.is_file() {
        return Ok(());
    }
    let is_it =
        |trace: &PathBuf| trace.metadata().is_ok_and(|one| (one.dev(), one.ino()) == (there.dev(), there.ino()));
    if args.traces.iter().any(is_it) {
        return Err(usage(format!("{shown} is one of the traces; name a file for the hints with -o")));
    }
    let is_replaced = matches!(Output::of(&args.output), Output::File(_));
    if is_replaced && !args.force && there.len() > 0 && Hints::load(&args.output).is_err() {
        return Err(usage(format!(
            "{shown} is there and is not a hints file; name another one with -o, or replace it with --force"
        )));
    }
    Ok(())
}

/// Where the hints go.
enum Output<'a> {
    /// A file, which is replaced, or a pipe or device, which is written to.
    File(&'a Path),
    /// What this process has open under a number. Opened anew, a file would be written from its beginning on, and a socket not at all.
    Open(RawFd),
}

impl Output<'_> {
    fn of(path: &Path) -> Output<'_> {
        let number = |folder| path.strip_prefix(folder).ok()?.to_str()?.parse().ok();
        let named = match path.to_str() {
            Some("/dev/stdout") => Some(1),
            Some("/dev/stderr") => Some(2),
            _ => ["/dev/fd", "/proc/self/fd"].iter().find_map(number).filter(|number: &RawFd| *number >= 0),
        };
        // The shell may have put a file there, by the same name. A device has no place for what is written next.
        let is_standard_output =
            || path.metadata().is_ok_and(|meta| !meta.file_type().is_char_device() && is_open_as(&meta, 1));
        match named.or_else(|| is_standard_output().then_some(1)) {
            Some(number) => Output::Open(number),
            None => Output::File(path),
        }
    }

    fn write(&self, text: &[u8]) -> io::Result<()> {
        match self {
            Output::Open(number) => opened(*number)?.write_all(text),
            Output::File(path) => match path.metadata() {
                Ok(there) if !there.is_file() => File::options().write(true).open(path)?.write_all(text),
                _ => replace(path, 0o666, text),
            },
        }
    }

    fn is_standard_output(&self) -> bool {
        match self {
            Output::Open(number) => {
                *number == 1 || opened(*number).and_then(|file| file.metadata()).is_ok_and(|meta| is_open_as(&meta, 1))
            }
            Output::File(_) => false,
        }
    }
}

/// What this process has open under a number, once more.
fn opened(number: RawFd) -> io::Result<File> {
    // SAFETY: only for this call, which fails where nothing is open under it.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(File::from(rustix::io::fcntl_dupfd_cloexec(borrowed, 3)?))
}

fn is_open_as(meta: &Metadata, number: RawFd) -> bool {
    let other = opened(number).and_then(|file| file.metadata());
    other.is_ok_and(|other| (other.dev(), other.ino()) == (meta.dev(), meta.ino()))
}

fn device(args: &Args, trace: &Trace) -> Result<Device> {
    match &args.calibration {
        Some(file) => {
            let calibration = Calibration::load(file)?;
            Device::calibrated(&calibration, &file.display().to_string()).map_err(anyhow::Error::msg)
        }
        None => device_named(&args.device, &files_used(trace), Duration::from_secs(2)),
    }
}

/// The device of this name, or the one that these files are on, measured for about so long.
pub fn device_named(name: &str, files: &[PathBuf], time: Duration) -> Result<Device> {
    let kernel = |device: Device| match files.first() {
        Some(path) => device.with_kernel(path),
        None => device,
    };
    match name {
        "disk" => Ok(kernel(Device::disk())),
        "flash" => Ok(kernel(Device::flash())),
        "auto" => probe(files, time)
            .context("the device cannot be measured on the files of the trace; give it with --device or --calibration"),
        text => {
            let limits = text.split_once(':').and_then(|(i, m)| Some((i.parse::<u64>().ok()?, m.parse::<u64>().ok()?)));
            match limits {
                Some((iops, mib_per_s)) if iops > 0 && mib_per_s > 0 => Ok(kernel(Device::limited(iops, mib_per_s))),
                _ => Err(usage(format!("there is no device {text:?}: auto, disk, flash or IOPS:MIB_PER_S"))),
            }
        }
    }
}

/// The files of the trace that are still here: those that most was read of first, then those that were only mapped,
/// the largest first.
pub fn files_used(trace: &Trace) -> Vec<PathBuf> {
    let mut bytes = vec![(0u64, 0u64); trace.files.len()];
    for r in &trace.records {
        let file = r.file.0 as usize;
        let Some(of) = bytes.get_mut(file) else { continue };
        match r.op {
            TraceOp::Read => of.0 = of.0.saturating_add(r.moved_bytes()),
            // Libraries of the system are mapped by every program and lie on a device of their own.
            TraceOp::Map if !trace.files[file].path.starts_with(b"/usr/") => {
                of.1 = trace.files[file].size_bytes.unwrap_or(1).max(1);
            }
            _ => {}
        }
    }
    let mut order: Vec<usize> = (0..bytes.len()).filter(|f| bytes[*f] > (0, 0)).collect();
    order.sort_by_key(|f| std::cmp::Reverse(bytes[*f]));
    let path = |file: usize| PathBuf::from(OsString::from_vec(trace.files[file].path.clone()));
    order.into_iter().map(path).filter(|path| path.is_file()).collect()
}
