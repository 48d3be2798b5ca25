//! Streams of the C library on files of a cluster. Its own streams read and write by calls that pass no hook, so these are
//! streams with functions of ours (`fopencookie`), which go by the descriptor.
//!
//! When a standard descriptor becomes a file of the cluster, at the start or by `dup2`, its stream is replaced by such a
//! one and stays so: it serves any descriptor.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr};

use libc::{FILE, off64_t, size_t, ssize_t};

use super::{closing, opening, positions, reads, writes};
use crate::around::{errno, set_errno};
use crate::served::SERVED;
use crate::{real, served};

/// Streams on files of the cluster that a process has at most.
const STREAMS: usize = 4096;

struct Slot {
    stream: AtomicPtr<FILE>,
    fd: AtomicI32,
}

static SLOTS: [Slot; STREAMS] =
    [const { Slot { stream: AtomicPtr::new(std::ptr::null_mut()), fd: AtomicI32::new(-1) } }; STREAMS];
/// Whether there ever was one: where not, streams cost nothing.
static ANY: AtomicBool = AtomicBool::new(false);
static REPLACED: [AtomicBool; 3] = [const { AtomicBool::new(false) }; 3];
/// For a standard stream that was replaced: the one before, and the one in its place.
static BEFORE: [AtomicPtr<FILE>; 3] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 3];
static INSTEAD: [AtomicPtr<FILE>; 3] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 3];
static HOME: AtomicI32 = AtomicI32::new(0);

#[repr(C)]
struct Functions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C-unwind" fn(*mut c_void, *mut off64_t, c_int) -> c_int,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

fn number(cookie: *mut c_void) -> c_int {
    cookie.addr() as c_int
}

unsafe extern "C-unwind" fn read(cookie: *mut c_void, buffer: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: the C library's buffer.
    unsafe { reads::read(number(cookie), buffer.cast(), len) }
}

unsafe extern "C-unwind" fn write(cookie: *mut c_void, bytes: *const c_char, len: size_t) -> ssize_t {
    // SAFETY: the C library's bytes.
    let done = unsafe { writes::write(number(cookie), bytes.cast(), len) };
    // The contract: 0 for an error, and no negative number.
    done.max(0)
}

unsafe extern "C-unwind" fn seek(cookie: *mut c_void, offset: *mut off64_t, whence: c_int) -> c_int {
    // SAFETY: the C library's place.
    let now = unsafe { positions::lseek64(number(cookie), *offset, whence) };
    if now < 0 {
        return -1;
    }
    // SAFETY: as above.
    unsafe { *offset = now };
    0
}

unsafe extern "C-unwind" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream's own descriptor.
    unsafe { closing::close(number(cookie)) }
}

/// A stream on a descriptor, which is the stream's from then on; null with errno when there is no room.
fn stream_on(fd: c_int, mode: &CStr) -> *mut FILE {
    let Some(slot) = SLOTS.iter().find(|slot| slot.fd.compare_exchange(-1, fd, AcqRel, Relaxed).is_ok()) else {
        set_errno(libc::EMFILE);
        return std::ptr::null_mut();
    };
    ANY.store(true, Relaxed);
    let cookie = std::ptr::without_provenance_mut(fd as usize);
    // SAFETY: functions of that contract, and a mode with a zero at its end.
    let stream = unsafe { fopencookie(cookie, mode.as_ptr(), Functions { read, write, seek, close }) };
    slot.stream.store(stream, Release);
    if stream.is_null() {
        slot.fd.store(-1, Release);
    }
    stream
}

fn slot(stream: *mut FILE) -> Option<&'static Slot> {
    if !ANY.load(Relaxed) || stream.is_null() {
        return None;
    }
    SLOTS.iter().find(|slot| slot.stream.load(Acquire) == stream)
}

/// The stream that is meant: who saved a standard stream before it was replaced, as C++ does, means the one in its place.
#[inline(always)]
pub fn meant(stream: *mut FILE) -> *mut FILE {
    if ANY.load(Relaxed) { instead(stream) } else { stream }
}

#[inline(never)]
fn instead(stream: *mut FILE) -> *mut FILE {
    let at = BEFORE.iter().position(|before| !stream.is_null() && before.load(Acquire) == stream);
    at.map_or(stream, |at| INSTEAD[at].load(Relaxed))
}

/// The descriptor of a stream of ours.
pub fn descriptor(stream: *mut FILE) -> Option<c_int> {
    slot(stream).map(|slot| slot.fd.load(Acquire))
}

