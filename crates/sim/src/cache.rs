//! A page cache: which bytes of which files a node has in memory, which are on their way, and which have still to be
//! written.
//!
//! Pages of 4 KiB are kept in chunks of 128 KiB; the chunk used least recently goes first, except for pages that are on
//! their way or dirty.

use std::collections::BTreeSet;

use rustc_hash::FxHashMap;

/// A page, bytes.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Pages of a chunk.
const CHUNK_PAGES: u64 = 32;
/// A chunk, bytes.
pub(crate) const CHUNK_BYTES: u64 = PAGE_BYTES * CHUNK_PAGES;
const NONE: u32 = u32::MAX;
/// Bits of a chunk's number within its file: files of up to 512 TiB a server.
const CHUNK_BITS: u32 = 32;

/// What is known of the bytes from an offset on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// In memory, up to there.
    Present(u64),
    /// On their way.
    Coming(u64),
    /// Neither.
    Missing(u64),
}

struct Chunk<W> {
    key: u64,
    present: u32,
    coming: u32,
    dirty: u32,
    /// Neighbours in order of use.
    newer: u32,
    older: u32,
    /// Who waits for pages of it.
    waiters: Vec<W>,
}

pub(crate) struct PageCache<W> {
    capacity_pages: u64,
    present_pages: u64,
    dirty_pages: u64,
    chunks: Vec<Chunk<W>>,
    free: Vec<u32>,
    by_key: FxHashMap<u64, u32>,
    newest: u32,
    oldest: u32,
    dirty: BTreeSet<u64>,
}

fn key_of(file: u32, offset: u64) -> u64 {
    u64::from(file) << CHUNK_BITS | (offset / CHUNK_BYTES) & ((1 << CHUNK_BITS) - 1)
}

/// The pages of a chunk that a range within it touches.
fn mask(start: u64, end: u64) -> u32 {
    let (from, to) = (start % CHUNK_BYTES / PAGE_BYTES, (end - 1) % CHUNK_BYTES / PAGE_BYTES);
    (u32::MAX << from) & (u32::MAX >> (CHUNK_PAGES - 1 - to))
}

/// The parts of a range that lie in one chunk each.
fn by_chunk(start: u64, end: u64) -> impl Iterator<Item = (u64, u64)> {
    let mut at = start;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let from = at;
        at = end.min((at / CHUNK_BYTES + 1) * CHUNK_BYTES);
        Some((from, at))
    })
}

impl<W: Copy> PageCache<W> {
    /// A cache of so many bytes, at least one chunk.
    pub(crate) fn new(capacity_bytes: u64) -> PageCache<W> {
        PageCache {
            capacity_pages: (capacity_bytes / PAGE_BYTES).max(CHUNK_PAGES),
            present_pages: 0,
            dirty_pages: 0,
            chunks: Vec::new(),
            free: Vec::new(),
            by_key: FxHashMap::default(),
            newest: NONE,
            oldest: NONE,
            dirty: BTreeSet::new(),
        }
    }

