/* What the library promises, one case a name: `behave CASE…`; without names all of them. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* What callbacks noted. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t seen[4096];
static unsigned seen_count, seen_calls;
static atomic_int blocked;  /* a callback waits for `blocked` to become 0 */
static atomic_uint served;

static void note(uint64_t token) {
    CHECK(seen_count < 4096);
    seen[seen_count++] = token;
}

static void start_over(void) {
    pthread_mutex_lock(&lock);
    seen_count = seen_calls = 0;
    pthread_mutex_unlock(&lock);
    atomic_store(&served, 0);
}

static void on_request(void *arg, impresario_t *s, const impresario_request_t *r) {
    (void)arg;
    pthread_mutex_lock(&lock);
    note(r->token);
    seen_calls++;
    pthread_mutex_unlock(&lock);
    CHECK(impresario_complete_request(s, r, 0, r->len) == 0);
    atomic_fetch_add(&served, 1);
}

static void on_batch(void *arg, impresario_t *s, const impresario_batch_t *b) {
    (void)arg;
    uint32_t count = b->count;
    CHECK(count >= 1 && b->file == b->requests[0].file && b->offset == b->requests[0].offset);
    uint64_t end = b->offset;
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < count; i++) {
        const impresario_request_t *r = &b->requests[i];
        CHECK(r->batch == b->id && r->member == i && r->op == b->op && r->offset <= end);
        if (r->offset + r->len > end) end = r->offset + r->len;
        note(r->token);
    }
    seen_calls++;
    pthread_mutex_unlock(&lock);
    CHECK(end == b->offset + b->len);
    CHECK(impresario_complete(s, b->id, 0, b->len) == 0);
    atomic_fetch_add(&served, count);
}

/* Waits at most 10 s until this many were served. */
static void wait_served(unsigned count) {
    for (int i = 0; i < 10000 && atomic_load(&served) < count; i++) sleep_ms(1);
    CHECK(atomic_load(&served) == count);
}

static impresario_t *make(const char *policy, impresario_request_fn one, impresario_batch_fn many, uint32_t lanes,
                          uint32_t threads) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.policy = policy;
    o.on_request = one;
    o.on_batch = many;
    o.lanes = lanes;
    o.dispatch_threads = threads;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    start_over();
    return s;
}

static void end(impresario_t *s) { CHECK(impresario_destroy(s, 1000, NULL, NULL) == 0); }

static void submit(impresario_t *s, uint64_t file, uint64_t offset, uint64_t len, uint64_t token, uint32_t lane) {
    impresario_submission_t sub = read_of(file, offset, len, token);
    sub.lane = lane;
    CHECK(impresario_submit(s, &sub, NULL) == 0);
}

/* Sixteen neighbours, shuffled, while the lane is held. */
static void neighbours(impresario_t *s) {
    CHECK(impresario_hold(s, 0, 10000000) == 0);
    for (uint64_t i = 0; i < 16; i++) submit(s, 1, (i * 7 % 16) * 4096, 4096, i * 7 % 16, 0);
    CHECK(impresario_hold(s, 0, 0) == 0);
    wait_served(16);
    pthread_mutex_lock(&lock);
    for (uint64_t i = 0; i < 16; i++) CHECK(seen[i] == i);
    pthread_mutex_unlock(&lock);
}

/* Without a batch callback the members come one by one in order of offset. */
static void one_by_one(void) {
    impresario_t *s = make("mlf", on_request, NULL, 1, 0);
    neighbours(s);
    pthread_mutex_lock(&lock);
    CHECK(seen_calls == 16);
    pthread_mutex_unlock(&lock);
    impresario_stats_t stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    CHECK(impresario_stats(s, &stats) == 0);
    CHECK(stats.accepted == 16 && stats.completed == 16 && stats.batches == 1 && stats.failed == 0);
    CHECK(stats.read_bytes == 65536 && stats.requests_per_batch == 16 && stats.bytes_per_batch == 65536);
    CHECK(stats.queue_ns_max >= stats.queue_ns_p50 && stats.queued == 0 && stats.in_flight == 0);
    end(s);
}

static void batches(void) {
    impresario_t *s = make("mlf", on_request, on_batch, 1, 0);
    neighbours(s);
    pthread_mutex_lock(&lock);
    CHECK(seen_calls == 1); /* on_request was not called */
    pthread_mutex_unlock(&lock);
    end(s);
}

