//! `impresario assist`: guided I/O for unmodified programs.

mod compare;
mod daemon;
mod launch;
mod plan;
mod record;
mod report;
mod run;

use std::process::ExitCode;

use anyhow::Result;

/// Make unmodified programs read faster: watch one run, plan hints, run with them
///
/// A library is put into the program (it must be dynamically linked) that tells an advice manager what the program
/// reads; the manager asks the kernel or the file system for the data before the program does. Nothing of the program
/// changes: its results, its errors and its output stay as they are, and without a manager it runs on as if nothing were
/// there. doc/GUIDED-IO.md begins with five minutes for a scientist and goes on with the service of a node.
#[derive(clap::Subcommand)]
#[command(after_long_help = "Examples:
  impresario assist record -- python3 analysis.py data.root
  impresario assist plan trace.imt -o hints.json
  impresario assist compare hints.json -- python3 analysis.py data.root
  impresario assist run hints.json -- python3 analysis.py data.root")]
pub enum Command {
    Record(record::Args),
    Plan(plan::Args),
    Run(run::Args),
    Compare(compare::Args),
    Daemon(daemon::Args),
    Report(report::Args),
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Record(args) => record::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Run(args) => run::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Daemon(args) => daemon::run(args),
        Command::Report(args) => report::run(args),
    }
}

/// Reads hints and tells what is odd about them.
fn hints(path: &std::path::Path) -> Result<impresario_assist::config::Hints> {
    let hints = impresario_assist::config::Hints::load(path)?;
    for warning in hints.warnings() {
        eprintln!("impresario: {}: {warning}", path.display());
    }
    Ok(hints)
}
