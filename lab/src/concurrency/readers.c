/* Keeps CONCURRENCY random reads of one file outstanding at a server: build with -DNFS (libnfs, a connection for each) or
 * -DGLUSTER (libgfapi, one connection). Prints "begin" after the warm-up, then the reads completed in SECONDS.
 * Arguments: WHERE FILE FILE_BYTES READ_BYTES CONCURRENCY SECONDS. WHERE is an NFS URL, or a volume file. */
#include "program.h"

#include <poll.h>
#include <stdlib.h>
#include <string.h>

#define WARM_UP_S 0.2
#define CONCURRENCY_MAX 1024

static unsigned long file_bytes, read_bytes;
static unsigned long done;
static int stopping, outstanding;

/* Aligned, anywhere in the file: xorshift. */
static unsigned long place(void)
{
	static unsigned long state = 88172645463325252UL;
	unsigned long x = __atomic_load_n(&state, __ATOMIC_RELAXED);
	x ^= x << 13, x ^= x >> 7, x ^= x << 17;
	__atomic_store_n(&state, x, __ATOMIC_RELAXED);
	return x % (file_bytes / read_bytes) * read_bytes;
}

static void measured(double from, unsigned long before)
{
	printf("%lu %.6f\n", __atomic_load_n(&done, __ATOMIC_RELAXED) - before, now() - from);
	fflush(stdout);
}

#ifdef NFS
#include <nfsc/libnfs.h>

struct reader {
	struct nfs_context *nfs;
	struct nfsfh *file;
};

static void next(struct reader *reader);

static void completed(int err, struct nfs_context *nfs, void *data, void *private)
{
	if (err != (int)read_bytes)
		fail("reading", err < 0 ? (char *)data : "a short read");
	done++, outstanding--;
	if (!stopping)
		next(private);
}

static void next(struct reader *reader)
{
	if (nfs_pread_async(reader->nfs, reader->file, place(), read_bytes, completed, reader))
		fail("sending a read", nfs_get_error(reader->nfs));
	outstanding++;
}

static void run(const char *where, const char *name, int concurrency, double seconds)
{
	static struct reader readers[CONCURRENCY_MAX];
	static struct pollfd polls[CONCURRENCY_MAX];
	double start, begun = 0;
	unsigned long before = 0;
	int i;
	for (i = 0; i < concurrency; i++) {
		struct reader *r = &readers[i];
		struct nfs_url *url;
		char self[32];
		snprintf(self, sizeof self, "reader %d.%d", getpid(), i);
		if (!(r->nfs = nfs_init_context()) || !(url = nfs_parse_url_dir(r->nfs, where)))
			fail(where, r->nfs ? nfs_get_error(r->nfs) : 0);
		/* Version 4 takes clients of one name for one client that restarted. */
		nfs4_set_client_name(r->nfs, self);
		if (nfs_mount(r->nfs, url->server, url->path) || nfs_open(r->nfs, name, 0, &r->file))
			fail(where, nfs_get_error(r->nfs));
		nfs_destroy_url(url);
	}
	for (i = 0; i < concurrency; i++)
		next(&readers[i]);
	for (start = now(); outstanding > 0;) {
		for (i = 0; i < concurrency; i++) {
			polls[i].fd = nfs_get_fd(readers[i].nfs);
			polls[i].events = nfs_which_events(readers[i].nfs);
		}
		if (poll(polls, concurrency, 1000) < 0)
			fail("poll", 0);
		for (i = 0; i < concurrency; i++)
			if (polls[i].revents && nfs_service(readers[i].nfs, polls[i].revents) < 0)
				fail("reading", nfs_get_error(readers[i].nfs));
		if (!begun && now() - start > WARM_UP_S) {
			puts("begin"), fflush(stdout);
			begun = now(), before = done;
		} else if (begun && !stopping && now() - begun > seconds) {
			measured(begun, before);
			stopping = 1;
		}
	}
}
#endif

#ifdef GLUSTER
#include <glusterfs/api/glfs.h>

static glfs_fd_t *file;

static void next(void *buffer);

static void completed(glfs_fd_t *fd, ssize_t ret, struct glfs_stat *before, struct glfs_stat *after, void *buffer)
{
	if (ret != (ssize_t)read_bytes)
		fail("reading", "an error or a short read");
	__atomic_add_fetch(&done, 1, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&outstanding, 1, __ATOMIC_RELAXED);
	if (!__atomic_load_n(&stopping, __ATOMIC_RELAXED))
		next(buffer);
}

static void next(void *buffer)
{
	__atomic_add_fetch(&outstanding, 1, __ATOMIC_RELAXED);
	if (glfs_pread_async(file, buffer, read_bytes, place(), 0, completed, buffer))
		fail("sending a read", 0);
}

static void run(const char *where, const char *name, int concurrency, double seconds)
{
	double begun;
	unsigned long before;
	int i;
	glfs_t *fs = glfs_new("bench");
	if (!fs || glfs_set_volfile(fs, where) || glfs_set_logging(fs, "/dev/null", 0) || glfs_init(fs))
		fail(where, "cannot be mounted");
	if (!(file = glfs_open(fs, name, 0)))
		fail(name, "cannot be opened");
	for (i = 0; i < concurrency; i++)
		next(malloc(read_bytes));
	usleep(WARM_UP_S * 1e6);
	puts("begin"), fflush(stdout);
	begun = now(), before = __atomic_load_n(&done, __ATOMIC_RELAXED);
	usleep(seconds * 1e6);
	measured(begun, before);
	/* The library's own end waits for seconds; the server sees the connection go. */
	_exit(0);
}
#endif

int main(int argc, char **argv)
{
	int concurrency = argc == 7 ? atoi(argv[5]) : 0;
	if (concurrency < 1 || concurrency > CONCURRENCY_MAX)
		fail("usage", "WHERE FILE FILE_BYTES READ_BYTES CONCURRENCY SECONDS");
	file_bytes = strtoul(argv[3], 0, 10);
	read_bytes = strtoul(argv[4], 0, 10);
	run(argv[1], argv[2], concurrency, atof(argv[6]));
	return 0;
}
