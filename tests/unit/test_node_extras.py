"""Nodes that are not every container's: DRM, GPUDirect, NVSwitch, IMEX; and the MIG capabilities of the whole node."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from node_tree import NodeTree, capability, shared_object, write

from nvct.model import DeviceNode
from nvct.node import cache, extras
from nvct.node.devices import node_names, node_reader
from nvct.record import replace
from nvct.settings import Settings


def table(tmp_path: Path, nodes: dict[str, tuple[int, int]]) -> str:
    rows = [
        {"path": path, "type": "c", "major": major, "minor": minor, "mode": 0o666, "uid": 0, "gid": 0}
        for path, (major, minor) in nodes.items()
    ]
    return str(write(tmp_path / "nodes.json", json.dumps(rows)))


def found(tmp_path: Path, nodes: dict[str, tuple[int, int]]) -> dict[str, list[str]]:
    file = table(tmp_path, nodes)
    kinds = extras.extra_nodes(node_reader("/", file), node_names("/", file))
    return {kind: [node.path for node in kept] for kind, kept in kinds.items()}


def test_every_kind_in_the_order_of_its_numbers(tmp_path: Path) -> None:
    nodes = {
        "/dev/nvidia-fs10": (510, 10),
        "/dev/nvidia-fs2": (510, 2),
        "/dev/infiniband/rdma_cm": (10, 58),
        "/dev/infiniband/uverbs0": (231, 192),
        "/dev/gdrdrv": (508, 0),
        "/dev/nvidia-nvswitch0": (509, 0),
        "/dev/nvidia-nvswitchctl": (509, 255),
        "/dev/nvidia-caps-imex-channels/channel11": (505, 11),
        "/dev/nvidia-caps-imex-channels/channel3": (505, 3),
    }
    assert found(tmp_path, nodes) == {
        "gds": ["/dev/nvidia-fs2", "/dev/nvidia-fs10"],
        "mofed": ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"],
        "gdrcopy": ["/dev/gdrdrv"],
        "nvswitch": ["/dev/nvidia-nvswitchctl", "/dev/nvidia-nvswitch0"],
        "imex": ["/dev/nvidia-caps-imex-channels/channel3", "/dev/nvidia-caps-imex-channels/channel11"],
    }


@pytest.mark.parametrize(
    "path",
    ["/dev/nvidia0", "/dev/nvidia-fsx", "/dev/nvidia-fs01", "/dev/infiniband/umad0", "/dev/gdrdrv0a", "/dev/uverbs0"],
)
def test_other_names_are_no_extra_nodes(tmp_path: Path, path: str) -> None:
    assert found(tmp_path, {path: (1, 2)}) == {}


def test_a_link_is_no_node(tmp_path: Path) -> None:
    write(tmp_path / "dev/gdrdrv", "")
    (tmp_path / "dev/nvidia-fs0").symlink_to("/dev/null")
    read, names = node_reader(str(tmp_path), ""), node_names(str(tmp_path), "")
    assert sorted(names("/dev")) == ["gdrdrv", "nvidia-fs0"]
    assert names("/dev/infiniband") == []
    assert extras.extra_nodes(read, names) == {}


def drm(
    tmp_path: Path, numbers: dict[str, str], nodes: dict[str, tuple[int, int]]
) -> tuple[tuple[DeviceNode, ...], list[str]]:
    for name, text in numbers.items():
        write(tmp_path / f"bus/pci/devices/0000:07:00.0/drm/{name}/dev", text)
    return extras.drm_nodes(str(tmp_path), "0000:07:00.0", node_reader("/", table(tmp_path, nodes)), "/")


def test_drm_nodes_have_the_numbers_of_sysfs(tmp_path: Path) -> None:
    nodes = {"/dev/dri/card1": (226, 1), "/dev/dri/renderD129": (226, 129), "/dev/dri/card0": (226, 0)}
    assert drm(tmp_path, {"card1": "226:1\n", "renderD129": "226:129\n"}, nodes) == (
        (DeviceNode("/dev/dri/card1", 226, 1), DeviceNode("/dev/dri/renderD129", 226, 129)),
        [],
    )


def test_a_drm_node_of_other_numbers_is_left_out(tmp_path: Path) -> None:
    kept, missing = drm(tmp_path, {"card1": "226:1\n", "renderD129": "?"}, {"/dev/dri/card1": (226, 7)})
    assert kept == ()
    assert missing[0].startswith("/dev/dri/card1 is 226:7, the loaded module has 226:1")
    assert "renderD129/dev does not tell its numbers" in missing[1]


def test_without_nvidia_drm_there_is_nothing_to_miss(tmp_path: Path) -> None:
    assert drm(tmp_path, {}, {}) == ((), [])


def test_mig_minors(tmp_path: Path) -> None:
    folder = tmp_path / "driver/nvidia/capabilities/mig"
    assert extras.mig_minors(str(tmp_path)) == {}
    write(folder / "config", capability(1))
    write(folder / "monitor", capability(2))
    assert extras.mig_minors(str(tmp_path)) == {"config": 1, "monitor": 2}


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path, nvml=shared_object("libnvidia-ml.so.1"))


def test_a_kept_inventory_is_stale_when_such_nodes_appear(tree: NodeTree, tmp_path: Path) -> None:
    chosen = replace(tree.settings, device_table="", dev_root=str(tmp_path))
    (tmp_path / "dev/dri").mkdir(parents=True)
    os.utime(tmp_path / "dev/dri", (0, 0))  # the kernel's clock for files has ticks
    old = stamp(chosen)
    assert stamp(chosen) == old
    (tmp_path / "dev/dri/card0").touch()
    with_card = stamp(chosen)
    assert with_card != old
    (tmp_path / "dev/nvidia-fs0").touch()
    assert stamp(chosen) != with_card
    (tmp_path / "dev/nvidia-fs0").unlink()
    (tmp_path / "dev/sda").touch()
    assert stamp(chosen) == with_card  # other devices come and go without end


def stamp(chosen: Settings) -> object:
    return cache.stamp("/nonexistent", chosen)


def test_the_stamp_looks_where_discovery_looks() -> None:
    places = [place for kind in extras._EXTRA_NODES.values() for place in kind]
    for folder, stem in places:
        below_dev = folder.removeprefix("/dev")
        assert below_dev in cache._NODE_FOLDERS or (below_dev == "" and stem.startswith(cache._NODE_PREFIXES))
    assert os.path.commonpath(["/dri", *cache._NODE_FOLDERS]) == "/"
