/*
 * Stands where NVIDIA installs nvidia-imex and nvidia-imex-ctl. CDI mounts it into daemons' containers, where it runs the
 * stand-in that rackloom brings, or the real program without GPUs where the node has that as NAME.real.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

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
	} else {
		command[at++] = "python3";
		command[at++] = "-m";
		command[at++] = is_control ? "rackloom.twin.imex.ctl" : "rackloom.twin.imex.service";
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
