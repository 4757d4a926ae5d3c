"""What a container's root file system looks like, as far as a plan depends on it."""

from __future__ import annotations

import errno
import os

from nvct.inject import syscalls
from nvct.inject.compat import find_compat
from nvct.inject.rootfs import NOT_THERE
from nvct.model import ContainerRoot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.rootfs import ConfinedRoot


# What musl's loader searches when its file does not say otherwise (musl, ldso/dynlink.c).
_MUSL_FOLDERS = "/lib:/usr/local/lib:/usr/lib\n"
_MOST_TEXT = 1 << 16
# glibc's loader, as programs name it, on the machines that nvct knows.
_GLIBC_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")

# Programs and libraries that show for which machine an image is: nearly every image has one of them.
_TELLING = (
    "/bin/sh",
    "/lib64/libc.so.6",
    "/usr/lib64/libc.so.6",
    "/lib/libc.so.6",
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/lib/aarch64-linux-gnu/libc.so.6",
)
# e_machine of an ELF header, the 19th and 20th byte. Files for 32-bit programs tell nothing about the others.
_MACHINES = {62: "x86_64", 183: "aarch64", 21: "ppc64le", 22: "s390x", 243: "riscv64"}


def look_as_its_root(root: ConfinedRoot, pid: int) -> ContainerRoot:
    """What `look` finds with the rights of root in the container of process `pid`."""
    owner = os.stat(f"/proc/{pid}")
    return look_as(root, owner.st_uid, owner.st_gid)


def look_as(root: ConfinedRoot, uid: int, gid: int) -> ContainerRoot:
    """What `look` finds with the rights of root in the container, whose ids on the host these are.

    A link of the image can lead to a volume that root of a user namespace may not read: nvct reads it for nobody.
    """
    syscalls.set_file_owner(uid, gid)
    try:
        return look(root)
    finally:
        syscalls.set_file_owner(os.geteuid(), os.getegid())


def look(root: ConfinedRoot) -> ContainerRoot:
    lib, lib64 = _identity(root, "/usr/lib"), _identity(root, "/usr/lib64")
    return ContainerRoot(
        debian=root.exists("/etc/debian_version"),
        lib32=root.exists("/usr/lib32"),
        lib_is_lib64=lib is not None and lib == lib64,
        compat=find_compat(root),
        musl=_musl(root),
        architecture=_architecture(root),
    )


def _identity(root: ConfinedRoot, path: str) -> tuple[int, int] | None:
    try:
        descriptor = root.open(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return None
    status = os.fstat(descriptor)
    os.close(descriptor)
    return status.st_dev, status.st_ino


def _musl(root: ConfinedRoot) -> str | None:
    architecture = os.uname().machine
    if not root.exists(f"/lib/ld-musl-{architecture}.so.1") or any(map(root.exists, _GLIBC_LOADERS)):
        return None  # musl beside glibc is for developers, and no program of the image's own needs it
    listed = _start_of(root, f"/etc/ld-musl-{architecture}.path", _MOST_TEXT)
    try:
        return _MUSL_FOLDERS if listed is None else listed.decode()
    except UnicodeDecodeError:
        return None  # which could not be written back as it was


def _architecture(root: ConfinedRoot) -> str:
    for path in _TELLING:
        header = _start_of(root, path, 20)
        if header and header.startswith(b"\x7fELF") and len(header) == 20:
            return _MACHINES.get(int.from_bytes(header[18:20], "big" if header[5] == 2 else "little"), "")
    return ""


def _start_of(root: ConfinedRoot, path: str, most: int) -> bytes | None:
    """The first bytes of a file; None where none can be read: there is no file, or none that a program could use."""
    try:
        anchor = root.open(path)
    except OSError as error:
        if error.errno not in NOT_THERE:
            raise
        return None
    try:
        return root.read_start(anchor, path, most)
    except OSError as error:
        if error.errno not in (*NOT_THERE, errno.EINVAL):
            raise
        return None
    finally:
        os.close(anchor)
