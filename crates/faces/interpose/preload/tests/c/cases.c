/* Programs in one: each does one kind of thing with the file named on the command line, whose bytes are
 * (offset % 251). Prints "ok", or the line that went wrong. Waits for the library when it is loaded. */
#include <aio.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static char buf[1 << 16];
static const char *path, *other;

static int right(const char *at, long offset, long len) {
    for (long i = 0; i < len; i++)
        if ((unsigned char)at[i] != (offset + i) % 251)
            return 0;
    return 1;
}

static int (*library_state(void))(void) {
    int (*state)(void);
    *(void **)&state = dlsym(RTLD_DEFAULT, "impresario_assist_state");
    return state;
}

/* With a manager: until the channel stands. */
static void wait_for_library(void) {
    int (*state)(void) = library_state();
    for (int i = 0; state && getenv("EXPECT_MANAGER") && i < 10000; i++) {
        if (state() == 2)
            return;
        usleep(1000);
    }
}

static void reads(void) {
    int fd = open(path, O_RDONLY);
    struct iovec v[2] = {{buf, 100}, {buf + 100, 200}};
    CHECK(fd >= 0);
    errno = 77;
    CHECK(read(fd, buf, 1000) == 1000 && right(buf, 0, 1000));
    CHECK(read(fd, buf, 500) == 500 && right(buf, 1000, 500));
    CHECK(pread(fd, buf, 4096, 8192) == 4096 && right(buf, 8192, 4096));
    CHECK(readv(fd, v, 2) == 300 && right(buf, 1500, 300));
    CHECK(preadv(fd, v, 2, 20000) == 300 && right(buf, 20000, 300));
    CHECK(preadv2(fd, v, 2, 30000, 0) == 300);
    CHECK(preadv2(fd, v, 2, -1, 0) == 300 && right(buf, 1800, 300));
    CHECK(lseek(fd, 50000, SEEK_SET) == 50000);
    CHECK(read(fd, buf, 10) == 10 && right(buf, 50000, 10));
    CHECK(pread(fd, buf, 100, 99990) == 10 && read(fd, buf, 0) == 0);
    CHECK(errno == 77);
    CHECK(pread(fd, buf, 10, 100000) == 0 && pread(fd, buf, 10, -1) == -1 && errno == EINVAL);
    errno = 77;
    CHECK(close(fd) == 0 && errno == 77);
    CHECK(close(fd) == -1 && errno == EBADF);
}

static void opens(void) {
    volatile int flags = O_RDONLY; /* not a constant: the fortified variants */
    char dir[4096], *name;
    struct stat st;
    strcpy(dir, path);
    name = strrchr(dir, '/');
    *name++ = 0;
    int d = open(dir, O_RDONLY | O_DIRECTORY);
    CHECK(d >= 0 && chdir(dir) == 0);
    int fds[] = {open(path, flags),          open64(path, flags),   openat(d, name, flags), openat64(d, name, flags),
                 openat(AT_FDCWD, name, flags), open(name, O_RDONLY), open64(name, O_RDONLY)};
    for (unsigned i = 0; i < sizeof fds / sizeof *fds; i++) {
        CHECK(fds[i] >= 0 && pread(fds[i], buf, 10, i * 10) == 10 && right(buf, i * 10, 10));
        CHECK(close(fds[i]) == 0);
    }
    CHECK(symlink(name, "link") == 0);
    int fd = open("./../../../../../../../proc/self/cwd/link", O_RDONLY);
    CHECK(fd >= 0 && pread(fd, buf, 7, 0) == 7 && close(fd) == 0 && unlink("link") == 0);
    CHECK(open("none", O_RDONLY) == -1 && errno == ENOENT);
    mode_t mask = umask(0);
    fd = open("made", O_RDWR | O_CREAT | O_EXCL, 0641);
    CHECK(fd >= 0 && fstat(fd, &st) == 0 && (st.st_mode & 0777) == 0641);
    CHECK(write(fd, "hello", 5) == 5 && pwrite(fd, "J", 1, 0) == 1 && close(fd) == 0);
    fd = creat("made", 0600);
    CHECK(fd >= 0 && write(fd, "x", 1) == 1 && close(fd) == 0 && unlink("made") == 0);
    umask(mask);
}

static void chk(int argc) {
    volatile size_t n = 100 * argc / argc;
    char small[200];
    int fd = open(path, O_RDONLY);
    CHECK(read(fd, small, n) == 100 && pread(fd, small, n, 5000) == 100 && right(small, 5000, 100));
    CHECK(close(fd) == 0);
    FILE *f = fopen(path, "r");
    CHECK(f && fread(small, 1, n, f) == 100 && right(small, 0, 100));
    CHECK(fclose(f) == 0);
}

