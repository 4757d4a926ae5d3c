"""The real hook in real runc containers, with one of its system calls failing: all of it is done, or nothing."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.faults.conftest import Tally
from tests.support.expect import seen, wanted
from tests.support.faults import ERRORS, INFALLIBLE, UNSTEADY, Fault
from tests.support.nodes import SimNode
from tests.support.runc import RuncContainer, Start, kernel_hook, make_root, nvct_hook
from tests.support.trees import read_tree

pytestmark = pytest.mark.engine

ENV = {"NVIDIA_VISIBLE_DEVICES": "0:3,6", "NVIDIA_DRIVER_CAPABILITIES": "utility,video,display,compat32"}
DEVICES = ["0:3", "6"]
CAPABILITIES = ("utility", "video", "display", "compat32")

# The last steps of the hook, each of which has everything before it to undo; counted from the hook's first call.
LAST_STEPS = (
    Fault("move_mount", 3, "ENOSPC"),
    Fault("move_mount", 60, "ENOSPC"),
    Fault("symlinkat", 12, "ENOSPC"),
    Fault("renameat", 1, "ENOSPC"),
)
BY_CHANCE = 8

_CALL = re.compile(r"([a-z_0-9]+)\(")
_FIRST = "read(0, "  # the hook reads what its runtime tells it; all before is the interpreter's start


class Traced:
    """Starts containers whose hook runs under strace; its failure is hidden from the runtime, which would end them."""

    def __init__(self, strace: str, node: SimNode, start: Start, folder: Path) -> None:
        self._strace = strace
        self._node = node
        self._start = start
        self._trace, self._log = folder / "trace", folder / "log"

    def calls(self, prefix: list[str]) -> tuple[dict[str, int], dict[str, int]]:
        """How often the interpreter makes each call before the hook begins, and the hook after that."""
        with self._started([], prefix):
            pass
        names = [(match.group(1), line) for line in self.trace if (match := _CALL.match(line))]
        begin = next(at for at, (_, line) in enumerate(names) if line.startswith(_FIRST))
        before = Counter(name for name, _ in names[:begin])
        before["execve"] -= 1  # strace's own start of the hook, which it traces and does not count
        return before, Counter(name for name, _ in names[begin:])

    @property
    def trace(self) -> list[str]:
        return self._trace.read_text().splitlines()

    @property
    def said(self) -> str:
        return self._log.read_text()

    def _started(
        self, inject: list[str], prefix: list[str], rootfs: Path | None = None
    ) -> AbstractContextManager[RuncContainer]:
        under = ["/bin/sh", "-c", '"$@" 2>"$0"; true', str(self._log)]
        under += [self._strace, "-qq", "-o", str(self._trace), "-e", "trace=all", *inject]
        hooks = [kernel_hook(self._node.path), nvct_hook(self._node.path, under=under)]
        return self._start(self._node, ENV, hooks=hooks, prefix=prefix, rootfs=rootfs)

    def faults_of(self, fault: Fault, started: int, prefix: list[str], rootfs: Path) -> tuple[str, list[str]]:
        """The outcome of a start with this fault, and what is wrong with it."""
        before = read_tree(rootfs)
        inject = ["-e", f"inject={fault.call}:error={fault.error}:when={started + fault.number}"]
        with self._started(inject, prefix, rootfs) as container:
            found = seen(container, self._node)
        trace = self.trace
        hit = next((at for at, line in enumerate(trace) if "(INJECTED)" in line), -1)
        if hit < next(at for at, line in enumerate(trace) if line.startswith(_FIRST)):
            return "not reached", ["the call was not made that often by the hook"]
        complaint = [line for line in self.said.splitlines() if not line.startswith("nvct: warning: ")]
        if not complaint:
            expected = wanted(self._node, DEVICES, CAPABILITIES)
            unlike = [what for what in ("nodes", "opens", "sees", "proc") if found[what] != expected[what]]
            return "with a warning" if self.said else "complete", unlike
        faults = [f"{what}: {found[what]}" for what in ("nodes", "mounts", "opens", "links", "proc") if found[what]]
        faults += [f"left {path}" for path in read_tree(rootfs).items() ^ before.items()]
        return "undone", faults + ([] if len(complaint) == 1 else complaint)


def chosen(calls: Mapping[str, int], seed: int) -> Iterator[Fault]:
    yield from LAST_STEPS
    chance = random.Random(seed)
    names = sorted(calls.keys() - {*INFALLIBLE, *UNSTEADY, "exit_group"})
    for _ in range(BY_CHANCE):
        name = chance.choice(names)
        yield Fault(name, chance.randint(1, calls[name]), chance.choice(ERRORS))


def test_a_failing_call_in_a_real_hook(
    strace: str,
    dgx: SimNode,
    start: Start,
    cgroups: list[str],
    static_programs: Path,
    tmp_path: Path,
    seed: int,
    tally: Tally,
) -> None:
    traced = Traced(strace, dgx, start, tmp_path)
    with start(dgx, ENV):  # from now on the node is known
        pass
    before, calls = traced.calls(cgroups)
    outcomes, wrong = Counter[str](), []
    for number, fault in enumerate(chosen(calls, seed)):
        rootfs = tmp_path / f"rootfs-{number}"
        make_root(rootfs, "debian", True, static_programs)
        outcome, faults = traced.faults_of(fault, before.get(fault.call, 0), cgroups, rootfs)
        outcomes[outcome] += 1
        if faults:
            wrong.append(f"{fault}: {outcome}: {faults}; said {traced.said!r}")
    tally.add(outcomes)
    assert wrong == []
    assert outcomes["undone"] >= len(LAST_STEPS)
