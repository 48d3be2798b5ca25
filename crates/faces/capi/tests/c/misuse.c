/* Wrong calls: before the first scheduler, with stale handles, with bad arguments. Every one is an error with a line of
 * text; nothing crashes and nothing changes. */
#include "check.h"

#include <errno.h>

static void ignore(void *arg, uint64_t token) { (void)arg, (void)token; }
static void ignore_batch(void *arg, impresario_t *s, const impresario_batch_t *b) { (void)arg, (void)s, (void)b; }

/* Every function that takes a handle, on one that is not a scheduler. */
static void all_refuse(impresario_t *s, int error) {
    impresario_submission_t sub = read_of(1, 0, 1, 0);
    impresario_request_t request;
    impresario_stats_t stats = { 0 };
    const impresario_batch_t *batch;
    uint64_t number;
    char text[10];
    memset(&request, 0, sizeof request);
    stats.size = sizeof stats;
    CHECK(impresario_submit(s, &sub, &number) == error);
    CHECK(impresario_cancel(s, 1, &number) == error);
    CHECK(impresario_cancel_connection(s, 1, ignore, NULL) == error);
    CHECK(impresario_next(s, 0, &batch) == error);
    CHECK(impresario_complete(s, 1, 0, 0) == error);
    CHECK(impresario_complete_timed(s, 1, 0, 0, 0, 0) == error);
    CHECK(impresario_complete_request(s, &request, 0, 0) == error);
    CHECK(impresario_set_policy(s, "fifo") == error);
    CHECK(impresario_set_depth(s, 1, 1) == error);
    CHECK(impresario_hold(s, 0, 0) == error);
    CHECK(impresario_ready(s, 0, 1) == error);
    CHECK(impresario_stats(s, &stats) == error);
    CHECK(impresario_stats_json(s, text, sizeof text) == error);
    CHECK(impresario_reset_stats(s) == error);
    CHECK(impresario_set_read_ahead(s, 1 << 20) == error);
    CHECK(impresario_start_trace(s, "/nowhere", "name") == error);
    CHECK(impresario_stop_trace(s) == error);
    CHECK(impresario_set_prediction(s, "/nowhere", "name") == error);
    CHECK(impresario_destroy(s, 0, NULL, NULL) == error);
    CHECK(strlen(impresario_last_error()) > 0);
}

static void bad_options(void) {
    impresario_options_t o = IMPRESARIO_OPTIONS_INIT;
    o.size = 0;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("size is 0");
    o.size = sizeof o - 1;
    CHECK(!impresario_create(&o));
    o = (impresario_options_t)IMPRESARIO_OPTIONS_INIT;
    o.policy = "nosuch";
    CHECK(!impresario_create(&o));
    CHECK_SAYS("\"nosuch\"");
    o.policy = "mlf quantum_bytes=1";
    CHECK(!impresario_create(&o));
    CHECK_SAYS("quantum_bytes");
    o.policy = "twins";
    CHECK(!impresario_create(&o));
    CHECK_SAYS("two data servers");
    o.policy = "\xff";
    CHECK(!impresario_create(&o));
    CHECK_SAYS("UTF-8");
    o.policy = NULL;
    o.lanes = 70000;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("lanes = 70000");
    o.lanes = 0;
    o.queue_requests = 1 << 30;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("queue_requests");
    o.queue_requests = 0;
    o.shared_space = 2;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("shared_space");
    o.shared_space = 0;
    o.dispatch_threads = 2;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("dispatch_threads needs callbacks");
    o.on_batch = ignore_batch;
    o.dispatch_threads = 1000;
    CHECK(!impresario_create(&o));
    CHECK_SAYS("dispatch_threads = 1000");
    CHECK(!impresario_create_from_text(NULL, NULL));
    CHECK_SAYS("NULL");
    CHECK(!impresario_create_from_text("lanes = 1\nlams = 2", NULL));
    CHECK_SAYS("line 2");
    CHECK(!impresario_create_from_file("/nowhere/at.all", NULL));
    CHECK_SAYS("/nowhere/at.all");
    /* a newer program's member that is set */
    struct { impresario_options_t o; uint64_t more; } newer = { IMPRESARIO_OPTIONS_INIT, 1 };
    newer.o.size = sizeof newer;
    CHECK(!impresario_create(&newer.o));
    CHECK_SAYS("does not know");
    newer.more = 0;
    impresario_t *s = impresario_create(&newer.o);
    CHECK(s);
    CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
}

