/*
 * A stand-in for NVIDIA's libnvidia-ml.so.1 on nodes without GPUs: the functions that our plugins call, answered from a
 * table beside the library. It is loaded from the node's driver root as the real one is, so that all of our own code runs.
 *
 * Each line of libnvidia-ml.gpus is a GPU, and its fields are separated by tabs:
 *   minor uuid pci name bytes cc-major cc-minor architecture serial slot tray module guid cluster clique state health
 * The file is read at each nvmlInitWithFlags, so that a test may change it, and is open while a session is, as NVIDIA's
 * library has /dev/nvidiactl open.
 *
 * MIG mode and MIG devices are kept in the file libnvidia-ml.mig, in the root's /dev/shm or, where there is none, beside
 * the library, so that they outlive the process and are the same to all processes. The profiles are those of an H100.
 * Capabilities of instances are files below the root's /proc/driver/nvidia/capabilities, as the kernel module shows them;
 * where that cannot be written, they have to be there. While there is a file libnvidia-ml.busy, a program uses every GPU:
 * MIG mode stays, and no instance can be destroyed.
 *
 * Sizes, offsets and return codes are those of NVML's published interface.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define MOST 64
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, IN_USE = 19,
       INSUFFICIENT_RESOURCES = 23, UNKNOWN = 999 };

struct gpu {
	unsigned minor, major_cc, minor_cc, architecture, slot, tray, module, clique, state, health;
	unsigned long long bytes, guid;
	char uuid[96], pci[32], name[96], serial[17], cluster[33];
};

static struct gpu gpus[MOST];
static unsigned count;
static char driver[80];
static int events, sessions, held = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A file beside the library. */
static int beside(char *path, const char *name)
{
	Dl_info self;
	if (!dladdr((void *)beside, &self) || strlen(self.dli_fname) > 3000)
		return 0;
	strcpy(path, self.dli_fname);
	char *slash = strrchr(path, '/');
	strcpy(slash ? slash + 1 : path, name);
	return 1;
}

/* A file that is written. */
static int state_file(char *path, const char *name)
{
	char *lib;
	if (!beside(path, name))
		return 0;
	if ((lib = strstr(path, "/usr/lib/"))) {
		char shared[4096];
		snprintf(shared, sizeof shared, "%.*s/dev/shm", (int)(lib - path), path);
		if (access(shared, W_OK) == 0)
			sprintf(path, "%s/%s", shared, name);
	}
	return 1;
}

static int read_table(void)
{
	char path[4096], line[1024];
	if (!beside(path, "libnvidia-ml.gpus"))
		return 0;
	FILE *table = fopen(path, "re");
	if (!table)
		return 0;
	if (sessions++ == 0)
		held = open(path, O_RDONLY | O_CLOEXEC);
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

int nvmlInitWithFlags(unsigned flags)
{
	(void)flags;
	pthread_mutex_lock(&lock);
	int read = read_table();
	pthread_mutex_unlock(&lock);
	return read ? SUCCESS : 9; /* driver not loaded */
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void)
{
	pthread_mutex_lock(&lock);
	int code = sessions ? SUCCESS : 1; /* uninitialized */
	if (sessions && --sessions == 0)
		close(held);
	pthread_mutex_unlock(&lock);
	return code;
}

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

/* MIG. A GPU instance has one compute instance at most, of all its slices. */

#define INSTANCES 8
enum { FIRST_CAPABILITY = 400 };

struct profile {
	unsigned number, id, slices, size, places, step, multiprocessors, copy, decoders, jpeg, ofa;
	const char *suffix;
};

static const struct profile profiles[] = {
	{ 0, 19, 1, 1, 7, 1, 16, 1, 1, 1, 0, "" },     { 7, 20, 1, 1, 7, 1, 16, 1, 1, 1, 1, "+me" },
	{ 9, 15, 1, 2, 4, 2, 26, 1, 1, 1, 0, "" },     { 1, 14, 2, 2, 3, 2, 32, 2, 2, 2, 0, "" },
	{ 2, 9, 3, 4, 2, 4, 60, 3, 3, 3, 0, "" },      { 3, 5, 4, 4, 1, 4, 64, 4, 4, 4, 0, "" },
	{ 4, 0, 7, 8, 1, 8, 132, 8, 7, 7, 1, "" },
};
#define PROFILES (sizeof profiles / sizeof *profiles)

struct instance { unsigned exists, profile, start, size, compute, serial; };
struct mig { unsigned mode, made; struct instance at[INSTANCES]; };
struct handle { struct gpu *gpu; unsigned id; };

static struct handle instances[MOST][INSTANCES], computes[MOST][INSTANCES], devices[MOST][INSTANCES];

static struct handle *handle_of(struct handle table[MOST][INSTANCES], struct gpu *g, unsigned id)
{
	struct handle *handle = &table[g - gpus][id - 1];
	handle->gpu = g, handle->id = id;
	return handle;
}

/* The state of all GPUs, held until `put`. */
static int take(struct mig *all)
{
	char path[4096];
	int file = state_file(path, "libnvidia-ml.mig") ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644) : -1;
	if (file < 0 || flock(file, LOCK_EX))
		return -1;
	memset(all, 0, MOST * sizeof *all);
	if (pread(file, all, MOST * sizeof *all, 0) < 0)
		memset(all, 0, MOST * sizeof *all);
	return file;
}

