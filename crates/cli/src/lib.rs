//! The command `impresario`: selects the subcommand, sets up logging, and exits with its status.
//!
//! It consists of two programs. [`front()`] is the one that users start: it does `assist run` itself and executes the other one,
//! [`everything`], for other subcommands. A program that is to run faster waits until its starter has come from the disk, so that
//! is a small file: the linker leaves out what `assist run` does not call.

// They panic where their output is closed or full: see `tell` and `print`.
#![deny(clippy::print_stdout, clippy::print_stderr)]

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use clap::{CommandFactory, Parser, Subcommand};
use impresario_workload::usage::{Usage, usage};

/// Writes a line to standard error, as `eprintln!` does; where that is full or closed, the program goes on.
macro_rules! tell {
    ($($words:tt)*) => {
        _ = std::io::Write::write_all(&mut std::io::stderr(), (format!($($words)*) + "\n").as_bytes())
    };
}

mod allocate;
mod assist;
mod bench;
mod calibrate;
mod children;
mod config_command;
mod conformance;
mod demo;
mod explain;
mod front;
mod fsck;
mod key;
mod layout;
mod mount;
mod nfs;
mod policy;
mod ports;
mod prefetch;
mod run;
mod scrub;
mod serve;
mod sim;
mod status;
mod store;
mod trace;
mod up;

/// Striped storage behind I/O nodes, with request scheduling at every server
///
/// One file, impresario.toml, describes a cluster. `impresario up` writes one and runs the whole cluster on this
/// machine; on several machines, `impresario serve` runs one server of it on each.
#[derive(Parser)]
#[command(name = "impresario", version, propagate_version = true, max_term_width = 100, after_help = AFTER_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  impresario up --dir ./cluster                 a cluster on this machine, in the foreground
  impresario mount ./cluster/impresario.toml /mnt/x
  impresario status ./cluster/impresario.toml
  impresario policy set ./cluster/impresario.toml --server io.1 twins window_us=1000

Environment:
  IMPRESARIO_LOG    what is logged to standard error: error, warn, info, debug, trace,
                    or per part, such as impresario_server=debug (servers: info, others: warn)

Exit status:
  0  done
  1  it failed, or something is not well: a server that does not answer, a died child
  2  the command line or the configuration is wrong";

#[derive(Subcommand)]
enum Command {
    Up(up::Args),
    Serve(serve::Args),
    Mount(mount::MountArgs),
    Umount(mount::UmountArgs),
    Run(Box<run::Args>),
    Nfs(Box<nfs::Args>),
    Status(status::Args),
    Explain(explain::Args),
    Fsck(fsck::Args),
    Scrub(scrub::Args),
    #[command(subcommand)]
    Policy(policy::Command),
    #[command(subcommand)]
    Allocate(allocate::Command),
    #[command(subcommand)]
    Config(config_command::Command),
    #[command(subcommand)]
    Key(key::Command),
    #[command(subcommand)]
    Store(store::Command),
    #[command(subcommand)]
    Layout(layout::Command),
    Prefetch(prefetch::Args),
    #[command(subcommand)]
    Assist(assist::Command),
    Bench(Box<bench::Args>),
    Calibrate(calibrate::Args),
    Conformance(Box<conformance::Args>),
    Demo(demo::Args),
    Sim(Box<sim::Args>),
    #[command(subcommand)]
    Trace(trace::Command),
    /// Print a completion script for a shell
    ///
    /// For bash: impresario completions bash > /etc/bash_completion.d/impresario
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page of the program or of one subcommand, in roff
    ///
    /// To read it: impresario man up | man -l -
    Man {
        /// A subcommand, e.g. up, or none for the program itself.
        subcommand: Option<String>,
    },
}

pub use front::front;

/// The program with all subcommands.
pub fn everything() -> ExitCode {
    let command = Cli::parse().command;
    log(if matches!(command, Command::Serve(_) | Command::Nfs(_)) { "info" } else { "warn" });
    ended(run(command))
}

/// Logs to standard error what IMPRESARIO_LOG says, or else from `level` on.
fn log(level: &str) {
    let filter = tracing_subscriber::EnvFilter::try_from_env("IMPRESARIO_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
    let colour = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let logging = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colour);
    // What cannot be logged would be told to standard error, and end the thread that it is about when that is full or closed.
    logging.log_internal_errors(false).init();
}

