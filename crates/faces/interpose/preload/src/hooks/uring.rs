//! io_uring: what is put into a ring is told when the kernel has taken it, with the length that was asked for. A ring is seen
//! through liburing's functions, and where programs make the system calls themselves, through the C library's `syscall`.
//!
//! Not seen: rings in programs that contain liburing, or make system calls, in code of their own. Not seen, and counted as
//! such: rings that the kernel polls without liburing, or that are used by a place in a table; and reads of files by their
//! place in a table of the ring (`IOSQE_FIXED_FILE`).

use std::ffi::{c_int, c_long, c_uint, c_void};

use impresario_interpose::{Consumer, quietly};
use impresario_ring::{Op, Unseen, now_ns};
use libc::iovec;

use super::aio::submitted;
use crate::around::{position, wanted};
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

/// Stands for a file of the ring's table.
const NO_FD: c_int = -1;

/// A read or write that an entry asks for.
#[derive(Clone, Copy)]
struct Wish {
    /// Or [`NO_FD`].
    fd: c_int,
    op: Op,
    offset: i64,
    len_bytes: u64,
}

/// Copies from this process's memory without trusting the place.
fn peek<T: Copy>(place: u64, into: &mut [T]) -> bool {
    let len = size_of_val(into);
    let local = iovec { iov_base: into.as_mut_ptr().cast(), iov_len: len };
    let remote = iovec { iov_base: place as *mut c_void, iov_len: len };
    // SAFETY: writes `into`, whose types are numbers, and fails where the place cannot be read.
    let done = unsafe { libc::process_vm_readv(std::process::id() as c_int, &local, 1, &remote, 1, 0) };
    done == len as isize
}

