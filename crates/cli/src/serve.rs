//! `impresario serve`: one server of a cluster, in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::{load, print, usage};

/// Run one server of a cluster, in the foreground
///
/// Makes the server's folder if it is not there, listens where the configuration says, prints one line when it
/// serves, and logs to standard error. SIGTERM or Ctrl-C stops it: what is in flight is finished first.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario serve impresario.toml --name data.2
  impresario serve impresario.toml --name meta")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// Which server: its name in the configuration, or meta
    #[arg(long)]
    name: String,
    /// End when the process with this number, which started us, ends
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<i32>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(parent) = args.parent {
        follow(parent)?;
    }
    let config = load(&args.config)?;
    let name = config.server(&args.name).map_err(usage)?.name();
    // Whoever started us may have closed its end; that is no reason to stop serving.
    impresario_server::run(&config, name, |address| drop(print(format!("{name} serves on {address}\n").as_bytes())))?;
    Ok(ExitCode::SUCCESS)
}

/// Asks the system to end us (SIGTERM) when our parent ends, however it ends.
fn follow(parent: i32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the parent process")?;
    // It may have ended before the system knew.
    if getppid() != Pid::from_raw(parent) {
        anyhow::bail!("the process {parent} that started this server has ended");
    }
    Ok(())
}
