//! Whether what is read stays in the kernel's page cache, and what is there now.
//!
//! Reads of some file systems go past the page cache, such as those of a FUSE file system with `direct_io`. The kernel
//! accepts advice for their files all the same, and fills pages that no read looks at: the device reads twice whatever is
//! read ahead. No file system reports this, so after a read the page cache is checked for what was just read.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering::Relaxed};

use impresario_base::page_cache::mapped_pages;

const UNKNOWN: u8 = 0;
const KEPT: u8 = 1;
const PAST: u8 = 2;
/// Reads between two checks: under memory pressure a page may be evicted at once.
const LOOK_READS: u32 = 256;

/// What reads have shown so far.
#[derive(Default)]
pub(super) struct Paging {
    state: AtomicU8,
    reads: AtomicU32,
    /// Reads cannot be told not to wait.
    never_at_once: AtomicBool,
}

impl Paging {
    /// Reads are known to leave nothing there.
    pub(super) fn past() -> Paging {
        Paging { state: AtomicU8::new(PAST), ..Paging::default() }
    }

    /// Reads leave what they read in the page cache.
    pub(super) fn is_kept(&self) -> bool {
        self.state.load(Relaxed) == KEPT
    }

    /// They do not.
    pub(super) fn is_past(&self) -> bool {
        self.state.load(Relaxed) == PAST
    }

    /// No read has shown it yet.
    pub(super) fn is_unknown(&self) -> bool {
        self.state.load(Relaxed) == UNKNOWN
    }

    /// No read with `RWF_NOWAIT` is possible.
    pub(super) fn never_at_once(&self) -> bool {
        self.never_at_once.load(Relaxed)
    }

    /// Such a read was refused.
    pub(super) fn reads_wait(&self) {
        self.never_at_once.store(true, Relaxed);
    }

    /// A read has just given the byte at `at`.
    pub(super) fn read(&self, open: impl AsFd, at: u64) {
        let nth = self.reads.fetch_add(1, Relaxed);
        if !self.is_unknown() && !nth.is_multiple_of(LOOK_READS) {
            return;
        }
        if let Some(pages) = mapped_pages(open.as_fd(), at..at.saturating_add(1)) {
            let (before, now) = (self.state.load(Relaxed), if pages.complete() { KEPT } else { PAST });
            self.state.store(now, Relaxed);
            if before == UNKNOWN && now == PAST {
                tracing::info!("reads of this file system go past the page cache: nothing is read ahead");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_read_shows_that_its_pages_are_kept() {
        let mut file = tempfile::tempfile().unwrap();
        rustix::io::pwrite(&file, &[1; 10_000], 0).unwrap();
        let paging = Paging::default();
        assert!(paging.is_unknown() && !paging.is_kept());
        file.read_exact(&mut [0; 5000]).unwrap();
        paging.read(&file, 4999);
        assert!(paging.is_kept() && !paging.is_past());
        // Looked at again only after some reads.
        paging.read(&file, 1 << 40);
        assert!(paging.is_kept());
        (0..LOOK_READS).for_each(|_| paging.read(&file, 1 << 40));
        assert!(paging.is_past());
    }
}
