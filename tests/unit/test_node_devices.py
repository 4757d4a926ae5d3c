"""Device nodes, real and described."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from node_tree import MAJORS, NodeTree

from nvct.errors import ConfigError
from nvct.model import DeviceNode
from nvct.node.devices import Node, control_nodes, missing_node, node_reader


@pytest.fixture
def tree(tmp_path: Path) -> NodeTree:
    return NodeTree(tmp_path, nvml=b"")


def test_a_real_node_is_looked_at() -> None:
    status = os.stat("/dev/null")
    assert node_reader("/", "")("/dev/null") == Node("/dev/null", 1, 3, status.st_mode & 0o7777, 0, 0)


def test_links_files_and_folders_are_no_devices(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/null")
    (tmp_path / "file").touch()
    read = node_reader(str(tmp_path), "")
    assert [read(path) for path in ("/link", "/file", "/", "/absent")] == [None] * 4


def test_a_table_stands_in_for_nodes(tree: NodeTree) -> None:
    read = node_reader("/", str(tree.table))
    assert read("/dev/nvidia1") == Node("/dev/nvidia1", 195, 1, 0o660, 0, 27)
    assert read("/dev/null") is None


@pytest.mark.parametrize("text", ["", "{}x", '[{"path": "/dev/x", "type": "c"}]', "[1]", "7"])
def test_a_table_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    table = tmp_path / "nodes.json"
    table.write_text(text)
    with pytest.raises(ConfigError, match=str(table)):
        node_reader("/", str(table))


def test_an_absent_table_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nodes.json"):
        node_reader("/", str(tmp_path / "nodes.json"))


def test_all_control_nodes_are_found(tree: NodeTree) -> None:
    nodes, missing = control_nodes(node_reader("/", str(tree.table)), MAJORS, "/")
    assert missing == ()
    assert nodes == (
        DeviceNode("/dev/nvidiactl", 195, 255),
        DeviceNode("/dev/nvidia-uvm", 507, 0),
        DeviceNode("/dev/nvidia-uvm-tools", 507, 1),
        DeviceNode("/dev/nvidia-modeset", 195, 254),
    )


def test_an_absent_uvm_node_of_a_loaded_module_has_its_mknod(tree: NodeTree) -> None:
    tree.write_nodes(without=("/dev/nvidia-uvm",))
    nodes, missing = control_nodes(node_reader("/", str(tree.table)), MAJORS, "/drv")
    assert "/dev/nvidia-uvm" not in [node.path for node in nodes]
    (sentence,) = missing
    assert "mknod -m 666 /drv/dev/nvidia-uvm c 507 0" in sentence
    assert "CUDA" in sentence


def test_without_the_uvm_module_its_modprobe_is_said(tree: NodeTree) -> None:
    _, missing = control_nodes(node_reader("/", str(tree.table)), {"nvidia": 195}, "/")
    assert len(missing) == 2  # uvm and uvm-tools; nodes of a module that is not loaded are of no use
    assert all("modprobe nvidia-uvm" in sentence for sentence in missing)
    assert "CUDA will not work" in missing[0]


def test_a_node_from_another_boot_is_not_taken_for_the_modules(tree: NodeTree) -> None:
    read = node_reader("/", str(tree.table))
    assert missing_node(read, "/dev/nvidia-uvm", 507, 0, "/") == ""
    sentence = missing_node(read, "/dev/nvidia-uvm", 508, 0, "/")
    assert "is 507:0" in sentence
    assert "has 508:0: rm /dev/nvidia-uvm; mknod -m 666 /dev/nvidia-uvm c 508 0" in sentence


def test_only_character_devices_of_a_table_count(tmp_path: Path) -> None:
    table = tmp_path / "nodes.json"
    row = {"path": "/dev/b", "type": "b", "major": 1, "minor": 2, "mode": 0, "uid": 0, "gid": 0}
    table.write_text(json.dumps([row]))
    assert node_reader("/", str(table))("/dev/b") is None
