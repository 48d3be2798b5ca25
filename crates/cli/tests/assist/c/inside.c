/* Programs into which hints are given from inside, each with something that a thread could disturb.
 *
 * inside WHAT FILE STOP [OTHER]: reads FILE until STOP is there; says its process's number first and "done" at the
 * end. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *path, *stop, *other;
static char bytes[65536];
static int handler_fd;

static void must(int holds, const char *what)
{
	if (holds)
		return;
	printf("%s: %s\n", what, strerror(errno));
	fflush(stdout);
	_exit(1);
}

static void piece(int fd)
{
	static long next;
	errno = 42;
	must(pread(fd, bytes, 4096, next++ % 256 * 65536) == 4096, "pread");
	must(errno == 42, "errno changed");
}

static void until(int fd, const char *end)
{
	while (access(end, F_OK)) {
		piece(fd);
		usleep(500);
	}
}

static void *thread(void *fd)
{
	until(*(int *)fd, stop);
	puts("done");
	fflush(stdout);
	return NULL;
}

static void on_alarm(int signal)
{
	(void)signal;
	int before = errno;
	piece(handler_fd);
	errno = before;
}

/* How many descriptors the program sees. */
static int descriptors(void)
{
	int count = 0;
	for (int i = 0; i < 900; i++)
		count += fcntl(i, F_GETFD) >= 0;
	return count;
}

int main(int argc, char **argv)
{
	if (argc < 4)
		return 64;
	const char *what = argv[1];
	path = argv[2], stop = argv[3], other = argc > 4 ? argv[4] : NULL;
	printf("%d\n", getpid());
	fflush(stdout);
	static int fd;
	fd = open(path, O_RDONLY);
	must(fd >= 0, path);
	if (!strcmp(what, "stays")) {
		int before = descriptors();
		sigset_t mask;
		until(fd, stop);
		must(descriptors() == before, "another descriptor");
		must(sigprocmask(SIG_BLOCK, NULL, &mask) == 0 && !sigismember(&mask, SIGTERM), "the mask changed");
		close(fd);
		while (other && access(other, F_OK))
			usleep(1000);
	} else if (!strcmp(what, "reuses")) {
		while (access(stop, F_OK)) {
			for (int i = 0; i < 8; i++)
				piece(fd);
			close(fd);
			int number = fd;
			fd = open(other, O_RDONLY);
			must(fd == number, "another number");
			must(pread(fd, bytes, 4096, 0) == 4096, "pread");
			close(fd);
			fd = open(path, O_RDONLY);
			must(fd == number, "another number");
			usleep(200);
		}
	} else if (!strcmp(what, "forks")) {
		until(fd, other);
		pid_t child = fork();
		must(child >= 0, "fork");
		if (child == 0)
			printf("%d\n", getpid());
		until(fd, stop);
		int status;
		if (child)
			must(waitpid(child, &status, 0) == child && status == 0, "the child");
	} else if (!strcmp(what, "locks")) {
		struct flock lock = { .l_type = F_RDLCK, .l_whence = SEEK_SET };
		must(fcntl(fd, F_SETLK, &lock) == 0, "the lock");
		until(fd, stop);
		int status;
		pid_t child = fork();
		if (child == 0) {
			lock.l_type = F_WRLCK;
			must(fcntl(fd, F_GETLK, &lock) == 0, "F_GETLK");
			_exit(lock.l_type == F_RDLCK ? 0 : 1);
		}
		must(waitpid(child, &status, 0) == child && status == 0, "the lock is gone");
	} else if (!strcmp(what, "leaves")) {
		pthread_t reader;
		must(pthread_create(&reader, NULL, thread, &fd) == 0, "pthread_create");
		while (access(other, F_OK))
			usleep(1000);
		pthread_exit(NULL);
	} else if (!strcmp(what, "handles")) {
		handler_fd = fd;
		struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
		must(sigaction(SIGALRM, &action, NULL) == 0, "sigaction");
		struct itimerval often = { { 0, 500 }, { 0, 500 } };
		must(setitimer(ITIMER_REAL, &often, NULL) == 0, "setitimer");
		while (access(stop, F_OK))
			free(malloc(1 + rand() % 5000));
	} else if (!strcmp(what, "restricts")) {
		until(fd, stop);
		must(prctl(PR_SET_SECCOMP, 1) == 0, "prctl");
		(void)!write(1, "done\n", 5);
		/* Not the whole process: whoever else is in it keeps it alive. */
		syscall(SYS_exit, 0);
	}
	puts("done");
	return 0;
}
