//! A map that forgets what was not used for long: it has a young and an old generation.

use std::hash::Hash;

use rustc_hash::FxHashMap;

/// A map of the last `young_max` entries that were used, at least; with older ones there are at most twice as many, and one.
#[derive(Clone, Debug)]
pub struct Generations<K, V> {
    young: FxHashMap<K, V>,
    old: FxHashMap<K, V>,
    young_max: usize,
}

impl<K: Copy + Eq + Hash, V> Generations<K, V> {
    /// An empty map.
    pub fn new(young_max: usize) -> Generations<K, V> {
        Generations { young: FxHashMap::default(), old: FxHashMap::default(), young_max }
    }

    /// An entry, which is young again.
    pub fn get(&mut self, key: &K) -> Option<&V> {
        if let Some(value) = self.old.remove(key) {
            self.put(*key, value);
        }
        self.young.get(key).or_else(|| self.old.get(key))
    }

    /// Takes an entry out.
    pub fn take(&mut self, key: &K) -> Option<V> {
        let old = self.old.remove(key);
        self.young.remove(key).or(old)
    }

    /// Makes or replaces an entry.
    pub fn put(&mut self, key: K, value: V) {
        self.old.remove(&key);
        self.young.insert(key, value);
        if self.young.len() > self.young_max {
            self.old = std::mem::take(&mut self.young);
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_stays_and_the_rest_is_bounded() {
        let mut map = Generations::new(10);
        map.put(1000, 7);
        for key in 0..100 {
            map.put(key, key);
            assert_eq!(map.get(&1000), Some(&7), "at {key}");
            // Of the last ten that were used, as three of a round are.
            assert_eq!(map.get(&(key - 3).max(0)), Some(&(key - 3).max(0)));
            assert!(map.len() <= 21, "{}", map.len());
        }
        assert_eq!((map.take(&0), map.take(&99), map.take(&99)), (None, Some(99), None));
        map.put(1000, 8);
        assert_eq!((map.take(&1000), map.take(&1000)), (Some(8), None));
    }
}
