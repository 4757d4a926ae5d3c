"""What is measured: hook processes alone, whole containers with and without the hook, and the other carriers.

Every run has a container of its own, made before and looked at after the measured part: a hook that finds its mount
points and links in place has less to do, and nobody shall measure a hook that does nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import yaml

from nvct import ldcache, ldmerge
from nvct.sim.bundle import config as container
from nvct.sim.bundle import make_rootfs, write_config
from tests.support.bare import BareContainer
from tests.support.nodes import SimNode
from tests.support.runc import HOOK, TREE, Hook, is_running, kernel_hook, nvct_hook, nvct_runtime

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
    """What is measured `repeats` times a round. `ready` makes and in the end removes what one run needs.

    `first`: it goes before everything else on the machine, at real-time priority.
    """

    name: str
    repeats: int
    ready: Callable[[], AbstractContextManager[Run]]
    first: bool = False


class Workshop:
    """Makes the rows' containers below `folder`, which is on a tmpfs: to make a file or a link on a disk's file system
    takes longer than all else about it, and is not the hook's doing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._image = folder / "image"
        self._large_image = folder / "large-image"
        self._nothing = folder / "nothing"
        self._nothing.touch()
        make_rootfs(self._image)
        make_rootfs(self._large_image)
        cache = self._large_image / "etc/ld.so.cache"
        cache.write_bytes(_with_many_libraries(cache.read_bytes()))

    @contextmanager
    def python(self, program: str) -> Iterator[Run]:
        """The yardstick, where the program is `pass`."""
        yield Run([PYTHON, "-I", "-S", "-c", program], self._nothing, _expect_nothing)

    @contextmanager
    def command(self, node: SimNode, arguments: list[str], check: Callable[[str], None]) -> Iterator[Run]:
        """A command of `nvct` on a node."""
        nvct = [sys.executable, "-I", str(TREE / "nvct/__main__.py"), "--config", str(node.config)]
        yield Run([*nvct, *arguments], self._nothing, check)

    @contextmanager
    def hook_alone(self, case: Case) -> Iterator[Run]:
        """The hook's process as a runtime calls it, on a container without a runtime."""
        with ExitStack() as stack:
            bundle = stack.enter_context(self._bundle(case))
            rootfs = bundle / "rootfs"
            bare = stack.enter_context(BareContainer(rootfs, case.node.path / "proc/driver"))
            if CGROUPS.is_dir():
                stack.enter_context(_device_cgroup(bare.pid))
            write_config(bundle, container(["true"], case.env, {}))
            state = bundle / "state.json"
            state.write_text(_state(bare.pid, bundle))
            hook = [str(HOOK), "--config", str(case.node.config), "prestart"]
            yield Run(hook, state, lambda _: _expect_given(bare.pid, bare.root, case.nodes))

    @contextmanager
    def started(self, case: Case, hooked: bool) -> Iterator[Run]:
        """`runc run` of a container that says which nodes it has.

        The node is simulated, so its containers need a stand-in for the kernel's part of the driver, /proc/driver: a
        first prestart hook which is not nvct's. It runs with and without nvct's hook, and so drops out.
        """
        hooks = _kernel(case)
        if hooked:
            hooks.append(nvct_hook(case.node.path))
        expected = case.nodes if hooked else frozenset()
        with self._bundle(case) as bundle:
            write_config(bundle, container(["/usr/bin/sh", "-c", LIST_NODES], case.env, {"prestart": hooks}))
            command = [*self._runtime(case, False), "run", "--bundle", str(bundle), bundle.name]
            yield Run(command, self._nothing, lambda output: _expect(frozenset(output.split()), expected))

    @contextmanager
    def created(self, case: Case, through: bool) -> Iterator[Run]:
        """`create` of a container whose program is never started, by runc or `through` nvct-runtime."""
        expected = case.nodes if through else frozenset()
        with self._bundle(case) as bundle:
            write_config(bundle, container(["true"], case.env, {"prestart": _kernel(case)}))
            pid_file = bundle / "pid"
            create = [*self._runtime(case, through), "create", "--bundle", str(bundle), "--pid-file", str(pid_file)]

            def check(_output: str) -> None:
                pid = int(pid_file.read_text())
                _expect_given(pid, Path(f"/proc/{pid}/root"), expected)

            try:
                yield Run([*create, bundle.name], self._nothing, check)
            finally:
                if pid_file.exists():
                    _end(int(pid_file.read_text()))
                delete = [*self._runtime(case, False), "delete", "--force", bundle.name]
                subprocess.run(delete, check=True, capture_output=True)

    @contextmanager
    def state(self, case: Case, through: bool) -> Iterator[Run]:
        """`state` of a container that nvct-runtime has created, by runc or `through` nvct-runtime."""
        with self.created(case, through=True) as creation:
            # Its program, which is not started, keeps what it gets as standard output: so that is no pipe.
            subprocess.run(creation.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
            creation.check("")
            name = creation.command[-1]

            def check(output: str) -> None:
                state = json.loads(output)
                assert (state["id"], state["status"]) == (name, "created"), output

            yield Run([*self._runtime(case, through), "state", name], self._nothing, check)

    def _runtime(self, case: Case, through: bool) -> list[str]:
        """The command of nvct-runtime, or of the runc that it would call."""
        command = nvct_runtime(case.node.path) if through else [shutil.which("runc") or "runc"]
        return [*command, "--root", str(self._folder / "runc")]

    @contextmanager
    def _bundle(self, case: Case) -> Iterator[Path]:
        bundle = Path(tempfile.mkdtemp(prefix="nvct-bench-", dir=self._folder))
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
    return ldmerge.merge(cache, [(name, f"/usr/lib/example/{name}", flags) for name in names])


def _kernel(case: Case) -> list[Hook]:
    return [kernel_hook(case.node.path)] if case.nodes else []


def _end(pid: int) -> None:
    """End a container's program: runc would wait a tenth of a second for that."""
    os.kill(pid, signal.SIGKILL)
    while is_running(pid):
        time.sleep(0.001)


@contextmanager
def _device_cgroup(pid: int) -> Iterator[None]:
    """A cgroup as runc makes it for a container: the process may make nodes, and open none."""
    folder = CGROUPS / f"nvct-bench-{uuid.uuid4().hex}"
    folder.mkdir()
    try:
        (folder / "devices.deny").write_text("a")
        (folder / "devices.allow").write_text("c *:* m")
        (folder / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        for member in (folder / "cgroup.procs").read_text().split():
            (CGROUPS / "cgroup.procs").write_text(member)
        folder.rmdir()


def expect_devices(spec: str, nodes: dict[str, frozenset[str]]) -> None:
    """The CDI spec, in YAML, gives each of these devices these nodes, besides what it gives every container."""
    devices = yaml.load(spec, yaml.CSafeLoader)["devices"]
    found = {device["name"]: device["containerEdits"].get("deviceNodes", ()) for device in devices}
    for name, expected in nodes.items():
        paths = (node["path"].removeprefix("/dev/") for node in found[name])
        _expect(frozenset(path for path in paths if path.startswith("nvidia")), expected)


def expect_listed(table: str, names: set[str]) -> None:
    """`nvct list` names these GPUs and MIG devices, below the line about the driver and the headings."""
    listed = {line.split()[0] for line in table.splitlines()[2:]}
    assert listed == names, f"`nvct list` names {sorted(listed)}, expected {sorted(names)}"


def _expect_given(pid: int, root: Path, nodes: frozenset[str]) -> None:
    """The container of the process, whose root folder is `root`, has these nodes and no others, may open them (seen in
    a device cgroup v1), and its loader finds the driver's libraries where it has any.
    """
    _expect(_nodes_below(root / "dev"), nodes)
    rules = _device_rules(pid) if CGROUPS.is_dir() else ""
    for node in nodes if rules else ():
        number = os.stat(root / "dev" / node).st_rdev
        assert f"c {os.major(number)}:{os.minor(number)} rw" in rules, f"{node} is not allowed"
    names = {entry.name for entry in ldcache.parse((root / "etc/ld.so.cache").read_bytes()).entries}
    assert (NOT_IN_CACHE in names) == bool(nodes), "the loader cache is wrong"


def _device_rules(pid: int) -> str:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "devices":
            return Path(f"{CGROUPS}{path}/devices.list").read_text()
    raise AssertionError(f"process {pid} has no device cgroup")


def _nodes_below(dev: Path) -> frozenset[str]:
    found = [path.relative_to(dev) for pattern in ("nvidia*", "nvidia-caps/*") for path in dev.glob(pattern)]
    return frozenset(str(path) for path in found if (dev / path).is_char_device())


def _expect(found: frozenset[str], expected: frozenset[str]) -> None:
    assert found == expected, f"the container has {sorted(found)}, expected {sorted(expected)}"


def _expect_nothing(output: str) -> None:
    assert output == ""
