/* The current interface. */
#define _GNU_SOURCE
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

static char a[] = "file a", b[] = "file b";

static atomic_int entered;

static void *one(int64_t id) {
    atomic_store(&entered, 1);
    while (atomic_load(&blocked)) sleep_ms(1);
    atomic_fetch_add(&calls, 1);
    note(id);
    return NULL;
}

static void *several(int64_t *ids, int32_t count) {
    CHECK(count > 1);
    atomic_fetch_add(&calls, 1);
    for (int32_t i = 0; i < count; i++) note(ids[i]);
    return NULL;
}

/* Adds a request whose callback blocks, so that what is added next waits. */
static void block(void) {
    static char name[] = "blocker";
    atomic_store(&blocked, 1);
    atomic_store(&entered, 0);
    CHECK(agios_add_request(name, RT_READ, 0, 1, 999, 0));
    for (int i = 0; i < 20000 && !atomic_load(&entered); i++) sleep_ms(1);
    CHECK(atomic_load(&entered));
}

static void unblock(void) { atomic_store(&blocked, 0); }

static void before_and_after(void) {
    for (int again = 0; again < 3; again++) {
        CHECK(!agios_add_request(a, RT_READ, 0, 10, 1, 0));
        CHECK(!agios_release_request(a, RT_READ, 10, 0));
        CHECK(!agios_cancel_request(a, RT_READ, 10, 0));
        agios_exit();
        CHECK(!agios_init(NULL, several, NULL, 0));
        CHECK(!agios_init(one, NULL, NULL, -1));
        CHECK(agios_init(one, several, NULL, 0));
        CHECK(!agios_init(one, several, NULL, 0)); /* it runs already */
        CHECK(!agios_add_request(NULL, RT_READ, 0, 10, 1, 0));
        CHECK(!agios_add_request(a, 2, 0, 10, 1, 0));
        CHECK(!agios_add_request(a, RT_READ, -1, 10, 1, 0));
        CHECK(!agios_add_request(a, RT_READ, 0, -1, 1, 0));
        CHECK(!agios_add_request(a, RT_READ, 0, ((int64_t)1 << 43) + 1, 1, 0));
        CHECK(!agios_add_request(a, RT_READ, INT64_MAX, 1, 1, 0));
        CHECK(!agios_release_request(a, RT_READ, 10, 0));
        start_over();
        CHECK(agios_add_request(a, RT_READ, 0, 10, 42, 0));
        wait_served(1);
        CHECK(seen[0] == 42);
        CHECK(!agios_cancel_request(a, RT_READ, 10, 0));  /* it was delivered */
        CHECK(!agios_release_request(a, RT_READ, 0, 10)); /* length first */
        CHECK(!agios_release_request(a, RT_WRITE, 10, 0));
        CHECK(!agios_release_request(b, RT_READ, 10, 0));
        CHECK(agios_release_request(a, RT_READ, 10, 0));
        CHECK(!agios_release_request(a, RT_READ, 10, 0)); /* once only */
        agios_exit();
    }
}

/* A request that is added at once after the start is served, however often. */
static void right_after_start(void) {
    for (int i = 0; i < 50; i++) {
        start_over();
        CHECK(agios_init(one, NULL, NULL, 0));
        CHECK(agios_add_request(a, RT_WRITE, 0, 10, i, 0));
        wait_served(1);
        agios_exit();
    }
}

/* Neighbours come together in order of offset; without the second callback one by one. */
static void order(void) {
    for (int together = 0; together < 2; together++) {
        start_over();
        CHECK(agios_init(one, together ? several : NULL, config("default_algorithm = \"SJF\""), 0));
        block();
        for (int i = 0; i < 8; i++) CHECK(agios_add_request(a, RT_READ, (i * 3 % 8) * 100, 100, i * 3 % 8, 0));
        unblock();
        wait_served(9);
        for (int i = 0; i < 8; i++) CHECK(seen[1 + i] == i);
        CHECK(atomic_load(&calls) == (together ? 2 : 9));
        for (int i = 0; i < 8; i++) CHECK(agios_release_request(a, RT_READ, 100, i * 100));
        agios_exit();
    }
}

