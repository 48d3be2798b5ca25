//! The functions of libgfapi that are used, loaded at run time: a machine that serves no GlusterFS volume needs no
//! library of it. The signatures are those of the public headers `glusterfs/api/glfs.h` and `glfs-handles.h`.
//!
//! Functions whose arguments changed between releases are asked for by the version that has these: the library refuses
//! to load where it is too old, instead of being called with the wrong arguments. The only structures that pass are the C
//! library's own (`stat`, `statvfs`, `dirent`).

use std::ffi::{CStr, c_char, c_int, c_uchar, c_void};

use impresario_base::loader::Library;
use libc::{dev_t, dirent, gid_t, mode_t, off_t, size_t, ssize_t, stat, statvfs, uid_t};

use crate::loader::functions;

/// A volume.
#[repr(C)]
pub(super) struct Fs {
    _opaque: [u8; 0],
}

/// A node that was found.
#[repr(C)]
pub(super) struct Object {
    _opaque: [u8; 0],
}

/// An open file or directory.
#[repr(C)]
pub(super) struct Fd {
    _opaque: [u8; 0],
}

/// `glfs_io_cbk`: the descriptor, what the call gave (`errno` is set where that is -1), attributes before and after
/// (`struct glfs_stat`, not looked at), and the caller's pointer.
pub(super) type Done = unsafe extern "C" fn(*mut Fd, ssize_t, *mut c_void, *mut c_void, *mut c_void);

/// `GFAPI_HANDLE_LENGTH`: a node's permanent name, its GFID.
pub(super) const GFID_BYTES: usize = 16;

/// `GFAPI_SET_ATTR_*`: what `glfs_h_setattrs` changes.
pub(super) const SET_MODE: c_int = 0x1;
pub(super) const SET_UID: c_int = 0x2;
pub(super) const SET_GID: c_int = 0x4;
pub(super) const SET_ATIME: c_int = 0x10;
pub(super) const SET_MTIME: c_int = 0x20;

/// Names of the library.
pub(super) const LIBRARY: &CStr = c"libgfapi.so.0";

