//! `impresario assist daemon`: the advice manager of a node.

use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use impresario_assist::config::Hints;
use impresario_assist::manager::{Access, Handle, Manager, Options, raise_file_limit};
use impresario_assist::watch::{Follower, Means};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::report::{Reports, default_socket};
use crate::usage;

/// Run the advice manager of a node, for the programs of all its users
///
/// Programs reach it when the library is put into them: by `impresario assist run --node`, or for everybody by LD_PRELOAD
/// in the batch system's prologue. With --watch it also sees programs that carry no library, through the kernel. Stays in
/// the foreground until Ctrl-C or SIGTERM; SIGHUP reads the hints anew (a file with a mistake changes nothing). Programs
/// are never held up: without the daemon they run as ever, and when it comes back they find it by themselves.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario assist daemon --config hints.json
  sudo impresario assist daemon --config /etc/impresario/hints.json --socket /run/impresario/assist.sock --everyone
  sudo impresario assist daemon --config hints.json --watch")]
pub struct Args {
    /// The hints file
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Where programs reach it [default: the user's, else the machine's]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Serve the programs of all users, not only of the one who starts it
    #[arg(long)]
    everyone: bool,
    /// Also see programs that carry no library, through the kernel's trace of its page cache (needs root)
    #[arg(long)]
    watch: bool,
    /// The same before each access, which waits some microseconds for it (needs root, Linux 6.14, ext4, xfs or btrfs)
    #[arg(long, conflicts_with = "watch")]
    watch_before: bool,
    /// Threads that give hints
    #[arg(long, default_value_t = 8, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=256))]
    workers: u32,
}

pub fn run(args: Args) -> Result<ExitCode> {
    let socket = args.socket.clone().unwrap_or_else(default_socket);
    let mut hints = super::hints(&args.config)?;
    let (stop, reload) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, stop.clone())?;
    }
    signal_hook::flag::register(SIGHUP, reload.clone())?;
    raise_file_limit();
    let mut first = true;
    loop {
        let manager = start(&args, &hints, &socket)?;
        let reports = Reports::listen(&socket)?;
        let mut follower = follow(&args, &hints, &manager)?;
        if std::mem::take(&mut first) {
            eprintln!("The advice manager listens at {}.", socket.display());
            tell_systemd("READY=1");
        }
        // A file with a mistake changes nothing: the same manager goes on.
        let new = loop {
            match serve(&manager, &reports, &mut follower, &stop, &reload)? {
                Next::Stop => break None,
                Next::Reload => match Hints::load(&args.config) {
                    Ok(new) => break Some(new),
                    Err(error) => eprintln!("impresario: the hints stay as they were: {error}"),
                },
            }
        };
        drop(follower);
        drop(reports);
        manager.stop().context("ending the advice manager")?;
        let Some(new) = new else { return Ok(ExitCode::SUCCESS) };
        new.warnings().iter().for_each(|w| eprintln!("impresario: {}: {w}", args.config.display()));
        eprintln!("The hints were read anew.");
        hints = new;
    }
}

fn start(args: &Args, hints: &Hints, socket: &Path) -> Result<Handle> {
    let options = Options {
        access: if args.everyone { Access::Everyone } else { Access::Owner },
        workers: args.workers,
        ..Options::new(hints.clone())
    };
    Manager::start(options, socket).map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::NotFound => "; its folder must exist",
            std::io::ErrorKind::PermissionDenied => "; choose a --socket in a folder of yours, or run as root",
            _ => "",
        };
        usage(format!("no advice manager can listen: {error}{hint}"))
    })
}

/// Begins to watch programs that carry no library, if that is asked for.
fn follow(args: &Args, hints: &Hints, manager: &Handle) -> Result<Option<Follower>> {
    let means = match (args.watch, args.watch_before) {
        (true, _) => Means::Trace,
        (_, true) => Means::PreAccess,
        _ => return Ok(None),
    };
    let follower = Follower::new(hints, means, manager.socket())
        .context("watching programs through the kernel needs root and, for --watch, tracefs at /sys/kernel/tracing")?;
    eprintln!("Watching {} files.", follower.files());
    Ok(Some(follower))
}

/// Why serving ended.
enum Next {
    /// The daemon is to end.
    Stop,
    /// It is to read its hints anew.
    Reload,
}

/// Serves until a signal came.
fn serve(
    manager: &Handle,
    reports: &Reports,
    follower: &mut Option<Follower>,
    stop: &AtomicBool,
    reload: &AtomicBool,
) -> Result<Next> {
    loop {
        if stop.load(Ordering::Relaxed) {
            return Ok(Next::Stop);
        }
        if reload.swap(false, Ordering::Relaxed) {
            return Ok(Next::Reload);
        }
        reports.answer(|| manager.report());
        match follower {
            Some(follower) => follower.turn(Duration::from_millis(50))?,
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Tells the service manager, if there is one, how we are (sd_notify(3)).
fn tell_systemd(state: &str) {
    let Some(place) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let Ok(socket) = UnixDatagram::unbound() else { return };
    let sent = match place.to_string_lossy().strip_prefix('@') {
        Some(name) => {
            use std::os::linux::net::SocketAddrExt;
            std::os::unix::net::SocketAddr::from_abstract_name(name)
                .and_then(|address| socket.send_to_addr(state.as_bytes(), &address))
        }
        None => socket.send_to(state.as_bytes(), Path::new(&place)),
    };
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager was not told");
    }
}
