"""A running container: what it asked for, what of a plan is there in it, and what of the driver no plan brought.

Looks, and changes nothing. The container may lie: every path of it is opened through its confined root.
"""

from __future__ import annotations

import os
from stat import S_ISCHR

from nvct import ldcache
from nvct.errors import InjectionError, NvctError
from nvct.explain import PROC, changes_of
from nvct.inject import bpf, device_program
from nvct.inject.cgroup import DeviceCgroup, allows
from nvct.inject.look import look_as_its_root
from nvct.record import record
from nvct.request import MOUNT_LIST, SWARM_PREFIX, request_from_env

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nvct.explain import Change
    from nvct.inject.rootfs import ConfinedRoot
    from nvct.model import Edits, Inventory, Request

_LOADER_CACHE = "/etc/ld.so.cache"
_DEVICE_FOLDERS = ("/dev", "/dev/nvidia-caps", "/dev/nvidia-caps-imex-channels")
_MOST_CONTENT = 1 << 20

# Variables by which a container asks.
_PREFIXES = ("NVIDIA_", SWARM_PREFIX)
_NAMES = ("CUDA_VERSION",)

_SYS_ADMIN = 21  # the bit of CAP_SYS_ADMIN; linux/capability.h

# (device, inode) of a file, ("device", its number) of a device node.
Identity = tuple[object, int]


@record
class Comparison:
    """Changes of the plan by kind and name: those that are in the container, and those that are not, with why.

    `unplanned` are device nodes and mounts of the driver that are there beyond the plan. `unknown` says, a sentence
    each, what could not be looked at.
    """

    present: tuple[tuple[str, str], ...]
    absent: tuple[tuple[str, str, str], ...]
    unplanned: tuple[str, ...]
    unknown: tuple[str, ...]


def variables_of(pid: int) -> dict[str, str]:
    """The variables of the process that can be a request. The others may be secrets, and are not kept.

    Raises OSError when the process is gone or may not be looked at.
    """
    with open(f"/proc/{pid}/environ", "rb") as stream:
        entries = [entry.partition("=") for entry in os.fsdecode(stream.read()).split("\0")]
    return {name: value for name, _, value in entries if name.startswith(_PREFIXES) or name in _NAMES}


def request_of(pid: int, root: ConfinedRoot, variables: dict[str, str]) -> Request:
    """What the container of process `pid` asked for, as far as it can be seen in it now. Raises OSError as above."""
    return request_from_env(variables, look_as_its_root(root, pid), is_privileged(pid), _listed_mounts(pid))


def is_privileged(pid: int) -> bool:
    """Whether CAP_SYS_ADMIN is in the bounding set of the process; proc_pid_status(5)."""
    with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if name == "CapBnd":
                return bool(int(value, 16) >> _SYS_ADMIN & 1)
    return False


def _listed_mounts(pid: int) -> list[object]:
    """The mounts that can be a list of devices, as they stood in the OCI spec; /var/run is /run in most images."""
    found: list[object] = []
    for point, root in _mounts(pid):
        if root.endswith("/null") and point.startswith((MOUNT_LIST + "/", MOUNT_LIST.removeprefix("/var") + "/")):
            target = point if point.startswith("/var/") else f"/var{point}"
            found.append({"source": "/dev/null", "destination": target})
    return found


