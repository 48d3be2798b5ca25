//! The history of files and streams between requests, bounded in memory and in work.

use std::collections::VecDeque;
use std::hash::Hash;

use rustc_hash::FxHashMap;

/// Maximum recently used entries that one eviction skips.
const SPARED_MAX: usize = 8;

/// A map with a maximum size. A new entry replaces the oldest that was not recently used (second chance, as in page
/// replacement); every operation visits only a few.
pub(in crate::policy) struct Remembered<K, V> {
    limit: usize,
    entries: FxHashMap<K, Entry<V>>,
    order: VecDeque<K>,
}

struct Entry<V> {
    value: V,
    used: bool,
}

impl<K: Copy + Eq + Hash, V> Remembered<K, V> {
    /// An empty map for `limit` entries, at least 1.
    pub fn new(limit: usize) -> Remembered<K, V> {
        Remembered { limit: limit.max(1), entries: FxHashMap::default(), order: VecDeque::new() }
    }

    /// The entry of a key.
    pub fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|e| &e.value)
    }

    /// The entry of a key, mutable; counts as a use.
    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        entry.used = true;
        Some(&mut entry.value)
    }

    /// The entry of a key, created by `first` if missing.
    pub fn of(&mut self, key: K, first: impl FnOnce() -> V) -> &mut V {
        if !self.entries.contains_key(&key) {
            if self.entries.len() >= self.limit {
                self.evict();
            }
            self.order.push_back(key);
        }
        let entry = self.entries.entry(key).or_insert_with(|| Entry { value: first(), used: false });
        entry.used = true;
        &mut entry.value
    }

    /// Changes every entry.
    pub fn for_each(&mut self, mut change: impl FnMut(&mut V)) {
        self.entries.values_mut().for_each(|e| change(&mut e.value));
    }

    fn evict(&mut self) {
        for _ in 0..SPARED_MAX {
            let Some(key) = self.order.pop_front() else { return };
            match self.entries.get_mut(&key) {
                Some(entry) if entry.used => {
                    entry.used = false;
                    self.order.push_back(key);
                }
                _ => {
                    self.entries.remove(&key);
                    return;
                }
            }
        }
        if let Some(key) = self.order.pop_front() {
            self.entries.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_unused_entry_goes() {
        let mut all = Remembered::new(3);
        (0..3).for_each(|key| *all.of(key, || 0) = key);
        all.of(3, || 3); // all were used: each is skipped once, then 0 goes
        assert_eq!((0..4).map(|k| all.get(&k).copied()).collect::<Vec<_>>(), [None, Some(1), Some(2), Some(3)]);
        all.get_mut(&1);
        all.of(4, || 4);
        assert_eq!((1..5).map(|k| all.get(&k).copied()).collect::<Vec<_>>(), [Some(1), None, Some(3), Some(4)]);
    }

    #[test]
    fn memory_and_work_are_bounded_though_everything_is_in_use() {
        let mut all = Remembered::new(100);
        for key in 0..10_000 {
            all.of(key, || key);
            all.get_mut(&key);
            assert!(all.entries.len() <= 100 && all.order.len() == all.entries.len());
        }
    }
}
