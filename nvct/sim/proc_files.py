"""The simulated procfs and sysfs: what the kernel and the driver's module would say, in their own formats."""

from __future__ import annotations

import os
import uuid

from nvct.model import WSL
from nvct.sim import mig
from nvct.sim.folder import Folder
from nvct.sim.spec import GpuSpec, NodeSpec

DRM_MAJOR = 226

# Before this driver the kernel's table of majors calls the GPUs' major by another name.
_RENAMED_IN = (550, 40)

_PARAMS = """\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
KMallocHeapMaxSize: 0
VMallocHeapMaxSize: 0
IgnoreMMIOCheck: 0
EnableStreamMemOPs: 0
EnableUserNUMAManagement: 1
NvLinkDisable: 0
RmProfilingAdminOnly: 1
PreserveVideoMemoryAllocations: 0
EnableS0ixPowerManagement: 0
DynamicPowerManagement: 3
RegisterPCIDriver: 1
EnableResizableBar: 0
EnableGpuFirmware: 18
RegistryDwords: ""
RegistryDwordsPerDevice: ""
RmMsg: ""
GpuBlacklist: ""
TemporaryFilePath: ""
ExcludedGpus: ""
"""


def bus_name(gpu: GpuSpec) -> str:
    """The kernel's form of a bus id: small letters, a domain of four digits."""
    domain, rest = gpu.bus_id.lower().split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def write_proc(folder: Folder, spec: NodeSpec, majors: dict[str, int]) -> None:
    folder.file("proc/devices", _devices(majors))
    # A node that is made again has booted again.
    folder.file("proc/sys/kernel/random/boot_id", f"{uuid.uuid4()}\n")
    if spec.kind == WSL:  # all that is NVIDIA's is in Windows
        folder.file("proc/modules", "")
        return
    nvidia = "proc/driver/nvidia"
    folder.file(f"{nvidia}/version", _version(spec))
    folder.file(f"{nvidia}/params", _PARAMS)
    folder.file(f"{nvidia}/registry", 'Binary: ""\n')
    folder.folder(f"{nvidia}/gpus")
    for index, gpu in enumerate(spec.gpus):
        folder.file(f"{nvidia}/gpus/{bus_name(gpu)}/information", _information(gpu, index, spec.driver))
        folder.file(f"{nvidia}/gpus/{bus_name(gpu)}/registry", 'Binary: ""\n')
    _write_capabilities(folder, spec)
    folder.file("proc/modules", _modules(spec.open_module))


def majors_of(spec: NodeSpec, taken: set[int]) -> dict[str, int]:
    """The character majors of the node's driver, by the names of /proc/devices.

    In WSL there is only that of /dev/dxg, by the name dxg: really a minor of major 10, where on the machine that
    simulates somebody's device could be. Those that the kernel hands out are the highest free ones below 512, past
    `taken`, unless the node states them.
    """
    if spec.kind == WSL:
        return {"dxg": next(number for number in range(511, 383, -1) if number not in taken)}
    version = tuple(int(part) for part in spec.driver.split(".")[:2])
    if version >= _RENAMED_IN:
        majors = {"nvidia": 195, "nvidia-modeset": 195, "nvidiactl": 195}
    else:
        majors = {"nvidia-frontend": 195}
    names = ["nvidia-uvm", "nvidia-caps"]
    names += ["nvidia-nvswitch"] if spec.nvswitches else []
    names += ["nvidia-caps-imex-channels"] if spec.imex_channels else []
    names += ["nvidia-fs"] if spec.gds else []
    # The kernel's own numbers for these two could be devices of the machine that simulates.
    names += ["infiniband_verbs", "rdma_cm"] if spec.rdma else []
    names += ["gdrdrv"] if spec.gdrcopy else []
    used = taken | set(spec.majors.values())
    free = (number for number in range(511, 383, -1) if number not in used)
    return {**majors, **{name: next(free) for name in names}, **spec.majors}


def gpu_major(majors: dict[str, int]) -> int:
    return majors.get("nvidia", majors.get("nvidia-frontend", 195))


def _version(spec: NodeSpec) -> str:
    machine = os.uname().machine
    if spec.open_module:
        module = f"NVIDIA UNIX Open Kernel Module for {machine}  {spec.driver}  Release Build  (builder@node)"
    else:
        module = f"NVIDIA UNIX {machine} Kernel Module  {spec.driver}"
    compiler = "gcc version 12.2.0 (Debian 12.2.0-14)"
    return f"NVRM version: {module}  Tue Apr  8 12:41:17 UTC 2025\nGCC version:  {compiler}\n"


