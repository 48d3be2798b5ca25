//! The workers that make the calls that may block: hints, and closing files.
//!
//! One bounded pool for all files. Each file's jobs are done in order, one at a time, and files take turns; reading an index, or
//! a program's page table, stands in a queue of its own, so that the file's hints need not wait for it, and so do pieces whose
//! time is to be told, of which several are waited for side by side. Neither a user
//! nor a file system that hangs can take all workers, and where several do, others are started in their place.
//! What a user whose files hang leaves behind is bounded: jobs, and descriptors that wait to be closed.

use std::cell::Cell;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::machine::path_of;
use rustc_hash::FxHashMap;
use rustix::fs::{Mode, OFlags};

use super::registration::device_of_file;
use crate::backend::{Backends, Brought, FileId, HintedFile, Inside, Progress, are_mapped, parts_in_page_table};
use crate::config::{BackendChoice, ReadAhead};
use crate::formats::{self, Format, Index};
use impresario_base::lock::{Condvar, Mutex, MutexGuard};

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

/// The pool.
pub(super) struct Pool {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
    backends: Backends,
    workers: u32,
    /// Workers that one user, or one device, may have.
    share: u32,
    done: Sender<Done>,
    wake: Arc<dyn Fn() + Send + Sync>,
    /// For workers that are started later.
    own: Weak<Pool>,
}

