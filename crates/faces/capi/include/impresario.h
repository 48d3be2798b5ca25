/* impresario.h - scheduling of I/O requests, for any storage server. C99, C++98 and later.
 *
 * A program submits requests and receives them in the order and in the batches that a policy chooses. It does the I/O
 * itself and reports the completion. Start with doc/EMBEDDING.md; every function has a manual page: man 3 impresario.
 *
 * Handles.   An impresario_t * is a handle, not an address: never dereference it. A NULL, foreign, or destroyed handle makes
 *            a function return -EINVAL or -EBADF; nothing else happens. Handles are not reused for a long time.
 * Results.   Functions that return int return 0 or a negative errno. impresario_last_error() then returns one line of text
 *            for this thread with the error and the remedy. A failed call changes nothing.
 * Threads.   Every function may be called from any thread at any time, from callbacks too, except where said.
 *            A scheduler may be destroyed while other threads call it: their calls fail from then on. Batches from
 *            impresario_next() become invalid with it, so let the threads that read them finish first.
 * Callbacks. They run without any lock held, on threads of the library (one per lane, at most 8, unless
 *            dispatch_threads says otherwise). At most dispatch_threads / lanes of them, and at least one, run for one
 *            lane at a time. A blocking callback delays only its own lane, provided that each of the others has a
 *            thread; submitting never waits for a callback. Batches of a lane that are out together (lane_requests above 1)
 *            may start in another order than they were chosen. C++ exceptions must not leave a callback.
 * Fork.      Threads do not survive a fork. In the child of a process that has created a scheduler, every function returns
 *            an error (-EINVAL) and never hangs; create schedulers after the fork, or exec.
 * Signals.   No function may be called from a signal handler. The library's threads block all signals but SIGSEGV, SIGBUS,
 *            SIGFPE, SIGILL, SIGTRAP and SIGABRT: your handlers run on your threads. A callback that starts a program
 *            must set the mask itself.
 * Structs.   Their first member is their size; initialise them with the INIT macros. Members may be added at the end.
 */
#ifndef IMPRESARIO_H
#define IMPRESARIO_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface; impresario_version() returns that of the library. */
#define IMPRESARIO_VERSION_MAJOR 0
#define IMPRESARIO_VERSION_MINOR 1

/* A scheduler. */
typedef struct impresario impresario_t;

/* Operations. Reads and writes are scheduled; the others are barriers for the bytes that they cover. Reads and writes that
 * come after a sync do not wait for it. */
enum {
    IMPRESARIO_READ = 0,
    IMPRESARIO_WRITE = 1,
    IMPRESARIO_SYNC = 2,
    IMPRESARIO_TRUNCATE = 3,
    IMPRESARIO_UNLINK = 4
};

/* A request to submit. Requests of one file that overlap keep their order of arrival when one of them writes. */
typedef struct impresario_submission {
    size_t size;         /* sizeof(impresario_submission_t) */
    uint64_t file;       /* any number that identifies the file, such as its inode */
    uint64_t offset;     /* bytes */
    uint64_t len;        /* bytes, 1 to 2^43 (8 TiB); UINT64_MAX in a barrier: to the end */
    uint64_t token;      /* the program's own value, such as (uintptr_t)pointer; returned unchanged */
    uint64_t client;     /* process that sent it */
    uint64_t job;        /* application it belongs to */
    uint64_t lane_offset; /* with IMPRESARIO_LANE_OFFSET: offset on the device, in which contiguity is judged */
    uint32_t connection; /* that it arrived on */
    uint32_t user;       /* on whose behalf */
    uint32_t op;         /* IMPRESARIO_READ, ... */
    uint32_t lane;       /* device or data server that serves it, from 0 */
    uint32_t flags;      /* 0 or IMPRESARIO_LANE_OFFSET */
    uint32_t reserved;   /* 0 */
} impresario_submission_t;

