/* What the programs that load file servers share: the clock, and an end that says why. */
#include <stdio.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

/* Other threads may be in a library that must not be taken down. */
static void fail(const char *what, const char *why)
{
	fprintf(stderr, "%s: %s\n", what, why ? why : "failed");
	_exit(1);
}
