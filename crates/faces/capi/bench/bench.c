/* What the library costs, measured from C: requests per second, cost per request, latency, idle CPU.
 * `make bench-capi` builds and runs it. Arguments: seconds per measurement (default 1), then names of policies (all).
 *
 * Two arrangements:
 *   inline   one thread submits, gets callbacks on the same thread and completes what its device of 32 places finished;
 *            with two threads, both do.
 *   threads  submitting threads only submit; the library's own thread runs the callbacks, which complete at once.
 * The number of requests that wait in the scheduler is held where the table says. */
#define _GNU_SOURCE
#include <impresario.h>

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define LANES 4
#define DEPTH 32
#define LEN 4096
#define POLICIES_MAX 64

static double measure_s = 1.0;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

static void die(const char *what) {
    fprintf(stderr, "bench: %s: %s\n", what, impresario_last_error());
    exit(1);
}

/* ---- the load ---- */

struct load {
    impresario_t *scheduler;
    uint32_t files;
    int streams;      /* neighbours touch, so that policies may aggregate; else no two touch */
    int inline_calls;
    uint32_t pending; /* requests to keep in the scheduler */
    atomic_uint_fast64_t submitted, completed;
    atomic_int stop;
};

/* A device that finishes in order. Every submitting thread has one; what other threads get goes to a shared one. It has
 * room for all that is pending: the policy `none` hands everything over at once. */
#define PLACES (1u << 17)
struct device {
    struct {
        uint64_t batch, len;
        uint32_t count;
    } place[PLACES];
    uint32_t head, tail;
};

static _Thread_local struct device *mine;
static _Thread_local int submits;
static struct device shared;
static pthread_mutex_t shared_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint shared_count;

static void put(struct device *d, const impresario_batch_t *batch) {
    uint32_t at = d->head++ % PLACES;
    d->place[at].batch = batch->id;
    d->place[at].len = batch->len;
    d->place[at].count = batch->count;
}

static void finish(struct load *load, const impresario_batch_t *batch) {
    uint32_t count = batch->count;
    if (impresario_complete(load->scheduler, batch->id, 0, batch->len)) die("complete");
    atomic_fetch_add_explicit(&load->completed, count, memory_order_relaxed);
}

static void on_batch(void *arg, impresario_t *scheduler, const impresario_batch_t *batch) {
    struct load *load = arg;
    (void)scheduler;
    if (!load->inline_calls) {
        finish(load, batch);
    } else if (submits) {
        put(mine, batch);
    } else {
        pthread_mutex_lock(&shared_lock);
        put(&shared, batch);
        pthread_mutex_unlock(&shared_lock);
        atomic_fetch_add(&shared_count, 1);
    }
}

/* Completes the oldest; 0 when there is none. */
static int complete_one(struct load *load) {
    uint64_t batch, len;
    uint32_t count;
    if (atomic_load_explicit(&shared_count, memory_order_relaxed) > 0) {
        pthread_mutex_lock(&shared_lock);
        int there = shared.head != shared.tail;
        uint32_t at = there ? shared.tail++ % PLACES : 0;
        batch = shared.place[at].batch, len = shared.place[at].len, count = shared.place[at].count;
        pthread_mutex_unlock(&shared_lock);
        if (!there) return 0;
        atomic_fetch_sub(&shared_count, 1);
    } else {
        if (mine->head == mine->tail) return 0;
        uint32_t at = mine->tail++ % PLACES;
        batch = mine->place[at].batch, len = mine->place[at].len, count = mine->place[at].count;
    }
    if (impresario_complete(load->scheduler, batch, 0, len)) die("complete");
    atomic_fetch_add_explicit(&load->completed, count, memory_order_relaxed);
    return 1;
}

struct source {
    struct load *load;
    uint64_t seed, first_offset;
    uint64_t *next; /* per file */
};

