//! The channel between an interposed program (the client) and the advice manager.
//!
//! - [`Producer`] and [`Consumer`]: a ring in shared memory into which all threads of a program push their accesses and
//!   from which the manager drains them. No lock, allocation or waiting: pushing is allowed in a signal handler.
//! - [`message`]: the messages on the `SOCK_SEQPACKET` socket, with the descriptors they carry.
//! - [`waited_ns`], [`SMALL_FILE_BYTES`]: which accesses the program may pass over while the manager says so.
//! - [`order`]: hints that the program gives itself, over a separate connection.
//! - [`patterns`]: the paths that the manager is interested in.
//!
//! No socket is opened here. All bytes from the other side are untrusted: no content can make a function of this crate
//! panic, loop or access memory outside the ring.

mod access;
mod cells;
mod consumer;
mod layout;
mod lull;
pub mod message;
pub mod order;
pub mod patterns;
mod producer;

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

pub use access::{Access, Op, Unseen, flag};
pub use consumer::{Consumer, Corrupt, Drained, STUCK_NS, Sleep, Unusable};
pub use layout::{HEADER_BYTES, SLOT_BYTES, SLOTS, SLOTS_MAX, SLOTS_MIN, ring_bytes};
pub use lull::{SMALL_FILE_BYTES, waited_ns};
pub use producer::{Producer, Push};

/// Environment variable that names the manager's socket.
pub const SOCKET_VARIABLE: &str = "IMPRESARIO_ASSIST_SOCKET";
/// Environment variable for complete recordings: how long a program waits at its start for the manager's answer, in
/// milliseconds, at most 10,000. If unset it does not wait, and its first accesses may go unreported.
pub const WAIT_VARIABLE: &str = "IMPRESARIO_ASSIST_WAIT_MS";

/// The manager's socket: `socket` (the value of [`SOCKET_VARIABLE`]) if set and not empty, else
/// `impresario-assist.sock` in `runtime_dir` (`XDG_RUNTIME_DIR`), else the machine-wide one.
pub fn socket_path(socket: Option<&[u8]>, runtime_dir: Option<&[u8]>) -> PathBuf {
    let set = |value: Option<&[u8]>| value.filter(|v| !v.is_empty()).map(<[u8]>::to_vec);
    if let Some(path) = set(socket) {
        return PathBuf::from(std::ffi::OsString::from_vec(path));
    }
    match set(runtime_dir) {
        Some(dir) => PathBuf::from(std::ffi::OsStr::from_bytes(&dir)).join("impresario-assist.sock"),
        None => PathBuf::from("/run/impresario/assist.sock"),
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`, the clock of [`Access::start_ns`].
#[inline]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the result; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_socket_is_named_by_the_variable_then_by_the_user_then_by_the_machine() {
        let path = |s: Option<&str>, d: Option<&str>| socket_path(s.map(str::as_bytes), d.map(str::as_bytes));
        assert_eq!(path(Some("/x/s"), Some("/run/user/1")), PathBuf::from("/x/s"));
        assert_eq!(path(Some(""), Some("/run/user/1")), PathBuf::from("/run/user/1/impresario-assist.sock"));
        assert_eq!(path(None, None), PathBuf::from("/run/impresario/assist.sock"));
        assert_eq!(path(None, Some("")), PathBuf::from("/run/impresario/assist.sock"));
    }

    #[test]
    fn the_clock_runs_forward() {
        let first = now_ns();
        assert!(first > 0 && now_ns() >= first);
    }
}