#define IMPRESARIO_LANE_OFFSET 1u
#define IMPRESARIO_SUBMISSION_INIT { sizeof(impresario_submission_t), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* A delivered request. */
typedef struct impresario_request {
    uint64_t id;         /* the number from impresario_submit() */
    uint64_t batch;      /* number of its batch */
    uint64_t token;
    uint64_t file;
    uint64_t offset;
    uint64_t len;
    uint64_t client;
    uint64_t job;
    uint64_t lane_offset; /* as submitted; the offset, without IMPRESARIO_LANE_OFFSET */
    uint64_t arrival_ns; /* when it was submitted, CLOCK_MONOTONIC */
    uint32_t connection;
    uint32_t user;
    uint32_t member;     /* its index in the batch, from 0 */
    uint32_t lane;
    uint32_t op;
    uint32_t flags;      /* 0, or IMPRESARIO_SPECULATIVE: nobody has requested it yet */
} impresario_request_t;

#define IMPRESARIO_SPECULATIVE 1u

/* A batch: requests of one file, lane and operation whose ranges touch, in order of offset. One preadv or pwritev
 * serves it. With IMPRESARIO_LANE_OFFSET ranges touch on the lane: use lane_offset then. The library owns it. It stays
 * valid until it is completed or its scheduler destroyed, and while the callback that received it runs. */
typedef struct impresario_batch {
    uint64_t id;
    uint64_t file;
    uint64_t offset;     /* of the first byte */
    uint64_t len;        /* from the first byte to the last, on the lane */
    uint64_t lane_offset; /* of the first byte, on the lane */
    uint64_t handed_ns;  /* time of delivery, CLOCK_MONOTONIC */
    const impresario_request_t *requests;
    uint32_t count;      /* at least 1 */
    uint32_t lane;
    uint32_t op;
    uint32_t flags;      /* 0, or IMPRESARIO_SPECULATIVE: its last request, or its only one, is a speculation */
} impresario_batch_t;

/* Receives one request. Complete it with impresario_complete_request(), here or later, on any thread. The struct may be
 * copied; the pointer is valid until the callback returns. */
typedef void (*impresario_request_fn)(void *arg, impresario_t *scheduler, const impresario_request_t *request);

/* Receives a batch. Complete it with impresario_complete(), here or later, on any thread. */
typedef void (*impresario_batch_fn)(void *arg, impresario_t *scheduler, const impresario_batch_t *batch);

/* Receives the token of a request that will not be served: cancelled, or queued when its scheduler was destroyed. */
typedef void (*impresario_token_fn)(void *arg, uint64_t token);

/* Reading ahead (read_ahead_bytes). The library predicts what clients will read. Each predicted extent becomes a
 * speculation: a request with IMPRESARIO_SPECULATIVE, last in the batch of the reads that it continues, or alone. Serve it
 * by reading its bytes into a memory where later reads find them, such as the page cache, and complete it as others; one
 * that completes short, without an error, tells where the file ends. Its replies go to nobody: answer the batch's other
 * requests without waiting for it. A request that overtakes it, or a write that covers it, takes it back.
 * A file's requests must go to one lane, without IMPRESARIO_LANE_OFFSET. */

/* Asked during impresario_submit(), without any lock held, whether an extent that `after` makes likely may be read ahead.
 * Returns 0 after setting *token, the token of its request; anything else refuses it. */
typedef int (*impresario_ahead_fn)(void *arg, const impresario_submission_t *after, uint64_t offset, uint64_t len,
                                   uint64_t *token);

/* Tells whether a byte of the request's file is in memory: 1 yes, 0 no, negative: not known. May be called with a lock
 * held: it must not wait, nor call the library, but for impresario_in_page_cache(). */
typedef int (*impresario_in_memory_fn)(void *arg, const impresario_request_t *of, uint64_t offset);

