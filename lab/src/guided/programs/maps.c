/* Adds up a file through a memory map. How its pages come into the map's page table:
 *   plain    by faults, as ever;
 *   present  a thread goes ahead with MADV_POPULATE_READ, where the data are in memory already;
 *   fetch    the thread goes ahead whether they are in memory or not;
 *   first    all of it by one MADV_POPULATE_READ before the first touch. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#define WINDOW (2u << 20)
#define AHEAD (8 * (size_t)WINDOW)

static unsigned char *map;
static size_t size;
static _Atomic size_t at;
static int in_memory_only;

static int in_memory(unsigned char *place, size_t len) {
    static unsigned char pages[WINDOW / 4096];
    if (mincore(place, len, pages) != 0) return 0;
    for (size_t i = 0; i < (len + 4095) / 4096; i++)
        if (!(pages[i] & 1)) return 0;
    return 1;
}

static void *go_ahead(void *unused) {
    (void)unused;
    for (size_t next = 0; next < size;) {
        size_t here = atomic_load(&at), len = size - next < WINDOW ? size - next : WINDOW;
        if (next < here) {
            next = (here + WINDOW - 1) / WINDOW * WINDOW;
        } else if (next - here >= AHEAD || (in_memory_only && !in_memory(map + next, len))) {
            usleep(200);
        } else {
            madvise(map + next, len, MADV_POPULATE_READ);
            next += len;
        }
    }
    return NULL;
}

int main(int argc, char **argv) {
    struct stat st;
    if (argc != 3) return 2;
    int fd = open(argv[2], O_RDONLY);
    if (fd < 0 || fstat(fd, &st) != 0) return 1;
    size = (size_t)st.st_size;
    map = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) return 1;
    in_memory_only = strcmp(argv[1], "present") == 0;
    pthread_t thread;
    if (strcmp(argv[1], "first") == 0) {
        if (madvise(map, size, MADV_POPULATE_READ) != 0) return 3;
    } else if (strcmp(argv[1], "plain") != 0) {
        if (pthread_create(&thread, NULL, go_ahead, NULL) != 0) return 1;
    }
    uint64_t sum = 0;
    for (size_t from = 0; from < size; from += 4096) {
        size_t to = from + 4096 < size ? from + 4096 : size;
        for (size_t i = from; i + 8 <= to; i += 8) sum += *(const uint64_t *)(map + i);
        atomic_store_explicit(&at, to, memory_order_relaxed);
    }
    printf("%llx\n", (unsigned long long)sum);
    return 0;
}
