//! `impresario mount` and `umount`: a cluster as a file system of this machine.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Weak};
use std::time::Duration;

use anyhow::{Context, bail};
use impresario_base::machine::{ending_signals, survive_file_size_limit};
use impresario_base::mounts::{Mount, mounts};
use impresario_base::units::{parse_duration, parse_positive_bytes};
use impresario_client::{Client, ClientOptions, Via};
use impresario_config::Config;
use impresario_fuse::{MountOptions, Mounted};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::SIGTERM;

use crate::{load, notify_ready, print, usage};

/// Mount a cluster on a directory of this machine, through FUSE
///
/// Stays in the foreground until Ctrl-C, SIGTERM, the end of its terminal or `impresario umount`; with -d it detaches as soon as
/// the file system is usable. If files are in use, Ctrl-C reports it and the mount stays; a second Ctrl-C unmounts it anyway.
/// SIGTERM gives the programs that use files 5 s, and unmounts it then: what they still do there fails.
/// doc/SEMANTICS.md lists what programs may rely on.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario mount cluster/impresario.toml /mnt/x
  impresario mount -d --allow-other cluster/impresario.toml /mnt/x
  impresario mount --direct-io --job 42 cluster/impresario.toml /mnt/x")]
pub struct MountArgs {
    /// The configuration file of the cluster
    config: PathBuf,
    /// An existing directory
    dir: PathBuf,
    /// Return as soon as it is mounted; the mount continues in the background
    #[arg(short, long)]
    detach: bool,
    /// Give other users access; their permissions are checked (needs root, or user_allow_other in /etc/fuse.conf)
    #[arg(long)]
    allow_other: bool,
    /// Refuse every change
    #[arg(long)]
    read_only: bool,
    /// Number of the job (application) to which the scheduler assigns the requests
    #[arg(long, value_name = "N", default_value_t = 0)]
    job: u64,
    /// Path to the data: auto (as the configuration allocates I/O nodes), direct (bypassing them), or an I/O node's name
    #[arg(long, default_value = "auto")]
    via: String,
    /// Bypass the page cache: every read and write goes to the servers as it is
    #[arg(long)]
    direct_io: bool,
    /// Keep fcntl locks and flock in this machine's kernel: they exclude the programs of this mount only, and cost nothing
    #[arg(long)]
    local_locks: bool,
    /// How long names and attributes may be cached, such as 1s
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    cache_time: Option<Duration>,
    /// Largest request of this mount on the wire, such as 8k; larger ones are split and sent at once
    #[arg(long, value_name = "SIZE", value_parser = parse_positive_bytes)]
    wire_max: Option<u64>,
    /// Threads that serve the kernel, which is also the number of concurrent requests
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// With -d: log file of the background process (default: no log)
    #[arg(long, value_name = "FILE", requires = "detach")]
    log_file: Option<PathBuf>,
    /// This is the background process
    #[arg(long, hide = true)]
    background: bool,
}

/// Unmount a cluster from a folder of this machine
#[derive(clap::Args)]
#[command(after_long_help = "Examples:
  impresario umount /mnt/x
  impresario umount --lazy /mnt/x")]
pub struct UmountArgs {
    /// The mount point
    dir: PathBuf,
    /// Detach the mount now, even if files are in use; it ends with its last user
    #[arg(long)]
    lazy: bool,
}

/// How long programs may go on using files of a mount that was told to end by SIGTERM.
const IN_USE_PATIENCE: Duration = Duration::from_secs(5);
/// Time limit for a detached mount to become usable.
const DETACH_PATIENCE: Duration = Duration::from_secs(60);
/// Printed by the background process when the mount is usable.
const MOUNTED: &str = "mounted ";

