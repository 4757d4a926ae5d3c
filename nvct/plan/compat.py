"""CUDA forward compatibility: whether the libraries that an image brings go before the driver's own.

The package cuda-compat holds a newer driver's CUDA for an older kernel module. It works on data-centre GPUs only
(NVIDIA's "CUDA Compatibility", section Forward Compatibility); on others CUDA fails with error 804. Nothing of the
image is mounted: the loader cache names its own files first.
"""

from __future__ import annotations

from nvct import fastjson
from nvct.model import CacheEdit, CompatFolder, ContainerRoot, LeftOut
from nvct.plan.devices import Choice
from nvct.plan.words import quoted
from nvct.settings import COMPAT_DISABLED, Settings

_LIBCUDA = "libcuda.so."

# Of the brands that NVML tells, those of which no GPU is of the supported kinds. Quadro and RTX cards of some certified
# servers are, so there the versions alone decide.
_UNSUPPORTED = ("GeForce", "GeForceRTX", "TITAN", "TitanRTX")


def with_compat(
    cache: tuple[CacheEdit, ...], container: ContainerRoot, driver_version: str, objection: str
) -> tuple[tuple[CacheEdit, ...], tuple[LeftOut, ...]]:
    """The loader cache with the image's libraries in it where they fit, else as it is, and why they do not.

    `objection` is what `compat_objection` says. Without the driver's own CUDA in the cache the container has no use for
    another one.
    """
    folder = container.compat
    if folder is None or not any(edit.name == "libcuda.so.1" for edit in cache):
        return cache, ()
    objection = objection or _misfit(folder, driver_version)
    if objection:
        return cache, (LeftOut(f"CUDA forward compatibility libraries of the image ({folder.path})", objection),)
    why = f"forward compatibility: the image's CUDA is newer than driver {driver_version} and fits it"
    paths = {name: f"{folder.path}/{name}" for name in folder.names}
    for edit in cache:
        if edit.bits == 64 and edit.name not in paths:
            file = _of_same_library(edit.name, folder)
            if file:
                paths[edit.name] = f"{folder.path}/{file}"
    ours = tuple(edit for edit in cache if edit.bits != 64 or edit.name not in paths)
    return (*ours, *(CacheEdit(name, path, 64, why) for name, path in paths.items())), ()


def _of_same_library(name: str, folder: CompatFolder) -> str:
    """The file of the folder that is the library that programs also ask for as `name`; "" when it has none."""
    stem = name.partition(".so")[0] + ".so"
    files = [other for other in folder.names if other == stem or other.startswith(stem + ".")]
    return max(files, key=len, default="")


def compat_objection(choice: Choice, settings: Settings) -> str:
    """Why no image's libraries are used, whichever they are; "" when they may be."""
    if settings.cuda_compat == COMPAT_DISABLED:
        return f"cuda_compat is {COMPAT_DISABLED} in the settings"
    for chosen in choice.gpus:
        if chosen.gpu.brand in _UNSUPPORTED:
            return f"GPU {chosen.gpu.index} is a {chosen.gpu.brand}, and they work on data-centre GPUs only"
    return ""


def _misfit(folder: CompatFolder, driver_version: str) -> str:
    """Why the libraries do not fit the driver; "" when they do."""
    versions = [name[len(_LIBCUDA) :] for name in folder.names if name.startswith(_LIBCUDA) and name.count(".") > 2]
    if len(versions) != 1:
        return f"expected one file libcuda.so.<driver version> there, found {len(versions)}"
    brought, host = _numbers(versions[0]), _numbers(driver_version)
    if not brought or not host:
        unclear = versions[0] if host else driver_version
        return f"{quoted(unclear)} is no driver version, so the two cannot be compared"
    versions_text = f"libcuda there is of driver {versions[0]}, this node has {driver_version}"
    if not folder.note:
        return "" if brought[0] > host[0] else f"{versions_text}: only a later branch is of use"
    branches = _branches(folder.note)
    if branches is None:
        return f"libcuda's note about drivers is not understood: {quoted(folder.note)}"
    if host[0] not in branches:
        return f"libcuda says that it fits the drivers {', '.join(map(str, branches))}, not {host[0]}"
    return "" if brought > host else f"{versions_text}: only a later one is of use"


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    if len(parts) < 2 or not all(part.isascii() and part.isdigit() for part in parts):
        return ()
    numbers = tuple(map(int, parts))
    return numbers if numbers[0] >= 100 else ()  # `libcuda.so.1.1` on integrated GPUs tells nothing


def _branches(note: str) -> tuple[int, ...] | None:
    """The driver branches that the note names, {"Driver": [535, 550], ...}; None when it says nothing of the kind."""
    try:
        value = fastjson.loads(note)
    except (ValueError, RecursionError):
        return None
    listed = value.get("Driver") if isinstance(value, dict) else None
    if not isinstance(listed, list):
        return None
    words = [str(branch) for branch in listed if isinstance(branch, (int, str))]
    return tuple(int(word) for word in words if word.isascii() and word.isdigit())
