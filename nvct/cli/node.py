"""`nvct list`, `nvct info`, `nvct refresh`: what this node has."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from nvct.cli.output import count, gib, heading, json_option, line, print_json, table
from nvct.cli.source import Source
from nvct.errors import DriverError
from nvct.model import BINARY, CONFIG, FIRMWARE, LIBRARY, LIBRARY32, MODULE, SOCKET, WSL, Gpu, Inventory, MigDevice
from nvct.node import current
from nvct.node.cache import RUN_DIR, cache_path
from nvct.node.saved import inventory_to_json
from nvct.oci import lowlevel

_PATIENCE_S = 1.0

# Kinds of driver files in the order and by the words of `nvct info`.
_KINDS = (
    (LIBRARY, "Libraries"),
    (LIBRARY32, "32-bit"),
    (BINARY, "Binaries"),
    (FIRMWARE, "Firmware"),
    (SOCKET, "Sockets"),
    (CONFIG, "Configuration"),
    (MODULE, "X modules"),
)


@click.command("list")
@json_option
@click.pass_obj
def list_gpus(source: Source, as_json: bool) -> None:
    """List GPUs and MIG devices by the names that requests use.

    What stands under Device, UUID and Bus id can be pasted into NVIDIA_VISIBLE_DEVICES. MIG devices stand below their
    GPU, as GPU:MIG.

    \b
    Examples:
      nvct list
      nvct list --json | jq -r '.gpus[].uuid'
      docker run --gpus '"device=0:1"' IMAGE           with the name 0:1 from this list
    """
    inventory = source.current().inventory
    if as_json:
        print_json(_list_json(inventory))
        return
    line(f"Driver {inventory.driver_version}, CUDA {inventory.cuda_version}")
    if inventory.gpus:
        table(("Device", "Model or profile", "Memory", "UUID", "Bus id", "Node"), _device_rows(inventory))
    else:
        line("No GPU.")


def _device_rows(inventory: Inventory) -> Iterator[tuple[str, ...]]:
    for gpu in inventory.gpus:
        yield str(gpu.index), gpu.model, gib(gpu.memory_mib), gpu.uuid, gpu.bus_id, _node(inventory, gpu)
        for device in gpu.mig_devices:
            yield f"  {gpu.index}:{device.index}", f"  {device.profile}", gib(device.memory_mib), device.uuid, "", ""
        if gpu.mig_enabled and not gpu.mig_devices:
            yield "", "  MIG enabled, no MIG device", "", "", "", ""


def _node(inventory: Inventory, gpu: Gpu) -> str:
    """The node that gives the GPU: in WSL all have one."""
    return ", ".join(node.path for node in inventory.nodes) if inventory.kind == WSL else f"/dev/nvidia{gpu.minor}"


def _list_json(inventory: Inventory) -> dict[str, Any]:
    return {
        "driver": {"version": inventory.driver_version, "cuda": inventory.cuda_version},
        "gpus": [_gpu_json(gpu) for gpu in inventory.gpus],
    }


def _gpu_json(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "minor": gpu.minor,
        "bus_id": gpu.bus_id,
        "model": gpu.model,
        "brand": gpu.brand,
        "compute_capability": gpu.compute_capability,
        "memory_mib": gpu.memory_mib,
        "mig": {"enabled": gpu.mig_enabled, "devices": [_mig_json(device) for device in gpu.mig_devices]},
    }


def _mig_json(device: MigDevice) -> dict[str, Any]:
    return {
        "index": device.index,
        "uuid": device.uuid,
        "profile": device.profile,
        "gi": device.gi,
        "ci": device.ci,
        "memory_mib": device.memory_mib,
        "capabilities": {"gi": device.gi_minor, "ci": device.ci_minor},
    }


@click.command()
@json_option
@click.option("--files", is_flag=True, help="List every driver file, by capability.")
@click.pass_obj
def info(source: Source, as_json: bool, files: bool) -> None:
    """Show the driver, its files, and what is missing.

    With --json this is the whole inventory: save it, and `nvct --inventory FILE` replays it anywhere.

    \b
    Examples:
      nvct info
      nvct info --files | grep encode
      nvct info --json > node.json
    """
    inventory = source.current().inventory
    if as_json:
        print_json(inventory_to_json(inventory))
        return
    table(("", ""), _facts(inventory))
    heading("\nDriver files by capability")
    _print_files(inventory, every=files)
    if inventory.missing:
        heading("\nMissing")
        for sentence in inventory.missing:
            line(f"  {sentence}", style="yellow")


def _facts(inventory: Inventory) -> Iterator[tuple[str, str]]:
    roots = inventory.roots
    yield "Driver", inventory.driver_version
    yield "CUDA", inventory.cuda_version
    yield "Architecture", inventory.architecture
    yield "Devices", _devices(inventory)
    yield "Driver root", roots.root
    yield "Device root", roots.dev_root
    yield "procfs", roots.proc_root
    yield "Control nodes", ", ".join(f"{node.path} {node.major}:{node.minor}" for node in inventory.nodes) or "none"
    yield "Majors", ", ".join(f"{name} {number}" for name, number in inventory.majors.items()) or "none"


def _print_files(inventory: Inventory, every: bool) -> None:
    counts = Counter((file.capability, file.kind) for file in inventory.files)
    capabilities = sorted({file.capability for file in inventory.files})
    if every:
        kinds = dict(_KINDS)
        ordered = sorted(inventory.files, key=lambda file: (file.capability, list(kinds).index(file.kind), file.path))
        table(("Capability", "Kind", "Path"), [(f.capability, f.kind, f.path) for f in ordered], indent=2)
        return
    present = {file.kind for file in inventory.files}
    columns = [(kind, title) for kind, title in _KINDS if kind in present]
    rows = [(name, *(str(counts[name, kind] or "-") for kind, _ in columns)) for name in capabilities]
    table(("Capability", *(title for _, title in columns)), rows, indent=2)


@click.command()
@json_option
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("--if-stale", is_flag=True, help="Do nothing while the stored inventory still describes the node.")
@click.pass_obj
def refresh(source: Source, as_json: bool, quiet: bool, if_stale: bool) -> None:
    """Discover the node again and store the inventory.

    It is what the hook reads at each container start, and what the other commands show.
    The hook does this by itself when the node has changed. Done at boot and after a driver update, it spares the
    first container the wait. After a change of the setting `runtimes` it tells nvct-runtime which runtime to call.

    \b
    Examples:
      nvct refresh
      nvct refresh --quiet --if-stale                  for a boot script or a systemd unit
    """
    if source.root or source.inventory_file:
        raise click.UsageError("refresh stores what the settings file describes: leave out --root and --inventory")
    if quiet and as_json:
        raise click.UsageError("--quiet and --json exclude each other")
    started = time.monotonic()
    with _progress("asking the driver what this node has", quiet):
        found = source.current() if if_stale else current.refresh(source.config)
    if found.warnings:
        raise DriverError("; ".join(found.warnings))
    lowlevel.write_choice(source.config, found.settings)
    path = cache_path(source.config)
    if as_json:
        print_json(_refreshed_json(found.inventory, path))
    elif not quiet:
        _print_refreshed(found.inventory, path, time.monotonic() - started)


def _refreshed_json(inventory: Inventory, path: str) -> dict[str, Any]:
    return {
        "path": path,
        "driver": {"version": inventory.driver_version, "cuda": inventory.cuda_version},
        "gpus": len(inventory.gpus),
        "mig_devices": sum(len(gpu.mig_devices) for gpu in inventory.gpus),
        "files": len(inventory.files),
        "missing": list(inventory.missing),
    }


def _print_refreshed(inventory: Inventory, path: str, seconds: float) -> None:
    line(f"{path} is up to date, after {seconds:.1f} s")
    line(
        f"Driver {inventory.driver_version}, CUDA {inventory.cuda_version}, {_devices(inventory)}, "
        f"{count(len(inventory.files), 'driver file')}"
    )
    for sentence in inventory.missing:
        line(f"Missing: {sentence}", style="yellow")
    if not path.startswith(f"{RUN_DIR}/"):
        line("This is kept for you alone: for the containers that root starts, run it as root.", style="yellow")


def _devices(inventory: Inventory) -> str:
    mig_devices = sum(len(gpu.mig_devices) for gpu in inventory.gpus)
    return f"{count(len(inventory.gpus), 'GPU')}, {count(mig_devices, 'MIG device')}"


@contextmanager
def _progress(what: str, quiet: bool) -> Iterator[None]:
    """Say on stderr that work goes on, once it has taken more than a second: a line, and on a terminal it moves."""
    if quiet:
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status(f"{what} ...") if sys.stderr.isatty() else None
    start = status.start if status else lambda: click.echo(f"{what} ...", err=True)
    timer = threading.Timer(_PATIENCE_S, start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if status:
            status.stop()
