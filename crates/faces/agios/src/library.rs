//! The running library: identities of requests, their callbacks, and metrics.
//!
//! AGIOS identifies a request by file, type, length and offset in every call. They select the request's entry, whose
//! number is the scheduler's token.

use std::collections::VecDeque;
use std::collections::hash_map::Entry as MapEntry;
use std::ffi::c_void;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use impresario_base::lock::{Mutex, MutexGuard};
use impresario_base::slab::{self, Slab};
use impresario_embed::{Delivery, Dispatch, Misuse, Options, Receiver, Scheduler, Submit, Traces};
use impresario_sched::{Op, Table};
use impresario_trace::{TraceError, key_of_name};
use rustc_hash::FxHashMap;

use crate::config::Config;
use crate::metrics::{Metrics, Pattern};
use crate::say;

/// The callback for one request.
#[derive(Clone, Copy)]
pub enum One {
    /// The function given to init, version 2 and later.
    Identifier(unsafe extern "C" fn(i64) -> *mut c_void),
    /// A request's own function and its argument, version 3.
    Own(unsafe extern "C" fn(i64, *mut c_void) -> *mut c_void, *mut c_void),
    /// From `struct client`.
    Data(unsafe extern "C" fn(i64)),
}

/// The callback for several requests at once.
#[derive(Clone, Copy)]
pub enum Many {
    /// The function given to init, version 2 and later.
    Identifiers(unsafe extern "C" fn(*mut i64, i32) -> *mut c_void),
    /// From `struct client`.
    Data(unsafe extern "C" fn(*mut i64, i32)),
}

/// The callbacks of a request.
#[derive(Clone, Copy, Default)]
pub struct Sink {
    /// For a single request; `None`: `many` with one.
    pub one: Option<One>,
    /// For several requests with the same callback.
    pub many: Option<Many>,
}

// SAFETY: the pointer in it is only passed to the program's own function.
unsafe impl Send for Sink {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Sink {}

impl Sink {
    /// Whether there is a callback.
    pub fn is_there(&self) -> bool {
        self.one.is_some() || self.many.is_some()
    }

    fn many_address(&self) -> Option<usize> {
        self.many.map(|many| match many {
            Many::Identifiers(f) => f as usize,
            Many::Data(f) => f as usize,
        })
    }

    fn call_one(&self, mut identifier: i64) {
        // SAFETY: functions of the types that the header asks for.
        unsafe {
            match self.one {
                Some(One::Identifier(f)) => drop(f(identifier)),
                Some(One::Own(f, argument)) => drop(f(identifier, argument)),
                Some(One::Data(f)) => f(identifier),
                None => self.call_many(std::slice::from_mut(&mut identifier)),
            }
        }
    }

    fn call_many(&self, identifiers: &mut [i64]) {
        let count = identifiers.len() as i32;
        // SAFETY: functions of the types that the header asks for; the array has `count` numbers.
        unsafe {
            match self.many {
                Some(Many::Identifiers(f)) => drop(f(identifiers.as_mut_ptr(), count)),
                Some(Many::Data(f)) => f(identifiers.as_mut_ptr(), count),
                None => {}
            }
        }
    }
}

/// The identity of a request.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// The file, as the program names it.
    pub file: &'a [u8],
    /// Write or read.
    pub write: bool,
    /// Offset, bytes.
    pub offset: i64,
    /// Length, bytes.
    pub len: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    file: u64,
    write: bool,
    offset: i64,
    len: i64,
}

struct Entry {
    key: Key,
    identifier: i64,
    sink: Sink,
    /// The scheduler's number; 0 until `submit` has returned.
    id: u64,
    /// Batch and index in it, once delivered.
    delivered: Option<(u64, u32)>,
    /// The next younger entry of the same key.
    younger: Option<u32>,
}

struct File {
    number: u64,
    references: u32,
}

