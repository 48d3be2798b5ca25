//! The file as a reader of its index sees it: bounded in bytes, calls and time, and read by several requests at once where
//! the device answers each late but many together.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::Track;
use impresario_base::lock::Mutex;
use impresario_foresight::EXTENTS_MAX;

/// What an index may have at most: bytes, requests to the file system, and calls of a reader.
pub(super) const INDEX_BYTES_MAX: u64 = 8 << 20;
const REQUESTS_MAX: u32 = 4096;
const CALLS_MAX: u32 = 1 << 14;
/// How long reading it may take; longer where requests do not slow one another, for then nobody waits for them.
const INDEX_TIME_MAX: Duration = Duration::from_millis(200);
const INDEX_TIME_SIDE_BY_SIDE_MAX: Duration = Duration::from_secs(1);
/// Shorter requests take as long, so this much is read at least, and serves what is asked for next to it.
const REQUEST_BYTES_MIN: u64 = 4096;
/// An index at the file's beginning or end is wholly in these bytes, as a rule. Of the beginning the first [`REQUEST_BYTES_MIN`] are
/// enough for many files; the program has read them already. One more page may be one at which the kernel begins to read ahead, though it
/// was told not to.
const EDGE_BYTES: u64 = 64 << 10;
/// Requests that lie side by side are joined up to this length.
const REQUEST_BYTES_JOINED_MAX: u64 = 256 << 10;
/// How often what waits for the file begins again: an index has fewer levels.
const ROUNDS_MAX: u32 = 12;
/// Requests under way at once.
const AT_ONCE_MAX: usize = 16;
/// A request that takes less came from memory, where threads cost more than they save.
const FROM_MEMORY: Duration = Duration::from_micros(200);

/// Reads at a place; how many bytes it got. Several threads call it at once.
pub type ReadAt<'a> = dyn Fn(u64, &mut [u8]) -> std::io::Result<usize> + Sync + 'a;

/// How requests are made, and the clock that times them.
pub(super) trait Requests {
    /// The time since some instant.
    fn now(&self) -> Duration;

    /// Makes all of these at the same time. What the file has of each, by its first byte, without those that failed; and how
    /// long the slowest took.
    fn make(&self, requests: &[Request]) -> (Vec<(u64, Vec<u8>)>, Duration);
}

/// A file whose index is read, within bounds.
pub struct Source<'a> {
    requests: Box<dyn Requests + 'a>,
    size_bytes: u64,
    /// Where a program reads, if only what stands there is wanted.
    place: Option<u64>,
    is_partial: bool,
    began: Duration,
    /// `None`: the bounds of time above.
    time_max: Option<Duration>,
    pace: Pace,
    /// What was read, by its first byte.
    known: BTreeMap<u64, Vec<u8>>,
    /// What is not known is put down here, and not read yet.
    wanted: Option<Vec<Request>>,
    /// How many requests could go side by side, each time that the file was waited for.
    rounds: Vec<u32>,
    /// What is near the beginning is read together.
    begins_long: bool,
    left_request_bytes: u64,
    left_requests: u32,
    left_bytes: u64,
    left_calls: u32,
    left_extents: usize,
}

