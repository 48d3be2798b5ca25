//! `impresario-lab agios`: the cost of a request in `libagios`, compared with the public AGIOS library if available.

mod measure;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_workload::progress::Progress;

use crate::print;
use measure::{Case, Measured, QUEUES};

/// Measure what a request costs in libagios: requests a second, processor time, memory; beside the public library of AGIOS
///
/// Each measurement is a separate process with one library, and the libraries alternate. Requests are 16 KiB reads,
/// strided in 64 files; callbacks release them. With producers, at most 20,000 are pending; with a fixed number
/// pending, the library's thread adds a request for each that it serves.
#[derive(clap::Args)]
pub struct Args {
    /// Our library [default: libagios.so beside this program]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The public library, version 2, built by hand: a third column shows the ratio
    #[arg(long, value_name = "FILE")]
    public: Option<PathBuf>,
    /// Algorithms
    #[arg(value_delimiter = ',', default_values = ["TO", "FIFO", "SJF", "MLF", "aIOLi", "TO-agg", "SW", "WFQ", "TWINS"])]
    algorithms: Vec<String>,
    /// Requests of a measurement
    #[arg(long, default_value_t = 500_000, value_name = "N")]
    requests: u64,
    /// Measurements of which the median is shown
    #[arg(long, default_value_t = 3, value_name = "N")]
    repetitions: usize,
}

/// One measurement in this process.
#[derive(clap::Args)]
pub struct OneArgs {
    /// The library
    library: PathBuf,
    /// Its configuration
    config: PathBuf,
    /// What is measured
    case: String,
    /// Requests
    requests: u64,
}

/// A measurement that takes longer has hung, as the public library sometimes does.
const PATIENCE: Duration = Duration::from_secs(25);

/// Rows of the table for each algorithm: its name, the measurement, and which of its figures.
const ROWS: [(&str, &str, Figure); 9] = [
    ("1 producer, M requests/s", "producers-1", Figure::Rate),
    ("1 producer, µs of processor time", "producers-1", Figure::Time),
    ("4 producers, M requests/s", "producers-4", Figure::Rate),
    ("4 producers, µs of processor time", "producers-4", Figure::Time),
    ("10,000 pending, µs of processor time", "pending-10000", Figure::Time),
    ("10,000 pending, bytes each", "pending-10000", Figure::Memory),
    ("100,000 pending, µs of processor time", "pending-100000", Figure::Time),
    ("100,000 pending, bytes each", "pending-100000", Figure::Memory),
    ("idle, µs of processor time a second", "idle", Figure::Time),
];

#[derive(Clone, Copy, PartialEq)]
enum Figure {
    Rate,
    Time,
    Memory,
}

impl Figure {
    fn of(self, measured: &Measured) -> f64 {
        match self {
            Figure::Rate => measured.per_second / 1e6,
            Figure::Time => measured.cpu_us,
            Figure::Memory => measured.bytes,
        }
    }
}

