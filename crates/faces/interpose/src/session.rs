//! The channel to the advice manager as the table's consumer: connecting, registering files, telling accesses, and doing
//! without when the manager is absent, stopped, dead or back again.
//!
//! - [`Assist::start`] says Hello when the library is loaded and does not wait for the answer (unless
//!   [`Assist::await_answer`] is called): it is looked for at later uses of descriptors. Until it is there, descriptors are unknown and asked about again.
//! - A manager that ends is noticed by its socket: at the next message, and every [`LOOK_NS`] while accesses are told.
//!   Then the generation becomes 0; uses of descriptors try again with growing patience, and with a new generation every
//!   file is registered anew at its next use.
//! - Hints that must come from inside the program are given by a thread of our own: see [`helper`].
//! - A forked child starts with a page of zeros ([`Page`]) and says Hello for itself at its first use of a descriptor.

mod helper;

use std::cell::UnsafeCell;
use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64};

use impresario_ring::message::{Mode, ToClient, ToManager, register};
use impresario_ring::patterns::{PATTERNS_BYTES_MAX, Patterns};
use impresario_ring::{Access, Op, Producer, Push, SLOTS, Unseen, now_ns, ring_bytes, waited_ns};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, OFlags, Stat};

use crate::beside;
use crate::consumer::{Claim, Consumer, Event, Occasion};
use crate::locks;
use crate::log::{self, Notice};
use crate::own::{self, Own};
use crate::paths::{self, NoPath, ProcName};
use crate::process::{Page, coarse_ns, may_be_in_handler, pid, quietly, stand_apart, stands_apart, thread};
use crate::socket::{self, Trouble};

/// How often the socket is looked at while accesses are told.
const LOOK_NS: u64 = 100_000_000;
/// How often the answer to Hello is looked for: at first, and when it does not come for [`PROMPT_NS`].
const ANSWER_NS: u64 = 50_000;
const ANSWER_NS_LATE: u64 = 5_000_000;
const PROMPT_NS: u64 = 100_000_000;
/// How long no message is sent after the manager's queue was full.
const BLOCKED_NS: u64 = 10_000_000;
/// A recorded program looks so often whether the manager has taken something.
const ROOM_NS: i64 = 1_000_000;
/// Patience between attempts to connect: the first, and the longest.
const PATIENCE_MS: u32 = 50;
const PATIENCE_MS_MAX: u32 = 10_000;
/// Bytes of a Unix socket's name with its zero.
const NAME_BYTES: usize = 108;

/// How far the channel is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum State {
    /// No manager.
    Apart = 0,
    /// Hello was said.
    Asked = 1,
    /// Files are registered.
    Ready = 2,
    /// Nothing more in this process.
    Off = 3,
}

static PAGE: Page = Page::new();
static STARTED: AtomicBool = AtomicBool::new(false);
static OFF: AtomicBool = AtomicBool::new(false);
/// The process whose descriptors `SOCKET` and `EVENT` are.
static OWNER: AtomicI32 = AtomicI32::new(0);
static SOCKET: Own = Own::new();
static EVENT: Own = Own::new();
/// What [`Assist::await_answer`] was told. A recorded program waits as long, in all, for a manager that is slower than it.
static AWAITED_MS: AtomicU64 = AtomicU64::new(0);
/// Never the same twice in a process or its forked children.
static GENERATIONS: AtomicU32 = AtomicU32::new(0);
static NEXT_FILE: AtomicU32 = AtomicU32::new(Claim::FIRST);
/// Numbers are even; this makes one that of a file that the manager has opened apart.
const APART: u32 = 1;
const _: () = assert!(Claim::FIRST & APART == 0);

/// Written with the session's lock held.
struct Locked<T>(UnsafeCell<T>);
// SAFETY: see each use: written before what makes it visible, with release and acquire.
unsafe impl<T> Sync for Locked<T> {}

