/* How a batch from the scheduler becomes calls of the child, and how their replies are divided again.
 *
 * Requests of a batch that touch and differ in nothing but their range are one large readv or writev. The others are
 * called in order. A merged call that fails or falls short changes nobody's result: the requests that it did not serve
 * are called again, each alone. */
#include "translator.h"

#include <string.h>

enum { CALL_BYTES_MAX = 0x7ffff000 }; /* the kernel moves no more by one call (MAX_RW_COUNT) */
enum { WRITE_BYTES_MAX = 16 << 20 };  /* a merged write is copied, so that this much memory more is taken for each call */

/* A batch that is with the child. */
typedef struct {
    sched_state_t *state;
    impresario_t *scheduler;
    uint64_t id;
    gf_atomic_t calls; /* that have not ended, and 1 while calls are being made */
    gf_atomic_t bytes;
    gf_atomic_t error; /* the last errno of a request that failed */
    uint64_t asked_len; /* bytes of its reads or writes, up to the speculation if it has one */
    gf_atomic_t ahead_bytes; /* that the speculation has read */
    gf_boolean_t ahead;
    struct list_head list; /* in sched_state.flights; nowhere once the scheduler does not wait for it any more */
    inode_t *inode; /* of its file, referenced; if `locks_hold` */
} flight_t;

/* A call of the child, in the `local` of the first request's frame. */
typedef struct {
    flight_t *flight;
    uint32_t count;
    sched_request_t *requests[]; /* in order of offset */
} call_t;

/* Whether the scheduler still waits for the flight; not again. */
static gf_boolean_t flight_leave(flight_t *flight) {
    sched_state_t *state = flight->state;
    if (!state->locks_hold) return _gf_true;
    pthread_mutex_lock(&state->lock);
    gf_boolean_t waits = !list_empty(&flight->list);
    list_del_init(&flight->list);
    pthread_mutex_unlock(&state->lock);
    inode_unref(flight->inode);
    return waits;
}

/* The state may be gone afterwards. */
static void flight_end(flight_t *flight) {
    sched_state_t *state = flight->state;
    if (GF_ATOMIC_DEC(flight->calls) > 0) return;
    uint64_t bytes = (uint64_t)GF_ATOMIC_GET(flight->bytes), ahead = (uint64_t)GF_ATOMIC_GET(flight->ahead_bytes);
    /* Reads that overlap add up to more than their range; where the speculation ends is what the library goes by. */
    if (flight->ahead) bytes = ahead > 0 ? flight->asked_len + ahead : min(bytes, flight->asked_len);
    if (flight_leave(flight))
        impresario_complete(flight->scheduler, flight->id, (int)GF_ATOMIC_GET(flight->error), bytes);
    GF_FREE(flight);
    GF_ATOMIC_DEC(state->flights_open);
}

void sched_release_file(sched_state_t *state, inode_t *inode) {
    flight_t *at, *found;
    do {
        uint64_t id = 0, bytes = 0;
        found = NULL;
        pthread_mutex_lock(&state->lock);
        list_for_each_entry(at, &state->flights, list) {
            if (at->inode != inode) continue;
            found = at;
            id = at->id, bytes = at->asked_len;
            list_del_init(&at->list);
            break;
        }
        pthread_mutex_unlock(&state->lock);
        if (found) impresario_complete(state->scheduler, id, 0, bytes);
    } while (found);
}

static void result(flight_t *flight, int32_t op_ret, int32_t op_errno) {
    if (op_ret > 0)
        GF_ATOMIC_ADD(flight->bytes, op_ret);
    else if (op_ret < 0)
        GF_ATOMIC_INIT(flight->error, op_errno > 0 ? op_errno : EIO);
}

/* ---- one request, one call ---- */

/* After the reply of an unmerged call has been passed on; NULL for an operation that is not scheduled. */
static void call_end(call_t *call, int32_t op_ret, int32_t op_errno) {
    if (!call) return;
    flight_t *flight = call->flight;
    result(flight, op_ret, op_errno);
    sched_request_end(flight->state, call->requests[0]);
    GF_FREE(call);
    flight_end(flight);
}

