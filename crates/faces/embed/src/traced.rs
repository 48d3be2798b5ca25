//! A trace of the requests served by a program's scheduler, in the project's format (doc/TRACES.md).

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_engine::now;
use impresario_trace::live::{LiveOptions, LiveStatus, PathOf};
use impresario_trace::{Header, Recorder, TraceError};

use crate::{Scheduler, guard};

/// How a trace is written.
pub struct Traces {
    /// A description of the trace's origin, such as the program's name.
    pub command: String,
    /// Memory for completed requests not yet written, bytes. A request that finds it full is not traced.
    pub buffer_bytes: usize,
    /// The trace ends at about this size, bytes.
    pub limit_bytes: u64,
    /// Returns the path of a file's key.
    pub path_of: Option<PathOf>,
    /// Called once if the trace ends early: a full disk, the limit.
    pub complain: Box<dyn FnOnce(&TraceError) + Send>,
}

impl Default for Traces {
    fn default() -> Self {
        Traces {
            command: String::new(),
            buffer_bytes: 8 << 20,
            limit_bytes: 1 << 30,
            path_of: None,
            complain: Box::new(|_| {}),
        }
    }
}

impl Scheduler {
    /// Starts a trace in a new file; an existing file is an error. It contains every request that ends from now on,
    /// with its completion. Serving never waits for it.
    pub fn start_trace(&self, path: &Path, traces: Traces) -> Result<(), TraceError> {
        let mut current = self.trace.lock();
        if let Some(status) = current.as_ref().map(|r| r.status()).filter(|s| s.failure.is_none()) {
            let reason = "a trace is being written already: stop it first".into();
            return Err(TraceError::File { path: status.path, reason });
        }
        let _quiet = guard::Quiet::new(); // the writer's thread inherits it
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let options = LiveOptions {
            header: Header {
                clock_unix_ns: u64::try_from(unix.as_nanos()).ok(),
                source: concat!("impresario ", env!("CARGO_PKG_VERSION"), ", embedded").into(),
                command: traces.command,
                ..Header::default()
            },
            zero: now(),
            buffer_bytes: traces.buffer_bytes,
            limit_bytes: traces.limit_bytes,
        };
        let recorder = Recorder::create(path, &options, traces.path_of, traces.complain)?;
        drop(self.engine.observe(Some(recorder.clone())));
        *current = Some(recorder);
        Ok(())
    }

    /// Ends the trace and returns its status; `None` if there is none. A shutdown also ends it.
    pub fn stop_trace(&self) -> Option<LiveStatus> {
        let recorder = self.trace.lock().take()?;
        drop(self.engine.observe(None));
        Some(recorder.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, Receiver, Submit};
    use impresario_trace::{Ending, Trace};

    #[test]
    fn a_program_writes_a_trace_of_what_it_served() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let scheduler = Scheduler::new(Options::default(), Receiver::Poll).unwrap();
        assert_eq!(scheduler.stop_trace(), None);
        let named =
            Traces { path_of: Some(Box::new(|key| (key == 5).then(|| b"/five".to_vec()))), ..Traces::default() };
        scheduler.start_trace(&path, named).unwrap();
        let twice = scheduler.start_trace(&folder.path().join("u.imt"), Traces::default());
        assert!(twice.unwrap_err().to_string().contains("stop it first"));
        let mut left = 100;
        for i in 0..left {
            let file = 5 + i % 2;
            scheduler.submit(&Submit { file, offset: i * 9, len: 7, token: i, ..Submit::default() }).unwrap();
        }
        while left > 0 {
            let delivery = scheduler.next(Duration::from_secs(5)).unwrap().unwrap();
            left -= delivery.members().len() as u64;
            scheduler.complete(delivery.batch().id, 0, delivery.batch().len).unwrap();
        }
        let told = scheduler.stop_trace().unwrap();
        assert_eq!((told.requests, told.not_traced), (100, 0));
        let trace = Trace::load(&path).unwrap();
        assert_eq!((trace.ending, trace.records.len()), (Ending::Closed, 100));
        let mut files: Vec<_> = trace.files.iter().map(|f| (f.key, f.path.clone())).collect();
        files.sort();
        assert_eq!(files, [(5, b"/five".to_vec()), (6, Vec::new())]);
        assert!(scheduler.start_trace(&path, Traces::default()).is_err(), "the file is there");
        // A shutdown closes a trace.
        let second = folder.path().join("u.imt");
        scheduler.start_trace(&second, Traces::default()).unwrap();
        scheduler.shutdown(Duration::ZERO).unwrap();
        assert_eq!(Trace::load(&second).unwrap().ending, Ending::Closed);
    }
}
