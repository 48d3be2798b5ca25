//! Striping arithmetic: where the bytes of a file lie (server-side-scheduling-2002, 3.1).
//!
//! A file is cut into strips of `ssize_bytes`, distributed round robin over `pcount` of the cluster's data servers from
//! server `base` on, wrapping at the end of the ordered server list. Every data server stores its strips of a file
//! contiguously in one object: a byte has an offset in the file and a *lane offset* in its server's object. A
//! contiguous file range is one contiguous range on each server it touches.
//!
//! A file may skip servers: those that were being emptied, or were gone, when it was laid out. The ring has the others only.

mod skipped;

use serde::{Deserialize, Serialize};

pub use skipped::Skipped;

/// The distribution of one file over the data servers.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Index of the first data server.
    pub base: u16,
    /// Number of data servers, at least 1.
    pub pcount: u16,
    /// Strip size in bytes, at least 1.
    pub ssize_bytes: u32,
    /// Number of data servers in the cluster when the file was created: the size of the ring in which `base` counts.
    pub servers: u16,
    /// Those of them that the file does not use.
    pub skipped: Skipped,
}

/// Why a layout is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LayoutError {
    /// `base` names no server.
    #[error("base {base} names no data server: the cluster has {servers}; give 0 to {}", servers.saturating_sub(1))]
    Base {
        /// The value given.
        base: u16,
        /// Servers in the cluster.
        servers: u16,
    },
    /// `pcount` is zero or more than there are servers.
    #[error("pcount {pcount} is not between 1 and {servers}, the number of data servers")]
    Pcount {
        /// The value given.
        pcount: u16,
        /// Servers in the cluster.
        servers: u16,
    },
    /// `base` names a server that is skipped.
    #[error("base {base} names a data server that gets no files; give another")]
    Skips {
        /// The value given.
        base: u16,
    },
    /// A server is skipped that the ring does not have.
    #[error("data server {server} is skipped, but there are only {servers}")]
    Outside {
        /// The server.
        server: u16,
        /// Servers in the cluster.
        servers: u16,
    },
    /// `ssize_bytes` is out of range.
    #[error("strip size {ssize_bytes} is not between {min} and {max} bytes", min = Layout::SSIZE_MIN_BYTES, max = Layout::SSIZE_MAX_BYTES)]
    Ssize {
        /// The value given.
        ssize_bytes: u32,
    },
}

/// A piece of a file range that is contiguous on one server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Index of the data server in the cluster.
    pub server: u16,
    /// Offset in that server's object, bytes.
    pub lane_offset: u64,
    /// Offset in the file, bytes.
    pub file_offset: u64,
    /// Length, bytes.
    pub len: u64,
}

impl Layout {
    /// Default strip size.
    pub const SSIZE_DEFAULT_BYTES: u32 = 64 * 1024;
    /// Smallest strip size.
    pub const SSIZE_MIN_BYTES: u32 = 512;
    /// Largest strip size.
    pub const SSIZE_MAX_BYTES: u32 = 1 << 30;

    /// A checked layout.
    pub fn new(base: u16, pcount: u16, ssize_bytes: u32, servers: u16) -> Result<Layout, LayoutError> {
        if base >= servers {
            return Err(LayoutError::Base { base, servers });
        }
        if pcount == 0 || pcount > servers {
            return Err(LayoutError::Pcount { pcount, servers });
        }
        if !(Self::SSIZE_MIN_BYTES..=Self::SSIZE_MAX_BYTES).contains(&ssize_bytes) {
            return Err(LayoutError::Ssize { ssize_bytes });
        }
        Ok(Layout { base, pcount, ssize_bytes, servers, skipped: Skipped::NONE })
    }

    /// The same without some servers, which need not all be of the ring.
    pub fn without(self, skipped: Skipped) -> Result<Layout, LayoutError> {
        let skipped = skipped.below(self.servers);
        let layout = Layout { skipped, ..self };
        if self.pcount > layout.active() {
            return Err(LayoutError::Pcount { pcount: self.pcount, servers: layout.active() });
        }
        match skipped.contains(self.base) {
            true => Err(LayoutError::Skips { base: self.base }),
            false => Ok(layout),
        }
    }

    /// Number of servers of the ring that are not skipped.
    pub fn active(&self) -> u16 {
        self.servers.saturating_sub(self.skipped.len())
    }

    /// The default: all servers from the first on, 64 KiB strips.
    pub fn over_all(servers: u16) -> Result<Layout, LayoutError> {
        Layout::new(0, servers, Self::SSIZE_DEFAULT_BYTES, servers)
    }

    /// Checks a layout that came from outside (a frame, a file).
    pub fn check(&self) -> Result<(), LayoutError> {
        let whole = Layout::new(self.base, self.pcount, self.ssize_bytes, self.servers)?;
        // Arithmetic counts the skipped servers, so one outside the ring would stand for one of it.
        if let Some(server) = self.skipped.servers().iter().copied().find(|server| *server >= self.servers) {
            return Err(LayoutError::Outside { server, servers: self.servers });
        }
        whole.without(self.skipped).map(|_| ())
    }

