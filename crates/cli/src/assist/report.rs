//! `impresario assist report`: what the advice manager of the node did; and the side of the daemon that answers.

use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_assist::report::Report;

use crate::{print, usage};

/// How long question and answer may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// A longer answer is not ours.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Tell what the advice manager of the node did: per file hints given, bytes brought in, used and wasted, hit rate
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist report
  impresario assist report --socket /run/impresario/assist.sock --json")]
pub struct Args {
    /// The manager's socket [default: the user's, else the machine's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Tell it as JSON
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
    let report: Report = serde_json::from_str(&text).context("its answer is no report")?;
    match args.json {
        true => print((report.to_json() + "\n").as_bytes()),
        false => print(report.to_string().as_bytes()),
    }
}

/// The socket of the manager that is asked when nothing else is said: that of the user's own manager if there is one,
/// else that of the machine's.
pub fn answering_socket() -> PathBuf {
    let users = default_socket();
    let machines = impresario_ring::socket_path(None, None);
    let named = std::env::var_os(impresario_ring::SOCKET_VARIABLE).is_some_and(|name| !name.is_empty());
    if named || users.exists() || !machines.exists() { users } else { machines }
}

/// The socket at which a daemon listens when nothing else is said.
pub fn default_socket() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name);
    impresario_ring::socket_path(
        variable(impresario_ring::SOCKET_VARIABLE).as_deref().map(OsStrExt::as_bytes),
        variable("XDG_RUNTIME_DIR").as_deref().map(OsStrExt::as_bytes),
    )
}

/// Where reports are given, beside the socket for programs.
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
    /// Listens beside the socket; those who may use that may ask.
    pub fn listen(socket: &Path) -> Result<Reports> {
        let place = place(socket);
        let _ = std::fs::remove_file(&place); // a daemon that was killed left it; ours holds the main socket by now
        let listener = UnixListener::bind(&place).with_context(|| format!("listening at {}", place.display()))?;
        let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(socket)?) & 0o777;
        std::fs::set_permissions(&place, std::os::unix::fs::PermissionsExt::from_mode(mode))?;
        listener.set_nonblocking(true)?;
        Ok(Reports { listener, place })
    }

    /// Answers those who asked since the last call.
    pub fn answer(&self, report: impl Fn() -> std::io::Result<Report>) {
        // A few at a time: who asks without end cannot hold the daemon.
        for _ in 0..16 {
            let Ok((mut stream, _)) = self.listener.accept() else { return };
            let sent = stream
                .set_write_timeout(Some(Duration::from_secs(1)))
                .and_then(|()| stream.write_all(report()?.to_json().as_bytes()));
            if let Err(error) = sent {
                tracing::warn!(%error, "a report was not given");
            }
        }
    }
}

impl Drop for Reports {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.place);
    }
}