static void streams(void) {
    FILE *f = fopen(path, "r");
    CHECK(f && setvbuf(f, NULL, _IOFBF, 4096) == 0);
    CHECK(fread(buf, 1, 100, f) == 100 && right(buf, 0, 100)); /* reads 0+4096 */
    for (int i = 0; i < 1000; i++)
        CHECK(getc(f) == (100 + i) % 251);
    for (int i = 0; i < 4000; i++) /* reads 4096+4096 */
        CHECK(getc_unlocked(f) == (1100 + i) % 251);
    CHECK(fseek(f, 50000, SEEK_SET) == 0); /* reads the block before and around it */
    CHECK(fgetc(f) == 50000 % 251 && ftell(f) == 50001);
    CHECK(fclose(f) == 0);
    f = fopen64(other, "r");
    char *line = NULL;
    size_t room = 0;
    CHECK(f && fgets(buf, 100, f) && !strcmp(buf, "line 0\n")); /* reads all */
    for (int i = 1; i < 500; i++)
        CHECK(getline(&line, &room, f) > 0 && atoi(line + 5) == i);
    CHECK(getline(&line, &room, f) == -1 && feof(f) && !ferror(f) && fclose(f) == 0);
    free(line);
    /* By a function that is not hooked, told at the close. */
    int a;
    f = fopen(other, "r");
    CHECK(f && fscanf(f, "line %d", &a) == 1 && a == 0 && fclose(f) == 0);
    char made[4096];
    snprintf(made, sizeof made, "%s.out", path);
    f = fopen(made, "w");
    CHECK(f && setvbuf(f, NULL, _IOFBF, 4096) == 0);
    for (int i = 0; i < 10; i++)
        CHECK(fwrite(buf, 1, 1000, f) == 1000);
    CHECK(fprintf(f, "%s", "end") == 3 && fclose(f) == 0);
    f = freopen(path, "r", fopen(other, "r"));
    CHECK(f && fgetc(f) == 0 && fclose(f) == 0);
    struct stat st;
    CHECK(stat(made, &st) == 0 && st.st_size == 10003 && unlink(made) == 0);
}

static void *sharer(void *stream) {
    long taken = 0;
    while (getc(stream) != EOF)
        taken++;
    return (void *)taken;
}

/* One stream that several threads take from at once. */
static void shared_stream(void) {
    pthread_t t[4];
    void *taken;
    long all = 0;
    struct stat st;
    FILE *f = fopen(path, "r");
    CHECK(f && setvbuf(f, NULL, _IOFBF, 512) == 0 && stat(path, &st) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&t[i], NULL, sharer, f) == 0);
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_join(t[i], &taken) == 0);
        all += (long)taken;
    }
    CHECK(all == st.st_size && fclose(f) == 0);
}

static void *reader(void *arg) {
    long me = (long)arg;
    char mine[64];
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    for (long i = 0; i < 500; i++) {
        CHECK(pread(fd, mine, 16, me * 20000 + i * 16) == 16 && right(mine, me * 20000 + i * 16, 16));
    }
    CHECK(close(fd) == 0);
    return NULL;
}

static void threads(void) {
    pthread_t t[4];
    for (long i = 0; i < 4; i++)
        CHECK(pthread_create(&t[i], NULL, reader, (void *)i) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(t[i], NULL) == 0);
}

static void reap(pid_t pid) {
    int status = -1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

static void forks(const char *self) {
    int fd = open(path, O_RDONLY), status;
    CHECK(read(fd, buf, 100) == 100);
    pid_t pid = fork();
    if (pid == 0) {
        wait_for_library();
        /* The position is shared with the parent. */
        CHECK(read(fd, buf, 50) == 50 && right(buf, 100, 50));
        _exit(0);
    }
    reap(pid);
    CHECK(read(fd, buf, 10) == 10 && right(buf, 150, 10));
    pid = fork();
    if (pid == 0) {
        CHECK(dup2(fd, 0) == 0);
        execl(self, self, "stdin", path, other, NULL);
        _exit(9);
    }
    reap(pid);
    /* A child in our memory that closes everything before it executes. */
    pid = vfork();
    if (pid == 0) {
        for (int i = 3; i < 1100; i++)
            close(i);
        dup2(open(other, O_RDONLY), 5);
        execl("/bin/true", "true", NULL);
        _exit(9);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(read(fd, buf, 7) == 7 && right(buf, 172, 7) && close(fd) == 0);
}

/* A child in our memory that restricts itself leaves us alone. */
static void restricted_child(void) {
    int fd = open(path, O_RDONLY), status;
    CHECK(read(fd, buf, 10) == 10);
    pid_t pid = vfork();
    if (pid == 0) {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        execl("/bin/true", "true", NULL);
        _exit(9);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(read(fd, buf, 7) == 7 && right(buf, 10, 7) && close(fd) == 0);
}

/* A child that reads at once and is gone. */
static void hasty(void) {
    int fd = open(path, O_RDONLY);
    CHECK(read(fd, buf, 100) == 100);
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            CHECK(pread(fd, buf, 50, 1000 + 50 * i) == 50 && right(buf, 1000 + 50 * i, 50));
            _exit(0);
        }
        reap(pid);
    }
}

static void from_stdin(void) {
    CHECK(read(0, buf, 12) == 12 && right(buf, 160, 12));
}

static void dups(void) {
    int fd = open(path, O_RDONLY), two = dup(fd), three = fcntl(fd, F_DUPFD, 50), four = fcntl(fd, F_DUPFD_CLOEXEC, 60);
    CHECK(fd >= 0 && two >= 0 && three >= 50 && four >= 60);
    CHECK(read(fd, buf, 10) == 10 && read(two, buf, 10) == 10 && right(buf, 10, 10));
    CHECK(read(three, buf, 10) == 10 && read(four, buf, 10) == 10 && right(buf, 30, 10));
    CHECK(dup2(fd, two) == two && read(two, buf, 10) == 10 && dup2(fd, fd) == fd);
    /* A number that becomes another file. */
    int line = open(other, O_RDONLY);
    CHECK(dup2(line, fd) == fd && read(fd, buf, 6) == 6 && !memcmp(buf, "line 0", 6));
    CHECK(dup3(two, line, O_CLOEXEC) == line && pread(line, buf, 10, 0) == 10 && right(buf, 0, 10));
    CHECK(dup2(999, fd) == -1 && errno == EBADF && pread(fd, buf, 4, 0) == 4 && !memcmp(buf, "line", 4));
    CHECK(close(fd) == 0);
    for (int i = 0; i < 5; i++) { /* closed and used again at once */
        int a = open(i % 2 ? path : other, O_RDONLY);
        CHECK(a == fd && pread(a, buf, 20, i) == 20 && close(a) == 0);
    }
    int p[2];
    CHECK(pipe(p) == 0 && p[0] == fd && write(p[1], "abc", 3) == 3 && read(p[0], buf, 10) == 3);
}

static int handler_fd;
static void handler(int sig) {
    char small[32];
    (void)sig;
    if (pread(handler_fd, small, 32, 640) != 32 || !right(small, 640, 32))
        _exit(8);
}

static void signals(void) {
    static char stack[16384];
    stack_t ss = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction sa = {.sa_handler = handler, .sa_flags = SA_ONSTACK | SA_RESTART};
    CHECK(sigaltstack(&ss, NULL) == 0 && sigaction(SIGUSR1, &sa, NULL) == 0);
    handler_fd = open(other, O_RDONLY);
    CHECK(close(handler_fd) == 0);
    handler_fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY); /* met for the first time in the handler */
    for (int i = 0; i < 3; i++)
        CHECK(raise(SIGUSR1) == 0);
    CHECK(close(handler_fd) == 0);
}