static void poll_case(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.policy = "mlf";
    o.lane_requests = 1;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    CHECK(impresario_hold(s, 0, 10000000) == 0);
    for (uint64_t i = 0; i < 8; i++) submit(s, 1, i * 4096, 4096, i, 0);
    submit(s, 2, 0, 100, 77, 0);
    const impresario_batch_t *b, *none;
    CHECK(impresario_next(s, 0, &b) == -ETIMEDOUT);
    CHECK(impresario_hold(s, 0, 0) == 0);
    CHECK(impresario_next(s, 1000000, &b) == 0);
    CHECK(b->count == 8 && b->len == 8 * 4096 && b->file == 1 && b->handed_ns <= now_ns());
    CHECK(impresario_request_bytes(b, 0, 5000) == 4096);
    CHECK(impresario_request_bytes(b, 1, 5000) == 904);
    CHECK(impresario_request_bytes(b, 2, 5000) == 0);
    CHECK(impresario_request_bytes(b, 9, 5000) == 0);
    CHECK(impresario_next(s, 1000, &none) == -ETIMEDOUT); /* one in flight is the limit */
    /* member by member, in any order; mixing is refused */
    for (uint32_t i = 8; i-- > 0;) {
        impresario_request_t copy = b->requests[i];
        uint64_t id = b->id;
        CHECK(impresario_complete_request(s, &copy, i == 3 ? EIO : 0, 4096) == 0);
        if (i == 7) CHECK(impresario_complete(s, id, 0, 0) == -EALREADY);
        if (i > 0) CHECK(impresario_complete_request(s, &copy, 0, 4096) == -EALREADY);
    }
    CHECK(impresario_next(s, -1, &b) == 0);
    CHECK(b->count == 1 && b->requests[0].token == 77);
    uint64_t at = now_ns();
    CHECK(impresario_complete_timed(s, b->id, 0, 100, at, at + 5000) == 0);
    impresario_stats_t stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    CHECK(impresario_stats(s, &stats) == 0);
    CHECK(stats.failed == 8 && stats.completed == 9);
    char json[8192], small[8];
    int need = impresario_stats_json(s, json, sizeof json);
    CHECK(need > 0 && (size_t)need == strlen(json) && strstr(json, "\"mlf\"") && json[need - 1] == '}');
    CHECK(impresario_stats_json(s, small, sizeof small) == need && strlen(small) == 7);
    CHECK(impresario_stats_json(s, NULL, 0) == need);
    CHECK(impresario_reset_stats(s) == 0 && impresario_stats(s, &stats) == 0 && stats.completed == 0);
    end(s);
}

static void *poll_until_end(void *arg) {
    const impresario_batch_t *b;
    CHECK(impresario_next(arg, -1, &b) == -ESHUTDOWN);
    return NULL;
}

static void poll_ends(void) {
    impresario_t *s = make("fifo", NULL, NULL, 1, 0);
    pthread_t t[2];
    for (int i = 0; i < 2; i++) pthread_create(&t[i], NULL, poll_until_end, s);
    sleep_ms(20);
    end(s);
    for (int i = 0; i < 2; i++) pthread_join(t[i], NULL);
}

static void gather(void *arg, uint64_t token) { *(uint64_t *)arg += token; }

static void cancel(void) {
    impresario_t *s = make("mlf", on_request, NULL, 1, 0);
    uint64_t id[4], token = 0, sum = 0;
    CHECK(impresario_hold(s, 0, 10000000) == 0);
    for (uint64_t i = 0; i < 4; i++) {
        impresario_submission_t sub = read_of(1, i * 8192, 4096, 100 + i);
        sub.connection = (uint32_t)(i / 2);
        CHECK(impresario_submit(s, &sub, &id[i]) == 0);
    }
    CHECK(impresario_cancel(s, id[1], &token) == 0 && token == 101);
    CHECK(impresario_cancel(s, id[1], &token) == -EINPROGRESS);
    CHECK(impresario_cancel_connection(s, 1, gather, &sum) == 2 && sum == 102 + 103);
    CHECK(impresario_cancel_connection(s, 1, gather, &sum) == 0);
    CHECK(impresario_hold(s, 0, 0) == 0);
    wait_served(1);
    pthread_mutex_lock(&lock);
    CHECK(seen[0] == 100);
    pthread_mutex_unlock(&lock);
    CHECK(impresario_cancel(s, id[0], NULL) == -EINPROGRESS);
    end(s);
}

/* Blocks on lane 0, and on others only while `blocked` is above 1. */
static void on_slow(void *arg, impresario_t *s, const impresario_request_t *r) {
    (void)arg;
    while (atomic_load(&blocked) > (r->lane == 0 ? 0 : 1)) sleep_ms(1);
    CHECK(impresario_complete_request(s, r, 0, r->len) == 0);
    atomic_fetch_add(&served, 1);
}

/* A callback that blocks delays no submitter and no other lane. */
static void slow(void) {
    impresario_t *s = make("fifo", on_slow, NULL, 4, 0);
    atomic_store(&blocked, 1);
    for (uint64_t i = 0; i < 10; i++) submit(s, 1, i * 8192, 4096, i, 0);
    sleep_ms(10);
    uint64_t begin = now_ns();
    for (uint64_t i = 0; i < 100; i++)
        for (uint32_t lane = 0; lane < 4; lane++) submit(s, 2 + lane, i * 8192, 4096, i, lane);
    CHECK(now_ns() - begin < 5000000000u);
    wait_served(300);
    atomic_store(&blocked, 0);
    wait_served(410);
    end(s);
}

