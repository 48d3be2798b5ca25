/*
 * The C library's functions that programs could not link by name before glibc 2.33, for libimpresario_assist.so alone:
 * hidden, so that the program keeps its own.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HIDDEN __attribute__((visibility("hidden")))

_Static_assert(sizeof(struct stat) == sizeof(struct stat64), "one structure, the kernel's");

HIDDEN int stat64(const char *path, struct stat64 *found)
{
	return (int)syscall(SYS_newfstatat, AT_FDCWD, path, found, 0);
}

HIDDEN int lstat64(const char *path, struct stat64 *found)
{
	return (int)syscall(SYS_newfstatat, AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW);
}

HIDDEN int fstat64(int fd, struct stat64 *found)
{
	return (int)syscall(SYS_fstat, fd, found);
}

HIDDEN int fstatat64(int dir, const char *path, struct stat64 *found, int flags)
{
	return (int)syscall(SYS_newfstatat, dir, path, found, flags);
}
