/* A libnvidia-ml.so.1 whose GPUs are text files. What it lists is what can be opened: see state.c. */
#define _GNU_SOURCE
#include "nvml.h"
#include "state.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define API __attribute__((visibility("default"))) nvmlReturn_t
#define REQUIRE(condition, error)                                                                                      \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            return error;                                                                                              \
    } while (0)
#define REQUIRE_READY(condition)                                                                                       \
    do {                                                                                                               \
        REQUIRE(users > 0, NVML_ERROR_UNINITIALIZED);                                                                  \
        REQUIRE(condition, NVML_ERROR_INVALID_ARGUMENT);                                                               \
    } while (0)

static const unsigned long long MIB = 1024 * 1024;

static struct node node;
static unsigned int users; /* initialisations that were not shut down yet */
static pthread_mutex_t initialising = PTHREAD_MUTEX_INITIALIZER;

static bool is_gpu(nvmlDevice_t device)
{
    return device && !device->compute;
}

static bool is_mig(nvmlDevice_t device)
{
    return device && device->compute;
}

static nvmlReturn_t put_text(char *target, unsigned int length, const char *text)
{
    REQUIRE(target, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(strlen(text) < length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(target, text);
    return NVML_SUCCESS;
}

static nvmlReturn_t put_number(int value, unsigned int *target)
{
    REQUIRE(target, NVML_ERROR_INVALID_ARGUMENT);
    REQUIRE(value != NO_VALUE, NVML_ERROR_NOT_SUPPORTED);
    *target = value;
    return NVML_SUCCESS;
}

/* ---- initialisation ---- */

static nvmlReturn_t answer_of(int error)
{
    switch (error) {
    case 0:
        return NVML_SUCCESS;
    case ENOENT:
        return NVML_ERROR_DRIVER_NOT_LOADED;
    case EACCES:
        return NVML_ERROR_NO_PERMISSION;
    default: /* EPERM: the device cgroup denies, which the real library does not understand either */
        return NVML_ERROR_UNKNOWN;
    }
}

static nvmlReturn_t initialise(void)
{
    REQUIRE(state_read_node(&node), NVML_ERROR_DRIVER_NOT_LOADED);
    const struct timespec delay = {node.init_delay_ms / 1000, node.init_delay_ms % 1000 * 1000000L};
    nanosleep(&delay, NULL);
    REQUIRE(node.init_answer == NVML_SUCCESS, node.init_answer);
    const nvmlReturn_t access = answer_of(state_open_control(&node));
    REQUIRE(access == NVML_SUCCESS, access);
    const bool same = !*node.library || !strcmp(node.library, node.driver);
    REQUIRE(same, NVML_ERROR_LIB_RM_VERSION_MISMATCH);
    REQUIRE(state_read_gpus(&node), NVML_ERROR_UNKNOWN);
    return NVML_SUCCESS;
}

API nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    pthread_mutex_lock(&initialising);
    const nvmlReturn_t result = users ? NVML_SUCCESS : initialise();
    users += result == NVML_SUCCESS;
    pthread_mutex_unlock(&initialising);
    return result;
}

API nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlShutdown(void)
{
    pthread_mutex_lock(&initialising);
    const nvmlReturn_t result = users ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    users -= users > 0;
    pthread_mutex_unlock(&initialising);
    return result;
}

__attribute__((visibility("default"))) const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS:
        return "Success";
    case NVML_ERROR_UNINITIALIZED:
        return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT:
        return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED:
        return "Not Supported";
    case NVML_ERROR_NO_PERMISSION:
        return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND:
        return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE:
        return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED:
        return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT:
        return "Timeout";
    case NVML_ERROR_GPU_IS_LOST:
        return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        return "Driver/library version mismatch";
    case NVML_ERROR_IN_USE:
        return "In use by another client";
    case NVML_ERROR_MEMORY:
        return "Insufficient Memory";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH:
        return "Argument version mismatch";
    default:
        return "Unknown Error";
    }
}

