"""Device nodes that are not every container's: those for graphics, and those that a container asks for by name."""

from __future__ import annotations

import os

from nvct.model import DeviceNode
from nvct.node import procfs
from nvct.node.devices import NodeNames, NodeReader, missing_node

# By the name under which a container asks: folder, and name up to the number; a name without any number counts too.
_EXTRA_NODES = {
    "gds": (("/dev", "nvidia-fs"),),
    "mofed": (("/dev/infiniband", "uverbs"), ("/dev/infiniband", "rdma_cm")),
    "gdrcopy": (("/dev", "gdrdrv"),),
    "nvswitch": (("/dev", "nvidia-nvswitchctl"), ("/dev", "nvidia-nvswitch")),
    "imex": (("/dev/nvidia-caps-imex-channels", "channel"),),
}


def extra_nodes(read: NodeReader, names: NodeNames) -> dict[str, tuple[DeviceNode, ...]]:
    """The nodes of each kind that this node has, in the order of their numbers; a kind without any is left out."""
    found = {}
    for kind, places in _EXTRA_NODES.items():
        paths = [path for folder, stem in places for path in _numbered(folder, stem, names(folder))]
        nodes = [node for node in map(read, paths) if node is not None]
        if nodes:
            found[kind] = tuple(DeviceNode(node.path, node.major, node.minor) for node in nodes)
    return found


def _numbered(folder: str, stem: str, names: list[str]) -> list[str]:
    numbers = sorted(int(name[len(stem) :]) for name in names if _is_numbered(name, stem))
    plain = [f"{folder}/{stem}"] if stem in names else []
    return plain + [f"{folder}/{stem}{number}" for number in numbers]


def _is_numbered(name: str, stem: str) -> bool:
    number = name[len(stem) :]
    return name.startswith(stem) and number.isascii() and number.isdigit() and str(int(number)) == number


def mig_minors(proc_root: str) -> dict[str, int]:
    """The capabilities to configure and to monitor MIG on the whole node: name to minor; {} for a driver without."""
    found = {}
    for name in ("config", "monitor"):
        try:
            found[name] = procfs.read_capability_minor(proc_root, f"mig/{name}")
        except OSError:  # absent, or for root alone
            continue
    return found


def drm_nodes(
    sys_root: str, proc_name: str, read: NodeReader, dev_root: str
) -> tuple[tuple[DeviceNode, ...], list[str]]:
    """The nodes of one GPU below /dev/dri, and a sentence for each that should be there and is not.

    `proc_name` is `Gpu.proc_name`, by which sysfs names the GPU, too. Without the module nvidia-drm there are none.
    """
    folder = f"{sys_root}/bus/pci/devices/{proc_name}/drm"
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(("card", "renderD", "controlD")))
    except OSError:
        return (), []
    nodes, missing = [], []
    for name in names:
        path = f"/dev/dri/{name}"
        try:
            major, minor = map(int, procfs.read_text(f"{folder}/{name}/dev").split(":"))
        except (OSError, ValueError) as error:
            missing.append(f"{path} is left out: {folder}/{name}/dev does not tell its numbers ({error})")
            continue
        lack = missing_node(read, path, major, minor, dev_root)
        if lack:
            missing.append(f"{lack} (graphics on GPU {proc_name} need it)")
        else:
            nodes.append(DeviceNode(path, major, minor))
    return tuple(nodes), missing
