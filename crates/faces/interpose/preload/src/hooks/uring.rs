//! io_uring: what is put into a ring is told when the kernel has taken it, with the length that was asked for. A ring is seen
//! through liburing's functions, and where programs make the system calls themselves, through the C library's `syscall`
//! ([`by_call`]). One that was made by that, and is fed past it or polled by the kernel, is looked into from time to time
//! ([`looks`]).
//!
//! Not seen: rings that a program makes in code of its own, as liburing's when it is linked statically. Not seen, and counted as
//! such: rings that take more than can be looked at, and reads of files by their place in a ring's table (`IOSQE_FIXED_FILE`)
//! where it was not seen what was put there.

use std::ffi::{c_int, c_uint, c_void};

use impresario_interpose::{Consumer, Watched, quietly};
use impresario_ring::{Op, Unseen, flag, now_ns};
use libc::iovec;

use super::aio::submitted;
use crate::around::{position, tell, wanted};
use crate::served::SERVED;
use crate::{TABLE, real};

/// Of what is submitted at once, at most this many entries are told; the stack has room for that many copies.
const COPIED_MAX: usize = 128;
/// Parts of a vector that are added up.
const PARTS_MAX: usize = 64;

/// The kernel's entry of a submission queue, as far as it is looked at.
#[repr(C)]
#[derive(Clone, Copy)]
struct Entry {
    operation: u8,
    flags: u8,
    priority: u16,
    fd: c_int,
    offset: u64,
    buffer: u64,
    len: u32,
    rw_flags: u32,
    user_data: u64,
    buffer_index: u16,
    personality: u16,
    /// For `close`: a place in the ring's table, if it is not 0.
    file_index: u32,
    rest: [u64; 2],
}

const _: () = assert!(size_of::<Entry>() == ENTRY_BYTES);
const ENTRY_BYTES: usize = 64;

const READV: u8 = 1;
const WRITEV: u8 = 2;
const READ_FIXED: u8 = 4;
const WRITE_FIXED: u8 = 5;
const CLOSE: u8 = 19;
const READ: u8 = 22;
const WRITE: u8 = 23;
/// `IOSQE_FIXED_FILE`.
const OF_TABLE: u8 = 1;
/// `IORING_SETUP_SQPOLL`, `IORING_SETUP_SQE128`, `IORING_SETUP_NO_SQARRAY`.
const POLLED: u32 = 1 << 1;
const WIDE_ENTRIES: u32 = 1 << 10;
const NO_ARRAY: u32 = 1 << 16;

/// Which file an entry is of.
#[derive(Clone, Copy)]
enum Target {
    Descriptor(c_int),
    /// In the ring's table.
    OfTable(Watched),
    /// In the ring's table, and it is not known what is there.
    Unknown,
}

/// A read or write that an entry asks for.
#[derive(Clone, Copy)]
struct Wish {
    target: Target,
    op: Op,
    offset: i64,
    len_bytes: u64,
}

impl Wish {
    fn tell(&self, start_ns: u64, end_ns: u64) {
        match self.target {
            Target::Descriptor(fd) => submitted(fd, self.op, self.offset, self.len_bytes, start_ns, end_ns),
            Target::OfTable(_) if self.len_bytes == 0 => {}
            Target::OfTable(watched) => {
                tell(watched, self.op, flag::ASYNC, self.offset, self.len_bytes, start_ns, end_ns);
            }
            Target::Unknown => TABLE.consumer().unseen(Unseen { bytes: self.len_bytes, rings: 0 }),
        }
    }
}

/// Copies from this process's memory without trusting the place.
fn peek<T: Copy>(place: u64, into: &mut [T]) -> bool {
    let len = size_of_val(into);
    peek_all(&[(place, len)], into)
}

/// Copies parts of this process's memory, one after the other, without trusting the places. Together they are as long as `into`.
fn peek_all<T: Copy, const N: usize>(parts: &[(u64, usize); N], into: &mut [T]) -> bool {
    let len = size_of_val(into);
    let local = iovec { iov_base: into.as_mut_ptr().cast(), iov_len: len };
    let remote = parts.map(|(place, len)| iovec { iov_base: place as *mut c_void, iov_len: len });
    let pid = std::process::id() as c_int;
    // SAFETY: writes `into`, whose types are numbers, and fails where a place cannot be read.
    let done = unsafe { libc::process_vm_readv(pid, &local, 1, remote.as_ptr(), N as u64, 0) };
    done == len as isize
}

/// What an entry asks for, with what is known of a place in the ring's table. A descriptor that it closes is forgotten.
fn wish(entry: &Entry, of_table: impl Fn(c_int) -> Option<Watched>) -> Option<Wish> {
    let (op, is_vector) = match entry.operation {
        READ | READ_FIXED => (Op::Read, false),
        WRITE | WRITE_FIXED => (Op::Write, false),
        READV => (Op::Read, true),
        WRITEV => (Op::Write, true),
        CLOSE if entry.file_index == 0 => {
            TABLE.forget(entry.fd);
            SERVED.forget(entry.fd);
            return None;
        }
        _ => return None,
    };
    let (target, fd) = if entry.flags & OF_TABLE == 0 {
        wanted(entry.fd, op)?;
        (Target::Descriptor(entry.fd), Some(entry.fd))
    } else {
        match of_table(entry.fd) {
            Some(watched) if TABLE.consumer().wants(op) => (Target::OfTable(watched), Some(watched.fd())),
            None if op == Op::Read => (Target::Unknown, None),
            _ => return None,
        }
    };
    let len_bytes = if is_vector {
        let mut parts = [iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PARTS_MAX];
        let parts = &mut parts[..(entry.len as usize).min(PARTS_MAX)];
        if !peek(entry.buffer, parts) {
            return None;
        }
        parts.iter().fold(0u64, |bytes, part| bytes.saturating_add(part.iov_len as u64))
    } else {
        entry.len.into()
    };
    // Without an offset it is at the descriptor's position.
    let offset = match fd {
        Some(fd) if entry.offset == u64::MAX => position(fd)? as i64,
        _ => entry.offset as i64,
    };
    Some(Wish { target, op, offset, len_bytes })
}

