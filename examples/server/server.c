/* A small storage server on libimpresario: clients read and write numbered files over TCP, and a policy decides which
 * request is next. One thread per client receives requests; the library's threads call back with batches; one preadv
 * or pwritev serves a batch.
 *
 *   server DIRECTORY [PORT [POLICY]]   port 0: any; the port is printed. SIGINT or SIGTERM ends it cleanly.
 */
#define _GNU_SOURCE
#include <impresario.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>

#include "protocol.h"

#define CLIENTS_MAX 64
#define BATCH_MAX 1024 /* no policy delivers more */

/* A request between arrival and reply. Only one thread has it at a time; a thread passes it on under the client's lock,
 * so that the next one sees its writes. */
struct job {
    uint64_t tag;
    uint32_t op, len;
    unsigned char data[];
};

struct client {
    pthread_mutex_t lock; /* of all below, and for writing to the socket */
    pthread_cond_t idle;  /* nothing is outstanding any more */
    pthread_t thread;
    int used, done, fd;
    unsigned outstanding;
};

static struct client clients[CLIENTS_MAX];
static impresario_t *scheduler;
static int directory;
static int stop_pipe[2];

static void on_signal(int number) {
    (void)number;
    if (write(stop_pipe[1], "", 1) < 0) {}
}

/* ---- serving a batch, on a thread of the library ---- */

static int open_file(uint64_t file, int create) {
    char name[32];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)file);
    return openat(directory, name, O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0644);
}

/* Ends a job: sends the reply and counts the job off its client. */
static void answer(struct client *c, struct job *job, int error, uint32_t len) {
    struct answer a = { job->tag, error, len };
    pthread_mutex_lock(&c->lock);
    int told = write_all(c->fd, &a, sizeof a);
    if (told == 1 && len > 0 && job->op == IMPRESARIO_READ) told = write_all(c->fd, job->data, len);
    /* After a partial reply the stream is useless; the client's thread sees its end. */
    if (told != 1) shutdown(c->fd, SHUT_RDWR);
    free(job);
    if (--c->outstanding == 0) pthread_cond_signal(&c->idle);
    pthread_mutex_unlock(&c->lock);
}

/* Takes the job over from the thread that received it. */
static struct job *job_of(const impresario_request_t *request) {
    struct client *c = &clients[request->connection];
    pthread_mutex_lock(&c->lock);
    pthread_mutex_unlock(&c->lock);
    return (struct job *)(uintptr_t)request->token;
}

/* Transfers requests first to last - 1, which are contiguous without overlap. */
static ssize_t move(int fd, const impresario_batch_t *b, uint32_t first, uint32_t last) {
    struct iovec parts[BATCH_MAX];
    int count = (int)(last - first);
    for (uint32_t i = first; i < last; i++) {
        struct job *job = job_of(&b->requests[i]);
        parts[i - first].iov_base = job->data;
        parts[i - first].iov_len = b->requests[i].len;
    }
    off_t at = (off_t)b->requests[first].offset;
    return b->op == IMPRESARIO_READ ? preadv(fd, parts, count, at) : pwritev(fd, parts, count, at);
}

static void serve_data(const impresario_batch_t *b) {
    int fd = open_file(b->file, b->op == IMPRESARIO_WRITE);
    int error = fd < 0 ? errno : 0;
    uint64_t moved = 0;
    /* Requests of a batch touch; reads may overlap. A run without overlap takes one call. */
    for (uint32_t first = 0; first < b->count;) {
        uint32_t last = first + 1;
        while (last < b->count && last - first < BATCH_MAX &&
               b->requests[last].offset == b->requests[last - 1].offset + b->requests[last - 1].len)
            last++;
        ssize_t n = error ? -1 : move(fd, b, first, last);
        if (n < 0 && !error) error = errno;
        uint64_t left = n > 0 ? (uint64_t)n : 0;
        moved += left;
        for (uint32_t i = first; i < last; i++) {
            const impresario_request_t *r = &b->requests[i];
            uint32_t got = (uint32_t)(left < r->len ? left : r->len);
            left -= got;
            /* A read beyond the end of the file returns the bytes before it; a short write is an error. */
            int failed = error ? error : b->op == IMPRESARIO_WRITE && got < r->len ? ENOSPC : 0;
            answer(&clients[r->connection], job_of(r), failed, failed ? 0 : got);
        }
        first = last;
    }
    if (fd >= 0) close(fd);
    if (impresario_complete(scheduler, b->id, error, moved)) fprintf(stderr, "server: %s\n", impresario_last_error());
}

