//! Tables of short-lived values: [`Slab`] gives each a unique key, [`Rows`] only a number; [`extend`] is for tables by
//! the numbers of another.

use std::ops::{Index, IndexMut};

use crate::prefetch::fetch;

/// Lengthens a table to at least `len` rows. Like [`Rows`], it grows by an eighth, not double, so that its memory follows
/// its use.
#[cold]
pub fn extend<T>(rows: &mut Vec<T>, len: usize, row: impl FnMut() -> T) {
    if let Some(more) = len.checked_sub(rows.len()) {
        if rows.capacity() < len {
            make_room(rows, more);
        }
        rows.resize_with(len, row);
    }
}

/// Room for `more` rows and some to spare.
#[cold]
fn make_room<T>(rows: &mut Vec<T>, more: usize) {
    const LEAST: usize = 4;
    rows.reserve_exact(more + (rows.len() / 8).max(LEAST));
}

/// The key of a value in a [`Slab`]; stale once the value is removed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    /// Its index, which is reused after removal.
    pub index: u32,
    /// How many values had the index before.
    pub generation: u32,
}

impl Key {
    /// No value.
    pub const NONE: Key = Key { index: u32::MAX, generation: 0 };
}

/// A table by key; its memory is that of the largest number of values at a time.
#[derive(Debug)]
pub struct Slab<T> {
    entries: Vec<(u32, Option<T>)>,
    free: Vec<u32>,
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab { entries: Vec::new(), free: Vec::new() }
    }
}

impl<T> Slab<T> {
    /// Adds a value and returns its key.
    pub fn insert(&mut self, thing: T) -> Key {
        self.insert_with(|_| thing)
    }

    /// Adds a value that contains its own key.
    pub fn insert_with(&mut self, thing: impl FnOnce(Key) -> T) -> Key {
        match self.free.pop() {
            Some(index) => {
                let entry = &mut self.entries[index as usize];
                let key = Key { index, generation: entry.0 };
                entry.1 = Some(thing(key));
                key
            }
            None => {
                let key = Key { index: self.entries.len() as u32, generation: 0 };
                self.entries.push((0, Some(thing(key))));
                key
            }
        }
    }

    /// The value of a key, if present.
    #[inline]
    pub fn get(&self, key: Key) -> Option<&T> {
        let entry = self.entries.get(key.index as usize)?;
        if entry.0 == key.generation { entry.1.as_ref() } else { None }
    }

    /// The same, mutable.
    #[inline]
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let entry = self.entries.get_mut(key.index as usize)?;
        if entry.0 == key.generation { entry.1.as_mut() } else { None }
    }

    /// Removes the value of a key.
    pub fn remove(&mut self, key: Key) -> Option<T> {
        let entry = self.entries.get_mut(key.index as usize)?;
        if entry.0 != key.generation {
            return None;
        }
        let thing = entry.1.take()?;
        entry.0 = entry.0.wrapping_add(1);
        self.free.push(key.index);
        Some(thing)
    }

    /// Prefetches the value of a key.
    #[inline]
    pub fn fetch(&self, key: Key) {
        self.entries.get(key.index as usize).inspect(|entry| fetch(*entry));
    }

    /// The value at an index, whatever its key.
    #[inline]
    pub fn at(&self, index: u32) -> Option<&T> {
        self.entries.get(index as usize)?.1.as_ref()
    }

    /// The same, mutable.
    #[inline]
    pub fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.1.as_mut()
    }

    /// Removes the value at an index.
    pub fn remove_at(&mut self, index: u32) -> Option<T> {
        self.remove(self.key_at(index)?)
    }

    /// The key of the value at an index.
    pub fn key_at(&self, index: u32) -> Option<Key> {
        let (generation, thing) = self.entries.get(index as usize)?;
        thing.as_ref().map(|_| Key { index, generation: *generation })
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// True if there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All values by index.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, (generation, thing))| {
            thing.as_ref().map(|thing| (Key { index: index as u32, generation: *generation }, thing))
        })
    }
}

impl<T> Index<Key> for Slab<T> {
    type Output = T;
    /// # Panics
    /// If the value was removed.
    fn index(&self, key: Key) -> &T {
        self.get(key).expect("a thing that is in the slab")
    }
}

