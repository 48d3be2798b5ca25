/* What the library costs, counted: `costs idle CONFIG` time and switches of its threads while there is nothing to do, before and
 * after a load; `costs steady CONFIG` allocations for 20,000 requests, while as many wait as always. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <unistd.h>

/* The library's calls come here, too. */
static atomic_long allocations;

void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);

void *malloc(size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, bytes);
}

int posix_memalign(void **at, size_t alignment, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    *at = __libc_memalign(alignment, bytes);
    return *at ? 0 : ENOMEM;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, bytes);
}

#define FILES 64
#define WAITING 500
#define QUEUES 4

static char names[FILES][16];
#define STEADY 20000

static atomic_long done, added;
/* Allocations when STEADY requests were served, and when twice as many were. */
static long allocated[3];
static long wanted;
static bool direct;

static void add(long n) {
    CHECK(agios_add_request(names[n % FILES], RT_READ, n / FILES * 32768, 16384, n, (int32_t)(n / 7 % QUEUES)));
}

static void release(long n) { CHECK(agios_release_request(names[n % FILES], RT_READ, 16384, n / FILES * 32768)); }

static void *serve(int64_t n) {
    if (!direct) {
        release(n);
        long next = atomic_fetch_add(&added, 1);
        if (next < wanted) add(next);
    }
    long count = atomic_fetch_add(&done, 1);
    if (count % STEADY == 0 && count / STEADY < 3) allocated[count / STEADY] = atomic_load(&allocations);
    return NULL;
}

/* This many requests, with WAITING of them there all the time. */
static void serve_all(long count) {
    atomic_store(&done, 0);
    atomic_store(&added, WAITING);
    wanted = count;
    if (direct) {
        for (long n = 0; n < count; n++) add(n), release(n);
    } else {
        for (long n = 0; n < WAITING; n++) add(n);
    }
    for (int i = 0; i < 30000 && atomic_load(&done) < count; i++) sleep_ms(1);
    CHECK(atomic_load(&done) == count);
}

/* Nanoseconds that all threads but this one have run, and how often they have gone to sleep or were made to. */
static void used(long long *ran_ns, long *switches) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    *ran_ns = *switches = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        long tid = atol(task->d_name);
        if (!tid || tid == getpid()) continue;
        char path[64], line[200];
        long long ran;
        snprintf(path, sizeof path, "/proc/self/task/%ld/schedstat", tid);
        FILE *f = fopen(path, "r");
        CHECK(f && fscanf(f, "%lld", &ran) == 1);
        fclose(f);
        *ran_ns += ran;
        snprintf(path, sizeof path, "/proc/self/task/%ld/status", tid);
        CHECK((f = fopen(path, "r")));
        while (fgets(line, sizeof line, f)) {
            char *number = strstr(line, "voluntary_ctxt_switches:");
            if (number) *switches += atol(number + strlen("voluntary_ctxt_switches:"));
        }
        fclose(f);
    }
    closedir(tasks);
}

/* Once there was nothing to do for a while, the library's threads do not run at all. A busy machine may not let a thread run that
 * still has something to do, which looks as if it slept: so some runs of it are forgiven, but no library that polls is ever idle. */
static void check_idle(const char *when) {
    long long before, after;
    long slept, woken;
    used(&after, &woken);
    for (int i = 0; i < 10; i++) {
        before = after, slept = woken;
        sleep_ms(2000);
        used(&after, &woken);
        if (before == after && slept == woken) break;
    }
    if (before != after || slept != woken)
        fprintf(stderr, "%s: ran %lld ns with %ld switches in 2 idle seconds\n", when, after - before, woken - slept);
    CHECK(before == after && slept == woken);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    for (int i = 0; i < FILES; i++) snprintf(names[i], sizeof names[i], "/file/%03d", i);
    direct = strstr(argv[2], "NOOP") != NULL;
    FILE *weights = fopen("weights.conf", "w");
    CHECK(weights);
    for (int i = 0; i < QUEUES; i++) fprintf(weights, "16384 ");
    fclose(weights);
    CHECK(agios_init(serve, NULL, config(argv[2]), QUEUES));
    if (!strcmp(argv[1], "idle")) {
        check_idle("before a load");
        serve_all(5000);
        check_idle("after a load");
    } else {
        serve_all(2 * STEADY + 2 * WAITING);
        printf("%ld\n", allocated[2] - allocated[1]);
    }
    agios_exit();
    return 0;
}