impl Pool {
    /// Starts the workers, at least 2, of which one user, or one device, may have `share`. `wake` is called after each
    /// report sent to `done`.
    pub(super) fn start(
        workers: u32,
        share: u32,
        backends: Backends,
        done: Sender<Done>,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Pool>> {
        let workers = workers.max(2);
        let share = share.clamp(1, workers - 1);
        let pool = Arc::new_cyclic(|own| Pool {
            state: Mutex::default(),
            work: Condvar::new(),
            ended: Condvar::new(),
            backends,
            workers,
            share,
            done,
            wake: Arc::new(wake),
            own: own.clone(),
        });
        for _ in 0..WORKERS_AT_FIRST {
            let started = pool.start_worker(&mut pool.locked(), false);
            if let Err(e) = started {
                pool.locked().stopping = true;
                pool.work.notify_all();
                return Err(e);
            }
        }
        Ok(pool)
    }

    /// Starts a worker, which may stand for one that is stuck.
    fn start_worker(&self, state: &mut State, replacement: bool) -> std::io::Result<()> {
        let Some(own) = self.own.upgrade() else { return Ok(()) };
        let name = if replacement { "assist-hint-more".into() } else { format!("assist-hint-{}", state.workers) };
        std::thread::Builder::new().name(name).spawn(move || own.run(replacement))?;
        (state.workers, state.idle) = (state.workers + 1, state.idle + 1);
        Ok(())
    }

    /// Starts a worker if there are fewer without a job than files with one. A system that has no thread left makes jobs wait.
    fn grow(&self, state: &mut State) {
        if state.ready.len() > state.idle as usize && state.workers < self.workers && !state.stopping {
            let _ = self.start_worker(state, false);
        }
    }

    /// Adds a job. False, and the job is not done, when too many wait; closing is always taken.
    pub(super) fn submit(&self, target: Target, work: Work) -> bool {
        // Outlives the lock: with the last job of a file its descriptor goes.
        let mut dropped = VecDeque::new();
        let mut state = self.locked();
        let (line, uid, count) = (QueueKey::of(&target, &work), target.uid, work.count());
        let is_hint = count == Some(Count::Hint);
        if state.stopping || is_hint && state.waiting_of.get(&uid).is_some_and(|n| *n >= WAITING_OF_USER_MAX) {
            return false;
        }
        let State { files, ready, waiting_of, .. } = &mut *state;
        let queue = files.entry(line).or_default();
        let goes = |job: &Job| match (&work, &job.work) {
            // What is not asked for yet and not needed any more is not asked for at all.
            (Work::DontNeed(gone), Work::WillNeed { range, .. }) => gone.start <= range.start && range.end <= gone.end,
            (Work::Close { last: true }, other) => !matches!(other, Work::Close { .. } | Work::DontNeed(_)),
            _ => false,
        };
        if matches!(work, Work::DontNeed(_) | Work::Close { last: true }) {
            (dropped, queue.jobs) = std::mem::take(&mut queue.jobs).into_iter().partition(goes);
            dropped.iter().for_each(|job| one_less(waiting_of, job.target.uid));
        }
        if is_hint && queue.jobs.len() >= WAITING_MAX {
            return false;
        }
        queue.jobs.push_back(Job { target, work });
        if !queue.is_ready && queue.running < line.running_max() {
            queue.is_ready = true;
            ready.push_back(line);
        }
        if let Some(count) = count {
            *state.counted(count).entry(uid).or_default() += 1;
        }
        let is_close = count == Some(Count::Close);
        if is_close {
            state.closes += 1;
            state.closes_since.get_or_insert_with(Instant::now);
        } else {
            self.grow(&mut state);
        }
        drop(state);
        drop(dropped);
        if !is_close {
            self.work.notify_one();
        }
        true
    }

    /// Has a worker close the files that wait for it, where `at_once`, or there are many, or some have waited for a while: to wake
    /// a worker for each would take programs that open many small files more time than it takes to close them.
    pub(super) fn begin_closing(&self, at_once: bool) {
        let mut state = self.locked();
        let waited = state.closes_since.is_some_and(|since| since.elapsed() >= CLOSED_WITHIN);
        if state.closes > 0 && (at_once || state.closes >= CLOSED_AT_ONCE || waited) {
            (state.closes, state.closes_since) = (0, None);
            if state.idle == 0 {
                self.grow(&mut state);
            }
            drop(state);
            self.work.notify_one();
        }
    }

    /// Closes a descriptor that a user's program sent, without waiting for it. Those of one user on one device are closed
    /// one after the other.
    pub(super) fn let_go(&self, fd: OwnedFd, uid: u32) {
        let dev = device_of_file(fd.as_fd()).unwrap_or(NO_DEVICE);
        self.submit(Target::to_close(fd, uid, dev), Work::LetGo);
    }

    /// Ends a program's connection. Closing it closes what the program sent and was not taken, which may wait.
    pub(super) fn hang_up(&self, socket: OwnedFd, uid: u32) {
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        self.submit(Target::to_close(socket, uid, NO_DEVICE), Work::HangUp);
    }

    /// Files that a user's programs closed and that are not closed here yet.
    pub(super) fn closing(&self, uid: u32) -> u64 {
        self.locked().closing.get(&uid).copied().unwrap_or(0).into()
    }

    /// Whether a job waits or is being done.
    pub(super) fn has_jobs(&self) -> bool {
        !self.locked().files.is_empty()
    }

    /// Whether a user's descriptors cannot be closed as fast as they come.
    pub(super) fn is_clogged(&self, uid: u32) -> bool {
        self.locked().letting_go.get(&uid).is_some_and(|waiting| *waiting >= LETTING_GO_MAX)
    }

    /// Starts workers in the place of those that are stuck, if jobs wait that may begin and no worker is free for them.
    pub(super) fn relieve(&self) {
        let mut state = self.locked();
        self.grow(&mut state);
        if !state.ready.is_empty() && state.idle > 0 {
            self.work.notify_one();
        }
        let stuck = state.since.values().filter(|since| since.elapsed() >= STUCK_AFTER).count() as u32;
        let free = state.workers.saturating_sub(stuck);
        let replaced = state.workers.saturating_sub(self.workers);
        if state.stopping || free >= self.workers {
            return;
        }
        let waiting = state.ready.iter().filter(|line| state.may_begin(**line, self.share)).count() as u32;
        for _ in 0..REPLACEMENTS_MAX.min(stuck).saturating_sub(replaced).min(waiting) {
            let _ = self.start_worker(&mut state, true);
        }
    }

    /// Ends the workers; jobs that wait are dropped. Waits for those that run, but not longer than `most`.
    pub(super) fn stop(&self, most: Duration) {
        let mut state = self.locked();
        state.stopping = true;
        let dropped = std::mem::take(&mut state.files);
        state.ready.clear();
        self.work.notify_all();
        let end = Instant::now() + most;
        while state.workers > 0 {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(workers = state.workers, "a file system does not answer; its workers are left behind");
                break;
            }
            state = self.ended.wait_timeout(state, left).0;
        }
        drop(state);
        // Closing a file may block, too.
        std::thread::spawn(move || drop(dropped));
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A worker. A replacement ends when nothing waits, or the workers that it stands for are back.
    fn run(&self, replacement: bool) {
        IS_WORKER.set(true);
        while let Some((number, job)) = self.next(replacement) {
            let (line, uid, count) = (QueueKey::of(&job.target, &job.work), job.target.uid, job.work.count());
            if let Some(report) = self.perform(job)
                && self.done.send(report).is_ok()
            {
                (self.wake)();
            }
            self.finished(number, line, uid, count);
        }
        let mut state = self.locked();
        (state.workers, state.idle) = (state.workers - 1, state.idle - 1);
        drop(state);
        self.ended.notify_all();
    }

    /// The next job, with a number, whose user and device do not run as many as may be; `None` when the worker is to end.
    fn next(&self, replacement: bool) -> Option<(u64, Job)> {
        let mut state = self.locked();
        loop {
            if state.stopping {
                return None;
            }
            for _ in 0..state.ready.len() {
                let Some(line) = state.ready.pop_front() else { break };
                if !state.may_begin(line, self.share) {
                    state.ready.push_back(line);
                    continue;
                }
                let Some(queue) = state.files.get_mut(&line) else { continue };
                let job = queue.jobs.pop_front();
                queue.running += u32::from(job.is_some());
                queue.is_ready = !queue.jobs.is_empty() && queue.running < line.running_max();
                if queue.is_ready {
                    state.ready.push_back(line);
                }
                let Some(job) = job else { continue };
                let (uid, dev) = (job.target.uid, line.dev());
                if job.work.count() == Some(Count::Hint) {
                    one_less(&mut state.waiting_of, uid);
                }
                *state.running_of.entry(uid).or_default() += 1;
                *state.running_on.entry(dev).or_default() += 1;
                if matches!(line, QueueKey::Index(_)) {
                    *state.indexing_on.entry(dev).or_default() += 1;
                }
                state.idle -= 1;
                state.jobs_begun += 1;
                let number = state.jobs_begun;
                let is_held_up = state.since.values().any(|since| since.elapsed() >= CLOSED_WITHIN);
                state.since.insert(number, Instant::now());
                // Another worker for the next hint, of this file or another. To close files one after the other takes less time than to
                // wake a worker for each, unless one of them hangs: this one may, too.
                if !state.ready.is_empty() && (is_held_up || !state.waiting_of.is_empty()) {
                    self.grow(&mut state);
                    self.work.notify_one();
                }
                return Some((number, job));
            }
            if replacement {
                return None;
            }
            state = self.work.wait(state);
        }
    }

    fn finished(&self, number: u64, line: QueueKey, uid: u32, count: Option<Count>) {
        let mut state = self.locked();
        state.idle += 1;
        state.since.remove(&number);
        one_less(&mut state.running_of, uid);
        one_less(&mut state.running_on, line.dev());
        if matches!(line, QueueKey::Index(_)) {
            one_less(&mut state.indexing_on, line.dev());
        }
        if let Some(count @ (Count::Close | Count::LetGo)) = count {
            one_less(state.counted(count), uid);
        }
        if let Some(queue) = state.files.get_mut(&line) {
            queue.running = queue.running.saturating_sub(1);
            if queue.jobs.is_empty() && queue.running == 0 {
                state.files.remove(&line);
            } else if !queue.jobs.is_empty() && !queue.is_ready {
                queue.is_ready = true;
                state.ready.push_back(line);
            }
        }
        // This worker looks again by itself, also for what waited for this user's place, and wakes another one if need be.
    }

    /// Does a job. The file may be closed by this, when the job held the last reference.
    fn perform(&self, job: Job) -> Option<Done> {
        let Target { id, fd, backend: choice, progress, inside, .. } = &job.target;
        let file = HintedFile { fd: fd.as_fd(), id: *id, progress: Some(progress), inside: inside.as_ref() };
        // What brings nothing in is told of when it fails only.
        let failed = |backend, error| {
            let result = Err(error);
            Done { id: *id, range: 0..0, fresh: false, took_ns: None, found: None, backend, result }
        };
        let answer = |found| {
            let result = Ok(Brought::default());
            Done { id: *id, range: 0..0, fresh: false, took_ns: None, found: Some(found), backend: "", result }
        };
        match job.work {
            Work::WillNeed { range, fresh } => {
                let (result, backend) = match self.backends.will_need(*choice, file, range.clone()) {
                    Ok((brought, backend)) => (Ok(brought), backend),
                    Err(e) => (Err(e), self.backends.choose(*choice, file).name()),
                };
                Some(Done { id: *id, range, fresh, took_ns: None, found: None, backend, result })
            }
            Work::Try(range) => {
                let began = Instant::now();
                let (result, backend) = self.backends.bring_in(*choice, file, range.clone());
                // Closed meanwhile, it is closed here once more: this may have opened a file of our own after that.
                if progress.ended.load(Relaxed) {
                    self.backends.forget(file);
                }
                // Where a hint only begins something, its end is unknown.
                let took_ns = backend.waits().then(|| u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
                Some(Done { id: *id, range, fresh: false, took_ns, found: None, backend: backend.name(), result })
            }
            Work::Exactly(range) => {
                let choice = if *choice == BackendChoice::Auto { BackendChoice::Fadvise } else { *choice };
                let backend = self.backends.choose(choice, file);
                let result = backend.will_need(file, range.clone());
                Some(Done { id: *id, range, fresh: false, took_ns: None, found: None, backend: backend.name(), result })
            }
            Work::DontNeed(range) => {
                let (error, backend) = self.backends.dont_need(*choice, file, range).err()?;
                Some(failed(backend, error))
            }
            Work::ReadAhead(how) => {
                let backend = self.backends.choose(*choice, file);
                let error = backend.read_ahead(file, how).err()?;
                Some(failed(backend.name(), error))
            }
            // Of a file that is closed meanwhile nothing is wanted.
            Work::Index(..) if progress.ended.load(Relaxed) => None,
            Work::Index(formats, place) => Some(answer(Found::Index(read_index(file.fd, &formats, place)))),
            Work::PageTable(pid, parts) => {
                let found = parts_in_page_table(pid, *id, file.fd, &parts).ok();
                Some(answer(Found::PageTable(found.map(|found| parts.into_iter().zip(found).collect()))))
            }
            // Where that cannot be seen it is not asked for again.
            Work::Maps(program, pid, files) => {
                let are_mapped = are_mapped(pid, files.iter().map(|(id, fd)| (*id, fd.as_fd()))).ok()?;
                let gone = files.into_iter().zip(are_mapped).filter(|(_, is_mapped)| !is_mapped);
                Some(answer(Found::Unmapped(program, gone.map(|((_, fd), _)| fd).collect())))
            }
            Work::Close { last } => {
                self.backends.closed(file, last);
                None
            }
            Work::LetGo | Work::HangUp => None,
        }
    }
}

/// Through an open file of our own, so that the program's read-ahead is left alone; where that cannot be had, nothing is
/// read.
fn read_index(fd: BorrowedFd<'_>, formats: &[&'static dyn Format], place: Option<u64>) -> Option<Index> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let own = rustix::fs::open(path_of(fd), flags, Mode::empty()).ok()?;
    formats::read_open(own.as_fd(), formats, place)
}