static call_t *take_local(call_frame_t *frame) {
    call_t *call = frame->local;
    frame->local = NULL;
    return call;
}

static int32_t sched_readv_cbk(call_frame_t *frame, void *cookie, xlator_t *this, int32_t op_ret, int32_t op_errno,
                               struct iovec *vector, int32_t count, struct iatt *stbuf, struct iobref *iobref,
                               dict_t *xdata) {
    call_t *call = take_local(frame);
    (void)cookie, (void)this;
    STACK_UNWIND_STRICT(readv, frame, op_ret, op_errno, vector, count, stbuf, iobref, xdata);
    call_end(call, op_ret, op_errno);
    return 0;
}

static int32_t sched_flush_cbk(call_frame_t *frame, void *cookie, xlator_t *this, int32_t op_ret, int32_t op_errno,
                               dict_t *xdata) {
    call_t *call = take_local(frame);
    (void)cookie, (void)this;
    STACK_UNWIND_STRICT(flush, frame, op_ret, op_errno, xdata);
    call_end(call, op_ret, op_errno);
    return 0;
}

/* The replies of the operations that change a file have one shape. */
#define CHANGE_CBK(fop)                                                                                           \
    static int32_t sched_##fop##_cbk(call_frame_t *frame, void *cookie, xlator_t *this, int32_t op_ret,           \
                                     int32_t op_errno, struct iatt *prebuf, struct iatt *postbuf, dict_t *xdata) { \
        call_t *call = take_local(frame);                                                                         \
        (void)cookie, (void)this;                                                                                 \
        STACK_UNWIND_STRICT(fop, frame, op_ret, op_errno, prebuf, postbuf, xdata);                                \
        call_end(call, op_ret, op_errno);                                                                         \
        return 0;                                                                                                 \
    }
CHANGE_CBK(writev)
CHANGE_CBK(fsync)
CHANGE_CBK(truncate)
CHANGE_CBK(ftruncate)
CHANGE_CBK(discard)
CHANGE_CBK(zerofill)

#define CALL(fop, frame, this, args...) \
    STACK_WIND(frame, sched_##fop##_cbk, FIRST_CHILD(this), FIRST_CHILD(this)->fops->fop, args)

int32_t sched_readv_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, size_t size, off_t offset, uint32_t flags,
                           dict_t *xdata) {
    CALL(readv, frame, this, fd, size, offset, flags, xdata);
    return 0;
}

int32_t sched_writev_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, struct iovec *vector, int32_t count,
                            off_t offset, uint32_t flags, struct iobref *iobref, dict_t *xdata) {
    CALL(writev, frame, this, fd, vector, count, offset, flags, iobref, xdata);
    return 0;
}

int32_t sched_fsync_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, int32_t datasync, dict_t *xdata) {
    CALL(fsync, frame, this, fd, datasync, xdata);
    return 0;
}

int32_t sched_flush_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, dict_t *xdata) {
    CALL(flush, frame, this, fd, xdata);
    return 0;
}

int32_t sched_truncate_resume(call_frame_t *frame, xlator_t *this, loc_t *loc, off_t offset, dict_t *xdata) {
    CALL(truncate, frame, this, loc, offset, xdata);
    return 0;
}

int32_t sched_ftruncate_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, dict_t *xdata) {
    CALL(ftruncate, frame, this, fd, offset, xdata);
    return 0;
}

int32_t sched_discard_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, size_t len, dict_t *xdata) {
    CALL(discard, frame, this, fd, offset, len, xdata);
    return 0;
}

int32_t sched_zerofill_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, off_t len, dict_t *xdata) {
    CALL(zerofill, frame, this, fd, offset, len, xdata);
    return 0;
}

static call_t *call_new(flight_t *flight, uint32_t count) {
    call_t *call = GF_CALLOC(1, sizeof *call + count * sizeof call->requests[0], sched_mt_batch);
    if (call) {
        call->flight = flight;
        call->count = count;
    }
    return call;
}

