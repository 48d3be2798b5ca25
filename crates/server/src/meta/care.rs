//! What is done behind the clients' backs: settling sizes and removing the objects of removed files.
//!
//! The disk holds the truth (`writers/`, `orphans/`); this queue only says what to look at next. It is bounded:
//! what does not fit is found again by listing those folders. While the data servers do not answer, everything
//! waits, longer each time, up to [`PAUSE_MAX`].

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use impresario_wire::message::FileKey;

use super::lock;
use super::service::Meta;

/// Threads that do it.
pub(super) const THREADS: usize = 2;
const QUEUE_MAX: usize = 65_536;
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// What data servers did not answer to is tried again after this time, so that what others can answer comes first.
const RETRY_AWAY: Duration = Duration::from_secs(1);
/// What fails for a reason of its own is tried again after this time.
const RETRY: Duration = Duration::from_secs(60);
/// Files removed in one go at most.
const BATCH_MAX: usize = 256;
/// Without work, threads look up this often.
const LOOK_UP: Duration = Duration::from_secs(60);

/// Something to do.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Job {
    /// Ask the data servers for the size of a file without writers and write it down.
    Settle(FileKey),
    /// Remove the objects of a file without names and openers, then the file.
    Reap(FileKey),
    /// The queue overflowed: list the folders for what was left out.
    Rescan,
}

/// Why something could not be done.
#[derive(Debug)]
pub(super) enum Failure {
    /// The data servers: it concerns everything.
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
pub(super) struct Care {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    due: BTreeMap<(Instant, u64), Job>,
    queued: FxHashMap<Job, (Instant, u64)>,
    /// Under way; true when it was asked for again meanwhile.
    running: FxHashMap<Job, bool>,
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

    /// The next thing to do and when.
    fn next_due(&self, now: Instant) -> Option<(Instant, u64)> {
        let (due, sequence) = *self.due.first_key_value()?.0;
        Some((self.paused_until.map_or(due, |until| due.max(until)).max(now), sequence))
    }
}

impl Care {
    /// Asks for something to be done after `delay`.
    pub(super) fn push(&self, job: Job, delay: Duration) {
        let mut queue = lock(&self.queue);
        if let Some(again) = queue.running.get_mut(&job) {
            *again = true;
            return;
        }
        queue.put(job, Instant::now() + delay);
        drop(queue);
        self.wake.notify_one();
    }

    /// Whether the data servers did not answer lately: then nobody who can help it waits for them.
    pub(super) fn is_paused(&self) -> bool {
        lock(&self.queue).paused_until.is_some_and(|until| until > Instant::now())
    }

    /// Notes that the data servers did not answer.
    pub(super) fn pause(&self) {
        let mut queue = lock(&self.queue);
        queue.pause = (queue.pause * 2).clamp(PAUSE_MIN, PAUSE_MAX);
        queue.paused_until = Some(Instant::now() + queue.pause);
    }

    /// Notes that the data servers answer.
    pub(super) fn resume(&self) {
        let mut queue = lock(&self.queue);
        if queue.paused_until.take().is_some() {
            queue.pause = Duration::ZERO;
            drop(queue);
            self.wake.notify_all();
        }
    }

    /// Ends the threads, each after what it is doing.
    pub(super) fn stop(&self) {
        lock(&self.queue).stopped = true;
        self.wake.notify_all();
    }

