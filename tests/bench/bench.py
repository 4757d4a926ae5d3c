"""What nvct's hook costs at a container start (`make bench`).

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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nvct.record import replace
from nvct.sim.bundle import HOOK_ENV
from nvct.sim.profiles import spec_from_profile
from nvct.sim.spec import NodeSpec, NvmlBehaviour
from tests.bench import report
from tests.bench.rows import CGROUPS, PYTHON, Case, Row, Run, Workshop, memory_folder
from tests.support.nodes import DGX_GPUS, DGX_MIG, DGX_MIG_DEVICES, SimNode, kept
from tests.support.runc import TREE

TIMED = TREE / "tests/programs/timed.c"

YARDSTICK = "python3"
PLAIN, KERNEL = "runc", "runc with /proc/driver"

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


def main() -> None:
    options = _options()
    if os.geteuid() != 0:
        sys.exit("bench: runc containers with device nodes need root")
    with tempfile.TemporaryDirectory(prefix="nvct-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        workshop = Workshop(folder, stack.enter_context(memory_folder(folder / "memory")))
        timed = folder / "timed"
        subprocess.run(["cc", "-O1", "-o", timed, TIMED], check=True)
        cases = _cases(folder, stack)
        samples = _measure(_rows(cases, workshop), options.rounds, timed, folder)
    results = _results(cases, samples, options.rounds)
    text = json.dumps(results, indent=2) + "\n"
    if options.json:
        Path(options.json).write_text(text)
    if options.record:
        report.RESULTS.write_text(text)
        report.update_readme(results)
    print(report.text_table(results))


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
    """Of 8 GPUs with GPU instances 7 to 13: see DGX_MIG_DEVICES for the minors."""
    first = [3 + 135 * gpu + 9 * instance for gpu in range(8) for instance in range(7, 14)]
    capabilities = [f"nvidia-caps/nvidia-cap{minor}" for start in first for minor in (start, start + 1)]
    return frozenset((*CONTROL, "nvidia-modeset", *(f"nvidia{minor}" for minor in range(8)), *capabilities))


@contextmanager
def _node(spec: NodeSpec, path: Path) -> Iterator[SimNode]:
    """A simulated DGX A100 with a fresh inventory in the cache."""
    with kept(SimNode(spec, path, DGX_GPUS, {}, set())) as node:
        command = [sys.executable, "-m", "nvct", "--config", str(node.config), "refresh", "--quiet"]
        subprocess.run(command, cwd=TREE, check=True)
        yield node


def _rows(cases: list[Case], workshop: Workshop) -> list[Row]:
    nothing, *others = cases
    return [
        Row(YARDSTICK, REPEATS, workshop.yardstick),
        Row(_alone(nothing), REPEATS, partial(workshop.hook_alone, nothing)),
        *(Row(_alone(case), 1, partial(workshop.hook_alone, case)) for case in others),
        Row(PLAIN, REPEATS, partial(workshop.started, nothing, hooked=False)),
        Row(_started(nothing), REPEATS, partial(workshop.started, nothing, hooked=True)),
        Row(KERNEL, REPEATS, partial(workshop.started, others[0], hooked=False)),
        *(Row(_started(case), 1, partial(workshop.started, case, hooked=True)) for case in others),
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
        sample = _run(row.name, run, timed, folder / "sample")
    time.sleep(0.01)  # the kernel takes mounts apart after the process that held them has ended
    return sample


def _run(name: str, run: Run, timed: Path, result: Path) -> Sample:
    command = [timed, result, run.stdin, *run.command]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"bench: {name}: {done.stderr.strip()}")
    nanoseconds, kib, status = map(int, result.read_text().split())
    if status != 0:
        sys.exit(f"bench: {name} failed with status {status}: {done.stderr.strip()}")
    run.check(done.stdout)
    return Sample(nanoseconds / 1e9, kib)


def _results(cases: list[Case], samples: dict[str, list[Sample]], rounds: int) -> dict[str, Any]:
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
            "added_ratio": added / unit,
            "runs": len(samples[_alone(case)]),
        }

    return {
        "rounds": rounds,
        "machine": _machine(),
        "device_cgroup": "v1" if CGROUPS.is_dir() else "left out of the hook alone",
        "yardstick_s": unit,
        "runc_s": medians[PLAIN],
        "cases": {case.key: figures(case) for case in cases},
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
