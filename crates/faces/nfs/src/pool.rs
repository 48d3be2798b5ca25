//! The threads that call the file systems: a bounded number, fairly divided among connections.
//!
//! A call may take long, or hang with the file system below. No connection therefore has more than a share of the threads
//! at once, and connections take turns. What waits is bounded by the calls that connections may have under way.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex};
use rustc_hash::FxHashMap;

/// A thread without work ends after this time.
const LINGER: Duration = Duration::from_secs(10);
/// Stack of a thread; a file system's library may be called on it.
const STACK_BYTES: usize = 512 << 10;

/// Something to do; dropped undone when the pool is stopped.
pub type Job = Box<dyn FnOnce() + Send>;

/// The threads.
pub struct Pool {
    shared: Arc<Shared>,
}

struct Shared {
    name: &'static str,
    threads_max: usize,
    share_max: usize,
    state: Mutex<State>,
    wake: Condvar,
    fewer: Condvar,
}

#[derive(Default)]
struct State {
    lines: FxHashMap<u32, Line>,
    /// The lines whose turn it is, in order: they have jobs and less than their share of threads.
    turns: VecDeque<u32>,
    waiting: usize,
    threads: usize,
    idle: usize,
    stopped: bool,
}

/// The jobs of one connection.
#[derive(Default)]
struct Line {
    jobs: VecDeque<Job>,
    running: usize,
    has_turn: bool,
}

impl State {
    /// Puts a line among those whose turn it is, if it belongs there.
    fn line_up(&mut self, of: u32, share_max: usize) {
        let Some(line) = self.lines.get_mut(&of) else { return };
        if line.jobs.is_empty() && line.running == 0 {
            self.lines.remove(&of);
        } else if !line.has_turn && !line.jobs.is_empty() && line.running < share_max {
            line.has_turn = true;
            self.turns.push_back(of);
        }
    }

    fn next(&mut self, share_max: usize) -> Option<(u32, Job)> {
        let of = self.turns.pop_front()?;
        let line = self.lines.get_mut(&of)?;
        line.has_turn = false;
        let job = line.jobs.pop_front()?;
        line.running += 1;
        self.waiting -= 1;
        self.line_up(of, share_max);
        Some((of, job))
    }

    fn done(&mut self, of: u32, share_max: usize) {
        if let Some(line) = self.lines.get_mut(&of) {
            line.running -= 1;
        }
        self.line_up(of, share_max);
    }
}

impl Pool {
    /// At most `threads_max` threads, of which one connection has `share_max` at most (each at least one).
    pub fn new(name: &'static str, threads_max: usize, share_max: usize) -> Pool {
        let (state, wake, fewer) = (Mutex::default(), Condvar::new(), Condvar::new());
        let shared = Shared { name, threads_max: threads_max.max(1), share_max: share_max.max(1), state, wake, fewer };
        Pool { shared: Arc::new(shared) }
    }

    /// Has a job of a connection done soon, by another thread.
    pub fn run(&self, of: u32, job: Job) {
        let mut state = self.shared.state.lock();
        if state.stopped {
            drop(state);
            return;
        }
        state.waiting += 1;
        state.lines.entry(of).or_default().jobs.push_back(job);
        state.line_up(of, self.shared.share_max);
        if state.idle >= state.waiting || state.threads >= self.shared.threads_max {
            let idle = state.idle > 0;
            drop(state);
            if idle {
                self.shared.wake.notify_one();
            }
            return;
        }
        state.threads += 1;
        drop(state);
        let shared = self.shared.clone();
        let thread = std::thread::Builder::new().name(shared.name.into()).stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(move || shared.work()) {
            tracing::warn!(%error, pool = self.shared.name, "cannot start a thread; raise its limit (ulimit -u)");
            let mut state = self.shared.state.lock();
            state.threads -= 1;
            // With no thread at all none would come: give the jobs up, which answers them.
            let lost = if state.threads == 0 { state.give_up() } else { Vec::new() };
            drop(state);
            drop(lost);
        }
    }

    /// Jobs that wait for a thread.
    pub fn waiting(&self) -> usize {
        self.shared.state.lock().waiting
    }

    /// Takes no more, gives up what waits, and waits until the threads have ended with the job they are at, for at most
    /// `patience`. Not for a thread of the pool itself.
    pub fn stop(&self, patience: Duration) {
        self.close();
        let state = self.shared.state.lock();
        let ended = self.shared.fewer.wait_timeout_while(state, patience, |state| state.threads > 0);
        let threads = ended.0.threads;
        if threads > 0 {
            tracing::warn!(threads, pool = self.shared.name, "calls did not end in time; left behind");
        }
    }

    fn close(&self) {
        let mut state = self.shared.state.lock();
        state.stopped = true;
        let lost = state.give_up();
        drop(state);
        drop(lost);
        self.shared.wake.notify_all();
    }
}

impl State {
    fn give_up(&mut self) -> Vec<VecDeque<Job>> {
        self.turns.clear();
        self.waiting = 0;
        let give_up = |line: &mut Line| {
            line.has_turn = false;
            std::mem::take(&mut line.jobs)
        };
        self.lines.values_mut().map(give_up).collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some((of, job)) = state.next(self.share_max) {
                drop(state);
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    tracing::error!(pool = self.name, "a call panicked; it was answered with an error");
                }
                state = self.state.lock();
                state.done(of, self.share_max);
                continue;
            }
            if state.stopped {
                break;
            }
            state.idle += 1;
            let (next, timed_out) = self.wake.wait_timeout(state, LINGER);
            state = next;
            state.idle -= 1;
            if timed_out && state.turns.is_empty() {
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
    use std::sync::mpsc;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn a_connection_whose_calls_hang_leaves_threads_to_others() {
        let pool = Pool::new("test", 4, 2);
        let (hang, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        for _ in 0..10 {
            let gate = gate.clone();
            pool.run(
                1,
                Box::new(move || {
                    let _ = gate.lock().recv();
                }),
            );
        }
        let (tell, told) = mpsc::channel();
        for n in 0..20 {
            let tell = tell.clone();
            pool.run(2 + n % 3, Box::new(move || tell.send(n).unwrap()));
        }
        let mut done: Vec<u32> = (0..20).map(|_| told.recv_timeout(PATIENCE).unwrap()).collect();
        done.sort_unstable();
        assert_eq!(done, (0..20).collect::<Vec<_>>());
        assert_eq!(pool.waiting(), 8);
        // Those that wait are given up, those under way end.
        drop(hang);
        pool.stop(PATIENCE);
        assert_eq!((pool.waiting(), pool.shared.state.lock().threads), (0, 0));
    }

    #[test]
    fn a_panic_ends_its_job_only() {
        let pool = Pool::new("test", 1, 1);
        pool.run(1, Box::new(|| panic!("of a test")));
        let (tell, told) = mpsc::channel();
        pool.run(1, Box::new(move || tell.send(()).unwrap()));
        told.recv_timeout(PATIENCE).unwrap();
        pool.stop(PATIENCE);
        assert!(pool.shared.state.lock().lines.is_empty());
    }
}
