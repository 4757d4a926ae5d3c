#define _GNU_SOURCE
#include "state.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { CONTROL_MINOR = 255, LINE = 1024, PATH = 8192 };


static void copy_text(char *target, const char *text)
{
    snprintf(target, TEXT, "%s", text);
}

/* ---- where this library lies, and so which node it belongs to ---- */

static bool has_state(const char *root)
{
    char path[PATH];
    snprintf(path, sizeof path, "%s/proc/driver/nvct-sim/node", root);
    return access(path, R_OK) == 0;
}

static bool find_root(struct node *node)
{
    Dl_info self;
    char path[PATH_MAX];
    if (!dladdr((void *)state_read_node, &self) || !realpath(self.dli_fname, path))
        return false;
    const char *version = strstr(strrchr(path, '/'), ".so.");
    copy_text(node->library, version && strchr(version + 4, '.') ? version + 4 : "");
    while (true) {
        char *slash = strrchr(path, '/');
        if (!slash)
            return false;
        *slash = '\0';
        if (has_state(path)) {
            snprintf(node->root, sizeof node->root, "%s", path);
            return true;
        }
    }
}

/* ---- the state files: a key and the rest of the line ---- */

typedef void (*take_line)(void *into, const char *key, const char *value);

static bool read_lines(const struct node *node, const char *name, take_line take, void *into)
{
    char path[PATH], line[LINE];
    snprintf(path, sizeof path, "%s/proc/driver/nvct-sim/%s", node->root, name);
    FILE *file = fopen(path, "re");
    if (!file)
        return false;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *space = strchr(line, ' ');
        if (!space)
            continue;
        *space = '\0';
        take(into, line, space + 1);
    }
    fclose(file);
    return true;
}

static void take_node_line(void *into, const char *key, const char *value)
{
    struct node *node = into;
    const int number = atoi(value);
    if (!strcmp(key, "driver"))
        copy_text(node->driver, value);
    else if (!strcmp(key, "cuda"))
        node->cuda = number;
    else if (!strcmp(key, "access"))
        node->nodes = !strcmp(value, "nodes");
    else if (!strcmp(key, "major.nvidia"))
        node->major_gpu = number;
    else if (!strcmp(key, "major.nvidia-caps"))
        node->major_caps = number;
    else if (!strcmp(key, "dxg"))
        node->wsl = sscanf(value, "%u %u", &node->major_dxg, &node->minor_dxg) == 2;
    else if (!strcmp(key, "nvml.init"))
        node->init_answer = number;
    else if (!strcmp(key, "nvml.delay_ms"))
        node->init_delay_ms = number;
    else if (!strcmp(key, "gpus"))
        node->gpu_total = number < MAX_GPUS ? number : MAX_GPUS;
}

bool state_read_node(struct node *node)
{
    memset(node, 0, sizeof *node);
    return find_root(node) && read_lines(node, "node", take_node_line, node);
}

static struct nvmlGpuInstance_st *instance_by_id(struct gpu *gpu, unsigned int id)
{
    for (unsigned int i = 0; i < gpu->instance_count; i++)
        if (gpu->instances[i].id == id)
            return &gpu->instances[i];
    return NULL;
}

/* id, index, slices, most instances, size, MiB, multiprocessors, copy, decoders, encoders, jpeg, ofa, name, starts */
static void take_profile(struct gpu *gpu, const char *value)
{
    if (gpu->profile_count == MAX_PROFILES)
        return;
    struct mig_profile *p = &gpu->profiles[gpu->profile_count];
    char starts[LINE];
    if (sscanf(value, "%u %u %u %u %u %u %u %u %u %u %u %u %95s %1023s", &p->id, &p->nvml_index, &p->slices,
               &p->max_instances, &p->size, &p->memory_mib, &p->multiprocessors, &p->copy_engines, &p->decoders,
               &p->encoders, &p->jpeg, &p->ofa, p->name, starts) != 14)
        return;
    for (char *rest = starts, *one; (one = strsep(&rest, ",")) && p->start_count < MAX_STARTS;)
        p->starts[p->start_count++] = atoi(one);
    gpu->profile_count++;
}

static void take_gpu_instance(struct gpu *gpu, const char *value)
{
    if (gpu->instance_count == MAX_GPU_INSTANCES)
        return;
    struct nvmlGpuInstance_st *instance = &gpu->instances[gpu->instance_count];
    unsigned int profile;
    if (sscanf(value, "%u %u %u %u", &instance->id, &profile, &instance->start, &instance->minor) != 4)
        return;
    instance->gpu = gpu;
    for (unsigned int i = 0; i < gpu->profile_count; i++)
        if (gpu->profiles[i].id == profile)
            instance->profile = &gpu->profiles[i];
    if (instance->profile)
        gpu->instance_count++;
}

static void take_compute_instance(struct gpu *gpu, const char *value)
{
    unsigned int parent;
    struct nvmlComputeInstance_st read = {0};
    if (sscanf(value, "%u %u %u %u %u %95s", &parent, &read.id, &read.slices, &read.start, &read.minor, read.uuid) != 6)
        return;
    struct nvmlGpuInstance_st *instance = instance_by_id(gpu, parent);
    if (!instance || instance->compute_count == MAX_COMPUTE_INSTANCES)
        return;
    read.parent = instance;
    instance->compute[instance->compute_count++] = read;
}