pub fn mount(args: MountArgs) -> anyhow::Result<ExitCode> {
    let config = load(&args.config)?;
    let via = via(&config, &args.via)?;
    let wire_max_bytes = args.wire_max.map(|n| u32::try_from(n).map_err(|_| usage("--wire-max must be below 4g")));
    let wire_max_bytes = wire_max_bytes.transpose()?;
    if args.detach && !args.background {
        return detach();
    }
    if args.background {
        // Detaches from the terminal, so that its Ctrl-C no longer reaches this process.
        rustix::process::setsid().context("cannot detach")?;
    }
    let client =
        Client::connect(&config, ClientOptions { job: args.job, via, wire_max_bytes, ..ClientOptions::default() })
            .with_context(|| {
                format!("cannot reach the cluster of {}; see `impresario status`", args.config.display())
            })?;
    client.follow(&config);
    let defaults = MountOptions::default();
    let options = MountOptions {
        allow_other: args.allow_other,
        read_only: args.read_only,
        direct_io: args.direct_io,
        shared_locks: !args.local_locks,
        threads: args.threads,
        cache_time: args.cache_time.unwrap_or(defaults.cache_time),
        source: std::path::absolute(&args.config).unwrap_or(args.config.clone()).display().to_string(),
        ..defaults
    };
    let log = args.log_file.as_deref().map(open_log).transpose()?;
    // Before the mount: a signal that ends the process would leave it without one.
    let mut signals = signal_hook::iterator::Signals::new(ending_signals()).context("cannot catch signals")?;
    // Dropped at an error below, it unmounts: every call at a mount whose process has ended fails.
    let mounted = Arc::new(impresario_fuse::mount(client, &args.dir, options)?);
    let ending = Arc::downgrade(&mounted);
    // Its log may reach it.
    survive_file_size_limit();
    std::thread::spawn(move || unmount_on_signals(&ending, signals.forever()));
    let said = print(format!("{MOUNTED}{} on {}\n", args.config.display(), mounted.path().display()));
    if args.background {
        // The command that waits for this may have been ended meanwhile: then nobody knows of the mount.
        said?;
        leave_the_terminal(log)?;
    }
    notify_ready();
    mounted.wait()?;
    Ok(ExitCode::SUCCESS)
}

/// Which way data go, in a user's word.
pub fn via(config: &Config, word: &str) -> anyhow::Result<Via> {
    match word {
        "auto" => Ok(Via::Auto),
        "direct" => Ok(Via::Direct),
        name => match config.server(name).map_err(usage)? {
            impresario_config::Server::Io(index, _) => Ok(Via::IoNode(index)),
            _ => Err(usage(format!("--via {name}: that is not an I/O node; write auto, direct or an I/O node's name"))),
        },
    }
}

fn unmount_on_signals(mounted: &Weak<Mounted>, signals: impl Iterator<Item = i32>) {
    let mut asked_before = false;
    for signal in signals {
        // From a service manager or a batch system, which sends SIGKILL next: that would leave a mount without its process.
        if signal == SIGTERM && !asked_before {
            let (ending, trying) = (mounted.clone(), mounted.clone());
            std::thread::spawn(move || end_within(&ending, IN_USE_PATIENCE));
            std::thread::spawn(move || unmount_when_idle(&trying));
            asked_before = true;
            continue;
        }
        let Some(mounted) = mounted.upgrade() else { return };
        let outcome = if asked_before { mounted.abort() } else { mounted.unmount() };
        let Err(error) = outcome else { return };
        tell!("impresario: {error}; or interrupt again to unmount anyway");
        asked_before = true;
    }
}

/// Tries to unmount until nothing is in use any more.
fn unmount_when_idle(mounted: &Weak<Mounted>) {
    let mut is_told = false;
    while let Some(Err(error)) = mounted.upgrade().map(|mounted| mounted.unmount()) {
        if !std::mem::replace(&mut is_told, true) {
            tell!("impresario: {error}; it is unmounted anyway in {} s", IN_USE_PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Unmounts and ends the process if the mount has not ended within this time: files are in use, or servers do not answer.
fn end_within(mounted: &Weak<Mounted>, longest: Duration) {
    let Some(mounted) = mounted.upgrade() else { return };
    if mounted.wait_for(longest).is_some() {
        return;
    }
    tell!(
        "impresario: {} is still in use and is unmounted: what programs do there now fails",
        mounted.path().display()
    );
    if let Err(error) = mounted.abort() {
        tell!("impresario: {error}");
    }
    // Without root the kernel keeps the mount for those that use it, and a server may be awaited that does not answer. What is
    // outstanding fails with the end of the process.
    if mounted.wait_for(longest).is_none() {
        std::process::exit(1);
    }
}

/// Starts this program again in the background and waits until the file system is usable.
fn detach() -> anyhow::Result<ExitCode> {
    let mut command = Command::new(std::env::current_exe().context("cannot find the program itself")?);
    command.args(std::env::args_os().skip(1)).arg("--background");
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot start in the background")?;
    let out = child.stdout.take().context("the background process has no output")?;
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(out).read_line(&mut line);
        let _ = tell.send(read.map(|_| line));
    });
    match told.recv_timeout(DETACH_PATIENCE) {
        Ok(Ok(line)) if line.starts_with(MOUNTED) => print(&line),
        Ok(_) => {
            // It ended without mounting; its error is already on our standard error.
            let status = child.wait().context("cannot wait for the background process")?;
            Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1).max(1)))
        }
        Err(_) => {
            // Not SIGKILL: it may just have mounted.
            if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
                let _ = kill_process(pid, Signal::TERM); // it was not waited for, so the number is its own
            }
            bail!("not mounted after {} s; see `impresario status`", DETACH_PATIENCE.as_secs())
        }
    }
}

