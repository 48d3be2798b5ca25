//! `impresario assist survey`: what guided I/O could be worth, from Darshan's logs.

use std::fmt::Write;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use impresario_assist::survey::{Survey, Surveyed};
use impresario_base::units::show_bytes;
use impresario_trace::darshan::{LOG_BYTES_MAX, Log};
use serde::Serialize;

use crate::{print, usage};

/// Folders below one another, and logs, at most.
const DEPTH_MAX: u32 = 16;
const LOGS_MAX: usize = 1_000_000;

/// Rank a site's programs by what guided I/O could save them, from Darshan logs
///
/// Reads all binary Darshan logs (*.darshan, format versions 3.10 to 3.41) in a folder and below it, and tells for each
/// program which share of its time it waits for reads, how these follow one another, and the most that bringing data in
/// while it computes can save: programs with the largest saving first. Of programs that cannot profit the reason is told.
/// Nothing is run. The saving is what overlap allows, not a promise: measure it with `impresario assist compare`.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist survey /var/log/darshan/2026/10
  impresario assist survey --top 100 --json /var/log/darshan/2026/10 > october.json")]
pub struct Args {
    /// A folder of Darshan logs, or one log
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Programs to list at most
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What is printed.
#[derive(Serialize)]
struct Told<'a> {
    /// Logs that were read.
    logs: u64,
    /// Logs that could not be read, or only in part.
    damaged: u64,
    /// Programs in these logs.
    programs_in_all: usize,
    programs: &'a [Surveyed],
}

pub fn run(args: Args) -> Result<ExitCode> {
    let mut paths = Vec::new();
    find(&args.folder, DEPTH_MAX, &mut paths).with_context(|| format!("reading {}", args.folder.display()))?;
    if paths.is_empty() {
        return Err(usage(format!("no file below {} ends with .darshan", args.folder.display())));
    }
    paths.sort();
    let (mut survey, mut logs, mut damaged) = (Survey::default(), 0, 0);
    for path in &paths {
        match read(path) {
            Ok(log) => {
                log.notes.iter().for_each(|note| tell!("impresario: {}: {note}", path.display()));
                (logs, damaged) = (logs + 1, damaged + u64::from(!log.notes.is_empty()));
                survey.add(&log);
            }
            Err(error) => {
                damaged += 1;
                tell!("impresario: {}: {error:#}", path.display());
            }
        }
    }
    let ranked = survey.ranked();
    let programs = &ranked[..ranked.len().min(args.top)];
    let told = Told { logs, damaged, programs_in_all: ranked.len(), programs };
    let text = if args.json { serde_json::to_string_pretty(&told)? + "\n" } else { words(&told) };
    print(&text)?;
    Ok(if logs > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The logs of a folder and of those below it; links are not followed.
fn find(path: &Path, depth: u32, found: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !std::fs::metadata(path)?.is_dir() {
        found.push(path.into());
        return Ok(());
    }
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() && depth > 0 {
            if let Err(error) = find(&entry.path(), depth - 1, found) {
                tell!("impresario: {}: {error}", entry.path().display());
            }
        } else if kind.is_file() && entry.path().extension().is_some_and(|e| e == "darshan") && found.len() < LOGS_MAX {
            found.push(entry.path());
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<Log> {
    let (mut bytes, file) = (Vec::new(), File::open(path)?);
    file.take(LOG_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    anyhow::ensure!(bytes.len() as u64 <= LOG_BYTES_MAX, "longer than {}", show_bytes(LOG_BYTES_MAX as f64));
    Ok(Log::parse(&bytes)?)
}

fn words(told: &Told<'_>) -> String {
    let mut text = format!("{} logs, {} programs", told.logs, told.programs_in_all);
    if told.damaged > 0 {
        let _ = write!(text, "; {} logs could not be read, or only in part", told.damaged);
    }
    text += "\n";
    for (program, rank) in told.programs.iter().zip(1..) {
        let hours = |s: f64| s / 3600.0;
        let _ = writeln!(
            text,
            "\n{rank}. {}: at most {:.1} % of its time, {:.2} process hours of {:.2} in {} runs",
            program.program,
            program.gain_percent,
            hours(program.gain_s),
            hours(program.process_s),
            program.runs
        );
        let _ = writeln!(text, "   {}", program.why);
        if program.reads > 0 {
            let percent = |share: f64| (100.0 * share).round();
            let _ = writeln!(
                text,
                "   {} in reads of {} on average; by time {} % straight on, {} % foreseen, {} % not",
                show_bytes(program.read_bytes as f64),
                show_bytes(program.mean_read_bytes as f64),
                percent(program.shares.straight_on),
                percent(program.shares.foreseen),
                percent(program.shares.unforeseen)
            );
        }
    }
    text
}
