"""A container without a runtime: a mount namespace and a root folder in it, as they stand when hooks are called."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from nvct.inject import syscalls
from nvct.inject.carry import inject
from nvct.inject.rootfs import ConfinedRoot
from nvct.model import Edits
from tests.support.namespaces import MountNamespace
from tests.support.trees import Entry, read_tree

SET_UP = """
mount --bind "$1" "$1"
mount -t tmpfs -o mode=755 dev "$1/dev"
mount -t proc proc "$1/proc"
if [ -n "$2" ]; then mount --bind "$2" "$1/proc/driver"; fi
if [ "$3" = ro ]; then mount -o remount,bind,ro "$1"; fi
"""

# What kernels of an age lack: 5.11 mount_setattr, 5.1 all that takes mounts by descriptor, and openat2.
MISSING_CALLS = {
    "today": (),
    "5.11": ("mount_setattr",),
    "5.1": ("mount_setattr", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount", "openat2"),
}


class BareContainer(MountNamespace):
    """Use as a context manager. `rootfs` is the folder that becomes its root; `proc_driver` covers its /proc/driver."""

    def __init__(self, rootfs: Path, proc_driver: Path | None = None, read_only: bool = False) -> None:
        self.rootfs = rootfs
        for name in ("dev", "proc"):
            (rootfs / name).mkdir(parents=True, exist_ok=True)
        super().__init__(SET_UP, str(rootfs), str(proc_driver or ""), "ro" if read_only else "rw")

    @property
    def root(self) -> Path:
        """Its root folder as it sees it, reachable from here."""
        return Path(f"/proc/{self.pid}/root{self.rootfs}")

    def mounts(self) -> list[tuple[str, str]]:
        """(mount point below the root, options) of every mount in it, as in /proc/<pid>/mountinfo."""
        found = []
        for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[4].startswith(f"{self.rootfs}/"):
                found.append((fields[4].removeprefix(str(self.rootfs)), fields[5]))
        return sorted(found)

    def tree(self) -> dict[str, Entry]:
        """Every path below its root, /proc left out."""
        return read_tree(self.root, but=("proc",))

    def inject(
        self, edits: Edits, kernel: str = "today", prepare: Callable[[], object] | None = None
    ) -> tuple[str, tuple[str, ...]]:
        """Carry the edits out from a child process: (error message or "", warnings). `prepare` runs in the child
        first.
        """
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            answer: list[object] = ["the child died", []]
            try:
                forget_calls(MISSING_CALLS[kernel])
                if prepare:
                    prepare()
                root = ConfinedRoot.of_process(self.pid, str(self.rootfs))
                answer = ["", inject(edits, self.pid, root, os.uname().machine, cgroups=False)]
            except Exception as error:
                answer = [f"{type(error).__name__}: {error}", []]
                if not type(error).__module__.startswith("nvct"):
                    traceback.print_exc(file=sys.stderr)
            os.write(writer, json.dumps(answer).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as stream:
            told, warnings = json.loads(stream.read())
        os.waitpid(child, 0)
        return told, tuple(warnings)


def forget_calls(names: tuple[str, ...]) -> None:
    """From now on this process's kernel does not know these calls: they fail with ENOSYS, as an unknown number does."""
    for name in names:
        syscalls._number[name] = 1 << 20
