/* How a file operation becomes a request of the scheduler: what it covers, who sent it, and when it may not wait.
 *
 * Reads and writes are scheduled. The operations that must come after what they cover are barriers: truncate, ftruncate,
 * discard and zerofill wait for everything in their range. fsync, and flush, which is a close, wait for the writes of the file
 * if some of them came through the same descriptor and are not answered; otherwise they pass. What others have outstanding
 * is not promised to them, and as a barrier each would hold back the writes of all processes that share the file. All other
 * operations pass. A request that cannot be queued goes straight to the child, which is what happens without the translator. So
 * does one of a file that was locked, where locks are mandatory: features/locks has a request that meets a lock wait until that
 * goes. In the scheduler such a request would hold a place, and others back, those of the lock's owner among them, who then never
 * unlocks. */
#include "translator.h"

#include <string.h>
#include <time.h>

static const uint64_t TO_THE_END = UINT64_MAX;
enum { CLIENTS_PAUSE_MS = 1000 }; /* clients whose last request is older are not at work */

gf_boolean_t sched_stopping(sched_state_t *state) {
    return __atomic_load_n(&state->stopping, __ATOMIC_SEQ_CST);
}

/* One request fewer. The state may be gone afterwards: who stops the translator waits for the last one, and looks again
 * every few milliseconds, since a request that did not see `stopping` does not signal. */
void sched_leave(sched_state_t *state) {
    if (!sched_stopping(state)) {
        GF_ATOMIC_DEC(state->open);
        return;
    }
    pthread_mutex_lock(&state->lock);
    if (GF_ATOMIC_DEC(state->open) == 0) pthread_cond_broadcast(&state->idle);
    pthread_mutex_unlock(&state->lock);
}

int64_t sched_now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Whether the internal class may have one more request in the scheduler; with `state->lock` held. It is limited while clients are at work.
 * Nothing waits unless one is there, and when that ends this is asked again, so no timer has to tell that clients have stopped. */
static gf_boolean_t internal_may_enter(sched_state_t *state) {
    uint32_t limit = state->set.internal_depth;
    return limit == 0 || state->internal_open < limit ||
           (GF_ATOMIC_GET(state->clients_open) == 0 && sched_now_ms() - GF_ATOMIC_GET(state->client_ms) > CLIENTS_PAUSE_MS);
}

/* Submits what the internal class may have in the scheduler. A request that cannot be queued ends at once and comes
 * here again: the first call goes on with the list, so that a long list is no deep recursion. */
void sched_internal_next(sched_state_t *state) {
    pthread_mutex_lock(&state->lock);
    if (!state->internal_busy) {
        state->internal_busy = _gf_true;
        while (!list_empty(&state->internal) && internal_may_enter(state)) {
            sched_request_t *next = list_first_entry(&state->internal, sched_request_t, list);
            list_del_init(&next->list);
            state->internal_open++;
            pthread_mutex_unlock(&state->lock);
            sched_submit(state, next);
            pthread_mutex_lock(&state->lock);
        }
        state->internal_busy = _gf_false;
    }
    pthread_mutex_unlock(&state->lock);
}

void sched_request_end(sched_state_t *state, sched_request_t *request) {
    if (request->fd) {
        sched_writes_of(state, request->fd, -1);
        fd_unref(request->fd);
    }
    if (request->internal) {
        pthread_mutex_lock(&state->lock);
        state->internal_open--;
        pthread_mutex_unlock(&state->lock);
        sched_internal_next(state);
    } else {
        GF_ATOMIC_DEC(state->clients_open);
    }
    GF_FREE(request);
    sched_leave(state);
}

