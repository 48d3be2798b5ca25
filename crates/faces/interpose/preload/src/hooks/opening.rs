//! open, openat, creat, and their 64-bit and fortified variants.

use std::ffi::{c_char, c_int};

use libc::mode_t;

use crate::around::errno;
use crate::real::missing;
use crate::{TABLE, real, served};

/// Runs the real open and notes the descriptor. A program without a free number gets ours, and its call once more: the
/// kernel looks for a number before it looks at the path.
#[inline(always)]
fn opening(open: impl Fn() -> c_int) -> c_int {
    let mut fd = open();
    if fd < 0 && errno() == libc::EMFILE && TABLE.consumer().give_way() {
        fd = open();
    }
    TABLE.opened(fd);
    fd
}

/// Functions that open a path, and those that open it from a directory.
macro_rules! opens {
    ($($name:ident(path $(, $arg:ident: $kind:ty)*) = $flags:expr, $mode:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char $(, $arg: $kind)*) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments, for the function that the caller meant. A mode that the caller did not
            // pass is any number, which the C library does not look at without O_CREAT or O_TMPFILE.
            unsafe { served::open(libc::AT_FDCWD, path, $flags, $mode, |_, path| opening(|| real(path $(, $arg)*))) }
        }
    )* };
}

macro_rules! opens_at {
    ($($name:ident($($arg:ident: $kind:ty),*) = $flags:expr, $mode:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(dir: c_int, path: *const c_char $(, $arg: $kind)*) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: as above.
            unsafe { served::open(dir, path, $flags, $mode, |dir, path| opening(|| real(dir, path $(, $arg)*))) }
        }
    )* };
}

const CREAT: c_int = libc::O_CREAT | libc::O_WRONLY | libc::O_TRUNC;

opens! {
    open(path, flags: c_int, mode: mode_t) = flags, mode;
    open64(path, flags: c_int, mode: mode_t) = flags, mode;
    __open_2(path, flags: c_int) = flags, 0;
    __open64_2(path, flags: c_int) = flags, 0;
    __open(path, flags: c_int, mode: mode_t) = flags, mode;
    __open64(path, flags: c_int, mode: mode_t) = flags, mode;
    creat(path, mode: mode_t) = CREAT, mode;
    creat64(path, mode: mode_t) = CREAT, mode;
}

opens_at! {
    openat(flags: c_int, mode: mode_t) = flags, mode;
    openat64(flags: c_int, mode: mode_t) = flags, mode;
    __openat_2(flags: c_int) = flags, 0;
    __openat64_2(flags: c_int) = flags, 0;
}
