"""Which files make up a driver, and which capability brings each: the table that discovery goes by.

Sources: the driver's own README ("Installed Components") and the established container toolkit's lists. A file that a
later driver adds is one line here.
"""

from __future__ import annotations

from nvct.record import record

UTILITY = "utility"
COMPUTE = "compute"
VIDEO = "video"
GRAPHICS = "graphics"
NGX = "ngx"
DISPLAY = "display"
GDS = "gds"  # no driver capability, but what NVIDIA_GDS asks for

NVML_STEM = "libnvidia-ml.so"


@record
class Library:
    """A library of the driver. `stem` is its name up to `.so`.

    `versioned`: its file ends in the driver's version (`libcuda.so.550.54.15`); the others have versions of their own
    (`libnvidia-nvvm70.so.4`). `expected`: every complete driver since 470 has it, so that its absence is worth a word.
    """

    stem: str
    capability: str
    expected: bool = False
    versioned: bool = True


@record
class Program:
    """A program of the driver. `expected` as for a library."""

    name: str
    capability: str
    expected: bool = False


@record
class Socket:
    """A socket, or a folder of sockets, that a driver daemon listens on: the first of `paths` that exists is meant."""

    paths: tuple[str, ...]
    capability: str


@record
class Config:
    """A file that programs look for at a fixed place: a list of the driver's libraries for a loader, or its settings.

    `name` is the path below one of `folders` on the host (the first that has it), and below `target` in a container.
    """

    name: str
    target: str
    capability: str
    folders: tuple[str, ...]


LIBRARIES = (
    Library(NVML_STEM, UTILITY, expected=True),
    Library("libnvidia-cfg.so", UTILITY, expected=True),
    Library("libnvidia-nscq.so", UTILITY),
    Library("libcuda.so", COMPUTE, expected=True),
    Library("libcudadebugger.so", COMPUTE),
    Library("libnvidia-opencl.so", COMPUTE, expected=True),
    Library("libnvidia-gpucomp.so", COMPUTE),
    Library("libnvidia-ptxjitcompiler.so", COMPUTE, expected=True),
    Library("libnvidia-fatbinaryloader.so", COMPUTE),
    Library("libnvidia-allocator.so", COMPUTE, expected=True),
    Library("libnvidia-compiler.so", COMPUTE),
    Library("libnvidia-pkcs11.so", COMPUTE),
    Library("libnvidia-pkcs11-openssl3.so", COMPUTE),
    Library("libnvidia-nvvm.so", COMPUTE),
    Library("libnvidia-nvvm70.so", COMPUTE, versioned=False),
    Library("libnvidia-tileiras.so", COMPUTE),
    Library("libvdpau_nvidia.so", VIDEO),
    Library("libnvidia-encode.so", VIDEO, expected=True),
    Library("libnvidia-opticalflow.so", VIDEO, expected=True),
    Library("libnvcuvid.so", VIDEO, expected=True),
    Library("libnvidia-eglcore.so", GRAPHICS, expected=True),
    Library("libnvidia-glcore.so", GRAPHICS, expected=True),
    Library("libnvidia-tls.so", GRAPHICS, expected=True),
    Library("libnvidia-glsi.so", GRAPHICS, expected=True),
    Library("libnvidia-fbc.so", GRAPHICS),
    Library("libnvidia-ifr.so", GRAPHICS),
    Library("libnvidia-rtcore.so", GRAPHICS),
    Library("libnvoptix.so", GRAPHICS),
    Library("libGLX_nvidia.so", GRAPHICS, expected=True),
    Library("libEGL_nvidia.so", GRAPHICS, expected=True),
    Library("libGLESv2_nvidia.so", GRAPHICS, expected=True),
    Library("libGLESv1_CM_nvidia.so", GRAPHICS, expected=True),
    Library("libnvidia-glvkspirv.so", GRAPHICS, expected=True),
    Library("libnvidia-cbl.so", GRAPHICS),
    Library("libnvidia-vulkan-producer.so", GRAPHICS),
    Library("libnvidia-egl-gbm.so", GRAPHICS, versioned=False),
    Library("libnvidia-egl-wayland.so", GRAPHICS, versioned=False),
    Library("libnvidia-egl-wayland2.so", GRAPHICS, versioned=False),
    Library("libnvidia-egl-xcb.so", GRAPHICS, versioned=False),
    Library("libnvidia-egl-xlib.so", GRAPHICS, versioned=False),
    Library("libnvidia-ngx.so", NGX, expected=True),
)

