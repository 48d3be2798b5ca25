/* Reads through liburing in each of its ways to submit. Prints "ok", "no ring", or the line that went wrong. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"

static struct io_uring ring;
static unsigned char buf[4096];

static void seen(int count, int bytes) {
    for (int i = 0; i < count; i++) {
        struct io_uring_cqe *cqe;
        CHECK(io_uring_wait_cqe(&ring, &cqe) == 0 && cqe->res >= 0);
        bytes -= cqe->res;
        io_uring_cqe_seen(&ring, cqe);
    }
    CHECK(bytes == 0);
}

static void prepare(int fd, int len, long offset) {
    struct io_uring_sqe *entry = io_uring_get_sqe(&ring);
    CHECK(entry);
    io_uring_prep_read(entry, fd, buf, len, offset);
}

int main(int argc, char **argv) {
    int (*state)(void);
    *(void **)&state = dlsym(RTLD_DEFAULT, "impresario_assist_state");
    for (int i = 0; state && getenv("EXPECT_MANAGER") && i < 10000 && state() != 2; i++)
        usleep(1000);
    CHECK(argc > 2);
    int fd = open(argv[2], O_RDONLY);
    if (io_uring_queue_init(4, &ring, 0) < 0) {
        puts("no ring");
        return 0;
    }
    prepare(fd, 100, 300);
    prepare(fd, 20, 500);
    CHECK(io_uring_submit(&ring) == 2);
    seen(2, 120);
    prepare(fd, 30, 700);
    struct iovec v[2] = {{buf, 5}, {buf + 5, 6}};
    io_uring_prep_readv(io_uring_get_sqe(&ring), fd, v, 2, 900);
    prepare(fd, 40, 1000);
    CHECK(io_uring_submit_and_wait(&ring, 3) == 3);
    seen(3, 81);
    for (int i = 0; i < 4; i++)
        prepare(fd, 10, 2000 + 100 * i);
    struct __kernel_timespec time = {.tv_sec = 10};
    struct io_uring_cqe *cqe;
    CHECK(io_uring_submit_and_wait_timeout(&ring, &cqe, 1, &time, NULL) >= 0);
    seen(4, 40);
    CHECK(io_uring_submit(&ring) == 0);
    io_uring_queue_exit(&ring);
    puts("ok");
    return 0;
}
