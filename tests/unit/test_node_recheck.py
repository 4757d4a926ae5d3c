"""What is handed out is read again: a change after discovery is never overlooked."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from node_tree import GPUS, MAJORS, NodeTree, capability, information, write

from nvct.errors import StaleInventory
from nvct.model import Gpu, Inventory, MigDevice, Roots
from nvct.node.recheck import recheck

MIG = MigDevice(0, "MIG-c", "3g.20gb", 2, 0, 19968, 21, 22)
OTHER_MIG = MigDevice(2, "MIG-d", "1g.5gb", 9, 0, 4864, 84, 85)
FIRST = Gpu(0, GPUS[0][1], 1, "00000000:47:00.0", "A100", "Nvidia", "8.0", 40536)
SECOND = Gpu(1, GPUS[1][1], 0, "00000000:07:00.0", "A100", "Nvidia", "8.0", 40536, True, (MIG, OTHER_MIG))


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path, nvml=b"")


def inventory(tree: NodeTree) -> Inventory:
    return Inventory("550.54.15", "12.4", "x86_64", Roots(proc_root=str(tree.proc)), MAJORS, (FIRST, SECOND))


def information_file(tree: NodeTree, gpu: Gpu) -> Path:
    return tree.proc / "driver/nvidia/gpus" / gpu.proc_name / "information"


def test_an_unchanged_node_passes(tree: NodeTree) -> None:
    recheck(inventory(tree), (FIRST,), (MIG, OTHER_MIG))


@pytest.mark.parametrize(
    "text", [information(GPUS[1][1], 1), information(GPUS[0][1], 0), information("GPU-????????-????", 0)]
)
def test_another_gpu_in_its_place_is_stale(tree: NodeTree, text: str) -> None:
    write(information_file(tree, FIRST), text)
    with pytest.raises(StaleInventory, match="GPU 0 .*information"):
        recheck(inventory(tree), (FIRST,), ())


def test_a_gpu_that_nothing_has_opened_yet_is_no_other_gpu(tree: NodeTree) -> None:
    write(information_file(tree, FIRST), information("GPU-????????-????-????-????-????????????", FIRST.minor))
    recheck(inventory(tree), (FIRST,), ())


def test_a_gpu_that_is_gone_is_stale(tree: NodeTree) -> None:
    shutil.rmtree(information_file(tree, FIRST).parent)
    with pytest.raises(StaleInventory, match="0000:47:00.0"):
        recheck(inventory(tree), (FIRST,), ())


def test_changes_of_gpus_that_are_not_handed_out_do_not_matter(tree: NodeTree) -> None:
    shutil.rmtree(information_file(tree, SECOND).parent)
    recheck(inventory(tree), (FIRST,), ())


def test_the_parent_of_a_mig_device_is_looked_at(tree: NodeTree) -> None:
    write(information_file(tree, SECOND), information(GPUS[1][1], 5))
    with pytest.raises(StaleInventory, match="minor of GPU 1 is 5"):
        recheck(inventory(tree), (), (MIG,))


@pytest.mark.parametrize("access", ["gi2/access", "gi2/ci0/access"])
def test_another_capability_minor_is_stale(tree: NodeTree, access: str) -> None:
    write(tree.proc / "driver/nvidia/capabilities/gpu0/mig" / access, capability(30))
    with pytest.raises(StaleInventory, match="MIG device 1:0 is 30"):
        recheck(inventory(tree), (), (MIG,))
    recheck(inventory(tree), (), (OTHER_MIG,))


def test_a_destroyed_mig_device_is_stale(tree: NodeTree) -> None:
    shutil.rmtree(tree.proc / "driver/nvidia/capabilities/gpu0/mig/gi2")
    with pytest.raises(StaleInventory, match="gi2/access"):
        recheck(inventory(tree), (), (MIG,))


def test_another_major_is_stale(tree: NodeTree) -> None:
    tree.write_majors({**MAJORS, "nvidia-uvm": 508})
    with pytest.raises(StaleInventory, match="majors"):
        recheck(inventory(tree), (), ())


def test_a_mig_device_of_no_gpu_is_stale(tree: NodeTree) -> None:
    stray = MigDevice(0, "MIG-x", "1g.5gb", 2, 0, 1, 21, 22)
    with pytest.raises(StaleInventory, match="MIG-x"):
        recheck(inventory(tree), (FIRST,), (stray,))
