"""The name of a MIG device's profile, from what NVML says of the device."""

from __future__ import annotations

import math

from nvct.node.nvml import MigAnswer


def profile_name(device: MigAnswer, gpu_memory_bytes: int) -> str:
    """The profile, such as `1g.5gb` or `1c.3g.20gb`: the end of the device's NVML name, else its attributes' name.

    NVML names a device `NVIDIA A100-SXM4-40GB MIG 1g.5gb`; drivers that do not still report slices and memory.
    """
    _, separator, profile = device["name"].rpartition(" MIG ")
    if separator and profile:
        return profile
    compute = "" if device["ci_slices"] == device["gi_slices"] else f"{device['ci_slices']}c."
    return f"{compute}{device['gi_slices']}g.{_size_in_name(device['memory_mib'], gpu_memory_bytes)}gb"


def _size_in_name(memory_mib: int, gpu_memory_bytes: int) -> int:
    """Gigabytes as profiles count them: eighths of the GPU's memory, rounded up, and halves of a gigabyte too.

    An A100's smallest instance has 4864 MiB and is called 5gb. Python's round() takes halves to the even number, which
    gives other names than the driver's.
    """
    if not gpu_memory_bytes:
        return math.ceil(memory_mib / 1024)
    eighths = math.ceil(8 * (memory_mib << 20) / gpu_memory_bytes)
    return math.floor(eighths / 8 * math.ceil(gpu_memory_bytes / (1 << 30)) + 0.5)
