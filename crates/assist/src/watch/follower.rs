//! Tells the advice manager of reads that the kernel saw, in the way in which a program with the library would.
//!
//! The files are found by the hints: single files by their path, those of directories and patterns by looking into
//! the directories, now and every few seconds. They are opened by us, for reading; hints that act on a program's own
//! open file (Sequential, Random, Normal) do not reach programs that are only watched.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use impresario_base::machine::path_of;
use impresario_base::mounts::{Mount, mount_of, mounts};
use impresario_ring::message::{Packet, ToManager, register};
use impresario_ring::{Access, Op, Producer, Push, SLOTS};
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::IoSlice;
use rustix::net::sockopt::Timeout;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::fanotify::Fanotify;
use super::line::Seen;
use super::tracefs::Tracefs;
use crate::backend::FileId;
use crate::config::{Hints, Named, Paths};
use crate::manager::is_removed;

/// Files that are watched at most.
pub const FILES_MAX: usize = 4096;
/// How often directories are looked into anew: at first, and, where nothing changes, at most. Each look asks the metadata
/// servers for all of them.
const SEARCH_EVERY: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(320));
/// Searches of this process at a time, those of earlier followers included: on a file system that hangs they do not end.
const SEARCHES_MAX: u32 = 4;
static SEARCHES: AtomicU32 = AtomicU32::new(0);
/// How long the first search is waited for.
const SEARCH_PATIENCE: Duration = Duration::from_secs(5);
/// How long the manager may take to take a message.
const SEND_PATIENCE: Duration = Duration::from_secs(2);
/// Reads that are told in one go.
const EVENTS_MAX: usize = 4096;

/// How the kernel tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Means {
    /// By its trace: no program waits.
    Trace,
    /// Before each access, which waits some microseconds for it.
    PreAccess,
}

enum Source {
    Trace(Tracefs),
    PreAccess(Fanotify),
}

/// Watches the files of some hints for the manager at a socket.
pub struct Follower {
    named: Arc<Named>,
    source: Source,
    manager: Client,
    files: HashMap<FileId, (u32, File)>,
    /// By the device that the kernel's trace names, where that is another one; `None` where it means several files.
    traced: HashMap<FileId, Option<FileId>>,
    /// Threads that read lately, and whether they are ours: what the manager itself reads is no news.
    ours: HashMap<u32, bool>,
    /// When the last search began.
    searched: Instant,
    search_every: Duration,
    /// When it was last looked which files were removed.
    looked: Instant,
    /// What a search finds that runs beside: folders may be on a file system that hangs.
    searching: Option<Receiver<Vec<Found>>>,
}

/// One of the searches that run.
struct Search(&'static AtomicU32);

impl Search {
    /// `None` where as many run as may.
    fn begin(running: &'static AtomicU32) -> Option<Search> {
        let one_more = |running| (running < SEARCHES_MAX).then_some(running + 1);
        running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).ok().map(|_| Search(running))
    }
}

impl Drop for Search {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A file that is there; opened, unless it is known.
type Found = (FileId, Option<File>);

impl Follower {
    /// Connects to the manager and begins to watch: not where nothing was answered about `paths`, and without the files as long
    /// as it takes very long to find them.
    pub fn new(hints: &Hints, paths: &Paths, means: Means, socket: &Path) -> io::Result<Follower> {
        let source = match means {
            Means::Trace => Source::Trace(Tracefs::new(&[])?),
            Means::PreAccess => Source::PreAccess(Fanotify::new()?),
        };
        let mut follower = Follower {
            named: Arc::new(Named::new(hints, paths)),
            source,
            manager: Client::connect(socket)?,
            files: HashMap::new(),
            traced: HashMap::new(),
            ours: HashMap::new(),
            searched: Instant::now(),
            search_every: SEARCH_EVERY.0,
            looked: Instant::now(),
            searching: None,
        };
        follower.search();
        if !follower.take_found(SEARCH_PATIENCE)? {
            tracing::warn!("looking for the files of the hints takes long; until they are found none is watched");
        }
        Ok(follower)
    }

    /// Number of files that are watched now.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Watches until `stop`, or until the manager has gone or the kernel's interface fails.
    pub fn run(&mut self, stop: &Arc<AtomicBool>) -> io::Result<()> {
        while !stop.load(Ordering::Relaxed) {
            self.turn(Duration::from_millis(100))?;
        }
        Ok(())
    }

