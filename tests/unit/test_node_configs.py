"""Configuration files and X server modules: where they are found, and where programs in a container look for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_tree import TRIPLET, VERSION, write

from nvct.model import CONFIG, LIBRARY, MODULE, DriverFile
from nvct.node.configs import find_configs, find_xorg_modules
from nvct.node.files import find_firmware, firmware_setting


def targets(root: Path) -> dict[str, str]:
    """Target to path."""
    return {file.target: file.path for file in find_configs(str(root), "x86_64")}


@pytest.mark.parametrize(
    ("path", "target", "capability"),
    [
        ("usr/share/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "graphics"),
        ("etc/glvnd/egl_vendor.d/10_nvidia.json", "/usr/share/glvnd/egl_vendor.d/10_nvidia.json", "graphics"),
        *(
            (
                f"usr/share/egl/egl_external_platform.d/{name}.json",
                f"/usr/share/egl/egl_external_platform.d/{name}.json",
                "graphics",
            )
            for name in ("15_nvidia_gbm", "10_nvidia_wayland", "09_nvidia_wayland2", "20_nvidia_xcb", "20_nvidia_xlib")
        ),
        ("usr/local/share/nvidia/nvoptix.bin", "/usr/share/nvidia/nvoptix.bin", "graphics"),
        ("usr/share/X11/xorg.conf.d/10-nvidia.conf", "/usr/share/X11/xorg.conf.d/10-nvidia.conf", "display"),
        ("etc/OpenCL/vendors/nvidia.icd", "/etc/OpenCL/vendors/nvidia.icd", "compute"),
        ("usr/share/vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json", "graphics"),
        ("usr/share/vulkan/icd.d/nvidia_icd.x86_64.json", "/etc/vulkan/icd.d/nvidia_icd.x86_64.json", "graphics"),
        ("vulkan/icd.d/nvidia_icd.json", "/etc/vulkan/icd.d/nvidia_icd.json", "graphics"),
        (
            "etc/vulkan/implicit_layer.d/nvidia_layers.json",
            "/etc/vulkan/implicit_layer.d/nvidia_layers.json",
            "graphics",
        ),
        ("etc/cufile.json", "/etc/cufile.json", "gds"),
    ],
)
def test_each_file_has_its_place(tmp_path: Path, path: str, target: str, capability: str) -> None:
    write(tmp_path / path, "{}")
    assert find_configs(str(tmp_path), "x86_64") == (DriverFile(CONFIG, capability, f"/{path}", target=target),)


def test_the_administrators_file_goes_before_a_packages(tmp_path: Path) -> None:
    for folder in ("usr/share", "usr/local/share", "etc"):
        write(tmp_path / folder / "vulkan/icd.d/nvidia_icd.json", folder)
    assert targets(tmp_path) == {"/etc/vulkan/icd.d/nvidia_icd.json": "/etc/vulkan/icd.d/nvidia_icd.json"}


def test_a_file_with_two_names_counts_once_and_links_stay_inside(tmp_path: Path) -> None:
    write(tmp_path / "opt/nvidia/icd.json", "{}")
    folder = tmp_path / "etc/vulkan/icd.d"
    folder.mkdir(parents=True)
    (folder / "nvidia_icd.json").symlink_to("/opt/nvidia/icd.json")
    (folder / "nvidia_icd.x86_64.json").symlink_to("nvidia_icd.json")
    assert targets(tmp_path) == {"/etc/vulkan/icd.d/nvidia_icd.json": "/opt/nvidia/icd.json"}


def test_a_folder_or_another_machines_file_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "etc/OpenCL/vendors/nvidia.icd").mkdir(parents=True)
    write(tmp_path / "etc/vulkan/icd.d/nvidia_icd.aarch64.json", "{}")
    assert targets(tmp_path) == {}


def test_udev_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "run/udev").mkdir(parents=True)
    assert targets(tmp_path) == {"/run/udev": "/run/udev"}


LIBRARIES = (DriverFile(LIBRARY, "compute", f"{TRIPLET}/libcuda.so.{VERSION}"),)


@pytest.mark.parametrize(
    "folder",
    [
        f"{TRIPLET}/nvidia/xorg",
        f"{TRIPLET}/xorg/modules/drivers",
        f"{TRIPLET}/xorg/modules/updates/extensions",
        "/usr/lib/xorg/modules/drivers",
        "/usr/lib64/xorg/modules/extensions",
        "/usr/X11R6/lib/modules/updates/drivers",
    ],
)
def test_x_server_modules_stay_where_the_host_has_them(tmp_path: Path, folder: str) -> None:
    glx = f"libglxserver_nvidia.so.{VERSION}"
    for name in ("nvidia_drv.so", glx, "libglxserver_nvidia.so.470.1"):
        write(tmp_path / folder[1:] / name, "")
    assert find_xorg_modules(str(tmp_path), VERSION, LIBRARIES) == (
        DriverFile(MODULE, "display", f"{folder}/nvidia_drv.so", target=f"{folder}/nvidia_drv.so"),
        DriverFile(MODULE, "display", f"{folder}/{glx}", links=("libglxserver_nvidia.so",), target=f"{folder}/{glx}"),
    )


def test_a_module_behind_a_link_keeps_the_name_that_x_knows(tmp_path: Path) -> None:
    write(tmp_path / "usr/lib/nvidia/nvidia_drv.so", "")
    (tmp_path / "usr/lib/xorg/modules/drivers").mkdir(parents=True)
    (tmp_path / "usr/lib/xorg/modules/drivers/nvidia_drv.so").symlink_to("/usr/lib/nvidia/nvidia_drv.so")
    [found] = find_xorg_modules(str(tmp_path), VERSION, ())
    assert (found.path, found.target) == (
        "/usr/lib/nvidia/nvidia_drv.so",
        "/usr/lib/xorg/modules/drivers/nvidia_drv.so",
    )


def test_the_kernels_own_order_of_firmware_folders(tmp_path: Path) -> None:
    import os

    kernel = os.uname().release
    folders = ("/opt/firmware", f"/lib/firmware/updates/{kernel}", "/lib/firmware/updates", f"/lib/firmware/{kernel}")
    for folder in (*folders, "/lib/firmware"):
        write(tmp_path / folder[1:] / f"nvidia/{VERSION}/gsp_ga10x.bin", "")
    for folder in (*folders, "/lib/firmware"):
        [found] = find_firmware(str(tmp_path), VERSION, "/opt/firmware")
        assert found.path == f"{folder}/nvidia/{VERSION}/gsp_ga10x.bin"
        (tmp_path / found.path[1:]).unlink()


@pytest.mark.parametrize(("text", "folder"), [("/opt/fw/\n", "/opt/fw"), ("\n", ""), ("relative\n", ""), (None, "")])
def test_the_kernels_firmware_setting(tmp_path: Path, text: str | None, folder: str) -> None:
    if text is not None:
        write(tmp_path / "module/firmware_class/parameters/path", text)
    assert firmware_setting(str(tmp_path)) == folder
