//! An ordered set of small keys: sorted chunks behind one sorted directory.
//!
//! A queue may hold one request or a hundred thousand. Chunks of up to 256 keys keep both cheap: a few
//! keys cost a few dozen bytes and the first none, a full set about 1.4 × its keys, and an insertion moves one chunk's
//! tail (a few kilobytes at most). A B-tree of the standard library costs a third more memory, and two
//! hundred bytes for its first key.

/// Keys per chunk at most.
const CHUNK: usize = 256;

/// An ordered set.
#[derive(Clone, Debug)]
pub struct SortedSet<K> {
    keys: Keys<K>,
}

#[derive(Clone, Debug)]
enum Keys<K> {
    /// Most sets never hold more; nothing is allocated for it.
    Few(Option<K>),
    /// None empty; all keys of a chunk below those of the next.
    Many(Vec<Vec<K>>),
}

impl<K> Default for SortedSet<K> {
    fn default() -> Self {
        SortedSet { keys: Keys::Few(None) }
    }
}

impl<K: Ord + Copy> SortedSet<K> {
    /// True when it holds nothing.
    pub fn is_empty(&self) -> bool {
        match &self.keys {
            Keys::Few(one) => one.is_none(),
            Keys::Many(chunks) => chunks.is_empty(),
        }
    }

    /// Adds a key; false when it was there.
    pub fn insert(&mut self, key: K) -> bool {
        match &mut self.keys {
            Keys::Few(None) => {
                self.keys = Keys::Few(Some(key));
                true
            }
            Keys::Few(Some(one)) if *one == key => false,
            Keys::Few(Some(one)) => {
                let (low, high) = if *one < key { (*one, key) } else { (key, *one) };
                self.keys = Keys::Many(vec![vec![low, high]]);
                true
            }
            Keys::Many(chunks) => insert(chunks, key),
        }
    }

    /// Removes a key; false when it was not there.
    pub fn remove(&mut self, key: &K) -> bool {
        match &mut self.keys {
            Keys::Few(one) => one.take_if(|one| one == key).is_some(),
            Keys::Many(chunks) => remove(chunks, key),
        }
    }

    /// The least key.
    pub fn first(&self) -> Option<K> {
        match &self.keys {
            Keys::Few(one) => *one,
            Keys::Many(chunks) => chunks.first().map(|c| c[0]),
        }
    }

    /// The least key that is not below `key`.
    pub fn at_or_after(&self, key: &K) -> Option<K> {
        let chunks = match &self.keys {
            Keys::Few(one) => return one.filter(|one| one >= key),
            Keys::Many(chunks) => chunks,
        };
        let c = chunk_for(chunks, key);
        let chunk = chunks.get(c)?;
        let at = chunk.partition_point(|k| k < key);
        chunk.get(at).or_else(|| chunks.get(c + 1).and_then(|next| next.first())).copied()
    }

    /// The greatest key below `key`.
    pub fn before(&self, key: &K) -> Option<K> {
        let chunks = match &self.keys {
            Keys::Few(one) => return one.filter(|one| one < key),
            Keys::Many(chunks) => chunks,
        };
        let c = chunk_for(chunks, key);
        let chunk = chunks.get(c)?;
        match chunk.partition_point(|k| k < key) {
            0 => chunks.get(c.checked_sub(1)?)?.last().copied(),
            at => chunk.get(at - 1).copied(),
        }
    }
}

fn insert<K: Ord + Copy>(chunks: &mut Vec<Vec<K>>, key: K) -> bool {
    let c = chunk_for(chunks, &key);
    let last = c + 1 == chunks.len();
    let Some(chunk) = chunks.get_mut(c) else {
        chunks.push(vec![key]);
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
    chunks.insert(c + 1, upper);
    true
}

fn remove<K: Ord + Copy>(chunks: &mut Vec<Vec<K>>, key: &K) -> bool {
    let c = chunk_for(chunks, key);
    let Some(chunk) = chunks.get_mut(c) else { return false };
    let Ok(at) = chunk.binary_search(key) else { return false };
    chunk.remove(at);
    if chunk.is_empty() {
        chunks.remove(c);
    } else if chunk.len() < CHUNK / 4 {
        merge_with_neighbour(chunks, c);
    }
    true
}

/// The chunk that holds `key`, or would: the last whose first key is not above it.
fn chunk_for<K: Ord>(chunks: &[Vec<K>], key: &K) -> usize {
    match chunks {
        [] | [_] => 0,
        chunks => chunks.partition_point(|c| c[0] <= *key).saturating_sub(1),
    }
}

fn merge_with_neighbour<K: Copy>(chunks: &mut Vec<Vec<K>>, c: usize) {
    let fits = |a: &Vec<K>, b: &Vec<K>| a.len() + b.len() <= CHUNK / 2;
    let left = if c + 1 < chunks.len() && fits(&chunks[c], &chunks[c + 1]) {
        c
    } else if c > 0 && fits(&chunks[c - 1], &chunks[c]) {
        c - 1
    } else {
        return;
    };
    let right = chunks.remove(left + 1);
    chunks[left].extend_from_slice(&right);
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
