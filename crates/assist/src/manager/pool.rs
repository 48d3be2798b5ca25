//! The workers that make the calls that may block: hints, and closing files.
//!
//! One bounded pool for all files. Each file's jobs are done in order, one at a time, and files take turns. A user
//! whose file system hangs cannot take all workers.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::backend::{Backends, Brought, FileId, HintedFile, Inside, Progress};
use crate::config::{BackendChoice, ReadAhead};
use impresario_base::lock::{Condvar, Mutex, MutexGuard};

/// Jobs of one file that wait at most; more hints are refused.
const WAITING_MAX: usize = 256;
/// Jobs of one file that run at once: the kernel then sees one reader that goes forward.
const RUNNING_MAX: u32 = 1;

/// A file as the workers need it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) id: FileId,
    pub(super) fd: Arc<OwnedFd>,
    pub(super) backend: BackendChoice,
    pub(super) uid: u32,
    pub(super) progress: Arc<Progress>,
    /// The program's own thread for hints, if it may have one.
    pub(super) inside: Option<Arc<Inside>>,
}

#[derive(Debug)]
pub(super) enum Work {
    /// `fresh`: asked for for the first time.
    WillNeed {
        range: Range<u64>,
        fresh: bool,
    },
    DontNeed(Range<u64>),
    /// Brings it in, and how long that takes is to be told.
    Try(Range<u64>),
    ReadAhead(ReadAhead),
    /// The program closed it; `last` when no other program has it open.
    Close {
        last: bool,
    },
}

/// What became of a job that brought something in, or failed.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) id: FileId,
    pub(super) range: Range<u64>,
    pub(super) fresh: bool,
    /// How long it took to bring in what was to be tried, if that is known.
    pub(super) took_ns: Option<u64>,
    pub(super) backend: &'static str,
    pub(super) result: Result<Brought, std::io::Error>,
}

#[derive(Debug)]
struct Job {
    target: Target,
    work: Work,
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
    files: FxHashMap<FileId, Queue>,
    /// Files with a job to begin, in turn.
    ready: VecDeque<FileId>,
    running_of: FxHashMap<u32, u32>,
    workers: u32,
    stopping: bool,
}

/// The pool.
pub(super) struct Pool {
    state: Mutex<State>,
    work: Condvar,
    ended: Condvar,
    backends: Backends,
    workers: u32,
}

