//! Entry and exit of every C function: no panic crosses it, a forked child gets an error, and the last error is one
//! line of text per thread.

use std::cell::RefCell;
use std::ffi::{CStr, CString};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set in the child of a fork: the parent's threads do not exist there and its locks may be held, so nothing may be
/// touched.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Starts to detect forks. Called when the first scheduler is created: before that a fork is harmless.
pub fn watch_forks() {
    static WATCH: Once = Once::new();
    // SAFETY: the handler only stores to an atomic, which is allowed between fork and exec.
    WATCH.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(in_child));
    });
}

/// Whether this process is a child forked after its parent had a scheduler.
pub fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// The error text in a forked child.
pub const FORKED_TEXT: &str = "this process was forked after a scheduler was created, and threads do not survive a \
                               fork: create schedulers after the fork, or exec";

/// While this lives, this thread and the threads that it starts block all signals but those of their own faults: the
/// program's handlers run on the program's threads, and its system calls in callbacks are not interrupted.
pub struct Quiet {
    before: libc::sigset_t,
}

impl Quiet {
    /// Blocks signals.
    pub fn new() -> Quiet {
        // SAFETY: all-zero bytes are a signal set to be filled in; every call gets sets of this frame.
        unsafe {
            let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut set);
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT] {
                libc::sigdelset(&mut set, fault);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
            Quiet { before }
        }
    }
}

impl Default for Quiet {
    fn default() -> Self {
        Quiet::new()
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        // SAFETY: the set that `new` was given.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}

/// Largest configuration file; a larger file is not a configuration.
const FILE_MAX_BYTES: u64 = 1 << 20;

/// Reads a configuration file; `None` if it does not exist. Refuses pipes and devices, which may never end.
pub fn file_bytes(path: &str) -> Result<Option<Vec<u8>>, String> {
    let cannot = |e: std::io::Error| format!("{path} cannot be read: {e}");
    let meta = match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        meta => meta.map_err(cannot)?,
    };
    if !meta.is_file() {
        return Err(format!("{path} is not a regular file; give the path of a configuration"));
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path).map_err(cannot)?.take(FILE_MAX_BYTES + 1).read_to_end(&mut bytes).map_err(cannot)?;
    if bytes.len() as u64 > FILE_MAX_BYTES {
        return Err(format!("{path} is larger than {FILE_MAX_BYTES} bytes, the limit of a configuration"));
    }
    Ok(Some(bytes))
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Stores a line of text for [`last_error`].
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

/// The text of this thread's last error, or an empty string. The pointer is valid until the thread's next error.
pub fn last_error() -> *const std::ffi::c_char {
    LAST_ERROR.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |l| l.as_ptr())).unwrap_or(c"".as_ptr())
}

/// Runs the body of a C function and returns its result, or `failed` with the error text set if it panics.
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

/// A C string as text, or the reason why it is invalid.
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
