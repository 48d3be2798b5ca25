//! The accesses of an application's processes: where each request goes.

use crate::model::{Application, Operation, Pattern};
use impresario_base::random::mix;

/// One access of a process: `regions` extents of equal length at equal distances in one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    /// Index among the application's files.
    pub(crate) file: u32,
    pub(crate) op: Operation,
    pub(crate) offset: u64,
    /// Length of an extent, bytes.
    pub(crate) len: u64,
    /// Distance from one extent's start to the next.
    pub(crate) stride: u64,
    pub(crate) count: u32,
}

impl Access {
    /// Total bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.len * u64::from(self.count)
    }

    /// First byte after the last extent.
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.count.saturating_sub(1)) * self.stride + self.len
    }

    /// The extents: (offset, length).
    pub(crate) fn extents(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let Access { offset, len, stride, count, .. } = *self;
        (0..u64::from(count)).map(move |i| (offset + i * stride, len))
    }
}

/// A pseudo-random permutation of `0..n` without a table: a Feistel network of four rounds over the smallest power of
/// four that covers the range, repeated until the number is below `n` (J. Black and P. Rogaway, *Ciphers with arbitrary
/// finite domains*, 2002, sections 4 and 5).
pub(crate) fn shuffled(i: u64, n: u64, seed: u64) -> u64 {
    let half = (64 - n.saturating_sub(1).leading_zeros()).div_ceil(2).max(1);
    let mask = (1u64 << half) - 1;
    let mut x = i;
    loop {
        let (mut left, mut right) = (x >> half, x & mask);
        for round in 0..4u64 {
            (left, right) = (right, left ^ (mix(seed ^ mix(right ^ round << 60)) & mask));
        }
        x = left << half | right;
        if x < n {
            return x;
        }
    }
}

/// The `i`-th request of a process. Not for traces.
pub(crate) fn nth(a: &Application, rank: u32, i: u64, seed: u64) -> Access {
    let (size, regions) = (a.request_bytes, u64::from(a.regions.max(1)));
    let (processes, rank) = (u64::from(a.processes), u64::from(rank));
    let one = |file, offset, len| Access { file, op: a.op, offset, len, stride: len, count: 1 };
    let whole = size * regions;
    match a.pattern {
        Pattern::Contiguous => one(0, (rank * a.requests + i) * whole, whole),
        Pattern::FilePerProcess => one(rank as u32, i * whole, whole),
        Pattern::Strided | Pattern::Trace => Access {
            file: 0,
            op: a.op,
            offset: (i * regions * processes + rank) * size,
            len: size,
            stride: processes * size,
            count: regions as u32,
        },
        Pattern::Random => {
            // A request of several regions takes that many consecutive blocks of the shuffled file, at one block's
            // position.
            let blocks = processes * a.requests;
            one(0, shuffled(rank * a.requests + i, blocks, seed) * whole, whole)
        }
        Pattern::Runs => {
            // Two runs together are as long as the longest run.
            let (blocks, longest) = (processes * a.requests, a.run_requests.max(1));
            let of = |number: u64| mix(seed ^ mix((rank << 40) ^ (i / longest) ^ (number << 60)));
            let (at, first_ends) = (i % longest, of(1) % longest);
            let (start, nth) = if at < first_ends { (of(2), at) } else { (of(3), at - first_ends) };
            one(0, start.wrapping_add(nth) % blocks * whole, whole)
        }
    }
}

/// Length of one of an application's files, bytes.
pub(crate) fn file_len(a: &Application, file: u32) -> u64 {
    let whole = a.request_bytes * u64::from(a.regions.max(1)) * a.requests;
    match a.pattern {
        Pattern::FilePerProcess => whole,
        Pattern::Trace => {
            a.trace.iter().filter(|t| t.file == file).map(|t| t.offset.saturating_add(t.len)).max().unwrap_or(0)
        }
        _ => whole * u64::from(a.processes),
    }
}

/// The number of files of an application.
pub(crate) fn files(a: &Application) -> u32 {
    match a.pattern {
        Pattern::FilePerProcess => a.processes,
        Pattern::Trace => a.trace.iter().map(|t| t.file + 1).max().unwrap_or(1),
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn application(pattern: Pattern, regions: u32) -> Application {
        Application { pattern, processes: 3, request_bytes: 100, requests: 4, regions, ..Application::default() }
    }

    #[test]
    fn every_byte_is_requested_once() {
        for pattern in [Pattern::Contiguous, Pattern::Strided, Pattern::Random, Pattern::FilePerProcess] {
            for regions in [1, 5] {
                let a = application(pattern, regions);
                let mut blocks: Vec<(u32, u64)> = Vec::new();
                for rank in 0..3 {
                    for i in 0..4 {
                        let access = nth(&a, rank, i, 9);
                        assert_eq!(access.bytes(), 100 * u64::from(regions));
                        for (offset, len) in access.extents() {
                            blocks.extend((offset / 100..(offset + len) / 100).map(|b| (access.file, b)));
                        }
                        assert!(access.end() <= file_len(&a, access.file));
                    }
                }
                blocks.sort_unstable();
                let per_file = (12 * u64::from(regions)) / u64::from(files(&a));
                let all: Vec<_> = (0..files(&a)).flat_map(|f| (0..per_file).map(move |b| (f, b))).collect();
                assert_eq!(blocks, all, "{pattern:?}");
            }
        }
    }

    #[test]
    fn runs_are_sequential_and_end() {
        let a = Application { requests: 1000, run_requests: 8, ..application(Pattern::Runs, 1) };
        let blocks: Vec<u64> = (0..1000).map(|i| nth(&a, 2, i, 5).offset / 100).collect();
        assert!(blocks.iter().all(|block| *block < 3000));
        let on = blocks.windows(2).filter(|w| w[1] == w[0] + 1).count();
        assert!((700..900).contains(&on), "{on}");
        let longest = blocks.chunk_by(|a, b| *b == a + 1).map(<[u64]>::len).max();
        assert!(longest.is_some_and(|longest| (7..=16).contains(&longest)), "{longest:?}");
        assert!(blocks.windows(2).any(|w| w[1] < w[0]), "some go back");
    }

    #[test]
    fn a_strided_call_takes_every_third_block() {
        let access = nth(&application(Pattern::Strided, 4), 1, 1, 0);
        assert_eq!(access.extents().map(|e| e.0).collect::<Vec<_>>(), [1300, 1600, 1900, 2200]);
    }

    proptest! {
        #[test]
        fn a_shuffle_is_a_permutation(n in 1u64..3000, seed: u64) {
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                prop_assert!(!std::mem::replace(&mut seen[shuffled(i, n, seed) as usize], true));
            }
        }
    }

    #[test]
    fn a_shuffle_reorders() {
        let fixed = (0..1000).filter(|i| shuffled(*i, 1000, 1) == *i).count();
        let same = (0..1000).filter(|i| shuffled(*i, 1000, 1) == shuffled(*i, 1000, 2)).count();
        assert!(fixed < 20 && same < 20, "{fixed} {same}");
    }
}
