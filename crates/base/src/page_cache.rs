//! What the kernel's page cache has of a file, asked for without reading.
//!
//! A read with `RWF_NOWAIT` that finds nothing there makes the kernel begin to read what is missing, on the way past any scheduler above
//! it. So such a read is made only of what is known to be there.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::null_mut;

use rustix::fs::{AtFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

/// Bytes of a page, as the kernel counts them: the machine's, which is 16 or 64 KiB on some.
pub fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Pages of this size that a range touches.
pub fn touched(range: &Range<u64>, page_bytes: u64) -> u64 {
    range.end.div_ceil(page_bytes).saturating_sub(range.start / page_bytes)
}

/// The same number on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;
/// Longest range that is asked for page by page.
const MAPPED_BYTES_MAX: u64 = 64 << 20;

#[repr(C)]
struct CachestatRange {
    off: u64,
    len: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    nr_cache: u64,
    nr_dirty: u64,
    nr_writeback: u64,
    nr_evicted: u64,
    nr_recently_evicted: u64,
}

/// How many pages of a range are in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CachedPages {
    /// Pages in memory, or on the way into it.
    pub cached: u64,
    /// Pages that the range touches.
    pub all: u64,
}

impl CachedPages {
    /// Whether all are there.
    pub fn complete(&self) -> bool {
        self.cached >= self.all
    }

    /// The bytes of `range_bytes` that are there, as nearly as pages tell.
    pub fn of_bytes(&self, range_bytes: u64) -> u64 {
        if self.complete() { range_bytes } else { (self.cached * page_bytes()).min(range_bytes) }
    }
}

/// Asks by `cachestat` (Linux 6.5) for a range that is not empty. Fails with `ENOSYS` on older kernels, with `EPERM` where the
/// kernel keeps it from users who could not write to the file, and for files without pages. Of a file of overlayfs it tells nothing:
/// its pages are another file's.
pub fn cached_pages(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<CachedPages> {
    let asked = CachestatRange { off: range.start, len: range.end.saturating_sub(range.start).max(1) };
    let mut stat = Cachestat::default();
    // SAFETY: the call reads and writes only the two structures, laid out as the kernel's.
    let result = unsafe { libc::syscall(SYS_CACHESTAT, fd.as_raw_fd(), &raw const asked, &raw mut stat, 0u32) };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(CachedPages { cached: stat.nr_cache, all: touched(&range, page_bytes()) })
}

/// The same by a mapping (`mincore`), on any kernel and file system; takes some µs, and NFS may ask its server before. `None` where the
/// kernel does not tell, and for more than 64 MiB. Of files that this process may not write, the kernel reports every page as cached.
pub fn mapped_pages(fd: BorrowedFd<'_>, range: Range<u64>) -> Option<CachedPages> {
    let (page_bytes, all) = (page_bytes(), touched(&range, page_bytes()));
    let start = libc::off_t::try_from(range.start / page_bytes * page_bytes).ok()?;
    let len_bytes =
        usize::try_from(all * page_bytes).ok().filter(|len| (1..=MAPPED_BYTES_MAX as usize).contains(len))?;
    // SAFETY: a new mapping at an address of the kernel's choice, which no pointer is made to: its bytes are never touched.
    let mapped = unsafe { libc::mmap(null_mut(), len_bytes, libc::PROT_READ, libc::MAP_SHARED, fd.as_raw_fd(), start) };
    if mapped == libc::MAP_FAILED {
        // A file that cannot share its pages has none.
        let has_none = io::Error::last_os_error().raw_os_error() == Some(libc::ENODEV);
        return has_none.then_some(CachedPages { cached: 0, all });
    }
    let mut resident = vec![0u8; all as usize];
    // SAFETY: the kernel writes one byte for each page of the mapping.
    let asked = unsafe { libc::mincore(mapped, len_bytes, resident.as_mut_ptr()) };
    // SAFETY: the mapping made above, which nothing else knows.
    unsafe { libc::munmap(mapped, len_bytes) };
    (asked == 0).then(|| CachedPages { cached: resident.iter().filter(|page| **page & 1 == 1).count() as u64, all })
}

/// A file's length as far as this machine knows it; the file system is not asked.
pub fn known_len_bytes(fd: BorrowedFd<'_>) -> Option<u64> {
    let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, "", how, StatxFlags::SIZE).ok().map(|stat| stat.stx_size)
}

fn read_at_once(fd: BorrowedFd<'_>, at: u64) -> Result<usize, Errno> {
    rustix::io::preadv2(fd, &mut [io::IoSliceMut::new(&mut [0])], at, ReadWriteFlags::NOWAIT)
}

