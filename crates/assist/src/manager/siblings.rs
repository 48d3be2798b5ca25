//! Files that a program has not opened yet: where it goes through a tree of folders, or through the chunks of an array of
//! Zarr, the next ones are brought in.
//!
//! Predicting them takes their names, so a thread of its own lists folders and opens files: a file system that hangs
//! holds only this thread up. The manager opens them with its own rights, so this is for managers of one user's programs.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirEntryExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use impresario_ring::now_ns;
use rustc_hash::FxHashSet;

use crate::backend::{Fadvise, FileId, HintBackend, HintedFile, is_cached};
use crate::walk::{FILES_AHEAD_MAX, Name, Walk};
use crate::zarr::{Arrays, METADATA_BYTES_MAX};

/// Files that were opened and not looked at yet; more are passed over.
const WAITING_MAX: usize = 1024;
/// Ways through trees that are followed at once; one more takes the place of the one idle longest.
const WALKS_MAX: usize = 8;
/// Names of a folder at most: listing more would take long and tell little.
const NAMES_MAX: usize = 1 << 16;
/// What is brought in of one file; of as many as are predicted it is 64 MiB.
const FILE_BYTES_MAX: u64 = (64 << 20) / FILES_AHEAD_MAX as u64;
/// Files that were brought in and not opened yet that are remembered.
const BROUGHT_MAX: usize = WALKS_MAX * FILES_AHEAD_MAX;
/// Files in a row that were in memory already, after which the next ones are not looked at, and how many are passed over.
const CACHED_IN_A_ROW: u32 = 16;
const PASSED_OVER: u32 = 512;

/// A thread that has been at one file for so long hangs with its file system: it is not waited for.
const HANGS_NS: u64 = 1_000_000_000;

/// A file that a program has opened, and what is done for that program.
type Opened = (PathBuf, Arc<Done>);

/// Follows programs from file to file.
#[derive(Debug)]
pub(super) struct Siblings {
    budget_bytes: u64,
    /// The way to the thread, which is there from the first file on; `None` within where it cannot be started.
    opened: OnceCell<Option<SyncSender<Opened>>>,
    all: Arc<All>,
}

/// What the thread does.
#[derive(Debug, Default)]
struct All {
    brought_bytes: AtomicU64,
}

/// What the thread did for one program.
#[derive(Debug, Default)]
struct Done {
    /// Files that the program told of and for which what comes next was brought in.
    files: AtomicU64,
    /// Those of them that had been brought in before.
    used: AtomicU64,
    brought_bytes: AtomicU64,
    /// When it turned to the last of it.
    turned_ns: AtomicU64,
}

impl Done {
    /// The thread turns to something else for this program.
    fn turns(&self) {
        self.turned_ns.store(now_ns(), Relaxed);
    }
}

/// What one program told of.
#[derive(Debug, Default)]
pub(super) struct Told {
    files: u64,
    /// Since when the thread has had something to do for it.
    since_ns: u64,
    done: Arc<Done>,
}

/// What became of files told of by one program.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Ahead {
    /// Files that were brought in before it opened them, for whatever program, and the bytes of all that were brought in for it.
    pub(super) used: u64,
    pub(super) brought_bytes: u64,
    /// What comes after those told of before the last one is still looked for.
    pub(super) is_pending: bool,
}

impl Siblings {
    /// May hold `budget_bytes` ahead of programs.
    pub(super) fn new(budget_bytes: u64) -> Siblings {
        Siblings { budget_bytes, opened: OnceCell::new(), all: Arc::default() }
    }

    /// Starts the thread; it ends when the way to it is dropped.
    fn start(&self) -> std::io::Result<SyncSender<Opened>> {
        let (opened, waiting) = sync_channel(WAITING_MAX);
        let follower = Follower::new(self.budget_bytes, self.all.clone());
        std::thread::Builder::new().name("assist-siblings".into()).spawn(move || follower.run(&waiting))?;
        Ok(opened)
    }

