//! The trace of a server's requests: begun with the server or by a call, ended by a call, by the server's end, or by an
//! error such as a full disk, which ends nothing else.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_base::lock::Mutex;
use impresario_base::machine::host_name;
use impresario_engine::{Engine, now};
use impresario_trace::live::LiveStatus;
use impresario_trace::predict::next_trace;
use impresario_trace::{Header, LiveOptions, Recorder, Space, TraceError};
use impresario_wire::{Answer, Fault};
use serde_json::Value;

use crate::connection::Reply;

/// Memory for requests that ended and are not written yet, bytes.
const BUFFER_BYTES: usize = 8 << 20;
/// A trace ends at this size: some 100 million requests.
const LIMIT_BYTES: u64 = 1 << 30;

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
    /// The present one, or the last.
    recorder: Mutex<Option<Arc<Recorder>>>,
}

impl<T: Send + 'static> RequestTrace<T> {
    /// Begins a trace if the settings say so. A failure is told to the log: the server serves all the same.
    pub(crate) fn new(name: &str, settings: TraceSettings, engine: Arc<Engine<T>>) -> RequestTrace<T> {
        let trace = RequestTrace { name: name.into(), settings, engine, recorder: Mutex::new(None) };
        if trace.settings.folder.is_some()
            && trace.settings.at_start
            && let Err(fault) = trace.start()
        {
            tracing::warn!("no trace is written: {}", fault.message);
        }
        trace
    }

    /// Begins or ends a trace, and answers.
    pub(crate) fn serve(&self, on: bool, reply: Reply) {
        match if on { self.start() } else { self.stop() } {
            Ok(text) => reply.send(&Answer::Text(text)),
            Err(fault) => reply.send(&Answer::Fault(fault)),
        }
    }

    fn start(&self) -> Result<String, Fault> {
        let fault = |errno, message| Fault { errno, message };
        let Some(folder) = &self.settings.folder else {
            let message = format!("{} has no folder for traces; add trace = \"FOLDER\" to its section", self.name);
            return Err(fault(libc::ENOENT, message));
        };
        let mut recorder = self.recorder.lock();
        if let Some(status) = recorder.as_ref().map(|r| r.status()).filter(|s| s.failure.is_none()) {
            let message = format!("{} already writes {}; stop that trace first", self.name, status.path.display());
            return Err(fault(libc::EALREADY, message));
        }
        let refused = |e: TraceError| {
            let errno = match &e {
                TraceError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
                _ => libc::EIO,
            };
            fault(errno, e.to_string())
        };
        std::fs::create_dir_all(folder).map_err(|source| refused(TraceError::Io { path: folder.clone(), source }))?;
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
        let path = next_trace(folder, &self.name, unix.as_millis());
        let complain = |e: &TraceError| tracing::warn!("the trace has ended, the server goes on: {e}");
        let fresh = Recorder::create(&path, &options, None, complain).map_err(refused)?;
        drop(self.engine.observe(Some(fresh.clone())));
        *recorder = Some(fresh);
        tracing::info!(path = %path.display(), "a trace begins");
        Ok(format!("writes {}", path.display()))
    }

    /// Ends the trace; what ended before is in it.
    pub(crate) fn stop(&self) -> Result<String, Fault> {
        let Some(recorder) = self.recorder.lock().take() else {
            let message = format!("{} writes no trace", self.name);
            return Err(Fault { errno: libc::ENOENT, message });
        };
        drop(self.engine.observe(None));
        let LiveStatus { path, requests, bytes, not_traced, failure } = recorder.finish();
        let lost = if not_traced > 0 { format!(", {not_traced} requests are not in it") } else { String::new() };
        let failure = failure.map(|f| format!("; it ended early: {f}")).unwrap_or_default();
        let told = format!("{}: {requests} requests, {bytes} bytes{lost}{failure}", path.display());
        tracing::info!("the trace has ended: {told}");
        Ok(told)
    }

    /// For the server's status.
    pub(crate) fn status(&self) -> Value {
        crate::json(&self.recorder.lock().as_ref().map(|r| r.status()))
    }
}