static void submit_one(struct source *s) {
    impresario_submission_t sub = IMPRESARIO_SUBMISSION_INIT;
    s->seed = s->seed * 6364136223846793005u + 1442695040888963407u;
    uint32_t file = (uint32_t)((s->seed >> 33) % s->load->files);
    sub.file = file;
    sub.offset = s->first_offset + s->next[file]++ * (s->load->streams ? LEN : 2 * LEN);
    sub.len = LEN;
    sub.op = file % 3 == 0 ? IMPRESARIO_WRITE : IMPRESARIO_READ;
    sub.lane = file % LANES;
    sub.client = file % 32;
    sub.job = file % 8;
    sub.connection = file % 32;
    if (impresario_submit(s->load->scheduler, &sub, NULL)) die("submit");
    atomic_fetch_add_explicit(&s->load->submitted, 1, memory_order_relaxed);
}

static struct source source(struct load *load, unsigned number) {
    struct source s = { load, number + 1, (uint64_t)number << 44, calloc(load->files, sizeof(uint64_t)) };
    if (!s.next) die("memory");
    return s;
}

static uint64_t waiting(struct load *load) {
    return atomic_load_explicit(&load->submitted, memory_order_relaxed) -
           atomic_load_explicit(&load->completed, memory_order_relaxed);
}

struct submitter {
    struct load *load;
    unsigned number;
};

static void *submitter(void *arg) {
    struct submitter *me = arg;
    struct load *load = me->load;
    struct source s = source(load, me->number);
    submits = 1;
    mine = calloc(1, sizeof *mine);
    if (!mine) die("memory");
    while (!atomic_load_explicit(&load->stop, memory_order_relaxed)) {
        for (int i = 0; i < 64; i++) {
            if (load->inline_calls) {
                /* resubmit as many as were completed */
                if (waiting(load) < load->pending) submit_one(&s);
                complete_one(load);
            } else if (waiting(load) < load->pending) {
                submit_one(&s);
            } else {
                sched_yield();
            }
        }
    }
    while (complete_one(load)) {}
    free(mine);
    free(s.next);
    return NULL;
}

struct result {
    double per_s, wall_ns, cpu_ns;
};

static struct result run(const char *policy, uint32_t files, uint32_t pending, unsigned threads, int inline_calls, int streams) {
    struct load *load = calloc(1, sizeof *load);
    impresario_options_t options = IMPRESARIO_OPTIONS_INIT;
    options.policy = policy;
    options.on_batch = on_batch;
    options.arg = load;
    options.lanes = LANES;
    options.shared_space = 1;
    options.lane_requests = DEPTH;
    options.queue_requests = pending + 1000;
    options.dispatch_threads = inline_calls ? IMPRESARIO_INLINE : 1;
    load->files = files;
    load->streams = streams;
    load->inline_calls = inline_calls;
    load->pending = pending;
    load->scheduler = impresario_create(&options);
    if (!load->scheduler) die(policy);
    /* fill while nothing may go, so that the measurement starts with everything pending */
    for (uint32_t lane = 0; lane < LANES; lane++)
        if (impresario_hold(load->scheduler, lane, 60000000)) die("hold");
    struct source filler = source(load, 100);
    for (uint32_t i = 0; i < pending; i++) submit_one(&filler);
    free(filler.next);
    for (uint32_t lane = 0; lane < LANES; lane++)
        if (impresario_hold(load->scheduler, lane, 0)) die("hold");

