//! The requests that the program has added and not released, by their identity.
//!
//! AGIOS knows a request by file, type, length and offset in every call. These select its entry, whose place is the
//! *token* under which the scheduling thread has it. Files are spread over shards with a lock each, so threads seldom
//! contend; an entry takes 40 bytes and some 6 in the index.

use std::sync::atomic::{AtomicU32, Ordering};

use hashbrown::HashTable;
use impresario_base::lock::{Mutex, MutexGuard};
use impresario_trace::key_of_name;

use crate::metrics::{Metrics, Pattern};
use crate::sink::Sink;

/// The identity of a request.
#[derive(Clone, Copy)]
pub struct Named<'a> {
    /// The file, as the program names it.
    pub file: &'a [u8],
    /// Write or read.
    pub write: bool,
    /// Offset, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl Named<'_> {
    /// For messages.
    pub fn shown(&self) -> String {
        let op = if self.write { "write" } else { "read" };
        format!("{op} of {} bytes at {} of \"{}\"", self.len, self.offset, String::from_utf8_lossy(self.file))
    }
}

/// Where an entry is: its index, then its shard.
pub type Token = u32;

const SHARD_BITS: u32 = 4;
const SHARDS: usize = 1 << SHARD_BITS;

/// Files without requests that are remembered in each shard: their numbers, names and metrics.
const IDLE_FILES_MAX: usize = 4096;

/// Deliveries of an epoch. What is not released for two whole epochs is forgotten.
const EPOCH: u32 = 1 << 19;

const NONE: u32 = u32::MAX;
/// Values of [`Entry::state`] from here on are not those of delivered requests.
const NOT_DELIVERED: u32 = NONE - 2;
const FREE: u32 = NONE - 2;
const CANCELLED: u32 = NONE - 1;
const QUEUED: u32 = NONE;
/// Of delivered requests: the epoch, above the number of the batch.
const EPOCH_SHIFT: u32 = 30;

#[derive(Clone, Copy)]
struct Entry {
    offset: u64,
    len: u64,
    identifier: i64,
    /// The file's index, and whether it is a write.
    file: u32,
    /// The next younger entry of the same identity; of the youngest, the oldest. Of a free entry, the next free one.
    younger: u32,
    state: u32,
    /// Index of its callbacks, 0: those given to init.
    sink: u32,
}

impl Entry {
    fn is(&self, other: &Entry) -> bool {
        self.offset == other.offset && self.len == other.len && self.file == other.file
    }

    fn hash(&self) -> u64 {
        const K: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;
        let word = self.offset.rotate_left(20) ^ self.len ^ u64::from(self.file) << 44;
        let product = u128::from(word ^ 0x5851_f42d_4c95_7f2d).wrapping_mul(K);
        (product >> 64) as u64 ^ product as u64
    }

    fn is_delivered(&self) -> bool {
        self.state < NOT_DELIVERED
    }
}

struct File {
    name: Box<[u8]>,
    hash: u64,
    key: u64,
    entries: u32,
    /// Reads, writes.
    patterns: [Pattern; 2],
}

/// A file's number for the core.
pub type FileNumber = u32;

/// What an adder has to tell of a file that has a number from now on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewFile {
    /// The number.
    pub number: FileNumber,
    /// The same in every run, so that a run's trace tells of the next one.
    pub key: u64,
}

#[derive(Default)]
struct Shard {
    files: Vec<Option<File>>,
    free_files: Vec<u32>,
    by_name: HashTable<u32>,
    idle_files: usize,
    entries: Vec<Entry>,
    /// The first free entry; 0: none, as entry 0 is never used.
    free: u32,
    /// The youngest entry of each identity.
    by_identity: HashTable<u32>,
    sinks: Vec<(Sink, u32)>,
    free_sinks: Vec<u32>,
    last_sink: u32,
    metrics: Metrics,
}

/// So that shards share no cache line.
#[repr(align(128))]
#[derive(Default)]
struct Apart(Mutex<Shard>);

/// All requests that were added and not released.
#[derive(Default)]
pub struct Requests {
    shards: [Apart; SHARDS],
    delivered: AtomicU32,
    epoch: AtomicU32,
}

impl Shard {
    fn file(&self, hash: u64, name: &[u8]) -> Option<u32> {
        self.by_name.find(hash, |f| self.files[*f as usize].as_ref().is_some_and(|f| *f.name == *name)).copied()
    }

