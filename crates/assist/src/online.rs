//! A forecast as a plan for the block cache: hints for files of which no configuration says anything.

use std::ops::Range;

use impresario_foresight::Forecast;

use crate::cache::{Geometry, Plan};

impl Plan for Forecast {
    fn moves_in(&self, bytes: Range<u64>) -> bool {
        self.touches(&bytes)
    }

    fn will_need_in(&self, bytes: Range<u64>) -> Vec<Range<u64>> {
        // What is read in one piece is brought in in one piece.
        self.beginning_within(bytes)
    }

    fn ahead(&self, touched: (u64, u64), most: u64, geometry: Geometry, size_bytes: u64) -> Vec<u64> {
        self.blocks_ahead(touched, most, geometry.block_bytes, size_bytes)
    }

    fn once_in(&self, _: Range<u64>) -> bool {
        false
    }

    fn has_once(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use impresario_foresight::Detector;

    use super::*;
    use crate::cache::{Action, BlockCache};

    const KIB: u64 = 1 << 10;

    /// The first forecasts reach a few rounds far, and end within a block. What of that comes later is wanted, too: a read of it
    /// would come behind all hints for the blocks beyond.
    #[test]
    fn no_piece_is_left_out_behind_those_that_are_asked_for() {
        let geometry = Geometry { block_bytes: 512 * KIB, cache_blocks: 32, read_ahead_blocks: 16, batch_blocks: 4 };
        let (mut cache, mut detector) = (BlockCache::new(geometry, 1 << 30), Detector::default());
        let read = |i: u64| i * 150_000..i * 150_000 + 20_000;
        let mut asked = Vec::new();
        for i in 0..200 {
            let seen = detector.observe(&read(i), 64 * KIB);
            let Some(forecast) = seen.forecast else { continue };
            for action in cache.access(1, read(i), forecast, &mut |_| true) {
                if let Action::Prefetch(bytes) = action {
                    asked.push(bytes);
                }
            }
        }
        let first = asked.first().unwrap().start / 150_000;
        let is_asked = |i: &u64| asked.iter().any(|bytes| bytes.start <= read(*i).start && read(*i).end <= bytes.end);
        let missing: Vec<u64> = (first..200).filter(|i| !is_asked(i)).collect();
        assert!(first < 8 && missing.is_empty(), "{first}: {missing:?}");
    }
}
