/* An analysis in miniature: reads pieces of a file with gaps between them and computes for a while after each.
 * Prints a sum over what it read. Knows nothing of hints.
 *
 *   strided FILE PIECE_BYTES GAP_BYTES COMPUTE_US
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: %s FILE PIECE_BYTES GAP_BYTES COMPUTE_US\n", argv[0]);
        return 2;
    }
    long piece = atol(argv[2]), gap = atol(argv[3]);
    double compute_s = atof(argv[4]) * 1e-6;
    unsigned char *buffer = malloc((size_t)piece);
    int fd = open(argv[1], O_RDONLY);
    struct stat st;
    if (piece <= 0 || gap < 0 || !buffer || fd < 0 || fstat(fd, &st) != 0) {
        perror(argv[1]);
        return 1;
    }
    unsigned long sum = 0;
    for (off_t at = 0; at < st.st_size; at += piece + gap) {
        ssize_t n = pread(fd, buffer, (size_t)piece, at);
        if (n < 0) {
            perror(argv[1]);
            return 1;
        }
        for (ssize_t i = 0; i < n; i += 4096)
            sum = sum * 31 + buffer[i];
        double end = now_s() + compute_s;
        while (now_s() < end)
            ;
    }
    printf("%lu\n", sum);
    return 0;
}
