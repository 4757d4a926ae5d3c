"""Real runc containers on a simulated node, with the hooks that an engine would give them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nvct.ldcache import parse
from nvct.sim import bundle as bundles
from tests.support.trees import Entry, read_tree

TREE = Path(__file__).resolve().parents[2]
HOOK = TREE / "hooks/nvidia-container-runtime-hook"
RUNTIME = TREE / "hooks/nvct-runtime"
PYTHON = "/usr/bin/python3"

# One entry of a stage of hooks in config.json.
Hook = Mapping[str, object]

# In a container: makes a node of its own and opens it, which is what a program does that wants a neighbour's GPU.
OPEN_DEVICE = "rm -f /dev/probe; mknod /dev/probe c {major} {minor} && : < /dev/probe"

# How a container gets what it asks for: by the prestart hook, or by the runtime that edits its spec.
BY_HOOK, BY_RUNTIME = "hook", "runtime"
CARRIERS = (BY_HOOK, BY_RUNTIME)

# ENXIO: the node is allowed, and no driver is behind it. EPERM: the device cgroup denies it.
ALLOWED, DENIED = "No such device or address", "Operation not permitted"

# The loader's flags of a cache entry: x86-64, arm64, 32-bit x86 (glibc 2.36, sysdeps/generic/ldconfig.h).
BITS = {0x0303: 64, 0x0A03: 64, 0x0003: 32}


class StartFailed(Exception):
    """The runtime refused to start the container; the text is what it said."""


class Look(NamedTuple):
    """What a container can do: the devices that its cgroup lets it open, and what nvidia-smi lists in it."""

    opens: set[tuple[int, int]]
    uuids: set[str]


class RuncContainer:
    """A container whose program sleeps. `prefix` is a command that enters the namespace where runc is to run, `runtime`
    the command that creates it in place of `runc`.
    """

    def __init__(
        self, bundle: Path, family: str = "debian", prefix: Sequence[str] = (), runtime: Sequence[str] = ("runc",)
    ) -> None:
        self.bundle = bundle
        self.family = family
        self.rootfs = Path(os.path.realpath(bundle / "rootfs"))
        self.pid = 0
        self.before = self.image()
        self.names_before = self.loader_names()
        self.name = f"nvct-{uuid.uuid4().hex[:12]}"
        options = ["--root", str(bundle / "state")]
        self._runc = [*prefix, "runc", *options]
        log = bundle / "runc.log"
        with log.open("wb") as output:  # not a pipe: the container's program would keep it open
            started = subprocess.run(
                [*prefix, *runtime, *options, "run", "-d", "--bundle", str(bundle), self.name],
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
        """End its program and remove it. Ended here, since runc waits a tenth of a second for that."""
        if self.pid and is_running(self.pid):
            os.kill(self.pid, signal.SIGKILL)
            while is_running(self.pid):
                time.sleep(0.001)
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

    def look(self, numbers: set[tuple[int, int]]) -> Look:
        """Which of the devices it can open, and the UUIDs that nvidia-smi lists in it."""
        asked = " ".join(f"{major}:{minor}" for major, minor in sorted(numbers))
        said, _, listing = self.sh(f"/usr/bin/open_devices {asked}; echo ---; nvidia-smi -L").partition("---")
        answers = dict(line.split(" ", 1) for line in said.splitlines())
        if len(answers) != len(numbers) or not {"yes", "no"}.issuperset(answers.values()):
            raise AssertionError(f"unexpected answers: {said}")
        allowed = [number.split(":") for number, answer in answers.items() if answer == "yes"]
        opens = {(int(major), int(minor)) for major, minor in allowed}
        return Look(opens, set(re.findall(r"UUID: (\S+)\)", listing)))

    def image(self) -> dict[str, Entry]:
        """Every path of its root file system as it lies on the host, without what is mounted in the container."""
        return read_tree(self.rootfs)

    def loader_names(self) -> dict[tuple[str, int], str]:
        """(name, bits) → path of every entry of its loader cache; none where that is no file."""
        path = self.rootfs / "etc/ld.so.cache"
        if not os.path.realpath(path).startswith(f"{self.rootfs}/"):
            return {}  # a hostile image's link, which leads to the host from here
        try:
            cache = parse(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError):
            return {}
        return {(entry.name, BITS[entry.flags]): entry.path for entry in cache.entries}

    def new_loader_names(self) -> dict[tuple[str, int], str]:
        """Those that its image had not, or had otherwise."""
        before = self.names_before
        return {key: path for key, path in self.loader_names().items() if before.get(key) != path}

    def devices_v1(self) -> set[str]:
        """The rules of its device cgroup, v1."""
        for line in Path(f"/proc/{self.pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "devices":
                return set(Path(f"/sys/fs/cgroup/devices{path}/devices.list").read_text().splitlines())
        raise AssertionError("no device cgroup v1")


def explained(config: Path, pid: int, *more: str) -> dict[str, Any]:
    """What `nvct explain --container` says of a process, under a node's settings."""
    command = [str(TREE / ".venv/bin/python"), str(TREE / "nvct/__main__.py"), "--config", str(config), "explain"]
    done = subprocess.run([*command, "--container", str(pid), "--json", *more], check=True, capture_output=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


# The fixture `start`: a node, the container's environment, and options of `runc_container`.
Start = Callable[..., AbstractContextManager[RuncContainer]]


def hooks_of(node: Path) -> dict[str, list[Hook]]:
    """What docker writes into config.json for --gpus: the node's hook, which plays the kernel and then calls nvct's."""
    path = f"{node}/hooks/{HOOK.name}"
    return {"prestart": [{"path": path, "args": [path, "prestart"]}]}


def kernel_hook(node: Path | str) -> Hook:
    """The kernel's part of a simulated node alone: containers see the node's /proc/driver; "" is this machine."""
    program = (
        f"import sys; sys.path.insert(0, {str(TREE)!r}); from nvct.sim.kernel import run_hook; "
        f"run_hook({str(node)!r}, '/bin/true', ['prestart'])"
    )
    return {"path": PYTHON, "args": [PYTHON, "-I", "-S", "-c", program]}


def nvct_hook(node: Path, log: Path | None = None, under: Sequence[str] = (), env: Sequence[str] = ()) -> Hook:
    """nvct's own hook alone. `log` gets its standard error, of which runtimes tell only when a hook fails; `under` is
    a command that runs it, as strace.
    """
    command = [*under, str(HOOK), "--config", f"{node}/config.yaml", "prestart"]
    if log:
        command = ["/bin/sh", "-c", 'exec "$@" 2>>"$0"', str(log), *command]
    return {"path": command[0], "args": command, "env": list(env)}


def nvct_runtime(node: Path, settings: Path | None = None) -> list[str]:
    """The command of nvct's runtime with the settings of a node, or with others."""
    return [str(RUNTIME), "--nvct-config", str(settings or f"{node}/config.yaml")]


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
    hooks: Sequence[Hook] | None = None,
    programs: Path | None = None,
    change: Callable[[dict[str, Any]], object] = lambda spec: None,
    carrier: str = BY_HOOK,
    settings: Path | None = None,
) -> Iterator[RuncContainer]:
    """A running container on the simulated node `node`, in a new bundle below `folder`, or with a root that exists.

    `programs`: a folder of static programs that a new root gets in /usr/bin. `hooks` are those of the spec in place of
    what the carrier needs. `change` may change its config.json as an engine does. `settings`: a file for the runtime in
    place of the node's. Raises StartFailed.
    """
    bundle = folder / f"bundle-{time.monotonic_ns()}"
    bundle.mkdir()
    if rootfs:
        os.symlink(rootfs, bundle / "rootfs")
    else:
        make_root(bundle / "rootfs", family, loader_cache, programs)
    usual = hooks_of(node) if carrier == BY_HOOK else {"prestart": [kernel_hook(node)]}
    stages = {"prestart": hooks} if hooks is not None else usual
    spec: dict[str, Any] = bundles.config(["/usr/bin/sleep", "600"], env, stages, read_only)
    spec["root"]["path"] = os.path.realpath(bundle / "rootfs")
    change(spec)
    bundles.write_config(bundle, spec)
    runtime = ["runc"] if carrier == BY_HOOK else nvct_runtime(node, settings)
    container = RuncContainer(bundle, family, prefix, runtime)
    try:
        yield container
    finally:
        container.delete()


def make_root(rootfs: Path, family: str, loader_cache: bool, programs: Path | None) -> None:
    bundles.make_rootfs(rootfs, family, loader_cache)
    for program in programs.iterdir() if programs else ():
        shutil.copy(program, rootfs / "usr/bin")
