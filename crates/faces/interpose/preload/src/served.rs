//! The calls of a program that concern files of a cluster, under `impresario run`: paths and descriptors that are the
//! cluster's go to the agent, all others to the real function.

use std::ffi::{CStr, c_char, c_int, c_long, c_void};

use impresario_interpose::served::protocol::{
    AT_POSITION, DATA_MAX, META_BYTES, Meta, Op, PATH_MAX, Request, UMASK_SHIFT,
};
use impresario_interpose::served::{Got, Room, Route, Served};
use libc::{iovec, off_t, size_t, ssize_t};

use crate::around::set_errno;
use crate::hooks::streams;
use crate::{TABLE, real};

/// The program's side of a run; serves nothing outside one.
pub static SERVED: Served = Served::new();

/// The number that `stat` gives for the device.
const DEVICE: u64 = 0x0069_6d70;
/// What programs are told to be a good size of reads and writes.
pub const BLOCK_BYTES: i64 = 128 << 10;

/// Fails a call.
#[cold]
pub fn fail(errno: c_int) -> c_long {
    set_errno(errno);
    -1
}

/// A caller's path. Outside a run it is not looked at: a pointer that leads nowhere is the kernel's to refuse.
///
/// # Safety
/// As the C library's functions: null, or a string that outlives the use.
pub unsafe fn bytes<'a>(path: *const c_char) -> &'a [u8] {
    if path.is_null() || !SERVED.is_active() {
        return b"";
    }
    // SAFETY: not null, and the caller's promise.
    unsafe { CStr::from_ptr(path) }.to_bytes()
}

/// Asks the agent about a path, or calls the real function: with what the program said, or with where the path leads.
///
/// # Safety
/// As [`bytes`].
#[inline]
pub unsafe fn named(
    (dir, path): (c_int, *const c_char),
    request: Request,
    (other, data): (&[u8], &[u8]),
    real: impl FnOnce(c_int, *const c_char) -> c_long,
    done: impl FnOnce(Got, &[u8]) -> c_long,
) -> c_long {
    if !SERVED.is_active() || path.is_null() {
        return real(dir, path);
    }
    // SAFETY: the caller's promise.
    unsafe { asked((dir, path), request, (other, data), real, done) }
}

/// # Safety
/// As [`bytes`].
#[inline(never)]
unsafe fn asked(
    (dir, path): (c_int, *const c_char),
    request: Request,
    (other, data): (&[u8], &[u8]),
    real: impl FnOnce(c_int, *const c_char) -> c_long,
    done: impl FnOnce(Got, &[u8]) -> c_long,
) -> c_long {
    let mut room = Room::new();
    // SAFETY: the caller's promise.
    let said = unsafe { bytes(path) };
    let mut request = request;
    let place = SERVED.place(dir, said, &mut room).and_then(|place| match open_file_named(said) {
        Some(open) if place == Route::Foreign && follows(&request) => {
            let by_name = matches!(request.op, Op::Open | Op::Realpath | Op::Enter);
            if request.op == Op::Open {
                request.a &= i64::from(!libc::O_CREAT);
            }
            if by_name {
                return SERVED.path_of(open, &mut room).map(|()| Route::Inside);
            }
            // That file, whatever has its name by now.
            request.open = open;
            room.set(b"").map(|()| Route::Inside)
        }
        _ => Ok(place),
    });
    match place {
        Err(errno) => fail(errno),
        Ok(Route::Foreign) => real(dir, path),
        Ok(Route::Outside) => real(libc::AT_FDCWD, room.c_str().as_ptr()),
        Ok(Route::Inside) => {
            let mut reply = [0; PATH_MAX];
            match SERVED.call(request, room.path(), other, data, &mut reply) {
                Err(errno) => fail(errno),
                Ok(got) if got.is_outside => match room.set(reply.get(..got.len).unwrap_or(&[])) {
                    Ok(()) => real(libc::AT_FDCWD, room.c_str().as_ptr()),
                    Err(errno) => fail(errno),
                },
                Ok(got) => {
                    let len = got.len;
                    done(got, reply.get(..len).unwrap_or(&[]))
                }
            }
        }
    }
}

