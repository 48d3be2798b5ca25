//! Background tasks: settling sizes and removing the objects of removed files.
//!
//! The disk holds the truth (`writers/`, `orphans/`); this queue only says what to look at next. It is bounded: jobs
//! that do not fit are found again by listing those directories. While the data servers do not answer, every job waits,
//! longer each time, up to [`PAUSE_MAX`].

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use impresario_base::lock::{Condvar, Mutex};
use impresario_wire::message::FileKey;

use super::service::Meta;

/// Worker threads.
pub(super) const THREADS: usize = 2;
const QUEUE_MAX: usize = 65_536;
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Retry delay of a job that the data servers did not answer, so that jobs they can answer run first.
const RETRY_AWAY: Duration = Duration::from_secs(1);
/// Retry delay of a job that failed for a reason of its own.
const RETRY: Duration = Duration::from_secs(60);
/// Largest number of files removed in one batch.
const BATCH_MAX: usize = 256;
/// How often idle threads wake up.
const LOOK_UP: Duration = Duration::from_secs(60);

/// A background job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Job {
    /// Ask the data servers for the size of a file without writers and record it.
    Settle(FileKey),
    /// Remove the objects of a file without names and openers, then the file.
    Reap(FileKey),
    /// The queue overflowed: list the directories to find what was left out.
    Rescan,
}

/// Why a job failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The data servers did not answer: this concerns every job.
    DataServers(std::io::Error),
    /// The file itself.
    Local(String),
}

impl From<rustix::io::Errno> for Failure {
    fn from(errno: rustix::io::Errno) -> Failure {
        Failure::Local(std::io::Error::from(errno).to_string())
    }
}

/// The queue.
#[derive(Default)]
pub(super) struct BackgroundTasks {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    due: BTreeMap<(Instant, u64), Job>,
    queued: FxHashMap<Job, (Instant, u64)>,
    /// Running; when it is due again, if it was requested meanwhile.
    running: FxHashMap<Job, Option<Instant>>,
    sequence: u64,
    overflowed: bool,
    paused_until: Option<Instant>,
    pause: Duration,
    stopped: bool,
}

impl Queue {
    fn put(&mut self, job: Job, due: Instant) {
        if let Some(at) = self.queued.get(&job).copied() {
            if at.0 <= due {
                return;
            }
            self.due.remove(&at);
        }
        if self.due.len() >= QUEUE_MAX {
            self.overflowed = true;
            self.queued.remove(&job);
            return;
        }
        self.sequence += 1;
        self.due.insert((due, self.sequence), job);
        self.queued.insert(job, (due, self.sequence));
    }

    /// The next job and when it is due.
    fn next_due(&self, now: Instant) -> Option<(Instant, u64)> {
        let (due, sequence) = *self.due.first_key_value()?.0;
        Some((self.paused_until.map_or(due, |until| due.max(until)).max(now), sequence))
    }
}

impl BackgroundTasks {
    /// Queues a job to run after `delay`, or sooner if it was requested so: what must not be done before an instant is for the
    /// job to check.
    pub(super) fn push(&self, job: Job, delay: Duration) {
        let due = Instant::now() + delay;
        let mut queue = self.queue.lock();
        if let Some(again) = queue.running.get_mut(&job) {
            *again = Some(again.map_or(due, |earlier| earlier.min(due)));
            return;
        }
        queue.put(job, due);
        drop(queue);
        self.wake.notify_one();
    }

    /// Whether the data servers did not answer recently. Callers that can avoid waiting for them then do.
    pub(super) fn is_paused(&self) -> bool {
        self.queue.lock().paused_until.is_some_and(|until| until > Instant::now())
    }

    /// Records that the data servers did not answer.
    pub(super) fn pause(&self) {
        let mut queue = self.queue.lock();
        queue.pause = (queue.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        queue.paused_until = Some(Instant::now() + queue.pause);
    }

    /// Records that the data servers answer.
    pub(super) fn resume(&self) {
        let mut queue = self.queue.lock();
        if queue.paused_until.take().is_some() {
            queue.pause = Duration::ZERO;
            drop(queue);
            self.wake.notify_all();
        }
    }

    /// Stops the threads; each finishes its current job.
    pub(super) fn stop(&self) {
        self.queue.lock().stopped = true;
        self.wake.notify_all();
    }

    /// Waits until no job is running or due.
    pub(super) fn wait_idle(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            let now = Instant::now();
            {
                let queue = self.queue.lock();
                let waiting = queue.next_due(now).is_some_and(|(due, _)| due <= now) || queue.overflowed;
                if !waiting && queue.running.is_empty() {
                    return true;
                }
            }
            if now >= deadline {
                return false;
            }
            std::thread::sleep((deadline - now).min(Duration::from_millis(1)));
        }
    }

