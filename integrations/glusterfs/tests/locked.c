/*
 * Reads of two senders in turns, all under way at once through one connection:
 *
 *   locked VOLUME-FILE FILE LOCK
 *
 * One of them, a lock owner, has locked the whole file first if LOCK is 1. Descriptors are O_NONBLOCK: where locks are
 * mandatory, the other's reads are refused then, and none waits. Prints how many reads of the owner and of the other succeeded.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glusterfs/api/glfs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK (16 * 1024)
#define BLOCKS 48
#define ROUNDS 8

struct sender {
	glfs_fd_t *fd;
	int first; /* its first block; every second one is its own */
	int locks;
	atomic_int open, good, other;
	char *bytes;
};

static const char *name;
static pthread_barrier_t round_begins;

static void must(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "%s: %s: %s\n", name, what, strerror(errno));
	exit(1);
}

static void answered(glfs_fd_t *fd, ssize_t answer, struct glfs_stat *before, struct glfs_stat *after, void *data)
{
	struct sender *sender = data;
	int error = errno;

	if (answer == BLOCK) {
		sender->good++;
	} else {
		sender->other++;
		if (answer >= 0 || error != EAGAIN)
			fprintf(stderr, "a read gives %zd: %s\n", answer, strerror(error));
	}
	sender->open--;
}

static void *run(void *arg)
{
	struct sender *sender = arg;
	struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

	/* The lock's owner becomes that of this thread's requests. */
	if (sender->locks) {
		must(glfs_fd_set_lkowner(sender->fd, "the owner", 9) == 0, "a lock owner");
		must(glfs_posix_lock(sender->fd, F_SETLK, &whole) == 0, "the lock");
	}
	for (int n = 0; n < ROUNDS; n++) {
		pthread_barrier_wait(&round_begins);
		for (int block = sender->first; block < BLOCKS; block += 2) {
			sender->open++;
			must(glfs_pread_async(sender->fd, sender->bytes + block * BLOCK, BLOCK, (off_t)block * BLOCK, 0, answered,
					      sender) == 0, "a read");
		}
		while (sender->open > 0)
			usleep(1000);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	static struct sender senders[2];
	pthread_t threads[2];
	glfs_t *volume = glfs_new("locked");
	char *content = malloc(BLOCK * BLOCKS);
	glfs_fd_t *fd;

	if (argc < 4)
		return 2;
	name = argv[2];
	must(volume && glfs_set_volfile(volume, argv[1]) == 0, "a volume");
	must(glfs_set_logging(volume, "/dev/null", 0) == 0, "no log");
	must(glfs_init(volume) == 0, "it starts");
	memset(content, 'x', BLOCK * BLOCKS);
	fd = glfs_creat(volume, name, O_RDWR, 0600);
	must(fd && glfs_write(fd, content, BLOCK * BLOCKS, 0) == BLOCK * BLOCKS && glfs_close(fd) == 0, "the content");
	pthread_barrier_init(&round_begins, NULL, 2);
	for (int n = 0; n < 2; n++) {
		senders[n].fd = glfs_open(volume, name, O_RDWR | O_NONBLOCK);
		senders[n].first = n;
		senders[n].locks = n == 0 && argv[3][0] == '1';
		senders[n].bytes = calloc(BLOCKS, BLOCK);
		must(senders[n].fd && senders[n].bytes, "open");
		must(pthread_create(&threads[n], NULL, run, &senders[n]) == 0, "a thread");
	}
	for (int n = 0; n < 2; n++)
		pthread_join(threads[n], NULL);
	printf("%d %d of %d\n", senders[0].good, senders[1].good, ROUNDS * BLOCKS / 2);
	return 0;
}