static NAME: Locked<[u8; NAME_BYTES]> = Locked(UnsafeCell::new([0; NAME_BYTES]));
static RING: Locked<MaybeUninit<Producer>> = Locked(UnsafeCell::new(MaybeUninit::uninit()));
static RING_MADE: AtomicBool = AtomicBool::new(false);
/// Two places, used in turn: a thread may still compare a path with the patterns of the connection before.
static PATTERNS: [Locked<[u8; PATTERNS_BYTES_MAX]>; 2] =
    [const { Locked(UnsafeCell::new([0; PATTERNS_BYTES_MAX])) }; 2];
/// Which place, in the highest bit, [`EVERYTHING`] where all paths match, how many of the first patterns are of small files, too, and, in
/// the lower half, how many bytes.
static PATTERNS_NOW: AtomicU64 = AtomicU64::new(0);
const SECOND_PLACE: u64 = 1 << 63;
const EVERYTHING: u64 = 1 << 62;
const OF_SMALL_SHIFT: u32 = 32;
const OF_SMALL_MAX: u32 = (1 << 30) - 1;
const _: () = assert!(PATTERNS_BYTES_MAX < OF_SMALL_MAX as usize);

/// The consumer that tells the advice manager. There is one channel in a process, whatever the number of values.
#[derive(Clone, Copy, Debug, Default)]
pub struct Assist;

impl Assist {
    /// Connects for the first time. To be called once, when the library is loaded: `socket` is the name from the
    /// environment or the default, `log` the file for messages, `libgpfs` GPFS's library if the environment names it.
    pub fn start(&self, socket: &CStr, log: Option<&CStr>, libgpfs: Option<&CStr>) {
        quietly(|| {
            if let Some(log) = log {
                log::set_name(log);
            }
            let bytes = socket.to_bytes_with_nul();
            if bytes.len() > NAME_BYTES {
                log::say(Notice::BadSocketName);
                return;
            }
            // SAFETY: no thread reads it before `STARTED`.
            unsafe { (&mut *NAME.0.get())[..bytes.len()].copy_from_slice(bytes) };
            helper::set_library(libgpfs.unwrap_or(impresario_gpfs::LIBRARY));
            let _ = PAGE.wipe_on_fork();
            adopt();
            STARTED.store(true, Release);
            self.idle();
        });
    }

