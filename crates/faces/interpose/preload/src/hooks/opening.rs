//! open, openat, creat, and their 64-bit and fortified variants.

use std::ffi::{c_char, c_int};

use libc::mode_t;

use crate::around::errno;
use crate::real::missing;
use crate::{TABLE, real};

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

macro_rules! opens {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $kind),*) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments, for the function that the caller meant. A mode that the caller did not
            // pass is any number, which the C library does not look at without O_CREAT or O_TMPFILE.
            opening(|| unsafe { real($($arg),*) })
        }
    )* };
}

opens! {
    open(path: *const c_char, flags: c_int, mode: mode_t);
    open64(path: *const c_char, flags: c_int, mode: mode_t);
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t);
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t);
    __open_2(path: *const c_char, flags: c_int);
    __open64_2(path: *const c_char, flags: c_int);
    __openat_2(dir: c_int, path: *const c_char, flags: c_int);
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int);
    __open(path: *const c_char, flags: c_int, mode: mode_t);
    __open64(path: *const c_char, flags: c_int, mode: mode_t);
    creat(path: *const c_char, mode: mode_t);
    creat64(path: *const c_char, mode: mode_t);
}
