/* Reading ahead: what clients will probably read is read from the child before they do, and the data are dropped. They stay
 * where the storage keeps what was read last, the brick's page cache, from which the clients' own reads are then served.
 *
 * A readv of the child, and not an advice to the kernel, because it is asynchronous below io-threads, goes the way that
 * the clients' reads go, whatever storage that is, and tells when the data are there. It costs a copy into a buffer, of
 * 4 MiB at most, that is freed when the child answers. */
#include "translator.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { NOT_TRIED = -1, NOT_THERE = -2 };
/* After so many parts of which nothing was kept, nothing is read ahead for a while: at first, and at most. */
enum { UNKEPT_MAX = 2, REST_MS_MIN = 10 * 1000, REST_MS_MAX = 10 * 60 * 1000 };

/* ---- what the translator keeps of an open file ---- */

/* With the lock of `fd` held. NULL without memory. */
static sched_open_t *open_of(sched_state_t *state, fd_t *fd, gf_boolean_t make) {
    uint64_t value = 0;
    __fd_ctx_get(fd, state->this, &value);
    sched_open_t *open = (sched_open_t *)(uintptr_t)value;
    if (open || !make) return open;
    open = GF_CALLOC(1, sizeof *open, sched_mt_open);
    if (!open) return NULL;
    open->probe = NOT_TRIED;
    if (__fd_ctx_set(fd, state->this, (uintptr_t)open) == 0) return open;
    GF_FREE(open);
    return NULL;
}

uint64_t sched_writes_of(sched_state_t *state, fd_t *fd, int more) {
    uint64_t writes = 0;
    LOCK(&fd->lock);
    sched_open_t *open = open_of(state, fd, more > 0);
    /* One that could not be counted for want of memory is not counted down either. */
    if (open && (more > 0 || open->writes > 0)) open->writes += (uint64_t)(int64_t)more;
    if (open) writes = open->writes;
    UNLOCK(&fd->lock);
    return writes;
}

int32_t sched_release(xlator_t *this, fd_t *fd) {
    uint64_t value = 0;
    if (fd_ctx_del(fd, this, &value) != 0 || !value) return 0;
    sched_open_t *open = (sched_open_t *)(uintptr_t)value;
    if (open->probe >= 0) close(open->probe);
    GF_FREE(open);
    return 0;
}

/* ---- whether memory has something ---- */

const char *sched_storage_folder(xlator_t *xl) {
    char *folder = NULL;
    for (; xl; xl = xl->children ? xl->children->xlator : NULL)
        if (strcmp(xl->type, "storage/posix") == 0 && dict_get_str(xl->options, "directory", &folder) == 0) return folder;
    return NULL;
}

/* A descriptor of our own for looking into the page cache: storage/posix keeps every file under its gfid as well. This
 * may be a thread that must not wait, so nothing is read from the disk for it: EAGAIN is tried again. */
static int probe_new(sched_state_t *state, inode_t *inode) {
    struct open_how how = {.flags = O_RDONLY | O_NOATIME | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK,
                           .resolve = RESOLVE_CACHED};
    char path[PATH_MAX];
    if (!state->folder) return NOT_THERE;
    int len = snprintf(path, sizeof path, "%s/.glusterfs/%02x/%02x/%s", state->folder, inode->gfid[0], inode->gfid[1],
                       uuid_utoa(inode->gfid));
    if (len < 0 || (size_t)len >= sizeof path) return NOT_THERE;
    int probe = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    return probe >= 0 ? probe : errno == EAGAIN ? NOT_TRIED : NOT_THERE;
}

/* The descriptor lives as long as `fd`, of which the caller has a reference. */
static int probe_of(sched_state_t *state, fd_t *fd, gf_boolean_t make) {
    int probe = NOT_THERE, fresh = NOT_TRIED;
    LOCK(&fd->lock);
    sched_open_t *open = open_of(state, fd, make);
    if (open) probe = open->probe;
    UNLOCK(&fd->lock);
    if (probe != NOT_TRIED || !make) return probe;
    fresh = probe_new(state, fd->inode);
    LOCK(&fd->lock);
    if (open->probe == NOT_TRIED) {
        open->probe = fresh;
        fresh = NOT_TRIED;
    }
    probe = open->probe;
    UNLOCK(&fd->lock);
    if (fresh >= 0) close(fresh); /* another thread was first */
    return probe;
}

