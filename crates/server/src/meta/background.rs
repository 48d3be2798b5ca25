//! Background tasks: settling sizes and removing the objects of removed files.
//!
//! The disk holds the truth (`writers/`, `orphans/`); this queue only says what to look at next. It is bounded: jobs
//! that do not fit are found again by listing those directories when nothing else is to be done.
//!
//! Jobs about files on a data server that does not answer are set aside, those on the same servers together ([`Group`]). One
//! thread at most tries some of them from time to time, up to [`PAUSE_MAX`] later each time, and goes on at once when that
//! succeeds. So the space of files on the other servers is freed meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::{FxHashMap, FxHashSet};

use impresario_base::complaints::Complaints;
use impresario_base::lock::{Condvar, Mutex};
use impresario_wire::message::FileKey;

use super::opens::OpenFile;
use super::service::Meta;

/// Worker threads.
pub(super) const THREADS: usize = 2;
/// Largest number of jobs in the queue, and of those set aside, with one more for each [`Group`].
const QUEUE_MAX: usize = 65_536;
/// Of the queue, the part that jobs may take that failed for a reason of their own.
const FAILED_MAX: usize = QUEUE_MAX / 2;
const PAUSE_MIN: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// The first retry of jobs that are set aside comes after this time.
const RETRY_AWAY: Duration = Duration::from_secs(1);
/// Between two searches for jobs that did not fit; doubled up to the other while nothing gets done of what they find.
const RESCAN_PAUSE: Duration = Duration::from_secs(5);
const RESCAN_PAUSE_MAX: Duration = Duration::from_secs(60);
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

/// The data servers of a file, in any order: what one of them fails for, the others of its files do, too.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub(super) struct Group(Box<[u16]>);

impl Group {
    /// Those of its spare objects are among them.
    pub(super) fn of(file: &OpenFile) -> Group {
        let spare = file.spare.lock().map(|(_, layout)| layout);
        let layouts = [file.layout].into_iter().chain(spare);
        let servers = layouts.flat_map(|layout| (0..layout.pcount).map(move |k| layout.server_at(k)));
        let mut servers: Vec<u16> = servers.collect();
        servers.sort_unstable();
        servers.dedup();
        Group(servers.into())
    }
}

/// Why a job was not done.
#[derive(Debug)]
pub(super) enum Stopped {
    /// These data servers did not answer. Without an error: it was not tried, as they did not answer others.
    Away(Group, Option<std::io::Error>),
    /// The file itself.
    Local(String),
    /// Its objects are longer than a local file can be, which any client that writes can bring about.
    TooLong(String),
}

impl Stopped {
    /// A job about a file on these data servers has failed.
    pub(super) fn by(failure: Failure, group: Group) -> Stopped {
        match failure {
            Failure::DataServers(error) => Stopped::Away(group, Some(error)),
            Failure::Local(error) => Stopped::Local(error),
            Failure::TooLong(error) => Stopped::TooLong(error),
        }
    }
}

/// Why work on a file failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The data servers did not answer: this concerns every file on them.
    DataServers(std::io::Error),
    /// The file itself.
    Local(String),
    /// Its objects are longer than a local file can be.
    TooLong(String),
}

impl From<rustix::io::Errno> for Failure {
    fn from(errno: rustix::io::Errno) -> Failure {
        let error = std::io::Error::from(errno).to_string();
        if errno == rustix::io::Errno::FBIG { Failure::TooLong(error) } else { Failure::Local(error) }
    }
}

/// The queue.
#[derive(Default)]
pub(super) struct BackgroundTasks {
    queue: Mutex<Queue>,
    wake: Condvar,
    /// What fails for one file fails for many.
    pub(super) complaints: Complaints,
}

#[derive(Default)]
struct Queue {
    due: BTreeMap<(Instant, u64), Job>,
    queued: FxHashMap<Job, (Instant, u64)>,
    /// Running; when it is due again, if it was requested meanwhile.
    running: FxHashMap<Job, Option<Instant>>,
    sequence: u64,
    aside: BTreeMap<Group, Aside>,
    /// The jobs in all of `aside`.
    set_aside: FxHashSet<Job>,
    /// A thread tries some of these.
    trying: Option<Group>,
    overflowed: bool,
    /// When the last search for jobs that did not fit began, and how long the next one waits from then.
    rescanned: Option<Instant>,
    rescan_pause: Duration,
    /// Jobs that it found, which are queued or running.
    found: FxHashSet<Job>,
    /// Names that the next such search passes over: what came before it fitted the last time.
    rescan_after: usize,
    paused_until: Option<Instant>,
    pause: Duration,
    stopped: bool,
}