    fn add_file(&mut self, hash: u64, name: &[u8]) -> u32 {
        if self.idle_files > IDLE_FILES_MAX {
            self.forget_idle_files();
        }
        // Two names of one hash are told apart.
        let mut key = hash;
        while self.by_name.find(key, |f| self.files[*f as usize].as_ref().is_some_and(|f| f.key == key)).is_some() {
            key = key.wrapping_add(1);
        }
        let file = File { name: name.into(), hash, key, entries: 0, patterns: Default::default() };
        let at = self.free_files.pop().unwrap_or_else(|| {
            self.files.push(None);
            self.files.len() as u32 - 1
        });
        self.files[at as usize] = Some(file);
        self.idle_files += 1;
        let files = &self.files;
        self.by_name.insert_unique(hash, at, |f| files[*f as usize].as_ref().map_or(0, |f| f.hash));
        at
    }

    #[cold]
    fn forget_idle_files(&mut self) {
        for at in 0..self.files.len() {
            let Some(file) = self.files[at].take_if(|f| f.entries == 0) else { continue };
            if let Ok(found) = self.by_name.find_entry(file.hash, |f| *f == at as u32) {
                found.remove();
            }
            self.metrics.keep(&file.patterns);
            self.free_files.push(at as u32);
        }
        self.idle_files = 0;
    }

    fn file_mut(&mut self, entry: &Entry) -> Option<&mut File> {
        self.files[(entry.file >> 1) as usize].as_mut()
    }

    fn sink_index(&mut self, sink: Option<Sink>) -> u32 {
        let Some(sink) = sink else { return 0 };
        // Programs of the oldest interface give the same with every request.
        if let Some((last, uses)) = self.sinks.get_mut(self.last_sink as usize)
            && *uses > 0
            && *last == sink
        {
            *uses += 1;
            return self.last_sink + 1;
        }
        let at = self.free_sinks.pop().unwrap_or_else(|| {
            self.sinks.push((sink, 0));
            self.sinks.len() as u32 - 1
        });
        self.sinks[at as usize] = (sink, 1);
        self.last_sink = at;
        at + 1
    }

    fn sink_of(&self, index: u32) -> Option<Sink> {
        self.sinks.get((index as usize).wrapping_sub(1)).map(|(sink, _)| *sink)
    }

    fn place(&mut self, entry: Entry) -> u32 {
        if self.entries.is_empty() {
            self.entries.push(Entry { state: FREE, ..entry });
        }
        if self.free != 0 {
            let at = self.free;
            self.free = self.entries[at as usize].younger;
            self.entries[at as usize] = entry;
            return at;
        }
        if self.entries.len() == self.entries.capacity() {
            // By a quarter, not double: memory follows the queue more closely.
            self.entries.reserve_exact((self.entries.len() / 4).max(64));
        }
        self.entries.push(entry);
        self.entries.len() as u32 - 1
    }

    fn youngest(&self, wanted: &Entry) -> Option<u32> {
        self.by_identity.find(wanted.hash(), |e| self.entries[*e as usize].is(wanted)).copied()
    }

    /// The entries of an identity, oldest first; the entry before each comes with it.
    fn same(&self, youngest: u32) -> impl Iterator<Item = (u32, u32)> {
        let mut before = youngest;
        let mut left = true;
        std::iter::from_fn(move || {
            if !left {
                return None;
            }
            let at = self.entries[before as usize].younger;
            let item = (before, at);
            left = at != youngest;
            before = at;
            Some(item)
        })
    }

    /// Takes an entry out of the index; it keeps its place until [`Shard::free_entry`].
    fn unlink(&mut self, (before, at): (u32, u32)) {
        let entry = self.entries[at as usize];
        let alone = entry.younger == at;
        self.entries[before as usize].younger = entry.younger;
        if let Ok(mut found) = self.by_identity.find_entry(entry.hash(), |e| *e == at) {
            if alone {
                found.remove();
            } else {
                *found.get_mut() = before;
            }
        }
        if let Some(file) = self.file_mut(&entry) {
            file.entries -= 1;
            self.idle_files += usize::from(file.entries == 0);
        }
    }

    fn free_entry(&mut self, at: u32) {
        let free = std::mem::replace(&mut self.free, at);
        let entry = &mut self.entries[at as usize];
        (entry.state, entry.younger) = (FREE, free);
        let sink = entry.sink;
        if let Some((_, uses)) = self.sinks.get_mut((sink as usize).wrapping_sub(1)) {
            *uses -= 1;
            if *uses == 0 {
                self.free_sinks.push(sink - 1);
            }
        }
    }

