//! The space that an object takes: storage had before it is written, holes made, data and holes found.

use std::io;
use std::ops::Range;

use crate::filesystem::{FileState, FileSystem};
use crate::objects::{ObjectStore, too_large};

/// So much of an object with checksums is punched at once: what is kept of its blocks meanwhile takes some MiB.
const PUNCH_BYTES: u64 = 1 << 30;

impl<F: FileSystem> ObjectStore<F> {
    /// Gives every byte of a range storage; creates the object, unless it was removed. Without `keep_size` the object
    /// becomes at least as long as the range's end.
    pub fn allocate(&self, key: u64, range: Range<u64>, keep_size: bool) -> io::Result<()> {
        check(&range)?;
        // No byte changes, and zeros at the end change no checksum.
        let allocated = self.fs.allocate(&*self.existing_or_new(key)?, range.clone(), keep_size);
        // Who copies the object sees its length change at most, which any note tells.
        self.note_change(key, range.end.saturating_sub(1)..range.end);
        allocated
    }

    /// Makes a range zeros that take no storage. A missing object has none; of a removed one it is EIDRM.
    pub fn punch(&self, key: u64, range: Range<u64>) -> io::Result<()> {
        check(&range)?;
        let Some(file) = self.unless_removed(key)? else { return Ok(()) };
        let punched = self.punch_file(key, &file, range.clone());
        // Behind the end nothing is to be seen of it.
        let end = self.fs.stat(&file).map_or(range.end, |state| range.end.min(state.size));
        self.note_change(key, range.start..end);
        punched
    }

    fn punch_file(&self, key: u64, file: &F::File, range: Range<u64>) -> io::Result<()> {
        let Some(checks) = &self.checks else { return self.fs.punch(file, range) };
        let end = self.fs.stat(file)?.size.clamp(range.start, range.end);
        let mut at = range.start;
        while at < end {
            let next = end.min((at / PUNCH_BYTES + 1) * PUNCH_BYTES);
            self.change_checked(checks, (key, file), at..next, || self.fs.punch(file, at..next))?;
            at = next;
        }
        // Behind the end there are no bytes, but there may be storage.
        self.fs.punch(file, at..range.end)
    }

    /// Makes a range zeros that have storage.
    pub fn zero(&self, key: u64, range: Range<u64>, keep_size: bool) -> io::Result<()> {
        self.punch(key, range.clone())?;
        self.allocate(key, range, keep_size)
    }

    /// The first byte from `from` on that is data, or in a hole, of which the end of the object is one; and the state of the
    /// object, if there is one.
    pub fn seek(&self, key: u64, from: u64, data: bool) -> io::Result<(Option<u64>, Option<FileState>)> {
        let Some(file) = self.unless_removed(key)? else { return Ok(((!data).then_some(from), None)) };
        // First: what is written meanwhile may be found, but nothing is missed that was there before.
        let state = self.fs.stat(&file)?;
        let at = match data {
            _ if from >= state.size => (!data).then_some(from),
            true => self.fs.next_data(&file, from)?,
            false => Some(self.fs.next_hole(&file, from)?),
        };
        Ok((at, Some(state)))
    }
}

fn check(range: &Range<u64>) -> io::Result<()> {
    if i64::try_from(range.end).is_ok() { Ok(()) } else { Err(too_large()) }
}