impl<'a> Source<'a> {
    pub(super) fn new(read_at: &'a ReadAt<'a>, size_bytes: u64, time_max: Option<Duration>) -> Source<'a> {
        Source::by(Box::new(Threads { read_at, began: Instant::now() }), size_bytes, time_max)
    }

    pub(super) fn by(requests: Box<dyn Requests + 'a>, size_bytes: u64, time_max: Option<Duration>) -> Source<'a> {
        Source {
            began: requests.now(),
            requests,
            size_bytes,
            place: None,
            is_partial: false,
            time_max,
            pace: Pace { at_once: 1, alone: Duration::ZERO },
            known: BTreeMap::new(),
            wanted: None,
            rounds: Vec::new(),
            begins_long: false,
            left_request_bytes: INDEX_BYTES_MAX,
            left_requests: REQUESTS_MAX,
            left_bytes: INDEX_BYTES_MAX,
            left_calls: CALLS_MAX,
            left_extents: EXTENTS_MAX,
        }
    }

    /// Wants the part of the index that tells of the extent at this place, and as little beside it as the reader can.
    pub(super) fn at(self, place: Option<u64>) -> Source<'a> {
        Source { place, ..self }
    }

    /// Whether these extents are enough, so that parts of the index that tell of others can be left out: the place that is wanted
    /// is in one of them, or is a part of the index itself, where a program is before it goes to what it wants.
    pub fn is_enough(&mut self, mut extents: impl Iterator<Item = Range<u64>>) -> bool {
        let Some(place) = self.place else { return false };
        self.is_partial |= self.known(place, 1).is_some() || extents.any(|extent| extent.contains(&place));
        self.is_partial
    }

    /// Parts of the index were left out.
    pub(super) fn is_partial(&self) -> bool {
        self.is_partial
    }

    /// What reading took so far.
    pub(super) fn spent(&self) -> Spent {
        let requests = u64::from(REQUESTS_MAX - self.left_requests);
        Spent { requests, bytes: INDEX_BYTES_MAX - self.left_request_bytes, rounds: self.rounds.clone() }
    }

    /// The file's length.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// These bytes; `None` where the file does not have them all, or the index has become too large or slow to read.
    pub fn bytes(&mut self, at: u64, len: u64) -> Option<Vec<u8>> {
        let end = at.checked_add(len)?;
        if end > self.size_bytes || len > self.left_bytes || self.left_calls == 0 {
            return None;
        }
        (self.left_bytes, self.left_calls) = (self.left_bytes - len, self.left_calls - 1);
        if let Some(known) = self.known(at, len) {
            return Some(known.to_vec());
        }
        if self.is_late() {
            return None;
        }
        // What is near the beginning is read together, wherever in it: what is asked for next may stand before.
        let first_bytes = self.known.get(&0).map_or(0, |first| first.len() as u64);
        let is_near = self.begins_long && at < EDGE_BYTES && first_bytes < EDGE_BYTES;
        let (from, more) = if is_near { (first_bytes, EDGE_BYTES - first_bytes) } else { (at, REQUEST_BYTES_MIN) };
        let to = from.saturating_add(more.min(self.left_request_bytes)).max(at.saturating_add(len));
        let request = Request { at: from, end: to.min(self.size_bytes) };
        if let Some(wanted) = &mut self.wanted {
            wanted.push(request);
            return None;
        }
        self.charge(&request)?;
        self.rounds.push(1);
        let (read, took) = self.requests.make(&[request]);
        let (_, bytes) = read.into_iter().next()?;
        self.pace.saw(1, took);
        if request == (Request { at, end }) && bytes.len() as u64 == len {
            return Some(bytes);
        }
        self.learn(from, bytes);
        self.known(at, len).map(<[u8]>::to_vec)
    }

    /// These bytes were read. They are joined with the file's beginning where they go on from it.
    fn learn(&mut self, at: u64, bytes: Vec<u8>) {
        match self.known.get_mut(&0) {
            Some(first) if first.len() as u64 == at => first.extend(bytes),
            _ => _ = self.known.insert(at, bytes),
        }
    }

    /// Reads the file's beginning. What stands near it is read together, once something is asked for that is not in the first request.
    pub fn beginning(&mut self) {
        self.begins_long = true;
        self.ahead([(0, REQUEST_BYTES_MIN)]);
    }

    /// Reads the file's end, where there is more of what will be asked for than a first request shows.
    pub fn end(&mut self) {
        self.ahead([(self.size_bytes.saturating_sub(EDGE_BYTES), EDGE_BYTES)]);
    }

    /// As many of these bytes as the file has.
    pub fn up_to(&mut self, at: u64, most: u64) -> Option<Vec<u8>> {
        self.bytes(at, most.min(self.size_bytes.checked_sub(at)?))
    }

    /// These places (first byte, length) will be asked for: where a request takes long they are read several at a time now.
    /// What the file does not have, or would be too much, is left out.
    pub fn ahead(&mut self, places: impl IntoIterator<Item = (u64, u64)>) {
        let wanted = |(at, len): (u64, u64)| {
            let len = len.min(self.size_bytes.checked_sub(at)?);
            (len > 0 && self.known(at, len).is_none()).then_some(Request { at, end: at + len })
        };
        let requests: Vec<Request> = places.into_iter().take(CALLS_MAX as usize).filter_map(wanted).collect();
        match &mut self.wanted {
            Some(wanted) => wanted.extend(requests),
            None => self.fetch(requests),
        }
    }

    /// Reads something for each of these. Where that has to wait for the file, the others go on meanwhile: what all of them
    /// wait for is read together, and then they begin again. So `read` must do the same each time.
    pub fn each<T, R>(
        &mut self,
        items: &[T],
        mut read: impl FnMut(&mut Source<'a>, &T) -> Option<R>,
    ) -> Vec<Option<R>> {
        let mut results: Vec<Option<Option<R>>> = items.iter().map(|_| None).collect();
        for _ in 0..ROUNDS_MAX {
            let mut wanted = Vec::new();
            for (item, result) in items.iter().zip(&mut results).filter(|(_, result)| result.is_none()) {
                let before = (self.left_bytes, self.left_calls, self.left_extents);
                self.wanted = Some(Vec::new());
                let found = read(self, item);
                match self.wanted.take() {
                    Some(more) if !more.is_empty() => {
                        wanted.extend(more);
                        (self.left_bytes, self.left_calls, self.left_extents) = before;
                    }
                    _ => *result = Some(found),
                }
            }
            let requests = self.left_requests;
            self.fetch(wanted);
            if self.left_requests == requests {
                break;
            }
        }
        let one_by_one = |(item, result): (&T, Option<Option<R>>)| result.unwrap_or_else(|| read(self, item));
        items.iter().zip(results).map(one_by_one).collect()
    }

    /// Reads these, several at a time where that pays.
    fn fetch(&mut self, mut requests: Vec<Request>) {
        requests.sort_unstable();
        requests.dedup_by(|next, last| {
            let end = next.end.max(last.end);
            let is_joined = next.at <= last.end && end - last.at <= REQUEST_BYTES_JOINED_MAX.max(last.end - last.at);
            last.end = if is_joined { end } else { last.end };
            is_joined
        });
        if !requests.is_empty() {
            self.rounds.push(u32::try_from(requests.len()).unwrap_or(u32::MAX));
        }
        let mut requests = requests.as_slice();
        while !requests.is_empty() && !self.is_late() {
            let (now, later) = requests.split_at(requests.len().min(self.pace.at_once));
            requests = later;
            if now.iter().any(|request| self.charge(request).is_none()) {
                return;
            }
            let (read, longest) = self.requests.make(now);
            self.pace.saw(now.len(), longest);
            read.into_iter().for_each(|(at, bytes)| self.learn(at, bytes));
        }
    }

    /// Extents of `len` bytes, `step` bytes apart, as far as the file goes. All series of a file together are bounded.
    pub fn series(&mut self, start: u64, step: u64, len: u64, count: u64) -> Track {
        let extent = |i: u64| {
            let start = start.checked_add(i.checked_mul(step)?)?;
            Some(start..start.checked_add(len)?)
        };
        let count = count.min(self.left_extents as u64);
        let track: Track = (0..count).map_while(extent).take_while(|extent| extent.end <= self.size_bytes).collect();
        self.left_extents -= track.len();
        track
    }

    fn is_late(&self) -> bool {
        let side_by_side = self.pace.at_once > 2;
        let most = if side_by_side { INDEX_TIME_SIDE_BY_SIDE_MAX } else { INDEX_TIME_MAX };
        self.requests.now().saturating_sub(self.began) > self.time_max.unwrap_or(most)
    }

    fn known(&self, at: u64, len: u64) -> Option<&[u8]> {
        let nearest = self.known.range(..=at).next_back();
        // A short request may stand within the beginning.
        nearest.into_iter().chain(self.known.get_key_value(&0)).find_map(|(first, bytes)| {
            let from = usize::try_from(at - first).ok()?;
            bytes.get(from..from.checked_add(usize::try_from(len).ok()?)?)
        })
    }

    fn charge(&mut self, request: &Request) -> Option<()> {
        self.left_request_bytes = self.left_request_bytes.checked_sub(request.end - request.at)?;
        self.left_requests = self.left_requests.checked_sub(1)?;
        Some(())
    }
}

