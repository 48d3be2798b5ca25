/* Asks the kernel once for a whole file, then becomes another program.
 *
 *   whole FILE PROGRAM [ARGUMENT]...
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: %s FILE PROGRAM [ARGUMENT]...\n", argv[0]);
        return 2;
    }
    int fd = open(argv[1], O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) != 0) {
        perror(argv[1]);
        return 1;
    }
    /* The kernel cuts each call to its read-ahead or request limit: ask in pieces, so that the whole file is meant. */
    for (off_t at = 0; at < st.st_size; at += 1 << 20)
        if (posix_fadvise(fd, at, 1 << 20, POSIX_FADV_WILLNEED) != 0)
            break;
    execvp(argv[2], argv + 2);
    perror(argv[2]);
    return 1;
}