#[derive(Default)]
struct State {
    files: FxHashMap<Arc<[u8]>, File>,
    names: FxHashMap<u64, Arc<[u8]>>,
    /// Oldest and youngest entry of each key.
    requests: FxHashMap<Key, (u32, u32)>,
    entries: Slab<Entry>,
    /// Tokens of requests that were delivered and have left the scheduler, in that order.
    unreleased: VecDeque<u64>,
    metrics: Metrics,
}

/// A request not released while this many later ones were delivered is forgotten.
const UNRELEASED_MAX: usize = Table::CAPACITY_MAX as usize;

/// Largest number of lines on stderr for each start of the library.
const COMPLAINTS_MAX: u32 = 100;

/// Largest number of traces with one prefix.
const TRACES_MAX: u32 = 100_000;

/// How long `agios_exit` waits for callbacks that do I/O: the program frees their data when it has returned.
const EXIT_PATIENCE: Duration = Duration::from_secs(30);

/// The running library.
pub struct Library {
    scheduler: Arc<Scheduler>,
    shared: Arc<Shared>,
    queues: u32,
    lane_per_queue: bool,
}

struct Shared {
    state: Mutex<State>,
    /// Complete a batch when its callback returns, as AGIOS does, not when it is released.
    complete_on_return: bool,
    scheduler: OnceLock<Weak<Scheduler>>,
    default: Sink,
    complaints: AtomicU32,
}

impl State {
    fn file(&mut self, name: &[u8]) -> u64 {
        if let Some(file) = self.files.get_mut(name) {
            file.references += 1;
            return file.number;
        }
        let name: Arc<[u8]> = name.into();
        // The same in every run, so that a run's trace tells of the next one. Two names of one hash are told apart.
        let mut number = key_of_name(&name);
        while self.names.contains_key(&number) {
            number = number.wrapping_add(1);
        }
        self.files.insert(Arc::clone(&name), File { number, references: 1 });
        self.names.insert(number, name);
        number
    }

    fn release_file(&mut self, number: u64) {
        let Some(name) = self.names.get(&number) else { return };
        let Some(file) = self.files.get_mut(name) else { return };
        file.references -= 1;
        if file.references == 0 {
            self.files.remove(name);
            self.names.remove(&number);
        }
    }

    fn key(&self, named: &Named<'_>) -> Option<Key> {
        let file = self.files.get(named.file)?.number;
        Some(Key { file, write: named.write, offset: named.offset, len: named.len })
    }

    fn entry(&self, place: u32) -> Option<&Entry> {
        self.entries.at(place)
    }

    fn by_token(&mut self, token: u64) -> Option<&mut Entry> {
        self.entries.get_mut(slab::Key { index: token as u32, generation: ((token >> 32) as u32).wrapping_sub(1) })
    }

    /// Adds an entry; returns its token and the number of its file.
    fn insert(&mut self, named: &Named<'_>, identifier: i64, sink: Sink) -> (u64, u64) {
        let key = Key { file: self.file(named.file), write: named.write, offset: named.offset, len: named.len };
        let slab::Key { index: at, generation } =
            self.entries.insert(Entry { key, identifier, sink, id: 0, delivered: None, younger: None });
        // One more, so that no token is 0.
        let token = u64::from(generation.wrapping_add(1)) << 32 | u64::from(at);
        match self.requests.entry(key) {
            MapEntry::Vacant(new) => {
                new.insert((at, at));
            }
            MapEntry::Occupied(mut there) => {
                let youngest = std::mem::replace(&mut there.get_mut().1, at);
                if let Some(entry) = self.entries.at_mut(youngest) {
                    entry.younger = Some(at);
                }
            }
        }
        (token, key.file)
    }

    /// The entries of a key, oldest first.
    fn same(&self, key: Key) -> impl Iterator<Item = (u32, &Entry)> {
        let mut next = self.requests.get(&key).map(|(oldest, _)| *oldest);
        std::iter::from_fn(move || {
            let at = next?;
            let entry = self.entry(at)?;
            next = entry.younger;
            Some((at, entry))
        })
    }

