//! A file whose extents are read in an order that a recorded run has shown.
//!
//! The extents, one after the other in the order of reading, make a *virtual file* that the program reads from front to
//! back. Read-ahead works on the virtual file; this module translates between offsets in the file and in the sequence.

use std::ops::Range;

use rustc_hash::FxHashMap;

#[derive(Clone, Debug)]
struct Piece {
    file: Range<u64>,
    /// Where it begins in the sequence.
    at: u64,
}

/// Extents up to this length are taken to be read in one piece.
const WHOLE_BYTES_MAX: u64 = 4 << 20;

/// The extents of a file in the order of reading.
#[derive(Clone, Debug)]
pub struct ReadingOrder {
    /// In the order of reading.
    pieces: Vec<Piece>,
    /// First byte in the file, place in the sequence, number of the piece; sorted.
    by_file: Vec<(u64, u64, usize)>,
    bytes: u64,
    /// Where each reader is in the sequence.
    readers: FxHashMap<u64, u64>,
}

impl ReadingOrder {
    /// Lays out the extents in the order of reading. What lies beyond `size_bytes` is cut off.
    pub fn new(extents: impl IntoIterator<Item = Range<u64>>, size_bytes: u64) -> ReadingOrder {
        let mut sequence =
            ReadingOrder { pieces: Vec::new(), by_file: Vec::new(), bytes: 0, readers: FxHashMap::default() };
        for extent in extents {
            let file = extent.start..extent.end.min(size_bytes);
            if file.start < file.end {
                sequence.by_file.push((file.start, sequence.bytes, sequence.pieces.len()));
                let len = file.end - file.start;
                sequence.pieces.push(Piece { file, at: sequence.bytes });
                sequence.bytes += len;
            }
        }
        sequence.by_file.sort_unstable();
        sequence
    }

    /// Bytes of the whole sequence.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Where the piece of this number begins in the sequence; its end where there are fewer.
    pub fn beginning_of(&self, piece: usize) -> u64 {
        self.pieces.get(piece).map_or(self.bytes, |piece| piece.at)
    }

    /// Where in the sequence a reader is that has read these bytes of the file. Of pieces that are read several times the
    /// next one from where the reader was; `None` for a read that the order does not know.
    pub fn read(&mut self, reader: u64, bytes: &Range<u64>) -> Option<Range<u64>> {
        let from = self.readers.get(&reader).copied().unwrap_or(0);
        let at_or_before = self.by_file.partition_point(|(start, ..)| *start <= bytes.start);
        let before = at_or_before.checked_sub(1).map(|i| self.by_file[i].0);
        let after = self.by_file.get(at_or_before).map(|(start, ..)| *start).filter(|start| *start < bytes.end);
        let piece = before.and_then(|start| self.occurrence(start, from, bytes.start));
        let piece = &self.pieces[piece.or_else(|| self.occurrence(after?, from, after?))?];
        let inside = bytes.start.max(piece.file.start)..bytes.end.min(piece.file.end);
        let read = piece.at + (inside.start - piece.file.start)..piece.at + (inside.end - piece.file.start);
        self.readers.insert(reader, read.start);
        Some(read)
    }

    /// A reader is gone.
    pub fn depart(&mut self, reader: u64) {
        self.readers.remove(&reader);
    }

    /// The piece that begins at `start` in the file and holds `byte`: the first one not before `from` in the sequence, else
    /// the last one.
    fn occurrence(&self, start: u64, from: u64, byte: u64) -> Option<usize> {
        let first = self.by_file.partition_point(|(s, ..)| *s < start);
        let end = self.by_file.partition_point(|(s, ..)| *s <= start);
        let all = self.by_file.get(first..end)?;
        // A reader in the middle of a piece is still in it.
        let ahead = all.partition_point(|(_, at, i)| at + self.length(*i) <= from);
        let (_, _, i) = all.get(ahead).or(all.last())?;
        self.pieces[*i].file.contains(&byte).then_some(*i)
    }

    fn length(&self, piece: usize) -> u64 {
        let file = &self.pieces[piece].file;
        file.end - file.start
    }

    /// As [`in_file`](ReadingOrder::in_file), but extents of at most 4 MiB are not cut: those that begin at these places
    /// are whole, those that began before are left out.
    pub fn beginning_in(&self, places: Range<u64>) -> Vec<Range<u64>> {
        self.in_file(self.begin_of_whole(places.start)..self.begin_of_whole(places.end))
    }

    /// As [`beginning_in`](ReadingOrder::beginning_in), with the extents that end at these places.
    pub fn ending_in(&self, places: Range<u64>) -> Vec<Range<u64>> {
        self.in_file(self.end_of_whole(places.start)..self.end_of_whole(places.end))
    }

    /// The short extent that lies across a place, if there is one.
    fn short_across(&self, place: u64) -> Option<Range<u64>> {
        let last = self.pieces.partition_point(|p| p.at < place).checked_sub(1)?;
        let at = self.pieces[last].at..self.pieces[last].at + self.length(last);
        (at.end > place && self.length(last) <= WHOLE_BYTES_MAX).then_some(at)
    }

    /// A place, or the end of the short extent that lies across it.
    fn begin_of_whole(&self, place: u64) -> u64 {
        self.short_across(place).map_or(place, |across| across.end)
    }

