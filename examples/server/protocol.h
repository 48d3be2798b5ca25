/* The protocol of client and server: a header, then data. Both have the same byte order: no swapping. */
#ifndef PROTOCOL_H
#define PROTOCOL_H

#include <errno.h>
#include <stdint.h>
#include <sys/types.h>
#include <unistd.h>

#define LEN_MAX (1u << 20)

struct ask { /* followed by len bytes when op is IMPRESARIO_WRITE */
    uint32_t op;  /* as in impresario.h */
    uint32_t len; /* at most LEN_MAX */
    uint64_t file;
    uint64_t offset;
    uint64_t tag; /* comes back */
};

struct answer { /* followed by len bytes when a read succeeded */
    uint64_t tag;
    int32_t error; /* 0 or an errno */
    uint32_t len;
};

/* The whole length, or 0 at the end of the stream, or -1. */
static inline int read_all(int fd, void *to, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t n = read(fd, (char *)to + done, len - done);
        if (n == 0) return 0;
        if (n < 0 && errno != EINTR) return -1;
        if (n > 0) done += (size_t)n;
    }
    return 1;
}

static inline int write_all(int fd, const void *from, size_t len) {
    for (size_t done = 0; done < len;) {
        ssize_t n = write(fd, (const char *)from + done, len - done);
        if (n < 0 && errno != EINTR) return -1;
        if (n > 0) done += (size_t)n;
    }
    return 1;
}

#endif
