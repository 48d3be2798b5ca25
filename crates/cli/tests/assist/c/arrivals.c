/* Reads files of which the advice manager is to bring in the rest, and prints when that was there.
 *
 * arrivals FOLDER COUNT BYTES PAUSE_US
 *
 * Of each file (0, 1, …), after a pause, it reads 4 KiB, waits until the last 64 KiB are in memory, reads all and prints
 * the microseconds of the wait (or "late", after a minute); at the end the checksum of all bytes. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now_us(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* cachestat(2), which the C library does not know yet. */
static int is_there(int fd, uint64_t from, uint64_t len)
{
	uint64_t range[2] = { from, len }, stat[5] = { 0 };
	if (syscall(451, fd, range, stat, 0) != 0) {
		perror("arrivals: cachestat");
		exit(70);
	}
	return stat[0] >= len / 4096;
}

int main(int argc, char **argv)
{
	if (argc < 5)
		return 64;
	long count = strtol(argv[2], NULL, 10), bytes = strtol(argv[3], NULL, 10), pause_us = strtol(argv[4], NULL, 10);
	unsigned char *buffer = malloc(bytes);
	uint64_t sum = 14695981039346656037u;
	srandom(getpid());
	for (long i = 0; i < count; i++) {
		char path[4096];
		snprintf(path, sizeof path, "%s/%ld", argv[1], i);
		if (pause_us)
			usleep(random() % pause_us);
		int fd = open(path, O_RDONLY);
		if (!buffer || fd < 0 || pread(fd, buffer, 4096, 0) != 4096) {
			fprintf(stderr, "arrivals: %s: %d\n", path, errno);
			return 66;
		}
		double begin = now_us();
		while (!is_there(fd, bytes - 65536, 65536) && now_us() - begin < 60e6)
			usleep(100);
		double took = now_us() - begin;
		if (took < 60e6)
			printf("%.0f\n", took);
		else
			printf("late\n");
		if (pread(fd, buffer, bytes, 0) != bytes)
			return 74;
		for (long k = 0; k < bytes; k++)
			sum = (sum ^ buffer[k]) * 1099511628211u;
		close(fd);
	}
	printf("%016llx\n", (unsigned long long)sum);
	return 0;
}
