//! prctl and unshare. A program that restricts its own system calls is left alone from then on, because a call that it does not
//! expect would end it. Of one whose threads have descriptors of their own nothing is remembered of a number.

use std::ffi::{c_int, c_ulong};

use super::uring;
use crate::real::missing;
use crate::served::SERVED;
use crate::{TABLE, real};

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn unshare(flags: c_int) -> c_int {
    let Some(real) = real::unshare.get() else { return missing() };
    if flags & libc::CLONE_FILES != 0 {
        SERVED.part();
    }
    // SAFETY: the caller's arguments.
    unsafe { real(flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn prctl(option: c_int, a: c_ulong, b: c_ulong, c: c_ulong, d: c_ulong) -> c_int {
    let Some(real) = real::prctl.get() else { return missing() };
    // Filters that are loaded by the seccomp call itself need this promise first, or great rights.
    if option == libc::PR_SET_SECCOMP || option == libc::PR_SET_NO_NEW_PRIVS {
        TABLE.consumer().retire();
        uring::settle();
    }
    // SAFETY: the caller's arguments.
    unsafe { real(option, a, b, c, d) }
}