/// Whether a request is about what a link at the end of its path leads to, as those are that name descriptors.
fn follows(request: &Request) -> bool {
    let flags = match request.op {
        Op::Open => return request.a & i64::from(libc::O_NOFOLLOW) == 0,
        Op::Truncate | Op::Statfs | Op::Realpath | Op::Enter => return true,
        Op::Stat | Op::Times => request.a,
        Op::Chmod | Op::Access => request.b,
        Op::Chown | Op::GetXattr | Op::SetXattr | Op::ListXattr | Op::RemoveXattr => request.c,
        _ => return false,
    };
    flags & i64::from(libc::AT_SYMLINK_NOFOLLOW) == 0
}

/// The open file of the cluster whose descriptor a path of the machine names, such as `/dev/stdin`.
pub fn open_file_named(path: &[u8]) -> Option<u64> {
    let fd = match path {
        b"/dev/stdin" => 0,
        b"/dev/stdout" => 1,
        b"/dev/stderr" => 2,
        _ => {
            let below = [&b"/dev/fd/"[..], b"/proc/self/fd/"].iter().find_map(|folder| path.strip_prefix(*folder))?;
            std::str::from_utf8(below).ok()?.parse().ok()?
        }
    };
    SERVED.open_file(fd)
}

/// Asks the agent about an open file of the cluster; `None`: the descriptor is another's.
#[inline]
pub fn open_file(fd: c_int, request: Request, other: &[u8], data: &[u8], into: &mut [u8]) -> Option<c_long> {
    let open = SERVED.open_file(fd)?;
    Some(match SERVED.call(Request { open, ..request }, b"", other, data, into) {
        Ok(got) => got.result as c_long,
        Err(errno) => fail(errno),
    })
}

/// A request with its first number.
pub fn with(op: Op, a: i64) -> Request {
    Request { a, ..Request::new(op) }
}

/// The process's mask of new files, without changing it.
fn umask() -> u32 {
    let read = || {
        let status = rustix::fs::open(
            c"/proc/self/status",
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC,
            rustix::fs::Mode::empty(),
        );
        let mut text = [0u8; 512];
        let len = rustix::io::read(&status.ok()?, &mut text[..]).ok()?;
        const NAME: &[u8] = b"\nUmask:\t";
        let text = text.get(..len)?;
        let at = text.windows(NAME.len()).position(|window| window == NAME)? + NAME.len();
        let digits = text.get(at..)?.iter().take_while(|byte| (b'0'..=b'7').contains(*byte));
        Some(digits.fold(0, |mask, digit| mask << 3 | u32::from(digit - b'0')))
    };
    // Kernels before 4.7 tell it only by setting another.
    read().unwrap_or_else(|| {
        let before = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
        rustix::process::umask(before);
        before.as_raw_mode()
    })
}

/// A mode and the process's mask: the server takes it off, or not, as the directory says.
pub fn with_umask(mode: libc::mode_t) -> u32 {
    mode | umask() << UMASK_SHIFT
}

/// Opens a path, of the cluster or of the machine.
///
/// # Safety
/// As [`bytes`].
#[inline]
pub unsafe fn open(
    dir: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
    real: impl FnOnce(c_int, *const c_char) -> c_int,
) -> c_int {
    if !SERVED.is_active() {
        return real(dir, path);
    }
    let mode = if flags & libc::O_CREAT != 0 { with_umask(mode) } else { 0 };
    let request = Request { b: mode.into(), ..with(Op::Open, flags.into()) };
    let real = |dir, path| {
        let fd = real(dir, path);
        SERVED.forget(fd);
        c_long::from(fd)
    };
    // SAFETY: the caller's promise.
    let fd = unsafe { named((dir, path), request, (b"", b""), real, |got, _| opened(got, flags)) };
    fd as c_int
}

