/* Has files open whose file system may hang.
 *
 * hold FOLDER FIRST COUNT read|map close|stay
 *
 * Reads the first 4 KiB of the files FIRST, FIRST + 1, …, or maps and touches them, says so, and closes them or stays. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 6)
		return 64;
	long first = strtol(argv[2], NULL, 10), count = strtol(argv[3], NULL, 10);
	for (long i = 0; i < count; i++) {
		char path[4096], bytes[4096];
		snprintf(path, sizeof path, "%s/%ld", argv[1], first + i);
		int fd = open(path, O_RDONLY);
		if (fd < 0 || fd != 3 + i)
			return 66;
		if (argv[4][0] == 'm') {
			volatile char *map = mmap(NULL, 1 << 20, PROT_READ, MAP_SHARED, fd, 0);
			if (map == MAP_FAILED || map[0] != 0)
				return 71;
		} else if (pread(fd, bytes, sizeof bytes, 0) != sizeof bytes) {
			return 74;
		}
	}
	puts("open");
	fflush(stdout);
	usleep(300000);
	for (long i = 0; i < count && argv[5][0] == 'c'; i++)
		close(3 + i);
	for (;;)
		pause();
}
