//! The placement of files on the disk.
//!
//! A file is divided into chunks, and a hash of its key and the chunk's number places each on the disk. Every byte's
//! address is thus fixed before any measurement and independent of the order of writes; files and the chunks of a file
//! are spread evenly; within a chunk a file is contiguous. Two chunks may overlap on the disk (the hash keeps no
//! allocation map), which only makes those few addresses less realistic.

use impresario_base::random::mix;

use crate::params::DeviceParams;
use crate::{Io, Op};

/// Chunks start at multiples of this.
const ALIGN_BYTES: u64 = 4096;

/// The placement rule of a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placement {
    chunk_bytes: u64,
    /// The number of addresses at which a chunk may begin.
    starts: u64,
}

impl Placement {
    /// The rule of a disk with validated parameters.
    pub fn new(params: &DeviceParams) -> Placement {
        let room = params.span_bytes().saturating_sub(params.placement_chunk_bytes);
        Placement { chunk_bytes: params.placement_chunk_bytes, starts: room / ALIGN_BYTES + 1 }
    }

    /// The address of a byte of a file.
    pub fn address(&self, file: u64, offset: u64) -> u64 {
        let (chunk, within) = (offset / self.chunk_bytes, offset % self.chunk_bytes);
        let hash = mix(mix(file).wrapping_add(chunk));
        // The high half of the product spreads the hash evenly.
        let start = ((u128::from(hash) * u128::from(self.starts)) >> 64) as u64;
        start * ALIGN_BYTES + within
    }

    /// The disk requests for a range of a file, in file order: one per chunk touched, none for an empty range.
    pub fn place(&self, op: Op, file: u64, offset: u64, len: u64) -> Placed {
        Placed { rule: *self, op, file, offset, end: offset.saturating_add(len) }
    }
}

/// The requests for a range of a file; see [`Placement::place`].
#[derive(Clone, Debug)]
pub struct Placed {
    rule: Placement,
    op: Op,
    file: u64,
    offset: u64,
    end: u64,
}

impl Iterator for Placed {
    type Item = Io;

    fn next(&mut self) -> Option<Io> {
        if self.offset >= self.end {
            return None;
        }
        let to_boundary = self.rule.chunk_bytes - self.offset % self.rule.chunk_bytes;
        let len = to_boundary.min(self.end - self.offset);
        let io = Io { op: self.op, address: self.rule.address(self.file, self.offset), len };
        self.offset += len;
        Some(io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn files_are_spread_evenly() {
        let params = DeviceParams::default();
        let rule = Placement::new(&params);
        let mut tenths = [0u32; 10];
        for file in 0..10_000 {
            tenths[(rule.address(file, 0) / (params.capacity_bytes / 10)) as usize] += 1;
        }
        // 1000 each, standard deviation 30.
        assert!(tenths.iter().all(|n| (850..1150).contains(n)), "{tenths:?}");
    }

    #[test]
    fn a_span_keeps_files_at_the_start() {
        let params = DeviceParams { placement_span: 0.1, ..DeviceParams::default() };
        let rule = Placement::new(&params);
        assert!((0..1000).all(|file| rule.address(file, (256 << 20) - 1) < 100_000_000_000));
    }

    #[test]
    fn a_range_is_contiguous_within_a_chunk_and_cut_between() {
        let rule = Placement::new(&DeviceParams::default());
        let chunk = 256 << 20;
        assert_eq!(rule.address(7, 5_000_000), rule.address(7, 0) + 5_000_000);
        let placed: Vec<Io> = rule.place(Op::Read, 7, chunk - 1000, 4000).collect();
        assert_eq!(placed, [Io::read(rule.address(7, chunk - 1000), 1000), Io::read(rule.address(7, chunk), 3000)]);
        assert_eq!(rule.place(Op::Write, 7, 123, 0).count(), 0);
        assert_eq!(rule.place(Op::Write, 7, u64::MAX - 10, 100).map(|io| io.len).sum::<u64>(), 10);
    }

    proptest! {
        #[test]
        fn every_byte_has_its_place_on_the_disk(file: u64, offset: u64, len in 0u64..2 << 30) {
            let params = DeviceParams::default();
            let rule = Placement::new(&params);
            let mut at = offset;
            for io in rule.place(Op::Read, file, offset, len) {
                prop_assert_eq!(io.address, rule.address(file, at));
                prop_assert!(io.len > 0 && io.end() <= params.capacity_bytes);
                at += io.len;
            }
            prop_assert_eq!(at, offset.saturating_add(len));
        }
    }
}
