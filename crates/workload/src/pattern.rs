//! Which rank touches which bytes of which file, and in what order: the access patterns of the papers.
//!
//! A pattern covers every byte of its files exactly once over all ranks. A rank's bytes need not be a multiple of its
//! request size: its last request is then shorter.

use serde::{Deserialize, Serialize};

use crate::random::Shuffle;
use impresario_base::random::mix;

/// How the ranks of an application share its files.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// One shared file; every rank reads or writes its own contiguous segment.
    Contiguous,
    /// One shared file; the ranks' requests alternate: rank 0, rank 1, …, rank 0 again.
    Strided,
    /// A file of its own for every rank.
    FilePerProcess,
    /// One shared file; its blocks are distributed over the ranks by a seeded permutation.
    Random,
}

impl Shape {
    /// All shapes.
    pub const ALL: [Shape; 4] = [Shape::Contiguous, Shape::Strided, Shape::FilePerProcess, Shape::Random];

    /// As the command line writes it.
    pub fn name(self) -> &'static str {
        match self {
            Shape::Contiguous => "contiguous",
            Shape::Strided => "strided",
            Shape::FilePerProcess => "file-per-process",
            Shape::Random => "random",
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for Shape {
    type Err = String;
    fn from_str(text: &str) -> Result<Shape, String> {
        Shape::ALL
            .into_iter()
            .find(|s| s.name() == text)
            .ok_or_else(|| format!("there is no pattern {text:?}: contiguous, strided, file-per-process or random"))
    }
}

/// The accesses of one application.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Pattern {
    /// How files are shared.
    pub shape: Shape,
    /// Size of a request, bytes; at least 1.
    pub request_bytes: u64,
    /// Bytes that one rank touches; at least 1.
    pub process_bytes: u64,
    /// Number of ranks; at least 1.
    pub processes: u32,
    /// Of the permutation of `random`.
    pub seed: u64,
}

/// One request of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// Index of the file within the application.
    pub file: u32,
    /// Offset in it, bytes.
    pub offset: u64,
    /// Length, bytes; at least 1.
    pub len: u64,
}

/// A stretch of a file and the rank that accesses it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owned {
    /// Offset in the file, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u64,
    /// The rank.
    pub rank: u32,
}

impl Pattern {
    /// Whole requests of a rank.
    fn whole(&self) -> u64 {
        self.process_bytes / self.request_bytes
    }

    /// Bytes of a rank's last, shorter request; 0 when there is none.
    fn rest(&self) -> u64 {
        self.process_bytes % self.request_bytes
    }

    /// Requests of one rank.
    pub fn requests(&self) -> u64 {
        self.whole() + u64::from(self.rest() > 0)
    }

    /// Number of files.
    pub fn files(&self) -> u32 {
        if self.shape == Shape::FilePerProcess { self.processes } else { 1 }
    }

    /// Length of each of the files, bytes.
    pub fn file_bytes(&self) -> u64 {
        match self.shape {
            Shape::FilePerProcess => self.process_bytes,
            _ => self.total_bytes(),
        }
    }

    /// Bytes over all ranks.
    pub fn total_bytes(&self) -> u64 {
        self.process_bytes.saturating_mul(u64::from(self.processes))
    }

    /// The permutation of the whole blocks, for `random`.
    fn shuffle(&self) -> Shuffle {
        Shuffle::new((self.whole() * u64::from(self.processes)).max(1), mix(self.seed ^ 0x7061_7474_6572_6e73))
    }

    /// Request `index` of rank `rank`, in the order in which the rank makes them.
    pub fn access(&self, rank: u32, index: u64) -> Access {
        self.accesses_by(rank, index, || self.shuffle())
    }

    /// All requests of a rank in order.
    pub fn accesses(&self, rank: u32) -> impl Iterator<Item = Access> + use<> {
        let pattern = *self;
        let shuffle = self.shuffle();
        (0..self.requests()).map(move |index| pattern.accesses_by(rank, index, || shuffle))
    }

    fn accesses_by(&self, rank: u32, index: u64, shuffle: impl Fn() -> Shuffle) -> Access {
        let (r, p, size) = (u64::from(rank), u64::from(self.processes), self.request_bytes);
        let short = index == self.whole();
        let len = if short { self.rest() } else { size };
        let tail = self.whole() * p * size + r * self.rest();
        let (file, offset) = match self.shape {
            Shape::Contiguous => (0, r * self.process_bytes + index * size),
            Shape::FilePerProcess => (rank, index * size),
            Shape::Strided if short => (0, tail),
            Shape::Strided => (0, (index * p + r) * size),
            Shape::Random if short => (0, tail),
            Shape::Random => (0, shuffle().forward(r * self.whole() + index) * size),
        };
        Access { file, offset, len }
    }