/// Rows by number. A released row keeps its contents until its number is reused; nothing checks that a number is in
/// use.
#[derive(Clone, Debug)]
pub struct Rows<T> {
    rows: Vec<T>,
    free: Vec<u32>,
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Rows { rows: Vec::new(), free: Vec::new() }
    }
}

impl<T> FromIterator<T> for Rows<T> {
    fn from_iter<I: IntoIterator<Item = T>>(rows: I) -> Self {
        Rows { rows: rows.into_iter().collect(), free: Vec::new() }
    }
}

impl<T> Rows<T> {
    /// Adds a row; its number is the last one released, or a new one.
    #[inline]
    pub fn insert(&mut self, row: T) -> u32 {
        self.insert_over(|_| row)
    }

    /// Adds a row that may reuse parts, such as memory, of the released row whose number it gets.
    #[inline]
    pub fn insert_over(&mut self, row: impl FnOnce(Option<&mut T>) -> T) -> u32 {
        match self.free.pop() {
            Some(number) => {
                let old = &mut self.rows[number as usize];
                *old = row(Some(old));
                number
            }
            None => {
                if self.rows.len() == self.rows.capacity() {
                    make_room(&mut self.rows, 1);
                }
                self.rows.push(row(None));
                self.rows.len() as u32 - 1
            }
        }
    }

    /// Releases a number, which must be in use.
    #[inline]
    pub fn release(&mut self, number: u32) {
        self.free.push(number);
    }

    /// The row of a number that was returned at some time.
    #[inline]
    pub fn get(&self, number: u32) -> Option<&T> {
        self.rows.get(number as usize)
    }

    /// The same, mutable.
    #[inline]
    pub fn get_mut(&mut self, number: u32) -> Option<&mut T> {
        self.rows.get_mut(number as usize)
    }

    /// Rows for which there is memory: all numbers ever returned.
    pub fn capacity(&self) -> usize {
        self.rows.len()
    }

    /// All rows by number, including released ones.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.rows.iter()
    }
}

impl<T> Index<u32> for Rows<T> {
    type Output = T;
    #[inline]
    fn index(&self, number: u32) -> &T {
        &self.rows[number as usize]
    }
}

impl<T> IndexMut<u32> for Rows<T> {
    #[inline]
    fn index_mut(&mut self, number: u32) -> &mut T {
        &mut self.rows[number as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_number_is_reused() {
        let mut rows: Rows<char> = ['a', 'b'].into_iter().collect();
        assert_eq!(rows.insert('c'), 2);
        rows.release(0);
        assert_eq!(rows[0], 'a', "a released row stays until its number is given again");
        assert_eq!((rows.insert('d'), rows.capacity()), (0, 3));
        rows[1] = 'e';
        assert_eq!((rows.get(1), rows.get(9)), (Some(&'e'), None));
        assert_eq!(rows.iter().collect::<String>(), "dec");
    }

    #[test]
    fn a_table_is_extended_with_little_to_spare() {
        let mut rows = Vec::new();
        for len in 1..=1000 {
            extend(&mut rows, len, || len);
            assert!(rows.len() == len && rows.capacity() <= len + (len / 8).max(4), "{len}");
        }
        extend(&mut rows, 10, || 0);
        assert_eq!((rows.len(), rows[0], rows[999]), (1000, 1, 1000));
    }

    #[test]
    fn a_value_may_contain_its_key() {
        let mut slab = Slab::default();
        let key = slab.insert_with(|key| key);
        assert_eq!((slab.get(key), slab.at(0), slab[key]), (Some(&key), Some(&key), key));
        assert_eq!(slab.remove_at(0), Some(key));
        assert_eq!(slab.remove_at(0), None);
        assert_ne!(slab.insert_with(|key| key), key);
    }

    #[test]
    fn keys_are_unique() {
        let mut slab = Slab::default();
        let a = slab.insert('a');
        assert_eq!(slab.remove(a), Some('a'));
        let b = slab.insert('b');
        assert_eq!((a.index, slab.get(a), slab.get(b)), (b.index, None, Some(&'b')));
        assert_eq!(slab.remove(a), None);
        assert_eq!(slab.get(Key::NONE), None);
        assert_eq!((slab.len(), slab.iter().count()), (1, 1));
    }
}
