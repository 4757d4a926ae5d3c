"""What nvct costs at a container start: its hook, its runtime, and CDI specs (`make bench`).

The unit is the time that Python takes to start and do nothing, `python3 -I -S -c pass`, measured in the same run: the
machine's own speed drops out of the figures. Every round runs all rows in a new random order, since a start after one
with many mounts pays for their teardown. All are whole processes; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nvct.edits import HOOK_ENV
from nvct.record import replace
from nvct.sim.profiles import spec_from_profile
from nvct.sim.spec import NodeSpec, NvmlBehaviour
from tests.bench import report
from tests.bench.rows import (
    CGROUPS,
    PYTHON,
    Case,
    Row,
    Run,
    Workshop,
    expect_devices,
    expect_listed,
    memory_folder,
)
from tests.support.nodes import DGX_GPUS, DGX_MIG, DGX_MIG_DEVICES, SimNode, kept
from tests.support.runc import TREE

TIMED = TREE / "tests/programs/timed.c"

# What else runs on the machine costs a long process more than a short one, and the yardstick is short; both go first,
# where that is permitted. The kernel takes no real-time process into a cgroup, so containers only go before most, and
# have a yardstick of their own.
FIRST, EARLY = ["chrt", "--rr", "1"], ["nice", "--adjustment", "-20"]
REAL_TIME = subprocess.run([*FIRST, "true"], stderr=subprocess.DEVNULL).returncode == 0

YARDSTICK, ORDINARY_YARDSTICK = "python3", "python3 at ordinary priority"
WITH_OS = "python3 that imports os"
PLAIN, KERNEL = "runc", "runc with /proc/driver"
CREATE, CREATE_KERNEL, STATE = "runc create", "runc create with /proc/driver", "runc state"

# Yardsticks that the hook's process may take, by case.
GOALS = {"a": 0.4, "b": 1.8, "c": 1.8, "d": 2.2, "e": 2.2, "f": 1.8}
MOST_KIB = 20 * 1024

# Where the figures are small, the noise is not: more runs.
REPEATS = 5

# All that runtimes give a hook for which nothing else was written.
ENVIRONMENT = dict(entry.split("=", 1) for entry in HOOK_ENV)

CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
SEVEN_EACH = dict.fromkeys(range(8), ("1g.5gb",) * 7)


class Sample(NamedTuple):
    seconds: float
    kib: int


class Other(NamedTuple):
    """A carrier besides the hook. What counts is the row's time over that of the row `without` nvct, if there is one.

    `goal`: the yardsticks that it may take.
    """

    key: str
    title: str
    row: Row
    without: str | None
    goal: float | None


def main() -> None:
    options = _options()
    if os.geteuid() != 0:
        sys.exit("bench: runc containers with device nodes need root")
    with tempfile.TemporaryDirectory(prefix="nvct-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        workshop = Workshop(stack.enter_context(memory_folder(folder / "memory")))
        timed = folder / "timed"
        subprocess.run(["cc", "-O1", "-o", timed, TIMED], check=True)
        cases = _cases(folder, stack)
        load = os.getloadavg()[0]
        others = _others(cases, workshop)
        samples = _measure(_rows(cases, others, workshop), options.rounds, timed, folder)
    results = {"load": load, **_results(cases, others, samples, options.rounds)}
    text = json.dumps(results, indent=2) + "\n"
    if options.json:
        Path(options.json).write_text(text)
    if options.record:
        report.RESULTS.write_text(text)
        report.update_readme(results)
    print(report.text_tables(results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="rounds to measure (default 20)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--record", action="store_true", help="write them to tests/bench/results.json and README.md")
    return parser.parse_args()


def _cases(folder: Path, stack: ExitStack) -> list[Case]:
    spec = spec_from_profile("dgx-a100", mig=DGX_MIG)
    usual = stack.enter_context(_node(spec, folder / "usual"))
    slow = stack.enter_context(_node(replace(spec, nvml=NvmlBehaviour(delay_s=0.5)), folder / "slow"))
    divided = stack.enter_context(_node(spec_from_profile("dgx-a100", mig=SEVEN_EACH), folder / "divided"))
    one = {"NVIDIA_VISIBLE_DEVICES": "2"}
    one_node = frozenset((*CONTROL, "nvidia3"))
    mig = DGX_MIG_DEVICES["0:1"]
    mig_nodes = (f"nvidia{DGX_GPUS['0'].minor}", *(f"nvidia-caps/nvidia-cap{n}" for n in (mig.gi_minor, mig.ci_minor)))
    everything = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    return [
        Case("a", "asks for no GPU", {}, frozenset(), usual),
        Case("b", "one GPU", one, one_node, usual),
        Case("c", "one MIG device", {"NVIDIA_VISIBLE_DEVICES": "0:1"}, frozenset((*CONTROL, *mig_nodes)), usual),
        Case("d", "8 GPUs in 56 MIG devices, all capabilities", everything, _every_node(), divided),
        Case("e", "one GPU, 20,000 libraries in the image's loader cache", one, one_node, usual, True),
        Case("f", "one GPU, on a node where NVML takes 500 ms to start", one, one_node, slow),
    ]


def _every_node() -> frozenset[str]:
    return frozenset((*CONTROL, "nvidia-modeset")).union(*_mig_nodes().values())


def _mig_nodes() -> dict[str, frozenset[str]]:
    """The nodes by MIG device of 8 GPUs with GPU instances 7 to 13: see DGX_MIG_DEVICES for the minors."""
    nodes = {}
    for gpu, facts in DGX_GPUS.items():
        for place in range(7):
            minor = 3 + 135 * facts.minor + 9 * (7 + place)
            capabilities = (f"nvidia-caps/nvidia-cap{minor}", f"nvidia-caps/nvidia-cap{minor + 1}")
            nodes[f"{gpu}:{place}"] = frozenset((f"nvidia{facts.minor}", *capabilities))
    return nodes


@contextmanager
def _node(spec: NodeSpec, path: Path) -> Iterator[SimNode]:
    """A simulated DGX A100 with a fresh inventory in the cache."""
    with kept(SimNode(spec, path, DGX_GPUS, {}, set())) as node:
        command = [sys.executable, "-m", "nvct", "--config", str(node.config), "refresh", "--quiet"]
        subprocess.run(command, cwd=TREE, check=True)
        yield node


def _others(cases: list[Case], workshop: Workshop) -> list[Other]:
    nothing, one, _, divided, *_ = cases
    # The default capabilities, which have no use for nvidia-modeset.
    many = divided._replace(env={"NVIDIA_VISIBLE_DEVICES": "all"}, nodes=divided.nodes - {"nvidia-modeset"})
    where = "8 GPUs in 56 MIG devices"

    def created(key: str, title: str, case: Case, repeats: int, goal: float | None) -> Other:
        row = Row(f"nvct-runtime create {key}", repeats, partial(workshop.created, case, through=True))
        without = CREATE_KERNEL if case.nodes else CREATE
        return Other(f"create-{key}", f"`nvct-runtime create` over `runc create`, {title}", row, without, goal)

    def command(arguments: list[str], check: Callable[[str], None], goal: float | None) -> Other:
        name = " ".join(("nvct", *arguments))
        row = Row(name, 1, partial(workshop.command, divided.node, arguments, check), first=True)
        return Other("-".join(arguments), f"`{name}`, {where}", row, None, goal)

    state = Row("nvct-runtime state", REPEATS, partial(workshop.state, one, through=True), first=True)
    return [
        Other("state", "`nvct-runtime state` over `runc state`", state, STATE, 0.3),
        created("none", "no GPU", nothing, REPEATS, None),
        created("one", "one GPU", one, 1, 3.0),
        created("many", where, many, 1, 4.0),
        command(["cdi", "generate"], lambda output: expect_devices(output, _mig_nodes()), 10.0),
        command(["list"], lambda output: expect_listed(output, {*DGX_GPUS, *_mig_nodes()}), None),
    ]


def _rows(cases: list[Case], carriers: list[Other], workshop: Workshop) -> list[Row]:
    nothing, *others = cases
    yardstick = partial(workshop.python, "pass")
    return [
        Row(YARDSTICK, REPEATS, yardstick, first=True),
        Row(WITH_OS, REPEATS, partial(workshop.python, "import os"), first=True),
        Row(_alone(nothing), REPEATS, partial(workshop.hook_alone, nothing), first=True),
        *(Row(_alone(case), 1, partial(workshop.hook_alone, case), first=True) for case in others),
        Row(ORDINARY_YARDSTICK, REPEATS, yardstick),
        Row(PLAIN, REPEATS, partial(workshop.started, nothing, hooked=False)),
        Row(_started(nothing), REPEATS, partial(workshop.started, nothing, hooked=True)),
        Row(KERNEL, REPEATS, partial(workshop.started, others[0], hooked=False)),
        *(Row(_started(case), 1, partial(workshop.started, case, hooked=True)) for case in others),
        Row(STATE, REPEATS, partial(workshop.state, others[0], through=False), first=True),
        Row(CREATE, REPEATS, partial(workshop.created, nothing, through=False)),
        Row(CREATE_KERNEL, REPEATS, partial(workshop.created, others[0], through=False)),
        *(other.row for other in carriers),
    ]


def _alone(case: Case) -> str:
    return f"hook {case.key}"


def _started(case: Case) -> str:
    return f"runc with hook {case.key}"


def _measure(rows: list[Row], rounds: int, timed: Path, folder: Path) -> dict[str, list[Sample]]:
    """The samples by row. A first round, not counted, warms the caches."""
    for row in rows:
        _sample(row, timed, folder)
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    each = [row for row in rows for _ in range(row.repeats)]
    for _ in range(rounds):
        for row in random.sample(each, len(each)):
            samples[row.name].append(_sample(row, timed, folder))
    return samples


def _sample(row: Row, timed: Path, folder: Path) -> Sample:
    with row.ready() as run:
        sample = _run(row, run, timed, folder)
    time.sleep(0.01)  # the kernel takes mounts apart after the process that held them has ended
    return sample


def _run(row: Row, run: Run, timed: Path, folder: Path) -> Sample:
    # Files and no pipes: a container that is created and not started keeps them open.
    result, output, errors = folder / "sample", folder / "output", folder / "errors"
    command = [*(FIRST if row.first and REAL_TIME else EARLY), timed, result, run.stdin, *run.command]
    with output.open("w") as standard_output, errors.open("w") as standard_error:
        done = subprocess.run(command, env=ENVIRONMENT, stdout=standard_output, stderr=standard_error)
    if done.returncode != 0:
        sys.exit(f"bench: {row.name}: {errors.read_text().strip()}")
    nanoseconds, kib, status = map(int, result.read_text().split())
    if status != 0:
        sys.exit(f"bench: {row.name} failed with status {status}: {errors.read_text().strip()}")
    run.check(output.read_text())
    return Sample(nanoseconds / 1e9, kib)


def _results(cases: list[Case], others: list[Other], samples: dict[str, list[Sample]], rounds: int) -> dict[str, Any]:
    medians = {name: statistics.median(sample.seconds for sample in row) for name, row in samples.items()}
    unit = medians[YARDSTICK]

    def figures(case: Case) -> dict[str, Any]:
        alone = medians[_alone(case)]
        added = medians[_started(case)] - medians[KERNEL if case.nodes else PLAIN]
        return {
            "title": case.title,
            "hook_s": alone,
            "hook_ratio": alone / unit,
            "goal_ratio": GOALS[case.key],
            "peak_kib": max(sample.kib for sample in samples[_alone(case)]),
            "most_kib": MOST_KIB,
            "added_s": added,
            "added_ratio": added / medians[ORDINARY_YARDSTICK],
            "runs": len(samples[_alone(case)]),
        }

    def other_figures(other: Other) -> dict[str, Any]:
        counted = medians[other.row.name] - (medians[other.without] if other.without else 0)
        return {
            "title": other.title,
            "counted_s": counted,
            "ratio": counted / medians[YARDSTICK if other.row.first else ORDINARY_YARDSTICK],
            "goal_ratio": other.goal,
            "runs": len(samples[other.row.name]),
        }

    return {
        "rounds": rounds,
        "machine": _machine(),
        "real_time": REAL_TIME,
        "device_cgroup": "v1" if CGROUPS.is_dir() else "left out of the hook alone",
        "yardstick_s": unit,
        "ordinary_yardstick_s": medians[ORDINARY_YARDSTICK],
        "import_os_s": medians[WITH_OS] - unit,
        "runc_s": medians[PLAIN],
        "create_s": medians[CREATE],
        "cases": {case.key: figures(case) for case in cases},
        "others": {other.key: other_figures(other) for other in others},
    }


def _machine() -> dict[str, Any]:
    cpus = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")]  # fmt: skip
    version = subprocess.run([PYTHON, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]
    return {
        "cpu": cpus[0] if cpus else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": version,
    }


if __name__ == "__main__":
    main()
