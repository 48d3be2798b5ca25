//! `impresario-lab agios`: the cost of a request in `libagios`, compared with the public AGIOS library if available.

mod measure;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use impresario_workload::progress::Progress;
use impresario_workload::stats::{Interval, Verdict, at_least, median};

use crate::print;
use measure::{Case, Measured, QUEUES};

/// Measure what a request costs in libagios: requests a second, processor time, memory; beside the public library of AGIOS
///
/// Each measurement is a separate process with one library, and the libraries take turns at being first. Requests are 16 KiB reads,
/// strided in 64 files, or in 10,000; callbacks release them. With producers, at most 20,000 are pending; with a fixed
/// number pending, the library's thread adds a request for each that it serves. The first request comes 200 ms after
/// the start.
#[derive(clap::Args)]
pub struct Args {
    /// Our library [default: libagios.so beside this program]
    #[arg(long, value_name = "FILE")]
    library: Option<PathBuf>,
    /// The public library, version 2, built by hand: it is measured beside ours
    #[arg(long, value_name = "FILE")]
    public: Option<PathBuf>,
    /// How the public library was built, such as the compiler and its flags: stands above the table
    #[arg(long, value_name = "TEXT", requires = "public")]
    public_build: Option<String>,
    /// Algorithms
    #[arg(
        value_delimiter = ',',
        default_values = ["TO", "FIFO", "SJF", "MLF", "aIOLi", "TO-agg", "SW", "WFQ", "TWINS", "NOOP", "HBRR", "SRTF", "auto"]
    )]
    algorithms: Vec<String>,
    /// Requests of a measurement
    #[arg(long, default_value_t = 500_000, value_name = "N")]
    requests: u64,
    /// Measurements of which the median and the interval are shown
    #[arg(long, default_value_t = 5, value_name = "N")]
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

/// A case that failed so often is not measured again.
const FAILURES_MAX: usize = 2;

/// Rows of the table for each algorithm: its name, the measurement, and which of its figures.
const ROWS: [(&str, &str, Figure); 13] = [
    ("1 producer, M requests/s", "producers-1", Figure::Rate),
    ("1 producer, µs of processor time", "producers-1", Figure::Time),
    ("4 producers, M requests/s", "producers-4", Figure::Rate),
    ("4 producers, µs of processor time", "producers-4", Figure::Time),
    ("1 producer, 10,000 files, M requests/s", "producers-1-in-10000", Figure::Rate),
    ("1 producer, 10,000 files, µs of processor time", "producers-1-in-10000", Figure::Time),
    ("10,000 pending, µs of processor time", "pending-10000", Figure::Time),
    ("10,000 pending, bytes each", "pending-10000", Figure::Memory),
    ("10,000 pending, 10,000 files, µs of processor time", "pending-10000-in-10000", Figure::Time),
    ("10,000 pending, 10,000 files, bytes each", "pending-10000-in-10000", Figure::Memory),
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

    /// How many times better the first is.
    fn ratio(self, ours: f64, public: f64) -> f64 {
        if self == Figure::Rate { ours / public } else { public / ours }
    }
}

/// How a measurement ended.
type Outcome = Result<Measured, Failure>;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Failure {
    /// It did not end in time.
    Hung,
    /// A signal ended it.
    Crashed,
    /// The library did not start with the algorithm, or refused a request.
    Refused,
}

