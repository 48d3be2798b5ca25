//! Recorded runs of a program's scheduler, in the project's format (doc/TRACES.md): recording them, and predicting by them.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use impresario_engine::now;
use impresario_foresight::PredictedQueues;
use impresario_trace::live::{FINISH_PATIENCE, LiveOptions, LiveStatus, PathOf};
use impresario_trace::predict::{RunsOf, next_trace};
use impresario_trace::{Header, Recorder, Space, TraceError, Writer};

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
    /// Called once if the trace ends early, or has no file: a full disk, the limit.
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

/// What recorded runs predict.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Foretold {
    /// Requests.
    pub requests: usize,
    /// Files that they are of.
    pub files: usize,
    /// The traces that they come from.
    pub traces: Vec<PathBuf>,
    /// Traces in folders that were skipped, and why.
    pub passed_over: Vec<String>,
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO)
}

/// Refuses a name that cannot be part of a file name.
fn check_name(name: &str) -> Result<(), TraceError> {
    const BYTES_MAX: usize = 200;
    if !name.is_empty() && name.len() <= BYTES_MAX && !name.contains(['/', '\0']) {
        return Ok(());
    }
    let reason = format!("it cannot name traces: give 1 to {BYTES_MAX} bytes without a slash");
    Err(TraceError::File { path: name.into(), reason })
}

impl Scheduler {
    /// Starts a trace in a folder, which is made if it is missing, under the name by which
    /// [`foretell`](Scheduler::foretell) finds it. Returns its file.
    pub fn start_trace_in(&self, folder: &Path, name: &str) -> Result<PathBuf, TraceError> {
        check_name(name)?;
        let (place, name) = (folder.to_path_buf(), name.to_string());
        let traces = Traces { command: name.clone(), ..Traces::default() };
        let open = move |header: &Header| {
            std::fs::create_dir_all(&place).map_err(|source| TraceError::Io { path: place.clone(), source })?;
            Writer::create(next_trace(&place, &name, since_1970().as_millis()), header)
        };
        self.start_trace_by(folder, open, traces, FINISH_PATIENCE)
    }

    /// Predicts by recorded runs from now on, instead of earlier ones: traces of this `name`, or folders with such traces, of which
    /// the newest are used. Uses at most 16 traces and a million requests. An error changes nothing.
    pub fn foretell(&self, name: &str, traces: &[PathBuf]) -> Result<Foretold, TraceError> {
        check_name(name)?;
        // Files that the program no longer has are never read: their predictions cost nothing.
        let loaded = RunsOf { server: name, space: Space::default(), holds: &|_| true }.load(traces)?;
        let (requests, files) = (loaded.queues.len(), loaded.queues.files());
        let foretold = Foretold { requests, files, traces: loaded.traces, passed_over: loaded.passed_over };
        self.go_by(Some((Arc::new(loaded.queues), foretold.clone())));
        Ok(foretold)
    }

    /// Predicts by no recorded run from now on.
    pub fn forget_runs(&self) {
        self.go_by(None);
    }

    fn go_by(&self, runs: Option<(Arc<PredictedQueues>, Foretold)>) {
        let (queues, foretold) = runs.unzip();
        self.hands.inside(|| {
            // Under one lock, so that policies and reading ahead use the same runs.
            let mut current = self.foretold.lock();
            self.hands.foresight.iter().for_each(|foresight| foresight.foretell(queues.as_deref()));
            self.engine.foresee(queues);
            *current = foretold;
        });
    }

    /// What the recorded runs in use predict.
    pub fn foretold(&self) -> Option<Foretold> {
        self.foretold.lock().clone()
    }

    /// The trace that is being written.
    pub fn trace_status(&self) -> Option<LiveStatus> {
        self.trace.lock().as_ref().map(|recorder| recorder.status())
    }

    /// Starts a trace in a new file; an existing file is an error. It contains every request that ends from now on,
    /// with its completion. Serving never waits for it, and the caller at most [`FINISH_PATIENCE`] for the file.
    pub fn start_trace(&self, path: &Path, traces: Traces) -> Result<(), TraceError> {
        let file = path.to_path_buf();
        self.start_trace_by(path, move |header| Writer::create(file, header), traces, FINISH_PATIENCE).map(drop)
    }

