//! The real call of a watched descriptor, with the clock before and after it. Functions that need no clock or no watching
//! cost a look at the table.

use impresario_interpose::{Consumer, Event, Watched};
use impresario_ring::{Op, flag, now_ns};
use libc::{c_int, ssize_t};

use crate::TABLE;

/// Where an access begins.
#[derive(Clone, Copy)]
pub enum At {
    /// The call says so.
    Offset(i64),
    /// At the descriptor's position, which the call moves.
    Position,
}

/// A descriptor whose accesses of this kind are wanted.
#[inline(always)]
pub fn wanted(fd: c_int, op: Op) -> Option<Watched> {
    TABLE.watch(fd).filter(|_| TABLE.consumer().wants(op))
}

/// Runs the real transfer on `fd`, and tells it. `asked` bytes were asked for; 0 when not known.
#[inline(always)]
pub fn transfer(fd: c_int, op: Op, at: At, asked: usize, real: impl FnOnce() -> ssize_t) -> ssize_t {
    let Some(watched) = wanted(fd, op) else { return real() };
    let start_ns = now_ns();
    let done = real();
    told(watched, op, at, asked, start_ns, done);
    done
}

#[inline(never)]
fn told(watched: Watched, op: Op, at: At, asked: usize, start_ns: u64, done: ssize_t) {
    if done <= 0 {
        return;
    }
    let end_ns = now_ns();
    let short = if op == Op::Read && (done as usize) < asked { flag::SHORT } else { 0 };
    let mut event = Event {
        op,
        flags: short,
        offset: 0,
        len_bytes: done as u64,
        start_ns,
        duration_ns: end_ns.saturating_sub(start_ns),
    };
    // Finding out where it was would take a call as long as this one.
    let is_read = op == Op::Read;
    if is_read && TABLE.passes_over(watched, event) {
        return;
    }
    let offset = match at {
        At::Offset(offset) => offset,
        At::Position => match position(watched.fd()) {
            Some(position) => {
                TABLE.set_position(watched, position);
                position as i64 - done as i64
            }
            None => return,
        },
    };
    let Ok(offset) = u64::try_from(offset) else { return };
    event.offset = offset;
    if is_read { TABLE.tell_for_certain(watched, event) } else { TABLE.tell(watched, event) }
}

/// Tells one access.
#[inline]
pub fn tell(watched: Watched, op: Op, flags: u8, offset: i64, len_bytes: u64, start_ns: u64, end_ns: u64) {
    let Ok(offset) = u64::try_from(offset) else { return };
    let duration_ns = end_ns.saturating_sub(start_ns);
    TABLE.tell(watched, Event { op, flags, offset, len_bytes, start_ns, duration_ns });
}

/// The descriptor's position, by a system call that leaves errno alone.
#[inline]
pub fn position(fd: c_int) -> Option<u64> {
    // SAFETY: used for one system call, which fails cleanly when the number is closed meanwhile.
    let fd = (fd >= 0).then(|| unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) })?;
    rustix::fs::seek(fd, rustix::fs::SeekFrom::Current(0)).ok()
}

/// This thread's errno.
#[inline]
pub fn errno() -> c_int {
    // SAFETY: the location of this thread's errno.
    unsafe { *libc::__errno_location() }
}

/// Sets this thread's errno.
#[inline]
pub fn set_errno(value: c_int) {
    // SAFETY: the location of this thread's errno.
    unsafe { *libc::__errno_location() = value };
}
