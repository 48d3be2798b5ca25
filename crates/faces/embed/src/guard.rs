//! What every function of a C interface does first and last: no panic crosses it, a forked child gets an error, and
//! the last error is one line of text per thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set in the child of a fork: threads and locks of the parent do not exist there, so nothing may be touched.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Makes children of later forks known. Called when the first scheduler is made: before that a fork is harmless.
pub fn watch_forks() {
    static WATCH: Once = Once::new();
    // SAFETY: the handler only stores to an atomic, which is allowed between fork and exec.
    WATCH.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// This process is a child made by fork after its parent had a scheduler.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// What a child is told.
pub const FORKED_TEXT: &str = "this process was forked after a scheduler was created, and threads do not survive a \
                               fork: create schedulers after the fork, or exec";

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Remembers a line of text for [`last_error`].
pub fn set_last_error(text: &str) {
    let line: Vec<u8> = text.bytes().map(|b| if b == b'\n' || b == 0 { b' ' } else { b }).collect();
    let line = CString::new(line).unwrap_or_default();
    // A thread that is ending has no text any more.
    let _ = LAST_ERROR.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = line;
        }
    });
}

/// The text of this thread's last error; empty when there was none. The pointer holds until the thread's next error.
pub fn last_error() -> *const std::ffi::c_char {
    LAST_ERROR.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |l| l.as_ptr())).unwrap_or(c"".as_ptr())
}

/// Runs the body of a C function: what it answers, or `failed` with the text set when it panics.
pub fn guarded<R>(failed: R, body: impl FnOnce() -> R) -> R {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(answer) => answer,
        Err(panic) => {
            let what = panic.downcast_ref::<&str>().copied();
            let what = what.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown");
            set_last_error(&format!("internal error ({what}); please report it"));
            failed
        }
    }
}

/// A C string as text, or what is wrong with it.
///
/// # Safety
/// `text` is null or points to a string that ends with a zero byte and stays unchanged for `'a`.
pub unsafe fn text<'a>(text: *const std::ffi::c_char, what: &str) -> Result<&'a str, String> {
    if text.is_null() {
        return Err(format!("{what} is NULL; give a string"));
    }
    // SAFETY: the caller promises a string.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| format!("{what} is not UTF-8 text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last() -> String {
        // SAFETY: the text of this thread, which sets no other meanwhile.
        unsafe { CStr::from_ptr(last_error()) }.to_string_lossy().into_owned()
    }

    #[test]
    fn errors_are_one_line_and_panics_become_errors() {
        assert_eq!(last(), "");
        set_last_error("two\nlines\0");
        assert_eq!(last(), "two lines ");
        assert_eq!(guarded(-1, || panic!("boom")), -1);
        assert!(last().contains("boom"), "{}", last());
        assert_eq!(guarded(-1, || 7), 7);
        std::thread::spawn(|| assert_eq!(last(), "", "each thread has its own")).join().unwrap();
    }
}
