//! A few threads for work that may wait for a device or another server: made on demand, gone when idle.
//!
//! The queue before them is not bounded here: what is put in was admitted by something that is (the
//! engine's queue, a connection's slots).
//!
//! **A hung server holds no thread of a pool.** A thread that waits for another server says so ([`waiting_elsewhere`]). Once
//! it has waited for [`STUCK_AFTER`], it no longer counts against the pool's limit, so that work for other servers goes on;
//! up to [`STUCK_MAX`] threads may be stuck so. While work is queued behind threads that wait, one more thread watches for
//! that.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::outbox::STACK_BYTES;
use impresario_base::lock::{Condvar, Mutex};

/// A thread without work ends after this time.
const LINGER: Duration = Duration::from_secs(10);

/// How long a stopping server waits for the requests that its threads are at.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// A thread that has waited so long for another server is stuck: it works again sooner or later, but not soon.
const STUCK_AFTER: Duration = Duration::from_millis(20);
/// Stuck threads of a pool that do not count against its limit.
const STUCK_MAX: usize = 512;

thread_local! {
    /// The pool that this thread belongs to.
    static POOL: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

/// Runs what waits for another server. If this thread is one of a pool and gets stuck, the pool does without it.
pub(crate) fn waiting_elsewhere<T>(wait: impl FnOnce() -> T) -> T {
    struct Waiting(Arc<Shared>, u64);
    impl Drop for Waiting {
        fn drop(&mut self) {
            self.0.state.lock().waits.retain(|(number, _)| *number != self.1);
        }
    }
    let pool = POOL.with(|pool| pool.borrow().clone());
    let _waiting = pool.map(|pool| {
        let number = pool.begin_wait();
        Waiting(pool, number)
    });
    wait()
}

/// Something to do; dropped undone when the pool is stopped.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// The threads.
pub(crate) struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    threads_max: usize,
    state: Mutex<State>,
    wake: Condvar,
    /// A thread has ended.
    fewer: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Threads beyond the limit that may run now, see [`Workers::allow`].
    extra: usize,
    stopped: bool,
    /// Threads that wait for other servers: a number of each wait, and since when.
    waits: Vec<(u64, Instant)>,
    next_wait: u64,
    /// A thread watches for stuck ones.
    is_watched: bool,
}

impl State {
    /// Threads that may run now, with those that are stuck.
    fn threads_max(&self, usual: usize) -> usize {
        let stuck = self.waits.iter().filter(|(_, since)| since.elapsed() >= STUCK_AFTER).count();
        usual + self.extra + stuck.min(STUCK_MAX)
    }

    /// Counts a thread in that is to be started for a queued job.
    fn may_start(&mut self, usual: usize) -> bool {
        let may = self.idle < self.jobs.len() && self.threads < self.threads_max(usual);
        self.threads += usize::from(may);
        may
    }

    /// Counts in the threads that queued jobs need and the limit allows; how many.
    fn may_start_several(&mut self, usual: usize) -> usize {
        let mut starts = 0;
        while self.threads < self.threads_max(usual) && starts + self.idle < self.jobs.len() {
            self.threads += 1;
            starts += 1;
        }
        starts
    }

    /// Counts in a thread that watches, if one is needed.
    fn may_watch(&mut self) -> bool {
        let may = !self.is_watched && !self.stopped && !self.waits.is_empty() && self.idle < self.jobs.len();
        self.is_watched |= may;
        may
    }
}

impl Workers {
    /// At most `threads_max` threads (at least one).
    pub(crate) fn new(name: &'static str, threads_max: usize) -> Workers {
        let shared = Shared {
            name,
            threads_max: threads_max.max(1),
            state: Mutex::default(),
            wake: Condvar::new(),
            fewer: Condvar::new(),
        };
        Workers { shared: Arc::new(shared) }
    }

    /// Has a job done soon, by another thread.
    pub(crate) fn run(&self, job: Job) {
        let mut state = self.shared.state.lock();
        if state.stopped {
            drop(state);
            return;
        }
        state.jobs.push_back(job);
        let (starts, idle) = (state.may_start(self.shared.threads_max), state.idle > 0);
        let watches = !starts && state.may_watch();
        drop(state);
        if starts {
            self.shared.start();
        } else if idle {
            self.shared.wake.notify_one();
        }
        if watches {
            self.shared.watch();
        }
    }

    /// Lets `extra` threads, which are known to be stuck, run beyond the limit until another number is set.
    pub(crate) fn allow(&self, extra: usize) {
        let mut state = self.shared.state.lock();
        state.extra = extra;
        let starts = if state.stopped { 0 } else { state.may_start_several(self.shared.threads_max) };
        drop(state);
        (0..starts).for_each(|_| self.shared.start());
    }

    /// Jobs that wait for a thread.
    pub(crate) fn waiting(&self) -> usize {
        self.shared.state.lock().jobs.len()
    }

    /// Takes no more, gives up what waits, and waits until the threads have ended with the job they are at, for at
    /// most `patience`. Not for a thread of the pool itself.
    pub(crate) fn stop(&self, patience: Duration) {
        self.give_up();
        let state = self.shared.state.lock();
        let ended = self.shared.fewer.wait_timeout_while(state, patience, |state| state.threads > 0);
        let threads = ended.0.threads;
        if threads > 0 {
            tracing::warn!(threads, pool = self.shared.name, "requests did not end in time; left behind");
        }
    }

    fn give_up(&self) {
        let mut state = self.shared.state.lock();
        state.stopped = true;
        let lost = std::mem::take(&mut state.jobs);
        drop(state);
        drop(lost);
        self.shared.wake.notify_all();
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.give_up();
    }
}

