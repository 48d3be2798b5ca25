/*
 * What a program may do with files, in one folder that is its argument: run on a cluster's folder and on a local one, it
 * prints the same. Numbers that differ between file systems (nodes, times) are not printed.
 */
#define _GNU_SOURCE
#include <aio.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define SHOW(call) show(#call, (long)(call))

static long show(const char *what, long result)
{
	if (result < 0)
		printf("%s: %ld %s\n", what, result, strerror(errno));
	else
		printf("%s: %ld\n", what, result);
	fflush(stdout);
	return result;
}

static void content(const char *path)
{
	char bytes[256];
	int fd = open(path, O_RDONLY);
	ssize_t len = read(fd, bytes, sizeof bytes - 1);
	bytes[len < 0 ? 0 : len] = 0;
	printf("%s = \"%s\"\n", path, bytes);
	fflush(stdout);
	close(fd);
}

static void attributes(const char *path)
{
	struct stat st;
	struct statx sx;
	if (lstat(path, &st) < 0) {
		show(path, -1);
		return;
	}
	printf("%s: %o", path, st.st_mode);
	if (!S_ISDIR(st.st_mode))
		printf(" size %lld names %d", (long long)st.st_size, (int)st.st_nlink);
	if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &sx) == 0)
		printf(" statx %d", sx.stx_mode == st.st_mode && sx.stx_size == (unsigned long long)st.st_size);
#ifdef __x86_64__
	/* As libuv does, and with it Node.js. */
	memset(&sx, 0, sizeof sx);
	if (syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS, &sx) == 0)
		printf(" by number %d", sx.stx_mode == st.st_mode && sx.stx_size == (unsigned long long)st.st_size);
#endif
	printf("\n");
}

