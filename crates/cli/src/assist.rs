//! `impresario assist`: guided I/O for unmodified programs.

mod compare;
mod daemon;
pub mod known;
pub mod launch;
mod learn;
mod lessons;
pub mod library;
mod nodes;
mod plan;
mod record;
mod report;
mod run;
mod selftest;
mod survey;
mod switch;

use std::process::ExitCode;

use anyhow::Result;
use impresario_assist::config::{Hints, Paths};

/// Make unmodified programs read faster: record one run, plan hints, run with them
///
/// A library, preloaded into the program (which must be dynamically linked), reports its reads to an advice manager;
/// the manager prefetches the data from the kernel or the file system before the program reads it. The program does not
/// change: its results, errors and output stay the same, and without a manager it runs as usual. doc/GUIDED-IO.md
/// begins with five minutes for a scientist and continues with the service of a node.
#[derive(clap::Subcommand)]
#[command(after_long_help = "Examples:
  impresario assist record -- python3 analysis.py data.root
  impresario assist plan trace.imt -o hints.json
  impresario assist compare hints.json -- python3 analysis.py data.root
  impresario assist run hints.json -- python3 analysis.py data.root")]
pub enum Command {
    Record(record::Args),
    Plan(plan::Args),
    Learn(learn::Args),
    #[command(flatten)]
    Start(Start),
    Compare(compare::Args),
    Daemon(daemon::Args),
    Report(report::Args),
    Survey(survey::Args),
    Selftest(selftest::Args),
    Library(library::Args),
    On(switch::On),
    Off(switch::Off),
    Status(switch::Status),
    #[command(hide = true)]
    TellLearnt(known::Tell),
}

/// What starts a program that is to run faster, and so should itself start fast
#[derive(clap::Subcommand)]
pub enum Start {
    Run(run::Args),
    #[command(hide = true)]
    ThroughSsh(nodes::ThroughSsh),
    #[command(hide = true)]
    OnNode(nodes::OnNode),
    #[command(hide = true)]
    Remember(learn::Remember),
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Record(args) => record::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Learn(args) => learn::run(args),
        Command::Start(command) => start(command),
        Command::Compare(args) => compare::run(args),
        Command::Daemon(args) => daemon::run(args),
        Command::Report(args) => report::run(args),
        Command::Survey(args) => survey::run(args),
        Command::Selftest(args) => selftest::run(args),
        Command::Library(args) => library::run(args),
        Command::On(args) => switch::on(args),
        Command::Off(args) => switch::off(args),
        Command::Status(args) => switch::status(args),
        Command::TellLearnt(args) => known::tell_learnt(args),
    }
}

pub fn start(command: Start) -> Result<ExitCode> {
    match command {
        Start::Run(args) => run::run(args),
        Start::ThroughSsh(args) => nodes::through_ssh(args),
        Start::OnNode(args) => nodes::on_node(args),
        Start::Remember(args) => learn::remember(args),
    }
}

/// Reads hints, asks the file system for their paths, and reports warnings about them.
fn hints(path: &std::path::Path) -> Result<(Hints, Paths)> {
    let hints = Hints::load(path)?;
    let paths = Paths::of(&hints);
    warn(path, &hints, &paths);
    Ok((hints, paths))
}

fn warn(path: &std::path::Path, hints: &Hints, paths: &Paths) {
    for warning in hints.warnings(paths) {
        tell!("impresario: {}: {warning}", path.display());
    }
}