static void kernel_copies(void) {
    int fd = open(path, O_RDONLY), out = memfd_create("out", 0), p[2];
    off_t at = 1000, to = 0;
    CHECK(sendfile(out, fd, &at, 500) == 500 && at == 1500);
    CHECK(sendfile(out, fd, NULL, 200) == 200 && lseek(fd, 0, SEEK_CUR) == 200);
    CHECK(pread(out, buf, 700, 0) == 700 && right(buf, 1000, 500) && right(buf + 500, 0, 200));
    at = 3000;
    char made[4096];
    snprintf(made, sizeof made, "%s.copy", path);
    int copy = open(made, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK(copy >= 0 && copy_file_range(fd, &at, copy, &to, 600, 0) == 600 && at == 3600 && to == 600);
    CHECK(pipe(p) == 0 && splice(fd, NULL, p[1], NULL, 100, 0) == 100 && read(p[0], buf, 100) == 100 && right(buf, 200, 100));
    CHECK(sendfile(out, fd, (off_t *)8, 5) == -1 && errno == EFAULT);
    char *m = mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, fd, 4096);
    CHECK(m != MAP_FAILED && right(m, 4096, 8192) && munmap(m, 8192) == 0);
    CHECK(mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, fd, 1) == MAP_FAILED && errno == EINVAL);
    CHECK(mmap(NULL, 8192, PROT_READ, MAP_PRIVATE, -1, 0) == MAP_FAILED && errno == EBADF);
    m = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(m != MAP_FAILED && m[0] == 0 && munmap(m, 8192) == 0);
    CHECK(close(copy) == 0 && unlink(made) == 0 && close(fd) == 0);
}

static void wait_aio(struct aiocb *cb) {
    const struct aiocb *list[] = {cb};
    while (aio_error(cb) == EINPROGRESS)
        aio_suspend(list, 1, NULL);
}

static void aios(void) {
    int fd = open(path, O_RDONLY);
    struct aiocb a = {.aio_fildes = fd, .aio_buf = buf, .aio_nbytes = 100, .aio_offset = 700};
    struct aiocb b = {.aio_fildes = fd, .aio_buf = buf + 200, .aio_nbytes = 50, .aio_offset = 900, .aio_lio_opcode = LIO_READ};
    struct aiocb *list[] = {&b, NULL};
    CHECK(aio_read(&a) == 0);
    wait_aio(&a);
    CHECK(aio_return(&a) == 100 && right(buf, 700, 100));
    CHECK(lio_listio(LIO_WAIT, list, 2, NULL) == 0 && aio_return(&b) == 50 && right(buf + 200, 900, 50));
    CHECK(close(fd) == 0);
}

/* libaio's function without libaio: only with the library is there one. */
extern int io_submit(unsigned long context, long count, struct iocb **list) __attribute__((weak));