/* With several threads for one lane, several of its callbacks run at a time. */
static void several_threads(void) {
    impresario_t *s = make("fifo", on_slow, NULL, 1, 3);
    atomic_store(&blocked, 1);
    submit(s, 1, 0, 1, 0, 0);
    submit(s, 1, 10, 1, 0, 0);
    submit(s, 1, 20, 1, 0, 0);
    sleep_ms(50);
    CHECK(atomic_load(&served) == 0);
    atomic_store(&blocked, 0);
    wait_served(3);
    end(s);
}

static void several_schedulers(void) {
    impresario_t *s[8];
    for (int i = 0; i < 8; i++) s[i] = make(i % 2 ? "mlf" : "fifo", on_request, NULL, 1, 0);
    for (uint64_t n = 0; n < 100; n++)
        for (int i = 0; i < 8; i++) submit(s[i], 1, n * 8192, 4096, n, 0);
    wait_served(800);
    for (int i = 0; i < 8; i++) {
        impresario_stats_t stats;
        memset(&stats, 0, sizeof stats);
        stats.size = sizeof stats;
        CHECK(impresario_stats(s[i], &stats) == 0 && stats.completed == 100);
        end(s[i]);
    }
}

/* ---- several threads, live switches ---- */

static atomic_uchar hits[4][5000];
static atomic_int busy;

static void on_counted(void *arg, impresario_t *s, const impresario_batch_t *b) {
    (void)arg;
    uint32_t count = b->count;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t token = b->requests[i].token;
        CHECK(atomic_fetch_add(&hits[token >> 32][token & 0xffffffff], 1) == 0);
    }
    CHECK(impresario_complete(s, b->id, 0, b->len) == 0);
    atomic_fetch_add(&served, count);
}

struct submitter {
    impresario_t *s;
    unsigned number;
};

static void *submit_many(void *arg) {
    struct submitter *me = arg;
    for (uint64_t i = 0; i < 5000; i++) {
        impresario_submission_t sub = read_of(i % 7, (i / 7) * 4096, 4096, (uint64_t)me->number << 32 | i);
        sub.op = i % 5 == 0 ? IMPRESARIO_WRITE : i % 997 == 0 ? IMPRESARIO_SYNC : IMPRESARIO_READ;
        sub.lane = (uint32_t)(i % 2);
        sub.job = sub.client = me->number;
        sub.connection = me->number;
        CHECK(impresario_submit(me->s, &sub, NULL) == 0);
    }
    return NULL;
}

static void *switch_policies(void *arg) {
    impresario_policy_info_t info = { sizeof info, NULL, NULL, NULL, 0 };
    for (size_t i = 0; atomic_load(&busy); i++) {
        if (impresario_policy(i, &info)) {
            i = (size_t)-1;
            continue;
        }
        if (!strcmp(info.name, "twins")) CHECK(impresario_set_policy(arg, "twins window_us=100") == 0);
        else CHECK(impresario_set_policy(arg, info.name) == 0);
        sleep_ms(1);
    }
    return NULL;
}

static void load_with_switches(uint32_t threads) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.on_batch = on_counted;
    o.lanes = 2;
    o.shared_space = 1;
    o.lane_requests = 3;
    o.queue_requests = 200;
    o.dispatch_threads = threads;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    start_over();
    memset(hits, 0, sizeof hits);
    atomic_store(&busy, 1);
    pthread_t t[5];
    struct submitter who[4];
    for (unsigned i = 0; i < 4; i++) {
        who[i] = (struct submitter){ s, i };
        pthread_create(&t[i], NULL, submit_many, &who[i]);
    }
    pthread_create(&t[4], NULL, switch_policies, s);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    atomic_store(&busy, 0);
    pthread_join(t[4], NULL);
    CHECK(impresario_set_policy(s, "fifo") == 0);
    wait_served(20000);
    end(s);
}

static void switches(void) { load_with_switches(0); }
static void switches_inline(void) { load_with_switches(IMPRESARIO_INLINE); }

/* ---- inline ---- */

static void inline_case(void) {
    impresario_t *s = make("mlf", on_request, NULL, 1, IMPRESARIO_INLINE);
    for (uint64_t i = 0; i < 100; i++) {
        submit(s, 1, i * 8192, 4096, i, 0);
        CHECK(atomic_load(&served) == i + 1); /* before submit returns */
    }
    start_over();
    neighbours(s);
    /* due by time, when no thread of ours is there */
    start_over();
    CHECK(impresario_hold(s, 0, 50000) == 0);
    submit(s, 1, 0, 1, 5, 0);
    CHECK(atomic_load(&served) == 0);
    wait_served(1);
    end(s);
}

