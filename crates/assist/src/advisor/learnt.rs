//! A file of a kind that is known from earlier runs: what the program will read of it is known when it opens it.
//!
//! The prediction is the kind's, not this file's, so it is followed only where reads come in its order. Each program's first
//! bytes of it are brought in when it opens the file; the rest follows its reads. A program that departs from the order
//! stops that for this file, and what is found online while it runs remains.

use std::ops::Range;

use impresario_foresight::{ReadingOrder, Shape};
use rustc_hash::FxHashMap;

use super::gaps::SHORT_GAP_BYTES;
use super::{Everything, KNOWN_GROWTH, KNOWN_HEAD_BYTES, Reader, in_file};
use crate::cache::{Action, BlockCache, Geometry, Tally};

/// Pieces that are brought in when a program opens the file, before it has shown that it follows, of [`KNOWN_HEAD_BYTES`] at most; a
/// piece begun is not cut.
const HEAD_PIECES: usize = 16;
/// Asked for together, so that pieces beside each other are one request.
const STEP_BYTES: u64 = 512 << 10;
/// What is asked for cannot be asked for in a better way any more, so the first reads that wait for it get no more: after these a
/// pattern would have been seen.
const PATTERN_READS: u64 = 8;
/// Reads of what was brought in are late when they have waited so long all the same, and every other one did.
const LATE_NS: u64 = 8_000_000;
/// A read follows if it begins no further behind the one before, or beyond its end: a program may skip what it knows.
const BESIDE_BYTES: u64 = 4 << 20;
/// Reads that do not follow, beyond a quarter of all, until the order is given up.
const ASTRAY_MAX: u32 = 8;

/// Of the bytes of a file that is read straight on, so many percent lie on one way.
const STRAIGHT_PERCENT: u64 = 90;

/// What is predicted of a file of this size; nothing of one that is read straight on for longer than an open brings in. The kernel's
/// read-ahead serves that, and a pattern where it does not: hints beside these cost a disk a turn each.
fn predicted(shape: &Shape, size_bytes: u64) -> ReadingOrder {
    let mut pieces = shape.predict(size_bytes);
    if straight_bytes(&pieces) > KNOWN_HEAD_BYTES {
        pieces.clear();
    }
    ReadingOrder::new(pieces, size_bytes)
}

/// The longest way forward with short gaps that these pieces go, if nearly all of their bytes lie on it; else 0.
fn straight_bytes(pieces: &[Range<u64>]) -> u64 {
    let (mut all, mut longest, mut way, mut end) = (0u64, 0u64, 0u64, 0u64);
    for piece in pieces {
        let len = piece.end.saturating_sub(piece.start);
        let goes_on = (end..=end.saturating_add(SHORT_GAP_BYTES)).contains(&piece.start);
        way = if goes_on { way.saturating_add(len) } else { len };
        (end, all, longest) = (piece.end, all.saturating_add(len), longest.max(way));
    }
    if longest >= all / 100 * STRAIGHT_PERCENT { longest } else { 0 }
}

/// What is known of one file by its kind.
#[derive(Debug)]
pub(super) struct Learnt {
    shape: std::sync::Arc<Shape>,
    line: ReadingOrder,
    cache: BlockCache,
    block_bytes: u64,
    /// How far each program has come.
    places: FxHashMap<u64, Range<u64>>,
    /// Four for each read that does not follow, less one for each that does.
    astray: u32,
    is_given_up: bool,
    /// Others have their turn.
    has_stepped_aside: bool,
    /// Bytes that were asked for, and that may be.
    asked_bytes: u64,
    allowed_bytes: u64,
    /// Reads that followed, those of them that were brought in, those of these that waited all the same, and how long.
    reads: u64,
    hits: u64,
    late: u64,
    late_ns: u64,
}

