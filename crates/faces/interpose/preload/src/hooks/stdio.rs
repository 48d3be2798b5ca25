//! Buffered streams: fopen to fclose, and what the C library reads and writes inside them.
//!
//! Its inner calls do not pass our read and write. So the descriptor's position is compared before and after a call that
//! may go to the kernel, which the stream's pointers tell: as long as the buffer serves a call, it costs a few loads.
//! What moved the position between two hooked calls (by a function that is not hooked, such as fscanf) is told at the
//! next one.

use std::ffi::{c_char, c_int, c_long, c_void};

use impresario_interpose::{Consumer, Watched};
use impresario_ring::{Op, flag, now_ns};
use libc::{FILE, off_t, size_t, ssize_t};

use super::streams;
use crate::around::{errno, position, tell};
use crate::real::missing;
use crate::served::SERVED;
use crate::{TABLE, real};

/// The beginning of the C library's stream, whose layout is part of its binary interface (`struct _IO_FILE`).
#[repr(C)]
struct Head {
    flags: c_int,
    read_at: *const u8,
    read_end: *const u8,
    read_base: *const u8,
    write_base: *const u8,
    write_at: *const u8,
    rest: [*const u8; 8],
    fd: c_int,
}

const CURRENTLY_PUTTING: c_int = 0x800;

fn head(stream: *mut FILE) -> *const Head {
    stream.cast_const().cast()
}

/// Bytes in the buffer that were read and not taken yet. Another thread may be taking them: an estimate.
#[inline(always)]
fn buffered(stream: *mut FILE) -> (*const u8, usize) {
    // SAFETY: an open stream, as the caller promised the function that was called; plain reads that are not torn.
    let (at, end) = unsafe {
        ((&raw const (*head(stream)).read_at).read_volatile(), (&raw const (*head(stream)).read_end).read_volatile())
    };
    (at, (end as usize).saturating_sub(at as usize))
}

#[inline(always)]
fn descriptor(stream: *mut FILE) -> c_int {
    // SAFETY: as in `buffered`; streams without a descriptor have a negative number here.
    unsafe { (&raw const (*head(stream)).fd).read_volatile() }
}

fn putting(stream: *mut FILE) -> bool {
    // SAFETY: as in `buffered`.
    unsafe { (&raw const (*head(stream)).flags).read_volatile() & CURRENTLY_PUTTING != 0 }
}

/// What a call may have done with the position.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Read on from it.
    Read,
    /// Written on from it.
    Write,
    /// Moved it, and perhaps filled the buffer there.
    Seek,
}

#[inline(always)]
fn watched(stream: *mut FILE) -> Option<Watched> {
    TABLE.watch(descriptor(stream))
}

/// Runs the real function of a stream and tells what it did to the descriptor.
#[inline(always)]
fn around<R>(stream: *mut FILE, kind: Kind, real: impl FnOnce() -> R) -> R {
    let Some(watched) = watched(stream) else { return real() };
    let kind = if kind == Kind::Read && putting(stream) { Kind::Write } else { kind };
    let start_ns = now_ns();
    let result = real();
    moved(watched, stream, kind, start_ns);
    result
}

#[inline(never)]
fn moved(watched: Watched, stream: *mut FILE, kind: Kind, start_ns: u64) {
    let end_ns = now_ns();
    let before = TABLE.position(watched);
    let Some(now) = position(watched.fd()) else { return };
    if now == before {
        return;
    }
    TABLE.set_position(watched, now);
    let on = |op, from: u64| {
        if TABLE.consumer().wants(op) {
            tell(watched, op, flag::STREAM, from as i64, now - from, start_ns, end_ns);
        }
    };
    match kind {
        Kind::Write if now > before => on(Op::Write, before),
        Kind::Read if now > before => on(Op::Read, before),
        _ => {
            // SAFETY: as in `buffered`.
            let (base, end) = unsafe { ((*head(stream)).read_base, (*head(stream)).read_end) };
            let filled = ((end as usize).saturating_sub(base as usize) as u64).min(now);
            if TABLE.consumer().wants(Op::Seek) {
                tell(watched, Op::Seek, flag::STREAM, (now - filled) as i64, 0, start_ns, end_ns);
            }
            if filled > 0 {
                on(Op::Read, now - filled);
            }
        }
    }
}

macro_rules! opens {
    ($($name:ident($($arg:ident: $kind:ty),*);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $kind),*) -> *mut FILE {
            let Some(real) = real::$name.get() else { missing(); return std::ptr::null_mut() };
            // SAFETY: the caller's arguments.
            if let Some(stream) = unsafe { streams::open($($arg),*) } {
                return stream;
            }
            // SAFETY: the caller's arguments.
            let mut stream = unsafe { real($($arg),*) };
            if stream.is_null() && errno() == libc::EMFILE && TABLE.consumer().give_way() {
                // SAFETY: as above; no file was touched, see `opening`.
                stream = unsafe { real($($arg),*) };
            }
            if !stream.is_null() {
                SERVED.forget(descriptor(stream));
                TABLE.opened(descriptor(stream));
            }
            stream
        }
    )* };
}

