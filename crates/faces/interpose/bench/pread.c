/* Time of one warm 4 KiB pread, in nanoseconds: the median of several rounds. Usage: pread FILE ROUNDS READS */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static char buf[4096];
    if (argc != 4)
        return 2;
    int (*state)(void), rounds = atoi(argv[2]), reads = atoi(argv[3]);
    *(void **)&state = dlsym(RTLD_DEFAULT, "impresario_assist_state");
    for (int i = 0; state && getenv("EXPECT_MANAGER") && state() != 2 && i < 10000; i++)
        usleep(1000);
    int fd = open(argv[1], O_RDONLY);
    struct stat st;
    if (fd < 0 || fstat(fd, &st) || st.st_size < 8192 || rounds < 1 || rounds > 1000 || reads < 1)
        return 1;
    long blocks = st.st_size / 4096;
    for (long i = 0; i < blocks; i++)
        if (pread(fd, buf, sizeof buf, i * 4096) != sizeof buf)
            return 1;
    double times[1000];
    unsigned long at = 1;
    for (int r = 0; r < rounds; r++) {
        double begin = now_ns();
        for (int i = 0; i < reads; i++) {
            at = at * 6364136223846793005UL + 1442695040888963407UL;
            if (pread(fd, buf, sizeof buf, (at >> 33) % blocks * 4096) != sizeof buf)
                return 1;
        }
        times[r] = (now_ns() - begin) / reads;
        usleep(5000); /* until the manager has drained: with a full ring a read costs less */
    }
    qsort(times, rounds, sizeof *times, compare);
    printf("%.1f\n", times[rounds / 2]);
    return 0;
}