    pthread_t all[8];
    struct submitter who[8];
    for (unsigned t = 0; t < threads; t++) {
        who[t] = (struct submitter){ load, t };
        pthread_create(&all[t], NULL, submitter, &who[t]);
    }
    usleep(100000); /* warm */
    uint64_t from = atomic_load(&load->completed), begin = now_ns();
    double cpu = cpu_s();
    usleep((useconds_t)(measure_s * 1e6));
    uint64_t done = atomic_load(&load->completed) - from;
    double wall = (double)(now_ns() - begin);
    cpu = cpu_s() - cpu;
    atomic_store(&load->stop, 1);
    for (unsigned t = 0; t < threads; t++) pthread_join(all[t], NULL);
    if (impresario_destroy(load->scheduler, 0, NULL, NULL)) die("destroy");
    shared.head = shared.tail = 0;
    atomic_store(&shared_count, 0);
    free(load);
    struct result r = { (double)done / wall * 1e9, wall / (double)(done ? done : 1), cpu * 1e9 / (double)(done ? done : 1) };
    return r;
}

/* ---- latency ---- */

#define ROUNDS 20000

struct latency {
    impresario_t *scheduler;
    _Atomic uint64_t called;
};

static void on_single(void *arg, impresario_t *scheduler, const impresario_batch_t *batch) {
    struct latency *l = arg;
    uint64_t at = now_ns(), id = batch->id, len = batch->len;
    impresario_complete(scheduler, id, 0, len);
    atomic_store(&l->called, at);
}

