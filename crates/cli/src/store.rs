//! `impresario store`: the folders of a cluster's servers: made, shown, moved, adopted from older versions.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Subcommand;
use impresario_base::units::{parse_bytes, parse_duration, show_bytes};
use impresario_config::Config;
use impresario_server::draining::{self, DrainError, DrainOptions, DrainWatcher, Drained};
use impresario_server::folders::{self, Folder, Passage, State};
use impresario_server::moving::{self, MoveError, MoveOptions, Step, Watcher};
use impresario_wire::ClusterId;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::{print, print_json, stop_at, usage};

/// Files in use that are named, in the end and meanwhile.
const NAMED_MAX: usize = 20;
const WAITING_MAX: usize = 3;
const TELL_EVERY: Duration = Duration::from_secs(1);

/// Make, show, move, empty or adopt the folders of a cluster's servers
///
/// Each folder says of which cluster and server it is, and a server opens no other: a disk that is not mounted, or mounted in
/// the wrong place, stops the server instead of giving zeros for data. `impresario up` makes the folders of a new cluster
/// itself; these commands are for clusters on several machines, for disks that were lost, and for folders of older versions.
#[derive(Subcommand)]
pub enum Command {
    /// Make the empty folders of a new cluster, or that of one new server
    ///
    /// On one machine: --all. On several: on the metadata server's machine --name meta, start that server, then on each data
    /// server's machine --name NAME. A data server of which the metadata server knows a folder is refused: its disk may not be
    /// mounted.
    #[command(after_long_help = "Examples:
  impresario store init impresario.toml --all
  impresario store init impresario.toml --name data.2
  impresario store init impresario.toml --name data.2 --replace")]
    Init {
        /// The configuration file of the cluster
        config: PathBuf,
        #[command(flatten)]
        which: Which,
        /// The cluster's identity, where its metadata server cannot be asked
        #[arg(long, value_name = "ID", requires = "name")]
        cluster: Option<ClusterId>,
        /// The server had a folder, which is lost with what it held: files with data in it give I/O errors
        #[arg(long, requires = "name")]
        replace: bool,
    },
    /// Give folders that an older version made, or that of a renamed server, to the cluster
    ///
    /// Adopt the metadata server's folder first. Objects and names stay as they are. Stop the servers before.
    Adopt {
        /// The configuration file of the cluster
        config: PathBuf,
        #[command(flatten)]
        which: Which,
        /// The cluster's identity, where its metadata server cannot be asked
        #[arg(long, value_name = "ID", requires = "name")]
        cluster: Option<ClusterId>,
    },
    /// Move a data server to another folder or another machine while clients work
    ///
    /// The server's section in the configuration says where it moves to: moves_to = { address = "HOST:PORT", dir = "DIR" }; put
    /// this into the file of every machine first. Run the command where the new folder is, with the admin key where keys are
    /// used. The server goes on serving while its objects are copied. Then its clients wait, for a third of request_timeout_ms at
    /// most, the rest is copied, and the server ends. From that moment the new folder is the server's: start it there, by
    /// `impresario serve` with the same file, within the rest of request_timeout_ms (--then does it at once). Clients go on there.
    /// The old folder is never served again. A copy that was interrupted goes on where it was when the command is run again;
    /// until the server has ended, nothing has changed for it. Ctrl-C stops the copy.
    #[command(after_long_help = "Examples:
  impresario store move impresario.toml --name data.1 --then 'systemctl start impresario@data.1'
  impresario store move impresario.toml --name data.1 --rate 50m --then 'systemctl restart impresario@data.1'")]
    Move {
        /// The configuration file of the cluster
        config: PathBuf,
        /// The data server
        #[arg(long)]
        name: String,
        /// Bytes that are copied in a second at most, until what changes is caught up with; 0: no limit
        #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64m")]
        rate: u64,
        /// A command for the shell that starts the server at its new place, run as soon as it may be started
        #[arg(long, value_name = "COMMAND")]
        then: Option<String>,
        /// The old server has left for here but the command was interrupted just then: the number of the move, which
        /// `impresario store show` tells where the old folder is
        #[arg(long, value_name = "NUMBER", value_parser = parse_number)]
        left: Option<u64>,
        /// Give up a move that has begun: the server stays where it is, and the new folder is emptied
        #[arg(long, conflicts_with_all = ["then", "left", "rate"])]
        give_up: bool,
        /// Tell on standard error how far it is, also when that is not a terminal
        #[arg(long)]
        progress: bool,
    },
    /// Empty a data server while clients work, so that it can be taken away
    ///
    /// First write state = "draining" in the server's section, in the file of every machine: new files go to the others from then
    /// on. This command copies the files that are striped over the server to the others, with the admin key where keys are
    /// used. A file is copied while no one has it open: one that is in use, or changes meanwhile, is named and tried again every
    /// two seconds, until nothing could be copied for as long as --wait says; then the exit status is 1. For half a minute after
    /// a start of the metadata server, or after a client with open files was lost, no file is copied. It ends when the file no longer
    /// says that the server is draining. When the server
    /// holds nothing, the metadata server notes that; stop the server then and write state = "retired". Its section stays: it
    /// keeps the numbers of the servers behind it. The command can be stopped or killed at any time and run again.
    #[command(after_long_help = "Examples:
  impresario store drain impresario.toml --name data.1
  impresario store drain impresario.toml --name data.1 --rate 50m --wait 10m")]
    Drain {
        /// The configuration file of the cluster
        config: PathBuf,
        /// The data server
        #[arg(long)]
        name: String,
        /// Bytes that are copied in a second at most; 0: no limit
        #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "64m")]
        rate: u64,
        /// How long to wait for files that are in use while no other can be copied; 0s: not at all
        #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "1h")]
        wait: Duration,
        /// Tell on standard error how far it is, also when that is not a terminal
        #[arg(long)]
        progress: bool,
    },
    /// Show of which cluster and server each folder on this machine is
    ///
    /// Changes nothing. Exits with status 1 when a folder is not what the configuration needs.
    Show {
        /// The configuration file of the cluster
        config: PathBuf,
        /// As JSON, for programs
        #[arg(long)]
        json: bool,
    },
}