/* A long queue is worked off without recursion, even when every callback completes at once. */
static void inline_long(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.on_batch = on_counted;
    o.queue_requests = 5000;
    o.lane_requests = 1;
    o.dispatch_threads = IMPRESARIO_INLINE;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    start_over();
    memset(hits, 0, sizeof hits);
    CHECK(impresario_hold(s, 0, 60000000) == 0);
    for (uint64_t i = 0; i < 5000; i++) submit(s, 1, i * 8192, 4096, i, 0);
    CHECK(impresario_hold(s, 0, 0) == 0);
    wait_served(5000);
    end(s);
}

/* ---- limits and ending ---- */

static void full(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.queue_requests = 3;
    o.submit_timeout_ms = IMPRESARIO_NO_WAIT;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    for (uint64_t i = 0; i < 3; i++) submit(s, 1, i * 8192, 4096, i, 0);
    impresario_submission_t sub = read_of(1, 99999, 1, 9);
    CHECK(impresario_submit(s, &sub, NULL) == -EAGAIN);
    CHECK_SAYS("queue_requests");
    const impresario_batch_t *b;
    CHECK(impresario_next(s, 1000000, &b) == 0 && impresario_complete(s, b->id, 0, 0) == 0);
    CHECK(impresario_submit(s, &sub, NULL) == 0);
    end(s);
}

/* Undelivered requests are returned by token; delivered ones are forgotten. */
static void tokens_come_back(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.lane_requests = 2;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    for (uint64_t i = 0; i < 10; i++) submit(s, 1, i * 8192, 4096, 1u << i, 0);
    const impresario_batch_t *b;
    CHECK(impresario_next(s, 1000000, &b) == 0 && b->requests[0].token == 1);
    uint64_t id = b->id, sum = 0;
    CHECK(impresario_destroy(s, 0, gather, &sum) == 0);
    CHECK(sum == 1023 - 1);
    CHECK(impresario_complete(s, id, 0, 0) == -EBADF);
}

static atomic_int answer;

static void on_ending(void *arg, impresario_t *s, const impresario_request_t *r) {
    (void)arg;
    atomic_store(&answer, impresario_destroy(s, 0, NULL, NULL));
    CHECK(impresario_complete_request(s, r, 0, 1) == 0);
    atomic_fetch_add(&served, 1);
}

static void destroy_in_callback(void) {
    impresario_t *s = make("fifo", on_ending, NULL, 1, 0);
    submit(s, 1, 0, 1, 0, 0);
    wait_served(1);
    CHECK(atomic_load(&answer) == -EDEADLK);
    end(s);
}

/* A callback that does not return does not hang destroying; the scheduler can be destroyed later. */
static void destroy_with_blocked_callback(void) {
    impresario_t *s = make("fifo", on_slow, NULL, 1, 0);
    atomic_store(&blocked, 1);
    submit(s, 1, 0, 1, 0, 0);
    sleep_ms(20);
    uint64_t begin = now_ns();
    CHECK(impresario_destroy(s, 0, NULL, NULL) == -EBUSY);
    CHECK_SAYS("not returned");
    CHECK(now_ns() - begin < 5000000000u);
    impresario_submission_t sub = read_of(1, 0, 1, 0);
    CHECK(impresario_submit(s, &sub, NULL) == -ESHUTDOWN);
    atomic_store(&answer, 0);
    _exit(0); /* the callback still runs: its completion would fail its check */
}

static void *use_while_destroyed(void *arg) {
    for (uint64_t i = 0; i < 100000; i++) {
        impresario_submission_t sub = read_of(i % 3, i * 8192, 4096, i);
        int result = impresario_submit(arg, &sub, NULL);
        if (result) {
            CHECK(result == -ESHUTDOWN || result == -EBADF);
            return NULL;
        }
    }
    return NULL;
}

static void on_any(void *arg, impresario_t *s, const impresario_batch_t *b) {
    (void)arg;
    int result = impresario_complete(s, b->id, 0, b->len);
    CHECK(result == 0 || result == -ENOENT || result == -EBADF);
}

static void destroy_under_load(void) {
    for (int again = 0; again < 10; again++) {
        impresario_t *s = make("mlf", NULL, on_any, 1, again % 2 ? IMPRESARIO_INLINE : 0);
        pthread_t t[3];
        for (int i = 0; i < 3; i++) pthread_create(&t[i], NULL, use_while_destroyed, s);
        sleep_ms(3);
        CHECK(impresario_destroy(s, 100, NULL, NULL) == 0);
        for (int i = 0; i < 3; i++) pthread_join(t[i], NULL);
    }
}

