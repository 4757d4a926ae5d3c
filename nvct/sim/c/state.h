/* The simulated driver's memory of its node, read from proc/driver/nvct-sim. The format is stated in nvct/sim/state.py. */
#ifndef STATE_H
#define STATE_H

#include <stdbool.h>

enum { MAX_GPUS = 64, MAX_PROFILES = 24, MAX_STARTS = 16, MAX_GPU_INSTANCES = 15, MAX_COMPUTE_INSTANCES = 8 };
enum { TEXT = 96, NO_VALUE = -1 };

struct gpu;
struct nvmlGpuInstance_st;
struct nvmlComputeInstance_st;

/* What a caller holds as nvmlDevice_t: a GPU (`compute` is null) or a MIG device. */
struct nvmlDevice_st {
    struct gpu *gpu;
    struct nvmlComputeInstance_st *compute;
    int index;
};

struct mig_profile {
    unsigned int id, nvml_index, slices, max_instances, size, memory_mib;
    unsigned int multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
    char name[TEXT];
    unsigned int starts[MAX_STARTS], start_count;
};

struct nvmlComputeInstance_st {
    struct nvmlDevice_st device;
    struct nvmlGpuInstance_st *parent;
    unsigned int id, slices, start, minor;
    char uuid[TEXT];
    bool accessible;
};

struct nvmlGpuInstance_st {
    struct gpu *gpu;
    struct mig_profile *profile;
    unsigned int id, start, minor;
    struct nvmlComputeInstance_st compute[MAX_COMPUTE_INSTANCES];
    unsigned int compute_count;
};

struct gpu {
    struct nvmlDevice_st device;
    char uuid[TEXT], bus_id[TEXT], name[TEXT], serial[TEXT];
    unsigned int minor, pci_device, pci_subsystem, brand, architecture, cc_major, cc_minor, mig_slots;
    unsigned int memory_total_mib, memory_reserved_mib, memory_used_mib;
    unsigned int utilization_gpu, utilization_memory;
    /* NO_VALUE where this card has no such thing. */
    int temperature, power_usage_mw, power_limit_mw, clock_sm_mhz, clock_memory_mhz;
    int ecc_current, ecc_pending, mig_current, mig_pending;
    struct mig_profile profiles[MAX_PROFILES];
    unsigned int profile_count;
    struct nvmlGpuInstance_st instances[MAX_GPU_INSTANCES];
    unsigned int instance_count;
};

struct node {
    char root[4096]; /* the folder that holds proc, dev and usr; "" is the root of the file system */
    char driver[TEXT];
    char library[TEXT]; /* the version in this library's own file name, "" when it has none */
    int cuda, init_answer, init_delay_ms;
    unsigned int major_gpu, major_caps, major_dxg, minor_dxg, gpu_total;
    bool wsl;   /* all GPUs are behind /dev/dxg, and none has a node of its own */
    bool nodes; /* device nodes are real and prove access; else access is assumed */
    struct gpu gpus[MAX_GPUS]; /* those that can be opened, in the node's order */
    unsigned int gpu_count;
};

/* Read the node of which this library is a part. False when no ancestor folder of its file has a node's state. */
bool state_read_node(struct node *node);

/* 0 when the control node can be opened, else the errno that says why not. */
int state_open_control(const struct node *node);

/* Read the GPUs and keep those that can be opened, each with its MIG devices. False when a state file cannot be read. */
bool state_read_gpus(struct node *node);

#endif