opens! {
    fopen(path: *const c_char, mode: *const c_char);
    fopen64(path: *const c_char, mode: *const c_char);
}

/// What the stream did unseen, and what closing it will write.
fn about_to_close(stream: *mut FILE) {
    let Some(watched) = watched(stream) else { return };
    let kind = if putting(stream) { Kind::Write } else { Kind::Read };
    let start_ns = now_ns();
    moved(watched, stream, kind, start_ns);
    if kind == Kind::Write && TABLE.consumer().wants(Op::Write) {
        // SAFETY: as in `buffered`.
        let (base, at) = unsafe { ((*head(stream)).write_base, (*head(stream)).write_at) };
        let pending = (at as usize).saturating_sub(base as usize) as u64;
        if pending > 0 {
            let from = TABLE.position(watched) as i64;
            tell(watched, Op::Write, flag::STREAM, from, pending, start_ns, start_ns);
        }
    }
    TABLE.forget(watched.fd());
}

macro_rules! reopens {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, mode: *const c_char, stream: *mut FILE) -> *mut FILE {
            let Some(real) = real::$name.get() else { missing(); return std::ptr::null_mut() };
            // SAFETY: the caller's arguments.
            if let Some(stream) = unsafe { streams::reopen(path, mode, stream) } {
                return stream;
            }
            if !stream.is_null() {
                about_to_close(stream);
                SERVED.forget(descriptor(stream));
            }
            // SAFETY: the caller's arguments.
            let stream = unsafe { real(path, mode, stream) };
            if !stream.is_null() {
                TABLE.opened(descriptor(stream));
            }
            stream
        }
    )* };
}

reopens! { freopen freopen64 }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    let Some(real) = real::fdopen.get() else {
        missing();
        return std::ptr::null_mut();
    };
    // SAFETY: the caller's arguments.
    if let Some(stream) = unsafe { streams::on_descriptor(fd, mode) } {
        return stream;
    }
    // Where the stream will read on is known from here on.
    if let (Some(watched), Some(now)) = (TABLE.watch(fd), position(fd)) {
        TABLE.set_position(watched, now);
    }
    // SAFETY: the caller's arguments.
    unsafe { real(fd, mode) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fclose(stream: *mut FILE) -> c_int {
    let Some(real) = real::fclose.get() else { return missing() };
    if !stream.is_null() {
        about_to_close(stream);
        SERVED.forget(descriptor(stream));
        streams::closing(stream);
    }
    // SAFETY: the caller's argument.
    unsafe { real(stream) }
}

macro_rules! freads {
    ($($name:ident($($room:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            buffer: *mut c_void, $($room: size_t,)? size: size_t, count: size_t, stream: *mut FILE,
        ) -> size_t {
            let Some(real) = real::$name.get() else { missing(); return 0 };
            let stream = streams::meant(stream);
            // SAFETY: the caller's arguments.
            let real = || unsafe { real(buffer, $($room,)? size, count, stream) };
            if size.saturating_mul(count) <= buffered(stream).1 { real() } else { around(stream, Kind::Read, real) }
        }
    )* };
}

freads! {
    fread();
    fread_unlocked();
    __fread_chk(room);
    __fread_unlocked_chk(room);
}

unsafe extern "C" {
    fn ftrylockfile(stream: *mut FILE) -> c_int;
    fn funlockfile(stream: *mut FILE);
}

/// Whether the buffer holds a whole line, or as much of one as fits. Looked at under the stream's lock: another thread may
/// be changing the pointers, and bytes between an old and a new one are anything. Where it is held is unknown.
#[inline(always)]
fn serves_line(stream: *mut FILE, end: c_int, room: usize) -> bool {
    // SAFETY: an open stream, as the caller promised the function that was called.
    if unsafe { ftrylockfile(stream) } != 0 {
        return false;
    }
    let (at, len) = buffered(stream);
    // SAFETY: bytes of the stream's own buffer, which no other thread changes now.
    let serves = len >= room || (len > 0 && !unsafe { libc::memchr(at.cast(), end, len) }.is_null());
    // SAFETY: locked above.
    unsafe { funlockfile(stream) };
    serves
}

macro_rules! fgetss {
    ($($name:ident($($size:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            line: *mut c_char, $($size: size_t,)? room: c_int, stream: *mut FILE,
        ) -> *mut c_char {
            let Some(real) = real::$name.get() else { missing(); return std::ptr::null_mut() };
            let stream = streams::meant(stream);
            // SAFETY: the caller's arguments.
            let real = || unsafe { real(line, $($size,)? room, stream) };
            // Unwatched streams are not searched.
            if watched(stream).is_none() || serves_line(stream, c_int::from(b'\n'), room.max(1) as usize - 1) {
                return real();
            }
            around(stream, Kind::Read, real)
        }
    )* };
}

fgetss! {
    fgets();
    fgets_unlocked();
    __fgets_chk(size);
    __fgets_unlocked_chk(size);
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getline(line: *mut *mut c_char, size: *mut size_t, stream: *mut FILE) -> ssize_t {
    let Some(real) = real::getline.get() else { return missing() as ssize_t };
    let stream = streams::meant(stream);
    // SAFETY: the caller's arguments.
    let real = || unsafe { real(line, size, stream) };
    if watched(stream).is_none() || serves_line(stream, c_int::from(b'\n'), usize::MAX) {
        return real();
    }
    around(stream, Kind::Read, real)
}

macro_rules! getdelims {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            line: *mut *mut c_char, size: *mut size_t, end: c_int, stream: *mut FILE,
        ) -> ssize_t {
            let Some(real) = real::$name.get() else { return missing() as ssize_t };
            let stream = streams::meant(stream);
            // SAFETY: the caller's arguments.
            let real = || unsafe { real(line, size, end, stream) };
            if watched(stream).is_none() || serves_line(stream, end, usize::MAX) {
                return real();
            }
            around(stream, Kind::Read, real)
        }
    )* };
}

getdelims! { getdelim __getdelim }

macro_rules! getcs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(stream: *mut FILE) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            let stream = streams::meant(stream);
            // SAFETY: the caller's argument.
            let real = || unsafe { real(stream) };
            if buffered(stream).1 > 0 { real() } else { around(stream, Kind::Read, real) }
        }
    )* };
}

