//! The real functions: the next ones after ours in the order in which the loader searches.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Release};

use libc::{
    DIR, FILE, aiocb, dirent64, fd_set, gid_t, iovec, mode_t, off_t, pollfd, sigevent, size_t, ssize_t, timespec,
    timeval,
};
use libc::{uid_t, utimbuf};

/// Looked for, and not there. No function has this address.
const NOWHERE: *mut c_void = std::ptr::dangling_mut();

/// A real function, looked for when the library is loaded, or at its first use if that comes before.
pub struct Real<F> {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
    kind: std::marker::PhantomData<F>,
}

// SAFETY: holds a name and an atomic pointer; `F` is a function's type and not held.
unsafe impl<F> Sync for Real<F> {}

impl<F: Copy> Real<F> {
    const fn new(name: &'static CStr) -> Real<F> {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        Real { name, found: AtomicPtr::new(std::ptr::null_mut()), kind: std::marker::PhantomData }
    }

    /// The function; `None` when no library after ours has it.
    #[inline]
    pub fn get(&self) -> Option<F> {
        let mut found = self.found.load(Acquire);
        if found.is_null() {
            found = self.find();
        }
        // SAFETY: `F` is the type of a function of this name, as wide as a pointer.
        (found != NOWHERE).then(|| unsafe { std::mem::transmute_copy(&found) })
    }

    /// The function, if it was found already. For hooks that a memory allocator may call while it begins, before our
    /// constructor: the loader allocates memory for its search before glibc 2.34. They make the system call themselves
    /// until then.
    #[inline]
    pub fn found(&self) -> Option<F> {
        let found = self.found.load(Acquire);
        // SAFETY: as in `get`.
        (!found.is_null() && found != NOWHERE).then(|| unsafe { std::mem::transmute_copy(&found) })
    }

    #[cold]
    #[inline(never)]
    fn find(&self) -> *mut c_void {
        impresario_interpose::quietly(|| {
            // SAFETY: the name ends with a zero.
            let mut found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
            if found.is_null() {
                // The loader remembers the failure for the program's next dlerror: ask for it, so that it is gone.
                // SAFETY: no argument, and the result is not used.
                unsafe { libc::dlerror() };
                found = NOWHERE;
            }
            self.found.store(found, Release);
            found.expose_provenance()
        }) as *mut c_void
    }
}

/// errno for a call whose real function is nowhere; -1.
#[cold]
pub fn missing() -> c_int {
    // SAFETY: this thread's errno.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

macro_rules! real {
    ($($name:ident($($arg:ty),*) -> $result:ty;)*) => {
        $(
            #[allow(non_upper_case_globals)]
            pub static $name: Real<unsafe extern "C-unwind" fn($($arg),*) -> $result> = {
                const NAME: &CStr = match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!(),
                };
                Real::new(NAME)
            };
        )*

        /// Looks for all of them: later, in a signal handler, the loader may not be asked.
        pub fn find_all() {
            $( let _ = $name.get(); )*
        }
    };
}

type Path = *const c_char;
type Buffer = *mut c_void;
type Bytes = *const c_void;
type Stream = *mut FILE;
type Stat = *mut libc::stat;
type Text = *mut c_char;
type Names = *mut *mut *mut dirent64;
type Select = Option<unsafe extern "C-unwind" fn(*const dirent64) -> c_int>;
type Compare = Option<unsafe extern "C-unwind" fn(*mut *const dirent64, *mut *const dirent64) -> c_int>;
pub type Failed = Option<unsafe extern "C-unwind" fn(*const c_char, c_int) -> c_int>;

