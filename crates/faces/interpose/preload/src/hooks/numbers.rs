//! dup, dup2, dup3, fcntl, flock, lockf: what gives descriptors other numbers, or ties something to the open file itself.
//!
//! A duplicate is asked about at its first use and registered under a number of its own.

use std::ffi::{c_int, c_ulong};

use impresario_interpose::quietly;

use crate::real::missing;
use crate::{TABLE, real};

#[inline(always)]
fn fresh(fd: c_int) -> c_int {
    if fd >= 0 {
        TABLE.forget(fd);
    }
    fd
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup(fd: c_int) -> c_int {
    let Some(real) = real::dup.get() else { return missing() };
    // SAFETY: the caller's argument.
    fresh(unsafe { real(fd) })
}

/// `to` is about to become another file.
fn replaced(from: c_int, to: c_int) {
    if from != to {
        TABLE.consumer().step_aside(to);
        TABLE.forget(to);
    }
}

macro_rules! dup2s {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(from: c_int, to: c_int) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            replaced(from, to);
            // SAFETY: the caller's arguments.
            unsafe { real(from, to) }
        }
    )* };
}

dup2s! { dup2 __dup2 }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    let Some(real) = real::dup3.get() else { return missing() };
    replaced(from, to);
    // SAFETY: the caller's arguments.
    unsafe { real(from, to, flags) }
}

/// A lock of the open file lasts until its last descriptor is closed: the manager must not have one, and gets an open
/// file of its own. (HDF5 locks every file that it opens.)
fn locked(fd: c_int) {
    if let Some(watched) = TABLE.watch(fd) {
        quietly(|| TABLE.set_apart(watched));
    }
}

/// To be called before the program takes a lock of its process.
fn locking() {
    TABLE.consumer().locking();
}

fn noted(fd: c_int, command: c_int, result: c_int) -> c_int {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        fresh(result);
    } else if matches!(command, libc::F_OFD_SETLK | libc::F_OFD_SETLKW | libc::F_SETLEASE) {
        locked(fd);
    }
    result
}

macro_rules! fcntls {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            if matches!(command, libc::F_SETLK | libc::F_SETLKW) {
                locking();
            }
            // SAFETY: the caller's arguments; one that the caller did not pass is any number, which is not looked at.
            noted(fd, command, unsafe { real(fd, command, argument) })
        }
    )* };
}

fcntls! { fcntl fcntl64 __fcntl }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn flock(fd: c_int, operation: c_int) -> c_int {
    let Some(real) = real::flock.get() else { return missing() };
    if operation & (libc::LOCK_SH | libc::LOCK_EX) != 0 {
        locked(fd);
    }
    // SAFETY: the caller's arguments.
    unsafe { real(fd, operation) }
}

macro_rules! lockfs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, operation: c_int, len: libc::off_t) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            locking();
            // SAFETY: the caller's arguments.
            unsafe { real(fd, operation, len) }
        }
    )* };
}

lockfs! { lockf lockf64 }
