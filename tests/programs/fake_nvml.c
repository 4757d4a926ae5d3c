/* A libnvidia-ml.so.1 with two GPUs, the second with two MIG devices, for the tests of nvct/node.
 *
 * It is built for one answer: -DINIT=<code of nvmlInit>, -DDELAY_S=<seconds that nvmlInit takes>, -DCRASH, -DGPUS=<0..2>,
 * -DLOST (the first GPU cannot be described), -DNAMELESS (MIG devices have no name, as with old drivers), -DVERSION="...",
 * -DCOUNTER="file" (each nvmlInit adds a byte to it).
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef INIT
#define INIT 0
#endif
#ifndef DELAY_S
#define DELAY_S 0
#endif
#ifndef GPUS
#define GPUS 2
#endif
#ifndef VERSION
#define VERSION "550.54.15"
#endif

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, GPU_IS_LOST = 15 };

struct device {
    const char *uuid, *name, *bus_id;
    unsigned minor, mig, gi, ci;
    uint64_t memory;
};

/* The second GPU's minor is 0, the first's 1: an index is no minor. Its MIG devices are at the places 0 and 2. */
static struct device gpus[] = {
    {"GPU-aaaaaaaa-0000-0000-0000-000000000000", "NVIDIA A100-SXM4-40GB", "00000000:47:00.0", 1, 0, 0, 0, 42505076736},
    {"GPU-bbbbbbbb-0000-0000-0000-000000000001", "NVIDIA A100-SXM4-40GB", "00000000:07:00.0", 0, 1, 0, 0, 42505076736},
};
static struct device migs[] = {
    {"MIG-cccccccc-0000-0000-0000-000000000000", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "", 0, 0, 2, 0, 0},
    {0},
    {"MIG-dddddddd-0000-0000-0000-000000000001", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "", 0, 0, 9, 0, 0},
};

static int copy(char *to, unsigned room, const char *text)
{
    strncpy(to, text, room);
    return SUCCESS;
}

static int init(void)
{
#ifdef COUNTER
    int counter = open(COUNTER, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (counter < 0 || write(counter, "x", 1) != 1)
        return 999;
    close(counter);
#endif
    sleep(DELAY_S);
#ifdef CRASH
    abort();
#endif
    return INIT;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return init(); }
int nvmlInit_v2(void) { return init(); }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "some error"; }
int nvmlSystemGetDriverVersion(char *to, unsigned room) { return copy(to, room, VERSION); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12040; return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device)
{
#ifdef LOST
    if (index == 0)
        return GPU_IS_LOST;
#endif
    *device = &gpus[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(struct device *device, char *to, unsigned room) { return copy(to, room, device->uuid); }
int nvmlDeviceGetMinorNumber(struct device *device, unsigned *minor) { *minor = device->minor; return SUCCESS; }
int nvmlDeviceGetBrand(struct device *device, unsigned *brand) { (void)device; *brand = 14; return SUCCESS; }

int nvmlDeviceGetName(struct device *device, char *to, unsigned room)
{
#ifdef NAMELESS
    if (!*device->bus_id)
        return NOT_SUPPORTED;
#endif
    return copy(to, room, device->name);
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci)
{
    memset(pci, 0, sizeof *pci);
    return copy(pci->bus_id, sizeof pci->bus_id, device->bus_id);
}

int nvmlDeviceGetCudaComputeCapability(struct device *device, int *major, int *minor)
{
    (void)device;
    *major = 8;
    *minor = 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(struct device *device, uint64_t *memory)
{
    memory[0] = device->memory;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *now, unsigned *pending)
{
    if (device != &gpus[1])
        return NOT_SUPPORTED;
    *now = *pending = device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) { (void)device; *count = 3; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *parent, unsigned index, struct device **device)
{
    (void)parent;
    if (!migs[index].uuid)
        return NOT_FOUND;
    *device = &migs[index];
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *id) { *id = device->gi; return SUCCESS; }
int nvmlDeviceGetComputeInstanceId(struct device *device, unsigned *id) { *id = device->ci; return SUCCESS; }

struct attributes {
    unsigned processors, copy, decoder, encoder, jpeg, ofa, gi_slices, ci_slices;
    uint64_t memory_mib;
};

int nvmlDeviceGetAttributes_v2(struct device *device, struct attributes *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->gi_slices = attributes->ci_slices = device == &migs[0] ? 3 : 1;
    attributes->memory_mib = device == &migs[0] ? 19968 : 4864;
    return SUCCESS;
}
