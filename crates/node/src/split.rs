//! How a client's protocol cuts an application's request.

/// The pieces of a request when the wire takes at most `max_bytes` at once: (offset, length), in order. Pieces end at
/// multiples of `max_bytes`, as NFS clients cut them, so that neighbours' pieces fit together.
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
    fn an_nfs_client_of_8_kib() {
        let cut = |offset, len| pieces_of(offset, len, 8192).collect::<Vec<_>>();
        assert_eq!(cut(0, 16384), [(0, 8192), (8192, 8192)]);
        assert_eq!(cut(4096, 8192), [(4096, 4096), (8192, 4096)]);
        assert_eq!(cut(5, 0), []);
        assert_eq!(pieces_of(0, 1 << 30, u64::MAX).count(), 1);
    }
}
