"""Driver files for a container: where each is mounted, by which names it is found, and what an older driver left."""

from __future__ import annotations

from nvct.errors import DriverError
from nvct.model import (
    BINARY,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    SOCKET,
    CacheEdit,
    ContainerRoot,
    DriverFile,
    Inventory,
    LinkEdit,
    MountEdit,
    StaleName,
)
from nvct.plan.capabilities import library_classes
from nvct.plan.nodes import below
from nvct.record import record

_READ_ONLY = ("ro", "nosuid", "nodev")
_SOCKET = ("rw", "nosuid", "nodev", "noexec")
_FIRMWARE_FOLDER = "/lib/firmware/nvidia"

# Debian's names for the library folders of a machine: 64-bit, 32-bit (Debian multiarch specification).
_TRIPLETS = {
    "x86_64": ("x86_64-linux-gnu", "i386-linux-gnu"),
    "aarch64": ("aarch64-linux-gnu", "arm-linux-gnueabihf"),
}

# Names that programs use although no host need have them: library, name, and whether it leads to the SONAME (as
# development names do) or to the file (libGLX asks for its vendor's library for indirect rendering by this name).
_EXTRA_NAMES = (
    ("libcuda.so", "libcuda.so", True),
    ("libnvidia-opticalflow.so", "libnvidia-opticalflow.so", True),
    ("libGLX_nvidia.so", "libGLX_indirect.so.0", False),
)

# A capability is of little use without these; hosts often package them apart.
_ESSENTIAL = (
    ("utility", "libnvidia-ml.so"),
    ("compute", "libcuda.so"),
    ("video", "libnvidia-encode.so"),
    ("video", "libnvcuvid.so"),
)

# What an earlier start left can be of a driver that had other files than this one, or of other capabilities, so it is
# looked for by these beginnings of names, which cover every file of any driver version.
_LIBRARY_STEMS = (
    "libnvidia-",
    "libcuda.so",
    "libcudadebugger.so",
    "libnvcuvid.so",
    "libnvoptix.so",
    "libGLX_nvidia.so",
    "libGLX_indirect.so",
    "libEGL_nvidia.so",
    "libGLESv2_nvidia.so",
    "libGLESv1_CM_nvidia.so",
)
_VDPAU_STEM = "libvdpau_nvidia.so"
_OTHER_LEFTOVERS = (
    StaleName(_FIRMWARE_FOLDER, ""),
    StaleName("/usr/bin", "nvidia-"),
    StaleName("/usr/bin", "nv-fabricmanager"),
    # The sockets' places only, not the folders: those of the host are often mounted into containers as a whole.
    StaleName("/run/nvidia-persistenced", "socket"),
    StaleName("/run/nvidia-fabricmanager", "socket"),
)


@record
class Files:
    """The driver files of a plan."""

    mounts: tuple[MountEdit, ...]
    links: tuple[LinkEdit, ...]
    loader_cache: tuple[CacheEdit, ...]
    stale: tuple[StaleName, ...]
    warnings: tuple[str, ...]


def driver_files(inventory: Inventory, container: ContainerRoot, capabilities: tuple[str, ...]) -> Files:
    """Every driver file that the capabilities bring, with its names.

    Two files for one place: the first in the inventory is taken. Raises DriverError for an unknown architecture.
    """
    folders = _library_folders(inventory.architecture, container)
    mounts: dict[str, MountEdit] = {}
    links: dict[str, LinkEdit] = {}
    cache: dict[tuple[str, int], CacheEdit] = {}
    warnings = _lacking(inventory, capabilities)
    classes = library_classes(capabilities)
    for file in inventory.files:
        why = _reason(file, capabilities, classes)
        if not why:
            continue
        mount = _mount(inventory, file, folders, why)
        taken = mounts.setdefault(mount.target, mount)
        if taken is not mount:
            warnings.append(f"{mount.source} is left out: {taken.source} is already mounted as {mount.target}")
            continue
        if file.kind in folders:
            folder = _parent(mount.target)
            bits = 64 if file.kind == LIBRARY else 32
            _add_names(file, folder, bits, why, links, cache)
    return Files(
        tuple(mounts.values()), tuple(links.values()), tuple(cache.values()), _leftovers(folders), tuple(warnings)
    )


