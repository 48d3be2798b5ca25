//! Checks what an integration of the scheduler must get right: the order of requests that conflict, cancellation, the
//! identity of requests, errors, and that every request is answered.
//!
//! [`run`] checks a folder of a mounted file system whose server embeds the scheduler, or a server that speaks the NBD
//! protocol. Everything is seen from outside: contents are [stamped](stamp) with their writer, sequence number, file and
//! offset, so that a wrong byte says where it came from, and every request has a deadline.
//!
//! Requests to a mount are made by agents: processes that `run` starts with the command of [`Options::agent`], which
//! must call [`serve_agent`].

mod history;
mod mount;
mod nbd;
mod report;
mod restart;
mod stamp;
mod target;

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use mount::serve_agent;
pub use report::{Checked, Outcome, Report};

/// What to check, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// A folder, a Unix socket, or `host:port`.
    pub target: OsString,
    /// The seed of all random choices.
    pub seed: u64,
    /// How long the random parts of all checks take together. Each check makes at least one round.
    pub duration: Duration,
    /// Names of the checks to run; empty: all.
    pub only: Vec<String>,
    /// A request without an answer for so long counts as lost.
    pub patience: Duration,
    /// For a mount: the folder below it, in which the server keeps the same tree. What was synced must be there.
    pub below: Option<PathBuf>,
    /// A shell command that stops the server and starts it again, for the check `shutdown`.
    pub restart: Option<String>,
    /// For NBD: the name of the export.
    pub export: String,
    /// For NBD: overwrite an export that contains data.
    pub overwrite: bool,
    /// The program, with its arguments, that calls [`serve_agent`].
    pub agent: Vec<OsString>,
    /// Set by the caller to end the run early; what was not run is then skipped, and the folder is cleaned up.
    pub stop: Arc<AtomicBool>,
}

impl Options {
    /// One round of each check, with agents that this command starts.
    pub fn new(target: impl Into<OsString>, agent: Vec<OsString>) -> Options {
        Options {
            target: target.into(),
            seed: 0,
            duration: Duration::ZERO,
            only: Vec::new(),
            patience: Duration::from_secs(30),
            below: None,
            restart: None,
            export: String::new(),
            overwrite: false,
            agent,
            stop: Arc::new(AtomicBool::new(false)),
        }
    }
}

/// Why nothing was checked.
#[derive(Debug)]
pub enum Error {
    /// The user's mistake: what was given, and the remedy.
    Usage(String),
    /// The target cannot be used, or does not answer.
    Target(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Usage(text) | Error::Target(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for Error {}

/// A check's name and what it checks.
pub type Named = (&'static str, &'static str);

/// All checks of a mount, and all of an NBD server.
pub fn list() -> (Vec<Named>, Vec<Named>) {
    let mount = mount::CHECKS.iter().map(|check| (check.name, check.summary)).collect();
    (mount, nbd::CHECKS.iter().map(|check| (check.name, check.summary)).collect())
}

/// Checks a target. `progress` receives a line at the start of each check.
///
/// # Errors
/// When nothing could be checked: a wrong target or option, or a target that does not answer at all.
pub fn run(options: &Options, progress: &mut dyn FnMut(&str)) -> Result<Report, Error> {
    match target::resolve(options)? {
        target::Target::Folder(folder) => mount::run(options, &folder, progress),
        target::Target::Nbd(address) => nbd::run(options, &address, progress),
    }
}

/// Why a check ended early.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Stop {
    /// It found a fault.
    Fail(String),
    /// It cannot be made here.
    Skip(String),
}

/// The result of a part of a check.
pub(crate) type Checking<T = ()> = Result<T, Stop>;

/// A fault, as the result of a part of a check.
pub(crate) fn fault<T>(text: impl Into<String>) -> Checking<T> {
    Err(Stop::Fail(text.into()))
}

/// Puts what was going on before a fault.
pub(crate) fn during<T>(what: &str, result: Result<T, String>) -> Checking<T> {
    result.map_err(|text| Stop::Fail(format!("{what}: {text}")))
}

/// What all parts of a run share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub patience: Duration,
    requests: AtomicU64,
    ticks: AtomicU64,
    stop: Arc<AtomicBool>,
}

impl Shared {
    pub fn new(options: &Options) -> Arc<Shared> {
        let (patience, stop) = (options.patience, options.stop.clone());
        Arc::new(Shared { patience, stop, requests: AtomicU64::new(0), ticks: AtomicU64::new(0) })
    }

    /// Counts a request.
    pub fn count(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// The next instant of the run's own order: before a request, behind its answer. Also numbers writes.
    pub fn tick(&self) -> u64 {
        self.ticks.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Whether the user wants to end.
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// A check: its name, one sentence, and the function that makes it on a `Site`.
pub(crate) struct Check<Site> {
    pub name: &'static str,
    pub summary: &'static str,
    pub run: fn(&mut Site) -> Checking,
    /// Whether it repeats rounds until its share of the time is over.
    pub repeats: bool,
}

/// Refuses unknown names of checks.
pub(crate) fn chosen<'a, Site>(checks: &'a [Check<Site>], only: &[String]) -> Result<Vec<&'a Check<Site>>, Error> {
    for name in only {
        if !checks.iter().any(|check| check.name == name) {
            let names: Vec<&str> = checks.iter().map(|check| check.name).collect();
            return Err(Error::Usage(format!(
                "--only {name}: there is no such check here; there are {}",
                names.join(", ")
            )));
        }
    }
    Ok(checks.iter().filter(|check| only.is_empty() || only.iter().any(|name| name == check.name)).collect())
}

/// Runs the checks one by one; `before` prepares the site and `after` cleans up behind each.
pub(crate) fn run_checks<Site>(
    options: &Options,
    shared: &Shared,
    checks: &[&Check<Site>],
    site: &mut Site,
    progress: &mut dyn FnMut(&str),
    before: impl Fn(&mut Site, &'static str, Instant) -> Checking,
    after: impl Fn(&mut Site),
) -> Vec<Checked> {
    let repeating = checks.iter().filter(|check| check.repeats).count().max(1);
    let share = options.duration / repeating as u32;
    let mut checked = Vec::new();
    for (n, check) in checks.iter().enumerate() {
        let (started, requests) = (Instant::now(), shared.requests());
        let outcome = if shared.stopped() {
            Outcome::Skipped("interrupted".into())
        } else {
            progress(&format!("{}/{} {}: {}", n + 1, checks.len(), check.name, check.summary));
            let result = before(site, check.name, started + share).and_then(|()| (check.run)(site));
            after(site);
            match result {
                Ok(()) => Outcome::Pass,
                Err(Stop::Fail(reason)) => Outcome::Fail(reason),
                Err(Stop::Skip(reason)) => Outcome::Skipped(reason),
            }
        };
        let (requests, seconds) = (shared.requests() - requests, started.elapsed().as_secs_f64());
        checked.push(Checked { name: check.name, summary: check.summary, outcome, requests, seconds });
    }
    checked
}

/// An errno in words.
pub(crate) fn errno_text(errno: i32) -> String {
    let text = io::Error::from_raw_os_error(errno).to_string();
    text.split(" (os error").next().unwrap_or_default().to_string()
}