/* ---- the system ---- */

API nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    REQUIRE(users, NVML_ERROR_UNINITIALIZED);
    return put_text(version, length, node.driver);
}

/* CUDA's major number before the library's version. Answers without initialisation, as the real one does. */
API nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    static struct node self;
    char text[2 * TEXT];
    REQUIRE(state_read_node(&self), NVML_ERROR_UNKNOWN);
    snprintf(text, sizeof text, "%d.%s", self.cuda / 1000, *self.library ? self.library : self.driver);
    return put_text(version, length, text);
}

API nvmlSystemGetCudaDriverVersion(int *version)
{
    REQUIRE_READY(version);
    *version = node.cuda;
    return NVML_SUCCESS;
}

API nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

/* ---- finding devices ---- */

API nvmlDeviceGetCount_v2(unsigned int *count)
{
    REQUIRE_READY(count);
    *count = node.gpu_count;
    return NVML_SUCCESS;
}

API nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

API nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    REQUIRE_READY(device && index < node.gpu_count);
    *device = &node.gpus[index].device;
    return NVML_SUCCESS;
}

API nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlDevice_t find_mig_device(struct gpu *gpu, bool (*matches)(const struct nvmlComputeInstance_st *, const void *),
                                    const void *wanted)
{
    for (unsigned int i = 0; i < gpu->instance_count; i++)
        for (unsigned int j = 0; j < gpu->instances[i].compute_count; j++) {
            struct nvmlComputeInstance_st *compute = &gpu->instances[i].compute[j];
            if (compute->accessible && matches(compute, wanted))
                return &compute->device;
        }
    return NULL;
}

static bool has_uuid(const struct nvmlComputeInstance_st *compute, const void *uuid)
{
    return !strcasecmp(compute->uuid, uuid);
}

static bool has_index(const struct nvmlComputeInstance_st *compute, const void *index)
{
    return compute->device.index == *(const int *)index;
}

API nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    REQUIRE_READY(uuid && device);
    for (unsigned int i = 0; i < node.gpu_count; i++) {
        struct gpu *gpu = &node.gpus[i];
        *device = strcasecmp(gpu->uuid, uuid) ? find_mig_device(gpu, has_uuid, uuid) : &gpu->device;
        if (*device)
            return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

struct address {
    unsigned int domain, bus, device;
};

static bool parse_bus_id(const char *text, struct address *address)
{
    char rest;
    if (sscanf(text, "%x:%x:%x.0%c", &address->domain, &address->bus, &address->device, &rest) == 3)
        return true;
    address->domain = 0;
    return sscanf(text, "%x:%x.0%c", &address->bus, &address->device, &rest) == 2;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    struct address wanted, have;
    REQUIRE_READY(bus_id && device && parse_bus_id(bus_id, &wanted));
    for (unsigned int i = 0; i < node.gpu_count; i++) {
        parse_bus_id(node.gpus[i].bus_id, &have);
        if (have.domain == wanted.domain && have.bus == wanted.bus && have.device == wanted.device) {
            *device = &node.gpus[i].device;
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

/* ---- what a device is ---- */

static void mig_name(const struct nvmlComputeInstance_st *compute, char *name, size_t length)
{
    const struct mig_profile *profile = compute->parent->profile;
    if (compute->slices == profile->slices)
        snprintf(name, length, "%s", profile->name);
    else
        snprintf(name, length, "%uc.%s", compute->slices, profile->name);
}

API nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    REQUIRE_READY(device);
    char mig[2 * TEXT], full[4 * TEXT];
    if (is_gpu(device))
        return put_text(name, length, device->gpu->name);
    mig_name(device->compute, mig, sizeof mig);
    snprintf(full, sizeof full, "%s MIG %s", device->gpu->name, mig);
    return put_text(name, length, full);
}

API nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    REQUIRE_READY(device);
    return put_text(uuid, length, is_mig(device) ? device->compute->uuid : device->gpu->uuid);
}

API nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    REQUIRE_READY(device);
    return put_number(device->index, index);
}

API nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    REQUIRE_READY(device);
    return put_number(is_gpu(device) && !node.wsl ? (int)device->gpu->minor : NO_VALUE, minor);
}

API nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *brand)
{
    REQUIRE_READY(device);
    return put_number(device->gpu->brand, brand);
}

API nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture)
{
    REQUIRE_READY(device);
    return put_number(device->gpu->architecture, architecture);
}

API nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    REQUIRE_READY(is_gpu(device));
    REQUIRE(*device->gpu->serial, NVML_ERROR_NOT_SUPPORTED);
    return put_text(serial, length, device->gpu->serial);
}

API nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    REQUIRE_READY(device && major && minor);
    *major = device->gpu->cc_major;
    *minor = device->gpu->cc_minor;
    return NVML_SUCCESS;
}

API nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    struct address address;
    REQUIRE_READY(device && pci);
    REQUIRE(is_gpu(device), NVML_ERROR_NOT_SUPPORTED);
    parse_bus_id(device->gpu->bus_id, &address);
    memset(pci, 0, sizeof *pci);
    pci->domain = address.domain;
    pci->bus = address.bus;
    pci->device = address.device;
    pci->pci_device_id = device->gpu->pci_device;
    pci->pci_subsystem_id = device->gpu->pci_subsystem;
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", address.domain, address.bus, address.device);
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", address.domain & 0xffff,
             address.bus & 0xff, address.device & 0xff);
    return NVML_SUCCESS;
}

API nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    nvmlPciInfo_t full;
    REQUIRE_READY(pci);
    const nvmlReturn_t result = nvmlDeviceGetPciInfo_v3(device, &full);
    REQUIRE(result == NVML_SUCCESS, result);
    memset(pci, 0, sizeof *pci);
    memcpy(pci, &full, offsetof(nvmlPciInfo_v2_t, reserved)); /* both begin alike */
    return NVML_SUCCESS;
}

/* ---- what a device does ---- */

static unsigned int total_mib(nvmlDevice_t device)
{
    return is_mig(device) ? device->compute->parent->profile->memory_mib : device->gpu->memory_total_mib;
}

API nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    REQUIRE_READY(device && memory);
    REQUIRE(memory->version == NVML_VERSION_OF(nvmlMemory_v2_t, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    const bool whole = is_gpu(device);
    memory->total = total_mib(device) * MIB;
    memory->reserved = whole ? device->gpu->memory_reserved_mib * MIB : 0;
    memory->used = whole ? device->gpu->memory_used_mib * MIB : 0;
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

API nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlMemory_v2_t full = {.version = NVML_VERSION_OF(nvmlMemory_v2_t, 2)};
    REQUIRE_READY(memory);
    const nvmlReturn_t result = nvmlDeviceGetMemoryInfo_v2(device, &full);
    REQUIRE(result == NVML_SUCCESS, result);
    *memory = (nvmlMemory_t){full.total, full.free, full.used + full.reserved};
    return NVML_SUCCESS;
}

API nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    REQUIRE_READY(device && utilization);
    /* The real library has no figures for a GPU in MIG mode, nor for a MIG device. */
    REQUIRE(is_gpu(device) && device->gpu->mig_current != 1, NVML_ERROR_NOT_SUPPORTED);
    *utilization = (nvmlUtilization_t){device->gpu->utilization_gpu, device->gpu->utilization_memory};
    return NVML_SUCCESS;
}

API nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *degrees)
{
    REQUIRE_READY(device && sensor == 0);
    return put_number(is_gpu(device) ? device->gpu->temperature : NO_VALUE, degrees);
}

API nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts)
{
    REQUIRE_READY(device);
    return put_number(is_gpu(device) ? device->gpu->power_usage_mw : NO_VALUE, milliwatts);
}

API nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts)
{
    REQUIRE_READY(device);
    return put_number(is_gpu(device) ? device->gpu->power_limit_mw : NO_VALUE, milliwatts);
}

API nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz)
{
    REQUIRE_READY(device);
    REQUIRE(is_gpu(device), NVML_ERROR_NOT_SUPPORTED);
    return put_number(type == 1 ? device->gpu->clock_sm_mhz : type == 2 ? device->gpu->clock_memory_mhz : NO_VALUE, mhz);
}

API nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    REQUIRE_READY(is_gpu(device));
    const nvmlReturn_t result = put_number(device->gpu->ecc_current, current);
    return result == NVML_SUCCESS ? put_number(device->gpu->ecc_pending, pending) : result;
}

/* ---- MIG: devices ---- */

API nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    REQUIRE_READY(is_gpu(device));
    const nvmlReturn_t result = put_number(device->gpu->mig_current, current);
    return result == NVML_SUCCESS ? put_number(device->gpu->mig_pending, pending) : result;
}

API nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    REQUIRE_READY(is_gpu(device) && count);
    *count = 0;
    for (unsigned int i = 0; i < device->gpu->profile_count; i++)
        if (device->gpu->profiles[i].max_instances > *count)
            *count = device->gpu->profiles[i].max_instances;
    return NVML_SUCCESS;
}

API nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig_device)
{
    REQUIRE_READY(is_gpu(device) && mig_device);
    REQUIRE(device->gpu->mig_current != NO_VALUE, NVML_ERROR_NOT_SUPPORTED);
    *mig_device = find_mig_device(device->gpu, has_index, &index);
    return *mig_device ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig_device, nvmlDevice_t *device)
{
    REQUIRE_READY(is_mig(mig_device) && device);
    *device = &mig_device->gpu->device;
    return NVML_SUCCESS;
}

API nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *answer)
{
    REQUIRE_READY(device && answer);
    *answer = is_mig(device);
    return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    REQUIRE_READY(device && id);
    REQUIRE(is_mig(device), NVML_ERROR_NOT_SUPPORTED);
    *id = device->compute->parent->id;
    return NVML_SUCCESS;
}

API nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    REQUIRE_READY(device && id);
    REQUIRE(is_mig(device), NVML_ERROR_NOT_SUPPORTED);
    *id = device->compute->id;
    return NVML_SUCCESS;
}

API nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    REQUIRE_READY(device && attributes);
    REQUIRE(is_mig(device), NVML_ERROR_NOT_SUPPORTED);
    const struct mig_profile *p = device->compute->parent->profile;
    const unsigned int slices = device->compute->slices;
    *attributes = (nvmlDeviceAttributes_t){p->multiprocessors * slices / p->slices,
                                           p->copy_engines,
                                           p->decoders,
                                           p->encoders,
                                           p->jpeg,
                                           p->ofa,
                                           p->slices,
                                           slices,
                                           p->memory_mib};
    return NVML_SUCCESS;
}

/* ---- MIG: GPU instances ---- */

static const struct mig_profile *profile_by_index(const struct gpu *gpu, unsigned int index)
{
    for (unsigned int i = 0; i < gpu->profile_count; i++)
        if (gpu->profiles[i].nvml_index == index)
            return &gpu->profiles[i];
    return NULL;
}

static const struct mig_profile *profile_by_id(const struct gpu *gpu, unsigned int id)
{
    for (unsigned int i = 0; i < gpu->profile_count; i++)
        if (gpu->profiles[i].id == id)
            return &gpu->profiles[i];
    return NULL;
}