fn opened(got: Got, flags: c_int) -> c_long {
    use std::os::fd::IntoRawFd;
    let Some(fd) = got.fd else { return fail(libc::EIO) };
    if flags & libc::O_CLOEXEC == 0 {
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty());
    }
    let fd = fd.into_raw_fd();
    TABLE.forget(fd);
    SERVED.forget(fd);
    c_long::from(fd)
}

/// Closes a descriptor of the cluster after which its file may have none: what closing it says is known then.
pub fn settle(open: u64) -> c_int {
    match SERVED.call(Request { open, ..Request::new(Op::Closed) }, b"", b"", b"", &mut []) {
        Ok(_) => 0,
        Err(errno) => fail(errno) as c_int,
    }
}

/// The number `fd` is given another file by `replace`; what was there may be closed by that.
pub fn replaced(fd: c_int, replace: impl FnOnce() -> c_int) -> c_int {
    if !SERVED.is_active() {
        return replace();
    }
    SERVED.step_aside(fd);
    let before = SERVED.open_file(fd);
    streams::about_to_become(fd);
    let result = replace();
    SERVED.forget(fd);
    if result >= 0 {
        if let Some(open) = before {
            let errno = crate::around::errno();
            settle(open);
            set_errno(errno);
        }
        streams::became(fd);
    }
    result
}

/// Reads at `offset`, or at the position.
///
/// # Safety
/// As `read`.
#[inline]
pub unsafe fn read(fd: c_int, buffer: *mut c_void, len: size_t, offset: Option<off_t>) -> Option<ssize_t> {
    let open = SERVED.open_file(fd)?;
    if offset.is_some_and(|offset| offset < 0) {
        return Some(fail(libc::EINVAL) as ssize_t);
    }
    let len = len.min(isize::MAX as usize);
    // SAFETY: the caller's buffer, of which only what is written is used.
    let buffer = if len == 0 { &mut [][..] } else { unsafe { std::slice::from_raw_parts_mut(buffer.cast(), len) } };
    Some(read_into(open, buffer, offset))
}

fn read_into(open: u64, buffer: &mut [u8], offset: Option<off_t>) -> ssize_t {
    let mut done = 0;
    loop {
        let end = buffer.len().min(done + DATA_MAX);
        let part = buffer.get_mut(done..end).unwrap_or(&mut []);
        let (room, at) = (part.len(), offset.map_or(AT_POSITION, |offset| offset.saturating_add(done as i64)));
        let request = Request { open, ..with(Op::Read, at) };
        match SERVED.call(request, b"", b"", b"", part) {
            Ok(got) => done += got.len.min(room),
            Err(errno) if done == 0 => return fail(errno) as ssize_t,
            Err(_) => return done as ssize_t,
        }
        if done < end || end == buffer.len() {
            return done as ssize_t;
        }
    }
}

/// Writes at `offset`, or at the position.
///
/// # Safety
/// As `write`.
#[inline]
pub unsafe fn write(fd: c_int, bytes: *const c_void, len: size_t, offset: Option<off_t>) -> Option<ssize_t> {
    let open = SERVED.open_file(fd)?;
    if offset.is_some_and(|offset| offset < 0) {
        return Some(fail(libc::EINVAL) as ssize_t);
    }
    let len = len.min(isize::MAX as usize);
    // SAFETY: the caller's bytes.
    let bytes = if len == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(bytes.cast(), len) } };
    Some(write_from(open, bytes, offset))
}

