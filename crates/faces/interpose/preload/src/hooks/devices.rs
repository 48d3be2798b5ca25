//! Calls about room, advice and readiness: fallocate, posix_fadvise, readahead, statfs, poll and select.

use std::ffi::{c_char, c_int, c_long};

use impresario_interpose::served::protocol::{DATA_ONLY, Op, READ_AHEAD, Request};
use libc::{off_t, pollfd, size_t, ssize_t, timeval};

use crate::around::{errno, set_errno};
use crate::real;
use crate::real::missing;
use crate::served::{SERVED, attributes, named, open_file, with};

/// `fallocate` of a file of the cluster.
fn change_space(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> Option<c_long> {
    open_file(fd, Request { b: len, c: mode.into(), ..with(Op::Space, offset) }, b"", b"", &mut [])
}

macro_rules! fallocates {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
            if let Some(done) = change_space(fd, mode, offset, len) {
                return done as c_int;
            }
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            unsafe { real(fd, mode, offset, len) }
        }
    )* };
}

fallocates! { fallocate fallocate64 }

/// `posix_fallocate` of a file of the cluster: the errno. The C library writes zeros where the file system cannot allocate
/// (a folder of another one); here the file is lengthened then, which is all that can be had of it without reading.
fn allocate(fd: c_int, offset: off_t, len: off_t) -> Option<c_int> {
    let before = errno();
    let done = change_space(fd, 0, offset, len)?;
    let result = match errno() {
        _ if done == 0 => 0,
        libc::EOPNOTSUPP => lengthen(fd, offset.saturating_add(len)).unwrap_or(libc::EBADF),
        refused => refused,
    };
    set_errno(before);
    Some(result)
}

fn lengthen(fd: c_int, end: off_t) -> Option<c_int> {
    match attributes(fd)? {
        Ok(meta) if (meta.size as i64) < end => {
            let done = open_file(fd, with(Op::Truncate, end), b"", b"", &mut [])?;
            Some(if done < 0 { errno() } else { 0 })
        }
        Ok(_) => Some(0),
        Err(errno) => Some(errno),
    }
}

macro_rules! posix_fallocates {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, offset: off_t, len: off_t) -> c_int {
            if let Some(errno) = allocate(fd, offset, len) {
                return errno;
            }
            let Some(real) = real::$name.get() else { return libc::ENOSYS };
            // SAFETY: the caller's arguments.
            unsafe { real(fd, offset, len) }
        }
    )* };
}

posix_fallocates! { posix_fallocate posix_fallocate64 }

/// Tells the agent what will be done with a file of the cluster; `None`: the descriptor is another's.
fn tell(fd: c_int, offset: off_t, len: off_t, advice: i64) -> Option<c_long> {
    open_file(fd, Request { b: len, c: advice, ..with(Op::Advise, offset) }, b"", b"", &mut [])
}

/// `posix_fadvise` of a file of the cluster: the errno.
fn advise(fd: c_int, offset: off_t, len: off_t, advice: c_int) -> Option<c_int> {
    let before = errno();
    let done = tell(fd, offset, len, advice.into())?;
    let result = if done < 0 { errno() } else { 0 };
    set_errno(before);
    Some(result)
}

macro_rules! advices {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(fd: c_int, offset: off_t, len: off_t, advice: c_int) -> c_int {
            if let Some(errno) = advise(fd, offset, len, advice) {
                return errno;
            }
            let Some(real) = real::$name.get() else { return libc::ENOSYS };
            // SAFETY: the caller's arguments.
            unsafe { real(fd, offset, len, advice) }
        }
    )* };
}