def _library_folders(architecture: str, container: ContainerRoot) -> dict[str, str]:
    """Where the container's loader looks, by kind of library."""
    if architecture not in _TRIPLETS:
        raise DriverError(
            f"the architecture of this inventory is {architecture!r}; nvct knows {' and '.join(_TRIPLETS)}; "
            "discover the node on such a machine"
        )
    if container.debian:
        wide, narrow = _TRIPLETS[architecture]
        return {LIBRARY: f"/usr/lib/{wide}", LIBRARY32: f"/usr/lib/{narrow}"}
    # Red Hat and others keep 32-bit libraries in /usr/lib, unless that is another name for /usr/lib64.
    narrow = "/usr/lib32" if container.lib32 or container.lib_is_lib64 else "/usr/lib"
    return {LIBRARY: "/usr/lib64", LIBRARY32: narrow}


def _reason(file: DriverFile, capabilities: tuple[str, ...], classes: dict[str, str]) -> str:
    """Why the container gets this file; "" when it does not."""
    if file.kind == FIRMWARE:
        return "firmware of this driver version"
    if file.kind in (BINARY, SOCKET):
        return f"capability {file.capability}" if file.capability in capabilities else ""
    capability = classes.get(file.capability)
    if capability is None:
        return ""
    if file.kind == LIBRARY32:
        return f"capabilities {capability} and compat32" if "compat32" in capabilities else ""
    return f"capability {capability}"


def _mount(inventory: Inventory, file: DriverFile, folders: dict[str, str], why: str) -> MountEdit:
    source = below(inventory.roots.root, file.path)
    name = _name(file.path)
    if file.kind == BINARY:
        return MountEdit(source, f"/usr/bin/{name}", _READ_ONLY, why)
    if file.kind == FIRMWARE:
        # Not required: GPUs before Turing need none, and the folder can be on a file system that cannot be bound.
        target = f"{_FIRMWARE_FOLDER}/{inventory.driver_version}/{name}"
        return MountEdit(source, target, _READ_ONLY, why, required=False)
    if file.kind == SOCKET:
        # Not required: a daemon that is not running at this moment must not stop a container.
        target = file.path[len("/var") :] if file.path.startswith("/var/run/") else file.path
        return MountEdit(source, target, _SOCKET, why, required=False)
    folder = folders[file.kind]
    if _name(_parent(file.path)) == "vdpau":
        folder += "/vdpau"  # libvdpau looks for its drivers in this subfolder only
    return MountEdit(source, f"{folder}/{name}", _READ_ONLY, why)


def _add_names(
    file: DriverFile,
    folder: str,
    bits: int,
    why: str,
    links: dict[str, LinkEdit],
    cache: dict[tuple[str, int], CacheEdit],
) -> None:
    """Add the names by which programs find a library: links beside it, and the loader cache's lines for them."""
    for name, target in _names(file):
        path = f"{folder}/{name}"
        if target:
            links.setdefault(path, LinkEdit(path, target, f"name of {_name(file.path)} ({why})"))
        cache.setdefault((name, bits), CacheEdit(name, path, bits, why))


def _names(file: DriverFile) -> list[tuple[str, str]]:
    """(name, what the link of that name says) pairs; "" where the file itself has the name."""
    name = _name(file.path)
    soname = file.soname or name
    names = [(soname, name if soname != name else "")]
    names += [(link, soname) for link in file.links]
    for library, extra, to_soname in _EXTRA_NAMES:
        if name.startswith(library + "."):
            names.append((extra, soname if to_soname else name))
    return names


def _leftovers(folders: dict[str, str]) -> tuple[StaleName, ...]:
    libraries = [StaleName(folder, stem) for folder in folders.values() for stem in _LIBRARY_STEMS]
    vdpau = [StaleName(f"{folder}/vdpau", _VDPAU_STEM) for folder in folders.values()]
    return (*libraries, *vdpau, *_OTHER_LEFTOVERS)


def _lacking(inventory: Inventory, capabilities: tuple[str, ...]) -> list[str]:
    names = [_name(file.path) for file in inventory.files if file.kind == LIBRARY]
    return [
        f"capability {capability} is asked for, but this node has no {library} of driver {inventory.driver_version} "
        f"below {inventory.roots.root}; install the driver package that holds it"
        for capability, library in _ESSENTIAL
        if capability in capabilities and not any(name.startswith(library) for name in names)
    ]


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