/// Which folders are meant.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
pub struct Which {
    /// All folders of the configuration, on this machine
    #[arg(long)]
    all: bool,
    /// The server of this name, or meta
    #[arg(long)]
    name: Option<String>,
}

pub fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Init { config, which: Which { name: Some(name), .. }, cluster, replace } => {
            let config = named(&config, &name)?;
            let cluster = folders::make_one(&config, &name, cluster, replace)?;
            print(format!("made the folder of {name}, of cluster {cluster}\n"))
        }
        Command::Init { config, .. } => {
            let text = match folders::make_all(&load(&config)?)? {
                Some(cluster) => format!("made the folders of cluster {cluster}\n"),
                None => "all folders exist already\n".into(),
            };
            print(&text)
        }
        Command::Adopt { config, which: Which { name: Some(name), .. }, cluster } => {
            let config = named(&config, &name)?;
            let cluster = folders::adopt_one(&config, &name, cluster)?;
            print(format!("the folder of {name} is of cluster {cluster} now\n"))
        }
        Command::Adopt { config, .. } => adopt_all(&load(&config)?),
        Command::Move { config, name, give_up: true, .. } => {
            let config = named(&config, &name)?;
            let told = match moving::give_up(&config, &name).map_err(judged)? {
                true => format!("the move of {name} is given up; remove moves_to from the configuration\n"),
                false => format!("no move of {name} to here is under way\n"),
            };
            print(&told)
        }
        Command::Move { config, name, rate, then, left, progress, give_up: false } => {
            let config = named(&config, &name)?;
            let is_told = progress || std::io::stderr().is_terminal();
            move_server(&config, &MoveOptions { name, rate_bytes: rate, left }, then.as_deref(), is_told)
        }
        Command::Drain { config, name, rate, wait, progress } => {
            let config = named(&config, &name)?;
            let is_told = progress || std::io::stderr().is_terminal();
            drain(&config, &DrainOptions { name, rate_bytes: rate, wait }, is_told)
        }
        Command::Show { config, json } => show(&load(&config)?, json),
    }
}

/// The configuration, of a cluster whose servers have folders.
fn load(path: &Path) -> anyhow::Result<Config> {
    let config = crate::load(path)?;
    match &config.tree {
        None => Ok(config),
        Some(tree) => Err(usage(format!(
            "{} serves {tree}, whose files are its own: its servers have no folders",
            path.display()
        ))),
    }
}