impl Shared {
    /// Starts a thread that is counted already.
    fn start(self: &Arc<Self>) {
        let shared = self.clone();
        let thread = std::thread::Builder::new().name(shared.name.into()).stack_size(STACK_BYTES);
        let work = move || {
            POOL.with(|pool| *pool.borrow_mut() = Some(shared.clone()));
            shared.work();
            POOL.with(|pool| *pool.borrow_mut() = None);
        };
        if let Err(error) = thread.spawn(work) {
            tracing::warn!(%error, pool = self.name, "cannot start a thread; raise its limit (ulimit -u)");
            let mut state = self.state.lock();
            state.threads -= 1;
            // Without any thread the jobs would wait forever: give them up, which answers them.
            let lost = if state.threads == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
            drop(state);
            drop(lost);
        }
    }

    /// Starts the thread that watches, which is noted already. It ends when no job waits for threads that wait.
    fn watch(self: &Arc<Self>) {
        let shared = self.clone();
        let thread = std::thread::Builder::new().name(shared.name.into()).stack_size(STACK_BYTES);
        let watching = move || loop {
            std::thread::sleep(STUCK_AFTER);
            let mut state = shared.state.lock();
            let starts = state.may_start_several(shared.threads_max);
            let is_needed = !state.stopped && !state.jobs.is_empty() && !state.waits.is_empty();
            state.is_watched = is_needed;
            drop(state);
            (0..starts).for_each(|_| shared.start());
            if !is_needed {
                return;
            }
        };
        if thread.spawn(watching).is_err() {
            // Another job tries again.
            self.state.lock().is_watched = false;
        }
    }

    /// Notes that a thread of the pool waits for another server from now on.
    fn begin_wait(self: &Arc<Self>) -> u64 {
        let mut state = self.state.lock();
        state.next_wait += 1;
        let number = state.next_wait;
        state.waits.push((number, Instant::now()));
        let watches = state.may_watch();
        drop(state);
        if watches {
            self.watch();
        }
        number
    }

    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            // Threads that were stuck work again: this one is no longer needed.
            if state.threads > self.threads_max && state.threads > state.threads_max(self.threads_max) {
                break;
            }
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!(pool = self.name, "a request panicked; it was answered with an I/O error");
                }
                state = self.state.lock();
                continue;
            }
            if state.stopped {
                break;
            }
            state.idle += 1;
            let (next, timed_out) = self.wake.wait_timeout(state, LINGER);
            state = next;
            state.idle -= 1;
            if timed_out && state.jobs.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        drop(state);
        self.fewer.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn jobs_run_on_at_most_so_many_threads_and_a_panic_stops_none() {
        let workers = Workers::new("test", 3);
        let (tx, rx) = mpsc::channel();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for n in 0..50 {
            let (tx, now, most) = (tx.clone(), now.clone(), most.clone());
            workers.run(Box::new(move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(2));
                now.fetch_sub(1, Ordering::SeqCst);
                tx.send(n).unwrap();
                assert!(n % 10 != 0, "a deliberate panic");
            }));
        }
        let mut seen: Vec<i32> = (0..50).map(|_| rx.recv_timeout(Duration::from_secs(10)).unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..50).collect::<Vec<_>>());
        assert!((2..=3).contains(&most.load(Ordering::SeqCst)));
        assert_eq!(workers.waiting(), 0);
    }

    #[test]
    fn threads_that_are_stuck_elsewhere_do_not_hold_up_the_others() {
        let workers = Workers::new("test", 2);
        let (tx, rx) = mpsc::channel();
        let (heal, hung) = (Arc::new(Mutex::new(())), Arc::new(Mutex::new(())));
        let is_hung = heal.lock();
        for _ in 0..64 {
            let (heal, hung) = (heal.clone(), hung.clone());
            workers.run(Box::new(move || {
                let _among = hung; // dropped at the end
                waiting_elsewhere(|| drop(heal.lock()));
            }));
        }
        for n in 0..100 {
            let tx = tx.clone();
            workers.run(Box::new(move || tx.send(n).unwrap()));
            assert_eq!(rx.recv_timeout(Duration::from_secs(30)).unwrap(), n);
        }
        assert_eq!(Arc::strong_count(&hung), 65, "they are stuck still");
        drop(is_hung);
        let deadline = Instant::now() + Duration::from_secs(30);
        while Arc::strong_count(&hung) > 1 || workers.shared.state.lock().threads > 2 {
            assert!(Instant::now() < deadline, "threads beyond the limit do not end");
            workers.run(Box::new(|| {}));
            std::thread::yield_now();
        }
        assert!(workers.shared.state.lock().waits.is_empty());
    }

    #[test]
    fn what_waits_when_it_stops_is_dropped() {
        struct Tell(mpsc::Sender<()>);
        impl Drop for Tell {
            fn drop(&mut self) {
                self.0.send(()).unwrap();
            }
        }
        let workers = Workers::new("test", 1);
        let (tx, rx) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let begun = tx.clone();
        workers.run(Box::new(move || {
            begun.send(()).unwrap();
            gate.recv().unwrap();
        }));
        rx.recv_timeout(Duration::from_secs(5)).unwrap();
        let tell = Tell(tx.clone());
        workers.run(Box::new(move || drop(tell)));
        workers.stop(Duration::from_millis(10));
        rx.recv_timeout(Duration::from_secs(5)).unwrap();
        go.send(()).unwrap();
        workers.stop(Duration::from_secs(5));
        assert_eq!(workers.shared.state.lock().threads, 0);
        let tell = Tell(tx);
        workers.run(Box::new(move || drop(tell)));
        rx.recv_timeout(Duration::from_secs(5)).unwrap();
    }
}
