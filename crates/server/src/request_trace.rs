//! The trace of a server's requests: begun with the server or by a call, ended by a call, by the server's end, or by an
//! error such as a full disk, which ends nothing else. Neither the server nor a connection waits for the traces' file system; of
//! one that hangs one thread is left behind at most.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::lock::Mutex;
use impresario_base::machine::host_name;
use impresario_base::time::wait_while;
use impresario_engine::{Engine, now};
use impresario_trace::live::{FINISH_PATIENCE, LiveStatus};
use impresario_trace::predict::next_trace;
use impresario_trace::{Header, LiveOptions, Recorder, Space, TraceError, Writer};
use impresario_wire::{Answer, Fault};
use serde_json::Value;

use crate::connection::Reply;
use crate::workers::{PATIENCE, Workers};

/// Memory for requests that ended and are not written yet, bytes.
const BUFFER_BYTES: usize = 8 << 20;
/// A trace ends at this size: some 100 million requests.
const LIMIT_BYTES: u64 = 1 << 30;
/// A thread that has nothing more to write ends within this time.
const ENDING_MAX: Duration = Duration::from_millis(500);

/// Where and how a server writes its traces.
pub(crate) struct TraceSettings {
    /// The folder; without one there are no traces.
    pub(crate) folder: Option<PathBuf>,
    /// Begin one with the server.
    pub(crate) at_start: bool,
    /// Offsets are those of the lanes, not of files.
    pub(crate) space: Space,
}

/// The traces of one server.
pub(crate) struct RequestTrace<T: Send + 'static> {
    name: String,
    settings: TraceSettings,
    engine: Arc<Engine<T>>,
    /// One thread: calls take turns.
    calls: Workers,
    traces: Mutex<Traces>,
}

#[derive(Default)]
struct Traces {
    /// The present one, or one that ended early.
    present: Option<Arc<Recorder>>,
    /// Its file system had not answered when it was to begin or end.
    left_behind: Option<Arc<Recorder>>,
}

