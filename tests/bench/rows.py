"""What is measured: hook processes alone, and whole containers with and without the hook.

Every run has a container of its own, made before and looked at after the measured part: a hook that finds its mount
points and links in place has less to do, and nobody shall measure a hook that does nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from nvct import ldcache
from nvct.sim.bundle import config as container
from nvct.sim.bundle import make_rootfs, write_config
from tests.support.bare import BareContainer
from tests.support.nodes import SimNode
from tests.support.runc import HOOK, kernel_hook, nvct_hook

PYTHON = "/usr/bin/python3"
CGROUPS = Path("/sys/fs/cgroup/devices")
NOT_IN_CACHE = "libcuda.so.1"
LIBRARIES = 20_000

# In a container under runc: the nodes that it has.
LIST_NODES = 'cd /dev && for node in nvidia* nvidia-caps/*; do if [ -c "$node" ]; then echo "$node"; fi; done'


class Case(NamedTuple):
    """A container that asks for `env` on a node, and the nodes that it must get, below /dev."""

    key: str
    title: str
    env: dict[str, str]
    nodes: frozenset[str]
    node: SimNode
    many_libraries: bool = False


class Run(NamedTuple):
    """One run, ready: the command, the file that its standard input has, and what looks at its work afterwards.

    `check` gets what the command wrote to standard output.
    """

    command: list[str]
    stdin: Path
    check: Callable[[str], None]


class Row(NamedTuple):
    """What is measured `repeats` times a round. `ready` makes and in the end removes what one run needs."""

    name: str
    repeats: int
    ready: Callable[[], object]


class Workshop:
    """Makes the rows' containers: whole ones below `folder`, those for the hook alone below `memory`, on a tmpfs.

    To make a file or a link on a disk's file system takes longer than all else about it, and is not the hook's doing.
    """

    def __init__(self, folder: Path, memory: Path) -> None:
        self._folder = folder
        self._memory = memory
        self._image = folder / "image"
        self._large_image = folder / "large-image"
        self._nothing = folder / "nothing"
        self._nothing.touch()
        make_rootfs(self._image)
        make_rootfs(self._large_image)
        cache = self._large_image / "etc/ld.so.cache"
        cache.write_bytes(_with_many_libraries(cache.read_bytes()))

    @contextmanager
    def yardstick(self) -> Iterator[Run]:
        yield Run([PYTHON, "-I", "-S", "-c", "pass"], self._nothing, _expect_nothing)

    @contextmanager
    def hook_alone(self, case: Case) -> Iterator[Run]:
        """The hook's process as a runtime calls it, on a container without a runtime."""
        with ExitStack() as stack:
            bundle = stack.enter_context(self._bundle(case, self._memory))
            rootfs = bundle / "rootfs"
            bare = stack.enter_context(BareContainer(rootfs, case.node.path / "proc/driver"))
            cgroup = stack.enter_context(_device_cgroup(bare.pid)) if CGROUPS.is_dir() else None
            write_config(bundle, container(["true"], case.env, {}))
            state = bundle / "state.json"
            state.write_text(_state(bare.pid, bundle))
            hook = [str(HOOK), "--config", str(case.node.config), "prestart"]

            def check(_output: str) -> None:
                _expect(_nodes_below(bare.root / "dev"), case.nodes)
                rules = (cgroup / "devices.list").read_text() if cgroup else ""
                for node in case.nodes if cgroup else ():
                    number = os.stat(bare.root / "dev" / node).st_rdev
                    assert f"c {os.major(number)}:{os.minor(number)} rw" in rules, f"{node} is not allowed"
                names = {entry.name for entry in ldcache.parse((rootfs / "etc/ld.so.cache").read_bytes()).entries}
                assert (NOT_IN_CACHE in names) == bool(case.nodes), "the loader cache is wrong"

            yield Run(hook, state, check)

    @contextmanager
    def started(self, case: Case, hooked: bool) -> Iterator[Run]:
        """`runc run` of a container that says which nodes it has.

        The node is simulated, so its containers need a stand-in for the kernel's part of the driver, /proc/driver: a
        first prestart hook which is not nvct's. It runs with and without nvct's hook, and so drops out.
        """
        hooks = [kernel_hook(case.node.path)] if case.nodes else []
        if hooked:
            hooks.append(nvct_hook(case.node.path))
        expected = case.nodes if hooked else frozenset()
        with self._bundle(case, self._folder) as bundle:
            write_config(bundle, container(["/usr/bin/sh", "-c", LIST_NODES], case.env, {"prestart": hooks}))
            runc = shutil.which("runc") or "runc"
            command = [runc, "--root", str(self._folder / "runc"), "run", "--bundle", str(bundle), bundle.name]
            yield Run(command, self._nothing, lambda output: _expect(frozenset(output.split()), expected))

    @contextmanager
    def _bundle(self, case: Case, folder: Path) -> Iterator[Path]:
        bundle = Path(tempfile.mkdtemp(prefix="nvct-bench-", dir=folder))
        image = self._large_image if case.many_libraries else self._image
        shutil.copytree(image, bundle / "rootfs", symlinks=True)
        try:
            yield bundle
        finally:
            shutil.rmtree(bundle)


@contextmanager
def memory_folder(folder: Path) -> Iterator[Path]:
    """A tmpfs on the new folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "nvct-bench", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _state(pid: int, bundle: Path) -> str:
    """As runc writes it."""
    state = {"ociVersion": "1.0.2", "id": bundle.name, "status": "creating", "pid": pid, "bundle": str(bundle)}
    return json.dumps(state, separators=(",", ":"))


def _with_many_libraries(cache: bytes) -> bytes:
    flags = ldcache.flags_for(os.uname().machine, 64)
    names = [f"libexample-{number:05}.so.{number % 7}" for number in range(LIBRARIES)]
    return ldcache.merge(cache, [(name, f"/usr/lib/example/{name}", flags) for name in names])


@contextmanager
def _device_cgroup(pid: int) -> Iterator[Path]:
    """A cgroup as runc makes it for a container: the process may make nodes, and open none."""
    folder = CGROUPS / f"nvct-bench-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        (folder / "devices.deny").write_text("a")
        (folder / "devices.allow").write_text("c *:* m")
        (folder / "cgroup.procs").write_text(str(pid))
        yield folder
    finally:
        for member in (folder / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(member)
        folder.rmdir()


def _nodes_below(dev: Path) -> frozenset[str]:
    found = [path.relative_to(dev) for pattern in ("nvidia*", "nvidia-caps/*") for path in dev.glob(pattern)]
    return frozenset(str(path) for path in found if (dev / path).is_char_device())


def _expect(found: frozenset[str], expected: frozenset[str]) -> None:
    assert found == expected, f"the container has {sorted(found)}, expected {sorted(expected)}"


def _expect_nothing(output: str) -> None:
    assert output == ""
