/* Closes descriptors and opens other files at once, which get the same numbers: what is read must be theirs.
 *
 * reuse DIR ROUNDS: DIR/a holds nothing but 'a', DIR/b nothing but 'b'; DIR/c is written and read. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void expect(int fd, char what, off_t at)
{
	char bytes[4096];
	if (pread(fd, bytes, sizeof bytes, at) != sizeof bytes) {
		perror("reuse: pread");
		exit(1);
	}
	for (size_t i = 0; i < sizeof bytes; i++)
		if (bytes[i] != what) {
			fprintf(stderr, "reuse: %c where %c belongs\n", bytes[i], what);
			exit(2);
		}
}

int main(int argc, char **argv)
{
	if (argc != 3 || chdir(argv[1]))
		return 64;
	struct stat st;
	if (stat("a", &st))
		return 66;
	long pages = st.st_size / 4096;
	char c[4096];
	memset(c, 'c', sizeof c);
	for (long round = 0; round < atol(argv[2]); round++) {
		off_t at = round * 7 % pages * 4096;
		int a = open("a", O_RDONLY);
		expect(a, 'a', at);
		close(a);
		int b = open("b", O_RDONLY);
		expect(b, 'b', at);
		if (b != a)
			return 3;
		/* One moment `a`, the next `b`, under the same number and without a close. */
		int again = open("a", O_RDONLY);
		expect(again, 'a', at);
		if (dup2(b, again) != again)
			return 4;
		expect(again, 'b', at);
		close(again);
		close(b);
		int w = open("c", O_RDWR | O_CREAT | O_TRUNC, 0600);
		if (w != a || write(w, c, sizeof c) != sizeof c)
			return 5;
		expect(w, 'c', 0);
		close(w);
		/* Nothing may be found at the number now. */
		if (pread(w, c, 1, 0) != -1)
			return 6;
	}
	puts("all bytes were those of their files");
	return 0;
}
