"""Every form of request in real runc containers, on both versions of device cgroups: exactly what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.expect import NOTHING, carried, rules_v1, seen, wanted
from tests.support.nodes import SimNode
from tests.support.runc import BY_HOOK, BY_RUNTIME, Start, StartFailed, kernel_hook, make_root, nvct_hook
from tests.support.trees import read_tree

pytestmark = pytest.mark.engine

DEVICES = "NVIDIA_VISIBLE_DEVICES"
CAPABILITIES = "NVIDIA_DRIVER_CAPABILITIES"

EVERYTHING = ["0:0", "0:1", "0:2", "0:3", "0:4", "0:5", "0:6", "1:0", "1:1", "1:2", "2", "3", "4", "5", "6", "7"]

# What it is → (value of NVIDIA_VISIBLE_DEVICES, what the container gets)
REQUESTS = {
    "index": ("2", ["2"]),
    "index-whose-minor-is-0": ("7", ["7"]),
    "list-in-another-order": ("7,2,3", ["2", "3", "7"]),
    "list-with-duplicates-and-blanks": (" 3 ,2,,3, GPU-db7cc168-04ab-513c-adda-9ae5da770fea,", ["3", "2"]),
    "uuid": ("GPU-db7cc168-04ab-513c-adda-9ae5da770fea", ["2"]),
    "uuid-in-small-letters": ("gpu-db7cc168-04ab-513c-adda-9ae5da770fea", ["2"]),
    "uuid-prefix": ("GPU-db7cc168", ["2"]),
    "bus-id-of-the-kernel": ("0000:0f:00.0", ["7"]),
    "bus-id-of-nvml": ("00000000:0F:00.0", ["7"]),
    "bus-id-without-domain": ("0f:00.0", ["7"]),
    "cdi-name": ("nvidia.com/gpu=2", ["2"]),
    "gpu-mig": ("0:1", ["0:1"]),
    "gpu-mig-of-two-gpus": ("1:0,0:6,0:2", ["0:2", "0:6", "1:0"]),
    "mig-uuid": ("MIG-edd4cf59-8899-5eaa-8860-4ee984ebf6c5", ["1:2"]),
    "mig-uuid-prefix": ("MIG-edd4cf59", ["1:2"]),
    "mig-uuid-of-old-drivers": ("MIG-GPU-45f9797d-66b6-500c-a95a-d28f3e0a271d/9/0", ["1:2"]),
    "one-mig-device-by-four-names": (
        "1:1,MIG-855e30c6-f131-531f-a145-5786d3c91775,MIG-855e30c6,MIG-GPU-45f9797d-66b6-500c-a95a-d28f3e0a271d/3/0",
        ["1:1"],
    ),
    "mig-device-and-whole-gpu": ("0:0,5", ["0:0", "5"]),
    "mig-enabled-gpu-by-index": ("0", ["0"]),
    "mig-enabled-gpu-and-a-part-of-it": ("1,1:1", ["1", "1:1"]),
    "all": ("all", EVERYTHING),
    "all-among-others": ("2,all", EVERYTHING),
    "none": ("none", []),
    "none-first": ("none,2", []),
}

NO_REQUESTS = {
    "void": {DEVICES: "void"},
    "void-among-others": {DEVICES: "2,void"},
    "empty": {DEVICES: ""},
    "blanks": {DEVICES: " , ,"},
    "unset": {},
    "capabilities-alone": {CAPABILITIES: "all"},
}

VALID_GPUS = "see `nvct list`; valid are GPUs 0 to 7; MIG devices 0:0 to 0:6, 1:0 to 1:2"
VALID_MIG = "; MIG devices 0:0 to 0:6, 1:0 to 1:2"
VALID_BUSES = "0000:47:00.0"
VALID_CAPABILITIES = "allowed are compute, utility, video, compat32, ngx, graphics, display, all"

# What it is → (environment, the token that is named, what is named as valid)
REFUSED = {
    "index-too-high": ({DEVICES: "8"}, "8", VALID_GPUS),
    "index-among-good-ones": ({DEVICES: "2,8,3"}, "8", VALID_GPUS),
    "index-negative": ({DEVICES: "-1"}, "-1", VALID_GPUS),
    "index-hexadecimal": ({DEVICES: "0x2"}, "0x2", VALID_GPUS),
    "index-range": ({DEVICES: "2-3"}, "2-3", VALID_GPUS),
    "word": ({DEVICES: "foo"}, "foo", VALID_GPUS),
    "cdi-name-unknown": ({DEVICES: "nvidia.com/gpu=8"}, "nvidia.com/gpu=8", VALID_GPUS),
    "uuid-unknown": ({DEVICES: "GPU-00000000-0000-0000-0000-000000000000"}, "GPU-00000000", VALID_GPUS),
    "uuid-prefix-too-short": ({DEVICES: "GPU-db7cc16"}, "GPU-db7cc16", VALID_GPUS),
    "bus-id-unknown": ({DEVICES: "0000:ff:00.0"}, "0000:ff:00.0", VALID_BUSES),
    "bus-id-of-the-sound-function": ({DEVICES: "0000:87:00.1"}, "0000:87:00.1", VALID_BUSES),
    "gpu-mig-too-high": ({DEVICES: "0:7"}, "0:7", VALID_MIG),
    "gpu-mig-of-an-undivided-gpu": ({DEVICES: "2:0"}, "2:0", VALID_MIG),
    "mig-uuid-unknown": ({DEVICES: "MIG-00000000-0000-0000-0000-000000000000"}, "MIG-00000000", VALID_MIG),
    "mig-uuid-of-old-drivers-unknown": ({DEVICES: "MIG-GPU-7d9959fa/1/0"}, "MIG-GPU-7d9959fa/1/0", VALID_MIG),
    "capability-unknown": ({DEVICES: "2", CAPABILITIES: "compute,bogus"}, "bogus", VALID_CAPABILITIES),
    "capability-in-capitals": ({DEVICES: "2", CAPABILITIES: "Compute"}, "Compute", VALID_CAPABILITIES),
}


@pytest.mark.parametrize(("value", "devices"), REQUESTS.values(), ids=REQUESTS)
def test_a_container_gets_exactly_what_it_asks_for(
    dgx: SimNode, start: Start, carrier: str, cgroups: list[str], value: str, devices: list[str]
) -> None:
    with start(dgx, {DEVICES: value}, prefix=cgroups, carrier=carrier) as container:
        expected = carried(wanted(dgx, devices), carrier)
        assert seen(container, dgx) == expected
        if not cgroups:
            assert container.devices_v1() == rules_v1(expected["nodes"])


@pytest.mark.parametrize("env", NO_REQUESTS.values(), ids=NO_REQUESTS)
def test_a_container_that_asks_for_nothing_gets_nothing(
    dgx: SimNode, start: Start, carrier: str, cgroups: list[str], env: dict[str, str]
) -> None:
    with start(dgx, env, prefix=cgroups, carrier=carrier) as container:
        assert seen(container, dgx) == NOTHING
        if not cgroups:
            assert container.devices_v1() == rules_v1({})


@pytest.mark.parametrize(("env", "token", "valid"), REFUSED.values(), ids=REFUSED)
def test_a_refused_request_starts_nothing(
    dgx: SimNode, start: Start, carrier: str, tmp_path: Path, env: dict[str, str], token: str, valid: str
) -> None:
    rootfs = tmp_path / "rootfs"
    make_root(rootfs, "debian", True, None)
    before, times = read_tree(rootfs), change_times(rootfs)
    log = tmp_path / "hook.log"
    hooks = [kernel_hook(dgx.path), *([nvct_hook(dgx.path, log)] if carrier == BY_HOOK else [])]
    with pytest.raises(StartFailed) as failure, start(dgx, env, rootfs=rootfs, hooks=hooks, carrier=carrier):
        pass
    (line,) = (log.read_text() if carrier == BY_HOOK else str(failure.value)).splitlines()
    variable = CAPABILITIES if CAPABILITIES in env else DEVICES
    assert line.startswith(f"nvct: `{token}")
    assert f"in env {variable}: " in line
    assert valid in line
    assert read_tree(rootfs) == before
    assert change_times(rootfs) == times


# The hook knows the node's GPUs only; the runtime looks for other names in the machine's CDI specs.
OF_ANOTHER_KIND = {
    BY_HOOK: "or start the container with the nvct runtime, which reads CDI specs",
    BY_RUNTIME: "nvct: `example.com/gpu=2`: no spec has devices of the kind example.com/gpu",
}


def test_a_cdi_name_of_another_kind_is_refused(dgx: SimNode, start: Start, carrier: str) -> None:
    with pytest.raises(StartFailed) as failure, start(dgx, {DEVICES: "example.com/gpu=2"}, carrier=carrier):
        pass
    assert OF_ANOTHER_KIND[carrier] in str(failure.value)


def change_times(rootfs: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in rootfs.rglob("*")}


def test_a_mig_enabled_gpu_alone_is_given_with_a_warning(dgx: SimNode, start: Start, tmp_path: Path) -> None:
    log = tmp_path / "hook.log"
    with start(dgx, {DEVICES: "1"}, hooks=[kernel_hook(dgx.path), nvct_hook(dgx.path, log)]) as container:
        assert seen(container, dgx) == wanted(dgx, ["1"])
    (line,) = log.read_text().splitlines()
    assert line.startswith("nvct: warning: GPU 1 (GPU-45f9797d-66b6-500c-a95a-d28f3e0a271d) asked for as `1` ")
    assert line.endswith(": 1:0, 1:1, 1:2")


# On the mixed node libnvidia-encode is missing; the default capabilities do not bring it.
MIXED_REQUESTS = {
    "prefix-with-all-that-differs": ("GPU-11111111-2222-4333-8444-0000000000b", ["1"]),
    "bus-id-by-its-domain": ("0001:3b:00.0", ["1"]),
    "compute-instance-of-a-shared-gpu-instance": ("1:1", ["1:1"]),
    "both-compute-instances": ("1:0,1:1", ["1:0", "1:1"]),
    "old-uuid-of-the-second-compute-instance": ("MIG-GPU-11111111-2222-4333-8444-0000000000bb/2/1", ["1:1"]),
    "mig-mode-without-mig-devices": ("2", ["2"]),
    "all": ("all", ["0", "1:0", "1:1", "1:2", "2", "3"]),
}


@pytest.mark.parametrize(("value", "devices"), MIXED_REQUESTS.values(), ids=MIXED_REQUESTS)
def test_a_mixed_node_of_an_older_driver(
    mixed: SimNode, start: Start, carrier: str, value: str, devices: list[str]
) -> None:
    with start(mixed, {DEVICES: value}, carrier=carrier) as container:
        expected = carried(wanted(mixed, devices), carrier)
        assert seen(container, mixed) == expected
        assert container.devices_v1() == rules_v1(expected["nodes"])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("GPU-11111111", "the beginning of 2 UUIDs: GPU-11111111-2222-4333-8444-0000000000aa, GPU-1"),
        ("3b:00.0", "several PCI domains"),
        ("2:0", "; valid are GPUs 0 to 3; MIG devices 1:0 to 1:2"),
    ],
)
def test_what_means_two_things_is_refused(
    mixed: SimNode, start: Start, carrier: str, value: str, complaint: str
) -> None:
    with pytest.raises(StartFailed) as failure, start(mixed, {DEVICES: value}, carrier=carrier):
        pass
    assert f"`{value}` in env {DEVICES}" in str(failure.value)
    assert complaint in str(failure.value)
