//! Threads for work that may wait for a device, a file system or another server: made on demand, gone when idle. When none can be
//! started and there is none, jobs are dropped undone; a pool whose jobs must not be lost keeps one ([`Workers::kept`]).
//!
//! The queue before them is not bounded here: what is put in was admitted by something that is (the engine's queue, a
//! connection's slots).
//!
//! **A party that hangs leaves threads to others.** Jobs may be put in for parties, such as connections ([`Workers::fair`]).
//! Parties take turns, and none has more than a share of the threads at once.
//!
//! **A hung server holds no thread of a pool.** A thread that waits for another server says so ([`waiting_elsewhere`]). Once
//! it has waited for [`STUCK_AFTER`] (or what the pool says, [`Workers::patient`]), it no longer counts against the pool's limit, so that work for other servers goes on;
//! up to [`STUCK_MAX`] threads may be stuck so. While work is queued behind threads that wait, one more thread watches for
//! that.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use rustc_hash::FxHashMap;

/// A thread without work ends after this time.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 10_000 });
/// Stack of a thread; a file system's library may be called on it.
const STACK_BYTES: usize = 512 << 10;

/// How long a stopping server waits for the requests that its threads are at.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// A thread that has waited so long for another server is stuck: it works again sooner or later, but not soon.
const STUCK_AFTER: Duration = Duration::from_millis(20);
/// How often it is looked for stuck threads at least.
const WATCH_EVERY: Duration = Duration::from_millis(50);
/// Stuck threads of a pool that do not count against its limit.
pub const STUCK_MAX: usize = 512;

thread_local! {
    /// The pool that this thread belongs to.
    static POOL: RefCell<Option<Arc<Shared>>> = const { RefCell::new(None) };
}

/// Runs what waits for another server. If this thread is one of a pool and gets stuck, the pool does without it.
pub fn waiting_elsewhere<T>(wait: impl FnOnce() -> T) -> T {
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

/// Stops pools as [`Workers::stop`] does, which together take no longer than `patience`.
pub fn stop_all<'a>(pools: impl IntoIterator<Item = &'a Workers, IntoIter: Clone>, patience: Duration) {
    let (pools, deadline) = (pools.into_iter(), Instant::now() + patience);
    pools.clone().for_each(Workers::give_up);
    pools.for_each(|pool| pool.stop(deadline.saturating_duration_since(Instant::now())));
}

/// Something to do; dropped undone when the pool is stopped, or has no thread and cannot start one.
pub type Job = Box<dyn FnOnce() + Send>;

/// The threads.
pub struct Workers {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    threads_max: usize,
    /// Threads that one party may have at once.
    share_max: usize,
    state: Mutex<State>,
    wake: Condvar,
    /// A thread has ended.
    fewer: Condvar,
    /// The system starts none.
    #[cfg(any(test, feature = "testing"))]
    is_refused: std::sync::atomic::AtomicBool,
}

/// The jobs of one party.
#[derive(Default)]
struct PartyQueue {
    jobs: VecDeque<Job>,
    running: usize,
    has_turn: bool,
}

#[derive(Default)]
struct State {
    lines: FxHashMap<u64, PartyQueue>,
    /// The parties whose turn it is, in order: they have jobs and less than their share of threads.
    turns: VecDeque<u64>,
    /// Jobs that wait for a thread.
    waiting: usize,
    threads: usize,
    idle: usize,
    /// Threads beyond the limit that may run now, see [`Workers::allow`].
    extra: usize,
    stopped: bool,
    /// Threads that wait for other servers: a number of each wait, and since when.
    waits: Vec<(u64, Instant)>,
    next_wait: u64,
    /// A thread that has waited so long is stuck.
    stuck_after: Duration,
    /// A thread watches for stuck ones.
    is_watched: bool,
}

impl State {
    /// Puts a party among those whose turn it is, if it belongs there.
    fn line_up(&mut self, party: u64, share_max: usize) {
        let Some(line) = self.lines.get_mut(&party) else { return };
        if line.jobs.is_empty() && line.running == 0 {
            self.lines.remove(&party);
        } else if !line.has_turn && !line.jobs.is_empty() && line.running < share_max {
            line.has_turn = true;
            self.turns.push_back(party);
        }
    }