    /// A program, which has told of these files, has opened one.
    pub(super) fn opened(&self, path: &Path, told: &mut Told, now_ns: u64) {
        let failed = |error: &_| tracing::warn!(%error, "programs are not followed from file to file");
        let opened = self.opened.get_or_init(|| self.start().inspect_err(failed).ok());
        // Full means that the file system is slower than the program: it gains nothing.
        if opened.as_ref().is_some_and(|opened| opened.try_send((path.into(), told.done.clone())).is_ok()) {
            let is_idle = told.done.files.load(Relaxed) == told.files;
            told.since_ns = if is_idle { now_ns } else { told.since_ns };
            told.files += 1;
        }
    }

    /// What became of the files that a program told of up to now.
    pub(super) fn ahead(&self, told: &Told, now_ns: u64) -> Ahead {
        let turned_ns = told.done.turned_ns.load(Relaxed).max(told.since_ns);
        let is_behind = told.done.files.load(Acquire).saturating_add(1) < told.files;
        let is_pending = is_behind && now_ns.saturating_sub(turned_ns) < HANGS_NS;
        let brought_bytes = told.done.brought_bytes.load(Relaxed);
        Ahead { used: told.done.used.load(Relaxed), brought_bytes, is_pending }
    }

    /// Bytes brought in so far.
    pub(super) fn brought_bytes(&self) -> u64 {
        self.all.brought_bytes.load(Relaxed)
    }
}

/// Whether files that were to be brought in were in memory already.
#[derive(Debug, Default)]
struct InMemory {
    in_a_row: u32,
    passing_over: u32,
}

impl InMemory {
    /// Whether the next file is passed over.
    fn passes_over(&mut self) -> bool {
        let passes = self.passing_over > 0;
        self.passing_over -= u32::from(passes);
        passes
    }

    /// One was, or was not.
    fn note(&mut self, was: bool) {
        self.in_a_row = if was { self.in_a_row + 1 } else { 0 };
        if self.in_a_row >= CACHED_IN_A_ROW {
            (self.in_a_row, self.passing_over) = (0, PASSED_OVER);
        }
    }
}

struct Follower {
    /// Last used first, each with what was found of its files: one may go through files that are in memory beside another that does
    /// not.
    walks: VecDeque<(Walk, InMemory)>,
    arrays: Arrays,
    chunks: InMemory,
    /// What was opened last was a chunk of an array.
    is_chunk: bool,
    /// What is brought in of one file, and of the chunks of an array at a time.
    file_bytes: u64,
    chunks_bytes: u64,
    fadvise: Fadvise,
    /// Files that were brought in and not opened yet.
    brought: FxHashSet<PathBuf>,
    all: Arc<All>,
}

impl Follower {
    fn new(budget_bytes: u64, all: Arc<All>) -> Follower {
        Follower {
            walks: VecDeque::new(),
            arrays: Arrays::default(),
            chunks: InMemory::default(),
            is_chunk: false,
            file_bytes: FILE_BYTES_MAX.min(budget_bytes / FILES_AHEAD_MAX as u64),
            chunks_bytes: budget_bytes / 8,
            fadvise: Fadvise::new(Path::new("/sys")),
            brought: FxHashSet::default(),
            all,
        }
    }

    fn run(mut self, opened: &Receiver<Opened>) {
        while let Ok((path, done)) = opened.recv() {
            done.turns();
            done.used.fetch_add(u64::from(self.brought.remove(&path)), Relaxed);
            for (next, bytes) in self.next(&path) {
                done.turns();
                done.brought_bytes.fetch_add(self.bring_in(&next, bytes), Relaxed);
            }
            done.files.fetch_add(1, Release);
        }
    }

    /// The files to bring in, and how much of each at most.
    fn next(&mut self, path: &Path) -> Vec<(PathBuf, u64)> {
        let mut left = self.chunks_bytes;
        let mut may = |bytes: u64| {
            let fits = bytes <= left;
            left -= if fits { bytes } else { 0 };
            fits
        };
        let chunk_bytes = || std::fs::symlink_metadata(path).map_or(0, |meta| meta.len());
        let chunks = self.arrays.opened(path, chunk_bytes, &mut read_small, &mut may);
        self.is_chunk = chunks.is_some();
        if let Some(chunks) = chunks {
            return chunks;
        }
        let near = self.walks.iter().position(|(walk, _)| walk.is_near(path));
        let (mut walk, in_memory) = near.and_then(|i| self.walks.remove(i)).unwrap_or_default();
        let next = walk.opened(path, &mut |folder| list(folder));
        self.walks.push_front((walk, in_memory));
        self.walks.truncate(WALKS_MAX);
        next.into_iter().map(|path| (path, self.file_bytes)).collect()
    }

