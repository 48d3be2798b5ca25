/*
 * Random reads, writes, truncations and reopenings of one file, checked against the same bytes in memory:
 *
 *   exercise PATH STEPS SEED [WHAT [OTHER]]
 *
 * WHAT is letters: m maps the file too, h makes holes too, a allocates and zeros ranges too. With OTHER, which is a path of the
 * same file on another node, two processes do that at the same time, one call of them at a time, by locks of the file. With
 * -DNFS the file is on an NFS server, PATH is a URL of its directory, and the file is there as SEED.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Over the edge of a shard of 4 MiB, and over many edges of stripes. */
#define FIRST (4 * 1024 * 1024 - 300000)
#define LIMIT 700000

#ifdef NFS
#include <nfsc/libnfs.h>

static struct nfs_context *nfs;
typedef struct nfsfh *file_t;
static char name[32];

static int file_open(const char *path, int flags, file_t *file)
{
	if (!nfs) {
		nfs = nfs_init_context();
		struct nfs_url *url = nfs_parse_url_dir(nfs, path);
		if (!url || nfs_mount(nfs, url->server, url->path) < 0)
			return -1;
	}
	return (flags & O_CREAT ? nfs_creat(nfs, name, 0600, file) : nfs_open(nfs, name, flags, file)) >= 0 ? 0 : -1;
}

static long file_write(file_t file, const void *bytes, long len, long at)
{
	long done = 0;
	/* Requests of the largest size that the server takes are the library's affair. */
	while (done < len) {
		long part = nfs_pwrite(nfs, file, at + done, len - done, (const char *)bytes + done);
		if (part <= 0)
			return part;
		done += part;
	}
	return done;
}

static long file_read(file_t file, void *bytes, long len, long at)
{
	long done = 0;
	while (done < len) {
		long part = nfs_pread(nfs, file, at + done, len - done, (char *)bytes + done);
		if (part < 0)
			return part;
		if (part == 0)
			break;
		done += part;
	}
	return done;
}

static int file_cut(file_t file, long size)
{
	return nfs_ftruncate(nfs, file, size);
}

static int file_sync(file_t file)
{
	return nfs_fsync(nfs, file);
}

static int file_close(file_t file)
{
	return nfs_close(nfs, file);
}

static long file_size(file_t file)
{
	struct nfs_stat_64 st;
	return nfs_fstat64(nfs, file, &st) < 0 ? -1 : (long)st.nfs_size;
}
#else
typedef int file_t;
static char name[32];

static int file_open(const char *path, int flags, file_t *file)
{
	*file = open(path, flags, 0600);
	return *file < 0 ? -1 : 0;
}

static long file_write(file_t file, const void *bytes, long len, long at)
{
	return pwrite(file, bytes, len, at);
}

static long file_read(file_t file, void *bytes, long len, long at)
{
	return pread(file, bytes, len, at);
}

static int file_cut(file_t file, long size)
{
	return ftruncate(file, size);
}

static int file_sync(file_t file)
{
	return fsync(file);
}

static int file_close(file_t file)
{
	return close(file);
}

static long file_size(file_t file)
{
	struct stat st;
	return fstat(file, &st) < 0 ? -1 : (long)st.st_size;
}
#endif

/* What the file is to hold from FIRST on, for both processes. */
static struct {
	long size;
	int is_empty;
	unsigned char bytes[LIMIT];
} *model;
static unsigned char bytes[LIMIT];
static unsigned long state;
static int is_shared;

static long below(long n)
{
	state = state * 6364136223846793005ul + 1442695040888963407ul;
	return (long)((state >> 33) % (unsigned long)n);
}

static void must(int holds, const char *what, int step)
{
	if (holds)
		return;
	fprintf(stderr, "step %d: %s: %s\n", step, what, strerror(errno));
	exit(1);
}

static void same(const unsigned char *got, long at, long len, int step)
{
	for (long i = 0; i < len; i++)
		if (got[i] != model->bytes[at + i]) {
			fprintf(stderr, "step %d: byte %ld is %d and not %d\n", step, at + i, got[i], model->bytes[at + i]);
			exit(1);
		}
}

static void fill(long at, long len)
{
	for (long i = 0; i < len; i++)
		model->bytes[at + i] = (unsigned char)below(256);
}

static void reaches(long end)
{
	if (model->size < end)
		model->size = end;
	model->is_empty = 0;
}

