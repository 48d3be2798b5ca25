//! A page cache: which bytes of which files are in a node's memory, are being read, or are still to be written.
//!
//! Pages of 4 KiB are kept in chunks of 128 KiB; the least recently used chunk is evicted first, except pages being
//! read or dirty. A driver that knows when its device finishes calls [`PageCache::arrive`]; until then the pages count
//! as being read.

use std::collections::BTreeSet;
use std::ops::Range;

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

/// A page, bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Pages of a chunk.
const CHUNK_PAGES: u64 = 32;
/// A chunk, bytes.
pub const CHUNK_BYTES: u64 = PAGE_BYTES * CHUNK_PAGES;
const NONE: u32 = u32::MAX;
/// Bits of a chunk's number within its file: files of up to 512 TiB a server.
const CHUNK_BITS: u32 = 32;

/// The state of the bytes from an offset on, and the offset up to which it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// In memory.
    Present(u64),
    /// Being read.
    Coming(u64),
    /// Neither.
    Missing(u64),
}

struct Chunk<W> {
    key: u64,
    present: u32,
    coming: u32,
    dirty: u32,
    /// Pages read ahead and not used since.
    unused: u32,
    /// Pages whose use triggers the kernel's read-ahead ([`ReadAhead`](crate::ReadAhead)).
    marked: u32,
    /// Neighbours in the order of use.
    newer: u32,
    older: u32,
    /// The waiters for its pages.
    waiters: Vec<W>,
}

/// The page cache of one node or server. `W` identifies a waiter for a page. The caller numbers the files; offsets from
/// 512 TiB on share the state of lower ones.
pub struct PageCache<W> {
    capacity_pages: u64,
    present_pages: u64,
    dirty_pages: u64,
    /// Pages read ahead and evicted unused.
    wasted_pages: u64,
    chunks: Rows<Chunk<W>>,
    by_key: FxHashMap<u64, u32>,
    newest: u32,
    oldest: u32,
    dirty: BTreeSet<u64>,
}

impl<W> Chunk<W> {
    fn leave(&mut self, pages: u32) {
        self.present &= !pages;
        self.coming &= !pages;
        self.unused &= !pages;
        self.marked &= !pages;
    }
}

fn key_of(file: u32, offset: u64) -> u64 {
    u64::from(file) << CHUNK_BITS | (offset / CHUNK_BYTES) & ((1 << CHUNK_BITS) - 1)
}

/// The pages of a chunk that a range in it touches.
fn mask(start: u64, end: u64) -> u32 {
    let (from, to) = (start % CHUNK_BYTES / PAGE_BYTES, (end - 1) % CHUNK_BYTES / PAGE_BYTES);
    (u32::MAX << from) & (u32::MAX >> (CHUNK_PAGES - 1 - to))
}