    fn next(&mut self, share_max: usize) -> Option<(u64, Job)> {
        let party = self.turns.pop_front()?;
        let line = self.lines.get_mut(&party)?;
        line.has_turn = false;
        let job = line.jobs.pop_front()?;
        line.running += 1;
        self.waiting -= 1;
        self.line_up(party, share_max);
        Some((party, job))
    }

    fn done(&mut self, party: u64, share_max: usize) {
        if let Some(line) = self.lines.get_mut(&party) {
            line.running -= 1;
        }
        self.line_up(party, share_max);
    }

    /// The jobs that wait, to be dropped without the lock.
    fn give_up(&mut self) -> Vec<VecDeque<Job>> {
        self.turns.clear();
        self.waiting = 0;
        let jobs_of = |line: &mut PartyQueue| {
            line.has_turn = false;
            std::mem::take(&mut line.jobs)
        };
        self.lines.values_mut().map(jobs_of).collect()
    }

    /// Threads that may run now, with those that are stuck.
    fn threads_max(&self, usual: usize) -> usize {
        let stuck = self.waits.iter().filter(|(_, since)| since.elapsed() >= self.stuck_after).count();
        usual + self.extra + stuck.min(STUCK_MAX)
    }

    /// Counts in the threads that queued jobs need and the limit allows; how many.
    fn may_start(&mut self, usual: usize) -> usize {
        let mut starts = 0;
        while self.threads < self.threads_max(usual) && starts + self.idle < self.waiting {
            self.threads += 1;
            starts += 1;
        }
        starts
    }

    /// Counts in a thread that watches, if one is needed.
    fn may_watch(&mut self) -> bool {
        let may = !self.is_watched && !self.stopped && !self.waits.is_empty() && self.idle < self.waiting;
        self.is_watched |= may;
        may
    }
}

impl Workers {
    /// At most `threads_max` threads (at least one).
    pub fn new(name: &'static str, threads_max: usize) -> Workers {
        Workers::fair(name, threads_max, usize::MAX)
    }

    /// Its threads are stuck when they have waited for `stuck_after`: for work that often takes more than [`STUCK_AFTER`] and is
    /// not stuck.
    pub fn patient(self, stuck_after: Duration) -> Workers {
        self.shared.state.lock().stuck_after = stuck_after;
        self
    }

    /// As [`Workers::new`]; one party has `share_max` of them at most (at least one).
    pub fn fair(name: &'static str, threads_max: usize, share_max: usize) -> Workers {
        let state = Mutex::new(State { stuck_after: STUCK_AFTER, ..State::default() });
        let (wake, fewer) = (Condvar::new(), Condvar::new());
        let shared = Shared {
            name,
            threads_max: threads_max.max(1),
            share_max: share_max.max(1),
            state,
            wake,
            fewer,
            #[cfg(any(test, feature = "testing"))]
            is_refused: false.into(),
        };
        Workers { shared: Arc::new(shared) }
    }

    /// Keeps one thread, which is started now, as long as this is there: every job is done then, one after the other while no
    /// more threads can be started.
    ///
    /// # Errors
    /// That of the system, which starts none.
    pub fn kept(self) -> std::io::Result<Workers> {
        self.shared.state.lock().threads += 1;
        if let Err(error) = self.shared.spawn(true) {
            self.shared.state.lock().threads -= 1;
            return Err(error);
        }
        Ok(self)
    }

    /// From now on the system starts no thread for it, or does again.
    #[cfg(any(test, feature = "testing"))]
    pub fn refuse_threads(&self, refuses: bool) {
        self.shared.is_refused.store(refuses, std::sync::atomic::Ordering::SeqCst);
    }

    /// Has a job done soon, by another thread.
    pub fn run(&self, job: Job) {
        self.run_for(0, job);
    }

