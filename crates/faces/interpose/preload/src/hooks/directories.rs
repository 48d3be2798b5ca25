//! Reading directories: opendir to closedir. A directory of the cluster is read by names, in slices; the C library's own
//! streams are told from ours by the first word, which is a descriptor there.

use std::ffi::{c_char, c_int, c_long, c_void};

use impresario_interpose::served::protocol::{Entries, Op, Request};
use libc::{DIR, dirent64};

use super::{closing, opening};
use crate::around::{errno, set_errno};
use crate::real::missing;
use crate::served::{SERVED, fail};
use crate::{real, served};

/// No descriptor has this number.
const MAGIC: u64 = u64::from_ne_bytes(*b"impr.dir");
/// Bytes of names that are fetched at a time.
const SLICE_BYTES: usize = 32 << 10;

/// An open directory of the cluster. The first word tells it from the C library's.
#[repr(C)]
struct Directory {
    magic: u64,
    fd: c_int,
    /// Names given so far; `.` and `..` are the first two.
    position: c_long,
    /// The name after which the next slice begins.
    last: Vec<u8>,
    slice: Vec<u8>,
    at: usize,
    is_ended: bool,
    entry: dirent64,
}

/// # Safety
/// An open directory stream.
unsafe fn ours<'a>(stream: *mut DIR) -> Option<&'a mut Directory> {
    if !SERVED.is_active() || stream.is_null() {
        return None;
    }
    // SAFETY: both kinds of streams begin with a word at least.
    let is_ours = unsafe { stream.cast::<u64>().read() } == MAGIC;
    // SAFETY: made by `begin`; calls of one stream do not overlap, by its contract.
    is_ours.then(|| unsafe { &mut *stream.cast::<Directory>() })
}

fn begin(fd: c_int) -> *mut DIR {
    // SAFETY: a structure of numbers.
    let entry = unsafe { std::mem::zeroed() };
    let (last, slice) = (Vec::new(), Vec::new());
    Box::into_raw(Box::new(Directory { magic: MAGIC, fd, position: 0, last, slice, at: 0, is_ended: false, entry }))
        .cast()
}

impl Directory {
    fn rewind(&mut self) {
        self.position = 0;
        self.last.clear();
        self.slice.clear();
        (self.at, self.is_ended) = (0, false);
    }

    fn give(&mut self, ino: u64, kind: u8, name: &[u8]) -> *mut dirent64 {
        let entry = &mut self.entry;
        (entry.d_ino, entry.d_type, entry.d_off) = (ino, kind, self.position);
        entry.d_reclen = size_of::<dirent64>() as u16;
        for (place, byte) in entry.d_name.iter_mut().zip(name.iter().take(255).chain(&[0])) {
            *place = *byte as c_char;
        }
        entry
    }

    /// The next name; null at the end, and with errno for an error.
    fn next(&mut self) -> *mut dirent64 {
        if self.position < 2 {
            let name = if self.position == 0 { &b"."[..] } else { b".." };
            self.position += 1;
            // Programs look at the numbers of these two by `stat`, when they do.
            return self.give(1, libc::DT_DIR, name);
        }
        if self.at >= self.slice.len() && !self.fetch() {
            return std::ptr::null_mut();
        }
        let slice = std::mem::take(&mut self.slice);
        let next = Entries(slice.get(self.at..).unwrap_or(&[])).next();
        let given = match next {
            Some((ino, kind, name)) => {
                self.at += 10 + name.len();
                self.position += 1;
                self.last.clear();
                self.last.extend_from_slice(name);
                self.give(ino, kind, name)
            }
            None => {
                set_errno(libc::EIO);
                std::ptr::null_mut()
            }
        };
        self.slice = slice;
        given
    }