static void bad_requests(impresario_t *s) {
    impresario_submission_t good = read_of(1, 0, 4096, 7), sub = good;
    CHECK(impresario_submit(s, NULL, NULL) == -EINVAL);
    CHECK_SAYS("submission is NULL");
    sub.size = 3;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    sub = good, sub.op = 9;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    CHECK_SAYS("op 9");
    sub = good, sub.lane = 1;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    CHECK_SAYS("lane 1");
    sub = good, sub.lane = 1 << 20;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    sub = good, sub.len = 0;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    CHECK_SAYS("len is 0");
    sub = good, sub.offset = UINT64_MAX;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    CHECK_SAYS("2^64");
    sub = good, sub.flags = 2;
    CHECK(impresario_submit(s, &sub, NULL) == -EINVAL);
    CHECK(impresario_cancel(s, 12345, NULL) == -EINPROGRESS);
    CHECK(impresario_hold(s, 5, 1) == -EINVAL);
    CHECK(impresario_hold(s, 1 << 20, 1) == -EINVAL);
    CHECK(impresario_set_policy(s, NULL) == -EINVAL);
    CHECK(impresario_set_policy(s, "fifo merge=maybe") == -EINVAL);
    CHECK_SAYS("merge");
    CHECK(impresario_set_policy(s, "fifo merge") == -EINVAL);
    CHECK_SAYS("key=value");
    CHECK(impresario_next(s, 0, NULL) == -EINVAL);
    const impresario_batch_t *batch;
    CHECK(impresario_next(s, 0, &batch) == -ETIMEDOUT);
    CHECK(impresario_next(s, 1000, &batch) == -ETIMEDOUT);
    impresario_stats_t stats;
    memset(&stats, 0, sizeof stats);
    CHECK(impresario_stats(s, &stats) == -EINVAL);
    CHECK(impresario_stats(s, NULL) == -EINVAL);
    stats.size = sizeof stats;
    CHECK(impresario_stats(s, &stats) == 0);
    CHECK(stats.accepted == 0 && stats.size == sizeof stats);

    CHECK(impresario_submit(s, &good, NULL) == 0);
    CHECK(impresario_next(s, 1000000, &batch) == 0);
    CHECK(impresario_complete(s, batch->id, -5, 0) == -EINVAL);
    CHECK_SAYS("positive");
    impresario_request_t copy = batch->requests[0];
    CHECK(impresario_complete_request(s, NULL, 0, 0) == -EINVAL);
    copy.member = 1;
    CHECK(impresario_complete_request(s, &copy, 0, 0) == -EINVAL);
    copy.member = 0;
    CHECK(impresario_complete_timed(s, batch->id, 0, 0, 5, 4) == -EINVAL);
    uint64_t id = batch->id;
    CHECK(impresario_complete(s, id, 0, 4096) == 0);
    CHECK(impresario_complete(s, id, 0, 4096) == -ENOENT);
    CHECK_SAYS("completed before");
    CHECK(impresario_complete_request(s, &copy, 0, 0) == -ENOENT);
    CHECK(impresario_complete(s, id ^ 8, 0, 0) == -ENOENT);
}

int main(void) {
    CHECK(strcmp(impresario_last_error(), "") == 0);
    CHECK(strlen(impresario_version()) >= 5);
    all_refuse(NULL, -EINVAL);
    all_refuse((impresario_t *)(uintptr_t)0x1235, -EBADF);
    all_refuse((impresario_t *)&all_refuse, -EBADF);
    all_refuse((impresario_t *)UINTPTR_MAX, -EBADF);
    CHECK(impresario_request_bytes(NULL, 0, 1) == 0);
    bad_options();
    impresario_t *before = NULL;
    for (int again = 0; again < 3; again++) {
        impresario_t *s = impresario_create(NULL);
        CHECK(s && s != before);
        if (before) all_refuse(before, -EBADF);
        bad_requests(s);
        CHECK(impresario_destroy(s, 0, NULL, NULL) == 0);
        all_refuse(s, -EBADF);
        before = s;
    }
    puts("ok");
    return 0;
}