/// What it took to read an index.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// Requests to the file system.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Requests that could go side by side, each time that the file was waited for.
    pub rounds: Vec<u32>,
}

impl Spent {
    /// How long reading takes on a device that needs `each` for a request and serves `parallel` of them at a time. `None` where
    /// it takes longer than a reader may.
    pub fn time(&self, each: Duration, parallel: u32) -> Option<Duration> {
        let most = (parallel.max(1) as usize).min(AT_ONCE_MAX);
        let (mut at_once, mut turns) = (1, 0u32);
        for requests in &self.rounds {
            let mut left = *requests as usize;
            while left > 0 {
                let now = left.min(at_once);
                (left, turns) = (left - now, turns.saturating_add(1));
                if now == at_once {
                    at_once = (2 * at_once).min(most);
                }
            }
        }
        let time = each.saturating_mul(turns);
        let time_max = if at_once > 2 { INDEX_TIME_SIDE_BY_SIDE_MAX } else { INDEX_TIME_MAX };
        (time <= time_max).then_some(time)
    }
}

/// One request to the file system.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Request {
    at: u64,
    end: u64,
}

/// What the file has of a request; `None` for an error.
fn read(read_at: &ReadAt<'_>, request: Request) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(request.end - request.at).ok()?];
    let mut filled = 0;
    while filled < bytes.len() {
        match read_at(request.at + filled as u64, &mut bytes[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read.min(bytes.len() - filled),
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return None,
        }
    }
    bytes.truncate(filled);
    Some(bytes)
}

/// Requests on the clock of the machine, each but the first on a thread of its own.
struct Threads<'a> {
    read_at: &'a ReadAt<'a>,
    began: Instant,
}

