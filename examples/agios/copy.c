/* Copies a file, reading its blocks in the scheduler's order: the smallest complete program on AGIOS's
 * interface. Worker threads do the I/O, so that the callback returns at once.
 *
 *   copy FROM TO [CONFIGURATION]
 */
#define _GNU_SOURCE
#include <agios.h>

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK 65536
#define WORKERS 2

static int from, to;
static char *name;
static int64_t size;

/* Blocks that the scheduler has delivered: a ring with one slot for each block of the file. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t there = PTHREAD_COND_INITIALIZER;
static int64_t *due, first, last, copied, blocks, batches;
static int failed;

static int64_t length(int64_t block) {
    int64_t left = size - block * BLOCK;
    return left < BLOCK ? left : BLOCK;
}

static void *one(int64_t block) {
    pthread_mutex_lock(&lock);
    due[last++] = block;
    batches++;
    pthread_cond_signal(&there);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void *several(int64_t *list, int32_t count) {
    pthread_mutex_lock(&lock);
    for (int32_t i = 0; i < count; i++) due[last++] = list[i];
    batches++;
    pthread_cond_broadcast(&there);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void *worker(void *arg) {
    char *data = malloc(BLOCK);
    (void)arg;
    pthread_mutex_lock(&lock);
    while (copied < blocks && !failed) {
        if (first == last) {
            pthread_cond_wait(&there, &lock);
            continue;
        }
        int64_t block = due[first++], len = length(block);
        pthread_mutex_unlock(&lock);
        int ok = data && pread(from, data, (size_t)len, block * BLOCK) == len &&
                 pwrite(to, data, (size_t)len, block * BLOCK) == len &&
                 agios_release_request(name, RT_READ, len, block * BLOCK);
        pthread_mutex_lock(&lock);
        copied++;
        failed |= !ok;
        if (copied == blocks || failed) pthread_cond_broadcast(&there);
    }
    pthread_mutex_unlock(&lock);
    free(data);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc < 3) return fprintf(stderr, "usage: %s FROM TO [CONFIGURATION]\n", argv[0]), 2;
    struct stat info;
    name = argv[1];
    from = open(name, O_RDONLY);
    to = open(argv[2], O_WRONLY | O_CREAT | O_TRUNC, 0644);
    if (from < 0 || to < 0 || fstat(from, &info)) return perror("copy"), 1;
    size = info.st_size;
    blocks = (size + BLOCK - 1) / BLOCK;
    due = calloc((size_t)blocks + 1, sizeof *due);
    if (!due || !agios_init(one, several, argc > 3 ? argv[3] : NULL, 0)) return 1;
    pthread_t workers[WORKERS];
    for (int i = 0; i < WORKERS; i++) pthread_create(&workers[i], NULL, worker, NULL);
    /* Backwards, so that the scheduler has something to reorder. */
    for (int64_t block = blocks - 1; block >= 0; block--)
        if (!agios_add_request(name, RT_READ, block * BLOCK, length(block), block, 0)) {
            pthread_mutex_lock(&lock);
            failed = 1;
            pthread_cond_broadcast(&there);
            pthread_mutex_unlock(&lock);
        }
    for (int i = 0; i < WORKERS; i++) pthread_join(workers[i], NULL);
    agios_exit();
    close(from);
    if (close(to) || failed) return fprintf(stderr, "copy: failed\n"), 1;
    printf("copied %lld blocks in %lld batches\n", (long long)blocks, (long long)batches);
    free(due);
    return 0;
}
