"""The driver's files of a simulated node: libraries, programs, firmware, sockets, on a Debian-like root.

Names and SONAMEs are those of the real driver's packages. Two libraries that the driver has only under WSL or without
GLVND (libdxcore, its own libGL and friends) are left out, as on nearly every Linux machine.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nvct.record import record
from nvct.sim.errors import SimError
from nvct.sim.folder import Folder
from nvct.sim.toolchain import Job, Toolchain


@record
class Library:
    """A shared library. `file` and `soname` may hold {v}, the driver version; `development` is its `.so` link."""

    file: str
    soname: str
    development: str = ""


def _versioned(stem: str, number: int, development: bool = False) -> Library:
    return Library(f"{stem}.so.{{v}}", f"{stem}.so.{number}", f"{stem}.so" if development else "")


def _private(stem: str) -> Library:
    """A library that only others of the same driver load: its SONAME is its whole name."""
    return Library(f"{stem}.so.{{v}}", f"{stem}.so.{{v}}")


NVML = _versioned("libnvidia-ml", 1, development=True)

# Those that the driver also ships for 32-bit programs.
LIBRARIES_BOTH = (
    _versioned("libcuda", 1, development=True),
    _versioned("libnvidia-opencl", 1),
    _versioned("libnvidia-ptxjitcompiler", 1, development=True),
    _private("libnvidia-gpucomp"),
    _versioned("libnvidia-allocator", 1, development=True),
    _private("libnvidia-fatbinaryloader"),
    _private("libnvidia-compiler"),
    _versioned("libnvidia-nvvm", 4, development=True),
    _versioned("vdpau/libvdpau_nvidia", 1),
    _versioned("libnvidia-encode", 1, development=True),
    _versioned("libnvidia-opticalflow", 1, development=True),
    _versioned("libnvcuvid", 1, development=True),
    _private("libnvidia-eglcore"),
    _private("libnvidia-glcore"),
    _private("libnvidia-tls"),
    _private("libnvidia-glsi"),
    _versioned("libnvidia-fbc", 1, development=True),
    _versioned("libnvidia-ifr", 1, development=True),
    _versioned("libGLX_nvidia", 0),
    _versioned("libEGL_nvidia", 0),
    _versioned("libGLESv2_nvidia", 2),
    _versioned("libGLESv1_CM_nvidia", 1),
    _private("libnvidia-glvkspirv"),
    # Graphics platform libraries have versions of their own.
    Library("libnvidia-egl-gbm.so.1.1.1", "libnvidia-egl-gbm.so.1"),
    Library("libnvidia-egl-xcb.so.1.0.0", "libnvidia-egl-xcb.so.1"),
    Library("libnvidia-egl-xlib.so.1.0.0", "libnvidia-egl-xlib.so.1"),
)

LIBRARIES_64 = (
    _versioned("libnvidia-cfg", 1, development=True),
    _versioned("libnvidia-nscq", 2),
    _versioned("libcudadebugger", 1),
    _private("libnvidia-pkcs11"),
    _private("libnvidia-pkcs11-openssl3"),
    Library("libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4"),
    _private("libnvidia-tileiras"),
    _private("libnvidia-rtcore"),
    _versioned("libnvoptix", 1),
    _private("libnvidia-cbl"),
    _versioned("libnvidia-ngx", 1),
    Library("libnvidia-vulkan-producer.so.{v}", "libnvidia-vulkan-producer.so.{v}", "libnvidia-vulkan-producer.so"),
    Library("libnvidia-egl-wayland.so.1.1.13", "libnvidia-egl-wayland.so.1"),
    Library("libnvidia-egl-wayland2.so.1.0.0", "libnvidia-egl-wayland2.so.1"),
    Library("libnvidia-api.so.1", "libnvidia-api.so.1"),
)

PROGRAMS = (
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
    "nvidia-xconfig",
)

_TRIPLETS = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
TRIPLET_32 = "i386-linux-gnu"

# No C library, no start files: the same object loads in every container of its machine.
STANDALONE = ("-shared", "-fPIC", "-nostdlib", "-Wl,-z,noseparate-code", "-Wl,--hash-style=both")


def library_folder() -> str:
    """Where this machine's 64-bit libraries lie on Debian, below the driver root."""
    machine = os.uname().machine
    if machine not in _TRIPLETS:
        raise SimError(f"no simulated driver for the architecture {machine}; there is one for {', '.join(_TRIPLETS)}")
    return f"usr/lib/{_TRIPLETS[machine]}"


def symbol(library: Library) -> str:
    """The one function of a library that is not NVML: nvct_sim_ and its name without version; it returns 1."""
    return "nvct_sim_" + re.sub(r"\W", "_", Path(library.file).name.split(".so")[0])


def write_driver_files(folder: Folder, version: str, fabric_manager: bool) -> tuple[str, ...]:
    """Everything but the loader cache. Returns a sentence for each thing that this machine could not make."""
    tools = Toolchain()
    write_debian_root(folder)
    where = library_folder()
    nvml = build_nvml(tools)
    folder.copy(f"{where}/{NVML.file.format(v=version)}", nvml, 0o644)
    _write_links(folder, where, NVML, version)
    _write_libraries(folder, tools, where, (*LIBRARIES_BOTH, *LIBRARIES_64), version, ())
    folder.link(f"{where}/gbm/nvidia-drm_gbm.so", "../libnvidia-allocator.so.1")
    _write_programs(folder, tools, nvml, fabric_manager)
    _write_firmware(folder, version)
    _write_socket(folder, "run/nvidia-persistenced")
    if fabric_manager:
        _write_socket(folder, "run/nvidia-fabricmanager")
    return _write_libraries_32(folder, tools, version)