functions! {
    new, c"glfs_new", c"GFAPI_3.4.0": fn(*const c_char) -> *mut Fs;
    set_volfile, c"glfs_set_volfile", c"GFAPI_3.4.0": fn(*mut Fs, *const c_char) -> c_int;
    set_volfile_server, c"glfs_set_volfile_server", c"GFAPI_3.4.0":
        fn(*mut Fs, *const c_char, *const c_char, c_int) -> c_int;
    get_volfile, c"glfs_get_volfile", c"GFAPI_3.6.0": fn(*mut Fs, *mut c_void, size_t) -> ssize_t;
    set_xlator_option, c"glfs_set_xlator_option", c"GFAPI_3.4.0":
        fn(*mut Fs, *const c_char, *const c_char, *const c_char) -> c_int;
    set_logging, c"glfs_set_logging", c"GFAPI_3.4.0": fn(*mut Fs, *const c_char, c_int) -> c_int;
    init, c"glfs_init", c"GFAPI_3.4.0": fn(*mut Fs) -> c_int;
    fini, c"glfs_fini", c"GFAPI_3.4.0": fn(*mut Fs) -> c_int;
    setfsuid, c"glfs_setfsuid", c"GFAPI_3.4.2": fn(uid_t) -> c_int;
    setfsgid, c"glfs_setfsgid", c"GFAPI_3.4.2": fn(gid_t) -> c_int;
    setfsgroups, c"glfs_setfsgroups", c"GFAPI_3.4.2": fn(size_t, *const gid_t) -> c_int;
    h_lookupat, c"glfs_h_lookupat", c"GFAPI_3.7.4":
        fn(*mut Fs, *mut Object, *const c_char, *mut stat, c_int) -> *mut Object;
    h_create_from_handle, c"glfs_h_create_from_handle", c"GFAPI_3.4.2":
        fn(*mut Fs, *mut c_uchar, c_int, *mut stat) -> *mut Object;
    h_extract_handle, c"glfs_h_extract_handle", c"GFAPI_3.4.2": fn(*mut Object, *mut c_uchar, c_int) -> ssize_t;
    h_close, c"glfs_h_close", c"GFAPI_3.4.2": fn(*mut Object) -> c_int;
    h_creat, c"glfs_h_creat", c"GFAPI_3.4.2":
        fn(*mut Fs, *mut Object, *const c_char, c_int, mode_t, *mut stat) -> *mut Object;
    h_mkdir, c"glfs_h_mkdir", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, *const c_char, mode_t, *mut stat) -> *mut Object;
    h_mknod, c"glfs_h_mknod", c"GFAPI_3.4.2":
        fn(*mut Fs, *mut Object, *const c_char, mode_t, dev_t, *mut stat) -> *mut Object;
    h_symlink, c"glfs_h_symlink", c"GFAPI_3.4.2":
        fn(*mut Fs, *mut Object, *const c_char, *const c_char, *mut stat) -> *mut Object;
    h_unlink, c"glfs_h_unlink", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, *const c_char) -> c_int;
    h_link, c"glfs_h_link", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, *mut Object, *const c_char) -> c_int;
    h_rename, c"glfs_h_rename", c"GFAPI_3.4.2":
        fn(*mut Fs, *mut Object, *const c_char, *mut Object, *const c_char) -> c_int;
    h_readlink, c"glfs_h_readlink", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, *mut c_char, size_t) -> c_int;
    h_stat, c"glfs_h_stat", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, *mut stat) -> c_int;
    h_setattrs, c"glfs_h_setattrs", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, *mut stat, c_int) -> c_int;
    h_access, c"glfs_h_access", c"GFAPI_3.6.0": fn(*mut Fs, *mut Object, c_int) -> c_int;
    h_statfs, c"glfs_h_statfs", c"GFAPI_3.7.0": fn(*mut Fs, *mut Object, *mut statvfs) -> c_int;
    h_getxattrs, c"glfs_h_getxattrs", c"GFAPI_3.5.1":
        fn(*mut Fs, *mut Object, *const c_char, *mut c_void, size_t) -> c_int;
    h_setxattrs, c"glfs_h_setxattrs", c"GFAPI_3.5.0":
        fn(*mut Fs, *mut Object, *const c_char, *const c_void, size_t, c_int) -> c_int;
    lgetxattr, c"glfs_lgetxattr", c"GFAPI_3.4.0":
        fn(*mut Fs, *const c_char, *const c_char, *mut c_void, size_t) -> ssize_t;
    h_open, c"glfs_h_open", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object, c_int) -> *mut Fd;
    h_opendir, c"glfs_h_opendir", c"GFAPI_3.4.2": fn(*mut Fs, *mut Object) -> *mut Fd;
    close, c"glfs_close", c"GFAPI_3.4.0": fn(*mut Fd) -> c_int;
    closedir, c"glfs_closedir", c"GFAPI_3.4.0": fn(*mut Fd) -> c_int;
    fstat, c"glfs_fstat", c"GFAPI_3.4.0": fn(*mut Fd, *mut stat) -> c_int;
    pread, c"glfs_pread", c"GFAPI_6.0": fn(*mut Fd, *mut c_void, size_t, off_t, c_int, *mut c_void) -> ssize_t;
    pwrite, c"glfs_pwrite", c"GFAPI_6.0":
        fn(*mut Fd, *const c_void, size_t, off_t, c_int, *mut c_void, *mut c_void) -> ssize_t;
    pread_async, c"glfs_pread_async", c"GFAPI_6.0":
        fn(*mut Fd, *mut c_void, size_t, off_t, c_int, Done, *mut c_void) -> c_int;
    pwrite_async, c"glfs_pwrite_async", c"GFAPI_6.0":
        fn(*mut Fd, *const c_void, c_int, off_t, c_int, Done, *mut c_void) -> c_int;
    ftruncate, c"glfs_ftruncate", c"GFAPI_6.0": fn(*mut Fd, off_t, *mut c_void, *mut c_void) -> c_int;
    fallocate, c"glfs_fallocate", c"GFAPI_3.5.0": fn(*mut Fd, c_int, off_t, size_t) -> c_int;
    discard, c"glfs_discard", c"GFAPI_3.5.0": fn(*mut Fd, off_t, size_t) -> c_int;
    lseek, c"glfs_lseek", c"GFAPI_3.4.0": fn(*mut Fd, off_t, c_int) -> off_t;
    fsync, c"glfs_fsync", c"GFAPI_6.0": fn(*mut Fd, *mut c_void, *mut c_void) -> c_int;
    readdirplus_r, c"glfs_readdirplus_r", c"GFAPI_3.4.0":
        fn(*mut Fd, *mut stat, *mut dirent, *mut *mut dirent) -> c_int;
    seekdir, c"glfs_seekdir", c"GFAPI_3.4.0": fn(*mut Fd, libc::c_long);
}

impl Api {
    /// Loads the library.
    pub(super) fn load(name: &CStr) -> Result<Api, String> {
        Api::look_up(&Library::load(name)?)
    }
}