    /// Brings in a file that is to come next. How many bytes that are.
    fn bring_in(&mut self, path: &Path, bytes_max: u64) -> u64 {
        let walk = self.walks.front_mut().filter(|_| !self.is_chunk);
        let in_memory = walk.map_or(&mut self.chunks, |(_, in_memory)| in_memory);
        if in_memory.passes_over() {
            return 0;
        }
        let Some((file, meta)) = open(path) else { return 0 };
        let bytes = meta.len().min(bytes_max);
        if bytes == 0 {
            return 0;
        }
        let is_there = is_cached(file.as_fd(), 0..bytes).unwrap_or(false);
        in_memory.note(is_there);
        // Begins to read and does not wait.
        let id = FileId { dev: meta.dev(), ino: meta.ino() };
        let hinted = HintedFile { fd: file.as_fd(), id, progress: None, inside: None };
        if is_there || self.fadvise.will_need(hinted, 0..bytes).is_err() {
            return 0;
        }
        self.all.brought_bytes.fetch_add(bytes, Relaxed);
        // What programs do not open is forgotten now and then.
        if self.brought.len() >= BROUGHT_MAX {
            self.brought.clear();
        }
        self.brought.insert(path.into());
        bytes
    }
}

/// A regular file that is not empty. A pipe that takes a file's place is not waited for, and what is no regular file is not
/// touched.
fn open(path: &Path) -> Option<(File, Metadata)> {
    let flags = libc::O_NONBLOCK | libc::O_NOFOLLOW | libc::O_NOCTTY;
    let open = |more| File::options().read(true).custom_flags(flags | more).open(path);
    let file = open(libc::O_NOATIME).or_else(|_| open(0)).ok()?;
    let meta = file.metadata().ok().filter(Metadata::is_file)?;
    Some((file, meta))
}

fn read_small(path: &Path) -> Option<Vec<u8>> {
    let (file, meta) = open(path)?;
    let mut bytes = Vec::new();
    let read = file.take(METADATA_BYTES_MAX).read_to_end(&mut bytes).ok()?;
    (meta.len() == read as u64).then_some(bytes)
}

