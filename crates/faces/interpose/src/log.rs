//! One line to the log file that the user named, if any: each kind of message at most once in a process.

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32};

use rustix::fs::{Mode, OFlags};

const NAME_BYTES: usize = 1024;

struct Name(UnsafeCell<[u8; NAME_BYTES]>);
// SAFETY: written once, before `SET`.
unsafe impl Sync for Name {}

static NAME: Name = Name(UnsafeCell::new([0; NAME_BYTES]));
static SET: AtomicBool = AtomicBool::new(false);
static SAID: AtomicU32 = AtomicU32::new(0);

/// What can be said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Notice {
    NoManager,
    Lost,
    Refused,
    BadAnswer,
    BadSocketName,
    NoPlace,
    Sandboxed,
    NoRing,
    NoHelper,
    NoGpfs,
    OwnGpfs,
}

impl Notice {
    fn text(self) -> &'static str {
        match self {
            Notice::NoManager => {
                "no advice manager answers at the socket; running without advice, trying again now and then"
            }
            Notice::Lost => "the advice manager went away; running without advice, trying again now and then",
            Notice::Refused => "the advice manager refused this program; its log says why",
            Notice::BadAnswer => "the advice manager's answer has no meaning here: is it of another version?",
            Notice::BadSocketName => {
                "IMPRESARIO_ASSIST_SOCKET is longer than the 107 bytes of a socket's name; no advice"
            }
            Notice::NoPlace => "the program needed all its descriptors; the two of the library were given up",
            Notice::Sandboxed => "the program restricts its system calls; running without advice from here on",
            Notice::NoRing => "no shared memory for the ring; running without advice",
            Notice::NoHelper => {
                "no thread can give hints here (this needs Linux 5.9 and /proc); the manager does what it can"
            }
            Notice::NoGpfs => "libgpfs cannot be loaded here; the manager does what it can without",
            Notice::OwnGpfs => "the program uses libgpfs itself; its hints are its own matter",
        }
    }
}

/// Notes the log's name, before there are other threads.
pub(crate) fn set_name(name: &CStr) {
    let bytes = name.to_bytes_with_nul();
    if bytes.len() > NAME_BYTES || SET.load(Acquire) {
        return;
    }
    // SAFETY: no thread reads before `SET`, and only the library's start comes here.
    unsafe { (&mut *NAME.0.get())[..bytes.len()].copy_from_slice(bytes) };
    SET.store(true, Release);
}

/// Writes a line that was not written before in this process. A log that cannot be written is ignored.
pub(crate) fn say(line: Notice) {
    let bit = 1 << line as u32;
    if !SET.load(Acquire) || SAID.fetch_or(bit, Relaxed) & bit != 0 {
        return;
    }
    // SAFETY: written before `SET` and never again.
    let Ok(name) = CStr::from_bytes_until_nul(unsafe { &*NAME.0.get() }) else { return };
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let Ok(file) = rustix::fs::open(name, flags, Mode::from_raw_mode(0o644)) else { return };
    let mut text = [0u8; 256];
    let mut len = 0;
    let mut add = |part: &[u8]| {
        let part = &part[..part.len().min(text.len() - len)];
        text[len..len + part.len()].copy_from_slice(part);
        len += part.len();
    };
    let pid = crate::process::pid().unsigned_abs();
    let mut digits = [0u8; 10];
    let mut at = digits.len();
    let mut rest = pid;
    while at > 0 {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
        if rest == 0 {
            break;
        }
    }
    add(b"impresario assist: process ");
    add(&digits[at..]);
    add(b": ");
    add(line.text().as_bytes());
    add(b"\n");
    let _ = rustix::io::write(&file, &text[..len]);
    crate::own::close_raw(file);
}

/// A forked child says things anew.
pub(crate) fn forget() {
    SAID.store(0, Relaxed);
}
