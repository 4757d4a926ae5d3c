"""Real runc containers on a simulated node, with the hooks that an engine would give them."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from nvct.sim import bundle as bundles

# In a container: makes a node of its own and opens it, which is what a program does that wants a neighbour's GPU.
OPEN_DEVICE = "rm -f /dev/probe; mknod /dev/probe c {major} {minor} && : < /dev/probe"

# ENXIO: the node is allowed, and no driver is behind it. EPERM: the device cgroup denies it.
ALLOWED, DENIED = "No such device or address", "Operation not permitted"


class StartFailed(Exception):
    """The runtime refused to start the container; the text is what it said."""


class CgroupV2:
    """A mount namespace in which /sys/fs/cgroup is the unified hierarchy: runc takes its v2 path there."""

    def __init__(self) -> None:
        script = "mount -t cgroup2 none /sys/fs/cgroup && echo ready && exec sleep 3600"
        self._sleeper = subprocess.Popen(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", script], stdout=subprocess.PIPE
        )
        assert self._sleeper.stdout
        assert self._sleeper.stdout.readline() == b"ready\n"
        self.prefix = ["nsenter", "-t", str(self._sleeper.pid), "-m"]

    def close(self) -> None:
        self._sleeper.kill()
        self._sleeper.wait()
        assert self._sleeper.stdout
        self._sleeper.stdout.close()


class RuncContainer:
    """A container whose program sleeps. `prefix` is a command that enters the namespace where runc is to run."""

    def __init__(self, bundle: Path, prefix: Sequence[str] = ()) -> None:
        self.bundle = bundle
        self.name = f"nvct-{uuid.uuid4().hex[:12]}"
        self._runc = [*prefix, "runc", "--root", str(bundle / "state")]
        log = bundle / "runc.log"
        with log.open("wb") as output:  # not a pipe: the container's program would keep it open
            started = subprocess.run(
                [*self._runc, "run", "-d", "--bundle", str(bundle), self.name],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        if started.returncode:
            self.delete()
            raise StartFailed(log.read_text())
        state = subprocess.run([*self._runc, "state", self.name], check=True, capture_output=True)
        self.pid = int(json.loads(state.stdout)["pid"])

    def delete(self) -> None:
        subprocess.run([*self._runc, "delete", "-f", self.name], capture_output=True)

    @property
    def root(self) -> Path:
        return Path(f"/proc/{self.pid}/root")

    def run(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program in the container."""
        return subprocess.run([*self._runc, "exec", self.name, *args], capture_output=True, text=True, check=check)

    def sh(self, script: str) -> str:
        """What a shell script in the container prints, errors included."""
        done = self.run("/usr/bin/sh", "-c", f"{{ {script}\n}} 2>&1", check=False)
        return done.stdout + done.stderr

    def opens(self, major: int, minor: int) -> bool:
        """Whether the device cgroup lets the container read the device, by a node of the container's own making."""
        said = self.sh(OPEN_DEVICE.format(major=major, minor=minor))
        if DENIED in said:
            return False
        if ALLOWED in said or said == "":
            return True
        raise AssertionError(f"unexpected answer: {said}")

    def mounts(self) -> dict[str, set[str]]:
        """Mount point → options, as the container's program sees them."""
        lines = Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines()
        return {fields[4]: set(fields[5].split(",")) for fields in map(str.split, lines)}

    def devices_v1(self) -> set[str]:
        """The rules of its device cgroup, v1."""
        for line in Path(f"/proc/{self.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "devices":
                return set(Path(f"/sys/fs/cgroup/devices{path}/devices.list").read_text().splitlines())
        raise AssertionError("no device cgroup v1")


def hooks_of(node: Path) -> dict[str, list[dict[str, object]]]:
    """What docker writes into config.json for --gpus: the node's hook, which plays the kernel and then calls nvct's."""
    path = f"{node}/hooks/nvidia-container-runtime-hook"
    return {"prestart": [{"path": path, "args": [path, "prestart"]}]}


@contextmanager
def runc_container(
    folder: Path,
    node: Path,
    env: Mapping[str, str],
    family: str = "debian",
    loader_cache: bool = True,
    read_only: bool = False,
    prefix: Sequence[str] = (),
    rootfs: Path | None = None,
) -> Iterator[RuncContainer]:
    """A running container on the simulated node `node`, in a new bundle below `folder` (or with a root that exists)."""
    bundle = folder / f"bundle-{time.monotonic_ns()}"
    bundle.mkdir()
    if rootfs:
        os.symlink(rootfs, bundle / "rootfs")
    else:
        bundles.make_rootfs(bundle / "rootfs", family, loader_cache)
    spec = bundles.config(["/usr/bin/sleep", "600"], env, hooks_of(node), read_only)
    spec["root"]["path"] = os.path.realpath(bundle / "rootfs")  # type: ignore[index]
    bundles.write_config(bundle, spec)
    container = RuncContainer(bundle, prefix)
    try:
        yield container
    finally:
        container.delete()
