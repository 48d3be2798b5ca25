/* The ends of what may happen: ending while callbacks run on threads of the program, several that end it at once, signals,
 * offsets on a device, callbacks that call back, files that are none. One case a name, or all. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_int entered, blocked, served;

static impresario_t *make(impresario_request_fn one, impresario_batch_fn many, uint32_t threads) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.on_request = one;
    o.on_batch = many;
    o.dispatch_threads = threads;
    o.policy = "mlf";
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    atomic_store(&entered, 0);
    atomic_store(&served, 0);
    return s;
}

static void *one_submit(void *s) {
    impresario_submission_t sub = read_of(1, 0, 4096, 0);
    CHECK(impresario_submit(s, &sub, NULL) == 0);
    return NULL;
}

static void on_blocked(void *arg, impresario_t *s, const impresario_batch_t *b) {
    (void)arg;
    atomic_store(&entered, 1);
    while (atomic_load(&blocked)) sleep_ms(1);
    impresario_complete(s, b->id, 0, b->len); /* an error when the scheduler was closed meanwhile */
    atomic_store(&served, 1);
}

static void enter_blocked(impresario_t *s, pthread_t *t) {
    atomic_store(&blocked, 1);
    CHECK(pthread_create(t, NULL, one_submit, s) == 0);
    while (!atomic_load(&entered)) sleep_ms(1);
}

/* A callback on a thread of the program is a callback: its end is waited for, or reported as missing. */
static void inline_ending(void) {
    impresario_t *s = make(NULL, on_blocked, IMPRESARIO_INLINE);
    pthread_t t;
    enter_blocked(s, &t);
    CHECK(impresario_destroy(s, 0, NULL, NULL) == -EBUSY);
    CHECK(!atomic_load(&served));
    atomic_store(&blocked, 0);
    CHECK(impresario_destroy(s, 1000, NULL, NULL) == 0);
    CHECK(atomic_load(&served)); /* what the callback uses may be freed now */
    pthread_join(t, NULL);
}

static void *destroys(void *s) { return (void *)(intptr_t)impresario_destroy(s, 0, NULL, NULL); }

/* Of several concurrent destroys none returns success while a callback runs. */
static void ended_by_several(void) {
    impresario_t *s = make(NULL, on_blocked, 1);
    pthread_t t, ending[2];
    enter_blocked(s, &t);
    for (int i = 0; i < 2; i++) CHECK(pthread_create(&ending[i], NULL, destroys, s) == 0);
    for (int i = 0; i < 2; i++) {
        void *result;
        pthread_join(ending[i], &result);
        CHECK((intptr_t)result == -EBUSY);
    }
    atomic_store(&blocked, 0);
    CHECK(impresario_destroy(s, 1000, NULL, NULL) == 0);
    CHECK(atomic_load(&served));
    pthread_join(t, NULL);
}

static atomic_int signals;
static void on_signal(int number) { (void)number, atomic_fetch_add(&signals, 1); }

/* A signal that the program's threads block waits for them; the library's threads do not take it. */
static void signals_are_the_programs(void) {
    impresario_t *s = make(NULL, on_blocked, 2);
    sigset_t set, before, after;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    signal(SIGUSR1, on_signal);
    CHECK(pthread_sigmask(SIG_BLOCK, &set, &before) == 0);
    CHECK(!sigismember(&before, SIGUSR1) && !sigismember(&before, SIGTERM)); /* creating left the mask as it was */
    CHECK(kill(getpid(), SIGUSR1) == 0);
    sleep_ms(50);
    CHECK(atomic_load(&signals) == 0);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &set, NULL) == 0);
    CHECK(atomic_load(&signals) == 1);
    CHECK(pthread_sigmask(SIG_BLOCK, NULL, &after) == 0 && !sigismember(&after, SIGUSR1));
    CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
}

