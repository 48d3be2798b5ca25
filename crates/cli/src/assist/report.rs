//! `impresario assist report`: statistics of the node's advice manager, and the daemon's side that answers.

use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_assist::report::Report;

use crate::{print, usage};

/// Time limit for a query and its answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Limit of an answer, bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Report what the advice manager of the node did: per file hints given, bytes prefetched, used and wasted, hit rate
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist report
  impresario assist report --socket /run/impresario/assist.sock --json")]
pub struct Args {
    /// The manager's socket [default: the user's, else the machine's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let socket = args.socket.unwrap_or_else(answering_socket);
    let place = place(&socket);
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
    let report: Report = serde_json::from_str(&text).context("its answer is not a report")?;
    match args.json {
        true => print(report.to_json() + "\n"),
        false => print(report.to_string()),
    }
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
            let Ok((mut stream, _)) = self.listener.accept() else { return };
            let sent = stream
                .set_write_timeout(Some(Duration::from_secs(1)))
                .and_then(|()| stream.write_all(report()?.to_json().as_bytes()));
            if let Err(error) = sent {
                tracing::warn!(%error, "a report could not be sent");
            }
        }
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
