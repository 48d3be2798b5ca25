/* Opens many files at once, reads a little of each, and prints the sum of what it read.
 *
 * many DIR COUNT [STOP]
 *
 * The files are DIR/0, DIR/1, ... With STOP, it reads them again and again until a file of that name is there. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 3 || chdir(argv[1]))
		return 64;
	long count = atol(argv[2]);
	struct rlimit most;
	if (getrlimit(RLIMIT_NOFILE, &most))
		return 71;
	most.rlim_cur = most.rlim_max;
	if (setrlimit(RLIMIT_NOFILE, &most))
		return 71;
	int *fds = calloc(count, sizeof *fds);
	if (!fds)
		return 71;
	unsigned long sum;
	int last;
	for (long i = 0; i < count; i++) {
		char name[32];
		snprintf(name, sizeof name, "%ld", i);
		fds[i] = open(name, O_RDONLY);
		if (fds[i] < 0) {
			perror(name);
			return 66;
		}
	}
	do {
		last = argc < 4 || access(argv[3], F_OK) == 0;
		sum = 0;
		for (long i = 0; i < count; i++) {
			unsigned char bytes[100];
			ssize_t n = pread(fds[i], bytes, sizeof bytes, 0);
			for (ssize_t k = 0; k < n; k++)
				sum += bytes[k] * (i + 1);
		}
		usleep(last ? 0 : 20000);
	} while (!last);
	printf("%lu\n", sum);
	return 0;
}
