//! The functions of libcephfs that are used, loaded at run time. The signatures are those of the public headers
//! `cephfs/libcephfs.h` and `cephfs/ceph_ll_client.h`.
//!
//! Two that suggest themselves are left out. `ceph_ll_get_stripe_osd` of Ceph 16 looks for a pool that it was not given, and
//! ends the process; `ceph_get_file_extent_osds` tells the same. `ceph_ll_nonblocking_readv_writev` of later releases never
//! calls back at a file's end, and gains nothing here: the contract's calls block, and one call of many objects asks all
//! their OSDs at once.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use impresario_base::loader::Library;
use libc::{dirent, gid_t, mode_t, size_t, statvfs, timespec, uid_t};

use crate::loader::functions;

/// A mount of a file system in this process (`struct ceph_mount_info`).
#[repr(C)]
pub(super) struct Fs {
    _opaque: [u8; 0],
}

/// A node that was found.
#[repr(C)]
pub(super) struct Inode {
    _opaque: [u8; 0],
}

/// An open file.
#[repr(C)]
pub(super) struct Fh {
    _opaque: [u8; 0],
}

/// An open directory (`struct ceph_dir_result`).
#[repr(C)]
pub(super) struct Dir {
    _opaque: [u8; 0],
}

/// A user and its groups.
#[repr(C)]
pub(super) struct UserPerm {
    _opaque: [u8; 0],
}

/// `inodeno_t`, passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Ino {
    pub(super) val: u64,
}

/// `struct ceph_statx`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Statx {
    pub(super) mask: u32,
    pub(super) block_bytes: u32,
    pub(super) links: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mode: u16,
    pub(super) ino: u64,
    pub(super) size: u64,
    pub(super) blocks: u64,
    pub(super) dev: u64,
    pub(super) rdev: u64,
    pub(super) atime: timespec,
    pub(super) ctime: timespec,
    pub(super) mtime: timespec,
    pub(super) btime: timespec,
    pub(super) version: u64,
}

/// `struct ceph_file_layout`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct FileLayout {
    pub(super) stripe_unit: u32,
    pub(super) stripe_count: u32,
    pub(super) object_size: u32,
    pub(super) cas_hash: u32,
    pub(super) object_stripe_unit: u32,
    pub(super) pg_preferred: u32,
    pub(super) pg_pool: u32,
}

/// `CEPH_STATX_BASIC_STATS` and `CEPH_STATX_BTIME`.
pub(super) const STATX_WANT: c_uint = 0xfff;
/// `AT_STATX_DONT_SYNC`: what is known here suffices.
pub(super) const DONT_SYNC: c_uint = 0x4000;

/// `CEPH_SETATTR_*`.
pub(super) const SET_MODE: c_int = 1;
pub(super) const SET_UID: c_int = 1 << 1;
pub(super) const SET_GID: c_int = 1 << 2;
pub(super) const SET_MTIME: c_int = 1 << 3;
pub(super) const SET_ATIME: c_int = 1 << 4;
pub(super) const SET_SIZE: c_int = 1 << 5;
pub(super) const SET_MTIME_NOW: c_int = 1 << 7;
pub(super) const SET_ATIME_NOW: c_int = 1 << 8;
/// `CEPH_SETATTR_KILL_SGUID`, which older libraries do not know and leave out.
pub(super) const KILL_SET_ID: c_int = 1 << 10;

/// `CEPH_RECLAIM_RESET`: an earlier session of the same name is ended.
pub(super) const RECLAIM_RESET: c_uint = 1;

/// Name of the library.
pub(super) const LIBRARY: &CStr = c"libcephfs.so.2";