    /// Waits for reads, at most so long, and tells the manager of them.
    pub fn turn(&mut self, patience: Duration) -> io::Result<()> {
        if self.searching.is_some() {
            self.take_found(Duration::ZERO)?;
        } else if self.searched.elapsed() > self.search_every {
            self.search();
        }
        if self.looked.elapsed() > SEARCH_EVERY.0 {
            self.let_removed_go()?;
        }
        let (manager, files, traced, ours) = (&self.manager, &self.files, &self.traced, &mut self.ours);
        let mut wake = false;
        let mut tell = |seen: Seen| {
            let of_us = || Path::new("/proc/self/task").join(seen.thread.to_string()).exists();
            if *ours.entry(seen.thread).or_insert_with(of_us) {
                return;
            }
            let number = FileId { dev: libc::makedev(seen.device.0, seen.device.1), ino: seen.inode };
            let number = traced.get(&number).copied().unwrap_or(Some(number));
            if let Some((file, _)) = number.and_then(|number| files.get(&number)) {
                wake |= manager.tell(*file, &seen);
            }
        };
        match &mut self.source {
            Source::Trace(trace) => {
                wait(trace.as_fd(), patience)?;
                trace.drain(EVENTS_MAX, &mut tell)?;
            }
            Source::PreAccess(listener) => {
                if listener.drain(EVENTS_MAX, &mut tell) == 0 {
                    std::thread::sleep(patience.min(Duration::from_millis(1)));
                }
            }
        }
        if wake {
            self.manager.wake()?;
        }
        self.manager.alive()
    }

    /// Begins to look for the files of the hints.
    fn search(&mut self) {
        self.searched = Instant::now();
        self.ours.clear();
        if let Source::PreAccess(listener) = &self.source
            && listener.was_disturbed()
        {
            self.files.values().for_each(|(_, open)| _ = self.mark(open));
        }
        let Some(search) = Search::begin(&SEARCHES) else {
            tracing::warn!("the files of the hints are not looked for: earlier searches wait for a file system");
            return;
        };
        let (named, known) = (self.named.clone(), self.files.keys().copied().collect::<HashSet<FileId>>());
        let (tell, found) = mpsc::channel();
        let look = move || {
            let _search = search;
            // A file that vanished meanwhile, or that we may not read, is simply not watched.
            let open = |(number, path): (FileId, PathBuf)| {
                let new = !known.contains(&number);
                (number, new.then(|| open_found(&path, number)).flatten())
            };
            let _ = tell.send(named.files(FILES_MAX).map(open).collect());
        };
        match std::thread::Builder::new().name("assist-search".into()).spawn(look) {
            Ok(_) => self.searching = Some(found),
            Err(error) => tracing::warn!(%error, "no thread can look for the files of the hints"),
        }
    }

    /// Takes what a search has found, if it ends within this time: new files are told, those that are gone are let go.
    fn take_found(&mut self, patience: Duration) -> io::Result<bool> {
        let Some(searching) = &self.searching else { return Ok(false) };
        let found = match searching.recv_timeout(patience) {
            Err(RecvTimeoutError::Timeout) => return Ok(false),
            found => found,
        };
        self.searching = None;
        // The thread has failed: what was known stays.
        let Ok(found) = found else { return Ok(false) };
        let there: HashSet<FileId> = found.iter().map(|(number, _)| *number).collect();
        let gone: Vec<FileId> = self.files.keys().filter(|number| !there.contains(number)).copied().collect();
        let mut changed = !gone.is_empty();
        self.let_go(gone)?;
        for (number, open) in found {
            let Some(open) = open.filter(|open| self.mark(open)) else { continue };
            let file = self.manager.register(&open)?;
            self.files.insert(number, (file, open));
            changed = true;
        }
        self.search_every = search_again_in(self.search_every, changed);
        if let (true, Source::Trace(trace)) = (changed, &self.source) {
            let mounts = mounts();
            let as_traced = |(number, (_, open)): (&FileId, &(u32, File))| (traced_as(open, *number, &mounts), *number);
            let numbers: Vec<(FileId, FileId)> = self.files.iter().map(as_traced).collect();
            self.traced = by_traced(&numbers);
            trace.watch(&numbers.iter().map(|(traced, _)| *traced).collect::<Vec<_>>())?;
        }
        Ok(true)
    }

