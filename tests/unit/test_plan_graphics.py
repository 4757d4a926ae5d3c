"""What graphics bring besides libraries: configuration, X server modules, DRM nodes, the application profile."""

from __future__ import annotations

import pytest
from test_plan import LIB, MIG, NODE, VERSION, A, C, D

from nvct.model import (
    CONFIG,
    LIBRARY,
    LIBRARY32,
    MODULE,
    DeviceNode,
    DriverFile,
    Edits,
    FileEdit,
    Inventory,
    LinkEdit,
    StaleName,
)
from nvct.plan import plan
from nvct.record import replace
from nvct.request import request_from_env
from nvct.settings import PARTS, Settings

ICD = DriverFile(
    CONFIG, "graphics", "/usr/share/vulkan/icd.d/nvidia_icd.json", target="/etc/vulkan/icd.d/nvidia_icd.json"
)
OPENCL = DriverFile(CONFIG, "compute", "/etc/OpenCL/vendors/nvidia.icd", target="/etc/OpenCL/vendors/nvidia.icd")
XORG = DriverFile(CONFIG, "display", "/usr/share/X11/xorg.conf.d/n.conf", target="/usr/share/X11/xorg.conf.d/n.conf")
GLX = DriverFile(
    MODULE,
    "display",
    f"/usr/lib/nvidia/libglxserver_nvidia.so.{VERSION}",
    links=("libglxserver_nvidia.so",),
    target=f"{LIB}/nvidia/xorg/libglxserver_nvidia.so.{VERSION}",
)
ALLOCATOR = DriverFile(LIBRARY, "compute", f"{LIB}/libnvidia-allocator.so.{VERSION}", "libnvidia-allocator.so.1")
ALLOCATOR32 = replace(ALLOCATOR, kind=LIBRARY32, path=f"/usr/lib/i386-linux-gnu/libnvidia-allocator.so.{VERSION}")
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"


def with_drm(inventory: Inventory, **minors: int) -> Inventory:
    """GPUs by UUID get card<N> and renderD<128+N>."""
    gpus = []
    for gpu in inventory.gpus:
        card = {A: 1, C: 2, D: 3}.get(gpu.uuid)
        nodes = (
            (
                DeviceNode(f"/dev/dri/card{card}", 226, card),
                DeviceNode(f"/dev/dri/renderD{128 + card}", 226, 128 + card),
            )
            if card
            else ()
        )
        gpus.append(replace(gpu, drm_nodes=nodes, minor=minors.get(gpu.uuid[4], gpu.minor)))
    return replace(inventory, gpus=tuple(gpus))


NODE_WITH_GRAPHICS = with_drm(replace(NODE, files=(*NODE.files, ICD, OPENCL, XORG, GLX, ALLOCATOR, ALLOCATOR32)))


def edits(
    devices: str,
    capabilities: str,
    inventory: Inventory = NODE_WITH_GRAPHICS,
    settings: Settings = Settings(),  # noqa: B008
) -> Edits:
    env = {"NVIDIA_VISIBLE_DEVICES": devices, "NVIDIA_DRIVER_CAPABILITIES": capabilities}
    return plan(inventory, request_from_env(env), settings)


def targets(found: Edits) -> set[str]:
    return {mount.target for mount in found.mounts}


def left_out(found: Edits) -> dict[str, str]:
    return {item.what: item.why for item in found.left_out}


def off(*parts: str) -> Settings:
    return Settings(parts={part: part not in parts for part in PARTS})


@pytest.mark.parametrize(
    ("capabilities", "present", "absent"),
    [
        ("graphics", {ICD.target}, {OPENCL.target, XORG.target, GLX.target}),
        ("display", {ICD.target, XORG.target, GLX.target}, {OPENCL.target}),
        ("compute", {OPENCL.target}, {ICD.target, XORG.target, GLX.target}),
        ("utility", set(), {ICD.target, OPENCL.target, XORG.target, GLX.target}),
        ("all", {ICD.target, OPENCL.target, XORG.target, GLX.target}, set()),
    ],
)
def test_each_capability_brings_its_configuration(capabilities: str, present: set[str], absent: set[str]) -> None:
    found = targets(edits("2", capabilities))
    assert present <= found
    assert not absent & found