/* Calls the child for one request. Without memory the operation is passed on untracked: its reply goes straight up,
 * and for the scheduler it has ended. */
static void call_one(flight_t *flight, sched_request_t *request) {
    call_stub_t *stub = request->stub;
    call_t *call = call_new(flight, 1);
    if (call) {
        call->requests[0] = request;
        stub->frame->local = call;
        GF_ATOMIC_INC(flight->calls);
    } else {
        sched_request_end(flight->state, request);
    }
    call_resume(stub);
}

static void call_again(flight_t *flight, sched_request_t *request) {
    GF_ATOMIC_INC(flight->state->alone_again);
    call_one(flight, request);
}

/* ---- several requests, one call ---- */

static uint64_t end_of(const sched_request_t *request) {
    return request->what.offset + request->what.len;
}

/* The part of `from` that begins after `start` bytes and has `len`, into `to`, which has room for as many. */
static int32_t slice(const struct iovec *from, int32_t count, size_t start, size_t len, struct iovec *to) {
    int32_t used = 0;
    for (int32_t i = 0; i < count && len > 0; i++) {
        if (start >= from[i].iov_len) {
            start -= from[i].iov_len;
            continue;
        }
        size_t take = min(from[i].iov_len - start, len);
        to[used].iov_base = (char *)from[i].iov_base + start;
        to[used++].iov_len = take;
        len -= take;
        start = 0;
    }
    if (used == 0) to[used++] = (struct iovec){0}; /* the end of the file: nothing, in one piece */
    return used;
}

static int32_t merged_readv_cbk(call_frame_t *frame, void *cookie, xlator_t *this, int32_t op_ret, int32_t op_errno,
                                struct iovec *vector, int32_t count, struct iatt *stbuf, struct iobref *iobref,
                                dict_t *xdata) {
    call_t *call = take_local(frame);
    flight_t *flight = call->flight;
    uint64_t base = call->requests[0]->what.offset;
    uint64_t got = op_ret > 0 ? (uint64_t)op_ret : 0;
    struct iovec few[16], *part = few;
    (void)cookie, (void)this, (void)op_errno;
    if (count > 16) part = GF_CALLOC((size_t)count, sizeof *part, sched_mt_batch);
    for (uint32_t i = 0; i < call->count; i++) {
        sched_request_t *request = call->requests[i];
        call_stub_t *stub = request->stub;
        uint64_t start = request->what.offset - base;
        uint64_t len = min(request->what.len, got > start ? got - start : 0);
        uint64_t end = request->what.offset + len;
        /* Short of the end of the file says nothing about this request's bytes. */
        if (op_ret < 0 || !part || !stbuf || (len < request->what.len && end < stbuf->ia_size)) {
            call_again(flight, request);
            continue;
        }
        int32_t pieces = slice(vector, count, start, len, part);
        /* As storage/posix does: ENOENT beside success says that the file ends here. */
        int32_t hint = stbuf->ia_size == 0 || end >= stbuf->ia_size ? ENOENT : 0;
        STACK_UNWIND_STRICT(readv, stub->frame, (int32_t)len, hint, part, pieces, stbuf, iobref, xdata);
        call_stub_destroy(stub);
        sched_request_end(flight->state, request);
    }
    if (op_ret > 0) result(flight, op_ret, 0);
    if (part != few) GF_FREE(part);
    GF_FREE(call);
    flight_end(flight);
    return 0;
}