impl Failure {
    fn name(self) -> &'static str {
        match self {
            Failure::Hung => "hung",
            Failure::Crashed => "crashed",
            Failure::Refused => "refused",
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
    let mut out = heading(&libraries, args.public_build.as_deref());
    let mut line = Progress::new();
    let repetitions = args.repetitions.max(1);
    for algorithm in &args.algorithms {
        let config = write_config(dir.path(), algorithm)?;
        let _ = writeln!(out, "{algorithm}");
        let mut rows = ROWS.to_vec();
        // It calls back at once, on the thread that adds: nothing is ever pending.
        rows.retain(|row| !(algorithm == "NOOP" && row.1.starts_with("pending")));
        for of_case in rows.chunk_by(|a, b| a.1 == b.1) {
            let case = of_case[0].1;
            let mut runs: Vec<Vec<Outcome>> = vec![Vec::new(); libraries.len()];
            for repetition in 1..=repetitions {
                line.show(&format!("{algorithm}, {case}, {repetition} of {repetitions}"));
                let mut both: Vec<_> = libraries.iter().zip(&mut runs).collect();
                if repetition % 2 == 0 {
                    both.reverse();
                }
                for (library, runs) in both {
                    if runs.iter().filter(|run| run.is_err()).count() < FAILURES_MAX {
                        runs.push(measure_apart(library, &config, case, args.requests)?);
                    }
                }
            }
            for (name, _, figure) in of_case {
                out += &row(name, *figure, &runs);
            }
        }
        // Whoever stops it keeps what it has.
        line.end();
        print(std::mem::take(&mut out).as_bytes())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn heading(libraries: &[&Path], public_build: Option<&str>) -> String {
    let mut out = format!("ours: {}\n", libraries[0].display());
    if let Some(public) = libraries.get(1) {
        let _ = writeln!(out, "public: {}, built: {}", public.display(), public_build.unwrap_or("not stated"));
    }
    out += "Median [95 % interval of the mean] of each measurement: ours";
    if libraries.len() > 1 {
        let places = [Verdict::Holds, Verdict::DoesNotHold, Verdict::Unresolved].map(Verdict::place);
        let [all_above, all_below, neither] = places;
        let _ = write!(
            out,
            ", the public library, how many times better ours is in each pair: {all_above} where the whole interval is 1 or more, \
             {all_below} where it is below 1, else {neither}"
        );
    }
    out + ".\nhung, crashed, refused: the library did not end the measurement, or does not have the algorithm\n"
}

/// A line of the table.
fn row(name: &str, figure: Figure, runs: &[Vec<Outcome>]) -> String {
    let mut out = format!("  {name:50}");
    for runs in runs {
        let values: Vec<f64> = runs.iter().flatten().map(|run| figure.of(run)).collect();
        let failed = runs.iter().find_map(|run| run.err());
        let mut cell = match values.is_empty() {
            true => String::new(),
            false => shown(&values),
        };
        if let Some(failure) = failed {
            let count = runs.iter().filter(|run| run.is_err()).count();
            cell = format!("{cell} {} {count} of {}", failure.name(), runs.len());
        }
        let _ = write!(out, " {:>28}", cell.trim());
    }
    if let [ours, public] = runs {
        let pairs = ours
            .iter()
            .zip(public)
            .filter_map(|(a, b)| Some((figure.of(a.as_ref().ok()?), figure.of(b.as_ref().ok()?))));
        // Nothing used, or no memory that can be seen, is no ratio.
        let ratios: Vec<f64> = pairs.map(|(a, b)| figure.ratio(a, b)).filter(|ratio| ratio.is_finite()).collect();
        if !ratios.is_empty() {
            let _ = write!(out, " {:>28} × {}", shown(&ratios), at_least(Interval::of(&ratios), 1.0).place());
        }
    }
    out.trim_end().to_string() + "\n"
}

/// The median and the interval; the interval needs two values.
fn shown(values: &[f64]) -> String {
    let Interval { low, high, n, .. } = Interval::of(values);
    let median = median(values);
    if n < 2 { format!("{median:.3} [–]") } else { format!("{median:.3} [{low:.3}, {high:.3}]") }
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

/// One measurement in a separate process.
fn measure_apart(library: &Path, config: &Path, case: &str, requests: u64) -> Result<Outcome> {
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
    let (end, mut hung) = (Instant::now() + PATIENCE, false);
    while child.try_wait()?.is_none() {
        if Instant::now() > end {
            hung = true;
            child.kill()?;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let output = child.wait_with_output()?;
    // The libraries print to the same place.
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().rev().find_map(|line| line.strip_prefix("measured "));
    let numbers: Vec<f64> = line.unwrap_or_default().split(' ').filter_map(|word| word.parse().ok()).collect();
    Ok(match (&numbers[..], output.status.code()) {
        (&[per_second, cpu_us, bytes], _) => Ok(Measured { per_second, cpu_us, bytes }),
        _ if hung => Err(Failure::Hung),
        (_, None) => Err(Failure::Crashed),
        (_, Some(_)) => Err(Failure::Refused),
    })
}

/// Measures in this process, which then ends at once: a library may take long to end.
pub fn run_one(args: OneArgs) -> Result<ExitCode> {
    let case = Case::parse(&args.case).with_context(|| format!("\"{}\" is not a case", args.case))?;
    let Measured { per_second, cpu_us, bytes } = measure::measure(&args.library, &args.config, case, args.requests)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "\nmeasured {per_second} {cpu_us} {bytes}")?;
    out.flush()?;
    // SAFETY: nothing remains to be done in this process.
    unsafe { libc::_exit(0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(rates: &[f64]) -> Vec<Outcome> {
        rates.iter().map(|rate| Ok(Measured { per_second: rate * 1e6, cpu_us: 1.0 / rate, bytes: 0.0 })).collect()
    }

    /// Pairs decide, and the lower end of their interval.
    #[test]
    fn a_row_has_medians_intervals_and_a_verdict() {
        let ours = rates(&[2.0, 4.0, 3.0]);
        let line = row("M requests/s", Figure::Rate, &[ours.clone(), rates(&[1.0, 2.0, 1.5])]);
        assert!(line.contains("3.000 [0.516, 5.484]") && line.contains("2.000 [2.000, 2.000] × ahead"), "{line}");
        let line = row("µs", Figure::Time, &[ours.clone(), rates(&[4.0, 8.0, 6.0])]);
        assert!(line.contains("0.500 [0.500, 0.500] × behind"), "{line}");
        let line = row("M requests/s", Figure::Rate, &[ours.clone(), rates(&[2.1, 3.0, 3.1])]);
        assert!(line.ends_with("× unresolved\n"), "{line}");
        let mut public = rates(&[1.0]);
        public.extend([Err(Failure::Hung); 2]);
        let line = row("M requests/s", Figure::Rate, &[ours.clone(), public]);
        assert!(line.contains("1.000 [–] hung 2 of 3") && line.ends_with("unresolved\n"), "{line}");
        let line = row("M requests/s", Figure::Rate, &[ours, vec![Err(Failure::Refused); 2]]);
        assert!(line.ends_with(" refused 2 of 2\n"), "{line}");
    }
}
