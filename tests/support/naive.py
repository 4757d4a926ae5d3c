"""An injector as one would write it at first: path strings, joined and used again. Only to be beaten by attacks.

What nvct withstands must be an attack, and that is shown by something that falls to it.
"""

from __future__ import annotations

import os

from nvct.inject import syscalls
from nvct.model import Edits


def inject_by_paths(edits: Edits, rootfs: str) -> None:
    """Carry the edits out in the mount namespace of the calling process. Raises OSError."""
    for device in edits.devices:
        _bind(device.source, rootfs + device.path)
    for mount in edits.mounts:
        _bind(mount.source, rootfs + mount.target)
    for link in edits.links:
        _make_parent(rootfs + link.path)
        if os.path.lexists(rootfs + link.path):
            os.unlink(rootfs + link.path)
        os.symlink(link.target, rootfs + link.path)
    _make_parent(f"{rootfs}/etc/ld.so.cache")
    with open(f"{rootfs}/etc/ld.so.cache", "wb") as stream:
        stream.write(b"glibc-ld.so.cache1.1")
    if os.path.isdir(f"{rootfs}/proc/driver/nvidia"):
        syscalls.mount("tmpfs", f"{rootfs}/proc/driver/nvidia", "tmpfs", 0, "", "mask")


def _bind(source: str, target: str) -> None:
    _make_parent(target)
    if not os.path.exists(target):
        with open(target, "w"):
            pass
    syscalls.mount(source, target, "", syscalls.MS_BIND, "", target)


def _make_parent(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
