"""Device nodes as they are on this host, or as a table describes them.

A table (the setting `device_table`) stands in where the nodes cannot be looked at: on a machine that replays another's
inventory, or where only root could make them. It is JSON, a list of objects with the fields of `Node`, and
`"type": "c"`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable

from nvct.errors import ConfigError
from nvct.model import DeviceNode
from nvct.node.roots import on_host
from nvct.record import record


@record
class ControlNode:
    """A node that is not one GPU's. `owner`: its line of /proc/devices; `purpose`: who needs it."""

    path: str
    owner: str
    minor: int
    purpose: str
    module: str


# The minors are fixed; the majors of all but `nvidia` differ from boot to boot.
CONTROL_NODES = (
    ControlNode("/dev/nvidiactl", "nvidia", 255, "every use of a GPU needs it", "nvidia"),
    ControlNode("/dev/nvidia-uvm", "nvidia-uvm", 0, "CUDA will not work without it", "nvidia-uvm"),
    ControlNode("/dev/nvidia-uvm-tools", "nvidia-uvm", 1, "CUDA's debugger and profiler need it", "nvidia-uvm"),
    ControlNode("/dev/nvidia-modeset", "nvidia", 254, "the capability display needs it", "nvidia-modeset"),
)


@record
class Node:
    """A character device. `path` is below the device root; `mode` are the permission bits."""

    path: str
    major: int
    minor: int
    mode: int
    uid: int
    gid: int


NodeReader = Callable[[str], "Node | None"]
NodeNames = Callable[[str], list[str]]


def node_reader(dev_root: str, device_table: str) -> NodeReader:
    """A function from a path below the device root to the character device there, None when there is none.

    A link is no device, wherever it leads. With a `device_table` (a path, "" for none) that file is asked instead of
    the host; ConfigError when it cannot be understood.
    """
    if device_table:
        return _read_table(device_table).get
    return lambda path: _look_at(dev_root, path)


def node_names(dev_root: str, device_table: str) -> NodeNames:
    """A function from a folder below the device root to the names in it, in no order; none when there is no folder.

    `device_table` as for `node_reader`.
    """
    if device_table:
        paths = list(_read_table(device_table))
        return lambda folder: [path.rpartition("/")[2] for path in paths if path.rpartition("/")[0] == folder]
    return lambda folder: _names_in(on_host(dev_root, folder))


def control_nodes(
    read: NodeReader, majors: dict[str, int], dev_root: str
) -> tuple[tuple[DeviceNode, ...], tuple[str, ...]]:
    """The control nodes that exist with the numbers of the loaded modules, and a sentence for each of the others.

    `majors` are those of /proc/devices.
    """
    nodes, missing = [], []
    for control in CONTROL_NODES:
        major = majors.get(control.owner)
        if major is None:
            missing.append(
                f"{control.path}: {control.module} is not loaded, {control.purpose}: modprobe {control.module}"
            )
            continue
        lack = missing_node(read, control.path, major, control.minor, dev_root)
        if lack:
            missing.append(f"{lack} ({control.purpose})")
        else:
            nodes.append(DeviceNode(control.path, major, control.minor))
    return tuple(nodes), tuple(missing)


def missing_node(read: NodeReader, path: str, major: int, minor: int, dev_root: str) -> str:
    """A sentence about a node that is absent or has other numbers, with the command that mends it; "" when right."""
    node = read(path)
    where = on_host(dev_root, path)
    make = f"mknod -m 666 {where} c {major} {minor}"
    if node is None:
        return f"{where} is absent: {make}"
    if (node.major, node.minor) != (major, minor):
        return f"{where} is {node.major}:{node.minor}, the loaded module has {major}:{minor}: rm {where}; {make}"
    return ""


def _names_in(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _look_at(dev_root: str, path: str) -> Node | None:
    try:
        status = os.lstat(on_host(dev_root, path))
    except OSError:
        return None
    if not stat.S_ISCHR(status.st_mode):
        return None
    major, minor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return Node(path, major, minor, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)


def _read_table(file: str) -> dict[str, Node]:
    try:
        with open(file, encoding="utf-8") as stream:
            rows = json.load(stream)
        nodes = [
            Node(row["path"], row["major"], row["minor"], row["mode"], row["uid"], row["gid"])
            for row in rows
            if row["type"] == "c"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the device table {file} cannot be used ({type(error).__name__}: {error}): "
            'it must be a JSON list of {"path", "type", "major", "minor", "mode", "uid", "gid"}'
        ) from None
    return {node.path: node for node in nodes}