static void serve_barrier(const impresario_batch_t *b) {
    const impresario_request_t *r = &b->requests[0];
    char name[32];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)b->file);
    int error = 0;
    if (b->op == IMPRESARIO_UNLINK) {
        error = unlinkat(directory, name, 0) ? errno : 0;
    } else {
        int fd = open_file(b->file, 0);
        int failed = fd < 0 || (b->op == IMPRESARIO_SYNC ? fsync(fd) : ftruncate(fd, (off_t)r->offset));
        error = failed ? errno : 0;
        if (fd >= 0) close(fd);
    }
    answer(&clients[r->connection], job_of(r), error, 0);
    if (impresario_complete(scheduler, b->id, error, 0)) fprintf(stderr, "server: %s\n", impresario_last_error());
}

static void on_batch(void *arg, impresario_t *s, const impresario_batch_t *b) {
    (void)arg;
    (void)s;
    if (b->op == IMPRESARIO_READ || b->op == IMPRESARIO_WRITE) serve_data(b);
    else serve_barrier(b);
}

/* ---- receiving requests, on the client's thread ---- */

static void forget(void *arg, uint64_t token) {
    struct client *c = arg;
    pthread_mutex_lock(&c->lock);
    free((struct job *)(uintptr_t)token);
    if (--c->outstanding == 0) pthread_cond_signal(&c->idle);
    pthread_mutex_unlock(&c->lock);
}

static int take(struct client *c, uint32_t number) {
    struct ask ask;
    if (read_all(c->fd, &ask, sizeof ask) != 1 || ask.len > LEN_MAX) return 0;
    pthread_mutex_lock(&c->lock); /* passes the job on */
    struct job *job = malloc(sizeof *job + ask.len);
    if (job) {
        job->tag = ask.tag;
        job->op = ask.op;
        job->len = ask.len;
        c->outstanding++;
    }
    pthread_mutex_unlock(&c->lock);
    if (!job) return 0;
    if (ask.op == IMPRESARIO_WRITE && read_all(c->fd, job->data, ask.len) != 1) {
        forget(c, (uintptr_t)job);
        return 0;
    }
    pthread_mutex_lock(&c->lock); /* and its data */
    pthread_mutex_unlock(&c->lock);
    impresario_submission_t s = IMPRESARIO_SUBMISSION_INIT;
    s.file = ask.file;
    s.offset = ask.offset;
    s.len = ask.op == IMPRESARIO_READ || ask.op == IMPRESARIO_WRITE ? ask.len : UINT64_MAX;
    s.op = ask.op;
    s.token = (uintptr_t)job;
    s.client = number;
    s.job = number;
    s.connection = number;
    int refused = impresario_submit(scheduler, &s, NULL);
    if (refused) answer(c, job, -refused, 0);
    return 1;
}

