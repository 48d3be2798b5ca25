//! `impresario assist plan`: hints from a recorded run.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use impresario_assist::plan::{Device, Options, plan, probe};
use impresario_config::calibration::Calibration;
use impresario_trace::convert::{ImportOptions, import};
use impresario_trace::{Trace, TraceOp};
use impresario_workload::size::parse_positive_bytes;

use crate::print;

/// Plan hints from a recorded run, and tell the reason and the expected gain of each
///
/// The device's cost comes from a calibration (`impresario calibrate`), or a model, or is measured in a moment on the
/// files of the trace. Where nothing is to be gained no hints are written, and the reason is told; that is no failure.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist plan trace.imt -o hints.json
  impresario assist plan job.dxt.txt -o hints.json --device disk
  impresario assist plan run.strace -o hints.json --calibration disk.toml")]
pub struct Args {
    /// The trace: of `assist record`, or Darshan DXT as text, strace, CSV or fio
    trace: PathBuf,
    /// Write the hints file
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// What the next run reads from: auto (measured), disk, flash, or IOPS:MIB_PER_S of a limited volume
    #[arg(long, default_value = "auto", value_name = "DEVICE", conflicts_with = "calibration")]
    device: String,
    /// What the next run reads from, as `impresario calibrate` measured it
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Memory that the hints may fill for one file and program
    #[arg(long, default_value = "64m", value_parser = parse_positive_bytes, value_name = "SIZE")]
    window: u64,
    /// Least saving for which hints are given, in percent of the run time
    #[arg(long, default_value_t = 3.0, value_name = "PERCENT")]
    least: f64,
    /// Plan for a cold cache even if the recorded run read from memory
    #[arg(long)]
    cold: bool,
    /// Tell the plan as JSON
    #[arg(long)]
    json: bool,
}

/// Files that a device is measured on have at least so many bytes.
const MEASURED_BYTES_MIN: u64 = 8 << 20;

pub fn run(args: Args) -> Result<ExitCode> {
    let imported = import(&args.trace, &ImportOptions::default())?;
    imported.notes.iter().for_each(|note| eprintln!("impresario: {}: {note}", args.trace.display()));
    let trace = imported.trace;
    let device = device(&args, &trace)?;
    let options = Options {
        window_bytes_max: args.window,
        gain_min: args.least / 100.0,
        assume_cold: args.cold,
        ..Options::new(device)
    };
    let plan = plan(&trace, &options);
    let text = plan.hints.to_json().context("the plan makes no valid hints file")?;
    std::fs::write(&args.output, text).with_context(|| format!("writing {}", args.output.display()))?;
    if args.json {
        return print((serde_json::to_string_pretty(&plan)? + "\n").as_bytes());
    }
    print(plan.text().as_bytes())
}

fn device(args: &Args, trace: &Trace) -> Result<Device> {
    if let Some(file) = &args.calibration {
        let calibration = Calibration::load(file)?;
        return Device::calibrated(&calibration, &file.display().to_string()).map_err(anyhow::Error::msg);
    }
    let kernel = |device: Device| match most_read(trace) {
        Some(path) => device.with_kernel(&path),
        None => device,
    };
    match args.device.as_str() {
        "disk" => Ok(kernel(Device::disk())),
        "flash" => Ok(kernel(Device::flash())),
        "auto" => {
            // Small files tell little of a device.
            let large = |path: &PathBuf| std::fs::metadata(path).is_ok_and(|meta| meta.len() >= MEASURED_BYTES_MIN);
            let Some(path) = files_read(trace).find(large).or_else(|| most_read(trace)) else {
                bail!(
                    "no file of the trace can be measured here; say what it reads from with --device or --calibration"
                )
            };
            probe(&path, Duration::from_secs(2)).with_context(|| {
                format!("{} cannot be measured; say what it lies on with --device or --calibration", path.display())
            })
        }
        text => {
            let limits = text.split_once(':').and_then(|(i, m)| Some((i.parse::<u64>().ok()?, m.parse::<u64>().ok()?)));
            match limits {
                Some((iops, mib_per_s)) if iops > 0 && mib_per_s > 0 => Ok(kernel(Device::limited(iops, mib_per_s))),
                _ => Err(crate::usage(format!("there is no device {text:?}: auto, disk, flash or IOPS:MIB_PER_S"))),
            }
        }
    }
}

/// The file of the trace that most was read of and that is still here.
fn most_read(trace: &Trace) -> Option<PathBuf> {
    files_read(trace).next()
}

/// The files of the trace that are still here, those that most was read of first.
fn files_read(trace: &Trace) -> impl Iterator<Item = PathBuf> {
    let mut bytes = vec![0u64; trace.files.len()];
    for r in trace.records.iter().filter(|r| r.op == TraceOp::Read) {
        if let Some(of) = bytes.get_mut(r.file.0 as usize) {
            *of += r.moved_bytes();
        }
    }
    let mut order: Vec<usize> = (0..bytes.len()).filter(|f| bytes[*f] > 0).collect();
    order.sort_by_key(|f| std::cmp::Reverse(bytes[*f]));
    let paths: Vec<PathBuf> =
        order.into_iter().map(|f| PathBuf::from(OsString::from_vec(trace.files[f].path.clone()))).collect();
    paths.into_iter().filter(|path| path.is_file())
}