static void answer_error(call_stub_t *stub, int error) {
    call_frame_t *frame = stub->frame;
    switch (stub->fop) {
        case GF_FOP_READ: default_readv_failure_cbk(frame, error); break;
        case GF_FOP_WRITE: default_writev_failure_cbk(frame, error); break;
        case GF_FOP_FSYNC: default_fsync_failure_cbk(frame, error); break;
        case GF_FOP_FLUSH: default_flush_failure_cbk(frame, error); break;
        case GF_FOP_TRUNCATE: default_truncate_failure_cbk(frame, error); break;
        case GF_FOP_FTRUNCATE: default_ftruncate_failure_cbk(frame, error); break;
        case GF_FOP_DISCARD: default_discard_failure_cbk(frame, error); break;
        case GF_FOP_ZEROFILL: default_zerofill_failure_cbk(frame, error); break;
        default: GF_ASSERT(!"an operation that is not scheduled"); break;
    }
    call_stub_destroy(stub);
}

static void drop(sched_state_t *state, sched_request_t *request, int error) {
    if (request->what.op == IMPRESARIO_WRITE) GF_ATOMIC_SUB(state->held_bytes, request->what.len);
    answer_error(request->stub, error);
    sched_request_end(state, request);
}

void sched_request_dropped(void *arg, uint64_t token) {
    sched_state_t *state = arg;
    xlator_t *before = THIS;
    THIS = state->this;
    GF_ATOMIC_INC(state->disconnected);
    drop(state, (sched_request_t *)(uintptr_t)token, ENOTCONN);
    THIS = before;
}

/* Passes an operation on as if the translator was not there. */
static void pass(sched_state_t *state, sched_request_t *request) {
    call_stub_t *stub = request->stub;
    if (request->what.op == IMPRESARIO_WRITE) GF_ATOMIC_SUB(state->held_bytes, request->what.len);
    GF_ATOMIC_INC(state->unscheduled);
    sched_request_end(state, request);
    call_resume(stub);
}

/* The request may be answered and gone when this returns. */
void sched_submit(sched_state_t *state, sched_request_t *request) {
    int error = impresario_submit(state->scheduler, &request->what, NULL);
    if (error == 0) return;
    if (error != -EAGAIN && error != -ESHUTDOWN)
        gf_log(state->this->name, GF_LOG_WARNING, "a %s is not scheduled: %s", gf_fop_list[request->stub->fop],
               impresario_last_error());
    pass(state, request);
}

void sched_internal_leave(sched_state_t *state, client_t *client) {
    sched_request_t *at, *next;
    struct list_head leaving;
    INIT_LIST_HEAD(&leaving);
    pthread_mutex_lock(&state->lock);
    list_for_each_entry_safe(at, next, &state->internal, list) {
        if (client && at->stub->frame->root->client != client) continue;
        list_move_tail(&at->list, &leaving);
        state->internal_open++; /* ending it takes it off again */
    }
    pthread_mutex_unlock(&state->lock);
    list_for_each_entry_safe(at, next, &leaving, list) {
        list_del_init(&at->list);
        if (client)
            sched_request_dropped(state, (uintptr_t)at);
        else
            pass(state, at);
    }
}

/* Whether a request of the internal class has to wait for others of it. */
static gf_boolean_t waits_its_turn(sched_state_t *state, sched_request_t *request) {
    gf_boolean_t waits = _gf_false;
    pthread_mutex_lock(&state->lock);
    if (!sched_stopping(state) && (!list_empty(&state->internal) || !internal_may_enter(state))) {
        list_add_tail(&request->list, &state->internal);
        waits = _gf_true;
    } else {
        state->internal_open++;
    }
    pthread_mutex_unlock(&state->lock);
    return waits;
}