static void libaio(void) {
    int fd = open(path, O_RDONLY);
    unsigned long context = 0;
    struct iovec v[2] = {{buf + 1000, 30}, {buf + 1030, 40}};
    struct iocb a = {.aio_lio_opcode = IOCB_CMD_PREAD, .aio_fildes = fd, .aio_buf = (long)buf, .aio_nbytes = 100, .aio_offset = 300};
    struct iocb b = {.aio_lio_opcode = IOCB_CMD_PREADV, .aio_fildes = fd, .aio_buf = (long)v, .aio_nbytes = 2, .aio_offset = 5000};
    struct iocb *list[] = {&a, &b};
    struct io_event events[2];
    CHECK(io_submit && syscall(SYS_io_setup, 4, &context) == 0);
    errno = 77;
    CHECK(io_submit(context, 2, list) == 2 && syscall(SYS_io_getevents, context, 2, 2, events, NULL) == 2);
    CHECK(right(buf, 300, 100) && right(buf + 1000, 5000, 70));
    CHECK(io_submit(context + 1, 2, list) == -EINVAL && errno == 77);
    CHECK(syscall(SYS_io_destroy, context) == 0 && close(fd) == 0);
}

/* io_uring by system calls alone. Prints "no ring" and stops where the kernel gives none. */
static unsigned *queue, *completions;
static struct io_uring_params ring;
static struct io_uring_sqe *entries;
static int ring_fd;
/* How entries are handed over: by the C library, by an instruction of the program's own, or taken by the kernel by itself. */
static enum { CALLED, INLINE, POLLED } way;

static long enter(int count, int flags) {
#ifdef __x86_64__
    if (way != CALLED) {
        register long mask __asm__("r8") = 0, size __asm__("r9") = 0, how __asm__("r10") = flags;
        long result;
        __asm__ volatile("syscall"
                         : "=a"(result)
                         : "a"(SYS_io_uring_enter), "D"(ring_fd), "S"(count), "d"(count), "r"(how), "r"(mask), "r"(size)
                         : "rcx", "r11", "memory");
        return result;
    }
#endif
    return syscall(SYS_io_uring_enter, ring_fd, count, count, flags, NULL, 0);
}

static void make_ring(int count) {
    ring = (struct io_uring_params){.flags = way == POLLED ? IORING_SETUP_SQPOLL : 0, .sq_thread_idle = 1000};
    ring_fd = syscall(SYS_io_uring_setup, count, &ring);
    if (ring_fd < 0) {
        puts("no ring");
        exit(0);
    }
    int all = PROT_READ | PROT_WRITE;
    queue = mmap(NULL, ring.sq_off.array + 4 * ring.sq_entries, all, MAP_SHARED, ring_fd, IORING_OFF_SQ_RING);
    completions = mmap(NULL, ring.cq_off.cqes + 16 * ring.cq_entries, all, MAP_SHARED, ring_fd, IORING_OFF_CQ_RING);
    entries = mmap(NULL, 64 * ring.sq_entries, all, MAP_SHARED, ring_fd, IORING_OFF_SQES);
    CHECK(queue != MAP_FAILED && completions != MAP_FAILED && entries != MAP_FAILED);
}

static void unmap_ring(void) {
    CHECK(munmap(entries, 64 * ring.sq_entries) == 0 && munmap(queue, ring.sq_off.array + 4 * ring.sq_entries) == 0);
}

/* Of the next entry: once it is handed over, the kernel may have taken it. */
static int with_flags;

static struct io_uring_sqe *entry(int op, int fd, void *at, unsigned len, long offset) {
    unsigned tail = queue[ring.sq_off.tail / 4], place = tail & queue[ring.sq_off.ring_mask / 4];
    struct io_uring_sqe *e = &entries[place];
    memset(e, 0, sizeof *e);
    e->opcode = op, e->fd = fd, e->addr = (unsigned long)at, e->len = len, e->off = offset, e->user_data = tail;
    e->flags = with_flags, with_flags = 0;
    queue[ring.sq_off.array / 4 + place] = place;
    __atomic_store_n(&queue[ring.sq_off.tail / 4], tail + 1, __ATOMIC_RELEASE);
    return e;
}

/* Submits what was filled and gives the sum of the results. */
static int done(int count) {
    int sum = 0;
    CHECK(enter(count, IORING_ENTER_GETEVENTS | (way == POLLED ? IORING_ENTER_SQ_WAKEUP : 0)) == count);
    for (int i = 0; i < count; i++) {
        unsigned head = completions[ring.cq_off.head / 4];
        CHECK(head != __atomic_load_n(&completions[ring.cq_off.tail / 4], __ATOMIC_ACQUIRE));
        struct io_uring_cqe *all = (void *)((char *)completions + ring.cq_off.cqes);
        int result = all[head & completions[ring.cq_off.ring_mask / 4]].res;
        CHECK(result >= 0);
        sum += result;
        __atomic_store_n(&completions[ring.cq_off.head / 4], head + 1, __ATOMIC_RELEASE);
    }
    return sum;
}

