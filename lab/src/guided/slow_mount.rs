//! A file system where each read request waits: the latency-bound mount of the measurements, over a folder.
//!
//! It stands for a distant or busy server: each read request takes [`Slowness::request`] before its first byte, at most
//! [`Slowness::outstanding`] requests are served at once, and all bytes share one line of [`Slowness::bytes_per_s`]. Names and
//! attributes cost nothing. It is read-only and shows the folder as it is.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry,
    ReplyOpen, Request,
};
use impresario_workload::programs::{Counts, TestBed};
use serde::{Deserialize, Serialize};

/// Nothing changes below, so the kernel may keep names and attributes as long as it is mounted.
const NAMES_HOLD: Duration = Duration::from_secs(3600);
/// Requests of the kernel that may wait here; it does not send more.
const WAITING_MAX: u16 = 256;
/// Largest read request, bytes.
const REQUEST_MAX_BYTES: u32 = 1 << 20;

/// What a read request costs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Slowness {
    /// From the request to its first byte.
    pub request: Duration,
    /// Requests served at once, at least 1.
    pub outstanding: usize,
    /// Bytes a second of all requests together, at least 1.
    pub bytes_per_s: u64,
}

impl Default for Slowness {
    /// 5 ms a request, 32 at once, 200 MB/s.
    fn default() -> Slowness {
        Slowness { request: Duration::from_millis(5), outstanding: 32, bytes_per_s: 200_000_000 }
    }
}

impl Slowness {
    /// The shortest time in which so many bytes can be read.
    pub fn shortest(&self, bytes: u64) -> Duration {
        self.request + self.transfer(bytes)
    }

    fn transfer(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(bytes as f64 / self.bytes_per_s.max(1) as f64)
    }
}

/// The line that all requests share: until when it is taken.
#[derive(Debug, Default)]
struct Line {
    taken_until: Mutex<Option<Instant>>,
}

impl Line {
    /// When the last of so many bytes has passed, of which the first is ready at `ready`.
    fn pass(&self, ready: Instant, takes: Duration) -> Instant {
        let mut taken_until = locked(&self.taken_until);
        let end = taken_until.map_or(ready, |until| until.max(ready)) + takes;
        *taken_until = Some(end);
        end
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Read requests and their bytes, of all mounts of one [`SlowMount`].
#[derive(Debug, Default)]
struct Counters {
    requests: AtomicU64,
    bytes: AtomicU64,
}

struct Job {
    file: Arc<File>,
    offset: u64,
    len: u32,
    came: Instant,
    reply: ReplyData,
}

/// Of the folders that it is mounted on.
const PREFIX: &str = "slow-mount-";

/// A folder seen through the slow file system; unmounted when dropped. What a killed process left mounted is unmounted by
/// the next one.
pub struct SlowMount {
    folder: PathBuf,
    at: tempfile::TempDir,
    slowness: Slowness,
    counters: Arc<Counters>,
    session: Mutex<Option<BackgroundSession>>,
}

impl SlowMount {
    /// Mounts `folder` on a new folder below `parent`.
    ///
    /// # Errors
    /// Mounting needs root and /dev/fuse.
    pub fn new(folder: &Path, parent: &Path, slowness: Slowness) -> Result<SlowMount> {
        unmount_left_behind(parent);
        let at = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
        let (folder, counters) = (folder.canonicalize()?, Arc::default());
        let mount = SlowMount { folder, at, slowness, counters, session: Mutex::new(None) };
        mount.remount()?;
        Ok(mount)
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        self.at.path()
    }

    /// Mounts it anew, so that nothing of it is cached.
    fn remount(&self) -> Result<()> {
        let mut session = locked(&self.session);
        if let Some(old) = session.take() {
            drop(old);
        }
        let tree = Tree::new(&self.folder, self.slowness, self.counters.clone())?;
        let mut config = Config::default();
        config.mount_options =
            vec![MountOption::FSName("impresario-slow".into()), MountOption::RO, MountOption::DefaultPermissions];
        config.n_threads = Some(1);
        let at = self.at.path();
        let mounted = fuser::spawn_mount(tree, at, &config);
        *session = Some(mounted.with_context(|| format!("mounting on {} (needs root and /dev/fuse)", at.display()))?);
        Ok(())
    }
}

/// Unmounts what processes that were killed left behind: nobody answers there any more.
fn unmount_left_behind(parent: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let dead = || fs::metadata(&path).is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN));
        if name.as_bytes().starts_with(PREFIX.as_bytes())
            && dead()
            && rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH).is_ok()
        {
            let _ = fs::remove_dir(&path);
        }
    }
}

