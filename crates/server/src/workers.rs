//! A few threads for work that may wait for a device or another server: made on demand, gone when idle.
//!
//! The queue before them is not bounded here: what is put in was admitted by something that is (the
//! engine's queue, a connection's slots).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::outbox::STACK_BYTES;
use impresario_base::lock::{Condvar, Mutex};

/// A thread without work ends after this time.
const LINGER: Duration = Duration::from_secs(10);

/// How long a stopping server waits for the requests that its threads are at.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

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
    stopped: bool,
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
        if state.idle >= state.jobs.len() || state.threads >= self.shared.threads_max {
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
            // With no thread at all nobody would come: give the jobs up, which answers them.
            let lost = if state.threads == 0 { std::mem::take(&mut state.jobs) } else { VecDeque::new() };
            drop(state);
            drop(lost);
        }
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
    fn work(&self) {
        let mut state = self.state.lock();
        loop {
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