/// What is about to be submitted.
struct Pending {
    wishes: [Option<Wish>; COPIED_MAX],
    start_ns: u64,
}

impl Pending {
    fn new(wishes: impl Iterator<Item = Option<Wish>>) -> Pending {
        let mut pending = Pending { wishes: [None; COPIED_MAX], start_ns: now_ns() };
        pending.wishes.iter_mut().zip(wishes).for_each(|(place, wish)| *place = wish);
        pending
    }

    /// The kernel has taken so many.
    fn taken(&self, count: usize) {
        let end_ns = now_ns();
        self.wishes.iter().take(count).flatten().for_each(|wish| wish.tell(self.start_ns, end_ns));
    }
}

/// The beginning of liburing's `struct io_uring`, which is the same in all its versions.
#[repr(C)]
pub struct Ring {
    head: *const c_uint,
    tail: *const c_uint,
    mask: *const c_uint,
    entry_count: *const c_uint,
    kernel_flags: *const c_uint,
    dropped: *const c_uint,
    array: *const c_uint,
    entries: *const Entry,
    own_head: c_uint,
    own_tail: c_uint,
    ring_bytes: usize,
    ring_place: *const c_void,
    pads: [c_uint; 4],
    completions: [u64; 11],
    flags: c_uint,
    fd: c_int,
}

impl Ring {
    fn consumed(&self) -> c_uint {
        // SAFETY: liburing reads the same place; the kernel writes it.
        unsafe { std::sync::atomic::AtomicU32::from_ptr(self.head.cast_mut()) }
            .load(std::sync::atomic::Ordering::Acquire)
    }

    /// Entries that the program has filled and the kernel has not taken.
    fn pending(&self) -> Option<(c_uint, Pending)> {
        if TABLE.consumer().generation() == 0 || self.head.is_null() || self.mask.is_null() || self.entries.is_null() {
            return None;
        }
        // SAFETY: liburing reads the same place.
        let mask = unsafe { *self.mask };
        let (head, wide) = (self.consumed(), u32::from(self.flags & WIDE_ENTRIES != 0));
        let count = self.own_tail.wrapping_sub(head).min(mask.wrapping_add(1));
        let entry = |i: c_uint| {
            let place = (head.wrapping_add(i) & mask) << wide;
            // SAFETY: an entry that the program has filled, within the queue.
            wish(unsafe { &*self.entries.add(place as usize) }, |_| None)
        };
        Some((head, Pending::new((0..count).map(entry))))
    }

    fn taken(&self, (head, pending): &(c_uint, Pending)) {
        // Where the kernel polls, it takes them in its own time.
        let count = if self.flags & POLLED != 0 { COPIED_MAX } else { self.consumed().wrapping_sub(*head) as usize };
        pending.taken(count);
    }
}

macro_rules! submits {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(ring: *mut Ring $(, $arg: $kind)*) -> c_int {
            // Asked for by name in a program without liburing.
            let Some(real) = real::$name.get() else { return -libc::ENOSYS };
            // SAFETY: the caller's argument, which liburing reads, too.
            let pending = quietly(|| unsafe { ring.as_ref() }.and_then(Ring::pending));
            // SAFETY: the caller's arguments.
            let result = unsafe { real(ring.cast() $(, $arg)*) };
            if let Some(pending) = pending {
                // SAFETY: as above; the ring outlives the call.
                quietly(|| unsafe { &*ring }.taken(&pending));
            }
            result
        }
    )* };
}

submits! {
    io_uring_submit();
    io_uring_submit_and_wait(count: c_uint);
    io_uring_submit_and_get_events();
    io_uring_submit_and_wait_timeout(done: *mut c_void, count: c_uint, time: *mut c_void, mask: *mut c_void);
}

#[cfg(target_arch = "x86_64")]
mod by_call;
#[cfg(target_arch = "x86_64")]
mod looks;

/// Rings that the program made by system calls, and those calls.
#[cfg(target_arch = "x86_64")]
pub use by_call::{find_syscall, mapped, unmapping};
#[cfg(target_arch = "x86_64")]
pub use looks::{closing, count as looks, settle};

#[cfg(not(target_arch = "x86_64"))]
mod elsewhere {
    pub fn find_syscall() {}

    #[inline(always)]
    pub fn mapped(_: i32, _: i64, _: *mut std::ffi::c_void) {}

    #[inline(always)]
    pub fn unmapping(_: *mut std::ffi::c_void, _: usize) {}

    #[inline(always)]
    pub fn closing(_: i32) {}

    pub fn looks() -> u32 {
        0
    }

    pub fn settle() {}
}
#[cfg(not(target_arch = "x86_64"))]
pub use elsewhere::{closing, find_syscall, looks, mapped, settle, unmapping};
