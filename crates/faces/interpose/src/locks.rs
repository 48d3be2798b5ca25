//! Locks of the process on files (POSIX record locks): all of a file's are lost when the process closes any descriptor of
//! that file. So once the program uses them, the library closes no file that could have one.
//!
//! Locks that were taken by system calls past the C library, or before the program was executed, are not known here.

use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rustix::fs::OFlags;

use crate::own;

static USED: AtomicBool = AtomicBool::new(false);
/// The program takes locks of open files, which last as long as the manager has one of them.
static OF_OPEN_FILES: AtomicBool = AtomicBool::new(false);
/// The program takes leases.
static LEASES: AtomicBool = AtomicBool::new(false);
/// Threads that are about to close a descriptor because no lock was used.
static CLOSING: AtomicU32 = AtomicU32::new(0);
/// How often the first lock yields to such a thread; it has nothing but the close left to do.
const YIELDS_MAX: u32 = 100_000;

/// To be called before the program takes a lock.
pub(crate) fn begin() {
    if USED.load(Relaxed) || USED.swap(true, SeqCst) {
        return;
    }
    for _ in 0..YIELDS_MAX {
        if CLOSING.load(SeqCst) == 0 {
            return;
        }
        rustix::thread::sched_yield();
    }
}

/// The program takes a lock of an open file, and may do so with others.
pub(crate) fn begin_of_open_files() {
    OF_OPEN_FILES.store(true, Relaxed);
}

/// Whether it has.
pub(crate) fn are_of_open_files() -> bool {
    OF_OPEN_FILES.load(Relaxed)
}

/// The program takes a lease.
pub(crate) fn begin_of_leases() {
    LEASES.store(true, Relaxed);
}

/// Whether it has.
pub(crate) fn are_leases_used() -> bool {
    LEASES.load(Relaxed)
}

/// Whether this open file has a lease of the program that ends when the file is opened once more, by whomever.
pub(crate) fn has_write_lease(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: looks at an open file. Past our own hook.
    let lease = unsafe { libc::syscall(libc::SYS_fcntl, fd.as_raw_fd(), libc::F_GETLEASE) };
    lease == libc::F_WRLCK.into()
}

/// How a file is to be opened a second time: closing a mere name of it takes no lock away.
pub(crate) fn how_to_open_again() -> OFlags {
    let name_only = if USED.load(SeqCst) { OFlags::PATH } else { OFlags::empty() };
    OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY | name_only
}

/// Closes what was opened so. Should the program have taken its first lock meanwhile, the descriptor stays open.
pub(crate) fn close_again(fd: OwnedFd, how: OFlags) {
    CLOSING.fetch_add(1, SeqCst);
    match USED.load(SeqCst) && !how.contains(OFlags::PATH) {
        true => mem::forget(fd),
        false => own::close_raw(fd),
    }
    CLOSING.fetch_sub(1, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_closed_under_a_lock() {
        let open = || OwnedFd::from(std::fs::File::open("/proc/self/exe").unwrap());
        let is_open = |number| std::path::Path::new(&format!("/proc/self/fd/{number}")).exists();
        let (how, early) = (how_to_open_again(), open());
        assert!(!how.contains(OFlags::PATH));
        begin();
        begin();
        let number = early.as_raw_fd();
        close_again(early, how);
        assert!(is_open(number), "opened before the first lock, closed after it");
        assert!(how_to_open_again().contains(OFlags::PATH));
    }
}