static void urings(void) {
    make_ring(4);
    int fd = open(path, O_RDONLY);
    struct iovec v[2] = {{buf + 1000, 30}, {buf + 1030, 40}}, whole = {buf, sizeof buf};
    CHECK(syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_BUFFERS, &whole, 1) == 0);
    entry(IORING_OP_READ, fd, buf, 100, 300);
    entry(IORING_OP_READV, fd, v, 2, 5000);
    CHECK(done(2) == 170 && right(buf, 300, 100) && right(buf + 1000, 5000, 70));
    /* Round the queue's end; the second one is of what the first one opens. */
    CHECK(lseek(fd, 40, SEEK_SET) == 40);
    entry(IORING_OP_READ_FIXED, fd, buf, 50, 700);
    entry(IORING_OP_READ, fd, buf + 100, 10, -1);
    entry(IORING_OP_NOP, -1, NULL, 0, 0);
    CHECK(done(3) == 60 && right(buf, 700, 50) && right(buf + 100, 40, 10));
    entry(IORING_OP_OPENAT, AT_FDCWD, (void *)path, 0, 0)->open_flags = O_RDONLY;
    int opened = done(1);
    entry(IORING_OP_READ, opened, buf, 20, 900);
    CHECK(done(1) == 20 && right(buf, 900, 20));
    entry(IORING_OP_CLOSE, opened, NULL, 0, 0);
    CHECK(done(1) == 0 && lseek(opened, 0, SEEK_CUR) == -1);
    /* The same number is another file now. */
    CHECK(open(other, O_RDONLY) == opened);
    entry(IORING_OP_READ, opened, buf, 7, 0);
    CHECK(done(1) == 7 && !memcmp(buf, "line 0\n", 7));
    /* Files in the ring's table; of one whose descriptor was closed nothing is told but how much is read. */
    int table[2] = {fd, opened};
    CHECK(syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_FILES, table, 2) == 0);
    with_flags = IOSQE_FIXED_FILE;
    entry(IORING_OP_READ, 0, buf, 123, 600);
    struct iovec part = {buf + 200, 30};
    with_flags = IOSQE_FIXED_FILE;
    entry(IORING_OP_READV, 0, &part, 1, 650);
    CHECK(done(2) == 153 && right(buf, 600, 123) && right(buf + 200, 650, 30));
    CHECK(close(opened) == 0);
    with_flags = IOSQE_FIXED_FILE;
    entry(IORING_OP_READ, 1, buf, 7, 0);
    CHECK(done(1) == 7 && !memcmp(buf, "line 0\n", 7));
    struct io_uring_files_update again = {.offset = 1, .fds = (unsigned long)table};
    CHECK(syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_FILES_UPDATE, &again, 1) == 1);
    with_flags = IOSQE_FIXED_FILE;
    entry(IORING_OP_READ, 1, buf, 8, 800);
    CHECK(done(1) == 8 && right(buf, 800, 8));
    /* Another file in a place, by the ring's own place in a table (Linux 6.3), else by a call that is not understood either. */
    int lines = open(other, O_RDONLY);
    struct io_uring_rsrc_update by_place = {.offset = -1U, .data = ring_fd};
    struct io_uring_rsrc_update2 not_understood = {.data = (unsigned long)&lines, .nr = 1};
    again = (struct io_uring_files_update){.fds = (unsigned long)&lines};
    if (syscall(SYS_io_uring_register, ring_fd, 20, &by_place, 1) != 1 ||
        syscall(SYS_io_uring_register, by_place.offset, IORING_REGISTER_FILES_UPDATE | 1U << 31, &again, 1) != 1)
        CHECK(syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_FILES_UPDATE2, &not_understood,
                      sizeof not_understood) == 1);
    with_flags = IOSQE_FIXED_FILE;
    entry(IORING_OP_READ, 0, buf, 7, 0);
    CHECK(done(1) == 7 && !memcmp(buf, "line 0\n", 7) && close(lines) == 0);
    /* Mistakes are the kernel's to tell, with memory that is gone, too. */
    CHECK(syscall(SYS_io_uring_enter, fd, 1, 0, 0, NULL, 0) == -1 && errno == EOPNOTSUPP);
    CHECK(syscall(SYS_io_uring_enter, 999, 1, 0, 0, NULL, 0) == -1 && errno == EBADF);
    CHECK(syscall(SYS_io_uring_setup, 0, NULL) == -1 && (errno == EFAULT || errno == EINVAL));
    unmap_ring();
    CHECK(syscall(SYS_io_uring_enter, ring_fd, 1, 0, 0, NULL, 0) == 0);
    CHECK(close(ring_fd) == 0 && close(fd) == 0);
}

/* Waits until rings have been looked into, from beginning to end, since. */
static void looked(void) {
    unsigned (*looks)(void);
    *(void **)&looks = dlsym(RTLD_DEFAULT, "impresario_assist_looks");
    unsigned before = looks ? looks() : 0;
    for (int i = 0; looks && getenv("EXPECT_MANAGER") && looks() - before < 2 && i < 10000; i++)
        usleep(1000);
}

