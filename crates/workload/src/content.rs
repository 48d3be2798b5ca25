//! The content of every byte of a benchmark's files: a function of (run nonce, file, writer, generation, offset).
//!
//! Any aligned 8-byte word is computed from its position alone, so a reader checks any range without knowing what was
//! written before. A word of another offset, file, writer, generation or run differs, so a dropped, moved or stale
//! block is detected.

use serde::{Deserialize, Serialize};

use impresario_base::random::mix;

/// The identity of content.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Source {
    /// Random for every run.
    pub nonce: u64,
    /// The file within the run.
    pub file: u64,
    /// The rank that wrote.
    pub writer: u32,
    /// Incremented whenever the same bytes are written again.
    pub generation: u32,
}

/// The first difference between content and expectation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error(
    "byte {offset} of file {file:#x}: wanted {wanted:#04x}, found {found:#04x} (writer {writer}, generation {generation})"
)]
pub struct Mismatch {
    /// The file within the run.
    pub file: u64,
    /// Offset of the byte.
    pub offset: u64,
    /// The expected value.
    pub wanted: u8,
    /// The actual value.
    pub found: u8,
    /// The expected writer.
    pub writer: u32,
    /// The expected generation.
    pub generation: u32,
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

impl Source {
    fn base(&self) -> u64 {
        let who = u64::from(self.writer) << 32 | u64::from(self.generation);
        mix(mix(mix(self.nonce ^ 0x0063_6f6e_7465_6e74).wrapping_add(self.file) ^ STEP).wrapping_add(who) ^ STEP)
    }

    /// Fills a buffer with the content of the bytes from `offset` on.
    pub fn fill(&self, offset: u64, buffer: &mut [u8]) {
        let base = self.base();
        let (head, body) = buffer.split_at_mut(head_len(offset).min(buffer.len()));
        copy_within_word(base, offset, head);
        let mut at = offset + head.len() as u64;
        let mut words = body.chunks_exact_mut(8);
        for chunk in &mut words {
            chunk.copy_from_slice(&word(base, at / 8).to_le_bytes());
            at += 8;
        }
        copy_within_word(base, at, words.into_remainder());
    }

    /// The first position where a buffer, read from `offset`, differs from the expectation.
    pub fn check(&self, offset: u64, buffer: &[u8]) -> Result<(), Mismatch> {
        let base = self.base();
        let (head, body) = buffer.split_at(head_len(offset).min(buffer.len()));
        let start = offset + head.len() as u64;
        // Blocks of words are folded into one comparison, which the compiler turns into straight-line code.
        let mut differs = !same_within_word(base, offset, head);
        let mut index = start / 8;
        let mut blocks = body.chunks_exact(64);
        for block in &mut blocks {
            let mut fold = 0;
            for (lane, chunk) in block.chunks_exact(8).enumerate() {
                fold |= le_word(chunk) ^ word(base, index + lane as u64);
            }
            if fold != 0 {
                differs = true;
                break;
            }
            index += 8;
        }
        for chunk in blocks.remainder().chunks(8) {
            differs |= !same_within_word(base, index * 8, chunk);
            index += 1;
        }
        if differs { Err(self.locate(offset, buffer)) } else { Ok(()) }
    }

    /// Finds the first differing byte; `check` has established that there is one.
    fn locate(&self, offset: u64, buffer: &[u8]) -> Mismatch {
        let mut wanted = vec![0; buffer.len()];
        self.fill(offset, &mut wanted);
        let at = wanted.iter().zip(buffer).position(|(w, b)| w != b).unwrap_or(0);
        Mismatch {
            file: self.file,
            offset: offset + at as u64,
            wanted: wanted.get(at).copied().unwrap_or(0),
            found: buffer.get(at).copied().unwrap_or(0),
            writer: self.writer,
            generation: self.generation,
        }
    }
}

/// The word at `index` words from the start of the file.
#[inline(always)]
fn word(base: u64, index: u64) -> u64 {
    let z = base.wrapping_add(index.wrapping_mul(STEP));
    let z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    z ^ (z >> 29)
}

#[inline(always)]
fn le_word(chunk: &[u8]) -> u64 {
    chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte))
}

/// Bytes until the next word boundary.
fn head_len(offset: u64) -> usize {
    (8 - offset % 8) as usize % 8
}

/// Fills a range that lies within one word.
fn copy_within_word(base: u64, offset: u64, out: &mut [u8]) {
    let bytes = word(base, offset / 8).to_le_bytes();
    for (byte, from) in out.iter_mut().zip(bytes.into_iter().skip((offset % 8) as usize)) {
        *byte = from;
    }
}

fn same_within_word(base: u64, offset: u64, buffer: &[u8]) -> bool {
    let bytes = word(base, offset / 8).to_le_bytes();
    buffer.iter().copied().eq(bytes.into_iter().skip((offset % 8) as usize).take(buffer.len()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn source() -> Source {
        Source { nonce: 1, file: 2, writer: 3, generation: 4 }
    }

    proptest! {
        #[test]
        fn any_range_is_computed_alone_and_checks(offset in 0u64..1000, len in 0usize..400) {
            let mut whole = vec![0; 1500];
            source().fill(0, &mut whole);
            let mut part = vec![0; len];
            source().fill(offset, &mut part);
            prop_assert_eq!(&part[..], &whole[offset as usize..offset as usize + len]);
            prop_assert_eq!(source().check(offset, &part), Ok(()));
        }

        #[test]
        fn a_flipped_bit_is_found_where_it_is(offset in 0u64..1000, len in 1usize..400, at in 0usize..400, bit in 0u8..8) {
            let at = at % len;
            let mut buffer = vec![0; len];
            source().fill(offset, &mut buffer);
            buffer[at] ^= 1 << bit;
            let found = source().check(offset, &buffer).unwrap_err();
            prop_assert_eq!(found.offset, offset + at as u64);
            prop_assert_eq!(found.found, buffer[at]);
        }
    }

    #[test]
    fn any_other_source_or_place_differs() {
        let mut buffer = vec![0; 4096];
        source().fill(8192, &mut buffer);
        let s = source();
        for other in [
            Source { nonce: 9, ..s },
            Source { file: 9, ..s },
            Source { writer: 9, ..s },
            Source { generation: 5, ..s },
            Source { writer: 4, generation: 3, ..s },
        ] {
            // None of 512 words agrees: detection does not depend on luck.
            let mut theirs = vec![0; 4096];
            other.fill(8192, &mut theirs);
            assert!(buffer.chunks(8).zip(theirs.chunks(8)).all(|(a, b)| a != b), "{other:?}");
            assert!(other.check(8192, &buffer).is_err());
        }
        assert!(source().check(8200, &buffer).is_err());
        assert!(source().check(0, &buffer).is_err());
        assert!(source().check(8192, &vec![0; 4096]).is_err());
    }
}
