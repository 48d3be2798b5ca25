/* A recorder in the place of libgpfs: takes on at most TAKE ranges a call and HOLD for a file, as the real one may, and
 * keeps what it was told for the test to read back. With GPFS_RECORD, each call is a line in that file, too; with
 * GPFS_DELAY_MS, a call takes so long. It remembers a descriptor of its own from its first call on. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TAKE = 3, HOLD = 10, CALLS = 256, FILES = 16 };

struct header { int total, version, error_offset, reserved; };
struct range { long long block; int start, length, is_write; char padding[4]; };
struct multiple { int length, type, access_count, release_count; struct range access[8], release[8]; };
struct free_range { int length, type; long long start, bytes; };
struct access_range { int length, type; long long start, bytes; int is_write; char padding[4]; };

struct call { int type, asked, taken, released; long long first_block, first_start, first_length; };
struct call recorded[CALLS];
int recorded_count, held, broken;
static struct { unsigned long long ino; int held; } files[FILES];
static int device = -1;

static int *held_of(unsigned long long ino)
{
    for (int i = 0; i < FILES; i++)
        if (files[i].ino == ino || !files[i].ino) {
            files[i].ino = ino;
            return &files[i].held;
        }
    abort();
}

static void note(const struct call *call, unsigned long long ino, int now_held)
{
    const char *path = getenv("GPFS_RECORD");
    char line[256];
    if (!path)
        return;
    int n = snprintf(line, sizeof line, "%d %d %llu %d %d %d %d %lld %lld %d %d\n", getpid(), gettid(), ino, call->type,
                     call->asked, call->taken, call->released, call->first_start, call->first_length, now_held, broken);
    int out = open(path, O_WRONLY | O_APPEND | O_CREAT, 0666);
    if (out < 0 || write(out, line, n) != n)
        abort();
    close(out);
}

int gpfs_fcntl(int fd, void *argument)
{
    struct header *header = argument;
    int *body = (int *)(header + 1);
    struct call call;
    memset(&call, 0, sizeof call);
    if (fd < 0 || header->version != 1 || header->total != (int)sizeof *header + body[0]) {
        broken++;
        errno = EINVAL;
        return -1;
    }
    struct stat about;
    if (device < 0)
        device = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (fstat(device, &about) || !S_ISCHR(about.st_mode))
        broken++;
    if (fstat(fd, &about)) {
        broken++;
        return -1;
    }
    int *of_file = held_of(about.st_ino);
    if (getenv("GPFS_DELAY_MS"))
        usleep(atoi(getenv("GPFS_DELAY_MS")) * 1000);
    /* What a library writes to its own output is nothing that a program should show. */
    if (getenv("GPFS_RECORD") && (write(1, "libgpfs\n", 8) != 8 || write(2, "libgpfs\n", 8) != 8))
        broken++;
    call.type = body[1];
    if (call.type == 1003) {
        struct multiple *m = (struct multiple *)body;
        if (sizeof *m != (size_t)m->length || m->access_count > 8 || m->release_count > 8)
            broken++;
        held -= m->release_count;
        *of_file -= m->release_count;
        call.asked = m->access_count;
        call.released = m->release_count;
        if (call.asked > 0) {
            call.first_block = m->access[0].block;
            call.first_start = m->access[0].start;
            call.first_length = m->access[0].length;
        }
        call.taken = call.asked < TAKE ? call.asked : TAKE;
        if (call.taken > HOLD - *of_file)
            call.taken = HOLD - *of_file;
        held += call.taken;
        *of_file += call.taken;
        m->access_count = call.taken;
    } else if (call.type == 1002) {
        struct free_range *f = (struct free_range *)body;
        call.first_start = f->start;
        call.first_length = f->bytes;
    } else if (call.type == 1001) {
        struct access_range *a = (struct access_range *)body;
        if (sizeof *a != (size_t)a->length || a->is_write)
            broken++;
        call.first_start = a->start;
        call.first_length = a->bytes;
    } else if (call.type == 1004) {
        if (body[0] != 8)
            broken++;
    } else if (call.type == 2001) {
        held -= *of_file;
        *of_file = 0;
    } else {
        broken++;
    }
    note(&call, about.st_ino, *of_file);
    if (recorded_count < CALLS)
        recorded[recorded_count++] = call;
    return 0;
}