/* Neighbours on the device that lie apart in the file are one batch, and its bytes belong to its requests. */
static void on_the_device(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.policy = "mlf";
    impresario_t *s = impresario_create(&o);
    CHECK(s && impresario_hold(s, 0, 60000000) == 0);
    for (uint64_t i = 0; i < 4; i++) {
        impresario_submission_t sub = read_of(1, i * 65536, 4096, i);
        sub.flags = IMPRESARIO_LANE_OFFSET;
        sub.lane_offset = 1000000 + i * 4096;
        CHECK(impresario_submit(s, &sub, NULL) == 0);
    }
    CHECK(impresario_hold(s, 0, 0) == 0);
    const impresario_batch_t *b;
    CHECK(impresario_next(s, 1000000, &b) == 0);
    CHECK(b->count == 4 && b->len == 4 * 4096 && b->lane_offset == 1000000 && b->offset == 0);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK(b->requests[i].offset == i * 65536u && b->requests[i].lane_offset == 1000000 + i * 4096u);
        CHECK(impresario_request_bytes(b, i, b->len) == 4096);
    }
    CHECK(impresario_request_bytes(b, 1, 5000) == 5000 - 4096 && impresario_request_bytes(b, 2, 5000) == 0);
    /* The batch and its number may lie anywhere in the program's memory. */
    struct __attribute__((packed)) { char odd; impresario_request_t r; } copy = { 0, b->requests[0] };
    void *odd = (char *)&copy + 1;
    CHECK(impresario_complete_request(s, odd, 0, 4096) == 0);
    CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
}

/* Barriers as far as numbers go. */
static void furthest(void) {
    impresario_t *s = impresario_create(NULL);
    CHECK(s);
    static const uint64_t offsets[] = { 0, 1, 1ull << 63, UINT64_MAX - 1, UINT64_MAX };
    uint32_t sent = 0, got = 0;
    for (uint32_t op = IMPRESARIO_SYNC; op <= IMPRESARIO_UNLINK; op++)
        for (int i = 0; i < 5; i++)
            for (int j = 0; j < 5; j++) {
                impresario_submission_t sub = read_of(op, offsets[i], offsets[j], 0);
                sub.op = op;
                CHECK(impresario_submit(s, &sub, NULL) == 0);
                sent++;
            }
    const impresario_batch_t *b;
    while (impresario_next(s, 100000, &b) == 0) {
        got += b->count;
        CHECK(impresario_complete_timed(s, b->id, 0, UINT64_MAX, 1, UINT64_MAX) == 0);
    }
    CHECK(got == sent);
    CHECK(impresario_hold(s, 0, UINT64_MAX) == 0 && impresario_hold(s, 0, 0) == 0);
    CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
}

#define LONGEST (1ull << 43)

/* Reads and writes as long as numbers go, under every policy that takes one lane: sums of bytes stay sums. */
static void longest(void) {
    impresario_policy_info_t info = { .size = sizeof info };
    for (size_t p = 0; impresario_policy(p, &info) == 0; p++) {
        impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
        o.policy = info.name;
        o.lane_requests = 2;
        impresario_t *s = impresario_create(&o);
        if (!s) continue;
        for (uint64_t i = 0; i < 6; i++) {
            impresario_submission_t sub = read_of(i / 3, i % 3 ? UINT64_MAX - (LONGEST * (i % 3)) - 1 : 0, LONGEST, 0);
            sub.op = i % 2 ? IMPRESARIO_WRITE : IMPRESARIO_READ;
            sub.job = i;
            CHECK(impresario_submit(s, &sub, NULL) == 0);
        }
        impresario_submission_t longer = read_of(1, 0, LONGEST + 1, 0);
        CHECK(impresario_submit(s, &longer, NULL) == -EINVAL);
        CHECK_SAYS("8796093022208: divide");
        const impresario_batch_t *b;
        uint32_t got = 0;
        while (got < 6 && impresario_next(s, 300000, &b) == 0) {
            got += b->count;
            CHECK(impresario_complete(s, b->id, 0, b->len) == 0);
        }
        /* Policies that pace bytes may rightly keep such requests for years. */
        impresario_submission_t small = read_of(77, 0, 1, 0);
        CHECK(impresario_submit(s, &small, NULL) == 0);
        CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
    }
}

static void no_token(void *arg, uint64_t token) { (void)arg, (void)token; }

