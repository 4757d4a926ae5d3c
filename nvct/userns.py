"""The user namespace that this process runs in: whether it is the machine's own, and whose files can be trusted in it.

Rootless engines run hooks as "root" of a user namespace: an ordinary user of the host with other numbers. On the hook's
hot path. Facts: user_namespaces(7).
"""

from __future__ import annotations

import os

from nvct.trust import read_short

# PROC_USER_INIT_INO of linux/proc_ns.h: every kernel gives the first user namespace this inode.
_FIRST = 0xEFFFFFFD


def is_nested() -> bool:
    """Whether this process is in another user namespace than the machine's first, whatever its map.

    Device cgroups cannot be changed there, nor mounts that came from outside. Raises OSError without /proc.
    """
    return os.stat("/proc/self/ns/user").st_ino != _FIRST


def outer_uid() -> int:
    """The caller's user id as the namespace around it knows it: 1000 for the "root" that user 1000 has made.

    Its own id where the map does not tell.
    """
    uid = os.geteuid()
    try:
        rows = [[int(word) for word in line.split()] for line in read_short("/proc/self/uid_map").splitlines()]
    except OSError:
        return uid
    for inside, outside, count in rows:
        if inside <= uid < inside + count:
            return outside + uid - inside
    return uid