/// Jobs about files on data servers that did not answer.
struct Aside {
    jobs: VecDeque<Job>,
    due: Instant,
    pause: Duration,
}

impl Queue {
    /// False if there is no room for it.
    fn put(&mut self, job: Job, due: Instant) -> bool {
        if self.set_aside.contains(&job) {
            return true;
        }
        if let Some(at) = self.queued.get(&job).copied() {
            if at.0 <= due {
                return true;
            }
            self.due.remove(&at);
        }
        if self.due.len() >= QUEUE_MAX {
            self.overflowed = true;
            self.queued.remove(&job);
            return false;
        }
        self.sequence += 1;
        self.due.insert((due, self.sequence), job);
        self.queued.insert(job, (due, self.sequence));
        true
    }

    /// Sets a job aside if there is room: of each group there is for one.
    fn put_aside(&mut self, job: Job, group: Group, now: Instant) {
        let count = self.set_aside.len();
        let fresh = || Aside { jobs: VecDeque::new(), due: now + RETRY_AWAY, pause: RETRY_AWAY };
        let is_full = match self.aside.get(&group) {
            Some(aside) if !aside.jobs.is_empty() => count >= QUEUE_MAX,
            _ => count >= 2 * QUEUE_MAX,
        };
        if is_full {
            self.overflowed = true;
        } else if self.set_aside.insert(job) {
            self.aside.entry(group).or_insert_with(fresh).jobs.push_back(job);
        }
    }

    /// When a job is due next, of the queue or set aside; `now` if one is.
    fn next_due(&self, now: Instant) -> Option<Instant> {
        let queued = self.due.first_key_value().map(|(at, _)| at.0);
        let aside = self.next_aside().map(|(due, _)| due);
        queued.into_iter().chain(aside).min().map(|due| due.max(now))
    }

    /// The jobs set aside that are tried next, and when.
    fn next_aside(&self) -> Option<(Instant, &Group)> {
        let waiting = self.aside.iter().filter(|(_, aside)| !aside.jobs.is_empty() && self.trying.is_none());
        waiting.map(|(group, aside)| (aside.due, group)).min()
    }

    fn pop_due(&mut self, now: Instant) -> Option<Job> {
        let first = self.due.first_entry().filter(|first| first.key().0 <= now)?;
        let job = first.remove();
        self.queued.remove(&job);
        self.running.insert(job, None);
        Some(job)
    }