/// What an entry asks for. A descriptor that it closes is forgotten.
fn wish(entry: &Entry) -> Option<Wish> {
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
    let of_table = entry.flags & OF_TABLE != 0;
    if of_table && op != Op::Read {
        return None;
    }
    if !of_table {
        wanted(entry.fd, op)?;
    }
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
    if of_table {
        return Some(Wish { fd: NO_FD, op, offset: 0, len_bytes });
    }
    // Without an offset it is at the descriptor's position.
    let offset = if entry.offset == u64::MAX { position(entry.fd)? as i64 } else { entry.offset as i64 };
    Some(Wish { fd: entry.fd, op, offset, len_bytes })
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
        for wish in self.wishes.iter().take(count).flatten() {
            if wish.fd == NO_FD {
                TABLE.consumer().unseen(Unseen { bytes: wish.len_bytes, rings: 0 });
                continue;
            }
            submitted(wish.fd, wish.op, wish.offset, wish.len_bytes, self.start_ns, end_ns);
        }
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
            wish(unsafe { &*self.entries.add(place as usize) })
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

/// Rings that the program made by system calls, and those calls.
#[cfg(target_arch = "x86_64")]
pub use by_call::{find_syscall, mapped};

#[cfg(not(target_arch = "x86_64"))]
mod elsewhere {
    pub fn find_syscall() {}

    #[inline(always)]
    pub fn mapped(_: i32, _: i64, _: *mut std::ffi::c_void) {}
}
#[cfg(not(target_arch = "x86_64"))]
pub use elsewhere::{find_syscall, mapped};

#[cfg(target_arch = "x86_64")]
mod by_call {
    use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
    use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64};

    use super::*;

    /// `IORING_OFF_SQ_RING`, `IORING_OFF_SQES`.
    const QUEUE_AT: i64 = 0;
    const ENTRIES_AT: i64 = 0x1000_0000;
    /// `IORING_ENTER_REGISTERED_RING`: the number is not a descriptor.
    const BY_PLACE: c_long = 1 << 4;

    /// The kernel's `struct io_uring_params`, in numbers of four bytes.
    const PARAMS_WORDS: usize = 20;
    const FLAGS: usize = 2;
    const HEAD: usize = 10;
    const MASK: usize = 12;
    const ARRAY: usize = 16;

    /// One of the program's rings: where things lie from the beginning of the mapped queue.
    struct Known {
        /// 0 for none, else the descriptor and 1.
        fd: AtomicI32,
        queue: AtomicU64,
        entries: AtomicU64,
        flags: AtomicU32,
        head: AtomicU32,
        mask: AtomicU32,
        array: AtomicU32,
    }

    const RINGS_MAX: usize = 64;

    static RINGS: [Known; RINGS_MAX] = [const {
        Known {
            fd: AtomicI32::new(0),
            queue: AtomicU64::new(0),
            entries: AtomicU64::new(0),
            flags: AtomicU32::new(0),
            head: AtomicU32::new(0),
            mask: AtomicU32::new(0),
            array: AtomicU32::new(0),
        }
    }; RINGS_MAX];
    /// The next place to be used once all are.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    static MADE: AtomicU32 = AtomicU32::new(0);
    /// That a ring is used by its place was told.
    static BY_PLACE_TOLD: AtomicU32 = AtomicU32::new(0);

    fn known(fd: c_int) -> Option<&'static Known> {
        RINGS.iter().find(|ring| ring.fd.load(Acquire) == fd.wrapping_add(1))
    }

    /// The program has made a ring.
    fn made(fd: c_int, params: u64) {
        // SAFETY: the kernel has just written it.
        let words = unsafe { (params as *const [u32; PARAMS_WORDS]).read_unaligned() };
        let free = || RINGS.iter().find(|ring| ring.fd.load(Relaxed) == 0);
        let oldest = || &RINGS[NEXT.fetch_add(1, Relaxed) as usize % RINGS_MAX];
        let ring = known(fd).or_else(free).unwrap_or_else(oldest);
        ring.fd.store(0, Release);
        ring.queue.store(0, Relaxed);
        ring.entries.store(0, Relaxed);
        ring.flags.store(words[FLAGS], Relaxed);
        ring.head.store(words[HEAD], Relaxed);
        ring.mask.store(words[MASK], Relaxed);
        ring.array.store(words[ARRAY], Relaxed);
        ring.fd.store(fd.wrapping_add(1), Release);
        MADE.store(1, Release);
        if words[FLAGS] & POLLED != 0 {
            TABLE.consumer().unseen(Unseen { bytes: 0, rings: 1 });
        }
    }

    /// The program has mapped a part of a descriptor.
    #[inline]
    pub fn mapped(fd: c_int, offset: i64, place: *mut c_void) {
        if MADE.load(Relaxed) == 0 || (offset != QUEUE_AT && offset != ENTRIES_AT) {
            return;
        }
        if let Some(ring) = known(fd) {
            let field = if offset == QUEUE_AT { &ring.queue } else { &ring.entries };
            field.store(place as u64, Release);
        }
    }

    /// The first `count` entries of the program's ring that the kernel has not taken. Everything is copied by the kernel, for a
    /// ring may be unmapped, or belong to a parent.
    fn pending(fd: c_int, count: u32) -> Option<Pending> {
        if count == 0 || MADE.load(Relaxed) == 0 || TABLE.consumer().generation() == 0 {
            return None;
        }
        let ring = known(fd)?;
        let (queue, entries, flags) = (ring.queue.load(Acquire), ring.entries.load(Acquire), ring.flags.load(Relaxed));
        let (mut head, mut mask) = ([0u32], [0u32]);
        let at = |offset: &AtomicU32| queue + u64::from(offset.load(Relaxed));
        if queue == 0 || entries == 0 || !peek(at(&ring.head), &mut head) || !peek(at(&ring.mask), &mut mask) {
            return None;
        }
        let entry_bytes = ENTRY_BYTES as u64 * if flags & WIDE_ENTRIES != 0 { 2 } else { 1 };
        let entry = |i: u32| {
            let mut place = [head[0].wrapping_add(i) & mask[0]];
            if flags & NO_ARRAY == 0 && !peek(at(&ring.array) + 4 * u64::from(place[0]), &mut place) {
                return None;
            }
            let mut entry = [0u64; ENTRY_BYTES / 8];
            if place[0] > mask[0] || !peek(entries + entry_bytes * u64::from(place[0]), &mut entry) {
                return None;
            }
            // SAFETY: an entry consists of numbers, and is as large.
            wish(unsafe { &*entry.as_ptr().cast::<Entry>() })
        };
        Some(Pending::new((0..count.min(mask[0].wrapping_add(1))).map(entry)))
    }

    /// The C library's `syscall`, once it was looked for.
    static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

    /// Looks for the real function; until then the system call is made here.
    pub fn find_syscall() {
        if let Some(real) = real::syscall.get() {
            REAL.store(real as *mut c_void, Release);
        }
    }

    /// Most programs come through here for every futex: two comparisons and a jump, and nothing is left on the stack, on which a
    /// child of `vfork` would return.
    ///
    /// # Safety
    /// As the C library's.
    #[unsafe(no_mangle)]
    #[unsafe(naked)]
    pub unsafe extern "C-unwind" fn syscall() {
        std::arch::naked_asm!(
            "lea rax, [rdi - {setup}]",
            "cmp rax, 1",
            "jbe {ring}",
            "mov rax, qword ptr [rip + {real}]",
            "test rax, rax",
            "jz {bare}",
            "jmp rax",
            setup = const SETUP,
            ring = sym ring_call,
            real = sym REAL,
            bare = sym bare,
        )
    }

    const SETUP: c_long = libc::SYS_io_uring_setup;
    const _: () = assert!(libc::SYS_io_uring_enter == SETUP + 1);

    /// Makes the call as the C library does.
    #[unsafe(naked)]
    unsafe extern "C-unwind" fn bare(
        _number: c_long,
        _a: c_long,
        _b: c_long,
        _c: c_long,
        _d: c_long,
        _e: c_long,
        _f: c_long,
    ) -> c_long {
        std::arch::naked_asm!(
            "mov rax, rdi",
            "mov rdi, rsi",
            "mov rsi, rdx",
            "mov rdx, rcx",
            "mov r10, r8",
            "mov r8, r9",
            "mov r9, [rsp + 8]",
            "syscall",
            "cmp rax, -4095",
            "jae 2f",
            "ret",
            "2:",
            "mov rdi, rax",
            "jmp {failed}",
            failed = sym failed,
        )
    }

    extern "C-unwind" fn failed(result: c_long) -> c_long {
        crate::around::set_errno(-result as c_int);
        -1
    }

    /// `io_uring_setup` and `io_uring_enter`.
    unsafe extern "C-unwind" fn ring_call(
        number: c_long,
        a: c_long,
        b: c_long,
        c: c_long,
        d: c_long,
        e: c_long,
        f: c_long,
    ) -> c_long {
        let real = REAL.load(Acquire);
        let call = if real.is_null() {
            bare
        } else {
            // SAFETY: the C library's function, which takes up to seven numbers.
            unsafe {
                std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C-unwind" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long,
                >(real)
            }
        };
        if number == SETUP {
            // SAFETY: the caller's arguments.
            let fd = unsafe { call(number, a, b, c, d, e, f) };
            if fd >= 0 {
                quietly(|| made(fd as c_int, b as u64));
            }
            return fd;
        }
        let by_place = d & BY_PLACE != 0;
        if by_place && BY_PLACE_TOLD.swap(1, Relaxed) == 0 {
            quietly(|| TABLE.consumer().unseen(Unseen { bytes: 0, rings: 1 }));
        }
        let pending = if by_place { None } else { quietly(|| pending(a as c_int, b as u32)) };
        // SAFETY: the caller's arguments.
        let taken = unsafe { call(number, a, b, c, d, e, f) };
        if let (Some(pending), 1..) = (pending, taken) {
            quietly(|| pending.taken(taken as usize));
        }
        taken
    }
}
