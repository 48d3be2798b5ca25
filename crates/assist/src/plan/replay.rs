//! What hints would make of a recorded run: the run replayed with and without them on a device of known costs.
//!
//! A read waits for what is not in memory. The kernel's read-ahead, the page cache and the device are modelled; the hints
//! are those of the very [`Advisor`] that runs in the manager.

#[cfg(test)]
pub(super) mod maps;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use impresario_device::{PageCache, ReadAhead as Window, ReadAheadLimits};
use impresario_foresight::{self as foresight, Access, Elapsed, ReadEnd, Reader, Run, Shape, Storage, pages};
use rustc_hash::FxHashMap;

use super::device::Device;
use super::index::reading_ns;
use crate::advice::OpenFile;
use crate::advisor::{self, Advisor};
use crate::cache::Action;
use crate::config::{Budget, DeviceCost, Entry, Monitored, ReadAhead, StandDown};
use crate::formats::{self, Index};
use crate::regions::RegionMap;

/// From the end of a read to its hints: the ring, a wake-up, the calls.
const HINT_DELAY_NS: u64 = 60_000;
/// A read of data in memory: a call, and copying at 8 GB/s.
const CALL_NS: u64 = 1_000;

/// The outcome of a replay.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Outcome {
    /// From the beginning of the first read to the end of the last one.
    pub run_ns: u64,
    /// The time that threads waited for reads, summed.
    pub wait_ns: u64,
    /// Hints that were given.
    pub hints: u64,
    /// Requests that reached the device.
    pub requests: u64,
    /// Bytes that they read.
    pub device_bytes: u64,
    /// Bytes that hints brought in and no read used.
    pub wasted_bytes: u64,
    /// When hints for a file were first stopped, from the beginning of the first read.
    pub stood_down_ns: Option<u64>,
}

/// Hints for a file, its own index, if it has one that is known, and what is known of its kind.
#[derive(Clone, Copy, Debug)]
pub struct Hinted<'a> {
    pub entry: &'a Entry,
    pub index: Option<&'a Index>,
    pub learnt: Option<&'a Arc<Shape>>,
}

/// Hints to replay with, for some of the files.
pub type Entries<'a> = FxHashMap<usize, Hinted<'a>>;

/// Replays a run with hints that are given whatever comes of them.
pub fn replay(run: &Run, device: &Device, memory_bytes: u64, entries: &Entries) -> Outcome {
    let never = StandDown { enabled: false, ..StandDown::default() };
    replay_judged(run, device, memory_bytes, entries, never, &device.cost())
}

/// Replays a run whose hints stand down as in the manager; `planned` is what the hints file says of the device.
pub fn replay_judged(
    run: &Run,
    device: &Device,
    memory_bytes: u64,
    entries: &Entries,
    stand_down: StandDown,
    planned: &DeviceCost,
) -> Outcome {
    let guide = |(file, hinted): (&usize, &Hinted<'_>)| {
        (*file, Guide::new(*hinted, run.sizes[*file], device, stand_down, planned))
    };
    let guides: FxHashMap<usize, Guide> = entries.iter().map(guide).collect();
    let mut node = Node::new(run, device, memory_bytes, guides);
    let elapsed = foresight::replay(run, &mut node);
    node.outcome(elapsed)
}

/// One file's hints.
struct Guide {
    advisor: Advisor,
    regions: RegionMap,
    modes: FxHashMap<u64, OpenFile>,
    index: FileIndex,
}

/// A file's own index in the replay.
enum FileIndex {
    None,
    /// With how long it takes to read.
    Unread(Index, u64),
    /// It is there at this instant.
    Coming(Index, u64),
}

impl Guide {
    fn new(hinted: Hinted<'_>, size: u64, device: &Device, stand_down: StandDown, planned: &DeviceCost) -> Guide {
        let entry = hinted.entry;
        let regions = RegionMap::of(entry);
        let (regions_too, learnt) = (regions.clone(), hinted.learnt.cloned());
        let monitored = Monitored { key: "plan".into(), entry: entry.clone(), regions: regions_too, learnt };
        let mut advisor = Advisor::new(Arc::new(monitored), size, &Budget::default(), stand_down, planned);
        let index = match hinted.index.filter(|_| entry.online) {
            Some(index) => {
                advisor.may_be(formats::by_name(&entry.path));
                match reading_ns(index, device) {
                    Some(takes_ns) => FileIndex::Unread(index.clone(), takes_ns),
                    None => FileIndex::None,
                }
            }
            None => FileIndex::None,
        };
        Guide { advisor, regions, modes: FxHashMap::default(), index }
    }

    /// The index is read when the advisor wants it, and known once that is done.
    fn follow_index(&mut self, now_ns: u64) {
        self.index = match std::mem::replace(&mut self.index, FileIndex::None) {
            FileIndex::Coming(index, at_ns) if at_ns <= now_ns => {
                self.advisor.index_is_known(index, now_ns);
                FileIndex::None
            }
            FileIndex::Unread(index, takes_ns) if self.advisor.take_index_wish().is_some() => {
                FileIndex::Coming(index, now_ns.saturating_add(takes_ns))
            }
            same => same,
        };
    }
}

