//! The workers that make the calls that may block: hints, and closing files.
//!
//! One bounded pool for all files. Each file's jobs are done in order, one at a time, and files take turns; reading an index, or
//! a program's page table, stands in a queue of its own, so that the file's hints need not wait for it, and so do pieces whose
//! time is to be told, of which several are waited for side by side. Neither a user
//! nor a file system that hangs can take all workers, and where several do, others are started in their place.
//! What a user whose files hang leaves behind is bounded: jobs, and descriptors that wait to be closed.

mod workers;

use std::cell::Cell;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::backend::{Brought, FileId, Inside, Progress};
use crate::config::{BackendChoice, ReadAhead};
use crate::formats::{Format, Index};
pub(super) use workers::Pool;

/// Jobs of one file that wait at most; more hints are refused.
const WAITING_MAX: usize = 256;
/// And of one user, some 2 MiB.
const WAITING_OF_USER_MAX: u32 = 16_384;
/// Descriptors of one user that wait to be let go, at most; a user who has more is not served.
pub(super) const LETTING_GO_MAX: u32 = 1024;
/// A worker that is in one job for so long counts as stuck, and another one may be started in its place.
const STUCK_AFTER: Duration = Duration::from_secs(1);
/// Workers started in the place of others, at most.
const REPLACEMENTS_MAX: u32 = 24;
/// Workers that are there from the beginning; more are started as jobs wait, so that little is to be done before a short program
/// and after it.
const WORKERS_AT_FIRST: u32 = 1;
/// Jobs of one file that run at once: the kernel then sees one reader that goes forward. And pieces of it whose end is waited for.
const RUNNING_MAX: u32 = 1;
const TRIES_MAX: u32 = 4;

/// So many files wait to be closed, while programs use others, and no longer than this.
const CLOSED_AT_ONCE: u32 = 16;
const CLOSED_WITHIN: Duration = Duration::from_millis(20);

/// Indexes of one device's files that are read at once: hints go first.
const INDEXES_MAX: u32 = 2;

/// Stands for the device of descriptors that are no files.
const NO_DEVICE: u64 = u64::MAX;

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// An open file that a program sent. A worker closes it, whichever thread needs it last, since the file system may make
/// that wait.
#[derive(Debug)]
pub(super) struct LentFile {
    fd: ManuallyDrop<OwnedFd>,
    uid: u32,
    /// Without one, any thread may close it.
    pool: Weak<Pool>,
}

impl LentFile {
    /// Of a program of this user.
    pub(super) fn new(fd: OwnedFd, uid: u32, pool: &Arc<Pool>) -> LentFile {
        LentFile { fd: ManuallyDrop::new(fd), uid, pool: Arc::downgrade(pool) }
    }
}

/// One that any thread may close.
impl From<OwnedFd> for LentFile {
    fn from(fd: OwnedFd) -> LentFile {
        LentFile { fd: ManuallyDrop::new(fd), uid: 0, pool: Weak::new() }
    }
}

impl AsFd for LentFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for LentFile {
    fn drop(&mut self) {
        // SAFETY: taken here only, and a value is dropped once.
        let fd = unsafe { ManuallyDrop::take(&mut self.fd) };
        match self.pool.upgrade() {
            Some(pool) if !IS_WORKER.get() => pool.let_go(fd, self.uid),
            _ => drop(fd),
        }
    }
}

/// A file as the workers need it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) id: FileId,
    pub(super) fd: Arc<LentFile>,
    pub(super) backend: BackendChoice,
    pub(super) uid: u32,
    pub(super) progress: Arc<Progress>,
    /// The program's own thread for hints, if it may have one.
    pub(super) inside: Option<Arc<Inside>>,
}

