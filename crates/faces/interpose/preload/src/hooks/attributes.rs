//! The stat family and access.
//!
//! Before glibc 2.33 programs call `__xstat` and its relatives with a version of the structure; on 64 bits there is one.
//! Where the C library has no function of a name, or it was not looked for yet, the kernel is asked.

use std::ffi::{c_char, c_int, c_long};

use impresario_interpose::served::protocol::{META_BYTES, Meta, Op, Request};

use crate::real::missing;
use crate::served::{SERVED, attributes, fail, named, to_stat, to_statx, with};
use crate::{real, served};

fn decode(data: &[u8]) -> Option<Meta> {
    data.first_chunk::<META_BYTES>().map(Meta::decode)
}

/// Writes attributes to the caller's place.
///
/// # Safety
/// What is returned may be called while the place may be written.
unsafe fn put(into: *mut libc::stat) -> impl FnOnce(&Meta) {
    // SAFETY: as this function's caller promises.
    move |meta| unsafe { into.write(to_stat(meta)) }
}

/// # Safety
/// As `fstatat`.
unsafe fn by_name(
    (dir, path): (c_int, *const c_char),
    flags: c_int,
    put: impl FnOnce(&Meta),
    real: impl FnOnce(c_int, *const c_char) -> c_int,
) -> c_int {
    let (mut flags, mut path) = (flags, path);
    // SAFETY: the caller's path.
    if flags & libc::AT_EMPTY_PATH != 0 && SERVED.is_active() && unsafe { served::bytes(path) }.is_empty() {
        if dir != libc::AT_FDCWD {
            return by_number(dir, put, || real(dir, path));
        }
        (flags, path) = (flags & !libc::AT_EMPTY_PATH, c".".as_ptr());
    }
    let done = |_, data: &[u8]| match decode(data) {
        Some(meta) => {
            put(&meta);
            0
        }
        None => fail(libc::EIO),
    };
    let real = |dir, path| c_long::from(real(dir, path));
    // SAFETY: the caller's path.
    unsafe { named((dir, path), with(Op::Stat, flags.into()), (b"", b""), real, done) as c_int }
}

fn by_number(fd: c_int, put: impl FnOnce(&Meta), real: impl FnOnce() -> c_int) -> c_int {
    match attributes(fd) {
        None => real(),
        Some(Err(errno)) => fail(errno) as c_int,
        Some(Ok(meta)) => {
            put(&meta);
            0
        }
    }
}

/// # Safety
/// As `fstatat`.
unsafe fn kernel(dir: c_int, path: *const c_char, into: *mut libc::stat, flags: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { libc::syscall(libc::SYS_newfstatat, dir, path, into, flags) as c_int }
}

macro_rules! stats {
    ($($name:ident($($version:ident)?) $flags:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            $($version: c_int,)? path: *const c_char, into: *mut libc::stat,
        ) -> c_int {
            // SAFETY: the caller's arguments.
            unsafe {
                by_name((libc::AT_FDCWD, path), $flags, put(into), |dir, path| match real::$name.found() {
                    Some(real) => real($($version,)? path, into),
                    None => kernel(dir, path, into, $flags),
                })
            }
        }
    )* };
}

const NOFOLLOW: c_int = libc::AT_SYMLINK_NOFOLLOW;

stats! { stat() 0; stat64() 0; lstat() NOFOLLOW; lstat64() NOFOLLOW; }
stats! { __xstat(version) 0; __xstat64(version) 0; __lxstat(version) NOFOLLOW; __lxstat64(version) NOFOLLOW; }

macro_rules! fstats {
    ($($name:ident($($version:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($version: c_int,)? fd: c_int, into: *mut libc::stat) -> c_int {
            // SAFETY: the caller's arguments.
            unsafe {
                by_number(fd, put(into), || match real::$name.found() {
                    Some(real) => real($($version,)? fd, into),
                    None => libc::syscall(libc::SYS_fstat, fd, into) as c_int,
                })
            }
        }
    )* };
}

fstats! { fstat(); fstat64(); __fxstat(version); __fxstat64(version); }

macro_rules! fstatats {
    ($($name:ident($($version:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            $($version: c_int,)? dir: c_int, path: *const c_char, into: *mut libc::stat, flags: c_int,
        ) -> c_int {
            // SAFETY: the caller's arguments.
            unsafe {
                by_name((dir, path), flags, put(into), |dir, path| match real::$name.found() {
                    Some(real) => real($($version,)? dir, path, into, flags),
                    None => kernel(dir, path, into, flags),
                })
            }
        }
    )* };
}

fstatats! { fstatat(); fstatat64(); __fxstatat(version); __fxstatat64(version); }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn statx(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mask: libc::c_uint,
    into: *mut libc::statx,
) -> c_int {
    let real = |dir, path| match real::statx.found() {
        // SAFETY: the caller's arguments.
        Some(real) => unsafe { real(dir, path, flags, mask, into) },
        // SAFETY: as above.
        None => unsafe { libc::syscall(libc::SYS_statx, dir, path, flags, mask, into) as c_int },
    };
    if !SERVED.is_active() {
        return real(dir, path);
    }
    // SAFETY: the caller's path and place.
    unsafe { by_name((dir, path), flags, |meta| into.write(to_statx(meta)), real) }
}

/// # Safety
/// As `access`.
#[cold]
unsafe fn kernel_access(dir: c_int, path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { libc::syscall(libc::SYS_faccessat, dir, path, mode) as c_int }
}

/// # Safety
/// As `access`.
unsafe fn ask(path: *const c_char, mode: c_int, real: impl FnOnce(*const c_char) -> c_int) -> c_int {
    let request = with(Op::Access, mode.into());
    let real = |_, path| c_long::from(real(path));
    // SAFETY: the caller's path.
    unsafe { named((libc::AT_FDCWD, path), request, (b"", b""), real, |_, _| 0) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe {
        ask(path, mode, |path| match real::access.found() {
            Some(real) => real(path, mode),
            None => kernel_access(libc::AT_FDCWD, path, mode),
        })
    }
}

macro_rules! accesses {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, mode: c_int) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            unsafe { ask(path, mode, |path| real(path, mode)) }
        }
    )* };
}

accesses! { eaccess euidaccess }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn faccessat(dir: c_int, path: *const c_char, mode: c_int, flags: c_int) -> c_int {
    if flags == 0 && real::faccessat.found().is_none() {
        // SAFETY: the caller's arguments.
        return unsafe { kernel_access(dir, path, mode) };
    }
    let Some(real) = real::faccessat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |dir, path| c_long::from(unsafe { real(dir, path, mode, flags) });
    let request = Request { b: flags.into(), ..with(Op::Access, mode.into()) };
    // SAFETY: the caller's path.
    unsafe { named((dir, path), request, (b"", b""), real, |_, _| 0) as c_int }
}
