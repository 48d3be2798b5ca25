//! Which parts of which objects changed since somebody began to copy them, so that a store can be copied while it is used.
//!
//! A *watch* is begun with a number, and changes are given out in batches. A batch stays until the next one is asked for, so
//! a copier that was killed asks for it again. What is in no batch has not changed since the watch began.
//!
//! **Order.** A change is noted when it has ended, also when it failed. So what a copier reads is either complete, or is noted
//! after the copier has read it and comes with a later batch.
//!
//! **Bound.** Changes are noted in blocks. When there are too many ([`WATCHED_MAX`]), the watch says that all has changed.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use impresario_base::lock::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::filesystem::FileSystem;
use crate::objects::ObjectStore;

/// The grain in which changes are noted, bytes.
const GRAIN_BYTES: u64 = 256 << 10;
/// Notes of one watch: some 40 MiB of memory.
const WATCHED_MAX: usize = 1 << 20;

/// Notes changes while a watch is on.
#[derive(Default)]
pub(crate) struct Changes {
    is_on: AtomicBool,
    watch: Mutex<Option<Watch>>,
}

struct Watch {
    number: u64,
    /// Number of the batch that was given out last; 0: none yet.
    batch: u64,
    given: Batch,
    noted: Batch,
}

/// Changes of objects.
#[derive(Default)]
struct Batch {
    /// There were too many.
    is_all: bool,
    blocks: FxHashSet<(u64, u64)>,
    /// Objects that changed from an offset on to their ends.
    tails: FxHashMap<u64, u64>,
}

/// A part of a batch.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Changed {
    /// Objects and ranges, in order. A range that ends at `u64::MAX` was cut off or removed first.
    pub ranges: Vec<(u64, Range<u64>)>,
    /// Too much has changed: everything is to be copied anew.
    pub is_all: bool,
    /// Another part follows.
    pub has_more: bool,
}

impl Changes {
    fn note(&self, key: u64, range: Range<u64>) {
        // Ordered with `ObjectStore::watch`: who does not see the watch had ended its change before the watch began.
        if range.is_empty() || !self.is_on.load(Ordering::SeqCst) {
            return;
        }
        if let Some(watch) = &mut *self.watch.lock() {
            watch.noted.note(key, range);
        }
    }
}

impl Batch {
    fn note(&mut self, key: u64, range: Range<u64>) {
        let last = (range.end - 1) / GRAIN_BYTES;
        let first = range.start / GRAIN_BYTES;
        let room = WATCHED_MAX.saturating_sub(self.blocks.len() + self.tails.len()) as u64;
        if self.is_all {
            return;
        }
        if range.end == u64::MAX {
            let from = self.tails.entry(key).or_insert(range.start);
            *from = range.start.min(*from);
        } else if last - first < room {
            self.blocks.extend((first..=last).map(|block| (key, block)));
        }
        // Also when the range itself did not fit.
        if self.blocks.len() + self.tails.len() >= WATCHED_MAX || (range.end != u64::MAX && last - first >= room) {
            *self = Batch { is_all: true, ..Batch::default() };
        }
    }

    /// Ranges in order, neighbours joined, those behind the start of a tail left out.
    fn ranges(&self) -> Vec<(u64, Range<u64>)> {
        let mut blocks: Vec<_> = self.blocks.iter().copied().collect();
        blocks.sort_unstable();
        let mut ranges: Vec<(u64, Range<u64>)> = Vec::new();
        for (key, block) in blocks {
            let range = block * GRAIN_BYTES..(block + 1) * GRAIN_BYTES;
            if self.tails.get(&key).is_some_and(|from| range.start >= *from) {
                continue;
            }
            match ranges.last_mut() {
                Some((last, before)) if *last == key && before.end == range.start => before.end = range.end,
                _ => ranges.push((key, range)),
            }
        }
        ranges.extend(self.tails.iter().map(|(key, from)| (*key, *from..u64::MAX)));
        ranges.sort_unstable_by_key(|(key, range)| (*key, range.start));
        ranges
    }
}

impl<F: FileSystem> ObjectStore<F> {
    /// Begins a watch, or goes on with the one of this number: then the number of its last batch. Another one ends.
    pub fn watch(&self, number: u64) -> Option<u64> {
        let mut watch = self.changes.watch.lock();
        if let Some(watch) = watch.as_ref().filter(|watch| watch.number == number) {
            return Some(watch.batch);
        }
        *watch = Some(Watch { number, batch: 0, given: Batch::default(), noted: Batch::default() });
        self.changes.is_on.store(true, Ordering::SeqCst);
        None
    }

    /// Ends the watch of this number.
    pub fn end_watch(&self, number: u64) {
        let mut watch = self.changes.watch.lock();
        if watch.as_ref().is_some_and(|watch| watch.number == number) {
            self.changes.is_on.store(false, Ordering::SeqCst);
            *watch = None;
        }
    }

