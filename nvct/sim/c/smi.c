/* A small nvidia-smi over whatever libnvidia-ml.so.1 the loader finds: -L, a table, --version. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>

static void list_mig_devices(nvmlDevice_t gpu)
{
    unsigned int most = 0;
    char name[96], uuid[96];
    nvmlDevice_t device;
    nvmlDeviceGetMaxMigDeviceCount(gpu, &most);
    for (unsigned int index = 0; index < most; index++) {
        if (nvmlDeviceGetMigDeviceHandleByIndex(gpu, index, &device) != NVML_SUCCESS)
            continue;
        nvmlDeviceGetName(device, name, sizeof name);
        nvmlDeviceGetUUID(device, uuid, sizeof uuid);
        const char *profile = strstr(name, " MIG ");
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", profile ? profile + 5 : name, index, uuid);
    }
}

static void list_gpu(unsigned int index, nvmlDevice_t gpu)
{
    char name[96], uuid[96];
    nvmlDeviceGetName(gpu, name, sizeof name);
    nvmlDeviceGetUUID(gpu, uuid, sizeof uuid);
    printf("GPU %u: %s (UUID: %s)\n", index, name, uuid);
    list_mig_devices(gpu);
}

static void tabulate_gpu(unsigned int index, nvmlDevice_t gpu)
{
    char name[96], busy[16] = "N/A";
    nvmlPciInfo_t pci;
    nvmlMemory_t memory;
    nvmlUtilization_t utilization;
    unsigned int current, pending;
    const char *mig = "N/A";
    nvmlDeviceGetName(gpu, name, sizeof name);
    nvmlDeviceGetPciInfo_v3(gpu, &pci);
    nvmlDeviceGetMemoryInfo(gpu, &memory);
    if (nvmlDeviceGetUtilizationRates(gpu, &utilization) == NVML_SUCCESS)
        snprintf(busy, sizeof busy, "%u%%", utilization.gpu);
    if (nvmlDeviceGetMigMode(gpu, &current, &pending) == NVML_SUCCESS)
        mig = current ? "Enabled" : "Disabled";
    printf("| %3u  %-28s %-17s %6lluMiB / %6lluMiB  %4s  %-8s |\n", index, name, pci.bus_id, memory.used >> 20,
           memory.total >> 20, busy, mig);
}

static const char *version_of_library(char *buffer, unsigned int length)
{
    const char *dot = NULL;
    if (nvmlSystemGetNVMLVersion(buffer, length) == NVML_SUCCESS)
        dot = strchr(buffer, '.'); /* CUDA's major number stands before it */
    return dot ? dot + 1 : "N/A";
}

static void print_table_head(void)
{
    char library[96], driver[96] = "";
    int cuda = 0;
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    nvmlSystemGetCudaDriverVersion(&cuda);
    printf("| NVIDIA-SMI %-18s Driver Version: %-18s CUDA Version: %d.%d\n",
           version_of_library(library, sizeof library), driver, cuda / 1000, cuda % 1000 / 10);
    printf("| GPU  %-28s %-17s %-21s  %4s  %-8s |\n", "Name", "Bus-Id", "         Memory-Usage", "Util", "MIG M.");
}

static int each_gpu(void (*show)(unsigned int, nvmlDevice_t))
{
    unsigned int count = 0;
    nvmlDevice_t gpu;
    nvmlDeviceGetCount_v2(&count);
    if (count == 0) {
        puts("No devices were found");
        return NVML_ERROR_NOT_FOUND;
    }
    if (show == tabulate_gpu)
        print_table_head();
    for (unsigned int index = 0; index < count; index++)
        if (nvmlDeviceGetHandleByIndex_v2(index, &gpu) == NVML_SUCCESS)
            show(index, gpu);
    return 0;
}

static int print_versions(void)
{
    char library[96], driver[96] = "";
    int cuda = 0;
    const char *version = version_of_library(library, sizeof library);
    nvmlSystemGetDriverVersion(driver, sizeof driver);
    nvmlSystemGetCudaDriverVersion(&cuda);
    printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version        : %d.%d\n",
           version, version, driver, cuda / 1000, cuda % 1000 / 10);
    return 0;
}

/* The texts by which people and programs know these failures. */
static int explain(nvmlReturn_t result)
{
    if (result == NVML_ERROR_DRIVER_NOT_LOADED)
        puts("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
             "Make sure that the latest NVIDIA driver is installed and running.\n");
    else
        printf("Failed to initialize NVML: %s\n", nvmlErrorString(result));
    return result < 255 ? result : 255;
}

static int usage(FILE *out, const char *name)
{
    fprintf(out, "usage: %s [-L | --list-gpus | --version | -h | --help]\nThe nvidia-smi of a simulated node.\n", name);
    return out == stdout ? 0 : NVML_ERROR_INVALID_ARGUMENT;
}

int main(int argc, char **argv)
{
    const char *option = argc > 1 ? argv[1] : "";
    const int list = !strcmp(option, "-L") || !strcmp(option, "--list-gpus");
    const int version = !strcmp(option, "--version");
    if (!strcmp(option, "-h") || !strcmp(option, "--help"))
        return usage(stdout, argv[0]);
    if (argc > 2 || (*option && !list && !version))
        return usage(stderr, argv[0]);
    const nvmlReturn_t result = nvmlInit_v2();
    if (result != NVML_SUCCESS)
        return explain(result);
    const int status = version ? print_versions() : each_gpu(list ? list_gpu : tabulate_gpu);
    nvmlShutdown();
    return status;
}