    fn insert(&mut self, mut entry: Entry) -> u32 {
        entry.younger = NONE;
        let at = self.place(entry);
        let hash = entry.hash();
        let Shard { entries, by_identity, .. } = self;
        match by_identity.find_mut(hash, |e| entries[*e as usize].is(&entry)) {
            Some(youngest) => {
                let before = std::mem::replace(youngest, at);
                let oldest = std::mem::replace(&mut entries[before as usize].younger, at);
                entries[at as usize].younger = oldest;
            }
            None => {
                entries[at as usize].younger = at;
                by_identity.insert_unique(hash, at, |e| entries[*e as usize].hash());
            }
        }
        at
    }

    fn wanted(&self, named: &Named<'_>, hash: u64) -> Option<Entry> {
        let file = self.file(hash, named.file)?;
        Some(Entry::queued(named, file, 0, 0))
    }
}

impl Entry {
    fn queued(named: &Named<'_>, file: u32, identifier: i64, sink: u32) -> Entry {
        let file = file << 1 | u32::from(named.write);
        Entry { offset: named.offset, len: named.len, identifier, file, younger: NONE, state: QUEUED, sink }
    }
}

/// A request as its adder goes on with it.
#[derive(Clone, Copy, Debug)]
pub struct Added {
    /// Its place.
    pub token: Token,
    /// Its file.
    pub file: FileNumber,
}

/// A request to be delivered.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// As the program gave it.
    pub identifier: i64,
    /// Its own callbacks, if it has any.
    pub sink: Option<Sink>,
}

impl Requests {
    fn shard(&self, hash: u64) -> (MutexGuard<'_, Shard>, u32) {
        // The upper bits: the index of files goes by others.
        let number = (hash ^ hash >> 29) as u32 & (SHARDS as u32 - 1);
        (self.shards[number as usize].0.lock_spinning(), number)
    }

    fn shard_of(&self, number: u32) -> (MutexGuard<'_, Shard>, u32) {
        (self.shards[number as usize & (SHARDS - 1)].0.lock_spinning(), number >> SHARD_BITS)
    }

    /// Adds a request. `tell` is called under a lock if its file has a number from now on: before any other thread sees it.
    pub fn add(&self, named: &Named<'_>, identifier: i64, sink: Option<Sink>, tell: impl FnOnce(NewFile)) -> Added {
        let hash = key_of_name(named.file);
        let (mut shard, number) = self.shard(hash);
        let file = shard.file(hash, named.file).unwrap_or_else(|| {
            let file = shard.add_file(hash, named.file);
            if let Some(new) = &shard.files[file as usize] {
                tell(NewFile { number: file << SHARD_BITS | number, key: new.key });
            }
            file
        });
        let sink = shard.sink_index(sink);
        let at = shard.insert(Entry::queued(named, file, identifier, sink));
        shard.metrics.arrived(named.write, named.len);
        let epoch = shard.metrics.epoch();
        if let Some(of) = shard.files[file as usize].as_mut() {
            of.entries += 1;
            of.patterns[usize::from(named.write)].arrived(epoch, named.offset, named.len);
            if of.entries == 1 {
                shard.idle_files -= 1;
            }
        }
        Added { token: at << SHARD_BITS | number, file: file << SHARD_BITS | number }
    }

    /// Takes a request back that the scheduler refused.
    pub fn take_back(&self, token: Token) {
        let (mut shard, at) = self.shard_of(token);
        shard.take_out(at);
    }

    /// Requests of one file are delivered in a batch of this number: what is to be called goes into `calls`. Requests that
    /// were cancelled are left out.
    pub fn deliver(&self, tokens: &[Token], batch: u32, calls: &mut Vec<Call>) {
        let Some(first) = tokens.first() else { return };
        let state = (self.epoch.load(Ordering::Relaxed) & 3) << EPOCH_SHIFT | batch;
        let mut shard = self.shard_of(*first).0;
        for token in tokens {
            let entry = &mut shard.entries[(token >> SHARD_BITS) as usize];
            if entry.state == QUEUED {
                entry.state = state;
                let (identifier, sink) = (entry.identifier, entry.sink);
                let sink = if sink == 0 { None } else { shard.sink_of(sink) };
                calls.push(Call { identifier, sink });
            }
        }
    }

    /// So many requests were delivered and are done for the scheduler: what was not released for long is forgotten.
    pub fn served(&self, count: u32) {
        let before = self.delivered.fetch_add(count, Ordering::Relaxed);
        if before / EPOCH != before.wrapping_add(count) / EPOCH {
            self.next_epoch();
        }
    }

