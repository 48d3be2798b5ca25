/* The functions of libgfapi as crates/backend/src/gluster/api.rs declares them: compiles only against headers in which they
 * have these arguments. */
#include <dirent.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <glusterfs/api/glfs.h>
#include <glusterfs/api/glfs-handles.h>

_Static_assert(sizeof(struct stat) == STAT_BYTES, "struct stat");
_Static_assert(sizeof(struct statvfs) == STATVFS_BYTES, "struct statvfs");
_Static_assert(sizeof(struct dirent) == DIRENT_BYTES, "struct dirent");
_Static_assert(sizeof(off_t) == 8 && sizeof(mode_t) == 4 && sizeof(dev_t) == 8, "numbers");
_Static_assert(GFAPI_HANDLE_LENGTH == 16, "handles");
_Static_assert(GFAPI_SET_ATTR_MODE == 1 && GFAPI_SET_ATTR_UID == 2 && GFAPI_SET_ATTR_GID == 4, "attributes");
_Static_assert(GFAPI_SET_ATTR_ATIME == 0x10 && GFAPI_SET_ATTR_MTIME == 0x20, "attributes");

typedef glfs_object_t obj;
typedef struct stat st;
typedef struct glfs_stat gst;

glfs_t *(*new_)(const char *) = glfs_new;
int (*set_volfile)(glfs_t *, const char *) = glfs_set_volfile;
int (*set_volfile_server)(glfs_t *, const char *, const char *, int) = glfs_set_volfile_server;
ssize_t (*get_volfile)(glfs_t *, void *, size_t) = glfs_get_volfile;
int (*set_xlator_option)(glfs_t *, const char *, const char *, const char *) = glfs_set_xlator_option;
int (*set_logging)(glfs_t *, const char *, int) = glfs_set_logging;
int (*init)(glfs_t *) = glfs_init;
int (*fini)(glfs_t *) = glfs_fini;
int (*setfsuid_)(uid_t) = glfs_setfsuid;
int (*setfsgid_)(gid_t) = glfs_setfsgid;
int (*setfsgroups)(size_t, const gid_t *) = glfs_setfsgroups;
obj *(*h_lookupat)(glfs_t *, obj *, const char *, st *, int) = glfs_h_lookupat;
obj *(*h_create_from_handle)(glfs_t *, unsigned char *, int, st *) = glfs_h_create_from_handle;
ssize_t (*h_extract_handle)(obj *, unsigned char *, int) = glfs_h_extract_handle;
int (*h_close)(obj *) = glfs_h_close;
obj *(*h_creat)(glfs_t *, obj *, const char *, int, mode_t, st *) = glfs_h_creat;
obj *(*h_mkdir)(glfs_t *, obj *, const char *, mode_t, st *) = glfs_h_mkdir;
obj *(*h_mknod)(glfs_t *, obj *, const char *, mode_t, dev_t, st *) = glfs_h_mknod;
obj *(*h_symlink)(glfs_t *, obj *, const char *, const char *, st *) = glfs_h_symlink;
int (*h_unlink)(glfs_t *, obj *, const char *) = glfs_h_unlink;
int (*h_link)(glfs_t *, obj *, obj *, const char *) = glfs_h_link;
int (*h_rename)(glfs_t *, obj *, const char *, obj *, const char *) = glfs_h_rename;
int (*h_readlink)(glfs_t *, obj *, char *, size_t) = glfs_h_readlink;
int (*h_stat)(glfs_t *, obj *, st *) = glfs_h_stat;
int (*h_setattrs)(glfs_t *, obj *, st *, int) = glfs_h_setattrs;
int (*h_access)(glfs_t *, obj *, int) = glfs_h_access;
int (*h_statfs)(glfs_t *, obj *, struct statvfs *) = glfs_h_statfs;
int (*h_getxattrs)(glfs_t *, obj *, const char *, void *, size_t) = glfs_h_getxattrs;
int (*h_setxattrs)(glfs_t *, obj *, const char *, const void *, size_t, int) = glfs_h_setxattrs;
ssize_t (*lgetxattr_)(glfs_t *, const char *, const char *, void *, size_t) = glfs_lgetxattr;
glfs_fd_t *(*h_open)(glfs_t *, obj *, int) = glfs_h_open;
glfs_fd_t *(*h_opendir)(glfs_t *, obj *) = glfs_h_opendir;
int (*close_)(glfs_fd_t *) = glfs_close;
int (*closedir_)(glfs_fd_t *) = glfs_closedir;
int (*fstat_)(glfs_fd_t *, st *) = glfs_fstat;
ssize_t (*pread_)(glfs_fd_t *, void *, size_t, off_t, int, gst *) = glfs_pread;
ssize_t (*pwrite_)(glfs_fd_t *, const void *, size_t, off_t, int, gst *, gst *) = glfs_pwrite;
void done(glfs_fd_t *, ssize_t, gst *, gst *, void *);
glfs_io_cbk callback = done;
int (*pread_async)(glfs_fd_t *, void *, size_t, off_t, int, glfs_io_cbk, void *) = glfs_pread_async;
int (*pwrite_async)(glfs_fd_t *, const void *, int, off_t, int, glfs_io_cbk, void *) = glfs_pwrite_async;
int (*ftruncate_)(glfs_fd_t *, off_t, gst *, gst *) = glfs_ftruncate;
int (*fallocate_)(glfs_fd_t *, int, off_t, size_t) = glfs_fallocate;
int (*discard_)(glfs_fd_t *, off_t, size_t) = glfs_discard;
off_t (*lseek_)(glfs_fd_t *, off_t, int) = glfs_lseek;
int (*fsync_)(glfs_fd_t *, gst *, gst *) = glfs_fsync;
int (*readdirplus_r)(glfs_fd_t *, st *, struct dirent *, struct dirent **) = glfs_readdirplus_r;
void (*seekdir_)(glfs_fd_t *, long) = glfs_seekdir;