    /// Waits for the answer to Hello, at most so long and never more than ten seconds. For recorded runs only, which are
    /// to miss nothing; to be called when the library is loaded. Forked children wait as long. A manager that is absent or
    /// ends is not waited for. While it records, one whose queue or ring is full is waited for as long, too, in all.
    pub fn await_answer(&self, patience_ms: u64) {
        const PATIENCE_MS_MOST: u64 = 10_000;
        let patience_ms = patience_ms.min(PATIENCE_MS_MOST);
        AWAITED_MS.store(patience_ms, Relaxed);
        let end = now_ns().saturating_add(patience_ms * 1_000_000);
        while self.state() == State::Asked && now_ns() < end {
            let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: ANSWER_NS_LATE as _ };
            quietly(|| {
                SOCKET.with(|socket| {
                    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::IN)];
                    let _ = rustix::event::poll(&mut fds, Some(&pause));
                });
            });
        }
    }

    /// How far the channel is; looks for the answer to Hello.
    pub fn state(&self) -> State {
        quietly(|| {
            if OFF.load(Relaxed) {
                return Some(State::Off);
            }
            if PAGE.generation.load(Acquire) == 0 {
                self.idle();
            }
            if PAGE.state.load(Acquire) == State::Asked as u32 {
                look_for_answer();
            }
            Some(match PAGE.state.load(Acquire) {
                1 => State::Asked,
                2 => State::Ready,
                _ => State::Apart,
            })
        })
        .unwrap_or(State::Apart)
    }

    /// To be called before every fork.
    pub fn forking(&self) {
        quietly(helper::wait_for_loader);
    }

    /// For a system without pages that are wiped: to be called in every forked child.
    pub fn forked(&self) {
        quietly(|| {
            if !STARTED.load(Acquire) {
                return;
            }
            PAGE.generation.store(0, SeqCst);
            PAGE.adopted.store(0, SeqCst);
            PAGE.lock.store(0, SeqCst);
            PAGE.next_try_ns.store(0, SeqCst);
            PAGE.helper.store(helper::NONE, SeqCst);
            after_fork();
        });
        let patience_ms = AWAITED_MS.load(Relaxed);
        if patience_ms > 0 {
            self.await_answer(patience_ms);
        }
    }

    /// Makes no system call any more: the program is about to restrict what it may call.
    pub fn retire(&self) {
        quietly(|| {
            if STARTED.load(Acquire) && !OFF.load(Relaxed) {
                // A child of `vfork` restricts itself, but what follows is its parent's memory.
                if PAGE.adopted.load(Relaxed) != 0 && !self.here() {
                    return;
                }
                if PAGE.generation.load(Relaxed) != 0 {
                    log::say(Notice::Sandboxed);
                }
                OFF.store(true, SeqCst);
                PAGE.generation.store(0, SeqCst);
                if self.here() {
                    helper::end();
                }
            }
        });
    }

    /// Whether the program has restricted its system calls, so that none of ours may be made any more.
    pub fn is_retired(&self) -> bool {
        OFF.load(SeqCst)
    }

    /// Starts a thread beside the program's, where one can be started here and now: not in a signal handler, in a child of
    /// `vfork`, or in a program that restricts its system calls.
    pub fn start_beside(&self, body: beside::Body) -> bool {
        quietly(|| !self.is_retired() && self.here() && !may_be_in_handler() && beside::spawn(body) == 0)
    }

    /// Whether a number is one of the library's own descriptors in this process.
    #[inline]
    pub fn owns(&self, fd: i32) -> bool {
        SOCKET.is(fd) || EVENT.is(fd)
    }

    /// The library's own numbers, the smaller one first.
    pub fn own_numbers(&self) -> [Option<i32>; 2] {
        let (a, b) = (SOCKET.number(), EVENT.number());
        if a.is_some_and(|a| b.is_none_or(|b| a < b)) { [a, b] } else { [b, a] }
    }

    /// To be called before the program locks a part of a file for itself as a process.
    pub fn locking(&self) {
        locks::begin();
    }

    /// To be called before the program locks an open file of interest.
    pub fn locking_open_file(&self) {
        locks::begin_of_open_files();
    }

    /// To be called before the program takes a lease of an open file.
    pub fn leasing(&self) {
        locks::begin_of_leases();
    }

    /// Frees a number that the program wants for itself.
    pub fn step_aside(&self, fd: i32) {
        if self.owns(fd) && self.here() {
            quietly(|| {
                SOCKET.step_aside(fd);
                EVENT.step_aside(fd);
            });
        }
    }

    /// Gives up the library's descriptors because the program has none left; true when that helped.
    pub fn give_way(&self) -> bool {
        quietly(|| {
            if !self.here() || (SOCKET.number().is_none() && EVENT.number().is_none()) {
                return false;
            }
            log::say(Notice::NoPlace);
            PAGE.patience_ms.store(PATIENCE_MS_MAX, Relaxed);
            apart();
            true
        })
    }

    /// Puts an access into the ring; whether the manager will find it there.
    #[inline]
    fn push(&self, generation: u32, file: u32, event: Event) -> bool {
        // A number of a connection that is gone means nothing in the next one's ring.
        if generation != PAGE.generation.load(Acquire) {
            return false;
        }
        let Some(ring) = ring() else { return false };
        let short = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let access = Access {
            file,
            op: event.op,
            flags: event.flags,
            thread: thread(generation),
            offset: event.offset,
            len_bytes: short(event.len_bytes),
            duration_ns: short(event.duration_ns),
            start_ns: event.start_ns,
        };
        if PAGE.mode.load(Relaxed) == Mode::Record as u32 && !ring.has_room() && is_patient() {
            await_room(ring);
        }
        let pushed = ring.push(access);
        match pushed {
            Push::Stored | Push::Full => {}
            Push::Wake => wake(),
            Push::Closed => quietly(|| lost(Notice::Lost)),
        }
        if ring.helper_wanted().is_some() {
            helper::start();
        }
        if event.start_ns >= PAGE.next_look_ns.load(Relaxed) {
            quietly(|| look_after_socket(event.start_ns));
        }
        matches!(pushed, Push::Stored | Push::Wake)
    }
}

