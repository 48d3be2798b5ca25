//! `impresario fsck`: do the names and the objects of a cluster fit together?

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use impresario_base::units::parse_duration;
use impresario_config::Config;
use impresario_server::fsck::{self, Options};

use crate::{load, print, print_json};

/// Check that names and objects fit together, and repair what is safe
///
/// Without --online it looks into the folders of the configuration on this machine, whose servers must be stopped: a folder
/// that a server holds is refused. With --online it asks the running servers, beside their clients' work; nothing that
/// clients do meanwhile is taken for damage.
///
/// It finds objects that belong to no file, objects that files have lost, lengths that differ from what the objects say,
/// removals and writes that a stopped server has not finished, records that cannot be read, files that are not the store's
/// own, and folders of other servers. It says what is lost, file by file. Without --repair nothing is changed. Of a data server
/// with state = "draining" it says how many files, objects and bytes it still has.
///
/// --repair sets objects that belong to no file aside (in the folder `set-aside` of their server, named by their key), takes
/// lengths from the objects where the file grows, and finishes what stopped servers had begun. It never changes data, and
/// nothing where it could not look at everything that matters.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario fsck cluster/impresario.toml                    all servers are stopped, folders here
  impresario fsck cluster/impresario.toml --online
  impresario fsck cluster/impresario.toml --online --repair --json | jq '.findings[].path'

Exit status, the sum of:
  0   everything fits
  1   something did not fit and was repaired
  4   something does not fit and was left as it is
  8   something could not be checked: a server that does not answer, a folder that is not here or in use
  16  the configuration cannot be used (2: the command line)")]
pub struct Args {
    /// The configuration file of the cluster
    config: PathBuf,
    /// Ask the running servers
    #[arg(long)]
    online: bool,
    /// Repair what is safe
    #[arg(long)]
    repair: bool,
    /// Remove objects that belong to no file for good instead of setting them aside
    #[arg(long, requires = "repair")]
    delete_orphans: bool,
    /// Objects that changed more recently are not taken for such as belong to no file [default: 10m with --online, else 0]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    min_age: Option<Duration>,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
    /// Tell on standard error how far it is, also when that is not a terminal
    #[arg(long)]
    progress: bool,
}

const MIN_AGE_ONLINE: Duration = Duration::from_secs(600);
/// Beside the sums of 1, 4 and 8.
const STATUS_CONFIG: u8 = 16;

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let min_age = args.min_age.unwrap_or(if args.online { MIN_AGE_ONLINE } else { Duration::ZERO });
    let Args { online, repair, delete_orphans, .. } = *args;
    checked(&args.config, args.progress, |config, tell| {
        let report = fsck::run(config, &Options { online, repair, delete_orphans, min_age }, tell);
        let shown = if args.json { print_json(&report.json()) } else { print(report.text()) };
        Ok(shown.map(|_| report.status()))
    })
}

/// Runs a check of a cluster's folders, which shows what it has found and gives the exit status; or why it cannot be made.
pub fn checked(
    config: &Path,
    progress: bool,
    check: impl FnOnce(&Config, &mut dyn FnMut(&str)) -> Result<anyhow::Result<u8>, String>,
) -> anyhow::Result<ExitCode> {
    let is_told = progress || std::io::stderr().is_terminal();
    let mut tell = |far: &str| {
        if is_told {
            tell!("{far}");
        }
    };
    let checked = load(config).map_err(|error| error.to_string()).and_then(|config| match &config.tree {
        Some(tree) => Err(format!("{tree} is another file system's: check it with that one's own commands")),
        None => check(&config, &mut tell),
    });
    match checked {
        Ok(status) => Ok(ExitCode::from(status?)),
        Err(why) => {
            tell!("{why}");
            Ok(ExitCode::from(STATUS_CONFIG))
        }
    }
}
