//! read, pread, readv, preadv, preadv2, and their 64-bit and fortified variants.

use std::ffi::{c_int, c_void};

use impresario_ring::Op;
use libc::{iovec, off_t, size_t, ssize_t};

use crate::around::{At, transfer};
use crate::real::missing;
use crate::{real, served};

macro_rules! reads {
    ($($name:ident($($arg:ident: $kind:ty),*) at $at:expr, $asked:expr, $served:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int $(, $arg: $kind)*) -> ssize_t {
            // SAFETY: the caller's arguments.
            if let Some(done) = unsafe { ($served)(fd) } {
                return done;
            }
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            // SAFETY: the caller's arguments, for the function that the caller meant.
            transfer(fd, Op::Read, $at, $asked, || unsafe { real(fd $(, $arg)*) })
        }
    )* };
}

/// preadv2 reads at the descriptor's position when the offset is -1.
fn at(offset: off_t) -> At {
    if offset == -1 { At::Position } else { At::Offset(offset) }
}

reads! {
    read(buffer: *mut c_void, len: size_t) at At::Position, len,
        |fd| served::read(fd, buffer, len, None);
    __read(buffer: *mut c_void, len: size_t) at At::Position, len,
        |fd| served::read(fd, buffer, len, None);
    __read_chk(buffer: *mut c_void, len: size_t, room: size_t) at At::Position, len,
        |fd| if len > room { None } else { served::read(fd, buffer, len, None) };
    pread(buffer: *mut c_void, len: size_t, offset: off_t) at At::Offset(offset), len,
        |fd| served::read(fd, buffer, len, Some(offset));
    pread64(buffer: *mut c_void, len: size_t, offset: off_t) at At::Offset(offset), len,
        |fd| served::read(fd, buffer, len, Some(offset));
    __pread64(buffer: *mut c_void, len: size_t, offset: off_t) at At::Offset(offset), len,
        |fd| served::read(fd, buffer, len, Some(offset));
    __pread_chk(buffer: *mut c_void, len: size_t, offset: off_t, room: size_t) at At::Offset(offset), len,
        |fd| if len > room { None } else { served::read(fd, buffer, len, Some(offset)) };
    __pread64_chk(buffer: *mut c_void, len: size_t, offset: off_t, room: size_t) at At::Offset(offset), len,
        |fd| if len > room { None } else { served::read(fd, buffer, len, Some(offset)) };
    readv(parts: *const iovec, count: c_int) at At::Position, 0,
        |fd| served::read_parts(fd, parts, count, None);
    preadv(parts: *const iovec, count: c_int, offset: off_t) at At::Offset(offset), 0,
        |fd| served::read_parts(fd, parts, count, Some(offset));
    preadv64(parts: *const iovec, count: c_int, offset: off_t) at At::Offset(offset), 0,
        |fd| served::read_parts(fd, parts, count, Some(offset));
    preadv2(parts: *const iovec, count: c_int, offset: off_t, flags: c_int) at at(offset), 0,
        |fd| served::with_flags(fd, flags).or_else(|| served::read_parts(fd, parts, count, (offset != -1).then_some(offset)));
    preadv64v2(parts: *const iovec, count: c_int, offset: off_t, flags: c_int) at at(offset), 0,
        |fd| served::with_flags(fd, flags).or_else(|| served::read_parts(fd, parts, count, (offset != -1).then_some(offset)));
}
