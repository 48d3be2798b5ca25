//! Tells the advice manager of reads that the kernel saw, in the way in which a program with the library would.
//!
//! The files are found by the hints: single files by their path, those of directories and patterns by looking into
//! the directories, now and every few seconds. They are opened by us, for reading; hints that act on a program's own
//! open file (Sequential, Random, Normal) do not reach programs that are only watched.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::lock::Mutex;
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
use crate::config::{Hints, MountPoints, Named, Paths, Questions};
use crate::manager::is_removed;

/// Files that are watched at most.
pub const FILES_MAX: usize = 4096;
/// How often directories are looked into anew: at first, and, where nothing changes, at most. Each look asks the metadata
/// servers for all of them.
const SEARCH_EVERY: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(320));
/// How long the first search is waited for.
const SEARCH_PATIENCE: Duration = Duration::from_secs(5);
/// How long one place may take before it is told of.
const PLACE_PATIENCE: Duration = Duration::from_secs(30);
/// Threads that search at the same time, and those of all searches of this process: where file systems hang, some are left behind.
const THREADS: usize = 16;
const THREADS_MAX: usize = 64;
/// As long as so many places in a folder do not answer, nothing more is looked for there: each search would lose all its threads to a
/// folder with many files that hangs. Fewer may be mounts of their own, side by side.
const SILENT_IN_FOLDER_MAX: usize = 4;
/// Nor as long as so many do not answer on a mount, in whatever folders; and one, once half of all threads are lost.
const SILENT_ON_MOUNT_MAX: (usize, usize) = (8, 1);
/// Places that answered when they were looked into last may have so many threads more: what hangs leaves them their turn.
const THREADS_FOR_KNOWN: usize = THREADS;
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

/// A place that a thread of this process looks into, be it of a follower that is gone: it is not looked into by another one.
struct Searched {
    place: Weak<PathBuf>,
    began: Instant,
    is_told: bool,
}

static SEARCHED: Mutex<Vec<Searched>> = Mutex::new(Vec::new());

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
    /// That nothing can be looked for, since so many places do not answer, was told of in the log.
    told_of_silence: bool,
    /// What searches find that run beside: places may be on a file system that hangs.
    searches: Vec<Receiver<Answer>>,
    /// The files that were there as a place was looked into last.
    places: BTreeMap<PathBuf, HashSet<FileId>>,
}

