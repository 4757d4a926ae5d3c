"""What a container's root file system looks like, as far as a plan depends on it."""

from __future__ import annotations

import os

from nvct.model import ContainerRoot

TYPE_CHECKING = False
if TYPE_CHECKING:
    from nvct.inject.rootfs import ConfinedRoot


def look(root: ConfinedRoot) -> ContainerRoot:
    lib, lib64 = _identity(root, "/usr/lib"), _identity(root, "/usr/lib64")
    return ContainerRoot(
        debian=root.exists("/etc/debian_version"),
        lib32=root.exists("/usr/lib32"),
        lib_is_lib64=lib is not None and lib == lib64,
    )


def _identity(root: ConfinedRoot, path: str) -> tuple[int, int] | None:
    try:
        descriptor = root.open(path)
    except OSError:
        return None
    status = os.fstat(descriptor)
    os.close(descriptor)
    return status.st_dev, status.st_ino