    /// Queued jobs, whether more are on disk only, and whether the queue is paused.
    pub(super) fn state(&self) -> (usize, bool, bool) {
        let queue = self.queue.lock();
        let paused = queue.paused_until.is_some_and(|until| until > Instant::now());
        (queue.due.len() + queue.running.len(), queue.overflowed, paused)
    }

    /// Waits for a job; `None` when stopped.
    fn take(&self) -> Option<Job> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stopped {
                return None;
            }
            let now = Instant::now();
            if queue.due.is_empty() && queue.overflowed {
                queue.overflowed = false;
                queue.running.insert(Job::Rescan, None);
                return Some(Job::Rescan);
            }
            let nap = match queue.next_due(now) {
                Some((due, _)) if due <= now => {
                    let (_, job) = queue.due.pop_first()?;
                    queue.queued.remove(&job);
                    queue.running.insert(job, None);
                    return Some(job);
                }
                Some((due, _)) => due - now,
                None => LOOK_UP,
            };
            queue = self.wake.wait_timeout(queue, nap).0;
        }
    }

    /// More removals that are due, to share the wait for the disk.
    fn take_reaps(&self, max: usize) -> Vec<Job> {
        let mut queue = self.queue.lock();
        let mut taken = Vec::new();
        let now = Instant::now();
        while taken.len() < max
            && !queue.stopped
            && queue.next_due(now).is_some_and(|(due, _)| due <= now)
            && let Some((_, job @ Job::Reap(_))) = queue.due.first_key_value().map(|(at, job)| (*at, *job))
        {
            queue.due.pop_first();
            queue.queued.remove(&job);
            queue.running.insert(job, None);
            taken.push(job);
        }
        taken
    }

    /// Returns a job that was taken but not started.
    fn give_back(&self, job: Job) {
        let mut queue = self.queue.lock();
        queue.running.remove(&job);
        queue.put(job, Instant::now());
    }

    fn is_stopped(&self) -> bool {
        self.queue.lock().stopped
    }

    fn done(&self, job: Job, result: Result<(), Failure>) {
        if let Err(Failure::DataServers(error)) = &result {
            tracing::warn!(?job, %error, "data servers do not answer; postponed");
        }
        let mut queue = self.queue.lock();
        let again = queue.running.remove(&job).flatten();
        let now = Instant::now();
        match result {
            Ok(()) => {
                if let Some(due) = again {
                    queue.put(job, due);
                }
            }
            Err(Failure::DataServers(_)) => queue.put(job, now + RETRY_AWAY),
            Err(Failure::Local(error)) => {
                tracing::error!(?job, error, "failed; retried in a minute");
                queue.put(job, now + RETRY);
            }
        }
        drop(queue);
        self.wake.notify_all();
    }
}

impl Meta {
    /// The body of a worker thread.
    pub(super) fn run_background_tasks(&self) {
        while let Some(job) = self.background.take() {
            match job {
                Job::Settle(key) => self.background.done(job, self.settle_by_key(key)),
                Job::Rescan => self.background.done(job, self.rescan()),
                Job::Reap(_) => self.remove_batch(job),
            }
        }
    }