    /// Number of the watch that is on.
    pub fn watch_number(&self) -> Option<u64> {
        self.changes.watch.lock().as_ref().map(|watch| watch.number)
    }

    /// True while objects are watched.
    pub fn is_watched(&self) -> bool {
        self.changes.is_on.load(Ordering::SeqCst)
    }

    /// A batch of a watch: the last one again, or the one after it, which ends the last one. From the range `skip` on, at most
    /// `max`. `None`: there is no such watch or batch.
    pub fn watched(&self, number: u64, batch: u64, skip: usize, max: usize) -> Option<Changed> {
        let mut watch = self.changes.watch.lock();
        let watch = watch.as_mut().filter(|watch| watch.number == number)?;
        if batch == watch.batch + 1 {
            let was_all = watch.given.is_all;
            watch.given = std::mem::take(&mut watch.noted);
            watch.given.is_all |= was_all;
            watch.batch = batch;
        }
        if batch != watch.batch || batch == 0 {
            return None;
        }
        let ranges = watch.given.ranges();
        let has_more = ranges.len() > skip.saturating_add(max);
        let ranges = ranges.into_iter().skip(skip).take(max).collect();
        Some(Changed { ranges, is_all: watch.given.is_all, has_more })
    }

    /// A range of an object may have changed.
    pub(crate) fn note_change(&self, key: u64, range: Range<u64>) {
        self.changes.note(key, range);
    }
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::path::Path;

    use super::*;
    use crate::folder::{FolderIdentity, make_over};
    use crate::objects::StoreOptions;
    use crate::testing::Forgetful;

    fn store() -> ObjectStore<Forgetful> {
        let (fs, dir) = (Forgetful::default(), Path::new("forgetful"));
        make_over(&fs, dir, &FolderIdentity { cluster: 1, store: 2, server: "data.0".into() }).unwrap();
        ObjectStore::over(fs, dir, "data.0", StoreOptions::default()).unwrap()
    }

    fn ranges(store: &ObjectStore<Forgetful>, batch: u64) -> Vec<(u64, Range<u64>)> {
        store.watched(7, batch, 0, 100).unwrap().ranges
    }

    #[test]
    fn every_change_is_in_the_next_batch_and_a_batch_can_be_had_again() {
        const G: u64 = GRAIN_BYTES;
        let store = store();
        let write = |key, at| store.write_vectored(key, at, &[IoSlice::new(b"xy")]).unwrap();
        write(1, 0);
        assert_eq!((store.is_watched(), store.watch(7), store.watch(7)), (false, None, Some(0)));
        assert!(store.watched(7, 0, 0, 9).is_none() && store.watched(7, 2, 0, 9).is_none());
        write(2, 5);
        write(1, G - 1);
        write(1, 7 * G);
        assert_eq!(ranges(&store, 1), [(1, 0..2 * G), (1, 7 * G..8 * G), (2, 0..G)]);
        let part = store.watched(7, 1, 1, 1).unwrap();
        assert!(part.has_more && part.ranges == [(1, 7 * G..8 * G)]);
        store.truncate(1, G + 5).unwrap();
        write(1, 3 * G);
        store.unlink(2).unwrap();
        assert_eq!(ranges(&store, 1).len(), 3, "the batch is the same");
        assert_eq!(ranges(&store, 2), [(1, G + 5..u64::MAX), (2, 0..u64::MAX)]);
        store.punch(1, 10..20).unwrap();
        store.punch(1, 10..i64::MAX as u64).unwrap();
        store.allocate(3, 0..9 * G, false).unwrap();
        store.set_aside(1).unwrap();
        assert_eq!(ranges(&store, 3), [(1, 0..u64::MAX), (3, 8 * G..9 * G)]);
        assert_eq!(ranges(&store, 4), []);
        assert_eq!((store.watch(8), store.watched(7, 5, 0, 9)), (None, None), "another watch ends it");
        store.end_watch(8);
        write(4, 0);
        assert!(!store.is_watched() && store.watched(8, 1, 0, 9).is_none());
    }

    #[test]
    fn too_many_changes_are_all() {
        let store = store();
        store.watch(7);
        store.note_change(1, 0..GRAIN_BYTES * (WATCHED_MAX as u64 - 10));
        assert!(!store.watched(7, 1, 0, 1).unwrap().is_all);
        store.note_change(1, 0..GRAIN_BYTES * WATCHED_MAX as u64);
        store.note_change(2, 0..5);
        let batch = store.watched(7, 2, 0, 1).unwrap();
        assert!(batch.is_all && batch.ranges.is_empty());
        assert!(store.watched(7, 3, 0, 1).unwrap().is_all, "it stays so");
    }
}