/// What became of a hint, as the manager learns of it.
struct Told {
    file: usize,
    range: Range<u64>,
    /// Of these bytes, those that were in memory or on their way.
    found_bytes: u64,
    /// From the hint until all of it was there.
    took_ns: u64,
    kind: Hint,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Hint {
    /// Of bytes that were asked for the first time.
    Fresh,
    Again,
    /// To be told how long it took.
    Try,
}

/// The computer that the run is replayed on.
struct Node<'a> {
    sizes: &'a [u64],
    device: &'a Device,
    cache: PageCache<()>,
    /// Requests under way: file and first byte, end, when the device is done.
    coming: BTreeMap<(u32, u64), (u64, u64)>,
    /// The same by that instant.
    arrivals: BinaryHeap<Reverse<(u64, u32, u64)>>,
    /// When each of the device's channels is free.
    channels: Vec<u64>,
    /// Where the last request ended.
    head: Option<(u32, u64)>,
    windows: FxHashMap<(u64, usize), Window>,
    /// How long the reads of each thread took that were not learnt of yet.
    took: FxHashMap<(u64, u16), VecDeque<u64>>,
    guides: FxHashMap<usize, Guide>,
    /// What the advisors will be told, by the instant and a number.
    told: BTreeMap<(u64, u64), Told>,
    /// When the first read began.
    began_ns: Option<u64>,
    outcome: Outcome,
}

impl Storage for Node<'_> {
    fn read(&mut self, now_ns: u64, reader: Reader, access: &Access) -> ReadEnd {
        let (file, range, size) = (access.file, pages(&access.bytes), self.sizes[access.file]);
        self.began_ns.get_or_insert(now_ns);
        if let Some(guide) = self.guides.get_mut(&file).filter(|guide| !guide.modes.contains_key(&reader.process)) {
            let actions = guide.advisor.opened(reader.process, now_ns, &mut |_| true);
            self.perform(now_ns, file, actions);
        }
        let guide = self.guides.get(&file);
        let mode = guide.and_then(|g| g.modes.get(&reader.process)).map_or(ReadAhead::Normal, OpenFile::in_force);
        let window_bytes = match mode {
            ReadAhead::Sequential => self.device.read_ahead_bytes.saturating_mul(2),
            ReadAhead::Normal => self.device.read_ahead_bytes,
            ReadAhead::Random => 0,
        };
        let limits = ReadAheadLimits { window_bytes, request_bytes: self.device.request_bytes_max.max(4096) };
        self.settle(now_ns);
        let window = self.windows.entry((reader.process, file)).or_default();
        for request in window.read(&mut self.cache, file as u32, range.clone(), size, limits) {
            self.request(now_ns, file as u32, request);
        }
        self.cache.touch(file as u32, range.start, range.end);
        let len = access.bytes.end - access.bytes.start;
        let end_ns = now_ns.max(self.ready_ns(file as u32, &range)).saturating_add(CALL_NS + len / 8);
        let learn_ns = self.guides.contains_key(&file).then(|| end_ns.saturating_add(HINT_DELAY_NS));
        if learn_ns.is_some() {
            self.took.entry((reader.process, reader.thread)).or_default().push_back(end_ns - now_ns);
        }
        ReadEnd { end_ns, learn_ns }
    }

    fn learn(&mut self, now_ns: u64, reader: Reader, access: &Access, last: bool) {
        let file = access.file;
        self.tell(now_ns);
        let took = self.took.get_mut(&(reader.process, reader.thread)).and_then(VecDeque::pop_front);
        let Some(guide) = self.guides.get_mut(&file) else { return };
        guide.modes.entry(reader.process).or_default().read(access.bytes.end, &guide.regions);
        let read = advisor::Read { bytes: access.bytes.clone(), duration_ns: took.unwrap_or(0), now_ns };
        let who = advisor::Reader { program: reader.process, thread: reader.thread };
        guide.follow_index(now_ns);
        let mut actions = guide.advisor.read(who, &read, &mut |_| true);
        if guide.advisor.why_down().is_some() {
            self.outcome.stood_down_ns.get_or_insert(now_ns.saturating_sub(self.began_ns.unwrap_or(now_ns)));
        }
        if last {
            // The process closes the file.
            actions.extend(guide.advisor.depart(reader.process));
        }
        self.perform(now_ns, file, actions);
    }
}

