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