# Of the driver too, but no container has a use for them: the windows of nvidia-settings, safety-critical Vulkan, and
# the library that describes a driver to container tools. The last two are a container toolkit's own.
LEFT_OUT = (
    "libnvidia-gtk2.so",
    "libnvidia-gtk3.so",
    "libnvidia-wayland-client.so",
    "libnvidia-vksc-core.so",
    "libnvidia-sandboxutils.so",
    "libnvidia-api.so",
    "libnvidia-container.so",
    "libnvidia-container-go.so",
)

PROGRAMS = (
    Program("nvidia-smi", UTILITY, expected=True),
    Program("nvidia-debugdump", UTILITY),
    Program("nvidia-persistenced", UTILITY),
    Program("nv-fabricmanager", UTILITY),
    Program("nvidia-cuda-mps-control", COMPUTE),
    Program("nvidia-cuda-mps-server", COMPUTE),
    Program("nvidia-xconfig", DISPLAY),
)

SOCKETS = (
    Socket(("/run/nvidia-persistenced/socket", "/var/run/nvidia-persistenced/socket"), UTILITY),
    Socket(("/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket"), UTILITY),
    Socket(("/tmp/nvidia-mps",), COMPUTE),
)

# What the administrator has written goes before what a package brought.
_SHARE_FOLDERS = ("/etc", "/usr/local/share", "/usr/share")
# On Google's nodes the driver has a folder of its own, with Vulkan's files at its top.
_VULKAN_FOLDERS = (*_SHARE_FOLDERS, "")

_EGL_PLATFORMS = ("15_nvidia_gbm", "10_nvidia_wayland", "09_nvidia_wayland2", "20_nvidia_xcb", "20_nvidia_xlib")


def configs(machine: str) -> tuple[Config, ...]:
    """The driver's configuration files on a `machine` of `ARCHITECTURES`, the usual name of a file first."""
    vulkan = (
        "icd.d/nvidia_icd.json",
        f"icd.d/nvidia_icd.{machine}.json",
        "icd.d/nvidia_layers.json",
        "implicit_layer.d/nvidia_layers.json",
    )
    share = [
        ("glvnd/egl_vendor.d/10_nvidia.json", GRAPHICS),
        *((f"egl/egl_external_platform.d/{name}.json", GRAPHICS) for name in _EGL_PLATFORMS),
        ("nvidia/nvoptix.bin", GRAPHICS),
        ("X11/xorg.conf.d/10-nvidia.conf", DISPLAY),
        ("X11/xorg.conf.d/nvidia-drm-outputclass.conf", DISPLAY),
    ]
    return (
        *(Config(name, "/usr/share", capability, _SHARE_FOLDERS) for name, capability in share),
        *(Config(f"vulkan/{name}", "/etc", GRAPHICS, _VULKAN_FOLDERS) for name in vulkan),
        Config("OpenCL/vendors/nvidia.icd", "/etc", COMPUTE, _SHARE_FOLDERS),
        Config("cufile.json", "/etc", GDS, ("/etc",)),
    )


# cuFile finds the drives below a file system in udev's database.
UDEV_FOLDER = "/run/udev"

