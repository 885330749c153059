/*
 * Stands where NVIDIA installs nvidia-imex and nvidia-imex-ctl. CDI mounts it into daemons' containers, where it runs the
 * stand-in that rackloom brings, or the real program without GPUs where the node has that as NAME.real.
 *
 * `nvidia-imex-ctl -c FILE -q` is answered here: NVIDIA's tool is a native program that takes milliseconds for it, and a
 * daemon that starts is asked many times a second.
 */
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int failed(const char *what)
{
	fprintf(stderr, "nvidia-imex-ctl (stand-in): %s\n", what);
	return 1;
}

/* Ask the stand-in's command port for its own status, as rackloom.lab.imex.ctl does. */
static int local_status(const char *config)
{
	char line[512], address[64] = "", answer[512] = "", status[64];
	int port = 50005;
	FILE *file = fopen(config, "r");
	if (!file)
		return failed("cannot read the configuration");
	while (fgets(line, sizeof line, file)) {
		sscanf(line, "IMEX_CMD_BIND_INTERFACE_IP=%63s", address);
		sscanf(line, "IMEX_CMD_PORT=%d", &port);
	}
	fclose(file);
	struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port)};
	if (inet_pton(AF_INET, *address ? address : "127.0.0.1", &to.sin_addr) != 1)
		return failed("no IPv4 address to ask");
	int asking = socket(AF_INET, SOCK_STREAM, 0);
	if (asking < 0 || connect(asking, (struct sockaddr *)&to, sizeof to) != 0 || write(asking, "local\n", 6) != 6)
		return failed("the daemon does not answer");
	for (size_t got = 0; got < sizeof answer - 1 && !strchr(answer, '\n');) {
		ssize_t more = read(asking, answer + got, sizeof answer - 1 - got);
		if (more <= 0)
			return failed("the daemon went away");
		got += more;
		answer[got] = 0;
	}
	if (sscanf(answer, "{\"status\": \"%63[^\"]\"}", status) != 1)
		return failed("the daemon says what is not understood");
	puts(status);
	return 0;
}

int main(int number, char **words)
{
	static char *pythons[] = {"/usr/bin/python3", "/usr/bin/python3.11", "/usr/bin/python3.13", 0};
	char *name = strrchr(words[0], '/') ? strrchr(words[0], '/') + 1 : words[0];
	int is_control = strstr(name, "-ctl") != 0;
	char real[64], *command[number + 4];
	snprintf(real, sizeof real, "/usr/bin/nvidia-imex%s.real", is_control ? "-ctl" : "");
	int at = 0;
	if (access(real, X_OK) == 0) {
		command[at++] = name;
		if (!is_control)
			command[at++] = "--nogpu";
	} else if (is_control && number == 4 && !strcmp(words[1], "-c") && !strcmp(words[3], "-q")) {
		return local_status(words[2]);
	} else {
		command[at++] = "python3";
		command[at++] = "-m";
		command[at++] = is_control ? "rackloom.lab.imex.ctl" : "rackloom.lab.imex.service";
	}
	for (int i = 1; i < number; i++)
		command[at++] = words[i];
	command[at] = 0;
	if (strcmp(command[0], "python3"))
		execv(real, command);
	else
		for (char **python = pythons; *python; python++) {
			command[0] = *python; /* Python finds its modules by its own path */
			execv(*python, command);
		}
	perror(name);
	return 127;
}