impl TestBed for SlowMount {
    fn cool(&self) -> Result<()> {
        self.remount()
    }

    fn counts(&self) -> Result<Counts> {
        let Counters { requests, bytes } = &*self.counters;
        Ok(Counts { reads: requests.load(Relaxed), read_bytes: bytes.load(Relaxed), ..Counts::default() })
    }
}

impl Drop for SlowMount {
    fn drop(&mut self) {
        // Before the folder that it is mounted on.
        drop(locked(&self.session).take());
    }
}

/// Names are given numbers as they are looked up. They are never forgotten: a mount lasts for one run.
#[derive(Default)]
struct Names {
    paths: Vec<PathBuf>,
    numbers: HashMap<PathBuf, u64>,
}

impl Names {
    fn number(&mut self, path: &Path) -> u64 {
        if let Some(number) = self.numbers.get(path) {
            return *number;
        }
        self.paths.push(path.into());
        let number = self.paths.len() as u64;
        self.numbers.insert(path.into(), number);
        number
    }
}

struct Tree {
    names: Mutex<Names>,
    open: Mutex<(u64, HashMap<u64, Arc<File>>)>,
    jobs: mpsc::Sender<Job>,
}

impl Tree {
    /// The threads that serve it end when it is dropped.
    fn new(folder: &Path, slowness: Slowness, counters: Arc<Counters>) -> Result<Tree> {
        let mut names = Names::default();
        names.number(folder); // the root is number 1
        // Bounded by the kernel, which sends no more than WAITING_MAX requests beside one of each reading thread.
        let (jobs, waiting) = mpsc::channel::<Job>();
        let (waiting, line) = (Arc::new(Mutex::new(waiting)), Arc::new(Line::default()));
        for n in 0..slowness.outstanding.max(1) {
            let (waiting, line, counters) = (waiting.clone(), line.clone(), counters.clone());
            let work = move || {
                loop {
                    let job = locked(&waiting).recv();
                    let Ok(job) = job else { return };
                    serve(job, slowness, &line, &counters);
                }
            };
            thread::Builder::new().name(format!("slow-{n}")).spawn(work)?;
        }
        Ok(Tree { names: Mutex::new(names), open: Mutex::default(), jobs })
    }

    fn path(&self, number: INodeNo) -> Result<PathBuf, Errno> {
        let names = locked(&self.names);
        let index = usize::try_from(number.0).ok().and_then(|n| n.checked_sub(1));
        index.and_then(|i| names.paths.get(i)).cloned().ok_or(Errno::ENOENT)
    }