fn open_log(path: &Path) -> anyhow::Result<File> {
    File::options().create(true).append(true).open(path).with_context(|| format!("cannot write {}", path.display()))
}

/// Closes standard output, so that a process waiting for its end does not wait for the mount; logs go to a file or
/// nowhere.
fn leave_the_terminal(log: Option<File>) -> anyhow::Result<()> {
    let nowhere = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
    rustix::stdio::dup2_stdout(&nowhere)?;
    rustix::stdio::dup2_stderr(log.as_ref().unwrap_or(&nowhere))?;
    // So that the starting directory can be unmounted or removed.
    std::env::set_current_dir("/").context("/")
}

/// The place of the mount that a path names, as the kernel's list has it. Nothing is asked of the mount itself: its servers may not
/// answer, or its process may have been killed.
fn place_of(dir: &Path) -> anyhow::Result<PathBuf> {
    let mut place = std::path::absolute(dir).unwrap_or(dir.into());
    // Mounting follows links, and unmounting does not.
    for _ in 0..LINKS_MAX {
        let Ok(to) = std::fs::read_link(&place) else { break };
        place = place.parent().unwrap_or(Path::new("/")).join(to);
    }
    let folder = place.parent().and_then(|folder| folder.canonicalize().ok());
    let place = match (folder, place.file_name()) {
        (Some(folder), Some(name)) => folder.join(name),
        _ => place.canonicalize().unwrap_or(place),
    };
    let is_ours = |mount: &&Mount| mount.kind == "fuse.impresario";
    let mounts = mounts();
    if mounts.iter().rfind(|mount| mount.point == place).is_some_and(|mount| is_ours(&mount)) || mounts.is_empty() {
        return Ok(place);
    }
    match mounts.iter().filter(is_ours).any(|mount| place.starts_with(&mount.point)) {
        true => bail!("{} is inside a mounted cluster, not where it is mounted", dir.display()),
        false => bail!("{} is not a mounted cluster", dir.display()),
    }
}

/// As the kernel follows.
const LINKS_MAX: usize = 40;

pub fn umount(args: UmountArgs) -> anyhow::Result<ExitCode> {
    let dir = &place_of(&args.dir)?;
    let flags = if args.lazy { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    let by_us = rustix::mount::unmount(dir, flags | UnmountFlags::NOFOLLOW);
    let busy = || format!("{} is in use: `fuser -vm {0}` lists the processes; end them, or use --lazy", dir.display());
    match by_us {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(Errno::BUSY) => bail!(busy()),
        Err(Errno::PERM) => {
            let mut helper = Command::new("fusermount3");
            helper.arg("-u").args(args.lazy.then_some("-z")).arg("--").arg(dir);
            let said = helper.output().context("cannot run fusermount3; `make setup` installs it (package fuse3)")?;
            let text = String::from_utf8_lossy(&said.stderr).trim().to_string();
            match said.status.success() {
                true => Ok(ExitCode::SUCCESS),
                false if text.contains("busy") => bail!(busy()),
                false => bail!("cannot unmount {}: {text}", dir.display()),
            }
        }
        Err(error) => bail!("cannot unmount {}: {error}", dir.display()),
    }
}
