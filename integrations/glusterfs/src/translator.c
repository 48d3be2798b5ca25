/* How the translator starts, takes its options, reports, and stops: what GlusterFS asks of every translator. */
#include "translator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <glusterfs/statedump.h>

/* SPECULATIONS: what is read ahead by itself at a time; io-threads has 16 threads for everybody unless configured. */
enum { THREADS_MAX = 256, STOP_S = 10, DESTROY_MS = 2000, SPECULATIONS = 4 };

/* ---- options ---- */

/* The numbers here are those that `settings` and `init` read; the library checks policy and rules. */
static struct volume_options options[] = {
    {.key = {"policy"},
     .type = GF_OPTION_TYPE_STR,
     .default_value = "auto",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Scheduling policy with its parameters, such as \"mlf quantum_bytes=65536\"; none: every request is "
                    "handed on at once, and nothing is read ahead."},
    {.key = {"rules"},
     .type = GF_OPTION_TYPE_STR,
     .default_value = "",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Rules of the policies tbf, mclock and wfq: who gets how much."},
    {.key = {"depth"},
     .type = GF_OPTION_TYPE_INT,
     .min = 1,
     .max = 4096,
     .default_value = "16",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Batches below the scheduler at a time."},
    {.key = {"internal-depth"},
     .type = GF_OPTION_TYPE_INT,
     .min = 0,
     .max = 4096,
     .default_value = "1",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Requests of self-heal, rebalance, scrubbing and geo-replication in the scheduler at a time while clients "
                    "are at work; 0: any number."},
    {.key = {"merge"},
     .type = GF_OPTION_TYPE_STR,
     .value = {"off", "fd", "client", "file"},
     .default_value = "client",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Which contiguous requests of a batch become one: of one open file (fd), of one file and client, of one "
                    "file, or none."},
    {.key = {"job"},
     .type = GF_OPTION_TYPE_STR,
     .value = {"process", "group", "owner"},
     .default_value = "process",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "What \"job\" means in rules: a process of a client, a group (the GID of the user, not a process group), "
                    "or a lock owner."},
    {.key = {"queue-bytes"},
     .type = GF_OPTION_TYPE_SIZET,
     .min = 1024 * 1024,
     .max = 1099511627776.0,
     .default_value = "1GB",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Payload of queued writes beyond which writes are not scheduled."},
    {.key = {"read-ahead"},
     .type = GF_OPTION_TYPE_SIZET,
     .min = 0,
     .max = 68719476736.0,
     .default_value = "64MB",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Bytes read into the page cache before clients request them, at most; 0: none. With the policy none "
                    "nothing is read ahead."},
    {.key = {"trace"},
     .type = GF_OPTION_TYPE_STR,
     .default_value = "off",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Folder in which the brick records its requests; off: it records nothing."},
    {.key = {"prediction"},
     .type = GF_OPTION_TYPE_STR,
     .default_value = "off",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Traces of earlier runs of the brick that predict requests: files and folders, separated by colons; "
                    "off: none."},
    {.key = {"queue-requests"},
     .type = GF_OPTION_TYPE_INT,
     .min = 1,
     .max = 1048576,
     .default_value = "65536",
     .op_version = {1},
     .flags = OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Queued requests beyond which requests are not scheduled; read when the brick starts."},
    {.key = {"threads"},
     .type = GF_OPTION_TYPE_STR,
     .default_value = "auto",
     .op_version = {1},
     .flags = OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Threads that call the translator below, 0 to 256; 0: those that receive and answer requests. "
                    "auto: 0 above io-threads, otherwise 16. Read when the brick starts."},
    {.key = {"pass-through"},
     .type = GF_OPTION_TYPE_BOOL,
     .default_value = "false",
     .op_version = {1},
     .flags = OPT_FLAG_SETTABLE | OPT_FLAG_DOC,
     .tags = {"impresario"},
     .description = "Takes the translator out of the way of new requests."},
    {.key = {NULL}},
};

static void settings_free(sched_settings_t *set) {
    GF_FREE(set->policy);
    GF_FREE(set->rules);
    GF_FREE(set->text);
    GF_FREE(set->trace);
    GF_FREE(set->prediction);
    memset(set, 0, sizeof *set);
}

static enum sched_merge merge_of(const char *word) {
    return strcmp(word, "off") == 0      ? MERGE_OFF
           : strcmp(word, "fd") == 0     ? MERGE_FD
           : strcmp(word, "client") == 0 ? MERGE_CLIENT
                                         : MERGE_FILE;
}

static enum sched_job job_of(const char *word) {
    return strcmp(word, "group") == 0 ? JOB_GROUP : strcmp(word, "owner") == 0 ? JOB_OWNER : JOB_PROCESS;
}

/* As GF_OPTION_RECONF, which names a value out of range in the log, and says nothing of what is no value of the option's type. */
#define CHANGED(key, to, kind)                                \
    do {                                                      \
        __label__ wrong;                                      \
        GF_OPTION_RECONF(key, to, changed, kind, wrong);      \
        break;                                                \
    wrong:                                                    \
        change_refused(this, changed, key);                   \
        goto refused;                                         \
    } while (0)

static void change_refused(xlator_t *this, dict_t *changed, char *key) {
    char *value = "";
    if (dict_get_str(changed, key, &value) != 0) value = "";
    gf_log(this->name, GF_LOG_ERROR, "option %s \"%s\" is refused: the old options stay in force", key, value);
}

/* Reads what can be changed live, from the options of the start or of a change (`changed`). At the start GlusterFS logs what it
 * refuses with the option's name. */
static int settings_read(xlator_t *this, dict_t *changed, sched_settings_t *set) {
    char why[256] = "", *policy = NULL, *rules = NULL, *merge = NULL, *job = NULL, *trace = NULL, *prediction = NULL;
    memset(set, 0, sizeof *set);
    if (changed) {
        CHANGED("policy", policy, str);
        CHANGED("rules", rules, str);
        CHANGED("merge", merge, str);
        CHANGED("job", job, str);
        CHANGED("trace", trace, str);
        CHANGED("prediction", prediction, str);
        CHANGED("depth", set->depth, uint32);
        CHANGED("internal-depth", set->internal_depth, uint32);
        CHANGED("queue-bytes", set->queue_bytes, size_uint64);
        CHANGED("read-ahead", set->read_ahead, size_uint64);
    } else {
        GF_OPTION_INIT("policy", policy, str, refused);
        GF_OPTION_INIT("rules", rules, str, refused);
        GF_OPTION_INIT("merge", merge, str, refused);
        GF_OPTION_INIT("job", job, str, refused);
        GF_OPTION_INIT("trace", trace, str, refused);
        GF_OPTION_INIT("prediction", prediction, str, refused);
        GF_OPTION_INIT("depth", set->depth, uint32, refused);
        GF_OPTION_INIT("internal-depth", set->internal_depth, uint32, refused);
        GF_OPTION_INIT("queue-bytes", set->queue_bytes, size_uint64, refused);
        GF_OPTION_INIT("read-ahead", set->read_ahead, size_uint64, refused);
    }
    set->merge = merge_of(merge);
    set->job = job_of(job);
    set->policy = gf_strdup(policy);
    set->rules = gf_strdup(rules ? rules : "");
    /* An empty value is how volume files switch an option off. */
    set->trace = gf_strdup(trace && *trace ? trace : "off");
    set->prediction = gf_strdup(prediction && *prediction ? prediction : "off");
    if (set->policy && set->rules && set->trace && set->prediction)
        set->text = sched_policy_text(set->policy, set->rules, why, sizeof why);
    if (set->text) return 0;
    gf_log(this->name, GF_LOG_ERROR, "option rules \"%s\" is refused: %s", rules ? rules : "",
           why[0] ? why : "no memory");
refused:
    settings_free(set);
    return -1;
}

/* The library has refused an option: names it, or those that the policy is made of. */
static void log_refused(xlator_t *this, const sched_settings_t *set) {
    if (strstr(impresario_last_error(), "read_ahead_bytes"))
        gf_log(this->name, GF_LOG_ERROR, "option read-ahead %" PRIu64 " is refused: %s", set->read_ahead,
               impresario_last_error());
    else if (set->rules[0])
        gf_log(this->name, GF_LOG_ERROR, "option policy \"%s\" with option rules \"%s\" is refused: %s", set->policy,
               set->rules, impresario_last_error());
    else
        gf_log(this->name, GF_LOG_ERROR, "option policy \"%s\" is refused: %s", set->policy, impresario_last_error());
}

static gf_boolean_t has_io_threads(xlator_t *xl) {
    for (; xl; xl = xl->children ? xl->children->xlator : NULL)
        if (strcmp(xl->type, "performance/io-threads") == 0) return !xl->pass_through;
    return _gf_false;
}

/* Whether the locks below can be mandatory. GlusterFS 10 does not put changed options into a translator's dictionary, so this is as
 * the brick started. */
static gf_boolean_t locks_hold(xlator_t *xl) {
    char *mode = NULL;
    for (; xl; xl = xl->children ? xl->children->xlator : NULL)
        if (strcmp(xl->type, "features/locks") == 0)
            return dict_get_str(xl->options, "mandatory-locking", &mode) == 0 && strcmp(mode, "off") != 0;
    return _gf_false;
}

/* The number in option threads, or -1 after a line in the log. */
static int threads_of(xlator_t *this) {
    char *text = NULL, *end = NULL;
    GF_OPTION_INIT("threads", text, str, refused);
    if (strcmp(text, "auto") == 0) return has_io_threads(FIRST_CHILD(this)) ? 0 : 16;
    long number = strtol(text, &end, 10);
    if (end != text && *end == 0 && number >= 0 && number <= THREADS_MAX) return (int)number;
    gf_log(this->name, GF_LOG_ERROR, "option threads \"%s\" is refused: give 0 to %d, or auto", text, THREADS_MAX);
refused:
    return -1;
}

/* ---- start and stop ---- */

static int32_t start(xlator_t *this) {
    impresario_options_t create = IMPRESARIO_OPTIONS_INIT;
    gf_boolean_t pass_through = _gf_false;
    uint32_t queue_requests = 0;
    sched_state_t *state = NULL;
    if (!this->children || this->children->next) {
        gf_log(this->name, GF_LOG_ERROR, "needs exactly one subvolume: the translator whose requests it schedules");
        return -1;
    }
    GF_OPTION_INIT("queue-requests", queue_requests, uint32, failed);
    GF_OPTION_INIT("pass-through", pass_through, bool, failed);
    int threads = threads_of(this);
    if (threads < 0) goto failed;
    state = GF_CALLOC(1, sizeof *state, sched_mt_state);
    if (!state || settings_read(this, NULL, &state->set) != 0 || sched_runs_init(state) != 0) goto failed;
    state->this = this;
    state->threads = (uint32_t)threads;
    state->queue_requests = queue_requests;
    state->folder = sched_storage_folder(FIRST_CHILD(this));
    state->locks_hold = locks_hold(FIRST_CHILD(this));
    INIT_LIST_HEAD(&state->flights);
    INIT_LIST_HEAD(&state->clients);
    INIT_LIST_HEAD(&state->internal);

    create.policy = state->set.text;
    create.on_batch = sched_batch;
    create.arg = state;
    create.lane_requests = state->set.depth;
    create.queue_requests = queue_requests;
    create.submit_timeout_ms = IMPRESARIO_NO_WAIT;
    create.read_ahead_bytes = state->set.read_ahead;
    create.may_read_ahead = sched_may_read_ahead;
    create.ahead_dropped = sched_ahead_dropped;
    create.in_memory = sched_in_memory;
    create.lane_speculations = SPECULATIONS;
    create.sorted_below = 1; /* a page cache and the kernel's scheduler */
    create.dispatch_threads = threads == 0 ? IMPRESARIO_INLINE : (uint32_t)threads;
    state->scheduler = impresario_create(&create);
    if (!state->scheduler) {
        log_refused(this, &state->set);
        goto failed;
    }
    pthread_mutex_init(&state->lock, NULL);
    pthread_cond_init(&state->idle, NULL);
    this->pass_through = pass_through;
    this->private = state;
    sched_runs_follow(state);
    gf_log(this->name, GF_LOG_INFO, "libimpresario %s: policy %s, depth %u, %u threads", impresario_version(),
           state->set.text, state->set.depth, state->threads);
    return 0;
failed:
    if (state) {
        settings_free(&state->set);
        sched_runs_free(state);
    }
    GF_FREE(state);
    return -1;
}

/* New requests pass by, and the queued ones are sent down without limits. Waits for their replies, STOP_S at most. */
static void drain(sched_state_t *state) {
    struct timespec now, look;
    __atomic_store_n(&state->stopping, _gf_true, __ATOMIC_SEQ_CST);
    sched_internal_leave(state, NULL);
    if (impresario_set_policy(state->scheduler, "none") != 0)
        gf_log(state->this->name, GF_LOG_WARNING, "limits stay while stopping: %s", impresario_last_error());
    clock_gettime(CLOCK_REALTIME, &now);
    look = now;
    pthread_mutex_lock(&state->lock);
    while (GF_ATOMIC_GET(state->open) > 0 && look.tv_sec < now.tv_sec + STOP_S) {
        look.tv_nsec += 5000000;
        if (look.tv_nsec >= 1000000000) look.tv_sec++, look.tv_nsec -= 1000000000;
        pthread_cond_timedwait(&state->idle, &state->lock, &look);
    }
    pthread_mutex_unlock(&state->lock);
    if (GF_ATOMIC_GET(state->open) > 0)
        gf_log(state->this->name, GF_LOG_WARNING, "%" PRId64 " requests have no reply after %d s",
               GF_ATOMIC_GET(state->open), STOP_S);
    sched_runs_stop(state, STOP_S);
}

static int32_t notify(xlator_t *this, int32_t event, void *data, ...) {
    sched_state_t *state = this->private;
    if (event == GF_EVENT_PARENT_DOWN && state) drain(state);
    if (event == GF_EVENT_PARENT_UP && state && __atomic_load_n(&state->stopping, __ATOMIC_SEQ_CST)) {
        if (impresario_set_policy(state->scheduler, state->set.text) != 0) log_refused(this, &state->set);
        __atomic_store_n(&state->stopping, _gf_false, __ATOMIC_SEQ_CST);
        sched_runs_go_on(state);
    }
    return default_notify(this, event, data);
}

static void stop(xlator_t *this) {
    sched_state_t *state = this->private;
    sched_client_t *client, *next;
    int ended = -EBUSY;
    if (!state) return;
    if (GF_ATOMIC_GET(state->open) > 0) drain(state);
    gf_boolean_t idle = sched_runs_stop(state, STOP_S);
    /* Callbacks that hang in the child would use the state after it is freed. */
    for (int tries = 0; ended == -EBUSY && tries < 5; tries++)
        ended = impresario_destroy(state->scheduler, DESTROY_MS, sched_request_dropped, state);
    /* Their replies have been passed on, so that these end now. */
    for (int tries = 0; GF_ATOMIC_GET(state->flights_open) > 0 && tries < 200; tries++) gf_nanosleep(5000000);
    this->private = NULL;
    if (ended != 0 || !idle || GF_ATOMIC_GET(state->open) > 0 || GF_ATOMIC_GET(state->flights_open) > 0) {
        gf_log(this->name, GF_LOG_ERROR, "requests are still below; the scheduler's memory is not freed: %s",
               impresario_last_error());
        return;
    }
    list_for_each_entry_safe(client, next, &state->clients, list) list_del_init(&client->list);
    settings_free(&state->set);
    sched_runs_free(state);
    pthread_cond_destroy(&state->idle);
    pthread_mutex_destroy(&state->lock);
    GF_FREE(state);
}

static int32_t reconfigure(xlator_t *this, dict_t *changed) {
    sched_state_t *state = this->private;
    sched_settings_t new, old;
    gf_boolean_t pass_through = _gf_false, other;
    if (!state) return 0;
    GF_OPTION_RECONF("pass-through", pass_through, changed, bool, refused);
    if (settings_read(this, changed, &new) != 0) return -1;
    if (new.read_ahead != state->set.read_ahead && impresario_set_read_ahead(state->scheduler, new.read_ahead) != 0) {
        log_refused(this, &new);
        settings_free(&new);
        return -1;
    }
    other = strcmp(new.text, state->set.text) != 0;
    if (other && impresario_set_policy(state->scheduler, new.text) != 0) {
        log_refused(this, &new);
        impresario_set_read_ahead(state->scheduler, state->set.read_ahead);
        settings_free(&new);
        return -1;
    }
    if (new.depth != state->set.depth) impresario_set_depth(state->scheduler, new.depth, 0);
    pthread_mutex_lock(&state->lock);
    old = state->set;
    state->set = new;
    pthread_mutex_unlock(&state->lock);
    if (other || new.depth != old.depth || new.read_ahead != old.read_ahead)
        gf_log(this->name, GF_LOG_INFO, "policy %s, depth %u, %" PRIu64 " bytes of read-ahead from now on", new.text,
               new.depth, new.read_ahead);
    settings_free(&old);
    sched_runs_follow(state);
    sched_internal_next(state);
    this->pass_through = pass_through;
    return 0;
refused:
    change_refused(this, changed, "pass-through");
    return -1;
}

/* ---- reports ---- */

/* Calls `put` for each figure of the translator and its scheduler. */
static void figures(sched_state_t *state, void (*put)(void *to, const char *name, double value), void *to) {
    impresario_stats_t stats = {.size = sizeof stats};
    put(to, "requests", (double)GF_ATOMIC_GET(state->requests));
    put(to, "internal_requests", (double)GF_ATOMIC_GET(state->internal_requests));
    put(to, "unscheduled_requests", (double)GF_ATOMIC_GET(state->unscheduled));
    put(to, "disconnected_requests", (double)GF_ATOMIC_GET(state->disconnected));
    put(to, "merged_requests", (double)GF_ATOMIC_GET(state->merged_requests));
    put(to, "merged_calls", (double)GF_ATOMIC_GET(state->merged_calls));
    put(to, "repeated_requests", (double)GF_ATOMIC_GET(state->alone_again));
    put(to, "read_ahead_calls", (double)GF_ATOMIC_GET(state->ahead_calls));
    put(to, "open_requests", (double)GF_ATOMIC_GET(state->open));
    put(to, "queued_write_bytes", (double)GF_ATOMIC_GET(state->held_bytes));
    if (impresario_stats(state->scheduler, &stats) != 0) return;
    put(to, "batches", (double)stats.batches);
    put(to, "read_bytes", (double)stats.read_bytes);
    put(to, "write_bytes", (double)stats.write_bytes);
    put(to, "queued_requests", (double)stats.queued);
    put(to, "in_flight_batches", (double)stats.in_flight);
    put(to, "ordered_requests", (double)stats.blocked);
    put(to, "failed_requests", (double)stats.failed);
    put(to, "queue_ns_p50", (double)stats.queue_ns_p50);
    put(to, "queue_ns_p99", (double)stats.queue_ns_p99);
    put(to, "queue_ns_max", (double)stats.queue_ns_max);
    put(to, "service_ns_p50", (double)stats.service_ns_p50);
    put(to, "service_ns_p99", (double)stats.service_ns_p99);
    put(to, "service_ns_max", (double)stats.service_ns_max);
    put(to, "requests_per_batch", stats.requests_per_batch);
    put(to, "bytes_per_batch", stats.bytes_per_batch);
    put(to, "read_ahead_predicted_bytes", (double)stats.ahead_predicted_bytes);
    put(to, "read_ahead_read_bytes", (double)stats.ahead_read_bytes);
    put(to, "read_ahead_hit_bytes", (double)stats.ahead_hit_bytes);
    put(to, "read_ahead_wasted_bytes", (double)stats.ahead_wasted_bytes);
    put(to, "read_ahead_outstanding_bytes", (double)stats.ahead_outstanding_bytes);
    put(to, "read_ahead_withheld_bytes", (double)stats.ahead_withheld_bytes);
    put(to, "read_ahead_stops", (double)stats.ahead_stops);
    put(to, "traced_requests", (double)stats.traced_requests);
    put(to, "untraced_requests", (double)stats.untraced_requests);
    put(to, "predicted_requests", (double)stats.predicted_requests);
}

/* In full: readers of counters do not expect exponents. All but the means are whole numbers. */
static const char *format_of(double value) {
    return value >= 1e15 || value == (double)(int64_t)value ? "%.0f" : "%.3f";
}

static void put_statedump(void *to, const char *name, double value) {
    char text[32];
    (void)to;
    snprintf(text, sizeof text, format_of(value), value);
    gf_proc_dump_write((char *)name, "%s", text);
}

static int32_t statedump(xlator_t *this) {
    sched_state_t *state = this->private;
    sched_client_t *client;
    char key[64];
    int n = 0;
    if (!state) return 0;
    gf_proc_dump_add_section("%s.%s", this->type, this->name);
    figures(state, put_statedump, NULL);
    /* A statedump must not wait for a thread that hangs. */
    if (pthread_mutex_trylock(&state->lock) != 0) return 0;
    gf_proc_dump_write("policy", "%s", state->set.text);
    gf_proc_dump_write("depth", "%u", state->set.depth);
    gf_proc_dump_write("read-ahead", "%" PRIu64, state->set.read_ahead);
    gf_proc_dump_write("trace", "%s", state->set.trace);
    gf_proc_dump_write("prediction", "%s", state->set.prediction);
    gf_proc_dump_write("threads", "%u", state->threads);
    list_for_each_entry(client, &state->clients, list) {
        snprintf(key, sizeof key, "client[%d]", n++);
        gf_proc_dump_write(key, "host=%s key=%" PRIu64 " requests=%" PRId64 " read_bytes=%" PRId64
                           " write_bytes=%" PRId64, client->host, client->key, GF_ATOMIC_GET(client->requests),
                           GF_ATOMIC_GET(client->read_bytes), GF_ATOMIC_GET(client->write_bytes));
    }
    pthread_mutex_unlock(&state->lock);
    return 0;
}

struct metrics {
    xlator_t *this;
    int fd;
};

static void put_metric(void *to, const char *name, double value) {
    struct metrics *metrics = to;
    char text[32];
    snprintf(text, sizeof text, format_of(value), value);
    dprintf(metrics->fd, "%s.impresario.%s %s\n", metrics->this->name, name, text);
}

static int32_t dump_metrics(xlator_t *this, int fd) {
    struct metrics metrics = {this, fd};
    if (this->private) figures(this->private, put_metric, &metrics);
    return 0;
}

static int32_t memory_accounts(xlator_t *this) {
    return xlator_mem_acct_init(this, sched_mt_end + 1);
}

static struct xlator_dumpops dumpops = {.priv = statedump};

static struct xlator_cbks callbacks = {
    .client_destroy = sched_client_destroy,
    .client_disconnect = sched_client_disconnect,
    .release = sched_release,
};

/* What GlusterFS looks up in the shared object: the only name that it exports. */
__attribute__((visibility("default"))) xlator_api_t xlator_api = {
    .init = start,
    .fini = stop,
    .notify = notify,
    .reconfigure = reconfigure,
    .mem_acct_init = memory_accounts,
    .dump_metrics = dump_metrics,
    .op_version = {1},
    .dumpops = &dumpops,
    .fops = &sched_fops,
    .pass_through_fops = &sched_pass_through_fops,
    .cbks = &callbacks,
    .options = options,
    .identifier = "impresario",
    .category = GF_TECH_PREVIEW,
};
