//! write, pwrite, writev, pwritev, pwritev2, and their 64-bit variants. Told only when everything is recorded.

use std::ffi::{c_int, c_void};

use impresario_ring::Op;
use libc::{iovec, off_t, size_t, ssize_t};

use crate::around::{At, transfer};
use crate::real::missing;
use crate::{real, served};

macro_rules! writes {
    ($($name:ident($($arg:ident: $kind:ty),*) at $at:expr, $served:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int $(, $arg: $kind)*) -> ssize_t {
            // SAFETY: the caller's arguments.
            if let Some(done) = unsafe { ($served)(fd) } {
                return done;
            }
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            // SAFETY: the caller's arguments, for the function that the caller meant.
            transfer(fd, Op::Write, $at, 0, || unsafe { real(fd $(, $arg)*) })
        }
    )* };
}

/// pwritev2 writes at the descriptor's position when the offset is -1.
fn at(offset: off_t) -> At {
    if offset == -1 { At::Position } else { At::Offset(offset) }
}

writes! {
    write(buffer: *const c_void, len: size_t) at At::Position,
        |fd| served::write(fd, buffer, len, None);
    __write(buffer: *const c_void, len: size_t) at At::Position,
        |fd| served::write(fd, buffer, len, None);
    pwrite(buffer: *const c_void, len: size_t, offset: off_t) at At::Offset(offset),
        |fd| served::write(fd, buffer, len, Some(offset));
    pwrite64(buffer: *const c_void, len: size_t, offset: off_t) at At::Offset(offset),
        |fd| served::write(fd, buffer, len, Some(offset));
    __pwrite64(buffer: *const c_void, len: size_t, offset: off_t) at At::Offset(offset),
        |fd| served::write(fd, buffer, len, Some(offset));
    writev(parts: *const iovec, count: c_int) at At::Position,
        |fd| served::write_parts(fd, parts, count, None);
    pwritev(parts: *const iovec, count: c_int, offset: off_t) at At::Offset(offset),
        |fd| served::write_parts(fd, parts, count, Some(offset));
    pwritev64(parts: *const iovec, count: c_int, offset: off_t) at At::Offset(offset),
        |fd| served::write_parts(fd, parts, count, Some(offset));
    pwritev2(parts: *const iovec, count: c_int, offset: off_t, flags: c_int) at at(offset),
        |fd| served::with_flags(fd, flags).or_else(|| served::write_parts(fd, parts, count, (offset != -1).then_some(offset)));
    pwritev64v2(parts: *const iovec, count: c_int, offset: off_t, flags: c_int) at at(offset),
        |fd| served::with_flags(fd, flags).or_else(|| served::write_parts(fd, parts, count, (offset != -1).then_some(offset)));
}
