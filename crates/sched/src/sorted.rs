//! An ordered set of small keys: sorted chunks behind one sorted directory.
//!
//! A queue may hold one request or a hundred thousand. Chunks of up to 256 keys keep both cheap: a few
//! keys cost a few dozen bytes, a full set about 1.4 × its keys, and an insertion moves one chunk's
//! tail (a few kilobytes at most). A B-tree of the standard library costs a third more memory, and two
//! hundred bytes for its first key.

/// Keys per chunk at most.
const CHUNK: usize = 256;

/// An ordered set.
#[derive(Clone, Debug)]
pub struct SortedSet<K> {
    /// None empty; all keys of a chunk below those of the next.
    chunks: Vec<Vec<K>>,
}

impl<K> Default for SortedSet<K> {
    fn default() -> Self {
        SortedSet { chunks: Vec::new() }
    }
}

impl<K: Ord + Copy> SortedSet<K> {
    /// True when it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Adds a key; false when it was there.
    pub fn insert(&mut self, key: K) -> bool {
        let c = self.chunk_for(&key);
        let last = c + 1 == self.chunks.len();
        let Some(chunk) = self.chunks.get_mut(c) else {
            self.chunks.push(vec![key]);
            return true;
        };
        let Err(at) = chunk.binary_search(&key) else { return false };
        if chunk.len() < CHUNK {
            if chunk.len() == chunk.capacity() {
                chunk.reserve_exact((chunk.len() / 8).max(2).min(CHUNK - chunk.len()));
            }
            chunk.insert(at, key);
            return true;
        }
        // Full. Appending in order fills chunks to the brim; elsewhere halves leave room on both sides.
        let at_end = at == CHUNK && last;
        let mut upper = if at_end { Vec::new() } else { chunk.split_off(CHUNK / 2) };
        let (part, at) = if at_end || at > CHUNK / 2 { (&mut upper, at - chunk.len()) } else { (&mut *chunk, at) };
        part.insert(at, key);
        chunk.shrink_to(chunk.len() + CHUNK / 8);
        self.chunks.insert(c + 1, upper);
        true
    }

    /// Removes a key; false when it was not there.
    pub fn remove(&mut self, key: &K) -> bool {
        let c = self.chunk_for(key);
        let Some(chunk) = self.chunks.get_mut(c) else { return false };
        let Ok(at) = chunk.binary_search(key) else { return false };
        chunk.remove(at);
        if chunk.is_empty() {
            self.chunks.remove(c);
        } else if chunk.len() < CHUNK / 4 {
            self.merge_with_neighbour(c);
        }
        true
    }

    /// The least key.
    pub fn first(&self) -> Option<K> {
        self.chunks.first().map(|c| c[0])
    }

    /// The least key that is not below `key`.
    pub fn at_or_after(&self, key: &K) -> Option<K> {
        let c = self.chunk_for(key);
        let chunk = self.chunks.get(c)?;
        let at = chunk.partition_point(|k| k < key);
        chunk.get(at).or_else(|| self.chunks.get(c + 1).and_then(|next| next.first())).copied()
    }

    /// The greatest key below `key`.
    pub fn before(&self, key: &K) -> Option<K> {
        let c = self.chunk_for(key);
        let chunk = self.chunks.get(c)?;
        match chunk.partition_point(|k| k < key) {
            0 => self.chunks.get(c.checked_sub(1)?)?.last().copied(),
            at => chunk.get(at - 1).copied(),
        }
    }

    /// The chunk that holds `key`, or would: the last whose first key is not above it.
    fn chunk_for(&self, key: &K) -> usize {
        match self.chunks.as_slice() {
            [] | [_] => 0,
            chunks => chunks.partition_point(|c| c[0] <= *key).saturating_sub(1),
        }
    }

    fn merge_with_neighbour(&mut self, c: usize) {
        let fits = |a: &Vec<K>, b: &Vec<K>| a.len() + b.len() <= CHUNK / 2;
        let left = if c + 1 < self.chunks.len() && fits(&self.chunks[c], &self.chunks[c + 1]) {
            c
        } else if c > 0 && fits(&self.chunks[c - 1], &self.chunks[c]) {
            c - 1
        } else {
            return;
        };
        let right = self.chunks.remove(left + 1);
        self.chunks[left].extend_from_slice(&right);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_as_the_standard_set(ops in proptest::collection::vec((0u8..4, 0u32..900), 0..3000)) {
            let mut ours = SortedSet::default();
            let mut reference = BTreeSet::new();
            for (what, key) in ops {
                match what {
                    0 | 1 => prop_assert_eq!(ours.insert(key), reference.insert(key)),
                    2 => prop_assert_eq!(ours.remove(&key), reference.remove(&key)),
                    _ => {
                        prop_assert_eq!(ours.at_or_after(&key), reference.range(key..).next().copied());
                        prop_assert_eq!(ours.before(&key), reference.range(..key).next_back().copied());
                    }
                }
                prop_assert_eq!(ours.first(), reference.first().copied());
                prop_assert_eq!(ours.is_empty(), reference.is_empty());
            }
        }
    }

    #[test]
    fn ascending_and_descending_fills_drain_clean() {
        for descending in [false, true] {
            let mut set = SortedSet::default();
            for i in 0..10_000u32 {
                assert!(set.insert(if descending { 10_000 - i } else { i }));
            }
            while let Some(k) = set.first() {
                assert!(set.remove(&k));
            }
            assert!(set.is_empty());
        }
    }
}