    #[cold]
    fn next_epoch(&self) {
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed).wrapping_add(1) & 3;
        // Now begins `epoch`; those of the two before it have their time.
        let over = epoch.wrapping_add(1) & 3;
        for shard in &self.shards {
            let mut shard = shard.0.lock();
            let old = |entry: &Entry| entry.is_delivered() && entry.state >> EPOCH_SHIFT == over;
            for at in 0..shard.entries.len() {
                if old(&shard.entries[at]) {
                    shard.take_out(at as u32);
                }
            }
        }
    }

    /// Releases the oldest delivered request with this identity; the number of its batch.
    pub fn release(&self, named: &Named<'_>) -> Option<u32> {
        let hash = key_of_name(named.file);
        let (mut shard, _) = self.shard(hash);
        let wanted = shard.wanted(named, hash)?;
        let youngest = shard.youngest(&wanted)?;
        let found = shard.same(youngest).find(|(_, at)| shard.entries[*at as usize].is_delivered())?;
        let state = shard.entries[found.1 as usize].state;
        let epoch = shard.metrics.epoch();
        if let Some(file) = shard.file_mut(&wanted) {
            file.patterns[usize::from(named.write)].released(epoch, named.len);
        }
        shard.unlink(found);
        shard.free_entry(found.1);
        Some(state & ((1 << EPOCH_SHIFT) - 1))
    }

    /// Cancels the youngest queued request with this identity; its place stays taken until [`Requests::forget`].
    pub fn cancel(&self, named: &Named<'_>) -> Option<Token> {
        let hash = key_of_name(named.file);
        let (mut shard, number) = self.shard(hash);
        let wanted = shard.wanted(named, hash)?;
        let youngest = shard.youngest(&wanted)?;
        let found = shard.same(youngest).filter(|(_, at)| shard.entries[*at as usize].state == QUEUED).last()?;
        shard.unlink(found);
        shard.entries[found.1 as usize].state = CANCELLED;
        Some(found.1 << SHARD_BITS | number)
    }

    /// The scheduling thread has forgotten a cancelled request.
    pub fn forget(&self, token: Token) {
        let (mut shard, at) = self.shard_of(token);
        if shard.entries[at as usize].state == CANCELLED {
            shard.free_entry(at);
        }
    }

    /// The name of the file with a key.
    pub fn name_of(&self, key: u64) -> Option<Vec<u8>> {
        let (shard, _) = self.shard(key);
        let direct = shard.by_name.find(key, |f| shard.files[*f as usize].as_ref().is_some_and(|f| f.key == key));
        if let Some(file) = direct.and_then(|f| shard.files[*f as usize].as_ref()) {
            return Some(file.name.to_vec());
        }
        drop(shard);
        // One of two names with one hash.
        self.shards.iter().find_map(|shard| {
            let shard = shard.0.lock();
            shard.files.iter().flatten().find(|f| f.key == key).map(|f| f.name.to_vec())
        })
    }

    /// Metrics since the start or the last reset; a reset begins new ones.
    pub fn metrics(&self, reset: bool) -> Metrics {
        let mut sum = Metrics::default();
        for shard in &self.shards {
            let mut shard = shard.0.lock();
            let epoch = shard.metrics.epoch();
            let mut of = shard.metrics.clone();
            shard.files.iter().flatten().for_each(|file| of.keep(&file.patterns.map(|p| p.of(epoch))));
            sum.add(&of);
            if reset {
                shard.metrics.reset();
            }
        }
        sum
    }

    /// Frees everything.
    pub fn clear(&self) {
        for shard in &self.shards {
            *shard.0.lock() = Shard::default();
        }
    }
}

