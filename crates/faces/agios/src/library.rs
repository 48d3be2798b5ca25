//! The running library: which request is which, who is called for it, and what was seen.
//!
//! AGIOS names a request by its file, type, length and offset at every call; here that finds the request's entry, and the
//! entry's number is the scheduler's token for it.

use std::collections::VecDeque;
use std::collections::hash_map::Entry as MapEntry;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use impresario_embed::{Dispatch, Handed, Misuse, Options, Receiver, Scheduler, Submit};
use impresario_sched::{Op, Table};
use rustc_hash::FxHashMap;

use crate::config::Config;
use crate::metrics::{Metrics, Pattern};
use crate::say;
use crate::trace::Trace;

/// Who gets one request.
#[derive(Clone, Copy)]
pub enum One {
    /// A function given to init, version 2 and later.
    Identifier(unsafe extern "C" fn(i64) -> *mut c_void),
    /// A request's own function with its argument, version 3.
    Own(unsafe extern "C" fn(i64, *mut c_void) -> *mut c_void, *mut c_void),
    /// Of `struct client`.
    Data(unsafe extern "C" fn(i64)),
}

/// Who gets several requests at once.
#[derive(Clone, Copy)]
pub enum Many {
    /// A function given to init, version 2 and later.
    Identifiers(unsafe extern "C" fn(*mut i64, i32) -> *mut c_void),
    /// Of `struct client`.
    Data(unsafe extern "C" fn(*mut i64, i32)),
}

/// Who is called for a request.
#[derive(Clone, Copy, Default)]
pub struct Sink {
    /// For it alone; `None`: `many` with one.
    pub one: Option<One>,
    /// For several that all have this one.
    pub many: Option<Many>,
}

// SAFETY: the pointer in it is only passed to the program's own function.
unsafe impl Send for Sink {}
// SAFETY: as above; nothing in it changes.
unsafe impl Sync for Sink {}

impl Sink {
    /// Somebody is called.
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

/// What names a request.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// The file, as the program writes it.
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
    /// The scheduler's number; 0 until submitting has returned.
    id: u64,
    /// Batch and place in it, once handed over.
    handed: Option<(u64, u32)>,
    /// The next younger entry of the same key.
    younger: Option<u32>,
}

#[derive(Default)]
struct Place {
    generation: u32,
    entry: Option<Entry>,
}

struct File {
    number: u64,
    references: u32,
}

#[derive(Default)]
struct State {
    files: FxHashMap<Arc<[u8]>, File>,
    names: FxHashMap<u64, Arc<[u8]>>,
    next_file: u64,
    /// Oldest and youngest entry of each key.
    requests: FxHashMap<Key, (u32, u32)>,
    places: Vec<Place>,
    free: Vec<u32>,
    /// Tokens of what was handed over and is out of the scheduler, in that order.
    unreleased: VecDeque<u64>,
    metrics: Metrics,
    trace: Option<Trace>,
}

/// A request that was not released when so many later ones were handed over never will be: it is forgotten.
const UNRELEASED_MAX: usize = Table::CAPACITY_MAX as usize;

/// Lines on stderr for each start of the library.
const COMPLAINTS_MAX: u32 = 100;

