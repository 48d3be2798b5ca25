/* Applications at a file server: a thread for each process. Build with -DNFS (libnfs, version 3; a connection for each
 * process), -DGLUSTER (libgfapi; a client for each application, as of a machine that it runs on) or -DPOSIX (plain calls).
 * Arguments: WHERE SECONDS. WHERE is an NFS URL of the export, a volume file, or a folder with one for each application, by
 * its number, as if that were mounted there. Standard input has a line for each process:
 *
 *   APPLICATION USER OP FILE KEY DELAY_MS START STRIDE BYTES COUNT COLLECTIVE
 *
 * The process waits DELAY_MS, then does COUNT calls of BYTES each, from START on, STRIDE apart; OP is r or w, and writing
 * ends with a sync. With COLLECTIVE 1 an application's processes wait for one another after each call, as those of a
 * collective call do. With SECONDS above 0 the calls are repeated until then. Every 8-byte word of a file is a function of its
 * place and KEY; what was read is compared.
 * Output: a line "APPLICATION BEGAN_S ENDED_S" for each process, since all were connected. With SECONDS also a line
 * "APPLICATION TENTH BYTES" for each tenth of a second. */
#include "program.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#define PROCESSES_MAX 256
#define APPLICATIONS_MAX 32
#define TENTHS_MAX 36000

struct process {
	int application, collective;
	unsigned user, delay_ms;
	char op, file[128];
	uint64_t key, start, stride, bytes, count;
	double began, ended;
};

static struct process processes[PROCESSES_MAX];
static int count;
static const char *where;
static double zero, seconds;
static pthread_barrier_t connected, together[APPLICATIONS_MAX];
static uint64_t moved[APPLICATIONS_MAX][TENTHS_MAX];

#ifdef NFS
#include <nfsc/libnfs.h>

struct handle {
	struct nfs_context *nfs;
	struct nfsfh *file;
};

static void file_open(struct handle *h, struct process *p)
{
	char as[1024];
	struct nfs_url *url;
	snprintf(as, sizeof as, "%s&uid=%u&gid=%u", where, p->user, p->user);
	if (!(h->nfs = nfs_init_context()) || !(url = nfs_parse_url_dir(h->nfs, as)) ||
	    nfs_mount(h->nfs, url->server, url->path) || nfs_open(h->nfs, p->file, p->op == 'w' ? 1 : 0, &h->file))
		fail(p->file, h->nfs ? nfs_get_error(h->nfs) : 0);
	nfs_destroy_url(url);
}

static long transfer(struct handle *h, char op, void *at, uint64_t bytes, uint64_t offset)
{
	return op == 'w' ? nfs_pwrite(h->nfs, h->file, offset, bytes, at) : nfs_pread(h->nfs, h->file, offset, bytes, at);
}

static int file_sync(struct handle *h)
{
	return nfs_fsync(h->nfs, h->file);
}

static void file_close(struct handle *h)
{
	nfs_close(h->nfs, h->file);
	nfs_destroy_context(h->nfs);
}
#endif

#ifdef GLUSTER
#include <fcntl.h>
#include <glusterfs/api/glfs.h>

struct handle {
	glfs_fd_t *file;
};

static glfs_t *clients[APPLICATIONS_MAX];
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

static void file_open(struct handle *h, struct process *p)
{
	glfs_t **fs = &clients[p->application];
	pthread_mutex_lock(&making);
	if (!*fs && (!(*fs = glfs_new("bench")) || glfs_set_volfile(*fs, where) || glfs_set_logging(*fs, "/dev/null", 0) ||
		     glfs_init(*fs)))
		fail(where, "cannot be mounted");
	pthread_mutex_unlock(&making);
	if (!(h->file = glfs_open(*fs, p->file, p->op == 'w' ? O_RDWR : O_RDONLY)))
		fail(p->file, "cannot be opened");
}

static long transfer(struct handle *h, char op, void *at, uint64_t bytes, uint64_t offset)
{
	return op == 'w' ? glfs_pwrite(h->file, at, bytes, offset, 0, 0, 0) : glfs_pread(h->file, at, bytes, offset, 0, 0);
}

static int file_sync(struct handle *h)
{
	return glfs_fsync(h->file, 0, 0);
}

static void file_close(struct handle *h)
{
	glfs_close(h->file);
}
#endif

#ifdef POSIX
#include <fcntl.h>

struct handle {
	int file;
};

static void file_open(struct handle *h, struct process *p)
{
	char path[1024];
	snprintf(path, sizeof path, "%s/%d%s", where, p->application, p->file);
	if ((h->file = open(path, p->op == 'w' ? O_RDWR : O_RDONLY)) < 0)
		fail(path, "cannot be opened");
}

