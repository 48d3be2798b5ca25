//! mmap: a range of a file that will be read without further calls. munmap: a ring of io_uring that is let go.
//!
//! Memory allocators call mmap before anything else runs, so the real one is not looked for: the system call is made
//! directly, as the C library does.

use std::ffi::{c_int, c_void};

use impresario_interpose::Watched;
use impresario_ring::{Op, now_ns};
use libc::{off_t, size_t};
use rustix::mm::{MapFlags, ProtFlags};

use super::uring;
use crate::around::{set_errno, tell, wanted};
use crate::served;

unsafe fn map(
    place: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // The kernel takes pages; the C library refuses what is no multiple of them, and so does the kernel.
    let protection = ProtFlags::from_bits_retain(protection as u32);
    let flags = MapFlags::from_bits_retain(flags as u32);
    // SAFETY: used for this one call.
    let file = (fd >= 0).then(|| unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) });
    let result = match file {
        // SAFETY: the caller's arguments, for the call that the caller meant.
        Some(file) => unsafe { rustix::mm::mmap(place, len, protection, flags, file, offset as u64) },
        // SAFETY: as above.
        None => unsafe { without_file(place, len, protection, flags, offset) },
    };
    result.unwrap_or_else(|errno| {
        set_errno(errno.raw_os_error());
        libc::MAP_FAILED
    })
}

/// # Safety
/// As `mmap`.
unsafe fn without_file(
    place: *mut c_void,
    len: size_t,
    protection: ProtFlags,
    flags: MapFlags,
    offset: off_t,
) -> rustix::io::Result<*mut c_void> {
    let anonymous = libc::MAP_ANONYMOUS as u32;
    if flags.bits() & anonymous == 0 {
        return Err(rustix::io::Errno::BADF);
    }
    // The offset means nothing here, but one that is no multiple of a page is refused.
    if offset & 4095 != 0 {
        return Err(rustix::io::Errno::INVAL);
    }
    let rest = MapFlags::from_bits_retain(flags.bits() & !anonymous);
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mmap_anonymous(place, len, protection, rest) }
}

/// A map that is longer than one access can say is told of in parts.
const PART_BYTES: u64 = 1 << 30;
/// Maximum number of them.
const PARTS_MAX: usize = 1024;

fn tell_of(watched: Watched, offset: off_t, len_bytes: u64, start_ns: u64) {
    let end_ns = now_ns();
    for from in (0..len_bytes).step_by(PART_BYTES as usize).take(PARTS_MAX) {
        let part_bytes = (len_bytes - from).min(PART_BYTES);
        tell(watched, Op::Mmap, 0, offset.saturating_add(from as off_t), part_bytes, start_ns, end_ns);
    }
}

macro_rules! mmaps {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            place: *mut c_void,
            len: size_t,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: off_t,
        ) -> *mut c_void {
            if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 {
                // SAFETY: the caller's arguments.
                if let Some(place) = unsafe { served::map(place, len, protection, flags, fd, offset) } {
                    return place;
                }
            }
            let watched = if fd >= 0 && flags & libc::MAP_ANONYMOUS == 0 { wanted(fd, Op::Mmap) } else { None };
            let Some(watched) = watched else {
                // SAFETY: the caller's arguments.
                let result = unsafe { map(place, len, protection, flags, fd, offset) };
                if fd >= 0 && result != libc::MAP_FAILED {
                    uring::mapped(fd, offset, result);
                }
                return result;
            };
            let start_ns = now_ns();
            // SAFETY: the caller's arguments.
            let result = unsafe { map(place, len, protection, flags, fd, offset) };
            if result != libc::MAP_FAILED {
                tell_of(watched, offset, len as u64, start_ns);
            }
            result
        }
    )* };
}

mmaps! { mmap mmap64 }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn munmap(place: *mut c_void, len: size_t) -> c_int {
    uring::unmapping(place, len);
    // SAFETY: the caller's arguments, for the call that the caller meant.
    match unsafe { rustix::mm::munmap(place, len) } {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno.raw_os_error());
            -1
        }
    }
}