    fn attr(&self, path: &Path) -> Result<FileAttr, Errno> {
        let meta = fs::symlink_metadata(path).map_err(|e| errno(&e))?;
        let time = |s: i64| SystemTime::UNIX_EPOCH + Duration::from_secs(s.max(0).unsigned_abs());
        Ok(FileAttr {
            ino: INodeNo(locked(&self.names).number(path)),
            size: meta.len(),
            blocks: meta.blocks(),
            atime: time(meta.mtime()),
            mtime: time(meta.mtime()),
            ctime: time(meta.ctime()),
            crtime: time(meta.mtime()),
            kind: kind(meta.file_type()),
            perm: (meta.mode() & 0o7777) as u16,
            nlink: meta.nlink() as u32,
            uid: meta.uid(),
            gid: meta.gid(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

fn kind(of: fs::FileType) -> FileType {
    match (of.is_dir(), of.is_symlink()) {
        (true, _) => FileType::Directory,
        (_, true) => FileType::Symlink,
        _ => FileType::RegularFile,
    }
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_i32(error.raw_os_error().unwrap_or(libc::EIO))
}

/// One read request: waits its time, and answers.
fn serve(job: Job, slowness: Slowness, line: &Line, counters: &Counters) {
    // A request that waited for its turn waits for its first byte from then on.
    let begins = Instant::now();
    let mut buffer = vec![0; job.len as usize];
    let mut len = 0;
    while len < buffer.len() {
        match job.file.read_at(&mut buffer[len..], job.offset + len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return job.reply.error(errno(&e)),
        }
    }
    counters.requests.fetch_add(1, Relaxed);
    counters.bytes.fetch_add(len as u64, Relaxed);
    let waited = begins.saturating_duration_since(job.came);
    // A thread that woke late does not make the device slower.
    let since = if waited < Duration::from_millis(1) { job.came } else { begins };
    let end = line.pass(since + slowness.request, slowness.transfer(len as u64));
    thread::sleep(end.saturating_duration_since(Instant::now()));
    job.reply.data(&buffer[..len]);
}

impl Filesystem for Tree {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Both fail for 0 only.
        let _ = config.set_max_background(WAITING_MAX);
        let _ = config.set_congestion_threshold(WAITING_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.path(parent).and_then(|path| self.attr(&path.join(name))) {
            Ok(attr) => reply.entry(&NAMES_HOLD, &attr, Generation(0)),
            Err(errno) => reply.error(errno),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.path(ino).and_then(|path| self.attr(&path)) {
            Ok(attr) => reply.attr(&NAMES_HOLD, &attr),
            Err(errno) => reply.error(errno),
        }
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        match self.path(ino).and_then(|path| fs::read_link(path).map_err(|e| errno(&e))) {
            Ok(target) => reply.data(target.as_os_str().as_bytes()),
            Err(errno) => reply.error(errno),
        }
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.path(ino).and_then(|path| File::open(path).map_err(|e| errno(&e))) {
            Ok(file) => {
                let mut open = locked(&self.open);
                open.0 += 1;
                let handle = open.0;
                open.1.insert(handle, Arc::new(file));
                reply.opened(FileHandle(handle), FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(errno) => reply.error(errno),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        offset: u64,
        len_bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(file) = locked(&self.open).1.get(&handle.0).cloned() else { return reply.error(Errno::EBADF) };
        let job = Job { file, offset, len: len_bytes.min(REQUEST_MAX_BYTES), came: Instant::now(), reply };
        if let Err(mpsc::SendError(job)) = self.jobs.send(job) {
            job.reply.error(Errno::EIO);
        }
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        handle: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        locked(&self.open).1.remove(&handle.0);
        reply.ok();
    }

    /// Nothing is held back for a close to wait for: the kernel then asks no more.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let listed = self.path(ino).and_then(|path| {
            let entries = fs::read_dir(&path).map_err(|e| errno(&e))?.collect::<io::Result<Vec<_>>>();
            Ok((path, entries.map_err(|e| errno(&e))?))
        });
        let (path, entries) = match listed {
            Ok(listed) => listed,
            Err(errno) => return reply.error(errno),
        };
        let dots = [".", ".."].map(|name| (ino.0, FileType::Directory, name.into()));
        let files = entries.iter().map(|entry| {
            let kind = entry.file_type().map_or(FileType::RegularFile, kind);
            (locked(&self.names).number(&path.join(entry.file_name())), kind, entry.file_name())
        });
        for (at, (number, kind, name)) in dots.into_iter().chain(files).enumerate().skip(offset as usize) {
            if reply.add(INodeNo(number), at as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_all_requests_share_one_line() {
        let (line, slow) = (Line::default(), Slowness { bytes_per_s: 1_000_000, ..Slowness::default() });
        let (begin, second) = (Instant::now(), Duration::from_secs(1));
        let first = line.pass(begin, slow.transfer(1_000_000));
        assert_eq!(first, begin + second);
        assert_eq!(line.pass(begin, slow.transfer(500_000)), first + second / 2);
        let later = begin + second * 10;
        assert_eq!(line.pass(later, slow.transfer(1_000_000)), later + second, "an idle line does not save up");
        assert_eq!(slow.shortest(2_000_000), Duration::from_millis(2005));
    }

    #[test]
    fn shows_the_folder_and_counts_what_is_read_after_each_mount() {
        if !impresario_testing::require("fuse") || !impresario_testing::require("root") {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let text = vec![7; 300_000];
        fs::create_dir(folder.path().join("deep")).unwrap();
        fs::write(folder.path().join("deep/file"), &text).unwrap();
        let parent = tempfile::tempdir().unwrap();
        let slowness = Slowness { request: Duration::from_millis(1), ..Slowness::default() };
        let mount = SlowMount::new(folder.path(), parent.path(), slowness).unwrap();
        let file = mount.path().join("deep/file");
        let mut before = mount.counts().unwrap();
        for _ in 0..2 {
            mount.cool().unwrap();
            assert!(fs::read(&file).unwrap() == text && fs::read(&file).unwrap() == text);
            let counts = mount.counts().unwrap().since(before);
            assert!(counts.reads > 0 && counts.read_bytes == 300_000, "{counts:?}: read once after each mount");
            before = mount.counts().unwrap();
        }
        let names: Vec<_> = fs::read_dir(mount.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["deep"]);
        assert!(fs::write(mount.path().join("new"), "").is_err(), "it is read-only");
        let at = mount.path().to_path_buf();
        drop(mount);
        assert!(!at.exists(), "unmounted and removed");
    }
}
