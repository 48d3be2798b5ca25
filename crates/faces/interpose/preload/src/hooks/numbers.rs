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
/// file of its own, of those that are opened later from the first. (HDF5 locks every file that it opens.)
fn locked(fd: c_int) {
    if let Some(watched) = TABLE.watch(fd) {
        quietly(|| {
            TABLE.consumer().locking_open_file();
            TABLE.set_apart(watched);
        });
    }
}

/// To be called before the program takes a lock of its process.
fn locking() {
    TABLE.consumer().locking();
}

fn noted(fd: c_int, command: c_int, result: c_int) -> c_int {
    if matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        fresh(result);
    } else if matches!(command, libc::F_OFD_SETLK | libc::F_OFD_SETLKW) {
        locked(fd);
    }
    result
}

/// What `fcntl` does with locks of a file of a cluster.
fn lock(open: u64, command: c_int, argument: c_ulong) -> c_int {
    let place = argument as *mut libc::flock;
    if place.is_null() {
        return served::fail(libc::EFAULT) as c_int;
    }
    // SAFETY: with these commands the caller's argument is its structure.
    let asked = unsafe { *place };
    let is_of_open = matches!(command, libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW);
    if is_of_open && asked.l_pid != 0 {
        return served::fail(libc::EINVAL) as c_int;
    }
    let mut words = [0; 16];
    words[..8].copy_from_slice(&i64::from(asked.l_type).to_ne_bytes());
    words[8..].copy_from_slice(&i64::from(asked.l_whence).to_ne_bytes());
    let mut held = [0; 32];
    let request = Request { open, a: asked.l_start, b: asked.l_len, c: command.into(), ..Request::new(Op::Lock) };
    let got = match SERVED.call(request, b"", b"", &words, &mut held) {
        Ok(got) => got.len,
        Err(errno) => return served::fail(errno) as c_int,
    };
    if matches!(command, libc::F_GETLK | libc::F_OFD_GETLK) {
        let word = |at: usize| held[at * 8..][..8].try_into().map_or(0, i64::from_ne_bytes);
        // SAFETY: as above.
        let place = unsafe { &mut *place };
        if got == held.len() {
            (place.l_type, place.l_whence) = (word(0) as _, libc::SEEK_SET as _);
            (place.l_start, place.l_len, place.l_pid) = (word(1), word(2), word(3) as _);
        } else {
            place.l_type = libc::F_UNLCK as _;
        }
    }
    0
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
        libc::F_GETLK | libc::F_SETLK | libc::F_SETLKW => return Some(lock(open, command, argument)),
        libc::F_OFD_GETLK | libc::F_OFD_SETLK | libc::F_OFD_SETLKW => return Some(lock(open, command, argument)),
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
            match command {
                libc::F_SETLK | libc::F_SETLKW => locking(),
                // It is refused while the manager has the file open, and ends when the file is opened.
                libc::F_SETLEASE if argument as c_int != libc::F_UNLCK => {
                    TABLE.consumer().leasing();
                    quietly(|| TABLE.leave(fd));
                }
                _ => {}
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
    if let Some(done) = served::open_file(fd, served::with(Op::Flock, operation.into()), b"", b"", &mut []) {
        return done as c_int;
    }
    if operation & (libc::LOCK_SH | libc::LOCK_EX) != 0 {
        locked(fd);
    }
    // SAFETY: the caller's arguments.
    unsafe { real(fd, operation) }
}

/// `lockf`, which is `fcntl` from the position on.
fn lockf_of_cluster(open: u64, operation: c_int, len: libc::off_t) -> c_int {
    // SAFETY: a structure of numbers.
    let mut asked: libc::flock = unsafe { std::mem::zeroed() };
    (asked.l_whence, asked.l_len) = (libc::SEEK_CUR as _, len);
    let (kind, command) = match operation {
        libc::F_ULOCK => (libc::F_UNLCK, libc::F_SETLK),
        libc::F_LOCK => (libc::F_WRLCK, libc::F_SETLKW),
        libc::F_TLOCK => (libc::F_WRLCK, libc::F_SETLK),
        // A lock of the process itself is in nobody's way.
        libc::F_TEST => (libc::F_RDLCK, libc::F_GETLK),
        _ => return served::fail(libc::EINVAL) as c_int,
    };
    asked.l_type = kind as _;
    let result = lock(open, command, (&raw mut asked) as c_ulong);
    if result == 0 && operation == libc::F_TEST && asked.l_type != libc::F_UNLCK as libc::c_short {
        return served::fail(libc::EACCES) as c_int;
    }
    result
}

macro_rules! lockfs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, operation: c_int, len: libc::off_t) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            if let Some(open) = SERVED.open_file(fd) {
                return lockf_of_cluster(open, operation, len);
            }
            locking();
            // SAFETY: the caller's arguments.
            unsafe { real(fd, operation, len) }
        }
    )* };
}

lockfs! { lockf lockf64 }