int sched_in_memory(void *arg, const impresario_request_t *of, uint64_t offset) {
    fd_t *fd = of->flags & IMPRESARIO_SPECULATIVE ? ((sched_ahead_t *)(uintptr_t)of->token)->fd
                                                  : ((sched_request_t *)(uintptr_t)of->token)->stub->args.fd;
    int probe = probe_of(arg, fd, _gf_false);
    return probe < 0 ? -1 : impresario_in_page_cache(probe, offset);
}

/* Where reads go past the page cache (bricks with o-direct), and where memory is so short that it keeps nothing, every byte read ahead
 * is read twice. What has just been read shows it. */
void sched_ahead_was_read(sched_state_t *state, const sched_ahead_t *ahead, uint64_t last) {
    int probe = probe_of(state, ahead->fd, _gf_false);
    int kept = probe < 0 ? -1 : impresario_in_page_cache(probe, last);
    if (kept < 0) return;
    if (kept) {
        GF_ATOMIC_INIT(state->unkept, 0);
        GF_ATOMIC_INIT(state->rest_ms, 0);
        return;
    }
    int64_t now = sched_now_ms(), rest = GF_ATOMIC_GET(state->rest_ms);
    rest = rest < REST_MS_MIN ? REST_MS_MIN : rest;
    /* What was begun before a rest says nothing new. */
    if (GF_ATOMIC_INC(state->unkept) < UNKEPT_MAX || now < GF_ATOMIC_GET(state->ahead_from_ms)) return;
    GF_ATOMIC_INIT(state->ahead_from_ms, now + rest);
    GF_ATOMIC_INIT(state->rest_ms, rest * 2 < REST_MS_MAX ? rest * 2 : REST_MS_MAX);
    gf_log(state->this->name, GF_LOG_INFO,
           "the page cache keeps nothing of what is read ahead (o-direct, or too little memory): nothing is read ahead for %" PRId64 " s",
           rest / 1000);
}

/* ---- speculations ---- */

int sched_may_read_ahead(void *arg, const impresario_submission_t *after, uint64_t offset, uint64_t len,
                         uint64_t *token) {
    sched_state_t *state = arg;
    sched_request_t *request = (sched_request_t *)(uintptr_t)after->token;
    call_stub_t *stub = request->stub;
    sched_ahead_t *ahead = NULL;
    xlator_t *before = THIS;
    if (stub->fop != GF_FOP_READ || request->internal || sched_stopping(state)) return -1;
    /* Such a read goes past the page cache. */
    if ((stub->args.fd->flags | stub->args.flags) & O_DIRECT) return -1;
    if (len > INT32_MAX || offset > INT64_MAX - len) return -1;
    if (sched_now_ms() < GF_ATOMIC_GET(state->ahead_from_ms)) return -1;
    THIS = state->this;
    ahead = GF_CALLOC(1, sizeof *ahead, sched_mt_ahead);
    /* The same user, process and lock owner, so that what is below judges both alike. */
    if (ahead) ahead->frame = copy_frame(stub->frame);
    if (!ahead || !ahead->frame) {
        GF_FREE(ahead);
        THIS = before;
        return -1;
    }
    ahead->frame->root->client = stub->frame->root->client;
    if (ahead->frame->root->client) gf_client_ref(ahead->frame->root->client);
    ahead->fd = fd_ref(stub->args.fd);
    probe_of(state, ahead->fd, _gf_true);
    *token = (uintptr_t)ahead;
    THIS = before;
    return 0;
}

void sched_ahead_end(sched_ahead_t *ahead) {
    client_t *client = ahead->frame->root->client;
    ahead->frame->local = NULL;
    ahead->frame->root->client = NULL;
    STACK_DESTROY(ahead->frame->root);
    if (client) gf_client_unref(client);
    fd_unref(ahead->fd);
    GF_FREE(ahead);
}

void sched_ahead_dropped(void *arg, uint64_t token) {
    sched_state_t *state = arg;
    xlator_t *before = THIS;
    THIS = state->this;
    sched_ahead_end((sched_ahead_t *)(uintptr_t)token);
    THIS = before;
}