/// Whether a file may be read with `RWF_NOWAIT`. Not on network file systems and FUSE, whose page cache none but [`cached_pages`] tells
/// of without asking them; nor on overlayfs, ZFS and tmpfs, whose files are in memory elsewhere.
pub fn reads_at_once(fd: BorrowedFd<'_>) -> bool {
    // No file reaches so far, so there is nothing to begin with.
    read_at_once(fd, i64::MAX as u64 - 1) != Err(Errno::OPNOTSUPP)
}

/// Whether a read of a range, as far as the file reaches, has to wait for the device. Reads nothing, asks no file system, and does not
/// wait. False where the kernel does not tell, and where no read with `RWF_NOWAIT` is possible.
pub fn is_missing(fd: BorrowedFd<'_>, range: Range<u64>) -> bool {
    if range.is_empty() {
        return false;
    }
    let told = cached_pages(fd, range.clone());
    if told.as_ref().is_ok_and(CachedPages::complete) || !reads_at_once(fd) {
        return false;
    }
    // The file may end within the range.
    let range = range.start..range.end.min(known_len_bytes(fd).unwrap_or(u64::MAX));
    if range.is_empty() {
        return false;
    }
    let pages = match told {
        Ok(told) => Some(CachedPages { all: touched(&range, page_bytes()), ..told }),
        Err(_) => mapped_pages(fd, range),
    };
    pages.is_some_and(|pages| !pages.complete())
}

/// Whether a byte can be read without waiting. Reads nothing from the device, asks no file system, and does not wait. `None` where the
/// kernel does not tell, and beyond the file's end. Where no read with `RWF_NOWAIT` is possible it never says that a byte is not there,
/// and that it is while it is on its way.
pub fn has_byte(fd: BorrowedFd<'_>, at: u64) -> Option<bool> {
    let range = at..at.checked_add(1)?;
    if is_missing(fd, range.clone()) {
        return Some(false);
    }
    match read_at_once(fd, at) {
        Ok(1) => Some(true),
        // On its way.
        Err(Errno::AGAIN) => Some(false),
        // The bytes may be elsewhere in memory; what is there is there.
        Err(Errno::OPNOTSUPP) => {
            let is_there = cached_pages(fd, range).is_ok_and(|pages| pages.complete());
            (is_there && known_len_bytes(fd).is_some_and(|len_bytes| at < len_bytes)).then_some(true)
        }
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn ranges_touch_pages() {
        for (page, pages) in [(4 << 10, 256), (16 << 10, 64), (64 << 10, 16)] {
            assert_eq!(
                [touched(&(0..1 << 20), page), touched(&(page - 1..page + 1), page), touched(&(5..5), page)],
                [pages, 2, 1]
            );
        }
    }

    #[test]
    fn what_is_in_memory_is_told() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 10_000]).unwrap();
        let [all, beyond] = [0..10_000, 1 << 30..(1 << 30) + 4096].map(|range| mapped_pages(file.as_fd(), range));
        let pages = page_bytes();
        assert_eq!(all, Some(CachedPages { cached: 10_000u64.div_ceil(pages), all: 10_000u64.div_ceil(pages) }));
        assert_eq!(beyond.map(|pages| (pages.cached, pages.of_bytes(4096))), Some((0, 0)));
        if let Ok(told) = cached_pages(file.as_fd(), 0..10_000) {
            assert_eq!(Some(told), all);
        }
        for range in [0..10_000, 9_000..1 << 20, 10_000..20_000, 1 << 30..1 << 31, 0..0] {
            assert!(!is_missing(file.as_fd(), range.clone()), "nothing of {range:?} is on the device alone");
        }
        let has = [0, 9_999, 10_000].map(|at| has_byte(file.as_fd(), at));
        let is_told = reads_at_once(file.as_fd());
        assert!(has == [Some(true), Some(true), None] || !is_told && !has.contains(&Some(false)), "{has:?}");
        // A pipe has neither pages nor places.
        let (pipe, _writer) = io::pipe().unwrap();
        assert_eq!(mapped_pages(pipe.as_fd(), 0..1), Some(CachedPages { cached: 0, all: 1 }));
        assert_eq!(mapped_pages(pipe.as_fd(), 0..1 << 40), None);
    }

    /// A read with `RWF_NOWAIT` does begin: whoever asks before must not.
    #[test]
    fn asking_reads_nothing() {
        let mut file: File = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all(&vec![1; 4 << 20]).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let cached = || mapped_pages(file.as_fd(), 0..4 << 20).map(|pages| pages.cached);
        if cached() != Some(0) || !reads_at_once(file.as_fd()) {
            return impresario_testing::skip("page cache", "a file system whose pages stay, or are not told of");
        }
        assert!(is_missing(file.as_fd(), 1 << 20..2 << 20) && is_missing(file.as_fd(), (4 << 20) - 1..5 << 20));
        assert_eq!([0, 4 << 20].map(|at| has_byte(file.as_fd(), at)), [Some(false), None]);
        assert_eq!(cached(), Some(0));
    }
}