static int visible(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

static void *with_own_numbers(void *number)
{
	char byte = 1;
	int fd = *(int *)number;
	SHOW(unshare(CLONE_FILES));
	close(fd);
	SHOW(open("/dev/zero", O_RDONLY) == fd && pread(fd, &byte, 1, 0) == 1 && byte == 0);
	return NULL;
}

static void *writer(void *number)
{
	char line[32];
	int fd = open("threads", O_WRONLY | O_APPEND);
	for (int i = 0; i < 20; i++)
		if (write(fd, line, sprintf(line, "%ld:%02d\n", (long)number, i)) < 0)
			perror("write");
	close(fd);
	return NULL;
}

/* Names with a slash behind them, empty ones, exchanged ones; sizes and flags that are refused. */
static void names_and_slashes(void)
{
	char bytes[70000] = { 0 };
	struct statvfs total;
	mkdir("slash", 0755);
	SHOW(chdir("slash"));
	close(open("file", O_CREAT | O_WRONLY, 0644));
	mkdir("folder", 0755);
	symlink("folder", "link");
	SHOW(rename("file", "none/"));
	SHOW(rename("file/", "none"));
	SHOW(rename("link/", "none"));
	SHOW(rmdir("link/"));
	SHOW(unlink("file/"));
	SHOW(unlink("link/"));
	SHOW(symlink("target", "none/"));
	SHOW(link("file", "none/"));
	SHOW(mkfifo("none/", 0600));
	SHOW(mkdir("made/", 0755));
	SHOW(rename("made/", "moved/"));
	SHOW(rmdir("moved/"));
	mkdir("empty", 0755);
	SHOW(rmdir("empty/."));
	SHOW(rmdir("empty/./"));
	SHOW(rmdir("empty/.."));
	SHOW(rmdir("none/."));
	SHOW(rmdir("file/."));
	SHOW(unlink("empty/."));
	SHOW(unlink("empty/.."));
	SHOW(rename("empty/.", "none"));
	SHOW(rename("empty/..", "none"));
	SHOW(rename("file", "empty/."));
	SHOW(renameat2(AT_FDCWD, "file", AT_FDCWD, "empty/.", RENAME_NOREPLACE));
	SHOW(renameat2(AT_FDCWD, "file", AT_FDCWD, "empty/..", RENAME_NOREPLACE));
	SHOW(renameat2(AT_FDCWD, "empty/.", AT_FDCWD, "none", RENAME_NOREPLACE));
	SHOW(renameat2(AT_FDCWD, "empty/.", AT_FDCWD, "empty/.", RENAME_NOREPLACE));
	SHOW(open("none/.", O_CREAT | O_WRONLY, 0600));
	SHOW(open("none/./", O_CREAT | O_WRONLY, 0600));
	SHOW(open("none/.", O_CREAT | O_EXCL | O_WRONLY, 0600));
	SHOW(open("empty/.", O_CREAT | O_WRONLY, 0600));
	SHOW(open("empty/.", O_CREAT | O_EXCL | O_WRONLY, 0600));
	SHOW(open("file/.", O_CREAT | O_WRONLY, 0600));
	SHOW(access("none", F_OK));
	SHOW(mkdir("none/.", 0755));
	SHOW(mkdir("empty/.", 0755));
	SHOW(symlink("target", "none/."));
	SHOW(link("file", "empty/."));
	SHOW(access("file/.", F_OK));
	SHOW(access("link/.", F_OK));
	SHOW(readlink("link/.", (char[9]){}, 8));
	SHOW(rmdir("empty"));
	symlink("nowhere", "dangling");
	SHOW(mkdir("dangling/", 0755));
	SHOW(mkdir("file/", 0755));
	SHOW(mkdir("link/", 0755));
	SHOW(symlink("target", "file/"));
	SHOW(access("nowhere", F_OK));
	SHOW(rename("file", ""));
	SHOW(rename("", "file"));
	SHOW(renameat2(AT_FDCWD, "file", AT_FDCWD, "none", RENAME_EXCHANGE));
	int fd = open("file", O_RDWR);
	write(fd, "f", 1);
	SHOW(renameat2(AT_FDCWD, "file", AT_FDCWD, "folder", RENAME_EXCHANGE));
	SHOW(chdir("file"));
	SHOW(chdir(".."));
	content("folder");
	SHOW(pwrite(fd, "g", 1, 0));
	content("folder");
	close(fd);
	/* Whoever works in a directory goes on there when that has another name. */
	mkdir("one", 0755);
	mkdir("two", 0755);
	SHOW(chdir("one"));
	SHOW(renameat2(AT_FDCWD, "../one", AT_FDCWD, "../two", RENAME_EXCHANGE));
	close(open("inside", O_CREAT | O_WRONLY, 0600));
	SHOW(access("../two/inside", F_OK));
	SHOW(access("../one/inside", F_OK));
	SHOW(renameat2(AT_FDCWD, "../folder", AT_FDCWD, "../two", RENAME_EXCHANGE));
	SHOW(access("inside", F_OK));
	SHOW(access("../folder/inside", F_OK));
	SHOW(renameat2(AT_FDCWD, "../folder", AT_FDCWD, "../two", RENAME_EXCHANGE));
	SHOW(access("inside", F_OK));
	SHOW(chdir(".."));
	SHOW(readlink("link", bytes, 0));
	SHOW(statvfs("none", &total));
	SHOW(statvfs("link", &total));
	SHOW(unlinkat(AT_FDCWD, "folder", 1));
	SHOW(access("folder", 99));
	SHOW(setxattr("folder", "user.long", bytes, 65537, 0));
	SHOW(setxattr("folder", "user.long", bytes, 65536, 0));
	SHOW(setxattr("folder", "user.flags", bytes, 1, 64));
	SHOW(setxattr("folder", "", bytes, 1, 0));
	SHOW(chdir(".."));
}

/* A writable shared map is refused, or what is stored in it reaches the file: 1. */
static int keeps_stores(int fd, int flags)
{
	char byte = 0;
	char *map = mmap(NULL, 10, PROT_READ | PROT_WRITE, flags, fd, 0);
	if (map == MAP_FAILED)
		return errno == ENODEV;
	map[0] = 's';
	msync(map, 10, MS_SYNC);
	pread(fd, &byte, 1, 0);
	munmap(map, 10);
	return byte == 's';
}

/* What kind of map is asked for, and flags that are checked only by the newer kind. */
static void kinds_of_maps(void)
{
	enum { UNKNOWN = 1 << 24 };
	int fd = open("map", O_RDWR | O_CREAT, 0600);
	int read_only = open("map", O_RDONLY);
	write(fd, "0123456789", 10);
	SHOW(keeps_stores(fd, MAP_SHARED));
	SHOW(keeps_stores(fd, MAP_SHARED_VALIDATE));
	pwrite(fd, "0", 1, 0);
	char *map = mmap(NULL, 10, PROT_READ, MAP_SHARED_VALIDATE | MAP_POPULATE, read_only, 0);
	SHOW(map != MAP_FAILED ? memcmp(map, "0123456789", 10) : -1);
	munmap(map, 10);
	map = mmap(NULL, 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | UNKNOWN, read_only, 0);
	SHOW(map != MAP_FAILED ? memcmp(map, "0123456789", 10) : -1);
	munmap(map, 10);
	SHOW(mmap(NULL, 10, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE, read_only, 0));
	SHOW(mmap(NULL, 10, PROT_READ | PROT_WRITE, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0));
	SHOW(mmap(NULL, 10, PROT_READ, MAP_SHARED_VALIDATE | UNKNOWN, read_only, 0));
	SHOW(mmap(NULL, 10, PROT_READ, 0, read_only, 0));
	SHOW(mmap(NULL, 10, PROT_READ, 4, read_only, 0));
	close(read_only);
	close(fd);
	SHOW(unlink("map"));
}

/* Streams that append and read, that are opened anew, and files by the names of descriptors. */
static void streams_anew(void)
{
	char bytes[100] = { 0 };
	struct stat st;
	FILE *stream = fopen("log", "w");
	fputs("one\n", stream);
	fclose(stream);
	stream = fopen("log", "a+");
	SHOW(fgets(bytes, 100, stream) ? strlen(bytes) : -1);
	SHOW(fputs("two\n", stream) >= 0);
	rewind(stream);
	SHOW(fgetc(stream));
	fclose(stream);
	stream = fopen("log", "a");
	SHOW(ftell(stream));
	fclose(stream);
	content("log");
	stream = fopen("log", "w+");
	fputs("three\n", stream);
	stream = freopen(NULL, "r", stream);
	SHOW(stream ? fgetc(stream) : -1);
	if (stream)
		fclose(stream);
	int fd = open("log", O_RDWR);
	read(fd, bytes, 2);
	char *names[] = { "/dev/fd/%d", "/proc/self/fd/%d" };
	for (int i = 0; i < 2; i++) {
		snprintf(bytes, 100, names[i], fd);
		int again = open(bytes, O_RDONLY | O_CREAT, 0600);
		SHOW(again < 0 ? -1 : read(again, bytes + 50, 3));
		close(again);
		stream = fopen(bytes, "r");
		SHOW(stream ? fgetc(stream) : -1);
		if (stream)
			fclose(stream);
		SHOW(stat(bytes, &st) == 0 ? st.st_size : -1);
		SHOW(lstat(bytes, &st) == 0 ? S_ISLNK(st.st_mode) : -1);
		SHOW(open(bytes, O_RDONLY | O_NOFOLLOW));
		/* What is changed by such a name is the file's. */
		struct timespec times[2] = { { 11, 0 }, { 22 + i, 0 } };
		SHOW(chmod(bytes, 0710 + i));
		SHOW(utimensat(AT_FDCWD, bytes, times, 0));
		SHOW(chown(bytes, getuid(), getgid()));
		SHOW(chown(bytes, -1, -1));
		SHOW(getuid() ? 0 : chown(bytes, 1000, 2000));
		SHOW(fstat(fd, &st) == 0 ? st.st_uid - (getuid() ? getuid() : 1000) : -1);
		SHOW(chown(bytes, getuid(), getgid()));
		SHOW(setxattr(bytes, "user.named", "v", 1, 0));
		SHOW(getxattr(bytes, "user.named", NULL, 0));
		SHOW(fstat(fd, &st) == 0 ? st.st_mode : -1);
		SHOW(st.st_mtime);
		SHOW(removexattr(bytes, "user.named"));
		SHOW(fgetxattr(fd, "user.named", NULL, 0));
		SHOW(access(bytes, X_OK));
		SHOW(truncate(bytes, 100 - i));
		SHOW(fstat(fd, &st) == 0 ? st.st_size : -1);
		char name[300] = { 0 };
		SHOW(readlink(bytes, name, 299) > 4 ? strcmp(name + strlen(name) - 4, "/log") : -1);
	}
	SHOW(readlink("/dev/stdin", bytes, 100) > 0 ? strncmp(bytes, "/proc/self/fd/0", 15) : -1);
	close(fd);
	fflush(stdout);
	system("cat /dev/stdin < log; echo more >> log; tail -c 3 /dev/stdin < log; echo out | tee /dev/stderr 2> err > /dev/null; cat err");
}

int main(int argc, char **argv)
{
	char bytes[300] = { 0 };
	int fd, other, status;
	struct stat st;

	if (argc < 2 || chdir(argv[1]) < 0)
		return 2;
	umask(027);

	/* Opening, positions, dup and fork. */
	SHOW(open("missing", O_RDONLY));
	fd = open("a", O_RDWR | O_CREAT | O_EXCL, 0666);
	SHOW(fd);
	SHOW(open("a", O_RDWR | O_CREAT | O_EXCL, 0666));
	SHOW(write(fd, "0123456789", 10));
	other = dup(fd);
	SHOW(other);
	SHOW(lseek(other, 3, SEEK_SET));
	SHOW(read(fd, bytes, 2));
	SHOW(lseek(other, 0, SEEK_CUR));
	if (fork() == 0) {
		read(other, bytes, 1);
		_exit(bytes[0]);
	}
	wait(&status);
	SHOW(WEXITSTATUS(status));
	SHOW(lseek(fd, 0, SEEK_CUR));
	SHOW(dup2(fd, 20));
	SHOW(dup3(fd, 21, O_CLOEXEC));
	SHOW(fcntl(21, F_GETFD));
	SHOW(fcntl(fd, F_DUPFD, 30));
	SHOW(fcntl(30, F_GETFL) & (O_ACCMODE | O_APPEND));
	SHOW(pread(20, bytes, 4, 1));
	SHOW(pread(20, bytes, 4, -3));
	SHOW(pwrite(30, "XY", 2, 12));
	SHOW(lseek(21, -1, SEEK_END));
	SHOW(lseek(21, -100, SEEK_CUR));
	SHOW(close_range(20, 30, 0));
	SHOW(read(20, bytes, 1));
	SHOW(lseek(fd, 0, SEEK_SET));
	struct iovec parts[2] = { { bytes, 3 }, { bytes + 100, 40 } };
	SHOW(readv(fd, parts, 2));
	printf("%.3s|%.7s\n", bytes, bytes + 100);
	struct iovec two[2] = { { "ab", 2 }, { "cde", 3 } };
	SHOW(writev(fd, two, 2));
	SHOW(ftruncate(fd, 5));
	SHOW(fsync(fd));
	SHOW(fstat(fd, &st) == 0 ? st.st_size : -1);
	SHOW(ftruncate(fd, 8));
	SHOW(unlink("a"));
	SHOW(pread(fd, bytes, 10, 0));
	SHOW(fstat(fd, &st) == 0 ? (long)st.st_nlink : -1);
	close(other);
	SHOW(close(fd));
	SHOW(close(fd));
	attributes("a");

	/* Children that handlers of fork do not see, with calls of parent and child in turn. */
	fd = open("a", O_RDWR | O_CREAT, 0666);
	SHOW(write(fd, "abcd", 4));
	lseek(fd, 0, SEEK_SET);
	for (int i = 0; i < 2; i++) {
		pid_t child = i ? vfork() : syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
		if (child == 0) {
			read(fd, bytes, 1);
			_exit(bytes[0]);
		}
		read(fd, bytes + 1, 1);
		waitpid(child, &status, 0);
		SHOW(WEXITSTATUS(status) + bytes[1]);
		other = open("a", O_RDONLY);
		SHOW(other);
		close(other);
	}
	SHOW(read(fd, bytes, 1));
	close(fd);
	SHOW(unlink("a"));

	/* Modes of opening. */
	fd = open("append", O_WRONLY | O_CREAT | O_APPEND, 0640);
	SHOW(write(fd, "one\n", 4));
	SHOW(pwrite(fd, "two\n", 4, 0));
	SHOW(read(fd, bytes, 1));
	other = open("append", O_RDWR | O_TRUNC);
	SHOW(write(fd, "end\n", 4));
	SHOW(read(other, bytes, 10));
	SHOW(fcntl(other, F_SETFL, O_APPEND));
	SHOW(fcntl(other, F_GETFL) & (O_ACCMODE | O_APPEND));
	close(fd);
	close(other);
	content("append");
	attributes("append");
	SHOW(open("append", O_RDONLY | O_DIRECTORY));
	SHOW(open(".", O_WRONLY));
	fd = open("append", O_RDONLY);
	SHOW(write(fd, "no", 2));
	SHOW(ftruncate(fd, 0));
	close(fd);

	/* Names. */
	SHOW(mkdir("d", 0777));
	SHOW(mkdir("d", 0777));
	SHOW(mkdir("none/d", 0777));
	attributes("d");
	SHOW(rename("append", "d/b"));
	SHOW(link("d/b", "d/c"));
	attributes("d/c");
	SHOW(symlink("../d/b", "d/s"));
	SHOW(readlink("d/s", bytes, sizeof bytes));
	SHOW(readlink("d/b", bytes, sizeof bytes));
	content("d/s");
	SHOW(open("d/s", O_RDONLY | O_NOFOLLOW));
	SHOW(symlink("loop", "loop"));
	SHOW(open("loop", O_RDONLY));
	SHOW(stat("d/b/x", &st));
	SHOW(stat("d/b/", &st));
	SHOW(rmdir("d"));
	SHOW(unlink("d"));
	SHOW(rmdir("d/b"));
	SHOW(unlink("d/c"));
	attributes("d/b");
	SHOW(chmod("d/b", 0604));
	attributes("d/s");
	attributes("d/b");
	SHOW(access("d/b", R_OK));
	SHOW(access("d/none", F_OK));
	SHOW(truncate("d/b", 2));
	struct timespec times[2] = { { 1000, 5 }, { 2000, 7 } };
	SHOW(utimensat(AT_FDCWD, "d/b", times, 0));
	SHOW(stat("d/b", &st) == 0 ? st.st_mtim.tv_sec * 10 + st.st_mtim.tv_nsec : -1);

	/* Directories and what begins at them. */
	fd = open("d", O_RDONLY | O_DIRECTORY);
	other = openat(fd, "new", O_CREAT | O_WRONLY, 0600);
	SHOW(write(other, "x", 1));
	close(other);
	SHOW(fstatat(fd, "new", &st, 0) == 0 ? st.st_size : -1);
	SHOW(renameat(fd, "new", AT_FDCWD, "moved"));
	SHOW(mkdirat(fd, "e", 0700));
	SHOW(fchdir(fd));
	content("../moved");
	SHOW(chdir("e"));
	SHOW(strcmp(strrchr(getcwd(bytes, sizeof bytes), '/'), "/e"));
	SHOW(realpath("../s", bytes) ? strcmp(strrchr(bytes, '/'), "/b") : -1);
	SHOW(chdir("../.."));
	DIR *dir = fdopendir(fd);
	struct dirent *entry;
	int count = 0;
	while ((entry = readdir(dir)))
		count++;
	SHOW(count);
	rewinddir(dir);
	long place = 0;
	for (int i = 0; i < 3 && (entry = readdir(dir)); i++)
		place = telldir(dir);
	char third[256];
	strcpy(third, entry ? entry->d_name : "");
	entry = readdir(dir);
	char fourth[256];
	strcpy(fourth, entry ? entry->d_name : "");
	seekdir(dir, place);
	entry = readdir(dir);
	SHOW(entry ? strcmp(entry->d_name, fourth) : -1);
	SHOW(closedir(dir));
	struct dirent **list;
	count = scandir("d", &list, visible, alphasort);
	for (int i = 0; i < count; i++)
		printf("%s %d\n", list[i]->d_name, list[i]->d_type);
	SHOW(opendir("none") ? 0 : -1);
	glob_t found = { 0 };
	SHOW(glob("d/[!z]*", GLOB_MARK, NULL, &found));
	SHOW(glob("*/.", GLOB_APPEND | GLOB_ONLYDIR, NULL, &found));
	SHOW(glob("none*", GLOB_APPEND, NULL, &found));
	SHOW(glob("none*", GLOB_APPEND | GLOB_NOCHECK, NULL, &found));
	SHOW(found.gl_flags & GLOB_ALTDIRFUNC);
	for (size_t i = 0; i < found.gl_pathc; i++)
		printf("%s\n", found.gl_pathv[i]);
	globfree(&found);

	/* Streams. */
	FILE *stream = fopen("stream", "w+");
	SHOW(fprintf(stream, "line %d\nsecond\n", 1));
	SHOW(fseek(stream, 5, SEEK_SET));
	SHOW(fgetc(stream));
	SHOW(ftell(stream));
	SHOW(fputs("", stream));
	SHOW(fileno(stream) > 2);
	SHOW(fstat(fileno(stream), &st) == 0 ? st.st_size : -1);
	SHOW(fclose(stream));
	stream = fopen("stream", "a+");
	SHOW(fputs("third\n", stream));
	rewind(stream);
	while (fgets(bytes, sizeof bytes, stream))
		printf("> %s", bytes);
	SHOW(feof(stream) != 0);
	SHOW(fclose(stream));
	SHOW(fopen("stream", "wx") ? 0 : -1);
	fd = open("stream", O_RDONLY);
	stream = fdopen(fd, "r");
	int number = 0;
	SHOW(fscanf(stream, "line %d", &number));
	SHOW(number);
	SHOW(ungetc('q', stream));
	SHOW(fgetc(stream));
	fclose(stream);
	SHOW(fcntl(fd, F_GETFD));
	fflush(stdout);
	int kept = dup(1);
	other = open("out", O_WRONLY | O_CREAT | O_TRUNC, 0644);
	dup2(other, 1);
	close(other);
	printf("printed into a file\n");
	system("echo from a child; cat < d/b");
	fflush(stdout);
	printf("and again\n");
	fflush(stdout);
	dup2(kept, 1);
	close(kept);
	content("out");
	char temporary[] = "tempXXXXXX";
	fd = mkstemp(temporary);
	SHOW(fd >= 0 && strlen(temporary) == 10);
	SHOW(remove(temporary));
	close(fd);

	/* Space. */
	fd = open("space", O_RDWR | O_CREAT, 0600);
	memset(bytes, 'x', sizeof bytes);
	for (int i = 0; i < 700; i++)
		write(fd, bytes, 200);
	SHOW(fallocate(fd, 0, 150000, 5000));
	SHOW(fallocate(fd, FALLOC_FL_KEEP_SIZE, 200000, 5000));
	attributes("space");
	SHOW(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 4096, 8192));
	SHOW(lseek(fd, 0, SEEK_HOLE));
	SHOW(lseek(fd, 4100, SEEK_HOLE));
	SHOW(lseek(fd, 4100, SEEK_DATA));
	SHOW(lseek(fd, 0, SEEK_CUR));
	SHOW(lseek(fd, 1 << 20, SEEK_DATA));
	SHOW(lseek(fd, 1 << 20, SEEK_HOLE));
	SHOW(lseek(fd, -1, SEEK_HOLE));
	SHOW(fallocate(fd, FALLOC_FL_ZERO_RANGE, 100, 70000));
	SHOW(pread(fd, bytes, 300, 69900));
	SHOW(strspn(bytes, "x") + (bytes[199] << 8) + (bytes[200] << 16));
	SHOW(fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, 154000, 70000));
	attributes("space");
	SHOW(fallocate(fd, FALLOC_FL_PUNCH_HOLE, 0, 1));
	SHOW(fallocate(fd, 0, 0, 0));
	SHOW(fallocate(fd, 0, -1, 5));
	SHOW(fallocate(fd, 0, 0x7fffffffffffffff, 5));
	errno = 0;
	SHOW(posix_fallocate(fd, 300000, 1000));
	SHOW(posix_fallocate(fd, 0, 0));
	SHOW(errno);
	attributes("space");
	other = open("space", O_RDONLY);
	SHOW(fallocate(other, 0, 0, 1));
	SHOW(posix_fallocate(other, 0, 1));
	close(other);

	/* A child of vfork has descriptors of its own and the memory of its parent; so has a thread that parts with the others. */
	fflush(stdout);
	pid_t child = vfork();
	if (child == 0) {
		close(fd);
		int zero = open("/dev/zero", O_RDONLY);
		_exit(zero == fd && pread(zero, bytes, 4, 0) == 4 && bytes[0] == 0 ? 7 : 8);
	}
	int parted_status = 0;
	SHOW(waitpid(child, &parted_status, 0) == child && WEXITSTATUS(parted_status) == 7);
	SHOW(pread(fd, bytes, 4, 0));
	pthread_t parted;
	pthread_create(&parted, NULL, with_own_numbers, &fd);
	pthread_join(parted, NULL);
	SHOW(pread(fd, bytes, 4, 0));
	memset(bytes, 'x', sizeof bytes);

	/* Advice. */
	int advised[] = { fd, open("space", O_WRONLY), open("space", O_PATH), open(".", O_RDONLY) };
	for (int i = 0; i < 4; i++) {
		errno = 0;
		SHOW(posix_fadvise(advised[i], 0, 0, POSIX_FADV_WILLNEED));
		SHOW(posix_fadvise(advised[i], -1, 10, POSIX_FADV_WILLNEED));
		SHOW(posix_fadvise(advised[i], 0, -1, POSIX_FADV_WILLNEED));
		SHOW(posix_fadvise(advised[i], 0, 0, POSIX_FADV_DONTNEED));
		SHOW(posix_fadvise(advised[i], 0, 0, 77));
		SHOW(errno);
		SHOW(readahead(advised[i], 0, 10));
		SHOW(readahead(advised[i], -1, 10));
		SHOW(readahead(advised[i], 0, 0));
		SHOW(readahead(advised[i], 0, -1));
		SHOW(readahead(advised[i], 1LL << 40, 1));
		if (i)
			close(advised[i]);
	}
	close(fd);
	other = open(".", O_RDONLY);
	SHOW(fallocate(other, 0, 0, 1));
	close(other);
	SHOW(unlink("space"));

	/* Asynchronous calls. */
	fd = open("aio", O_RDWR | O_CREAT, 0600);
	struct aiocb first = { .aio_fildes = fd, .aio_buf = "asynchronous", .aio_nbytes = 12, .aio_offset = 3 };
	struct aiocb second = { .aio_fildes = fd, .aio_buf = bytes, .aio_nbytes = 50 };
	const struct aiocb *waited[1] = { &first };
	first.aio_sigevent.sigev_notify = second.aio_sigevent.sigev_notify = SIGEV_NONE;
	SHOW(aio_write(&first));
	SHOW(aio_suspend(waited, 1, NULL));
	SHOW(aio_error(&first));
	SHOW(aio_return(&first));
	struct aiocb *blocks[3] = { &first, NULL, &second };
	first.aio_offset = 20;
	first.aio_lio_opcode = LIO_WRITE;
	second.aio_lio_opcode = LIO_NOP;
	SHOW(lio_listio(LIO_WAIT, blocks, 3, NULL));
	SHOW(aio_return(&first));
	SHOW(aio_read(&second));
	waited[0] = &second;
	SHOW(aio_suspend(waited, 1, NULL));
	SHOW(aio_return(&second));
	SHOW(memcmp(bytes, "\0\0\0asynchronous\0\0\0\0\0asynchronous", 32));
	close(fd);
	fd = open("aio", O_RDONLY);
	first.aio_fildes = fd;
	SHOW(aio_write(&first));
	waited[0] = &first;
	SHOW(aio_suspend(waited, 1, NULL));
	SHOW(aio_error(&first));
	SHOW(aio_return(&first));
	close(fd);
	SHOW(unlink("aio"));

	/* Maps, readiness, threads. */
	fd = open("stream", O_RDWR);
	char *map = mmap(NULL, 100, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	SHOW(map != MAP_FAILED ? memcmp(map, "line 1\nsecond\nthird\n\0\0", 22) : -1);
	map[0] = 'X';
	SHOW(pread(fd, bytes, 1, 0) == 1 ? bytes[0] : -1);
	SHOW(munmap(map, 100));
	kinds_of_maps();
	struct pollfd asked = { fd, POLLIN | POLLOUT, 0 };
	SHOW(poll(&asked, 1, -1));
	SHOW(asked.revents == (POLLIN | POLLOUT));
	/* One disabled as programs do it, one that never is ready, and a file as descriptor 0. */
	int pipes[2];
	pipe(pipes);
	struct pollfd several[4] = { { -1 - fd, POLLIN, 7 }, { fd, POLLOUT, 0 }, { pipes[0], POLLIN, 0 }, { 0, POLLIN, 0 } };
	int input = dup(0);
	dup2(fd, 0);
	SHOW(poll(several, 4, 1000));
	SHOW(several[0].fd == -1 - fd && several[0].revents == 0);
	SHOW(several[1].fd == fd && several[1].revents == POLLOUT);
	SHOW(several[2].fd == pipes[0] && several[2].revents == 0);
	SHOW(several[3].fd == 0 && several[3].revents == POLLIN);
	dup2(input, 0);
	several[0].fd = fd;
	several[0].events = 0;
	SHOW(poll(several, 1, 10));
	close(input);
	close(pipes[0]);
	close(pipes[1]);
	fd_set readable;
	FD_ZERO(&readable);
	FD_SET(fd, &readable);
	SHOW(select(fd + 1, &readable, NULL, NULL, NULL));
	SHOW(FD_ISSET(fd, &readable) != 0);
	close(fd);
	close(open("threads", O_CREAT | O_WRONLY, 0600));
	pthread_t threads[4];
	for (long i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, writer, (void *)i);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	fflush(stdout);
	system("sort threads | uniq | wc -l");
	names_and_slashes();
	streams_anew();
	return 0;
}