/// The files and folders of a folder.
fn list(folder: &Path) -> Option<Vec<Name>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).ok()? {
        let entry = entry.ok()?;
        let kind = entry.file_type().ok()?;
        if !kind.is_dir() && !kind.is_file() {
            continue;
        }
        if names.len() == NAMES_MAX {
            return None;
        }
        names.push(Name { name: entry.file_name(), inode: entry.ino(), is_folder: kind.is_dir() });
    }
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_hangs_is_waited_for_no_longer() {
        let siblings = Siblings::new(1 << 30);
        let (opened, waiting) = sync_channel(8);
        siblings.opened.set(Some(opened)).unwrap();
        let mut told = Told::default();
        let is_pending = |told: &Told, now_ns| siblings.ahead(told, now_ns).is_pending;
        assert!(!is_pending(&told, HANGS_NS));
        (0..3).for_each(|i| siblings.opened(Path::new("/f"), &mut told, (10 + i) * HANGS_NS));
        assert!(is_pending(&told, 11 * HANGS_NS - 1) && !is_pending(&told, 11 * HANGS_NS), "since the first one");
        Done::default().turned_ns.store(20 * HANGS_NS, Relaxed);
        assert!(!is_pending(&told, 20 * HANGS_NS), "it goes on for another program only");
        told.done.turned_ns.store(20 * HANGS_NS, Relaxed);
        assert!(is_pending(&told, 21 * HANGS_NS - 1), "it goes on");
        waiting.try_iter().for_each(|(_, done)| _ = done.files.fetch_add(1, Release));
        assert!(!is_pending(&told, 20 * HANGS_NS), "all is done");
        siblings.opened(Path::new("/f"), &mut told, 30 * HANGS_NS);
        assert!(!is_pending(&told, 30 * HANGS_NS), "the last one was told of just now");
        siblings.opened(Path::new("/f"), &mut told, 30 * HANGS_NS);
        assert!(is_pending(&told, 30 * HANGS_NS));
        assert!(!is_pending(&Told::default(), 30 * HANGS_NS), "nothing for another program");
    }

    #[test]
    fn the_next_files_of_a_folder_are_brought_in() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..20 {
            std::fs::write(dir.path().join(format!("{i:02}")), [i; 5000]).unwrap();
        }
        std::os::unix::fs::symlink(dir.path().join("05"), dir.path().join("link")).unwrap();
        let names = list(dir.path()).unwrap();
        assert_eq!(names.len(), 20, "links are not followed");
        let mut follower = Follower::new(1 << 30, Arc::default());
        let mut paths = |path: PathBuf| follower.next(&path).into_iter().map(|(path, _)| path).collect::<Vec<_>>();
        let mut next: Vec<_> = (0..10).map(|i| paths(dir.path().join(format!("{i:02}")))).collect();
        assert!(next[0].is_empty() && next[1].is_empty(), "one step shows no order");
        // After three files the order of the folder's entries may fit by chance, and is followed until it does not.
        let last = next.split_off(4).concat();
        for i in 10..20 {
            let path = dir.path().join(format!("{i:02}"));
            assert!(last.contains(&path) || next.concat().contains(&path), "{i}: {next:?}, {last:?}");
        }
    }

    /// A copy goes through two trees: the one that it writes is in memory, the other one is not.
    #[test]
    fn files_in_memory_do_not_stop_those_of_another_tree() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let make = |tree: &str, is_cold: bool| {
            let folder = dir.path().join(tree).join("files");
            std::fs::create_dir_all(&folder).unwrap();
            for i in 0..40 {
                let path = folder.join(format!("{i:02}"));
                std::fs::write(&path, vec![i; 50_000]).unwrap();
                let file = File::open(&path).unwrap();
                file.sync_all().unwrap();
                if is_cold {
                    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
                }
            }
            // By name is one of the orders.
            (0..40).map(|i| folder.join(format!("{i:02}"))).collect::<Vec<_>>()
        };
        let (warm, cold) = (make("warm/a", false), make("cold/b", true));
        if is_cached(File::open(&warm[0]).unwrap().as_fd(), 0..50_000) != Some(true)
            || is_cached(File::open(&cold[39]).unwrap().as_fd(), 0..50_000) != Some(false)
        {
            return impresario_testing::skip("cachestat", "memory cannot be looked into, or files do not leave it");
        }
        let mut follower = Follower::new(1 << 30, Arc::default());
        for (warm, cold) in warm.iter().zip(&cold) {
            for path in [warm, cold] {
                for (next, bytes) in follower.next(path) {
                    follower.bring_in(&next, bytes);
                }
            }
        }
        let brought = follower.all.brought_bytes.load(Relaxed);
        assert!(brought >= 30 * 50_000, "{brought} bytes of 40 files");
    }

    /// Chunks of an array of version 2, in the order of its grid, which is neither that of their names nor of their inodes.
    #[test]
    fn the_next_chunks_of_an_array_are_brought_in_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = |i: u64| dir.path().join(format!("{}.{}", i / 12, i % 12));
        for i in (0..24).rev() {
            std::fs::write(path((i * 7) % 24), vec![1; 900 << 10]).unwrap();
        }
        std::fs::write(dir.path().join(".zarray"), r#"{"zarr_format":2,"shape":[2,120],"chunks":[1,10]}"#).unwrap();
        let mut follower = Follower::new(1 << 30, Arc::default());
        let mut brought = Vec::new();
        for i in 0..24 {
            assert!(i == 0 || brought.contains(&(path(i), 900 << 10)), "{i}: {brought:?}");
            brought.extend(follower.next(&path(i)));
        }
        assert_eq!(brought.len(), 23);
        // All of a chunk, not only what one call takes.
        let file = File::open(path(5)).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        follower.bring_in(&path(5), 900 << 10);
        assert_eq!(follower.all.brought_bytes.load(Relaxed), 900 << 10);
        impresario_testing::until("it is in memory", || is_cached(file.as_fd(), 0..900 << 10).unwrap_or(true));
    }
}
