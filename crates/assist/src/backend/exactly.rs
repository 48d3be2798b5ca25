//! Reading what was asked for and nothing beside it.
//!
//! Where the kernel reads ahead it marks a page, and whoever reads that page by a call makes it go on, by a window that doubles
//! each time, whatever was advised for the open file (Linux, `page_cache_async_ra`). A reader beside the program would so
//! bring in some MiB for each 128 KiB that it wants. Faults of a map advised to be random leave the mark alone.

use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::Advice;

use super::cachestat::{PAGE_BYTES, cached_pages};

/// A part of a file in this process's memory.
struct Mapped {
    at: *mut libc::c_void,
    len: usize,
    /// Of the first byte that was asked for.
    skip: usize,
}

impl Mapped {
    fn new(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<Mapped> {
        let start = range.start / PAGE_BYTES * PAGE_BYTES;
        let len = usize::try_from(range.end.saturating_sub(start)).map_err(io::Error::other)?;
        let offset = libc::off_t::try_from(start).map_err(io::Error::other)?;
        let (read, private) = (libc::PROT_READ, libc::MAP_PRIVATE);
        // SAFETY: a new mapping where the kernel finds room. Nothing in this process refers to it but by system calls.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, read, private, fd.as_raw_fd(), offset) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let mapped = Mapped { at, len, skip: (range.start - start) as usize };
        mapped.advise(libc::MADV_RANDOM)?;
        Ok(mapped)
    }

    fn advise(&self, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: the range is this mapping.
        match unsafe { libc::madvise(self.at, self.len, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Waits until all of it is in memory (Linux 5.14).
    fn wait(&self) -> io::Result<()> {
        self.advise(libc::MADV_POPULATE_READ)
    }

    /// Copies it. By the kernel, since what another one cuts off the file meanwhile is an error there, and a signal here.
    fn copy(&self, to: &mut [u8]) -> io::Result<usize> {
        let len = to.len().min(self.len - self.skip);
        let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: len };
        let remote = libc::iovec { iov_base: self.at.wrapping_byte_add(self.skip), iov_len: len };
        // SAFETY: `local` is the first bytes of `to`; the other range is only read, by the kernel, which checks it.
        let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0) };
        usize::try_from(copied).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is unmapped once, and nothing refers to it.
        unsafe { libc::munmap(self.at, self.len) };
    }
}

/// Waits for a range that is on its way into memory. Fails where that cannot be known, or not all of it is on its way.
pub(super) fn wait_exactly(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<()> {
    on_its_way(fd, range)?.wait()
}

/// Reads at a place, as `pread` does; where this kernel or file system has no way to do so exactly, as `pread` does in all.
///
/// # Errors
/// Those of `pread`.
pub(crate) fn read_exactly(fd: BorrowedFd<'_>, at: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let range = at..at.saturating_add(bytes.len() as u64);
    let mapped = || {
        rustix::fs::fadvise(fd, at, Some(NonZero::new(range.end - at)?), Advice::WillNeed).ok()?;
        let mapped = on_its_way(fd, &range).ok()?;
        mapped.wait().ok()?;
        Some(mapped)
    };
    if let Some(mapped) = mapped()
        && let Ok(copied) = mapped.copy(bytes)
        && copied == bytes.len()
    {
        return Ok(copied);
    }
    Ok(rustix::io::pread(fd, bytes, at)?)
}

/// A range that memory has or will have. Of one that it has not, each page would be a request of its own.
fn on_its_way(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<Mapped> {
    if !cached_pages(fd, range.clone())?.complete() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Mapped::new(fd, range)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn cold_file() -> Option<tempfile::NamedTempFile> {
        let mut file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
        let bytes: Vec<u8> = (0..8 * MIB).map(|i| (i / 4096) as u8).collect();
        file.write_all(&bytes).unwrap();
        file.as_file().sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        let cold = cached_pages(file.as_fd(), 0..8 * MIB).is_ok_and(|pages| pages.cached == 0);
        if !cold {
            impresario_testing::skip("cachestat", "no cachestat, or a file system whose pages stay");
        }
        cold.then_some(file)
    }

    /// The program reads the beginning, behind which the kernel has marked a page. A call that reads on from there, even through
    /// an open file of its own that is read at random, would bring in more.
    #[test]
    fn what_was_not_asked_for_stays_out_of_memory() {
        let Some(file) = cold_file() else { return };
        let program = std::fs::File::open(file.path()).unwrap();
        let mut bytes = vec![0; 64 << 10];
        rustix::io::pread(&program, &mut bytes, 0).unwrap();
        let there = || cached_pages(file.as_fd(), 0..8 * MIB).unwrap().cached;
        // The kernel reads ahead of the program; where that ends the file is cold.
        let (ahead, own) = (there(), std::fs::File::open(file.path()).unwrap());
        assert!(ahead > 16 && ahead < 1024, "{ahead}");
        for at in (0..ahead * 4096).step_by(32 << 10) {
            let mut bytes = vec![0; 32 << 10];
            assert_eq!(read_exactly(own.as_fd(), at, &mut bytes).unwrap(), 32 << 10);
            assert!(bytes.iter().enumerate().all(|(i, byte)| *byte == ((at + i as u64) / 4096) as u8), "{at}");
        }
        assert!(there() <= ahead + 8, "{} pages after {ahead}", there());
        rustix::fs::fadvise(&own, 4 * MIB, NonZero::new(128 << 10), Advice::WillNeed).unwrap();
        wait_exactly(own.as_fd(), &(4 * MIB..4 * MIB + (128 << 10))).unwrap();
        assert!(there() <= ahead + 8 + 32, "{} pages after {ahead}", there());
        assert!(wait_exactly(own.as_fd(), &(6 * MIB..7 * MIB)).is_err(), "nobody brings that in");
    }

    #[test]
    fn the_end_of_a_file_is_told_as_by_pread() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[7; 5000]).unwrap();
        let mut bytes = [0; 6000];
        assert_eq!(read_exactly(file.as_fd(), 4000, &mut bytes).unwrap(), 1000);
        assert_eq!(read_exactly(file.as_fd(), 9000, &mut bytes).unwrap(), 0);
        assert_eq!(read_exactly(file.as_fd(), 100, &mut []).unwrap(), 0);
        assert_eq!(read_exactly(file.as_fd(), 100, &mut bytes[..1]).unwrap(), 1);
        let (read, _write) = std::io::pipe().unwrap();
        assert!(read_exactly(read.as_fd(), 0, &mut bytes).is_err());
    }
}