/* Nothing of what is handed over passes the C library. */
static void unheard(void) {
    make_ring(4);
    int fd = open(path, O_RDONLY), gone = open(other, O_RDONLY);
    CHECK(fd >= 0 && gone >= 0 && syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_FILES, &fd, 1) == 0);
    looked();
    for (int i = 0; i < 3; i++) {
        entry(IORING_OP_READ, fd, buf, 100, 1000 * i);
        with_flags = IOSQE_FIXED_FILE;
        entry(IORING_OP_READ, 0, buf + 200, 10, 1000 * i + 500);
        CHECK(done(2) == 110 && right(buf, 1000 * i, 100) && right(buf + 200, 1000 * i + 500, 10));
        looked();
    }
    /* More than are left in the ring, before it is looked into again; those that are not told are counted. */
    for (int i = 0; i < 100; i++) {
        entry(IORING_OP_READ, fd, buf, 50, 10000 + 100 * i);
        CHECK(done(1) == 50);
    }
    looked();
    /* What is closed, and the last one, are not waited for. */
    entry(IORING_OP_READ, gone, buf, 7, 0);
    CHECK(done(1) == 7 && !memcmp(buf, "line 0\n", 7) && close(gone) == 0);
    entry(IORING_OP_READ, fd, buf, 50, 30000);
    CHECK(done(1) == 50);
    unmap_ring();
    CHECK(close(ring_fd) == 0);
}

/* Too fast for being looked into, until that is given up. */
static void too_fast(void) {
    make_ring(1);
    int fd = open(path, O_RDONLY);
    for (int i = 0; i < 20000; i++) {
        entry(IORING_OP_READ, fd, buf, 50, i);
        CHECK(done(1) == 50);
    }
    unmap_ring();
    CHECK(close(ring_fd) == 0);
}

/* From here on, whoever copies memory through the kernel ends the program, and all its threads. */
static void restricted_ring(void) {
    make_ring(4);
    int fd = open(path, O_RDONLY);
    looked();
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0);
    for (int i = 0; i < 10; i++) {
        entry(IORING_OP_READ, fd, buf, 50, 100 * i);
        CHECK(done(1) == 50 && right(buf, 100 * i, 50));
        usleep(5000);
    }
    CHECK(syscall(SYS_io_uring_register, ring_fd, IORING_REGISTER_FILES, &fd, 1) == 0);
    unmap_ring();
    CHECK(close(ring_fd) == 0);
}

static void many(void) {
    static int fds[10000];
    struct rlimit r;
    CHECK(getrlimit(RLIMIT_NOFILE, &r) == 0);
    r.rlim_cur = r.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &r) == 0);
    int n = r.rlim_max < 10100 ? (int)r.rlim_max - 100 : 10000;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < n; i++)
            CHECK((fds[i] = open(path, O_RDONLY)) >= 0);
        for (int i = 0; i < n; i++)
            CHECK(pread(fds[i], buf, 8, i) == 8 && right(buf, i, 8));
        for (int i = 0; i < n; i++)
            CHECK(close(fds[i]) == 0);
    }
}

/* Everything a program may do to descriptors that it does not know. */
static void closes(void) {
    int fd = open(path, O_RDONLY);
    CHECK(pread(fd, buf, 10, 0) == 10);
    for (int i = 3; i < 1100; i++)
        if (i != fd) {
            errno = 0;
            CHECK(close(i) == -1 && errno == EBADF);
        }
    CHECK(pread(fd, buf, 10, 10) == 10);
    CHECK(close_range(fd + 1, ~0U, 0) == 0 && pread(fd, buf, 10, 20) == 10);
    CHECK(close_range(9, 3, 0) == -1 && errno == EINVAL);
    closefrom(fd + 1);
    CHECK(pread(fd, buf, 10, 30) == 10);
    for (int i = 990; i < 1020; i++)
        CHECK(dup2(fd, i) == i && pread(i, buf, 1, 0) == 1);
    for (int i = 990; i < 1020; i++)
        CHECK(pread(i, buf, 1, 0) == 1 && buf[0] == 0 && close(i) == 0);
    CHECK(pread(fd, buf, 10, 40) == 10 && right(buf, 40, 10));
}

static void limits(void) {
    struct rlimit r = {64, 64};
    int n = 0;
    CHECK(setrlimit(RLIMIT_NOFILE, &r) == 0);
    while (open(path, O_RDONLY) >= 0)
        n++;
    CHECK(errno == EMFILE && n == 61);
    CHECK(pread(10, buf, 10, 0) == 10 && right(buf, 0, 10));
    CHECK(fopen(path, "r") == NULL && errno == EMFILE);
}

static void *blocked(void *arg) {
    (void)!read(*(int *)arg, buf, 10);
    return NULL;
}

static void cancels(void) {
    int p[2];
    void *result;
    pthread_t t;
    CHECK(pipe(p) == 0 && pthread_create(&t, NULL, blocked, &p[0]) == 0);
    usleep(20000);
    CHECK(pthread_cancel(t) == 0 && pthread_join(t, &result) == 0 && result == PTHREAD_CANCELED);
}

