//! dup, dup2, dup3, fcntl, flock, lockf: what gives descriptors other numbers, or ties something to the open file itself.
//!
//! A duplicate is asked about at its first use and registered under a number of its own.

use std::ffi::{c_int, c_ulong};

use impresario_interpose::quietly;
use impresario_interpose::served::protocol::{Op, Request};

use crate::real::missing;
use crate::served::{self, SERVED};
use crate::{TABLE, real};

#[inline(always)]
fn fresh(fd: c_int) -> c_int {
    if fd >= 0 {
        TABLE.forget(fd);
        SERVED.forget(fd);
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
            let real = || unsafe { real(from, to) };
            if from == to { real() } else { served::replaced(to, real) }
        }
    )* };
}

dup2s! { dup2 __dup2 }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    let Some(real) = real::dup3.get() else { return missing() };
    replaced(from, to);
    // SAFETY: the caller's arguments.
    let real = || unsafe { real(from, to, flags) };
    if from == to { real() } else { served::replaced(to, real) }
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

/// What `fcntl` does with a file of a cluster; `None`: what it does with any number.
fn of_cluster(fd: c_int, command: c_int, argument: c_ulong) -> Option<c_int> {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC | libc::F_GETFD | libc::F_SETFD) {
        return None;
    }
    let open = SERVED.open_file(fd)?;
    let request = match command {
        libc::F_GETFL => Request::new(Op::Flags),
        libc::F_SETFL => served::with(Op::SetFlags, argument as i64),
        libc::F_GETLK | libc::F_SETLK | libc::F_SETLKW => return Some(served::fail(libc::ENOLCK) as c_int),
        libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => {
            return Some(served::fail(libc::ENOLCK) as c_int);
        }
        _ => return Some(served::fail(libc::EINVAL) as c_int),
    };
    Some(match SERVED.call(Request { open, ..request }, b"", b"", b"", &mut []) {
        Ok(got) => got.result as c_int,
        Err(errno) => served::fail(errno) as c_int,
    })
}

macro_rules! fcntls {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            if let Some(result) = of_cluster(fd, command, argument) {
                return result;
            }
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
    if SERVED.open_file(fd).is_some() {
        return served::fail(libc::ENOLCK) as c_int;
    }
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
            if SERVED.open_file(fd).is_some() {
                return served::fail(libc::ENOLCK) as c_int;
            }
            locking();
            // SAFETY: the caller's arguments.
            unsafe { real(fd, operation, len) }
        }
    )* };
}

lockfs! { lockf lockf64 }
