/*
 * Makes the clock of a program run SLOWER times slower (LD_PRELOAD). For a QEMU that translates: its machine then sees
 * itself compute at nearly the speed of a real one, and no timeout in it, of Kubernetes' or of a test, passes for that reason alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <time.h>

static const long long second = 1000000000;

static struct timespec times(const struct timespec *t, long long by, long long per)
{
	long long ns = t->tv_sec * second + t->tv_nsec;
	ns = ns / per * by + ns % per * by / per;
	return (struct timespec){ns / second, ns % second};
}

int clock_gettime(clockid_t clock, struct timespec *t)
{
	static int (*real)(clockid_t, struct timespec *);
	if (!real)
		real = dlsym(RTLD_NEXT, "clock_gettime");
	int failed = real(clock, t);
	if (!failed && clock == CLOCK_MONOTONIC)
		*t = times(t, 1, SLOWER);
	return failed;
}

int ppoll(struct pollfd *files, nfds_t number, const struct timespec *timeout, const sigset_t *mask)
{
	static int (*real)(struct pollfd *, nfds_t, const struct timespec *, const sigset_t *);
	if (!real)
		real = dlsym(RTLD_NEXT, "ppoll");
	struct timespec longer;
	if (timeout)
		longer = times(timeout, SLOWER, 1);
	return real(files, number, timeout ? &longer : 0, mask);
}

/* What a program calls that was compiled with _FORTIFY_SOURCE. */
int __ppoll_chk(struct pollfd *files, nfds_t number, const struct timespec *timeout, const sigset_t *mask, size_t size)
{
	(void)size;
	return ppoll(files, number, timeout, mask);
}
