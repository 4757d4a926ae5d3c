"""Device nodes for a container, and its view of /proc/driver/nvidia."""

from __future__ import annotations

from nvct.errors import DriverError, RequestError
from nvct.model import DeviceEdit, Inventory, LeftOut, ProcEdit, Request
from nvct.plan.capabilities import library_classes
from nvct.plan.devices import Choice
from nvct.record import record
from nvct.settings import Settings

# Major number of /dev/nvidia*, in the kernel's list of assigned numbers; drivers before 550 call it nvidia-frontend.
_MAJOR = 195
_MODESET = "/dev/nvidia-modeset"
_MODESET_MINOR = 254
_CTL_MINOR = 255
_UVM_MINORS = {"/dev/nvidia-uvm": 0, "/dev/nvidia-uvm-tools": 1}


@record
class Nodes:
    """The device nodes of a plan, and what is to be said about those that are missing."""

    edits: tuple[DeviceEdit, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


def device_nodes(
    inventory: Inventory, request: Request, capabilities: tuple[str, ...], choice: Choice, settings: Settings
) -> Nodes:
    """Control nodes first, then each GPU, then the two capability nodes of each MIG device; each node once.

    Raises DriverError when the node lacks what every container needs, RequestError for `display` without its node.
    """
    edits: list[DeviceEdit] = []
    left_out: list[LeftOut] = []
    warnings: list[str] = []
    for path, why in _wanted_control_nodes(capabilities):
        if path == _MODESET and not settings.parts["modeset"]:
            left_out.append(LeftOut(path, "the part modeset is off in the settings"))
            continue
        edit = _control_node(inventory, path, why)
        if edit is not None:
            edits.append(edit)
            continue
        reason = _missing(inventory, request, path, why)
        left_out.append(LeftOut(path, reason))
        warnings.append(reason)
    edits += [
        _node(inventory, f"/dev/nvidia{chosen.gpu.minor}", _gpu_major(inventory), chosen.gpu.minor, chosen.why)
        for chosen in choice.gpus
    ]
    edits += _capability_nodes(inventory, choice)
    return Nodes(tuple(edits), tuple(left_out), tuple(warnings))


def proc_edit(inventory: Inventory, choice: Choice, controls: tuple[str, ...] = ()) -> ProcEdit:
    """The part of /proc/driver/nvidia that the container may see; `controls` are capability files of the whole node."""
    capabilities = dict.fromkeys(controls)  # as an ordered set: two compute instances can share a GPU instance
    for chosen in choice.mig_devices:
        folder = f"gpu{chosen.gpu.minor}/mig/gi{chosen.device.gi}"
        capabilities[f"{folder}/access"] = None
        capabilities[f"{folder}/ci{chosen.device.ci}/access"] = None
    return ProcEdit(
        source=below(inventory.roots.proc_root, "/driver/nvidia"),
        files=("version", "params", "registry"),
        gpus=tuple(chosen.gpu.proc_name for chosen in choice.gpus),
        capabilities=tuple(capabilities),
        why="the container sees only the GPUs that it may use, and its programs make no device nodes",
    )


def below(root: str, path: str) -> str:
    """The absolute `path` as seen from outside of `root`."""
    return root.rstrip("/") + path


def _wanted_control_nodes(capabilities: tuple[str, ...]) -> list[tuple[str, str]]:
    wanted = [("/dev/nvidiactl", "the control node, which every use of the driver opens first")]
    compute = library_classes(capabilities).get("compute")
    if compute:
        wanted += [(path, f"capability {compute}: CUDA's unified memory") for path in _UVM_MINORS]
    if "display" in capabilities:
        wanted.append((_MODESET, "capability display: setting modes"))
    return wanted


def _control_node(inventory: Inventory, path: str, why: str) -> DeviceEdit | None:
    for node in inventory.nodes:
        if node.path == path:
            return _node(inventory, path, node.major, node.minor, why)
    return None


def _node(inventory: Inventory, path: str, major: int, minor: int, why: str) -> DeviceEdit:
    return DeviceEdit(path=path, source=below(inventory.roots.dev_root, path), major=major, minor=minor, why=why)


def _capability_nodes(inventory: Inventory, choice: Choice) -> list[DeviceEdit]:
    if not choice.mig_devices:
        return []
    major = inventory.majors.get("nvidia-caps")
    if major is None:
        raise DriverError(
            f"{choice.mig_devices[0].why} needs capability nodes, but {inventory.roots.proc_root}/devices has no "
            "`nvidia-caps` line; load the nvidia module of a driver that has it, or turn MIG off"
        )
    edits: dict[int, DeviceEdit] = {}  # by minor: two compute instances can share a GPU instance
    for chosen in choice.mig_devices:
        device = chosen.device
        parts = ((device.gi_minor, f"GPU instance {device.gi}"), (device.ci_minor, f"compute instance {device.ci}"))
        for minor, part in parts:
            path = f"/dev/nvidia-caps/nvidia-cap{minor}"
            edits.setdefault(minor, _node(inventory, path, major, minor, f"{part} of {chosen.why}"))
    return list(edits.values())


def _gpu_major(inventory: Inventory) -> int:
    return inventory.majors.get("nvidia") or inventory.majors.get("nvidia-frontend") or _MAJOR


def _missing(inventory: Inventory, request: Request, path: str, why: str) -> str:
    """A warning about a control node that this node lacks, or the error where nothing works without it."""
    source = below(inventory.roots.dev_root, path)
    if path == "/dev/nvidiactl":
        raise DriverError(
            f"no {source}, without which no GPU can be used; run: {_mknod(inventory, source, _CTL_MINOR)}"
        )
    if path == _MODESET:
        hint = f"load nvidia-modeset and run: {_mknod(inventory, source, _MODESET_MINOR)}"
        asked = request.capabilities
        if asked and "display" in asked.tokens:
            raise RequestError(f"`display` in {asked.source}: this node has no {source}; {hint}; or do not ask for it")
        return f"no {source} ({why}), so it was left out; {hint}"
    major = inventory.majors.get("nvidia-uvm")
    if major is None:
        return f"no {source} ({why}): nvidia-uvm is not loaded, CUDA will not work; run: modprobe nvidia-uvm"
    return f"no {source} ({why}), so it was left out; run: mknod -m 666 {source} c {major} {_UVM_MINORS[path]}"


def _mknod(inventory: Inventory, source: str, minor: int) -> str:
    return f"mknod -m 666 {source} c {_gpu_major(inventory)} {minor}"