/// Measures and prints the table.
pub fn run(args: Args) -> Result<ExitCode> {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("libagios.so"));
    let ours = args.library.or_else(beside).context("this program's folder is unknown; give --library")?;
    let libraries: Vec<&Path> = std::iter::once(&*ours).chain(args.public.as_deref()).collect();
    for library in &libraries {
        if !library.is_file() {
            bail!(
                "there is no {}; build it (cargo build --release -p impresario-agios), or name it",
                library.display()
            );
        }
    }
    let dir = tempfile::tempdir()?;
    let mut out = String::from("Median of each measurement: ours");
    out += if args.public.is_some() { ", the public library, how many times better ours is\n" } else { "\n" };
    let mut line = Progress::new();
    for algorithm in &args.algorithms {
        let config = write_config(dir.path(), algorithm)?;
        let _ = writeln!(out, "{algorithm}");
        let mut cases: Vec<&str> = ROWS.iter().map(|row| row.1).collect();
        cases.dedup();
        // By case, then library.
        let mut all = Vec::new();
        for case in cases {
            let mut runs: Vec<Vec<Measured>> = vec![Vec::new(); libraries.len()];
            for repetition in 1..=args.repetitions.max(1) {
                line.show(&format!("{algorithm}, {case}, {repetition} of {}", args.repetitions.max(1)));
                for (library, runs) in libraries.iter().zip(&mut runs) {
                    runs.extend(measure_apart(library, &config, case, args.requests)?);
                }
            }
            all.push((case, runs));
        }
        for (name, case, figure) in ROWS {
            let Some((_, runs)) = all.iter().find(|(of, _)| *of == case) else { continue };
            let figures: Vec<Option<f64>> = runs.iter().map(|runs| median(runs, figure)).collect();
            let _ = write!(out, "  {name:40}");
            for value in &figures {
                let _ = match value {
                    Some(value) => write!(out, " {value:11.3}"),
                    None => write!(out, "{:>12}", "-"),
                };
            }
            if let [Some(ours), Some(public)] = figures[..] {
                let ratio = if figure == Figure::Rate { ours / public } else { public / ours };
                let _ = write!(out, "{ratio:9.2}×");
            }
            out.push('\n');
        }
        // Whoever stops it keeps what it has.
        line.end();
        print(std::mem::take(&mut out).as_bytes())?;
    }
    out += "-: the library did not end the measurement\n";
    print(out.as_bytes())
}

fn median(runs: &[Measured], figure: Figure) -> Option<f64> {
    let mut values: Vec<f64> = runs.iter().map(|run| figure.of(run)).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// A configuration that both libraries read: the public one needs every key.
fn write_config(dir: &Path, algorithm: &str) -> Result<PathBuf> {
    let (file, weights) = (dir.join(format!("{algorithm}.conf")), dir.join("wfq.conf"));
    std::fs::write(&weights, "16384 ".repeat(QUEUES as usize))?;
    let text = format!(
        "library_options:\n{{\n  trace = false;\n  trace_file_prefix = \"/tmp/agios\";\n  trace_file_sufix = \"out\";\n  \
         max_trace_buffer_size = 32;\n  default_algorithm = \"{algorithm}\";\n  starting_algorithm = \"SJF\";\n  \
         waiting_time = 900000;\n  aioli_quantum = 65536;\n  mlf_quantum = 8192;\n  select_algorithm_period = -1;\n  \
         select_algorithm_min_reqnumber = 1;\n  performance_values = 5;\n  enable_SW = false;\n  SW_window = 1000;\n  \
         twins_window = 2000;\n  wfq_conf = \"{}\";\n}};\n",
        weights.display()
    );
    std::fs::write(&file, text)?;
    Ok(file)
}

/// One measurement in a separate process; `None` if that fails or hangs.
fn measure_apart(library: &Path, config: &Path, case: &str, requests: u64) -> Result<Option<Measured>> {
    let program = std::env::current_exe()?;
    let mut child = Command::new(program)
        .arg("agios-one")
        .arg(library)
        .arg(config)
        .args([case, &requests.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let end = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output()?;
    // The libraries print to the same place.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().rev().find_map(|line| line.strip_prefix("measured "));
    let numbers: Vec<f64> = line.unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    Ok(match numbers[..] {
        [per_second, cpu_us, bytes] => Some(Measured { per_second, cpu_us, bytes }),
        _ => None,
    })
}

/// Measures in this process, which then ends at once: a library may take long to end.
pub fn run_one(args: OneArgs) -> Result<ExitCode> {
    let number = |text: &str| text.parse().ok();
    let case = match args.case.split_once('-') {
        Some(("producers", n)) => number(n).map(Case::Producers),
        Some(("pending", n)) => number(n).map(Case::Pending),
        _ => (args.case == "idle").then_some(Case::Idle),
    };
    let case = case.with_context(|| format!("\"{}\" is not a case", args.case))?;
    let Measured { per_second, cpu_us, bytes } = measure::measure(&args.library, &args.config, case, args.requests)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nmeasured {per_second} {cpu_us} {bytes}")?;
    out.flush()?;
    // SAFETY: nothing remains to be done in this process.
    unsafe { libc::_exit(0) }
}
