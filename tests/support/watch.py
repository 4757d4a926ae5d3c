"""Counts how often a file is opened, and so how often NVML is initialised, by whichever process, with inotify(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

from tests.support.nodes import SimNode

_OPEN, _CLOSE = 0x20, 0x10
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows: none, since a file is watched


class Opens:
    """Use as a context manager; `count` tells the opens since the last call."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        # Closing is watched too: of two equal events in a row the kernel would tell once.
        if self._descriptor < 0 or libc.inotify_add_watch(self._descriptor, os.fsencode(path), _OPEN | _CLOSE) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))

    def __enter__(self) -> Opens:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def count(self) -> int:
        try:
            events = os.read(self._descriptor, 1 << 20)
        except BlockingIOError:
            return 0
        return sum(bool(mask & _OPEN) for _, mask, _, _ in _EVENT.iter_unpack(events))


def nvml_starts(node: SimNode) -> Opens:
    """The simulated NVML reads this file each time it is initialised."""
    return Opens(node.path / "proc/driver/nvct-sim/node")
