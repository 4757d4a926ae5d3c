"""podman on a simulated node, in a mount namespace of its own: its /run, and with it /var/run/cdi, is nobody else's."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.namespaces import MountNamespace
from tests.support.nodes import SimNode
from tests.support.runc import TREE, RuncContainer, StartFailed, kernel_hook

WRAPPER = TREE / "tests/programs/simulating_runc.py"


class Podman(MountNamespace):
    """`folder` is for all that podman keeps. Specs for it are put in place by `use`."""

    def __init__(self, folder: Path, node: SimNode) -> None:
        super().__init__("mount -t tmpfs tmpfs /run; mkdir -p /run/cdi /run/lock")
        runtime = folder / "runtime"
        hook = json.dumps(kernel_hook(node.path))
        runtime.write_text(f'#!/bin/sh\nexec {WRAPPER} {shlex.quote(hook)} "$@"\n')
        runtime.chmod(0o755)
        self._folder = folder
        self.cgroup = f"/nvct-podman-{self.pid}"
        self._options = [
            f"--root={folder}/root",
            f"--runroot={folder}/run",
            f"--tmpdir={folder}/tmp",
            "--cgroup-manager=cgroupfs",
            "--events-backend=file",
            f"--runtime={runtime}",
        ]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        # podman leaves the parent of its containers' cgroups.
        for parent in Path("/sys/fs/cgroup").glob(f"*{self.cgroup}"):
            for folder, _, _ in os.walk(parent, topdown=False):
                os.rmdir(folder)

    def use(self, spec: Path) -> None:
        """Have this spec, and no other."""
        self.run("sh", "-c", 'rm -f /run/cdi/*; cp "$1" /run/cdi/', "sh", str(spec))

    def podman(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self.prefix, "podman", *self._options, *words], capture_output=True, text=True)

    @contextmanager
    def container(self, rootfs: Path, *devices: str) -> Iterator[PodmanContainer]:
        """A running container with these CDI devices. Raises StartFailed."""
        options = [f"--device={device}" for device in devices]
        container = PodmanContainer(self, rootfs, options)
        try:
            yield container
        finally:
            self.podman("rm", "--force", "--time=0", container.name)


class PodmanContainer(RuncContainer):
    """One whose runtime is runc, so that it is looked at by way of that."""

    def __init__(self, podman: Podman, rootfs: Path, options: list[str]) -> None:
        self.rootfs = rootfs
        self.family = "debian"
        self.before = self.image()
        self.names_before = self.loader_names()
        self._runc = [*podman.prefix, "runc", "--root", "/run/runc"]
        name = f"nvct-{time.monotonic_ns()}"
        # The capability to make nodes of its own, by which a test sees what the device rules deny.
        options = ["--detach", "--name", name, "--network=none", "--cap-add=MKNOD", *options]
        options += [f"--cgroup-parent={podman.cgroup}"]
        done = podman.podman("run", *options, "--rootfs", str(rootfs), "/usr/bin/sleep", "600")
        self.name = name
        if done.returncode:
            podman.podman("rm", "--force", "--time=0", name)
            raise StartFailed(done.stderr)
        self.name = done.stdout.strip()
        self.pid = int(podman.podman("inspect", "--format", "{{.State.Pid}}", name).stdout)