/// The files that are at a place; opened, unless they are known.
struct Answer {
    place: PathBuf,
    files: Vec<(FileId, Option<File>)>,
}

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
            told_of_silence: false,
            searches: Vec::new(),
            places: BTreeMap::new(),
        };
        follower.search();
        if !follower.take_found(SEARCH_PATIENCE)? {
            tracing::warn!(
                "looking for the files of the hints takes long; those that are not found yet are not watched"
            );
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
        self.take_found(Duration::ZERO)?;
        tell_of_slow_places();
        if self.searched.elapsed() > self.search_every {
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

    /// Begins to look for the files of the hints, in all places that no thread looks into already.
    fn search(&mut self) {
        self.searched = Instant::now();
        self.search_every = search_again_in(self.search_every, false);
        self.ours.clear();
        if let Source::PreAccess(listener) = &self.source
            && listener.was_disturbed()
        {
            self.files.values().for_each(|(_, open)| _ = self.mark(open));
        }
        let asked: Vec<Arc<PathBuf>> = SEARCHED.lock().iter().filter_map(|one| one.place.upgrade()).collect();
        let mounts = MountPoints::now();
        let has_answered = |place: &Path| self.places.contains_key(place);
        let (left, threads) = free_places(self.named.places(), &asked, |place| mounts.of(place), has_answered);
        let is_asked = |place: &&Path| asked.iter().any(|asked| asked.as_path() == *place);
        let unasked = self.named.places().filter(|place| !is_asked(place)).count().saturating_sub(left.len());
        if unasked > 0 && !std::mem::replace(&mut self.told_of_silence, true) {
            let silent = asked.len();
            tracing::warn!(
                silent,
                unasked,
                "places of the hints do not answer, and others, beside them or behind them, are not looked into; until some do no new files are \
                 watched there"
            );
        }
        let questions = Questions::new(left, &asked, &mounts);
        let questions = Arc::new(Mutex::new(questions));
        let known = Arc::new(self.files.keys().copied().collect::<HashSet<FileId>>());
        let room = Arc::new(AtomicUsize::new(FILES_MAX.saturating_sub(known.len())));
        let (tell, found) = mpsc::channel();
        for _ in 0..threads {
            let (named, questions, tell) = (self.named.clone(), questions.clone(), tell.clone());
            let (known, room) = (known.clone(), room.clone());
            let look = move || {
                // A file that vanished meanwhile, or that we may not read, is simply not watched.
                let open = |(number, path): (FileId, PathBuf)| {
                    let take = |room: usize| room.checked_sub(1);
                    let is_new = !known.contains(&number)
                        && room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
                    (number, is_new.then(|| open_found(&path, number)).flatten())
                };
                while let Some(place) = next_place(&questions) {
                    let files = named.files(&place, FILES_MAX).map(open).collect();
                    if tell.send(Answer { place: place.to_path_buf(), files }).is_err() {
                        return;
                    }
                }
            };
            if let Err(error) = std::thread::Builder::new().name("assist-search".into()).spawn(look) {
                tracing::warn!(%error, "no thread can look for the files of the hints");
            }
        }
        self.searches.push(found);
    }

    /// Takes what searches have found, waiting so long for them to end; whether they did.
    fn take_found(&mut self, patience: Duration) -> io::Result<bool> {
        let end = Instant::now() + patience;
        let mut answers = Vec::new();
        self.searches.retain(|search| {
            loop {
                match search.recv_timeout(end.saturating_duration_since(Instant::now())) {
                    Ok(answer) => answers.push(answer),
                    Err(RecvTimeoutError::Timeout) => return true,
                    Err(RecvTimeoutError::Disconnected) => return false,
                }
            }
        });
        self.merge(answers)?;
        Ok(self.searches.is_empty())
    }

    /// New files are told, those that are gone are let go. Of places that do not answer all is left as it was.
    fn merge(&mut self, answers: Vec<Answer>) -> io::Result<()> {
        let (mut changed, mut closed, mut told) = (false, Vec::new(), Ok(()));
        for Answer { place, files } in answers {
            let there: HashSet<FileId> = files.iter().map(|(number, _)| *number).collect();
            let before = self.places.get(&place);
            let gone: Vec<FileId> =
                before.map(|before| before.difference(&there).copied().collect()).unwrap_or_default();
            self.places.insert(place, there);
            for number in gone {
                if self.places.values().any(|there| there.contains(&number)) {
                    continue;
                }
                changed |= self.files.contains_key(&number);
                told = told.and(self.let_go(number, &mut closed));
            }
            for (number, open) in files {
                let Some(open) = open else { continue };
                // It may have been found in two places.
                let is_wanted = told.is_ok()
                    && self.files.len() < FILES_MAX
                    && !self.files.contains_key(&number)
                    && self.mark(&open);
                match is_wanted.then(|| self.manager.register(&open)) {
                    Some(Ok(file)) => {
                        self.files.insert(number, (file, open));
                        changed = true;
                        continue;
                    }
                    Some(Err(error)) => told = Err(error),
                    None => {}
                }
                closed.push(open);
            }
        }
        if !closed.is_empty() {
            close(closed);
        }
        told?;
        if !changed {
            return Ok(());
        }
        self.search_every = search_again_in(self.search_every, true);
        if let Source::Trace(trace) = &self.source {
            let mounts = mounts();
            let as_traced = |(number, (_, open)): (&FileId, &(u32, File))| (traced_as(open, *number, &mounts), *number);
            let numbers: Vec<(FileId, FileId)> = self.files.iter().map(as_traced).collect();
            self.traced = by_traced(&numbers);
            trace.watch(&numbers.iter().map(|(traced, _)| *traced).collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Lets files go that were removed, long before a search may miss them: as long as one is open, its space is not free.
    fn let_removed_go(&mut self) -> io::Result<()> {
        self.looked = Instant::now();
        let removed = self.files.iter().filter(|(_, (_, open))| is_removed(open.as_fd()));
        let removed: Vec<FileId> = removed.map(|(number, _)| *number).collect();
        let (mut closed, mut told) = (Vec::new(), Ok(()));
        for number in removed {
            told = told.and(self.let_go(number, &mut closed));
        }
        if !closed.is_empty() {
            close(closed);
        }
        told
    }

    fn let_go(&mut self, number: FileId, closed: &mut Vec<File>) -> io::Result<()> {
        let Some((file, open)) = self.files.remove(&number) else { return Ok(()) };
        self.forget(&open);
        closed.push(open);
        self.manager.send(ToManager::Unregister { file }, &[])
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
        let files: Vec<File> = self.files.drain().map(|(_, (_, open))| open).collect();
        // Files that were found and not taken are in there.
        close((files, std::mem::take(&mut self.searches)));
    }
}

/// Closes files beside: where a file system hangs, that waits for it.
fn close(files: impl Send + 'static) {
    if let Err(error) = std::thread::Builder::new().name("assist-close".into()).spawn(move || drop(files)) {
        tracing::warn!(%error, "no thread can close files");
    }
}

/// The places that can be looked into while others do not answer, and by how many threads.
fn free_places<'a>(
    places: impl Iterator<Item = &'a Path>,
    asked: &[Arc<PathBuf>],
    mount_of: impl Fn(&Path) -> usize,
    has_answered: impl Fn(&Path) -> bool,
) -> (Vec<PathBuf>, usize) {
    let on_mount_max = if asked.len() < THREADS_MAX / 2 { SILENT_ON_MOUNT_MAX.0 } else { SILENT_ON_MOUNT_MAX.1 };
    let is_full = asked.len() >= THREADS_MAX;
    let threads_max = THREADS_MAX + if is_full { THREADS_FOR_KNOWN } else { 0 };
    let on_mounts: Vec<usize> = asked.iter().map(|asked| mount_of(asked)).collect();
    let is_free = |place: &&Path| {
        let in_folder = asked.iter().filter(|asked| asked.parent() == place.parent()).count();
        let (mount, is_asked) = (mount_of(place), asked.iter().any(|asked| asked.as_path() == *place));
        let on_mount = on_mounts.iter().filter(|other| **other == mount).count();
        let has_turn = !is_full || has_answered(place);
        !is_asked && has_turn && in_folder < SILENT_IN_FOLDER_MAX && on_mount < on_mount_max
    };
    let threads = THREADS.min(threads_max.saturating_sub(asked.len()));
    let free: Vec<PathBuf> =
        if threads > 0 { places.filter(is_free).map(Path::to_path_buf).collect() } else { Vec::new() };
    let threads = threads.min(free.len());
    (free, threads)
}

/// The next place to look into, which no other thread looks into as long as it is kept.
fn next_place(questions: &Mutex<Questions>) -> Option<Arc<PathBuf>> {
    loop {
        let place = questions.lock().next()?;
        let mut searched = SEARCHED.lock();
        searched.retain(|one| one.place.strong_count() > 0);
        if !searched.iter().any(|one| one.place.upgrade().is_some_and(|other| other == place)) {
            searched.push(Searched { place: Arc::downgrade(&place), began: Instant::now(), is_told: false });
            return Some(place);
        }
    }
}

/// Once each.
fn tell_of_slow_places() {
    for one in SEARCHED.lock().iter_mut().filter(|one| !one.is_told && one.began.elapsed() > PLACE_PATIENCE) {
        if let Some(place) = one.place.upgrade() {
            one.is_told = true;
            tracing::warn!(place = %place.display(), "looking for files takes long here; until it ends no new ones are watched");
        }
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

    /// However many folders of a mount hang, other mounts are looked into.
    #[test]
    fn what_hangs_on_a_mount_leaves_the_others_their_turn() {
        let place = |n: usize| PathBuf::from(format!("/{}/{n}/files", n % 10));
        let places: Vec<PathBuf> = (0..200).map(place).collect();
        let mount_of = |path: &Path| path.components().nth(1).unwrap().as_os_str().to_str().unwrap().parse().unwrap();
        let free =
            |asked: &[Arc<PathBuf>]| free_places(places.iter().map(PathBuf::as_path), asked, mount_of, |_| false).0;
        assert_eq!(free(&[]).len(), 200);
        let mut asked: Vec<Arc<PathBuf>> = (0..7).map(|n| Arc::new(place(10 * n + 3))).collect();
        assert_eq!(free(&asked).len(), 193, "of a mount so many may be silent");
        asked.push(Arc::new(place(73)));
        let left = free(&asked);
        assert_eq!(left.len(), 180);
        assert!(left.iter().all(|place| mount_of(place) != 3));
    }

    /// Nor do 64 and more mounts that hang, each of which holds a thread: what has answered before is looked into on.
    #[test]
    fn however_many_mounts_hang_what_answered_before_is_looked_into() {
        let place = |n: usize| PathBuf::from(format!("/{n}/files"));
        let places: Vec<PathBuf> = (0..200).map(place).collect();
        let mount_of = |path: &Path| path.components().nth(1).unwrap().as_os_str().to_str().unwrap().parse().unwrap();
        let free = |hung: usize| {
            let asked: Vec<_> = (0..hung).map(|n| Arc::new(place(n))).collect();
            let has_answered = |path: &Path| mount_of(path) >= 150;
            free_places(places.iter().map(PathBuf::as_path), &asked, mount_of, has_answered)
        };
        assert_eq!(free(0), (places.clone(), THREADS));
        assert_eq!(free(60).1, THREADS_MAX - 60);
        assert_eq!(free(THREADS_MAX), (places[150..].to_vec(), THREADS));
        assert_eq!(free(THREADS_MAX + THREADS_FOR_KNOWN - 1), (places[150..].to_vec(), 1));
        assert_eq!(free(THREADS_MAX + THREADS_FOR_KNOWN), (Vec::new(), 0), "that is the bound");
        // Eight mounts that hang lose half of the threads and no more, whatever is in them.
        let deep = |n: usize| PathBuf::from(format!("/{}/{n}/files", n % 8));
        let asked: Vec<_> = (0..THREADS_MAX / 2).map(|n| Arc::new(deep(n))).collect();
        let more: Vec<PathBuf> = (0..80).map(|n| deep(1000 + n)).chain([place(8)]).collect();
        let left = free_places(more.iter().map(PathBuf::as_path), &asked, mount_of, |_| false).0;
        assert_eq!(left, [place(8)]);
    }

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