impl Requests for Threads<'_> {
    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    fn make(&self, requests: &[Request]) -> (Vec<(u64, Vec<u8>)>, Duration) {
        let (next, done) = (AtomicUsize::new(0), Mutex::new((Vec::new(), Duration::ZERO)));
        let work = || {
            while let Some(request) = requests.get(next.fetch_add(1, Relaxed)) {
                let began = Instant::now();
                let bytes = read(self.read_at, *request);
                let took = began.elapsed();
                let mut done = done.lock();
                done.0.extend(bytes.map(|bytes| (request.at, bytes)));
                done.1 = done.1.max(took);
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..requests.len() {
                // Where no thread can be had, those that there are do its work.
                let _ = std::thread::Builder::new().name("assist-index".into()).spawn_scoped(scope, work);
            }
            work();
        });
        done.into_inner()
    }
}

/// How many requests are under way at once: twice as many as long as each takes no longer than alone, half as many where they
/// wait for one another, as on a disk or where requests are rationed.
struct Pace {
    at_once: usize,
    /// What a request alone takes.
    alone: Duration,
}

impl Pace {
    fn saw(&mut self, requests: usize, longest: Duration) {
        if longest < FROM_MEMORY {
            return;
        }
        if requests == 1 {
            self.alone = if self.alone.is_zero() { longest } else { (3 * self.alone + longest) / 4 };
            self.at_once = self.at_once.max(2);
        } else if longest * 4 > self.alone * 7 {
            self.at_once = (requests / 2).max(1);
        } else if requests == self.at_once {
            self.at_once = (2 * requests).min(AT_ONCE_MAX);
        }
    }
}

