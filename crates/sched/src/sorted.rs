//! An ordered set of small keys: sorted chunks behind one sorted directory.
//!
//! A queue may hold one request or a hundred thousand. Chunks of up to 64 keys keep both cheap: up to one chunk needs
//! no directory, a few keys cost a few dozen bytes and the first none, a full set about 1.3 × its keys, and an
//! insertion moves one chunk's tail (at most a kilobyte). The directory holds each chunk's first key, so a search
//! touches only the directory and one chunk. The standard library's B-tree uses a third more memory, and two hundred
//! bytes for its first key.

use smallvec::SmallVec;

/// Maximum keys per chunk.
const CHUNK: usize = 64;

/// Keys for which an empty set keeps memory when it gives the rest back.
const KEPT: usize = 8;

/// An ordered set.
#[derive(Clone, Debug)]
pub struct SortedSet<K> {
    keys: Keys<K>,
}

#[derive(Clone, Debug)]
enum Keys<K> {
    /// Most sets never hold more than one key, which needs no allocation.
    Few(SmallVec<[K; 1]>),
    /// No chunk is empty; all keys of a chunk are below those of the next.
    Many(Vec<Chunk<K>>),
}

#[derive(Clone, Debug)]
struct Chunk<K> {
    /// The first live key.
    first: K,
    /// Keys in order, behind the `gone` ones.
    keys: Vec<K>,
    /// Removed keys at the start, fewer than all. Most keys leave at the start, so the others need not move each time.
    gone: usize,
}

impl<K> Default for SortedSet<K> {
    fn default() -> Self {
        SortedSet { keys: Keys::Few(SmallVec::new()) }
    }
}

impl<K: Ord + Copy> SortedSet<K> {
    /// True when it holds nothing.
    pub fn is_empty(&self) -> bool {
        match &self.keys {
            Keys::Few(few) => few.is_empty(),
            Keys::Many(chunks) => chunks.is_empty(),
        }
    }

    /// Number of keys, summed over chunks.
    pub fn len(&self) -> usize {
        match &self.keys {
            Keys::Few(few) => few.len(),
            Keys::Many(chunks) => chunks.iter().map(|c| c.live().len()).sum(),
        }
    }

    /// Adds a key; false if it was present.
    pub fn insert(&mut self, key: K) -> bool {
        match &mut self.keys {
            Keys::Few(few) => {
                let Err(at) = few.binary_search(&key) else { return false };
                if few.len() < CHUNK {
                    if few.len() == few.capacity() {
                        few.reserve_exact(room(few.len()));
                    }
                    few.insert(at, key);
                    return true;
                }
                let keys = std::mem::take(few).into_vec();
                let mut chunks = vec![Chunk { first: keys[0], keys, gone: 0 }];
                insert(&mut chunks, key);
                self.keys = Keys::Many(chunks);
                true
            }
            Keys::Many(chunks) => insert(chunks, key),
        }
    }

    /// Removes a key; false if it was absent.
    pub fn remove(&mut self, key: &K) -> bool {
        match &mut self.keys {
            Keys::Few(few) => {
                let Some(at) = place(few, key) else { return false };
                if at + 1 == few.len() {
                    few.pop(); // most sets have one key
                } else {
                    few.remove(at);
                }
                true
            }
            Keys::Many(chunks) => {
                let removed = remove(chunks, key);
                if chunks.len() == 1 && chunks[0].live().len() <= CHUNK / 4 {
                    chunks[0].close_up();
                    let mut keys = std::mem::take(&mut chunks[0].keys);
                    keys.shrink_to(CHUNK / 2);
                    self.keys = Keys::Few(keys.into());
                }
                removed
            }
        }
    }

    /// Frees the memory of an empty set, except that for a few keys.
    pub fn give_back(&mut self) {
        match &mut self.keys {
            Keys::Few(few) if few.is_empty() && few.capacity() > KEPT => few.grow(KEPT),
            Keys::Few(_) | Keys::Many(_) => {}
        }
    }

    /// Replaces one key with another; `None` is absent.
    #[inline]
    pub fn replace(&mut self, old: Option<K>, new: Option<K>) {
        match (old, new) {
            (Some(old), Some(new)) => self.shift(old, new),
            (Some(old), None) => drop(self.remove(&old)),
            (None, Some(new)) => drop(self.insert(new)),
            (None, None) => {}
        }
    }

