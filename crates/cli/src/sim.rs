//! `impresario sim`: what would a policy do on a system with thousands of clients? Scenario files are run, swept, checked
//! and written; random ones hunt for mistakes of the scheduler.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Subcommand;
use impresario_base::lock::Mutex;
use impresario_base::units::{parse_bytes, parse_duration, show_seconds};
use impresario_sim::file::{Overrides, Study, TEMPLATE};
use impresario_sim::{Scenario, fuzz, sweep};
use impresario_toml::text_of;
use impresario_workload::simulated::{self, Options, Progress as Part, Results, csv, import, page, table};
use impresario_workload::stop::Stop;
use toml::Value;

use crate::{print, usage};
use impresario_workload::progress::{Progress, all_written, catch_signals, check_outputs, write_text};

/// Simulate a cluster: any policy under any load, at any scale, with faults
///
/// Scenario files in TOML describe clients, network, I/O nodes, data servers, devices, applications and faults. The
/// scheduling code is the one that servers run; time is virtual and chance has a seed, so that the same file gives the
/// same bytes. doc/SIMULATION.md explains all of it, and scenarios/ holds examples.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    Run(RunArgs),
    Check(CheckArgs),
    /// Print a scenario with every key, its unit, its range and its default
    Template,
    Fuzz(FuzzArgs),
}

/// Run scenario files with their sweeps and repetitions, and show the results
///
/// Ends with status 1 when a law of scheduling was broken in a simulation, or when it was stopped before the end.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario sim run scenarios/quickstart.toml
  impresario sim run my.toml --sweep servers.policy=none,mlf --repetitions 8 --html report.html
  impresario sim run my.toml --set application.*.request_bytes=64k --sweep servers.in_flight=1..64/7log --csv out.csv")]
struct RunArgs {
    /// Scenario files.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    changes: Changes,
    /// Run each application alone as well, for interference factors
    #[arg(long)]
    interference: bool,
    /// Assert the complete set of laws, which takes longer
    #[arg(long)]
    checks: bool,
    /// Simulations side by side; the results do not depend on it [default: one per processor]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "N")]
    threads: Option<u32>,
    /// Write everything that was measured to a file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a line for each application of each run to a file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Write a page with plots to a file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Print no table and no progress
    #[arg(long, short)]
    quiet: bool,
}

/// Name every mistake of scenario files, with line and remedy; nothing is run
#[derive(clap::Args)]
struct CheckArgs {
    /// Scenario files.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    changes: Changes,
}

/// What is set beside the files.
#[derive(clap::Args)]
struct Changes {
    /// Set a key by its dotted path, such as servers.in_flight=8; application.* is all of them. The file's sweep over it, or over
    /// keys that it is one of, is dropped
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Go through values of a key: a,b,c, or 1..64/7log for seven values by equal factors
    #[arg(long, value_name = "KEY=VALUES")]
    sweep: Vec<String>,
    /// Runs of each point, with seeds that follow one another [default: the file's]
    #[arg(long, value_name = "N")]
    repetitions: Option<u32>,
    /// Seed of the first repetition [default: the file's]
    #[arg(long, value_parser = clap::value_parser!(u64).range(..1 << 63), value_name = "N")]
    seed: Option<u64>,
}

/// Run random scenarios with random faults under all laws of scheduling, for a given time
///
/// A scenario that breaks a law, panics or does not end is reported with its seed and reduced to the smallest one that fails the
/// same way, and written as a scenario file. The status is then 1.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario sim fuzz --for 10m
  impresario sim fuzz --replay 4711 --keep failures")]
struct FuzzArgs {
    /// How long
    #[arg(long = "for", default_value = "2m", value_parser = parse_duration, value_name = "TIME")]
    time: Duration,
    /// First seed; the next ones follow it [default: of the clock]
    #[arg(long, value_parser = clap::value_parser!(u64).range(..1 << 63), value_name = "N")]
    seed: Option<u64>,
    /// Run the scenario of one seed only
    #[arg(long, value_parser = clap::value_parser!(u64).range(..1 << 63), value_name = "SEED", conflicts_with = "seed")]
    replay: Option<u64>,
    /// Folder for the scenarios that fail
    #[arg(long, default_value = ".", value_name = "DIR")]
    keep: PathBuf,
    /// Scenarios side by side [default: one per processor]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024), value_name = "N")]
    threads: Option<u32>,
}

pub fn run(args: Args) -> Result<ExitCode> {
    match args.what {
        What::Run(args) => run_files(&args),
        What::Check(args) => check(&args),
        What::Template => print(TEMPLATE),
        What::Fuzz(args) => run_fuzz(&args),
    }
}