/// Requests to a device that is modelled, in virtual time, so that a test does not depend on the machine's speed.
#[cfg(test)]
pub(super) struct Modelled<'a> {
    read_at: &'a ReadAt<'a>,
    /// What a request takes, and how many are served at a time.
    each: Duration,
    parallel: usize,
    now: std::cell::Cell<Duration>,
    /// Requests under way at once, at most, and all of them.
    most: std::cell::Cell<usize>,
    all: std::cell::Cell<usize>,
}

#[cfg(test)]
impl<'a> Modelled<'a> {
    pub(super) fn new(read_at: &'a ReadAt<'a>, each: Duration, parallel: usize) -> Modelled<'a> {
        let (now, most, all) = Default::default();
        Modelled { read_at, each, parallel, now, most, all }
    }

    /// How long the requests took so far.
    pub(super) fn took(&self) -> Duration {
        self.now.get()
    }

    /// A file of this length there, with the usual bounds of time.
    pub(super) fn source(&self, size_bytes: u64) -> Source<'_> {
        Source::by(Box::new(self), size_bytes, None)
    }
}

#[cfg(test)]
impl Requests for &Modelled<'_> {
    fn now(&self) -> Duration {
        self.now.get()
    }

    fn make(&self, requests: &[Request]) -> (Vec<(u64, Vec<u8>)>, Duration) {
        let took = self.each * requests.len().div_ceil(self.parallel) as u32;
        self.now.set(self.now.get() + took);
        self.most.set(self.most.get().max(requests.len()));
        self.all.set(self.all.get() + requests.len());
        let made = requests.iter().filter_map(|request| Some((request.at, read(self.read_at, *request)?)));
        (made.collect(), took)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file where each byte tells its place.
    fn fill(at: u64, out: &mut [u8]) -> std::io::Result<usize> {
        out.iter_mut().zip(at..).for_each(|(byte, at)| *byte = (at % 251) as u8);
        Ok(out.len())
    }

    const PLACES: u64 = 200;
    const MILLIS: Duration = Duration::from_millis(5);

    /// What is in memory.
    fn in_memory<'a>(read_at: &'a ReadAt<'a>) -> Modelled<'a> {
        Modelled::new(read_at, Duration::ZERO, 1)
    }

    /// Announces 200 places, 1 MiB apart, and takes those that it gets. How many.
    fn take(device: &Modelled<'_>) -> u64 {
        let mut source = device.source(1 << 30);
        source.ahead((0..PLACES).rev().map(|i| (i << 20, 100)));
        let place = |i: u64| (0..100).map(|n| (((i << 20) + n) % 251) as u8).collect::<Vec<u8>>();
        (0..PLACES).filter(|i| source.bytes(i << 20, 100).is_some_and(|bytes| bytes == place(*i))).count() as u64
    }

    #[test]
    fn requests_that_do_not_slow_one_another_go_side_by_side() {
        let device = Modelled::new(&fill, MILLIS, usize::MAX);
        assert_eq!(take(&device), PLACES);
        assert_eq!((device.all.get() as u64, device.most.get()), (PLACES, AT_ONCE_MAX), "each place once");
        // 1, 2, 4 and 8, then 16 at a time.
        assert_eq!(device.now.get(), MILLIS * (4 + (PLACES - 15).div_ceil(16)) as u32);
    }

    #[test]
    fn a_device_that_takes_one_after_the_other_is_left_to_its_programs() {
        let device = Modelled::new(&fill, MILLIS, 1);
        let taken = take(&device);
        assert!((10..PLACES).contains(&taken), "{taken}");
        assert!(device.most.get() <= 2, "{}", device.most.get());
        assert!(device.now.get() <= INDEX_TIME_MAX + 2 * MILLIS, "given up in time: {:?}", device.now.get());
    }

    #[test]
    fn what_is_in_memory_is_read_by_one() {
        let device = in_memory(&fill);
        assert_eq!(take(&device), PLACES);
        assert_eq!((device.all.get() as u64, device.most.get()), (PLACES, 1));
    }

    /// Each waits until all are under way.
    #[test]
    fn requests_are_made_at_the_same_time() {
        let under_way = AtomicUsize::new(0);
        let read_at: &ReadAt<'_> = &|at, out| {
            under_way.fetch_add(1, Relaxed);
            impresario_testing::until("all are under way", || under_way.load(Relaxed) == 8);
            fill(at, out)
        };
        let requests: Vec<Request> = (0..8).map(|i| Request { at: i << 20, end: (i << 20) + 100 }).collect();
        let threads = Threads { read_at, began: Instant::now() };
        let (mut made, took) = threads.make(&requests);
        made.sort();
        assert_eq!(made.iter().map(|(at, _)| *at).collect::<Vec<_>>(), (0..8).map(|i| i << 20).collect::<Vec<_>>());
        assert!(made.iter().all(|(at, bytes)| bytes.len() == 100 && u64::from(bytes[0]) == at % 251));
        assert!(took <= threads.now());
    }

    #[test]
    fn neighbours_come_in_one_request_and_nothing_beyond_the_bounds() {
        let end = 3 << 20;
        let read_at: &ReadAt<'_> = &|at, out| {
            assert!(at + out.len() as u64 <= end, "beyond the file");
            fill(at, out)
        };
        let device = in_memory(read_at);
        let mut source = device.source(end);
        assert_eq!(source.bytes(10, 4).unwrap(), [10, 11, 12, 13]);
        assert_eq!(source.bytes(4000, 100).unwrap().len(), 100);
        source.ahead((0..50).map(|i| ((1 << 20) + i * 300, 300)));
        source.ahead([(end - 10, 300), (end, 5), (u64::MAX, 5)]);
        assert_eq!(device.all.get(), 3, "one, its neighbours, the end");
        assert_eq!(source.bytes((1 << 20) + 14_000, 1000).unwrap().len(), 1000);
        assert_eq!((source.bytes(end - 5, 5).unwrap().len(), device.all.get()), (5, 3));
        assert!(source.bytes(end - 5, 6).is_none() && source.bytes(u64::MAX, 2).is_none());
        // Announced or not, no more is taken than an index may have.
        let device = in_memory(&fill);
        let mut source = device.source(1 << 40);
        source.ahead((0..1 << 20).map(|i| (i << 13, 4096)));
        let taken = (0..1u64 << 15).take_while(|i| source.bytes(i << 13, 4096).is_some()).count() as u64;
        assert!(taken * 4096 <= INDEX_BYTES_MAX && source.spent().bytes <= INDEX_BYTES_MAX, "{taken}");
        // What is known is not free for ever: a loop of calls ends.
        let mut source = device.source(1 << 40);
        assert!((0..=CALLS_MAX).any(|_| source.bytes(0, 8).is_none()));
    }

    /// On a disk, where a page more had the kernel read 864 KiB that nobody wanted.
    #[test]
    fn no_more_of_the_beginning_is_read_than_is_asked_for() {
        let device = in_memory(&fill);
        let mut source = device.source(1 << 20);
        source.beginning();
        assert!(source.bytes(0, 96).is_some() && source.bytes(2000, 300).is_some());
        assert_eq!(source.spent(), Spent { requests: 1, bytes: REQUEST_BYTES_MIN, rounds: vec![1] });
        // What stands near it comes together.
        assert!(source.bytes(4000, 200).is_some() && source.bytes(40_000, 9000).is_some());
        let bytes = EDGE_BYTES;
        assert_eq!(source.spent(), Spent { requests: 2, bytes, rounds: vec![1, 1] });
        assert!(source.bytes(EDGE_BYTES + 10, 10).is_some());
        assert_eq!(source.spent().bytes, bytes + REQUEST_BYTES_MIN);
    }

    /// Lists that lead through the file: each place holds the next one.
    #[test]
    fn what_waits_for_the_file_waits_together() {
        let read_at: &ReadAt<'_> = &|at, out| {
            out.fill(0);
            out[..8].copy_from_slice(&(at + (1 << 20)).to_le_bytes());
            Ok(out.len())
        };
        let device = Modelled::new(read_at, MILLIS, usize::MAX);
        let lists: Vec<u64> = (0..30).map(|i| i << 30).collect();
        let follow = |source: &mut Source<'_>, at: &u64| {
            (0..6).try_fold(*at, |at, _| Some(u64::from_le_bytes(source.bytes(at, 8)?.try_into().ok()?)))
        };
        let expected: Vec<Option<u64>> = lists.iter().map(|at| Some(at + (6 << 20))).collect();
        assert_eq!(device.source(1 << 40).each(&lists, follow), expected);
        assert_eq!((device.all.get(), device.most.get()), (30 * 6, AT_ONCE_MAX), "each place once");
        // 1, 2, 4, 8 and 15; of each further level 16 and 14.
        assert_eq!(device.now.get(), MILLIS * (5 + 5 * 2));
        // Deeper than that they end, one by one.
        let deep = |source: &mut Source<'_>, at: &u64| {
            (0..20).try_fold(*at, |at, _| Some(u64::from_le_bytes(source.bytes(at, 8)?.try_into().ok()?)))
        };
        assert_eq!(device.source(1 << 40).each(&lists[1..2], deep), [Some(lists[1] + (20 << 20))]);
    }

    #[test]
    fn what_reading_takes_follows_from_what_may_go_side_by_side() {
        let spent = Spent { requests: 44, bytes: 1 << 20, rounds: vec![1, 1, 42] };
        // 1, 1; 2, 4, 8, 16, 12.
        assert_eq!(spent.time(MILLIS, 32), Some(MILLIS * 7));
        // Two at a time: 1, 1, 21 times 2.
        assert_eq!(spent.time(MILLIS, 2), Some(MILLIS * 23));
        // One after the other, which takes longer than it may.
        assert_eq!((spent.time(MILLIS, 1), spent.time(MILLIS / 2, 1)), (None, Some(MILLIS * 22)));
        assert_eq!(Spent::default().time(MILLIS, 0), Some(Duration::ZERO));
        // What a reader does is told so.
        let device = in_memory(&fill);
        let mut source = device.source(1 << 30);
        source.bytes(0, 8);
        source.ahead([(1 << 20, 8), (2 << 20, 8), ((2 << 20) + 8, 8)]);
        source.bytes(2 << 20, 16);
        assert_eq!(source.spent(), Spent { requests: 3, bytes: 4096 + 8 + 16, rounds: vec![1, 2] });
    }

    #[test]
    fn a_read_that_fails_gives_nothing() {
        let fails: &ReadAt<'_> = &|at, out| if at > 1 << 20 { Err(std::io::Error::other("no")) } else { fill(at, out) };
        let device = in_memory(fails);
        let mut source = device.source(1 << 30);
        source.ahead([(0, 10), (2 << 20, 10)]);
        assert!(source.bytes(0, 10).is_some() && source.bytes(2 << 20, 10).is_none());
        // The file has become shorter.
        let short: &ReadAt<'_> = &|at, out| fill(at, out).map(|n| n.min(1000u64.saturating_sub(at) as usize));
        let device = in_memory(short);
        let mut source = device.source(1 << 30);
        assert!(source.bytes(0, 1000).is_some() && source.bytes(500, 600).is_none());
    }
}
