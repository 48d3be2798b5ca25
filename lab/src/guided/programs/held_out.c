/* Reads a file in one of five ways: mmap, mmap-random, backward, strided, random. Prints a checksum. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t sum;

static void add(const unsigned char *bytes, size_t len) {
    for (size_t i = 0; i < len; i += 64) sum = sum * 31 + bytes[i];
}

static int piece(int fd, off_t at, size_t len) {
    static unsigned char buffer[1 << 20];
    ssize_t n = pread(fd, buffer, len, at);
    if (n < 0) return -1;
    add(buffer, (size_t)n);
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int fd = open(argv[2], O_RDONLY), bad = 0;
    /* XRootD's library for programs does not know every fstat. */
    off_t size = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    if (size < 0) return 1;
    uint64_t seed = 88172645463325252u;
    if (strncmp(argv[1], "mmap", 4) == 0) {
        const unsigned char *map = mmap(NULL, (size_t)size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (map == MAP_FAILED) return 1;
        if (strcmp(argv[1], "mmap") == 0) add(map, (size_t)size);
        for (int i = 0; argv[1][4] == '-' && i < 600; i++) {
            seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
            add(map + seed % (uint64_t)(size - 4096), 4096);
        }
    } else if (strcmp(argv[1], "backward") == 0) {
        for (off_t at = size - 65536; at >= 0 && !bad; at -= 65536) bad = piece(fd, at, 65536);
    } else if (strcmp(argv[1], "strided") == 0) {
        for (off_t at = 0; at < size && !bad; at += 150000) bad = piece(fd, at, 20000);
    } else {
        for (int i = 0; i < 600 && !bad; i++) {
            seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
            bad = piece(fd, (off_t)(seed % (uint64_t)(size - 8192)), 8192);
        }
    }
    printf("%llx\n", (unsigned long long)sum);
    return bad ? 1 : 0;
}