/// Makes the page this process's.
fn adopt() {
    OWNER.store(pid(), SeqCst);
    PAGE.adopted.store(1, SeqCst);
}

/// In a forked child: the parent's channel is not ours.
fn after_fork() {
    SOCKET.forget_users();
    EVENT.forget_users();
    SOCKET.close();
    EVENT.close();
    log::forget();
    adopt();
}

/// Runs with the session's lock; not at all when another thread, or the code that this signal interrupted, has it.
fn locked(run: impl FnOnce()) {
    if PAGE.lock.compare_exchange(0, 1, AcqRel, Relaxed).is_ok() {
        run();
        PAGE.lock.store(0, Release);
    }
}

/// The ring, once it was made.
fn ring() -> Option<&'static Producer> {
    // SAFETY: written before `RING_MADE` and never changed or dropped.
    RING_MADE.load(Acquire).then(|| unsafe { (*RING.0.get()).assume_init_ref() })
}

/// A fresh ring's memory.
fn fresh_ring() -> Option<OwnedFd> {
    if let Some(ring) = ring() {
        return ring.renew().ok();
    }
    let (producer, memory) = Producer::create(SLOTS).ok()?;
    // SAFETY: with the lock held, and no thread reads it before `RING_MADE`.
    unsafe { (*RING.0.get()).write(producer) };
    RING_MADE.store(true, Release);
    Some(memory)
}

/// The manager's socket.
fn socket_name() -> Option<&'static CStr> {
    // SAFETY: written before `STARTED`, which was seen, and never again.
    CStr::from_bytes_until_nul(unsafe { &*NAME.0.get() }).ok()
}

/// Says Hello. With the lock held.
fn connect() {
    let patience = PAGE.patience_ms.load(Relaxed).clamp(PATIENCE_MS, PATIENCE_MS_MAX);
    PAGE.next_try_ns.store(coarse_ns().saturating_add(u64::from(patience) * 1_000_000), Relaxed);
    PAGE.patience_ms.store(patience.saturating_mul(2), Relaxed);
    let Some(new) = socket_name().and_then(socket::connect) else { return log::say(Notice::NoManager) };
    if SOCKET.put(new).is_none() {
        return log::say(Notice::NoPlace);
    }
    let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
    let event = rustix::event::eventfd(0, flags);
    if event.ok().and_then(|e| EVENT.put(e)).is_none() {
        SOCKET.close();
        return log::say(Notice::NoPlace);
    }
    let Some(memory) = fresh_ring() else {
        SOCKET.close();
        EVENT.close();
        return log::say(Notice::NoRing);
    };
    let hello = ToManager::Hello { pid: pid().unsigned_abs(), ring_bytes: ring_bytes(SLOTS) as u32 }.encode();
    let said = SOCKET.with(|s| EVENT.with(|e| socket::send(s, &hello, &[memory.as_fd(), e])));
    own::close_raw(memory);
    if said.flatten() != Some(Ok(())) {
        SOCKET.close();
        EVENT.close();
        return log::say(Notice::NoManager);
    }
    NEXT_FILE.store(Claim::FIRST, Relaxed);
    PAGE.blocked_until_ns.store(0, Relaxed);
    PAGE.next_look_ns.store(0, Relaxed);
    PAGE.asked_ns.store(now_ns(), Relaxed);
    PAGE.state.store(State::Asked as u32, SeqCst);
    let generation = GENERATIONS.fetch_add(1, SeqCst).wrapping_add(1);
    PAGE.generation.store(generation.max(1), SeqCst);
}