static void executes(void) {
    char made[4096];
    snprintf(made, sizeof made, "%s.sh", path);
    for (int i = 0; i < 20; i++) {
        int in = open("/bin/true", O_RDONLY), out = open(made, O_WRONLY | O_CREAT | O_TRUNC, 0755);
        long n;
        CHECK(in >= 0 && out >= 0 && flock(out, LOCK_EX | LOCK_NB) == 0);
        while ((n = read(in, buf, sizeof buf)) > 0)
            CHECK(write(out, buf, n) == n);
        CHECK(n == 0 && close(in) == 0 && close(out) == 0);
        /* At once: nobody else may hold it open for writing, or locked. */
        pid_t pid = fork();
        if (pid == 0) {
            execl(made, "true", NULL);
            _exit(errno == ETXTBSY ? 7 : 6);
        }
        reap(pid);
        in = open(made, O_RDONLY);
        CHECK(in >= 0 && flock(in, LOCK_EX | LOCK_NB) == 0 && flock(in, LOCK_UN) == 0 && close(in) == 0);
    }
    CHECK(unlink(made) == 0);
}

/* Whether another process finds the first bytes of a file locked by this one. */
static int locked_by_us(const char *name) {
    pid_t us = getpid(), pid = fork();
    int status = 0;
    CHECK(pid >= 0);
    if (pid == 0) {
        struct flock other = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 4};
        int fd = open(name, O_RDWR);
        _exit(fd >= 0 && fcntl(fd, F_GETLK, &other) == 0 && other.l_type == F_WRLCK && other.l_pid == us ? 0 : 1);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    return WEXITSTATUS(status) == 0;
}

/* A lock of the process is lost when any descriptor of its file is closed: the library must close none. */
static void locks(void) {
    char made[4096];
    snprintf(made, sizeof made, "%s.locks", path);
    for (int by_lockf = 0; by_lockf < 2; by_lockf++) {
        int fd = open(made, O_RDWR | O_CREAT | O_TRUNC, 0644), twin;
        struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        CHECK(fd >= 0 && write(fd, "0123456789", 10) == 10 && lseek(fd, 0, SEEK_SET) == 0);
        CHECK((by_lockf ? lockf(fd, F_TLOCK, 10) : fcntl(fd, F_SETLK, &all)) == 0 && locked_by_us(made));
        twin = dup(fd); /* is met for the first time by this read */
        CHECK(twin >= 0 && pread(twin, buf, 4, 0) == 4 && !memcmp(buf, "0123", 4));
        CHECK(pread(fd, buf, 4, 2) == 4 && locked_by_us(made));
        CHECK(flock(fd, LOCK_SH) == 0 && pread(fd, buf, 4, 2) == 4 && locked_by_us(made));
        CHECK(close(twin) == 0 && close(fd) == 0 && unlink(made) == 0);
    }
}

/* A lock of an open file lasts as long as anybody has it open. */
static void locks_open_files(void) {
    int first = open(path, O_RDONLY), second;
    CHECK(pread(first, buf, 4, 0) == 4 && flock(first, LOCK_EX | LOCK_NB) == 0 && pread(first, buf, 4, 4) == 4);
    second = open(other, O_RDONLY);
    CHECK(pread(second, buf, 4, 0) == 4 && flock(second, LOCK_EX | LOCK_NB) == 0 && pread(second, buf, 4, 4) == 4);
    CHECK(close(second) == 0 && close(first) == 0);
}

static volatile int broken;

static void is_broken(int signal) {
    broken = signal;
}

/* A write lease ends when its file is opened, by whomever, also that of a file that is only read. Prints "no lease" where there are none. */
static void leases(void) {
    char made[4096];
    snprintf(made, sizeof made, "%s.lease", path);
    CHECK(signal(SIGIO, is_broken) != SIG_ERR);
    for (int reads = 0; reads < 2; reads++) {
        int fd = open(made, reads ? O_RDONLY : O_RDWR | O_CREAT | O_TRUNC, 0644), twin, taken = -1;
        CHECK(fd >= 0 && (reads || write(fd, "0123456789", 10) == 10) && pread(fd, buf, 4, 0) == 4);
        /* The manager has it open for a moment. */
        for (int i = 0; i < 10000 && (taken = fcntl(fd, F_SETLEASE, F_WRLCK)) != 0 && errno == EAGAIN; i++)
            usleep(1000);
        if (taken != 0 && errno == EINVAL) {
            puts("no lease");
            exit(0);
        }
        CHECK(taken == 0 && pread(fd, buf, 4, 2) == 4);
        twin = dup(fd); /* is met for the first time by this read */
        CHECK(twin >= 0 && pread(twin, buf, 4, 0) == 4 && !memcmp(buf, "0123", 4));
        CHECK(!broken && fcntl(fd, F_GETLEASE) == F_WRLCK && fcntl(fd, F_SETLEASE, F_UNLCK) == 0);
        CHECK(close(twin) == 0 && close(fd) == 0);
    }
    CHECK(unlink(made) == 0);
}

static void sandboxed(void) {
    int fd = open(path, O_RDONLY), next = open(other, O_RDONLY);
    CHECK(read(fd, buf, 10) == 10);
    fflush(stdout);
    /* From here on only read, write, _exit and returning from signals. */
    CHECK(prctl(PR_SET_SECCOMP, 1) == 0);
    if (read(fd, buf, 10) != 10 || !right(buf, 10, 10) || read(next, buf, 4) != 4)
        syscall(SYS_exit, 3);
    (void)!write(1, "ok\n", 3);
    syscall(SYS_exit, 0);
}

