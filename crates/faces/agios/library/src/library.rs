//! The running library as seen by any thread of the program.

use std::cell::Cell;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use impresario_base::lock::{Apart, Mutex};
use impresario_base::time::wait_while;
use impresario_embed::guard;
#[cfg(not(test))]
use impresario_engine::now;
use impresario_engine::{Inbox, NotSent};
use impresario_sched::{Core, CoreConfig, CostModel, Ended, LaneId, Nanos, Observer, Op, Table};
use impresario_trace::live::{FINISH_PATIENCE, LiveOptions};
use impresario_trace::{Header, Recorder, TraceError, Writer};
use rustc_hash::FxHashMap;

use crate::config::Config;
use crate::files::FileName;
use crate::foretold::Foretelling;
use crate::metrics::Metrics;
use crate::owner::{Desk, Message, NewRequest, Owner};
use crate::requests::{Delivered, Identity, Named};
use crate::say;
use crate::sink::Sink;
#[cfg(test)]
use tests::now;

/// Maximum requests queued and with the program.
const CAPACITY: u32 = Table::CAPACITY_MAX;

/// How long adding waits while the library is full.
const ADD_PATIENCE: Duration = Duration::from_secs(10);

/// Largest number of lines on stderr for each start of the library.
const COMPLAINTS_MAX: u32 = 100;

/// Largest number of traces with one prefix.
const TRACES_MAX: u32 = 100_000;

/// How long `agios_exit` lets callbacks serve what is queued: the program frees their data when it has returned.
const EXIT_PATIENCE: Duration = Duration::from_secs(30);

/// … and how long a callback may take after that.
const LAST_CALLBACK: Duration = Duration::from_secs(1);

/// What the program's threads and the library's share.
pub struct Shared {
    /// What was delivered and not released.
    pub delivered: Delivered,
    /// To the library's thread.
    pub inbox: Inbox<Message>,
    /// The callbacks given to init.
    pub default: Sink,
    /// Batches end when their callback returns, as in AGIOS, not when they are released.
    pub complete_on_return: bool,
    /// Written by the library's thread all the time, seldom read by others. Apart from what they read for each request,
    /// such as the callbacks.
    pub desk: Apart<Mutex<Desk>>,
    /// Names of files by key, while a trace is written; at most as many files as a trace may have.
    names: Option<Mutex<FxHashMap<u64, Box<[u8]>>>>,
    /// Requests given to a callback at most.
    pub together_max: usize,
    /// Queued requests are dropped.
    pub abandon: AtomicBool,
    complaints: Complaints,
}

/// Lines on stderr: so many that a person sees what is wrong, however often it is done.
pub(crate) struct Complaints(AtomicU32);

impl Complaints {
    /// None so far.
    pub(crate) const fn new() -> Complaints {
        Complaints(AtomicU32::new(0))
    }

    /// One line on stderr.
    pub(crate) fn say(&self, text: &str) {
        match self.0.fetch_add(1, Ordering::Relaxed) {
            n if n + 1 < COMPLAINTS_MAX => {
                say!("{text}");
            }
            n if n + 1 == COMPLAINTS_MAX => {
                say!("{text}; further lines are suppressed");
            }
            n => self.0.store(n.min(COMPLAINTS_MAX), Ordering::Relaxed),
        }
    }