/* In a child every function returns an error and nothing hangs; the parent goes on. */
static void fork_case(void) {
    impresario_t *s = make("fifo", on_request, NULL, 1, 0);
    submit(s, 1, 0, 1, 0, 0);
    wait_served(1);
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        impresario_submission_t sub = read_of(1, 0, 1, 0);
        const impresario_batch_t *b;
        int ok = impresario_submit(s, &sub, NULL) == -EINVAL && strstr(impresario_last_error(), "fork") &&
                 impresario_next(s, -1, &b) == -EINVAL && impresario_create(NULL) == NULL &&
                 impresario_set_policy(s, "mlf") == -EINVAL && impresario_destroy(s, 1000, NULL, NULL) == -EINVAL;
        exit(ok ? 0 : 1); /* with all that exit does */
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    submit(s, 1, 0, 1, 0, 0);
    wait_served(2);
    end(s);
}

static double cpu_s(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* Nothing to do costs nothing: with nothing queued, and with a request that waits for a hold to end. */
static void idle(void) {
    impresario_t *s = make("mlf", on_request, NULL, 4, 0), *polled = make("fifo", NULL, NULL, 1, 0);
    submit(s, 1, 0, 1, 0, 0);
    wait_served(1);
    double cpu = cpu_s();
    sleep_ms(2000);
    CHECK(cpu_s() - cpu < 0.02);
    CHECK(impresario_hold(s, 0, 60000000) == 0);
    submit(s, 1, 0, 1, 0, 0);
    cpu = cpu_s();
    sleep_ms(500);
    CHECK(cpu_s() - cpu < 0.005 && atomic_load(&served) == 1);
    end(s);
    end(polled);
}

static void policies(void) {
    impresario_policy_info_t info = { sizeof info, NULL, NULL, NULL, 0 };
    size_t i = 0, mlf = 0;
    for (; impresario_policy(i, &info) == 0; i++) {
        CHECK(strlen(info.name) && strlen(info.summary) && strlen(info.source));
        for (size_t p = 0; p < info.params; p++) {
            impresario_param_info_t param = { sizeof param, NULL, NULL, NULL, NULL };
            CHECK(impresario_policy_param(i, p, &param) == 0);
            CHECK(strlen(param.name) && param.default_value && strlen(param.range) && strlen(param.summary));
            if (!strcmp(info.name, "mlf")) mlf += !strcmp(param.name, "quantum_bytes");
        }
        impresario_param_info_t param = { sizeof param, NULL, NULL, NULL, NULL };
        CHECK(impresario_policy_param(i, info.params, &param) == -ENOENT);
    }
    CHECK(i >= 5 && mlf == 1);
    CHECK(impresario_policy(0, NULL) == -EINVAL);
}

/* A configuration's text and file do what the options do. */
static void configured(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.on_batch = on_batch;
    impresario_t *s = impresario_create_from_text(
        "policy = { name = 'mlf', batch_requests = 4 }\nqueue_requests = 100\nlane_requests = 1\n[read_cost]\nfixed_ns = 100\nps_per_byte = 1\n", &o);
    CHECK(s);
    start_over();
    neighbours(s);
    pthread_mutex_lock(&lock);
    CHECK(seen_calls >= 4); /* at most four to a batch */
    pthread_mutex_unlock(&lock);
    end(s);
    char name[] = "settings-XXXXXX";
    int fd = mkstemp(name);
    CHECK(fd >= 0 && write(fd, "policy = 'fifo merge=on'\n", 25) == 25);
    s = impresario_create_from_file(name, &o);
    CHECK(s);
    char json[8192];
    CHECK(impresario_stats_json(s, json, sizeof json) > 0 && strstr(json, "\"fifo\"") && strstr(json, "\"on\""));
    end(s);
    CHECK(write(fd, "oops", 4) == 4);
    CHECK(!impresario_create_from_file(name, &o));
    CHECK_SAYS(name);
    CHECK_SAYS("line 2");
    close(fd);
    unlink(name);
}

static void ready_case(void) {
    impresario_t *s = make("fifo", on_request, NULL, 1, 0);
    CHECK(impresario_ready(s, 1, 0) == 0 && impresario_ready(s, 1, 1) == 0);
    end(s);
}

/* ---- reading ahead ---- */

enum { AHEAD_FILE_BYTES = 8 << 20, AHEAD_PIECE_BYTES = 128 << 10 };
static atomic_int backwards; /* recorded runs predict what lies before a request, too */
static struct {
    atomic_uint accepted, delivered, dropped, alone;
    atomic_uchar state[1 << 16]; /* of each token: 1 accepted, 2 delivered or dropped */
    atomic_int refuse, memory; /* what in_memory tells: UNKNOWN, what was read (READ), nothing (LOST), everything */
    atomic_uchar read[8][AHEAD_FILE_BYTES / 4096];
} ahead;
enum { UNKNOWN = -1, READ, LOST, EVERYTHING };

static int may_read_ahead(void *arg, const impresario_submission_t *after, uint64_t offset, uint64_t len,
                          uint64_t *token) {
    (void)arg;
    CHECK(after->size == sizeof *after && after->op == IMPRESARIO_READ && len > 0);
    CHECK(offset + len > after->offset || atomic_load(&backwards));
    if (atomic_load(&ahead.refuse)) return -1;
    *token = atomic_fetch_add(&ahead.accepted, 1);
    CHECK(*token < sizeof ahead.state && atomic_exchange(&ahead.state[*token], 1) == 0);
    return 0;
}

static void ahead_dropped(void *arg, uint64_t token) {
    (void)arg;
    CHECK(atomic_exchange(&ahead.state[token], 2) == 1);
    atomic_fetch_add(&ahead.dropped, 1);
}

static int ahead_in_memory(void *arg, const impresario_request_t *of, uint64_t offset) {
    (void)arg;
    CHECK(of->op == IMPRESARIO_READ);
    switch (atomic_load(&ahead.memory)) {
        case UNKNOWN: return -1;
        case READ: return offset < AHEAD_FILE_BYTES ? atomic_load(&ahead.read[of->file][offset / 4096]) : -1;
        case LOST: return 0;
        default: return 1;
    }
}

static void on_ahead_batch(void *arg, impresario_t *s, const impresario_batch_t *b) {
    uint32_t asked = 0;
    (void)arg;
    for (uint32_t i = 0; i < b->count; i++) {
        const impresario_request_t *r = &b->requests[i];
        CHECK(r->flags == 0 || (r->flags == IMPRESARIO_SPECULATIVE && i == b->count - 1 && r->op == IMPRESARIO_READ));
        CHECK(i < b->count - 1 || r->flags == b->flags);
        if (r->flags == 0) {
            asked++;
            continue;
        }
        CHECK(atomic_exchange(&ahead.state[r->token], 2) == 1);
        atomic_fetch_add(&ahead.delivered, 1);
        if (b->count == 1) atomic_fetch_add(&ahead.alone, 1);
    }
    uint64_t there = b->offset < AHEAD_FILE_BYTES ? AHEAD_FILE_BYTES - b->offset : 0;
    sleep_ms(b->count == 1 && b->flags ? 5 : 1); /* a slow device: a fast one is left alone */
    for (uint64_t at = b->offset; at < b->offset + b->len && at < AHEAD_FILE_BYTES; at += 4096)
        atomic_store(&ahead.read[b->file][at / 4096], 1);
    CHECK(impresario_complete(s, b->id, 0, b->op == IMPRESARIO_READ && b->len > there ? there : b->len) == 0);
    atomic_fetch_add(&served, asked);
}

static impresario_t *make_ahead(uint64_t bytes, int memory) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.policy = "fifo";
    o.on_batch = on_ahead_batch;
    o.dispatch_threads = 4;
    o.lane_requests = 4;
    o.read_ahead_bytes = bytes;
    o.may_read_ahead = may_read_ahead;
    o.ahead_dropped = ahead_dropped;
    o.in_memory = ahead_in_memory;
    o.lane_speculations = 2;
    o.sorted_below = 1;
    impresario_t *s = impresario_create(&o);
    CHECK(s);
    start_over();
    memset(&ahead, 0, sizeof ahead);
    atomic_store(&ahead.memory, memory);
    return s;
}

