//! Looking into rings that are fed past the C library, or that the kernel polls: a thread of ours copies, 250 times a
//! second while there is something to see, the entries that the kernel has taken since the last look.
//!
//! - A program may use an entry's place again once the kernel has taken it, in the order of the queue or in its own (fio). What was
//!   handed over again at the same place before it was looked at is counted as missed; of a ring where that is more than one in
//!   [`MISSED_SHARE`], it is told that it cannot be looked into. One whose place is just being filled anew is taken for what is
//!   to be handed over next, should the program be stopped between the two.
//! - Everything is copied by the kernel, which fails where memory is gone; each entry twice, so that one that is just being
//!   written is not mistaken for another. Lengths of vectors, and positions that are not in the entry, may have changed by
//!   then: these are missed, too.
//! - A ring whose entries are handed over by `syscall` is left to that. One that the kernel does not poll is looked at only up to
//!   what the kernel has taken, which it does in a call: had that been seen, it would be known by then.
//! - The thread shares the program's descriptors and opens none, for that would take the program's next number: reads of regular
//!   files that are not registered yet are missed. It ends with the last such ring, when the program's main thread
//!   has left, and before the program restricts its system calls.

use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

use impresario_interpose::State;

use super::by_call::{Known, RINGS};
use super::*;

/// From look to look: while something was found in one of the last looks, and at last.
const PAUSE_MS: (u32, u32) = (4, 16);
const LAST_LOOKS: u32 = 16;
/// Entries of a ring that are looked at in one look.
const ENTRIES_MAX: u32 = 64;
/// Entries whose places are compared: what is further back is missed.
const ORDER_MAX: usize = 512;
/// Once so many were taken, at most every so many-th may be missed.
const JUDGED_AFTER: u64 = 256;
const MISSED_SHARE: u64 = 10;
/// How long a program that makes a ring waits for the manager's answer at most, ms.
const ANSWER_MS: u32 = 5;
/// Descriptors that may be open then.
const MET: c_int = 64;
/// How often a thread that unmaps a ring or closes a file makes way for one that looks into it, and then waits for 1 ms: on a busy
/// machine that one may have been stopped in the middle, and what is left in the ring would not even be counted as missed.
const TURN_TRIES: u32 = 20;
const TURN_WAITS: u32 = 100;
/// How long one who wants no look to go on waits for its end, ms.
const SETTLE_MS: u32 = 50;

/// What is known of a ring that is looked into.
pub(super) struct Watch {
    state: AtomicU32,
    /// Entries up to this one were looked at, or missed.
    seen: AtomicU32,
    taken: AtomicU64,
    missed: AtomicU64,
    /// It was used for files that are watched.
    is_used: AtomicU32,
}

/// [`Watch::state`].
const IDLE: u32 = 0;
const READY: u32 = 1;
/// A thread is at it.
const BUSY: u32 = 2;

impl Watch {
    pub(super) const fn new() -> Watch {
        Watch {
            state: AtomicU32::new(IDLE),
            seen: AtomicU32::new(0),
            taken: AtomicU64::new(0),
            missed: AtomicU64::new(0),
            is_used: AtomicU32::new(0),
        }
    }

    /// It is not looked into any more.
    pub(super) fn end(&self) {
        self.state.store(IDLE, SeqCst);
    }
}

/// The process in which the thread runs.
static RUNS_IN: AtomicI32 = AtomicI32::new(0);
/// 1 during a look.
static LOOKS_NOW: AtomicU32 = AtomicU32::new(0);
static COUNT: AtomicU32 = AtomicU32::new(0);

fn here() -> i32 {
    std::process::id() as i32
}

/// How many looks there were, in this process and those that it was forked from.
pub fn count() -> u32 {
    COUNT.load(SeqCst)
}

/// Whether rings are looked into.
pub(super) fn are_taken() -> bool {
    RUNS_IN.load(Relaxed) == here()
}

/// The program has restricted its system calls: waits until no look goes on. The thread then makes none but that which ends it.
pub fn settle() {
    for _ in 0..SETTLE_MS {
        if LOOKS_NOW.load(SeqCst) == 0 || RUNS_IN.load(SeqCst) != here() {
            return;
        }
        pause(1);
    }
}

fn pause(ms: u32) {
    let moment = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(ms) * 1_000_000 };
    let _ = rustix::event::poll(&mut [], Some(&moment));
}

