/* An NBD server on libimpresario: exports one file, and a policy decides which request is next. One thread per client
 * receives requests; the library's threads call back with batches; one preadv or pwritev serves what is contiguous.
 *
 *   nbd FILE SOCKET|PORT [POLICY]   SOCKET: a path with a slash. PORT on 127.0.0.1, 0: any. SIGINT or SIGTERM ends it.
 */
#define _GNU_SOURCE
#include <impresario.h>

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
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
#include <sys/un.h>
#include <unistd.h>

/* ---- the protocol: github.com/NetworkBlockDevice/nbd, doc/proto.md; numbers are big endian ---- */

#define NBD_GREETING "NBDMAGICIHAVEOPT\0\3" /* fixed newstyle, no zeroes */
#define NBD_OPTION_MAGIC UINT64_C(0x49484156454f5054)
#define NBD_OPTION_REPLY_MAGIC UINT64_C(0x3e889045565a9)
#define NBD_REQUEST_MAGIC 0x25609513u
#define NBD_REPLY_MAGIC 0x67446698u
#define NBD_NO_ZEROES 2u /* a client's flag */
/* Flags of an export: has flags, flush, FUA, and connections see one another's flushes. */
#define NBD_EXPORT_FLAGS (1u | 4u | 8u | 256u)
#define NBD_FUA 1u

enum { NBD_OPT_EXPORT_NAME = 1, NBD_OPT_ABORT = 2, NBD_OPT_INFO = 6, NBD_OPT_GO = 7 };
enum { NBD_REP_ACK = 1, NBD_REP_INFO = 3 };
enum { NBD_ERR_UNSUP = 1, NBD_ERR_INVALID = 3 }; /* with the highest bit set */
enum { NBD_READ = 0, NBD_WRITE = 1, NBD_DISC = 2, NBD_FLUSH = 3 };

struct __attribute__((packed)) nbd_option { uint64_t magic; uint32_t option, len; };
struct __attribute__((packed)) nbd_option_reply { uint64_t magic; uint32_t option, type, len; };
struct __attribute__((packed)) nbd_info { uint16_t type; uint64_t size; uint16_t flags; };
struct __attribute__((packed)) nbd_request { uint32_t magic; uint16_t flags, type; uint64_t cookie, offset; uint32_t len; };
struct __attribute__((packed)) nbd_reply { uint32_t magic, error; uint64_t cookie; };

/* Whether the whole length came, or went. */
static int all(int fd, void *data, size_t len, int out) {
    for (ssize_t n; len > 0; data = (char *)data + n, len -= (size_t)n) {
        do n = out ? write(fd, data, len) : read(fd, data, len); while (n < 0 && errno == EINTR);
        if (n <= 0) return 0;
    }
    return 1;
}
#define read_all(fd, to, len) all(fd, to, len, 0)
#define write_all(fd, from, len) all(fd, (void *)(from), len, 1)

/* ---- state ---- */

#define CLIENTS_MAX 64
#define BATCH_MAX 1024           /* no policy delivers more */
#define LEN_MAX (32u << 20)      /* bytes of a request, as the protocol advises */
#define MEMORY_MAX (256u << 20)  /* bytes of all requests; clients wait for the rest */
#define OPTION_MAX 4096          /* longer options are refused */
#define PATIENCE_S 30            /* a client that says or hears nothing for so long is disconnected */

/* A request between arrival and reply. Only one thread has it at a time; a thread passes it on under the client's lock,
 * so that the next one sees its writes. */
