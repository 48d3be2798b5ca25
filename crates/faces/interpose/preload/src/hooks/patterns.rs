//! `glob`. The C library's own takes the functions that it reads directories with from the caller, if it is told to: it is
//! given ours.

use std::ffi::{c_char, c_int, c_void};

use libc::DIR;

use super::attributes::{lstat, stat};
use super::directories::{closedir, opendir, readdir};
use crate::real;
use crate::real::{Failed, missing};
use crate::served::SERVED;

/// The functions below are set (of `<glob.h>`).
const ALTDIRFUNC: c_int = 1 << 9;

type ByName = unsafe extern "C-unwind" fn(*const c_char, *mut libc::stat) -> c_int;

/// `glob_t`. There is one layout on 64 bits.
#[repr(C)]
pub struct Glob {
    count: usize,
    paths: *mut *mut c_char,
    offset: usize,
    flags: c_int,
    closedir: Option<unsafe extern "C-unwind" fn(*mut DIR) -> c_int>,
    readdir: Option<unsafe extern "C-unwind" fn(*mut DIR) -> *mut c_void>,
    opendir: Option<unsafe extern "C-unwind" fn(*const c_char) -> *mut DIR>,
    lstat: Option<ByName>,
    stat: Option<ByName>,
}

macro_rules! globs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            pattern: *const c_char, flags: c_int, failed: Failed, into: *mut Glob,
        ) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            if !SERVED.is_active() || flags & ALTDIRFUNC != 0 || into.is_null() {
                // SAFETY: the caller's arguments.
                return unsafe { real(pattern, flags, failed, into.cast()) };
            }
            // SAFETY: the caller's structure, whose functions count only with the flag, which the program does not see; it may set
            // them before and use them later, so they are put back. As plain words: they need not be set at all.
            unsafe {
                let functions = (&raw mut (*into).closedir).cast::<[std::mem::MaybeUninit<usize>; 5]>();
                let callers = functions.read();
                (&raw mut (*into).closedir).write(Some(closedir));
                (&raw mut (*into).readdir).write(Some(readdir));
                (&raw mut (*into).opendir).write(Some(opendir));
                (&raw mut (*into).lstat).write(Some(lstat));
                (&raw mut (*into).stat).write(Some(stat));
                let found = real(pattern, flags | ALTDIRFUNC, failed, into.cast());
                functions.write(callers);
                (*into).flags &= !ALTDIRFUNC;
                found
            }
        }
    )* };
}

globs! { glob glob64 }
