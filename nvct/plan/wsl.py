"""What a container gets on a node in the Windows Subsystem for Linux: /dev/dxg and the driver files of Windows.

There is one device for all GPUs, no control node, nothing of the driver's under /proc, and no capability has files of
its own: the libraries of a driver store load one another, and find each other where they lie on the node.
"""

from __future__ import annotations

from nvct.errors import DriverError
from nvct.model import (
    BINARY,
    LIBRARY,
    Ask,
    CacheEdit,
    DeviceEdit,
    DriverFile,
    Edits,
    Inventory,
    LeftOut,
    MountEdit,
    StaleName,
)
from nvct.plan.accept import Accepted
from nvct.plan.devices import Choice
from nvct.plan.nodes import below
from nvct.plan.words import listed

_READ_ONLY = ("ro", "nosuid", "nodev")
_STORE = "/usr/lib/wsl/drivers"
_LOADER = "_loader.so"
_NOTHING = "there is nothing of the kind in the Windows Subsystem for Linux"


def wsl_edits(inventory: Inventory, accepted: Accepted, capabilities: tuple[str, ...], choice: Choice) -> Edits:
    """Everything that must change in a container that asks for something of ours. Raises DriverError without /dev/dxg.

    The loader cache names the libraries where they are mounted, so there are no links that a new driver would leave
    behind, and nothing of the image is in the way.
    """
    tokens = accepted.devices.tokens if accepted.devices else ()
    # Without an answer of NVML nobody knows the GPUs, but all of them can be given.
    asked = bool(choice.gpus) or ("all" in tokens and not inventory.gpus)
    libraries = [file for file in inventory.files if file.kind == LIBRARY]
    names = _names(libraries)
    return Edits(
        devices=_devices(inventory, choice) if asked else (),
        mounts=_mounts(inventory, capabilities),
        loader_cache=tuple(CacheEdit(name, file.target, 64, _why(file)) for name, file in names.items()),
        left_out=tuple(LeftOut(ask.source, _NOTHING) for ask in _not_here(accepted)),
        env={"NVIDIA_VISIBLE_DEVICES": "void"},
        stale=(StaleName(_STORE, ""), *(StaleName(_parent(file.target), name) for name, file in names.items())),
        warnings=accepted.warnings + _inseparable(inventory, choice),
    )


def _devices(inventory: Inventory, choice: Choice) -> tuple[DeviceEdit, ...]:
    if not inventory.nodes:
        raise DriverError(
            f"no /dev/dxg below {inventory.roots.dev_root}, without which no GPU can be used; update WSL (wsl --update)"
        )
    why = f"the one device of every GPU in WSL; {'; '.join(chosen.why for chosen in choice.gpus) or '`all` asked for'}"
    return tuple(
        DeviceEdit(node.path, below(inventory.roots.dev_root, node.path), node.major, node.minor, why)
        for node in inventory.nodes
    )


def _mounts(inventory: Inventory, capabilities: tuple[str, ...]) -> tuple[MountEdit, ...]:
    """Each file where it lies on the node, and nvidia-smi in the PATH; of several drivers' the newest."""
    mounts: dict[str, MountEdit] = {}
    for file in inventory.files:
        source = below(inventory.roots.root, file.path)
        if file.kind != BINARY:
            mounts.setdefault(file.target, MountEdit(source, file.target, _READ_ONLY, _why(file)))
        elif "utility" in capabilities:
            target = f"/usr/bin/{_name(file.path)}"
            mounts.setdefault(target, MountEdit(source, target, _READ_ONLY, "capability utility"))
    return tuple(mounts.values())


def _why(file: DriverFile) -> str:
    if file.target.startswith(_STORE):
        return "the driver of Windows, whose files load one another"
    return "the way from Linux to the driver of Windows"


def _names(libraries: list[DriverFile]) -> dict[str, DriverFile]:
    """Which library each name means: a file its own name, then a SONAME.

    Of several libraries with one SONAME the loader is meant (libcuda_loader.so is libcuda.so.1): it asks libdxcore
    which driver to load. Of several drivers' the newest, which the inventory lists first.
    """
    names: dict[str, DriverFile] = {}
    for file in libraries:
        names.setdefault(_name(file.target), file)
    for file in sorted(libraries, key=lambda file: not file.path.endswith(_LOADER)):
        if file.soname:
            names.setdefault(file.soname, file)
    if "libcuda.so.1" in names:  # programs that load CUDA at run time ask for the development name
        names.setdefault("libcuda.so", names["libcuda.so.1"])
    return names


def _not_here(accepted: Accepted) -> list[Ask]:
    asked = (accepted.mig_config, accepted.mig_monitor, accepted.imex_channels, *accepted.extras.values())
    return [ask for ask in asked if ask]


def _inseparable(inventory: Inventory, choice: Choice) -> tuple[str, ...]:
    others = [str(gpu.index) for gpu in inventory.gpus if all(gpu.uuid != chosen.gpu.uuid for chosen in choice.gpus)]
    if not choice.gpus or not others:
        return ()
    return (
        f"WSL cannot separate GPUs: /dev/dxg gives the container every GPU of the node, also {listed(others)}, which "
        "it has not asked for",
    )


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