/* Options of a scheduler. Every zero member means its default. */
typedef struct impresario_options {
    size_t size;               /* sizeof(impresario_options_t) */
    const char *policy;        /* "mlf" or "mlf quantum_bytes=65536"; NULL: "fifo" */
    impresario_request_fn on_request; /* receives requests one by one, in order of offset within a batch */
    impresario_batch_fn on_batch;     /* receives whole batches; on_request is then not called */
    void *arg;                 /* first argument of the callbacks. Without any callback, poll with impresario_next() */
    uint32_t lanes;            /* devices or data servers, 1 to 65535; default 1 */
    uint32_t lane_requests;    /* largest number of batches with the program per lane: the hand-off depth; default 32 */
    uint64_t lane_bytes;       /* bytes with the program per lane at which delivery to it stops; default: no limit */
    uint32_t total_requests;   /* largest number of batches with the program; default: no limit */
    uint32_t queue_requests;   /* largest number of requests in the scheduler, 1 to 1048576; default 10000 */
    uint32_t node_rank;        /* index of this server among its peers, from 0 */
    uint32_t shared_space;     /* 1: lanes address one space; overlaps are judged across lanes */
    uint32_t submit_timeout_ms; /* how long a full scheduler makes impresario_submit() wait, but in callbacks; default 10000;
                                   IMPRESARIO_NO_WAIT: not at all */
    uint32_t dispatch_threads; /* threads for callbacks, 1 to 256; default: one per lane, at most 8;
                                  IMPRESARIO_INLINE: callbacks that do not block run on the threads that submit and
                                  complete, after those calls have done their work and released their locks */
    uint64_t read_ahead_bytes; /* bytes read ahead and not yet requested, at most, 4 MiB to 64 GiB; default: none. Needs
                                  may_read_ahead and ahead_dropped, with which it can also be set later */
    impresario_ahead_fn may_read_ahead; /* accepts or refuses a speculation */
    impresario_token_fn ahead_dropped;  /* an accepted speculation will not be delivered. Called during later calls and on
                                           the library's threads, without any lock held; also by impresario_destroy() */
    impresario_in_memory_fn in_memory;  /* NULL: not known; the library then does not see when memory loses what was read
                                           ahead before it is used */
    uint32_t lane_speculations; /* speculations with the program at a time per lane that continue no request; default 16 */
    uint32_t sorted_below;     /* 1: what is below the program sorts requests itself (a kernel's scheduler, a page cache);
                                  for the policy auto */
} impresario_options_t;

#define IMPRESARIO_NO_WAIT UINT32_MAX
#define IMPRESARIO_INLINE UINT32_MAX
#define IMPRESARIO_OPTIONS_INIT { sizeof(impresario_options_t), NULL, NULL, NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
                                  NULL, NULL, NULL, 0, 0 }

/* Statistics since the scheduler was created or reset. Times are nanoseconds. */
typedef struct impresario_stats {
    size_t size;               /* sizeof(impresario_stats_t) */
    uint64_t accepted;         /* requests accepted */
    uint64_t completed;        /* requests completed, failed ones included */
    uint64_t failed;           /* requests in batches that failed */
    uint64_t cancelled;        /* requests cancelled while queued */
    uint64_t blocked;          /* requests that had to wait for an older, conflicting one */
    uint64_t batches;          /* batches delivered */
    uint64_t read_bytes;
    uint64_t write_bytes;
    uint64_t queued;           /* requests in the scheduler now, including blocked ones */
    uint64_t in_flight;        /* batches now with the program */
    uint64_t file_switches;    /* consecutive batches of different files */
    uint64_t queue_ns_p50, queue_ns_p99, queue_ns_max;       /* from arrival to dispatch, per request */
    uint64_t service_ns_p50, service_ns_p99, service_ns_max; /* from delivery to completion, per batch */
    double requests_per_batch;
    double bytes_per_batch;
    double offset_distance_bytes; /* mean between consecutive batches of one file */
    uint64_t ahead_predicted_bytes; /* that reads made likely */
    uint64_t ahead_read_bytes;      /* of these, delivered as speculations */
    uint64_t ahead_hit_bytes;       /* predicted, and requested afterwards */
    uint64_t ahead_wasted_bytes;    /* predicted, and never requested, or lost from memory before that */
    uint64_t ahead_outstanding_bytes; /* predicted, and still to come */
    uint64_t ahead_withheld_bytes;  /* not predicted because the budget was used up */
    uint64_t ahead_stops;           /* times that a stream's predictions did not pay and were stopped */
    uint64_t traced_requests;       /* in the trace that is being written */
    uint64_t untraced_requests;     /* missing from it: they came too fast, or it has ended early */
    uint64_t predicted_requests;     /* requests that the recorded runs predict */
} impresario_stats_t;

