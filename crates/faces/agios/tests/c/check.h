/* For test programs: a check that fails says where, and ends the program. */
#ifndef CHECK_H
#define CHECK_H

#include <agios.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CHECK(what)                                                    \
    do {                                                               \
        if (!(what)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static inline void sleep_ms(unsigned ms) {
    struct timespec t = { ms / 1000, (long)(ms % 1000) * 1000000 };
    nanosleep(&t, NULL);
}

static inline double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* What callbacks noted. */
static int64_t seen[1024];
static atomic_int served, calls;
static atomic_int blocked;

static inline void note(int64_t id) {
    int n = atomic_load(&served);
    CHECK(n < 1024);
    seen[n] = id;
    atomic_store(&served, n + 1);
}

/* Waits at most 10 s until this many were served. */
static inline void wait_served(int count) {
    for (int i = 0; i < 10000 && atomic_load(&served) < count; i++) sleep_ms(1);
    CHECK(atomic_load(&served) == count);
}

static inline void start_over(void) {
    atomic_store(&served, 0);
    atomic_store(&calls, 0);
    atomic_store(&blocked, 0);
}

/* A configuration file with one key or more in it; the name stays valid until the next. */
static inline char *config(const char *keys) {
    static char name[] = "agios-test.conf";
    FILE *f = fopen(name, "w");
    CHECK(f && fprintf(f, "library_options:\n{\n%s\n};\n", keys) > 0 && fclose(f) == 0);
    return name;
}

#endif