    /// The same for a party.
    pub fn run_for(&self, party: u64, job: Job) {
        let mut state = self.shared.state.lock();
        if state.stopped {
            drop(state);
            return;
        }
        state.waiting += 1;
        state.lines.entry(party).or_default().jobs.push_back(job);
        state.line_up(party, self.shared.share_max);
        let (starts, idle) = (state.may_start(self.shared.threads_max), state.idle > 0);
        let watches = starts == 0 && state.may_watch();
        drop(state);
        if starts == 0 && idle {
            self.shared.wake.notify_one();
        }
        self.shared.start(starts);
        if watches {
            self.shared.watch();
        }
    }

    /// Lets `extra` threads, which are known to be stuck, run beyond the limit until another number is set.
    pub fn allow(&self, extra: usize) {
        let mut state = self.shared.state.lock();
        state.extra = extra;
        let starts = if state.stopped { 0 } else { state.may_start(self.shared.threads_max) };
        drop(state);
        self.shared.start(starts);
    }

    /// Jobs that wait for a thread.
    pub fn waiting(&self) -> usize {
        self.shared.state.lock().waiting
    }

    /// Takes no more, gives up what waits, and waits until the threads have ended with the job they are at, for at
    /// most `patience`. Not for a thread of the pool itself.
    pub fn stop(&self, patience: Duration) {
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
        let lost = state.give_up();
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
    /// Starts threads that are counted already.
    fn start(self: &Arc<Self>, threads: usize) {
        (0..threads).for_each(|_| self.start_one());
    }

    fn thread(&self) -> std::thread::Builder {
        let stack_bytes = STACK_BYTES;
        #[cfg(any(test, feature = "testing"))]
        let stack_bytes = match self.is_refused.load(std::sync::atomic::Ordering::SeqCst) {
            true => usize::MAX / 2,
            false => stack_bytes,
        };
        std::thread::Builder::new().name(self.name.into()).stack_size(stack_bytes)
    }

    fn spawn(self: &Arc<Self>, is_kept: bool) -> std::io::Result<()> {
        let shared = self.clone();
        let work = move || {
            POOL.with(|pool| *pool.borrow_mut() = Some(shared.clone()));
            shared.work(is_kept);
            POOL.with(|pool| *pool.borrow_mut() = None);
        };
        self.thread().spawn(work).map(drop)
    }

    fn start_one(self: &Arc<Self>) {
        if let Err(error) = self.spawn(false) {
            tracing::warn!(%error, pool = self.name, "cannot start a thread; raise its limit (ulimit -u)");
            let mut state = self.state.lock();
            state.threads -= 1;
            // Without any thread the jobs would wait forever: give them up, which answers them.
            let lost = if state.threads == 0 { state.give_up() } else { Vec::new() };
            drop(state);
            drop(lost);
            // One that is idle was not woken for the job.
            self.wake.notify_one();
        }
    }

    /// Starts the thread that watches, which is noted already. It ends when no job waits for threads that wait.
    fn watch(self: &Arc<Self>) {
        let shared = self.clone();
        let every = self.state.lock().stuck_after.min(WATCH_EVERY);
        let watching = move || loop {
            std::thread::sleep(every);
            let mut state = shared.state.lock();
            let starts = state.may_start(shared.threads_max);
            let is_needed = !state.stopped && state.waiting > 0 && !state.waits.is_empty();
            state.is_watched = is_needed;
            drop(state);
            shared.start(starts);
            if !is_needed {
                return;
            }
        };
        if self.thread().spawn(watching).is_err() {
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

    fn work(&self, is_kept: bool) {
        let mut state = self.state.lock();
        loop {
            // Threads that were stuck work again: this one is no longer needed.
            if !is_kept && state.threads > self.threads_max && state.threads > state.threads_max(self.threads_max) {
                break;
            }
            if let Some((party, job)) = state.next(self.share_max) {
                drop(state);
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!(pool = self.name, "a request panicked; it was answered with an I/O error");
                }
                state = self.state.lock();
                state.done(party, self.share_max);
                continue;
            }
            if state.stopped {
                break;
            }
            state.idle += 1;
            let (next, timed_out) = self.wake.wait_timeout(state, LINGER);
            state = next;
            state.idle -= 1;
            if timed_out && !is_kept && state.turns.is_empty() {
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
    fn pools_that_stop_together_share_their_patience() {
        let hangs = Arc::new(Mutex::new(()));
        let is_hung = hangs.lock();
        let pools = ["a", "b", "c"].map(|name| Workers::new(name, 1));
        for pool in &pools {
            let (hangs, (tx, rx)) = (hangs.clone(), mpsc::channel());
            pool.run(Box::new(move || {
                tx.send(()).unwrap();
                drop(hangs.lock());
            }));
            rx.recv_timeout(Duration::from_secs(30)).unwrap();
        }
        let (began, patience) = (Instant::now(), Duration::from_secs(1));
        stop_all(&pools, patience);
        assert!((patience..patience * 5 / 2).contains(&began.elapsed()), "{:?}", began.elapsed());
        drop(is_hung);
    }

    #[test]
    fn threads_that_wait_less_than_the_pool_is_patient_count() {
        let workers = Workers::new("test", 2).patient(Duration::from_secs(30));
        let (tx, rx) = mpsc::channel();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        for _ in 0..12 {
            let (tx, now, most) = (tx.clone(), now.clone(), most.clone());
            workers.run(Box::new(move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                waiting_elsewhere(|| std::thread::sleep(5 * STUCK_AFTER));
                now.fetch_sub(1, Ordering::SeqCst);
                tx.send(()).unwrap();
            }));
        }
        (0..12).for_each(|_| rx.recv_timeout(Duration::from_secs(30)).unwrap());
        assert_eq!(most.load(Ordering::SeqCst), 2);
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

    #[test]
    fn a_kept_thread_does_all_jobs_when_none_can_be_started() {
        let workers = Workers::fair("test", 4, 1).kept().unwrap();
        let (tell, told) = mpsc::channel();
        let put = |jobs: std::ops::Range<u64>| {
            for n in jobs.clone() {
                let tell = tell.clone();
                workers.run_for(n % 4, Box::new(move || tell.send(n).unwrap()));
            }
            let mut done: Vec<u64> = jobs.clone().map(|_| told.recv_timeout(PATIENCE).unwrap()).collect();
            done.sort_unstable();
            assert_eq!(done, jobs.collect::<Vec<_>>());
        };
        put(0..20);
        // All others end.
        std::thread::sleep(4 * LINGER);
        workers.refuse_threads(true);
        put(20..40);
        workers.stop(PATIENCE);
        assert_eq!(workers.shared.state.lock().threads, 0);

        let workers = Workers::new("test", 4);
        workers.refuse_threads(true);
        let shared = workers.shared.clone();
        assert!(workers.kept().is_err());
        assert_eq!(shared.state.lock().threads, 0);
    }

    #[test]
    fn a_party_whose_jobs_hang_leaves_threads_to_others() {
        let workers = Workers::fair("test", 4, 2);
        let (hang, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        for _ in 0..10 {
            let gate = gate.clone();
            workers.run_for(
                1,
                Box::new(move || {
                    let _ = gate.lock().recv();
                }),
            );
        }
        let (tell, told) = mpsc::channel();
        for n in 0..20 {
            let tell = tell.clone();
            workers.run_for(2 + n % 3, Box::new(move || tell.send(n).unwrap()));
        }
        let mut done: Vec<u64> = (0..20).map(|_| told.recv_timeout(PATIENCE).unwrap()).collect();
        done.sort_unstable();
        assert_eq!(done, (0..20).collect::<Vec<_>>());
        assert_eq!(workers.waiting(), 8);
        // Those that wait are given up, those under way end.
        drop(hang);
        workers.stop(PATIENCE);
        let state = workers.shared.state.lock();
        assert!(state.lines.is_empty());
        assert_eq!((state.waiting, state.threads), (0, 0));
    }
}