/* Reads the pieces of a file one after the other. */
static void stream(impresario_t *s, uint64_t file, uint64_t first, uint64_t end) {
    for (uint64_t i = first; i < end; i++) {
        unsigned before = atomic_load(&served);
        submit(s, file, i * AHEAD_PIECE_BYTES, AHEAD_PIECE_BYTES, i, 0);
        wait_served(before + 1);
    }
}

static impresario_stats_t stats_of(impresario_t *s) {
    impresario_stats_t stats = { 0 };
    stats.size = sizeof stats;
    CHECK(impresario_stats(s, &stats) == 0);
    return stats;
}

static unsigned handed_back(void) { return atomic_load(&ahead.delivered) + atomic_load(&ahead.dropped); }

/* What a stream will read comes before it is read, up to the end of the file. */
static void read_ahead(void) {
    impresario_t *s = make_ahead(16 << 20, READ);
    stream(s, 1, 0, AHEAD_FILE_BYTES / AHEAD_PIECE_BYTES);
    for (int i = 0; i < 5000 && stats_of(s).in_flight > 0; i++) sleep_ms(1);
    impresario_stats_t stats = stats_of(s);
    CHECK(atomic_load(&ahead.delivered) > 0 && stats.ahead_read_bytes > 0);
    CHECK(stats.ahead_hit_bytes >= AHEAD_FILE_BYTES / 2 && stats.ahead_predicted_bytes >= stats.ahead_hit_bytes);
    CHECK(stats.ahead_outstanding_bytes == 0 && stats.ahead_wasted_bytes == 0);
    CHECK(stats.completed == AHEAD_FILE_BYTES / AHEAD_PIECE_BYTES && stats.read_bytes == AHEAD_FILE_BYTES);
    char json[16384];
    CHECK(impresario_stats_json(s, json, sizeof json) > 0 && strstr(json, "\"hit_bytes\""));
    /* Switched off while it runs, and on again. */
    CHECK(impresario_set_read_ahead(s, 0) == 0);
    unsigned accepted = atomic_load(&ahead.accepted);
    stream(s, 2, 0, 16);
    CHECK(atomic_load(&ahead.accepted) == accepted);
    CHECK(impresario_set_read_ahead(s, 4 << 20) == 0);
    stream(s, 3, 0, 16);
    CHECK(atomic_load(&ahead.accepted) > accepted);
    /* No policy, no speculations. */
    CHECK(impresario_set_policy(s, "none") == 0);
    accepted = atomic_load(&ahead.accepted);
    stream(s, 4, 0, 16);
    CHECK(atomic_load(&ahead.accepted) == accepted);
    end(s);
    CHECK(handed_back() == atomic_load(&ahead.accepted));
}

