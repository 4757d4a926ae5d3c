"""Nodes in the Windows Subsystem for Linux: the driver is that of Windows, and a container reaches it through /dev/dxg.

There is no kernel module of NVIDIA's and no /proc/driver/nvidia. Windows shows its driver files below
/usr/lib/wsl/drivers, a folder for each display adapter's driver, and libdxcore in /usr/lib/wsl/lib, by which the
libraries find their folder and the kernel. Files therefore lie in a container where they lie on the node. The list of
files is that of the established toolkit's `wsl` mode.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from nvct import ldcache
from nvct.errors import DriverError
from nvct.model import BINARY, CONFIG, LIBRARY, WSL, DeviceNode, DriverFile, Gpu, Inventory, Roots
from nvct.node import catalog, nvml, procfs
from nvct.node.catalog import Architecture
from nvct.node.devices import NodeReader, node_reader
from nvct.node.elf import read_elf
from nvct.node.files import unreadable
from nvct.node.nvml import GpuAnswer, Subject, brand_name
from nvct.node.roots import on_host, resolve
from nvct.settings import Settings

DXG = "/dev/dxg"
STORE = "/usr/lib/wsl/drivers"
DXCORE = "/usr/lib/wsl/lib/libdxcore.so"

# GPUs have no nodes of their own here, so no minors either.
NO_MINOR = -1

_NVML = "libnvidia-ml.so.1"
_SMI = "nvidia-smi"
_REQUIRED = (
    "libcuda.so.1.1",
    "libcuda_loader.so",
    "libnvidia-ptxjitcompiler.so.1",
    _NVML,
    "libnvidia-ml_loader.so",
    "libnvdxgdmal.so.1",
    "nvcubins.bin",
    _SMI,
)
_DATA = (".bin", ".dll")
_CAPABILITIES = {library.stem: library.capability for library in catalog.LIBRARIES}
_LOADER_CACHE = "/etc/ld.so.cache"


def is_wsl(settings: Settings) -> bool:
    """Whether the GPUs are those of Windows: /dev/dxg is there, and no NVIDIA module is loaded."""
    if os.path.exists(procfs.version_path(settings.proc_root)):
        return False
    return node_reader(settings.dev_root, settings.device_table)(DXG) is not None


def discover_wsl(settings: Settings, machine: str, architecture: Architecture) -> Inventory:
    """Everything that such a node has. `machine` is of `uname -m`.

    Without an answer of NVML there are no GPUs and no versions in it, and `missing` says why: /dev/dxg can be given
    away all the same. Raises DriverError without a driver store of NVIDIA's, and without libdxcore.
    """
    read = node_reader(settings.dev_root, settings.device_table)
    folders = _nvidia_folders(settings.root)
    notes: list[str] = []
    files = [_dxcore(settings.root, architecture)]
    for folder in folders:
        files += _driver_files(settings.root, folder, architecture, notes)
    names = {os.path.basename(file.path) for file in files}
    notes += [
        f"the driver store has no {name}: update the driver in Windows" for name in _REQUIRED if name not in names
    ]
    gpus, driver, cuda = _ask_nvml(settings, folders[0], read, notes)
    return Inventory(
        driver_version=driver,
        cuda_version=cuda,
        architecture=machine,
        roots=Roots(settings.root, settings.dev_root, settings.proc_root),
        majors=procfs.read_majors(settings.proc_root),
        gpus=gpus,
        nodes=_nodes(read),
        files=tuple(files),
        missing=tuple(notes),
        kind=WSL,
    )


def _nodes(read: NodeReader) -> tuple[DeviceNode, ...]:
    node = read(DXG)
    return (DeviceNode(DXG, node.major, node.minor),) if node else ()


def _nvidia_folders(root: str) -> list[str]:
    """The driver store's folders of NVIDIA drivers, the newest first: other makers' adapters have folders beside them.

    What is in a folder decides, since its name is that of whichever .inf file a computer's maker wrote.
    """
    store = on_host(root, STORE)
    try:
        names = sorted(os.listdir(store))
    except OSError as error:
        raise DriverError(
            f"{store}: {error.strerror}; this is a WSL node ({DXG}), where Windows shows its drivers there: "
            "update WSL (wsl --update), and see that /etc/wsl.conf does not turn GPU support off"
        ) from None
    times = {name: _time(f"{store}/{name}/{_NVML}") for name in names}
    ours = [name for name in names if times[name]]
    if not ours:
        raise DriverError(
            f"no NVIDIA driver in {store}: {_listing(names)} without {_NVML}; install NVIDIA's driver in Windows "
            "(never one in Linux), and restart WSL: wsl --shutdown"
        )
    return [f"{STORE}/{name}" for name in sorted(ours, key=lambda name: -times[name])]


def _time(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


def _listing(names: list[str]) -> str:
    return f"only {', '.join(names)}" if names else "it is empty, so"


def _dxcore(root: str, architecture: Architecture) -> DriverFile:
    """libdxcore, without which no library of the driver store works. It must be shown where the loader looks for it."""
    for path in (DXCORE, *_cached(root, os.path.basename(DXCORE))):
        try:
            resolved = resolve(root, path)
            elf = read_elf(on_host(root, resolved))
        except (OSError, ValueError):
            continue
        if elf.machine == architecture.machine:
            return DriverFile(LIBRARY, catalog.UTILITY, resolved, elf.soname or os.path.basename(DXCORE), target=DXCORE)
    raise DriverError(
        f"no libdxcore.so for this machine at {on_host(root, DXCORE)} or in the loader cache; this is a WSL node "
        f"({DXG}), and without that library no program reaches the driver of Windows: update WSL (wsl --update)"
    )


def _cached(root: str, name: str) -> list[str]:
    """The paths that the loader cache has for a name; none when it is absent or damaged."""
    try:
        with open(on_host(root, resolve(root, _LOADER_CACHE)), "rb") as stream:
            return [entry.path for entry in ldcache.parse(stream.read()).entries if entry.name == name]
    except (OSError, ldcache.LoaderCacheError):
        return []


def _driver_files(root: str, folder: str, architecture: Architecture, notes: list[str]) -> Iterator[DriverFile]:
    """What containers need of one folder: libraries, the data that they load, nvidia-smi. No links are in a store."""
    for name in sorted(os.listdir(on_host(root, folder))):
        path = f"{folder}/{name}"
        where = on_host(root, path)
        if not _is_regular(where):
            continue
        if name == _SMI:
            yield DriverFile(BINARY, catalog.UTILITY, path, target=path)
        elif name.endswith(_DATA):
            yield DriverFile(CONFIG, catalog.COMPUTE, path, target=path)
        elif catalog.stem_of(name):
            yield from _library(where, path, architecture, notes)


def _is_regular(where: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(where).st_mode)
    except OSError:
        return False


def _library(where: str, path: str, architecture: Architecture, notes: list[str]) -> Iterator[DriverFile]:
    try:
        elf = read_elf(where)
    except OSError as error:
        notes.append(f"{unreadable(where, error)}; it is left out")
        return
    except ValueError as error:
        notes.append(f"{where} is no sound ELF file ({error}): update the driver in Windows; it is left out")
        return
    if elf.machine != architecture.machine:
        notes.append(f"{where} is for {elf.machine}, not for this machine; it is left out")
        return
    stem = catalog.stem_of(os.path.basename(path)).replace("_loader.so", ".so")
    yield DriverFile(LIBRARY, _CAPABILITIES.get(stem, catalog.COMPUTE), path, elf.soname, target=path)


def _ask_nvml(settings: Settings, folder: str, read: NodeReader, notes: list[str]) -> tuple[tuple[Gpu, ...], str, str]:
    """The GPUs, the driver's version and the CUDA version; a note, and nothing, when NVML does not answer."""
    subject = Subject(
        library=on_host(settings.root, f"{folder}/{_NVML}"),
        version="of Windows",
        version_path=on_host(settings.root, folder),
        dev_root=settings.dev_root,
        control_node=DXG,
    )
    try:
        answer = nvml.ask(subject, settings.nvml_timeout_s, read)
    except DriverError as error:
        notes.append(f"no GPU can be listed, and only `all` can be asked for: {error}")
        return (), "", ""
    notes += nvml.broken_gpus(answer)
    return tuple(map(_gpu, answer.gpus)), answer.driver_version, nvml.cuda_version(answer)


def _gpu(answer: GpuAnswer) -> Gpu:
    return Gpu(
        index=answer["index"],
        uuid=answer["uuid"],
        minor=NO_MINOR,
        bus_id=answer["bus_id"],
        model=answer["model"],
        brand=brand_name(answer["brand"]),
        compute_capability=".".join(map(str, answer["compute_capability"])),
        memory_mib=answer["memory_bytes"] >> 20,
    )
