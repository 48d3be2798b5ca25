//! An entry's regions as one map from bytes to what is said of them, with overlaps decided.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::cache::{Geometry, Plan};
use crate::config::{Entry, Movement, ReadAhead, Region};

#[derive(Clone, PartialEq, Eq, Debug)]
struct Segment {
    bytes: Range<u64>,
    read_ahead: ReadAhead,
    movement: Movement,
    once: bool,
}

impl Segment {
    fn moves(&self) -> bool {
        self.once || self.movement != Movement::None
    }
}

/// What an entry says of each byte of a file.
#[derive(Clone, Debug, Default)]
pub struct RegionMap {
    /// In order, disjoint; bytes in none of them are as by default.
    segments: Vec<Segment>,
    has_once: bool,
    has_modes: bool,
}

/// What a boundary starts or ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Side {
    /// Wins over those below it among equally short regions.
    Random,
    Sequential,
    Normal,
    DontNeed,
    WillNeed,
    NoReuse,
}

/// Regions that are open at a byte: by side, shortest first.
#[derive(Default)]
struct Open {
    /// Length, side, number of the region.
    read_ahead: BTreeSet<(u64, Side, usize)>,
    movement: BTreeSet<(u64, Side, usize)>,
    once: usize,
}

impl Open {
    fn change(&mut self, starts: bool, side: Side, len: u64, n: usize) {
        let set = match side {
            Side::Random | Side::Sequential | Side::Normal => &mut self.read_ahead,
            Side::DontNeed | Side::WillNeed => &mut self.movement,
            Side::NoReuse if starts => return self.once += 1,
            Side::NoReuse => return self.once -= 1,
        };
        match starts {
            true => set.insert((len, side, n)),
            false => set.remove(&(len, side, n)),
        };
    }

    fn says(&self, bytes: Range<u64>) -> Segment {
        let read_ahead = match self.read_ahead.first() {
            Some((_, Side::Random, _)) => ReadAhead::Random,
            Some((_, Side::Sequential, _)) => ReadAhead::Sequential,
            _ => ReadAhead::Normal,
        };
        let movement = match self.movement.first() {
            Some((_, Side::DontNeed, _)) => Movement::DontNeed,
            Some((_, Side::WillNeed, _)) => Movement::WillNeed,
            _ => Movement::None,
        };
        Segment { bytes, read_ahead, movement, once: self.once > 0 }
    }
}

impl RegionMap {
    /// What an entry says. O(n log n) in its regions.
    pub fn of(entry: &Entry) -> RegionMap {
        let sides: [(&[Region], Side); 6] = [
            (&entry.random, Side::Random),
            (&entry.sequential, Side::Sequential),
            (&entry.normal, Side::Normal),
            (&entry.dont_need, Side::DontNeed),
            (&entry.will_need, Side::WillNeed),
            (&entry.no_reuse, Side::NoReuse),
        ];
        // Byte, whether a region starts there, its side, its length, its number.
        let mut boundaries: Vec<(u64, bool, Side, u64, usize)> = Vec::new();
        for (regions, side) in sides {
            for bytes in regions.iter().map(Region::bytes) {
                let (n, len) = (boundaries.len(), bytes.end - bytes.start);
                boundaries.push((bytes.start, true, side, len, n));
                boundaries.push((bytes.end, false, side, len, n));
            }
        }
        boundaries.sort_unstable_by_key(|b| b.0);
        let mut open = Open::default();
        let mut segments: Vec<Segment> = Vec::new();
        let mut at = 0;
        for (byte, starts, side, len, n) in boundaries {
            if byte > at {
                let segment = open.says(at..byte);
                let default = open.read_ahead.is_empty() && !segment.moves();
                match segments.last_mut() {
                    _ if default => {}
                    Some(last) if last.bytes.end == at && same(last, &segment) => last.bytes.end = byte,
                    _ => segments.push(segment),
                }
                at = byte;
            }
            open.change(starts, side, len, n);
        }
        let has_once = segments.iter().any(|s| s.once || s.movement == Movement::DontNeed);
        let has_modes = !(entry.random.is_empty() && entry.sequential.is_empty() && entry.normal.is_empty());
        RegionMap { segments, has_once, has_modes }
    }

    /// Whether the entry says anything of how the kernel is to read ahead. If not, it is left as the program set it.
    pub fn has_modes(&self) -> bool {
        self.has_modes
    }

    /// Whether some bytes are to be brought in or released.
    pub fn moves_anything(&self) -> bool {
        self.segments.iter().any(Segment::moves)
    }