/* A write that covers speculations takes them back; so does the end. */
static void read_ahead_taken_back(void) {
    for (int write = 0; write < 2; write++) {
        impresario_t *s = make_ahead(16 << 20, UNKNOWN);
        stream(s, 1, 0, 8);
        CHECK(impresario_hold(s, 0, 600000000) == 0);
        for (int i = 0; i < 5000 && stats_of(s).in_flight > 0; i++) sleep_ms(1);
        unsigned before = atomic_load(&ahead.accepted);
        for (uint64_t i = 8; i < 24; i++) submit(s, 1, i * AHEAD_PIECE_BYTES, AHEAD_PIECE_BYTES, i, 0);
        CHECK(atomic_load(&ahead.accepted) > before);
        CHECK(handed_back() < atomic_load(&ahead.accepted));
        if (write) {
            impresario_submission_t all = read_of(1, 0, AHEAD_FILE_BYTES, 99);
            all.op = IMPRESARIO_WRITE;
            CHECK(impresario_submit(s, &all, NULL) == 0);
            CHECK(handed_back() == atomic_load(&ahead.accepted));
            CHECK(stats_of(s).ahead_outstanding_bytes == 0);
            CHECK(impresario_hold(s, 0, 0) == 0);
            wait_served(25);
        }
        end(s);
        CHECK(handed_back() == atomic_load(&ahead.accepted));
    }
}

/* What memory has is not read, and what the program refuses neither. */
static void read_ahead_left_out(void) {
    impresario_t *s = make_ahead(16 << 20, EVERYTHING);
    stream(s, 1, 0, 64);
    CHECK(atomic_load(&ahead.accepted) > 0 && atomic_load(&ahead.delivered) == 0);
    atomic_store(&ahead.refuse, 1);
    unsigned accepted = atomic_load(&ahead.accepted);
    stream(s, 2, 0, 64);
    CHECK(atomic_load(&ahead.accepted) == accepted);
    end(s);
    CHECK(handed_back() == atomic_load(&ahead.accepted));
    /* Memory that loses what was read ahead ends it. */
    s = make_ahead(16 << 20, LOST);
    stream(s, 1, 0, 64);
    for (int i = 0; i < 5000 && stats_of(s).in_flight > 0; i++) sleep_ms(1);
    impresario_stats_t stats = stats_of(s);
    CHECK(stats.ahead_stops > 0 && stats.ahead_wasted_bytes > 0 && stats.ahead_predicted_bytes < AHEAD_FILE_BYTES);
    end(s);
    CHECK(handed_back() == atomic_load(&ahead.accepted));
    /* A scheduler that cannot read ahead, and budgets that make no sense. */
    s = make("fifo", on_request, NULL, 1, 0);
    CHECK(impresario_set_read_ahead(s, 16 << 20) == -EINVAL);
    CHECK_SAYS("does not read ahead");
    end(s);
    s = make_ahead(0, UNKNOWN);
    CHECK(impresario_set_read_ahead(s, 4096) == -EINVAL);
    CHECK_SAYS("read_ahead_bytes = 4096");
    end(s);
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.read_ahead_bytes = 16 << 20;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("read_ahead_bytes");
    o.may_read_ahead = may_read_ahead;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("ahead_dropped");
}

/* What was predicted has come, however slowly this program runs. */
static void wait_idle(impresario_t *s) {
    impresario_stats_t stats = stats_of(s);
    for (int i = 0; i < 5000 && (stats.queued > 0 || stats.in_flight > 0); i++) {
        sleep_ms(1);
        stats = stats_of(s);
    }
}