    /// Removes a batch of files that share the wait for the disk.
    fn remove_batch(&self, first: Job) {
        let mut batch = self.background.take_reaps(BATCH_MAX - 1);
        batch.insert(0, first);
        let keys: Vec<FileKey> =
            batch.iter().filter_map(|job| if let Job::Reap(key) = job { Some(*key) } else { None }).collect();
        if self.background.is_stopped() {
            return batch.into_iter().for_each(|job| self.background.give_back(job));
        }
        match self.sync_removals() {
            Ok(()) => {
                batch.into_iter().zip(self.reap(&keys)).for_each(|(job, result)| self.background.done(job, result))
            }
            Err(errno) => batch.into_iter().for_each(|job| self.background.done(job, Err(errno.into()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn a_job_is_queued_once_and_again_when_requested_while_it_runs() {
        let tasks = BackgroundTasks::default();
        let job = Job::Settle(FileKey(1));
        tasks.push(job, NOW);
        tasks.push(job, NOW);
        assert_eq!(tasks.take(), Some(job));
        tasks.push(job, NOW);
        assert_eq!(tasks.state().0, 1, "running, not queued");
        tasks.done(job, Ok(()));
        assert_eq!(tasks.take(), Some(job));
        tasks.done(job, Ok(()));
        assert_eq!(tasks.state(), (0, false, false));
    }

    /// Or a job that has to wait and asks for itself runs without pause until then.
    #[test]
    fn a_job_that_is_requested_for_later_while_it_runs_is_due_then() {
        let tasks = BackgroundTasks::default();
        let (job, later) = (Job::Reap(FileKey(1)), Duration::from_secs(3600));
        tasks.push(job, NOW);
        assert_eq!(tasks.take(), Some(job));
        tasks.push(job, later);
        tasks.done(job, Ok(()));
        assert!(tasks.wait_idle(NOW), "it is due");
        assert_eq!(tasks.state().0, 1);
        tasks.push(job, NOW);
        assert_eq!(tasks.take(), Some(job));
        [later, NOW, later].into_iter().for_each(|delay| tasks.push(job, delay));
        tasks.done(job, Ok(()));
        assert_eq!(tasks.take(), Some(job), "the earliest request counts");
    }

    #[test]
    fn failures_postpone_the_job() {
        let tasks = BackgroundTasks::default();
        tasks.push(Job::Reap(FileKey(1)), NOW);
        let job = tasks.take().unwrap();
        tasks.pause();
        tasks.done(job, Err(Failure::DataServers(std::io::ErrorKind::TimedOut.into())));
        assert!(tasks.is_paused() && tasks.wait_idle(NOW), "nothing is due while paused");
        assert_eq!(tasks.take(), Some(job), "after the pause");
        tasks.done(job, Err(Failure::Local("broken".into())));
        assert!(tasks.wait_idle(NOW));
        assert_eq!(tasks.state().0, 1);
    }

    #[test]
    fn the_earlier_due_time_wins_and_an_answer_ends_the_pause() {
        let tasks = BackgroundTasks::default();
        let job = Job::Reap(FileKey(1));
        tasks.push(job, Duration::from_secs(3600));
        tasks.push(job, NOW);
        tasks.push(job, Duration::from_secs(3600));
        assert_eq!(tasks.state().0, 1);
        tasks.pause();
        assert!(tasks.is_paused());
        tasks.resume();
        assert!(!tasks.is_paused());
        assert_eq!(tasks.take(), Some(job));
    }

    #[test]
    fn removals_are_taken_together_and_returned() {
        let tasks = BackgroundTasks::default();
        for key in 0..5 {
            tasks.push(Job::Reap(FileKey(key)), NOW);
        }
        tasks.push(Job::Settle(FileKey(9)), NOW);
        tasks.push(Job::Reap(FileKey(7)), Duration::from_secs(3600));
        let first = tasks.take().unwrap();
        assert_eq!(tasks.take_reaps(3).len(), 3);
        let last = tasks.take_reaps(100);
        assert_eq!((first, &last[..]), (Job::Reap(FileKey(0)), &[Job::Reap(FileKey(4))][..]));
        tasks.give_back(last[0]);
        assert_eq!(tasks.take(), Some(Job::Settle(FileKey(9))));
        assert_eq!(tasks.take(), Some(last[0]));
    }

    #[test]
    fn later_jobs_wait_and_stopping_ends_the_wait() {
        let tasks = BackgroundTasks::default();
        tasks.push(Job::Reap(FileKey(1)), Duration::from_secs(3600));
        tasks.push(Job::Reap(FileKey(2)), NOW);
        assert_eq!(tasks.take(), Some(Job::Reap(FileKey(2))));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| tasks.take());
            tasks.stop();
            assert_eq!(waiter.join().unwrap(), None);
        });
    }

    #[test]
    fn jobs_that_do_not_fit_are_found_by_a_rescan() {
        let tasks = BackgroundTasks::default();
        for key in 0..QUEUE_MAX as u64 + 10 {
            tasks.push(Job::Reap(FileKey(key)), NOW);
        }
        assert_eq!((tasks.state().0, tasks.state().1), (QUEUE_MAX, true));
        for _ in 0..QUEUE_MAX {
            let job = tasks.take().unwrap();
            tasks.done(job, Ok(()));
        }
        assert_eq!(tasks.take(), Some(Job::Rescan));
    }
}
