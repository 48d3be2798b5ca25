//! `impresario assist daemon`: the advice manager of a node.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use impresario_assist::config::{ConfigError, Hints, Paths};
use impresario_assist::manager::{Access, Handle, Manager, Options};
use impresario_assist::watch::{Follower, Means};
use impresario_base::machine::raise_file_limit;
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::known;
use super::lessons::Learner;
use super::report::{Reports, default_socket};
use crate::{notify_ready, stop_at};

/// Run the advice manager of a node, for the programs of all its users
///
/// Programs with the preloaded library connect to it: by `impresario assist run --node`, or for all users by LD_PRELOAD
/// in the batch system's prologue. With --watch it also observes programs without the library, through the kernel.
/// Stays in the foreground until Ctrl-C or SIGTERM; SIGHUP reads the hints again (an invalid file changes nothing).
/// For files of which the hints say nothing it does as `impresario assist run` does. It follows what each program's user has learnt of their
/// kind (`impresario assist learn`), read with that user's rights, or what was learnt for all users, and it learns from the runs of programs of
/// which that is not known yet ("Learn" in the hints file). Else it finds a pattern while the program reads them. Programs never wait for it:
/// without the daemon they run as usual, and when it comes back they reconnect by themselves.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist daemon
  impresario assist daemon --config hints.json
  sudo impresario assist daemon --config /etc/impresario/hints.json --socket /run/impresario/assist.sock --everyone
  sudo impresario assist daemon --config hints.json --watch")]
pub struct Args {
    /// The hints file [default: no plan]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Its socket [default: the user's, else the machine's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve the programs of all users, not only of its own user
    #[arg(long)]
    everyone: bool,
    /// Also observe programs without the library, through the kernel's trace of its page cache (needs root)
    #[arg(long, requires = "config")]
    watch: bool,
    /// Observe them before each access, which delays it by some microseconds (needs root, Linux 6.14, ext4, xfs or
    /// btrfs)
    #[arg(long, conflicts_with = "watch", requires = "config")]
    watch_before: bool,
    /// Threads that give hints
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=256))]
    workers: u32,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let socket = args.socket.clone().unwrap_or_else(default_socket);
    let (mut hints, mut paths) = match &args.config {
        Some(config) => super::hints(config)?,
        None => Default::default(),
    };
    let signals = Signals::catch()?;
    let learner = Arc::new(Learner::start()?);
    raise_file_limit(0);
    let mut first = true;
    loop {
        let manager = start(&args, &hints, paths.clone(), &socket, &learner)?;
        let reports = Reports::listen(&socket)?;
        let mut follower = follow(&args, &hints, &paths, &manager)?;
        if std::mem::take(&mut first) {
            tell!("The advice manager listens at {}.", socket.display());
            notify_ready();
        }
        let new = serve(args.config.as_deref(), &manager, &reports, &mut follower, &signals)?;
        drop(follower);
        drop(reports);
        manager.stop().context("ending the advice manager")?;
        let Some(new) = new else {
            learner.end();
            return Ok(ExitCode::SUCCESS);
        };
        if let Some(config) = &args.config {
            super::warn(config, &new.0, &new.1);
        }
        tell!("The hints were read again.");
        (hints, paths) = new;
    }
}

fn start(args: &Args, hints: &Hints, paths: Paths, socket: &Path, learner: &Arc<Learner>) -> Result<Handle> {
    let (learner, state) = (learner.clone(), known::state_folder());
    let options = Options {
        access: if args.everyone { Access::Everyone } else { Access::Owner },
        workers: args.workers,
        paths: Some(paths),
        known: Some(Arc::new(move |asked| known::of_anyone(asked, &learner, state.as_deref()))),
        // Files of which they say nothing are followed as `run` follows them.
        ..Options::new(hints.clone().and_online())
    };
    Manager::start(options, socket).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::NotFound => "; its directory must exist",
            std::io::ErrorKind::PermissionDenied => "; choose a --socket in one of your directories, or run as root",
            _ => "",
        };
        // Not a mistake for certain: the folder may come, and another manager end.
        anyhow::anyhow!("no advice manager can listen: {error}{hint}")
    })
}

/// Starts to observe programs without the library, if requested.
fn follow(args: &Args, hints: &Hints, paths: &Paths, manager: &Handle) -> Result<Option<Follower>> {
    let means = match (args.watch, args.watch_before) {
        (true, _) => Means::Trace,
        (_, true) => Means::PreAccess,
        _ => return Ok(None),
    };
    for path in paths.silent() {
        tell!("impresario: {}: {}; nothing there is watched", path.display(), paths.why_silent(path));
    }
    let follower = Follower::new(hints, paths, means, manager.socket())
        .context("watching programs through the kernel needs root and, for --watch, tracefs at /sys/kernel/tracing")?;
    tell!("Watching {} files.", follower.files());
    Ok(Some(follower))
}

