"""Ask NVML what this node has, and print the answer as JSON: `python -I nvml_probe.py LIBRARY [FOLDER]`.

NVML is always asked in a process of its own: it can crash, hang in the kernel, and it starts threads, after which the
asking process could not enter a container's mount namespace. LIBRARY is the very libnvidia-ml that is asked; FOLDER is
where pynvml is, for an interpreter that does not find it by itself. The answer has the fields of
`nvct.node.nvml.Answer`, or is `{"error": {"code", "text"}}` with an NVML error code.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

_LIBRARY_NOT_FOUND = 12  # NVML_ERROR_LIBRARY_NOT_FOUND


def main(arguments: list[str]) -> None:
    """Print the answer of the library named by the first argument."""
    library, folders = arguments[0], arguments[1:]
    sys.path.extend(folders)
    try:
        # pynvml loads NVML by its SONAME; the loader then takes the library that already has this name.
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        print(json.dumps({"error": {"code": _LIBRARY_NOT_FOUND, "text": str(error)}}))
        return
    import pynvml

    print(json.dumps(ask(pynvml)))


def ask(nvml: Any) -> dict[str, Any]:
    """Everything that discovery needs, of the module pynvml. An error of one GPU is in that GPU's place."""
    try:
        nvml.nvmlInit()
        count = nvml.nvmlDeviceGetCount()
        answer = {
            "driver_version": _text(nvml.nvmlSystemGetDriverVersion()),
            "cuda_version": nvml.nvmlSystemGetCudaDriverVersion(),
        }
    except nvml.NVMLError as error:
        return {"error": _error(error)}
    answer["gpus"] = [_gpu_or_error(nvml, index) for index in range(count)]
    return answer


def _gpu_or_error(nvml: Any, index: int) -> dict[str, Any]:
    try:
        return _gpu(nvml, index)
    except nvml.NVMLError as error:
        return {"index": index, "error": _error(error)}


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    mig_enabled = bool(_optional(nvml, [0], partial(nvml.nvmlDeviceGetMigMode, handle))[0])
    memory = _optional(nvml, None, partial(nvml.nvmlDeviceGetMemoryInfo, handle))  # none where CPU and GPU share it
    return {
        "index": index,
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "minor": _optional(nvml, -1, partial(nvml.nvmlDeviceGetMinorNumber, handle)),  # WSL has no nodes for GPUs
        "bus_id": _text(nvml.nvmlDeviceGetPciInfo(handle).busId),
        "model": _text(nvml.nvmlDeviceGetName(handle)),
        "brand": _optional(nvml, 0, partial(nvml.nvmlDeviceGetBrand, handle)),
        "compute_capability": list(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_bytes": memory.total if memory else 0,
        "mig_enabled": mig_enabled,
        "mig_devices": _mig_devices(nvml, handle) if mig_enabled else [],
    }


def _mig_devices(nvml: Any, parent: Any) -> list[dict[str, Any]]:
    """The MIG devices of one GPU. Indexes are places, and a place can be empty."""
    devices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
        except nvml.NVMLError_NotFound:
            continue
        attributes = nvml.nvmlDeviceGetAttributes(handle)
        devices.append(
            {
                "index": index,
                "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
                "name": _text(_optional(nvml, "", partial(nvml.nvmlDeviceGetName, handle))),
                "gi": nvml.nvmlDeviceGetGpuInstanceId(handle),
                "ci": nvml.nvmlDeviceGetComputeInstanceId(handle),
                "gi_slices": attributes.gpuInstanceSliceCount,
                "ci_slices": attributes.computeInstanceSliceCount,
                "memory_mib": attributes.memorySizeMB,
            }
        )
    return devices


def _optional(nvml: Any, default: Any, call: Callable[[], Any]) -> Any:
    """What the call returns, or the default where this GPU or this driver does not know the question."""
    try:
        return call()
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return default


def _error(error: Any) -> dict[str, Any]:
    return {"code": error.value, "text": str(error)}


def _text(value: str | bytes) -> str:
    """pynvml gives bytes or str, by its version."""
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main(sys.argv[1:])