/* A policy, and a parameter of one. The strings live as long as the process. */
typedef struct impresario_policy_info {
    size_t size;               /* sizeof(impresario_policy_info_t) */
    const char *name;
    const char *summary;       /* one sentence */
    const char *source;        /* the paper and section it comes from */
    size_t params;             /* how many parameters it has */
} impresario_policy_info_t;

typedef struct impresario_param_info {
    size_t size;               /* sizeof(impresario_param_info_t) */
    const char *name;          /* with its unit last */
    const char *default_value;
    const char *range;         /* in words */
    const char *summary;       /* what it does */
} impresario_param_info_t;

/* ---- create and destroy: man 3 impresario_create ---- */

/* Creates a scheduler from options; NULL stands for all defaults. Returns NULL if they are invalid. */
impresario_t *impresario_create(const impresario_options_t *options);

/* The same with a configuration (TOML) on top of the options, as text or as a file. Keys: see
 * impresario_create(3). */
impresario_t *impresario_create_from_text(const char *text, const impresario_options_t *options);
impresario_t *impresario_create_from_file(const char *path, const impresario_options_t *options);

/* Ends a scheduler: refuses new requests, passes the tokens of queued ones to dropped(arg, token) unless it is NULL,
 * waits at most patience_ms for batches that are with the program, then for callbacks (at least 1 s) and a trace (at least 10 s), and
 * stops the threads. It forgets batches that are
 * not completed by then; completing them later is an error. After it returns 0 no callback runs or will run, so the
 * memory behind `arg` may be freed. -EDEADLK from a callback of this scheduler. -EBUSY if a callback has not returned:
 * the scheduler is closed but still exists; call again. */
int impresario_destroy(impresario_t *scheduler, uint32_t patience_ms, impresario_token_fn dropped, void *arg);

/* ---- requests: man 3 impresario_submit ---- */

/* Submits a request; *id (unless NULL) receives its number. -EAGAIN if the scheduler stayed full. */
int impresario_submit(impresario_t *scheduler, const impresario_submission_t *submission, uint64_t *id);

/* Cancels a queued request; *token (unless NULL) receives its token. -EINPROGRESS if it was delivered, or is gone. */
int impresario_cancel(impresario_t *scheduler, uint64_t id, uint64_t *token);

/* Cancels all queued requests of a connection. Returns their number, or a negative errno. */
int impresario_cancel_connection(impresario_t *scheduler, uint32_t connection, impresario_token_fn cancelled, void *arg);

/* ---- work: man 3 impresario_complete ---- */

/* Waits at most timeout_us (0: not at all; negative: without a limit) for a batch, for schedulers without callbacks.
 * 0 and *batch, or -ETIMEDOUT, or -ESHUTDOWN. Any number of threads may wait. */
int impresario_next(impresario_t *scheduler, int64_t timeout_us, const impresario_batch_t **batch);

/* Completes a batch: error is 0 or an errno, bytes the count transferred from its start. -ENOENT if it is not with the
 * program. */
int impresario_complete(impresario_t *scheduler, uint64_t batch, int error, uint64_t bytes);

/* The same with the time that the device took (CLOCK_MONOTONIC, nanoseconds; 0: the delivery, and now). */
int impresario_complete_timed(impresario_t *scheduler, uint64_t batch, int error, uint64_t bytes, uint64_t started_ns,
                              uint64_t finished_ns);

/* Completes one request of a batch; the last one completes the batch. */
int impresario_complete_request(impresario_t *scheduler, const impresario_request_t *request, int error, uint64_t bytes);

/* The bytes of request number `member` that are done when the batch transferred `bytes` from its start. */
uint64_t impresario_request_bytes(const impresario_batch_t *batch, uint32_t member, uint64_t bytes);