static nvmlReturn_t put_profile(const struct mig_profile *p, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    REQUIRE(info->version == NVML_VERSION_OF(nvmlGpuInstanceProfileInfo_v2_t, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    *info = (nvmlGpuInstanceProfileInfo_v2_t){
        info->version, p->id,       0,       p->slices, p->max_instances, p->multiprocessors, p->copy_engines,
        p->decoders,   p->encoders, p->jpeg, p->ofa,    p->memory_mib,    ""};
    snprintf(info->name, sizeof info->name, "MIG %.90s", p->name);
    return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int index, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    REQUIRE_READY(is_gpu(device) && info);
    const struct mig_profile *profile = profile_by_index(device->gpu, index);
    return profile ? put_profile(profile, info) : NVML_ERROR_NOT_SUPPORTED;
}

API nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id,
                                             nvmlGpuInstanceProfileInfo_v2_t *info)
{
    REQUIRE_READY(is_gpu(device) && info);
    const struct mig_profile *profile = profile_by_id(device->gpu, id);
    return profile ? put_profile(profile, info) : NVML_ERROR_NOT_SUPPORTED;
}

API nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int index, nvmlGpuInstanceProfileInfo_t *info)
{
    nvmlGpuInstanceProfileInfo_v2_t full = {.version = NVML_VERSION_OF(nvmlGpuInstanceProfileInfo_v2_t, 2)};
    REQUIRE_READY(info);
    const nvmlReturn_t result = nvmlDeviceGetGpuInstanceProfileInfoV(device, index, &full);
    REQUIRE(result == NVML_SUCCESS, result);
    *info = (nvmlGpuInstanceProfileInfo_t){full.id,           full.p2p,      full.slices,   full.instances,
                                           full.multiprocessors, full.copy_engines, full.decoders, full.encoders,
                                           full.jpeg,         full.ofa,      full.memory_mib};
    return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int profile_id,
                                                  nvmlPlacement_t *placements, unsigned int *count)
{
    REQUIRE_READY(is_gpu(device) && count);
    const struct mig_profile *profile = profile_by_id(device->gpu, profile_id);
    REQUIRE(profile, NVML_ERROR_NOT_SUPPORTED);
    const unsigned int room = *count;
    *count = profile->start_count;
    REQUIRE(placements, NVML_SUCCESS);
    REQUIRE(room >= profile->start_count, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned int i = 0; i < profile->start_count; i++)
        placements[i] = (nvmlPlacement_t){profile->starts[i], profile->size};
    return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int profile_id, unsigned int *count)
{
    bool taken[64] = {false};
    unsigned int same = 0;
    REQUIRE_READY(is_gpu(device) && count);
    const struct mig_profile *profile = profile_by_id(device->gpu, profile_id);
    REQUIRE(profile, NVML_ERROR_NOT_SUPPORTED);
    for (unsigned int i = 0; i < device->gpu->instance_count; i++) {
        const struct nvmlGpuInstance_st *instance = &device->gpu->instances[i];
        same += instance->profile == profile;
        for (unsigned int slot = 0; slot < instance->profile->size; slot++)
            taken[(instance->start + slot) % 64] = true;
    }
    *count = 0;
    for (unsigned int i = 0; i < profile->start_count; i++) {
        bool free = true;
        for (unsigned int slot = 0; slot < profile->size; slot++)
            free = free && !taken[(profile->starts[i] + slot) % 64];
        *count += free;
    }
    const unsigned int most = profile->max_instances > same ? profile->max_instances - same : 0;
    *count = *count < most ? *count : most;
    return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profile_id, nvmlGpuInstance_t *instances,
                              unsigned int *count)
{
    REQUIRE_READY(is_gpu(device) && instances && count);
    REQUIRE(profile_by_id(device->gpu, profile_id), NVML_ERROR_NOT_SUPPORTED);
    *count = 0;
    for (unsigned int i = 0; i < device->gpu->instance_count; i++)
        if (device->gpu->instances[i].profile->id == profile_id)
            instances[(*count)++] = &device->gpu->instances[i];
    return NVML_SUCCESS;
}

API nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *found)
{
    REQUIRE_READY(is_gpu(device) && found);
    for (unsigned int i = 0; i < device->gpu->instance_count; i++)
        if (device->gpu->instances[i].id == id) {
            *found = &device->gpu->instances[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    REQUIRE_READY(instance && info);
    *info = (nvmlGpuInstanceInfo_t){&instance->gpu->device,
                                    instance->id,
                                    instance->profile->id,
                                    {instance->start, instance->profile->size}};
    return NVML_SUCCESS;
}

/* ---- MIG: compute instances. A profile's id equals its index: 1, 2, 3, 4, 7, 8, 6 slices. ---- */

static const unsigned int COMPUTE_SLICES[] = {1, 2, 3, 4, 7, 8, 6};
enum { COMPUTE_PROFILES = sizeof COMPUTE_SLICES / sizeof *COMPUTE_SLICES };

static unsigned int compute_profile(unsigned int slices)
{
    unsigned int index = 0;
    while (index < COMPUTE_PROFILES - 1 && COMPUTE_SLICES[index] != slices)
        index++;
    return index;
}

API nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t handle, unsigned int index, unsigned int engine,
                                                  nvmlComputeInstanceProfileInfo_v2_t *info)
{
    REQUIRE_READY(handle && info);
    const struct mig_profile *p = handle->profile;
    REQUIRE(info->version == NVML_VERSION_OF(nvmlComputeInstanceProfileInfo_v2_t, 2),
            NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    REQUIRE(engine == 0 && index < COMPUTE_PROFILES && COMPUTE_SLICES[index] <= p->slices, NVML_ERROR_NOT_SUPPORTED);
    const unsigned int slices = COMPUTE_SLICES[index];
    *info = (nvmlComputeInstanceProfileInfo_v2_t){info->version,
                                                  index,
                                                  slices,
                                                  p->slices / slices,
                                                  p->multiprocessors * slices / p->slices,
                                                  p->copy_engines,
                                                  p->decoders,
                                                  p->encoders,
                                                  p->jpeg,
                                                  p->ofa,
                                                  ""};
    if (slices == p->slices)
        snprintf(info->name, sizeof info->name, "MIG %.90s", p->name);
    else
        snprintf(info->name, sizeof info->name, "MIG %uc.%.80s", slices, p->name);
    return NVML_SUCCESS;
}

API nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t handle, unsigned int index, unsigned int engine,
                                                 nvmlComputeInstanceProfileInfo_t *info)
{
    nvmlComputeInstanceProfileInfo_v2_t full = {.version = NVML_VERSION_OF(nvmlComputeInstanceProfileInfo_v2_t, 2)};
    REQUIRE_READY(info);
    const nvmlReturn_t result = nvmlGpuInstanceGetComputeInstanceProfileInfoV(handle, index, engine, &full);
    REQUIRE(result == NVML_SUCCESS, result);
    memcpy(info, &full.id, sizeof *info); /* the newer structure is a version, then the older one, then a name */
    return NVML_SUCCESS;
}

API nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int profile_id,
                                       nvmlComputeInstance_t *instances, unsigned int *count)
{
    REQUIRE_READY(instance && instances && count);
        *count = 0;
    for (unsigned int i = 0; i < instance->compute_count; i++)
        if (compute_profile(instance->compute[i].slices) == profile_id)
            instances[(*count)++] = &instance->compute[i];
    return NVML_SUCCESS;
}

API nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int id, nvmlComputeInstance_t *found)
{
    REQUIRE_READY(instance && found);
        for (unsigned int i = 0; i < instance->compute_count; i++)
        if (instance->compute[i].id == id) {
            *found = &instance->compute[i];
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_FOUND;
}

API nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info)
{
    REQUIRE_READY(compute && info);
    *info = (nvmlComputeInstanceInfo_t){&compute->parent->gpu->device,
                                        compute->parent,
                                        compute->id,
                                        compute_profile(compute->slices),
                                        {compute->start, compute->slices}};
    return NVML_SUCCESS;
}
