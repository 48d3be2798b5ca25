//! The working directory and absolute paths. A directory of the cluster as a working directory is a folder of the agent,
//! so that the kernel hands it on over fork and exec; to the program it has its path in the cluster.

use std::ffi::{CStr, c_char, c_int, c_long};

use impresario_interpose::served::Room;
use impresario_interpose::served::protocol::{Op, PATH_MAX, Request};
use libc::size_t;

use crate::around::set_errno;
use crate::real;
use crate::real::missing;
use crate::served::{SERVED, fail, named};

/// Goes into the folder that the agent named.
fn enter(data: &[u8]) -> c_long {
    let mut room = Room::new();
    if let Err(errno) = room.set(data) {
        return fail(errno);
    }
    let Some(real) = real::chdir.get() else { return missing().into() };
    // SAFETY: a path with a zero at its end.
    c_long::from(unsafe { real(room.c_str().as_ptr()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn chdir(path: *const c_char) -> c_int {
    let Some(real) = real::chdir.get() else { return missing() };
    // SAFETY: the caller's argument.
    let real = |_, path| c_long::from(unsafe { real(path) });
    let request = Request::new(Op::Enter);
    // SAFETY: the caller's path.
    unsafe { named((libc::AT_FDCWD, path), request, (b"", b""), real, |_, data| enter(data)) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fchdir(fd: c_int) -> c_int {
    if let Some(open) = SERVED.open_file(fd) {
        let mut path = [0; PATH_MAX];
        let done = SERVED.call(Request { open, ..Request::new(Op::Enter) }, b"", b"", b"", &mut path);
        return match done {
            Ok(got) => enter(path.get(..got.len).unwrap_or(&[])) as c_int,
            Err(errno) => fail(errno) as c_int,
        };
    }
    let Some(real) = real::fchdir.get() else { return missing() };
    // SAFETY: the caller's argument.
    unsafe { real(fd) }
}

/// The working directory's path in the cluster, as the program knows it; `None`: it is elsewhere.
fn working() -> Option<Result<Room, c_int>> {
    if !SERVED.is_active() {
        return None;
    }
    let mut inside = Room::new();
    match SERVED.working_directory(&mut inside) {
        Ok(false) => None,
        Ok(true) => {
            let mut room = Room::new();
            Some(SERVED.name_of(inside.path(), &mut room).map(|()| room))
        }
        Err(errno) => Some(Err(errno)),
    }
}

/// Gives a path to the caller: into the buffer, or into memory of its own.
///
/// # Safety
/// As `getcwd`.
unsafe fn give(path: &CStr, buffer: *mut c_char, len: size_t) -> *mut c_char {
    let bytes = path.to_bytes_with_nul();
    if buffer.is_null() {
        if len != 0 && len < bytes.len() {
            set_errno(libc::ERANGE);
            return std::ptr::null_mut();
        }
        // SAFETY: memory of that length, which the caller frees.
        unsafe {
            let memory = libc::malloc(len.max(bytes.len())).cast::<c_char>();
            if !memory.is_null() {
                std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), memory, bytes.len());
            }
            return memory;
        }
    }
    if len < bytes.len() {
        set_errno(if len == 0 { libc::EINVAL } else { libc::ERANGE });
        return std::ptr::null_mut();
    }
    // SAFETY: the caller's buffer of that length.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr().cast(), buffer, bytes.len()) };
    buffer
}

/// # Safety
/// As `getcwd`.
unsafe fn current(buffer: *mut c_char, len: size_t, real: impl FnOnce() -> *mut c_char) -> *mut c_char {
    match working() {
        None => real(),
        // SAFETY: the caller's buffer.
        Some(Ok(room)) => unsafe { give(room.c_str(), buffer, len) },
        Some(Err(errno)) => {
            set_errno(errno);
            std::ptr::null_mut()
        }
    }
}

fn none() -> *mut c_char {
    missing();
    std::ptr::null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getcwd(buffer: *mut c_char, len: size_t) -> *mut c_char {
    let Some(real) = (if buffer.is_null() { real::getcwd.get() } else { real::getcwd.found() }) else {
        // Not looked for yet.
        // SAFETY: the caller's buffer.
        let len = unsafe { libc::syscall(libc::SYS_getcwd, buffer, len) };
        return if len < 0 { std::ptr::null_mut() } else { buffer };
    };
    // SAFETY: the caller's arguments.
    unsafe { current(buffer, len, || real(buffer, len)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __getcwd_chk(buffer: *mut c_char, len: size_t, room: size_t) -> *mut c_char {
    let Some(real) = real::__getcwd_chk.get() else { return none() };
    // SAFETY: the caller's arguments; a length beyond the buffer is the real function's to end.
    unsafe { if len > room { real(buffer, len, room) } else { current(buffer, len, || real(buffer, len, room)) } }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn get_current_dir_name() -> *mut c_char {
    let Some(real) = real::get_current_dir_name.get() else { return none() };
    // SAFETY: no arguments.
    unsafe { current(std::ptr::null_mut(), 0, || real()) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn getwd(buffer: *mut c_char) -> *mut c_char {
    let Some(real) = real::getwd.get() else { return none() };
    // SAFETY: the caller's buffer of PATH_MAX bytes.
    unsafe { current(buffer, PATH_MAX, || real(buffer)) }
}

/// # Safety
/// As `realpath`.
unsafe fn resolve(
    path: *const c_char,
    buffer: *mut c_char,
    real: impl FnOnce(*const c_char) -> *mut c_char,
) -> *mut c_char {
    if !SERVED.is_active() {
        return real(path);
    }
    let mut found = std::ptr::null_mut();
    let real = |_, path| {
        found = real(path);
        0
    };
    let mut inside = Room::new();
    let done = |_, data: &[u8]| match inside.set(data) {
        Ok(()) => 1,
        Err(errno) => fail(errno),
    };
    // SAFETY: the caller's path.
    let way = unsafe { named((libc::AT_FDCWD, path), Request::new(Op::Realpath), (b"", b""), real, done) };
    if way != 1 {
        return found;
    }
    let mut room = Room::new();
    match SERVED.name_of(inside.path(), &mut room) {
        // SAFETY: the caller's buffer of PATH_MAX bytes, if any.
        Ok(()) => unsafe { give(room.c_str(), buffer, if buffer.is_null() { 0 } else { PATH_MAX }) },
        Err(errno) => {
            set_errno(errno);
            std::ptr::null_mut()
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn realpath(path: *const c_char, buffer: *mut c_char) -> *mut c_char {
    let Some(real) = real::realpath.get() else { return none() };
    // SAFETY: the caller's arguments.
    unsafe { resolve(path, buffer, |path| real(path, buffer)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __realpath_chk(path: *const c_char, buffer: *mut c_char, room: size_t) -> *mut c_char {
    let Some(real) = real::__realpath_chk.get() else { return none() };
    // SAFETY: the caller's arguments; a small buffer is the real function's to end.
    unsafe {
        if room < PATH_MAX { real(path, buffer, room) } else { resolve(path, buffer, |path| real(path, buffer, room)) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn canonicalize_file_name(path: *const c_char) -> *mut c_char {
    let Some(real) = real::canonicalize_file_name.get() else { return none() };
    // SAFETY: the caller's argument.
    unsafe { resolve(path, std::ptr::null_mut(), |path| real(path)) }
}