/// The channel is broken.
fn lost(line: Notice) {
    log::say(line);
    apart();
}

fn apart() {
    locked(|| {
        PAGE.generation.store(0, SeqCst);
        PAGE.state.store(State::Apart as u32, SeqCst);
        let patience = PAGE.patience_ms.load(Relaxed).clamp(PATIENCE_MS, PATIENCE_MS_MAX);
        PAGE.next_try_ns.store(coarse_ns().saturating_add(u64::from(patience) * 1_000_000), Relaxed);
        SOCKET.close();
        EVENT.close();
    });
}

/// Looks for the answer to Hello, now and then.
fn look_for_answer() {
    let now = now_ns();
    let next = PAGE.next_look_ns.load(Relaxed);
    let prompt = now.saturating_sub(PAGE.asked_ns.load(Relaxed)) < PROMPT_NS;
    let pause = if prompt { ANSWER_NS } else { ANSWER_NS_LATE };
    if now < next || PAGE.next_look_ns.compare_exchange(next, now + pause, AcqRel, Relaxed).is_err() {
        return;
    }
    let mut trouble = None;
    locked(|| {
        if PAGE.state.load(Acquire) != State::Asked as u32 {
            return;
        }
        match SOCKET.with(socket::answer) {
            Some(Err(Trouble::Wait)) => {}
            Some(Ok(Some((ToClient::Welcome { mode, patterns_len }, Some(patterns))))) => {
                let read = take_patterns(patterns.as_fd(), patterns_len as usize);
                own::close_raw(patterns);
                if read.is_none() {
                    trouble = Some(Notice::BadAnswer);
                    return;
                }
                PAGE.mode.store(mode as u32, Relaxed);
                PAGE.patience_ms.store(PATIENCE_MS, Relaxed);
                PAGE.next_look_ns.store(now + LOOK_NS, Relaxed);
                PAGE.state.store(State::Ready as u32, Release);
            }
            Some(Ok(Some((ToClient::Refused { .. }, extra)))) => {
                if let Some(extra) = extra {
                    crate::own::close_raw(extra);
                }
                trouble = Some(Notice::Refused);
            }
            Some(Ok(_)) => trouble = Some(Notice::BadAnswer),
            Some(Err(_)) | None => trouble = Some(Notice::Lost),
        }
    });
    match trouble {
        None => {}
        Some(Notice::Lost) => lost(Notice::Lost),
        Some(line) => {
            // It will hardly say anything else soon.
            PAGE.patience_ms.store(PATIENCE_MS_MAX, Relaxed);
            lost(line);
        }
    }
}

/// Copies the patterns out of the manager's memory, which may be anything. With the lock held.
fn take_patterns(memory: BorrowedFd<'_>, len: usize) -> Option<()> {
    let place = (PATTERNS_NOW.load(Relaxed) >> 63 ^ 1) as usize;
    // SAFETY: with the lock held; readers look at the other place, or are done with this one since long ago.
    let bytes = unsafe { &mut *PATTERNS[place].0.get() }.get_mut(..len)?;
    // A regular file does not make a reader wait; a pipe would.
    if FileType::from_raw_mode(rustix::fs::fstat(memory).ok()?.st_mode) != FileType::RegularFile {
        return None;
    }
    let mut done = 0;
    while done < len {
        match rustix::io::pread(memory, &mut bytes[done..], done as u64).ok()? {
            0 => return None,
            more => done += more,
        }
    }
    let patterns = Patterns::parse(bytes)?;
    let everything = if patterns.match_everything() { EVERYTHING } else { 0 };
    let of_small = u64::from(patterns.of_small_files().min(OF_SMALL_MAX)) << OF_SMALL_SHIFT;
    PATTERNS_NOW.store((place as u64) << 63 | everything | of_small | len as u64, Release);
    Some(())
}

