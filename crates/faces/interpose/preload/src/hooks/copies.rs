//! sendfile, copy_file_range, splice: the kernel reads one descriptor and writes another.

use std::ffi::{c_int, c_uint};

use impresario_interpose::Watched;
use impresario_ring::{Op, flag, now_ns};
use libc::{off_t, size_t, ssize_t};

use crate::around::{position, tell, wanted};
use crate::real::missing;
use crate::served::{SERVED, fail};
use crate::{TABLE, real};

/// Where a side of the copy begins: at the offset that the caller points to, which the call moves, or at the position.
fn side(fd: c_int, op: Op, offset: *mut off_t) -> Option<(Watched, Option<off_t>)> {
    let watched = wanted(fd, op)?;
    // SAFETY: the caller passed a place of this type, or none; one that cannot be read is refused by the kernel and
    // would end the program here. So it is asked for by the kernel: see `peek`.
    Some((watched, if offset.is_null() { None } else { Some(peek(offset)?) }))
}

/// Reads the caller's number without trusting its place.
fn peek(place: *const off_t) -> Option<off_t> {
    let mut value: off_t = 0;
    let size = size_of::<off_t>();
    let local = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: size };
    let remote = libc::iovec { iov_base: place.cast_mut().cast(), iov_len: size };
    // SAFETY: copies from this process's own memory into `value`, and fails when the place cannot be read.
    let done = impresario_interpose::quietly(|| unsafe {
        libc::process_vm_readv(std::process::id() as c_int, &local, 1, &remote, 1, 0)
    });
    (done == size as ssize_t).then_some(value)
}

fn done(side: Option<(Watched, Option<off_t>)>, op: Op, bytes: ssize_t, start_ns: u64, end_ns: u64) {
    let Some((watched, offset)) = side else { return };
    let start = match offset {
        Some(offset) => Some(offset),
        None => position(watched.fd()).map(|p| {
            TABLE.set_position(watched, p);
            p as off_t - bytes as off_t
        }),
    };
    if let Some(start) = start {
        tell(watched, op, flag::IN_KERNEL, start, bytes as u64, start_ns, end_ns);
    }
}

#[inline(always)]
fn copy(
    (from, from_at): (c_int, *mut off_t),
    (to, to_at): (c_int, *mut off_t),
    real: impl FnOnce() -> ssize_t,
) -> ssize_t {
    let (read, write) = (side(from, Op::Read, from_at), side(to, Op::Write, to_at));
    if read.is_none() && write.is_none() {
        return real();
    }
    let start_ns = now_ns();
    let bytes = real();
    if bytes > 0 {
        let end_ns = now_ns();
        done(read, Op::Read, bytes, start_ns, end_ns);
        done(write, Op::Write, bytes, start_ns, end_ns);
    }
    bytes
}

macro_rules! sendfiles {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(to: c_int, from: c_int, offset: *mut off_t, count: size_t) -> ssize_t {
            if SERVED.open_file(from).or_else(|| SERVED.open_file(to)).is_some() {
                // Programs copy by reading and writing then.
                return fail(libc::EINVAL) as ssize_t;
            }
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            // SAFETY: the caller's arguments.
            copy((from, offset), (to, std::ptr::null_mut()), || unsafe { real(to, from, offset, count) })
        }
    )* };
}

sendfiles! { sendfile sendfile64 }

macro_rules! ranges {
    ($($name:ident $errno:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            from: c_int,
            from_at: *mut off_t,
            to: c_int,
            to_at: *mut off_t,
            count: size_t,
            flags: c_uint,
        ) -> ssize_t {
            if SERVED.open_file(from).or_else(|| SERVED.open_file(to)).is_some() {
                return fail(libc::$errno) as ssize_t;
            }
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            // SAFETY: the caller's arguments.
            copy((from, from_at), (to, to_at), || unsafe { real(from, from_at, to, to_at, count, flags) })
        }
    )* };
}

ranges! { copy_file_range EXDEV splice EINVAL }