advices! { posix_fadvise posix_fadvise64 }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn readahead(fd: c_int, offset: off_t, len: size_t) -> ssize_t {
    if let Some(done) = tell(fd, offset, len as off_t, READ_AHEAD) {
        return done as ssize_t;
    }
    let Some(real) = real::readahead.get() else { return missing() as ssize_t };
    // SAFETY: the caller's arguments.
    unsafe { real(fd, offset, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn sync_file_range(fd: c_int, offset: off_t, len: off_t, flags: libc::c_uint) -> c_int {
    if let Some(done) = open_file(fd, with(Op::Sync, DATA_ONLY), b"", b"", &mut []) {
        return done as c_int;
    }
    let Some(real) = real::sync_file_range.get() else { return missing() };
    // SAFETY: the caller's arguments.
    unsafe { real(fd, offset, len, flags) }
}

fn totals(data: &[u8]) -> [u64; 6] {
    let mut words = [0; 6];
    for (word, bytes) in words.iter_mut().zip(data.chunks_exact(8)) {
        *word = bytes.try_into().map_or(0, u64::from_ne_bytes);
    }
    words
}

fn to_statfs(data: &[u8]) -> libc::statfs {
    let [block, blocks, free, available, files, files_free] = totals(data);
    // SAFETY: a structure of numbers.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // As a FUSE mount says it, so that programs treat both alike.
    found.f_type = 0x6573_5546;
    (found.f_bsize, found.f_frsize, found.f_namelen) = (block as _, block as _, 255);
    (found.f_blocks, found.f_bfree, found.f_bavail) = (blocks, free, available);
    (found.f_files, found.f_ffree) = (files, files_free);
    found
}

fn to_statvfs(data: &[u8]) -> libc::statvfs {
    let [block, blocks, free, available, files, files_free] = totals(data);
    // SAFETY: a structure of numbers.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    (found.f_bsize, found.f_frsize, found.f_namemax) = (block as _, block as _, 255);
    (found.f_blocks, found.f_bfree, found.f_bavail) = (blocks, free, available);
    (found.f_files, found.f_ffree, found.f_favail) = (files, files_free, files_free);
    found
}

macro_rules! statfss {
    ($($name:ident $of_open:ident $kind:ty, $convert:ident;)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(path: *const c_char, into: *mut $kind) -> c_int {
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            let real = |_, path| c_long::from(unsafe { real(path, into.cast()) });
            let done = |_, data: &[u8]| {
                // SAFETY: the caller's place.
                unsafe { into.write($convert(data)) };
                0
            };
            // SAFETY: the caller's path.
            unsafe { named((libc::AT_FDCWD, path), Request::new(Op::Statfs), (b"", b""), real, done) as c_int }
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $of_open(fd: c_int, into: *mut $kind) -> c_int {
            let mut data = [0; 48];
            if let Some(done) = open_file(fd, Request::new(Op::Statfs), b"", b"", &mut data) {
                if done >= 0 {
                    // SAFETY: the caller's place.
                    unsafe { into.write($convert(&data)) };
                }
                return done as c_int;
            }
            let Some(real) = real::$of_open.get() else { return missing() };
            // SAFETY: the caller's arguments.
            unsafe { real(fd, into.cast()) }
        }
    )* };
}

statfss! {
    statfs fstatfs libc::statfs, to_statfs;
    statfs64 fstatfs64 libc::statfs, to_statfs;
    statvfs fstatvfs libc::statvfs, to_statvfs;
    statvfs64 fstatvfs64 libc::statvfs, to_statvfs;
}

const READY: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDNORM | libc::POLLWRNORM;

/// A file of the cluster is always ready, as every file is; the others are asked about.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    let Some(real) = real::poll.get() else { return missing() };
    if !SERVED.is_active() || fds.is_null() || count == 0 || count > 1 << 16 {
        // SAFETY: the caller's arguments.
        return unsafe { real(fds, count, timeout) };
    }
    // SAFETY: the caller's array.
    let asked = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    let ours = asked.iter().enumerate().filter(|(_, one)| SERVED.open_file(one.fd).is_some());
    let ours: Vec<(usize, c_int)> = ours.map(|(at, one)| (at, one.fd)).collect();
    if ours.is_empty() {
        // SAFETY: the caller's arguments.
        return unsafe { real(fds, count, timeout) };
    }
    let mut is_ready = false;
    for (at, _) in &ours {
        // As a number below zero it is passed over.
        asked[*at].fd = -1;
        is_ready |= asked[*at].events & READY != 0;
    }
    // SAFETY: as above.
    let others = unsafe { real(fds, count, if is_ready { 0 } else { timeout }) };
    let mut all = others.max(0);
    for (at, fd) in ours {
        let one = &mut asked[at];
        one.fd = fd;
        one.revents = one.events & READY;
        all += c_int::from(one.revents != 0);
    }
    if others < 0 { others } else { all }
}

/// Files of the cluster in a set, which are taken out of it.
///
/// # Safety
/// A set of `select`, or null.
unsafe fn taken(set: *mut libc::fd_set, count: c_int) -> Option<libc::fd_set> {
    if set.is_null() {
        return None;
    }
    // SAFETY: the caller's set, and one of ours.
    unsafe {
        let mut mine: libc::fd_set = std::mem::zeroed();
        let mut any = false;
        for fd in 0..count.min(libc::FD_SETSIZE as c_int) {
            if libc::FD_ISSET(fd, set) && SERVED.open_file(fd).is_some() {
                libc::FD_CLR(fd, set);
                libc::FD_SET(fd, &raw mut mine);
                any = true;
            }
        }
        any.then_some(mine)
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn select(
    count: c_int,
    reads: *mut libc::fd_set,
    writes: *mut libc::fd_set,
    others: *mut libc::fd_set,
    timeout: *mut timeval,
) -> c_int {
    let Some(real) = real::select.get() else { return missing() };
    if !SERVED.is_active() {
        // SAFETY: the caller's arguments.
        return unsafe { real(count, reads, writes, others, timeout) };
    }
    // SAFETY: the caller's sets.
    unsafe {
        let (readable, writable) = (taken(reads, count), taken(writes, count));
        let exceptional = taken(others, count);
        if readable.is_none() && writable.is_none() && exceptional.is_none() {
            return real(count, reads, writes, others, timeout);
        }
        let mut now = timeval { tv_sec: 0, tv_usec: 0 };
        let is_ready = readable.is_some() || writable.is_some();
        let mut found = real(count, reads, writes, others, if is_ready { &raw mut now } else { timeout });
        for (set, mine) in [(reads, readable), (writes, writable)] {
            let Some(mine) = mine.filter(|_| found >= 0) else { continue };
            for fd in 0..count.min(libc::FD_SETSIZE as c_int) {
                if libc::FD_ISSET(fd, &raw const mine) {
                    libc::FD_SET(fd, set);
                    found += 1;
                }
            }
        }
        found
    }
}