#ifndef NFS
static void change_map(file_t file, long at, long len, int step)
{
	long page = (FIRST + at) & ~4095l, before = FIRST + at - page;
	/* As programs do: a kernel that has not looked since the other node made the file longer would end the process. */
	must(file_size(file) == FIRST + model->size, "the size before mapping", step);
	unsigned char *map = mmap(NULL, before + len, PROT_READ | PROT_WRITE, MAP_SHARED, file, page);

	must(map != MAP_FAILED, "mmap", step);
	same(map + before, at, len, step);
	for (long i = 0; i < len; i += 97)
		map[before + i] = model->bytes[at + i] = (unsigned char)below(256);
	must(msync(map, before + len, MS_SYNC) == 0 && munmap(map, before + len) == 0, "msync", step);
}

static void change_space(file_t file, int mode, long at, long len, int step)
{
	must(fallocate(file, mode, FIRST + at, len) == 0, "fallocate", step);
	if (!(mode & FALLOC_FL_KEEP_SIZE))
		reaches(at + len);
	if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE) && at < model->size)
		memset(model->bytes + at, 0, at + len < model->size ? len : model->size - at);
}
#endif

#ifndef NFS
static void lock(file_t file, int kind, int step)
{
	struct flock whole = { .l_type = kind, .l_whence = SEEK_SET };

	if (is_shared)
		must(fcntl(file, F_SETLKW, &whole) == 0, "lock", step);
}
#else
static void lock(file_t file, int kind, int step)
{
}
#endif

static file_t do_steps(const char *path, file_t file, int steps, const char *what)
{
	for (int step = 1; step <= steps; step++) {
		long at = below(LIMIT), len = 1 + below(below(4) ? 9000 : 200000);
		lock(file, F_WRLCK, step);
		if (len > LIMIT - at)
			len = LIMIT - at;
		long there = at < model->size ? model->size - at : 0;
		if (there > len)
			there = len;
		switch (below(10)) {
		case 0:
		case 1:
		case 2:
			fill(at, len);
			must(file_write(file, model->bytes + at, len, FIRST + at) == len, "write", step);
			reaches(at + len);
			break;
		case 3:
		case 4:
			must(file_read(file, bytes, len, FIRST + at) == there, "read", step);
			same(bytes, at, there, step);
			break;
		case 5:
			must(file_cut(file, FIRST + at) == 0, "truncate", step);
			if (at < model->size)
				memset(model->bytes + at, 0, model->size - at);
			model->size = at;
			model->is_empty = 0;
			break;
		case 6:
			/* This gives up the lock. */
			must(file_sync(file) == 0 && file_close(file) == 0, "close", step);
			must(file_open(path, O_RDWR, &file) == 0, "open again", step);
			break;
		case 7:
			must(file_size(file) == (model->is_empty ? 0 : FIRST + model->size), "the size", step);
			break;
#ifndef NFS
		case 8:
			if (strchr(what, 'm') && there == len)
				change_map(file, at, len, step);
			break;
		case 9:
			if (strchr(what, 'h') && below(2))
				change_space(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, len, step);
			else if (strchr(what, 'a'))
				change_space(file, (below(2) ? FALLOC_FL_ZERO_RANGE : 0) | (below(2) ? FALLOC_FL_KEEP_SIZE : 0), at,
					     len, step);
			break;
#endif
		}
		lock(file, F_UNLCK, step);
	}
	return file;
}

int main(int argc, char **argv)
{
	const char *path = argv[1], *what = argc > 4 ? argv[4] : "";
	int steps = atoi(argv[2]), status = 0;
	pid_t other = 0;
	file_t file;

	state = strtoul(argv[3], NULL, 10);
	snprintf(name, sizeof name, "/%.20s", argv[3]);
	model = mmap(NULL, sizeof *model, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	must(model != MAP_FAILED, "memory", 0);
	model->is_empty = 1;
	must(file_open(path, O_RDWR | O_CREAT | O_TRUNC, &file) == 0, "open", 0);
	if (argc > 5) {
		is_shared = 1;
		other = fork();
		must(other >= 0, "fork", 0);
		if (other == 0) {
			state += 1000;
			must(file_open(argv[5], O_RDWR, &file) == 0, "open of the other", 0);
			do_steps(argv[5], file, steps, what);
			return 0;
		}
	}
	file = do_steps(path, file, steps, what);
	if (other)
		must(waitpid(other, &status, 0) == other && status == 0, "the other process", steps);
	must(file_close(file) == 0 && file_open(path, O_RDONLY, &file) == 0, "open at the end", steps);
	must(file_read(file, bytes, LIMIT, FIRST) == model->size, "the size at the end", steps);
	same(bytes, 0, model->size, steps);
	must(file_close(file) == 0, "close at the end", steps);
	printf("good\n");
	return 0;
}