// The header's getc_unlocked is a macro that calls __uflow when the buffer is empty.
getcs! { fgetc getc _IO_getc fgetc_unlocked getc_unlocked __uflow }

macro_rules! seeks {
    ($($name:ident($($arg:ident: $kind:ty),*) -> $result:ty, $missing:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(stream: *mut FILE $(, $arg: $kind)*) -> $result {
            let Some(real) = real::$name.get() else { return $missing };
            let stream = streams::meant(stream);
            if let Some(watched) = watched(stream) {
                // What was read unseen before, so that it is not taken for a part of this move.
                let kind = if putting(stream) { Kind::Write } else { Kind::Read };
                moved(watched, stream, kind, now_ns());
            }
            // SAFETY: the caller's arguments.
            around(stream, Kind::Seek, || unsafe { real(stream $(, $arg)*) })
        }
    )* };
}

seeks! {
    fseek(offset: c_long, whence: c_int) -> c_int, missing();
    fseeko(offset: off_t, whence: c_int) -> c_int, missing();
    fseeko64(offset: off_t, whence: c_int) -> c_int, missing();
    rewind() -> (), { missing(); };
    fsetpos(place: *const c_void) -> c_int, missing();
    fsetpos64(place: *const c_void) -> c_int, missing();
}

macro_rules! fwrites {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            bytes: *const c_void, size: size_t, count: size_t, stream: *mut FILE,
        ) -> size_t {
            let Some(real) = real::$name.get() else { missing(); return 0 };
            let stream = streams::meant(stream);
            // SAFETY: the caller's arguments.
            let real = || unsafe { real(bytes, size, count, stream) };
            if TABLE.consumer().wants(Op::Write) { around(stream, Kind::Write, real) } else { real() }
        }
    )* };
}

fwrites! { fwrite fwrite_unlocked }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fflush(stream: *mut FILE) -> c_int {
    let Some(real) = real::fflush.get() else { return missing() };
    let stream = streams::meant(stream);
    // SAFETY: the caller's argument.
    let real = || unsafe { real(stream) };
    // Of no stream means of all, whose writes are told at their next call.
    if stream.is_null() || !TABLE.consumer().wants(Op::Write) || !putting(stream) {
        return real();
    }
    around(stream, Kind::Write, real)
}

/// What C++ does besides with the standard streams that it saved. Bytes that go through here are told at the next call.
macro_rules! puts {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(byte: c_int, stream: *mut FILE) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            unsafe { real(byte, streams::meant(stream)) }
        }
    )* };
}

puts! { putc fputc ungetc }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fputs(text: *const c_char, stream: *mut FILE) -> c_int {
    let Some(real) = real::fputs.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { real(text, streams::meant(stream)) }
}