/// The stream is about to be closed.
pub fn closing(stream: *mut FILE) {
    if let Some(slot) = slot(stream) {
        slot.stream.store(std::ptr::null_mut(), Release);
        slot.fd.store(-1, Release);
    }
}

/// Flags of `open` for a mode of `fopen`.
fn flags(mode: &[u8]) -> Option<c_int> {
    let (first, rest) = mode.split_first()?;
    let rest = rest.split(|byte| *byte == b',').next().unwrap_or(&[]);
    let both = rest.contains(&b'+');
    let base = match first {
        b'r' => 0,
        b'w' => libc::O_CREAT | libc::O_TRUNC,
        b'a' => libc::O_CREAT | libc::O_APPEND,
        _ => return None,
    };
    let access = match (both, first) {
        (true, _) => libc::O_RDWR,
        (false, b'r') => libc::O_RDONLY,
        (false, _) => libc::O_WRONLY,
    };
    let more = [(b'x', libc::O_EXCL), (b'e', libc::O_CLOEXEC)];
    Some(more.into_iter().filter(|(letter, _)| rest.contains(letter)).fold(base | access, |all, (_, bit)| all | bit))
}

/// Opens a stream on a path; `None`: the path is not the cluster's.
///
/// # Safety
/// As `fopen`.
pub unsafe fn open(path: *const c_char, mode: *const c_char) -> Option<*mut FILE> {
    if !SERVED.is_active() || path.is_null() || mode.is_null() {
        return None;
    }
    let mut room = impresario_interpose::served::Room::new();
    // SAFETY: the caller's path.
    let bytes = unsafe { served::bytes(path) };
    match SERVED.place(libc::AT_FDCWD, bytes, &mut room) {
        Ok(impresario_interpose::served::Route::Foreign) if served::open_file_named(bytes).is_none() => return None,
        Ok(_) => {}
        Err(errno) => {
            set_errno(errno);
            return Some(std::ptr::null_mut());
        }
    }
    // SAFETY: the caller's mode.
    let mode = unsafe { CStr::from_ptr(mode) };
    let Some(flags) = flags(mode.to_bytes()) else {
        set_errno(libc::EINVAL);
        return Some(std::ptr::null_mut());
    };
    // SAFETY: the caller's path.
    let fd = unsafe { opening::open64(path, flags, 0o666) };
    if fd < 0 {
        return Some(std::ptr::null_mut());
    }
    Some(begin(fd, mode))
}

/// A stream on a fresh descriptor, which is closed when there is none.
fn begin(fd: c_int, mode: &CStr) -> *mut FILE {
    // What also reads begins at the beginning.
    if flags(mode.to_bytes())
        .is_some_and(|flags| flags & libc::O_APPEND != 0 && flags & libc::O_ACCMODE != libc::O_RDWR)
    {
        // SAFETY: a descriptor and numbers.
        unsafe { positions::lseek64(fd, 0, libc::SEEK_END) };
    }
    let stream = stream_on(fd, mode);
    if stream.is_null() {
        let before = errno();
        // SAFETY: nobody has the descriptor.
        unsafe { closing::close(fd) };
        set_errno(before);
    }
    stream
}

/// A stream on a descriptor of the cluster; `None`: it is another's.
///
/// # Safety
/// As `fdopen`.
pub unsafe fn on_descriptor(fd: c_int, mode: *const c_char) -> Option<*mut FILE> {
    SERVED.open_file(fd)?;
    // SAFETY: the caller's mode.
    let mode = unsafe { CStr::from_ptr(mode) };
    let status = served::open_file(
        fd,
        impresario_interpose::served::protocol::Request::new(impresario_interpose::served::protocol::Op::Flags),
        b"",
        b"",
        &mut [],
    )? as c_int;
    if status < 0 {
        return Some(std::ptr::null_mut());
    }
    let fits = flags(mode.to_bytes()).is_some_and(|flags| {
        status & libc::O_ACCMODE == libc::O_RDWR || flags & libc::O_ACCMODE == status & libc::O_ACCMODE
    });
    if !fits {
        set_errno(libc::EINVAL);
        return Some(std::ptr::null_mut());
    }
    Some(stream_on(fd, mode))
}