/// Whether a file of this length that was just opened is passed over: a small one in a lull, and an empty one always. What an empty
/// file gets is in memory when it is read, so programs that make many small files tell of none.
fn is_passed_over(size_bytes: i64) -> bool {
    let Some(ring) = ring() else { return false };
    let small_bytes = ring.small_bytes();
    small_bytes > 0 && (size_bytes == 0 || size_bytes <= i64::from(small_bytes) && ring.is_lull())
}

/// Whether a recorded run is learnt from: a complete record passes no file over.
fn is_lesson() -> bool {
    ring().is_some_and(|ring| ring.small_bytes() > 0)
}

/// The number of the first pattern that matches.
fn first_match(path: &[u8]) -> Option<u32> {
    let now = PATTERNS_NOW.load(Acquire);
    let (place, len) = (usize::from(now & SECOND_PLACE != 0), now as u32 as usize);
    // SAFETY: the place that `PATTERNS_NOW` shows is not written.
    let bytes = unsafe { &*PATTERNS[place].0.get() }.get(..len).unwrap_or(&[]);
    Patterns::parse(bytes)?.first_match(path)
}

/// Whether a file is told of however small it is: where there is a plan for any file, its path is looked at.
fn is_of_small(fd: i32, stat: &Stat) -> bool {
    let number = (PATTERNS_NOW.load(Acquire) >> OF_SMALL_SHIFT) as u32 & OF_SMALL_MAX;
    let is_named = |path: &[u8]| first_match(path).is_some_and(|first| first < number);
    number > 0 && paths::with_path(fd, stat.st_nlink == 0, is_named).unwrap_or(false)
}

fn look_after_socket(now: u64) {
    let next = PAGE.next_look_ns.load(Relaxed);
    if now < next || PAGE.next_look_ns.compare_exchange(next, now + LOOK_NS, AcqRel, Relaxed).is_err() {
        return;
    }
    if PAGE.state.load(Acquire) == State::Ready as u32 && SOCKET.with(socket::alive) != Some(true) {
        lost(Notice::Lost);
    }
}

/// Whether this program is recorded and may still wait for the manager. What it waited in vain is counted until the
/// manager takes something, so that one that was stopped costs the patience once.
fn is_patient() -> bool {
    PAGE.mode.load(Relaxed) == Mode::Record as u32 && PAGE.stalled_ms.load(Relaxed) < AWAITED_MS.load(Relaxed)
}

/// Waits a moment for the manager, which is to take what lies before it.
fn pause(wait: impl FnOnce(&rustix::time::Timespec)) {
    let began = now_ns();
    wait(&rustix::time::Timespec { tv_sec: 0, tv_nsec: ROOM_NS as _ });
    // At least one: a wait that ends at once is counted all the same, so the sum of them ends.
    PAGE.stalled_ms.fetch_add((now_ns().saturating_sub(began) / 1_000_000).max(1), Relaxed);
}

/// Waits until the ring has room, as long as a recorded program may.
#[cold]
#[inline(never)]
fn await_room(ring: &Producer) {
    quietly(|| {
        wake();
        while !ring.has_room() && !ring.is_closed() && is_patient() {
            pause(|moment| {
                let _ = rustix::event::poll(&mut [], Some(moment));
            });
        }
        if ring.has_room() {
            PAGE.stalled_ms.store(0, Relaxed);
        }
    });
}

