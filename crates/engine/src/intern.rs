//! Interns stable keys (files, clients, jobs, users) as small numbers while requests refer to them.

use impresario_base::slab::Rows;
use rustc_hash::FxHashMap;

/// Reference-counted; a key without references is dropped, so memory follows what is outstanding.
#[derive(Default)]
pub(crate) struct Interner {
    numbers: FxHashMap<u64, u32>,
    entries: Rows<(u64, u32)>,
    /// The last number returned: a client, job or user often sends several requests in a row.
    last: u32,
}

impl Interner {
    /// The number of a key, with another reference.
    pub fn take(&mut self, key: u64) -> u32 {
        let Interner { numbers, entries, last } = self;
        if let Some(entry) = entries.get_mut(*last)
            && entry.0 == key
            && entry.1 > 0
        {
            entry.1 += 1;
            return *last;
        }
        let n = *numbers.entry(key).or_insert_with(|| entries.insert((key, 0)));
        entries[n].1 += 1;
        *last = n;
        n
    }

    /// Adds a reference to a number in use.
    pub fn again(&mut self, n: u32) {
        if let Some(entry) = self.entries.get_mut(n) {
            entry.1 += 1;
        }
    }

    /// Drops a reference.
    pub fn release(&mut self, n: u32) {
        let Some(entry) = self.entries.get_mut(n) else { return };
        entry.1 = entry.1.saturating_sub(1);
        if entry.1 == 0 && self.numbers.remove(&entry.0).is_some() {
            self.entries.release(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_last_as_long_as_their_references() {
        let mut i = Interner::default();
        let (a, b) = (i.take(7), i.take(8));
        assert_ne!(a, b);
        assert_eq!(i.take(7), a);
        i.release(a);
        assert_eq!(i.take(7), a, "one reference is left");
        i.release(a);
        i.release(a);
        assert_eq!(i.take(9), a, "the number is reused");
        assert_eq!(i.entries.capacity(), 2);
    }
}