    fn remove(&mut self, at: u32) -> Option<Entry> {
        let entry = self.entries.remove_at(at)?;
        if let Some((oldest, youngest)) = self.requests.get(&entry.key).copied() {
            if oldest == at {
                match entry.younger {
                    Some(younger) => drop(self.requests.insert(entry.key, (younger, youngest))),
                    None => drop(self.requests.remove(&entry.key)),
                }
            } else {
                let mut before = oldest;
                while let Some(older) = self.entries.at_mut(before) {
                    match older.younger {
                        Some(next) if next == at => {
                            older.younger = entry.younger;
                            break;
                        }
                        Some(next) => before = next,
                        None => break,
                    }
                }
                if youngest == at {
                    self.requests.insert(entry.key, (oldest, before));
                }
            }
        }
        self.release_file(entry.key.file);
        Some(entry)
    }

    /// Records that the scheduler is done with a request that the program has not released yet.
    fn awaits_release(&mut self, token: u64) {
        if self.unreleased.len() >= UNRELEASED_MAX
            && let Some(oldest) = self.unreleased.pop_front()
            && self.by_token(oldest).is_some()
        {
            self.remove(oldest as u32);
        }
        self.unreleased.push_back(token);
    }

    /// The metrics of a file and type; they keep the file's number in use.
    fn pattern(&mut self, file: u64, write: bool) -> Option<&mut Pattern> {
        if !self.metrics.knows(file, write) {
            if self.metrics.is_full() {
                return None;
            }
            let name = self.names.get(&file)?;
            self.files.get_mut(name)?.references += 1;
        }
        Some(self.metrics.pattern(file, write))
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under this lock calls the program, and nothing of ours panics half-way.
        self.state.lock()
    }

    fn complain(&self, text: &str) {
        match self.complaints.fetch_add(1, Ordering::Relaxed) {
            n if n + 1 < COMPLAINTS_MAX => {
                say!("{text}");
            }
            n if n + 1 == COMPLAINTS_MAX => {
                say!("{text}; further lines are suppressed");
            }
            n => self.complaints.store(n.min(COMPLAINTS_MAX), Ordering::Relaxed),
        }
    }

