/* What the parts of the GlusterFS translator share: its state, a request, and who calls whom.
 *
 *   requests.c   a file operation becomes a request: its file, range, tenant and order; submitted to the scheduler
 *   ahead.c      what is read before it is requested; what is kept of an open file
 *   runs.c       recorded runs: traces that are written, and traces that predict requests
 *   batches.c    a batch from the scheduler becomes calls of the child, and the child's replies become ours
 *   tenants.c    who sends a request: clients, processes, users, and their names in rules
 *   translator.c options, start, stop, reports
 */
#ifndef IMPRESARIO_GLUSTERFS_TRANSLATOR_H
#define IMPRESARIO_GLUSTERFS_TRANSLATOR_H

#include <glusterfs/call-stub.h>
#include <glusterfs/defaults.h>
#include <glusterfs/glusterfs.h>
#include <glusterfs/logging.h>
#include <glusterfs/xlator.h>
#include <impresario.h>
#include <pthread.h>
#include <stdint.h>

/* Kinds of memory, for GlusterFS's accounts. */
enum {
    sched_mt_state = gf_common_mt_end + 1,
    sched_mt_request,
    sched_mt_batch,
    sched_mt_client,
    sched_mt_open,
    sched_mt_ahead,
    sched_mt_text,
    sched_mt_end
};

/* Which contiguous requests one call of the child may serve: each value allows what those before it do. */
enum sched_merge { MERGE_OFF, MERGE_FD, MERGE_CLIENT, MERGE_FILE };

/* What the scheduler takes for an application (the job of a rule). */
enum sched_job { JOB_PROCESS, JOB_GROUP, JOB_OWNER };

/* A client of the brick: one connection. */
typedef struct sched_client {
    struct list_head list;  /* in sched_state.clients, under its lock */
    uint64_t key;           /* of its host: the same after it has reconnected */
    uint32_t connection;    /* for cancelling what it has queued; never 0 */
    char host[256];
    gf_atomic_t requests, read_bytes, write_bytes;
} sched_client_t;

/* What can be changed while the volume runs. */
typedef struct sched_settings {
    char *policy;           /* owned: the name with its parameters */
    char *rules;            /* owned: as configured, "" for none */
    char *text;             /* owned: both, as the library reads them */
    uint32_t depth;         /* batches with the child */
    uint32_t internal_depth; /* requests of GlusterFS's own processes in the scheduler at a time; 0: no limit */
    uint64_t queue_bytes;   /* payload of queued writes */
    uint64_t read_ahead;    /* bytes read ahead and not yet requested; 0: none */
    char *trace;            /* owned: the folder in which requests are recorded, or "off" */
    char *prediction;       /* owned: the traces that predict requests, or "off" */
    enum sched_merge merge;
    enum sched_job job;
} sched_settings_t;

/* Recorded runs: what was done last for the options `trace` and `prediction`. */
typedef struct sched_runs {
    char *trace, *prediction; /* owned */
    gf_boolean_t records;   /* a trace is being written; known to the thread alone */
    gf_boolean_t busy;      /* the thread is at work */
    gf_boolean_t stopped;   /* nothing is to be recorded */
    pthread_cond_t idle;    /* `busy` has ended */
} sched_runs_t;

typedef struct sched_state {
    xlator_t *this;
    impresario_t *scheduler;
    uint32_t threads;       /* that call the child; 0: those that submit and complete */
    uint32_t queue_requests;
    const char *folder;     /* of the storage below, NULL if that is not storage/posix; its option's */
    gf_boolean_t locks_hold; /* features/locks below has requests wait for locks (mandatory-locking) */

    pthread_mutex_t lock;   /* of all that follows but the atomics; never held while calling anyone */
    pthread_cond_t idle;    /* `open` is 0 */
    sched_settings_t set;
    struct list_head clients;
    uint32_t connections;   /* the last number given to a client */
    struct list_head internal; /* requests of GlusterFS's own processes that wait for their turn */
    uint32_t internal_open; /* those that are in the scheduler */
    gf_boolean_t internal_busy; /* a thread is submitting what waits */
    struct list_head flights; /* if `locks_hold`: batches that count as with the child */
    gf_boolean_t stopping;  /* new requests go straight to the child */
    sched_runs_t runs;

    gf_atomic_t open;       /* requests that are neither answered nor passed on */
    gf_atomic_t held_bytes; /* payload of writes among them that the child does not have yet */
    gf_atomic_t flights_open; /* batches that are with the child; the last reply of one is passed on before the batch ends */
    gf_atomic_t clients_open; /* requests of clients among them */
    gf_atomic_t client_ms;  /* when a client's request came last, CLOCK_MONOTONIC */
    gf_atomic_t unkept;     /* parts read ahead one after the other of which the page cache kept nothing */
    gf_atomic_t rest_ms;    /* how long nothing is read ahead once it keeps nothing */
    gf_atomic_t ahead_from_ms; /* nothing is read ahead before, CLOCK_MONOTONIC */
    /* Counters since the start. */
    gf_atomic_t requests, internal_requests, unscheduled, merged_requests, merged_calls, alone_again, disconnected, ahead_calls;
} sched_state_t;

/* What is kept of an open file, in the context of its descriptor and under its lock. */
typedef struct sched_open {
    uint64_t writes;        /* that are not answered */
    int probe;              /* a descriptor of our own for looking into the page cache; below 0: none */
} sched_open_t;