def _mounts(pid: int) -> list[tuple[str, str]]:
    """(mount point, root of the mount within its file system) of each mount; proc_pid_mountinfo(5)."""
    with open(f"/proc/{pid}/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        fields = [line.split(" ") for line in stream]
    return [(each[4], each[3]) for each in fields]


def compare(
    edits: Edits,
    inventory: Inventory,
    pid: int,
    root: ConfinedRoot,
    variables: dict[str, str],
    rules_by_hook: bool = True,
) -> Comparison:
    """Compare the plan with the container of process `pid`, whose root folder is `root`.

    `variables` are those of its environment that a plan may set. `rules_by_hook`: whether device rules were added by
    nvct's hook, or stood in a spec, as an engine's own. Leftovers of other driver versions are not looked for.
    Raises OSError when the process is gone or may not be looked at.
    """
    look = _Look(pid, root, variables, inventory.architecture, rules_by_hook)
    present, absent = [], []
    for change in changes_of(edits):
        if change.kind == "stale":
            continue
        fault = look.fault(change)
        if fault:
            absent.append((change.kind, change.what, fault))
        else:
            present.append((change.kind, change.what))
    return Comparison(tuple(present), tuple(absent), tuple(look.unplanned(edits, inventory)), tuple(look.unknown))


class _Look:
    """One look into a container. A check returns what is wrong with a change there, "" when it is as planned."""

    def __init__(
        self, pid: int, root: ConfinedRoot, variables: dict[str, str], architecture: str, rules_by_hook: bool
    ) -> None:
        self.unknown: list[str] = []
        self._root = root
        self._variables = variables
        self._allowed = self._device_rules(pid, rules_by_hook)
        self._cache = self._cache_names(architecture)
        self._points = [point for point, _ in _mounts(pid)]

    def fault(self, change: Change) -> str:
        return CHECKS[change.kind](self, change)

    def device(self, change: Change) -> str:
        number = change.edit["major"], change.edit["minor"]
        there = self._identity(change.what)
        if there != ("device", os.makedev(*number)):
            return "not there" if there is None else "something else is there"
        return "" if self._allowed(*number) else f"the node is there, its device rule {number[0]}:{number[1]} is not"

    def mount(self, change: Change) -> str:
        source = _host_identity(change.edit["source"])
        if source is None:
            return f"this host has no {change.edit['source']} now"
        there = self._identity(change.what)
        if there == source:
            return ""
        return "not there" if there is None else "another file is there"

    def link(self, change: Change) -> str:
        target = change.edit["target"]
        wanted = target if target.startswith("/") else f"{change.what.rpartition('/')[0]}/{target}"
        there = self._identity(change.what)
        if there is None:
            return "not there, or it leads nowhere"
        return "" if there == self._identity(wanted) else f"it does not lead to {target}"

    def cache_line(self, change: Change) -> str:
        paths = [path for name, path, bits in self._cache if (name, bits) == (change.edit["name"], change.edit["bits"])]
        if change.edit["path"] in paths:
            return ""
        return f"the loader cache has it at {', '.join(paths)}" if paths else "the loader cache does not have it"

    def proc(self, change: Change) -> str:
        shown = set(self._names(f"{PROC}/gpus"))
        if shown != set(change.edit["gpus"]):
            return f"it shows the GPUs {', '.join(sorted(shown)) or 'none'}"
        hidden = [name for name in change.edit["capabilities"] if not self._root.exists(f"{PROC}/capabilities/{name}")]
        return f"it does not show {', '.join(hidden)}" if hidden else ""

    def file(self, change: Change) -> str:
        content = self._read(change.what, _MOST_CONTENT)
        if content is None:
            return "not there"
        return "" if content == change.edit["content"].encode() else "its content is another"

    def variable(self, change: Change) -> str:
        if change.what not in self._variables:
            return "not set"
        value = self._variables[change.what]
        return "" if value == change.edit["value"] else f"it is `{value}`"

    def unplanned(self, edits: Edits, inventory: Inventory) -> Iterator[str]:
        """Nodes by their names; mounts by what is mounted, or by a name that only driver files have."""
        planned = {device.path for device in edits.devices}
        for folder in _DEVICE_FOLDERS:
            for name in sorted(self._names(folder)):
                path = f"{folder}/{name}"
                kind = (self._identity(path) or ("", 0))[0]
                if name.startswith("nvidia") and kind == "device" and path not in planned:
                    yield path
        wanted = {_host_identity(mount.source) for mount in edits.mounts}
        driver = {_host_identity(inventory.roots.root.rstrip("/") + file.path) for file in inventory.files}
        stems = ("libnvidia-", "libcuda.so", "libcudadebugger.so")
        for point in self._points:
            there = self._identity(point)
            if there is None or there in wanted or there[0] == "device":
                continue
            if there in driver or point.rpartition("/")[2].startswith(stems):
                yield point

    def _identity(self, path: str) -> Identity | None:
        try:
            descriptor = self._root.open(path)
        except OSError:
            return None
        try:
            return _identity_of(os.fstat(descriptor))
        finally:
            os.close(descriptor)

    def _names(self, folder: str) -> list[str]:
        try:
            descriptor = self._root.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            return []
        try:
            return os.listdir(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, path: str, most: int) -> bytes | None:
        try:
            anchor = self._root.open(path)
        except OSError:
            return None
        try:
            return self._root.read(anchor, path, most)
        except OSError:
            return None
        finally:
            os.close(anchor)

    def _cache_names(self, architecture: str) -> list[tuple[str, str, int]]:
        data = self._read(_LOADER_CACHE, ldcache.MAX_SIZE)
        if data is None:
            return []
        try:
            return ldcache.names(data, architecture)
        except NvctError as error:
            self.unknown.append(f"{_LOADER_CACHE} of the container: {error}")
            return []

    def _device_rules(self, pid: int, by_hook: bool) -> Callable[[int, int], bool]:
        try:
            return _leave(DeviceCgroup.of(pid), by_hook)
        except (NvctError, OSError) as error:
            self.unknown.append(f"device rules: {error}")
            return lambda major, minor: True


# A kind that is added to Edits needs a line here.
CHECKS: dict[str, Callable[[_Look, Change], str]] = {
    "devices": _Look.device,
    "mounts": _Look.mount,
    "links": _Look.link,
    "loader_cache": _Look.cache_line,
    "proc": _Look.proc,
    "files": _Look.file,
    "env": _Look.variable,
}


def _leave(group: DeviceCgroup, by_hook: bool) -> Callable[[int, int], bool]:
    """Whether the cgroup lets a device be read and written.

    Of version 2 only the leave that nvct's hook adds can be seen in the programs; without a program everything is
    allowed. Raises InjectionError for rules that cannot be seen.
    """
    group.close()
    rules_file = f"{group.path}/devices.list"
    if os.path.exists(rules_file):
        with open(rules_file, encoding="ascii") as stream:
            rules = [line.replace(":", " ").split() for line in stream]
        return lambda major, minor: allows(rules, major, minor)
    given = _given_by_programs(group.path)
    if given and not by_hook:
        raise InjectionError("those of a spec are in the engine's own device programs (cgroup v2), which are not read")
    return lambda major, minor: all((major, minor) in numbers for numbers in given)


def _given_by_programs(path: str) -> list[frozenset[tuple[int, int]]]:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        programs = [bpf.program(number) for number in bpf.attached(folder)[1]]
    finally:
        os.close(folder)
    given = []
    for program in programs:
        given.append(device_program.split(bpf.instructions(program)[0])[0])
        os.close(program)
    return given


def _identity_of(status: os.stat_result) -> Identity:
    if S_ISCHR(status.st_mode):
        return "device", status.st_rdev
    return status.st_dev, status.st_ino


def _host_identity(path: str) -> Identity | None:
    try:
        return _identity_of(os.stat(path))
    except OSError:
        return None