static long transfer(struct handle *h, char op, void *at, uint64_t bytes, uint64_t offset)
{
	return op == 'w' ? pwrite(h->file, at, bytes, offset) : pread(h->file, at, bytes, offset);
}

static int file_sync(struct handle *h)
{
	return fsync(h->file);
}

static void file_close(struct handle *h)
{
	close(h->file);
}
#endif

static uint64_t word(uint64_t offset, uint64_t key)
{
	return (offset / 8 + 1) * 0x9e3779b97f4a7c15ULL ^ key;
}

static void move(struct process *p, struct handle *h, uint64_t offset, uint64_t *buffer)
{
	uint64_t done, i;
	long n;
	if (p->op == 'w')
		for (i = 0; i < p->bytes / 8; i++)
			buffer[i] = word(offset + i * 8, p->key);
	for (done = 0; done < p->bytes; done += n)
		if ((n = transfer(h, p->op, (char *)buffer + done, p->bytes - done, offset + done)) <= 0)
			fail(p->file, n < 0 ? "a call failed" : "ends early");
	if (p->op == 'r')
		for (i = 0; i < p->bytes / 8; i++)
			if (buffer[i] != word(offset + i * 8, p->key))
				fail(p->file, "holds what was not written");
}

static void *run(void *argument)
{
	struct process *p = argument;
	struct handle h = { 0 };
	uint64_t *buffer = malloc(p->bytes), i;
	if (!buffer)
		fail(p->file, "no memory");
	file_open(&h, p);
	pthread_barrier_wait(&connected);
	pthread_barrier_wait(&connected);
	usleep(p->delay_ms * 1000);
	p->began = now() - zero;
	do {
		for (i = 0; i < p->count && (seconds <= 0 || now() - zero < seconds); i++) {
			int tenth;
			move(p, &h, p->start + i * p->stride, buffer);
			tenth = (int)((now() - zero) * 10);
			if (tenth < TENTHS_MAX)
				__atomic_add_fetch(&moved[p->application][tenth], p->bytes, __ATOMIC_RELAXED);
			if (p->collective)
				pthread_barrier_wait(&together[p->application]);
		}
	} while (now() - zero < seconds);
	if (p->op == 'w' && file_sync(&h))
		fail(p->file, "cannot be synced");
	p->ended = now() - zero;
	file_close(&h);
	free(buffer);
	return 0;
}

int main(int argc, char **argv)
{
	pthread_t threads[PROCESSES_MAX];
	int members[APPLICATIONS_MAX] = { 0 }, i, tenth;
	char line[512];
	if (argc != 3)
		fail("usage", "WHERE SECONDS, with the processes on standard input");
	where = argv[1];
	seconds = atof(argv[2]);
	while (fgets(line, sizeof line, stdin)) {
		struct process *p = &processes[count];
		if (count == PROCESSES_MAX)
			fail("standard input", "too many processes");
		if (sscanf(line, "%d %u %c %127s %lu %u %lu %lu %lu %lu %d", &p->application, &p->user, &p->op, p->file, &p->key,
			   &p->delay_ms, &p->start, &p->stride, &p->bytes, &p->count, &p->collective) != 11 ||
		    p->application < 0 || p->application >= APPLICATIONS_MAX || p->bytes == 0 || p->bytes % 8 ||
		    (p->collective && seconds > 0))
			fail("standard input", line);
		members[p->application]++, count++;
	}
	pthread_barrier_init(&connected, 0, count + 1);
	for (i = 0; i < APPLICATIONS_MAX; i++)
		if (members[i])
			pthread_barrier_init(&together[i], 0, members[i]);
	for (i = 0; i < count; i++)
		if (pthread_create(&threads[i], 0, run, &processes[i]))
			fail("starting a thread", 0);
	pthread_barrier_wait(&connected);
	zero = now();
	pthread_barrier_wait(&connected);
	for (i = 0; i < count; i++)
		pthread_join(threads[i], 0);
	for (i = 0; i < count; i++)
		printf("%d %.6f %.6f\n", processes[i].application, processes[i].began, processes[i].ended);
	for (i = 0; seconds > 0 && i < APPLICATIONS_MAX; i++)
		for (tenth = 0; tenth < (int)(seconds * 10) && tenth < TENTHS_MAX; tenth++)
			if (members[i])
				printf("%d %d %lu\n", i, tenth, moved[i][tenth]);
	fflush(stdout);
	/* libgfapi's own end waits for seconds; servers see the connections go. */
	_exit(0);
}
