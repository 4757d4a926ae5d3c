"""The device rules of a container's cgroup, v1 and v2: leave to read and write character devices, and the way back.

Everything is opened by `DeviceCgroup.of` before the caller enters the container's mount namespace; what follows uses
the descriptors alone.
"""

from __future__ import annotations

import errno
import os

from nvct import userns
from nvct.errors import InjectionError
from nvct.inject import bpf, device_program
from nvct.inject.syscalls import CGROUP2_MAGIC, filesystem_magic
from nvct.record import record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CGROUP_ROOT = "/sys/fs/cgroup"

_OCTAL = frozenset("01234567")

# Another writer (systemd reloading its units, the engine updating the container) may change the programs between our
# reading and our replacing. That is over at once; a program that cannot be replaced at all fails every time.
_ATTEMPTS = 10

_ACCESS = "nvct must run as root, while the container is there"
_NO_RULES = "switch device rules off (`cgroups: false` in nvct's settings)"
_OUT_OF_REACH = (
    "a rootless engine cannot change device rules, so the host's rules and the nodes' modes decide; "
    "`cgroups: false` in nvct's settings keeps nvct from trying"
)
_ENGINE = "let the engine allow the devices, by a CDI spec"
_PROGRAM_ADVICE = {
    errno.ENOENT: f"the programs change all the time, or a BPF link holds one: {_ENGINE}",
    errno.EPERM: "the hook needs CAP_BPF and CAP_NET_ADMIN, or CAP_SYS_ADMIN",
}


class RulesOutOfReach(InjectionError):
    """The caller is in a user namespace, where no device rule can be changed: those of the host decide."""


