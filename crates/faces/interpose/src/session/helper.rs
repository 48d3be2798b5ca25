//! The thread that gives hints from inside the program, because GPFS follows those of one file for each process only, and
//! that reads for the manager what is to be charged to the program. The manager decides; this thread makes the call that an
//! [order](impresario_ring::order) asks for, which may block, and answers.
//!
//! - It is started when the manager wants it, at a read of a watched file, and never in a signal handler or in a
//!   program that restricts its system calls. All signals are blocked in it.
//! - It has descriptors of its own (`CLOSE_RANGE_UNSHARE`, Linux 5.9). The file comes with each order, from the
//!   manager, to which the program's open file was sent. So it can mistake no number for another, the program never
//!   meets a descriptor of its, and closing one loses no lock of the program.
//! - A forked child has none; it gets its own when it is wanted there.
//! - Where anything fails it ends, and the manager gives hints as it would without it.

use std::ffi::c_void;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsRawFd;
use std::panic::catch_unwind;
use std::sync::atomic::AtomicPtr;

use impresario_gpfs::Library;
use impresario_ring::order::{Answer, READ_BYTES_MAX, Task};
use rustix::fs::Mode as FileMode;

use super::*;

/// [`Page::helper`]: there is none, as in a fresh process.
pub(super) const NONE: u32 = 0;
const RUNS: u32 = 1;
const NEVER: u32 = 2;

/// How long until starting it is tried again.
const TRY_NS: u64 = 10_000_000;
/// How often it looks whether it is wanted (again), and whether the program has ended.
const LOOK: rustix::time::Timespec = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
/// How long the program waits for its end before it restricts its system calls.
const END_WITHIN_MS: u32 = 50;
const LIBRARY_BYTES: usize = 1024;
/// Where what is read goes: the same few pages again and again. No one looks at it.
const SCRATCH_BYTES: usize = 64 << 10;

static SCRATCH: Locked<[u8; SCRATCH_BYTES]> = Locked(UnsafeCell::new([0; SCRATCH_BYTES]));
static LIBRARY: Locked<[u8; LIBRARY_BYTES]> = Locked(UnsafeCell::new([0; LIBRARY_BYTES]));
/// The library's handle, once it is loaded; in a forked child, the parent's.
static HANDLE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
/// The loader is at work for us.
static LOADING: AtomicBool = AtomicBool::new(false);

/// Notes the name of GPFS's library, before there are other threads. Empty, or too long, none is loaded.
pub(super) fn set_library(name: &CStr) {
    let bytes = name.to_bytes_with_nul();
    if bytes.len() <= LIBRARY_BYTES {
        // SAFETY: no thread reads it before `STARTED`.
        unsafe { (&mut *LIBRARY.0.get())[..bytes.len()].copy_from_slice(bytes) };
    }
}

fn library_name() -> Option<&'static CStr> {
    // SAFETY: written before `STARTED`, which was seen, and never again.
    let name = CStr::from_bytes_until_nul(unsafe { &*LIBRARY.0.get() }).ok();
    name.filter(|name| !name.is_empty())
}

/// Starts the thread, if it does not run yet and can be started here and now.
#[cold]
#[inline(never)]
pub(super) fn start() {
    if PAGE.helper.load(Relaxed) != NONE {
        return;
    }
    quietly(|| {
        let now = coarse_ns();
        let next = PAGE.helper_try_ns.load(Relaxed);
        let mine = now >= next && PAGE.helper_try_ns.compare_exchange(next, now + TRY_NS, AcqRel, Relaxed).is_ok();
        if !mine || OFF.load(Relaxed) || !Assist.here() || may_be_in_handler() {
            return;
        }
        if PAGE.helper.compare_exchange(NONE, RUNS, AcqRel, Relaxed).is_ok() && beside::spawn(run) != 0 {
            PAGE.helper.store(NEVER, Release);
        }
    });
}

/// Before the program restricts its system calls: makes the thread end, and waits a moment. Should it hang in the file
/// system, it ends later, by the one system call that every program may make.
pub(super) fn end() {
    if PAGE.helper.load(Acquire) != RUNS {
        return;
    }
    // The manager then hangs up on the thread, too.
    let _ = SOCKET.with(|socket| rustix::net::shutdown(socket, rustix::net::Shutdown::Both));
    for _ in 0..END_WITHIN_MS {
        if PAGE.helper.load(Acquire) != RUNS {
            return;
        }
        let moment = rustix::time::Timespec { tv_sec: 0, tv_nsec: 1_000_000 };
        let _ = rustix::event::poll(&mut [], Some(&moment));
    }
}

/// Before a fork: a child must not find the loader half done. It is so for a moment, once in a program.
pub(super) fn wait_for_loader() {
    for _ in 0..1000 {
        if !LOADING.load(Acquire) {
            return;
        }
        rustix::thread::sched_yield();
    }
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    let ended = catch_unwind(serve).unwrap_or(Some(Notice::NoHelper));
    end_when_restricted();
    if let Some(line) = ended {
        log::say(line);
    }
    PAGE.helper.store(NEVER, Release);
    std::ptr::null_mut()
}

/// Where the program restricts its system calls, this thread makes no other call than this. To be asked after
/// everything that may have taken long.
fn end_when_restricted() {
    if OFF.load(SeqCst) {
        PAGE.helper.store(NEVER, Release);
        // Its descriptors are closed by that.
        beside::leave();
    }
}

