"""A simulated node with everything that a driver and its neighbours can have, as discovery sees it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvct import settings
from nvct.model import CONFIG, LIBRARY, LIBRARY32, MODULE, Inventory
from nvct.node.discover import discover
from nvct.sim.errors import SimError
from nvct.sim.node import Made, create, refuse_real_driver, spec_from_yaml
from nvct.sim.spec import NodeSpec

try:
    refuse_real_driver()
except SimError as error:
    pytest.skip(str(error), allow_module_level=True)

TEXT = "profile: l40s\ngds: 2\nrdma: 2\ngdrcopy: true\nnvswitches: 1\nimex_channels: 2\n"


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> NodeSpec:
    path = tmp_path_factory.mktemp("spec") / "node.yaml"
    path.write_text(TEXT)
    return spec_from_yaml(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, spec: NodeSpec) -> Made:
    return create(spec, tmp_path_factory.mktemp("sim") / "node")


@pytest.fixture(scope="module")
def inventory(made: Made) -> Inventory:
    return discover(settings.load(made.config))


def test_nothing_is_missing(inventory: Inventory) -> None:
    assert inventory.missing == ()


def test_configuration_and_modules_are_found(inventory: Inventory) -> None:
    found = {file.target: file.capability for file in inventory.files if file.kind == CONFIG}
    assert found == {
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json": "graphics",
        **{
            f"/usr/share/egl/egl_external_platform.d/{name}.json": "graphics"
            for name in ("15_nvidia_gbm", "10_nvidia_wayland", "09_nvidia_wayland2", "20_nvidia_xcb", "20_nvidia_xlib")
        },
        "/usr/share/nvidia/nvoptix.bin": "graphics",
        "/usr/share/X11/xorg.conf.d/nvidia-drm-outputclass.conf": "display",
        "/etc/vulkan/icd.d/nvidia_icd.json": "graphics",
        "/etc/vulkan/implicit_layer.d/nvidia_layers.json": "graphics",
        "/etc/OpenCL/vendors/nvidia.icd": "compute",
        "/etc/cufile.json": "gds",
        "/run/udev": "gds",
    }
    modules = [os.path.basename(file.target) for file in inventory.files if file.kind == MODULE]
    assert modules == ["nvidia_drv.so", f"libglxserver_nvidia.so.{inventory.driver_version}"]


def test_each_gpu_has_its_own_drm_nodes(made: Made, inventory: Inventory) -> None:
    for gpu in inventory.gpus:
        sysfs = Path(made.directory, "sys/bus/pci/devices", gpu.proc_name, "drm")
        assert [node.path for node in gpu.drm_nodes] == [f"/dev/dri/{name}" for name in sorted(os.listdir(sysfs))]
        assert {node.major for node in gpu.drm_nodes} == {226}
    minors = [node.minor for gpu in inventory.gpus for node in gpu.drm_nodes]
    assert len(set(minors)) == 2 * len(inventory.gpus)


def test_nodes_of_other_drivers(inventory: Inventory) -> None:
    assert {kind: [node.path for node in nodes] for kind, nodes in inventory.extra_nodes.items()} == {
        "gds": ["/dev/nvidia-fs0", "/dev/nvidia-fs1"],
        "mofed": ["/dev/infiniband/uverbs0", "/dev/infiniband/uverbs1", "/dev/infiniband/rdma_cm"],
        "gdrcopy": ["/dev/gdrdrv"],
        "nvswitch": ["/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch0"],
        "imex": [f"/dev/nvidia-caps-imex-channels/channel{number}" for number in (0, 1)],
    }
    assert inventory.mig_minors == {"config": 1, "monitor": 2}


def test_most_libraries_are_there_for_32_bit_programs_too(inventory: Inventory) -> None:
    wide, narrow = (
        {os.path.basename(file.path).partition(".so")[0] for file in inventory.files if file.kind == kind}
        for kind in (LIBRARY, LIBRARY32)
    )
    if not narrow:
        pytest.skip("this compiler makes no 32-bit libraries")
    assert narrow < wide
    assert {"libcuda", "libnvidia-ml", "libGLX_nvidia", "libnvidia-egl-gbm", "libvdpau_nvidia"} <= narrow
    assert "libnvidia-cfg" not in narrow