    /// The rank that accesses the bytes from `offset` on, and how far. `offset` is within the file.
    fn owner(&self, file: u32, offset: u64, shuffle: &Shuffle) -> Owned {
        let (p, size) = (u64::from(self.processes), self.request_bytes);
        let striped = self.whole() * p * size;
        let (rank, end) = match self.shape {
            Shape::FilePerProcess => (u64::from(file), self.process_bytes),
            Shape::Contiguous => {
                let rank = offset / self.process_bytes;
                (rank, (rank + 1) * self.process_bytes)
            }
            Shape::Strided | Shape::Random if offset >= striped => {
                let rank = (offset - striped) / self.rest().max(1);
                (rank, striped + (rank + 1) * self.rest())
            }
            Shape::Strided => (offset / size % p, (offset / size + 1) * size),
            Shape::Random => (shuffle.backward(offset / size) / self.whole(), (offset / size + 1) * size),
        };
        Owned { offset, len: end - offset, rank: rank as u32 }
    }

    /// The ranks that access a range of a file, in file order.
    pub fn owners(&self, file: u32, offset: u64, len: u64) -> impl Iterator<Item = Owned> + use<> {
        let pattern = *self;
        let shuffle = self.shuffle();
        let end = offset.saturating_add(len).min(self.file_bytes());
        let mut at = offset;
        std::iter::from_fn(move || {
            if at >= end {
                return None;
            }
            let mut owned = pattern.owner(file, at, &shuffle);
            owned.len = owned.len.min(end - at);
            at += owned.len;
            Some(owned)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn patterns() -> impl Strategy<Value = Pattern> {
        (0usize..4, 1u64..40, 1u64..300, 1u32..9, any::<u64>()).prop_map(
            |(shape, request_bytes, process_bytes, processes, seed)| Pattern {
                shape: Shape::ALL[shape],
                request_bytes,
                process_bytes,
                processes,
                seed,
            },
        )
    }

    proptest! {
        #[test]
        fn every_byte_exactly_once_and_its_owner_known(p in patterns()) {
            let mut owners = vec![vec![None; p.file_bytes() as usize]; p.files() as usize];
            for rank in 0..p.processes {
                let mut bytes = 0;
                for (i, a) in p.accesses(rank).enumerate() {
                    prop_assert_eq!(a, p.access(rank, i as u64));
                    prop_assert!(a.len > 0 && a.len <= p.request_bytes);
                    for b in a.offset..a.offset + a.len {
                        prop_assert_eq!(owners[a.file as usize][b as usize].replace(rank), None);
                    }
                    bytes += a.len;
                }
                prop_assert_eq!(bytes, p.process_bytes);
            }
            for (file, bytes) in owners.iter().enumerate() {
                prop_assert!(bytes.iter().all(Option::is_some));
                let mut at = 0;
                for o in p.owners(file as u32, 0, u64::MAX) {
                    prop_assert_eq!(o.offset, at);
                    prop_assert!(bytes[at as usize..(at + o.len) as usize].iter().all(|r| *r == Some(o.rank)));
                    at += o.len;
                }
                prop_assert_eq!(at, p.file_bytes());
            }
        }
    }

    fn offsets(shape: Shape, rank: u32) -> Vec<u64> {
        let p = Pattern { shape, request_bytes: 16, process_bytes: 48, processes: 4, seed: 7 };
        p.accesses(rank).map(|a| a.offset).collect()
    }

    #[test]
    fn shapes_are_those_of_the_papers() {
        assert_eq!(offsets(Shape::Contiguous, 1), [48, 64, 80]);
        assert_eq!(offsets(Shape::Strided, 1), [16, 80, 144]);
        assert_eq!(offsets(Shape::FilePerProcess, 1), [0, 16, 32]);
        assert_ne!(offsets(Shape::Random, 1), offsets(Shape::Contiguous, 1));
        assert_eq!(offsets(Shape::Random, 1), offsets(Shape::Random, 1));
    }

    #[test]
    fn names_read_and_write_the_same() {
        for shape in Shape::ALL {
            assert_eq!(shape.name().parse::<Shape>(), Ok(shape));
        }
        assert!("zigzag".parse::<Shape>().unwrap_err().contains("strided"));
    }
}