    /// How the kernel is to read ahead at a byte.
    pub fn read_ahead_at(&self, byte: u64) -> ReadAhead {
        let i = self.segments.partition_point(|s| s.bytes.end <= byte);
        self.segments.get(i).filter(|s| s.bytes.start <= byte).map_or(ReadAhead::Normal, |s| s.read_ahead)
    }

    /// The first byte from this one on that is to be brought in.
    pub fn next_will_need(&self, byte: u64) -> Option<u64> {
        let i = self.segments.partition_point(|s| s.bytes.end <= byte);
        let segment = self.segments[i..].iter().find(|s| s.movement == Movement::WillNeed)?;
        Some(segment.bytes.start.max(byte))
    }

    fn overlapping(&self, bytes: Range<u64>) -> impl Iterator<Item = &Segment> {
        let i = self.segments.partition_point(|s| s.bytes.end <= bytes.start);
        self.segments[i..].iter().take_while(move |s| s.bytes.start < bytes.end)
    }
}

impl Plan for RegionMap {
    fn moves_in(&self, bytes: Range<u64>) -> bool {
        self.overlapping(bytes).any(|s| s.moves())
    }

    fn will_need_in(&self, bytes: Range<u64>) -> Vec<Range<u64>> {
        let mut pieces: Vec<Range<u64>> = Vec::new();
        for segment in self.overlapping(bytes.clone()).filter(|s| s.movement == Movement::WillNeed) {
            let part = segment.bytes.start.max(bytes.start)..segment.bytes.end.min(bytes.end);
            match pieces.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => pieces.push(part),
            }
        }
        pieces
    }

    fn once_in(&self, bytes: Range<u64>) -> bool {
        self.has_once && self.overlapping(bytes).any(|s| s.once || s.movement == Movement::DontNeed)
    }

    fn has_once(&self) -> bool {
        self.has_once
    }

    fn ahead(&self, touched: (u64, u64), most: u64, geometry: Geometry, size_bytes: u64) -> Vec<u64> {
        let mut blocks = Vec::new();
        let mut next = (touched.1 + 1).saturating_mul(geometry.block_bytes);
        while (blocks.len() as u64) < most
            && let Some(at) = self.next_will_need(next).filter(|at| *at < size_bytes)
        {
            let block = at / geometry.block_bytes;
            blocks.push(block);
            next = (block + 1).saturating_mul(geometry.block_bytes);
        }
        blocks
    }
}

fn same(a: &Segment, b: &Segment) -> bool {
    (a.read_ahead, a.movement, a.once) == (b.read_ahead, b.movement, b.once)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn regions() -> impl Strategy<Value = Vec<Region>> {
        prop::collection::vec((0u64..60, 0u64..30), 0..4)
            .prop_map(|rs| rs.into_iter().map(|(offset, length)| Region { offset, length }).collect())
    }

    prop_compose! {
        pub(crate) fn entry()(
            random in regions(), sequential in regions(), normal in regions(),
            will_need in regions(), dont_need in regions(), no_reuse in regions(),
        ) -> Entry {
            Entry { random, sequential, normal, will_need, dont_need, no_reuse, ..Entry::new("/f") }
        }
    }

    proptest! {
        /// Byte by byte the map says what the entry says when asked the slow way.
        #[test]
        fn says_what_the_entry_says(entry in entry(), from in 0u64..100, len in 1u64..40) {
            let map = RegionMap::of(&entry);
            for byte in 0..100 {
                prop_assert_eq!(map.read_ahead_at(byte), entry.read_ahead_at(byte));
                let slow = (byte..200).find(|b| entry.movement_at(*b) == Movement::WillNeed);
                prop_assert_eq!(map.next_will_need(byte), slow);
            }
            let bytes = from..from + len;
            let needed: Vec<u64> = bytes.clone().filter(|b| entry.movement_at(*b) == Movement::WillNeed).collect();
            let pieces = map.will_need_in(bytes.clone());
            prop_assert_eq!(pieces.iter().cloned().flatten().collect::<Vec<_>>(), needed);
            prop_assert!(pieces.windows(2).all(|w| w[0].end < w[1].start));
            let once = |b: u64| entry.once_at(b) || entry.movement_at(b) == Movement::DontNeed;
            prop_assert_eq!(map.once_in(bytes.clone()), bytes.clone().any(once));
            let moves = |b: u64| once(b) || entry.movement_at(b) == Movement::WillNeed;
            prop_assert_eq!(map.moves_in(bytes.clone()), bytes.clone().any(moves));
        }
    }
}