/* Cancelling takes the request that was named and no other, in every algorithm. */
static void cancelling(void) {
    static const char *algorithms[] = { "TO", "TO-agg", "SJF", "MLF", "aIOLi", "SW", "HBRR", "FIFO" };
    for (size_t i = 0; i < sizeof algorithms / sizeof algorithms[0]; i++) {
        char keys[100];
        snprintf(keys, sizeof keys, "default_algorithm = \"%s\"", algorithms[i]);
        start_over();
        CHECK(agios_init(one, NULL, config(keys), 0));
        block();
        CHECK(agios_add_request(a, RT_READ, 0, 100, 1, 0));
        CHECK(agios_add_request(b, RT_READ, 0, 100, 2, 0));
        CHECK(agios_add_request(b, RT_WRITE, 500, 100, 3, 0));
        CHECK(agios_add_request(b, RT_READ, 0, 100, 4, 0)); /* alike: the younger one goes */
        CHECK(agios_cancel_request(b, RT_READ, 100, 0));
        CHECK(agios_cancel_request(b, RT_WRITE, 100, 500));
        CHECK(!agios_cancel_request(b, RT_WRITE, 100, 500));
        unblock();
        wait_served(3);
        sleep_ms(20);
        CHECK(atomic_load(&served) == 3);
        CHECK(seen[1] + seen[2] == 3); /* 1 and 2, in any order */
        CHECK(agios_release_request(a, RT_READ, 100, 0) && agios_release_request(b, RT_READ, 100, 0));
        agios_exit();
    }
}

/* Requests above 1 GiB are served by the algorithms with quanta. */
static void long_requests(void) {
    static const char *algorithms[] = { "MLF", "aIOLi" };
    for (int i = 0; i < 2; i++) {
        char keys[100];
        snprintf(keys, sizeof keys, "default_algorithm = \"%s\"", algorithms[i]);
        start_over();
        CHECK(agios_init(one, NULL, config(keys), 0));
        CHECK(agios_add_request(a, RT_WRITE, 0, (int64_t)1 << 40, 1, 0));
        CHECK(agios_add_request(b, RT_READ, 0, ((int64_t)1 << 30) + 1, 2, 0));
        wait_served(2);
        agios_exit();
    }
}

/* TWINS has exactly as many queues as init says: no request waits longer than the other server's window. */
static void twins(void) {
    start_over();
    CHECK(agios_init(one, NULL, config("default_algorithm = \"TWINS\" twins_window = 150000"), 2));
    CHECK(!agios_add_request(a, RT_READ, 0, 10, 1, 2));
    double longest = 0;
    for (int i = 0; i < 10; i++) {
        double begin = now_ms();
        CHECK(agios_add_request(a, RT_READ, i * 10, 10, i, i % 2));
        while (atomic_load(&served) <= i) {
            CHECK(now_ms() - begin < 5000);
            sleep_ms(1);
        }
        if (now_ms() - begin > longest) longest = now_ms() - begin;
        sleep_ms(37);
    }
    CHECK(longest < 200); /* with a third queue, always empty, it would be up to 300 */
    agios_exit();
}

/* A blocking callback does not delay adding. */
static void slow(void) {
    start_over();
    CHECK(agios_init(one, NULL, NULL, 0));
    block();
    double begin = now_ms();
    for (int i = 0; i < 500; i++) CHECK(agios_add_request(a, RT_READ, i * 10, 5, i, 0));
    CHECK(now_ms() - begin < 2000);
    CHECK(atomic_load(&served) == 0);
    unblock();
    wait_served(501);
    agios_exit();
}

/* A request without bytes is served like any other: GekkoFS adds some. */
static void no_bytes(void) {
    start_over();
    CHECK(agios_init(one, NULL, NULL, 0));
    CHECK(agios_add_request(a, RT_WRITE, 7, 0, 5, 0));
    wait_served(1);
    CHECK(seen[0] == 5 && agios_release_request(a, RT_WRITE, 0, 7));
    agios_exit();
}