fn run_files(args: &RunArgs) -> Result<ExitCode> {
    check_outputs(&[args.json.as_deref(), args.csv.as_deref(), args.html.as_deref()])?;
    let overrides = args.changes.overrides()?;
    // All files are read before the first one is run: a mistake in the last is reported at once.
    let studies = args.files.iter().map(|file| Ok((file, read(file, &overrides)?))).collect::<Result<Vec<_>>>()?;
    let stop = catch_signals()?;
    let options = Options { threads: threads(args.threads), interference: args.interference, checks: args.checks };
    let mut all: Vec<Results> = Vec::new();
    let mut begun = true;
    for (file, study) in &studies {
        let waiting = Waiting::new(args.quiet, file, studies.len() > 1);
        let results = simulated::run(&name_of(file), study, &options, &stop, &|part| waiting.show(part))
            .with_context(|| file.display().to_string())?;
        drop(waiting);
        if !args.quiet {
            let gap = if std::mem::take(&mut begun) { "" } else { "\n" };
            print(format!("{gap}{}", table::table(&results)))?;
        }
        all.push(results);
        if stop.is_set() {
            break;
        }
    }
    all_written([
        // On one line: curves and pictures are long and for programs only.
        write_text(args.json.as_deref(), || Ok(serde_json::to_string(&all)? + "\n")),
        // Studies with other swept keys have other columns: each has its own head.
        write_text(args.csv.as_deref(), || Ok(all.iter().map(csv::text).collect::<Result<Vec<_>>>()?.join("\n"))),
        write_text(args.html.as_deref(), || {
            let title = if let [one] = &all[..] { one.title.clone() } else { "Simulations".into() };
            Ok(page::page(&title, &all))
        }),
    ])?;
    let broken: Vec<String> = all.iter().flat_map(Results::violations).collect();
    for violation in &broken {
        // The results are out; standard error may be closed.
        tell!("impresario: a law is broken: {violation}");
    }
    if stop.is_set() {
        tell!("impresario: stopped; what is complete was shown");
    }
    Ok(ExitCode::from(u8::from(!broken.is_empty() || stop.is_set())))
}