    /// Begins a trace in the first of `prefix.1.suffix`, `prefix.2.suffix`, … that does not exist.
    fn trace(self: &Arc<Self>, scheduler: &Scheduler, prefix: &str, suffix: &str, bytes: usize) -> Result<(), String> {
        for n in 1..=TRACES_MAX {
            let path = format!("{prefix}.{n}.{suffix}");
            let (ours, theirs) = (Arc::downgrade(self), Arc::downgrade(self));
            let traces = Traces {
                command: "libagios".into(),
                buffer_bytes: bytes,
                limit_bytes: u64::MAX,
                path_of: Some(Box::new(move |key| {
                    let name = ours.upgrade()?.lock().names.get(&key).cloned()?;
                    Some(name.to_vec())
                })),
                complain: Box::new(move |error| {
                    if let Some(shared) = theirs.upgrade() {
                        shared.complain(&format!("the trace ends here, the library goes on: {error}"));
                    }
                }),
            };
            match scheduler.start_trace(path.as_ref(), traces) {
                Ok(()) => return Ok(()),
                Err(TraceError::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(format!("the trace cannot be created: {e}; see trace_file_prefix")),
            }
        }
        Err(format!("there are {TRACES_MAX} traces {prefix}.*.{suffix}; remove some"))
    }

    /// Delivers a batch to the program, on the dispatcher's thread.
    fn hand(&self, delivery: &Delivery) {
        let batch = delivery.batch();
        let mut calls: Vec<(i64, Sink)> = Vec::with_capacity(delivery.members().len());
        {
            let mut state = self.lock();
            for member in delivery.members() {
                if let Some(entry) = state.by_token(member.token) {
                    entry.delivered = Some((batch.id, member.member));
                    calls.push((entry.identifier, entry.sink));
                    if self.complete_on_return {
                        state.awaits_release(member.token);
                    }
                }
            }
        }
        let many = calls.first().and_then(|(_, sink)| sink.many_address());
        let together = calls.len() > 1 && many.is_some() && calls.iter().all(|(_, sink)| sink.many_address() == many);
        if together {
            let mut identifiers: Vec<i64> = calls.iter().map(|(identifier, _)| *identifier).collect();
            calls[0].1.call_many(&mut identifiers);
        } else {
            calls.iter().for_each(|(identifier, sink)| sink.call_one(*identifier));
        }
        if self.complete_on_return
            && let Some(scheduler) = self.scheduler.get().and_then(Weak::upgrade)
        {
            // It may be gone already if the library is ending.
            let _ = scheduler.complete(batch.id, 0, batch.len);
        }
    }
}

impl Library {
    /// Starts the library.
    pub fn start(config: &Config, default: Sink) -> Result<Library, String> {
        let complete_on_return = config.in_flight_requests == 0;
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            complete_on_return,
            scheduler: OnceLock::new(),
            default,
            complaints: AtomicU32::new(0),
        });
        let options = Options {
            policy: config.policy.clone(),
            lanes: if config.lane_per_queue { config.queues as u16 } else { 1 },
            // Requests are not split at servers, as in AGIOS.
            shared_space: true,
            // One callback at a time: the next request is chosen when it has returned.
            lane_requests: config.in_flight_requests.max(1),
            total_requests: if complete_on_return { 1 } else { u32::MAX },
            queue_requests: Table::CAPACITY_MAX,
            dispatch: Dispatch::Threads(1),
            ..Options::default()
        };
        let receiver = Receiver::Call(Box::new({
            let shared = Arc::clone(&shared);
            move |delivery| shared.hand(delivery)
        }));
        let scheduler = Arc::new(Scheduler::new(options, receiver)?);
        let _ = shared.scheduler.set(Arc::downgrade(&scheduler));
        if let Some((prefix, suffix)) = &config.trace {
            shared.trace(&scheduler, prefix, suffix, config.trace_buffer_bytes)?;
        }
        Ok(Library { scheduler, shared, queues: config.queues, lane_per_queue: config.lane_per_queue })
    }

    /// One line on stderr.
    pub fn complain(&self, text: &str) {
        self.shared.complain(text);
    }

    /// Adds a request.
    pub fn add(&self, named: &Named<'_>, identifier: i64, queue_id: i32, sink: Option<Sink>) -> Result<(), String> {
        let queue = u32::try_from(queue_id).ok().filter(|q| *q < self.queues).ok_or_else(|| {
            format!("queue_id = {queue_id}: give 0 to {}, or raise max_queue_id of agios_init", self.queues - 1)
        })?;
        let sink = sink.filter(Sink::is_there).unwrap_or(self.shared.default);
        if !sink.is_there() {
            return Err("the request has no callback, and neither has agios_init".into());
        }
        let (token, file) = {
            let mut state = self.shared.lock();
            let (token, file) = state.insert(named, identifier, sink);
            state.metrics.arrived(Instant::now(), named.write, named.len as u64);
            if let Some(pattern) = state.pattern(file, named.write) {
                pattern.arrived(named.offset as u64, named.len as u64);
            }
            (token, file)
        };
        let submit = Submit {
            op: if named.write { Op::Write } else { Op::Read },
            file,
            offset: named.offset as u64,
            len: named.len as u64,
            token,
            job: u64::from(queue),
            lane: if self.lane_per_queue { queue as u16 } else { 0 },
            ..Submit::default()
        };
        match self.scheduler.submit(&submit) {
            Ok(id) => {
                let mut state = self.shared.lock();
                // It may have been delivered and released meanwhile.
                if let Some(entry) = state.by_token(token) {
                    entry.id = id;
                }
                Ok(())
            }
            Err(refused) => {
                self.shared.lock().remove(token as u32);
                Err(match refused {
                    Misuse::Full(n) => format!("the library is full ({n} requests); release some first"),
                    other => other.to_string(),
                })
            }
        }
    }

    /// Releases the oldest delivered request with this identity.
    pub fn release(&self, named: &Named<'_>) -> Result<(), String> {
        let entry = {
            let mut state = self.shared.lock();
            let at =
                state.key(named).and_then(|key| state.same(key).find(|(_, e)| e.delivered.is_some()).map(|(at, _)| at));
            let pattern = at.and_then(|at| state.entry(at)).map(|e| e.key);
            if let Some(pattern) = pattern.and_then(|key| state.pattern(key.file, key.write)) {
                pattern.served_bytes += named.len as u64;
            }
            at.and_then(|at| state.remove(at))
        };
        let Some(entry) = entry else {
            return Err(format!("{} was not delivered; it cannot be released", named.shown()));
        };
        if let Some((batch, member)) = entry.delivered.filter(|_| !self.shared.complete_on_return) {
            self.scheduler.complete_member(batch, member, 0, named.len as u64).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Cancels the youngest queued request with this identity.
    pub fn cancel(&self, named: &Named<'_>) -> Result<(), String> {
        let mut state = self.shared.lock();
        let waiting: Vec<(u32, u64)> = state.key(named).map_or_else(Vec::new, |key| {
            state.same(key).filter(|(_, e)| e.delivered.is_none() && e.id != 0).map(|(at, e)| (at, e.id)).collect()
        });
        for (at, id) in waiting.into_iter().rev() {
            // Under the lock: the scheduler never calls back on this thread.
            if self.scheduler.cancel(id).is_some() {
                state.remove(at);
                return Ok(());
            }
        }
        Err(format!("{} is not queued; it cannot be cancelled", named.shown()))
    }

    /// Metrics since the start or the last call.
    pub fn take_metrics(&self) -> Metrics {
        let mut state = self.shared.lock();
        let metrics = std::mem::take(&mut state.metrics);
        for (file, _) in metrics.files() {
            state.release_file(file);
        }
        metrics
    }

    /// Metrics as text.
    pub fn metrics_text(&self) -> String {
        self.shared.lock().metrics.to_string()
    }

    /// Stops the library. Drops queued requests.
    pub fn stop(&self) -> Result<(), String> {
        let end = Instant::now() + EXIT_PATIENCE;
        let mut left = self.scheduler.shutdown(Duration::ZERO).map_err(|e| e.to_string())?;
        while left.running > 0 && Instant::now() < end {
            left = self.scheduler.shutdown(Duration::ZERO).map_err(|e| e.to_string())?; // waits a second each time
        }
        if left.running > 0 {
            return Err("a callback has not returned within 30 s; its thread keeps running".into());
        }
        Ok(())
    }
}

impl Named<'_> {
    fn shown(&self) -> String {
        let op = if self.write { "write" } else { "read" };
        format!("{op} of {} bytes at {} of \"{}\"", self.len, self.offset, String::from_utf8_lossy(self.file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files have the same number in every run, and two names of one hash different ones.
    #[test]
    fn files_are_numbered_by_their_names() {
        let mut state = State::default();
        let number = key_of_name(b"f");
        assert_eq!((state.file(b"a"), state.file(b"f")), (key_of_name(b"a"), number));
        let mut other = State::default();
        assert_eq!(other.file(b"f"), number);
        // As if another name had that hash.
        let mut clashing = State::default();
        clashing.names.insert(number, b"g"[..].into());
        assert_eq!(clashing.file(b"f"), number + 1);
    }

    /// A program that never releases cannot make the library grow; a program that releases loses no request.
    #[test]
    fn what_is_never_released_is_forgotten_at_last() {
        let mut state = State::default();
        let name = |offset: i64| Named { file: b"f", write: false, offset, len: 1 };
        let count = UNRELEASED_MAX as i64 + 1000;
        for offset in 0..count {
            let (token, _) = state.insert(&name(offset), offset, Sink::default());
            state.awaits_release(token);
            if offset == 5 {
                state.remove(token as u32);
            }
        }
        assert_eq!((state.entries.len(), state.requests.len()), (UNRELEASED_MAX, UNRELEASED_MAX));
        let there = |offset| state.key(&name(offset)).is_some_and(|key| state.requests.contains_key(&key));
        assert!(!there(0) && !there(999) && there(1000) && there(count - 1));
    }
}
