/* For test programs: a check that fails says where, and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <impresario.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(what)                                                                                             \
    do {                                                                                                        \
        if (!(what)) {                                                                                          \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #what, impresario_last_error()); \
            exit(1);                                                                                            \
        }                                                                                                       \
    } while (0)

/* The last error is one line that has `part` in it. */
#define CHECK_SAYS(part)                                     \
    do {                                                     \
        CHECK(strstr(impresario_last_error(), part) != NULL); \
        CHECK(strchr(impresario_last_error(), '\n') == NULL); \
    } while (0)

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void sleep_ms(unsigned ms) {
    struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };
    nanosleep(&t, NULL);
}

static inline impresario_submission_t read_of(uint64_t file, uint64_t offset, uint64_t len, uint64_t token) {
    impresario_submission_t s = IMPRESARIO_SUBMISSION_INIT;
    s.file = file;
    s.offset = offset;
    s.len = len;
    s.token = token;
    return s;
}

#endif
