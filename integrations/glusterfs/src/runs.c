/* Recorded runs: the brick's requests are recorded in traces, and traces of earlier runs predict requests. Files are known
 * by their gfids, so a run predicts the next one across restarts of clients and of the brick.
 *
 * Traces may lie on slow or hung file systems, so a thread of its own reads and writes them. An unusable trace is reported in
 * the log; the brick serves all the same. */
#include "translator.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

enum { NAME_BYTES_MAX = 200 };

static gf_boolean_t is_set(const char *value) { return strcmp(value, "off") != 0; }

/* The brick's name in traces: its folder's, which bricks of one server do not share. */
static void name_of(const sched_state_t *state, char name[NAME_BYTES_MAX + 1]) {
    const char *from = state->folder ? state->folder : state->this->name;
    size_t len;
    while (*from == '/') from++;
    len = strlen(from);
    if (len > NAME_BYTES_MAX) from += len - NAME_BYTES_MAX;
    snprintf(name, NAME_BYTES_MAX + 1, "%s", *from ? from : "brick");
    for (char *at = name; *at; at++)
        if (*at == '/') *at = '-';
}

static void record(sched_state_t *state, const char *name, const char *folder) {
    const char *log = state->this->name;
    if (state->runs.records) {
        state->runs.records = _gf_false;
        if (impresario_stop_trace(state->scheduler) == 0)
            gf_log(log, GF_LOG_INFO, "requests are not recorded any more");
        else
            gf_log(log, GF_LOG_WARNING, "%s", impresario_last_error());
    }
    if (!is_set(folder)) return;
    state->runs.records = impresario_start_trace(state->scheduler, folder, name) == 0;
    if (state->runs.records)
        gf_log(log, GF_LOG_INFO, "option trace \"%s\": requests are recorded there, in %s-*.imt", folder, name);
    else
        gf_log(log, GF_LOG_WARNING, "option trace \"%s\": no requests are recorded: %s", folder,
               impresario_last_error());
}

static void predict(sched_state_t *state, const char *name, const char *traces) {
    const char *log = state->this->name;
    int requests = impresario_set_prediction(state->scheduler, is_set(traces) ? traces : NULL, name);
    if (requests >= 0) {
        gf_log(log, GF_LOG_INFO, "option prediction \"%s\": recorded runs predict %d requests", traces, requests);
        return;
    }
    gf_log(log, GF_LOG_WARNING, "option prediction \"%s\": no requests are predicted: %s", traces,
           impresario_last_error());
    impresario_set_prediction(state->scheduler, NULL, NULL);
}

/* These two with `state->lock` held. */
static const char *wanted_trace(const sched_state_t *state) {
    return state->runs.stopped ? "off" : state->set.trace;
}

static gf_boolean_t is_due(const sched_state_t *state) {
    return strcmp(state->runs.trace, wanted_trace(state)) != 0 ||
           strcmp(state->runs.prediction, state->set.prediction) != 0;
}

/* Applies the options until they no longer change. A trace is ended before it is loaded. */
static void *follow(void *arg) {
    sched_state_t *state = arg;
    char name[NAME_BYTES_MAX + 1];
    THIS = state->this;
    name_of(state, name);
    pthread_mutex_lock(&state->lock);
    while (is_due(state)) {
        char *trace = gf_strdup(wanted_trace(state)), *prediction = gf_strdup(state->set.prediction);
        if (!trace || !prediction) {
            GF_FREE(trace);
            GF_FREE(prediction);
            break;
        }
        gf_boolean_t records = strcmp(trace, state->runs.trace) != 0;
        gf_boolean_t predicts = strcmp(prediction, state->runs.prediction) != 0;
        GF_FREE(state->runs.trace);
        GF_FREE(state->runs.prediction);
        state->runs.trace = trace, state->runs.prediction = prediction;
        pthread_mutex_unlock(&state->lock);
        /* Only this thread replaces them. */
        if (records) record(state, name, trace);
        if (predicts) predict(state, name, prediction);
        pthread_mutex_lock(&state->lock);
    }
    state->runs.busy = _gf_false;
    pthread_cond_broadcast(&state->runs.idle);
    pthread_mutex_unlock(&state->lock);
    return NULL;
}

/* With `state->lock` held. */
static void follow_now(sched_state_t *state) {
    pthread_t thread;
    if (state->runs.busy || !is_due(state)) return;
    state->runs.busy = gf_thread_create_detached(&thread, follow, state, "schedruns") == 0;
    if (!state->runs.busy)
        gf_log(state->this->name, GF_LOG_WARNING, "no thread for the options trace and prediction: they have no effect");
}

void sched_runs_follow(sched_state_t *state) {
    pthread_mutex_lock(&state->lock);
    follow_now(state);
    pthread_mutex_unlock(&state->lock);
}

int sched_runs_init(sched_state_t *state) {
    pthread_cond_init(&state->runs.idle, NULL);
    state->runs.trace = gf_strdup("off");
    state->runs.prediction = gf_strdup("off");
    return state->runs.trace && state->runs.prediction ? 0 : -1;
}

void sched_runs_free(sched_state_t *state) {
    pthread_cond_destroy(&state->runs.idle);
    GF_FREE(state->runs.trace);
    GF_FREE(state->runs.prediction);
}

void sched_runs_go_on(sched_state_t *state) {
    pthread_mutex_lock(&state->lock);
    state->runs.stopped = _gf_false;
    follow_now(state);
    pthread_mutex_unlock(&state->lock);
}

gf_boolean_t sched_runs_stop(sched_state_t *state, int seconds) {
    struct timespec until;
    int waited = 0;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += seconds;
    pthread_mutex_lock(&state->lock);
    state->runs.stopped = _gf_true;
    follow_now(state);
    while (state->runs.busy && waited != ETIMEDOUT)
        waited = pthread_cond_timedwait(&state->runs.idle, &state->lock, &until);
    gf_boolean_t idle = !state->runs.busy;
    pthread_mutex_unlock(&state->lock);
    if (!idle)
        gf_log(state->this->name, GF_LOG_WARNING, "a trace is still being read or written after %d s", seconds);
    return idle;
}
