"""`make demo`: a simulated DGX A100, and real containers on it that get exactly the devices they ask for.

Exit status 0 only when every container saw exactly its devices and was denied all others.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from nvct.model import Gpu, Inventory, MigDevice
from nvct.node.cache import cache_path
from nvct.node.current import current
from nvct.record import record
from nvct.sim import node as sim
from nvct.sim.profiles import spec_from_profile
from tests.support.docker import Dockerd, why_no_dockerd
from tests.support.runc import DENIED, OPEN_DEVICE, runc_container

LAYOUT = {0: ("1g.5gb",) * 7, 1: ("3g.20gb", "2g.10gb", "1g.5gb")}

Run = Callable[[str], str]  # a shell script → what it prints in the container


@record
class Wish:
    """What one container asks for, and the GPUs and MIG devices that this means."""

    value: str
    words: str
    gpus: tuple[Gpu, ...]
    mig_devices: tuple[MigDevice, ...] = ()


def main() -> int:
    console = Console(highlight=False, soft_wrap=True)
    if os.geteuid() != 0:
        console.print("make demo starts containers: run it as root")
        return 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nvct-demo-")))
        node = folder / "node"
        console.print("[bold]A simulated DGX A100[/]: 8 GPUs, GPU 0 in seven MIG devices, GPU 1 in three")
        sim.create(spec_from_profile("dgx-a100", mig=LAYOUT), node)
        config = f"{node}/config.yaml"
        stack.callback(Path(cache_path(config)).unlink, missing_ok=True)
        inventory = current(config).inventory
        good = [run_with_runc(console, folder, node, inventory, wish) for wish in wishes(inventory)]
        good += run_with_docker(console, stack, folder, node, inventory)
    count = f"{sum(good)} of {len(good)} containers saw exactly their devices"
    console.print(f"\n[bold {'green' if all(good) else 'red'}]{count}[/]")
    return 0 if all(good) else 1


def wishes(inventory: Inventory) -> Iterator[Wish]:
    gpus = inventory.gpus
    yield Wish("0:1", "MIG device 1 of GPU 0", (gpus[0],), (gpus[0].mig_devices[1],))
    yield Wish("2,3", "two whole GPUs", (gpus[2], gpus[3]))
    yield Wish(gpus[1].mig_devices[0].uuid, "a MIG device by UUID", (gpus[1],), (gpus[1].mig_devices[0],))
    yield Wish(gpus[5].uuid, "a GPU by UUID", (gpus[5],))
    yield Wish("none", "the driver without a GPU", ())


def run_with_runc(console: Console, folder: Path, node: Path, inventory: Inventory, wish: Wish) -> bool:
    console.print(f"\n[bold]runc, NVIDIA_VISIBLE_DEVICES={wish.value}[/]  ({wish.words})")
    with runc_container(folder, node, {"NVIDIA_VISIBLE_DEVICES": wish.value}) as container:
        return report(console, container.sh, inventory, wish)


def run_with_docker(
    console: Console, stack: ExitStack, folder: Path, node: Path, inventory: Inventory
) -> Iterator[bool]:
    reason = why_no_dockerd()
    if reason:
        console.print(f"\ndocker: left out, {reason}")
        return
    dockerd = stack.enter_context(Dockerd(folder / "docker", node))
    gpu = inventory.gpus[0]
    wish = Wish('"device=0:1"', "MIG device 1 of GPU 0", (gpu,), (gpu.mig_devices[1],))
    console.print(f"\n[bold]docker run --gpus '{wish.value}'[/]  ({wish.words})")
    with dockerd.container(dockerd.image("debian"), "--gpus", wish.value) as container:
        yield report(console, container.sh, inventory, wish)


def report(console: Console, run: Run, inventory: Inventory, wish: Wish) -> bool:
    """Print what the container sees and which neighbours it is denied; whether both are as they should be."""
    listing = run("nvidia-smi -L").strip()
    for line in listing.splitlines():
        console.print(f"  [cyan]{escape(line)}[/]")
    expected = {gpu.uuid for gpu in wish.gpus} | {device.uuid for device in wish.mig_devices}
    seen = {line.rpartition("UUID: ")[2].rstrip(")") for line in listing.splitlines() if "UUID: " in line}
    others = dict(neighbours(inventory, wish))
    open_to_it = [name for name, answer in open_all(run, others) if DENIED not in answer]
    if seen != expected:
        console.print(f"  [red]sees {sorted(seen)}, expected {sorted(expected)}[/]")
    if open_to_it:
        console.print(f"  [red]can open {', '.join(open_to_it)}[/]")
    if seen == expected and not open_to_it:
        console.print(f"  [green]exactly that; all {len(others)} other GPU and MIG nodes are denied[/]")
    return seen == expected and not open_to_it


def neighbours(inventory: Inventory, wish: Wish) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (major, minor)) of every GPU and MIG capability node that the container did not ask for."""
    own_caps = {minor for device in wish.mig_devices for minor in (device.gi_minor, device.ci_minor)}
    for gpu in inventory.gpus:
        if gpu not in wish.gpus:
            yield f"/dev/nvidia{gpu.minor}", (inventory.majors["nvidia"], gpu.minor)
        for device in gpu.mig_devices:
            for minor in {device.gi_minor, device.ci_minor} - own_caps:
                yield f"/dev/nvidia-caps/nvidia-cap{minor}", (inventory.majors["nvidia-caps"], minor)


def open_all(run: Run, devices: dict[str, tuple[int, int]]) -> Iterator[tuple[str, str]]:
    """(name, what the shell says) after the container made a node of its own for each device and opened it."""
    tries = (
        f"echo '@ {name}'; ( {OPEN_DEVICE.format(major=major, minor=minor)} )"
        for name, (major, minor) in devices.items()
    )
    for answer in run("\n".join(tries)).split("@ ")[1:]:
        name, _, said = answer.partition("\n")
        yield name, said


if __name__ == "__main__":
    sys.exit(main())
