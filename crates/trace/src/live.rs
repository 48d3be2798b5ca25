//! Writes traces while requests are served: the serving thread puts each completed request into a bounded buffer, and
//! another thread writes. A request that finds the buffer full is counted as not traced; serving never waits for the
//! trace, and an error (a full disk) ends only the trace.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use impresario_base::lock::{Condvar, Mutex};
use impresario_base::time::wait_while;
use impresario_sched::{Ended, FileId, Nanos, Observer};
use rustc_hash::FxHashMap;
use serde::{Serialize, Serializer};

use crate::codec::{FileInfo, Header, Origin, OriginId, Outcome, PATH_BYTES_MAX, Record};
use crate::{TraceError, Writer};

/// The writer is woken after this many requests, and at the latest after [`WAKE_AFTER`].
const WAKE_REQUESTS: usize = 4096;
const WAKE_AFTER: Duration = Duration::from_millis(250);
/// A killed process loses at most the requests that ended within this time, besides the buffer.
const FLUSH_AFTER: Duration = Duration::from_secs(1);
/// How long the beginning and the end of a trace may take.
pub const FINISH_PATIENCE: Duration = Duration::from_secs(10);
/// Maximum files of one trace, some 100 bytes of memory each; requests to further ones are not traced.
const FILES_MAX: usize = 1 << 18;
/// Maximum distinct requesters of one trace, some 300 bytes each; further ones count as one.
const ORIGINS_MAX: usize = 1 << 16;

/// How a trace is written.
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// The header of the trace.
    pub header: Header,
    /// The instant of the trace's time zero; [`Header::clock_unix_ns`] is the wall clock at this instant.
    pub zero: Nanos,
    /// Memory for completed requests not yet written, bytes: half for those arriving, half for those being written.
    pub buffer_bytes: usize,
    /// Approximate size limit of the file.
    pub limit_bytes: u64,
}

/// Returns the path of a file's key, if known.
pub type PathOf = Box<dyn FnMut(u64) -> Option<Vec<u8>> + Send>;

/// The stable key of a file that has only a name: FNV-1a of 64 bits, never 0.
pub fn key_of_name(name: &[u8]) -> u64 {
    impresario_base::fnv::hash(name).max(1)
}

/// The status of a trace being written, as servers and libraries tell it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LiveStatus {
    /// Its file; the folder until that is there.
    #[serde(serialize_with = "shown")]
    pub path: PathBuf,
    /// Requests in it.
    pub requests: u64,
    /// Its length, bytes, without what is still in memory.
    pub bytes: u64,
    /// Requests missing from it, because the buffer was full, there were too many files, or it had ended.
    #[serde(rename = "requests_not_traced")]
    pub not_traced: u64,
    /// Why it ended early.
    pub failure: Option<String>,
}

/// A path need not be text.
fn shown<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

struct Buffer {
    ended: Vec<Ended>,
    closing: bool,
}

struct Shared {
    /// Its file, or why there is none.
    opened: OnceLock<Result<PathBuf, TraceError>>,
    buffer: Mutex<Buffer>,
    bell: Condvar,
    capacity: usize,
    /// The writer has given up.
    over: AtomicBool,
    requests: AtomicU64,
    bytes: AtomicU64,
    not_traced: AtomicU64,
    failure: Mutex<Option<String>>,
    complain: Mutex<Option<Complain>>,
}

type Complain = Box<dyn FnOnce(&TraceError) + Send>;