/* A part of a file that will be read before it is requested. */
typedef struct sched_ahead {
    call_frame_t *frame;    /* with a reference of its client */
    fd_t *fd;               /* referenced */
    void *flight;           /* the batch that it is in */
    uint64_t offset;
} sched_ahead_t;

/* A file operation between its arrival and its reply. */
typedef struct sched_request {
    struct list_head list;  /* in sched_state.internal */
    call_stub_t *stub;      /* the operation and its arguments */
    impresario_submission_t what;
    fd_t *fd;               /* of a write, referenced: see sched_writes_of() */
    gf_boolean_t internal;
} sched_request_t;

/* ---- requests.c ---- */
extern struct xlator_fops sched_fops;
/* The same while the translator is out of the way. */
extern struct xlator_fops sched_pass_through_fops;
/* Whether a lock of the file was requested since the brick has it in memory. */
gf_boolean_t sched_was_locked(const sched_state_t *state, inode_t *inode);
/* The file that an operation changes or reads. */
inode_t *sched_inode_of(const call_stub_t *stub);
/* Gives a request to the scheduler, or straight to the child where the scheduler does not take it. */
void sched_submit(sched_state_t *state, sched_request_t *request);
/* The child's reply has been passed on, or an error: the request is forgotten. */
void sched_request_end(sched_state_t *state, sched_request_t *request);
/* Answers a request that the child does not have with an error. impresario_token_fn: the token is the request. */
void sched_request_dropped(void *state, uint64_t token);
/* Submits what the internal class may have in the scheduler. */
void sched_internal_next(sched_state_t *state);
/* Answers what the internal class has waiting, of one client or (NULL) passes all of it to the child. */
void sched_internal_leave(sched_state_t *state, client_t *client);

gf_boolean_t sched_stopping(sched_state_t *state);
/* Milliseconds of CLOCK_MONOTONIC. */
int64_t sched_now_ms(void);
/* One fewer in `state->open`, after which the state may be gone. */
void sched_leave(sched_state_t *state);

/* ---- ahead.c ---- */
/* How many writes of a descriptor are not answered: changes the count by `more`. */
uint64_t sched_writes_of(sched_state_t *state, fd_t *fd, int more);
int32_t sched_release(xlator_t *this, fd_t *fd);
/* The folder of the storage below `xl`, or NULL. */
const char *sched_storage_folder(xlator_t *xl);
/* impresario_ahead_fn, impresario_token_fn and impresario_in_memory_fn. */
int sched_may_read_ahead(void *state, const impresario_submission_t *after, uint64_t offset, uint64_t len,
                         uint64_t *token);
void sched_ahead_dropped(void *state, uint64_t token);
int sched_in_memory(void *state, const impresario_request_t *of, uint64_t offset);
/* The child has read a part ahead, up to the byte `last`. */
void sched_ahead_was_read(sched_state_t *state, const sched_ahead_t *ahead, uint64_t last);
/* A speculation is forgotten. */
void sched_ahead_end(sched_ahead_t *ahead);

/* ---- runs.c ---- */
int sched_runs_init(sched_state_t *state);
void sched_runs_free(sched_state_t *state);
/* Has a thread do what the options say, if they have changed. */
void sched_runs_follow(sched_state_t *state);
/* Ends the trace; false if the thread is still at work after that time. */
gf_boolean_t sched_runs_stop(sched_state_t *state, int seconds);
/* The brick serves again. */
void sched_runs_go_on(sched_state_t *state);

/* ---- batches.c ---- */
/* impresario_batch_fn: calls the child for a batch. */
void sched_batch(void *state, impresario_t *scheduler, const impresario_batch_t *batch);
/* For the scheduler, the batches of a file that are with the child have ended. */
void sched_release_file(sched_state_t *state, inode_t *inode);
/* Calls the child for an operation; `frame->local` is NULL for one that is not scheduled. For call stubs. */
int32_t sched_readv_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, size_t size, off_t offset, uint32_t flags,
                           dict_t *xdata);
int32_t sched_writev_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, struct iovec *vector, int32_t count,
                            off_t offset, uint32_t flags, struct iobref *iobref, dict_t *xdata);
int32_t sched_fsync_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, int32_t datasync, dict_t *xdata);
int32_t sched_flush_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, dict_t *xdata);
int32_t sched_truncate_resume(call_frame_t *frame, xlator_t *this, loc_t *loc, off_t offset, dict_t *xdata);
int32_t sched_ftruncate_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, dict_t *xdata);
int32_t sched_discard_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, size_t len, dict_t *xdata);
int32_t sched_zerofill_resume(call_frame_t *frame, xlator_t *this, fd_t *fd, off_t offset, off_t len, dict_t *xdata);

/* ---- tenants.c ---- */
/* The job of GlusterFS's own processes: self-heal, rebalance, scrubbing. Group numbers are below 2^32. */
#define INTERNAL_JOB 0x100000000ull
gf_boolean_t sched_is_internal(const call_frame_t *frame);
/* Fills in client, connection, job and user. */
void sched_identify(sched_state_t *state, call_frame_t *frame, impresario_submission_t *what);
uint64_t sched_file_key(inode_t *inode, uuid_t gfid);
/* The policy as the library reads it, or NULL and one line in `why`. */
char *sched_policy_text(const char *policy, const char *rules, char *why, size_t size);
int32_t sched_client_disconnect(xlator_t *this, client_t *client);
int32_t sched_client_destroy(xlator_t *this, client_t *client);

#endif
