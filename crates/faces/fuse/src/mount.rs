//! Mounting and unmounting.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use fuser::{Config, Filesystem, Notifier, Session, SessionACL};
use impresario_base::lock::{Condvar, Mutex};
use impresario_base::mounts::{Mount, mounts};
use impresario_client::{Client, ClientError};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::face::Face;
use crate::handles::Handles;
use crate::locks::LockService;
use crate::{MountOptions, device, mountpoint};

/// A mount that is in use by no process that can be named is tried again for so long.
const LET_GO_WITHIN: Duration = Duration::from_secs(1);
/// After the kernel ends a mount, its threads end at once; this only bounds the wait for them.
const THREADS_END_WITHIN: Duration = Duration::from_secs(10);

/// Why a mount or an unmount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// FUSE is not available on this machine.
    #[error(
        "/dev/fuse cannot be used ({source}); load it with `modprobe fuse`, install the package fuse3, and in a container pass --device /dev/fuse and CAP_SYS_ADMIN"
    )]
    NoFuse {
        /// The error from opening it.
        source: io::Error,
    },
    /// The mount point cannot be used.
    #[error("cannot mount on {}: {source}; give an existing directory", path.display())]
    MountPoint {
        /// The mount point.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// A mount whose server is gone is still there.
    #[error("cannot mount on {at}: a mount whose process has ended is still there; remove it with `fusermount3 -u {at}` or `umount -l {at}`", at = path.display())]
    Stale {
        /// The mount point.
        path: PathBuf,
    },
    /// The cluster is already mounted there.
    #[error("cannot mount on {at}: an Impresario file system is mounted there already; unmount it with `fusermount3 -u {at}`", at = path.display())]
    Already {
        /// The mount point.
        path: PathBuf,
    },
    /// The cluster does not answer.
    #[error("cannot mount on {}: the root of the file system cannot be read: {source}", path.display())]
    Cluster {
        /// The mount point.
        path: PathBuf,
        /// The client's error.
        source: ClientError,
    },
    /// The kernel refused.
    #[error("cannot mount on {}: {source}; mounting needs root or the set-user-id program fusermount3, and allow_other without root needs user_allow_other in /etc/fuse.conf", path.display())]
    Refused {
        /// The mount point.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// Files on the mount are in use.
    #[error("cannot unmount {}: it is in use{}; end the programs that use it and try again", path.display(), by(holders))]
    Busy {
        /// The mount point.
        path: PathBuf,
        /// Some of the processes that use it, as `pid (name)`.
        holders: Vec<String>,
    },
    /// Unmounting failed for another reason.
    #[error("cannot unmount {}: {source}", path.display())]
    Unmount {
        /// The mount point.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The mount ended by itself with an error.
    #[error("the mount on {} ended: {reason}", path.display())]
    Ended {
        /// The mount point.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}

fn by(holders: &[String]) -> String {
    if holders.is_empty() { String::new() } else { format!(" by process {}", holders.join(", ")) }
}

/// A mounted file system. Dropping it unmounts.
#[derive(Debug)]
pub struct Mounted {
    path: PathBuf,
    /// Its device number, which identifies our mount among others as long as there is one.
    device: Option<(u32, u32)>,
    connection: Arc<Connection>,
    ended: Arc<Ended>,
}

/// Whether the kernel still has our file system mounted.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    /// A second descriptor of the connection, as long as there are threads that serve it: the kernel ends it with the last one.
    fuse: Mutex<Option<OwnedFd>>,
}

impl Connection {
    /// It is neither unmounted nor cut: its device number can be no other's.
    pub(crate) fn is_alive(&self) -> bool {
        self.fuse.lock().as_ref().is_some_and(|fuse| {
            let mut polled = [PollFd::new(fuse, PollFlags::empty())];
            let answer = rustix::event::poll(&mut polled, Some(&rustix::event::Timespec::default()));
            answer.is_ok() && !polled[0].revents().intersects(PollFlags::ERR | PollFlags::HUP)
        })
    }
}

#[derive(Debug, Default)]
struct Ended {
    outcome: Mutex<Option<Result<(), String>>>,
    changed: Condvar,
}

impl Ended {
    fn set(&self, outcome: Result<(), String>) {
        *self.outcome.lock() = Some(outcome);
        self.changed.notify_all();
    }
}

/// Mounts the cluster that `client` reaches on the directory `mountpoint` and serves it from its own threads until it
/// is unmounted.
pub fn mount(client: Arc<Client>, mountpoint: &Path, options: MountOptions) -> Result<Mounted, MountError> {
    let path = mountable(mountpoint)?;
    client.stat(b"").map_err(|source| MountError::Cluster { path: path.clone(), source })?;
    let unserved = |source| MountError::Cluster { path: path.clone(), source };
    let notifier: Arc<OnceLock<Notifier>> = Arc::default();
    let connection: Arc<Connection> = Arc::default();
    let files = Arc::new(Handles::new());
    let locks = match options.shared_locks && client.serves_locks().map_err(unserved)? {
        true => {
            let started = LockService::start(&client, &files, notifier.clone());
            Some(started.map_err(|source| MountError::Refused { path: path.clone(), source })?)
        }
        false => None,
    };
    let face = Face::new(client, options.clone(), files, locks, notifier.clone(), connection.clone());
    mount_at(face, path, options, notifier, connection)
}

/// Mounts any file system and serves it like a cluster: with the same threads, permissions checked by the kernel, and
/// [`Mounted`] to end it.
pub fn mount_file_system(
    file_system: impl Filesystem,
    mountpoint: &Path,
    options: MountOptions,
) -> Result<Mounted, MountError> {
    mount_at(file_system, mountable(mountpoint)?, options, Arc::default(), Arc::default())
}

fn mount_at(
    file_system: impl Filesystem,
    path: PathBuf,
    options: MountOptions,
    notifier: Arc<OnceLock<Notifier>>,
    connection: Arc<Connection>,
) -> Result<Mounted, MountError> {
    let refused = |source| MountError::Refused { path: path.clone(), source };
    let fuse = device::mount(&path, &options).map_err(refused)?;
    let device = mountpoint::mounted_at(&path).map(|line| line.device);
    *connection.fuse.lock() = Some(fuse.try_clone().map_err(refused)?);
    let mounted = Mounted { path: path.clone(), device, connection, ended: Arc::default() };
    serve(file_system, options, fuse, &mounted, notifier).map_err(|source| {
        mounted.connection.fuse.lock().take();
        mounted.ended.set(Err(source.to_string()));
        refused(source)
    })?;
    Ok(mounted)
}

/// Starts the threads that answer the kernel; they end when it is unmounted.
fn serve(
    file_system: impl Filesystem,
    options: MountOptions,
    fuse: OwnedFd,
    mounted: &Mounted,
    notifier: Arc<OnceLock<Notifier>>,
) -> io::Result<()> {
    let (path, connection, ending) = (&mounted.path, mounted.connection.clone(), mounted.ended.clone());
    let read_ahead_bytes = options.read_ahead_bytes;
    let mut config = Config::default();
    config.n_threads = Some(options.thread_count());
    config.clone_fd = true;
    let acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    let session = Session::from_fd(file_system, fuse, acl, config)?;
    let _ = notifier.set(session.notifier());
    if let Err(error) = mountpoint::set_read_ahead(path, read_ahead_bytes) {
        tracing::info!(mount = %path.display(), %error, "read-ahead stays at the kernel's default; a larger value needs root");
    }
    std::thread::Builder::new().name("fuse".to_owned()).spawn(move || {
        let outcome = session.run().map_err(|error| error.to_string());
        connection.fuse.lock().take();
        ending.set(outcome);
    })?;
    Ok(())
}

/// The mount point, if FUSE is available and it can be mounted on.
fn mountable(mountpoint: &Path) -> Result<PathBuf, MountError> {
    let path = usable(mountpoint)?;
    drop(device::open().map_err(|source| MountError::NoFuse { source })?);
    Ok(path)
}

/// The mount point with symbolic links resolved, if it can be mounted on.
fn usable(mountpoint: &Path) -> Result<PathBuf, MountError> {
    let wrong = |source| MountError::MountPoint { path: mountpoint.to_owned(), source };
    let stale = |error: &io::Error| error.raw_os_error() == Some(libc::ENOTCONN);
    let metadata = match std::fs::metadata(mountpoint) {
        Err(error) if stale(&error) => return Err(MountError::Stale { path: mountpoint.to_owned() }),
        other => other.map_err(wrong)?,
    };
    if !metadata.is_dir() {
        return Err(wrong(io::Error::from(io::ErrorKind::NotADirectory)));
    }
    let path = mountpoint.canonicalize().map_err(wrong)?;
    match mountpoint::mounted_at(&path) {
        Some(line) if line.kind == format!("fuse.{}", device::SUBTYPE) => Err(MountError::Already { path }),
        _ => Ok(path),
    }
}

impl Mounted {
    /// The mount point, with symbolic links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until it is unmounted: by [`Mounted::unmount`] from another thread, `umount` or `fusermount3 -u`.
    pub fn wait(&self) -> Result<(), MountError> {
        let mut outcome = self.ended.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return self.outcome(outcome);
            }
            outcome = self.ended.changed.wait(outcome);
        }
    }

    /// Like [`Mounted::wait`], but for at most `timeout`; `None`: still mounted.
    pub fn wait_for(&self, timeout: Duration) -> Option<Result<(), MountError>> {
        let deadline = Instant::now() + timeout;
        let mut outcome = self.ended.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return Some(self.outcome(outcome));
            }
            let left = deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            outcome = self.ended.changed.wait_timeout(outcome, left).0;
        }
    }

    fn outcome(&self, outcome: &Result<(), String>) -> Result<(), MountError> {
        outcome.clone().map_err(|reason| MountError::Ended { path: self.path.clone(), reason })
    }

    /// Unmounts. After [`MountError::Busy`] it stays mounted and usable; try again, or call [`Mounted::abort`].
    pub fn unmount(&self) -> Result<(), MountError> {
        let until = Instant::now() + LET_GO_WITHIN;
        loop {
            match self.unmount_now() {
                // A program that has ended, or is just being started by another one, may hold it for a moment.
                Err(MountError::Busy { holders, .. }) if holders.is_empty() && Instant::now() < until => {
                    std::thread::sleep(LET_GO_WITHIN / 20);
                }
                outcome => return outcome,
            }
        }
    }

    fn unmount_now(&self) -> Result<(), MountError> {
        let places = self.places();
        let outcomes = places.iter().map(|place| match rustix::mount::unmount(place, UnmountFlags::NOFOLLOW) {
            // Already unmounted by another process.
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
            Err(Errno::BUSY) => Err(busy(place)),
            Err(Errno::PERM) => unmount_by_helper(place, false),
            Err(error) => Err(MountError::Unmount { path: place.clone(), source: error.into() }),
        });
        // One place that is in use leaves the others mounted, too: it is one file system.
        outcomes.collect::<Result<(), _>>()?;
        if !places.is_empty() {
            self.wait_for(THREADS_END_WITHIN);
        }
        Ok(())
    }

    /// Unmounts even though files are open: their users get errors from then on.
    pub fn abort(&self) -> Result<(), MountError> {
        // FORCE ends the connection, so that no process waits for an answer any more; DETACH removes the name.
        const FLAGS: UnmountFlags = UnmountFlags::FORCE.union(UnmountFlags::DETACH).union(UnmountFlags::NOFOLLOW);
        let (mut is_ended, mut failed) = (false, Ok(()));
        for place in self.places() {
            let outcome = match rustix::mount::unmount(&place, FLAGS) {
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {
                    is_ended = true;
                    Ok(())
                }
                // The helper cannot end the connection: the threads end with the last user.
                Err(Errno::PERM) => unmount_by_helper(&place, true),
                Err(error) => Err(MountError::Unmount { path: place, source: error.into() }),
            };
            failed = failed.and(outcome);
        }
        if is_ended {
            self.wait_for(THREADS_END_WITHIN);
        }
        failed
    }

    /// Where our mount is, even if it is no longer served: where it was mounted, unless a folder above was renamed since, and where
    /// it was bound besides. Not where another file system is mounted over it.
    fn places(&self) -> Vec<PathBuf> {
        let mounts = mounts();
        // The number of a device that is gone is the next one's. What was cut is still where it was mounted.
        let is_alive = self.connection.is_alive();
        let is_ours = |mount: &Mount| {
            mount.kind == format!("fuse.{}", device::SUBTYPE)
                && Some(mount.device) == self.device
                && (is_alive || mount.point == self.path)
        };
        let is_seen = |mount: &Mount| mounts.iter().rfind(|other| other.point == mount.point) == Some(mount);
        mounts.iter().filter(|mount| is_ours(mount) && is_seen(mount)).map(|mount| mount.point.clone()).collect()
    }
}

fn busy(place: &Path) -> MountError {
    MountError::Busy { path: place.to_owned(), holders: mountpoint::holders(place) }
}

/// Without root, only the set-user-id helper may unmount.
fn unmount_by_helper(place: &Path, lazily: bool) -> Result<(), MountError> {
    let failed = |source| MountError::Unmount { path: place.to_owned(), source };
    let mut last = io::Error::from(io::ErrorKind::NotFound);
    for helper in ["fusermount3", "fusermount"] {
        let mut command = Command::new(helper);
        command.arg("-u").args(lazily.then_some("-z")).arg("--").arg(place);
        match command.output() {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                if said.contains("busy") {
                    return Err(busy(place));
                }
                return Err(failed(io::Error::other(said)));
            }
            Err(error) => last = error,
        }
    }
    Err(failed(last))
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let Err(error) = self.unmount() else { return };
        tracing::warn!(%error, "unmounting although it is in use");
        if let Err(error) = self.abort() {
            tracing::warn!(%error, "the mount could not be removed");
        }
    }
}
