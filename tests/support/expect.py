"""What containers must get of a simulated node, by tables written from the driver's package lists.

Nothing here is computed by nvct's plan: `wanted` spells a container out from a node's facts and these tables, `seen`
looks at a real container, and tests compare the two as wholes.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from stat import S_ISCHR
from types import MappingProxyType
from typing import Any

from tests.support.nodes import SimNode
from tests.support.runc import BY_HOOK, RuncContainer

# classes | bits | file | SONAME | more names. {v} is the driver's version; a `.so` name leads to the SONAME.
LIBRARIES = """
utility          64,32 libnvidia-ml.so.{v}              libnvidia-ml.so.1                 libnvidia-ml.so
utility          64    libnvidia-cfg.so.{v}             libnvidia-cfg.so.1                libnvidia-cfg.so
utility          64    libnvidia-nscq.so.{v}            libnvidia-nscq.so.2               -
compute          64,32 libcuda.so.{v}                   libcuda.so.1                      libcuda.so
compute          64    libcudadebugger.so.{v}           libcudadebugger.so.1              -
compute          64,32 libnvidia-opencl.so.{v}          libnvidia-opencl.so.1             -
compute,graphics 64,32 libnvidia-gpucomp.so.{v}         libnvidia-gpucomp.so.{v}          -
compute          64,32 libnvidia-ptxjitcompiler.so.{v}  libnvidia-ptxjitcompiler.so.1     libnvidia-ptxjitcompiler.so
compute          64,32 libnvidia-fatbinaryloader.so.{v} libnvidia-fatbinaryloader.so.{v}  -
compute,graphics 64,32 libnvidia-allocator.so.{v}       libnvidia-allocator.so.1          libnvidia-allocator.so
compute          64,32 libnvidia-compiler.so.{v}        libnvidia-compiler.so.{v}         -
compute          64    libnvidia-pkcs11.so.{v}          libnvidia-pkcs11.so.{v}           -
compute          64    libnvidia-pkcs11-openssl3.so.{v} libnvidia-pkcs11-openssl3.so.{v}  -
compute          64,32 libnvidia-nvvm.so.{v}            libnvidia-nvvm.so.4               libnvidia-nvvm.so
compute          64    libnvidia-nvvm70.so.4            libnvidia-nvvm70.so.4             -
compute          64    libnvidia-tileiras.so.{v}        libnvidia-tileiras.so.{v}         -
video            64,32 vdpau/libvdpau_nvidia.so.{v}     libvdpau_nvidia.so.1              -
video            64,32 libnvidia-encode.so.{v}          libnvidia-encode.so.1             libnvidia-encode.so
video            64,32 libnvidia-opticalflow.so.{v}     libnvidia-opticalflow.so.1        libnvidia-opticalflow.so
video            64,32 libnvcuvid.so.{v}                libnvcuvid.so.1                   libnvcuvid.so
graphics         64,32 libnvidia-eglcore.so.{v}         libnvidia-eglcore.so.{v}          -
graphics         64,32 libnvidia-glcore.so.{v}          libnvidia-glcore.so.{v}           -
graphics         64,32 libnvidia-tls.so.{v}             libnvidia-tls.so.{v}              -
graphics         64,32 libnvidia-glsi.so.{v}            libnvidia-glsi.so.{v}             -
graphics         64,32 libnvidia-fbc.so.{v}             libnvidia-fbc.so.1                libnvidia-fbc.so
graphics         64,32 libnvidia-ifr.so.{v}             libnvidia-ifr.so.1                libnvidia-ifr.so
graphics         64    libnvidia-rtcore.so.{v}          libnvidia-rtcore.so.{v}           -
graphics         64    libnvoptix.so.{v}                libnvoptix.so.1                   -
graphics         64,32 libGLX_nvidia.so.{v}             libGLX_nvidia.so.0                libGLX_indirect.so.0
graphics         64,32 libEGL_nvidia.so.{v}             libEGL_nvidia.so.0                -
graphics         64,32 libGLESv2_nvidia.so.{v}          libGLESv2_nvidia.so.2             -
graphics         64,32 libGLESv1_CM_nvidia.so.{v}       libGLESv1_CM_nvidia.so.1          -
graphics         64,32 libnvidia-glvkspirv.so.{v}       libnvidia-glvkspirv.so.{v}        -
graphics         64    libnvidia-cbl.so.{v}             libnvidia-cbl.so.{v}              -
graphics         64    libnvidia-vulkan-producer.so.{v} libnvidia-vulkan-producer.so.{v}  libnvidia-vulkan-producer.so
graphics         64,32 libnvidia-egl-gbm.so.1.1.1       libnvidia-egl-gbm.so.1            -
graphics         64    libnvidia-egl-wayland.so.1.1.13  libnvidia-egl-wayland.so.1        -
graphics         64    libnvidia-egl-wayland2.so.1.0.0  libnvidia-egl-wayland2.so.1       -
graphics         64,32 libnvidia-egl-xcb.so.1.0.0       libnvidia-egl-xcb.so.1            -
graphics         64,32 libnvidia-egl-xlib.so.1.0.0      libnvidia-egl-xlib.so.1           -
ngx              64    libnvidia-ngx.so.{v}             libnvidia-ngx.so.1                -
"""

PROGRAMS = {
    "utility": ("nvidia-smi", "nvidia-debugdump", "nvidia-persistenced"),
    "compute": ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server"),
    "display": ("nvidia-xconfig",),
}

# Files that programs look for at fixed places, by class; the last two rows of graphics lie elsewhere on the node.
CONFIGS = {
    "compute": ("/etc/OpenCL/vendors/nvidia.icd",),
    "graphics": (
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json",
        "/usr/share/egl/egl_external_platform.d/09_nvidia_wayland2.json",
        "/usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json",
        "/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json",
        "/usr/share/egl/egl_external_platform.d/20_nvidia_xcb.json",
        "/usr/share/egl/egl_external_platform.d/20_nvidia_xlib.json",
        "/usr/share/nvidia/nvoptix.bin",
        "/etc/vulkan/icd.d/nvidia_icd.json",
        "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
    ),
    "display": ("/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf",),
}
NODES_VULKAN = "/usr/share/vulkan/"

# Modules of an X server keep the node's folder in every container, since the file for xorg.conf.d names it.
XORG = f"/usr/lib/{os.uname().machine}-linux-gnu/nvidia/xorg"
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"

# Classes of files that a capability brings.
BRINGS = {
    "compute": {"compute"},
    "utility": {"utility"},
    "video": {"video", "compute"},
    "compat32": set(),
    "ngx": {"ngx"},
    "graphics": {"graphics"},
    "display": {"graphics", "display"},
}

# Where libraries go: family of the root file system → (64-bit, 32-bit).
FOLDERS = {
    "debian": (f"/usr/lib/{os.uname().machine}-linux-gnu", "/usr/lib/i386-linux-gnu"),
    "lib64": ("/usr/lib64", "/usr/lib"),
    "busybox": ("/usr/lib64", "/usr/lib"),
}

READ_ONLY = ("nodev", "nosuid", "ro")
SOCKET = ("nodev", "noexec", "nosuid", "rw")
DEVICE = ("noexec", "nosuid", "ro")
CONFIG = ("nodev", "noexec", "nosuid", "ro")
PROC = ("nodev", "noexec", "nosuid", "ro")

# What every container has, with GPUs or without.
USUAL_NODES = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx"}
USUAL_LINKS = {"/dev/core", "/dev/fd", "/dev/ptmx", "/dev/stdin", "/dev/stdout", "/dev/stderr"}
USUAL_MOUNTS = {"/", "/dev", "/proc", "/sys", "/proc/driver"}
USUAL_RULES = {"b *:* m", "c *:* m", "c 1:3 rwm", "c 1:5 rwm", "c 1:7 rwm", "c 1:8 rwm", "c 1:9 rwm", "c 5:0 rwm"}
USUAL_RULES |= {"c 5:2 rwm", "c 136:* rwm", "c 10:200 rwm"}

NOTHING: dict[str, Any] = {
    "nodes": {},
    "mounts": {},
    "links": {},
    "gone": set(),
    "strangers": set(),
    "written": set(),
    "names": {},
    "proc": set(),
    "opens": set(),
    "sees": set(),
}


def wanted(
    node: SimNode,
    devices: Sequence[str],
    capabilities: Collection[str] = ("compute", "utility"),
    family: str = "debian",
    without: Collection[str] = (),
) -> dict[str, Any]:
    """What `seen` must show. `devices` are names of the node's tables: GPUs "2", MIG devices "0:1".

    `without`: stems of libraries that the node lacks.
    """
    mig = [node.mig[name] for name in devices if name in node.mig]
    gpus = {name: node.gpus[name] for name in [*(d for d in devices if d in node.gpus), *(part.gpu for part in mig)]}
    classes = set().union(*(BRINGS[capability] for capability in capabilities))
    nodes = _nodes(node, [gpu.minor for gpu in gpus.values()], capabilities)
    for part in mig:
        for minor in (part.gi_minor, part.ci_minor):
            nodes[f"/dev/nvidia-caps/nvidia-cap{minor}"] = (node.majors["nvidia-caps"], minor)
    access = {f"capabilities/gpu{gpus[part.gpu].minor}/mig/gi{part.gi}/access" for part in mig}
    access |= {f"capabilities/gpu{gpus[part.gpu].minor}/mig/gi{part.gi}/ci{part.ci}/access" for part in mig}
    mounts, links, names = _libraries(node, classes, "compat32" in capabilities, family, without)
    mounts |= _other_files(node, capabilities)
    mounts |= {path: CONFIG for name in classes for path in CONFIGS.get(name, ())}
    if "display" in classes:
        mounts |= {f"{XORG}/nvidia_drv.so": READ_ONLY, f"{XORG}/libglxserver_nvidia.so.{node.version}": READ_ONLY}
        links[f"{XORG}/libglxserver_nvidia.so"] = f"libglxserver_nvidia.so.{node.version}"
    written = {"/etc/ld.so.cache"} if names else set()
    if "graphics" in classes:
        written.add(PROFILE)
        # A GPU in MIG mode computes only, its parts too.
        for gpu in (gpu for name, gpu in gpus.items() if name not in node.mig_mode):
            drm_nodes, drm_links = node.drm(gpu)
            nodes |= drm_nodes
            links |= drm_links
    mounts |= dict.fromkeys(nodes, DEVICE)
    folder = "/proc/driver/nvidia"
    bound = {f"{folder}/gpus/{gpu.bus}" for gpu in gpus.values()} | {f"{folder}/{path}" for path in access}
    mounts |= dict.fromkeys({folder, *bound}, PROC)
    information = {f"gpus/{gpu.bus}/{name}" for gpu in gpus.values() for name in ("information", "registry")}
    sees = {gpu.uuid for gpu in gpus.values()} | {part.uuid for part in mig}
    return {
        "nodes": nodes,
        "mounts": mounts,
        "links": links,
        "gone": set(),
        "strangers": set(),
        "written": written,
        "names": names,
        "proc": {"version", "params", "registry"} | information | access,
        "opens": set(nodes.values()),
        # The program needs the C library, and the utility capability brings it.
        "sees": sees if family != "busybox" and "utility" in capabilities else set(),
    }


def carried(expected: dict[str, Any], carrier: str) -> dict[str, Any]:
    """What `wanted` says as a carrier does it: a runtime makes the device nodes that the hook mounts."""
    if carrier == BY_HOOK:
        return expected
    mounts = {path: options for path, options in expected["mounts"].items() if path not in expected["nodes"]}
    return {**expected, "mounts": mounts}


def _nodes(node: SimNode, minors: list[int], capabilities: Collection[str]) -> dict[str, tuple[int, int]]:
    nodes = {"/dev/nvidiactl": (195, 255)}
    if {"compute", "video"} & set(capabilities):
        uvm = node.majors["nvidia-uvm"]
        nodes |= {"/dev/nvidia-uvm": (uvm, 0), "/dev/nvidia-uvm-tools": (uvm, 1)}
    if "display" in capabilities:
        nodes["/dev/nvidia-modeset"] = (195, 254)
    return nodes | {f"/dev/nvidia{minor}": (195, minor) for minor in minors}


def _libraries(
    node: SimNode, classes: set[str], compat32: bool, family: str, without: Collection[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str], dict[tuple[str, int], str]]:
    """Mounts, links and loader cache names of the libraries."""
    mounts: dict[str, tuple[str, ...]] = {}
    links: dict[str, str] = {}
    names: dict[tuple[str, int], str] = {}
    wide, narrow = FOLDERS[family]
    folders = {"64": wide, "32": narrow} if compat32 else {"64": wide}
    for line in LIBRARIES.format(v=node.version).split("\n")[1:-1]:
        of_classes, every_bits, file, soname, more = line.split()
        if not classes.intersection(of_classes.split(",")) or file.startswith(tuple(without)):
            continue
        for bits in set(every_bits.split(",")) & folders.keys():
            target = f"{folders[bits]}/{file}"
            folder, _, name = target.rpartition("/")
            mounts[target] = READ_ONLY
            names[soname, int(bits)] = f"{folder}/{soname}"
            if soname != name:
                links[f"{folder}/{soname}"] = name
            if more != "-":
                links[f"{folder}/{more}"] = name if more == "libGLX_indirect.so.0" else soname
                names[more, int(bits)] = f"{folder}/{more}"
    if "graphics" in classes:
        links |= {f"{folder}/gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.1" for folder in folders.values()}
    return mounts, links, names


def _other_files(node: SimNode, capabilities: Collection[str]) -> dict[str, tuple[str, ...]]:
    programs = [name for capability in capabilities for name in PROGRAMS.get(capability, ())]
    sockets = ["/run/nvidia-persistenced/socket"]
    if node.spec.fabric_manager and "utility" in capabilities:
        programs.append("nv-fabricmanager")
        sockets.append("/run/nvidia-fabricmanager/socket")
    # One firmware file for all chips before driver 525.
    firmware = ("gsp_ga10x.bin", "gsp_tu10x.bin") if node.version >= "525" else ("gsp.bin",)
    found: dict[str, tuple[str, ...]] = {f"/usr/bin/{name}": READ_ONLY for name in programs}
    found |= {f"/usr/lib/firmware/nvidia/{node.version}/{name}": READ_ONLY for name in firmware}
    if "utility" in capabilities:
        found |= dict.fromkeys(sockets, SOCKET)
    return found


def seen(container: RuncContainer, node: SimNode, sources: Mapping[str, str] | None = None) -> dict[str, Any]:
    """All that a container has beyond the usual, and beyond what its image had.

    `sources`: by path in the container, where the node has what is mounted there, if elsewhere than the hook has it
    from.
    """
    mounts = {
        path: tuple(sorted(options - {"relatime"}))
        for path, options in container.mounts().items()
        if path not in USUAL_MOUNTS
    }
    after = container.image()
    changed = {path for path, what in after.items() if container.before.get(path) != what}
    links = {path: after[path].text for path in changed if after[path].is_link}
    explained = {path for path in changed if path in mounts and after[path].is_empty_file}
    written = changed - links.keys() - explained
    wherever = [*mounts, *links, *(path for path in written if not after[path].is_folder)]
    written -= {path for path in written if after[path].is_folder and any(w.startswith(f"{path}/") for w in wherever)}
    said = container.look(node.device_numbers())
    return {
        "nodes": _device_nodes(container.root),
        "mounts": mounts,
        "links": links | _device_links(container.root),
        "gone": set(container.before) - set(after),
        "strangers": strangers(container, node, mounts, sources or {}),
        "written": written,
        "names": container.new_loader_names(),
        "proc": _files(container.root / "proc/driver/nvidia") if "/proc/driver/nvidia" in mounts else set(),
        "opens": said.opens,
        "sees": said.uuids,
    }


def rules_v1(nodes: dict[str, tuple[int, int]]) -> set[str]:
    """The whole list of a device cgroup v1 that allows these nodes."""
    return USUAL_RULES | {f"c {major}:{minor} rw" for major, minor in nodes.values()}


def _device_nodes(root: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in (root / "dev").rglob("*"):
        status = path.lstat()
        if S_ISCHR(status.st_mode) and path.name not in USUAL_NODES:
            found[f"/{path.relative_to(root)}"] = (os.major(status.st_rdev), os.minor(status.st_rdev))
    return found


def _device_links(root: Path) -> dict[str, str]:
    links = {f"/{path.relative_to(root)}": os.readlink(path) for path in (root / "dev").rglob("*") if path.is_symlink()}
    return {path: text for path, text in links.items() if path not in USUAL_LINKS}


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def strangers(
    container: RuncContainer, node: SimNode, mounts: Collection[str], sources: Mapping[str, str] = MappingProxyType({})
) -> set[str]:
    """The mounts that show something else than the node's file of that name."""
    found = set()
    for path in mounts:
        if path == "/proc/driver/nvidia":
            continue
        inside = os.lstat(f"{container.root}{path}")
        source = Path(f"{node.path}{sources.get(path) or _source_of(path, container.family)}")
        if not os.path.lexists(source) or not os.path.samestat(inside, source.lstat()):
            found.add(path)
    return found


def _source_of(target: str, family: str) -> str:
    """Where the node has what is mounted there: only libraries and Vulkan's lists change their folder."""
    if target.startswith("/etc/vulkan/"):
        return NODES_VULKAN + target.removeprefix("/etc/vulkan/")
    for folder, source in zip(FOLDERS[family], FOLDERS["debian"]):
        if target.startswith((f"{folder}/lib", f"{folder}/vdpau/")):
            return source + target[len(folder) :]
    return target