    fn fetch(&mut self) -> bool {
        if self.is_ended {
            return false;
        }
        let Some(open) = SERVED.open_file(self.fd) else {
            set_errno(libc::EBADF);
            return false;
        };
        self.slice.resize(SLICE_BYTES, 0);
        self.at = 0;
        let request = Request { open, ..Request::new(Op::Readdir) };
        match SERVED.call(request, b"", b"", &self.last, &mut self.slice) {
            Ok(got) => {
                self.slice.truncate(got.len);
                self.is_ended = got.len == 0;
                !self.is_ended
            }
            Err(errno) => {
                self.slice.clear();
                set_errno(errno);
                false
            }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn opendir(path: *const c_char) -> *mut DIR {
    let Some(real) = real::opendir.get() else {
        missing();
        return std::ptr::null_mut();
    };
    if !SERVED.is_active() {
        // SAFETY: the caller's argument.
        return unsafe { real(path) };
    }
    let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the caller's path.
    let fd = unsafe { opening::open64(path, flags, 0) };
    if fd < 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: a fresh descriptor.
    let stream = unsafe { fdopendir(fd) };
    if stream.is_null() {
        let before = errno();
        // SAFETY: as above.
        unsafe { closing::close(fd) };
        set_errno(before);
    }
    stream
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fdopendir(fd: c_int) -> *mut DIR {
    if let Some(meta) = served::attributes(fd) {
        return match meta {
            Ok(meta) if meta.mode & libc::S_IFMT == libc::S_IFDIR => begin(fd),
            Ok(_) => {
                set_errno(libc::ENOTDIR);
                std::ptr::null_mut()
            }
            Err(errno) => {
                set_errno(errno);
                std::ptr::null_mut()
            }
        };
    }
    let Some(real) = real::fdopendir.get() else {
        missing();
        return std::ptr::null_mut();
    };
    // SAFETY: the caller's argument.
    unsafe { real(fd) }
}

macro_rules! readdirs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(stream: *mut DIR) -> *mut c_void {
            // SAFETY: the caller's stream.
            if let Some(directory) = unsafe { ours(stream) } {
                return directory.next().cast();
            }
            let Some(real) = real::$name.get() else { missing(); return std::ptr::null_mut() };
            // SAFETY: the caller's argument.
            unsafe { real(stream) }
        }
    )* };
}

readdirs! { readdir readdir64 }

macro_rules! readdir_rs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(stream: *mut DIR, entry: *mut c_void, result: *mut *mut c_void) -> c_int {
            // SAFETY: the caller's stream.
            if let Some(directory) = unsafe { ours(stream) } {
                let before = errno();
                set_errno(0);
                let next = directory.next();
                let error = errno();
                set_errno(before);
                // SAFETY: the caller's places.
                unsafe {
                    if next.is_null() {
                        *result = std::ptr::null_mut();
                        return error;
                    }
                    entry.cast::<dirent64>().write(*next);
                    *result = entry;
                }
                return 0;
            }
            let Some(real) = real::$name.get() else { return libc::ENOSYS };
            // SAFETY: the caller's arguments.
            unsafe { real(stream, entry, result) }
        }
    )* };
}