    /// A job of the group that is being tried.
    fn pop_aside(&mut self) -> Option<Job> {
        let job = self.aside.get_mut(self.trying.as_ref()?)?.jobs.pop_front()?;
        self.set_aside.remove(&job);
        self.running.insert(job, None);
        Some(job)
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

    /// Queues a job that a search has found to run at once; one that is known stays as it is. False if there is no room: it will
    /// be found again.
    pub(super) fn offer(&self, job: Job) -> bool {
        let mut queue = self.queue.lock();
        if queue.running.contains_key(&job) || queue.queued.contains_key(&job) || queue.set_aside.contains(&job) {
            return true;
        }
        let fits = queue.put(job, Instant::now());
        if fits {
            queue.found.insert(job);
        }
        drop(queue);
        self.wake.notify_one();
        fits
    }

    /// Whether a job may ask these data servers: they answer, or it is among those that try whether they do.
    pub(super) fn may_ask(&self, group: &Group, tries: bool) -> bool {
        tries || !self.queue.lock().aside.contains_key(group)
    }

    /// How many names a search for jobs that did not fit passes over.
    pub(super) fn rescan_after(&self) -> usize {
        self.queue.lock().rescan_after
    }

    /// The next search goes on after this many names.
    pub(super) fn rescan_later(&self, after: usize) {
        let mut queue = self.queue.lock();
        queue.rescan_after = after;
        queue.overflowed = true;
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
                let waiting = queue.next_due(now).is_some_and(|due| due <= now) || queue.overflowed;
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
        (queue.due.len() + queue.running.len() + queue.set_aside.len(), queue.overflowed, paused)
    }

    /// Waits for a job; `None` when stopped. True if it was set aside: [`BackgroundTasks::tried`] must follow.
    fn take(&self) -> Option<(Job, bool)> {
        let mut queue = self.queue.lock();
        loop {
            if queue.stopped {
                return None;
            }
            let now = Instant::now();
            if let Some((_, group)) = queue.next_aside().filter(|(due, _)| *due <= now) {
                queue.trying = Some(group.clone());
                return queue.pop_aside().map(|job| (job, true));
            }
            if let Some(job) = queue.pop_due(now) {
                return Some((job, false));
            }
            let rescan_from = queue.rescanned.map_or(now, |at| at + queue.rescan_pause);
            let may_rescan = queue.overflowed && !queue.running.contains_key(&Job::Rescan);
            if may_rescan && rescan_from <= now {
                queue.overflowed = false;
                queue.rescanned = Some(now);
                queue.rescan_pause = (queue.rescan_pause * 2).clamp(RESCAN_PAUSE, RESCAN_PAUSE_MAX);
                queue.found.clear();
                queue.running.insert(Job::Rescan, None);
                return Some((Job::Rescan, false));
            }
            let next = queue.next_due(now).into_iter().chain(may_rescan.then_some(rescan_from)).min();
            queue = self.wake.wait_timeout(queue, next.map_or(LOOK_UP, |next| next - now)).0;
        }
    }

    /// More removals that are due, or of those set aside that are tried, to share the wait for the disk.
    fn take_reaps(&self, max: usize, tries: bool) -> Vec<Job> {
        let mut queue = self.queue.lock();
        let mut taken = Vec::new();
        let now = Instant::now();
        while taken.len() < max && !queue.stopped {
            let next = match (tries, &queue.trying) {
                (true, Some(group)) => queue.aside.get(group).and_then(|aside| aside.jobs.front()),
                _ => queue.due.first_key_value().map(|(_, job)| job),
            };
            let Some(Job::Reap(_)) = next else { break };
            let job = if tries { queue.pop_aside() } else { queue.pop_due(now) };
            let Some(job) = job else { break };
            taken.push(job);
        }
        taken
    }

    /// Jobs that were set aside have been tried.
    fn tried(&self, succeeded: bool) {
        let (mut queue, now) = (self.queue.lock(), Instant::now());
        let Some(group) = queue.trying.take() else { return };
        if let Some(aside) = queue.aside.get_mut(&group) {
            let doubled = (aside.pause * 2).min(PAUSE_MAX);
            (aside.pause, aside.due) = if succeeded { (RETRY_AWAY, now) } else { (doubled, now + doubled) };
            if aside.jobs.is_empty() {
                queue.aside.remove(&group);
            }
        }
        drop(queue);
        self.wake.notify_all();
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

    /// A job has ended. False: it found nothing to be done yet.
    fn done(&self, job: Job, result: Result<bool, Stopped>) {
        if let Err(Stopped::Away(_, Some(error))) = &result {
            self.complaints.counted("away", |jobs| {
                tracing::warn!(?job, jobs, %error, "data servers do not answer; postponed");
            });
        }
        let mut queue = self.queue.lock();
        let again = queue.running.remove(&job).flatten();
        let now = Instant::now();
        if queue.found.remove(&job) && matches!(result, Ok(true)) {
            queue.rescan_pause = RESCAN_PAUSE;
        }
        match result {
            Ok(_) => {
                if let Some(due) = again {
                    queue.put(job, due);
                }
            }
            Err(Stopped::Away(group, _)) => queue.put_aside(job, group, now),
            Err(stopped @ (Stopped::Local(_) | Stopped::TooLong(_))) => {
                match stopped {
                    Stopped::TooLong(error) => self.complaints.counted("too long", |jobs| {
                        tracing::warn!(?job, jobs, error, "a file is longer than the metadata folder can tell");
                    }),
                    Stopped::Local(error) => self.complaints.counted("failed", |jobs| {
                        tracing::error!(?job, jobs, error, "failed; retried in a minute");
                    }),
                    Stopped::Away(..) => {}
                }
                // However many fail, there is room for others.
                let fits = queue.due.len() < FAILED_MAX && queue.put(job, now + RETRY);
                queue.overflowed |= !fits;
            }
        }
        drop(queue);
        self.wake.notify_all();
    }
}

impl Meta {
    /// The body of a worker thread.
    pub(super) fn run_background_tasks(&self) {
        while let Some((job, tries)) = self.background.take() {
            let answered = match job {
                Job::Settle(key) => self.end_job(job, self.settle_by_key(key, tries)),
                Job::Rescan => {
                    self.end_job(job, self.rescan().map(|()| true).map_err(|errno| Stopped::Local(errno.to_string())))
                }
                Job::Reap(_) => self.remove_batch(job, tries),
            };
            if tries {
                self.background.tried(answered);
            }
        }
    }

    /// False if data servers did not answer.
    fn end_job(&self, job: Job, result: Result<bool, Stopped>) -> bool {
        let answered = !matches!(result, Err(Stopped::Away(..)));
        self.background.done(job, result);
        answered
    }

    /// Removes a batch of files that share the wait for the disk. False if data servers did not answer.
    fn remove_batch(&self, first: Job, tries: bool) -> bool {
        let mut batch = self.background.take_reaps(BATCH_MAX - 1, tries);
        batch.insert(0, first);
        let keys: Vec<FileKey> =
            batch.iter().filter_map(|job| if let Job::Reap(key) = job { Some(*key) } else { None }).collect();
        if self.background.is_stopped() {
            batch.into_iter().for_each(|job| self.background.give_back(job));
            return true;
        }
        let results = match self.sync_removals() {
            Ok(()) => self.reap(&keys, tries),
            Err(errno) => keys.iter().map(|_| Err(Stopped::Local(errno.to_string()))).collect(),
        };
        batch.into_iter().zip(results).fold(true, |answered, (job, result)| self.end_job(job, result) && answered)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use impresario_wire::message::{Answer, ClusterId, MetaCall, Who};

    use super::*;
    use crate::meta::{MemoryObjects, MetaOptions, MetaService, make};

    const NOW: Duration = Duration::ZERO;

    fn next(tasks: &BackgroundTasks) -> Option<Job> {
        let (job, tries) = tasks.take()?;
        assert!(!tries, "{job:?}");
        Some(job)
    }

    fn on(servers: &[u16]) -> Group {
        Group(servers.into())
    }

    fn away(servers: &[u16]) -> Result<bool, Stopped> {
        Err(Stopped::Away(on(servers), Some(std::io::ErrorKind::TimedOut.into())))
    }

    #[test]
    fn a_job_is_queued_once_and_again_when_requested_while_it_runs() {
        let tasks = BackgroundTasks::default();
        let job = Job::Settle(FileKey(1));
        tasks.push(job, NOW);
        tasks.push(job, NOW);
        assert_eq!(next(&tasks), Some(job));
        tasks.push(job, NOW);
        assert_eq!(tasks.state().0, 1, "running, not queued");
        tasks.done(job, Ok(true));
        assert_eq!(next(&tasks), Some(job));
        tasks.done(job, Ok(true));
        assert_eq!(tasks.state(), (0, false, false));
    }

    /// Or a job that has to wait and asks for itself runs without pause until then.
    #[test]
    fn a_job_that_is_requested_for_later_while_it_runs_is_due_then() {
        let tasks = BackgroundTasks::default();
        let (job, later) = (Job::Reap(FileKey(1)), Duration::from_secs(3600));
        tasks.push(job, NOW);
        assert_eq!(next(&tasks), Some(job));
        tasks.push(job, later);
        tasks.done(job, Ok(true));
        assert!(tasks.wait_idle(NOW), "it is due");
        assert_eq!(tasks.state().0, 1);
        tasks.push(job, NOW);
        assert_eq!(next(&tasks), Some(job));
        [later, NOW, later].into_iter().for_each(|delay| tasks.push(job, delay));
        tasks.done(job, Ok(true));
        assert_eq!(next(&tasks), Some(job), "the earliest request counts");
    }

    #[test]
    fn failures_postpone_the_job() {
        let tasks = BackgroundTasks::default();
        tasks.push(Job::Reap(FileKey(1)), NOW);
        let job = next(&tasks).unwrap();
        tasks.done(job, away(&[0]));
        assert!(tasks.wait_idle(NOW), "nothing is due");
        assert!(tasks.offer(job) && tasks.state().0 == 1, "it is known");
        assert_eq!(tasks.take(), Some((job, true)), "later");
        tasks.done(job, Err(Stopped::Local("broken".into())));
        tasks.tried(true);
        assert!(tasks.wait_idle(NOW));
        assert_eq!(tasks.state().0, 1);
    }

    /// A client can bring it about: it is nothing that the server's administrator must see to.
    #[test]
    fn files_that_are_too_long_are_warned_of_once_in_a_while_and_kept() {
        let tasks = BackgroundTasks::default();
        let lines = impresario_testing::logged(|| {
            for key in 0..20 {
                let job = Job::Settle(FileKey(key));
                tasks.queue.lock().running.insert(job, None);
                let failure = Failure::from(rustix::io::Errno::FBIG);
                tasks.done(job, Err(Stopped::by(failure, Group::default())));
            }
        });
        assert!(lines.len() == 1 && lines[0].starts_with("WARN"), "{lines:?}");
        assert_eq!(tasks.state().0, 20);
    }

    #[test]
    fn jobs_of_servers_that_are_away_are_tried_by_one_thread_and_go_on_when_they_are_back() {
        let tasks = BackgroundTasks::default();
        let reaps = [1, 2, 3].map(|key| Job::Reap(FileKey(key)));
        for job in reaps {
            tasks.push(job, NOW);
            assert_eq!(next(&tasks), Some(job));
            tasks.done(job, away(&[7]));
        }
        assert!(!tasks.may_ask(&on(&[7]), false) && tasks.may_ask(&on(&[7]), true) && tasks.may_ask(&on(&[6]), false));
        assert_eq!(tasks.take(), Some((reaps[0], true)), "after a while");
        assert_eq!(tasks.take_reaps(1, true), [reaps[1]]);
        // The other threads have other jobs meanwhile.
        tasks.push(Job::Settle(FileKey(9)), NOW);
        assert_eq!(next(&tasks), Some(Job::Settle(FileKey(9))));
        assert!(tasks.queue.lock().next_due(Instant::now()).is_none());
        tasks.done(Job::Settle(FileKey(9)), Ok(true));
        reaps[..2].iter().for_each(|job| tasks.done(*job, Ok(true)));
        tasks.tried(true);
        assert_eq!(tasks.take(), Some((reaps[2], true)), "at once");
        tasks.done(reaps[2], Ok(true));
        tasks.tried(true);
        assert!(tasks.may_ask(&on(&[7]), false));
        assert_eq!(tasks.state(), (0, false, false));
    }

    #[test]
    fn of_jobs_that_cannot_be_done_a_bounded_number_is_kept_and_there_is_room_for_others() {
        let tasks = BackgroundTasks::default();
        for (n, failed) in [(0, away(&[7])), (1, Err(Stopped::Local("broken".into())))] {
            for key in 0..QUEUE_MAX as u64 + 10 {
                let job = if n == 0 { Job::Reap(FileKey(key)) } else { Job::Settle(FileKey(key)) };
                let again = match &failed {
                    Err(Stopped::Local(error)) => Err(Stopped::Local(error.clone())),
                    _ => away(&[7]),
                };
                tasks.queue.lock().running.insert(job, None);
                tasks.done(job, again);
            }
        }
        assert_eq!((tasks.state().0, tasks.state().1), (QUEUE_MAX + FAILED_MAX, true));
        assert!(tasks.offer(Job::Reap(FileKey(u64::MAX))));
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
        assert_eq!(next(&tasks), Some(job));
    }

    #[test]
    fn removals_are_taken_together_and_returned() {
        let tasks = BackgroundTasks::default();
        for key in 0..5 {
            tasks.push(Job::Reap(FileKey(key)), NOW);
        }
        tasks.push(Job::Settle(FileKey(9)), NOW);
        tasks.push(Job::Reap(FileKey(7)), Duration::from_secs(3600));
        let first = next(&tasks).unwrap();
        assert_eq!(tasks.take_reaps(3, false).len(), 3);
        let last = tasks.take_reaps(100, false);
        assert_eq!((first, &last[..]), (Job::Reap(FileKey(0)), &[Job::Reap(FileKey(4))][..]));
        tasks.give_back(last[0]);
        assert_eq!(next(&tasks), Some(Job::Settle(FileKey(9))));
        assert_eq!(next(&tasks), Some(last[0]));
    }

    #[test]
    fn later_jobs_wait_and_stopping_ends_the_wait() {
        let tasks = BackgroundTasks::default();
        tasks.push(Job::Reap(FileKey(1)), Duration::from_secs(3600));
        tasks.push(Job::Reap(FileKey(2)), NOW);
        assert_eq!(next(&tasks), Some(Job::Reap(FileKey(2))));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| next(&tasks));
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
            let job = next(&tasks).unwrap();
            tasks.done(job, Ok(true));
        }
        assert_eq!(next(&tasks), Some(Job::Rescan));
    }

    #[test]
    fn a_rescan_waits_for_no_job_that_keeps_failing() {
        let tasks = BackgroundTasks::default();
        for key in 0..QUEUE_MAX as u64 + 10 {
            tasks.push(Job::Reap(FileKey(key)), NOW);
        }
        for _ in 0..QUEUE_MAX {
            let job = next(&tasks).unwrap();
            let fails = matches!(job, Job::Reap(FileKey(5 | 6)));
            tasks.done(job, if fails { Err(Stopped::Local("broken".into())) } else { Ok(true) });
        }
        std::thread::scope(|scope| {
            let next = scope.spawn(|| next(&tasks));
            let began = Instant::now();
            while !next.is_finished() && began.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            tasks.stop();
            assert_eq!(next.join().unwrap(), Some(Job::Rescan));
        });
    }

    #[test]
    fn what_a_search_finds_and_is_known_keeps_its_time() {
        let (tasks, later) = (BackgroundTasks::default(), Duration::from_secs(3600));
        let (waits, runs) = (Job::Settle(FileKey(1)), Job::Settle(FileKey(2)));
        tasks.push(waits, later);
        tasks.push(runs, NOW);
        assert_eq!(next(&tasks), Some(runs));
        assert!(tasks.offer(waits) && tasks.offer(runs));
        tasks.done(runs, Ok(false));
        assert!(tasks.wait_idle(NOW), "something is due");
        assert_eq!(tasks.state().0, 1);
    }

    #[test]
    fn searches_are_rare_while_nothing_gets_done_of_what_they_find() {
        let tasks = BackgroundTasks::default();
        let search = || {
            let mut queue = tasks.queue.lock();
            (queue.rescanned, queue.overflowed) = (None, true);
            drop(queue);
            assert_eq!(next(&tasks), Some(Job::Rescan));
            tasks.done(Job::Rescan, Ok(true));
            tasks.queue.lock().rescan_pause
        };
        let run = |job, found, result| {
            if found {
                assert!(tasks.offer(job))
            } else {
                tasks.push(job, NOW)
            }
            assert_eq!(next(&tasks), Some(job));
            tasks.done(job, result);
        };
        let (in_use, other) = (Job::Reap(FileKey(1)), Job::Settle(FileKey(2)));
        let mut pauses = vec![search()];
        for key in 10..15 {
            run(in_use, true, Ok(false));
            run(Job::Settle(FileKey(key)), true, Err(Stopped::Local("broken".into())));
            run(other, false, Ok(true));
            pauses.push(search());
        }
        assert_eq!(pauses, [5, 10, 20, 40, 60, 60].map(Duration::from_secs));
        run(other, true, Ok(true));
        assert_eq!(tasks.queue.lock().rescan_pause, RESCAN_PAUSE);
    }

    #[test]
    fn a_data_server_that_is_away_does_not_fill_the_log() {
        const FILES: usize = 300;
        let (dir, objects) = (tempfile::tempdir().unwrap(), Arc::<MemoryObjects>::default());
        make(dir.path(), ClusterId(1), &BTreeMap::new()).unwrap();
        let options = MetaOptions { grace: NOW, ..MetaOptions::new(dir.path(), 4) };
        let service = MetaService::open(options, objects.clone()).unwrap();
        let session = service.open_session(Who::default()).unwrap();
        let path = |n: usize| format!("f.{n}").into_bytes();
        let made = |n| {
            let layout = None;
            let create = MetaCall::Create { path: path(n), mode: 0o644, uid: 0, gid: 0, exclusive: true, layout };
            let Answer::Opened(opened) = service.call(session, create) else { panic!("not made") };
            let close = MetaCall::Close { handle: opened.handle, wrote: true };
            assert!(matches!(service.call(session, close), Answer::Done));
            opened.file
        };
        let keys: Vec<FileKey> = (0..FILES).map(made).collect();
        assert!(service.wait_idle(Duration::from_secs(60)));
        objects.set_away(true);
        for n in 0..FILES {
            assert!(matches!(service.call(session, MetaCall::Unlink { path: path(n) }), Answer::Removed { links: 0 }));
        }
        let meta = service.meta.clone();
        drop(service);
        // As its threads do.
        let lines = impresario_testing::logged(|| {
            for keys in keys.chunks(BATCH_MAX) {
                let results = meta.reap(keys, true);
                for (key, result) in keys.iter().zip(results) {
                    assert!(matches!(result, Err(Stopped::Away(_, Some(_)))), "{result:?}");
                    meta.end_job(Job::Reap(*key), result);
                }
            }
        });
        assert!(lines.len() <= 1, "{} lines: {:?}", lines.len(), lines.first());
        assert!(meta.background.complaints.count() >= FILES as u64);
    }
}