impl Learnt {
    /// For a file of the given size; `None` when nothing is predicted of it.
    pub(super) fn new(shape: &std::sync::Arc<Shape>, geometry: Geometry, size_bytes: u64) -> Option<Learnt> {
        let line = predicted(shape, size_bytes);
        let cache = BlockCache::new(geometry, line.bytes());
        let (places, shape) = (FxHashMap::default(), shape.clone());
        (line.bytes() > 0).then_some(Learnt {
            shape,
            line,
            cache,
            block_bytes: geometry.block_bytes,
            places,
            astray: 0,
            is_given_up: false,
            has_stepped_aside: false,
            asked_bytes: 0,
            allowed_bytes: 0,
            reads: 0,
            hits: 0,
            late: 0,
            late_ns: 0,
        })
    }

    /// How many pieces are predicted.
    pub(super) fn pieces(&self) -> usize {
        self.line.pieces()
    }

    /// The file's length changed.
    pub(super) fn set_size(&mut self, size_bytes: u64) {
        self.line = predicted(&self.shape, size_bytes);
        self.cache.set_size(self.line.bytes());
        self.places.clear();
    }

    /// A program has opened the file, or is about to: what it will read first is brought in.
    pub(super) fn opened(&mut self, program: u64, may: &mut dyn FnMut(u64) -> bool) -> Vec<Action> {
        if !self.is_followed() || self.places.contains_key(&program) {
            return Vec::new();
        }
        let head_bytes = self.line.beginning_of(HEAD_PIECES).next_multiple_of(self.block_bytes).min(KNOWN_HEAD_BYTES);
        self.allowed_bytes = self.allowed_bytes.max(head_bytes);
        let mut left = head_bytes;
        let mut grant = |bytes: u64| {
            let is_granted = bytes <= left && may(bytes);
            left -= if is_granted { bytes } else { 0 };
            is_granted
        };
        let actions = self.cache.expect(program, 0, &Everything, &mut grant);
        self.asked_bytes = self.asked_bytes.saturating_add(head_bytes - left);
        self.places.insert(program, 0..0);
        in_file(&self.line, actions)
    }

    /// A program has read these bytes, and waited so long for them. `None` when the order does not know them; else whether they were
    /// brought in, and what to do now.
    pub(super) fn read(
        &mut self,
        reader: Reader,
        bytes: &Range<u64>,
        waited_ns: u64,
        may: &mut dyn FnMut(u64) -> bool,
    ) -> Option<(bool, Vec<Action>)> {
        if !self.is_followed() {
            return None;
        }
        let place = self.line.read(reader.program, bytes)?;
        let before = self.places.insert(reader.program, place.clone()).unwrap_or(0..0);
        let near = before.start.saturating_sub(BESIDE_BYTES)..=before.end.saturating_add(BESIDE_BYTES);
        if near.contains(&place.start) {
            self.astray = self.astray.saturating_sub(1);
        } else {
            self.astray += 4;
            if self.astray > 4 * ASTRAY_MAX {
                self.give_up();
            }
            return None;
        }
        let hit = self.cache.holds(&place);
        self.reads += 1;
        self.hits += u64::from(hit);
        if hit && waited_ns > 0 {
            self.late += 1;
            self.late_ns = self.late_ns.saturating_add(waited_ns);
        }
        if !hit || waited_ns == 0 || self.reads > PATTERN_READS {
            let more_bytes = (bytes.end - bytes.start).saturating_mul(KNOWN_GROWTH);
            self.allowed_bytes = self.allowed_bytes.max(KNOWN_HEAD_BYTES).saturating_add(more_bytes);
        }
        let allowed_bytes = self.allowed_bytes / STEP_BYTES * STEP_BYTES;
        let asked_bytes = &mut self.asked_bytes;
        let mut is_full = false;
        let mut grant = |bytes: u64| {
            // Beyond it nothing makes room: 0 bytes are refused, too.
            is_full = if bytes > 0 { asked_bytes.saturating_add(bytes) > allowed_bytes } else { is_full };
            let is_granted = !is_full && may(bytes);
            *asked_bytes += if is_granted { bytes } else { 0 };
            is_granted
        };
        let actions = self.cache.access(reader.program, place, &Everything, &mut grant);
        Some((hit, in_file(&self.line, actions)))
    }

    /// Whether the device does not bring in what is asked for as fast as it is read.
    pub(super) fn is_late(&self) -> bool {
        self.late_ns >= LATE_NS && self.late * 2 >= self.hits
    }

