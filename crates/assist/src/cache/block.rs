//! One block of a file, as held for its readers.

use std::ops::Range;

use super::coverage::Coverage;

#[derive(Debug)]
pub(super) struct Block {
    /// Readers that hold it.
    pub(super) holders: u32,
    /// It is read once: released as soon as its reader has left it.
    pub(super) once: bool,
    /// Its data was in memory before it was asked for.
    pub(super) foreign: bool,
    /// What was asked to be brought in; empty for a block that was read by its reader itself.
    asked: Vec<Range<u64>>,
    asked_bytes: u64,
    used: Coverage,
}

impl Block {
    pub(super) fn new(asked: Vec<Range<u64>>, once: bool) -> Block {
        let asked_bytes = asked.iter().map(|p| p.end - p.start).sum();
        Block { holders: 1, once, foreign: false, asked, asked_bytes, used: Coverage::default() }
    }

    pub(super) fn asked_bytes(&self) -> u64 {
        self.asked_bytes
    }

    pub(super) fn used_bytes(&self) -> u64 {
        self.used.covered_bytes()
    }

    /// Bytes were read. How many of those asked for were read for the first time.
    pub(super) fn used(&mut self, read: &Range<u64>) -> u64 {
        let before = self.used.covered_bytes();
        for piece in &self.asked {
            let part = read.start.max(piece.start)..read.end.min(piece.end);
            if part.start < part.end {
                self.used.add(part);
            }
        }
        self.used.covered_bytes() - before
    }
}
