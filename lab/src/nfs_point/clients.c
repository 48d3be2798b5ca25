/* Applications at an NFS server: a thread for each process, each with a connection of its own (libnfs, version 3).
 * Argument: an NFS URL of the export. Standard input has a line for each process:
 *
 *   APPLICATION OP FILE KEY DELAY_MS START STRIDE BYTES COUNT COLLECTIVE
 *
 * The process waits DELAY_MS, then does COUNT calls of BYTES each, from START on, STRIDE apart; OP is r or w, and writing
 * ends with a sync. With COLLECTIVE 1 an application's processes wait for one another after each call, as those of a
 * collective call do. Every 8-byte word of a file is a function of its place and KEY; what was read is compared.
 * Output: a line "APPLICATION BEGAN_S ENDED_S" for each process, since all were connected. */
/* Before libnfs.h, which needs it. */
#include <sys/time.h>
#include <nfsc/libnfs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PROCESSES_MAX 256
#define APPLICATIONS_MAX 32

struct process {
	int application, collective;
	char op, file[128];
	uint64_t key, start, stride, bytes, count;
	unsigned delay_ms;
	double began, ended;
};

static struct process processes[PROCESSES_MAX];
static int count;
static const char *where;
static pthread_barrier_t connected, together[APPLICATIONS_MAX];
static double zero;

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void fail(const char *what, const char *why)
{
	fprintf(stderr, "%s: %s\n", what, why ? why : "failed");
	_exit(1);
}

static uint64_t word(uint64_t offset, uint64_t key)
{
	return (offset / 8 + 1) * 0x9e3779b97f4a7c15ULL ^ key;
}

static void move(struct process *p, struct nfs_context *nfs, struct nfsfh *file, uint64_t offset, uint64_t *buffer)
{
	uint64_t done, i;
	int n;
	if (p->op == 'w')
		for (i = 0; i < p->bytes / 8; i++)
			buffer[i] = word(offset + i * 8, p->key);
	for (done = 0; done < p->bytes; done += n) {
		char *at = (char *)buffer + done;
		n = p->op == 'w' ? nfs_pwrite(nfs, file, offset + done, p->bytes - done, at)
				 : nfs_pread(nfs, file, offset + done, p->bytes - done, at);
		if (n <= 0)
			fail(p->file, n < 0 ? nfs_get_error(nfs) : "ends early");
	}
	if (p->op == 'r')
		for (i = 0; i < p->bytes / 8; i++)
			if (buffer[i] != word(offset + i * 8, p->key))
				fail(p->file, "holds what was not written");
}

static void *run(void *argument)
{
	struct process *p = argument;
	struct nfs_context *nfs = nfs_init_context();
	struct nfs_url *url = nfs ? nfs_parse_url_dir(nfs, where) : 0;
	struct nfsfh *file;
	uint64_t *buffer = malloc(p->bytes), i;
	if (!url || !buffer || nfs_mount(nfs, url->server, url->path) || nfs_open(nfs, p->file, p->op == 'w' ? 1 : 0, &file))
		fail(p->file, nfs ? nfs_get_error(nfs) : 0);
	nfs_destroy_url(url);
	pthread_barrier_wait(&connected);
	pthread_barrier_wait(&connected);
	usleep(p->delay_ms * 1000);
	p->began = now() - zero;
	for (i = 0; i < p->count; i++) {
		move(p, nfs, file, p->start + i * p->stride, buffer);
		if (p->collective)
			pthread_barrier_wait(&together[p->application]);
	}
	if (p->op == 'w' && nfs_fsync(nfs, file))
		fail(p->file, nfs_get_error(nfs));
	p->ended = now() - zero;
	nfs_close(nfs, file);
	nfs_destroy_context(nfs);
	free(buffer);
	return 0;
}

int main(int argc, char **argv)
{
	pthread_t threads[PROCESSES_MAX];
	int members[APPLICATIONS_MAX] = { 0 }, i;
	char line[512];
	if (argc != 2)
		fail("usage", "URL, with the processes on standard input");
	where = argv[1];
	while (fgets(line, sizeof line, stdin)) {
		struct process *p = &processes[count];
		if (count == PROCESSES_MAX)
			fail("standard input", "too many processes");
		if (sscanf(line, "%d %c %127s %lu %u %lu %lu %lu %lu %d", &p->application, &p->op, p->file, &p->key, &p->delay_ms,
			   &p->start, &p->stride, &p->bytes, &p->count, &p->collective) != 10 ||
		    p->application < 0 || p->application >= APPLICATIONS_MAX || p->bytes == 0 || p->bytes % 8)
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
	return 0;
}