    /// Waits until nothing is under way or due.
    pub(super) fn wait_idle(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        loop {
            let now = Instant::now();
            {
                let queue = lock(&self.queue);
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

    /// Things waiting, whether there are more on disk only, whether data servers are being left alone.
    pub(super) fn state(&self) -> (usize, bool, bool) {
        let queue = lock(&self.queue);
        let paused = queue.paused_until.is_some_and(|until| until > Instant::now());
        (queue.due.len() + queue.running.len(), queue.overflowed, paused)
    }

    /// Waits for something to do; none when stopped.
    fn take(&self) -> Option<Job> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.stopped {
                return None;
            }
            let now = Instant::now();
            if queue.due.is_empty() && queue.overflowed {
                queue.overflowed = false;
                queue.running.insert(Job::Rescan, false);
                return Some(Job::Rescan);
            }
            let nap = match queue.next_due(now) {
                Some((due, _)) if due <= now => {
                    let (_, job) = queue.due.pop_first()?;
                    queue.queued.remove(&job);
                    queue.running.insert(job, false);
                    return Some(job);
                }
                Some((due, _)) => due - now,
                None => LOOK_UP,
            };
            queue = self.wake.wait_timeout(queue, nap).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// More files to be removed that are due, to share what is waited for.
    fn take_reaps(&self, max: usize) -> Vec<Job> {
        let mut queue = lock(&self.queue);
        let mut taken = Vec::new();
        let now = Instant::now();
        while taken.len() < max
            && !queue.stopped
            && queue.next_due(now).is_some_and(|(due, _)| due <= now)
            && let Some((_, job @ Job::Reap(_))) = queue.due.first_key_value().map(|(at, job)| (*at, *job))
        {
            queue.due.pop_first();
            queue.queued.remove(&job);
            queue.running.insert(job, false);
            taken.push(job);
        }
        taken
    }

    /// Gives back what was taken and not begun.
    fn give_back(&self, job: Job) {
        let mut queue = lock(&self.queue);
        queue.running.remove(&job);
        queue.put(job, Instant::now());
    }

    fn is_stopped(&self) -> bool {
        lock(&self.queue).stopped
    }

    fn done(&self, job: Job, result: Result<(), Failure>) {
        if let Err(Failure::DataServers(error)) = &result {
            tracing::warn!(?job, %error, "data servers do not answer; put off");
        }
        let mut queue = lock(&self.queue);
        let again = queue.running.remove(&job).unwrap_or(false);
        let now = Instant::now();
        match result {
            Ok(()) => {
                if again {
                    queue.put(job, now);
                }
            }
            Err(Failure::DataServers(_)) => queue.put(job, now + RETRY_AWAY),
            Err(Failure::Local(error)) => {
                tracing::error!(?job, error, "cannot be done now; tried again in a minute");
                queue.put(job, now + RETRY);
            }
        }
        drop(queue);
        self.wake.notify_all();
    }
}

impl Meta {
    /// A thread's life.
    pub(super) fn care(&self) {
        while let Some(job) = self.care.take() {
            match job {
                Job::Settle(key) => self.care.done(job, self.settle_by_key(key)),
                Job::Rescan => self.care.done(job, self.rescan()),
                Job::Reap(_) => self.care_for_removed(job),
            }
        }
    }

    /// Removes a batch of files: they share the wait for the disk.
    fn care_for_removed(&self, first: Job) {
        let mut batch = self.care.take_reaps(BATCH_MAX - 1);
        batch.insert(0, first);
        let durable = self.sync_removals();
        for job in batch {
            let Job::Reap(key) = job else { continue };
            match durable {
                Err(errno) => self.care.done(job, Err(errno.into())),
                // When one finds the data servers away, the others wait until that is over.
                Ok(()) if self.care.is_stopped() || self.care.is_paused() => self.care.give_back(job),
                Ok(()) => self.care.done(job, self.reap(key)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn a_job_is_queued_once_and_again_when_asked_for_while_it_runs() {
        let care = Care::default();
        let job = Job::Settle(FileKey(1));
        care.push(job, NOW);
        care.push(job, NOW);
        assert_eq!(care.take(), Some(job));
        care.push(job, NOW);
        assert_eq!(care.state().0, 1, "running, not queued");
        care.done(job, Ok(()));
        assert_eq!(care.take(), Some(job));
        care.done(job, Ok(()));
        assert_eq!(care.state(), (0, false, false));
    }

    #[test]
    fn failures_put_off() {
        let care = Care::default();
        care.push(Job::Reap(FileKey(1)), NOW);
        let job = care.take().unwrap();
        care.pause();
        care.done(job, Err(Failure::DataServers(std::io::ErrorKind::TimedOut.into())));
        assert!(care.is_paused() && care.wait_idle(NOW), "nothing is due while paused");
        assert_eq!(care.take(), Some(job), "after the pause");
        care.done(job, Err(Failure::Local("broken".into())));
        assert!(care.wait_idle(NOW));
        assert_eq!(care.state().0, 1);
    }

    #[test]
    fn the_earlier_due_counts_and_an_answer_ends_the_pause() {
        let care = Care::default();
        let job = Job::Reap(FileKey(1));
        care.push(job, Duration::from_secs(3600));
        care.push(job, NOW);
        care.push(job, Duration::from_secs(3600));
        assert_eq!(care.state().0, 1);
        care.pause();
        assert!(care.is_paused());
        care.resume();
        assert!(!care.is_paused());
        assert_eq!(care.take(), Some(job));
    }

    #[test]
    fn removals_are_taken_together_and_given_back() {
        let care = Care::default();
        for key in 0..5 {
            care.push(Job::Reap(FileKey(key)), NOW);
        }
        care.push(Job::Settle(FileKey(9)), NOW);
        care.push(Job::Reap(FileKey(7)), Duration::from_secs(3600));
        let first = care.take().unwrap();
        assert_eq!(care.take_reaps(3).len(), 3);
        let last = care.take_reaps(100);
        assert_eq!((first, &last[..]), (Job::Reap(FileKey(0)), &[Job::Reap(FileKey(4))][..]));
        care.give_back(last[0]);
        assert_eq!(care.take(), Some(Job::Settle(FileKey(9))));
        assert_eq!(care.take(), Some(last[0]));
    }

    #[test]
    fn later_jobs_wait_and_stopping_ends_the_wait() {
        let care = Care::default();
        care.push(Job::Reap(FileKey(1)), Duration::from_secs(3600));
        care.push(Job::Reap(FileKey(2)), NOW);
        assert_eq!(care.take(), Some(Job::Reap(FileKey(2))));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| care.take());
            care.stop();
            assert_eq!(waiter.join().unwrap(), None);
        });
    }

    #[test]
    fn what_does_not_fit_is_looked_for_later() {
        let care = Care::default();
        for key in 0..QUEUE_MAX as u64 + 10 {
            care.push(Job::Reap(FileKey(key)), NOW);
        }
        assert_eq!((care.state().0, care.state().1), (QUEUE_MAX, true));
        for _ in 0..QUEUE_MAX {
            let job = care.take().unwrap();
            care.done(job, Ok(()));
        }
        assert_eq!(care.take(), Some(Job::Rescan));
    }
}
