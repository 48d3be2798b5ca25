//! What changes the times of files.

use std::ffi::{c_char, c_int, c_long};

use impresario_interpose::served::protocol::{Op, Request};
use libc::{timespec, timeval};

use crate::real;
use crate::real::missing;
use crate::served::{self, SERVED, named, open_file, with};

const HERE: c_int = libc::AT_FDCWD;
const NOFOLLOW: i64 = libc::AT_SYMLINK_NOFOLLOW as i64;

fn words(times: [(i64, i64); 2]) -> [u8; 32] {
    let mut bytes = [0; 32];
    let [(a, b), (c, d)] = times;
    for (place, word) in bytes.chunks_exact_mut(8).zip([a, b, c, d]) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}

const NOW: [(i64, i64); 2] = [(0, libc::UTIME_NOW), (0, libc::UTIME_NOW)];

/// # Safety
/// As `utimensat`.
unsafe fn from_specs(times: *const timespec) -> [u8; 32] {
    if times.is_null() {
        return words(NOW);
    }
    // SAFETY: the caller's two times.
    let [a, m] = unsafe { [*times, *times.add(1)] };
    words([(a.tv_sec, a.tv_nsec), (m.tv_sec, m.tv_nsec)])
}

/// # Safety
/// As `utimes`.
unsafe fn from_values(times: *const timeval) -> [u8; 32] {
    if times.is_null() {
        return words(NOW);
    }
    // SAFETY: the caller's two times.
    let [a, m] = unsafe { [*times, *times.add(1)] };
    // What is no fraction of a second is refused as one.
    let nanos = |micros: i64| if (0..1_000_000).contains(&micros) { micros * 1000 } else { -1 };
    words([(a.tv_sec, nanos(a.tv_usec)), (m.tv_sec, nanos(m.tv_usec))])
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn utimensat(
    dir: c_int,
    path: *const c_char,
    times: *const timespec,
    flags: c_int,
) -> c_int {
    let Some(real) = real::utimensat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |dir, path| c_long::from(unsafe { real(dir, path, times, flags) });
    if !SERVED.is_active() {
        return real(dir, path) as c_int;
    }
    // SAFETY: the caller's arguments.
    let data = unsafe { from_specs(times) };
    let request = with(Op::Times, flags.into());
    // SAFETY: the caller's path.
    if (path.is_null() || unsafe { served::bytes(path) }.is_empty())
        && let Some(done) = open_file(dir, request, b"", &data, &mut [])
    {
        return done as c_int;
    }
    // SAFETY: the caller's path.
    unsafe { named((dir, path), request, (b"", &data), real, |_, _| 0) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn futimens(fd: c_int, times: *const timespec) -> c_int {
    let Some(real) = real::futimens.get() else { return missing() };
    if SERVED.open_file(fd).is_some() {
        // SAFETY: the caller's times.
        let data = unsafe { from_specs(times) };
        return open_file(fd, Request::new(Op::Times), b"", &data, &mut []).unwrap_or(-1) as c_int;
    }
    // SAFETY: the caller's arguments.
    unsafe { real(fd, times) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn futimes(fd: c_int, times: *const timeval) -> c_int {
    let Some(real) = real::futimes.get() else { return missing() };
    if SERVED.open_file(fd).is_some() {
        // SAFETY: the caller's times.
        let data = unsafe { from_values(times) };
        return open_file(fd, Request::new(Op::Times), b"", &data, &mut []).unwrap_or(-1) as c_int;
    }
    // SAFETY: the caller's arguments.
    unsafe { real(fd, times) }
}

macro_rules! utimess {
    ($($name:ident $flags:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, times: *const timeval) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |_, path| c_long::from(unsafe { real(path, times) });
            if !SERVED.is_active() {
                return real(HERE, path) as c_int;
            }
            // SAFETY: the caller's times and path.
            unsafe {
                let data = from_values(times);
                named((HERE, path), with(Op::Times, $flags), (b"", &data), real, |_, _| 0) as c_int
            }
        }
    )* };
}

utimess! { utimes 0; lutimes NOFOLLOW; }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn futimesat(dir: c_int, path: *const c_char, times: *const timeval) -> c_int {
    let Some(real) = real::futimesat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |dir, path| c_long::from(unsafe { real(dir, path, times) });
    if !SERVED.is_active() {
        return real(dir, path) as c_int;
    }
    // SAFETY: the caller's times and path.
    unsafe {
        let data = from_values(times);
        named((dir, path), Request::new(Op::Times), (b"", &data), real, |_, _| 0) as c_int
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn utime(path: *const c_char, times: *const libc::utimbuf) -> c_int {
    let Some(real) = real::utime.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |_, path| c_long::from(unsafe { real(path, times) });
    if !SERVED.is_active() {
        return real(HERE, path) as c_int;
    }
    // SAFETY: the caller's times.
    let data = if times.is_null() { NOW } else { unsafe { [((*times).actime, 0), ((*times).modtime, 0)] } };
    // SAFETY: the caller's path.
    unsafe { named((HERE, path), Request::new(Op::Times), (b"", &words(data)), real, |_, _| 0) as c_int }
}
