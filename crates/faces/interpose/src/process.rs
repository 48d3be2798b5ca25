//! What belongs to the process and thread that call: errno, ids, and what a fork wipes out.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Runs something beside the program's own call: errno stays as it was, and a mistake of ours ends here, with the
/// default result.
pub fn quietly<R: Default>(run: impl FnOnce() -> R) -> R {
    // SAFETY: the location of the calling thread's errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_default();
    // SAFETY: as above.
    unsafe { *errno = before };
    result
}

/// State that a forked child must not inherit: the kernel gives it a page of zeros, however the child was made. A child
/// of `vfork` shares the page.
#[repr(C, align(4096))]
pub(crate) struct Page {
    /// The session's generation, 0 for none.
    pub generation: AtomicU32,
    /// 1 in the process that [`adopt`](Page::adopt)ed it.
    pub adopted: AtomicU32,
    /// [`crate::State`] as a number.
    pub state: AtomicU32,
    /// 1 while a thread changes the session.
    pub lock: AtomicU32,
    /// When to try to connect again, in coarse nanoseconds.
    pub next_try_ns: AtomicU64,
    /// How long to wait after the next failure, in milliseconds.
    pub patience_ms: AtomicU32,
    /// The mode that the manager told.
    pub mode: AtomicU32,
    /// When to look after the socket next, in nanoseconds.
    pub next_look_ns: AtomicU64,
    /// When Hello was said.
    pub asked_ns: AtomicU64,
    /// No message is sent before this time: the manager's queue was full.
    pub blocked_until_ns: AtomicU64,
    /// How long this process has waited for the manager since it last took something, in milliseconds.
    pub stalled_ms: AtomicU64,
    /// How far the thread is that gives hints here; see the session's `helper`.
    pub helper: AtomicU32,
    /// When to try to start it again, in coarse nanoseconds.
    pub helper_try_ns: AtomicU64,
}

// A page of its own, or other state would be wiped with it.
const _: () = assert!(size_of::<Page>() == 4096);

impl Page {
    pub(crate) const fn new() -> Page {
        Page {
            generation: AtomicU32::new(0),
            adopted: AtomicU32::new(0),
            state: AtomicU32::new(0),
            lock: AtomicU32::new(0),
            next_try_ns: AtomicU64::new(0),
            patience_ms: AtomicU32::new(0),
            mode: AtomicU32::new(0),
            next_look_ns: AtomicU64::new(0),
            asked_ns: AtomicU64::new(0),
            blocked_until_ns: AtomicU64::new(0),
            stalled_ms: AtomicU64::new(0),
            helper: AtomicU32::new(0),
            helper_try_ns: AtomicU64::new(0),
        }
    }

    /// Asks the kernel to wipe the page in children; false when it cannot (before Linux 4.14).
    pub(crate) fn wipe_on_fork(&'static self) -> bool {
        let place = std::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: changes what a fork does with this page of ours, which holds nothing else.
        unsafe { rustix::mm::madvise(place, size_of::<Page>(), rustix::mm::Advice::LinuxWipeOnFork) }.is_ok()
    }
}

/// A coarse reading of the monotonic clock, in nanoseconds: milliseconds behind, and cheap.
pub(crate) fn coarse_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// The low 16 bits of the thread's id, asked for once in a thread and generation.
#[inline]
pub(crate) fn thread(generation: u32) -> u16 {
    // Without a destructor, so that it is there in signal handlers and at a thread's end.
    thread_local!(static THREAD: Cell<u64> = const { Cell::new(0) });
    THREAD
        .try_with(|known| {
            if (known.get() >> 32) as u32 != generation {
                let id = rustix::thread::gettid().as_raw_nonzero().get() as u32;
                known.set(u64::from(generation) << 32 | u64::from(id));
            }
            known.get() as u16
        })
        .unwrap_or(0)
}

thread_local!(static APART: Cell<bool> = const { Cell::new(false) });

/// The calling thread is none of the program's: it registers no file, and what it opens and closes, if it has descriptors of its
/// own, is not noted.
pub fn stand_apart() {
    APART.with(|apart| apart.set(true));
}

/// Whether the calling thread [stands apart](stand_apart).
pub(crate) fn stands_apart() -> bool {
    APART.try_with(Cell::get).unwrap_or(false)
}

/// Whether this code may run inside a signal handler, where no thread can be started. A handler has its own signal
/// blocked unless it was installed with `SA_NODEFER`. One that `SA_RESETHAND` removed is known by that flag, which
/// stays.
pub(crate) fn may_be_in_handler() -> bool {
    // SAFETY: a set of signals may be all zeros.
    let mut blocked: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: asks only, into a valid place.
    if unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &mut blocked) } != 0 {
        return true;
    }
    (1..=64).any(|signal| {
        // SAFETY: as above, for an action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: asks only, into a valid place.
        if unsafe { libc::sigaction(signal, std::ptr::null(), &mut action) } != 0 {
            return false; // the C library's own
        }
        let handled = action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
        // SAFETY: a valid set and signal.
        let is_blocked = unsafe { libc::sigismember(&blocked, signal) } == 1;
        action.sa_flags & (libc::SA_NODEFER | libc::SA_RESETHAND) != 0 || (handled && is_blocked)
    })
}

/// This process's id, from the kernel.
pub(crate) fn pid() -> i32 {
    rustix::process::getpid().as_raw_nonzero().get()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::SeqCst;

    #[test]
    fn errno_and_the_caller_survive_a_mistake() {
        // SAFETY: this thread's errno.
        unsafe { *libc::__errno_location() = 42 };
        let result: u32 = quietly(|| {
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = 7 };
            7
        });
        assert_eq!(result, 7);
        let broken: Option<u32> = quietly(|| panic!("expected in this test"));
        assert_eq!(broken, None);
        // SAFETY: as above.
        assert_eq!(unsafe { *libc::__errno_location() }, 42);
    }

    #[test]
    fn a_child_finds_the_page_empty_and_the_parent_does_not() {
        static PAGE: Page = Page::new();
        assert!(PAGE.wipe_on_fork());
        PAGE.generation.store(5, SeqCst);
        PAGE.adopted.store(1, SeqCst);
        // SAFETY: the child looks at memory and leaves by _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            let empty = PAGE.generation.load(SeqCst) == 0 && PAGE.adopted.load(SeqCst) == 0;
            // SAFETY: ends the child without running anything else.
            unsafe { libc::_exit(if empty { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: waits for the child made above.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!((status, PAGE.generation.load(SeqCst)), (0, 5));
    }

    #[test]
    fn threads_have_ids_of_their_own() {
        let mine = thread(1);
        assert_eq!(mine, thread(1));
        assert_eq!(mine, pid_of_thread() as u16);
        assert_ne!(std::thread::spawn(|| thread(1)).join().unwrap(), mine);
    }

    #[test]
    fn a_signal_handler_is_recognised() {
        static SEEN: AtomicU32 = AtomicU32::new(0);
        extern "C" fn handler(_: libc::c_int) {
            SEEN.store(1 + u32::from(may_be_in_handler()), SeqCst);
        }
        assert!(!may_be_in_handler());
        // SAFETY: the handler only makes system calls; the signal is used by no other test of this process.
        unsafe {
            libc::signal(libc::SIGUSR2, handler as extern "C" fn(libc::c_int) as libc::sighandler_t);
            libc::raise(libc::SIGUSR2);
        }
        assert_eq!(SEEN.load(SeqCst), 2);
        assert!(!may_be_in_handler());
    }

    fn pid_of_thread() -> u32 {
        rustix::thread::gettid().as_raw_nonzero().get() as u32
    }
}
