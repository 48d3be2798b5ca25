//! `impresario scrub`: have the devices of data servers damaged what they store?

use std::path::PathBuf;
use std::process::ExitCode;

use impresario_base::units::parse_bytes;
use impresario_server::fsck::{ScrubOptions, scrub};

use crate::fsck::checked;
use crate::{print, print_json};

/// Read all objects of data servers and find what their devices have damaged
///
/// Without --online it reads the folders of the configuration on this machine, whose servers must be stopped: a folder that a
/// server holds is refused. With --online the running servers read, one piece of 1 MiB at a time beside their clients'
/// requests, no faster than --rate. What memory holds of an object is dropped before, since only the device can tell.
///
/// A folder with checksums (`checksums = true` in the data server's section) is compared with them; blocks that have none, because
/// they were written before, or shortly before a crash, get theirs. In a folder without checksums only blocks that the
/// device cannot read are found. Damaged places are told with their file where the metadata server's folder is here, or
/// the metadata server answers. Nothing is repaired: restore the file from a copy; a block that is written anew as a whole
/// is good again.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario scrub cluster/impresario.toml --online
  impresario scrub cluster/impresario.toml --online --server data.0 --rate 20m
  impresario scrub cluster/impresario.toml --json | jq '.damage[].path'      servers are stopped

Exit status, the sum of:
  0   nothing is damaged
  4   something is damaged
  8   something could not be read: a server that does not answer, a folder that is not here or in use
  16  the configuration cannot be used (2: the command line)")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// Have the running servers read
    #[arg(long)]
    online: bool,
    /// Only this data server; may be repeated
    #[arg(long, value_name = "NAME")]
    server: Vec<String>,
    /// Bytes that are read in a second at most, over all servers; 0: no limit [default: 64m with --online, else 0]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    rate: Option<u64>,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// Tell on standard error how far it is, also when that is not a terminal
    #[arg(long)]
    progress: bool,
}

const RATE_ONLINE: u64 = 64 << 20;

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let rate_bytes = args.rate.unwrap_or(if args.online { RATE_ONLINE } else { 0 });
    let options = ScrubOptions { online: args.online, servers: args.server.clone(), rate_bytes };
    checked(&args.config, args.progress, |config, tell| {
        let report = scrub(config, &options, tell)?;
        let shown = if args.json { print_json(&report.json()) } else { print(report.text()) };
        Ok(shown.map(|_| report.status()))
    })
}
