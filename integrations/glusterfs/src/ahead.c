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
#include <sys/uio.h>
#include <unistd.h>

enum { NOT_TRIED = -1, NOT_THERE = -2 };

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
    char byte;
    struct iovec one = {&byte, 1};
    fd_t *fd = of->flags & IMPRESARIO_SPECULATIVE ? ((sched_ahead_t *)(uintptr_t)of->token)->fd
                                                  : ((sched_request_t *)(uintptr_t)of->token)->stub->args.fd;
    int probe = probe_of(arg, fd, _gf_false);
    if (probe < 0) return -1;
    ssize_t got = preadv2(probe, &one, 1, (off_t)offset, RWF_NOWAIT);
    /* Beyond the end of the file (0) only a read tells the library where that is. */
    return got > 0 ? 1 : got < 0 && errno == EAGAIN ? 0 : -1;
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