/// How long ending waits for callbacks that do I/O: the program frees what they use when `agios_exit` has returned.
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
        let number = self.next_file;
        self.next_file += 1;
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
        self.places.get(place as usize)?.entry.as_ref()
    }

    fn by_token(&mut self, token: u64) -> Option<&mut Entry> {
        let place = self.places.get_mut(token as u32 as usize)?;
        if u64::from(place.generation) == token >> 32 { place.entry.as_mut() } else { None }
    }

    /// Its token, and the number of its file.
    fn insert(&mut self, named: &Named<'_>, identifier: i64, sink: Sink) -> (u64, u64) {
        let key = Key { file: self.file(named.file), write: named.write, offset: named.offset, len: named.len };
        let at = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[at as usize];
        place.generation = place.generation.wrapping_add(1);
        place.entry = Some(Entry { key, identifier, sink, id: 0, handed: None, younger: None });
        let token = u64::from(place.generation) << 32 | u64::from(at);
        match self.requests.entry(key) {
            MapEntry::Vacant(new) => {
                new.insert((at, at));
            }
            MapEntry::Occupied(mut there) => {
                let youngest = std::mem::replace(&mut there.get_mut().1, at);
                if let Some(entry) = self.places[youngest as usize].entry.as_mut() {
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
        let entry = self.places.get_mut(at as usize)?.entry.take()?;
        self.free.push(at);
        if let Some((oldest, youngest)) = self.requests.get(&entry.key).copied() {
            if oldest == at {
                match entry.younger {
                    Some(younger) => drop(self.requests.insert(entry.key, (younger, youngest))),
                    None => drop(self.requests.remove(&entry.key)),
                }
            } else {
                let mut before = oldest;
                while let Some(older) = self.places[before as usize].entry.as_mut() {
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

    /// Notes that the scheduler is done with a request that the program has not released yet.
    fn awaits_release(&mut self, token: u64) {
        if self.unreleased.len() >= UNRELEASED_MAX
            && let Some(oldest) = self.unreleased.pop_front()
            && self.by_token(oldest).is_some()
        {
            self.remove(oldest as u32);
        }
        self.unreleased.push_back(token);
    }

    /// What the metrics keep of a file and type; holds the file's number while they do.
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complain(&self, text: &str) {
        match self.complaints.fetch_add(1, Ordering::Relaxed) {
            n if n + 1 < COMPLAINTS_MAX => {
                say!("{text}");
            }
            n if n + 1 == COMPLAINTS_MAX => {
                say!("{text}; further lines are left out");
            }
            n => self.complaints.store(n.min(COMPLAINTS_MAX), Ordering::Relaxed),
        }
    }

    /// Hands a batch to the program, on the dispatcher's thread.
    fn hand(&self, handed: &Handed) {
        let batch = handed.batch();
        let mut calls: Vec<(i64, Sink)> = Vec::with_capacity(handed.members().len());
        {
            let mut state = self.lock();
            for member in handed.members() {
                if let Some(entry) = state.by_token(member.token) {
                    entry.handed = Some((batch.id, member.member));
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
            // It may be gone already when the library ends meanwhile.
            let _ = scheduler.complete(batch.id, 0, batch.len);
        }
    }
}

impl Library {
    /// Starts it.
    pub fn start(config: &Config, default: Sink) -> Result<Library, String> {
        let buffer = config.trace_buffer_bytes;
        let trace = config.trace.as_ref().map(|(prefix, suffix)| Trace::create(prefix, suffix, buffer)).transpose()?;
        let complete_on_return = config.in_flight_requests == 0;
        let shared = Arc::new(Shared {
            state: Mutex::new(State { trace, ..State::default() }),
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
            move |handed| shared.hand(handed)
        }));
        let scheduler = Arc::new(Scheduler::new(options, receiver)?);
        let _ = shared.scheduler.set(Arc::downgrade(&scheduler));
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
            return Err("the request has no callback, and agios_init was given none".into());
        }
        let (token, file) = {
            let mut state = self.shared.lock();
            let (token, file) = state.insert(named, identifier, sink);
            state.metrics.arrived(Instant::now(), named.write, named.len as u64);
            if let Some(pattern) = state.pattern(file, named.write) {
                pattern.arrived(named.offset as u64, named.len as u64);
            }
            if let Some(trace) = state.trace.as_mut()
                && let Err(what) = trace.add(&String::from_utf8_lossy(named.file), named.write, named.offset, named.len)
            {
                self.complain(&what);
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
                // It may have been handed over and released meanwhile.
                if let Some(entry) = state.by_token(token) {
                    entry.id = id;
                }
                Ok(())
            }
            Err(refused) => {
                self.shared.lock().remove(token as u32);
                Err(match refused {
                    Misuse::Full(n) => format!("{n} requests are in the library already; release some first"),
                    other => other.to_string(),
                })
            }
        }
    }

    /// Releases the oldest such request that was handed over.
    pub fn release(&self, named: &Named<'_>) -> Result<(), String> {
        let entry = {
            let mut state = self.shared.lock();
            let at =
                state.key(named).and_then(|key| state.same(key).find(|(_, e)| e.handed.is_some()).map(|(at, _)| at));
            let pattern = at.and_then(|at| state.entry(at)).map(|e| e.key);
            if let Some(pattern) = pattern.and_then(|key| state.pattern(key.file, key.write)) {
                pattern.served_bytes += named.len as u64;
            }
            at.and_then(|at| state.remove(at))
        };
        let Some(entry) = entry else {
            return Err(format!("{} was not handed over; it cannot be released", named.shown()));
        };
        if let Some((batch, member)) = entry.handed.filter(|_| !self.shared.complete_on_return) {
            self.scheduler.complete_member(batch, member, 0, named.len as u64).map_err(|e| e.to_string())?;
        }
        Ok(())
    }

    /// Takes the youngest such request back that still waits.
    pub fn cancel(&self, named: &Named<'_>) -> Result<(), String> {
        let mut state = self.shared.lock();
        let waiting: Vec<(u32, u64)> = state.key(named).map_or_else(Vec::new, |key| {
            state.same(key).filter(|(_, e)| e.handed.is_none() && e.id != 0).map(|(at, e)| (at, e.id)).collect()
        });
        for (at, id) in waiting.into_iter().rev() {
            // Under the lock: the scheduler never calls back on this thread.
            if self.scheduler.cancel(id).is_some() {
                state.remove(at);
                return Ok(());
            }
        }
        Err(format!("{} does not wait; it cannot be cancelled", named.shown()))
    }

    /// What was seen since the start or the last call.
    pub fn take_metrics(&self) -> Metrics {
        let mut state = self.shared.lock();
        let metrics = std::mem::take(&mut state.metrics);
        for (file, _) in metrics.files() {
            state.release_file(file);
        }
        metrics
    }

    /// What was seen, as text.
    pub fn metrics_text(&self) -> String {
        self.shared.lock().metrics.to_string()
    }

    /// Ends it. Waiting requests are dropped.
    pub fn stop(&self) -> Result<(), String> {
        let end = Instant::now() + EXIT_PATIENCE;
        let mut left = self.scheduler.shutdown(Duration::ZERO).map_err(|e| e.to_string())?;
        while left.running > 0 && Instant::now() < end {
            left = self.scheduler.shutdown(Duration::ZERO).map_err(|e| e.to_string())?; // waits a second each time
        }
        let mut state = self.shared.lock();
        if let Some(mut trace) = state.trace.take() {
            trace.finish()?;
        }
        drop(state);
        if left.running > 0 {
            return Err("a callback has not returned within 30 s; its thread is left to it".into());
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

    /// A program that never releases does not make the library grow; of one that does, nothing is forgotten.
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
        assert_eq!(state.places.len() - state.free.len(), UNRELEASED_MAX);
        // A new one is taken in before an old one is forgotten.
        assert_eq!((state.places.len(), state.requests.len()), (UNRELEASED_MAX + 1, UNRELEASED_MAX));
        let there = |offset| state.key(&name(offset)).is_some_and(|key| state.requests.contains_key(&key));
        assert!(!there(0) && !there(999) && there(1000) && there(count - 1));
    }
}
