"""What a container gets only when it asks for it by name: nodes of other drivers, IMEX channels, MIG control.

Nothing of it without a request: nodes of the network that nobody asked for have made programs choose the wrong one.
"""

from __future__ import annotations

from nvct.errors import DriverError, RequestError
from nvct.model import Ask, DeviceEdit, Inventory, LeftOut
from nvct.plan.accept import Accepted
from nvct.plan.nodes import below
from nvct.record import record

_IMEX_FOLDER = "/dev/nvidia-caps-imex-channels"
_IMEX_MAJOR = "nvidia-caps-imex-channels"

# By name in Inventory.extra_nodes: the nodes, and what makes them.
_MAKERS = {
    "gds": ("/dev/nvidia-fs*", "the module nvidia-fs (modprobe nvidia-fs)"),
    "mofed": ("/dev/infiniband/uverbs* or rdma_cm", "the network card's driver (modprobe ib_uverbs rdma_ucm)"),
    "gdrcopy": ("/dev/gdrdrv", "the module gdrdrv (modprobe gdrdrv)"),
    "nvswitch": ("/dev/nvidia-nvswitch*", "the driver, on machines with NVSwitches"),
}


@record
class Extras:
    """`kinds` are those of which the container gets nodes; `capabilities` are files below the folder of that name."""

    kinds: tuple[str, ...]
    devices: tuple[DeviceEdit, ...]
    capabilities: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


def extras(inventory: Inventory, accepted: Accepted) -> Extras:
    """Carry out what `accepted` asks for besides GPUs.

    A kind of node that this node has none of is left out with a warning. Raises RequestError for an IMEX channel that
    does not exist, DriverError for MIG control with a driver that does not know MIG.
    """
    devices: list[DeviceEdit] = []
    left_out, warnings = [], []
    kinds = tuple(kind for kind in accepted.extras if inventory.extra_nodes.get(kind))
    for kind, ask in accepted.extras.items():
        nodes = inventory.extra_nodes.get(kind, ())
        why = f"{kind}, asked for in {ask.source}"
        devices += [_edit(inventory, node.path, node.major, node.minor, why) for node in nodes]
        if not nodes:
            paths, maker = _MAKERS[kind]
            reason = f"this node has no {paths}, which {maker} makes"
            left_out.append(LeftOut(f"{kind} ({ask.source})", reason))
            warnings.append(f"{ask.source} asks for {kind}, but {reason}")
    if accepted.imex_channels:
        devices += [_channel(inventory, accepted.imex_channels, number) for number in accepted.imex_channels.tokens]
    capabilities = []
    for name, control in (("config", accepted.mig_config), ("monitor", accepted.mig_monitor)):
        if control:
            devices.append(_mig_control(inventory, name, control))
            capabilities.append(f"mig/{name}")
    return Extras(kinds, tuple(devices), tuple(capabilities), tuple(left_out), tuple(warnings))


def _edit(inventory: Inventory, path: str, major: int, minor: int, why: str) -> DeviceEdit:
    return DeviceEdit(path, below(inventory.roots.dev_root, path), major, minor, why)


def _channel(inventory: Inventory, ask: Ask, number: str) -> DeviceEdit:
    path = f"{_IMEX_FOLDER}/channel{number}"
    for node in inventory.extra_nodes.get("imex", ()):
        if node.path == path:
            why = f"IMEX channel {number}, asked for in {ask.source}"
            return _edit(inventory, path, node.major, node.minor, why)
    source = below(inventory.roots.dev_root, path)
    major = inventory.majors.get(_IMEX_MAJOR)
    if major is None:
        hint = f"{inventory.roots.proc_root}/devices has no `{_IMEX_MAJOR}` line: this driver or machine has no IMEX"
    else:
        hint = f"run: mkdir -p {source.rpartition('/')[0]}; mknod -m 666 {source} c {major} {number}"
    raise RequestError(f"channel {number} in {ask.source}: no {source}; {hint}; or do not ask for it")


def _mig_control(inventory: Inventory, name: str, control: Ask) -> DeviceEdit:
    """The node of the capability to configure, or to monitor, MIG: leave to do it on all GPUs of the node."""
    minor, major = inventory.mig_minors.get(name), inventory.majors.get("nvidia-caps")
    if minor is None or major is None:
        raise DriverError(
            f"{control.source} needs the capability mig/{name}, but {inventory.roots.proc_root}/driver/nvidia/"
            f"capabilities/mig/{name} or the `nvidia-caps` line of {inventory.roots.proc_root}/devices is missing; "
            "load the nvidia module of a driver that has MIG"
        )
    why = f"leave to {'configure' if name == 'config' else 'monitor'} MIG, asked for in {control.source}"
    return _edit(inventory, f"/dev/nvidia-caps/nvidia-cap{minor}", major, minor, why)