fn check(args: &CheckArgs) -> Result<ExitCode> {
    let overrides = args.changes.overrides()?;
    for file in &args.files {
        let study = read(file, &overrides)?;
        let (points, repetitions) = (study.points.len(), study.repetitions);
        let scenario = study.scenario(0, 0);
        let processes: u64 = scenario.application.iter().map(|a| u64::from(a.copies) * u64::from(a.processes)).sum();
        let io_nodes = scenario.io_nodes.as_ref().map_or(0, |io| io.count);
        let text = format!(
            "{}: good: {points} points × {repetitions} repetitions; {processes} processes, {io_nodes} I/O nodes, {} data \
             servers\n",
            file.display(),
            scenario.servers.count
        );
        print(&text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A scenario file is text that people write; a larger one is not one.
const FILE_MAX_BYTES: u64 = 16 << 20;

fn read(file: &Path, overrides: &Overrides) -> Result<Study> {
    let remedy = "`impresario sim template` prints a scenario to start from";
    let text = text_of(file, FILE_MAX_BYTES, "a scenario", remedy)?;
    let folder = file.parent().unwrap_or(Path::new(""));
    Ok(Study::read(&text, file, overrides, &mut |trace| import::read(folder, trace))?)
}

fn name_of(file: &Path) -> String {
    file.file_stem().unwrap_or(file.as_os_str()).to_string_lossy().into_owned()
}

fn threads(asked: Option<u32>) -> usize {
    let there = std::thread::available_parallelism().map_or(1, usize::from);
    asked.map_or(there, |n| n as usize)
}

impl Changes {
    fn overrides(&self) -> Result<Overrides> {
        let split = |flag: &str, text: &str, example: &str| -> Result<(String, String)> {
            match text.split_once('=') {
                Some((key, value)) if !key.trim().is_empty() && !value.trim().is_empty() => {
                    Ok((key.trim().to_string(), value.trim().to_string()))
                }
                _ => Err(usage(format!("{flag} {text:?} sets nothing: write {flag} {example}"))),
            }
        };
        let mut overrides = Overrides { repetitions: self.repetitions, seed: self.seed, ..Overrides::default() };
        for text in &self.set {
            let (key, value) = split("--set", text, "servers.in_flight=8")?;
            let value = sized(&key, sweep::value(&value));
            overrides.set.push((key, value));
        }
        for text in &self.sweep {
            let (key, list) = split("--sweep", text, "servers.policy=none,mlf")?;
            let values = sweep::values(&list).map_err(|why| usage(format!("--sweep {key}: {why}")))?;
            let values = values.into_iter().map(|value| sized(&key, value)).collect();
            overrides.sweep.push((key, values));
        }
        Ok(overrides)
    }
}

/// On the command line sizes may be written as people do: `64k`.
fn sized(key: &str, value: Value) -> Value {
    let size = key.ends_with("bytes") || key.ends_with("bytes_max");
    match &value {
        Value::String(text) if size => match parse_bytes(text).ok().and_then(|n| i64::try_from(n).ok()) {
            Some(bytes) => Value::Integer(bytes),
            None => value,
        },
        _ => value,
    }
}

/// What is shown while simulations run: on a terminal a line that changes, elsewhere a line every ten seconds.
struct Waiting {
    line: Mutex<(Progress, Instant)>,
    name: String,
    start: Instant,
    every: Duration,
    quiet: bool,
}

impl Waiting {
    fn new(quiet: bool, file: &Path, named: bool) -> Waiting {
        let terminal = std::io::stderr().is_terminal();
        Waiting {
            line: Mutex::new((Progress::new(), Instant::now())),
            name: if named { format!("{}: ", name_of(file)) } else { String::new() },
            start: Instant::now(),
            every: if terminal { Duration::from_millis(200) } else { Duration::from_secs(10) },
            quiet,
        }
    }

    fn show(&self, part: Part) {
        // A thread that does not get the lock leaves the update to the next one.
        let Some(mut line) = self.line.try_lock().filter(|line| !self.quiet && line.1.elapsed() >= self.every) else {
            return;
        };
        line.1 = Instant::now();
        let spent = self.start.elapsed().as_secs_f64();
        let left = if part.part > 0.001 {
            format!(", about {} left", show_seconds(spent / part.part * (1.0 - part.part)))
        } else {
            String::new()
        };
        let text = format!("{}{} of {} runs, {:.0} %{left}", self.name, part.done, part.runs, part.part * 100.0);
        line.0.show(&text);
    }
}

/// Tries of shrinking, and its time, at most.
const SHRINK_TRIES: u64 = 20_000;
const SHRINK_TIME: Duration = Duration::from_secs(120);

fn run_fuzz(args: &FuzzArgs) -> Result<ExitCode> {
    if !args.keep.is_dir() {
        return Err(usage(format!("--keep {} is not a folder: make it first", args.keep.display())));
    }
    let stop = catch_signals()?;
    if let Some(seed) = args.replay {
        return match fuzz::judge_while(&fuzz::scenario(seed), &|| !stop.is_set()) {
            Ok(None) => Err(impresario_workload::stop::Stopped.into()),
            Ok(Some(judged)) => {
                print(format!("seed {seed}: good, {} operations\n", judged.operations))?;
                Ok(ExitCode::SUCCESS)
            }
            Err(failure) => tell(&fuzz::Found { seed, failure }, args, &stop),
        };
    }
    let seed = args.seed.unwrap_or_else(|| {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        (since.as_secs() << 20) & (u64::MAX >> 1)
    });
    let start = Instant::now();
    let (mut line, mut shown) = (Progress::new(), Instant::now());
    let every = if std::io::stderr().is_terminal() { Duration::from_millis(200) } else { Duration::from_secs(10) };
    let mut enough = |tally: fuzz::Tally| {
        if shown.elapsed() >= every {
            shown = Instant::now();
            let left = show_seconds(args.time.saturating_sub(start.elapsed()).as_secs_f64());
            line.show(&format!("{} scenarios, {} faults, {left} left", tally.scenarios, tally.faults));
        }
        stop.is_set() || start.elapsed() >= args.time
    };
    // What is not done some time after the end is given up.
    let go_on = || !stop.is_set() && start.elapsed() < args.time + Duration::from_secs(10);
    let judge = |s: &Scenario| fuzz::judge_while(s, &go_on).map(Option::unwrap_or_default);
    let (tally, found) = fuzz::hunt(seed, threads(args.threads), &judge, &mut enough);
    drop(line);
    if let Some(found) = found {
        return tell(&found, args, &stop);
    }
    let seconds = start.elapsed().as_secs_f64();
    let text = format!(
        "{} scenarios from seed {seed}, {} operations, {} faults in {}, {:.0} scenarios a second: every law held\n",
        tally.scenarios,
        tally.operations,
        tally.faults,
        show_seconds(seconds),
        tally.scenarios as f64 / seconds
    );
    print(&text)?;
    Ok(ExitCode::SUCCESS)
}

/// Tells a failure, shrinks it and keeps it.
fn tell(found: &fuzz::Found, args: &FuzzArgs, stop: &Stop) -> Result<ExitCode> {
    let seed = found.seed;
    let text = format!("seed {seed}: {}\nto see it again: impresario sim fuzz --replay {seed}\n", found.failure);
    print(&text)?;
    let (start, tired) = (Instant::now(), AtomicBool::new(false));
    let mut go_on = |tries: u64| {
        let over = stop.is_set() || tries >= SHRINK_TRIES || start.elapsed() >= SHRINK_TIME;
        tired.fetch_or(over, Ordering::Relaxed);
        !over
    };
    let scenario = fuzz::scenario(seed);
    let in_time = || !stop.is_set() && start.elapsed() < SHRINK_TIME;
    let mut fails = |s: &Scenario| fuzz::judge_while(s, &in_time).err();
    let shrunk = fuzz::shrink(&scenario, &found.failure, &mut fails, &mut go_on);
    let path = args.keep.join(format!("fuzz-{seed}.toml"));
    write_text(Some(path.as_path()), || Ok(shrunk.text.clone()))?;
    let cut = if tired.load(Ordering::Relaxed) { ", stopped before it was smallest" } else { "" };
    let text = format!(
        "smallest scenario that fails so, after {} tries{cut}: {}\nto run it: impresario sim run --checks {}\n\n{}",
        shrunk.tries,
        shrunk.failure,
        path.display(),
        shrunk.text
    );
    print(&text)?;
    Ok(ExitCode::FAILURE)
}