static int put(int file, const struct mig *all, int answer)
{
	if (all && pwrite(file, all, MOST * sizeof *all, 0) < 0)
		answer = UNKNOWN;
	close(file);
	return answer;
}

static struct mig read_mig(struct gpu *g)
{
	static __thread struct mig all[MOST];
	int file = take(all);
	if (file >= 0)
		put(file, NULL, SUCCESS);
	return all[g - gpus];
}

static int busy(void)
{
	char path[4096];
	return state_file(path, "libnvidia-ml.busy") && access(path, F_OK) == 0;
}

static const struct profile *profile_of(unsigned id)
{
	for (unsigned i = 0; i < PROFILES; i++)
		if (profiles[i].id == id)
			return &profiles[i];
	return NULL;
}

static unsigned long long megabytes(const struct gpu *g, const struct profile *p) { return (g->bytes >> 20) / 8 * p->size; }

static void profile_name(const struct gpu *g, const struct profile *p, char *text, unsigned length)
{
	unsigned long long gigabytes = (g->bytes * p->size / 8 + (1ull << 29)) >> 30;
	snprintf(text, length, "MIG %ug.%llugb%s", p->slices, gigabytes, p->suffix);
}

static void capability(struct gpu *g, unsigned id, int there)
{
	char path[4096], *lib, *end;
	if (!beside(path, "") || !(lib = strstr(path, "/usr/lib/")))
		return;
	const char *parts[] = { "proc/driver/nvidia/capabilities", NULL, "mig", NULL, NULL };
	char gpu[32], instance[32];
	snprintf(gpu, sizeof gpu, "gpu%u", g->minor);
	snprintf(instance, sizeof instance, "gi%u", id);
	parts[1] = gpu, parts[3] = instance;
	end = lib;
	for (int i = 0; parts[i]; i++) {
		end += sprintf(end, "/%s", parts[i]);
		if (there)
			mkdir(path, 0755);
	}
	for (int compute = 1; compute >= 0; compute--) {
		char file[5000], folder[4200];
		snprintf(folder, sizeof folder, "%s%s", path, compute ? "/ci0" : "");
		snprintf(file, sizeof file, "%s/access", folder);
		if (!there) {
			unlink(file);
			rmdir(folder);
			continue;
		}
		mkdir(folder, 0755);
		FILE *access_file = fopen(file, "w");
		if (access_file) {
			fprintf(access_file, "DeviceFileMinor: %u\nDeviceFileMode: 292\nDeviceFileModify: 1\n",
				FIRST_CAPABILITY + 2 * ((unsigned)(g - gpus) * INSTANCES + id) + compute);
			fclose(access_file);
		}
	}
}

static int is_mig(const void *device) { return device >= (void *)devices && device < (void *)(devices + MOST); }

int nvmlDeviceGetName(void *device, char *text, unsigned length)
{
	if (!is_mig(device))
		return snprintf(text, length, "%s", ((struct gpu *)device)->name), SUCCESS;
	struct handle *h = device;
	char name[96];
	struct mig mig = read_mig(h->gpu);
	profile_name(h->gpu, profile_of(mig.at[h->id - 1].profile), name, sizeof name);
	return snprintf(text, length, "%s %s", h->gpu->name, name), SUCCESS;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length)
{
	if (!is_mig(device))
		return snprintf(text, length, "%s", ((struct gpu *)device)->uuid), SUCCESS;
	struct handle *h = device;
	unsigned serial = read_mig(h->gpu).at[h->id - 1].serial;
	return snprintf(text, length, "MIG-%08x-0000-4000-8000-%012x", (unsigned)(h->gpu - gpus), serial), SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **device)
{
	for (unsigned i = 0; i < count; i++)
		if (strcmp(gpus[i].uuid, uuid) == 0)
			return *device = &gpus[i], SUCCESS;
	return NOT_FOUND;
}