functions! {
    create, c"ceph_create": fn(*mut *mut Fs, *const c_char) -> c_int;
    conf_read_file, c"ceph_conf_read_file": fn(*mut Fs, *const c_char) -> c_int;
    conf_set, c"ceph_conf_set": fn(*mut Fs, *const c_char, *const c_char) -> c_int;
    conf_get, c"ceph_conf_get": fn(*mut Fs, *const c_char, *mut c_char, size_t) -> c_int;
    init, c"ceph_init": fn(*mut Fs) -> c_int;
    start_reclaim, c"ceph_start_reclaim": fn(*mut Fs, *const c_char, c_uint) -> c_int;
    finish_reclaim, c"ceph_finish_reclaim": fn(*mut Fs);
    set_uuid, c"ceph_set_uuid": fn(*mut Fs, *const c_char);
    select_filesystem, c"ceph_select_filesystem": fn(*mut Fs, *const c_char) -> c_int;
    mount, c"ceph_mount": fn(*mut Fs, *const c_char) -> c_int;
    unmount, c"ceph_unmount": fn(*mut Fs) -> c_int;
    abort_conn, c"ceph_abort_conn": fn(*mut Fs) -> c_int;
    release, c"ceph_release": fn(*mut Fs) -> c_int;
    get_fs_cid, c"ceph_get_fs_cid": fn(*mut Fs) -> i64;
    userperm_new, c"ceph_userperm_new": fn(uid_t, gid_t, c_int, *mut gid_t) -> *mut UserPerm;
    userperm_destroy, c"ceph_userperm_destroy": fn(*mut UserPerm);
    ll_lookup_root, c"ceph_ll_lookup_root": fn(*mut Fs, *mut *mut Inode) -> c_int;
    ll_lookup_inode, c"ceph_ll_lookup_inode": fn(*mut Fs, Ino, *mut *mut Inode) -> c_int;
    ll_lookup, c"ceph_ll_lookup":
        fn(*mut Fs, *mut Inode, *const c_char, *mut *mut Inode, *mut Statx, c_uint, c_uint, *const UserPerm) -> c_int;
    ll_put, c"ceph_ll_put": fn(*mut Fs, *mut Inode) -> c_int;
    ll_getattr, c"ceph_ll_getattr": fn(*mut Fs, *mut Inode, *mut Statx, c_uint, c_uint, *const UserPerm) -> c_int;
    ll_setattr, c"ceph_ll_setattr": fn(*mut Fs, *mut Inode, *mut Statx, c_int, *const UserPerm) -> c_int;
    ll_setxattr, c"ceph_ll_setxattr":
        fn(*mut Fs, *mut Inode, *const c_char, *const c_void, size_t, c_int, *const UserPerm) -> c_int;
    ll_create, c"ceph_ll_create":
        fn(*mut Fs, *mut Inode, *const c_char, mode_t, c_int, *mut *mut Inode, *mut *mut Fh, *mut Statx, c_uint, c_uint,
            *const UserPerm) -> c_int;
    ll_mknod, c"ceph_ll_mknod":
        fn(*mut Fs, *mut Inode, *const c_char, mode_t, u64, *mut *mut Inode, *mut Statx, c_uint, c_uint,
            *const UserPerm) -> c_int;
    ll_mkdir, c"ceph_ll_mkdir":
        fn(*mut Fs, *mut Inode, *const c_char, mode_t, *mut *mut Inode, *mut Statx, c_uint, c_uint, *const UserPerm)
            -> c_int;
    ll_symlink, c"ceph_ll_symlink":
        fn(*mut Fs, *mut Inode, *const c_char, *const c_char, *mut *mut Inode, *mut Statx, c_uint, c_uint,
            *const UserPerm) -> c_int;
    ll_link, c"ceph_ll_link": fn(*mut Fs, *mut Inode, *mut Inode, *const c_char, *const UserPerm) -> c_int;
    ll_unlink, c"ceph_ll_unlink": fn(*mut Fs, *mut Inode, *const c_char, *const UserPerm) -> c_int;
    ll_rmdir, c"ceph_ll_rmdir": fn(*mut Fs, *mut Inode, *const c_char, *const UserPerm) -> c_int;
    ll_rename, c"ceph_ll_rename":
        fn(*mut Fs, *mut Inode, *const c_char, *mut Inode, *const c_char, *const UserPerm) -> c_int;
    ll_readlink, c"ceph_ll_readlink": fn(*mut Fs, *mut Inode, *mut c_char, size_t, *const UserPerm) -> c_int;
    ll_statfs, c"ceph_ll_statfs": fn(*mut Fs, *mut Inode, *mut statvfs) -> c_int;
    ll_open, c"ceph_ll_open": fn(*mut Fs, *mut Inode, c_int, *mut *mut Fh, *const UserPerm) -> c_int;
    ll_close, c"ceph_ll_close": fn(*mut Fs, *mut Fh) -> c_int;
    ll_read, c"ceph_ll_read": fn(*mut Fs, *mut Fh, i64, u64, *mut c_char) -> c_int;
    ll_write, c"ceph_ll_write": fn(*mut Fs, *mut Fh, i64, u64, *const c_char) -> c_int;
    ll_fsync, c"ceph_ll_fsync": fn(*mut Fs, *mut Fh, c_int) -> c_int;
    ll_sync_inode, c"ceph_ll_sync_inode": fn(*mut Fs, *mut Inode, c_int) -> c_int;
    ll_opendir, c"ceph_ll_opendir": fn(*mut Fs, *mut Inode, *mut *mut Dir, *const UserPerm) -> c_int;
    ll_releasedir, c"ceph_ll_releasedir": fn(*mut Fs, *mut Dir) -> c_int;
    readdirplus_r, c"ceph_readdirplus_r":
        fn(*mut Fs, *mut Dir, *mut dirent, *mut Statx, c_uint, c_uint, *mut *mut Inode) -> c_int;
    seekdir, c"ceph_seekdir": fn(*mut Fs, *mut Dir, i64);
    rewinddir, c"ceph_rewinddir": fn(*mut Fs, *mut Dir);
    ll_file_layout, c"ceph_ll_file_layout": fn(*mut Fs, *mut Inode, *mut FileLayout) -> u32;
    open, c"ceph_open": fn(*mut Fs, *const c_char, c_int, mode_t) -> c_int;
    close, c"ceph_close": fn(*mut Fs, c_int) -> c_int;
    fstatx, c"ceph_fstatx": fn(*mut Fs, c_int, *mut Statx, c_uint, c_uint) -> c_int;
    get_file_extent_osds, c"ceph_get_file_extent_osds": fn(*mut Fs, c_int, i64, *mut i64, *mut c_int, c_int) -> c_int;
}

impl Api {
    /// Loads the library.
    pub(super) fn load(name: &CStr) -> Result<Api, String> {
        Api::look_up(&Library::load(name)?)
    }
}