static void *client_thread(void *arg) {
    struct client *c = arg;
    uint32_t number = (uint32_t)(c - clients);
    while (take(c, number)) {}
    /* The client has gone: drop its queued requests, wait for those in service. */
    impresario_cancel_connection(scheduler, number, forget, c);
    pthread_mutex_lock(&c->lock);
    while (c->outstanding > 0) pthread_cond_wait(&c->idle, &c->lock);
    c->done = 1;
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Joins clients that have gone; all of them at the end. */
static void reap(int all) {
    for (int i = 0; i < CLIENTS_MAX; i++) {
        struct client *c = &clients[i];
        pthread_mutex_lock(&c->lock);
        int gone = c->used && (all || c->done);
        if (c->used && all) shutdown(c->fd, SHUT_RD); /* no further requests; answers still go out */
        pthread_mutex_unlock(&c->lock);
        if (!gone) continue;
        pthread_join(c->thread, NULL);
        close(c->fd);
        pthread_mutex_lock(&c->lock);
        c->used = c->done = 0;
        pthread_mutex_unlock(&c->lock);
    }
}

static void welcome(int fd) {
    for (int i = 0; i < CLIENTS_MAX; i++) {
        struct client *c = &clients[i];
        pthread_mutex_lock(&c->lock);
        int mine = !c->used;
        if (mine) {
            c->used = 1;
            c->fd = fd;
        }
        pthread_mutex_unlock(&c->lock);
        if (!mine) continue;
        if (pthread_create(&c->thread, NULL, client_thread, c)) {
            close(fd);
            pthread_mutex_lock(&c->lock);
            c->used = 0;
            pthread_mutex_unlock(&c->lock);
        }
        return;
    }
    close(fd); /* full: the client sees the end of the stream */
}

static int fail(const char *what) {
    fprintf(stderr, "server: %s: %s\n", what, strerror(errno));
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s DIRECTORY [PORT [POLICY]]\n", argv[0]);
        return 2;
    }
    directory = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return fail(argv[1]);
    for (int i = 0; i < CLIENTS_MAX; i++) {
        pthread_mutex_init(&clients[i].lock, NULL);
        pthread_cond_init(&clients[i].idle, NULL);
    }
    impresario_options_t options = IMPRESARIO_OPTIONS_INIT;
    options.policy = argc > 3 ? argv[3] : "mlf";
    options.on_batch = on_batch;
    options.dispatch_threads = 2; /* two batches are served at a time */
    options.lane_requests = 4;
    options.queue_requests = 1000; /* bounds the memory, too: each has at most LEN_MAX bytes */
    scheduler = impresario_create(&options);
    if (!scheduler) {
        fprintf(stderr, "server: %s\n", impresario_last_error());
        return 1;
    }
    if (pipe(stop_pipe)) return fail("pipe");
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    signal(SIGPIPE, SIG_IGN);

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    struct sockaddr_in address;
    memset(&address, 0, sizeof address);
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons((uint16_t)(argc > 2 ? atoi(argv[2]) : 0));
    socklen_t len = sizeof address;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    /* Connections inherit it: a client that does not read its replies cannot block a thread for ever. */
    struct timeval patience = { 5, 0 };
    setsockopt(listener, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, len) || listen(listener, 64) ||
        getsockname(listener, (struct sockaddr *)&address, &len))
        return fail("listen");
    printf("port %u\n", ntohs(address.sin_port));
    fflush(stdout);

    for (;;) {
        struct pollfd ready[2] = { { listener, POLLIN, 0 }, { stop_pipe[0], POLLIN, 0 } };
        if (poll(ready, 2, 1000) < 0 && errno != EINTR) return fail("poll");
        if (ready[1].revents) break;
        if (ready[0].revents & POLLIN) {
            int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0) welcome(fd);
        }
        reap(0);
    }

    close(listener);
    reap(1);
    impresario_stats_t stats;
    memset(&stats, 0, sizeof stats);
    stats.size = sizeof stats;
    impresario_stats(scheduler, &stats);
    int failed = impresario_destroy(scheduler, 5000, NULL, NULL);
    printf("served %llu requests in %llu batches\n", (unsigned long long)stats.completed, (unsigned long long)stats.batches);
    for (int i = 0; i < CLIENTS_MAX; i++) {
        pthread_mutex_destroy(&clients[i].lock);
        pthread_cond_destroy(&clients[i].idle);
    }
    close(stop_pipe[0]);
    close(stop_pipe[1]);
    close(directory);
    return failed ? 1 : 0;
}