real! {
    open(Path, c_int, mode_t) -> c_int;
    open64(Path, c_int, mode_t) -> c_int;
    openat(c_int, Path, c_int, mode_t) -> c_int;
    openat64(c_int, Path, c_int, mode_t) -> c_int;
    __open_2(Path, c_int) -> c_int;
    __open64_2(Path, c_int) -> c_int;
    __openat_2(c_int, Path, c_int) -> c_int;
    __openat64_2(c_int, Path, c_int) -> c_int;
    __open(Path, c_int, mode_t) -> c_int;
    __open64(Path, c_int, mode_t) -> c_int;
    creat(Path, mode_t) -> c_int;
    creat64(Path, mode_t) -> c_int;

    close(c_int) -> c_int;
    __close(c_int) -> c_int;
    close_range(c_uint, c_uint, c_int) -> c_int;
    closefrom(c_int) -> ();
    dup(c_int) -> c_int;
    dup2(c_int, c_int) -> c_int;
    __dup2(c_int, c_int) -> c_int;
    dup3(c_int, c_int, c_int) -> c_int;
    fcntl(c_int, c_int, c_ulong) -> c_int;
    __fcntl(c_int, c_int, c_ulong) -> c_int;
    fcntl64(c_int, c_int, c_ulong) -> c_int;
    flock(c_int, c_int) -> c_int;
    lockf(c_int, c_int, off_t) -> c_int;
    lockf64(c_int, c_int, off_t) -> c_int;
    inotify_add_watch(c_int, Path, c_uint) -> c_int;
    prctl(c_int, c_ulong, c_ulong, c_ulong, c_ulong) -> c_int;
    unshare(c_int) -> c_int;

    __read(c_int, Buffer, size_t) -> ssize_t;
    read(c_int, Buffer, size_t) -> ssize_t;
    __read_chk(c_int, Buffer, size_t, size_t) -> ssize_t;
    pread(c_int, Buffer, size_t, off_t) -> ssize_t;
    __pread64(c_int, Buffer, size_t, off_t) -> ssize_t;
    pread64(c_int, Buffer, size_t, off_t) -> ssize_t;
    __pread_chk(c_int, Buffer, size_t, off_t, size_t) -> ssize_t;
    __pread64_chk(c_int, Buffer, size_t, off_t, size_t) -> ssize_t;
    readv(c_int, *const iovec, c_int) -> ssize_t;
    preadv(c_int, *const iovec, c_int, off_t) -> ssize_t;
    preadv64(c_int, *const iovec, c_int, off_t) -> ssize_t;
    preadv2(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;
    preadv64v2(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;

    __write(c_int, Bytes, size_t) -> ssize_t;
    write(c_int, Bytes, size_t) -> ssize_t;
    pwrite(c_int, Bytes, size_t, off_t) -> ssize_t;
    __pwrite64(c_int, Bytes, size_t, off_t) -> ssize_t;
    pwrite64(c_int, Bytes, size_t, off_t) -> ssize_t;
    writev(c_int, *const iovec, c_int) -> ssize_t;
    pwritev(c_int, *const iovec, c_int, off_t) -> ssize_t;
    pwritev64(c_int, *const iovec, c_int, off_t) -> ssize_t;
    pwritev2(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;
    pwritev64v2(c_int, *const iovec, c_int, off_t, c_int) -> ssize_t;

    lseek(c_int, off_t, c_int) -> off_t;
    __lseek(c_int, off_t, c_int) -> off_t;
    lseek64(c_int, off_t, c_int) -> off_t;

    sendfile(c_int, c_int, *mut off_t, size_t) -> ssize_t;
    sendfile64(c_int, c_int, *mut off_t, size_t) -> ssize_t;
    copy_file_range(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t;
    splice(c_int, *mut off_t, c_int, *mut off_t, size_t, c_uint) -> ssize_t;

    aio_read(*mut aiocb) -> c_int;
    aio_read64(*mut aiocb) -> c_int;
    aio_write(*mut aiocb) -> c_int;
    aio_write64(*mut aiocb) -> c_int;
    lio_listio(c_int, *const *mut aiocb, c_int, *mut sigevent) -> c_int;
    lio_listio64(c_int, *const *mut aiocb, c_int, *mut sigevent) -> c_int;
    io_uring_submit(Buffer) -> c_int;
    io_uring_submit_and_wait(Buffer, c_uint) -> c_int;
    io_uring_submit_and_get_events(Buffer) -> c_int;
    io_uring_submit_and_wait_timeout(Buffer, Buffer, c_uint, Buffer, Buffer) -> c_int;
    syscall(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;
    io_submit(*mut c_void, c_long, *mut *mut c_void) -> c_int;

    fopen(Path, Path) -> Stream;
    fopen64(Path, Path) -> Stream;
    freopen(Path, Path, Stream) -> Stream;
    freopen64(Path, Path, Stream) -> Stream;
    fdopen(c_int, Path) -> Stream;
    fclose(Stream) -> c_int;
    fflush(Stream) -> c_int;
    fread(Buffer, size_t, size_t, Stream) -> size_t;
    fread_unlocked(Buffer, size_t, size_t, Stream) -> size_t;
    __fread_chk(Buffer, size_t, size_t, size_t, Stream) -> size_t;
    __fread_unlocked_chk(Buffer, size_t, size_t, size_t, Stream) -> size_t;
    fgets(*mut c_char, c_int, Stream) -> *mut c_char;
    fgets_unlocked(*mut c_char, c_int, Stream) -> *mut c_char;
    __fgets_chk(*mut c_char, size_t, c_int, Stream) -> *mut c_char;
    __fgets_unlocked_chk(*mut c_char, size_t, c_int, Stream) -> *mut c_char;
    getline(*mut *mut c_char, *mut size_t, Stream) -> ssize_t;
    getdelim(*mut *mut c_char, *mut size_t, c_int, Stream) -> ssize_t;
    __getdelim(*mut *mut c_char, *mut size_t, c_int, Stream) -> ssize_t;
    fgetc(Stream) -> c_int;
    getc(Stream) -> c_int;
    _IO_getc(Stream) -> c_int;
    fgetc_unlocked(Stream) -> c_int;
    getc_unlocked(Stream) -> c_int;
    __uflow(Stream) -> c_int;
    fseek(Stream, c_long, c_int) -> c_int;
    fseeko(Stream, off_t, c_int) -> c_int;
    fseeko64(Stream, off_t, c_int) -> c_int;
    rewind(Stream) -> ();
    fsetpos(Stream, Bytes) -> c_int;
    fsetpos64(Stream, Bytes) -> c_int;
    fwrite(Bytes, size_t, size_t, Stream) -> size_t;
    fwrite_unlocked(Bytes, size_t, size_t, Stream) -> size_t;
    putc(c_int, Stream) -> c_int;
    fputc(c_int, Stream) -> c_int;
    ungetc(c_int, Stream) -> c_int;
    fputs(Path, Stream) -> c_int;
    fileno(Stream) -> c_int;
    fileno_unlocked(Stream) -> c_int;

    stat(Path, Stat) -> c_int;
    stat64(Path, Stat) -> c_int;
    lstat(Path, Stat) -> c_int;
    lstat64(Path, Stat) -> c_int;
    fstat(c_int, Stat) -> c_int;
    fstat64(c_int, Stat) -> c_int;
    fstatat(c_int, Path, Stat, c_int) -> c_int;
    fstatat64(c_int, Path, Stat, c_int) -> c_int;
    __xstat(c_int, Path, Stat) -> c_int;
    __xstat64(c_int, Path, Stat) -> c_int;
    __lxstat(c_int, Path, Stat) -> c_int;
    __lxstat64(c_int, Path, Stat) -> c_int;
    __fxstat(c_int, c_int, Stat) -> c_int;
    __fxstat64(c_int, c_int, Stat) -> c_int;
    __fxstatat(c_int, c_int, Path, Stat, c_int) -> c_int;
    __fxstatat64(c_int, c_int, Path, Stat, c_int) -> c_int;
    statx(c_int, Path, c_int, c_uint, *mut libc::statx) -> c_int;
    access(Path, c_int) -> c_int;
    eaccess(Path, c_int) -> c_int;
    euidaccess(Path, c_int) -> c_int;
    faccessat(c_int, Path, c_int, c_int) -> c_int;

    unlink(Path) -> c_int;
    unlinkat(c_int, Path, c_int) -> c_int;
    rmdir(Path) -> c_int;
    remove(Path) -> c_int;
    rename(Path, Path) -> c_int;
    renameat(c_int, Path, c_int, Path) -> c_int;
    renameat2(c_int, Path, c_int, Path, c_uint) -> c_int;
    link(Path, Path) -> c_int;
    linkat(c_int, Path, c_int, Path, c_int) -> c_int;
    symlink(Path, Path) -> c_int;
    symlinkat(Path, c_int, Path) -> c_int;
    readlink(Path, Text, size_t) -> ssize_t;
    __readlink_chk(Path, Text, size_t, size_t) -> ssize_t;
    readlinkat(c_int, Path, Text, size_t) -> ssize_t;
    __readlinkat_chk(c_int, Path, Text, size_t, size_t) -> ssize_t;
    mkdir(Path, mode_t) -> c_int;
    mkdirat(c_int, Path, mode_t) -> c_int;
    mkfifo(Path, mode_t) -> c_int;
    mkfifoat(c_int, Path, mode_t) -> c_int;
    mknod(Path, mode_t, u64) -> c_int;
    mknodat(c_int, Path, mode_t, u64) -> c_int;
    chmod(Path, mode_t) -> c_int;
    lchmod(Path, mode_t) -> c_int;
    fchmod(c_int, mode_t) -> c_int;
    fchmodat(c_int, Path, mode_t, c_int) -> c_int;
    chown(Path, uid_t, gid_t) -> c_int;
    lchown(Path, uid_t, gid_t) -> c_int;
    fchown(c_int, uid_t, gid_t) -> c_int;
    fchownat(c_int, Path, uid_t, gid_t, c_int) -> c_int;
    truncate(Path, i64) -> c_int;
    truncate64(Path, i64) -> c_int;
    ftruncate(c_int, i64) -> c_int;
    ftruncate64(c_int, i64) -> c_int;
    fsync(c_int) -> c_int;
    fdatasync(c_int) -> c_int;
    syncfs(c_int) -> c_int;
    sync_file_range(c_int, off_t, off_t, c_uint) -> c_int;
    utimensat(c_int, Path, *const timespec, c_int) -> c_int;
    futimens(c_int, *const timespec) -> c_int;
    futimes(c_int, *const timeval) -> c_int;
    utimes(Path, *const timeval) -> c_int;
    lutimes(Path, *const timeval) -> c_int;
    futimesat(c_int, Path, *const timeval) -> c_int;
    utime(Path, *const utimbuf) -> c_int;
    getxattr(Path, Path, Buffer, size_t) -> ssize_t;
    lgetxattr(Path, Path, Buffer, size_t) -> ssize_t;
    fgetxattr(c_int, Path, Buffer, size_t) -> ssize_t;
    listxattr(Path, Buffer, size_t) -> ssize_t;
    llistxattr(Path, Buffer, size_t) -> ssize_t;
    flistxattr(c_int, Buffer, size_t) -> ssize_t;
    setxattr(Path, Path, Bytes, size_t, c_int) -> c_int;
    lsetxattr(Path, Path, Bytes, size_t, c_int) -> c_int;
    fsetxattr(c_int, Path, Bytes, size_t, c_int) -> c_int;
    removexattr(Path, Path) -> c_int;
    lremovexattr(Path, Path) -> c_int;
    fremovexattr(c_int, Path) -> c_int;
    mkstemp(Text) -> c_int;
    mkstemp64(Text) -> c_int;
    mkostemp(Text, c_int) -> c_int;
    mkostemp64(Text, c_int) -> c_int;
    mkstemps(Text, c_int) -> c_int;
    mkstemps64(Text, c_int) -> c_int;
    mkostemps(Text, c_int, c_int) -> c_int;
    mkostemps64(Text, c_int, c_int) -> c_int;
    mkdtemp(Text) -> Text;

    chdir(Path) -> c_int;
    fchdir(c_int) -> c_int;
    getcwd(Text, size_t) -> Text;
    __getcwd_chk(Text, size_t, size_t) -> Text;
    get_current_dir_name() -> Text;
    getwd(Text) -> Text;
    realpath(Path, Text) -> Text;
    __realpath_chk(Path, Text, size_t) -> Text;
    canonicalize_file_name(Path) -> Text;

    opendir(Path) -> *mut DIR;
    fdopendir(c_int) -> *mut DIR;
    readdir(*mut DIR) -> Buffer;
    readdir64(*mut DIR) -> Buffer;
    readdir_r(*mut DIR, Buffer, *mut Buffer) -> c_int;
    readdir64_r(*mut DIR, Buffer, *mut Buffer) -> c_int;
    closedir(*mut DIR) -> c_int;
    dirfd(*mut DIR) -> c_int;
    rewinddir(*mut DIR) -> ();
    telldir(*mut DIR) -> c_long;
    seekdir(*mut DIR, c_long) -> ();
    scandir(Path, Names, Select, Compare) -> c_int;
    scandir64(Path, Names, Select, Compare) -> c_int;
    glob(Path, c_int, Failed, Buffer) -> c_int;
    glob64(Path, c_int, Failed, Buffer) -> c_int;

    fallocate(c_int, c_int, off_t, off_t) -> c_int;
    fallocate64(c_int, c_int, off_t, off_t) -> c_int;
    posix_fallocate(c_int, off_t, off_t) -> c_int;
    posix_fallocate64(c_int, off_t, off_t) -> c_int;
    posix_fadvise(c_int, off_t, off_t, c_int) -> c_int;
    posix_fadvise64(c_int, off_t, off_t, c_int) -> c_int;
    readahead(c_int, off_t, size_t) -> ssize_t;
    statfs(Path, Buffer) -> c_int;
    statfs64(Path, Buffer) -> c_int;
    fstatfs(c_int, Buffer) -> c_int;
    fstatfs64(c_int, Buffer) -> c_int;
    statvfs(Path, Buffer) -> c_int;
    statvfs64(Path, Buffer) -> c_int;
    fstatvfs(c_int, Buffer) -> c_int;
    fstatvfs64(c_int, Buffer) -> c_int;
    poll(*mut pollfd, libc::nfds_t, c_int) -> c_int;
    select(c_int, *mut fd_set, *mut fd_set, *mut fd_set, *mut timeval) -> c_int;
}