/// Sends a message, unless the manager's queue was full a moment ago. A recorded program waits until there is room.
fn send(message: ToManager, file: Option<BorrowedFd<'_>>) -> Result<(), Trouble> {
    let now = coarse_ns();
    if now < PAGE.blocked_until_ns.load(Relaxed) {
        return Err(Trouble::Wait);
    }
    let packet = message.encode();
    let attempt = || {
        let sent = SOCKET.with(|s| match file {
            Some(file) => socket::send_file(s, &packet, file),
            None => socket::send(s, &packet, &[]),
        });
        sent.unwrap_or(Err(Trouble::Gone))
    };
    let mut result = attempt();
    while result == Err(Trouble::Wait) && is_patient() {
        pause(|moment| {
            // Too many descriptors on their way make a socket that can be written to refuse them: no poll tells of that.
            let _ = rustix::event::poll(&mut [], Some(moment));
        });
        result = attempt();
        if result.is_ok() {
            PAGE.stalled_ms.store(0, Relaxed);
        }
    }
    match result {
        Err(Trouble::Wait) => PAGE.blocked_until_ns.store(now + BLOCKED_NS, Relaxed),
        Err(Trouble::Gone) => lost(Notice::Lost),
        _ => {}
    }
    result
}

/// Registers a file whose path matches.
///
/// What is open for reading only is shared with the manager, so that it can advise on the program's own open file. What
/// can be written is opened once more for reading: a manager that held the writable file a moment longer than the
/// program would keep it from being executed, and keep locks. So it is with any file of a program that locks open files. In one that
/// locks files as a process, the manager gets no more than a name of it, for the record. A file with a lease is left alone.
fn register(fd: BorrowedFd<'_>, number: i32, access: OFlags, opened: bool, apart: bool) -> Claim {
    let writes = access != OFlags::RDONLY;
    let is_apart = writes || apart || locks::are_of_open_files();
    // The manager may open what is shared with it once more, too. There it is asked only where the program takes leases.
    if (is_apart || locks::are_leases_used()) && locks::has_write_lease(fd) {
        return Claim::Ignore;
    }
    let file = NEXT_FILE.fetch_add(2, Relaxed) | if is_apart { APART } else { 0 };
    let mut flags = if opened { 0 } else { register::FOUND };
    flags |= if access == OFlags::WRONLY { 0 } else { register::READ };
    flags |= if writes { register::WRITE } else { 0 };
    let sent = if is_apart {
        flags |= register::REOPENED;
        let again = locks::how_to_open_again();
        let name = ProcName::new(number);
        let Ok(other) = rustix::fs::open(name.as_c_str(), again, rustix::fs::Mode::empty()) else {
            return Claim::Ignore;
        };
        let sent = send(ToManager::Register { file, flags }, Some(other.as_fd()));
        locks::close_again(other, again);
        sent
    } else {
        send(ToManager::Register { file, flags }, Some(fd))
    };
    match sent {
        Ok(()) => Claim::Watch(file),
        Err(_) => Claim::Later,
    }
}

impl Consumer for Assist {
    #[inline]
    fn generation(&self) -> u32 {
        PAGE.generation.load(Acquire)
    }

    fn idle(&self) {
        if !STARTED.load(Acquire) || OFF.load(Relaxed) {
            return;
        }
        if PAGE.adopted.load(Acquire) == 0 {
            locked(after_fork);
        }
        if coarse_ns() < PAGE.next_try_ns.load(Relaxed) || !self.here() {
            return;
        }
        locked(|| {
            if PAGE.generation.load(Acquire) == 0 {
                connect();
            }
        });
    }

    #[inline]
    fn wants(&self, op: Op) -> bool {
        let recorded = || PAGE.mode.load(Relaxed) == Mode::Record as u32;
        match op {
            Op::Read | Op::Mmap => true,
            // Nothing is learnt from them.
            Op::Seek => recorded() && !is_lesson(),
            Op::Write | Op::Close => recorded(),
        }
    }

    fn answers(&self) -> bool {
        if PAGE.state.load(Acquire) == State::Asked as u32 {
            look_for_answer();
        }
        // Nothing can be registered while the manager's queue is full.
        PAGE.state.load(Acquire) == State::Ready as u32 && coarse_ns() >= PAGE.blocked_until_ns.load(Relaxed)
    }