class DeviceCgroup:
    """The device rules of one container's cgroup, whose folder is `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Read now: after the caller has entered the container, /proc is the container's.
        self._rootless = userns.is_nested()

    @staticmethod
    def of(pid: int) -> DeviceCgroup:
        """The cgroup of the process `pid`, v2 where /sys/fs/cgroup is one, else v1, as runc decides.

        Raises RulesOutOfReach where a user namespace keeps it away, InjectionError for what else fails.
        """
        try:
            if _is_cgroup2(CGROUP_ROOT):
                return _Version2(_folder_of(pid, ""))
            return _Version1(_folder_of(pid, "devices"))
        except OSError as error:
            step = f"cannot open the device cgroup of process {pid}: {error.filename}"
            raise _failure(step, error, _ACCESS, userns.is_nested()) from None
        except InjectionError as error:
            if userns.is_nested():
                raise RulesOutOfReach(f"{error}; {_OUT_OF_REACH}") from None
            raise

    def allow(self, numbers: Sequence[tuple[int, int]]) -> Callable[[], None]:
        """Let the cgroup read and write the character devices (major, minor), and return what takes exactly this back.

        What was allowed before stays so, also after the undo. When a device cannot be allowed, none is: InjectionError,
        or RulesOutOfReach where that is because of a user namespace. The undo raises OSError, also when it happens in
        here. It needs the descriptors: not after `close`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the descriptors."""
        raise NotImplementedError

    def _failed(self, step: str, error: OSError, advice: str) -> InjectionError:
        return _failure(f"{step} of {self.path}", error, advice, self._rootless)


class _Version1(DeviceCgroup):
    """Files of the devices controller; linux/Documentation/admin-guide/cgroup-v1/devices.rst."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._files: dict[str, int] = {}
        self._closed_to_us: OSError | None = None
        try:
            self._files["devices.list"] = os.open(f"{path}/devices.list", os.O_RDONLY | os.O_CLOEXEC)
            self._open_for_writing()
        except OSError:
            self.close()
            raise

    def _open_for_writing(self) -> None:
        try:
            for name in ("devices.allow", "devices.deny"):
                self._files[name] = os.open(f"{self.path}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        except PermissionError as error:
            if not self._rootless:
                raise
            self._closed_to_us = error  # which matters only when the rules that are there do not do

    def allow(self, numbers: Sequence[tuple[int, int]]) -> Callable[[], None]:
        try:
            rules = self._rules()
        except OSError as error:
            raise self._failed("cannot read devices.list", error, _ACCESS) from None
        ways_back: list[Callable[[], object]] = []
        for major, minor in dict.fromkeys(numbers):
            if allows(rules, major, minor):
                continue
            if self._closed_to_us:
                raise self._failed("cannot open devices.allow", self._closed_to_us, _ACCESS)
            rule = f"c {major}:{minor} rw"
            try:
                os.write(self._files["devices.allow"], rule.encode())
            except OSError as error:
                _go_back(ways_back)
                advice = "devices.list of the parent cgroups shows what they allow, and no more can be allowed here"
                raise self._failed(f"cannot write {rule!r} to devices.allow", error, advice) from None
            ways_back.append(self._denial(f"c {major}:{minor} {_gained(rules, major, minor)}"))
        return lambda: _go_back(ways_back)

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _denial(self, rule: str) -> Callable[[], object]:
        return lambda: os.write(self._files["devices.deny"], rule.encode())

    def _rules(self) -> list[list[str]]:
        descriptor = self._files["devices.list"]
        os.lseek(descriptor, 0, os.SEEK_SET)
        text = b"".join(iter(lambda: os.read(descriptor, 65536), b"")).decode()
        return [line.replace(":", " ").split() for line in text.splitlines()]


def allows(rules: list[list[str]], major: int, minor: int) -> bool:
    """Whether the rules (type, major, minor, access) of devices.list allow reading and writing this character device.

    One rule must give both: the kernel does not add up rules when a program opens a device for both.
    """
    return any(
        kind in ("a", "c")
        and maj in ("*", str(major))
        and min_ in ("*", str(minor))
        and "r" in access
        and "w" in access
        for kind, maj, min_, access in rules
    )


def _gained(rules: list[list[str]], major: int, minor: int) -> str:
    """What `rw` adds to this device's own rule: the kernel merges the rules of a device, and takes them apart again."""
    own = "".join(access for *device, access in rules if device == ["c", str(major), str(minor)])
    return "".join(letter for letter in "rw" if letter not in own)


class _Version2(DeviceCgroup):
    """BPF programs: every attached one must allow a device, so each gets our prologue. No program, no restriction."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._programs: list[int] = []
        bpf.raise_locked_memory(os.uname().release)

    def allow(self, numbers: Sequence[tuple[int, int]]) -> Callable[[], None]:
        for _ in range(_ATTEMPTS):
            try:
                return self._allow(numbers)
            except OSError as error:
                failure = error
                if error.errno != errno.ENOENT:
                    break
        advice = _PROGRAM_ADVICE.get(failure.errno or 0, _ENGINE)
        raise self._failed("cannot extend the device programs", failure, advice) from None

    def close(self) -> None:
        while self._programs:
            os.close(self._programs.pop())
        os.close(self._folder)

    def _allow(self, numbers: Sequence[tuple[int, int]]) -> Callable[[], None]:
        flags, ids = bpf.attached(self._folder)
        # All are loaded before the first is replaced: what can fail has failed by then.
        pairs = [pair for pair in [self._extended(number, numbers) for number in ids] if pair]
        ways_back: list[Callable[[], object]] = []
        try:
            for old, new in pairs:
                self._replace(old, new, flags)
                ways_back.append(self._replacement(new, old, flags))
        except OSError:
            _go_back(ways_back)
            raise
        return lambda: _go_back(ways_back)

    def _replacement(self, old: int, new: int, flags: int) -> Callable[[], object]:
        return lambda: self._replace(old, new, flags)

    def _extended(self, number: int, numbers: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
        """The program with this id and its successor, as descriptors; None when it allows the devices already."""
        old = self._keep(bpf.program(number))
        text, gpl_compatible = bpf.instructions(old)
        obstacle = device_program.obstacle(text)
        if obstacle:
            raise InjectionError(f"cannot extend device program {number} of {self.path}: {obstacle}")
        longer = device_program.extended(text, numbers)
        return (old, self._keep(bpf.load(longer, gpl_compatible))) if longer != text else None

    def _keep(self, program: int) -> int:
        """Hold the descriptor: a program without one disappears when it is detached, and could not be put back."""
        self._programs.append(program)
        return program

    def _replace(self, old: int, new: int, flags: int) -> None:
        if not flags & bpf.F_ALLOW_MULTI:
            bpf.attach(self._folder, new, flags)  # such a cgroup has one program, and a second one takes its place
            return
        try:
            bpf.attach(self._folder, new, bpf.F_ALLOW_MULTI | bpf.F_REPLACE, old)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._replace_in_steps(old, new)

    def _replace_in_steps(self, old: int, new: int) -> None:
        """For kernels before 5.6. In between both programs must allow a device, so nothing is open that must not be."""
        bpf.attach(self._folder, new, bpf.F_ALLOW_MULTI)
        try:
            bpf.detach(self._folder, old)
        except OSError:
            bpf.detach(self._folder, new)
            raise


def _go_back(ways_back: list[Callable[[], object]]) -> None:
    """Take back what was done, last first and as much as possible; the first OSError is raised at the end."""
    failures = []
    while ways_back:
        try:
            ways_back.pop()()
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


@record
class CgroupMount:
    """A line of /proc/self/mountinfo: `root` is the folder of the hierarchy that is seen at `point`."""

    root: str
    point: str
    controllers: tuple[str, ...]


def cgroup_mounts(mountinfo: str) -> list[CgroupMount]:
    """The cgroup mounts in the text of a mountinfo file (proc_pid_mountinfo(5)); those of v2 have the controllers
    ("",).
    """
    found = []
    for line in mountinfo.split("\n"):
        left, _, right = line.partition(" - ")
        kind, _, rest = right.partition(" ")
        fields = left.split(" ")
        if kind not in ("cgroup", "cgroup2") or len(fields) < 5:
            continue
        controllers = ("",) if kind == "cgroup2" else tuple(rest.split(" ")[-1].split(","))
        found.append(CgroupMount(_unescape(fields[3]), _unescape(fields[4]), controllers))
    return found


def cgroup_path(membership: str, controller: str) -> str | None:
    """The path of a process in the hierarchy of `controller` ("" for v2), from the text of its /proc/<pid>/cgroup."""
    for line in membership.split("\n"):
        _hierarchy, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and controller in controllers.split(","):
            return path
    return None


def folder_below(mount: CgroupMount, path: str) -> str | None:
    """Where the cgroup `path` is seen below the mount, whose root stands before it in `path`; None when it is not.

    What lies above the root of our cgroup namespace is told as /.., and would mean another folder to whoever opened it.
    """
    if (path + "/").startswith("/../") or (mount.root + "/").startswith("/../"):
        return None
    if mount.root == "/":
        return mount.point + path.rstrip("/")
    if path == mount.root or path.startswith(mount.root + "/"):
        return mount.point + path[len(mount.root) :]
    return None


def _folder_of(pid: int, controller: str) -> str:
    """The folder of the process's cgroup in the hierarchy of `controller` ("" for v2)."""
    name = f"controller {controller!r}" if controller else "cgroup v2"
    path = cgroup_path(_read(f"/proc/{pid}/cgroup"), controller)
    if path is None:
        raise InjectionError(f"/proc/{pid}/cgroup has no line for {name}: enable it on this host, or {_NO_RULES}")
    mounts = [mount for mount in cgroup_mounts(_read("/proc/self/mountinfo")) if controller in mount.controllers]
    if not controller:  # it may be mounted elsewhere too; the engine uses the place that decided for v2
        mounts = [mount for mount in mounts if mount.point == CGROUP_ROOT]
    for mount in reversed(mounts):  # the last mount on a point is the one that is seen
        folder = folder_below(mount, path)
        if folder is not None:
            return folder
    seen = ", ".join(f"{mount.point} with root {mount.root}" for mount in mounts) or "no mount"
    raise InjectionError(
        f"cgroup {path} of process {pid} is not seen here: for {name} /proc/self/mountinfo has {seen}; "
        f"run nvct where the whole hierarchy is mounted, outside of cgroup namespaces, or {_NO_RULES}"
    )


def _is_cgroup2(path: str) -> bool:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        return filesystem_magic(folder, path) == CGROUP2_MAGIC
    finally:
        os.close(folder)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        return file.read()


def _unescape(text: str) -> str:
    """Blanks and backslashes stand as three octal digits in mountinfo."""
    first, *rest = text.split("\\")
    return first + "".join(map(_unescape_first, rest))


def _unescape_first(text: str) -> str:
    code = text[:3]
    if len(code) == 3 and _OCTAL.issuperset(code):
        return chr(int(code, 8)) + text[3:]
    return "\\" + text  # no text of the kernel's


def _failure(step: str, error: OSError, advice: str, rootless: bool) -> InjectionError:
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    what = f"{step}: {error.strerror} ({code})"
    if rootless and error.errno in (errno.EPERM, errno.EACCES):
        return RulesOutOfReach(f"{what}; {_OUT_OF_REACH}")
    return InjectionError(f"{what}; {advice}")
