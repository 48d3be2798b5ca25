//! The library's own descriptors inside the program: high numbers, closed on exec, kept from the program's hands, and
//! never mistaken for something that the program put in their place.
//!
//! The program cannot know these numbers, so closing one of them is answered as for a number that is not open. When it
//! wants a number for itself (`dup2`), ours moves. When it closes behind the C library's back, the next use notices.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use rustix::fs::{Mode, OFlags};

use crate::paths::ProcName;

/// Where our descriptors are put when the limit allows it: above what ordinary programs use and below a size of the
/// kernel's table that would make forks slow.
const FLOOR: i32 = 1000;

/// A place for one descriptor. The number is kept one too large, so that zeros mean none.
pub(crate) struct Own {
    number: AtomicI32,
    /// Tells ours from another.
    mark: AtomicU64,
    /// The same of an event descriptor, or 0.
    event: AtomicU64,
    users: AtomicU32,
}

/// Closes without passing the C library, whose `close` is a cancellation point and our own hook.
pub(crate) fn close_raw(fd: impl IntoRawFd) {
    // SAFETY: the number was owned by the caller and is used no more.
    unsafe { rustix::io::close(fd.into_raw_fd()) };
}

/// A number that tells one socket from all others of the machine, or an event descriptor from files and sockets.
fn mark(fd: BorrowedFd<'_>) -> u64 {
    if let Ok(cookie) = rustix::net::sockopt::socket_cookie(fd) {
        return cookie | 1 << 63;
    }
    rustix::fs::fstat(fd).map_or(0, |s| (s.st_dev << 32 ^ s.st_ino) & !(1 << 63) | 1)
}

/// The kernel's number of an event descriptor, one too large (Linux 5.3). All of them share one inode, with timers and
/// others. 0 for other descriptors; `None` when the program has no descriptor left to look with.
fn event_number(fd: BorrowedFd<'_>) -> Option<u64> {
    let name = ProcName::about(fd.as_raw_fd());
    let info = rustix::fs::open(name.as_c_str(), OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut text = [0u8; 512];
    let len = rustix::io::read(&info, &mut text[..]).unwrap_or(0);
    close_raw(info);
    const NAME: &[u8] = b"eventfd-id:";
    let text = text.get(..len)?;
    let Some(at) = text.windows(NAME.len()).position(|w| w == NAME) else { return Some(0) };
    let at = at + NAME.len();
    let digits = text[at..].iter().skip_while(|b| **b == b' ' || **b == b'\t').take_while(|b| b.is_ascii_digit());
    Some(digits.fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b - b'0'))).wrapping_add(1))
}

impl Own {
    pub(crate) const fn new() -> Own {
        Own { number: AtomicI32::new(0), mark: AtomicU64::new(0), event: AtomicU64::new(0), users: AtomicU32::new(0) }
    }

    pub(crate) fn is(&self, fd: i32) -> bool {
        fd >= 0 && self.number.load(Relaxed) == fd.wrapping_add(1)
    }

    pub(crate) fn number(&self) -> Option<i32> {
        Some(self.number.load(Acquire) - 1).filter(|n| *n >= 0)
    }