/// A ring is mapped: looks into it from now on.
pub(super) fn begin(ring: &Known) {
    if TABLE.consumer().generation() == 0 || !TABLE.consumer().here() {
        return;
    }
    let Some((head, _)) = ring.ends() else { return };
    // The thread registers no files: those that are open are met here, and others as they are opened, once the manager has answered.
    for _ in 0..ANSWER_MS {
        if TABLE.consumer().state() != State::Asked {
            break;
        }
        pause(1);
    }
    for fd in 0..MET {
        let _ = TABLE.watch(fd);
    }
    let watch = &ring.watch;
    watch.seen.store(head, Relaxed);
    watch.taken.store(0, Relaxed);
    watch.missed.store(0, Relaxed);
    watch.is_used.store(0, Relaxed);
    watch.state.store(READY, SeqCst);
    let before = RUNS_IN.load(SeqCst);
    if before == here() || RUNS_IN.compare_exchange(before, here(), SeqCst, SeqCst).is_err() {
        return;
    }
    if !TABLE.consumer().start_beside(run) {
        RUNS_IN.store(0, SeqCst);
        watch.end();
        if ring.flags.load(Relaxed) & POLLED != 0 {
            TABLE.consumer().unseen(Unseen { bytes: 0, rings: 1 });
        }
    }
}

/// A ring is about to be unmapped: looks into it for the last time.
pub(super) fn finish(ring: &Known) {
    look_in_turn(ring);
    ring.watch.end();
}

/// The program is about to close a descriptor: looks for what it has read by that, which could not be told afterwards.
#[inline]
pub fn closing(fd: c_int) {
    if RUNS_IN.load(Relaxed) != 0 && are_taken() && TABLE.is_watched(fd) {
        quietly(|| RINGS.iter().filter(|ring| is_ready(ring)).for_each(look_in_turn));
    }
}

/// Whether a ring is looked into, and it is this process's.
fn is_ready(ring: &Known) -> bool {
    ring.watch.state.load(SeqCst) != IDLE && ring.owner.load(Relaxed) == here()
}

/// Looks into a ring, after a thread that is at it.
fn look_in_turn(ring: &Known) {
    for tries in 0..TURN_TRIES + TURN_WAITS {
        if ring.watch.state.load(SeqCst) != BUSY {
            break;
        }
        match tries < TURN_TRIES {
            true => rustix::thread::sched_yield(),
            false => pause(1),
        }
    }
    look(ring);
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    quietly(serve);
    std::ptr::null_mut()
}

fn serve() {
    impresario_interpose::stand_apart();
    impresario_interpose::name_thread();
    let (mut pause_ms, mut in_vain) = (PAUSE_MS.0, 0u32);
    loop {
        pause(pause_ms);
        LOOKS_NOW.store(1, SeqCst);
        if TABLE.consumer().is_retired() {
            RUNS_IN.store(0, SeqCst);
            impresario_interpose::leave();
        }
        let mut found = false;
        for ring in RINGS.iter().filter(|ring| is_ready(ring)) {
            found |= look(ring);
        }
        let ended = !RINGS.iter().any(is_ready);
        LOOKS_NOW.store(0, SeqCst);
        COUNT.fetch_add(1, SeqCst);
        if ended {
            RUNS_IN.store(0, SeqCst);
            // Unless another ring was mapped meanwhile, for which no thread was started.
            let again = RINGS.iter().any(is_ready);
            if !again || RUNS_IN.compare_exchange(0, here(), SeqCst, SeqCst).is_err() {
                return;
            }
        }
        in_vain = if found { 0 } else { in_vain.saturating_add(1) };
        pause_ms = if in_vain < LAST_LOOKS { PAUSE_MS.0 } else { (pause_ms * 2).min(PAUSE_MS.1) };
    }
}

/// The places of entries, in the order in which they were handed over.
struct Order {
    first: u32,
    len: u32,
    places: [u32; ORDER_MAX],
}

impl Order {
    /// From the n-th entry on; `None` when the ring is gone.
    fn new(ring: &Known, first: u32, tail: u32) -> Option<Order> {
        let mut order = Order { first, len: 0, places: [0; ORDER_MAX] };
        order.go_on(ring, tail).then_some(order)
    }

    /// Up to those that have been handed over by now. False when they are too many, or the ring is gone.
    fn go_on(&mut self, ring: &Known, tail: u32) -> bool {
        let len = tail.wrapping_sub(self.first);
        let (from, to) = (self.len as usize, len as usize);
        let done = from == to
            || self.places.get_mut(from..to).is_some_and(|new| ring.places(self.first.wrapping_add(self.len), new));
        self.len = if done { len } else { self.len };
        done
    }

    /// The place of the n-th entry, unless it was used again.
    fn place(&self, n: u32) -> Option<u32> {
        let (place, later) = self.places.get(n.wrapping_sub(self.first) as usize..self.len as usize)?.split_first()?;
        (!later.contains(place)).then_some(*place)
    }
}