impl Pool {
    /// Starts so many workers, at least 2. `wake` is called after each report sent to `done`.
    pub(super) fn start(
        workers: u32,
        backends: Backends,
        done: Sender<Done>,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> std::io::Result<Arc<Pool>> {
        let workers = workers.max(2);
        let state = Mutex::new(State { workers, ..State::default() });
        let pool = Arc::new(Pool { state, work: Condvar::new(), ended: Condvar::new(), backends, workers });
        let wake: Arc<dyn Fn() + Send + Sync> = Arc::new(wake);
        for n in 0..workers {
            let (own, done, wake) = (pool.clone(), done.clone(), wake.clone());
            let thread = std::thread::Builder::new().name(format!("assist-hint-{n}"));
            if let Err(e) = thread.spawn(move || own.run(&done, &*wake)) {
                let mut state = pool.locked();
                state.workers -= workers - n;
                state.stopping = true;
                drop(state);
                pool.work.notify_all();
                return Err(e);
            }
        }
        Ok(pool)
    }

    /// Adds a job. False, and the job is not done, when too many wait; closing is always taken.
    pub(super) fn submit(&self, target: Target, work: Work) -> bool {
        let mut state = self.locked();
        if state.stopping {
            return false;
        }
        let id = target.id;
        let queue = state.files.entry(id).or_default();
        match &work {
            Work::DontNeed(gone) => {
                // What is not asked for yet and not needed any more is not asked for at all.
                queue.jobs.retain(|job| match &job.work {
                    Work::WillNeed { range, .. } => !(gone.start <= range.start && range.end <= gone.end),
                    _ => true,
                });
            }
            Work::Close { last: true } => {
                queue.jobs.retain(|job| matches!(job.work, Work::Close { .. } | Work::DontNeed(_)));
            }
            _ => {}
        }
        if queue.jobs.len() >= WAITING_MAX && !matches!(work, Work::Close { .. }) {
            return false;
        }
        queue.jobs.push_back(Job { target, work });
        if !queue.is_ready && queue.running < RUNNING_MAX {
            queue.is_ready = true;
            state.ready.push_back(id);
        }
        drop(state);
        self.work.notify_one();
        true
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

    fn run(&self, done: &Sender<Done>, wake: &dyn Fn()) {
        while let Some(job) = self.next() {
            let (id, uid) = (job.target.id, job.target.uid);
            if let Some(report) = self.perform(job)
                && done.send(report).is_ok()
            {
                wake();
            }
            self.finished(id, uid);
        }
        self.locked().workers -= 1;
        self.ended.notify_all();
    }

    /// The next job whose user does not run as many as may be; `None` when the pool stops.
    fn next(&self) -> Option<Job> {
        let mut state = self.locked();
        loop {
            if state.stopping {
                return None;
            }
            for _ in 0..state.ready.len() {
                let Some(id) = state.ready.pop_front() else { break };
                let Some(queue) = state.files.get(&id) else { continue };
                let Some(uid) = queue.jobs.front().map(|job| job.target.uid) else {
                    if let Some(queue) = state.files.get_mut(&id) {
                        queue.is_ready = false;
                    }
                    continue;
                };
                if state.running_of.get(&uid).copied().unwrap_or(0) >= self.workers - 1 {
                    state.ready.push_back(id);
                    continue;
                }
                let Some(queue) = state.files.get_mut(&id) else { continue };
                let job = queue.jobs.pop_front();
                queue.running += 1;
                queue.is_ready = !queue.jobs.is_empty() && queue.running < RUNNING_MAX;
                if queue.is_ready {
                    state.ready.push_back(id);
                }
                *state.running_of.entry(uid).or_default() += 1;
                if job.is_some() {
                    return job;
                }
            }
            state = self.work.wait(state);
        }
    }

    fn finished(&self, id: FileId, uid: u32) {
        let mut state = self.locked();
        if let Some(running) = state.running_of.get_mut(&uid) {
            *running -= 1;
            if *running == 0 {
                state.running_of.remove(&uid);
            }
        }
        if let Some(queue) = state.files.get_mut(&id) {
            queue.running = queue.running.saturating_sub(1);
            if queue.jobs.is_empty() && queue.running == 0 {
                state.files.remove(&id);
            } else if !queue.jobs.is_empty() && !queue.is_ready {
                queue.is_ready = true;
                state.ready.push_back(id);
            }
        }
        drop(state);
        // This worker looks again by itself; another one may wait for this user's place.
        self.work.notify_one();
    }

    /// Does a job. The file may be closed by this, when the job held the last reference.
    fn perform(&self, job: Job) -> Option<Done> {
        let Target { id, fd, backend: choice, progress, inside, .. } = &job.target;
        let file = HintedFile { fd: fd.as_fd(), id: *id, progress: Some(progress), inside: inside.as_ref() };
        match job.work {
            Work::WillNeed { range, fresh } => {
                let (result, backend) = match self.backends.will_need(*choice, file, range.clone()) {
                    Ok((brought, backend)) => (Ok(brought), backend),
                    Err(e) => (Err(e), self.backends.choose(*choice, file).name()),
                };
                Some(Done { id: *id, range, fresh, took_ns: None, backend, result })
            }
            Work::Try(range) => {
                let began = Instant::now();
                let (result, backend) = self.backends.bring_in(*choice, file, range.clone());
                // Where a hint only begins something, nobody knows when it ends.
                let took_ns = backend.waits().then(|| u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
                Some(Done { id: *id, range, fresh: false, took_ns, backend: backend.name(), result })
            }
            Work::DontNeed(range) => {
                let (error, backend) = self.backends.dont_need(*choice, file, range.clone()).err()?;
                Some(Done { id: *id, range, fresh: false, took_ns: None, backend, result: Err(error) })
            }
            Work::ReadAhead(how) => {
                let backend = self.backends.choose(*choice, file);
                let error = backend.read_ahead(file, how).err()?;
                Some(Done {
                    id: *id,
                    range: 0..0,
                    fresh: false,
                    took_ns: None,
                    backend: backend.name(),
                    result: Err(error),
                })
            }
            Work::Close { last } => {
                self.backends.closed(file, last);
                None
            }
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
        let (id, fd) = (FileId { dev: 1 << 40, ino }, Arc::new(file.into()));
        Target { id, fd, backend: BackendChoice::ForcedRead, uid, inside: None, progress: Arc::default() }
    }

    #[test]
    fn every_hint_is_given_or_refused() {
        let (send, done) = mpsc::channel();
        let pool = Pool::start(4, Backends::default(), send, || {}).unwrap();
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
        let pool = Pool::start(3, backends, send, || {}).unwrap();
        let (read, write) = std::io::pipe().unwrap();
        let read: Arc<OwnedFd> = Arc::new(read.into());
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

    #[test]
    fn what_was_not_asked_for_yet_and_is_not_needed_is_not_asked_for() {
        let (send, _done) = mpsc::channel();
        let pool = Pool::start(2, Backends::default(), send, || {}).unwrap();
        pool.locked().running_of.insert(5, 100); // this user's jobs must wait
        let target = target(1, 5);
        for n in 0..4 {
            pool.submit(target.clone(), Work::WillNeed { range: n * 100..n * 100 + 100, fresh: true });
        }
        pool.submit(target.clone(), Work::DontNeed(100..300));
        let waiting = pool.locked().files[&target.id].jobs.iter().map(|j| format!("{:?}", j.work)).collect::<Vec<_>>();
        assert_eq!(waiting.len(), 3, "{waiting:?}");
        for _ in 0..1000 {
            pool.submit(target.clone(), Work::WillNeed { range: 900..901, fresh: false });
        }
        assert_eq!(pool.locked().files[&target.id].jobs.len(), WAITING_MAX);
        pool.stop(Duration::from_secs(20));
    }
}