fn one_less<K: std::hash::Hash + Eq>(counts: &mut FxHashMap<K, u32>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn target(ino: u64, uid: u32) -> Target {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let (id, fd) = (FileId { dev: 1 << 40, ino }, Arc::new(OwnedFd::from(file).into()));
        Target { id, fd, backend: BackendChoice::ForcedRead, uid, inside: None, progress: Arc::default() }
    }

    #[test]
    fn every_hint_is_given_or_refused() {
        let (send, done) = mpsc::channel();
        let pool = Pool::start(4, 3, Backends::default(), send, || {}).unwrap();
        let targets: Vec<Target> = (0..50).map(|i| target(i, i as u32 % 3)).collect();
        let mut taken = 0;
        for n in 0..1000u64 {
            let range = n * 512..n * 512 + 512;
            let work = Work::WillNeed { range, fresh: true };
            taken += usize::from(pool.submit(targets[n as usize % 50].clone(), work));
        }
        let reports: Vec<Done> = (0..taken).map(|_| done.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
        assert!(reports.iter().all(|d| d.result.is_ok() && d.backend == "forced-read"));
        for target in targets {
            let weak = Arc::downgrade(&target.fd);
            assert!(pool.submit(target, Work::Close { last: true }));
            pool.begin_closing(true);
            let end = Instant::now() + Duration::from_secs(20);
            while weak.strong_count() > 0 {
                assert!(Instant::now() < end, "a closed file is let go");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        pool.stop(Duration::from_secs(20));
        let state = pool.locked();
        assert_eq!((state.workers, state.files.len(), state.running_of.len()), (0, 0, 0));
    }

    #[test]
    fn a_user_whose_files_hang_leaves_a_worker_to_others() {
        // Reads of an empty pipe hang; a pipe would be refused on registration, here it stands for a dead file system.
        let (send, done) = mpsc::channel();
        let hang = |fd: std::os::fd::BorrowedFd<'_>, _: &mut crate::backend::Advice| {
            let mut byte = [0];
            if rustix::fs::fstat(fd)?.st_size == 0 {
                rustix::io::read(fd, &mut byte)?;
            }
            Ok(())
        };
        let backends = Backends::new(c"/nowhere", Box::new(hang));
        let pool = Pool::start(3, 2, backends, send, || {}).unwrap();
        let (read, write) = std::io::pipe().unwrap();
        let read: Arc<LentFile> = Arc::new(OwnedFd::from(read).into());
        for ino in 0..20 {
            let (id, fd) = (FileId { dev: 7, ino }, read.clone());
            let hung =
                Target { id, fd, backend: BackendChoice::Lustre, uid: 1, inside: None, progress: Arc::default() };
            assert!(pool.submit(hung, Work::WillNeed { range: 0..1, fresh: true }));
        }
        assert!(pool.submit(target(99, 2), Work::WillNeed { range: 0..4096, fresh: true }));
        let report = done.recv_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(report.id.ino, 99);
        drop(write);
        pool.stop(Duration::from_secs(20));
    }

    /// Two users have files that hang, and take all workers; a third one is served all the same.
    #[test]
    fn stuck_workers_are_replaced() {
        let (send, done) = mpsc::channel();
        let hang = |fd: std::os::fd::BorrowedFd<'_>, _: &mut crate::backend::Advice| {
            if rustix::fs::fstat(fd)?.st_size == 0 {
                rustix::io::read(fd, &mut [0])?;
            }
            Ok(())
        };
        let pool = Pool::start(2, 1, Backends::new(c"/nowhere", Box::new(hang)), send, || {}).unwrap();
        let (read, write) = std::io::pipe().unwrap();
        let read: Arc<LentFile> = Arc::new(OwnedFd::from(read).into());
        for uid in [1, 2] {
            let (id, fd) = (FileId { dev: uid.into(), ino: 1 }, read.clone());
            let hung = Target { id, fd, backend: BackendChoice::Lustre, uid, inside: None, progress: Arc::default() };
            assert!(pool.submit(hung, Work::WillNeed { range: 0..1, fresh: true }));
        }
        let end = Instant::now() + Duration::from_secs(20);
        while pool.locked().since.len() < 2 {
            assert!(Instant::now() < end, "both run");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(pool.submit(target(99, 3), Work::WillNeed { range: 0..4096, fresh: true }));
        let report = loop {
            assert!(Instant::now() < end, "the third user is served");
            pool.relieve();
            if let Ok(report) = done.recv_timeout(Duration::from_millis(10)) {
                break report;
            }
        };
        assert_eq!(report.id.ino, 99);
        drop(write);
        while pool.locked().workers > 2 {
            assert!(Instant::now() < end, "the replacement ends");
            std::thread::sleep(Duration::from_millis(1));
        }
        pool.stop(Duration::from_secs(20));
    }

    #[test]
    fn pieces_of_a_file_are_waited_for_side_by_side_and_hints_do_not_wait_for_them() {
        let (send, done) = mpsc::channel();
        let hang = |fd: std::os::fd::BorrowedFd<'_>, _: &mut crate::backend::Advice| {
            rustix::io::read(fd, &mut [0])?;
            Ok(())
        };
        let pool = Pool::start(8, 7, Backends::new(c"/nowhere", Box::new(hang)), send, || {}).unwrap();
        let (read, write) = std::io::pipe().unwrap();
        let fd: Arc<LentFile> = Arc::new(OwnedFd::from(read).into());
        let id = FileId { dev: 1, ino: 1 };
        let hung = Target { id, fd, backend: BackendChoice::Lustre, uid: 1, inside: None, progress: Arc::default() };
        for n in 0..2 * u64::from(TRIES_MAX) {
            assert!(pool.submit(hung.clone(), Work::Try(n..n + 1)));
        }
        let end = Instant::now() + Duration::from_secs(20);
        while pool.locked().since.len() < TRIES_MAX as usize {
            assert!(Instant::now() < end, "so many are waited for at once");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(pool.submit(Target { id, ..target(1, 1) }, Work::WillNeed { range: 0..4096, fresh: true }));
        assert_eq!(done.recv_timeout(Duration::from_secs(20)).unwrap().range, 0..4096);
        while pool.locked().since.len() > TRIES_MAX as usize {
            assert!(Instant::now() < end, "and no more");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop((hung, write));
        (0..2 * TRIES_MAX).for_each(|_| drop(done.recv_timeout(Duration::from_secs(20)).unwrap()));
        while pool.has_jobs() {
            assert!(Instant::now() < end, "all are done");
            std::thread::sleep(Duration::from_millis(1));
        }
        pool.stop(Duration::from_secs(20));
    }

    #[test]
    fn what_was_not_asked_for_yet_and_is_not_needed_is_not_asked_for() {
        let (send, _done) = mpsc::channel();
        let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
        pool.locked().running_of.insert(5, 100); // this user's jobs must wait
        let target = target(1, 5);
        for n in 0..4 {
            pool.submit(target.clone(), Work::WillNeed { range: n * 100..n * 100 + 100, fresh: true });
        }
        pool.submit(target.clone(), Work::DontNeed(100..300));
        let waiting = pool.locked().files[&QueueKey::Hints(target.id)]
            .jobs
            .iter()
            .map(|j| format!("{:?}", j.work))
            .collect::<Vec<_>>();
        assert_eq!(waiting.len(), 3, "{waiting:?}");
        for _ in 0..1000 {
            pool.submit(target.clone(), Work::WillNeed { range: 900..901, fresh: false });
        }
        assert_eq!(pool.locked().files[&QueueKey::Hints(target.id)].jobs.len(), WAITING_MAX);
        pool.stop(Duration::from_secs(20));
    }

    #[test]
    fn a_page_table_that_cannot_be_seen_is_told_of() {
        let (send, done) = mpsc::channel();
        let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
        let parts = vec![0..4096, 8192..12_288];
        for (pid, seen) in [(std::process::id(), Some(vec![false; 2])), (u32::MAX, None)] {
            assert!(pool.submit(target(1, 0), Work::PageTable(pid, parts.clone())));
            let Some(Found::PageTable(told)) = done.recv_timeout(Duration::from_secs(20)).unwrap().found else {
                panic!()
            };
            let expected = seen.map(|seen| parts.iter().cloned().zip(seen).collect::<Vec<_>>());
            assert_eq!(told, expected, "process {pid}");
        }
        pool.stop(Duration::from_secs(20));
    }

    /// A format whose index takes until the test lets it go.
    struct Slow;

    static SLOW: Mutex<u32> = Mutex::new(0);

    impl Format for Slow {
        fn name(&self) -> &'static str {
            "slow"
        }

        fn suffixes(&self) -> &'static [&'static str] {
            &[]
        }

        fn tracks(&self, _: &mut formats::Source<'_>) -> Option<Vec<formats::Track>> {
            *SLOW.lock() += 1;
            while *SLOW.lock() < 100 {
                std::thread::sleep(Duration::from_millis(1));
            }
            None
        }
    }

    /// One worker is told of several, but of none too late.
    #[test]
    fn files_are_closed_several_at_a_time() {
        let (send, _done) = mpsc::channel();
        let pool = Pool::start(2, 1, Backends::default(), send, || {}).unwrap();
        let closed = |many: u32, at_once: bool| {
            let targets: Vec<Target> = (0..many.into()).map(|ino| target(ino, 1)).collect();
            let open: Vec<_> = targets.iter().map(|target| Arc::downgrade(&target.fd)).collect();
            targets.into_iter().for_each(|target| assert!(pool.submit(target, Work::Close { last: true })));
            pool.begin_closing(at_once);
            move || open.iter().all(|fd| fd.strong_count() == 0)
        };
        impresario_testing::until("nothing else is used", closed(1, true));
        impresario_testing::until("there are many", closed(CLOSED_AT_ONCE, false));
        let few = closed(CLOSED_AT_ONCE - 1, false);
        impresario_testing::until("they have waited", || {
            pool.begin_closing(false);
            few()
        });
        pool.stop(Duration::from_secs(20));
    }

    /// A socket whose close waits until its peer, the second one, is gone.
    fn hanging_close() -> (OwnedFd, OwnedFd) {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut socket = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(60))).unwrap();
        socket.set_nonblocking(true).unwrap();
        while socket.write(&[0; 1 << 16]).is_ok() {}
        socket.set_nonblocking(false).unwrap();
        (socket.into(), peer.into())
    }

    #[test]
    fn no_file_waits_behind_closes_that_hang() {
        let (send, _done) = mpsc::channel();
        let pool = Pool::start(4, 3, Backends::default(), send, || {}).unwrap();
        let ((first, first_peer), (second, second_peer)) = (hanging_close(), hanging_close());
        let close = |ino, fd: OwnedFd| {
            let target = Target { fd: Arc::new(fd.into()), ..target(ino, 1) };
            assert!(pool.submit(target, Work::Close { last: true }));
        };
        close(1, first);
        pool.begin_closing(true);
        let hangs = || pool.locked().since.values().any(|since| since.elapsed() >= 2 * CLOSED_WITHIN);
        impresario_testing::until("the first one hangs", hangs);
        close(2, second);
        let last = target(3, 1);
        let open = Arc::downgrade(&last.fd);
        assert!(pool.submit(last, Work::Close { last: true }));
        pool.begin_closing(true);
        impresario_testing::until("the one behind them is closed", || open.strong_count() == 0);
        drop((first_peer, second_peer));
        pool.stop(Duration::from_secs(20));
    }

    #[test]
    fn hints_do_not_wait_for_indexes_of_which_few_are_read_at_once() {
        for (share, at_once) in [(2, 1), (5, INDEXES_MAX)] {
            *SLOW.lock() = 0;
            let (send, done) = mpsc::channel();
            let pool = Pool::start(6, share, Backends::default(), send, || {}).unwrap();
            let targets: Vec<Target> = (0..5).map(|i| target(i, i as u32)).collect();
            for target in &targets {
                assert!(pool.submit(target.clone(), Work::Index(vec![&Slow], None)));
            }
            let end = Instant::now() + Duration::from_secs(20);
            while *SLOW.lock() < at_once {
                assert!(Instant::now() < end, "indexes are read");
                std::thread::sleep(Duration::from_millis(1));
            }
            for target in &targets {
                assert!(pool.submit(target.clone(), Work::WillNeed { range: 0..4096, fresh: true }));
            }
            for _ in &targets {
                assert!(done.recv_timeout(Duration::from_secs(20)).unwrap().result.is_ok());
            }
            assert_eq!(*SLOW.lock(), at_once);
            *SLOW.lock() = 100;
            pool.stop(Duration::from_secs(20));
        }
    }

    /// Its index: two extents. The file grows while it is read where its first byte says so.
    struct Pair;

    impl Format for Pair {
        fn name(&self) -> &'static str {
            "pair"
        }

        fn suffixes(&self) -> &'static [&'static str] {
            &[]
        }

        fn tracks(&self, file: &mut formats::Source<'_>) -> Option<Vec<formats::Track>> {
            let path = String::from_utf8(file.bytes(0, 256).unwrap()).unwrap();
            if let Some(path) = path.trim_end_matches('\0').strip_prefix("grow ") {
                std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(1 << 21).unwrap();
            }
            Some(vec![vec![0..10, 20..30]])
        }
    }

    #[test]
    fn an_index_is_read_through_a_descriptor_of_our_own_of_a_file_that_stays_as_it_is() {
        use std::os::unix::fs::FileExt;
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let index = read_index(file.as_file().as_fd(), &[&Pair], None).unwrap();
        assert_eq!((index.format, index.size_bytes, index.tracks.extents()), ("pair", 1 << 20, 2));
        let grow = format!("grow {}", file.path().display());
        file.as_file().write_all_at(grow.as_bytes(), 0).unwrap();
        assert!(read_index(file.as_file().as_fd(), &[&Pair], None).is_none(), "it grew meanwhile");
        // A socket cannot be opened again.
        let (socket, _peer) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(read_index(socket.as_fd(), &[&Pair], None).is_none());
    }
}