    /// Bytes that wait to be written.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_pages * PAGE_BYTES
    }

    /// Its size, bytes.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        self.capacity_pages * PAGE_BYTES
    }

    /// What is so from `at` on, up to `end` at most.
    pub(crate) fn look(&self, file: u32, at: u64, end: u64) -> State {
        let chunk_end = end.min((at / CHUNK_BYTES + 1) * CHUNK_BYTES);
        let Some(&i) = self.by_key.get(&key_of(file, at)) else { return State::Missing(chunk_end) };
        let chunk = &self.chunks[i as usize];
        let of = |page: u64| (chunk.present >> page & 1, chunk.coming >> page & 1);
        let base = at / CHUNK_BYTES * CHUNK_BYTES;
        let mut page = at % CHUNK_BYTES / PAGE_BYTES;
        let first = of(page);
        while page < CHUNK_PAGES && base + page * PAGE_BYTES < chunk_end && of(page) == first {
            page += 1;
        }
        let until = chunk_end.min(base + page * PAGE_BYTES);
        match first {
            (1, _) => State::Present(until),
            (_, 1) => State::Coming(until),
            _ => State::Missing(until),
        }
    }

    /// True when the page that holds a byte is present.
    pub(crate) fn has(&self, file: u32, at: u64) -> bool {
        matches!(self.look(file, at, at + 1), State::Present(_))
    }

    /// Counts a range as used now.
    pub(crate) fn touch(&mut self, file: u32, start: u64, end: u64) {
        for (from, _) in by_chunk(start, end) {
            if let Some(&i) = self.by_key.get(&key_of(file, from)) {
                self.unlink(i);
                self.link(i);
            }
        }
    }

    /// Whoever waits for the chunk at `at` is told when pages of it come.
    pub(crate) fn wait(&mut self, file: u32, at: u64, who: W) {
        let i = self.chunk(key_of(file, at));
        self.chunks[i as usize].waiters.push(who);
    }

    /// The pages of a range that are not there are on their way.
    pub(crate) fn expect(&mut self, file: u32, start: u64, end: u64) {
        for (from, to) in by_chunk(start, end) {
            let i = self.chunk(key_of(file, from));
            let chunk = &mut self.chunks[i as usize];
            chunk.coming |= mask(from, to) & !chunk.present;
        }
    }

    /// What was on its way in a range has come; those who waited are put into `woken`.
    pub(crate) fn arrive(&mut self, file: u32, start: u64, end: u64, woken: &mut Vec<W>) {
        for (from, to) in by_chunk(start, end) {
            let i = self.chunk(key_of(file, from));
            let chunk = &mut self.chunks[i as usize];
            let came = mask(from, to);
            self.present_pages += u64::from((came & !chunk.present).count_ones());
            chunk.present |= came;
            chunk.coming &= !came;
            woken.append(&mut chunk.waiters);
            self.unlink(i);
            self.link(i);
        }
        self.evict();
    }

    /// What was on its way in a range will not come; those who waited are put into `woken`.
    pub(crate) fn give_up(&mut self, file: u32, start: u64, end: u64, woken: &mut Vec<W>) {
        for (from, to) in by_chunk(start, end) {
            if let Some(&i) = self.by_key.get(&key_of(file, from)) {
                let chunk = &mut self.chunks[i as usize];
                chunk.coming &= !mask(from, to);
                woken.append(&mut chunk.waiters);
                self.drop_if_empty(i);
            }
        }
    }

    /// A range was written: it is present, and dirty if it has still to reach the device.
    pub(crate) fn write(&mut self, file: u32, start: u64, end: u64, dirty: bool) {
        for (from, to) in by_chunk(start, end) {
            let key = key_of(file, from);
            let i = self.chunk(key);
            let chunk = &mut self.chunks[i as usize];
            let written = mask(from, to);
            self.present_pages += u64::from((written & !chunk.present).count_ones());
            chunk.present |= written;
            if dirty {
                self.dirty_pages += u64::from((written & !chunk.dirty).count_ones());
                chunk.dirty |= written;
                self.dirty.insert(key);
            }
            self.unlink(i);
            self.link(i);
        }
        self.evict();
    }

    /// Takes the next dirty range in order of file and offset after `after` (a place that an earlier call gave), of
    /// contiguous chunks up to `max_bytes`; its pages count as clean from now on.
    pub(crate) fn clean(&mut self, after: u64, max_bytes: u64) -> Option<(u32, u64, u64, u64)> {
        let first = self.dirty.range(after..).next().or_else(|| self.dirty.first()).copied()?;
        let file = (first >> CHUNK_BITS) as u32;
        let mut range: Option<(u64, u64)> = None;
        let mut key = first;
        while let Some(&i) = self.by_key.get(&key) {
            let chunk = &mut self.chunks[i as usize];
            if chunk.dirty == 0 {
                break;
            }
            let base = (key & ((1 << CHUNK_BITS) - 1)) * CHUNK_BYTES;
            // The first run of dirty pages; it goes on with the range so far, or is left for later.
            let from = chunk.dirty.trailing_zeros();
            let pages = (chunk.dirty >> from).trailing_ones();
            let (start, end) = (base + u64::from(from) * PAGE_BYTES, base + u64::from(from + pages) * PAGE_BYTES);
            if range.is_some_and(|(s, e)| e != start || end - s > max_bytes) {
                break;
            }
            chunk.dirty &= !mask(start, end);
            self.dirty_pages -= u64::from(pages);
            range = Some((range.map_or(start, |r| r.0), end));
            if chunk.dirty != 0 {
                break;
            }
            self.dirty.remove(&key);
            key += 1;
        }
        let (start, end) = range?;
        Some((file, start, end, key))
    }

    /// Forgets everything, as after a restart; nobody is told.
    pub(crate) fn clear(&mut self) {
        *self = PageCache::new(self.capacity_pages * PAGE_BYTES);
    }

    fn chunk(&mut self, key: u64) -> u32 {
        if let Some(&i) = self.by_key.get(&key) {
            return i;
        }
        let chunk = Chunk { key, present: 0, coming: 0, dirty: 0, newer: NONE, older: NONE, waiters: Vec::new() };
        let i = match self.free.pop() {
            Some(i) => {
                self.chunks[i as usize] = chunk;
                i
            }
            None => {
                self.chunks.push(chunk);
                self.chunks.len() as u32 - 1
            }
        };
        self.by_key.insert(key, i);
        self.link(i);
        i
    }

    fn link(&mut self, i: u32) {
        let old = std::mem::replace(&mut self.newest, i);
        let chunk = &mut self.chunks[i as usize];
        (chunk.newer, chunk.older) = (NONE, old);
        match old {
            NONE => self.oldest = i,
            old => self.chunks[old as usize].newer = i,
        }
    }

    fn unlink(&mut self, i: u32) {
        let Chunk { newer, older, .. } = self.chunks[i as usize];
        match newer {
            NONE => self.newest = older,
            n => self.chunks[n as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            o => self.chunks[o as usize].newer = newer,
        }
    }

    fn drop_if_empty(&mut self, i: u32) {
        let chunk = &self.chunks[i as usize];
        if chunk.present | chunk.coming | chunk.dirty == 0 && chunk.waiters.is_empty() {
            self.by_key.remove(&chunk.key);
            self.unlink(i);
            self.free.push(i);
        }
    }

    fn evict(&mut self) {
        let mut i = self.oldest;
        while self.present_pages > self.capacity_pages && i != NONE && i != self.newest {
            let chunk = &mut self.chunks[i as usize];
            let newer = chunk.newer;
            if chunk.dirty == 0 {
                self.present_pages -= u64::from(chunk.present.count_ones());
                chunk.present = 0;
                self.drop_if_empty(i);
            }
            i = newer;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn what_arrives_is_there_and_wakes() {
        let mut c = PageCache::new(MIB);
        assert_eq!(c.look(1, 5000, 10_000), State::Missing(10_000));
        c.expect(1, 4096, 12_288);
        assert_eq!(c.look(1, 5000, 20_000), State::Coming(12_288));
        c.wait(1, 5000, 'a');
        let mut woken = Vec::new();
        c.arrive(1, 4096, 8192, &mut woken);
        assert_eq!((woken, c.look(1, 5000, 20_000)), (vec!['a'], State::Present(8192)));
        assert_eq!(c.look(1, 8192, 20_000), State::Coming(12_288));
        assert!(c.has(1, 4096) && !c.has(1, 4095) && !c.has(2, 4096));
    }

    #[test]
    fn the_least_recently_used_chunk_goes() {
        let mut c: PageCache<()> = PageCache::new(4 * CHUNK_BYTES);
        for file in 0..4 {
            c.write(file, 0, CHUNK_BYTES, false);
        }
        c.touch(0, 0, 1);
        c.write(4, 0, CHUNK_BYTES, false);
        assert!(c.has(0, 0) && !c.has(1, 0) && c.has(2, 0) && c.has(4, 0));
    }

    #[test]
    fn dirty_ranges_leave_in_order_and_stay_until_then() {
        let mut c: PageCache<()> = PageCache::new(2 * CHUNK_BYTES);
        c.write(3, CHUNK_BYTES - 4096, CHUNK_BYTES + 8192, true);
        c.write(1, 0, 100, true);
        c.write(9, 0, 8 * CHUNK_BYTES, false);
        assert_eq!(c.dirty_bytes(), 4 * 4096);
        let (file, start, end, next) = c.clean(0, MIB).unwrap();
        assert_eq!((file, start, end), (1, 0, 4096));
        let (file, start, end, _) = c.clean(next, MIB).unwrap();
        assert_eq!((file, start, end), (3, CHUNK_BYTES - 4096, CHUNK_BYTES + 8192));
        assert_eq!((c.clean(0, MIB), c.dirty_bytes()), (None, 0));
    }

    proptest! {
        /// Against a set of pages: what is dirty is neither lost nor given twice, and the cache keeps its size.
        #[test]
        fn dirty_pages_are_given_once(writes in prop::collection::vec((0u32..3, 0u64..200, 1u64..80, any::<bool>()), 1..60)) {
            let mut c: PageCache<()> = PageCache::new(64 * PAGE_BYTES);
            let mut dirty = HashSet::new();
            let mut after = 0;
            let mut given: BTreeMap<(u32, u64), u32> = BTreeMap::new();
            for (file, page, pages, clean) in writes {
                c.write(file, page * PAGE_BYTES, (page + pages) * PAGE_BYTES, true);
                dirty.extend((page..page + pages).map(|p| (file, p)));
                if clean && let Some((file, start, end, next)) = c.clean(after, 64 * PAGE_BYTES) {
                    after = next;
                    for p in start / PAGE_BYTES..end / PAGE_BYTES {
                        prop_assert!(dirty.remove(&(file, p)));
                        *given.entry((file, p)).or_default() += 1;
                    }
                }
                prop_assert_eq!(c.dirty_bytes(), dirty.len() as u64 * PAGE_BYTES);
                let kept = c.chunks.iter().map(|c| u64::from(c.present.count_ones())).sum::<u64>();
                prop_assert!(c.present_pages <= 64.max(c.dirty_pages + 2 * CHUNK_PAGES) || kept >= c.dirty_pages);
            }
        }
    }
}
