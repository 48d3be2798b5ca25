//! Memory that begins at a page and that no heap owns: what direct transfers need, and what the kernel may keep pinned.

use std::ops::Range;
use std::ptr::{NonNull, null_mut};

use crate::{Errno, Result};

/// A mapping of its own, readable and writable, zero at first.
pub(super) struct Region {
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: the mapping is memory like any other, which no thread owns; who may touch which bytes is the users' matter.
unsafe impl Send for Region {}
// SAFETY: as above; through a shared region bytes are reached only by `bytes_of`, whose callers exclude one another.
unsafe impl Sync for Region {}

impl Region {
    /// A region of this length, a multiple of a page and not 0.
    pub(super) fn new(len_bytes: usize) -> Result<Region> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let mapped = unsafe { libc::mmap(null_mut(), len_bytes, protection, flags, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error().into());
        }
        // A child would copy what is pinned; nothing that the server starts looks at it.
        // SAFETY: the mapping made above.
        unsafe { libc::madvise(mapped, len_bytes, libc::MADV_DONTFORK) };
        let start = NonNull::new(mapped.cast()).ok_or(Errno(libc::ENOMEM))?;
        Ok(Region { start, len_bytes })
    }

    /// All of it.
    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the whole mapping, which is initialised and which this is the only way to while it is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }

    /// Some of its bytes. Panics unless the range lies in the region.
    ///
    /// # Safety
    /// Nothing else, the kernel included, may use these bytes while they are borrowed.
    #[allow(clippy::mut_from_ref)] // see Safety
    pub(super) unsafe fn bytes_of(&self, range: Range<usize>) -> &mut [u8] {
        assert!(range.start <= range.end && range.end <= self.len_bytes, "beyond the region");
        // SAFETY: inside the mapping; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().add(range.start), range.end - range.start) }
    }

    /// Where it lies, for the kernel.
    pub(super) fn as_iovec(&self) -> libc::iovec {
        libc::iovec { iov_base: self.start.as_ptr().cast(), iov_len: self.len_bytes }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`, to which no reference is left. What the kernel has pinned of it outlives it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len_bytes) };
    }
}