def _information(gpu: GpuSpec, index: int, driver: str) -> str:
    return (
        f"Model: \t\t {gpu.card.model}\n"
        f"IRQ:   \t\t {64 + index}\n"
        f"GPU UUID: \t {gpu.uuid}\n"
        f"Video BIOS: \t 92.00.45.00.{index:02d}\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 47 bits\n"
        "DMA Mask: \t 0x7fffffffffff\n"
        f"Bus Location: \t {bus_name(gpu)}\n"
        f"Device Minor: \t {gpu.minor}\n"
        f"GPU Firmware: \t {driver}\n"
        "GPU Excluded:\t No\n"
    )


def _write_capabilities(folder: Folder, spec: NodeSpec) -> None:
    """The two of the node are there with every card; a GPU has a folder while it is in MIG mode."""
    top = "proc/driver/nvidia/capabilities"
    folder.file(f"{top}/mig/config", _capability(mig.CONFIG_MINOR, 0o400), 0o400)
    folder.file(f"{top}/mig/monitor", _capability(mig.MONITOR_MINOR, 0o444), 0o444)
    for gpu in spec.gpus:
        if gpu.mig is None:
            continue
        of_gpu = folder.folder(f"{top}/gpu{gpu.minor}/mig").relative_to(folder.top)
        for instance in mig.layout(gpu):
            where = f"{of_gpu}/gi{instance.id}"
            folder.file(f"{where}/access", _capability(instance.minor, 0o444), 0o444)
            for compute in instance.compute:
                folder.file(f"{where}/ci{compute.id}/access", _capability(compute.minor, 0o444), 0o444)
    folder.file("proc/driver/nvidia-caps/mig-minors", _mig_minors())


def _capability(minor: int, mode: int) -> str:
    return f"DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n"


def _mig_minors() -> str:
    """The driver's fixed table: 32 GPUs by minor, present or not, with all the instances that could be."""
    lines = [f"config {mig.CONFIG_MINOR}", f"monitor {mig.MONITOR_MINOR}"]
    for gpu in range(32):
        for instance in range(mig.GPU_INSTANCES):
            where = f"gpu{gpu}/gi{instance}"
            lines.append(f"{where}/access {mig.gpu_instance_minor(gpu, instance)}")
            for compute in range(mig.COMPUTE_INSTANCES):
                lines.append(f"{where}/ci{compute}/access {mig.compute_instance_minor(gpu, instance, compute)}")
    return "\n".join(lines) + "\n"


def _devices(majors: dict[str, int]) -> str:
    others = {"mem": 1, "tty": 4, "misc": 10, "drm": 226}
    rows = sorted((number, name) for name, number in {**others, **majors}.items())
    characters = "".join(f"{number:3d} {name}\n" for number, name in rows)
    return f"Character devices:\n{characters}\nBlock devices:\n  7 loop\n259 blkext\n"


def _modules(open_module: bool) -> str:
    mark = "(OE)" if open_module else "(POE)"
    return "".join(
        f"{name} {size} {users} {by} Live 0x0000000000000000 {mark}\n"
        for name, size, users, by in (
            ("nvidia_uvm", 4968448, 0, "-"),
            ("nvidia_drm", 122880, 0, "-"),
            ("nvidia_modeset", 1368064, 1, "nvidia_drm,"),
            ("nvidia", 54104064, 2, "nvidia_uvm,nvidia_modeset,"),
        )
    )


def write_sys(folder: Folder, spec: NodeSpec, first_card: int) -> None:
    """The PCI devices: GPUs, each with its DRM nodes (`first_card` on), and NVSwitches, which are no GPUs."""
    for index, gpu in enumerate(spec.gpus):
        where = f"sys/bus/pci/devices/{bus_name(gpu)}"
        _write_pci(folder, where, gpu.card.pci_device, "0x030200", index % 2)
        for name in drm_names(first_card + index):
            minor = name.removeprefix("card").removeprefix("renderD")
            folder.file(f"{where}/drm/{name}/dev", f"{DRM_MAJOR}:{minor}\n")
    for number in range(spec.nvswitches):
        _write_pci(folder, f"sys/bus/pci/devices/0000:{0xC4 + number:02x}:00.0", 0x1AF1, "0x068000", 0)


def drm_names(card: int) -> tuple[str, str]:
    return f"card{card}", f"renderD{128 + card}"


def _write_pci(folder: Folder, where: str, device: int, pci_class: str, numa_node: int) -> None:
    folder.file(f"{where}/vendor", "0x10de\n")
    folder.file(f"{where}/device", f"0x{device:04x}\n")
    folder.file(f"{where}/class", f"{pci_class}\n")
    folder.file(f"{where}/subsystem_vendor", "0x10de\n")
    folder.file(f"{where}/subsystem_device", "0x1450\n")
    folder.file(f"{where}/numa_node", f"{numa_node}\n")
