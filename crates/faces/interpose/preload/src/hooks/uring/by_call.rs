//! Rings that a program makes by the C library's `syscall`, and what it puts into them by that.

use std::ffi::c_long;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64};

use super::*;
use crate::hooks::attributes::statx;

/// `IORING_OFF_SQ_RING`, `IORING_OFF_SQES`.
const QUEUE_AT: i64 = 0;
const ENTRIES_AT: i64 = 0x1000_0000;
/// `IORING_ENTER_REGISTERED_RING`: the number is not a descriptor.
const BY_PLACE: c_long = 1 << 4;
/// `IORING_SETUP_NO_MMAP`: the program's own memory, which it does not map from the ring.
const NO_MAP: u32 = 1 << 14;
/// `IORING_REGISTER_FILES`, `IORING_REGISTER_FILES_UPDATE`, and others that change the table of files: `IORING_UNREGISTER_FILES`,
/// `IORING_REGISTER_FILES2`, `IORING_REGISTER_FILES_UPDATE2`.
const FILES: c_long = 2;
const FILES_UPDATE: c_long = 6;
const OTHER_FILES: [c_long; 3] = [3, 13, 14];
/// `IORING_REGISTER_USE_REGISTERED_RING`: the number is not a descriptor.
const REGISTERS_BY_PLACE: c_long = 1 << 31;
/// Places of a ring's table that are known. More are not.
const PLACES: usize = 64;

/// The kernel's `struct io_uring_params`, in numbers of four bytes, as far as it is looked at.
const PARAMS_WORDS: usize = 20;
const COUNT: usize = 0;
const FLAGS: usize = 2;
const HEAD: usize = 10;
const TAIL: usize = 11;
const MASK: usize = 12;
const ENTRY_COUNT: usize = 13;
const ARRAY: usize = 16;

/// One of the program's rings: where things lie from the beginning of the mapped queue.
pub(super) struct Known {
    /// 0 for none, else the descriptor and 1.
    fd: AtomicI32,
    /// The process that made it.
    pub(super) owner: AtomicI32,
    queue: AtomicU64,
    entries: AtomicU64,
    pub(super) flags: AtomicU32,
    /// Entries in the queue.
    pub(super) count: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    mask: AtomicU32,
    entry_count: AtomicU32,
    array: AtomicU32,
    /// Entries were handed over by `syscall`.
    pub(super) is_called: AtomicU32,
    /// What it is to [`looks`].
    pub(super) watch: looks::Watch,
    /// Files of its table, by [`Watched::token`].
    places: [AtomicU64; PLACES],
}

const RINGS_MAX: usize = 64;