/// A trace being written. As an [`Observer`] it receives completed requests from engines. Dropping it finishes the
/// trace like [`Recorder::finish`].
pub struct Recorder {
    shared: Arc<Shared>,
    place: PathBuf,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Recorder {
    /// Starts a trace in a new file. `complain` is called once if it ends early, `path_of` at a file's first request;
    /// both on the writer's thread, or `complain` by who ends a trace that its file system does not take.
    pub fn create(
        path: &Path,
        options: &LiveOptions,
        path_of: Option<PathOf>,
        complain: impl FnOnce(&TraceError) + Send + 'static,
    ) -> Result<Arc<Recorder>, TraceError> {
        let (file, header) = (path.to_path_buf(), options.header.clone());
        Recorder::create_by(path, move || Writer::create(file, &header), options, path_of, complain)
    }

    /// The same in a file that `open` opens, and for which nobody waits longer than [`FINISH_PATIENCE`]. Why there is none
    /// the error says, not `complain`.
    pub fn create_by(
        place: &Path,
        open: impl FnOnce() -> Result<Writer, TraceError> + Send + 'static,
        options: &LiveOptions,
        path_of: Option<PathOf>,
        complain: impl FnOnce(&TraceError) + Send + 'static,
    ) -> Result<Arc<Recorder>, TraceError> {
        let is_open = Arc::new(AtomicBool::new(false));
        let opened = is_open.clone();
        let open = move || open().inspect(|_| opened.store(true, Ordering::Relaxed));
        let complain = move |why: &TraceError| {
            if is_open.load(Ordering::Relaxed) {
                complain(why);
            }
        };
        let recorder = Recorder::begin(place, open, options, path_of, complain)?;
        match recorder.opened_within(FINISH_PATIENCE).err().map(TraceError::again) {
            None => Ok(recorder),
            Some(why) => Err(why),
        }
    }

    /// Starts a trace whose file the writer's thread opens: nobody waits for a file system that hangs, and requests that end
    /// until then are traced, too. `place` names it before. See [`Recorder::opened_within`].
    pub fn begin(
        place: &Path,
        open: impl FnOnce() -> Result<Writer, TraceError> + Send + 'static,
        options: &LiveOptions,
        path_of: Option<PathOf>,
        complain: impl FnOnce(&TraceError) + Send + 'static,
    ) -> Result<Arc<Recorder>, TraceError> {
        let capacity = (options.buffer_bytes / 2 / size_of::<Ended>()).max(1);
        let shared = Arc::new(Shared {
            opened: OnceLock::new(),
            buffer: Mutex::new(Buffer { ended: Vec::with_capacity(capacity), closing: false }),
            bell: Condvar::new(),
            capacity,
            over: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            not_traced: AtomicU64::new(0),
            failure: Mutex::new(None),
            complain: Mutex::new(Some(Box::new(complain))),
        });
        let thread = std::thread::Builder::new().name("trace".into()).stack_size(256 << 10).spawn({
            let (shared, zero, limit_bytes) = (Arc::clone(&shared), options.zero, options.limit_bytes);
            move || {
                let Some(writer) = shared.open(open) else { return };
                let writer = writer.limited(limit_bytes);
                shared.write(Scribe { writer, zero, path_of, files: FxHashMap::default(), origins: Default::default() })
            }
        });
        let thread = thread.map_err(|e| TraceError::io(place, e))?;
        Ok(Arc::new(Recorder { shared, place: place.into(), thread: Mutex::new(Some(thread)) }))
    }

    /// Its file. One that is not there after `patience` is given up for good: nothing is traced, and what the file system makes
    /// of it later is removed.
    pub fn opened_within(&self, patience: Duration) -> Result<&Path, &TraceError> {
        let shared = &self.shared;
        wait_while(&|| shared.opened.get().is_none(), patience);
        let opened = shared.opened.get_or_init(|| {
            let reason =
                format!("its file system made no trace within {:.1} s; nothing is traced", patience.as_secs_f64());
            Err(TraceError::file(&self.place, reason))
        });
        if let Err(why) = opened {
            // It ends by itself, or is left behind.
            drop(self.thread.lock().take());
            shared.give_up(why);
        }
        opened.as_ref().map(PathBuf::as_path)
    }

    /// Whether its thread runs; after [`Recorder::finish`] or a failed opening only where the file system hangs.
    pub fn is_running(&self) -> bool {
        Arc::strong_count(&self.shared) > 1
    }

    /// Its current status.
    pub fn status(&self) -> LiveStatus {
        let shared = &self.shared;
        LiveStatus {
            path: self.path().into(),
            requests: shared.requests.load(Ordering::Relaxed),
            bytes: shared.bytes.load(Ordering::Relaxed),
            not_traced: shared.not_traced.load(Ordering::Relaxed),
            failure: shared.failure.lock().clone(),
        }
    }

    fn path(&self) -> &Path {
        self.shared.opened.get().and_then(|opened| opened.as_deref().ok()).unwrap_or(&self.place)
    }

    /// Writes what is in memory, closes the trace, and returns its final status. Waits at most [`FINISH_PATIENCE`].
    pub fn finish(&self) -> LiveStatus {
        self.finish_within(FINISH_PATIENCE)
    }

    /// The same, waiting at most `patience`: what a file system that hangs has not taken by then may be missing, and the thread that
    /// writes is left behind.
    pub fn finish_within(&self, patience: Duration) -> LiveStatus {
        self.shared.buffer.lock().closing = true;
        self.shared.bell.notify_all();
        let mut thread = self.thread.lock();
        if let Some(thread) = thread.take() {
            if wait_while(&|| !thread.is_finished(), patience) {
                // A panic in it has already been reported.
                let _ = thread.join();
            } else {
                let reason = format!("its file system had not taken the rest after {:.1} s", patience.as_secs_f64());
                self.shared.failed(&TraceError::file(self.path(), reason));
            }
        }
        self.status()
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Observer for Recorder {
    fn ended(&self, request: &Ended) {
        let shared = &*self.shared;
        let mut buffer = shared.buffer.lock_spinning();
        if buffer.ended.len() >= shared.capacity || buffer.closing || shared.over.load(Ordering::Relaxed) {
            shared.not_traced.fetch_add(1, Ordering::Relaxed);
            return;
        }
        buffer.ended.push(*request);
        if buffer.ended.len() == WAKE_REQUESTS.min(shared.capacity) {
            drop(buffer);
            shared.bell.notify_one();
        }
    }
}

impl Shared {
    /// Opens the file; `None` if that failed or was given up meanwhile.
    fn open(&self, open: impl FnOnce() -> Result<Writer, TraceError>) -> Option<Writer> {
        match open() {
            Ok(writer) if self.opened.set(Ok(writer.path().into())).is_ok() => {
                self.bytes.store(writer.written_bytes(), Ordering::Relaxed);
                Some(writer)
            }
            Ok(writer) => {
                // Who wanted it was told that there is none. It may be gone already.
                let _ = std::fs::remove_file(writer.path());
                None
            }
            Err(why) => {
                if let Err(why) = self.opened.get_or_init(|| Err(why)) {
                    self.give_up(why);
                }
                None
            }
        }
    }

    /// The writer's thread.
    fn write(&self, mut scribe: Scribe) {
        let mut batch = Vec::with_capacity(self.capacity);
        let (mut flushed, mut flushed_records) = (Instant::now(), 0);
        let failure = loop {
            let mut buffer = self.buffer.lock();
            if !buffer.closing && buffer.ended.len() < WAKE_REQUESTS.min(self.capacity) {
                buffer = self.bell.wait_timeout(buffer, WAKE_AFTER).0;
            }
            std::mem::swap(&mut buffer.ended, &mut batch);
            let closing = buffer.closing;
            drop(buffer);
            let mut pushed = Ok(());
            for (at, ended) in batch.iter().enumerate() {
                pushed = scribe.push(ended, &self.not_traced);
                if pushed.is_err() {
                    self.not_traced.fetch_add((batch.len() - at) as u64, Ordering::Relaxed);
                    break;
                }
            }
            batch.clear();
            let records = scribe.writer.records();
            self.requests.store(records, Ordering::Relaxed);
            if pushed.is_ok() && records > flushed_records && (closing || flushed.elapsed() >= FLUSH_AFTER) {
                pushed = scribe.writer.flush();
                (flushed, flushed_records) = (Instant::now(), records);
            }
            self.bytes.store(scribe.writer.written_bytes(), Ordering::Relaxed);
            match pushed {
                Err(failure) => break failure,
                Ok(()) if !closing => {}
                Ok(()) => match scribe.writer.finish() {
                    Ok(file) => {
                        let bytes = file.metadata().map_or(0, |m| m.len());
                        return self.bytes.store(bytes, Ordering::Relaxed);
                    }
                    Err(failure) => break failure,
                },
            }
        };
        self.give_up(&failure);
    }

    /// Ends the trace early.
    fn give_up(&self, why: &TraceError) {
        // Under the lock, so that every request is counted either here or by `ended`.
        let mut buffer = self.buffer.lock();
        self.over.store(true, Ordering::Relaxed);
        let unwritten = std::mem::take(&mut buffer.ended).len() as u64;
        drop(buffer);
        self.not_traced.fetch_add(unwritten, Ordering::Relaxed);
        self.failed(why);
    }

    /// Notes why the trace ended early, and says it, once.
    fn failed(&self, why: &TraceError) {
        self.failure.lock().get_or_insert_with(|| why.to_string());
        let complain = self.complain.lock().take();
        complain.into_iter().for_each(|complain| complain(why));
    }
}

/// Turns completed requests into records.
struct Scribe {
    writer: Writer,
    zero: Nanos,
    path_of: Option<PathOf>,
    files: FxHashMap<u64, FileId>,
    origins: FxHashMap<(u64, u64, u32), OriginId>,
}

impl Scribe {
    fn push(&mut self, ended: &Ended, not_traced: &AtomicU64) -> Result<(), TraceError> {
        let Some(file) = self.file(ended.file)? else {
            not_traced.fetch_add(1, Ordering::Relaxed);
            return Ok(());
        };
        let origin = self.origin(ended)?;
        let len = if ended.op.is_data() { ended.len } else { 0 };
        let outcome = match ended.errno {
            0 if ended.moved_bytes < len => Outcome::Short(ended.moved_bytes),
            0 => Outcome::Whole,
            errno => Outcome::Failed(errno.unsigned_abs()),
        };
        self.writer.push(&Record {
            op: ended.op.into(),
            file,
            origin,
            lane: ended.lane,
            offset: ended.offset,
            len,
            arrival: ended.arrival - self.zero,
            duration: Some(ended.finished.since(ended.arrival)),
            outcome,
        })
    }

    /// The trace's number for a file; `None` beyond the limit.
    fn file(&mut self, key: u64) -> Result<Option<FileId>, TraceError> {
        if let Some(id) = self.files.get(&key) {
            return Ok(Some(*id));
        }
        if self.files.len() >= FILES_MAX {
            return Ok(None);
        }
        let mut path = self.path_of.as_mut().and_then(|path_of| path_of(key)).unwrap_or_default();
        path.truncate(PATH_BYTES_MAX);
        let id = self.writer.file(&FileInfo { path, key, size_bytes: None })?;
        self.files.insert(key, id);
        Ok(Some(id))
    }

    fn origin(&mut self, ended: &Ended) -> Result<OriginId, TraceError> {
        let who = (ended.client, ended.job, ended.user);
        if let Some(id) = self.origins.get(&who) {
            return Ok(*id);
        }
        if self.origins.len() >= ORIGINS_MAX {
            return self.writer.origin(&Origin { label: "others".into(), ..Origin::default() });
        }
        let id = self.writer.origin(&Origin {
            // Clients have 64-bit keys; a process of a trace has a 32-bit number.
            process: self.origins.len() as u32 + 1,
            user: ended.user,
            job: if ended.job == 0 { String::new() } else { ended.job.to_string() },
            label: format!("client {:x}", ended.client),
            ..Origin::default()
        })?;
        self.origins.insert(who, id);
        Ok(id)
    }
}

#[cfg(test)]
mod tests {
    use impresario_sched::{LaneId, Op};

    use super::*;
    use crate::{Ending, Trace, TraceOp};

    fn options(buffer_bytes: usize) -> LiveOptions {
        LiveOptions { header: Header::default(), zero: Nanos(1000), buffer_bytes, limit_bytes: 1 << 30 }
    }

    fn request(i: u64) -> Ended {
        Ended {
            arrival: Nanos(2000 + i * 137_000),
            finished: Nanos(2000 + i * 137_000 + 80_000 + i % 7),
            file: 0xdead_beef,
            client: i % 4,
            job: 3,
            offset: i * 65_536,
            len: 65_536,
            moved_bytes: 65_536,
            user: 1000,
            errno: 0,
            lane: LaneId(0),
            op: Op::Read,
        }
    }

    /// A file system that hangs must not keep a server from ending.
    #[test]
    fn the_end_of_a_trace_is_waited_for_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let path_of: PathOf = Box::new(move |_| gate.recv().ok().and(None));
        let (complained, heard) = std::sync::mpsc::channel();
        let complain = move |why: &TraceError| complained.send(why.to_string()).unwrap();
        let recorder = Recorder::create(&path, &options(8 << 20), Some(path_of), complain).unwrap();
        recorder.ended(&request(1));
        let told = recorder.finish_within(Duration::from_millis(50));
        assert!(
            told.failure.as_ref().is_some_and(|why| why.contains("had not taken the rest after 0.1 s")),
            "{told:?}"
        );
        assert_eq!(heard.try_recv().ok(), told.failure);
        drop(go);
        let deadline = Instant::now() + Duration::from_secs(20);
        while Trace::load(&path).is_ok_and(|trace| trace.ending != Ending::Closed) {
            assert!(Instant::now() < deadline, "it is not written in the end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Opens a trace when something comes, or can come no more.
    fn opening(
        path: &Path,
    ) -> (std::sync::mpsc::Sender<()>, impl FnOnce() -> Result<Writer, TraceError> + Send + 'static) {
        let ((go, gate), path) = (std::sync::mpsc::channel(), path.to_path_buf());
        let open = move || {
            let _ = gate.recv();
            Writer::create(path, &Header::default())
        };
        (go, open)
    }

    #[test]
    fn an_opening_that_hangs_is_given_up_for_good() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let ((go, open), (complained, heard)) = (opening(&path), std::sync::mpsc::channel());
        let complain = move |why: &TraceError| complained.send(why.to_string()).unwrap();
        let recorder = Recorder::begin(folder.path(), open, &options(8 << 20), None, complain).unwrap();
        assert_eq!(recorder.status().path, folder.path());
        recorder.ended(&request(1));
        let why = recorder.opened_within(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(why.contains(folder.path().to_str().unwrap()) && why.contains("no trace within 0.1 s"), "{why}");
        recorder.ended(&request(2));
        let began = Instant::now();
        let told = recorder.finish();
        assert!(began.elapsed() < FINISH_PATIENCE / 2, "nothing is left to wait for");
        assert_eq!((told.not_traced, told.failure.as_ref()), (2, Some(&why)));
        assert_eq!(heard.try_recv().ok(), told.failure);
        assert!(recorder.is_running());
        drop(go);
        assert!(wait_while(&|| recorder.is_running(), Duration::from_secs(20)));
        assert!(!path.exists(), "nobody asked for it");
    }

    #[test]
    fn what_ends_before_a_trace_is_opened_is_in_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let (go, open) = opening(&path);
        let recorder = Recorder::begin(folder.path(), open, &options(8 << 20), None, |e| panic!("{e}")).unwrap();
        (0..10).for_each(|i| recorder.ended(&request(i)));
        drop(go);
        assert_eq!(recorder.opened_within(Duration::from_secs(20)).unwrap(), path);
        let told = recorder.finish();
        assert_eq!((told.path.as_path(), told.requests, told.not_traced), (path.as_path(), 10, 0));
        assert_eq!(Trace::load(&path).unwrap().records.len(), 10);
        // One that fails tells why.
        let (_, open) = opening(&path);
        let recorder = Recorder::begin(folder.path(), open, &options(8 << 20), None, |_| {}).unwrap();
        let why = recorder.opened_within(Duration::from_secs(20)).unwrap_err().to_string();
        assert!(why.contains("t.imt: File exists") && path.exists(), "{why}");
    }

    #[test]
    fn completed_requests_are_traced_once_in_at_most_12_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let recorder = Recorder::create(&path, &options(8 << 20), None, |e| panic!("{e}")).unwrap();
        let count = 40_000;
        (0..count).for_each(|i| recorder.ended(&request(i)));
        recorder.ended(&Ended { op: Op::Sync, len: u64::MAX, moved_bytes: 0, errno: 5, ..request(count) });
        let told = recorder.finish();
        assert_eq!((told.requests, told.not_traced, told.failure), (count + 1, 0, None));
        assert!(told.bytes <= count * 12, "{} bytes", told.bytes);
        let trace = Trace::load(&path).unwrap();
        assert_eq!(
            (trace.ending, trace.records.len() as u64, trace.files[0].key),
            (Ending::Closed, count + 1, 0xdead_beef)
        );
        for (i, r) in trace.records[..count as usize].iter().enumerate() {
            let wanted = request(i as u64);
            assert_eq!((r.offset, r.len, r.arrival), (wanted.offset, wanted.len, wanted.arrival - Nanos(1000)));
            assert_eq!(r.completion(), Some(wanted.finished - Nanos(1000)));
        }
        let last = trace.records.last().unwrap();
        assert_eq!((last.op, last.len, last.outcome), (TraceOp::Sync, 0, Outcome::Failed(5)));
        recorder.ended(&request(0));
        assert_eq!(recorder.finish().not_traced, 1, "after the end");
    }

    /// With a buffer for one request most are lost, none waits, and the counts add up.
    #[test]
    fn requests_that_find_the_buffer_full_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let recorder = Recorder::create(&path, &options(1), None, |e| panic!("{e}")).unwrap();
        (0..50_000).for_each(|i| recorder.ended(&request(i)));
        let told = recorder.finish();
        assert!(told.not_traced > 0);
        assert_eq!(told.requests + told.not_traced, 50_000);
        assert_eq!(Trace::load(&path).unwrap().records.len() as u64, told.requests);
    }

    #[test]
    fn a_trace_that_reaches_its_limit_ends_with_a_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.imt");
        let (complained, heard) = std::sync::mpsc::channel();
        let small = LiveOptions { limit_bytes: 100_000, ..options(64 << 20) };
        let recorder = Recorder::create(&path, &small, None, move |e| complained.send(e.to_string()).unwrap()).unwrap();
        (0..100_000).for_each(|i| recorder.ended(&request(i)));
        assert!(heard.recv_timeout(Duration::from_secs(20)).unwrap().contains("limit of 100000 bytes"));
        recorder.ended(&request(0));
        let told = recorder.finish();
        assert!(told.failure.is_some() && told.not_traced > 50_000);
        let trace = Trace::load(&path).unwrap();
        assert!(trace.records.len() > 5_000 && trace.ending == Ending::Unclosed);
        assert!(std::fs::metadata(&path).unwrap().len() < 200_000);
    }
}
