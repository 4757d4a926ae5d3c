"""Driver files for a container: where each is mounted, by which names it is found, and what an older driver left."""

from __future__ import annotations

from nvct.errors import DriverError
from nvct.model import (
    BINARY,
    CONFIG,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    MODULE,
    SOCKET,
    CacheEdit,
    ContainerRoot,
    DriverFile,
    Inventory,
    LeftOut,
    LinkEdit,
    MountEdit,
    StaleName,
)
from nvct.plan.capabilities import library_classes
from nvct.plan.nodes import below
from nvct.record import record
from nvct.settings import PARTS, Settings

_READ_ONLY = ("ro", "nosuid", "nodev")
_CONFIG = ("ro", "nosuid", "nodev", "noexec")
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

# The driver's OpenGL and Vulkan need these as much as CUDA does, whose files they are counted among: a compiler
# (`Various libraries that are used internally`, says the driver's README), and what allocates buffers for GBM.
_GRAPHICS_TOO = ("libnvidia-gpucomp.so", "libnvidia-allocator.so")

# Mesa's GBM looks for a driver's backend by this name, in a subfolder of the library folder.
_GBM_LIBRARY = "libnvidia-allocator.so"
_GBM_NAME = "gbm/nvidia-drm_gbm.so"

# The parts of settings.PARTS that are sockets: capability, and what its path holds.
_SOCKETS = {
    "persistenced": ("utility", "/nvidia-persistenced/"),
    "fabricmanager": ("utility", "/nvidia-fabricmanager/"),
    "mps": ("compute", "/nvidia-mps"),
}

# What programs do not find without a file that names the driver's library: capability, program interface, folder.
_ICDS = (
    ("graphics", "EGL", "/usr/share/glvnd/egl_vendor.d/"),
    ("graphics", "Vulkan", "/etc/vulkan/icd.d/"),
    ("compute", "OpenCL", "/etc/OpenCL/vendors/"),
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
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]


def driver_files(
    inventory: Inventory,
    container: ContainerRoot,
    capabilities: tuple[str, ...],
    extras: tuple[str, ...],
    settings: Settings,
) -> Files:
    """Every driver file that the capabilities bring, with its names.

    `extras` are the kinds of extra nodes that the container gets, since some have files of their own. Two files for one
    place: the first in the inventory is taken. Raises DriverError for an unknown architecture.
    """
    folders = library_folders(inventory.architecture, container)
    mounts: dict[str, MountEdit] = {}
    links: dict[str, LinkEdit] = {}
    cache: dict[tuple[str, int], CacheEdit] = {}
    stale = dict.fromkeys(_leftovers(folders))
    classes = {**library_classes(capabilities), **{extra: extra for extra in extras}}
    warnings = _lacking(inventory, capabilities)
    left_out = [LeftOut(library, sentence) for library, sentence in warnings.items()]
    left_out += _without(inventory, capabilities, classes, settings)
    clashes = []
    for file in inventory.files:
        why = _reason(file, capabilities, classes)
        part = _part(file)
        if not why or (part and not settings.parts[part]):
            continue
        mount = _mount(inventory, file, folders, why)
        taken = mounts.setdefault(mount.target, mount)
        if taken is not mount:
            reason = f"{taken.source} is already mounted as {mount.target}"
            left_out.append(LeftOut(mount.source, reason))
            clashes.append(f"{mount.source} is left out: {reason}")
            continue
        if file.kind in folders:
            folder = _parent(mount.target)
            bits = 64 if file.kind == LIBRARY else 32
            _add_names(file, folder, bits, why, links, cache)
            if _is(file, _GBM_LIBRARY) and "graphics" in classes:
                path = f"{folder}/{_GBM_NAME}"
                links[path] = LinkEdit(path, f"../{file.soname or _name(file.path)}", "the driver's backend of GBM")
        elif file.kind == MODULE:
            folder = _parent(mount.target)
            for link in file.links:
                links[f"{folder}/{link}"] = LinkEdit(f"{folder}/{link}", _name(mount.target), why)
                stale[StaleName(folder, link)] = None
    return Files(
        mounts=tuple(mounts.values()),
        links=tuple(links.values()),
        loader_cache=tuple(cache.values()),
        stale=tuple(stale),
        left_out=tuple(left_out),
        warnings=(*warnings.values(), *clashes),
    )


def library_folders(architecture: str, container: ContainerRoot) -> dict[str, str]:
    """Where the container's loader looks, by kind of library. Raises DriverError for an unknown architecture."""
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
    if capability is None and any(_is(file, library) for library in _GRAPHICS_TOO):
        capability = classes.get("graphics")
    if capability is None:
        return ""
    if capability == file.capability and capability not in capabilities:
        return f"{capability}, asked for by name"
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
    if file.kind == CONFIG:
        # Not required: /etc can hold a read-only volume, and not every program uses these libraries by these files.
        return MountEdit(source, file.target, _CONFIG, why, required=False)
    if file.kind == MODULE:
        return MountEdit(source, file.target, _READ_ONLY, why)
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


def _lacking(inventory: Inventory, capabilities: tuple[str, ...]) -> dict[str, str]:
    """The libraries that this node lacks although a capability is of little use without: name, and a sentence."""
    return {
        library: f"capability {capability} is asked for, but this node has no {library} of driver "
        f"{inventory.driver_version} below {inventory.roots.root}; install the driver package that holds it"
        for capability, library in _ESSENTIAL
        if capability in capabilities
        and not any(file.kind == LIBRARY and _is(file, library) for file in inventory.files)
    }


def _without(
    inventory: Inventory, capabilities: tuple[str, ...], classes: dict[str, str], settings: Settings
) -> list[LeftOut]:
    """What the settings leave out, and what this node does not have, of the parts that are not libraries."""
    found = {_part(file) for file in inventory.files}
    parts = {part: _SOCKETS[part][0] for part in _SOCKETS if _SOCKETS[part][0] in capabilities}
    left_out = []
    for part in (*parts, "firmware"):
        if not settings.parts[part]:
            left_out.append(LeftOut(PARTS[part], f"the part {part} is off in the settings"))
        elif part not in found:
            left_out.append(LeftOut(PARTS[part], f"this node has none below {inventory.roots.root}"))
    for capability, interface, folder in _ICDS:
        if capability in classes and not any(file.target.startswith(folder) for file in inventory.files):
            reason = f"this node has no file of the driver's for {folder}; install the driver package that holds it"
            left_out.append(LeftOut(f"{interface} (capability {classes[capability]})", reason))
    return left_out


def _part(file: DriverFile) -> str:
    """The part of settings.PARTS that a file is; "" for what is not optional."""
    if file.kind == FIRMWARE:
        return "firmware"
    if file.kind == SOCKET:
        return next((part for part, (_, path) in _SOCKETS.items() if path in file.path), "")
    return ""


def _is(file: DriverFile, library: str) -> bool:
    return _name(file.path).startswith(library + ".")


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]