    /// The same of two keys. In a small set only the keys between them move.
    fn shift(&mut self, old: K, new: K) {
        if old == new {
            return;
        }
        if let Keys::Few(few) = &mut self.keys
            && let Some(from) = place(few, &old)
        {
            let few = few.as_mut_slice();
            if few.len() == 1 {
                few[0] = new;
                return;
            }
            let to = if new > old {
                from + before_end(&few[from + 1..], &new)
            } else {
                few[..from].partition_point(|k| *k < new)
            };
            // A key that is there already stays single.
            let twin = if new > old { to + 1 } else { to };
            if few.get(twin) != Some(&new) {
                if from < to {
                    few.copy_within(from + 1..=to, from);
                } else {
                    few.copy_within(to..from, to + 1);
                }
                few[to] = new;
                return;
            }
        }
        self.remove(&old);
        self.insert(new);
    }

    /// Keys for which there is memory.
    #[cfg(test)]
    pub fn capacity(&self) -> usize {
        match &self.keys {
            Keys::Few(few) => few.capacity(),
            Keys::Many(chunks) => chunks.iter().map(|c| c.keys.capacity()).sum(),
        }
    }

    /// The lowest key.
    pub fn first(&self) -> Option<K> {
        match &self.keys {
            Keys::Few(few) => few.first().copied(),
            Keys::Many(chunks) => chunks.first().map(|c| c.first),
        }
    }

    /// The lowest key not below `key`.
    pub fn at_or_after(&self, key: &K) -> Option<K> {
        self.around(key).1
    }

    /// The greatest key below `key`.
    pub fn before(&self, key: &K) -> Option<K> {
        self.around(key).0
    }

    /// The greatest key below `key`, and the lowest at or above it.
    pub fn around(&self, key: &K) -> (Option<K>, Option<K>) {
        let chunks = match &self.keys {
            Keys::Few(few) => {
                let at = few.partition_point(|k| k < key);
                return (few[..at].last().copied(), few.get(at).copied());
            }
            Keys::Many(chunks) => chunks,
        };
        let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return (None, None) };
        // Most searches are at the ends: streams ascend, and offset order begins at the start.
        if first.first >= *key {
            return (None, Some(first.first));
        }
        if let Some(greatest) = last.keys.last().filter(|greatest| *greatest < key) {
            return (Some(*greatest), None);
        }
        let c = chunk_for(chunks, key);
        let keys = chunks[c].live();
        let at = keys.partition_point(|k| k < key);
        let before = match at.checked_sub(1) {
            Some(before) => keys.get(before).copied(),
            None => c.checked_sub(1).and_then(|c| chunks.get(c)).and_then(|c| c.keys.last()).copied(),
        };
        (before, keys.get(at).copied().or_else(|| chunks.get(c + 1).map(|next| next.first)))
    }
}

/// Where a key of a small set is; most that move or leave are its first.
#[inline]
fn place<K: Ord>(few: &[K], key: &K) -> Option<usize> {
    if few.first() == Some(key) { Some(0) } else { few.binary_search(key).ok() }
}

/// How many of these keys are below `key`; it often goes to an end.
#[inline]
fn before_end<K: Ord>(keys: &[K], key: &K) -> usize {
    match keys {
        [first, ..] if first >= key => 0,
        [.., last] if last < key => keys.len(),
        keys => keys.partition_point(|k| k < key),
    }
}

fn insert<K: Ord + Copy>(chunks: &mut Vec<Chunk<K>>, key: K) -> bool {
    // Orders of arrival grow at their end.
    if let Some(last) = chunks.last_mut()
        && last.live().len() < CHUNK
        && last.keys.last().is_some_and(|k| *k < key)
    {
        last.add(last.live().len(), key);
        return true;
    }
    let c = chunk_for(chunks, &key);
    let last = c + 1 == chunks.len();
    let Some(chunk) = chunks.get_mut(c) else {
        chunks.push(Chunk::new(key));
        return true;
    };
    let Err(at) = chunk.live().binary_search(&key) else { return false };
    if chunk.live().len() < CHUNK {
        chunk.add(at, key);
        return true;
    }
    // Full. Appending in order fills chunks completely; elsewhere halves leave room on both sides.
    if at == CHUNK && last {
        chunks.push(Chunk::new(key));
        return true;
    }
    chunk.close_up();
    let keys = chunk.keys.split_off(CHUNK / 2);
    chunk.keys.shrink_to(CHUNK * 5 / 8);
    let mut upper = Chunk { first: keys[0], keys, gone: 0 };
    match at.checked_sub(CHUNK / 2) {
        Some(at) if at > 0 => upper.add(at, key),
        _ => chunk.add(at, key),
    }
    chunks.insert(c + 1, upper);
    true
}

impl<K: Copy> Chunk<K> {
    fn new(first: K) -> Chunk<K> {
        let mut keys = Vec::with_capacity(CHUNK / 2);
        keys.push(first);
        Chunk { first, keys, gone: 0 }
    }

    fn live(&self) -> &[K] {
        &self.keys[self.gone..]
    }

