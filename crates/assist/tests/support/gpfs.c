/* A recorder in the place of libgpfs: takes on at most TAKE ranges a call and HOLD in all, as the real one may, and keeps
 * what it was told for the test to read back. */
#include <errno.h>
#include <string.h>

enum { TAKE = 3, HOLD = 10, CALLS = 256 };

struct header { int total, version, error_offset, reserved; };
struct range { long long block; int start, length, is_write; char padding[4]; };
struct multiple { int length, type, access_count, release_count; struct range access[8], release[8]; };
struct free_range { int length, type; long long start, bytes; };

struct call { int type, asked, taken, released; long long first_block, first_start, first_length; };
struct call recorded[CALLS];
int recorded_count, held, broken;

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
    call.type = body[1];
    if (call.type == 1003) {
        struct multiple *m = (struct multiple *)body;
        if (sizeof *m != (size_t)m->length || m->access_count > 8 || m->release_count > 8)
            broken++;
        held -= m->release_count;
        call.asked = m->access_count;
        call.released = m->release_count;
        if (call.asked > 0) {
            call.first_block = m->access[0].block;
            call.first_start = m->access[0].start;
            call.first_length = m->access[0].length;
        }
        call.taken = call.asked < TAKE ? call.asked : TAKE;
        if (call.taken > HOLD - held)
            call.taken = HOLD - held;
        held += call.taken;
        m->access_count = call.taken;
    } else if (call.type == 1002) {
        struct free_range *f = (struct free_range *)body;
        call.first_start = f->start;
        call.first_length = f->bytes;
    } else if (call.type != 1004) {
        broken++;
    }
    if (recorded_count < CALLS)
        recorded[recorded_count++] = call;
    return 0;
}
