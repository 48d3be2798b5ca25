//! Threads of our own beside the program's: detached, with all signals blocked, and never where the program could not have
//! started one itself.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

const STACK_BYTES: usize = 256 << 10;

/// What runs in a thread; its argument is null.
pub type Body = extern "C" fn(*mut c_void) -> *mut c_void;

/// Starts a thread: 0, or why not, as `pthread_create` says it. Not to be called in a signal handler.
pub(crate) fn spawn(body: Body) -> c_int {
    let mut attributes = MaybeUninit::uninit();
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    let mut thread = MaybeUninit::uninit();
    // SAFETY: each is initialised by the first call that gets it; a detached thread needs no looking after. It
    // inherits the signal mask, which is put back afterwards.
    unsafe {
        let failed = libc::pthread_attr_init(attributes.as_mut_ptr());
        if failed != 0 {
            return failed;
        }
        libc::pthread_attr_setdetachstate(attributes.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
        libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), STACK_BYTES);
        libc::sigfillset(all.as_mut_ptr());
        let mut failed = libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        if failed == 0 {
            failed = libc::pthread_create(thread.as_mut_ptr(), attributes.as_ptr(), body, std::ptr::null_mut());
            libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut());
        }
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        failed
    }
}

/// Names the calling thread `impresario`, for those who list threads.
pub fn name_thread() {
    // SAFETY: past our own hook, with a name that ends with a zero.
    unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_NAME, c"impresario".as_ptr()) };
}

/// Ends the calling thread by the one system call that every program may make. The C library's way out makes calls that may
/// not be allowed any more; this one leaves the stack behind.
pub fn leave() -> ! {
    loop {
        // SAFETY: ends this thread and nothing else.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}