    /// The same in a file that `open` opens, on another thread. Returns its path.
    fn start_trace_by(
        &self,
        place: &Path,
        open: impl FnOnce(&Header) -> Result<Writer, TraceError> + Send + 'static,
        traces: Traces,
        patience: Duration,
    ) -> Result<PathBuf, TraceError> {
        let mut started = self.started.lock();
        if let Some(left) = started.as_ref().filter(|left| left.is_running()) {
            let path = left.status().path;
            let reason = "its file system has not answered since the last trace; it hangs".into();
            return Err(TraceError::File { path, reason });
        }
        let mut current = self.trace.lock();
        if let Some(status) = current.as_ref().map(|r| r.status()).filter(|s| s.failure.is_none()) {
            let reason = "a trace is being written already: stop it first".into();
            return Err(TraceError::File { path: status.path, reason });
        }
        let _quiet = guard::Quiet::new(); // the writer's thread inherits it
        let options = LiveOptions {
            header: Header {
                clock_unix_ns: u64::try_from(since_1970().as_nanos()).ok(),
                source: concat!("impresario ", env!("CARGO_PKG_VERSION"), ", embedded").into(),
                command: traces.command,
                ..Header::default()
            },
            zero: now(),
            buffer_bytes: traces.buffer_bytes,
            limit_bytes: traces.limit_bytes,
        };
        let header = options.header.clone();
        let recorder = Recorder::begin(place, move || open(&header), &options, traces.path_of, traces.complain)?;
        drop(self.engine.observe(Some(recorder.clone())));
        let before = current.replace(recorder.clone());
        // Nobody who asks for its state, or ends it, waits for the file system.
        drop(current);
        drop(before);
        let opened = recorder.opened_within(patience).map(Path::to_path_buf).map_err(TraceError::again);
        if opened.is_err() {
            let mut current = self.trace.lock();
            if current.take_if(|current| Arc::ptr_eq(current, &recorder)).is_some() {
                drop(self.engine.observe(None));
            }
            drop(current);
            *started = Some(recorder);
        }
        opened
    }

    /// Ends the trace and returns its status; `None` if there is none. A shutdown also ends it.
    pub fn stop_trace(&self) -> Option<LiveStatus> {
        self.stop_trace_within(FINISH_PATIENCE)
    }

