//! The threads of the pool: which job begins next, and what is done for it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex, MutexGuard};
use impresario_base::machine::path_of;
use rustc_hash::FxHashMap;
use rustix::fs::{Mode, OFlags};

use super::{
    CLOSED_AT_ONCE, CLOSED_WITHIN, Count, Done, Found, IS_WORKER, Job, LETTING_GO_MAX, NO_DEVICE, QueueKey,
    REPLACEMENTS_MAX, STUCK_AFTER, State, Target, WAITING_MAX, WAITING_OF_USER_MAX, WORKERS_AT_FIRST, Work,
};
use crate::backend::{Backends, Brought, HintedFile, are_mapped, parts_in_page_table};
use crate::config::BackendChoice;
use crate::formats::{self, Format, Index};
use crate::manager::registration::device_of_file;
/// The pool.
pub(in crate::manager) struct Pool {
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
    pub(in crate::manager) fn start(
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
    pub(in crate::manager) fn submit(&self, target: Target, work: Work) -> bool {
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
    pub(in crate::manager) fn begin_closing(&self, at_once: bool) {
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
    pub(in crate::manager) fn let_go(&self, fd: OwnedFd, uid: u32) {
        let dev = device_of_file(fd.as_fd()).unwrap_or(NO_DEVICE);
        self.submit(Target::to_close(fd, uid, dev), Work::LetGo);
    }

    /// Ends a program's connection. Closing it closes what the program sent and was not taken, which may wait.
    pub(in crate::manager) fn hang_up(&self, socket: OwnedFd, uid: u32) {
        let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        self.submit(Target::to_close(socket, uid, NO_DEVICE), Work::HangUp);
    }

    /// Files that a user's programs closed and that are not closed here yet.
    pub(in crate::manager) fn closing(&self, uid: u32) -> u64 {
        self.locked().closing.get(&uid).copied().unwrap_or(0).into()
    }

    /// Whether a job waits or is being done.
    pub(in crate::manager) fn has_jobs(&self) -> bool {
        !self.locked().files.is_empty()
    }

    /// Whether a user's descriptors cannot be closed as fast as they come.
    pub(in crate::manager) fn is_clogged(&self, uid: u32) -> bool {
        self.locked().letting_go.get(&uid).is_some_and(|waiting| *waiting >= LETTING_GO_MAX)
    }

    /// Starts workers in the place of those that are stuck, if jobs wait that may begin and no worker is free for them.
    pub(in crate::manager) fn relieve(&self) {
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
    pub(in crate::manager) fn stop(&self, most: Duration) {
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
mod tests;