/// A range split at chunk boundaries.
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
    /// An empty cache of `capacity_bytes`, at least one chunk.
    pub fn new(capacity_bytes: u64) -> PageCache<W> {
        PageCache {
            capacity_pages: (capacity_bytes / PAGE_BYTES).max(CHUNK_PAGES),
            present_pages: 0,
            dirty_pages: 0,
            wasted_pages: 0,
            chunks: Rows::default(),
            by_key: FxHashMap::default(),
            newest: NONE,
            oldest: NONE,
            dirty: BTreeSet::new(),
        }
    }

    /// Bytes still to be written.
    pub fn dirty_bytes(&self) -> u64 {
        self.dirty_pages * PAGE_BYTES
    }

    /// Its size, bytes.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_pages * PAGE_BYTES
    }

    /// Bytes read ahead and evicted unused.
    pub fn wasted_bytes(&self) -> u64 {
        self.wasted_pages * PAGE_BYTES
    }

    /// Bytes read ahead and not yet used.
    pub fn unused_bytes(&self) -> u64 {
        self.chunks.iter().map(|chunk| u64::from(chunk.unused.count_ones())).sum::<u64>() * PAGE_BYTES
    }

    /// The state of the bytes from `at` on, up to `end`.
    pub fn look(&self, file: u32, at: u64, end: u64) -> State {
        let chunk_end = end.min((at / CHUNK_BYTES + 1) * CHUNK_BYTES);
        let Some(&i) = self.by_key.get(&key_of(file, at)) else { return State::Missing(chunk_end) };
        let chunk = &self.chunks[i];
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

    /// The parts of a range that are being read, in order.
    pub fn coming(&self, file: u32, start: u64, end: u64) -> Vec<Range<u64>> {
        let (mut at, mut coming) = (start, Vec::new());
        while at < end {
            let state = self.look(file, at, end);
            let (State::Present(to) | State::Coming(to) | State::Missing(to)) = state;
            if matches!(state, State::Coming(_)) {
                coming.push(at..to);
            }
            at = to;
        }
        coming
    }

    /// True if the page that holds a byte is present.
    pub fn has(&self, file: u32, at: u64) -> bool {
        matches!(self.look(file, at, at + 1), State::Present(_))
    }

    /// Counts as a use of a range.
    pub fn touch(&mut self, file: u32, start: u64, end: u64) {
        for (from, to) in by_chunk(start, end) {
            if let Some(&i) = self.by_key.get(&key_of(file, from)) {
                self.chunks[i].unused &= !mask(from, to);
                self.unlink(i);
                self.link(i);
            }
        }
    }

    /// Registers a waiter for the chunk at `at`, which [`PageCache::arrive`] or [`PageCache::give_up`] returns.
    pub fn wait(&mut self, file: u32, at: u64, who: W) {
        let i = self.chunk(key_of(file, at));
        self.chunks[i].waiters.push(who);
    }

    /// The missing pages of a range, as ordered ranges; they count as being read from now on, and the caller reads
    /// them. `ahead`: not requested yet.
    pub fn claim(&mut self, file: u32, start: u64, end: u64, ahead: bool) -> Vec<Range<u64>> {
        let mut claimed: Vec<Range<u64>> = Vec::new();
        let (mut at, end) = (start / PAGE_BYTES * PAGE_BYTES, end.next_multiple_of(PAGE_BYTES));
        while at < end {
            match self.look(file, at, end) {
                State::Present(to) | State::Coming(to) => at = to,
                State::Missing(to) => {
                    match claimed.last_mut() {
                        Some(last) if last.end == at => last.end = to,
                        _ => claimed.push(at..to),
                    }
                    at = to;
                }
            }
        }
        for (from, to) in claimed.iter().flat_map(|range| by_chunk(range.start, range.end)) {
            let i = self.chunk(key_of(file, from));
            let chunk = &mut self.chunks[i];
            chunk.coming |= mask(from, to);
            chunk.unused |= if ahead { mask(from, to) } else { 0 };
        }
        claimed
    }

    /// Marks the page at `at`: its use triggers read-ahead.
    pub(crate) fn mark(&mut self, file: u32, at: u64) {
        if let Some(&i) = self.by_key.get(&key_of(file, at)) {
            let chunk = &mut self.chunks[i];
            chunk.marked |= mask(at, at + 1) & (chunk.present | chunk.coming);
        }
    }

    /// Removes and returns the first mark in a range.
    pub(crate) fn take_mark(&mut self, file: u32, start: u64, end: u64) -> Option<u64> {
        by_chunk(start, end).find_map(|(from, to)| {
            let chunk = &mut self.chunks[*self.by_key.get(&key_of(file, from))?];
            let marked = chunk.marked & mask(from, to);
            chunk.marked &= !(marked & marked.wrapping_neg());
            (marked != 0).then(|| from / CHUNK_BYTES * CHUNK_BYTES + u64::from(marked.trailing_zeros()) * PAGE_BYTES)
        })
    }

    /// Contiguous bytes in memory before `at`, at most `bytes_max`.
    pub(crate) fn present_before(&self, file: u32, at: u64, bytes_max: u64) -> u64 {
        let mut start = at;
        while start > 0 && at - start < bytes_max && self.has(file, start - 1) {
            start = (start - 1) / PAGE_BYTES * PAGE_BYTES;
        }
        at - start
    }

    /// The pages being read in a range have arrived; their waiters are put into `woken`.
    pub fn arrive(&mut self, file: u32, start: u64, end: u64, woken: &mut Vec<W>) {
        for (from, to) in by_chunk(start, end) {
            let Some(&i) = self.by_key.get(&key_of(file, from)) else { continue };
            let chunk = &mut self.chunks[i];
            // Pages dropped or written meanwhile do not arrive.
            let came = mask(from, to) & chunk.coming;
            self.present_pages += u64::from((came & !chunk.present).count_ones());
            chunk.present |= came;
            chunk.coming &= !came;
            woken.append(&mut chunk.waiters);
            self.unlink(i);
            self.link(i);
        }
        self.evict();
    }

    /// The pages being read in a range will not arrive; their waiters are put into `woken`.
    pub fn give_up(&mut self, file: u32, start: u64, end: u64, woken: &mut Vec<W>) {
        for (from, to) in by_chunk(start, end) {
            if let Some(&i) = self.by_key.get(&key_of(file, from)) {
                let chunk = &mut self.chunks[i];
                let lost = chunk.coming & mask(from, to);
                chunk.coming &= !lost;
                chunk.unused &= chunk.present | chunk.coming;
                chunk.marked &= chunk.present | chunk.coming;
                woken.append(&mut chunk.waiters);
                self.drop_if_empty(i);
            }
        }
    }

    /// Drops the clean pages of a range, as after `POSIX_FADV_DONTNEED`, and gives up those being read.
    pub fn remove(&mut self, file: u32, start: u64, end: u64) {
        for (from, to) in by_chunk(start, end) {
            let Some(&i) = self.by_key.get(&key_of(file, from)) else { continue };
            let chunk = &mut self.chunks[i];
            let gone = mask(from, to) & !chunk.dirty;
            self.present_pages -= u64::from((gone & chunk.present).count_ones());
            self.wasted_pages += u64::from((gone & chunk.unused).count_ones());
            chunk.leave(gone);
            self.drop_if_empty(i);
        }
    }

    /// Drops the whole pages from `start` on, dirty or not, as when a file is truncated there.
    pub fn truncate(&mut self, file: u32, start: u64) {
        let start = start.next_multiple_of(PAGE_BYTES);
        let chunks: Vec<u64> = self.by_key.keys().copied().filter(|key| (key >> CHUNK_BITS) as u32 == file).collect();
        for key in chunks {
            let base = (key & ((1 << CHUNK_BITS) - 1)) * CHUNK_BYTES;
            let Some(&i) = self.by_key.get(&key).filter(|_| base + CHUNK_BYTES > start) else { continue };
            let gone = mask(start.max(base), base + CHUNK_BYTES);
            let chunk = &mut self.chunks[i];
            self.present_pages -= u64::from((gone & chunk.present).count_ones());
            self.dirty_pages -= u64::from((gone & chunk.dirty).count_ones());
            chunk.dirty &= !gone;
            if chunk.dirty == 0 {
                self.dirty.remove(&key);
            }
            chunk.leave(gone);
            self.drop_if_empty(i);
        }
    }

    /// A range was written: it is present, and dirty if it has yet to reach the device.
    pub fn write(&mut self, file: u32, start: u64, end: u64, dirty: bool) {
        for (from, to) in by_chunk(start, end) {
            let key = key_of(file, from);
            let i = self.chunk(key);
            let chunk = &mut self.chunks[i];
            let written = mask(from, to);
            self.present_pages += u64::from((written & !chunk.present).count_ones());
            chunk.present |= written;
            chunk.unused &= !written;
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

    /// Takes the next dirty range in order of file and offset after `after` (0 or the last number returned), from
    /// contiguous chunks up to `max_bytes`; its pages become clean. Returns file, start, end, and the next `after`.
    pub fn clean(&mut self, after: u64, max_bytes: u64) -> Option<(u32, u64, u64, u64)> {
        let first = self.dirty.range(after..).next().or_else(|| self.dirty.first()).copied()?;
        let file = (first >> CHUNK_BITS) as u32;
        let mut range: Option<(u64, u64)> = None;
        let mut key = first;
        while let Some(&i) = self.by_key.get(&key) {
            let chunk = &mut self.chunks[i];
            if chunk.dirty == 0 {
                break;
            }
            let base = (key & ((1 << CHUNK_BITS) - 1)) * CHUNK_BYTES;
            // The first run of dirty pages either extends the range so far or is left for later.
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

    /// Clears the cache and the waiters, as a restart does.
    pub fn clear(&mut self) {
        *self = PageCache::new(self.capacity_pages * PAGE_BYTES);
    }

    fn chunk(&mut self, key: u64) -> u32 {
        if let Some(&i) = self.by_key.get(&key) {
            return i;
        }
        let chunk = Chunk {
            key,
            present: 0,
            coming: 0,
            dirty: 0,
            unused: 0,
            marked: 0,
            newer: NONE,
            older: NONE,
            waiters: Vec::new(),
        };
        let i = self.chunks.insert(chunk);
        self.by_key.insert(key, i);
        self.link(i);
        i
    }

    fn link(&mut self, i: u32) {
        let old = std::mem::replace(&mut self.newest, i);
        let chunk = &mut self.chunks[i];
        (chunk.newer, chunk.older) = (NONE, old);
        match old {
            NONE => self.oldest = i,
            old => self.chunks[old].newer = i,
        }
    }

    fn unlink(&mut self, i: u32) {
        let Chunk { newer, older, .. } = self.chunks[i];
        match newer {
            NONE => self.newest = older,
            n => self.chunks[n].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            o => self.chunks[o].newer = newer,
        }
    }

    fn drop_if_empty(&mut self, i: u32) {
        let chunk = &self.chunks[i];
        if chunk.present | chunk.coming | chunk.dirty == 0 && chunk.waiters.is_empty() {
            self.by_key.remove(&chunk.key);
            self.unlink(i);
            self.chunks.release(i);
        }
    }

    fn evict(&mut self) {
        let mut i = self.oldest;
        while self.present_pages > self.capacity_pages && i != NONE && i != self.newest {
            let chunk = &mut self.chunks[i];
            let newer = chunk.newer;
            if chunk.dirty == 0 {
                // What was written while it is being read stays until that is over, as the kernel has locked such pages: what is
                // read for them is older.
                let gone = chunk.present & !chunk.coming;
                self.present_pages -= u64::from(gone.count_ones());
                self.wasted_pages += u64::from((chunk.unused & gone).count_ones());
                chunk.leave(gone);
                self.drop_if_empty(i);
            }
            i = newer;
        }
    }
}

#[cfg(test)]
// Lists of ranges are compared.
#[allow(clippy::single_range_in_vec_init)]
mod tests {
    use std::collections::{BTreeMap, HashSet};

    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn arriving_pages_are_present_and_wake_waiters() {
        let mut c = PageCache::new(MIB);
        assert_eq!(c.look(1, 5000, 10_000), State::Missing(10_000));
        assert_eq!(c.claim(1, 4096, 12_288, false), [4096..12_288]);
        assert_eq!(c.claim(1, 0, 16_384, false), [0..4096, 12_288..16_384]);
        c.give_up(1, 0, 4096, &mut Vec::new());
        c.give_up(1, 12_288, 16_384, &mut Vec::new());
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

    #[test]
    fn pages_written_while_they_are_read_stay_until_then() {
        let mut c: PageCache<()> = PageCache::new(CHUNK_BYTES);
        assert_eq!(c.claim(1, 0, 8192, false), [0..8192]);
        c.write(1, 0, 4096, false);
        c.write(2, 0, 2 * CHUNK_BYTES, false);
        // Of the first page the older bytes must not come.
        assert_eq!((c.has(1, 0), c.coming(1, 0, 8192)), (true, vec![4096..8192]));
        c.arrive(1, 0, 8192, &mut Vec::new());
        c.write(2, 0, 2 * CHUNK_BYTES, false);
        assert!(!c.has(1, 0) && !c.has(1, 4096) && c.claim(1, 0, 8192, false) == [0..8192]);
    }

    #[test]
    fn pages_read_ahead_and_evicted_unused_are_counted() {
        let mut c: PageCache<()> = PageCache::new(CHUNK_BYTES);
        c.claim(1, 0, 65_536, true);
        c.touch(1, 0, 4096);
        c.arrive(1, 0, 65_536, &mut Vec::new());
        assert_eq!((c.unused_bytes(), c.wasted_bytes()), (61_440, 0));
        c.remove(1, 0, 8192);
        assert_eq!((c.unused_bytes(), c.wasted_bytes()), (57_344, 4096));
        c.write(2, 0, CHUNK_BYTES, false);
        assert_eq!((c.has(1, 20_000), c.unused_bytes(), c.wasted_bytes()), (false, 0, 61_440));
        // Pages dropped while being read do not arrive.
        c.claim(3, 0, 4096, true);
        c.remove(3, 0, 4096);
        c.arrive(3, 0, 4096, &mut Vec::new());
        assert!(!c.has(3, 0) && c.wasted_bytes() == 65_536);
    }

    #[test]
    fn a_truncation_takes_whole_pages_dirty_or_not() {
        let mut c: PageCache<()> = PageCache::new(MIB);
        c.write(1, 0, 3 * CHUNK_BYTES, true);
        c.write(2, 0, PAGE_BYTES, true);
        c.claim(1, 3 * CHUNK_BYTES, 4 * CHUNK_BYTES, true);
        c.truncate(1, CHUNK_BYTES + PAGE_BYTES + 1);
        assert_eq!(c.look(1, CHUNK_BYTES, 2 * CHUNK_BYTES), State::Present(CHUNK_BYTES + 2 * PAGE_BYTES));
        assert!(c.has(1, 0) && c.has(2, 0) && !c.has(1, CHUNK_BYTES + 2 * PAGE_BYTES));
        assert!(matches!(c.look(1, 3 * CHUNK_BYTES, 4 * CHUNK_BYTES), State::Missing(_)));
        assert_eq!(c.dirty_bytes(), CHUNK_BYTES + 3 * PAGE_BYTES);
        c.arrive(1, 3 * CHUNK_BYTES, 4 * CHUNK_BYTES, &mut Vec::new());
        assert!(!c.has(1, 3 * CHUNK_BYTES) && c.unused_bytes() == 0 && c.wasted_bytes() == 0);
        c.truncate(1, 0);
        assert_eq!((c.dirty_bytes(), c.clean(0, MIB).map(|r| r.0)), (PAGE_BYTES, Some(2)));
    }

    #[test]
    fn marks_are_found_once() {
        let mut c: PageCache<()> = PageCache::new(MIB);
        c.claim(1, 0, 2 * CHUNK_BYTES, false);
        for at in [8192, CHUNK_BYTES + 4096, 5 * CHUNK_BYTES] {
            c.mark(1, at);
        }
        assert_eq!(c.take_mark(1, 0, 8192), None);
        assert_eq!(c.take_mark(1, 0, 6 * CHUNK_BYTES), Some(8192));
        assert_eq!(c.take_mark(1, 0, 6 * CHUNK_BYTES), Some(CHUNK_BYTES + 4096));
        assert_eq!(c.take_mark(1, 0, 6 * CHUNK_BYTES), None, "a page that is not there bears no mark");
    }

    proptest! {
        /// Compared with a plain table, page by page: claims are the missing pages, and dropped pages are gone.
        #[test]
        fn as_a_table_of_pages(steps in prop::collection::vec((0u64..90, 1u64..40, 0u8..4), 1..60)) {
            let mut c: PageCache<()> = PageCache::new(1 << 30);
            let mut table = [false; 130];
            let mut claims: Vec<Range<u64>> = Vec::new();
            for (page, pages, kind) in steps {
                let (start, end) = (page * PAGE_BYTES, (page + pages) * PAGE_BYTES);
                match kind {
                    0 => {
                        c.remove(0, start, end);
                        table[page as usize..(page + pages) as usize].fill(false);
                    }
                    1 => claims.drain(..).for_each(|r| c.arrive(0, r.start, r.end, &mut Vec::new())),
                    _ => {
                        let claimed = c.claim(0, start, end, kind == 3);
                        let got: Vec<u64> = claimed.iter().flat_map(|r| r.start / PAGE_BYTES..r.end / PAGE_BYTES).collect();
                        let missing: Vec<u64> = (page..page + pages).filter(|p| !table[*p as usize]).collect();
                        prop_assert_eq!(got, missing);
                        table[page as usize..(page + pages) as usize].fill(true);
                        claims.extend(claimed);
                    }
                }
                let present: u32 = c.chunks.iter().map(|chunk| chunk.present.count_ones()).sum();
                prop_assert_eq!(c.present_pages, u64::from(present));
            }
            claims.drain(..).for_each(|r| c.arrive(0, r.start, r.end, &mut Vec::new()));
            let known = |page: u64| c.look(0, page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
            for (page, there) in table.iter().enumerate() {
                prop_assert_eq!(matches!(known(page as u64), State::Present(_)), *there);
            }
        }

        /// Compared with a set of pages: dirty pages are neither lost nor returned twice, and the cache keeps its size.
        #[test]
        fn dirty_pages_are_returned_once(writes in prop::collection::vec((0u32..3, 0u64..200, 1u64..80, any::<bool>()), 1..60)) {
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
