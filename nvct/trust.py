"""Who can have written what nvct acts on: its own code, and its settings.

A hook is run by root on every container start, so whoever can change a module of it is root. It looks before it
imports any other module, so this one imports nothing. That is no help against somebody who has been there already,
and may have changed this file too: it makes an unsafe installation fail on its first day, and says what to do.
"""

from __future__ import annotations

import os
from stat import S_IFDIR, S_IFREG, S_ISDIR, S_ISLNK, S_ISVTX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

OTHERS_CAN_WRITE = 0o022
_KIND_AND_OTHERS = 0o170000 | OTHERS_CAN_WRITE

# What hooks import from.
_ROOMS = ("hooks", "nvct", "nvct/cdi", "nvct/inject", "nvct/node", "nvct/oci", "nvct/plan")


def why_code_is_unsafe(tree: str, versions: list[tuple[str, int, int, int]] | None = None) -> str:
    """Why the caller should not run the code in this folder (a resolved path), and what to do; "" when it may.

    The code and every folder above it must belong to root or to the caller, and nobody else may write there. Takes a
    quarter of a millisecond. `versions` gets what changes whenever a file of the code does: path, size in bytes, mtime
    and ctime in nanoseconds.
    """
    seen = [] if versions is None else versions
    return _why_way_is_unsafe(tree) or _first(_why_room_is_unsafe(f"{tree}/{room}", seen) for room in _ROOMS)


def why_compiled_code_is_unsafe(tree: str) -> str:
    """The same of what Python keeps of the code, for whoever is about to run that."""
    folders = [f"{tree}/{room}/__pycache__" for room in _ROOMS]
    return _first(_why_room_is_unsafe(folder, []) for folder in folders if os.path.isdir(folder))


def why_environment_is_unsafe(environment: str) -> str:
    """The same of a virtual environment: its programs and packages run as root when a hook discovers the node."""
    real = os.path.realpath(environment)
    folders = [f"{real}/bin", *(f"{real}/lib/{name}/site-packages" for name in os.listdir(f"{real}/lib"))]
    return _first(map(_why_way_is_unsafe, folders))


def why_unsafe(path: str, status: os.stat_result) -> str:
    """Why a stranger can have written the file or folder, and what to do about it; "" when none can.

    `status` is of the path itself, not of what a link leads to.
    """
    if S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link; put the file itself there"
    stranger = status.st_uid not in (0, os.geteuid()) and status.st_uid not in trusted_owners()
    if not stranger and not status.st_mode & OTHERS_CAN_WRITE:
        return ""
    from shlex import quote  # slow, and only messages need it

    if stranger:
        return (
            f"{path} belongs to uid {status.st_uid}, expected root or uid {os.geteuid()}; run: chown root {quote(path)}"
        )
    return (
        f"{path} has mode {status.st_mode & 0o7777:04o}, which lets others change it or what is in it; "
        f"run: chmod go-w {quote(path)}"
    )


def is_sticky(status: os.stat_result) -> bool:
    """Whether this is a folder like /tmp, where nobody can replace or rename what is another's."""
    return S_ISDIR(status.st_mode) and bool(status.st_mode & S_ISVTX)


def trusted_owners() -> set[int]:
    """Root and the caller. In a user namespace the host's root shows up as the overflow uid, and so does every other
    user of the host: what belongs to that id can be trusted only where root alone can put files (user_namespaces(7)).
    """
    owners = {0, os.geteuid()}
    try:
        if read_short("/proc/self/uid_map").split() != [b"0", b"0", b"4294967295"]:
            owners.add(int(read_short("/proc/sys/kernel/overflowuid")))
    except OSError:
        pass  # without /proc the host's root cannot be recognised, and is not trusted
    return owners


def read_short(path: str) -> bytes:
    """A short file of the kernel's. `open` would look up a codec, and ask five times what kind of file this is."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 1 << 12)
    finally:
        os.close(descriptor)


def _first(reasons: Iterable[str]) -> str:
    return next(filter(None, reasons), "")


def _why_way_is_unsafe(path: str) -> str:
    """Why the folder, or one above it, is unsafe. What is to be trusted may lie in a folder like /tmp, not be one."""
    reason = why_unsafe(path, os.stat(path))
    while not reason and path != "/":
        path = os.path.dirname(path)
        status = os.stat(path)
        if not (is_sticky(status) and (status.st_uid == 0 or status.st_uid in trusted_owners())):
            reason = why_unsafe(path, status)
    return reason


def _why_room_is_unsafe(folder: str, versions: list[tuple[str, int, int, int]]) -> str:
    for name in (".", *os.listdir(folder)):
        path = f"{folder}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue  # of another start, which has just put it under its own name
        kind = status.st_mode & _KIND_AND_OTHERS
        if kind != S_IFDIR:
            versions.append((path, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
        # Nearly always so, and there are sixty of them at every start.
        if status.st_uid == 0 and kind in (S_IFREG, S_IFDIR):
            continue
        reason = why_unsafe(folder if name == "." else path, status)
        if reason:
            return reason
    return ""