fn write_from(open: u64, bytes: &[u8], offset: Option<off_t>) -> ssize_t {
    let mut done = 0;
    loop {
        let end = bytes.len().min(done + DATA_MAX);
        let at = offset.map_or(AT_POSITION, |offset| offset.saturating_add(done as i64));
        let request = Request { open, ..with(Op::Write, at) };
        match SERVED.call(request, b"", b"", bytes.get(done..end).unwrap_or(&[]), &mut []) {
            Ok(got) => done += got.result as usize,
            Err(errno) if done == 0 => return fail(errno) as ssize_t,
            Err(_) => return done as ssize_t,
        }
        if done < end || end == bytes.len() {
            return done as ssize_t;
        }
    }
}

/// The parts of a vector; `None`: it is none.
///
/// # Safety
/// As `readv`.
unsafe fn parts<'a>(parts: *const iovec, count: c_int) -> Option<(&'a [iovec], usize)> {
    let count = usize::try_from(count).ok().filter(|count| *count <= 1024)?;
    // SAFETY: the caller's promise.
    let parts = if count == 0 { &[][..] } else { unsafe { std::slice::from_raw_parts(parts, count) } };
    let len = parts.iter().try_fold(0usize, |len, part| len.checked_add(part.iov_len))?;
    (len <= isize::MAX as usize).then_some((parts, len))
}

/// Reads into several places as one.
///
/// # Safety
/// As `readv`.
#[inline]
pub unsafe fn read_parts(fd: c_int, vector: *const iovec, count: c_int, offset: Option<off_t>) -> Option<ssize_t> {
    let open = SERVED.open_file(fd)?;
    // SAFETY: the caller's promise.
    let Some((parts, len)) = (unsafe { parts(vector, count) }) else { return Some(fail(libc::EINVAL) as ssize_t) };
    if offset.is_some_and(|offset| offset < 0) {
        return Some(fail(libc::EINVAL) as ssize_t);
    }
    // More than that is a short read, as POSIX allows.
    let mut all = vec![0; len.min(4 * DATA_MAX)];
    let done = read_into(open, &mut all, offset);
    let mut rest = all.get(..usize::try_from(done).unwrap_or(0)).unwrap_or(&[]);
    for part in parts {
        let (mine, later) = rest.split_at(part.iov_len.min(rest.len()));
        // SAFETY: the caller's places, each of that length at least.
        unsafe { std::ptr::copy_nonoverlapping(mine.as_ptr(), part.iov_base.cast(), mine.len()) };
        rest = later;
    }
    Some(done)
}

/// Writes from several places as one.
///
/// # Safety
/// As `writev`.
#[inline]
pub unsafe fn write_parts(fd: c_int, vector: *const iovec, count: c_int, offset: Option<off_t>) -> Option<ssize_t> {
    let open = SERVED.open_file(fd)?;
    // SAFETY: the caller's promise.
    let Some((parts, len)) = (unsafe { parts(vector, count) }) else { return Some(fail(libc::EINVAL) as ssize_t) };
    if offset.is_some_and(|offset| offset < 0) {
        return Some(fail(libc::EINVAL) as ssize_t);
    }
    let mut all = Vec::with_capacity(len.min(4 * DATA_MAX));
    for part in parts {
        let take = part.iov_len.min(4 * DATA_MAX - all.len());
        if take > 0 {
            // SAFETY: the caller's bytes.
            all.extend_from_slice(unsafe { std::slice::from_raw_parts(part.iov_base.cast(), take) });
        }
    }
    Some(write_from(open, &all, offset))
}

/// Refuses flags of `preadv2` and `pwritev2` that ask for what is not done here: to be durable, to append, not to wait.
#[inline]
pub fn with_flags(fd: c_int, flags: c_int) -> Option<ssize_t> {
    // Only a hint.
    const IGNORED: c_int = libc::RWF_HIPRI;
    (flags & !IGNORED != 0 && SERVED.open_file(fd).is_some()).then(|| fail(libc::EOPNOTSUPP) as ssize_t)
}

/// Moves the position.
#[inline]
pub fn seek(fd: c_int, offset: off_t, whence: c_int) -> Option<off_t> {
    open_file(fd, Request { b: whence.into(), ..with(Op::Seek, offset) }, b"", b"", &mut [])
}