fn serve() -> Option<Notice> {
    stand_apart();
    beside::name_thread();
    if !separate_descriptors() || !main_thread_is_there() {
        return Some(Notice::NoHelper);
    }
    let mut library = None;
    while main_thread_is_there() {
        if let Some(client) = ring().and_then(Producer::helper_wanted)
            && let Err(line) = converse(client, &mut library)
        {
            // Where the library's name says that there is none, that is as it should be.
            return library_name().map(|_| line);
        }
        let _ = rustix::event::poll(&mut [], Some(&LOOK));
        end_when_restricted();
    }
    None
}

/// A program whose main thread has left ends when all its other threads have: this one must not keep it.
fn main_thread_is_there() -> bool {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let Ok(stat) = rustix::fs::open(c"/proc/self/stat", flags, FileMode::empty()) else { return false };
    let mut text = [0u8; 256];
    let len = rustix::io::read(&stat, &mut text[..]).unwrap_or(0);
    own::close_raw(stat);
    // The state stands after the name in brackets, which may hold anything.
    let text = &text[..len];
    let state = text.iter().rposition(|byte| *byte == b')').and_then(|at| text.get(at + 2));
    state.is_some_and(|state| !b"ZXx".contains(state))
}

/// Gives this thread a table of descriptors of its own, empty but for the first three numbers: a library that writes
/// to its standard output writes nowhere.
fn separate_descriptors() -> bool {
    const CLOSE_RANGE_UNSHARE: u32 = 2;
    // SAFETY: closes what this thread alone has from this call on; past our own hook.
    if unsafe { libc::syscall(libc::SYS_close_range, 0u32, u32::MAX, CLOSE_RANGE_UNSHARE) } != 0 {
        return false;
    }
    // They stay open as long as the thread.
    let nowhere = || rustix::fs::open(c"/dev/null", OFlags::RDWR, FileMode::empty()).map(std::mem::forget);
    (0..3).all(|_| nowhere().is_ok())
}

fn load() -> Result<Library, Notice> {
    let name = library_name().ok_or(Notice::NoGpfs)?;
    LOADING.store(true, SeqCst);
    let inherited = HANDLE.swap(std::ptr::null_mut(), AcqRel);
    if !inherited.is_null() {
        // A forked child's: it may remember descriptors that are not here.
        // SAFETY: loaded by the parent's thread of this kind, which is not here.
        unsafe { Library::unload(inherited) };
    }
    // A program that calls it would share what it remembers of descriptors with this thread.
    let loaded = match Library::is_loaded(name) {
        true => Err(Notice::OwnGpfs),
        false => Library::load(name).map_err(|_| Notice::NoGpfs),
    };
    if let Ok(library) = &loaded {
        HANDLE.store(library.handle(), Release);
    }
    LOADING.store(false, SeqCst);
    loaded
}

/// Takes orders until the manager hangs up, or GPFS's library is needed and cannot be loaded: then the manager is to do without
/// this thread.
fn converse(client: NonZeroU64, library: &mut Option<Library>) -> Result<(), Notice> {
    let Some(socket) = socket_name().and_then(socket::connect) else { return Ok(()) };
    let mut ended = Ok(());
    let hello = ToManager::Helper { client: client.get() }.encode();
    if socket::send(socket.as_fd(), &hello, &[]).is_ok() {
        loop {
            let ready = rustix::event::poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&LOOK));
            end_when_restricted();
            match ready {
                Ok(0) if main_thread_is_there() => continue,
                Ok(1..) => {}
                _ => break,
            }
            let (task, file) = match socket::order(socket.as_fd()) {
                Ok(order) => order,
                Err(Trouble::Wait) => continue,
                Err(_) => break,
            };
            let done = match task {
                Task::Read { start, bytes } => read_in(file.as_fd(), start, bytes),
                Task::Hint(hint) => {
                    if library.is_none() {
                        match load() {
                            Ok(loaded) => *library = Some(loaded),
                            Err(line) => ended = Err(line),
                        }
                        end_when_restricted();
                    }
                    let Some(library) = library else {
                        own::close_raw(file);
                        break;
                    };
                    library.give(file.as_fd(), &hint)
                }
            };
            end_when_restricted();
            let answer = match done {
                Ok(accepted) => Answer { errno: 0, accepted },
                Err(e) => {
                    let errno = e.raw_os_error().filter(|errno| *errno > 0).unwrap_or(libc::EIO);
                    Answer { errno: errno.unsigned_abs(), accepted: 0 }
                }
            };
            own::close_raw(file);
            if socket::send_answer(socket.as_fd(), answer).is_err() {
                break;
            }
        }
    }
    own::close_raw(socket);
    ended
}

/// Reads a range into the page cache; how many bytes there were. The program's position stays where it is.
fn read_in(file: BorrowedFd<'_>, start: i64, bytes: u32) -> io::Result<u32> {
    let mut read = 0;
    while read < bytes {
        let mut places = [libc::iovec { iov_base: SCRATCH.0.get().cast(), iov_len: SCRATCH_BYTES };
            READ_BYTES_MAX as usize / SCRATCH_BYTES];
        let (whole, rest) = ((bytes - read) as usize / SCRATCH_BYTES, (bytes - read) as usize % SCRATCH_BYTES);
        let count = whole.min(places.len()) + usize::from(rest > 0 && whole < places.len());
        if let Some(last) = places.get_mut(whole) {
            last.iov_len = rest;
        }
        let at = start.saturating_add(read.into());
        // SAFETY: each place is the scratch space, which this thread alone uses and no one looks at. Past our own hook.
        let n = unsafe { libc::syscall(libc::SYS_preadv, file.as_raw_fd(), places.as_ptr(), count, at, 0) };
        match n {
            0 => break,
            1.. => read += n as u32,
            _ => match io::Error::last_os_error() {
                e if e.kind() == io::ErrorKind::Interrupted => {}
                e => return Err(e),
            },
        }
        end_when_restricted();
    }
    Ok(read)
}
