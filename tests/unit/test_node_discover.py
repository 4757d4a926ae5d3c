"""Discovery: from a node tree to an inventory, through the real pynvml in a child process; and each way to fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from node_tree import ACCESS, MACHINE, MAJORS, TRIPLET, VERSION, NodeTree, fake_nvml, write

from nvct import ldcache, ldmerge
from nvct.errors import DriverError
from nvct.model import DeviceNode, Gpu, MigDevice, Roots
from nvct.node import nvml
from nvct.node.discover import discover
from nvct.node.mig import profile_name
from nvct.record import replace

FIRST = Gpu(
    index=0,
    uuid="GPU-aaaaaaaa-0000-0000-0000-000000000000",
    minor=1,
    bus_id="00000000:47:00.0",
    model="NVIDIA A100-SXM4-40GB",
    brand="Nvidia",
    compute_capability="8.0",
    memory_mib=40536,
)
SECOND = Gpu(
    index=1,
    uuid="GPU-bbbbbbbb-0000-0000-0000-000000000001",
    minor=0,
    bus_id="00000000:07:00.0",
    model="NVIDIA A100-SXM4-40GB",
    brand="Nvidia",
    compute_capability="8.0",
    memory_mib=40536,
    mig_enabled=True,
    mig_devices=(
        MigDevice(0, "MIG-cccccccc-0000-0000-0000-000000000000", "3g.20gb", 2, 0, 19968, 21, 22),
        MigDevice(2, "MIG-dddddddd-0000-0000-0000-000000000001", "1g.5gb", 9, 0, 4864, 84, 85),
    ),
)


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path)


def node_with(tmp_path: Path, *options: str) -> NodeTree:
    return NodeTree(tmp_path, nvml=fake_nvml(*options))


def failure(tree: NodeTree) -> str:
    with pytest.raises(DriverError) as caught:
        discover(tree.settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_node(tree: NodeTree) -> None:
    inventory = discover(tree.settings)
    assert (inventory.driver_version, inventory.cuda_version) == (VERSION, "12.4")
    assert inventory.architecture == MACHINE
    assert inventory.roots == Roots(str(tree.root), str(tree.folder), str(tree.proc))
    assert inventory.majors == MAJORS
    assert inventory.gpus == (FIRST, SECOND)
    assert DeviceNode("/dev/nvidiactl", 195, 255) in inventory.nodes
    assert [os.path.basename(file.path) for file in inventory.files] == [
        f"libnvidia-ml.so.{VERSION}",
        f"libcuda.so.{VERSION}",
    ]


def test_each_incomplete_capability_is_named_with_what_it_lacks(tree: NodeTree) -> None:
    missing = discover(tree.settings).missing
    assert f"capability utility is incomplete: no libnvidia-cfg.so.{VERSION}, nvidia-smi" in missing
    assert any(sentence.startswith("capability video") and "libnvidia-encode.so" in sentence for sentence in missing)


def test_capability_minors_come_from_the_gpus_minor_not_its_index(tree: NodeTree) -> None:
    write(tree.proc / "driver/nvidia/capabilities/gpu1/mig/gi9/access", "DeviceFileMinor: 999\n")
    assert discover(tree.settings).gpus[1].mig_devices[1].gi_minor == ACCESS["gpu0/mig/gi9/access"]


def test_a_driver_without_a_gpu_is_an_inventory(tmp_path: Path) -> None:
    assert discover(node_with(tmp_path, "-DGPUS=0").settings).gpus == ()


def test_a_lost_gpu_does_not_hide_the_others(tmp_path: Path) -> None:
    inventory = discover(node_with(tmp_path, "-DLOST").settings)
    assert inventory.gpus == (SECOND,)
    assert any("GPU 0 is left out" in sentence and "GPU is lost" in sentence for sentence in inventory.missing)


def test_profiles_of_drivers_that_do_not_name_mig_devices(tmp_path: Path) -> None:
    devices = discover(node_with(tmp_path, "-DNAMELESS").settings).gpus[1].mig_devices
    assert [device.profile for device in devices] == ["3g.20gb", "1g.5gb"]


@pytest.mark.parametrize(
    ("total_mib", "memory_mib", "slices", "name"),
    [
        (40536, 4864, (1, 1), "1g.5gb"),
        (40536, 19968, (3, 1), "1c.3g.20gb"),
        (143771, 71168, (3, 3), "3g.71gb"),  # 70.5 is rounded up, which Python's round() does not
        (183359, 22528, (1, 1), "1g.23gb"),
        (24258, 5952, (1, 1), "1g.6gb"),
    ],
)
def test_profile_names_from_attributes(total_mib: int, memory_mib: int, slices: tuple[int, int], name: str) -> None:
    device: nvml.MigAnswer = {
        "index": 0,
        "uuid": "MIG-x",
        "name": "",
        "gi": 1,
        "ci": 0,
        "gi_slices": slices[0],
        "ci_slices": slices[1],
        "memory_mib": memory_mib,
    }
    assert profile_name(device, total_mib << 20) == name


def test_a_mig_device_without_capability_is_left_out_and_told(tree: NodeTree) -> None:
    shutil.rmtree(tree.proc / "driver/nvidia/capabilities/gpu0/mig/gi9")
    inventory = discover(tree.settings)
    assert [device.gi for device in inventory.gpus[1].mig_devices] == [2]
    assert any("MIG device 1:2" in sentence and "gi9/access" in sentence for sentence in inventory.missing)


def test_absent_nodes_of_gpus_and_capabilities_are_told_with_their_mknod(tree: NodeTree) -> None:
    tree.write_nodes(without=("/dev/nvidia1", "/dev/nvidia-caps/nvidia-cap85"))
    missing = discover(tree.settings).missing
    assert (
        f"GPU 0 cannot be used: {tree.folder}/dev/nvidia1 is absent: mknod -m 666 {tree.folder}/dev/nvidia1 c 195 1"
        in missing
    )
    assert any("MIG device 1:2" in sentence and "nvidia-cap85 c 237 85" in sentence for sentence in missing)


def test_no_driver_at_all(tree: NodeTree) -> None:
    shutil.rmtree(tree.proc / "driver")
    shutil.rmtree(tree.root / "usr")
    message = failure(tree)
    assert message.startswith("no NVIDIA driver:")
    assert f"{tree.proc}/driver/nvidia/version" in message


@pytest.mark.parametrize("name", ["root", "proc"])
def test_a_root_that_is_not_there_is_said_and_nothing_else(tree: NodeTree, name: str) -> None:
    if name == "root":
        shutil.rmtree(tree.proc / "driver")
    shutil.rmtree(getattr(tree, name))
    setting = "root" if name == "root" else "proc_root"
    assert failure(tree).startswith(
        f"{setting} is {getattr(tree, name)}, and there is no such folder: set {setting} to"
    )


def test_libraries_without_a_loaded_module(tree: NodeTree) -> None:
    shutil.rmtree(tree.proc / "driver")
    message = failure(tree)
    assert "is loaded" in message
    assert f"{tree.root}{TRIPLET}/libnvidia-ml.so.{VERSION}" in message
    assert "modprobe nvidia" in message


def test_a_module_without_libraries(tree: NodeTree) -> None:
    shutil.rmtree(tree.root / "usr")
    message = failure(tree)
    assert f"kernel module {VERSION} is loaded" in message
    assert f"no libnvidia-ml.so.{VERSION}" in message
    assert "/usr/lib64" in message


def test_libraries_elsewhere_in_the_root(tree: NodeTree) -> None:
    shutil.rmtree(tree.root / "usr")
    path = tree.library("libnvidia-ml.so", folder="/opt/nvidia/lib64")
    message = failure(tree)
    assert "elsewhere" in message
    assert str(path) in message
    assert "library_search_path: [/opt/nvidia/lib64]" in message


def test_libraries_of_another_version_than_the_module(tree: NodeTree) -> None:
    shutil.rmtree(tree.root / "usr")
    path = tree.library("libnvidia-ml.so", version="460.73.01")
    message = failure(tree)
    assert "driver/library version mismatch" in message
    assert f"kernel module is {VERSION} (read in {tree.proc}/driver/nvidia/version)" in message
    assert f"460.73.01 ({path})" in message
    assert "reboot" in message


def test_the_four_verdicts_are_four_texts(tmp_path: Path) -> None:
    messages = []
    for number, remove in enumerate((("proc/driver", "root/usr"), ("root/usr",), ("root/usr",), ("root/usr",))):
        folder = tmp_path / str(number)
        folder.mkdir()
        tree = NodeTree(folder)
        for path in remove:
            shutil.rmtree(folder / path)
        if number == 2:
            tree.library("libnvidia-ml.so", folder="/usr/local/lib")
        if number == 3:
            tree.library("libnvidia-ml.so", version="1.2")
        messages.append(failure(tree).split(":")[0].split(" is ")[0])
    assert len(set(messages)) == 4


def test_a_stale_loader_cache_is_told_when_the_libraries_are_gone(tree: NodeTree) -> None:
    shutil.rmtree(tree.root / "usr")
    line = ("libcuda.so.1", f"{TRIPLET}/libcuda.so.1", ldcache.flags_for(MACHINE, 64))
    write(tree.root / "etc/ld.so.cache", ldmerge.merge(None, [line]))
    message = failure(tree)
    assert "loader cache is stale" in message
    assert f"{TRIPLET}/libcuda.so.1" in message
    assert "run ldconfig" in message


def test_nvml_of_another_version_than_its_file_name(tmp_path: Path) -> None:
    message = failure(node_with(tmp_path, '-DVERSION="535.54.03"'))
    assert "mismatch" in message
    assert "535.54.03" in message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (18, ["mismatch", VERSION, "reboot"]),
        (4, ["permission", "mode 0660", "owner 0:27", f"user {os.geteuid()}"]),
        (9, ["not loaded", "/dev/nvidiactl exists", "nvidia-modprobe"]),
        (999, ["code 999", "dmesg"]),
    ],
)
def test_each_refusal_of_nvml_says_what_to_do(tmp_path: Path, code: int, words: list[str]) -> None:
    message = failure(node_with(tmp_path, f"-DINIT={code}"))
    assert [word for word in words if word not in message] == []
    assert f"libnvidia-ml.so.{VERSION}" in message


def test_a_slow_nvml_is_given_up_after_the_limit(tmp_path: Path) -> None:
    tree = node_with(tmp_path, "-DDELAY_S=30")
    tree.settings = replace(tree.settings, nvml_timeout_s=0.5)
    started = time.monotonic()
    message = failure(tree)
    assert time.monotonic() - started < 10
    assert "limit nvml_timeout_s of 0.5 s" in message
    assert "waited 0." in message
    assert "persistence mode" in message


def test_a_crash_of_nvml_is_an_error_of_its_own(tmp_path: Path) -> None:
    assert "SIGABRT" in failure(node_with(tmp_path, "-DCRASH"))


def test_a_library_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    library = tree.root / TRIPLET[1:] / f"libnvidia-ml.so.{VERSION}"
    content = bytearray(library.read_bytes())
    start = content.index(b"libc.so.6")
    content[start : start + 9] = b"libZ.so.6"
    library.write_bytes(content)
    message = failure(tree)
    assert "cannot be loaded" in message
    assert "libZ.so.6" in message


def test_the_environment_does_not_reach_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A preloaded library would run before the probe; here it would end it."""
    evil = tmp_path / "evil.so"
    source = write(
        tmp_path / "evil.c", "#include <unistd.h>\n__attribute__((constructor)) void f(void) { _exit(7); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(evil), str(source)], check=True)
    assert subprocess.run([sys.executable, "-c", "pass"], env={"LD_PRELOAD": str(evil)}).returncode == 7
    folder = tmp_path / "node"
    folder.mkdir()
    tree = NodeTree(folder)
    monkeypatch.setenv("LD_PRELOAD", str(evil))
    assert len(discover(tree.settings).gpus) == 2