    /// A place, or the beginning of the short extent that lies across it.
    fn end_of_whole(&self, place: u64) -> u64 {
        self.short_across(place).map_or(place, |across| across.start)
    }

    /// The parts of the file that lie at these places of the sequence, neighbours joined, whether they are read forward or backward.
    pub fn in_file(&self, places: Range<u64>) -> Vec<Range<u64>> {
        let first = self.pieces.partition_point(|p| p.at + (p.file.end - p.file.start) <= places.start);
        let mut parts: Vec<Range<u64>> = Vec::new();
        for piece in self.pieces[first..].iter().take_while(|p| p.at < places.end) {
            let start = piece.file.start + places.start.saturating_sub(piece.at);
            let end = piece.file.end.min(piece.file.start + (places.end - piece.at));
            match parts.last_mut() {
                Some(last) if last.end == start => last.end = end,
                Some(last) if last.start == end => last.start = start,
                _ => parts.push(start..end),
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence(pieces: &[(u64, u64)]) -> ReadingOrder {
        let end = |offset: u64, length| if length == 0 { u64::MAX } else { offset + length };
        ReadingOrder::new(pieces.iter().map(|&(offset, length)| offset..end(offset, length)), 1000)
    }

    #[test]
    fn extents_lie_in_the_order_of_reading() {
        let mut sequence = sequence(&[(500, 100), (0, 50), (600, 10), (990, 0)]);
        assert_eq!(sequence.bytes(), 170);
        assert_eq!(sequence.in_file(0..170), [500..600, 0..50, 600..610, 990..1000]);
        assert_eq!(sequence.in_file(90..120), [590..600, 0..20]);
        assert_eq!(sequence.read(1, &(510..520)), Some(10..20));
        assert_eq!(sequence.read(1, &(0..1000)), Some(100..150));
        assert_eq!(sequence.read(1, &(40..60)), Some(140..150));
        assert_eq!(sequence.read(1, &(300..400)), None);
        assert_eq!(sequence.read(1, &(300..501)), Some(0..1), "a read that reaches into a piece");
    }

    /// Each part is a request: a file that was read backward came in the pieces of its reads.
    #[test]
    fn what_is_read_backward_is_one_part() {
        let sequence = sequence(&[(900, 100), (800, 100), (700, 100), (200, 50), (150, 50)]);
        assert_eq!(sequence.in_file(0..400), [700..1000, 150..250]);
        assert_eq!(sequence.in_file(100..250), [800..900, 700..750], "a cut piece begins where it does");
        assert_eq!(sequence.beginning_in(0..320), [700..1000, 200..250]);
    }

    #[test]
    fn what_is_read_several_times_is_found_further_on() {
        let mut sequence = sequence(&[(0, 10), (100, 10), (0, 10), (200, 10), (0, 10)]);
        let order = [0..10, 100..110, 0..10, 200..210, 0..10];
        let places: Vec<_> = order.iter().filter_map(|r| sequence.read(7, r)).map(|r| r.start).collect();
        assert_eq!(places, [0, 10, 20, 30, 40]);
        assert_eq!(sequence.read(8, &(200..210)).map(|r| r.start), Some(30), "another reader begins anew");
        sequence.depart(7);
        assert_eq!(sequence.read(7, &(0..5)).map(|r| r.start), Some(0));
    }

    #[test]
    fn short_extents_are_not_cut() {
        let sequence = sequence(&[(500, 100), (0, 50), (600, 10), (990, 0)]);
        let parts = |parts: Vec<Range<u64>>| parts.into_iter().map(|r| (r.start, r.end)).collect::<Vec<_>>();
        let beginning = [0..60, 60..120, 120..170].map(|places| parts(sequence.beginning_in(places)));
        assert_eq!(beginning, [vec![(500, 600)], vec![(0, 50)], vec![(600, 610), (990, 1000)]]);
        let ending = [0..60, 60..120, 120..170].map(|places| parts(sequence.ending_in(places)));
        assert_eq!(ending, [vec![], vec![(500, 600)], vec![(0, 50), (600, 610), (990, 1000)]]);
        let long = ReadingOrder::new(std::iter::once(0..9 << 20), 1 << 30);
        let read_in_pieces = parts(long.beginning_in(1 << 20..2 << 20));
        assert_eq!(read_in_pieces, [(1 << 20, 2 << 20)]);
    }

    proptest! {
        /// There and back: the file bytes at the place of a read are the bytes read, as far as one piece has them.
        #[test]
        fn there_and_back(pieces in prop::collection::vec((0u64..900, 1u64..99), 1..30), reads in prop::collection::vec((0u64..950, 1u64..80), 1..30)) {
            let mut sequence = sequence(&pieces);
            prop_assert_eq!(sequence.in_file(0..sequence.bytes()).iter().map(|r| r.end - r.start).sum::<u64>(), sequence.bytes());
            for (start, len) in reads {
                let read = start..start + len;
                if let Some(place) = sequence.read(1, &read) {
                    prop_assert!(place.start < place.end && place.end <= sequence.bytes());
                    let back = sequence.in_file(place);
                    prop_assert_eq!(back.len(), 1);
                    prop_assert!(back[0].start >= read.start && back[0].end <= read.end);
                } else {
                    prop_assert!(pieces.iter().all(|&(at, _)| at != start), "a read at a piece's beginning is found");
                }
            }
        }
    }
}
