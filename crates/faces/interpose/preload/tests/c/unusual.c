/* Programs that do what few do. Each ends with "ok", with the library as without. */
#include <fcntl.h>
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static const char *path;
static volatile int handled, over;

/* Reads at a place, and looks whether that is right. */
static int reads_right(int fd, long at, long len) {
    char b[512];
    if (pread(fd, b, len, at) != len)
        return 0;
    for (long i = 0; i < len; i++)
        if ((unsigned char)b[i] != (at + i) % 251)
            return 0;
    return 1;
}

static int opened(void) {
    int fd = open(path, O_RDONLY);
    CHECK(fd >= 0);
    return fd;
}

static void ends_well(pid_t pid) {
    int status = -1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && status == 0);
}

static void limit(int what, rlim_t to) {
    struct rlimit both = { to, to };
    CHECK(setrlimit(what, &both) == 0);
}

static void every(int us, void (*handler)(int), int flags) {
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
    struct itimerval timer = { { 0, us }, { 0, us } };
    CHECK(sigaction(SIGALRM, &action, NULL) == 0 && setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

/* All descriptors are closed, by each way, and the next ones read. */
static void closes_all(void) {
    for (int round = 0; round < 6; round++) {
        CHECK(reads_right(opened(), 0, 100));
        if (round % 3 == 0)
            CHECK(close_range(3, ~0U, 0) == 0);
        for (int i = 3; i < 1024; i++)
            round % 3 == 1 ? close(i) : syscall(SYS_close, i);
        int fd = opened(), pipes[2];
        char byte;
        CHECK(fd == 3 && reads_right(fd, 77, 100) && close_range(3, ~0U, CLOSE_RANGE_CLOEXEC) == 0);
        CHECK(reads_right(fd, 78, 100) && syscall(SYS_close_range, 3, ~0U, 0) == 0);
        CHECK(pipe(pipes) == 0 && pipes[0] == 3 && pipes[1] == 4);
        usleep(20000);
        CHECK(write(pipes[1], "x", 1) == 1 && read(pipes[0], &byte, 1) == 1 && !close(3) && !close(4));
    }
}

/* Threads with the least stack. */
static void *small(void *arg) {
    for (int i = 0; i < 50; i++) {
        char b[64];
        int fd = opened();
        struct iovec parts[2] = { { b, 10 }, { b + 10, 20 } };
        CHECK(readv(fd, parts, 2) == 30 && b[29] == 29 && lseek(fd, 5, SEEK_SET) == 5 && read(fd, b, 1) == 1 && b[0] == 5);
        char *m = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, fd, 0);
        CHECK(m != MAP_FAILED && m[7] == 7 && munmap(m, 4096) == 0 && close(dup(fd)) == 0 && close(fd) == 0);
    }
    return arg;
}

static void small_stacks(void) {
    pthread_t threads[8];
    pthread_attr_t attributes;
    CHECK(pthread_attr_init(&attributes) == 0 && pthread_attr_setstacksize(&attributes, 16 << 10) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_create(&threads[i], &attributes, small, NULL) == 0);
    for (int i = 0; i < 8; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* Handlers that read, and that fork, whatever they interrupt. */
static void on_signal(int signal) {
    int before = errno, fd = open(path, O_RDONLY);
    if (fd < 0 || !reads_right(fd, 7, 50) || close(fd) != 0)
        _exit(5);
    if (handled % 8 == 0) {
        pid_t pid = fork();
        if (pid == 0)
            _exit((fd = open(path, O_RDONLY)) < 0 || !reads_right(fd, 7, 50));
        int status = -1;
        if (waitpid(pid, &status, 0) != pid || status != 0)
            _exit(6);
    }
    handled += signal == SIGALRM;
    errno = before;
}

static void handlers(void) {
    static char stack[32 << 10];
    stack_t apart = { .ss_sp = stack, .ss_size = sizeof stack };
    CHECK(sigaltstack(&apart, NULL) == 0);
    every(5000, on_signal, SA_ONSTACK | SA_RESTART);
    while (handled < 60) {
        int fd = opened();
        FILE *file = fopen(path, "r");
        char b[1000];
        CHECK(reads_right(fd, handled, 100) && file && fread(b, 1, 1000, file) == 1000 && fclose(file) == 0);
        CHECK(close(dup(fd)) == 0 && close(fd) == 0);
    }
    every(0, on_signal, 0);
}

/* Handlers that are left for good. */
static sigjmp_buf back;
static volatile int may_jump;
static void jump(int signal) {
    if (may_jump) {
        handled += signal == SIGALRM;
        siglongjmp(back, 1);
    }
}

static void jumps(void) {
    limit(RLIMIT_NOFILE, 4096);
    every(700, jump, 0);
    while (handled < 1000) {
        if (sigsetjmp(back, 1) == 0) {
            may_jump = 1;
            for (int i = 0; i < 50; i++) {
                int fd = open(path, O_RDONLY);
                if (fd >= 0 && !reads_right(fd, 9, 100))
                    _exit(8);
                close(dup(fd));
                close(fd);
            }
        }
        may_jump = 0;
        if (handled % 100 == 99)
            closefrom(3);
    }
    every(0, jump, 0);
    closefrom(3);
    CHECK(reads_right(opened(), 3, 10));
    pid_t pid = fork();
    if (pid == 0)
        _exit(!reads_right(open(path, O_RDONLY), 3, 10));
    ends_well(pid);
}

/* Children that share memory, descriptors, both or nothing. */
static int cloned(void *arg) {
    int fd = *(int *)arg, own = open(path, O_RDONLY);
    int is_right = reads_right(fd, 3, 50) && reads_right(own, 9, 50);
    close(own);
    close(fd);
    return !is_right;
}

static void clones(void) {
    static char stack[64 << 10];
    const int ways[] = { 0, CLONE_FILES, CLONE_VM, CLONE_VM | CLONE_FILES, CLONE_VM | CLONE_VFORK, CLONE_FS };
    for (unsigned i = 0; i < 4 * sizeof ways / sizeof ways[0]; i++) {
        int way = ways[i % 6], fd = opened();
        CHECK(reads_right(fd, 0, 10));
        ends_well(clone(cloned, stack + sizeof stack, way | SIGCHLD, &fd));
        CHECK(reads_right(fd, 4, 10) == !(way & CLONE_FILES) && close(fd) == (way & CLONE_FILES ? -1 : 0));
        fd = opened();
        CHECK(reads_right(fd, 99, 10) && close(fd) == 0);
        /* Whatever the C library thinks of it. */
        pid_t pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (pid == 0)
            _exit(!reads_right(open(path, O_RDONLY), 4, 10));
        ends_well(pid);
    }
}

/* Threads with descriptors of their own. */
static void *alone(void *arg) {
    int fd = *(int *)arg;
    char byte = 1;
    CHECK(unshare(CLONE_FILES) == 0 && reads_right(fd, 5, 10) && close(fd) == 0);
    CHECK(open("/dev/zero", O_RDONLY) == fd && pread(fd, &byte, 1, 0) == 1 && byte == 0);
    for (int i = 0; i < 50; i++) {
        int more = opened();
        CHECK(reads_right(more, i, 10) && close(more) == 0);
    }
    return arg;
}

static void own_descriptors(void) {
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        int fd = opened();
        CHECK(reads_right(fd, 1, 10) && pthread_create(&thread, NULL, alone, &fd) == 0);
        for (int k = 0; k < 100; k++)
            CHECK(reads_right(fd, k, 100));
        CHECK(pthread_join(thread, NULL) == 0 && reads_right(fd, 9, 100) && close(fd) == 0);
    }
}

/* Another C library, whose calls are its own. */
static void other_library(void) {
    void *other = dlmopen(LM_ID_NEWLM, "libc.so.6", RTLD_NOW);
    CHECK(other);
    int (*open_there)(const char *, int, ...), (*close_there)(int);
    *(void **)&open_there = dlsym(other, "open");
    *(void **)&close_there = dlsym(other, "close");
    for (int i = 0; i < 100; i++) {
        int fd = opened();
        char byte = 1;
        CHECK(reads_right(fd, i, 50) && close_there(fd) == 0 && open_there("/dev/zero", O_RDONLY) == fd);
        CHECK(pread(fd, &byte, 1, 0) == 1 && byte == 0 && close_there(fd) == 0);
        CHECK(open_there(path, O_RDONLY) == fd && reads_right(fd, 70, 50) && close(fd) == 0);
    }
}

/* Numbers of descriptors that few tables have room for. */
static void high_numbers(void) {
    const int numbers[] = { 1023, 1024, 4096, 65535, 65536, 100000, (1 << 20) - 1 };
    struct rlimit most;
    CHECK(getrlimit(RLIMIT_NOFILE, &most) == 0);
    most.rlim_cur = most.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &most) == 0);
    for (unsigned i = 0; i < sizeof numbers / sizeof numbers[0] && (rlim_t)numbers[i] < most.rlim_cur; i++) {
        int fd = opened(), high = numbers[i];
        CHECK(dup2(fd, high) == high && close(fd) == 0 && reads_right(high, i, 100));
        CHECK(close(high) == 0 && !reads_right(high, 0, 1) && errno == EBADF);
    }
}

