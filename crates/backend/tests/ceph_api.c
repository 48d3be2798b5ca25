/* The functions of libcephfs as crates/backend/src/cephfs/api.rs declares them: compiles only against headers in which they
 * have these arguments. */
#include <dirent.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/time.h>
#include <sys/types.h>
#include <cephfs/libcephfs.h>

_Static_assert(sizeof(struct statvfs) == STATVFS_BYTES, "struct statvfs");
_Static_assert(sizeof(struct dirent) == DIRENT_BYTES, "struct dirent");
_Static_assert(sizeof(mode_t) == 4 && sizeof(dev_t) == 8 && sizeof(struct inodeno_t) == 8, "numbers");
_Static_assert(sizeof(struct ceph_statx) == 136 && offsetof(struct ceph_statx, stx_mode) == 20, "attributes");
_Static_assert(offsetof(struct ceph_statx, stx_ino) == 24 && offsetof(struct ceph_statx, stx_dev) == 48, "attributes");
_Static_assert(offsetof(struct ceph_statx, stx_atime) == 64 && offsetof(struct ceph_statx, stx_ctime) == 80, "times");
_Static_assert(offsetof(struct ceph_statx, stx_mtime) == 96 && offsetof(struct ceph_statx, stx_btime) == 112, "times");
_Static_assert(sizeof(struct ceph_file_layout) == 28, "layouts");
_Static_assert((CEPH_STATX_BASIC_STATS | CEPH_STATX_BTIME) == 0xfff && AT_NO_ATTR_SYNC == 0x4000, "flags");
_Static_assert(CEPH_SETATTR_MODE == 1 && CEPH_SETATTR_UID == 2 && CEPH_SETATTR_GID == 4, "attributes");
_Static_assert(CEPH_SETATTR_MTIME == 8 && CEPH_SETATTR_ATIME == 16 && CEPH_SETATTR_SIZE == 32, "attributes");
_Static_assert(CEPH_SETATTR_MTIME_NOW == 128 && CEPH_SETATTR_ATIME_NOW == 256, "attributes");
_Static_assert(CEPH_RECLAIM_RESET == 1, "sessions");

typedef struct ceph_mount_info fs;
typedef struct Inode node;
typedef struct ceph_dir_result dir;
typedef struct ceph_statx stx;
typedef const UserPerm *perm;

int (*create_)(fs **, const char *const) = ceph_create;
int (*conf_read_file)(fs *, const char *) = ceph_conf_read_file;
int (*conf_set)(fs *, const char *, const char *) = ceph_conf_set;
int (*conf_get)(fs *, const char *, char *, size_t) = ceph_conf_get;
int (*init)(fs *) = ceph_init;
int (*start_reclaim)(fs *, const char *, unsigned) = ceph_start_reclaim;
void (*finish_reclaim)(fs *) = ceph_finish_reclaim;
void (*set_uuid)(fs *, const char *) = ceph_set_uuid;
int (*select_filesystem)(fs *, const char *) = ceph_select_filesystem;
int (*mount_)(fs *, const char *) = ceph_mount;
int (*unmount)(fs *) = ceph_unmount;
int (*abort_conn)(fs *) = ceph_abort_conn;
int (*release)(fs *) = ceph_release;
int64_t (*get_fs_cid)(fs *) = ceph_get_fs_cid;
UserPerm *(*userperm_new)(uid_t, gid_t, int, gid_t *) = ceph_userperm_new;
void (*userperm_destroy)(UserPerm *) = ceph_userperm_destroy;
int (*ll_lookup_root)(fs *, node **) = ceph_ll_lookup_root;
int (*ll_lookup_inode)(fs *, struct inodeno_t, node **) = ceph_ll_lookup_inode;
int (*ll_lookup)(fs *, node *, const char *, node **, stx *, unsigned, unsigned, perm) = ceph_ll_lookup;
int (*ll_put)(fs *, node *) = ceph_ll_put;
int (*ll_getattr)(fs *, node *, stx *, unsigned, unsigned, perm) = ceph_ll_getattr;
int (*ll_setattr)(fs *, node *, stx *, int, perm) = ceph_ll_setattr;
int (*ll_setxattr)(fs *, node *, const char *, const void *, size_t, int, perm) = ceph_ll_setxattr;
int (*ll_create)(fs *, node *, const char *, mode_t, int, node **, Fh **, stx *, unsigned, unsigned, perm) = ceph_ll_create;
int (*ll_mknod)(fs *, node *, const char *, mode_t, dev_t, node **, stx *, unsigned, unsigned, perm) = ceph_ll_mknod;
int (*ll_mkdir)(fs *, node *, const char *, mode_t, node **, stx *, unsigned, unsigned, perm) = ceph_ll_mkdir;
int (*ll_symlink)(fs *, node *, const char *, const char *, node **, stx *, unsigned, unsigned, perm) = ceph_ll_symlink;
int (*ll_link)(fs *, node *, node *, const char *, perm) = ceph_ll_link;
int (*ll_unlink)(fs *, node *, const char *, perm) = ceph_ll_unlink;
int (*ll_rmdir)(fs *, node *, const char *, perm) = ceph_ll_rmdir;
int (*ll_rename)(fs *, node *, const char *, node *, const char *, perm) = ceph_ll_rename;
int (*ll_readlink)(fs *, node *, char *, size_t, perm) = ceph_ll_readlink;
int (*ll_statfs)(fs *, node *, struct statvfs *) = ceph_ll_statfs;
int (*ll_open)(fs *, node *, int, Fh **, perm) = ceph_ll_open;
int (*ll_close)(fs *, Fh *) = ceph_ll_close;
int (*ll_read)(fs *, Fh *, int64_t, uint64_t, char *) = ceph_ll_read;
int (*ll_write)(fs *, Fh *, int64_t, uint64_t, const char *) = ceph_ll_write;
int (*ll_fsync)(fs *, Fh *, int) = ceph_ll_fsync;
int (*ll_sync_inode)(fs *, node *, int) = ceph_ll_sync_inode;
int (*ll_opendir)(fs *, node *, dir **, perm) = ceph_ll_opendir;
int (*ll_releasedir)(fs *, dir *) = ceph_ll_releasedir;
int (*readdirplus_r)(fs *, dir *, struct dirent *, stx *, unsigned, unsigned, node **) = ceph_readdirplus_r;
void (*seekdir_)(fs *, dir *, int64_t) = ceph_seekdir;
void (*rewinddir_)(fs *, dir *) = ceph_rewinddir;
uint32_t (*ll_file_layout)(fs *, node *, struct ceph_file_layout *) = ceph_ll_file_layout;
int (*open_)(fs *, const char *, int, mode_t) = ceph_open;
int (*close_)(fs *, int) = ceph_close;
int (*fstatx)(fs *, int, stx *, unsigned, unsigned) = ceph_fstatx;
int (*get_file_extent_osds)(fs *, int, int64_t, int64_t *, int *, int) = ceph_get_file_extent_osds;
