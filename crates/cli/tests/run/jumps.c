/*
 * Leaves reads of a file by siglongjmp from a signal handler, as programs do that limit how long a call may take. Arguments:
 * the file, the process of the server that is stopped meanwhile, and how the calls lie on the stack: "flat", all at the same
 * depth, or "deep", each below the one before.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
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

int main(int argc, char **argv)
{
	if (argc < 4)
		return 2;
	pid_t server = atoi(argv[2]);
	fd = open(argv[1], O_RDONLY);
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
