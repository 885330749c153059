/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1 on nodes without GPUs: the functions that our plugins call, answered from a
 * table beside the library. It is loaded from the node's driver root as the real one is, so that all of our own code runs.
 *
 * Each line of libnvidia-ml.gpus is a GPU, and its fields are separated by tabs:
 *   minor uuid pci name bytes cc-major cc-minor architecture serial slot tray module guid cluster clique state health
 * The file is read at each nvmlInitWithFlags, so that a test may change it.
 *
 * Sizes, offsets and return codes are those of NVML's published interface.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };

struct gpu {
	unsigned minor, major_cc, minor_cc, architecture, slot, tray, module, clique, state, health;
	unsigned long long bytes, guid;
	char uuid[96], pci[32], name[96], serial[17], cluster[33];
};

static struct gpu gpus[MOST];
static unsigned count;
static char driver[80];
static int events;

static int read_table(void)
{
	Dl_info self;
	char path[4096], line[1024];
	if (!dladdr((void *)read_table, &self) || snprintf(path, sizeof path, "%s", self.dli_fname) < 0)
		return 0;
	char *slash = strrchr(path, '/');
	strcpy(slash ? slash + 1 : path, "libnvidia-ml.gpus");
	FILE *table = fopen(path, "r");
	if (!table)
		return 0;
	count = 0;
	if (fgets(line, sizeof line, table))
		sscanf(line, "%79s", driver);
	while (count < MOST && fgets(line, sizeof line, table)) {
		struct gpu *g = &gpus[count];
		if (sscanf(line,
			   "%u\t%95[^\t]\t%31[^\t]\t%95[^\t]\t%llu\t%u\t%u\t%u\t%16[^\t]\t%u\t%u\t%u\t%llx\t%32[^\t]\t%u\t%u\t%u",
			   &g->minor, g->uuid, g->pci, g->name, &g->bytes, &g->major_cc, &g->minor_cc, &g->architecture,
			   g->serial, &g->slot, &g->tray, &g->module, &g->guid, g->cluster, &g->clique, &g->state,
			   &g->health) == 17)
			count++;
	}
	fclose(table);
	return 1;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return read_table() ? SUCCESS : 9; /* driver not loaded */ }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { (void)code; return "the NVML stand-in does not know that"; }

int nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "%s", driver); return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *number) { *number = count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **device)
{
	if (index >= count)
		return INVALID_ARGUMENT;
	*device = &gpus[index];
	return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(struct gpu *g, unsigned char *info)
{
	unsigned domain = 0, bus = 0, device = 0;
	sscanf(g->pci, "%x:%x:%x", &domain, &bus, &device);
	memset(info, 0, 68);
	snprintf((char *)info, 16, "%04x:%02x:%02x.0", domain & 0xffff, bus, device);
	memcpy(info + 16, &domain, 4);
	memcpy(info + 20, &bus, 4);
	memcpy(info + 24, &device, 4);
	snprintf((char *)info + 36, 32, "%08X:%02X:%02X.0", domain, bus, device);
	return SUCCESS;
}

int nvmlDeviceGetName(struct gpu *g, char *text, unsigned length) { snprintf(text, length, "%s", g->name); return SUCCESS; }
int nvmlDeviceGetUUID(struct gpu *g, char *text, unsigned length) { snprintf(text, length, "%s", g->uuid); return SUCCESS; }
int nvmlDeviceGetMinorNumber(struct gpu *g, unsigned *minor) { *minor = g->minor; return SUCCESS; }
int nvmlDeviceGetBrand(struct gpu *g, unsigned *brand) { (void)g; *brand = 14; return SUCCESS; }
int nvmlDeviceGetArchitecture(struct gpu *g, unsigned *kind) { *kind = g->architecture; return SUCCESS; }

int nvmlDeviceGetMemoryInfo(struct gpu *g, unsigned long long *info)
{
	info[0] = info[1] = g->bytes;
	info[2] = 0;
	return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(struct gpu *g, int *major, int *minor)
{
	*major = g->major_cc;
	*minor = g->minor_cc;
	return SUCCESS;
}

int nvmlDeviceGetAddressingMode(struct gpu *g, unsigned *mode) { (void)g; mode[1] = 0; return SUCCESS; }
int nvmlDeviceGetMigMode(struct gpu *g, unsigned *now, unsigned *pending) { (void)g, (void)now, (void)pending; return NOT_SUPPORTED; }

int nvmlDeviceGetFieldValues(struct gpu *g, int number, unsigned char *values)
{
	(void)g;
	for (int i = 0; i < number; i++) { /* no action is wanted of a GPU that is well */
		memset(values + 40 * i + 28, 0, 12);
	}
	return SUCCESS;
}

static void cluster_bytes(const struct gpu *g, unsigned char *to)
{
	for (int i = 0; i < 16; i++) {
		unsigned byte = 0;
		sscanf(g->cluster + 2 * i, "%2x", &byte);
		to[i] = byte;
	}
}

int nvmlDeviceGetGpuFabricInfoV(struct gpu *g, unsigned char *info)
{
	unsigned version, zero = 0;
	memcpy(&version, info, 4);
	cluster_bytes(g, info + 4);
	memcpy(info + 20, &zero, 4);
	memcpy(info + 24, &g->clique, 4);
	memcpy(info + 28, &g->state, 4);
	memcpy(info + 32, &zero, 4);
	if (version >> 24 >= 3)
		info[36] = g->health;
	return SUCCESS;
}

int nvmlDeviceGetPlatformInfo(struct gpu *g, unsigned char *info)
{
	memset(info + 4, 0, 40);
	for (int i = 0; i < 8; i++)
		info[4 + i] = g->guid >> (56 - 8 * i);
	memcpy(info + 20, g->serial, strnlen(g->serial, 16));
	info[36] = g->slot;
	info[37] = g->tray;
	info[40] = g->module;
	return SUCCESS;
}

int nvmlEventSetCreate(void **set) { *set = &events; return SUCCESS; }
int nvmlEventSetFree(void *set) { (void)set; return SUCCESS; }
int nvmlDeviceRegisterEvents(struct gpu *g, unsigned long long kinds, void *set) { (void)g, (void)kinds, (void)set; return SUCCESS; }
int nvmlEventSetWait_v2(void *set, void *event, unsigned milliseconds)
{
	(void)set, (void)event;
	usleep(1000ul * milliseconds);
	return TIMEOUT;
}