/* Forks while other threads open and read, and their children go on. */
static void *busy(void *arg) {
    while (!over) {
        int fd = opened();
        FILE *file = fopen(path, "r");
        CHECK(reads_right(fd, 9, 100) && file && fgetc(file) == 0 && fclose(file) == 0 && close(fd) == 0);
    }
    return arg;
}

static void busy_forks(void) {
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, NULL) == 0);
    for (int i = 0; i < 100; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            CHECK(reads_right(opened(), i, 100));
            if (i % 5 == 0)
                execl("/bin/true", "true", NULL);
            _exit(0);
        }
        ends_well(pid);
    }
    over = 1;
    for (int i = 0; i < 3; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

/* A filter that ends the program at each call that this one does not make. */
static void filtered(void) {
    int fd = opened(), next = opened();
    CHECK(reads_right(fd, 0, 100));
    fflush(stdout);
#define MAY(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        MAY(pread64), MAY(write), MAY(close), MAY(exit_group), MAY(openat),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog filter = { sizeof rules / sizeof rules[0], rules };
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter) == 0);
    for (int i = 0; i < 1000; i++) {
        int third = open(path, O_RDONLY);
        if (!reads_right(fd, i, 10) || !reads_right(next, i, 10) || !reads_right(third, i, 10) || close(third) != 0)
            syscall(SYS_exit_group, 3);
    }
    (void)!write(1, "ok\n", 3);
    syscall(SYS_exit_group, 0);
}

/* Executes itself again and again by the name that the kernel has for it, with a file that stays open. */
static void again(char **argv) {
    int left = argv[3] ? atoi(argv[3]) : 5, fd = argv[3] ? 77 : dup2(opened(), 77);
    char number[16];
    CHECK(reads_right(fd, left, 100));
    if (left == 0)
        return;
    snprintf(number, sizeof number, "%d", left - 1);
    execl("/proc/self/exe", argv[0], argv[1], path, number, NULL);
    CHECK(!"executed");
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    path = argv[2];
    alarm(300);
    const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        { "closes_all", closes_all }, { "small_stacks", small_stacks }, { "handlers", handlers }, { "jumps", jumps },
        { "clones", clones }, { "own_descriptors", own_descriptors }, { "other_library", other_library },
        { "high_numbers", high_numbers }, { "busy_forks", busy_forks }, { "filtered", filtered },
    };
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (!strcmp(argv[1], cases[i].name)) {
            cases[i].run();
            puts("ok");
            return 0;
        }
    if (!strcmp(argv[1], "again")) {
        again(argv);
        puts("ok");
        return 0;
    }
    return 2;
}