readdir_rs! { readdir_r readdir64_r }

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn closedir(stream: *mut DIR) -> c_int {
    // SAFETY: the caller's stream.
    if let Some(directory) = unsafe { ours(stream) } {
        let fd = directory.fd;
        directory.magic = 0;
        // SAFETY: made by `begin`, and the caller uses it no more.
        drop(unsafe { Box::from_raw(stream.cast::<Directory>()) });
        // SAFETY: the stream's descriptor.
        return unsafe { closing::close(fd) };
    }
    let Some(real) = real::closedir.get() else { return missing() };
    if SERVED.is_active()
        && !stream.is_null()
        && let Some(number) = real::dirfd.get()
    {
        // SAFETY: the caller's stream.
        SERVED.forget(unsafe { number(stream) });
    }
    // SAFETY: the caller's argument.
    unsafe { real(stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dirfd(stream: *mut DIR) -> c_int {
    // SAFETY: the caller's stream.
    if let Some(directory) = unsafe { ours(stream) } {
        return directory.fd;
    }
    let Some(real) = real::dirfd.get() else { return missing() };
    // SAFETY: the caller's argument.
    unsafe { real(stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rewinddir(stream: *mut DIR) {
    // SAFETY: the caller's stream.
    if let Some(directory) = unsafe { ours(stream) } {
        return directory.rewind();
    }
    if let Some(real) = real::rewinddir.get() {
        // SAFETY: the caller's argument.
        unsafe { real(stream) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn telldir(stream: *mut DIR) -> c_long {
    // SAFETY: the caller's stream.
    if let Some(directory) = unsafe { ours(stream) } {
        return directory.position;
    }
    let Some(real) = real::telldir.get() else { return fail(libc::ENOSYS) };
    // SAFETY: the caller's argument.
    unsafe { real(stream) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn seekdir(stream: *mut DIR, position: c_long) {
    // SAFETY: the caller's stream.
    if let Some(directory) = unsafe { ours(stream) } {
        if position < directory.position {
            directory.rewind();
        }
        while directory.position < position && !directory.next().is_null() {}
        return;
    }
    if let Some(real) = real::seekdir.get() {
        // SAFETY: the caller's arguments.
        unsafe { real(stream, position) }
    }
}

type Select = Option<unsafe extern "C-unwind" fn(*const dirent64) -> c_int>;
type Compare = Option<unsafe extern "C-unwind" fn(*mut *const dirent64, *mut *const dirent64) -> c_int>;

/// All names that `select` takes, each in memory of its own, which the caller frees as it frees the list.
///
/// # Safety
/// As `scandir`.
unsafe fn scan(path: *const c_char, list: *mut *mut *mut dirent64, select: Select, compare: Compare) -> c_int {
    // SAFETY: the caller's arguments, and memory that is asked for here.
    unsafe {
        let stream = opendir(path);
        let Some(directory) = ours(stream) else { return -1 };
        let mut names: Vec<*mut dirent64> = Vec::new();
        let before = errno();
        set_errno(0);
        loop {
            let entry = directory.next();
            if entry.is_null() {
                break;
            }
            if select.is_none_or(|select| select(entry) != 0) {
                let copy = libc::malloc(size_of::<dirent64>()).cast::<dirent64>();
                if copy.is_null() {
                    set_errno(libc::ENOMEM);
                    break;
                }
                copy.write(*entry);
                names.push(copy);
            }
            set_errno(0);
        }
        let error = errno();
        closedir(stream);
        set_errno(error);
        let result = libc::calloc(names.len().max(1), size_of::<*mut dirent64>()).cast::<*mut dirent64>();
        if error != 0 || result.is_null() {
            names.into_iter().for_each(|name| libc::free(name.cast()));
            libc::free(result.cast());
            return -1;
        }
        set_errno(before);
        names.iter().enumerate().for_each(|(at, name)| result.add(at).write(*name));
        if let Some(compare) = compare {
            type Plain = unsafe extern "C" fn(*const c_void, *const c_void) -> c_int;
            type Given = unsafe extern "C-unwind" fn(*mut *const dirent64, *mut *const dirent64) -> c_int;
            // The same function to the machine: two pointers to places in the list.
            let compare = std::mem::transmute::<Given, Plain>(compare);
            libc::qsort(result.cast(), names.len(), size_of::<*mut dirent64>(), Some(compare));
        }
        *list = result;
        names.len() as c_int
    }
}

macro_rules! scandirs {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name(
            path: *const c_char, list: *mut *mut *mut dirent64, select: Select, compare: Compare,
        ) -> c_int {
            // SAFETY: the caller's path.
            if unsafe { super::temporary::is_inside(path) } {
                // SAFETY: the caller's arguments.
                return unsafe { scan(path, list, select, compare) };
            }
            let Some(real) = real::$name.get() else { return missing() };
            // SAFETY: the caller's arguments.
            unsafe { real(path, list, select, compare) }
        }
    )* };
}

scandirs! { scandir scandir64 }