fn named(path: &Path, name: &str) -> anyhow::Result<Config> {
    let config = load(path)?;
    config.server(name).map_err(usage)?;
    Ok(config)
}

/// Adopts every folder of an older version; the survey names the metadata server's first.
fn adopt_all(config: &Config) -> anyhow::Result<ExitCode> {
    let mut text = String::new();
    for Folder { name, state, .. } in folders::survey(config) {
        if state? == State::Older {
            let cluster = folders::adopt_one(config, &name, None)?;
            text += &format!("the folder of {name} is of cluster {cluster} now\n");
        }
    }
    if text.is_empty() {
        text = "no folder is of an older version\n".into();
    }
    print(&text)
}

fn parse_number(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16)
        .map_err(|_| format!("{text:?} is no number of a move, which has 16 hexadecimal digits"))
}

/// Tells how far a move is, and stops it at Ctrl-C.
struct Teller {
    name: String,
    is_told: bool,
    stop: Arc<AtomicBool>,
}

impl Watcher for Teller {
    fn tell(&mut self, step: Step) {
        let name = &self.name;
        let told = match step {
            Step::Begun { goes_on: false } => format!("copying {name}"),
            Step::Begun { goes_on: true } => format!("copying {name}, from where an earlier run was"),
            Step::Copying { objects, bytes } => format!("copied {objects} objects, {}", show_bytes(bytes as f64)),
            Step::CaughtUp { round, bytes } => {
                format!("copied what had changed: round {round}, {}", show_bytes(bytes as f64))
            }
            Step::Anew => {
                format!("{name} was restarted, or more has changed than it can note: everything is copied anew")
            }
            Step::Holding => format!("clients of {name} wait"),
            Step::Complete => "everything is copied".into(),
            Step::Left => format!("{name} has left its old folder"),
        };
        if self.is_told {
            tell!("{told}");
        }
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// What is wrong with the command line or the configuration is told apart.
fn judged(error: MoveError) -> anyhow::Error {
    match error {
        MoveError::Unsuitable(why) => usage(why),
        error => error.into(),
    }
}

/// Tells how far a server is emptied.
struct DrainTeller {
    is_told: bool,
    told: Option<Instant>,
    /// That files are waited for is told once in any case: it may take long.
    has_waited: bool,
    stop: Arc<AtomicBool>,
}

impl DrainWatcher for DrainTeller {
    fn tell(&mut self, so_far: &Drained, has_walked: bool) {
        let is_due = has_walked || self.told.is_none_or(|told| told.elapsed() >= TELL_EVERY);
        let begins_to_wait = has_walked && !so_far.is_empty && !std::mem::replace(&mut self.has_waited, true);
        if !(begins_to_wait || self.is_told && is_due) {
            return;
        }
        self.told = Some(Instant::now());
        let Drained { files, bytes, remaining, objects, named, unsure, .. } = so_far;
        let mut text = format!("copied {files} files, {}", show_bytes(*bytes as f64));
        if has_walked {
            text += &format!("; {objects} objects left");
        }
        if has_walked && *remaining > 0 {
            let some: Vec<_> = named.iter().take(WAITING_MAX).map(|(path, why)| format!("{path} ({why})")).collect();
            let more = if *remaining > some.len() as u64 { ", …" } else { "" };
            text += &format!("; waiting for {remaining} files in use: {}{more}", some.join(", "));
        }
        if has_walked && *remaining == 0 && *objects > 0 {
            text += "; waiting for them to be removed";
        }
        if let Some(why) = unsure.as_ref().filter(|_| has_walked) {
            text += &format!("; looking again: {why}");
        }
        tell!("{text}");
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

fn drain(config: &Config, options: &DrainOptions, is_told: bool) -> anyhow::Result<ExitCode> {
    let mut teller = DrainTeller { is_told, told: None, has_waited: false, stop: stop_at(&[SIGINT, SIGTERM])? };
    let name = &options.name;
    let done = draining::drain(config, options, &mut teller).map_err(|error| match error {
        DrainError::Unsuitable(why) => usage(why),
        error => error.into(),
    })?;
    let Drained { files, bytes, remaining, named, objects, unsure, is_empty } = done;
    let mut text = format!("copied {files} files, {}\n", show_bytes(bytes as f64));
    if is_empty {
        text += &format!(
            "{name} holds nothing any more: stop it, and write state = \"retired\" in its section, which must stay, in the file of every \
             machine\n"
        );
        return print(text.as_bytes());
    }
    for (path, why) in named.iter().take(NAMED_MAX) {
        text += &format!("{path}: {why}\n");
    }
    let more = (remaining as usize).saturating_sub(named.len().min(NAMED_MAX));
    if more > 0 {
        text += &format!("and {more} more\n");
    }
    text += &match unsure {
        Some(why) => format!("{name} may still be needed: {why}; run this again\n"),
        None if remaining == 0 => format!(
            "{name} has {objects} objects that no file gives up: leftovers are removed within a minute; if they stay, see whether the \
             configuration says state = \"draining\" on the metadata server's machine, too, and then `impresario fsck --online`\n"
        ),
        None => format!("{name} is still needed: {objects} objects, {remaining} files in use; run this again later\n"),
    };
    print(text.as_bytes())?;
    Ok(ExitCode::from(1))
}

fn move_server(config: &Config, options: &MoveOptions, then: Option<&str>, is_told: bool) -> anyhow::Result<ExitCode> {
    let name = &options.name;
    let mut teller = Teller { name: name.clone(), is_told, stop: stop_at(&[SIGINT, SIGTERM])? };
    let has_moved = moving::move_server(config, options, &mut teller).map_err(judged)?;
    let to = config.data.iter().find(|data| data.name == *name).and_then(|data| data.moves_to.as_ref());
    let (address, dir) = to.map(|to| (to.address.clone(), to.dir.display().to_string())).unwrap_or_default();
    if let Some(command) = then.filter(|_| has_moved) {
        let status = std::process::Command::new("sh").args(["-c", command]).status();
        if !status.as_ref().is_ok_and(std::process::ExitStatus::success) {
            let why = status.map_or_else(|error| error.to_string(), |status| status.to_string());
            anyhow::bail!("{name} has moved to {dir}, but the command to start it there failed ({why}): start it now");
        }
    }
    let start = if then.is_some() && has_moved { "" } else { "start it there if it does not run; " };
    let before = if has_moved { "has moved" } else { "had moved before" };
    print(format!(
        "{name} {before} to {dir}, at {address}; {start}then write these for its address and dir in the configuration, and \
             remove moves_to\n"
    ))
}

fn show(config: &Config, json: bool) -> anyhow::Result<ExitCode> {
    let (mut rows, mut lines, mut good) = (Vec::new(), String::new(), true);
    for Folder { name, dir, state } in folders::survey(config) {
        let (kind, cluster, store, told) = match &state {
            Ok(State::Blank) => ("empty", None, None, "empty or missing".into()),
            Ok(State::Older) => ("older", None, None, "of an older version; see `impresario store adopt`".into()),
            Ok(State::Made { cluster, server, store }) if *server == name => {
                let number = store.map(|store| format!(", folder {store:016x}")).unwrap_or_default();
                let (kind, told) = match folders::passage(&name, &dir)? {
                    None => ("made", String::new()),
                    Some(Passage::Departed { number, address }) => {
                        ("departed", format!("; its server has moved to {address} (move {number:016x})"))
                    }
                    Some(Passage::Arriving { number, is_complete }) => {
                        let done = if is_complete { "complete" } else { "not complete" };
                        ("arriving", format!("; a copy, {done}, of move {number:016x}: see `impresario store move`"))
                    }
                };
                (kind, Some(cluster.to_string()), *store, format!("cluster {cluster}{number}{told}"))
            }
            Ok(State::Made { cluster, server, store }) => {
                let told = format!("made for {server} of cluster {cluster}; see `impresario store adopt`");
                ("of another server", Some(cluster.to_string()), *store, told)
            }
            Err(error) => ("foreign", None, None, error.to_string()),
        };
        good &= kind == "made";
        lines += &format!("{name}: {}: {told}\n", dir.display());
        rows.push(serde_json::json!({
            "server": name,
            "dir": dir.display().to_string(),
            "state": kind,
            "cluster": cluster,
            "store": store.map(|store| format!("{store:016x}")),
            "told": told,
        }));
    }
    if json {
        print_json(&rows)?
    } else {
        print(lines)?
    };
    Ok(ExitCode::from(u8::from(!good)))
}