    /// Starts anew.
    pub(crate) fn forget(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// Files whose names are kept for a trace.
const NAMES_MAX: usize = 1 << 18;

impl Shared {
    /// One line on stderr.
    pub fn complain(&self, text: &str) {
        self.complaints.say(text);
    }

    /// Keeps the name of a file for the trace.
    fn remember(&self, file: FileName, name: &[u8]) {
        let Some(names) = &self.names else { return };
        let mut names = names.lock_spinning();
        if names.len() < NAMES_MAX {
            names.entry(file.key).or_insert_with(|| name.into());
        }
    }

    fn name_of(&self, key: u64) -> Option<Vec<u8>> {
        self.names.as_ref()?.lock().get(&key).map(|name| name.to_vec())
    }
}

/// The running library.
pub struct Library {
    shared: Arc<Shared>,
    /// Queue ids from here on are refused; `None`: the policy does not look at them.
    queues: Option<u32>,
    /// NOOP: callbacks run on the threads that add.
    direct: bool,
    /// The time of arrival counts.
    stamps: bool,
    /// The program may ask for metrics.
    counts: bool,
    recorder: Option<Arc<Recorder>>,
    foretelling: Foretelling,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Callbacks that run on threads that add.
    direct_calls: AtomicU32,
    closed: AtomicBool,
}

/// Policies that use only the order of arrival, not its time.
const UNTIMED: &[&str] = &["none", "fifo", "to", "to-agg", "sjf", "hbrr", "twins", "wfq"];

thread_local! {
    /// Direct callbacks that run on this thread.
    static INSIDE: Cell<u32> = const { Cell::new(0) };
}

/// The program's generation of the interface, where the library depends on it.
#[derive(Clone, Copy, Debug)]
pub struct Starting {
    /// The callbacks for requests without their own.
    pub default: Sink,
    /// The program may ask for metrics.
    pub counts: bool,
}

impl Library {
    /// Starts the library.
    pub fn start(config: &Config, starting: Starting) -> Result<Library, String> {
        guard::watch_forks();
        let complete_on_return = config.in_flight_requests == 0;
        let core_config = CoreConfig {
            lanes: if config.lane_per_queue { config.queues as u16 } else { 1 },
            // Requests are not split at servers, as in AGIOS.
            shared_space: true,
            // One callback at a time: the next request is chosen when it has returned.
            lane_requests: config.in_flight_requests.max(1),
            lane_bytes: u64::MAX,
            total_requests: if complete_on_return { 1 } else { u32::MAX },
            cost: CostModel::default(),
            started: now(),
            statistics: false,
            ..CoreConfig::single_lane(CAPACITY)
        };
        let core = Core::new(core_config, &config.policy).map_err(|e| e.to_string())?;
        let shared = Arc::new(Shared {
            delivered: Delivered::default(),
            inbox: Inbox::new(CAPACITY),
            default: starting.default,
            complete_on_return,
            desk: Apart(Mutex::new(Desk::new(core, config.lane_per_queue, starting.counts))),
            names: config.trace.is_some().then(Mutex::default),
            together_max: config.aggregation_max,
            abandon: AtomicBool::new(false),
            complaints: Complaints::new(),
        });
        let recorder = match &config.trace {
            Some((prefix, suffix)) => Some(trace(&shared, prefix, suffix, config.trace_buffer_bytes)?),
            None => None,
        };
        let policy = config.policy.name.as_str();
        let direct = policy == "none";
        let thread = if direct {
            None
        } else {
            if let Some(recorder) = &recorder {
                shared.inbox.tell(Message::Observe(recorder.clone()));
            }
            // Neither the time nor what arrives later changes their decisions.
            let merges = config.policy.params.get("merge").is_some_and(|merge| merge == "on");
            let untimed = matches!(policy, "to" | "fifo") && !merges && recorder.is_none();
            let owner = Owner::new(Arc::clone(&shared), untimed);
            let _quiet = guard::Quiet::new(); // the thread inherits it
            let thread = std::thread::Builder::new().name("agios".into()).spawn(move || owner.run());
            Some(thread.map_err(|e| format!("its thread cannot be started ({e}); raise the limit of threads"))?)
        };
        let library = Library {
            queues: matches!(policy, "twins" | "wfq").then_some(config.queues),
            direct,
            counts: starting.counts,
            stamps: starting.counts || recorder.is_some() || !UNTIMED.contains(&policy),
            recorder,
            foretelling: Foretelling::default(),
            thread: Mutex::new(thread),
            direct_calls: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            shared,
        };
        if !config.foretold_by.is_empty() {
            library.foretell(config.foretold_by.clone());
        }
        Ok(library)
    }

    /// One line on stderr.
    pub fn complain(&self, text: &str) {
        self.shared.complain(text);
    }

    /// Starts loading recorded runs, which predict requests from then on.
    pub fn foretell(&self, traces: Vec<PathBuf>) {
        self.foretelling.begin(&self.shared, traces);
    }

    /// Waits until recorded runs are loaded, if any load is running; returns what was wrong with them.
    pub fn wait_foretold(&self) -> Result<(), String> {
        self.foretelling.wait()
    }

    /// Adds a request.
    pub fn add(&self, named: &Named<'_>, identifier: i64, queue_id: i32, sink: Option<Sink>) -> Result<(), String> {
        let queue = queue_id as u32;
        if let Some(queues) = self.queues.filter(|queues| queue >= *queues) {
            return Err(format!(
                "queue_id = {queue_id}: give 0 to {}, or raise max_queue_id of agios_init",
                queues.saturating_sub(1)
            ));
        }
        let sink = sink.filter(|sink| sink.is_there() && *sink != self.shared.default);
        if sink.is_none() && !self.shared.default.is_there() {
            return Err("the request has no callback, and neither has agios_init".into());
        }
        let identity = named.identity();
        self.shared.remember(identity.file, named.file);
        if self.direct {
            return self.serve_directly(identity, identifier, sink);
        }
        let arrival = if self.stamps { now() } else { Nanos::ZERO };
        let request = NewRequest { identity, identifier, arrival, queue, sink };
        match self.shared.inbox.send(Message::Request(request), ADD_PATIENCE) {
            Ok(()) => Ok(()),
            Err(NotSent::Full(_)) => Err(format!("the library is full ({CAPACITY} requests); release some first")),
            Err(NotSent::Closed(_)) => Err("the library is ending".into()),
        }
    }

    /// Without scheduling: calls back at once, on this thread, independently of other threads.
    fn serve_directly(&self, identity: Identity, identifier: i64, sink: Option<Sink>) -> Result<(), String> {
        // Counted before checking: ending closes first and then looks at the count.
        self.direct_calls.fetch_add(1, Ordering::SeqCst);
        INSIDE.set(INSIDE.get() + 1);
        let _running = Running(self);
        if self.closed.load(Ordering::SeqCst) {
            return Err("the library is ending".into());
        }
        // Only metrics and traces have the time of arrival.
        let arrival = if self.counts || self.recorder.is_some() { now() } else { Nanos::ZERO };
        if self.counts {
            self.shared.desk.0.lock_spinning().count_arrival(&identity, arrival);
        }
        self.shared.delivered.add(identity, 0);
        sink.unwrap_or(self.shared.default).call_one(identifier);
        self.shared.delivered.served(1);
        if let Some(recorder) = &self.recorder {
            let Identity { file, offset, len, write } = identity;
            recorder.ended(&Ended {
                arrival,
                finished: now(),
                file: file.key,
                client: 0,
                job: 0,
                offset,
                len,
                moved_bytes: len,
                user: 0,
                errno: 0,
                lane: LaneId(0),
                op: if write { Op::Write } else { Op::Read },
            });
        }
        Ok(())
    }

    /// Releases the request with this identity that was delivered first.
    pub fn release(&self, named: &Named<'_>) -> Result<(), String> {
        let identity = named.identity();
        let Some(batch) = self.shared.delivered.release(&identity) else {
            return Err(format!("{} was not delivered; it cannot be released", named.shown()));
        };
        if self.counts {
            match self.direct {
                true => self.shared.desk.0.lock_spinning().count_release(&identity),
                false => self.shared.inbox.tell(Message::Counted(identity)),
            }
        }
        if !self.shared.complete_on_return && !self.direct {
            self.shared.inbox.tell(Message::Released(batch));
        }
        Ok(())
    }

    /// Cancels the youngest queued request with this identity.
    pub fn cancel(&self, named: &Named<'_>) -> Result<(), String> {
        match self.shared.desk.0.lock_spinning().cancel(&self.shared, &named.identity()) {
            true => Ok(()),
            false => Err(format!("{} is not queued; it cannot be cancelled", named.shown())),
        }
    }

    /// Metrics since the start or the last reset.
    pub fn metrics(&self, reset: bool) -> Metrics {
        self.shared.desk.0.lock_spinning().metrics(&self.shared, reset)
    }

    /// A callback runs on this thread.
    pub fn in_callback(&self) -> bool {
        self.shared.inbox.is_owner() || INSIDE.get() > 0
    }

    /// Stops the library: refuses new requests, has what is queued delivered, and waits for callbacks.
    pub fn stop(&self) -> Result<(), String> {
        self.closed.store(true, Ordering::SeqCst);
        self.shared.inbox.close();
        self.foretelling.begin_stop();
        self.shared.inbox.tell(Message::Stop);
        let end = Instant::now() + EXIT_PATIENCE;
        let thread = self.thread.lock().take();
        let runs = || thread.as_ref().is_some_and(|t| !t.is_finished()) || self.direct_calls.load(Ordering::SeqCst) > 0;
        wait_while(&runs, EXIT_PATIENCE);
        if runs() {
            self.shared.abandon.store(true, Ordering::Relaxed);
            wait_while(&runs, LAST_CALLBACK);
        }
        let late = runs();
        if let Some(thread) = thread.filter(|t| t.is_finished()) {
            let _ = thread.join();
        }
        // What these wait for is a file system, which may hang.
        let left = || end.saturating_duration_since(Instant::now()).max(LAST_CALLBACK);
        self.foretelling.stop(left());
        if let Some(recorder) = &self.recorder {
            recorder.finish_within(left().max(FINISH_PATIENCE));
        }
        if late {
            return Err("a callback has not returned within 30 s; its thread keeps running".into());
        }
        self.shared.delivered.clear();
        Ok(())
    }
}

/// Held while a direct callback runs.
struct Running<'a>(&'a Library);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        INSIDE.set(INSIDE.get() - 1);
        self.0.direct_calls.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Starts a trace in the first of `prefix.1.suffix`, `prefix.2.suffix`, … that does not exist.
fn trace(shared: &Arc<Shared>, prefix: &str, suffix: &str, bytes: usize) -> Result<Arc<Recorder>, String> {
    let (ours, theirs) = (Arc::downgrade(shared), Arc::downgrade(shared));
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let options = LiveOptions {
        header: Header {
            clock_unix_ns: u64::try_from(unix.as_nanos()).ok(),
            source: concat!("impresario ", env!("CARGO_PKG_VERSION"), ", libagios").into(),
            command: crate::foretold::TRACED_BY.into(),
            ..Header::default()
        },
        zero: now(),
        buffer_bytes: bytes,
        limit_bytes: u64::MAX,
    };
    let _quiet = guard::Quiet::new(); // the writer's thread inherits it
    let path_of = Box::new(move |key| ours.upgrade()?.name_of(key));
    let complain = move |error: &TraceError| {
        if let Some(shared) = theirs.upgrade() {
            shared.complain(&format!("the trace ends here, the library continues: {error}"));
        }
    };
    let place = PathBuf::from(format!("{prefix}.*.{suffix}"));
    let open = {
        let (prefix, suffix, header) = (prefix.to_string(), suffix.to_string(), options.header.clone());
        let place = place.clone();
        move || {
            for n in 1..=TRACES_MAX {
                match Writer::create(format!("{prefix}.{n}.{suffix}"), &header) {
                    Err(TraceError::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => {}
                    opened => return opened,
                }
            }
            Err(TraceError::File { path: place, reason: format!("there are {TRACES_MAX} traces; remove some") })
        }
    };
    let recorder = Recorder::create_by(&place, open, &options, Some(path_of), complain);
    recorder.map_err(|e| format!("the trace cannot be created: {e}; see trace_file_prefix"))
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use super::*;
    use crate::config;

    thread_local! {
        static READ: Cell<u32> = const { Cell::new(0) };
    }

    /// Counts how often this thread asks for the time.
    pub(super) fn now() -> Nanos {
        READ.set(READ.get() + 1);
        impresario_engine::now()
    }

    unsafe extern "C" fn served(_: i64) -> *mut c_void {
        std::ptr::null_mut()
    }

    /// How often adding and releasing a request reads the clock.
    fn clocks(keys: &str, counts: bool) -> u32 {
        let (config, _) = config::read(&format!("library_options = {{ {keys} }}"), "f", 4).unwrap();
        let library =
            Library::start(&config, Starting { default: Sink::Identifiers(Some(served), None), counts }).unwrap();
        let named = Named { file: b"f", write: true, offset: 0, len: 10 };
        let before = READ.get();
        library.add(&named, 1, 0, None).unwrap();
        wait_while(&|| library.release(&named).is_err(), Duration::from_secs(10));
        let read = READ.get() - before;
        library.stop().unwrap();
        read
    }

    /// The time of an arrival is read where a rule, a metric or a trace needs it.
    #[test]
    fn requests_read_no_clock_that_nobody_needs() {
        let folder = tempfile::tempdir().unwrap();
        for algorithm in ["NOOP", "TO", "FIFO", "SJF", "TO-agg", "HBRR", "TWINS"] {
            let keys = format!("default_algorithm = \"{algorithm}\"");
            assert_eq!((clocks(&keys, false), clocks(&keys, true)), (0, 1), "{algorithm}");
        }
        for algorithm in ["SW", "MLF", "aIOLi"] {
            assert_eq!(clocks(&format!("default_algorithm = \"{algorithm}\""), false), 1, "{algorithm}");
        }
        let prefix = folder.path().join("t").display().to_string();
        let keys = format!("default_algorithm = \"NOOP\" trace = true trace_file_prefix = \"{prefix}\"");
        assert_eq!(clocks(&keys, false), 2, "arrival and completion");
    }
}
