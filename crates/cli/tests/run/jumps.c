/*
 * Leaves calls by siglongjmp from a signal handler, as programs do that limit how long a call may take. Arguments: the file,
 * the process of the server, and which calls. Reads, for which the server is stopped: "flat", all at the same depth of the
 * stack, or "deep", each below the one before. Or waits for locks that another process has: "locks".
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* A server that is told to stop may answer a moment longer, so some reads return and are not left. */
enum { JUMPS = 40, READS_MAX = 1000 };

static sigjmp_buf back;
static int fd, jumped;

static void jumps(int signal)
{
	(void)signal;
	siglongjmp(back, 1);
}

static void rings_in(int microseconds)
{
	struct itimerval timer = { .it_value.tv_usec = microseconds };
	setitimer(ITIMER_REAL, &timer, NULL);
}

static void jump_out(void)
{
	char byte;
	if (sigsetjmp(back, 1) == 0) {
		rings_in(20000);
		pread(fd, &byte, 1, 0);
		rings_in(0);
	} else {
		jumped++;
	}
}

static long last(pid_t server)
{
	char bytes[4] = { 0 };
	long got;
	printf("jumped %s\n", jumped >= JUMPS ? "out of all" : "too rarely");
	fflush(stdout);
	kill(server, SIGCONT);
	got = pread(fd, bytes, 3, 0);
	printf("read %ld %s\n", got, bytes);
	return got;
}

static long __attribute__((noinline)) deeper(int left, pid_t server)
{
	volatile char room[512];
	memset((char *)room, left, sizeof room);
	if (left == 0 || jumped == JUMPS)
		return last(server);
	jump_out();
	return deeper(left - 1, server) + room[0] - room[1];
}

/* A call that is inside another one, of the same thread: neither takes the other's reply. */
static volatile long nested_got;
static char nested[4];

static void reads(int signal)
{
	(void)signal;
	nested_got = pread(fd, nested, 3, 3);
}

static void nest(pid_t server, int flags)
{
	static char stack[1 << 16];
	char bytes[4] = { 0 };
	stack_t other = { .ss_sp = stack, .ss_size = sizeof stack };
	struct sigaction action = { .sa_handler = reads, .sa_flags = flags };
	sigaltstack(&other, NULL);
	sigaction(SIGALRM, &action, NULL);
	kill(server, SIGSTOP);
	if (fork() == 0) {
		usleep(200000);
		kill(server, SIGCONT);
		_exit(0);
	}
	nested_got = 0;
	rings_in(50000);
	long got = pread(fd, bytes, 3, 0);
	while (!nested_got)
		usleep(1000);
	printf("nested %ld %s in %ld %s\n", nested_got, nested, got, bytes);
}

/* Both kinds of lock on the file: whether it has them now. */
static int has_locks(int file)
{
	struct flock whole = { .l_type = F_WRLCK };
	return fcntl(file, F_SETLK, &whole) == 0 && flock(file, LOCK_EX | LOCK_NB) == 0;
}

static void hold_locks(const char *path, int told, int tells)
{
	struct flock whole = { .l_type = F_UNLCK };
	int held, file = open(path, O_RDWR);
	char byte = 0;
	held = has_locks(file);
	write(tells, &byte, 1);
	read(told, &byte, 1);
	fcntl(file, F_SETLK, &whole);
	flock(file, LOCK_UN);
	/* Whoever waits yet is granted them now. A wait that ends may have been granted one for a moment. */
	usleep(300000);
	for (int i = 0; i < 50 && held; i++) {
		if (has_locks(file))
			_exit(0);
		usleep(100000);
	}
	_exit(held ? 1 : 2);
}

/* A lock that is not waited for any more is not granted to the program. */
static int leave_locks(const char *path)
{
	int to_holder[2], to_us[2], status = -1;
	struct flock whole = { .l_type = F_WRLCK };
	char byte;
	if (pipe(to_holder) != 0 || pipe(to_us) != 0)
		return 2;
	if (fork() == 0)
		hold_locks(path, to_holder[0], to_us[1]);
	read(to_us[0], &byte, 1);
	for (int i = 0; i < READS_MAX && jumped < JUMPS; i++) {
		if (sigsetjmp(back, 1) == 0) {
			rings_in(20000);
			if (i % 2)
				fcntl(fd, F_SETLKW, &whole);
			else
				flock(fd, LOCK_EX);
			rings_in(0);
		} else {
			jumped++;
		}
	}
	printf("jumped %s\n", jumped >= JUMPS ? "out of all" : "too rarely");
	printf("read %zd\n", pread(fd, &byte, 1, 0));
	write(to_holder[1], &byte, 1);
	wait(&status);
	printf("locked again %d\n", status);
	return status;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	pid_t server = atoi(argv[2]);
	fd = open(argv[1], O_RDWR);
	if (strcmp(argv[3], "locks") == 0) {
		signal(SIGALRM, jumps);
		return leave_locks(argv[1]) != 0;
	}
	nest(server, SA_RESTART);
	nest(server, SA_RESTART | SA_ONSTACK);
	signal(SIGALRM, jumps);
	kill(server, SIGSTOP);
	if (strcmp(argv[3], "deep") == 0)
		return deeper(READS_MAX, server) != 3;
	for (int i = 0; i < READS_MAX && jumped < JUMPS; i++)
		jump_out();
	return last(server) != 3;
}
