//! What changes names, owners and modes: unlink, rename, link, mkdir, chmod, chown; and what reads links.

use std::ffi::{c_char, c_int, c_long};

use impresario_interpose::served::protocol::{DATA_ONLY, Op, PATH_MAX, Request};
use impresario_interpose::served::{Room, Route};
use libc::{gid_t, mode_t, size_t, ssize_t, uid_t};

use crate::real;
use crate::real::missing;
use crate::served::{self, SERVED, fail, named, open_file, with};

const HERE: c_int = libc::AT_FDCWD;
const NOFOLLOW: i64 = libc::AT_SYMLINK_NOFOLLOW as i64;

/// Functions of one path, beginning at the working directory (`path`) or at a directory (`dir path`).
macro_rules! paths {
    ($($name:ident(path $(, $arg:ident: $kind:ty)*) = $request:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char $(, $arg: $kind)*) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |_, path| c_long::from(unsafe { real(path $(, $arg)*) });
            if !SERVED.is_active() {
                return real(HERE, path) as c_int;
            }
            // SAFETY: the caller's path.
            unsafe { named((HERE, path), $request, (b"", b""), real, |_, _| 0) as c_int }
        }
    )* };
}

macro_rules! paths_at {
    ($($name:ident(path $(, $arg:ident: $kind:ty)*) = $request:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(dir: c_int, path: *const c_char $(, $arg: $kind)*) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |dir, path| c_long::from(unsafe { real(dir, path $(, $arg)*) });
            if !SERVED.is_active() {
                return real(dir, path) as c_int;
            }
            // SAFETY: the caller's path.
            unsafe { named((dir, path), $request, (b"", b""), real, |_, _| 0) as c_int }
        }
    )* };
}

/// Functions of a descriptor.
macro_rules! descriptors {
    ($($name:ident($($arg:ident: $kind:ty),*) = $request:expr;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int $(, $arg: $kind)*) -> c_int {
            if let Some(done) = open_file(fd, $request, b"", b"", &mut []) {
                return done as c_int;
            }
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            unsafe { real(fd $(, $arg)*) }
        }
    )* };
}

/// The mode of a new node, with the umask.
fn masked(mode: mode_t) -> i64 {
    i64::from(served::with_umask(mode))
}

fn owner(uid: uid_t, gid: gid_t, flags: i64) -> Request {
    Request { b: gid.into(), c: flags, ..with(Op::Chown, uid.into()) }
}

fn mode(mode: mode_t, flags: i64) -> Request {
    Request { b: flags, ..with(Op::Chmod, mode.into()) }
}

const REMOVE_DIRECTORY: i64 = libc::AT_REMOVEDIR as i64;

paths! {
    unlink(path) = Request::new(Op::Unlink);
    rmdir(path) = with(Op::Unlink, REMOVE_DIRECTORY);
    mkdir(path, bits: mode_t) = with(Op::Mkdir, masked(bits));
    mkfifo(path, bits: mode_t) = with(Op::Mknod, masked(bits) | i64::from(libc::S_IFIFO));
    chmod(path, bits: mode_t) = mode(bits, 0);
    lchmod(path, bits: mode_t) = mode(bits, NOFOLLOW);
    chown(path, uid: uid_t, gid: gid_t) = owner(uid, gid, 0);
    lchown(path, uid: uid_t, gid: gid_t) = owner(uid, gid, NOFOLLOW);
    truncate(path, len: i64) = with(Op::Truncate, len);
    truncate64(path, len: i64) = with(Op::Truncate, len);
}

paths_at! {
    unlinkat(path, flags: c_int) = with(Op::Unlink, flags.into());
    mkdirat(path, bits: mode_t) = with(Op::Mkdir, masked(bits));
    mkfifoat(path, bits: mode_t) = with(Op::Mknod, masked(bits) | i64::from(libc::S_IFIFO));
    fchmodat(path, bits: mode_t, flags: c_int) = mode(bits, flags.into());
}

descriptors! {
    ftruncate(len: i64) = with(Op::Truncate, len);
    ftruncate64(len: i64) = with(Op::Truncate, len);
    fsync() = Request::new(Op::Sync);
    fdatasync() = with(Op::Sync, DATA_ONLY);
    fchmod(bits: mode_t) = mode(bits, 0);
    fchown(uid: uid_t, gid: gid_t) = owner(uid, gid, 0);
}