/* ---- control: man 3 impresario_set_policy ---- */

/* Switches the policy, live: "twins window_us=1000". Nothing is lost or repeated. A refusal changes nothing. */
int impresario_set_policy(impresario_t *scheduler, const char *policy);

/* Changes lane_requests and lane_bytes of the options, live; 0 leaves one as it is. Batches that are with the program
 * beyond a smaller depth stay there. */
int impresario_set_depth(impresario_t *scheduler, uint32_t lane_requests, uint64_t lane_bytes);

/* Changes read_ahead_bytes of the options, live; 0: nothing more is read ahead. The policy "none" reads nothing ahead. */
int impresario_set_read_ahead(impresario_t *scheduler, uint64_t bytes);

/* Tells whether a byte of an open file is in the page cache: 1 yes, 0 no, -ENODATA: the kernel does not tell, or the file ends before,
 * -EBADF: the descriptor is negative. Reads nothing and does not wait, where preadv2() with RWF_NOWAIT begins to read what it misses.
 * Asks no file system, so it never tells 0 on those whose reads cannot be told not to wait: network file systems, FUSE, overlayfs, ZFS.
 * A function of its own for impresario_in_memory_fn: needs no scheduler. */
int impresario_in_page_cache(int fd, uint64_t offset);

/* Dispatches no batch to a lane for span_us; 0 ends a hold. */
int impresario_hold(impresario_t *scheduler, uint32_t lane, uint64_t span_us);

/* Reports whether a connection can take data (1) or not (0), for the policies that depend on it: stream, scan, wscan,
 * sstf. A connection counts as ready until reported otherwise. */
int impresario_ready(impresario_t *scheduler, uint32_t connection, int ready);

/* ---- recorded runs: man 3 impresario_set_prediction ---- */

/* Records every request that ends from now on in a new file of `folder`, NAME-NUMBER.imt, which the program `impresario
 * trace` reads, too. `name` tells servers that share the folder apart; it has no slash. Serving never waits for the trace;
 * the call waits for its file system 10 s at most. -EINVAL if that has not answered by then, or a trace is being written already. */
int impresario_start_trace(impresario_t *scheduler, const char *folder, const char *name);

/* Ends the trace. -ENOENT if there is none, -EIO if it had ended early, as on a full disk, or its file system does not take it
 * within 10 s. */
int impresario_stop_trace(impresario_t *scheduler);

/* Predicts requests by recorded runs from now on, replacing earlier ones: for policies that use predictions, and for reading
 * ahead. `traces`: files and folders, separated by colons, with traces of this `name`; of a folder the newest are used. NULL:
 * no recorded runs. File keys must be the same in every run. Blocks while it reads the files, up to a million requests, and
 * returns how many requests they predict, or a negative errno: a trace of another name, a damaged or unfinished one, or one of a
 * later format changes nothing. */
int impresario_set_prediction(impresario_t *scheduler, const char *traces, const char *name);

/* ---- statistics and information: man 3 impresario_stats ---- */

/* Fills in at most stats->size bytes. */
int impresario_stats(impresario_t *scheduler, impresario_stats_t *stats);

/* All statistics as JSON. Like snprintf: returns the length without the zero byte, and writes at most `size` bytes,
 * always ending with zero; or a negative errno. */
int impresario_stats_json(impresario_t *scheduler, char *text, size_t size);

/* Zeroes the statistics. */
int impresario_reset_stats(impresario_t *scheduler);

/* Policy number `index` from 0, and its parameter number `param`. -ENOENT when there are no more. */
int impresario_policy(size_t index, impresario_policy_info_t *info);
int impresario_policy_param(size_t index, size_t param, impresario_param_info_t *info);

/* One line about this thread's last error, or "". Valid until the thread's next call. Never NULL. */
const char *impresario_last_error(void);

/* "0.1.0" */
const char *impresario_version(void);

#ifdef __cplusplus
}
#endif

#endif /* IMPRESARIO_H */