/// Attributes of an open file.
#[inline]
pub fn attributes(fd: c_int) -> Option<Result<Meta, c_int>> {
    let open = SERVED.open_file(fd)?;
    let mut bytes = [0; META_BYTES];
    let got = SERVED.call(Request { open, ..Request::new(Op::Stat) }, b"", b"", b"", &mut bytes);
    Some(got.map(|_| Meta::decode(&bytes)))
}

/// As the C library's structure.
pub fn to_stat(meta: &Meta) -> libc::stat {
    // SAFETY: a structure of numbers.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    stat.st_dev = DEVICE;
    stat.st_ino = meta.ino;
    stat.st_mode = meta.mode;
    stat.st_nlink = meta.nlink.into();
    stat.st_uid = meta.uid;
    stat.st_gid = meta.gid;
    stat.st_rdev = meta.rdev;
    stat.st_size = meta.size as i64;
    stat.st_blksize = BLOCK_BYTES as _;
    stat.st_blocks = meta.used_bytes.div_ceil(512) as i64;
    let [atime, mtime, ctime] = meta.times;
    (stat.st_atime, stat.st_atime_nsec) = (atime.0, atime.1.into());
    (stat.st_mtime, stat.st_mtime_nsec) = (mtime.0, mtime.1.into());
    (stat.st_ctime, stat.st_ctime_nsec) = (ctime.0, ctime.1.into());
    stat
}

/// The same for `statx`.
pub fn to_statx(meta: &Meta) -> libc::statx {
    // SAFETY: a structure of numbers.
    let mut statx: libc::statx = unsafe { std::mem::zeroed() };
    statx.stx_mask = libc::STATX_BASIC_STATS;
    statx.stx_blksize = BLOCK_BYTES as u32;
    statx.stx_nlink = meta.nlink;
    statx.stx_uid = meta.uid;
    statx.stx_gid = meta.gid;
    statx.stx_mode = meta.mode as u16;
    statx.stx_ino = meta.ino;
    statx.stx_size = meta.size;
    statx.stx_blocks = meta.used_bytes.div_ceil(512);
    let mut places = [&mut statx.stx_atime, &mut statx.stx_mtime, &mut statx.stx_ctime];
    for (place, (secs, nanos)) in places.iter_mut().zip(meta.times) {
        (place.tv_sec, place.tv_nsec) = (secs, nanos);
    }
    (statx.stx_rdev_major, statx.stx_rdev_minor) = (libc::major(meta.rdev), libc::minor(meta.rdev));
    (statx.stx_dev_major, statx.stx_dev_minor) = (libc::major(DEVICE), libc::minor(DEVICE));
    statx
}

/// The flags that `MAP_SHARED_VALIDATE` knows, with those that the C library does not name: Linux's `LEGACY_MAP_MASK`.
const VALIDATED: c_int = {
    let kept = libc::MAP_SHARED_VALIDATE | libc::MAP_FIXED | libc::MAP_NORESERVE | libc::MAP_STACK;
    let uninitialized_and_huge_pages = 0x0400_0000 | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB | libc::MAP_HUGE_1GB;
    // MAP_32BIT and MAP_ABOVE4G.
    let low_and_high = if cfg!(target_arch = "x86_64") { 0x40 | 0x80 } else { 0 };
    let no_effect = libc::MAP_DENYWRITE | libc::MAP_EXECUTABLE | libc::MAP_NONBLOCK;
    let how = libc::MAP_GROWSDOWN | libc::MAP_LOCKED | libc::MAP_POPULATE | libc::MAP_ANONYMOUS;
    kept | uninitialized_and_huge_pages | low_and_high | no_effect | how
};