    /// The cluster's server at position `k` of this file's ring.
    pub fn server_at(&self, k: u16) -> u16 {
        let base = u32::from(self.base - self.skipped.below_count(self.base));
        self.skipped.nth_other(((base + u32::from(k)) % u32::from(self.active())) as u16)
    }

    /// The position of a server in this file's ring, if the file uses it.
    pub fn position_of(&self, server: u16) -> Option<u16> {
        if server >= self.servers || self.skipped.contains(server) {
            return None;
        }
        let rank = |server| u32::from(server - self.skipped.below_count(server));
        let active = u32::from(self.active());
        let k = (rank(server) + active - rank(self.base)) % active;
        (k < u32::from(self.pcount)).then_some(k as u16)
    }

    /// The location of byte `offset` of the file: (server, lane offset).
    pub fn locate(&self, offset: u64) -> (u16, u64) {
        let ssize = u64::from(self.ssize_bytes);
        let strip = offset / ssize;
        let (row, k) = (strip / u64::from(self.pcount), strip % u64::from(self.pcount));
        (self.server_at(k as u16), row * ssize + offset % ssize)
    }

    /// The file offset of byte `lane_offset` of the object at ring position `k`.
    pub fn file_offset(&self, k: u16, lane_offset: u64) -> u64 {
        let ssize = u64::from(self.ssize_bytes);
        let strip = (lane_offset / ssize) * u64::from(self.pcount) + u64::from(k);
        strip.saturating_mul(ssize).saturating_add(lane_offset % ssize)
    }

