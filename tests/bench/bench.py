"""What nvct adds to a container start (`make bench`).

Every round runs all rows in a new random order, since a start after one with many mounts pays for their teardown. The
figures are medians. The one that counts is what the hook adds, (with hook - without hook), as a multiple of
`python3 -I -S -c pass`: the machine's own speed drops out of it.

The node is simulated, so its containers need a stand-in for the kernel's part of the driver (/proc/driver): a first
prestart hook, which is not nvct. It runs in the rows with and without nvct's hook alike, and so drops out too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from nvct.node.cache import cache_path
from nvct.sim.bundle import config as container
from nvct.sim.bundle import make_rootfs, write_config

TREE = Path(__file__).resolve().parents[2]
HOOK = TREE / "hooks" / "nvidia-container-runtime-hook"
SYSTEM_PYTHON = "/usr/bin/python3"

BARE = "python3 -I -S -c pass"
PLAIN = "runc run"
KERNEL = "runc run + /proc/driver (simulation)"
NOTHING = "runc run + hook, asks for nothing"
ONE = "runc run + hook, one GPU"
EIGHT = "runc run + hook, 8 GPUs"
LIST = "nvct list"

# Row with the hook, and the row that is the same but for the hook.
ADDED = ((NOTHING, PLAIN), (ONE, KERNEL), (EIGHT, KERNEL))

Hook = Mapping[str, object]


class Row(NamedTuple):
    name: str
    command: list[str]


def main() -> None:
    options = _options()
    if os.geteuid() != 0:
        sys.exit("bench: runc containers with device nodes need root")
    with tempfile.TemporaryDirectory(prefix="nvct-bench-") as folder, _node(Path(folder)) as node:
        samples = _measure(_rows(Path(folder), node), options.rounds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    added = {name: medians[name] - medians[base] for name, base in ADDED}
    _print(medians, added, options.rounds)
    if options.json:
        figures = {name: value / medians[BARE] for name, value in added.items()}
        result = {"rounds": options.rounds, "median_s": medians, "added_s": added, "added_ratio": figures}
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="rounds to measure (default 30)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too, in seconds")
    return parser.parse_args()


@contextmanager
def _node(folder: Path) -> Iterator[Path]:
    """A simulated DGX A100 with a fresh inventory in the cache."""
    node = folder / "node"
    _nvct("sim", "create", "dgx-a100", str(node))
    config = str(node / "config.yaml")
    _nvct("--config", config, "refresh", "--quiet")
    try:
        yield node
    finally:
        Path(cache_path(config)).unlink(missing_ok=True)


def _nvct(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "nvct", *arguments], cwd=TREE, check=True, stdout=subprocess.DEVNULL)


def _rows(folder: Path, node: Path) -> list[Row]:
    config = str(node / "config.yaml")
    rootfs = folder / "rootfs"
    make_rootfs(rootfs)
    kernel: Hook = {"path": str(_kernel_hook(node)), "args": ["kernel", "prestart"]}
    hook: Hook = {"path": str(HOOK), "args": [HOOK.name, "--config", config, "prestart"]}

    def start(name: str, devices: str, expected: str, *hooks: Hook) -> Row:
        """A container with a root file system of its own, since a start leaves mount points there.

        Its program fails where `expected` is not there, so that nobody measures a hook that does nothing.
        """
        bundle = Path(tempfile.mkdtemp(dir=folder))
        shutil.copytree(rootfs, bundle / "rootfs", symlinks=True)
        write_config(
            bundle,
            container(["/usr/bin/test", "-e", expected], {"NVIDIA_VISIBLE_DEVICES": devices}, {"prestart": hooks}),
        )
        identity = f"nvct-bench-{bundle.name}"
        return Row(name, ["runc", "--root", str(folder / "runc"), "run", "--bundle", str(bundle), identity])

    return [
        Row(BARE, [SYSTEM_PYTHON, "-I", "-S", "-c", "pass"]),
        start(PLAIN, "", "/proc"),
        start(KERNEL, "", "/proc/driver/nvct-sim", kernel),
        start(NOTHING, "", "/proc", hook),
        start(ONE, "2", "/dev/nvidiactl", kernel, hook),
        start(EIGHT, "all", "/dev/nvidia7", kernel, hook),
        Row(LIST, [str(Path(sys.executable).with_name("nvct")), "--config", config, "list"]),
    ]


def _kernel_hook(node: Path) -> Path:
    """The hook that comes with a simulated node plays the kernel, then becomes nvct's; this one becomes /bin/true."""
    both = node / "hooks" / HOOK.name
    alone = both.with_name("kernel")
    alone.write_text(both.read_text().replace(str(HOOK), "/bin/true"))
    alone.chmod(0o755)
    return alone


def _measure(rows: list[Row], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run by row. A first round, not counted, warms caches and proves that every row works."""
    for row in rows:
        _run(row)
    samples: dict[str, list[float]] = {row.name: [] for row in rows}
    for _ in range(rounds):
        for row in random.sample(rows, len(rows)):
            started = time.perf_counter()
            _run(row)
            samples[row.name].append(time.perf_counter() - started)
    return samples


def _run(row: Row) -> None:
    done = subprocess.run(row.command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"bench: `{row.name}` failed with status {done.returncode}: {done.stderr.strip()}")


def _print(medians: dict[str, float], added: dict[str, float], rounds: int) -> None:
    unit = medians[BARE]
    runs = Table(title=f"Medians of {rounds} rounds", title_justify="left")
    costs = Table(title="What nvct's hook adds", title_justify="left")
    for table in (runs, costs):
        for column in ("", "ms", f"x {BARE}"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, seconds in medians.items():
        runs.add_row(name, f"{seconds * 1000:.1f}", f"{seconds / unit:.2f}")
    for name, seconds in added.items():
        costs.add_row(name, f"{seconds * 1000:.1f}", f"{seconds / unit:.2f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(runs)
    console.print(costs)


if __name__ == "__main__":
    main()