    /// Lets files go that were removed, long before a search may miss them: as long as one is open, its space is not free.
    fn let_removed_go(&mut self) -> io::Result<()> {
        self.looked = Instant::now();
        let removed = self.files.iter().filter(|(_, (_, open))| is_removed(open.as_fd()));
        let removed = removed.map(|(number, _)| *number).collect();
        self.let_go(removed)
    }

    fn let_go(&mut self, files: Vec<FileId>) -> io::Result<()> {
        let mut closed = Vec::new();
        for number in files {
            if let Some((file, open)) = self.files.remove(&number) {
                self.forget(&open);
                closed.push(open);
                self.manager.send(ToManager::Unregister { file }, &[])?;
            }
        }
        close(closed);
        Ok(())
    }

    fn mark(&self, open: &File) -> bool {
        match &self.source {
            Source::Trace(_) => true,
            Source::PreAccess(listener) => match listener.add(open) {
                Ok(()) => true,
                Err(error) => {
                    tracing::warn!(%error, "a file cannot be watched before its accesses");
                    false
                }
            },
        }
    }

    fn forget(&self, open: &File) {
        if let Source::PreAccess(listener) = &self.source {
            let _ = listener.remove(open); // its file may be gone, and the mark with it
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        close(self.files.drain().map(|(_, (_, open))| open).collect());
    }
}

/// Closes files beside: where a file system hangs, that waits for it.
fn close(files: Vec<File>) {
    if !files.is_empty()
        && let Err(error) = std::thread::Builder::new().name("assist-close".into()).spawn(move || drop(files))
    {
        tracing::warn!(%error, "no thread can close files");
    }
}

fn search_again_in(every: Duration, changed: bool) -> Duration {
    if changed { SEARCH_EVERY.0 } else { (every * 2).min(SEARCH_EVERY.1) }
}

/// A file as the kernel's trace names it: by the device of its file system, as the mount has it. On btrfs `stat` gives
/// each subvolume a device of its own.
fn traced_as(open: &File, number: FileId, mounts: &[Mount]) -> FileId {
    match mount_of(open, mounts) {
        Some(Mount { device: (major, minor), .. }) => FileId { dev: libc::makedev(*major, *minor), ..number },
        None => number,
    }
}

/// Which file is meant by what the trace names. Files of two subvolumes may have one inode number: of those nothing is told.
fn by_traced(numbers: &[(FileId, FileId)]) -> HashMap<FileId, Option<FileId>> {
    let mut files: HashMap<FileId, Option<FileId>> = HashMap::new();
    for (traced, number) in numbers {
        files.entry(*traced).and_modify(|file| *file = None).or_insert(Some(*number));
    }
    files
}

/// Opens a file that was found a moment ago. Its user may have put something else in its place: what is no regular file, or
/// another one, is not opened at all, so that no pipe is waited for and no device does anything.
fn open_found(path: &Path, number: FileId) -> Option<File> {
    let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let name = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let about = rustix::fs::fstat(&name).ok()?;
    let regular = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile;
    if !regular || (about.st_dev, about.st_ino) != (number.dev, number.ino) {
        return None;
    }
    // Opened through the descriptor that is held, which cannot be swapped.
    let path = path_of(&name);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty()).ok().map(File::from)
}

fn wait(fd: BorrowedFd<'_>, patience: Duration) -> io::Result<()> {
    let patience =
        rustix::time::Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
    match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&patience)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

/// The connection to the manager.
struct Client {
    socket: OwnedFd,
    event: OwnedFd,
    ring: Producer,
    next: u32,
}

impl Client {
    fn connect(path: &Path) -> io::Result<Client> {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(SEND_PATIENCE))?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        let (ring, memory) = Producer::create(SLOTS)?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let client = Client { socket, event, ring, next: 0 };
        let hello = ToManager::Hello { pid: std::process::id(), ring_bytes: client.ring.ring_bytes() as u32 };
        client.send(hello, &[memory.as_fd(), client.event.as_fd()])?;
        Ok(client)
    }

    fn register(&mut self, open: &File) -> io::Result<u32> {
        let file = self.next;
        self.next += 1;
        self.send(ToManager::Register { file, flags: register::READ | register::FOUND }, &[open.as_fd()])?;
        Ok(file)
    }