/* Queue ids matter to TWINS and WFQ; to others any will do. */
static void queue_ids(void) {
    static const char *algorithms[] = { "TO", "SJF", "MLF", "SW", "NOOP" };
    for (size_t i = 0; i < sizeof algorithms / sizeof algorithms[0]; i++) {
        char keys[100];
        snprintf(keys, sizeof keys, "default_algorithm = \"%s\"", algorithms[i]);
        start_over();
        CHECK(agios_init(one, NULL, config(keys), 0));
        CHECK(agios_add_request(a, RT_READ, 0, 10, 1, 5) && agios_add_request(a, RT_READ, 50, 10, 2, -1));
        CHECK(agios_add_request(a, RT_READ, 90, 10, 3, INT32_MAX));
        wait_served(3);
        agios_exit();
    }
}

static atomic_int together;

static void *joins(int64_t id) {
    (void)id;
    atomic_fetch_add(&together, 1);
    /* Comes back only when all of them are in. */
    for (int i = 0; i < 10000 && atomic_load(&together) < 8; i++) sleep_ms(1);
    agios_exit(); /* refused: it would wait for itself */
    if (atomic_load(&together) == 8) atomic_fetch_add(&served, 1);
    return NULL;
}

static void *adds_one(void *arg) {
    CHECK(agios_add_request(a, RT_WRITE, 0, 10, *(int *)arg, 0));
    return NULL;
}

/* NOOP calls back on the threads that add, side by side, overlapping or not. */
static void noop(void) {
    start_over();
    atomic_store(&together, 0);
    CHECK(agios_init(joins, NULL, config("default_algorithm = \"NOOP\""), 0));
    pthread_t t[8];
    int number[8];
    for (int i = 0; i < 8; i++) number[i] = i, pthread_create(&t[i], NULL, adds_one, &number[i]);
    for (int i = 0; i < 8; i++) pthread_join(t[i], NULL);
    CHECK(atomic_load(&served) == 8);
    for (int i = 0; i < 8; i++) CHECK(agios_release_request(a, RT_WRITE, 10, 0));
    CHECK(!agios_release_request(a, RT_WRITE, 10, 0));
    agios_exit();
}

static void *at_most_16(int64_t *ids, int32_t count) {
    CHECK(count <= 16);
    return several(ids, count);
}

/* A callback's array is as small as the public library's largest aggregation. */
static void aggregations(void) {
    static const struct {
        const char *name;
        int calls;
    } algorithms[] = { { "SJF", 3 }, { "MLF", 3 }, { "aIOLi", 3 }, { "TO-agg", 3 }, { "TO", 40 }, { "SW", 40 }, { "DYN_TREE", 3 } };
    for (size_t i = 0; i < sizeof algorithms / sizeof algorithms[0]; i++) {
        char keys[100];
        snprintf(keys, sizeof keys, "default_algorithm = \"%s\" waiting_time = 0", algorithms[i].name);
        start_over();
        CHECK(agios_init(one, at_most_16, config(keys), 0));
        block();
        for (int n = 0; n < 40; n++) CHECK(agios_add_request(a, RT_READ, n * 100, 100, n, 0));
        unblock();
        wait_served(41);
        if (atomic_load(&calls) != 1 + algorithms[i].calls) fprintf(stderr, "%s: %d calls\n", algorithms[i].name, atomic_load(&calls));
        CHECK(atomic_load(&calls) == 1 + algorithms[i].calls);
        agios_exit();
    }
}

/* Ending delivers what is queued, also what a rule keeps back. */
static void exit_delivers(void) {
    static const char *configs[] = { "default_algorithm = \"TO\"", "default_algorithm = \"MLF\"",
                                     "default_algorithm = \"TWINS\" twins_window = 2000000",
                                     "default_algorithm = \"TO\" in_flight_requests = 1" };
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        start_over();
        CHECK(agios_init(one, NULL, config(configs[i]), 2));
        for (int n = 0; n < 100; n++) CHECK(agios_add_request(a, RT_READ, n * 100, 10, n, n % 2));
        agios_exit();
        CHECK(atomic_load(&served) == 100);
    }
}