/// Fills a map of a file: private memory with the file's bytes. Shared maps that are or may become writable are refused.
///
/// # Safety
/// As `mmap`.
pub unsafe fn map(
    place: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> Option<*mut c_void> {
    let open = SERVED.open_file(fd)?;
    let refused = |errno| {
        set_errno(errno);
        Some(libc::MAP_FAILED)
    };
    let status = match SERVED.call(Request { open, ..Request::new(Op::Flags) }, b"", b"", b"", &mut []) {
        Ok(got) => got.result as c_int,
        Err(errno) => return refused(errno),
    };
    if offset < 0 || offset & 4095 != 0 || len == 0 {
        return refused(libc::EINVAL);
    }
    // The kinds are numbers, not bits: `MAP_SHARED_VALIDATE` has the bit of `MAP_PRIVATE`.
    let is_shared = match flags & libc::MAP_TYPE {
        libc::MAP_PRIVATE => false,
        libc::MAP_SHARED => true,
        libc::MAP_SHARED_VALIDATE if flags & !VALIDATED != 0 => return refused(libc::EOPNOTSUPP),
        libc::MAP_SHARED_VALIDATE => true,
        _ => return refused(libc::EINVAL),
    };
    if status & libc::O_ACCMODE == libc::O_WRONLY {
        return refused(libc::EACCES);
    }
    if is_shared && (protection & libc::PROT_WRITE != 0 || status & libc::O_ACCMODE != libc::O_RDONLY) {
        if status & libc::O_ACCMODE == libc::O_RDONLY {
            return refused(libc::EACCES);
        }
        say_once();
        return refused(libc::ENODEV);
    }
    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
    let kept = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE | libc::MAP_NORESERVE;
    let kind = MapFlags::from_bits_retain((libc::MAP_PRIVATE | flags & kept) as u32);
    // SAFETY: the caller's place, for the call that the caller meant.
    let made = unsafe { mmap_anonymous(place, len, ProtFlags::READ | ProtFlags::WRITE, kind) };
    let made = match made {
        Ok(made) => made,
        Err(errno) => return refused(errno.raw_os_error()),
    };
    // SAFETY: the memory was just made for this, of that length.
    let memory = unsafe { std::slice::from_raw_parts_mut(made.cast::<u8>(), len) };
    let filled = fill(open, memory, offset);
    // SAFETY: as above.
    if filled.is_ok() && unsafe { mprotect(made, len, MprotectFlags::from_bits_retain(protection as u32)) }.is_ok() {
        return Some(made);
    }
    // SAFETY: made above, and not given to anybody.
    let _ = unsafe { munmap(made, len) };
    refused(filled.err().unwrap_or(libc::EACCES))
}

/// Reads a file into memory from `offset` on, up to the file's end. A read that ends early says nothing about why: what
/// comes next tells the file's end from an error, which must not become zeros in a map.
fn fill(open: u64, memory: &mut [u8], offset: off_t) -> Result<(), c_int> {
    let mut done = 0;
    while let Some(rest) = memory.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match usize::try_from(read_into(open, rest, Some(offset.saturating_add(done as off_t)))) {
            Ok(0) => break,
            Ok(got) => done += got,
            Err(_) => return Err(crate::around::errno()),
        }
    }
    Ok(())
}

/// Says, once in a process, why a map is refused.
fn say_once() {
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    static SAID: AtomicBool = AtomicBool::new(false);
    if SAID.swap(true, Relaxed) {
        return;
    }
    let text =
        b"impresario run: a writable shared memory map of a cluster's file is not possible here; `impresario mount` \
                 (FUSE) serves it\n";
    // SAFETY: standard error is used for one call.
    let stderr = unsafe { std::os::fd::BorrowedFd::borrow_raw(2) };
    let _ = rustix::io::write(stderr, text);
}

/// Closes without being asked about.
pub fn close(fd: c_int) {
    if let Some(close) = real::close.get() {
        // SAFETY: a number that the caller owns.
        unsafe { close(fd) };
    }
}
