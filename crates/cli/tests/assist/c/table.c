/* Reads a table: table FILE reads the footer, the header, and then a column of each group of rows; table FILE any reads
 * pieces in no order. Prints a sum of what it read. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#define GROUP (256 << 10)
#define COLUMN (64 << 10)

static unsigned char bytes[COLUMN];
static uint64_t sum;

static void piece(int fd, size_t len, off_t at)
{
	ssize_t got = pread(fd, bytes, len, at);
	for (ssize_t i = 0; i < got; i++)
		sum = sum * 31 + bytes[i];
}

int main(int argc, char **argv)
{
	struct stat stat;
	int fd = argc < 2 ? -1 : open(argv[1], O_RDONLY);
	if (fd < 0 || fstat(fd, &stat))
		return 1;
	if (argc > 2) {
		uint64_t at = 1;
		for (int i = 0; i < 600; i++) {
			at = at * 6364136223846793005u + 1442695040888963407u;
			piece(fd, 4096, (off_t)((at >> 33) % (uint64_t)stat.st_size));
		}
	} else {
		piece(fd, 8, stat.st_size - 8);
		piece(fd, 512, 0);
		for (off_t at = 4096; at < stat.st_size; at += GROUP)
			piece(fd, COLUMN, at);
	}
	printf("%llu\n", (unsigned long long)sum);
	return 0;
}