impl<'a> Node<'a> {
    fn new(run: &'a Run, device: &'a Device, memory_bytes: u64, guides: FxHashMap<usize, Guide>) -> Node<'a> {
        Node {
            sizes: &run.sizes,
            device,
            cache: PageCache::new(memory_bytes.max(1 << 20)),
            coming: BTreeMap::new(),
            arrivals: BinaryHeap::new(),
            channels: vec![0; device.parallel.clamp(1, 1024) as usize],
            head: None,
            windows: FxHashMap::default(),
            took: FxHashMap::default(),
            guides,
            told: BTreeMap::new(),
            began_ns: None,
            outcome: Outcome::default(),
        }
    }

    fn outcome(&self, elapsed: Elapsed) -> Outcome {
        let wasted_bytes = self.cache.wasted_bytes() + self.cache.unused_bytes();
        Outcome { run_ns: elapsed.run_ns, wait_ns: elapsed.wait_ns, wasted_bytes, ..self.outcome }
    }

    /// Does what an advisor said.
    fn perform(&mut self, now_ns: u64, file: usize, actions: Vec<Action>) {
        let size = self.sizes[file];
        for action in actions {
            match action {
                Action::Prefetch(range) => self.hint(now_ns, file, size, range, Hint::Fresh),
                Action::Renew(range) | Action::Exactly(range) => self.hint(now_ns, file, size, range, Hint::Again),
                Action::Try(range) => self.hint(now_ns, file, size, range, Hint::Try),
                Action::Release(bytes) => {
                    // Whole pages only.
                    let inner = bytes.start.div_ceil(4096) * 4096..bytes.end / 4096 * 4096;
                    if inner.start < inner.end {
                        self.cache.remove(file as u32, inner.start, inner.end);
                    }
                }
            }
        }
    }

    /// A hint: what is missing of a range is read from the device. The advisor is told when it is there.
    fn hint(&mut self, now_ns: u64, file: usize, size: u64, range: Range<u64>, kind: Hint) {
        self.settle(now_ns);
        let bytes = pages(&(range.start..range.end.min(size)));
        let longest = self.device.request_bytes_max.max(4096);
        let (mut missing, mut ready_ns) = (0, now_ns);
        if bytes.start < bytes.end {
            for claimed in self.cache.claim(file as u32, bytes.start, bytes.end, true) {
                missing += claimed.end - claimed.start;
                let mut at = claimed.start;
                while at < claimed.end {
                    let end = claimed.end.min(at.saturating_add(longest));
                    self.request(now_ns, file as u32, at..end);
                    at = end;
                }
            }
            ready_ns = ready_ns.max(self.ready_ns(file as u32, &bytes));
        }
        let took_ns = ready_ns - now_ns;
        let found_bytes = (range.end - range.start).saturating_sub(missing);
        self.told.insert((ready_ns, self.outcome.hints), Told { file, range, found_bytes, took_ns, kind });
        self.outcome.hints += 1;
    }

    /// Tells the advisors what became of their hints by now.
    fn tell(&mut self, now_ns: u64) {
        while let Some(first) = self.told.first_entry().filter(|first| first.key().0 <= now_ns) {
            let at_ns = first.key().0;
            let Told { file, range, found_bytes, took_ns, kind } = first.remove();
            let Some(guide) = self.guides.get_mut(&file) else { continue };
            match kind {
                Hint::Try => guide.advisor.tried(&range, found_bytes, took_ns, at_ns),
                Hint::Fresh | Hint::Again => guide.advisor.hinted(range, found_bytes, kind == Hint::Fresh, at_ns),
            }
        }
    }

    /// What has arrived by now is in the cache.
    fn settle(&mut self, now_ns: u64) {
        while let Some(Reverse((at_ns, file, start))) = self.arrivals.peek().copied().filter(|Reverse(a)| a.0 <= now_ns)
        {
            self.arrivals.pop();
            // Released and requested again, it arrives later.
            if let Some((end, _)) = self.coming.get(&(file, start)).copied().filter(|c| c.1 == at_ns) {
                self.coming.remove(&(file, start));
                self.cache.arrive(file, start, end, &mut Vec::new());
            }
        }
    }

    /// When everything under way of a range has arrived; 0 if nothing is.
    fn ready_ns(&self, file: u32, range: &Range<u64>) -> u64 {
        let before = self.coming.range((file, 0)..(file, range.start)).next_back();
        let before = before.filter(|(_, (end, _))| *end > range.start);
        let within = self.coming.range((file, range.start)..(file, range.end));
        before.into_iter().chain(within).map(|(_, (_, ready))| *ready).max().unwrap_or(0)
    }

    fn request(&mut self, now_ns: u64, file: u32, range: Range<u64>) {
        let len = range.end - range.start;
        let goes_on = self.head == Some((file, range.start));
        let cost = if goes_on { self.device.sequential.ttp(len) } else { self.device.random.ttp(len) };
        self.head = Some((file, range.end));
        self.outcome.requests += 1;
        self.outcome.device_bytes += len;
        let Some(free) = self.channels.iter_mut().min() else { return };
        *free = now_ns.max(*free).saturating_add(cost.0);
        self.arrivals.push(Reverse((*free, file, range.start)));
        self.coming.insert((file, range.start), (range.end, *free));
    }
}