/// New hints, read beside the manager, which goes on: they, or what they name, may be on a file system that hangs.
struct Reading {
    thread: JoinHandle<Result<(Hints, Paths), ConfigError>>,
    began: Instant,
    is_told: bool,
}

impl Reading {
    /// How long it may take before it is told of.
    const PATIENCE: Duration = Duration::from_secs(30);
    /// How often it is looked at.
    const LOOK_EVERY: Duration = Duration::from_millis(50);

    fn begin(config: &Path) -> std::io::Result<Reading> {
        let config = config.to_path_buf();
        let read = move || {
            let hints = Hints::load(&config)?;
            let paths = Paths::of(&hints);
            Ok((hints, paths))
        };
        let thread = std::thread::Builder::new().name("assist-hints".into()).spawn(read)?;
        Ok(Reading { thread, began: Instant::now(), is_told: false })
    }

    /// The new hints, once they are read. Those that cannot be used change nothing.
    fn turn(reading: &mut Option<Reading>, config: &Path) -> Option<(Hints, Paths)> {
        let mut now = reading.take()?;
        if !now.thread.is_finished() {
            if !now.is_told && now.began.elapsed() > Reading::PATIENCE {
                now.is_told = true;
                tell!("impresario: the hints are unchanged so far: reading {} takes long", config.display());
            }
            *reading = Some(now);
            return None;
        }
        match now.thread.join() {
            Ok(Ok((hints, paths))) => match paths.silent().first() {
                None => return Some((hints, paths)),
                Some(path) => {
                    tell!("impresario: the hints are unchanged: {}: {}", path.display(), paths.why_silent(path));
                }
            },
            Ok(Err(error)) => tell!("impresario: the hints are unchanged: {error}"),
            Err(_) => tell!("impresario: the hints are unchanged: reading {} failed", config.display()),
        }
        None
    }
}

/// The signals that the daemon minds.
struct Signals {
    stop: Arc<AtomicBool>,
    reload: Arc<AtomicBool>,
    /// Becomes readable when one has arrived.
    arrived: UnixStream,
}

impl Signals {
    fn catch() -> Result<Signals> {
        // The flags come first, so that they are set when the stream wakes.
        let (stop, reload) = (stop_at(&[SIGINT, SIGTERM])?, stop_at(&[SIGHUP])?);
        let (arrived, arrives) = UnixStream::pair().context("cannot catch signals")?;
        arrived.set_nonblocking(true).context("cannot catch signals")?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            let arrives = arrives.try_clone().context("cannot catch signals")?;
            signal_hook::low_level::pipe::register(signal, arrives).context("cannot catch signals")?;
        }
        Ok(Signals { stop, reload, arrived })
    }

    /// Waits for one, or for a query, no longer than this.
    fn or(&self, reports: &Reports, patience: Option<Duration>) -> Result<()> {
        let mut fds = [self.arrived.as_fd(), reports.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let patience = patience.map(rustix::event::Timespec::try_from).transpose().context("waiting")?;
        match poll(&mut fds, patience.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for signals and queries"),
        }
        let _ = (&self.arrived).read(&mut [0; 64]);
        Ok(())
    }
}

/// Serves until there are new hints, or, with `None`, until the daemon must end.
fn serve(
    config: Option<&Path>,
    manager: &Handle,
    reports: &Reports,
    follower: &mut Option<Follower>,
    signals: &Signals,
) -> Result<Option<(Hints, Paths)>> {
    let mut reading = None;
    loop {
        if signals.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if let Some(new) = config.and_then(|config| Reading::turn(&mut reading, config)) {
            return Ok(Some(new));
        }
        // One that comes meanwhile has its turn when this one has ended.
        if reading.is_none() && signals.reload.swap(false, Ordering::Relaxed) {
            match config.map(Reading::begin) {
                Some(Ok(begun)) => reading = Some(begun),
                Some(Err(error)) => tell!("impresario: the hints are unchanged: no thread can read them: {error}"),
                None => tell!("impresario: there is no hints file to read; name one with --config"),
            }
        }
        reports.answer(|| manager.report());
        match follower {
            Some(follower) => follower.turn(Duration::from_millis(50))?,
            None => signals.or(reports, reading.is_some().then_some(Reading::LOOK_EVERY))?,
        }
    }
}