/// The n-th entry; `None` when it was written over, or is just being written.
fn copy(ring: &Known, order: &mut Order, n: u32) -> Option<Entry> {
    const WORDS: usize = ENTRY_BYTES / 4;
    let place = ring.entry(order.place(n)?);
    let mut words = [0u32; 2 * WORDS + 1];
    let parts = [(place, ENTRY_BYTES), (place, ENTRY_BYTES), (ring.tail(), 4)];
    if !peek_all(&parts, &mut words) || words[..WORDS] != words[WORDS..2 * WORDS] {
        return None;
    }
    if !order.go_on(ring, words[2 * WORDS]) {
        return None;
    }
    order.place(n)?;
    // SAFETY: an entry consists of numbers, and is as large.
    Some(unsafe { words.as_ptr().cast::<Entry>().read_unaligned() })
}

/// Looks into a ring, unless another thread does; true when it was used for watched files.
fn look(ring: &Known) -> bool {
    let watch = &ring.watch;
    if watch.state.compare_exchange(READY, BUSY, SeqCst, SeqCst).is_err() {
        return false;
    }
    let found = look_alone(ring);
    let after = if found.is_some() { READY } else { IDLE };
    // It may have been ended meanwhile.
    let _ = watch.state.compare_exchange(BUSY, after, SeqCst, SeqCst);
    found.unwrap_or(false)
}

/// Whether it cannot be known any more what an entry of a file that is watched has asked for.
fn is_over(entry: &Entry) -> bool {
    let op = match entry.operation {
        READV | READ | READ_FIXED => Op::Read,
        WRITEV | WRITE | WRITE_FIXED => Op::Write,
        _ => return false,
    };
    let is_of_length = !matches!(entry.operation, READV | WRITEV);
    let is_at_place = entry.offset != u64::MAX;
    !(is_of_length && is_at_place) && (entry.flags & OF_TABLE != 0 || wanted(entry.fd, op).is_some())
}

/// Whether an entry reads a regular file of which the manager has not said whether it is to be watched.
fn is_strange(entry: &Entry) -> bool {
    if !matches!(entry.operation, READ | READ_FIXED) || entry.flags & OF_TABLE != 0 || entry.fd < 0 {
        return false;
    }
    // SAFETY: used for one system call, which fails cleanly when the number is closed meanwhile.
    let file = unsafe { std::os::fd::BorrowedFd::borrow_raw(entry.fd) };
    let is_regular = |stat: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
    !TABLE.is_known(entry.fd) && rustix::fs::fstat(file).is_ok_and(is_regular)
}

/// `None`: it is not to be looked into any more.
fn look_alone(ring: &Known) -> Option<bool> {
    let (watch, count) = (&ring.watch, ring.count.load(Relaxed));
    let start_ns = now_ns();
    let (head, tail) = ring.ends()?;
    if ring.is_called.load(SeqCst) != 0 {
        return None;
    }
    let first = watch.seen.load(Acquire);
    let new = head.wrapping_sub(first);
    // What has been written over since.
    let gone = tail.wrapping_sub(first).saturating_sub(count.min(ORDER_MAX as u32)).min(new);
    let mut order = Order::new(ring, first.wrapping_add(gone), tail)?;
    let (mut missed, mut found) = (gone, false);
    let looked = (new - gone).min(ENTRIES_MAX);
    for n in 0..looked {
        let n = first.wrapping_add(gone + n);
        let Some(entry) = copy(ring, &mut order, n) else {
            missed += 1;
            continue;
        };
        if is_over(&entry) || is_strange(&entry) {
            missed += 1;
            found = true;
            continue;
        }
        if let Some(wish) = wish(&entry, |place| ring.file(place)) {
            found = true;
            wish.tell(start_ns, start_ns);
        }
    }
    watch.seen.store(first.wrapping_add(gone + looked), Relaxed);
    let taken = watch.taken.fetch_add(u64::from(gone + looked), Relaxed) + u64::from(gone + looked);
    let all_missed = watch.missed.fetch_add(u64::from(missed), Relaxed) + u64::from(missed);
    if found && watch.is_used.swap(1, Relaxed) == 0 {
        // What was missed before it was known that files are read.
        missed = u32::try_from(all_missed).unwrap_or(u32::MAX);
    }
    if missed > 0 && watch.is_used.load(Relaxed) != 0 {
        TABLE.consumer().missed(missed.into());
    }
    if taken >= JUDGED_AFTER && all_missed * MISSED_SHARE > taken {
        TABLE.consumer().unseen(Unseen { bytes: 0, rings: 1 });
        return None;
    }
    Some(found)
}
