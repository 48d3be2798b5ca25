//! A thread that does now and then what idleness asks for, until its owner goes.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};

/// How long its end waits for work under way.
const STOP_MAX: Duration = Duration::from_secs(5);

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
        let until = Instant::now() + STOP_MAX;
        while !thread.is_finished() {
            if Instant::now() > until {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = thread.join(); // it does not panic; if it did, that was reported
    }
}