/* Reads on until the time is over; what it reads must be right throughout. */
/* Reads until a file is removed, and then so many times more. Makes the file "begun" beside it when it begins. */
static void long_run(const char *until, long more) {
    char begun[4096];
    snprintf(begun, sizeof begun, "%s.begun", until);
    int made = open(begun, O_WRONLY | O_CREAT, 0600);
    CHECK(made >= 0 && close(made) == 0);
    long i = 0, left = more;
    int fd = open(path, O_RDONLY);
    do {
        CHECK(pread(fd, buf, 64, i % 90000) == 64 && right(buf, i % 90000, 64));
        if (++i % 64 == 0) {
            int line = open(other, O_RDONLY);
            CHECK(line >= 0 && read(line, buf, 4) == 4 && close(line) == 0);
            usleep(200);
        }
        if (left < more || (i % 64 == 0 && access(until, F_OK) != 0))
            left--;
    } while (left > 0);
}

/* Small files that are read fast, one that is mapped, and a large one. */
static void lull(void) {
    for (int i = 0; i < 64; i++) {
        int fd = open(other, O_RDONLY);
        CHECK(fd >= 0 && read(fd, buf, 7) == 7 && read(fd, buf, 7) == 7 && close(fd) == 0);
    }
    int fd = open(other, O_RDONLY), large = open(path, O_RDONLY);
    char *m = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(m != MAP_FAILED && !memcmp(m, "line 0\n", 7) && munmap(m, 4096) == 0);
    CHECK(read(fd, buf, 7) == 7 && close(fd) == 0);
    CHECK(large >= 0 && read(large, buf, 1000) == 1000 && right(buf, 0, 1000) && close(large) == 0);
}

/* Reads of a small file until some wait: a child stops this process again and again, and lets it go on. It may be stopped
   outside the call that is timed, so many have to wait. */
static void lull_ends(void) {
    volatile int *over = mmap(NULL, sizeof *over, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(over != MAP_FAILED);
    pid_t parent = getpid(), child = fork();
    CHECK(child >= 0);
    while (child == 0 && !*over && getppid() == parent) {
        kill(parent, SIGSTOP);
        usleep(300);
        kill(parent, SIGCONT);
        usleep(50);
    }
    if (child == 0)
        _exit(0);
    for (int waits = 0; waits < 40; waits++) {
        int fd = open(other, O_RDONLY);
        CHECK(fd >= 0);
        struct timespec began, ended;
        do {
            clock_gettime(CLOCK_MONOTONIC, &began);
            CHECK(pread(fd, buf, 7, 0) == 7);
            clock_gettime(CLOCK_MONOTONIC, &ended);
        } while ((ended.tv_sec - began.tv_sec) * 1000000000L + ended.tv_nsec - began.tv_nsec < 200000);
        CHECK(close(fd) == 0);
    }
    *over = 1; /* it ends by itself: killed, it might leave this process stopped */
    CHECK(waitpid(child, NULL, 0) == child);
    usleep(200000); /* so that there is room */
    for (int i = 1; i < 4; i++) {
        int fd = open(other, O_RDONLY);
        CHECK(fd >= 0 && pread(fd, buf, 7, 7 * i) == 7 && close(fd) == 0);
    }
}

int main(int argc, char **argv) {
    if (argc < 4)
        return 2;
    const char *what = argv[1];
    path = argv[2], other = argv[3];
    for (int i = 3; i < 900; i++) /* what whoever ran this left open */
        syscall(SYS_close, i);
    wait_for_library();
#define CASE(name, call)                                                                                               \
    if (!strcmp(what, name)) {                                                                                         \
        call;                                                                                                          \
        puts("ok");                                                                                                    \
        return 0;                                                                                                      \
    }
    CASE("reads", reads());
    CASE("opens", opens());
    CASE("chk", chk(argc));
    CASE("streams", streams());
    CASE("shared_stream", shared_stream());
    CASE("threads", threads());
    CASE("forks", forks(argv[0]));
    CASE("hasty", hasty());
    CASE("stdin", from_stdin());
    CASE("dups", dups());
    CASE("signals", signals());
    CASE("copies", kernel_copies());
    CASE("aio", aios());
    CASE("libaio", libaio());
    CASE("urings", urings());
    CASE("inline", (way = INLINE, unheard()));
    CASE("polled", (way = POLLED, unheard()));
    CASE("too_fast", (way = INLINE, too_fast()));
    CASE("restricted_ring", (way = INLINE, restricted_ring()));
    CASE("many", many());
    CASE("closes", closes());
    CASE("limits", limits());
    CASE("cancels", cancels());
    CASE("executes", executes());
    CASE("locks", locks());
    CASE("locks_open_files", locks_open_files());
    CASE("leases", leases());
    CASE("sandboxed", sandboxed());
    CASE("restricted_child", restricted_child());
    CASE("lull", lull());
    CASE("lull_ends", lull_ends());
    CASE("long", long_run(argv[4], atol(argv[5])));
    return 2;
}
