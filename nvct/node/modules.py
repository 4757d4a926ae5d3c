"""Kernel modules of the driver that are not loaded, and device nodes that do not exist yet: loaded and made.

On most machines nobody loads nvidia-uvm before the first CUDA program, and nodes of new MIG instances are made by the
first program that wants them; a container can do neither. So both are done here, before a node is discovered, where
the settings allow it. Never on the hook's hot path, never in a user namespace (whose root makes no nodes), and never
where a device table stands in for nodes. What is not done here, discovery reports with the command that does it.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress

from nvct import userns
from nvct.errors import DriverError
from nvct.model import DeviceNode
from nvct.node import jetson, procfs, wsl
from nvct.node.devices import CONTROL_NODES, NodeReader, missing_node, node_reader
from nvct.node.roots import on_host
from nvct.record import record
from nvct.settings import PRINT, REPLACE, Settings

# In the order of their dependence: the first is needed by the others.
MODULES = ("nvidia", "nvidia-uvm", "nvidia-modeset")

# Where distributions have it; a PATH decides nothing.
_MODPROBES = ("/usr/sbin/modprobe", "/sbin/modprobe", "/usr/bin/modprobe", "/bin/modprobe")
# The first load initialises every GPU, which takes seconds on large machines.
_PATIENCE_S = 60.0

_NODE_CAPABILITIES = ("mig/config", "mig/monitor")
_OTHERS_CAN_WRITE = 0o022


@record
class DeviceFiles:
    """How the driver wants its nodes: `modify` says whether others may make them, the rest is how they are to be."""

    modify: bool = True
    mode: int = 0o666
    uid: int = 0
    gid: int = 0


@record
class WantedNode:
    """A node that is to exist, and by whose word: `source` is the file under /proc that describes it."""

    node: DeviceNode
    files: DeviceFiles
    source: str


def prepare(settings: Settings) -> tuple[str, ...]:
    """Load modules and make nodes, as far as the settings allow it. A sentence for each thing that did not work."""
    if os.geteuid() != 0 or userns.is_nested() or settings.device_table or _is_other_platform(settings):
        return ()
    notes = _load_modules(settings) if settings.load_kernel_modules else []
    if settings.device_nodes != PRINT:
        notes += _make_nodes(settings)
    return tuple(notes)


def _is_other_platform(settings: Settings) -> bool:
    """Whether the driver is another than the modules that are loaded here."""
    return wsl.is_wsl(settings) or jetson.is_jetson(settings)


def loaded_modules(proc_root: str) -> set[str]:
    """Those of MODULES that are loaded, or built into the kernel, which /proc/modules does not list."""
    names = set(_majors(proc_root))
    with suppress(FileNotFoundError):  # a kernel without loadable modules
        names |= {line.split()[0].replace("_", "-") for line in procfs.read_text(f"{proc_root}/modules").splitlines()}
    if os.path.exists(procfs.version_path(proc_root)):
        names.add("nvidia")
    return names.intersection(MODULES)


def _majors(proc_root: str) -> dict[str, int]:
    try:
        return procfs.read_majors(proc_root)
    except FileNotFoundError:
        return {}


def _load_modules(settings: Settings) -> list[str]:
    notes = []
    for module in MODULES:
        # Looked at anew each time: loading one module may load another.
        if module in loaded_modules(settings.proc_root):
            continue
        complaint = _load(settings, module)
        if complaint:
            notes.append(f"{module} is not loaded, and cannot be: {complaint}")
        if module == "nvidia" and complaint:
            break  # the others depend on it, and would only say so
    return notes


def _load(settings: Settings, module: str) -> str:
    """Load one module by the host's modprobe; says why that failed, "" when it did not.

    A driver root of its own holds modules too (those of a driver container are built there): modprobe is pointed at it,
    and runs outside of it.
    """
    program = _modprobe(settings)
    if not program:
        return f"no modprobe that only root can change in {settings.modprobe or ', '.join(_MODPROBES)}"
    command = [program, *(["-d", settings.root] if settings.root != "/" else []), module]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env={}, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"`{' '.join(command)}` has not ended within {_PATIENCE_S:g} s; see dmesg"
    except OSError as error:
        return f"{program}: {error.strerror}"
    if done.returncode == 0:
        return ""
    last_line = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return f"`{' '.join(command)}` ended with status {done.returncode}: {last_line or 'it said nothing'}; see dmesg"


def _modprobe(settings: Settings) -> str:
    candidates = (settings.modprobe,) if settings.modprobe else _MODPROBES
    return next((path for path in candidates if _is_of_root(path)), "")


def _is_of_root(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid == 0 and not status.st_mode & _OTHERS_CAN_WRITE


def _make_nodes(settings: Settings) -> list[str]:
    try:
        wanted = list(wanted_nodes(settings.proc_root))
    except (OSError, DriverError):  # without a driver, or one that is not understood, discovery says it better
        return []
    read = node_reader(settings.dev_root, settings.device_table)
    complaints = (_make_if_needed(settings, read, one) for one in wanted)
    return [complaint for complaint in complaints if complaint]


def _make_if_needed(settings: Settings, read: NodeReader, wanted: WantedNode) -> str:
    """Make or replace one node when it is to be; says why that failed, "" when it did not."""
    path, numbers = wanted.node.path, (wanted.node.major, wanted.node.minor)
    if not missing_node(read, path, *numbers, settings.dev_root):
        return ""
    wrong = read(path) is not None
    if wrong and settings.device_nodes != REPLACE:
        return ""
    where = on_host(settings.dev_root, path)
    if not wanted.files.modify:
        return f"{where} is not made, since {wanted.source} forbids it (ModifyDeviceFiles, DeviceFileModify)"
    try:
        make_node(where, wanted, replace=wrong)
    except FileExistsError:
        if missing_node(read, path, *numbers, settings.dev_root):  # else another start has just made it
            return f"{where} is there and is not the device {numbers[0]}:{numbers[1]}: remove it"
    except OSError as error:
        return f"{where} cannot be made: {error.strerror}"
    return ""


def wanted_nodes(proc_root: str) -> Iterator[WantedNode]:
    """Every node that the loaded driver has: control nodes, GPUs, MIG capabilities. Raises OSError without a driver."""
    params = f"{proc_root}/driver/nvidia/params"
    files = parse_params(procfs.read_text(params))
    majors = procfs.read_majors(proc_root)
    loaded = loaded_modules(proc_root)
    for control in CONTROL_NODES:
        if control.module in loaded and control.owner in majors:
            yield WantedNode(DeviceNode(control.path, majors[control.owner], control.minor), files, params)
    if "nvidia" not in majors:  # the module is just being unloaded
        return
    for name in procfs.read_gpu_times(proc_root):
        minor = procfs.read_information(proc_root, name).minor
        yield WantedNode(DeviceNode(f"/dev/nvidia{minor}", majors["nvidia"], minor), files, params)
    if "nvidia-caps" in majors:
        yield from _capability_nodes(proc_root, majors["nvidia-caps"])


def _capability_nodes(proc_root: str, major: int) -> Iterator[WantedNode]:
    folder = procfs.capabilities_path(proc_root)
    for access in (*_NODE_CAPABILITIES, *procfs.read_access_times(proc_root)):
        source = f"{folder}/{access}"
        try:
            text = procfs.read_text(source)
        except FileNotFoundError:  # a card without MIG, or an instance that is just being destroyed
            continue
        minor = procfs.read_capability_minor(proc_root, access)
        path = f"/dev/nvidia-caps/nvidia-cap{minor}"
        yield WantedNode(DeviceNode(path, major, minor), parse_capability(text), source)


def parse_params(text: str) -> DeviceFiles:
    """What /proc/driver/nvidia/params says of device files; the driver's defaults for what it leaves out.

    `ModifyDeviceFiles` 0 or 1, `DeviceFileUID`, `DeviceFileGID`, and `DeviceFileMode` in decimal.
    """
    values = _numbers(text)
    return DeviceFiles(
        modify=values.get("ModifyDeviceFiles", 1) != 0,
        mode=values.get("DeviceFileMode", 0o666) & 0o777,
        uid=values.get("DeviceFileUID", 0),
        gid=values.get("DeviceFileGID", 0),
    )


def parse_capability(text: str) -> DeviceFiles:
    """What a capability file says of its node: `DeviceFileModify` 0 or 1, and `DeviceFileMode` in decimal."""
    values = _numbers(text)
    return DeviceFiles(modify=values.get("DeviceFileModify", 1) != 0, mode=values.get("DeviceFileMode", 0o444) & 0o777)


def _numbers(text: str) -> dict[str, int]:
    """The lines `name: number`; numbers that no id can be are dropped."""
    pairs = (line.partition(":")[::2] for line in text.splitlines())
    stripped = ((name.strip(), value.strip()) for name, value in pairs)
    return {
        name: int(value) for name, value in stripped if value.isascii() and value.isdigit() and int(value) < 1 << 32
    }


def make_node(where: str, wanted: WantedNode, replace: bool) -> None:
    """Make a node whole and then give it its name, so that nobody ever meets it with a wrong mode or owner.

    Raises FileExistsError when something has the name already, unless it is to be replaced; OSError for what fails.
    """
    folder, name = os.path.split(where)
    _make_folder(folder)
    aside = f".{name}.nvct-{os.getpid()}"
    parent = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _remove(aside, parent)  # of a process that died here and had our id
        device = os.makedev(wanted.node.major, wanted.node.minor)
        os.mknod(aside, stat.S_IFCHR | 0o600, device, dir_fd=parent)
        os.chown(aside, wanted.files.uid, wanted.files.gid, dir_fd=parent, follow_symlinks=False)
        os.chmod(aside, wanted.files.mode, dir_fd=parent)
        if replace:
            os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
        else:
            os.link(aside, name, src_dir_fd=parent, dst_dir_fd=parent, follow_symlinks=False)
    finally:
        _remove(aside, parent)
        os.close(parent)


def _make_folder(folder: str) -> None:
    with suppress(FileExistsError):
        os.mkdir(folder)
        os.chmod(folder, 0o755)  # whatever the umask: ordinary users open the nodes in it


def _remove(name: str, parent: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