/* Reads every second piece of a file in an order without a pattern. */
static void wander(impresario_t *s, uint64_t file) {
    for (uint64_t i = 0; i < 32; i++) {
        unsigned before = atomic_load(&served);
        submit(s, file, 2 * ((7 * i + 10 * i * i) % 32) * AHEAD_PIECE_BYTES, AHEAD_PIECE_BYTES, i, 0);
        wait_served(before + 1);
        wait_idle(s);
    }
}

/* A recorded run foretells the next. */
static void recorded_runs(void) {
    char folder[] = "/tmp/impresario-runs-XXXXXX", traces[64], other[80], command[128];
    CHECK(mkdtemp(folder));
    snprintf(traces, sizeof traces, "%s/traces", folder);
    snprintf(other, sizeof other, "%s/other", folder);
    impresario_t *s = make_ahead(16 << 20, UNKNOWN);
    CHECK(impresario_stop_trace(s) == -ENOENT);
    CHECK(impresario_set_prediction(s, traces, "server") == -ENOENT);
    CHECK(impresario_start_trace(s, traces, "a/b") == -EINVAL);
    CHECK_SAYS("slash");
    CHECK(impresario_start_trace(s, NULL, "server") == -EINVAL && impresario_start_trace(s, traces, NULL) == -EINVAL);
    CHECK(impresario_start_trace(s, traces, "server") == 0);
    CHECK(impresario_start_trace(s, traces, "server") == -EINVAL);
    CHECK_SAYS("stop it first");
    wander(s, 1);
    CHECK(impresario_stop_trace(s) == 0);
    impresario_stats_t before = stats_of(s);
    CHECK(before.predicted_requests == 0 && before.traced_requests == 0);
    atomic_store(&backwards, 1);
    CHECK(impresario_set_prediction(s, traces, "server") == 32);
    CHECK(impresario_set_prediction(s, traces, "another") < 0);
    CHECK_SAYS("no trace of another");
    CHECK(impresario_set_prediction(s, "::", "server") == -EINVAL);
    CHECK(impresario_set_prediction(s, "/dev/null", "server") == -EINVAL);
    CHECK_SAYS("not a regular file");
    CHECK(stats_of(s).predicted_requests == 32);
    /* What is not asked for within seconds counts as foretold in vain, so a program that is that slow runs again. */
    uint64_t hit_bytes = 0;
    for (int run = 0; run < 20 && hit_bytes <= 16 * AHEAD_PIECE_BYTES; run++) {
        CHECK(impresario_set_prediction(s, traces, "server") == 32);
        before = stats_of(s);
        wander(s, 1);
        hit_bytes = stats_of(s).ahead_hit_bytes - before.ahead_hit_bytes;
    }
    CHECK(hit_bytes > 16 * AHEAD_PIECE_BYTES);
    char json[16384];
    CHECK(impresario_stats_json(s, json, sizeof json) > 0 && strstr(json, "\"recorded_runs\":{"));
    CHECK(impresario_set_prediction(s, NULL, NULL) == 0 && stats_of(s).predicted_requests == 0);
    /* The end of the scheduler ends a trace. */
    CHECK(impresario_start_trace(s, other, "server") == 0);
    wander(s, 2);
    end(s);
    s = make_ahead(16 << 20, UNKNOWN);
    CHECK(impresario_set_prediction(s, other, "server") == 32);
    end(s);
    atomic_store(&backwards, 0);
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    { "one_by_one", one_by_one }, { "batches", batches }, { "poll", poll_case }, { "poll_ends", poll_ends },
    { "cancel", cancel }, { "slow", slow }, { "several_threads", several_threads },
    { "several_schedulers", several_schedulers }, { "switches", switches }, { "switches_inline", switches_inline },
    { "inline", inline_case }, { "inline_long", inline_long }, { "full", full },
    { "tokens_come_back", tokens_come_back }, { "destroy_in_callback", destroy_in_callback },
    { "destroy_under_load", destroy_under_load }, { "policies", policies }, { "configured", configured },
    { "ready", ready_case }, { "read_ahead", read_ahead }, { "read_ahead_taken_back", read_ahead_taken_back },
    { "read_ahead_left_out", read_ahead_left_out }, { "recorded_runs", recorded_runs },
    /* by name only: they fork, need an idle machine, or leave the process */
    { "fork", fork_case }, { "idle", idle }, { "destroy_with_blocked_callback", destroy_with_blocked_callback },
};
#define BY_NAME_ONLY 3

int main(int argc, char **argv) {
    size_t count = sizeof cases / sizeof cases[0];
    int ran = 0;
    for (size_t i = 0; i < count; i++) {
        int wanted = argc == 1 && i < count - BY_NAME_ONLY;
        for (int a = 1; a < argc; a++) wanted |= !strcmp(argv[a], cases[i].name);
        if (!wanted) continue;
        cases[i].run();
        ran++;
    }
    CHECK(ran == (argc == 1 ? (int)(count - BY_NAME_ONLY) : argc - 1));
    printf("%d cases\n", ran);
    return 0;
}