# Modules of an X server: the name, and the development name beside it ("" for none); {v} is the driver's version.
XORG_MODULES = (("nvidia_drv.so", ""), ("libglxserver_nvidia.so.{v}", "libglxserver_nvidia.so"))
_XORG_TOPS = ("/usr/lib/xorg", "/usr/lib64/xorg", "/usr/X11R6/lib", "/usr/X11R6/lib64")
_XORG_SUBFOLDERS = ("modules/drivers", "modules/extensions", "modules/updates/drivers", "modules/updates/extensions")


def xorg_folders(library_folders: tuple[str, ...]) -> tuple[str, ...]:
    """Where an X server's modules lie, the likeliest first, given the folders that the driver's libraries are in."""
    folders = []
    for folder in library_folders:
        folders += [f"{folder}/nvidia/xorg", *(f"{folder}/xorg/{inner}" for inner in _XORG_SUBFOLDERS)]
    return (*folders, *(f"{top}/{inner}" for top in _XORG_TOPS for inner in _XORG_SUBFOLDERS))


# The GPU's own firmware. It is part of every container's driver, whatever its capabilities; a file must name one.
FIRMWARE_CAPABILITY = UTILITY

PROGRAM_FOLDERS = ("/usr/bin", "/usr/sbin", "/bin", "/sbin", "/usr/local/bin", "/usr/local/sbin")


@record
class Architecture:
    """How a machine names its libraries. `machine`: ELF's e_machine in pyelftools' words; `triplet`: Debian's folder.

    The 32-bit forms are those of the programs that the machine also runs; empty where there are none.
    """

    machine: str
    triplet: str
    machine32: str = ""
    triplet32: str = ""


# By `uname -m`.
ARCHITECTURES = {
    "x86_64": Architecture("EM_X86_64", "x86_64-linux-gnu", "EM_386", "i386-linux-gnu"),
    "aarch64": Architecture("EM_AARCH64", "aarch64-linux-gnu", "EM_ARM", "arm-linux-gnueabihf"),
    "ppc64le": Architecture("EM_PPC64", "powerpc64le-linux-gnu"),
}


def library_folders(architecture: Architecture) -> tuple[str, ...]:
    """Where distributions put the driver's libraries, below the driver root, the likeliest first."""
    folders = ["/usr/lib64"]
    folders += _with_current(f"/usr/lib/{architecture.triplet}")
    folders += ["/lib64", *_with_current(f"/lib/{architecture.triplet}"), "/usr/lib32"]
    if architecture.triplet32:
        folders += _with_current(f"/usr/lib/{architecture.triplet32}")
    return (*folders, "/usr/lib")


def other_folders(architecture: Architecture) -> tuple[str, ...]:
    """Where drivers have been seen that no loader finds; looked into only to tell the user where the libraries are."""
    return (
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
        "/usr/local/lib64",
        "/usr/local/lib",
        "/usr/local/glibc/usr/lib",
        "/opt/nvidia/lib64",
        "/var/lib/nvidia/lib64",
        "/home/kubernetes/bin/nvidia/lib64",
        "/run/nvidia/driver/usr/lib64",
        f"/run/nvidia/driver/usr/lib/{architecture.triplet}",
    )


def firmware_folders(version: str, kernel: str, custom: str) -> tuple[str, ...]:
    """Where the kernel looks for the firmware of one driver version, in its order (firmware_class's fw_path).

    `kernel` is its release, `custom` the folder that its parameter firmware_class.path names, "" for none.
    """
    base = "/lib/firmware"
    folders = (custom, f"{base}/updates/{kernel}", f"{base}/updates", f"{base}/{kernel}", base)
    return tuple(f"{folder}/nvidia/{version}" for folder in folders if folder)


def stem_of(name: str) -> str:
    """The part of a library's file name up to `.so`; "" when it is no library: `libcuda.so.1` has `libcuda.so`."""
    head, separator, tail = name.partition(".so")
    return f"{head}.so" if separator and (not tail or tail.startswith(".")) else ""


def _with_current(folder: str) -> list[str]:
    return [folder, f"{folder}/nvidia/current"]
