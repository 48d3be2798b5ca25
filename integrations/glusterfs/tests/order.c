/*
 * Requests that are under way together, checked against the same bytes in memory, to which they are done in the order in which they
 * are sent:
 *
 *   order VOLUME-FILE FILES STEPS SEED
 *
 * Each file has a thread and three descriptors. Up to DEPTH writes, reads, zerofills, discards and truncations of ranges that
 * overlap wait for their answers at a time, through one connection. A mount would wait for each of them, and GlusterFS's
 * never sends a zerofill. Files have one length, but for a moment: a write that lengthens a file and a read that it does not overlap
 * have no order.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glusterfs/api/glfs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIMIT (256 * 1024)
#define RANGE (48 * 1024)
#ifndef DEPTH
#define DEPTH 24
#endif
#define OPENS 3

struct file {
	pthread_mutex_t lock;
	pthread_cond_t fewer;
	int under_way;
	unsigned long state;
	glfs_fd_t *fds[OPENS];
	char name[32];
	long last; /* where the last write ended */
	unsigned char bytes[LIMIT];
};

struct request {
	struct file *file;
	const char *what;
	long step, at, len, answer;
	unsigned char *bytes, *expected; /* of a write or a read; of a read */
};

static glfs_t *volume;
static long steps, seed;

static void must(int holds, const char *name, const char *what, long step)
{
	if (holds)
		return;
	fprintf(stderr, "%s, step %ld: %s: %s\n", name, step, what, strerror(errno));
	exit(1);
}

static long below(struct file *file, long n)
{
	file->state = file->state * 6364136223846793005ul + 1442695040888963407ul;
	return (long)((file->state >> 33) % (unsigned long)n);
}

static void same(const struct file *file, const unsigned char *got, const unsigned char *expected, long at, long len,
		 long step)
{
	for (long i = 0; i < len; i++)
		if (got[i] != expected[i]) {
			fprintf(stderr, "%s, step %ld: byte %ld is %d and not %d\n", file->name, step, at + i, got[i], expected[i]);
			exit(1);
		}
}

static void answered(glfs_fd_t *fd, ssize_t answer, struct glfs_stat *before, struct glfs_stat *after, void *data)
{
	struct request *request = data;
	struct file *file = request->file;

	if (answer != request->answer) {
		fprintf(stderr, "%s, step %ld: %s of %ld from %ld on gives %zd and not %ld: %s\n", file->name, request->step,
			request->what, request->len, request->at, answer, request->answer, strerror(errno));
		exit(1);
	}
	if (request->expected)
		same(file, request->bytes, request->expected, request->at, answer, request->step);
	free(request->bytes);
	free(request->expected);
	free(request);
	pthread_mutex_lock(&file->lock);
	file->under_way--;
	pthread_cond_signal(&file->fewer);
	pthread_mutex_unlock(&file->lock);
}

static void wait_for(struct file *file, int most)
{
	pthread_mutex_lock(&file->lock);
	while (file->under_way > most)
		pthread_cond_wait(&file->fewer, &file->lock);
	pthread_mutex_unlock(&file->lock);
}

static struct request *request_new(struct file *file, const char *what, long n, long at, long len)
{
	struct request *request = calloc(1, sizeof *request);

	must(request != NULL, file->name, "memory", n);
	*request = (struct request){ .file = file, .what = what, .step = n, .at = at, .len = len };
	pthread_mutex_lock(&file->lock);
	file->under_way++;
	pthread_mutex_unlock(&file->lock);
	return request;
}

static void cut(struct file *file, glfs_fd_t *fd, long at, long n)
{
	int sent = glfs_ftruncate_async(fd, at, answered, request_new(file, "ftruncate", n, at, 0));

	must(sent == 0, file->name, "it is sent", n);
}

