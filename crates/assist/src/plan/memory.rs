//! The page cache in a replay: which bytes of which files are in memory, and from when on.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

const PAGE: u64 = 4096;

/// Pages of all files, the oldest leave first when they are too many.
pub struct Memory {
    files: Vec<BTreeMap<u64, Piece>>,
    order: VecDeque<(usize, u64, u64)>,
    bytes: u64,
    bytes_max: u64,
}

#[derive(Clone, Copy)]
struct Piece {
    end: u64,
    ready_ns: u64,
    /// Tells it from a later one at the same place.
    number: u64,
    /// Brought in by a hint, and not read since.
    unread_hint: bool,
}

/// The bytes of whole pages around a range.
pub fn pages(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE * PAGE..range.end.saturating_add(PAGE - 1) / PAGE * PAGE
}

impl Memory {
    pub fn new(files: usize, bytes_max: u64) -> Memory {
        Memory {
            files: vec![BTreeMap::new(); files],
            order: VecDeque::new(),
            bytes: 0,
            bytes_max: bytes_max.max(1 << 20),
        }
    }

    /// The parts of a range that are neither there nor on their way.
    pub fn missing(&self, file: usize, range: &Range<u64>) -> Vec<Range<u64>> {
        let mut missing = Vec::new();
        let mut at = range.start;
        for (start, piece) in self.touching(file, range) {
            if start > at {
                missing.push(at..start);
            }
            at = at.max(piece.end);
        }
        if at < range.end {
            missing.push(at..range.end);
        }
        missing
    }

    /// When all of a range is there, as far as it is known; marks it as read.
    pub fn read(&mut self, file: usize, range: &Range<u64>) -> u64 {
        let found: Vec<u64> = self.touching(file, range).map(|(start, _)| start).collect();
        let mut ready = 0;
        for start in found {
            if let Some(piece) = self.files[file].get_mut(&start) {
                ready = ready.max(piece.ready_ns);
                piece.unread_hint = false;
            }
        }
        ready
    }

    fn touching(&self, file: usize, range: &Range<u64>) -> impl Iterator<Item = (u64, &Piece)> {
        let before = self.files[file].range(..range.start).next_back().filter(|(_, p)| p.end > range.start);
        let within = self.files[file].range(range.start..range.end);
        before.into_iter().chain(within).map(|(start, piece)| (*start, piece))
    }

    /// A missing range is there from `ready_ns` on. Returns hinted bytes that had to leave unread.
    pub fn insert(&mut self, file: usize, range: Range<u64>, ready_ns: u64, hint: bool, number: u64) -> u64 {
        self.bytes += range.end - range.start;
        self.order.push_back((file, range.start, number));
        self.files[file].insert(range.start, Piece { end: range.end, ready_ns, number, unread_hint: hint });
        let mut wasted = 0;
        while self.bytes > self.bytes_max {
            let Some((file, start, number)) = self.order.pop_front() else { break };
            if self.files[file].get(&start).is_some_and(|p| p.number == number)
                && let Some(piece) = self.files[file].remove(&start)
            {
                self.bytes -= piece.end - start;
                wasted += if piece.unread_hint { piece.end - start } else { 0 };
            }
        }
        wasted
    }

    /// A range is released. Returns hinted bytes that leave unread.
    pub fn remove(&mut self, file: usize, range: &Range<u64>) -> u64 {
        let found: Vec<(u64, Piece)> = self.touching(file, range).map(|(start, piece)| (start, *piece)).collect();
        let mut wasted = 0;
        for (start, piece) in found {
            self.files[file].remove(&start);
            let gone = start.max(range.start)..piece.end.min(range.end);
            self.bytes -= gone.end - gone.start;
            wasted += if piece.unread_hint { gone.end - gone.start } else { 0 };
            // What is left of it on both sides stays under the old number, so that it leaves in its turn.
            for rest in [start..gone.start, gone.end..piece.end] {
                if rest.start < rest.end {
                    self.files[file].insert(rest.start, Piece { end: rest.end, ..piece });
                    self.order.push_back((file, rest.start, piece.number));
                }
            }
        }
        wasted
    }

    /// Hinted bytes that nobody read.
    pub fn unread(&self) -> u64 {
        let unread = |(start, p): (&u64, &Piece)| if p.unread_hint { p.end - start } else { 0 };
        self.files.iter().flat_map(BTreeMap::iter).map(unread).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Page by page, against a plain table.
        #[test]
        fn as_a_table_of_pages(steps in prop::collection::vec((0u64..40, 1u64..12, any::<bool>()), 1..60)) {
            let mut memory = Memory::new(1, 1 << 30);
            let mut table = [false; 64];
            for (number, (at, len, insert)) in steps.into_iter().enumerate() {
                let range = at * PAGE..(at + len) * PAGE;
                let missing = memory.missing(0, &range);
                let gaps: Vec<u64> = missing.iter().flat_map(|r| r.start / PAGE..r.end / PAGE).collect();
                let wanted: Vec<u64> = (at..at + len).filter(|p| !table[*p as usize]).collect();
                prop_assert_eq!(gaps, wanted);
                if insert {
                    for gap in missing {
                        memory.insert(0, gap, 7, false, number as u64);
                    }
                    prop_assert_eq!(memory.read(0, &range), 7);
                } else {
                    memory.remove(0, &range);
                }
                (at..at + len).for_each(|p| table[p as usize] = insert);
                prop_assert_eq!(memory.bytes, table.iter().filter(|p| **p).count() as u64 * PAGE);
            }
        }
    }

    #[test]
    fn the_oldest_leave_and_unread_hints_are_counted() {
        let mut memory = Memory::new(2, 1 << 20);
        assert_eq!(memory.insert(0, 0..1 << 20, 1, true, 1), 0);
        assert_eq!(memory.unread(), 1 << 20);
        assert_eq!(memory.insert(1, 0..4096, 1, false, 2), 1 << 20, "it left unread");
        assert_eq!(memory.missing(0, &(0..8192)).first(), Some(&(0..8192)));
        memory.insert(1, 8192..16384, 1, true, 3);
        memory.read(1, &(8192..8193));
        assert_eq!(memory.remove(1, &(0..1 << 20)), 0);
        assert_eq!(pages(&(1..4097)), 0..8192);
    }
}
