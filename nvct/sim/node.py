"""Making a simulated node: a driver root with its procfs, device nodes and a settings file for nvct, in one folder.

The folder is built beside its place and renamed into it, so a node is there as a whole or not at all.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

import yaml

from nvct.model import WSL
from nvct.record import record
from nvct.sim import devices, mig
from nvct.sim.config_files import write_config_files
from nvct.sim.driver_files import write_driver_files, write_loader_cache
from nvct.sim.errors import SimError
from nvct.sim.folder import Folder
from nvct.sim.nodefile import spec_from_yaml
from nvct.sim.proc_files import majors_of, write_proc, write_sys
from nvct.sim.profiles import spec_from_profile
from nvct.sim.spec import NodeSpec
from nvct.sim.state import PLACE, write_state
from nvct.sim.wsl import write_wsl_files

__all__ = ["Made", "create", "spec_from_profile", "spec_from_yaml"]

HOOK_NAME = "nvidia-container-runtime-hook"

# The engine's stand-in for the real hook: plays the kernel, then becomes the hook. -I and -S as every hook of nvct.
_HOOK = """\
#!/usr/bin/python3 -IS
import sys

sys.path.insert(0, {tree!r})
from nvct.sim.kernel import run_hook

run_hook(node={node!r}, hook={hook!r}, arguments=sys.argv[1:])
"""


@record
class Made:
    """What was made: `why_table` is "" where device nodes are real, `notes` says what this machine could not make."""

    directory: str
    config: str
    why_table: str
    notes: tuple[str, ...]


def create(spec: NodeSpec, directory: str | os.PathLike[str]) -> Made:
    """Make the node in `directory`, in the place of a node that is there.

    Raises SimError on a machine with a real driver, for a folder that holds something else, and for what cannot be.
    """
    place = Path(os.path.realpath(directory))
    refuse_real_driver()
    _check_place(place)
    for gpu in spec.gpus:
        mig.layout(gpu)  # refuse what does not fit before anything is written
    staging = _staging(place)
    try:
        built = staging / "node"
        built.mkdir()
        built.chmod(0o755)
        made = _build(spec, Folder(built), place)
        _replace(place, built, staging / "old")
    finally:
        shutil.rmtree(staging)
    return made


def _staging(place: Path) -> Path:
    """A folder beside the node's place, to build it in."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    except OSError as error:
        there = next(parent for parent in place.parents if parent.exists())
        raise SimError(f"nothing can be made in {there} ({error.strerror}): name a folder elsewhere") from None


def refuse_real_driver(proc: str = "/proc") -> None:
    """A simulated node has the majors of the real driver, so the two cannot be on one machine."""
    taken = host_majors(proc)
    if Path(proc, "driver/nvidia").exists() or any(name.startswith("nvidia") for name in taken.values()):
        raise SimError(
            f"this machine has a real NVIDIA driver ({proc}/driver/nvidia, {proc}/devices), whose device numbers a "
            "simulated node would use: simulate on a machine without one"
        )


def host_majors(proc: str = "/proc") -> dict[int, str]:
    """The character majors that drivers of this machine own."""
    characters = Path(proc, "devices").read_text().split("Block devices:")[0]
    rows = (line.split() for line in characters.splitlines())
    return {int(row[0]): row[1] for row in rows if len(row) == 2 and row[0].isascii() and row[0].isdigit()}


def _check_place(place: Path) -> None:
    if not place.exists():
        return
    if not place.is_dir():
        raise SimError(f"{place} is a file: name a folder for the node")
    if any(place.iterdir()) and not (place / PLACE / "node").is_file():
        raise SimError(f"{place} holds something that is no simulated node: name an empty or a new folder")
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    name = str(place).replace("\\", "\\134").replace(" ", "\\040")  # as that file writes them
    inside = [path for path in mounted if path == name or path.startswith(f"{name}/")]
    if inside:
        raise SimError(
            f"{inside[0]} is a mount point, so the node there cannot be replaced: umount {shlex.quote(inside[0])}"
        )


def _replace(place: Path, built: Path, old: Path) -> None:
    if not place.exists():
        built.rename(place)
        return
    place.rename(old)
    try:
        built.rename(place)
    except OSError:
        old.rename(place)
        raise


def _build(spec: NodeSpec, folder: Folder, place: Path) -> Made:
    taken = host_majors()
    majors = majors_of(spec, set(taken))
    first_card = _first_free_card()
    why_table = devices.why_no_nodes(folder.top)
    notes = write_wsl_files(folder) if spec.kind == WSL else _write_native_files(folder, spec)
    write_proc(folder, spec, majors)
    if spec.kind != WSL:  # Windows has the PCI devices
        write_sys(folder, spec, first_card)
    write_state(folder, spec, majors, nodes=not why_table)
    nodes = devices.nodes_of(spec, majors, first_card)
    if why_table:
        devices.write_table(folder, nodes)
    else:
        devices.check_majors_free(majors, taken)
        devices.write_nodes(folder, nodes)
        if spec.kind != WSL:
            devices.write_drm_links(folder, spec, first_card)
    _write_hook(folder, place)
    _damage(folder, spec)
    _write_config(folder, place, table=bool(why_table))
    return Made(str(place), f"{place}/config.yaml", why_table, notes)


def _write_native_files(folder: Folder, spec: NodeSpec) -> tuple[str, ...]:
    notes = write_driver_files(folder, spec.library_version, spec.fabric_manager)
    write_config_files(folder, spec)
    write_loader_cache(folder, spec.library_version)
    return notes


def _first_free_card() -> int:
    """The first DRM card number above those of this machine, so that no node of ours is a real card; at least 1."""
    cards = [path.name.removeprefix("card") for path in Path("/sys/class/drm").glob("card*")]
    return 1 + max((int(number) for number in cards if number.isascii() and number.isdigit()), default=0)


def _write_hook(folder: Folder, place: Path) -> None:
    tree = Path(__file__).resolve().parents[2]
    text = _HOOK.format(tree=str(tree), node=str(place), hook=str(tree / "hooks" / HOOK_NAME))
    folder.file(f"hooks/{HOOK_NAME}", text, 0o755)


def _write_config(folder: Folder, place: Path, table: bool) -> None:
    tops = {"root": "", "dev_root": "", "proc_root": "/proc", "sys_root": "/sys"}
    settings = {name: f"{place}{top}" for name, top in tops.items()}
    settings["char_links"] = f"{place}/dev/char"
    if table:
        settings["device_table"] = f"{place}/{devices.TABLE}"
    head = "# Points nvct at this simulated node: nvct --config FILE list\n"
    folder.file("config.yaml", head + yaml.safe_dump(settings, sort_keys=False))


def _damage(folder: Folder, spec: NodeSpec) -> None:
    """What the node file wants different: links, missing and unreadable files. The loader cache is older."""
    for name, text in spec.links.items():
        _remove(folder.top / name)
        folder.link(name, text)
    for pattern in spec.missing:
        for path in _matches(folder, pattern, "missing"):
            _remove(path)
    for pattern in spec.unreadable:
        for path in _matches(folder, pattern, "unreadable"):
            if not path.is_symlink():
                path.chmod(0)


def _matches(folder: Folder, pattern: str, key: str) -> list[Path]:
    found = sorted(folder.top.glob(pattern))
    if not found:
        raise SimError(
            f"{key}: {pattern!r} matches nothing in the node; paths are relative to its folder, as usr/lib/*/lib*"
        )
    return found


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
