"""SIGKILL at any moment of a start: the host is as it was, and the next start of the container is a whole one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nvct.inject.cgroup import cgroup_mounts, cgroup_path, folder_below
from nvct.node import cache
from nvct.sim import bundle as bundles
from tests.faults.conftest import Tally
from tests.support.expect import seen, wanted
from tests.support.faults import remove_cgroup
from tests.support.nodes import SimNode
from tests.support.runc import Start, StartFailed, hooks_of, is_running, kernel_hook, make_root, nvct_hook

pytestmark = pytest.mark.engine

DEVICES = ["0:3", "6"]
ENV = {"NVIDIA_VISIBLE_DEVICES": ",".join(DEVICES)}

# A shell that writes down how long the hook took, in nanoseconds.
TIMED = ["/bin/sh", "-c", 'begin=$(date +%s%N); "$@"; status=$?; echo $(($(date +%s%N) - begin)) >"$0"; exit $status']


class Host:
    """What a killed start must leave alone: mounts of the host, and the whole of a kept inventory."""

    def __init__(self, node: SimNode, folder: Path) -> None:
        self._node = node
        self._folder = folder

    def faults(self, kept: bytes | None) -> list[str]:
        """What is wrong now. `kept` is the inventory from before."""
        found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self._folder) in line]
        now = self._node.cache.read_bytes() if self._node.cache.exists() else None
        if now not in (kept, None) and cache.load(str(self._node.config)) is None:
            found.append(f"the inventory is torn: {now[-80:]!r}" if now else "the inventory is empty")
        if now is None and kept is not None:
            found.append("the inventory is gone")
        return found


def hook_time(start: Start, node: SimNode, folder: Path) -> float:
    """Seconds that the hook takes."""
    file = folder / "took"
    with start(node, ENV, hooks=[kernel_hook(node.path), nvct_hook(node.path, under=[*TIMED, str(file)])]):
        return int(file.read_text()) / 1e9


def check_next_start(start: Start, node: SimNode, rootfs: Path) -> list[str]:
    """The container starts with exactly its devices, and what it finds of the killed start does not show in it."""
    with start(node, ENV, rootfs=rootfs) as container:
        found, expected = seen(container, node), wanted(node, DEVICES)
        wrong = [
            what for what in ("nodes", "mounts", "opens", "sees", "proc", "strangers") if found[what] != expected[what]
        ]
        names = container.loader_names()
        wrong += [f"loader cache: {name}" for name, path in expected["names"].items() if names.get(name) != path]
        wrong += [
            path
            for path, text in expected["links"].items()
            if os.path.lexists(f"{container.root}{path}") and os.readlink(f"{container.root}{path}") != text
        ]
        wrong += [str(path) for path in rootfs.rglob(".*.nvct")]
    return wrong


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_a_hook_that_is_killed(
    own_dgx: SimNode,
    start: Start,
    static_programs: Path,
    tmp_path: Path,
    seed: int,
    tally: Tally,
    known: bool,
) -> None:
    with start(own_dgx, ENV):
        pass
    if not known:
        own_dgx.forget()
    longest = hook_time(start, own_dgx, tmp_path)
    chance = random.Random(f"{seed} hook {known}")
    outcomes, wrong, host = Counter[str](), [], Host(own_dgx, tmp_path)
    for number in range(15):
        rootfs = tmp_path / f"rootfs-{number}"
        make_root(rootfs, "debian", True, static_programs)
        if not known:
            own_dgx.forget()
        kept = own_dgx.cache.read_bytes() if known else None
        moment = chance.uniform(0, longest)
        killing = nvct_hook(own_dgx.path, under=[shutil.which("timeout") or "timeout", "-s", "KILL", f"{moment:.4f}"])
        outcome = "ended before it was killed"
        try:
            with start(own_dgx, ENV, rootfs=rootfs, hooks=[kernel_hook(own_dgx.path), killing]):
                pass
        except StartFailed:
            outcome = "killed"
        faults = host.faults(kept) + check_next_start(start, own_dgx, rootfs) + host.faults(kept)
        outcomes[outcome] += 1
        if faults:
            wrong.append(f"{outcome} after {moment:.4f} s: {faults}")
        shutil.rmtree(rootfs)
    tally.add(outcomes)
    assert wrong == []
    assert outcomes["killed"] > 0


def test_a_runtime_that_is_killed(
    own_dgx: SimNode, start: Start, static_programs: Path, tmp_path: Path, seed: int, tally: Tally
) -> None:
    with start(own_dgx, ENV):
        pass
    began = time.monotonic()
    with start(own_dgx, ENV):
        longest = time.monotonic() - began
    chance = random.Random(f"{seed} runtime")
    outcomes, wrong, host = Counter[str](), [], Host(own_dgx, tmp_path)
    for number in range(20):
        bundle = tmp_path / f"killed-{number}"
        make_bundle(bundle, own_dgx, static_programs)
        kept = own_dgx.cache.read_bytes()
        moment = chance.uniform(0, longest)
        outcomes[run_and_kill(bundle, moment)] += 1
        faults = host.faults(kept) + check_next_start(start, own_dgx, bundle / "rootfs") + host.faults(kept)
        if faults:
            wrong.append(f"runc killed after {moment:.4f} s: {faults}")
        shutil.rmtree(bundle)
    tally.add(outcomes)
    assert wrong == []
    assert outcomes["killed"] > 0


def make_bundle(bundle: Path, node: SimNode, programs: Path) -> None:
    make_root(bundle / "rootfs", "debian", True, programs)
    spec = bundles.config(["/usr/bin/sleep", "600"], ENV, hooks_of(node.path))
    bundles.write_config(bundle, spec)


def run_and_kill(bundle: Path, moment: float) -> str:
    """Start the container with runc, and kill that after so many seconds; whatever it leaves running is ended."""
    name = f"nvct-{bundle.parent.name}-{bundle.name}"
    runc = ["runc", "--root", str(bundle / "state")]
    started = subprocess.Popen(
        [*runc, "run", "-d", "--bundle", str(bundle), name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        started.wait(moment)
        outcome = "ended before it was killed"
    except subprocess.TimeoutExpired:
        started.kill()
        started.wait()
        outcome = "killed"
    finally:
        subprocess.run([*runc, "delete", "-f", name], capture_output=True)
        clean_up(bundle, name)
    return outcome


def clean_up(bundle: Path, name: str) -> None:
    """What an administrator does after a runtime that died: end what is left of the container, remove its cgroups.

    A hook that lost its runtime is let come to its end.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and (left := list(processes_of(bundle, name))):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL) if in_cgroup(pid, name) else None
        time.sleep(0.01)
    assert not left, f"still running: {left}"
    membership = Path("/proc/self/cgroup").read_text()
    for mount in cgroup_mounts(Path("/proc/self/mountinfo").read_text()):
        paths = filter(None, (cgroup_path(membership, controller) for controller in mount.controllers))
        parent = folder_below(mount, next(paths, "/"))
        if parent and Path(parent, name).exists():  # runc makes cgroups below its own
            remove_cgroup(Path(parent, name))


def in_cgroup(pid: int, name: str) -> bool:
    try:
        return name in Path(f"/proc/{pid}/cgroup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_of(bundle: Path, name: str) -> Iterator[int]:
    """Processes in the container, of its runtime, and its hooks."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (path / "cmdline").read_bytes()
            ours = name in (path / "cgroup").read_text() or os.fsencode(bundle.parent) in command
            if ours and is_running(int(path.name)):
                yield int(path.name)
