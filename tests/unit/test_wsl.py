"""Nodes in the Windows Subsystem for Linux: what is found and planned, and what is said where a part is missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from node_tree import NodeTree

from nvct import ldcache, ldmerge, settings
from nvct.errors import DriverError, RequestError, StaleInventory
from nvct.model import BINARY, LIBRARY, WSL, Ask, Edits, Inventory, Request
from nvct.node import cache, wsl
from nvct.node.current import current
from nvct.node.discover import discover
from nvct.node.recheck import recheck
from nvct.node.saved import inventory_from_json, inventory_to_json
from nvct.plan import plan
from nvct.record import replace
from nvct.settings import Settings
from nvct.sim.errors import SimError
from nvct.sim.node import create, refuse_real_driver, spec_from_profile
from nvct.sim.spec import NodeSpec, NvmlBehaviour
from nvct.sim.wsl import LIBRARIES, LIBRARY_FOLDER, NVIDIA_STORE, OTHER_STORE, STORE

try:
    refuse_real_driver()
except SimError as error:
    pytest.skip(str(error), allow_module_level=True)

STORE_PATH = f"/{NVIDIA_STORE}"


class Node:
    """A simulated node whose parts a test may change, and its settings."""

    def __init__(self, folder: Path, spec: NodeSpec) -> None:
        self.folder = folder
        self.config = create(spec, folder).config

    @property
    def settings(self) -> Settings:
        return settings.load(self.config)

    def discover(self) -> Inventory:
        return discover(self.settings)


def test_the_hot_path_looks_where_discovery_does() -> None:
    assert cache.WSL_STORE == wsl.STORE


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node", spec_from_profile("wsl2"))


def asking(*tokens: str, capabilities: tuple[str, ...] | None = None) -> Request:
    asked = Ask("env NVIDIA_DRIVER_CAPABILITIES", capabilities) if capabilities else None
    return Request(devices=Ask("env NVIDIA_VISIBLE_DEVICES", tokens), capabilities=asked)


def planned(inventory: Inventory, *tokens: str, capabilities: tuple[str, ...] | None = None) -> Edits:
    return plan(inventory, asking(*tokens, capabilities=capabilities), Settings())


def test_the_gpus_are_those_of_nvml_and_have_no_minors(node: Node) -> None:
    spec = spec_from_profile("wsl2")
    inventory = node.discover()
    assert (inventory.kind, inventory.driver_version, inventory.cuda_version) == (WSL, "551.61", "12.4")
    assert [(gpu.index, gpu.uuid, gpu.minor, gpu.brand) for gpu in inventory.gpus] == [
        (index, gpu.uuid, -1, "GeForce") for index, gpu in enumerate(spec.gpus)
    ]
    assert [(one.path, one.minor) for one in inventory.nodes] == [("/dev/dxg", 0)]
    assert (inventory.majors, inventory.missing) == ({}, ())


def test_the_files_are_those_of_nvidias_driver_store(node: Node) -> None:
    files = node.discover().files
    libraries = {os.path.basename(file.path): file.soname for file in files if file.kind == LIBRARY}
    assert libraries == {**LIBRARIES, "libnvidia-ml.so.1": "libnvidia-ml.so.1", "libdxcore.so": "libdxcore.so"}
    assert [file.path for file in files if file.kind == BINARY] == [f"{STORE_PATH}/nvidia-smi"]
    assert not [file.path for file in files if file.path.startswith(f"/{OTHER_STORE}")]


@pytest.mark.parametrize("name", ["aaa_first.inf", "zzz_last.inf"])
def test_another_makers_adapter_is_passed_over_wherever_it_is_listed(node: Node, name: str) -> None:
    (node.folder / OTHER_STORE).rename(node.folder / STORE / name)
    inventory = node.discover()
    assert len(inventory.gpus) == 2
    assert inventory.missing == ()


def test_of_two_drivers_the_newer_answers_and_both_are_shown(node: Node) -> None:
    old = node.folder / STORE / "nvlt.inf_amd64_00"
    shutil.copytree(node.folder / NVIDIA_STORE, old)
    (old / "libnvidia-ml.so.1").unlink()  # a driver's files are read-only, for ordinary users too
    (old / "libnvidia-ml.so.1").write_bytes(b"\x7fELF of another time")
    os.utime(old / "libnvidia-ml.so.1", (1, 1))
    inventory = node.discover()
    assert len(inventory.gpus) == 2
    edits = planned(inventory, "all")
    targets = {mount.target for mount in edits.mounts}
    assert {f"{STORE_PATH}/libcuda.so.1.1", f"/{STORE}/{old.name}/libcuda.so.1.1"} <= targets
    assert {edit.path for edit in edits.loader_cache if edit.name == "libcuda.so.1"} == {
        f"{STORE_PATH}/libcuda_loader.so"
    }
    (smi,) = [mount for mount in edits.mounts if mount.target == "/usr/bin/nvidia-smi"]
    assert smi.source == f"{node.folder}{STORE_PATH}/nvidia-smi"


@pytest.mark.parametrize("how", ["link", "cache"])
def test_libdxcore_is_found_behind_a_link_and_through_the_loader_cache(node: Node, how: str) -> None:
    usual = node.folder / LIBRARY_FOLDER / "libdxcore.so"
    other = node.folder / "usr/lib/other/libdxcore.so.5"
    other.parent.mkdir()
    usual.rename(other)
    if how == "link":
        usual.symlink_to("/usr/lib/other/libdxcore.so.5")
    else:
        flags = ldcache.flags_for(os.uname().machine, 64)
        entries = [("libdxcore.so", "/usr/lib/other/libdxcore.so.5", flags)]
        (node.folder / "etc/ld.so.cache").write_bytes(ldmerge.merge(None, entries))
    edits = planned(node.discover(), "all")
    (mount,) = [mount for mount in edits.mounts if mount.target.endswith("libdxcore.so")]
    assert (mount.source, mount.target) == (str(other), f"/{LIBRARY_FOLDER}/libdxcore.so")
    assert ("libdxcore.so", f"/{LIBRARY_FOLDER}/libdxcore.so") in [(e.name, e.path) for e in edits.loader_cache]


def failure(node: Node) -> str:
    with pytest.raises(DriverError) as refused:
        node.discover()
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_without_libdxcore_there_is_no_driver(node: Node) -> None:
    (node.folder / LIBRARY_FOLDER / "libdxcore.so").unlink()
    message = failure(node)
    assert f"{node.folder}/{LIBRARY_FOLDER}/libdxcore.so" in message
    assert "wsl --update" in message


def test_without_a_driver_of_nvidia_the_folders_are_named(node: Node) -> None:
    shutil.rmtree(node.folder / NVIDIA_STORE)
    message = failure(node)
    assert f"no NVIDIA driver in {node.folder}/{STORE}: only {os.path.basename(OTHER_STORE)}" in message
    shutil.rmtree(node.folder / STORE)
    assert "No such file or directory" in failure(node)


def test_what_the_driver_lacks_is_missing(node: Node) -> None:
    (node.folder / NVIDIA_STORE / "libcuda_loader.so").unlink()
    (node.folder / NVIDIA_STORE / "libcuda.so.1.1").unlink()
    (node.folder / NVIDIA_STORE / "libcuda.so.1.1").write_text("no ELF")
    missing = node.discover().missing
    assert any("no libcuda_loader.so" in sentence for sentence in missing)
    assert any("libcuda.so.1.1 is no sound ELF file" in sentence for sentence in missing)


def test_without_an_answer_of_nvml_all_can_still_be_asked_for(tmp_path: Path) -> None:
    silent = Node(tmp_path / "node", replace(spec_from_profile("wsl2"), nvml=NvmlBehaviour(init="no_permission")))
    inventory = silent.discover()
    assert inventory.gpus == ()
    assert "only `all` can be asked for" in inventory.missing[0]
    assert f"{silent.folder}/dev/dxg" in inventory.missing[0]
    edits = plan(inventory, replace(asking("all"), requirements=(Ask("env R", ("cuda>=12.0",)),)), Settings())
    assert [device.path for device in edits.devices] == ["/dev/dxg"]
    with pytest.raises(RequestError, match="this node has no GPU"):
        planned(inventory, "0")


def test_every_request_gets_the_one_device(node: Node) -> None:
    inventory = node.discover()
    edits = planned(inventory, "all")
    assert [(device.path, device.source) for device in edits.devices] == [("/dev/dxg", f"{node.folder}/dev/dxg")]
    assert (edits.proc, edits.links, edits.warnings) == (None, (), ())
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert all(edit.why for edit in (*edits.devices, *edits.mounts, *edits.loader_cache))
    assert {mount.options for mount in edits.mounts} == {("ro", "nosuid", "nodev")}


@pytest.mark.parametrize("form", ["index", "uuid"])
def test_a_single_gpu_among_several_is_given_with_a_warning(node: Node, form: str) -> None:
    inventory = node.discover()
    edits = planned(inventory, "1" if form == "index" else inventory.gpus[1].uuid)
    assert len(edits.devices) == 1
    assert len(edits.warnings) == 1
    assert "WSL cannot separate GPUs" in edits.warnings[0]
    assert "also 0," in edits.warnings[0]


def test_one_gpu_needs_no_warning(tmp_path: Path) -> None:
    alone = Node(tmp_path / "node", spec_from_profile("wsl2", gpus=1))
    assert planned(alone.discover(), "0").warnings == ()


def test_none_gets_the_driver_and_no_device(node: Node) -> None:
    edits = planned(node.discover(), "none")
    assert edits.devices == ()
    assert edits.mounts


@pytest.mark.parametrize("token", ["0:0", "MIG-11111111-0000-5000-8000-000000000001", "2", "gpu"])
def test_what_is_not_there_is_refused(node: Node, token: str) -> None:
    with pytest.raises(RequestError, match="valid are"):
        planned(node.discover(), token)


def test_nvidia_smi_comes_with_utility_only(node: Node) -> None:
    inventory = node.discover()
    targets = [
        {mount.target for mount in planned(inventory, "all", capabilities=(capability,)).mounts}
        for capability in ("utility", "compute")
    ]
    assert targets[0] - targets[1] == {"/usr/bin/nvidia-smi"}
    assert targets[1] < targets[0]


def test_what_wsl_has_not_is_left_out_with_a_reason(node: Node) -> None:
    request = replace(asking("all"), extras={"gds": Ask("env NVIDIA_GDS", ("enabled",))})
    edits = plan(node.discover(), request, Settings())
    assert [left.what for left in edits.left_out] == ["env NVIDIA_GDS"]


def test_each_name_means_one_library(node: Node) -> None:
    cache_lines = planned(node.discover(), "all").loader_cache
    names = {edit.name: os.path.basename(edit.path) for edit in cache_lines}
    assert len(names) == len(cache_lines)
    assert names["libcuda.so.1"] == names["libcuda.so"] == "libcuda_loader.so"
    assert names["libnvidia-ml.so.1"] == "libnvidia-ml.so.1"


def test_an_inventory_survives_json(node: Node) -> None:
    inventory = node.discover()
    assert inventory_from_json(inventory_to_json(inventory)) == inventory


def test_a_new_driver_of_windows_makes_the_inventory_stale(node: Node, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    found = current(node.config, run_dir)
    assert found.warnings == ()
    assert cache.load(node.config, run_dir) == (node.settings, found.inventory)
    recheck(found.inventory, found.inventory.gpus, ())
    (node.folder / NVIDIA_STORE).rename(node.folder / STORE / "nv_dispi.inf_amd64_ffffffff")
    assert cache.load(node.config, run_dir) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_another_number_of_the_device_makes_the_inventory_stale(node: Node, tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    current(node.config, run_dir)
    (node.folder / "dev/dxg").unlink()
    os.mknod(node.folder / "dev/dxg", 0o020666, os.makedev(10, 250))
    assert cache.load(node.config, run_dir) is None


def test_a_loaded_module_that_appears_makes_it_no_wsl_node(node: Node) -> None:
    inventory = node.discover()
    write = node.folder / "proc/devices"
    write.write_text("Character devices:\n195 nvidia\n")
    with pytest.raises(StaleInventory):
        recheck(inventory, inventory.gpus, ())


@pytest.mark.parametrize("sign", ["release", "family"])
@pytest.mark.parametrize("module", [False, True])
def test_a_jetson_without_nvml_is_refused_in_one_sentence(tmp_path: Path, sign: str, module: bool) -> None:
    tree = NodeTree(tmp_path)
    shutil.rmtree(tree.root / "usr")
    if not module:
        shutil.rmtree(tree.proc / "driver")
    chosen = replace(tree.settings, sys_root=str(tmp_path / "sys"))
    place = tree.root / "etc/nv_tegra_release" if sign == "release" else tmp_path / "sys/devices/soc0/family"
    place.parent.mkdir(parents=True)
    place.write_text("Tegra\n")
    with pytest.raises(DriverError) as refused:
        discover(chosen)
    assert str(refused.value).startswith(f"this is a Jetson ({place}) without NVML")


def test_another_chip_is_no_jetson(tmp_path: Path) -> None:
    tree = NodeTree(tmp_path)
    shutil.rmtree(tree.proc / "driver")
    (tmp_path / "sys/devices/soc0").mkdir(parents=True)
    (tmp_path / "sys/devices/soc0/family").write_text("Freescale i.MX\n")
    with pytest.raises(DriverError, match="no NVIDIA driver is loaded"):
        discover(replace(tree.settings, sys_root=str(tmp_path / "sys")))
