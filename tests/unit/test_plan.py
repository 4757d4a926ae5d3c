"""What a container gets for a request: devices, files, names, the view of /proc, and the words for what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nvct
from nvct.errors import DriverError, NvctError, RequestError
from nvct.model import (
    BINARY,
    FIRMWARE,
    LIBRARY,
    LIBRARY32,
    SOCKET,
    Ask,
    CacheEdit,
    ContainerRoot,
    DeviceNode,
    DriverFile,
    Edits,
    Gpu,
    Inventory,
    LinkEdit,
    MigDevice,
    MountEdit,
    Request,
    Roots,
)
from nvct.node import catalog
from nvct.plan import plan, resolve
from nvct.record import replace
from nvct.request import request_from_env
from nvct.settings import CAPABILITIES, Settings

VERSION = "550.54.15"
RED_HAT = ContainerRoot(debian=False)

# GPU 0 has two MIG devices that share GPU instance 2, and one of their own; GPU 1 has MIG on and nothing made;
# GPU 2 and 3 are whole, begin alike, and stand at one bus address in two domains. Index, minor and bus order differ.
A = "GPU-aaaaaaaa-0000-4000-8000-000000000000"
B = "GPU-bbbbbbbb-0000-4000-8000-000000000001"
C = "GPU-cccccccc-0000-4000-8000-000000000002"
D = "GPU-cccccccc-0000-4000-8000-000000000003"
MIG = (
    MigDevice(0, "MIG-11111111-0000-5000-8000-000000000000", "1c.3g.20gb", 2, 0, 20096, 21, 22),
    MigDevice(1, "MIG-22222222-0000-5000-8000-000000000000", "1c.3g.20gb", 2, 1, 20096, 21, 23),
    MigDevice(2, "MIG-33333333-0000-5000-8000-000000000000", "1g.5gb", 9, 0, 4864, 84, 85),
)


def gpu(index: int, uuid: str, minor: int, bus: str, mig: bool = False, devices: tuple[MigDevice, ...] = ()) -> Gpu:
    return Gpu(index, uuid, minor, bus, "NVIDIA A100", "nvidia", "8.0", 40536, mig, devices)


GPUS = (
    gpu(0, A, 3, "00000000:47:00.0", True, MIG),
    gpu(1, B, 0, "00000000:0F:00.0", True),
    gpu(2, C, 5, "00000000:BD:00.0"),
    gpu(3, D, 1, "00010000:BD:00.0"),
)
CTL = DeviceNode("/dev/nvidiactl", 195, 255)
MODESET = DeviceNode("/dev/nvidia-modeset", 195, 254)
UVM = DeviceNode("/dev/nvidia-uvm", 507, 0)
UVM_TOOLS = DeviceNode("/dev/nvidia-uvm-tools", 507, 1)
LIB = "/usr/lib/x86_64-linux-gnu"
FILES = (
    DriverFile(LIBRARY, "utility", f"{LIB}/libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1", ("libnvidia-ml.so",)),
    DriverFile(LIBRARY, "compute", f"{LIB}/libcuda.so.{VERSION}", "libcuda.so.1"),
    DriverFile(LIBRARY32, "compute", f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}", "libcuda.so.1"),
    DriverFile(LIBRARY, "compute", f"{LIB}/libnvidia-nvvm70.so.4", "libnvidia-nvvm70.so.4"),
    DriverFile(LIBRARY, "video", f"{LIB}/libnvidia-encode.so.{VERSION}", "libnvidia-encode.so.1"),
    DriverFile(LIBRARY, "video", f"{LIB}/libnvcuvid.so.{VERSION}", "libnvcuvid.so.1"),
    DriverFile(LIBRARY, "video", f"{LIB}/vdpau/libvdpau_nvidia.so.{VERSION}", "libvdpau_nvidia.so.1"),
    DriverFile(LIBRARY, "video", f"{LIB}/libnvidia-opticalflow.so.{VERSION}", "libnvidia-opticalflow.so.1"),
    DriverFile(LIBRARY, "graphics", f"{LIB}/libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0"),
    DriverFile(LIBRARY, "graphics", f"{LIB}/libnvidia-glcore.so.{VERSION}", f"libnvidia-glcore.so.{VERSION}"),
    DriverFile(LIBRARY, "ngx", f"{LIB}/libnvidia-ngx.so.{VERSION}", "libnvidia-ngx.so.1"),
    DriverFile(BINARY, "utility", "/usr/lib/nvidia/current/nvidia-smi"),
    DriverFile(BINARY, "compute", "/usr/bin/nvidia-cuda-mps-server"),
    DriverFile(FIRMWARE, "utility", f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"),
    DriverFile(SOCKET, "utility", "/var/run/nvidia-persistenced/socket"),
    DriverFile(SOCKET, "compute", "/tmp/nvidia-mps"),
)
NODE = Inventory(
    driver_version=VERSION,
    cuda_version="12.4",
    architecture="x86_64",
    roots=Roots(root="/run/nvidia/driver", dev_root="/", proc_root="/proc"),
    majors={"nvidia": 195, "nvidia-uvm": 507, "nvidia-caps": 237},
    gpus=GPUS,
    nodes=(CTL, MODESET, UVM, UVM_TOOLS),
    files=FILES,
)


def ask(devices: str, capabilities: str | None = None, container: ContainerRoot = ContainerRoot()) -> Request:  # noqa: B008
    env = {"NVIDIA_VISIBLE_DEVICES": devices}
    if capabilities is not None:
        env["NVIDIA_DRIVER_CAPABILITIES"] = capabilities
    return request_from_env(env, container)


def named(*tokens: str) -> Request:
    return Request(Ask("env NVIDIA_VISIBLE_DEVICES", tokens))


def resolved(request: Request, node: Inventory = NODE) -> tuple[tuple[Gpu, ...], tuple[MigDevice, ...]]:
    return resolve(node, request, Settings())


def edits(devices: str, capabilities: str | None = None, node: Inventory = NODE, **settings: object) -> Edits:
    return plan(node, ask(devices, capabilities), Settings(**settings))


def device_names(result: Edits) -> list[str]:
    return [device.path.removeprefix("/dev/") for device in result.devices]


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(RequestError) as refused:
        action()
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Devices


@pytest.mark.parametrize("value", ["", "void", "0,void", ","])
def test_who_asks_for_nothing_gets_nothing(value: str) -> None:
    assert edits(value, "nonsense") == Edits()


@pytest.mark.parametrize(
    ("tokens", "gpus", "mig"),
    [
        ("none", [], []),
        ("2", [2], []),
        ("3,2", [3, 2], []),
        (C, [2], []),
        (C.upper(), [2], []),
        ("GPU-bbbbbbbb", [1], []),
        ("gpu-bbbbbbbb-00", [1], []),
        ("0000:0f:00.0", [1], []),
        ("00000000:0F:00.0", [1], []),
        ("0f:00.0", [1], []),
        ("10000:bd:00.0", [3], []),
        (f"2,{C},00000000:bd:00.0,2", [2], []),
        ("0", [0], []),
        ("0:2", [0], [2]),
        ("0:2,0:0", [0], [2, 0]),
        ("2,0:0", [2, 0], [0]),
        ("0,0:0", [0], [0]),
        (MIG[1].uuid, [0], [1]),
        (MIG[1].uuid.upper(), [0], [1]),
        ("MIG-33333333", [0], [2]),
        (f"MIG-{A}/9/0", [0], [2]),
        (f"mig-{A.lower()}/2/1", [0], [1]),
        ("MIG-GPU-aaaaaaaa/2/0", [0], [0]),
        (f"MIG-{A}/9/0,0:2,{MIG[2].uuid}", [0], [2]),
        ("all", [0, 1, 2, 3], [0, 1, 2]),
        ("ALL", [0, 1, 2, 3], [0, 1, 2]),
        ("nvidia.com/gpu=all", [0, 1, 2, 3], [0, 1, 2]),
        ("nvidia.com/gpu=3,nvidia.com/gpu=2", [3, 2], []),
        (f"nvidia.com/gpu={C},2", [2], []),
        ("nvidia.com/gpu=0:1", [0], [1]),
    ],
)
def test_tokens_mean_devices(tokens: str, gpus: list[int], mig: list[int]) -> None:
    assert resolved(ask(tokens)) == (tuple(GPUS[n] for n in gpus), tuple(MIG[n] for n in mig))


def test_the_uuids_of_an_old_driver_are_found_as_well() -> None:
    old = replace(MIG[2], uuid=f"MIG-{A}/9/0")
    node = replace(NODE, gpus=(replace(GPUS[0], mig_devices=(old,)),))
    for token in (old.uuid, old.uuid.lower(), "0:2"):
        assert resolved(ask(token), node) == (node.gpus, (old,))


VALID = "see `nvct list`; valid are GPUs 0 to 3; MIG devices 0:0 to 0:2"


@pytest.mark.parametrize(
    ("token", "parts"),
    [
        ("4", ["no GPU has this index", "use `all` or UUIDs", VALID]),
        ("5", ["/dev/nvidia5 is GPU 2", VALID]),
        ("02", ["no GPU has this index"]),
        ("18446744073709551615", ["no GPU has this index"]),
        ("9" * 5000, ["..."]),
        ("foo", ["expected an index, a UUID, a PCI address", VALID]),
        ("-1", ["expected an index"]),
        ("٣", ["expected an index"]),
        ("a\nb", ["`a\\nb`"]),
        (":", ["expected an index"]),
        ("GPU-", ["at least its first 8 hexadecimal digits;", VALID]),
        ("GPU-bbbbbbb", ["at least its first 8", f"perhaps those of `{B}`"]),
        ("GPU-ccccccc", ["at least its first 8 hexadecimal digits;"]),
        ("GPU-bbbbbbbg", ["at least its first 8"]),
        ("GPU-cccccccc", ["the beginning of 2 UUIDs", C, D, "more digits"]),
        ("GPU-dddddddd", ["no GPU of this node has such a UUID", VALID]),
        (C + "0", ["no GPU of this node has such a UUID"]),
        ("MIG-", ["at least its first 8", VALID]),
        ("MIG-3333333", ["at least its first 8", f"perhaps those of `{MIG[2].uuid}`"]),
        ("MIG-dddddddd", ["no MIG device of this node has such a UUID", VALID]),
        (f"MIG-{A}", ["expected MIG-GPU-<UUID of the GPU>/<GPU instance>/<compute instance>", VALID]),
        (f"MIG-{A}/x/0", ["expected MIG-GPU-<UUID"]),
        (f"MIG-{A}/9/1", ["no compute instance 1 in a GPU instance 9", VALID]),
        ("0:3", [f"GPU 0 ({A}) has no such MIG device", VALID]),
        ("1:0", [f"GPU 1 ({B}) has no such MIG device"]),
        ("2:0", [f"GPU 2 ({C}) is not divided: its MIG mode is off", VALID]),
        ("9:0", ["no GPU has this index", VALID]),
        ("0:0:0", ["expected <GPU>:<MIG device>", VALID]),
        ("0000:0f:00.1", ["function 0", "00000000:0F:00.0"]),
        ("0000:0e:00.0", ["no GPU of this node is there", "00010000:BD:00.0"]),
        ("bd:00.0", ["several PCI domains", "00000000:BD:00.0", "00010000:BD:00.0"]),
        ("0f:0.0", ["expected a PCI address"]),
        ("000:0f:00.0", ["expected a PCI address"]),
        ("0x00:0f:00.0", ["expected a PCI address"]),
        ("0:1.5", ["expected a PCI address"]),
        ("vendor.com/gpu=0", ["CDI name of the kind `vendor.com/gpu`", "only nvidia.com/gpu", "the nvct runtime"]),
        ("runtime.nvidia.com/gpu=0", ["CDI name of the kind `runtime.nvidia.com/gpu`"]),
        ("nvidia.com/gpu=9", ["no GPU has this index", VALID]),
        ("nvidia.com/gpu=", ["expected an index", VALID]),
        ("cdi/nvidia.com", ["expected cdi/<vendor>/<class>/<name>", VALID]),
    ],
)
def test_a_refusal_names_the_token_the_reason_and_the_valid_ones(token: str, parts: list[str]) -> None:
    message = refusal(lambda: resolved(named(token)))
    for part in [*parts, " in env NVIDIA_VISIBLE_DEVICES: "]:
        assert part in message
    if token.isprintable() and len(token) < 60:
        assert message.startswith(f"`{token}`")


@pytest.mark.parametrize(
    ("token", "suggestion"),
    [
        ("1;2", "separate devices with commas: `1,2`"),
        ("0:1 2", "separate devices with commas: `0:1,2`"),
        ("gpu0|gpu1", "separate devices with commas"),
        ("gpu2", "perhaps `2` is meant"),
        ("gpu:2", "perhaps `2` is meant"),
        ("device=2", "perhaps `2` is meant"),
        ('"2"', "perhaps `2` is meant"),
        ("nvidia5", "perhaps `2` is meant"),
        ("/dev/nvidia5", "perhaps `2` is meant"),
        ("nvidia2", None),
        ("gpu9", None),
        ("mig0:1", "perhaps `0:1` is meant"),
        ("0.1", "perhaps `0:1` is meant"),
        ("0/2", "perhaps `0:2` is meant"),
        (B.removeprefix("GPU-"), f"perhaps `{B}` is meant"),
        (MIG[2].uuid.removeprefix("MIG-")[:10], f"perhaps `{MIG[2].uuid}` is meant"),
        ("cccccccc", None),
        ("1g.5gb", "a MIG profile; ask for a MIG device that has it: 0:2"),
        ("1C.3G.20GB", "a MIG profile; ask for a MIG device that has it: 0:0, 0:1"),
        ("None", "none is a word of NVIDIA_VISIBLE_DEVICES, in lower case"),
        ("VOID", "void is a word"),
    ],
)
def test_a_near_miss_is_answered_with_what_was_meant(token: str, suggestion: str | None) -> None:
    message = refusal(lambda: resolved(named(token)))
    assert message.startswith(f"`{token}` in env NVIDIA_VISIBLE_DEVICES: {suggestion or 'expected an index'}") or (
        suggestion is not None and suggestion in message
    )
    assert VALID in message


def test_a_node_without_gpus_says_so() -> None:
    empty = replace(NODE, gpus=())
    for token in ("0", "foo", "GPU-aaaaaaaa", "0f:00.0"):
        assert "this node has no GPU" in refusal(lambda token=token: resolved(ask(token), empty))
    assert "this node has no GPU" in refusal(lambda: resolved(ask("MIG-11111111"), empty))
    assert resolved(ask("all"), empty) == ((), ())


def test_a_node_without_mig_devices_says_so() -> None:
    whole = replace(NODE, gpus=GPUS[1:])
    for token in ("MIG-11111111", "1:0", "foo"):
        assert "this node has no MIG device" in refusal(lambda token=token: resolved(ask(token), whole))


def test_a_long_list_of_valid_names_is_short_and_ends() -> None:
    numbers = [0, 1, 2, 5, 7, 8, *range(20, 80, 2)]
    devices = tuple(replace(MIG[0], index=n, uuid=f"MIG-{n:08}-0000-5000-8000-000000000000") for n in numbers)
    node = replace(NODE, gpus=(replace(GPUS[0], mig_devices=devices),))
    message = refusal(lambda: resolved(ask("0:99"), node))
    assert "MIG devices 0:0 to 0:2, 0:5, 0:7, 0:8, 0:20, 0:22" in message
    assert message.endswith("0:42 and 18 more (see `nvct list`)")
    assert len(message) < 400


def test_nodes_of_a_whole_gpu_and_of_mig_devices() -> None:
    result = edits("2,0:1,0:0")
    assert [(d.path, d.source, d.major, d.minor) for d in result.devices] == [
        ("/dev/nvidiactl", "/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", "/dev/nvidia-uvm", 507, 0),
        ("/dev/nvidia-uvm-tools", "/dev/nvidia-uvm-tools", 507, 1),
        ("/dev/nvidia5", "/dev/nvidia5", 195, 5),
        ("/dev/nvidia3", "/dev/nvidia3", 195, 3),
        ("/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap21", 237, 21),
        ("/dev/nvidia-caps/nvidia-cap23", "/dev/nvidia-caps/nvidia-cap23", 237, 23),
        ("/dev/nvidia-caps/nvidia-cap22", "/dev/nvidia-caps/nvidia-cap22", 237, 22),
    ]
    whys = [device.why for device in result.devices]
    assert whys[3] == f"GPU 2 ({C}) asked for as `2` in env NVIDIA_VISIBLE_DEVICES"
    assert whys[4] == f"GPU 0 ({A}), parent of MIG device 0:1 ({MIG[1].uuid}) asked for as `0:1` in " + (
        "env NVIDIA_VISIBLE_DEVICES"
    )
    assert whys[6].startswith("compute instance 1 of MIG device 0:1")
    assert result.warnings == ()


def test_proc_shows_what_is_visible() -> None:
    proc = edits("3,0:1,0:0").proc
    assert proc is not None
    assert proc.source == "/proc/driver/nvidia"
    assert proc.files == ("version", "params", "registry")
    assert proc.gpus == ("10000:bd:00.0", "0000:47:00.0")
    assert proc.capabilities == (
        "gpu3/mig/gi2/access",
        "gpu3/mig/gi2/ci1/access",
        "gpu3/mig/gi2/ci0/access",
    )


def test_an_unmasked_proc_is_said() -> None:
    result = edits("2", mask_proc=False)
    assert result.proc is None
    assert any("mask_proc is off" in warning for warning in result.warnings)


def test_none_gives_the_driver_without_a_gpu() -> None:
    result = edits("none")
    assert device_names(result) == ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
    assert result.proc is not None
    assert result.proc.gpus == ()
    assert result.proc.capabilities == ()
    assert any(mount.target == f"{LIB}/libcuda.so.{VERSION}" for mount in result.mounts)
    assert result.env == {"NVIDIA_VISIBLE_DEVICES": "void"}


def test_the_parent_of_mig_devices_alone_is_a_warning() -> None:
    (warning,) = edits("0").warnings
    assert "ask for a MIG device: 0:0, 0:1, 0:2" in warning
    assert f"GPU 0 ({A})" in warning
    assert device_names(edits("0"))[-1] == "nvidia3"
    (warning,) = edits("1").warnings
    assert "no MIG device exists" in warning


def test_privileged_containers_are_told() -> None:
    request = replace(ask("2"), privileged=True)
    (warning,) = plan(NODE, request, Settings()).warnings
    assert "nothing can be denied" in warning
    assert plan(NODE, request, Settings()).devices == edits("2").devices


def test_nodes_come_from_the_device_root() -> None:
    node = replace(NODE, roots=Roots("/sim", "/sim", "/sim/proc"))
    result = edits("2", node=node)
    assert [(d.path, d.source) for d in result.devices][-1] == ("/dev/nvidia5", "/sim/dev/nvidia5")
    assert result.proc is not None
    assert result.proc.source == "/sim/proc/driver/nvidia"


def test_majors_come_from_the_node() -> None:
    old = replace(NODE, majors={"nvidia-frontend": 199, "nvidia-caps": 240})
    numbers = {device.path: device.major for device in edits("0:0", node=old).devices}
    assert numbers["/dev/nvidia3"] == 199
    assert numbers["/dev/nvidia-caps/nvidia-cap21"] == 240
    assert numbers["/dev/nvidia-uvm"] == 507


def test_mig_without_capability_nodes_is_an_error_of_the_node() -> None:
    with pytest.raises(DriverError, match="/proc/devices has no `nvidia-caps` line"):
        edits("0:0", node=replace(NODE, majors={"nvidia": 195}))


# Capabilities


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (None, ["ml", "cuda", "nvvm70", "smi", "mps-server", "ctl", "uvm", "uvm-tools"]),
        ("", ["ml", "cuda", "nvvm70", "smi", "mps-server", "ctl", "uvm", "uvm-tools"]),
        ("compute", ["cuda", "nvvm70", "mps-server", "ctl", "uvm", "uvm-tools"]),
        ("utility", ["ml", "smi", "ctl"]),
        (
            "video",
            ["cuda", "nvvm70", "encode", "cuvid", "vdpau", "opticalflow", "ctl", "uvm", "uvm-tools"],
        ),
        ("graphics", ["GLX", "glcore", "ctl"]),
        ("display", ["GLX", "glcore", "ctl", "modeset"]),
        ("ngx", ["ngx", "ctl"]),
        ("compat32", ["ctl"]),
        ("compute,compat32", ["cuda", "cuda32", "nvvm70", "mps-server", "ctl", "uvm", "uvm-tools"]),
        ("utility,compat32,utility", ["ml", "smi", "ctl"]),
    ],
)
def test_capabilities_bring_their_files_and_nodes(capabilities: str | None, expected: list[str]) -> None:
    result = edits("none", capabilities)
    names = {
        f"{LIB}/libnvidia-ml.so.{VERSION}": "ml",
        f"{LIB}/libcuda.so.{VERSION}": "cuda",
        f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}": "cuda32",
        f"{LIB}/libnvidia-nvvm70.so.4": "nvvm70",
        f"{LIB}/libnvidia-encode.so.{VERSION}": "encode",
        f"{LIB}/libnvcuvid.so.{VERSION}": "cuvid",
        f"{LIB}/vdpau/libvdpau_nvidia.so.{VERSION}": "vdpau",
        f"{LIB}/libnvidia-opticalflow.so.{VERSION}": "opticalflow",
        f"{LIB}/libGLX_nvidia.so.{VERSION}": "GLX",
        f"{LIB}/libnvidia-glcore.so.{VERSION}": "glcore",
        f"{LIB}/libnvidia-ngx.so.{VERSION}": "ngx",
        "/usr/bin/nvidia-smi": "smi",
        "/usr/bin/nvidia-cuda-mps-server": "mps-server",
        "/dev/nvidiactl": "ctl",
        "/dev/nvidia-uvm": "uvm",
        "/dev/nvidia-uvm-tools": "uvm-tools",
        "/dev/nvidia-modeset": "modeset",
    }
    required = [mount.target for mount in result.mounts if mount.required]
    found = [names[path] for path in [*required, *(device.path for device in result.devices)]]
    assert sorted(found) == sorted(expected)


def test_all_is_every_supported_capability() -> None:
    every = edits("2", ",".join(CAPABILITIES))
    assert replace(edits("2", "all"), warnings=()) == replace(every, warnings=())
    assert edits("2", "utility,all", supported_capabilities=("compute",)) == edits("2", "compute")
    assert edits("2", None, supported_capabilities=("utility", "video")) == edits("2", "utility")


@pytest.mark.parametrize(
    ("capabilities", "parts"),
    [
        ("cuda", ["`cuda`", "no such driver capability", "compute, utility, all"]),
        ("none", ["`none`", "no such driver capability"]),
        ("ALL", ["`ALL`", "lower case"]),
        ("compute,Utility", ["`Utility`", "lower case"]),
        ("utility,video", ["`video`", "settings (supported_capabilities)", "allowed are compute, utility, all"]),
    ],
)
def test_an_unsupported_capability_is_refused(capabilities: str, parts: list[str]) -> None:
    message = refusal(lambda: edits("2", capabilities, supported_capabilities=("compute", "utility")))
    for part in [*parts, "env NVIDIA_DRIVER_CAPABILITIES"]:
        assert part in message


def test_a_missing_modeset_stops_who_asks_for_display_only() -> None:
    node = replace(NODE, nodes=(CTL, UVM, UVM_TOOLS))
    (warning,) = edits("2", "all", node).warnings
    assert "no /dev/nvidia-modeset" in warning
    assert "mknod -m 666 /dev/nvidia-modeset c 195 254" in warning
    assert "nvidia-modeset" not in device_names(edits("2", "all", node))
    assert "mknod -m 666 /dev/nvidia-modeset c 195 254" in refusal(lambda: edits("2", "utility,display", node))
    assert edits("2", "graphics", node).warnings == ()


def test_a_missing_uvm_is_said() -> None:
    without = replace(NODE, nodes=(CTL, MODESET))
    warnings = edits("2", node=without).warnings
    assert "mknod -m 666 /dev/nvidia-uvm c 507 0" in warnings[0]
    assert "mknod -m 666 /dev/nvidia-uvm-tools c 507 1" in warnings[1]
    unloaded = replace(without, majors={"nvidia": 195})
    assert "nvidia-uvm is not loaded, CUDA will not work" in edits("2", node=unloaded).warnings[0]
    assert edits("2", "utility", without).warnings == ()


def test_a_missing_control_node_is_an_error_of_the_node() -> None:
    node = replace(NODE, nodes=(UVM,), roots=Roots("/", "/sim/", "/proc"))
    with pytest.raises(DriverError, match="mknod -m 666 /sim/dev/nvidiactl c 195 255"):
        edits("none", node=node)


def test_a_capability_without_its_library_is_said() -> None:
    node = replace(NODE, files=tuple(file for file in FILES if "encode" not in file.path))
    (warning,) = edits("2", "compute,video", node).warnings
    assert "capability video" in warning
    assert "no libnvidia-encode.so" in warning
    assert edits("2", "compute", node).warnings == ()


# Files


def mounts_by_target(result: Edits) -> dict[str, MountEdit]:
    return {mount.target: mount for mount in result.mounts}


def test_files_are_mounted_in_their_places() -> None:
    mounts = mounts_by_target(edits("2", "all"))
    read_only = ("ro", "nosuid", "nodev")
    root = "/run/nvidia/driver"
    library = f"{LIB}/libcuda.so.{VERSION}"
    assert mounts[library] == MountEdit(root + library, library, read_only, "capability compute")
    assert mounts["/usr/bin/nvidia-smi"] == MountEdit(
        f"{root}/usr/lib/nvidia/current/nvidia-smi", "/usr/bin/nvidia-smi", read_only, "capability utility"
    )
    firmware = mounts[f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"]
    assert firmware.source == f"{root}/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin"
    assert firmware.options == read_only
    assert not firmware.required
    for target, source in (
        ("/run/nvidia-persistenced/socket", f"{root}/var/run/nvidia-persistenced/socket"),
        ("/tmp/nvidia-mps", f"{root}/tmp/nvidia-mps"),
    ):
        assert mounts[target].source == source
        assert mounts[target].options == ("rw", "nosuid", "nodev", "noexec")
        assert not mounts[target].required
    assert mounts[f"/usr/lib/i386-linux-gnu/libcuda.so.{VERSION}"].why == "capabilities compute and compat32"


def test_sockets_come_with_their_own_capability_only() -> None:
    assert "/run/nvidia-persistenced/socket" not in mounts_by_target(edits("2", "compute"))
    assert "/tmp/nvidia-mps" not in mounts_by_target(edits("2", "utility,video"))


@pytest.mark.parametrize(
    ("architecture", "container", "wide", "narrow"),
    [
        ("x86_64", ContainerRoot(), "/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu"),
        ("aarch64", ContainerRoot(), "/usr/lib/aarch64-linux-gnu", "/usr/lib/arm-linux-gnueabihf"),
        ("x86_64", ContainerRoot(debian=False), "/usr/lib64", "/usr/lib"),
        ("aarch64", ContainerRoot(debian=False), "/usr/lib64", "/usr/lib"),
        ("x86_64", ContainerRoot(debian=False, lib32=True), "/usr/lib64", "/usr/lib32"),
        ("x86_64", ContainerRoot(debian=False, lib_is_lib64=True), "/usr/lib64", "/usr/lib32"),
    ],
)
def test_library_folders_of_containers(architecture: str, container: ContainerRoot, wide: str, narrow: str) -> None:
    node = replace(NODE, architecture=architecture)
    result = plan(node, ask("none", "compute,compat32", container), Settings())
    targets = [mount.target for mount in result.mounts if "libcuda" in mount.target]
    assert targets == [f"{wide}/libcuda.so.{VERSION}", f"{narrow}/libcuda.so.{VERSION}"]


def test_an_unknown_architecture_is_an_error() -> None:
    with pytest.raises(DriverError, match="'riscv64'.*x86_64 and aarch64"):
        edits("none", node=replace(NODE, architecture="riscv64"))


def test_links_of_libraries() -> None:
    links = {link.path: link.target for link in edits("2", "all").links}
    assert links == {
        f"{LIB}/libnvidia-ml.so.1": f"libnvidia-ml.so.{VERSION}",
        f"{LIB}/libnvidia-ml.so": "libnvidia-ml.so.1",
        f"{LIB}/libcuda.so.1": f"libcuda.so.{VERSION}",
        f"{LIB}/libcuda.so": "libcuda.so.1",
        "/usr/lib/i386-linux-gnu/libcuda.so.1": f"libcuda.so.{VERSION}",
        "/usr/lib/i386-linux-gnu/libcuda.so": "libcuda.so.1",
        f"{LIB}/libnvidia-encode.so.1": f"libnvidia-encode.so.{VERSION}",
        f"{LIB}/libnvcuvid.so.1": f"libnvcuvid.so.{VERSION}",
        f"{LIB}/vdpau/libvdpau_nvidia.so.1": f"libvdpau_nvidia.so.{VERSION}",
        f"{LIB}/libnvidia-opticalflow.so.1": f"libnvidia-opticalflow.so.{VERSION}",
        f"{LIB}/libnvidia-opticalflow.so": "libnvidia-opticalflow.so.1",
        f"{LIB}/libGLX_nvidia.so.0": f"libGLX_nvidia.so.{VERSION}",
        f"{LIB}/libGLX_indirect.so.0": f"libGLX_nvidia.so.{VERSION}",
        f"{LIB}/libnvidia-ngx.so.1": f"libnvidia-ngx.so.{VERSION}",
    }


def test_a_link_that_the_host_has_as_well_is_made_once() -> None:
    library = DriverFile(LIBRARY, "compute", f"{LIB}/libcuda.so.{VERSION}", "libcuda.so.1", ("libcuda.so",))
    result = edits("none", "compute", replace(NODE, files=(library,)))
    names = f"name of libcuda.so.{VERSION} (capability compute)"
    assert result.links == (
        LinkEdit(f"{LIB}/libcuda.so.1", f"libcuda.so.{VERSION}", names),
        LinkEdit(f"{LIB}/libcuda.so", "libcuda.so.1", names),
    )
    assert [line.name for line in result.loader_cache] == ["libcuda.so.1", "libcuda.so"]


def test_the_loader_cache_lists_every_library_by_every_name() -> None:
    result = edits("2", "compute,graphics,compat32")
    why = "capability compute"
    assert result.loader_cache[:5] == (
        CacheEdit("libcuda.so.1", f"{LIB}/libcuda.so.1", 64, why),
        CacheEdit("libcuda.so", f"{LIB}/libcuda.so", 64, why),
        CacheEdit("libcuda.so.1", "/usr/lib/i386-linux-gnu/libcuda.so.1", 32, "capabilities compute and compat32"),
        CacheEdit("libcuda.so", "/usr/lib/i386-linux-gnu/libcuda.so", 32, "capabilities compute and compat32"),
        CacheEdit("libnvidia-nvvm70.so.4", f"{LIB}/libnvidia-nvvm70.so.4", 64, why),
    )
    assert [line.name for line in result.loader_cache[5:]] == [
        "libGLX_nvidia.so.0",
        "libGLX_indirect.so.0",
        f"libnvidia-glcore.so.{VERSION}",
    ]
    places = {mount.target for mount in result.mounts} | {link.path for link in result.links}
    assert {line.path for line in result.loader_cache} <= places


def test_a_library_without_a_soname_goes_by_its_file() -> None:
    bare = DriverFile(LIBRARY, "compute", f"{LIB}/libcuda.so.{VERSION}")
    result = edits("none", "compute", replace(NODE, files=(bare,)))
    assert [(link.path, link.target) for link in result.links] == [(f"{LIB}/libcuda.so", f"libcuda.so.{VERSION}")]
    assert [line.name for line in result.loader_cache] == [f"libcuda.so.{VERSION}", "libcuda.so"]


def test_of_two_files_for_one_place_the_first_is_taken() -> None:
    other = replace(FILES[1], path=f"/opt/libcuda.so.{VERSION}")
    result = edits("none", "compute", replace(NODE, files=(*FILES, other)))
    assert mounts_by_target(result)[f"{LIB}/libcuda.so.{VERSION}"].source.startswith("/run/nvidia/driver/usr")
    (warning,) = result.warnings
    assert f"/run/nvidia/driver/opt/libcuda.so.{VERSION} is left out" in warning


@pytest.mark.parametrize("capabilities", ["utility", "all"])
@pytest.mark.parametrize("files", [FILES, ()], ids=["with files", "without"])
def test_leftovers_of_every_other_driver_are_looked_for(capabilities: str, files: tuple[DriverFile, ...]) -> None:
    stale = edits("2", capabilities, replace(NODE, files=files)).stale
    names = [(f"{LIB}/vdpau" if "vdpau" in library.stem else LIB, library.stem) for library in catalog.LIBRARIES]
    names += [("/usr/lib/i386-linux-gnu", "libcuda.so"), (LIB, "libGLX_indirect.so.0")]
    names += [("/usr/bin", program.name) for program in catalog.PROGRAMS]
    names += [("/run/nvidia-persistenced", "socket"), ("/run/nvidia-fabricmanager", "socket")]
    names += [("/lib/firmware/nvidia", "535.183.06")]
    for folder, name in names:
        assert any(name.startswith(one.prefix) for one in stale if one.folder == folder), (folder, name)
    for folder, name in [(LIB, "libc.so.6"), (LIB, "libcudart.so.12"), ("/usr/bin", "nano")]:
        assert not any(name.startswith(one.prefix) for one in stale if one.folder == folder), (folder, name)


# Whatever is asked

TOKENS = st.sampled_from(
    [
        "0",
        "1",
        "2",
        "3",
        "0:0",
        "0:1",
        "0:2",
        "all",
        C,
        D.lower(),
        "GPU-aaaaaaaa",
        MIG[0].uuid,
        f"MIG-{A}/2/1",
        "47:00.0",
    ]
)
NOISE = st.text(alphabet="0123456789abcdefGPUMIGmigpu-:./= \n\x00é٣", max_size=24)
CAPABILITY = st.sampled_from([*CAPABILITIES, "all", "bogus"])


@given(st.lists(TOKENS | NOISE, max_size=5), st.lists(CAPABILITY, max_size=4), st.booleans())
def test_any_request_is_planned_or_refused(tokens: list[str], capabilities: list[str], privileged: bool) -> None:
    request = replace(
        named(*tokens), capabilities=Ask("env C", tuple(capabilities)), privileged=privileged, container=RED_HAT
    )
    try:
        result = plan(NODE, request, Settings())
    except NvctError as error:
        assert "\n" not in str(error)
        return
    for items in (
        [device.path for device in result.devices],
        [mount.target for mount in result.mounts] + [link.path for link in result.links],
        [(line.name, line.bits) for line in result.loader_cache],
    ):
        assert len(items) == len(set(items))
    assert all(item.why for item in (*result.devices, *result.mounts, *result.links, *result.loader_cache))


@given(st.lists(TOKENS, min_size=1, max_size=6))
def test_devices_come_once_in_the_order_of_first_mention(tokens: list[str]) -> None:
    def listed(*names: str) -> tuple[tuple[Gpu, ...], tuple[MigDevice, ...]]:
        # A list of mounts, since in a variable `all` outweighs what stands beside it.
        return resolve(NODE, Request(mount_list=Ask("the mounts", names)), Settings(accept_mount_lists=True))

    gpus, mig = listed(*tokens)
    single = [listed(token) for token in tokens]
    assert gpus == tuple(dict.fromkeys(one for found, _ in single for one in found))
    assert mig == tuple(dict.fromkeys(one for _, found in single for one in found))
    assert listed(*tokens, *tokens) == (gpus, mig)


def test_the_hot_path_imports_nothing_heavy() -> None:
    banned = (
        "click yaml pynvml psutil dataclasses typing pathlib subprocess logging argparse re json ctypes struct "
        "functools collections contextlib enum tempfile shutil difflib"
    )
    code = (
        f"import sys; sys.path.insert(0, {str(Path(nvct.__file__).parents[1])!r}); "
        "import nvct.plan, nvct.request, nvct.settings; "
        f"print([name for name in {banned.split()!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