def write_loader_cache(folder: Folder, version: str) -> str:
    """etc/ld.so.cache: by the machine's ldconfig as root, else by nvct's own writer. Returns which, for messages."""
    folders = [f"/{library_folder()}", f"/usr/lib/{TRIPLET_32}"]
    folder.file("etc/ld.so.conf", "include /etc/ld.so.conf.d/*.conf\n")
    folder.file("etc/ld.so.conf.d/nvct-sim.conf", "".join(f"{path}\n" for path in folders))
    if os.geteuid() == 0 and (ldconfig := _ldconfig()):
        command = [ldconfig, "-X", "-r", str(folder.top)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SimError(f"{' '.join(command)} failed: {' '.join(done.stderr.split())[:500]}")
        return ldconfig
    folder.file("etc/ld.so.cache", _own_loader_cache(folder, version))
    return "nvct"


def _ldconfig() -> str | None:
    found = [path for path in ("/sbin/ldconfig", "/usr/sbin/ldconfig") if os.access(path, os.X_OK)]
    return found[0] if found else None


def _own_loader_cache(folder: Folder, version: str) -> bytes:
    from nvct import ldcache, ldmerge

    machine = os.uname().machine
    entries = []
    for where, libraries, bits in (
        (library_folder(), (NVML, *LIBRARIES_BOTH, *LIBRARIES_64), 64),
        (f"usr/lib/{TRIPLET_32}", (NVML, *LIBRARIES_BOTH), 32),
    ):
        if not (folder.top / where).is_dir():
            continue
        flags = ldcache.flags_for(machine, bits)
        for library in libraries:
            if "/" in library.file:  # ldconfig does not search the vdpau folder
                continue
            names = {library.soname.format(v=version), library.development} - {""}
            entries += [(name, f"/{where}/{name}", flags) for name in sorted(names)]
    return ldmerge.merge(None, entries, set())


def write_debian_root(folder: Folder) -> None:
    """Merged /usr, as Debian has it since version 12."""
    folder.file("etc/debian_version", "12.11\n")
    for name in ("bin", "sbin", "lib", "lib64"):
        folder.folder(f"usr/{name}")
        folder.link(name, f"usr/{name}")
    folder.folder("run")
    folder.link("var/run", "/run")


def build_nvml(tools: Toolchain) -> Path:
    options = ("-shared", "-fPIC", "-fvisibility=hidden", f"-Wl,-soname,{NVML.soname}", "-Wl,-z,noseparate-code")
    return tools.build(Job(("nvml.c", "state.c"), options, headers=("nvml.h", "state.h")))


def _write_libraries(
    folder: Folder, tools: Toolchain, where: str, libraries: tuple[Library, ...], version: str, options: tuple[str, ...]
) -> None:
    def build(library: Library) -> Path:
        soname = Path(library.soname.format(v=version)).name
        return tools.build(
            Job(("library.c",), (*STANDALONE, *options, f"-DSYMBOL={symbol(library)}", f"-Wl,-soname,{soname}"))
        )

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = list(pool.map(build, libraries))
    for library, path in zip(libraries, built):
        folder.copy(f"{where}/{library.file.format(v=version)}", path, 0o644)
        _write_links(folder, where, library, version)


def _write_links(folder: Folder, where: str, library: Library, version: str) -> None:
    file, soname = library.file.format(v=version), library.soname.format(v=version)
    if soname != file:
        folder.link(f"{where}/{soname}", Path(file).name)
    if library.development:
        folder.link(f"{where}/{library.development}", Path(soname).name)


def _write_libraries_32(folder: Folder, tools: Toolchain, version: str) -> tuple[str, ...]:
    if os.uname().machine != "x86_64":
        return ("no 32-bit libraries: the driver has none for this architecture",)
    where = f"usr/lib/{TRIPLET_32}"
    try:
        # NVML answers 64-bit programs only here; the 32-bit one is there to be found and loaded.
        _write_libraries(folder, tools, where, (NVML, *LIBRARIES_BOTH), version, ("-m32",))
    except SimError as error:
        return (f"no 32-bit libraries, since this compiler makes none: {error}",)
    return ()


def _write_programs(folder: Folder, tools: Toolchain, nvml: Path, fabric_manager: bool) -> None:
    # Linked by SONAME alone, without a search path: in a container only a right loader cache or folder finds NVML.
    smi = tools.build(Job(("smi.c",), (), headers=("nvml.h",), link_with=nvml))
    folder.copy("usr/bin/nvidia-smi", smi, 0o755)
    other = tools.build(Job(("program.c",), ()))
    for name in (*PROGRAMS, *(("nv-fabricmanager",) if fabric_manager else ())):
        folder.copy(f"usr/bin/{name}", other, 0o755)


def _write_firmware(folder: Folder, version: str) -> None:
    # One file for all chips before branch 525, one for each of two families since.
    names = ("gsp_ga10x.bin", "gsp_tu10x.bin") if int(version.split(".")[0]) >= 525 else ("gsp.bin",)
    for name in names:
        folder.file(f"usr/lib/firmware/nvidia/{version}/{name}", f"firmware {name} {version} of a simulated node\n")


def _write_socket(folder: Folder, where: str) -> None:
    """A bound socket that nobody listens on. Bound through a descriptor: an address has room for 107 characters."""
    opened = os.open(folder.folder(where), os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{opened}/socket")
        os.chmod("socket", 0o777, dir_fd=opened)
    finally:
        os.close(opened)