/* Does something to the model, and sends it. */
static void step(struct file *file, long n)
{
	long kind = below(file, 12), at = below(file, LIMIT), len = 1 + below(file, RANGE);
	glfs_fd_t *fd = file->fds[below(file, OPENS)];
	struct request *request;
	int sent;

	/* Writes that touch can be merged. */
	if (kind > 5 && below(file, 4) && file->last < LIMIT)
		at = file->last;
	if (len > LIMIT - at)
		len = LIMIT - at;
	switch (kind) {
	case 0:
		memset(file->bytes + at, 0, len);
		sent = glfs_zerofill_async(fd, at, len, answered, request_new(file, "zerofill", n, at, len));
		break;
	case 1:
		memset(file->bytes + at, 0, len);
		sent = glfs_discard_async(fd, at, len, answered, request_new(file, "discard", n, at, len));
		break;
	case 2:
		/* Seldom to little, or hardly anything would be there. */
		if (below(file, 4))
			at = LIMIT / 2 + at / 2;
		memset(file->bytes + at, 0, LIMIT - at);
		cut(file, fd, at, n);
		cut(file, file->fds[below(file, OPENS)], LIMIT, n);
		return;
	case 3:
	case 4:
	case 5:
		request = request_new(file, "read", n, at, len);
		request->answer = len;
		request->bytes = malloc(len);
		request->expected = malloc(len);
		must(request->bytes && request->expected, file->name, "memory", n);
		memcpy(request->expected, file->bytes + at, len);
		sent = glfs_pread_async(fd, request->bytes, len, at, 0, answered, request);
		break;
	default:
		request = request_new(file, "write", n, at, len);
		request->answer = len;
		request->bytes = malloc(len);
		must(request->bytes != NULL, file->name, "memory", n);
		for (long i = 0; i < len; i++)
			file->bytes[at + i] = (unsigned char)(1 + below(file, 255));
		memcpy(request->bytes, file->bytes + at, len);
		file->last = at + len;
		sent = glfs_pwrite_async(fd, request->bytes, (int)len, at, 0, answered, request);
		break;
	}
	must(sent == 0, file->name, "it is sent", n);
}

static void *run(void *arg)
{
	struct file *file = arg;
	unsigned char *all = malloc(LIMIT + 1);

	must(all != NULL, file->name, "memory", 0);
	must(glfs_ftruncate(file->fds[0], LIMIT, NULL, NULL) == 0, file->name, "the length", 0);
	for (long n = 1; n <= steps; n++) {
		wait_for(file, DEPTH - 1);
		step(file, n);
		if (n % 100 == 0 || n == steps) {
			wait_for(file, 0);
			must(glfs_pread(file->fds[0], all, LIMIT + 1, 0, 0, NULL) == LIMIT, file->name, "the length", n);
			same(file, all, file->bytes, 0, LIMIT, n);
		}
	}
	for (int i = 0; i < OPENS; i++)
		must(glfs_close(file->fds[i]) == 0, file->name, "close", steps);
	free(all);
	return NULL;
}

int main(int argc, char **argv)
{
	int count = argc > 4 ? atoi(argv[2]) : 0;
	struct file *files = calloc(count, sizeof *files);
	pthread_t threads[64];

	if (!files || count < 1 || count > 64)
		return 2;
	steps = atol(argv[3]);
	seed = atol(argv[4]);
	volume = glfs_new("order");
	must(volume && glfs_set_volfile(volume, argv[1]) == 0, argv[1], "a volume", 0);
	must(glfs_set_logging(volume, "/dev/null", 0) == 0, argv[1], "no log", 0);
	must(glfs_init(volume) == 0, argv[1], "it starts", 0);
	for (int n = 0; n < count; n++) {
		struct file *file = &files[n];

		pthread_mutex_init(&file->lock, NULL);
		pthread_cond_init(&file->fewer, NULL);
		file->state = (unsigned long)(seed * 1000 + n);
		snprintf(file->name, sizeof file->name, "/order-%ld-%d", seed, n);
		file->fds[0] = glfs_creat(volume, file->name, O_RDWR, 0600);
		for (int i = 1; i < OPENS; i++)
			file->fds[i] = glfs_open(volume, file->name, O_RDWR);
		for (int i = 0; i < OPENS; i++)
			must(file->fds[i] != NULL, file->name, "open", 0);
		must(pthread_create(&threads[n], NULL, run, file) == 0, file->name, "a thread", 0);
	}
	for (int n = 0; n < count; n++)
		pthread_join(threads[n], NULL);
	printf("good\n");
	return 0;
}
