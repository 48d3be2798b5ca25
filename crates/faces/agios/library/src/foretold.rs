//! Predictions from recorded runs (agios-2013, IV), loaded by a separate thread so that neither starting nor serving
//! waits.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use impresario_base::lock::{Condvar, Mutex};
use impresario_base::time::wait_while;
use impresario_embed::guard;
use impresario_trace::Space;
use impresario_trace::predict::RunsOf;

use crate::library::Shared;
use crate::owner::Message;

/// The writer recorded in this library's traces; other traces are refused.
pub const TRACED_BY: &str = "libagios";

#[derive(Default)]
struct Progress {
    loading: u32,
    /// The result of the last completed load.
    failure: Option<String>,
    threads: Vec<JoinHandle<()>>,
    stopped: bool,
}

/// The loads of recorded runs.
#[derive(Default)]
pub struct Foretelling {
    state: Arc<(Mutex<Progress>, Condvar)>,
}

impl Foretelling {
    /// Starts loading traces: files, and folders of them. Loads run one at a time.
    pub fn begin(&self, shared: &Arc<Shared>, traces: Vec<PathBuf>) {
        let (state, shared) = (Arc::clone(&self.state), Arc::clone(shared));
        let mut progress = self.state.0.lock();
        progress.threads.retain(|thread| !thread.is_finished());
        let before = progress.threads.pop();
        progress.loading += 1;
        let _quiet = guard::Quiet::new(); // the thread inherits it
        let load = move || {
            if let Some(before) = before {
                let _ = before.join();
            }
            let failure = if state.0.lock().stopped { None } else { load(&shared, &traces).err() };
            if let Some(why) = &failure {
                shared.complain(&format!("no requests are predicted: {why}"));
            }
            let mut progress = state.0.lock();
            progress.failure = failure;
            progress.loading -= 1;
            state.1.notify_all();
        };
        match std::thread::Builder::new().name("agios-runs".into()).spawn(load) {
            Ok(thread) => progress.threads.push(thread),
            Err(e) => {
                progress.loading -= 1;
                progress.failure = Some(format!("the thread that loads them cannot be started ({e})"));
            }
        }
    }

    /// Waits until no load is running: a load uses at most 16 traces and a million requests.
    pub fn wait(&self) -> Result<(), String> {
        let (progress, ended) = &*self.state;
        let progress = ended.wait_while(progress.lock(), |progress| progress.loading > 0);
        progress.failure.clone().map_or(Ok(()), Err)
    }

    /// No other load begins.
    pub fn begin_stop(&self) {
        self.state.0.lock().stopped = true;
    }

    /// Ends after the current load, at most within `patience`: a load from a file system that hangs is left behind.
    pub fn stop(&self, patience: Duration) {
        self.begin_stop();
        let threads = std::mem::take(&mut self.state.0.lock().threads);
        if wait_while(&|| threads.iter().any(|thread| !thread.is_finished()), patience) {
            threads.into_iter().for_each(|thread| _ = thread.join());
        }
    }
}

fn load(shared: &Shared, traces: &[PathBuf]) -> Result<(), String> {
    let runs = RunsOf { server: TRACED_BY, space: Space::default(), holds: &|_| true };
    let loaded = runs.load(traces).map_err(|e| e.to_string())?;
    loaded.passed_over.iter().for_each(|why| shared.complain(&format!("passed over among the recorded runs: {why}")));
    shared.inbox.tell(Message::Foretold(Some(Arc::new(loaded.queues))));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_that_hangs_is_left_behind() {
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let foretelling = Foretelling::default();
        let hangs = std::thread::spawn(move || _ = gate.recv());
        foretelling.state.0.lock().threads.push(hangs);
        foretelling.stop(Duration::from_millis(20));
        drop(go);
    }
}