static void take_gpu_line(void *into, const char *key, const char *value)
{
    struct gpu *gpu = into;
    const struct {
        const char *key;
        char *target;
    } texts[] = {{"uuid", gpu->uuid}, {"bus_id", gpu->bus_id}, {"name", gpu->name}, {"serial", gpu->serial}};
    const struct {
        const char *key;
        void *target;
    } numbers[] = {
        {"minor", &gpu->minor},
        {"pci_device", &gpu->pci_device},
        {"pci_subsystem", &gpu->pci_subsystem},
        {"brand", &gpu->brand},
        {"architecture", &gpu->architecture},
        {"memory.total_mib", &gpu->memory_total_mib},
        {"memory.reserved_mib", &gpu->memory_reserved_mib},
        {"memory.used_mib", &gpu->memory_used_mib},
        {"utilization.gpu", &gpu->utilization_gpu},
        {"utilization.memory", &gpu->utilization_memory},
        {"temperature.gpu", &gpu->temperature},
        {"power.usage_mw", &gpu->power_usage_mw},
        {"power.limit_mw", &gpu->power_limit_mw},
        {"clock.sm_mhz", &gpu->clock_sm_mhz},
        {"clock.memory_mhz", &gpu->clock_memory_mhz},
        {"ecc.current", &gpu->ecc_current},
        {"ecc.pending", &gpu->ecc_pending},
        {"mig.current", &gpu->mig_current},
        {"mig.pending", &gpu->mig_pending},
        {"mig.slots", &gpu->mig_slots},
    };
    for (unsigned int i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!strcmp(key, texts[i].key))
            copy_text(texts[i].target, value);
    for (unsigned int i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (!strcmp(key, numbers[i].key))
            *(unsigned int *)numbers[i].target = strtoul(value, NULL, 0);
    if (!strcmp(key, "compute_capability"))
        sscanf(value, "%u.%u", &gpu->cc_major, &gpu->cc_minor);
    else if (!strcmp(key, "mig.profile"))
        take_profile(gpu, value);
    else if (!strcmp(key, "mig.gi"))
        take_gpu_instance(gpu, value);
    else if (!strcmp(key, "mig.ci"))
        take_compute_instance(gpu, value);
}

/* ---- access: there is no driver behind the nodes, so ENXIO says that only the driver was missing ---- */

static int try_open(const struct node *node, const char *path, unsigned int major, unsigned int minor, int flags)
{
    struct stat status;
    char full[PATH];
    if (!node->nodes)
        return 0;
    snprintf(full, sizeof full, "%s%s", node->root, path);
    if (stat(full, &status) != 0)
        return errno;
    if (!S_ISCHR(status.st_mode) || status.st_rdev != makedev(major, minor))
        return ENOENT; /* a node of that name for something else is no node of this driver */
    const int file = open(full, flags | O_CLOEXEC);
    if (file < 0)
        return errno == ENXIO ? 0 : errno;
    close(file);
    return 0;
}

int state_open_control(const struct node *node)
{
    if (node->wsl)
        return try_open(node, "/dev/dxg", node->major_dxg, node->minor_dxg, O_RDWR);
    return try_open(node, "/dev/nvidiactl", node->major_gpu, CONTROL_MINOR, O_RDWR);
}

static bool can_open_gpu(const struct node *node, const struct gpu *gpu)
{
    char path[64];
    if (node->wsl) /* whoever has the control node has every GPU */
        return true;
    snprintf(path, sizeof path, "/dev/nvidia%u", gpu->minor);
    return try_open(node, path, node->major_gpu, gpu->minor, O_RDWR) == 0;
}

static bool can_open_capability(const struct node *node, unsigned int minor)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/nvidia-caps/nvidia-cap%u", minor);
    return try_open(node, path, node->major_caps, minor, O_RDONLY) == 0;
}

static void link_mig_devices(const struct node *node, struct gpu *gpu)
{
    int index = 0;
    for (unsigned int i = 0; i < gpu->instance_count; i++) {
        struct nvmlGpuInstance_st *instance = &gpu->instances[i];
        const bool parent = can_open_capability(node, instance->minor);
        for (unsigned int j = 0; j < instance->compute_count; j++) {
            struct nvmlComputeInstance_st *compute = &instance->compute[j];
            compute->accessible = parent && can_open_capability(node, compute->minor);
            compute->device = (struct nvmlDevice_st){gpu, compute, compute->accessible ? index++ : NO_VALUE};
        }
    }
}

bool state_read_gpus(struct node *node)
{
    node->gpu_count = 0;
    for (unsigned int index = 0; index < node->gpu_total; index++) {
        struct gpu *gpu = &node->gpus[node->gpu_count];
        char name[32];
        memset(gpu, 0, sizeof *gpu);
        gpu->temperature = gpu->power_usage_mw = gpu->power_limit_mw = NO_VALUE;
        gpu->clock_sm_mhz = gpu->clock_memory_mhz = NO_VALUE;
        gpu->ecc_current = gpu->ecc_pending = gpu->mig_current = gpu->mig_pending = NO_VALUE;
        snprintf(name, sizeof name, "gpu.%u", index);
        if (!read_lines(node, name, take_gpu_line, gpu))
            return false;
        if (!can_open_gpu(node, gpu))
            continue;
        gpu->device = (struct nvmlDevice_st){gpu, NULL, (int)node->gpu_count++};
        link_mig_devices(node, gpu);
    }
    return true;
}
