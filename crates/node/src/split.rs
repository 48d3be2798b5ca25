//! How a client's protocol and an I/O node split a request.

use impresario_layout::{Layout, Piece};

/// The request that the core of an I/O node that does not split gets for a file range, as in twins-2017: its lane is
/// the data server of the first byte, its offsets are those of the file.
pub fn whole_request(layout: &Layout, offset: u64, len: u64) -> Piece {
    Piece { server: layout.locate(offset).0, lane_offset: offset, file_offset: offset, len }
}

/// The requests that an I/O node's core gets for a file range: with `split` one per data server, with offsets in its
/// object, otherwise the [`whole_request`].
pub fn core_requests(layout: &Layout, offset: u64, len: u64, split: bool) -> impl Iterator<Item = Piece> {
    let (whole, parts) = match split {
        true => (None, layout.lane_ranges(offset, len)),
        false => (Some(whole_request(layout, offset, len)), Vec::new()),
    };
    whole.into_iter().chain(parts)
}

/// The pieces of a request if the wire takes at most `max_bytes` at once: (offset, length), in order. Pieces end at
/// multiples of `max_bytes`, as NFS clients split them, so that neighbours' pieces fit together.
pub fn pieces_of(offset: u64, len: u64, max_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    let (max, end) = (max_bytes.max(1), offset.saturating_add(len));
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let piece = (max - at % max).min(end - at);
        at += piece;
        Some((at - piece, piece))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_gets_one_request_or_one_for_each_server() {
        let layout = Layout::new(1, 2, 65_536, 4).unwrap();
        let of = |split| core_requests(&layout, 70_000, 100_000, split).collect::<Vec<_>>();
        assert_eq!(of(false), [Piece { server: 2, lane_offset: 70_000, file_offset: 70_000, len: 100_000 }]);
        assert_eq!(of(true), layout.lane_ranges(70_000, 100_000));
    }

    #[test]
    fn an_nfs_client_of_8_kib() {
        let cut = |offset, len| pieces_of(offset, len, 8192).collect::<Vec<_>>();
        assert_eq!(cut(0, 16384), [(0, 8192), (8192, 8192)]);
        assert_eq!(cut(4096, 8192), [(4096, 4096), (8192, 4096)]);
        assert_eq!(cut(5, 0), []);
        assert_eq!(pieces_of(0, 1 << 30, u64::MAX).count(), 1);
    }
}