static int32_t merged_writev_cbk(call_frame_t *frame, void *cookie, xlator_t *this, int32_t op_ret, int32_t op_errno,
                                 struct iatt *prebuf, struct iatt *postbuf, dict_t *xdata) {
    call_t *call = take_local(frame);
    flight_t *flight = call->flight;
    uint64_t done = call->requests[0]->what.offset + (op_ret > 0 ? (uint64_t)op_ret : 0);
    struct iatt *before = prebuf;
    (void)cookie, (void)this, (void)op_errno;
    for (uint32_t i = 0; i < call->count; i++) {
        sched_request_t *request = call->requests[i];
        call_stub_t *stub = request->stub;
        if (op_ret < 0 || request->what.offset >= done) {
            call_again(flight, request);
            continue;
        }
        /* Where the call ended, as on a full disk, that request's write is short, as it would have been alone. Called again, its
         * reply would not show that the file has grown. */
        uint64_t len = min(end_of(request), done) - request->what.offset;
        /* Translators above add up the differences of size and blocks, so only one reply may show them. */
        STACK_UNWIND_STRICT(writev, stub->frame, (int32_t)len, 0, before, postbuf, xdata);
        before = postbuf;
        call_stub_destroy(stub);
        sched_request_end(flight->state, request);
    }
    if (op_ret > 0) result(flight, op_ret, 0);
    GF_FREE(call);
    flight_end(flight);
    return 0;
}

static void merged_readv(call_t *call, uint64_t len) {
    default_args_t *args = &call->requests[0]->stub->args;
    call_frame_t *frame = call->requests[0]->stub->frame;
    xlator_t *child = FIRST_CHILD(frame->this);
    fd_t *fd = fd_ref(args->fd);
    dict_t *xdata = args->xdata ? dict_ref(args->xdata) : NULL;
    frame->local = call;
    STACK_WIND(frame, merged_readv_cbk, child, child->fops->readv, fd, len, args->offset, (uint32_t)args->flags, xdata);
    fd_unref(fd);
    if (xdata) dict_unref(xdata);
}

/* Returns -1 without memory; nothing has happened then. The bytes go down in one piece: storage/posix writes each piece of a call by
 * itself, and after one that fell short, as on a full disk, the next at the wrong place, or fails the call and does not tell
 * what was written. */
static int merged_writev(call_t *call) {
    default_args_t *args = &call->requests[0]->stub->args;
    call_frame_t *frame = call->requests[0]->stub->frame;
    xlator_t *child = FIRST_CHILD(frame->this);
    uint64_t len = end_of(call->requests[call->count - 1]) - call->requests[0]->what.offset;
    struct iobuf *whole = iobuf_get2(frame->this->ctx->iobuf_pool, len);
    struct iobref *iobref = whole ? iobref_new() : NULL;
    if (!iobref || iobref_add(iobref, whole) != 0) {
        if (iobref) iobref_unref(iobref);
        if (whole) iobuf_unref(whole);
        return -1;
    }
    char *to = iobuf_ptr(whole);
    for (uint32_t i = 0; i < call->count; i++) {
        sched_request_t *request = call->requests[i];
        iov_unload(to, request->stub->args.vector, request->stub->args.count);
        to += request->what.len;
    }
    struct iovec vector = {.iov_base = iobuf_ptr(whole), .iov_len = len};
    iobuf_unref(whole);
    fd_t *fd = fd_ref(args->fd);
    dict_t *xdata = args->xdata ? dict_ref(args->xdata) : NULL;
    frame->local = call;
    STACK_WIND(frame, merged_writev_cbk, child, child->fops->writev, fd, &vector, 1, args->offset,
               (uint32_t)args->flags, iobref, xdata);
    fd_unref(fd);
    if (xdata) dict_unref(xdata);
    iobref_unref(iobref);
    return 0;
}

/* What a request's dictionary asks for: 0 nothing, 1 that sizes before and after are taken in one step with the write,
 * which holds for a merged one too, 2 anything else. */
static int asks(dict_t *xdata) {
    if (!xdata || xdata->count == 0) return 0;
    return xdata->count == 1 && dict_get(xdata, GLUSTERFS_WRITE_UPDATE_ATOMIC) ? 1 : 2;
}

/* Whether one call can serve both requests; the second begins where the first, or what is merged with it, ends. What is below
 * judges a merged call by the descriptor, lock owner, client and user of the first request:
 * - features/locks goes by lock owner and client where locks are mandatory. That can be switched on at any time, unseen from
 *   here, but has no effect on a file before a lock of it was requested.
 * - features/upcall tells all clients of a write but the one that made it, if they cache: hence MERGE_CLIENT and MERGE_FILE.
 * - features/leases goes by a key in the request's dictionary; requests with one are not merged. */
