"""A child process in a mount namespace of its own, with a root folder in it: a container for some milliseconds.

Hundreds of attacks need hundreds of containers. What is mounted in one is gone with its process.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, NamedTuple

from nvct.errors import NvctError
from nvct.inject import syscalls
from nvct.inject.carry import inject
from nvct.inject.look import look
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import CacheEdit, DeviceEdit, Edits, LinkEdit, MountEdit, ProcEdit, StaleName
from tests.support.bare import MISSING_CALLS, forget_calls
from tests.support.naive import inject_by_paths

RO = ("ro", "nosuid", "nodev")
LIB = "/usr/lib64"
LIBRARY = f"{LIB}/libcuda.so.550.1"
GPU = "0000:0f:00.0"
MASK = "/proc/driver/nvidia"


def make_host(host: Path) -> Path:
    """What a host gives: a library, a program, firmware, a socket's place, and a procfs folder of two GPUs."""
    host.mkdir()
    for name in ("libcuda.so.550.1", "nvidia-smi", "gsp.bin", "socket"):
        (host / name).write_text(f"{name} of the host")
    proc = host / "driver/nvidia"
    for gpu in (GPU, "0000:07:00.0"):
        (proc / "gpus" / gpu).mkdir(parents=True)
        (proc / "gpus" / gpu / "information").write_text(gpu)
    (proc / "capabilities/gpu3/mig/gi1").mkdir(parents=True)
    (proc / "capabilities/gpu3/mig/gi1/access").write_text("DeviceFileMinor: 21\n")
    (proc / "params").write_text("ModifyDeviceFiles: 1\n")
    return host


def edits_of(host: Path) -> Edits:
    """One of each kind of edit that there is."""
    return Edits(
        devices=(
            DeviceEdit("/dev/nvidia0", "/dev/full", 1, 7, "a GPU"),
            DeviceEdit("/dev/nvidia-caps/nvidia-cap1", "/dev/zero", 1, 5, "a capability"),
        ),
        mounts=(
            MountEdit(f"{host}/libcuda.so.550.1", LIBRARY, RO, "compute"),
            MountEdit(f"{host}/nvidia-smi", "/usr/bin/nvidia-smi", RO, "utility"),
            MountEdit(f"{host}/gsp.bin", "/lib/firmware/nvidia/550.1/gsp.bin", RO, "firmware", required=False),
            MountEdit(f"{host}/socket", "/run/nvidia-persistenced/socket", RO, "utility", required=False),
        ),
        links=(LinkEdit(f"{LIB}/libcuda.so.1", "libcuda.so.550.1", "SONAME"),),
        loader_cache=(CacheEdit("libcuda.so.1", f"{LIB}/libcuda.so.1", 64, "compute"),),
        proc=ProcEdit(f"{host}/driver/nvidia", ("params",), (GPU,), ("gpu3/mig/gi1/access",), "only visible GPUs"),
        stale=(StaleName(LIB, "libcuda.so"), StaleName("/lib/firmware/nvidia", "")),
    )


def targets_of(edits: Edits) -> list[str]:
    """Every path of a container that the edits name."""
    named = [device.path for device in edits.devices] + [mount.target for mount in edits.mounts]
    named += [link.path for link in edits.links]
    return [*named, "/etc/ld.so.cache", MASK]


def components_of(edits: Edits) -> list[str]:
    """Each of these paths, and every folder on the way to it."""
    found = set()
    for target in targets_of(edits):
        parts = target.split("/")
        found |= {"/".join(parts[:depth]) for depth in range(2, len(parts) + 1)}
    return sorted(found)


class Outcome(NamedTuple):
    """What a trial of an injector came to.

    `error`: "" or the exception. `escaped`: mount points outside the root that were not there before. `left`: what
    differs inside the root from before, mounts and paths. `wrong`: what is not as the edits want it, optional parts
    with a warning left out.
    """

    error: str
    warnings: list[str]
    escaped: list[str]
    left: list[str]
    wrong: list[str]


