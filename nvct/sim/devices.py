"""The device nodes of a simulated node: real ones where this user can make and open them, else a table of them.

The majors belong to no driver on this machine, so opening a node answers ENXIO where the device cgroup lets it through.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile
from pathlib import Path

from nvct.model import WSL
from nvct.record import record
from nvct.sim import mig
from nvct.sim.errors import SimError
from nvct.sim.folder import Folder
from nvct.sim.proc_files import DRM_MAJOR, bus_name, drm_names, gpu_major
from nvct.sim.spec import NodeSpec

TABLE = "dev/nodes.json"
CONTROL_MINOR = 255
MODESET_MINOR = 254


@record
class Node:
    """A character device: its path below the node's folder, numbers, and permission bits."""

    path: str
    major: int
    minor: int
    mode: int = 0o666


def nodes_of(spec: NodeSpec, majors: dict[str, int], first_card: int) -> list[Node]:
    if spec.kind == WSL:
        return [Node("dev/dxg", majors["dxg"], 0)]
    gpus, uvm = gpu_major(majors), majors["nvidia-uvm"]
    nodes = [
        Node("dev/nvidiactl", gpus, CONTROL_MINOR),
        Node("dev/nvidia-modeset", gpus, MODESET_MINOR),
        Node("dev/nvidia-uvm", uvm, 0),
        Node("dev/nvidia-uvm-tools", uvm, 1),
    ]
    for index, gpu in enumerate(spec.gpus):
        nodes.append(Node(f"dev/nvidia{gpu.minor}", gpus, gpu.minor))
        card, render = drm_names(first_card + index)
        nodes.append(Node(f"dev/dri/{card}", DRM_MAJOR, first_card + index, 0o660))
        nodes.append(Node(f"dev/dri/{render}", DRM_MAJOR, 128 + first_card + index))
    nodes += _capability_nodes(spec, majors["nvidia-caps"])
    if spec.nvswitches:
        nodes.append(Node("dev/nvidia-nvswitchctl", majors["nvidia-nvswitch"], CONTROL_MINOR))
        nodes += [Node(f"dev/nvidia-nvswitch{n}", majors["nvidia-nvswitch"], n) for n in range(spec.nvswitches)]
    for n in range(spec.imex_channels):
        nodes.append(Node(f"dev/nvidia-caps-imex-channels/channel{n}", majors["nvidia-caps-imex-channels"], n))
    return nodes + _nodes_of_other_drivers(spec, majors)


def _nodes_of_other_drivers(spec: NodeSpec, majors: dict[str, int]) -> list[Node]:
    nodes = [Node(f"dev/nvidia-fs{n}", majors["nvidia-fs"], n) for n in range(spec.gds)]
    nodes += [Node(f"dev/infiniband/uverbs{n}", majors["infiniband_verbs"], 192 + n) for n in range(spec.rdma)]
    nodes += [Node("dev/infiniband/rdma_cm", majors["rdma_cm"], 0)] if spec.rdma else []
    return nodes + ([Node("dev/gdrdrv", majors["gdrdrv"], 0)] if spec.gdrcopy else [])


def _capability_nodes(spec: NodeSpec, major: int) -> list[Node]:
    minors = {mig.CONFIG_MINOR: 0o400, mig.MONITOR_MINOR: 0o444}
    for gpu in spec.gpus:
        for instance in mig.layout(gpu):
            minors[instance.minor] = 0o444
            minors.update((compute.minor, 0o444) for compute in instance.compute)
    return [Node(f"dev/nvidia-caps/nvidia-cap{minor}", major, minor, mode) for minor, mode in minors.items()]


def why_no_nodes(folder: Path) -> str:
    """Why real device nodes cannot be made and opened in `folder`; "" when they can."""
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        probe = Path(inside) / "probe"
        try:
            os.mknod(probe, stat.S_IFCHR | 0o600, os.makedev(195, CONTROL_MINOR))
        except OSError as error:
            return f"mknod: {error.strerror}"
        try:
            os.close(os.open(probe, os.O_RDWR))
        except OSError as error:
            if error.errno != errno.ENXIO:
                return f"device nodes there cannot be opened ({error.strerror}: a device cgroup, or mounted nodev)"
    return ""


def check_majors_free(majors: dict[str, int], taken: dict[int, str]) -> None:
    """Nodes of a major that a driver of this machine owns would give access to real devices."""
    for name, number in majors.items():
        if number in taken:
            raise SimError(
                f"major {number}, asked for as {name}, belongs to {taken[number]} on this machine (/proc/devices): "
                "state another under `majors`, or leave it out to get a free one"
            )


def write_nodes(folder: Folder, nodes: list[Node]) -> None:
    folder.folder("dev/char")  # of links by number, which nobody makes for a driver's nodes
    for node in nodes:
        target = folder.folder(str(Path(node.path).parent)) / Path(node.path).name
        os.mknod(target, stat.S_IFCHR, os.makedev(node.major, node.minor))
        target.chmod(node.mode)  # mknod's own mode is cut down by the umask


def write_table(folder: Folder, nodes: list[Node]) -> None:
    rows = [
        {
            "path": f"/{node.path}",
            "type": "c",
            "major": node.major,
            "minor": node.minor,
            "mode": node.mode,
            "uid": 0,
            "gid": 0,
        }
        for node in nodes
    ]
    folder.file(TABLE, json.dumps(rows, indent=1) + "\n")


def write_drm_links(folder: Folder, spec: NodeSpec, first_card: int) -> None:
    for index, gpu in enumerate(spec.gpus):
        card, render = drm_names(first_card + index)
        where = f"dev/dri/by-path/pci-{bus_name(gpu)}"
        folder.link(f"{where}-card", f"../{card}")
        folder.link(f"{where}-render", f"../{render}")