static gf_boolean_t alike(const sched_state_t *state, sched_request_t *one, sched_request_t *two) {
    default_args_t *a = &one->stub->args, *b = &two->stub->args;
    call_stack_t *r = one->stub->frame->root, *s = two->stub->frame->root;
    enum sched_merge merge = state->set.merge;
    if (a->fd != b->fd || !is_same_lkowner(&r->lk_owner, &s->lk_owner)) {
        if (merge < MERGE_CLIENT || (merge < MERGE_FILE && r->client != s->client)) return _gf_false;
        if (a->fd->inode != b->fd->inode || a->fd->flags != b->fd->flags) return _gf_false;
        if (sched_was_locked(state, a->fd->inode)) return _gf_false;
    }
    if (a->flags != b->flags || (a->fd->flags & O_APPEND) || one->internal != two->internal) return _gf_false;
    if (r->uid != s->uid || r->gid != s->gid || (r->pid < 0) != (s->pid < 0)) return _gf_false;
    return asks(a->xdata) < 2 && asks(a->xdata) == asks(b->xdata);
}

/* The requests from `first` on, of the first `asked`, that one call can serve; `*end` is the offset of its last byte and one. */
static uint32_t mergeable(const sched_state_t *state, const impresario_batch_t *batch, uint32_t asked, uint32_t first,
                          uint64_t *end) {
    sched_request_t *head = (sched_request_t *)(uintptr_t)batch->requests[first].token;
    uint64_t bytes_max = batch->op == IMPRESARIO_WRITE ? WRITE_BYTES_MAX : CALL_BYTES_MAX;
    uint32_t count = 1;
    *end = end_of(head);
    if (state->set.merge == MERGE_OFF || (batch->op != IMPRESARIO_READ && batch->op != IMPRESARIO_WRITE)) return count;
    for (; first + count < asked; count++) {
        sched_request_t *next = (sched_request_t *)(uintptr_t)batch->requests[first + count].token;
        uint64_t at = next->what.offset;
        if (at < head->what.offset || (batch->op == IMPRESARIO_READ ? at > *end : at != *end)) break;
        if (max(*end, end_of(next)) - head->what.offset > bytes_max || !alike(state, head, next)) break;
        *end = max(*end, end_of(next));
    }
    return count;
}

/* ---- a speculation ---- */

static int32_t ahead_readv_cbk(call_frame_t *frame, void *cookie, xlator_t *this, int32_t op_ret, int32_t op_errno,
                               struct iovec *vector, int32_t count, struct iatt *stbuf, struct iobref *iobref,
                               dict_t *xdata) {
    sched_ahead_t *ahead = frame->local;
    flight_t *flight = ahead->flight;
    sched_state_t *state = flight->state;
    (void)cookie, (void)this, (void)vector, (void)count, (void)stbuf, (void)iobref, (void)xdata;
    if (op_ret > 0) {
        GF_ATOMIC_ADD(flight->ahead_bytes, op_ret);
        sched_ahead_was_read(state, ahead, ahead->offset + (uint64_t)op_ret - 1);
    }
    /* Its failure is that of a batch of its own, and not of the requests before it. */
    if (op_ret < 0 && flight->asked_len == 0) result(flight, op_ret, op_errno);
    sched_ahead_end(ahead);
    flight_end(flight);
    sched_leave(state);
    return 0;
}

static void call_ahead(flight_t *flight, const impresario_request_t *request) {
    sched_ahead_t *ahead = (sched_ahead_t *)(uintptr_t)request->token;
    xlator_t *child = FIRST_CHILD(flight->state->this);
    ahead->flight = flight;
    ahead->offset = request->offset;
    ahead->frame->local = ahead;
    GF_ATOMIC_INC(flight->state->open);
    GF_ATOMIC_INC(flight->state->ahead_calls);
    GF_ATOMIC_INC(flight->calls);
    STACK_WIND(ahead->frame, ahead_readv_cbk, child, child->fops->readv, ahead->fd, request->len,
               (off_t)request->offset, 0, NULL);
}

