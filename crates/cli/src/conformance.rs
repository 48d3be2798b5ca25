//! `impresario conformance`: does an integration of the scheduler keep what its users rely on?

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use impresario_base::units::parse_duration;
use impresario_conformance::{Error, Options};
use impresario_workload::usage::usage;

use crate::{print, print_json};

/// Check that a mount or an NBD server keeps the order of requests, their identity, and answers each
///
/// For file systems and servers that embed the scheduler, and any others. Many processes read and write contents that say
/// who wrote them, where and when; every byte that is read is compared with the writes that the read may return. A check
/// that fails says what it saw: the offset, what was expected and what was found.
///
/// PATH is a folder of the mount; a folder of its own is made in it and removed. SOCKET is the Unix socket of an NBD server
/// (fixed newstyle), or its host:port; the first MiB of its export is overwritten and zeroed, and an export that
/// contains data there is refused without --overwrite.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario conformance /mnt/x
  impresario conformance /mnt/x --below /bricks/0 --seconds 60 --json | jq '.checks[] | select(.outcome == \"fail\")'
  impresario conformance /mnt/x --only rename --only unlink --seed 7
  impresario conformance /run/nbd.sock --restart 'systemctl restart my-nbd-server'
  impresario conformance --list

Exit status:
  0  no check failed
  1  a check failed, the run was interrupted, or the target does not answer
  2  the command line is wrong, or the target is not one that can be checked")]
pub struct Args {
    /// A folder of a mount, the Unix socket of an NBD server, or its host:port
    #[arg(value_name = "PATH|SOCKET", required_unless_present_any = ["list", "agent"])]
    target: Option<OsString>,
    /// How long the random parts take together; every check makes at least one round
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "20")]
    seconds: Duration,
    /// The seed of all random choices [default: drawn, and printed]
    #[arg(long)]
    seed: Option<u64>,
    /// Run this check only; may be given several times
    #[arg(long, value_name = "CHECK")]
    only: Vec<String>,
    /// A request without an answer for so long counts as lost
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "30")]
    timeout: Duration,
    /// Where the server keeps the same tree, or the file behind the export: what was synced must be there
    #[arg(long, value_name = "FOLDER|FILE")]
    below: Option<PathBuf>,
    /// A shell command that stops the server and starts it again, for the check shutdown
    #[arg(long, value_name = "COMMAND")]
    restart: Option<String>,
    /// The NBD export
    #[arg(long, value_name = "NAME", default_value = "")]
    export: String,
    /// Overwrite an NBD export although it contains data
    #[arg(long)]
    overwrite: bool,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// List the checks and end
    #[arg(long)]
    list: bool,
    /// Serve another conformance run, which started this process
    #[arg(long, hide = true)]
    agent: bool,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if args.agent {
        impresario_conformance::serve_agent().context("--agent is for the program's own use")?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.list {
        return print(list());
    }
    if args.timeout < Duration::from_secs(1) {
        return Err(usage("--timeout: a request may take a second on a busy machine; give at least 1s"));
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        // The second one ends the program as usual.
        signal_hook::flag::register_conditional_default(signal, stop.clone())?;
        signal_hook::flag::register(signal, stop.clone())?;
    }
    let program = std::env::current_exe().context("this program's own path")?;
    let stopped = stop.clone();
    let options = Options {
        target: args.target.unwrap_or_default(),
        seed: args.seed.unwrap_or_else(drawn),
        duration: args.seconds,
        only: args.only,
        patience: args.timeout,
        below: args.below,
        restart: args.restart,
        export: args.export,
        overwrite: args.overwrite,
        agent: vec![program.into(), "conformance".into(), "--agent".into()],
        stop,
    };
    let mut progress = |line: &str| tell!("{line}");
    let report = impresario_conformance::run(&options, &mut progress).map_err(|error| match error {
        Error::Usage(text) => usage(text),
        Error::Target(text) => anyhow::anyhow!(text),
    })?;
    match args.json {
        true => print_json(&report.json())?,
        false => print(report.text())?,
    };
    // A run that was interrupted has not shown what it was to show.
    let good = report.passed() && !stopped.load(Ordering::Relaxed);
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A seed that differs from run to run, short enough to type.
fn drawn() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    impresario_base::random::mix(since.as_nanos() as u64 ^ u64::from(std::process::id())) >> 32
}

fn list() -> String {
    let (mount, nbd) = impresario_conformance::list();
    let mut text = String::new();
    for (title, checks) in [("of a mount", mount), ("of an NBD server", nbd)] {
        text += &format!("Checks {title}:\n");
        checks.iter().for_each(|(name, summary)| text += &format!("  {name:<19} {summary}\n"));
    }
    text
}