def test_configuration_never_fails_a_start() -> None:
    mounts = {mount.target: mount for mount in edits("2", "all").mounts}
    assert not mounts[ICD.target].required
    assert mounts[ICD.target].source == "/run/nvidia/driver/usr/share/vulkan/icd.d/nvidia_icd.json"
    assert mounts[ICD.target].options == ("ro", "nosuid", "nodev", "noexec")


def test_a_module_has_its_development_name_beside_it() -> None:
    found = edits("2", "display")
    folder = f"{LIB}/nvidia/xorg"
    why = "capability display"
    assert LinkEdit(f"{folder}/libglxserver_nvidia.so", f"libglxserver_nvidia.so.{VERSION}", why) in found.links
    assert StaleName(folder, "libglxserver_nvidia.so") in found.stale
    assert not [edit for edit in found.loader_cache if "glxserver" in edit.name]


@pytest.mark.parametrize(
    ("capabilities", "folders"), [("graphics", [LIB]), ("graphics,compat32", [LIB, "/usr/lib/i386-linux-gnu"])]
)
def test_gbm_finds_the_driver_for_each_width_that_has_the_library(capabilities: str, folders: list[str]) -> None:
    found = edits("2", capabilities)
    links = {link.path: link.target for link in found.links if "gbm" in link.path}
    assert links == {f"{folder}/gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.1" for folder in folders}
    assert f"{LIB}/libnvidia-allocator.so.{VERSION}" in targets(found)


def test_without_graphics_gbm_has_no_driver() -> None:
    assert not [link for link in edits("2", "compute").links if "gbm" in link.path]


def test_drm_nodes_of_the_chosen_gpus_only_with_their_names_by_path() -> None:
    found = edits("3,2", "graphics")
    assert [(edit.path, edit.source, edit.major, edit.minor) for edit in found.devices if "/dri/" in edit.path] == [
        ("/dev/dri/card3", "/dev/dri/card3", 226, 3),
        ("/dev/dri/renderD131", "/dev/dri/renderD131", 226, 131),
        ("/dev/dri/card2", "/dev/dri/card2", 226, 2),
        ("/dev/dri/renderD130", "/dev/dri/renderD130", 226, 130),
    ]
    assert {link.path: link.target for link in found.links if "/dri/" in link.path} == {
        "/dev/dri/by-path/pci-10000:bd:00.0-card": "../card3",
        "/dev/dri/by-path/pci-10000:bd:00.0-render": "../renderD131",
        "/dev/dri/by-path/pci-0000:bd:00.0-card": "../card2",
        "/dev/dri/by-path/pci-0000:bd:00.0-render": "../renderD130",
    }


@pytest.mark.parametrize("capabilities", ["compute,utility", "video", "ngx"])
def test_no_graphics_no_drm_nodes_and_no_profile(capabilities: str) -> None:
    found = edits("2", capabilities)
    assert not [edit for edit in found.devices if "/dri/" in edit.path]
    assert found.files == ()


@pytest.mark.parametrize(
    ("profile", "has_graphics"),
    [("1g.5gb", False), ("1g.24gb+gfx", True), ("1g.24gb+me,gfx", True), ("1g.5gb+me", False)],
)
def test_a_mig_device_has_graphics_by_its_profile(profile: str, has_graphics: bool) -> None:
    parts = (replace(MIG[0], profile=profile), *MIG[1:])
    gpus = tuple(replace(gpu, mig_devices=parts) if gpu.uuid == A else gpu for gpu in NODE_WITH_GRAPHICS.gpus)
    found = edits("0:0", "graphics", replace(NODE_WITH_GRAPHICS, gpus=gpus))
    assert bool([edit for edit in found.devices if "/dri/" in edit.path]) == has_graphics
    assert (f"nodes below /dev/dri of GPU 0 ({A})" in left_out(found)) != has_graphics


