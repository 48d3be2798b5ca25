//! Cutting a file range into calls: one per server and call size, with the buffers of each.

use std::io::{IoSlice, IoSliceMut};

use impresario_layout::Layout;

/// Bytes that can be divided: `&[u8]` to be written or `&mut [u8]` to be filled.
pub(crate) trait Divide: Sized {
    /// What vectored I/O takes.
    type Slice;
    fn size(&self) -> usize;
    fn divide(self, at: usize) -> (Self, Self);
    fn into_slice(self) -> Self::Slice;
}

impl<'a> Divide for &'a [u8] {
    type Slice = IoSlice<'a>;
    fn size(&self) -> usize {
        self.len()
    }
    fn divide(self, at: usize) -> (Self, Self) {
        self.split_at(at.min(self.len()))
    }
    fn into_slice(self) -> IoSlice<'a> {
        IoSlice::new(self)
    }
}

impl<'a> Divide for &'a mut [u8] {
    type Slice = IoSliceMut<'a>;
    fn size(&self) -> usize {
        self.len()
    }
    fn divide(self, at: usize) -> (Self, Self) {
        let at = at.min(self.len());
        self.split_at_mut(at)
    }
    fn into_slice(self) -> IoSliceMut<'a> {
        IoSliceMut::new(self)
    }
}

/// One call: a contiguous range of one server's object and the buffers it is scattered over.
pub(crate) struct Cut<S> {
    pub(crate) server: u16,
    pub(crate) lane_offset: u64,
    pub(crate) len: usize,
    pub(crate) slices: Vec<S>,
}

/// Cuts the file range that `bytes` stand for, from `offset` on. A call carries at most `call_max` bytes; with
/// `piece_max` the range is first cut into pieces of that size, and calls do not go beyond them. `call_max` and
/// `piece_max` are at least 1.
pub(crate) fn cut<B: Divide>(
    layout: &Layout,
    offset: u64,
    bytes: B,
    call_max: usize,
    piece_max: Option<usize>,
) -> Vec<Cut<B::Slice>> {
    let mut cuts: Vec<Cut<B::Slice>> = Vec::new();
    // The present call of each server: one per server, few.
    let mut open: Vec<usize> = Vec::new();
    let piece_max = piece_max.unwrap_or(usize::MAX).max(1) as u64;
    let (mut rest, mut at) = (bytes, offset);
    let mut piece_end = offset.saturating_add(piece_max);
    for strip in layout.pieces(offset, rest.size() as u64) {
        let (mut lane_offset, mut left) = (strip.lane_offset, strip.len);
        while left > 0 {
            if at == piece_end {
                piece_end = piece_end.saturating_add(piece_max);
                open.clear();
            }
            let present = open.iter().position(|i| cuts.get(*i).is_some_and(|cut| cut.server == strip.server));
            let room = present.and_then(|o| open.get(o)).and_then(|i| cuts.get(*i)).map_or(0, |cut| call_max - cut.len);
            let len = left.min(piece_end - at).min(if room > 0 { room } else { call_max.max(1) } as u64) as usize;
            let (slice, later) = rest.divide(len);
            rest = later;
            let slice = slice.into_slice();
            match present.and_then(|o| open.get(o)).and_then(|i| cuts.get_mut(*i)).filter(|_| room > 0) {
                Some(cut) => {
                    cut.len += len;
                    cut.slices.push(slice);
                }
                None => {
                    match present.and_then(|o| open.get_mut(o)) {
                        Some(index) => *index = cuts.len(),
                        None => open.push(cuts.len()),
                    }
                    cuts.push(Cut { server: strip.server, lane_offset, len, slices: vec![slice] });
                }
            }
            lane_offset += len as u64;
            left -= len as u64;
            at += len as u64;
        }
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_request_within_a_strip_is_one_call() {
        let layout = Layout::new(0, 4, 65536, 4).unwrap();
        let cuts = cut(&layout, 65536 + 100, &[7u8; 4096][..], 1 << 20, None);
        assert_eq!(cuts.len(), 1);
        assert_eq!((cuts[0].server, cuts[0].lane_offset, cuts[0].len, cuts[0].slices.len()), (1, 100, 4096, 1));
    }

    #[test]
    fn the_papers_client_sends_8_kib_pieces() {
        let layout = Layout::new(0, 2, 65536, 2).unwrap();
        let cuts = cut(&layout, 0, &[0u8; 256 << 10][..], 4 << 20, Some(8 << 10));
        assert_eq!(cuts.len(), 32);
        assert!(cuts.iter().all(|c| c.len == 8 << 10));
        assert_eq!(cuts.iter().filter(|c| c.server == 1).count(), 16);
        let whole = cut(&layout, 0, &[0u8; 256 << 10][..], 4 << 20, None);
        assert_eq!(
            whole.iter().map(|c| (c.server, c.len, c.slices.len())).collect::<Vec<_>>(),
            [(0, 128 << 10, 2), (1, 128 << 10, 2)]
        );
    }

    proptest! {
        #[test]
        fn every_byte_goes_where_the_layout_says(
            (servers, base, pcount, ssize) in (1u16..6).prop_flat_map(|n| (Just(n), 0..n, 1..=n, 512u32..5000)),
            offset in 0u64..50_000,
            len in 0usize..40_000,
            call_max in 1usize..20_000,
            piece_max in proptest::option::of(1usize..20_000),
        ) {
            let layout = Layout::new(base, pcount, ssize, servers).unwrap();
            // Each position has its own content, so that a byte out of place is seen.
            let content: Vec<u8> = (0..len).flat_map(|i| (i as u32).to_le_bytes()).collect();
            let offset = offset * 4;
            let layout = Layout { ssize_bytes: layout.ssize_bytes / 4 * 4, ..layout };
            let cuts = cut(&layout, offset, &content[..], call_max, piece_max);
            let mut seen = 0;
            for cut in &cuts {
                prop_assert!(cut.len <= call_max && cut.len > 0);
                let k = layout.position_of(cut.server).unwrap();
                let bytes: Vec<u8> = cut.slices.iter().flat_map(|s| s.iter().copied()).collect();
                prop_assert_eq!(bytes.len(), cut.len);
                for (i, byte) in bytes.iter().enumerate() {
                    let at = (layout.file_offset(k, cut.lane_offset + i as u64) - offset) as usize;
                    prop_assert_eq!(*byte, content[at]);
                    if let Some(max) = piece_max {
                        let first = (layout.file_offset(k, cut.lane_offset) - offset) as usize;
                        prop_assert_eq!(at / max, first / max);
                    }
                }
                seen += cut.len;
            }
            prop_assert_eq!(seen, content.len());
        }
    }
}