    /// Hints were given by it.
    pub(super) fn gives(&self) -> bool {
        self.asked_bytes > 0
    }

    /// Lets others have their turn if hints were given; whether it does now.
    pub(super) fn step_aside(&mut self) -> bool {
        let steps_aside = self.is_followed() && self.gives();
        if steps_aside {
            self.has_stepped_aside = true;
            self.clear();
        }
        steps_aside
    }

    /// A program has closed the file, or is gone.
    pub(super) fn depart(&mut self, program: u64) {
        self.places.remove(&program);
        self.line.depart(program);
        // Memory without a known next reader is left to the kernel.
        self.cache.depart(program);
    }

    /// Hints stop here: everything held is forgotten.
    pub(super) fn clear(&mut self) {
        self.cache.clear();
        self.places.clear();
    }

    fn give_up(&mut self) {
        self.is_given_up = true;
        self.clear();
    }

    /// Whether hints come of it, as the file is now.
    pub(super) fn is_followed(&self) -> bool {
        !self.is_given_up && !self.has_stepped_aside && self.line.bytes() > 0
    }

    /// Whether the file is read in another order than its kind.
    pub(super) fn has_strayed(&self) -> bool {
        self.is_given_up
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.cache.held_bytes()
    }

    pub(super) fn tally(&self) -> Tally {
        self.cache.tally()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use impresario_base::random::Random;
    use impresario_foresight::{Anchor, Repeat, Sample, ShapePiece, ShapeStep};

    use super::*;

    const MIB: u64 = 1 << 20;
    const GEOMETRY: Geometry =
        Geometry { block_bytes: 512 << 10, cache_blocks: 64, read_ahead_blocks: 32, batch_blocks: 8 };

    fn reader(program: u64) -> Reader {
        Reader { program, thread: 1 }
    }

    /// What is brought in, as far as it lies in the file.
    fn brought(actions: &[Action]) -> u64 {
        let of = |a: &Action| match a {
            Action::Prefetch(r) => r.end - r.start,
            _ => 0,
        };
        actions.iter().map(of).sum()
    }

    fn strided() -> Arc<Shape> {
        let bytes = |bytes: i64| Anchor { bytes, ..Anchor::START };
        let group = vec![ShapePiece { at: Anchor::START, len: bytes(65_536) }];
        let footer = ShapeStep {
            start: Anchor { bytes: -8, ..Anchor::END },
            group: vec![ShapePiece { at: Anchor::START, len: bytes(8) }],
            stride: Anchor::START,
            repeat: Repeat::Times(1),
        };
        let columns = ShapeStep {
            start: Anchor::START,
            group,
            stride: bytes(256 << 10),
            repeat: Repeat::Until(Anchor { bytes: -8, ..Anchor::END }),
        };
        Arc::new(Shape { steps: vec![footer, columns], only_size_bytes: None })
    }

    #[test]
    fn everything_is_brought_in_before_it_is_read() {
        let size = 64 * MIB + 8;
        let mut learnt = Learnt::new(&strided(), GEOMETRY, size).unwrap();
        let head = learnt.opened(1, &mut |_| true);
        // What is read in one piece is brought in in one piece.
        assert!((1..KNOWN_HEAD_BYTES + 65_536).contains(&brought(&head)), "{head:?}");
        assert!(learnt.opened(1, &mut |_| true).is_empty(), "once for each program");
        let reads = std::iter::once(size - 8..size).chain((0..256).map(|i| i * (256 << 10)..i * (256 << 10) + 65_536));
        let (mut hits, mut bytes) = (0, brought(&head));
        for read in reads {
            let (hit, actions) = learnt.read(reader(1), &read, 0, &mut |_| true).unwrap();
            hits += u64::from(hit);
            bytes += brought(&actions);
        }
        assert_eq!((hits, bytes), (257, 256 * 65_536 + 8));
        let tally = learnt.tally();
        assert_eq!((tally.used_bytes, tally.prefetched_bytes, tally.wasted_bytes), (bytes, bytes, 0));
        learnt.depart(1);
        assert_eq!(learnt.held_bytes(), 0);
    }

    #[test]
    fn a_file_that_is_read_otherwise_is_given_up_for_little() {
        let sample = |size: u64| Sample::of(size, [size / 2..size, 0..size / 2]).unwrap();
        let (a, b) = (sample(10 * MIB), sample(70 * MIB));
        let shape = Arc::new(Shape::learn(&[&a, &b]));
        let mut learnt = Learnt::new(&shape, GEOMETRY, 1 << 30).unwrap();
        let mut bytes = brought(&learnt.opened(1, &mut |_| true));
        let mut random = Random::new(7);
        for _ in 0..100 {
            let start = random.below(1 << 18) * 4096;
            if let Some((_, actions)) = learnt.read(reader(1), &(start..start + 4096), 0, &mut |_| true) {
                bytes += brought(&actions);
            }
        }
        assert!(learnt.has_strayed() && learnt.held_bytes() == 0);
        // The head, and a window for a read that happened to lie near the one before.
        assert!(bytes <= KNOWN_HEAD_BYTES + 2 * 16 * MIB, "{bytes}");
        assert!(learnt.read(reader(1), &(0..4096), 0, &mut |_| true).is_none());
    }

    /// Short files are brought in as they are opened, which nothing else does.
    #[test]
    fn a_long_file_that_is_read_straight_on_is_left_to_others() {
        let sample = |size: u64| Sample::of(size, std::iter::once(0..size)).unwrap();
        let (a, b) = (sample(10 * MIB), sample(70 * MIB));
        let all = Arc::new(Shape::learn(&[&a, &b]));
        assert!(Learnt::new(&all, GEOMETRY, KNOWN_HEAD_BYTES + 1).is_none());
        let mut short = Learnt::new(&all, GEOMETRY, KNOWN_HEAD_BYTES).unwrap();
        assert_eq!(brought(&short.opened(1, &mut |_| true)), KNOWN_HEAD_BYTES);
        short.set_size(64 * MIB);
        assert!(short.read(reader(1), &(0..65_536), 0, &mut |_| true).is_none(), "it has grown");
        assert!(!short.is_followed(), "others are not kept from it");
        short.set_size(KNOWN_HEAD_BYTES);
        assert!(short.is_followed());
        let steps = |count: u64, len: u64, step: u64| (0..count).map(|i| i * step..i * step + len).collect::<Vec<_>>();
        assert_eq!(straight_bytes(&steps(100, 4096, 4096 + SHORT_GAP_BYTES)), 100 * 4096);
        assert_eq!(straight_bytes(&steps(100, 4096, 4097 + SHORT_GAP_BYTES)), 0);
        let mut footer_first = steps(8, MIB, MIB);
        footer_first.insert(0, 80 * MIB..80 * MIB + 100);
        assert_eq!(straight_bytes(&footer_first), 8 * MIB);
        assert_eq!(straight_bytes(&steps(8, MIB, MIB).into_iter().rev().collect::<Vec<_>>()), 0);
        assert_eq!(straight_bytes(&[]), 0);
    }

    #[test]
    fn what_the_kind_does_not_know_is_left_to_others() {
        let mut learnt = Learnt::new(&strided(), GEOMETRY, 64 * MIB).unwrap();
        assert!(learnt.read(reader(1), &(100_000..110_000), 0, &mut |_| true).is_none());
        assert!(!learnt.has_strayed());
        assert!(Learnt::new(&Arc::new(Shape::default()), GEOMETRY, MIB).is_none());
        assert!(Learnt::new(&strided(), GEOMETRY, 0).is_none());
    }

    #[test]
    fn nothing_is_brought_in_without_leave() {
        let mut learnt = Learnt::new(&strided(), GEOMETRY, 64 * MIB).unwrap();
        assert!(learnt.opened(1, &mut |_| false).is_empty());
        let (_, actions) = learnt.read(reader(1), &(0..65_536), 0, &mut |_| false).unwrap();
        assert!(actions.is_empty() && learnt.held_bytes() == 0);
    }
}
