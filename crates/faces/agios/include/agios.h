/* agios.h - the interface of the AGIOS request-scheduling library, served by Impresario's scheduler.
 *
 * For programs written for AGIOS: recompile, or replace the public libagios.so with this one. Three versions of the
 * interface exist; select one before including:
 *
 *   #define AGIOS_API 2    version 2 of the public library (the default)
 *   #define AGIOS_API 3    the later one: a callback and its argument with every request, metrics
 *   #define AGIOS_API 1    the oldest: int results, struct client, queue ids on adding, six-argument release
 *
 * Common to all versions:
 *   - One scheduler per process: between init and exit. Calls before and after return false (-1), exit does nothing.
 *     After exit, init may be called again.
 *   - A request is known by file, type, length and offset. Equal ones are distinguished by their order: releasing
 *     releases the one delivered first, cancelling removes the youngest that is still queued.
 *   - Callbacks run on one thread of the library, without locks held: they may call any function here except exit. The next
 *     request is chosen when the callback has returned, so if the callback does the I/O itself, the policy chooses among
 *     all requests that have arrived meanwhile. With in_flight_requests = N in the configuration, callbacks should return at
 *     once, and at most N batches of each queue are delivered and not yet released.
 *   - Requests that touch overlapping bytes are delivered in order of arrival when one of them writes.
 *   - Each error is reported in one line on stderr, at most 100 of them per init.
 *   - After a fork, every function fails in the child.
 */
#ifndef IMPRESARIO_AGIOS_H
#define IMPRESARIO_AGIOS_H

#include <stdbool.h>
#include <stdint.h>

#ifndef AGIOS_API
#define AGIOS_API 2
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { RT_READ = 0, RT_WRITE = 1 };

#if AGIOS_API == 2 || AGIOS_API == 3

#if AGIOS_API == 3
#define agios_init agios_v3_init
#define agios_add_request agios_v3_add_request
#endif

/* Starts the library. process_request receives the identifier of one request. process_requests, which may be NULL, receives
 * those of several contiguous ones, of one file and type, in order of offset; the library owns the array, valid until
 * the callback returns. config_file: see agios.conf(5); NULL or "": /etc/agios.conf if it exists. A missing file is
 * reported and means the defaults; an invalid one is refused. max_queue_id: queue ids are 0 to max_queue_id - 1
 * (0 counts as 1); TWINS has exactly that many queues. In API 3 both callbacks may be NULL. */
bool agios_init(void *(*process_request)(int64_t identifier),
                void *(*process_requests)(int64_t *identifiers, int32_t count), char *config_file, int32_t max_queue_id);

/* Stops the library. Drops queued requests. Waits for a running callback, at most 30 s. Not from a callback. */
void agios_exit(void);

/* Adds a request: bytes offset to offset + len - 1 of a file, at most 8 TiB. queue_id: the server (TWINS) or the application (SW, WFQ);
 * else 0. False when an argument is out of range or the library is full (1,048,576 requests, after 10 s). */
bool agios_add_request(char *file_id, int32_t type, int64_t offset, int64_t len, int64_t identifier, int32_t queue_id
#if AGIOS_API == 3
                       /* Called instead of the callbacks given to init, unless NULL. */
                       , void *(*callback)(int64_t identifier, void *argument), void *argument
#endif
);

/* Reports that a delivered request is done. Length first. False if there is no such request: one that is not released
 * while 1,048,576 later ones are delivered is forgotten. */
bool agios_release_request(char *file_id, int32_t type, int64_t len, int64_t offset);

/* Cancels a queued request. Length first. False if there is no such request, or it was delivered. */
bool agios_cancel_request(char *file_id, int32_t type, int64_t len, int64_t offset);

#if AGIOS_API == 3
/* Metrics since the start or the last call. */
struct agios_metrics_t {
    int64_t total_reqnb;               /* requests added */
    int64_t reads;                     /* of them reads */
    int64_t writes;                    /* of them writes */
    int64_t avg_time_between_requests; /* nanoseconds */
    int64_t avg_request_size;          /* bytes */
    int64_t max_request_size;          /* bytes */
    int64_t filenb;                    /* files with requests added or released; at most 65,536 are distinguished */
    int64_t avg_offset_distance;       /* bytes from the end of one request to the start of the next of its file and type */
    int64_t served_bytes;              /* bytes of the released requests */
};

/* A new structure, to be freed with free(); NULL if the library is not running. */
struct agios_metrics_t *agios_get_metrics_and_reset(void);
#endif

#elif AGIOS_API == 1

#define agios_init agios_v1_init
#define agios_add_request agios_v1_add_request
#define agios_release_request agios_v1_release_request
#define agios_cancel_request agios_v1_cancel_request
#define agios_print_stats_file agios_v1_print_stats_file
#define agios_reset_stats agios_v1_reset_stats

#ifdef ORANGEFS_AGIOS
typedef int64_t agios_data_t;
#else
typedef void *agios_data_t;
#endif

/* Callbacks; process_requests may be NULL; is_dev_idle is never called. */
struct client {
    void (*process_request)(agios_data_t data);
    void (*process_requests)(agios_data_t *data, int count);
    int (*is_dev_idle)(void);
};

/* 0, or -1. The structure is read during the call. */
int agios_init(struct client *client, char *config_file, int max_app_id);
void agios_exit(void);

/* 0, or -1. The structure is read during the call; NULL: the one given to init. */
int agios_add_request(char *file_id, short int type, long int offset, long int len, agios_data_t data,
                      struct client *client, int app_id);

/* 1, or 0 if there is no such request. The last two arguments are ignored. */
int agios_release_request(char *file_id, short int type, long int len, long int offset, int sub_request, long int total_len);

/* 1, or 0 if there is no such queued request. */
int agios_cancel_request(char *file_id, short int type, long int len, long int offset);

/* Writes the statistics since the start or the last reset to a file. */
void agios_print_stats_file(char *filename);
void agios_reset_stats(void);

#else
#error "AGIOS_API must be 1, 2 or 3"
#endif

#ifdef __cplusplus
}
#endif

#endif /* IMPRESARIO_AGIOS_H */