void sched_batch(void *arg, impresario_t *scheduler, const impresario_batch_t *batch) {
    sched_state_t *state = arg;
    xlator_t *before = THIS;
    THIS = state->this;
    const impresario_request_t *ahead = batch->flags & IMPRESARIO_SPECULATIVE ? &batch->requests[batch->count - 1] : NULL;
    uint32_t asked = ahead ? batch->count - 1 : batch->count;

    if (batch->op == IMPRESARIO_WRITE)
        for (uint32_t i = 0; i < batch->count; i++) GF_ATOMIC_SUB(state->held_bytes, batch->requests[i].len);
    flight_t *flight = GF_CALLOC(1, sizeof *flight, sched_mt_batch);
    if (!flight) {
        /* Passed on untracked, as in call_one(). */
        for (uint32_t i = 0; i < asked; i++) {
            sched_request_t *request = (sched_request_t *)(uintptr_t)batch->requests[i].token;
            call_stub_t *stub = request->stub;
            sched_request_end(state, request);
            call_resume(stub);
        }
        if (ahead) sched_ahead_end((sched_ahead_t *)(uintptr_t)ahead->token);
        impresario_complete(scheduler, batch->id, ENOMEM, 0);
        THIS = before;
        return;
    }
    GF_ATOMIC_INC(state->flights_open);
    flight->state = state;
    flight->scheduler = scheduler;
    flight->id = batch->id;
    GF_ATOMIC_INIT(flight->calls, 1);
    GF_ATOMIC_INIT(flight->bytes, 0);
    GF_ATOMIC_INIT(flight->error, 0);
    GF_ATOMIC_INIT(flight->ahead_bytes, 0);
    flight->ahead = ahead != NULL;
    flight->asked_len = ahead ? ahead->offset - batch->offset : 0;
    if (!ahead && (batch->op == IMPRESARIO_READ || batch->op == IMPRESARIO_WRITE)) flight->asked_len = batch->len;
    INIT_LIST_HEAD(&flight->list);
    if (state->locks_hold) {
        flight->inode =
            inode_ref(asked > 0 ? sched_inode_of(((sched_request_t *)(uintptr_t)batch->requests[0].token)->stub)
                                : ((sched_ahead_t *)(uintptr_t)ahead->token)->fd->inode);
        pthread_mutex_lock(&state->lock);
        list_add_tail(&flight->list, &state->flights);
        pthread_mutex_unlock(&state->lock);
    }
    for (uint32_t first = 0, count; first < asked; first += count) {
        uint64_t end = 0;
        call_t *call = NULL;
        count = mergeable(state, batch, asked, first, &end);
        if (count > 1) call = call_new(flight, count);
        if (call) {
            for (uint32_t i = 0; i < count; i++)
                call->requests[i] = (sched_request_t *)(uintptr_t)batch->requests[first + i].token;
            uint64_t len = end - call->requests[0]->what.offset;
            GF_ATOMIC_INC(flight->calls);
            if (batch->op == IMPRESARIO_READ) {
                merged_readv(call, len);
            } else if (merged_writev(call) != 0) {
                GF_ATOMIC_DEC(flight->calls);
                GF_FREE(call);
                call = NULL;
            }
        }
        if (call) {
            GF_ATOMIC_INC(state->merged_calls);
            GF_ATOMIC_ADD(state->merged_requests, count);
        } else {
            for (uint32_t i = 0; i < count; i++)
                call_one(flight, (sched_request_t *)(uintptr_t)batch->requests[first + i].token);
        }
    }
    if (ahead) call_ahead(flight, ahead);
    /* The file was locked while this was queued. */
    if (state->locks_hold && sched_was_locked(state, flight->inode)) sched_release_file(state, flight->inode);
    flight_end(flight);
    THIS = before;
}
