//! The calendar of future events, ordered by time and then by order of insertion.
//!
//! A monotone queue similar to hierarchical timing wheels (G. Varghese and T. Lauck, *Hashed and hierarchical timing
//! wheels*, SOSP 1987) and radix heaps: an entry is stored at the level of the highest byte in which its time differs
//! from a reference that never passes it, in the slot of that byte's value. Equal times always share a slot, so their
//! order survives without a sequence number. A slot with few entries is not divided further but sorted into a short
//! *run*, from which entries leave. An entry costs a few sequential moves however many are pending, where a binary heap
//! of a million costs twenty cache misses.

/// Bits of a level's digit.
const DIGIT_BITS: u32 = 8;
/// Slots of a level.
const SLOTS: usize = 1 << DIGIT_BITS;
/// Levels: eight digits make a time.
const LEVELS: usize = 64 / DIGIT_BITS as usize;
/// A slot with at most this many entries becomes a run.
const RUN_SHORT: usize = 48;
/// A run of this length returns its later part to the slots.
const RUN_LONG: usize = 256;

/// Entries of `T` by time.
pub(crate) struct Calendar<T> {
    /// The reference: every pending entry outside the run is at or after it.
    reference: u64,
    /// Latest first; holds everything before `run_end`.
    run: Vec<(u64, T)>,
    run_end: u64,
    slots: Vec<Vec<(u64, T)>>,
    occupied: [[u64; SLOTS / 64]; LEVELS],
    scratch: Vec<(u64, T)>,
    len: usize,
}

impl<T: Copy> Calendar<T> {
    pub(crate) fn new() -> Calendar<T> {
        Calendar {
            reference: 0,
            run: Vec::with_capacity(RUN_LONG + 1),
            run_end: 0,
            slots: (0..LEVELS * SLOTS).map(|_| Vec::new()).collect(),
            occupied: [[0; SLOTS / 64]; LEVELS],
            scratch: Vec::new(),
            len: 0,
        }
    }

    /// Entries pending.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Inserts an entry, not before the last one removed.
    #[inline]
    pub(crate) fn push(&mut self, at: u64, what: T) {
        self.len += 1;
        if at < self.run_end {
            let place = self.run.partition_point(|e| e.0 > at);
            self.run.insert(place, (at, what));
            if self.run.len() > RUN_LONG {
                self.shorten();
            }
        } else {
            self.file(at, what);
        }
    }

    /// Removes the earliest entry.
    #[inline]
    pub(crate) fn pop(&mut self) -> Option<(u64, T)> {
        if self.run.is_empty() && !self.refill() {
            return None;
        }
        self.len -= 1;
        self.run.pop()
    }

    /// When the next entry is due.
    pub(crate) fn peek(&mut self) -> Option<u64> {
        if self.run.is_empty() && !self.refill() {
            return None;
        }
        self.run.last().map(|e| e.0)
    }

    #[inline]
    fn file(&mut self, at: u64, what: T) {
        let differs = at ^ self.reference;
        let level = if differs == 0 { 0 } else { ((63 - differs.leading_zeros()) / DIGIT_BITS) as usize };
        let digit = (at >> (level as u32 * DIGIT_BITS)) as usize & (SLOTS - 1);
        self.slots[level * SLOTS + digit].push((at, what));
        self.occupied[level][digit / 64] |= 1 << (digit % 64);
    }

    /// Makes a run of the earliest entries; false if there are none.
    fn refill(&mut self) -> bool {
        loop {
            let first = |words: &[u64; SLOTS / 64]| {
                words.iter().position(|w| *w != 0).map(|w| w * 64 + words[w].trailing_zeros() as usize)
            };
            let Some((level, digit)) =
                self.occupied.iter().enumerate().find_map(|(level, words)| first(words).map(|digit| (level, digit)))
            else {
                return false;
            };
            self.occupied[level][digit / 64] &= !(1 << (digit % 64));
            let shift = level as u32 * DIGIT_BITS;
            let above = self.reference.checked_shr(shift + DIGIT_BITS).unwrap_or(0);
            let base = (above.checked_shl(DIGIT_BITS).unwrap_or(0) | digit as u64) << shift;
            self.reference = base;
            let slot = level * SLOTS + digit;
            if level == 0 || self.slots[slot].len() <= RUN_SHORT {
                self.run.append(&mut self.slots[slot]);
                self.run.sort_by_key(|e| e.0);
                self.run.reverse();
                self.run_end = base.saturating_add(1 << shift);
                return true;
            }
            let mut entries = std::mem::replace(&mut self.slots[slot], std::mem::take(&mut self.scratch));
            for (at, what) in entries.drain(..) {
                self.file(at, what);
            }
            self.scratch = entries;
        }
    }

    /// Returns the later entries of a long run to the slots.
    fn shorten(&mut self) {
        let soon = self.run[self.run.len() - RUN_SHORT].0;
        let kept = self.run.partition_point(|e| e.0 >= soon);
        if kept == self.run.len() {
            return; // all early entries are due at one instant
        }
        self.run_end = soon;
        // Earliest first, so that equal times keep their order.
        let mut later: Vec<(u64, T)> = self.run.drain(..kept).collect();
        while let Some((at, what)) = later.pop() {
            self.file(at, what);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn one_instant_keeps_the_order_of_entry() {
        let mut c = Calendar::new();
        (0..1000u32).for_each(|i| c.push(70_000, i));
        c.push(5, 9999);
        assert_eq!(c.pop(), Some((5, 9999)));
        (1000..2000u32).for_each(|i| c.push(70_000, i));
        for i in 0..2000 {
            assert_eq!(c.pop(), Some((70_000, i)));
        }
        assert_eq!(c.pop(), None);
        assert_eq!(c.len(), 0);
    }

    proptest! {
        /// Against a map by (time, order of entry), with steps of all magnitudes.
        #[test]
        fn entries_leave_in_order(steps in prop::collection::vec((0u32..4, 0u32..40, any::<u64>()), 1..3000)) {
            let mut c = Calendar::new();
            let mut reference = BTreeMap::new();
            let (mut now, mut order) = (0u64, 0u64);
            for (what, bits, random) in steps {
                if what == 0 {
                    let popped = c.pop();
                    let expected = reference.pop_first().map(|((at, _), v): ((u64, u64), u64)| (at, v));
                    prop_assert_eq!(popped, expected);
                    now = popped.map_or(now, |p| p.0);
                } else {
                    let at = now + (random & ((1 << bits) - 1));
                    c.push(at, order);
                    reference.insert((at, order), order);
                    order += 1;
                }
                prop_assert_eq!(c.len(), reference.len());
            }
            prop_assert_eq!(c.peek(), reference.keys().next().map(|k| k.0));
            while let Some((at, v)) = c.pop() {
                prop_assert_eq!(Some(((at, v), v)), reference.pop_first());
            }
            prop_assert!(reference.is_empty());
        }
    }
}