static int by_number(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* The way through an idle scheduler: 0 inline, 1 the library's thread, 2 polled by the thread that submits. */
static void latency(const char *policy, int way, double *p50_us, double *p99_us) {
    struct latency l = { NULL, 0 };
    impresario_options_t options = IMPRESARIO_OPTIONS_INIT;
    options.policy = policy;
    options.lanes = LANES;
    options.shared_space = 1;
    if (way != 2) {
        options.on_batch = on_single;
        options.arg = &l;
        options.dispatch_threads = way == 0 ? IMPRESARIO_INLINE : 1;
    }
    l.scheduler = impresario_create(&options);
    if (!l.scheduler) die(policy);
    static uint64_t took[ROUNDS];
    int rounds = strcmp(policy, "twins") ? (way == 1 ? ROUNDS / 10 : ROUNDS) : 200;
    for (int i = 0; i < rounds; i++) {
        impresario_submission_t sub = IMPRESARIO_SUBMISSION_INIT;
        sub.file = (uint64_t)i % 64;
        sub.offset = (uint64_t)i * 65536;
        sub.len = LEN;
        if (way == 1) usleep(200); /* let the library's thread sleep */
        atomic_store(&l.called, 0);
        uint64_t begin = now_ns();
        if (impresario_submit(l.scheduler, &sub, NULL)) die("submit");
        if (way == 2) {
            const impresario_batch_t *batch;
            if (impresario_next(l.scheduler, 1000000, &batch)) die("next");
            took[i] = now_ns() - begin;
            if (impresario_complete(l.scheduler, batch->id, 0, batch->len)) die("complete");
        } else {
            while (!atomic_load(&l.called)) {}
            took[i] = atomic_load(&l.called) - begin;
        }
    }
    qsort(took, (size_t)rounds, sizeof took[0], by_number);
    *p50_us = (double)took[rounds / 2] / 1000;
    *p99_us = (double)took[rounds * 99 / 100] / 1000;
    if (impresario_destroy(l.scheduler, 1000, NULL, NULL)) die("destroy");
}

/* ---- verdicts ---- */

static int unmet;

static const char *verdict(int holds) {
    if (!holds) unmet++;
    return holds ? "holds" : "DOES NOT HOLD";
}

static int fifo_like(const char *policy) {
    return !strcmp(policy, "none") || !strcmp(policy, "fifo") || !strcmp(policy, "to");
}

int main(int argc, char **argv) {
    const char *policies[POLICIES_MAX];
    size_t count = 0;
    if (argc > 1) measure_s = atof(argv[1]);
    if (measure_s <= 0) measure_s = 1;
    for (int i = 2; i < argc && count < POLICIES_MAX; i++) policies[count++] = argv[i];
    impresario_policy_info_t info = { sizeof info, 0, 0, 0, 0 };
    if (!count)
        for (size_t i = 0; count < POLICIES_MAX && impresario_policy(i, &info) == 0; i++) policies[count++] = info.name;
    printf("libimpresario %s, %ld processors, %.1f s a measurement, %d lanes of %d batches, reads and writes of %d bytes\n",
           impresario_version(), sysconf(_SC_NPROCESSORS_ONLN), measure_s, LANES, DEPTH, LEN);

    printf("\nRequests per second, end to end (submit, callback, complete), 64 files, 10,000 pending\n");
    printf("%-10s %-8s %14s %14s %14s %14s\n", "policy", "requests", "inline 1", "inline 2", "threads 1", "threads 2");
    for (size_t p = 0; p < count; p++) {
        for (int streams = 0; streams < 2; streams++) {
            double best = 0;
            printf("%-10s %-8s", policies[p], streams ? "streams" : "apart");
            for (int i = 0; i < 4; i++) {
                struct result r = run(policies[p], 64, 10000, i % 2 ? 2 : 1, i < 2, streams);
                if (r.per_s > best) best = r.per_s;
                printf(" %14.0f", r.per_s);
                fflush(stdout);
            }
            double goal = fifo_like(policies[p]) ? 2e6 : 1e6;
            printf("   best at least %.0f M/s: %s\n", goal / 1e6, strcmp(policies[p], "twins") ? verdict(best >= goal) : "bound by its windows");
        }
    }

    printf("\nCPU per request, ns (inline, 1 thread, requests apart)\n");
    printf("%-10s %10s %10s %10s %10s %10s\n", "policy", "1k/64", "10k/64", "100k/64", "10k/10", "10k/1k");
    printf("%-10s %s\n", "", "(pending/files; then 10k/10k)");
    for (size_t p = 0; p < count; p++) {
        static const uint32_t pending[6] = { 1000, 10000, 100000, 10000, 10000, 10000 };
        static const uint32_t files[6] = { 64, 64, 64, 10, 1000, 10000 };
        double ns[6];
        printf("%-10s", policies[p]);
        for (int i = 0; i < 6; i++) {
            ns[i] = run(policies[p], files[i], pending[i], 1, 1, 0).cpu_ns;
            printf(" %10.0f", ns[i]);
            fflush(stdout);
        }
        printf("   1k to 100k pending: x%.2f, 10 to 10k files: x%.2f, at most x2: %s\n", ns[2] / ns[0], ns[5] / ns[3],
               verdict(ns[2] <= 2 * ns[0] && ns[5] <= 2 * ns[3]));
    }

    printf("\nA single request through an idle scheduler, us (median / 99th percentile)\n");
    printf("%-10s %18s %18s %18s\n", "policy", "inline", "library's thread", "polled");
    for (size_t p = 0; p < count; p++) {
        double p50[3], p99[3];
        printf("%-10s", policies[p]);
        for (int way = 0; way < 3; way++) {
            latency(policies[p], way, &p50[way], &p99[way]);
            printf(" %9.2f / %-7.1f", p50[way], p99[way]);
            fflush(stdout);
        }
        printf("   median under 10 us: %s\n", strcmp(policies[p], "twins") ? verdict(p50[0] < 10 && p50[2] < 10) : "the rest of its window");
    }

    impresario_options_t options = IMPRESARIO_OPTIONS_INIT;
    struct latency l = { NULL, 0 };
    options.on_batch = on_single;
    options.arg = &l;
    impresario_t *idle = impresario_create(&options);
    if (!idle) die("idle");
    double cpu = cpu_s();
    sleep(2);
    double share = (cpu_s() - cpu) / 2 * 100;
    impresario_destroy(idle, 0, NULL, NULL);
    printf("\nIdle: %.3f %% of a processor over 2 s, at most 0.1: %s\n", share, verdict(share <= 0.1));
    printf("\n%d of the targets do not hold\n", unmet);
    return unmet ? 1 : 0;
}