int nvmlDeviceGetVirtualizationMode(struct gpu *g, unsigned *mode) { (void)g; *mode = 0; return SUCCESS; }
int nvmlDeviceGetMaxMigDeviceCount(struct gpu *g, unsigned *number) { (void)g; *number = 7; return SUCCESS; }
int nvmlDeviceGetMigMode(struct gpu *g, unsigned *now, unsigned *pending) { *now = *pending = read_mig(g).mode; return SUCCESS; }

int nvmlDeviceSetMigMode(struct gpu *g, unsigned mode, unsigned *status)
{
	static __thread struct mig all[MOST];
	int file = take(all), answer = file < 0 ? UNKNOWN : SUCCESS;
	if (file < 0)
		return *status = answer;
	struct mig *mig = &all[g - gpus];
	for (int i = 0; i < INSTANCES; i++)
		if (mig->at[i].exists && mode != mig->mode)
			answer = IN_USE;
	if (busy() && mode != mig->mode)
		answer = IN_USE;
	if (answer == SUCCESS)
		mig->mode = mode;
	*status = answer;
	return put(file, all, answer);
}

struct profile_info {
	unsigned version, id, p2p, slices, instances, multiprocessors, copy, decoders, encoders, jpeg, ofa;
	unsigned long long megabytes;
	char name[96];
};

int nvmlDeviceGetGpuInstanceProfileInfoV(struct gpu *g, unsigned number, struct profile_info *info)
{
	for (unsigned i = 0; i < PROFILES; i++) {
		const struct profile *p = &profiles[i];
		if (p->number != number)
			continue;
		unsigned version = info->version;
		*info = (struct profile_info){ version, p->id, 0, p->slices, p->places, p->multiprocessors, p->copy,
					       p->decoders, 0, p->jpeg, p->ofa, megabytes(g, p), "" };
		profile_name(g, p, info->name, sizeof info->name);
		return SUCCESS;
	}
	return NOT_SUPPORTED;
}

struct place { unsigned start, size; };

int nvmlDeviceGetGpuInstancePossiblePlacements_v2(struct gpu *g, unsigned id, struct place *places, unsigned *number)
{
	(void)g;
	const struct profile *p = profile_of(id);
	if (!p)
		return INVALID_ARGUMENT;
	for (unsigned i = 0; places && i < p->places && i < *number; i++)
		places[i] = (struct place){ i * p->step, p->size };
	*number = p->places;
	return SUCCESS;
}

int nvmlDeviceCreateGpuInstanceWithPlacement(struct gpu *g, unsigned id, const struct place *place, struct handle **made)
{
	static __thread struct mig all[MOST];
	const struct profile *p = profile_of(id);
	if (!p || place->size != p->size || place->start % p->step || place->start / p->step >= p->places)
		return INVALID_ARGUMENT;
	int file = take(all);
	if (file < 0)
		return UNKNOWN;
	struct mig *mig = &all[g - gpus];
	if (!mig->mode)
		return put(file, NULL, NOT_SUPPORTED);
	unsigned slices = p->slices, free = INSTANCES;
	for (int i = INSTANCES - 1; i >= 0; i--) {
		const struct instance *at = &mig->at[i];
		if (!at->exists) {
			free = i;
			continue;
		}
		slices += profile_of(at->profile)->slices;
		if (place->start < at->start + at->size && at->start < place->start + place->size)
			return put(file, NULL, INSUFFICIENT_RESOURCES);
	}
	if (slices > 7 || free == INSTANCES)
		return put(file, NULL, INSUFFICIENT_RESOURCES);
	mig->at[free] = (struct instance){ 1, id, place->start, p->size, 0, ++mig->made };
	*made = handle_of(instances, g, free + 1);
	return put(file, all, SUCCESS);
}

static int change(struct handle *h, int (*to)(struct instance *))
{
	static __thread struct mig all[MOST];
	int file = take(all);
	if (file < 0)
		return UNKNOWN;
	struct instance *at = &all[h->gpu - gpus].at[h->id - 1];
	int answer = at->exists ? to(at) : NOT_FOUND;
	return put(file, answer == SUCCESS ? all : NULL, answer);
}

static int remove_instance(struct instance *at)
{
	if (busy() || at->compute)
		return IN_USE;
	at->exists = 0;
	return SUCCESS;
}

static int add_compute(struct instance *at)
{
	if (at->compute)
		return INSUFFICIENT_RESOURCES;
	at->compute = 1;
	return SUCCESS;
}

static int remove_compute(struct instance *at)
{
	if (busy())
		return IN_USE;
	at->compute = 0;
	return SUCCESS;
}

int nvmlGpuInstanceDestroy(struct handle *h) { return change(h, remove_instance); }

