//! Which pages of a file are in memory, and which parts of a range are missing.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use impresario_base::page_cache::touched;
pub use impresario_base::page_cache::{CachedPages, cached_pages, page_bytes};

/// Where a range of as many pages is halved.
fn middle(range: &Range<u64>, page_bytes: u64) -> u64 {
    (range.start / page_bytes + touched(range, page_bytes) / 2) * page_bytes
}

/// Whether this process may ask of any file ([`cached_pages`]). Otherwise the kernel asks the file system whether we could
/// write to it, and some ask their server.
pub fn sees_all_pages() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::FOWNER))
}

/// As [`cached_pages`], for a range that is about to be brought in. Where the kernel keeps `cachestat` from us, single pages
/// are asked for without waiting (`RWF_NOWAIT`): an estimate. What is not there, the kernel may begin to read then, so no
/// further page is asked for after a missing one.
///
/// It does not tell whether a hint was followed: pages that are on their way do not count.
pub(super) fn pages_before(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<CachedPages> {
    match cached_pages(fd, range.clone()) {
        Err(e) if matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => sampled_pages(fd, range).ok_or(e),
        pages => pages,
    }
}

/// By a sample of pages; `None` where the file cannot be read without waiting.
fn sampled_pages(fd: BorrowedFd<'_>, range: Range<u64>) -> Option<CachedPages> {
    let (page_bytes, first) = (page_bytes(), range.start / page_bytes());
    let all = Some(touched(&range, page_bytes)).filter(|pages| *pages > 0)?;
    let (mut there, mut looked) = (0, 0);
    // The kernel reads little for a page in the middle; the first one might look like the beginning of a stream.
    for eighth in [3, 5, 7, 1] {
        looked += 1;
        let page = first + all * eighth / 8;
        if !is_byte_cached(fd, (page * page_bytes).max(range.start))? {
            break;
        }
        there += 1;
    }
    Some(CachedPages { cached: all * there / looked, all })
}

/// How often a range is looked at to tell its parts.
const LOOKS_MAX: u32 = 256;

/// The parts of a range that are neither in memory nor on the way into it, in order. Where that cannot be told, or takes too many
/// looks, what was not looked at is one of them.
pub(super) fn missing_parts(fd: BorrowedFd<'_>, range: Range<u64>) -> Vec<Range<u64>> {
    let (mut left, mut missing) = (vec![range], Vec::<Range<u64>>::new());
    let mut looks = 0;
    while let Some(part) = left.pop().filter(|part| !part.is_empty()) {
        looks += 1;
        let pages = if looks <= LOOKS_MAX { cached_pages(fd, part.clone()).ok() } else { None };
        match pages {
            Some(pages) if pages.complete() => {}
            Some(pages) if pages.cached > 0 => {
                let half = middle(&part, page_bytes());
                left.extend([half..part.end, part.start..half]);
            }
            _ => match missing.last_mut().filter(|last| last.end == part.start) {
                Some(last) => last.end = part.end,
                None => missing.push(part),
            },
        }
    }
    missing
}

/// Whether a range that is not empty is in memory: by `cachestat`, or, where that is not to be had, by asking for its first
/// and its last byte without waiting (`RWF_NOWAIT`, Linux 4.14), which says something of these two only and may make the
/// kernel begin to read. `None` where neither can be asked.
pub fn is_cached(fd: BorrowedFd<'_>, range: Range<u64>) -> Option<bool> {
    if let Ok(pages) = cached_pages(fd, range.clone()) {
        return Some(pages.complete());
    }
    Some(is_byte_cached(fd, range.start)? && is_byte_cached(fd, range.end.saturating_sub(1))?)
}

fn is_byte_cached(fd: BorrowedFd<'_>, at: u64) -> Option<bool> {
    let mut byte = [0u8; 1];
    let mut places = [io::IoSliceMut::new(&mut byte)];
    match rustix::io::preadv2(fd, &mut places, at, rustix::io::ReadWriteFlags::NOWAIT) {
        Ok(_) => Some(true),
        Err(rustix::io::Errno::AGAIN) => Some(false),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init, reason = "one range is a list, too")]

    use super::*;
    use std::io::Write;
    use std::os::fd::AsFd;

    #[test]
    fn pages_are_as_long_as_the_machine_has_them() {
        const MIB: u64 = 1 << 20;
        for page in [4 << 10, 16 << 10, 64 << 10] {
            assert_eq!((middle(&(0..MIB), page), middle(&(MIB + 5..MIB + 2 * page), page)), (MIB / 2, MIB + page));
        }
    }

    #[test]
    fn tells_what_is_in_memory() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 10_000]).unwrap();
        let pages = match cached_pages(file.as_fd(), 0..10_000) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => return,
            pages => pages.unwrap(),
        };
        assert_eq!(pages, CachedPages { cached: 3, all: 3 });
        assert_eq!(cached_pages(file.as_fd(), 4095..4097).unwrap().all, 2);
        assert!(is_cached(file.as_fd(), 0..10_000) != Some(false));
        assert!(is_byte_cached(file.as_fd(), 9_999) != Some(false), "asked without cachestat");
        let sampled = sampled_pages(file.as_fd(), 0..10_000);
        assert!(sampled.is_none_or(|sampled| sampled == pages), "{sampled:?}");
        assert_eq!(pages_before(file.as_fd(), 0..10_000).unwrap(), pages);
        assert_eq!(sampled_pages(file.as_fd(), 0..0), None);
        let beyond = cached_pages(file.as_fd(), 1 << 30..(1 << 30) + 4096).unwrap();
        assert_eq!((beyond.cached, beyond.of_bytes(4096)), (0, 0));
    }

    #[test]
    fn the_parts_that_are_missing_are_told() {
        const MIB: u64 = 1 << 20;
        let mut file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        file.sync_all().unwrap();
        let drop = |range: Range<u64>| {
            let len = std::num::NonZero::new(range.end - range.start);
            rustix::fs::fadvise(&file, range.start, len, rustix::fs::Advice::DontNeed).unwrap();
        };
        assert_eq!(missing_parts(file.as_fd(), 0..0), []);
        let gaps = [8192..12_288, MIB..2 * MIB, 3 * MIB + 4096..3 * MIB + 8192];
        gaps.iter().cloned().for_each(drop);
        let cached =
            |range: &Range<u64>| cached_pages(file.as_fd(), range.clone()).map_or(u64::MAX, |pages| pages.cached);
        if gaps.iter().any(|gap| cached(gap) > 0) || cached(&(0..4096)) != 1 {
            return impresario_testing::skip("cachestat", "no cachestat, or a file system whose pages stay");
        }
        assert_eq!(missing_parts(file.as_fd(), 0..4 * MIB), gaps);
        assert_eq!(missing_parts(file.as_fd(), 100..10_000), [8192..10_000]);
        assert_eq!(missing_parts(file.as_fd(), MIB + 5000..MIB + 6000), [MIB + 5000..MIB + 6000]);
        let (read, _write) = std::io::pipe().unwrap();
        assert_eq!(missing_parts(read.as_fd(), 0..100), [0..100], "nothing can be told");
    }

    /// What is not in memory is told as missing, by one page before a hint.
    #[test]
    fn a_sample_tells_what_is_missing() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        let Ok(CachedPages { cached: 0, all }) = cached_pages(file.as_fd(), 0..4 << 20) else {
            return impresario_testing::skip("cachestat", "no cachestat, or a file system whose pages stay");
        };
        let Some(before) = sampled_pages(file.as_fd(), 0..4 << 20) else { return };
        assert_eq!(before, CachedPages { cached: 0, all });
        let asked = cached_pages(file.as_fd(), 0..4 << 20).unwrap().cached;
        assert!(asked <= 32, "one page, and what the kernel reads with it: {asked}");
    }
}
