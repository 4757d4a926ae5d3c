"""The driver's files of a simulated node in the Windows Subsystem for Linux.

Names are those of the established toolkit's list and of NVIDIA's driver packages for Windows. The SONAMEs of the
loaders (libcuda_loader.so is libcuda.so.1) are what their purpose demands; no public source states them.
"""

from __future__ import annotations

import os
from pathlib import Path

from nvct import ldcache, ldmerge
from nvct.sim.driver_files import STANDALONE, build_nvml, write_debian_root
from nvct.sim.folder import Folder
from nvct.sim.toolchain import Job, Toolchain

LIBRARY_FOLDER = "usr/lib/wsl/lib"
STORE = "usr/lib/wsl/drivers"
NVIDIA_STORE = f"{STORE}/nv_dispi.inf_amd64_4f1a2b3c5d6e7f80"
# The driver of the processor's own graphics, which laptops and most desktops have beside NVIDIA's.
OTHER_STORE = f"{STORE}/iigd_dch.inf_amd64_0c1d2e3f4a5b6c7d"

NVML = "libnvidia-ml.so.1"

# File name to SONAME, all but NVML.
LIBRARIES = {
    "libcuda.so.1.1": "libcuda.so.1.1",
    "libcuda_loader.so": "libcuda.so.1",
    "libcudadebugger.so.1": "libcudadebugger.so.1",
    "libnvidia-encode.so.1": "libnvidia-encode.so.1",
    "libnvidia-ml_loader.so": NVML,
    "libnvidia-opticalflow.so.1": "libnvidia-opticalflow.so.1",
    "libnvidia-ptxjitcompiler.so.1": "libnvidia-ptxjitcompiler.so.1",
    "libnvcuvid.so.1": "libnvcuvid.so.1",
    "libnvdxgdmal.so.1": "libnvdxgdmal.so.1",
    "libnvwgf2umx.so": "libnvwgf2umx.so",
}
DATA = ("nvcubins.bin", "nvoptix.bin", "nvdxgdmal64.dll")


def write_wsl_files(folder: Folder) -> tuple[str, ...]:
    """Everything with its loader cache. Returns what this machine could not make: nothing."""
    tools = Toolchain()
    write_debian_root(folder)
    nvml = build_nvml(tools)
    smi = tools.build(Job(("smi.c",), (), headers=("nvml.h",), link_with=nvml))
    for name, soname in LIBRARIES.items():
        folder.copy(f"{NVIDIA_STORE}/{name}", _build(tools, soname), 0o555)
    for name in DATA:
        folder.file(f"{NVIDIA_STORE}/{name}", f"{name} of a simulated driver\n", 0o555)
    folder.copy(f"{OTHER_STORE}/libigc.so.1", _build(tools, "libigc.so.1"), 0o555)
    folder.copy(f"{LIBRARY_FOLDER}/libdxcore.so", _build(tools, "libdxcore.so"), 0o555)
    # Windows shows these in both places.
    for where in (NVIDIA_STORE, LIBRARY_FOLDER):
        folder.copy(f"{where}/{NVML}", nvml, 0o555)
        folder.copy(f"{where}/nvidia-smi", smi, 0o555)
    for name in ("libcuda.so", "libcuda.so.1", "libcuda.so.1.1"):
        folder.copy(f"{LIBRARY_FOLDER}/{name}", _build(tools, "libcuda.so.1"), 0o555)
    _write_loader_cache(folder)
    return ()


def _build(tools: Toolchain, soname: str) -> Path:
    symbol = "nvct_sim_" + soname.split(".so")[0].replace("-", "_")
    return tools.build(Job(("library.c",), (*STANDALONE, f"-DSYMBOL={symbol}", f"-Wl,-soname,{soname}")))


def _write_loader_cache(folder: Folder) -> None:
    folder.file("etc/ld.so.conf.d/ld.wsl.conf", f"/{LIBRARY_FOLDER}\n")
    flags = ldcache.flags_for(os.uname().machine, 64)
    names = ("libdxcore.so", "libcuda.so", "libcuda.so.1", NVML)
    entries = [(name, f"/{LIBRARY_FOLDER}/{name}", flags) for name in names]
    folder.file("etc/ld.so.cache", ldmerge.merge(None, entries))