    fn send(&self, message: ToManager, with: &[BorrowedFd<'_>]) -> io::Result<()> {
        let packet: Packet = message.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !with.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(with));
        }
        rustix::net::sendmsg(&self.socket, &[IoSlice::new(packet.as_bytes())], &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// Puts a read into the ring; true when the manager is to be woken.
    fn tell(&self, file: u32, seen: &Seen) -> bool {
        let access = Access {
            file,
            op: if seen.mapped { Op::Mmap } else { Op::Read },
            flags: 0,
            thread: seen.thread as u16,
            offset: seen.offset,
            len_bytes: u32::try_from(seen.len).unwrap_or(u32::MAX),
            duration_ns: 0,
            start_ns: impresario_ring::now_ns(),
        };
        matches!(self.ring.push(access), Push::Wake)
    }

    fn wake(&self) -> io::Result<()> {
        match rustix::io::write(&self.event, &1u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    fn alive(&self) -> io::Result<()> {
        if self.ring.is_closed() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the manager takes nothing more"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn where_nothing_changes_metadata_servers_are_asked_less_and_less() {
        let mut every = SEARCH_EVERY.0;
        let looks = std::iter::from_fn(|| {
            every = search_again_in(every, false);
            Some(every)
        });
        let hour = Duration::from_secs(3600);
        let looks = looks
            .scan(Duration::ZERO, |at, every| Some(std::mem::replace(at, *at + every)))
            .take_while(|at| *at < hour);
        assert!(looks.count() <= 20, "every 5 s that would be 720");
        assert_eq!(search_again_in(SEARCH_EVERY.1, false), SEARCH_EVERY.1);
        assert_eq!(search_again_in(SEARCH_EVERY.1, true), SEARCH_EVERY.0);
    }

    /// Each time the hints are read again there is a new follower, whose search may hang as the one before.
    #[test]
    fn searches_that_hang_do_not_add_up() {
        static RUNNING: AtomicU32 = AtomicU32::new(0);
        let mut hung: Vec<Search> = std::iter::from_fn(|| Search::begin(&RUNNING)).take(100).collect();
        assert_eq!(hung.len(), 4);
        hung.pop();
        assert!(Search::begin(&RUNNING).is_some_and(|_last| Search::begin(&RUNNING).is_none()));
        drop(hung);
        assert_eq!(RUNNING.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_trace_names_files_by_the_device_of_their_mount() {
        // As btrfs has it: the mount says 0:37, `stat` of a file in a subvolume 0:52.
        let number = |minor: u32, ino: u64| FileId { dev: libc::makedev(0, minor), ino };
        let known = by_traced(&[
            (number(37, 9), number(52, 9)),
            (number(37, 8), number(52, 8)),
            (number(37, 8), number(53, 8)),
        ]);
        assert_eq!((known[&number(37, 9)], known[&number(37, 8)]), (Some(number(52, 9)), None));
        // A mount that is not listed, and the file's own.
        let file = tempfile::tempfile().unwrap();
        let meta = file.metadata().unwrap();
        let number = FileId { dev: meta.dev(), ino: meta.ino() };
        assert_eq!(traced_as(&file, number, &[]), number);
        let mut mounts = mounts();
        mounts.iter_mut().for_each(|mount| mount.device = (0, 37));
        assert_eq!(traced_as(&file, number, &mounts), FileId { dev: libc::makedev(0, 37), ..number });
    }

    #[test]
    fn what_was_put_in_a_files_place_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("f"), "found").unwrap();
        let meta = std::fs::metadata(at("f")).unwrap();
        let number = FileId { dev: meta.dev(), ino: meta.ino() };
        let open = open_found(&at("f"), number).unwrap();
        assert_eq!(std::io::read_to_string(open).unwrap(), "found");
        std::fs::rename(at("f"), at("away")).unwrap();
        std::os::unix::fs::symlink(at("away"), at("f")).unwrap();
        assert!(open_found(&at("f"), number).is_none(), "a link");
        std::fs::remove_file(at("f")).unwrap();
        // Opening a pipe to read would wait for a writer.
        rustix::fs::mknodat(rustix::fs::CWD, at("f"), FileType::Fifo, Mode::RUSR, 0).unwrap();
        let pipe = std::fs::metadata(at("f")).unwrap();
        for number in [number, FileId { dev: pipe.dev(), ino: pipe.ino() }] {
            assert!(open_found(&at("f"), number).is_none(), "a pipe");
        }
        std::fs::remove_file(at("f")).unwrap();
        std::fs::write(at("f"), "another").unwrap();
        assert!(open_found(&at("f"), number).is_none(), "another file");
    }
}