def test_a_gpu_without_drm_nodes_says_what_to_load() -> None:
    found = edits("2", "graphics", NODE)
    assert "modprobe nvidia-drm" in left_out(found)[f"nodes below /dev/dri of GPU 2 ({C})"]


@pytest.mark.parametrize(("devices", "mask"), [("0:0", "0x8"), ("2", "0x20"), ("2,3", "0x22"), ("all", "0x2b")])
def test_the_profile_names_the_gpus_by_minor(devices: str, mask: str) -> None:
    content = (
        '{"profiles":[{"name":"_container_","settings":["EGLVisibleDGPUDevices",'
        + mask
        + ']}],"rules":[{"pattern":[],"profile":"_container_"}]}\n'
    )
    why = "capability graphics: EGL offers the container's GPUs and no others"
    assert edits(devices, "graphics").files == (FileEdit(PROFILE, content, 0o444, why),)


def test_a_minor_that_the_profile_cannot_name_is_a_warning() -> None:
    found = edits("2,3", "graphics", with_drm(NODE, c=64))  # both UUIDs begin with c
    assert found.files == ()
    assert len([warning for warning in found.warnings if "has the minor 64" in warning]) == 2
    assert "0x8000000000000000" in edits("2", "graphics", with_drm(NODE, c=63)).files[0].content


def test_no_gpu_no_profile() -> None:
    assert edits("none", "graphics").files == ()


@pytest.mark.parametrize(
    ("part", "capabilities", "what"),
    [
        ("application_profile", "graphics", PROFILE),
        ("drm_nodes", "graphics", f"nodes below /dev/dri of GPU 2 ({C})"),
        ("fabricmanager", "utility", PARTS["fabricmanager"]),
        ("firmware", "utility", PARTS["firmware"]),
        ("modeset", "display", "/dev/nvidia-modeset"),
        ("mps", "compute", PARTS["mps"]),
        ("persistenced", "utility", PARTS["persistenced"]),
    ],
)
def test_each_part_has_a_switch_and_a_word_about_it(part: str, capabilities: str, what: str) -> None:
    found = edits("2", capabilities, settings=off(part))
    assert left_out(found)[what] == f"the part {part} is off in the settings"
    names = " ".join([*targets(found), *(edit.path for edit in (*found.devices, *found.files))])
    trace = {
        "application_profile": "10-container.conf",
        "drm_nodes": "/dri/",
        "fabricmanager": "fabricmanager",
        "firmware": "firmware",
        "modeset": "modeset",
        "mps": "nvidia-mps",
        "persistenced": "persistenced",
    }[part]
    assert trace not in names
    assert part == "fabricmanager" or trace in str(edits("2", capabilities))


def test_every_part_is_tried_above() -> None:
    marks = [mark for mark in test_each_part_has_a_switch_and_a_word_about_it.pytestmark if mark.name == "parametrize"]
    assert {row[0] for row in marks[0].args[1]} == set(PARTS)


def test_what_this_node_lacks_is_left_out_with_a_reason() -> None:
    bare = replace(NODE, files=tuple(file for file in NODE.files if "encode" not in file.path))
    reasons = left_out(edits("2", "all", bare))
    assert "install the driver package" in reasons["libnvidia-encode.so"]
    assert "/etc/vulkan/icd.d/" in reasons["Vulkan (capability graphics)"]
    assert "/etc/OpenCL/vendors/" in reasons["OpenCL (capability compute)"]
    assert "below /run/nvidia/driver" in reasons[PARTS["fabricmanager"]]
    assert "Vulkan (capability graphics)" not in left_out(edits("2", "all"))


def test_a_missing_node_is_left_out_with_a_reason() -> None:
    nodes = tuple(node for node in NODE.nodes if "uvm" not in node.path)
    found = edits("2", "compute", replace(NODE, nodes=nodes))
    assert left_out(found)["/dev/nvidia-uvm"] in found.warnings