impl Target {
    fn to_close(fd: OwnedFd, uid: u32, dev: u64) -> Target {
        Target {
            id: FileId { dev, ino: 0 },
            fd: Arc::new(fd.into()),
            backend: BackendChoice::Auto,
            uid,
            progress: Arc::default(),
            inside: None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Work {
    /// `fresh`: asked for for the first time.
    WillNeed {
        range: Range<u64>,
        fresh: bool,
    },
    DontNeed(Range<u64>),
    /// Brings it in and nothing beside it, by the kernel's advice where the choice is free.
    Exactly(Range<u64>),
    /// Brings it in, and how long that takes is to be told.
    Try(Range<u64>),
    ReadAhead(ReadAhead),
    /// Reads the file's index by the first of these readers that understands it, or what it tells of this place.
    Index(Vec<&'static dyn Format>, Option<u64>),
    /// Which of these parts this process has in its page table.
    PageTable(u32, Vec<Range<u64>>),
    /// Which of these files this program, of this process, has mapped.
    Maps(u64, u32, Vec<(FileId, Arc<LentFile>)>),
    /// This descriptor is no longer needed. Closing it may block in its file system, so a worker does.
    LetGo,
    /// The same of a program's connection: descriptors that it sent may be in it.
    HangUp,
    /// The program closed it; `last` when no other program has it open.
    Close {
        last: bool,
    },
}

/// What became of a job that brought something in, or failed.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) id: FileId,
    /// Empty where nothing was to be brought in.
    pub(super) range: Range<u64>,
    pub(super) fresh: bool,
    /// How long it took to bring in what was to be tried, if that is known.
    pub(super) took_ns: Option<u64>,
    /// What was asked about the file beside that.
    pub(super) found: Option<Found>,
    pub(super) backend: &'static str,
    pub(super) result: Result<Brought, std::io::Error>,
}

/// What was found out about a file.
#[derive(Debug)]
pub(super) enum Found {
    /// What its index says, and its format, if it could be read.
    Index(Option<Index>),
    /// Whether each part has a page in the page table; `None` where that cannot be seen.
    PageTable(Option<Vec<(Range<u64>, bool)>>),
    /// What this program has not mapped of files that were asked about. It may have mapped one anew since, and closed it.
    Unmapped(u64, Vec<Arc<LentFile>>),
}

#[derive(Debug)]
struct Job {
    target: Target,
    work: Work,
}

/// Whose jobs are done one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum QueueKey {
    Hints(FileId),
    Index(FileId),
    PageTable(FileId),
    Tries(FileId),
    /// Descriptors that one user's programs sent and that are not kept.
    LetGo {
        uid: u32,
        dev: u64,
    },
}

impl QueueKey {
    fn of(target: &Target, work: &Work) -> QueueKey {
        match work {
            Work::Index(..) => QueueKey::Index(target.id),
            Work::PageTable(..) | Work::Maps(..) => QueueKey::PageTable(target.id),
            Work::Try(_) => QueueKey::Tries(target.id),
            Work::LetGo | Work::HangUp => QueueKey::LetGo { uid: target.uid, dev: target.id.dev },
            _ => QueueKey::Hints(target.id),
        }
    }

    fn dev(self) -> u64 {
        match self {
            QueueKey::Hints(id) | QueueKey::Index(id) | QueueKey::PageTable(id) | QueueKey::Tries(id) => id.dev,
            QueueKey::LetGo { dev, .. } => dev,
        }
    }

    /// Jobs of it that run at once.
    fn running_max(self) -> u32 {
        if matches!(self, QueueKey::Tries(_)) { TRIES_MAX } else { RUNNING_MAX }
    }
}

/// What a user's jobs are counted as, of which each has a limit.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Count {
    /// Until they begin.
    Hint,
    /// Until they are done.
    Close,
    LetGo,
}

impl Work {
    fn count(&self) -> Option<Count> {
        match self {
            Work::Close { .. } => Some(Count::Close),
            Work::LetGo => Some(Count::LetGo),
            Work::HangUp => None,
            _ => Some(Count::Hint),
        }
    }
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    running: u32,
    /// It stands in `ready`.
    is_ready: bool,
}

#[derive(Default)]
struct State {
    files: FxHashMap<QueueKey, Queue>,
    /// Files with a job to begin, in turn.
    ready: VecDeque<QueueKey>,
    running_of: FxHashMap<u32, u32>,
    /// The same by device.
    running_on: FxHashMap<u64, u32>,
    /// Indexes being read, by device.
    indexing_on: FxHashMap<u64, u32>,
    /// Hints that wait, by user.
    waiting_of: FxHashMap<u32, u32>,
    /// Files that wait to be closed, by user.
    closing: FxHashMap<u32, u32>,
    /// Descriptors that wait to be let go, by user.
    letting_go: FxHashMap<u32, u32>,
    /// Since when workers are in their jobs, by a number of the job.
    since: FxHashMap<u64, Instant>,
    jobs_begun: u64,
    workers: u32,
    /// Of these, such as have no job, or are about to look for one.
    idle: u32,
    /// Files that no worker was told yet to close, and since when there are any.
    closes: u32,
    closes_since: Option<Instant>,
    stopping: bool,
}

impl State {
    fn counted(&mut self, count: Count) -> &mut FxHashMap<u32, u32> {
        match count {
            Count::Hint => &mut self.waiting_of,
            Count::Close => &mut self.closing,
            Count::LetGo => &mut self.letting_go,
        }
    }

    /// Whether the next job of a line may begin when a user, or a device, may have `share` workers.
    fn may_begin(&self, line: QueueKey, share: u32) -> bool {
        let Some(job) = self.files.get(&line).and_then(|queue| queue.jobs.front()) else { return true };
        let dev = line.dev();
        let of_user = self.running_of.get(&job.target.uid).copied().unwrap_or(0);
        let on_device = self.running_on.get(&dev).copied().unwrap_or(0);
        let indexing = self.indexing_on.get(&dev).copied().unwrap_or(0);
        // A worker of the device's share is left to hints.
        let indexes_max = INDEXES_MAX.min(share - 1).max(1);
        of_user < share
            && (on_device < share || dev == NO_DEVICE)
            && (indexing < indexes_max || !matches!(line, QueueKey::Index(_)))
    }
}