/* Overlapping requests keep their order when one writes, whatever the algorithm prefers. */
static void overlaps(void) {
    start_over();
    CHECK(agios_init(one, NULL, config("default_algorithm = \"SJF\""), 0));
    block();
    CHECK(agios_add_request(a, RT_WRITE, 50, 100, 1, 0));
    CHECK(agios_add_request(a, RT_READ, 0, 100, 2, 0));
    CHECK(agios_add_request(a, RT_WRITE, 0, 10, 3, 0));
    unblock();
    wait_served(4);
    CHECK(seen[1] == 1 && seen[2] == 2 && seen[3] == 3);
    agios_exit();
}

/* With in_flight_requests, batches are out until they are released. */
static void in_flight(void) {
    start_over();
    CHECK(agios_init(one, NULL, config("default_algorithm = \"TO\" in_flight_requests = 2"), 0));
    for (int i = 0; i < 5; i++) CHECK(agios_add_request(a, RT_READ, i * 10, 5, i, 0));
    wait_served(2);
    sleep_ms(30);
    CHECK(atomic_load(&served) == 2);
    CHECK(agios_release_request(a, RT_READ, 5, 0));
    wait_served(3);
    for (int i = 1; i < 5; i++) {
        wait_served(i < 3 ? i + 2 : 5);
        CHECK(agios_release_request(a, RT_READ, 5, i * 10));
    }
    agios_exit();
}

static void *releases(int64_t id) {
    (void)id;
    CHECK(agios_release_request(a, RT_READ, 5, id * 10));
    if (id < 20) CHECK(agios_add_request(a, RT_READ, (id + 1) * 10, 5, id + 1, 0));
    agios_exit(); /* refused: it would wait for itself */
    atomic_fetch_add(&served, 1);
    return NULL;
}

/* Callbacks may call everything but exit. */
static void calls_from_callbacks(void) {
    start_over();
    CHECK(agios_init(releases, NULL, NULL, 0));
    CHECK(agios_add_request(a, RT_READ, 0, 5, 0, 0));
    wait_served(21);
    agios_exit();
    CHECK(!agios_add_request(a, RT_READ, 0, 5, 0, 0));
}

static void trace(void) {
    unlink("trace.1.imt");
    unlink("trace.2.imt");
    for (int run = 1; run <= 2; run++) {
        start_over();
        CHECK(agios_init(one, NULL, config("trace = true trace_file_prefix = \"trace\" trace_file_sufix = \"imt\""), 0));
        CHECK(agios_add_request(a, RT_READ, 7, 5, 0, 0) && agios_add_request(b, RT_WRITE, 1, 2, 0, 0));
        wait_served(2);
        agios_exit();
        char name[20], begin[8] = "";
        snprintf(name, sizeof name, "trace.%d.imt", run);
        FILE *f = fopen(name, "r");
        CHECK(f && fread(begin, 1, 7, f) == 7 && strcmp(begin, "IMTRACE") == 0);
        fclose(f);
    }
}

/* A recorded run foretells the next one: what it delivered one by one comes together, as the library waits for it. */
static void predictions(void) {
    static char keys[300];
    for (int run = 1; run <= 3; run++) {
        /* 1 records. 2 has the configuration name the trace, 3 loads it later. Waiting costs nothing, so that the wait is long. */
        snprintf(keys, sizeof keys,
                 "policy = \"agios overlap_percent=100\" trace = %s trace_file_prefix = \"run\" trace_file_sufix = \"imt\" "
                 "predict_read_traces = %s", run == 1 ? "true" : "false", run == 2 ? "true" : "false");
        if (run == 1) unlink("run.1.imt");
        start_over();
        CHECK(agios_init(one, several, config(keys), 0));
        agios_wait_predict_init();
        if (run == 3) {
            CHECK(!agios_load_traces("run.9.imt") && !agios_load_traces("") && !agios_load_traces(NULL));
            CHECK(!agios_load_traces("agios-test.conf"));
            CHECK(agios_load_traces("run.1.imt"));
        }
        CHECK(agios_add_request(a, RT_READ, 0, 10, 1, 0));
        if (run == 1) wait_served(1), sleep_ms(500);
        CHECK(agios_add_request(a, RT_READ, 10, 10, 2, 0));
        wait_served(2);
        CHECK(atomic_load(&calls) == (run == 1 ? 2 : 1));
        CHECK(agios_release_request(a, RT_READ, 10, 0) && agios_release_request(a, RT_READ, 10, 10));
        agios_exit();
    }
}