    /// The strips of a file range, in file order.
    pub fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<> {
        let layout = *self;
        let end = offset.saturating_add(len);
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let (server, lane_offset) = layout.locate(at);
            let ssize = u64::from(layout.ssize_bytes);
            let len = (ssize - at % ssize).min(end - at);
            let piece = Piece { server, lane_offset, file_offset: at, len };
            at += len;
            Some(piece)
        })
    }

    /// The one contiguous lane range that each touched server holds of a file range, in the order in which the range
    /// first touches them. `file_offset` is the file offset of the lane range's first byte.
    pub fn lane_ranges(&self, offset: u64, len: u64) -> Vec<Piece> {
        let end = offset.saturating_add(len);
        let ssize = u64::from(self.ssize_bytes);
        let mut ranges = Vec::new();
        for piece in self.pieces(offset, len.min(ssize * u64::from(self.pcount))) {
            if ranges.iter().any(|r: &Piece| r.server == piece.server) {
                break;
            }
            // The first piece fixes the start; the lane's bytes below `end` fix the length.
            let Some(k) = self.position_of(piece.server) else { continue };
            let lane_end = self.lane_len(k, end);
            ranges.push(Piece { len: lane_end - piece.lane_offset, ..piece });
        }
        ranges
    }

    /// Length of the object at ring position `k` for a file of `file_len` bytes without holes at the end.
    pub fn lane_len(&self, k: u16, file_len: u64) -> u64 {
        let ssize = u64::from(self.ssize_bytes);
        let row = ssize * u64::from(self.pcount);
        let (rows, rest) = (file_len / row, file_len % row);
        rows * ssize + rest.saturating_sub(u64::from(k) * ssize).min(ssize)
    }

    /// Length of the file according to the object at ring position `k`, which has `lane_len` bytes.
    pub fn file_len(&self, k: u16, lane_len: u64) -> u64 {
        match lane_len.checked_sub(1) {
            Some(last) => self.file_offset(k, last).saturating_add(1),
            None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The figure of the paper's 3.1: six servers, base 2, pcount 3, 64 KiB.
    #[test]
    fn figure_2_of_the_paper() {
        let l = Layout::new(2, 3, 65536, 6).unwrap();
        assert_eq!(l.locate(0), (2, 0));
        assert_eq!(l.locate(65536), (3, 0));
        assert_eq!(l.locate(2 * 65536 + 5), (4, 5));
        assert_eq!(l.locate(3 * 65536), (2, 65536));
        assert_eq!(l.position_of(5), None);
        assert_eq!(l.position_of(1), None);
    }

    #[test]
    fn wraps_round_the_server_list() {
        let l = Layout::new(3, 3, 1024, 4).unwrap();
        assert_eq!(l.pieces(0, 4096).map(|p| p.server).collect::<Vec<_>>(), [3, 0, 1, 3]);
    }

    #[test]
    fn refuses_what_cannot_be() {
        assert!(matches!(Layout::new(4, 1, 65536, 4), Err(LayoutError::Base { .. })));
        assert!(matches!(Layout::new(0, 0, 65536, 4), Err(LayoutError::Pcount { .. })));
        assert!(matches!(Layout::new(0, 5, 65536, 4), Err(LayoutError::Pcount { .. })));
        assert!(matches!(Layout::new(0, 1, 0, 4), Err(LayoutError::Ssize { .. })));
        assert!(matches!(Layout::new(0, 1, 65536, 0), Err(LayoutError::Base { .. })));
    }

    #[test]
    fn skipped_servers_are_not_in_the_ring() {
        let skipped = Skipped::of([1, 4, 9]).unwrap();
        let l = Layout::new(3, 4, 1024, 6).unwrap().without(skipped).unwrap();
        assert_eq!(l.active(), 4, "server 9 is not of the ring");
        assert_eq!(l.pieces(0, 5 * 1024).map(|p| p.server).collect::<Vec<_>>(), [3, 5, 0, 2, 3]);
        assert_eq!(
            (l.position_of(1), l.position_of(4), l.position_of(9), l.position_of(2)),
            (None, None, None, Some(3))
        );
        let whole = Layout::new(3, 4, 1024, 6).unwrap();
        assert_eq!(whole.without(Skipped::of([3]).unwrap()), Err(LayoutError::Skips { base: 3 }));
        assert!(matches!(whole.without(Skipped::of([0, 1, 2]).unwrap()), Err(LayoutError::Pcount { servers: 3, .. })));
        let everything = Skipped::of(0..6).unwrap();
        assert!(Layout { skipped: everything, ..l }.check().is_err());
        let outside = Layout { skipped: Skipped::of([1, 9]).unwrap(), ..l };
        assert_eq!(outside.check(), Err(LayoutError::Outside { server: 9, servers: 6 }));
    }

    fn layouts() -> impl Strategy<Value = Layout> {
        (1u16..9, 512u32..70_000, proptest::collection::vec(any::<bool>(), 9)).prop_flat_map(
            |(servers, ssize, skips)| {
                let all = (0..servers).filter(|server| skips[usize::from(*server)]).take(usize::from(servers) - 1);
                let skipped = Skipped::of(all).unwrap();
                let used: Vec<u16> = (0..servers).filter(|server| !skipped.contains(*server)).collect();
                (proptest::sample::select(used.clone()), 1..=used.len() as u16).prop_map(move |(base, pcount)| {
                    Layout::new(base, pcount, ssize, servers).unwrap().without(skipped).unwrap()
                })
            },
        )
    }

    proptest! {
        /// Whatever a client sends: what passes the check has a server of its own at every position.
        #[test]
        fn a_checked_layout_names_each_server_once(
            (base, pcount, servers) in (0u16..6, 0u16..6, 0u16..6),
            skipped in proptest::collection::vec(0u16..8, 0..6),
        ) {
            let l = Layout { base, pcount, ssize_bytes: 512, servers, skipped: Skipped::of(skipped).unwrap() };
            if l.check().is_ok() {
                let used: std::collections::BTreeSet<u16> = (0..l.pcount).map(|k| l.server_at(k)).collect();
                prop_assert_eq!(used.len(), usize::from(l.pcount));
                prop_assert!(used.iter().all(|server| *server < l.servers && !l.skipped.contains(*server)));
            }
        }

        #[test]
        fn every_position_has_a_server_of_its_own_and_none_that_is_skipped(l in layouts()) {
            let mut servers: Vec<u16> = (0..l.pcount).map(|k| l.server_at(k)).collect();
            for (server, k) in servers.iter().zip(0..) {
                prop_assert_eq!(l.position_of(*server), Some(k));
                prop_assert!(*server < l.servers && !l.skipped.contains(*server));
            }
            servers.sort_unstable();
            servers.dedup();
            prop_assert_eq!(servers.len(), usize::from(l.pcount));
        }

        #[test]
        fn a_byte_goes_there_and_back(l in layouts(), offset in 0u64..1 << 40) {
            let (server, lane_offset) = l.locate(offset);
            let k = l.position_of(server).unwrap();
            prop_assert_eq!(l.file_offset(k, lane_offset), offset);
        }

        #[test]
        fn lane_ranges_hold_exactly_the_pieces(l in layouts(), offset in 0u64..1 << 24, len in 0u64..1 << 20) {
            let mut by_server = std::collections::BTreeMap::new();
            for p in l.pieces(offset, len) {
                let (start, sum) = by_server.entry(p.server).or_insert((p.lane_offset, 0));
                prop_assert_eq!(*start + *sum, p.lane_offset, "a lane's pieces are contiguous");
                *sum += p.len;
            }
            let ranges = l.lane_ranges(offset, len);
            prop_assert_eq!(ranges.len(), by_server.len());
            for r in ranges {
                prop_assert_eq!(by_server[&r.server], (r.lane_offset, r.len));
            }
        }

        #[test]
        fn a_file_length_survives_its_objects(l in layouts(), file_len in 0u64..1 << 30) {
            let seen = (0..l.pcount).map(|k| l.file_len(k, l.lane_len(k, file_len))).max().unwrap();
            prop_assert_eq!(seen, file_len);
            let sum: u64 = (0..l.pcount).map(|k| l.lane_len(k, file_len)).sum();
            prop_assert_eq!(sum, file_len);
        }
    }
}
