"""The files of a simulated driver that programs look for at fixed places: loaders' lists, X server modules, cuFile's.

Where a driver's packages for Debian put them. Their texts are what the programs that read them expect.
"""

from __future__ import annotations

import json

from nvct.sim.driver_files import STANDALONE, library_folder
from nvct.sim.folder import Folder
from nvct.sim.spec import NodeSpec
from nvct.sim.toolchain import Job, Toolchain

_EGL_PLATFORMS = {
    "15_nvidia_gbm": "libnvidia-egl-gbm.so.1",
    "10_nvidia_wayland": "libnvidia-egl-wayland.so.1",
    "09_nvidia_wayland2": "libnvidia-egl-wayland2.so.1",
    "20_nvidia_xcb": "libnvidia-egl-xcb.so.1",
    "20_nvidia_xlib": "libnvidia-egl-xlib.so.1",
}

_OUTPUT_CLASS = """\
Section "OutputClass"
    Identifier "nvidia"
    MatchDriver "nvidia-drm"
    Driver "nvidia"
    ModulePath "/{folder}/nvidia/xorg"
EndSection
"""


def write_config_files(folder: Folder, spec: NodeSpec) -> None:
    """Configuration for EGL, Vulkan, OpenCL, OptiX and X, X server modules, and cuFile's where the node has GDS."""
    folder.file("usr/share/glvnd/egl_vendor.d/10_nvidia.json", _loader_list("1.0.0", "libEGL_nvidia.so.0"))
    for name, library in _EGL_PLATFORMS.items():
        folder.file(f"usr/share/egl/egl_external_platform.d/{name}.json", _loader_list("1.0.0", library))
    folder.file("usr/share/vulkan/icd.d/nvidia_icd.json", _loader_list("1.0.1", "libGLX_nvidia.so.0", "1.3.277"))
    layer = {"name": "VK_LAYER_NV_optimus", "type": "INSTANCE", "library_path": "libGLX_nvidia.so.0"}
    layers = {"file_format_version": "1.0.1", "layers": [layer]}
    folder.file("usr/share/vulkan/implicit_layer.d/nvidia_layers.json", json.dumps(layers) + "\n")
    folder.file("etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    folder.file("usr/share/nvidia/nvoptix.bin", "ray tracing programs of a simulated node\n")
    output_class = _OUTPUT_CLASS.format(folder=library_folder())
    folder.file("usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf", output_class)
    _write_xorg_modules(folder, spec.library_version)
    if spec.gds:
        folder.file("etc/cufile.json", "{}\n")
        folder.file("run/udev/data/b259:0", "E:ID_MODEL=simulated drive\n")


def _loader_list(form: str, library: str, api: str = "") -> str:
    icd = {"library_path": library, **({"api_version": api} if api else {})}
    return json.dumps({"file_format_version": form, "ICD": icd}) + "\n"


def _write_xorg_modules(folder: Folder, version: str) -> None:
    where = f"{library_folder()}/nvidia/xorg"
    sonames = {"nvidia_drv.so": "nvidia_drv.so", f"libglxserver_nvidia.so.{version}": "libglxserver_nvidia.so"}
    tools = Toolchain()
    for name, soname in sonames.items():
        options = (*STANDALONE, "-DSYMBOL=nvct_sim_xorg_module", f"-Wl,-soname,{soname}")
        folder.copy(f"{where}/{name}", tools.build(Job(("library.c",), options)), 0o644)
        if name != soname:
            folder.link(f"{where}/{soname}", name)
