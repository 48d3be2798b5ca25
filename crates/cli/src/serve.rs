//! `impresario serve`: one server of a cluster, in the foreground.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

use crate::{load, notify_ready, print, usage};

/// Run one server of a cluster, in the foreground
///
/// Listens on the address in the configuration, prints one line when it serves, and logs to standard error. The server's
/// folder must have been made for it, by `impresario up` or `impresario store init`. SIGTERM or Ctrl-C stops it after it has
/// finished the requests in flight. On SIGHUP it reads its keys again; one without keys stops, as when its terminal is closed,
/// unless it runs under `nohup` or a service manager.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario serve impresario.toml --name data.2
  impresario serve impresario.toml --name meta")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// The server's name in the configuration, or meta
    #[arg(long)]
    name: String,
    /// End when the process with this number, our parent, ends
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<i32>,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(parent) = args.parent {
        follow(parent)?;
    }
    let config = load(&args.config)?;
    let name = config.server(&args.name).map_err(usage)?.name();
    impresario_server::run(&config, name, |address| {
        // The reader of our output may have closed its end; the server keeps running.
        drop(print(format!("{name} serves on {address}\n")));
        notify_ready();
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Asks the kernel to send us SIGTERM when our parent ends.
fn follow(parent: i32) -> anyhow::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM)).context("cannot follow the parent process")?;
    // The parent may have ended before the call took effect.
    if getppid() != Pid::from_raw(parent) {
        anyhow::bail!("the process {parent} that started this server has ended");
    }
    Ok(())
}
