//! What earlier runs foretell a server: their traces, loaded at its start or by a call, off the way of
//! requests, and of the start: a file system that hangs delays nothing. A trace that cannot be used changes nothing; the server serves all the same.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;

use impresario_base::lock::Mutex;
use impresario_sched::PredictedQueues;
use impresario_trace::predict::RunsOf;
use impresario_trace::{Space, TraceError};
use impresario_wire::{Answer, Fault};
use serde_json::{Value, json};

use crate::connection::Reply;
use crate::workers::{PATIENCE, Workers};

/// Says whether a server holds something of a file.
pub(crate) type Holds = Box<dyn Fn(u64) -> bool + Send + Sync>;
/// Takes what is foretold from now on.
pub(crate) type Foretell = Box<dyn Fn(Option<Arc<PredictedQueues>>) + Send + Sync>;

/// The earlier runs of one server.
pub(crate) struct EarlierRuns {
    name: String,
    space: Space,
    configured: Vec<PathBuf>,
    holds: Holds,
    foretell: Foretell,
    /// One thread: loads take turns, so that the memory of one is the most.
    loader: Workers,
    told: Mutex<Told>,
}

/// What is told of them.
#[derive(Default)]
struct Told {
    traces: Vec<PathBuf>,
    requests: usize,
    files: usize,
    /// Why those of the configuration are not loaded.
    failure: Option<String>,
}

impl EarlierRuns {
    /// Begins to load the runs of the configuration. A failure is told to the log and in the status.
    pub(crate) fn new(
        name: &str,
        space: Space,
        configured: Vec<PathBuf>,
        holds: Holds,
        foretell: Foretell,
    ) -> Arc<EarlierRuns> {
        let runs = Arc::new(EarlierRuns {
            name: name.into(),
            space,
            configured,
            holds,
            foretell,
            loader: Workers::new("earlier-runs", 1),
            told: Mutex::default(),
        });
        if !runs.configured.is_empty() {
            runs.told.lock().failure = Some("they are being loaded".into());
            let this = runs.clone();
            runs.loader.run(Box::new(move || {
                if let Err(fault) = this.load(&this.configured) {
                    tracing::warn!("no requests are foretold: {}", fault.message);
                    this.told.lock().failure = Some(fault.message);
                }
            }));
        }
        runs
    }

    /// Loads runs, those of the configuration if none is named, or forgets what is loaded; answers when that is done.
    pub(crate) fn serve(self: &Arc<Self>, runs: Option<Vec<Vec<u8>>>, reply: Reply) {
        let this = self.clone();
        self.loader.run(Box::new(move || {
            let answer = match runs.map(|runs| runs.into_iter().map(|run| OsString::from_vec(run).into()).collect()) {
                None => this.unload(),
                Some(runs) if Vec::is_empty(&runs) => this.load(&this.configured),
                Some(runs) => this.load(&runs),
            };
            match answer {
                Ok(text) => reply.send(&Answer::Text(text)),
                Err(fault) => reply.send(&Answer::Fault(fault)),
            }
        }));
    }

    fn load(&self, runs: &[PathBuf]) -> Result<String, Fault> {
        if runs.is_empty() {
            let message = format!(
                "{} has no earlier runs; name some, or add earlier_runs = [\"FOLDER\"] to its section",
                self.name
            );
            return Err(Fault { errno: libc::ENOENT, message });
        }
        let of = RunsOf { server: &self.name, space: self.space, holds: &self.holds };
        let loaded = of.load(runs).map_err(|error| {
            let errno = match &error {
                TraceError::Io { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
                _ => libc::EINVAL,
            };
            Fault {
                errno,
                message: format!("{error}; nothing was loaded (record a run with impresario trace start, stop)"),
            }
        })?;
        loaded.passed_over.iter().for_each(|why| tracing::warn!("passed over among the earlier runs: {why}"));
        let told =
            Told { requests: loaded.queues.len(), files: loaded.queues.files(), traces: loaded.traces, failure: None };
        let passed = match loaded.passed_over.len() {
            0 => String::new(),
            n => format!("; {n} passed over, such as {}", loaded.passed_over[0]),
        };
        let text = format!("{}{passed}", told.text());
        self.become_current(Some(Arc::new(loaded.queues)), told);
        tracing::info!("earlier runs are loaded: {text}");
        Ok(text)
    }

    fn unload(&self) -> Result<String, Fault> {
        if self.told.lock().traces.is_empty() {
            let message = format!("{} has no earlier runs loaded", self.name);
            return Err(Fault { errno: libc::ENOENT, message });
        }
        self.become_current(None, Told::default());
        Ok("goes by no earlier run".into())
    }

    fn become_current(&self, queues: Option<Arc<PredictedQueues>>, told: Told) {
        (self.foretell)(queues);
        *self.told.lock() = told;
    }

    /// Ends with the load that is under way, for a bounded time.
    pub(crate) fn stop(&self) {
        self.loader.stop(PATIENCE);
    }

    /// For the server's status.
    pub(crate) fn status(&self) -> Value {
        let told = self.told.lock();
        if told.traces.is_empty() && told.failure.is_none() {
            return Value::Null;
        }
        json!({
            "traces": told.traces.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
            "requests": told.requests,
            "files": told.files,
            "failure": told.failure,
        })
    }
}

impl Told {
    fn text(&self) -> String {
        let traces: Vec<String> = self.traces.iter().map(|path| path.display().to_string()).collect();
        let s = if self.files == 1 { "" } else { "s" };
        format!("{} requests of {} file{s} foretold by {}", self.requests, self.files, traces.join(", "))
    }
}
