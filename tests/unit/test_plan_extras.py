"""What a container gets only when it asks for it by name: other drivers' nodes, IMEX channels, MIG control."""

from __future__ import annotations

import pytest
from test_plan import MIG, NODE, C

from nvct.errors import DriverError, RequestError
from nvct.model import CONFIG, DeviceNode, DriverFile, Edits, Inventory
from nvct.plan import plan, resolve
from nvct.record import replace
from nvct.request import request_from_env
from nvct.settings import Settings

IMEX = "/dev/nvidia-caps-imex-channels"
EXTRA_NODES = {
    "gds": (DeviceNode("/dev/nvidia-fs0", 510, 0), DeviceNode("/dev/nvidia-fs1", 510, 1)),
    "mofed": (DeviceNode("/dev/infiniband/uverbs0", 231, 192), DeviceNode("/dev/infiniband/rdma_cm", 10, 58)),
    "gdrcopy": (DeviceNode("/dev/gdrdrv", 508, 0),),
    "nvswitch": (DeviceNode("/dev/nvidia-nvswitchctl", 509, 255), DeviceNode("/dev/nvidia-nvswitch0", 509, 0)),
    "imex": (DeviceNode(f"{IMEX}/channel0", 505, 0), DeviceNode(f"{IMEX}/channel7", 505, 7)),
}
FULL = replace(
    NODE,
    majors={**NODE.majors, "nvidia-caps-imex-channels": 505},
    extra_nodes=EXTRA_NODES,
    mig_minors={"config": 1, "monitor": 2},
    files=(
        *NODE.files,
        DriverFile(CONFIG, "gds", "/etc/cufile.json", target="/etc/cufile.json"),
        DriverFile(CONFIG, "gds", "/run/udev", target="/run/udev"),
    ),
)
VARIABLES = {
    "gds": "NVIDIA_GDS",
    "mofed": "NVIDIA_MOFED",
    "gdrcopy": "NVIDIA_GDRCOPY",
    "nvswitch": "NVIDIA_NVSWITCH",
}


def edits(env: dict[str, str], inventory: Inventory = FULL, privileged: bool = False) -> Edits:
    env = {"NVIDIA_VISIBLE_DEVICES": "2", **env}
    return plan(inventory, request_from_env(env, privileged=privileged), Settings())


def paths(found: Edits) -> list[str]:
    return [edit.path for edit in found.devices]


def test_nothing_of_it_without_a_request() -> None:
    found = edits({"NVIDIA_DRIVER_CAPABILITIES": "all"})
    extra = {node.path for nodes in EXTRA_NODES.values() for node in nodes}
    assert not extra & set(paths(found))
    assert not {"/etc/cufile.json", "/run/udev"} & {mount.target for mount in found.mounts}
    assert not [path for path in paths(found) if "nvidia-cap" in path]


@pytest.mark.parametrize("kind", list(VARIABLES))
def test_a_kind_that_is_enabled_is_there_and_no_other(kind: str) -> None:
    plain = edits({})
    found = edits({VARIABLES[kind]: "enabled"})
    added = [edit for edit in found.devices if edit not in plain.devices]
    assert [(edit.path, edit.major, edit.minor) for edit in added] == [
        (node.path, node.major, node.minor) for node in EXTRA_NODES[kind]
    ]
    assert {edit.why for edit in added} == {f"{kind}, asked for in env {VARIABLES[kind]}"}
    files = {mount.target for mount in found.mounts} - {mount.target for mount in plain.mounts}
    assert files == ({"/etc/cufile.json", "/run/udev"} if kind == "gds" else set())


@pytest.mark.parametrize("kind", list(VARIABLES))
def test_a_kind_that_the_node_lacks_is_left_out_with_a_warning(kind: str) -> None:
    found = edits({VARIABLES[kind]: "enabled"}, replace(FULL, extra_nodes={}))
    assert found.mounts == edits({}).mounts
    assert [item.what for item in found.left_out if VARIABLES[kind] in item.what] == [f"{kind} (env {VARIABLES[kind]})"]
    assert [warning for warning in found.warnings if f"asks for {kind}, but this node has no" in warning]


def test_imex_channels_are_given_by_number() -> None:
    found = edits({"NVIDIA_IMEX_CHANNELS": "7,channel0,7"})
    assert [(edit.path, edit.major, edit.minor) for edit in found.devices if "imex" in edit.path] == [
        (f"{IMEX}/channel7", 505, 7),
        (f"{IMEX}/channel0", 505, 0),
    ]


def test_a_missing_channel_is_named_by_its_path() -> None:
    with pytest.raises(RequestError, match=rf"no {IMEX}/channel3; run: .*mknod -m 666 {IMEX}/channel3 c 505 3"):
        edits({"NVIDIA_IMEX_CHANNELS": "3"})
    with pytest.raises(RequestError, match="/proc/devices has no `nvidia-caps-imex-channels` line"):
        edits({"NVIDIA_IMEX_CHANNELS": "0"}, NODE)


@pytest.mark.parametrize(("name", "minor"), [("config", 1), ("monitor", 2)])
def test_mig_control_brings_its_capability_and_those_of_the_visible_gpus(name: str, minor: int) -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "0,2", f"NVIDIA_MIG_{name.upper()}_DEVICES": "all"}
    found = edits(env, privileged=True)
    minors = {minor, *(device.gi_minor for device in MIG), *(device.ci_minor for device in MIG)}
    caps = {edit.path: (edit.major, edit.minor) for edit in found.devices if "nvidia-cap" in edit.path}
    assert caps == {f"/dev/nvidia-caps/nvidia-cap{cap}": (237, cap) for cap in minors}
    assert found.proc is not None
    assert found.proc.capabilities[0] == f"mig/{name}"
    assert "gpu3/mig/gi9/ci0/access" in found.proc.capabilities


def test_whoever_looks_again_looks_at_controlled_mig_devices_too() -> None:
    env = {"NVIDIA_VISIBLE_DEVICES": "0", "NVIDIA_MIG_CONFIG_DEVICES": "all"}
    gpus, mig_devices = resolve(FULL, request_from_env(env, privileged=True), Settings())
    assert (len(gpus), mig_devices) == (1, MIG)


def test_mig_control_of_a_driver_without_mig_is_an_error() -> None:
    with pytest.raises(DriverError, match="capabilities/mig/config"):
        edits({"NVIDIA_MIG_CONFIG_DEVICES": "all"}, replace(FULL, mig_minors={}), privileged=True)


def test_extras_without_a_gpu() -> None:
    assert "/dev/gdrdrv" in paths(edits({"NVIDIA_VISIBLE_DEVICES": "none", "NVIDIA_GDRCOPY": "enabled"}))
    assert C in str(edits({}))  # and the plain request is for that GPU
