//! `impresario assist report`: statistics of the node's advice manager, and the daemon's side that answers.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_assist::jobs::{Jobs, Origin};
use impresario_assist::report::Report;
use impresario_base::machine::host_name;

use crate::{print, usage};

/// Time limit for a query and its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Until a query is accepted again after that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Limit of an answer, bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Folders below one another that are searched for reports.
const DEPTH_MAX: u32 = 16;

/// Report what the advice manager of the node did: per file hints given, bytes prefetched, used and wasted, hit rate
///
/// With files or folders of reports (`--report` of `assist run`, or `--json` of this), it adds them up instead, by job and
/// program: time waited for reads, time that hints saved, bytes prefetched, used and wasted, those that gained most first. With
/// --prometheus it prints metrics, for example into the folder of node_exporter's textfile collector; doc/METRICS.md lists them.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist report
  impresario assist report --socket /run/impresario/assist.sock --json
  impresario assist report /shared/guided/2026-10
  impresario assist report --prometheus > /var/lib/node_exporter/impresario.prom.new")]
pub struct Args {
    /// Reports, or folders of files that end with .json [default: ask the manager]
    #[arg(value_name = "REPORT", conflicts_with = "socket")]
    reports: Vec<PathBuf>,
    /// The manager's socket [default: the user's, else the machine's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print metrics in Prometheus' text format
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    if !args.reports.is_empty() {
        let jobs = Jobs::of(saved(&args.reports)?);
        return match (args.json, args.prometheus) {
            (true, _) => print(serde_json::to_string_pretty(&jobs)? + "\n"),
            (_, true) => print(jobs.to_prometheus()),
            _ => print(jobs.to_string()),
        };
    }
    let report = asked(&args.socket.unwrap_or_else(answering_socket))?;
    match (args.json, args.prometheus) {
        (true, _) => print(report.to_json() + "\n"),
        (_, true) => print(Jobs::of([report]).to_prometheus()),
        _ => print(report.to_string()),
    }
}

/// The report of a manager that runs.
fn asked(socket: &Path) -> Result<Report> {
    let place = place(socket);
    let mut stream = UnixStream::connect(&place).map_err(|error| {
        usage(format!(
            "no advice manager answers at {}: {error}; start one with `impresario assist daemon`, or name its socket with \
             --socket",
            place.display()
        ))
    })?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut text = String::new();
    Read::by_ref(&mut stream).take(ANSWER_BYTES_MAX).read_to_string(&mut text).context("reading its answer")?;
    serde_json::from_str(&text).context("its answer is not a report")
}

/// Reports in files. One that is none is named, and costs the others nothing.
fn saved(places: &[PathBuf]) -> Result<Vec<Report>> {
    let (mut files, mut reports) = (Vec::new(), Vec::new());
    for place in places {
        let found = files.len();
        find(place, DEPTH_MAX, &mut files).with_context(|| format!("reading {}", place.display()))?;
        if files.len() == found {
            return Err(usage(format!("no file below {} ends with .json", place.display())));
        }
    }
    for file in files {
        let report = File::open(&file).map_err(anyhow::Error::from).and_then(|opened| {
            let mut text = String::new();
            opened.take(ANSWER_BYTES_MAX).read_to_string(&mut text)?;
            Ok(serde_json::from_str(&text)?)
        });
        match report {
            Ok(report) => reports.push(report),
            Err(error) => tell!("impresario: {} is no report: {error:#}", file.display()),
        }
    }
    Ok(reports)
}

/// A file, or those in a folder that end with `.json`.
fn find(place: &Path, depth: u32, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
    if !place.metadata()?.is_dir() {
        files.push(place.into());
        return Ok(());
    }
    let mut inside = std::fs::read_dir(place)?.map(|entry| Ok(entry?.path())).collect::<std::io::Result<Vec<_>>>()?;
    inside.sort();
    for path in inside {
        let is_folder = path.symlink_metadata().is_ok_and(|meta| meta.is_dir());
        if is_folder && depth > 0 {
            find(&path, depth - 1, files)?;
        } else if path.is_file() && path.extension().is_some_and(|suffix| suffix == "json") {
            files.push(path);
        }
    }
    Ok(())
}

/// Whose run a report of this process tells of.
pub fn origin(program: &str) -> Origin {
    let node = host_name();
    Origin::here(program, &node, |name| std::env::var(name).ok())
}

/// The default socket to query: that of the user's own manager if there is one, else that of the machine's.
pub fn answering_socket() -> PathBuf {
    let users = default_socket();
    let machines = impresario_ring::socket_path(None, None);
    let named = std::env::var_os(impresario_ring::SOCKET_VARIABLE).is_some_and(|name| !name.is_empty());
    if named || users.exists() || !machines.exists() { users } else { machines }
}

/// The default socket of a daemon.
pub fn default_socket() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name);
    impresario_ring::socket_path(
        variable(impresario_ring::SOCKET_VARIABLE).as_deref().map(OsStrExt::as_bytes),
        variable("XDG_RUNTIME_DIR").as_deref().map(OsStrExt::as_bytes),
    )
}

/// The socket for reports, beside the socket for programs.
fn place(socket: &Path) -> PathBuf {
    let mut name = socket.as_os_str().to_os_string();
    name.push(".report");
    name.into()
}

/// Answers with reports until dropped.
pub struct Reports {
    listener: UnixListener,
    place: PathBuf,
}

impl Reports {
    /// Listens beside the socket, for the daemon's own user (and root): a report names the files of every user.
    pub fn listen(socket: &Path) -> Result<Reports> {
        let place = place(socket);
        let _ = std::fs::remove_file(&place); // left by a killed daemon; ours already holds the main socket
        let listener = bind(&place).with_context(|| format!("listening at {}", place.display()))?;
        Ok(Reports { listener, place })
    }

    /// Answers the queries since the last call.
    pub fn answer(&self, report: impl Fn() -> std::io::Result<Report>) {
        // A few at a time: a flood of queries cannot block the daemon.
        for _ in 0..16 {
            let mut stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return,
                // It stays readable: without a descriptor left it would be asked again at once.
                Err(_) => return std::thread::sleep(ACCEPT_PAUSE),
            };
            let sent = stream
                .set_write_timeout(Some(Duration::from_secs(1)))
                .and_then(|()| stream.write_all(Report { origin: origin(""), ..report()? }.to_json().as_bytes()));
            if let Err(error) = sent {
                tracing::warn!(%error, "a report could not be sent");
            }
        }
    }
}

impl AsFd for Reports {
    /// Becomes readable with a query.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

/// A socket that only its owner can reach from the first moment on: its mode is set before it listens.
fn bind(place: &Path) -> std::io::Result<UnixListener> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddrUnix::new(place)?)?;
    rustix::fs::chmod(place, rustix::fs::Mode::from_raw_mode(0o600))?;
    listen(&socket, 128)?;
    Ok(socket.into())
}

impl Drop for Reports {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.place);
    }
}