impl Shard {
    /// Forgets an entry wherever it stands.
    fn take_out(&mut self, at: u32) {
        let entry = self.entries[at as usize];
        if entry.state == FREE {
            return;
        }
        if entry.state != CANCELLED {
            let found = self.youngest(&entry).and_then(|youngest| self.same(youngest).find(|(_, e)| *e == at));
            found.into_iter().for_each(|found| self.unlink(found));
        }
        self.free_entry(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(file: &str, offset: u64) -> Named<'_> {
        Named { file: file.as_bytes(), write: false, offset, len: 10 }
    }

    fn add(requests: &Requests, named: &Named<'_>, identifier: i64) -> Token {
        requests.add(named, identifier, None, |_| {}).token
    }

    #[test]
    fn an_entry_is_40_bytes() {
        assert_eq!(size_of::<Entry>(), 40);
    }

    /// Files have the same key in every run, and two names of one hash different ones.
    #[test]
    fn files_have_keys_by_their_names() {
        let requests = Requests::default();
        let mut told = Vec::new();
        for name in ["a", "f", "a"] {
            requests.add(&read(name, 0), 0, None, |file| told.push(file.key));
        }
        assert_eq!(told, [key_of_name(b"a"), key_of_name(b"f")]);
        assert_eq!(requests.name_of(key_of_name(b"f")), Some(b"f".to_vec()));
        // As if another name had that hash.
        let mut shard = Shard::default();
        shard.add_file(77, b"g");
        let second = shard.add_file(77, b"h");
        assert_eq!(shard.files[second as usize].as_ref().map(|f| f.key), Some(78));
        assert_eq!((shard.file(77, b"g"), shard.file(77, b"h")), (Some(0), Some(1)));
    }

    #[test]
    fn equal_requests_are_told_apart_by_their_order() {
        let requests = Requests::default();
        let f = read("f", 50);
        let tokens: Vec<_> = (0..4).map(|i| add(&requests, &f, i)).collect();
        let mut calls = Vec::new();
        assert_eq!(requests.release(&f), None, "none is delivered");
        requests.deliver(&[tokens[1]], 7, &mut calls);
        requests.deliver(&[tokens[0]], 8, &mut calls);
        assert_eq!(calls.iter().map(|c| c.identifier).collect::<Vec<_>>(), [1, 0]);
        assert_eq!(requests.cancel(&f), Some(tokens[3]), "the youngest");
        assert_eq!(requests.release(&f), Some(8), "the oldest that is delivered");
        assert_eq!(requests.release(&f), Some(7));
        assert_eq!(requests.release(&f), None);
        requests.deliver(&[tokens[3], tokens[2]], 9, &mut calls);
        assert_eq!(calls.len(), 3, "a cancelled one is not delivered");
        requests.forget(tokens[3]);
        assert_eq!((requests.release(&f), requests.cancel(&f)), (Some(9), None));
        let (shard, _) = requests.shard(key_of_name(b"f"));
        assert_eq!((shard.by_identity.len(), shard.idle_files), (0, 1));
    }

    /// A program that never releases cannot make the library grow; one that releases in time loses no request.
    #[test]
    fn what_is_never_released_is_forgotten_at_last() {
        let requests = Requests::default();
        let mut calls = Vec::new();
        let mut serve = |from: u64, count: u64| {
            for offset in from..from + count {
                let token = add(&requests, &read("f", offset), 0);
                requests.deliver(&[token], 0, &mut calls);
                calls.clear();
                requests.served(1);
            }
        };
        serve(0, 2 * u64::from(EPOCH));
        assert_eq!(requests.release(&read("f", 0)), Some(0), "1,048,576 deliveries later at the most");
        serve(1 << 40, 2 * u64::from(EPOCH));
        assert_eq!(requests.release(&read("f", 1)), None);
        let (shard, _) = requests.shard(key_of_name(b"f"));
        assert!(shard.by_identity.len() <= 3 * EPOCH as usize && shard.entries.len() <= 4 * EPOCH as usize);
    }

    #[test]
    fn files_without_requests_are_forgotten_and_their_metrics_kept() {
        let requests = Requests::default();
        let names: Vec<String> = (0..IDLE_FILES_MAX * SHARDS * 2).map(|i| format!("file {i}")).collect();
        for name in &names {
            let named = read(name, 0);
            let token = add(&requests, &named, 0);
            let mut calls = Vec::new();
            requests.deliver(&[token], 0, &mut calls);
            assert!(requests.release(&named).is_some());
        }
        let files: usize = requests.shards.iter().map(|s| s.0.lock().files.len()).sum();
        assert!(files <= (IDLE_FILES_MAX + 2) * SHARDS, "{files}");
        let figures = requests.metrics(true).figures();
        assert_eq!((figures.filenb, figures.served_bytes), (names.len() as i64, names.len() as i64 * 10));
        assert_eq!(requests.metrics(false).figures().filenb, 0);
    }

    #[test]
    fn callbacks_of_requests_are_shared_where_they_are_the_same() {
        extern "C" fn f(_: i64) {}
        let sink = Sink { one: Some(crate::sink::One::Data(f)), many: None };
        let requests = Requests::default();
        let tokens: Vec<_> = (0..3).map(|i| requests.add(&read("f", i), 0, Some(sink), |_| {}).token).collect();
        let mut calls = Vec::new();
        requests.deliver(&tokens, 0, &mut calls);
        assert!(calls.iter().all(|call| call.sink == Some(sink)));
        assert_eq!(requests.shard(key_of_name(b"f")).0.sinks.len(), 1);
        (0..3).for_each(|i| assert!(requests.release(&read("f", i)).is_some()));
        assert_eq!(requests.shard(key_of_name(b"f")).0.free_sinks, [0]);
    }
}