pub(super) static RINGS: [Known; RINGS_MAX] = [const {
    Known {
        fd: AtomicI32::new(0),
        owner: AtomicI32::new(0),
        queue: AtomicU64::new(0),
        entries: AtomicU64::new(0),
        flags: AtomicU32::new(0),
        count: AtomicU32::new(0),
        head: AtomicU32::new(0),
        tail: AtomicU32::new(0),
        mask: AtomicU32::new(0),
        entry_count: AtomicU32::new(0),
        array: AtomicU32::new(0),
        is_called: AtomicU32::new(0),
        watch: looks::Watch::new(),
        places: [const { AtomicU64::new(0) }; PLACES],
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

impl Known {
    /// Whether it can be looked into now.
    pub(super) fn is_mapped(&self) -> bool {
        self.fd.load(Acquire) != 0 && self.queue.load(Acquire) != 0 && self.entries.load(Acquire) != 0
    }

    /// Where a number of the queue lies.
    fn at(&self, offset: &AtomicU32) -> u64 {
        self.queue.load(Acquire) + u64::from(offset.load(Relaxed))
    }

    /// How many entries the kernel has taken, and the program has handed over, of all that ever were; `None` when it is no such ring
    /// (any more).
    pub(super) fn ends(&self) -> Option<(u32, u32)> {
        let places = [&self.head, &self.tail, &self.mask, &self.entry_count].map(|offset| self.at(offset));
        let mut words = [0u32; 4];
        if !self.is_mapped() || !peek_all(&places.map(|place| (place, 4)), &mut words) {
            return None;
        }
        let [head, tail, mask, count] = words;
        let expected = self.count.load(Relaxed);
        (count == expected && mask == expected.wrapping_sub(1)).then_some((head, tail))
    }

    /// At which places the entries from the n-th on are; false when the ring is gone.
    pub(super) fn places(&self, n: u32, into: &mut [u32]) -> bool {
        let mask = self.count.load(Relaxed).wrapping_sub(1);
        if self.flags.load(Relaxed) & NO_ARRAY != 0 {
            (0..).zip(into).for_each(|(more, place)| *place = n.wrapping_add(more) & mask);
            return true;
        }
        let before_end = (mask - (n & mask) + 1).min(into.len() as u32) as usize;
        let array = self.at(&self.array);
        let first = (array + 4 * u64::from(n & mask), 4 * before_end);
        peek_all(&[first, (array, 4 * (into.len() - before_end))], into) && into.iter().all(|place| *place <= mask)
    }

    /// Where the entry at a place lies.
    pub(super) fn entry(&self, place: u32) -> u64 {
        let entry_bytes = ENTRY_BYTES as u64 * if self.flags.load(Relaxed) & WIDE_ENTRIES != 0 { 2 } else { 1 };
        self.entries.load(Acquire) + entry_bytes * u64::from(place)
    }

    /// Where the number is that says how many entries the program has handed over.
    pub(super) fn tail(&self) -> u64 {
        self.at(&self.tail)
    }

    /// The file at a place of its table.
    pub(super) fn file(&self, place: c_int) -> Option<Watched> {
        let token = self.places.get(usize::try_from(place).ok()?)?.load(Acquire);
        TABLE.recall(token)
    }

    fn forget_files(&self) {
        self.places.iter().for_each(|place| place.store(0, Release));
    }

    /// The program put descriptors into its table, from a place on.
    fn put_files(&self, from: usize, descriptors: u64, count: usize) {
        for n in 0..count.min(PLACES.saturating_sub(from)) {
            let mut fd = [0i32];
            if !peek(descriptors + 4 * n as u64, &mut fd) {
                return;
            }
            // -2 leaves a place as it is.
            if fd[0] != -2 {
                let token = TABLE.watch(fd[0]).map_or(0, |watched| watched.token());
                self.places[from + n].store(token, Release);
            }
        }
    }
}

/// The program has made a ring.
fn made(fd: c_int, params: u64) {
    if TABLE.consumer().is_retired() {
        return;
    }
    // SAFETY: the kernel has just written it.
    let words = unsafe { (params as *const [u32; PARAMS_WORDS]).read_unaligned() };
    let free = || RINGS.iter().find(|ring| ring.fd.load(Relaxed) == 0);
    let oldest = || &RINGS[NEXT.fetch_add(1, Relaxed) as usize % RINGS_MAX];
    let ring = known(fd).or_else(free).unwrap_or_else(oldest);
    ring.fd.store(0, Release);
    ring.queue.store(0, Relaxed);
    ring.entries.store(0, Relaxed);
    ring.forget_files();
    ring.is_called.store(0, Relaxed);
    ring.watch.end();
    let numbers = [
        (&ring.flags, FLAGS),
        (&ring.count, COUNT),
        (&ring.head, HEAD),
        (&ring.tail, TAIL),
        (&ring.mask, MASK),
        (&ring.entry_count, ENTRY_COUNT),
        (&ring.array, ARRAY),
    ];
    numbers.iter().for_each(|(number, at)| number.store(words[*at], Relaxed));
    ring.owner.store(std::process::id() as i32, Relaxed);
    ring.fd.store(fd.wrapping_add(1), Release);
    MADE.store(1, Release);
    if words[FLAGS] & NO_MAP != 0 {
        TABLE.consumer().unseen(Unseen { bytes: 0, rings: 1 });
    }
}

/// The program has mapped a part of a descriptor.
#[inline]
pub fn mapped(fd: c_int, offset: i64, place: *mut c_void) {
    if MADE.load(Relaxed) == 0 || (offset != QUEUE_AT && offset != ENTRIES_AT) || TABLE.consumer().is_retired() {
        return;
    }
    if let Some(ring) = known(fd) {
        let field = if offset == QUEUE_AT { &ring.queue } else { &ring.entries };
        field.store(place as u64, Release);
        if ring.is_mapped() {
            quietly(|| looks::begin(ring));
        }
    }
}

/// The program is about to unmap memory.
#[inline]
pub fn unmapping(place: *mut c_void, len: usize) {
    if MADE.load(Relaxed) == 0 || TABLE.consumer().is_retired() {
        return;
    }
    let memory = place as u64..(place as u64).saturating_add(len as u64);
    for ring in &RINGS {
        let is_part = |field: &AtomicU64| memory.contains(&field.load(Relaxed));
        let (queue, entries) = (is_part(&ring.queue), is_part(&ring.entries));
        if (queue || entries) && ring.owner.load(Relaxed) == std::process::id() as i32 {
            quietly(|| looks::finish(ring));
            let gone = [(queue, &ring.queue), (entries, &ring.entries)];
            gone.iter().filter(|(gone, _)| *gone).for_each(|(_, field)| field.store(0, Release));
        }
    }
}

/// The program has registered something with a ring.
fn registered(fd: c_int, what: c_long, argument: u64, count: usize) {
    if TABLE.consumer().is_retired() {
        return;
    }
    if what & REGISTERS_BY_PLACE != 0 {
        let what = what & (REGISTERS_BY_PLACE - 1);
        if matches!(what, FILES | FILES_UPDATE) || OTHER_FILES.contains(&what) {
            // Which ring it is, is not known.
            let of_us = |ring: &&Known| ring.owner.load(Relaxed) == std::process::id() as i32;
            RINGS.iter().filter(of_us).for_each(Known::forget_files);
        }
        return;
    }
    let Some(ring) = known(fd) else { return };
    match what {
        FILES => {
            ring.forget_files();
            ring.put_files(0, argument, count);
        }
        FILES_UPDATE => {
            // `struct io_uring_files_update`: the first place, and where the descriptors are.
            let mut update = [0u64; 2];
            match peek(argument, &mut update) {
                true => ring.put_files(update[0] as u32 as usize, update[1], count),
                false => ring.forget_files(),
            }
        }
        what if OTHER_FILES.contains(&what) => ring.forget_files(),
        _ => {}
    }
}

/// The first `count` entries of the program's ring that the kernel has not taken. Everything is copied by the kernel, for a
/// ring may be unmapped, or belong to a parent.
fn pending(fd: c_int, count: u32) -> Option<Pending> {
    if count == 0 || MADE.load(Relaxed) == 0 || TABLE.consumer().generation() == 0 {
        return None;
    }
    let ring = known(fd)?;
    // What the kernel takes by itself is looked for.
    if ring.flags.load(Relaxed) & POLLED != 0 {
        return None;
    }
    ring.is_called.store(1, SeqCst);
    let (head, _) = ring.ends()?;
    let entry = |n: u32| {
        let (mut place, mut entry) = ([0u32], [0u64; ENTRY_BYTES / 8]);
        if !ring.places(head.wrapping_add(n), &mut place) || !peek(ring.entry(place[0]), &mut entry) {
            return None;
        }
        // SAFETY: an entry consists of numbers, and is as large.
        wish(unsafe { &*entry.as_ptr().cast::<Entry>() }, |place| ring.file(place))
    };
    Some(Pending::new((0..count.min(ring.count.load(Relaxed))).map(entry)))
}

/// The C library's `syscall`, once it was looked for.
static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Looks for the real function; until then the system call is made here.
pub fn find_syscall() {
    if let Some(real) = real::syscall.get() {
        REAL.store(real as *mut c_void, Release);
    }
}

/// Most programs come through here for every futex: some comparisons and a jump, and nothing is left on the stack, on which a
/// child of `vfork` would return.
///
/// # Safety
/// As the C library's.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C-unwind" fn syscall() {
    std::arch::naked_asm!(
        "lea rax, [rdi - {setup}]",
        "cmp rax, 2",
        "jbe {ring}",
        "cmp rdi, {statx}",
        "je {stat}",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz {bare}",
        "jmp rax",
        setup = const SETUP,
        ring = sym ring_call,
        statx = const libc::SYS_statx,
        stat = sym stat_call,
        real = sym REAL,
        bare = sym bare,
    )
}

const SETUP: c_long = libc::SYS_io_uring_setup;
const _: () = assert!(libc::SYS_io_uring_enter == SETUP + 1 && libc::SYS_io_uring_register == SETUP + 2);

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

/// What takes the number of a system call and up to six arguments.
type Call = unsafe extern "C-unwind" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;

fn real_call() -> Call {
    let real = REAL.load(Acquire);
    if real.is_null() {
        return bare;
    }
    // SAFETY: the C library's function, which takes up to seven numbers.
    unsafe { std::mem::transmute::<*mut c_void, Call>(real) }
}

/// `statx`, which libuv calls so, and with it Node.js: under `impresario run` as the function of that name.
unsafe extern "C-unwind" fn stat_call(
    number: c_long,
    dir: c_long,
    path: c_long,
    flags: c_long,
    mask: c_long,
    into: c_long,
    f: c_long,
) -> c_long {
    // A C library without the function would have ours come through here again.
    if SERVED.is_active() && real::statx.found().is_some() {
        let (path, into) = (path as *const std::ffi::c_char, into as *mut libc::statx);
        // SAFETY: the caller's arguments.
        return unsafe { statx(dir as c_int, path, flags as c_int, mask as c_uint, into) }.into();
    }
    // SAFETY: as above.
    unsafe { real_call()(number, dir, path, flags, mask, into, f) }
}

/// `io_uring_setup`, `io_uring_enter` and `io_uring_register`.
unsafe extern "C-unwind" fn ring_call(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    let call = real_call();
    if number == SETUP {
        // SAFETY: the caller's arguments.
        let fd = unsafe { call(number, a, b, c, d, e, f) };
        if fd >= 0 {
            quietly(|| made(fd as c_int, b as u64));
        }
        return fd;
    }
    if number == libc::SYS_io_uring_register {
        // SAFETY: the caller's arguments.
        let done = unsafe { call(number, a, b, c, d, e, f) };
        if done >= 0 {
            quietly(|| registered(a as c_int, b, c as u64, d as u32 as usize));
        }
        return done;
    }
    let by_place = d & BY_PLACE != 0;
    // Which ring it is, is not known; those that are looked into are seen all the same.
    if by_place && !looks::are_taken() && BY_PLACE_TOLD.swap(1, Relaxed) == 0 {
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
