//! Things with short lives under names that are not given twice.

use crate::prefetch::fetch;

/// The name of a thing in a [`Slab`]; stale once the thing is gone.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Key {
    /// Its place; given to another once the thing is gone.
    pub index: u32,
    /// How many had the place before.
    pub generation: u32,
}

impl Key {
    /// Names nothing.
    pub const NONE: Key = Key { index: u32::MAX, generation: 0 };
}

/// A table of such things; its memory is that of the most that were there at a time.
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
    /// Adds a thing; its name.
    pub fn insert(&mut self, thing: T) -> Key {
        match self.free.pop() {
            Some(index) => {
                let entry = &mut self.entries[index as usize];
                entry.1 = Some(thing);
                Key { index, generation: entry.0 }
            }
            None => {
                self.entries.push((0, Some(thing)));
                Key { index: self.entries.len() as u32 - 1, generation: 0 }
            }
        }
    }

    /// The thing of that name, if it is still there.
    #[inline]
    pub fn get(&self, key: Key) -> Option<&T> {
        let entry = self.entries.get(key.index as usize)?;
        if entry.0 == key.generation { entry.1.as_ref() } else { None }
    }

    /// The same, to be changed.
    #[inline]
    pub fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let entry = self.entries.get_mut(key.index as usize)?;
        if entry.0 == key.generation { entry.1.as_mut() } else { None }
    }

    /// Takes the thing of that name out.
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

    /// The thing of that name is needed soon.
    #[inline]
    pub fn fetch(&self, key: Key) {
        self.entries.get(key.index as usize).inspect(|entry| fetch(*entry));
    }

    /// The thing at an index, whatever its name.
    #[inline]
    pub fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.entries.get_mut(index as usize)?.1.as_mut()
    }

    /// The name of the thing at an index.
    pub fn key_at(&self, index: u32) -> Option<Key> {
        let (generation, thing) = self.entries.get(index as usize)?;
        thing.as_ref().map(|_| Key { index, generation: *generation })
    }

    /// Things in it.
    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them by index.
    pub fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, (generation, thing))| {
            thing.as_ref().map(|thing| (Key { index: index as u32, generation: *generation }, thing))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_not_given_twice() {
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