static void forked(void) {
    start_over();
    CHECK(agios_init(one, NULL, NULL, 0));
    pid_t child = fork();
    if (child == 0) {
        alarm(10);
        int bad = agios_add_request(a, RT_READ, 0, 5, 0, 0) || agios_release_request(a, RT_READ, 5, 0) ||
                  agios_cancel_request(a, RT_READ, 5, 0) || agios_init(one, NULL, NULL, 0);
        agios_exit();
        exit(bad);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(agios_add_request(a, RT_READ, 0, 5, 0, 0));
    wait_served(1);
    agios_exit();
}

static void *adds(void *arg) {
    char name[20];
    snprintf(name, sizeof name, "of %d", *(int *)arg);
    for (int i = 0; i < 200; i++) CHECK(agios_add_request(name, i % 2, i * 10, 10, i, 0));
    return NULL;
}

static void threads(void) {
    start_over();
    CHECK(agios_init(one, several, config("default_algorithm = \"MLF\""), 0));
    pthread_t t[4];
    int number[4] = { 0, 1, 2, 3 };
    for (int i = 0; i < 4; i++) pthread_create(&t[i], NULL, adds, &number[i]);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    wait_served(800);
    for (int i = 0; i < 4; i++) {
        char name[20];
        snprintf(name, sizeof name, "of %d", i);
        for (int n = 0; n < 200; n++) CHECK(agios_release_request(name, n % 2, 10, n * 10));
    }
    agios_exit();
}

static void *unblock_late(void *arg) {
    (void)arg;
    sleep_ms(1700);
    unblock();
    return NULL;
}

/* Ending waits for a callback that does its I/O, however long that takes within reason. */
static void exit_waits(void) {
    start_over();
    CHECK(agios_init(one, NULL, NULL, 0));
    block();
    pthread_t t;
    pthread_create(&t, NULL, unblock_late, NULL);
    CHECK(atomic_load(&calls) == 0);
    agios_exit();
    CHECK(atomic_load(&calls) == 1);
    pthread_join(t, NULL);
}

static void *exits_much(int64_t id) {
    for (int i = 0; i < 1000; i++) agios_exit();
    return one(id);
}

/* Errors that are made with every call: the program that runs this counts the lines on stderr. */
static void misused(void) {
    for (int i = 0; i < 1000; i++) CHECK(!agios_add_request(a, RT_READ, 0, 10, 1, 0));
    start_over();
    CHECK(agios_init(exits_much, NULL, NULL, 0));
    for (int i = 0; i < 1000; i++) CHECK(!agios_init(one, NULL, NULL, 0));
    CHECK(agios_add_request(a, RT_READ, 0, 10, 1, 0));
    wait_served(1);
    agios_exit();
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = { { "before_and_after", before_and_after }, { "right_after_start", right_after_start }, { "order", order },
                  { "cancelling", cancelling }, { "long_requests", long_requests }, { "slow", slow },
                  { "overlaps", overlaps }, { "no_bytes", no_bytes }, { "queue_ids", queue_ids }, { "noop", noop },
                  { "aggregations", aggregations }, { "exit_delivers", exit_delivers }, { "predictions", predictions }, { "in_flight", in_flight }, { "calls_from_callbacks", calls_from_callbacks },
                  { "trace", trace }, { "threads", threads }, { "exit_waits", exit_waits },
                  /* by name only */
                  { "twins", twins }, { "forked", forked }, { "misused", misused } };
    size_t count = sizeof cases / sizeof cases[0];
    int ran = 0;
    for (size_t i = 0; i < count; i++) {
        int wanted = argc == 1 && i < count - 3;
        for (int n = 1; n < argc; n++) wanted |= !strcmp(argv[n], cases[i].name);
        if (wanted) cases[i].run(), ran++;
    }
    CHECK(ran == (argc == 1 ? (int)count - 3 : argc - 1));
    printf("%d cases\n", ran);
    return 0;
}
