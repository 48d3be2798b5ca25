/* mapped FILE: reads the first 4096 bytes by a call and one byte of each page through a memory map. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    static char head[4096];
    struct stat about;
    int fd = argc == 2 ? open(argv[1], O_RDONLY) : -1;
    if (fd < 0 || fstat(fd, &about) || read(fd, head, sizeof head) != sizeof head)
        return 1;
    const unsigned char *bytes = mmap(NULL, about.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (bytes == MAP_FAILED)
        return 1;
    unsigned long sum = 0;
    for (long at = 0; at < about.st_size; at += 4096)
        sum = sum * 31 + bytes[at];
    printf("%lu\n", sum);
    return 0;
}