/* Everything is called from a callback, before and after the batch is complete. */
static void on_busy(void *arg, impresario_t *s, const impresario_request_t *r) {
    (void)arg;
    for (int after = 0; after < 2; after++) {
        uint64_t id;
        impresario_stats_t stats = { .size = sizeof stats };
        char json[16];
        impresario_submission_t sub = read_of(2, 1000000 + r->token * 10000, 10, 0);
        CHECK(impresario_hold(s, 0, 60000000) == 0);
        CHECK(impresario_submit(s, &sub, &id) == 0 && impresario_cancel(s, id, NULL) == 0);
        CHECK(impresario_submit(s, &sub, &id) == 0 && impresario_cancel_connection(s, 0, no_token, NULL) >= 1);
        CHECK(impresario_hold(s, 0, 0) == 0);
        CHECK(impresario_set_policy(s, r->token % 2 ? "fifo" : "mlf") == 0);
        CHECK(impresario_stats(s, &stats) == 0 && impresario_stats_json(s, json, sizeof json) > 15);
        CHECK(impresario_ready(s, 1, 1) == 0 && impresario_reset_stats(s) == 0);
        CHECK(impresario_destroy(s, 0, NULL, NULL) == -EDEADLK);
        impresario_t *other = impresario_create(NULL);
        CHECK(other && impresario_destroy(other, 0, NULL, NULL) == 0);
        if (!after) CHECK(impresario_complete_request(s, r, 0, r->len) == 0);
    }
    if (r->token > 0) { /* the next one, so that submitting nests */
        impresario_submission_t next = read_of(1, r->token * 100000, 4096, r->token - 1);
        next.connection = 7;
        CHECK(impresario_submit(s, &next, NULL) == 0);
    }
    atomic_fetch_add(&served, 1);
}

static void calls_from_callbacks(void) {
    for (int again = 0; again < 2; again++) {
        impresario_t *s = make(on_busy, NULL, again ? IMPRESARIO_INLINE : 1);
        impresario_submission_t first = read_of(1, 0, 4096, 49);
        first.connection = 7;
        CHECK(impresario_submit(s, &first, NULL) == 0);
        for (int i = 0; i < 10000 && atomic_load(&served) < 50; i++) sleep_ms(1);
        CHECK(atomic_load(&served) == 50);
        CHECK(impresario_destroy(s, 1000, NULL, NULL) == 0);
    }
}

/* What is no file is refused at once, and is not read for ever. */
static void no_files(void) {
    char pipe_name[] = "edges-XXXXXX";
    CHECK(mkdtemp(pipe_name) != NULL);
    char name[64];
    snprintf(name, sizeof name, "%s/pipe", pipe_name);
    CHECK(mkfifo(name, 0600) == 0);
    const char *refused[] = { "/dev/zero", "/tmp", name };
    for (int i = 0; i < 3; i++) {
        CHECK(impresario_create_from_file(refused[i], NULL) == NULL);
        CHECK_SAYS("not a regular file");
        CHECK_SAYS(refused[i]);
    }
    CHECK(impresario_create_from_file("/nonexistent.toml", NULL) == NULL);
    CHECK_SAYS("/nonexistent.toml cannot be read");
    unlink(name);
    rmdir(pipe_name);
}

/* A greater depth lets waiting batches go at once; after a smaller one new batches wait until there are fewer. */
static void depth_changes(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.lane_requests = 1;
    impresario_t *s = impresario_create(&o);
    const impresario_batch_t *b[3], *none;
    CHECK(s);
    for (uint64_t i = 0; i < 3; i++) {
        impresario_submission_t sub = read_of(1, i * 1000000, 1000, i);
        CHECK(impresario_submit(s, &sub, NULL) == 0);
    }
    CHECK(impresario_next(s, 1000000, &b[0]) == 0 && impresario_next(s, 0, &none) == -ETIMEDOUT);
    CHECK(impresario_set_depth(s, 2, 0) == 0);
    CHECK(impresario_next(s, 1000000, &b[1]) == 0 && impresario_next(s, 0, &none) == -ETIMEDOUT);
    CHECK(impresario_set_depth(s, 1, 0) == 0 && impresario_complete(s, b[0]->id, 0, 1000) == 0);
    CHECK(impresario_next(s, 0, &none) == -ETIMEDOUT); /* one is still there */
    CHECK(impresario_set_depth(s, 8, 1000) == 0);
    CHECK(impresario_next(s, 0, &none) == -ETIMEDOUT); /* its bytes are the limit now */
    CHECK(impresario_set_depth(s, 0, 1001) == 0);
    CHECK(impresario_next(s, 1000000, &b[2]) == 0 && b[2]->requests[0].token == 2);
    CHECK(impresario_complete(s, b[1]->id, 0, 1000) == 0 && impresario_complete(s, b[2]->id, 0, 1000) == 0);
    CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    { "inline_ending", inline_ending }, { "ended_by_several", ended_by_several },
    { "signals", signals_are_the_programs }, { "on_the_device", on_the_device }, { "furthest", furthest },
    { "longest", longest },
    { "calls_from_callbacks", calls_from_callbacks }, { "no_files", no_files },
    { "depth_changes", depth_changes },
};

int main(int argc, char **argv) {
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (argc == 1 || !strcmp(argv[1], cases[i].name)) cases[i].run();
    puts("ok");
    return 0;
}
