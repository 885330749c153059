/*
 * Stands where NVIDIA installs nvidia-cuda-mps-control.
 *
 * With -d it leaves a daemon behind that listens in CUDA_MPS_PIPE_DIRECTORY, and that is refused where another one does.
 * Without it sends the lines of standard input to the daemon and prints its answers. It ends with 1 when the daemon ends:
 * a container that keeps it running stands for a program with a CUDA context.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define CONNECTIONS 64

static int failed(const char *what)
{
	fprintf(stderr, "%s\n", what);
	return 1;
}

static struct sockaddr_un address(void)
{
	const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
	struct sockaddr_un found = {.sun_family = AF_UNIX};
	snprintf(found.sun_path, sizeof found.sun_path, "%s/control", folder ? folder : "/tmp/nvidia-mps");
	return found;
}

/* A connection to the daemon, or -1. */
static int connected(void)
{
	struct sockaddr_un to = address();
	int made = socket(AF_UNIX, SOCK_STREAM, 0);
	if (made >= 0 && connect(made, (struct sockaddr *)&to, sizeof to) == 0)
		return made;
	close(made);
	return -1;
}

/* Answer one line; whether the daemon goes on. */
static int answer(int client, const char *line)
{
	static char percent[64] = "100.0";
	char words[3][64] = {""};
	int number = sscanf(line, "%63s %63s %63s", words[0], words[1], words[2]);
	const char *reply = "\n";
	if (number == 1 && strcmp(words[0], "get_default_active_thread_percentage") == 0)
		reply = strcat(strcpy(words[1], percent), "\n");
	else if (number == 2 && strcmp(words[0], "set_default_active_thread_percentage") == 0)
		strcpy(percent, words[1]);
	else if (!(number == 3 && strcmp(words[0], "set_default_device_pinned_mem_limit") == 0) && strcmp(line, "quit"))
		reply = "Unknown command\n";
	if (write(client, reply, strlen(reply)) < 0)
		perror("write");
	return strcmp(line, "quit") != 0;
}

/* Serve until somebody says quit. */
static void serve(int listener)
{
	struct pollfd all[CONNECTIONS] = {{listener, POLLIN, 0}};
	int number = 1;
	while (poll(all, number, -1) > 0 || errno == EINTR) {
		for (int at = number - 1; at > 0; at--) {
			char line[256];
			if (!all[at].revents)
				continue;
			ssize_t got = read(all[at].fd, line, sizeof line - 1);
			if (got <= 0) {
				close(all[at].fd);
				all[at] = all[--number];
				continue;
			}
			line[got] = 0;
			line[strcspn(line, "\n")] = 0;
			if (!answer(all[at].fd, line))
				return;
		}
		if (all[0].revents && number < CONNECTIONS)
			all[number++] = (struct pollfd){accept(listener, 0, 0), POLLIN, 0};
	}
}

static int daemon_started(void)
{
	struct sockaddr_un at = address();
	int other = connected(), listener = socket(AF_UNIX, SOCK_STREAM, 0);
	if (other >= 0)
		return failed("An instance of this daemon is already running");
	if (!getenv("CUDA_VISIBLE_DEVICES"))
		return failed("no GPUs");
	unlink(at.sun_path);
	if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, CONNECTIONS) != 0)
		return failed("no pipe directory");
	if (fork())
		return 0;
	setsid();
	if (fork())
		_exit(0);
	signal(SIGPIPE, SIG_IGN);
	serve(listener);
	unlink(at.sun_path);
	return 0;
}

static int asked(void)
{
	char buffer[256];
	int daemon = connected();
	if (daemon < 0)
		return failed("Cannot find MPS control daemon process");
	struct pollfd both[2] = {{daemon, POLLIN, 0}, {0, POLLIN, 0}};
	int quitting = 0;
	for (int unanswered = 0, open = 1; open || unanswered;) {
		both[1].fd = open && !unanswered ? 0 : -1;
		if (poll(both, 2, -1) < 0)
			return failed(strerror(errno));
		if (both[0].revents) {
			ssize_t got = read(daemon, buffer, sizeof buffer);
			if (got <= 0)
				return quitting ? 0 : failed("the MPS control daemon has ended");
			if (fwrite(buffer, 1, got, stdout) != (size_t)got)
				return 1;
			fflush(stdout);
			unanswered = 0;
		} else if (both[1].revents) {
			ssize_t got = read(0, buffer, sizeof buffer);
			open = got > 0;
			if (open && write(daemon, buffer, got) != got)
				return failed("the MPS control daemon has ended");
			unanswered = open;
			quitting |= open && strncmp(buffer, "quit\n", got) == 0;
		}
	}
	return 0;
}

int main(int number, char **words)
{
	int is_daemon = number > 1 && strcmp(words[1], "-d") == 0;
	if (number > 1 && !(is_daemon && (number == 2 || (number == 3 && strcmp(words[2], "-multiuser-server") == 0))))
		return failed("usage: nvidia-cuda-mps-control [-d [-multiuser-server]]");
	return is_daemon ? daemon_started() : asked();
}