int nvmlDeviceGetGpuInstances(struct gpu *g, unsigned id, struct handle **found, unsigned *number)
{
	struct mig mig = read_mig(g);
	if (!mig.mode)
		return NOT_SUPPORTED;
	*number = 0;
	for (unsigned i = 0; i < INSTANCES; i++)
		if (mig.at[i].exists && mig.at[i].profile == id)
			found[(*number)++] = handle_of(instances, g, i + 1);
	return SUCCESS;
}

int nvmlDeviceGetGpuInstanceById(struct gpu *g, unsigned id, struct handle **found)
{
	struct mig mig = read_mig(g);
	if (!mig.mode)
		return NOT_SUPPORTED;
	if (!id || id > INSTANCES || !mig.at[id - 1].exists)
		return NOT_FOUND;
	*found = handle_of(instances, g, id);
	return SUCCESS;
}

struct instance_info { struct gpu *device; unsigned id, profile; struct place place; };

int nvmlGpuInstanceGetInfo(struct handle *h, struct instance_info *info)
{
	struct instance at = read_mig(h->gpu).at[h->id - 1];
	if (!at.exists)
		return NOT_FOUND;
	*info = (struct instance_info){ h->gpu, h->id, at.profile, { at.start, at.size } };
	return SUCCESS;
}

struct compute_profile_info {
	unsigned version, id, slices, instances, multiprocessors, copy, decoders, encoders, jpeg, ofa;
	char name[96];
};

int nvmlGpuInstanceGetComputeInstanceProfileInfoV(struct handle *h, unsigned number, unsigned engine, struct compute_profile_info *info)
{
	static const unsigned slices[] = { 1, 2, 3, 4, 7 };
	const struct profile *p = profile_of(read_mig(h->gpu).at[h->id - 1].profile);
	if (engine || number >= sizeof slices / sizeof *slices || !p || slices[number] > p->slices)
		return NOT_SUPPORTED;
	unsigned version = info->version;
	*info = (struct compute_profile_info){ version, number, slices[number], p->slices / slices[number], p->multiprocessors, p->copy,
					       p->decoders, 0, p->jpeg, p->ofa, "" };
	return SUCCESS;
}

int nvmlGpuInstanceCreateComputeInstance(struct handle *h, unsigned profile, struct handle **made)
{
	(void)profile;
	int answer = change(h, add_compute);
	if (answer == SUCCESS) {
		capability(h->gpu, h->id, 1);
		*made = handle_of(computes, h->gpu, h->id);
	}
	return answer;
}

int nvmlComputeInstanceDestroy(struct handle *h)
{
	int answer = change(h, remove_compute);
	if (answer == SUCCESS)
		capability(h->gpu, h->id, 0);
	return answer;
}

int nvmlGpuInstanceGetComputeInstances(struct handle *h, unsigned profile, struct handle **found, unsigned *number)
{
	static const unsigned slices[] = { 1, 2, 3, 4, 7 };
	struct instance at = read_mig(h->gpu).at[h->id - 1];
	*number = at.compute && slices[profile] == profile_of(at.profile)->slices;
	if (*number)
		*found = handle_of(computes, h->gpu, h->id);
	return SUCCESS;
}

struct compute_info { struct handle *device, *instance; unsigned id, profile; struct place place; };

int nvmlComputeInstanceGetInfo_v2(struct handle *h, struct compute_info *info)
{
	struct instance at = read_mig(h->gpu).at[h->id - 1];
	if (!at.compute)
		return NOT_FOUND;
	*info = (struct compute_info){ handle_of(devices, h->gpu, h->id), handle_of(instances, h->gpu, h->id), 0, 0,
				       { 0, profile_of(at.profile)->slices } };
	return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *g, unsigned index, struct handle **found)
{
	struct mig mig = read_mig(g);
	if (!mig.mode || index >= INSTANCES || !mig.at[index].exists || !mig.at[index].compute)
		return NOT_FOUND;
	*found = handle_of(devices, g, index + 1);
	return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct handle *h, unsigned *id) { *id = h->id; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(struct handle *h, unsigned *id) { (void)h; *id = 0; return SUCCESS; }

struct attributes { unsigned multiprocessors, copy, decoders, encoders, jpeg, ofa, slices, compute; unsigned long long megabytes; };

int nvmlDeviceGetAttributes_v2(struct handle *h, struct attributes *info)
{
	const struct profile *p = profile_of(read_mig(h->gpu).at[h->id - 1].profile);
	*info = (struct attributes){ p->multiprocessors, p->copy, p->decoders, 0, p->jpeg, p->ofa, p->slices, p->slices,
				     megabytes(h->gpu, p) };
	return SUCCESS;
}
