/* Reads pieces of a file at equal distances and prints their checksum.
 *
 * strided FILE PIECE STRIDE COUNT PAUSE_US [STOP]
 *
 * With STOP, passes follow one another until a file of that name is there; the pass after that is the last one and the
 * one whose checksum is printed. */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 6)
		return 64;
	size_t piece = strtoull(argv[2], NULL, 10);
	off_t stride = strtoll(argv[3], NULL, 10);
	long count = strtol(argv[4], NULL, 10), pause_us = strtol(argv[5], NULL, 10);
	unsigned char *bytes = malloc(piece);
	int fd = open(argv[1], O_RDONLY);
	if (!bytes || fd < 0) {
		fprintf(stderr, "strided: %s: %s\n", argv[1], strerror(errno));
		return 66;
	}
	uint64_t sum, moved;
	int last;
	do {
		last = argc < 7 || access(argv[6], F_OK) == 0;
		sum = 14695981039346656037u;
		moved = 0;
		for (long i = 0; i < count; i++) {
			ssize_t n = pread(fd, bytes, piece, i * stride);
			if (n < 0) {
				perror("strided: pread");
				return 74;
			}
			for (ssize_t k = 0; k < n; k++)
				sum = (sum ^ bytes[k]) * 1099511628211u;
			moved += n;
			if (pause_us)
				usleep(pause_us);
		}
	} while (!last);
	printf("%016llx of %llu bytes\n", (unsigned long long)sum, (unsigned long long)moved);
	return 0;
}