impl<T: Send + 'static> RequestTrace<T> {
    /// Begins a trace if the settings say so. A failure is told to the log: the server serves all the same.
    pub(crate) fn new(name: &str, settings: TraceSettings, engine: Arc<Engine<T>>) -> Arc<RequestTrace<T>> {
        let (calls, traces) = (Workers::new("trace", 1), Mutex::default());
        let trace = Arc::new(RequestTrace { name: name.into(), settings, engine, calls, traces });
        if trace.settings.folder.is_some() && trace.settings.at_start {
            match trace.begin() {
                Ok(recorder) => {
                    let this = trace.clone();
                    // Why there is none the recorder has told.
                    trace.calls.run(Box::new(move || drop(this.settle(&recorder))));
                }
                Err(fault) => tracing::warn!("no trace is written: {}", fault.message),
            }
        }
        trace
    }

    /// Begins or ends a trace, and answers.
    pub(crate) fn serve(self: &Arc<Self>, on: bool, reply: Reply) {
        let this = self.clone();
        let call = move || match if on { this.start() } else { this.stop() } {
            Ok(text) => reply.send(&Answer::Text(text)),
            Err(fault) => reply.send(&Answer::Fault(fault)),
        };
        self.calls.run(Box::new(call));
    }

    fn start(&self) -> Result<String, Fault> {
        let left_behind = self.traces.lock().left_behind.clone();
        if let Some(left) = left_behind.filter(|left| !wait_while(&|| left.is_running(), ENDING_MAX)) {
            let path = left.status().path;
            let message =
                format!("the file system of {} has not answered since the last trace; it hangs", path.display());
            return Err(Fault { errno: libc::EBUSY, message });
        }
        self.settle(&self.begin()?)
    }

    /// Begins a trace, whose file need not be there yet.
    fn begin(&self) -> Result<Arc<Recorder>, Fault> {
        let fault = |errno, message| Fault { errno, message };
        let Some(folder) = &self.settings.folder else {
            let message = format!("{} has no folder for traces; add trace = \"FOLDER\" to its section", self.name);
            return Err(fault(libc::ENOENT, message));
        };
        let mut traces = self.traces.lock();
        if let Some(status) = traces.present.as_ref().map(|r| r.status()).filter(|s| s.failure.is_none()) {
            let message = format!("{} already writes {}; stop that trace first", self.name, status.path.display());
            return Err(fault(libc::EALREADY, message));
        }
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let options = LiveOptions {
            header: Header {
                clock_unix_ns: u64::try_from(unix.as_nanos()).ok(),
                host: host_name(),
                source: concat!("impresario ", env!("CARGO_PKG_VERSION")).into(),
                command: self.name.clone(),
                space: self.settings.space,
            },
            zero: now(),
            buffer_bytes: BUFFER_BYTES,
            limit_bytes: LIMIT_BYTES,
        };
        let open = {
            let (folder, name, header) = (folder.clone(), self.name.clone(), options.header.clone());
            move || {
                let made = std::fs::create_dir_all(&folder);
                made.map_err(|source| TraceError::Io { path: folder.clone(), source })?;
                Writer::create(next_trace(&folder, &name, unix.as_millis()), &header)
            }
        };
        let complain = |e: &TraceError| tracing::warn!("requests are not traced, the server goes on: {e}");
        let fresh = Recorder::begin(folder, open, &options, None, complain).map_err(|e| refused(&e))?;
        drop(self.engine.observe(Some(fresh.clone())));
        let before = traces.present.replace(fresh.clone());
        drop(traces);
        drop(before); // which may wait for its thread
        Ok(fresh)
    }

    /// Waits, within bounds, until there is a file; without one there is no trace.
    fn settle(&self, recorder: &Arc<Recorder>) -> Result<String, Fault> {
        match recorder.opened_within(FINISH_PATIENCE) {
            Ok(path) => {
                tracing::info!(path = %path.display(), "a trace begins");
                Ok(format!("writes {}", path.display()))
            }
            Err(why) => {
                let mut traces = self.traces.lock();
                if traces.present.take_if(|present| Arc::ptr_eq(present, recorder)).is_some() {
                    drop(self.engine.observe(None));
                }
                traces.left_behind = Some(recorder.clone());
                Err(refused(why))
            }
        }
    }

    /// Ends the trace; what ended before is in it.
    fn stop(&self) -> Result<String, Fault> {
        let mut traces = self.traces.lock();
        let Some(recorder) = traces.present.take() else {
            let message = format!("{} writes no trace", self.name);
            return Err(Fault { errno: libc::ENOENT, message });
        };
        drop(self.engine.observe(None));
        drop(traces);
        let LiveStatus { path, requests, bytes, not_traced, failure } = recorder.finish();
        let lost = if not_traced > 0 { format!(", {not_traced} requests are not in it") } else { String::new() };
        let failure = failure.map(|f| format!("; it ended early: {f}")).unwrap_or_default();
        let told = format!("{}: {requests} requests, {bytes} bytes{lost}{failure}", path.display());
        tracing::info!("the trace has ended: {told}");
        if recorder.is_running() {
            self.traces.lock().left_behind = Some(recorder);
        }
        Ok(told)
    }

    /// Takes no more calls, and ends the trace, for a bounded time.
    pub(crate) fn end(&self) {
        let present = self.traces.lock().present.clone();
        // One that is not there by then ends here, and with it the wait of who asked for it.
        present.iter().for_each(|recorder| _ = recorder.opened_within(PATIENCE));
        self.calls.stop(PATIENCE);
        let _ = self.stop(); // there may be none
    }

    /// For the server's status.
    pub(crate) fn status(&self) -> Value {
        crate::json(&self.traces.lock().present.as_ref().map(|r| r.status()))
    }
}

fn refused(why: &TraceError) -> Fault {
    let errno = match why {
        TraceError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        // Its file system hangs.
        TraceError::File { .. } => libc::EBUSY,
        _ => libc::EIO,
    };
    Fault { errno, message: why.to_string() }
}
