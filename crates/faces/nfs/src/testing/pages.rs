//! Which pages of a file system in memory count as cached: a page cache in front of a device that is not there.

use std::collections::BTreeSet;
use std::ops::Range;

const PAGE_BYTES: u64 = 4096;

/// The cached pages of all files, and what was asked to be brought in before it is read.
#[derive(Default)]
pub(super) struct Pages {
    cached: BTreeSet<(u64, u64)>,
    advised: Vec<Range<u64>>,
}

impl Pages {
    /// Bytes of a file come into the cache.
    pub(super) fn bring(&mut self, file: u64, bytes: Range<u64>) {
        self.cached.extend((bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES)).map(|page| (file, page)));
    }

    /// The same, before they are read.
    pub(super) fn advise(&mut self, file: u64, bytes: Range<u64>) {
        self.bring(file, bytes.clone());
        self.advised.push(bytes);
    }

    /// All these bytes of a file are cached.
    pub(super) fn have(&self, file: u64, bytes: Range<u64>) -> bool {
        (bytes.start / PAGE_BYTES..bytes.end.div_ceil(PAGE_BYTES)).all(|page| self.cached.contains(&(file, page)))
    }

    /// The cache is empty.
    pub(super) fn drop_all(&mut self) {
        self.cached.clear();
    }

    /// What was advised since the last call.
    pub(super) fn take_advised(&mut self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.advised)
    }
}