    /// The same, waiting at most so long for the file system.
    pub(crate) fn stop_trace_within(&self, patience: Duration) -> Option<LiveStatus> {
        let recorder = self.trace.lock().take()?;
        drop(self.engine.observe(None));
        Some(recorder.finish_within(patience))
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

    #[test]
    fn a_file_system_that_hangs_delays_nobody_but_who_starts_a_trace() {
        let scheduler = Scheduler::new(Options::default(), Receiver::Poll).unwrap();
        let (answer, hangs) = std::sync::mpsc::channel::<()>();
        let (begins, begun) = std::sync::mpsc::channel();
        let open = move |header: &Header| {
            begins.send(()).unwrap();
            let _ = hangs.recv_timeout(Duration::from_secs(60));
            Writer::create("/nowhere/t.imt", header)
        };
        let patience = Duration::from_secs(3);
        std::thread::scope(|scope| {
            let starter = scope.spawn(|| {
                scheduler.start_trace_by("/nowhere".as_ref(), open, Traces::default(), patience).unwrap_err()
            });
            begun.recv().unwrap();
            let began = std::time::Instant::now();
            assert_eq!(scheduler.trace_status().unwrap().path, Path::new("/nowhere"));
            scheduler.submit(&Submit { file: 5, offset: 0, len: 7, token: 1, ..Submit::default() }).unwrap();
            let delivery = scheduler.next(Duration::from_secs(5)).unwrap().unwrap();
            scheduler.complete(delivery.batch().id, 0, delivery.batch().len).unwrap();
            assert!(began.elapsed() < patience, "{:?}", began.elapsed());
            assert!(starter.join().unwrap().to_string().contains("nothing is traced"));
        });
        assert_eq!(scheduler.trace_status(), None);
        let again = scheduler.start_trace_in("/nowhere".as_ref(), "t").unwrap_err().to_string();
        assert!(again.contains("hangs"), "one thread is left behind, not one for each call: {again}");
        drop(answer);
        let ended = || scheduler.started.lock().as_ref().is_some_and(|left| left.is_running());
        assert!(impresario_base::time::wait_while(&ended, Duration::from_secs(20)));
        let folder = tempfile::tempdir().unwrap();
        scheduler.start_trace_in(folder.path(), "t").unwrap();
        scheduler.shutdown(Duration::ZERO).unwrap();
    }

    /// Accepts what may be read ahead and counts its bytes.
    struct Counting(Arc<std::sync::atomic::AtomicU64>);

    impl crate::Ahead for Counting {
        fn accept(&self, _: &Submit, extent: std::ops::Range<u64>) -> Option<u64> {
            self.0.fetch_add(extent.end - extent.start, std::sync::atomic::Ordering::Relaxed);
            Some(u64::MAX)
        }

        fn dropped(&self, _: u64) {}
    }

    const BLOCK_BYTES: u64 = 64 << 10;
    const BLOCKS: u64 = 64;

    fn reading_ahead(accepted: &Arc<std::sync::atomic::AtomicU64>) -> Scheduler {
        let options = Options { read_ahead_bytes: 16 << 20, ..Options::default() };
        Scheduler::reading_ahead(options, Receiver::Poll, Some(Box::new(Counting(Arc::clone(accepted))))).unwrap()
    }

    /// Reads every second block of a file in an order without a pattern, one after the other.
    fn read_all(scheduler: &Scheduler) {
        for i in 0..BLOCKS {
            let block = 2 * ((7 * i + 10 * i * i) % BLOCKS);
            let submit =
                Submit { file: 7, offset: block * BLOCK_BYTES, len: BLOCK_BYTES, token: i, ..Submit::default() };
            scheduler.submit(&submit).unwrap();
            let mut read = false;
            while !read {
                let delivery = scheduler.next(Duration::from_secs(5)).unwrap().unwrap();
                read = delivery.members().iter().any(|member| member.token == i);
                scheduler.complete(delivery.batch().id, 0, delivery.batch().len).unwrap();
            }
        }
    }

    #[test]
    fn a_recorded_run_foretells_what_has_no_pattern() {
        let folder = tempfile::tempdir().unwrap();
        let traces = folder.path().join("traces");
        let accepted = Arc::default();
        let scheduler = reading_ahead(&accepted);
        let bytes = || accepted.swap(0, std::sync::atomic::Ordering::Relaxed);
        let hit = || scheduler.read_ahead().unwrap().0.hit_bytes;
        let path = scheduler.start_trace_in(&traces, "brick").unwrap();
        assert!(path.starts_with(&traces) && scheduler.trace_status().is_some_and(|status| status.path == path));
        read_all(&scheduler);
        assert_eq!(scheduler.stop_trace().unwrap().requests, BLOCKS);
        // That it was read before is not what foretells it.
        let first = hit();
        bytes();
        read_all(&scheduler);
        let (without, unforetold) = (hit() - first, bytes());
        let before = hit();
        let told = scheduler.foretell("brick", std::slice::from_ref(&traces)).unwrap();
        assert_eq!((told.requests, told.files, &told.traces[..]), (BLOCKS as usize, 1, &[path.clone()][..]));
        assert_eq!(scheduler.foretold(), Some(told.clone()));
        read_all(&scheduler);
        let with = hit() - before;
        assert!(with > BLOCKS * BLOCK_BYTES / 2 && with > 2 * without, "{with} against {without}");
        assert!(bytes() > unforetold);
        // Runs of others change nothing.
        let whose = scheduler.foretell("another", std::slice::from_ref(&path)).unwrap_err().to_string();
        assert!(whose.contains("recorded by brick, not by another"), "{whose}");
        assert!(
            scheduler.foretell("another", &[traces]).unwrap_err().to_string().contains("holds no trace of another")
        );
        let bytes_of = std::fs::read(&path).unwrap();
        for (name, change) in [("future", (7, 2)), ("damaged", (100, 0xff))] {
            let mut bytes = bytes_of.clone();
            bytes[change.0] ^= change.1;
            let bad = folder.path().join(name);
            std::fs::write(&bad, bytes).unwrap();
            let why = scheduler.foretell("brick", &[bad]).unwrap_err().to_string();
            assert!(why.contains(if name == "future" { "version" } else { "at byte" }), "{why}");
        }
        for name in ["", "a/b"] {
            assert!(scheduler.start_trace_in(folder.path(), name).unwrap_err().to_string().contains("slash"));
        }
        assert_eq!(scheduler.foretold(), Some(told));
        scheduler.forget_runs();
        assert_eq!(scheduler.foretold(), None);
    }
}
