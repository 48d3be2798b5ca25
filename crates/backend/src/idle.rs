//! A thread that does now and then what idleness asks for, until its owner goes, and threads that close what may take long.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex};
use impresario_base::time::wait_while;

use crate::Handle;

/// How long its end waits for work under way.
const STOP_MAX: Duration = Duration::from_secs(5);
/// Closes at a time.
pub(crate) const CLOSERS_MAX: usize = 4;
/// Further ones of files whose removals wait for them.
const HURRIED_MAX: usize = 16;

/// What is closed when it is dropped.
pub(crate) type Closing = Box<dyn Send>;

/// Closes what waits for a file system in threads of its own, which end when there is nothing more: up to three that hang hold up
/// no other. If four do, what comes waits behind them, unless a sync that needs it closed takes it or a removal hurries it, and
/// counts as open meanwhile: as it becomes more, so others are evicted earlier, and where it is more than may be open calls close
/// what they take out themselves.
#[derive(Clone, Default)]
pub(crate) struct Closers(Arc<Mutex<Turns>>);

#[derive(Default)]
struct Turns {
    waiting: VecDeque<Waiting>,
    threads: usize,
    next_batch: u64,
}

struct Waiting {
    of: Handle,
    closing: Closing,
    /// Number of [`Closers::enqueue`]; 0: of none.
    batch: u64,
}

impl Closers {
    /// Drops this, which the file has open, soon; now, if there is no thread for that.
    pub(crate) fn close(&self, file: Handle, closing: Closing) {
        let mut turns = self.0.lock();
        turns.waiting.push_back(Waiting { of: file, closing, batch: 0 });
        if turns.threads >= CLOSERS_MAX {
            return;
        }
        turns.threads += 1;
        drop(turns);
        let closers = self.clone();
        let thread = std::thread::Builder::new().name("tree closes".into());
        if thread.spawn(move || closers.work()).is_err() {
            self.work();
        }
    }

    /// Has these wait for their turn, and gives their number for [`Closers::work_off`].
    pub(crate) fn enqueue(&self, closings: impl Iterator<Item = (Handle, Closing)>) -> u64 {
        let mut turns = self.0.lock();
        turns.next_batch += 1;
        let batch = turns.next_batch;
        turns.waiting.extend(closings.map(|(of, closing)| Waiting { of, closing, batch }));
        batch
    }

    /// Drops those of a number, one after the other, that have not had their turn by others.
    pub(crate) fn work_off(&self, batch: u64) {
        let next = || {
            let mut turns = self.0.lock();
            let at = turns.waiting.iter().position(|waiting| waiting.batch == batch)?;
            turns.waiting.remove(at)
        };
        while let Some(Waiting { closing, .. }) = next() {
            close(closing);
        }
    }

    /// Has what of a file has not had its turn closed by a thread of its own, as long as there are not many.
    pub(crate) fn hurry(&self, file: &Handle) {
        let mut turns = self.0.lock();
        if turns.threads >= CLOSERS_MAX + HURRIED_MAX || !turns.waiting.iter().any(|waiting| waiting.of == *file) {
            return;
        }
        turns.threads += 1;
        drop(turns);
        let (closers, file) = (self.clone(), *file);
        let thread = std::thread::Builder::new().name("tree closes".into()).spawn(move || {
            closers.take(&file).into_iter().for_each(close);
            closers.work();
        });
        if thread.is_err() {
            self.0.lock().threads -= 1;
        }
    }

    /// Takes out what of a file has not had its turn, for [`close`].
    pub(crate) fn take(&self, file: &Handle) -> Vec<Closing> {
        let (mut taken, mut turns) = (Vec::new(), self.0.lock());
        for _ in 0..turns.waiting.len() {
            match turns.waiting.pop_front() {
                Some(Waiting { of, closing, .. }) if of == *file => taken.push(closing),
                // Once round, so that their order stays.
                others => turns.waiting.extend(others),
            }
        }
        taken
    }

    fn work(&self) {
        loop {
            let mut turns = self.0.lock();
            let Some(Waiting { closing, .. }) = turns.waiting.pop_front() else {
                turns.threads -= 1;
                return;
            };
            drop(turns);
            close(closing);
        }
    }
}

/// Closes this now. A panic was reported; the turns of others come nevertheless.
pub(crate) fn close(closing: Closing) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(closing)));
}

/// Ends its thread when it is dropped.
pub(crate) struct IdleThread {
    stop: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

impl IdleThread {
    /// Calls `work` twice in each `idle` time.
    pub(crate) fn start(name: &str, idle: Duration, work: impl Fn() + Send + 'static) -> io::Result<IdleThread> {
        let stop = Arc::new((Mutex::new(false), Condvar::new()));
        let period = (idle / 2).max(Duration::from_millis(10));
        let thread = std::thread::Builder::new().name(name.into()).spawn({
            let stop = stop.clone();
            move || {
                loop {
                    let (stopped, _) = stop.1.wait_timeout_while(stop.0.lock(), period, |stopped| !*stopped);
                    if *stopped {
                        return;
                    }
                    drop(stopped);
                    work();
                }
            }
        })?;
        Ok(IdleThread { stop, thread: Some(thread) })
    }
}

impl Drop for IdleThread {
    fn drop(&mut self) {
        *self.stop.0.lock() = true;
        self.stop.1.notify_all();
        let Some(thread) = self.thread.take() else { return };
        // A file system that hangs must not keep the server from ending.
        if wait_while(&|| !thread.is_finished(), STOP_MAX) {
            let _ = thread.join(); // it does not panic; if it did, that was reported
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closes_that_panic_hold_up_no_other() {
        struct Panics;
        impl Drop for Panics {
            fn drop(&mut self) {
                panic!("this close panics, as the test wants it");
            }
        }
        let (closers, file) = (Closers::default(), Handle::new(b"file").unwrap());
        (0..2 * CLOSERS_MAX).for_each(|_| closers.close(file, Box::new(Panics)));
        impresario_testing::until("the panics have ended", || closers.0.lock().threads == 0);
        let alive = Arc::new(());
        closers.close(file, Box::new(alive.clone()));
        impresario_testing::until("it is closed", || Arc::strong_count(&alive) == 1);
    }
}