/// Not served: it would be taken for a promise about all files.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn syncfs(fd: c_int) -> c_int {
    if SERVED.open_file(fd).is_some() {
        return served::fail(libc::EOPNOTSUPP) as c_int;
    }
    let Some(real) = real::syncfs.get() else { return missing() };
    // SAFETY: the caller's argument.
    unsafe { real(fd) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fchownat(
    dir: c_int,
    path: *const c_char,
    uid: uid_t,
    gid: gid_t,
    flags: c_int,
) -> c_int {
    let Some(real) = real::fchownat.get() else { return missing() };
    // SAFETY: the caller's path.
    if flags & libc::AT_EMPTY_PATH != 0
        && SERVED.is_active()
        // SAFETY: as above.
        && unsafe { served::bytes(path) }.is_empty()
        && let Some(done) = open_file(dir, owner(uid, gid, 0), b"", b"", &mut [])
    {
        return done as c_int;
    }
    // SAFETY: the caller's arguments.
    let real = |dir, path| c_long::from(unsafe { real(dir, path, uid, gid, flags) });
    // SAFETY: the caller's path.
    unsafe { named((dir, path), owner(uid, gid, flags.into()), (b"", b""), real, |_, _| 0) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn remove(path: *const c_char) -> c_int {
    let Some(real) = real::remove.get() else { return missing() };
    if SERVED.is_active() {
        // SAFETY: the caller's path.
        let done = unsafe { unlink(path) };
        let is_directory = done < 0 && matches!(crate::around::errno(), libc::EISDIR | libc::EPERM);
        // SAFETY: as above.
        return if is_directory { unsafe { rmdir(path) } } else { done };
    }
    // SAFETY: the caller's argument.
    unsafe { real(path) }
}

macro_rules! mknods {
    ($($name:ident($($before:ident: $kind:ty),*; $dir:expr, $($version:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            $($before: $kind,)* path: *const c_char, bits: mode_t, device: u64,
        ) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |_, path| c_long::from(unsafe { real($($before,)* path, bits, device) });
            if !SERVED.is_active() {
                return real(HERE, path) as c_int;
            }
            // SAFETY: the caller's path.
            unsafe { make_node($dir, path, bits, real) }
        }
    )* };
}

/// # Safety
/// As `mknodat`.
unsafe fn make_node(
    dir: c_int,
    path: *const c_char,
    bits: mode_t,
    real: impl FnOnce(c_int, *const c_char) -> c_long,
) -> c_int {
    if !matches!(bits & libc::S_IFMT, 0 | libc::S_IFREG) {
        let request = with(Op::Mknod, masked(bits));
        // SAFETY: the caller's path.
        return unsafe { named((dir, path), request, (b"", b""), real, |_, _| 0) as c_int };
    }
    let flags = libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY | libc::O_CLOEXEC;
    let request = Request { b: masked(bits & 0o7777), ..with(Op::Open, flags.into()) };
    let done = |got: impresario_interpose::served::Got, _: &[u8]| {
        use std::os::fd::IntoRawFd;
        if let Some(fd) = got.fd {
            served::close(fd.into_raw_fd());
        }
        0
    };
    // SAFETY: as above.
    unsafe { named((dir, path), request, (b"", b""), real, done) as c_int }
}

mknods! { mknod(; HERE,); }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn mknodat(dir: c_int, path: *const c_char, bits: mode_t, device: u64) -> c_int {
    let Some(real) = real::mknodat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |dir, path| c_long::from(unsafe { real(dir, path, bits, device) });
    if !SERVED.is_active() {
        return real(dir, path) as c_int;
    }
    // SAFETY: the caller's path.
    unsafe { make_node(dir, path, bits, real) }
}

/// A call of two paths. One of them in the cluster and one outside are on different file systems.
///
/// # Safety
/// As `renameat2`.
unsafe fn two(
    (from_dir, from): (c_int, *const c_char),
    (to_dir, to): (c_int, *const c_char),
    request: Request,
    real: impl FnOnce(c_int, *const c_char, c_int, *const c_char) -> c_int,
) -> c_int {
    if !SERVED.is_active() || from.is_null() || to.is_null() {
        return real(from_dir, from, to_dir, to);
    }
    let (mut a, mut b) = (Room::new(), Room::new());
    // SAFETY: the callers' paths.
    let places = unsafe {
        (SERVED.place(from_dir, served::bytes(from), &mut a), SERVED.place(to_dir, served::bytes(to), &mut b))
    };
    match places {
        (Err(errno), _) | (_, Err(errno)) => fail(errno) as c_int,
        (Ok(Route::Inside), Ok(Route::Inside)) => {
            let mut outside = [0; PATH_MAX];
            match SERVED.call(request, a.path(), b.path(), b"", &mut outside) {
                Ok(got) if got.is_outside => fail(libc::EXDEV) as c_int,
                Ok(_) => 0,
                Err(errno) => fail(errno) as c_int,
            }
        }
        (Ok(Route::Inside), _) | (_, Ok(Route::Inside)) => {
            // SAFETY: the callers' paths.
            let is_empty = unsafe { served::bytes(from).is_empty() || served::bytes(to).is_empty() };
            fail(if is_empty { libc::ENOENT } else { libc::EXDEV }) as c_int
        }
        (Ok(first), Ok(second)) => {
            let from = if first == Route::Outside { (HERE, a.c_str().as_ptr()) } else { (from_dir, from) };
            let to = if second == Route::Outside { (HERE, b.c_str().as_ptr()) } else { (to_dir, to) };
            real(from.0, from.1, to.0, to.1)
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rename(from: *const c_char, to: *const c_char) -> c_int {
    let Some(real) = real::rename.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { two((HERE, from), (HERE, to), Request::new(Op::Rename), |_, from, _, to| real(from, to)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn renameat(a: c_int, from: *const c_char, b: c_int, to: *const c_char) -> c_int {
    let Some(real) = real::renameat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { two((a, from), (b, to), Request::new(Op::Rename), |a, from, b, to| real(a, from, b, to)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn renameat2(
    a: c_int,
    from: *const c_char,
    b: c_int,
    to: *const c_char,
    flags: libc::c_uint,
) -> c_int {
    let real = |a: c_int, from: *const c_char, b: c_int, to: *const c_char| match real::renameat2.get() {
        // SAFETY: the caller's arguments.
        Some(real) => unsafe { real(a, from, b, to, flags) },
        // SAFETY: as above.
        None => unsafe { libc::syscall(libc::SYS_renameat2, a, from, b, to, flags) as c_int },
    };
    // SAFETY: the caller's arguments.
    unsafe { two((a, from), (b, to), with(Op::Rename, flags.into()), real) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn link(from: *const c_char, to: *const c_char) -> c_int {
    let Some(real) = real::link.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { two((HERE, from), (HERE, to), Request::new(Op::Link), |_, from, _, to| real(from, to)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn linkat(
    a: c_int,
    from: *const c_char,
    b: c_int,
    to: *const c_char,
    flags: c_int,
) -> c_int {
    let Some(real) = real::linkat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { two((a, from), (b, to), with(Op::Link, flags.into()), |a, from, b, to| real(a, from, b, to, flags)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symlink(target: *const c_char, path: *const c_char) -> c_int {
    let Some(real) = real::symlink.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |_, path| c_long::from(unsafe { real(target, path) });
    // SAFETY: the caller's paths.
    let other = unsafe { served::bytes(target) };
    // SAFETY: as above.
    unsafe { named((HERE, path), Request::new(Op::Symlink), (other, b""), real, |_, _| 0) as c_int }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn symlinkat(target: *const c_char, dir: c_int, path: *const c_char) -> c_int {
    let Some(real) = real::symlinkat.get() else { return missing() };
    // SAFETY: the caller's arguments.
    let real = |dir, path| c_long::from(unsafe { real(target, dir, path) });
    // SAFETY: the caller's paths.
    let other = unsafe { served::bytes(target) };
    // SAFETY: as above.
    unsafe { named((dir, path), Request::new(Op::Symlink), (other, b""), real, |_, _| 0) as c_int }
}

/// # Safety
/// As `readlinkat`.
unsafe fn read_link(
    at: (c_int, *const c_char),
    buffer: *mut c_char,
    len: size_t,
    real: impl FnOnce(c_int, *const c_char) -> ssize_t,
) -> ssize_t {
    let done = |data: &[u8]| {
        if len == 0 {
            return fail(libc::EINVAL);
        }
        let len = data.len().min(len);
        // SAFETY: the caller's buffer.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), buffer.cast(), len) };
        len as c_long
    };
    // SAFETY: the caller's path.
    let said = unsafe { served::bytes(at.1) };
    // `/dev/stdin` and its like are links to names of descriptors.
    if let Some(open) = served::open_file_named(said).filter(|_| !said.starts_with(b"/dev/std")) {
        let (mut inside, mut name) = (Room::new(), Room::new());
        let known = SERVED.path_of(open, &mut inside).and_then(|()| SERVED.name_of(inside.path(), &mut name));
        return known.map_or_else(fail, |()| done(name.path())) as ssize_t;
    }
    let linked = |_, data: &[u8]| done(data);
    let real = |dir, path| real(dir, path) as c_long;
    // SAFETY: as above.
    unsafe { named(at, Request::new(Op::Readlink), (b"", b""), real, linked) as ssize_t }
}

/// # Safety
/// As `readlinkat`.
#[cold]
unsafe fn kernel_link(dir: c_int, path: *const c_char, buffer: *mut c_char, len: size_t) -> ssize_t {
    // SAFETY: the caller's arguments.
    unsafe { libc::syscall(libc::SYS_readlinkat, dir, path, buffer, len) as ssize_t }
}

macro_rules! readlinks {
    ($($name:ident($($room:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char, buffer: *mut c_char, len: size_t $(, $room: size_t)?,
        ) -> ssize_t {
            // SAFETY: the caller's arguments.
            unsafe {
                let Some(real) = real::$name.found() else { return kernel_link(HERE, path, buffer, len) };
                read_link((HERE, path), buffer, len, |_, path| real(path, buffer, len $(, $room)?))
            }
        }
    )* };
}

readlinks! { readlink(); __readlink_chk(room); }

macro_rules! readlinkats {
    ($($name:ident($($room:ident)?);)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            dir: c_int, path: *const c_char, buffer: *mut c_char, len: size_t $(, $room: size_t)?,
        ) -> ssize_t {
            // SAFETY: the caller's arguments.
            unsafe {
                let Some(real) = real::$name.found() else { return kernel_link(dir, path, buffer, len) };
                read_link((dir, path), buffer, len, |dir, path| real(dir, path, buffer, len $(, $room)?))
            }
        }
    )* };
}

readlinkats! { readlinkat(); __readlinkat_chk(room); }
