//! Extended attributes.

use std::ffi::{c_char, c_int, c_long, c_void};

use impresario_interpose::served::protocol::{Op, PATH_MAX, Request};
use libc::{size_t, ssize_t};

use crate::real;
use crate::real::missing;
use crate::served::{self, SERVED, fail, named, open_file, with};

const HERE: c_int = libc::AT_FDCWD;
const NOFOLLOW: i64 = libc::AT_SYMLINK_NOFOLLOW as i64;

/// What an extended attribute, or the list of their names, is: into the caller's buffer, or only its length.
///
/// # Safety
/// As `getxattr`.
unsafe fn take(got: i64, data: &[u8], buffer: *mut c_void, room: size_t) -> c_long {
    if room == 0 {
        return got as c_long;
    }
    if data.len() > room {
        return fail(libc::ERANGE);
    }
    // SAFETY: the caller's buffer.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.cast(), data.len()) };
    data.len() as c_long
}

macro_rules! getxattrs {
    ($($name:ident($($key:ident)?) $op:ident $flags:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char, $($key: *const c_char,)? buffer: *mut c_void, room: size_t,
        ) -> ssize_t {
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            // SAFETY: the caller's arguments.
            let real = |_, path| unsafe { real(path, $($key,)? buffer, room) } as c_long;
            let request = Request { c: $flags, ..Request::new(Op::$op) };
            // SAFETY: the caller's name.
            let key: &[u8] = { b"" $(; unsafe { served::bytes($key) })? };
            // SAFETY: the caller's path and buffer.
            let done = |got: impresario_interpose::served::Got, data: &[u8]| unsafe { take(got.result, data, buffer, room) };
            // SAFETY: as above.
            unsafe { named((HERE, path), request, (key, b""), real, done) as ssize_t }
        }
    )* };
}

getxattrs! {
    getxattr(key) GetXattr 0;
    lgetxattr(key) GetXattr NOFOLLOW;
    listxattr() ListXattr 0;
    llistxattr() ListXattr NOFOLLOW;
}

/// # Safety
/// As `fgetxattr`.
unsafe fn attribute_of(fd: c_int, request: Request, key: &[u8], buffer: *mut c_void, room: size_t) -> ssize_t {
    let mut data = [0; PATH_MAX];
    match open_file(fd, request, key, b"", &mut data) {
        // SAFETY: the caller's buffer.
        Some(len @ 0..) => unsafe { take(len, data.get(..len as usize).unwrap_or(&[]), buffer, room) as ssize_t },
        _ => -1,
    }
}

macro_rules! fgetxattrs {
    ($($name:ident($($key:ident)?) $op:ident;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            fd: c_int, $($key: *const c_char,)? buffer: *mut c_void, room: size_t,
        ) -> ssize_t {
            if SERVED.open_file(fd).is_some() {
                // SAFETY: the caller's name.
                let key: &[u8] = { b"" $(; unsafe { served::bytes($key) })? };
                // SAFETY: the caller's buffer.
                return unsafe { attribute_of(fd, Request::new(Op::$op), key, buffer, room) };
            }
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            // SAFETY: the caller's arguments.
            unsafe { real(fd, $($key,)? buffer, room) }
        }
    )* };
}

fgetxattrs! { fgetxattr(key) GetXattr; flistxattr() ListXattr; }

/// # Safety
/// As `setxattr`.
unsafe fn value<'a>(bytes: *const c_void, len: size_t) -> &'a [u8] {
    // What is longer than any attribute is refused by its length.
    let len = len.min((64 << 10) + 1);
    // SAFETY: the caller's value.
    if len == 0 { b"" } else { unsafe { std::slice::from_raw_parts(bytes.cast(), len) } }
}

macro_rules! setxattrs {
    ($($name:ident $follow:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char, key: *const c_char, bytes: *const c_void, len: size_t, flags: c_int,
        ) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |_, path| c_long::from(unsafe { real(path, key, bytes, len, flags) });
            let request = Request { c: $follow, ..with(Op::SetXattr, flags.into()) };
            // SAFETY: the caller's path, name and value.
            unsafe { named((HERE, path), request, (served::bytes(key), value(bytes, len)), real, |_, _| 0) as c_int }
        }
    )* };
}

setxattrs! { setxattr 0; lsetxattr NOFOLLOW; }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fsetxattr(
    fd: c_int,
    key: *const c_char,
    bytes: *const c_void,
    len: size_t,
    flags: c_int,
) -> c_int {
    if SERVED.open_file(fd).is_some() {
        // SAFETY: the caller's name and value.
        let (name, value) = unsafe { (served::bytes(key), value(bytes, len)) };
        let request = with(Op::SetXattr, flags.into());
        return open_file(fd, request, name, value, &mut []).unwrap_or(-1) as c_int;
    }
    let Some(real) = real::fsetxattr.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { real(fd, key, bytes, len, flags) }
}

macro_rules! removexattrs {
    ($($name:ident $follow:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, key: *const c_char) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |_, path| c_long::from(unsafe { real(path, key) });
            let request = Request { c: $follow, ..Request::new(Op::RemoveXattr) };
            // SAFETY: the caller's path and name.
            unsafe { named((HERE, path), request, (served::bytes(key), b""), real, |_, _| 0) as c_int }
        }
    )* };
}

removexattrs! { removexattr 0; lremovexattr NOFOLLOW; }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fremovexattr(fd: c_int, key: *const c_char) -> c_int {
    if SERVED.open_file(fd).is_some() {
        // SAFETY: the caller's name.
        let name = unsafe { served::bytes(key) };
        return open_file(fd, Request::new(Op::RemoveXattr), name, b"", &mut []).unwrap_or(-1) as c_int;
    }
    let Some(real) = real::fremovexattr.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { real(fd, key) }
}