    /// Uses the descriptor if it is still ours. A thread that takes the number away waits for the user to finish.
    pub(crate) fn with<R>(&self, run: impl FnOnce(BorrowedFd<'_>) -> R) -> Option<R> {
        self.use_if(|fd| self.is_ours(fd), run)
    }

    fn use_if<R>(
        &self,
        is_ours: impl FnOnce(BorrowedFd<'_>) -> bool,
        run: impl FnOnce(BorrowedFd<'_>) -> R,
    ) -> Option<R> {
        self.users.fetch_add(1, SeqCst);
        let number = self.number.load(SeqCst) - 1;
        let result = if number < 0 {
            None
        } else {
            // SAFETY: only used below; if the program closed the number, the mark differs or the call fails.
            let fd = unsafe { BorrowedFd::borrow_raw(number) };
            is_ours(fd).then(|| run(fd))
        };
        // Not below 0: whom `forget_users` has forgotten is not counted any more.
        let _ = self.users.fetch_update(SeqCst, SeqCst, |users| users.checked_sub(1));
        result
    }

    /// [`with`](Own::with) for a thread beside the program's, which opens no file to look, as that would take the program's next
    /// number for a moment: an event descriptor is not told from another event descriptor in its place.
    pub(crate) fn with_unopened<R>(&self, run: impl FnOnce(BorrowedFd<'_>) -> R) -> Option<R> {
        self.use_if(|fd| mark(fd) == self.mark.load(Relaxed), run)
    }

    fn is_ours(&self, fd: BorrowedFd<'_>) -> bool {
        let event = self.event.load(Relaxed);
        mark(fd) == self.mark.load(Relaxed) && (event == 0 || event_number(fd).is_none_or(|other| other == event))
    }

    /// Puts a descriptor here, in the place of the one before. `None` when no number is free; the old one is gone then.
    pub(crate) fn put(&self, fd: OwnedFd) -> Option<()> {
        self.close();
        let high = high(fd.as_fd());
        close_raw(fd);
        let high = high?;
        self.mark.store(mark(high.as_fd()), Relaxed);
        self.event.store(event_number(high.as_fd()).unwrap_or(0), Relaxed);
        self.number.store(high.into_raw_fd() + 1, SeqCst);
        Some(())
    }

    /// Moves it to another number because the program wants this one.
    pub(crate) fn step_aside(&self, fd: i32) {
        if !self.is(fd) {
            return;
        }
        let moved = self.with(high).flatten();
        self.number.store(0, SeqCst);
        self.wait_for_users();
        if let Some(moved) = moved {
            self.number.store(moved.into_raw_fd() + 1, SeqCst);
        }
    }

    /// Closes it, if it is still ours.
    pub(crate) fn close(&self) {
        let ours = self.with(|_| ()).is_some();
        let number = self.number.swap(0, SeqCst) - 1;
        self.wait_for_users();
        if ours && number >= 0 {
            // SAFETY: ours, and no other thread uses the number any more.
            unsafe { rustix::io::close(number) };
        }
    }

    /// A use is one system call that does not wait. Should its thread be stopped in it, this one goes on all the same.
    fn wait_for_users(&self) {
        for _ in 0..1000 {
            if self.users.load(SeqCst) == 0 {
                return;
            }
            rustix::thread::sched_yield();
        }
    }

    /// Those that will not return: in a forked child the parent's, or a call that a signal handler left by a jump.
    pub(crate) fn forget_users(&self) {
        self.users.store(0, SeqCst);
    }
}

/// The same open file under a high number.
fn high(fd: BorrowedFd<'_>) -> Option<OwnedFd> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let limit = i32::try_from(limit).unwrap_or(i32::MAX);
    let floor = if limit > FLOOR + 8 { FLOOR } else { (limit - 8).max(limit / 2) };
    rustix::io::fcntl_dupfd_cloexec(fd, floor).or_else(|_| rustix::io::fcntl_dupfd_cloexec(fd, 3)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    fn event() -> OwnedFd {
        rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
    }

    #[test]
    fn it_lives_at_a_high_number_and_is_closed_on_exec() {
        let own = Own::new();
        assert_eq!((own.number(), own.with(|_| ())), (None, None));
        own.put(event()).unwrap();
        let number = own.number().unwrap();
        assert!(own.is(number) && !own.is(-1) && !own.is(0));
        assert!(number >= 512);
        own.with(|fd| {
            assert!(rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
            rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        })
        .unwrap();
        own.close();
        assert_eq!(own.number(), None);
    }

    #[test]
    fn what_the_program_put_in_its_place_is_not_touched() {
        for own_socket in [false, true] {
            let own = Own::new();
            let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
            own.put(if own_socket { a.into() } else { event() }).unwrap();
            let number = own.number().unwrap();
            let (theirs, _other) = std::os::unix::net::UnixStream::pair().unwrap();
            let file = tempfile::tempfile().unwrap();
            // SAFETY: the number is ours to give away in this test.
            let mut place = unsafe { OwnedFd::from_raw_fd(number) };
            // Another event descriptor has the same inode.
            let event = event();
            for other in [theirs.as_fd(), file.as_fd(), event.as_fd()] {
                rustix::io::dup2(other, &mut place).unwrap();
                assert_eq!(own.with(|_| ()), None);
            }
            own.close();
            assert!(rustix::fs::fstat(&place).is_ok(), "closed another file's descriptor");
        }
    }

    #[test]
    fn it_steps_aside() {
        let own = Own::new();
        own.put(event()).unwrap();
        let number = own.number().unwrap();
        own.step_aside(number + 100);
        assert_eq!(own.number(), Some(number));
        own.step_aside(number);
        // SAFETY: the number was left to this test.
        let old = unsafe { OwnedFd::from_raw_fd(number) };
        assert!(own.number().is_some_and(|n| n != number));
        drop(old);
        assert!(own.with(|fd| fd.as_raw_fd()).is_some());
        own.close();
    }
}