static void enter(sched_state_t *state, call_frame_t *frame, call_stub_t *stub, uint32_t op, uint64_t file,
                  uint64_t offset, uint64_t len) {
    impresario_submission_t what = IMPRESARIO_SUBMISSION_INIT;
    sched_request_t *request = NULL;
    gf_boolean_t write = op == IMPRESARIO_WRITE;

    /* Counted before `stopping` is read, so that whoever waits for 0 after setting it sees this request. */
    GF_ATOMIC_INC(state->open);
    if (!sched_stopping(state) && !(write && GF_ATOMIC_GET(state->held_bytes) + len > state->set.queue_bytes) &&
        !(state->locks_hold && sched_was_locked(state, sched_inode_of(stub))))
        request = GF_CALLOC(1, sizeof *request, sched_mt_request);
    if (!request) {
        GF_ATOMIC_INC(state->unscheduled);
        sched_leave(state);
        call_resume(stub);
        return;
    }
    GF_ATOMIC_INC(state->requests);
    if (write) GF_ATOMIC_ADD(state->held_bytes, len);
    what.op = op;
    what.file = file;
    what.offset = offset;
    what.len = len;
    what.token = (uintptr_t)request;
    sched_identify(state, frame, &what);
    /* The server flushes the files of a client that has gone: these must not be cancelled with its other requests. */
    if (stub->fop == GF_FOP_FLUSH) what.connection = 0;
    INIT_LIST_HEAD(&request->list);
    request->stub = stub;
    request->what = what;
    request->internal = sched_is_internal(frame);
    if (write) {
        request->fd = fd_ref(stub->args.fd);
        sched_writes_of(state, request->fd, 1);
    }
    if (request->internal) {
        GF_ATOMIC_INC(state->internal_requests);
        if (waits_its_turn(state, request)) {
            sched_internal_next(state); /* the last of the others may have ended meanwhile */
            return;
        }
    } else {
        GF_ATOMIC_INC(state->clients_open);
        GF_ATOMIC_INIT(state->client_ms, sched_now_ms());
    }
    sched_submit(state, request);
}

/* Makes the stub of an operation and enters it; no memory is an error of the operation. */
#define ENTER(fop, frame, this, op, inode, gfid, from, size, args...)                            \
    do {                                                                                         \
        call_stub_t *stub_ = fop_##fop##_stub(frame, sched_##fop##_resume, args);                \
        if (stub_)                                                                               \
            enter((this)->private, frame, stub_, op, sched_file_key(inode, gfid), from, size);   \
        else                                                                                     \
            default_##fop##_failure_cbk(frame, ENOMEM);                                          \
    } while (0)

static uuid_t no_gfid;

static int32_t sched_readv(call_frame_t *frame, xlator_t *this, fd_t *fd, size_t size, off_t offset, uint32_t flags,
                           dict_t *xdata) {
    if (size == 0 || offset < 0) return sched_readv_resume(frame, this, fd, size, offset, flags, xdata);
    ENTER(readv, frame, this, IMPRESARIO_READ, fd->inode, no_gfid, (uint64_t)offset, size, fd, size, offset, flags,
          xdata);
    return 0;
}

static int32_t sched_writev(call_frame_t *frame, xlator_t *this, fd_t *fd, struct iovec *vector, int32_t count,
                            off_t offset, uint32_t flags, struct iobref *iobref, dict_t *xdata) {
    size_t len = iov_length(vector, count);
    if (len == 0 || offset < 0)
        return sched_writev_resume(frame, this, fd, vector, count, offset, flags, iobref, xdata);
    ENTER(writev, frame, this, IMPRESARIO_WRITE, fd->inode, no_gfid, (uint64_t)offset, len, fd, vector, count, offset,
          flags, iobref, xdata);
    return 0;
}

static int32_t sched_fsync(call_frame_t *frame, xlator_t *this, fd_t *fd, int32_t datasync, dict_t *xdata) {
    if (sched_writes_of(this->private, fd, 0) == 0) return sched_fsync_resume(frame, this, fd, datasync, xdata);
    ENTER(fsync, frame, this, IMPRESARIO_SYNC, fd->inode, no_gfid, 0, TO_THE_END, fd, datasync, xdata);
    return 0;
}