/// The exit status of a command, whose error is reported.
fn ended(result: anyhow::Result<ExitCode>) -> ExitCode {
    match result {
        Ok(code) => code,
        Err(error) if closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            let of_file = error.downcast_ref::<impresario_toml::FileErrors>();
            let in_file = of_file.is_some() || error.is::<impresario_assist::config::ConfigError>();
            // Errors in a file begin with its name, as compilers' do, so that editors find the line.
            let prefix = if in_file { "" } else { "impresario: " };
            tell!("{prefix}{}", one_line(&error));
            // Whoever starts a server again and again does not where it would not help.
            let is_passing = of_file.is_some_and(|errors| errors.is_passing);
            ExitCode::from(if in_file && !is_passing || error.is::<Usage>() { 2 } else { 1 })
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Up(args) => up::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Mount(args) => mount::mount(args),
        Command::Umount(args) => mount::umount(args),
        Command::Run(args) => run::run(*args),
        Command::Nfs(args) => nfs::run(*args),
        Command::Status(args) => status::run(args),
        Command::Explain(args) => explain::run(&args),
        Command::Fsck(args) => fsck::run(&args),
        Command::Scrub(args) => scrub::run(&args),
        Command::Policy(command) => policy::run(command),
        Command::Allocate(command) => allocate::run(command),
        Command::Config(command) => config_command::run(command),
        Command::Key(command) => key::run(command),
        Command::Store(command) => store::run(command),
        Command::Layout(command) => layout::run(command),
        Command::Prefetch(args) => prefetch::run(args),
        Command::Assist(command) => assist::run(command),
        Command::Bench(args) => bench::run(*args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Conformance(args) => conformance::run(*args),
        Command::Demo(args) => demo::run(args),
        Command::Sim(args) => sim::run(*args),
        Command::Trace(command) => trace::run(command),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "impresario", &mut script);
            print(&script)
        }
        Command::Man { subcommand } => man(subcommand.as_deref()),
    }
}

fn man(subcommand: Option<&str>) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command();
    command.build();
    if let Some(name) = subcommand {
        let found = command.find_subcommand(name).cloned();
        command = found.ok_or_else(|| usage(format!("there is no subcommand {name}; `impresario help` lists them")))?;
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    print(&page)
}

/// Writes to standard output; if the reader has gone away (`| head`), the program ends quietly.
fn print(text: impl AsRef<[u8]>) -> anyhow::Result<ExitCode> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_ref())?;
    out.flush()?;
    Ok(ExitCode::SUCCESS)
}

/// Tells a service manager that waits for it, as systemd does with `Type=notify`, that this program serves.
fn notify_ready() {
    if let Err(error) = sd_notify::notify(&[sd_notify::NotifyState::Ready]) {
        tracing::warn!(%error, "the service manager was not notified");
    }
}

/// What becomes true at one of these signals.
fn stop_at(signals: &[i32]) -> anyhow::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in signals {
        signal_hook::flag::register(*signal, stop.clone()).context("cannot catch signals")?;
    }
    Ok(stop)
}

/// Writes to standard output, for programs.
fn print_json(what: &impl serde::Serialize) -> anyhow::Result<ExitCode> {
    print(serde_json::to_string_pretty(what)? + "\n")
}

/// An error and what caused it; causes that it tells itself are not told again.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !line.contains(&cause) {
            line += &format!(": {cause}");
        }
    }
    line
}

fn closed_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Reads and checks a configuration.
fn load(path: &std::path::Path) -> anyhow::Result<impresario_config::Config> {
    Ok(impresario_config::Config::load(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_told_once() {
        let cause = std::io::Error::other("no space");
        let error = anyhow::Error::new(cause).context("cannot write a: no space").context("saving");
        assert_eq!(one_line(&error), "saving: cannot write a: no space");
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// `assist run` has the same options and texts in both programs.
    #[test]
    fn the_front_reads_what_everything_reads() {
        let text = |mut command: clap::Command| {
            command.build();
            let run = command.find_subcommand_mut("assist").and_then(|assist| assist.find_subcommand_mut("run"));
            run.map(|run| run.render_long_help().to_string())
        };
        let texts = [Cli::command(), front::Front::command()].map(text);
        assert!(texts[0].as_ref().is_some_and(|text| text.contains("impresario assist run")), "{texts:?}");
        assert_eq!(texts[0], texts[1]);
    }

    /// Documents, units and scripts of batch systems say what can be typed.
    #[test]
    fn the_documents_name_commands_that_exist() {
        let told = impresario_testing::documents::check_commands(Cli::command());
        assert!(told > 150, "{told}");
    }

    /// Every subcommand and flag has a help text.
    #[test]
    fn everything_is_explained() {
        fn walk(command: &clap::Command, path: &str) {
            let path = format!("{path} {}", command.get_name());
            assert!(command.get_about().is_some(), "{path} is not explained");
            for arg in command.get_arguments().filter(|a| !["help", "version"].contains(&a.get_id().as_str())) {
                assert!(arg.get_help().is_some(), "{path}: {} is not explained", arg.get_id());
            }
            command.get_subcommands().filter(|c| c.get_name() != "help").for_each(|c| walk(c, &path));
        }
        walk(&Cli::command(), "");
    }
}