def caged(act: Callable[[], Any], limit_s: int = 20) -> Any:
    """What `act` returns, as JSON carries it, in a child with a mount namespace; one that hangs is ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(limit_s)
            if ctypes.CDLL(None).unshare(syscalls.CLONE_NEWNS):
                raise OSError("unshare failed")
            syscalls.mount("", "/", "", syscalls.MS_REC | syscalls.MS_PRIVATE, "", "/")
            os.write(writer, json.dumps(act()).encode())
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    os.waitpid(child, 0)
    if not said:
        raise AssertionError("the injector died or hung: see standard error")
    return json.loads(said)


def try_nvct(edits: Edits, rootfs: Path, kernel: str, still: bool = True) -> Outcome:
    """Inject into the root folder of this process's own namespace; for `caged`.

    Where the root is not `still`, names in it cannot be trusted, so that only mounts are compared.
    """
    forget_calls(MISSING_CALLS[kernel])

    def act() -> tuple[str, ...]:
        root = ConfinedRoot.of_process(os.getpid(), str(rootfs))
        look(root)
        return inject(edits, os.getpid(), root, os.uname().machine, cgroups=False)

    tried = _tried(act, str(rootfs), still)
    return tried if tried.error or not still else tried._replace(wrong=_wrong(edits, str(rootfs), tried.warnings))


def try_naive(edits: Edits, rootfs: Path, still: bool = True) -> Outcome:
    """The same by path strings; whether all is right afterwards is not looked at."""

    def act() -> tuple[str, ...]:
        inject_by_paths(edits, str(rootfs))
        return ()

    return _tried(act, str(rootfs), still)


def _tried(act: Callable[[], tuple[str, ...]], rootfs: str, still: bool) -> Outcome:
    mounts, picture = _mounts(), _picture(rootfs) if still else {}
    error, warnings = "", ()
    try:
        warnings = act()
    except (NvctError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    new = [point for point in _mounts() if point not in mounts]
    inside = [point for point in new if point.startswith(f"{rootfs}/")]
    now = _picture(rootfs) if still else {}
    changed = [path for path in sorted(now.keys() | picture.keys()) if now.get(path) != picture.get(path)]
    return Outcome(error, list(warnings), [point for point in new if point not in inside], inside + changed, [])


def _mounts() -> list[str]:
    with open("/proc/self/mountinfo", encoding="utf-8") as stream:
        return [line.split(" ", 5)[4] for line in stream]


def _picture(rootfs: str) -> dict[str, tuple[object, ...]]:
    """Every path below the root but what procfs shows: kind and mode, owner, and a link's text or a file's content."""
    found: dict[str, tuple[object, ...]] = {}
    waiting = [rootfs]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                content = b""
                if entry.is_symlink():
                    content = os.fsencode(os.readlink(entry.path))
                elif S_ISREG(status.st_mode):
                    content = Path(entry.path).read_bytes()
                elif S_ISDIR(status.st_mode) and not os.path.ismount(entry.path):
                    waiting.append(entry.path)
                found[entry.path.removeprefix(rootfs)] = (status.st_mode, status.st_uid, content)
    return found


def _wrong(edits: Edits, rootfs: str, warnings: list[str]) -> list[str]:
    """What the container's own program would not find as it should. Leaves the process in the root (chroot)."""
    said = " ".join(warnings)
    wanted = {
        mount.target: _identity(mount.source) for mount in edits.mounts if mount.required or mount.target not in said
    }
    wanted |= {link.path: wanted[LIBRARY] for link in edits.links}
    wanted |= {device.path: _identity(device.source) for device in edits.devices}
    os.chroot(rootfs)
    os.chdir("/")
    wrong = [f"{path} is {_identity(path)}" for path, identity in wanted.items() if _identity(path) != identity]
    # A cache that lies on another mount than the root is not nvct's to write.
    if "/etc/ld.so.cache" not in said and b"libcuda.so.1\0" not in Path("/etc/ld.so.cache").read_bytes():
        wrong.append("the loader cache lacks libcuda.so.1")
    if MASK not in said and os.listdir(f"{MASK}/gpus") != [GPU]:
        wrong.append("the mask shows other GPUs")
    return wrong


def _identity(path: str) -> object:
    try:
        status = os.stat(path)
    except OSError as error:
        return str(error)
    return status.st_rdev or [status.st_dev, status.st_ino]
