//! `impresario calibrate`: measures the device under a directory or behind a data server, and writes the cost model.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_base::replace::replace;
use impresario_base::units::{parse_bytes, parse_positive_bytes, show_seconds};
use impresario_config::{Calibration, Server};
use impresario_workload::calibrate::folder::Folder;
use impresario_workload::calibrate::server::DataServer;
use impresario_workload::calibrate::{Device, Plan, Step, calibrate, page, show};

use crate::{load, print, usage};
use impresario_workload::progress::{
    Progress, all_written, catch_signals, check_outputs, check_replaced, write_json, write_text,
};

/// Measure the device under a directory or behind a data server, for the cost model of schedulers
///
/// Reads and writes a scratch file (or object), sequentially and at random offsets, in sizes from 4 KiB to 16 MiB, and
/// mixed and with two streams for a few sizes. Repeats until every median is known to within --spread, or the time is
/// over. Refuses results that no device can produce. Writes the measurements, the fits and their errors to a file that
/// a server uses by `cost = "FILE"`. The scratch file has no name and takes at most --size; it disappears however the
/// program ends.
///
/// With --server, TARGET is the configuration of a running cluster, and one of its data servers is measured as a client
/// sees it. A modelled disk yields the model's times, and the result says so.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario calibrate /srv/impresario/data.0 -o data.0.calibration.toml
  impresario calibrate /mnt/disk --max-seconds 300 --size 8g --sync --html disk.html
  impresario calibrate cluster/impresario.toml --server data.0 --sizes 4k,64k,1m
  impresario calibrate --show data.0.calibration.toml

What the figures mean and what limits them: doc/CALIBRATION.md.")]
pub struct Args {
    /// A directory on the device; with --server the configuration file of a running cluster
    #[arg(required_unless_present = "show")]
    target: Option<PathBuf>,
    /// Measure this data server of a running cluster
    #[arg(long, value_name = "NAME")]
    server: Option<String>,
    /// Write the calibration to this file
    #[arg(short, long, value_name = "FILE", default_value = "calibration.toml")]
    output: PathBuf,
    /// Replace an existing file
    #[arg(long)]
    overwrite: bool,
    /// Time limit, plus at most one request in progress
    #[arg(long, default_value_t = 60, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    max_seconds: u64,
    /// Scratch space [default: 1g on a device, 256m in memory and on servers; at most a quarter of the free space]
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_bytes)]
    size: Option<u64>,
    /// Sizes of requests: multiples of 4k up to 64m [default: 4k to 16m by powers of two, on servers to the largest request]
    #[arg(long, value_delimiter = ',', value_name = "SIZES", value_parser = parse_bytes)]
    sizes: Vec<u64>,
    /// A point is done when the 95 % interval of its median is within this many percent
    #[arg(long, default_value_t = 5.0, value_name = "PERCENT")]
    spread: f64,
    /// Measure every write until it is durable (O_DSYNC): for drives with a write cache
    #[arg(long)]
    sync: bool,
    /// Write a page with a plot to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write all measurements as JSON to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure nothing: show an existing calibration
    #[arg(long, value_name = "FILE", conflicts_with_all = ["target", "server"])]
    show: Option<PathBuf>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let calibration = match (&args.show, &args.target) {
        (Some(file), _) => Calibration::load(file)?,
        (None, Some(target)) => measure(&args, target)?,
        (None, None) => return Err(usage("name a directory on the device to be measured")),
    };
    all_written([
        write_json(args.json.as_deref(), &calibration),
        write_text(args.html.as_deref(), || Ok(page::page(&calibration))),
        print(show::text(&calibration, terminal_columns())).map(drop),
    ])?;
    if args.show.is_none() {
        let shown = args.output.display();
        print(format!("\nWritten to {shown}; a server uses it by: cost = \"{shown}\"\n"))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &Args, target: &Path) -> Result<Calibration> {
    // Before a minute is spent.
    if !args.overwrite && args.output.exists() {
        let shown = args.output.display();
        return Err(usage(format!("{shown} already exists: name another file with --output, or add --overwrite")));
    }
    check_replaced(&args.output)?;
    check_outputs(&[args.html.as_deref(), args.json.as_deref()])?;
    let mut plan =
        Plan { max: Duration::from_secs(args.max_seconds), spread_goal: args.spread / 100.0, ..Plan::default() };
    if !args.sizes.is_empty() {
        plan.sizes = args.sizes.clone();
    }
    let stop = catch_signals()?;
    let mut progress = Progress::new();
    let mut show = |step: &Step| {
        let filled = "#".repeat((step.share.clamp(0.0, 1.0) * 20.0) as usize);
        let left = show_seconds(step.left.as_secs_f64());
        progress.show_now_and_then(&format!("[{filled:<20}] at most {left} left · {}", step.what));
    };
    let mut run = |device: &mut dyn Device, plan: &Plan| calibrate(device, plan, &stop, &mut show);
    let calibration = match &args.server {
        None => {
            plan.check().map_err(usage)?;
            run(&mut Folder::open(target, &plan, args.size, args.sync)?, &plan)
        }
        Some(name) => {
            let config = load(target)?;
            let server = match config.server(name).map_err(usage)? {
                Server::Data(_, data) => data,
                _ => return Err(usage(format!("{name} is not a data server: only these have a device"))),
            };
            if args.sizes.is_empty() {
                plan.sizes.retain(|size| *size <= u64::from(config.cluster.max_payload_bytes));
            }
            plan.check().map_err(usage)?;
            run(&mut DataServer::connect(&config, server, &plan, args.size, args.sync)?, &plan)
        }
    }?;
    progress.end();
    replace(&args.output, 0o666, calibration.to_toml().as_bytes())
        .with_context(|| format!("writing {}", args.output.display()))?;
    Ok(calibration)
}

/// Columns of the terminal, or 80 elsewhere.
fn terminal_columns() -> usize {
    let asked = std::env::var("COLUMNS").ok().and_then(|c| c.parse().ok());
    let out = std::io::stdout();
    let terminal = || out.is_terminal().then(|| rustix::termios::tcgetwinsize(&out).ok()).flatten();
    asked.or_else(|| terminal().map(|size| usize::from(size.ws_col))).filter(|c| *c > 0).unwrap_or(80)
}
