"""Mount namespaces that tests prepare: a machine whose file systems are mounted otherwise than on this one."""

from __future__ import annotations

import subprocess
from typing import TypeVar

_Self = TypeVar("_Self", bound="MountNamespace")


class MountNamespace:
    """A mount namespace in which a shell script has mounted something: gone with it, whatever becomes of a test.

    Use as a context manager. `arguments` are the script's $1 and on. `pid` is a process that sleeps in it, and `prefix`
    the command that enters it.
    """

    def __init__(self, script: str, *arguments: str) -> None:
        script = f"set -e; {script}\necho ready; exec sleep 3600"
        command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", *arguments]
        self._sleeper = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._sleeper.stdout
        assert self._sleeper.stdout.readline() == b"ready\n"
        self.pid = self._sleeper.pid
        self.prefix = ["nsenter", "-t", str(self.pid), "-m"]

    def run(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sleeper.kill()
        self._sleeper.wait()
        assert self._sleeper.stdout
        self._sleeper.stdout.close()


class CgroupV2(MountNamespace):
    """One in which /sys/fs/cgroup is the unified hierarchy: runc takes its v2 path there."""

    def __init__(self) -> None:
        super().__init__("mount -t cgroup2 none /sys/fs/cgroup")