static int32_t sched_flush(call_frame_t *frame, xlator_t *this, fd_t *fd, dict_t *xdata) {
    if (sched_writes_of(this->private, fd, 0) == 0) return sched_flush_resume(frame, this, fd, xdata);
    ENTER(flush, frame, this, IMPRESARIO_SYNC, fd->inode, no_gfid, 0, TO_THE_END, fd, xdata);
    return 0;
}

/* A truncate covers the whole file: one that lengthens it changes what a read before its offset returns. */
static int32_t sched_truncate(call_frame_t *frame, xlator_t *this, loc_t *loc, off_t offset, dict_t *xdata) {
    ENTER(truncate, frame, this, IMPRESARIO_TRUNCATE, loc->inode, loc->gfid, 0, TO_THE_END, loc, offset, xdata);
    return 0;
}

static int32_t sched_ftruncate(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, dict_t *xdata) {
    ENTER(ftruncate, frame, this, IMPRESARIO_TRUNCATE, fd->inode, no_gfid, 0, TO_THE_END, fd, offset, xdata);
    return 0;
}

/* The child refuses ranges that make no sense; they wait for the whole file. */
static uint64_t range_start(off_t offset, uint64_t len) {
    return offset < 0 || len == 0 || len > INT64_MAX ? 0 : (uint64_t)offset;
}

static uint64_t range_len(off_t offset, uint64_t len) {
    return offset < 0 || len == 0 || len > INT64_MAX ? TO_THE_END : len;
}

static int32_t sched_discard(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, size_t len, dict_t *xdata) {
    ENTER(discard, frame, this, IMPRESARIO_TRUNCATE, fd->inode, no_gfid, range_start(offset, len),
          range_len(offset, len), fd, offset, len, xdata);
    return 0;
}

static int32_t sched_zerofill(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, off_t len, dict_t *xdata) {
    ENTER(zerofill, frame, this, IMPRESARIO_TRUNCATE, fd->inode, no_gfid, range_start(offset, (uint64_t)len),
          range_len(offset, (uint64_t)len), fd, offset, len, xdata);
    return 0;
}

/* ---- locks ---- */

gf_boolean_t sched_was_locked(const sched_state_t *state, inode_t *inode) {
    uint64_t locked = 0;
    return inode_ctx_get(inode, state->this, &locked) == 0 && locked;
}

inode_t *sched_inode_of(const call_stub_t *stub) {
    return stub->fop == GF_FOP_TRUNCATE ? stub->args.loc.inode : stub->args.fd->inode;
}

/* Before the child has the lock: what is there already may have to wait for it. */
static void note_lock(xlator_t *this, inode_t *inode) {
    sched_state_t *state = this->private;
    uint64_t locked = 1;
    if (!inode) return;
    gf_boolean_t first = !sched_was_locked(state, inode);
    inode_ctx_set(inode, this, &locked);
    if (first && state->locks_hold) sched_release_file(state, inode);
}

static int32_t sched_lk(call_frame_t *frame, xlator_t *this, fd_t *fd, int32_t cmd, struct gf_flock *lock,
                         dict_t *xdata) {
    note_lock(this, fd->inode);
    return default_lk_resume(frame, this, fd, cmd, lock, xdata);
}

/* Locks of a file that a rebalance brings from another brick. */
static int32_t sched_setactivelk(call_frame_t *frame, xlator_t *this, loc_t *loc, lock_migration_info_t *locks,
                                 dict_t *xdata) {
    note_lock(this, loc->inode);
    return default_setactivelk_resume(frame, this, loc, locks, xdata);
}

struct xlator_fops sched_pass_through_fops = {
    .lk = sched_lk,
    .setactivelk = sched_setactivelk,
};

struct xlator_fops sched_fops = {
    .readv = sched_readv,
    .writev = sched_writev,
    .fsync = sched_fsync,
    .flush = sched_flush,
    .truncate = sched_truncate,
    .ftruncate = sched_ftruncate,
    .discard = sched_discard,
    .zerofill = sched_zerofill,
    .lk = sched_lk,
    .setactivelk = sched_setactivelk,
};