struct job {
    uint64_t cookie;
    uint32_t op, len, fua;
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
static int file;
static uint64_t file_bytes;
static int stop_pipe[2];
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t memory_freed = PTHREAD_COND_INITIALIZER;
static size_t memory_bytes;

static void on_signal(int number) {
    (void)number;
    if (write(stop_pipe[1], "", 1) < 0) {}
}

/* ---- requests and their memory ---- */

static struct job *job_new(uint32_t len) {
    pthread_mutex_lock(&memory_lock);
    while (memory_bytes + len > MEMORY_MAX) pthread_cond_wait(&memory_freed, &memory_lock);
    struct job *job = malloc(sizeof *job + len);
    if (job) {
        memory_bytes += len;
        job->len = len;
    }
    pthread_mutex_unlock(&memory_lock);
    return job;
}

static void job_free(struct job *job) {
    pthread_mutex_lock(&memory_lock);
    memory_bytes -= job->len;
    pthread_cond_broadcast(&memory_freed);
    pthread_mutex_unlock(&memory_lock);
    free(job);
}

static int reply(struct client *c, uint64_t cookie, int error, const void *data, uint32_t len) {
    struct nbd_reply r = { htobe32(NBD_REPLY_MAGIC), htobe32((uint32_t)error), htobe64(cookie) };
    int told = write_all(c->fd, &r, sizeof r) && write_all(c->fd, data, len);
    /* After a partial reply the stream is useless; the client's thread sees its end. */
    if (!told) shutdown(c->fd, SHUT_RDWR);
    return told;
}

static void job_end(struct client *c, struct job *job) {
    job_free(job);
    if (--c->outstanding == 0) pthread_cond_signal(&c->idle);
}

/* Sends the reply of a job and counts it off its client. */
static void answer(struct client *c, struct job *job, int error) {
    pthread_mutex_lock(&c->lock);
    reply(c, job->cookie, error, job->data, !error && job->op == IMPRESARIO_READ ? job->len : 0);
    job_end(c, job);
    pthread_mutex_unlock(&c->lock);
}

/* Takes the job over from the thread that received it. */
static struct job *job_of(const impresario_request_t *request) {
    struct client *c = &clients[request->connection];
    pthread_mutex_lock(&c->lock);
    pthread_mutex_unlock(&c->lock);
    return (struct job *)(uintptr_t)request->token;
}

/* ---- serving a batch, on a thread of the library ---- */

/* Transfers requests first to last - 1, which are contiguous without overlap; 0 or an errno. */
static int move(const impresario_batch_t *b, uint32_t first, uint32_t last) {
    struct iovec parts[BATCH_MAX];
    uint32_t part = first, fua = 0;
    for (uint32_t i = first; i < last; i++) {
        struct job *job = job_of(&b->requests[i]);
        parts[i - first].iov_base = job->data;
        parts[i - first].iov_len = job->len;
        fua |= job->fua;
    }
    off_t at = (off_t)b->requests[first].offset;
    while (part < last) {
        struct iovec *rest = &parts[part - first];
        int count = (int)(last - part);
        ssize_t n = b->op == IMPRESARIO_READ ? preadv(file, rest, count, at) : pwritev(file, rest, count, at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : EIO; /* the file has become shorter */
        at += n;
        for (; part < last && (size_t)n >= parts[part - first].iov_len; part++) n -= (ssize_t)parts[part - first].iov_len;
        if (n > 0) {
            parts[part - first].iov_base = (char *)parts[part - first].iov_base + n;
            parts[part - first].iov_len -= (size_t)n;
        }
    }
    return fua && fdatasync(file) ? errno : 0;
}

static void on_batch(void *arg, impresario_t *s, const impresario_batch_t *b) {
    (void)arg;
    int failed = 0;
    /* Requests of a batch touch; reads may overlap. A run without overlap takes one call. */
    for (uint32_t first = 0, last; first < b->count; first = last) {
        for (last = first + 1; last < b->count && last - first < BATCH_MAX; last++)
            if (b->requests[last].offset != b->requests[last - 1].offset + b->requests[last - 1].len) break;
        int error = b->op != IMPRESARIO_SYNC ? move(b, first, last) : fdatasync(file) ? errno : 0;
        if (error) failed = error;
        for (uint32_t i = first; i < last; i++) answer(&clients[b->requests[i].connection], job_of(&b->requests[i]), error);
    }
    if (impresario_complete(s, b->id, failed, failed || b->op == IMPRESARIO_SYNC ? 0 : b->len))
        fprintf(stderr, "nbd: %s\n", impresario_last_error());
}

/* ---- receiving requests, on the client's thread ---- */

static int refuse(struct client *c, uint64_t cookie, int error) {
    pthread_mutex_lock(&c->lock);
    int told = reply(c, cookie, error, NULL, 0);
    return pthread_mutex_unlock(&c->lock), told;
}

static void forget(void *arg, uint64_t token) {
    struct client *c = arg;
    pthread_mutex_lock(&c->lock);
    job_end(c, (struct job *)(uintptr_t)token);
    pthread_mutex_unlock(&c->lock);
}

/* Receives and submits one request. 1: go on; 0: the client has gone or broken the protocol; -1: it says good-bye. */
static int take(struct client *c, uint32_t number) {
    struct nbd_request ask;
    struct pollfd idle = { c->fd, POLLIN, 0 };
    poll(&idle, 1, -1); /* between requests a client may be silent, in the middle of one for PATIENCE_S */
    if (!read_all(c->fd, &ask, sizeof ask) || be32toh(ask.magic) != NBD_REQUEST_MAGIC) return 0;
    uint32_t type = be16toh(ask.type), len = be32toh(ask.len);
    uint64_t offset = be64toh(ask.offset), cookie = be64toh(ask.cookie);
    if (type == NBD_DISC) return -1;
    if (type != NBD_READ && type != NBD_WRITE && type != NBD_FLUSH) return refuse(c, cookie, EINVAL);
    if (type == NBD_FLUSH) len = 0;
    if (len > LEN_MAX) return type == NBD_READ && refuse(c, cookie, EOVERFLOW); /* a write's bytes would have to be read */
    struct job *job = job_new(len);
    if (!job) return type != NBD_WRITE && refuse(c, cookie, ENOMEM);
    int came = type != NBD_WRITE || read_all(c->fd, job->data, len);
    if (!came || (type != NBD_FLUSH && (len == 0 || offset > file_bytes || len > file_bytes - offset))) {
        job_free(job);
        return came && refuse(c, cookie, type == NBD_WRITE ? ENOSPC : EINVAL);
    }
    impresario_submission_t s = IMPRESARIO_SUBMISSION_INIT;
    s.file = 1;
    s.offset = type == NBD_FLUSH ? 0 : offset;
    s.len = type == NBD_FLUSH ? UINT64_MAX : len;
    s.op = type == NBD_READ ? IMPRESARIO_READ : type == NBD_WRITE ? IMPRESARIO_WRITE : IMPRESARIO_SYNC;
    s.token = (uintptr_t)job;
    s.client = s.job = s.connection = number;
    pthread_mutex_lock(&c->lock); /* passes the job on */
    job->cookie = cookie;
    job->op = s.op;
    job->fua = type == NBD_WRITE && (be16toh(ask.flags) & NBD_FUA);
    c->outstanding++;
    pthread_mutex_unlock(&c->lock);
    int refused = impresario_submit(scheduler, &s, NULL);
    if (refused) answer(c, job, -refused);
    return 1;
}

/* ---- the handshake ---- */

static int option_reply(int fd, uint32_t option, uint32_t type, const void *data, uint32_t len) {
    struct nbd_option_reply r = { htobe64(NBD_OPTION_REPLY_MAGIC), htobe32(option), htobe32(type), htobe32(len) };
    return write_all(fd, &r, sizeof r) && write_all(fd, data, len);
}

/* Whether requests follow. The export has one name, "", and answers to every other as well. */
static int handshake(int fd) {
    uint32_t flags;
    struct nbd_option o;
    unsigned char data[OPTION_MAX];
    struct nbd_info info = { 0, htobe64(file_bytes), htobe16(NBD_EXPORT_FLAGS) };
    if (!write_all(fd, NBD_GREETING, sizeof NBD_GREETING - 1) || !read_all(fd, &flags, sizeof flags)) return 0;
    for (;;) {
        if (!read_all(fd, &o, sizeof o) || be64toh(o.magic) != NBD_OPTION_MAGIC) return 0;
        uint32_t option = be32toh(o.option), len = be32toh(o.len), name_len;
        if (len > OPTION_MAX || !read_all(fd, data, len)) return 0;
        int told;
        switch (option) {
        case NBD_OPT_EXPORT_NAME:
            memset(data, 0, 124);
            return write_all(fd, &info.size, 10) && write_all(fd, data, be32toh(flags) & NBD_NO_ZEROES ? 0 : 124);
        case NBD_OPT_GO:
        case NBD_OPT_INFO: /* the length of the name, the name, a count and so many numbers of two bytes */
            memcpy(&name_len, data, sizeof name_len);
            if (len < 6 || be32toh(name_len) > len - 6) {
                told = option_reply(fd, option, 1u << 31 | NBD_ERR_INVALID, NULL, 0);
                break;
            }
            told = option_reply(fd, option, NBD_REP_INFO, &info, sizeof info) && option_reply(fd, option, NBD_REP_ACK, NULL, 0);
            if (told && option == NBD_OPT_GO) return 1;
            break;
        case NBD_OPT_ABORT:
            option_reply(fd, option, NBD_REP_ACK, NULL, 0);
            return 0;
        default:
            told = option_reply(fd, option, 1u << 31 | NBD_ERR_UNSUP, NULL, 0);
        }
        if (!told) return 0;
    }
}

/* ---- clients ---- */

static void *client_thread(void *arg) {
    struct client *c = arg;
    uint32_t number = (uint32_t)(c - clients);
    int go_on = handshake(c->fd);
    while (go_on > 0) go_on = take(c, number);
    /* A client that has gone needs no queued requests; one that says good-bye relies on them. */
    if (go_on == 0) impresario_cancel_connection(scheduler, number, forget, c);
    pthread_mutex_lock(&c->lock);
    while (c->outstanding > 0) pthread_cond_wait(&c->idle, &c->lock);
    shutdown(c->fd, SHUT_RDWR);
    c->done = 1;
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* Joins clients that have gone; all of them at the end. */
static void reap(int all) {
    for (struct client *c = clients; c < clients + CLIENTS_MAX; c++) {
        pthread_mutex_lock(&c->lock);
        int gone = c->used && (all || c->done);
        if (c->used && all) shutdown(c->fd, SHUT_RD); /* no further requests; replies still go out */
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
    struct timeval patience = { PATIENCE_S, 0 };
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    for (struct client *c = clients; c < clients + CLIENTS_MAX; c++) {
        if (c->used) continue; /* only this thread changes it */
        c->fd = fd;
        pthread_mutex_lock(&c->lock);
        c->used = !pthread_create(&c->thread, NULL, client_thread, c);
        pthread_mutex_unlock(&c->lock);
        if (c->used) return;
        break;
    }
    close(fd); /* full: the client sees the end of the stream */
}

static int fail(const char *what) {
    return fprintf(stderr, "nbd: %s: %s\n", what, strerror(errno)), 1;
}

/* A listening socket, or -1; says where it listens. */
static int listen_at(const char *where) {
    struct sockaddr_un local = { .sun_family = AF_UNIX };
    struct sockaddr_in net = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(where)) };
    net.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t len = sizeof net;
    int is_path = strchr(where, '/') != NULL, yes = 1;
    if (is_path && strlen(where) >= sizeof local.sun_path) return errno = ENAMETOOLONG, -1;
    if (is_path) strcpy(local.sun_path, where);
    struct sockaddr *address = is_path ? (struct sockaddr *)&local : (struct sockaddr *)&net;
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes)) return -1;
    if (is_path) unlink(where); /* of an earlier run */
    if (bind(fd, address, is_path ? sizeof local : len) || listen(fd, 64)) return -1;
    if (!is_path && getsockname(fd, address, &len)) return -1;
    is_path ? printf("ready %s\n", where) : printf("ready 127.0.0.1:%u\n", ntohs(net.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: %s FILE SOCKET|PORT [POLICY]\n", argv[0]), 2;
    file = open(argv[1], O_RDWR | O_CLOEXEC);
    off_t end = file < 0 ? -1 : lseek(file, 0, SEEK_END); /* works for devices, too */
    if (end < 0) return fail(argv[1]);
    file_bytes = (uint64_t)end;
    for (int i = 0; i < CLIENTS_MAX; i++) {
        pthread_mutex_init(&clients[i].lock, NULL);
        pthread_cond_init(&clients[i].idle, NULL);
    }
    impresario_options_t options = IMPRESARIO_OPTIONS_INIT;
    options.policy = argc > 3 ? argv[3] : "mlf";
    options.on_batch = on_batch;
    options.dispatch_threads = 2; /* two batches are served at a time */
    options.lane_requests = 4;
    scheduler = impresario_create(&options);
    if (!scheduler) return fprintf(stderr, "nbd: %s\n", impresario_last_error()), 1;
    struct sigaction action = { .sa_handler = on_signal };
    if (pipe(stop_pipe) || sigaction(SIGINT, &action, NULL) || sigaction(SIGTERM, &action, NULL)) return fail("signals");
    signal(SIGPIPE, SIG_IGN);
    int listener = listen_at(argv[2]);
    if (listener < 0) return fail(argv[2]);
    for (;;) {
        struct pollfd ready[2] = { { listener, POLLIN, 0 }, { stop_pipe[0], POLLIN, 0 } };
        if (poll(ready, 2, 1000) < 0 && errno != EINTR) return fail("poll");
        if (ready[1].revents) break;
        reap(0);
        int fd = ready[0].revents & POLLIN ? accept4(listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        if (fd >= 0) welcome(fd);
    }
    close(listener);
    reap(1);
    impresario_stats_t stats = { .size = sizeof stats };
    impresario_stats(scheduler, &stats);
    int failed = impresario_destroy(scheduler, 5000, NULL, NULL);
    printf("served %llu requests in %llu batches\n", (unsigned long long)stats.completed, (unsigned long long)stats.batches);
    return failed || fdatasync(file) ? 1 : 0;
}
