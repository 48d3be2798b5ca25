/* agios.h - the interface of the AGIOS request-scheduling library, served by Impresario's scheduler.
 *
 * For programs written for AGIOS: recompile, and link with -lagios. Three versions of the interface exist; select one
 * before including, or with -DAGIOS_API=N:
 *
 *   #define AGIOS_API 2    version 2 of the public library (the default)
 *   #define AGIOS_API 3    its development branch: a callback with every request (7 or 8 arguments), metrics
 *   #define AGIOS_API 1    the oldest: int results, struct client, application ids, prediction
 *
 * Where a version exists with different numbers of arguments, the number given decides.
 *
 * Programs that were linked against a public libagios.so run unchanged with the library of their version: put a link
 * libagios.so to libagios.so.1, libagios.so.2 or libagios.so.3 where the loader finds it. Most programs with the wrong one
 * get a message at agios_init, which then fails. Not told are programs of version 3 that give callbacks to agios_init and
 * find libagios.so.2: it calls those and never the requests' own. And to those that give neither callbacks nor a
 * configuration libagios.so.1 answers -1, which is true to them, after a message.
 *
 * Common to all versions:
 *   - One scheduler per process: between init and exit. Calls before and after return false (-1), exit does nothing.
 *     After exit, init may be called again.
 *   - A request is known by file, type, length and offset. Equal ones are distinguished by their order: releasing
 *     releases the one delivered first, cancelling removes the youngest that is still queued.
 *   - Callbacks run on one thread of the library, without locks held: they may call any function here except exit. They
 *     return: a C++ exception or pthread_exit() that leaves one ends the program. The next request is chosen when the
 *     callback has returned, so if the callback does the I/O itself, the policy chooses among all requests that have
 *     arrived meanwhile. With in_flight_requests = N in the configuration, callbacks should return at once, and at most
 *     N batches of each queue are delivered and not yet released. With the algorithm NOOP callbacks run on the threads
 *     that add, at once and side by side.
 *   - Requests that touch overlapping bytes are delivered in order of arrival when one of them writes (but for NOOP).
 *   - Each error is reported in one line on stderr, at most 100 of them per init.
 *   - After a fork, every function fails in the child.
 */
#ifndef IMPRESARIO_AGIOS_H
#define IMPRESARIO_AGIOS_H

#include <pthread.h> /* programs rely on it */
#include <stdbool.h>
#include <stdint.h>

#ifndef AGIOS_API
#define AGIOS_API 2
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum { RT_READ = 0, RT_WRITE = 1 };

/* Stops the library. Queued requests are delivered first, at once, as far as callbacks serve them within 30 s. Not from a
 * callback. */
void agios_exit(void);

/* Waits until the recorded runs that the configuration names (predict_traces, predict_read_traces) are loaded: until then
 * nothing is foretold. */
void agios_wait_predict_init(void);

/* Ours. Loads traces that this library has written (trace = true in the configuration), which foretell requests from then
 * on: files, and folders of them, separated by colons. False, and nothing changed, if one of them cannot be used. */
bool agios_load_traces(const char *traces);

#if AGIOS_API == 2 || AGIOS_API == 3

#if AGIOS_API == 3
#define agios_init agios_v3_init
#endif

/* Starts the library. process_request receives the identifier of one request. process_requests, which may be NULL, receives
 * those of several contiguous ones, of one file and type, in order of offset; the library owns the array, valid until
 * the callback returns, of at most 16 identifiers unless the configuration has another aggregation_max. config_file: see
 * agios.conf(5); NULL or "": /etc/agios.conf if it exists. A missing file is reported and means the defaults; an invalid
 * one is refused. max_queue_id: TWINS and WFQ have so many queues, at most 65535, with ids from 0 (0 counts as 1). In API 3 both callbacks
 * may be NULL. */
bool agios_init(void *(*process_request)(int64_t identifier),
                void *(*process_requests)(int64_t *identifiers, int32_t count), char *config_file, int32_t max_queue_id);

/* Adds a request: bytes offset to offset + len - 1 of a file, at most 8 TiB; one of 0 bytes is scheduled like one of 1.
 * queue_id: the server (TWINS) or the application (SW, WFQ); other algorithms ignore it. False when an argument is out of
 * range or the library is full (1,048,576 requests, after 10 s; in a callback at once). */
#if AGIOS_API == 2
bool agios_add_request(char *file_id, int32_t type, int64_t offset, int64_t len, int64_t identifier, int32_t queue_id);
#else
/* callback is called instead of the callbacks given to init, unless NULL. It may be without argument: then give 7 arguments,
 * and its type is void *(*)(int64_t identifier). */
bool agios_v3_add_request(char *file_id, int32_t type, int64_t offset, int64_t len, int64_t identifier, int32_t queue_id,
                          void *(*callback)(int64_t identifier, void *argument), void *argument);
bool agios_v3_add_request_without_argument(char *file_id, int32_t type, int64_t offset, int64_t len, int64_t identifier,
                                           int32_t queue_id, void *(*callback)(int64_t identifier));
#endif