/// Opens another path in the place of a stream. `None`: neither concerns the cluster.
///
/// # Safety
/// As `freopen`.
pub unsafe fn reopen(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> Option<*mut FILE> {
    if !SERVED.is_active() || mode.is_null() {
        return None;
    }
    let ours = descriptor(stream);
    let mut room = impresario_interpose::served::Room::new();
    // SAFETY: the caller's path.
    let place = SERVED.place(libc::AT_FDCWD, unsafe { served::bytes(path) }, &mut room);
    let is_foreign = path.is_null() || place == Ok(impresario_interpose::served::Route::Foreign);
    if ours.is_none() && is_foreign {
        return None;
    }
    let refuse = |errno| {
        set_errno(errno);
        Some(std::ptr::null_mut())
    };
    // SAFETY: the caller's mode.
    let flags = flags(unsafe { CStr::from_ptr(mode) }.to_bytes());
    let Some(mut flags) = flags else { return refuse(libc::EINVAL) };
    // Only standard streams can become others in place, and streams of ours whose mode stays what they are made for.
    // SAFETY: the C library's variables.
    let standard = unsafe { [stdin, stdout, stderr] }.iter().position(|known| *known == stream).map(|at| at as c_int);
    // Without a path the file is opened anew in another mode.
    let (mut path, mut name) = (path, impresario_interpose::served::Room::new());
    if path.is_null() {
        let open = ours.and_then(|fd| SERVED.open_file(fd)).ok_or(libc::EBADF);
        let named = open.and_then(|open| SERVED.path_of(open, &mut room));
        if let Err(errno) = named.and_then(|()| SERVED.name_of(room.path(), &mut name)) {
            return refuse(errno);
        }
        path = name.c_str().as_ptr();
        flags &= !(libc::O_CREAT | libc::O_EXCL);
    }
    let Some(target) = ours.or(standard) else { return refuse(libc::EOPNOTSUPP) };
    // SAFETY: the caller's stream and path.
    unsafe {
        if let Some(flush) = real::fflush.get() {
            flush(stream);
        }
        let fd = opening::open64(path, flags, 0o666);
        if fd < 0 {
            return Some(std::ptr::null_mut());
        }
        let moved = super::numbers::dup2(fd, target);
        closing::close(fd);
        if moved < 0 {
            return Some(std::ptr::null_mut());
        }
        libc::clearerr(stream);
    }
    // SAFETY: the C library's variables.
    let now = unsafe { [stdin, stdout, stderr] };
    Some(standard.and_then(|at| now.get(at as usize).copied()).unwrap_or(stream))
}

/// Whether the descriptor is a standard one of this process; a child made by `vfork` runs in its parent's memory.
fn standard(fd: c_int) -> Option<usize> {
    let at = usize::try_from(fd).ok().filter(|at| *at < 3)?;
    (rustix::process::getpid().as_raw_nonzero().get() == HOME.load(Relaxed)).then_some(at)
}

fn variable(at: usize) -> *mut *mut FILE {
    match at {
        0 => &raw mut stdin,
        1 => &raw mut stdout,
        _ => &raw mut stderr,
    }
}

/// A standard descriptor is about to be another file: what its stream holds goes to the one before.
pub fn about_to_become(fd: c_int) {
    let Some(at) = standard(fd).filter(|at| *at > 0) else { return };
    if REPLACED[at].load(Relaxed) {
        return;
    }
    if let Some(flush) = real::fflush.get() {
        // SAFETY: the C library's own stream, if the program has it still.
        unsafe {
            let stream = *variable(at);
            if !stream.is_null() {
                flush(stream);
            }
        }
    }
}

/// A descriptor is another file now: a standard stream on a file of the cluster is replaced.
pub fn became(fd: c_int) {
    let Some(at) = standard(fd) else { return };
    if SERVED.open_file(fd).is_none() || REPLACED[at].swap(true, Relaxed) {
        return;
    }
    let stream = stream_on(fd, if at == 0 { c"r" } else { c"w" });
    if stream.is_null() {
        return;
    }
    if at == 2 {
        // SAFETY: a fresh stream.
        unsafe { libc::setvbuf(stream, std::ptr::null_mut(), libc::_IONBF, 0) };
    }
    INSTEAD[at].store(stream, Relaxed);
    // SAFETY: the C library's variables may be assigned.
    unsafe {
        BEFORE[at].store(*variable(at), Release);
        *variable(at) = stream;
    }
}

/// At the start of the program, and in a forked child.
pub fn begin_process() {
    HOME.store(rustix::process::getpid().as_raw_nonzero().get(), Relaxed);
}

macro_rules! filenos {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(stream: *mut FILE) -> c_int {
            if let Some(fd) = descriptor(stream) {
                return fd;
            }
            let Some(real) = real::$name.get() else { return real::missing() };
            // SAFETY: the caller's argument.
            unsafe { real(stream) }
        }
    )* };
}

filenos! { fileno fileno_unlocked }