    /// Adds a key before the live key `at`.
    fn add(&mut self, at: usize, key: K) {
        if self.keys.len() == self.keys.capacity() {
            match self.gone {
                0 => self.keys.reserve_exact(room(self.keys.len())),
                _ => self.close_up(),
            }
        }
        self.keys.insert(self.gone + at, key);
        self.first = self.live()[0];
    }

    /// Removes the live key `at`; the shorter side moves.
    fn take_out(&mut self, at: usize) {
        let place = self.gone + at;
        if at < self.live().len() / 2 {
            self.keys.copy_within(self.gone..place, self.gone + 1);
            self.gone += 1;
        } else {
            self.keys.remove(place);
        }
    }

    /// Drops the removed keys.
    fn close_up(&mut self) {
        self.keys.drain(..std::mem::take(&mut self.gone));
    }
}

/// The capacity to which a full list of `len` keys, fewer than [`CHUNK`], grows: memory follows the queue closely.
fn room(len: usize) -> usize {
    (len / 2).max(2).min(CHUNK - len)
}

fn remove<K: Ord + Copy>(chunks: &mut Vec<Chunk<K>>, key: &K) -> bool {
    // Orders of arrival shrink at their start.
    let c = if chunks.first().is_some_and(|first| first.first == *key) { 0 } else { chunk_for(chunks, key) };
    let Some(chunk) = chunks.get_mut(c) else { return false };
    let Some(at) = position(chunk.live(), key) else { return false };
    chunk.take_out(at);
    match chunk.live().first().copied() {
        None => {
            chunks.remove(c);
        }
        Some(first) => {
            chunk.first = first;
            let len = chunk.live().len();
            if len < CHUNK / 4 {
                merge_with_neighbour(chunks, c);
            } else if len <= chunk.keys.capacity() / 2 {
                chunk.close_up();
                chunk.keys.shrink_to(len + len / 4);
            }
        }
    }
    true
}

/// Where a key of a chunk is; most that are removed are near the start, and the rest of the chunk need not be cached then.
#[inline]
fn position<K: Ord>(keys: &[K], key: &K) -> Option<usize> {
    let mut to = 1;
    while keys.get(to - 1).is_some_and(|k| k < key) {
        to *= 2;
    }
    let from = to / 2;
    keys[from..to.min(keys.len())].binary_search(key).ok().map(|at| from + at)
}

/// The chunk that holds `key`, or would: the last whose first key is not above it.
fn chunk_for<K: Ord>(chunks: &[Chunk<K>], key: &K) -> usize {
    match chunks {
        [] | [_] => 0,
        chunks => chunks.partition_point(|c| c.first <= *key).saturating_sub(1),
    }
}

fn merge_with_neighbour<K: Copy>(chunks: &mut Vec<Chunk<K>>, c: usize) {
    let fits = |a: &Chunk<K>, b: &Chunk<K>| a.live().len() + b.live().len() <= CHUNK / 2;
    let left = if c + 1 < chunks.len() && fits(&chunks[c], &chunks[c + 1]) {
        c
    } else if c > 0 && fits(&chunks[c - 1], &chunks[c]) {
        c - 1
    } else {
        return;
    };
    let right = chunks.remove(left + 1);
    chunks[left].close_up();
    chunks[left].keys.extend_from_slice(right.live());
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn behaves_as_the_standard_set(ops in proptest::collection::vec((0u8..8, 0u32..900), 0..3000), keys in 1u32..900) {
            let mut ours = SortedSet::default();
            let mut reference = BTreeSet::new();
            for (what, key) in ops {
                let key = key % keys;
                match what {
                    // Whether the one is there, or the other already.
                    6 | 7 => {
                        let old = match what {
                            6 => reference.iter().nth(key as usize % 7).copied(),
                            _ => (key % 3 > 0).then_some(key),
                        };
                        let new = (key % 5 > 0).then_some(key * 7 % keys);
                        ours.replace(old, new);
                        if old != new {
                            old.map(|old| reference.remove(&old));
                            new.map(|new| reference.insert(new));
                        }
                    }
                    0 | 1 => prop_assert_eq!(ours.insert(key), reference.insert(key)),
                    2 => prop_assert_eq!(ours.remove(&key), reference.remove(&key)),
                    // Near the start, as most keys leave.
                    3 | 4 => {
                        if let Some(near) = reference.iter().nth(key as usize % 4).copied() {
                            prop_assert!(ours.remove(&near) && reference.remove(&near));
                        }
                    }
                    _ => {
                        prop_assert_eq!(ours.at_or_after(&key), reference.range(key..).next().copied());
                        prop_assert_eq!(ours.before(&key), reference.range(..key).next_back().copied());
                        prop_assert_eq!(ours.around(&key), (ours.before(&key), ours.at_or_after(&key)));
                    }
                }
                prop_assert_eq!(ours.first(), reference.first().copied());
                prop_assert_eq!(ours.len(), reference.len());
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