/* Reports that a delivered request is done. Length first. False if there is no such request: one that is not released
 * while a million later ones are delivered is forgotten. */
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
    int64_t filenb;                    /* files with requests added or released */
    int64_t avg_offset_distance;       /* bytes from the end of one request to the start of the next of its file and type */
    int64_t served_bytes;              /* bytes of the released requests */
};

/* A new structure, to be freed with free(); NULL if the library is not running. */
struct agios_metrics_t *agios_get_metrics_and_reset(void);
#endif

#elif AGIOS_API == 1

#ifdef ORANGEFS_AGIOS
typedef int64_t agios_data_t;
#else
typedef void *agios_data_t;
#endif

/* Callbacks; process_requests may be NULL, and gets at most 16 requests unless the configuration has another
 * aggregation_max; is_dev_idle is never called. */
struct client {
    void (*process_request)(agios_data_t data);
    void (*process_requests)(agios_data_t *data, int count);
    int (*is_dev_idle)(void);
};

/* 0, or -1. The structure is read during the call. Application ids are 0 to max_app_id. May be given without max_app_id. */
int agios_v1_init(struct client *client, char *config_file, int max_app_id);

/* 0, or -1. The structure is read during the call; NULL: the one given to init. May be given without app_id. */
int agios_v1_add_request(char *file_id, short int type, long int offset, long int len, agios_data_t data,
                         struct client *client, int app_id);

/* 1, or 0 if there is no such request. May be given with sub_request and total_len, which are ignored. */
int agios_v1_release_request(char *file_id, short int type, long int len, long int offset);

/* 1, or 0 if there is no such queued request. */
#define agios_cancel_request agios_v1_cancel_request
int agios_cancel_request(char *file_id, short int type, long int len, long int offset);

/* 1. Nothing here depends on stripes. */
#define agios_set_stripe_size agios_v1_set_stripe_size
int agios_set_stripe_size(char *file_id, int stripe_size);

/* Writes the statistics since the start or the last reset to a file. */
#define agios_print_stats_file agios_v1_print_stats_file
#define agios_reset_stats agios_v1_reset_stats
void agios_print_stats_file(char *filename);
void agios_reset_stats(void);

#else
#error "AGIOS_API must be 1, 2 or 3"
#endif

#ifdef __cplusplus
}
#endif

/* By the number of arguments: overloads in C++, in C macros over functions, whose addresses may be taken. */
#if AGIOS_API == 1

static inline int agios_init(struct client *client, char *config_file, int max_app_id)
{
    return agios_v1_init(client, config_file, max_app_id);
}

static inline int agios_add_request(char *file_id, short int type, long int offset, long int len, agios_data_t data,
                                    struct client *client, int app_id)
{
    return agios_v1_add_request(file_id, type, offset, len, data, client, app_id);
}

static inline int agios_release_request(char *file_id, short int type, long int len, long int offset)
{
    return agios_v1_release_request(file_id, type, len, offset);
}

#ifdef __cplusplus
static inline int agios_init(struct client *client, char *config_file)
{
    return agios_v1_init(client, config_file, 0);
}

static inline int agios_add_request(char *file_id, short int type, long int offset, long int len, agios_data_t data,
                                    struct client *client)
{
    return agios_v1_add_request(file_id, type, offset, len, data, client, 0);
}

static inline int agios_release_request(char *file_id, short int type, long int len, long int offset, int, long int)
{
    return agios_v1_release_request(file_id, type, len, offset);
}
#else
#define AGIOS_3_OF(a, b, c, ...) a, b, c
#define AGIOS_4_OF(a, b, c, d, ...) a, b, c, d
#define AGIOS_7_OF(a, b, c, d, e, f, g, ...) a, b, c, d, e, f, g
#define AGIOS_CALL(function, arguments) function(arguments)
#define agios_init(...) AGIOS_CALL(agios_v1_init, AGIOS_3_OF(__VA_ARGS__, 0, 0))
#define agios_add_request(...) AGIOS_CALL(agios_v1_add_request, AGIOS_7_OF(__VA_ARGS__, 0, 0))
#define agios_release_request(...) AGIOS_CALL(agios_v1_release_request, AGIOS_4_OF(__VA_ARGS__, 0))
#endif

#elif AGIOS_API == 3

static inline bool agios_add_request(char *file_id, int32_t type, int64_t offset, int64_t len, int64_t identifier,
                                     int32_t queue_id, void *(*callback)(int64_t identifier, void *argument),
                                     void *argument)
{
    return agios_v3_add_request(file_id, type, offset, len, identifier, queue_id, callback, argument);
}

#ifdef __cplusplus
static inline bool agios_add_request(char *file_id, int32_t type, int64_t offset, int64_t len, int64_t identifier,
                                     int32_t queue_id, void *(*callback)(int64_t identifier))
{
    return agios_v3_add_request_without_argument(file_id, type, offset, len, identifier, queue_id, callback);
}
#else
#define AGIOS_9TH_OF(a, b, c, d, e, f, g, h, i, ...) i
#define agios_add_request(...)                                                                                            \
    AGIOS_9TH_OF(__VA_ARGS__, agios_v3_add_request, agios_v3_add_request_without_argument, 0, 0)(__VA_ARGS__)
#endif

#endif

#endif /* IMPRESARIO_AGIOS_H */
