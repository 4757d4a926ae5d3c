"""Paths below a driver root, their links followed as a program inside that root would follow them.

A driver root is often a container's file system (/run/nvidia/driver): an absolute link in it means a file of that root,
and `os.path.realpath` would answer with a file of the host.
"""

from __future__ import annotations

import errno
import os
import stat

_MOST_LINKS = 40  # the kernel's own limit for one path


def on_host(root: str, path: str) -> str:
    """Where `path`, absolute and written as seen below `root`, lies on this host."""
    return root.rstrip("/") + path


def resolve(root: str, path: str) -> str:
    """`path` below `root` with every link followed inside the root: absolute, and again written as seen below it.

    `..` at the top stays at the top, so the answer never leaves the root. Raises FileNotFoundError where a component
    is absent, NotADirectoryError where a file stands in the way, and OSError(ELOOP) after 40 links.
    """
    waiting = path.split("/")[::-1]
    done: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop()
        if part in ("", "."):
            continue
        if part == "..":
            del done[-1:]
            continue
        here = on_host(root, "/" + "/".join([*done, part]))
        mode = os.lstat(here).st_mode
        if not stat.S_ISLNK(mode):
            done.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), on_host(root, path))
        target = os.readlink(here)
        if target.startswith("/"):
            done.clear()
        waiting.extend(target.split("/")[::-1])
    return "/" + "/".join(done)