    fn claim(&self, fd: i32, stat: &Stat, occasion: Occasion) -> Claim {
        if self.owns(fd) {
            return Claim::Later;
        }
        look_after_socket(coarse_ns());
        // SAFETY: used for system calls that fail cleanly when the program closes the number meanwhile.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Claim::Ignore;
        }
        let opened = occasion == Occasion::Opened;
        if opened && is_passed_over(stat.st_size) && !is_of_small(fd, stat) {
            return Claim::PassOver;
        }
        let Ok(flags) = rustix::fs::fcntl_getfl(borrowed) else { return Claim::Later };
        // An output gets no hints, however it was opened: what it is read back from is memory.
        let access = if occasion == Occasion::Written { OFlags::WRONLY } else { flags & OFlags::RWMODE };
        let only_written = access == OFlags::WRONLY && PAGE.mode.load(Relaxed) == Mode::Advise as u32;
        if flags.contains(OFlags::PATH) || only_written {
            return Claim::Ignore;
        }
        // Where every path matches, its own is not asked for.
        let is_wanted = match PATTERNS_NOW.load(Acquire) & EVERYTHING {
            0 => paths::with_path(fd, stat.st_nlink == 0, |path| first_match(path).is_some()),
            _ => Ok(true),
        };
        match is_wanted {
            Ok(true) => register(borrowed, fd, access, opened, false),
            Ok(false) | Err(NoPath::Unknown) => Claim::Ignore,
            Err(NoPath::Busy) => Claim::Later,
        }
    }

    fn is_apart(&self, file: u32) -> bool {
        file & APART != 0
    }

    fn claim_apart(&self, fd: i32) -> Claim {
        // SAFETY: as in `claim`.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        match rustix::fs::fcntl_getfl(borrowed) {
            Ok(flags) => register(borrowed, fd, flags & OFlags::RWMODE, true, true),
            Err(_) => Claim::Ignore,
        }
    }

    #[inline]
    fn tell(&self, generation: u32, file: u32, event: Event) {
        self.push(generation, file, event);
    }

    fn passes_over(&self, event: Event) -> bool {
        let Some(ring) = ring() else { return false };
        if event.op == Op::Write {
            // Only who learns from a run hears of them. What is written of a file that becomes long is no input, whatever a server's clock
            // says of when it was changed.
            return event.offset.saturating_add(event.len_bytes) <= ring.small_bytes().into();
        }
        let waited_ns = waited_ns(event.op, event.flags, event.len_bytes, event.duration_ns);
        let passes = waited_ns.is_some_and(|ns| ring.may_wait(ns));
        if passes {
            ring.add_passed_over(event.len_bytes);
        }
        passes
    }

    fn unseen(&self, what: Unseen) {
        if let Some(ring) = ring() {
            ring.add_unseen(what);
        }
    }

    fn missed(&self, accesses: u64) {
        if let Some(ring) = ring() {
            ring.add_dropped(accesses);
        }
    }

    fn release(&self, generation: u32, file: u32) {
        let now = now_ns();
        let close = Event { op: Op::Close, flags: 0, offset: 0, len_bytes: 0, start_ns: now, duration_ns: 0 };
        // In the ring it costs the program no call and stands behind the file's accesses.
        if !self.push(generation, file, close) && generation == PAGE.generation.load(Acquire) {
            let _ = send(ToManager::Unregister { file }, None);
        }
    }

    fn here(&self) -> bool {
        pid() == OWNER.load(Relaxed) && !stands_apart()
    }
}

#[cold]
#[inline(never)]
fn wake() {
    quietly(|| {
        let write = |event: BorrowedFd<'_>| rustix::io::write(event, &1u64.to_ne_bytes());
        if Assist.here() {
            let _ = EVENT.with(write);
        } else if stands_apart() && pid() == OWNER.load(Relaxed) {
            let _ = EVENT.with_unopened(write);
        }
    });
}
